// Linear layers: rows are laid out as products want them, and threads share the panels of a weight.
#include <algorithm>

#include "level.hpp"
#include "memory.hpp"
#include "operators.hpp"
#include "packed.hpp"
#include "sharing.hpp"

using glm::Inputs;
using glm::PANEL;
using glm::ROW_MULTIPLE;

namespace {

// Fewer rows that stay as they are, are read where they are.
constexpr int64_t ROWS_TO_LAY_OUT = 5;

// Sums of so many products of int8 fit into int32.
constexpr int64_t MOST_INT8_INPUTS = 1 << 17;

// x [rows, depth] as products want it.
const void* lay_out(glm::Weight kind, Inputs inputs, const float* x, int64_t rows, int64_t depth) {
  static thread_local glm::Memory laid_out;
  const glm::Level& level = glm::level();
  const int64_t filled_up = (rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
  char* to = laid_out.of(filled_up * level.row_bytes(kind, inputs, depth));
  share_rows(rows, depth, [&](int64_t row) {
    level.lay_row(kind, inputs, x + row * depth, depth, row, to);
  });
  return to;
}

// Rows times all panels; `all` is as of one panel with all columns.
void multiply(glm::Weight kind, const glm::LinearPanel& all) {
  const glm::Level& level = glm::level();
  // Each thread should get two pieces at least.
  const int64_t panels = (all.columns + PANEL - 1) / PANEL, most = panels / (2 * glm::threads());
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

// x [rows, depth], used, packed weight [panels, ...], bias [columns] -> y [rows, columns]
// With int8 weights, x is always rounded, to bf16 at least. To int8 it is rounded for int8 weights and
// for those in groups only.
int linear(void** data, int* ranks, int64_t** shapes, const char** dtypes, glm::Finish finish,
           Inputs inputs) {
  const int64_t rows = rows_in_use(data, shapes, 1);
  const int64_t depth = shapes[0][1], columns = shapes[3][0];
  Packed packed;
  REFUSE_UNLESS(is_packed(dtypes[2], ranks[2], shapes[2], depth, packed));
  REFUSE_UNLESS(shapes[2][0] == (columns + PANEL - 1) / PANEL);
  const glm::Weight kind = packed.kind;
  if (kind == glm::Weight::int8) {
    if (inputs == Inputs::int8) REFUSE_UNLESS(depth <= MOST_INT8_INPUTS);
    if (inputs == Inputs::float32) inputs = Inputs::bfloat16;
  } else if (inputs == Inputs::int8 && !glm::in_groups(kind)) {
    inputs = Inputs::float32;
  }
  const bool adds = finish == glm::Finish::add;
  const glm::Level& level = glm::level();
  const bool lays_out = rows >= ROWS_TO_LAY_OUT || level.lays_out(kind, inputs, depth);
  glm::LinearPanel all{};
  all.row_bytes =
      lays_out ? level.row_bytes(kind, inputs, depth) : depth * (int64_t)sizeof(float);
  all.weight = data[2];
  all.bias = (const float*)data[3];
  all.depth = depth;
  all.stride = columns;
  all.columns = (int)columns;
  all.bytes = packed.panel_bytes;
  all.factor = adds ? *(const float*)data[5] : 0;
  all.finish = finish;
  all.inputs = inputs;
  const int64_t passes = level.passes(kind, inputs, depth, rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = first_of_pass(pass, passes, rows);
    const float* x = (const float*)data[0] + first * depth;
    all.rows = first_of_pass(pass + 1, passes, rows) - first;
    all.x = lays_out ? lay_out(kind, inputs, x, all.rows, depth) : x;
    all.residual = adds ? (const float*)data[4] + first * columns : nullptr;
    all.y = (float*)data[adds ? 6 : 4] + first * columns;
    multiply(kind, all);
  }
  return 0;
}

}  // namespace

// x [rows, depth], used, weight, bias [columns] -> [rows, columns]
#define LINEAR(name, finish, inputs) \
  OPERATOR(name) { return linear(data, ranks, shapes, dtypes, finish, Inputs::inputs); }
LINEAR(linear, glm::Finish::none, float32)

// The same, then the GELU in its tanh form.
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
