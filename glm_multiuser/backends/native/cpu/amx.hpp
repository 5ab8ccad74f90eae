// Products on tiles. Rows are processed in tiles of 16, including padding after the last one, so each row
// goes through the same instructions in the same order for any number of rows.
#pragma once

#include "linear.hpp"
#include "tile_float_groups.hpp"
#include "tile_groups.hpp"
#include "tile_results.hpp"
#include "tiles.hpp"

namespace {

// Up to this many rows are faster without tiles, and get the same bits.
constexpr int64_t FEW_INT8_ROWS = 4;

// Weights of one step: two adjacent tiles.
constexpr int64_t STEP_BYTES = TILE_ROWS * PAIR_BYTES;
constexpr int64_t TILES_PREFETCH_DISTANCE = 32768;  // bytes, into L2

// Weights of this many steps stay in L1 while all rows use them. Long rows are split into chunks of this
// many steps, which stay in L2.
constexpr int64_t NEAR_STEPS = 16;

// Rows with more steps of 64 bytes are split into chunks.
constexpr int64_t MOST_STEPS = 2 * NEAR_STEPS;

// Types of products. A line is two inputs of a panel. A step consumes `lines` of them and `parts` times 64
// bytes of every row. With `in_pieces`, the rows of a tile are interleaved step by step, so that memory is
// read sequentially. Unless weights are used `as_stored`, `tile_lines` converts them to tiles, with permuted
// columns; `restore_column_order` undoes it.
struct BFloat16Tiles {
  static constexpr int parts = 1, lines = 16;
  static constexpr int64_t line_bytes = 2 * PANEL * 2, scale_bytes = 0, head_bytes = 0;
  static constexpr bool as_stored = true, is_integer = false, in_pieces = true;
  static void tile_lines(const char* from, int count, char* to) {
    std::memcpy(to, from, count * line_bytes);
  }
};

// float32 inputs, split into three bf16 whose sum is exact.
struct Float32Tiles : BFloat16Tiles {
  static constexpr int parts = FLOAT32_PARTS;
};

struct Int8Tiles {
  static constexpr int parts = 1, lines = 16;
  static constexpr int64_t line_bytes = 2 * PANEL, scale_bytes = PANEL * 4, head_bytes = 0;
  static constexpr bool as_stored = false, is_integer = false, in_pieces = true;
  static void tile_lines(const char* from, int count, char* to) {
    for (int line = 0; line < count; ++line, from += line_bytes, to += PAIR_BYTES) {
      __m512bh wide[2];
      widen_to_bf16(from, wide);
      _mm512_storeu_si512(to, (__m512i)wide[0]);
      _mm512_storeu_si512(to + TILE_ROW_BYTES, (__m512i)wide[1]);
    }
  }
};

struct Int8Int8Tiles {
  static constexpr int parts = 1, lines = 32;
  static constexpr int64_t line_bytes = 2 * PANEL, scale_bytes = PANEL * 4;
  static constexpr int64_t head_bytes = HEAD_BYTES;
  static constexpr bool as_stored = false, is_integer = true, in_pieces = false;
  static void tile_lines(const char* from, int count, char* to) {
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

template <class P>
int64_t tile_chunks(int64_t depth) {
  const int64_t steps = tile_steps<P>(depth);
  return steps * P::parts <= MOST_STEPS ? 1 : (steps + NEAR_STEPS - 1) / NEAR_STEPS;
}

// Steps `first` to `last` - 1 of a product.
struct Steps {
  int64_t first, last;
};

// One of `parts` parts of about the same size.
inline Steps part_of(Steps steps, int64_t number, int64_t parts) {
  const int64_t count = steps.last - steps.first;
  return {steps.first + count * number / parts, steps.first + count * (number + 1) / parts};
}

// The weights of some steps of a panel. If several blocks of rows use them, they are converted to tiles
// only once.
template <class P>
struct TiledWeights {
  const char* lines;
  int64_t count, steps, first;
  char* scratch;
  bool tiled = false;

  TiledWeights(const LinearPanel& panel, Steps some, bool at_once)
      : lines((const char*)panel.weight + P::scale_bytes),
        count((panel.depth + 1) / 2),
        steps(tile_steps<P>(panel.depth)),
        first(some.first),
        scratch(panel.scratch) {
    if (P::as_stored || !at_once) return;
    for (int64_t step = first; step < some.last; ++step)
      tile_step(step, scratch + (step - first) * STEP_BYTES);
    tiled = true;
  }

  const char* tile_step(int64_t step, char* to) {
    const int64_t left = count - step * P::lines;
    if (left < P::lines) std::memset(to, 0, STEP_BYTES);
    P::tile_lines(lines + step * P::lines * P::line_bytes, left < P::lines ? left : P::lines, to);
    return to;
  }

  const char* at(int64_t step) {
    if (tiled) return scratch + (step - first) * STEP_BYTES;
    const bool complete = (step + 1) * P::lines <= count;
    if (P::as_stored && complete) return lines + step * P::lines * P::line_bytes;
    return tile_step(step, scratch + step % 2 * STEP_BYTES);
  }
};

template <class P, int A>
inline void multiply_tiles() {
  if constexpr (P::is_integer) {
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

// Weights to prefetch, and how many bytes of them in each step.
struct NextWeights {
  const char* from;
  int64_t of_step;
};

// A tiles of rows, starting at `row`, times the weights of these steps. Meanwhile, the results of the
// previous block are stored.
template <class P, int A>
void tile_block(const LinearPanel& panel, int64_t row, TiledWeights<P>& weights, Steps steps,
                NextWeights next, BlockOfSums& sums, CompleteBlock<P>& complete) {
  const int finished_in_step = (int)(BLOCK / (steps.last - steps.first)) + 1;
  // Strides between rows and between steps.
  const int64_t row_bytes = P::in_pieces ? P::parts * TILE_ROW_BYTES : panel.row_bytes;
  constexpr int64_t OF_STEP = P::parts * (P::in_pieces ? TILE_BYTES : TILE_ROW_BYTES);
  const char* x = (const char*)panel.x + row * panel.row_bytes + P::head_bytes;
  x += steps.first * OF_STEP;
  const int64_t other = TILE_ROWS * panel.row_bytes;
  // Many rows do not fit into L1 and should not evict the weights from it.
  const bool once = P::in_pieces && panel.rows > BLOCK;
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
  for (int64_t step = steps.first; step < steps.last; ++step) {
    for (int64_t i = 0; i < next.of_step; i += 64) __builtin_prefetch(next.from + i, 0, 2);
    next.from += next.of_step;
    const char* w = weights.at(step);
    TILE_LOAD(6, w, PAIR_BYTES);
    TILE_LOAD(7, w + TILE_ROW_BYTES, PAIR_BYTES);
    for (int part = P::parts - 1; part >= 0; --part) {  // the smallest first
      const char* from = x + part * TILE_ROW_BYTES;
      if (once) {
        TILE_LOAD_ONCE(4, from, row_bytes);
        if constexpr (A == 2) TILE_LOAD_ONCE(5, from + other, row_bytes);
      } else {
        TILE_LOAD(4, from, row_bytes);
        if constexpr (A == 2) TILE_LOAD(5, from + other, row_bytes);
      }
      multiply_tiles<P, A>();
    }
    complete.finish(finished_in_step);
    x += OF_STEP;
  }
  TILE_STORE(0, sums[0], TILE_ROW_BYTES);
  TILE_STORE(1, sums[1], TILE_ROW_BYTES);
  if constexpr (A == 2) {
    TILE_STORE(2, sums[2], TILE_ROW_BYTES);
    TILE_STORE(3, sums[3], TILE_ROW_BYTES);
  }
  if (steps.last < weights.steps) return;
  complete.finish(BLOCK);
  const int64_t left = panel.rows - row;
  complete.sums = &sums, complete.row = row, complete.done = 0;
  complete.rows = left < A * TILE_ROWS ? (int)left : A * TILE_ROWS;
}

// All rows times the weights of these steps of a panel, some steps at a time. Prefetches the same number of
// weights starting at `next`.
template <class P>
void tile_rows(const LinearPanel& panel, Steps chunk, const char* next, BlockOfSums* sums) {
  const int64_t blocks = blocks_of(panel.rows), count = chunk.last - chunk.first;
  TiledWeights<P> weights(panel, chunk, blocks > 1);
  const int64_t parts = blocks == 1 ? 1 : (count + NEAR_STEPS - 1) / NEAR_STEPS;
  const int64_t of_step = P::lines * P::line_bytes / blocks;
  CompleteBlock<P> complete(panel);
  for (int64_t number = 0; number < parts; ++number) {
    const Steps steps = part_of(chunk, number, parts);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * BLOCK;
      if (panel.rows - row > TILE_ROWS) {
        tile_block<P, 2>(panel, row, weights, steps, {next, of_step}, sums[block], complete);
      } else {
        tile_block<P, 1>(panel, row, weights, steps, {next, of_step}, sums[block], complete);
      }
      next += of_step * (steps.last - steps.first);
    }
  }
  complete.finish(BLOCK);
}

// All panels use one chunk of the rows before the next, so that a chunk is loaded into L2 only once.
template <class P>
void tile_panels(LinearPanel all) {
  if (all.rows == 0) return;  // tiles must have at least one row
  // Tiles with fewer rows are faster to load and multiply.
  const int64_t rows = all.rows < TILE_ROWS ? all.rows : TILE_ROWS;
  [[maybe_unused]] const UseTiles<> tiles((int)rows);
  constexpr int64_t STEP_OF_PANEL = P::lines * P::line_bytes;
  const int64_t blocks = blocks_of(all.rows), panels = (all.columns + PANEL - 1) / PANEL;
  const int64_t chunks = blocks == 1 ? 1 : tile_chunks<P>(all.depth);
  auto* sums = (BlockOfSums*)all.scratch;
  all.scratch += panels * blocks * (int64_t)sizeof(BlockOfSums);
  for (int64_t number = 0; number < chunks; ++number) {
    const Steps chunk = part_of({0, tile_steps<P>(all.depth)}, number, chunks);
    for (int64_t i = 0; i < panels; ++i) {
      const LinearPanel panel = glm::slice_panels(all, i, 1);
      const auto* next = (const char*)panel.weight;
      if (blocks == 1) {
        next += TILES_PREFETCH_DISTANCE;
      } else if (i + 1 < panels) {
        next += all.bytes + chunk.first * STEP_OF_PANEL;
      } else {
        next = (const char*)all.weight;
        next += number + 1 < chunks ? chunk.last * STEP_OF_PANEL : panels * all.bytes;
      }
      tile_rows<P>(panel, chunk, next, sums + i * blocks);
    }
  }
}

bool tile_needs_packing(glm::Weight kind, Inputs inputs, int64_t depth) {
  return on_tiles(kind, inputs) != OnTiles::none || needs_packing(kind, inputs, depth);
}

int64_t tile_row_bytes(glm::Weight kind, Inputs inputs, int64_t depth) {
  switch (on_tiles(kind, inputs)) {
    case OnTiles::bfloat16:
    case OnTiles::int8: return tile_steps<BFloat16Tiles>(depth) * TILE_ROW_BYTES;
    case OnTiles::float32: return tile_steps<Float32Tiles>(depth) * FLOAT32_PARTS * TILE_ROW_BYTES;
    case OnTiles::float_groups: return float_groups_row_bytes(depth, parts_of(inputs));
    default: return row_bytes(kind, inputs, depth);
  }
}

int64_t chunks_of(OnTiles product, int64_t depth) {
  switch (product) {
    case OnTiles::float32: return tile_chunks<Float32Tiles>(depth);
    case OnTiles::int8_int8: return tile_chunks<Int8Int8Tiles>(depth);
    default: return tile_chunks<BFloat16Tiles>(depth);
  }
}

// Panels per call if rows are split into chunks: their partial sums stay in L2 as well.
constexpr int64_t PANELS_FOR_CHUNKS = 16;

bool in_chunks(OnTiles product) { return product != OnTiles::none && !in_groups(product); }

int64_t tile_panels_per_call(glm::Weight kind, Inputs inputs, int64_t depth, int64_t rows) {
  const OnTiles product = on_tiles(kind, inputs);
  if (product == OnTiles::none) return panels_per_call(kind, inputs, depth, rows);
  return in_chunks(product) && rows > BLOCK && chunks_of(product, depth) > 1 ? PANELS_FOR_CHUNKS : 1;
}

int64_t tile_rows_per_call(glm::Weight kind, Inputs inputs, int64_t rows, int64_t weight_bytes) {
  if (on_tiles(kind, inputs) != OnTiles::none) return rows;
  return rows_per_call(kind, inputs, rows, weight_bytes);
}

// Share of L2 (2 MB) for the rows of a pass: one chunk of them, and their sums. With more, chunks would be
// evicted; with less, weights would be read more often.
constexpr int64_t PASS_BYTES = 9 << 17;

// The same for group-quantised weights, where every panel uses all inputs of a pass.
constexpr int64_t PASS_BYTES_OF_GROUPS = 1 << 19;

int64_t tile_passes(glm::Weight kind, Inputs inputs, int64_t depth, int64_t rows) {
  const OnTiles product = on_tiles(kind, inputs);
  // int8 inputs with group-quantised weights are compute-bound, so rows need not stay in L2.
  if (product == OnTiles::none || product == OnTiles::int8_groups) return 1;
  const int64_t panels = tile_panels_per_call(kind, inputs, depth, rows);
  const int64_t of_row = tile_row_bytes(kind, inputs, depth) / chunks_of(product, depth) +
                         panels * PANEL * (int64_t)sizeof(float);
  const int64_t together = product == OnTiles::float_groups ? PASS_BYTES_OF_GROUPS : PASS_BYTES;
  const int64_t passes = (rows * of_row + together - 1) / together, most = blocks_of(rows);
  return passes < most ? passes : most;
}

void tile_pack_input_row(glm::Weight kind, Inputs inputs, const float* x, int64_t depth, int64_t index,
                         void* rows) {
  if (!has_rows_in_tiles(on_tiles(kind, inputs)))
    return pack_input_row(kind, inputs, x, depth, index, rows);
  const RowsInTiles packed({(char*)rows, tile_row_bytes(kind, inputs, depth), kind, inputs});
  char* to = packed.at(index, 0);
  for (int64_t i = 0; i < round_up(depth, STEP); i += WIDTH) {
    const int64_t left = depth - i;
    packed.store(load_first(x + i, left < 0 ? 0 : left < WIDTH ? (int)left : WIDTH), to, i % STEP);
    if ((i + WIDTH) % STEP == 0) to += packed.step_bytes();
  }
  if (glm::in_groups(kind)) store_input_sums(inputs, x, depth, index, rows);
}

// Other types store a scale or sums per row, which are not known before the row is complete.
bool tile_packs_results(glm::Weight kind, Inputs inputs, const glm::PackedInputs& packed) {
  const auto fits = [](OnTiles product) {
    return has_rows_in_tiles(product) && !in_groups(product);
  };
  return fits(on_tiles(kind, inputs)) && fits(on_tiles(packed.kind, packed.inputs));
}

int64_t tile_scratch_bytes(glm::Weight kind, Inputs inputs, int64_t depth, int64_t rows,
                           int64_t panels) {
  const OnTiles product = on_tiles(kind, inputs);
  if (product == OnTiles::float_groups) return float_groups_scratch_bytes(rows);
  if (!in_chunks(product)) return scratch_bytes(kind, inputs, depth, rows, panels);
  constexpr int64_t TILED_BYTES = MOST_STEPS * STEP_BYTES;  // the weights of a chunk
  return panels * blocks_of(rows) * (int64_t)sizeof(BlockOfSums) + TILED_BYTES;
}

void tile_linear(glm::Weight kind, const LinearPanel& panel) {
  switch (on_tiles(kind, panel.inputs)) {
    case OnTiles::none: return linear(kind, panel);
    case OnTiles::bfloat16: return tile_panels<BFloat16Tiles>(panel);
    case OnTiles::float32: return tile_panels<Float32Tiles>(panel);
    case OnTiles::int8: return tile_panels<Int8Tiles>(panel);
    case OnTiles::int8_int8:
      // Integer sums are exact, so both have the same bits.
      return panel.rows <= FEW_INT8_ROWS ? linear(kind, panel) : tile_panels<Int8Int8Tiles>(panel);
    case OnTiles::float_groups: return tile_float_groups(kind, panel);
    case OnTiles::int8_groups:
      return panel.rows < ROWS_FOR_TILES ? linear(kind, panel) : tile_groups(kind, panel);
  }
}

}  // namespace
