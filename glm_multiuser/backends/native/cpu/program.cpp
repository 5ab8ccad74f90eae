// Runs a whole step as one operator: executes the instructions recorded by program.py, which documents the
// encoding. Intermediate values are kept in memory of the library.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.hpp"
#include "operators.hpp"

namespace {

typedef int (*Kernel)(int, void**, int*, int64_t**, const char**, void*, void*);

struct Named {
  const char* name;
  Kernel kernel;
};

#define NAMED(name) {#name, name},
const Named kernels[] = {EVERY_KERNEL(NAMED)};
constexpr int KERNELS = sizeof kernels / sizeof kernels[0];

constexpr int64_t WORD = 4;
constexpr int MEMORY = -1;
// In the order of `DTYPES` in program.py, followed by those of Parameters.
const char* const DTYPES[] = {"int32", "float32", "uint8", "float16", "int16", "int8"};

struct Operands {
  std::vector<void*> data;
  std::vector<int> ranks;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;

  void clear() {
    data.clear(), ranks.clear(), shapes.clear(), dtypes.clear();
  }
  void add(void* memory, int rank, int64_t* shape, const char* dtype) {
    data.push_back(memory), ranks.push_back(rank), shapes.push_back(shape), dtypes.push_back(dtype);
  }
};

// The arguments of one call by MindSpore, which owns the memory.
struct Launch {
  Operands arguments;
  std::vector<int64_t> dims;

  Launch(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes) {
    for (int i = 0; i < count; ++i) dims.insert(dims.end(), shapes[i], shapes[i] + ranks[i]);
    int64_t* shape = dims.data();
    for (int i = 0; i < count; shape += ranks[i++])
      arguments.add(data[i], ranks[i], shape, known_dtype(dtypes[i]));
  }
  Launch(const Launch&) = delete;

  static const char* known_dtype(const char* dtype) {
    const auto is_it = [&](const char* one) { return std::strcmp(one, dtype) == 0; };
    const auto found = std::find_if(std::begin(DTYPES), std::end(DTYPES), is_it);
    return found != std::end(DTYPES) ? *found : "";
  }
};

std::mutex launch_mutex;
std::unique_ptr<Launch> last_launch;  // guarded by it

int execute(void** data, int* ranks, int64_t** shapes, const char** dtypes) {
  static glm::Memory& memory = *new glm::Memory;
  const auto* code = (const int32_t*)data[0];
  const int values = code[0], instructions = code[1];
  char* own = memory.of(code[2] * WORD);
  code += 3;
  static Operands& known = *new Operands;
  static std::vector<int64_t>& dims = *new std::vector<int64_t>;
  known.clear();
  int64_t all_dims = 0;
  const int32_t* one = code;
  for (int value = 0; value < values; ++value, one += 4 + one[3]) all_dims += one[3];
  dims.resize(all_dims);
  int64_t* shape = dims.data();
  for (int value = 0; value < values; ++value) {
    const int tensor = code[0], rank = code[3];
    char* begin = tensor == MEMORY ? own : (char*)data[tensor];
    std::copy(code + 4, code + 4 + rank, shape);
    known.add(begin + code[1] * WORD, rank, shape, DTYPES[code[2]]);
    shape += rank;
    code += 4 + rank;
  }
  static Operands& operands = *new Operands;
  for (int number = 0; number < instructions; ++number) {
    const Kernel kernel = kernels[code[0]].kernel;
    const int size = code[1];
    operands.clear();
    for (const int32_t* operand = code + 2; operand < code + 2 + size; ++operand) {
      if (*operand < 0) {
        const int value = -1 - *operand;
        operands.add(known.data[value], known.ranks[value], known.shapes[value],
                     known.dtypes[value]);
      } else {
        operands.add(data[*operand], ranks[*operand], shapes[*operand], dtypes[*operand]);
      }
    }
    const int refused = kernel(size, operands.data.data(), operands.ranks.data(),
                               operands.shapes.data(), operands.dtypes.data(), nullptr, nullptr);
    if (refused) return refused;
    code += 2 + size;
  }
  return 0;
}

}  // namespace

// code int32, inputs of the step int32, tensors -> results
// Returns the first non-zero result of a kernel.
OPERATOR(run_program) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  last_launch = std::make_unique<Launch>(count, data, ranks, shapes, dtypes);
  return execute(data, ranks, shapes, dtypes);
}

// -> the last launch of `run_program`, to pass to `glm_replay`; null if there was none since the last call
extern "C" void* glm_capture() {
  std::lock_guard<std::mutex> lock(launch_mutex);
  return last_launch.release();
}

// Repeats the launch. The memory of its arguments must still be valid.
extern "C" int glm_replay(void* launch) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  Operands& of = ((Launch*)launch)->arguments;
  return execute(of.data.data(), of.ranks.data(), of.shapes.data(), of.dtypes.data());
}

extern "C" void glm_forget(void* launch) { delete (Launch*)launch; }

// -> the kernel's number in instructions; -1 if there is no such kernel
extern "C" int glm_kernel_number(const char* name) {
  for (int number = 0; number < KERNELS; ++number)
    if (std::strcmp(kernels[number].name, name) == 0) return number;
  return -1;
}
