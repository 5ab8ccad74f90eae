// Converts keys and values of a bfloat16 cache to tiles: pairs along the dimension that is summed over.
// Positions that no row sees are not read, and become zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "instructions.hpp"
#include "level.hpp"
#include "tiles.hpp"

namespace {

inline int64_t steps_of(int64_t elements) { return (elements + STEP - 1) / STEP; }

// Interleaves two consecutive rows of up to 16 elements; without `second`, the first one and zeros.
inline INLINE ivec paired(const uint16_t* from, int count, bool second) {
  const __m512i indices = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                           8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const uint32_t there = (1u << count) - 1;
  const __m512i elements = _mm512_maskz_loadu_epi16(second ? there << 16 | there : there, from);
  return (ivec)_mm512_permutexvar_epi16(indices, elements);
}

// The same, stored to memory.
inline void pair_up(const uint16_t* from, int count, bool second, char* to) {
  const ivec pairs = paired(from, count, second);
  std::memcpy(to, &pairs, sizeof pairs);
}

// Keys of `count` positions, [tiles, head_dim, TILE] -> an even number of tiles of 16 positions, each in
// steps over head_dim. Prefetches the same number of bytes of `ahead`.
inline void pair_keys(const uint16_t* keys, int count, int64_t head_dim, const char* ahead,
                      char* to) {
  const int64_t steps = steps_of(head_dim);
  const int tiles = (count + 2 * glm::TILE - 1) / (2 * glm::TILE) * 2;
  for (int tile = 0; tile < tiles; ++tile, keys += head_dim * glm::TILE) {
    const int rest = count - tile * glm::TILE;
    const int there = rest < 0 ? 0 : rest < glm::TILE ? rest : glm::TILE;
    for (int64_t i = 0; i < head_dim; i += 2, to += TILE_ROW_BYTES, ahead += TILE_ROW_BYTES) {
      __builtin_prefetch(ahead, 0, 3);
      pair_up(keys + i * glm::TILE, there, i + 1 < head_dim, to);
    }
    const int64_t filled = (head_dim + 1) / 2 * TILE_ROW_BYTES;
    std::memset(to, 0, steps * TILE_BYTES - filled);
    to += steps * TILE_BYTES - filled;
  }
}

// The first `count` bf16 elements of a vector, followed by zeros.
inline ivec load_pairs(const uint16_t* from, int64_t count) {
  const uint32_t there = count >= STEP ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
  return (ivec)_mm512_maskz_loadu_epi16(there, from);
}

// Values of `count` positions, [positions, head_dim] -> two tiles for every 32 elements of a value, each in
// steps over the positions of a block. Columns are permuted; `restore_column_order` undoes it.
inline void pair_values(const uint16_t* values, int count, int64_t head_dim, char* to) {
  constexpr int64_t OF_TILE = glm::KEYS / STEP * TILE_BYTES;
  const int filled = (int)steps_of(count) * STEP;
  for (int at = 0; at < filled; at += 2, values += 2 * head_dim) {
    char* row = to + at / STEP * TILE_BYTES + at % STEP / 2 * TILE_ROW_BYTES;
    for (int64_t i = 0; i < head_dim; i += STEP, row += 2 * OF_TILE) {
      const int64_t left = head_dim - i;
      const ivec a = load_pairs(values + i, at < count ? left : 0);
      const ivec b = load_pairs(values + head_dim + i, at + 1 < count ? left : 0);
      const ivec low = unpack_low(a, b), high = unpack_high(a, b);
      std::memcpy(row, &low, sizeof low);
      std::memcpy(row + OF_TILE, &high, sizeof high);
    }
  }
}

// Whether all values are finite.
inline bool finite_values(const uint16_t* values, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = values[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7f80;
}

}  // namespace
