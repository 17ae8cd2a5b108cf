/* SPDX-License-Identifier: Apache-2.0
 * These functions take a chunk of n <= 64 tokens at once. With D(i, j) the product of the decays of the tokens j + 1 to
 * i, and D(i) that of all tokens up to i,
 *
 *     w_i = beta_i v_i - D(i) e_i^T S - sum over j < i of A(i, j) w_j      A(i, j) = D(i, j) e_i^T k_j
 *     o_i = D(i) q_i^T S + sum over j <= i of P(i, j) w_j                  P(i, j) = D(i, j) q_i^T k_j
 *     S   = D(n) S + sum over j of D(n, j) k_j w_j^T
 *
 * (the UT transform of arXiv:2406.06484 and 2412.06464, solved in place of inverted). D are products of at most 64
 * decays, and at most 2 (linear_open_gates): no exponential of a sum is taken, and what underflows is 0. D(n) of the
 * state also comes less 1 (linear_split), so that rounding does not add up over chunks. A row goes through whole tiles
 * up to the 16 tokens before its own, and token by token through these, so that no number of a later token, NaN say,
 * meets an earlier one. Which products may be of words, words.h says. */

/* Makes of d[j] = D(i - 1, j) for j < i, times what key j is multiplied by, those of i. d is [80]. */
static void linear_decay_row(const linear_item *it, int64_t i, float *d) {
    const float *decay = it->decays;
    const vf by = v_set1(decay[i]);
    for (int64_t j = 0; j < i; j += VL)
        v_store(d + j, v_mul(v_load_f32(d + j), by));
    d[i] = it->key_factors[i];
    for (int64_t j = i + 1; j < LINEAR_PAD(i + 1); j++)
        d[j] = 0;
}
/* Multiplies numbers that are kept less 1: (1 + x)(1 + y) - 1. */
INLINE vf linear_both_less(vf x, vf y) { return v_fma(x, y, v_add(x, y)); }

/* Says that the rows of the next chunk, from token t on, are to be prefetched. */
static void linear_look_ahead(const linear_item *it, int slot, int index, int64_t t, int32_t head) {
    const ca_array *a = &it->c->a[index];
    it->ahead[slot] = (linear_ahead){0};
    if (t < it->last && a->ndim == 3)
        it->ahead[slot] = (linear_ahead){ca_row_of(a, t, head), a->strides[0] * a->itemsize, a->shape[2] * a->itemsize,
                                         ca_min64(CA_CHUNK, it->last - t)};
}

/* Adds sum over j of factors[r, j] w[j] to each row r in [i, i1) of `to`, or subtracts it where `takes` is set. j goes
 * from i0 to r, which is counted where `own` is set. Where it is not, `to` may be w. */
INLINE void linear_within(const float *factors, int64_t i0, int64_t i, int64_t i1, int own, int takes, int nv,
                          const float *w, float *to, int64_t ld) {
    for (; i < i1; i++) {
        vf sum[LINEAR_WITHIN];
        EACH(v, nv) sum[v] = v_load_f32(to + i * ld + v * VL);
        for (int64_t j = i0; j < i + own; j++) {
            const float f = factors[i * CA_CHUNK + j];
            EACH(v, nv) sum[v] = v_fma(v_set1(takes ? -f : f), v_load_f32(w + j * ld + v * VL), sum[v]);
        }
        EACH(v, nv) v_store(to + i * ld + v * VL, sum[v]);
    }
}
static NOINLINE void linear_triangle(const linear_item *it, const float *factors, int64_t i0, int64_t i, int64_t i1,
                                     int own, int takes, float *to) {
    int64_t c = 0;
    for (; c + LINEAR_WITHIN * VL <= it->vp; c += LINEAR_WITHIN * VL)
        linear_within(factors, i0, i, i1, own, takes, LINEAR_WITHIN, it->w + c, to + c, it->vp);
    for (; c < it->vp; c += VL)
        linear_within(factors, i0, i, i1, own, takes, 1, it->w + c, to + c, it->vp);
}

/* Solves rows [first, n) for w and adds what tokens of the chunk give to o, which holds what the state gives. */
static void linear_solve(const linear_item *it, int64_t first, int64_t n) {
    const linear_y w = {it->w, CA_LANES, it->vp, NULL};
    for (int64_t i0 = first / CA_LANES * CA_LANES; i0 < n; i0 += CA_LANES) {
        const int64_t i = ca_max64(i0, first), i1 = ca_min64(i0 + CA_LANES, n);
        const linear_x a = {it->a + i * CA_CHUNK, CA_CHUNK, 1, NULL}, p = {it->p + i * CA_CHUNK, CA_CHUNK, 1, NULL};
        if (i0 && it->delta)
            linear_product(it, i1 - i, it->vp, i0, a, w, (linear_to){it->w + i * it->vp, it->vp, LINEAR_SUB, NULL}, 0);
        if (it->delta)
            linear_triangle(it, it->a, i0, i, i1, 0, 1, it->w);
        if (i0)
            linear_product(it, i1 - i, it->vp, i0, p, w, (linear_to){it->o + i * it->vp, it->vp, LINEAR_ADD, NULL}, 0);
        linear_triangle(it, it->p, i0, i, i1, 1, 0, it->o);
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

/* Fills in the decays and betas of a value head. Returns how many tokens a chunk may take: those before the first one
 * up to which a part of the state grows by more than LINEAR_GROWTH. */
#define LINEAR_GROWTH 2
static int64_t linear_open_gates(const linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    float *decay = it->decays, growth = 1;
    linear_numbers(it->c, h, t, n, decay, it->decays_less_1, it->betas);
    for (int64_t i = 0; i < n; i++) {
        float by = decay[i];
        if (it->wide) {
            vf most = v_set1(0);
            linear_wide_decay(it->c, h, t + i, it->decay + i * it->kp, it->decay_less_1 + i * it->kp);
            for (int64_t c = 0; c < it->kp; c += VL)
                most = v_max(v_load_f32(it->decay + i * it->kp + c), most); /* NaN is none */
            by = v_hmax(most);
        }
        growth = fmaxf(growth, 1) * by;
        if (growth > LINEAR_GROWTH)
            return i;
    }
    return n;
}

/* Makes the operands and products that value heads share where a token has one decay, by words or not, unless they are
 * there. The operands that follow are of the same kind. */
static void linear_share(linear_item *it, int words) {
    const int64_t n = it->tokens;
    it->words = words;
    if (it->shared == words)
        return;
    it->shared = words;
    it->by_query = linear_rows(it, it->q, n, it->q_words);
    it->by_key = linear_rows(it, it->k, n, it->k_words);
    it->with_keys = linear_rows_as_columns(it, it->k, n, it->k_words);
    linear_product(it, n, n, it->dk, it->by_query, it->with_keys, (linear_to){it->qk, CA_CHUNK, LINEAR_SET, NULL}, 1);
    if (it->delta && !it->erases)
        linear_product(it, n, n, it->dk, it->by_key, it->with_keys, (linear_to){it->kk, CA_CHUNK, LINEAR_SET, NULL}, 1);
}

/* Fills in what all value heads of the item share: keys, queries and, where a token has one decay, their products. */
static void linear_open_chunk(linear_item *it, int64_t t, int64_t n) {
    const int32_t key_head = it->first / ca_linear_group(it->c->plan);
    for (int64_t i = 0; i < n; i++) {
        linear_read(it->c, CA_LINEAR_KEY, t + i, key_head, 1, it->k + i * it->kp);
        linear_read(it->c, CA_LINEAR_QUERY, t + i, key_head, it->c->how->scale, it->q + i * it->kp);
    }
    memset(it->k + n * it->kp, 0, (size_t)((LINEAR_PAD(n) - n) * it->kp) * sizeof *it->k);
    it->tokens = n;
    it->turned_tokens = 0;
    it->shared = -1;
    for (int64_t i = 0; i < n; i++)
        it->key_factors[i] = it->query_factors[i] = 1;
    if (!it->wide)
        linear_share(it, it->may_words);
}

/* Makes rows [first, n) of a and p of the products, and for each row what a product with the state is multiplied by
 * where it becomes a part of w (beta times the decays up to the row) and of o (these decays). */
static void linear_weigh(linear_item *it, int64_t first, int64_t n) {
    const float *decay = it->decays, *beta = it->betas, *of_key = it->key_factors, *of_query = it->query_factors;
    float *d = it->decays_since, *of_w = it->w_factors, *of_o = it->o_factors, total = 1;
    it->weighed = n;
    for (int64_t i = 0; i < n; i++) {
        linear_decay_row(it, i, d);
        total *= decay[i];
        const float b = of_key[i] * (it->erases ? 1 : beta[i]);
        of_w[i] = b * total;
        of_o[i] = of_query[i] * total;
        for (int64_t j = 0; i >= first && j <= i; j += VL) {
            const vf x = v_load_f32(d + j);
            if (it->delta)
                v_store(it->a + i * CA_CHUNK + j,
                        v_mul(v_mul(v_load_f32(it->kk + i * CA_CHUNK + j), v_set1(it->tiles ? -b : b)), x));
            v_store(it->p + i * CA_CHUNK + j,
                    v_mul(v_mul(v_load_f32(it->qk + i * CA_CHUNK + j), v_set1(of_query[i])), x));
        }
    }
}

/* Returns the decays that follow each of the first m tokens, and splits that of the state over all of them. */
static const float *linear_leave(linear_item *it, int64_t m) {
    const float *decay = it->decays, *less = it->decays_less_1;
    float *d = it->decays_since;
    vf total = v_set1(1), total_less = v_set1(0), kept;
    for (int64_t i = 0; i < m; i++) {
        if (m != it->weighed)
            linear_decay_row(it, i, d);
        total = v_mul(total, v_set1(decay[i]));
        total_less = linear_both_less(total_less, v_set1(less[i]));
    }
    it->weighed = m;
    total = linear_split(total, total_less, &kept);
    for (int64_t i = 0; i < it->kp; i += VL) {
        v_store(it->factor + i, total);
        v_store(it->kept + i, kept);
    }
    return d;
}

/* Makes of the state before the chunk that after its first m tokens. */
static void linear_advance(linear_item *it, int64_t m, float *state) {
    const float *d = linear_leave(it, m);
    for (int64_t j = 0; j < m; j++)
        for (int64_t c = 0; c < it->vp; c += VL)
            v_store(it->w_decayed + j * it->vp + c, v_mul(v_set1(d[j]), v_load_f32(it->w + j * it->vp + c)));
    it->words = it->may_words && m <= it->coarse && !linear_state_is_coarse(it, m, d);
    if (it->turned_tokens != m || it->turned_by_words != it->words)
        it->by_channel = linear_rows_turned(it, it->k, m, it->turned_words);
    it->turned_tokens = m;
    it->turned_by_words = it->words;
    linear_product(it, it->dk, it->vp, m, it->by_channel, linear_columns(it, it->w_decayed, m, it->w_words),
                   (linear_to){state, it->vp, LINEAR_DECAY, NULL}, 0);
}

/* Computes w and o of tokens [first, n) of a chunk, by words or by FMA; those of the tokens before are there. Returns
 * the erasers as an operand. */
static linear_x linear_take_rows(linear_item *it, const linear_head *h, int64_t t, int64_t first, int64_t n,
                                 int words) {
    const float *beta = it->betas;
    linear_share(it, words);
    const linear_y state = linear_columns(it, linear_state(it, h->head), it->dk, it->state_words);
    for (int64_t i = first; i < n; i++) {
        linear_value(it->c, h, t + i, beta[i], it->w + i * it->vp, it->x.u);
        if (it->erases)
            linear_eraser(it->c, h, t + i, beta[i], it->k + i * it->kp, it->e + i * it->kp);
    }
    linear_x erasers = it->by_key;
    if (it->erases) {
        erasers = linear_rows(it, it->e, n, it->e_words);
        linear_product(it, n, n, it->dk, erasers, it->with_keys, (linear_to){it->kk, CA_CHUNK, LINEAR_SET, NULL}, 1);
    }
    linear_weigh(it, first, n);
    if (it->delta)
        linear_product(it, n - first, it->vp, it->dk, linear_x_from(erasers, first), state,
                       (linear_to){it->w + first * it->vp, it->vp, LINEAR_SUB, it->w_factors + first}, 0);
    linear_product(it, n - first, it->vp, it->dk, linear_x_from(it->by_query, first), state,
                   (linear_to){it->o + first * it->vp, it->vp, LINEAR_SET, it->o_factors + first}, 0);
    linear_solve(it, first, n);
    return erasers;
}

/* Computes a chunk of one value head whose tokens have one decay each. */
static void linear_chunk(linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const linear_x erasers = linear_take_rows(it, h, t, 0, n, it->may_words);
    it->coarse = it->may_words ? linear_first_coarse(it, h, t, n, erasers.scale) : n;
    if (it->coarse < n)
        linear_take_rows(it, h, t, it->coarse, n, 0);
    linear_put_outputs(it, h, t, n);
}
