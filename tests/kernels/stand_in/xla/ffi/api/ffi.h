// What the threads of the kernels for CPUs need of XLA's header: a pool of threads, a plain one.
#ifndef SPECJAX_TESTS_STAND_IN_FFI_H_
#define SPECJAX_TESTS_STAND_IN_FFI_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {

enum Type { F32, S32 };
template <Type>
class Buffer;

class ThreadPool {
 public:
  explicit ThreadPool(int64_t count) {
    for (int64_t i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return threads_.size(); }

  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool over_ = false;
};

}  // namespace xla::ffi

#endif  // SPECJAX_TESTS_STAND_IN_FFI_H_
