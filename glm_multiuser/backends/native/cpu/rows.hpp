// Operations on single rows: norms, SwiGLU, rotary embedding, argmax.
#pragma once

#include "vector.hpp"

namespace {

// Sums f over a row, in an order that depends on `size` alone.
template <class F>
inline float reduce(int64_t size, F f) {
  vec sums{};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sums += f(i, WIDTH);
  if (i < size) sums += f(i, (int)(size - i));
  return sum(sums);
}

template <class F>
inline void each(int64_t size, float* y, F f) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(y + i, f(i, WIDTH));
  if (i < size) store_first(y + i, f(i, (int)(size - i)), (int)(size - i));
}

inline float root(float x) { return __builtin_sqrtf(x); }

void layer_norm(const float* x, const float* gamma, const float* beta, float epsilon, int64_t size,
                float* y) {
  const auto of_x = [&](int64_t i, int n) { return load_first(x + i, n); };
  const float mean = reduce(size, of_x) / (float)size;
  const float variance = reduce(size, [&](int64_t i, int n) {
    // Lanes past the end of the row must not contribute.
    const vec difference = n == WIDTH ? load(x + i) - mean : load_first(x + i, n) - mean;
    return first_lanes(n, difference * difference, vec{});
  }) / (float)size;
  const float scale = 1.0f / root(variance + epsilon);
  each(size, y, [&](int64_t i, int n) {
    const vec scaled = (load_first(x + i, n) - mean) * scale;
    return multiply_add(scaled, load_first(gamma + i, n), load_first(beta + i, n));
  });
}

void rms_norm(const float* x, const float* weight, float epsilon, int64_t size, float* y) {
  const float mean = reduce(size, [&](int64_t i, int n) {
    const vec value = load_first(x + i, n);
    return value * value;
  }) / (float)size;
  const float scale = 1.0f / root(mean + epsilon);
  each(size, y, [&](int64_t i, int n) {
    return load_first(x + i, n) * scale * load_first(weight + i, n);
  });
}

void swiglu(const float* gate, const float* up, int64_t size, float* y) {
  each(size, y, [&](int64_t i, int n) {
    const vec g = load_first(gate + i, n);
    return g / (1.0f + exponential(-g)) * load_first(up + i, n);
  });
}

void rotate(const float* x, const int32_t* partner, const float* cosine, const float* sine,
            int64_t first, int64_t count, float factor, float* y) {
  each(count, y, [&](int64_t i, int n) {
    const vec partners = load_at(x, partner, first + i, n);
    const vec own = load_first(x + first + i, n) * load_first(cosine + i, n);
    return multiply_add(partners, load_first(sine + i, n), own) * factor;
  });
}

int64_t argmax(const float* x, int64_t size) {
  float best = x[0];
  int64_t index = 0;
  // Skips groups without a larger element.
  constexpr int GROUP = 8 * WIDTH;
  int64_t i = 0;
  for (; i + GROUP <= size; i += GROUP) {
    ivec found{};
    for (int v = 0; v < 8; ++v) found |= (ivec)(load(x + i + v * WIDTH) > broadcast(best));
    int any = 0;
    for (int lane = 0; lane < WIDTH; ++lane) any |= found[lane];
    if (any)
      for (int64_t j = i; j < i + GROUP; ++j)
        if (x[j] > best) best = x[j], index = j;
  }
  for (; i < size; ++i)
    if (x[i] > best) best = x[i], index = i;
  return index;
}

bool all_finite(const float* x, int64_t size) {
  // x * 0 is 0 if x is finite, and NaN otherwise.
  return reduce(size, [&](int64_t i, int n) { return load_first(x + i, n) * 0.0f; }) == 0.0f;
}

}  // namespace
