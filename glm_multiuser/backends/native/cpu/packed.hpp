// What a packed weight is: its dtype says so, and for weights in groups its shape.
#pragma once

#include <cstdint>
#include <cstring>

#include "group_types.hpp"

namespace {

using glm::PANEL;

struct Packed {
  glm::Weight kind;
  int64_t panel_bytes;
};

// uint8 [panels, blocks, bytes of a block of a panel], which no two types have as many of.
bool is_packed_in_groups(const int64_t* shape, int64_t depth, Packed& packed) {
  for (const glm::GroupType& type : glm::GROUP_TYPES) {
    if (shape[2] != type.bytes()) continue;
    packed = {type.weight, shape[1] * shape[2]};
    return shape[1] * type.inputs == depth;
  }
  return false;
}

// Of a weight with so many inputs; false if there is no such type.
bool is_packed(const char* dtype, int rank, const int64_t* shape, int64_t depth, Packed& packed) {
  if (std::strcmp(dtype, "float32") == 0) {
    packed.kind = glm::Weight::float32;
  } else if (std::strcmp(dtype, "float16") == 0) {
    packed.kind = glm::Weight::float16;
  } else if (std::strcmp(dtype, "int16") == 0) {
    packed.kind = glm::Weight::bfloat16;
  } else if (std::strcmp(dtype, "int8") == 0) {
    packed.kind = glm::Weight::int8;
  } else {
    if (std::strcmp(dtype, "uint8") != 0 || rank != 3) return false;
    return is_packed_in_groups(shape, depth, packed);
  }
  packed.panel_bytes = glm::panel_bytes(packed.kind, depth);
  return true;
}

}  // namespace
