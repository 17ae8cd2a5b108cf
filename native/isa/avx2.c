/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  20
 * flags: -mavx2 -mfma -mf16c
 *
 * This isa is AVX2 with FMA and F16C (Haswell, Zen and newer). A register tile takes 6 x 2 accumulators of the 16
 * registers, 2 for K or V, and 1 to broadcast. Two FMA a cycle, each 4 cycles until its sum is there, ask for 8 sums at
 * least: of fewer rows a tile is wider. */
#include "avx2.h"

#define ISA avx2
#define METHOD "FP32 FMA, 8 lanes; 16-bit elements widened in registers"

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma, CA_HAS_f16c); }

#include "kernel/all_dtypes.h"
