/* SPDX-License-Identifier: Apache-2.0
 * This file turns a strip's scores into weights in place, for amx/attention.h, a few rows at a time. */

/* Multiplies a row's scores by the keys' scales, where integers were multiplied in place of keys. */
static void scale_scores(const strip *t, float *s) {
    for (int i = 0; i < t->num_groups * CA_LANES; i += VL)
        v_store(s + i, v_mul(v_load_f32(s + i), scales_of(t->g, K, 0, i)));
}

static void weigh(const tile_work *w, const strip *t) {
    const int64_t dv = w->head_size_v;
    const scored_keys keys = {t->g, t->num_groups, t->masked, t->k0, t->k1};
    for (int r = 0, n; r < t->rows; r += n) {
        const int64_t row = t->row + r;
        float *s = w->s + r * S_STRIDE, factor[SOFTMAX_ROWS];
        n = (int)ca_min64(SOFTMAX_ROWS, t->rows - r);
        for (int j = 0; j < n; j++) {
            if (w->plan->sides[K].one_scale)
                scale_scores(t, s + j * S_STRIDE);
            factor[j] = logits_of_row_bf16(w->plan, w->call, &w->scratch, row + j, &keys, s + j * S_STRIDE);
        }
        online_softmax_bf16(s, n, t->num_groups * CA_LANES, factor, w->plan->sides[V].one_scale, w->state->m + row,
                            w->state->l + row, w->state->o + row * dv, dv);
        if (w->plan->sides[V].one_scale)
            scale_weights_bf16(n, s, t->g, t->num_groups, 0, s);
    }
}
