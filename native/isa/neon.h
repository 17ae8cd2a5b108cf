/* SPDX-License-Identifier: Apache-2.0
 * This is the vocabulary of vectors of 4 lanes, by NEON, and the block sizes, for neon.c and its variants. Where the
 * flags allow BF16's instructions, it has the words of dot.inc, too, and where they allow FHM's, those of fma_long.inc.
 */
#include "cpu/cpu.h"
#include "cache/layout.h"
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#define VL 4
#define ROWS 96
#define KEYS 256
#define FEW_KEYS 128
#include "kernel/simd/inline.h"

typedef float32x4_t vf;

INLINE vf v_set1(float x) { return vdupq_n_f32(x); }
INLINE float v_first(vf x) { return vgetq_lane_f32(x, 0); }
INLINE vf v_iota(void) { return (vf){0, 1, 2, 3}; }
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
/* FMLA takes a lane of one of its factors, so that none has to be broadcast. */
#define V_FACTOR
INLINE vf v_factor_at(const float *p) {
    vf x;
    __asm__("ldr %s0, %1" : "=w"(x) : "m"(*p)); /* gcc 12 would broadcast it, or clear the other lanes */
    return x;
}
INLINE vf v_add_product(vf sum, vf factor, vf x) {
    __asm__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(x), "w"(factor));
    return sum;
}
INLINE vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* FMAX would take a's NaN, too */
INLINE vf v_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vf v_abs(vf x) { return vabsq_f32(x); }
INLINE vf v_copysign(vf x, vf sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, x); }
INLINE vf v_round(vf x) { return vrndnq_f32(x); }
INLINE vf v_scale(vf x, vf n) {
    int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(x, vreinterpretq_f32_s32(e));
}
/* FRINTN and FCVTZS go at a fourth of the rate of sums on Neoverse V1, so a sum rounds: its last bits are n + 127,
 * which as an exponent is 2^n, or 0 at n = -127. FMAX keeps NaN. */
#define V_EXP2_BY
INLINE vf v_exp2_by(const float *c, int n, vf x) {
    const vf least = v_set1(-127.0f), unit = v_set1(0x1.8p23f + 127);
    x = vmaxq_f32(x, least);
    const vf whole = v_add(x, unit), f = v_sub(x, v_sub(whole, unit));
    vf p = v_set1(c[0]);
    EACH(i, n - 1) p = v_fma(p, f, v_set1(c[i + 1]));
    return v_mul(p, vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(whole), 23)));
}
INLINE vf v_less(vf a, vf b, vf yes, vf no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
INLINE uint32x4_t before(int n) { return vcgtq_s32(vdupq_n_s32(n), (int32x4_t){0, 1, 2, 3}); }
INLINE vf v_keep(vf x, int first, int end) {
    return vbslq_f32(vbicq_u32(before(end), before(first)), x, vdupq_n_f32(-INFINITY));
}
INLINE float v_hmax(vf x) { return vmaxvq_f32(x); }
INLINE float v_hsum(vf x) { return vaddvq_f32(x); }
INLINE vf v_exchange(vf x, int distance) { return distance == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }

/* There is no masked access: the ends of rows go through the stack. */
INLINE vf v_load_f32(const float *p) { return vld1q_f32(p); }
INLINE vf v_loadn_f32(const float *p, int n) {
    float x[4] = {0};
    memcpy(x, p, (size_t)n * 4);
    return vld1q_f32(x);
}
INLINE void v_store(float *p, vf x) { vst1q_f32(p, x); }
INLINE void v_storen_f32(float *p, vf x, int n) {
    float lanes[4];
    vst1q_f32(lanes, x);
    memcpy(p, lanes, (size_t)n * 4);
}
INLINE uint16x4_t load_words(const uint16_t *p, int n) {
    uint16_t w[4] = {0};
    memcpy(w, p, (size_t)n * 2);
    return vld1_u16(w);
}
INLINE void store_words(uint16_t *p, uint16x4_t x, int n) {
    uint16_t w[4];
    vst1_u16(w, x);
    memcpy(p, w, (size_t)n * 2);
}

INLINE vf widen_f16(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
INLINE vf v_load_f16(const uint16_t *p) { return widen_f16(vld1_u16(p)); }
INLINE vf v_loadn_f16(const uint16_t *p, int n) { return widen_f16(load_words(p, n)); }
INLINE void v_storen_f16(uint16_t *p, vf x, int n) { store_words(p, vreinterpret_u16_f16(vcvt_f16_f32(x)), n); }

INLINE vf widen_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
INLINE vf v_load_bf16(const uint16_t *p) { return widen_bf16(vld1_u16(p)); }
INLINE vf v_loadn_bf16(const uint16_t *p, int n) { return widen_bf16(load_words(p, n)); }
INLINE vf even_half(uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
INLINE vf odd_half(uint32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u))); }
INLINE uint32x4_t load_pairs(const uint16_t *p, int n) {
    uint32_t x[4] = {0};
    memcpy(x, p, (size_t)n * 4);
    return vld1q_u32(x);
}
INLINE vf v_even_bf16(const uint16_t *p) { return even_half(vreinterpretq_u32_u16(vld1q_u16(p))); }
INLINE vf v_odd_bf16(const uint16_t *p) { return odd_half(vreinterpretq_u32_u16(vld1q_u16(p))); }
INLINE vf v_evenn_bf16(const uint16_t *p, int n) { return even_half(load_pairs(p, n)); }
INLINE vf v_oddn_bf16(const uint16_t *p, int n) { return odd_half(load_pairs(p, n)); }
/* Rounds to nearest even; NaN becomes the quiet NaN. */
INLINE void v_storen_bf16(uint16_t *p, vf x, int n) {
    uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
    store_words(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), r, vdupq_n_u32(0x7fc0))), n);
}

/* ---- words of quantised caches ---- */

typedef uint8x16_t vi;
INLINE vi v_look_up(const uint8_t *table, vi x) { return vqtbl1q_u8(vld1q_u8(table), x); }

INLINE void v_put_bytes(uint8_t *p, vf x) {
    const uint16x4_t words = vmovn_u32(vreinterpretq_u32_f32(x));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    memcpy(p, &four, sizeof four);
}

/* ---- words of the cache write ---- */

#define LINES 4
/* r[c] holds word c of rows i..i+3, for c < n. */
INLINE void transpose(uint32x4_t *r, const char *src, int64_t ld, int i, int n) {
    uint32x4_t q[4];
    EACH(j, 4) q[j] = load_pairs((const void *)(src + (i + j) * ld), n);
    uint32x4x2_t a = vtrnq_u32(q[0], q[1]), b = vtrnq_u32(q[2], q[3]);
    r[0] = vcombine_u32(vget_low_u32(a.val[0]), vget_low_u32(b.val[0]));
    r[1] = vcombine_u32(vget_low_u32(a.val[1]), vget_low_u32(b.val[1]));
    r[2] = vcombine_u32(vget_high_u32(a.val[0]), vget_high_u32(b.val[0]));
    r[3] = vcombine_u32(vget_high_u32(a.val[1]), vget_high_u32(b.val[1]));
}
INLINE void v_lines_f32(void *dst, const void *src, int64_t ld, int n) {
    for (int i = 0; i < CA_LANES; i += 4) {
        uint32x4_t r[4];
        transpose(r, src, ld, i, n);
        EACH(c, 4) if (c < n) vst1q_u32((uint32_t *)dst + c * CA_LANES + i, r[c]);
    }
}
INLINE void v_lines_bf16(void *dst, const void *src, int64_t ld, int n) { v_lines_f32(dst, src, ld, n); }
INLINE void v_lines_f16(void *dst, const void *src, int64_t ld, int n) {
    for (int i = 0; i < CA_LANES; i += 4) {
        uint32x4_t r[4];
        transpose(r, src, ld, i, n);
        EACH(c, 4) if (c < n) {
            vst1_u16((uint16_t *)dst + c * 2 * CA_LANES + i, vmovn_u32(r[c]));
            vst1_u16((uint16_t *)dst + (c * 2 + 1) * CA_LANES + i, vshrn_n_u32(r[c], 16));
        }
    }
}
INLINE void v_zip_bf16(uint16_t *dst, const uint16_t *a, const uint16_t *b, int n) {
    uint16x4x2_t pairs = vzip_u16(load_words(a, n), load_words(b, n));
    uint16_t w[8];
    vst1_u16(w, pairs.val[0]);
    vst1_u16(w + 4, pairs.val[1]);
    memcpy(dst, w, (size_t)n * 4);
}
#define STREAMS 0
INLINE void v_stream_line(void *to, const void *from) { memcpy(to, from, 64); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
/* ---- words of dot.inc ---- */

typedef bfloat16x8_t vp;
INLINE vp v_load_pairs(const uint16_t *p) { return vld1q_bf16((const bfloat16_t *)p); }
INLINE vp v_loadn_pairs(const uint16_t *p, int n) { return vreinterpretq_bf16_u32(load_pairs(p, n)); }
INLINE vp v_set1_pair(const uint16_t *p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    uint32x4_t pairs = vdupq_n_u32(pair);
    __asm__("" : "+w"(pairs)); /* gcc 12 makes a constant 1 of bfloat16 by FMOV, which is that of binary16 */
    return vreinterpretq_bf16_u32(pairs);
}
INLINE vp v_keep_half(vp x, int odd) {
    return vreinterpretq_bf16_u32(vandq_u32(vreinterpretq_u32_bf16(x), vdupq_n_u32(odd ? 0xffff0000u : 0xffff)));
}
INLINE vf v_dot(vf sum, vp a, vp b) { return vbfdotq_f32(sum, a, b); }
INLINE int v_any_less(vf a, vf b) { return vmaxvq_u32(vcltq_f32(a, b)) != 0; }
INLINE vf v_rcp(vf x) { return vdivq_f32(vdupq_n_f32(1), x); }
INLINE vp v_round_pairs(vf a, vf b) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b); }
INLINE void v_store_pairs(uint16_t *p, vp x) { vst1q_bf16((bfloat16_t *)p, x); }

#define V_MATRIX
INLINE vf v_matrix(vf sum, vp a, vp b) { return vbfmmlaq_f32(sum, a, b); }
INLINE vp v_quads_of_pairs(vp a, vp b, int upper) {
    const uint32x4_t x = vreinterpretq_u32_bf16(a), y = vreinterpretq_u32_bf16(b);
    return vreinterpretq_bf16_u32(upper ? vzip2q_u32(x, y) : vzip1q_u32(x, y));
}
INLINE vp v_keep_pairs(vp quads) {
    return vreinterpretq_bf16_u64(vandq_u64(vreinterpretq_u64_bf16(quads), vdupq_n_u64(0xffffffff)));
}
INLINE vp v_two_quads(const uint16_t *p, const uint16_t *q) {
    return vcombine_bf16(vld1_bf16((const bfloat16_t *)p), vld1_bf16((const bfloat16_t *)q));
}
INLINE vf v_join(vf a, vf b, int upper) {
    const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
    return vreinterpretq_f32_f64(upper ? vzip2q_f64(x, y) : vzip1q_f64(x, y));
}
#endif

#ifdef __ARM_FEATURE_FP16_FML
/* ---- words of fma_long.inc ---- */

#define V_LONG
typedef float16x8_t v16;
INLINE v16 v_load_halves(const uint16_t *p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }
INLINE v16 v_loadn_halves(const uint16_t *p, int n) {
    return vreinterpretq_f16_u16(vcombine_u16(n == VL ? vld1_u16(p) : load_words(p, n), vdup_n_u16(0)));
}
INLINE void v_store_halves(uint16_t *p, v16 x) { vst1q_u16(p, vreinterpretq_u16_f16(x)); }
INLINE v16 v_round_halves(vf a, vf b) { return vcvt_high_f16_f32(vcvt_f16_f32(a), b); }
INLINE v16 v_half_at(const uint16_t *p) {
    v16 x;
    __asm__("ldr %h0, %1" : "=w"(x) : "m"(*p)); /* gcc 12 would load it into a lane */
    return x;
}
INLINE vf v_add_long(vf sum, v16 factor, v16 x, int upper) {
    if (upper)
        __asm__("fmlal2 %0.4s, %1.4h, %2.h[0]" : "+w"(sum) : "w"(x), "x"(factor));
    else
        __asm__("fmlal %0.4s, %1.4h, %2.h[0]" : "+w"(sum) : "w"(x), "x"(factor));
    return sum;
}
#endif
