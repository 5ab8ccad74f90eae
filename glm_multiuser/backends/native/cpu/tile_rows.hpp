// Which products are computed on tiles, and rows of bfloat16 tiles: in one piece for each tile of 16
// rows and 32 inputs, so that memory is read in order. In there the parts of a row lie side by side.
#pragma once

#include <cstdint>
#include <cstring>

#include "level.hpp"
#include "tiles.hpp"
#include "vector.hpp"

namespace {

using glm::Inputs;

constexpr int FLOAT32_PARTS = 3;  // bfloat16 numbers that hold all bits of a float32

enum class OnTiles { no, bfloat16, float32, int8, whole_int8, float_groups, whole_groups };

OnTiles on_tiles(glm::Weight kind, Inputs inputs) {
  if (kind == glm::Weight::int8)
    return inputs == Inputs::int8 ? OnTiles::whole_int8 : OnTiles::int8;
  if (kind == glm::Weight::bfloat16)
    return inputs == Inputs::bfloat16 ? OnTiles::bfloat16 : OnTiles::float32;
  if (!glm::in_groups(kind)) return OnTiles::no;
  return inputs == Inputs::int8 ? OnTiles::whole_groups : OnTiles::float_groups;
}

// Others have rows of whole numbers.
inline bool has_rows_in_tiles(OnTiles product) {
  return product == OnTiles::bfloat16 || product == OnTiles::float32 || product == OnTiles::int8 ||
         product == OnTiles::float_groups;
}

inline bool in_groups(OnTiles product) {
  return product == OnTiles::float_groups || product == OnTiles::whole_groups;
}

inline int parts_of(Inputs inputs) { return inputs == Inputs::float32 ? FLOAT32_PARTS : 1; }

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

inline Halves high_halves(vec x) { return __builtin_convertvector((uvec)x >> 16, Halves); }

// Of every four numbers, the second and the third change places.
inline vec middle_swapped(vec x) {
  return (vec)_mm512_permute_ps((__m512)x, _MM_SHUFFLE(3, 1, 2, 0));
}

struct RowsInTiles {
  char* rows;
  int64_t row_bytes;
  int parts;
  bool swaps;  // as weights in groups want it

  explicit RowsInTiles(const glm::LaidRows& laid)
      : rows(laid.rows),
        row_bytes(laid.row_bytes),
        parts(parts_of(laid.inputs)),
        swaps(glm::in_groups(laid.kind)) {}

  // Of STEP inputs of a tile.
  int64_t step_bytes() const { return parts * TILE_BYTES; }

  // Where STEP inputs of a row begin, the first of which is number `input`.
  char* place(int64_t row, int64_t input) const {
    const int64_t in_tile = row % TILE_ROWS;
    return rows + (row - in_tile) * row_bytes + in_tile * parts * TILE_ROW_BYTES +
           input / STEP * step_bytes();
  }

  // WIDTH inputs, of those that begin at `to` from number `first` on. float32 ones are cut off after 8
  // bits, three times: they have 24. What is left of one that is not finite is not a number.
  void put(vec x, char* to, int64_t first) const {
    auto* numbers = (uint16_t*)to + first;
    if (swaps) x = middle_swapped(x);
    if (parts == 1) return round_to_bf16(x, numbers);
    for (int part = 0; part < parts; ++part) {
      const Halves halves = high_halves(x);
      std::memcpy(numbers + part * TILE_ROW_BYTES / 2, &halves, sizeof halves);
      x -= (vec)((uvec)x & 0xffff0000u);
    }
  }
};

}  // namespace
