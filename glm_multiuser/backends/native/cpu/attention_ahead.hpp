// Which memory attention asks for while it reads other memory: a decode step waits for its keys and
// values, and many heads are too short for the processor to foresee them.
#pragma once

#include "blocks.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

// Heads that are longer leave no room in the second cache for the next one. Processors without AVX-512
// have a smaller one.
constexpr int64_t HEAD_AHEAD = WIDTH == 16 ? 1 << 18 : 1 << 17;

// What to ask for while the keys of a block are read, and while its values are: as many bytes.
template <class Number>
struct Wanted {
  const Number *with_keys, *with_values;
  bool exists;
};

// Keys and values are asked for one head ahead: block by block, those of the head that this thread
// attends to next. Of a long head, values are asked for while the same block's keys are read, and the
// next block's keys while the values are; but one row reads float32 numbers as fast as memory goes, and
// where the processor sees what comes next, it is not to be told.
template <class Number>
class AttentionAhead {
 public:
  int64_t most = 0;  // positions that some row sees

  // A position has `row` numbers.
  AttentionAhead(const glm::Attention& a, int64_t row) : a(a), row(row) {
    for (int i = 0; i < a.count; ++i) most = a.visible[i] > most ? a.visible[i] : most;
    const int64_t head_bytes = most * row * (int64_t)sizeof(Number);
    is_long = 2 * head_bytes > HEAD_AHEAD;
    static thread_local const void* asked = nullptr;
    if (asked != a.keys && !is_long) {  // the first of this thread
      ask((const char*)a.keys, head_bytes);
      ask((const char*)a.values, head_bytes);
    }
    asked = a.next_keys;
  }

  // For the block from position `begin` on.
  Wanted<Number> of(int64_t begin) const {
    const auto at = [&](const void* memory, int64_t position) {
      return (const Number*)memory + position * row;
    };
    const bool is_foreseen = FORESEES && a.count == 1 && sizeof(Number) == sizeof(float);
    if (is_long && !is_foreseen) {
      const bool is_last = begin + glm::KEYS >= most;
      const Number* keys = is_last ? at(a.next_positions > 0 ? a.next_keys : a.keys, 0)
                                   : at(a.keys, begin + glm::KEYS);
      return {at(a.values, begin), keys, true};
    }
    if (!is_long && begin < a.next_positions)
      return {at(a.next_keys, begin), at(a.next_values, begin), true};
    return {at(a.keys, begin), at(a.values, begin), false};
  }

 private:
  const glm::Attention& a;
  const int64_t row;
  bool is_long;

  static void ask(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) ask_for_line<2>(from + i);
  }
};

}  // namespace
