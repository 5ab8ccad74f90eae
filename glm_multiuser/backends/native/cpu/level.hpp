// What is computed with vectors. The same sources are compiled once per level, for processors with
// more or fewer instructions; which level runs is decided when the library is loaded.
#pragma once

#include <cstdint>

namespace glm {

constexpr int PANEL = 32;  // outputs of a linear layer whose weights lie together
constexpr int ROW_MULTIPLE = 16;
constexpr int TILE = 16;   // positions of a key cache that lie together
constexpr int ROWS = 256;  // query rows that one piece of attention takes in at most
constexpr int KEYS = 128;  // positions between two corrections of the streaming softmax
constexpr int SCALE_BYTES = 4;  // of a float32 scale, which a head of a position has with int8

// Bytes for queries, scores and contexts of ROWS rows, and keys and values of a block.
inline int64_t attention_scratch(int64_t head_dim) {
  constexpr int64_t WIDEST = 32;  // contexts are rounded up to a multiple of it, or of less
  const int64_t padded = head_dim + WIDEST;
  return ROWS * (padded * (4 + 2) + 3 * 4 + KEYS * 4) + KEYS * padded * (2 + 2);
}

enum class Weight {
  float32, float16, bfloat16, int8,
  q8_0, q4_0, q4_1, q4_k, q5_k, q6_k, int4_32, int4_128  // in groups: group_types.hpp
};
enum class Inputs { float32, bfloat16, int8 };  // what x is rounded to

// Of a type that is not in groups.
inline int64_t panel_bytes(Weight kind, int64_t depth) {
  switch (kind) {
    case Weight::float32: return depth * PANEL * 4;
    case Weight::float16: return depth * PANEL * 2;
    case Weight::bfloat16: return (depth + 1) / 2 * 2 * PANEL * 2;
    case Weight::int8: return (depth + 1) / 2 * 2 * PANEL + PANEL * 4;
    default: return 0;
  }
}

inline bool in_groups(Weight kind) { return panel_bytes(kind, 1) == 0; }

enum class Finish { none, gelu, add };
enum class Cache { float32, bfloat16, int8 };

// Rows as `lay_row` leaves them, for a product with such weights and inputs.
struct LaidRows {
  char* rows;  // null: there are none
  int64_t row_bytes;  // from one row to the next
  Weight kind;
  Inputs inputs;
};

// One panel of a linear layer, or several side by side, for the rows of a pass.
struct LinearPanel {
  const void* x;         // rows as `lay_row` leaves them; float32 ones also as they are
  int64_t row_bytes;     // from one row to the next
  const void* weight;    // the first panel, packed as packing.py says
  const float* bias;     // [columns]
  const float* residual; // [rows, stride], for Finish::add
  float* y;              // [rows, stride]
  LaidRows laid;         // where results go instead, if `lays_results`
  int64_t rows, depth, stride;
  int columns;           // that exist; the last panel may have fewer than PANEL
  int64_t column;        // the first one's number
  int64_t bytes;         // of a panel
  float factor;          // of the residual
  char* scratch;         // scratch_bytes(...)
  Finish finish;
  Inputs inputs;
};

// `count` panels from `first` on, of what is given as one panel with the columns of all.
inline LinearPanel some_panels(LinearPanel all, int64_t first, int64_t count) {
  const int64_t column = first * PANEL, left = all.columns - column;
  all.weight = (const char*)all.weight + first * all.bytes;
  all.bias += column;
  if (all.residual != nullptr) all.residual += column;
  all.y += column;
  all.column += column;
  all.columns = (int)(left < count * PANEL ? left : count * PANEL);
  return all;
}

// Some query rows of one user over that user's keys and values of one head.
struct Attention {
  const void* keys;      // [tiles, head_dim, TILE]; with int8, TILE scales in front of each tile
  const void* values;    // [positions, head_dim]; with int8, a scale in front of each position
  const void *next_keys, *next_values;  // of what this thread attends to next
  int64_t next_positions;               // of these; 0 where there are none
  float* const* rows;    // `count` pointers to [head_dim]: the query, scaled; then its context
  const int64_t* visible;  // how many positions each row may see
  float* scratch;        // attention_scratch(head_dim) bytes, from a cache line's begin on
  int64_t head_dim;
  int count;             // at most ROWS
};

struct Level {
  const char* name;
  // Rows as products want them: rounded if asked to, and in any case a cache line longer than they
  // need be, because rows that are a power of two apart push each other out of the cache. `lays_out`
  // says whether they must be; float32 ones may be left as they are otherwise. Memory, though not
  // rows, goes on to a multiple of ROW_MULTIPLE of them. Products on tiles may have the rows of a tile
  // in one piece, part by part.
  bool (*lays_out)(Weight, Inputs, int64_t depth);
  int64_t (*row_bytes)(Weight, Inputs, int64_t depth);
  void (*lay_row)(Weight, Inputs, const float* x, int64_t depth, int64_t row, void* rows);
  // How many times a weight is gone through, each time with other rows, so that these stay in the
  // second cache meanwhile.
  int64_t (*passes)(Weight, Inputs, int64_t depth, int64_t rows);
  // How many panels are best multiplied side by side.
  int64_t (*side_by_side)(Weight, Inputs, int64_t depth, int64_t rows);
  // What `linear` needs for so many rows and panels.
  int64_t (*scratch_bytes)(Weight, Inputs, int64_t depth, int64_t rows, int64_t panels);
  void (*linear)(Weight, const LinearPanel&);
  // Whether `linear` can write results as rows that another product takes in.
  bool (*lays_results)(Weight, Inputs, const LaidRows&);
  // One output of a panel of a weight in groups -> [depth]
  void (*widen_output)(Weight, const void* panel, int64_t depth, int column, float* row);
  // One head of one position: its key into column `lane` of a tile, its value into a row.
  void (*write_position)(Cache, const float* key, const float* value, int64_t head_dim, int lane,
                         void* tile, void* row);
  // How many query rows one piece of attention has at best.
  int (*query_rows)(Cache);
  void (*attend)(Cache, const Attention&);
  void (*layer_norm)(const float* x, const float* gamma, const float* beta, float epsilon,
                     int64_t size, float* y);
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t size, float* y);
  void (*swiglu)(const float* gate, const float* up, int64_t size, float* y);
  // Rotary embedding of the numbers `first` to `first` + `count` of a head x:
  // y[i] = (x[first + i] * cosine[i] + x[partner[first + i]] * sine[i]) * factor
  void (*turn)(const float* x, const int32_t* partner, const float* cosine, const float* sine,
               int64_t first, int64_t count, float factor, float* y);
  // -> the first of the largest numbers
  int64_t (*argmax)(const float* x, int64_t size);
  bool (*all_finite)(const float* x, int64_t size);
  // `count` rows of `depth` weights of type `from` into one panel of type `to`. Returns whether all
  // numbers are finite, in both types.
  bool (*pack_panel)(Weight from, Weight to, const char* rows, int count, int64_t depth,
                     char* panel);
};

const Level& level();              // the best that this processor has, or what was forced
bool force_level(const char* name);  // "" for the best; false: unknown here

}  // namespace glm
