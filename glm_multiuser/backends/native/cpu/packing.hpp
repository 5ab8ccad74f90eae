// Packs row-major weights of a checkpoint into panels (packing.py).
#pragma once

#include <algorithm>
#include <cmath>

#include "half.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

// Inputs that are converted at a time: those of a panel fit into L1. Must be even.
constexpr int64_t CHUNK = 128;

// Whether all values are finite, which means that no exponent is all ones.
template <class Bits>
bool finite(const Bits* values, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) found |= (Bits)((values[i] & exponent) == exponent);
  return found == 0;
}

bool finite(glm::Weight kind, const void* values, int64_t count) {
  if (kind == glm::Weight::float32) return finite((const uint32_t*)values, count, 0x7f800000u);
  const uint16_t exponent = kind == glm::Weight::float16 ? 0x7c00 : 0x7f80;
  return finite((const uint16_t*)values, count, exponent);
}

int64_t size_of(glm::Weight kind) {
  if (kind == glm::Weight::int8) return 1;
  return kind == glm::Weight::float32 ? 4 : 2;
}

void widen(glm::Weight kind, const void* from, int64_t count, float* to) {
  const auto* halves = (const uint16_t*)from;
  if (kind == glm::Weight::float32) {
    std::memcpy(to, from, sizeof(float) * count);
  } else if (kind == glm::Weight::bfloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_bf16(halves[i]);
  } else {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(to + i, load_f16(halves + i));
    for (; i < count; ++i) to[i] = from_f16(halves[i]);
  }
}

float largest(glm::Weight kind, const char* row, int64_t depth) {
  float values[CHUNK], found = 0;
  for (int64_t first = 0; first < depth; first += CHUNK) {
    const int64_t count = std::min(CHUNK, depth - first);
    widen(kind, row + first * size_of(kind), count, values);
    for (int64_t i = 0; i < count; ++i) found = std::max(found, std::fabs(values[i]));
  }
  return found;
}

void round_to(glm::Weight kind, const float* from, int64_t count, float scale, void* to) {
  auto* halves = (uint16_t*)to;
  if (kind == glm::Weight::float32) {
    std::memcpy(to, from, sizeof(float) * count);
  } else if (kind == glm::Weight::bfloat16) {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bf16(from[i]);
  } else if (kind == glm::Weight::float16) {
    for (int64_t i = 0; i < count; ++i) halves[i] = to_f16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      // A subnormal scale is imprecise, so the largest quotient may exceed 127.
      const float quotient = std::nearbyint(from[i] / scale);
      ((int8_t*)to)[i] = (int8_t)std::max(-127.0f, std::min(127.0f, quotient));
    }
  }
}

// [PANEL, stride] -> [count, PANEL]
template <class T>
void transpose(const T* rows, int64_t stride, int64_t count, T* to) {
  for (int64_t k = 0; k < count; ++k)
    for (int c = 0; c < PANEL; ++c) to[k * PANEL + c] = rows[c * stride + k];
}

// Packs `count` rows of `depth` weights of type `from` into one panel of type `to`. Returns whether all
// weights are finite, before and after conversion.
bool pack_panel(glm::Weight from, glm::Weight to, const char* rows, int count, int64_t depth,
                char* panel) {
  const int64_t row_bytes = depth * size_of(from), size = size_of(to);
  const bool pairs = to == glm::Weight::bfloat16 || to == glm::Weight::int8;
  // Padded by a cache line, because rows a power of two apart would evict each other.
  alignas(64) char tile[PANEL][CHUNK * 4 + 64];
  constexpr int64_t STRIDE = sizeof tile[0];
  std::memset(tile, 0, sizeof tile);
  float scales[PANEL] = {}, values[CHUNK];
  bool good = true;
  if (to == glm::Weight::int8) {
    for (int c = 0; c < PANEL; ++c) {
      const float most = c < count ? largest(from, rows + c * row_bytes, depth) : 0;
      scales[c] = most / 127;
      if (scales[c] == 0) scales[c] = 1;
    }
    std::memcpy(panel, scales, sizeof scales);
    panel += sizeof scales;
  }
  for (int64_t first = 0; first < depth; first += CHUNK) {
    const int64_t length = std::min(CHUNK, depth - first), whole = length + (pairs && length % 2);
    for (int c = 0; c < count; ++c) {
      const char* row = rows + c * row_bytes + first * size_of(from);
      if (from == to) {
        std::memcpy(tile[c], row, length * size);
      } else {
        widen(from, row, length, values);
        good = good && finite(glm::Weight::float32, values, length);
        round_to(to, values, length, scales[c], tile[c]);
      }
      std::memset(tile[c] + length * size, 0, (whole - length) * size);
      good = good && (to == glm::Weight::int8 || finite(to, tile[c], length));
    }
    const int64_t columns = pairs ? whole / 2 : length;
    if (pairs ? size == 2 : size == 4) {
      transpose((const uint32_t*)tile, STRIDE / 4, columns, (uint32_t*)panel);
    } else {
      transpose((const uint16_t*)tile, STRIDE / 2, columns, (uint16_t*)panel);
    }
    panel += whole * size * PANEL;
  }
  return good;
}

}  // namespace
