/* SPDX-License-Identifier: Apache-2.0
 * CPU features are data here: they are read before any kernel of native/isa runs, and this folder holds no kernel. */
#ifndef CPU_ATTN_CPU_H
#define CPU_ATTN_CPU_H
#include "cpu_attn.h"

// clang-format off
#define CA_FEATURES(X) \
    X(avx) X(avx2) X(fma) X(f16c) X(avx_vnni) \
    X(avx512f) X(avx512bw) X(avx512dq) X(avx512vl) X(avx512_bf16) X(avx512_fp16) X(avx512_vnni) X(avx512vbmi) \
    X(amx_tile) X(amx_bf16) X(amx_int8) X(amx_fp16) \
    X(neon) X(fhm) X(bf16_arm) X(i8mm) X(sve)
// clang-format on

enum ca_feature {
#define X(name) CA_HAS_##name,
    CA_FEATURES(X)
#undef X
        CA_NUM_FEATURES
};

/* Returns the name of the first of these features (-1 ends them) that this machine does not offer, or NULL where it
 * offers them all. */
const char *ca_cpu_missing(const int *features);
/* The array is static because filling one on the stack took AVX instructions in files whose flags allow them, while
 * `missing`, which uses this macro, runs on every machine. */
#define CA_CPU_MISSING(...)                                                                                            \
    __extension__({                                                                                                    \
        static const int features[] = {__VA_ARGS__, -1};                                                               \
        ca_cpu_missing(features);                                                                                      \
    })

/* Returns whether this is the CPU's vendor, as CPUID names it. */
int ca_cpu_is(const char *vendor);
/* These say whether the vendor is GenuineIntel and whether the CPU has AVX512_VNNI. They are written once, when the
 * library loads. */
extern int ca_cpu_intel, ca_cpu_vnni;

/* Asks the operating system for the AMX tile state, which it grants or refuses to a whole process. Returns 1 where it
 * is granted, 0 where it is refused and -1 where there is no AMX; *reason says why, and is "" where it is granted. */
int ca_cpu_amx_permission(const char **reason);
#endif
