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

// Below so many multiplications waking another thread costs more than it brings.
constexpr int64_t kAlone = 1 << 15;

// Calls work(first, last) over parts of [0, count), on as many threads as it is worth.
//
// Threads claim shares. The caller does all that nobody has claimed, so it waits for a thread that
// works and never for one that has yet to wake up; who comes late finds nothing left but the
// counters, which live as long as anybody holds them.
template <typename Work>
void in_shares(ffi::ThreadPool& pool, int64_t count, int64_t multiplications, const Work& work) {
  // Some more than threads: what is to do differs, and so do they.
  const int64_t threads = pool.num_threads(), shares = std::min<int64_t>(2 * threads, count);
  if (threads < 2 || shares < 2 || multiplications < kAlone) return work(int64_t{0}, count);
  struct Counters {
    std::atomic<int64_t> claimed{0}, done{0};
  };
  auto counters = std::make_shared<Counters>();
  auto take = [counters, count, shares, &work] {
    for (int64_t i; (i = counters->claimed.fetch_add(1)) < shares;) {
      work(count * i / shares, count * (i + 1) / shares);
      counters->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min(threads, shares); ++i) {
    auto helper = take;
    pool.Schedule(std::move(helper));
  }
  take();
  for (int turns = 0; counters->done.load(std::memory_order_acquire) < shares; ++turns) {
    if (turns > 1000) std::this_thread::yield();  // it waits for a core, maybe this one
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CPU_H_
