/* SPDX-License-Identifier: Apache-2.0
 * This is the vocabulary of vectors of 8 lanes, by AVX2, FMA and F16C, and the block sizes, for avx2.c and its variant.
 * With VNNI v_dot_words is VPDPWSSD of AVX-VNNI; with EMULATED as well it is what AVX2 has. */
#include "cpu/cpu.h"
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define VL 8
#define MR 6
#define TALL 6
#define NG 4
#define NDV 8
#define TILE_GROUPS(mr) ((mr) == 1 ? 4 : (mr) <= 3 ? 2 : 1)
#define TILE_VECTORS(mr) ((mr) == 1 ? 8 : (mr) <= 3 ? 4 : 2)
#define ROWS 96
#define KEYS 256
#define FEW_KEYS 128
#define SUM_GROUPS 8
#define NHD_KEYS 64
#define PREFETCH {.steps = 2, .quantised_steps = 2, .integer_steps = 3, .paced_rows = ca_cpu_intel ? 0 : 4}
#include "kernel/simd/inline.h"

typedef __m256 vf;

INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
INLINE float v_first(vf x) { return _mm256_cvtss_f32(x); }
INLINE vf v_iota(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* This is assembly because gcc 12, given the intrinsic, puts sums over what it has broadcast, and spills. */
#define V_ACCUMULATE
INLINE vf v_accumulate(vf sum, vf a, vf b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE vf v_copysign(vf x, vf sign) { return _mm256_or_ps(x, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
INLINE vf v_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_scale(vf x, vf n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
INLINE vf v_less(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE __m256i before(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf v_keep(vf x, int first, int end) {
    __m256i kept = _mm256_andnot_si256(before(first), before(end));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(kept));
}
INLINE float v_hmax(vf x) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
INLINE float v_hsum(vf x) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
INLINE vf v_exchange(vf x, int distance) {
    return distance == 1   ? _mm256_permute_ps(x, 0xb1)
           : distance == 2 ? _mm256_permute_ps(x, 0x4e)
                           : _mm256_permute2f128_ps(x, x, 1);
}

INLINE vf v_load_f32(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf v_loadn_f32(const float *p, int n) { return _mm256_maskload_ps(p, before(n)); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE void v_storen_f32(float *p, vf x, int n) {
    if (n == VL) /* a masked store takes 12 cycles or more on AMD */
        v_store(p, x);
    else
        _mm256_maskstore_ps(p, before(n), x);
}

/* AVX2 has no masked access to 16-bit elements: the ends of rows go through 16 bytes of stack. */
INLINE __m128i load_words(const uint16_t *p, int n) {
    uint16_t w[8] = {0};
    memcpy(w, p, (size_t)n * 2);
    return _mm_loadu_si128((const void *)w);
}
INLINE void store_words(uint16_t *p, __m128i x, int n) {
    uint16_t w[8];
    _mm_storeu_si128((void *)w, x);
    memcpy(p, w, (size_t)n * 2);
}
INLINE vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE vf v_loadn_f16(const uint16_t *p, int n) { return _mm256_cvtph_ps(load_words(p, n)); }
INLINE void v_storen_f16(uint16_t *p, vf x, int n) { store_words(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), n); }

INLINE vf widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE vf v_load_bf16(const uint16_t *p) { return widen_bf16(_mm_loadu_si128((const void *)p)); }
INLINE vf v_loadn_bf16(const uint16_t *p, int n) { return widen_bf16(load_words(p, n)); }
INLINE vf even_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE vf odd_half(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000))); }
INLINE vf v_even_bf16(const uint16_t *p) { return even_half(_mm256_loadu_si256((const void *)p)); }
INLINE vf v_odd_bf16(const uint16_t *p) { return odd_half(_mm256_loadu_si256((const void *)p)); }
INLINE vf v_evenn_bf16(const uint16_t *p, int n) {
    return even_half(_mm256_maskload_epi32((const void *)p, before(n)));
}
INLINE vf v_oddn_bf16(const uint16_t *p, int n) { return odd_half(_mm256_maskload_epi32((const void *)p, before(n))); }
/* Rounds to nearest even; NaN becomes the quiet NaN. */
INLINE void v_storen_bf16(uint16_t *p, vf x, int n) {
    __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    store_words(p, _mm256_castsi256_si128(packed), n);
}

/* ---- words of quantised caches ---- */

typedef __m256i vi;
INLINE vi v_look_up(const uint8_t *table, vi x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)), x);
}

INLINE void v_put_bytes(uint8_t *p, vf x) {
    const __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((void *)p, _mm_packus_epi16(words, words));
}

/* ---- words of integers.h ---- */

static const int integers = 1;
#define INTEGERS &integers
#ifdef VNNI
#define INTEGERS_BY "VPDPWSSD"
#else
#define INTEGERS_BY "VPMADDWD"
#endif
INLINE int v_any_less(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE vi v_set1_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vi v_set1_words(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return _mm256_set1_epi32(pair);
}
INLINE vf v_float(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE int32_t v_hsum_int(vi x) {
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    h = _mm_add_epi32(h, _mm_unpackhi_epi64(h, h));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 1)));
}
INLINE vi v_top(vi top, vf x) { return _mm256_max_epu32(top, _mm256_castps_si256(x)); }
INLINE uint32_t v_htop(vi x) {
    __m128i h = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    h = _mm_max_epu32(h, _mm_unpackhi_epi64(h, h));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(h, _mm_shuffle_epi32(h, 1)));
}
INLINE vf v_mul_unless_0(vf x, vf factor) {
    return _mm256_and_ps(_mm256_mul_ps(x, factor), _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ));
}
INLINE vi v_bytes(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p)); }
INLINE vi v_int8(vi x) {
    return _mm256_sign_epi16(_mm256_and_si256(x, _mm256_set1_epi16(127)), _mm256_slli_epi16(x, 8));
}
INLINE vi v_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi v_halves_of_bytes(vi x, int upper) {
    return upper ? _mm256_srli_epi16(x, 4) : _mm256_and_si256(x, _mm256_set1_epi16(15));
}
INLINE vi v_integers(vf x) { return _mm256_cvtps_epi32(x); }
INLINE vi v_pack_words(vi a, vi b) { return _mm256_packs_epi32(a, b); }
INLINE vi v_load_words(const void *p) { return _mm256_loadu_si256(p); }
INLINE void v_store_words(void *p, vi x) { _mm256_storeu_si256(p, x); }
INLINE vi v_pair_words(vi even, vi odd) { return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa); }
INLINE vf v_sqrt(vf x) { return _mm256_sqrt_ps(x); }
INLINE vi v_dot_words(vi sum, vi a, vi b) { /* by intrinsics gcc 12 adds the products up as a tree, and spills */
#if defined VNNI && !defined EMULATED
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    vi product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
#endif
    return sum;
}

/* ---- words of the cache write ---- */

#define LINES 4
/* Loads 16 bytes of rows i and j, or the first n words of them. */
INLINE __m256i two_rows(const char *src, int64_t ld, int i, int j, int n) {
    const char *a = src + i * ld, *b = src + j * ld;
    if (n == 4)
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)a)),
                                       _mm_loadu_si128((const void *)b), 1);
    __m128i first = _mm256_castsi256_si128(before(n));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_maskload_epi32((const void *)a, first)),
                                   _mm_maskload_epi32((const void *)b, first), 1);
}
/* The 128-bit lanes of r[c] hold word c of rows first..first+3 and of rows second..second+3. */
INLINE void transpose(__m256i *r, const char *src, int64_t ld, int first, int second, int n) {
    __m256i q[4];
    EACH(i, 4) q[i] = two_rows(src, ld, first + i, second + i, n);
    __m256i a = _mm256_unpacklo_epi32(q[0], q[1]), b = _mm256_unpacklo_epi32(q[2], q[3]);
    __m256i c = _mm256_unpackhi_epi32(q[0], q[1]), d = _mm256_unpackhi_epi32(q[2], q[3]);
    r[0] = _mm256_unpacklo_epi64(a, b), r[1] = _mm256_unpackhi_epi64(a, b);
    r[2] = _mm256_unpacklo_epi64(c, d), r[3] = _mm256_unpackhi_epi64(c, d);
}
INLINE void put_line(char *dst, __m256i a, __m256i b) {
    _mm256_storeu_si256((void *)dst, a);
    _mm256_storeu_si256((void *)(dst + 32), b);
}
INLINE void v_lines_f32(void *dst, const void *src, int64_t ld, int n) {
    __m256i a[4], b[4];
    transpose(a, src, ld, 0, 4, n);
    transpose(b, src, ld, 8, 12, n);
    EACH(i, 4) if (i < n) put_line((char *)dst + i * 64, a[i], b[i]);
}
INLINE void v_lines_bf16(void *dst, const void *src, int64_t ld, int n) { v_lines_f32(dst, src, ld, n); }
/* The low halves of four rows' words go to the low half of a 128-bit lane; the rows lie so that two such halves are 8
 * rows. */
INLINE void v_lines_f16(void *dst, const void *src, int64_t ld, int n) {
    const __m256i halves =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    __m256i a[4], b[4];
    transpose(a, src, ld, 0, 8, n);
    transpose(b, src, ld, 4, 12, n);
    EACH(i, 4) {
        __m256i x = _mm256_shuffle_epi8(a[i], halves), y = _mm256_shuffle_epi8(b[i], halves);
        if (i < n)
            put_line((char *)dst + i * 64, _mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
    }
}
INLINE void v_zip_bf16(uint16_t *dst, const uint16_t *a, const uint16_t *b, int n) {
    __m256i even = _mm256_cvtepu16_epi32(n == VL ? _mm_loadu_si128((const void *)a) : load_words(a, n));
    __m256i odd = _mm256_cvtepu16_epi32(n == VL ? _mm_loadu_si128((const void *)b) : load_words(b, n));
    vf pairs = _mm256_castsi256_ps(_mm256_or_si256(even, _mm256_slli_epi32(odd, 16)));
    if (n == VL)
        v_store((void *)dst, pairs);
    else
        v_storen_f32((void *)dst, pairs, n);
}
#define STREAMS 1
INLINE void v_stream_line(void *to, const void *from) {
    _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
}
