// Attention: applies the rotary embedding, writes new keys and values to their users' caches, and lets each
// token attend to its user's cache.
#include "attention_parts.hpp"
#include "attention_step.hpp"
#include "memory.hpp"
#include "operators.hpp"

namespace {

// Rotary embedding of one head of a token.
void rotate(const Step& step, int64_t t, const float* x, float factor, float* y) {
  for (int64_t p = 0; p < step.parts; ++p) {
    const int64_t row = step.angles[p * step.angles_stride + t] * step.part;
    glm::level().rotate(x, step.partner, step.cosine + row, step.sine + row, p * step.part, step.part,
                        factor, y + p * step.part);
  }
}

// Writes one head of a token's keys, rotated, and of its values to the cache.
void write_to_cache(const Step& step, int64_t t, int64_t head) {
  const int64_t head_dim = step.head_dim;
  const float* keys = step.x + t * (step.width + 2 * step.kv_width) + step.width;
  static thread_local std::vector<float> key;
  key.resize(head_dim);
  rotate(step, t, keys + head * head_dim, 1.0f, key.data());
  const float* value = keys + step.kv_width + head * head_dim;
  const Caches& caches = step.caches;
  const int32_t user = step.users[t], position = step.writes[t];
  const int lane = position % glm::TILE;
  glm::level().write_position(caches.kind, key.data(), value, head_dim, lane,
                              caches.keys(user, head) + (position - lane) * caches.head_bytes,
                              caches.values(user, head) + position * caches.head_bytes);
}

// One key head of a part.
struct Piece {
  Part part;
  int64_t head;
};

const char* keys_of(const Step& step, const Piece& piece) {
  const Caches& caches = step.caches;
  const int32_t user = step.users[piece.part.run.first];
  return caches.keys(user, piece.head) + piece.part.begin * caches.head_bytes;
}
const char* values_of(const Step& step, const Piece& piece) {
  const Caches& caches = step.caches;
  const int32_t user = step.users[piece.part.run.first];
  return caches.values(user, piece.head) + piece.part.begin * caches.head_bytes;
}

// Query rows of a piece, as many as `attend` takes.
struct Rows {
  int64_t token[glm::ROWS], head[glm::ROWS], visible[glm::ROWS];
  const float* queries[glm::ROWS];
  float* contexts[glm::ROWS];
  glm::SoftmaxSum sums[glm::ROWS];
};

// `task` has all of the piece except its rows, of which `rows` has the first `task.count`.
void attend_rows(const Step& step, const Part& part, Rows& rows, Divided& divided, glm::Attention& task) {
  if (task.count == 0) return;
  glm::level().attend(step.caches.kind, task);
  for (int row = 0; task.sums != nullptr && row < task.count; ++row)
    *divided.sum(part, rows.token[row], rows.head[row]) = rows.sums[row];
  task.count = 0;
}

// `next` is the piece that this thread processes next; may be null.
void attend(const Step& step, const Piece& piece, const Piece* next, Divided& divided) {
  static thread_local glm::Memory memory, rotated;
  const Part& part = piece.part;
  const int64_t head_dim = step.head_dim;
  auto* queries = (float*)rotated.of(glm::ROWS * head_dim * (int64_t)sizeof(float));
  Rows rows;
  glm::Attention task{};
  task.keys = keys_of(step, piece);
  task.values = values_of(step, piece);
  task.queries = rows.queries;
  task.contexts = rows.contexts;
  task.visible = rows.visible;
  task.scratch = (float*)memory.of(glm::attention_scratch(head_dim));
  task.head_dim = head_dim;
  if (next != nullptr) {
    task.next_keys = keys_of(step, *next);
    task.next_values = values_of(step, *next);
    task.next_positions = next->part.end - next->part.begin;
  }
  for (int64_t t = part.run.first; t < part.run.last; ++t) {
    const int64_t visible = std::min<int64_t>(step.visible[t], part.end) - part.begin;
    glm::SoftmaxSum* sums = part.divides(step, t) ? rows.sums : nullptr;
    if (sums != task.sums) attend_rows(step, part, rows, divided, task);
    task.sums = sums;
    for (int64_t query = 0; visible > 0 && query < step.group; ++query) {
      if (task.count == glm::ROWS) attend_rows(step, part, rows, divided, task);
      const int64_t head = piece.head * step.group + query;
      float* rotated_query = queries + task.count * head_dim;
      rotate(step, t, step.query(t, head), step.scale, rotated_query);
      rows.token[task.count] = t, rows.head[task.count] = head, rows.visible[task.count] = visible;
      rows.queries[task.count] = rotated_query;
      rows.contexts[task.count++] =
          sums != nullptr ? divided.context(part, t, head) : step.context(t, head);
    }
  }
  attend_rows(step, part, rows, divided, task);
  if (part.is_divided()) divided.complete(step, part, piece.head);
}

// Writes the keys and values that this part reads and no other, and with the last part those that none reads.
void write_own_to_cache(const Step& step, const Piece& piece) {
  const Part& part = piece.part;
  for (int64_t t = part.run.first; t < part.run.last; ++t) {
    const bool is_in_part = part.begin <= step.writes[t] && step.writes[t] < part.end;
    const bool is_unseen = part.is_last() && step.writes[t] >= part.end;
    if (is_in_part || is_unseen) write_to_cache(step, t, piece.head);
  }
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
  Divided divided;
  const std::vector<Part> parts = parts_of(step, runs, divided);
  // Keys and values must be written before they are read. If no other piece reads them, a piece writes its
  // own; otherwise all are written first.
  const bool one_run_per_user = is_one_run_per_user(step, runs);
  if (!one_run_per_user)
    parallel_for_rows(step.tokens, 2 * step.width, [&](int64_t t) {
      for (int64_t head = 0; head < step.kv_heads; ++head) write_to_cache(step, t, head);
    });
  // Head by head, so that keys and values stay in L2 for all rows of a prompt.
  const auto count_of_parts = (int64_t)parts.size(), pieces = count_of_parts * step.kv_heads;
  const auto piece_of = [&](int64_t number) {
    return Piece{parts[number % count_of_parts], number / count_of_parts};
  };
  glm::parallel_for(pieces, [&](int64_t number) {
    const Piece piece = piece_of(number);
    if (one_run_per_user) write_own_to_cache(step, piece);
    if (glm::is_last_of_thread(number, pieces)) return attend(step, piece, nullptr, divided);
    const Piece next = piece_of(number + 1);
    attend(step, piece, &next, divided);
  });
  return 0;
}
