// The AVX-512 instructions of the kernels in plain C++, as the Software Developer's Manual has them
// (volume 2), for processors that have AVX2. The kernels are in this unnamed namespace, too, so its
// functions hide those of the compiler's header.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Macros in the header where compilers do not optimise.
#undef _mm512_extractf64x4_pd
#undef _mm512_extracti64x4_epi64
#undef _mm512_inserti64x4
#undef _mm512_mask_i32gather_ps
#undef _mm512_permute_ps
#undef _mm512_setr_epi32
#undef _mm512_slli_epi32
#undef _mm512_ternarylogic_epi32

namespace {

// Vectors whose lanes are one by one at hand.
template <class T, int COUNT>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * COUNT)));
};
typedef VectorOf<float, 16>::type Floats;
typedef VectorOf<int32_t, 16>::type Int32s;
typedef VectorOf<uint32_t, 16>::type Uint32s;
typedef VectorOf<int16_t, 32>::type Int16s;
typedef VectorOf<uint16_t, 32>::type Uint16s;
typedef VectorOf<int8_t, 64>::type Int8s;
typedef VectorOf<uint8_t, 64>::type Uint8s;

// A vector whose lane i is f(i).
template <class Vector, class F>
inline Vector each(F f) {
  Vector y;
  for (int i = 0; i < (int)(sizeof y / sizeof y[0]); ++i) y[i] = f(i);
  return y;
}

template <class F>
inline uint32_t mask_of(uint32_t wanted, F f) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (wanted >> i & (uint32_t)f(i)) << i;
  return mask;
}

// What is not wanted is not read.
template <class Vector>
inline Vector masked_load(uint32_t mask, const void* from) {
  Vector y{};
  for (int i = 0; i < (int)(sizeof y / sizeof y[0]); ++i) {
    auto number = y[i];
    if (mask >> i & 1) std::memcpy(&number, (const char*)from + i * sizeof number, sizeof number);
    y[i] = number;
  }
  return y;
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(Int32s{} + x); }
inline __m512i _mm512_set1_epi16(short x) { return (__m512i)(Int16s{} + x); }
inline __m512i _mm512_set1_epi8(char x) { return (__m512i)(Int8s{} + (int8_t)x); }

template <class... Numbers>
inline __m512i _mm512_setr_epi32(Numbers... numbers) {
  return (__m512i)Int32s{numbers...};
}
template <class... Numbers>
inline __m512i _mm512_set_epi16(Numbers... numbers) {  // the last lane first
  const Int16s reversed{(int16_t)numbers...};
  return (__m512i)each<Int16s>([&](int i) { return reversed[31 - i]; });
}

inline __m512i _mm512_loadu_si512(const void* from) {
  __m512i x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return (__m512)masked_load<Floats>(mask, from);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
  return (__m512i)masked_load<Int32s>(mask, from);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return (__m512i)masked_load<Int16s>(mask, from);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
  return (__m256i)masked_load<VectorOf<int16_t, 16>::type>(mask, from);
}
inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* from) {
  return (__m128i)masked_load<VectorOf<int8_t, 16>::type>(mask, from);
}
inline void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) std::memcpy((char*)to + 4 * i, (const char*)&x + 4 * i, 4);
}
inline __m512 _mm512_mask_i32gather_ps(__m512 x, __mmask16 mask, __m512i places, const void* from,
                                       int scale) {
  const auto at = (Int32s)places;
  auto y = (Floats)x;
  for (int i = 0; i < 16; ++i) {
    float number = y[i];
    if (mask >> i & 1) std::memcpy(&number, (const char*)from + (int64_t)at[i] * scale, 4);
    y[i] = number;
  }
  return (__m512)y;
}

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Uint32s)a + (Uint32s)b); }
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return (__m512i)((Uint32s)a - (Uint32s)b); }
inline __m512i _mm512_slli_epi32(__m512i a, unsigned bits) {
  return (__m512i)((Uint32s)a << (int)bits);
}
inline __m512i _mm512_abs_epi8(__m512i a) {
  const auto x = (Int8s)a;
  return (__m512i)(x < 0 ? -x : x);
}
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  const auto x = (Uint32s)a, y = (Uint32s)b, z = (Uint32s)c;
  Uint32s bits{};
  for (int row = 0; row < 8; ++row)
    if (table >> row & 1)
      bits |= (row & 4 ? x : ~x) & (row & 2 ? y : ~y) & (row & 1 ? z : ~z);
  return (__m512i)bits;
}
inline __m512i _mm512_mask_sub_epi8(__m512i otherwise, __mmask64 mask, __m512i a, __m512i b) {
  const auto difference = (Uint8s)a - (Uint8s)b, others = (Uint8s)otherwise;
  return (__m512i)each<Uint8s>([&](int i) { return mask >> i & 1 ? difference[i] : others[i]; });
}
inline __mmask64 _mm512_movepi8_mask(__m512i a) {
  const auto x = (Int8s)a;
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= (__mmask64)(x[i] < 0) << i;
  return mask;
}
inline __mmask16 _mm512_cmpge_epi32_mask(__m512i a, __m512i b) {
  const auto x = (Int32s)a, y = (Int32s)b;
  return (__mmask16)mask_of(0xffff, [&](int i) { return x[i] >= y[i]; });
}
inline __mmask16 _mm512_mask_cmpneq_epi32_mask(__mmask16 wanted, __m512i a, __m512i b) {
  const auto x = (Int32s)a, y = (Int32s)b;
  return (__mmask16)mask_of(wanted, [&](int i) { return x[i] != y[i]; });
}
inline __mmask16 _mm512_mask_cmpge_epu32_mask(__mmask16 wanted, __m512i a, __m512i b) {
  const auto x = (Uint32s)a, y = (Uint32s)b;
  return (__mmask16)mask_of(wanted, [&](int i) { return x[i] >= y[i]; });
}

template <class To, class From, class Vector>
inline To converted(Vector a) {
  return __builtin_convertvector((From)a, To);
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return (__m512i)converted<Int32s, VectorOf<uint16_t, 16>::type>(a);
}
inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return (__m512i)converted<Int32s, VectorOf<uint8_t, 16>::type>(a);
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return (__m512i)converted<Int32s, VectorOf<int8_t, 16>::type>(a);
}
inline __m512i _mm512_cvtepi8_epi16(__m256i a) {
  return (__m512i)converted<Int16s, VectorOf<int8_t, 32>::type>(a);
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return (__m128i)converted<VectorOf<int8_t, 16>::type, Int32s>(a);
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return (__m256i)converted<VectorOf<int16_t, 16>::type, Int32s>(a);
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) { return (__m512)converted<Floats, Int32s>(a); }

// The two halves of a vector, and of two halves one.
template <class Half, class Vector>
inline Half half_of(const Vector& a, int which) {
  Half y;
  std::memcpy(&y, (const char*)&a + which * sizeof y, sizeof y);
  return y;
}
inline __m512 joined(__m256 lower, __m256 upper) {
  const __m256 both[] = {lower, upper};
  __m512 y;
  std::memcpy(&y, both, sizeof y);
  return y;
}
inline __m256i _mm512_castsi512_si256(__m512i a) { return half_of<__m256i>(a, 0); }
inline __m512i _mm512_castsi256_si512(__m256i a) {
  return (__m512i)joined((__m256)a, __m256{});  // the upper half is undefined
}
inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int which) {
  const auto kept = half_of<__m256>((__m512)a, 1 - which);
  return (__m512i)(which == 0 ? joined((__m256)b, kept) : joined(kept, (__m256)b));
}
inline __m256d _mm512_castpd512_pd256(__m512d a) { return half_of<__m256d>(a, 0); }
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int which) { return half_of<__m256i>(a, which); }
inline __m256d _mm512_extractf64x4_pd(__m512d a, int which) { return half_of<__m256d>(a, which); }
inline __m512 _mm512_cvtph_ps(__m256i a) {
  return joined(_mm256_cvtph_ps(half_of<__m128i>(a, 0)), _mm256_cvtph_ps(half_of<__m128i>(a, 1)));
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const auto half = [&](int i) {
    return _mm256_fmadd_ps(half_of<__m256>(a, i), half_of<__m256>(b, i), half_of<__m256>(c, i));
  };
  return joined(half(0), half(1));
}

inline __m512 _mm512_permutexvar_ps(__m512i places, __m512 a) {
  return (__m512)__builtin_shuffle((Floats)a, (Int32s)places);
}
inline __m512 _mm512_maskz_permutexvar_ps(__mmask16 mask, __m512i places, __m512 a) {
  const auto x = (Floats)_mm512_permutexvar_ps(places, a);
  return (__m512)each<Floats>([&](int i) { return mask >> i & 1 ? x[i] : 0.0f; });
}
inline __m512 _mm512_permute_ps(__m512 a, int places) {  // of every four lanes
  const auto x = (Floats)a;
  return (__m512)each<Floats>([&](int i) { return x[i / 4 * 4 + (places >> (i % 4 * 2) & 3)]; });
}
inline __m512i _mm512_permutexvar_epi16(__m512i places, __m512i a) {
  return (__m512i)__builtin_shuffle((Int16s)a, (Int16s)places);
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i places, __m512 b) {
  return (__m512)__builtin_shuffle((Floats)a, (Floats)b, (Int32s)places);
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i places, __m512i b) {
  return (__m512i)__builtin_shuffle((Int16s)a, (Int16s)b, (Int16s)places);
}
inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i places, __m512i b) {
  return (__m512i)__builtin_shuffle((Int8s)a, (Int8s)b, (Int8s)places);
}

// In every 128 bits, the numbers of half of them of two vectors, in turn.
template <class Vector>
inline __m512i unpacked(__m512i a, __m512i b, int which) {
  const auto x = (Vector)a, y = (Vector)b;
  constexpr int COUNT = 16 / sizeof x[0];
  return (__m512i)each<Vector>([&](int i) {
    const int from = i / COUNT * COUNT + which * COUNT / 2 + i % COUNT / 2;
    return i % 2 == 0 ? x[from] : y[from];
  });
}
inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return unpacked<Int8s>(a, b, 0); }
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return unpacked<Int8s>(a, b, 1); }
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return unpacked<Int16s>(a, b, 0); }
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return unpacked<Int16s>(a, b, 1); }

// Where one operand is NaN, it is the second one that counts.
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  const auto x = (Floats)a, y = (Floats)b;
  return (__m512)(x > y ? x : y);
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  const auto x = (Floats)a, y = (Floats)b;
  return (__m512)(x < y ? x : y);
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  const auto x = (Floats)a, y = (Floats)b;
  return (__m512)each<Floats>([&](int i) {
    return std::isnan(y[i]) ? y[i] : std::ldexp(x[i], (int)std::floor(y[i]));
  });
}

inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  const auto x = (Int32s)a, y = (Int32s)b;
  const Int32s low = (x << 16 >> 16) * (y << 16 >> 16), high = (x >> 16) * (y >> 16);
  return (__m512i)((Uint32s)low + (Uint32s)high);
}
inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  const auto x = (Uint8s)a;
  const auto y = (Int8s)b;
  return (__m512i)each<Int16s>([&](int i) {
    const int sum = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return (int16_t)(sum < INT16_MIN ? INT16_MIN : sum > INT16_MAX ? INT16_MAX : sum);
  });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  const auto x = (Uint32s)a;
  const auto y = (Int32s)b;
  auto total = (Uint32s)sums;
  for (int k = 0; k < 4; ++k)
    total += (Uint32s)((Int32s)(x << (24 - 8 * k) >> 24) * (y << (24 - 8 * k) >> 24));
  return (__m512i)total;
}

// Subnormal numbers are zeros for the instructions of bfloat16, whatever the thread has set.
inline Floats without_subnormal(Floats x) {
  const Int32s is_normal = ((Int32s)x & 0x7fffffff) >= 0x00800000;
  return (Floats)((Int32s)x & (is_normal | INT32_MIN));
}
inline Uint32s rounded_to_bfloat16(__m512 numbers) {  // the lower halves are the numbers
  const Floats x = without_subnormal((Floats)numbers);
  const auto bits = (Uint32s)x;
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
  return (__m256bh)converted<VectorOf<uint16_t, 16>::type, Uint32s>(rounded_to_bfloat16(a));
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  const Uint32s x = rounded_to_bfloat16(lower), y = rounded_to_bfloat16(upper);
  return (__m512bh)each<Uint16s>([&](int i) { return (uint16_t)(i < 16 ? x[i] : y[i - 16]); });
}
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const auto x = (Uint32s)a, y = (Uint32s)b;
  const auto add = [](Floats sum, Uint32s one, Uint32s other) {
    const Floats product = without_subnormal((Floats)one) * without_subnormal((Floats)other);
    return without_subnormal(sum + product);
  };
  const Floats high = add(without_subnormal((Floats)sums), x & 0xffff0000, y & 0xffff0000);
  return (__m512)add(high, x << 16, y << 16);
}

}  // namespace

// What the compiler would define for a processor that has them.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#if defined(EMULATE_AVX512VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_AVX512BF16)
#define __AVX512VBMI__ 1
#define __AVX512BF16__ 1
#endif
