// What the kernels for CPUs share: vectors, and work that threads take shares of.
#ifndef SPECJAX_KERNELS_CPU_H_
#define SPECJAX_KERNELS_CPU_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace specjax {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

constexpr int64_t kWidth = 16;  // columns of a panel; heads are multiples of it

// One register: a wider vector would live in memory, and every sum with it.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
using Lane = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntLane = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Lane load(const float* from) {
  Lane lane;
  std::memcpy(&lane, from, sizeof(lane));
  return lane;
}

inline void store(float* to, Lane lane) { std::memcpy(to, &lane, sizeof(lane)); }

// For fewer multiplications than so many each, threads cost more than they bring.
constexpr int64_t kWorth = 1 << 14;

// Of a call; set once, before the first.
inline int64_t most_threads = 1 << 14;

// Threads that work through stages together: the products and the attention of a layer, say.
//
// Each stage is cut into shares, and threads claim them. The caller does all that nobody has
// claimed, so it waits for a thread that works and never for one that has yet to wake up: who comes
// late finds the stage that runs then, or that all is over. Between stages the helpers spin, for
// waking them takes as long as a stage.
class Team {
 public:
  explicit Team(ffi::ThreadPool& pool)
      : pool_(pool), threads_(std::min<int64_t>(pool.num_threads(), most_threads)) {}
  ~Team() {
    if (shared_) shared_->ticket.store(kOver, std::memory_order_release);
  }
  Team(const Team&) = delete;

  // Calls work(first, last) over parts of [0, count), on as many threads as it is worth.
  template <typename Work>
  void run(int64_t count, int64_t multiplications, const Work& work) {
    const int64_t threads = std::min({threads_, multiplications / kWorth, count});
    if (threads < 2) return work(int64_t{0}, count);
    // Some more than threads: what is to do differs, and so do they.
    const int64_t shares = std::min({2 * threads, count, kMost});
    if (!shared_) shared_ = std::make_shared<Shared>();
    for (; helpers_ < threads - 1; ++helpers_) call_helper();
    Shared& all = *shared_;
    all.context = &work, all.count = count, all.shares = shares;
    all.call = [](const void* of, int64_t first, int64_t last) {
      (*static_cast<const Work*>(of))(first, last);
    };
    all.done.store(0, std::memory_order_relaxed);
    const uint64_t stage = ++stage_;
    all.ticket.store(stage << 32 | static_cast<uint64_t>(shares) << 16, std::memory_order_release);
    while (all.claim_and_work() == kDid) {
    }
    for (int turns = 0; all.done.load(std::memory_order_acquire) < shares; ++turns) wait(turns);
  }

 private:
  enum Found { kDid, kNothing, kEnd };
  static constexpr uint64_t kOver = ~uint64_t{0};
  static constexpr int64_t kMost = (1 << 16) - 1;  // the ticket has 16 bits for them

  static void wait(int turns) {
    if (turns > 1000) std::this_thread::yield();  // somebody waits for a core, maybe this one
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Lives as long as anybody holds it. The ticket says which stage runs, of how many shares, and
  // which of them is next; whoever moves it on has a share, and until that is done the stage and
  // what it calls stay.
  struct Shared {
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> done{0};
    const void* context;
    void (*call)(const void*, int64_t, int64_t);
    int64_t count, shares;

    Found claim_and_work() {
      uint64_t now = ticket.load(std::memory_order_acquire);
      if (now == kOver) return kEnd;
      const int64_t share = now & 0xffff;
      if (share >= static_cast<int64_t>(now >> 16 & 0xffff)) return kNothing;
      if (ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
        call(context, count * share / shares, count * (share + 1) / shares);
        done.fetch_add(1, std::memory_order_release);
      }
      return kDid;
    }
  };

  void call_helper() {
    pool_.Schedule([all = shared_, caller = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller) return;  // the pool's queue is full
      int turns = 0;
      for (Found found; (found = all->claim_and_work()) != kEnd;) {
        turns = found == kDid ? 0 : turns + 1;
        if (turns) wait(turns);
      }
    });
  }

  ffi::ThreadPool& pool_;
  const int64_t threads_;
  uint64_t stage_ = 0;
  int64_t helpers_ = 0;
  std::shared_ptr<Shared> shared_;
};

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CPU_H_
