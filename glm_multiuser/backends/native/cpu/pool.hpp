// Thread pool.
#pragma once

#include <cstdint>

namespace glm {

// Runs work(context, piece) for every piece from 0 to pieces - 1, on all threads including the caller;
// returns when all are done. Concurrent calls are serialised.
void parallel_for(int64_t pieces, void (*work)(void*, int64_t), void* context);

template <class Work>
void parallel_for(int64_t pieces, Work work) {
  parallel_for(pieces, [](void* context, int64_t piece) { (*static_cast<Work*>(context))(piece); }, &work);
}

// Whether this is the last piece initially assigned to its thread, which may still steal others.
bool is_last_of_thread(int64_t piece, int64_t pieces);

// Number of threads that `parallel_for` uses, including the caller; at least 1.
void set_threads(int count);
int threads();

// How long an idle thread spins before it lets others have its core, and sleeps. Operators follow each other
// within microseconds, and waking a sleeping thread takes longer.
void set_spin_time(int microseconds);

}  // namespace glm
