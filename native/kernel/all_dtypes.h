/* SPDX-License-Identifier: Apache-2.0
 * All kernels of an isa, by FP32 FMA. The including file has defined its vocabulary, what parameters.h asks for, ISA
 * (its name) and METHOD. */
#define MICROKERNEL "kernel/attention/fma.inc"
#define FACTOR float
/* Narrow caches are multiplied as float16, by its kernel: not in plain C, whose conversion takes longer. */
#if VL > 1
#define HALVES
#endif
#include "kernel/attention/parameters.h"
#ifndef V_ACCUMULATE
INLINE vf v_accumulate(vf sum, vf a, vf b) { return v_fma(a, b, sum); }
#endif

#define DTYPE f16
#define ELEM uint16_t
#define DIGITS 11
#define PAIRS 0
#include "dtype.inc"

#ifndef ONLY_16_BITS /* a variant's */
#define DTYPE f32
#define ELEM float
#define DIGITS 24
#define PAIRS 0
#include "dtype.inc"
#define KERNEL_F32 &kernel_f32
#else
#define KERNEL_F32 NULL
#endif

#define DTYPE bf16
#define ELEM uint16_t
#define DIGITS 8
#define PAIRS 1
#include "dtype.inc"

const ca_isa_row GLUE(ca_isa, ISA) = {
    .missing = missing, .kernels = {[CA_F32] = KERNEL_F32, [CA_F16] = &kernel_f16, [CA_BF16] = &kernel_bf16}};
