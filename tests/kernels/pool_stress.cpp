// Three callers share the pool, while its threads change in number; prints how many jobs were wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.hpp"

constexpr int JOBS = 1500;
constexpr int64_t MANY = 70000;  // more pieces than a job of the pool has

bool is_right(std::mt19937& random) {
  const int64_t pieces = random() % 50 == 0 ? MANY + random() % MANY : 1 + random() % 40;
  const bool fails = random() % 20 == 0;
  const int spins = random() % 300;
  std::vector<int> calls(pieces);
  bool failed = false;
  const auto caller = std::this_thread::get_id();
  try {
    glm::parallel_for(pieces, [&](int64_t piece) {
      ++calls[piece];
      for (volatile int spin = 0; spin < spins; spin = spin + 1) {
      }
      if (fails && std::this_thread::get_id() == caller) throw std::runtime_error("as wanted");
    });
  } catch (const std::runtime_error&) {
    failed = true;
  }
  for (const int count : calls)
    if (count != 1 && !(count == 0 && failed)) return false;
  return true;
}

int main() {
  std::atomic<int> wrong{0};
  const auto call = [&](int seed) {
    std::mt19937 random(seed);
    for (int job = 0; job < JOBS; ++job) {
      if (!is_right(random)) ++wrong;
      if (random() % 10 == 0) glm::set_threads(1 + random() % 6);
      if (random() % 100 == 0) glm::set_spin_time(random() % 100);
      if (random() % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 600));
    }
  };
  std::thread first(call, 1), second(call, 2);
  call(3);
  first.join();
  second.join();
  std::printf("%d\n", wrong.load());
}
