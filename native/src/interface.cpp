// The functions that Python calls, and the choice of an instruction set.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#define KERNELS listed
#include "formats.h"
#undef KERNELS
#include "kernels.h"
#include "pool.h"

namespace asbuilt {

#define LIST(F) \
  {#F, listed::F::VALUES, listed::F::BYTES, listed::F::units, static_cast<int>(sizeof(listed::F::units) / sizeof(int))},
const Format kFormats[] = {ALL_FORMATS(LIST)};
const int kFormatCount = static_cast<int>(sizeof(kFormats) / sizeof(Format));

namespace portable {
extern const Kernels kTable;
}
#ifdef HAS_avx2
namespace avx2 {
extern const Kernels kTable;
}
#endif

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#ifdef HAS_avx2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&avx2::kTable);
#endif
  found.push_back(&portable::kTable);
  return found;
}

const Kernels*& chosen() {
  static const Kernels* one = usable().front();
  return one;
}

// Pieces of about equal size, several for each thread, so that a thread that the machine took away delays little.
constexpr int64_t kBytesOfPiece = 48 << 10;

// y = x W^T + bias of several matrices with one x (rows, inputs): of each y (rows, rows of W), rows `stride` apart.
void multiply(int count, const Packed* matrices, const float* x, int64_t rows, int64_t x_stride,
              const float* const* biases, float* const* outs, const int64_t* strides) {
  const Kernels& k = *chosen();
  const int64_t inputs = matrices[0].inputs, per_row = inputs / kGroup;
  static thread_local std::vector<Rounded> rounded;
  static thread_local std::vector<int64_t> first_piece, run;
  rounded.resize(static_cast<size_t>(rows * per_row));
  Rounded* r = rounded.data();
  if (rows < 8) {
    k.round_rows(x, rows, inputs, x_stride, r);
  } else {
    each((rows + 7) / 8, [&](int64_t i) {
      k.round_rows(x + 8 * i * x_stride, std::min<int64_t>(8, rows - 8 * i), inputs, x_stride, r + 8 * i * per_row);
    });
  }
  // a piece is a run of groups of one matrix
  first_piece.assign(1, 0);
  run.clear();
  for (int i = 0; i < count; ++i) {
    const Format& f = kFormats[matrices[i].format];
    const int64_t groups = matrices[i].rows / kRows, bytes = kRows * (inputs / f.values) * f.bytes;
    run.push_back(std::max<int64_t>(1, kBytesOfPiece / (bytes * std::min<int64_t>(rows, 4))));
    first_piece.push_back(first_piece.back() + (groups + run.back() - 1) / run.back());
  }
  const int64_t *starts = first_piece.data(), *runs = run.data();
  each(first_piece.back(), [&](int64_t piece) {
    int i = 0;
    while (piece >= starts[i + 1]) ++i;
    const Packed& w = matrices[i];
    const int64_t first = (piece - starts[i]) * runs[i];
    k.packed_groups(w, first, std::min(first + runs[i], w.rows / kRows), r, rows, biases[i], outs[i], strides[i]);
  });
  for (int i = 0; i < count; ++i)
    if (matrices[i].rows % kRows) k.packed_tail(matrices[i], x, rows, x_stride, biases[i], outs[i], strides[i]);
}

}  // namespace
}  // namespace asbuilt

using namespace asbuilt;
#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC int asbuilt_version() { return 1; }
PUBLIC const char* asbuilt_instructions() { return chosen()->name; }

// Chooses an instruction set by name; 0 if this processor or build lacks it.
PUBLIC int asbuilt_choose(const char* name) {
  for (const Kernels* one : usable()) {
    if (std::strcmp(one->name, name) == 0) {
      chosen() = one;
      return 1;
    }
  }
  return 0;
}

PUBLIC void asbuilt_threads(int count) { set_threads(count); }

// The number of a format by its name in capitals, -1 for none.
PUBLIC int asbuilt_format(const char* name) {
  for (int i = 0; i < kFormatCount; ++i)
    if (std::strcmp(kFormats[i].name, name) == 0) return i;
  return -1;
}

// Interleaves, in place, whole groups of 8 rows of a matrix (rows, row_bytes) of blocks; `back` undoes it.
PUBLIC void asbuilt_interleave(int format, uint8_t* data, int64_t rows, int64_t inputs, int back) {
  const Format& f = kFormats[format];
  const int64_t blocks = inputs / f.values, row_bytes = blocks * f.bytes;
  each(rows / kRows, [&](int64_t group) {
    uint8_t* here = data + group * kRows * row_bytes;
    std::vector<uint8_t> old(here, here + kRows * row_bytes);
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t start = 0;
      for (int u = 0; u < f.n_units; ++u) {
        const int size = f.units[u];
        for (int row = 0; row < kRows; ++row) {
          const int64_t plain = row * row_bytes + block * f.bytes + start;
          const int64_t mixed = block * kRows * f.bytes + kRows * start + row * size;
          std::memcpy(here + (back ? plain : mixed), old.data() + (back ? mixed : plain), size);
        }
        start += size;
      }
    }
  });
}

PUBLIC void asbuilt_packed(int count, const Packed* matrices, const float* x, int64_t rows, int64_t x_stride,
                           const float* const* biases, float* const* outs, const int64_t* strides) {
  multiply(count, matrices, x, rows, x_stride, biases, outs, strides);
}

// Rows of a packed table, (count, inputs).
PUBLIC void asbuilt_rows(const Packed* table, const int64_t* index, int64_t count, float* out) {
  const Kernels& k = *chosen();
  each(count, [&](int64_t i) { k.unpack_row(*table, index[i], out + i * table->inputs); });
}

PUBLIC void asbuilt_delta_rule(const DeltaRule* job, int threads) {
  const int64_t heads = job->batch * job->key_heads * job->values_per_key, V = job->d_value;
  // value columns divided further where there are fewer heads than threads would share evenly
  const int64_t wanted = std::max<int64_t>(1, (3 * threads + heads - 1) / heads);
  const int64_t width = std::max<int64_t>(8, std::min(V, (V / wanted + 31) / 32 * 32)), parts = (V + width - 1) / width;
  const Kernels& k = *chosen();
  each(heads * (threads > 1 ? parts : 1), [&](int64_t i) {
    const int64_t per = threads > 1 ? parts : 1, head = i / per, from = i % per * width;
    const int64_t of_text = job->key_heads * job->values_per_key;
    k.delta_rule(*job, head / of_text, head % of_text, from, per == 1 ? V : std::min(V, from + width));
  });
}

PUBLIC void asbuilt_convolve(const float* x, int64_t x_stride, const float* before, const float* taps, const float* bias,
                             int64_t texts, int64_t tokens, int64_t channels, int64_t kernel, int silu, float* y) {
  const Kernels& k = *chosen();
  const int64_t runs = (tokens + 15) / 16;
  each(texts * runs, [&](int64_t i) {
    const int64_t text = i / runs, first = i % runs * 16;
    k.convolve(x + text * tokens * x_stride, x_stride, before ? before + text * (kernel - 1) * channels : nullptr, taps,
               bias, channels, kernel, silu != 0, y + text * tokens * channels, first,
               std::min(tokens, first + 16));
  });
}

PUBLIC void asbuilt_gated_norm(const float* y, int64_t y_stride, const float* gate, int64_t gate_stride,
                               const float* weight, float offset, float eps, int64_t rows, int64_t heads, int64_t width,
                               int gating, float* out) {
  const Kernels& k = *chosen();
  each((rows + 15) / 16, [&](int64_t i) {
    k.gated_norm(y, y_stride, gate, gate_stride, weight, offset, eps, heads, width, gating, out, 16 * i,
                 std::min(rows, 16 * i + 16));
  });
}

PUBLIC void asbuilt_gated_product(const float* gate, const float* up, int64_t stride, int64_t rows, int64_t width,
                                  int activation, float* out) {
  const Kernels& k = *chosen();
  each((rows + 15) / 16, [&](int64_t i) {
    k.gated_product(gate, up, stride, width, activation, out, 16 * i, std::min(rows, 16 * i + 16));
  });
}

// One token of each of `texts` texts through a run of layers: x + o(attention(norm(x))), x + down(act(gate) * up).

namespace {

struct Norm {
  const float* weight;
  float offset, eps;
};

struct Map {
  Packed matrix;
  const float* bias;
};

struct Layer {
  Norm attention_norm, ffn_norm, q_norm, k_norm;  // those of heads without a weight and with eps < 0: none
  Map q, k, v, o, gate, up, down;
  int64_t heads, key_heads, d_head, slots;
  float *keys, *values;  // (texts, key heads, slots, d_head)
  int rope, d_rotary, adjacent;  // the number of its tables, -1 for none
  float scale, attention_scale, ffn_scale;  // of scores, and of what each branch adds
  int activation;
};

struct Rope {
  const float *cos, *sin;
  int64_t stride;
};

void rotate(float* head, const float* cos, const float* sin, int d, bool adjacent) {
  static thread_local std::vector<float> old;
  old.assign(head, head + d);
  for (int i = 0; i < d; ++i) {
    const int other = adjacent ? i ^ 1 : i < d / 2 ? i + d / 2 : i - d / 2;
    head[i] = old[i] * cos[i] + old[other] * sin[i];
  }
}

void normed(const Kernels& k, const Norm& norm, const float* x, int64_t rows, int64_t width, float* out) {
  k.gated_norm(x, width, nullptr, 0, norm.weight, norm.offset, norm.eps, 1, width, 0, out, 0, rows);
}

struct Scratch {
  std::vector<float> read, q, kv, mixed, gate, hidden, most, total, sums;
};

void attention(const Kernels& k, const Layer& layer, const Rope* ropes, const int64_t* positions, int64_t texts,
               int threads, Scratch& s) {
  const int64_t D = layer.d_head, H = layer.heads, K = layer.key_heads, group = H / K;
  const auto placed = [&](float* head, const Norm& norm, int64_t text) {
    if (norm.eps >= 0) normed(k, norm, head, 1, D, head);
    if (layer.rope < 0) return;
    const Rope& rope = ropes[layer.rope];
    rotate(head, rope.cos + text * rope.stride, rope.sin + text * rope.stride, layer.d_rotary, layer.adjacent != 0);
  };
  int64_t longest = 0;
  for (int64_t text = 0; text < texts; ++text) {
    longest = std::max(longest, positions[text] + 1);
    for (int64_t h = 0; h < H; ++h) placed(&s.q[(text * H + h) * D], layer.q_norm, text);
    for (int64_t h = 0; h < K; ++h) {
      const int64_t place = ((text * K + h) * layer.slots + positions[text]) * D;
      std::memcpy(layer.keys + place, &s.kv[(text * K + h) * D], D * sizeof(float));
      placed(layer.keys + place, layer.k_norm, text);
      std::memcpy(layer.values + place, &s.kv[(texts * K + text * K + h) * D], D * sizeof(float));
    }
  }
  // keys divided so that every thread has some, in runs of at least 128
  const int64_t wanted = std::max<int64_t>(1, 2 * threads / (texts * K)), parts = std::min(wanted, (longest + 127) / 128);
  s.most.resize(texts * H * parts);
  s.total.resize(texts * H * parts);
  s.sums.resize(texts * H * parts * D);
  each(texts * K * parts, [&](int64_t i) {
    const int64_t part = i % parts, head = i / parts % K, text = i / parts / K, n = positions[text] + 1;
    const int64_t place = (text * K + head) * layer.slots * D, at = i * group;
    const Attend job{&s.q[(text * H + head * group) * D], layer.keys + place, layer.values + place, group, D,
                     layer.scale, &s.most[at], &s.total[at], &s.sums[at * D]};
    k.attend(job, part * n / parts, (part + 1) * n / parts);
  });
  for (int64_t i = 0; i < texts * H; ++i) {
    const int64_t head = i % H, of_key = (i / H * K + head / group) * parts;
    float* out = &s.mixed[i * D];
    float most = -INFINITY, total = 0;
    for (int64_t p = 0; p < parts; ++p) most = std::max(most, s.most[(of_key + p) * group + head % group]);
    std::fill(out, out + D, 0.0f);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t at = (of_key + p) * group + head % group;
      const float weight = std::exp(s.most[at] - most);
      total += weight * s.total[at];
      for (int64_t d = 0; d < D; ++d) out[d] += weight * s.sums[at * D + d];
    }
    for (int64_t d = 0; d < D; ++d) out[d] /= total;
  }
}

void add(float* x, const float* y, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += scale * y[i];
}

}  // namespace

PUBLIC void asbuilt_layers(const Layer* layers, int count, const Rope* ropes, const int64_t* positions, int64_t texts,
                           int64_t width, int threads, float* x) {
  static thread_local Scratch s;
  const Kernels& k = *chosen();
  const auto product = [&](std::initializer_list<const Map*> maps, const float* in, std::initializer_list<float*> outs) {
    Packed matrices[3];
    const float* biases[3];
    float* to[3];
    int64_t strides[3];
    int n = 0;
    for (const Map* map : maps) {
      matrices[n] = map->matrix;
      biases[n] = map->bias;
      strides[n] = map->matrix.rows;
      to[n] = outs.begin()[n];
      ++n;
    }
    multiply(n, matrices, in, texts, matrices[0].inputs, biases, to, strides);
  };
  for (const Layer* layer = layers; layer < layers + count; ++layer) {
    const int64_t queries = texts * layer->heads * layer->d_head, keys = texts * layer->key_heads * layer->d_head;
    const int64_t inner = layer->up.matrix.rows;
    s.read.resize(texts * width);
    s.q.resize(queries);
    s.kv.resize(2 * keys);
    s.mixed.resize(std::max(queries, texts * inner));
    s.gate.resize(2 * texts * inner);
    s.hidden.resize(texts * width);
    normed(k, layer->attention_norm, x, texts, width, s.read.data());
    product({&layer->q, &layer->k, &layer->v}, s.read.data(), {s.q.data(), s.kv.data(), s.kv.data() + keys});
    attention(k, *layer, ropes, positions, texts, threads, s);
    product({&layer->o}, s.mixed.data(), {s.hidden.data()});
    add(x, s.hidden.data(), layer->attention_scale, texts * width);
    normed(k, layer->ffn_norm, x, texts, width, s.read.data());
    float *gate = s.gate.data(), *up = gate + texts * inner;
    product({&layer->gate, &layer->up}, s.read.data(), {gate, up});
    k.gated_product(gate, up, inner, inner, layer->activation, s.mixed.data(), 0, texts);
    product({&layer->down}, s.mixed.data(), {s.hidden.data()});
    add(x, s.hidden.data(), layer->ffn_scale, texts * width);
  }
}
