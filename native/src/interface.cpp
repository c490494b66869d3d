// The functions that Python calls, and the choice of an instruction set.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#if defined(HAS_amx) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAS_neon_dot) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define KERNELS listed
#include "formats.h"
#undef KERNELS
#include "kernels.h"
#include "pool.h"

namespace asbuilt {

#define LIST(F) \
  {#F, listed::F::VALUES, listed::F::BYTES, listed::F::units, static_cast<int>(sizeof(listed::F::units) / sizeof(int))},
const Format kFormats[] = {ALL_FORMATS(LIST){"F32", 1, 4, nullptr, 0}, {"BF16", 1, 2, nullptr, 0}, {"F16", 1, 2, nullptr, 0}};
const int kFormatCount = static_cast<int>(sizeof(kFormats) / sizeof(Format));
const int kBlockFormats = kFormatCount - 3, kBfloat16 = kBlockFormats + 1;

Grids grids;

namespace portable {
extern const Kernels kTable;
}
#ifdef HAS_avx512
namespace avx512 {
extern const Kernels kTable;
}
#endif
#ifdef HAS_avx2
namespace avx2 {
extern const Kernels kTable;
}
#endif
#ifdef HAS_neon
namespace neon {
extern const Kernels kTable;
}
#endif
#ifdef HAS_neon_dot
namespace neon_dot {
extern const Kernels kTable;
}
#endif
#ifdef HAS_amx
namespace amx {
extern const ManyRows kTiles, kTilesOfHigh;
extern void (*const kAttendInTiles)(const AttendMany& job, int64_t first, int64_t last);
}
#endif

namespace {

#if defined(HAS_amx) && !defined(EMULATED)
// Whether there are tiles of bfloat16; the system is asked for them, since each process must (Linux).
bool tiles_usable() {
#ifdef __linux__
  unsigned a, b, c, d;
  constexpr unsigned kTilesAndBfloat16 = 1u << 24 | 1u << 22;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTilesAndBfloat16) == kTilesAndBfloat16 &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#ifdef HAS_neon_dot
// Whether there are products of four bytes; every processor of Apple's has them.
bool dot_products_usable() {
#ifdef __linux__
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  return true;
#else
  return false;
#endif
}
#endif

#ifdef HAS_amx
// AVX-512, and tiles for many rows.
const Kernels* with_tiles() {
  static const Kernels made = [] {
    Kernels all = avx512::kTable;
    all.name = "amx";
    all.in_16_bits = amx::kTiles;
    all.in_bfloat16 = amx::kTilesOfHigh;
    all.attend_in_bfloat16 = amx::kAttendInTiles;
    return all;
  }();
  return &made;
}
#endif

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#ifdef EMULATED
  found.push_back(with_tiles());  // the others of AVX-512 with it
#elif defined(HAS_avx512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
#ifdef HAS_amx
    if (tiles_usable()) found.push_back(with_tiles());
#endif
    found.push_back(&avx512::kTable);
  }
#endif
#ifdef HAS_avx2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&avx2::kTable);
#endif
#ifdef HAS_neon_dot
  if (dot_products_usable()) found.push_back(&neon_dot::kTable);
#endif
#ifdef HAS_neon
  found.push_back(&neon::kTable);
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

// From so many rows on matrices are unpacked to float32: blocks multiply in integers below, plain rows one by one.
constexpr int64_t kManyRows = 48, kManyRowsOfNumbers = 12;
constexpr int64_t kPiecesOfThread = 8;  // columns are unpacked once where there are so many pieces
constexpr int64_t kSlab = 512;  // rows of x that are packed at once

struct Product {
  int count;
  const Packed* matrices;
  const float* x;
  int64_t rows, x_stride;
  const float* const* biases;
  float* const* outs;
  const int64_t* strides;
  bool bfloat16 = false;  // many rows may be rounded to it, and W too
};

// Calls work(matrix, piece of it) for all pieces of several matrices, `pieces(matrix)` of each. They are begun in turn
// from as many places as there are threads, so that a thread's next piece mostly follows its last one in memory.
template <class Pieces, class Work>
void each_piece(int count, Pieces&& pieces, Work&& work) {
  static thread_local std::vector<int64_t> starts;
  starts.assign(1, 0);
  for (int i = 0; i < count; ++i) starts.push_back(starts.back() + pieces(i));
  const int64_t* first = starts.data();
  const int64_t runs = threads(), per = first[count] / runs, longer = first[count] % runs;
  each(first[count], [&](int64_t turn) {
    const int64_t run = turn % runs, piece = run * per + std::min(run, longer) + turn / runs;
    int i = 0;
    while (piece >= first[i + 1]) ++i;
    work(i, piece - first[i]);
  });
}

void many_rows(const ManyRows& k, const Product& p) {
  const int64_t inputs = p.matrices[0].inputs, wide = (inputs + k.deep - 1) / k.deep * k.deep;
  static thread_local std::vector<float> packed;
  for (int64_t start = 0; start < p.rows; start += kSlab) {
    const int64_t rows = std::min(kSlab, p.rows - start), tall = k.tall, panels = (rows + tall - 1) / tall;
    packed.resize(static_cast<size_t>(panels * tall * wide + 16));
    auto* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(packed.data()) + 63) & ~uintptr_t{63});
    const auto x = [&](int64_t row) { return reinterpret_cast<float*>(base + row * wide * k.bytes); };
    constexpr int64_t kTogether = 4;
    each((panels + kTogether - 1) / kTogether, [&](int64_t i) {
      const int64_t from = i * kTogether * tall, n = std::min(kTogether * tall, rows - from);
      k.pack(p.x + (start + from) * p.x_stride, n, inputs, p.x_stride, x(from));
    });
    // a piece is a run of columns, and of rows where there are few columns
    const auto runs = [&](int i) { return (p.matrices[i].rows + k.columns - 1) / k.columns; };
    int64_t all = 0;
    for (int i = 0; i < p.count; ++i) all += runs(i);
    const int64_t halves = rows >= 384 && all < kPiecesOfThread * threads() ? 2 : 1;
    const int64_t half = (panels + halves - 1) / halves * tall;
    each_piece(p.count, [&](int i) { return runs(i) * halves; }, [&](int i, int64_t piece) {
      const Packed& w = p.matrices[i];
      const int64_t first = piece / halves * k.columns, row = piece % halves * half;
      if (row < rows)
        k.multiply(w, first, std::min(first + k.columns, w.rows), x(row), std::min(half, rows - row),
                   p.biases[i], p.outs[i] + (start + row) * p.strides[i], p.strides[i]);
    });
  }
}

void few_rows(const Kernels& k, const Product& p) {
  const int64_t inputs = p.matrices[0].inputs;
  const auto run = [&](int i) {
    return std::max<int64_t>(4, kBytesOfPiece / (inputs * kFormats[p.matrices[i].format].bytes) / 4 * 4);
  };
  each_piece(p.count, [&](int i) { return (p.matrices[i].rows + run(i) - 1) / run(i); }, [&](int i, int64_t piece) {
    const Packed& w = p.matrices[i];
    const int64_t first = piece * run(i);
    k.few_rows(w, first, std::min(first + run(i), w.rows), p.x, p.rows, p.x_stride, p.biases[i], p.outs[i], p.strides[i]);
  });
}

void few_rows_of_blocks(const Kernels& k, const Product& p) {
  const int64_t inputs = p.matrices[0].inputs, per_row = inputs / kGroup, rows = p.rows;
  static thread_local std::vector<Rounded> rounded;
  rounded.resize(static_cast<size_t>(rows * per_row));
  Rounded* r = rounded.data();
  if (rows < 8) {
    k.round_rows(p.x, rows, inputs, p.x_stride, r);
  } else {
    each((rows + 7) / 8, [&](int64_t i) {
      k.round_rows(p.x + 8 * i * p.x_stride, std::min<int64_t>(8, rows - 8 * i), inputs, p.x_stride, r + 8 * i * per_row);
    });
  }
  const auto run = [&](int i) {
    const Format& f = kFormats[p.matrices[i].format];
    const int64_t bytes = kRows * (inputs / f.values) * f.bytes;
    return std::max<int64_t>(1, kBytesOfPiece / (bytes * std::min<int64_t>(rows, 4)));
  };
  const auto groups = [&](int i) { return p.matrices[i].rows / kRows; };
  each_piece(p.count, [&](int i) { return (groups(i) + run(i) - 1) / run(i); }, [&](int i, int64_t piece) {
    const int64_t first = piece * run(i);
    k.packed_groups(p.matrices[i], first, std::min(first + run(i), groups(i)), r, rows, p.biases[i], p.outs[i],
                    p.strides[i]);
  });
  for (int i = 0; i < p.count; ++i)
    if (p.matrices[i].rows % kRows)
      k.packed_tail(p.matrices[i], p.x, rows, p.x_stride, p.biases[i], p.outs[i], p.strides[i]);
}

// y = x W^T + bias of several matrices with one x (rows, inputs): of each y (rows, rows of W), rows `stride` apart.
void multiply(const Product& p) {
  const Kernels& k = *chosen();
  const auto blocks = [&](int i) { return p.matrices[i].format < kBlockFormats; };
  const auto in_float32 = [&](int i) { return p.matrices[i].format == kBlockFormats; };
  for (int i = 0; i < p.count;) {  // runs of matrices of one kind
    int end = i + 1;
    while (end < p.count && blocks(end) == blocks(i) && in_float32(end) == in_float32(i)) ++end;
    const Product part{end - i, p.matrices + i, p.x, p.rows, p.x_stride, p.biases + i, p.outs + i, p.strides + i, p.bfloat16};
    if (p.rows >= (blocks(i) ? kManyRows : kManyRowsOfNumbers)) {
      many_rows(in_float32(i) ? k.in_float32 : p.bfloat16 ? k.in_bfloat16 : k.in_16_bits, part);
    } else if (blocks(i)) {
      few_rows_of_blocks(k, part);
    } else {
      few_rows(k, part);
    }
    i = end;
  }
}

void delta_rule(const DeltaRule& job, int threads) {
  const int64_t of_text = job.key_heads * job.values_per_key, heads = job.batch * of_text, V = job.d_value;
  // value columns divided further where there are fewer heads than threads would share evenly
  const int64_t wanted = std::max<int64_t>(1, (3 * threads + heads - 1) / heads);
  const int64_t width = std::max<int64_t>(8, std::min(V, (V / wanted + 31) / 32 * 32));
  const int64_t parts = threads > 1 ? (V + width - 1) / width : 1;
  const Kernels& k = *chosen();
  each(heads * parts, [&](int64_t i) {
    const int64_t head = i / parts, from = i % parts * width;
    k.delta_rule(job, head / of_text, head % of_text, from, parts == 1 ? V : std::min(V, from + width));
  });
}

// `before` (texts, kernel - 1, channels) or null.
void convolve(const float* x, int64_t x_stride, const float* before, const float* taps, const float* bias, int64_t texts,
              int64_t tokens, int64_t channels, int64_t kernel, bool silu, float* y) {
  const Kernels& k = *chosen();
  const int64_t runs = (tokens + 15) / 16;
  each(texts * runs, [&](int64_t i) {
    const int64_t text = i / runs, first = i % runs * 16;
    k.convolve(x + text * tokens * x_stride, x_stride, before ? before + text * (kernel - 1) * channels : nullptr, taps,
               bias, channels, kernel, silu, y + text * tokens * channels, first, std::min(tokens, first + 16));
  });
}

}  // namespace
}  // namespace asbuilt

using namespace asbuilt;
#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC int asbuilt_version() { return 7; }
PUBLIC const char* asbuilt_instructions() { return chosen()->name; }

// The names of the instruction sets of this processor and build, the fastest first, with spaces between.
PUBLIC const char* asbuilt_usable() {
  static const std::string names = [] {
    std::string made;
    for (const Kernels* one : usable()) made += (made.empty() ? "" : " ") + std::string(one->name);
    return made;
  }();
  return names.c_str();
}

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

// The number of a format, of a matrix or of a cache's codes, by its name in capitals, -1 for none.
PUBLIC int asbuilt_format(const char* name) {
  for (int i = 0; i < kFormatCount; ++i)
    if (std::strcmp(kFormats[i].name, name) == 0) return i;
  for (int i = 0; i < kCodeCount; ++i)
    if (std::strcmp(kCodes[i].name, name) == 0) return kFormatCount + i;
  return -1;
}

// Sets the points of a format by its name in capitals: (count, width) numbers. Returns 0 for another size or format.
PUBLIC int asbuilt_grid(const char* name, const int8_t* numbers, int count) {
  const auto set = [&](auto& grid) {
    if (static_cast<size_t>(count) != sizeof grid) return 0;
    std::memcpy(grid, numbers, sizeof grid);
    return 1;
  };
  const std::string of = name;
  if (of == "IQ2_XXS") return set(grids.iq2_xxs);
  if (of == "IQ2_XS") return set(grids.iq2_xs);
  if (of == "IQ2_S") return set(grids.iq2_s);
  if (of == "IQ3_XXS") return set(grids.iq3_xxs);
  if (of == "IQ3_S") return set(grids.iq3_s);
  if ((of != "IQ1_S" && of != "IQ1_M") || !set(grids.iq1)) return 0;
  auto* points = reinterpret_cast<int8_t*>(grids.iq1);
  for (int i = 0; i < count; ++i) points[i] = static_cast<int8_t>(8 * points[i] + 8);
  return 1;
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
                           const float* const* biases, float* const* outs, const int64_t* strides, int bfloat16) {
  multiply({count, matrices, x, rows, x_stride, biases, outs, strides, bfloat16 != 0});
}

// Rows of a packed table, (count, inputs).
PUBLIC void asbuilt_rows(const Packed* table, const int64_t* index, int64_t count, float* out) {
  const Kernels& k = *chosen();
  each(count, [&](int64_t i) { k.unpack_row(*table, index[i], out + i * table->inputs); });
}

PUBLIC void asbuilt_delta_rule(const DeltaRule* job, int threads) { delta_rule(*job, threads); }

PUBLIC void asbuilt_convolve(const float* x, int64_t x_stride, const float* before, const float* taps, const float* bias,
                             int64_t texts, int64_t tokens, int64_t channels, int64_t kernel, int silu, float* y) {
  convolve(x, x_stride, before, taps, bias, texts, tokens, channels, kernel, silu != 0, y);
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

// What training computes beside products (kernels.h).

PUBLIC void asbuilt_activate(const Activated* job, int64_t count) {
  constexpr int64_t kPiece = 1 << 14;
  const Kernels& k = *chosen();
  each((count + kPiece - 1) / kPiece,
       [&](int64_t i) { k.activate(*job, kPiece * i, std::min(count, kPiece * (i + 1))); });
}

// Gradients of gains are summed by pieces of rows, in order: the sums do not depend on the threads.
PUBLIC void asbuilt_norm(const Norms* job) {
  constexpr int64_t kPiece = 64;
  const Kernels& k = *chosen();
  const int64_t pieces = (job->rows + kPiece - 1) / kPiece;
  std::vector<float> sums(job->dy ? pieces * job->width : 0);
  each(pieces, [&](int64_t i) {
    const int64_t last = std::min(job->rows, kPiece * (i + 1));
    if (job->dy)
      k.norm_gradient_rows(*job, kPiece * i, last, sums.data() + i * job->width);
    else
      k.norm_rows(*job, kPiece * i, last);
  });
  for (size_t i = 0; i < sums.size(); ++i) job->dgain[i % job->width] += sums[i];
}

PUBLIC void asbuilt_heads(const Heads* job) {
  const Kernels& k = *chosen();
  const int64_t rows = job->texts * job->tokens;
  each((rows + 15) / 16, [&](int64_t i) { k.turn_heads(*job, 16 * i, std::min(rows, 16 * i + 16)); });
}

// Returns 0 if a target is none of the logits; nothing is written then.
PUBLIC int asbuilt_likelihood(const Likelihood* job) {
  for (int64_t row = 0; row < job->rows; ++row)
    if (job->targets[row] < 0 || job->targets[row] >= job->width) return 0;
  const Kernels& k = *chosen();
  each((job->rows + 7) / 8, [&](int64_t i) { k.likelihood(*job, 8 * i, std::min(job->rows, 8 * i + 8)); });
  return 1;
}

PUBLIC void asbuilt_attention(const TrainingAttention* job) {
  const Kernels& k = *chosen();
  each(job->texts * job->key_heads,
       [&](int64_t i) { k.attend_in_training(*job, i / job->key_heads, i % job->key_heads); });
}

// Tokens of each of `texts` texts through a run of layers: x + o(mixed(norm(x))), x + down(act(gate) * up), mixed by
// attention or by a gated delta rule.

namespace {

struct Norm {
  const void* weight;
  float offset, eps;
};

struct Map {
  Packed matrix;
  const void* bias;
};

struct Attention {
  Norm q_norm, k_norm;  // with eps < 0: none
  Map q, k, v, gate;    // without a gate its matrix has no rows
  int64_t heads, key_heads, d_head, slots;
  uint8_t *keys, *values;        // (texts, key heads, slots, d_head)
  int held;                      // the format of keys and values: a plain one or codes
  int rope, d_rotary, adjacent;  // the number of its tables, -1 for none
  float scale;                   // of scores
};

struct DeltaNet {
  Norm norm;
  Map q, k, v, gate, beta, decay;
  int64_t key_heads, values_per_key, d_key, d_value, kernel;
  const void *taps, *bias;       // (channels, kernel), (channels) or null
  const void *A_log, *dt_bias;   // (value heads)
  uint8_t* before;               // (texts, channels, kernel - 1)
  float* state;                  // (texts, key heads, d_key, values_per_key * d_value)
  int silu, gating;
  float eps;
  int64_t keys() const { return key_heads * d_key; }
  int64_t heads() const { return key_heads * values_per_key; }
  int64_t values() const { return heads() * d_value; }
  int64_t channels() const { return 2 * keys() + values(); }
};

struct Layer {
  const Attention* attention;  // one of the two
  const DeltaNet* net;
  Norm norm, ffn_norm;
  Map o, gate, up, down;
  int type;  // the plain format of norms and biases
  float mixer_scale, ffn_scale;  // of what each branch adds
  int activation;
};

struct Rope {
  const float *cos, *sin;  // (texts or 1, tokens, d_rotary)
  int64_t stride;          // between texts
};

constexpr int kMostMaps = 6;  // that read the same rows

// What one call works on: `tokens` new tokens of each text, positions[text] of it cached already.
struct Run {
  const Kernels& k;
  const Rope* ropes;
  const int64_t* positions;
  int64_t texts, tokens, width;
  int threads;
};

// Some of them: tokens `token` .. `token` + tokens - 1 of `texts` texts from `text` on; all tokens if of several texts.
struct Slab {
  int64_t text, texts, token, tokens;
  int64_t rows() const { return texts * tokens; }
};

struct Scratch {
  std::vector<float> read, q, kv, mixed, gate, hidden, most, total, sums;
  std::vector<float> norm, q_norm, k_norm, biases[kMostMaps];  // as float32
  std::vector<float> convolved, before, wide, taps, rates, dt_bias;
};

// n numbers of a plain format as float32: where they lie, or in `room`.
const float* as_float(const Kernels& k, int type, const void* numbers, int64_t n, std::vector<float>& room) {
  if (!numbers || type == kBlockFormats) return static_cast<const float*>(numbers);
  room.resize(n);
  k.widen(type, numbers, n, room.data());
  return room.data();
}

constexpr int64_t kRowsOfPiece = 16;
constexpr int64_t kTokensOfPiece = 64;

// Calls work(first, last) for pieces of rows; few rows are one piece.
template <class Work>
void each_rows(int64_t rows, Work&& work) {
  each((rows + kRowsOfPiece - 1) / kRowsOfPiece,
       [&](int64_t i) { work(i * kRowsOfPiece, std::min(rows, (i + 1) * kRowsOfPiece)); });
}

void rotate(float* head, const float* cos, const float* sin, int d, bool adjacent) {
  static thread_local std::vector<float> old;
  old.assign(head, head + d);
  for (int i = 0; i < d; ++i) {
    const int other = adjacent ? i ^ 1 : i < d / 2 ? i + d / 2 : i - d / 2;
    head[i] = old[i] * cos[i] + old[other] * sin[i];
  }
}

void normed(const Kernels& k, const Norm& norm, int type, Scratch& s, const float* x, int64_t rows, int64_t width,
            float* out) {
  const float* weight = as_float(k, type, norm.weight, width, s.norm);
  each_rows(rows, [&](int64_t first, int64_t last) {
    k.gated_norm(x, width, nullptr, 0, weight, norm.offset, norm.eps, 1, width, 0, out, first, last);
  });
}

// Bytes of a key or value in the cache.
int64_t bytes_of_key(const Attention& layer) {
  const int code = layer.held - kFormatCount;
  return code < 0 ? layer.d_head * kFormats[layer.held].bytes : bytes_of_code(code, layer.d_head);
}

void keep(const Kernels& k, const Attention& layer, const float* x, uint8_t* to) {
  if (layer.held < kFormatCount) return k.narrow(layer.held, x, layer.d_head, to);
  k.write_codes(layer.held - kFormatCount, x, layer.d_head, to);
}

// Norms of heads and RoPE in place; keys and values into the cache.
void place(const Run& run, const Attention& layer, int type, const Slab& slab, Scratch& s) {
  const int64_t D = layer.d_head, H = layer.heads, K = layer.key_heads, rows = slab.rows();
  const int64_t bytes = bytes_of_key(layer);
  const float* q_weight = as_float(run.k, type, layer.q_norm.weight, D, s.q_norm);
  const float* k_weight = as_float(run.k, type, layer.k_norm.weight, D, s.k_norm);
  each_rows(rows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t text = slab.text + row / slab.tokens, token = slab.token + row % slab.tokens;
      const auto placed = [&](float* head, const Norm& norm, const float* weight) {
        if (norm.eps >= 0)
          run.k.gated_norm(head, D, nullptr, 0, weight, norm.offset, norm.eps, 1, D, 0, head, 0, 1);
        if (layer.rope < 0) return;
        const Rope& rope = run.ropes[layer.rope];
        const int64_t at = text * rope.stride + token * layer.d_rotary;
        rotate(head, rope.cos + at, rope.sin + at, layer.d_rotary, layer.adjacent != 0);
      };
      for (int64_t h = 0; h < H; ++h) placed(&s.q[(row * H + h) * D], layer.q_norm, q_weight);
      for (int64_t h = 0; h < K; ++h) {
        const int64_t slot = ((text * K + h) * layer.slots + run.positions[text] + token) * bytes;
        float* key = &s.kv[(row * K + h) * D];
        placed(key, layer.k_norm, k_weight);
        keep(run.k, layer, key, layer.keys + slot);
        keep(run.k, layer, &s.kv[((rows + row) * K + h) * D], layer.values + slot);
      }
    }
  });
}

// One token of each text; keys are divided so that every thread has some, in runs of at least 128.
void attend_one(const Run& run, const Attention& layer, Scratch& s) {
  const int64_t D = layer.d_head, H = layer.heads, K = layer.key_heads, group = H / K, texts = run.texts;
  int64_t longest = 0;
  for (int64_t text = 0; text < texts; ++text) longest = std::max(longest, run.positions[text] + 1);
  const int64_t wanted = std::max<int64_t>(1, 2 * run.threads / (texts * K)), parts = std::min(wanted, (longest + 127) / 128);
  s.most.resize(texts * H * parts);
  s.total.resize(texts * H * parts);
  s.sums.resize(texts * H * parts * D);
  each(texts * K * parts, [&](int64_t i) {
    const int64_t part = i % parts, head = i / parts % K, text = i / parts / K, n = run.positions[text] + 1;
    const int64_t slot = (text * K + head) * layer.slots * bytes_of_key(layer), at = i * group;
    const Attend job{&s.q[(text * H + head * group) * D], layer.keys + slot, layer.values + slot, layer.held, group, D,
                     layer.scale, &s.most[at], &s.total[at], &s.sums[at * D]};
    run.k.attend(job, part * n / parts, (part + 1) * n / parts);
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

void attend_many(const Run& run, const Attention& layer, int type, const Slab& slab, Scratch& s) {
  const int64_t D = layer.d_head, H = layer.heads, K = layer.key_heads, group = H / K;
  const int64_t parts = (slab.tokens + kTokensOfPiece - 1) / kTokensOfPiece;
  const auto attend = type == kBfloat16 ? run.k.attend_in_bfloat16 : run.k.attend_many;
  each(slab.texts * K * parts, [&](int64_t i) {
    // the last tokens first: they see the most keys
    const int64_t part = parts - 1 - i / (slab.texts * K), head = i % K, of = i / K % slab.texts, text = slab.text + of;
    const int64_t slot = (text * K + head) * layer.slots * bytes_of_key(layer);
    const int64_t at = (of * slab.tokens * H + head * group) * D;
    const AttendMany job{&s.q[at], H * D, layer.keys + slot, layer.values + slot, layer.held, group, D,
                         run.positions[text] + slab.token, layer.scale, &s.mixed[at], H * D};
    attend(job, part * kTokensOfPiece, std::min(slab.tokens, (part + 1) * kTokensOfPiece));
  });
}

void add(float* x, const float* y, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += scale * y[i];
}

struct Into {
  const Map* map;
  float* out;
  int64_t stride;
};

void product(const Kernels& k, int type, Scratch& s, std::initializer_list<Into> list, const float* in, int64_t rows) {
  Packed matrices[kMostMaps];
  const float* biases[kMostMaps];
  float* outs[kMostMaps];
  int64_t strides[kMostMaps];
  int n = 0;
  for (const Into& one : list) {
    if (!one.map->matrix.rows) continue;
    matrices[n] = one.map->matrix;
    biases[n] = as_float(k, type, one.map->bias, one.map->matrix.rows, s.biases[n]);
    outs[n] = one.out;
    strides[n++] = one.stride;
  }
  multiply({n, matrices, in, rows, matrices[0].inputs, biases, outs, strides, type == kBfloat16});
}

// s.read to s.mixed (rows, heads * d_head).
void attend(const Run& run, const Layer& layer, const Slab& slab, Scratch& s) {
  const Attention& part = *layer.attention;
  const int64_t rows = slab.rows(), wide = part.heads * part.d_head, of_keys = part.key_heads * part.d_head;
  s.q.resize(rows * wide);
  s.kv.resize(2 * rows * of_keys);
  s.mixed.resize(rows * wide);
  if (part.gate.matrix.rows) s.gate.resize(rows * wide);
  float *keys = s.kv.data(), *values = keys + rows * of_keys;
  product(run.k, layer.type, s,
          {{&part.q, s.q.data(), wide}, {&part.k, keys, of_keys}, {&part.v, values, of_keys},
           {&part.gate, s.gate.data(), wide}}, s.read.data(), rows);
  place(run, part, layer.type, slab, s);
  if (run.tokens == 1) {
    attend_one(run, part, s);
  } else {
    attend_many(run, part, layer.type, slab, s);
  }
  if (!part.gate.matrix.rows) return;
  each_rows(rows, [&](int64_t first, int64_t last) {
    run.k.gate(&s.gate[first * wide], (last - first) * wide, &s.mixed[first * wide]);
  });
}

// The inputs of a convolution that the next tokens read: the last of `x` after those of `before`, in `to` (channels, n).
void keep_last(const Kernels& k, int type, const float* x, int64_t tokens, const float* before, int64_t channels, int64_t n,
               std::vector<float>& room, uint8_t* to) {
  room.resize(channels * n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = tokens - n + i;
    const float* from = token >= 0 ? x + token * channels : before ? before + (n + token) * channels : nullptr;
    for (int64_t c = 0; c < channels; ++c) room[c * n + i] = from ? from[c] : 0.0f;
  }
  k.narrow(type, room.data(), channels * n, to);
}

// s.read to s.mixed (rows, values), which q, k and v read and write through the state.
void recur(const Run& run, const Layer& layer, const Slab& slab, Scratch& s) {
  const DeltaNet& net = *layer.net;
  const int64_t rows = slab.rows(), C = net.channels(), H = net.heads(), V = net.values(), keys = net.keys();
  const int64_t left = net.kernel - 1, bytes = C * left * kFormats[layer.type].bytes;
  s.q.resize(rows * C);
  s.kv.resize(2 * rows * H);
  s.gate.resize(rows * V);
  s.convolved.resize(rows * C);
  s.mixed.resize(rows * V);
  float *x = s.q.data(), *beta = s.kv.data(), *decay = beta + rows * H;
  product(run.k, layer.type, s,
          {{&net.q, x, C}, {&net.k, x + keys, C}, {&net.v, x + 2 * keys, C}, {&net.gate, s.gate.data(), V},
           {&net.beta, beta, H}, {&net.decay, decay, H}}, s.read.data(), rows);
  const bool past = slab.token > 0 || std::any_of(run.positions, run.positions + run.texts, [](int64_t n) { return n > 0; });
  s.taps.resize(C * net.kernel);
  const float* taps = as_float(run.k, layer.type, net.taps, C * net.kernel, s.wide);
  for (int64_t c = 0; c < C; ++c)
    for (int64_t i = 0; i < net.kernel; ++i) s.taps[i * C + c] = taps[c * net.kernel + i];
  s.before.resize(slab.texts * left * C);
  for (int64_t text = 0; text < slab.texts && past; ++text) {
    const float* before = as_float(run.k, layer.type, net.before + (slab.text + text) * bytes, C * left, s.wide);
    for (int64_t c = 0; c < C; ++c)
      for (int64_t i = 0; i < left; ++i) s.before[(text * left + i) * C + c] = before[c * left + i];
  }
  const float* before = past ? s.before.data() : nullptr;
  const float* bias = as_float(run.k, layer.type, net.bias, C, s.biases[0]);
  convolve(x, C, before, s.taps.data(), bias, slab.texts, slab.tokens, C, net.kernel, net.silu != 0, s.convolved.data());
  for (int64_t text = 0; text < slab.texts; ++text)
    keep_last(run.k, layer.type, x + text * slab.tokens * C, slab.tokens, before ? before + text * left * C : nullptr, C,
              left, s.wide, net.before + (slab.text + text) * bytes);
  s.rates.resize(H);
  const float* A_log = as_float(run.k, layer.type, net.A_log, H, s.wide);
  for (int64_t h = 0; h < H; ++h) s.rates[h] = std::exp(A_log[h]);
  const float* made = s.convolved.data();
  delta_rule({slab.texts, slab.tokens, net.key_heads, net.values_per_key, net.d_key, net.d_value, made, made + keys,
              made + 2 * keys, C, beta, decay, H, H, s.rates.data(),
              as_float(run.k, layer.type, net.dt_bias, H, s.dt_bias), false, nullptr, net.eps,
              net.state + slab.text * keys * net.values_per_key * net.d_value, past, s.mixed.data()},
             run.threads);
  const float* weight = as_float(run.k, layer.type, net.norm.weight, net.d_value, s.norm);
  each_rows(rows, [&](int64_t first, int64_t last) {
    run.k.gated_norm(s.mixed.data(), V, s.gate.data(), V, weight, net.norm.offset, net.norm.eps, H, net.d_value, net.gating,
                     s.mixed.data(), first, last);
  });
}

void through(const Run& run, const Layer& layer, const Slab& slab, Scratch& s, float* x) {
  const int64_t rows = slab.rows(), inner = layer.up.matrix.rows, width = run.width;
  s.read.resize(rows * width);
  s.hidden.resize(rows * width);
  const auto added = [&](float scale) {
    each_rows(rows, [&](int64_t first, int64_t last) {
      add(x + first * width, &s.hidden[first * width], scale, (last - first) * width);
    });
  };
  normed(run.k, layer.norm, layer.type, s, x, rows, width, s.read.data());
  layer.net ? recur(run, layer, slab, s) : attend(run, layer, slab, s);
  product(run.k, layer.type, s, {{&layer.o, s.hidden.data(), width}}, s.mixed.data(), rows);
  added(layer.mixer_scale);
  normed(run.k, layer.ffn_norm, layer.type, s, x, rows, width, s.read.data());
  s.gate.resize(2 * rows * inner);
  s.mixed.resize(rows * inner);
  float *gate = s.gate.data(), *up = gate + rows * inner;
  product(run.k, layer.type, s, {{&layer.gate, gate, inner}, {&layer.up, up, inner}}, s.read.data(), rows);
  each_rows(rows, [&](int64_t first, int64_t last) {
    run.k.gated_product(gate, up, inner, inner, layer.activation, s.mixed.data(), first, last);
  });
  product(run.k, layer.type, s, {{&layer.down, s.hidden.data(), width}}, s.mixed.data(), rows);
  added(layer.ffn_scale);
}

}  // namespace

PUBLIC void asbuilt_layers(const Layer* layers, int count, const Rope* ropes, const int64_t* positions, int64_t texts,
                           int64_t tokens, int64_t width, int threads, float* x) {
  static thread_local Scratch kept;  // of one token each: few bytes
  Scratch own;
  const Run run{*chosen(), ropes, positions, texts, tokens, width, threads};
  // as many rows at once as `many_rows` packs: several texts, or a part of one
  const int64_t together = tokens == 1 ? texts : std::max<int64_t>(1, kSlab / tokens);
  for (const Layer* layer = layers; layer < layers + count; ++layer) {
    for (int64_t text = 0; text < texts; text += together) {
      const int64_t n = std::min(together, texts - text), most = n > 1 ? tokens : std::min(tokens, kSlab);
      for (int64_t token = 0; token < tokens; token += most) {
        const Slab slab{text, n, token, std::min(most, tokens - token)};
        through(run, *layer, slab, tokens == 1 ? kept : own, x + (text * tokens + token) * width);
      }
    }
  }
}
