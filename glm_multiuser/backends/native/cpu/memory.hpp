// Buffers that are kept from one step to the next.
#pragma once

#include <cstdint>
#include <memory>

namespace glm {

// Aligned to a cache line. Growing it discards its contents. Untouched pages take no physical memory.
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
