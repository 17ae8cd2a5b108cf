/* SPDX-License-Identifier: Apache-2.0
 * This file turns a strip's scores into weights in place, for amx/attention.h, a few rows at a time. */

/* Makes the scores of keys that a row may not see -inf, whatever they are. */
static void hide(const strip *t, float *s, int64_t lo, int64_t hi) {
    for (const group *g = t->g; g < t->g + t->num_groups; g++, s += CA_LANES) {
        if (g->key >= lo && g->key + CA_LANES <= hi && g->n == CA_LANES)
            continue;
        for (int i = 0; i < CA_LANES; i += VL)
            v_store(s + i, keep_seen(v_load_f32(s + i), g, i, lo, hi));
    }
}

/* Multiplies a row's scores by the keys' scales, where integers were multiplied in place of keys. */
static void scale_scores(const strip *t, float *s) {
    for (int i = 0; i < t->num_groups * CA_LANES; i += VL)
        v_store(s + i, v_mul(v_load_f32(s + i), scales_of(t->g, K, 0, i)));
}

/* Prepares a row of scores for the softmax. Returns what they are still to be multiplied by. */
static float prepare(const tile_work *w, const strip *t, float *s, int64_t row) {
    const scratch *x = &w->scratch;
    const int64_t lo = ca_max64(t->k0, x->lo[row]), hi = ca_min64(t->k1, x->hi[row]);
    if (w->plan->sides[K].one_scale)
        scale_scores(t, s);
    if (t->shaped) {
        logits_transform_bf16(&w->plan->shape, s, t->g, t->num_groups, x->factor, w->call->softcap, x->slope[row],
                              x->pos[row], x->bias[row], lo, hi, t->masked);
        mask_tree(x, row, t->g, t->num_groups, s);
        return 1;
    }
    if (t->masked)
        hide(t, s, lo, hi);
    return x->factor;
}

static void weigh(const tile_work *w, const strip *t) {
    const int64_t dv = w->head_size_v;
    for (int r = 0, n; r < t->rows; r += n) {
        const int64_t row = t->row + r;
        float *s = w->s + r * S_STRIDE, factor[SOFTMAX_ROWS];
        n = (int)ca_min64(SOFTMAX_ROWS, t->rows - r);
        for (int j = 0; j < n; j++)
            factor[j] = prepare(w, t, s + j * S_STRIDE, row + j);
        online_softmax_bf16(s, n, t->num_groups * CA_LANES, factor, w->plan->sides[V].one_scale, w->state->m + row,
                            w->state->l + row, w->state->o + row * dv, dv);
        if (w->plan->sides[V].one_scale)
            scale_weights_bf16(n, s, t->g, t->num_groups, 0, s);
    }
}
