// Attention in float32: of one token over a run of keys, and of many tokens, causally.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"
#include "dense.h"

namespace asbuilt {
namespace KERNELS {
namespace {

constexpr int64_t kKeys = 64;  // that are read together

// Adds some keys, at most kKeys, to what query `g` knows of its softmax: e^(score - most).
template <class F>
void attend_to(const Attend& job, int64_t g, const typename F::Stored* keys, const typename F::Stored* values, int64_t n) {
  const int64_t D = job.d;
  const float* q = job.q + g * D;
  float scores[kKeys], *sums = job.sums + g * D, largest = job.most[g];
  for (int64_t i = 0; i < n; ++i) {
    scores[i] = dot_with<F>(q, keys + i * D, D) * job.scale;
    largest = scores[i] > largest ? scores[i] : largest;
  }
  if (largest > job.most[g]) {
    const float kept = power(job.most[g] - largest);
    job.total[g] *= kept;
    for (int64_t d = 0; d < D; ++d) sums[d] *= kept;
    job.most[g] = largest;
  }
  for (int64_t i = 0; i < n; ++i) scores[i] = power(scores[i] - largest);
  float total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float weight = scores[i];
    const auto* v = values + i * D;
    total += weight;
    int64_t d = 0;
    for (; d + 8 <= D; d += 8) store(sums + d, load(sums + d) + weight * F::eight(v + d));
    for (; d < D; ++d) sums[d] += weight * F::one(v[d]);
  }
  job.total[g] += total;
}

// The softmax of a run of keys, with what its neighbours need to be joined with it.
void attend(const Attend& job, int64_t first, int64_t last) {
  const int code = job.type - kFormatCount;
  const int64_t D = job.d, bytes = code < 0 ? 0 : bytes_of_code(code, D);
  std::fill_n(job.most, job.group, -std::numeric_limits<float>::infinity());
  std::fill_n(job.total, job.group, 0.0f);
  std::fill_n(job.sums, job.group * D, 0.0f);
  static thread_local std::vector<float> keys, values;
  if (code >= 0) {
    keys.resize(kKeys * D);
    values.resize(kKeys * D);
  }
  for (int64_t start = first; start < last; start += kKeys) {
    const int64_t n = std::min(kKeys, last - start);
    if (code >= 0) {
      read_codes(code, static_cast<const uint8_t*>(job.k) + start * bytes, n, D, keys.data());
      read_codes(code, static_cast<const uint8_t*>(job.v) + start * bytes, n, D, values.data());
      for (int64_t g = 0; g < job.group; ++g) attend_to<F32>(job, g, keys.data(), values.data(), n);
    } else {
      with_numbers(job.type, [&](auto* of) {
        using F = std::remove_pointer_t<decltype(of)>;
        const auto *k = static_cast<const typename F::Stored*>(job.k), *v = static_cast<const typename F::Stored*>(job.v);
        for (int64_t g = 0; g < job.group; ++g) attend_to<F>(job, g, k + start * D, v + start * D, n);
      });
    }
  }
}

// A tile of keys, as tiles of x W^T read them: K^T (D, kColumns) panels, and V (kKeys, D rounded up to kColumns).
struct KeyTile {
  int64_t D, wide_D, n;
  std::vector<float> keys, values, wide_keys, wide_values;  // the latter: codes as floats

  explicit KeyTile(int64_t d) : D(d), wide_D((d + kColumns - 1) / kColumns * kColumns), n(0) {
    keys.resize(kKeys * D);
    values.resize(kKeys * wide_D);
  }

  // `count` keys from `start` on.
  template <class F>
  void read(const void* all_keys, const void* all_values, int64_t start, int64_t count) {
    const auto* k = static_cast<const typename F::Stored*>(all_keys) + start * D;
    const auto* v = static_cast<const typename F::Stored*>(all_values) + start * D;
    n = count;
    for (int64_t at = 0; at < kKeys; at += 8) {
      float* out = keys.data() + at / kColumns * kColumns * D + at % kColumns;
      const int64_t rows = std::min<int64_t>(8, n - at);
      if (rows > 0) {
        transpose_rows<F>(k + at * D, D, rows, 0, D, out, kColumns);
      } else {
        for (int64_t i = 0; i < D; ++i) std::memset(out + i * kColumns, 0, 8 * sizeof(float));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      int64_t d = 0;
      for (; d + 8 <= D; d += 8) store(&values[i * wide_D + d], F::eight(v + i * D + d));
      for (; d < D; ++d) values[i * wide_D + d] = F::one(v[i * D + d]);
    }
  }

  void read(const AttendMany& job, int64_t start, int64_t count) {
    if (job.type < kFormatCount)
      return with_numbers(job.type, [&](auto* of) { read<std::remove_pointer_t<decltype(of)>>(job.k, job.v, start, count); });
    const int code = job.type - kFormatCount;
    const int64_t at = start * bytes_of_code(code, D);
    wide_keys.resize(kKeys * D);
    wide_values.resize(kKeys * D);
    read_codes(code, static_cast<const uint8_t*>(job.k) + at, count, D, wide_keys.data());
    read_codes(code, static_cast<const uint8_t*>(job.v) + at, count, D, wide_values.data());
    read<F32>(wide_keys.data(), wide_values.data(), 0, count);
  }
};

// The rows of one tile of queries: what of the softmax is known so far.
struct Softmax {
  float most[kTall], total[kTall], kept[kTall];
};

// Turns scores (kTall, kKeys) into weights e^(score - most), 0 for keys that a row does not see.
void weigh(float (&scores)[kTall][kKeys], const int64_t (&seen)[kTall], int64_t n, Softmax& so_far) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float before[kTall];
  std::memcpy(before, so_far.most, sizeof before);
  for (int r = 0; r < kTall; ++r) {
    float* row = scores[r];
    for (int64_t i = std::max<int64_t>(0, std::min(n, seen[r])); i < kKeys; ++i) row[i] = kNone;
    f8 top = all_of(before[r]);
    for (int64_t i = 0; i < kKeys; i += 8) top = larger(load(row + i), top);
    for (int i = 0; i < 8; ++i) so_far.most[r] = top[i] > so_far.most[r] ? top[i] : so_far.most[r];
  }
  for (int r = 0; r < kTall; ++r) so_far.kept[r] = power(before[r] - so_far.most[r]);
  for (int r = 0; r < kTall; ++r) {
    float *row = scores[r], most = so_far.most[r];
    f8 total = {};
    for (int64_t i = 0; i < kKeys; ++i) row[i] = power(row[i] - most);
    for (int64_t i = 0; i < kKeys; i += 8) total += load(row + i);
    so_far.total[r] = so_far.total[r] * so_far.kept[r] + sum_of(total);
  }
}

// Tokens first .. last - 1 of one text, for the query heads of one key head.
void attend_many(const AttendMany& job, int64_t first, int64_t last) {
  const int64_t D = job.d, G = job.group, rows = (last - first) * G, tiles = (rows + kTall - 1) / kTall;
  KeyTile tile(D);
  std::vector<float> queries(tiles * kTall * D), sums(tiles * kTall * tile.wide_D, 0.0f);
  std::vector<Softmax> softmax(tiles);
  for (int64_t row = 0; row < tiles * kTall; ++row) {
    float* out = &queries[row / kTall * kTall * D + row % kTall];
    const float* q = job.q + (first + row / G) * job.q_stride + row % G * D;
    for (int64_t d = 0; d < D; ++d) out[d * kTall] = row < rows ? q[d] * job.scale : 0.0f;
    softmax[row / kTall].most[row % kTall] = -std::numeric_limits<float>::infinity();
    softmax[row / kTall].total[row % kTall] = 0;
  }
  for (int64_t start = 0; start < job.past + last; start += kKeys) {
    tile.read(job, start, std::min(kKeys, job.past + last - start));
    for (int64_t t = 0; t < tiles; ++t) {
      int64_t seen[kTall];
      for (int r = 0; r < kTall; ++r) seen[r] = job.past + first + std::min(t * kTall + r, rows - 1) / G + 1 - start;
      if (seen[kTall - 1] <= 0) continue;
      alignas(64) float scores[kTall][kKeys];
      for (int64_t at = 0; at < tile.n; at += kColumns) {
        Wide made[kTall][2] = {};
        tile_of<1, kTall>(&queries[t * kTall * D], &tile.keys[at * D], kColumns, D, made);
        for (int r = 0; r < kTall; ++r) std::memcpy(&scores[r][at], made[r], sizeof made[r]);
      }
      weigh(scores, seen, tile.n, softmax[t]);
      for (int64_t d = 0; d < tile.wide_D; d += kColumns) {
        Wide made[kTall][2];
        float* here = &sums[t * kTall * tile.wide_D + d];
        for (int r = 0; r < kTall; ++r) {
          made[r][0] = wide(here + r * tile.wide_D) * softmax[t].kept[r];
          made[r][1] = wide(here + r * tile.wide_D + kLanes) * softmax[t].kept[r];
        }
        tile_of<kKeys, 1>(scores[0], &tile.values[d], tile.wide_D, tile.n, made);
        for (int r = 0; r < kTall; ++r) std::memcpy(here + r * tile.wide_D, made[r], sizeof made[r]);
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* out = job.out + (first + row / G) * job.out_stride + row % G * D;
    const float per = 1.0f / softmax[row / kTall].total[row % kTall];
    for (int64_t d = 0; d < D; ++d) out[d] = sums[row * tile.wide_D + d] * per;
  }
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
