/* SPDX-License-Identifier: Apache-2.0
 * This file takes strips of 32 query rows through a block of keys so that vector instructions run between products of
 * tiles. A unit is a strip against a block, in steps of 32 keys. The softmax of a unit (words.h) is spread over its own
 * scores and the first ones of the unit behind it:
 *
 *     tiles                                  vectors meanwhile
 *     scores of unit n, step i               weights of n, step i - 2
 *     scores of n + 1, steps 0 and 1         weights of n, its last two steps
 *     O of n, CHUNK steps at a time, and     references of n + 1
 *       sums of weights: a tile of ones
 *
 * What this order keeps to was measured on an Emerald Rapids and a Granite Rapids (MEASUREMENTS.md: AMX):
 *
 * - A TILESTORED takes the front end for 15 cycles and port 5 for 16. So none follows another; each stands right before
 *   the next TILEZERO, or load, of its sums, and the products of the other three sums hide it.
 * - About 130 vector instructions are in flight beside products. So after each product there are a few rows of weights,
 *   never a block of them.
 * - A tile that is loaded right after its lines were written waits, one that was written a step before does not. So
 *   scores lie in two buffers by turns, and weights are ready two steps before their products.
 * - L2 gives less than tiles of both weights and V can take. So CHUNK steps of weights go through all columns of O
 *   while L1 has them: 0.7 to 0.8 of the time of all steps at once.
 * - Prefetches that miss L2 keep line fill buffers from the tiles' loads: without those of the next block's K and V
 *   prompts take 0.95 to 1.0 of the time, since the hardware's prefetchers follow the tiles. Queries, which are read
 *   once, are prefetched. */

#define CHUNK 8

typedef struct pipe_unit {
    int steps;
    int fresh;         /* The block is the segment's first, so O is still to be written. */
    int swapped;       /* Step 1 comes before step 0: some rows' first keys lie there. */
    const uint16_t *q; /* [STRIP][q_ld] */
    int64_t q_ld;
    const uint16_t *const *k, *const *v; /* K of each group, V of each step */
    float *o, *m, *l;                    /* [STRIP][head_size_v], [STRIP], [STRIP] */
    int64_t head_size_v;
    float *octaves;    /* [STRIP]: find_references */
    uint16_t *weights; /* [STEPS][STRIP][STEP_KEYS] */
    logit_scale scale;
    uint8_t masked[STEPS];      /* Does a row not see some key of the step? */
    const void *const *queries; /* rows as they are given, some of which each step prefetches */
    int num_queries, queries_of_step;
    int64_t v_now;           /* bytes of each group's V that each 32 dimensions of scores prefetch */
    uint32_t (*seen)[STRIP]; /* [STEPS] which keys of a masked step each row sees */
    int base;                /* Scores of step i lie in buffer (base + i) % 2. */
    int ok;                  /* Words can say how large its logits are. */
} pipe_unit;

typedef struct pipeline {
    word_rows rows;
    float scores[2][STEP_WORDS];
    float sums[STRIP][CA_LANES]; /* of weights; all columns are alike */
    uint16_t ones[CA_LANES][2 * CA_LANES];
    uint32_t seen[2][STEPS][STRIP];
    uint16_t weights[STEPS * STEP_WORDS];
    float octaves[2][STRIP];
    /* These are a block's groups, as units have them, and one more. */
    const uint16_t *k[MAX_GROUPS + 1];
    /* This is a state of STRIP rows for a strip of fewer. */
    float m[STRIP], l[STRIP], *o;
} __attribute__((aligned(64))) pipeline;

/* Vectors and rows of tiles that are no whole lines take the kernel 1.2 to 1.25 times as long. */
#define WHOLE_LINES(field) _Static_assert(offsetof(pipeline, field) % 64 == 0, #field " begins within a line")
WHOLE_LINES(rows.reference);
WHOLE_LINES(scores);
WHOLE_LINES(sums);
WHOLE_LINES(ones);
WHOLE_LINES(weights);

/* Returns the step that comes at-th. */
INLINE int step_at(const pipe_unit *u, int at) { return u->swapped && at < 2 ? 1 - at : at; }

/* ---- scores, and weights of the scores two steps before ---- */

enum { NOTHING, ALL_SEEN, MASKED, CAPPED };

/* Says how weights are made of the scores of the at-th step; kind is a constant. */
INLINE weight_maker weights_of_step(int kind, pipeline *x, const pipe_unit *u, int at) {
    const int i = kind == NOTHING ? 0 : step_at(u, at);
    weight_maker w = {.order = v_load_word_order(),
                      .powers = v_load_powers(),
                      .units = v_set1(-u->scale.units),
                      .scale = {u->scale.factor, u->scale.units, kind == CAPPED},
                      .all = kind == ALL_SEEN,
                      .scores = x->scores[(u->base + at) & 1],
                      .seen = u->seen[i],
                      .to = u->weights + i * STEP_WORDS};
    return w;
}

/* Prefetches a share of the queries of a coming strip. */
INLINE void prefetch_queries(int depth, const pipe_unit *u, int at) {
    for (int j = at * u->queries_of_step; j < u->num_queries && j < (at + 1) * u->queries_of_step; j++)
        EACH(d, depth) __builtin_prefetch((const char *)u->queries[j] + 64 * d, 0, 2);
}

/* Forms the scores of unit u's at-th step, of 32 * depth dimensions. Meanwhile those of the step before are stored, if
 * `stores`, and those of the step before that, which is unit b's step_b-th, become weights, some rows after each
 * product. */
INLINE void form_step(int depth, int kind, pipeline *x, const pipe_unit *u, int at, int stores, const pipe_unit *b,
                      int step_b) {
    const int rows = depth <= 3 ? 4 : depth <= 6 ? 2 : 1; /* 4 * depth products are enough for all 32. */
    const int i = step_at(u, at);
    const int64_t q_ld = u->q_ld;
    const uint16_t *q = u->q, *k0 = u->k[2 * i], *k1 = u->k[2 * i + 1];
    float *to = x->scores[(u->base + at + 1) & 1];
    const weight_maker w = weights_of_step(kind, x, b, step_b);
    int r = 0;
    prefetch_queries(depth, u, at);
#define RENEW(d, t, offset)                                                                                            \
    if (d == 0) {                                                                                                      \
        if (stores)                                                                                                    \
            tile_store(t, to + (offset), 4 * STEP_KEYS);                                                               \
        tile_zero(t);                                                                                                  \
    }
#define MEANWHILE                                                                                                      \
    if (kind != NOTHING && r < STRIP) {                                                                                \
        put_weights(&x->rows, &w, r, rows);                                                                            \
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
        if (u->v_now)
            EACH(j, 2)
        prefetch_bytes((const char *)(u->v[i] + j * CA_LANES * u->head_size_v) + d * u->v_now, u->v_now);
    }
#undef RENEW
#undef MEANWHILE
}

/* Moves a maker to the at-th step of a unit. */
INLINE void move_to_step(weight_maker *w, pipeline *x, const pipe_unit *u, int at) {
    const int i = step_at(u, at);
    w->scores = x->scores[(u->base + at) & 1];
    w->seen = u->seen[i];
    w->to = u->weights + i * STEP_WORDS;
}

INLINE void store_scores(float *to) {
    tile_store(0, to, 4 * STEP_KEYS);
    tile_store(1, to + CA_LANES, 4 * STEP_KEYS);
    tile_store(2, to + CA_LANES * STEP_KEYS, 4 * STEP_KEYS);
    tile_store(3, to + CA_LANES * STEP_KEYS + CA_LANES, 4 * STEP_KEYS);
    tile_barrier();
}
/* Returns where the scores of a unit's first two steps that are still in tiles go. */
INLINE float *scores_in_tiles(pipeline *x, const pipe_unit *u) { return x->scores[(u->base + (u->steps > 1)) & 1]; }

/* Finds a unit's references, from the scores of its first step. */
static void refer(pipeline *x, pipe_unit *u) {
    u->ok = find_references(&x->rows, u->octaves, u->m, u->scale, x->scores[u->base], u->seen[step_at(u, 0)]);
}

/* Makes a unit's last weights, whose scores are stored. */
INLINE void make_last(int kind, pipeline *x, const pipe_unit *u) {
    for (int at = u->steps > 2 ? u->steps - 2 : 0; at < u->steps; at++) {
        const weight_maker w = weights_of_step(kind, x, u, at);
        for (int r = 0; r < STRIP; r += 4)
            put_weights(&x->rows, &w, r, 4);
    }
}
static NOINLINE void make_last_weights(pipeline *x, const pipe_unit *u) {
    if (u->scale.capped)
        make_last(CAPPED, x, u);
    else
        make_last(MASKED, x, u);
}

#define FORM_STEP(name, depth, kind)                                                                                   \
    static NOINLINE void name##_##depth(pipeline *x, const pipe_unit *u, int at, int stores, const pipe_unit *b,       \
                                        int step_b) {                                                                  \
        form_step(depth, kind, x, u, at, stores, b, step_b);                                                           \
    }
/* form_first forms the scores of the first two steps of a unit that follows no other, and finds its references.
 * form_weights forms all other scores, and those of the first two steps of the next unit, unless that is NULL, and
 * makes all weights. */
#define FORM_WEIGHTS(depth)                                                                                            \
    FORM_STEP(form_scores_only, depth, NOTHING)                                                                        \
    FORM_STEP(form_all_seen, depth, ALL_SEEN)                                                                          \
    FORM_STEP(form_masked, depth, MASKED)                                                                              \
    FORM_STEP(form_capped, depth, CAPPED)                                                                              \
    static void form_first_##depth(pipeline *x, pipe_unit *u) {                                                        \
        for (int at = 0; at < 2 && at < u->steps; at++)                                                                \
            form_scores_only_##depth(x, u, at, at > 0, u, 0);                                                          \
        store_scores(scores_in_tiles(x, u));                                                                           \
        refer(x, u);                                                                                                   \
    }                                                                                                                  \
    static void form_weights_##depth(pipeline *x, const pipe_unit *u, const pipe_unit *next) {                         \
        for (int at = 2; at < u->steps; at++)                                                                          \
            if (u->scale.capped)                                                                                       \
                form_capped_##depth(x, u, at, at > 2, u, at - 2);                                                      \
            else if (u->masked[step_at(u, at - 2)])                                                                    \
                form_masked_##depth(x, u, at, at > 2, u, at - 2);                                                      \
            else                                                                                                       \
                form_all_seen_##depth(x, u, at, at > 2, u, at - 2);                                                    \
        for (int at = 0; at < 2 && next; at++)                                                                         \
            if (u->scale.capped)                                                                                       \
                form_capped_##depth(x, next, at, at > 0 || u->steps > 2, u, u->steps - 2 + at);                        \
            else                                                                                                       \
                form_masked_##depth(x, next, at, at > 0 || u->steps > 2, u, u->steps - 2 + at);                        \
        if (!next) {                                                                                                   \
            if (u->steps > 2)                                                                                          \
                store_scores(x->scores[(u->base + u->steps - 1) & 1]);                                                 \
            make_last_weights(x, u);                                                                                   \
        }                                                                                                              \
    }

/* ---- values ---- */

/* Returns how many steps of weights go through all columns of O together. */
static int chunk_of(const pipe_unit *u) { return u->steps <= 2 * CHUNK ? u->steps : CHUNK; }

/* Adds the sums of the weights of the steps [first, end), which are the columns of P times a tile of ones. What is in
 * the tiles goes to `before`, unless that is NULL, in rows ld bytes apart. */
INLINE void multiply_ones(pipeline *x, const pipe_unit *u, int first, int end, float *before, int64_t ld) {
    const uint16_t *p = u->weights + first * STEP_WORDS;
#define RENEW(t)                                                                                                       \
    if (i == first) {                                                                                                  \
        if (before)                                                                                                    \
            tile_store(t, before + t * CA_LANES, ld);                                                                  \
        if (first == 0)                                                                                                \
            tile_zero(t);                                                                                              \
        else                                                                                                           \
            tile_load(t, x->sums[t * CA_LANES], 4 * CA_LANES);                                                         \
    }
    tile_load(6, x->ones, 4 * CA_LANES);
    for (int i = first; i < end; i++, p += STEP_WORDS) {
        tile_load(4, p, 2 * STEP_KEYS);
        RENEW(0)
        tile_dot(0, 4, 6);
        if (i == first && before)
            tile_store(2, before + ld / 4 * CA_LANES, ld);
        tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
        RENEW(1)
        tile_dot(1, 5, 6);
        if (i == first && before)
            tile_store(3, before + ld / 4 * CA_LANES + CA_LANES, ld);
    }
#undef RENEW
    tile_store(0, x->sums, 4 * CA_LANES);
    tile_store(1, x->sums[CA_LANES], 4 * CA_LANES);
}

/* O (+)= P V of unit u over the CHUNK steps from `first` on, 32 columns in a pass; where it is `fresh`, its sums of
 * weights besides. Before the first step the tiles hold scores of the next unit, unless that is NULL. */
INLINE void multiply_values(int passes, pipeline *x, const pipe_unit *u, int first, pipe_unit *next) {
    const int64_t dv = 2 * CA_LANES * (int64_t)passes, ld = 4 * dv;
    const int end = first + chunk_of(u) < u->steps ? first + chunk_of(u) : u->steps, opens = u->fresh && first == 0;
    float *before = next ? scores_in_tiles(x, next) : NULL;
    int64_t before_ld = 4 * STEP_KEYS;
#define RENEW(t, tall, wide)                                                                                           \
    if (i == first) {                                                                                                  \
        if (before)                                                                                                    \
            tile_store(t, before + tall * CA_LANES * (before_ld / 4) + wide * CA_LANES, before_ld);                    \
        if (opens)                                                                                                     \
            tile_zero(t);                                                                                              \
        else                                                                                                           \
            tile_load(t, o + tall * CA_LANES * dv + wide * CA_LANES, ld);                                              \
    }
#define MEANWHILE(j)                                                                                                   \
    if (first == 0 && pass + 1 < passes && 4 * i + (j) < STRIP)                                                        \
        EACH(c, 2) __builtin_prefetch(o + 2 * CA_LANES + (4 * i + (j)) * dv + CA_LANES * c, 1, 3);
    for (int pass = 0; pass < passes; pass++) {
        const uint16_t *p = u->weights + first * STEP_WORDS;
        float *o = u->o + 2 * CA_LANES * pass;
        for (int i = first; i < end; i++, p += STEP_WORDS) {
            const uint16_t *v = u->v[i] + 4 * CA_LANES * pass;
            tile_load(4, p, 2 * STEP_KEYS);
            tile_stream(6, v, ld);
            RENEW(0, 0, 0)
            tile_dot(0, 4, 6);
            MEANWHILE(0)
            tile_stream(7, v + 2 * CA_LANES, ld);
            RENEW(1, 0, 1)
            tile_dot(1, 4, 7);
            MEANWHILE(1)
            tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
            RENEW(2, 1, 0)
            tile_dot(2, 5, 6);
            MEANWHILE(2)
            RENEW(3, 1, 1)
            tile_dot(3, 5, 7);
            MEANWHILE(3)
        }
        before = o;
        before_ld = ld;
        if (next && pass == 0) {
            tile_barrier();
            refer(x, next);
        }
    }
#undef RENEW
#undef MEANWHILE
    if (u->fresh) {
        multiply_ones(x, u, first, end, before, ld);
        return;
    }
    tile_store(0, before, ld);
    tile_store(1, before + CA_LANES, ld);
    tile_store(2, before + CA_LANES * dv, ld);
    tile_store(3, before + CA_LANES * dv + CA_LANES, ld);
}

/* Adds the values of unit u to its O and, where it is `fresh`, its sums of weights to x.sums. */
#define ADD_VALUES(passes)                                                                                             \
    static NOINLINE void add_chunk_##passes(pipeline *x, const pipe_unit *u, int first, pipe_unit *next) {             \
        multiply_values(passes, x, u, first, next);                                                                    \
    }                                                                                                                  \
    static void add_values_##passes(pipeline *x, const pipe_unit *u, pipe_unit *next) {                                \
        for (int first = 0; first < u->steps; first += chunk_of(u))                                                    \
            add_chunk_##passes(x, u, first, first == 0 ? next : NULL);                                                 \
        tile_barrier();                                                                                                \
    }

/* These are the head sizes, over 32, for which there are pipelines. Others go by scores (attention.h). */
#define FOR_PIPELINES(case) case (2) case (3) case (4) case (6) case (8)
FOR_PIPELINES(FORM_WEIGHTS)
FOR_PIPELINES(ADD_VALUES)

#define HAS_PIPELINE(n) n == (head_size) / 32 ||
static int has_pipeline(int64_t head_size) { return head_size % 32 == 0 && (FOR_PIPELINES(HAS_PIPELINE) 0); }

#define FIRST_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        form_first_##n(x, u);                                                                                          \
        break;
#define FORM_CASE(n)                                                                                                   \
    case n:                                                                                                            \
        form_weights_##n(x, u, next);                                                                                  \
        break;
#define ADD_CASE(n)                                                                                                    \
    case n:                                                                                                            \
        add_values_##n(x, u, next);                                                                                    \
        break;
static void form_first(int64_t head_size, pipeline *x, pipe_unit *u) {
    switch (head_size / 32) { FOR_PIPELINES(FIRST_CASE) }
}
static void form_weights(int64_t head_size, pipeline *x, const pipe_unit *u, const pipe_unit *next) {
    switch (head_size / 32) { FOR_PIPELINES(FORM_CASE) }
}

/* Adds the values of unit u, whose weights are made, to its state, and finds the references of the next one, unless it
 * is NULL. Returns 0 where words do not do for u. Then its state is as it was, but for an O that was still to be
 * written. */
static int finish_unit(int64_t head_size_v, pipeline *x, const pipe_unit *u, pipe_unit *next) {
    if (!u->fresh) {
        if (next) {
            store_scores(scores_in_tiles(x, next));
            refer(x, next);
            next = NULL;
        }
        multiply_ones(x, u, 0, u->steps, NULL, 0);
        tile_barrier();
        if (!take_sums(x->sums, u->octaves, u->m, u->l))
            return 0;
    }
    switch (head_size_v / 32) { FOR_PIPELINES(ADD_CASE) }
    return !u->fresh || take_sums(x->sums, u->octaves, u->m, u->l);
}

static void begin_pipeline(pipeline *x, float *o) {
    x->o = o;
    for (int r = 0; r < CA_LANES; r++)
        for (int c = 0; c < 2 * CA_LANES; c++)
            x->ones[r][c] = 0x3f80;
}
