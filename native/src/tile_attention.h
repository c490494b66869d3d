// Attention of many tokens in tiles of bfloat16: queries, keys, values and weights are rounded to it, sums and the softmax are
// float32. Scores are made with keys as rows and queries as columns, so that a query is one lane of every vector: the softmax
// needs no sum across lanes, and weights are in the pairs that the second product reads.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"
#include "tile_products.h"

namespace asbuilt {
namespace KERNELS {
namespace {

constexpr int kKeysOfTiles = 2 * kDeep, kQueriesOfTiles = 2 * kSide;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

typedef uint32_t Word __attribute__((may_alias));  // two numbers of 16 bits

// 16 rows of 16 words, transposed.
#ifdef __AVX512F__
inline void transpose_words(const Word* in, Word* out) {
  __m512i t[kSide], u[kSide];
  for (int i = 0; i < kSide; ++i) t[i] = _mm512_load_si512(in + i * kSide);
  for (int i = 0; i < kSide; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // rows i, i + 4, i + 8 and i + 12 of the result lie in t[i], t[i + 4], ...
    const __m512i low = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), high = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    const __m512i low_after = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    const __m512i high_after = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    _mm512_store_si512(out + i * kSide, _mm512_shuffle_i32x4(low, low_after, 0x88));
    _mm512_store_si512(out + (i + 8) * kSide, _mm512_shuffle_i32x4(low, low_after, 0xdd));
    _mm512_store_si512(out + (i + 4) * kSide, _mm512_shuffle_i32x4(high, high_after, 0x88));
    _mm512_store_si512(out + (i + 12) * kSide, _mm512_shuffle_i32x4(high, high_after, 0xdd));
  }
}
#else
inline void transpose_words(const Word* in, Word* out) {
  for (int i = 0; i < kSide; ++i)
    for (int j = 0; j < kSide; ++j) out[j * kSide + i] = in[i * kSide + j];
}
#endif

// What one thread works in; numbers of a head are padded with zeros to `wide`, a multiple of 32.
struct TileRoom {
  int64_t D, wide, steps;                        // steps of 32 numbers
  uint16_t *keys, *values, *queries, *weights;   // (64 keys, wide); (wide / 16, 2 steps of keys, tile); see below; (2, 2, tile)
  float *scores, *sums, *most, *total, *plain;   // (64 keys, 32 queries); (groups, wide / 16, 16, 16); (queries) each
};

// Rows of codes or plain numbers as bfloat16, `wide` numbers apart. Rows beyond `n` and numbers beyond D stay zeros.
inline void read_rows(const AttendMany& job, const void* from, int64_t start, int64_t n, TileRoom& room, uint16_t* out) {
  const int code = job.type - kFormatCount;
  const auto narrowed_rows = [&](const float* rows) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < room.D; ++d) out[i * room.wide + d] = BF16::narrow(rows[i * room.D + d]);
  };
  if (code >= 0) {
    read_codes(code, static_cast<const uint8_t*>(from) + start * bytes_of_code(code, room.D), n, room.D, room.plain);
    return narrowed_rows(room.plain);
  }
  with_numbers(job.type, [&](auto* of) {
    using F = std::remove_pointer_t<decltype(of)>;
    const auto* rows = static_cast<const typename F::Stored*>(from) + start * room.D;
    if constexpr (std::is_same_v<F, BF16>) {
      for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * room.wide, rows + i * room.D, room.D * sizeof(uint16_t));
    } else if constexpr (std::is_same_v<F, F32>) {
      narrowed_rows(rows);
    } else {
      for (int64_t i = 0; i < n * room.D; ++i) room.plain[i] = F::one(rows[i]);
      narrowed_rows(room.plain);
    }
  });
}

// V^T in tiles, from 64 rows of V as `read_rows` makes them.
inline void transpose_values(const uint16_t* rows, const TileRoom& room, uint16_t* out) {
  alignas(64) Word pairs[kSide * kSide];
  for (int64_t d = 0; d < room.wide; d += kSide) {
    for (int step = 0; step < 2; ++step, out += kTile) {
      for (int pair = 0; pair < kSide; ++pair) {
        const uint16_t* even = rows + (step * kDeep + 2 * pair) * room.wide + d;
        const uint16_t* odd = even + room.wide;
#ifdef __AVX512F__
        const auto eight = [](const uint16_t* x) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
        };
        _mm512_store_si512(pairs + pair * kSide, _mm512_or_si512(eight(even), _mm512_slli_epi32(eight(odd), 16)));
#else
        for (int i = 0; i < kSide; ++i) pairs[pair * kSide + i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
#endif
      }
      transpose_words(pairs, reinterpret_cast<Word*>(out));
    }
  }
}

// Q^T in tiles, (rows / 16, steps, tile), of queries times `scale`; rows beyond the last repeat it.
inline void pack_queries(const AttendMany& job, int64_t first, int64_t rows, int64_t padded, float scale, const TileRoom& room) {
  alignas(64) float part[kDeep];
  alignas(64) uint16_t narrow[kTile];
  for (int64_t row = 0; row < padded; row += kSide) {
    for (int64_t step = 0; step < room.steps; ++step) {
      const int64_t n = std::min<int64_t>(kDeep, room.D - step * kDeep);
      for (int64_t r = 0; r < kSide; ++r) {
        const int64_t at = std::min(row + r, rows - 1);
        const float* q = job.q + (first + at / job.group) * job.q_stride + at % job.group * room.D + step * kDeep;
        for (int64_t d = 0; d < kDeep; ++d) part[d] = d < n ? q[d] * scale : 0.0f;
        halve_in_order<false>(part, narrow + r * kDeep, nullptr);
      }
      transpose_words(reinterpret_cast<const Word*>(narrow),
                      reinterpret_cast<Word*>(room.queries + (row / kSide * room.steps + step) * kTile));
    }
  }
}

#ifdef __AVX512F__
// 2^x for x <= 0, within 2^-18 of it: weights are rounded to 8 bits. 2^-inf is 0.
inline __m512 power_of_2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.342631e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.224308e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4127993e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9304488e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}
#endif

// Turns 16 columns of scores into weights 2^(score - most), in pairs of keys; `seen` keys of each column are visible.
// Returns whether the largest score of a column grew; `kept` is what the sums so far are worth then.
inline bool weigh_columns(float* scores, const int32_t* seen, bool masked, float* most, float* total, float* kept, uint16_t* out) {
#ifdef __AVX512F__
  const __m512 before = _mm512_loadu_ps(most);
  __m512 top = before;
  if (masked) {
    const __m512i visible = _mm512_loadu_si512(seen);
    for (int i = 0; i < kKeysOfTiles; ++i) {
      float* row = scores + i * kQueriesOfTiles;
      const __mmask16 shown = _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(i));
      const __m512 score = _mm512_mask_blend_ps(shown, _mm512_set1_ps(kNoScore), _mm512_load_ps(row));
      _mm512_store_ps(row, score);
      top = _mm512_max_ps(top, score);
    }
  } else {
    __m512 tops[4] = {top, top, top, top};
    for (int i = 0; i < kKeysOfTiles; i += 4)
      for (int j = 0; j < 4; ++j) tops[j] = _mm512_max_ps(tops[j], _mm512_load_ps(scores + (i + j) * kQueriesOfTiles));
    top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  }
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i paired = _mm512_load_si512(order);
  for (int i = 0; i < kKeysOfTiles; i += 2) {
    const float* row = scores + i * kQueriesOfTiles;
    const __m512 even = power_of_2(_mm512_sub_ps(_mm512_load_ps(row), top));
    const __m512 odd = power_of_2(_mm512_sub_ps(_mm512_load_ps(row + kQueriesOfTiles), top));
    sums[0] = _mm512_add_ps(sums[0], even);
    sums[1] = _mm512_add_ps(sums[1], odd);
    // the pairs of 32 keys are a tile, the next 32 the next
    _mm512_store_si512(out + i / kDeep * kTile + i % kDeep / 2 * kDeep, _mm512_permutexvar_epi16(paired, narrowed(even, odd)));
  }
  const __m512 left = power_of_2(_mm512_sub_ps(before, top));
  _mm512_storeu_ps(kept, left);
  _mm512_storeu_ps(most, top);
  _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), left, _mm512_add_ps(sums[0], sums[1])));
  return _mm512_cmp_ps_mask(before, top, _CMP_NEQ_UQ) != 0;
#else
  bool grew = false;
  for (int c = 0; c < kSide; ++c) {
    float top = most[c], sum = 0;
    for (int i = 0; i < kKeysOfTiles; ++i) {
      float& score = scores[i * kQueriesOfTiles + c];
      if (masked && i >= seen[c]) score = kNoScore;
      top = score > top ? score : top;
    }
    for (int i = 0; i < kKeysOfTiles; ++i) {
      const float weight = std::exp2(scores[i * kQueriesOfTiles + c] - top);
      sum += weight;
      out[i / kDeep * kTile + i % kDeep / 2 * kDeep + 2 * c + i % 2] = BF16::narrow(weight);
    }
    kept[c] = std::exp2(most[c] - top);
    total[c] = total[c] * kept[c] + sum;
    grew |= !(most[c] == top);
    most[c] = top;
  }
  return grew;
#endif
}

// One pair of groups of 16 queries and 64 keys.
inline void attend_to_keys(TileRoom& room, int64_t pair, const int32_t* seen, int64_t n) {
  const int64_t tiles = room.wide / kSide;
  const uint16_t* queries = room.queries + 2 * pair * room.steps * kTile;
  for (int half = 0; half < 2; ++half)
    multiply_pairs<false>({{{room.keys + half * kDeep * room.wide, room.wide, kSide * room.wide, kDeep},
                           {queries, kDeep, room.steps * kTile, kTile}}}, room.steps,
                          {room.scores + half * kDeep * kQueriesOfTiles, kQueriesOfTiles, kSide * kQueriesOfTiles, kSide});
  float* sums = room.sums + 2 * pair * tiles * kSide * kSide;
  const bool masked = *std::min_element(seen, seen + kQueriesOfTiles) < n || n < kKeysOfTiles;
  for (int group = 0; group < 2; ++group) {
    float kept[kSide], *here = sums + group * tiles * kSide * kSide;
    const int64_t at = pair * kQueriesOfTiles + group * kSide;
    if (weigh_columns(room.scores + group * kSide, seen + group * kSide, masked, room.most + at, room.total + at, kept,
                      room.weights + 2 * group * kTile)) {
      const Wide worth = wide(kept);
      for (int64_t d = 0; d < room.wide; ++d) *reinterpret_cast<Wide*>(here + d * kSide) *= worth;
    }
  }
  for (int64_t t = 0; t < tiles; t += 2)
    multiply_pairs<true>({{{room.values + 2 * t * kTile, kDeep, 2 * kTile, kTile}, {room.weights, kDeep, 2 * kTile, kTile}}}, 2,
                         {sums + t * kSide * kSide, kSide, kSide * kSide, tiles * kSide * kSide});
}

// Tokens first .. last - 1 of one text, for the query heads of one key head.
void attend_many_in_tiles(const AttendMany& job, int64_t first, int64_t last) {
  const int64_t D = job.d, G = job.group, rows = (last - first) * G;
  const int64_t pairs = (rows + kQueriesOfTiles - 1) / kQueriesOfTiles, padded = pairs * kQueriesOfTiles;
  TileRoom room{};
  room.D = D;
  room.wide = (D + kDeep - 1) / kDeep * kDeep;
  room.steps = room.wide / kDeep;
  static thread_local std::vector<float> floats;
  static thread_local std::vector<uint16_t> narrow, read;
  const int64_t of_scores = kKeysOfTiles * kQueriesOfTiles, of_block = kKeysOfTiles * room.wide;
  floats.assign(of_scores + padded * room.wide + 2 * padded + of_block + 16, 0.0f);
  narrow.resize(2 * of_block + padded * room.wide + 4 * kTile + 32);
  read.assign(of_block, 0);
  room.scores = aligned(floats.data());
  room.sums = room.scores + of_scores;
  room.most = room.sums + padded * room.wide;
  room.total = room.most + padded;
  room.plain = room.total + padded;
  room.keys = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(narrow.data()) + 63) & ~uintptr_t{63});
  room.values = room.keys + of_block;
  room.queries = room.values + of_block;
  room.weights = room.queries + padded * room.wide;
  std::fill_n(room.keys, of_block, uint16_t{0});
  std::fill_n(room.most, padded, kNoScore);
  constexpr float kLog2OfE = 1.44269504f;
  pack_queries(job, first, rows, padded, job.scale * kLog2OfE, room);
  [[maybe_unused]] const Tiles tiles;
  for (int64_t start = 0; start < job.past + last; start += kKeysOfTiles) {
    const int64_t n = std::min<int64_t>(kKeysOfTiles, job.past + last - start);
    read_rows(job, job.k, start, n, room, room.keys);
    read_rows(job, job.v, start, n, room, read.data());
    transpose_values(read.data(), room, room.values);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      int32_t seen[kQueriesOfTiles];
      for (int64_t r = 0; r < kQueriesOfTiles; ++r) {
        const int64_t row = std::min(pair * kQueriesOfTiles + r, rows - 1);
        seen[r] = static_cast<int32_t>(std::min<int64_t>(n, job.past + first + row / G + 1 - start));
      }
      if (seen[kQueriesOfTiles - 1] > 0) attend_to_keys(room, pair, seen, n);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* out = job.out + (first + row / G) * job.out_stride + row % G * D;
    const float *sums = room.sums + row / kSide * room.wide * kSide + row % kSide, per = 1.0f / room.total[row];
    for (int64_t d = 0; d < D; ++d) out[d] = sums[d * kSide] * per;
  }
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
