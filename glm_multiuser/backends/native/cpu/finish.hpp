// What happens to sums when they are complete.
#pragma once

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Finish;
using glm::LinearPanel;

inline vec finished(vec y, const LinearPanel& panel, const float* residual, int count) {
  if (panel.finish == Finish::gelu) return gelu(y);
  if (panel.finish == Finish::add)
    return multiply_add(load_first(residual, count), all(panel.factor), y);
  return y;
}

// Asks for the memory that the sums of M rows go to, so that it is there when they are complete: many
// rows of results do not fit into the second cache.
template <int M, int V>
inline INLINE void ask_for_results(const LinearPanel& panel, int64_t row, int column) {
  constexpr int NUMBERS = 64 / sizeof(float);
  for (int m = 0; m < M; ++m) {
    const int64_t at = (row + m) * panel.stride + column;
    for (int i = 0; i < V * WIDTH; i += NUMBERS) {
      __builtin_prefetch(panel.y + at + i, 1, 3);
      if (panel.finish == Finish::add) __builtin_prefetch(panel.residual + at + i, 0, 3);
    }
  }
}

// y of the columns from `first` on, of which there may be fewer than WIDTH, or none.
// Where many rows are written, a copy of the panel made before them is faster: a store to y could
// change what a reference leads to, so that it is read again.
inline void write(const LinearPanel& panel, int64_t row, int first, vec y) {
  const int count = panel.columns - first < WIDTH ? panel.columns - first : WIDTH;
  if (count <= 0) return;
  const int64_t at = row * panel.stride + first;
  y = finished(y + load_first(panel.bias + first, count), panel, panel.residual + at, count);
  if (count == WIDTH) {
    store(panel.y + at, y);
  } else {
    store_first(panel.y + at, y, count);
  }
}

}  // namespace
