// Addresses of the rows that are read side by side.
#pragma once

#include <cstdint>

#include "vector.hpp"

namespace {

// Offsets from the first of M rows, in bytes. Addresses can multiply a register by 2, 4 or 8, so those of odd
// rows suffice for up to twelve; compilers would keep a register for each row, and spill some of them.
template <int M>
class RowOffsets {
  static_assert(M <= 12, "rows after the twelfth have no offset");
  int64_t one, three, five, seven, nine, eleven;

 public:
  explicit RowOffsets(int64_t row_bytes)
      : one(row_bytes), three(3 * row_bytes), five(5 * row_bytes), seven(7 * row_bytes),
        nine(9 * row_bytes), eleven(11 * row_bytes) {}

  // Reads from row m what lies at `x` in the first one.
  template <class T>
  inline INLINE T at(const void* x, int m) const {
    return load_as<T>((const char*)x + of(m));
  }

  // To be called in a loop that reads rows; otherwise compilers multiply before it.
  inline INLINE void keep() {
#if defined(__x86_64__)
    if (M > 1) asm("" : "+r"(one));
    if (M > 3) asm("" : "+r"(three));
    if (M > 5) asm("" : "+r"(five));
    if (M > 7) asm("" : "+r"(seven));
    if (M > 9) asm("" : "+r"(nine));
    if (M > 11) asm("" : "+r"(eleven));
#endif
  }

 private:
  inline INLINE int64_t of(int m) const {
    switch (m) {
      case 0: return 0;
      case 1: case 2: case 4: case 8: return m * one;
      case 3: case 6: return m / 3 * three;
      case 5: case 10: return m / 5 * five;
      case 7: return seven;
      case 9: return nine;
      default: return eleven;
    }
  }
};

}  // namespace
