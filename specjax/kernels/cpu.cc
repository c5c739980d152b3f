// All kernels for CPUs in one piece: reading XLA's header takes longer than the rest.

#include "cpu_attention.cc"
#include "cpu_commit.cc"
#include "cpu_layers.cc"
#include "cpu_panels.cc"
