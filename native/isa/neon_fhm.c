/* SPDX-License-Identifier: Apache-2.0
 * arch:  aarch64
 * unit:  vector
 * rank:  22
 * of:    neon CA_F16
 * flags: -march=armv8.2-a+fp16fml
 * tuned: -fno-schedule-insns
 *
 * This is the f16 kernel of cores with FHM (Neoverse V1, V2 and N2; Apple's M1): FMLAL and FMLAL2 multiply numbers of
 * binary16 as they lie and add their exact products in float32, 4 of them as FMLA does, without conversions, which take
 * a quarter of the products' time. A register tile takes 6 x 4 accumulators of the 32 registers, a pair of factors for
 * each row in the lower 16 registers, as a factor by lane asks for, and K or V in the rest. What was tried has
 * kernel/MEASUREMENTS.md under "Arm", and neon.c why a pass of gcc's is left out. It has run under qemu only. */
#include "neon.h"

#define MR 6
#define TALL 6
#define NG 2
#define NDV 8
#define TILE_GROUPS(mr) ((mr) <= 3 ? 2 : 1)
#define TILE_VECTORS(mr) ((mr) <= 3 ? 8 : 4)

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_neon, CA_HAS_fhm); }

#define MICROKERNEL "kernel/attention/fma_long.inc"
#define METHOD "FMLAL, products of float16 added in float32, 4 lanes"
#define FACTOR uint16_t
#define HALVES
#include "kernel/attention/parameters.h"

#define DTYPE f16
#define ELEM uint16_t
#define DIGITS 11
#define PAIRS 0
#include "kernel/dtype.inc"

const ca_isa_row ca_isa_neon_fhm = {.missing = missing, .kernels = {[CA_F16] = &kernel_f16}};
