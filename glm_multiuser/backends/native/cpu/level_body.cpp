// Compiled once per level, with that level's instructions and with LEVEL as its name.
#include "attention.hpp"
#include "level.hpp"
#include "linear.hpp"
#include "rows.hpp"

#define NAME_OF(level) #level
#define NAME(level) NAME_OF(level)
#define TABLE_OF(level) table_##level
#define TABLE(level) TABLE_OF(level)

namespace glm {

extern const Level TABLE(LEVEL);
const Level TABLE(LEVEL) = {NAME(LEVEL), row_bytes, lay_row, linear, attend, layer_norm,
                            rms_norm,    swiglu,    turn,    argmax, all_finite};

}  // namespace glm
