// Attention of one user's query rows over that user's keys and values, in blocks of positions (Dao et al.
// 2022). A row never reads positions that it may not see, and its result does not depend on the other rows.
#pragma once

#include <type_traits>

#include "attention_scores.hpp"
#include "blocks.hpp"
#include "cache.hpp"
#include "level.hpp"
#include "segments.hpp"
#include "vector.hpp"

namespace {

using glm::Attention;

// Adds weight * value to R contexts over positions `first` to `last` - 1: NV vectors starting at element
// `at` of a value. With `prefetches`, also prefetches the same amount of the next values or keys.
template <int R, int NV, class Element>
inline void add_values(const float* weights, const Block<Element>& block, int first, int last,
                       int64_t at, bool prefetches, float* const* contexts, const float* factors,
                       int lanes) {
  const int64_t bytes = block.row * (int64_t)sizeof(Element);
  LinesAhead ahead = block.prefetch.lines_with_values(first * bytes);
  vec sums[R][NV];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      sums[r][v] = load(contexts[r] + v * WIDTH) * factors[r];
  for_every_two(sums, [](vec* two) INLINE { split_even_odd<Element>(two); });
  for (int s = first; s < last; ++s) {
    if (prefetches) ahead.prefetch_more(bytes);
    const Element* from = block.value(s) + at;
    float scale = 1.0f;
    if (Block<Element>::scaled) std::memcpy(&scale, block.values + s * block.row, sizeof scale);
    const auto weight = [&](int r) INLINE {
      const float unscaled = weights[r * KEYS + s];
      return Block<Element>::scaled ? unscaled * scale : unscaled;
    };
    const auto value = [&](int v) INLINE {
      if constexpr (NV > 1) return widen_vector(from, v);
      return lanes == WIDTH ? widened(from) : widened_first(from, lanes);
    };
    add_products(sums, value, weight);
  }
  for_every_two(sums, [](vec* two) INLINE { merge_even_odd<Element>(two); });
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(contexts[r] + v * WIDTH, sums[r][v]);
}

// The same where some rows see more positions than others. Values that a row does not see must not enter
// its sum even with weight 0, because they may not be finite.
template <int R, int NV, class Element>
inline void add_visible(const float* weights, const Block<Element>& block, const int* counts,
                        int least, int64_t at, bool prefetches, float* const* contexts,
                        const float* factors, int lanes) {
  add_values<R, NV>(weights, block, 0, least, at, prefetches, contexts, factors, lanes);
  const float one = 1.0f;
  for (int r = 0; r < R; ++r)
    if (counts[r] > least)
      add_values<1, NV>(weights + r * KEYS, block, least, counts[r], at, false, contexts + r,
                        &one, lanes);
}

// State of the streaming softmax after some blocks of a segment.
struct State {
  float* scores;    // [ROWS, KEYS] of this block, replaced by weights
  float* factors;   // by which earlier sums are rescaled
  float* largest;
  float* total;
  float* contexts;  // [ROWS, padded]
  int64_t padded;   // head_dim, rounded up to whole vectors
  int counts[glm::ROWS];  // positions of this block that a row sees
};

struct SumOf {
  const State& state;
  SoftmaxSum operator()(int row) const { return {state.largest[row], state.total[row]}; }
};

// Of rows that see some of the segment.
void begin_segment(const Attention& a, State& state, int64_t begin) {
  for (int row = 0; row < a.count; ++row) {
    if (a.visible[row] <= begin) continue;
    state.largest[row] = -__builtin_inff();
    state.total[row] = 0.0f;
    std::memset(state.contexts + row * state.padded, 0, sizeof(float) * state.padded);
  }
}

// Scores and weights of R rows.
template <int R, class Element>
void weigh_block(const Attention& a, const Block<Element>& block, State& state, int row,
                 bool prefetches) {
  const int* counts = state.counts + row;
  int most = 0;
  for (int r = 0; r < R; ++r) most = counts[r] > most ? counts[r] : most;
  float* scores = state.scores + row * KEYS;
  all_scores<R>(a.queries + row, block, most, a.head_dim, prefetches, scores);
  if (prefetches) prefetch_during_softmax(block.prefetch);
  weigh<R>(scores, counts, state.largest + row, state.total + row, state.factors + row);
}

// Adds the values of a block to the contexts of R rows.
template <int R, class Element>
void add_block(const Attention& a, const Block<Element>& block, State& state, int row,
               bool prefetches) {
  const int* counts = state.counts + row;
  int least = KEYS;
  for (int r = 0; r < R; ++r) least = counts[r] < least ? counts[r] : least;
  const float *weights = state.scores + row * KEYS, *factors = state.factors + row;
  float* contexts[R];
  int64_t at = 0;
  auto move = [&] {
    for (int r = 0; r < R; ++r) contexts[r] = state.contexts + (row + r) * state.padded + at;
  };
  constexpr int MOST = MAX_VECTORS<R>;
  for (; at + MOST * WIDTH <= a.head_dim; at += MOST * WIDTH) {
    move();
    add_visible<R, MOST>(weights, block, counts, least, at, prefetches && at == 0, contexts, factors,
                         WIDTH);
  }
  for (; at < a.head_dim; at += WIDTH) {
    move();
    const int lanes = a.head_dim - at < WIDTH ? (int)(a.head_dim - at) : WIDTH;
    add_visible<R, 1>(weights, block, counts, least, at, prefetches && at == 0, contexts, factors,
                      lanes);
  }
}

// Calls work(R, row, is_last) for each block of R rows, R being a compile-time constant. Rows are divided
// evenly: a small last block would be inefficient.
template <class Work>
void for_row_blocks(int count, Work work) {
  const int blocks = (count + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
  for (int block = 0; block < blocks; ++block) {
    const int row = count * block / blocks, next = count * (block + 1) / blocks;
    with_rows<ROWS_PER_BLOCK>(next - row, [&](auto rows) { work(rows, row, block + 1 == blocks); });
  }
}

template <class Element>
void attend_to(const Attention& a) {
  State state;
  state.padded = (a.head_dim + WIDTH - 1) / WIDTH * WIDTH;
  state.scores = a.scratch;
  state.factors = state.scores + glm::ROWS * KEYS;
  state.largest = state.factors + glm::ROWS;
  state.total = state.largest + glm::ROWS;
  state.contexts = state.total + glm::ROWS;
  Segments segments(a, state.contexts, state.contexts + glm::ROWS * state.padded, state.padded);
  begin_segment(a, state, 0);
  const int64_t row_size = a.head_dim + Block<Element>::scale;
  const AttentionPrefetcher<Element> ahead(a, row_size);
  for (int64_t begin = 0; begin < ahead.most; begin += KEYS) {
    if (begins_later_segment(begin)) {
      segments.merge(begin, SumOf{state});
      begin_segment(a, state, begin);
    }
    const auto* keys = (const Element*)a.keys + begin * row_size;
    const auto* values = (const Element*)a.values + begin * row_size;
    const Block<Element> block{keys, values, ahead.of(begin), row_size};
    for (int row = 0; row < a.count; ++row) {
      const int64_t rest = a.visible[row] - begin;
      state.counts[row] = rest < 0 ? 0 : rest < KEYS ? (int)rest : KEYS;
    }
    // All rows use the keys before any uses the values, so that each stays in L1.
    for_row_blocks(a.count, [&](auto rows, int row, bool is_last) {
      weigh_block<rows.value>(a, block, state, row, is_last && block.prefetch.exists);
    });
    for_row_blocks(a.count, [&](auto rows, int row, bool is_last) {
      add_block<rows.value>(a, block, state, row, is_last && block.prefetch.exists);
    });
  }
  segments.finish(ahead.most, SumOf{state});
  for (int row = 0; row < a.count; ++row) {
    const float* context = segments.context(row);
    const float total = segments.needs_division(row) ? state.total[row] : 1.0f;
    for (int64_t i = 0; i < a.head_dim; ++i) a.contexts[row][i] = context[i] / total;
  }
}

// With this many, the scores of a block stay in L1 or L2.
int query_rows(glm::Cache) { return 64; }

void attend(glm::Cache kind, const Attention& a) {
  switch (kind) {
    case glm::Cache::float32: return attend_to<float>(a);
    case glm::Cache::bfloat16: return attend_to<uint16_t>(a);
    case glm::Cache::int8: return attend_to<int8_t>(a);
  }
}

}  // namespace
