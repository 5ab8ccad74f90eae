// Attention: applies the rotary embedding, writes new keys and values to their users' caches, and lets each
// token attend to its user's cache.
#include <algorithm>
#include <cstring>
#include <vector>

#include "level.hpp"
#include "memory.hpp"
#include "operators.hpp"
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

// Rotary embedding of one head of a token.
void rotate(const Step& step, int64_t t, const float* x, float factor, float* y) {
  for (int64_t p = 0; p < step.parts; ++p) {
    const int64_t row = step.angles[p * step.angles_stride + t] * step.part;
    glm::level().rotate(x, step.partner, step.cosine + row, step.sine + row, p * step.part, step.part,
                        factor, y + p * step.part);
  }
}

// For one key head of a token: rotates its queries and its key, and writes key and value to the cache.
void rotate_and_cache(const Step& step, int64_t t, int64_t head) {
  const int64_t head_dim = step.head_dim, queries = step.group * head_dim;
  const float* x = step.x + t * (step.width + 2 * step.kv_width);
  for (int64_t i = head * queries; i < (head + 1) * queries; i += head_dim)
    rotate(step, t, x + i, step.scale, step.out + t * step.width + i);
  static thread_local std::vector<float> key;
  key.resize(head_dim);
  rotate(step, t, x + step.width + head * head_dim, 1.0f, key.data());
  const float* value = x + step.width + step.kv_width + head * head_dim;
  const Caches& caches = step.caches;
  const int32_t user = step.users[t], position = step.writes[t];
  const int lane = position % glm::TILE;
  glm::level().write_position(caches.kind, key.data(), value, head_dim, lane,
                              caches.keys(user, head) + (position - lane) * caches.head_bytes,
                              caches.values(user, head) + position * caches.head_bytes);
}

// Consecutive tokens of one user.
struct Run {
  int64_t first, last;
};

// Query rows per piece: the best number of the level, or fewer if threads would get too few pieces.
int64_t rows_of_piece(const Step& step) {
  constexpr int64_t FEWEST = 64, PIECES = 4;  // per thread
  const int64_t best = glm::level().query_rows(step.caches.kind);
  const int64_t all = step.tokens * step.group * step.kv_heads;
  return std::clamp<int64_t>(all / (PIECES * glm::threads()) / FEWEST * FEWEST, FEWEST, best);
}

std::vector<Run> runs_of(const Step& step) {
  std::vector<Run> runs;
  const int64_t most = std::max<int64_t>(1, rows_of_piece(step) / step.group);
  for (int64_t t = 0; t < step.tokens; ++t) {
    const bool continues = !runs.empty() && step.users[t - 1] == step.users[t] &&
                         t - runs.back().first < most;
    if (continues) {
      runs.back().last = t + 1;
    } else {
      runs.push_back({t, t + 1});
    }
  }
  return runs;
}

bool is_one_run_per_user(const Step& step, const std::vector<Run>& runs) {
  std::vector<int32_t> users;
  for (const Run& run : runs) users.push_back(step.users[run.first]);
  std::sort(users.begin(), users.end());
  return std::adjacent_find(users.begin(), users.end()) == users.end();
}

// One key head of a run.
struct Piece {
  Run run;
  int64_t head;
};

// `next` is the piece that this thread processes next; may be null.
void attend(const Step& step, const Piece& piece, const Piece* next) {
  static thread_local glm::Memory memory;
  const Caches& caches = step.caches;
  const Run run = piece.run;
  const int32_t user = step.users[run.first];
  float* rows[glm::ROWS];
  int64_t visible[glm::ROWS];
  glm::Attention task{};
  task.keys = caches.keys(user, piece.head);
  task.values = caches.values(user, piece.head);
  task.rows = rows;
  task.visible = visible;
  task.scratch = (float*)memory.of(glm::attention_scratch(step.head_dim));
  task.head_dim = step.head_dim;
  if (next != nullptr) {
    const int32_t next_user = step.users[next->run.first];
    task.next_keys = caches.keys(next_user, next->head);
    task.next_values = caches.values(next_user, next->head);
    task.next_positions = step.visible[next->run.last - 1];
  }
  for (int64_t t = run.first; t < run.last; ++t) {
    for (int64_t query = 0; query < step.group; ++query) {
      if (task.count == glm::ROWS) {
        glm::level().attend(caches.kind, task);
        task.count = 0;
      }
      rows[task.count] =
          step.out + t * step.width + (piece.head * step.group + query) * step.head_dim;
      visible[task.count++] = step.visible[t];
    }
  }
  glm::level().attend(caches.kind, task);
}

}  // namespace

// queries, keys and values of all heads [tokens, (heads + 2 kv_heads) * head_dim]
// used
// users int32 [tokens]: whose caches
// positions int32 [2, tokens]: where the token's key and value are written, and how many positions it sees
// angles int32 [parts, tokens]: the row of the tables, for each part of a head
// cosine, sine [table rows, head_dim / parts], partner int32 [head_dim]:
//     x[i] becomes x[i] * cosine[i] + x[partner[i]] * sine[i]
// settings int32 [3]: heads, key/value heads, head_dim
// scale [1]: of queries
// then for each cell keys [users, heads, tiles, head_dim, TILE] and values [users, heads, positions,
//     head_dim]; all cells but the last have the same number of users. float32, bf16 (its bits, as int16)
//     or int8; with int8, head_dim is larger by SCALE_BYTES, because each tile and each position's value is
//     preceded by float32 scales
// -> context [tokens, heads * head_dim]
OPERATOR(attention) {
  Step step;
  const int refused = read_arguments(count, data, ranks, shapes, dtypes, step);
  if (refused) return refused;
  const std::vector<Run> runs = runs_of(step);
  // Keys and values must be written before they are read. If no other piece reads them, a piece writes its
  // own; otherwise all are written first.
  const bool one_run_per_user = is_one_run_per_user(step, runs);
  if (!one_run_per_user)
    parallel_for_rows(step.tokens, 2 * step.width, [&](int64_t t) {
      for (int64_t head = 0; head < step.kv_heads; ++head) rotate_and_cache(step, t, head);
    });
  // Head by head, so that keys and values stay in L2 for all rows of a prompt.
  const auto count_of_runs = (int64_t)runs.size(), pieces = count_of_runs * step.kv_heads;
  const auto piece_of = [&](int64_t number) {
    return Piece{runs[number % count_of_runs], number / count_of_runs};
  };
  glm::parallel_for(pieces, [&](int64_t number) {
    const Piece piece = piece_of(number);
    for (int64_t t = piece.run.first; one_run_per_user && t < piece.run.last; ++t)
      rotate_and_cache(step, t, piece.head);
    if (glm::is_last_of_thread(number, pieces)) return attend(step, piece, nullptr);
    const Piece next = piece_of(number + 1);
    attend(step, piece, &next);
  });
  return 0;
}
