// Dequantises group-quantised weights in registers, bit for bit as checkpoint/gguf/blocks.py and
// checkpoint/int4.py do.
//
// Every product is exact in float32: a float16 has 11 significant bits, a scale at most 8 and a quant at
// most 8, which together fit into 24. So a weight is rounded at most once, by the addition of a minimum,
// and fusing the product with the addition does not change it.
#pragma once

#include "blocks.hpp"
#include "group_types.hpp"
#include "vector.hpp"

namespace {

using glm::GroupType;
using glm::PANEL;
using glm::PART;

typedef int8_t bvec __attribute__((vector_size(4 * WIDTH)));

// WIDTH 8-bit integers. GCC 12 does not vectorise the conversion.
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
  const vec value = load_bytes((const uint8_t*)from);
  return value > broadcast(127) ? value - 256 : value;
}

inline vec head(const char* block, int index, int column) {
  return load_f16((const uint16_t*)block + index * PANEL + column);
}

// Per type: its layout, the offset subtracted from its quants, and how a weight is computed from its quant
// q and the group's scale `a` and minimum `b`. `minimum` is the factor of b, or 0 if there is none.
// `signed_bytes`: quants are int8.
struct Scaled {  // a * q
  static constexpr int minimum = 0;
  static constexpr bool signed_bytes = false;
  static vec b(const char*, const char*, int) { return vec{}; }
  static vec value(vec q, vec a, vec) { return a * q; }
};

struct Q8_0 : Scaled {
  static constexpr GroupType type = glm::Q8_0;
  static constexpr bool signed_bytes = true;
  static constexpr int offset = 0;
  static vec a(const char* block, const char*, int column) { return head(block, 0, column); }
};

struct Q4_0 : Q8_0 {
  static constexpr GroupType type = glm::Q4_0;
  static constexpr bool signed_bytes = false;
  static constexpr int offset = 8;
};

struct Q4_1 : Scaled {
  static constexpr GroupType type = glm::Q4_1;
  static constexpr int minimum = 1;
  static constexpr int offset = 0;
  static vec a(const char* block, const char*, int column) { return head(block, 0, column); }
  static vec b(const char* block, const char*, int column) { return head(block, 1, column); }
  static vec value(vec q, vec a, vec b) { return multiply_add(a, q, b); }
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
  static vec value(vec q, vec a, vec b) { return multiply_add(a, q, -b); }
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
  static vec value(vec q, vec a, vec b) { return multiply_add(a, q, -b); }
};

struct Int4_128 : Int4_32 {
  static constexpr GroupType type = glm::INT4_128;
};

// Converts packed quants of four inputs, one per byte, to a vector with those of one input.
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

  // The quant that starts at bit `shift`.
  static vec quant(uvec quad, int shift) {
#if defined(__AVX512F__)
    if constexpr (looked_up) {  // the lowest four bits are the index
      const vec table = vec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - T::offset;
      return (vec)_mm512_permutexvar_ps((__m512i)(quad >> shift), (__m512)table);
    }
#endif
    return __builtin_convertvector((ivec)(quad << (24 - shift)) >> 24, vec);
  }
};

// Two panels read at the same time are adjacent in memory, so near the end of the first, what comes next
// is after the second.
template <class T>
inline int64_t group_prefetch_distance(const glm::LinearPanel& panel, int64_t part) {
  const int64_t rest = (panel.depth / PART - part - 1) * T::type.part_bytes();
  return PREFETCH_DISTANCE + (rest < PREFETCH_DISTANCE ? panel.bytes : 0);
}

// Skipping any line would stall on it.
template <Target TARGET = MOST_IN_FLIGHT>
inline INLINE void prefetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch_line<TARGET>(from + i);
}

// Reads V vectors of columns, starting at `column`, of one part of a panel. Vectors past its last column
// come from the next panel, `bytes` further on. If PREFETCHES, prefetches what is `ahead` bytes further on,
// to TARGET.
// Calls group(a, b, each) for each group, with its scales a(v) and minima b(v); each(use) calls use(quads)
// for every four inputs, with their packed quants, one per byte.
template <class T, int V, bool PREFETCHES, Target TARGET = MOST_IN_FLIGHT, class Group>
inline INLINE void read_part(const char* panel, int64_t part, int column, int64_t bytes,
                             int64_t ahead, Group group) {
  constexpr GroupType type = T::type;
  constexpr int UPPER = type.bits - 4, QUADS = type.bits == 8 ? 1 : 2;
  constexpr int OF_PANEL = PANEL / WIDTH;
  const auto panel_offset = [&](int v) { return v / OF_PANEL * bytes; };
  const auto first = [&](int v) { return column + v % OF_PANEL * WIDTH; };
  const char* block = panel + part / type.parts() * type.bytes();
  const char* at = block + type.head + part % type.parts() * type.part_bytes();
  const auto prefetch_from = [&](const char* from, int64_t size) INLINE {
    for (int v = 0; v < V && PREFETCHES; v += OF_PANEL)
      prefetch<TARGET>(from + panel_offset(v) + ahead, size);
  };
  for (int index = 0; index < PART / type.group; ++index) {
    const auto a = [&](int v) INLINE {
      return T::a(block + panel_offset(v), at + panel_offset(v), first(v));
    };
    const auto b = [&](int v) INLINE {
      return T::b(block + panel_offset(v), at + panel_offset(v), first(v));
    };
    if (index == 0 && part % type.parts() == 0) prefetch_from(block, type.head);
    prefetch_from(at, type.scales);
    group(a, b, [&](auto use) INLINE {
      const char* words = at + type.scales;
      const auto word = [&](int v) { return load_as<uvec>(words + panel_offset(v) + 4 * first(v)); };
      uvec upper[V] = {};
      if (type.has_upper_bits()) {
        prefetch_from(words, 4 * PANEL);
        for (int v = 0; v < V; ++v) upper[v] = word(v);
        words += 4 * PANEL;
      }
      for (int i = 0; i < type.words(); ++i) {
        prefetch_from(words, 4 * PANEL);
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

// As `read_part`, but calls use(input, weights) with dequantised weights of each input.
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
        for (int v = 0; v < V; ++v) w[v] = T::value(Quad<T>::quant(quad[v], 8 * i), a[v], b[v]);
        use(input++, w);
      }
    });
  };
  read_part<T, V, true>(panel, part, column, bytes, ahead, group);
}

// Dequantises V vectors of columns, starting at `column`, of one input.
template <class T, int V>
inline INLINE void widen_input(const char* panel, unsigned input, int column, vec* w) {
  constexpr GroupType type = T::type;
  constexpr int LINE = 4 * PANEL, UPPER = type.bits - 4;
  const unsigned in_block = input % type.inputs, in_group = in_block % type.group;
  const int quad = in_group / 4, shift = in_group % 4 * 8;
  const char* block = panel + input / type.inputs * (int64_t)type.bytes();
  const char* scales = block + type.head + in_block / type.group * type.group_bytes();
  for (int v = 0; v < V; ++v) {
    const int first = column + v * WIDTH;
    const auto word = [&](int i) INLINE {
      return load_as<uvec>(scales + type.scales + i * LINE + 4 * first);
    };
    vec q;
    if constexpr (Quad<T>::looked_up) {
      q = Quad<T>::quant(word(quad / 2), quad % 2 * 4 + shift);
    } else {
      uvec quants;
      if constexpr (type.bits == 8) {
        quants = word(quad);
      } else {
        quants = word(type.has_upper_bits() + quad / 2) >> (quad % 2 * 4) & 0x0f0f0f0f;
        if constexpr (type.has_upper_bits())
          quants |= (word(0) >> (quad * UPPER) & ((1 << UPPER) - 1) * 0x01010101u) << 4;
      }
      q = Quad<T>::quant(Quad<T>::prepared(quants), shift);
    }
    w[v] = T::value(q, T::a(block, scales, first), T::b(block, scales, first));
  }
}

// Dequantises V vectors of columns, starting at `column`, of `count` parts of a panel, starting at `first`.
template <class T, int V>
void widen_columns(const char* panel, int64_t first, int64_t count, int column, float* to) {
  for (int64_t part = first; part < first + count; ++part)
    widen_part<T, V>(panel, part, column, 0, PREFETCH_DISTANCE, [&](int, const vec* w) {
      for (int v = 0; v < V; ++v) store(to + v * WIDTH, w[v]);
      to += V * WIDTH;
    });
}

typedef void (*WidenColumns)(const char* panel, int64_t first, int64_t count, int column,
                             float* to);

// Calls use(T()) with the struct above for this weight type.
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
