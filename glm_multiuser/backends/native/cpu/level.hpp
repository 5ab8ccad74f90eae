// What is computed with vectors. The same sources are compiled once per level, for processors with
// more or fewer instructions; which level runs is decided when the library is loaded.
#pragma once

#include <cstdint>

namespace glm {

constexpr int PANEL = 32;  // outputs of a linear layer whose weights lie together
constexpr int TILE = 16;   // positions of a key cache that lie together
constexpr int ROWS = 64;   // query rows that one piece of attention takes in at most
constexpr int KEYS = 128;  // positions between two corrections of the streaming softmax

inline int64_t attention_scratch(int64_t head_dim) {
  constexpr int64_t WIDEST = 16;  // vector of any level; contexts are rounded up to whole ones
  return ROWS * (head_dim + WIDEST + 2) + 4 * KEYS;
}

enum class Weight { float32, float16, bfloat16, int8 };
enum class Finish { none, gelu, add };

// One panel of a linear layer, for all rows.
struct LinearPanel {
  const void* x;         // rows as `lay_row` leaves them; float32 ones also as they are
  int64_t row_bytes;     // from one row to the next
  const void* weight;    // one panel, packed as packing.py says
  const float* bias;     // [columns]
  const float* residual; // [rows, stride], for Finish::add
  float* y;              // [rows, stride]
  int64_t rows, depth, stride;
  int columns;           // that exist; the last panel may have fewer than PANEL
  float factor;          // of the residual
  Finish finish;
  bool rounded;          // x is rounded to bf16
};

// Some query rows of one user over that user's keys and values of one head.
struct Attention {
  const float* keys;     // [tiles, head_dim, TILE]
  const float* values;   // [positions, head_dim]
  float* const* rows;    // `count` pointers to [head_dim]: the query, scaled; then its context
  const int64_t* visible;  // how many positions each row may see
  float* scratch;        // attention_scratch(head_dim) numbers
  int64_t head_dim;
  int count;             // at most ROWS
};

struct Level {
  const char* name;
  // Rows as products want them: rounded to bf16 if asked to, and in any case a cache line longer
  // than they need be, because rows that are a power of two apart push each other out of the cache.
  int64_t (*row_bytes)(Weight, bool rounded, int64_t depth);
  void (*lay_row)(Weight, bool rounded, const float* x, int64_t depth, void* row);
  void (*linear)(Weight, const LinearPanel&);
  void (*attend)(const Attention&);
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
};

const Level& level();              // the best that this processor has, or what was forced
bool force_level(const char* name);  // "" for the best; false: unknown here

}  // namespace glm
