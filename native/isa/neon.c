/* SPDX-License-Identifier: Apache-2.0
 * arch:  aarch64
 * unit:  vector
 * rank:  20
 * flags:
 * tuned: -fno-schedule-insns
 *
 * This isa is what every 64-bit Arm core has: FMA on 4 lanes, and conversions from and to binary16. A register tile
 * takes 6 x 4 accumulators of the 32 registers, and K or V and factors in the rest; a factor is one lane. gcc's first
 * pass of scheduling loads K early, and spills sums for it, so it is left out. It has run under qemu only; what a model
 * of cores says of its loops has kernel/MEASUREMENTS.md under "Arm". */
#include "neon.h"

#define ISA neon
#define METHOD "FP32 FMA, 4 lanes; 16-bit elements widened in registers"
#define MR 6
#define TALL 6
#define NG 1
#define NDV 4

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_neon); }

#include "kernel/all_dtypes.h"
