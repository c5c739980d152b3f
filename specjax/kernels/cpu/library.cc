// All kernels for CPUs in one translation unit: parsing XLA's header takes most of the time.

#include "attention.cc"
#include "commit.cc"
#include "layers.cc"
#include "panels.cc"

extern "C" void specjax_use_one_thread() { specjax::most_threads = 1; }
extern "C" int64_t specjax_most_threads() { return specjax::most_threads; }
extern "C" void specjax_wake_for(int64_t count) { specjax::worth_waking = count; }

// The instruction sets that the compiler was allowed to use: "name=value" for each, by the names of
// Linux's /proc/cpuinfo; the value is the macro's own name if the compiler does not define it. This
// is data and not a function, which could itself be compiled to those instructions.
#define SPECJAX_TEXT(value) #value
#define SPECJAX_ASK(name, macro) name "=" SPECJAX_TEXT(macro) " "

extern "C" const char specjax_instructions[] =
    SPECJAX_ASK("pni", __SSE3__)
    SPECJAX_ASK("ssse3", __SSSE3__)
    SPECJAX_ASK("sse4_1", __SSE4_1__)
    SPECJAX_ASK("sse4_2", __SSE4_2__)
    SPECJAX_ASK("sse4a", __SSE4A__)
    SPECJAX_ASK("popcnt", __POPCNT__)
    SPECJAX_ASK("movbe", __MOVBE__)
    SPECJAX_ASK("abm", __LZCNT__)
    SPECJAX_ASK("bmi1", __BMI__)
    SPECJAX_ASK("bmi2", __BMI2__)
    SPECJAX_ASK("tbm", __TBM__)
    SPECJAX_ASK("avx", __AVX__)
    SPECJAX_ASK("xop", __XOP__)
    SPECJAX_ASK("fma4", __FMA4__)
    SPECJAX_ASK("f16c", __F16C__)
    SPECJAX_ASK("fma", __FMA__)
    SPECJAX_ASK("avx2", __AVX2__)
    SPECJAX_ASK("gfni", __GFNI__)
    SPECJAX_ASK("avx_vnni", __AVXVNNI__)
    SPECJAX_ASK("avx512f", __AVX512F__)
    SPECJAX_ASK("avx512cd", __AVX512CD__)
    SPECJAX_ASK("avx512bw", __AVX512BW__)
    SPECJAX_ASK("avx512dq", __AVX512DQ__)
    SPECJAX_ASK("avx512vl", __AVX512VL__)
    SPECJAX_ASK("avx512ifma", __AVX512IFMA__)
    SPECJAX_ASK("avx512vbmi", __AVX512VBMI__)
    SPECJAX_ASK("avx512_vbmi2", __AVX512VBMI2__)
    SPECJAX_ASK("avx512_vnni", __AVX512VNNI__)
    SPECJAX_ASK("avx512_bitalg", __AVX512BITALG__)
    SPECJAX_ASK("avx512_vpopcntdq", __AVX512VPOPCNTDQ__)
    SPECJAX_ASK("avx512_bf16", __AVX512BF16__)
    SPECJAX_ASK("avx512_fp16", __AVX512FP16__)
    SPECJAX_ASK("atomics", __ARM_FEATURE_ATOMICS)
    SPECJAX_ASK("lrcpc", __ARM_FEATURE_RCPC)
    SPECJAX_ASK("asimdrdm", __ARM_FEATURE_QRDMX)
    SPECJAX_ASK("asimdhp", __ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    SPECJAX_ASK("asimddp", __ARM_FEATURE_DOTPROD)
    SPECJAX_ASK("i8mm", __ARM_FEATURE_MATMUL_INT8)
    SPECJAX_ASK("bf16", __ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    SPECJAX_ASK("sve", __ARM_FEATURE_SVE)
    SPECJAX_ASK("sve2", __ARM_FEATURE_SVE2);
