// Rows rounded to int8, one scale per row, times int8 weights, one scale per output. The largest
// inputs of a row, its outliers, stay float32 (after Dettmers et al. 2022): a few of them would
// make the scale coarse for all others. Sums of whole numbers are exact and everything else is done
// in one order, so all levels give the same bits.
#pragma once

#include "blocks.hpp"
#include "finish.hpp"
#include "instructions.hpp"

namespace {

using glm::PANEL;

constexpr int OUTLIERS = 4;

// In front of the numbers of a row, in a cache line of its own.
struct RowHead {
  float scale;
  int32_t start;  // of every sum
  int32_t place[OUTLIERS];
  float value[OUTLIERS];
};
constexpr int64_t HEAD_BYTES = 64;
static_assert(sizeof(RowHead) <= HEAD_BYTES, "rows begin behind their heads");

// Numbers of a row are filled up with zeros to a multiple of so many.
constexpr int64_t ROW_NUMBERS = 64;

// A row whose numbers are all smaller is rounded as if one were as large, so that no scale and no
// inverse of one is out of range.
constexpr float SMALLEST_MAGNITUDE = 0x1p-100f;

#if defined(GLM_HAS_DPBUSD)
typedef int8_t RowNumber;
// One factor of the instruction is unsigned: weights get 128 added, and sums begin with as much
// less. A step is four inputs: two lines of a panel, which has inputs two by two.
constexpr int32_t WEIGHT_OFFSET = 128;
constexpr int LINES = 2;
#else
typedef int16_t RowNumber;
constexpr int32_t WEIGHT_OFFSET = 0;
constexpr int LINES = 1;
#endif
constexpr int64_t LINE_BYTES = 2 * PANEL;

int64_t filled_up(int64_t depth) { return (depth + ROW_NUMBERS - 1) / ROW_NUMBERS * ROW_NUMBERS; }

int64_t int8_row_bytes(int64_t depth) {
  return HEAD_BYTES + filled_up(depth) * (int64_t)sizeof(RowNumber) + 64;
}

// WIDTH numbers of a row, or zeros behind its end.
inline vec load_part(const float* x, int64_t i, int64_t size) {
  return i + WIDTH <= size ? load(x + i) : load_first(x + i, (int)(size - i));
}

// Bits of magnitudes are in their order, and behind all of them those of what is not finite.
inline ivec magnitude_bits(vec x) { return (ivec)x & 0x7fffffff; }
constexpr int32_t NOT_FINITE = 0x7f800000;

// Numbers of a row that may be among those of largest magnitude.
constexpr int LANES = 16;

// The magnitudes of some numbers, as their bits, in vectors.
constexpr int LANE_VECTORS = LANES / WIDTH;
struct Lanes {
  ivec of[LANE_VECTORS] = {};
};

// For each lane, how many others are larger.
inline Lanes larger_ones(const Lanes& lanes) {
  int32_t twice[2 * LANES];
  std::memcpy(twice, lanes.of, sizeof lanes);
  std::memcpy(twice + LANES, lanes.of, sizeof lanes);
  Lanes counts;
  for (int turn = 1; turn < LANES; ++turn)
    for (int v = 0; v < LANE_VECTORS; ++v)
      counts.of[v] -= load_as<ivec>(twice + turn + v * WIDTH) > lanes.of[v];
  return counts;
}

// So many numbers of a row, at least, have these bits of a magnitude, or larger ones; INT32_MAX if some
// number is not finite.
inline int32_t bits_of_many(const float* x, int64_t size, int many) {
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
  const Lanes larger = larger_ones(most);
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

// The largest magnitudes of a row, one more than there are outliers, in order, and of equal ones the
// first; zeros where there are fewer.
struct Largest {
  int32_t place[OUTLIERS + 1] = {};
  float magnitude[OUTLIERS + 1] = {};

  void take(int32_t at, float size) {
    if (!(size > magnitude[OUTLIERS])) return;
    int k = OUTLIERS;
    for (; k > 0 && size > magnitude[k - 1]; --k) {
      place[k] = place[k - 1];
      magnitude[k] = magnitude[k - 1];
    }
    place[k] = at;
    magnitude[k] = size;
  }
};

// Numbers that are looked through together.
constexpr int LOOK = 64;

// A bit for each of LOOK numbers from `first` on: whether its magnitude has at least these bits.
inline uint64_t candidates_from(const float* x, int64_t first, int64_t size, int32_t least) {
  uint64_t found = 0;
  for (int i = 0; i < LOOK && first + i < size; i += WIDTH)
    found |= (uint64_t)lanes_from(magnitude_bits(load_part(x, first + i, size)), least) << i;
  return found;
}

// Returns whether all numbers are finite.
inline bool find_largest(const float* x, int64_t size, Largest& found) {
  const int32_t least = bits_of_many(x, size, OUTLIERS + 1);
  if (least == INT32_MAX) return false;
  int32_t places[2 * LOOK];
  int count = 0;
  const auto take_all = [&] {
    for (int k = 0; k < count; ++k) found.take(places[k], __builtin_fabsf(x[places[k]]));
    count = 0;
  };
  for (int64_t first = 0; first < size; first += LOOK) {
    uint64_t candidates = candidates_from(x, first, size, least);
    if (size - first < LOOK) candidates &= (1ull << (size - first)) - 1;
    const auto put = [&] {
      places[count] = (int32_t)first + __builtin_ctzll(candidates | 1ull << (LOOK - 1));
      count += candidates != 0;
      candidates &= candidates - 1;
    };
    // There are few, and nobody can predict where: so two come without a branch.
    put();
    put();
    while (candidates != 0) put();
    if (count > LOOK) take_all();
  }
  take_all();
  return true;
}

// Whole numbers that fit into int8 or int16; others become anything. GCC 12 would convert them one by
// one.
template <class Number>
inline void store_narrow(Number* to, ivec whole) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Number) == 1) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)whole));
  } else {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)whole));
  }
#elif defined(__AVX2__)
  const __m256i twice = _mm256_packs_epi32((__m256i)whole, (__m256i)whole);
  const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0xd8));
  if constexpr (sizeof(Number) == 1) {
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(halves, halves));
  } else {
    _mm_storeu_si128((__m128i*)to, halves);
  }
#else
  typedef Number narrow __attribute__((vector_size(sizeof(Number) * WIDTH)));
  const narrow numbers = __builtin_convertvector(whole, narrow);
  std::memcpy(to, &numbers, sizeof numbers);
#endif
}

// The largest magnitude that is no outlier becomes 127, others the nearest whole number, ties to
// even, and outliers 0. A row with anything that is not finite becomes zeros with a scale that is
// not a number.
template <class Number>
void round_row(const float* x, int64_t depth, void* row) {
  auto* head = (RowHead*)row;
  auto* numbers = (Number*)((char*)row + HEAD_BYTES);
  std::memset(row, 0, HEAD_BYTES + sizeof(Number) * filled_up(depth));
  Largest largest;
  if (!find_largest(x, depth, largest)) {
    head->scale = __builtin_nanf("");
    return;
  }
  for (int k = 0; k < OUTLIERS && largest.magnitude[k] > 0; ++k) {
    head->place[k] = largest.place[k];
    head->value[k] = x[largest.place[k]];
  }
  float magnitude = largest.magnitude[OUTLIERS];
  if (magnitude < SMALLEST_MAGNITUDE) magnitude = SMALLEST_MAGNITUDE;
  head->scale = magnitude / 127.0f;
  const float inverse = 127.0f / magnitude;
  const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  for (int64_t i = 0; i < depth; i += WIDTH) {  // an outlier may become anything
    const vec scaled = load_part(x, i, depth) * inverse;
    store_narrow(numbers + i, (ivec)((uvec)(scaled + shift) - (uvec)shift));
  }
  for (int k = 0; k < OUTLIERS && head->value[k] != 0.0f; ++k) numbers[head->place[k]] = 0;
}

template <class Number>
int32_t sum_of(const Number* numbers, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += numbers[i];
  return total;
}

void lay_int8_row(const float* x, int64_t depth, void* row) {
  round_row<RowNumber>(x, depth, row);
  const auto* numbers = (const RowNumber*)((char*)row + HEAD_BYTES);
  ((RowHead*)row)->start = -WEIGHT_OFFSET * sum_of(numbers, depth);
}

// Sums of V vectors of columns, in order, with outliers and scales.
template <int V>
inline void finish_int8_row(const LinearPanel& panel, int64_t row, int column, const vec* sums) {
  const auto* head = (const RowHead*)((const char*)panel.x + row * panel.row_bytes);
  const auto* scales = (const float*)panel.weight + column;
  const char* weight = (const char*)panel.weight + PANEL * sizeof(float) + column * 2;
  vec y[V];
  for (int v = 0; v < V; ++v)
    y[v] = __builtin_convertvector((ivec)sums[v], vec) * head->scale;
  for (int k = 0; k < OUTLIERS; ++k) {
    const char* line = weight + head->place[k] / 2 * LINE_BYTES;
    const int above = head->place[k] % 2 ? 0 : 16;
    for (int v = 0; v < V; ++v) {
      const ivec number = widen(line + v * 2 * WIDTH) << above >> 16;
      y[v] += __builtin_convertvector(number, vec) * head->value[k];
    }
  }
  for (int v = 0; v < V; ++v)
    write(panel, row, column + v * WIDTH, y[v] * load(scales + v * WIDTH));
}

#if defined(GLM_HAS_DPBUSD)
// Four inputs of M rows times the weights of V vectors of columns. The vectors have columns as
// `join_groups` says.
template <int M, int V>
inline void add_quads(const char* x, int64_t row_bytes, const char* first, const char* second,
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
    const ivec value = ivec{} + load_as<int32_t>(x + m * row_bytes);
    for (int v = 0; v < V; ++v) sums[m][v] = dpbusd(sums[m][v], w[v], value);
  }
}
#else
// Two int16 times two int16, in every 32 bits.
inline ivec products_of_pairs(ivec a, ivec b) {
#if defined(__AVX512F__)
  return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Two inputs of M rows times the weights of V vectors of columns.
template <int M, int V>
inline void add_whole_pairs(const char* x, int64_t row_bytes, const char* weight,
                            ivec (*sums)[V]) {
  ivec w[V];
  for (int v = 0; v < V; ++v) w[v] = widen(weight + v * 2 * WIDTH);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const ivec value = ivec{} + load_as<int32_t>(x + m * row_bytes);
    for (int v = 0; v < V; ++v) sums[m][v] += products_of_pairs(w[v], value);
  }
}
#endif

// As `block` in linear.hpp.
template <int M, int V>
void int8_block(const LinearPanel& panel, int64_t row, int column, Ahead ahead) {
  const char* rows = (const char*)panel.x + row * panel.row_bytes;
  const char* x = rows + HEAD_BYTES;
  const char* weight = (const char*)panel.weight + PANEL * sizeof(float) + column * 2;
  const int64_t lines = (panel.depth + 1) / 2;
  ivec sums[M][V];
  for (int m = 0; m < M; ++m) {
    const auto* head = (const RowHead*)(rows + m * panel.row_bytes);
    for (int v = 0; v < V; ++v) sums[m][v] = ivec{} + head->start;
  }
  for (int64_t line = 0; line + LINES <= lines; line += LINES) {
    for (int i = 0; i < LINES; ++i) ahead.ask(i * ahead.step);
    ahead.from += LINES * ahead.step;
#if defined(GLM_HAS_DPBUSD)
    add_quads<M, V>(x, panel.row_bytes, weight, weight + LINE_BYTES, sums);
#else
    add_whole_pairs<M, V>(x, panel.row_bytes, weight, sums);
#endif
    x += 2 * LINES * sizeof(RowNumber);
    weight += LINES * LINE_BYTES;
  }
#if defined(GLM_HAS_DPBUSD)
  static constexpr char ZEROS[LINE_BYTES] = {};
  if (lines % 2) add_quads<M, V>(x, panel.row_bytes, weight, ZEROS, sums);
#endif
  const LinearPanel own = panel;
  for (int m = 0; m < M; ++m) {
    vec of_row[V];
    for (int v = 0; v < V; ++v) of_row[v] = (vec)sums[m][v];
#if defined(GLM_HAS_DPBUSD)
    for (int v = 0; v < V; v += 2) join_groups(of_row[v], of_row[v + 1]);
#endif
    finish_int8_row<V>(own, row + m, column, of_row);
  }
}

}  // namespace
