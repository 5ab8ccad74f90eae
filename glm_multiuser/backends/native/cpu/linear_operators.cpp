// Linear layers: threads share the panels of a weight.
#include <algorithm>

#include "memory.hpp"
#include "operators.hpp"
#include "product.hpp"

using glm::Inputs;
using glm::PANEL;
using glm::ROW_MULTIPLE;

namespace {

// Fewer rows that stay as they are, are read where they are.
constexpr int64_t ROWS_TO_LAY_OUT = 5;

// Rows times all panels; `all` is as of one panel with all columns.
void multiply(glm::Weight kind, const glm::LinearPanel& all) {
  const glm::Level& level = glm::level();
  // Each thread should get a piece at least.
  const int64_t panels = (all.columns + PANEL - 1) / PANEL, most = panels / glm::threads();
  const int64_t best = level.side_by_side(kind, all.inputs, all.depth, all.rows);
  const int64_t side_by_side = std::max<int64_t>(1, std::min(best, most));
  const int64_t scratch_bytes =
      level.scratch_bytes(kind, all.inputs, all.depth, all.rows, side_by_side);
  glm::share((panels + side_by_side - 1) / side_by_side, [&](int64_t number) {
    static thread_local glm::Memory scratch;
    glm::LinearPanel panel = glm::some_panels(all, number * side_by_side, side_by_side);
    panel.scratch = scratch.of(scratch_bytes);
    level.linear(kind, panel);
  });
}

// Of one of several passes, all of about the same size; blocks of fewer rows than two tiles have are
// slow.
int64_t first_of_pass(int64_t pass, int64_t passes, int64_t rows) {
  constexpr int64_t BLOCK = 2 * ROW_MULTIPLE;
  if (pass == passes) return rows;
  return (rows * pass / passes + BLOCK / 2) / BLOCK * BLOCK;
}

// `all` says what happens to sums; x [rows, depth], or laid out.
void multiply_rows(const Product& product, glm::LinearPanel all, const void* x, bool laid) {
  const glm::Level& level = glm::level();
  const int64_t rows = all.rows, depth = product.depth;
  const bool lays_out = laid || rows >= ROWS_TO_LAY_OUT ||
                        level.lays_out(product.kind, product.inputs, depth);
  all.row_bytes = lays_out ? product.row_bytes() : depth * (int64_t)sizeof(float);
  all.weight = product.weight;
  all.bytes = product.panel_bytes;
  all.depth = depth;
  all.stride = product.columns;
  all.columns = (int)product.columns;
  all.inputs = product.inputs;
  static thread_local glm::Memory memory;
  const int64_t passes = level.passes(product.kind, product.inputs, depth, rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = first_of_pass(pass, passes, rows);
    glm::LinearPanel some = all;
    some.rows = first_of_pass(pass + 1, passes, rows) - first;
    some.x = (const char*)x + first * all.row_bytes;
    if (lays_out && !laid) {
      const float* from = (const float*)x + first * depth;
      char* to = memory.of(product.laid_bytes(some.rows));
      lay_out(product, some.rows, [&](int64_t row) { return from + row * depth; }, to);
      some.x = to;
    }
    if (all.residual != nullptr) some.residual += first * product.columns;
    if (all.laid.rows != nullptr) {
      some.laid.rows += first * all.laid.row_bytes;
    } else {
      some.y += first * product.columns;
    }
    multiply(product.kind, some);
  }
}

// x [rows, depth], used, packed weight [panels, ...], bias [columns] -> y [rows, columns]
int linear(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes,
           glm::Finish finish, Inputs inputs) {
  Product product, next{};
  int refused = read_product(data[2], dtypes[2], ranks[2], shapes[2], shapes[0][1], shapes[3][0],
                             inputs, product);
  if (refused) return refused;
  glm::LinearPanel all{};
  all.rows = rows_in_use(data, shapes, 1);
  all.bias = (const float*)data[3];
  all.finish = finish;
  if (finish == glm::Finish::add) {
    all.residual = (const float*)data[4];
    all.factor = *(const float*)data[5];
  }
  const int output = count - 1;
  const bool lays = is_laid(dtypes[output]);
  static thread_local glm::Memory memory;
  if (lays) {
    REFUSE_UNLESS(finish == glm::Finish::gelu && count == 6);
    refused = read_product(data[4], dtypes[4], ranks[4], shapes[4], product.columns, ANY,
                           inputs, next);
    if (refused) return refused;
  }
  const glm::LaidRows laid = lays ? next.laid(data[output]) : glm::LaidRows{};
  const bool directly = lays && glm::level().lays_results(product.kind, product.inputs, laid);
  if (directly) {
    all.laid = laid;
  } else if (lays) {
    all.y = (float*)memory.of(all.rows * product.columns * (int64_t)sizeof(float));
  } else {
    all.y = (float*)data[output];
  }
  multiply_rows(product, all, data[0], is_laid(dtypes[0]));
  if (lays && !directly)
    lay_out(next, all.rows, [&](int64_t row) { return all.y + row * product.columns; }, laid.rows);
  return 0;
}

}  // namespace

// x [rows, depth], used, weight, bias [columns] -> [rows, columns]
// x may be uint8 instead: rows that are laid out for this product.
#define LINEAR(name, finish, inputs)                                            \
  OPERATOR(name) {                                                              \
    return linear(count, data, ranks, shapes, dtypes, finish, Inputs::inputs);  \
  }
LINEAR(linear, glm::Finish::none, float32)

// The same, then the GELU in its tanh form. With the weight of another product behind the bias, it
// gives uint8: rows [rows, columns] that are laid out for that one, whose x is rounded to the same.
LINEAR(linear_gelu, glm::Finish::gelu, float32)

// x, used, weight, bias, residual [rows, columns], factor [1]
// -> residual * factor + what `linear` gives
LINEAR(linear_add, glm::Finish::add, float32)

// The same three, with x rounded to bf16.
LINEAR(linear_bfloat16, glm::Finish::none, bfloat16)
LINEAR(linear_gelu_bfloat16, glm::Finish::gelu, bfloat16)
LINEAR(linear_add_bfloat16, glm::Finish::add, bfloat16)

// And rounded to int8, for int8 weights and those in groups.
LINEAR(linear_int8, glm::Finish::none, int8)
LINEAR(linear_gelu_int8, glm::Finish::gelu, int8)
LINEAR(linear_add_int8, glm::Finish::add, int8)
