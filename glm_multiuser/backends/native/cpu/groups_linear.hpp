// Products of float inputs and group-quantised weights. For few rows, weights are dequantised in
// registers; for more, a few inputs at a time are dequantised into a buffer that all rows use. int8 inputs:
// int8_groups.hpp.
#pragma once

#include "groups.hpp"
#include "int8_groups.hpp"
#include "linear.hpp"

namespace {

// Up to this many rows use weights dequantised in registers.
constexpr int ROWS_FROM_REGISTERS = BLOCK_ROWS < 8 ? BLOCK_ROWS : 8;

// Dequantised weights, and the sums of these rows, should stay in L1.
constexpr int64_t WIDENED_BYTES = 16384, ROWS_TOGETHER = 128;
constexpr int64_t PARTS_TOGETHER = WIDENED_BYTES / (PART * BLOCK_COLUMNS * (int64_t)sizeof(float));

template <class T, int M, int V>
void few_rows(const LinearPanel& panel) {
  const RowOffsets<M> rows(panel.row_bytes);
  for (int column = 0; column < panel.columns; column += V * WIDTH) {
    const auto* x = (const float*)panel.x;
    vec sums[M][V];
    clear(sums);
    for (int64_t part = 0; part < panel.depth / PART; ++part) {
      const auto* weight = (const char*)panel.weight;
      const int64_t ahead = group_prefetch_distance<T>(panel, part);
      widen_part<T, V>(weight, part, column, panel.bytes, ahead, [&](int input, const vec* w) {
        add<M, V>(x + input, rows, w, sums);
      });
      x += PART;
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) store_result(panel, m, column + v * WIDTH, sums[m][v]);
  }
}

// Adds M rows times dequantised weights of `inputs` inputs to `totals` [M, BLOCK_COLUMNS].
template <int M>
void add_widened(const float* x, int64_t row_bytes, const float* widened, int64_t inputs,
                 float* totals) {
  constexpr int V = VECTORS;
  const RowOffsets<M> rows(row_bytes);
  vec sums[M][V];
  load_sums(totals, sums);
  for (int64_t input = 0; input < inputs; ++input) {
    vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load(widened + input * BLOCK_COLUMNS + v * WIDTH);
    add<M, V>(x++, rows, w, sums);
  }
  store_sums(totals, sums);
}

template <int M>
void add_widened_of(int rows, const float* x, int64_t row_bytes, const float* widened, int64_t inputs,
                    float* totals) {
  if constexpr (M > 0) {
    if (rows == M) return add_widened<M>(x, row_bytes, widened, inputs, totals);
    add_widened_of<M - 1>(rows, x, row_bytes, widened, inputs, totals);
  }
}

void many_rows(const LinearPanel panel, WidenColumns widen, int64_t begin, int64_t rows,
               int column) {
  const int64_t width = panel.row_bytes / (int64_t)sizeof(float), parts = panel.depth / PART;
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  alignas(64) float widened[PARTS_TOGETHER * PART * BLOCK_COLUMNS];
  alignas(64) float totals[ROWS_TOGETHER * BLOCK_COLUMNS];
  std::memset(totals, 0, rows * BLOCK_COLUMNS * sizeof(float));
  for (int64_t part = 0; part < parts; part += PARTS_TOGETHER) {
    const int64_t count = parts - part < PARTS_TOGETHER ? parts - part : PARTS_TOGETHER;
    widen((const char*)panel.weight, part, count, column, widened);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks;
      const int here = (int)(rows * (block + 1) / blocks - row);
      const float* x = (const float*)panel.x + (begin + row) * width + part * PART;
      if (part + count == parts)
        for (int m = 0; m < here; ++m) prefetch_results<1, VECTORS>(panel, begin + row + m, column);
      add_widened_of<BLOCK_ROWS>(here, x, panel.row_bytes, widened, count * PART,
                                 totals + row * BLOCK_COLUMNS);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < VECTORS; ++v)
      store_result(panel, begin + row, column + v * WIDTH, load(totals + row * BLOCK_COLUMNS + v * WIDTH));
}

template <class T>
void one_panel(const LinearPanel& panel) {
  if (panel.rows <= ROWS_FROM_REGISTERS)
    return with_rows<ROWS_FROM_REGISTERS>((int)panel.rows, [&](auto rows) {
      few_rows<T, rows.value, rows.value <= FEW_ROWS ? ALL_VECTORS : VECTORS>(panel);
    });
  for (int64_t begin = 0; begin < panel.rows; begin += ROWS_TOGETHER) {
    const int64_t left = panel.rows - begin, rows = left < ROWS_TOGETHER ? left : ROWS_TOGETHER;
    for (int column = 0; column < panel.columns; column += BLOCK_COLUMNS)
      many_rows(panel, widen_columns<T, VECTORS>, begin, rows, column);
  }
}

// One row is bound by the latency of its sums; a second panel doubles the number of independent sums.
template <class T>
bool two_panels(const LinearPanel& panel) {
  if constexpr (WIDTH == 16) {
    if (panel.rows == 1) few_rows<T, 1, 2 * ALL_VECTORS>(panel);
    if (panel.rows == 2) few_rows<T, 2, 2 * ALL_VECTORS>(panel);
    return panel.rows == 1 || panel.rows == 2;
  }
  return false;
}

template <class T>
void linear_group_type(const LinearPanel& panel) {
  if (panel.inputs == Inputs::int8) return int8_group_panel<T>(panel);
  if (panel.columns <= PANEL) return one_panel<T>(panel);
  if (two_panels<T>(panel)) return;
  one_panel<T>(glm::slice_panels(panel, 0, 1));
  one_panel<T>(glm::slice_panels(panel, 1, 1));
}

void linear_groups(glm::Weight kind, const LinearPanel& panel) {
  with_group_type(kind, [&](auto type) { linear_group_type<decltype(type)>(panel); });
}

int64_t int8_groups_row_bytes(glm::Weight kind, int64_t depth) {
  int64_t bytes = 0;
  with_group_type(kind, [&](auto type) {
    bytes = int8_group_row_bytes(decltype(type)::type.group, depth);
  });
  return bytes;
}

void pack_int8_groups_row(glm::Weight kind, const float* x, int64_t depth, void* row) {
  with_group_type(kind, [&](auto type) { pack_int8_group_row<decltype(type)>(x, depth, row); });
}

void widen_output(glm::Weight kind, const void* panel, int64_t depth, int column, float* row) {
  const int lane = column % BLOCK_COLUMNS;
  float widened[PART * BLOCK_COLUMNS];
  with_group_type(kind, [&](auto type) {
    for (int64_t i = 0; i < depth; i += PART) {
      widen_columns<decltype(type), VECTORS>((const char*)panel, i / PART, 1, column - lane,
                                             widened);
      for (int input = 0; input < PART; ++input)
        row[i + input] = widened[input * BLOCK_COLUMNS + lane];
    }
  });
}

}  // namespace
