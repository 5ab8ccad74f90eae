// A whole step in one operator: it carries out the instructions that program.py has recorded, whose
// header says what the code consists of. What they hand to each other lies in memory of the library.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

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

constexpr int64_t WORD = 4, LINE = 64;
constexpr int MEMORY = -1, ADDRESS = -2;
const char* const DTYPES[] = {"int32", "float32", "float16", "int16", "int8", "uint8"};

// Pages that no step has used take no memory.
class Memory {
 public:
  char* of(int64_t bytes) {
    if (bytes > size) {
      held.reset(new char[bytes + LINE]);
      size = bytes;
    }
    return held.get() + (-(uintptr_t)held.get() & (LINE - 1));
  }

 private:
  std::unique_ptr<char[]> held;
  int64_t size = 0;
};

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

std::mutex one_at_a_time;

}  // namespace

// code int32, numbers of the step int32, tensors -> results
// Refusals of kernels come back as they are.
OPERATOR(run_program) {
  std::lock_guard<std::mutex> turn(one_at_a_time);
  static Memory& memory = *new Memory;
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
    char* begin = tensor == MEMORY ? own : (char*)data[tensor == ADDRESS ? 0 : tensor];
    begin += code[1] * WORD;
    if (tensor == ADDRESS) std::memcpy(&begin, begin, sizeof begin);
    std::copy(code + 4, code + 4 + rank, shape);
    known.add(begin, rank, shape, DTYPES[code[2]]);
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
                               operands.shapes.data(), operands.dtypes.data(), stream, extra);
    if (refused) return refused;
    code += 2 + size;
  }
  return 0;
}

// -> the number that instructions have for it; -1: there is none
extern "C" int glm_kernel_number(const char* name) {
  for (int number = 0; number < KERNELS; ++number)
    if (std::strcmp(kernels[number].name, name) == 0) return number;
  return -1;
}
