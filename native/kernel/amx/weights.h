/* SPDX-License-Identifier: Apache-2.0
 * Here scores become weights, for amx/attention.h: a few rows at a time, while the next sub-block's scores are
 * formed. */

#include <float.h>

static NOINLINE void shape(const tile_work *w, const strip *t, const sub_block *b, int r) {
    const scratch *x = &w->x;
    const int64_t row = t->row + r;
    const group *g = t->g + b->group;
    float *s = b->s + r * S_LD;
    for (int i = 0; w->scaled && i < b->num_groups * CA_LANES; i += VL)
        v_store(s + i, v_mul(v_load_f32(s + i), v_load_f32(t->by[K] + b->group * CA_LANES + i)));
    logits_transform_bf16(&w->plan->shape, s, g, b->num_groups, w->scaled ? 1 : x->factor, w->call->softcap,
                          x->slope[row], x->pos[row], x->bias[row], ca_max64(t->k0, x->lo[row]),
                          ca_min64(t->k1, x->hi[row]), b->masked);
    mask_tree(x, row, g, b->num_groups, s);
}

static NOINLINE void raise_max(const tile_work *w, const strip *t, int r, float high) {
    float *m = w->state->m + t->row + r, *l = w->l + r * VL;
    if (!(high > *m))
        return;
    v_store(l, v_mul(v_load_f32(l), v_exp2(v_set1(*m - high))));
    *m = high;
}

static NOINLINE void refer_far(float *s, int lanes, float factor, const float *k_by, float to) {
    for (int i = 0; i < lanes && k_by; i += VL)
        v_store(s + i, v_mul(v_load_f32(s + i), v_load_f32(k_by + i)));
    refer_row(s, lanes, factor, to);
}

/* Turns scores of mr rows to weights against each row's reference max, which only grows; settle() makes what was
 * weighed before follow it. References that are powers of two were dropped (MEASUREMENTS.md: AMX). */
INLINE void weigh_rows(const tile_work *w, const strip *t, const sub_block *b, int mr, int scaled) {
    const int r = b->row, lanes = b->num_groups * CA_LANES, waiting = b->group * CA_LANES;
    float *s = b->s + r * S_LD, *p = w->p + r * P_LD / 2, *l = w->l + r * VL, *m = w->state->m + t->row + r;
    const int shaped = t->shaped || b->masked;
    const float *k_by = NULL, *v_by = NULL;
    const float factor = shaped || scaled ? 1 : w->x.factor, octave = scaled ? 1 : octave_bf16;
    const vf turns = scaled ? v_set1(0) : turns_bf16();
    const float *by[SOFTMAX_ROWS];
    vf top[SOFTMAX_ROWS], sum[SOFTMAX_ROWS], ref[SOFTMAX_ROWS], factors[SOFTMAX_ROWS];
    int higher = 0, lost[SOFTMAX_ROWS] = {0};
    if (scaled) {
        k_by = shaped ? w->ones : t->by[K] + waiting;
        v_by = t->by[V] + waiting;
    }
    if (shaped)
        EACH(j, mr) shape(w, t, b, r + j);
    if (b->num_groups % 2)
        EACH(j, mr) v_store(s + j * S_LD + lanes, v_set1(-INFINITY));
    EACH(j, mr) top[j] = v_set1(-INFINITY);
    for (int i = 0; i < lanes; i += 2 * VL)
        EACH(j, mr) {
            vf x[2];
            EACH(h, 2) {
                x[h] = v_load_f32(s + j * S_LD + i + h * VL);
                top[j] = v_max(top[j], scaled ? v_mul(x[h], v_load_f32(k_by + i + h * VL)) : x[h]);
            }
            lost[j] |= scaled ? 0 : lost_bf16(x[0], x[1]);
        }
    EACH(j, mr) {
        top[j] = v_mul(top[j], v_set1(factor));
        higher |= v_any_less(v_set1(m[j]), top[j]);
    }
    if (higher)
        EACH(j, mr) raise_max(w, t, r + j, v_hmax(top[j]));
    memcpy(w->m[1 + b->group / SUB_GROUPS] + r, m, (size_t)mr * sizeof *m);
    EACH(j, mr) {
        ref[j] = v_add(v_set1(-reference(m[j]) * octave), turns);
        sum[j] = v_load_f32(l + j * VL);
        by[j] = k_by;
        factors[j] = v_set1(factor * octave);
        if (is_far(m[j], factor)) {
            refer_far(s + j * S_LD, lanes, factor, k_by, reference(m[j]));
            ref[j] = turns;
            by[j] = w->ones;
            factors[j] = v_set1(octave);
            lost[j] |= !(m[j] < INFINITY);
        }
    }
    for (int i = 0; i < lanes; i += 2 * VL)
        EACH(j, mr) {
            vf a[2];
            EACH(h, 2) {
                vf x = v_load_f32(s + j * S_LD + i + h * VL);
                a[h] = v_fma(x, scaled ? v_load_f32(by[j] + i + h * VL) : factors[j], ref[j]);
            }
            if (!scaled) {
                sum[j] = put_powers_bf16(p + j * P_LD / 2, waiting + i, a[0], a[1], sum[j]);
                continue;
            }
            EACH(h, 2) a[h] = v_exp2_falling(a[h]);
            sum[j] = v_add(v_add(sum[j], a[0]), a[1]);
            EACH(h, 2) a[h] = v_mul_unless_0(a[h], v_load_f32(v_by + i + h * VL));
            put_weights_bf16(p + j * P_LD / 2, waiting + i, a[0], a[1], sum[j]);
        }
    EACH(j, mr) v_store(l + j * VL, lost[j] ? v_set1(NAN) : sum[j]);
}

static NOINLINE void weigh_several(const tile_work *w, const strip *t, const sub_block *b) {
    weigh_rows(w, t, b, SOFTMAX_ROWS, 0);
}
static NOINLINE void weigh_one(const tile_work *w, const strip *t, const sub_block *b) { weigh_rows(w, t, b, 1, 0); }
static NOINLINE void weigh_several_scaled(const tile_work *w, const strip *t, const sub_block *b) {
    weigh_rows(w, t, b, SOFTMAX_ROWS, 1);
}
static NOINLINE void weigh_one_scaled(const tile_work *w, const strip *t, const sub_block *b) {
    weigh_rows(w, t, b, 1, 1);
}

/* Weighs the rows of a sub-block before `end`, but for a few that the next call takes along. */
static void weigh_until(const tile_work *w, const strip *t, sub_block *b, int end) {
    for (; b->row + SOFTMAX_ROWS <= end; b->row += SOFTMAX_ROWS)
        (w->scaled ? weigh_several_scaled : weigh_several)(w, t, b);
    for (; end == t->rows && b->row < end; b->row++)
        (w->scaled ? weigh_one_scaled : weigh_one)(w, t, b);
}

/* A weight that would become subnormal becomes 0, as in a rounding to bf16: a product that is subnormal takes Intel's
 * cores 150 cycles. */
static void scale_weights(float *p, int lanes, float factor) {
    const vf least = v_set1(FLT_MIN / factor);
    for (int i = 0; i < lanes; i += 2 * VL) {
        vf x[2];
        EACH(j, 2) {
            x[j] = v_load_bf16(weights_at_bf16(p, i + j * VL));
            x[j] = v_mul(v_less(v_abs(x[j]), least, v_set1(0), x[j]), v_set1(factor));
        }
        put_weights_bf16(p, i, x[0], x[1], x[0]);
    }
}

/* O, l and the weights that wait for their V follow the row's reference max. They do so once for a block, since with
 * ALiBi the max grows in every sub-block. */
static void settle(const tile_work *w, const strip *t) {
    for (int r = 0; r < t->rows; r++) {
        const int64_t row = t->row + r, dv = w->head_size_v;
        const float m = w->state->m[row];
        if (w->m[0][r] == m)
            continue;
        if (w->m[0][r] != -INFINITY) { /* else O and l are 0 */
            const float before = exp2_one(w->m[0][r] - m);
            scale_row(w->state->o + row * dv, dv, before);
            w->state->l[row] *= before;
        }
        for (int g = 0, s = 1; g < t->num_groups && w->m[s][r] != m; g += SUB_GROUPS, s++)
            scale_weights(w->p + (r * P_LD + g * CA_LANES) / 2, SUB, exp2_one(w->m[s][r] - m));
    }
}
