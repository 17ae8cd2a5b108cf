/* SPDX-License-Identifier: Apache-2.0
 * exp2 and tanh are written in the vector vocabulary of an isa file (vocabulary.md beside this file). The coefficients
 * are Chebyshev fits of (2^f - 1)/f on [-1/2, 1/2] and of (tanh(x) - x)/x^3 in x^2 on [0, 5/8]; the largest relative
 * errors after rounding, over 200,001 points, are 1.2 and 1.4 units of 2^-24. */

#ifndef CPU_ATTN_MATH_H
#define CPU_ATTN_MATH_H

/* Computes 2^x for x <= 127 by a polynomial of n coefficients, the highest first, the last 1. It is exactly 1 at 0, and
 * exactly 0 from -127 down, so that masked keys weigh nothing; NaN stays. With n = round(x) and x = n + f, the
 * polynomial makes 2^f, and n is added to the exponent. An isa file that has a v_exp2_by of its own defines V_EXP2_BY.
 */
#ifndef V_EXP2_BY
INLINE vf v_exp2_by(const float *c, int n, vf x) {
    x = v_max(v_set1(-127.0f), x);
    vf whole = v_round(x), f = v_sub(x, whole), p = v_set1(c[0]);
    EACH(i, n - 1) p = v_fma(p, f, v_set1(c[i + 1]));
    return v_scale(p, whole);
}
#endif

static const float exp2_full[] = {
    0.000154614478f, 0.00133908668f, 0.00961805694f, 0.0555035695f, 0.240226507f, 0.693147182f, 1.0f};
/* exp2_middle is right to 3e-6, for softcap before weights that are then rounded to bf16; exp2_short to 1e-4, for such
 * weights. */
static const float exp2_middle[] = {0.00958277192f, 0.0559062101f, 0.240240991f, 0.693124235f, 1.0f};
static const float exp2_short[] = {0.0550078f, 0.2422085f, 0.6932828f, 1.0f};

INLINE vf v_exp2(vf x) { return v_exp2_by(exp2_full, 7, x); }
INLINE vf v_exp2_middle(vf x) { return v_exp2_by(exp2_middle, 5, x); }
INLINE vf v_exp2_short(vf x) { return v_exp2_by(exp2_short, 4, x); }

/* A small |x| goes by the odd polynomial, since 1 - 2/(e^2x + 1) would cancel there; a larger one goes by that
 * formula. */
INLINE vf v_tanh(vf x) {
    vf a = v_min(v_set1(9.1f), v_abs(x)), u = v_mul(a, a);
    vf p = v_set1(-0.00610488793f);
    p = v_fma(p, u, v_set1(0.021003589f));
    p = v_fma(p, u, v_set1(-0.0538524836f));
    p = v_fma(p, u, v_set1(0.133327827f));
    p = v_fma(p, u, v_set1(-0.333333284f));
    vf small = v_fma(v_mul(a, u), p, a);
    vf e = v_exp2(v_mul(a, v_set1(2 * CA_LOG2E)));
    vf large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    return v_copysign(v_less(a, v_set1(0.625f), small, large), x);
}

INLINE float exp2_one(float x) { return v_first(v_exp2(v_set1(x))); }

/* Sums up the squares of n numbers. */
INLINE float squares(const float *x, int64_t n) {
    vf sum = v_set1(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        sum = v_fma(v_load_f32(x + i), v_load_f32(x + i), sum);
    if (i < n) {
        vf rest = v_loadn_f32(x + i, (int)(n - i));
        sum = v_fma(rest, rest, sum);
    }
    return v_hsum(sum);
}

/* Returns sqrt(sum of squares / parts + eps) of n numbers. Where that leaves the range in which float32 holds squares,
 * the numbers are first divided by the largest of them, and so is what this returns. */
static float norm_of(float *x, int64_t n, float parts, float eps) {
    const float plain = squares(x, n) / parts + eps;
    if (plain > 1e-24f && plain < 1e30f)
        return sqrtf(plain);
    float top = 0x1p-126f;
    for (int64_t i = 0; i < n; i++)
        top = fmaxf(fabsf(x[i]), top);
    if (isinf(top))
        return top;
    for (int64_t i = 0; i < n; i++)
        x[i] /= top;
    return (float)sqrt((double)squares(x, n) / parts + (double)eps / top / top);
}
#endif
