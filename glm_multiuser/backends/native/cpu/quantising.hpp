// Values of a group as whole numbers times a scale, and for some types plus a minimum.
//
// What includes it is compiled once, without a level's instructions: the same weights on all of a
// processor's levels.
#pragma once

#include <algorithm>
#include <cmath>

#include "half.hpp"
#include "vector.hpp"

namespace {

inline float inverse_of(float scale) { return scale != 0 ? 1 / scale : 0; }

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Whether all of them are finite.
inline bool are_finite(const float* x, int count) {
  float wrong = 0;
  for (int i = 0; i < count; ++i) wrong += x[i] * 0;
  return wrong == 0;
}

// The whole number that is nearest, of those from `least` to `most`; `least` for a NaN.
inline int nearest(float x, int least, int most) {
  return x > (float)least ? (int)std::nearbyint(std::min(x, (float)most)) : least;
}

// Numbers from LEAST to MOST for the values of a group of COUNT.
template <int COUNT, int LEAST, int MOST>
struct Numbers {
  // Sums over a group, of numbers q and values x.
  struct Sums {
    double q = 0, x = 0, qq = 0, qx = 0;
  };

  // Those that are nearest to WIDTH values, where q stands for q / inverse + minimum.
  static vec of(const float* x, float inverse, float minimum) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vec least = all(LEAST), most = all(MOST);
    vec q = (load(x) - minimum) * inverse;
    q = q < least ? least : q;
    q = q > most ? most : q;
    return (q + shift) - shift;
  }

  static double squared_error(const float* x, float scale, float minimum) {
    vec squares{};
    for (int i = 0; i < COUNT; i += WIDTH) {
      const vec error = load(x + i) - (of(x + i, inverse_of(scale), minimum) * scale + minimum);
      squares += error * error;
    }
    return sum(squares);
  }

  static Sums sums(const float* x, float scale, float minimum) {
    vec q{}, values{}, qq{}, qx{};
    for (int i = 0; i < COUNT; i += WIDTH) {
      const vec number = of(x + i, inverse_of(scale), minimum), value = load(x + i);
      q += number;
      values += value;
      qq += number * number;
      qx += number * value;
    }
    return {sum(q), sum(values), sum(qq), sum(qx)};
  }
};

}  // namespace
