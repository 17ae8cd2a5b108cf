/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     matrix
 * rank:     40
 * flags:    -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mavx512bf16 -mavx512vbmi -mamx-tile -mamx-bf16 -mamx-int8
 * emulated: -O1 -mavx2 -mfma -mf16c -Wno-psabi -DEMULATED -DEMULATED_BF16
 *
 * This isa multiplies bf16 by TDPBF16PS (Sapphire Rapids and newer), with AVX-512's softmax, in the layout of avx512's
 * bf16 caches. `cpu-attn verify` passed on an Emerald Rapids (kernel/README.md). Caches of integers go through these
 * tiles where there are more than CA_FEW_ROWS rows, else by TDPBSSD (amx/bytes.h) or through the kernel of
 * avx512_bf16.c. Prompts in f16 and f32 go by the same tiles, in parts (amx/floats.h); all else in these dtypes is
 * avx512's. */
#include "cpu/cpu.h"
#include "avx512.h"
#include "kernel/amx/tiles.h"

static const char *missing(void) {
#ifdef EMULATED
    const char *reason = CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma, CA_HAS_f16c);
#else
    const char *reason = CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512bw, CA_HAS_avx512dq, CA_HAS_avx512vl, CA_HAS_fma,
                                        CA_HAS_f16c, CA_HAS_amx_tile, CA_HAS_amx_bf16, CA_HAS_amx_int8,
                                        CA_HAS_avx512_bf16, CA_HAS_avx512vbmi, CA_HAS_avx512_vnni);
    if (!reason && ca_cpu_amx_permission(&reason) == 1)
        reason = NULL;
#endif
    return reason;
}

/* These are the sizes of tiles of vector registers, of which amx/attention.h has none. */
#define MR 6
#define TALL 8
#define NG 4
#define NDV 4

/* ROWS, KEYS and BLOCK_KEYS were found on an Emerald Rapids (MEASUREMENTS.md: AMX). */
#define ROWS 512
#define KEYS 256
#define BLOCK_KEYS 1024
#define FEW_KEYS 128

#define TILES
#include "kernel/bf16_by_dot.h"

#include "kernel/amx/attention.h"
#include "kernel/amx/floats.h"
#include "linear/kernel/all.h"

const ca_isa_row ca_isa_amx = {
    .missing = missing,
    .kernels = {[CA_F32] = &kernel_amx_float, [CA_F16] = &kernel_amx_float, [CA_BF16] = &kernel_amx},
    .rest = &ca_isa_avx512,
    .linear = &linear_kernel};
