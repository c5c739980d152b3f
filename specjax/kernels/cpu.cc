// All kernels for CPUs in one piece: reading XLA's header takes longer than the rest.

#include "cpu_attention.cc"
#include "cpu_commit.cc"
#include "cpu_layers.cc"
#include "cpu_panels.cc"

extern "C" void specjax_use_one_thread() { specjax::most_threads = 1; }
extern "C" int64_t specjax_most_threads() { return specjax::most_threads; }
extern "C" void specjax_wake_for(int64_t count) { specjax::worth_waking = count; }
