/* SPDX-License-Identifier: Apache-2.0
 * exp2 and tanh over the vector vocabulary of an isa file (see vocabulary.md beside this file).
 * Coefficients: Chebyshev fits of (2^f - 1)/f on [-1/2, 1/2] and (tanh(x) - x)/x^3 in x^2 on
 * [0, 5/8]; largest relative errors after rounding, over 200,001 points: 1.2 and 1.4 units of 2^-24. */

/* 2^x for x <= 127; exactly 1 at 0, exactly 0 from -127 down (so that masked keys weigh nothing);
 * NaN stays. x = n + f, n = round(x): 2^f by the polynomial, 2^n in the exponent. */
INLINE vf v_exp2(vf x) {
    x = v_max(v_set1(-127.0f), x);
    vf n = v_round(x), f = v_sub(x, n);
    vf p = v_set1(0.000154614478f);
    p = v_fma(p, f, v_set1(0.00133908668f));
    p = v_fma(p, f, v_set1(0.00961805694f));
    p = v_fma(p, f, v_set1(0.0555035695f));
    p = v_fma(p, f, v_set1(0.240226507f));
    p = v_fma(p, f, v_set1(0.693147182f));
    p = v_fma(p, f, v_set1(1.0f));
    return v_scale(p, n);
}

/* The same to 1e-4, for weights that are then rounded to bf16. */
INLINE vf v_exp2_short(vf x) {
    x = v_max(v_set1(-127.0f), x);
    vf n = v_round(x), f = v_sub(x, n);
    vf p = v_set1(0.0550078f);
    p = v_fma(p, f, v_set1(0.2422085f));
    p = v_fma(p, f, v_set1(0.6932828f));
    p = v_fma(p, f, v_set1(1.0f));
    return v_scale(p, n);
}

/* The same to 3e-06, for softcap before such weights. */
INLINE vf v_exp2_middle(vf x) {
    x = v_max(v_set1(-127.0f), x);
    vf n = v_round(x), f = v_sub(x, n);
    vf p = v_set1(0.00958277192f);
    p = v_fma(p, f, v_set1(0.0559062101f));
    p = v_fma(p, f, v_set1(0.240240991f));
    p = v_fma(p, f, v_set1(0.693124235f));
    p = v_fma(p, f, v_set1(1.0f));
    return v_scale(p, n);
}

/* Small |x| by the odd polynomial, where 1 - 2/(e^2x + 1) would cancel; above by that formula. */
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
