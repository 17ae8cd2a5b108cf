/* SPDX-License-Identifier: Apache-2.0
 * This is the way of an item: value heads that share a key head go through all tokens of a request. */

/* Fills in one token of one head; k and q are those of its key head. */
static void linear_open_token(linear_item *it, const linear_head *h, int64_t t, const float *k, const float *q) {
    linear_token *x = &it->x;
    float *decay = it->decays, *less = it->decays_less_1, *beta = it->betas;
    linear_numbers(it->c, h, t, 1, decay, less, beta);
    if (it->wide)
        linear_wide_decay(it->c, h, t, x->factor, x->kept);
    linear_value(it->c, h, t, beta[0], x->v, x->u);
    if (it->delta)
        linear_eraser(it->c, h, t, beta[0], k, x->ea);
    vf kq = v_set1(0);
    for (int64_t i = 0; i < it->kp; i += VL) {
        const vf a = it->wide ? v_load_f32(x->factor + i) : v_set1(decay[0]);
        const vf key = v_load_f32(k + i), query = v_load_f32(q + i);
        vf kept;
        v_store(x->factor + i, linear_split(a, it->wide ? v_load_f32(x->kept + i) : v_set1(less[0]), &kept));
        v_store(x->kept + i, kept);
        kq = v_fma(key, query, kq);
        v_store(x->k + i, key);
        v_store(x->qa + i, v_mul(query, a));
        if (it->delta)
            v_store(x->ea + i, v_mul(v_load_f32(x->ea + i), a));
    }
    x->kq = v_hsum(kq);
    x->delta = it->delta;
}

static void linear_put_output(const linear_item *it, const linear_head *h, int64_t t) {
    const ca_array *out = &it->c->a[CA_LINEAR_OUTPUT];
    float *o = it->x.o;
    linear_skip(it->c, h, t, o, it->x.u);
    linear_narrow(o, it->dv, out->dtype, ca_row_of(out, t, h->head));
}

static void linear_read_token(const linear_item *it, int64_t t, float *k, float *q) {
    const int32_t key_head = it->first / ca_linear_group(it->c->plan);
    linear_read(it->c, CA_LINEAR_KEY, t, key_head, 1, k);
    linear_read(it->c, CA_LINEAR_QUERY, t, key_head, it->c->how->scale, q);
}

#define LINEAR_STEP(T, ELEMENT)                                                                                        \
    (linear_is_vk(it) && !it->turned ? linear_step_vk_##T : linear_step_kv_##T)(                                       \
        (const ELEMENT *)from, ld_from, (ELEMENT *)to, ld_to, it->dk, it->dv, &it->x)
static void linear_step(const linear_item *it, int dtype, const void *from, int64_t ld_from, void *to, int64_t ld_to) {
    if (dtype == CA_F32)
        LINEAR_STEP(f32, float);
    else if (dtype == CA_F16)
        LINEAR_STEP(f16, uint16_t);
    else
        LINEAR_STEP(bf16, uint16_t);
}

/* Takes one token, out of a slot and into a slot. */
static void linear_decode(linear_item *it, int64_t t, int32_t from, int32_t to, const void *ahead) {
    const ca_array *cache = &it->c->a[CA_LINEAR_STATE_CACHE];
    const int64_t ld = cache->strides[2], rows = linear_is_vk(it) ? it->dv : it->dk;
    const int64_t n = linear_is_vk(it) ? it->dk : it->dv;
    linear_read_token(it, t, it->key_room, it->query_room);
    for (int32_t head = it->first; head < it->end; head++) {
        const linear_head *h = &it->heads[head - it->first];
        char *dst = ca_state_at(cache, to, head);
        const char *src = from < 0 ? dst : ca_state_at(cache, from, head);
        for (int64_t i = 0; from < 0 && i < rows; i++)
            memset(dst + i * ld * cache->itemsize, 0, (size_t)(n * cache->itemsize));
        linear_open_token(it, h, t, it->key_room, it->query_room);
        it->x.ahead = head + 1 < it->end && from >= 0 ? ca_state_at(cache, from, head + 1) : ahead ? ahead : src;
        linear_step(it, cache->dtype, src, ld, dst, ld);
        linear_put_output(it, h, t);
    }
}

/* Writes the state as it is, after `token` tokens, into the slots that ask for it. */
static int32_t linear_keep(linear_item *it, int32_t next, int64_t token) {
    const ca_states *s = it->c->states;
    for (; next < s->first_checkpoint[it->request + 1] && s->checkpoints[next].token == token; next++) {
        linear_turn(it, 0);
        for (int32_t head = it->first; head < it->end; head++)
            linear_store_state(it, s->checkpoints[next].slot, head, linear_state(it, head));
    }
    return next;
}

/* Takes few tokens, from number `first` of the request on, step by step. */
static int32_t linear_steps(linear_item *it, int64_t first, int64_t n, int32_t next) {
    const int64_t t = it->c->plan->query_start_loc[it->request] + first, ld = linear_is_vk(it) ? it->kp : it->vp;
    linear_turn(it, 0);
    for (int64_t i = 0; i < n; i++) {
        linear_read_token(it, t + i, it->key_room, it->query_room);
        for (int32_t head = it->first; head < it->end; head++) {
            const linear_head *h = &it->heads[head - it->first];
            float *state = linear_state(it, head);
            linear_open_token(it, h, t + i, it->key_room, it->query_room);
            it->x.ahead = state;
            linear_step(it, CA_F32, state, ld, state, ld);
            linear_put_output(it, h, t + i);
        }
        next = linear_keep(it, next, first + i + 1);
    }
    return next;
}

/* Leaves a head's state [Dk][vp] in a slot. */
static void linear_keep_turned(const linear_item *it, int64_t slot, int32_t head, const float *state) {
    if (linear_is_vk(it))
        linear_transpose(state, it->vp, it->kp, it->vp, it->turned_spare, it->kp);
    linear_store_state(it, slot, head, linear_is_vk(it) ? it->turned_spare : state);
}

static void linear_advance_any(linear_item *it, int64_t m, float *state) {
#ifdef TILES
    if (it->pieces) {
        linear_advance_piece(it, m, state);
        return;
    }
#endif
    if (it->wide)
        linear_advance_channels(it, m, state);
#ifdef TILES
    else if (it->tiles)
        linear_advance_tiles(it, m, state);
#endif
    else
        linear_advance(it, m, state);
}

/* Checkpoints within a chunk begin again from the state before it; the last token's is the state after it. Returns the
 * first one that is not within. */
static int32_t linear_keep_within(linear_item *it, int32_t next, const linear_head *h, int64_t first, int64_t n) {
    const ca_states *s = it->c->states;
    for (; next < s->first_checkpoint[it->request + 1] && s->checkpoints[next].token < first + n; next++) {
        memcpy(it->spare, linear_state(it, h->head), (size_t)it->state_floats * sizeof(float));
        linear_advance_any(it, s->checkpoints[next].token - first, it->spare);
        linear_keep_turned(it, s->checkpoints[next].slot, h->head, it->spare);
    }
    return next;
}

/* Takes tokens [i, n) of a chunk through the state of one head, step by step. */
static void linear_steps_of_head(linear_item *it, int32_t next, const linear_head *h, int64_t first, int64_t i,
                                 int64_t n) {
    const ca_states *s = it->c->states;
    const int64_t t = it->c->plan->query_start_loc[it->request] + first;
    float *state = linear_state(it, h->head);
    it->x.ahead = state;
    for (; i < n; i++) {
        for (; next < s->first_checkpoint[it->request + 1] && s->checkpoints[next].token == first + i; next++)
            linear_keep_turned(it, s->checkpoints[next].slot, h->head, state);
        linear_read_token(it, t + i, it->key_room, it->query_room);
        linear_open_token(it, h, t + i, it->key_room, it->query_room);
        linear_step(it, CA_F32, state, it->vp, state, it->vp);
        linear_put_output(it, h, t + i);
    }
}

#ifdef TILES
/* Takes n tokens of a chunk through the state of one head by pieces, each of which has a state before and after it. */
static void linear_pieces(linear_item *it, int32_t next, const linear_head *h, int64_t first, int64_t n) {
    const int64_t t = it->c->plan->query_start_loc[it->request] + first;
    for (int64_t m, i = 0; i < n; i += m) {
        it->piece = i;
        m = linear_open_piece(it, h, t + i, n - i);
        linear_take_piece(it, h, t + i, m);
        next = linear_keep_within(it, next, h, first + i, m);
        linear_advance_piece(it, m, linear_state(it, h->head));
    }
}
#endif

/* Takes n tokens of a chunk through the state of one head: together, up to where they make it grow, and the others step
 * by step. */
static void linear_chunk_of_head(linear_item *it, int32_t next, const linear_head *h, int64_t first, int64_t n) {
    const int64_t t = it->c->plan->query_start_loc[it->request] + first;
#ifdef TILES
    it->pieces = it->tiles && it->wide && linear_open_pieces(it, h, t, n);
    if (it->pieces) {
        linear_pieces(it, next, h, first, n);
        return;
    }
#endif
    int64_t together = linear_open_gates(it, h, t, n);
    if (together < LINEAR_FEW)
        together = 0;
    else {
        if (it->wide)
            linear_chunk_channels(it, h, t, together);
#ifdef TILES
        else if (it->tiles)
            linear_chunk_tiles(it, h, t, together);
#endif
        else
            linear_chunk(it, h, t, together);
        next = linear_keep_within(it, next, h, first, together);
        linear_advance_any(it, together, linear_state(it, h->head));
    }
    linear_steps_of_head(it, next, h, first, together, n);
}

static int32_t linear_chunks(linear_item *it, int64_t first, int64_t n, int32_t next) {
    const ca_states *s = it->c->states;
    const int64_t t = it->c->plan->query_start_loc[it->request] + first;
    linear_turn(it, 1);
#ifdef TILES
    it->tiles = LINEAR_BY_TILES(it->c->plan) && n >= LINEAR_FEW_BY_TILES(it);
    if (it->tiles)
        configure((tile_sizes){STRIP, DEPTH, CA_LANES});
    if (it->tiles && !it->wide)
        linear_open_chunk_tiles(it, t, n);
    else
#endif
        linear_open_chunk(it, t, n);
    for (int32_t head = it->first; head < it->end; head++) {
#ifdef TILES
        linear_look_ahead(it, 0, CA_LINEAR_OUTPUT, t, head);
#endif
        linear_look_ahead(it, 1, CA_LINEAR_VALUE, t + n, head);
        linear_look_ahead(it, 2, CA_LINEAR_G, t + n, head);
        if (head + 1 == it->end) {
            linear_look_ahead(it, 3, CA_LINEAR_KEY, t + n, head / ca_linear_group(it->c->plan));
            linear_look_ahead(it, 4, CA_LINEAR_QUERY, t + n, head / ca_linear_group(it->c->plan));
        }
        linear_chunk_of_head(it, next, &it->heads[head - it->first], first, n);
    }
#ifdef TILES
    if (it->tiles)
        tile_release();
#endif
    while (next < s->first_checkpoint[it->request + 1] && s->checkpoints[next].token < first + n)
        next++;
    return linear_keep(it, next, first + n);
}

static void linear_run(const ca_linear_call *c, int32_t request, int32_t head, int32_t end, const void *ahead,
                       void *scratch) {
    const ca_linear_plan *p = c->plan;
    const ca_states *s = c->states;
    const int64_t n = ca_linear_q_len(p, request);
    const int32_t from = s->from[request], to = s->to[request];
    linear_item it = {.c = c, .request = request, .first = head, .end = end, .delta = c->how->delta_rule};
    it.last = p->query_start_loc[request + 1];
    it.wide = c->a[CA_LINEAR_G].itemsize && ca_is_wide(&c->a[CA_LINEAR_G]);
    it.erases = it.delta && c->a[CA_LINEAR_ERASE].itemsize;
    linear_ahead rows[LINEAR_AHEAD] = {{0}};
    linear_lay_out(p, scratch, &it);
    it.may_words = it.may_words && !it.wide;
    it.ahead = rows;
    for (int32_t i = 0; i < end - head; i++)
        it.heads[i] = linear_open_head(c, head + i, it.biases + i * it.kp, it.skips + i * it.vp);
    int32_t next = s->first_checkpoint[request];
    if (n == 1 && to >= 0 && next == s->first_checkpoint[request + 1]) {
        linear_decode(&it, p->query_start_loc[request], from, to, ahead);
        return;
    }
    memset(it.states, 0, (size_t)((end - head) * it.state_floats) * sizeof *it.states);
    for (int32_t i = head; from >= 0 && i < end; i++)
        linear_load_state(&it, from, i, linear_state(&it, i));
    for (int64_t at = 0, piece; at < n; at += piece) {
        piece = ca_min64(n - at, CA_CHUNK - (p->first_token[request] + at) % CA_CHUNK);
        next = piece < LINEAR_FEW ? linear_steps(&it, at, piece, next) : linear_chunks(&it, at, piece, next);
    }
    linear_turn(&it, 0);
    for (int32_t i = head; to >= 0 && i < end; i++)
        linear_store_state(&it, to, i, linear_state(&it, i));
}
