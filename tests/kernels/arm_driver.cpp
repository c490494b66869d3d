// The native kernels of another processor, driven through pipes (test_arm.py). First kernels that read no blocks are compared
// with the portable ones, which other tests hold to torch; then products are answered. A request is a head, blocks or plain
// rows, x (tokens, inputs) and a bias; the answer y (tokens, rows), the rows as they are looked up, and the data as before.
// Without rows the data are the points of a grid.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels.h"

using namespace asbuilt;

extern "C" {
int asbuilt_choose(const char* name);
const char* asbuilt_usable();
void asbuilt_threads(int count);
int asbuilt_format(const char* name);
int asbuilt_grid(const char* name, const int8_t* numbers, int count);
void asbuilt_interleave(int format, uint8_t* data, int64_t rows, int64_t inputs, int back);
void asbuilt_packed(int count, const Packed* matrices, const float* x, int64_t rows, int64_t x_stride,
                    const float* const* biases, float* const* outs, const int64_t* strides, int bfloat16);
void asbuilt_rows(const Packed* table, const int64_t* index, int64_t count, float* out);
}

namespace asbuilt {
namespace portable {
extern const Kernels kTable;
}
namespace neon {
extern const Kernels kTable;
}
namespace neon_dot {
extern const Kernels kTable;
}
}  // namespace asbuilt

namespace {

struct Head {
  char format[16];
  int64_t rows, inputs, tokens, bytes;
};

std::mt19937 source;
std::vector<float> drawn(int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> made(n);
  for (float& x : made) x = normal(source);
  return made;
}
int64_t number(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(source); }

bool wrong = false;
void same(const char* what, const std::vector<float>& ours, const std::vector<float>& theirs, float tolerance) {
  for (size_t i = 0; i < ours.size(); ++i) {
    const float difference = std::fabs(ours[i] - theirs[i]), size = 1 + std::fabs(theirs[i]);
    if (ours[i] == theirs[i] || difference <= tolerance * size || (std::isnan(ours[i]) && std::isnan(theirs[i]))) continue;
    std::fprintf(stderr, "%s: number %zu is %g, not %g\n", what, i, ours[i], theirs[i]);
    wrong = true;
    return;
  }
}

// Keys or values of a cache: plain numbers of a type or codes.
std::vector<uint8_t> cached(const Kernels& k, int type, const std::vector<float>& x, int64_t d) {
  const int64_t n = static_cast<int64_t>(x.size());
  if (type < kFormatCount) {
    std::vector<uint8_t> made(n * kFormats[type].bytes);
    k.narrow(type, x.data(), n, made.data());
    return made;
  }
  const int64_t bytes = bytes_of_code(type - kFormatCount, d);
  std::vector<uint8_t> made(n / d * bytes);
  for (int64_t i = 0; i < n / d; ++i) k.write_codes(type - kFormatCount, &x[i * d], d, &made[i * bytes]);
  return made;
}

void compare_attention(const Kernels& k, const Kernels& plain, int type) {
  const int64_t d = number(1, 9) * 8 + number(0, 1), group = number(1, 3), keys = number(60, 150), tokens = number(2, 40);
  const std::vector<float> q = drawn(tokens * group * d);
  const auto k_cached = cached(plain, type, drawn(keys * d), d), v_cached = cached(plain, type, drawn(keys * d), d);
  const auto one = [&](const Kernels& by) {
    std::vector<float> made(group * (d + 2));
    by.attend({q.data(), k_cached.data(), v_cached.data(), type, group, d, 0.3f, &made[0], &made[group], &made[2 * group]}, 3, keys);
    return made;
  };
  same("attention of one token", one(k), one(plain), 1e-4f);
  const auto many = [&](const Kernels& by) {
    std::vector<float> made(tokens * group * d);
    by.attend_many({q.data(), group * d, k_cached.data(), v_cached.data(), type, group, d, keys - tokens, 0.3f, made.data(), group * d}, 0, tokens);
    return made;
  };
  same("attention of many tokens", many(k), many(plain), 1e-5f);
}

void compare_attention_in_training(const Kernels& k, const Kernels& plain) {
  const int64_t d = number(1, 70), group = number(1, 3), keys = number(2, 150), causal = number(0, 1);
  const int64_t tokens = causal ? keys : number(2, 150), queries = tokens * group * d;
  const std::vector<float> q = drawn(queries), keys_of = drawn(keys * d), values = drawn(keys * d), dy = drawn(queries);
  const auto both = [&](const Kernels& by) {
    std::vector<float> made(2 * queries + group * tokens + 2 * keys * d);
    float *y = made.data(), *log_z = y + queries, *dq = log_z + group * tokens, *dk = dq + queries, *dv = dk + keys * d;
    const TrainingAttention::HeadRows rows{q.data(), {0, d, group * d}}, of{keys_of.data(), {0, 0, d}}, with{values.data(), {0, 0, d}};
    TrainingAttention job{rows, of, with, {}, 1, group, 1, tokens, keys, d, causal != 0, 0.3f, y, log_z, dq, dk, dv};
    by.attend_in_training(job, 0, 0);
    job.dy = {dy.data(), {0, d, group * d}};
    by.attend_in_training(job, 0, 0);
    return made;
  };
  same("attention in training", both(k), both(plain), 1e-4f);
}

// To plain numbers and back, those that are subnormal, large or no numbers too: bit for bit.
void compare_numbers(const Kernels& k, const Kernels& plain, int type) {
  std::vector<float> x = drawn(300);
  for (size_t i = 0; i < x.size(); i += 3) x[i] = std::ldexp(x[i], static_cast<int>(number(-30, 20)));
  const float none = std::numeric_limits<float>::quiet_NaN(), most = std::numeric_limits<float>::infinity();
  for (const float special : {none, most, -most, 65519.0f, 65520.0f, -0.0f, 3e38f}) x.push_back(special);
  const auto widened = [&](const Kernels& by) {
    const auto narrow = cached(by, type, x, 1);
    std::vector<float> made(x.size());
    by.widen(type, narrow.data(), static_cast<int64_t>(x.size()), made.data());
    return made;
  };
  same("plain numbers", widened(k), widened(plain), 0);
}

void compare_the_rest(const Kernels& k, const Kernels& plain) {
  const int64_t width = number(1, 70), rows = 5;
  const std::vector<float> x = drawn(rows * width), gate = drawn(rows * width), weight = drawn(width);
  for (int kind : {0, 1}) {
    const auto normed = [&](const Kernels& by) {
      std::vector<float> made(rows * width);
      by.gated_norm(x.data(), width, gate.data(), width, weight.data(), 1, 1e-5f, 1, width, kind, made.data(), 0, rows);
      return made;
    };
    same("norms", normed(k), normed(plain), 1e-5f);
    const auto gated = [&](const Kernels& by) {
      std::vector<float> made(rows * width);
      by.gated_product(x.data(), gate.data(), width, width, kind, made.data(), 0, rows);
      return made;
    };
    same("gated products", gated(k), gated(plain), 1e-5f);
    const int64_t d = number(3, 30), values = 8 * number(1, 6), tokens = kind ? 70 : 1;
    const std::vector<float> mixed = drawn(tokens * (2 * d + values)), beta = drawn(tokens), decay = drawn(tokens * d);
    const std::vector<float> rate{1.5f}, before = drawn(d * values), dt_bias = drawn(d);
    const auto recurred = [&](const Kernels& by) {
      std::vector<float> state = before, made(tokens * values);
      by.delta_rule({1, tokens, 1, 1, d, values, &mixed[0], &mixed[d], &mixed[2 * d], 2 * d + values, beta.data(), decay.data(), 1,
                     kind ? d : 1, rate.data(), dt_bias.data(), kind != 0, nullptr, 1e-6f, state.data(), true, made.data()},
                    0, 0, 0, values);
      made.insert(made.end(), state.begin(), state.end());
      return made;
    };
    same("the delta rule", recurred(k), recurred(plain), 1e-4f);
  }
}

template <class T>
bool read(T* to, int64_t n) {
  return std::fread(to, sizeof(T), n, stdin) == static_cast<size_t>(n);
}

bool answer() {
  Head head;
  if (!read(&head, 1)) return false;
  std::vector<uint8_t> data(head.bytes);
  if (!read(data.data(), head.bytes)) return false;
  if (!head.rows) return asbuilt_grid(head.format, reinterpret_cast<const int8_t*>(data.data()), static_cast<int>(head.bytes)) == 1;
  std::vector<float> x(head.tokens * head.inputs), bias(head.rows), y(head.tokens * head.rows), found(head.rows * head.inputs);
  if (!read(x.data(), x.size()) || !read(bias.data(), head.rows)) return false;
  const int format = asbuilt_format(head.format);
  const bool blocks = format < kBlockFormats;
  if (blocks) asbuilt_interleave(format, data.data(), head.rows, head.inputs, 0);
  const Packed w{format, data.data(), head.rows, head.inputs};
  const float* biases[] = {bias.data()};
  float* outs[] = {y.data()};
  asbuilt_packed(1, &w, x.data(), head.tokens, head.inputs, biases, outs, &head.rows, 0);
  std::vector<int64_t> all(head.rows);
  for (int64_t i = 0; i < head.rows; ++i) all[i] = i;
  asbuilt_rows(&w, all.data(), head.rows, found.data());
  if (blocks) asbuilt_interleave(format, data.data(), head.rows, head.inputs, 1);
  std::fwrite(y.data(), sizeof(float), y.size(), stdout);
  std::fwrite(found.data(), sizeof(float), found.size(), stdout);
  std::fwrite(data.data(), 1, data.size(), stdout);
  return true;
}

}  // namespace

int main(int, char** arguments) {
  if (!asbuilt_choose(arguments[1])) {
    std::fprintf(stderr, "usable here: %s\n", asbuilt_usable());
    return 3;
  }
  source.seed(static_cast<unsigned>(std::atoi(arguments[2])));
  asbuilt_threads(2);
  const Kernels& k = std::strcmp(arguments[1], "neon") == 0 ? neon::kTable : neon_dot::kTable;
  for (int round = 0; round < 3; ++round) {
    for (int type = kBlockFormats; type < kFormatCount + kCodeCount; ++type) compare_attention(k, portable::kTable, type);
    for (int type = kBlockFormats; type < kFormatCount; ++type) compare_numbers(k, portable::kTable, type);
    compare_attention_in_training(k, portable::kTable);
    compare_the_rest(k, portable::kTable);
  }
  while (answer()) {}
  return wrong;
}
