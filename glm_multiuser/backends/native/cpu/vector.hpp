// The vectors of one level, in the compiler's own notation, so that one source serves all levels.
// Everything is in an unnamed namespace: two levels must never share a function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));

template <class V, class T>
inline V load_as(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline vec load(const float* from) { return load_as<vec>(from); }

// WIDTH numbers in f16 -> float32, exactly, even where a processor takes subnormal float32 numbers
// for nothing.
inline vec load_f16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vec)_mm256_cvtph_ps(load_as<__m128i>(from));
#elif defined(__aarch64__)
  return (vec)vcvt_f32_f16(load_as<float16x4_t>(from));
#else
  typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
  const uvec all_bits = __builtin_convertvector(load_as<halves>(from), uvec);
  const uvec bits = all_bits & 0x7fff, sign = (all_bits & 0x8000) << 16;
  const uvec subnormal = (uvec)((ivec)bits < 0x400), infinite = (uvec)((ivec)bits > 0x7bff);
  // The exponents differ by 112; twice that makes the largest one the largest again. A subnormal
  // number gets a leading 1, which is taken away from the result: 2^-14, whose exponent is 113.
  const uvec wide = (bits << 13) + (112u << 23) + (infinite & (112u << 23));
  const vec x = (vec)(wide + (subnormal & (1u << 23))) - (vec)(subnormal & (113u << 23));
  return (vec)((uvec)x | sign);
#endif
}

// 2 * WIDTH bytes -> as many int16, two by two.
inline ivec widen(const char* from) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepi8_epi16(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi8_epi16(load_as<__m128i>(from));
#else
  int16_t wide[2 * WIDTH];
  for (int i = 0; i < 2 * WIDTH; ++i) wide[i] = (int8_t)from[i];
  return load_as<ivec>(wide);
#endif
}
inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

inline vec all(float x) { return x - vec{}; }

// So that the compiler does not change the order of whole numbers' sums, for which it might run out of
// registers.
template <class V>
inline V separate(V x) {
#if defined(__x86_64__) && !defined(GLM_EMULATED)
  asm("" : "+v"(x));
#elif defined(__aarch64__) && !defined(GLM_EMULATED)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// Sums that are zero. One by one: compilers fill an array as a whole with an instruction (`rep stos`)
// that takes as long as hundreds of others to begin.
template <int M, int V>
inline INLINE void clear(vec (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = separate(vec{});
}

// a * b + c, rounded once, at every level. Where a processor's own instruction is not compiled in,
// the C library computes it.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  vec y;
  for (int i = 0; i < WIDTH; ++i) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return y;
#endif
}

// a * b + c, rounded once where the processor has an instruction for it, and otherwise twice. Compilers
// are to fuse nothing by themselves (`-ffp-contract=off`): they may in a loop over several rows, and not
// in the one over a single row.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

// The first `count` numbers, and zeros; what lies behind them is not read.
inline vec load_first(const float* from, int count) {
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (vec)_mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
#else
  vec v{};
  std::memcpy(&v, from, sizeof(float) * count);
  return v;
#endif
}

// x at the first `count` places behind `i`, and zeros. The partners of a rotary embedding lie side by
// side, where it rotates one half of a head with the other, or they are neighbours, in one vector.
inline vec load_at(const float* x, const int32_t* places, int64_t i, int count) {
#if defined(__AVX512F__)
  const auto lanes = (__mmask16)((1u << count) - 1);
  const __m512i at = _mm512_maskz_loadu_epi32(lanes, places + i);
  const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i side_by_side = _mm512_add_epi32(_mm512_set1_epi32(places[i]), row);
  if (_mm512_mask_cmpneq_epi32_mask(lanes, at, side_by_side) == 0)
    return load_first(x + places[i], count);
  const __m512i lane = _mm512_sub_epi32(at, _mm512_set1_epi32((int)i));
  if (_mm512_mask_cmpge_epu32_mask(lanes, lane, _mm512_set1_epi32(count)) == 0)
    return (vec)_mm512_maskz_permutexvar_ps(lanes, lane, (__m512)load_first(x + i, count));
  return (vec)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, x, 4);
#else
  vec v{};
  for (int lane = 0; lane < count; ++lane) v[lane] = x[places[i + lane]];
  return v;
#endif
}

inline void store_first(float* to, vec v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
  std::memcpy(to, &v, sizeof(float) * count);
#endif
}

// A NaN in `a` stays: where one operand is NaN, the processor's instruction takes the second one.
// Compilers make a comparison and a choice of the expression, which is slower.
inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)b, (__m512)a);
#elif defined(__AVX2__)
  return (vec)_mm256_max_ps((__m256)b, (__m256)a);
#else
  return a < b ? b : a;
#endif
}

inline vec smaller(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_min_ps((__m512)b, (__m512)a);
#elif defined(__AVX2__)
  return (vec)_mm256_min_ps((__m256)b, (__m256)a);
#else
  return a > b ? b : a;
#endif
}

// The first `count` lanes of one vector, and the other lanes of another.
inline vec first_lanes(int count, vec first, vec others) {
  ivec lanes;
  for (int i = 0; i < WIDTH; ++i) lanes[i] = i;
  return lanes < count ? first : others;
}

// A bit for each lane that has at least this number.
inline uint32_t lanes_from(ivec lanes, int32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask((__m512i)lanes, _mm512_set1_epi32(least));
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)(lanes >= least));
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)(lanes >= least));
#else
  uint32_t bits = 0;
  for (int i = 0; i < WIDTH; ++i) bits |= (uint32_t)(lanes[i] >= least) << i;
  return bits;
#endif
}

// The numbers of a vector of N, the upper half of them with the lower half, and so on.
template <int N, class F>
inline float across(const float* numbers, F f) {
  if constexpr (N == 2) {
    return f(numbers[0], numbers[1]);
  } else {
    typedef float half __attribute__((vector_size(2 * N)));
    half low, high;
    std::memcpy(&low, numbers, sizeof low);
    std::memcpy(&high, numbers + N / 2, sizeof high);
    const half both = f(low, high);
    float less[N / 2];
    std::memcpy(less, &both, sizeof less);
    return across<N / 2>(less, f);
  }
}

template <class F>
inline float across_lanes(vec v, F f) {
#if defined(__AVX512F__)
  // Without a detour through memory, which would take as long again.
  typedef float eight __attribute__((vector_size(32)));
  typedef float four __attribute__((vector_size(16)));
  const auto lanes = (__m512d)v;
  const eight upper = (eight)_mm512_extractf64x4_pd(lanes, 1);
  const eight both = f((eight)_mm512_castpd512_pd256(lanes), upper);
  const four less = f((four)_mm256_castps256_ps128((__m256)both),
                      (four)_mm256_extractf128_ps((__m256)both, 1));
  const four two = f(less, (four)_mm_movehl_ps((__m128)less, (__m128)less));
  return f(two[0], two[1]);
#else
  float lanes[WIDTH];
  store(lanes, separate(v));  // or else the compiler keeps v in memory from the beginning
  return across<WIDTH>(lanes, f);
#endif
}

inline float sum(vec v) {
  return across_lanes(v, [](auto a, auto b) { return a + b; });
}

inline float largest_of(vec v) {
  return across_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

inline vec exponential(vec x) {
  // e^x = 2^n e^r with |r| <= ln(2)/2; the polynomial is the one of the Cephes library (Moshier).
  // Above 88.37 it stays finite, below -87.3 it is the smallest normal number; a NaN stays.
  x = larger(smaller(x, all(88.3762626f)), all(-87.3365479f));
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const vec n = multiply_add(x, all(1.44269504088896341f), all(shift)) - shift;
  vec r = multiply_add(n, all(-0.693359375f), x);
  r = multiply_add(n, all(2.12194440e-4f), r);
  vec p = all(1.9875691500e-4f);
  p = multiply_add(p, r, all(1.3981999507e-3f));
  p = multiply_add(p, r, all(8.3334519073e-3f));
  p = multiply_add(p, r, all(4.1665795894e-2f));
  p = multiply_add(p, r, all(1.6666665459e-1f));
  p = multiply_add(p, r, all(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#endif
  // n is at most 128 and at least -126, so 2^n in two factors is never out of range
  const ivec whole = (ivec)(n + shift) - (ivec)all(shift);
  const ivec half = whole >> 1;
  return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
}

// x * sigmoid(2 u), which equals 0.5 x (1 + tanh(u)).
inline vec gelu(vec x) {
  const vec twice = 1.5957691216057308f * x * multiply_add(0.044715f * x, x, all(1.0f));
  return x / (1.0f + exponential(-twice));
}

}  // namespace
