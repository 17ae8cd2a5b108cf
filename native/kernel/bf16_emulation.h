/* SPDX-License-Identifier: Apache-2.0
 * The instructions of AVX512_BF16 and AVX512_VBMI that avx512.h uses, in those of AVX-512 F and BW, after Intel's SDM
 * (vol. 2), for machines that lack them. Slow: for tests. */
#include <immintrin.h>

/* Subnormals count as 0, whatever MXCSR says. */
INLINE __m512 emulated_flush(__m512 x) {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(_mm512_castps_si512(x), exponent), x);
}

/* The high halves of pairs first, then the low ones. */
INLINE __m512 emulated_dpbf16(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512 x = _mm512_castsi512_ps(_mm512_and_si512((__m512i)a, high));
    __m512 y = _mm512_castsi512_ps(_mm512_and_si512((__m512i)b, high));
    sum = emulated_flush(_mm512_fmadd_ps(emulated_flush(x), emulated_flush(y), emulated_flush(sum)));
    x = _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)a, 16));
    y = _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)b, 16));
    return emulated_flush(_mm512_fmadd_ps(emulated_flush(x), emulated_flush(y), sum));
}

/* To nearest even; NaN stays one. */
INLINE __m256i emulated_round(__m512 x) {
    __m512i u = _mm512_castps_si512(emulated_flush(x));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
INLINE __m512bh emulated_cvtne2ps(__m512 high, __m512 low) {
    return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(emulated_round(low)), emulated_round(high), 1);
}

/* Of each word the byte that its lower half asks for. */
INLINE __m512i emulated_pick(__m512i a, __m512i index, __m512i b) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i word = _mm512_permutex2var_epi16(a, _mm512_srli_epi16(index, 1), b);
    word = _mm512_srlv_epi16(word, _mm512_slli_epi16(_mm512_and_si512(index, one), 3));
    return _mm512_and_si512(word, _mm512_set1_epi16(0xff));
}
INLINE __m512i emulated_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
    const __m512i low = _mm512_and_si512(index, _mm512_set1_epi16(0x7f));
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(index, 8), _mm512_set1_epi16(0x7f));
    return _mm512_or_si512(emulated_pick(a, low, b), _mm512_slli_epi16(emulated_pick(a, high, b), 8));
}

#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps
#define _mm512_permutex2var_epi8 emulated_permutex2var_epi8
#define _mm512_permutexvar_epi8(index, x) emulated_permutex2var_epi8(x, index, x)
