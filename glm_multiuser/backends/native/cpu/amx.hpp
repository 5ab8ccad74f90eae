// Products on tiles. Rows are taken by 16, and what lies behind the last of them with them, so each
// row goes through the same instructions in the same order, however many there are.
#pragma once

#include "linear.hpp"
#include "tile_groups.hpp"
#include "tiles.hpp"

namespace {

// So few rows are multiplied sooner without tiles where that makes no difference.
constexpr int64_t FEW_INT8_ROWS = 4;

// Weights of one step: two tiles side by side.
constexpr int64_t STEP_BYTES = TILE_ROWS * PAIR_BYTES;
constexpr int64_t TILES_AHEAD = 32768;  // bytes, into the second cache

// Each kind of product. A line is two inputs of a panel; a step takes in `lines` of them, and of
// every row `parts` times 64 bytes, which are `in_pieces` with those of the other rows of a tile, so
// that memory is read in order. `lay_lines` makes tiles of what lies otherwise in a panel, with
// columns as `join_groups` says.
struct BFloat16Tiles {
  static constexpr int parts = 1, lines = 16, at_a_time = 10;
  static constexpr int64_t line_bytes = 2 * PANEL * 2, scale_bytes = 0, head_bytes = 0;
  static constexpr bool as_stored = true, whole = false, in_pieces = true;
  static void lay_lines(const char* from, int count, char* to) {
    std::memcpy(to, from, count * line_bytes);
  }
};

// float32 inputs, as the sum of three bf16 that hold all of their bits.
struct Float32Tiles : BFloat16Tiles {
  static constexpr int parts = 3, at_a_time = 1 << 20;  // rows take more room than weights
};

struct Int8Tiles {
  static constexpr int parts = 1, lines = 16, at_a_time = 10;
  static constexpr int64_t line_bytes = 2 * PANEL, scale_bytes = PANEL * 4, head_bytes = 0;
  static constexpr bool as_stored = false, whole = false, in_pieces = true;
  static void lay_lines(const char* from, int count, char* to) {
    for (int line = 0; line < count; ++line, from += line_bytes, to += PAIR_BYTES) {
#if defined(__AVX512BF16__)
      __m512bh wide[2];
      widen_to_bf16(from, wide);
      _mm512_storeu_si512(to, (__m512i)wide[0]);
      _mm512_storeu_si512(to + TILE_ROW_BYTES, (__m512i)wide[1]);
#else
      for (int i = 0; i < line_bytes; ++i) {
        const uint16_t number = to_bf16((float)(int8_t)from[i]);
        std::memcpy(to + i % 16 / 8 * TILE_ROW_BYTES + i / 16 * 16 + i % 8 * 2, &number, 2);
      }
#endif
    }
  }
};

struct WholeInt8Tiles {
  static constexpr int parts = 1, lines = 32, at_a_time = 10;
  static constexpr int64_t line_bytes = 2 * PANEL, scale_bytes = PANEL * 4;
  static constexpr int64_t head_bytes = HEAD_BYTES;
  static constexpr bool as_stored = false, whole = true, in_pieces = false;
  static void lay_lines(const char* from, int count, char* to) {
    static constexpr char ZEROS[line_bytes] = {};
    for (int line = 0; line < count; line += 2, from += 2 * line_bytes, to += PAIR_BYTES) {
      const char* second = line + 1 < count ? from + line_bytes : ZEROS;
      for (int64_t i = 0; i < line_bytes; i += sizeof(ivec)) {
        const ivec a = load_as<ivec>(from + i), b = load_as<ivec>(second + i);
        const ivec low = unpack_low(a, b), high = unpack_high(a, b);
        std::memcpy(to + i, &low, sizeof low);
        std::memcpy(to + TILE_ROW_BYTES + i, &high, sizeof high);
      }
    }
  }
};

template <class P>
int64_t tile_steps(int64_t depth) {
  return ((depth + 1) / 2 + P::lines - 1) / P::lines;
}

// The weights of a panel, step by step. Where several blocks of rows take them in, they are laid
// only once.
template <class P>
struct TiledWeights {
  const char* lines;
  int64_t count, steps;
  char* scratch;
  bool laid = false;

  TiledWeights(const LinearPanel& panel, bool at_once)
      : lines((const char*)panel.weight + P::scale_bytes),
        count((panel.depth + 1) / 2),
        steps(tile_steps<P>(panel.depth)),
        scratch(panel.scratch) {
    if (P::as_stored || !at_once) return;
    for (int64_t step = 0; step < steps; ++step) lay(step, scratch + step * STEP_BYTES);
    laid = true;
  }

  const char* lay(int64_t step, char* to) {
    const int64_t left = count - step * P::lines;
    if (left < P::lines) std::memset(to, 0, STEP_BYTES);
    P::lay_lines(lines + step * P::lines * P::line_bytes, left < P::lines ? left : P::lines, to);
    return to;
  }

  const char* at(int64_t step) {
    if (laid) return scratch + step * STEP_BYTES;
    const bool complete = (step + 1) * P::lines <= count;
    if (P::as_stored && complete) return lines + step * P::lines * P::line_bytes;
    return lay(step, scratch + step % 2 * STEP_BYTES);
  }
};

template <class P, int A>
inline void multiply_tiles() {
  if constexpr (P::whole) {
    TILE_INT8(0, 4, 6);
    TILE_INT8(1, 4, 7);
    if constexpr (A == 2) {
      TILE_INT8(2, 5, 6);
      TILE_INT8(3, 5, 7);
    }
  } else {
    TILE_BF16(0, 4, 6);
    TILE_BF16(1, 4, 7);
    if constexpr (A == 2) {
      TILE_BF16(2, 5, 6);
      TILE_BF16(3, 5, 7);
    }
  }
}

// One row of two tiles of sums.
template <class P>
void finish_tile_row(const LinearPanel& panel, int64_t row, const float* first,
                     const float* second) {
  vec y[ALL_VECTORS];
  constexpr int HALF = ALL_VECTORS / 2;
  for (int v = 0; v < HALF; ++v) {
    vec a = load(first + v * WIDTH), b = load(second + v * WIDTH);
    if (!P::as_stored) join_groups(a, b);
    y[P::as_stored ? v : 2 * v] = a;
    y[P::as_stored ? HALF + v : 2 * v + 1] = b;
  }
  if constexpr (P::whole) {
    finish_int8_row<ALL_VECTORS>(panel, row, 0, y);
  } else {
    const auto* scales = (const float*)panel.weight;
    for (int v = 0; v < ALL_VECTORS; ++v) {
      if (P::scale_bytes > 0) y[v] = separate(y[v] * load(scales + v * WIDTH));
      write(panel, row, v * WIDTH, y[v]);
    }
  }
}

constexpr int64_t BLOCK = 2 * TILE_ROWS;  // rows

// So many rows are multiplied with the weights of `at_a_time` steps, which stay in the first cache,
// before the next ones; sums wait in memory.
constexpr int64_t ROWS_AT_A_TIME = 256;

typedef float TileOfSums[TILE_ROWS][TILE_ROW_BYTES / 4];

// The steps from `first` up to `last`.
struct Steps {
  int64_t first, last;
  const char* ahead;   // memory that is wanted soon
  int64_t ahead_step;  // how much of it to ask for in each step
};

// A tiles of rows, from `row` on.
template <class P, int A>
void tile_block(const LinearPanel& panel, int64_t row, TiledWeights<P>& weights, Steps steps,
                TileOfSums* sums) {
  // From one row to the next, and from one step to the next.
  const int64_t row_bytes = P::in_pieces ? TILE_ROW_BYTES : panel.row_bytes;
  constexpr int64_t PART_BYTES = P::in_pieces ? TILE_BYTES : TILE_ROW_BYTES;
  const char* x = (const char*)panel.x + row * panel.row_bytes + P::head_bytes;
  x += steps.first * P::parts * PART_BYTES;
  const int64_t next = TILE_ROWS * panel.row_bytes;
  if (steps.first == 0) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (A == 2) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  } else {
    TILE_LOAD(0, sums[0], TILE_ROW_BYTES);
    TILE_LOAD(1, sums[1], TILE_ROW_BYTES);
    if constexpr (A == 2) {
      TILE_LOAD(2, sums[2], TILE_ROW_BYTES);
      TILE_LOAD(3, sums[3], TILE_ROW_BYTES);
    }
  }
  const bool ends = steps.last == weights.steps;
  const int64_t count = steps.last - steps.first;
  const int64_t rows_asked_for = (A * TILE_ROWS + count - 1) / count;  // in each step
  int64_t asked = ends ? 0 : A * TILE_ROWS;
  for (int64_t step = steps.first; step < steps.last; ++step) {
    for (int64_t i = 0; i < steps.ahead_step; i += 64) __builtin_prefetch(steps.ahead + i, 0, 2);
    steps.ahead += steps.ahead_step;
    for (int64_t i = 0; i < rows_asked_for && asked < A * TILE_ROWS; ++i, ++asked)
      ask_for_results<1, ALL_VECTORS>(panel, row + asked, 0);
    const char* w = weights.at(step);
    TILE_LOAD(6, w, PAIR_BYTES);
    TILE_LOAD(7, w + TILE_ROW_BYTES, PAIR_BYTES);
    for (int part = P::parts - 1; part >= 0; --part) {  // the smallest first
      TILE_LOAD(4, x + part * PART_BYTES, row_bytes);
      if constexpr (A == 2) TILE_LOAD(5, x + next + part * PART_BYTES, row_bytes);
      multiply_tiles<P, A>();
    }
    x += P::parts * PART_BYTES;
  }
  TILE_STORE(0, sums[0], TILE_ROW_BYTES);
  TILE_STORE(1, sums[1], TILE_ROW_BYTES);
  if constexpr (A == 2) {
    TILE_STORE(2, sums[2], TILE_ROW_BYTES);
    TILE_STORE(3, sums[3], TILE_ROW_BYTES);
  }
  if (!ends) return;
  const LinearPanel own = panel;
  for (int m = 0; m < A * TILE_ROWS && row + m < own.rows; ++m) {
    const int tile = m / TILE_ROWS * 2;
    finish_tile_row<P>(own, row + m, sums[tile][m % TILE_ROWS], sums[tile + 1][m % TILE_ROWS]);
  }
}

// The rows from `first` up to `last`.
template <class P>
void tile_rows(const LinearPanel& panel, int64_t first, int64_t last, TiledWeights<P>& weights) {
  alignas(64) TileOfSums sums[2 * ROWS_AT_A_TIME / TILE_ROWS];
  const int64_t blocks = (last - first + BLOCK - 1) / BLOCK;
  const bool alone = panel.rows <= BLOCK;
  const int64_t parts = alone ? 1 : (weights.steps + P::at_a_time - 1) / P::at_a_time;
  const auto* begin = (const char*)panel.weight;
  const int64_t step_bytes = P::lines * P::line_bytes;
  const int64_t bytes = P::scale_bytes + weights.count * P::line_bytes;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t block = 0; block < blocks; ++block) {
      // As in `linear_panel`.
      const int64_t done = bytes * (part * blocks + block) / (parts * blocks);
      const Steps steps{weights.steps * part / parts, weights.steps * (part + 1) / parts,
                        alone ? begin + TILES_AHEAD : begin + bytes + done,
                        alone ? step_bytes : step_bytes / blocks};
      const int64_t row = first + block * BLOCK;
      if (panel.rows - row > TILE_ROWS) {
        tile_block<P, 2>(panel, row, weights, steps, sums + block * 4);
      } else {
        tile_block<P, 1>(panel, row, weights, steps, sums + block * 4);
      }
    }
  }
}

template <class P>
void tile_panel(const LinearPanel& panel) {
  if (panel.rows == 0) return;  // no tile may be empty
  // Tiles of fewer rows are loaded and multiplied sooner.
  const int64_t rows = panel.rows < TILE_ROWS ? panel.rows : TILE_ROWS;
  [[maybe_unused]] const UseTiles<> tiles((int)rows);
  TiledWeights<P> weights(panel, panel.rows > BLOCK);
  for (int64_t row = 0; row < panel.rows; row += ROWS_AT_A_TIME) {
    const int64_t last = row + ROWS_AT_A_TIME;
    tile_rows<P>(panel, row, last < panel.rows ? last : panel.rows, weights);
  }
}

enum class OnTiles { no, bfloat16, float32, int8, whole_int8, groups };

OnTiles on_tiles(glm::Weight kind, Inputs inputs) {
  if (kind == glm::Weight::int8)
    return inputs == Inputs::int8 ? OnTiles::whole_int8 : OnTiles::int8;
  if (kind == glm::Weight::bfloat16)
    return inputs == Inputs::bfloat16 ? OnTiles::bfloat16 : OnTiles::float32;
  const bool in_groups = glm::panel_bytes(kind, 1) == 0;
  return in_groups && inputs == Inputs::int8 ? OnTiles::groups : OnTiles::no;
}

bool tile_lays_out(glm::Weight kind, Inputs inputs, int64_t depth) {
  return on_tiles(kind, inputs) != OnTiles::no || lays_out(kind, inputs, depth);
}

int64_t tile_row_bytes(glm::Weight kind, Inputs inputs, int64_t depth) {
  switch (on_tiles(kind, inputs)) {
    case OnTiles::bfloat16:
    case OnTiles::int8: return tile_steps<BFloat16Tiles>(depth) * TILE_ROW_BYTES;
    case OnTiles::float32: return tile_steps<Float32Tiles>(depth) * 3 * TILE_ROW_BYTES;
    default: return row_bytes(kind, inputs, depth);
  }
}

// Rows of a pass, in bytes. Larger, they would not stay in the second cache, which has 2 MB, beside
// the panels that they are multiplied with; smaller, weights would be read more often.
constexpr int64_t PASS_BYTES = 3 << 19;

// Products with weights in groups take so long that their rows may come from further away.
int64_t tile_passes(glm::Weight kind, Inputs inputs, int64_t depth, int64_t rows) {
  const OnTiles product = on_tiles(kind, inputs);
  if (product == OnTiles::no || product == OnTiles::groups) return 1;
  const int64_t bytes = rows * tile_row_bytes(kind, inputs, depth);
  const int64_t passes = (bytes + PASS_BYTES - 1) / PASS_BYTES, most = (rows + BLOCK - 1) / BLOCK;
  return passes < most ? passes : most;
}

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

inline Halves high_halves(vec x) { return __builtin_convertvector((uvec)x >> 16, Halves); }

// float32 inputs are cut off after 8 bits, three times: they have 24. What is left of one that is not
// finite is not a number.
void tile_lay_row(glm::Weight kind, Inputs inputs, const float* x, int64_t depth, int64_t number,
                  void* rows) {
  const OnTiles product = on_tiles(kind, inputs);
  if (product != OnTiles::bfloat16 && product != OnTiles::float32 && product != OnTiles::int8)
    return lay_row(kind, inputs, x, depth, number, rows);
  const int64_t row_bytes = tile_row_bytes(kind, inputs, depth), first = number % TILE_ROWS;
  char* to = (char*)rows + (number - first) * row_bytes + first * TILE_ROW_BYTES;
  for (int64_t i = 0; i < filled_up_to(depth, STEP); i += WIDTH) {
    const int64_t left = depth - i;
    vec rest = load_first(x + i, left < 0 ? 0 : left < WIDTH ? (int)left : WIDTH);
    auto* numbers = (uint16_t*)to + i % STEP;
    if (product == OnTiles::float32) {
      for (int part = 0; part < 3; ++part) {
        const Halves halves = high_halves(rest);
        std::memcpy(numbers + part * TILE_BYTES / 2, &halves, sizeof halves);
        rest -= (vec)((uvec)rest & 0xffff0000u);
      }
    } else {
      round_to_bf16(rest, numbers);
    }
    if ((i + WIDTH) % STEP == 0) to += (product == OnTiles::float32 ? 3 : 1) * TILE_BYTES;
  }
}

int64_t tile_scratch_bytes(glm::Weight kind, Inputs inputs, int64_t depth) {
  switch (on_tiles(kind, inputs)) {
    case OnTiles::no:
    case OnTiles::groups: return scratch_bytes(kind, inputs, depth);
    case OnTiles::int8: return (tile_steps<Int8Tiles>(depth) + 1) * STEP_BYTES;
    case OnTiles::whole_int8: return (tile_steps<WholeInt8Tiles>(depth) + 1) * STEP_BYTES;
    default: return 2 * STEP_BYTES;
  }
}

void tile_linear(glm::Weight kind, const LinearPanel& panel) {
  switch (on_tiles(kind, panel.inputs)) {
    case OnTiles::no: return linear(kind, panel);
    case OnTiles::bfloat16: return tile_panel<BFloat16Tiles>(panel);
    case OnTiles::float32: return tile_panel<Float32Tiles>(panel);
    case OnTiles::int8: return tile_panel<Int8Tiles>(panel);
    case OnTiles::whole_int8:
      // The same whole numbers, and so the same bits.
      return panel.rows <= FEW_INT8_ROWS ? linear(kind, panel) : tile_panel<WholeInt8Tiles>(panel);
    case OnTiles::groups:
      return panel.rows < ROWS_FOR_TILES ? linear(kind, panel) : tile_groups(kind, panel);
  }
}

}  // namespace
