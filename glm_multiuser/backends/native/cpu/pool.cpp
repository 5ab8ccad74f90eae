#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace glm {
namespace {

// Rounding and subnormal numbers as IEEE 754 has them, while it exists. MindSpore's threads take
// subnormal numbers for nothing, and so does a thread that they start: bits would depend on which
// thread computes.
struct StandardArithmetic {
#if defined(__SSE__)
  static constexpr unsigned STANDARD = 0x1f80;
  const unsigned before = _mm_getcsr();
  StandardArithmetic() { _mm_setcsr(STANDARD); }
  ~StandardArithmetic() { _mm_setcsr(before); }
#endif
};

struct Job {
  int64_t pieces;
  void (*work)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};

  void run() {
    [[maybe_unused]] const StandardArithmetic arithmetic;
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
      work(context, piece);
  }
};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Pool {
  std::mutex callers;                 // one job at a time
  std::atomic<Job*> job{nullptr};     // what there is to do
  std::atomic<int> inside{0};         // helpers that may be looking at it
  std::atomic<uint64_t> number{0};    // of jobs so far
  std::atomic<int> sleeping{0};
  std::atomic<int> wanted{1};         // threads, the caller's included
  std::atomic<int> patience{50};      // microseconds
  int helpers = 0;                    // started so far; guarded by `callers`
  std::mutex mutex;
  std::condition_variable wake;

  // A helper that comes late finds no job; nobody waits for it.
  void help(int index) {
    uint64_t seen = 0;
    for (;;) {
      wait_for_another(seen);
      seen = number.load();
      inside.fetch_add(1);
      Job* current = job.load();
      if (current != nullptr && index + 1 < wanted.load()) current->run();
      inside.fetch_sub(1);
    }
  }

  void wait_for_another(uint64_t seen) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::microseconds(patience.load());
    do {
      for (int turn = 0; turn < 64; ++turn) {
        if (number.load() != seen) return;
        relax();
      }
    } while (Clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex);
    sleeping.fetch_add(1);
    wake.wait(lock, [&] { return number.load() != seen; });
    sleeping.fetch_sub(1);
  }

  void run(Job& mine) {
    std::lock_guard<std::mutex> turn(callers);
    for (; helpers < wanted.load() - 1; ++helpers)
      std::thread(&Pool::help, this, helpers).detach();
    job.store(&mine);
    number.fetch_add(1);
    if (sleeping.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      wake.notify_all();
    }
    mine.run();
    job.store(nullptr);
    for (int turn_taken = 0; inside.load() > 0; ++turn_taken) {
      if (turn_taken < 4096) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

// Never destroyed: helpers may still look at it while the process ends.
Pool& pool() {
  static Pool* only = new Pool;
  return *only;
}

}  // namespace

void share(int64_t pieces, void (*work)(void*, int64_t), void* context) {
  Job job{pieces, work, context};
  if (pieces <= 1 || threads() == 1) {
    job.run();
  } else {
    pool().run(job);
  }
}

void set_threads(int count) { pool().wanted.store(count < 1 ? 1 : count); }

int threads() { return pool().wanted.load(); }

void set_patience(int microseconds) { pool().patience.store(microseconds); }

}  // namespace glm
