// Quantises the weights of a group to integers, times a scale, and for some types plus a minimum.
//
// Compiled once, without the instructions of a level, so that all levels get the same weights.
#pragma once

#include <algorithm>
#include <cmath>

#include "half.hpp"
#include "vector.hpp"

namespace {

inline float inverse_of(float scale) { return scale != 0 ? 1 / scale : 0; }

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Whether all values are finite.
inline bool are_finite(const float* x, int count) {
  float wrong = 0;
  for (int i = 0; i < count; ++i) wrong += x[i] * 0;
  return wrong == 0;
}

// Rounds to the nearest integer from `least` to `most`; NaN becomes `least`.
inline int nearest(float x, int least, int most) {
  return x > (float)least ? (int)std::nearbyint(std::min(x, (float)most)) : least;
}

// Quantises groups of COUNT values to integers from LEAST to MOST.
template <int COUNT, int LEAST, int MOST>
struct Quantiser {
  // Sums over a group of quants q and values x.
  struct Sums {
    double q = 0, x = 0, qq = 0, qx = 0;
  };

  // The nearest quants of WIDTH values, where q represents q / inverse + minimum.
  static vec quantise(const float* x, float inverse, float minimum) {
    const vec shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vec least = broadcast(LEAST), most = broadcast(MOST);
    vec q = (load(x) - minimum) * inverse;
    q = q < least ? least : q;
    q = q > most ? most : q;
    return (q + shift) - shift;
  }

  static double squared_error(const float* x, float scale, float minimum) {
    vec squares{};
    for (int i = 0; i < COUNT; i += WIDTH) {
      const vec error = load(x + i) - (quantise(x + i, inverse_of(scale), minimum) * scale + minimum);
      squares += error * error;
    }
    return sum(squares);
  }

  static Sums sums(const float* x, float scale, float minimum) {
    vec q{}, values{}, qq{}, qx{};
    for (int i = 0; i < COUNT; i += WIDTH) {
      const vec quants = quantise(x + i, inverse_of(scale), minimum), value = load(x + i);
      q += quants;
      values += value;
      qq += quants * quants;
      qx += quants * value;
    }
    return {sum(q), sum(values), sum(qq), sum(qx)};
  }
};

}  // namespace
