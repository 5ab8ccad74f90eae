// Weights that are quantised in groups along their inputs, each group with a scale of its own: how
// they lie in memory. group_packing.py packs them so.
//
// A weight [outputs, inputs] is cut into panels of PANEL outputs, and a panel into blocks of
// `inputs` inputs. A block has a head, and then its groups, one after the other; a group has scales
// and then numbers. Head and scales have the numbers of all outputs side by side. The first of them
// are float16.
//
// Numbers come in words of 32 bits, those of all outputs side by side. Four inputs of an output are
// together, as four bytes or as the same bits of four bytes, because processors have instructions
// that multiply four bytes and add them up:
//
//   8 bits       byte i of word w is input 4 w + i, from -128 to 127
//   4 bits       byte i of word w is input 8 w + i, and its upper half input 8 w + 4 + i
//   5 or 6 bits  in front of words as of 4 bits there is one with the upper bits of the group: of
//                byte i the lowest one or two bits are input i's, the next ones input 4 + i's
#pragma once

#include <cstdint>

#include "level.hpp"

namespace glm {

constexpr int PART = 32;  // inputs that are widened together; divides those of any block

struct GroupType {
  Weight weight;
  int inputs;  // of a block
  int group;   // inputs of a group; divides PART
  int bits;    // of a number
  int head;    // bytes, of a panel
  int scales;  // bytes of each group, of a panel

  constexpr int words() const { return group * (bits == 8 ? 8 : 4) / 32; }
  constexpr bool has_upper_bits() const { return bits == 5 || bits == 6; }
  constexpr int group_bytes() const { return scales + (words() + has_upper_bits()) * 4 * PANEL; }
  constexpr int part_bytes() const { return PART / group * group_bytes(); }
  constexpr int parts() const { return inputs / PART; }
  constexpr int bytes() const { return head + parts() * part_bytes(); }
};

// Head: d. Of GGUF, as all but int4: see `blocks.py` for what the letters mean.
constexpr GroupType Q8_0{Weight::q8_0, 32, 32, 8, 2 * PANEL, 0};
constexpr GroupType Q4_0{Weight::q4_0, 32, 32, 4, 2 * PANEL, 0};
// Head: d and m.
constexpr GroupType Q4_1{Weight::q4_1, 32, 32, 4, 4 * PANEL, 0};
// Head: d and dmin. Scales: a scale and a minimum, each one byte.
constexpr GroupType Q4_K{Weight::q4_k, 256, 32, 4, 4 * PANEL, 2 * PANEL};
constexpr GroupType Q5_K{Weight::q5_k, 256, 32, 5, 4 * PANEL, 2 * PANEL};
// Head: d. Scales: one byte with a sign.
constexpr GroupType Q6_K{Weight::q6_k, 256, 16, 6, 2 * PANEL, PANEL};
// Head: scale, and zero points in halves of bytes: those of the first 16 outputs, and in the upper
// halves those of the others. A block is a group of 32 or 128 inputs; the latter is in four parts.
constexpr GroupType INT4_32{Weight::int4_32, 32, 32, 4, 2 * PANEL + PANEL / 2, 0};
constexpr GroupType INT4_128{Weight::int4_128, 128, 32, 4, 2 * PANEL + PANEL / 2, 0};

constexpr GroupType GROUP_TYPES[] = {Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, INT4_32, INT4_128};

}  // namespace glm
