// Attention over bfloat16 caches with AVX512_BF16, whose dot products take pairs of elements: queries,
// keys, weights and values are paired along the dimension that is summed over. Keys and values are read
// straight from the cache, once per block of rows. A row's result does not depend on the other rows: its
// sums are accumulated pair by pair, starting at the first position.
#pragma once

#include "attention.hpp"
#include "blocks.hpp"
#include "query_rows.hpp"
#include "tile_cache.hpp"

namespace {

inline vec add_product(vec sums, ivec a, ivec b) {
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

inline ivec pair_of(const uint16_t* from) { return ivec{} + load_as<int32_t>(from); }

// Scores of R queries with NV tiles of positions, one in EVERY tiles; unless WHOLE, with the first `lanes`
// positions of one. With `prefetches`, prefetches the same number of bytes starting at `ahead`.
template <int R, int NV, bool WHOLE, Target TARGET, int EVERY = 1>
inline INLINE void pair_scores(const uint16_t* queries, int64_t padded, const uint16_t* keys,
                               int lanes, int64_t head_dim, const uint16_t* ahead, bool prefetches,
                               float* scores) {
  const int64_t ahead_step = prefetches ? 2 * glm::TILE : 0;
  vec sums[R][NV] = {};
  for (int64_t i = 0; i < head_dim; i += 2) {
    for (int v = 0; v < NV; ++v) prefetch_line<TARGET>(ahead + v * ahead_step);
    ahead += NV * ahead_step;
    ivec key[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      key[v] = paired(keys + (v * EVERY * head_dim + i) * glm::TILE, WHOLE ? glm::TILE : lanes, true);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const ivec query = pair_of(queries + r * padded + i);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = add_product(sums[r][v], key[v], query);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(scores + r * KEYS + v * EVERY * WIDTH, sums[r][v]);
}

// Adds the values of positions `first`, which is even, to `last` - 1 to R contexts: NV vectors of columns,
// of which `left` elements exist. For every two positions, prefetches `ahead_step` elements of `ahead`.
template <int R, int NV, bool WHOLE, Target TARGET>
inline INLINE void add_value_pairs(const uint16_t* weights, const uint16_t* values, int first,
                                   int last, int64_t head_dim, int64_t left, const uint16_t* ahead,
                                   int64_t ahead_step, float* contexts, int64_t padded) {
  constexpr int ELEMENTS = 2 * WIDTH;
  vec sums[R][NV];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[r][v] = load(contexts + r * padded + v * WIDTH);
  const auto add = [&](int s, auto second) INLINE {
    for (int64_t i = 0; i < ahead_step; i += ELEMENTS) prefetch_line<TARGET>(ahead + i);
    ahead += ahead_step;
    const uint16_t* from = values + s * head_dim;
    ivec value[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v += 2, from += ELEMENTS) {
      const int64_t there = left - v * WIDTH;
      const ivec a = WHOLE ? load_as<ivec>(from) : load_pairs(from, there);
      ivec b{};
      if (second) b = WHOLE ? load_as<ivec>(from + head_dim) : load_pairs(from + head_dim, there);
      value[v] = unpack_low(a, b), value[v + 1] = unpack_high(a, b);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const ivec weight = pair_of(weights + r * WEIGHTS + s);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = add_product(sums[r][v], value[v], weight);
    }
  };
  int s = first;
  for (; s + 2 <= last; s += 2) add(s, std::true_type());
  if (s < last) add(s, std::false_type());
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(contexts + r * padded + v * WIDTH, sums[r][v]);
}

// Scores and weights of R rows, starting at `row`.
template <int R, Target TARGET>
void weigh_pairs(QueryRows& rows, const RowsBlock& block, int row, bool prefetches) {
  constexpr int NV = 4;
  const int64_t head_dim = rows.a.head_dim, padded = rows.padded;
  const uint16_t* queries = rows.queries + row * padded;
  float* scores = rows.scores + row * KEYS;
  const int count = rows.most(row, row + R);
  const auto some = [&](int at, auto vectors, auto whole, int lanes) INLINE {
    pair_scores<R, vectors.value, whole.value, TARGET>(
        queries, padded, block.keys + at * head_dim, lanes, head_dim,
        block.prefetch.with_keys + at * head_dim, prefetches, scores + at);
  };
  const std::integral_constant<int, NV> most;
  const std::integral_constant<int, 1> one;
  int at = 0;
  // Zen 4: streams in the same page hamper the hardware prefetcher, so adjacent tiles are not read together.
  constexpr int EVERY = TARGET == L2 ? KEYS / (NV * WIDTH) : 1;
  if (EVERY > 1 && count == KEYS) {
    for (int tile = 0; tile < EVERY; ++tile)
      pair_scores<R, NV, true, TARGET, EVERY>(
          queries, padded, block.keys + tile * WIDTH * head_dim, WIDTH, head_dim,
          block.prefetch.with_keys + tile * NV * WIDTH * head_dim, prefetches, scores + tile * WIDTH);
    at = KEYS;
  }
  for (; at + NV * WIDTH <= count; at += NV * WIDTH) some(at, most, std::true_type(), WIDTH);
  for (; at + WIDTH <= count; at += WIDTH) some(at, one, std::true_type(), WIDTH);
  if (at < count) some(at, one, std::false_type(), count - at);
  if (prefetches) prefetch_during_softmax(block.prefetch);
  rows.weigh(row, row + R, (int)round_up(count, STEP), scores);
}

// Columns of R rows of contexts: first the positions that all rows see, then the others row by row.
template <int R, int NV, bool WHOLE, Target TARGET>
void add_columns(QueryRows& rows, const RowsBlock& block, int row, int64_t at, bool prefetches) {
  const int64_t head_dim = rows.a.head_dim, padded = rows.padded;
  const auto* weights = (const uint16_t*)(rows.scores + row * KEYS);
  const uint16_t* values = block.values + at;
  float* contexts = rows.contexts + row * padded + at;
  const int together = rows.least(row, row + R) & ~1;
  add_value_pairs<R, NV, WHOLE, TARGET>(weights, values, 0, together, head_dim, head_dim - at,
                                        block.prefetch.with_values, prefetches ? 2 * head_dim : 0,
                                        contexts, padded);
  for (int r = 0; r < R; ++r)
    if (rows.counts[row + r] > together)
      add_value_pairs<1, NV, WHOLE, TARGET>(weights + r * WEIGHTS, values, together,
                                            rows.counts[row + r], head_dim, head_dim - at, values, 0,
                                            contexts + r * padded, padded);
}

template <int R, Target TARGET>
void add_pair_block(QueryRows& rows, const RowsBlock& block, int row, bool prefetches) {
  constexpr int NV = 4;
  const int64_t head_dim = rows.a.head_dim;
  int64_t at = 0;
  for (; at + NV * WIDTH <= head_dim; at += NV * WIDTH)
    add_columns<R, NV, true, TARGET>(rows, block, row, at, prefetches && at == 0);
  for (; at < head_dim; at += STEP)
    add_columns<R, 2, false, TARGET>(rows, block, row, at, prefetches && at == 0);
}

template <Target TARGET>
void attend_to_pairs(const Attention& a) {
  static_assert(WIDTH == glm::TILE && STEP == 2 * WIDTH);
  const FlushSubnormals flushes;  // as `add_product` does
  QueryRows rows(a);
  const AttentionPrefetcher<uint16_t> ahead(a, a.head_dim);
  for (int64_t begin = 0; rows.see(begin); begin += KEYS) {
    const auto* keys = (const uint16_t*)a.keys + begin * a.head_dim;
    const auto* values = (const uint16_t*)a.values + begin * a.head_dim;
    const RowsBlock block{keys, values, ahead.of(begin)};
    // All rows use the keys before any uses the values, so that each stays in L1.
    for_row_blocks(a.count, [&](auto together, int row, bool is_last) {
      weigh_pairs<together.value, TARGET>(rows, block, row, is_last && block.prefetch.exists);
    });
    for_row_blocks(a.count, [&](auto together, int row, bool is_last) {
      add_pair_block<together.value, TARGET>(rows, block, row, is_last && block.prefetch.exists);
    });
  }
  rows.finish<true>();
}

void pair_attend(glm::Cache kind, const Attention& a) {
  if (kind != glm::Cache::bfloat16 || a.head_dim % 2 != 0) return attend(kind, a);
  // Not decided line by line, which takes 2 % longer.
  is_zen5() ? attend_to_pairs<L1>(a) : attend_to_pairs<L2>(a);
}

}  // namespace
