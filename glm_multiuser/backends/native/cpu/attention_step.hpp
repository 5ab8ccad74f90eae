// The arguments of the attention operator.
#pragma once

#include <cstring>

#include "level.hpp"
#include "parallel.hpp"

namespace {

constexpr int USED = 1, FIRST_CACHE = 10;

bool kind_of(const char* dtype, glm::Cache& kind) {
  if (std::strcmp(dtype, "float32") == 0) {
    kind = glm::Cache::float32;
  } else if (std::strcmp(dtype, "int16") == 0) {
    kind = glm::Cache::bfloat16;
  } else if (std::strcmp(dtype, "int8") == 0) {
    kind = glm::Cache::int8;
  } else {
    return false;
  }
  return true;
}

// Bytes of one head of one position, including the scale of int8.
int64_t head_bytes(glm::Cache kind, int64_t head_dim) {
  switch (kind) {
    case glm::Cache::float32: return head_dim * 4;
    case glm::Cache::bfloat16: return head_dim * 2;
    case glm::Cache::int8: return head_dim + glm::SCALE_BYTES;
  }
  return 0;
}

// Keys and values of all users, in cells of `per_cell` users.
struct Caches {
  void** data;
  int64_t** shapes;
  glm::Cache kind;
  int64_t per_cell, users, kv_heads, head_bytes;

  int64_t cell(int32_t user) const { return FIRST_CACHE + 2 * (user / per_cell); }
  int64_t row(int32_t user, int64_t head) const { return user % per_cell * kv_heads + head; }
  int64_t positions(int32_t user) const { return shapes[cell(user) + 1][2]; }

  char* keys(int32_t user, int64_t head) const {
    const int64_t tiles = shapes[cell(user)][2];
    return (char*)data[cell(user)] + row(user, head) * tiles * head_bytes * glm::TILE;
  }
  char* values(int32_t user, int64_t head) const {
    return (char*)data[cell(user) + 1] + row(user, head) * positions(user) * head_bytes;
  }
};

// The operator's arguments.
struct Step {
  const float* x;  // [tokens, width + 2 * kv_width]
  const int32_t *users, *writes, *visible, *angles, *partner;
  const float *cosine, *sine;
  float* out;
  float scale;
  int64_t tokens, kv_heads, head_dim;
  int64_t group, width, kv_width;  // query heads per key head; elements of all heads
  int64_t parts, part;             // parts of a head with their own angles, and their size
  int64_t angles_stride;           // between the angles of two parts
  Caches caches;

  // Of one query head of a token.
  const float* query(int64_t t, int64_t head) const {
    return x + t * (width + 2 * kv_width) + head * head_dim;
  }
  float* context(int64_t t, int64_t head) const { return out + t * width + head * head_dim; }
};

int read_caches(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes,
                Step& step) {
  Caches& caches = step.caches;
  REFUSE_UNLESS(count > FIRST_CACHE + 2 && (count - FIRST_CACHE - 1) % 2 == 0);
  REFUSE_UNLESS(kind_of(dtypes[FIRST_CACHE], caches.kind));
  caches.data = data, caches.shapes = shapes, caches.kv_heads = step.kv_heads;
  caches.head_bytes = head_bytes(caches.kind, step.head_dim);
  // The last dimension: elements of a head, plus the bytes of the scale with int8.
  const int64_t last = caches.kind == glm::Cache::int8 ? caches.head_bytes : step.head_dim;
  for (int keys = FIRST_CACHE, values = keys + 1; values < count - 1; keys += 2, values += 2) {
    REFUSE_UNLESS(ranks[keys] == 5 && ranks[values] == 4);
    REFUSE_UNLESS(shapes[keys][1] == step.kv_heads && shapes[values][1] == step.kv_heads);
    REFUSE_UNLESS(shapes[keys][3] == last && shapes[values][3] == last);
    REFUSE_UNLESS(std::strcmp(dtypes[keys], dtypes[FIRST_CACHE]) == 0);
    REFUSE_UNLESS(std::strcmp(dtypes[values], dtypes[FIRST_CACHE]) == 0);
  }
  const int last_cell = count - 3;
  caches.per_cell = shapes[FIRST_CACHE][0];
  caches.users = (last_cell - FIRST_CACHE) / 2 * caches.per_cell + shapes[last_cell][0];
  REFUSE_UNLESS(caches.per_cell > 0);
  return 0;
}

int read_arguments(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes,
                   Step& step) {
  const auto* settings = (const int32_t*)data[8];
  step.x = (const float*)data[0];
  step.tokens = rows_in_use(data, shapes, USED);
  step.users = (const int32_t*)data[2];
  step.writes = (const int32_t*)data[3], step.visible = step.writes + shapes[3][1];
  step.angles = (const int32_t*)data[4];
  step.cosine = (const float*)data[5], step.sine = (const float*)data[6];
  step.partner = (const int32_t*)data[7];
  step.scale = *(const float*)data[9];
  step.out = (float*)data[count - 1];
  const int64_t heads = settings[0];
  step.kv_heads = settings[1], step.head_dim = settings[2];
  REFUSE_UNLESS(heads > 0 && step.kv_heads > 0 && heads % step.kv_heads == 0);
  step.group = heads / step.kv_heads;
  step.width = heads * step.head_dim, step.kv_width = step.kv_heads * step.head_dim;
  step.parts = shapes[4][0], step.angles_stride = shapes[4][1], step.part = shapes[5][1];
  REFUSE_UNLESS(step.part * step.parts == step.head_dim);
  REFUSE_UNLESS(shapes[0][1] == step.width + 2 * step.kv_width);
  const int refused = read_caches(count, data, ranks, shapes, dtypes, step);
  if (refused) return refused;
  for (int64_t t = 0; t < step.tokens; ++t) {
    REFUSE_UNLESS(step.users[t] >= 0 && step.users[t] < step.caches.users);
    const int64_t positions = step.caches.positions(step.users[t]);
    REFUSE_UNLESS(step.writes[t] >= 0 && step.writes[t] < positions);
    REFUSE_UNLESS(step.visible[t] > 0 && step.visible[t] <= positions);
    for (int64_t p = 0; p < step.parts; ++p) {
      const int32_t row = step.angles[p * step.angles_stride + t];
      REFUSE_UNLESS(row >= 0 && row < shapes[5][0]);
    }
  }
  return 0;
}

}  // namespace
