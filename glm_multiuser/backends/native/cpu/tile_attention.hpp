// Attention over bfloat16 caches on tiles: scores and contexts are tile products, with a vectorised softmax
// in between. Rows are processed in tiles of 16, and each goes through the same instructions in the same
// order for any number of rows. Values that a row does not see get weight 0, and are skipped unless finite.
#pragma once

#include "attention.hpp"
#include "few_rows.hpp"
#include "tile_cache.hpp"
#include "query_rows.hpp"
#include "tiles.hpp"

namespace {

// A tiles of rows times C tiles of columns -> sums [rows, columns], added to the existing ones if `adds`.
template <int A, int C>
inline void multiply_some(const uint16_t* rows, int64_t row_bytes, const char* columns,
                          int64_t column_bytes, int steps, float* sums, int64_t sum_bytes,
                          bool adds) {
  static_assert((A == 1 && C == 4) || ((A == 1 || A == 2) && C == 2));
  const char *x = (const char*)rows, *next = x + TILE_ROWS * row_bytes;
  char *y = (char*)sums, *below = y + TILE_ROWS * sum_bytes;
  char* third = A == 2 ? below : y + 2 * TILE_ROW_BYTES;
  if (adds) {
    TILE_LOAD(0, y, sum_bytes);
    TILE_LOAD(1, y + TILE_ROW_BYTES, sum_bytes);
    if constexpr (A * C == 4) {
      TILE_LOAD(2, third, sum_bytes);
      TILE_LOAD(3, third + TILE_ROW_BYTES, sum_bytes);
    }
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (A * C == 4) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  }
  for (int step = 0; step < steps; ++step) {
    const char* w = columns + step * TILE_BYTES;
    TILE_LOAD(4, x + step * TILE_ROW_BYTES, row_bytes);
    TILE_LOAD(6, w, TILE_ROW_BYTES);
    TILE_BF16(0, 4, 6);
    TILE_LOAD(7, w + column_bytes, TILE_ROW_BYTES);
    TILE_BF16(1, 4, 7);
    if constexpr (A == 2) {
      TILE_LOAD(5, next + step * TILE_ROW_BYTES, row_bytes);
      TILE_BF16(2, 5, 6);
      TILE_BF16(3, 5, 7);
    }
    if constexpr (C == 4) {
      TILE_LOAD(6, w + 2 * column_bytes, TILE_ROW_BYTES);
      TILE_BF16(2, 4, 6);
      TILE_LOAD(7, w + 3 * column_bytes, TILE_ROW_BYTES);
      TILE_BF16(3, 4, 7);
    }
  }
  TILE_STORE(0, y, sum_bytes);
  TILE_STORE(1, y + TILE_ROW_BYTES, sum_bytes);
  if constexpr (A * C == 4) {
    TILE_STORE(2, third, sum_bytes);
    TILE_STORE(3, third + TILE_ROW_BYTES, sum_bytes);
  }
}

// The same for an even number of tiles of columns.
template <int A>
inline void multiply_all(const uint16_t* rows, int64_t row_bytes, const char* columns,
                         int64_t column_bytes, int tiles, int steps, float* sums,
                         int64_t sum_bytes, bool adds) {
  int tile = 0;
  if constexpr (A == 1)
    for (; tile + 4 <= tiles; tile += 4)
      multiply_some<1, 4>(rows, row_bytes, columns + tile * column_bytes, column_bytes, steps,
                          sums + tile * COLUMNS, sum_bytes, adds);
  for (; tile < tiles; tile += 2)
    multiply_some<A, 2>(rows, row_bytes, columns + tile * column_bytes, column_bytes, steps,
                        sums + tile * COLUMNS, sum_bytes, adds);
}

// Keys and values of a block, as tiles.
struct TiledBlock {
  const uint16_t* unpaired;  // the values in the cache
  char *keys, *values;
  bool finite;  // whether all values that only some of the rows see are finite
};

// A tiles of rows, starting at `first`, and one block of positions.
template <int A>
void take_block(QueryRows& rows, int first, const TiledBlock& block) {
  const int64_t steps = rows.padded / STEP, padded = rows.padded;
  const int last = first + A * TILE_ROWS < rows.a.count ? first + A * TILE_ROWS : rows.a.count;
  const int seen = rows.most(first, last), filled = (int)round_up(seen, STEP);
  if (seen == 0) return;
  // All rows reuse the same memory for scores, so that it stays in L1.
  constexpr int64_t ROW_BYTES = KEYS * sizeof(float);
  const auto* weights = (const uint16_t*)rows.scores;
  {
    [[maybe_unused]] const UseTiles<> tiles;
    multiply_all<A>(rows.queries + first * padded, padded * 2, block.keys, steps * TILE_BYTES,
                    filled / COLUMNS, (int)steps, rows.scores, ROW_BYTES, false);
  }
  rows.weigh(first, last, filled, rows.scores);
  [[maybe_unused]] const UseTiles<> tiles;
  constexpr int64_t OF_TILE = KEYS / STEP * TILE_BYTES;
  if (block.finite) {
    multiply_all<A>(weights, ROW_BYTES, block.values, OF_TILE,
                    (int)(2 * steps), filled / STEP, rows.contexts + first * padded, padded * 4,
                    true);
    return;
  }
  for (int row = first; row < last; ++row) {
    // Only the values that it sees; the stride of 0 makes it all rows of a tile.
    pair_values(block.unpaired, rows.counts[row], rows.a.head_dim, block.values);
    multiply_all<1>(weights + (row - first) * WEIGHTS, 0, block.values, OF_TILE, (int)(2 * steps),
                    (int)steps_of(rows.counts[row]), rows.contexts + row * padded, 0, true);
  }
}

void attend_on_tiles(const Attention& a) {
  QueryRows rows(a);
  const int64_t block_bytes = KEYS * rows.padded * sizeof(uint16_t);
  for (int64_t begin = 0; rows.see(begin); begin += KEYS) {
    const auto* keys = (const uint16_t*)a.keys + begin * a.head_dim;
    const auto* values = (const uint16_t*)a.values + begin * a.head_dim;
    const int least = rows.least(0, a.count), most = rows.most(0, a.count);
    const bool finite = finite_values(values + least * a.head_dim, (most - least) * a.head_dim);
    const TiledBlock block{values, rows.rest, rows.rest + block_bytes, finite};
    pair_keys(keys, most, a.head_dim, (const char*)values, block.keys);
    if (finite) pair_values(values, most, a.head_dim, block.values);
    for (int row = 0; row < a.count; row += 2 * TILE_ROWS) {
      if (a.count - row > TILE_ROWS) {
        take_block<2>(rows, row, block);
      } else {
        take_block<1>(rows, row, block);
      }
    }
  }
  rows.finish<true>();
}

// As many as possible: keys and values of a block are converted to tiles once for all of them.
int tile_query_rows(glm::Cache kind) {
  return kind == glm::Cache::bfloat16 ? glm::ROWS : query_rows(kind);
}

void tile_attend(glm::Cache kind, const Attention& a) {
  if (kind != glm::Cache::bfloat16) return attend(kind, a);
  if (a.count <= FEW_QUERIES) return attend_few_rows(a);
  attend_on_tiles(a);
}

}  // namespace
