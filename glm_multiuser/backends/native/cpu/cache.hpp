// The numbers of a key/value cache: float32, bf16, or int8 with one scale for each head of a
// position. They are rounded when they are written, and widened again in registers.
#pragma once

#include <type_traits>

#include "half.hpp"
#include "level.hpp"
#include "rows.hpp"
#include "vector.hpp"

namespace {

// WIDTH numbers, exactly; of `widened_first` the first `count`, and nothing behind them is read.
inline vec widened(const float* from) { return load(from); }

inline vec widened_first(const float* from, int count) { return load_first(from, count); }

#if defined(__AVX512F__)
inline vec of_bf16(__m256i bits) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16); }

inline vec of_int8(__m128i numbers) {
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
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
  const __m128i numbers = _mm_loadl_epi64((const __m128i*)from);
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers));
#elif defined(__SSE2__)
  const __m128i numbers = _mm_cvtsi32_si128(load_as<int32_t>(from));
  const __m128i twice = _mm_unpacklo_epi8(numbers, numbers);
  return (vec)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(twice, twice), 24));
#else
  typedef int8_t bytes __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(__builtin_convertvector(load_as<bytes>(from), ivec), vec);
#endif
}

template <class Number>
inline vec widened_first(const Number* from, int count) {
  Number numbers[WIDTH] = {};
  std::memcpy(numbers, from, sizeof(Number) * count);
  return widened(numbers);
}
#endif

// Several vectors of numbers. With bf16 at `avx2` the first of every two has the even numbers of both, and
// the second the odd ones, which takes half as many instructions.
template <class Number>
constexpr bool APART = WIDTH == 8 && std::is_same<Number, uint16_t>::value;

// At which vector's place vector v is read, and vector v from there.
template <class Number>
constexpr int lies_at(int v) {
  return APART<Number> ? v / 2 * 2 : v;
}

template <class Number>
inline INLINE vec one_of_many(const Number* from, int v) {
  if constexpr (!APART<Number>) return widened(from);
  const auto pairs = load_as<uvec>(from);
  return (vec)(v % 2 == 0 ? pairs << 16 : pairs & 0xffff0000);
}

// How many of the first `count` lanes of several vectors are in vector v.
inline int count_of_lanes(int count, int v) {
  const int rest = count - v * WIDTH;
  return rest < 0 ? 0 : rest < WIDTH ? rest : WIDTH;
}

// The first `count` numbers of several such vectors, and zeros; what lies behind them is not read.
template <int NV, class Number>
inline INLINE void widen_first(const Number* from, int count, vec (&numbers)[NV]) {
  for (int v = 0; v < NV; ++v)
    numbers[v] = widened_first(from + v * WIDTH, count_of_lanes(count, v));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Whole words of 32 bits can be left out, but no part of one.
inline INLINE void widen_first(const uint16_t* from, int count, vec (&numbers)[2]) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), pairs = _mm256_set1_epi32(count / 2);
  const auto in_pairs = (uvec)_mm256_maskload_epi32((const int*)from, _mm256_cmpgt_epi32(pairs, place));
  const auto last = (uvec)_mm256_set1_epi32(count % 2 ? from[count - 1] : 0);
  const uvec both = in_pairs | (last & (uvec)_mm256_cmpeq_epi32(pairs, place));
  numbers[0] = (vec)(both << 16);
  numbers[1] = (vec)(both & 0xffff0000);
}

inline INLINE void widen_first(const int8_t* from, int count, vec (&numbers)[2]) {
  const __m128i place = _mm_setr_epi32(0, 1, 2, 3), quads = _mm_set1_epi32(count / 4);
  const __m128i in_quads = _mm_maskload_epi32((const int*)from, _mm_cmpgt_epi32(quads, place));
  const auto* rest = (const uint8_t*)from + count / 4 * 4;
  int last = 0;
  for (int i = 0; i < count % 4; ++i) last |= rest[i] << 8 * i;
  const __m128i both = _mm_or_si128(
      in_quads, _mm_and_si128(_mm_set1_epi32(last), _mm_cmpeq_epi32(quads, place)));
  numbers[0] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both));
  numbers[1] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(both, both)));
}
#endif

// Sums of such vectors, in order, become sums that lie as these do, and the other way round.
template <class Number>
inline INLINE void take_apart(vec* two) {
#if defined(__AVX2__)
  if constexpr (APART<Number>) {
    const auto first = (__m256)two[0], second = (__m256)two[1];
    const auto even = (__m256d)_mm256_shuffle_ps(first, second, 0x88);
    const auto odd = (__m256d)_mm256_shuffle_ps(first, second, 0xdd);
    two[0] = (vec)_mm256_permute4x64_pd(even, 0xd8);
    two[1] = (vec)_mm256_permute4x64_pd(odd, 0xd8);
  }
#endif
}

template <class Number>
inline INLINE void put_together(vec* two) {
#if defined(__AVX2__)
  if constexpr (APART<Number>) {
    const __m256 low = _mm256_unpacklo_ps((__m256)two[0], (__m256)two[1]);
    const __m256 high = _mm256_unpackhi_ps((__m256)two[0], (__m256)two[1]);
    two[0] = (vec)_mm256_permute2f128_ps(low, high, 0x20);
    two[1] = (vec)_mm256_permute2f128_ps(low, high, 0x31);
  }
#endif
}

// x[i] / scale, rounded to nearest, to to[i * step]. -> scale: the largest magnitude becomes 127.
// What is not finite has no place among whole numbers: the scale is NaN then, and with it all that
// is read.
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
      // A scale that is too small to be a normal number may be too small for the largest.
      v = larger(smaller(v, all(127.0f)), all(-127.0f));
      whole = (ivec)(v + shift) - (ivec)all(shift);
    }
    for (int lane = 0; lane < count; ++lane) to[(i + lane) * step] = (int8_t)whole[lane];
  }
  return scale;
}

// One head of one position: its key into column `lane` of a tile, its value into a row. With int8,
// the tile's scales and the row's scale lie in front of its numbers.
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
