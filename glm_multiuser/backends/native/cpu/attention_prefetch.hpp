// Software prefetching of keys and values: decoding is bound by reading them, and heads are often too short
// for the hardware prefetcher.
#pragma once

#include "blocks.hpp"
#include "level.hpp"
#include "vector.hpp"

namespace {

// Keys and values of a longer head leave no room in L2 for those of the next head. Processors without
// AVX-512 have a smaller L2.
constexpr int64_t LONG_HEAD_BYTES = WIDTH == 16 ? 1 << 18 : 1 << 17;

// Intel's processors read memory faster in several places at once, so the next head is prefetched in four:
// its keys and its values, each from the beginning and from the middle.
constexpr int STREAMS = INTEL ? 4 : 1;

// The next line of each stream, in the order of their turns.
struct LinesAhead {
  const char* next[STREAMS];
  int64_t step;      // bytes from a line of a stream to its next one
  int64_t left = 0;  // bytes for `prefetch_more`

  // Less than a line is always a part of the same stream.
  template <int64_t BYTES, Target TARGET = MOST_IN_FLIGHT>
  inline INLINE void prefetch() {
    constexpr int LINES = BYTES / 64;
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line) {
      prefetch_line<TARGET>(next[line % STREAMS]);
      next[line % STREAMS] += step;
    }
    if constexpr (LINES % STREAMS != 0) {
      const LinesAhead now = *this;
#pragma GCC unroll 4
      for (int i = 0; i < STREAMS; ++i) next[i] = now.next[(i + LINES) % STREAMS];
    }
    if constexpr (LINES == 0) {
      prefetch_line<TARGET>(next[0]);
      next[0] += step * BYTES / 64;
    }
  }

  // Whole lines, of which the last may be more than `bytes`; the next call prefetches less.
  template <Target TARGET = MOST_IN_FLIGHT>
  inline INLINE void prefetch_more(int64_t bytes) {
    left += bytes;
    for (; left >= 64 * STREAMS; left -= 64 * STREAMS) prefetch<64 * STREAMS, TARGET>();
    for (; left > 0; left -= 64) prefetch<64, TARGET>();
  }
};

// What to prefetch, byte for byte, while the keys of a block are read, and while its values are; or as
// much of four streams, unless `streams` is null.
template <class Element>
struct PrefetchTargets {
  const Element *with_keys, *with_values;
  bool exists;
  const char* streams = nullptr;  // where the first one continues
  int64_t values_apart = 0, halves_apart = 0, part_of_keys = 0;  // bytes

  // After `done` bytes of the block's keys or values.
  LinesAhead lines_with_keys(int64_t done) const { return lines((const char*)with_keys, 0, done); }
  LinesAhead lines_with_values(int64_t done) const {
    return lines((const char*)with_values, part_of_keys, done);
  }

 private:
  LinesAhead lines(const char* from, int64_t part, int64_t done) const {
    LinesAhead lines{{}, streams == nullptr ? 64 * STREAMS : 64};
    for (int i = 0; i < STREAMS; ++i)
      lines.next[i] = streams == nullptr ? from + done + 64 * i
                                         : streams + part + done / STREAMS +
                                               (i % 2 * values_apart + i / 2 * halves_apart);
    return lines;
  }
};

// The softmax of a block reads no memory, which would stand idle: what comes with the first values is
// prefetched before it. More lines would delay those that are read next, and so would any into L1.
template <class Element>
inline void prefetch_during_softmax(const PrefetchTargets<Element>& targets) {
  constexpr int64_t LINES = WIDTH == 16 ? 16 : 0;
  LinesAhead ahead = targets.lines_with_values(0);
  ahead.prefetch_more<L2>(64 * LINES);
}

// Short heads prefetch the head that this thread processes next, block by block. Long heads prefetch the
// values of a block while its keys are read, and the keys of the next block while its values are; except
// one row of a float32 cache, which a good hardware prefetcher already reads at full memory bandwidth.
template <class Element>
class AttentionPrefetcher {
 public:
  int64_t most = 0;  // positions that some row sees

  // A position has `row` elements.
  AttentionPrefetcher(const glm::Attention& a, int64_t row) : a(a), row(row) {
    for (int i = 0; i < a.count; ++i) most = a.visible[i] > most ? a.visible[i] : most;
    const int64_t head_bytes = most * row * (int64_t)sizeof(Element);
    is_long = a.sums != nullptr || 2 * head_bytes > LONG_HEAD_BYTES;
    static thread_local const void* prefetched = nullptr;
    if (prefetched != a.keys && !is_long) {  // the thread's first head
      prefetch_all((const char*)a.keys, head_bytes);
      prefetch_all((const char*)a.values, head_bytes);
    }
    prefetched = a.next_keys;
  }

  // For the block starting at position `begin`.
  PrefetchTargets<Element> of(int64_t begin) const {
    const auto at = [&](const void* memory, int64_t position) {
      return (const Element*)memory + position * row;
    };
    const bool is_prefetched_by_hardware =
        HARDWARE_PREFETCH && a.count == 1 && sizeof(Element) == sizeof(float);
    if (is_long && !is_prefetched_by_hardware) {
      const bool is_last = begin + glm::KEYS >= most;
      const Element* keys = is_last ? at(a.next_positions > 0 ? a.next_keys : a.keys, 0)
                                   : at(a.keys, begin + glm::KEYS);
      return {at(a.values, begin), keys, true};
    }
    if (!is_long && begin < a.next_positions) {
      PrefetchTargets<Element> next{at(a.next_keys, begin), at(a.next_values, begin), true};
      if (STREAMS == 1) return next;
      const int64_t position = row * (int64_t)sizeof(Element);
      next.streams = (const char*)at(a.next_keys, begin / 2);
      next.values_apart = (const char*)a.next_values - (const char*)a.next_keys;
      next.halves_apart = a.next_positions / 2 / glm::TILE * glm::TILE * position;
      next.part_of_keys = glm::KEYS * position / STREAMS;
      return next;
    }
    return {at(a.keys, begin), at(a.values, begin), false};
  }

 private:
  const glm::Attention& a;
  const int64_t row;
  bool is_long;

  static void prefetch_all(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_line<MOST_IN_FLIGHT>(from + i);
  }
};

}  // namespace
