// What all operators do: refuse arguments, and share rows between threads.
//
// The graph has a fixed row count; `used`, int32 [1], is how many rows are valid. What lies behind
// them is neither read nor written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.hpp"

#define REFUSE_UNLESS(condition) \
  if (!(condition)) return __LINE__

namespace {

// Less is not worth waking a thread for.
constexpr int64_t NUMBERS_PER_PIECE = 8192;

inline int64_t rows_in_use(void** data, int64_t** shapes, int used) {
  return std::max<int64_t>(0, std::min<int64_t>(shapes[0][0], *(const int32_t*)data[used]));
}

// work(0) to work(rows - 1), each a row of so many numbers.
template <class Work>
void share_rows(int64_t rows, int64_t size, Work work) {
  const int64_t together = std::max<int64_t>(1, NUMBERS_PER_PIECE / std::max<int64_t>(1, size));
  glm::share((rows + together - 1) / together, [&](int64_t piece) {
    const int64_t last = std::min(rows, (piece + 1) * together);
    for (int64_t row = piece * together; row < last; ++row) work(row);
  });
}

}  // namespace
