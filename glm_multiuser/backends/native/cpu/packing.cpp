// Packs weights; called from Python.
#include <algorithm>
#include <atomic>

#include "level.hpp"
#include "pool.hpp"

// [outputs, depth] of type `from` -> panels of type `to`; both are a `glm::Weight`. Returns 1 if all weights
// are finite, before and after conversion, and otherwise 0; packs all of them in either case.
extern "C" int glm_pack(int from, int to, const void* rows, int64_t outputs, int64_t depth,
                        void* packed) {
  const auto stored = (glm::Weight)from, wanted = (glm::Weight)to;
  const int64_t bytes = glm::panel_bytes(wanted, depth);
  const int64_t row_bytes = depth * (stored == glm::Weight::float32 ? 4 : 2);
  std::atomic<bool> good{true};
  glm::parallel_for((outputs + glm::PANEL - 1) / glm::PANEL, [&](int64_t panel) {
    const int64_t first = panel * glm::PANEL;
    const int count = (int)std::min<int64_t>(glm::PANEL, outputs - first);
    if (!glm::level().pack_panel(stored, wanted, (const char*)rows + first * row_bytes, count,
                                 depth, (char*)packed + panel * bytes))
      good = false;
  });
  return good;
}
