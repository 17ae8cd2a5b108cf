/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  31
 * of:    avx512
 * flags: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mavx512bf16 -mavx512vbmi
 *
 * AVX-512's bf16 kernel where VDPBF16PS is the faster product: twice FP32 FMA on Zen 4, half of it on Intel's cores
 * (468 and 234, 171 and 347 GFLOP/s of two threads, by native/probe). */
#include "../cpu.h"
#include "avx512.h"
#include <stdlib.h>

#define MR 6
#define TALL 8
#define NG 4
#define NDV 4
#define ROWS 192
#define KEYS 256
#define FEW_KEYS 128

static const char *missing(void) {
    const char *said = getenv("CPU_ATTN_VDPBF16PS");
    const char *reason = CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512bw, CA_HAS_avx512dq, CA_HAS_avx512vl, CA_HAS_fma,
                                        CA_HAS_avx512_bf16, CA_HAS_avx512vbmi);
    if (!reason && !(said ? *said == '1' : ca_cpu_is("AuthenticAMD")))
        reason = "a VDPBF16PS faster than FMA";
    return reason;
}

typedef __m512bh vp;

INLINE vp v_load_pairs(const uint16_t *p) { return (vp)_mm512_loadu_si512(p); }
INLINE vp v_loadn_pairs(const uint16_t *p, int n) { return (vp)_mm512_maskz_loadu_epi32(first_lanes(n), p); }
INLINE vp v_set1_pair(const uint16_t *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return (vp)_mm512_set1_epi32(pair);
}
INLINE vp v_keep_half(vp x, int odd) {
    return (vp)_mm512_and_si512((__m512i)x, _mm512_set1_epi32(odd ? (int)0xffff0000 : 0xffff));
}
INLINE vf v_dot(vf sum, vp a, vp b) { return _mm512_dpbf16_ps(sum, a, b); }
INLINE vf v_rcp(vf x) { /* one step of Newton's */
    vf y = _mm512_rcp14_ps(x);
    return v_mul(y, _mm512_fnmadd_ps(x, y, v_set1(2.0f)));
}
INLINE vp v_round_pairs(vf a, vf b) { return _mm512_cvtne2ps_pbh(b, a); }
INLINE void v_store_pairs(uint16_t *p, vp x) { _mm512_storeu_si512(p, (__m512i)x); }

#include "../kernel/state.inc"

#define METHOD "VDPBF16PS, 16 lanes of two bf16 products"
#define STEPS "dot.inc"
#define DTYPE bf16
#define ELEM uint16_t
#define PAIRS 1
#include "../kernel/kernel.inc"

const ca_isa_row ca_isa_avx512_bf16 = {.missing = missing, .kernels = {[CA_BF16] = &kernel_bf16}};
