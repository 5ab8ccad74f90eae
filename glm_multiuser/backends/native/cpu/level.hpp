// The vectorised functions. Their sources are compiled once per level, for different instruction sets; the
// level to use is chosen when the library is loaded.
#pragma once

#include <cstdint>

namespace glm {

constexpr int PANEL = 32;  // outputs of a linear layer whose weights are interleaved
constexpr int ROW_MULTIPLE = 16;
constexpr int TILE = 16;   // positions of a key cache that are interleaved
constexpr int ROWS = 256;  // maximum of query rows per call of `attend`
constexpr int KEYS = 128;  // positions per block of the streaming softmax
constexpr int SEGMENT = 2048;  // positions of one streaming softmax: segments.hpp
constexpr int SCALE_BYTES = 4;  // the float32 scale of one head of one position in an int8 cache

// Bytes for queries, scores, contexts and merged contexts of ROWS rows, and keys and values of a block.
inline int64_t attention_scratch(int64_t head_dim) {
  constexpr int64_t WIDEST = 32;  // upper bound of what contexts are padded to a multiple of
  const int64_t padded = head_dim + WIDEST;
  return ROWS * (padded * (4 + 4 + 2) + 3 * 4 + KEYS * 4) + KEYS * padded * (2 + 2);
}

enum class Weight {
  float32, float16, bfloat16, int8,
  q8_0, q4_0, q4_1, q4_k, q5_k, q6_k, int4_32, int4_128  // in groups: group_types.hpp
};
enum class Inputs { float32, bfloat16, int8 };  // what x is rounded to

// For types that are not group-quantised.
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

enum class Epilogue { none, gelu, add };
enum class Cache { float32, bfloat16, int8 };

// Rows packed by `pack_input_row` for a product with these weight and input types.
struct PackedInputs {
  char* rows;  // may be null
  int64_t row_bytes;  // stride
  Weight kind;
  Inputs inputs;
};

// One or more adjacent panels of a linear layer, for the rows of a pass.
struct LinearPanel {
  const void* x;         // packed by `pack_input_row`, or float32 where packing is not needed
  int64_t row_bytes;     // stride
  const void* weight;    // the first panel, in the layout of packing.py
  const float* bias;     // [columns]
  const float* residual; // [rows, stride], for Epilogue::add
  float* y;              // [rows, stride]
  PackedInputs packed;   // where results go instead of `y`, if `packs_results`
  int64_t rows, depth, stride;
  int columns;           // without padding; the last panel may have fewer than PANEL
  int64_t column;        // index of the first
  int64_t bytes;         // per panel
  float factor;          // by which the residual is multiplied
  char* scratch;         // scratch_bytes(...)
  Epilogue epilogue;
  Inputs inputs;
};

// `count` panels starting at `first`; `all` describes all panels as one.
inline LinearPanel slice_panels(LinearPanel all, int64_t first, int64_t count) {
  const int64_t column = first * PANEL, left = all.columns - column;
  all.weight = (const char*)all.weight + first * all.bytes;
  all.bias += column;
  if (all.residual != nullptr) all.residual += column;
  all.y += column;
  all.column += column;
  all.columns = (int)(left < count * PANEL ? left : count * PANEL);
  return all;
}

// `count` rows starting at `first`.
inline LinearPanel slice_rows(LinearPanel all, int64_t first, int64_t count) {
  all.rows = count;
  all.x = (const char*)all.x + first * all.row_bytes;
  if (all.residual != nullptr) all.residual += first * all.stride;
  if (all.packed.rows != nullptr) {
    all.packed.rows += first * all.packed.row_bytes;
  } else {
    all.y += first * all.stride;
  }
  return all;
}

// Weights of a softmax are exp(score - largest), and `total` is their sum.
struct SoftmaxSum {
  float largest, total;
};

// Query rows of one user, over that user's keys and values of one head.
struct Attention {
  const void* keys;      // [tiles, head_dim, TILE]; with int8, each tile is preceded by TILE scales
  const void* values;    // [positions, head_dim]; with int8, each position is preceded by a scale
  const void *next_keys, *next_values;  // what this thread processes next, to be prefetched
  int64_t next_positions;               // its positions; 0 if there is none
  const float* const* queries;  // `count` pointers to [head_dim], scaled
  float* const* contexts;       // `count` pointers to [head_dim], results
  SoftmaxSum* sums;  // [count], results: keys and values are those of a single segment, and contexts
                     // are not divided by their totals. Null if they are all that the rows see.
  const int64_t* visible;  // number of positions that each row sees, at least 1
  float* scratch;        // attention_scratch(head_dim) bytes, aligned to a cache line
  int64_t head_dim;
  int count;             // at most ROWS
};

struct Level {
  const char* name;
  // Packing of inputs: rounds them if requested, and pads each row by a cache line, because rows a power of
  // two apart would evict each other. Optional for float32 unless `needs_packing`. The memory of packed rows
  // is padded to a multiple of ROW_MULTIPLE rows. Levels with tiles may interleave the rows of a tile.
  bool (*needs_packing)(Weight, Inputs, int64_t depth);
  int64_t (*row_bytes)(Weight, Inputs, int64_t depth);
  void (*pack_input_row)(Weight, Inputs, const float* x, int64_t depth, int64_t row, void* rows);
  // Number of passes over a weight; each uses as many rows as fit into L2.
  int64_t (*passes)(Weight, Inputs, int64_t depth, int64_t rows);
  // Best number of panels per call of `linear`.
  int64_t (*panels_per_call)(Weight, Inputs, int64_t depth, int64_t rows);
  // Best number of rows per call of `linear`; `weight_bytes` is the size of all panels.
  int64_t (*rows_per_call)(Weight, Inputs, int64_t rows, int64_t weight_bytes);
  // Scratch memory that `linear` needs.
  int64_t (*scratch_bytes)(Weight, Inputs, int64_t depth, int64_t rows, int64_t panels);
  void (*linear)(Weight, const LinearPanel&);
  // Whether `linear` can write its results as packed inputs of another product.
  bool (*packs_results)(Weight, Inputs, const PackedInputs&);
  // Dequantises one output of a panel of a group-quantised weight -> [depth]
  void (*widen_output)(Weight, const void* panel, int64_t depth, int column, float* row);
  // Writes one head of one position: its key into column `lane` of a tile, its value into a row.
  void (*write_position)(Cache, const float* key, const float* value, int64_t head_dim, int lane,
                         void* tile, void* row);
  // Best number of query rows per call of `attend`, at most ROWS.
  int (*query_rows)(Cache);
  void (*attend)(Cache, const Attention&);
  // Merges a row's contexts of `count` segments [count, head_dim], which are overwritten -> [head_dim]
  void (*merge_segments)(float* contexts, const SoftmaxSum* sums, int64_t count, int64_t head_dim,
                         float* to);
  void (*layer_norm)(const float* x, const float* gamma, const float* beta, float epsilon,
                     int64_t size, float* y);
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t size, float* y);
  void (*swiglu)(const float* gate, const float* up, int64_t size, float* y);
  // Rotary embedding of elements `first` to `first` + `count` - 1 of a head x:
  // y[i] = (x[first + i] * cosine[i] + x[partner[first + i]] * sine[i]) * factor
  void (*rotate)(const float* x, const int32_t* partner, const float* cosine, const float* sine,
                 int64_t first, int64_t count, float factor, float* y);
  // Index of the largest element, the first of several.
  int64_t (*argmax)(const float* x, int64_t size);
  bool (*all_finite)(const float* x, int64_t size);
  // Packs `count` rows of `depth` weights of type `from` into one panel of type `to`. Returns whether all
  // weights are finite, before and after conversion.
  bool (*pack_panel)(Weight from, Weight to, const char* rows, int count, int64_t depth,
                     char* panel);
};

// Whether this is AMD's Zen 5 or a later processor. It has the level of Zen 4, but blocks.hpp prefetches
// differently.
extern const bool is_zen5;

const Level& level();                // the best that this processor supports, unless forced
bool force_level(const char* name);  // "" for the best; returns false if not available here

}  // namespace glm
