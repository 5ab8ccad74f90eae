// Scalar conversions of bf16 and f16. In an unnamed namespace, as everything that levels include.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

// Rounds to nearest, ties to even; keeps NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The same to f16; values beyond its range become infinite.
inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (size < 0x38800000) {
    // Adding 0.5 rounds to multiples of 2^-24, which are the subnormal numbers.
    uint32_t sum;
    const float shifted = float_of(size) + 0.5f;
    std::memcpy(&sum, &shifted, sizeof sum);
    return (uint16_t)(sign | (sum - 0x3f000000));
  }
  const uint32_t rounded = size - (112u << 23) + 0xfff + (size >> 13 & 1);
  return (uint16_t)(sign | (rounded >= 0x7c00u << 13 ? 0x7c00 : rounded >> 13));
}

// Exact. No intermediate value is a subnormal float32, so it does not matter whether these are flushed.
inline float from_f16(uint16_t bits) {
  const int32_t size = bits & 0x7fff;
  const uint32_t exponents = size < 0x7c00 ? 127 - 15 : 255 - 31;  // the largest is infinity's
  const float normal = float_of(((uint32_t)size << 13) + (exponents << 23));
  const float x = size < 0x400 ? (float)size * 0x1p-24f : normal;
  return bits & 0x8000 ? -x : x;
}

}  // namespace
