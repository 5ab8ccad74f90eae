// A linear product as described by its operator's arguments, and packing of its inputs, which is done
// by its own operator or by the preceding one.
#pragma once

#include <cstring>

#include "level.hpp"
#include "packed.hpp"
#include "parallel.hpp"

namespace {

using glm::Inputs;
using glm::ROW_MULTIPLE;

// Sums of this many int8 products fit into int32.
constexpr int64_t MAX_INT8_INPUTS = 1 << 17;

struct NamedInputs {
  const char* name;
  Inputs inputs;
};

const NamedInputs INPUTS[] = {
    {"float32", Inputs::float32}, {"bfloat16", Inputs::bfloat16}, {"int8", Inputs::int8}};

// dtype of packed inputs.
const char* const PACKED_DTYPE = "uint8";

inline bool is_packed_inputs(const char* dtype) { return std::strcmp(dtype, PACKED_DTYPE) == 0; }

// Everything a product needs except its inputs.
struct Product {
  glm::Weight kind;
  Inputs inputs;
  int64_t depth, columns, panel_bytes;
  const void* weight;

  int64_t row_bytes() const { return glm::level().row_bytes(kind, inputs, depth); }
  int64_t packed_bytes(int64_t rows) const {
    return (rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE * row_bytes();
  }
  glm::PackedInputs packed_inputs(void* rows) const {
    return {(char*)rows, row_bytes(), kind, inputs};
  }
};

// int8 weights require x in bf16 or int8. int8 inputs are supported for int8 and group-quantised weights
// only; other weights then take x in float32.
Inputs rounded_to(glm::Weight kind, Inputs inputs) {
  if (kind == glm::Weight::int8) return inputs == Inputs::float32 ? Inputs::bfloat16 : inputs;
  return inputs == Inputs::int8 && !glm::in_groups(kind) ? Inputs::float32 : inputs;
}

constexpr int64_t ANY = -1;

// Reads a packed weight [panels, ...]. `columns`, unless ANY, must match its number of panels.
int read_product(const void* weight, const char* dtype, int rank, const int64_t* shape, int64_t depth,
                 int64_t columns, Inputs inputs, Product& product) {
  PackedWeight packed;
  REFUSE_UNLESS(read_packed_weight(dtype, rank, shape, depth, packed));
  REFUSE_UNLESS(columns == ANY || shape[0] == (columns + PANEL - 1) / PANEL);
  inputs = rounded_to(packed.kind, inputs);
  if (packed.kind == glm::Weight::int8 && inputs == Inputs::int8)
    REFUSE_UNLESS(depth <= MAX_INT8_INPUTS);
  product = {packed.kind, inputs, depth, columns, packed.panel_bytes, weight};
  return 0;
}

// Packs `rows` rows of inputs, row_of(row) [depth], for a product.
template <class RowOf>
void pack_inputs(const Product& product, int64_t rows, RowOf row_of, void* to) {
  parallel_for_rows(rows, product.depth, [&](int64_t row) {
    glm::level().pack_input_row(product.kind, product.inputs, row_of(row), product.depth, row, to);
  });
}

}  // namespace
