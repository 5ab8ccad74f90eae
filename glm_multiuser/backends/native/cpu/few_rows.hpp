// Attention over bfloat16 caches for few rows, without tiles: repacking keys and values for tiles would
// take longer than the products, so they are read straight from the cache. Sums are rounded as TDPBF16PS
// rounds them, in the same order, so results have the same bits as with tiles.
#pragma once

#include "attention.hpp"
#include "query_rows.hpp"

namespace {

constexpr int FEW_QUERIES = 3;

// Scores of R queries with NV tiles of positions; unless WHOLE, with the first `lanes` positions of one.
// Prefetches the same number of bytes of `ahead`.
template <int R, int NV, bool WHOLE>
inline void few_scores(const float* queries, int64_t padded, const uint16_t* keys, int lanes,
                       int64_t head_dim, LinesAhead ahead, float* scores) {
  const uint16_t* tiles[NV];
  for (int v = 0; v < NV; ++v) tiles[v] = keys + v * head_dim * glm::TILE;
  vec sums[R][NV] = {};
  for (int64_t step = 0; step < head_dim; step += STEP) {
    vec pairs[2][R][NV] = {};
    const auto add = [&](int64_t i, int half) INLINE {
      vec key[NV];
      for (int v = 0; v < NV; ++v) {
        if constexpr (NV > 1) {
          key[v] = widen_vector(tiles, i * glm::TILE, v);
        } else {
          const uint16_t* from = keys + i * glm::TILE;
          key[v] = WHOLE ? widened(from) : widened_first(from, lanes);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vec query = broadcast(queries[r * padded + i]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          pairs[half][r][v] = fused(key[v], query, pairs[half][r][v]);
      }
    };
    const int64_t end = step + STEP < head_dim ? step + STEP : head_dim;
    int64_t i = step;
    for (; i + 2 <= end; i += 2) {
      ahead.prefetch<NV * 2 * glm::TILE * (int64_t)sizeof(uint16_t)>();
      add(i, 0);
      add(i + 1, 1);
    }
    if (i < end) add(i, 0);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) sums[r][v] += pairs[0][r][v] + pairs[1][r][v];
  }
  for_every_two(sums, [](vec* two) INLINE { merge_even_odd<uint16_t>(two); });
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(scores + r * KEYS + v * WIDTH, sums[r][v]);
}

// Adds the values of `count` positions to R contexts, NV vectors of them. For every position, prefetches
// `ahead_step` bytes of `ahead`.
template <int R, int NV>
inline void add_few(const float* weights, const uint16_t* values, int count, int64_t head_dim,
                    int lanes, LinesAhead ahead, int64_t ahead_step, float* contexts,
                    int64_t padded) {
  vec sums[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sums[r][v] = load(contexts + r * padded + v * WIDTH);
  for_every_two(sums, [](vec* two) INLINE { split_even_odd<uint16_t>(two); });
  for (int step = 0; step < count; step += STEP) {
    vec pairs[2][R][NV] = {};
    const auto add = [&](int s, int half) INLINE {
      ahead.prefetch_more(ahead_step);
      const uint16_t* from = values + s * head_dim;
      vec value[NV];
      for (int v = 0; v < NV; ++v) {
        if constexpr (NV > 1) {
          value[v] = widen_vector(from, v);
        } else {
          value[v] = lanes == WIDTH ? widened(from) : widened_first(from, lanes);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vec weight = broadcast(weights[r * KEYS + s]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          pairs[half][r][v] = fused(value[v], weight, pairs[half][r][v]);
      }
    };
    const int end = step + STEP < count ? step + STEP : count;
    int s = step;
    for (; s + 2 <= end; s += 2) {
      add(s, 0);
      add(s + 1, 1);
    }
    if (s < end) add(s, 0);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) sums[r][v] += pairs[0][r][v] + pairs[1][r][v];
  }
  for_every_two(sums, [](vec* two) INLINE { merge_even_odd<uint16_t>(two); });
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(contexts + r * padded + v * WIDTH, sums[r][v]);
}

// R rows, starting at `row`, that see the same positions of a block.
template <int R>
void take_few(QueryRows& rows, int row, const float* queries, const RowsBlock& block) {
  constexpr int NV = 4;  // sums in registers
  const int64_t head_dim = rows.a.head_dim, padded = rows.padded;
  const int64_t position_bytes = head_dim * (int64_t)sizeof(uint16_t);
  const int count = rows.counts[row];
  float *scores = rows.scores + row * KEYS, *contexts = rows.contexts + row * padded;
  queries += row * padded;
  {
    const FlushSubnormals flushes;
    const auto some = [&](int at, auto vectors, auto whole, int lanes) INLINE {
      few_scores<R, vectors.value, whole.value>(
          queries, padded, block.keys + at * head_dim, lanes, head_dim,
          block.prefetch.lines_with_keys(at * position_bytes), scores + at);
    };
    const std::integral_constant<int, NV> most;
    const std::integral_constant<int, 1> one;
    int at = 0;
    for (; at + NV * WIDTH <= count; at += NV * WIDTH) some(at, most, std::true_type(), WIDTH);
    for (; at + WIDTH <= count; at += WIDTH) some(at, one, std::true_type(), WIDTH);
    if (at < count) some(at, one, std::false_type(), count - at);
  }
  const int filled = (int)round_up(count, STEP);
  if (block.prefetch.exists) prefetch_during_softmax(block.prefetch);
  rows.weigh(row, row + R, filled, scores);
  for (int r = row; r < row + R; ++r)
    for (int i = filled - WIDTH; i >= 0; i -= WIDTH)  // backwards, because widened in place
      store(rows.scores + r * KEYS + i, widened((uint16_t*)(rows.scores + r * KEYS) + i));
  const FlushSubnormals flushes;
  const LinesAhead with_values = block.prefetch.lines_with_values(0);
  int64_t at = 0;
  for (; at + NV * WIDTH <= head_dim; at += NV * WIDTH)
    add_few<R, NV>(scores, block.values + at, count, head_dim, WIDTH, with_values,
                   at == 0 ? position_bytes : 0, contexts + at, padded);
  for (; at < head_dim; at += WIDTH) {
    const int lanes = head_dim - at < WIDTH ? (int)(head_dim - at) : WIDTH;
    add_few<R, 1>(scores, block.values + at, count, head_dim, lanes, with_values,
                  at == 0 ? position_bytes : 0, contexts + at, padded);
  }
}

// At most FEW_QUERIES rows.
void attend_few_rows(const Attention& a) {
  static_assert(WIDTH == glm::TILE);
  QueryRows rows(a);
  auto* queries = (float*)rows.rest;
  for (int64_t i = 0; i < a.count * rows.padded; ++i) queries[i] = from_bf16(rows.queries[i]);
  const AttentionPrefetcher<uint16_t> ahead(a, a.head_dim);
  for (int64_t begin = 0; rows.see(begin); begin += KEYS) {
    const auto* keys = (const uint16_t*)a.keys + begin * a.head_dim;
    const auto* values = (const uint16_t*)a.values + begin * a.head_dim;
    const RowsBlock block{keys, values, ahead.of(begin)};
    if (rows.least(0, a.count) == rows.most(0, a.count)) {
      with_rows<FEW_QUERIES>(a.count, [&](auto together) {
        take_few<together.value>(rows, 0, queries, block);
      });
    } else {
      for (int row = 0; row < a.count; ++row)
        if (rows.counts[row] > 0) take_few<1>(rows, row, queries, block);
    }
  }
  rows.finish<false>();
}

}  // namespace
