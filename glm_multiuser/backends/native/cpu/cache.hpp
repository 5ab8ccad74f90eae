// Elements of a KV cache: float32, bf16, or int8 with one scale for each head of a position. They are
// rounded when they are written, and widened in registers when they are read.
#pragma once

#include <type_traits>

#include "half.hpp"
#include "level.hpp"
#include "rows.hpp"
#include "vector.hpp"

namespace {

// Converts WIDTH elements to float32, exactly. `widened_first` does not read past the first `count`.
inline vec widened(const float* from) { return load(from); }

inline vec widened_first(const float* from, int count) { return load_first(from, count); }

#if defined(__AVX512F__)
inline vec of_bf16(__m256i bits) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16); }

inline vec of_int8(__m128i elements) {
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(elements));
}

inline vec widened(const uint16_t* from) { return of_bf16(load_as<__m256i>(from)); }

inline vec widened(const int8_t* from) { return of_int8(load_as<__m128i>(from)); }

inline vec widened_first(const uint16_t* from, int count) {
  return of_bf16(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
}

inline vec widened_first(const int8_t* from, int count) {
  return of_int8(_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), from));
}
#else
inline vec widened(const uint16_t* from) {
#if defined(__AVX2__)
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(from)), 16);
#elif defined(__SSE2__)
  return (vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
  return (vec)(__builtin_convertvector(load_as<halves>(from), uvec) << 16);
#endif
}

inline vec widened(const int8_t* from) {
#if defined(__AVX2__)
  const __m128i elements = _mm_loadl_epi64((const __m128i*)from);
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(elements));
#elif defined(__SSE2__)
  const __m128i elements = _mm_cvtsi32_si128(load_as<int32_t>(from));
  const __m128i twice = _mm_unpacklo_epi8(elements, elements);
  return (vec)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(twice, twice), 24));
#else
  typedef int8_t bytes __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(__builtin_convertvector(load_as<bytes>(from), ivec), vec);
#endif
}

template <class Element>
inline vec widened_first(const Element* from, int count) {
  Element elements[WIDTH] = {};
  std::memcpy(elements, from, sizeof(Element) * count);
  return widened(elements);
}
#endif

// Widening several vectors. With bf16 at `avx2` and above, of each pair of vectors the first gets the even
// elements and the second the odd ones, which takes fewer instructions.
template <class Element>
constexpr bool IS_EVEN_ODD = WIDTH >= 8 && std::is_same<Element, uint16_t>::value;

inline INLINE vec even_or_odd(uvec pairs, int v) {
  return (vec)(v % 2 == 0 ? pairs << 16 : pairs & 0xffff0000);
}

// Vector v of several that start at `from`.
template <class Element>
inline INLINE vec widen_vector(const Element* from, int v) {
  if constexpr (IS_EVEN_ODD<Element>) {
    return even_or_odd(load_as<uvec>(from + v / 2 * 2 * WIDTH), v);
  } else {
    return widened(from + v * WIDTH);
  }
}

// The same where vector v starts at from[v] + `at`. At `avx2`, those of a pair are adjacent.
template <class Element>
inline INLINE vec widen_vector(const Element* const* from, int64_t at, int v) {
  if constexpr (IS_EVEN_ODD<Element>) {
    const Element* first = from[v / 2 * 2] + at;
#if defined(__AVX512F__)
    const __m512i low = _mm512_castsi256_si512(load_as<__m256i>(first));
    const __m512i both = _mm512_inserti64x4(low, load_as<__m256i>(from[v / 2 * 2 + 1] + at), 1);
    return even_or_odd((uvec)both, v);
#else
    return even_or_odd(load_as<uvec>(first), v);
#endif
  } else {
    return widened(from[v] + at);
  }
}

// How many of the first `count` lanes of several vectors are in vector v.
inline int count_of_lanes(int count, int v) {
  const int rest = count - v * WIDTH;
  return rest < 0 ? 0 : rest < WIDTH ? rest : WIDTH;
}

// The first `count` elements of NV such vectors, followed by zeros; does not read past them.
template <int NV, class Element>
inline INLINE void widen_first(const Element* from, int count, vec (&elements)[NV]) {
  for (int v = 0; v < NV; ++v)
    elements[v] = widened_first(from + v * WIDTH, count_of_lanes(count, v));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Masked loads have 32-bit granularity, so the last elements are loaded one by one.
inline INLINE void widen_first(const uint16_t* from, int count, vec (&elements)[2]) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), pairs = _mm256_set1_epi32(count / 2);
  const auto in_pairs = (uvec)_mm256_maskload_epi32((const int*)from, _mm256_cmpgt_epi32(pairs, lane));
  const auto last = (uvec)_mm256_set1_epi32(count % 2 ? from[count - 1] : 0);
  const uvec both = in_pairs | (last & (uvec)_mm256_cmpeq_epi32(pairs, lane));
  elements[0] = (vec)(both << 16);
  elements[1] = (vec)(both & 0xffff0000);
}

inline INLINE void widen_first(const int8_t* from, int count, vec (&elements)[2]) {
  const __m128i lane = _mm_setr_epi32(0, 1, 2, 3), quads = _mm_set1_epi32(count / 4);
  const __m128i in_quads = _mm_maskload_epi32((const int*)from, _mm_cmpgt_epi32(quads, lane));
  const auto* rest = (const uint8_t*)from + count / 4 * 4;
  int last = 0;
  for (int i = 0; i < count % 4; ++i) last |= rest[i] << 8 * i;
  const __m128i both = _mm_or_si128(
      in_quads, _mm_and_si128(_mm_set1_epi32(last), _mm_cmpeq_epi32(quads, lane)));
  elements[0] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both));
  elements[1] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(both, both)));
}
#endif

// Converts two vectors of sums between sequential order and that of such vectors.
template <class Element>
inline INLINE void split_even_odd(vec* two) {
#if defined(__AVX512F__)
  if constexpr (IS_EVEN_ODD<Element>) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const auto first = (__m512)two[0], second = (__m512)two[1];
    two[0] = (vec)_mm512_permutex2var_ps(first, even, second);
    two[1] = (vec)_mm512_permutex2var_ps(first, odd, second);
  }
#elif defined(__AVX2__)
  if constexpr (IS_EVEN_ODD<Element>) {
    const auto first = (__m256)two[0], second = (__m256)two[1];
    const auto even = (__m256d)_mm256_shuffle_ps(first, second, 0x88);
    const auto odd = (__m256d)_mm256_shuffle_ps(first, second, 0xdd);
    two[0] = (vec)_mm256_permute4x64_pd(even, 0xd8);
    two[1] = (vec)_mm256_permute4x64_pd(odd, 0xd8);
  }
#endif
}

template <class Element>
inline INLINE void merge_even_odd(vec* two) {
#if defined(__AVX512F__)
  if constexpr (IS_EVEN_ODD<Element>) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const auto even = (__m512)two[0], odd = (__m512)two[1];
    two[0] = (vec)_mm512_permutex2var_ps(even, low, odd);
    two[1] = (vec)_mm512_permutex2var_ps(even, high, odd);
  }
#elif defined(__AVX2__)
  if constexpr (IS_EVEN_ODD<Element>) {
    const __m256 low = _mm256_unpacklo_ps((__m256)two[0], (__m256)two[1]);
    const __m256 high = _mm256_unpackhi_ps((__m256)two[0], (__m256)two[1]);
    two[0] = (vec)_mm256_permute2f128_ps(low, high, 0x20);
    two[1] = (vec)_mm256_permute2f128_ps(low, high, 0x31);
  }
#endif
}

// Writes round(x[i] / scale) to to[i * step] and returns the scale, by which the largest magnitude becomes
// 127. If x is not finite, the scale is NaN, and so is whatever is read with it.
inline float quantize(const float* x, int64_t size, int8_t* to, int64_t step) {
  vec most{};
  for (int64_t i = 0; i < size; i += WIDTH) {
    const vec v = load_first(x + i, size - i < WIDTH ? (int)(size - i) : WIDTH);
    most = larger(larger(most, v), -v);
  }
  float largest = most[0];
  for (int i = 1; i < WIDTH; ++i) largest = most[i] > largest ? most[i] : largest;
  const bool finite = all_finite(x, size);
  const float scale = finite ? largest / 127.0f : __builtin_nanf("");
  const bool empty = !finite || scale == 0.0f;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  for (int64_t i = 0; i < size; i += WIDTH) {
    const int count = size - i < WIDTH ? (int)(size - i) : WIDTH;
    ivec whole{};
    if (!empty) {
      vec v = load_first(x + i, count) / scale;
      // A subnormal scale is imprecise, so the largest quotient may exceed 127.
      v = larger(smaller(v, broadcast(127.0f)), broadcast(-127.0f));
      whole = (ivec)(v + shift) - (ivec)broadcast(shift);
    }
    for (int lane = 0; lane < count; ++lane) to[(i + lane) * step] = (int8_t)whole[lane];
  }
  return scale;
}

// Writes one head of one position: its key into column `lane` of a tile, its value into a row. With int8,
// tiles and rows are preceded by their scales.
void write_position(glm::Cache kind, const float* key, const float* value, int64_t head_dim,
                    int lane, void* tile, void* row) {
  switch (kind) {
    case glm::Cache::float32: {
      auto* keys = (float*)tile + lane;
      for (int64_t i = 0; i < head_dim; ++i) keys[i * glm::TILE] = key[i];
      std::memcpy(row, value, sizeof(float) * head_dim);
      return;
    }
    case glm::Cache::bfloat16: {
      auto *keys = (uint16_t*)tile + lane, *values = (uint16_t*)row;
      for (int64_t i = 0; i < head_dim; ++i) keys[i * glm::TILE] = to_bf16(key[i]);
      for (int64_t i = 0; i < head_dim; ++i) values[i] = to_bf16(value[i]);
      return;
    }
    case glm::Cache::int8: {
      auto *keys = (int8_t*)tile, *values = (int8_t*)row;
      constexpr int64_t SCALES = glm::TILE * glm::SCALE_BYTES;
      const float key_scale = quantize(key, head_dim, keys + SCALES + lane, glm::TILE);
      const float value_scale = quantize(value, head_dim, values + glm::SCALE_BYTES, 1);
      std::memcpy(keys + lane * glm::SCALE_BYTES, &key_scale, sizeof key_scale);
      std::memcpy(values, &value_scale, sizeof value_scale);
      return;
    }
  }
}

}  // namespace
