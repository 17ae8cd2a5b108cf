/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     vector
 * rank:     30
 * flags:    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
 * guarded:  -mavx512vnni
 * emulated: -O1 -mavx2 -mfma -mf16c -Wno-psabi -DEMULATED
 *
 * This isa is AVX-512 without any matrix unit: fp32 FMA over widened 16-bit elements (Skylake-X and newer, Zen 4 and
 * newer). A register tile takes 6 x 4 accumulators of the 32 registers, 4 for K or V, and 1 to broadcast; of tasks with
 * more than 12 rows 12 x 2, which read half of the bytes of K and V and convert half of their halves for a product, on
 * the ports of FMA where the core is Intel's.
 *
 * A core of Cascade Lake waits for few lines at a time, and its hardware prefetches behind a few reads of a page. So
 * the products ask for the first half of a page, evenly, a step ahead (kernel/MEASUREMENTS.md: prefetch). Quantised
 * caches go by kernel/kv_formats/halves.h; those of integers, with 16-bit dtypes, go by kernel/kv_formats/integers.h
 * where there is AVX512_VNNI. */
#include "cpu/cpu.h"
#include "avx512.h"

#define ISA avx512
#ifdef EMULATED
#define METHOD "FP32 FMA, 16 lanes, emulated on AVX2, for tests only"
#else
#define METHOD "FP32 FMA, 16 lanes; 16-bit elements widened in registers"
#endif
#define MR 6
#define TALL 12
#define TILE_ROWS 12
#define NG 4
#define NDV 4
#define SOFTMAX_ROWS 6
#define ROWS 192
#define KEYS 256
#define FEW_KEYS 256
#define NHD_KEYS 64
#define PREFETCH                                                                                                       \
    {.steps = 1,                                                                                                       \
     .quantised_steps = ca_cpu_intel ? 1 : 2,                                                                          \
     .integer_steps = ca_cpu_intel ? 3 : 16,                                                                           \
     .paced_rows = ca_cpu_intel ? 0 : 4}
#define HALF_PAGES ca_cpu_intel
#ifdef EMULATED
static const int integers = 1;
#define INTEGERS &integers
#else
#define INTEGERS &ca_cpu_vnni
#endif

static const char *missing(void) {
#ifdef EMULATED
    return CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma, CA_HAS_f16c);
#else
    return CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512bw, CA_HAS_avx512dq, CA_HAS_avx512vl, CA_HAS_fma, CA_HAS_f16c);
#endif
}

#include "kernel/all_dtypes.h"
