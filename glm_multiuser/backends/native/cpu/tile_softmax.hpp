// The streaming softmax between tile products.
#pragma once

#include "cache.hpp"
#include "tiles.hpp"
#include "vector.hpp"

namespace {

constexpr int COLUMNS = TILE_ROW_BYTES / 4;  // of a tile of sums
static_assert(COLUMNS == WIDTH, "a row of a tile of sums is a vector");

// 2^x for x <= 0, at least 2^-125; propagates NaN. The relative error of the polynomial, fitted by Lawson's
// algorithm, is at most 2.9e-6, far below the rounding of weights to bfloat16.
inline vec power_of_two(vec x) {
  x = larger(x, broadcast(-125.0f));
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const vec whole = (x + shift) - shift, r = x - whole;
  vec p = fused(broadcast(9.582852945e-03f), r, broadcast(5.590642616e-02f));
  p = fused(p, r, broadcast(2.402409911e-01f));
  p = fused(p, r, broadcast(6.931241751e-01f));
  p = fused(p, r, broadcast(1.0f));
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
}

// x * factor in bfloat16, zero-padded from `size` to `padded`, a multiple of STEP.
inline void round_row(const float* x, float factor, int64_t size, int64_t padded, uint16_t* to) {
  for (int64_t i = 0; i < padded; i += WIDTH) {
    const int64_t left = size - i;
    const vec value = left >= WIDTH ? load(x + i) : load_first(x + i, left < 0 ? 0 : (int)left);
    round_to_bf16(value * factor, to + i);
  }
}

// 2 * WIDTH adjacent weights.
struct Rounded {
  vec first, second;
};

// Rounds 2 * WIDTH weights to bfloat16, and returns the rounded values.
inline Rounded round_weights(const vec* weights, uint16_t* to) {
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
  _mm512_storeu_si512(to, both);
  return {of_bf16(_mm512_castsi512_si256(both)), of_bf16(_mm512_extracti64x4_epi64(both, 1))};
}

// State of a row after some blocks of positions.
struct Softmax {
  float largest = -__FLT_MAX__;  // score, base 2
  float total = 0.0f;            // of the rounded weights
};

// Updates the largest score of a row with its first `count` scores, base 2. Returns the factor by which
// earlier sums must be multiplied.
inline float raise_largest(const float* scores, int count, Softmax& row) {
  vec most = broadcast(row.largest);
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) most = larger(most, load(scores + i));
  if (i < count)
    most = larger(most, first_lanes(count - i, load(scores + i), broadcast(-__builtin_inff())));
  const float before = row.largest;
  row.largest = max_lane(most);
  return power_of_two(broadcast(before - row.largest))[0];
}

// Converts the first `count` scores of a row to weights 2^(score - largest) in bfloat16, zero-padded to
// `filled`; they may overwrite the scores. `factor` rescales the sum of earlier weights.
inline void weigh_row(const float* scores, int count, int filled, float factor, Softmax& row,
                      uint16_t* weights) {
  vec sums{};
  const auto weigh = [&](int i, auto visible) INLINE {
    vec each[2];
    for (int v = 0; v < 2; ++v)
      each[v] = visible(v, power_of_two(load(scores + i + v * WIDTH) - row.largest));
    const Rounded rounded = round_weights(each, weights + i);
    sums += rounded.first;
    sums += rounded.second;
  };
  int i = 0;
  for (; i + STEP <= count; i += STEP) weigh(i, [](int, vec weight) INLINE { return weight; });
  if (i < count) {
    weigh(i, [&](int v, vec weight) INLINE {
      return first_lanes(count - i - v * WIDTH, weight, vec{});
    });
    i += STEP;
  }
  for (; i < filled; i += STEP) std::memset(weights + i, 0, STEP * sizeof(uint16_t));
  row.total = __builtin_fmaf(row.total, factor, sum(sums));
}

}  // namespace
