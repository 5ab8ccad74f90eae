// Wrappers of instructions that only some levels have.
#pragma once

#include "vector.hpp"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define GLM_HAS_DPBUSD 1
#endif

namespace {

#if defined(GLM_HAS_DPBUSD)

// Adds four products of unsigned and signed bytes to each sum; exact modulo 2^32.
inline ivec dpbusd(ivec sums, ivec unsigned_bytes, ivec signed_bytes) {
#if defined(__AVX512VNNI__)
  return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#else
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)unsigned_bytes,
                                       (__m256i)signed_bytes);
#endif
}

// Interleaves the 16-bit elements of the lower halves of each 128-bit lane.
inline ivec unpack_low(ivec a, ivec b) {
#if defined(__AVX512F__)
  return (ivec)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
#else
  return (ivec)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
#endif
}

// The same for the upper halves.
inline ivec unpack_high(ivec a, ivec b) {
#if defined(__AVX512F__)
  return (ivec)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  return (ivec)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#endif
}

#else

typedef int16_t hvec __attribute__((vector_size(4 * WIDTH)));

// Sums of two products of unsigned and signed bytes; the caller makes sure that they fit into 16 bits.
inline hvec products_of_bytes(ivec unsigned_bytes, ivec signed_bytes) {
#if defined(__AVX512F__)
  return (hvec)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
  return (hvec)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
#else
  const auto low = (hvec)(unsigned_bytes & 0x00ff00ff);
  const auto high = (hvec)((uvec)unsigned_bytes >> 8 & 0x00ff00ff);
  return low * ((hvec)signed_bytes << 8 >> 8) + high * ((hvec)signed_bytes >> 8);
#endif
}

// Negates bytes where `like` is negative; unspecified where `like` is 0.
inline ivec with_sign_of(ivec like, ivec bytes) {
#if defined(__AVX512F__)
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)like);
  return (ivec)_mm512_mask_sub_epi8((__m512i)bytes, negative, __m512i{}, (__m512i)bytes);
#elif defined(__AVX2__)
  return (ivec)_mm256_sign_epi8((__m256i)bytes, (__m256i)like);
#else
  typedef int8_t bytes_of_all __attribute__((vector_size(4 * WIDTH)));
  typedef uint8_t unsigned_bytes __attribute__((vector_size(4 * WIDTH)));  // -128 stays as it is
  const auto negative = (unsigned_bytes)((bytes_of_all)like < 0);
  return (ivec)(((unsigned_bytes)bytes ^ negative) - negative);
#endif
}

// Adds both 16-bit elements of each lane to its sum.
inline ivec add_both(ivec sums, hvec twos) {
#if defined(__AVX512F__)
  return sums + (ivec)_mm512_madd_epi16((__m512i)twos, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return sums + (ivec)_mm256_madd_epi16((__m256i)twos, _mm256_set1_epi16(1));
#else
  return sums + ((ivec)twos << 16 >> 16) + ((ivec)twos >> 16);
#endif
}

#endif

// After `unpack_low` and `unpack_high`, groups of four columns alternate between the two results. This
// restores their order.
inline void restore_column_order(vec& a, vec& b) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 low = (__m512)a, high = (__m512)b;
  a = (vec)_mm512_permutex2var_ps(low, first, high);
  b = (vec)_mm512_permutex2var_ps(low, second, high);
#elif defined(__AVX2__)
  const __m256 low = (__m256)a, high = (__m256)b;
  a = (vec)_mm256_permute2f128_ps(low, high, 0x20);
  b = (vec)_mm256_permute2f128_ps(low, high, 0x31);
#endif
}

// Flushes subnormal numbers to zero while it exists, as the bf16 instructions do.
struct FlushSubnormals {
#if defined(__SSE__)
  static constexpr unsigned FLUSHED_AND_ZEROS = 0x8040;
  const unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | FLUSHED_AND_ZEROS); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

// The opposite, within FlushSubnormals.
struct KeepSubnormals {
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();
  KeepSubnormals() { _mm_setcsr(before & ~FlushSubnormals::FLUSHED_AND_ZEROS); }
  ~KeepSubnormals() { _mm_setcsr(before); }
#endif
};

}  // namespace
