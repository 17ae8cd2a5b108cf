/* SPDX-License-Identifier: Apache-2.0
 * arch:     x86_64
 * unit:     vector
 * rank:     21
 * of:       avx2 CA_F16 CA_BF16
 * flags:    -mavx2 -mfma -mf16c -mavxvnni
 * emulated: -mavx2 -mfma -mf16c -DEMULATED
 *
 * This variant of avx2 multiplies caches of integers by VPDPWSSD of AVX-VNNI (Alder Lake, Zen 5 and newer), one
 * instruction in place of two; all else, and every bit, is avx2's. It has never run on such a core: its speed is not
 * known. */
#define VNNI
#include "avx2.h"

#define ISA avx2_vnni
#ifdef EMULATED
#define METHOD "FP32 FMA, 8 lanes; 16-bit elements widened in registers; AVX-VNNI emulated, for tests only"
#else
#define METHOD "FP32 FMA, 8 lanes; 16-bit elements widened in registers"
#endif

static const char *missing(void) {
#ifdef EMULATED
    return CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma, CA_HAS_f16c);
#else
    return CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma, CA_HAS_f16c, CA_HAS_avx_vnni);
#endif
}

#define ONLY_16_BITS
#include "kernel/all_dtypes.h"
