// int8 inputs times group-quantised weights, on tiles. Integer dot products of groups are exact, and the
// rest follows int8_groups.hpp, so results have the same bits.
//
// On an Intel Xeon with AMX, 512-bit float32 instructions run at half speed while tiles are in use. So the
// dot products of several groups are computed first, and then accumulated without tiles.
#pragma once

#include "int8_groups.hpp"
#include "tiles.hpp"

namespace {

// Fewer rows are at least as fast without tiles.
constexpr int64_t ROWS_FOR_TILES = 24;

// The dot products of these groups stay in L1, and their scales and minima in registers.
constexpr int GROUPS_TOGETHER = 4;

// Dot products of a block of rows with N groups, and the accumulated results.
template <int N>
using Products = int32_t[BLOCK][N][PANEL];
typedef float Totals[BLOCK][PANEL];

template <class T>
inline const char* group_at(const char* weight, int64_t number) {
  constexpr GroupType type = T::type;
  constexpr int OF_BLOCK = type.inputs / type.group;
  return weight + number / OF_BLOCK * type.bytes() + type.head +
         number % OF_BLOCK * type.group_bytes();
}

// A tiles of rows times N groups starting at `first`. A tile is stored only when its next product is due,
// which hides its latency behind the other three. One tile of rows alternates between two groups.
template <class T, int A, int N>
inline void multiply_groups(const LinearPanel& panel, int64_t row, int64_t first,
                            Products<N>& products) {
  constexpr int GROUP = T::type.group;
  const char* x = (const char*)panel.x + row * panel.row_bytes + HEAD_BYTES + first * GROUP;
  const char* next = x + TILE_ROWS * panel.row_bytes;
  const auto quants = [&](int i) INLINE {
    return group_at<T>((const char*)panel.weight, first + i) + T::type.scales;
  };
#define LOAD_WEIGHTS(i)                                    \
  TILE_LOAD(6, quants(i), PAIR_BYTES);                     \
  TILE_LOAD(7, quants(i) + TILE_ROW_BYTES, PAIR_BYTES)
#define STORE_AND_MULTIPLY(tile, left, right, row, last, now)                                   \
  if (last >= 0 && last < N)                                                                    \
    TILE_STORE(tile, &products[row][last][tile % 2 * (PANEL / 2)], sizeof products[0]);         \
  if (now < N) {                                                                                \
    TILE_ZERO(tile);                                                                            \
    TILE_INT8(tile, left, right);                                                               \
  }
#pragma GCC unroll 8
  for (int i = 0; i < N + 3 - A; i += 3 - A) {
    if (i < N) {
      TILE_LOAD(4, x + i * GROUP, panel.row_bytes);
      if constexpr (A == 2) TILE_LOAD(5, next + i * GROUP, panel.row_bytes);
      LOAD_WEIGHTS(i);
    }
    STORE_AND_MULTIPLY(0, 4, 6, 0, i - 3 + A, i)
    STORE_AND_MULTIPLY(1, 4, 7, 0, i - 3 + A, i)
    if constexpr (A == 2) {
      STORE_AND_MULTIPLY(2, 5, 6, TILE_ROWS, i - 1, i)
      STORE_AND_MULTIPLY(3, 5, 7, TILE_ROWS, i - 1, i)
    } else {
      if (i + 1 < N) {
        TILE_LOAD(5, x + (i + 1) * GROUP, panel.row_bytes);
        LOAD_WEIGHTS(i + 1);
      }
      STORE_AND_MULTIPLY(2, 5, 6, 0, i - 1, i + 1)
      STORE_AND_MULTIPLY(3, 5, 7, 0, i - 1, i + 1)
    }
  }
#undef LOAD_WEIGHTS
#undef STORE_AND_MULTIPLY
}

// Adds product(m, i, v) * scale(i, v) of N groups to totals and, for types with a minimum,
// factor(m, i) * minimum(i, v).
template <int N, bool HAS_MINIMUM, class Scale, class Minimum, class Product, class Factor>
inline INLINE void add_groups(int rows, Scale scale, Minimum minimum, Product product,
                              Factor factor, Totals& totals) {
  constexpr int V = ALL_VECTORS;
  vec a[N][V], b[N][V];
  for (int i = 0; i < N; ++i) {
    for (int v = 0; v < V; ++v) a[i][v] = scale(i, v);
    for (int v = 0; v < V; ++v) b[i][v] = minimum(i, v);
  }
  for (int m = 0; m < rows; ++m) {
    vec sums[V];
    for (int v = 0; v < V; ++v) sums[v] = load(totals[m] + v * WIDTH);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      for (int v = 0; v < V; ++v) sums[v] = fused(product(m, i, v), a[i][v], sums[v]);
      if (!HAS_MINIMUM) continue;
      const vec times = broadcast(factor(m, i));
      for (int v = 0; v < V; ++v) sums[v] = fused(times, b[i][v], sums[v]);
    }
    for (int v = 0; v < V; ++v) store(totals[m] + v * WIDTH, sums[v]);
  }
}

template <class T, int N>
inline void add_products(const LinearPanel& panel, int64_t row, int64_t first, int rows,
                         const Products<N>& products, Totals& totals) {
  const char* x = (const char*)panel.x + row * panel.row_bytes + HEAD_BYTES;
  const char* starts = x + padded_depth(panel.depth) + first * sizeof(GroupStart);
  const auto group = [&](int i) INLINE {
    return group_at<T>((const char*)panel.weight, first + i);
  };
  add_groups<N, T::minimum != 0>(
      rows,
      [&](int i, int v) INLINE { return T::a(group(i) - T::type.head, group(i), v * WIDTH); },
      [&](int i, int v) INLINE { return T::b(group(i) - T::type.head, group(i), v * WIDTH); },
      [&](int m, int i, int v) INLINE {
        return __builtin_convertvector(load_as<ivec>(products[m][i] + v * WIDTH), vec);
      },
      [&](int m, int i) INLINE {
        return load_as<float>(starts + m * panel.row_bytes + i * sizeof(GroupStart));
      },
      totals);
}

// A tiles of rows starting at `row` times the groups starting at `first`, N at a time, halving N for the
// remainder. Prefetches `ahead_bytes` of `ahead` per group.
template <class T, int A, int N>
void tile_group_sums(const LinearPanel& panel, int64_t row, int64_t first, const char* ahead,
                     int64_t ahead_bytes, Totals& totals) {
  alignas(64) Products<N> products;
  const int64_t groups = panel.depth / T::type.group, left = panel.rows - row;
  const int rows = left < A * TILE_ROWS ? (int)left : A * TILE_ROWS;
  for (; first + N <= groups; first += N) {
    for (int64_t i = 0; i < N * ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += N * ahead_bytes;
    multiply_groups<T, A, N>(panel, row, first, products);
    add_products<T, N>(panel, row, first, rows, products, totals);
  }
  if constexpr (N > 1) tile_group_sums<T, A, N / 2>(panel, row, first, ahead, ahead_bytes, totals);
}

template <class T, int A>
void tile_group_block(const LinearPanel& panel, int64_t row, const char* ahead,
                      int64_t ahead_bytes) {
  alignas(64) Totals totals = {};
  tile_group_sums<T, A, GROUPS_TOGETHER>(panel, row, 0, ahead, ahead_bytes, totals);
  for (int m = 0; m < A * TILE_ROWS && row + m < panel.rows; ++m) {
    vec sums[ALL_VECTORS];
    for (int v = 0; v < ALL_VECTORS; ++v) sums[v] = load(totals[m] + v * WIDTH);
    finish_int8_group_row<T, ALL_VECTORS>(panel, row + m, 0, sums);
  }
}

// `next` is the next panel, to be prefetched.
template <class T>
void tile_group_rows(const LinearPanel& panel, const char* next) {
  [[maybe_unused]] const UseTiles<T::type.group> tiles;
  const int64_t blocks = blocks_of(panel.rows);
  const int64_t ahead_bytes = panel.bytes / (panel.depth / T::type.group) / blocks;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = block * BLOCK;
    const char* ahead = next + panel.bytes * block / blocks;
    if (panel.rows - row > TILE_ROWS) {
      tile_group_block<T, 2>(panel, row, ahead, ahead_bytes);
    } else {
      tile_group_block<T, 1>(panel, row, ahead, ahead_bytes);
    }
  }
}

void tile_groups(glm::Weight kind, LinearPanel panel) {
  with_group_type(kind, [&](auto type) {
    typedef decltype(type) T;
    const auto* weight = (const char*)panel.weight;
    const char* next = weight + panel.bytes;
    if constexpr (T::type.bits == 8) {
      tile_group_rows<T>(panel, next);
    } else {
      unpack_panel<T, T::offset>(weight, panel.depth, panel.scratch);
      panel.weight = panel.scratch;
      tile_group_rows<UnpackedLike<T, 0>>(panel, next);
    }
  });
}

}  // namespace
