/* SPDX-License-Identifier: Apache-2.0
 * This file keeps the state of an online softmax (Milakov and Gimelshein, arXiv:1805.02867), for every dtype. Each
 * query row has o, the sum of weights times V; m, the reference max (row_max) in units of log2; and l, the sum of
 * weights (row_sum). */
#ifndef CPU_ATTN_ONLINE_SOFTMAX_H
#define CPU_ATTN_ONLINE_SOFTMAX_H
#include "parameters.h"

INLINE void scale_row(float *o, int64_t n, float factor) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(o + i, v_mul(v_load_f32(o + i), v_set1(factor)));
    if (i < n)
        v_storen_f32(o + i, v_mul(v_loadn_f32(o + i, (int)(n - i)), v_set1(factor)), (int)(n - i));
}

INLINE void add_row(float *o, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(o + i, v_add(v_load_f32(o + i), v_load_f32(x + i)));
    if (i < n)
        v_storen_f32(o + i, v_add(v_loadn_f32(o + i, (int)(n - i)), v_loadn_f32(x + i, (int)(n - i))), (int)(n - i));
}

/* Rows that have seen no key refer to 0, since -inf - -inf would be NaN. */
INLINE float reference(float m) { return m == -INFINITY ? 0 : m; }

/* Is the reference so far from 0 that scores must be multiplied and subtracted in two steps, each rounded (refer_row)?
 * An FMA does not round the product, while the reference is a rounded product, so the exponent of a weight may be off
 * by half a unit in the reference's last place. That is too much where the unit may exceed 2^-4. A factor so large that
 * its product with an octave might overflow needs the two steps, too. */
INLINE int is_far(float m, float factor) { return !(fabsf(m) < 0x1p20f && factor < 0x1p100f); }
INLINE void refer_row(float *s, int64_t n, float factor, float to) {
    scale_row(s, n, factor);
    for (int64_t i = 0; i < n; i += VL)
        v_store(s + i, v_sub(v_load_f32(s + i), v_set1(to)));
}

/* into.o = into.o * 2^(into.m - m) + from.o * 2^(from.m - m), where m is the larger of both. A state that has seen no
 * key leaves the other as it is, so that a zero keeps its sign. */
static void merge(const ca_state *into, const ca_state *from, int64_t rows, int64_t head_size_v) {
    for (int64_t r = 0; r < rows; r++) {
        float a = into->m[r], b = from->m[r], m = a > b ? a : b;
        float alpha_into = exp2_one(a - reference(m)), alpha_from = exp2_one(b - reference(m));
        float *x = into->o + r * head_size_v, *y = from->o + r * head_size_v;
        if (b == -INFINITY && from->l[r] == 0)
            continue;
        if (a == -INFINITY && into->l[r] == 0) {
            memcpy(x, y, (size_t)head_size_v * sizeof *x);
            into->m[r] = b;
            into->l[r] = from->l[r];
            continue;
        }
        int64_t i = 0;
        for (; i + VL <= head_size_v; i += VL)
            v_store(x + i, v_fma(v_load_f32(y + i), v_set1(alpha_from), v_mul(v_load_f32(x + i), v_set1(alpha_into))));
        if (i < head_size_v) {
            int n = (int)(head_size_v - i);
            v_storen_f32(
                x + i,
                v_fma(v_loadn_f32(y + i, n), v_set1(alpha_from), v_mul(v_loadn_f32(x + i, n), v_set1(alpha_into))), n);
        }
        into->l[r] = into->l[r] * alpha_into + from->l[r] * alpha_from;
        into->m[r] = m;
    }
}

/* Adds the sink, which has no value, to max and sum (contract: s_aux). Returns what o is to be multiplied by: 1 / sum,
 * and 0 for an empty row. */
INLINE float close_row(float *m, float *l, const float *s_aux, int64_t head) {
    float factor = 1;
    if (s_aux) {
        float sink = s_aux[head] * CA_LOG2E, top = *m > sink ? *m : sink;
        factor = exp2_one(*m - reference(top));
        *l = *l * factor + exp2_one(sink - reference(top));
        *m = top;
    }
    return *l == 0 ? 0 : factor / *l;
}
#endif
