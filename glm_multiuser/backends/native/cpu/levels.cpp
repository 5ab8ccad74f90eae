// Which level runs. HAVE_... are the levels that the compiler knew.
#include <cstring>

#include "level.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace glm {

extern const Level table_plain;
extern const Level table_avx2, table_avx512, table_avx512bf16;

namespace {

#if defined(HAVE_avx2)
// Compilers' own name for it is a recent one.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

// The best first.
struct Choice {
  const Level* level;
  bool (*runs_here)();
};

const Choice choices[] = {
#if defined(HAVE_avx512bf16)
    {&table_avx512bf16,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") != 0;
     }},
#endif
#if defined(HAVE_avx512)
    {&table_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") != 0;
     }},
#endif
#if defined(HAVE_avx2)
    {&table_avx2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
     }},
#endif
    {&table_plain, [] { return true; }},
};

const Level* best() {
  for (const Choice& choice : choices)
    if (choice.runs_here()) return choice.level;
  return &table_plain;
}

const Level* current = best();

}  // namespace

const Level& level() { return *current; }

bool force_level(const char* name) {
  if (*name == 0) {
    current = best();
    return true;
  }
  for (const Choice& choice : choices) {
    if (std::strcmp(choice.level->name, name) == 0 && choice.runs_here()) {
      current = choice.level;
      return true;
    }
  }
  return false;
}

}  // namespace glm
