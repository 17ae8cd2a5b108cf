/* SPDX-License-Identifier: Apache-2.0
 * These functions take a chunk of n <= 64 tokens at once. With D(i, j) the product of the decays of the tokens j + 1 to
 * i, and D(i) that of all tokens up to i,
 *
 *     w_i = beta_i v_i - D(i) e_i^T S - sum over j < i of A(i, j) w_j      A(i, j) = D(i, j) e_i^T k_j
 *     o_i = D(i) q_i^T S + sum over j <= i of P(i, j) w_j                  P(i, j) = D(i, j) q_i^T k_j
 *     S   = D(n) S + sum over j of D(n, j) k_j w_j^T
 *
 * (the UT transform of arXiv:2406.06484 and 2412.06464, solved in place of inverted). D are products of at most 64
 * decays: no exponential of a sum is taken, so nothing overflows, and what underflows is 0. D(n) of the state also
 * comes less 1 (linear_split), so that rounding does not add up over chunks. A row goes by FMA through whole tiles up
 * to the 16 tokens before its own, and token by token through these, so that no number of a later token, NaN say, meets
 * an earlier one. */

/* Makes of d[j] = D(i - 1, j) for j < i those of i. d is [80]. */
static void linear_decay_row(const float *decay, int64_t i, float *d) {
    const vf by = v_set1(decay[i]);
    for (int64_t j = 0; j < i; j += VL)
        v_store(d + j, v_mul(v_load_f32(d + j), by));
    d[i] = 1;
    for (int64_t j = i + 1; j < LINEAR_PAD(i + 1); j++)
        d[j] = 0;
}
/* Multiplies numbers that are kept less 1: (1 + x)(1 + y) - 1. */
INLINE vf linear_both_less(vf x, vf y) { return v_fma(x, y, v_add(x, y)); }

/* Transposes keys [n][kp] to [groups][kp][16]. */
static void linear_transpose_keys(const linear_item *it, const float *k, int64_t n) {
    for (int64_t g = 0; g < n; g += CA_LANES)
        linear_transpose(k + g * it->kp, it->kp, CA_LANES, it->kp, it->keys + g * it->kp, CA_LANES);
}

/* Says that the rows of the next chunk, from token t on, are to be prefetched. */
static void linear_look_ahead(const linear_item *it, int slot, int index, int64_t t, int32_t head) {
    const ca_array *a = &it->c->a[index];
    it->ahead[slot] = (linear_ahead){0};
    if (t < it->last && a->ndim == 3)
        it->ahead[slot] = (linear_ahead){ca_row_of(a, t, head), a->strides[0] * a->itemsize, a->shape[2] * a->itemsize,
                                         ca_min64(CA_CHUNK, it->last - t)};
}

/* Solves for w and adds what tokens of the chunk give to o, which holds what the state gives. */
static void linear_solve(const linear_item *it, int64_t n) {
    const int64_t vp = it->vp;
    for (int64_t i0 = 0; i0 < n; i0 += CA_LANES) {
        const int64_t rows = ca_min64(CA_LANES, n - i0), i1 = i0 + rows;
        const linear_y w = {it->w, CA_LANES, vp};
        if (i0 && it->delta)
            linear_product(it, rows, vp, i0, (linear_x){it->a + i0 * CA_CHUNK, CA_CHUNK, 1}, w, it->w + i0 * vp, vp,
                           LINEAR_SUB, 0);
        for (int64_t i = i0; it->delta && i < i1; i++)
            for (int64_t c = 0; c < vp; c += VL) {
                vf sum = v_load_f32(it->w + i * vp + c);
                for (int64_t j = i0; j < i; j++)
                    sum = v_sub(sum, v_mul(v_set1(it->a[i * CA_CHUNK + j]), v_load_f32(it->w + j * vp + c)));
                v_store(it->w + i * vp + c, sum);
            }
        if (i0)
            linear_product(it, rows, vp, i0, (linear_x){it->p + i0 * CA_CHUNK, CA_CHUNK, 1}, w, it->o + i0 * vp, vp,
                           LINEAR_ADD, 0);
        for (int64_t i = i0; i < i1; i++)
            for (int64_t c = 0; c < vp; c += VL) {
                vf sum = v_load_f32(it->o + i * vp + c);
                for (int64_t j = i0; j <= i; j++)
                    sum = v_fma(v_set1(it->p[i * CA_CHUNK + j]), v_load_f32(it->w + j * vp + c), sum);
                v_store(it->o + i * vp + c, sum);
            }
    }
}

static void linear_put_outputs(const linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const ca_array *out = &it->c->a[CA_LINEAR_OUTPUT];
    for (int64_t i = 0; i < n; i++) {
        float *o = it->o + i * it->vp;
        linear_skip(it->c, h, t + i, o, it->x.u);
        linear_narrow(o, it->dv, out->dtype, ca_row_of(out, t + i, h->head));
    }
}

/* Fills in what all value heads of the item share: keys, queries and, where a token has one decay, their products. */
static void linear_open_chunk(const linear_item *it, int64_t t, int64_t n) {
    const int32_t key_head = it->first / ca_linear_group(it->c->plan);
    for (int64_t i = 0; i < n; i++) {
        linear_read(it->c, CA_LINEAR_KEY, t + i, key_head, 1, it->k + i * it->kp);
        linear_read(it->c, CA_LINEAR_QUERY, t + i, key_head, it->c->how->scale, it->q + i * it->kp);
    }
    memset(it->k + n * it->kp, 0, (size_t)((LINEAR_PAD(n) - n) * it->kp) * sizeof *it->k);
    if (it->wide)
        return;
    const linear_y keys = {it->keys, CA_LANES * it->kp, CA_LANES};
    linear_transpose_keys(it, it->k, n);
    linear_product(it, n, n, it->dk, (linear_x){it->q, it->kp, 1}, keys, it->qk, CA_CHUNK, LINEAR_SET, 1);
    if (it->delta && !it->erases)
        linear_product(it, n, n, it->dk, (linear_x){it->k, it->kp, 1}, keys, it->kk, CA_CHUNK, LINEAR_SET, 1);
}

/* Makes a and p of the products, and the factors by which rows of u and o decay. */
static void linear_weigh(const linear_item *it, int64_t n, const float *decay, const float *beta) {
    float *d = it->numbers[3], total = 1;
    for (int64_t i = 0; i < n; i++) {
        linear_decay_row(decay, i, d);
        total *= decay[i];
        const vf by = v_set1(it->erases ? 1 : beta[i]), since = v_set1(total);
        for (int64_t j = 0; j <= i; j += VL) {
            const vf x = v_load_f32(d + j);
            if (it->delta)
                v_store(it->a + i * CA_CHUNK + j, v_mul(v_mul(v_load_f32(it->kk + i * CA_CHUNK + j), by), x));
            v_store(it->p + i * CA_CHUNK + j, v_mul(v_load_f32(it->qk + i * CA_CHUNK + j), x));
        }
        for (int64_t c = 0; c < it->vp; c += VL) {
            float *u = it->u + i * it->vp + c, *o = it->o + i * it->vp + c, *w = it->w + i * it->vp + c;
            if (it->delta)
                v_store(w, v_sub(v_load_f32(w), v_mul(v_mul(by, since), v_load_f32(u))));
            v_store(o, v_mul(since, v_load_f32(o)));
        }
    }
}

/* Makes of the state before the chunk that after its first m tokens. */
static void linear_advance(const linear_item *it, int64_t m, float *state) {
    const float *decay = it->numbers[0], *less = it->numbers[1];
    float *d = it->numbers[3];
    vf total = v_set1(1), total_less = v_set1(0), kept;
    for (int64_t i = 0; i < m; i++) {
        linear_decay_row(decay, i, d);
        total = v_mul(total, v_set1(decay[i]));
        total_less = linear_both_less(total_less, v_set1(less[i]));
    }
    total = linear_split(total, total_less, &kept);
    for (int64_t j = 0; j < m; j++)
        for (int64_t c = 0; c < it->vp; c += VL)
            v_store(it->w_left + j * it->vp + c, v_mul(v_set1(d[j]), v_load_f32(it->w + j * it->vp + c)));
    for (int64_t i = 0; i < it->kp; i += VL) {
        v_store(it->factor + i, total);
        v_store(it->kept + i, kept);
    }
    linear_product(it, it->dk, it->vp, m, (linear_x){it->k, 1, it->kp}, (linear_y){it->w_left, CA_LANES, it->vp}, state,
                   it->vp, LINEAR_DECAY, 0);
}

/* Computes a chunk of one value head whose tokens have one decay each. */
static void linear_chunk(const linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const linear_y state = {linear_state(it, h->head), CA_LANES, it->vp};
    float *decay = it->numbers[0], *beta = it->numbers[2];
    linear_numbers(it->c, h, t, n, decay, it->numbers[1], beta);
    for (int64_t i = 0; i < n; i++) {
        linear_value(it->c, h, t + i, beta[i], it->w + i * it->vp, it->x.u);
        if (it->erases)
            linear_eraser(it->c, h, t + i, beta[i], it->k + i * it->kp, it->e + i * it->kp);
    }
    if (it->erases)
        linear_product(it, n, n, it->dk, (linear_x){it->e, it->kp, 1},
                       (linear_y){it->keys, CA_LANES * it->kp, CA_LANES}, it->kk, CA_CHUNK, LINEAR_SET, 1);
    if (it->delta)
        linear_product(it, n, it->vp, it->dk, (linear_x){it->erases ? it->e : it->k, it->kp, 1}, state, it->u, it->vp,
                       LINEAR_SET, 0);
    linear_product(it, n, it->vp, it->dk, (linear_x){it->q, it->kp, 1}, state, it->o, it->vp, LINEAR_SET, 0);
    linear_weigh(it, n, decay, beta);
    linear_solve(it, n);
    linear_put_outputs(it, h, t, n);
}
