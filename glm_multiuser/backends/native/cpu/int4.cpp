// Quantising weights to groups of 32 with 4 bits, each with a scale and a minimum, for Python: blocks
// of GGUF's Q4_1.
//
// It is compiled once, without a level's instructions: the same weights on all of a processor's
// levels.
#include <algorithm>

#include "half.hpp"
#include "vector.hpp"

namespace {

constexpr int GROUP = 32, LARGEST = 15;

// Fractions of a group's range that are tried: what is cut off at its ends makes steps finer.
constexpr float RANGES[] = {1.05f, 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};

// A range that is smaller has no step: a float16 has no scale for it.
constexpr float SMALLEST = 0x1p-25f * LARGEST;

// A value is q * scale + minimum.
struct Choice {
  uint16_t scale, minimum;
  double error = 0;
};

// The numbers that are nearest to WIDTH values.
vec numbers_of(const float* x, float inverse, float minimum) {
  const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vec least{}, most = all(LARGEST);
  vec q = (load(x) - minimum) * inverse;
  q = q < least ? least : q;
  q = q > most ? most : q;
  return (q + shift) - shift;
}

float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }

// As float16 keeps them.
Choice choice(const float* x, float scale, float minimum) {
  Choice made{to_f16(scale), to_f16(minimum)};
  const float a = from_f16(made.scale), b = from_f16(made.minimum);
  vec squares{};
  for (int i = 0; i < GROUP; i += WIDTH) {
    const vec error = load(x + i) - (numbers_of(x + i, inverse_of(a), b) * a + b);
    squares += error * error;
  }
  made.error = sum(squares);
  return made;
}

// The scale and the minimum with the least squared error for the numbers that these ones give.
Choice refitted(const float* x, float scale, float minimum) {
  vec numbers{}, values{}, squares{}, products{};
  for (int i = 0; i < GROUP; i += WIDTH) {
    const vec q = numbers_of(x + i, inverse_of(scale), minimum), value = load(x + i);
    numbers += q;
    values += value;
    squares += q * q;
    products += q * value;
  }
  const double q = sum(numbers), value = sum(values);
  const double variance = GROUP * (double)sum(squares) - q * q;
  const double covariance = GROUP * (double)sum(products) - q * value;
  const double fitted = variance > 0 && covariance > 0 ? covariance / variance : 0;
  return choice(x, (float)fitted, (float)((value - fitted * q) / GROUP));
}

Choice best_choice(const float* x) {
  const auto [low, high] = std::minmax_element(x, x + GROUP);
  const float range = *high - *low, middle = *low + range / 2;
  if (range < SMALLEST) return choice(x, 0, middle);
  // First what brings numbers back that were of this type already.
  Choice best = choice(x, range / LARGEST, *low);
  for (const float part : RANGES) {
    const Choice found = refitted(x, range * part / LARGEST, middle - range * part / 2);
    if (found.error < best.error) best = found;
  }
  return best;
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

}  // namespace

// x [groups, 32] -> blocks [groups, 20]. Returns 1 if all numbers are finite and within the range of
// the type, or else 0.
extern "C" int glm_quantise_int4(const float* x, int64_t groups, uint8_t* blocks) {
  bool good = true;
  for (int64_t number = 0; number < groups; ++number, x += GROUP) {
    float wrong = 0;
    for (int i = 0; i < GROUP; ++i) wrong += x[i] * 0;
    const Choice best = best_choice(x);
    good = good && wrong == 0 && is_finite(best.scale) && is_finite(best.minimum);
    std::memcpy(blocks, &best.scale, 2);
    std::memcpy(blocks + 2, &best.minimum, 2);
    const float inverse = inverse_of(from_f16(best.scale)), minimum = from_f16(best.minimum);
    for (int i = 0; i < GROUP / 2; i += WIDTH) {
      const vec low = numbers_of(x + i, inverse, minimum);
      const vec high = numbers_of(x + GROUP / 2 + i, inverse, minimum);
      for (int lane = 0; lane < WIDTH; ++lane)
        blocks[4 + i + lane] = (uint8_t)((int)low[lane] | (int)high[lane] << 4);
    }
    blocks += 4 + GROUP / 2;
  }
  return good;
}
