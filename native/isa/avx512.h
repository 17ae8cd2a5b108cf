/* SPDX-License-Identifier: Apache-2.0
 * This is the vocabulary (kernel/simd/vocabulary.md) in AVX-512 registers, for every isa file that has them. It needs
 * F, BW, DQ, VL, FMA and F16C, and uses BF16 and VBMI where the file has them; v_dot_words alone is VPDPWSSD, in
 * assembly, for files with INTEGERS. With EMULATED all of it runs on AVX2, with EMULATED_BF16 also BF16 and VBMI. */
#include "kernel/simd/inline.h"
#include <immintrin.h>
#include <math.h>
#include <string.h>
#ifdef EMULATED
#include "kernel/emulation/avx512.h"
#endif
#ifdef EMULATED_BF16
#include "kernel/emulation/bf16.h"
#endif
#if defined __AVX512BF16__ || defined EMULATED_BF16
#define HAS_BF16
#endif
#if defined __AVX512VBMI__ || defined EMULATED_BF16
#define HAS_VBMI
#endif

/* Keeps a constant in a register, where gcc would make it anew each time. */
#ifdef EMULATED
#define KEEP(where, x) ((void)0)
#else
#define KEEP(where, x) __asm__("" : where(x))
#endif

#define VL 16

typedef __m512 vf;

INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
INLINE float v_first(vf x) { return _mm512_cvtss_f32(x); }
INLINE vf v_iota(void) { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf x) { return _mm512_abs_ps(x); }
INLINE vf v_copysign(vf x, vf sign) { return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
INLINE vf v_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* vscalefps would give 2^-127, a subnormal, where the others give 0. */
INLINE vf v_scale(vf x, vf n) {
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(x, _mm512_castsi512_ps(e));
}
INLINE vf v_less(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1); }
INLINE int v_any_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
INLINE vf v_keep(vf x, int first, int end) {
    return _mm512_mask_blend_ps(first_lanes(end) & ~first_lanes(first), _mm512_set1_ps(-INFINITY), x);
}
INLINE float v_hmax(vf x) { return _mm512_reduce_max_ps(x); }
INLINE float v_hsum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE vf v_exchange(vf x, int distance) {
    return distance == 1   ? _mm512_permute_ps(x, 0xb1)
           : distance == 2 ? _mm512_permute_ps(x, 0x4e)
           : distance == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                           : _mm512_shuffle_f32x4(x, x, 0x4e);
}

INLINE vf v_load_f32(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf v_loadn_f32(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE void v_storen_f32(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE vf v_loadn_f16(const uint16_t *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
INLINE void v_storen_f16(uint16_t *p, vf x, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vf widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE vf v_load_bf16(const uint16_t *p) { return widen_bf16(_mm256_loadu_si256((const void *)p)); }
INLINE vf v_loadn_bf16(const uint16_t *p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
INLINE vf even_half(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE vf odd_half(__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000))); }
INLINE vf v_even_bf16(const uint16_t *p) { return even_half(_mm512_loadu_si512(p)); }
INLINE vf v_odd_bf16(const uint16_t *p) { return odd_half(_mm512_loadu_si512(p)); }
INLINE vf v_evenn_bf16(const uint16_t *p, int n) { return even_half(_mm512_maskz_loadu_epi32(first_lanes(n), p)); }
INLINE vf v_oddn_bf16(const uint16_t *p, int n) { return odd_half(_mm512_maskz_loadu_epi32(first_lanes(n), p)); }
/* Rounds to nearest even by integers, because VCVTNEPS2BF16 would flush subnormals. NaN becomes the quiet NaN. */
INLINE void v_storen_bf16(uint16_t *p, vf x, int n) {
    __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), r, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtepi32_epi16(r));
}

/* ---- words of quantised caches ---- */

typedef __m512i vi;
INLINE vi v_look_up(const uint8_t *table, vi x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), x);
}

INLINE void v_put_bytes(uint8_t *p, vf x) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(x))); }

/* ---- words of integers.h ---- */

#define INTEGERS_BY "VPDPWSSD"
INLINE vi v_set1_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi v_set1_words(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}
INLINE vf v_float(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE int32_t v_hsum_int(vi x) { return _mm512_reduce_add_epi32(x); }
INLINE vi v_top(vi top, vf x) { return _mm512_max_epu32(top, _mm512_castps_si512(x)); }
INLINE uint32_t v_htop(vi x) { return _mm512_reduce_max_epu32(x); }
INLINE vf v_mul_unless_0(vf x, vf factor) {
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), x, factor);
}
INLINE vi v_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)p)); }
INLINE vi v_int8(vi x) {
    return _mm512_mask_sub_epi16(x, _mm512_test_epi16_mask(x, _mm512_set1_epi16(128)), _mm512_set1_epi16(128), x);
}
INLINE vi v_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi v_halves_of_bytes(vi x, int upper) {
    return upper ? _mm512_srli_epi16(x, 4) : _mm512_and_si512(x, _mm512_set1_epi16(15));
}
INLINE vi v_integers(vf x) { return _mm512_cvtps_epi32(x); }
INLINE vi v_pack_words(vi a, vi b) { return _mm512_packs_epi32(a, b); }
INLINE vi v_load_words(const void *p) { return _mm512_loadu_si512(p); }
INLINE void v_store_words(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi v_pair_words(vi even, vi odd) { return _mm512_mask_mov_epi16(even, 0xaaaaaaaa, _mm512_slli_epi32(odd, 16)); }
INLINE vf v_sqrt(vf x) { return _mm512_sqrt_ps(x); }
INLINE vi v_dot_words(vi sum, vi a, vi b) {
#ifdef EMULATED
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#else
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); /* the intrinsic copies every sum in every step */
    return sum;
#endif
}

#ifdef HAS_VBMI
/* These look up 64 bytes in a table of 128 words, which lies in two registers of low bytes and two of high ones, and
 * add the sign. Low and high bytes meet within 128 bits: out[0] is of the low half of every 128 bits of x, out[1] of
 * the high half. words_of_bytes puts x in the order in which that is right, since VPERMT2B out of both registers is
 * slower (kernel/MEASUREMENTS.md: quantised caches). */
INLINE void words_of_ordered(__m512i x, const __m512i *low, const __m512i *high, __m512i *out) {
    __m512i l = _mm512_permutex2var_epi8(low[0], x, low[1]), h = _mm512_permutex2var_epi8(high[0], x, high[1]);
    h = _mm512_ternarylogic_epi32(h, x, _mm512_set1_epi8((char)0x80), 0xf8); /* h | x & 0x80 */
    out[0] = _mm512_unpacklo_epi8(l, h);
    out[1] = _mm512_unpackhi_epi8(l, h);
}
INLINE void words_of_bytes(__m512i x, const __m512i *low, const __m512i *high, __m512i *out) {
    words_of_ordered(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x), low, high, out);
}
#endif
/* Looks up n bytes in a table of 128 words, and adds the sign. */
#define UNPACK_WORDS
INLINE void unpack_words(const uint8_t *src, int64_t n, const uint16_t *table, uint16_t *dst, const char *next_src) {
    __m512i t[4];
    EACH(i, 4) t[i] = _mm512_loadu_si512(table + 32 * i);
    int64_t i = 0;
#ifdef HAS_VBMI
    __m512i low[2], high[2];
    EACH(j, 2) {
        __m256i a = _mm512_cvtepi16_epi8(t[2 * j]), b = _mm512_cvtepi16_epi8(t[2 * j + 1]);
        low[j] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
        a = _mm512_cvtepi16_epi8(_mm512_srli_epi16(t[2 * j], 8));
        b = _mm512_cvtepi16_epi8(_mm512_srli_epi16(t[2 * j + 1], 8));
        high[j] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    }
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(next_src + i, 0, 2);
        __m512i words[2];
        words_of_bytes(_mm512_loadu_si512(src + i), low, high, words);
        EACH(j, 2) _mm512_storeu_si512(dst + i + 32 * j, words[j]);
    }
#endif
    for (; i < n; i += 32) {
        __builtin_prefetch(next_src + i, 0, 2);
        __mmask32 there = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, src + i));
        __m512i l = _mm512_permutex2var_epi16(t[0], x, t[1]), h = _mm512_permutex2var_epi16(t[2], x, t[3]);
        h = _mm512_mask_mov_epi16(l, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), h);
        x = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8);
        _mm512_mask_storeu_epi16(dst + i, there, _mm512_or_si512(h, x));
    }
}

/* Looks up n numbers of int4 in a table of 16 words, which stands twice in 32: an index's upper bits do not matter. */
INLINE void unpack_nibbles(const uint8_t *src, int64_t n, const uint16_t *table, uint16_t *dst, const char *next_src) {
    const __m512i t = _mm512_loadu_si512(table);
    for (int64_t i = 0; i < n; i += 128, src += 64, next_src += 64) {
        __builtin_prefetch(next_src, 0, 2);
        EACH(j, 2) {
            __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(src + 32 * j)));
            _mm512_storeu_si512(dst + i + 32 * j, _mm512_permutexvar_epi16(x, t));
            _mm512_storeu_si512(dst + i + 64 + 32 * j, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), t));
        }
    }
}

#ifdef HAS_BF16
/* ---- words of dot.inc ---- */

typedef __m512i vp;

INLINE vp v_load_pairs(const uint16_t *p) { return _mm512_loadu_si512(p); }
INLINE vp v_loadn_pairs(const uint16_t *p, int n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }
INLINE vp v_set1_pair(const uint16_t *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    vp x = _mm512_set1_epi32(pair);
#if defined __clang__ && __clang_major__ == 16 /* dies over VDPBF16PS of a broadcast that it knows to be one */
    __asm__("" : "+v"(x));
#endif
    return x;
}
INLINE vp v_keep_half(vp x, int odd) { return _mm512_and_si512(x, _mm512_set1_epi32(odd ? (int)0xffff0000 : 0xffff)); }
INLINE vf v_dot(vf sum, vp a, vp b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE vf v_rcp(vf x) { /* one step of Newton's */
    vf y = _mm512_rcp14_ps(x);
    return v_mul(y, _mm512_fnmadd_ps(x, y, v_set1(2.0f)));
}
INLINE vp v_round_pairs(vf a, vf b) { return (vp)_mm512_cvtne2ps_pbh(b, a); }
INLINE void v_store_pairs(uint16_t *p, vp x) { _mm512_storeu_si512(p, x); }
INLINE void v_put_pairs(uint16_t *p, vf even, vf odd) {
    __m512i x = _mm512_srli_epi32(_mm512_castps_si512(even), 16), upper = _mm512_set1_epi32((int)0xffff0000);
    _mm512_storeu_si512(p, _mm512_or_si512(x, _mm512_and_si512(_mm512_castps_si512(odd), upper)));
}
/* Adds what rounds the upper half of each number to nearest even, but for NaN. */
INLINE __m512i add_half(vf x) {
    const __m512i bits = _mm512_castps_si512(x),
                  last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
}
INLINE vf v_nearest_bf16(vf x) {
    return _mm512_castsi512_ps(_mm512_and_si512(add_half(x), _mm512_set1_epi32((int)0xffff0000)));
}

#ifdef HAS_VBMI
/* ---- weights without floats ---- */

/* Computes 2^(x/512) by integers. x = 512 n + w stands for 2^n (1 + w/512), which is too much by what a table has for
 * every four w, in units of 2^-9 (the best for the sum of the squares of relative errors); of what is left the last two
 * bits are dropped, 2 being added before. A quarter is added to every other x and taken from the others: equal weights
 * do not all become more or all less. Relative errors of a weight: 0.475 % at most, RMS 0.174 % (rounded to nearest:
 * 0.39 and 0.166); of the sum of 256 equal ones 0.395 % (0.38). */
#define V_OCTAVE 512
static const uint8_t above_power[128] = {
    0,  1,  3,  4,  5,  6,  8,  8,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 24, 25, 26,
    27, 28, 28, 29, 30, 31, 32, 32, 33, 33, 34, 35, 36, 36, 36, 37, 38, 38, 39, 39, 40, 40, 40, 41, 41, 42,
    42, 42, 43, 43, 43, 43, 44, 44, 44, 44, 44, 44, 44, 44, 45, 45, 45, 45, 45, 44, 44, 44, 44, 44, 44, 44,
    43, 43, 43, 43, 42, 42, 42, 41, 41, 41, 40, 39, 39, 38, 38, 37, 37, 36, 35, 35, 34, 33, 33, 32, 31, 30,
    30, 29, 27, 27, 26, 25, 23, 23, 22, 21, 19, 18, 17, 15, 14, 14, 13, 11, 10, 9,  6,  5,  3,  2,
};
INLINE vf v_dither(void) {
    const float quarter = 0.25f;
    return _mm512_setr4_ps(-quarter, quarter, -quarter, quarter);
}
/* `one` is the word of 1; adding 2 rounds the two bits that are dropped. */
#define V_ONE (127 * V_OCTAVE + 2)
typedef struct v_powers_table {
    __m512i low, high;
    __mmask64 bytes; /* the low one of every word */
} v_powers_table;
INLINE v_powers_table v_load_powers(void) {
    v_powers_table t = {_mm512_loadu_si512(above_power), _mm512_loadu_si512(above_power + 64), 0x5555555555555555};
    KEEP("+k", t.bytes);
    return t;
}
INLINE vp v_powers_of_words(const v_powers_table *t, vi x) {
    const __m512i above = _mm512_maskz_permutex2var_epi8(t->bytes, t->low, _mm512_srli_epi16(x, 2), t->high);
    return _mm512_srli_epi16(_mm512_sub_epi16(x, above), 2);
}
INLINE vp v_powers(vf a, vf b) {
    const __m512i one = _mm512_set1_epi32(V_ONE);
    const __m512i x =
        _mm512_packus_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), one), _mm512_add_epi32(_mm512_cvtps_epi32(b), one));
    /* This puts 4 of a, 4 of b, ... in the order all of a, all of b. */
    const v_powers_table table = v_load_powers();
    return v_powers_of_words(&table, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x));
}
INLINE int v_any_nan(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }

/* ---- words of amx/words.h ---- */

/* Holds what v_words keeps in registers. */
typedef struct v_word_order {
    __m512i order, hidden;
} v_word_order;
/* Packing leaves 4 of a, 4 of b, ... of each 128 bits. */
INLINE v_word_order v_load_word_order(void) {
    static const uint16_t in_order[32] = {0, 1, 2, 3, 8,  9,  10, 11, 16, 17, 18, 19, 24, 25, 26, 27,
                                          4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    v_word_order t = {_mm512_loadu_si512(in_order), _mm512_set1_epi32(-1)};
    KEEP("+v", t.order);
    KEEP("+v", t.hidden);
    return t;
}
/* VCVTPS2DQ makes INT32_MIN of what is no integer of 32 bits, NaN and infinities included, and packing makes 0 of it.
 * The permutation that puts words in order leaves out those that are not seen at no cost. */
INLINE vi v_words(const v_word_order *t, int all, vf a, vf b, uint32_t seen) {
    const __m512i words = _mm512_packus_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    return all ? _mm512_permutexvar_epi16(t->order, words)
               : _mm512_mask_permutexvar_epi16(t->hidden, seen, t->order, words);
}
/* Keeps the least room that bf16 numbers leave to the largest NaN; it is 0x80 or more if they are finite. */
INLINE vi v_least_room(vi least, vp x) {
    const __m512i room = _mm512_sub_epi16(_mm512_set1_epi32(-1), x);
    return _mm512_min_epu16(least, _mm512_and_si512(room, _mm512_set1_epi32(0x7fff7fff)));
}
/* Returns WORD_MAX less words. */
INLINE vi v_rest_of_words(const v_word_order *t, vi words) { return _mm512_sub_epi16(t->hidden, words); }
INLINE vf v_keep_bits(vf x, uint32_t bits) {
    return _mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(-INFINITY), x);
}

/* Returns in lane i the largest lane of v[i], for 16 vectors v. A transposition compares on the way: its first two
 * rounds bring quarters of v[i], v[4 + i], v[8 + i] and v[12 + i] together, its last two lanes within quarters. */
INLINE vf v_hmax_of_each(const vf *v) {
    vf quarters[4], pairs[2];
#define LARGER(a, b, c, d) _mm512_max_ps(_mm512_shuffle_f32x4(a, b, c), _mm512_shuffle_f32x4(a, b, d))
    EACH(i, 4) {
        const vf x = LARGER(v[i], v[4 + i], 0x44, 0xee), y = LARGER(v[8 + i], v[12 + i], 0x44, 0xee);
        quarters[i] = LARGER(x, y, 0x88, 0xdd);
    }
#undef LARGER
#define LARGER(a, b) _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
    EACH(i, 2) pairs[i] = LARGER(quarters[i], quarters[2 + i]);
    return LARGER(pairs[0], pairs[1]);
#undef LARGER
}

/* ---- words of amx/bytes.h ---- */

INLINE vi v_join_halves(vi a, vi b, int upper) {
    const vf x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_castps_si512(upper ? _mm512_shuffle_f32x4(x, y, 0xee) : _mm512_shuffle_f32x4(x, y, 0x44));
}
INLINE vi v_quads(int signs, vi x) {
    static const uint16_t by_turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    x = _mm512_permutexvar_epi16(_mm512_loadu_si512(by_turns), x);
    if (!signs)
        return x;
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi8(127));
    return _mm512_mask_sub_epi8(size, _mm512_movepi8_mask(x), _mm512_set1_epi8(0), size);
}
INLINE vi v_nibbles(vi x, int upper) {
    x = _mm512_and_si512(upper ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
    return _mm512_sub_epi8(x, _mm512_set1_epi8(8));
}
/* Packing twice leaves 4 of each vector in each 128 bits. */
INLINE void v_put_digits(int8_t *high, int8_t *low, const vi *x) {
    static const int32_t in_order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const __m512i order = _mm512_loadu_si512(in_order), half = _mm512_set1_epi16(128), bottom = _mm512_set1_epi16(255);
    const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
    const __m512i upper = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                             _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
    const __m512i lower = _mm512_packus_epi16(_mm512_and_si512(a, bottom), _mm512_and_si512(b, bottom));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, upper));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, lower));
}

/* ---- words of amx/parts.h and amx/float_units.h ---- */

INLINE vf v_keep_or_0(vf x, uint32_t bits) { return _mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(0), x); }
INLINE vf v_high(vf x) { return odd_half(_mm512_castps_si512(x)); }
INLINE vf v_rest(vf x) { return _mm512_sub_ps(x, v_high(x)); }
INLINE vi v_bottom(vi bottom, vf x) {
    return _mm512_max_epu32(bottom, _mm512_sub_epi32(_mm512_set1_epi32(0), _mm512_castps_si512(x)));
}

/* A float of which the last bit stands for 1 has integers in its low bits: V_WHOLE plus x, rounded, has x. */
#define V_WHOLE 0x1.8p23f
/* Computes 2^(x/16). The table has 2^(i/16) less i << 19, which x in sixteenths adds to the exponent with what it adds
 * there: no lane has to be cut into whole octaves and the rest. What rounding x took from it goes into a polynomial, of
 * which the cubic one errs by 2e-9, the quadratic one by 1e-6. */
typedef struct v_sixteenths {
    __m512i table;
    vf scale, least, c1, c2, c3;
} v_sixteenths;
INLINE v_sixteenths v_load_sixteenths(float scale, float least) {
    static const float powers[16] = {1.0f,           1.04427378243f, 1.09050773267f, 1.13878863476f,
                                     1.18920711500f, 1.24185781207f, 1.29683955465f, 1.35425554694f,
                                     1.41421356237f, 1.47682614594f, 1.54221082541f, 1.61049033195f,
                                     1.68179283051f, 1.75625216037f, 1.83400808641f, 1.91520656140f};
    int32_t table[16];
    memcpy(table, powers, sizeof table);
    EACH(i, 16) table[i] -= i << 19;
    return (v_sixteenths){_mm512_loadu_si512(table),
                          v_set1(scale),
                          v_set1(least),
                          v_set1(0.6931471806f / 16),
                          v_set1(0.2402265070f / 256),
                          v_set1(0.0555041086f / 4096)};
}
INLINE vf v_sixteenth_powers(int cubic, int masked, const v_sixteenths *c, vf s, vf start, uint32_t seen, vf *top) {
    const vf x = v_fma(s, c->scale, start), t = masked ? v_keep_bits(x, seen) : x;
    const vf rest = v_fma(s, c->scale, v_sub(start, t));
    const __mmask16 some = _mm512_cmp_ps_mask(t, c->least, _CMP_GT_OQ);
    const __m512i whole = _mm512_castps_si512(t);
    const vf power =
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_permutexvar_epi32(whole, c->table), _mm512_slli_epi32(whole, 19)));
    vf u = cubic ? v_fma(v_fma(c->c3, rest, c->c2), rest, c->c1) : v_fma(c->c2, rest, c->c1);
    *top = v_max(*top, t);
    return _mm512_maskz_fmadd_ps(some, power, v_mul(u, rest), power);
}

/* ---- words of amx/output.h ---- */

INLINE vp v_bf16_of(vf a, vf b) {
    static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(add_half(a), _mm512_loadu_si512(upper), add_half(b));
}
INLINE void v_stream_pairs(uint16_t *p, vp x) { _mm512_stream_si512((void *)p, x); }

/* ---- words of in_registers.inc ---- */

#define V_QUANTISED_PAIRS
typedef struct v_table {
    __m512i t[4];
} v_table;

INLINE v_table v_load_table(int n, const void *table) {
    v_table t = {{_mm512_loadu_si512(table)}};
    for (int i = 1; i < n; i++)
        t.t[i] = _mm512_loadu_si512((const char *)table + 64 * i);
    return t;
}

/* Makes a vector of pairs of 32 bytes, or of one half of each. */
INLINE vp v_quantised_vector(int halves, const uint8_t *p, int half, const v_table *t) {
    const __m256i bytes = _mm256_loadu_si256((const void *)p);
    __m512i x[2] = {_mm512_zextsi256_si512(bytes)};
    if (halves) {
        x[0] = _mm512_cvtepu8_epi16(bytes);
        return _mm512_permutexvar_epi16(half ? _mm512_srli_epi16(x[0], 4) : x[0], t->t[0]);
    }
    words_of_bytes(x[0], t->t, t->t + 2, x);
    return x[0];
}
/* Makes two vectors of 64. */
INLINE void v_quantised_pairs(int halves, const uint8_t *p, int half, const v_table *t, vp *out) {
    if (halves)
        EACH(j, 2) out[j] = v_quantised_vector(1, p + 32 * j, half, t);
    else
        words_of_bytes(_mm512_loadu_si512(p + 64 * half), t->t, t->t + 2, out);
}
#endif
#endif

/* ---- words of the cache write ---- */

#define LINES 16
/* Loads up to 8 words of rows r and 8 + r. */
INLINE __m512i two_rows(const char *row, int64_t ld, int n) {
    const __mmask8 there = (__mmask8)((1u << n) - 1);
    __m256i low = n == 8 ? _mm256_loadu_si256((const void *)row) : _mm256_maskz_loadu_epi32(there, row);
    row += 8 * ld;
    __m256i high = n == 8 ? _mm256_loadu_si256((const void *)row) : _mm256_maskz_loadu_epi32(there, row);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
/* Transposes 16x8 words: 4x4 in each 128-bit lane, then the lanes, of which the loads have placed half. All four rounds
 * in registers, 64 shuffles for 16x16, take twice as long (kernel/MEASUREMENTS.md: cache write). */
INLINE void transpose(const char *src, int64_t ld, int n, __m512i *line) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    __m512i r[8], t[8];
    EACH(i, 8) r[i] = two_rows(src + i * ld, ld, n);
    EACH(i, 2) {
        __m512i a = _mm512_unpacklo_epi32(r[4 * i], r[4 * i + 1]);
        __m512i b = _mm512_unpacklo_epi32(r[4 * i + 2], r[4 * i + 3]);
        __m512i c = _mm512_unpackhi_epi32(r[4 * i], r[4 * i + 1]);
        __m512i d = _mm512_unpackhi_epi32(r[4 * i + 2], r[4 * i + 3]);
        t[4 * i] = _mm512_unpacklo_epi64(a, b), t[4 * i + 1] = _mm512_unpackhi_epi64(a, b);
        t[4 * i + 2] = _mm512_unpacklo_epi64(c, d), t[4 * i + 3] = _mm512_unpackhi_epi64(c, d);
    }
    EACH(i, 4) {
        line[i] = _mm512_permutex2var_epi64(t[i], low, t[4 + i]);
        line[4 + i] = _mm512_permutex2var_epi64(t[i], high, t[4 + i]);
    }
}
static const uint16_t even_then_odd[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                           1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
INLINE void lines(char *dst, const char *src, int64_t ld, int n, int halves) {
    __m512i line[8], order = _mm512_loadu_si512(even_then_odd);
    for (int at = 0; at < n; at += 8) {
        transpose(src + 4 * at, ld, n - at < 8 ? n - at : 8, line);
        EACH(i, 8)
        if (at + i < n)
            _mm512_storeu_si512(dst + (at + i) * 64, halves ? _mm512_permutexvar_epi16(order, line[i]) : line[i]);
    }
}
INLINE void v_lines_f32(void *dst, const void *src, int64_t ld, int n) { lines(dst, src, ld, n, 0); }
INLINE void v_lines_f16(void *dst, const void *src, int64_t ld, int n) { lines(dst, src, ld, n, 1); }
INLINE void v_lines_bf16(void *dst, const void *src, int64_t ld, int n) { lines(dst, src, ld, n, 0); }
INLINE void v_zip_bf16(uint16_t *dst, const uint16_t *a, const uint16_t *b, int n) {
    __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), a));
    __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), b));
    v_storen_f32((void *)dst, _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16))), n);
}
#define STREAMS 1
INLINE void v_stream_line(void *to, const void *from) { _mm512_stream_si512(to, _mm512_loadu_si512(from)); }

#ifdef V_QUANTISED_PAIRS
/* ---- words of dot.inc for rows ---- */

/* Makes 8 vectors of pairs of 16 dimensions, a lane for each of 16 keys, which lie ld elements apart. */
INLINE void v_pairs_of_rows(const char *src, int64_t ld, vp *out) { transpose(src, 2 * ld, 8, out); }

/* Interleaves 32 elements of a and of b. */
INLINE void v_zip_pairs(const uint16_t *a, const uint16_t *b, vp *out) {
    static const uint16_t interleaved[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                             8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                             16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                             24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    EACH(j, 2) out[j] = _mm512_permutex2var_epi16(x, _mm512_loadu_si512(interleaved + 32 * j), y);
}

/* These do with bytes what the functions above do with words. They put bytes in the order in which words_of_ordered's
 * halves are what they want. */
INLINE void v_quads_of_rows(const char *src, int64_t ld, vp *out) { transpose(src, ld, 8, out); }
INLINE void v_pairs_of_quads(vp x, const v_table *t, vp *out) {
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    words_of_ordered(_mm512_shuffle_epi8(x, pairs), t->t, t->t + 2, out);
}
INLINE void v_zip_bytes(const uint8_t *a, const uint8_t *b, const v_table *t, vp *out) {
    static const uint8_t interleaved[64] = {0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51,
                                            4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,
                                            8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59,
                                            12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m256i x = _mm256_loadu_si256((const void *)a), y = _mm256_loadu_si256((const void *)b);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
    words_of_ordered(_mm512_permutexvar_epi8(_mm512_loadu_si512(interleaved), both), t->t, t->t + 2, out);
}
#endif
