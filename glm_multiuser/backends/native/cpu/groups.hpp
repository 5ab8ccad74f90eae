// Weights that are quantised in groups, widened in registers to the float32 numbers that
// checkpoint/gguf/blocks.py and checkpoint/int4.py give, bit for bit.
//
// Every product in there is exact in float32: a float16 has 11 bits, a scale at most 8, a number at
// most 8, and together they are at most 24. So a value is rounded once, by the sum if it has one,
// and it does not matter whether a compiler makes one instruction of the product and the sum.
#pragma once

#include "blocks.hpp"
#include "group_types.hpp"
#include "vector.hpp"

namespace {

using glm::GroupType;
using glm::PANEL;
using glm::PART;

typedef int8_t bvec __attribute__((vector_size(4 * WIDTH)));

// WIDTH whole numbers of 8 bits. GCC 12 would convert them one by one.
inline vec load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(__builtin_convertvector(load_as<bytes>(from), ivec), vec);
#endif
}

inline vec load_bytes(const int8_t* from) {
  const vec number = load_bytes((const uint8_t*)from);
  return number > all(127) ? number - 256 : number;
}

inline vec head(const char* block, int number, int column) {
  return load_f16((const uint16_t*)block + number * PANEL + column);
}

// Each type: how it lies, what is taken from its numbers, and how a value is made of a number and
// two numbers of its group, `a` and `b`. `minimum` is the factor of b, or 0 if there is none.
// `whole_bytes`: numbers have all 8 bits of a byte, and a sign.
struct Scaled {  // a * number
  static constexpr int minimum = 0;
  static constexpr bool whole_bytes = false;
  static vec b(const char*, const char*, int) { return vec{}; }
  static vec value(vec number, vec a, vec) { return a * number; }
};

struct Q8_0 : Scaled {
  static constexpr GroupType type = glm::Q8_0;
  static constexpr bool whole_bytes = true;
  static constexpr int offset = 0;
  static vec a(const char* block, const char*, int column) { return head(block, 0, column); }
};

struct Q4_0 : Q8_0 {
  static constexpr GroupType type = glm::Q4_0;
  static constexpr bool whole_bytes = false;
  static constexpr int offset = 8;
};

struct Q4_1 : Scaled {
  static constexpr GroupType type = glm::Q4_1;
  static constexpr int minimum = 1;
  static constexpr int offset = 0;
  static vec a(const char* block, const char*, int column) { return head(block, 0, column); }
  static vec b(const char* block, const char*, int column) { return head(block, 1, column); }
  static vec value(vec number, vec a, vec b) { return multiply_add(a, number, b); }
};

struct Q4_K : Scaled {
  static constexpr GroupType type = glm::Q4_K;
  static constexpr int minimum = -1;
  static constexpr int offset = 0;
  static vec a(const char* block, const char* scales, int column) {
    return head(block, 0, column) * load_bytes((const uint8_t*)scales + column);
  }
  static vec b(const char* block, const char* scales, int column) {
    return head(block, 1, column) * load_bytes((const uint8_t*)scales + PANEL + column);
  }
  static vec value(vec number, vec a, vec b) { return multiply_add(a, number, -b); }
};

struct Q5_K : Q4_K {
  static constexpr GroupType type = glm::Q5_K;
};

struct Q6_K : Scaled {
  static constexpr GroupType type = glm::Q6_K;
  static constexpr int offset = 32;
  static vec a(const char* block, const char* scales, int column) {
    return head(block, 0, column) * load_bytes((const int8_t*)scales + column);
  }
};

struct Int4_32 : Scaled {
  static constexpr GroupType type = glm::INT4_32;
  static constexpr int minimum = -1;
  static constexpr int offset = 0;
  static vec a(const char* block, const char*, int column) { return head(block, 0, column); }
  static vec b(const char* block, const char*, int column) {
    constexpr int HALF = PANEL / 2;
    const vec two = load_bytes((const uint8_t*)block + 2 * PANEL + column % HALF);
    const ivec zeros = __builtin_convertvector(two, ivec) >> (column < HALF ? 0 : 4) & 15;
    return __builtin_convertvector(zeros, vec) * head(block, 0, column);
  }
  static vec value(vec number, vec a, vec b) { return multiply_add(a, number, -b); }
};

struct Int4_128 : Int4_32 {
  static constexpr GroupType type = glm::INT4_128;
};

// Four inputs' numbers as they are stored, one in each byte, become a vector of those of input i.
template <class T>
struct Quad {
#if defined(__AVX512F__)
  static constexpr bool looked_up = T::type.bits == 4;
#else
  static constexpr bool looked_up = false;
#endif

  static uvec prepared(uvec quad) {
    if (looked_up || T::offset == 0) return quad;
    return (uvec)((bvec)quad - (int8_t)T::offset);
  }

  static vec number(uvec quad, int i) {
#if defined(__AVX512F__)
    if constexpr (looked_up) {  // the lowest four bits say which
      const vec numbers = vec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - T::offset;
      return (vec)_mm512_permutexvar_ps((__m512i)(quad >> (8 * i)), (__m512)numbers);
    }
#endif
    return __builtin_convertvector((ivec)(quad << (24 - 8 * i)) >> 24, vec);
  }
};

// Of two panels that are read side by side, the second lies behind the first: at their end, what is
// wanted next lies behind both.
template <class T>
inline int64_t groups_ahead(const glm::LinearPanel& panel, int64_t part) {
  const int64_t rest = (panel.depth / PART - part - 1) * T::type.part_bytes();
  return AHEAD + (rest < AHEAD ? panel.bytes : 0);
}

// Of memory that is wanted soon, into the first cache or the second; all of it, or what is left out
// stalls the rest.
template <int CACHE>
inline INLINE void ask_for(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) ask_for_line<CACHE>(from + i);
}

// One part of a panel: V vectors of columns from `column` on. Vectors that the panel has not are
// those of the next one, so many `bytes` behind it. `ahead` is how far behind what is read memory is
// asked for, and CACHE where it goes; none is asked for with 0. Calls group(a, b, each) for each
// group: a(v) and b(v) are its two numbers, and each(use) calls use(quads) for every four inputs, with
// their numbers as they are stored, one in each byte.
template <class T, int V, int CACHE, class Group>
inline INLINE void read_part(const char* panel, int64_t part, int column, int64_t bytes,
                             int64_t ahead, Group group) {
  constexpr GroupType type = T::type;
  constexpr int UPPER = type.bits - 4, QUADS = type.bits == 8 ? 1 : 2;
  constexpr int OF_PANEL = PANEL / WIDTH;
  const auto behind = [&](int v) { return v / OF_PANEL * bytes; };
  const auto first = [&](int v) { return column + v % OF_PANEL * WIDTH; };
  const char* block = panel + part / type.parts() * type.bytes();
  const char* at = block + type.head + part % type.parts() * type.part_bytes();
  const auto ask = [&](const char* from, int64_t size) INLINE {
    for (int v = 0; v < V && CACHE != 0; v += OF_PANEL)
      ask_for<CACHE>(from + behind(v) + ahead, size);
  };
  for (int number = 0; number < PART / type.group; ++number) {
    const auto a = [&](int v) INLINE { return T::a(block + behind(v), at + behind(v), first(v)); };
    const auto b = [&](int v) INLINE { return T::b(block + behind(v), at + behind(v), first(v)); };
    if (number == 0 && part % type.parts() == 0) ask(block, type.head);
    ask(at, type.scales);
    group(a, b, [&](auto use) INLINE {
      const char* words = at + type.scales;
      const auto word = [&](int v) { return load_as<uvec>(words + behind(v) + 4 * first(v)); };
      uvec upper[V] = {};
      if (type.has_upper_bits()) {
        ask(words, 4 * PANEL);
        for (int v = 0; v < V; ++v) upper[v] = word(v);
        words += 4 * PANEL;
      }
      for (int i = 0; i < type.words(); ++i) {
        ask(words, 4 * PANEL);
#pragma GCC unroll 2
        for (int half = 0; half < QUADS; ++half) {
          uvec quads[V];
          for (int v = 0; v < V; ++v) {
            quads[v] = type.bits == 8 ? word(v) : word(v) >> (4 * half) & 0x0f0f0f0f;
            if constexpr (type.has_upper_bits()) {
              quads[v] |= (upper[v] & ((1 << UPPER) - 1) * 0x01010101u) << 4;
              upper[v] >>= UPPER;
            }
          }
          use(quads);
        }
        words += 4 * PANEL;
      }
    });
    at += type.group_bytes();
  }
}

// As `read_part`, but calls use(input, values) for each input.
template <class T, int V, class Use>
inline INLINE void widen_part(const char* panel, int64_t part, int column, int64_t bytes,
                              int64_t ahead, Use use) {
  int input = 0;
  const auto group = [&](auto scale, auto minimum, auto each) INLINE {
    vec a[V], b[V];
    for (int v = 0; v < V; ++v) a[v] = scale(v);
    for (int v = 0; v < V; ++v) b[v] = minimum(v);
    each([&](const uvec* quads) INLINE {
      uvec quad[V];
      for (int v = 0; v < V; ++v) quad[v] = Quad<T>::prepared(quads[v]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        vec w[V];
        for (int v = 0; v < V; ++v) w[v] = T::value(Quad<T>::number(quad[v], i), a[v], b[v]);
        use(input++, w);
      }
    });
  };
  read_part<T, V, 2>(panel, part, column, bytes, ahead, group);
}

// WIDTH columns of one input.
template <class T>
vec widen_input(const char* panel, int64_t input, int column) {
  constexpr GroupType type = T::type;
  const int number = (int)(input % type.inputs), in_group = number % type.group;
  const char* block = panel + input / type.inputs * type.bytes();
  const char* scales = block + type.head + number / type.group * type.group_bytes();
  const char* words = scales + type.scales + 4 * column;
  const int quad = in_group / 4;
  constexpr int LINE = 4 * PANEL, UPPER = type.bits - 4;
  uvec numbers;
  if constexpr (type.bits == 8) {
    numbers = load_as<uvec>(words + quad * LINE);
  } else {
    const char* lower = words + (type.has_upper_bits() + quad / 2) * LINE;
    numbers = load_as<uvec>(lower) >> (quad % 2 * 4) & 0x0f0f0f0f;
    if constexpr (type.has_upper_bits()) {
      const uvec upper = load_as<uvec>(words) >> (quad * UPPER);
      numbers |= (upper & ((1 << UPPER) - 1) * 0x01010101u) << 4;
    }
  }
  const vec value = Quad<T>::number(Quad<T>::prepared(numbers), in_group % 4);
  return T::value(value, T::a(block, scales, column), T::b(block, scales, column));
}

// Of a panel, `count` parts from `first` on: V vectors of columns from `column` on.
template <class T, int V>
void widen_columns(const char* panel, int64_t first, int64_t count, int column, float* to) {
  for (int64_t part = first; part < first + count; ++part)
    widen_part<T, V>(panel, part, column, 0, AHEAD, [&](int, const vec* w) {
      for (int v = 0; v < V; ++v) store(to + v * WIDTH, w[v]);
      to += V * WIDTH;
    });
}

typedef void (*WidenColumns)(const char* panel, int64_t first, int64_t count, int column,
                             float* to);

// Calls use(T()) with the type of this kind of weight.
template <class Use>
inline void with_group_type(glm::Weight kind, Use use) {
  switch (kind) {
    case glm::Weight::q8_0: return use(Q8_0());
    case glm::Weight::q4_0: return use(Q4_0());
    case glm::Weight::q4_1: return use(Q4_1());
    case glm::Weight::q4_k: return use(Q4_K());
    case glm::Weight::q5_k: return use(Q5_K());
    case glm::Weight::q6_k: return use(Q6_K());
    case glm::Weight::int4_32: return use(Int4_32());
    case glm::Weight::int4_128: return use(Int4_128());
    default: return;
  }
}

}  // namespace
