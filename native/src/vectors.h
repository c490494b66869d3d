// Numbers as they are stored, vectors of 8 floats, and functions that loops of them can be vectorised with.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "formats.h"

namespace asbuilt {
namespace KERNELS {
namespace {

#ifdef NEON  // whose compilers keep vectors that are wider than a register in memory
using f8 = Lanes;
inline f8 load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, f8 v) { _mm256_storeu_ps(x, v); }
inline f8 all_of(float x) { return _mm256_set1_ps(x); }
inline float sum_of(f8 v) { return vaddvq_f32(v.a + v.b); }
inline f8 larger(f8 x, f8 y) { return {x.a > y.a ? x.a : y.a, x.b > y.b ? x.b : y.b}; }
#else
typedef float f8 __attribute__((vector_size(32), aligned(4)));
inline f8 load(const float* x) { return *reinterpret_cast<const f8*>(x); }
inline void store(float* x, f8 v) { *reinterpret_cast<f8*>(x) = v; }
inline f8 all_of(float x) { return f8{x, x, x, x, x, x, x, x}; }
inline float sum_of(f8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
inline f8 larger(f8 x, f8 y) { return x > y ? x : y; }
#endif

// Numbers that are stored as they are, of matrices and caches.

struct F32 {
  using Stored = float;
  static float one(float x) { return x; }
  static float narrow(float x) { return x; }
  static f8 eight(const float* x) { return load(x); }
};

struct BF16 {
  using Stored = uint16_t;
  static float one(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float made;
    std::memcpy(&made, &bits, 4);
    return made;
  }
  // to nearest, to even
  static uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static f8 eight(const uint16_t* x) {
#ifdef EIGHT_ROWS
    return static_cast<f8>(_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(x), 16)));
#else
    return f8{one(x[0]), one(x[1]), one(x[2]), one(x[3]), one(x[4]), one(x[5]), one(x[6]), one(x[7])};
#endif
  }
};

struct F16 {
  using Stored = uint16_t;
  static float one(uint16_t x) { return half(x); }
  static uint16_t narrow(float x) {
#ifdef __AVX2__
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(NEON)
    const __fp16 made = static_cast<__fp16>(x);
    uint16_t bits;
    std::memcpy(&bits, &made, 2);
    return bits;
#else
    return to_half(x);
#endif
  }
  static f8 eight(const uint16_t* x) {
#ifdef EIGHT_ROWS
    return static_cast<f8>(load_halves(x));
#else
    return f8{one(x[0]), one(x[1]), one(x[2]), one(x[3]), one(x[4]), one(x[5]), one(x[6]), one(x[7])};
#endif
  }
};

template <class F>
inline float dot_with(const float* a, const typename F::Stored* b, int64_t n) {
  f8 sum[2] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    sum[0] += load(a + i) * F::eight(b + i);
    sum[1] += load(a + i + 8) * F::eight(b + i + 8);
  }
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * F::one(b[i]);
  return sum_of(sum[0] + sum[1]) + rest;
}
inline float dot(const float* a, const float* b, int64_t n) { return dot_with<F32>(a, b, n); }

// e^x within 2 units in the last place; written without branches, so that loops of it are vectorised. Results below
// the smallest normal number are 0.
inline float power(float x) {
  const float clamped = x < -87.3f ? -87.3f : x > 88.72283f ? 88.72283f : x;
  const float n = __builtin_rintf(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // in two steps, since 2^128 is no float
  const int32_t whole = static_cast<int32_t>(n), first = whole >> 1, second = whole - first;
  const uint32_t a = static_cast<uint32_t>(first + 127) << 23, b = static_cast<uint32_t>(second + 127) << 23;
  float fa, fb;
  std::memcpy(&fa, &a, 4);
  std::memcpy(&fb, &b, 4);
  const float made = p * fa * fb;
  return x < -87.3f ? 0.0f : x > 88.72283f ? std::numeric_limits<float>::infinity() : x == x ? made : x;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + power(-x)); }
inline float silu(float x) { return x / (1.0f + power(-x)); }

// log(1 + e^x) = max(x, 0) + 2 atanh(s), s = u / (2 + u) <= 1/3, u = e^-|x|.
inline float softplus(float x) {
  const float u = power(x < 0 ? x : -x), s = u / (2.0f + u), z = s * s;
  float p = 1.0f / 17;
  p = p * z + 1.0f / 15;
  p = p * z + 1.0f / 13;
  p = p * z + 1.0f / 11;
  p = p * z + 1.0f / 9;
  p = p * z + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  return (x < 0 ? 0.0f : x) + 2.0f * (s + s * z * p);
}

// tanh-approximated GELU: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
inline float gelu_tanh(float x) {
  const float inner = 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + power(-inner));
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
