#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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

// How long a thread that has spun yields to others before it sleeps; longer than most gaps between two steps.
constexpr auto YIELDING = std::chrono::microseconds(250);

constexpr int MOST_THREADS = 1024, MOST_PIECES = UINT16_MAX;

int64_t first_of(int64_t thread, int64_t threads, int64_t pieces) { return pieces * thread / threads; }

struct Job {
  uint32_t number;
  uint16_t pieces, threads;
};

// What threads write often is on cache lines of their own: cores may be on different chiplets, where it
// takes as long to fetch a line from another core as from memory.
constexpr int LINE = 64;

// A thread's share of a job: a range of pieces, taken in order, so that what the thread prefetches is what
// it computes next. A thread without pieces steals from the others, from the ends of their ranges (work
// stealing).
struct alignas(LINE) Share {
  struct Left {
    uint32_t job;
    uint16_t first, end;
  };
  struct Done {
    uint32_t job, pieces;
  };
  std::atomic<Left> left{Left{}};  // of the last job of which a piece was taken
  std::atomic<Done> done{Done{}};  // by this thread, including stolen pieces

  // Returns -1 if none is left, or if the job is over. Every share of a job has a piece, so once it is
  // over, all shares belong to it or to a later one.
  int take(const Job& job, int owner, int taker) {
    Left now = left.load(std::memory_order_relaxed);
    for (;;) {
      Left then = now;
      if (now.job != job.number) {
        // The caller's job is never over. It does not compare numbers, which overflow.
        if (taker != 0 && (int32_t)(now.job - job.number) > 0) return -1;
        then = {job.number, (uint16_t)first_of(owner, job.threads, job.pieces),
                (uint16_t)first_of(owner + 1, job.threads, job.pieces)};
      }
      if (then.first == then.end) return -1;
      const int piece = taker == owner ? then.first++ : --then.end;
      if (left.compare_exchange_weak(now, then, std::memory_order_relaxed)) return piece;
    }
  }

  // Only its own thread does this.
  void count(const Job& job) {
    const Done before = done.load(std::memory_order_relaxed);
    const uint32_t pieces = before.job == job.number ? before.pieces + 1 : 1;
    done.store({job.number, pieces}, std::memory_order_release);
  }

  uint32_t done_of(const Job& job) const {
    const Done now = done.load(std::memory_order_acquire);
    return now.job == job.number ? now.pieces : 0;
  }
};

struct Pool {
  // The current job; helpers read it while they wait. Whoever has taken a piece may read `work` and
  // `context`, which stay until all pieces are done.
  alignas(LINE) std::atomic<Job> job{Job{}};
  std::atomic<void (*)(void*, int64_t)> work{nullptr};
  std::atomic<void*> context{nullptr};
  alignas(LINE) std::mutex callers;    // one job at a time
  int helpers = 0;                     // started so far; guarded by `callers`
  alignas(LINE) std::atomic<int> sleeping{0};
  std::atomic<int> wanted{1};          // threads, including the caller
  std::atomic<int> spin_time{50};      // microseconds
  std::mutex mutex;
  std::condition_variable wake;
  Share shares[MOST_THREADS];          // the first is the caller's

  // A helper that is too late finds nothing to take; nobody waits for it.
  void help(int thread) {
    Job last{};
    for (;;) {
      last = wait_for_another(last);
      if (thread < last.threads) take_part(last, thread);
      yield_to_others();
    }
  }

  Job wait_for_another(const Job& last) {
    Job now;
    const auto is_there = [&] { return (now = job.load()).number != last.number; };
    auto time = Clock::now();
    const auto spins_until = time + std::chrono::microseconds(spin_time.load());
    for (; time < spins_until + YIELDING; time = Clock::now()) {
      for (int spin = 0; spin < 64; ++spin) {
        if (is_there()) return now;
        relax();
      }
      if (time >= spins_until) std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex);
    sleeping.fetch_add(1);
    wake.wait(lock, is_there);
    sleeping.fetch_sub(1);
    return now;
  }

  void take_part(const Job& job, int thread) {
    [[maybe_unused]] const StandardArithmetic arithmetic;
    for (int i = 0; i < job.threads; ++i) {
      const int owner = (thread + i) % job.threads;
      for (int piece; (piece = shares[owner].take(job, owner, thread)) >= 0;) {
        const Counted counted{shares[thread], job};
        work.load(std::memory_order_relaxed)(context.load(std::memory_order_relaxed), piece);
      }
    }
  }

  void run(int pieces, void (*work)(void*, int64_t), void* context) {
    std::lock_guard<std::mutex> lock(callers);
    const Job mine{job.load().number + 1, (uint16_t)pieces, (uint16_t)std::min(wanted.load(), pieces)};
    start_helpers(mine.threads - 1);
    this->work.store(work, std::memory_order_relaxed);
    this->context.store(context, std::memory_order_relaxed);
    job.store(mine);
    if (sleeping.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      wake.notify_all();
    }
    const Finished finished{*this, mine};
    take_part(mine, 0);
  }

  // Without a thread that the system refuses to start, the others steal its pieces.
  void start_helpers(int wanted_helpers) {
    try {
      for (; helpers < wanted_helpers; ++helpers)
        std::thread(&Pool::help, this, helpers + 1).detach();
    } catch (const std::system_error&) {
    }
  }

  // Its destructor, which also runs after an exception, counts a piece.
  struct Counted {
    Share& share;
    const Job& job;

    ~Counted() { share.count(job); }
  };

  // Its destructor waits until all pieces are done. After an exception those that are left are skipped.
  struct Finished {
    Pool& pool;
    const Job& job;

    ~Finished() {
      for (int owner = 0; owner < job.threads; ++owner)
        while (pool.shares[owner].take(job, owner, 0) >= 0) pool.shares[0].count(job);
      for (int spins = 0; done() < job.pieces; ++spins) {
        if (spins < 4096) {
          relax();
        } else {
          std::this_thread::yield();
        }
      }
    }

    uint32_t done() const {
      uint32_t all = 0;
      for (int thread = 0; thread < job.threads; ++thread) all += pool.shares[thread].done_of(job);
      return all;
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
  const int64_t each = (pieces + MOST_PIECES - 1) / MOST_PIECES;
  if (each > 1)
    return parallel_for((pieces + each - 1) / each, [&](int64_t number) {
      const int64_t last = std::min(pieces, (number + 1) * each);
      for (int64_t piece = number * each; piece < last; ++piece) work(context, piece);
    });
  if (pieces > 1 && threads() > 1) {
    pool().run((int)pieces, work, context);
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

void set_threads(int count) { pool().wanted.store(std::clamp(count, 1, MOST_THREADS)); }

int threads() { return pool().wanted.load(); }

void set_spin_time(int microseconds) { pool().spin_time.store(microseconds); }

}  // namespace glm

extern "C" void glm_set_threads(int count) { glm::set_threads(count); }
extern "C" int glm_threads() { return glm::threads(); }
extern "C" void glm_set_spin_time(int microseconds) { glm::set_spin_time(microseconds); }
