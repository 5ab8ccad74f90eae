// Register blocking and prefetching of products.
#pragma once

#include <type_traits>

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::PANEL;

// Rows and columns whose sums are kept in registers. Up to FEW_ROWS rows leave room for a whole panel.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 12, BLOCK_COLUMNS = 32, FEW_ROWS = 2;
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 6, BLOCK_COLUMNS = 16, FEW_ROWS = 2;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 16, FEW_ROWS = 1;
#endif
constexpr int VECTORS = BLOCK_COLUMNS / WIDTH;
constexpr int ALL_VECTORS = PANEL / WIDTH;
static_assert(FEW_ROWS < (BLOCK_ROWS + 1) / 2, "one of several blocks must have more than FEW_ROWS rows");

// Levels that only processors by Intel use: AMD's with AVX-512 also have AVX512_BF16, and no tiles.
#if defined(__AVX512F__) && (!defined(__AVX512BF16__) || defined(__AMX_TILE__))
constexpr bool INTEL = true;
#else
constexpr bool INTEL = false;
#endif

// Calls work with `rows`, which is between LEAST and R, as a compile-time constant.
template <int R, int LEAST = 1, class Work>
void with_rows(int rows, Work work) {
  if constexpr (R >= LEAST) {
    if (rows == R) return work(std::integral_constant<int, R>());
    with_rows<R - 1, LEAST>(rows, work);
  }
}

// Calls work(index, count, column, row, rows) for all blocks of at most `most` rows and `columns` columns
// of a panel. Rows are divided evenly: a small last block would be inefficient. Each of the `count` blocks
// should prefetch its part of the next weights, which spreads memory traffic over the whole computation.
template <class Work>
inline INLINE void for_blocks(const glm::LinearPanel& panel, int64_t most, int columns, Work work) {
  const int64_t blocks = (panel.rows + most - 1) / most, count = blocks * (PANEL / columns);
  for (int64_t index = 0; index < count; ++index) {
    const int column = (int)(index / blocks) * columns;
    if (column >= panel.columns) break;
    const int64_t block = index % blocks, row = panel.rows * block / blocks;
    work(index, count, column, row, (int)(panel.rows * (block + 1) / blocks - row));
  }
}

// Bytes of a panel that all rows are multiplied by before the next ones, so that they stay in a cache: L1 on
// Intel's processors with AVX-512, and L2, together with the prefetched ones, at `avx2`. AMD's with AVX-512
// have a fast L2 that is large enough. Partial sums go to memory between chunks; many rows are not
// memory-bound and use larger chunks.
inline int64_t chunk_bytes(int64_t rows) {
  if (INTEL && rows > BLOCK_ROWS && rows <= 4 * BLOCK_ROWS) return 1 << 14;
  if (WIDTH == 16) return INT64_MAX;
  return rows <= 4 * BLOCK_ROWS ? 1 << 16 : 1 << 17;
}

// Steps taken by all row blocks before the next chunk, and partial sums kept between chunks.
struct Chunk {
  int64_t first, last;
  float* sums;
};

// Partial sums in memory, [M, V * WIDTH], of float32 or int32.
template <class Vector, int M, int V>
inline INLINE void load_sums(const float* from, Vector (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = load_as<Vector>(from + (m * V + v) * WIDTH);
}

template <class Vector, int M, int V>
inline INLINE void store_sums(float* to, const Vector (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(to + (m * V + v) * WIDTH, (vec)sums[m][v]);
}

// A constant at all levels but that of AMD's Zen 4 and 5.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
inline INLINE bool is_zen5() { return glm::is_zen5; }
#else
constexpr bool is_zen5() { return false; }
#endif

// Targets of prefetches. Where computation and memory take about equally long, as many lines as possible
// should be in flight: more can be to L2 than to L1, but on Zen 5 it is the other way round. READ_ONCE is for
// lines that are read once in a step, by one block: on Zen 5 they are not to stay in L2 and L3, where they
// would displace what Python needs between steps.
enum Target { L1, L2, MOST_IN_FLIGHT, READ_ONCE };

template <Target TARGET>
inline INLINE void prefetch_line(const void* from) {
  if (TARGET == READ_ONCE && is_zen5()) {
    __builtin_prefetch(from, 0, 0);
  } else if (TARGET == L1 || (TARGET != L2 && is_zen5())) {
    __builtin_prefetch(from, 0, 3);
  } else {
    __builtin_prefetch(from, 0, 2);
  }
}

// Whether products of so many rows take about as long as reading their weights.
constexpr bool is_balanced(int64_t rows) { return rows >= BLOCK_ROWS / 2 && rows <= 2 * BLOCK_ROWS; }

// Prefetch distance, in bytes, of a single block, and its target: Intel's processors need many lines in
// flight, but those in L2 must then still be fetched from there. On Zen 4 balanced rows need more of them;
// for two cores that share a chiplet's bandwidth, 8 KB are too many.
constexpr int64_t LONG_DISTANCE = 16384, PREFETCH_DISTANCE = INTEL ? LONG_DISTANCE : 4096;
constexpr int64_t BALANCED_DISTANCE = INTEL ? LONG_DISTANCE : 6144;
constexpr Target OF_ONE_BLOCK = INTEL ? L2 : L1;

inline INLINE int64_t prefetch_distance(int64_t rows) {
  if (is_zen5()) return LONG_DISTANCE;
  return is_balanced(rows) ? BALANCED_DISTANCE : PREFETCH_DISTANCE;
}

// Few int8 rows take so little time that they need a longer distance; but at `avx2` (Zen 3) the hardware
// prefetcher follows the weights by itself, and a short distance is best.
constexpr bool HARDWARE_PREFETCH = WIDTH == 8;
constexpr int64_t SHORT_DISTANCE = 1024;
constexpr int64_t INT8_DISTANCE = HARDWARE_PREFETCH ? SHORT_DISTANCE : INTEL ? LONG_DISTANCE : 8192;

// The same for int8 rows times weights in groups. Where memory takes longer than computation, a longer
// distance helps; with five rows and more it no longer does.
constexpr bool is_bound_by_memory(int int8_rows) { return int8_rows <= 4; }

inline INLINE int64_t groups_distance(int int8_rows) {
  return is_zen5() && is_bound_by_memory(int8_rows) ? LONG_DISTANCE : INT8_DISTANCE;
}

// Prefetches `step` bytes in each step.
struct Prefetcher {
  const char* from;
  int64_t step;
  bool into_l2;

  Prefetcher(const char* from, int64_t step, int64_t rows)
      : from(from), step(step), into_l2(is_balanced(rows) && !is_zen5()) {}

  inline INLINE void prefetch(int64_t offset) const {
    if (OF_ONE_BLOCK == L2 || into_l2) return prefetch_line<L2>(from + offset);
    prefetch_line<L1>(from + offset);
  }

  inline INLINE void prefetch_all(int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch(i);
    from += bytes;
  }
};

}  // namespace
