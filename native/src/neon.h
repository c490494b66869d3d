// The vectors that formats are written in, for ARM: 32 bytes are two registers of NEON. Operations have the names that they
// have for AVX2, so that a format is written once; those here are the ones that formats.h and kernels.cpp use.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace asbuilt {
namespace KERNELS {

struct Words {
  uint8x16_t a, b;
};
struct Lanes {
  float32x4_t a, b;
  float operator[](int i) const { return i < 4 ? a[i] : b[i - 4]; }
  Lanes& operator+=(Lanes y) { return a += y.a, b += y.b, *this; }
};
inline Lanes operator+(Lanes x, Lanes y) { return {x.a + y.a, x.b + y.b}; }
inline Lanes operator-(Lanes x, Lanes y) { return {x.a - y.a, x.b - y.b}; }
inline Lanes operator*(Lanes x, Lanes y) { return {x.a * y.a, x.b * y.b}; }
inline Lanes operator*(float x, Lanes y) { return {vmulq_n_f32(y.a, x), vmulq_n_f32(y.b, x)}; }

// Both halves of vectors, as elements of type T.
template <class T, class Work>
inline Words each_half(Words x, Words y, Work work) {
  return {reinterpret_cast<uint8x16_t>(work(reinterpret_cast<T>(x.a), reinterpret_cast<T>(y.a))),
          reinterpret_cast<uint8x16_t>(work(reinterpret_cast<T>(x.b), reinterpret_cast<T>(y.b)))};
}
template <class T, class Work>
inline Words each_half(Words x, Work work) {
  return {reinterpret_cast<uint8x16_t>(work(reinterpret_cast<T>(x.a))),
          reinterpret_cast<uint8x16_t>(work(reinterpret_cast<T>(x.b)))};
}

#define OF_TWO(name, T, made) \
  inline Words name(Words x, Words y) { return each_half<T>(x, y, [](T l, T r) { return made; }); }
#define OF_SHIFT(name, T, made) \
  inline Words name(Words x, int n) { return each_half<T>(x, [n](T l) { return made; }); }
OF_TWO(_mm256_and_si256, uint8x16_t, l & r)
OF_TWO(_mm256_andnot_si256, uint8x16_t, ~l & r)
OF_TWO(_mm256_or_si256, uint8x16_t, l | r)
OF_TWO(_mm256_xor_si256, uint8x16_t, l ^ r)
OF_TWO(_mm256_add_epi8, uint8x16_t, l + r)
OF_TWO(_mm256_sub_epi8, uint8x16_t, l - r)
OF_TWO(_mm256_add_epi32, uint32x4_t, l + r)
OF_TWO(_mm256_sub_epi32, uint32x4_t, l - r)
OF_TWO(_mm256_cmpeq_epi8, uint8x16_t, vceqq_u8(l, r))
OF_TWO(_mm256_cmpeq_epi32, uint32x4_t, vceqq_u32(l, r))
OF_TWO(_mm256_cmpgt_epi32, int32x4_t, vcgtq_s32(l, r))
OF_TWO(_mm256_max_epu8, uint8x16_t, vmaxq_u8(l, r))
OF_TWO(_mm256_sllv_epi32, uint32x4_t, vshlq_u32(l, reinterpret_cast<int32x4_t>(r)))
OF_TWO(_mm256_shuffle_epi8, uint8x16_t, vqtbl1q_u8(l, r))  // of places 0 to 15
OF_SHIFT(_mm256_slli_epi16, uint16x8_t, l << n)
OF_SHIFT(_mm256_srli_epi16, uint16x8_t, l >> n)
OF_SHIFT(_mm256_slli_epi32, uint32x4_t, l << n)
OF_SHIFT(_mm256_srli_epi32, uint32x4_t, l >> n)
OF_SHIFT(_mm256_srai_epi32, int32x4_t, l >> n)
#undef OF_TWO
#undef OF_SHIFT

inline Words _mm256_setzero_si256() { return {vdupq_n_u8(0), vdupq_n_u8(0)}; }
inline Words _mm256_set1_epi32(int x) {
  const auto all = reinterpret_cast<uint8x16_t>(vdupq_n_s32(x));
  return {all, all};
}
inline Words _mm256_set1_epi8(char x) {
  const uint8x16_t all = vdupq_n_u8(static_cast<uint8_t>(x));
  return {all, all};
}
// y where the mask is set.
inline Words _mm256_blendv_epi8(Words x, Words y, Words mask) {
  return {vbslq_u8(mask.a, y.a, x.a), vbslq_u8(mask.b, y.b, x.b)};
}
inline Lanes _mm256_castsi256_ps(Words x) { return {reinterpret_cast<float32x4_t>(x.a), reinterpret_cast<float32x4_t>(x.b)}; }
inline Words _mm256_castps_si256(Lanes x) { return {reinterpret_cast<uint8x16_t>(x.a), reinterpret_cast<uint8x16_t>(x.b)}; }
inline Lanes _mm256_cvtepi32_ps(Words x) {
  return {vcvtq_f32_s32(reinterpret_cast<int32x4_t>(x.a)), vcvtq_f32_s32(reinterpret_cast<int32x4_t>(x.b))};
}
inline Lanes _mm256_setzero_ps() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Lanes _mm256_set1_ps(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Lanes _mm256_add_ps(Lanes x, Lanes y) { return x + y; }
inline Lanes _mm256_sub_ps(Lanes x, Lanes y) { return x - y; }
inline Lanes _mm256_mul_ps(Lanes x, Lanes y) { return x * y; }
inline Lanes _mm256_fmadd_ps(Lanes x, Lanes y, Lanes z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline Lanes _mm256_andnot_ps(Lanes x, Lanes y) {
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
inline Lanes _mm256_loadu_ps(const float* x) { return {vld1q_f32(x), vld1q_f32(x + 4)}; }
inline void _mm256_storeu_ps(float* x, Lanes v) { vst1q_f32(x, v.a), vst1q_f32(x + 4, v.b); }

// What formats.h has for AVX2 under the same names.

inline Words load_words(const void* from) {
  const auto* x = static_cast<const uint8_t*>(from);
  return {vld1q_u8(x), vld1q_u8(x + 16)};
}
// Eight float16.
inline Lanes load_halves(const void* from) {
  const float16x8_t x = reinterpret_cast<float16x8_t>(vld1q_u8(static_cast<const uint8_t*>(from)));
  return {vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
}
// Eight numbers of 16 bits, and of 8, as words.
inline Words load_pairs(const void* from) {
  const uint16x8_t x = reinterpret_cast<uint16x8_t>(vld1q_u8(static_cast<const uint8_t*>(from)));
  return {reinterpret_cast<uint8x16_t>(vmovl_u16(vget_low_u16(x))), reinterpret_cast<uint8x16_t>(vmovl_u16(vget_high_u16(x)))};
}
inline Words load_bytes(const void* from) {
  const uint16x8_t x = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(from)));
  return {reinterpret_cast<uint8x16_t>(vmovl_u16(vget_low_u16(x))), reinterpret_cast<uint8x16_t>(vmovl_u16(vget_high_u16(x)))};
}
// The float16 in the lower half of each word.
inline Lanes halves_in(Words x) {
  return {vcvt_f32_f16(reinterpret_cast<float16x4_t>(vmovn_u32(reinterpret_cast<uint32x4_t>(x.a)))),
          vcvt_f32_f16(reinterpret_cast<float16x4_t>(vmovn_u32(reinterpret_cast<uint32x4_t>(x.b))))};
}
// The same 16 bytes twice.
inline Words twice(const void* bytes) {
  const uint8x16_t x = vld1q_u8(static_cast<const uint8_t*>(bytes));
  return {x, x};
}
// Words of a table.
inline Words points(const uint32_t* grid, Words index) {
  const auto a = reinterpret_cast<uint32x4_t>(index.a), b = reinterpret_cast<uint32x4_t>(index.b);
  const uint32x4_t first{grid[a[0]], grid[a[1]], grid[a[2]], grid[a[3]]};
  const uint32x4_t second{grid[b[0]], grid[b[1]], grid[b[2]], grid[b[3]]};
  return {reinterpret_cast<uint8x16_t>(first), reinterpret_cast<uint8x16_t>(second)};
}
// -x of the bytes whose mask is set.
inline Words negated(Words x, Words mask) { return _mm256_sub_epi8(_mm256_xor_si256(x, mask), mask); }

// The sums of four products of signed bytes.
inline int32x4_t dotted(int32x4_t sum, int8x16_t codes, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sum, codes, x);
#else
  // two products of codes from -128 on and numbers from -127 to 127 fit in 16 bits
  const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x)), high = vmull_high_s8(codes, x);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
inline Words dotted(Words sum, Words codes, Words x) {
  const auto half = [](uint8x16_t s, uint8x16_t c, uint8x16_t by) {
    return reinterpret_cast<uint8x16_t>(
        dotted(reinterpret_cast<int32x4_t>(s), reinterpret_cast<int8x16_t>(c), reinterpret_cast<int8x16_t>(by)));
  };
  return {half(sum.a, codes.a, x.a), half(sum.b, codes.b, x.b)};
}

}  // namespace KERNELS
}  // namespace asbuilt
