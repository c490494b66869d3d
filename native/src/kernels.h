// What one instruction set provides: the same functions, compiled for it.
#pragma once
#include <cstdint>

namespace asbuilt {

constexpr int kRows = 8;         // rows of a group of packed weights: one row per lane
constexpr int64_t kGroup = 32;   // inputs that share a scale when x is rounded to int8

// 32 inputs as x = d (254 q + r), q and r in -127 .. 127: what rounding to int8 leaves is rounded again, so that 16 bits of
// x are multiplied, in two products of the same codes. `sum` and `first`: d times the sums of all and of the first 16.
struct Rounded {
  float d, sum, first, unused;
  int8_t q[kGroup], r[kGroup];
};
constexpr int kFine = 254;

// The points of the formats whose codes name points of a grid, four numbers in a word; given by the caller
// (`asbuilt_grid`). Of IQ1 they are eight times as large, plus 8.
struct Grids {
  uint32_t iq2_xxs[256 * 2], iq2_xs[512 * 2], iq2_s[1024 * 2], iq3_xxs[256], iq3_s[512], iq1[2048 * 2];
};
extern Grids grids;

struct Packed {
  int format;           // an index of the list of formats
  const uint8_t* data;  // groups of 8 rows interleaved by units, then the rows that are left, as in files; or plain rows
  int64_t rows, inputs;
};

struct DeltaRule {
  int64_t batch, tokens, key_heads, values_per_key, d_key, d_value;
  const float *q, *k, *v;  // (B, T, heads, width), rows `stride` apart; normalised here
  int64_t stride;
  const float *beta, *decay;  // before sigmoid and softplus: (B, T, value heads), and that or (B, T, key heads, d_key)
  int64_t beta_stride, decay_stride;
  const float *rate, *dt_bias;  // exp(A_log) (value heads), and what is added before softplus
  bool by_channel;
  const uint8_t* valid;  // (B, T), null for all
  float eps;
  float* state;  // (B, key heads, d_key, values_per_key * d_value), read if `past`, and written
  bool past;
  float* y;  // (B, T, value heads * d_value)
};

// Attention of one token of one text over the cached keys of one key head, for the query heads of its group.
struct Attend {
  const float* q;       // (group, d)
  const void *k, *v;    // (keys, d), numbers of the plain format `type`, or rows of codes
  int type;
  int64_t group, d;
  float scale;
  float *most, *total, *sums;  // (group), (group), (group, d): the largest score, of weights the sum, of values
};

// The same of many tokens of one text, token t after `past` + t cached ones; keys and values include their own.
struct AttendMany {
  const float* q;
  int64_t q_stride;  // between tokens, (group, d) each
  const void *k, *v;
  int type;
  int64_t group, d, past;
  float scale;
  float* out;  // like q
  int64_t out_stride;
};

// Products of many rows of x, packed by `tall` rows with inputs padded to a multiple of `deep`, in `bytes` a number: columns
// first .. last - 1 of y, `first` a multiple of `columns`. Any format.
struct ManyRows {
  int64_t tall, columns, deep, bytes;
  void (*pack)(const float* x, int64_t rows, int64_t inputs, int64_t stride, float* out);
  void (*multiply)(const Packed& w, int64_t first, int64_t last, const float* x, int64_t rows, const float* bias, float* y,
                   int64_t stride);
};

// Training, in float32, or in bfloat16 where `narrow`. With `dy` an activation's gradient, else its value.
struct Activated {
  bool narrow;
  int activation;  // 0 SiLU, 1 tanh-approximated GELU
  const void *x, *dy;
  void* y;  // with `dy` dx
};

// RMSNorm of contiguous rows, and with `dy` its gradients: `y` is then dx.
struct Norms {
  const float *x, *gain, *dy;
  float eps;
  int64_t rows, width;
  float *y, *rstd, *dgain;
};

// q, k and v side by side in each row of `joined`, and apart, q and k with RoPE over halves; `back` joins gradients.
struct Heads {
  bool narrow, back;
  void* joined;
  int64_t texts, tokens, d, row_stride;
  const void *cos, *sin;  // (tokens, d), texts `table_stride` apart; the sine has the sign of its place
  int64_t table_stride;
  struct Apart {
    void* data;
    int64_t heads, strides[3];  // between texts, tokens and heads
  } apart[3];
};

// The cross-entropy of rows of logits; with `d` its gradient.
struct Likelihood {
  bool narrow;
  const void* logits;
  const int64_t* targets;
  int64_t rows, width, stride;
  float z;
  float *nats, *log_z;  // (rows)
  const float* d;       // of one number
  void* dl;             // contiguous
};

// Attention of a training step in float32, of queries over as many keys if `causal`; with `dy` the gradients.
constexpr int64_t kWidestHead = 256;
struct TrainingAttention {
  struct HeadRows {  // the numbers of a head lie side by side
    const float* data;
    int64_t strides[3];  // between texts, heads and tokens
  } q, k, v, dy;
  int64_t texts, heads, key_heads, tokens, keys, d;  // `heads` a multiple of `key_heads`, `d` at most kWidestHead
  bool causal;
  float scale;
  float *y, *log_z;      // (texts, tokens, heads, d), and log-sum-exps (texts, tokens, heads)
  float *dq, *dk, *dv;   // (texts, tokens, heads, d), and twice (texts, keys, key_heads, d)
};

struct Kernels {
  const char* name;
  void (*round_rows)(const float* x, int64_t rows, int64_t inputs, int64_t stride, Rounded* out);
  // y (rows of x, rows of W) for the groups first .. last - 1 of the packed matrix.
  void (*packed_groups)(const Packed& w, int64_t first, int64_t last, const Rounded* x, int64_t rows, const float* bias,
                        float* y, int64_t stride);
  // The last rows, fewer than a group, with x as it is.
  void (*packed_tail)(const Packed& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* y,
                      int64_t stride);
  void (*unpack_row)(const Packed& w, int64_t row, float* out);
  // One head of one text, some of its value columns.
  void (*delta_rule)(const DeltaRule& job, int64_t text, int64_t head, int64_t first, int64_t last);
  void (*convolve)(const float* x, int64_t x_stride, const float* before, const float* taps, const float* bias,
                   int64_t channels, int64_t kernel, bool silu, float* y, int64_t first, int64_t last);
  void (*gated_norm)(const float* y, int64_t y_stride, const float* gate, int64_t gate_stride, const float* weight,
                     float offset, float eps, int64_t heads, int64_t width, int gating, float* out, int64_t first,
                     int64_t last);
  void (*gated_product)(const float* gate, const float* up, int64_t stride, int64_t width, int activation, float* out,
                        int64_t first, int64_t last);
  void (*gate)(const float* gate, int64_t n, float* x);  // x times sigmoid(gate)
  void (*attend)(const Attend& job, int64_t first, int64_t last);  // over keys first .. last - 1
  void (*attend_many)(const AttendMany& job, int64_t first, int64_t last);  // tokens first .. last - 1
  void (*attend_in_bfloat16)(const AttendMany& job, int64_t first, int64_t last);  // the same; may round to bfloat16
  ManyRows in_float32, in_16_bits, in_bfloat16;  // the second for weights of at most 16 bits, the third rounds both to bfloat16
  void (*write_codes)(int code, const float* x, int64_t d, uint8_t* row);
  void (*read_codes)(int code, const uint8_t* rows, int64_t n, int64_t d, float* out);
  void (*widen)(int format, const void* from, int64_t n, float* to);
  void (*narrow)(int format, const float* from, int64_t n, void* to);
  // A few rows of x and matrices of plain numbers: rows first .. last - 1 of W.
  void (*few_rows)(const Packed& w, int64_t first, int64_t last, const float* x, int64_t rows, int64_t x_stride,
                   const float* bias, float* y, int64_t stride);
  void (*activate)(const Activated& job, int64_t first, int64_t last);  // numbers
  void (*norm_rows)(const Norms& job, int64_t first, int64_t last);
  void (*norm_gradient_rows)(const Norms& job, int64_t first, int64_t last, float* dgain);
  void (*turn_heads)(const Heads& job, int64_t first, int64_t last);  // tokens of all texts
  void (*likelihood)(const Likelihood& job, int64_t first, int64_t last);
  void (*attend_in_training)(const TrainingAttention& job, int64_t text, int64_t key_head);
};

// Formats by their numbers: of blocks, and of plain numbers, which have no units.
struct Format {
  const char* name;
  int values, bytes;
  const int* units;  // sizes in bytes of what is interleaved, in order
  int n_units;
};
extern const Format kFormats[];
extern const int kFormatCount, kBlockFormats;

// What a cache may hold besides: rows of codes, whose numbers are kFormatCount + these (codes.h).
enum { kFp8, kFp8Head, kInt8Head, kInt4Head, kCodeCount };
struct Code {
  const char* name;
  int scales, bits;  // bytes of a row before its codes, and bits of a code
};
constexpr Code kCodes[kCodeCount] = {{"FP8", 0, 8}, {"FP8:HEAD", 2, 8}, {"INT8:HEAD", 2, 8}, {"INT4:HEAD", 4, 4}};
inline int64_t bytes_of_code(int code, int64_t d) { return kCodes[code].scales + (d * kCodes[code].bits + 7) / 8; }

}  // namespace asbuilt
