/* SPDX-License-Identifier: Apache-2.0
 * CPU features as data. Read before any file of native/isa runs; holds no kernels. */
#ifndef CPU_ATTN_CPU_H
#define CPU_ATTN_CPU_H
#include "cpu_attn.h"

// clang-format off
#define CA_FEATURES(X) \
    X(avx) X(avx2) X(fma) X(f16c) \
    X(avx512f) X(avx512bw) X(avx512dq) X(avx512vl) X(avx512_bf16) X(avx512_fp16) X(avx512_vnni) X(avx512vbmi) \
    X(amx_tile) X(amx_bf16) X(amx_int8) X(amx_fp16) \
    X(neon) X(bf16_arm) X(i8mm) X(sve)
// clang-format on

enum ca_feature {
#define X(name) CA_HAS_##name,
    CA_FEATURES(X)
#undef X
        CA_NUM_FEATURES
};

/* The first of the features (ended by -1) that this machine does not offer, by name; NULL: all there. */
const char *ca_cpu_missing(const int *features);
/* static: filling an array on the stack took AVX instructions in files whose flags allow them, and `missing`, which
 * uses this, runs on every machine. */
#define CA_CPU_MISSING(...)                                                                                            \
    __extension__({                                                                                                    \
        static const int features[] = {__VA_ARGS__, -1};                                                               \
        ca_cpu_missing(features);                                                                                      \
    })

/* Is this the CPU's vendor, as CPUID names it? */
int ca_cpu_is(const char *vendor);
/* GenuineIntel? AVX512_VNNI? Written once, when the library loads. */
extern int ca_cpu_intel, ca_cpu_vnni;

/* Asks the operating system for the AMX tile state, which it grants to a whole process, or not: 1 granted, 0 refused,
 * -1 no AMX here; *reason: why not, "" where it is granted. */
int ca_cpu_amx_permission(const char **reason);
#endif
