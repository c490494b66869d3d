// Products of many rows in the processor's tiles of bfloat16 (AMX), for weights of at most 16 bits. x and W are each the sum
// of two bfloat16, high and low, and high high + high low + low high is summed in float32: a product differs from the exact
// one by at most 2^-16 sum |w| |x|, besides the rounding of the sums. Numbers that are not finite give NaN. Where the model
// computes in bfloat16, high high alone: x and W rounded to it, within 2^-7 sum |w| |x|.

#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "dense.h"

namespace asbuilt {
namespace KERNELS {
namespace {

constexpr int kSide = 16, kDeep = 32;         // rows and inputs of a tile
constexpr int64_t kTile = kSide * kDeep;      // numbers of a tile
template <bool LOW>  // a step is 32 inputs of 32 rows: two tiles of their high parts, with LOW two of the low ones
constexpr int64_t kStep = LOW ? 4 * kTile : 2 * kTile;
constexpr int kRowsOfTiles = 2 * kSide;
constexpr int64_t kPanels = kNearColumns / kColumns;
static_assert(kColumns == 2 * kSide && kDepth % kDeep == 0, "a panel of W is two tiles wide, of whole tiles");

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

// out (rows / 32 rounded up, steps of 32 inputs, kStep), zeros beyond the last row and input.
template <bool LOW>
void pack_rows_in_tiles(const float* x, int64_t rows, int64_t inputs, int64_t stride, float* to) {
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int64_t first = 0; first < rows; first += kRowsOfTiles) {
    for (int64_t k = 0; k < inputs; k += kDeep, out += kStep<LOW>) {
      for (int64_t r = 0; r < kRowsOfTiles; ++r) {
        const float* in = x + (first + r) * stride + k;
        const int64_t n = first + r >= rows ? 0 : inputs - k < kDeep ? inputs - k : kDeep;
        float part[kDeep] = {};
        if (n < kDeep) {
          if (n > 0) std::memcpy(part, in, n * sizeof(float));
          in = part;
        }
        halve_in_order<LOW>(in, out + r * kDeep, out + r * kDeep + 2 * kTile);
      }
    }
  }
}

// A panel of W, (inputs, kColumns), as steps: pairs of inputs side by side, (16 pairs, 16 columns, 2) in a tile. Returns
// whether a low part is other than zero.
template <bool LOW>
bool pack_panel(const float* panel, int64_t inputs, uint16_t* out) {
  bool any = false;
  for (int64_t k = 0; k < inputs; k += kDeep, out += kStep<LOW>) {
    for (int pair = 0; pair < kSide; ++pair, panel += 2 * kColumns) {
      for (int half = 0; half < 2; ++half) {
        uint16_t* high = out + half * kTile + pair * kDeep;
        any |= halve_in_pairs<LOW>(panel + half * kSide, panel + kColumns + half * kSide, high, high + 2 * kTile);
      }
    }
  }
  return any;
}

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

// out (32, kColumns), rows kNearColumns apart, = 32 rows of x times a panel of W. With LOW x's low parts too, with `low` W's.
template <bool LOW>
void multiply_tiles(const uint16_t* x, const uint16_t* w, int64_t steps, [[maybe_unused]] bool low, float* out) {
  constexpr int64_t bytes = 2 * kDeep;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#define MULTIPLY_ALL     \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7);
  for (int64_t step = 0; step < steps; ++step, x += kStep<LOW>, w += kStep<LOW>) {
    _tile_loadd(4, x, bytes);
    _tile_loadd(5, x + kTile, bytes);
    if (LOW && low) {
      _tile_loadd(6, w + 2 * kTile, bytes);
      _tile_loadd(7, w + 3 * kTile, bytes);
      MULTIPLY_ALL
    }
    _tile_loadd(6, w, bytes);
    _tile_loadd(7, w + kTile, bytes);
    MULTIPLY_ALL
    if constexpr (LOW) {
      _tile_loadd(4, x + 2 * kTile, bytes);
      _tile_loadd(5, x + 3 * kTile, bytes);
      MULTIPLY_ALL
    }
  }
#undef MULTIPLY_ALL
  constexpr int64_t row = kNearColumns * sizeof(float);
  _tile_stored(0, out, row);
  _tile_stored(1, out + kSide, row);
  _tile_stored(2, out + kSide * kNearColumns, row);
  _tile_stored(3, out + kSide * kNearColumns + kSide, row);
}
#else
// The same in plain code, to be tested where there are no tiles.
struct Tiles {};

template <bool LOW>
void multiply_tiles(const uint16_t* x, const uint16_t* w, int64_t steps, bool low, float* out) {
  for (int r = 0; r < kRowsOfTiles; ++r) std::memset(out + r * kNearColumns, 0, kColumns * sizeof(float));
  for (int64_t step = 0; step < steps; ++step, x += kStep<LOW>, w += kStep<LOW>) {
    for (int part = low ? 0 : 1; part < (LOW ? 3 : 2); ++part) {
      const uint16_t *a = x + (part == 2 ? 2 * kTile : 0), *b = w + (part == 0 ? 2 * kTile : 0);
      for (int r = 0; r < kRowsOfTiles; ++r)
        for (int c = 0; c < kColumns; ++c)
          for (int k = 0; k < kDeep; ++k)
            out[r * kNearColumns + c] += BF16::one(a[r * kDeep + k]) *
                                     BF16::one(b[c / kSide * kTile + k / 2 * kDeep + 2 * (c % kSide) + k % 2]);
    }
  }
}
#endif

// Writes rows of a product (rows, kNearColumns): y += it, or y = it + bias.
void write_rows(const float* made, bool add, const float* bias, int64_t rows, int64_t columns, float* y, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, made += kNearColumns, y += stride) {
    const float* before = add ? y : bias;
    if (!before) {
      std::memcpy(y, made, columns * sizeof(float));
    } else if (columns == kNearColumns) {
      for (int64_t c = 0; c < kNearColumns; c += kLanes) *reinterpret_cast<Wide*>(y + c) = wide(made + c) + wide(before + c);
    } else {
      for (int64_t c = 0; c < columns; ++c) y[c] = made[c] + before[c];
    }
  }
}

template <bool LOW>
void many_rows_in_tiles(const Packed& w, int64_t first, int64_t last, const float* from, int64_t rows, const float* bias,
                        float* y, int64_t stride) {
  alignas(64) static thread_local float plain[kDepth * kColumns], made[kRowsOfTiles * kNearColumns];
  alignas(64) static thread_local uint16_t panels[kPanels][kDepth / kDeep * kStep<LOW>];
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const Unpack unpack = unpacking(w.format);
  const auto* x = reinterpret_cast<const uint16_t*>(from);
  const int64_t steps = (w.inputs + kDeep - 1) / kDeep;
  [[maybe_unused]] const Tiles tiles;
  for (int64_t near = first; near < last; near += kNearColumns) {
    const int64_t columns = least(last - near, kNearColumns), count = (columns + kColumns - 1) / kColumns;
    for (int64_t k = 0; k < w.inputs; k += kDepth) {
      const int64_t n = least(w.inputs - k, kDepth), here = (n + kDeep - 1) / kDeep;
      bool low[kPanels];
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t at = 0; at < kColumns; at += kRows) unpack(w, near + i * kColumns + at, k, k + n, plain + at);
        std::memset(plain + n * kColumns, 0, (here * kDeep - n) * kColumns * sizeof(float));
        low[i] = pack_panel<LOW>(plain, here * kDeep, panels[i]);
      }
      for (int64_t row = 0; row < rows; row += kRowsOfTiles) {
        for (int64_t i = 0; i < count; ++i)
          multiply_tiles<LOW>(x + (row / kRowsOfTiles * steps + k / kDeep) * kStep<LOW>, panels[i], here, low[i],
                              made + i * kColumns);
        write_rows(made, k > 0, bias ? bias + near : nullptr, least(rows - row, kRowsOfTiles), columns,
                   y + row * stride + near, stride);
      }
    }
  }
}

}  // namespace

extern const ManyRows kTiles, kTilesOfHigh;
const ManyRows kTiles = {kRowsOfTiles, kNearColumns, kDeep, 4, pack_rows_in_tiles<true>, many_rows_in_tiles<true>};
const ManyRows kTilesOfHigh = {kRowsOfTiles, kNearColumns, kDeep, 2, pack_rows_in_tiles<false>, many_rows_in_tiles<false>};

}  // namespace KERNELS
}  // namespace asbuilt
