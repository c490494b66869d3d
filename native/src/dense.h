// Products in float32: of many rows with any matrix, unpacked panel by panel, and of a few rows with float matrices.
#pragma once
#include <cstring>
#include <type_traits>

#include "formats.h"
#include "vectors.h"

namespace asbuilt {
namespace KERNELS {
namespace {

// A tile of y: kTall rows of x times 2 vectors of columns, so that the sums fill the registers: 12 of 16, or 24 of 32.
#if defined(__AVX512F__) || defined(EMULATED)
constexpr int kLanes = 16, kTall = 12;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTall = 12;
#else
constexpr int kLanes = 8, kTall = 6;
#endif
typedef float Wide __attribute__((vector_size(4 * kLanes), aligned(4)));
constexpr int kColumns = 2 * kLanes;   // of a panel of W
constexpr int64_t kDepth = 256;        // inputs of a panel: it stays in the first-level cache while rows of x pass
constexpr int64_t kNearRows = 96;      // rows of x that stay in the second-level cache while panels pass
constexpr int64_t kNearColumns = 64;   // columns of W that are unpacked together

inline Wide wide(const float* x) { return *reinterpret_cast<const Wide*>(x); }

// y (kTall, kColumns) += a b of n inputs: a (kTall, n) with rows ROW and inputs INPUT numbers apart, b (n, kColumns) with
// rows `b_stride` apart.
template <int ROW, int INPUT>
inline void tile_of(const float* a, const float* b, int64_t b_stride, int64_t n, Wide (&sums)[kTall][2]) {
  for (int64_t k = 0; k < n; ++k, a += INPUT, b += b_stride) {
    const Wide left = wide(b), right = wide(b + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kTall; ++r) {
      sums[r][0] += a[r * ROW] * left;
      sums[r][1] += a[r * ROW] * right;
    }
  }
}

// Writes the part of a tile that y has: y += it, or y = it + bias.
inline void write_tile(const Wide (&sums)[kTall][2], bool add, const float* bias, int64_t rows, int64_t columns, float* y,
                       int64_t stride) {
  const Wide none = {};
  for (int64_t r = 0; r < rows; ++r, y += stride) {
    const float* before = add ? y : bias;
    if (columns == kColumns) {
      *reinterpret_cast<Wide*>(y) = sums[r][0] + (before ? wide(before) : none);
      *reinterpret_cast<Wide*>(y + kLanes) = sums[r][1] + (before ? wide(before + kLanes) : none);
    } else {
      float row[kColumns];
      std::memcpy(row, sums[r], sizeof row);
      for (int64_t c = 0; c < columns; ++c) y[c] = row[c] + (before ? before[c] : 0.0f);
    }
  }
}

// Rows of x as tiles read them: out (rows / kTall rounded up, inputs, kTall), zeros for rows that are not there.
void pack_rows(const float* x, int64_t rows, int64_t inputs, int64_t stride, float* out) {
  for (int64_t row = 0; row < rows; row += kTall, out += inputs * kTall) {
    const float* from[kTall];
    const int64_t n = rows - row < kTall ? rows - row : kTall;
    for (int r = 0; r < kTall; ++r) from[r] = x + (row + (r < n ? r : 0)) * stride;
    for (int64_t k = 0; k < inputs; ++k)
      for (int r = 0; r < kTall; ++r) out[k * kTall + r] = from[r][k];
    for (int64_t r = n; r < kTall; ++r)
      for (int64_t k = 0; k < inputs; ++k) out[k * kTall + r] = 0;
  }
}

template <class F, class = void>
struct IsPlain : std::false_type {};
template <class F>
struct IsPlain<F, std::void_t<typename F::Stored>> : std::true_type {};

template <class Work>
void with_format(int format, Work&& work) {
  int number = 0;
#define TRY(F) \
  if (format == number++) return work(static_cast<F*>(nullptr));
  ALL_FORMATS(TRY)
  PLAIN_FORMATS(TRY)
#undef TRY
}

// The same for the plain formats, by the numbers that they have among all.
template <class Work>
void with_numbers(int format, Work&& work) {
  with_format(format, [&](auto* of) {
    if constexpr (IsPlain<std::remove_pointer_t<decltype(of)>>::value) work(of);
  });
}

// Panels: columns of W^T, (inputs, kColumns), from a group of 8 rows of W.

inline void transpose(const f8 (&in)[8], float* out, int64_t stride) {
#ifdef __AVX2__
  __m256 t[8], u[8];
  for (int i = 0; i < 8; ++i) t[i] = reinterpret_cast<__m256>(in[i]);
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
    u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    t[i] = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
    t[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
    t[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
    t[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
  }
#elif defined(NEON)
  const auto quarter = [&](float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* to) {
    const float32x4x2_t first = vtrnq_f32(a, b), second = vtrnq_f32(c, d);
    for (int i = 0; i < 2; ++i) {
      vst1q_f32(to + i * stride, vcombine_f32(vget_low_f32(first.val[i]), vget_low_f32(second.val[i])));
      vst1q_f32(to + (i + 2) * stride, vcombine_f32(vget_high_f32(first.val[i]), vget_high_f32(second.val[i])));
    }
  };
  for (int j = 0; j < 8; j += 4) {
    quarter(in[j].a, in[j + 1].a, in[j + 2].a, in[j + 3].a, out + j);
    quarter(in[j].b, in[j + 1].b, in[j + 2].b, in[j + 3].b, out + j + 4 * stride);
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[i * stride + j] = in[j][i];
#endif
}

// Inputs `from` .. `until` - 1 of `n` <= 8 rows of plain numbers.
template <class F>
void transpose_rows(const typename F::Stored* w, int64_t row_stride, int64_t n, int64_t from, int64_t until, float* out,
                    int64_t stride) {
  int64_t k = from;
  if (n == 8) {
    for (; k + 8 <= until; k += 8, out += 8 * stride) {
      f8 rows[8];
      for (int r = 0; r < 8; ++r) rows[r] = F::eight(w + r * row_stride + k);
      transpose(rows, out, stride);
    }
  }
  for (; k < until; ++k, out += stride)
    for (int64_t r = 0; r < 8; ++r) out[r] = r < n ? F::one(w[r * row_stride + k]) : 0.0f;
}

// Inputs `from` .. `until` - 1 of rows `row` .. `row` + 7, zeros beyond the last row; out (inputs, kColumns).
template <class F>
void unpack_group(const Packed& w, int64_t row, int64_t from, int64_t until, float* out) {
  if constexpr (IsPlain<F>::value) {
    const int64_t n = w.rows - row < 8 ? w.rows - row : 8;
    const auto* data = reinterpret_cast<const typename F::Stored*>(w.data) + row * w.inputs;
    if (n > 0) return transpose_rows<F>(data, w.inputs, n, from, until, out, kColumns);
    for (int64_t k = from; k < until; ++k, out += kColumns) std::memset(out, 0, 8 * sizeof(float));
  } else {
    const int64_t blocks = w.inputs / F::VALUES, full = w.rows / kRows * kRows;
    if (row < full) {
#ifdef EIGHT_ROWS
      constexpr int CHUNKS = F::SUB / 4;
      const uint8_t* data = w.data + (row * blocks + from / F::VALUES * kRows) * F::BYTES;
      for (int64_t k = from; k < until; k += F::VALUES, data += kRows * F::BYTES) {
        const F header(data);
#pragma GCC unroll 16
        for (int sub = 0; sub < F::VALUES / F::SUB; ++sub) {
          Lanes scale, offset;
          header.scales(sub, scale, offset);
#pragma GCC unroll 8
          for (int c = sub * CHUNKS; c < (sub + 1) * CHUNKS; ++c) {
            const Words codes = F::codes(data, c);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, out += kColumns) {
              const Lanes code = F::SIGNED ? signed_byte_of(codes, i) : byte_of(codes, i);
              _mm256_storeu_ps(out, F::SIGNED ? _mm256_mul_ps(code, scale) : _mm256_fmadd_ps(code, scale, offset));
            }
          }
        }
      }
      return;
#endif
    }
    for (int64_t j = 0; j < 8; ++j) {
      if (row + j >= w.rows) {
        for (int64_t k = 0; k < until - from; ++k) out[k * kColumns + j] = 0;
        continue;
      }
      Decoded<F> made;
      const uint8_t* data = w.data + (row < full ? row : row + j) * blocks * F::BYTES;
      for (int64_t block = from / F::VALUES; block < until / F::VALUES; ++block) {
        F::decode({data + block * F::BYTES * (row < full ? kRows : 1), row < full ? static_cast<int>(j) : -1}, made);
        for (int i = 0; i < F::VALUES; ++i)
          out[(block * F::VALUES - from + i) * kColumns + j] =
              made.scale[i / F::SUB] * static_cast<float>(made.code[i]) + made.offset[i / F::SUB];
      }
    }
  }
}

float* aligned(float* x) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(x) + 63) & ~uintptr_t{63}); }

using Unpack = void (*)(const Packed&, int64_t row, int64_t from, int64_t until, float* out);
inline Unpack unpacking(int format) {
  Unpack found = nullptr;
  with_format(format, [&](auto* of) { found = unpack_group<std::remove_pointer_t<decltype(of)>>; });
  return found;
}

// Columns first .. last - 1 (`first` a multiple of kNearColumns) of y (rows, rows of W) = x W^T + bias, x as `pack_rows`
// makes it.
void many_rows(const Packed& w, int64_t first, int64_t last, const float* x, int64_t rows, const float* bias, float* y,
               int64_t stride) {
  static thread_local float room[kDepth * kNearColumns + 16];
  float* panels = aligned(room);
  const Unpack unpack = unpacking(w.format);
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  for (int64_t from = first; from < last; from += kNearColumns) {
    const int64_t until = least(last, from + kNearColumns);
    for (int64_t k = 0; k < w.inputs; k += kDepth) {
      const int64_t n = least(w.inputs - k, kDepth);
      for (int64_t at = 0; at < (until - from + kColumns - 1) / kColumns * kColumns; at += 8)
        unpack(w, from + at, k, k + n, panels + at / kColumns * kColumns * kDepth + at % kColumns);
      for (int64_t near = 0; near < rows; near += kNearRows) {
        for (int64_t column = from; column < until; column += kColumns) {
          const float* panel = panels + (column - from) * kDepth;
          for (int64_t row = near; row < least(rows, near + kNearRows); row += kTall) {
            Wide sums[kTall][2] = {};
            tile_of<1, kTall>(x + row * w.inputs + k * kTall, panel, kColumns, n, sums);
            write_tile(sums, k > 0, bias ? bias + column : nullptr, least(rows - row, kTall),
                       least(until - column, kColumns), y + row * stride + column, stride);
          }
        }
      }
    }
  }
}

// N rows of a plain matrix times R rows of x. The rows that follow are asked for meanwhile: short rows side by side are
// too many streams for the processor to foresee.
template <class F, int N, int R>
void dots(const typename F::Stored* w, int64_t inputs, const float* x, int64_t x_stride, float (&out)[N][R]) {
  f8 sums[N][R] = {};
  int64_t k = 0;
  for (; k + 8 <= inputs; k += 8) {
    if (N > 1) {
      __builtin_prefetch(w + (N + k / 8 % N) * inputs + k);
      __builtin_prefetch(w + (N + (k / 8 + N / 2) % N) * inputs + k);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const f8 weights = F::eight(w + i * inputs + k);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) sums[i][r] += weights * load(x + r * x_stride + k);
    }
  }
  for (int i = 0; i < N; ++i) {
    for (int r = 0; r < R; ++r) {
      out[i][r] = sum_of(sums[i][r]);
      for (int64_t at = k; at < inputs; ++at) out[i][r] += F::one(w[i * inputs + at]) * x[r * x_stride + at];
    }
  }
}

template <class F, int R>
void few(const Packed& w, int64_t first, int64_t last, const float* x, int64_t x_stride, const float* bias, float* y,
         int64_t stride) {
  const auto* data = reinterpret_cast<const typename F::Stored*>(w.data);
  const auto rows = [&](auto count, int64_t row) {
    constexpr int N = decltype(count)::value;
    float made[N][R];
    dots<F, N, R>(data + row * w.inputs, w.inputs, x, x_stride, made);
    for (int i = 0; i < N; ++i)
      for (int r = 0; r < R; ++r) y[r * stride + row + i] = made[i][r] + (bias ? bias[row + i] : 0.0f);
  };
  int64_t row = first;
  for (; row + 4 <= last; row += 4) rows(std::integral_constant<int, 4>{}, row);
  for (; row < last; ++row) rows(std::integral_constant<int, 1>{}, row);
}

// y (rows, rows first .. last - 1 of W) of a matrix of plain numbers.
void few_rows(const Packed& w, int64_t first, int64_t last, const float* x, int64_t rows, int64_t x_stride,
              const float* bias, float* y, int64_t stride) {
  with_numbers(w.format, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) few<F, 2>(w, first, last, x + r * x_stride, x_stride, bias, y + r * stride, stride);
    if (r < rows) few<F, 1>(w, first, last, x + r * x_stride, x_stride, bias, y + r * stride, stride);
  });
}

// n numbers to float32 and back.
void widen(int format, const void* from, int64_t n, float* to) {
  with_numbers(format, [&](auto* of) {
    using F = std::remove_pointer_t<decltype(of)>;
    for (int64_t i = 0; i < n; ++i) to[i] = F::one(static_cast<const typename F::Stored*>(from)[i]);
  });
}

void narrow(int format, const float* from, int64_t n, void* to) {
  with_numbers(format, [&](auto* of) {
    using F = std::remove_pointer_t<decltype(of)>;
    for (int64_t i = 0; i < n; ++i) static_cast<typename F::Stored*>(to)[i] = F::narrow(from[i]);
  });
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
