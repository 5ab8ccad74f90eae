// Query rows of one user and one head of a bfloat16 cache, and the state of their streaming softmax.
#pragma once

#include <algorithm>

#include "attention_prefetch.hpp"
#include "instructions.hpp"
#include "segments.hpp"
#include "tile_softmax.hpp"

namespace {

using glm::Attention;
using glm::KEYS;

constexpr float LOG2_E = 1.4426950408889634f;

struct RowsBlock {
  const uint16_t *keys, *values;
  PrefetchTargets<uint16_t> prefetch;
};

// Stride between the weights of two rows, in elements.
constexpr int WEIGHTS = KEYS * sizeof(float) / sizeof(uint16_t);

struct QueryRows {
  const Attention& a;
  const int64_t padded;         // head_dim, rounded up to whole steps
  Segments segments;
  float* scores;                // [ROWS, KEYS], base 2; replaced by weights
  float* contexts;              // [ROWS, padded]
  uint16_t* queries;            // [ROWS, padded]
  char* rest;                   // unused scratch memory
  Softmax softmax[glm::ROWS];
  int counts[glm::ROWS];        // positions of this block that a row sees

  explicit QueryRows(const Attention& a)
      : a(a),
        padded(round_up(a.head_dim, STEP)),
        segments(a, contexts_in(a.scratch), contexts_in(a.scratch) + glm::ROWS * padded, padded) {
    scores = a.scratch;
    contexts = contexts_in(a.scratch);
    queries = (uint16_t*)(contexts + 2 * glm::ROWS * padded);
    rest = (char*)(queries + glm::ROWS * padded);
    std::memset(contexts, 0, sizeof(float) * a.count * padded);
    for (int row = 0; row < a.count; ++row)
      round_row(a.queries[row], LOG2_E, a.head_dim, padded, queries + row * padded);
  }

  // Moves to the block starting at `begin`; returns whether any row sees some of it.
  bool see(int64_t begin) {
    for (int row = 0; row < a.count; ++row) {
      const int64_t left = a.visible[row] - begin;
      counts[row] = left < 0 ? 0 : left < KEYS ? (int)left : KEYS;
    }
    if (most(0, a.count) == 0) return false;
    if (begins_later_segment(begin)) begin_segment(begin);
    return true;
  }

  int least(int first, int last) const {
    int found = KEYS;
    for (int row = first; row < last; ++row) found = counts[row] < found ? counts[row] : found;
    return found;
  }

  int most(int first, int last) const {
    int found = 0;
    for (int row = first; row < last; ++row) found = counts[row] > found ? counts[row] : found;
    return found;
  }

  // Replaces the scores of rows `first` to `last` - 1 by weights, zero-padded to `filled`. A row's weights
  // start where its scores did.
  void weigh(int first, int last, int filled, float* scores) {
    // First the largest scores of all rows: each is a long dependency chain, and these overlap.
    float factors[glm::ROWS];
    for (int row = first; row < last; ++row)
      factors[row] = raise_largest(scores + (row - first) * KEYS, counts[row], softmax[row]);
    for (int row = first; row < last; ++row) {
      const float factor = factors[row];
      float* own = scores + (row - first) * KEYS;
      weigh_row(own, counts[row], filled, factor, softmax[row], (uint16_t*)own);
      if (factor == 1.0f) continue;
      float* context = contexts + row * padded;
      for (int64_t i = 0; i < padded; i += WIDTH) store(context + i, load(context + i) * factor);
    }
  }

  // Stores the contexts, whose columns are permuted if JOINS.
  template <bool JOINS>
  void finish() {
    const int64_t positions = *std::max_element(a.visible, a.visible + a.count);
    segments.finish(positions, [&](int row) { return sum_of(row); });
    for (int row = 0; row < a.count; ++row) {
      const float *context = segments.context(row), total = softmax[row].total;
      const bool divides = segments.needs_division(row);
      for (int64_t i = 0; i < a.head_dim; i += STEP) {
        vec y[] = {load(context + i), load(context + i + COLUMNS)};
        if (JOINS) restore_column_order(y[0], y[1]);
        for (int v = 0; v < 2; ++v) {
          const int64_t left = a.head_dim - i - v * WIDTH;
          if (left <= 0) break;
          // Adding 0 turns -0, which values with weight 0 may cause, into +0.
          store_first(a.contexts[row] + i + v * WIDTH, divides ? y[v] / total + 0.0f : y[v],
                      left < WIDTH ? (int)left : WIDTH);
        }
      }
    }
  }

 private:
  static float* contexts_in(float* scratch) { return scratch + glm::ROWS * KEYS; }

  // The largest score is base 2.
  SoftmaxSum sum_of(int row) const { return {softmax[row].largest / LOG2_E, softmax[row].total}; }

  void begin_segment(int64_t begin) {
    segments.merge(begin, [&](int row) { return sum_of(row); });
    for (int row = 0; row < a.count; ++row) {
      if (a.visible[row] <= begin) continue;
      softmax[row] = {};
      std::memset(contexts + row * padded, 0, sizeof(float) * padded);
    }
  }
};

}  // namespace
