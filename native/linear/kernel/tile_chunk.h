/* SPDX-License-Identifier: Apache-2.0
 * This is chunk.h by tiles. Keys and queries stay as they come, in bfloat16: what their norm, or a scale, multiplies
 * them by is a factor of rows of the products.
 *
 * Where each key channel has a decay, D(i, j) is split at the first token r of a piece: D(i, j) = D(i, r) / D(j, r). So
 * one operand, keys divided by D(j, r), serves A, P and the state, and queries and erasers times D(i, r) serve A, P, w
 * and o; the state begins as a_r S. Each term errs by its own digits alone, as long as nothing leaves the range of
 * bfloat16: a piece ends before the first token whose D(i, r) is below LINEAR_LEAST, or above LINEAR_GROWTH, in some
 * channel. That follows from the tokens up to it, as all bits do. */

/* A key is divided by it, so keys up to 2^87 are in range; and erasers and queries have all digits from 2^-70 on. */
#define LINEAR_LEAST 0x1p-40f
#define LINEAR_SHORT_PIECE 16 /* A first piece that decays cut to fewer tokens leaves the chunk to FMA. */

/* Reads a query or a key. Where it has a norm, it becomes x / p for the power of two p of its largest element, which
 * bfloat16 holds and whose products float32 does; returns what that is to be multiplied by. */
static float linear_read_exact(const ca_linear_call *c, int index, int64_t t, int32_t key_head, float scale,
                               float *to) {
    const ca_array *a = &c->a[index];
    const int64_t dk = c->plan->shape.head_k_dim;
    linear_widen(ca_row_of(a, t, key_head), a->dtype, dk, to);
    if (!c->how->use_qk_l2norm_in_kernel)
        return scale;
    vf top = v_set1(0);
    for (int64_t i = 0; i < dk; i += VL)
        top = v_max(v_abs(v_load_f32(to + i)), top);
    int power;
    frexpf(fminf(fmaxf(v_hmax(top), 0x1p-126f), 0x1p126f), &power);
    const float by = ldexpf(1, 1 - power);
    for (int64_t i = 0; i < dk; i += VL)
        v_store(to + i, v_mul(v_load_f32(to + i), v_set1(by)));
    return (float)(scale / sqrt((double)squares(to, dk) + (double)c->how->norm_eps * by * by));
}

static linear_to linear_set(float *c, int64_t ld) { return (linear_to){c, ld, LINEAR_SET, NULL}; }

/* Fills in what all value heads of the item share where a token has one decay. */
static void linear_open_chunk_tiles(linear_item *it, int64_t t, int64_t n) {
    const int32_t key_head = it->first / ca_linear_group(it->c->plan);
    const int64_t kp = it->kp, tiles = ca_div_up(n, CA_LANES), steps = LINEAR_STEPS(kp);
    it->turned_tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        it->key_factors[i] = linear_read_exact(it->c, CA_LINEAR_KEY, t + i, key_head, 1, it->k + i * kp);
        it->query_factors[i] =
            linear_read_exact(it->c, CA_LINEAR_QUERY, t + i, key_head, it->c->how->scale, it->q + i * kp);
    }
    memset(it->k + n * kp, 0, (size_t)((LINEAR_PAD(n) - n) * kp) * sizeof *it->k);
    linear_turn_rows(it, it->k, n);
    it->y_key.tile = steps * LINEAR_PART;
    linear_pack_columns_1(it->keys, CA_CHUNK, kp, n, it->y_key);
    it->x_query = linear_pack_rows(1, it->q, kp, n, kp, NULL, it->x_query);
    linear_side side[2];
    if (it->delta && !it->erases) {
        it->x_key = linear_pack_rows(1, it->k, kp, n, kp, NULL, it->x_key);
        linear_two_sides(side, it->x_key, linear_set(it->kk, CA_CHUNK), it->x_query, linear_set(it->qk, CA_CHUNK));
        linear_tiles_11(it, side, 2 * tiles, it->y_key, tiles, steps, 1);
    } else {
        linear_one_side(side, it->x_query, linear_set(it->qk, CA_CHUNK));
        linear_tiles_11(it, side, tiles, it->y_key, tiles, steps, 2);
    }
}

/* Solves n rows for w and adds what tokens of the chunk give to o, as linear_solve does; it->a is less A. Without the
 * delta rule there is half as much to do for a pair of tiles, so it goes by FMA. */
static void linear_solve_tiles(const linear_item *it, int64_t n) {
    if (!it->delta) {
        linear_solve(it, 0, n);
        return;
    }
    const linear_to to_w = {it->w, it->vp, LINEAR_ADD, NULL}, to_o = {it->o, it->vp, LINEAR_ADD, NULL};
    for (int64_t i0 = 0; i0 < n; i0 += CA_LANES) {
        const int64_t i1 = ca_min64(i0 + CA_LANES, n);
        if (i0) {
            const linear_parts a =
                linear_pack_rows(2, it->a + i0 * CA_CHUNK, CA_CHUNK, i1 - i0, i0, NULL, it->x_within);
            linear_parts p = {a.at + a.tile, a.tile};
            linear_pack_rows(2, it->p + i0 * CA_CHUNK, CA_CHUNK, i1 - i0, i0, NULL, p);
            linear_side side[2];
            linear_two_sides(side, a, to_w, p, to_o);
            side[0].first = side[1].first = i0;
            linear_tiles_22(it, side, 2, it->y_w, it->vp / CA_LANES, LINEAR_STEPS(i0), 0);
        }
        linear_triangle(it, it->a, i0, i0, i1, 0, 0, it->w);
        if (i1 < n)
            linear_pack_columns_2(it->w, it->vp, i0, i1, it->vp, it->y_w);
        linear_triangle(it, it->p, i0, i0, i1, 1, 0, it->o);
    }
}

/* Makes of the state before the chunk that after its first m tokens. by: what channels of keys are multiplied by, or
 * NULL. */
static void linear_add_to_state(linear_item *it, int parts, int64_t m, const float *by, float *state) {
    if (it->turned_tokens != m)
        it->x_channel = linear_pack_rows(parts, it->keys, CA_CHUNK, it->kp, m, by, it->x_channel);
    it->turned_tokens = m;
    linear_side side[2];
    linear_one_side(side, it->x_channel, (linear_to){state, it->vp, LINEAR_DECAY, NULL});
    if (parts == 1)
        linear_tiles_12(it, side, it->kp / CA_LANES, it->y_w, it->vp / CA_LANES, LINEAR_STEPS(m), 0);
    else
        linear_tiles_22(it, side, it->kp / CA_LANES, it->y_w, it->vp / CA_LANES, LINEAR_STEPS(m), 0);
}
static void linear_advance_tiles(linear_item *it, int64_t m, float *state) {
    const float *d = linear_leave(it, m);
    it->y_w.tile = LINEAR_STEPS(m) * 2 * LINEAR_PART;
    linear_pack_columns_2_by(it->w, it->vp, m, it->vp, d, it->y_w);
    linear_add_to_state(it, 1, m, NULL, state);
}

/* Computes a chunk of one value head whose tokens have one decay each. */
static void linear_chunk_tiles(linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const int64_t kp = it->kp, vp = it->vp, tiles = ca_div_up(n, CA_LANES), values = vp / CA_LANES;
    const int64_t steps = LINEAR_STEPS(kp);
    float *beta = it->betas;
    linear_side side[2];
    for (int64_t i = 0; i < n; i++) {
        linear_value(it->c, h, t + i, beta[i], it->w + i * vp, it->x.u);
        if (it->erases)
            linear_eraser(it->c, h, t + i, beta[i], it->k + i * kp, it->e + i * kp);
    }
    if (it->erases) {
        it->x_eraser = linear_pack_rows(2, it->e, kp, n, kp, NULL, it->x_eraser);
        linear_one_side(side, it->x_eraser, linear_set(it->kk, CA_CHUNK));
        linear_tiles_21(it, side, tiles, it->y_key, tiles, steps, 2);
    }
    linear_weigh(it, 0, n);
    it->y_state.tile = steps * 2 * LINEAR_PART;
    linear_pack_columns_2(linear_state(it, h->head), vp, 0, kp, vp, it->y_state);
    const linear_to to_w = {it->w, vp, LINEAR_SUB, it->w_factors}, to_o = {it->o, vp, LINEAR_SET, it->o_factors};
    if (it->delta && !it->erases) {
        linear_two_sides(side, it->x_key, to_w, it->x_query, to_o);
        linear_tiles_12(it, side, 2 * tiles, it->y_state, values, steps, 0);
    } else {
        if (it->erases) {
            linear_one_side(side, it->x_eraser, to_w);
            linear_tiles_22(it, side, tiles, it->y_state, values, steps, 0);
        }
        linear_one_side(side, it->x_query, to_o);
        linear_tiles_12(it, side, tiles, it->y_state, values, steps, 0);
    }
    it->y_w.tile = LINEAR_STEPS(n) * 2 * LINEAR_PART;
    linear_solve_tiles(it, n);
    linear_put_outputs(it, h, t, n);
}

/* ---- a decay for each channel ---- */

/* Fills in decays of tokens [first, n). Padding does not decay, so that nothing is divided by 0. */
static void linear_open_decays(const linear_item *it, const linear_head *h, int64_t t, int64_t first, int64_t n) {
    for (int64_t i = first; i < n; i++) {
        float *decay = it->decay + i * it->kp;
        linear_wide_decay(it->c, h, t + i, decay, it->decay_less_1 + i * it->kp);
        for (int64_t c = it->dk; c < it->kp; c++)
            decay[c] = 1;
    }
}

/* Multiplies d, D(i - 1, r) of each channel, by the decays of token i. growth: what a state grows by at most, up to
 * there. Says whether the piece may have the token. */
static int linear_joins_piece(const linear_item *it, int64_t i, float *d, float *growth) {
    const float *decay = it->decay + (it->piece + i) * it->kp;
    vf least = v_set1(1), most = v_set1(0);
    for (int64_t c = 0; c < it->kp; c += VL) {
        const vf by = v_load_f32(decay + c), now = v_mul(v_load_f32(d + c), by);
        least = v_min(now, least); /* NaN is neither */
        most = v_max(by, most);
        v_store(d + c, now);
    }
    *growth = fmaxf(*growth, 1) * v_hmax(most);
    return *growth <= LINEAR_GROWTH && -v_hmax(v_sub(v_set1(0), least)) >= LINEAR_LEAST;
}

/* Opens a chunk of one head by pieces, or returns 0 where FMA takes less time: operands of the whole state are made for
 * each piece, so that short ones cost more than they gain (MEASUREMENTS.md). The first one decides. */
static int linear_open_pieces(linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    float growth = 1;
    it->piece = 0;
    linear_open_decays(it, h, t, 0, LINEAR_SHORT_PIECE);
    linear_fill(it, it->key_room, 1);
    for (int64_t i = 1; i < LINEAR_SHORT_PIECE; i++)
        if (!linear_joins_piece(it, i, it->key_room, &growth))
            return 0;
    linear_open_decays(it, h, t, LINEAR_SHORT_PIECE, n);
    return 1;
}

/* Makes the operands of a piece of at most n tokens, from it->piece on, and returns how many it has. */
static int64_t linear_open_piece(linear_item *it, const linear_head *h, int64_t t, int64_t n) {
    const int64_t kp = it->kp;
    float *d = it->key_room, *beta = it->betas, growth = 1;
    linear_numbers(it->c, h, t, n, it->decays, it->decays_less_1, beta);
    linear_fill(it, d, 1);
    int64_t m = 0;
    for (; m < n && (!m || linear_joins_piece(it, m, d, &growth)); m++) {
        const float *key = it->k + (it->piece + m) * kp, *query = it->q + (it->piece + m) * kp;
        float *e = it->e + m * kp;
        if (it->delta) {
            linear_eraser(it->c, h, t + m, beta[m], key, e);
            for (int64_t c = 0; c < kp; c += VL) /* less, so that products are added */
                v_store(it->ek + m * kp + c, v_mul(v_load_f32(e + c), v_sub(v_set1(0), v_load_f32(d + c))));
        }
        linear_times(it, query, d, it->qg + m * kp);
        for (int64_t c = 0; c < kp; c += VL)
            v_store(it->kg + m * kp + c, v_div(v_load_f32(key + c), v_load_f32(d + c)));
    }
    memset(it->kg + m * kp, 0, (size_t)((LINEAR_PAD(m) - m) * kp) * sizeof *it->kg);
    linear_turn_rows(it, it->kg, m);
    it->turned_tokens = 0;
    it->y_key.tile = LINEAR_STEPS(kp) * 2 * LINEAR_PART;
    linear_pack_columns_2(it->keys, CA_CHUNK, 0, kp, LINEAR_PAD(m), it->y_key);
    it->x_query = linear_pack_rows(2, it->qg, kp, m, kp, NULL, it->x_query);
    if (it->delta)
        it->x_eraser = linear_pack_rows(2, it->ek, kp, m, kp, NULL, it->x_eraser);
    return m;
}

/* Makes of the state before a piece that after its first m tokens. */
static void linear_advance_piece(linear_item *it, int64_t m, float *state) {
    const int64_t kp = it->kp;
    float *d = it->key_room;
    if (!m)
        return;
    linear_fill(it, d, 1);
    linear_fill(it, it->factor, 0); /* becomes the decay of all, less 1 */
    for (int64_t i = 0; i < m; i++)
        for (int64_t c = 0; c < kp; c += VL) {
            const int64_t at = (it->piece + i) * kp + c;
            v_store(it->factor + c, linear_both_less(v_load_f32(it->factor + c), v_load_f32(it->decay_less_1 + at)));
            if (i)
                v_store(d + c, v_mul(v_load_f32(d + c), v_load_f32(it->decay + at)));
        }
    for (int64_t c = 0; c < kp; c += VL) {
        const vf all = v_mul(v_load_f32(d + c), v_load_f32(it->decay + it->piece * kp + c));
        vf kept;
        v_store(it->factor + c, linear_split(all, v_load_f32(it->factor + c), &kept));
        v_store(it->kept + c, kept);
    }
    it->y_w.tile = LINEAR_STEPS(m) * 2 * LINEAR_PART;
    linear_pack_columns_2(it->w, it->vp, 0, m, it->vp, it->y_w);
    linear_add_to_state(it, 2, m, d, state);
}

/* Computes w and outputs of the m tokens of a piece. */
static void linear_take_piece(linear_item *it, const linear_head *h, int64_t t, int64_t m) {
    const int64_t kp = it->kp, vp = it->vp, tiles = ca_div_up(m, CA_LANES), steps = LINEAR_STEPS(kp);
    const linear_to to_a = linear_set(it->a, CA_CHUNK), to_p = linear_set(it->p, CA_CHUNK);
    const linear_to to_w = {it->w, vp, LINEAR_ADD, NULL}, to_o = {it->o, vp, LINEAR_SET, NULL};
    linear_side within[2], state[2];
    for (int64_t i = 0; i < m; i++)
        linear_value(it->c, h, t + i, it->betas[i], it->w + i * vp, it->x.u);
    it->y_state.tile = steps * 2 * LINEAR_PART;
    linear_pack_columns_2_by(linear_state(it, h->head), vp, kp, vp, it->decay + it->piece * kp, it->y_state);
    if (it->delta) {
        linear_two_sides(within, it->x_eraser, to_a, it->x_query, to_p);
        linear_two_sides(state, it->x_eraser, to_w, it->x_query, to_o);
    } else {
        linear_one_side(within, it->x_query, to_p);
        linear_one_side(state, it->x_query, to_o);
    }
    const int64_t rows = it->delta ? 2 * tiles : tiles;
    linear_tiles_22(it, within, rows, it->y_key, tiles, steps, it->delta ? 1 : 2);
    linear_tiles_22(it, state, rows, it->y_state, vp / CA_LANES, steps, 0);
    it->y_w.tile = LINEAR_STEPS(m) * 2 * LINEAR_PART;
    linear_solve_tiles(it, m);
    linear_put_outputs(it, h, t, m);
}
