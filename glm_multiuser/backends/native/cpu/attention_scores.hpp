// Scores of query rows with the keys of one head, and the weights that a softmax makes of them, which
// streams over blocks of positions (Milakov and Gimelshein 2018). What a row gets does not depend on
// the rows beside it.
#pragma once

#include <type_traits>

#include "attention_ahead.hpp"
#include "blocks.hpp"
#include "cache.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::KEYS;
using glm::TILE;

// Rows that share what is read of keys and values, and vectors of positions, or of a value, whose
// sums are in registers together with theirs.
#if defined(__AVX512F__)
constexpr int TOGETHER = 6, SIDE_BY_SIDE = 4;
#elif defined(__AVX2__)
constexpr int TOGETHER = 6, SIDE_BY_SIDE = 2;
#else
constexpr int TOGETHER = 4, SIDE_BY_SIDE = 2;
#endif
// Of up to three rows there would be too few sums at `avx2`: each waits for its product before.
template <int R>
constexpr int MOST_SIDE_BY_SIDE = WIDTH != 8 || R > 3 ? SIDE_BY_SIDE : R == 1 ? 8 : 4;
constexpr int TILE_VECTORS = TILE / WIDTH;
// And of a tile that no row sees all of.
constexpr int LAST_SIDE_BY_SIDE = SIDE_BY_SIDE < TILE_VECTORS ? SIDE_BY_SIDE : TILE_VECTORS;

// Keys and values of one head, from the first position of a block on. With int8 the scales of a
// tile lie in front of it, and the scale of a value in front of that.
template <class Number>
struct Block {
  static constexpr bool scaled = std::is_same<Number, int8_t>::value;
  static constexpr int scale = scaled ? glm::SCALE_BYTES : 0;
  const Number* keys;
  const Number* values;
  Wanted<Number> wanted;  // to be asked for meanwhile
  int64_t row;            // numbers of one position, its scale among them

  const Number* tile(int64_t position) const { return keys + position * row + TILE * scale; }
  const Number* value(int64_t position) const { return values + position * row + scale; }
};

// Adds NV vectors, number(v), times a factor of each row, to the sums of R rows.
template <int R, int NV, class Number, class Factor>
inline INLINE void add_products(vec (&sums)[R][NV], Number number, Factor factor) {
  // At `avx2` there are registers for all numbers or for all factors, beside the sums.
  if constexpr (WIDTH == 8 && R <= NV) {
    vec factors[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) factors[r] = all(factor(r));
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const vec one = number(v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) sums[r][v] = multiply_add(one, factors[r], sums[r][v]);
    }
  } else {
    vec numbers[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) numbers[v] = number(v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const vec one = all(factor(r));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sums[r][v] = multiply_add(numbers[v], one, sums[r][v]);
    }
  }
}

// Calls with_two(sums) for every two vectors of sums that lie side by side.
template <int R, int NV, class WithTwo>
inline INLINE void for_every_two(vec (&sums)[R][NV], WithTwo with_two) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v + 1 < NV; v += 2) with_two(sums[r] + v);
}

// Scores of R queries with NV vectors of positions of every so many tiles, from `first` on; if they are not
// WHOLE, with their first `lanes`. With `fetches` as much of what is wanted next is asked for.
template <int R, int NV, bool WHOLE, int EVERY = 1, class Number>
inline void some_scores(const float* const* queries, const Block<Number>& block, int first,
                        int lanes, int64_t head_dim, bool fetches, float* scores) {
  const auto position_of = [&](int v) INLINE {
    return first + v / TILE_VECTORS * TILE * EVERY + v % TILE_VECTORS * WIDTH;
  };
  const Number* keys[NV];
  for (int v = 0; v < NV; ++v) {
    const int position = position_of(v);
    keys[v] = block.tile(position / TILE * TILE) + position % TILE;
  }
  const int begin = EVERY == 1 ? first : first / TILE * NV * WIDTH;
  const Number* ahead = fetches ? block.wanted.with_keys + begin * block.row : keys[0];
  const int64_t step = fetches ? WIDTH : 0;
  const float* query[R];
  for (int r = 0; r < R; ++r) query[r] = queries[r];
  vec sums[R][NV] = {};
  for (int64_t i = 0; i < head_dim; ++i) {
    // int8 numbers are few bytes that take long to widen: those may as well be nearer.
    for (int v = 0; v < NV; v += TILE_VECTORS)
      ask_for_line<Block<Number>::scaled ? 1 : 2>(ahead + v * step);
    ahead += NV * step;
    vec part[NV];
    if constexpr (!WHOLE) widen_first(keys[0] + i * TILE, lanes, part);
    const auto key = [&](int v) INLINE {
      if constexpr (!WHOLE) return part[v];
      if constexpr (NV > 1) return one_of_many(keys[lies_at<Number>(v)] + i * TILE, v);
      return widened(keys[0] + i * TILE);
    };
    add_products(sums, key, [&](int r) INLINE { return query[r][i]; });
  }
  for_every_two(sums, [](vec* two) INLINE { put_together<Number>(two); });
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const int position = position_of(v);
    vec scale{};
    if (Block<Number>::scaled) {
      const auto* scales = (const float*)(block.keys + position / TILE * TILE * block.row);
      scale = load_first(scales + position % TILE, WHOLE ? WIDTH : count_of_lanes(lanes, v));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      store(scores + r * KEYS + position, Block<Number>::scaled ? sums[r][v] * scale : sums[r][v]);
  }
}

// Scores of R queries with the positions of a block from `at` up to `count`: NV vectors at a time, and
// then half as many.
template <int R, int NV, class Number>
inline void rest_of_scores(const float* const* queries, const Block<Number>& block, int at, int count,
                           int64_t head_dim, bool fetches, float* scores) {
  for (; at + NV * WIDTH <= count; at += NV * WIDTH)
    some_scores<R, NV, true>(queries, block, at, WIDTH, head_dim, fetches, scores);
  if constexpr (NV > LAST_SIDE_BY_SIDE) {
    rest_of_scores<R, NV / 2>(queries, block, at, count, head_dim, fetches, scores);
  } else if (at < count) {
    some_scores<R, NV, false>(queries, block, at, count - at, head_dim, fetches, scores);
  }
}

// The same with the first `count` positions.
template <int R, class Number>
inline void all_scores(const float* const* queries, const Block<Number>& block, int count,
                       int64_t head_dim, bool fetches, float* scores) {
  constexpr int MOST = MOST_SIDE_BY_SIDE<R>;
  // A processor that sees what comes next sees less of it where tiles side by side share a page.
  constexpr int EVERY = FORESEES && R == 1 ? KEYS / (MOST * WIDTH) : 1;
  static_assert(EVERY == 1 || EVERY * MOST * WIDTH == KEYS, "a position would be left out");
  if (EVERY > 1 && count == KEYS) {
    for (int tile = 0; tile < EVERY; ++tile)
      some_scores<R, MOST, true, EVERY>(queries, block, tile * TILE, WIDTH, head_dim, fetches,
                                        scores);
    return;
  }
  rest_of_scores<R, MOST>(queries, block, 0, count, head_dim, fetches, scores);
}

// Turns scores of R rows, the first `counts` of each, into weights exp(score - largest), and corrects
// each row's largest score and sum; `factors` are for what was summed up before.
template <int R>
void weigh(float* scores, const int* counts, float* largest, float* totals, float* factors) {
  constexpr float lowest = -__builtin_inff();
  float before[R];
  // One row does not wait for the next: each goes through long chains.
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * KEYS;
    const int end = (counts[r] + WIDTH - 1) / WIDTH * WIDTH;
    for (int i = counts[r]; i < end; ++i) row[i] = lowest;
    vec most = all(largest[r]);
    for (int i = 0; i < end; i += WIDTH) most = larger(most, load(row + i));
    before[r] = largest[r];
    largest[r] = largest_of(most);
  }
  for (int r = 0; r < R; ++r) {
    factors[r] = exponential(all(before[r] - largest[r]))[0];
    vec sums{};
    for (int i = 0; i < counts[r]; i += WIDTH) {
      const vec score = load(scores + r * KEYS + i), weight = exponential(score - largest[r]);
      const vec visible = (vec)((ivec)weight & (ivec)(score != all(lowest)));
      store(scores + r * KEYS + i, visible);
      sums += visible;
    }
    totals[r] = totals[r] * factors[r] + sum(sums);
  }
}

}  // namespace
