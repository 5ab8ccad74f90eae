// Scores of query rows with the keys of one head, and their streaming softmax over blocks of positions
// (Milakov and Gimelshein 2018). A row's result does not depend on the other rows.
#pragma once

#include <type_traits>

#include "attention_prefetch.hpp"
#include "blocks.hpp"
#include "cache.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::KEYS;
using glm::TILE;

// Register blocking: rows that share loaded keys and values, times vectors of positions or of a value.
#if defined(__AVX512F__)
constexpr int ROWS_PER_BLOCK = 6, VECTORS_PER_BLOCK = 4;
#elif defined(__AVX2__)
constexpr int ROWS_PER_BLOCK = 6, VECTORS_PER_BLOCK = 2;
#else
constexpr int ROWS_PER_BLOCK = 4, VECTORS_PER_BLOCK = 2;
#endif
// Up to three rows need more vectors at `avx2`, or there are too few independent sums to hide latency.
template <int R>
constexpr int MAX_VECTORS = WIDTH != 8 || R > 3 ? VECTORS_PER_BLOCK : R == 1 ? 8 : 4;
constexpr int TILE_VECTORS = TILE / WIDTH;
// Vectors for a partially visible tile.
constexpr int LAST_VECTORS = VECTORS_PER_BLOCK < TILE_VECTORS ? VECTORS_PER_BLOCK : TILE_VECTORS;

// Keys and values of one head, starting at the first position of a block. With int8, a tile is preceded by
// its scales, and a value by its scale.
template <class Element>
struct Block {
  static constexpr bool scaled = std::is_same<Element, int8_t>::value;
  static constexpr int scale = scaled ? glm::SCALE_BYTES : 0;
  const Element* keys;
  const Element* values;
  PrefetchTargets<Element> prefetch;
  int64_t row;  // elements of one position, including its scale

  const Element* tile(int64_t position) const { return keys + position * row + TILE * scale; }
  const Element* value(int64_t position) const { return values + position * row + scale; }
};

// Adds NV vectors operand(v), times factor(r) of each row, to the sums of R rows.
template <int R, int NV, class Operand, class Factor>
inline INLINE void add_products(vec (&sums)[R][NV], Operand operand, Factor factor) {
  // At `avx2`, registers can hold either all operands or all factors besides the sums.
  if constexpr (WIDTH == 8 && R <= NV) {
    vec factors[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) factors[r] = broadcast(factor(r));
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const vec one = operand(v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) sums[r][v] = multiply_add(one, factors[r], sums[r][v]);
    }
  } else {
    vec operands[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) operands[v] = operand(v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const vec one = broadcast(factor(r));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sums[r][v] = multiply_add(operands[v], one, sums[r][v]);
    }
  }
}

// Calls with_two(sums) for each pair of adjacent vectors of sums.
template <int R, int NV, class WithTwo>
inline INLINE void for_every_two(vec (&sums)[R][NV], WithTwo with_two) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v + 1 < NV; v += 2) with_two(sums[r] + v);
}

// Scores of R queries with NV vectors of positions, starting at `first`, of one in EVERY tiles; unless
// WHOLE, of their first `lanes` positions. With `prefetches`, also prefetches the same amount of the next
// values or keys.
template <int R, int NV, bool WHOLE, int EVERY = 1, class Element>
inline void some_scores(const float* const* queries, const Block<Element>& block, int first,
                        int lanes, int64_t head_dim, bool prefetches, float* scores) {
  const auto position_of = [&](int v) INLINE {
    return first + v / TILE_VECTORS * TILE * EVERY + v % TILE_VECTORS * WIDTH;
  };
  const Element* keys[NV];
  for (int v = 0; v < NV; ++v) {
    const int position = position_of(v);
    keys[v] = block.tile(position / TILE * TILE) + position % TILE;
  }
  const int begin = EVERY == 1 ? first : first / TILE * NV * WIDTH;
  LinesAhead ahead = block.prefetch.lines_with_keys(begin * block.row * (int64_t)sizeof(Element));
  if (!prefetches) ahead.step = 0;
  constexpr int64_t BYTES = NV * WIDTH * (int64_t)sizeof(Element);
  const float* query[R];
  for (int r = 0; r < R; ++r) query[r] = queries[r];
  vec sums[R][NV] = {};
  for (int64_t i = 0; i < head_dim; ++i) {
    // int8 keys are few bytes and take long to widen, so their prefetches may as well go to L1.
    ahead.prefetch<BYTES, Block<Element>::scaled ? L1 : MOST_IN_FLIGHT>();
    vec part[NV];
    if constexpr (!WHOLE) widen_first(keys[0] + i * TILE, lanes, part);
    const auto key = [&](int v) INLINE {
      if constexpr (!WHOLE) return part[v];
      if constexpr (NV > 1) return widen_vector(keys, i * TILE, v);
      return widened(keys[0] + i * TILE);
    };
    add_products(sums, key, [&](int r) INLINE { return query[r][i]; });
  }
  for_every_two(sums, [](vec* two) INLINE { merge_even_odd<Element>(two); });
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const int position = position_of(v);
    vec scale{};
    if (Block<Element>::scaled) {
      const auto* scales = (const float*)(block.keys + position / TILE * TILE * block.row);
      scale = load_first(scales + position % TILE, WHOLE ? WIDTH : count_of_lanes(lanes, v));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      store(scores + r * KEYS + position, Block<Element>::scaled ? sums[r][v] * scale : sums[r][v]);
  }
}

// Scores of R queries with positions `at` to `count` - 1 of a block: NV vectors at a time, halving NV for
// the remainder.
template <int R, int NV, class Element>
inline void rest_of_scores(const float* const* queries, const Block<Element>& block, int at, int count,
                           int64_t head_dim, bool prefetches, float* scores) {
  for (; at + NV * WIDTH <= count; at += NV * WIDTH)
    some_scores<R, NV, true>(queries, block, at, WIDTH, head_dim, prefetches, scores);
  if constexpr (NV > LAST_VECTORS) {
    rest_of_scores<R, NV / 2>(queries, block, at, count, head_dim, prefetches, scores);
  } else if (at < count) {
    some_scores<R, NV, false>(queries, block, at, count - at, head_dim, prefetches, scores);
  }
}

// Scores of R queries with the first `count` positions of a block.
template <int R, class Element>
inline void all_scores(const float* const* queries, const Block<Element>& block, int count,
                       int64_t head_dim, bool prefetches, float* scores) {
  constexpr int MOST = MAX_VECTORS<R>;
  // Streams in the same page hamper the hardware prefetcher, so adjacent tiles are not read together.
  constexpr int EVERY = HARDWARE_PREFETCH && R == 1 ? KEYS / (MOST * WIDTH) : 1;
  static_assert(EVERY == 1 || EVERY * MOST * WIDTH == KEYS, "some positions would be skipped");
  if (EVERY > 1 && count == KEYS) {
    for (int tile = 0; tile < EVERY; ++tile)
      some_scores<R, MOST, true, EVERY>(queries, block, tile * TILE, WIDTH, head_dim, prefetches,
                                        scores);
    return;
  }
  rest_of_scores<R, MOST>(queries, block, 0, count, head_dim, prefetches, scores);
}

// Replaces the first `counts` scores of each of R rows by weights exp(score - largest), and updates each
// row's largest score and sum of weights; earlier sums must be multiplied by `factors`.
template <int R>
void weigh(float* scores, const int* counts, float* largest, float* totals, float* factors) {
  constexpr float lowest = -__builtin_inff();
  float before[R];
  // First for all rows: each is a long dependency chain, and these overlap.
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * KEYS;
    const int end = (counts[r] + WIDTH - 1) / WIDTH * WIDTH;
    for (int i = counts[r]; i < end; ++i) row[i] = lowest;
    vec most = broadcast(largest[r]);
    for (int i = 0; i < end; i += WIDTH) most = larger(most, load(row + i));
    before[r] = largest[r];
    largest[r] = max_lane(most);
  }
  for (int r = 0; r < R; ++r) {
    factors[r] = exponential(broadcast(before[r] - largest[r]))[0];
    vec sums{};
    for (int i = 0; i < counts[r]; i += WIDTH) {
      const vec score = load(scores + r * KEYS + i), weight = exponential(score - largest[r]);
      const vec visible = (vec)((ivec)weight & (ivec)(score != broadcast(lowest)));
      store(scores + r * KEYS + i, visible);
      sums += visible;
    }
    totals[r] = totals[r] * factors[r] + sum(sums);
  }
}

}  // namespace
