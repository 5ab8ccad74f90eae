// Vectors of a level's width, in the compiler's vector extensions, so that all levels share one source.
// Everything is in an unnamed namespace: levels must not share functions at link time.
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

// WIDTH f16 values -> float32, exactly, even while subnormal float32 numbers are flushed to zero.
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
  // The exponent biases differ by 112; adding it twice keeps infinity and NaN. A subnormal number gets an
  // implicit leading 1, which is then subtracted: 2^-14, whose biased exponent is 113.
  const uvec wide = (bits << 13) + (112u << 23) + (infinite & (112u << 23));
  const vec x = (vec)(wide + (subnormal & (1u << 23))) - (vec)(subnormal & (113u << 23));
  return (vec)((uvec)x | sign);
#endif
}

// 2 * WIDTH int8 -> int16, two in each lane.
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

inline vec broadcast(float x) { return x - vec{}; }

// Keeps the compiler from reassociating integer sums, which may spill registers.
template <class V>
inline V optimizer_barrier(V x) {
#if defined(__x86_64__) && !defined(GLM_EMULATED)
  asm("" : "+v"(x));
#elif defined(__aarch64__) && !defined(GLM_EMULATED)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// Sets sums to zero one by one: for a whole array, compilers emit `rep stos`, which is slow to start.
template <int M, int V>
inline INLINE void clear(vec (&sums)[M][V]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = optimizer_barrier(vec{});
}

// a * b + c, rounded once, at every level; by the C library where there is no instruction for it.
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

// a * b + c, rounded once where there is an instruction for it, and otherwise twice. Compilers must not
// contract products and sums by themselves (`-ffp-contract=off`): they might in a loop over several rows
// but not over a single row.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

// The first `count` elements, followed by zeros; does not read past them.
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

// x[indices[i + lane]] for the first `count` lanes, and zeros. Avoids a gather for both rotary layouts: the
// indices are contiguous where halves of a head are rotated, and within the vector where neighbours are.
inline vec load_at(const float* x, const int32_t* indices, int64_t i, int count) {
#if defined(__AVX512F__)
  const auto lanes = (__mmask16)((1u << count) - 1);
  const __m512i at = _mm512_maskz_loadu_epi32(lanes, indices + i);
  const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i contiguous = _mm512_add_epi32(_mm512_set1_epi32(indices[i]), row);
  if (_mm512_mask_cmpneq_epi32_mask(lanes, at, contiguous) == 0)
    return load_first(x + indices[i], count);
  const __m512i lane = _mm512_sub_epi32(at, _mm512_set1_epi32((int)i));
  if (_mm512_mask_cmpge_epu32_mask(lanes, lane, _mm512_set1_epi32(count)) == 0)
    return (vec)_mm512_maskz_permutexvar_ps(lanes, lane, (__m512)load_first(x + i, count));
  return (vec)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, x, 4);
#else
  vec v{};
  for (int lane = 0; lane < count; ++lane) v[lane] = x[indices[i + lane]];
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

// Propagates a NaN in `a`: the instruction returns its second operand if either is NaN. Compilers would
// turn the expression into a comparison and a blend, which is slower.
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

// The first `count` lanes of `first`, and the other lanes of `others`.
inline vec first_lanes(int count, vec first, vec others) {
  ivec lanes;
  for (int i = 0; i < WIDTH; ++i) lanes[i] = i;
  return lanes < count ? first : others;
}

// A bit mask of the lanes that are at least `least`.
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

// Reduces N values pairwise: the upper half with the lower half, and so on.
template <int N, class F>
inline float reduce_halves(const float* values, F f) {
  if constexpr (N == 2) {
    return f(values[0], values[1]);
  } else {
    typedef float half __attribute__((vector_size(2 * N)));
    half low, high;
    std::memcpy(&low, values, sizeof low);
    std::memcpy(&high, values + N / 2, sizeof high);
    const half both = f(low, high);
    float less[N / 2];
    std::memcpy(less, &both, sizeof less);
    return reduce_halves<N / 2>(less, f);
  }
}

template <class F>
inline float reduce_lanes(vec v, F f) {
#if defined(__AVX512F__)
  // In registers: going through memory would take twice as long.
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
  store(lanes, optimizer_barrier(v));  // or the compiler would keep v in memory from the start
  return reduce_halves<WIDTH>(lanes, f);
#endif
}

inline float sum(vec v) {
  return reduce_lanes(v, [](auto a, auto b) { return a + b; });
}

inline float max_lane(vec v) {
  return reduce_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

inline vec exponential(vec x) {
  // e^x = 2^n e^r with |r| <= ln(2)/2; the polynomial is that of the Cephes library (Moshier).
  // Saturates above 88.37 and below -87.3, at the smallest normal number; propagates NaN.
  x = larger(smaller(x, broadcast(88.3762626f)), broadcast(-87.3365479f));
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const vec n = multiply_add(x, broadcast(1.44269504088896341f), broadcast(shift)) - shift;
  vec r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  vec p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#endif
  // -126 <= n <= 128, so each of the two factors of 2^n is a normal number.
  const ivec whole = (ivec)(n + shift) - (ivec)broadcast(shift);
  const ivec half = whole >> 1;
  return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
}

// x * sigmoid(2 u), which equals 0.5 x (1 + tanh(u)).
inline vec gelu(vec x) {
  const vec twice = 1.5957691216057308f * x * multiply_add(0.044715f * x, x, broadcast(1.0f));
  return x / (1.0f + exponential(-twice));
}

}  // namespace
