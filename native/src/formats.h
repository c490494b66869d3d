// The block formats of GGUF files (ggml-common.h), each described once for scalars and once for eight rows at a time.
//
// A group of 8 rows is interleaved by units: of each block, first the first unit of all rows, then the second. A unit is
// a float16, a byte, or a word of 4 bytes, so that one load of 32 bytes holds the same word of 8 rows: one lane is one
// row, and no sum crosses lanes.
#pragma once
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernels.h"

namespace asbuilt {
namespace KERNELS {

inline float half(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  uint32_t made;
  if (exponent == 31) {
    made = sign | 0x7f800000u | fraction << 13;
  } else if (exponent) {
    made = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&made, &small, 4);
    made |= sign;
  }
  float out;
  std::memcpy(&out, &made, 4);
  return out;
}

// To nearest, to even; what is too large becomes infinite.
inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
  if (bits < 0x38800000u) {  // subnormal: in steps of 2^-24
    float small;
    std::memcpy(&small, &bits, 4);
    return sign | static_cast<uint16_t>(__builtin_rintf(small * 0x1p24f));
  }
  return sign | static_cast<uint16_t>((bits + 0xfff + (bits >> 13 & 1) - 0x38000000u) >> 13);
}

// The bytes of one row's block, wherever they lie.
template <class F>
struct Bytes {
  const uint8_t* base;
  int row;  // of the group, or -1: as in files
  uint8_t operator[](int i) const {
    if (row < 0) return base[i];
    int start = 0;
    for (int size : F::units) {
      if (i < start + size) return base[kRows * start + row * size + i - start];
      start += size;
    }
    return 0;
  }
  float half_at(int i) const { return half(static_cast<uint16_t>((*this)[i] | (*this)[i + 1] << 8)); }
};

// value = scale[i / SUB] * code[i] + offset[i / SUB]
template <class F>
struct Decoded {
  int code[F::VALUES];
  float scale[F::VALUES / F::SUB], offset[F::VALUES / F::SUB];
};

#define UNITS(...)                                    \
  static constexpr int units[] = {__VA_ARGS__};       \
  static constexpr int BYTES = [] {                   \
    int total = 0;                                    \
    for (int size : units) total += size;             \
    return total;                                     \
  }()

#define WORDS4 4, 4, 4, 4
#define WORDS8 WORDS4, WORDS4
#define WORDS16 WORDS8, WORDS8
#define WORDS32 WORDS16, WORDS16

#ifdef __AVX2__
using Words = __m256i;
using Lanes = __m256;
inline Words words(const uint8_t* w, int start) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + kRows * start));
}
inline Lanes halves(const uint8_t* w, int start) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + kRows * start)));
}
inline Words all(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
inline Words low4(Words x) { return _mm256_and_si256(x, all(15)); }
inline Words high4(Words x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), all(15)); }
inline Words bits(Words x, int shift, int mask) { return _mm256_and_si256(_mm256_srli_epi16(x, shift), all(mask)); }
// Byte `i` of each word as a float.
inline Lanes byte_of(Words x, int i) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, 8 * i), _mm256_set1_epi32(255)));
}
inline Lanes signed_byte_of(Words x, int i) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * i), 24));
}
#endif

struct Q4_0 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = false;
  UNITS(2, WORDS4);
  static void decode(const Bytes<Q4_0>& b, Decoded<Q4_0>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4;
    out.scale[0] = b.half_at(0);
    out.offset[0] = -8 * out.scale[0];
  }
#ifdef __AVX2__
  Lanes d;
  explicit Q4_0(const uint8_t* w) : d(halves(w, 0)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_mul_ps(d, _mm256_set1_ps(-8)); }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 2 + 4 * (c & 3));
    return c < 4 ? low4(x) : high4(x);
  }
#endif
};

struct Q4_1 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = false;
  UNITS(2, 2, WORDS4);
  static void decode(const Bytes<Q4_1>& b, Decoded<Q4_1>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = i < 16 ? b[4 + i] & 15 : b[4 + i - 16] >> 4;
    out.scale[0] = b.half_at(0);
    out.offset[0] = b.half_at(2);
  }
#ifdef __AVX2__
  Lanes d, m;
  explicit Q4_1(const uint8_t* w) : d(halves(w, 0)), m(halves(w, 2)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = m; }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 4 + 4 * (c & 3));
    return c < 4 ? low4(x) : high4(x);
  }
#endif
};

#ifdef __AVX2__
// Bits 4c .. 4c + 3 of each word as bytes of 16 or 0.
inline Words fifth_bits(Words high, int c) {
  const int at = c / 2;
  const Words spread = _mm256_shuffle_epi8(
      high, _mm256_set_epi8(12 + at, 12 + at, 12 + at, 12 + at, 8 + at, 8 + at, 8 + at, 8 + at, 4 + at, 4 + at, 4 + at,
                            4 + at, at, at, at, at, 12 + at, 12 + at, 12 + at, 12 + at, 8 + at, 8 + at, 8 + at, 8 + at,
                            4 + at, 4 + at, 4 + at, 4 + at, at, at, at, at));
  const Words mask = _mm256_set1_epi32(c & 1 ? static_cast<int>(0x80402010u) : 0x08040201);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask), all(16));
}
#endif

struct Q5_0 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 31;
  static constexpr bool SIGNED = false;
  UNITS(2, 4, WORDS4);
  static void decode(const Bytes<Q5_0>& b, Decoded<Q5_0>& out) {
    for (int i = 0; i < 32; ++i)
      out.code[i] = (i < 16 ? b[6 + i] & 15 : b[6 + i - 16] >> 4) | (b[2 + i / 8] >> i % 8 & 1) << 4;
    out.scale[0] = b.half_at(0);
    out.offset[0] = -16 * out.scale[0];
  }
#ifdef __AVX2__
  Lanes d;
  explicit Q5_0(const uint8_t* w) : d(halves(w, 0)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_mul_ps(d, _mm256_set1_ps(-16)); }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 6 + 4 * (c & 3));
    return _mm256_or_si256(c < 4 ? low4(x) : high4(x), fifth_bits(words(w, 2), c));
  }
#endif
};

struct Q5_1 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 31;
  static constexpr bool SIGNED = false;
  UNITS(2, 2, 4, WORDS4);
  static void decode(const Bytes<Q5_1>& b, Decoded<Q5_1>& out) {
    for (int i = 0; i < 32; ++i)
      out.code[i] = (i < 16 ? b[8 + i] & 15 : b[8 + i - 16] >> 4) | (b[4 + i / 8] >> i % 8 & 1) << 4;
    out.scale[0] = b.half_at(0);
    out.offset[0] = b.half_at(2);
  }
#ifdef __AVX2__
  Lanes d, m;
  explicit Q5_1(const uint8_t* w) : d(halves(w, 0)), m(halves(w, 2)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = m; }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 8 + 4 * (c & 3));
    return _mm256_or_si256(c < 4 ? low4(x) : high4(x), fifth_bits(words(w, 4), c));
  }
#endif
};

struct Q8_0 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 128;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS8);
  static void decode(const Bytes<Q8_0>& b, Decoded<Q8_0>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = static_cast<int8_t>(b[2 + i]);
    out.scale[0] = b.half_at(0);
    out.offset[0] = 0;
  }
#ifdef __AVX2__
  Lanes d;
  explicit Q8_0(const uint8_t* w) : d(halves(w, 0)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_setzero_ps(); }
  static Words codes(const uint8_t* w, int c) { return words(w, 2 + 4 * c); }
#endif
};

struct Q2_K {
  static constexpr int VALUES = 256, SUB = 16, MOST = 3;
  static constexpr bool SIGNED = false;
  UNITS(WORDS4, WORDS16, 2, 2);
  static void decode(const Bytes<Q2_K>& b, Decoded<Q2_K>& out) {
    for (int i = 0; i < 256; ++i) out.code[i] = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    for (int s = 0; s < 16; ++s) {
      out.scale[s] = b.half_at(80) * static_cast<float>(b[s] & 15);
      out.offset[s] = -b.half_at(82) * static_cast<float>(b[s] >> 4);
    }
  }
#ifdef __AVX2__
  const uint8_t* w;
  Lanes d, m;
  explicit Q2_K(const uint8_t* w) : w(w), d(halves(w, 80)), m(halves(w, 82)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    const Words x = words(w, sub / 4 * 4);
    scale = _mm256_mul_ps(d, byte_of(low4(x), sub % 4));
    offset = _mm256_mul_ps(m, _mm256_sub_ps(_mm256_setzero_ps(), byte_of(high4(x), sub % 4)));
  }
  static Words codes(const uint8_t* w, int c) { return bits(words(w, 16 + c / 32 * 32 + c % 8 * 4), c % 32 / 8 * 2, 3); }
#endif
};

struct Q3_K {
  static constexpr int VALUES = 256, SUB = 16, MOST = 7;
  static constexpr bool SIGNED = false;
  UNITS(WORDS8, WORDS16, 4, 4, 4, 2);
  static void decode(const Bytes<Q3_K>& b, Decoded<Q3_K>& out) {
    for (int i = 0; i < 256; ++i)
      out.code[i] = (b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (b[i % 32] >> i / 32 & 1) << 2;
    for (int s = 0; s < 16; ++s) {
      const int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4, high = b[104 + s % 4] >> s / 4 * 2 & 3;
      out.scale[s] = b.half_at(108) * static_cast<float>((low | high << 4) - 32);
      out.offset[s] = -4 * out.scale[s];
    }
  }
#ifdef __AVX2__
  const uint8_t* w;
  Lanes d;
  explicit Q3_K(const uint8_t* w) : w(w), d(halves(w, 108)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    const Words x = words(w, 96 + sub / 4 % 2 * 4), low = sub < 8 ? low4(x) : high4(x);
    const Words high = bits(words(w, 104), sub / 4 * 2, 3);
    const Lanes six = byte_of(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)), sub % 4);
    scale = _mm256_mul_ps(d, _mm256_sub_ps(six, _mm256_set1_ps(32)));
    offset = _mm256_mul_ps(scale, _mm256_set1_ps(-4));
  }
  static Words codes(const uint8_t* w, int c) {
    const Words low = bits(words(w, 32 + c / 32 * 32 + c % 8 * 4), c % 32 / 8 * 2, 3);
    return _mm256_or_si256(low, _mm256_slli_epi16(bits(words(w, c % 8 * 4), c / 8, 1), 2));
  }
#endif
};

// Eight scales and eight minima of six bits from twelve bytes, as Q4_K and Q5_K have them.
inline int six_bits(int first, int second, int third, bool least, int s) {
  // `first`, `second`, `third`: bytes s % 4 of the three words
  if (s < 4) return (least ? second : first) & 63;
  return least ? (third >> 4) | (second >> 6) << 4 : (third & 15) | (first >> 6) << 4;
}
#ifdef __AVX2__
struct SixBits {
  Words scale[2], least[2];
  SixBits(const uint8_t* w, int start) {
    const Words a = words(w, start), b = words(w, start + 4), c = words(w, start + 8);
    scale[0] = _mm256_and_si256(a, all(63));
    scale[1] = _mm256_or_si256(low4(c), _mm256_slli_epi16(bits(a, 6, 3), 4));
    least[0] = _mm256_and_si256(b, all(63));
    least[1] = _mm256_or_si256(high4(c), _mm256_slli_epi16(bits(b, 6, 3), 4));
  }
};
#endif

struct Q4_K {
  static constexpr int VALUES = 256, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = false;
  UNITS(2, 2, 4, 4, 4, WORDS32);
  static void decode(const Bytes<Q4_K>& b, Decoded<Q4_K>& out) {
    for (int i = 0; i < 256; ++i) out.code[i] = b[16 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
    for (int s = 0; s < 8; ++s) {
      const int at = 4 + s % 4;
      out.scale[s] = b.half_at(0) * static_cast<float>(six_bits(b[at], b[at + 4], b[at + 8], false, s));
      out.offset[s] = -b.half_at(2) * static_cast<float>(six_bits(b[at], b[at + 4], b[at + 8], true, s));
    }
  }
#ifdef __AVX2__
  Lanes d, m;
  SixBits six;
  explicit Q4_K(const uint8_t* w) : d(halves(w, 0)), m(halves(w, 2)), six(w, 4) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, byte_of(six.scale[sub / 4], sub % 4));
    offset = _mm256_mul_ps(m, _mm256_sub_ps(_mm256_setzero_ps(), byte_of(six.least[sub / 4], sub % 4)));
  }
  static Words codes(const uint8_t* w, int c) { return bits(words(w, 16 + c / 16 * 32 + c % 8 * 4), c % 16 / 8 * 4, 15); }
#endif
};

struct Q5_K {
  static constexpr int VALUES = 256, SUB = 32, MOST = 31;
  static constexpr bool SIGNED = false;
  UNITS(2, 2, 4, 4, 4, WORDS8, WORDS32);
  static void decode(const Bytes<Q5_K>& b, Decoded<Q5_K>& out) {
    for (int i = 0; i < 256; ++i)
      out.code[i] = (b[48 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15) | (b[16 + i % 32] >> i / 32 & 1) << 4;
    for (int s = 0; s < 8; ++s) {
      const int at = 4 + s % 4;
      out.scale[s] = b.half_at(0) * static_cast<float>(six_bits(b[at], b[at + 4], b[at + 8], false, s));
      out.offset[s] = -b.half_at(2) * static_cast<float>(six_bits(b[at], b[at + 4], b[at + 8], true, s));
    }
  }
#ifdef __AVX2__
  Lanes d, m;
  SixBits six;
  explicit Q5_K(const uint8_t* w) : d(halves(w, 0)), m(halves(w, 2)), six(w, 4) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, byte_of(six.scale[sub / 4], sub % 4));
    offset = _mm256_mul_ps(m, _mm256_sub_ps(_mm256_setzero_ps(), byte_of(six.least[sub / 4], sub % 4)));
  }
  static Words codes(const uint8_t* w, int c) {
    const Words low = bits(words(w, 48 + c / 16 * 32 + c % 8 * 4), c % 16 / 8 * 4, 15);
    return _mm256_or_si256(low, _mm256_slli_epi16(bits(words(w, 16 + c % 8 * 4), c / 8, 1), 4));
  }
#endif
};

struct Q6_K {
  static constexpr int VALUES = 256, SUB = 16, MOST = 63;
  static constexpr bool SIGNED = false;
  UNITS(WORDS32, WORDS16, WORDS4, 2);
  static void decode(const Bytes<Q6_K>& b, Decoded<Q6_K>& out) {
    for (int i = 0; i < 256; ++i) {
      const int low = b[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
      out.code[i] = low | (b[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
    }
    for (int s = 0; s < 16; ++s) {
      out.scale[s] = b.half_at(208) * static_cast<float>(static_cast<int8_t>(b[192 + s]));
      out.offset[s] = -32 * out.scale[s];
    }
  }
#ifdef __AVX2__
  const uint8_t* w;
  Lanes d;
  explicit Q6_K(const uint8_t* w) : w(w), d(halves(w, 208)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, signed_byte_of(words(w, 192 + sub / 4 * 4), sub % 4));
    offset = _mm256_mul_ps(scale, _mm256_set1_ps(-32));
  }
  static Words codes(const uint8_t* w, int c) {
    const Words low = bits(words(w, c / 32 * 64 + c % 16 * 4), c % 32 / 16 * 4, 15);
    const Words high = bits(words(w, 128 + c / 32 * 32 + c % 8 * 4), c % 32 / 8 * 2, 3);
    return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
  }
#endif
};

// 4-bit floats times two, plus 12, so that they are whole and none is below 0; scales are powers of two.
inline constexpr int8_t kFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct MXFP4 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 24;
  static constexpr bool SIGNED = false;
  UNITS(1, WORDS4);
  // 2^(e - 128), a subnormal number for e of 0 and 1
  static uint32_t scale_bits(uint32_t e) { return e >= 2 ? (e - 1) << 23 : 0x00200000u << e; }
  static void decode(const Bytes<MXFP4>& b, Decoded<MXFP4>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = kFp4[i < 16 ? b[1 + i] & 15 : b[1 + i - 16] >> 4];
    const uint32_t made = scale_bits(b[0]);
    std::memcpy(&out.scale[0], &made, 4);
    out.offset[0] = -12 * out.scale[0];
  }
#ifdef __AVX2__
  Lanes d;
  explicit MXFP4(const uint8_t* w) {
    const Words e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w)));
    const Words usual = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const Words small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    d = _mm256_castsi256_ps(_mm256_blendv_epi8(small, usual, _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1))));
  }
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_mul_ps(d, _mm256_set1_ps(-12)); }
  static Words codes(const uint8_t* w, int c) {
    const Words table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4)));
    const Words x = words(w, 1 + 4 * (c & 3));
    return _mm256_shuffle_epi8(table, c < 4 ? low4(x) : high4(x));
  }
#endif
};

#define PLAIN_FORMATS(X) X(F32) X(BF16) X(F16)
#define ALL_FORMATS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(MXFP4)

}  // namespace KERNELS
}  // namespace asbuilt
