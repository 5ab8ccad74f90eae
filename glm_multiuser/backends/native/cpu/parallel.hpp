// Shared by all operators: argument checks, and parallel loops over rows.
//
// The graph has a fixed row count; `used`, int32 [1], is how many rows are valid. The rows after them are
// neither read nor written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.hpp"

#define REFUSE_UNLESS(condition) \
  if (!(condition)) return __LINE__

namespace {

// Smaller pieces are not worth waking a thread for.
constexpr int64_t ELEMENTS_PER_PIECE = 8192;

inline int64_t rows_in_use(void** data, int64_t** shapes, int used) {
  return std::max<int64_t>(0, std::min<int64_t>(shapes[0][0], *(const int32_t*)data[used]));
}

// Calls work(row) for all rows, of `size` elements each.
template <class Work>
void parallel_for_rows(int64_t rows, int64_t size, Work work) {
  const int64_t together = std::max<int64_t>(1, ELEMENTS_PER_PIECE / std::max<int64_t>(1, size));
  glm::parallel_for((rows + together - 1) / together, [&](int64_t piece) {
    const int64_t last = std::min(rows, (piece + 1) * together);
    for (int64_t row = piece * together; row < last; ++row) work(row);
  });
}

}  // namespace
