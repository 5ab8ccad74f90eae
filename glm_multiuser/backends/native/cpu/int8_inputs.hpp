// Inputs quantised to int8 with one scale per row, times int8 weights with one scale per output. The
// largest inputs of a row, its outliers, stay float32 (after Dettmers et al. 2022), because they would make
// the scale too coarse for the others. Integer sums are exact and floating-point operations have a fixed
// order, so all levels give the same bits.
#pragma once

#include "blocks.hpp"
#include "epilogue.hpp"
#include "instructions.hpp"
#include "row_offsets.hpp"

namespace {

using glm::PANEL;

constexpr int OUTLIERS = 4;

// Precedes the quantised inputs of a row, in a cache line of its own.
struct RowHead {
  float scale;
  int32_t start;  // initial value of every sum
  int32_t index[OUTLIERS];
  float value[OUTLIERS];
};
constexpr int64_t HEAD_BYTES = 64;
static_assert(sizeof(RowHead) <= HEAD_BYTES, "the head must not overlap the row");

// Rows are zero-padded to a multiple of this.
constexpr int64_t ROW_ELEMENTS = 64;

// Lower bound of the magnitude that becomes 127: keeps the scale and its inverse within range.
constexpr float SMALLEST_MAGNITUDE = 0x1p-100f;

#if defined(GLM_HAS_DPBUSD)
typedef int8_t RowElement;
// One operand of dpbusd is unsigned: 128 is added to weights, and sums start at the value that compensates
// for it. A step is four inputs, which are two lines of a panel.
constexpr int32_t WEIGHT_OFFSET = 128;
constexpr int LINES = 2;
#else
typedef int16_t RowElement;
constexpr int32_t WEIGHT_OFFSET = 0;
constexpr int LINES = 1;
#endif
constexpr int64_t LINE_BYTES = 2 * PANEL;

int64_t padded_depth(int64_t depth) { return (depth + ROW_ELEMENTS - 1) / ROW_ELEMENTS * ROW_ELEMENTS; }

int64_t int8_row_bytes(int64_t depth) {
  return HEAD_BYTES + padded_depth(depth) * (int64_t)sizeof(RowElement) + 64;
}

// WIDTH elements of a row, with zeros past its end.
inline vec load_part(const float* x, int64_t i, int64_t size) {
  return i + WIDTH <= size ? load(x + i) : load_first(x + i, (int)(size - i));
}

// Compared as integers, these are ordered by magnitude; those of infinity and NaN are the largest.
inline ivec magnitude_bits(vec x) { return (ivec)x & 0x7fffffff; }
constexpr int32_t NOT_FINITE = 0x7f800000;

// Running maxima that are kept over a row.
constexpr int LANES = 16;

// The bits of LANES magnitudes.
constexpr int LANE_VECTORS = LANES / WIDTH;
struct Lanes {
  ivec of[LANE_VECTORS] = {};
};

// For each lane, the number of lanes with larger values.
inline Lanes count_larger(const Lanes& lanes) {
  int32_t twice[2 * LANES];
  std::memcpy(twice, lanes.of, sizeof lanes);
  std::memcpy(twice + LANES, lanes.of, sizeof lanes);
  Lanes counts;
  for (int rotation = 1; rotation < LANES; ++rotation)
    for (int v = 0; v < LANE_VECTORS; ++v)
      counts.of[v] -= load_as<ivec>(twice + rotation + v * WIDTH) > lanes.of[v];
  return counts;
}

// Bits of a magnitude that at least `many` elements of a row reach; INT32_MAX if any element is not finite.
inline int32_t magnitude_threshold(const float* x, int64_t size, int many) {
  Lanes most;
  int64_t i = 0;
  const auto look = [&](ivec& lanes) {
    const ivec bits = magnitude_bits(load_part(x, i, size));
    lanes = bits > lanes ? bits : lanes;
    i += WIDTH;
  };
  while (i + LANES <= size)
    for (ivec& lanes : most.of) look(lanes);
  while (i < size) look(most.of[0]);
  const Lanes larger = count_larger(most);
  ivec least = ivec{} + INT32_MAX;
  uint32_t not_finite = 0;
  for (int v = 0; v < LANE_VECTORS; ++v) {
    not_finite |= lanes_from(most.of[v], NOT_FINITE);
    const ivec bits = larger.of[v] < many ? most.of[v] : INT32_MAX;
    least = bits < least ? bits : least;
  }
  int32_t bits = INT32_MAX;
  for (int lane = 0; lane < WIDTH; ++lane) bits = least[lane] < bits ? least[lane] : bits;
  return not_finite == 0 ? bits : INT32_MAX;
}

// The OUTLIERS + 1 largest magnitudes of a row, in descending order, ties in order of index; 0 if there
// are fewer.
struct Largest {
  int32_t index[OUTLIERS + 1] = {};
  float magnitude[OUTLIERS + 1] = {};

  void take(int32_t at, float size) {
    if (!(size > magnitude[OUTLIERS])) return;
    int k = OUTLIERS;
    for (; k > 0 && size > magnitude[k - 1]; --k) {
      index[k] = index[k - 1];
      magnitude[k] = magnitude[k - 1];
    }
    index[k] = at;
    magnitude[k] = size;
  }
};

// Elements that are scanned at a time.
constexpr int LOOK = 64;

// A bit mask over LOOK elements starting at `first`: whether the bits of the magnitude are at least `least`.
inline uint64_t candidates_from(const float* x, int64_t first, int64_t size, int32_t least) {
  uint64_t found = 0;
  for (int i = 0; i < LOOK && first + i < size; i += WIDTH)
    found |= (uint64_t)lanes_from(magnitude_bits(load_part(x, first + i, size)), least) << i;
  return found;
}

// Returns whether all elements are finite.
inline bool find_largest(const float* x, int64_t size, Largest& found) {
  const int32_t least = magnitude_threshold(x, size, OUTLIERS + 1);
  if (least == INT32_MAX) return false;
  int32_t indices[2 * LOOK];
  int count = 0;
  const auto take_all = [&] {
    for (int k = 0; k < count; ++k) found.take(indices[k], __builtin_fabsf(x[indices[k]]));
    count = 0;
  };
  for (int64_t first = 0; first < size; first += LOOK) {
    uint64_t candidates = candidates_from(x, first, size, least);
    if (size - first < LOOK) candidates &= (1ull << (size - first)) - 1;
    const auto append_next = [&] {
      indices[count] = (int32_t)first + __builtin_ctzll(candidates | 1ull << (LOOK - 1));
      count += candidates != 0;
      candidates &= candidates - 1;
    };
    // Candidates are few and unpredictable, so the first two are appended without a branch.
    append_next();
    append_next();
    while (candidates != 0) append_next();
    if (count > LOOK) take_all();
  }
  take_all();
  return true;
}

// Narrows to int8 or int16; values out of range become unspecified. GCC 12 does not vectorise this.
template <class Element>
inline void store_narrow(Element* to, ivec whole) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Element) == 1) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)whole));
  } else {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)whole));
  }
#elif defined(__AVX2__)
  const __m256i twice = _mm256_packs_epi32((__m256i)whole, (__m256i)whole);
  const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0xd8));
  if constexpr (sizeof(Element) == 1) {
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(halves, halves));
  } else {
    _mm_storeu_si128((__m128i*)to, halves);
  }
#else
  typedef Element narrow __attribute__((vector_size(sizeof(Element) * WIDTH)));
  const narrow quantised = __builtin_convertvector(whole, narrow);
  std::memcpy(to, &quantised, sizeof quantised);
#endif
}

// Quantises a row symmetrically, rounding to nearest, ties to even: the largest magnitude that is not an
// outlier becomes 127, and outliers become 0. A row that is not finite becomes zeros with a NaN scale.
template <class Element>
void round_row(const float* x, int64_t depth, void* row) {
  auto* head = (RowHead*)row;
  auto* quantised = (Element*)((char*)row + HEAD_BYTES);
  std::memset(row, 0, HEAD_BYTES + sizeof(Element) * padded_depth(depth));
  Largest largest;
  if (!find_largest(x, depth, largest)) {
    head->scale = __builtin_nanf("");
    return;
  }
  for (int k = 0; k < OUTLIERS && largest.magnitude[k] > 0; ++k) {
    head->index[k] = largest.index[k];
    head->value[k] = x[largest.index[k]];
  }
  float magnitude = largest.magnitude[OUTLIERS];
  if (magnitude < SMALLEST_MAGNITUDE) magnitude = SMALLEST_MAGNITUDE;
  head->scale = magnitude / 127.0f;
  const float inverse = 127.0f / magnitude;
  const vec shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  for (int64_t i = 0; i < depth; i += WIDTH) {  // outliers may overflow; they are overwritten below
    const vec scaled = load_part(x, i, depth) * inverse;
    store_narrow(quantised + i, (ivec)((uvec)(scaled + shift) - (uvec)shift));
  }
  for (int k = 0; k < OUTLIERS && head->value[k] != 0.0f; ++k) quantised[head->index[k]] = 0;
}

template <class Element>
int32_t sum_of(const Element* quantised, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += quantised[i];
  return total;
}

void pack_int8_row(const float* x, int64_t depth, void* row) {
  round_row<RowElement>(x, depth, row);
  const auto* quantised = (const RowElement*)((char*)row + HEAD_BYTES);
  ((RowHead*)row)->start = -WEIGHT_OFFSET * sum_of(quantised, depth);
}

// Applies scales and outliers to the sums of V vectors of columns, and stores the results.
template <int V>
inline void finish_int8_row(const LinearPanel& panel, int64_t row, int column, const vec* sums) {
  const auto* head = (const RowHead*)((const char*)panel.x + row * panel.row_bytes);
  const auto* scales = (const float*)panel.weight + column;
  const char* weight = (const char*)panel.weight + PANEL * sizeof(float) + column * 2;
  vec y[V];
  for (int v = 0; v < V; ++v)
    y[v] = __builtin_convertvector((ivec)sums[v], vec) * head->scale;
  for (int k = 0; k < OUTLIERS; ++k) {
    const char* line = weight + head->index[k] / 2 * LINE_BYTES;
    const int above = head->index[k] % 2 ? 0 : 16;
    for (int v = 0; v < V; ++v) {
      const ivec w = widen(line + v * 2 * WIDTH) << above >> 16;
      y[v] += __builtin_convertvector(w, vec) * head->value[k];
    }
  }
  for (int v = 0; v < V; ++v)
    store_result(panel, row, column + v * WIDTH, y[v] * load(scales + v * WIDTH));
}

#if defined(GLM_HAS_DPBUSD)
// Four inputs of M rows times V vectors of weights. Columns of sums are permuted; `restore_column_order`
// undoes it.
template <int M, int V>
inline void add_quads(const char* x, const RowOffsets<M>& rows, const char* first, const char* second,
                      ivec (*sums)[V]) {
  ivec w[V];
  const ivec offset = ivec{} + (int32_t)0x80808080;
  for (int v = 0; v < V; v += 2) {
    const ivec a = load_as<ivec>(first + v * 2 * WIDTH) ^ offset;
    const ivec b = load_as<ivec>(second + v * 2 * WIDTH) ^ offset;
    w[v] = unpack_low(a, b);
    w[v + 1] = unpack_high(a, b);
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const ivec value = ivec{} + rows.template at<int32_t>(x, m);
    for (int v = 0; v < V; ++v) sums[m][v] = dpbusd(sums[m][v], w[v], value);
  }
}
#else
// Dot products of two int16 pairs in every 32-bit lane.
inline ivec products_of_pairs(ivec a, ivec b) {
#if defined(__AVX512F__)
  return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Two inputs of M rows times V vectors of weights.
template <int M, int V>
inline void add_int16_pairs(const char* x, const RowOffsets<M>& rows, const char* weight,
                            ivec (*sums)[V]) {
  ivec w[V];
  for (int v = 0; v < V; ++v) w[v] = widen(weight + v * 2 * WIDTH);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const ivec value = ivec{} + rows.template at<int32_t>(x, m);
    for (int v = 0; v < V; ++v) sums[m][v] += products_of_pairs(w[v], value);
  }
}
#endif

// Same as `block` in linear.hpp. A step is a line; all chunks but the last have whole groups of LINES.
template <int M, int V>
void int8_block(const LinearPanel& panel, int64_t row, int column, Prefetcher ahead,
                const Chunk& chunk) {
  const char* rows = (const char*)panel.x + row * panel.row_bytes;
  const char* x = rows + HEAD_BYTES + chunk.first * (int64_t)(2 * sizeof(RowElement));
  RowOffsets<M> offsets(panel.row_bytes);
  const char* weight = (const char*)panel.weight + PANEL * sizeof(float) + column * 2 +
                       chunk.first * LINE_BYTES;
  const int64_t lines = (panel.depth + 1) / 2, offset = column * panel.rows + row * V * WIDTH;
  ivec sums[M][V];
  if (chunk.first == 0) {
    for (int m = 0; m < M; ++m) {
      const auto* head = (const RowHead*)(rows + m * panel.row_bytes);
      for (int v = 0; v < V; ++v) sums[m][v] = ivec{} + head->start;
    }
  } else {
    load_sums(chunk.sums + offset, sums);
  }
  for (int64_t line = chunk.first; line + LINES <= chunk.last; line += LINES) {
    for (int i = 0; i < LINES; ++i) ahead.prefetch(i * ahead.step);
    ahead.from += LINES * ahead.step;
#if defined(GLM_HAS_DPBUSD)
    add_quads<M, V>(x, offsets, weight, weight + LINE_BYTES, sums);
#else
    add_int16_pairs<M, V>(x, offsets, weight, sums);
#endif
    x += 2 * LINES * sizeof(RowElement);
    offsets.keep();
    weight += LINES * LINE_BYTES;
  }
  if (chunk.last < lines) return store_sums(chunk.sums + offset, sums);
#if defined(GLM_HAS_DPBUSD)
  static constexpr char ZEROS[LINE_BYTES] = {};
  if (lines % 2) add_quads<M, V>(x, offsets, weight, ZEROS, sums);
#endif
  const LinearPanel own = panel;
  for (int m = 0; m < M; ++m) {
    vec of_row[V];
    for (int v = 0; v < V; ++v) of_row[v] = (vec)sums[m][v];
#if defined(GLM_HAS_DPBUSD)
    for (int v = 0; v < V; v += 2) restore_column_order(of_row[v], of_row[v + 1]);
#endif
    finish_int8_row<V>(own, row + m, column, of_row);
  }
}

}  // namespace
