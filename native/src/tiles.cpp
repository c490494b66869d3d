// Products of many rows in the processor's tiles of bfloat16 (AMX), for weights of at most 16 bits. x and W are each the sum
// of two bfloat16, high and low, and high high + high low + low high is summed in float32: a product differs from the exact
// one by at most 2^-16 sum |w| |x|, besides the rounding of the sums. Numbers that are not finite give NaN. Where the model
// computes in bfloat16, high high alone: x and W rounded to it, within 2^-7 sum |w| |x|.

#include <cstring>

#include "tile_attention.h"

namespace asbuilt {
namespace KERNELS {
namespace {

template <bool LOW>  // a step is 32 inputs of 32 rows: two tiles of their high parts, with LOW two of the low ones
constexpr int64_t kStep = LOW ? 4 * kTile : 2 * kTile;
constexpr int kRowsOfTiles = 2 * kSide;
constexpr int64_t kPanels = kNearColumns / kColumns;
static_assert(kColumns == 2 * kSide && kDepth % kDeep == 0, "a panel of W is two tiles wide, of whole tiles");

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

// c (32, kColumns) = 32 rows of x times a panel of W, or c += it. With LOW x's low parts too, with `low` W's.
template <bool LOW>
void multiply_tiles(const uint16_t* x, const uint16_t* w, int64_t steps, [[maybe_unused]] bool low, bool add, float* c,
                    int64_t stride) {
  const auto part = [](const uint16_t* at, bool of_low) {
    return TwoTiles{at + (of_low ? 2 * kTile : 0), kDeep, kTile, kStep<LOW>};
  };
  const auto multiply = [&](std::initializer_list<Operands> all) {
    const FourTiles made{c, stride, kSide * stride, kSide};
    add ? multiply_pairs<true>(all, steps, made) : multiply_pairs<false>(all, steps, made);
  };
  if constexpr (!LOW) {
    multiply({{part(x, false), part(w, false)}});
  } else if (low) {
    multiply({{part(x, false), part(w, true)}, {part(x, true), part(w, false)}, {part(x, false), part(w, false)}});
  } else {
    multiply({{part(x, true), part(w, false)}, {part(x, false), part(w, false)}});
  }
}

// Writes rows of a product (rows, kColumns): y += it, or y = it + bias.
void write_rows(const float* made, bool add, const float* bias, int64_t rows, int64_t columns, float* y, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, made += kColumns, y += stride) {
    const float* before = add ? y : bias;
    for (int64_t c = 0; c < columns; ++c) y[c] = made[c] + (before ? before[c] : 0.0f);
  }
}

template <bool LOW>
void many_rows_in_tiles(const Packed& w, int64_t first, int64_t last, const float* from, int64_t rows, const float* bias,
                        float* y, int64_t stride) {
  alignas(64) static thread_local float plain[kDepth * kColumns], made[kRowsOfTiles * kColumns];
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
        const uint16_t* in = x + (row / kRowsOfTiles * steps + k / kDeep) * kStep<LOW>;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t tall = least(rows - row, kRowsOfTiles), broad = least(columns - i * kColumns, kColumns);
          const float* offset = bias ? bias + near + i * kColumns : nullptr;
          float* out = y + row * stride + near + i * kColumns;
          if (tall == kRowsOfTiles && broad == kColumns) {  // in place
            for (int64_t r = 0; r < tall && k == 0 && offset; ++r) std::memcpy(out + r * stride, offset, kColumns * sizeof(float));
            multiply_tiles<LOW>(in, panels[i], here, low[i], k > 0 || offset, out, stride);
          } else {
            multiply_tiles<LOW>(in, panels[i], here, low[i], false, made, kColumns);
            write_rows(made, k > 0, offset, tall, broad, out, stride);
          }
        }
      }
    }
  }
}

}  // namespace

extern const ManyRows kTiles, kTilesOfHigh;
extern void (*const kAttendInTiles)(const AttendMany& job, int64_t first, int64_t last);
void (*const kAttendInTiles)(const AttendMany& job, int64_t first, int64_t last) = attend_many_in_tiles;
const ManyRows kTiles = {kRowsOfTiles, kNearColumns, kDeep, 4, pack_rows_in_tiles<true>, many_rows_in_tiles<true>};
const ManyRows kTilesOfHigh = {kRowsOfTiles, kNearColumns, kDeep, 2, pack_rows_in_tiles<false>, many_rows_in_tiles<false>};

}  // namespace KERNELS
}  // namespace asbuilt
