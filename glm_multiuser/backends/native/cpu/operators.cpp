// What each operator computes. It cuts its work into pieces and shares them between threads.
//
// The graph has a fixed row count; `used`, int32 [1], is how many rows are valid. What lies behind
// them is neither read nor written.
#include <algorithm>
#include <cstring>
#include <vector>

#include "half.hpp"
#include "level.hpp"
#include "operators.hpp"
#include "packed.hpp"
#include "pool.hpp"

using glm::Inputs;
using glm::PANEL;
using glm::ROW_MULTIPLE;

#define REFUSE_UNLESS(condition) \
  if (!(condition)) return __LINE__

namespace {

// Less is not worth waking a thread for.
constexpr int64_t NUMBERS_PER_PIECE = 8192;

// So few rows that stay as they are, are multiplied with two panels of a weight in groups at a time.
constexpr int64_t ROWS_FOR_TWO_PANELS = 2;

// Fewer rows that stay as they are, are read where they are.
constexpr int64_t ROWS_TO_LAY_OUT = 5;

// Sums of so many products of int8 fit into int32.
constexpr int64_t MOST_INT8_INPUTS = 1 << 17;

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

// Bytes of one head of one position: its numbers, and with int8 its scale.
int64_t head_bytes(glm::Cache kind, int64_t head_dim) {
  switch (kind) {
    case glm::Cache::float32: return head_dim * 4;
    case glm::Cache::bfloat16: return head_dim * 2;
    case glm::Cache::int8: return head_dim + glm::SCALE_BYTES;
  }
  return 0;
}

int64_t rows_in_use(void** data, int64_t** shapes, int used) {
  return std::max<int64_t>(0, std::min<int64_t>(shapes[0][0], *(const int32_t*)data[used]));
}

// work(0) to work(count - 1), so many together in a piece.
template <class Work>
void share_together(int64_t count, int64_t together, Work work) {
  glm::share((count + together - 1) / together, [&](int64_t piece) {
    const int64_t last = std::min(count, (piece + 1) * together);
    for (int64_t number = piece * together; number < last; ++number) work(number);
  });
}

// So many bytes from a cache line's begin on.
char* aligned(std::vector<char>& memory, int64_t bytes) {
  constexpr uintptr_t LINE = 64;
  memory.resize(bytes + LINE - 1);
  return memory.data() + (-(uintptr_t)memory.data() & (LINE - 1));
}

template <class Work>
void share_rows(int64_t rows, int64_t size, Work work) {
  share_together(rows, std::max<int64_t>(1, NUMBERS_PER_PIECE / std::max<int64_t>(1, size)), work);
}

void add_row(const float* x, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i) y[i] += x[i];
}

// x [rows, depth] as products want it.
const void* lay_out(glm::Weight kind, Inputs inputs, const float* x, int64_t rows, int64_t depth) {
  static thread_local std::vector<char> laid_out;
  const glm::Level& level = glm::level();
  const int64_t filled_up = (rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
  char* to = aligned(laid_out, filled_up * level.row_bytes(kind, inputs, depth));
  share_rows(rows, depth, [&](int64_t row) {
    level.lay_row(kind, inputs, x + row * depth, depth, row, to);
  });
  return to;
}

// Rows times all panels, so many side by side; `all` is as of one panel with all columns.
void multiply(glm::Weight kind, const glm::LinearPanel& all, int64_t side_by_side) {
  const glm::Level& level = glm::level();
  const int64_t scratch_bytes = level.scratch_bytes(kind, all.inputs, all.depth);
  const int64_t width = side_by_side * PANEL;
  glm::share((all.columns + width - 1) / width, [&](int64_t number) {
    static thread_local std::vector<char> scratch;
    const int64_t first = number * width;
    glm::LinearPanel panel = all;
    panel.weight = (const char*)all.weight + number * side_by_side * all.bytes;
    panel.bias += first;
    if (panel.residual != nullptr) panel.residual += first;
    panel.y += first;
    panel.columns = (int)std::min(width, all.columns - first);
    panel.scratch = scratch_bytes > 0 ? aligned(scratch, scratch_bytes) : nullptr;
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
  } else if (inputs == Inputs::int8 && !packed.in_groups) {
    inputs = Inputs::float32;
  }
  const bool adds = finish == glm::Finish::add;
  const glm::Level& level = glm::level();
  const bool lays_out = rows >= ROWS_TO_LAY_OUT || level.lays_out(kind, inputs, depth);
  const bool in_pairs = packed.in_groups && inputs != Inputs::int8 && rows <= ROWS_FOR_TWO_PANELS;
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
    multiply(kind, all, in_pairs ? 2 : 1);
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

// And rounded to int8, for int8 weights.
LINEAR(linear_int8, glm::Finish::none, int8)
LINEAR(linear_gelu_int8, glm::Finish::gelu, int8)
LINEAR(linear_add_int8, glm::Finish::add, int8)

// ids int32 [rows], used, weight as for `linear`, settings int32 [2]: vocabulary, width
// -> [rows, width]
OPERATOR(embedding) {
  const auto* ids = (const int32_t*)data[0];
  const auto* settings = (const int32_t*)data[3];
  auto* y = (float*)data[4];
  const int64_t rows = rows_in_use(data, shapes, 1);
  const int64_t width = settings[1];
  Packed packed;
  REFUSE_UNLESS(is_packed(dtypes[2], ranks[2], shapes[2], width, packed));
  const glm::Weight kind = packed.kind;
  const int64_t bytes = packed.panel_bytes;
  for (int64_t row = 0; row < rows; ++row) REFUSE_UNLESS(ids[row] >= 0 && ids[row] < settings[0]);
  share_rows(rows, width, [&](int64_t row) {
    const char* panel = (const char*)data[2] + ids[row] / PANEL * bytes;
    const int column = ids[row] % PANEL;
    float* to = y + row * width;
    if (packed.in_groups) {
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

// x [rows, size], numbers int32 [taken], used -> those rows of x [taken, size]
OPERATOR(take_rows) {
  const int64_t size = shapes[0][1];
  const auto* numbers = (const int32_t*)data[1];
  const int64_t taken = std::max<int64_t>(0, std::min<int64_t>(shapes[1][0], *(int32_t*)data[2]));
  for (int64_t row = 0; row < taken; ++row) {
    REFUSE_UNLESS(numbers[row] >= 0 && numbers[row] < shapes[0][0]);
    std::memcpy((float*)data[3] + row * size, (const float*)data[0] + numbers[row] * size,
                sizeof(float) * size);
  }
  return 0;
}

// x [rows, size], used, gamma [size], beta [size], epsilon [1], perhaps residual [rows, size]
// -> [rows, size], with the residual added if there is one
OPERATOR(layer_norm) {
  const int64_t size = shapes[0][1];
  const float* residual = count == 7 ? (const float*)data[5] : nullptr;
  share_rows(rows_in_use(data, shapes, 1), size, [&](int64_t row) {
    float* y = (float*)data[count - 1] + row * size;
    glm::level().layer_norm((const float*)data[0] + row * size, (const float*)data[2],
                            (const float*)data[3], *(const float*)data[4], size, y);
    if (residual != nullptr) add_row(residual + row * size, size, y);
  });
  return 0;
}

// The same at the beginning of a layer, where prompts may enter and leave the step: a prompt that has
// to enter whole, and is long, goes through some layers in each step.
//
// x [rows, size]
// plan int32 [4]: rows; of them, the first that are in every layer; the others are in the layers
//     from plan[2] up to, not including, plan[3]
// layer int32 [1]
// saved [*, size]: where the others wait between two steps
// gamma [size], beta [size], epsilon [1]
// -> [rows, size]; used int32 [1], the rows that are in this layer
OPERATOR(layer_norm_of_layer) {
  const int64_t size = shapes[0][1];
  const auto* plan = (const int32_t*)data[1];
  const int64_t rows = rows_in_use(data, shapes, 1), always = plan[1];
  const int32_t layer = *(const int32_t*)data[2], first = plan[2], last = plan[3];
  auto* saved = (float*)data[3];
  REFUSE_UNLESS(always >= 0 && always <= rows && rows - always <= shapes[3][0]);
  const bool inside = first <= layer && layer < last;
  share_rows(inside || layer == last ? rows : always, size, [&](int64_t row) {
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

// x [rows, size], used, weight [size], epsilon [1], perhaps residual [rows, size]
// -> [rows, size], with the residual added if there is one
OPERATOR(rms_norm) {
  const int64_t size = shapes[0][1];
  const float* residual = count == 6 ? (const float*)data[4] : nullptr;
  share_rows(rows_in_use(data, shapes, 1), size, [&](int64_t row) {
    float* y = (float*)data[count - 1] + row * size;
    glm::level().rms_norm((const float*)data[0] + row * size, (const float*)data[2],
                          *(const float*)data[3], size, y);
    if (residual != nullptr) add_row(residual + row * size, size, y);
  });
  return 0;
}

// x [rows, (heads + kv_heads) * head_dim + what stays as it is], used, query weight [head_dim],
// key weight [head_dim], epsilon [1], heads int32 [2]: heads of queries, heads of keys
// -> x with every head of queries and of keys normed by itself
OPERATOR(query_key_norm) {
  const int64_t columns = shapes[0][1], head_dim = shapes[2][0];
  const auto* heads = (const int32_t*)data[5];
  const int64_t queries = heads[0], normed = queries + heads[1];
  REFUSE_UNLESS(heads[0] > 0 && heads[1] > 0 && normed * head_dim <= columns);
  share_rows(rows_in_use(data, shapes, 1), columns, [&](int64_t row) {
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
OPERATOR(swiglu) {
  const int64_t size = shapes[0][1] / 2;
  share_rows(rows_in_use(data, shapes, 1), size, [&](int64_t row) {
    const float* gate = (const float*)data[0] + row * 2 * size;
    glm::level().swiglu(gate, gate + size, size, (float*)data[2] + row * size);
  });
  return 0;
}

// hidden [rows, width], logits [rows, vocabulary], used
// -> the first of the best tokens, int32 [rows]; 0 where the row of hidden and the best logit are
//    finite and NaN where not, [rows]
OPERATOR(next_token) {
  const int64_t width = shapes[0][1], vocabulary = shapes[1][1];
  share_rows(rows_in_use(data, shapes, 2), vocabulary, [&](int64_t row) {
    const float* logits = (const float*)data[1] + row * vocabulary;
    const int64_t best = glm::level().argmax(logits, vocabulary);
    const bool finite = glm::level().all_finite((const float*)data[0] + row * width, width) &&
                        logits[best] * 0.0f == 0.0f;
    ((int32_t*)data[3])[row] = (int32_t)best;
    ((float*)data[4])[row] = finite ? 0.0f : __builtin_nanf("");
  });
  return 0;
}

// Rotary embedding, the new rows into their users' caches, and attention over the rows in use.
//
// queries, keys and values of all heads [tokens, (heads + 2 kv_heads) * head_dim]
// used
// users int32 [tokens]: whose caches
// positions int32 [2, tokens]: where the token's key and value go, and how many positions it sees
// angles int32 [parts, tokens]: the row of the tables, for each part of a head
// cosine, sine [table rows, head_dim / parts], partner int32 [head_dim]:
//     x[i] becomes x[i] * cosine[i] + x[partner[i]] * sine[i]
// settings int32 [3]: heads, key/value heads, head_dim
// scale [1]: of queries
// then for each cell keys [users, heads, tiles, head_dim, TILE] and values [users, heads,
//     positions, head_dim]; all but the last have as many users as the first. float32, bf16 (its
//     bits, as int16) or int8; then head_dim is SCALE_BYTES more, because float32 scales lie in
//     front of each tile and of each position's values
// -> context [tokens, heads * head_dim]
OPERATOR(attention) {
  constexpr int USED = 1, FIRST_CACHE = 10;
  const auto* users = (const int32_t*)data[2];
  const auto *writes = (const int32_t*)data[3], *sees = writes + shapes[3][1];
  const auto* angles = (const int32_t*)data[4];
  const auto *cosine = (const float*)data[5], *sine = (const float*)data[6];
  const auto* partner = (const int32_t*)data[7];
  const auto* settings = (const int32_t*)data[8];
  const float scale = *(const float*)data[9];
  const int64_t tokens = rows_in_use(data, shapes, USED);
  const int64_t cells = (count - FIRST_CACHE - 1) / 2;
  const int64_t heads = settings[0], kv_heads = settings[1], head_dim = settings[2];
  const int64_t group = heads / kv_heads, width = heads * head_dim, kv_width = kv_heads * head_dim;
  const int64_t parts = shapes[4][0], angles_stride = shapes[4][1], part = shapes[5][1];
  auto* out = (float*)data[count - 1];
  REFUSE_UNLESS(cells > 0 && (count - FIRST_CACHE - 1) % 2 == 0 && part * parts == head_dim);
  REFUSE_UNLESS(shapes[0][1] == width + 2 * kv_width);
  glm::Cache kind;
  REFUSE_UNLESS(kind_of(dtypes[FIRST_CACHE], kind));
  const int64_t bytes = head_bytes(kind, head_dim);
  const int64_t numbers = kind == glm::Cache::int8 ? bytes : head_dim;  // with their scale
  for (int cell = FIRST_CACHE; cell < count - 1; cell += 2) {
    REFUSE_UNLESS(ranks[cell] == 5 && ranks[cell + 1] == 4);
    REFUSE_UNLESS(shapes[cell][3] == numbers && shapes[cell + 1][3] == numbers);
    REFUSE_UNLESS(std::strcmp(dtypes[cell], dtypes[FIRST_CACHE]) == 0);
    REFUSE_UNLESS(std::strcmp(dtypes[cell + 1], dtypes[FIRST_CACHE]) == 0);
  }
  const int64_t per_cell = shapes[FIRST_CACHE][0];
  REFUSE_UNLESS(per_cell > 0);
  const auto cell_of = [&](int32_t user) { return FIRST_CACHE + 2 * (user / per_cell); };
  const auto capacity = [&](int32_t user) { return shapes[cell_of(user) + 1][2]; };
  const int64_t users_here = (cells - 1) * per_cell + shapes[FIRST_CACHE + 2 * (cells - 1)][0];
  for (int64_t t = 0; t < tokens; ++t) {
    REFUSE_UNLESS(users[t] >= 0 && users[t] < users_here);
    REFUSE_UNLESS(writes[t] >= 0 && writes[t] < capacity(users[t]));
    REFUSE_UNLESS(sees[t] > 0 && sees[t] <= capacity(users[t]));
    for (int64_t p = 0; p < parts; ++p) {
      const int32_t row = angles[p * angles_stride + t];
      REFUSE_UNLESS(row >= 0 && row < shapes[5][0]);
    }
  }
  const auto keys_of = [&](int32_t user, int64_t head) {
    const int64_t cell = cell_of(user), tiles = shapes[cell][2];
    const int64_t row = user % per_cell * kv_heads + head;
    return (char*)data[cell] + row * tiles * bytes * glm::TILE;
  };
  const auto values_of = [&](int32_t user, int64_t head) {
    const int64_t row = user % per_cell * kv_heads + head;
    return (char*)data[cell_of(user) + 1] + row * capacity(user) * bytes;
  };

  // What belongs to one head of keys: its queries are rotated, its key and value written.
  const auto enter = [&](int64_t t, int64_t head) {
    const auto turn = [&](const float* x, float* y, float factor) {
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t row = angles[p * angles_stride + t] * part;
        glm::level().turn(x, partner, cosine + row, sine + row, p * part, part, factor,
                          y + p * part);
      }
    };
    const float* query = (const float*)data[0] + t * (width + 2 * kv_width);
    for (int64_t i = head * group * head_dim; i < (head + 1) * group * head_dim; i += head_dim)
      turn(query + i, out + t * width + i, scale);
    static thread_local std::vector<float> key;
    key.resize(head_dim);
    turn(query + width + head * head_dim, key.data(), 1.0f);
    const float* value = query + width + kv_width + head * head_dim;
    const int lane = writes[t] % glm::TILE;
    char* tile = keys_of(users[t], head) + (writes[t] - lane) * bytes;
    char* row = values_of(users[t], head) + writes[t] * bytes;
    glm::level().write_position(kind, key.data(), value, head_dim, lane, tile, row);
  };

  // A piece: as many tokens of one user, one behind the other, as ROWS query rows have room for.
  struct Run {
    int64_t first, last;
  };
  std::vector<Run> runs;
  const int64_t most = std::max<int64_t>(1, glm::ROWS / group);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool goes_on = !runs.empty() && runs.back().last == t && users[t - 1] == users[t] &&
                         t - runs.back().first < most;
    if (goes_on) {
      runs.back().last = t + 1;
    } else {
      runs.push_back({t, t + 1});
    }
  }
  // Nobody looks at keys and values before they are in place. A piece sees to its own where no other
  // one needs them.
  std::vector<int32_t> owners;
  for (const Run& run : runs) owners.push_back(users[run.first]);
  std::sort(owners.begin(), owners.end());
  const bool alone = std::adjacent_find(owners.begin(), owners.end()) == owners.end();
  if (!alone)
    share_rows(tokens, 2 * width, [&](int64_t t) {
      for (int64_t head = 0; head < kv_heads; ++head) enter(t, head);
    });
  // One head after the other, whose keys and values stay in the second cache for all rows of a prompt.
  const auto count_of_runs = (int64_t)runs.size(), pieces = count_of_runs * kv_heads;
  glm::share(pieces, [&](int64_t piece) {
    const Run run = runs[piece % count_of_runs];
    const int64_t head = piece / count_of_runs;
    for (int64_t t = run.first; alone && t < run.last; ++t) enter(t, head);
    static thread_local std::vector<char> memory;
    auto* scratch = (float*)aligned(memory, glm::attention_scratch(head_dim));
    float* rows[glm::ROWS];
    int64_t visible[glm::ROWS];
    const int32_t user = users[run.first];
    glm::Attention task{keys_of(user, head), values_of(user, head), nullptr, nullptr, 0, rows,
                        visible, scratch, head_dim, 0};
    if (!glm::is_last_of_thread(piece, pieces)) {
      const Run& next = runs[(piece + 1) % count_of_runs];
      const int64_t next_head = (piece + 1) / count_of_runs;
      task.next_keys = keys_of(users[next.first], next_head);
      task.next_values = values_of(users[next.first], next_head);
      task.next_positions = sees[next.last - 1];
    }
    for (int64_t t = run.first; t < run.last; ++t) {
      for (int64_t query = 0; query < group; ++query) {
        if (task.count == glm::ROWS) {
          glm::level().attend(kind, task);
          task.count = 0;
        }
        rows[task.count] = out + t * width + (head * group + query) * head_dim;
        visible[task.count++] = sees[t];
      }
    }
    glm::level().attend(kind, task);
  });
  return 0;
}

// For Python, which decides how the library is used.
extern "C" {
const char* glm_level() { return glm::level().name; }
int glm_force_level(const char* name) { return glm::force_level(name); }
void glm_set_threads(int count) { glm::set_threads(count); }
int glm_threads() { return glm::threads(); }
void glm_set_patience(int microseconds) { glm::set_patience(microseconds); }
}
