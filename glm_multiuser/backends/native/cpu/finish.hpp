// What happens to sums when they are complete.
#pragma once

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Finish;
using glm::LinearPanel;

inline vec finished(vec y, const LinearPanel& panel, const float* residual, int count) {
  if (panel.finish == Finish::gelu) return gelu(y);
  if (panel.finish == Finish::add) return load_first(residual, count) * panel.factor + y;
  return y;
}

// y of the columns from `first` on, of which there may be fewer than WIDTH, or none.
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
