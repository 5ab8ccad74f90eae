// Memory layout of group-quantised weights: each group of inputs has its own scale. group_packing.py
// packs them.
//
// A weight [outputs, inputs] is split into panels of PANEL outputs, and a panel into blocks of `inputs`
// inputs. A block is a head followed by its groups; a group is scales followed by quants. Head and scales
// store the values of all outputs next to each other; those of the head are float16.
//
// Quants are stored in 32-bit words, interleaved by output. A word has four inputs of an output, in four
// bytes or in the same bits of four bytes, as dot-product instructions expect:
//
//   8 bits       byte i of word w is input 4 w + i, from -128 to 127
//   4 bits       byte i of word w has input 8 w + i in its lower half, input 8 w + 4 + i in its upper half
//   5 or 6 bits  the words of 4 bits are preceded by one with the upper bits of the group: in byte i, the
//                lowest one or two bits belong to input i, the next ones to input 4 + i
#pragma once

#include <cstdint>

#include "level.hpp"

namespace glm {

constexpr int PART = 32;  // inputs processed at a time; divides the inputs of every block

struct GroupType {
  Weight weight;
  int inputs;  // per block
  int group;   // inputs per group; divides PART
  int bits;    // per quant
  int head;    // bytes per block of a panel
  int scales;  // bytes per group of a panel

  constexpr int words() const { return group * (bits == 8 ? 8 : 4) / 32; }
  constexpr bool has_upper_bits() const { return bits == 5 || bits == 6; }
  constexpr int group_bytes() const { return scales + (words() + has_upper_bits()) * 4 * PANEL; }
  constexpr int part_bytes() const { return PART / group * group_bytes(); }
  constexpr int parts() const { return inputs / PART; }
  constexpr int bytes() const { return head + parts() * part_bytes(); }
};

// All but int4 are GGUF types: see `blocks.py` for the names of their fields.
// Head: d.
constexpr GroupType Q8_0{Weight::q8_0, 32, 32, 8, 2 * PANEL, 0};
constexpr GroupType Q4_0{Weight::q4_0, 32, 32, 4, 2 * PANEL, 0};
// Head: d and m.
constexpr GroupType Q4_1{Weight::q4_1, 32, 32, 4, 4 * PANEL, 0};
// Head: d and dmin. Scales: a scale and a minimum, each one byte.
constexpr GroupType Q4_K{Weight::q4_k, 256, 32, 4, 4 * PANEL, 2 * PANEL};
constexpr GroupType Q5_K{Weight::q5_k, 256, 32, 5, 4 * PANEL, 2 * PANEL};
// Head: d. Scales: int8.
constexpr GroupType Q6_K{Weight::q6_k, 256, 16, 6, 2 * PANEL, PANEL};
// Head: scale, and 4-bit zero points: the first 16 outputs in the lower halves of bytes, the others in the
// upper halves. A block is one group of 32 or 128 inputs; 128 are stored as four groups of 32.
constexpr GroupType INT4_32{Weight::int4_32, 32, 32, 4, 2 * PANEL + PANEL / 2, 0};
constexpr GroupType INT4_128{Weight::int4_128, 128, 32, 4, 2 * PANEL + PANEL / 2, 0};

constexpr GroupType GROUP_TYPES[] = {Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, INT4_32, INT4_128};

}  // namespace glm
