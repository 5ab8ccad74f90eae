// Query rows of one user over that user's own keys and values, block by block of positions (Dao et
// al. 2022). Positions behind what a row may see are never read. What a row gets does not depend on
// the rows beside it.
#pragma once

#include <type_traits>

#include "attention_scores.hpp"
#include "blocks.hpp"
#include "cache.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Attention;

// Adds weight * value to R contexts over the positions from `first` up to `last`, NV vectors from
// number `at` of a value on. With `fetches` as much of what is wanted next is asked for.
template <int R, int NV, class Number>
inline void add_values(const float* weights, const Block<Number>& block, int first, int last,
                       int64_t at, bool fetches, float* const* contexts, const float* factors,
                       int lanes) {
  const char* ahead = (const char*)(block.wanted.with_values + first * block.row);
  const int64_t ahead_step = fetches ? block.row * (int64_t)sizeof(Number) : 0;
  vec sums[R][NV];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      sums[r][v] = load(contexts[r] + v * WIDTH) * factors[r];
  for_every_two(sums, [](vec* two) INLINE { take_apart<Number>(two); });
  for (int s = first; s < last; ++s) {
    for (int64_t i = 0; i < ahead_step; i += 64) ask_for_line<2>(ahead + i);
    ahead += ahead_step;
    const Number* from = block.value(s) + at;
    float scale = 1.0f;
    if (Block<Number>::scaled) std::memcpy(&scale, block.values + s * block.row, sizeof scale);
    const auto weight = [&](int r) INLINE {
      const float as_it_is = weights[r * KEYS + s];
      return Block<Number>::scaled ? as_it_is * scale : as_it_is;
    };
    const auto number = [&](int v) INLINE {
      if constexpr (NV > 1) return one_of_many(from + lies_at<Number>(v) * WIDTH, v);
      return lanes == WIDTH ? widened(from) : widened_first(from, lanes);
    };
    add_products(sums, number, weight);
  }
  for_every_two(sums, [](vec* two) INLINE { put_together<Number>(two); });
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(contexts[r] + v * WIDTH, sums[r][v]);
}

// The same where some contexts see more positions than others: no row is to meet a value that it
// does not see, not even with weight 0, because the value may be infinite.
template <int R, int NV, class Number>
inline void add_visible(const float* weights, const Block<Number>& block, const int* counts,
                        int least, int64_t at, bool fetches, float* const* contexts,
                        const float* factors, int lanes) {
  add_values<R, NV>(weights, block, 0, least, at, fetches, contexts, factors, lanes);
  const float as_it_is = 1.0f;
  for (int r = 0; r < R; ++r)
    if (counts[r] > least)
      add_values<1, NV>(weights + r * KEYS, block, least, counts[r], at, false, contexts + r,
                        &as_it_is, lanes);
}

// Rows, and what they have got from the blocks of positions so far.
struct State {
  float* scores;    // [ROWS, KEYS], then weights; of this block
  float* factors;   // for what was summed up before this block
  float* largest;
  float* total;
  float* contexts;  // [ROWS, padded]
  int64_t padded;   // head_dim, rounded up to whole vectors
  int counts[glm::ROWS];  // positions of this block that a row sees
};

// R rows of scores, and of weights.
template <int R, class Number>
void weigh_block(const Attention& a, const Block<Number>& block, State& state, int row,
                 bool fetches) {
  const int* counts = state.counts + row;
  int most = 0;
  for (int r = 0; r < R; ++r) most = counts[r] > most ? counts[r] : most;
  float* scores = state.scores + row * KEYS;
  all_scores<R>(a.rows + row, block, most, a.head_dim, fetches, scores);
  weigh<R>(scores, counts, state.largest + row, state.total + row, state.factors + row);
}

// R rows of values.
template <int R, class Number>
void add_block(const Attention& a, const Block<Number>& block, State& state, int row,
               bool fetches) {
  const int* counts = state.counts + row;
  int least = KEYS;
  for (int r = 0; r < R; ++r) least = counts[r] < least ? counts[r] : least;
  const float *weights = state.scores + row * KEYS, *factors = state.factors + row;
  float* contexts[R];
  int64_t at = 0;
  auto move = [&] {
    for (int r = 0; r < R; ++r) contexts[r] = state.contexts + (row + r) * state.padded + at;
  };
  constexpr int MOST = MOST_SIDE_BY_SIDE<R>;
  for (; at + MOST * WIDTH <= a.head_dim; at += MOST * WIDTH) {
    move();
    add_visible<R, MOST>(weights, block, counts, least, at, fetches && at == 0, contexts, factors,
                         WIDTH);
  }
  for (; at < a.head_dim; at += WIDTH) {
    move();
    const int lanes = a.head_dim - at < WIDTH ? (int)(a.head_dim - at) : WIDTH;
    add_visible<R, 1>(weights, block, counts, least, at, fetches && at == 0, contexts, factors,
                      lanes);
  }
}

// Calls work(R, row, is_last), R a constant, for one block of rows after the other. They are of about
// equal height: the last one should not be a low and slow one.
template <class Work>
void for_row_blocks(int count, Work work) {
  const int blocks = (count + TOGETHER - 1) / TOGETHER;
  for (int number = 0; number < blocks; ++number) {
    const int row = count * number / blocks, next = count * (number + 1) / blocks;
    with_rows<TOGETHER>(next - row, [&](auto rows) { work(rows, row, number + 1 == blocks); });
  }
}

template <class Number>
void attend_to(const Attention& a) {
  State state;
  state.padded = (a.head_dim + WIDTH - 1) / WIDTH * WIDTH;
  state.scores = a.scratch;
  state.factors = state.scores + glm::ROWS * KEYS;
  state.largest = state.factors + glm::ROWS;
  state.total = state.largest + glm::ROWS;
  state.contexts = state.total + glm::ROWS;
  for (int row = 0; row < a.count; ++row) {
    state.largest[row] = -__builtin_inff();
    state.total[row] = 0.0f;
    std::memset(state.contexts + row * state.padded, 0, sizeof(float) * state.padded);
  }
  const int64_t row_size = a.head_dim + Block<Number>::scale;
  const AttentionAhead<Number> ahead(a, row_size);
  for (int64_t begin = 0; begin < ahead.most; begin += KEYS) {
    const auto* keys = (const Number*)a.keys + begin * row_size;
    const auto* values = (const Number*)a.values + begin * row_size;
    const Block<Number> block{keys, values, ahead.of(begin), row_size};
    for (int row = 0; row < a.count; ++row) {
      const int64_t rest = a.visible[row] - begin;
      state.counts[row] = rest < 0 ? 0 : rest < KEYS ? (int)rest : KEYS;
    }
    // All rows with the keys, which stay in the cache of the first level, and then with the values.
    for_row_blocks(a.count, [&](auto rows, int row, bool is_last) {
      weigh_block<rows.value>(a, block, state, row, is_last && block.wanted.exists);
    });
    for_row_blocks(a.count, [&](auto rows, int row, bool is_last) {
      add_block<rows.value>(a, block, state, row, is_last && block.wanted.exists);
    });
  }
  for (int row = 0; row < a.count; ++row) {
    const float* context = state.contexts + row * state.padded;
    for (int64_t i = 0; i < a.head_dim; ++i) a.rows[row][i] = context[i] / state.total[row];
  }
}

// Their scores with a block of keys stay in the nearest caches.
int query_rows(glm::Cache) { return 64; }

void attend(glm::Cache kind, const Attention& a) {
  switch (kind) {
    case glm::Cache::float32: return attend_to<float>(a);
    case glm::Cache::bfloat16: return attend_to<uint16_t>(a);
    case glm::Cache::int8: return attend_to<int8_t>(a);
  }
}

}  // namespace
