// Stores the sums of a tile product as results, or as packed inputs of the next product.
#pragma once

#include "epilogue.hpp"
#include "int8_inputs.hpp"
#include "tile_rows.hpp"

namespace {

// Sums of one row of a panel, in column order.
template <class P>
inline void sums_of_row(const LinearPanel& panel, const float* first, const float* second, vec* y) {
  constexpr int HALF = ALL_VECTORS / 2;
  const auto* scales = (const float*)panel.weight;
  for (int v = 0; v < HALF; ++v) {
    vec a = load(first + v * WIDTH), b = load(second + v * WIDTH);
    if (!P::as_stored) restore_column_order(a, b);
    y[P::as_stored ? v : 2 * v] = a;
    y[P::as_stored ? HALF + v : 2 * v + 1] = b;
  }
  for (int v = 0; v < ALL_VECTORS && !P::is_integer && P::scale_bytes > 0; ++v)
    y[v] *= load(scales + v * WIDTH);
}

// Sums of a block of rows and one panel: two tiles of the first 16 rows, and two of the others.
typedef float BlockOfSums[4][TILE_ROWS][TILE_ROW_BYTES / 4];

// A block of rows whose sums are complete. Its results are stored while the next block is multiplied, so
// that the matrix unit and the vector units work at the same time.
template <class P>
struct CompleteBlock {
  LinearPanel panel;
  RowsInTiles packed;  // used if `panel.packed` is set
  const BlockOfSums* sums = nullptr;
  int64_t row = 0;  // the first
  int rows = 0, done = 0;

  explicit CompleteBlock(const LinearPanel& panel) : panel(panel), packed(panel.packed) {}

  void finish(int count) {
    const int end = done + count < rows ? done + count : rows;
    for (; done < end; ++done) finish_row(done);
  }

  void finish_row(int m) {
    const int tile = m / TILE_ROWS * 2;
    vec y[ALL_VECTORS];
    sums_of_row<P>(panel, (*sums)[tile][m % TILE_ROWS], (*sums)[tile + 1][m % TILE_ROWS], y);
    if constexpr (P::is_integer) {
      finish_int8_row<ALL_VECTORS>(panel, row + m, 0, y);
    } else if (panel.packed.rows != nullptr) {
      char* to = packed.at(row + m, panel.column);
      for (int v = 0; v < ALL_VECTORS; ++v) packed.store(result(v * WIDTH, y[v]), to, v * WIDTH);
    } else {
      for (int v = 0; v < ALL_VECTORS; ++v) store_result(panel, row + m, v * WIDTH, y[v]);
    }
  }

  // Results of the columns starting at `first`, with zeros past the last.
  vec result(int first, vec y) const {
    const int left = panel.columns - first, count = left < 0 ? 0 : left < WIDTH ? left : WIDTH;
    y = apply_epilogue(y + load_first(panel.bias + first, count), panel, nullptr, count);
    return count == WIDTH ? y : first_lanes(count, y, vec{});
  }
};

}  // namespace
