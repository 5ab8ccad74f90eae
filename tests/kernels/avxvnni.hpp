// The AVX-VNNI instruction of the kernels in plain C++, for processors that have AVX2: as avx512.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

inline __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
  typedef int32_t Int32s __attribute__((vector_size(32)));
  typedef uint32_t Uint32s __attribute__((vector_size(32)));
  auto total = (Uint32s)sums;
  for (int k = 0; k < 4; ++k) {
    const auto unsigned_bytes = (Int32s)((Uint32s)a >> (8 * k) & 0xff);
    total += (Uint32s)(unsigned_bytes * ((Int32s)b << (24 - 8 * k) >> 24));
  }
  return (__m256i)total;
}

}  // namespace

#define __AVXVNNI__ 1
