// What is applied to complete sums before they are stored.
#pragma once

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Epilogue;
using glm::LinearPanel;

inline vec apply_epilogue(vec y, const LinearPanel& panel, const float* residual, int count) {
  if (panel.epilogue == Epilogue::gelu) return gelu(y);
  if (panel.epilogue == Epilogue::add)
    return multiply_add(load_first(residual, count), broadcast(panel.factor), y);
  return y;
}

// Prefetches the output of M rows while their sums are computed: many rows of results do not fit into L2.
template <int M, int V>
inline INLINE void prefetch_results(const LinearPanel& panel, int64_t row, int column) {
  constexpr int ELEMENTS = 64 / sizeof(float);
  for (int m = 0; m < M; ++m) {
    const int64_t at = (row + m) * panel.stride + column;
    for (int i = 0; i < V * WIDTH; i += ELEMENTS) {
      __builtin_prefetch(panel.y + at + i, 1, 3);
      if (panel.epilogue == Epilogue::add) __builtin_prefetch(panel.residual + at + i, 0, 3);
    }
  }
}

// Stores y for the columns starting at `first`, of which there may be fewer than WIDTH, or none.
// To store many rows, pass a local copy of the panel: the compiler must assume that a store to y changes
// what a reference refers to, and would reload it.
inline void store_result(const LinearPanel& panel, int64_t row, int first, vec y) {
  const int count = panel.columns - first < WIDTH ? panel.columns - first : WIDTH;
  if (count <= 0) return;
  const int64_t at = row * panel.stride + first;
  y = apply_epilogue(y + load_first(panel.bias + first, count), panel, panel.residual + at, count);
  if (count == WIDTH) {
    store(panel.y + at, y);
  } else {
    store_first(panel.y + at, y, count);
  }
}

}  // namespace
