// The kernels of one instruction set; compiled once for each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "gradients.h"
#include "training_attention.h"

namespace asbuilt {
namespace KERNELS {
namespace {

// Products with packed weights.

void round_rows(const float* x, int64_t rows, int64_t inputs, int64_t stride, Rounded* out) {
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    for (int64_t start = 0; start < inputs; start += kGroup, ++out) {
      const float* in = x + start;
      float most = 0, odd = 0;
      for (int i = 0; i < kGroup; ++i) {
        most = std::fabs(in[i]) > most ? std::fabs(in[i]) : most;
        odd += in[i] * 0.0f;  // NaN if one is NaN or infinite
      }
      const bool finite = odd == 0.0f;
      const float per = finite && most > 0 ? 127.0f / most : 0.0f;
      int sums[2] = {};
      if (finite && std::isfinite(per)) {
        for (int i = 0; i < kGroup; ++i) {
          const float scaled = in[i] * per, whole = __builtin_rintf(scaled);
          const int q = static_cast<int>(whole), r = static_cast<int>(__builtin_rintf((scaled - whole) * kFine));
          out->q[i] = static_cast<int8_t>(q);
          out->r[i] = static_cast<int8_t>(r);
          sums[i / 16] += kFine * q + r;
        }
      } else {
        std::memset(out->q, 0, 2 * kGroup);  // of numbers too small to be scaled, as of zeros
      }
      out->d = finite ? most / (127.0f * kFine) : std::numeric_limits<float>::quiet_NaN();
      out->sum = out->d * static_cast<float>(sums[0] + sums[1]);
      out->first = out->d * static_cast<float>(sums[0]);
      out->unused = 0;
    }
  }
}

// The sum of the inputs that share a scale of the weights.
inline float summed(const Rounded& x, int sub_size, int sub) {
  return sub_size == 32 ? x.sum : sub % 2 == 0 ? x.first : x.sum - x.first;
}

// The sums of four products of bytes in one instruction, on x86 unsigned by signed; or the same in several, to be tested.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT_PRODUCTS
inline __m256i dotted(__m256i sum, __m256i codes, __m256i x) { return _mm256_dpbusd_epi32(sum, codes, x); }
constexpr bool kSignedCodes = false;
#elif defined(EMULATED)
#define DOT_PRODUCTS
constexpr bool kSignedCodes = false;
inline __m256i dotted(__m256i sum, __m256i codes, __m256i x) {
  const __m256i ones = _mm256_set1_epi16(1), even = _mm256_set1_epi16(255);
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(codes, even), x);
  const __m256i high = _mm256_maddubs_epi16(_mm256_andnot_si256(even, codes), x);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones)));
}
#elif defined(NEON)
#define DOT_PRODUCTS  // neon.h
constexpr bool kSignedCodes = true;
#endif

#ifdef EIGHT_ROWS
#ifndef DOT_PRODUCTS
template <class F>
inline Words multiplied(Words w, Words w_abs, Words x) {
  return F::SIGNED ? _mm256_maddubs_epi16(w_abs, _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
}
#endif

inline Words four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return _mm256_set1_epi32(bytes);
}

// A row of x passes W once, from memory: the processor's own prefetching ends at each page and leaves a third of the
// bandwidth unused.
constexpr int kAhead = 2048;  // bytes
template <class F>
inline void fetch_ahead(const uint8_t* w, int sub) {
  constexpr int bytes = kRows * F::BYTES * F::SUB / F::VALUES;
#pragma GCC unroll 8
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(w + kAhead + sub * bytes + at);
}

// R rows of x times one group of rows of W. A product of a code with x is at most MOST * 127, and maddubs adds two:
// as many as stay below 2^15 are added in 16 bits.
template <class F, int R>
void tile(const uint8_t* w, int64_t blocks, const Rounded* const* x, Lanes* sums) {
  constexpr int SUBS = F::VALUES / F::SUB, CHUNKS = F::SUB / 4;
#ifndef DOT_PRODUCTS
  constexpr int FIT = std::max(1, 32767 / (F::MOST * 127 * 2)), RUN = FIT >= CHUNKS ? CHUNKS : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  const Words ones = _mm256_set1_epi16(1);
#endif
  Lanes acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block, w += kRows * F::BYTES) {
    const F header(w);
#pragma GCC unroll 16
    for (int sub = 0; sub < SUBS; ++sub) {
      const int64_t at = block * (F::VALUES / kGroup) + sub * F::SUB / kGroup;
      fetch_ahead<F>(w, sub);
      Words whole[R], fine[R];
#ifdef DOT_PRODUCTS
      for (int r = 0; r < R; ++r) whole[r] = fine[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int c = 0; c < CHUNKS; ++c) {
        // signed codes plus the largest one are unsigned; unsigned ones are small enough to be signed
        static_assert(F::SIGNED || F::MOST < 128);
        const Words stored = F::codes(w, sub * CHUNKS + c);
        const Words codes = F::SIGNED && !kSignedCodes ? _mm256_add_epi8(stored, all(F::MOST)) : stored;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int place = sub * F::SUB % kGroup + 4 * c;
          whole[r] = dotted(whole[r], codes, four(x[r][at].q + place));
          fine[r] = dotted(fine[r], codes, four(x[r][at].r + place));
        }
      }
#else
#pragma GCC unroll 8
      for (int run = 0; run < CHUNKS; run += RUN) {
        Words narrow[R], finer[R];
#pragma GCC unroll 8
        for (int c = run; c < run + RUN; ++c) {
          const Words codes = F::codes(w, sub * CHUNKS + c);
          const Words positive = F::SIGNED ? _mm256_abs_epi8(codes) : codes;
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const int place = sub * F::SUB % kGroup + 4 * c;
            const Words made = multiplied<F>(codes, positive, four(x[r][at].q + place));
            const Words more = multiplied<F>(codes, positive, four(x[r][at].r + place));
            narrow[r] = c == run ? made : _mm256_add_epi16(narrow[r], made);
            finer[r] = c == run ? more : _mm256_add_epi16(finer[r], more);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Words made = _mm256_madd_epi16(narrow[r], ones), more = _mm256_madd_epi16(finer[r], ones);
          whole[r] = run == 0 ? made : _mm256_add_epi32(whole[r], made);
          fine[r] = run == 0 ? more : _mm256_add_epi32(fine[r], more);
        }
      }
#endif
      Lanes scale, offset;
      header.scales(sub, scale, offset);
#ifdef DOT_PRODUCTS
      constexpr bool SUMMED = !F::SIGNED || !kSignedCodes;
      if (F::SIGNED && !kSignedCodes) offset = _mm256_mul_ps(scale, _mm256_set1_ps(-F::MOST));
#else
      constexpr bool SUMMED = !F::SIGNED;
#endif
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Rounded& in = x[r][at];
        const Lanes both = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), _mm256_set1_ps(kFine), _mm256_cvtepi32_ps(fine[r]));
        acc[r] = _mm256_fmadd_ps(both, _mm256_mul_ps(scale, _mm256_set1_ps(in.d)), acc[r]);
        if (SUMMED) acc[r] = _mm256_fmadd_ps(offset, _mm256_set1_ps(summed(in, F::SUB, sub)), acc[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) sums[r] = acc[r];
}
using Sums = Lanes;
inline void write(float* y, Sums sums, const float* bias) {
  _mm256_storeu_ps(y, bias ? _mm256_add_ps(sums, _mm256_loadu_ps(bias)) : sums);
}
#else
struct Sums {
  float of[kRows];
};
template <class F, int R>
void tile(const uint8_t* w, int64_t blocks, const Rounded* const* x, Sums* sums) {
  for (int r = 0; r < R; ++r) sums[r] = {};
  Decoded<F> made;
  for (int64_t block = 0; block < blocks; ++block, w += kRows * F::BYTES) {
    for (int row = 0; row < kRows; ++row) {
      F::decode({w, row}, made);
      for (int r = 0; r < R; ++r) {
        for (int sub = 0; sub < F::VALUES / F::SUB; ++sub) {
          const Rounded& in = x[r][block * (F::VALUES / kGroup) + sub * F::SUB / kGroup];
          int whole = 0, fine = 0;
          for (int i = 0; i < F::SUB; ++i) {
            whole += made.code[sub * F::SUB + i] * in.q[sub * F::SUB % kGroup + i];
            fine += made.code[sub * F::SUB + i] * in.r[sub * F::SUB % kGroup + i];
          }
          const float both = static_cast<float>(whole) * kFine + static_cast<float>(fine);
          sums[r].of[row] += both * (made.scale[sub] * in.d);
          if (!F::SIGNED) sums[r].of[row] += made.offset[sub] * summed(in, F::SUB, sub);
        }
      }
    }
  }
}
inline void write(float* y, const Sums& sums, const float* bias) {
  for (int row = 0; row < kRows; ++row) y[row] = bias ? sums.of[row] + bias[row] : sums.of[row];
}
#endif

template <class F, int R>
void rows_of(const uint8_t* group, int64_t blocks, const Rounded* x, int64_t per_row, const float* bias, float* y,
             int64_t stride) {
  const Rounded* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x + r * per_row;
  Sums sums[R];
  tile<F, R>(group, blocks, rows, sums);
  for (int r = 0; r < R; ++r) write(y + r * stride, sums[r], bias);
}

template <class F>
void groups_of(const Packed& w, int64_t first, int64_t last, const Rounded* x, int64_t rows, const float* bias,
               float* y, int64_t stride) {
  const int64_t blocks = w.inputs / F::VALUES, per_row = w.inputs / kGroup;
  // groups that stay in the first-level cache while the rows of x pass: each few rows of x are then read once for them
  const int64_t bytes = kRows * blocks * F::BYTES, near = std::max<int64_t>(1, (12 << 10) / bytes);
  for (int64_t from = first; from < last; from += near) {
    const int64_t until = std::min(last, from + near);
    const auto all_groups = [&](auto count, int64_t row) {
      for (int64_t group = from; group < until; ++group)
        rows_of<F, decltype(count)::value>(w.data + group * bytes, blocks, x + row * per_row, per_row,
                                           bias ? bias + group * kRows : nullptr, y + group * kRows + row * stride,
                                           stride);
    };
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) all_groups(std::integral_constant<int, 4>{}, row);
    if (row + 2 <= rows) {
      all_groups(std::integral_constant<int, 2>{}, row);
      row += 2;
    }
    if (row < rows) all_groups(std::integral_constant<int, 1>{}, row);
  }
}

template <class F>
void unpacked(const Packed& w, int64_t row, float* out) {
  const int64_t blocks = w.inputs / F::VALUES, full = w.rows / kRows * kRows;
  const bool grouped = row < full;
  const uint8_t* data = w.data + (grouped ? row / kRows * kRows : row) * blocks * F::BYTES;
  Decoded<F> made;
  for (int64_t block = 0; block < blocks; ++block, out += F::VALUES) {
    F::decode({data + block * F::BYTES * (grouped ? kRows : 1), grouped ? static_cast<int>(row % kRows) : -1}, made);
    for (int i = 0; i < F::VALUES; ++i)
      out[i] = made.scale[i / F::SUB] * static_cast<float>(made.code[i]) + made.offset[i / F::SUB];
  }
}

void packed_groups(const Packed& w, int64_t first, int64_t last, const Rounded* x, int64_t rows, const float* bias,
                   float* y, int64_t stride) {
  with_format(w.format, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    if constexpr (!IsPlain<F>::value) groups_of<F>(w, first, last, x, rows, bias, y, stride);
  });
}

void unpack_row(const Packed& w, int64_t row, float* out) {
  with_format(w.format, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    if constexpr (IsPlain<F>::value) {
      const auto* data = reinterpret_cast<const typename F::Stored*>(w.data) + row * w.inputs;
      for (int64_t i = 0; i < w.inputs; ++i) out[i] = F::one(data[i]);
    } else {
      unpacked<F>(w, row, out);
    }
  });
}

void packed_tail(const Packed& w, const float* x, int64_t rows, int64_t x_stride, const float* bias, float* y,
                 int64_t stride) {
  std::vector<float> values(static_cast<size_t>(w.inputs));
  for (int64_t row = w.rows / kRows * kRows; row < w.rows; ++row) {
    unpack_row(w, row, values.data());
    for (int64_t r = 0; r < rows; ++r)
      y[r * stride + row] = dot(x + r * x_stride, values.data(), w.inputs) + (bias ? bias[row] : 0);
  }
}

// The gated delta rule, token by token: three multiply-adds for each number of the state, which a strip of columns
// keeps in the first-level cache. S^T k and S^T q of the next token are summed while S is updated for this one.

constexpr int kStrip = 32;   // value columns of a strip
constexpr int kPrepared = 64;  // tokens that are prepared at once

struct Prepared {
  std::vector<float> k, decayed_k, decayed_q, decay;  // (tokens, D), the last (tokens) without channels
  std::vector<float> kq, strength;                    // (tokens)
};

void prepare(const DeltaRule& job, int64_t text, int64_t head, int64_t value_head, int64_t start, int64_t n, Prepared& to) {
  const int64_t D = job.d_key;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  for (int64_t t = 0; t < n; ++t) {
    const int64_t token = text * job.tokens + start + t;
    const float *q = job.q + token * job.stride + head * D, *k = job.k + token * job.stride + head * D;
    const float per_q = scale / std::sqrt(dot(q, q, D) + job.eps), per_k = 1.0f / std::sqrt(dot(k, k, D) + job.eps);
    const bool valid = !job.valid || job.valid[token];
    float *made_k = &to.k[t * D], *decayed_k = &to.decayed_k[t * D], *decayed_q = &to.decayed_q[t * D];
    to.kq[t] = dot(k, q, D) * per_k * per_q;
    to.strength[t] = valid ? sigmoid(job.beta[token * job.beta_stride + value_head]) : 0.0f;
    if (job.by_channel) {
      float* decay = &to.decay[t * D];
      const float *given = job.decay + token * job.decay_stride + head * D, *added = job.dt_bias + head * D;
      const float rate = valid ? -job.rate[value_head] : 0.0f;
      for (int64_t d = 0; d < D; ++d) decay[d] = power(rate * softplus(given[d] + added[d]));
      for (int64_t d = 0; d < D; ++d) {
        made_k[d] = k[d] * per_k;
        decayed_k[d] = made_k[d] * decay[d];
        decayed_q[d] = q[d] * per_q * decay[d];
      }
    } else {
      const float given = job.decay[token * job.decay_stride + value_head] + job.dt_bias[value_head];
      const float decay = valid ? power(-job.rate[value_head] * softplus(given)) : 1.0f;
      to.decay[t] = decay;
      for (int64_t d = 0; d < D; ++d) {
        made_k[d] = k[d] * per_k;
        decayed_k[d] = made_k[d] * decay;
        decayed_q[d] = q[d] * per_q * decay;
      }
    }
  }
}

// The rows of S are `wide` apart.
template <int VECTORS, bool BY_CHANNEL>
void strip(const Prepared& at, int64_t D, int64_t n, float* S, int64_t wide, const float* v, int64_t v_stride, float* y, int64_t y_stride) {
  f8 known[VECTORS] = {}, seen[VECTORS] = {};
  for (int64_t d = 0; d < D; ++d) {
    const f8 k = all_of(at.decayed_k[d]), q = all_of(at.decayed_q[d]);
    for (int i = 0; i < VECTORS; ++i) {
      const f8 s = load(S + d * wide + 8 * i);
      known[i] += k * s;
      seen[i] += q * s;
    }
  }
  for (int64_t t = 0; t < n; ++t, v += v_stride, y += y_stride) {
    f8 error[VECTORS];
    for (int i = 0; i < VECTORS; ++i) {
      error[i] = at.strength[t] * (load(v + 8 * i) - known[i]);
      store(y + 8 * i, seen[i] + at.kq[t] * error[i]);
      known[i] = seen[i] = all_of(0);
    }
    const float* key = &at.k[t * D];
    const float* decays = &at.decay[BY_CHANNEL ? t * D : t];
    // after the last token the sums are not used: the first of the next tokens are summed when they are prepared
    const int64_t next = t + 1 < n ? t + 1 : t;
    const float *next_k = &at.decayed_k[next * D], *next_q = &at.decayed_q[next * D];
    const f8 one = all_of(decays[0]);
    for (int64_t d = 0; d < D; ++d) {
      const f8 decay = BY_CHANNEL ? all_of(decays[d]) : one, here = all_of(key[d]);
      const f8 k = all_of(next_k[d]), q = all_of(next_q[d]);
      for (int i = 0; i < VECTORS; ++i) {
        const f8 s = decay * load(S + d * wide + 8 * i) + here * error[i];
        store(S + d * wide + 8 * i, s);
        known[i] += k * s;
        seen[i] += q * s;
      }
    }
  }
}

template <int VECTORS>
void strips(const DeltaRule& job, const Prepared& at, int64_t n, float* S, int64_t wide, const float* v, float* y,
            int64_t y_stride) {
  if (job.by_channel) {
    strip<VECTORS, true>(at, job.d_key, n, S, wide, v, job.stride, y, y_stride);
  } else {
    strip<VECTORS, false>(at, job.d_key, n, S, wide, v, job.stride, y, y_stride);
  }
}

// Value columns first .. last - 1 of one value head; their count is a multiple of 8.
void delta_rule(const DeltaRule& job, int64_t text, int64_t value_head, int64_t first, int64_t last) {
  const int64_t D = job.d_key, V = job.d_value, R = job.values_per_key, head = value_head / R;
  const int64_t heads = job.key_heads * R, wide = R * V, columns = value_head % R * V;
  Prepared at;
  const int64_t together = std::min<int64_t>(kPrepared, job.tokens);
  for (auto* list : {&at.k, &at.decayed_k, &at.decayed_q}) list->resize(together * D);
  at.decay.resize(together * (job.by_channel ? D : 1));
  at.kq.resize(together);
  at.strength.resize(together);
  // the state's columns by strips, each contiguous; of one token they are read and written where they are
  const bool apart = job.tokens > 1;
  std::vector<float> S(static_cast<size_t>(apart ? D * (last - first) : 0));
  float* state = job.state + (text * job.key_heads + head) * D * wide + columns;
  const auto each_strip = [&](auto&& work) {
    for (int64_t c = first; c < last; c += kStrip) {
      work(c, std::min<int64_t>(kStrip, last - c), apart ? &S[(c - first) * D] : state + c);
    }
  };
  if (apart && job.past) {
    each_strip([&](int64_t c, int64_t width, float* to) {
      for (int64_t d = 0; d < D; ++d) std::memcpy(to + d * width, state + d * wide + c, width * sizeof(float));
    });
  } else if (!job.past && !apart) {
    for (int64_t d = 0; d < D; ++d) std::fill(state + d * wide + first, state + d * wide + last, 0.0f);
  }
  for (int64_t start = 0; start < job.tokens; start += kPrepared) {
    const int64_t n = std::min<int64_t>(kPrepared, job.tokens - start), token = text * job.tokens + start;
    prepare(job, text, head, value_head, start, n, at);
    each_strip([&](int64_t c, int64_t width, float* to) {
      const int64_t far = apart ? width : wide;
      const float* v = job.v + token * job.stride + value_head * V + c;
      float* y = job.y + token * heads * V + value_head * V + c;
      switch (width / 8) {
        case 4: return strips<4>(job, at, n, to, far, v, y, heads * V);
        case 3: return strips<3>(job, at, n, to, far, v, y, heads * V);
        case 2: return strips<2>(job, at, n, to, far, v, y, heads * V);
        default: return strips<1>(job, at, n, to, far, v, y, heads * V);
      }
    });
  }
  if (!apart) return;
  each_strip([&](int64_t c, int64_t width, float* from) {
    for (int64_t d = 0; d < D; ++d) std::memcpy(state + d * wide + c, from + d * width, width * sizeof(float));
  });
}

// Tokens first .. last - 1 of one text; `before` (kernel - 1, channels) or null, `taps` (kernel, channels).
void convolve(const float* x, int64_t x_stride, const float* before, const float* taps, const float* bias,
              int64_t channels, int64_t kernel, bool with_silu, float* y, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    float* out = y + t * channels;
    for (int64_t c = 0; c < channels; ++c) out[c] = bias ? bias[c] : 0.0f;
    for (int64_t i = 0; i < kernel; ++i) {
      const int64_t from = t - kernel + 1 + i;
      const float* in = from >= 0 ? x + from * x_stride : before ? before + (from + kernel - 1) * channels : nullptr;
      const float* tap = taps + i * channels;
      if (in)
        for (int64_t c = 0; c < channels; ++c) out[c] += in[c] * tap[c];
    }
    if (with_silu)
      for (int64_t c = 0; c < channels; ++c) out[c] = silu(out[c]);
  }
}

// y / sqrt(mean(y^2) + eps) * weight * gating(gate) of rows first .. last - 1, each of `heads` heads. Without a weight
// it is 1 (`offset` is added to it), without a gate there is none.
void gated_norm(const float* y, int64_t y_stride, const float* gate, int64_t gate_stride, const float* weight,
                float offset, float eps, int64_t heads, int64_t width, int gating, float* out, int64_t first,
                int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* in = y + row * y_stride + head * width;
      float* to = out + (row * heads + head) * width;
      const float rstd = 1.0f / std::sqrt(dot(in, in, width) / static_cast<float>(width) + eps);
      for (int64_t i = 0; i < width; ++i) to[i] = in[i] * rstd;
      if (weight)
        for (int64_t i = 0; i < width; ++i) to[i] *= weight[i] + offset;
      if (!gate) continue;
      const float* g = gate + row * gate_stride + head * width;
      if (gating == 0) {
        for (int64_t i = 0; i < width; ++i) to[i] *= silu(g[i]);
      } else {
        for (int64_t i = 0; i < width; ++i) to[i] *= sigmoid(g[i]);
      }
    }
  }
}

void gated_product(const float* gate, const float* up, int64_t stride, int64_t width, int activation, float* out,
                   int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float *g = gate + row * stride, *u = up + row * stride;
    float* to = out + row * width;
    if (activation == 0) {
      for (int64_t i = 0; i < width; ++i) to[i] = silu(g[i]) * u[i];
    } else {
      for (int64_t i = 0; i < width; ++i) to[i] = gelu_tanh(g[i]) * u[i];
    }
  }
}

// Times sigmoid(gate).
void gate(const float* by, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] *= sigmoid(by[i]);
}

}  // namespace

#define TEXT(x) #x
#define NAME(x) TEXT(x)
extern const Kernels kTable;
const ManyRows kInFloat32 = {kTall, kNearColumns, 1, sizeof(float), pack_rows, many_rows};
const Kernels kTable = {NAME(KERNELS), round_rows, packed_groups, packed_tail,   unpack_row, delta_rule, convolve,
                        gated_norm,    gated_product, gate,       attend,        attend_many, attend_many, kInFloat32,
                        kInFloat32,    kInFloat32,    write_codes, read_codes,  widen,        narrow,        few_rows,
                        activate,      norm_rows,     norm_gradient_rows, turn_heads, likelihood,
                        attend_in_training};

}  // namespace KERNELS
}  // namespace asbuilt
