/* SPDX-License-Identifier: Apache-2.0
 * This is the attention of a segment of keys over caches of integers with one scale a token, by tiles that multiply
 * bytes (TDPBSSD): a tile of B is 64 dimensions of 16 keys, or 64 keys of 16 columns of V. It serves decode where more
 * query heads share a kv head than make one tile of vectors: there vectors would make operands of K and V once for each
 * of their tiles, and this file makes quads of signed bytes of them once for all rows. MEASUREMENTS.md has the
 * measurements under "bytes".
 *
 * Queries and weights are the integers of fits.h, each as two digits to base 256, from -128 to 127. The digits of a
 * band, up to 16 query rows, are rows of A, the high ones first. What they come to is 256 high + low, which float32
 * rounds once: sums of digits are exact there for 1024 dimensions or keys. What queries lose by rounding is multiplied
 * apart, for keys whose scale asks for it.
 *
 * A row's arithmetic depends on its own keys alone, whatever the band around it. */

#define BAND 16
#define UNIT_KEYS FEW_KEYS /* the most keys of a block, whose weights may share a unit */
#define UNIT_DIMS 256      /* the most dimensions of a query that share a unit, a multiple of BYTE_DEPTH */
#define BYTE_DEPTH 64      /* dimensions or keys of one product of tiles */

typedef struct byte_work {
    const ca_plan *plan;
    const ca_call *call;
    const ca_state *states;   /* [heads] */
    int64_t rows;             /* of the task */
    scratch scratch;          /* q has the digits: [rows], where a band is [units][whole, rest][2 rows][unit_dims] */
    int64_t units, unit_dims; /* of a query; zeros follow its last dimension */
    int unit_keys;            /* keys whose weights share a unit */
    tile_sizes sizes;
    int8_t *quads[2];    /* K: [groups][units][unit_dims / 4][16][4]; V: [UNIT_KEYS / 4][Dv][4] */
    uint8_t *stage;      /* a group's elements as bytes, where they have fewer than 8 bits */
    int8_t *p;           /* [2 BAND][UNIT_KEYS] digits of weights */
    float *s;            /* [BAND][S_STRIDE] scores, then weights */
    int32_t *sums;       /* [UNIT_KEYS / 32][units][2 BAND][32] of products */
    float (*step)[BAND]; /* [UNIT_KEYS / 16] what the weights' units are worth */
} byte_work;

/* Says what a band of rows meets in a block. */
typedef struct band {
    int64_t row;
    int rows, tall; /* tall: its digits take two tiles */
    const group *g;
    int num_groups;
} band;

/* Do tiles multiply the bytes of a plan's caches, where rows are few? That depends on no task, so that a shared one
 * computes what each request would by itself. */
static int goes_by_bytes(const ca_plan *plan) {
    const ca_side *k = &plan->sides[K], *v = &plan->sides[V];
    return k->integers && v->integers && k->one_scale && v->one_scale && plan->group_size > TALL;
}

static int64_t carve_bytes(byte_work *w, uintptr_t base, const ca_plan *plan) {
    const ca_side *k = &plan->sides[K], *v = &plan->sides[V];
    const int64_t all = ca_max64(plan->rows, plan->heads_together * plan->few_rows);
    int64_t at = carve(&w->scratch, base, plan);
    w->unit_dims = ca_min64(UNIT_DIMS, ca_round_up(k->head_size, BYTE_DEPTH));
    w->units = ca_div_up(k->head_size, w->unit_dims);
    w->unit_keys = CA_LANES;
    while (w->unit_keys < UNIT_KEYS && 2 * w->unit_keys * v->head_size <= COARSE_SPAN)
        w->unit_keys *= 2;
    w->scratch.q_bytes = 4 * w->units * w->unit_dims;
    CA_CARVE(w->scratch.q, all * w->scratch.q_bytes)
    CA_CARVE(w->quads[K], UNIT_KEYS * w->units * w->unit_dims)
    CA_CARVE(w->quads[V], UNIT_KEYS * v->head_size)
    CA_CARVE(w->stage, ca_max64(k->staged_bytes, v->staged_bytes) + 64)
    CA_CARVE(w->p, 2 * BAND * UNIT_KEYS)
    CA_CARVE(w->s, BAND * S_STRIDE * 4)
    CA_CARVE(w->sums, UNIT_KEYS / 32 * w->units * 2 * BAND * 32 * 4)
    CA_CARVE(w->step, UNIT_KEYS / CA_LANES * BAND * 4)
    return at;
}

static int64_t byte_work_bytes(const ca_plan *plan) {
    byte_work unused;
    return carve_bytes(&unused, 0, plan);
}

/* ---- queries ---- */

/* Puts the digits of n integers up to DIGITS_MOST into two rows. */
static void put_digits(const int16_t *x, int64_t n, int8_t *high, int8_t *low) {
    for (int64_t i = 0; i < n; i++) {
        low[i] = (int8_t)(x[i] & 0xff);
        high[i] = (int8_t)((x[i] + 128) >> 8);
    }
}

/* Puts the digits of row r of all, which is the i-th of a band of n. */
static void put_query_digits(const byte_work *w, int8_t *to, int64_t r, int i, int n) {
    const ca_side *k = &w->plan->sides[K];
    const scratch *x = &w->scratch;
    const int64_t dims = w->unit_dims;
    const float error = 1.0f / (float)(w->units << 8); /* All units together may cost a bit of bf16's. */
    unit *of = x->units + r * x->q_units;
    for (int64_t u = 0; u < w->units; u++, of += 2) {
        float part[UNIT_DIMS] = {0};
        int16_t digits[2][UNIT_DIMS] = {{0}};
        const int64_t m = ca_min64(dims, k->head_size - u * dims);
        widen_row_bf16((const uint16_t *)x->query[r] + u * dims, m, x->q_factor, part);
        put_unit(k->dtype, error, x->octaves, m, part, digits[0], digits[1], of);
        x->from[u] = of[1].from < x->from[u] ? of[1].from : x->from[u];
        EACH(rest, 2) {
            int8_t *rows = to + (2 * u + rest) * 2 * n * dims;
            put_digits(digits[rest], dims, rows + i * dims, rows + (n + i) * dims);
        }
    }
}

static void load_digits(const byte_work *w, int num_heads) {
    for (int64_t u = 0; u < w->units; u++)
        w->scratch.from[u] = INFINITY;
    for (int64_t h = 0; h < num_heads; h++)
        for (int64_t row = 0; row < w->rows; row += BAND) {
            const int64_t r = h * w->rows + row;
            const int n = (int)ca_min64(BAND, w->rows - row);
            for (int i = 0; i < n; i++)
                put_query_digits(w, (int8_t *)w->scratch.q + r * w->scratch.q_bytes, r + i, i, n);
        }
}

/* ---- K and V as quads ---- */

static int64_t quads_of_group(const byte_work *w, int kv) {
    return CA_LANES * (kv == V ? w->plan->shape.head_size_v : w->units * w->unit_dims);
}

/* Makes bytes of a group's elements, in the order of the cache: nibbles become signed ones, 5 or 6 bits those of int8.
 */
static void stage_group(const ca_side *s, const uint8_t *from, uint8_t *stage, const char *next) {
    if (!s->nibbles) {
        int8_of_packed(s->dtype, from, s->elements, stage, next);
        return;
    }
    for (int64_t i = 0; i < s->elements; i += CA_NIBBLES, from += 64, next += 64) {
        const vi x = v_load_words(from);
        __builtin_prefetch(next, 0, 2);
        EACH(upper, 2) v_store_words(stage + i + 64 * upper, v_nibbles(x, upper));
    }
}

/* Makes quads of dimensions of a group of K. What is past the last dimension, where this may read 32 bytes past the
 * group, meets zeros of queries. */
INLINE void put_k_quads(int signs, const uint8_t *from, int64_t head_size, int8_t *to, const char *next) {
    for (int64_t d = 0; d < head_size; d += 4, from += 64, to += 64, next += 64) {
        __builtin_prefetch(next, 0, 2);
        v_store_words(to, v_quads(signs, v_load_words(from)));
    }
}

/* Makes quads of keys of a group of V. This may read 32 bytes past the group, where scales are. */
INLINE void put_v_quads(int signs, const uint8_t *from, int64_t head_size_v, int8_t *to, const char *next) {
    for (int t = 0; t < CA_LANES; t += 4, from += 4 * head_size_v, to += 4 * head_size_v, next += 4 * head_size_v)
        for (int64_t c = 0; c < head_size_v; c += 2 * CA_LANES) {
            const vi a = v_load_words(from + 2 * c), b = v_load_words(from + 2 * (head_size_v + c));
            __builtin_prefetch(next + 4 * c, 0, 2);
            __builtin_prefetch(next + 4 * c + 64, 0, 2);
            v_store_words(to + 4 * c, v_quads(signs, v_join_halves(a, b, 0)));
            if (c + CA_LANES < head_size_v)
                v_store_words(to + 4 * (c + CA_LANES), v_quads(signs, v_join_halves(a, b, 1)));
        }
}

/* Makes quads of K, or V, of a block. Meanwhile what comes next is prefetched: V of the block, or K of the one that
 * follows. */
static void make_quads(const byte_work *w, const score_block *b, int kv) {
    const ca_side *s = &w->plan->sides[kv];
    int8_t *to = w->quads[kv];
    for (int i = 0; i < b->num_groups; i++, to += quads_of_group(w, kv)) {
        const group *g = b->groups + i, *coming = kv == V && i < b->num_next ? b->next + i : g;
        const uint8_t *from = (const uint8_t *)g->kv[kv].at;
        const char *next = coming->kv[1 - kv].at;
        __builtin_prefetch(coming->kv[1 - kv].scales, 0, 2);
        if (s->packed) {
            stage_group(s, from, w->stage, next);
            from = w->stage;
            next = (const char *)from;
        }
        if (kv == V && s->nibbles)
            put_v_quads(0, from, s->head_size, to, next);
        else if (kv == V)
            put_v_quads(1, from, s->head_size, to, next);
        else if (s->nibbles)
            put_k_quads(0, from, s->head_size, to, next);
        else
            put_k_quads(1, from, s->head_size, to, next);
    }
}

/* ---- S = Q K^T ---- */

/* Returns 16 sums of a query row, of which `high` has those of the high digits. */
INLINE vf sums_of(const int32_t *high, int rows) {
    const int32_t *low = high + rows * 2 * CA_LANES;
    return v_fma(v_float(v_load_words(high)), v_set1(256), v_float(v_load_words(low)));
}

static int32_t *sums_at(const byte_work *w, int pair, int64_t u) {
    return w->sums + (pair * w->units + u) * 2 * BAND * 2 * CA_LANES;
}

/* Multiplies a unit of dimensions of the i-th group of a band's and of the next one, if there is one. */
static void multiply_unit(byte_work *w, const band *t, int i, int64_t u, int rest) {
    const int wide = i + 1 < t->num_groups;
    const int64_t dims = w->unit_dims, end = ca_min64(dims, w->plan->shape.head_size - u * dims);
    const int8_t *q = (const int8_t *)w->scratch.q + t->row * w->scratch.q_bytes + (2 * u + rest) * 2 * t->rows * dims;
    const int8_t *k = w->quads[K] + i * quads_of_group(w, K) + u * dims * CA_LANES;
    const int8_t *next = k + wide * quads_of_group(w, K);
    zero_sums(t->tall, wide);
    for (int64_t d = 0; d < end; d += BYTE_DEPTH)
        multiply(1, t->tall, wide, q + d, dims, k + d * CA_LANES, next + d * CA_LANES, 4 * CA_LANES);
    store_sums(t->tall, wide, (float *)sums_at(w, i / 2, u), 2 * CA_LANES);
}

/* Adds what a unit's products come to, to the scores of the i-th group of a band's. */
INLINE void add_scores(const byte_work *w, const band *t, int i, int64_t u, int rest) {
    const int32_t *sums = sums_at(w, i / 2, u) + i % 2 * CA_LANES;
    const unit *of = w->scratch.units + t->row * w->scratch.q_units + 2 * u + rest;
    const vf scales = scales_of(t->g + i, K, 0, 0);
    float *s = w->s + i * CA_LANES;
    for (int r = 0; r < t->rows; r++, s += S_STRIDE, sums += 2 * CA_LANES, of += w->scratch.q_units) {
        const vf x = v_mul(sums_of(sums, t->rows), v_set1(of->step));
        if (u == 0 && !rest) {
            v_store(s, v_mul(x, scales));
            continue;
        }
        const vf before = v_load_f32(s), sum = v_fma(x, scales, before);
        v_store(s, rest ? v_less(v_set1(of->from), v_abs(scales), sum, before) : sum);
    }
}

/* Turns the products of two groups, or one, into scores, with those of what queries lost where these count. */
static void finish_scores(byte_work *w, const band *t, int i) {
    const int end = (int)ca_min64(i + 2, t->num_groups);
    vf top = v_set1(0); /* Unused slots may hold NaN, which v_max leaves out as its first operand. */
    for (int j = i; j < end; j++)
        top = v_max(v_abs(scales_of(t->g + j, K, 0, 0)), top);
    for (int64_t u = 0; u < w->units; u++) {
        for (int j = i; j < end; j++)
            add_scores(w, t, j, u, 0);
        if (!v_any_less(v_set1(w->scratch.from[u]), top))
            continue;
        multiply_unit(w, t, i, u, 1);
        for (int j = i; j < end; j++)
            add_scores(w, t, j, u, 1);
    }
}

static void form_byte_scores(byte_work *w, const band *t) {
    shape_tiles(&w->sizes, 2 * t->rows, BYTE_DEPTH / 2, CA_LANES);
    for (int i = 0; i < t->num_groups; i += 2)
        for (int64_t u = 0; u < w->units; u++)
            multiply_unit(w, t, i, u, 0);
    for (int i = 0; i < t->num_groups; i += 2)
        finish_scores(w, t, i);
}

/* ---- O += P V ---- */

/* Makes digits of the weights of a row times the scales of V. Those of a product's last keys are 0 where there are no
 * such keys. */
static void put_weight_digits(const byte_work *w, const band *t, int r, const vf *scales) {
    const int n = t->num_groups, all = (int)ca_round_up(n, 4), unit_groups = w->unit_keys / CA_LANES;
    const float *s = w->s + r * S_STRIDE;
    vf x[UNIT_KEYS / CA_LANES], by[UNIT_KEYS / CA_LANES];
    for (int i = 0, end; i < n; i = end) {
        vi top = v_set1_int(0);
        end = (int)ca_min64(n, i + unit_groups);
        for (int j = i; j < end; j++) {
            x[j] = v_mul_unless_0(v_load_f32(s + j * CA_LANES), scales[j]);
            top = v_top(top, v_abs(x[j]));
        }
        const fit fit = fit_to(v_htop(top), DIGITS_MOST - 1); /* The dither adds up to 1/2. */
        w->step[i / unit_groups][r] = fit.step;
        for (int j = i; j < end; j++) {
            by[j] = v_set1(fit.inv_step);
            if (fit.boost != 1)
                x[j] = v_mul(x[j], v_set1(fit.boost));
        }
    }
    for (int i = n; i < all; i++)
        x[i] = by[i] = v_set1(0);
    for (int i = 0; i < all; i += 4) {
        vi whole[4];
        EACH(j, 4) whole[j] = v_integers(v_fma(x[i + j], by[i + j], v_load_f32(spread + j * CA_LANES)));
        int8_t *high = w->p + r * UNIT_KEYS + i * CA_LANES;
        v_put_digits(high, high + t->rows * UNIT_KEYS, whole);
    }
}

/* Multiplies the keys of a unit of weights by 32 columns of V, or 16, and adds what this comes to. */
INLINE void add_columns(byte_work *w, const band *t, int key, int64_t c, int wide, float *o) {
    const int64_t dv = w->plan->shape.head_size_v;
    const int end = (int)ca_min64(key + w->unit_keys, t->num_groups * CA_LANES);
    const int depth = (int)ca_min64(BYTE_DEPTH, w->unit_keys);
    const float *step = w->step[key / w->unit_keys];
    const int32_t *sums = w->sums;
    shape_tiles(&w->sizes, 2 * t->rows, depth / 2, CA_LANES);
    zero_sums(t->tall, wide);
    for (; key < end; key += depth) {
        const int8_t *v = w->quads[V] + key * dv + 4 * c;
        multiply(1, t->tall, wide, w->p + key, UNIT_KEYS, v, v + 4 * CA_LANES, 4 * dv);
    }
    store_sums(t->tall, wide, (float *)w->sums, 2 * CA_LANES);
    o += c;
    for (int r = 0; r < t->rows; r++, o += dv, sums += 2 * CA_LANES)
        for (int j = 0; j <= wide; j++) {
            const vf x = sums_of(sums + j * CA_LANES, t->rows);
            v_store(o + j * CA_LANES, v_fma(x, v_set1(step[r]), v_load_f32(o + j * CA_LANES)));
        }
}

static void add_byte_values(byte_work *w, const band *t, float *o) {
    const int64_t dv = w->plan->shape.head_size_v;
    vf scales[UNIT_KEYS / CA_LANES];
    for (int i = 0; i < t->num_groups; i++)
        scales[i] = scales_of(t->g + i, V, 0, 0);
    for (int r = 0; r < t->rows; r++)
        put_weight_digits(w, t, r, scales);
    for (int64_t c = 0; c < dv; c += 2 * CA_LANES)
        for (int key = 0; key < t->num_groups * CA_LANES; key += w->unit_keys)
            add_columns(w, t, key, c, c + CA_LANES < dv, o);
}

/* ---- a segment ---- */

/* All rows of a band see keys of the same groups, since they are of one token, or of several that share all keys. */
static void attend_band(byte_work *w, const score_block *b, int64_t row, const ca_state *state) {
    const int64_t dv = w->plan->shape.head_size_v;
    const int rows = (int)ca_min64(BAND, w->rows - row);
    const band t = {.row = row, .rows = rows, .tall = 2 * rows > 16, .g = b->groups, .num_groups = b->num_groups};
    const edges e = edges_of(&w->scratch, b, row, rows);
    if (e.hi <= e.lo)
        return;
    const int masked = e.all_lo > t.g->key || e.all_hi < t.g[t.num_groups - 1].key + CA_LANES ||
                       (w->call->block_size % CA_LANES && !whole(t.g, t.num_groups));
    const scored_keys keys = {t.g, t.num_groups, masked, b->k0, b->k1};
    float factor[BAND], *o = state->o + row * dv;
    form_byte_scores(w, &t);
    for (int r = 0; r < t.rows; r++)
        factor[r] = logits_of_row_bf16(w->plan, w->call, &w->scratch, row + r, &keys, w->s + r * S_STRIDE);
    online_softmax_bf16(w->s, t.rows, t.num_groups * CA_LANES, factor, 1, state->m + row, state->l + row, o, dv);
    add_byte_values(w, &t, o);
}

static int begin_bytes(void *work, score_block *b) {
    (void)work;
    (void)b;
    return 0;
}

static void attend_bytes(void *work, const score_block *b, int h) {
    byte_work *w = work;
    make_quads(w, b, K);
    make_quads(w, b, V);
    for (int64_t row = 0; row < w->rows; row += BAND)
        attend_band(w, b, row, w->states + h);
}

/* Does what ca_segment_fn says, for clear states. */
static int byte_segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                        int64_t k0, int64_t k1, const ca_state *states, void *memory) {
    byte_work w = {.plan = plan, .call = call, .states = states, .rows = ca_rows_of(plan, task)};
    carve_bytes(&w, (uintptr_t)memory, plan);
    w.scratch.integers = 1;
    load_rows_bf16(plan, call, task, kv_head, num_heads, &w.scratch);
    load_digits(&w, num_heads);
    const block_walk walk = {.plan = plan,
                             .call = call,
                             .task = task,
                             .kv_head = kv_head,
                             .num_heads = num_heads,
                             .max_groups = UNIT_KEYS / CA_LANES,
                             .k0 = k0,
                             .k1 = k1,
                             .listed_end = listed_end(plan, call, task, k1)};
    walk_blocks(&walk, &w.scratch, begin_bytes, attend_bytes, &w);
    tile_release();
    return 0;
}
