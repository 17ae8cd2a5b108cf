/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     vector
 * rank:     31
 * of:       avx512 CA_BF16
 * flags:    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mavx512bf16 -mavx512vbmi
 * emulated: -O1 -mavx2 -mfma -Wno-psabi -DEMULATED -DEMULATED_BF16
 *
 * AVX-512's bf16 kernel where VDPBF16PS is the faster product: twice FP32 FMA on Zen 4, half of it on Intel's cores
 * (468 and 234, 171 and 347 GFLOP/s of two threads, by native/probe).
 *
 * Block sizes, on one Zen 4 core (GFLOP/s of prefill-2k / prefill-64x512; the peak is 234):
 *   MR 6 NG 4, KEYS 256, ROWS 192   190 / 160      KEYS 128, ROWS 192   184 / 159
 *   the same, ROWS 96               189 / 156      KEYS 128, ROWS 96    185 / 154
 *   MR 8 NG 3 NDV 3, KEYS 128, ROWS 96, before ragged edges were multiplied whole: 168 / 141, where MR 6 gave 179 / 139
 * FEW_KEYS, decode-8x8k on two threads, of the read bandwidth: 64 0.86, 128 0.88, 192 0.84, 256 0.82.
 * Weights by v_powers, in turns with exponentials in floats: prefill-4k-d64 0.95 to 0.98 of the time, prefill-2k 0.965
 * to 0.985, decode 0.98 to 1.0; where V has scales no gain. Two, three or six rows of weights at a time: 0.99 to 1.01.
 *
 * Reads: a core gets 30 GB/s in a line. A loop of nothing but blocks of 32 KiB in random order, four products a line
 * and every line asked for 32 KiB ahead, gets 0.60 to 0.76 of that, and a sixth less with a pause of 300 dependent FMAs
 * every 64 KiB, whether lines are asked for in the pause or not. What helped decode is `arrival` of products.inc. Tried
 * before, in turns, two threads and one: four groups of V at a time, key by key, 0.93 to 1.02 of the time (other sums),
 * with K's groups two apart 0.92 to 0.99; V group by group over all columns 0.97 to 1.06, with lines asked for in the
 * order of memory 0.94 to 1.06; every line asked for twice 0.96 to 1.07. Since heads go together (attend.c): PACED_ROWS
 * 0 1.08 to 1.19, AHEAD 2 1.02 to 1.07, FEW_KEYS 256 0.98 to 1.01; NARROW_AHEAD 2 1.1 with one query head a kv head,
 * else 1.0; `arrival` in in_registers.inc 1.02 to 1.2. Of several tiles the first asks for what comes next; each for a part of
 * it, a block ahead: tree-8x8k 0.99 to 1.0, prefill 1.0 to 1.1. */
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
#define AHEAD 1
#define NARROW_AHEAD 4
#define PACED_ROWS 4
#define NHD_BYTES (512 << 10) /* 128 keys of 8 heads, as they were timed */

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

#include "kernel/attention/state.h"

#ifdef EMULATED
#define METHOD "VDPBF16PS emulated, for tests only"
#else
#define METHOD "VDPBF16PS, 16 lanes of two bf16 products"
#endif
#define STEPS "kernel/attention/dot.inc"
#define DTYPE bf16
#define ELEM uint16_t
#define DIGITS 8
#define PAIRS 1
#include "kernel/dtype.inc"

const ca_isa_row ca_isa_avx512_bf16 = {.missing = missing, .kernels = {[CA_BF16] = &kernel_bf16}};
