// Products go block by block of rows: how large a block is, and how memory is asked for meanwhile.
#pragma once

#include <type_traits>

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::PANEL;

// Rows and columns whose sums are kept in registers. Few rows leave room for a whole panel's.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 12, BLOCK_COLUMNS = 32, FEW_ROWS = 2;
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 6, BLOCK_COLUMNS = 16, FEW_ROWS = 2;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 16, FEW_ROWS = 1;
#endif
constexpr int VECTORS = BLOCK_COLUMNS / WIDTH;
constexpr int ALL_VECTORS = PANEL / WIDTH;
static_assert(FEW_ROWS < (BLOCK_ROWS + 1) / 2, "one of several blocks may have as few rows");

// work(rows), a constant from LEAST to R.
template <int R, int LEAST = 1, class Work>
void with_rows(int rows, Work work) {
  if constexpr (R >= LEAST) {
    if (rows == R) return work(std::integral_constant<int, R>());
    with_rows<R - 1, LEAST>(rows, work);
  }
}

// Calls work(share, shares, column, row, rows) for all blocks of at most `most` rows and so many columns of
// a panel, one part of its columns after the other. They are of about equal height: the last one should
// not be a low and slow one. Each is to ask for its share of what lies behind, and so all of their time is
// time for memory.
template <class Work>
inline INLINE void for_blocks(const glm::LinearPanel& panel, int64_t most, int columns, Work work) {
  const int64_t blocks = (panel.rows + most - 1) / most, shares = blocks * (PANEL / columns);
  for (int64_t share = 0; share < shares; ++share) {
    const int column = (int)(share / blocks) * columns;
    if (column >= panel.columns) break;
    const int64_t number = share % blocks, row = panel.rows * number / blocks;
    work(share, shares, column, row, (int)(panel.rows * (number + 1) / blocks - row));
  }
}

// Bytes of a panel that all rows take in together, before those behind them: they, and as many that are
// asked for meanwhile, stay in the second cache, which is larger with AVX-512. Sums wait in between: with
// many rows, which are not bound by memory, less often.
inline int64_t chunk_bytes(int64_t rows) {
  if (WIDTH == 16) return INT64_MAX;
  return rows <= 4 * BLOCK_ROWS ? 1 << 16 : 1 << 17;
}

// Sums that wait in memory, [M, V * WIDTH].
template <int M, int V>
inline INLINE void load_sums(const float* from, vec (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = load(from + (m * V + v) * WIDTH);
}

template <int M, int V>
inline INLINE void store_sums(float* to, const vec (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(to + (m * V + v) * WIDTH, sums[m][v]);
}

// How many bytes ahead of itself a block that is alone asks for memory, and into which cache: into the
// second more can be on its way at a time, but then it has to come from there into the first.
#if defined(__AMX_TILE__)
constexpr int64_t AHEAD = 16384;
constexpr int FOR_ONE_BLOCK = 2;
#else
constexpr int64_t AHEAD = 4096;
constexpr int FOR_ONE_BLOCK = 1;
#endif

// Few int8 rows are multiplied in so little time that memory is asked for further ahead; but at `avx2`
// (Zen 3) the processor sees by itself what they read next, and is best told of what is near.
constexpr bool FORESEES = WIDTH == 8;
constexpr int64_t NEAR = 1024;
constexpr int64_t AHEAD_OF_FEW_INT8_ROWS = FORESEES ? NEAR : AHEAD > 8192 ? AHEAD : 8192;

// Of this memory, into this cache.
template <int CACHE>
inline INLINE void ask_for_line(const void* from) {
  __builtin_prefetch(from, 0, CACHE == 1 ? 3 : 2);
}

// Memory that is wanted soon, and how much of it to ask for in each step. Where products and memory
// take about as long, as much as possible should be on its way, so it goes into the second cache.
struct Ahead {
  const char* from;
  int64_t step;
  bool second_cache;

  inline INLINE void ask(int64_t place) const {
    if (second_cache) return ask_for_line<2>(from + place);
    ask_for_line<FOR_ONE_BLOCK>(from + place);
  }
};

}  // namespace
