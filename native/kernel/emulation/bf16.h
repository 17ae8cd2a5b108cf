/* SPDX-License-Identifier: Apache-2.0
 * The instructions of AVX512_BF16 and AVX512_VBMI that avx512.h uses, beside emulation/avx512.h and in its way. */
#ifndef CPU_ATTN_BF16_EMULATION_H
#define CPU_ATTN_BF16_EMULATION_H
#include "avx512.h"

/* Subnormals count as 0 of their sign, whatever MXCSR says. */
INLINE __m256 emulated_flush(__m256 x) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
    const __m256i rest = _mm256_srli_epi32(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), 1);
    return _mm256_andnot_ps(_mm256_castsi256_ps(rest), x);
}
/* A sum is subnormal where its 24 bits, with an exponent without end, are less than 2^-126: what is rounded up to that
 * for want of exponents is not. */
INLINE __m256 emulated_fma_flushed(__m256 x, __m256 y, __m256 sum) {
    __m256 r = _mm256_fmadd_ps(x, y, sum);
    const __m256 sign = _mm256_set1_ps(-0.0f), size = _mm256_andnot_ps(sign, r), wide = _mm256_set1_ps(0x1p64f);
    if (_mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_EQ_OQ))) {
        __m256 more = _mm256_fmadd_ps(_mm256_mul_ps(x, wide), y, _mm256_mul_ps(sum, wide));
        more = _mm256_cmp_ps(_mm256_andnot_ps(sign, more), _mm256_set1_ps(0x1p-62f), _CMP_LT_OQ);
        r = _mm256_andnot_ps(_mm256_andnot_ps(sign, more), r);
    }
    return emulated_flush(r);
}
INLINE __m256 emulated_odd_bf16(__m256i pairs) {
    return emulated_flush(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))));
}
INLINE __m256 emulated_even_bf16(__m256i pairs) {
    return emulated_flush(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
}

/* Adds the high halves of pairs first, then the low ones. */
INLINE __m512 emulated_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
    for (int j = 0; j < 2; j++) {
        __m256 s = emulated_flush(sum.h[j]);
        s = emulated_fma_flushed(emulated_odd_bf16(a.h[j]), emulated_odd_bf16(b.h[j]), s);
        sum.h[j] = emulated_fma_flushed(emulated_even_bf16(a.h[j]), emulated_even_bf16(b.h[j]), s);
    }
    return sum;
}

/* Rounds to nearest even; NaN stays NaN. */
INLINE __m256i emulated_round_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(emulated_flush(x)), quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_srli_epi32(r, 16);
}
INLINE __m512i emulated_cvtne2ps_pbh(__m512 high, __m512 low) {
    const __m512i l = {{emulated_round_bf16(low.h[0]), emulated_round_bf16(low.h[1])}};
    const __m512i h = {{emulated_round_bf16(high.h[0]), emulated_round_bf16(high.h[1])}};
    return emulated_of_halves(emulated_cvtepi32_epi16(l), emulated_cvtepi32_epi16(h));
}

EMULATE_PERMUTE(8, uint8_t)
INLINE __m512i emulated_maskz_permutex2var_epi8(__mmask64 k, __m512i a, __m512i index, __m512i b) {
    uint8_t r[64];
    a = emulated_permutex2var_epi8(a, index, b);
    memcpy(r, &a, sizeof r);
    for (int i = 0; i < 64; i++)
        r[i] = k >> i & 1 ? r[i] : 0;
    memcpy(&a, r, sizeof r);
    return a;
}

#define __m512bh emulated_ints
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#define _mm512_permutex2var_epi8 emulated_permutex2var_epi8
#define _mm512_maskz_permutex2var_epi8 emulated_maskz_permutex2var_epi8
#define _mm512_permutexvar_epi8 emulated_permutexvar_epi8
#endif
