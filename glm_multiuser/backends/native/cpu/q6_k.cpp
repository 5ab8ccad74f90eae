// Quantises weights to 6 bits in groups of 16, each with a scale: GGUF's Q6_K. Called from Python.
#include "quantising.hpp"

namespace {

constexpr int GROUP = 16, GROUPS = 16, LEAST = -32, LEAST_SCALE = -128;
using Int6 = Quantiser<GROUP, LEAST, -LEAST - 1>;

// Candidate fractions of the largest magnitude that the lowest quant represents.
constexpr float RANGES[] = {1.03f, 1.0f, 0.97f, 0.94f, 0.91f};

float largest_magnitude(const float* x, int count) {
  return *std::max_element(x, x + count,
                           [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

// The scale, which may be negative, with the least squared error. The largest magnitude maps to the lowest
// quant, because there is one more quant below zero than above.
float best_scale(const float* x) {
  const float largest = largest_magnitude(x, GROUP);
  float best = largest / LEAST;
  double least = Int6::squared_error(x, best, 0);
  for (const float part : RANGES) {
    const auto sums = Int6::sums(x, largest * part / LEAST, 0);
    const auto fitted = (float)(sums.qq > 0 ? sums.qx / sums.qq : 0);
    const double error = Int6::squared_error(x, fitted, 0);
    if (error < least) best = fitted, least = error;
  }
  return best;
}

// The multiple of d near `wanted` with the least squared error.
int multiple_near(const float* x, float wanted, float d) {
  const int near = nearest(wanted * inverse_of(d), LEAST_SCALE, -LEAST_SCALE - 1);
  int best = near;
  double least = Int6::squared_error(x, d * near, 0);
  for (int tried = std::max(near - 1, LEAST_SCALE);
       tried <= std::min(near + 1, -LEAST_SCALE - 1); ++tried) {
    const double error = Int6::squared_error(x, d * tried, 0);
    if (error < least) best = tried, least = error;
  }
  return best;
}

// x [256] -> one block: 128 bytes of lower nibbles, 64 of upper bits, the scales, and their scale d.
bool quantise(const float* x, uint8_t* block) {
  float wanted[GROUPS];
  for (int i = 0; i < GROUPS; ++i) wanted[i] = best_scale(x + i * GROUP);
  const uint16_t head = to_f16(largest_magnitude(wanted, GROUPS) / LEAST_SCALE);
  const float d = from_f16(head);
  std::memcpy(block + 208, &head, 2);
  uint8_t quants[GROUPS * GROUP];
  for (int i = 0; i < GROUPS; ++i) {
    const float* group = x + i * GROUP;
    const int scale = multiple_near(group, wanted[i], d);
    block[192 + i] = (uint8_t)scale;
    for (int j = 0; j < GROUP; j += WIDTH) {
      const vec q = Int6::quantise(group + j, inverse_of(d * scale), 0) - LEAST;
      for (int lane = 0; lane < WIDTH; ++lane) quants[i * GROUP + j + lane] = (uint8_t)q[lane];
    }
  }
  for (int half = 0; half < 2; ++half) {
    const uint8_t* q = quants + 128 * half;
    for (int i = 0; i < 64; ++i)
      block[64 * half + i] = (uint8_t)((q[i] & 15) | (q[64 + i] & 15) << 4);
    for (int i = 0; i < 32; ++i)
      block[128 + 32 * half + i] = (uint8_t)(q[i] >> 4 | q[32 + i] >> 4 << 2 | q[64 + i] >> 4 << 4 |
                                             q[96 + i] >> 4 << 6);
  }
  return are_finite(x, GROUPS * GROUP) && is_finite(head);
}

}  // namespace

// x [blocks, 256] -> blocks [blocks, 210]. Returns 1 if all weights are finite and within the range of the
// type, and otherwise 0.
extern "C" int glm_quantise_q6_k(const float* x, int64_t count, uint8_t* blocks) {
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= quantise(x + i * 256, blocks + i * 210);
  return good;
}
