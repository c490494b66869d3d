// Threads that share the pieces of a job by a counter.
#pragma once
#include <cstdint>

namespace asbuilt {

// Calls work(context, i) for i = 0 .. pieces - 1, on the calling thread and on those of the pool. Returns when all are
// done. A thread that is late takes no piece, so that on a busy machine the caller waits for nobody but those at work.
void share(int64_t pieces, void (*work)(void*, int64_t), void* context);

// The threads of later jobs, the caller's included; at least 1.
void set_threads(int count);
int threads();

template <class F>
void each(int64_t pieces, F&& f) {
  share(pieces, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f);
}

}  // namespace asbuilt
