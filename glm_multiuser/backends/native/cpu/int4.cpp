// Quantises weights to 4 bits in groups of 32, each with a scale and a minimum: GGUF's Q4_1 and Q4_K.
// Called from Python.
#include "quantising.hpp"

namespace {

constexpr int GROUP = 32, LARGEST = 15;
using Int4 = Quantiser<GROUP, 0, LARGEST>;

// Per block of Q4_K.
constexpr int GROUPS = 8, LARGEST_SCALE = 63;

// Candidate fractions of a group's range: clipping its ends makes steps finer.
constexpr float RANGES[] = {1.05f, 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};

// The scale of a smaller range would be 0 in float16.
constexpr float SMALLEST = 0x1p-25f * LARGEST;

// A weight is q * scale + minimum.
struct Choice {
  uint16_t scale, minimum;
  double error = 0;
};

// Rounds scale and minimum to float16.
Choice choice(const float* x, float scale, float minimum) {
  Choice made{to_f16(scale), to_f16(minimum)};
  made.error = Int4::squared_error(x, from_f16(made.scale), from_f16(made.minimum));
  return made;
}

// The least-squares scale and minimum, which is at most `highest`, for the quants that result from the
// given ones.
Choice refitted(const float* x, float scale, float minimum, float highest) {
  const auto [q, value, qq, qx] = Int4::sums(x, scale, minimum);
  const double variance = GROUP * qq - q * q, covariance = GROUP * qx - q * value;
  double fitted = variance > 0 && covariance > 0 ? covariance / variance : 0;
  double offset = (value - fitted * q) / GROUP;
  if (offset > highest) {
    offset = highest;
    fitted = qq > 0 ? std::max(0.0, (qx - offset * q) / qq) : 0;
  }
  return choice(x, (float)fitted, (float)offset);
}

Choice best_choice(const float* x, float highest) {
  const auto [least, most] = std::minmax_element(x, x + GROUP);
  const float low = std::min(*least, highest);
  const float range = *most - low, middle = low + range / 2;
  if (range < SMALLEST) return choice(x, 0, std::min(middle, highest));
  // The full range comes first: it reproduces weights that were already quantised to this type.
  Choice best = choice(x, range / LARGEST, low);
  for (const float part : RANGES) {
    const float minimum = std::min(middle - range * part / 2, highest);
    const Choice found = refitted(x, range * part / LARGEST, minimum, highest);
    if (found.error < best.error) best = found;
  }
  return best;
}

// Quantises `count` values to nibbles: the first half of them to the lower ones, the others to the upper
// ones.
void write_quants(const float* x, float scale, float minimum, float scale_of_second,
                  float minimum_of_second, int count, uint8_t* bytes) {
  const float inverse = inverse_of(scale), inverse_of_second = inverse_of(scale_of_second);
  for (int i = 0; i < count / 2; i += WIDTH) {
    const vec low = Int4::quantise(x + i, inverse, minimum);
    const vec high = Int4::quantise(x + count / 2 + i, inverse_of_second, minimum_of_second);
    for (int lane = 0; lane < WIDTH; ++lane)
      bytes[i + lane] = (uint8_t)((int)low[lane] | (int)high[lane] << 4);
  }
}

// x [32] -> one Q4_1 block.
bool quantise_q4_1(const float* x, uint8_t* block) {
  const Choice best = best_choice(x, INFINITY);
  const float scale = from_f16(best.scale), minimum = from_f16(best.minimum);
  std::memcpy(block, &best.scale, 2);
  std::memcpy(block + 2, &best.minimum, 2);
  write_quants(x, scale, minimum, scale, minimum, GROUP, block + 4);
  return are_finite(x, GROUP) && is_finite(best.scale) && is_finite(best.minimum);
}

// Quantised scale and minimum of a group of Q4_K, as multiples of the block's d and dmin.
struct Multiples {
  int scale, minimum;
};

// The multiples near `wanted` with the least squared error.
Multiples multiples_near(const float* x, const Choice& wanted, float d, float dmin) {
  const float inverse = inverse_of(d), inverse_minimum = inverse_of(dmin);
  const auto minimum_near = [&](double value) {
    return nearest((float)-value * inverse_minimum, 0, LARGEST_SCALE);
  };
  const int scale = nearest(from_f16(wanted.scale) * inverse, 0, LARGEST_SCALE);
  const int minimum = minimum_near(from_f16(wanted.minimum));
  Multiples best{scale, minimum};
  double least = Int4::squared_error(x, d * scale, -dmin * minimum);
  for (int tried = std::max(scale - 1, 0); tried <= std::min(scale + 1, LARGEST_SCALE); ++tried) {
    const auto sums = Int4::sums(x, d * tried, -dmin * minimum);
    const int fitted = minimum_near((sums.x - d * tried * sums.q) / GROUP);
    const double error = Int4::squared_error(x, d * tried, -dmin * fitted);
    if (error < least) best = {tried, fitted}, least = error;
  }
  return best;
}

// x [256] -> one Q4_K block.
bool quantise_q4_k(const float* x, uint8_t* block) {
  Choice wanted[GROUPS];
  float largest = 0, lowest = 0;
  for (int i = 0; i < GROUPS; ++i) {
    wanted[i] = best_choice(x + i * GROUP, 0);
    largest = std::max(largest, from_f16(wanted[i].scale));
    lowest = std::min(lowest, from_f16(wanted[i].minimum));
  }
  const uint16_t heads[] = {to_f16(largest / LARGEST_SCALE), to_f16(-lowest / LARGEST_SCALE)};
  const float d = from_f16(heads[0]), dmin = from_f16(heads[1]);
  std::memcpy(block, heads, sizeof heads);
  uint8_t* six_bits = block + 4;
  Multiples groups[GROUPS];
  for (int i = 0; i < GROUPS; ++i) {
    groups[i] = multiples_near(x + i * GROUP, wanted[i], d, dmin);
    const auto [scale, minimum] = groups[i];
    if (i < 4) {
      six_bits[i] = (uint8_t)scale;
      six_bits[i + 4] = (uint8_t)minimum;
    } else {
      six_bits[i + 4] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
      six_bits[i - 4] |= (uint8_t)(scale >> 4 << 6);
      six_bits[i] |= (uint8_t)(minimum >> 4 << 6);
    }
  }
  for (int i = 0; i < GROUPS; i += 2) {
    const auto first = groups[i], second = groups[i + 1];
    write_quants(x + i * GROUP, d * first.scale, -dmin * first.minimum, d * second.scale,
                 -dmin * second.minimum, 2 * GROUP, block + 16 + i * GROUP / 2);
  }
  return are_finite(x, GROUPS * GROUP) && is_finite(heads[0]) && is_finite(heads[1]);
}

}  // namespace

// x [blocks, 32] -> blocks [blocks, 20]. Returns 1 if all weights are finite and within the range of the
// type, and otherwise 0.
extern "C" int glm_quantise_q4_1(const float* x, int64_t count, uint8_t* blocks) {
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= quantise_q4_1(x + i * GROUP, blocks + i * 20);
  return good;
}

// The same, x [blocks, 256] -> blocks [blocks, 144].
extern "C" int glm_quantise_q4_k(const float* x, int64_t count, uint8_t* blocks) {
  constexpr int INPUTS = GROUPS * GROUP;
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= quantise_q4_k(x + i * INPUTS, blocks + i * 144);
  return good;
}
