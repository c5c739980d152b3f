// All kernels for CPUs in one translation unit, which share what XLA's header declares.

#include "attention.cc"
#include "commit.cc"
#include "layers.cc"
#include "panels.cc"

extern "C" void specjax_use_one_thread() { specjax::most_threads = 1; }
extern "C" int64_t specjax_most_threads() { return specjax::most_threads; }
extern "C" void specjax_wake_for(int64_t count) { specjax::worth_waking = count; }
