// Attention of a training step in float32, causal or over all keys, and its gradients, by blocks of queries and of keys
// (Dao et al. 2022, arXiv 2205.14135): scores are computed again for the gradients, from each row's log-sum-exp.
#pragma once
#include <algorithm>
#include <vector>

#include "dense.h"
#include "gradients.h"

namespace asbuilt {
namespace KERNELS {
namespace {

// Queries and keys of a block. Tiles of queries and of keys then begin at equal places, so that each row of a tile of
// scores on the diagonal sees one key or more.
constexpr int64_t kBlockQueries = 48, kBlockKeys = 96;
static_assert(kBlockQueries % kTall == 0 && kBlockKeys % kTall == 0 && kBlockKeys % kColumns == 0);
// How far rows of a block lie apart: 16 more than they hold, so that a column is not all in a few sets of the cache.
constexpr int64_t kScoreStride = kBlockKeys + 16, kHeadStride = kWidestHead + 16;

template <int64_t N>
constexpr int64_t rounded_up(int64_t x) {
  return (x + N - 1) / N * N;
}

// y (kTall, V vectors) = a b, or += with ADD, of n inputs: `tile_of` with rows and inputs of `a` as far apart as given.
template <int V, int ROW, int INPUT, bool ADD>
inline void tile_to(const float* a, const float* b, int64_t b_stride, int64_t n, float* y, int64_t y_stride) {
  Wide sums[kTall][V];
#pragma GCC unroll 12
  for (int r = 0; r < kTall; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = ADD ? wide(y + r * y_stride + v * kLanes) : Wide{};
  for (int64_t i = 0; i < n; ++i, a += INPUT, b += b_stride) {
    Wide row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) row[v] = wide(b + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kTall; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] += a[r * ROW] * row[v];
  }
#pragma GCC unroll 12
  for (int r = 0; r < kTall; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) *reinterpret_cast<Wide*>(y + r * y_stride + v * kLanes) = sums[r][v];
}

// y (kTall, columns rounded up to whole vectors) = a b or += a b; of b, kColumns columns lie `panel` numbers apart.
template <int ROW, int INPUT, bool ADD>
void multiply(const float* a, const float* b, int64_t b_stride, int64_t panel, int64_t n, int64_t columns, float* y,
              int64_t y_stride) {
  for (int64_t at = 0; at < columns; at += kColumns, b += panel, y += kColumns) {
    if (columns - at > kLanes)
      tile_to<2, ROW, INPUT, ADD>(a, b, b_stride, n, y, y_stride);
    else
      tile_to<1, ROW, INPUT, ADD>(a, b, b_stride, n, y, y_stride);
  }
}

// Functions of rows of scores: n is a multiple of kLanes.

// The lanes of a vector joined by `join`, which takes vectors too.
template <class Join>
inline float joined(const Wide& x, Join&& join) {
  float lanes[kLanes], four[4];
  std::memcpy(lanes, &x, sizeof lanes);
  typedef float Four __attribute__((vector_size(16), aligned(4)));
  const auto at = [&](int i) { return *reinterpret_cast<const Four*>(lanes + i); };
  Four made = at(0);
  if constexpr (kLanes == 8) made = join(made, at(4));
  if constexpr (kLanes == 16) made = join(join(made, at(4)), join(at(8), at(12)));
  std::memcpy(four, &made, sizeof four);
  return join(join(four[0], four[1]), join(four[2], four[3]));
}

inline float largest_of(const float* row, int64_t n) {
  Wide most = wide(row);
  for (int64_t i = kLanes; i < n; i += kLanes) {
    const Wide next = wide(row + i);
    most = next > most ? next : most;
  }
  return joined(most, [](auto x, auto y) { return y > x ? y : x; });
}

inline float total_of(const float* row, int64_t n) {
  Wide sums = {};
  for (int64_t i = 0; i < n; i += kLanes) sums += wide(row + i);
  return joined(sums, [](auto x, auto y) { return x + y; });
}

// e^(score - most)
inline void weigh_row(float* row, int64_t n, float most) {
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t j = i; j < i + kLanes; ++j) row[j] = decay(row[j] - most);
}

// Scores of keys from `seen` on become -infinity.
inline void hide(float* row, int64_t seen, int64_t n) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t start = seen / kLanes * kLanes;
  const int32_t from = static_cast<int32_t>(seen - start);
  if (start == n) return;
  for (int32_t j = 0; j < kLanes; ++j) row[start + j] = j < from ? row[start + j] : kNone;
  for (int64_t i = start + kLanes; i < n; i += kLanes) *reinterpret_cast<Wide*>(row + i) = Wide{} + kNone;
}

// Blocks of one thread, and what it holds of the head at work; the room is kept for the next call.
struct AttentionRoom {
  int64_t width, stride;  // numbers of a head in whole vectors, and how far rows of all its keys are apart
  float *q, *dy, *sums, *weights, *slopes;  // of a block
  float *keys, *values, *turned_keys, *turned_values, *dk, *dv;  // of all keys; turned ones by panels of kColumns
  static constexpr int64_t kHead = kBlockQueries * kHeadStride, kScores = kBlockQueries * kScoreStride;

  explicit AttentionRoom(const TrainingAttention& job)
      : width(rounded_up<kLanes>(job.d)), stride(rounded_up<kColumns>(job.d) + 16) {
    static thread_local std::vector<float> room;
    const int64_t rows = rounded_up<kBlockKeys>(job.keys) * stride;
    const int64_t blocks = 3 * kHead + 2 * kScores;
    room.resize(std::max<size_t>(room.size(), blocks + 6 * rows + 16));
    float* at = aligned(room.data());
    for (float** block : {&q, &dy, &sums}) *block = at, at += kHead;
    for (float** block : {&weights, &slopes}) *block = at, at += kScores;
    for (float** head : {&keys, &values, &turned_keys, &turned_values, &dk, &dv}) *head = at, at += rows;
  }
};

using HeadRows = TrainingAttention::HeadRows;

inline const float* row_of(const HeadRows& x, int64_t text, int64_t head, int64_t token) {
  return x.data + text * x.strides[0] + head * x.strides[1] + token * x.strides[2];
}

// Rows of d numbers, times `by`, with zeros up to `width`; zeros too for rows `n` .. `all` - 1.
void copy_rows(const float* x, int64_t x_stride, int64_t n, int64_t all, int64_t d, int64_t width, float by, float* out,
               int64_t out_stride) {
  const int64_t whole = d / kLanes * kLanes;
  for (int64_t row = 0; row < n; ++row, x += x_stride, out += out_stride) {
    for (int64_t i = 0; i < whole; i += kLanes) *reinterpret_cast<Wide*>(out + i) = wide(x + i) * by;
    for (int64_t i = whole; i < d; ++i) out[i] = x[i] * by;
    for (int64_t i = d; i < width; ++i) out[i] = 0;
  }
  for (int64_t row = n; row < all; ++row, out += out_stride) std::fill_n(out, width, 0.0f);
}

// The transpose of n rows, (d, kColumns) for each kColumns of them, with zeros for rows that are not there.
void turn_rows(const float* x, int64_t x_stride, int64_t n, int64_t d, float* out) {
  for (int64_t row = 0; row < rounded_up<kColumns>(n); row += 8) {
    float* to = out + row / kColumns * kColumns * d + row % kColumns;
    const int64_t here = std::min<int64_t>(8, n - row);
    if (here > 0)
      transpose_rows<F32>(x + row * x_stride, x_stride, here, 0, d, to, kColumns);
    else
      for (int64_t i = 0; i < d; ++i) std::memset(to + i * kColumns, 0, 8 * sizeof(float));
  }
}

// Where a block of queries meets one of keys.
struct Meeting {
  int64_t query, rows, key, keys;  // where both begin, and how many they are
  bool causal;
  // How many keys of the block a query sees, and one of the rows of a tile.
  int64_t seen(int64_t row) const {
    return causal ? std::max<int64_t>(0, std::min(keys, query + row + 1 - key)) : keys;
  }
  int64_t seen_by_tile(int64_t first) const { return seen(first + kTall - 1); }
  int64_t tile_rows(int64_t first) const { return std::min<int64_t>(kTall, rows - first); }
};

// Calls work(where) for all blocks of keys that some query of a block sees.
template <class Work>
void each_block(const TrainingAttention& job, int64_t query, int64_t rows, Work&& work) {
  const int64_t last = job.causal ? std::min(job.keys, query + rows) : job.keys;
  for (int64_t key = 0; key < last; key += kBlockKeys)
    work(Meeting{query, rows, key, std::min(kBlockKeys, job.keys - key), job.causal});
}

// Scores of a tile of queries, or what their gradients times the values are: x (kTall, d) turned^T.
inline void meet(const TrainingAttention& job, const Meeting& at, int64_t first, const float* x, const float* turned,
                 float* out) {
  multiply<kHeadStride, 1, false>(x + first * kHeadStride, turned + at.key * job.d, kColumns, kColumns * job.d, job.d,
                                  at.seen_by_tile(first), out + first * kScoreStride, kScoreStride);
}

// Sums over the keys that a tile sees of weights (kTall, keys) times rows of the keys.
inline void mix(const AttentionRoom& room, const Meeting& at, int64_t first, const float* weights, const float* of_keys) {
  const float *a = weights + first * kScoreStride, *b = of_keys + at.key * room.stride;
  float* y = room.sums + first * kHeadStride;
  const int64_t n = at.seen_by_tile(first);
  if (at.key == 0)
    multiply<kScoreStride, 1, false>(a, b, room.stride, kColumns, n, room.width, y, kHeadStride);
  else
    multiply<kScoreStride, 1, true>(a, b, room.stride, kColumns, n, room.width, y, kHeadStride);
}

// The softmax's maximum and sum of each query of a block.
struct RowsSoFar {
  float most[kBlockQueries], total[kBlockQueries];
};

// Turns the scores of one tile into weights, and what is known of its rows to the new maximum. Each step takes all rows,
// which wait for each other nowhere.
void weigh_tile(const AttentionRoom& room, const Meeting& at, int64_t first, RowsSoFar& known) {
  const int64_t n = rounded_up<kLanes>(at.seen_by_tile(first)), last = first + at.tile_rows(first);
  float most[kTall], *scores = room.weights + first * kScoreStride;
  for (int64_t row = first; row < last; ++row) hide(room.weights + row * kScoreStride, at.seen(row), n);
  for (int64_t row = 0; row < last - first; ++row) most[row] = largest_of(scores + row * kScoreStride, n);
  if (at.key > 0)
    for (int64_t row = 0; row < last - first; ++row) most[row] = std::max(known.most[first + row], most[row]);
  for (int64_t row = 0; row < last - first; ++row) weigh_row(scores + row * kScoreStride, n, most[row]);
  for (int64_t row = first; row < last; ++row) {
    const float total = total_of(room.weights + row * kScoreStride, n), top = most[row - first];
    if (at.key == 0) {
      known.total[row] = total;
    } else {
      const float kept = decay(known.most[row] - top);
      float* sums = room.sums + row * kHeadStride;
      known.total[row] = known.total[row] * kept + total;
      for (int64_t i = 0; kept != 1.0f && i < room.width; i += kLanes)
        *reinterpret_cast<Wide*>(sums + i) = wide(sums + i) * kept;
    }
    known.most[row] = top;
  }
}

// Attention of a block of queries of one head.
void attend_block(const TrainingAttention& job, const AttentionRoom& room, int64_t text, int64_t head, int64_t query) {
  const int64_t rows = std::min(kBlockQueries, job.tokens - query);
  copy_rows(row_of(job.q, text, head, query), job.q.strides[2], rows, rounded_up<kTall>(rows), job.d, job.d, job.scale,
            room.q, kHeadStride);
  RowsSoFar known;
  each_block(job, query, rows, [&](const Meeting& at) {
    for (int64_t first = 0; first < rows; first += kTall) {
      if (at.seen_by_tile(first) == 0) continue;
      meet(job, at, first, room.q, room.turned_keys, room.weights);
      weigh_tile(room, at, first, known);
      mix(room, at, first, room.weights, room.values);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = (text * job.tokens + query + row) * job.heads + head;
    const float per = 1.0f / known.total[row];
    for (int64_t i = 0; i < job.d; ++i) job.y[place * job.d + i] = room.sums[row * kHeadStride + i] * per;
    job.log_z[place] = known.most[row] + std::log(known.total[row]);
  }
}

// What queries from row `from` on give a tile of keys: of dv weights^T dy, of dk slopes^T q.
inline void give(const AttentionRoom& room, const Meeting& at, int64_t from, int64_t key, bool add) {
  const auto product = add ? multiply<1, kScoreStride, true> : multiply<1, kScoreStride, false>;
  const int64_t scores = from * kScoreStride + key, heads = from * kHeadStride, place = (at.key + key) * room.stride;
  product(room.weights + scores, room.dy + heads, kHeadStride, kColumns, at.rows - from, room.width, room.dv + place,
          room.stride);
  product(room.slopes + scores, room.q + heads, kHeadStride, kColumns, at.rows - from, room.width, room.dk + place,
          room.stride);
}

// The gradients of one block: dq of its queries, and what they add to dk and dv.
void attend_block_back(const TrainingAttention& job, const AttentionRoom& room, int64_t text, int64_t head,
                       int64_t query) {
  const int64_t rows = std::min(kBlockQueries, job.tokens - query), all = rounded_up<kTall>(rows), d = job.d;
  const float* dy = row_of(job.dy, text, head, query);
  copy_rows(row_of(job.q, text, head, query), job.q.strides[2], rows, all, d, room.width, job.scale, room.q, kHeadStride);
  copy_rows(dy, job.dy.strides[2], rows, all, d, room.width, 1.0f, room.dy, kHeadStride);
  float log_z[kBlockQueries], along[kBlockQueries];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = (text * job.tokens + query + row) * job.heads + head;
    log_z[row] = job.log_z[place];
    along[row] = dot(room.dy + row * kHeadStride, job.y + place * d, d);
  }
  each_block(job, query, rows, [&](const Meeting& at) {
    for (int64_t first = 0; first < rows; first += kTall) {
      const int64_t n = rounded_up<kLanes>(at.seen_by_tile(first));
      if (n == 0) continue;
      meet(job, at, first, room.q, room.turned_keys, room.weights);
      meet(job, at, first, room.dy, room.turned_values, room.slopes);
      for (int64_t row = first; row < first + at.tile_rows(first); ++row) {
        float *weights = room.weights + row * kScoreStride, *slopes = room.slopes + row * kScoreStride;
        hide(weights, at.seen(row), n);
        weigh_row(weights, n, log_z[row]);
        for (int64_t i = 0; i < n; i += kLanes)
          *reinterpret_cast<Wide*>(slopes + i) = wide(weights + i) * (wide(slopes + i) - along[row]);
      }
      mix(room, at, first, room.slopes, room.keys);
    }
    for (int64_t key = 0; key < at.keys; key += kTall) {
      const int64_t from = at.causal ? std::max<int64_t>(0, at.key + key - query) : 0;
      if (from >= rows) break;
      // the first block of queries that sees these keys
      const bool add = head % (job.heads / job.key_heads) > 0 || (at.causal ? at.key + key < query : query > 0);
      give(room, at, from, key, add);
    }
  });
  float* dq = job.dq + ((text * job.tokens + query) * job.heads + head) * d;
  copy_rows(room.sums, kHeadStride, rows, rows, d, d, job.scale, dq, job.heads * d);
}

// One key head of one text, with all queries that read it: attention, or with `dy` its gradients.
void attend_in_training(const TrainingAttention& job, int64_t text, int64_t key_head) {
  const AttentionRoom room(job);
  const int64_t d = job.d, keys = job.keys, group = job.heads / job.key_heads;
  const float *k = row_of(job.k, text, key_head, 0), *v = row_of(job.v, text, key_head, 0);
  turn_rows(k, job.k.strides[2], keys, d, room.turned_keys);
  if (job.dy.data) {
    turn_rows(v, job.v.strides[2], keys, d, room.turned_values);
    copy_rows(k, job.k.strides[2], keys, keys, d, room.width, 1.0f, room.keys, room.stride);
  } else {
    copy_rows(v, job.v.strides[2], keys, keys, d, room.width, 1.0f, room.values, room.stride);
  }
  const auto block = job.dy.data ? attend_block_back : attend_block;
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
    for (int64_t query = 0; query < job.tokens; query += kBlockQueries) block(job, room, text, head, query);
  if (!job.dy.data) return;
  const int64_t place = (text * keys * job.key_heads + key_head) * d, apart = job.key_heads * d;
  copy_rows(room.dk, room.stride, keys, keys, d, d, 1.0f, job.dk + place, apart);
  copy_rows(room.dv, room.stride, keys, keys, d, d, 1.0f, job.dv + place, apart);
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
