// float32 or bfloat16 inputs times group-quantised weights, on tiles. Quants have at most 8 bits, which are
// exact in bfloat16, and a float32 input is the sum of three bfloat16 values, so products are exact. Dot
// products of groups are rounded by TDPBF16PS, then multiplied by the scales of their groups and accumulated
// in float32, group by group, as in tile_groups.hpp.
#pragma once

#include "cache.hpp"
#include "groups.hpp"
#include "instructions.hpp"
#include "tile_groups.hpp"
#include "tile_rows.hpp"
#include "tiles.hpp"

namespace {

// Consecutive integers starting at -OFFSET, in bfloat16.
template <int OFFSET>
struct Bf16Integers {
  alignas(64) uint16_t bits[64] = {};

  constexpr Bf16Integers() {
    for (int i = 0; i < 64; ++i) {
      const int value = i - OFFSET, size = value < 0 ? -value : value;
      int exponent = 0;
      while (size >> (exponent + 1) != 0) ++exponent;
      const int fraction = (size << 7 >> exponent) & 127;
      if (size != 0) bits[i] = (uint16_t)((value < 0) << 15 | (127 + exponent) << 7 | fraction);
    }
  }
};

// Quants of inputs `first` and `first` + 2 of a quad, in bfloat16. This order takes the fewest instructions;
// `RowsInTiles` reorders inputs accordingly.
template <class T>
inline INLINE uvec pair_of_quad(uvec quads, int first) {
  if constexpr (T::type.bits < 8) {
    static constexpr Bf16Integers<T::offset> integers;
    const auto* table = (const __m512i*)integers.bits;
    const auto indices = (__m512i)(quads >> (8 * first));
    if constexpr (T::type.bits < 6) return (uvec)_mm512_permutexvar_epi16(indices, table[0]);
    return (uvec)_mm512_permutex2var_epi16(table[0], indices, table[1]);
  }
  const uvec quad = Quad<T>::prepared(quads);
  const auto quant = [&](int i) { return (uvec)Quad<T>::quant(quad, 8 * i); };
  return quant(first) >> 16 | (quant(first + 2) & 0xffff0000u);
}

// A group of a panel: scales and, for types with a minimum, signed minima of all outputs, and two adjacent
// tiles of quants.
template <class T>
struct TiledGroup {
  static constexpr int COUNT = T::minimum == 0 ? 1 : 2;
  float scales[COUNT][PANEL];
  char pairs[T::type.group / 2][PAIR_BYTES];
};

constexpr int64_t LARGEST_TILED_GROUP = sizeof(TiledGroup<Q4_1>);

template <class T>
void tile_parts(const char* panel, int64_t first, int64_t count, TiledGroup<T>* to) {
  constexpr int V = ALL_VECTORS;
  for (int64_t part = first; part < first + count; ++part)
    read_part<T, V, true>(panel, part, 0, 0, PREFETCH_DISTANCE, [&](auto a, auto b, auto each) INLINE {
      for (int v = 0; v < V; ++v) store(to->scales[0] + v * WIDTH, a(v));
      for (int v = 0; v < V && T::minimum != 0; ++v)
        store(to->scales[1] + v * WIDTH, with_sign<T>(b(v)));
      char* at = to->pairs[0];
      each([&](const uvec* quads) INLINE {
#pragma GCC unroll 2
        for (int first = 0; first < 2; ++first, at += PAIR_BYTES) {
          for (int v = 0; v < V; ++v) {
            const uvec pair = pair_of_quad<T>(quads[v], first);
            std::memcpy(at + v * sizeof pair, &pair, sizeof pair);
          }
        }
      });
      ++to;
    });
}

// Inputs are packed as for other products (`RowsInTiles`). The tiles of 16 rows are followed by the sums of
// every PART inputs of these rows.
inline int64_t float_groups_row_bytes(int64_t depth, int parts) {
  return depth / PART * (parts * TILE_ROW_BYTES + (int64_t)sizeof(float));
}

// The sums of the rows of a tile.
inline char* input_sums(char* rows, int64_t depth, int parts) {
  return rows + depth / PART * parts * TILE_BYTES;
}

// WIDTH values, rounded as the inputs of the product are.
inline vec rounded_inputs(Inputs inputs, vec values) {
  if (inputs == Inputs::float32) return values;
  uint16_t rounded[WIDTH];
  round_to_bf16(values, rounded);
  return widened(rounded);
}

// The pairwise sum of PART inputs.
inline float sum_of_part(Inputs inputs, const float* x) {
  constexpr int HALVES = PART / 2 / WIDTH;
  float halves[PART / 2];
  for (int v = 0; v < HALVES; ++v)
    store(halves + v * WIDTH, rounded_inputs(inputs, load(x + v * WIDTH)) +
                                  rounded_inputs(inputs, load(x + PART / 2 + v * WIDTH)));
  if constexpr (HALVES == 1) return sum(load(halves));
  return reduce_halves<PART / 2>(halves, [](auto a, auto b) { return a + b; });
}

// Stores the sums of every PART inputs of a packed row.
inline void store_input_sums(Inputs inputs, const float* x, int64_t depth, int64_t row,
                             void* rows) {
  const int64_t in_tile = row % TILE_ROWS;
  const int parts = parts_of(inputs);
  char* tile = (char*)rows + (row - in_tile) * float_groups_row_bytes(depth, parts);
  auto* to = (float*)input_sums(tile, depth, parts) + in_tile;
  for (int64_t i = 0; i < depth; i += PART, to += TILE_ROWS) *to = sum_of_part(inputs, x + i);
}

// Dot products of a block of rows, or of their parts, with N groups.
template <int N>
using FloatProducts = float[BLOCK][N][PANEL];

// How rows of PARTS are multiplied: part by part or, if they are few, AT_ONCE, with all their parts as the
// rows of a single tile.
template <int PARTS, bool AT_ONCE>
struct FloatRows {
  static constexpr int LOADS = AT_ONCE ? 1 : PARTS;
  static constexpr int64_t ROW_BYTES = AT_ONCE ? TILE_ROW_BYTES : PARTS * TILE_ROW_BYTES;
  static constexpr int64_t STEP_BYTES = PARTS * TILE_BYTES;  // a tile of rows and PART inputs
};

// A tiles of rows, the second at an offset of `other` bytes, times N groups. A tile is stored only when its
// next product is due, which hides its latency behind the others.
template <class T, class Rows, int A, int N>
inline void multiply_tiled_groups(const char* x, int64_t other, const TiledGroup<T>* groups,
                                  FloatProducts<N>& products) {
#define STORE_TILE(tile, row, i)                                                            \
  if (i >= 0)                                                                               \
    TILE_STORE(tile, &products[row][i < 0 ? 0 : i][tile % 2 * (PANEL / 2)], sizeof products[0])
#define MULTIPLY(tile, left, right, row, last)    \
  if (part == Rows::LOADS - 1) {                  \
    STORE_TILE(tile, row, last);                  \
    TILE_ZERO(tile);                              \
  }                                               \
  TILE_BF16(tile, left, right);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    constexpr int GROUP_BYTES = T::type.group * (int)sizeof(uint16_t);
    const char* from =
        x + i * GROUP_BYTES / TILE_ROW_BYTES * Rows::STEP_BYTES + i * GROUP_BYTES % TILE_ROW_BYTES;
    TILE_LOAD(6, groups[i].pairs[0], PAIR_BYTES);
    TILE_LOAD(7, groups[i].pairs[0] + TILE_ROW_BYTES, PAIR_BYTES);
#pragma GCC unroll 3
    for (int part = Rows::LOADS - 1; part >= 0; --part) {  // the smallest first
      TILE_LOAD(4, from + part * TILE_ROW_BYTES, Rows::ROW_BYTES);
      if constexpr (A == 2) {
        TILE_LOAD(5, from + part * TILE_ROW_BYTES + other, Rows::ROW_BYTES);
        MULTIPLY(0, 4, 6, 0, i - 1)
        MULTIPLY(1, 4, 7, 0, i - 1)
        MULTIPLY(2, 5, 6, TILE_ROWS, i - 1)
        MULTIPLY(3, 5, 7, TILE_ROWS, i - 1)
      } else if (i % 2 == 0) {
        MULTIPLY(0, 4, 6, 0, i - 2)
        MULTIPLY(1, 4, 7, 0, i - 2)
      } else {
        MULTIPLY(2, 4, 6, 0, i - 2)
        MULTIPLY(3, 4, 7, 0, i - 2)
      }
    }
  }
  if constexpr (A == 2) {
    STORE_TILE(0, 0, N - 1);
    STORE_TILE(1, 0, N - 1);
    STORE_TILE(2, TILE_ROWS, N - 1);
    STORE_TILE(3, TILE_ROWS, N - 1);
  } else {
    STORE_TILE(0, 0, (N - 1) / 2 * 2);
    STORE_TILE(1, 0, (N - 1) / 2 * 2);
    STORE_TILE(2, 0, N / 2 * 2 - 1);
    STORE_TILE(3, 0, N / 2 * 2 - 1);
  }
#undef MULTIPLY
#undef STORE_TILE
}

// Maximum of rows whose parts fit into a single tile.
template <int PARTS>
constexpr int64_t ROWS_AT_ONCE = PARTS == 1 ? 0 : TILE_ROWS / PARTS;

// At most two tiles of rows starting at `row`, times N groups of a panel starting at `first`.
template <class T, int PARTS, int N>
void add_tiled_block(const LinearPanel& panel, int64_t row, int64_t first,
                     const TiledGroup<T>* groups, Totals& totals) {
  alignas(64) FloatProducts<N> products;
  const int64_t other = TILE_ROWS * panel.row_bytes, left = panel.rows - row;
  auto* tile = (char*)panel.x + row * panel.row_bytes;
  const char* x = tile + first * T::type.group / PART * PARTS * TILE_BYTES;
  const char* sums = input_sums(tile, panel.depth, PARTS) + first * TILE_ROW_BYTES;
  const auto scales = [&](int which) {
    return [=](int i, int v) INLINE { return load(groups[i].scales[which] + v * WIDTH); };
  };
  const auto add = [&](auto product) INLINE {
    const auto factor = [&](int m, int i) INLINE {
      const int64_t in_tile = i * TILE_ROW_BYTES + m % TILE_ROWS * (int64_t)sizeof(float);
      return load_as<float>(sums + m / TILE_ROWS * other + in_tile);
    };
    add_groups<N, T::minimum != 0>(left < BLOCK ? (int)left : BLOCK, scales(0),
                                   scales(TiledGroup<T>::COUNT - 1), product, factor, totals);
  };
  const auto at = [&](int m, int i, int v) INLINE { return load(products[m][i] + v * WIDTH); };
  if (panel.rows <= ROWS_AT_ONCE<PARTS>) {
    multiply_tiled_groups<T, FloatRows<PARTS, true>, 1, N>(x, other, groups, products);
    add([&](int m, int i, int v) INLINE {
      vec sum = at(PARTS * m + PARTS - 1, i, v);
      for (int part = PARTS - 2; part >= 0; --part) sum += at(PARTS * m + part, i, v);
      return sum;
    });
  } else if (left <= TILE_ROWS) {
    multiply_tiled_groups<T, FloatRows<PARTS, false>, 1, N>(x, other, groups, products);
    add(at);
  } else {
    multiply_tiled_groups<T, FloatRows<PARTS, false>, 2, N>(x, other, groups, products);
    add(at);
  }
}

// All rows times the groups starting at `first`, N at a time, halving N for the remainder.
template <class T, int PARTS, int N>
void add_tiled_groups(const LinearPanel& panel, int64_t first, TiledGroup<T>* groups,
                      Totals* totals) {
  constexpr int OF_PART = PART / T::type.group;
  for (; first + N <= panel.depth / T::type.group; first += N) {
    tile_parts<T>((const char*)panel.weight, first / OF_PART, N / OF_PART, groups);
    for (int64_t row = 0; row < panel.rows; row += BLOCK)
      add_tiled_block<T, PARTS, N>(panel, row, first, groups, totals[row / BLOCK]);
  }
  if constexpr (N > OF_PART) add_tiled_groups<T, PARTS, N / 2>(panel, first, groups, totals);
}

// Groups whose dot products are accumulated together. With two tiles of rows, more of them would leave too
// little of L1 to rows and weights.
constexpr int MOST_GROUPS = 4, INPUTS_OF_MANY_ROWS = 64;

// Sums of all rows, and MOST_GROUPS groups as tiles.
inline int64_t float_groups_scratch_bytes(int64_t rows) {
  return blocks_of(rows) * (int64_t)sizeof(Totals) + MOST_GROUPS * LARGEST_TILED_GROUP;
}

template <class T, int PARTS>
void tile_float_panel(const LinearPanel& panel) {
  auto* totals = (Totals*)panel.scratch;
  auto* groups = (TiledGroup<T>*)(totals + blocks_of(panel.rows));
  std::memset(totals, 0, blocks_of(panel.rows) * sizeof(Totals));
  {
    const int64_t rows = panel.rows <= ROWS_AT_ONCE<PARTS> ? PARTS * panel.rows : panel.rows;
    [[maybe_unused]] const UseTiles<T::type.group * (int)sizeof(uint16_t)> tiles(
        rows < TILE_ROWS ? (int)rows : TILE_ROWS);
    [[maybe_unused]] const FlushSubnormals flushes;  // as tiles do
    if (panel.rows > TILE_ROWS) {
      add_tiled_groups<T, PARTS, INPUTS_OF_MANY_ROWS / T::type.group>(panel, 0, groups, totals);
    } else {
      add_tiled_groups<T, PARTS, MOST_GROUPS>(panel, 0, groups, totals);
    }
  }
  const LinearPanel own = panel;  // see `store_result`
  for (int64_t m = 0; m < own.rows; ++m)
    for (int v = 0; v < ALL_VECTORS; ++v)
      store_result(own, m, v * WIDTH, load(totals[m / BLOCK][m % BLOCK] + v * WIDTH));
}

void tile_float_groups(glm::Weight kind, const LinearPanel& panel) {
  if (panel.rows == 0) return;  // tiles must have at least one row
  with_group_type(kind, [&](auto type) {
    typedef decltype(type) T;
    if (panel.inputs == Inputs::float32) return tile_float_panel<T, FLOAT32_PARTS>(panel);
    tile_float_panel<T, 1>(panel);
  });
}

}  // namespace
