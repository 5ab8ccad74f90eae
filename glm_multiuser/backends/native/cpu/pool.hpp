// Threads that share the pieces of one operator.
#pragma once

#include <cstdint>

namespace glm {

// Runs work(context, piece) for every piece from 0 to pieces - 1, on all threads, the calling one
// among them; returns when all are done. Callers on several threads wait for each other.
void share(int64_t pieces, void (*work)(void*, int64_t), void* context);

template <class Work>
void share(int64_t pieces, Work work) {
  share(pieces, [](void* context, int64_t piece) { (*static_cast<Work*>(context))(piece); }, &work);
}

// Whether the thread that gets this piece, one of so many, has none behind it. It may steal others.
bool is_last_of_thread(int64_t piece, int64_t pieces);

// How many threads `share` uses, the calling one included; at least 1.
void set_threads(int count);
int threads();

// How long a thread that has nothing to do looks out for more before it sleeps. An operator follows
// the one before within microseconds, and waking a sleeper takes longer than that.
void set_patience(int microseconds);

}  // namespace glm
