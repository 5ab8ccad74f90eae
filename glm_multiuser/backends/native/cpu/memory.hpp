// Memory that the library keeps from one step to the next.
#pragma once

#include <cstdint>
#include <memory>

namespace glm {

// From a cache line's begin on. What it held is lost when more of it is wanted. Pages that nobody
// has used take no memory.
class Memory {
 public:
  char* of(int64_t bytes) {
    if (bytes > size) {
      held.reset(new char[bytes + LINE]);
      size = bytes;
    }
    return held.get() + (-(uintptr_t)held.get() & (LINE - 1));
  }

 private:
  static constexpr int64_t LINE = 64;
  std::unique_ptr<char[]> held;
  int64_t size = 0;
};

}  // namespace glm
