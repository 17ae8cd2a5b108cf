/* SPDX-License-Identifier: Apache-2.0
 * This is a chunk whose tokens have a decay for each key channel. D(i, j) is a vector within the products A and P. For
 * a block of 16 rows it is split at the block's first token r: D(i, j) = D(i, r) D(r, j), both at most 2, so that
 * products with the keys before the block are matrix products; within the block it is multiplied up token by token. */

INLINE void linear_times(const linear_item *it, const float *x, const float *y, float *to) {
    for (int64_t c = 0; c < it->kp; c += VL)
        v_store(to + c, v_mul(v_load_f32(x + c), v_load_f32(y + c)));
}
INLINE void linear_fill(const linear_item *it, float *row, float x) {
    for (int64_t c = 0; c < it->kp; c += VL)
        v_store(row + c, v_set1(x));
}

/* Fills rows [i0, i1) of a and p left of column i0. `keys` holds the keys before, times D(r, j) of the block before,
 * which becomes that of this block. */
static void linear_left_of_block(const linear_item *it, int64_t i0, int64_t i1) {
    const int64_t kp = it->kp, before = i0 - CA_LANES;
    float *by = it->key_room;
    linear_fill(it, by, 1);
    for (int64_t j = i0 - 1; j >= before; j--) { /* the keys of the block before, backwards from token i0 */
        linear_times(it, by, it->decay + (j + 1) * kp, by);
        linear_times(it, by, it->k + j * kp, it->kg + (j - before) * kp);
    }
    linear_transpose(it->kg, kp, CA_LANES, kp, it->keys + before * kp, CA_LANES);
    linear_fill(it, by, 1);
    for (int64_t j = before + 1; j <= i0; j++)
        linear_times(it, by, it->decay + j * kp, by);
    for (int64_t g = 0; g < before; g += CA_LANES)
        for (int64_t d = 0; d < it->dk; d++)
            for (int64_t c = 0; c < CA_LANES; c += VL) {
                float *key = it->keys + g * kp + d * CA_LANES + c;
                v_store(key, v_mul(v_load_f32(key), v_set1(by[d])));
            }
    linear_fill(it, by, 1);
    for (int64_t i = i0; i < i1; i++) {
        if (i > i0)
            linear_times(it, by, it->decay + i * kp, by);
        linear_times(it, by, it->e + i * kp, it->kg + (i - i0) * kp);
        linear_times(it, by, it->q + i * kp, it->kg + (CA_LANES + i - i0) * kp);
    }
    const linear_y keys = {it->keys, CA_LANES * kp, CA_LANES, NULL};
    if (it->delta)
        linear_product(it, i1 - i0, i0, it->dk, (linear_x){it->kg, kp, 1, NULL}, keys,
                       (linear_to){it->a + i0 * CA_CHUNK, CA_CHUNK, LINEAR_SET, NULL}, 0);
    linear_product(it, i1 - i0, i0, it->dk, (linear_x){it->kg + CA_LANES * kp, kp, 1, NULL}, keys,
                   (linear_to){it->p + i0 * CA_CHUNK, CA_CHUNK, LINEAR_SET, NULL}, 0);
}

/* Fills in columns [j, j + columns) of the rows from j on to i1, one key at a time. */
static void linear_within_block(const linear_item *it, int64_t j, int64_t i1) {
    const int64_t kp = it->kp;
    float *x = it->key_room;
    memcpy(x, it->k + j * kp, (size_t)kp * sizeof *x);
    for (int64_t i = j; i < i1; i++) {
        vf a = v_set1(0), p = v_set1(0);
        for (int64_t c = 0; c < kp; c += VL) {
            vf key = v_load_f32(x + c);
            if (i > j) {
                key = v_mul(key, v_load_f32(it->decay + i * kp + c));
                v_store(x + c, key);
            }
            a = v_fma(v_load_f32(it->e + i * kp + c), key, a);
            p = v_fma(v_load_f32(it->q + i * kp + c), key, p);
        }
        it->a[i * CA_CHUNK + j] = v_hsum(a);
        it->p[i * CA_CHUNK + j] = v_hsum(p);
    }
}

static void linear_advance_channels(const linear_item *it, int64_t m, float *state) {
    const int64_t kp = it->kp;
    float *by = it->key_room;
    linear_fill(it, by, 1);
    for (int64_t j = m - 1; j >= 0; j--) {
        linear_times(it, by, it->k + j * kp, it->kg + j * kp);
        linear_times(it, by, it->decay + j * kp, by);
    }
    linear_fill(it, it->factor, 0); /* becomes D(m) - 1 */
    for (int64_t j = 0; j < m; j++)
        for (int64_t c = 0; c < kp; c += VL) {
            const vf less = v_load_f32(it->decay_less_1 + j * kp + c);
            v_store(it->factor + c, linear_both_less(v_load_f32(it->factor + c), less));
        }
    for (int64_t c = 0; c < kp; c += VL) {
        vf kept;
        v_store(it->factor + c, linear_split(v_load_f32(by + c), v_load_f32(it->factor + c), &kept));
        v_store(it->kept + c, kept);
    }
    linear_product(it, it->dk, it->vp, m, (linear_x){it->kg, 1, kp, NULL}, (linear_y){it->w, CA_LANES, it->vp, NULL},
                   (linear_to){state, it->vp, LINEAR_DECAY, NULL}, 0);
}

static void linear_chunk_channels(const linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const linear_y state = {linear_state(it, h->head), CA_LANES, it->vp, NULL};
    const int64_t kp = it->kp;
    float *beta = it->betas, *by = it->query_room;
    linear_fill(it, by, 1);
    for (int64_t i = 0; i < n; i++) {
        linear_value(it->c, h, t + i, beta[i], it->w + i * it->vp, it->x.u);
        linear_eraser(it->c, h, t + i, beta[i], it->k + i * kp, it->e + i * kp);
        linear_times(it, by, it->decay + i * kp, by);
        linear_times(it, by, it->e + i * kp, it->ek + i * kp);
        linear_times(it, by, it->q + i * kp, it->qg + i * kp);
    }
    if (it->delta)
        linear_product(it, n, it->vp, it->dk, (linear_x){it->ek, kp, 1, NULL}, state,
                       (linear_to){it->w, it->vp, LINEAR_SUB, NULL}, 0);
    linear_product(it, n, it->vp, it->dk, (linear_x){it->qg, kp, 1, NULL}, state,
                   (linear_to){it->o, it->vp, LINEAR_SET, NULL}, 0);
    for (int64_t i0 = 0; i0 < n; i0 += CA_LANES) {
        const int64_t i1 = ca_min64(n, i0 + CA_LANES);
        if (i0)
            linear_left_of_block(it, i0, i1);
        for (int64_t j = i0; j < i1; j++)
            linear_within_block(it, j, i1);
    }
    linear_solve(it, 0, n);
    linear_put_outputs(it, h, t, n);
}
