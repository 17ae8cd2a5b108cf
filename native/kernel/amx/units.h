/* SPDX-License-Identifier: Apache-2.0
 * This file cuts a task's strips into units, which the pipeline computes where words of 16 bits can hold the logits.
 * Strips with ALiBi, a bias or a tree mask go by scores (strips.h). So does a strip whose logits turn out to be too far
 * apart for words; it stays there until its segment ends, since the pipeline's references are integers.
 *
 * Whether a strip leaves the pipeline depends on all of its rows, which are one request's. So the bits of a row depend
 * on its request alone; tasks that hold rows of several requests go by scores. */

static logit_scale scale_of(const tile_work *w) {
    const float softcap = w->call->softcap, factor = w->scratch.factor;
    const float units = -V_OCTAVE * (softcap > 0 ? softcap * CA_LOG2E : factor);
    return (logit_scale){softcap > 0 ? factor : units, units, softcap > 0, w->pipe->keys};
}

/* Finds what the keys of a group have, the step's from the at-th on. */
static void scale_keys(const tile_work *w, const group *g, int at, key_scales *to) {
    const vf by = v_set1(scale_of(w).by);
    uint16_t shares[2][CA_LANES];
    for (int t = 0; t < CA_LANES; t++) {
        const int rest = w->plan->sides[V].one_scale ? scale_bits(g->kv[V].scales, t) & 0x7f : 0;
        to->more[at + t] = w->scales->more[rest];
        EACH(i, 2) shares[i][t] = w->scales->shares[i][rest];
    }
    EACH(i, 2)
    for (int pair = 0; pair < CA_LANES / 2; pair++)
        v_store_words(to->shares[i][at / 2 + pair], v_set1_words((const int16_t *)shares[i] + 2 * pair));
    for (int t = 0; t < CA_LANES; t += VL)
        v_store(to->by + at + t, w->plan->sides[K].one_scale ? v_mul(scales_of(g, K, 0, t), by) : by);
}

/* Lists what units take from a block's groups. */
static void list_units(tile_work *w, const score_block *b) {
    pipeline *x = w->pipe;
    const int n = b->num_groups;
    for (int g = 0; g < n; g++)
        x->k[g] = (const uint16_t *)b->groups[g].kv[K].at;
    /* An odd last group is multiplied twice; no row sees the second one's keys. */
    x->k[n] = x->k[n - 1];
    if (!x->keys)
        return;
    for (int g = 0; g < n; g++)
        scale_keys(w, b->groups + g, g % 2 * CA_LANES, x->keys + g / 2);
    if (n % 2) /* Shares are factors of weights that are 0. */
        EACH(i, 2) memset(x->keys[n / 2].shares[i][CA_LANES / 2], 0, sizeof x->keys->shares[i] / 2);
}

static uint32_t seen_of_group(const group *g, int64_t lo, int64_t hi) {
    const int64_t first = ca_min64(ca_max64(lo - g->key, 0), CA_LANES);
    const int64_t end = ca_min64(ca_max64(hi - g->key, 0), g->n);
    return end > first ? (1u << end) - (1u << first) : 0;
}

/* Finds which keys of a step each row of a strip sees. */
static void see_step(const tile_work *w, const strip *t, int i, uint32_t *seen) {
    const scratch *x = &w->scratch;
    const group *g = t->g + 2 * i, *h = 2 * i + 1 < t->num_groups ? g + 1 : NULL;
    memset(seen, 0, STRIP * sizeof *seen);
    for (int r = 0; r < t->rows; r++) {
        const int64_t row = t->row + r, lo = ca_max64(t->k0, x->lo[row]), hi = ca_min64(t->k1, x->hi[row]);
        if (r && x->lo[row] == x->lo[row - 1] && x->hi[row] == x->hi[row - 1])
            seen[r] = seen[r - 1];
        else
            seen[r] = seen_of_group(g, lo, hi) | (h ? seen_of_group(h, lo, hi) << CA_LANES : 0);
    }
}

/* Decides which step says how large logits are: one where every row that has seen nothing, but now sees keys, sees one.
 * Returns 0 where neither of the first two does. */
static int choose_first_step(const tile_work *w, const strip *t, pipe_unit *u) {
    const scratch *x = &w->scratch;
    const group *last = t->g + t->num_groups - 1;
    int sees[2] = {1, u->steps > 1};
    for (int r = 0; r < t->rows; r++) {
        const int64_t row = t->row + r, lo = ca_max64(ca_max64(t->k0, x->lo[row]), t->g->key);
        const int64_t hi = ca_min64(ca_min64(t->k1, x->hi[row]), last->key + last->n);
        for (int i = 0; i < 2 && u->m[r] == -INFINITY && lo < hi; i++)
            sees[i] = sees[i] && u->seen[i][r];
    }
    u->swapped = !sees[0];
    return sees[0] || sees[1];
}

/* Do all rows of a strip, whose edges are e, see all keys of a step? */
static int all_see_step(const strip *t, int i, edges e) {
    const group *g = t->g + 2 * i, *h = g + 1;
    return 2 * i + 1 < t->num_groups && g->n == CA_LANES && h->n == CA_LANES && g->key >= e.all_lo &&
           h->key + CA_LANES <= e.all_hi;
}

/* Sets which keys the rows see, for the steps that some row does not see whole, and for those whose words are made with
 * masks in any case: the first two, the last two and, where logits are capped or keys have scales, all. */
static int see_keys(const tile_work *w, const strip *t, pipe_unit *u) {
    const edges e = edges_of(&w->scratch, &(score_block){.k0 = t->k0, .k1 = t->k1}, t->row, t->rows);
    /* All rows see the steps [open, close) whole. */
    const int64_t open = w->regular ? ca_div_up(ca_max64(0, e.all_lo - t->g->key), STEP_KEYS) : u->steps;
    const int64_t close = ca_min64(t->num_groups / 2, ca_max64(0, e.all_hi - t->g->key) / STEP_KEYS);
    for (int i = 0; i < u->steps; i++) {
        u->masked[i] = !(i >= open && i < close) && !all_see_step(t, i, e);
        if (u->masked[i])
            see_step(w, t, i, u->seen[i]);
        else if (i < 2 || i >= u->steps - 2 || kind_of(u) != MASKED)
            memset(u->seen[i], 0xff, sizeof u->seen[i]);
    }
    u->swapped = 0;
    return !u->masked[0] || choose_first_step(w, t, u);
}

/* Copies the state of a strip of fewer than STRIP rows to one of STRIP rows, which close_partial_state copies back when
 * the strip's unit is done. */
static void open_partial_state(const tile_work *w, const strip *t) {
    pipeline *x = w->pipe;
    const int64_t dv = w->head_size_v, n = t->rows;
    for (int r = 0; r < STRIP; r++) {
        x->m[r] = r < n ? w->state->m[t->row + r] : -INFINITY;
        x->l[r] = r < n ? w->state->l[t->row + r] : 0;
    }
    if (t->opening)
        return;
    memcpy(x->o, w->state->o + t->row * dv, (size_t)(n * dv) * sizeof *x->o);
    memset(x->o + n * dv, 0, (size_t)((STRIP - n) * dv) * sizeof *x->o);
}
static void close_partial_state(const tile_work *w, int64_t row, int64_t n) {
    const pipeline *x = w->pipe;
    const int64_t dv = w->head_size_v;
    memcpy(w->state->m + row, x->m, (size_t)n * sizeof *x->m);
    memcpy(w->state->l + row, x->l, (size_t)n * sizeof *x->l);
    memcpy(w->state->o + row * dv, x->o, (size_t)(n * dv) * sizeof *x->o);
}

/* Makes a unit of a strip. Returns 0 if the strip has to go by scores. */
static int make_unit(const tile_work *w, const score_block *b, const strip *t, pipe_unit *u) {
    pipeline *x = w->pipe;
    const int64_t first = t->g - b->groups, after = ca_rows_of(w->plan, w->task) - t->row - 3 * STRIP;
    const int64_t width = query_width_bf16(w->head_size);
    if (t->rows < STRIP)
        open_partial_state(w, t);
    u->steps = (t->num_groups + 1) / 2;
    u->fresh = t->opening;
    u->depth = (int)w->products;
    u->k_parts = w->kv[K].parts;
    u->k_apart = w->kv[K].apart;
    u->form = form_of(u->depth, u->k_parts);
    u->q_ld = width;
    u->q = (const uint16_t *)w->scratch.q + t->row * width;
    u->k_last = (width - DEPTH) * CA_LANES;
    u->q_last = width % DEPTH ? w->last_queries + t->row * DEPTH : u->q + width - DEPTH;
    u->q_last_ld = width % DEPTH ? DEPTH : width;
    u->k = x->k + first;
    u->v = t->v;
    u->o = t->rows < STRIP ? x->o : w->state->o + t->row * w->head_size_v;
    u->m = t->rows < STRIP ? x->m : w->state->m + t->row;
    u->l = t->rows < STRIP ? x->l : w->state->l + t->row;
    u->head_size_v = w->head_size_v;
    u->scale = scale_of(w);
    if (u->scale.keys)
        u->scale.keys += first / 2;
    /* complete_unit copies those of the strip before meanwhile. */
    u->queries = (const void *const *)(w->scratch.query + t->row + 3 * STRIP);
    u->num_queries = t->opening ? (int)ca_min64(STRIP, after) : 0;
    u->queries_of_step = (STRIP + u->steps - 1) / u->steps;
    u->v_now = t->unprefetched && t->number == 0 ? w->v_now : 0;
    return see_keys(w, t, u);
}

/* Takes a strip by scores. Its tiles have other sizes. */
static void leave_pipeline(tile_work *w, const strip *t) {
    w->left[t->number] |= t->num_groups > 0;
    if (t->opening)
        memset(w->state->o + t->row * w->head_size_v, 0, (size_t)(t->rows * w->head_size_v) * sizeof(float));
    run_strip(w, t);
    shape_tiles(&w->sizes, STRIP, DEPTH, CA_LANES);
}

/* A strip and its unit. */
typedef struct strip_unit {
    strip t;
    pipe_unit u;
} strip_unit;

/* Prepares a strip's unit. Returns 0 if the strip has to go by scores. */
static int begin_unit(tile_work *w, const score_block *b, int64_t row, int which, strip_unit *s) {
    pipeline *x = w->pipe;
    s->t = make_strip(w, b, row);
    s->u.weights = x->weights;
    s->u.octaves = x->octaves[which];
    s->u.seen = x->seen[which];
    s->u.base = 0;
    if (w->left[s->t.number] || s->t.num_groups == 0 || !make_unit(w, b, &s->t, &s->u))
        return 0;
    load_strip(w, row);
    return 1;
}

/* Takes a unit, which has its references, to its state. The next one's scores begin meanwhile, unless it is NULL. */
static void complete_unit(tile_work *w, int64_t rows, const strip_unit *s, pipe_unit *next) {
    pipeline *x = w->pipe;
    form_weights(x, &s->u, next);
    /* These queries are those of the strip after the next one, so that all of them lie in L1 or L2 before tiles read
     * any. */
    if (s->t.row + 2 * STRIP < rows)
        load_strip(w, s->t.row + 2 * STRIP);
    if (!finish_unit(x, &s->u, next))
        leave_pipeline(w, &s->t);
    else if (s->u.m == x->m)
        close_partial_state(w, s->t.row, s->t.rows);
}

/* Takes the task's strips through a block, each one's last weights beside the first scores of the next one. */
static void run_units(tile_work *w, const score_block *b, int64_t rows) {
    pipeline *x = w->pipe;
    strip_unit units[2];
    strip_unit *before = NULL;
    list_units(w, b);
    shape_tiles(&w->sizes, STRIP, DEPTH, CA_LANES);
    for (int64_t row = 0; row < rows; row += STRIP) {
        const int which = before == &units[0];
        strip_unit *s = &units[which];
        const int is_unit = begin_unit(w, b, row, which, s);
        const int follows = is_unit && before && before->u.steps > 1 && s->u.steps > 1;
        if (follows)
            s->u.base = (before->u.base + before->u.steps) % 2;
        if (before)
            complete_unit(w, rows, before, follows ? &s->u : NULL);
        if (row + STRIP < rows && !before)
            load_strip(w, row + STRIP);
        if (is_unit && !follows)
            form_first(x, &s->u);
        before = is_unit && s->u.ok ? s : NULL;
        if (!before)
            leave_pipeline(w, &s->t);
    }
    if (before)
        complete_unit(w, rows, before, NULL);
}
