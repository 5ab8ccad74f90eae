// All operators except linear layers and attention.
#include <cstring>

#include "half.hpp"
#include "memory.hpp"
#include "operators.hpp"
#include "product.hpp"

using glm::PANEL;

namespace {

void add_row(const float* x, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i) y[i] += x[i];
}

int swiglu_for(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes,
               Inputs inputs) {
  const int64_t size = shapes[0][1] / 2, rows = rows_in_use(data, shapes, 1);
  const auto compute = [&](int64_t row, float* y) {
    const float* gate = (const float*)data[0] + row * 2 * size;
    glm::level().swiglu(gate, gate + size, size, y);
    return y;
  };
  void* out = data[count - 1];
  if (count == 3) {
    parallel_for_rows(rows, size, [&](int64_t row) { compute(row, (float*)out + row * size); });
    return 0;
  }
  Product next;
  const int refused = read_product(data[2], dtypes[2], ranks[2], shapes[2], size, ANY, inputs, next);
  if (refused) return refused;
  const auto row_of = [&](int64_t row) {
    static thread_local glm::Memory memory;
    return compute(row, (float*)memory.of(size * (int64_t)sizeof(float)));
  };
  pack_inputs(next, rows, row_of, out);
  return 0;
}

}  // namespace

// ids int32 [rows], used, weight as for `linear`, settings int32 [2]: vocabulary, width
// -> [rows, width]
OPERATOR(embedding) {
  const auto* ids = (const int32_t*)data[0];
  const auto* settings = (const int32_t*)data[3];
  auto* y = (float*)data[4];
  const int64_t rows = rows_in_use(data, shapes, 1);
  const int64_t width = settings[1];
  PackedWeight packed;
  REFUSE_UNLESS(read_packed_weight(dtypes[2], ranks[2], shapes[2], width, packed));
  const glm::Weight kind = packed.kind;
  const int64_t bytes = packed.panel_bytes;
  for (int64_t row = 0; row < rows; ++row) REFUSE_UNLESS(ids[row] >= 0 && ids[row] < settings[0]);
  parallel_for_rows(rows, width, [&](int64_t row) {
    const char* panel = (const char*)data[2] + ids[row] / PANEL * bytes;
    const int column = ids[row] % PANEL;
    float* to = y + row * width;
    if (glm::in_groups(kind)) {
      glm::level().widen_output(kind, panel, width, column, to);
    } else if (kind == glm::Weight::float32) {
      const auto* from = (const float*)panel + column;
      for (int64_t i = 0; i < width; ++i) to[i] = from[i * PANEL];
    } else if (kind == glm::Weight::float16) {
      const auto* from = (const uint16_t*)panel + column;
      for (int64_t i = 0; i < width; ++i) to[i] = from_f16(from[i * PANEL]);
    } else if (kind == glm::Weight::bfloat16) {
      const auto* from = (const uint16_t*)panel + 2 * column;
      for (int64_t i = 0; i < width; ++i) to[i] = from_bf16(from[i / 2 * 2 * PANEL + i % 2]);
    } else {
      const float scale = ((const float*)panel)[column];
      const auto* from = (const int8_t*)panel + PANEL * sizeof(float) + 2 * column;
      for (int64_t i = 0; i < width; ++i) to[i] = (float)from[i / 2 * 2 * PANEL + i % 2] * scale;
    }
  });
  return 0;
}

// x [rows, size], indices int32 [taken], used -> those rows of x [taken, size]
OPERATOR(take_rows) {
  const int64_t size = shapes[0][1];
  const auto* indices = (const int32_t*)data[1];
  const int64_t taken = std::max<int64_t>(0, std::min<int64_t>(shapes[1][0], *(int32_t*)data[2]));
  for (int64_t row = 0; row < taken; ++row) {
    REFUSE_UNLESS(indices[row] >= 0 && indices[row] < shapes[0][0]);
    std::memcpy((float*)data[3] + row * size, (const float*)data[0] + indices[row] * size,
                sizeof(float) * size);
  }
  return 0;
}

// x [rows, size], used, gamma [size], beta [size], epsilon [1], optional residual [rows, size]
// -> [rows, size], plus the residual if given
OPERATOR(layer_norm) {
  const int64_t size = shapes[0][1];
  const float* residual = count == 7 ? (const float*)data[5] : nullptr;
  parallel_for_rows(rows_in_use(data, shapes, 1), size, [&](int64_t row) {
    float* y = (float*)data[count - 1] + row * size;
    glm::level().layer_norm((const float*)data[0] + row * size, (const float*)data[2],
                            (const float*)data[3], *(const float*)data[4], size, y);
    if (residual != nullptr) add_row(residual + row * size, size, y);
  });
  return 0;
}

// Layer norm before a layer, for layer-wise prefill: a long prompt that cannot be chunked goes through only
// some of the layers in each step.
//
// x [rows, size]
// plan int32 [4]: number of rows; how many of them, from the first on, go through all layers; the others go
//     through layers plan[2] to plan[3] - 1
// layer int32 [1]
// saved [*, size]: hidden states of the other rows between steps
// gamma [size], beta [size], epsilon [1]
// -> [rows, size]; used int32 [1], number of rows in this layer
OPERATOR(layer_norm_of_layer) {
  const int64_t size = shapes[0][1];
  const auto* plan = (const int32_t*)data[1];
  const int64_t rows = rows_in_use(data, shapes, 1), always = plan[1];
  const int32_t layer = *(const int32_t*)data[2], first = plan[2], last = plan[3];
  auto* saved = (float*)data[3];
  REFUSE_UNLESS(always >= 0 && always <= rows && rows - always <= shapes[3][0]);
  const bool inside = first <= layer && layer < last;
  parallel_for_rows(inside || layer == last ? rows : always, size, [&](int64_t row) {
    const float* x = (const float*)data[0] + row * size;
    if (row >= always) {
      float* own = saved + (row - always) * size;
      if (layer == last) {
        std::memcpy(own, x, sizeof(float) * size);
        return;
      }
      if (layer == first && first > 0) x = own;
    }
    glm::level().layer_norm(x, (const float*)data[4], (const float*)data[5],
                            *(const float*)data[6], size, (float*)data[7] + row * size);
  });
  *(int32_t*)data[8] = (int32_t)(inside ? rows : always);
  return 0;
}

// x [rows, size], used, weight [size], epsilon [1], optional residual [rows, size]
// -> [rows, size], plus the residual if given
OPERATOR(rms_norm) {
  const int64_t size = shapes[0][1];
  const float* residual = count == 6 ? (const float*)data[4] : nullptr;
  parallel_for_rows(rows_in_use(data, shapes, 1), size, [&](int64_t row) {
    float* y = (float*)data[count - 1] + row * size;
    glm::level().rms_norm((const float*)data[0] + row * size, (const float*)data[2],
                          *(const float*)data[3], size, y);
    if (residual != nullptr) add_row(residual + row * size, size, y);
  });
  return 0;
}

// x [rows, columns]: queries, keys and values; used, query weight [head_dim], key weight [head_dim],
// epsilon [1], heads int32 [2]: query heads, key heads
// -> x with RMS norm applied to each query head and each key head; values are copied
OPERATOR(query_key_norm) {
  const int64_t columns = shapes[0][1], head_dim = shapes[2][0];
  const auto* heads = (const int32_t*)data[5];
  const int64_t queries = heads[0], normed = queries + heads[1];
  REFUSE_UNLESS(heads[0] > 0 && heads[1] > 0 && normed * head_dim <= columns);
  parallel_for_rows(rows_in_use(data, shapes, 1), columns, [&](int64_t row) {
    const float* x = (const float*)data[0] + row * columns;
    float* y = (float*)data[6] + row * columns;
    for (int64_t head = 0; head < normed; ++head)
      glm::level().rms_norm(x + head * head_dim, (const float*)data[head < queries ? 2 : 3],
                            *(const float*)data[4], head_dim, y + head * head_dim);
    const int64_t rest = columns - normed * head_dim;
    std::memcpy(y + normed * head_dim, x + normed * head_dim, sizeof(float) * rest);
  });
  return 0;
}

// gate and up [rows, 2 size], used -> [rows, size]
// With the weight of the next product as an additional input: uint8, packed inputs of that product.
#define SWIGLU(name, inputs) \
  OPERATOR(name) { return swiglu_for(count, data, ranks, shapes, dtypes, Inputs::inputs); }
SWIGLU(swiglu, float32)
SWIGLU(swiglu_bfloat16, bfloat16)
SWIGLU(swiglu_int8, int8)

// hidden [rows, width], logits [rows, vocabulary], used
// -> argmax of the logits, the first of several, int32 [rows]; [rows]: 0 if the row of hidden and the best
//    logit are finite, otherwise NaN
OPERATOR(next_token) {
  const int64_t width = shapes[0][1], vocabulary = shapes[1][1];
  parallel_for_rows(rows_in_use(data, shapes, 2), vocabulary, [&](int64_t row) {
    const float* logits = (const float*)data[1] + row * vocabulary;
    const int64_t best = glm::level().argmax(logits, vocabulary);
    const bool finite = glm::level().all_finite((const float*)data[0] + row * width, width) &&
                        logits[best] * 0.0f == 0.0f;
    ((int32_t*)data[3])[row] = (int32_t)best;
    ((float*)data[4])[row] = finite ? 0.0f : __builtin_nanf("");
  });
  return 0;
}

// -> bytes of a packed input row of a product with this packed weight, which has `depth` inputs; 0 if there
// is no such product
extern "C" int64_t glm_row_bytes(const char* dtype, int rank, const int64_t* shape, int64_t depth,
                                 const char* inputs) {
  for (const auto& [name, each] : INPUTS) {
    if (std::strcmp(name, inputs) != 0) continue;
    Product product;
    return read_product(nullptr, dtype, rank, shape, depth, ANY, each, product) ? 0
                                                                                : product.row_bytes();
  }
  return 0;
}

// -> the memory of packed inputs is padded to a multiple of this many rows
extern "C" int glm_row_multiple() { return glm::ROW_MULTIPLE; }
