// Intel AMX: eight tiles of 16 rows of 64 bytes. Instructions are macros, because compilers require tile
// numbers to be literals. Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights; each instruction multiplies
// groups of four bytes of a row by four bytes of a weight. Tiles 4 to 7 are smaller if rows have fewer than
// 64 bytes.
//
// The emulation follows the Software Developer's Manual (volume 2, TDPBF16PS and TDPBSSD).
#pragma once

#include "half.hpp"
#include "instructions.hpp"
#include "vector.hpp"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_ROW_BYTES = 64;
constexpr int64_t TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;
constexpr int64_t PAIR_BYTES = 2 * TILE_ROW_BYTES;  // a row of two adjacent tiles
constexpr int STEP = TILE_ROW_BYTES / 2;            // bfloat16 elements in a row of a tile
constexpr int BLOCK = 2 * TILE_ROWS;                // rows that share loaded tiles of weights

inline int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

inline int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// Rounds WIDTH values. May flush subnormal ones to zero, as tile instructions do anyway.
inline void round_to_bf16(vec values, uint16_t* to) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &rounded, sizeof rounded);
}

#if defined(GLM_EMULATE_AMX)

union Tile {
  uint8_t bytes[TILE_ROWS][TILE_ROW_BYTES];
  int8_t whole[TILE_ROWS][TILE_ROW_BYTES];
  uint16_t bf16[TILE_ROWS][TILE_ROW_BYTES / 2];
  int32_t sums[TILE_ROWS][TILE_ROW_BYTES / 4];
  float floats[TILE_ROWS][TILE_ROW_BYTES / 4];
};
thread_local Tile emulated_tiles[8];

thread_local int emulated_bytes;

template <int BYTES = TILE_ROW_BYTES>
struct UseTiles {
  explicit UseTiles(int = TILE_ROWS) {
    std::memset(emulated_tiles, 0, sizeof emulated_tiles);
    emulated_bytes = BYTES;
  }
};

inline void emulate_zero(int tile) {
  std::memset(&emulated_tiles[tile], 0, sizeof(Tile));
}

inline void emulate_load(int tile, const void* from, int64_t stride) {
  const int rows = tile < 6 ? TILE_ROWS : emulated_bytes / 4;
  const int64_t bytes = tile < 6 ? emulated_bytes : TILE_ROW_BYTES;
  emulate_zero(tile);
  for (int row = 0; row < rows; ++row)
    std::memcpy(emulated_tiles[tile].bytes[row], (const char*)from + row * stride, bytes);
}

inline void emulate_store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < TILE_ROWS; ++row)
    std::memcpy((char*)to + row * stride, emulated_tiles[tile].bytes[row], TILE_ROW_BYTES);
}

// The first elements of all pairs are summed separately from the second ones, each by FMA.
inline void emulate_bf16(int to, int left, int right) {
  const FlushSubnormals flushes;
  Tile &c = emulated_tiles[to], &a = emulated_tiles[left], &b = emulated_tiles[right];
  for (int n = 0; n < 16; n += WIDTH) {
    vec weights[32];
    for (int k = 0; k < 16; ++k) {
      const auto pairs = load_as<uvec>(&b.bf16[k][2 * n]);
      weights[2 * k] = (vec)(pairs << 16);
      weights[2 * k + 1] = (vec)(pairs & 0xffff0000);
    }
    for (int m = 0; m < TILE_ROWS; ++m) {
      vec sums[2] = {};
      for (int i = 0; i < 32; ++i)
        sums[i % 2] = fused(weights[i], broadcast(from_bf16(a.bf16[m][i])), sums[i % 2]);
      float* total = &c.floats[m][n];
      store(total, load(total) + (sums[0] + sums[1]));
    }
  }
}

// A sum of 64 products of bytes is exact in float32.
inline void emulate_int8(int to, int left, int right) {
  Tile &c = emulated_tiles[to], &a = emulated_tiles[left], &b = emulated_tiles[right];
  for (int n = 0; n < 16; n += WIDTH) {
    vec weights[64];
    for (int i = 0; i < 64; ++i) {
      const auto quads = load_as<ivec>(&b.whole[i / 4][4 * n]);
      weights[i] = __builtin_convertvector((quads << (24 - i % 4 * 8)) >> 24, vec);
    }
    for (int m = 0; m < TILE_ROWS; ++m) {
      vec sum{};
      for (int i = 0; i < 64; ++i) sum += weights[i] * (float)a.whole[m][i];
      int32_t* total = &c.sums[m][n];
      const ivec sums = load_as<ivec>(total) + __builtin_convertvector(sum, ivec);
      std::memcpy(total, &sums, sizeof sums);
    }
  }
}

#define TILE_ZERO(tile) emulate_zero(tile)
#define TILE_LOAD(tile, from, stride) emulate_load(tile, from, stride)
#define TILE_LOAD_ONCE(tile, from, stride) emulate_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulate_store(tile, to, stride)
#define TILE_BF16(c, a, b) emulate_bf16(c, a, b)
#define TILE_INT8(c, a, b) emulate_int8(c, a, b)

#else

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 0, 0, 64, 64};
  uint8_t rows[16] = {};

  TileConfig(int bytes, int count) {
    std::memset(rows, count, 6);
    row_bytes[4] = row_bytes[5] = (uint16_t)bytes;
    rows[6] = rows[7] = (uint8_t)(bytes / 4);
  }
};

// Configures this thread's tiles while it exists. They are released afterwards, because tile state makes
// context switches more expensive.
template <int BYTES = TILE_ROW_BYTES>
struct UseTiles {
  explicit UseTiles(int rows = TILE_ROWS) {
    const TileConfig config(BYTES, rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~UseTiles() { _tile_release(); }
};

// GCC's intrinsic does not tell the compiler that loading a tile reads memory.
#define TILE_LOAD(tile, from, stride)  \
  do {                                 \
    asm volatile("" ::: "memory");     \
    _tile_loadd(tile, from, stride);   \
  } while (0)
// For memory that is not reused soon: does not evict other data from L1.
#define TILE_LOAD_ONCE(tile, from, stride)  \
  do {                                      \
    asm volatile("" ::: "memory");          \
    _tile_stream_loadd(tile, from, stride); \
  } while (0)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_INT8(c, a, b) _tile_dpbssd(c, a, b)

#endif

}  // namespace
