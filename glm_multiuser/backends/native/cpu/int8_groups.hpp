// Inputs quantised to int8 (int8_inputs.hpp) times group-quantised weights. The integer dot product of a
// group is exact. Group by group, it is multiplied by the group's scale and accumulated in float32 with
// FMA, as is the group's minimum; then the row's scale and its outliers are applied without FMA. So all
// levels give the same bits.
#pragma once

#include "groups.hpp"
#include "int8_inputs.hpp"
#include "linear.hpp"

namespace {

// Rows of a block with packed and with unpacked weights: more would spill registers. Each block of packed
// weights unpacks them again, so there should be few.
#if defined(__AVX512F__)
constexpr int INT8_ROWS = 8, UNPACKED_ROWS = 6;
#elif defined(__AVX2__)
constexpr int INT8_ROWS = 4, UNPACKED_ROWS = 4;
#else
constexpr int INT8_ROWS = 2, UNPACKED_ROWS = 2;
#endif

// Up to this many blocks read packed weights; for more, a panel is unpacked once. Reading them packed
// costs more without AVX-512, and for types that keep upper bits separately.
template <class T>
constexpr int64_t BLOCKS_AS_STORED = WIDTH < 16 || T::type.has_upper_bits() ? 1 : 3;

template <class T>
vec with_sign(vec minimum) {
  return T::minimum < 0 ? -minimum : minimum;
}

// An unpacked panel of a type with fewer than 8 bits: one quant per byte, and in front of each group its
// scale and signed minimum in float32. Depends on T's group size, bits, and whether it has a minimum.
// OFFSET must be subtracted from quants.
template <class T, int OFFSET>
struct Unpacked {
  static constexpr int FLOATS = 4 * PANEL, COUNT = T::minimum == 0 ? 1 : 2;
  static constexpr GroupType type{T::type.weight, PART, T::type.group, 8, 0, COUNT * FLOATS};
  static constexpr int minimum = T::minimum != 0, offset = OFFSET;
  static constexpr bool signed_bytes = false;
  static vec a(const char*, const char* scales, int column) {
    return load((const float*)scales + column);
  }
  static vec b(const char*, const char* scales, int column) {
    return T::minimum == 0 ? vec{} : load((const float*)scales + PANEL + column);
  }
};
template <class T>
constexpr bool IS_UNPACKED = false;
template <class T, int OFFSET>
constexpr bool IS_UNPACKED<Unpacked<T, OFFSET>> = true;

// Bits of a quant, packed or unpacked.
template <class T>
constexpr int QUANT_BITS = T::type.bits;
template <class T, int OFFSET>
constexpr int QUANT_BITS<Unpacked<T, OFFSET>> = T::type.bits;

// Unpacked, all 4-bit types with a minimum are the same, which saves instantiations.
template <class T>
constexpr bool IS_LIKE_Q4_1 = T::minimum != 0 && T::type.bits == Q4_1::type.bits;
template <class T, int OFFSET = T::offset>
using UnpackedLike = Unpacked<std::conditional_t<IS_LIKE_Q4_1<T>, Q4_1, T>, OFFSET>;

// `taken` is subtracted from every quant.
template <class T, int taken = 0>
void unpack_panel(const char* panel, int64_t depth, char* to) {
  constexpr int V = ALL_VECTORS;
  const auto append = [&](auto value) INLINE {
    for (int v = 0; v < V; ++v) {
      const auto one = value(v);
      std::memcpy(to + v * sizeof one, &one, sizeof one);
    }
    to += 4 * PANEL;
  };
  for (int64_t part = 0; part < depth / PART; ++part)
    read_part<T, V, true>(panel, part, 0, 0, PREFETCH_DISTANCE, [&](auto a, auto b, auto each) INLINE {
      append(a);
      if (T::minimum != 0) append([&](int v) INLINE { return with_sign<T>(b(v)); });
      each([&](const uvec* quads) INLINE {
        append([&](int v) INLINE { return (bvec)quads[v] - (int8_t)taken; });
      });
    });
}

#if defined(GLM_HAS_DPBUSD)
// One operand of dpbusd is unsigned, so 128 is added to int8 quants.
template <class T>
constexpr int UNSIGNED_OFFSET = T::signed_bytes ? 128 : T::offset;
#else
template <class T>
constexpr int UNSIGNED_OFFSET = T::offset;
#endif

// Follows the quantised inputs of a row, for each group: the initial value of its sum or, for types with a
// minimum, the factor of the minimum.
union GroupStart {
  int32_t start;
  float factor;
};

int64_t int8_group_row_bytes(int group, int64_t depth) {
  const int64_t bytes = HEAD_BYTES + padded_depth(depth) + depth / group * sizeof(GroupStart);
  return (bytes + 63) / 64 * 64 + 64;
}

template <class T>
void pack_int8_group_row(const float* x, int64_t depth, void* row) {
  constexpr int group = T::type.group;
  round_row<int8_t>(x, depth, row);
  const auto* quantised = (const int8_t*)row + HEAD_BYTES;
  auto* starts = (GroupStart*)(quantised + padded_depth(depth));
  for (int64_t i = 0; i < depth / group; ++i) {
    const int32_t total = sum_of(quantised + i * group, group);
    if (T::minimum == 0) {
      starts[i].start = -UNSIGNED_OFFSET<T> * total;
    } else {
      starts[i].factor = (float)total;
    }
  }
}

// Dot products over one group, of M rows and V vectors of columns.
template <class T, int M, int V>
struct GroupSums {
  ivec sums[M][V];

  // `add` consumes four inputs of each row.
#if defined(GLM_HAS_DPBUSD)
  inline INLINE void add(const char* x, int64_t row_bytes, const uvec* quads) {
    ivec w[V];
    for (int v = 0; v < V; ++v) w[v] = (ivec)quads[v] ^ (T::signed_bytes ? (int32_t)0x80808080 : 0);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const ivec value = ivec{} + load_as<int32_t>(x + m * row_bytes);
      for (int v = 0; v < V; ++v) sums[m][v] = dpbusd(sums[m][v], w[v], value);
    }
  }

  inline INLINE void finish() {}
#else
  // Pair sums are accumulated in 16 bits for as many calls as cannot overflow: widening to 32 bits takes
  // two more instructions per multiplication. With int8 quants it is one call.
  static constexpr int CALLS = T::type.group / 4;
  static constexpr int LARGEST = 127 * ((1 << QUANT_BITS<T>) - 1);
  static constexpr int MOST = T::signed_bytes ? 1 : INT16_MAX / (2 * LARGEST);
  // With 5 bits, half of the eight calls would fit, but compilers do not unroll a loop with both sums.
  static constexpr int FIT = MOST >= CALLS || CALLS <= 4 ? MOST : 1;
  hvec twos[M][V] = {};
  int count = 0;

  inline INLINE void add(const char* x, int64_t row_bytes, const uvec* quads) {
    ivec w[V];
    for (int v = 0; v < V; ++v)
      w[v] = T::signed_bytes ? with_sign_of((ivec)quads[v], (ivec)quads[v]) : (ivec)quads[v];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const ivec value = ivec{} + load_as<int32_t>(x + m * row_bytes);
      for (int v = 0; v < V; ++v) {
        const ivec with_sign = T::signed_bytes ? with_sign_of((ivec)quads[v], value) : value;
        twos[m][v] = optimizer_barrier(twos[m][v] + products_of_bytes(w[v], with_sign));
      }
    }
    if (FIT < CALLS && ++count % FIT == 0) widen();
  }

  inline INLINE void finish() {
    if (FIT >= CALLS) widen();
  }

  inline INLINE void widen() {
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) {
        sums[m][v] = optimizer_barrier(add_both(sums[m][v], twos[m][v]));
        twos[m][v] = hvec{};
      }
    }
  }
#endif
};

// Dequantises V vectors of columns of one input.
template <class T, int V>
inline INLINE void widen_one(const char* weight, unsigned input, int column, vec* w) {
  constexpr unsigned GROUP = T::type.group;
  if constexpr (IS_UNPACKED<T>) {
    const char* scales = weight + input / GROUP * T::type.group_bytes();
    const char* words = scales + T::type.scales + input % GROUP / 4 * 4 * PANEL + 4 * column;
    for (int v = 0; v < V; ++v) {
      const auto quad = load_as<uvec>(words + v * sizeof(uvec));
      const ivec stored = (ivec)(quad << (24 - input % 4 * 8)) >> 24;
      const vec q = __builtin_convertvector(stored, vec) - T::offset;
      const int first = column + v * WIDTH;
      w[v] = T::a(nullptr, scales, first) * q + T::b(nullptr, scales, first);
    }
  } else {
    widen_input<T, V>(weight, input, column, w);
  }
}

// Adds one row's outliers times V vectors of columns. Unused outliers are 0 and change nothing.
template <class T, int V>
inline INLINE void add_outliers(const RowHead& head, const char* weight, int column, vec* y) {
#pragma GCC unroll 4
  for (int k = 0; k < OUTLIERS; ++k) {
    vec w[V];
    widen_one<T, V>(weight, (unsigned)head.index[k], column, w);
    for (int v = 0; v < V; ++v) y[v] += w[v] * head.value[k];
  }
}

// Applies the row's scale and outliers to the sums of V vectors of columns, and stores the results.
template <class T, int V>
inline INLINE void finish_int8_group_row(const LinearPanel& panel, int64_t row, int column,
                                         const vec* sums) {
  const auto& head = *(const RowHead*)((const char*)panel.x + row * panel.row_bytes);
  vec y[V];
  for (int v = 0; v < V; ++v) y[v] = sums[v] * head.scale;
  add_outliers<T, V>(head, (const char*)panel.weight, column, y);
  for (int v = 0; v < V; ++v) store_result(panel, row, column + v * WIDTH, y[v]);
}

// M rows starting at `row` times V vectors of columns starting at `column`. Prefetches `ahead_bytes` of the
// next panel per part, starting at `ahead`; together, all blocks prefetch the whole panel. A block of all
// columns of packed weights with fewer than 8 bits prefetches its own weights instead.
template <class T, int M, int V>
void int8_group_block(const LinearPanel& panel, int64_t row, int column, const char* ahead,
                      int64_t ahead_bytes) {
  constexpr bool READS_ALL = !IS_UNPACKED<T> && V == ALL_VECTORS;
  if (READS_ALL) column = 0;  // lets the compiler know
  const auto* weight = (const char*)panel.weight;
  const char* rows = (const char*)panel.x + row * panel.row_bytes;
  const char* x = rows + HEAD_BYTES;
  const char* starts = x + padded_depth(panel.depth);
  prefetch_results<M, V>(panel, row, column);
  vec sums[M][V];
  clear(sums);
  for (int64_t part = 0; part < panel.depth / PART; ++part) {
    if constexpr (!READS_ALL || T::type.bits == 8) {
      prefetch(ahead, ahead_bytes);
      ahead += ahead_bytes;
    }
    const auto group = [&](auto a, auto b, auto each) INLINE {
      GroupSums<T, M, V> dots;
      for (int m = 0; m < M; ++m) {
        const auto start = load_as<int32_t>(starts + m * panel.row_bytes);
        for (int v = 0; v < V; ++v) dots.sums[m][v] = T::minimum == 0 ? ivec{} + start : ivec{};
      }
      each([&](const uvec* quads) INLINE {
        dots.add(x, panel.row_bytes, quads);
        x += 4;
      });
      dots.finish();
      for (int v = 0; v < V; ++v) {
        const vec scale = a(v);
        for (int m = 0; m < M; ++m)
          sums[m][v] = fused(__builtin_convertvector(dots.sums[m][v], vec), scale, sums[m][v]);
      }
      for (int v = 0; v < V && T::minimum != 0; ++v) {
        const vec minimum = with_sign<T>(b(v));
        for (int m = 0; m < M; ++m) {
          const vec factor = broadcast(load_as<float>(starts + m * panel.row_bytes));
          sums[m][v] = fused(factor, minimum, sums[m][v]);
        }
      }
      starts += sizeof(GroupStart);
    };
    constexpr Target TARGET = is_bound_by_memory(M) ? READ_ONCE : MOST_IN_FLIGHT;
    read_part<T, V, READS_ALL, TARGET>(weight, part, column, 0, groups_distance(M), group);
  }
  const LinearPanel own = panel;
  for (int m = 0; m < M; ++m) finish_int8_group_row<T, V>(own, row + m, column, sums[m]);
}

// All rows times a panel, packed at `stored`.
template <class T>
void int8_group_rows(const LinearPanel& panel, const char* stored) {
  // Unpacked panels have several blocks, none of which has less than half of the maximum.
  constexpr int MOST = IS_UNPACKED<T> ? UNPACKED_ROWS : INT8_ROWS;
  constexpr int LEAST = IS_UNPACKED<T> ? MOST / 2 : 1;
  const int64_t part_bytes = panel.bytes / (panel.depth / PART);
  for_blocks(panel, MOST, BLOCK_COLUMNS,
             [&](int64_t index, int64_t count, int column, int64_t row, int rows) INLINE {
               const bool alone = count == 1 && panel.rows <= FEW_ROWS;
               const char* ahead = stored + panel.bytes + panel.bytes * index / count;
               const int64_t ahead_bytes = alone ? 0 : part_bytes / count;
               with_rows<MOST, LEAST>(rows, [&](auto constant) {
                 int8_group_block<T, constant.value, VECTORS>(panel, row, column, ahead, ahead_bytes);
               });
             });
}

template <class T>
void int8_group_panel(LinearPanel panel) {
  const auto* stored = (const char*)panel.weight;
  if constexpr (T::type.bits < 8) {
    if (panel.rows > BLOCKS_AS_STORED<T> * INT8_ROWS) {
      unpack_panel<T>(stored, panel.depth, panel.scratch);
      panel.weight = panel.scratch;
      return int8_group_rows<UnpackedLike<T>>(panel, stored);
    }
  }
  if (panel.rows == 1) return int8_group_block<T, 1, ALL_VECTORS>(panel, 0, 0, stored, 0);
  int8_group_rows<T>(panel, stored);
}

}  // namespace
