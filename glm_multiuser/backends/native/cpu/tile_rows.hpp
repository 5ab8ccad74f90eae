// Which products use tiles, and packed inputs for bfloat16 tiles: each tile of 16 rows and 32 inputs is
// contiguous, so that memory is read sequentially. Within it, the parts of a row are adjacent.
#pragma once

#include <cstdint>
#include <cstring>

#include "level.hpp"
#include "tiles.hpp"
#include "vector.hpp"

namespace {

using glm::Inputs;

constexpr int FLOAT32_PARTS = 3;  // bfloat16 values that represent a float32 exactly

enum class OnTiles { none, bfloat16, float32, int8, int8_int8, float_groups, int8_groups };

OnTiles on_tiles(glm::Weight kind, Inputs inputs) {
  if (kind == glm::Weight::int8)
    return inputs == Inputs::int8 ? OnTiles::int8_int8 : OnTiles::int8;
  if (kind == glm::Weight::bfloat16)
    return inputs == Inputs::bfloat16 ? OnTiles::bfloat16 : OnTiles::float32;
  if (!glm::in_groups(kind)) return OnTiles::none;
  return inputs == Inputs::int8 ? OnTiles::int8_groups : OnTiles::float_groups;
}

// The others have int8 rows.
inline bool has_rows_in_tiles(OnTiles product) {
  return product == OnTiles::bfloat16 || product == OnTiles::float32 || product == OnTiles::int8 ||
         product == OnTiles::float_groups;
}

inline bool in_groups(OnTiles product) {
  return product == OnTiles::float_groups || product == OnTiles::int8_groups;
}

inline int parts_of(Inputs inputs) { return inputs == Inputs::float32 ? FLOAT32_PARTS : 1; }

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

inline Halves high_halves(vec x) { return __builtin_convertvector((uvec)x >> 16, Halves); }

// Swaps the second and the third of every four elements.
inline vec middle_swapped(vec x) {
  return (vec)_mm512_permute_ps((__m512)x, _MM_SHUFFLE(3, 1, 2, 0));
}

struct RowsInTiles {
  char* rows;
  int64_t row_bytes;
  int parts;
  bool swaps;  // the order of group-quantised weights

  explicit RowsInTiles(const glm::PackedInputs& packed)
      : rows(packed.rows),
        row_bytes(packed.row_bytes),
        parts(parts_of(packed.inputs)),
        swaps(glm::in_groups(packed.kind)) {}

  // Bytes of STEP inputs of a tile.
  int64_t step_bytes() const { return parts * TILE_BYTES; }

  // Address of the STEP inputs of a row that start at `input`.
  char* at(int64_t row, int64_t input) const {
    const int64_t in_tile = row % TILE_ROWS;
    return rows + (row - in_tile) * row_bytes + in_tile * parts * TILE_ROW_BYTES +
           input / STEP * step_bytes();
  }

  // Stores WIDTH inputs at index `first` of the STEP inputs at `to`. The 24 significant bits of a float32
  // are split into three parts of 8 by truncation; infinity leaves NaN in the remaining parts.
  void store(vec x, char* to, int64_t first) const {
    auto* halves = (uint16_t*)to + first;
    if (swaps) x = middle_swapped(x);
    if (parts == 1) return round_to_bf16(x, halves);
    for (int part = 0; part < parts; ++part) {
      const Halves high = high_halves(x);
      std::memcpy(halves + part * TILE_ROW_BYTES / 2, &high, sizeof high);
      x -= (vec)((uvec)x & 0xffff0000u);
    }
  }
};

}  // namespace
