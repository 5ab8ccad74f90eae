// A product as its operator is given it, and rows laid out as it wants them: its own operator does so,
// or the one before.
#pragma once

#include <cstring>

#include "level.hpp"
#include "packed.hpp"
#include "sharing.hpp"

namespace {

using glm::Inputs;
using glm::ROW_MULTIPLE;

// Sums of so many products of int8 fit into int32.
constexpr int64_t MOST_INT8_INPUTS = 1 << 17;

struct NamedInputs {
  const char* name;
  Inputs inputs;
};

const NamedInputs INPUTS[] = {
    {"float32", Inputs::float32}, {"bfloat16", Inputs::bfloat16}, {"int8", Inputs::int8}};

// The dtype of rows that are laid out.
const char* const LAID = "uint8";

inline bool is_laid(const char* dtype) { return std::strcmp(dtype, LAID) == 0; }

// What a product takes in, besides rows.
struct Product {
  glm::Weight kind;
  Inputs inputs;
  int64_t depth, columns, panel_bytes;
  const void* weight;

  int64_t row_bytes() const { return glm::level().row_bytes(kind, inputs, depth); }
  int64_t laid_bytes(int64_t rows) const {
    return (rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE * row_bytes();
  }
  glm::LaidRows laid(void* rows) const { return {(char*)rows, row_bytes(), kind, inputs}; }
};

// With int8 weights, x is always rounded, to bf16 at least. To int8 it is rounded for int8 weights and
// for those in groups only.
Inputs rounded_to(glm::Weight kind, Inputs inputs) {
  if (kind == glm::Weight::int8) return inputs == Inputs::float32 ? Inputs::bfloat16 : inputs;
  return inputs == Inputs::int8 && !glm::in_groups(kind) ? Inputs::float32 : inputs;
}

constexpr int64_t ANY = -1;

// Of a packed weight [panels, ...]; the number of columns is that of its panels, if it is given.
int read_product(const void* weight, const char* dtype, int rank, const int64_t* shape, int64_t depth,
                 int64_t columns, Inputs inputs, Product& product) {
  Packed packed;
  REFUSE_UNLESS(is_packed(dtype, rank, shape, depth, packed));
  REFUSE_UNLESS(columns == ANY || shape[0] == (columns + PANEL - 1) / PANEL);
  inputs = rounded_to(packed.kind, inputs);
  if (packed.kind == glm::Weight::int8 && inputs == Inputs::int8)
    REFUSE_UNLESS(depth <= MOST_INT8_INPUTS);
  product = {packed.kind, inputs, depth, columns, packed.panel_bytes, weight};
  return 0;
}

// row_of(row) [depth] of `rows` rows, as the product wants them.
template <class RowOf>
void lay_out(const Product& product, int64_t rows, RowOf row_of, void* to) {
  share_rows(rows, product.depth, [&](int64_t row) {
    glm::level().lay_row(product.kind, product.inputs, row_of(row), product.depth, row, to);
  });
}

}  // namespace
