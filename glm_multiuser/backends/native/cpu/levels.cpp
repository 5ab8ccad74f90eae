// Selects the level at run time. HAVE_... are defined for the levels that were compiled.
#include <cstring>

#include "level.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace glm {

extern const Level table_plain, table_avx2, table_avxvnni;
extern const Level table_avx512, table_avx512vnni, table_avx512bf16, table_amx;

namespace {

// Emulated levels prefetch as on Zen 4, so that what it does is tested on all processors.
#if defined(__x86_64__) && !defined(GLM_EMULATED)
bool is_amd_family(unsigned least) {
  unsigned most, first, middle, last;
  if (!__get_cpuid(0, &most, &first, &last, &middle)) return false;
  if (first != signature_AMD_ebx || middle != signature_AMD_edx || last != signature_AMD_ecx) return false;
  unsigned version;
  __get_cpuid(1, &version, &first, &last, &middle);
  const unsigned family = version >> 8 & 0xf, extended = version >> 20 & 0xff;
  return family + extended >= least;
}
#else
bool is_amd_family(unsigned) { return false; }
#endif

#if defined(GLM_EMULATED)
// Levels above AVX2 are emulated in plain C++: tests/kernels/test_emulated.py.
[[maybe_unused]] bool runs_amx() { return true; }
[[maybe_unused]] bool runs_avx512bf16() { return true; }
[[maybe_unused]] bool runs_avx512vnni() { return true; }
[[maybe_unused]] bool runs_avx512() { return true; }
[[maybe_unused]] bool runs_avxvnni() { return true; }
#elif defined(__x86_64__)
// CPUID, for features that __builtin_cpu_supports does not know, or only in recent compilers.
struct Features {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Features(unsigned leaf, unsigned part) {
    if (!__get_cpuid_count(leaf, part, &a, &b, &c, &d)) a = b = c = d = 0;
  }
};

[[maybe_unused]] bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         (Features(1, 0).c & bit_F16C);
}

[[maybe_unused]] bool runs_avxvnni() { return runs_avx2() && (Features(7, 1).a & 1 << 4); }

[[maybe_unused]] bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

[[maybe_unused]] bool runs_avx512vnni() { return runs_avx512() && (Features(7, 0).c & 1 << 11); }

[[maybe_unused]] bool runs_avx512bf16() {
  return runs_avx512vnni() && __builtin_cpu_supports("avx512vbmi") && (Features(7, 1).a & 1 << 5);
}

// A process must request permission to use tiles from Linux.
[[maybe_unused]] bool runs_amx() {
  constexpr unsigned BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25, ALL = BF16 | TILE | INT8;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return runs_avx512bf16() && (Features(7, 0).d & ALL) == ALL &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// Best first.
struct Choice {
  const Level* level;
  bool (*runs_here)();
};

const Choice choices[] = {
#if defined(HAVE_amx)
    {&table_amx, runs_amx},
#endif
#if defined(HAVE_avx512bf16)
    {&table_avx512bf16, runs_avx512bf16},
#endif
#if defined(HAVE_avx512vnni)
    {&table_avx512vnni, runs_avx512vnni},
#endif
#if defined(HAVE_avx512)
    {&table_avx512, runs_avx512},
#endif
#if defined(HAVE_avxvnni)
    {&table_avxvnni, runs_avxvnni},
#endif
#if defined(HAVE_avx2)
    {&table_avx2, runs_avx2},
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

const bool is_zen5 = is_amd_family(26);

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

extern "C" const char* glm_level() { return glm::level().name; }
extern "C" int glm_force_level(const char* name) { return glm::force_level(name); }
