/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     vector
 * rank:     30
 * flags:    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
 * guarded:  -mavx512vnni
 * emulated: -O1 -mavx2 -mfma -mf16c -Wno-psabi -DEMULATED
 *
 * AVX-512 without any matrix unit: fp32 FMA over widened 16-bit elements (Skylake-X and newer, Zen 4
 * and newer). Register tile: 6 x 4 accumulators of the 32 registers, 4 for K or V, 1 to broadcast.
 *
 * One thread of a shared Cascade Lake, of the limits of the same run (FMA 150 GFLOP/s, reads 11 GB/s, memcpy 4.7 GB/s):
 *   prefill-2k / 8k        bfloat16 0.58 / 0.61, float32 0.55 / 0.56; over fp8_e4m3 0.93 of bfloat16's speed
 *   decode                 8x8k 0.82 to 0.84, float32 0.90, 16x4k-mha 0.90 to 0.92
 *   plain caches           HND 0.82 / 0.84, NHD 0.72 / 0.62 of packed's speed (8x8k / 16x4k-mha), 0.68 with 32 kv heads
 *   tree-16x4k-mha         1.28 times decode-16x4k-mha; write-8k bfloat16 0.89, fp8_e4m3 0.64
 * Two threads in calm minutes: docs/performance.md. Tried there, each against what is below, in turns with it:
 *   register tiles, scores alone, of FMA's peak in the same millisecond (median): 6 x 4 0.72, 8 x 3 0.69, 9 x 3 0.67,
 *   12 x 2 and 14 x 2 0.65, with {1to16} operands 0.43 to 0.68; whether K lay in L1 or in L2 made no difference
 *   prefetch in decode-8x8k: none 0.69, into L1 0.89, every second line 0.88, huge pages 1.01 to 1.04
 *   ROWS 192, and accumulators that gcc 12 must not move (a few of 24 spill), by VFMADD231PS in asm: nothing that the
 *   noise of the machine would not cover
 *   FEW_KEYS 256, not 128: 1 to 3 % off every decode but NHD's
 *   NHD decode-8x8k, all heads together, each fetching its share of all rows: by 128 keys 52 ms, by 64 45 ms, and 58 ms
 *   where the share is fetched as rows are packed, not by the products (each head its own rows: 64 ms). By as many keys
 *   as are 256 KiB for all heads, one call for all of them: 39 to 36.5 ms; 4x4k of 16 / 32 kv heads by 64 keys 20.8 /
 *   64, by 32 18.8 / 42, so 18.5 / 36. Half of pages there: 53 ms by 64 keys, by 16 3 % less than all
 *
 * What is asked for: a core of this kind waits for 12 lines at a time, asked for or read, 7.6 GB/s of 4 KiB pages in
 * random order. Reads alone bring 10.9 of them and 12.2 in a line, because what the hardware fetches behind a few reads
 * of a page does not count among the 12. So the products ask for the first half of a page, evenly, a step ahead:
 * against all of it two steps ahead decode takes 0.96 of the time in bfloat16, 0.92 in float32, 0.95 over fp8. Half of
 * every group of 2 KiB instead, where two share a page: 1.09 of the time in decode-8x8k-d64, 1.04 to 1.14 over fp8; but
 * alone in a block of 16 tokens half of them is best, too. A quarter, the half at once, half of every KiB or of groups
 * of 1 KiB: slower than all.
 *
 * Narrow caches: kernel/halves.h; int8 and int4 of 16-bit dtypes, with AVX512_VNNI: kernel/integers.inc. */
#include "cpu/cpu.h"
#include "avx512.h"

#define ISA avx512
#ifdef EMULATED
#define METHOD "FP32 FMA, 16 lanes, emulated on AVX2, for tests only"
#else
#define METHOD "FP32 FMA, 16 lanes; 16-bit elements widened in registers"
#endif
#define MR 6
#define TALL 8
#define NG 4
#define NDV 4
#define ROWS 96
#define KEYS 256
#define FEW_KEYS 256
#define NHD_KEYS 64
#define AHEAD 1
#define NARROW_AHEAD (ca_cpu_intel ? 1 : 2)
#define INTEGERS_AHEAD (ca_cpu_intel ? 3 : 16)
#define PACED_ROWS (ca_cpu_intel ? 0 : 4)
#define ASK_HALF ca_cpu_intel
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
