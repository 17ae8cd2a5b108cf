/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  30
 * flags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
 *
 * AVX-512 without any matrix unit: fp32 FMA over widened 16-bit elements (Skylake-X and newer, Zen 4
 * and newer). Register tile: 6 x 4 accumulators of the 32 registers, 4 for K or V, 1 to broadcast. */
#include "../cpu.h"
#include "avx512.h"

#define ISA avx512
#define METHOD "FP32 FMA, 16 lanes; 16-bit elements widened in registers"
#define MR 6
#define TALL 8
#define NG 4
#define NDV 4
#define ROWS 96
#define KEYS 256
#define FEW_KEYS 128

static const char *missing(void) {
    return CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512bw, CA_HAS_avx512dq, CA_HAS_avx512vl, CA_HAS_fma, CA_HAS_f16c);
}

#include "../kernel/kernels.inc"
