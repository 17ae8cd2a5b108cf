/* SPDX-License-Identifier: Apache-2.0
 * arch:  aarch64
 * unit:  vector
 * rank:  21
 * of:    neon CA_BF16
 * flags: -march=armv8.2-a+bf16
 * tuned: -fno-schedule-insns
 *
 * This is the bf16 kernel of Armv8.6's cores (Neoverse V1, V2 and N2; Apple's M2): BFMMLA multiplies two rows by two
 * keys over four dimensions, 16 products where FMA has 4, and BFDOT what is left of an odd number of rows. The Arm ARM
 * (BFMatMulAdd) defines an element of BFMMLA as two BFDOT, so a row's bits do not depend on the rows beside it.
 *
 * Both round sums to odd, and take subnormals for 0, unless FPCR.EBF is set, which this code leaves alone.
 *
 * The layout is neon's: pairs of dimensions, or of keys, of two loads become quads by ZIP1 and ZIP2, 2 instructions for
 * the products of two rows or more. A register tile takes 6 x 4 accumulators. What was tried has kernel/MEASUREMENTS.md
 * under "Arm", and neon.c why a pass of gcc's is left out. It has run under qemu only. */
#include "neon.h"

#define MR 6
#define TALL 6
#define NG 2
#define NDV 8
#define TILE_GROUPS(mr) ((mr) <= 3 ? 2 : 1)
#define TILE_VECTORS(mr) ((mr) <= 3 ? 8 : 4)

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_neon, CA_HAS_bf16_arm); }

#define METHOD "BFMMLA, two rows by two keys over four dimensions"
#include "kernel/bf16_by_dot.h"

const ca_isa_row ca_isa_neon_bf16 = {.missing = missing, .kernels = {[CA_BF16] = &kernel_bf16}};
