// Operators have the signature of MindSpore's "aot" custom operators: all inputs, then all outputs, with
// their shapes and dtypes. They return 0, or the source line that rejected the arguments. MindSpore calls
// `run_program`, which calls all others.
#pragma once

#include <cstdint>

#define OPERATOR(name)                                                                           \
  extern "C" int name(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes, \
                      void* stream, void* extra)

// The kernels that programs may use (program.cpp).
#define EVERY_KERNEL(with)                                                                \
  with(linear) with(linear_gelu) with(linear_add)                                         \
  with(linear_bfloat16) with(linear_gelu_bfloat16) with(linear_add_bfloat16)              \
  with(linear_int8) with(linear_gelu_int8) with(linear_add_int8)                          \
  with(embedding) with(take_rows) with(layer_norm) with(layer_norm_of_layer) with(rms_norm) \
  with(query_key_norm) with(swiglu) with(swiglu_bfloat16) with(swiglu_int8)               \
  with(attention) with(next_token)

#define DECLARE(name) OPERATOR(name);
EVERY_KERNEL(DECLARE)
#undef DECLARE
