// Rows times one panel of packed weights. What an output is made of, and in which order, is the
// same however many rows there are, so a row's bits do not depend on its neighbours.
#pragma once

#include <type_traits>

#include "level.hpp"
#include "vector.hpp"

namespace {

using glm::Finish;
using glm::LinearPanel;
using glm::PANEL;

// Rows and columns whose sums are kept in registers.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 12, BLOCK_COLUMNS = 32;
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 6, BLOCK_COLUMNS = 16;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 16;
#endif
constexpr int VECTORS = BLOCK_COLUMNS / WIDTH;
constexpr int64_t AHEAD = 4096;  // bytes

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Two inputs, rounded to bf16.
#if defined(__AVX512BF16__)
typedef uint32_t Pair;

inline Pair pair(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }

template <int M>
inline void add_pairs(const Pair* x, int64_t width, const __m512bh* w, vec (*sums)[VECTORS]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512bh value = (__m512bh)_mm512_set1_epi32((int)x[m * width]);
    for (int v = 0; v < VECTORS; ++v)
      sums[m][v] = (vec)_mm512_dpbf16_ps((__m512)sums[m][v], w[v], value);
  }
}

// The bytes of 0 to 127 in bf16.
struct Bytes {
  uint8_t low[128], high[128];
};
constexpr Bytes whole_numbers() {
  Bytes bytes{};
  for (int number = 1; number < 128; ++number) {
    int exponent = 0;
    while (number >> (exponent + 1)) ++exponent;
    const int bits = (127 + exponent) << 7 | ((number << (7 - exponent)) & 0x7f);
    bytes.low[number] = (uint8_t)bits;
    bytes.high[number] = (uint8_t)(bits >> 8);
  }
  return bytes;
}
alignas(64) constexpr Bytes WHOLE = whole_numbers();
constexpr const uint8_t *LOW_BYTES = WHOLE.low, *HIGH_BYTES = WHOLE.high;
#else
struct Pair {
  float low, high;
};

inline Pair pair(uint16_t low, uint16_t high) { return {from_bf16(low), from_bf16(high)}; }

template <int M>
inline void add_pairs(const Pair* x, int64_t width, const vec* low, const vec* high,
                      vec (*sums)[VECTORS]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const vec first = all(x[m * width].low), second = all(x[m * width].high);
    for (int v = 0; v < VECTORS; ++v) sums[m][v] += low[v] * first;
    for (int v = 0; v < VECTORS; ++v) sums[m][v] += high[v] * second;
  }
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
#endif

// Each kind of weight: what lies in a panel, and one step of the sums. A step takes in one input,
// or two where weights come in pairs.
struct Float32 {
  typedef float X;
  static constexpr int scale_bytes = 0;
  static int64_t steps(int64_t depth) { return depth; }
  static constexpr int64_t step_bytes = PANEL * sizeof(float);

  template <int M>
  static inline void step(const X* x, int64_t width, const char* weight, vec (*sums)[VECTORS]) {
    vec w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) w[v] = load((const float*)weight + v * WIDTH);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const vec value = all(x[m * width]);
      for (int v = 0; v < VECTORS; ++v) sums[m][v] += w[v] * value;
    }
  }
};

struct BFloat16 {
  static constexpr int scale_bytes = 0;
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static constexpr int64_t step_bytes = PANEL * 2 * sizeof(uint16_t);

  typedef Pair X;

  template <int M>
  static inline void step(const X* x, int64_t width, const char* weight, vec (*sums)[VECTORS]) {
#if defined(__AVX512BF16__)
    __m512bh w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weight + v * 64);
    add_pairs<M>(x, width, w, sums);
#else
    vec low[VECTORS], high[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      const uvec pairs = load_as<uvec>(weight + v * sizeof(uvec));
      low[v] = (vec)(pairs << 16);
      high[v] = (vec)(pairs & 0xffff0000u);
    }
    add_pairs<M>(x, width, low, high, sums);
#endif
  }
};

struct Int8 {
  static constexpr int scale_bytes = PANEL * sizeof(float);
  static int64_t steps(int64_t depth) { return (depth + 1) / 2; }
  static constexpr int64_t step_bytes = PANEL * 2;
  typedef Pair X;

  template <int M>
  static inline void step(const X* x, int64_t width, const char* weight, vec (*sums)[VECTORS]) {
#if defined(__AVX512BF16__)
    // A whole number up to 127 is exact in bf16. The two bytes of each come from tables.
    const __m512i numbers = _mm512_loadu_si512(weight);
    const __m512i index = _mm512_abs_epi8(numbers);
    const __m512i low = _mm512_permutex2var_epi8(load_as<__m512i>(LOW_BYTES), index,
                                                 load_as<__m512i>(LOW_BYTES + 64));
    __m512i high = _mm512_permutex2var_epi8(load_as<__m512i>(HIGH_BYTES), index,
                                            load_as<__m512i>(HIGH_BYTES + 64));
    constexpr int A_OR_B_AND_C = 0xf8;
    high = _mm512_ternarylogic_epi32(high, numbers, _mm512_set1_epi8((char)0x80), A_OR_B_AND_C);
    const __m512bh w[2] = {(__m512bh)_mm512_unpacklo_epi8(low, high),
                           (__m512bh)_mm512_unpackhi_epi8(low, high)};
    add_pairs<M>(x, width, w, sums);
#else
    vec low[VECTORS], high[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      const ivec pairs = widen(weight + v * 2 * WIDTH);
      low[v] = __builtin_convertvector(pairs << 16 >> 16, vec);
      high[v] = __builtin_convertvector(pairs >> 16, vec);
    }
    add_pairs<M>(x, width, low, high, sums);
#endif
  }
};

int64_t row_bytes(glm::Weight kind, int64_t depth) {
  const int64_t bytes = kind == glm::Weight::float32 ? depth * (int64_t)sizeof(float)
                                                     : (depth + 1) / 2 * (int64_t)sizeof(Pair);
  return (bytes + 63) / 64 * 64 + 64;
}

void lay_row(glm::Weight kind, const float* x, int64_t depth, void* row) {
  if (kind == glm::Weight::float32) {
    std::memcpy(row, x, sizeof(float) * depth);
    return;
  }
  auto* pairs = (Pair*)row;
  for (int64_t i = 0; i < depth / 2; ++i) pairs[i] = pair(to_bf16(x[2 * i]), to_bf16(x[2 * i + 1]));
  if (depth % 2) pairs[depth / 2] = pair(to_bf16(x[depth - 1]), 0);
}

inline vec finished(vec y, const LinearPanel& panel, const float* residual, int count) {
  if (panel.finish == Finish::gelu) return gelu(y);
  if (panel.finish == Finish::add) return load_first(residual, count) * panel.factor + y;
  return y;
}

#if defined(__AVX512BF16__)
inline void part_groups(vec* sums) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = (__m512)sums[0], b = (__m512)sums[1];
  sums[0] = (vec)_mm512_permutex2var_ps(a, first, b);
  sums[1] = (vec)_mm512_permutex2var_ps(a, second, b);
}
#endif

// M rows from `row` on, BLOCK_COLUMNS columns from `column` on. `ahead` is memory that is wanted
// soon, and `ahead_step` how much of it to ask for in each step.
template <class W, int M>
void block(const LinearPanel& panel, int64_t row, int column, const char* ahead,
           int64_t ahead_step) {
  typedef typename W::X X;
  const int64_t steps = W::steps(panel.depth), width = panel.row_bytes / (int64_t)sizeof(X);
  const auto* x = (const X*)panel.x + row * width;
  const char* weight = (const char*)panel.weight + W::scale_bytes +
                       column * (W::step_bytes / PANEL);
  vec sums[M][VECTORS] = {};
  for (int64_t k = 0; k < steps; ++k) {
    __builtin_prefetch(ahead, 0, 3);
    if (W::step_bytes > 64) __builtin_prefetch(ahead + 64, 0, 3);
    ahead += ahead_step;
    W::template step<M>(x + k, width, weight, sums);
    weight += W::step_bytes;
  }
  const auto* scale = (const float*)panel.weight + column;
#if defined(__AVX512BF16__)
  // The tables' bytes were joined in groups of four columns, every second one to the first vector.
  if (std::is_same<W, Int8>::value)
    for (int m = 0; m < M; ++m) part_groups(sums[m]);
#endif
  for (int v = 0; v < VECTORS; ++v) {
    const int first = column + v * WIDTH;
    const int count = panel.columns - first < WIDTH ? panel.columns - first : WIDTH;
    if (count <= 0) break;
    const vec bias = load_first(panel.bias + first, count);
    for (int m = 0; m < M; ++m) {
      vec y = sums[m][v];
      if (W::scale_bytes) y = y * load(scale + v * WIDTH);
      const int64_t at = (row + m) * panel.stride + first;
      y = finished(y + bias, panel, panel.residual + at, count);
      if (count == WIDTH) {
        store(panel.y + at, y);
      } else {
        store_first(panel.y + at, y, count);
      }
    }
  }
}

template <class W, int M>
void block_of(int rows, const LinearPanel& panel, int64_t row, int column, const char* ahead,
              int64_t ahead_step) {
  if constexpr (M == 0) {
    return;
  } else if (rows == M) {
    block<W, M>(panel, row, column, ahead, ahead_step);
  } else {
    block_of<W, M - 1>(rows, panel, row, column, ahead, ahead_step);
  }
}

template <class W>
void linear_panel(const LinearPanel& panel) {
  // Blocks of about equal height: the last one should not be a low and slow one.
  const int64_t blocks = (panel.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t bytes = W::scale_bytes + W::steps(panel.depth) * W::step_bytes;
  const auto* begin = (const char*)panel.weight;
  for (int column = 0; column < panel.columns; column += BLOCK_COLUMNS) {
    for (int64_t number = 0; number < blocks; ++number) {
      const int64_t row = panel.rows * number / blocks;
      const int rows = (int)(panel.rows * (number + 1) / blocks - row);
      // One block runs as far ahead of itself as memory is slow; several share the next panel.
      const bool alone = blocks == 1;
      const char* ahead = alone ? begin + AHEAD : begin + bytes + bytes * number / blocks;
      const int64_t step = alone ? W::step_bytes : W::step_bytes / blocks;
      block_of<W, BLOCK_ROWS>(rows, panel, row, column, ahead, step);
    }
  }
}

void linear(glm::Weight kind, const LinearPanel& panel) {
  switch (kind) {
    case glm::Weight::float32: return linear_panel<Float32>(panel);
    case glm::Weight::bfloat16: return linear_panel<BFloat16>(panel);
    case glm::Weight::int8: return linear_panel<Int8>(panel);
  }
}

}  // namespace
