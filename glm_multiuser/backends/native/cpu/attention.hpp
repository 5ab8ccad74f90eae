// Query rows of one user over that user's own keys and values, with a softmax that streams over
// blocks of positions (Milakov and Gimelshein 2018; Dao et al. 2022). Positions behind what a row
// may see are never read. What a row gets does not depend on the rows beside it.
#pragma once

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Attention;
using glm::KEYS;
using glm::TILE;

constexpr int TOGETHER = 4;  // rows that share what is read of keys and values
constexpr int TILE_VECTORS = TILE / WIDTH;
constexpr int VALUE_VECTORS = WIDTH == 16 ? 4 : 2;

// Scores of R queries with one tile of keys, of which the first `count` exist. Meanwhile the values
// of the same positions come in: they are as many bytes, and wanted next.
template <int R>
inline void tile_scores(const float* const* query, const float* tile, const float* values,
                        int count, int64_t head_dim, float* scores) {
  vec sums[R][TILE_VECTORS] = {};
  for (int64_t i = 0; i < head_dim; ++i) {
    __builtin_prefetch(values + i * TILE, 0, 3);
    vec key[TILE_VECTORS];
    if (count == TILE) {
      for (int v = 0; v < TILE_VECTORS; ++v) key[v] = load(tile + i * TILE + v * WIDTH);
    } else {
      for (int v = 0; v < TILE_VECTORS; ++v) {
        const int rest = count - v * WIDTH;
        const int lanes = rest < 0 ? 0 : rest < WIDTH ? rest : WIDTH;
        key[v] = load_first(tile + i * TILE + v * WIDTH, lanes);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < TILE_VECTORS; ++v) sums[r][v] += key[v] * all(query[r][i]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < TILE_VECTORS; ++v) store(scores + r * KEYS + v * WIDTH, sums[r][v]);
}

// Turns the first `count` scores into weights exp(score - largest), zeros behind them, and corrects
// the row's largest score and sum. Returns the factor for what was summed up before.
inline float weigh(float* scores, int count, float& largest, float& total) {
  constexpr float lowest = -__builtin_inff();
  for (int i = count; i < KEYS; ++i) scores[i] = lowest;
  vec most = all(largest);
  for (int i = 0; i < KEYS; i += WIDTH) most = larger(load(scores + i), most);
  float now = most[0];
  for (int i = 1; i < WIDTH; ++i) now = most[i] > now || most[i] != most[i] ? most[i] : now;
  const float factor = exponential(all(largest - now))[0];
  vec sums{};
  for (int i = 0; i < KEYS; i += WIDTH) {
    const vec weight = exponential(load(scores + i) - now);
    const ivec exists = (ivec)(load(scores + i) != all(lowest));
    store(scores + i, (vec)((ivec)weight & exists));
    sums += load(scores + i);
  }
  total = total * factor + sum(sums);
  largest = now;
  return factor;
}

// Adds weight * value over `count` positions to R contexts, NV vectors wide.
template <int R, int NV>
inline void add_values(const float* weights, const float* values, int count, int64_t head_dim,
                       float* const* contexts, const float* factors, int lanes) {
  vec sums[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sums[r][v] = load(contexts[r] + v * WIDTH) * factors[r];
  for (int s = 0; s < count; ++s) {
    vec value[NV];
    for (int v = 0; v < NV; ++v)
      value[v] = lanes == WIDTH ? load(values + s * head_dim + v * WIDTH)
                                : load_first(values + s * head_dim + v * WIDTH, lanes);
    for (int r = 0; r < R; ++r) {
      const vec weight = all(weights[r * KEYS + s]);
      for (int v = 0; v < NV; ++v) sums[r][v] += value[v] * weight;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(contexts[r] + v * WIDTH, sums[r][v]);
}

// The same where some contexts see more positions than others: no row is to meet a value that it
// does not see, not even with weight 0, because the value may be infinite.
template <int R, int NV>
inline void add_visible(const float* weights, const float* values, const int* counts, int least,
                        int64_t head_dim, float* const* contexts, const float* factors,
                        int lanes) {
  add_values<R, NV>(weights, values, least, head_dim, contexts, factors, lanes);
  const float as_it_is = 1.0f;
  for (int r = 0; r < R; ++r)
    if (counts[r] > least)
      add_values<1, NV>(weights + r * KEYS + least, values + least * head_dim, counts[r] - least,
                        head_dim, contexts + r, &as_it_is, lanes);
}

// Where the state of a row is kept between two blocks of positions.
struct State {
  float* largest;
  float* total;
  float* contexts;  // [ROWS, padded]
  int64_t padded;   // head_dim, rounded up to whole vectors
};

template <int R>
void block_of_positions(const Attention& a, const State& state, int row, int64_t begin,
                        float* scores) {
  int counts[R];
  int most = 0, least = KEYS;
  for (int r = 0; r < R; ++r) {
    const int64_t rest = a.visible[row + r] - begin;
    counts[r] = rest < 0 ? 0 : rest < KEYS ? (int)rest : KEYS;
    most = counts[r] > most ? counts[r] : most;
    least = counts[r] < least ? counts[r] : least;
  }
  if (most == 0) return;
  for (int first = 0; first < most; first += TILE) {
    const float* tile = a.keys + (begin + first) * a.head_dim;
    const int count = most - first < TILE ? most - first : TILE;
    const float* values = a.values + (begin + first) * a.head_dim;
    tile_scores<R>(a.rows + row, tile, values, count, a.head_dim, scores + first);
  }
  float factors[R];
  float* contexts[R];
  for (int r = 0; r < R; ++r) {
    float* state_total = state.total + row + r;
    factors[r] = weigh(scores + r * KEYS, counts[r], state.largest[row + r], *state_total);
  }
  int64_t at = 0;
  const float* values = a.values + begin * a.head_dim;
  auto move = [&] {
    for (int r = 0; r < R; ++r) contexts[r] = state.contexts + (row + r) * state.padded + at;
  };
  for (; at + VALUE_VECTORS * WIDTH <= a.head_dim; at += VALUE_VECTORS * WIDTH) {
    move();
    add_visible<R, VALUE_VECTORS>(scores, values + at, counts, least, a.head_dim, contexts, factors,
                                  WIDTH);
  }
  for (; at < a.head_dim; at += WIDTH) {
    move();
    const int lanes = a.head_dim - at < WIDTH ? (int)(a.head_dim - at) : WIDTH;
    add_visible<R, 1>(scores, values + at, counts, least, a.head_dim, contexts, factors, lanes);
  }
}

void attend(const Attention& a) {
  State state;
  state.padded = (a.head_dim + WIDTH - 1) / WIDTH * WIDTH;
  float* scores = a.scratch;
  state.largest = scores + TOGETHER * KEYS;
  state.total = state.largest + glm::ROWS;
  state.contexts = state.total + glm::ROWS;
  int64_t most = 0;
  for (int row = 0; row < a.count; ++row) {
    state.largest[row] = -__builtin_inff();
    state.total[row] = 0.0f;
    std::memset(state.contexts + row * state.padded, 0, sizeof(float) * state.padded);
    most = a.visible[row] > most ? a.visible[row] : most;
  }
  for (int64_t begin = 0; begin < most; begin += KEYS) {
    int row = 0;
    for (; row + TOGETHER <= a.count; row += TOGETHER)
      block_of_positions<TOGETHER>(a, state, row, begin, scores);
    for (; row < a.count; ++row) block_of_positions<1>(a, state, row, begin, scores);
  }
  for (int row = 0; row < a.count; ++row) {
    const float* context = state.contexts + row * state.padded;
    for (int64_t i = 0; i < a.head_dim; ++i) a.rows[row][i] = context[i] / state.total[row];
  }
}

}  // namespace
