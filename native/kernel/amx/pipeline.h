/* SPDX-License-Identifier: Apache-2.0
 * This file takes strips of 32 query rows through a block of keys so that vector instructions run between products of
 * tiles. A unit is a strip against a block, in steps of 32 keys. The softmax of a unit (words.h) is spread over its own
 * scores and the values of the unit before it:
 *
 *     tiles                                         vectors meanwhile
 *     scores of unit n, steps 0 and 1
 *                                                   references of n
 *     scores of n, step i                           words of n, step i - 2
 *     O of n - 1, columns 0 to 31                   words of n, its last two steps
 *                                                   O and l of n follow larger references (grow)
 *     O of n - 1, 32 columns more at a time         weights of n, in place of its words
 *     sums of the weights of n - 1: a tile of ones  weights of n
 *
 * What this order keeps to was measured on an Emerald Rapids (MEASUREMENTS.md: AMX):
 *
 * - A TILESTORED takes the front end for 15 cycles and port 5 for 16. So none follows another; each stands right before
 *   the next TILEZERO, or load, of its sums, and the products of the other three sums hide it.
 * - About 130 vector instructions are in flight beside products. So after each product there are a few rows of words or
 *   weights, never a block of them.
 * - A tile that is loaded right after its lines were written waits, one that was written a step before does not. So
 *   scores lie in two buffers by turns, and weights are ready a unit before their products. */

typedef struct pipe_unit {
    int steps;
    int fresh;         /* The block is the segment's first, so O is still to be written. */
    int swapped;       /* Step 1 comes before step 0: some rows' first keys lie there. */
    const uint16_t *q; /* [STRIP][q_ld] */
    int64_t q_ld;
    const uint16_t *const *k, *const *v; /* K of each group, V of each step */
    float *o, *m, *l;                    /* [STRIP][head_size_v], [STRIP], [STRIP] */
    int64_t head_size_v;
    uint16_t *words; /* [STEPS][STRIP][STEP_KEYS], then weights */
    logit_scale scale;
    uint8_t masked[STEPS]; /* Does a row not see some key of the step? */
    /* What comes next is prefetched in shares: the next block's groups from a byte on, so many bytes by each product of
     * scores or each 32 columns of O. This block's V is, too, if nothing has prefetched it (v_now bytes a product). */
    const char *const *k_next, *const *v_next;
    int64_t k_from, v_from, k_share, v_share, v_now;
    const void *const *queries; /* rows as they are given, some of which each step prefetches */
    int num_queries, queries_of_step;
    const float *o_before; /* O of the unit before, which comes into L1 while scores are formed; or NULL */
} pipe_unit;

typedef struct pipeline {
    word_rows rows;
    float scores[2][STEP_WORDS];
    float sums[STRIP][CA_LANES]; /* of weights; all columns are alike */
    uint16_t ones[CA_LANES][2 * CA_LANES];
    uint32_t seen[STEPS][STRIP]; /* which keys of a masked step each row sees */
    uint16_t words[2][STEPS * STEP_WORDS];
    /* These are a block's groups, as units have them, and one more. */
    const uint16_t *k[MAX_GROUPS + 1];
    const char *k_next[MAX_GROUPS + 1], *v_next[MAX_GROUPS + 1];
    /* This is a state of STRIP rows for a strip of fewer. */
    float m[STRIP], l[STRIP], *o;
} __attribute__((aligned(64))) pipeline;

/* Vectors and rows of tiles that are no whole lines take the kernel 1.2 to 1.25 times as long. */
#define WHOLE_LINES(field) _Static_assert(offsetof(pipeline, field) % 64 == 0, #field " begins within a line")
WHOLE_LINES(rows.reference);
WHOLE_LINES(rows.least);
WHOLE_LINES(scores);
WHOLE_LINES(sums);
WHOLE_LINES(ones);
WHOLE_LINES(words);

/* Returns the step that comes at-th. */
INLINE int step_at(const pipe_unit *u, int at) { return u->swapped && at < 2 ? 1 - at : at; }

/* ---- scores, and words of the scores two steps before ---- */

enum { NO_WORDS, ALL_SEEN, MASKED, CAPPED };

/* Says how words are made of the scores of the at-th step; kind is a constant. */
INLINE word_maker words_of_step(int kind, pipeline *x, const pipe_unit *u, int at) {
    const int i = kind == NO_WORDS ? 0 : step_at(u, at);
    word_maker w = {.order = v_load_word_order(),
                    .units = v_set1(-u->scale.units),
                    .scale = {u->scale.factor, u->scale.units, kind == CAPPED},
                    .all = kind == ALL_SEEN,
                    .scores = x->scores[at & 1],
                    .seen = x->seen[i],
                    .to = u->words + i * STEP_WORDS};
    return w;
}

/* Prefetches a share of the queries of the strip after the next one, and O of the unit before. */
INLINE void prefetch_by_step(int depth, const pipe_unit *u, int at) {
    for (int j = at * u->queries_of_step; j < u->num_queries && j < (at + 1) * u->queries_of_step; j++)
        EACH(d, depth) __builtin_prefetch((const char *)u->queries[j] + 64 * d, 0, 2);
    for (int j = 4 * at; j < 4 * at + 4 && j < STRIP && u->o_before; j++)
        EACH(c, 2) __builtin_prefetch(u->o_before + j * u->head_size_v + 16 * c, 1, 3);
}
/* Prefetches a share of the next block's K, of V, and of the lines that the next step's words go to: words of a unit
 * are more than L1 holds, and stores of tiles wait behind those that wait for L2 (0.92 to 0.99 of the time). */
INLINE void prefetch_by_depth(int depth, const pipe_unit *u, int i, int d, const uint16_t *words) {
    for (int r = d * STRIP / depth; words && r < (d + 1) * STRIP / depth; r++)
        __builtin_prefetch(words + r * STEP_KEYS, 1, 3);
    EACH(j, 2) {
        if (u->k_next[2 * i + j])
            prefetch_bytes(u->k_next[2 * i + j] + u->k_from + d * u->k_share, u->k_share);
        if (u->v_now)
            prefetch_bytes((const char *)(u->v[i] + j * CA_LANES * u->head_size_v) + d * u->v_now, u->v_now);
    }
}

/* Forms the scores of the at-th step, of 32 * depth dimensions. Meanwhile those of the step before are stored, and
 * those before become words, some rows after each product. */
INLINE void form_step(int depth, int kind, pipeline *x, const pipe_unit *u, int at) {
    const int rows = depth <= 3 ? 4 : depth <= 6 ? 2 : 1; /* 4 * depth products are enough for all 32. */
    const int i = step_at(u, at);
    const int64_t q_ld = u->q_ld;
    const uint16_t *q = u->q, *k0 = u->k[2 * i], *k1 = u->k[2 * i + 1];
    float *to = x->scores[(at + 1) & 1];
    const word_maker w = words_of_step(kind, x, u, at - 2);
    int r = 0;
    prefetch_by_step(depth, u, at);
#define RENEW(d, t, offset)                                                                                            \
    if (d == 0) {                                                                                                      \
        if (at > 0)                                                                                                    \
            tile_store(t, to + (offset), 4 * STEP_KEYS);                                                               \
        tile_zero(t);                                                                                                  \
    }
#define MEANWHILE                                                                                                      \
    if (kind != NO_WORDS && r < STRIP) {                                                                               \
        put_words(&x->rows, &w, r, rows);                                                                              \
        r += rows;                                                                                                     \
    }
    EACH(d, depth) {
        tile_load(4, q + d * DEPTH, 2 * q_ld);
        tile_stream(6, k0 + d * DEPTH * CA_LANES, 4 * CA_LANES);
        RENEW(d, 0, 0)
        tile_dot(0, 4, 6);
        MEANWHILE
        tile_stream(7, k1 + d * DEPTH * CA_LANES, 4 * CA_LANES);
        RENEW(d, 1, CA_LANES)
        tile_dot(1, 4, 7);
        MEANWHILE
        tile_load(5, q + CA_LANES * q_ld + d * DEPTH, 2 * q_ld);
        RENEW(d, 2, CA_LANES * STEP_KEYS)
        tile_dot(2, 5, 6);
        MEANWHILE
        RENEW(d, 3, CA_LANES * STEP_KEYS + CA_LANES)
        tile_dot(3, 5, 7);
        MEANWHILE
        prefetch_by_depth(depth, u, i, d, kind == NO_WORDS ? NULL : w.to + STEP_WORDS);
    }
#undef RENEW
#undef MEANWHILE
}

INLINE void store_last_scores(pipeline *x, int steps) {
    float *to = x->scores[(steps - 1) & 1];
    tile_store(0, to, 4 * STEP_KEYS);
    tile_store(1, to + CA_LANES, 4 * STEP_KEYS);
    tile_store(2, to + CA_LANES * STEP_KEYS, 4 * STEP_KEYS);
    tile_store(3, to + CA_LANES * STEP_KEYS + CA_LANES, 4 * STEP_KEYS);
    tile_barrier();
}

#define FORM_STEP(name, depth, kind)                                                                                   \
    static NOINLINE void name##_##depth(pipeline *x, const pipe_unit *u, int at) { form_step(depth, kind, x, u, at); }
/* Forms a unit's scores, and words of all but its last two steps. Returns 0 where words will not do. */
#define FORM_WORDS(depth)                                                                                              \
    FORM_STEP(form_scores_only, depth, NO_WORDS)                                                                       \
    FORM_STEP(form_all_seen, depth, ALL_SEEN)                                                                          \
    FORM_STEP(form_masked, depth, MASKED)                                                                              \
    FORM_STEP(form_capped, depth, CAPPED)                                                                              \
    static int form_words_##depth(pipeline *x, const pipe_unit *u) {                                                   \
        for (int at = 0; at < 2 && at < u->steps; at++)                                                                \
            form_scores_only_##depth(x, u, at);                                                                        \
        if (u->steps == 1)                                                                                             \
            store_last_scores(x, 1);                                                                                   \
        tile_barrier();                                                                                                \
        const int ok = find_references(&x->rows, u->m, u->scale, x->scores[0], x->seen[step_at(u, 0)]);                \
        for (int at = 2; at < u->steps; at++)                                                                          \
            if (u->scale.capped)                                                                                       \
                form_capped_##depth(x, u, at);                                                                         \
            else if (u->masked[step_at(u, at - 2)])                                                                    \
                form_masked_##depth(x, u, at);                                                                         \
            else                                                                                                       \
                form_all_seen_##depth(x, u, at);                                                                       \
        if (u->steps > 1)                                                                                              \
            store_last_scores(x, u->steps);                                                                            \
        return ok;                                                                                                     \
    }

/* ---- values, and what remains of the next unit's softmax ---- */

enum { NOTHING, WORDS, CAPPED_WORDS, WEIGHTS };

/* Says what vectors make of unit n meanwhile: rows [at, end) of words or weights, counted over all steps. */
typedef struct meanwhile {
    const pipe_unit *n;
    unsigned at, end;
    word_maker words; /* of one step */
    uint16_t *to;     /* weights of row `at` */
    v_powers_table powers;
} meanwhile;

INLINE meanwhile make_meanwhile(int kind, pipeline *x, const pipe_unit *n, unsigned at) {
    meanwhile m = {.n = n, .at = at, .end = kind == NOTHING ? 0 : STRIP * (unsigned)n->steps};
    if (kind == WORDS || kind == CAPPED_WORDS)
        m.words = words_of_step(kind == WORDS ? MASKED : CAPPED, x, n, (int)(at / STRIP));
    if (kind == WEIGHTS) {
        m.to = n->words + at * STEP_KEYS;
        m.powers = v_load_powers();
    }
    return m;
}

/* Makes so many rows; where these are words, their number divides a step. */
INLINE void make_some(int kind, unsigned rows, pipeline *x, meanwhile *m) {
    const int r = m->at % STRIP;
    if (kind == NOTHING || m->at + rows > m->end)
        return;
    m->at += rows;
    if (kind == WEIGHTS) {
        weigh_words(&x->rows, &m->powers, r, (int)rows, m->to);
        m->to += rows * STEP_KEYS;
        return;
    }
    put_words(&x->rows, &m->words, r, (int)rows);
    if (m->at % STRIP == 0 && m->at < m->end) {
        const word_maker next = words_of_step(kind == WORDS ? MASKED : CAPPED, x, m->n, (int)(m->at / STRIP));
        m->words.scores = next.scores;
        m->words.seen = next.seen;
        m->words.to = next.to;
    }
}

/* Adds the sums of weights, which are the columns of P times a tile of ones. */
static NOINLINE void add_sums(const pipeline *x, const pipe_unit *u) {
    for (int r = 0; r < STRIP; r++)
        u->l[r] += x->sums[r][0];
}

/* O (+)= P V of unit u over the columns of the passes [pass, end), 32 each, of `passes`; after the last one its sums of
 * weights. After each product some rows of unit n are made, from the at-th on. Returns where that ends. */
INLINE unsigned multiply_values(int kind, unsigned rows, int passes, pipeline *x, const pipe_unit *u, int pass, int end,
                                const pipe_unit *n, unsigned at) {
    const int64_t dv = 2 * CA_LANES * (int64_t)passes, ld = 4 * dv, share = u->v_share;
    meanwhile m = make_meanwhile(kind, x, n, at);
#define RENEW(t, offset)                                                                                               \
    if (i == 0) {                                                                                                      \
        if (pass > 0)                                                                                                  \
            tile_store(t, o - 2 * CA_LANES + (offset), ld);                                                            \
        if (u->fresh)                                                                                                  \
            tile_zero(t);                                                                                              \
        else                                                                                                           \
            tile_load(t, o + (offset), ld);                                                                            \
    }
#define MEANWHILE(j)                                                                                                   \
    if (pass + 1 < end && 4 * i + (j) < STRIP)                                                                         \
        EACH(c, 2) __builtin_prefetch(o + 2 * CA_LANES + (4 * i + (j)) * dv + CA_LANES * c, 1, 3);                     \
    make_some(kind, rows, x, &m);
    for (; pass < end; pass++) {
        const uint16_t *p = u->words;
        float *o = u->o + 2 * CA_LANES * pass;
        for (int i = 0; i < u->steps; i++, p += STEP_WORDS) {
            const uint16_t *v = u->v[i] + 4 * CA_LANES * pass;
            tile_load(4, p, 2 * STEP_KEYS);
            tile_stream(6, v, ld);
            RENEW(0, 0)
            tile_dot(0, 4, 6);
            MEANWHILE(0)
            tile_stream(7, v + 2 * CA_LANES, ld);
            RENEW(1, CA_LANES)
            tile_dot(1, 4, 7);
            MEANWHILE(1)
            tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
            RENEW(2, CA_LANES * dv)
            tile_dot(2, 5, 6);
            MEANWHILE(2)
            RENEW(3, CA_LANES * dv + CA_LANES)
            tile_dot(3, 5, 7);
            MEANWHILE(3)
            EACH(j, 2)
            if (u->v_next[2 * i + j])
                prefetch_bytes(u->v_next[2 * i + j] + u->v_from + pass * share, share);
        }
    }
#undef RENEW
#undef MEANWHILE
    if (end == passes) {
        const uint16_t *p = u->words;
        float *o = u->o + 2 * CA_LANES * (passes - 1);
        tile_load(6, x->ones, 4 * CA_LANES);
        for (int i = 0; i < u->steps; i++, p += STEP_WORDS) {
            tile_load(4, p, 2 * STEP_KEYS);
            if (i == 0) {
                tile_store(0, o, ld);
                tile_zero(0);
            }
            tile_dot(0, 4, 6);
            make_some(kind, rows, x, &m);
            tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
            if (i == 0) {
                tile_store(1, o + CA_LANES, ld);
                tile_zero(1);
            }
            tile_dot(1, 5, 6);
            make_some(kind, rows, x, &m);
            if (i == 0) {
                tile_store(2, o + CA_LANES * dv, ld);
                tile_store(3, o + CA_LANES * dv + CA_LANES, ld);
            }
        }
        tile_store(0, x->sums, 4 * CA_LANES);
        tile_store(1, x->sums[CA_LANES], 4 * CA_LANES);
        tile_barrier();
        add_sums(x, u);
    }
    return m.at;
}

/* Makes what remains of unit n's rows. */
INLINE void make_rest(int kind, pipeline *x, const pipe_unit *n, unsigned at) {
    meanwhile m = make_meanwhile(kind, x, n, at);
    while (m.at + 4 <= m.end)
        make_some(kind, 4, x, &m);
    while (kind == WEIGHTS && m.at < m.end)
        make_some(kind, 1, x, &m);
}
static NOINLINE void make_rest_of_words(pipeline *x, const pipe_unit *n, unsigned at) {
    if (at < STRIP * (unsigned)n->steps && n->scale.capped)
        make_rest(CAPPED_WORDS, x, n, at);
    else if (at < STRIP * (unsigned)n->steps)
        make_rest(WORDS, x, n, at);
}
static NOINLINE void make_rest_of_weights(pipeline *x, const pipe_unit *n, unsigned at) {
    make_rest(WEIGHTS, x, n, at);
}

#define MULTIPLY_VALUES(name, passes, kind, rows, first, last)                                                         \
    static NOINLINE unsigned name##_##passes(pipeline *x, const pipe_unit *u, const pipe_unit *n, unsigned at) {       \
        return multiply_values(kind, rows, passes, x, u, first, last, n, at);                                          \
    }
/* Adds the values of unit u, unless it is NULL, to its O and l, and makes the weights of unit n, unless it is NULL.
 * Returns 0 where words do not do for n, whose state is then as it was. Of the 4 * passes - 2 products a step behind
 * the first 32 columns each has to make 32 / (4 * passes - 2) rows of weights. */
#define ADD_VALUES(passes)                                                                                             \
    MULTIPLY_VALUES(first_columns_and_words, passes, WORDS, 4, 0, 1)                                                   \
    MULTIPLY_VALUES(first_columns_and_capped_words, passes, CAPPED_WORDS, 4, 0, 1)                                     \
    MULTIPLY_VALUES(columns_and_weights, passes, WEIGHTS, (STRIP + 4 * passes - 3) / (4 * passes - 2), 1, passes)      \
    MULTIPLY_VALUES(other_columns, passes, NOTHING, 0, 1, passes)                                                      \
    MULTIPLY_VALUES(columns, passes, NOTHING, 0, 0, passes)                                                            \
    static int add_values_##passes(pipeline *x, const pipe_unit *u, const pipe_unit *n, int ok) {                      \
        if (!n) {                                                                                                      \
            columns_##passes(x, u, NULL, 0);                                                                           \
            return 1;                                                                                                  \
        }                                                                                                              \
        unsigned at = STRIP * (unsigned)(n->steps > 2 ? n->steps - 2 : 0);                                             \
        if (u && n->scale.capped)                                                                                      \
            at = first_columns_and_capped_words_##passes(x, u, n, at);                                                 \
        else if (u)                                                                                                    \
            at = first_columns_and_words_##passes(x, u, n, at);                                                        \
        make_rest_of_words(x, n, at);                                                                                  \
        ok = ok && grow(&x->rows, n->m, n->l, n->o, 2 * CA_LANES * passes, n->fresh);                                  \
        at = 0;                                                                                                        \
        if (u && ok)                                                                                                   \
            at = columns_and_weights_##passes(x, u, n, 0);                                                             \
        else if (u)                                                                                                    \
            other_columns_##passes(x, u, NULL, 0);                                                                     \
        if (ok)                                                                                                        \
            make_rest_of_weights(x, n, at);                                                                            \
        return ok;                                                                                                     \
    }

/* These are the head sizes, over 32, for which there are pipelines. Others go by scores (attention.h). */
#define FOR_PIPELINES(case) case (2) case (3) case (4) case (6) case (8)
FOR_PIPELINES(FORM_WORDS)
FOR_PIPELINES(ADD_VALUES)

#define HAS_PIPELINE(n) n == (head_size) / 32 ||
static int has_pipeline(int64_t head_size) { return head_size % 32 == 0 && (FOR_PIPELINES(HAS_PIPELINE) 0); }

#define FORM_CASE(n)                                                                                                   \
    case n:                                                                                                            \
        return form_words_##n(x, u);
#define ADD_CASE(n)                                                                                                    \
    case n:                                                                                                            \
        return add_values_##n(x, u, next, ok);
static int form_words(int64_t head_size, pipeline *x, const pipe_unit *u) {
    memset(x->rows.least, 0xff, sizeof x->rows.least);
    switch (head_size / 32) { FOR_PIPELINES(FORM_CASE) }
    return 0;
}
static int add_unit_values(int64_t head_size_v, pipeline *x, const pipe_unit *u, const pipe_unit *next, int ok) {
    switch (head_size_v / 32) { FOR_PIPELINES(ADD_CASE) }
    return 0;
}

static void begin_pipeline(pipeline *x, float *o) {
    x->o = o;
    for (int r = 0; r < CA_LANES; r++)
        for (int c = 0; c < 2 * CA_LANES; c++)
            x->ones[r][c] = 0x3f80;
}
