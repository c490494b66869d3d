#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("yield")
#else
#define RELAX() ((void)0)
#endif

namespace asbuilt {
namespace {

// Waiting spins for a moment, as long as Python takes between the products of one layer, then parks: a decode step must
// not pay a wake-up for each product, and an idle pool must not hold a core.
constexpr auto kSpinning = std::chrono::microseconds(200);
constexpr int kSpinsBetweenLooks = 64;
constexpr int kMostThreads = 256;
constexpr uint64_t kIndexBits = 24, kIndexMask = (1u << kIndexBits) - 1;

class Pool {
 public:
  void set_threads(int count) {
    std::lock_guard<std::mutex> one(entry_);
    count = count < 1 ? 1 : count > kMostThreads ? kMostThreads : count;
    if (count - 1 == static_cast<int>(threads_.size())) return;
    stop();
    for (int i = 1; i < count; ++i) threads_.emplace_back([this] { serve(); });
    count_.store(count, std::memory_order_relaxed);
  }

  int threads() const { return count_.load(std::memory_order_relaxed); }

  void share(int64_t pieces, void (*work)(void*, int64_t), void* context) {
    // one job at a time; a second caller computes its own alone rather than wait
    std::unique_lock<std::mutex> one(entry_, std::try_to_lock);
    if (!one.owns_lock() || threads_.empty() || pieces < 2 || pieces >= static_cast<int64_t>(kIndexMask)) {
      for (int64_t i = 0; i < pieces; ++i) work(context, i);
      return;
    }
    work_ = work;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> (2 * kIndexBits)) + 1;
    ticket_.store(job << (2 * kIndexBits) | static_cast<uint64_t>(pieces) << kIndexBits, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> sleeping(mutex_); }
      wake_.notify_all();
    }
    take();
    const auto done = [&] { return done_.load(std::memory_order_acquire) >= pieces; };
    while (!spun(done)) std::this_thread::yield();
  }

  ~Pool() { stop(); }

 private:
  // Takes pieces of the job that the ticket names until there are none. The job stays while one of its pieces is out.
  void take() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket & kIndexMask) < (ticket >> kIndexBits & kIndexMask)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      work_(context_, static_cast<int64_t>(ticket & kIndexMask));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  // Spins until `over` or until it has been a moment; returns whether it is over.
  template <class F>
  static bool spun(F&& over) {
    const auto end = std::chrono::steady_clock::now() + kSpinning;
    do {
      for (int i = 0; i < kSpinsBetweenLooks; ++i) {
        if (over()) return true;
        RELAX();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  bool waiting() const {
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return (ticket & kIndexMask) >= (ticket >> kIndexBits & kIndexMask);
  }

  void serve() {
    while (!stopping_.load(std::memory_order_acquire)) {
      take();
      if (spun([this] { return !waiting() || stopping_.load(std::memory_order_relaxed); })) continue;
      std::unique_lock<std::mutex> sleeping(mutex_);
      parked_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(sleeping, [this] { return !waiting() || stopping_.load(std::memory_order_acquire); });
      parked_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    { std::lock_guard<std::mutex> sleeping(mutex_); }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    stopping_.store(false, std::memory_order_release);
  }

  std::vector<std::thread> threads_;
  std::atomic<int> count_{1};
  std::mutex entry_, mutex_;
  std::condition_variable wake_;
  // The job's number, its pieces and the next piece, in one word: a late thread cannot take a piece of a newer job by
  // what it knows of an older one.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
};

// Never destroyed: threads may still be parked when the process ends.
Pool& pool() {
  static Pool* one = new Pool;
  return *one;
}

}  // namespace

void share(int64_t pieces, void (*work)(void*, int64_t), void* context) { pool().share(pieces, work, context); }
void set_threads(int count) { pool().set_threads(count); }
int threads() { return pool().threads(); }

}  // namespace asbuilt
