// A whole step in one operator: it carries out the instructions that program.py has recorded, whose
// header says what the code consists of. What they hand to each other lies in memory of the library.
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
// Those that values may have come first.
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

// The arguments of an operator, as MindSpore gave them; the memory is MindSpore's.
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

std::mutex one_at_a_time;
std::unique_ptr<Launch> last;  // guarded by it

int carry_out(void** data, int* ranks, int64_t** shapes, const char** dtypes) {
  static glm::Memory& memory = *new glm::Memory;
  const auto* code = (const int32_t*)data[0];
  const int values = code[0], instructions = code[1];
  char* own = memory.of(code[2] * WORD);
  code += 3;
  static Operands& known = *new Operands;
  static std::vector<int64_t>& dims = *new std::vector<int64_t>;
  known.clear();
  dims.resize(shapes[0][0]);
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

// code int32, numbers of the step int32, tensors -> results
// Refusals of kernels come back as they are.
OPERATOR(run_program) {
  std::lock_guard<std::mutex> turn(one_at_a_time);
  last = std::make_unique<Launch>(count, data, ranks, shapes, dtypes);
  return carry_out(data, ranks, shapes, dtypes);
}

// -> the last launch of `run_program`, for `glm_replay`; none if there was none since the last call
extern "C" void* glm_capture() {
  std::lock_guard<std::mutex> turn(one_at_a_time);
  return last.release();
}

// The same launch again, whose arguments must still be there.
extern "C" int glm_replay(void* launch) {
  std::lock_guard<std::mutex> turn(one_at_a_time);
  Operands& of = ((Launch*)launch)->arguments;
  return carry_out(of.data.data(), of.ranks.data(), of.shapes.data(), of.dtypes.data());
}

extern "C" void glm_forget(void* launch) { delete (Launch*)launch; }

// -> the number that instructions have for it; -1: there is none
extern "C" int glm_kernel_number(const char* name) {
  for (int number = 0; number < KERNELS; ++number)
    if (std::strcmp(kernels[number].name, name) == 0) return number;
  return -1;
}
