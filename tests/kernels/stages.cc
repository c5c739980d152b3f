// Many calls of many stages of all sizes, each of which reads what the last one wrote; prints how
// many of its numbers are wrong, and whether others than the caller computed any. On a busy machine
// the others may come late: more calls are made for up to a minute, until one has computed something.
// Usage: stages THREADS CALLS

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "common.h"

int main(int, char** arguments) {
  xla::ffi::ThreadPool pool(std::atoi(arguments[1]));
  std::mt19937 random(0);
  std::vector<int64_t> from(4000), to(4000);
  int64_t stages = 0, wrong = 0;
  std::atomic<bool> helped{false};
  const std::thread::id caller = std::this_thread::get_id();
  const int calls = std::atoi(arguments[2]);
  const auto latest = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  const auto waits = [&] { return !helped && std::chrono::steady_clock::now() < latest; };
  for (int call = 0; call < calls || (calls && waits()); ++call) {
    specjax::ThreadGroup group(pool, specjax::worth_waking);
    for (int left = random() % 40; left > 0; --left, ++stages) {
      const int64_t count = 1 + random() % (left % 3 ? 20 : from.size());
      const int64_t multiplications = int64_t{1} << (12 + random() % 12);
      for (int64_t i = 0; i < count; ++i) from[i] = stages + i;
      group.run(count, multiplications, [&](int64_t first, int64_t last) {
        if (std::this_thread::get_id() != caller) helped = true;
        for (int64_t i = first; i < last; ++i) to[i] = 2 * from[i] + 1, from[i] = -1;
      });
      for (int64_t i = 0; i < count; ++i) {
        wrong += to[i] != 2 * (stages + i) + 1 || from[i] != -1;
      }
    }
  }
  std::printf("%lld stages, %s, %lld wrong\n", static_cast<long long>(stages),
              helped ? "helped" : "alone", static_cast<long long>(wrong));
}
