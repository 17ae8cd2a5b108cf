/* SPDX-License-Identifier: Apache-2.0
 * This file makes the kernels of all dtypes by FP32 FMA, and the isa's ca_isa_row. The including file defines:
 *
 *   the vocabulary (simd/vocabulary.md) and the parameters of attention/parameters.h;
 *   ISA           is the isa's name, as in ca_isa_NAME.
 *   METHOD        is a string that says in words how products are formed, for `cpu-attn info`.
 *   ONLY_16_BITS  is defined by a variant, which has kernels for f16 and bf16 only (avx2_vnni.c).
 *   V_ACCUMULATE  is defined if the file has a v_accumulate of its own, V_FACTOR if it has
 *                 v_factor_at and v_add_product. */
#define MICROKERNEL "kernel/attention/fma.inc"
#define FACTOR float
/* Quantised caches are multiplied as float16 by f16's products, but not in plain C, where the conversion takes longer.
 */
#if VL > 1
#define HALVES
#endif
#include "kernel/attention/parameters.h"
#ifndef V_ACCUMULATE
INLINE vf v_accumulate(vf sum, vf a, vf b) { return v_fma(a, b, sum); }
#endif
#ifdef V_FACTOR
#define SCALAR(x) v_factor_at(&(x))
#else
#define SCALAR(x) v_set1(x)
#define v_add_product(sum, factor, x) v_accumulate(sum, factor, x)
#endif

#define DTYPE f16
#define ELEM uint16_t
#define DIGITS 11
#define PAIRS 0
#include "dtype.inc"

#ifndef ONLY_16_BITS
#define DTYPE f32
#define ELEM float
#define DIGITS 24
#define PAIRS 0
#include "dtype.inc"
#define KERNEL_F32 &kernel_f32
#include "linear/kernel/all.h"
#define LINEAR_KERNEL &linear_kernel
#else
#define KERNEL_F32 NULL
#define LINEAR_KERNEL NULL
#endif

#define DTYPE bf16
#define ELEM uint16_t
#define DIGITS 8
#define PAIRS 1
#include "dtype.inc"

const ca_isa_row GLUE(ca_isa,
                      ISA) = {.missing = missing,
                              .kernels = {[CA_F32] = KERNEL_F32, [CA_F16] = &kernel_f16, [CA_BF16] = &kernel_bf16},
                              .linear = LINEAR_KERNEL};
