// Vectors and their arithmetic, and the thread group that all kernels for CPUs use.
//
// A result has the same bits whichever compiler built the kernels, with whichever tuning, and
// whichever instance of a template computes it. So the order of every sum is written out, and
// `fused` marks the products that are added without being rounded first. The compiler must not
// change either: `native.py` passes `-ffp-contract=off`, because GCC has no pragma for it, and
// options that allow other orders of sums are refused here. Two builds may differ only in the
// number of lanes, and in whether the processor has fused operations.
#ifndef SPECJAX_KERNELS_CPU_COMMON_H_
#define SPECJAX_KERNELS_CPU_COMMON_H_

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    __FINITE_MATH_ONLY__
#error "the kernels need exact arithmetic: build them without -ffast-math, -Ofast and their parts"
#endif
#if __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16  // 16: only _Float16 is ever widened
#error "the kernels need float arithmetic in float: build them without -mfpmath=387"
#endif

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

// One register: a wider vector, and every sum in it, would be kept in memory.
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

// x in every lane: x - 0 is x, also for negative zero, so compilers remove the subtraction.
inline Lane spread(float x) { return x - Lane{}; }

// a * b + c, rounded once where the processor has an instruction for that, else after each step.
inline float fused(float a, float b, float c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Lane fused(Lane a, Lane b, Lane c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Makes the compiler load a lane once. Otherwise it may load the operand again for every use, and
// loads limit the speed rather than multiplications.
inline void keep(Lane& lane) {
#if defined(__x86_64__)
  asm("" : "+v"(lane));
#elif defined(__aarch64__)
  asm("" : "+w"(lane));
#endif
}

// Multiplications per thread below which another thread costs more time than it saves.
constexpr int64_t kWorth = 1 << 14;

// Threads of a call, and multiplications from which it uses more than one; set before any call.
inline int64_t most_threads = 1 << 14, worth_waking = 1 << 18;

// The core that a thread runs on; where the system does not report it, a number of the thread. It
// determines which share a thread begins with, and no result.
inline int64_t core_number() {
#if defined(__linux__)
  return std::max(sched_getcpu(), 0);
#else
  static std::atomic<int64_t> seen{0};
  static thread_local const int64_t mine = seen++;
  return mine;
#endif
}

// Threads that compute stages together, such as the products and the attention of a layer.
//
// Each stage is cut into shares, in one queue for each core. A thread takes the shares of its own
// core's queue first. These are the same in every step, so the core's cache holds the weights and
// the keys that they need. Then it steals from other queues. The caller takes every share that is
// left, so it never waits for a thread that has not started. Buffers stages the other threads spin,
// because waking them takes as long as a stage. Each queue has a cache line of its own, to avoid
// false sharing.
class ThreadGroup {
 public:
  // `multiplications` is the size of the whole call.
  ThreadGroup(ffi::ThreadPool& pool, int64_t multiplications)
      : pool_(pool),
        threads_(multiplications < worth_waking
                     ? 1
                     : std::min<int64_t>(pool.num_threads(), most_threads)) {}
  ~ThreadGroup() {
    for (int64_t i = 0; shared_ && i < threads_; ++i) {
      shared_[i].unclaimed.store(kOver, std::memory_order_release);
    }
  }
  ThreadGroup(const ThreadGroup&) = delete;

  // Calls work(first, last) over parts of [0, count), on as many threads as pay off.
  template <typename Work>
  void run(int64_t count, int64_t multiplications, const Work& work) {
    const int64_t threads = std::min({threads_, multiplications / kWorth, count});
    if (threads < 2) return work(int64_t{0}, count);
    if (!shared_) shared_.reset(new Queue[threads_], std::default_delete<Queue[]>());
    for (; helpers_ < threads - 1; ++helpers_) call_helper();
    // In long stages threads may differ in speed: with two shares each, one can be stolen.
    const int64_t each = multiplications / threads < kMuch ? 1 : 2;
    const int64_t shares = std::min(each * threads, count);
    for (int64_t i = 0; i < threads; ++i) {
      Queue& queue = shared_[i];
      queue.context = &work, queue.count = count, queue.shares = shares;
      queue.first = shares * i / threads;
      queue.call = [](const void* of, int64_t first, int64_t last) {
        (*static_cast<const Work*>(of))(first, last);
      };
      const int64_t here = shares * (i + 1) / threads - queue.first;
      queue.begun += here;
      queue.unclaimed.store((uint64_t{1} << here) - 1, std::memory_order_release);
    }
    const int64_t own = core_number() % threads;
    for (int64_t i = 0; i < threads; ++i) {
      while (shared_[(own + i) % threads].claim_and_work() == kDid) {
      }
    }
    for (int64_t i = 0; i < threads; ++i) {
      const Queue& queue = shared_[i];
      for (int turns = 0; queue.done.load(std::memory_order_acquire) < queue.begun; ++turns) {
        wait(turns);
      }
    }
  }

 private:
  enum Found { kDid, kNothing, kEnd };
  static constexpr uint64_t kOver = uint64_t{1} << 63;
  static constexpr int64_t kMuch = 1 << 20;

  static void wait(int turns) {
    if (turns > 1000) std::this_thread::yield();  // another thread may wait for this core
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // The thread that clears a share's bit computes the share. The stage, and the function that it
  // calls, stay valid until that thread is done.
  struct alignas(64) Queue {
    std::atomic<uint64_t> unclaimed{0};
    const void* context;
    void (*call)(const void*, int64_t, int64_t);
    int64_t count, shares, first;  // shares in all, and the first of this queue
    int64_t begun = 0;             // shares of all stages so far; the caller's
    alignas(64) std::atomic<int64_t> done{0};

    Found claim_and_work() {
      uint64_t left = unclaimed.load(std::memory_order_acquire);
      if (left == kOver) return kEnd;
      if (left == 0) return kNothing;
      if (unclaimed.compare_exchange_weak(left, left & (left - 1), std::memory_order_acq_rel)) {
        const int64_t share = first + __builtin_ctzll(left);
        call(context, count * share / shares, count * (share + 1) / shares);
        done.fetch_add(1, std::memory_order_release);
      }
      return kDid;
    }
  };

  void call_helper() {
    pool_.Schedule([all = shared_, cores = threads_, caller = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller) return;  // the pool's queue is full
      int64_t at = core_number() % cores;
      for (int turns = 0;; ++turns) {
        const Found found = all[at].claim_and_work();
        if (found == kEnd) return;
        if (found == kDid) turns = 0;
        if (found == kNothing && turns % kSpins == kSpins - 1) {
          for (int64_t i = 1; i < cores; ++i) {
            if (all[(at + i) % cores].claim_and_work() == kDid) turns = 0;
          }
          at = core_number() % cores;  // threads move
        }
        if (turns) wait(turns);
      }
    });
  }

  static constexpr int kSpins = 16;  // turns at its own queue before it looks at others

  ffi::ThreadPool& pool_;
  const int64_t threads_;
  int64_t helpers_ = 0;
  std::shared_ptr<Queue[]> shared_;
};

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CPU_COMMON_H_
