/* SPDX-License-Identifier: Apache-2.0
 * AVX-512's intrinsics (F, BW, DQ, VL) that avx512.h uses, in those of AVX2, FMA and F16C, after Intel's SDM (vol. 2).
 * For tests: every machine with AVX2 runs the kernels of avx512 so. A vector is two halves in a struct: gcc 12 copies
 * its own vectors of 64 bytes through the stack where there are no registers for them, and register tiles then take
 * five times as long. tests/emulation holds each of them against a plain definition. */
#ifndef CPU_ATTN_AVX512_EMULATION_H
#define CPU_ATTN_AVX512_EMULATION_H
#include "kernel/simd/inline.h"
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#error "the emulation is for files that are compiled without AVX-512"
#endif

typedef struct emulated_floats {
    __m256 h[2];
} emulated_floats;
typedef struct emulated_ints {
    __m256i h[2];
} emulated_ints;
#define __m512 emulated_floats
#define __m512i emulated_ints

/* Each name has one function, emulated_NAME, and _mm512_NAME means it. */
#define EMULATE_1(to, name, from, half)                                                                                \
    INLINE to emulated_##name(from a) { return (to){{half(a.h[0]), half(a.h[1])}}; }
#define EMULATE_2(type, name, half)                                                                                    \
    INLINE type emulated_##name(type a, type b) { return (type){{half(a.h[0], b.h[0]), half(a.h[1], b.h[1])}}; }
#define EMULATE_3(type, name, half)                                                                                    \
    INLINE type emulated_##name(type a, type b, type c) {                                                              \
        return (type){{half(a.h[0], b.h[0], c.h[0]), half(a.h[1], b.h[1], c.h[1])}};                                   \
    }
#define EMULATE_SHIFT(name, half)                                                                                      \
    INLINE __m512i emulated_##name(__m512i a, int n) { return (__m512i){{half(a.h[0], n), half(a.h[1], n)}}; }
#define EMULATE_SET(type, name, from, half)                                                                            \
    INLINE type emulated_##name(from x) { return (type){{half(x), half(x)}}; }

/* ---- lane by lane, or within 128 bits: what AVX2 has for half of them ---- */

EMULATE_2(__m512, add_ps, _mm256_add_ps)
EMULATE_2(__m512, sub_ps, _mm256_sub_ps)
EMULATE_2(__m512, mul_ps, _mm256_mul_ps)
EMULATE_2(__m512, div_ps, _mm256_div_ps)
EMULATE_2(__m512, min_ps, _mm256_min_ps)
EMULATE_2(__m512, max_ps, _mm256_max_ps)
EMULATE_2(__m512, unpacklo_ps, _mm256_unpacklo_ps)
EMULATE_2(__m512, unpackhi_ps, _mm256_unpackhi_ps)
EMULATE_2(__m512, and_ps, _mm256_and_ps)
EMULATE_2(__m512, or_ps, _mm256_or_ps)
EMULATE_3(__m512, fmadd_ps, _mm256_fmadd_ps)
EMULATE_3(__m512, fnmadd_ps, _mm256_fnmadd_ps)
EMULATE_2(__m512i, add_epi32, _mm256_add_epi32)
EMULATE_2(__m512i, add_epi16, _mm256_add_epi16)
EMULATE_2(__m512i, sub_epi8, _mm256_sub_epi8)
EMULATE_2(__m512i, sub_epi16, _mm256_sub_epi16)
EMULATE_2(__m512i, sub_epi32, _mm256_sub_epi32)
EMULATE_2(__m512i, and_si512, _mm256_and_si256)
EMULATE_2(__m512i, or_si512, _mm256_or_si256)
EMULATE_2(__m512i, max_epu32, _mm256_max_epu32)
EMULATE_2(__m512i, min_epu16, _mm256_min_epu16)
EMULATE_2(__m512i, madd_epi16, _mm256_madd_epi16)
EMULATE_2(__m512i, packs_epi16, _mm256_packs_epi16)
EMULATE_2(__m512i, packus_epi16, _mm256_packus_epi16)
EMULATE_2(__m512i, packs_epi32, _mm256_packs_epi32)
EMULATE_2(__m512i, packus_epi32, _mm256_packus_epi32)
EMULATE_2(__m512i, shuffle_epi8, _mm256_shuffle_epi8)
EMULATE_2(__m512i, unpacklo_epi8, _mm256_unpacklo_epi8)
EMULATE_2(__m512i, unpackhi_epi8, _mm256_unpackhi_epi8)
EMULATE_2(__m512i, unpacklo_epi32, _mm256_unpacklo_epi32)
EMULATE_2(__m512i, unpackhi_epi32, _mm256_unpackhi_epi32)
EMULATE_2(__m512i, unpacklo_epi64, _mm256_unpacklo_epi64)
EMULATE_2(__m512i, unpackhi_epi64, _mm256_unpackhi_epi64)
EMULATE_SHIFT(slli_epi32, _mm256_slli_epi32)
EMULATE_SHIFT(srli_epi32, _mm256_srli_epi32)
EMULATE_SHIFT(slli_epi16, _mm256_slli_epi16)
EMULATE_SHIFT(srli_epi16, _mm256_srli_epi16)
EMULATE_SHIFT(srai_epi16, _mm256_srai_epi16)
EMULATE_1(__m512i, cvtps_epi32, __m512, _mm256_cvtps_epi32)
EMULATE_1(__m512, sqrt_ps, __m512, _mm256_sqrt_ps)
EMULATE_1(__m512, cvtepi32_ps, __m512i, _mm256_cvtepi32_ps)
EMULATE_1(__m512, castsi512_ps, __m512i, _mm256_castsi256_ps)
EMULATE_1(__m512i, castps_si512, __m512, _mm256_castps_si256)
EMULATE_SET(__m512, set1_ps, float, _mm256_set1_ps)
EMULATE_SET(__m512i, set1_epi32, int32_t, _mm256_set1_epi32)
EMULATE_SET(__m512i, set1_epi16, int16_t, _mm256_set1_epi16)
EMULATE_SET(__m512i, set1_epi8, int8_t, _mm256_set1_epi8)
EMULATE_SET(__m512i, broadcast_i32x4, __m128i, _mm256_broadcastsi128_si256)
#define _mm512_add_ps emulated_add_ps
#define _mm512_sub_ps emulated_sub_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_div_ps emulated_div_ps
#define _mm512_min_ps emulated_min_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_unpacklo_ps emulated_unpacklo_ps
#define _mm512_unpackhi_ps emulated_unpackhi_ps
#define _mm512_and_ps emulated_and_ps
#define _mm512_or_ps emulated_or_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_fnmadd_ps emulated_fnmadd_ps
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_add_epi16 emulated_add_epi16
#define _mm512_sub_epi8 emulated_sub_epi8
#define _mm512_sub_epi16 emulated_sub_epi16
#define _mm512_sub_epi32 emulated_sub_epi32
#define _mm512_and_si512 emulated_and_si512
#define _mm512_or_si512 emulated_or_si512
#define _mm512_max_epu32 emulated_max_epu32
#define _mm512_min_epu16 emulated_min_epu16
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_packs_epi16 emulated_packs_epi16
#define _mm512_packus_epi16 emulated_packus_epi16
#define _mm512_packs_epi32 emulated_packs_epi32
#define _mm512_packus_epi32 emulated_packus_epi32
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_unpacklo_epi8 emulated_unpacklo_epi8
#define _mm512_unpackhi_epi8 emulated_unpackhi_epi8
#define _mm512_unpacklo_epi32 emulated_unpacklo_epi32
#define _mm512_unpackhi_epi32 emulated_unpackhi_epi32
#define _mm512_unpacklo_epi64 emulated_unpacklo_epi64
#define _mm512_unpackhi_epi64 emulated_unpackhi_epi64
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_srli_epi32 emulated_srli_epi32
#define _mm512_slli_epi16 emulated_slli_epi16
#define _mm512_srli_epi16 emulated_srli_epi16
#define _mm512_srai_epi16 emulated_srai_epi16
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_sqrt_ps emulated_sqrt_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_castsi512_ps emulated_castsi512_ps
#define _mm512_castps_si512 emulated_castps_si512
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_epi16 emulated_set1_epi16
#define _mm512_set1_epi8 emulated_set1_epi8
#define _mm512_broadcast_i32x4 emulated_broadcast_i32x4

INLINE __m512 emulated_abs_ps(__m512 x) {
    return emulated_and_ps(x, emulated_castsi512_ps(emulated_set1_epi32(0x7fffffff)));
}
/* The immediate's upper half, the number of fraction bits, has to be 0. */
#define _mm512_roundscale_ps(x, how)                                                                                   \
    ((__m512){{_mm256_round_ps((x).h[0], (how) & 15), _mm256_round_ps((x).h[1], (how) & 15)}})
INLINE __m512i emulated_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int truth) {
    const __m512i ones = emulated_set1_epi32(-1);
    __m512i r = emulated_set1_epi32(0);
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 8; i++) /* the row of the table where the bits of a, b and c are those of i */
            if (truth >> i & 1) {
                __m256i x = i & 4 ? a.h[j] : _mm256_xor_si256(a.h[j], ones.h[j]);
                x = _mm256_and_si256(x, i & 2 ? b.h[j] : _mm256_xor_si256(b.h[j], ones.h[j]));
                x = _mm256_and_si256(x, i & 1 ? c.h[j] : _mm256_xor_si256(c.h[j], ones.h[j]));
                r.h[j] = _mm256_or_si256(r.h[j], x);
            }
    return r;
}
#define _mm512_abs_ps emulated_abs_ps
#define _mm512_ternarylogic_epi32 emulated_ternarylogic_epi32
#define _mm512_setzero_ps() emulated_set1_ps(0)

/* ---- masks ---- */

/* All bits of a lane are set if the mask has one: of 16 lanes of 32 bits, or of 16 lanes of 16 bits, which are half
 * a register. */
INLINE __m512i emulated_lanes_32(__mmask16 k) {
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    const __m256i all = _mm256_set1_epi32(k);
    return (__m512i){
        {_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low), _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)}};
}
INLINE __m256i emulated_lanes_16(__mmask16 k) {
    const __m256i bit =
        _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, (int16_t)32768);
    return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((int16_t)k), bit), bit);
}
/* Returns the upper bits of lanes as a mask. */
INLINE __mmask16 emulated_mask_16(__m256i x) {
    x = _mm256_permute4x64_epi64(_mm256_packs_epi16(x, _mm256_setzero_si256()), 0xd8);
    return (__mmask16)_mm256_movemask_epi8(x);
}
INLINE __mmask16 emulated_mask_32(__m256 low, __m256 high) {
    return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
#define _mm512_cmp_ps_mask(a, b, how) emulated_compare((a), (b), how)
#define emulated_compare(a, b, how)                                                                                    \
    emulated_mask_32(_mm256_cmp_ps((a).h[0], (b).h[0], how), _mm256_cmp_ps((a).h[1], (b).h[1], how))
INLINE __mmask32 emulated_test_epi16_mask(__m512i a, __m512i b) {
    __mmask32 none = 0;
    for (int j = 0; j < 2; j++) {
        __m256i x = _mm256_cmpeq_epi16(_mm256_and_si256(a.h[j], b.h[j]), _mm256_setzero_si256());
        none |= (__mmask32)emulated_mask_16(x) << 16 * j;
    }
    return ~none;
}
INLINE __mmask64 emulated_movepi8_mask(__m512i a) {
    return (__mmask64)(uint32_t)_mm256_movemask_epi8(a.h[0]) | (__mmask64)_mm256_movemask_epi8(a.h[1]) << 32;
}
INLINE __mmask16 emulated_256_cmpeq_epi16_mask(__m256i a, __m256i b) {
    return emulated_mask_16(_mm256_cmpeq_epi16(a, b));
}

INLINE __m512i emulated_mask_blend_epi32(__mmask16 k, __m512i no, __m512i yes) {
    const __m512i lanes = emulated_lanes_32(k);
    return (__m512i){
        {_mm256_blendv_epi8(no.h[0], yes.h[0], lanes.h[0]), _mm256_blendv_epi8(no.h[1], yes.h[1], lanes.h[1])}};
}
INLINE __m512 emulated_mask_blend_ps(__mmask16 k, __m512 no, __m512 yes) {
    return emulated_castsi512_ps(emulated_mask_blend_epi32(k, emulated_castps_si512(no), emulated_castps_si512(yes)));
}
INLINE __m512 emulated_maskz_mul_ps(__mmask16 k, __m512 a, __m512 b) {
    return emulated_mask_blend_ps(k, emulated_set1_ps(0), emulated_mul_ps(a, b));
}
INLINE __m512 emulated_maskz_fmadd_ps(__mmask16 k, __m512 a, __m512 b, __m512 c) {
    return emulated_mask_blend_ps(k, emulated_set1_ps(0), emulated_fmadd_ps(a, b, c));
}
INLINE __m256i emulated_256_mask_blend_epi16(__mmask16 k, __m256i no, __m256i yes) {
    return _mm256_blendv_epi8(no, yes, emulated_lanes_16(k));
}
INLINE __m512i emulated_mask_mov_epi16(__m512i no, __mmask32 k, __m512i yes) {
    return (__m512i){{emulated_256_mask_blend_epi16((__mmask16)k, no.h[0], yes.h[0]),
                      emulated_256_mask_blend_epi16((__mmask16)(k >> 16), no.h[1], yes.h[1])}};
}
/* Each byte looks for its bit of the mask in one of eight bytes. */
INLINE __m512i emulated_mask_sub_epi8(__m512i no, __mmask64 k, __m512i a, __m512i b) {
    const __m256i which = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                           3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m512i yes = emulated_sub_epi8(a, b);
    __m512i x;
    for (int j = 0; j < 2; j++) {
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)(k >> 32 * j)), which);
        const __m256i lanes = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
        x.h[j] = _mm256_blendv_epi8(no.h[j], yes.h[j], lanes);
    }
    return x;
}
INLINE __m512i emulated_mask_sub_epi16(__m512i no, __mmask32 k, __m512i a, __m512i b) {
    return emulated_mask_mov_epi16(no, k, emulated_sub_epi16(a, b));
}
#define _mm512_test_epi16_mask emulated_test_epi16_mask
#define _mm512_movepi8_mask emulated_movepi8_mask
#define _mm256_cmpeq_epi16_mask emulated_256_cmpeq_epi16_mask
#define _mm512_mask_blend_epi32 emulated_mask_blend_epi32
#define _mm512_mask_blend_ps emulated_mask_blend_ps
#define _mm512_maskz_mul_ps emulated_maskz_mul_ps
#define _mm512_maskz_fmadd_ps emulated_maskz_fmadd_ps
#define _mm256_mask_blend_epi16 emulated_256_mask_blend_epi16
#define _mm512_mask_mov_epi16 emulated_mask_mov_epi16
#define _mm512_mask_sub_epi8 emulated_mask_sub_epi8
#define _mm512_mask_sub_epi16 emulated_mask_sub_epi16

/* ---- memory; what a mask leaves out is neither read nor written ---- */

INLINE __m512 emulated_loadu_ps(const void *p) {
    const float *x = p;
    return (__m512){{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}};
}
INLINE void emulated_storeu_ps(void *p, __m512 x) {
    _mm256_storeu_ps(p, x.h[0]);
    _mm256_storeu_ps((float *)p + 8, x.h[1]);
}
INLINE __m512i emulated_loadu_si512(const void *p) { return emulated_castps_si512(emulated_loadu_ps(p)); }
INLINE void emulated_storeu_si512(void *p, __m512i x) { emulated_storeu_ps(p, emulated_castsi512_ps(x)); }
INLINE void emulated_stream_si512(void *p, __m512i x) {
    _mm256_stream_si256(p, x.h[0]);
    _mm256_stream_si256((__m256i *)p + 1, x.h[1]);
}
INLINE __m512i emulated_maskz_loadu_epi32(__mmask16 k, const void *p) {
    const __m512i lanes = emulated_lanes_32(k);
    return (__m512i){{_mm256_maskload_epi32(p, lanes.h[0]), _mm256_maskload_epi32((const int *)p + 8, lanes.h[1])}};
}
INLINE __m512 emulated_maskz_loadu_ps(__mmask16 k, const void *p) {
    return emulated_castsi512_ps(emulated_maskz_loadu_epi32(k, p));
}
INLINE void emulated_mask_storeu_ps(void *p, __mmask16 k, __m512 x) {
    const __m512i lanes = emulated_lanes_32(k);
    _mm256_maskstore_ps(p, lanes.h[0], x.h[0]);
    _mm256_maskstore_ps((float *)p + 8, lanes.h[1], x.h[1]);
}
INLINE __m256i emulated_256_maskz_loadu_epi32(__mmask8 k, const void *p) {
    return _mm256_maskload_epi32(p, emulated_lanes_32(k).h[0]);
}
/* AVX2 has no masks for elements of less than 32 bits. */
#define EMULATE_LOAD(name, vector, mask, element)                                                                      \
    INLINE vector emulated_##name(mask k, const void *p) {                                                             \
        element x[sizeof(vector) / sizeof(element)] = {0};                                                             \
        for (int i = 0; i < (int)(sizeof x / sizeof *x); i++)                                                          \
            if (k >> i & 1)                                                                                            \
                memcpy(x + i, (const element *)p + i, sizeof *x);                                                      \
        vector r;                                                                                                      \
        memcpy(&r, x, sizeof r);                                                                                       \
        return r;                                                                                                      \
    }
#define EMULATE_STORE(name, vector, mask, element)                                                                     \
    INLINE void emulated_##name(void *p, mask k, vector r) {                                                           \
        element x[sizeof(vector) / sizeof(element)];                                                                   \
        memcpy(x, &r, sizeof x);                                                                                       \
        for (int i = 0; i < (int)(sizeof x / sizeof *x); i++)                                                          \
            if (k >> i & 1)                                                                                            \
                memcpy((element *)p + i, x + i, sizeof *x);                                                            \
    }
EMULATE_LOAD(128_maskz_loadu_epi8, __m128i, __mmask16, uint8_t)
EMULATE_LOAD(256_maskz_loadu_epi8, __m256i, __mmask32, uint8_t)
EMULATE_LOAD(256_maskz_loadu_epi16, __m256i, __mmask16, uint16_t)
EMULATE_STORE(256_mask_storeu_epi16, __m256i, __mmask16, uint16_t)
EMULATE_STORE(mask_storeu_epi16, __m512i, __mmask32, uint16_t)
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_storeu_si512 emulated_storeu_si512
#define _mm512_stream_si512 emulated_stream_si512
#define _mm512_maskz_loadu_epi32 emulated_maskz_loadu_epi32
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm256_maskz_loadu_epi32 emulated_256_maskz_loadu_epi32
#define _mm_maskz_loadu_epi8 emulated_128_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi8 emulated_256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi16 emulated_256_maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 emulated_256_mask_storeu_epi16
#define _mm512_mask_storeu_epi16 emulated_mask_storeu_epi16

/* ---- halves, widths ---- */

INLINE __m512i emulated_of_halves(__m256i low, __m256i high) { return (__m512i){{low, high}}; }
INLINE __m256i emulated_of_quarters(__m128i low, __m128i high) { return _mm256_set_m128i(high, low); }
INLINE __m128i emulated_quarter(__m256i x, int upper) {
    return upper ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x);
}
INLINE __m512i emulated_zextsi256_si512(__m256i x) { return emulated_of_halves(x, _mm256_setzero_si256()); }
INLINE __m512i emulated_inserti64x4(__m512i x, __m256i half, int upper) {
    return upper ? emulated_of_halves(x.h[0], half) : emulated_of_halves(half, x.h[1]);
}
#define EMULATE_WIDEN(name, half)                                                                                      \
    INLINE __m512i emulated_##name(__m256i x) {                                                                        \
        return emulated_of_halves(half(emulated_quarter(x, 0)), half(emulated_quarter(x, 1)));                         \
    }
EMULATE_WIDEN(cvtepu8_epi16, _mm256_cvtepu8_epi16)
EMULATE_WIDEN(cvtepu16_epi32, _mm256_cvtepu16_epi32)
EMULATE_WIDEN(cvtepi16_epi32, _mm256_cvtepi16_epi32)
/* Returns the lower halves of lanes. Packing alternates between 64 bits of each half. */
INLINE __m256i emulated_cvtepi32_epi16(__m512i x) {
    x = emulated_and_si512(x, emulated_set1_epi32(0xffff));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.h[0], x.h[1]), 0xd8);
}
INLINE __m128i emulated_cvtepi32_epi8(__m512i x) {
    const __m256i words = emulated_cvtepi32_epi16(emulated_and_si512(x, emulated_set1_epi32(0xff)));
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
INLINE __m256i emulated_cvtepi16_epi8(__m512i x) {
    x = emulated_and_si512(x, emulated_set1_epi16(0xff));
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(x.h[0], x.h[1]), 0xd8);
}
INLINE __m512 emulated_cvtph_ps(__m256i x) {
    return (__m512){{_mm256_cvtph_ps(emulated_quarter(x, 0)), _mm256_cvtph_ps(emulated_quarter(x, 1))}};
}
#define _mm512_castsi256_si512 emulated_zextsi256_si512 /* the upper half may be anything */
#define _mm512_zextsi256_si512 emulated_zextsi256_si512
#define _mm512_inserti64x4 emulated_inserti64x4
#define _mm512_cvtepu8_epi16 emulated_cvtepu8_epi16
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi16_epi32 emulated_cvtepi16_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi16_epi8 emulated_cvtepi16_epi8
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(x, how) emulated_of_quarters(_mm256_cvtps_ph((x).h[0], how), _mm256_cvtps_ph((x).h[1], how))

/* ---- permutations, element by element ---- */

/* Elements come from one table (t elements), or from two, one after the other. */
#define EMULATE_PERMUTE(bits, element)                                                                                 \
    INLINE __m512i emulated_permutex2var_epi##bits(__m512i a, __m512i index, __m512i b) {                              \
        enum { n = 512 / bits };                                                                                       \
        element table[2 * n], i[n], r[n];                                                                              \
        memcpy(table, &a, sizeof a);                                                                                   \
        memcpy(table + n, &b, sizeof b);                                                                               \
        memcpy(i, &index, sizeof i);                                                                                   \
        for (int j = 0; j < n; j++)                                                                                    \
            r[j] = table[i[j] % (2 * n)];                                                                              \
        memcpy(&a, r, sizeof a);                                                                                       \
        return a;                                                                                                      \
    }                                                                                                                  \
    INLINE __m512i emulated_permutexvar_epi##bits(__m512i index, __m512i x) {                                          \
        return emulated_permutex2var_epi##bits(x, index, x);                                                           \
    }
EMULATE_PERMUTE(16, uint16_t)
EMULATE_PERMUTE(32, uint32_t)
EMULATE_PERMUTE(64, uint64_t)
INLINE __m512i emulated_mask_permutexvar_epi16(__m512i no, __mmask32 k, __m512i index, __m512i x) {
    return emulated_mask_mov_epi16(no, k, emulated_permutexvar_epi16(index, x));
}
#define _mm512_mask_permutexvar_epi16 emulated_mask_permutexvar_epi16
#define _mm512_permutex2var_epi16 emulated_permutex2var_epi16
#define _mm512_permutex2var_epi64 emulated_permutex2var_epi64
#define _mm512_permutexvar_epi16 emulated_permutexvar_epi16
#define _mm512_permutexvar_epi32 emulated_permutexvar_epi32
#define _mm512_permutexvar_epi64 emulated_permutexvar_epi64

#define _mm512_permute_ps(x, how) ((__m512){{_mm256_permute_ps((x).h[0], how), _mm256_permute_ps((x).h[1], how)}})
INLINE __m512 emulated_shuffle_f32x4(__m512 a, __m512 b, int how) {
    const __m128 from[2][4] = {{_mm256_castps256_ps128(a.h[0]), _mm256_extractf128_ps(a.h[0], 1),
                                _mm256_castps256_ps128(a.h[1]), _mm256_extractf128_ps(a.h[1], 1)},
                               {_mm256_castps256_ps128(b.h[0]), _mm256_extractf128_ps(b.h[0], 1),
                                _mm256_castps256_ps128(b.h[1]), _mm256_extractf128_ps(b.h[1], 1)}};
    return (__m512){{_mm256_set_m128(from[0][how >> 2 & 3], from[0][how & 3]),
                     _mm256_set_m128(from[1][how >> 6 & 3], from[1][how >> 4 & 3])}};
}
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4

INLINE __m512 emulated_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h, float i, float j,
                               float k, float l, float m, float n, float o, float p) {
    return (__m512){{_mm256_setr_ps(a, b, c, d, e, f, g, h), _mm256_setr_ps(i, j, k, l, m, n, o, p)}};
}
INLINE __m512 emulated_setr4_ps(float a, float b, float c, float d) {
    return emulated_setr_ps(a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d);
}
INLINE __m512i emulated_setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g,
                                   int64_t h) {
    return emulated_of_halves(_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h));
}
#undef _mm512_setr_ps
#undef _mm512_setr4_ps
#undef _mm512_setr_epi64
#define _mm512_setr_ps emulated_setr_ps
#define _mm512_setr4_ps emulated_setr4_ps
#define _mm512_setr_epi64 emulated_setr_epi64

/* ---- over the lanes: no instructions, but gcc's order, half against half ---- */

#define EMULATE_REDUCE(name, from, vector, element, half, quarter, extract)                                            \
    INLINE element emulated_reduce_##name(from x) {                                                                    \
        vector y = extract(half(x.h[1], x.h[0]), 1), z = extract(half(x.h[1], x.h[0]), 0);                             \
        element r[4];                                                                                                  \
        y = quarter(y, z);                                                                                             \
        y = quarter(y, emulated_turn_##name(y, 0x4e));                                                                 \
        y = quarter(y, emulated_turn_##name(y, 0x11));                                                                 \
        memcpy(r, &y, sizeof r);                                                                                       \
        return r[0];                                                                                                   \
    }
#define emulated_turn_add_ps(x, how) _mm_shuffle_ps(x, x, how)
#define emulated_turn_max_ps(x, how) _mm_shuffle_ps(x, x, how)
#define emulated_turn_add_epi32(x, how) _mm_shuffle_epi32(x, how)
#define emulated_turn_max_epu32(x, how) _mm_shuffle_epi32(x, how)
EMULATE_REDUCE(add_ps, __m512, __m128, float, _mm256_add_ps, _mm_add_ps, _mm256_extractf128_ps)
EMULATE_REDUCE(max_ps, __m512, __m128, float, _mm256_max_ps, _mm_max_ps, _mm256_extractf128_ps)
EMULATE_REDUCE(add_epi32, __m512i, __m128i, int32_t, _mm256_add_epi32, _mm_add_epi32, _mm256_extracti128_si256)
EMULATE_REDUCE(max_epu32, __m512i, __m128i, uint32_t, _mm256_max_epu32, _mm_max_epu32, _mm256_extracti128_si256)
INLINE float emulated_cvtss_f32(__m512 x) { return _mm256_cvtss_f32(x.h[0]); }
#define _mm512_reduce_add_ps emulated_reduce_add_ps
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_reduce_add_epi32 emulated_reduce_add_epi32
#define _mm512_reduce_max_epu32 emulated_reduce_max_epu32
#define _mm512_cvtss_f32 emulated_cvtss_f32

/* ---- arithmetic that AVX2 has nothing like ---- */

/* Returns 1 / x cut off after 14 bits of fraction, which is as far off as 2^-14 allows: cores differ in the bits of
 * theirs. */
INLINE __m512 emulated_rcp14_ps(__m512 x) {
    __m512i r = emulated_castps_si512(emulated_div_ps(emulated_set1_ps(1), x));
    return emulated_castsi512_ps(emulated_and_si512(r, emulated_set1_epi32(-512)));
}
#define _mm512_rcp14_ps emulated_rcp14_ps
#endif
