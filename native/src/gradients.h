// What training computes beside products, with gradients: rows or runs of numbers, in float32 or bfloat16 (`F`).
#pragma once
#include "kernels.h"
#include "vectors.h"

namespace asbuilt {
namespace KERNELS {
namespace {

// e^x of x <= 0 as `power` computes it, in fewer steps: results below the smallest normal number are 0, of NaN NaN.
inline float decay(float x) {
  const float clamped = x < -88.0f ? -88.0f : x;  // where n = -127, and the factor 0
  const float n = __builtin_rintf(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float factor;
  std::memcpy(&factor, &bits, 4);
  return p * factor;
}

// 1 / (1 + e^-x), of which neither side overflows.
inline float opened(float x) {
  const float u = decay(x < 0 ? x : -x);
  return (x < 0 ? u : 1.0f) / (1.0f + u);
}

// Activations x s with s = 1 / (1 + e^-u): u = x of SiLU, u = 2 sqrt(2 / pi) (x + 0.044715 x^3) of GELU's approximation.
struct Silu {
  static float inner(float x) { return x; }
  static float slope(float) { return 1.0f; }
};
struct GeluTanh {
  static float inner(float x) { return 1.5957691216f * (x + 0.044715f * x * x * x); }
  static float slope(float x) { return 1.5957691216f * (1.0f + 0.134145f * x * x); }
};

// y = act(x), or with `dy` its gradient dy act'(x), act'(x) = s + x s (1 - s) u'.
template <class F, class A>
void activated(const typename F::Stored* __restrict x, const typename F::Stored* __restrict dy, int64_t n,
               typename F::Stored* __restrict y) {
  if (dy) {
    for (int64_t i = 0; i < n; ++i) {
      const float in = F::one(x[i]), s = opened(A::inner(in));
      y[i] = F::narrow(F::one(dy[i]) * (s + in * s * (1.0f - s) * A::slope(in)));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float in = F::one(x[i]);
      y[i] = F::narrow(in * opened(A::inner(in)));
    }
  }
}

template <class F, class A>
void activate_run(const Activated& job, int64_t first, int64_t last) {
  using S = typename F::Stored;
  activated<F, A>(static_cast<const S*>(job.x) + first, job.dy ? static_cast<const S*>(job.dy) + first : nullptr,
                  last - first, static_cast<S*>(job.y) + first);
}

void activate(const Activated& job, int64_t first, int64_t last) {
  const auto with = job.narrow ? (job.activation == 0 ? activate_run<BF16, Silu> : activate_run<BF16, GeluTanh>)
                               : (job.activation == 0 ? activate_run<F32, Silu> : activate_run<F32, GeluTanh>);
  with(job, first, last);
}

inline float product_sum(const float* a, const float* b, const float* c, int64_t n) {
  f8 sum[2] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    sum[0] += load(a + i) * load(b + i) * load(c + i);
    sum[1] += load(a + i + 8) * load(b + i + 8) * load(c + i + 8);
  }
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i] * c[i];
  return sum_of(sum[0] + sum[1]) + rest;
}

// y = x r gain and r = 1 / sqrt(mean(x^2) + eps) of rows first .. last - 1.
void norm_rows(const Norms& job, int64_t first, int64_t last) {
  const int64_t n = job.width;
  for (int64_t row = first; row < last; ++row) {
    const float* x = job.x + row * n;
    float* y = job.y + row * n;
    const float r = job.rstd[row] = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + job.eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * job.gain[i];
  }
}

// dx = r dy gain - x r^3 sum(dy x gain) / width; r dy x is added to dgain.
void norm_gradient_rows(const Norms& job, int64_t first, int64_t last, float* dgain) {
  const int64_t n = job.width;
  const float* gain = job.gain;
  for (int64_t row = first; row < last; ++row) {
    const float *__restrict x = job.x + row * n, *__restrict dy = job.dy + row * n;
    float* __restrict dx = job.y + row * n;
    const float r = job.rstd[row], along = r * r * r * product_sum(dy, x, gain, n) / static_cast<float>(n);
    for (int64_t i = 0; i < n; ++i) dx[i] = r * dy[i] * gain[i] - along * x[i];
    for (int64_t i = 0; i < n; ++i) dgain[i] += r * dy[i] * x[i];
  }
}

// Numbers of one head, rotated by pairs of its halves; `sign` -1 turns back.
template <class F>
void turn_head(const typename F::Stored* __restrict from, const typename F::Stored* __restrict cos,
               const typename F::Stored* __restrict sin, int64_t half, float sign, typename F::Stored* __restrict to) {
  for (int64_t i = 0; i < half; ++i) {
    const float x = F::one(from[i]), y = F::one(from[i + half]);
    to[i] = F::narrow(x * F::one(cos[i]) + sign * y * F::one(sin[i]));
    to[i + half] = F::narrow(y * F::one(cos[i + half]) + sign * x * F::one(sin[i + half]));
  }
}

// Heads of tokens first .. last - 1, side by side in one tensor, apart with RoPE over halves, or back (the gradients).
template <class F>
void turn_tokens(const Heads& job, int64_t first, int64_t last) {
  using S = typename F::Stored;
  const int64_t d = job.d;
  const float sign = job.back ? -1.0f : 1.0f;
  for (int64_t row = first; row < last; ++row) {
    const int64_t text = row / job.tokens, token = row % job.tokens;
    S* joined = static_cast<S*>(job.joined) + row * job.row_stride;
    const S* cos = static_cast<const S*>(job.cos) + text * job.table_stride + token * d;
    const S* sin = static_cast<const S*>(job.sin) + text * job.table_stride + token * d;
    for (int which = 0; which < 3; ++which) {
      const Heads::Apart& apart = job.apart[which];
      for (int64_t head = 0; head < apart.heads; ++head, joined += d) {
        S* own = static_cast<S*>(apart.data) + text * apart.strides[0] + token * apart.strides[1] + head * apart.strides[2];
        const S* from = job.back ? own : joined;
        S* to = job.back ? joined : own;
        if (which == 2)
          std::memcpy(to, from, d * sizeof(S));
        else
          turn_head<F>(from, cos, sin, d / 2, sign, to);
      }
    }
  }
}

void turn_heads(const Heads& job, int64_t first, int64_t last) {
  job.narrow ? turn_tokens<BF16>(job, first, last) : turn_tokens<F32>(job, first, last);
}

// `by` e^(l - z) of one row, elsewhere or in its place: twice, as one loop over two pointers that may be equal is slow.
template <class F>
void slopes(const typename F::Stored* __restrict l, int64_t n, float z, float by, typename F::Stored* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = F::narrow(decay(F::one(l[i]) - z) * by);
}

template <class F>
void slopes_within(typename F::Stored* l, int64_t n, float z, float by) {
  for (int64_t i = 0; i < n; ++i) l[i] = F::narrow(decay(F::one(l[i]) - z) * by);
}

// ln Z = ln sum e^l and ln Z - l[target] of rows of logits l; or their gradient, d (p (1 + 2 z ln Z) - 1[target]).
template <class F>
void likelihood_rows(const Likelihood& job, int64_t first, int64_t last) {
  using S = typename F::Stored;
  const int64_t n = job.width;
  for (int64_t row = first; row < last; ++row) {
    const S* logits = static_cast<const S*>(job.logits) + row * job.stride;
    const float at = F::one(logits[job.targets[row]]);
    if (!job.d) {
      f8 most = all_of(-std::numeric_limits<float>::infinity());
      int64_t i = 0;
      for (; i + 8 <= n; i += 8) most = larger(F::eight(logits + i), most);
      float lanes[8], top = -std::numeric_limits<float>::infinity();
      store(lanes, most);
      for (const float lane : lanes) top = lane > top ? lane : top;
      for (; i < n; ++i) top = F::one(logits[i]) > top ? F::one(logits[i]) : top;
      constexpr int64_t kPiece = 512;
      float piece[kPiece], total = 0;
      for (int64_t start = 0; start < n; start += kPiece) {
        const int64_t here = n - start < kPiece ? n - start : kPiece;
        for (int64_t j = 0; j < here; ++j) piece[j] = decay(F::one(logits[start + j]) - top);
        f8 sum = {};
        int64_t j = 0;
        for (; j + 8 <= here; j += 8) sum += load(piece + j);
        float rest = 0;
        for (; j < here; ++j) rest += piece[j];
        total += sum_of(sum) + rest;
      }
      job.log_z[row] = top + std::log(total);
      job.nats[row] = job.log_z[row] - at;
      continue;
    }
    const bool within = job.dl == job.logits;  // the gradient takes the logits' place
    S* dl = static_cast<S*>(job.dl) + row * (within ? job.stride : n);
    const float z = job.log_z[row], by = *job.d * (1.0f + 2.0f * job.z * z);
    within ? slopes_within<F>(dl, n, z, by) : slopes<F>(logits, n, z, by, dl);
    dl[job.targets[row]] = F::narrow(decay(at - z) * by - *job.d);
  }
}

void likelihood(const Likelihood& job, int64_t first, int64_t last) {
  job.narrow ? likelihood_rows<BF16>(job, first, last) : likelihood_rows<F32>(job, first, last);
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
