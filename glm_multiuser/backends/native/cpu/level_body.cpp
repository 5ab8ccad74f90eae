// Compiled once per level, with that level's instructions enabled and LEVEL defined as its name.
#include "attention.hpp"
#include "cache.hpp"
#include "groups_linear.hpp"
#include "level.hpp"
#include "linear.hpp"
#include "packing.hpp"
#include "rows.hpp"

#if defined(__AMX_TILE__) || defined(GLM_EMULATE_AMX)
#include "amx.hpp"
#include "tile_attention.hpp"
#define PRODUCTS                                                               \
  tile_needs_packing, tile_row_bytes, tile_pack_input_row, tile_passes, tile_panels_per_call, \
      tile_rows_per_call, tile_scratch_bytes, tile_linear, tile_packs_results
#define ATTEND tile_query_rows, tile_attend
#else
#if defined(__AVX512BF16__)
#include "pair_attention.hpp"
#define ATTEND query_rows, pair_attend
#else
#define ATTEND query_rows, attend
#endif
#define PRODUCTS                                                                   \
  needs_packing, row_bytes, pack_input_row, one_pass, panels_per_call, rows_per_call, scratch_bytes, \
      linear, packs_no_results
#endif

#define NAME_OF(level) #level
#define NAME(level) NAME_OF(level)
#define TABLE_OF(level) table_##level
#define TABLE(level) TABLE_OF(level)

namespace glm {

extern const Level TABLE(LEVEL);
const Level TABLE(LEVEL) = {
    NAME(LEVEL), PRODUCTS, widen_output, write_position, ATTEND, merge_segments, layer_norm,
    rms_norm,    swiglu,   rotate,       argmax,         all_finite, pack_panel,
};

}  // namespace glm
