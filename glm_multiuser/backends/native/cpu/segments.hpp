// A softmax over more than SEGMENT positions is computed segment by segment, each with its own largest score,
// and contexts are merged from the first segment on. Segments may so be divided among threads; where they
// begin depends on the position alone, so a row has the same bits however they are divided.
// (Dividing positions among threads: "Flash-Decoding", Dao et al. 2023.)
#pragma once

#include <cstring>

#include "instructions.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::SEGMENT;
using glm::SoftmaxSum;

inline bool begins_later_segment(int64_t position) { return position > 0 && position % SEGMENT == 0; }

// Of the rows in each lane.
struct SoftmaxSums {
  vec largest, total;
};

// How the contexts of two segments are weighted, and their sums together.
struct Merged {
  vec earlier, later;
  SoftmaxSums sums;
};
inline Merged merge_sums(const SoftmaxSums& earlier, const SoftmaxSums& later) {
  const vec largest = larger(later.largest, earlier.largest);
  const vec first = exponential(earlier.largest - largest);
  const vec second = exponential(later.largest - largest);
  return {first, second, {largest, multiply_add(earlier.total, first, later.total * second)}};
}

// No context is divided by its total yet.
inline void merge_context(const float* later, float second, int64_t size, float* context, float first) {
  for (int64_t i = 0; i < size; i += WIDTH) {
    const int count = size - i < WIDTH ? (int)(size - i) : WIDTH;
    const vec kept = load_first(context + i, count) * broadcast(first);
    store_first(context + i, multiply_add(load_first(later + i, count), broadcast(second), kept), count);
  }
}

// Divides a merged context by its total. Adding 0 turns -0 into +0.
inline void divide_merged(const float* context, float total, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += WIDTH) {
    const int count = size - i < WIDTH ? (int)(size - i) : WIDTH;
    store_first(to + i, load_first(context + i, count) / total + 0.0f, count);
  }
}

void merge_segments(float* contexts, const SoftmaxSum* sums, int64_t count, int64_t head_dim, float* to) {
  const auto in_lanes = [](const SoftmaxSum& sum) {
    return SoftmaxSums{broadcast(sum.largest), broadcast(sum.total)};
  };
  SoftmaxSums total = in_lanes(sums[0]);
  for (int64_t segment = 1; segment < count; ++segment) {
    const Merged merged = merge_sums(total, in_lanes(sums[segment]));
    merge_context(contexts + segment * head_dim, merged.later[0], head_dim, contexts, merged.earlier[0]);
    total = merged.sums;
  }
  divide_merged(contexts, total.total[0], head_dim, to);
}

// The segments of a call of `attend`. A row that sees a single one is left as it is.
class Segments {
 public:
  // contexts, merged: [count, padded], of the current segment and of earlier ones.
  Segments(const glm::Attention& a, float* contexts, float* merged, int64_t padded)
      : a(a), contexts(contexts), merged(merged), padded(padded) {}

  // After the segment that ends at position `end`; sum_of(row) is its SoftmaxSum.
  template <class SumOf>
  void merge(int64_t end, SumOf sum_of) {
    const KeepSubnormals keeps;
    const int64_t begin = (end - 1) / SEGMENT * SEGMENT;
    for (int first = 0; first < a.count; first += WIDTH) {
      const int last = first + WIDTH < a.count ? first + WIDTH : a.count;
      SoftmaxSums later{};
      for (int row = first; row < last; ++row) {
        const SoftmaxSum sum = sum_of(row);
        later.largest[row - first] = sum.largest, later.total[row - first] = sum.total;
      }
      const SoftmaxSums earlier{load(largest + first), load(totals + first)};
      const Merged merged = begin > 0 ? merge_sums(earlier, later) : Merged{{}, {}, later};
      for (int row = first; row < last; ++row) {
        if (a.visible[row] <= SEGMENT || a.visible[row] <= begin) continue;
        float *from = contexts + row * padded, *to = this->merged + row * padded;
        if (begin > 0) {
          merge_context(from, merged.later[row - first], padded, to, merged.earlier[row - first]);
        } else {
          std::memcpy(to, from, sizeof(float) * padded);
        }
        largest[row] = merged.sums.largest[row - first], totals[row] = merged.sums.total[row - first];
      }
    }
  }

  // After all of the `most` positions that some row sees.
  template <class SumOf>
  void finish(int64_t most, SumOf sum_of) {
    for (int row = 0; a.sums != nullptr && row < a.count; ++row) a.sums[row] = sum_of(row);
    if (most <= SEGMENT) return;
    merge(most, sum_of);
    const KeepSubnormals keeps;
    for (int row = 0; row < a.count; ++row) {
      float* context = merged + row * padded;
      if (a.visible[row] > SEGMENT) divide_merged(context, totals[row], padded, context);
    }
  }

  // Whether the context of a row still has to be divided by the total.
  bool needs_division(int row) const { return a.sums == nullptr && a.visible[row] <= SEGMENT; }

  const float* context(int row) const {
    return (a.visible[row] <= SEGMENT ? contexts : merged) + row * padded;
  }

 private:
  const glm::Attention& a;
  float *contexts, *merged;
  const int64_t padded;
  float largest[glm::ROWS], totals[glm::ROWS];  // of earlier segments
};

}  // namespace
