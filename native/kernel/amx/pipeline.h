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
    int fresh;   /* The block is the segment's first, so O is still to be written. */
    int swapped; /* Step 1 comes before step 0: some rows' first keys lie there. */
    int form;    /* which of the kernels of form_kind forms its scores */
    int depth;   /* A score is the sum of so many products of 32 dimensions. */
    /* The last product of a head size that is no multiple of 32 takes the last 32 dimensions of K, so that nothing
     * behind K is read, and queries of its own, which are 0 where dimensions have been counted before. */
    const uint16_t *q, *q_last; /* [STRIP][q_ld], [STRIP][q_last_ld] */
    int64_t q_ld, q_last_ld;
    const uint16_t *const *k, *const *v; /* K of each group, V of each step */
    int64_t k_last;                      /* elements of a group before the last product's */
    int k_parts;                         /* K is the sum of so many parts, */
    int64_t k_apart;                     /* so many elements apart */
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
    float sums[STRIP][CA_LANES];         /* of weights; all columns are alike */
    float last_columns[STRIP][CA_LANES]; /* of P V */
    uint16_t ones[CA_LANES][2 * CA_LANES];
    uint32_t seen[2][STEPS][STRIP];
    uint16_t weights[STEPS * STEP_WORDS];
    float octaves[2][STRIP];
    /* These are a block's groups, as units have them, and one more. */
    const uint16_t *k[MAX_GROUPS + 1];
    key_scales *keys; /* [STEPS] of a block, or NULL */
    /* This is a state of STRIP rows for a strip of fewer. */
    float m[STRIP], l[STRIP], *o;
} __attribute__((aligned(64))) pipeline;

/* Vectors and rows of tiles that are no whole lines take the kernel 1.2 to 1.25 times as long. */
#define WHOLE_LINES(field) _Static_assert(offsetof(pipeline, field) % 64 == 0, #field " begins within a line")
WHOLE_LINES(rows.reference);
WHOLE_LINES(scores);
WHOLE_LINES(sums);
WHOLE_LINES(last_columns);
WHOLE_LINES(ones);
WHOLE_LINES(weights);

/* Returns the step that comes at-th. */
INLINE int step_at(const pipe_unit *u, int at) { return u->swapped && at < 2 ? 1 - at : at; }

/* ---- scores, and weights of the scores two steps before ---- */

enum { NOTHING, ALL_SEEN, MASKED, CAPPED, BY_KEY, CAPPED_BY_KEY, KINDS };

/* Says how weights are made of the scores of the at-th step; kind is a constant. */
INLINE weight_maker weights_of_step(int kind, pipeline *x, const pipe_unit *u, int at) {
    const int i = kind == NOTHING ? 0 : step_at(u, at);
    weight_maker w = {.order = v_load_word_order(),
                      .powers = v_load_powers(),
                      .by = v_set1(u->scale.by),
                      .units = v_set1(u->scale.units),
                      .capped = kind == CAPPED || kind == CAPPED_BY_KEY,
                      .all = kind == ALL_SEEN,
                      .keys = kind == BY_KEY || kind == CAPPED_BY_KEY ? u->scale.keys + i : NULL,
                      .scores = x->scores[(u->base + at) & 1],
                      .seen = u->seen[i],
                      .to = u->weights + i * STEP_WORDS};
    return w;
}

/* Prefetches a share of the queries of a coming strip. */
INLINE void prefetch_queries(const pipe_unit *u, int at) {
    for (int j = at * u->queries_of_step; j < u->num_queries && j < (at + 1) * u->queries_of_step; j++)
        prefetch_bytes(u->queries[j], 64 * u->depth);
}

/* What a step of scores does besides its products: it stores the scores of the step before to `to`, unless that is
 * NULL, and makes weights by w of those of the step before that, `rows` rows after each product. */
typedef struct form_work {
    float *to;
    weight_maker w;
    int made, rows;
} form_work;

/* Makes the next rows of weights. kind and how many rows are made already are constants where loops are unrolled. */
INLINE void make_rows(int kind, const pipeline *x, form_work *f) {
    if (kind == NOTHING || f->made >= STRIP)
        return;
    put_weights(&x->rows, &f->w, f->made, f->rows);
    f->made += f->rows;
}

/* Adds the products of 32 dimensions to scores: q and k begin with them. opens: these are the first. */
INLINE void form_depth(int kind, int opens, const pipeline *x, const uint16_t *q, int64_t q_ld, const uint16_t *k0,
                       const uint16_t *k1, form_work *f) {
#define RENEW(t, offset)                                                                                               \
    if (opens) {                                                                                                       \
        if (f->to)                                                                                                     \
            tile_store(t, f->to + (offset), 4 * STEP_KEYS);                                                            \
        tile_zero(t);                                                                                                  \
    }
    tile_load(4, q, 2 * q_ld);
    tile_stream(6, k0, 4 * CA_LANES);
    RENEW(0, 0)
    tile_dot(0, 4, 6);
    make_rows(kind, x, f);
    tile_stream(7, k1, 4 * CA_LANES);
    RENEW(1, CA_LANES)
    tile_dot(1, 4, 7);
    make_rows(kind, x, f);
    tile_load(5, q + CA_LANES * q_ld, 2 * q_ld);
    RENEW(2, CA_LANES * STEP_KEYS)
    tile_dot(2, 5, 6);
    make_rows(kind, x, f);
    RENEW(3, CA_LANES * STEP_KEYS + CA_LANES)
    tile_dot(3, 5, 7);
    make_rows(kind, x, f);
#undef RENEW
}

/* Forms the scores of unit u's at-th step. Meanwhile those of the step before are stored, if `stores`, and those of the
 * step before that, which is unit b's step_b-th, become weights, `rows` after each product. */
INLINE void form_step(int depth, int rows, int kind, pipeline *x, const pipe_unit *u, int at, int stores,
                      const pipe_unit *b, int step_b) {
    const int i = step_at(u, at);
    const uint16_t *k0 = u->k[2 * i], *k1 = u->k[2 * i + 1];
    form_work f = {stores ? x->scores[(u->base + at + 1) & 1] : NULL, weights_of_step(kind, x, b, step_b), 0, rows};
    prefetch_queries(u, at);
#define FORM_DEPTH(part, d)                                                                                            \
    const int last = (d) + 1 == depth;                                                                                 \
    const int64_t at_k = (part) * u->k_apart + (last ? u->k_last : (d) * DEPTH * CA_LANES);                            \
    form_depth(kind, (part) + (d) == 0, x, last ? u->q_last : u->q + (d) * DEPTH, last ? u->q_last_ld : u->q_ld,       \
               k0 + at_k, k1 + at_k, &f);                                                                              \
    for (int j = 0; u->v_now && j < 2; j++)                                                                            \
        prefetch_bytes((const char *)(u->v[i] + j * CA_LANES * u->head_size_v) + (d) * u->v_now, u->v_now);
    if (__builtin_constant_p(depth)) {
        EACH(d, depth) { FORM_DEPTH(0, d) }
    } else {
        for (int part = 0; part < u->k_parts; part++)
            for (int d = 0; d < depth; d++) {
                FORM_DEPTH(part, d)
            }
    }
#undef FORM_DEPTH
}

static void store_scores(float *to) {
    store_sums(1, 1, to, STEP_KEYS);
    tile_barrier();
}
/* Returns where the scores of a unit's first two steps that are still in tiles go. */
INLINE float *scores_in_tiles(pipeline *x, const pipe_unit *u) { return x->scores[(u->base + (u->steps > 1)) & 1]; }

/* Finds a unit's references, from the scores of its first step. */
static void refer(pipeline *x, pipe_unit *u) {
    const int i = step_at(u, 0);
    u->ok = find_references(&x->rows, u->octaves, u->m, &u->scale, u->scale.keys ? u->scale.keys + i : NULL,
                            x->scores[u->base], u->seen[i]);
}

/* Makes a unit's last weights, whose scores are stored. */
INLINE void make_last(int kind, pipeline *x, const pipe_unit *u) {
    for (int at = u->steps > 2 ? u->steps - 2 : 0; at < u->steps; at++) {
        const weight_maker w = weights_of_step(kind, x, u, at);
        for (int r = 0; r < STRIP; r += 4)
            put_weights(&x->rows, &w, r, 4);
    }
}
/* Returns how the weights of a unit are made, but for steps that all rows see whole. */
INLINE int kind_of(const pipe_unit *u) {
    return u->scale.keys ? u->scale.capped ? CAPPED_BY_KEY : BY_KEY : u->scale.capped ? CAPPED : MASKED;
}
static NOINLINE void make_last_weights(pipeline *x, const pipe_unit *u) {
    switch (kind_of(u)) {
    case MASKED:
        make_last(MASKED, x, u);
        break;
    case CAPPED:
        make_last(CAPPED, x, u);
        break;
    case BY_KEY:
        make_last(BY_KEY, x, u);
        break;
    default:
        make_last(CAPPED_BY_KEY, x, u);
    }
}

#define FORM_STEP(name, depth, rows, kind)                                                                             \
    static NOINLINE void form_##kind##_##name(pipeline *x, const pipe_unit *u, int at, int stores, const pipe_unit *b, \
                                              int step_b) {                                                            \
        form_step(depth, rows, kind, x, u, at, stores, b, step_b);                                                     \
    }
#define FORM_STEPS(name, depth, rows)                                                                                  \
    FORM_STEP(name, depth, rows, NOTHING)                                                                              \
    FORM_STEP(name, depth, rows, ALL_SEEN)                                                                             \
    FORM_STEP(name, depth, rows, MASKED)                                                                               \
    FORM_STEP(name, depth, rows, CAPPED)                                                                               \
    FORM_STEP(name, depth, rows, BY_KEY)                                                                               \
    FORM_STEP(name, depth, rows, CAPPED_BY_KEY)
/* rows times 4 products for each depth of each part are enough for all 32. */
FORM_STEPS(1, 1, 8)
FORM_STEPS(2, 2, 4)
FORM_STEPS(3, 3, 4)
FORM_STEPS(4, 4, 2)
FORM_STEPS(some, u->depth, 2)
FORM_STEPS(many, u->depth, 1)
enum { SOME_DEPTHS = 5, MANY_DEPTHS };
static int form_of(int depth, int parts) {
    return depth <= 4 && parts == 1 ? depth : depth * parts < 8 ? SOME_DEPTHS : MANY_DEPTHS;
}

/* Forms scores as form_step does, of unit u, for a kind that is not known before. */
static void form_kind(int kind, pipeline *x, const pipe_unit *u, int at, int stores, const pipe_unit *b, int step_b) {
#define FORM_CASE(which, name, kind)                                                                                   \
    case (which) * KINDS + kind:                                                                                       \
        form_##kind##_##name(x, u, at, stores, b, step_b);                                                             \
        break;
#define FORM_CASES(which, name)                                                                                        \
    FORM_CASE(which, name, NOTHING)                                                                                    \
    FORM_CASE(which, name, ALL_SEEN)                                                                                   \
    FORM_CASE(which, name, MASKED)                                                                                     \
    FORM_CASE(which, name, CAPPED)                                                                                     \
    FORM_CASE(which, name, BY_KEY)                                                                                     \
    FORM_CASE(which, name, CAPPED_BY_KEY)
    switch (u->form * KINDS + kind) {
        FORM_CASES(1, 1)
        FORM_CASES(2, 2)
        FORM_CASES(3, 3)
        FORM_CASES(4, 4)
        FORM_CASES(SOME_DEPTHS, some)
        FORM_CASES(MANY_DEPTHS, many)
    }
}

/* Forms the scores of the first two steps of a unit that follows no other, and finds its references. */
static void form_first(pipeline *x, pipe_unit *u) {
    for (int at = 0; at < 2 && at < u->steps; at++)
        form_kind(NOTHING, x, u, at, at > 0, u, 0);
    store_scores(scores_in_tiles(x, u));
    refer(x, u);
}

/* Forms all other scores of a unit, and those of the first two steps of the next one, unless that is NULL, and makes
 * all of the unit's weights. */
static void form_weights(pipeline *x, const pipe_unit *u, const pipe_unit *next) {
    const int masked = kind_of(u), all_seen = masked == MASKED ? ALL_SEEN : masked;
    for (int at = 2; at < u->steps; at++)
        form_kind(u->masked[step_at(u, at - 2)] ? masked : all_seen, x, u, at, at > 2, u, at - 2);
    for (int at = 0; at < 2 && next; at++)
        form_kind(masked, x, next, at, at > 0 || u->steps > 2, u, u->steps - 2 + at);
    if (!next) {
        if (u->steps > 2)
            store_scores(x->scores[(u->base + u->steps - 1) & 1]);
        make_last_weights(x, u);
    }
}

/* ---- values ---- */

/* Returns how many steps of weights go through all columns of O together. */
static int chunk_of(const pipe_unit *u) { return u->steps <= 2 * CHUNK ? u->steps : CHUNK; }

/* Adds the sums of the weights of the steps [first, end), which are the columns of P times a tile of ones, or of the
 * keys' shares. What is in the tiles goes to `before`, unless that is NULL, in rows ld bytes apart. */
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
    const key_scales *keys = u->scale.keys;
    tile_load(6, x->ones, 4 * CA_LANES);
    for (int i = first; i < end; i++, p += STEP_WORDS) {
        tile_load(4, p, 2 * STEP_KEYS);
        if (keys) {
            tile_load(6, keys[i].shares[0], 4 * CA_LANES);
            tile_load(7, keys[i].shares[1], 4 * CA_LANES);
        }
        RENEW(0)
        tile_dot(0, 4, 6);
        if (i == first && before)
            tile_store(2, before + ld / 4 * CA_LANES, ld);
        tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
        RENEW(1)
        tile_dot(1, 5, 6);
        if (i == first && before)
            tile_store(3, before + ld / 4 * CA_LANES + CA_LANES, ld);
        if (keys) {
            tile_dot(0, 4, 7);
            tile_dot(1, 5, 7);
        }
    }
#undef RENEW
    tile_store(0, x->sums, 4 * CA_LANES);
    tile_store(1, x->sums[CA_LANES], 4 * CA_LANES);
}

/* Adds P V over the steps [first, end) to the columns of O that are no whole pass of 32: to the first 16 of them, if so
 * many are left, and to what is left then. For this the last 16 columns of V are multiplied, of which some are part of
 * O already, so that nothing behind V is read. opens: O is still to be written. */
static NOINLINE void multiply_last_columns(pipeline *x, const pipe_unit *u, int first, int end, int opens) {
    const int64_t dv = u->head_size_v, ld = 4 * dv, c = dv - dv % (2 * CA_LANES), rest = dv % CA_LANES;
    const int half = dv - c >= CA_LANES;
    float *o = u->o + c;
    const uint16_t *p = u->weights + first * STEP_WORDS;
    if (half && !opens) {
        tile_load(0, o, ld);
        tile_load(2, o + CA_LANES * dv, ld);
    } else {
        tile_zero(0);
        tile_zero(2);
    }
    tile_zero(1);
    tile_zero(3);
    for (int i = first; i < end; i++, p += STEP_WORDS) {
        tile_load(4, p, 2 * STEP_KEYS);
        tile_load(5, p + CA_LANES * STEP_KEYS, 2 * STEP_KEYS);
        if (half) {
            tile_stream(6, u->v[i] + 2 * c, ld);
            tile_dot(0, 4, 6);
            tile_dot(2, 5, 6);
        }
        if (rest) {
            tile_stream(7, u->v[i] + 2 * (dv - CA_LANES), ld);
            tile_dot(1, 4, 7);
            tile_dot(3, 5, 7);
        }
    }
    if (half) {
        tile_store(0, o, ld);
        tile_store(2, o + CA_LANES * dv, ld);
    }
    tile_store(1, x->last_columns, 4 * CA_LANES);
    tile_store(3, x->last_columns[CA_LANES], 4 * CA_LANES);
    tile_barrier();
    o = u->o + dv - rest;
    for (int r = 0; rest && r < STRIP; r++, o += dv) {
        const vf sum = v_loadn_f32(x->last_columns[r] + CA_LANES - rest, (int)rest);
        v_storen_f32(o, opens ? sum : v_add(sum, v_loadn_f32(o, (int)rest)), (int)rest);
    }
}

/* O (+)= P V of unit u over the CHUNK steps from `first` on, 32 columns in a pass; where it is `fresh`, its sums of
 * weights besides. Before the first step the tiles hold scores of the next unit, unless that is NULL. */
static NOINLINE void multiply_values(pipeline *x, const pipe_unit *u, int first, pipe_unit *next) {
    const int64_t dv = u->head_size_v, ld = 4 * dv;
    const int end = first + chunk_of(u) < u->steps ? first + chunk_of(u) : u->steps, opens = u->fresh && first == 0;
    const int passes = (int)(dv / (2 * CA_LANES));
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
    if (dv % (2 * CA_LANES)) {
        store_sums(1, 1, before, dv);
        before = NULL;
        multiply_last_columns(x, u, first, end, opens);
    }
    if (u->fresh)
        multiply_ones(x, u, first, end, before, ld);
    else if (before)
        store_sums(1, 1, before, dv);
}

/* These are the head sizes for which there are pipelines. Others go by scores (attention.h). */
static int has_pipeline(int64_t head_size, int parts) { return head_size >= 2 * CA_LANES * parts; }

/* Adds the values of unit u, whose weights are made, to its state, and finds the references of the next one, unless it
 * is NULL. Returns 0 where words do not do for u. Then its state is as it was, but for an O that was still to be
 * written. */
static int finish_unit(pipeline *x, const pipe_unit *u, pipe_unit *next) {
    if (!u->fresh) {
        if (next) {
            store_scores(scores_in_tiles(x, next));
            refer(x, next);
            next = NULL;
        }
        multiply_ones(x, u, 0, u->steps, NULL, 0);
        tile_barrier();
        if (!take_sums(x->sums, u->scale.keys != NULL, u->octaves, u->m, u->l))
            return 0;
    }
    for (int first = 0; first < u->steps; first += chunk_of(u))
        multiply_values(x, u, first, first == 0 ? next : NULL);
    tile_barrier();
    return !u->fresh || take_sums(x->sums, u->scale.keys != NULL, u->octaves, u->m, u->l);
}

static void begin_pipeline(pipeline *x, float *o, key_scales *keys) {
    x->o = o;
    x->keys = keys;
    for (int r = 0; r < CA_LANES; r++)
        for (int c = 0; c < 2 * CA_LANES; c++)
            x->ones[r][c] = 0x3f80;
}
