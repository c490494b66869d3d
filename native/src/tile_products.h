// Tiles of bfloat16 (AMX): numbers rounded to it, or halved into two of them, and products of tiles; in plain code too, to be
// tested where there are none.
#pragma once
#include <cstring>
#include <initializer_list>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "dense.h"

namespace asbuilt {
namespace KERNELS {
namespace {

constexpr int kSide = 16, kDeep = 32;     // rows and inputs of a tile
constexpr int64_t kTile = kSide * kDeep;  // numbers of a tile

// 32 numbers as their high and low parts, of two vectors of 16 floats one after the other, or in pairs.
#ifdef __AVX512BF16__
inline __m512i narrowed(__m512 first, __m512 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}
inline __m512 low_half(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 high_half(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Without LOW the low parts are not written.
template <bool LOW>
inline void halve_in_order(const float* x, uint16_t* high, [[maybe_unused]] uint16_t* low) {
  const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + kSide);
  const __m512i whole = narrowed(first, second);
  [[maybe_unused]] const auto widened = [](__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  };
  _mm512_store_si512(high, whole);
  if constexpr (LOW)
    _mm512_store_si512(low, narrowed(_mm512_sub_ps(first, widened(_mm512_castsi512_si256(whole))),
                                     _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64(whole, 1)))));
}

// Returns whether a low part is other than zero.
template <bool LOW>
inline bool halve_in_pairs(const float* even, const float* odd, uint16_t* high, [[maybe_unused]] uint16_t* low) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i paired = _mm512_load_si512(order);
  const __m512 first = _mm512_load_ps(even), second = _mm512_load_ps(odd);
  const __m512i whole = _mm512_permutexvar_epi16(paired, narrowed(first, second));
  _mm512_store_si512(high, whole);
  if constexpr (!LOW) return false;
  const __m512 first_left = _mm512_sub_ps(first, low_half(whole)), second_left = _mm512_sub_ps(second, high_half(whole));
  _mm512_store_si512(low, _mm512_permutexvar_epi16(paired, narrowed(first_left, second_left)));
  return (_mm512_cmp_ps_mask(first_left, _mm512_setzero_ps(), _CMP_NEQ_UQ) |
          _mm512_cmp_ps_mask(second_left, _mm512_setzero_ps(), _CMP_NEQ_UQ)) != 0;
}
#else
template <bool LOW>
inline float halve(float x, uint16_t* high, [[maybe_unused]] uint16_t* low) {
  *high = BF16::narrow(x);
  if constexpr (!LOW) return 0;
  const float left = x - BF16::one(*high);
  *low = BF16::narrow(left);
  return left;
}

template <bool LOW>
inline void halve_in_order(const float* x, uint16_t* high, uint16_t* low) {
  for (int i = 0; i < kDeep; ++i) halve<LOW>(x[i], high + i, low + i);
}

template <bool LOW>
inline bool halve_in_pairs(const float* even, const float* odd, uint16_t* high, uint16_t* low) {
  bool any = false;
  for (int c = 0; c < kSide; ++c) {
    any |= halve<LOW>(even[c], high + 2 * c, low + 2 * c) != 0;
    any |= halve<LOW>(odd[c], high + 2 * c + 1, low + 2 * c + 1) != 0;
  }
  return any;
}
#endif

#ifdef __AMX_BF16__
// Tiles set up for this job. Another library may keep its own set-up on this thread: it is put back.
struct Tiles {
  Tiles() {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {};
      uint8_t rows[16] = {};
    } wanted;
    static_assert(sizeof wanted == 64, "the processor reads 64 bytes");
    for (int i = 0; i < 8; ++i) {
      wanted.bytes_of_row[i] = 2 * kDeep;
      wanted.rows[i] = kSide;
    }
    _tile_storeconfig(before);
    _tile_loadconfig(&wanted);
  }
  ~Tiles() { _tile_loadconfig(before); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  alignas(64) uint8_t before[64];
};
#else
struct Tiles {};
#endif

// Two tiles side by side or one above the other, of a left side (16 rows, 32 inputs) or a right one (16 pairs of inputs, 16
// columns, 2): numbers from row to row, to the second tile, and to the tiles of the next inputs.
struct TwoTiles {
  const uint16_t* at;
  int64_t row, second, step;
};

// The four tiles (16, 16) that two left ones make of two right ones.
struct FourTiles {
  float* at;
  int64_t row, below, beside;
};

struct Operands {
  TwoTiles a, b;
};

// c = a b, or with ADD c += a b, summed over `steps` tiles of inputs of all the operands.
template <bool ADD>
void multiply_pairs(std::initializer_list<Operands> all, int64_t steps, const FourTiles& c) {
#ifdef __AMX_BF16__
  const int64_t row = c.row * sizeof(float);
  if constexpr (ADD) {
    _tile_loadd(0, c.at, row);
    _tile_loadd(1, c.at + c.beside, row);
    _tile_loadd(2, c.at + c.below, row);
    _tile_loadd(3, c.at + c.below + c.beside, row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (const Operands& of : all) {
    const int64_t a_row = of.a.row * sizeof(uint16_t), b_row = of.b.row * sizeof(uint16_t);
    const uint16_t *a = of.a.at, *b = of.b.at;
    for (int64_t step = 0; step < steps; ++step, a += of.a.step, b += of.b.step) {
      _tile_loadd(4, a, a_row);
      _tile_loadd(6, b, b_row);
      _tile_loadd(5, a + of.a.second, a_row);
      _tile_loadd(7, b + of.b.second, b_row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c.at, row);
  _tile_stored(1, c.at + c.beside, row);
  _tile_stored(2, c.at + c.below, row);
  _tile_stored(3, c.at + c.below + c.beside, row);
#else
  for (int i = 0; i < 4; ++i) {
    float* out = c.at + i / 2 * c.below + i % 2 * c.beside;
    for (int r = 0; r < kSide; ++r) {
      for (int n = 0; n < kSide; ++n) {
        float sum = ADD ? out[r * c.row + n] : 0.0f;
        for (const Operands& of : all) {
          const uint16_t *a = of.a.at + i / 2 * of.a.second + r * of.a.row, *b = of.b.at + i % 2 * of.b.second + 2 * n;
          for (int64_t step = 0; step < steps; ++step, a += of.a.step, b += of.b.step) {
            float part = 0;
            for (int k = 0; k < kDeep; ++k) part += BF16::one(a[k]) * BF16::one(b[k / 2 * of.b.row + k % 2]);
            sum += part;
          }
        }
        out[r * c.row + n] = sum;
      }
    }
  }
#endif
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
