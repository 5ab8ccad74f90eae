// Rows times one panel of packed weights. An output is accumulated in the same order for any number of
// rows, so results are batch-invariant.
#pragma once

#include <type_traits>

#include "blocks.hpp"
#include "epilogue.hpp"
#include "half.hpp"
#include "int8_inputs.hpp"
#include "level.hpp"
#include "row_offsets.hpp"
#include "vector.hpp"

namespace {

using glm::Inputs;
using glm::PANEL;

// Two inputs, rounded to bf16.
#if defined(__AVX512BF16__)
typedef uint32_t RoundedPair;

template <int M, int V>
inline void add_pairs(const RoundedPair* x, const RowOffsets<M>& rows, const __m512bh* w, vec (*sums)[V]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512bh value = (__m512bh)_mm512_set1_epi32(rows.template at<int32_t>(x, m));
    for (int v = 0; v < V; ++v)
      sums[m][v] = (vec)_mm512_dpbf16_ps((__m512)sums[m][v], w[v], value);
  }
}

// Low and high bytes of 0 to 127 in bf16.
struct Bytes {
  uint8_t low[128], high[128];
};
constexpr Bytes bf16_integers() {
  Bytes bytes{};
  for (int value = 1; value < 128; ++value) {
    int exponent = 0;
    while (value >> (exponent + 1)) ++exponent;
    const int bits = (127 + exponent) << 7 | ((value << (7 - exponent)) & 0x7f);
    bytes.low[value] = (uint8_t)bits;
    bytes.high[value] = (uint8_t)(bits >> 8);
  }
  return bytes;
}
alignas(64) constexpr Bytes BF16_INTEGERS = bf16_integers();
constexpr const uint8_t *LOW_BYTES = BF16_INTEGERS.low, *HIGH_BYTES = BF16_INTEGERS.high;

// int8 -> bf16, which is exact: both bytes of a magnitude come from lookup tables. Columns end up
// permuted; `restore_column_order` undoes it.
inline void widen_to_bf16(const char* from, __m512bh w[2]) {
  const __m512i weights = _mm512_loadu_si512(from);
  const __m512i index = _mm512_abs_epi8(weights);
  const __m512i low = _mm512_permutex2var_epi8(load_as<__m512i>(LOW_BYTES), index,
                                               load_as<__m512i>(LOW_BYTES + 64));
  __m512i high = _mm512_permutex2var_epi8(load_as<__m512i>(HIGH_BYTES), index,
                                          load_as<__m512i>(HIGH_BYTES + 64));
  constexpr int A_OR_B_AND_C = 0xf8;
  high = _mm512_ternarylogic_epi32(high, weights, _mm512_set1_epi8((char)0x80), A_OR_B_AND_C);
  w[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
  w[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
}
#else
struct RoundedPair {
  float low, high;
};

template <int M, int V>
inline void add_pairs(const RoundedPair* x, const RowOffsets<M>& rows, const vec* low, const vec* high,
                      vec (*sums)[V]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const auto pair = rows.template at<RoundedPair>(x, m);
    const vec first = broadcast(pair.low), second = broadcast(pair.high);
    for (int v = 0; v < V; ++v) sums[m][v] = multiply_add(low[v], first, sums[m][v]);
    for (int v = 0; v < V; ++v) sums[m][v] = multiply_add(high[v], second, sums[m][v]);
  }
}
#endif

// One input of M rows times V vectors of weights. Products are accumulated in the same order for every
// storage type, so 16-bit weights give the same bits as the same weights in float32.
template <int M, int V>
inline void add(const float* x, const RowOffsets<M>& rows, const vec* w, vec (*sums)[V]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const vec value = broadcast(rows.template at<float>(x, m));
    for (int v = 0; v < V; ++v) sums[m][v] = multiply_add(w[v], value, sums[m][v]);
  }
}

// Per weight type: the layout of a panel, and one step along the inputs. A step consumes one input, or
// two where weights are stored in pairs, which is `x_step` elements of type X.
struct Float32 {
  typedef float X;
  static constexpr int x_step = 1;
  static constexpr int scale_bytes = 0;
  static int64_t steps(int64_t depth) { return depth; }
  static constexpr int64_t step_bytes = PANEL * sizeof(float);

  template <int M, int V>
  static inline void step(const X* x, const RowOffsets<M>& rows, const char* weight,
                          vec (*sums)[V]) {
    vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load((const float*)weight + v * WIDTH);
    add<M, V>(x, rows, w, sums);
  }
};

struct Float16 {
  typedef float X;
  static constexpr int x_step = 1;
  static constexpr int scale_bytes = 0;
  static int64_t steps(int64_t depth) { return depth; }
  static constexpr int64_t step_bytes = PANEL * sizeof(uint16_t);

  template <int M, int V>
  static inline void step(const X* x, const RowOffsets<M>& rows, const char* weight,
                          vec (*sums)[V]) {
    vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load_f16((const uint16_t*)weight + v * WIDTH);
    add<M, V>(x, rows, w, sums);
  }
};

struct BFloat16 {
  typedef float X;
  static constexpr int x_step = 2;
  static constexpr int scale_bytes = 0;
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static constexpr int64_t step_bytes = PANEL * 2 * sizeof(uint16_t);

  template <int M, int V>
  static inline void step(const X* x, const RowOffsets<M>& rows, const char* weight,
                          vec (*sums)[V]) {
    vec w[V];
    for (int v = 0; v < V; ++v)
      w[v] = (vec)(load_as<uvec>(weight + v * sizeof(uvec)) << 16);
    add<M, V>(x, rows, w, sums);
    for (int v = 0; v < V; ++v)
      w[v] = (vec)(load_as<uvec>(weight + v * sizeof(uvec)) & 0xffff0000u);
    add<M, V>(x + 1, rows, w, sums);
  }
};

#if defined(__AVX512BF16__)
struct RoundedBFloat16 : BFloat16 {
  typedef RoundedPair X;
  static constexpr int x_step = 1;

  template <int M, int V>
  static inline void step(const X* x, const RowOffsets<M>& rows, const char* weight,
                          vec (*sums)[V]) {
    __m512bh w[V];
    for (int v = 0; v < V; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weight + v * 64);
    add_pairs<M, V>(x, rows, w, sums);
  }
};
#else
typedef BFloat16 RoundedBFloat16;
#endif

struct Int8 {
  typedef RoundedPair X;
  static constexpr int x_step = 1;
  static constexpr int scale_bytes = PANEL * sizeof(float);
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static constexpr int64_t step_bytes = PANEL * 2;

  template <int M, int V>
  static inline void step(const X* x, const RowOffsets<M>& rows, const char* weight,
                          vec (*sums)[V]) {
#if defined(__AVX512BF16__)
    __m512bh w[2];
    widen_to_bf16(weight, w);
    add_pairs<M, V>(x, rows, w, sums);
#else
    vec low[V], high[V];
    for (int v = 0; v < V; ++v) {
      const ivec pairs = widen(weight + v * 2 * WIDTH);
      low[v] = __builtin_convertvector(pairs << 16 >> 16, vec);
      high[v] = __builtin_convertvector(pairs >> 16, vec);
    }
    add_pairs<M, V>(x, rows, low, high, sums);
#endif
  }
};

// int8 weights and int8 inputs.
struct Int8Int8 : Int8 {};

bool in_pairs(glm::Weight kind) {
  return kind == glm::Weight::bfloat16 || kind == glm::Weight::int8;
}

// For int8 inputs and group-quantised weights, the panel unpacked by int8_groups.hpp: a byte per weight,
// and at most two float32 per 16 weights. Otherwise partial sums between chunks.
int64_t scratch_bytes(glm::Weight kind, Inputs inputs, int64_t depth, int64_t rows, int64_t) {
  if (inputs == Inputs::int8 && glm::in_groups(kind)) return depth * PANEL * 3 / 2;
  const bool in_chunks = glm::panel_bytes(kind, depth) > chunk_bytes(rows);
  return in_chunks ? rows * PANEL * (int64_t)sizeof(float) : 0;
}

bool needs_packing(glm::Weight kind, Inputs inputs, int64_t depth) {
  return inputs != Inputs::float32 || (kind == glm::Weight::bfloat16 && depth % 2);
}

// Weights in groups: groups_linear.hpp.
void linear_groups(glm::Weight kind, const LinearPanel& panel);
int64_t int8_groups_row_bytes(glm::Weight kind, int64_t depth);
void pack_int8_groups_row(glm::Weight kind, const float* x, int64_t depth, void* row);

int64_t row_bytes(glm::Weight kind, Inputs inputs, int64_t depth) {
  if (inputs == Inputs::int8)
    return kind == glm::Weight::int8 ? int8_row_bytes(depth) : int8_groups_row_bytes(kind, depth);
  const bool rounded = inputs == Inputs::bfloat16;
  const auto pair = (int64_t)(rounded && in_pairs(kind) ? sizeof(RoundedPair) : 2 * sizeof(float));
  return ((depth + 1) / 2 * pair + 63) / 64 * 64 + 64;
}

void pack_input_row(glm::Weight kind, Inputs inputs, const float* x, int64_t depth, int64_t index,
                    void* rows) {
  char* row = (char*)rows + index * row_bytes(kind, inputs, depth);
  if (inputs == Inputs::int8)
    return kind == glm::Weight::int8 ? pack_int8_row(x, depth, row)
                                     : pack_int8_groups_row(kind, x, depth, row);
  const bool rounded = inputs == Inputs::bfloat16;
#if defined(__AVX512BF16__)
  if (rounded && in_pairs(kind)) {
    auto* packed = (uint16_t*)row;
    for (int64_t i = 0; i < depth; ++i) packed[i] = to_bf16(x[i]);
    if (depth % 2) packed[depth] = 0;
    return;
  }
#endif
  auto* packed = (float*)row;
  std::memcpy(packed, x, sizeof(float) * depth);
  if (rounded)
    for (int64_t i = 0; i < depth; ++i) packed[i] = from_bf16(to_bf16(x[i]));
  // Times the zero padding of weights this is -0, which leaves any sum unchanged, even -0.
  if (in_pairs(kind) && depth % 2) packed[depth] = -0.0f;
}

// Without tiles, splitting rows into passes that fit into L2 gains nothing (Zen 4: 0.95 to 1.02).
inline int64_t one_pass(glm::Weight, Inputs, int64_t, int64_t) { return 1; }

inline bool packs_no_results(glm::Weight, Inputs, const glm::PackedInputs&) { return false; }

// Up to this many rows of float inputs are multiplied by two panels of a group-quantised weight at once.
constexpr int64_t ROWS_FOR_TWO_PANELS = 2;

int64_t panels_per_call(glm::Weight kind, Inputs inputs, int64_t, int64_t rows) {
  return glm::in_groups(kind) && inputs != Inputs::int8 && rows <= ROWS_FOR_TWO_PANELS ? 2 : 1;
}

// Threads divide the rows of a small weight as well as its panels: as norms, SwiGLU and attention divide rows
// in the same way, most of their inputs are then in the cache of the core that needs them. Each thread reads
// the whole weight, which takes longer than that saves if it does not stay in a cache.
constexpr int64_t ROWS_PER_CALL = 128, SMALL_WEIGHT_BYTES = 2 << 20;

int64_t rows_per_call(glm::Weight, Inputs, int64_t rows, int64_t weight_bytes) {
  return weight_bytes > SMALL_WEIGHT_BYTES || rows < ROWS_PER_CALL ? rows : ROWS_PER_CALL;
}

// M rows starting at `row` times V vectors of columns starting at `column`.
template <class W, int M, int V>
void block(const LinearPanel& panel, int64_t row, int column, Prefetcher ahead, const Chunk& chunk) {
  typedef typename W::X X;
  const int64_t end = chunk.last;
  RowOffsets<M> rows(panel.row_bytes);
  const auto* x = (const X*)((const char*)panel.x + row * panel.row_bytes) + chunk.first * W::x_step;
  const char* weight = (const char*)panel.weight + W::scale_bytes +
                       column * (W::step_bytes / PANEL) + chunk.first * W::step_bytes;
  const int64_t offset = column * panel.rows + row * V * WIDTH;
  vec sums[M][V];
  if (chunk.first == 0) {
    clear(sums);
  } else {
    load_sums(chunk.sums + offset, sums);
  }
  for (int64_t k = chunk.first; k < end; ++k) {
    ahead.prefetch(0);
    if (W::step_bytes > 64) ahead.prefetch(64);
    ahead.from += ahead.step;
    W::template step<M, V>(x, rows, weight, sums);
    x += W::x_step;
    rows.keep();
    weight += W::step_bytes;
  }
  if (end < W::steps(panel.depth)) return store_sums(chunk.sums + offset, sums);
  const auto* scale = (const float*)panel.weight + column;
#if defined(__AVX512BF16__)
  if (std::is_same<W, Int8>::value)
    for (int m = 0; m < M; ++m) restore_column_order(sums[m][0], sums[m][1]);
#endif
  for (int v = 0; v < V; ++v) {
    for (int m = 0; m < M; ++m) {
      vec y = sums[m][v];
      if (W::scale_bytes) y *= load(scale + v * WIDTH);
      store_result(panel, row + m, column + v * WIDTH, y);
    }
  }
}

template <class W, int M>
void block_of(int rows, const LinearPanel& panel, int64_t row, int column, const Prefetcher& ahead,
              const Chunk& chunk) {
  if constexpr (M == 0) {
    return;
  } else if (rows == M) {
    constexpr int V = M <= FEW_ROWS ? ALL_VECTORS : VECTORS;
    if constexpr (std::is_same<W, Int8Int8>::value) {
      int8_block<M, V>(panel, row, column, ahead, chunk);
    } else {
      block<W, M, V>(panel, row, column, ahead, chunk);
    }
  } else {
    block_of<W, M - 1>(rows, panel, row, column, ahead, chunk);
  }
}

// Software prefetching of float32 weights for few rows only gets in the way of a good hardware prefetcher.
template <class W>
inline INLINE int64_t few_rows_distance() {
  if (HARDWARE_PREFETCH) return std::is_same<W, Float32>::value ? 0 : SHORT_DISTANCE;
  return std::is_same<W, Int8Int8>::value ? INT8_DISTANCE : prefetch_distance(FEW_ROWS);
}

// One chunk of a panel, `bytes` long.
template <class W>
void linear_chunk(const LinearPanel& panel, const Chunk& chunk, const char* weight, int64_t bytes) {
  const bool few = panel.rows <= FEW_ROWS;
  const int64_t distance = few ? few_rows_distance<W>() : prefetch_distance(panel.rows);
  for_blocks(panel, BLOCK_ROWS, few ? PANEL : BLOCK_COLUMNS,
             [&](int64_t index, int64_t count, int column, int64_t row, int rows) INLINE {
               // A single block prefetches its own weights; several prefetch the next chunk in parts.
               const bool alone = count == 1;
               const char* from = weight + (alone ? distance : bytes + bytes * index / count);
               const int64_t step = alone ? W::step_bytes : W::step_bytes / count;
               Prefetcher ahead(from, step, panel.rows);
               ahead.prefetch_all(W::scale_bytes);  // which no step includes
               block_of<W, BLOCK_ROWS>(rows, panel, row, column, ahead, chunk);
             });
}

template <class W>
void linear_panel(const LinearPanel& panel) {
  const int64_t steps = W::steps(panel.depth);
  const bool whole = panel.rows <= FEW_ROWS || (!INTEL && std::is_same<W, Int8Int8>::value);
  const int64_t most = whole ? steps : chunk_bytes(panel.rows) / W::step_bytes;
  const auto* weight = (const char*)panel.weight;
  for (int64_t first = 0; first < steps; first += most) {
    const int64_t count = steps - first < most ? steps - first : most;
    const int64_t bytes = (first == 0 ? W::scale_bytes : 0) + count * W::step_bytes;
    linear_chunk<W>(panel, {first, first + count, (float*)panel.scratch}, weight, bytes);
    weight += bytes;
  }
}

void linear(glm::Weight kind, const LinearPanel& panel) {
  switch (kind) {
    case glm::Weight::float32: return linear_panel<Float32>(panel);
    case glm::Weight::float16: return linear_panel<Float16>(panel);
    case glm::Weight::bfloat16:
      return panel.inputs == Inputs::bfloat16 ? linear_panel<RoundedBFloat16>(panel)
                                              : linear_panel<BFloat16>(panel);
    case glm::Weight::int8:
      return panel.inputs == Inputs::int8 ? linear_panel<Int8Int8>(panel)
                                          : linear_panel<Int8>(panel);
    default: return linear_groups(kind, panel);
  }
}

}  // namespace
