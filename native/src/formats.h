// The block formats of GGUF files (ggml-common.h), each described once for scalars and once for eight rows at a time.
//
// A group of 8 rows is interleaved by units: of each block, first the first unit of all rows, then the second. A unit is
// a float16, a byte, or a word of 4 bytes, so that one load of 32 bytes holds the same word of 8 rows: one lane is one
// row, and no sum crosses lanes.
#pragma once
#include <cmath>
#include <cstring>

// Whether rows are read eight at a time.
#ifdef __AVX2__
#include <immintrin.h>
#define EIGHT_ROWS
#elif defined(NEON)
#include "neon.h"
#define EIGHT_ROWS
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

// value = scale[i / SUB] * code[i] + offset[i / SUB]; MOST is the largest code, of signed ones without its sign. Those
// have no offset.
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
inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m128i load_half(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
// Eight float16.
inline Lanes load_halves(const void* from) { return _mm256_cvtph_ps(load_half(from)); }
// Eight numbers of 16 bits, and of 8, as words.
inline Words load_pairs(const void* from) { return _mm256_cvtepu16_epi32(load_half(from)); }
inline Words load_bytes(const void* from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))); }
// The float16 in the lower half of each word.
inline Lanes halves_in(Words x) {
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08)));
}
// The same 16 bytes twice.
inline Words twice(const void* bytes) { return _mm256_broadcastsi128_si256(load_half(bytes)); }
// Words of a table.
inline Words points(const uint32_t* grid, Words index) {
  return _mm256_i32gather_epi32(reinterpret_cast<const int*>(grid), index, 4);
}
// -x of the bytes whose mask is set.
inline Words negated(Words x, Words mask) { return _mm256_sign_epi8(x, _mm256_or_si256(mask, _mm256_set1_epi8(1))); }
#endif

#ifdef EIGHT_ROWS
inline Words words(const uint8_t* w, int start) { return load_words(w + kRows * start); }
inline Lanes halves(const uint8_t* w, int start) { return load_halves(w + kRows * start); }
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
// Some bits of each word.
inline Words field(Words x, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi32(x, shift), _mm256_set1_epi32(mask));
}
inline Words bytes(const uint8_t* w, int start) { return load_bytes(w + kRows * start); }
inline Lanes times(Lanes x, float by) { return _mm256_mul_ps(x, _mm256_set1_ps(by)); }
// a x + b of whole numbers x.
inline Lanes line(Words x, float a, float b) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(a), _mm256_set1_ps(b));
}
inline Words from16(const int8_t* numbers, Words codes) { return _mm256_shuffle_epi8(twice(numbers), codes); }
// One byte of each word in all of its bytes, the lowest or another.
inline Words spread(Words x, int byte = 0) {
  alignas(16) static constexpr uint8_t lowest[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  return _mm256_shuffle_epi8(x, _mm256_add_epi8(twice(lowest), all(byte)));
}
// Half `part` of points of eight numbers.
inline Words halves_of(const uint32_t* grid, Words index, int part) { return points(grid + part, _mm256_slli_epi32(index, 1)); }
// Numbers with the signs of four bits of a byte: the lower ones, or with `upper` the others; 1 is negative.
inline Words with_signs(Words numbers, Words signs, bool upper) {
  const Words places = _mm256_set1_epi32(upper ? static_cast<int>(0x80402010u) : 0x08040201);
  return negated(numbers, _mm256_cmpeq_epi8(_mm256_and_si256(spread(signs), places), places));
}
// Seven bits and an eighth that makes the ones even in number.
inline Words even(Words seven) {
  Words x = _mm256_xor_si256(seven, _mm256_srli_epi32(seven, 4));
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 2));
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 1));
  return _mm256_or_si256(seven, _mm256_slli_epi32(field(x, 0, 1), 7));
}
#endif
inline int even(int seven) { return seven | (__builtin_popcount(static_cast<unsigned>(seven)) & 1) << 7; }
inline int number_of(const uint32_t* grid, int i) { return reinterpret_cast<const int8_t*>(grid)[i]; }
inline int sign_of(int signs, int i) { return signs >> i & 1 ? -1 : 1; }

struct Q4_0 {
  static constexpr int VALUES = 32, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = false;
  UNITS(2, WORDS4);
  static void decode(const Bytes<Q4_0>& b, Decoded<Q4_0>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4;
    out.scale[0] = b.half_at(0);
    out.offset[0] = -8 * out.scale[0];
  }
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
  Lanes d, m;
  explicit Q4_1(const uint8_t* w) : d(halves(w, 0)), m(halves(w, 2)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = m; }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 4 + 4 * (c & 3));
    return c < 4 ? low4(x) : high4(x);
  }
#endif
};

#ifdef EIGHT_ROWS
// Bits 4c .. 4c + 3 of each word as bytes of 16 or 0.
inline Words fifth_bits(Words high, int c) {
  const Words mask = _mm256_set1_epi32(c & 1 ? static_cast<int>(0x80402010u) : 0x08040201);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread(high, c / 2), mask), mask), all(16));
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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
#ifdef EIGHT_ROWS
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

// 4-bit floats times two.
inline constexpr int8_t kSignedFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// The same, plus 12, so that they are whole and none is below 0; scales are powers of two.
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
#ifdef EIGHT_ROWS
  Lanes d;
  explicit MXFP4(const uint8_t* w) {
    const Words e = bytes(w, 0);
    const Words usual = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const Words small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    d = _mm256_castsi256_ps(_mm256_blendv_epi8(small, usual, _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1))));
  }
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_mul_ps(d, _mm256_set1_ps(-12)); }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 1 + 4 * (c & 3));
    return from16(kFp4, c < 4 ? low4(x) : high4(x));
  }
#endif
};

// The same numbers in groups of 16, with scales in E4M3.
inline float e4m3(int byte) {
  const int e = byte >> 3 & 15, m = byte & 7;
  return e ? std::ldexp(8.0f + static_cast<float>(m), e - 10) : static_cast<float>(m) * 0x1p-9f;
}
#ifdef EIGHT_ROWS
// Of the lowest byte of each word, without its sign.
inline Lanes e4m3(Words b) {
  const Words usual = _mm256_add_epi32(_mm256_slli_epi32(field(b, 0, 127), 20), _mm256_set1_epi32(120 << 23));
  const Words small = _mm256_castps_si256(line(field(b, 0, 7), 0x1p-9f, 0));
  const Words none = _mm256_cmpeq_epi32(field(b, 3, 15), _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, small, none));
}
#endif

// A scale of 127, which is NaN, is 0, as ggml reads it.
struct NVFP4 {
  static constexpr int VALUES = 64, SUB = 16, MOST = 24;
  static constexpr bool SIGNED = false;
  UNITS(4, WORDS8);
  static void decode(const Bytes<NVFP4>& b, Decoded<NVFP4>& out) {
    for (int i = 0; i < 64; ++i) out.code[i] = kFp4[b[4 + i / 16 * 8 + i % 8] >> i % 16 / 8 * 4 & 15];
    for (int s = 0; s < 4; ++s) {
      out.scale[s] = b[s] == 127 ? 0.0f : e4m3(b[s]) * 0.5f;
      out.offset[s] = -12 * out.scale[s];
    }
  }
#ifdef EIGHT_ROWS
  Words four;
  explicit NVFP4(const uint8_t* w) : four(words(w, 0)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    const Words b = field(four, 8 * sub, 255);
    const Lanes none = _mm256_castsi256_ps(_mm256_cmpeq_epi32(b, _mm256_set1_epi32(127)));
    scale = _mm256_andnot_ps(none, times(e4m3(b), 0.5f));
    offset = times(scale, -12);
  }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 4 + c / 4 * 8 + c % 2 * 4);
    return from16(kFp4, c % 4 < 2 ? low4(x) : high4(x));
  }
#endif
};

// The sixteen numbers of IQ4: closer together around 0, where weights are.
inline constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
  static constexpr int VALUES = 32, SUB = 32, MOST = 127;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS4);
  static void decode(const Bytes<IQ4_NL>& b, Decoded<IQ4_NL>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = kIq4[b[2 + i % 16] >> i / 16 * 4 & 15];
    out.scale[0] = b.half_at(0);
    out.offset[0] = 0;
  }
#ifdef EIGHT_ROWS
  Lanes d;
  explicit IQ4_NL(const uint8_t* w) : d(halves(w, 0)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_setzero_ps(); }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 2 + 4 * (c & 3));
    return from16(kIq4, c < 4 ? low4(x) : high4(x));
  }
#endif
};

struct IQ4_XS {
  static constexpr int VALUES = 256, SUB = 32, MOST = 127;
  static constexpr bool SIGNED = true;
  UNITS(2, 2, 4, WORDS32);
  static void decode(const Bytes<IQ4_XS>& b, Decoded<IQ4_XS>& out) {
    for (int i = 0; i < 256; ++i) out.code[i] = kIq4[b[8 + i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15];
    for (int s = 0; s < 8; ++s) {
      const int low = b[4 + s / 2] >> s % 2 * 4 & 15, high = b[2 + s / 4] >> s % 4 * 2 & 3;
      out.scale[s] = b.half_at(0) * static_cast<float>((low | high << 4) - 32);
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ4_XS(const uint8_t* w) : w(w), d(halves(w, 0)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    const Words pairs = load_pairs(w + kRows * 2);
    const Words low = field(words(w, 4), 4 * sub, 15), high = _mm256_slli_epi32(field(pairs, 2 * sub, 3), 4);
    scale = _mm256_mul_ps(d, line(_mm256_or_si256(low, high), 1, -32));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 8 + c / 8 * 16 + c % 4 * 4);
    return from16(kIq4, c % 8 < 4 ? low4(x) : high4(x));
  }
#endif
};

// Codes that name points of a grid: four numbers at three bits, eight below.

struct IQ3_XXS {
  static constexpr int VALUES = 256, SUB = 32, MOST = 62;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS16, WORDS8);
  static void decode(const Bytes<IQ3_XXS>& b, Decoded<IQ3_XXS>& out) {
    for (int s = 0; s < 8; ++s) {
      uint32_t word = 0;
      for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(b[66 + 4 * s + i]) << 8 * i;
      for (int i = 0; i < 32; ++i) {
        const int number = number_of(grids.iq3_xxs, 4 * b[2 + 8 * s + i / 4] + i % 4);
        out.code[32 * s + i] = number * sign_of(even(static_cast<int>(word >> i / 8 * 7 & 127)), i % 8);
      }
      out.scale[s] = b.half_at(0) * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ3_XXS(const uint8_t* w) : w(w), d(times(halves(w, 0), 0.5f)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 66 + 4 * sub), 28, 15), 1, 0.5f));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words index = field(words(w, 2 + c / 4 * 4), c % 4 * 8, 255);
    const Words signs = field(words(w, 66 + c / 8 * 4), c % 8 / 2 * 7, 127);
    return with_signs(points(grids.iq3_xxs, index), c % 2 ? even(signs) : signs, c % 2);
  }
#endif
};

struct IQ3_S {
  static constexpr int VALUES = 256, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS16, 4, 4, WORDS8, 4);
  static void decode(const Bytes<IQ3_S>& b, Decoded<IQ3_S>& out) {
    for (int i = 0; i < 256; ++i) {
      const int point = i / 4, index = b[2 + point] | (b[66 + point / 8] >> point % 8 & 1) << 8;
      out.code[i] = number_of(grids.iq3_s, 4 * index + i % 4) * sign_of(b[74 + i / 8], i % 8);
    }
    for (int s = 0; s < 8; ++s) {
      out.scale[s] = b.half_at(0) * static_cast<float>(1 + 2 * (b[106 + s / 2] >> s % 2 * 4 & 15));
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ3_S(const uint8_t* w) : w(w), d(halves(w, 0)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 106), 4 * sub, 15), 2, 1));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words low = field(words(w, 2 + c / 4 * 4), c % 4 * 8, 255);
    const Words high = _mm256_slli_epi32(field(words(w, 66 + c / 32 * 4), c % 32, 1), 8);
    const Words signs = field(words(w, 74 + c / 8 * 4), c % 8 / 2 * 8, 255);
    return with_signs(points(grids.iq3_s, _mm256_or_si256(low, high)), signs, c % 2);
  }
#endif
};

struct IQ2_XXS {
  static constexpr int VALUES = 256, SUB = 32, MOST = 43;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS16);
  static void decode(const Bytes<IQ2_XXS>& b, Decoded<IQ2_XXS>& out) {
    for (int s = 0; s < 8; ++s) {
      uint32_t word = 0;
      for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(b[6 + 8 * s + i]) << 8 * i;
      for (int i = 0; i < 32; ++i) {
        const int number = number_of(grids.iq2_xxs, 8 * b[2 + 8 * s + i / 8] + i % 8);
        out.code[32 * s + i] = number * sign_of(even(static_cast<int>(word >> i / 8 * 7 & 127)), i % 8);
      }
      out.scale[s] = b.half_at(0) * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ2_XXS(const uint8_t* w) : w(w), d(times(halves(w, 0), 0.25f)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 6 + 8 * sub), 28, 15), 1, 0.5f));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words index = field(words(w, 2 + c / 8 * 8), c % 8 / 2 * 8, 255);
    const Words signs = field(words(w, 6 + c / 8 * 8), c % 8 / 2 * 7, 127);
    return with_signs(halves_of(grids.iq2_xxs, index, c % 2), c % 2 ? even(signs) : signs, c % 2);
  }
#endif
};

struct IQ2_XS {
  static constexpr int VALUES = 256, SUB = 16, MOST = 43;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS16, 4, 4);
  static void decode(const Bytes<IQ2_XS>& b, Decoded<IQ2_XS>& out) {
    for (int i = 0; i < 256; ++i) {
      const int word = b[2 + i / 8 * 2] | b[3 + i / 8 * 2] << 8;
      out.code[i] = number_of(grids.iq2_xs, 8 * (word & 511) + i % 8) * sign_of(even(word >> 9), i % 8);
    }
    for (int s = 0; s < 16; ++s) {
      out.scale[s] = b.half_at(0) * (0.5f + static_cast<float>(b[66 + s / 2] >> s % 2 * 4 & 15)) * 0.25f;
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ2_XS(const uint8_t* w) : w(w), d(times(halves(w, 0), 0.25f)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 66 + sub / 8 * 4), sub % 8 * 4, 15), 1, 0.5f));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 2 + c / 4 * 4), signs = field(x, c % 4 / 2 * 16 + 9, 127);
    return with_signs(halves_of(grids.iq2_xs, field(x, c % 4 / 2 * 16, 511), c % 2), c % 2 ? even(signs) : signs, c % 2);
  }
#endif
};

struct IQ2_S {
  static constexpr int VALUES = 256, SUB = 16, MOST = 43;
  static constexpr bool SIGNED = true;
  UNITS(2, WORDS8, WORDS8, 4, 4, 4, 4);
  static void decode(const Bytes<IQ2_S>& b, Decoded<IQ2_S>& out) {
    for (int i = 0; i < 256; ++i) {
      const int point = i / 8, index = b[2 + point] | (b[66 + point / 4] >> point % 4 * 2 & 3) << 8;
      out.code[i] = number_of(grids.iq2_s, 8 * index + i % 8) * sign_of(b[34 + point], i % 8);
    }
    for (int s = 0; s < 16; ++s) {
      out.scale[s] = b.half_at(0) * (0.5f + static_cast<float>(b[74 + s / 2] >> s % 2 * 4 & 15)) * 0.25f;
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ2_S(const uint8_t* w) : w(w), d(times(halves(w, 0), 0.25f)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 74 + sub / 8 * 4), sub % 8 * 4, 15), 1, 0.5f));
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const int at = c / 8 * 4, shift = c % 8 / 2 * 8;  // of the point's byte: its word, and where it lies in that
    const Words high = field(words(w, 66 + c / 32 * 4), c % 32 / 2 * 2, 3);
    const Words index = _mm256_or_si256(field(words(w, 2 + at), shift, 255), _mm256_slli_epi32(high, 8));
    return with_signs(halves_of(grids.iq2_s, index, c % 2), field(words(w, 34 + at), shift, 255), c % 2);
  }
#endif
};

// Numbers -1, 0 and 1, all of a group shifted by 1/8 up or down: eighths, plus 9.

struct IQ1_S {
  static constexpr int VALUES = 256, SUB = 32, MOST = 18;
  static constexpr bool SIGNED = false;
  UNITS(2, WORDS8, WORDS4);
  static void decode(const Bytes<IQ1_S>& b, Decoded<IQ1_S>& out) {
    for (int s = 0; s < 8; ++s) {
      const int word = b[34 + 2 * s] | b[35 + 2 * s] << 8;
      for (int i = 0; i < 32; ++i) {
        const int index = b[2 + 4 * s + i / 8] | (word >> i / 8 * 3 & 7) << 8;
        out.code[32 * s + i] = number_of(grids.iq1, 8 * index + i % 8) + (word >> 15 ? 0 : 2);
      }
      out.scale[s] = b.half_at(0) * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125f;
      out.offset[s] = -9 * out.scale[s];
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ1_S(const uint8_t* w) : w(w), d(times(halves(w, 0), 0.125f)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 34 + sub / 2 * 4), sub % 2 * 16 + 12, 7), 2, 1));
    offset = times(scale, -9);
  }
  static Words codes(const uint8_t* w, int c) {
    const Words word = words(w, 34 + c / 16 * 4);
    const int start = c / 8 % 2 * 16;
    const Words high = _mm256_slli_epi32(field(word, start + c % 8 / 2 * 3, 7), 8);
    const Words index = _mm256_or_si256(field(words(w, 2 + c / 8 * 4), c % 8 / 2 * 8, 255), high);
    const Words up = _mm256_andnot_si256(_mm256_srai_epi32(_mm256_slli_epi32(word, 16 - start), 31), all(2));
    return _mm256_add_epi8(halves_of(grids.iq1, index, c % 2), up);
  }
#endif
};

struct IQ1_M {
  static constexpr int VALUES = 256, SUB = 16, MOST = 18;
  static constexpr bool SIGNED = false;
  UNITS(WORDS8, WORDS4, 4, 4);
  static void decode(const Bytes<IQ1_M>& b, Decoded<IQ1_M>& out) {
    for (int i = 0; i < 256; ++i) {
      const int point = i / 8, more = b[32 + point / 2] >> point % 2 * 4 & 15;
      out.code[i] = number_of(grids.iq1, 8 * (b[point] | (more & 7) << 8) + i % 8) + (more >> 3 ? 0 : 2);
    }
    int d = 0;
    for (int i = 0; i < 4; ++i) d |= (b[49 + 2 * i] >> 4) << 4 * i;
    for (int s = 0; s < 16; ++s) {
      const int word = b[48 + s / 4 * 2] | b[49 + s / 4 * 2] << 8;
      out.scale[s] = half(static_cast<uint16_t>(d)) * static_cast<float>(2 * (word >> s % 4 * 3 & 7) + 1) * 0.125f;
      out.offset[s] = -9 * out.scale[s];
    }
  }
#ifdef EIGHT_ROWS
  const uint8_t* w;
  Lanes d;
  explicit IQ1_M(const uint8_t* w) : w(w) {
    const Words a = words(w, 48), b = words(w, 52);
    const Words first = _mm256_or_si256(field(a, 12, 15), _mm256_slli_epi32(field(a, 28, 15), 4));
    const Words second = _mm256_or_si256(field(b, 12, 15), _mm256_slli_epi32(field(b, 28, 15), 4));
    d = times(halves_in(_mm256_or_si256(first, _mm256_slli_epi32(second, 8))), 0.125f);
  }
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = _mm256_mul_ps(d, line(field(words(w, 48 + sub / 8 * 4), sub / 4 % 2 * 16 + sub % 4 * 3, 7), 2, 1));
    offset = times(scale, -9);
  }
  static Words codes(const uint8_t* w, int c) {
    const Words more = words(w, 32 + c / 16 * 4);
    const int start = c % 16 / 2 * 4;
    const Words high = _mm256_slli_epi32(field(more, start, 7), 8);
    const Words index = _mm256_or_si256(field(words(w, c / 8 * 4), c % 8 / 2 * 8, 255), high);
    const Words up = _mm256_andnot_si256(_mm256_srai_epi32(_mm256_slli_epi32(more, 28 - start), 31), all(2));
    return _mm256_add_epi8(halves_of(grids.iq1, index, c % 2), up);
  }
#endif
};

// Ternary numbers. TQ1_0: five digits of a fraction of 256 in a byte, the next one the whole part of its triple.

struct TQ1_0 {
  static constexpr int VALUES = 256, SUB = 32, MOST = 2;
  static constexpr bool SIGNED = false;
  UNITS(WORDS8, WORDS4, 4, 2);
  static void decode(const Bytes<TQ1_0>& b, Decoded<TQ1_0>& out) {
    for (int i = 0; i < 256; ++i) {
      const int byte = i < 160 ? i % 32 : i < 240 ? 32 + (i - 160) % 16 : 48 + (i - 240) % 4;
      const int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
      int fraction = b[byte];
      for (int k = 0; k < digit; ++k) fraction = fraction * 3 & 255;
      out.code[i] = fraction * 3 >> 8;
    }
    for (int s = 0; s < 8; ++s) {
      out.scale[s] = b.half_at(52);
      out.offset[s] = -out.scale[s];
    }
  }
#ifdef EIGHT_ROWS
  Lanes d;
  explicit TQ1_0(const uint8_t* w) : d(halves(w, 52)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = times(d, -1); }
  static Words codes(const uint8_t* w, int c) {
    const int word = c < 40 ? c % 8 : c < 60 ? 8 + c % 4 : 12, digit = c < 40 ? c / 8 : c < 60 ? (c - 40) / 4 : c - 60;
    Words x = words(w, 4 * word);
    for (int k = 0; k < digit; ++k) x = _mm256_add_epi8(x, _mm256_add_epi8(x, x));
    // 1 from 86 on, 2 from 171 on: each comparison is -1 where it holds
    const Words one = _mm256_cmpeq_epi8(_mm256_max_epu8(x, all(86)), x), two = _mm256_cmpeq_epi8(_mm256_max_epu8(x, all(171)), x);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
  }
#endif
};

struct TQ2_0 {
  static constexpr int VALUES = 256, SUB = 32, MOST = 3;
  static constexpr bool SIGNED = false;
  UNITS(WORDS16, 2);
  static void decode(const Bytes<TQ2_0>& b, Decoded<TQ2_0>& out) {
    for (int i = 0; i < 256; ++i) out.code[i] = b[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    for (int s = 0; s < 8; ++s) {
      out.scale[s] = b.half_at(64);
      out.offset[s] = -out.scale[s];
    }
  }
#ifdef EIGHT_ROWS
  Lanes d;
  explicit TQ2_0(const uint8_t* w) : d(halves(w, 64)) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = times(d, -1); }
  static Words codes(const uint8_t* w, int c) { return bits(words(w, c / 32 * 32 + c % 8 * 4), c % 32 / 8 * 2, 3); }
#endif
};

// Integers of checkpoint folders, a group's scale repeated for each 32: (code - zero) * scale. The wide ones have float32
// scales, whose products with the zero point would be rounded: their codes are differences.

struct INT4_ZERO {
  static constexpr int VALUES = 32, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = false;
  UNITS(2, 1, WORDS4);
  static void decode(const Bytes<INT4_ZERO>& b, Decoded<INT4_ZERO>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = b[3 + i % 16] >> i / 16 * 4 & 15;
    out.scale[0] = b.half_at(0);
    out.offset[0] = -static_cast<float>(b[2]) * out.scale[0];
  }
#ifdef EIGHT_ROWS
  Lanes d, m;
  explicit INT4_ZERO(const uint8_t* w) : d(halves(w, 0)), m(_mm256_mul_ps(d, line(bytes(w, 2), -1, 0))) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = m; }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 3 + 4 * (c & 3));
    return c < 4 ? low4(x) : high4(x);
  }
#endif
};

// A float32 of a block.
template <class F>
inline float float_at(const Bytes<F>& b, int start) {
  uint32_t raw = 0;
  for (int i = 0; i < 4; ++i) raw |= static_cast<uint32_t>(b[start + i]) << 8 * i;
  float made;
  std::memcpy(&made, &raw, 4);
  return made;
}

struct INT4_WIDE {
  static constexpr int VALUES = 32, SUB = 32, MOST = 15;
  static constexpr bool SIGNED = true;
  UNITS(4, 1, WORDS4);
  static void decode(const Bytes<INT4_WIDE>& b, Decoded<INT4_WIDE>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = (b[5 + i % 16] >> i / 16 * 4 & 15) - b[4];
    out.scale[0] = float_at(b, 0);
    out.offset[0] = 0;
  }
#ifdef EIGHT_ROWS
  Lanes d;
  explicit INT4_WIDE(const uint8_t* w) : d(_mm256_castsi256_ps(words(w, 0))) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_setzero_ps(); }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 5 + 4 * (c & 3));
    return _mm256_sub_epi8(c < 4 ? low4(x) : high4(x), spread(bytes(w, 4)));
  }
#endif
};

struct INT8_WIDE {
  static constexpr int VALUES = 32, SUB = 32, MOST = 128;
  static constexpr bool SIGNED = true;
  UNITS(4, WORDS8);
  static void decode(const Bytes<INT8_WIDE>& b, Decoded<INT8_WIDE>& out) {
    for (int i = 0; i < 32; ++i) out.code[i] = static_cast<int8_t>(b[4 + i]);
    out.scale[0] = float_at(b, 0);
    out.offset[0] = 0;
  }
#ifdef EIGHT_ROWS
  Lanes d;
  explicit INT8_WIDE(const uint8_t* w) : d(_mm256_castsi256_ps(words(w, 0))) {}
  void scales(int, Lanes& scale, Lanes& offset) const { scale = d, offset = _mm256_setzero_ps(); }
  static Words codes(const uint8_t* w, int c) { return words(w, 4 + 4 * c); }
#endif
};

// NVFP4 with the scale of its matrix, by which each block's scales are multiplied.
struct NVFP4_WIDE {
  static constexpr int VALUES = 64, SUB = 16, MOST = 12;
  static constexpr bool SIGNED = true;
  UNITS(4, 4, WORDS8);
  static void decode(const Bytes<NVFP4_WIDE>& b, Decoded<NVFP4_WIDE>& out) {
    for (int i = 0; i < 64; ++i) out.code[i] = kSignedFp4[b[8 + i / 16 * 8 + i % 8] >> i % 16 / 8 * 4 & 15];
    for (int s = 0; s < 4; ++s) {
      out.scale[s] = e4m3(b[4 + s]) * float_at(b, 0) * 0.5f;
      out.offset[s] = 0;
    }
  }
#ifdef EIGHT_ROWS
  Lanes whole;
  Words four;
  explicit NVFP4_WIDE(const uint8_t* w) : whole(_mm256_castsi256_ps(words(w, 0))), four(words(w, 4)) {}
  void scales(int sub, Lanes& scale, Lanes& offset) const {
    scale = times(_mm256_mul_ps(e4m3(field(four, 8 * sub, 255)), whole), 0.5f);
    offset = _mm256_setzero_ps();
  }
  static Words codes(const uint8_t* w, int c) {
    const Words x = words(w, 8 + c / 4 * 8 + c % 2 * 4);
    return from16(kSignedFp4, c % 4 < 2 ? low4(x) : high4(x));
  }
#endif
};

#define PLAIN_FORMATS(X) X(F32) X(BF16) X(F16)
#define ALL_FORMATS(X)                                                                                              \
  X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(MXFP4) X(NVFP4) X(IQ4_NL) X(IQ4_XS) \
  X(IQ3_XXS) X(IQ3_S) X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ1_S) X(IQ1_M) X(TQ1_0) X(TQ2_0) X(INT4_ZERO) X(INT4_WIDE)       \
  X(INT8_WIDE) X(NVFP4_WIDE)

}  // namespace KERNELS
}  // namespace asbuilt
