#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace glm {
namespace {

// Default rounding and no flushing of subnormal numbers while it exists. MindSpore's threads, and threads
// that they start, flush them, so bits would depend on the thread.
struct StandardArithmetic {
#if defined(__SSE__)
  static constexpr unsigned STANDARD = 0x1f80;
  const unsigned before = _mm_getcsr();
  StandardArithmetic() { _mm_setcsr(STANDARD); }
  ~StandardArithmetic() { _mm_setcsr(before); }
#endif
};

// The pieces of one thread, taken in order, so that what it prefetches is what it computes next. A
// thread without pieces steals from the others, from the ends of their ranges (work stealing).
struct alignas(64) Range {
  std::atomic<uint64_t> left{0};  // lower half: the first piece; upper half: the end

  void set(int64_t first, int64_t last) { left.store((uint64_t)last << 32 | (uint64_t)first); }

  // Returns -1 if none is left.
  int64_t take(bool in_order) {
    uint64_t now = left.load(std::memory_order_relaxed);
    for (;;) {
      const auto first = (int64_t)(now & UINT32_MAX), last = (int64_t)(now >> 32);
      if (first >= last) return -1;
      const uint64_t then = in_order ? now + 1 : now - ((uint64_t)1 << 32);
      if (left.compare_exchange_weak(now, then, std::memory_order_relaxed))
        return in_order ? first : last - 1;
    }
  }
};

int64_t first_of(int64_t thread, int threads, int64_t pieces) { return pieces * thread / threads; }

struct Job {
  void (*work)(void*, int64_t);
  void* context;
  Range* ranges;
  int count;

  void run(int own) {
    [[maybe_unused]] const StandardArithmetic arithmetic;
    for (int i = 0; i < count; ++i) {
      Range& range = ranges[(own + i) % count];
      for (int64_t piece; (piece = range.take(i == 0)) >= 0;) work(context, piece);
    }
  }
};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// While these threads occupy all cores, other threads that become runnable, such as those that stream
// tokens, may have to wait for the scheduler's next tick, 4 ms or longer.
constexpr auto BETWEEN_YIELDS = std::chrono::microseconds(500);

void yield_to_others() {
  static thread_local Clock::time_point next;
  if (Clock::now() < next) return;
  std::this_thread::yield();
  next = Clock::now() + BETWEEN_YIELDS;
}

struct Pool {
  std::mutex callers;                 // one job at a time
  std::atomic<Job*> job{nullptr};     // the current job
  std::atomic<int> inside{0};         // helpers that may be accessing it
  std::atomic<uint64_t> number{0};    // of jobs so far
  std::atomic<int> sleeping{0};
  std::atomic<int> wanted{1};         // threads, including the caller
  std::atomic<int> spin_time{50};      // microseconds
  int helpers = 0;                    // started so far; guarded by `callers`, as are the next two
  std::unique_ptr<Range[]> ranges;
  int room = 0;
  std::mutex mutex;
  std::condition_variable wake;

  // A helper that is too late finds no job; nobody waits for it.
  void help(int index) {
    uint64_t seen = 0;
    for (;;) {
      wait_for_another(seen);
      seen = number.load();
      inside.fetch_add(1);
      Job* current = job.load();
      if (current != nullptr && index + 1 < current->count) current->run(index + 1);
      inside.fetch_sub(1);
      yield_to_others();
    }
  }

  void wait_for_another(uint64_t seen) {
    const auto end = Clock::now() + std::chrono::microseconds(spin_time.load());
    do {
      for (int spin = 0; spin < 64; ++spin) {
        if (number.load() != seen) return;
        relax();
      }
    } while (Clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex);
    sleeping.fetch_add(1);
    wake.wait(lock, [&] { return number.load() != seen; });
    sleeping.fetch_sub(1);
  }

  void run(int64_t pieces, void (*work)(void*, int64_t), void* context) {
    std::lock_guard<std::mutex> lock(callers);
    const int count = wanted.load();
    if (room < count) {
      ranges.reset(new Range[count]);
      room = count;
    }
    for (int i = 0; i < count; ++i)
      ranges[i].set(first_of(i, count, pieces), first_of(i + 1, count, pieces));
    Job mine{work, context, ranges.get(), count};
    start_helpers(count - 1);
    const Published published{*this, &mine};
    number.fetch_add(1);
    if (sleeping.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      wake.notify_all();
    }
    mine.run(0);
  }

  // Without a thread that the system refuses to start, the others steal its pieces.
  void start_helpers(int wanted_helpers) {
    try {
      for (; helpers < wanted_helpers; ++helpers)
        std::thread(&Pool::help, this, helpers).detach();
    } catch (const std::system_error&) {
    }
  }

  // Makes a job visible to helpers. Its destructor, which also runs after an exception, waits until none
  // of them accesses the job.
  struct Published {
    Pool& pool;

    Published(Pool& pool, Job* job) : pool(pool) { pool.job.store(job); }
    Published(const Published&) = delete;
    ~Published() {
      pool.job.store(nullptr);
      for (int spins = 0; pool.inside.load() > 0; ++spins) {
        if (spins < 4096) {
          relax();
        } else {
          std::this_thread::yield();
        }
      }
    }
  };
};

// Never destroyed: helpers may still access it while the process exits.
Pool& pool() {
  static Pool* only = new Pool;
  return *only;
}

}  // namespace

void parallel_for(int64_t pieces, void (*work)(void*, int64_t), void* context) {
  if (pieces > 1 && threads() > 1) {
    pool().run(pieces, work, context);
  } else {
    [[maybe_unused]] const StandardArithmetic arithmetic;
    for (int64_t piece = 0; piece < pieces; ++piece) work(context, piece);
  }
  if (pieces > 1) yield_to_others();
}

bool is_last_of_thread(int64_t piece, int64_t pieces) {
  const int count = threads();
  const int64_t next = piece + 1, thread = (next * count + pieces - 1) / pieces;
  return first_of(thread, count, pieces) == next;  // no other thread can begin there
}

void set_threads(int count) { pool().wanted.store(count < 1 ? 1 : count); }

int threads() { return pool().wanted.load(); }

void set_spin_time(int microseconds) { pool().spin_time.store(microseconds); }

}  // namespace glm

extern "C" void glm_set_threads(int count) { glm::set_threads(count); }
extern "C" int glm_threads() { return glm::threads(); }
extern "C" void glm_set_spin_time(int microseconds) { glm::set_spin_time(microseconds); }
