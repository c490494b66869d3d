// Keys and values of a cache in 8 or 4 bits: a row for each vector of a token and head, its codes after its scales, which are
// bfloat16 (asbuilt/kernels/codes.py, the reference).
#pragma once
#include "kernels.h"
#include "vectors.h"

namespace asbuilt {
namespace KERNELS {
namespace {

inline float from_bits(uint32_t bits) {
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}

// e4m3: 4 bits of exponent with a bias of 7, below 2^-6 in steps of 2^-9, 0x7f for NaN.
inline float from_fp8(uint8_t code) {
  const uint32_t size = code & 0x7f, sign = static_cast<uint32_t>(code & 0x80) << 24;
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
  const float usual = from_bits((size << 20) + (120u << 23));
  const float made = size < 8 ? small : size == 0x7f ? std::numeric_limits<float>::quiet_NaN() : usual;
  return sign ? -made : made;
}

// To nearest, to even; cut at 448.
inline uint8_t to_fp8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  if (x != x) return static_cast<uint8_t>(sign | 0x7f);
  const float size = std::fmin(std::fabs(x), 448.0f);
  if (size < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint32_t>(__builtin_rintf(size * 512.0f)));
  std::memcpy(&bits, &size, 4);
  return static_cast<uint8_t>(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}

inline float scale_at(const uint8_t* row, int i) {
  uint16_t stored;
  std::memcpy(&stored, row + 2 * i, 2);
  return BF16::one(stored);
}

inline float put_scale(float scale, uint8_t* row, int i) {
  const uint16_t stored = BF16::narrow(scale);
  std::memcpy(row + 2 * i, &stored, 2);
  return BF16::one(stored);
}

// `n` vectors of `d` numbers, rows of codes one after the other, as floats.
void read_codes(int code, const uint8_t* rows, int64_t n, int64_t d, float* out) {
  const int64_t far = bytes_of_code(code, d);
  for (int64_t i = 0; i < n; ++i, rows += far, out += d) {
    const uint8_t* codes = rows + kCodes[code].scales;
    if (code == kFp8) {
      for (int64_t j = 0; j < d; ++j) out[j] = from_fp8(codes[j]);
      continue;
    }
    const float scale = scale_at(rows, 0);
    if (code == kFp8Head) {
      for (int64_t j = 0; j < d; ++j) out[j] = from_fp8(codes[j]) * scale;
    } else if (code == kInt8Head) {
      const auto* whole = reinterpret_cast<const int8_t*>(codes);
      for (int64_t j = 0; j < d; ++j) out[j] = static_cast<float>(whole[j]) * scale;
    } else {
      const float low = scale_at(rows, 1);
      const int64_t half = (d + 1) / 2;
      for (int64_t j = 0; j < half; ++j) out[j] = static_cast<float>(codes[j] & 15) * scale + low;
      for (int64_t j = half; j < d; ++j) out[j] = static_cast<float>(codes[j - half] >> 4) * scale + low;
    }
  }
}

// A row of 4 bits: numbers from 0 to 15 times a scale, above a minimum that is rounded down, so that none is below it.
void write_int4(const float* x, int64_t d, float least, float most, uint8_t* row) {
  float low = put_scale(least, row, 1);
  if (low > least) low = put_scale(least - std::fabs(least) * 0x1p-8f, row, 1);
  const float scale = put_scale((most - low) / 15.0f, row, 0), by = scale == 0 ? 1.0f : scale;
  const int64_t half = (d + 1) / 2;
  const auto code = [&](int64_t j) {
    if (j >= d) return 0;
    const float whole = __builtin_rintf((x[j] - low) / by);
    return static_cast<int>(!(whole > 0) ? 0 : whole > 15 ? 15 : whole);
  };
  for (int64_t j = 0; j < half; ++j) row[4 + j] = static_cast<uint8_t>(code(j) | code(half + j) << 4);
}

// A vector of `d` numbers as a row of codes. Of numbers that are not all finite every code means NaN, or in `fp8` its own.
void write_codes(int code, const float* x, int64_t d, uint8_t* row) {
  if (code == kFp8) {
    for (int64_t j = 0; j < d; ++j) row[j] = to_fp8(x[j]);
    return;
  }
  float least = x[0], most = x[0], zero = 0;
  for (int64_t j = 0; j < d; ++j) {
    zero += x[j] * 0.0f;
    least = x[j] < least ? x[j] : least;
    most = x[j] > most ? x[j] : most;
  }
  if (zero != 0) {
    std::memset(row, 0, bytes_of_code(code, d));
    for (int i = 0; 2 * i < kCodes[code].scales; ++i) put_scale(std::numeric_limits<float>::quiet_NaN(), row, i);
    return;
  }
  if (code == kInt4Head) return write_int4(x, d, least, most, row);
  const float largest = code == kFp8Head ? 448.0f : 127.0f;
  const float scale = put_scale(std::fmax(-least, most) / largest, row, 0), by = scale == 0 ? 1.0f : scale;
  for (int64_t j = 0; j < d; ++j) {
    const float cut = std::fmax(-largest, std::fmin(largest, x[j] / by));
    row[2 + j] = code == kFp8Head ? to_fp8(cut) : static_cast<uint8_t>(static_cast<int8_t>(__builtin_rintf(cut)));
  }
}

}  // namespace
}  // namespace KERNELS
}  // namespace asbuilt
