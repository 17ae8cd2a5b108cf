/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     vector
 * rank:     31
 * of:       avx512 CA_BF16
 * flags:    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mavx512bf16 -mavx512vbmi
 * guarded:  -mavx512vnni
 * emulated: -O1 -mavx2 -mfma -Wno-psabi -DEMULATED -DEMULATED_BF16
 *
 * This is AVX-512's bf16 kernel where VDPBF16PS is the faster product: it has twice the speed of FP32 FMA on Zen 4, and
 * half of it on Intel's cores (468 and 234, 171 and 347 GFLOP/s of two threads, by native/limits/probe).
 *
 * kernel/MEASUREMENTS.md says by what its block sizes (register tiles), its way to make weights (weights) and what it
 * prefetches (prefetch, paced rows) were chosen. */
#include "cpu/cpu.h"
#include "avx512.h"
#include <stdlib.h>

#define MR 6
#define TALL 8
#define NG 4
#define NDV 4
#define ROWS 192
#define KEYS 256
#define FEW_KEYS 128
#define PREFETCH {.steps = 1, .quantised_steps = 4, .integer_steps = 3, .paced_rows = 4}
#define NHD_BYTES (512 << 10) /* 128 keys of 8 heads, which were timed */

/* This kernel alone does not multiply integers: where VDPBF16PS is fast it takes less time without. amx, which has this
 * kernel for segments that are not for tiles, multiplies them. */
static const int integers = 0;
#define INTEGERS &integers

static const char *missing(void) {
    const char *said = getenv("CPU_ATTN_VDPBF16PS");
#ifdef EMULATED
    const char *reason = CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma);
    const int faster = 0;
#else
    const char *reason = CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512bw, CA_HAS_avx512dq, CA_HAS_avx512vl, CA_HAS_fma,
                                        CA_HAS_avx512_bf16, CA_HAS_avx512vbmi);
    const int faster = ca_cpu_is("AuthenticAMD");
#endif
    if (!reason && said && *said != '1')
        reason = "CPU_ATTN_VDPBF16PS is not 1";
    if (!reason && !said && !faster)
        reason = "VDPBF16PS is not known to beat FMA on this core";
    return reason;
}

#ifdef EMULATED
#define METHOD "VDPBF16PS emulated, for tests only"
#else
#define METHOD "VDPBF16PS, 16 lanes of two bf16 products"
#endif
#include "kernel/bf16_by_dot.h"

const ca_isa_row ca_isa_avx512_bf16 = {.missing = missing, .kernels = {[CA_BF16] = &kernel_bf16}};
