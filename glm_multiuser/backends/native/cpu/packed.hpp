// Derives the type of a packed weight from its dtype and, if group-quantised, its shape.
#pragma once

#include <cstdint>
#include <cstring>

#include "group_types.hpp"

namespace {

using glm::PANEL;

struct PackedWeight {
  glm::Weight kind;
  int64_t panel_bytes;
};

// uint8 [panels, blocks, bytes of a block of a panel]; the number of bytes identifies the type.
bool read_packed_groups(const int64_t* shape, int64_t depth, PackedWeight& packed) {
  for (const glm::GroupType& type : glm::GROUP_TYPES) {
    if (shape[2] != type.bytes()) continue;
    packed = {type.weight, shape[1] * shape[2]};
    return shape[1] * type.inputs == depth;
  }
  return false;
}

struct PackedType {
  const char* dtype;
  glm::Weight kind;
  int64_t bytes;  // of a weight
};

const PackedType PACKED_TYPES[] = {{"float32", glm::Weight::float32, 4},
                                   {"float16", glm::Weight::float16, 2},
                                   {"int16", glm::Weight::bfloat16, 2},
                                   {"int8", glm::Weight::int8, 1}};

// Returns false for an unknown type, or if the weight does not have `depth` inputs.
bool read_packed_weight(const char* dtype, int rank, const int64_t* shape, int64_t depth,
                        PackedWeight& packed) {
  for (const PackedType& type : PACKED_TYPES) {
    if (std::strcmp(dtype, type.dtype) != 0) continue;
    packed = {type.kind, glm::panel_bytes(type.kind, depth)};
    int64_t bytes = type.bytes;
    for (int i = 1; i < rank; ++i) bytes *= shape[i];
    return bytes == packed.panel_bytes;
  }
  return std::strcmp(dtype, "uint8") == 0 && rank == 3 && read_packed_groups(shape, depth, packed);
}

}  // namespace
