/* SPDX-License-Identifier: Apache-2.0
 * This file makes the kernel of bf16 by dot products of pairs, or by products of matrices (dot.inc). The including file
 * defines the vocabulary and the parameters of attention/parameters.h, and METHOD or TILES (dtype.inc). */
#define MICROKERNEL "kernel/attention/dot.inc"
#define FACTOR uint16_t
#include "kernel/attention/parameters.h"

#define DTYPE bf16
#define ELEM uint16_t
#define DIGITS 8
#define PAIRS 1
#include "kernel/dtype.inc"
