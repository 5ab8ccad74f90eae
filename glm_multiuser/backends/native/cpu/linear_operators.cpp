// Linear layers. Threads divide the panels of a weight, and many rows.
#include <algorithm>

#include "memory.hpp"
#include "operators.hpp"
#include "product.hpp"

using glm::Inputs;
using glm::PANEL;
using glm::ROW_MULTIPLE;

namespace {

// Fewer rows are used in place unless packing is required.
constexpr int64_t MIN_ROWS_TO_PACK = 5;

// Rows times all panels; `all` describes them as one panel.
void multiply(glm::Weight kind, const glm::LinearPanel& all) {
  const glm::Level& level = glm::level();
  // Leave at least one piece for each thread.
  const int64_t panels = (all.columns + PANEL - 1) / PANEL, most = panels / glm::threads();
  const int64_t best = level.panels_per_call(kind, all.inputs, all.depth, all.rows);
  const int64_t panels_per_call = std::max<int64_t>(1, std::min(best, most));
  const int64_t rows_per_call = std::max<int64_t>(
      1, level.rows_per_call(kind, all.inputs, all.rows, panels * all.bytes));
  const int64_t scratch_bytes =
      level.scratch_bytes(kind, all.inputs, all.depth, all.rows, panels_per_call);
  const int64_t calls = (panels + panels_per_call - 1) / panels_per_call;
  const int64_t parts = (all.rows + rows_per_call - 1) / rows_per_call;
  // Copies: what other threads read is then in adjacent cache lines.
  glm::parallel_for(parts * calls, [=, &level](int64_t number) {
    static thread_local glm::Memory scratch;
    const int64_t part = number / calls, first = all.rows * part / parts;
    glm::LinearPanel panel = glm::slice_panels(all, number % calls * panels_per_call, panels_per_call);
    panel = glm::slice_rows(panel, first, all.rows * (part + 1) / parts - first);
    panel.scratch = scratch.of(scratch_bytes);
    level.linear(kind, panel);
  });
}

// The first row of a pass. Passes have about the same size, in whole blocks of two tiles, because smaller
// blocks are slow.
int64_t first_of_pass(int64_t pass, int64_t passes, int64_t rows) {
  constexpr int64_t BLOCK = 2 * ROW_MULTIPLE;
  if (pass == passes) return rows;
  return (rows * pass / passes + BLOCK / 2) / BLOCK * BLOCK;
}

// `all` holds the epilogue and its operands; x is [rows, depth], or packed.
void multiply_rows(const Product& product, glm::LinearPanel all, const void* x, bool packed) {
  const glm::Level& level = glm::level();
  const int64_t rows = all.rows, depth = product.depth;
  const bool packs = packed || rows >= MIN_ROWS_TO_PACK ||
                     level.needs_packing(product.kind, product.inputs, depth);
  all.row_bytes = packs ? product.row_bytes() : depth * (int64_t)sizeof(float);
  all.weight = product.weight;
  all.bytes = product.panel_bytes;
  all.depth = depth;
  all.stride = product.columns;
  all.columns = (int)product.columns;
  all.inputs = product.inputs;
  all.x = x;
  static thread_local glm::Memory memory;
  const int64_t passes = level.passes(product.kind, product.inputs, depth, rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = first_of_pass(pass, passes, rows);
    glm::LinearPanel some =
        glm::slice_rows(all, first, first_of_pass(pass + 1, passes, rows) - first);
    if (packs && !packed) {
      const float* from = (const float*)x + first * depth;
      char* to = memory.of(product.packed_bytes(some.rows));
      pack_inputs(product, some.rows, [&](int64_t row) { return from + row * depth; }, to);
      some.x = to;
    }
    multiply(product.kind, some);
  }
}

// x [rows, depth], used, packed weight [panels, ...], bias [columns] -> y [rows, columns]
int linear(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes,
           glm::Epilogue epilogue, Inputs inputs) {
  Product product, next{};
  int refused = read_product(data[2], dtypes[2], ranks[2], shapes[2], shapes[0][1], shapes[3][0],
                             inputs, product);
  if (refused) return refused;
  glm::LinearPanel all{};
  all.rows = rows_in_use(data, shapes, 1);
  all.bias = (const float*)data[3];
  all.epilogue = epilogue;
  if (epilogue == glm::Epilogue::add) {
    all.residual = (const float*)data[4];
    all.factor = *(const float*)data[5];
  }
  const int output = count - 1;
  const bool packs_output = is_packed_inputs(dtypes[output]);
  static thread_local glm::Memory memory;
  if (packs_output) {
    REFUSE_UNLESS(epilogue == glm::Epilogue::gelu && count == 6);
    refused = read_product(data[4], dtypes[4], ranks[4], shapes[4], product.columns, ANY,
                           inputs, next);
    if (refused) return refused;
  }
  const glm::PackedInputs packed = packs_output ? next.packed_inputs(data[output]) : glm::PackedInputs{};
  const bool directly = packs_output && glm::level().packs_results(product.kind, product.inputs, packed);
  if (directly) {
    all.packed = packed;
  } else if (packs_output) {
    all.y = (float*)memory.of(all.rows * product.columns * (int64_t)sizeof(float));
  } else {
    all.y = (float*)data[output];
  }
  multiply_rows(product, all, data[0], is_packed_inputs(dtypes[0]));
  if (packs_output && !directly)
    pack_inputs(next, all.rows, [&](int64_t row) { return all.y + row * product.columns; }, packed.rows);
  return 0;
}

}  // namespace

// x [rows, depth], used, weight, bias [columns] -> [rows, columns]
// x may be uint8 instead: packed inputs of this product.
#define LINEAR(name, epilogue, inputs)                                           \
  OPERATOR(name) {                                                               \
    return linear(count, data, ranks, shapes, dtypes, epilogue, Inputs::inputs); \
  }
LINEAR(linear, glm::Epilogue::none, float32)

// The same with GELU (tanh approximation). With the weight of the next product after the bias, the output is
// uint8 [rows, columns]: packed inputs of that product, whose x is rounded to the same type.
LINEAR(linear_gelu, glm::Epilogue::gelu, float32)

// x, used, weight, bias, residual [rows, columns], factor [1]
// -> residual * factor + linear(x)
LINEAR(linear_add, glm::Epilogue::add, float32)

// The same with x rounded to bf16.
LINEAR(linear_bfloat16, glm::Epilogue::none, bfloat16)
LINEAR(linear_gelu_bfloat16, glm::Epilogue::gelu, bfloat16)
LINEAR(linear_add_bfloat16, glm::Epilogue::add, bfloat16)

// The same with x quantised to int8, for int8 and group-quantised weights.
LINEAR(linear_int8, glm::Epilogue::none, int8)
LINEAR(linear_gelu_int8, glm::Epilogue::gelu, int8)
LINEAR(linear_add_int8, glm::Epilogue::add, int8)
