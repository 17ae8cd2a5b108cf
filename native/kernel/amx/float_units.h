/* SPDX-License-Identifier: Apache-2.0
 * This file takes strips of 32 query rows of float16 or float32 through a block of packed keys (parts.h), for
 * amx/floats.h. A unit is a strip against a block, in steps of 32 keys:
 *
 *     tiles                            vectors meanwhile
 *     scores of step i                 weights of step i - 2
 *     O, columns 0 to 31               weights of the last two steps
 *     O, 32 columns more at a time
 *
 * The scores of step i - 1 are stored before the first product of each sum of step i, as pipeline.h does. A product of
 * parts takes 12 or 24 instructions of tiles where bfloat16 takes 4, beside which the vectors have time enough for an
 * exp2 of float32's accuracy: the softmax is 5 to 7 % of the time (MEASUREMENTS.md: AMX).
 *
 * A row's reference is the largest logit of the first two steps in which it sees keys, in whole sixteenths of an
 * octave. Weights begin at 2^LIFT, since one of 2^(LIFT - 127) must still have parts, and may grow by 2^GROW: with V
 * below 2^30 their sums then stay finite. Where a logit is larger than that, the unit's largest becomes the row's
 * reference, its state follows, and the unit is done again. All of this goes by row, whatever other rows are in the
 * strip. */

enum { LIFT = 24, GROW = 60, FLOAT_STEPS = 512 / STEP_KEYS };
/* References are multiples of 1/16 octave; from so many on V_WHOLE has no room for them. */
#define FAR_SIXTEENTHS 0x1p21f

typedef struct float_pipe {
    float scores[2][STEP_WORDS];
    float sums[STRIP][CA_LANES]; /* of weights, by lane */
    float start[STRIP];          /* V_WHOLE plus 16 LIFT less the reference in sixteenths */
    float m[STRIP], l[STRIP];
    uint32_t seen[FLOAT_STEPS][STRIP]; /* which keys of a step each row sees */
    uint8_t masked[FLOAT_STEPS];       /* Does a row not see some key of the step? */
} __attribute__((aligned(64))) float_pipe;

typedef struct float_unit {
    int parts, steps, rows, fresh; /* rows: those of the strip; fresh: O is still to be written */
    int64_t depth, passes;         /* of 32 dimensions, of 32 columns */
    const uint16_t *q, *k, *v;
    uint16_t *weights; /* [steps][parts][2] tiles */
    float *o;
    int64_t o_ld;
    float scale; /* sixteenths of an octave for a score */
    /* Makes logits in octaves of the scores of a step, or is NULL. Returns 0 where one is NaN or too large. */
    int (*shape)(const struct float_work *w, const struct strip *t, int step, float *scores);
    const struct float_work *work;
    const struct strip *strip;
} float_unit;

INLINE v_sixteenths load_sixteenths(const float_unit *u) {
    return v_load_sixteenths(u->scale, V_WHOLE + 16 * (LIFT - 127));
}

/* Says where the scores of a step become weights. */
typedef struct weigher {
    const float *scores;
    const uint32_t *seen;
    uint16_t *to; /* [parts][STRIP] vectors of pairs */
} weigher;
INLINE weigher weigher_of(int parts, const float_pipe *x, const float_unit *u, int step) {
    return (weigher){x->scores[step & 1], x->seen[step], u->weights + (int64_t)step * 2 * parts * TILE};
}

/* Makes the weights of a row. masked: it may not see all keys of the step. Returns the largest exponents so far. */
INLINE vf weigh_row(int parts, int masked, float_pipe *x, const v_sixteenths *c, const weigher *w, int64_t row,
                    vf top) {
    const float *s = w->scores + row * STEP_KEYS;
    const uint32_t seen = masked ? w->seen[row] : 0;
    const vf start = v_set1(x->start[row]);
    const vf a = v_sixteenth_powers(parts == 3, masked, c, v_load_f32(s), start, seen, &top);
    const vf b = v_sixteenth_powers(parts == 3, masked, c, v_load_f32(s + VL), start, seen >> VL, &top);
    v_store(x->sums[row], v_add(v_load_f32(x->sums[row]), v_add(a, b)));
    split_pairs(parts, a, b, w->to + row * 2 * CA_LANES, 2 * TILE);
    return top;
}

/* ---- products ---- */

#define LOAD_A(i)                                                                                                      \
    tile_load(4, a + 2 * (i) * TILE, 64);                                                                              \
    tile_load(5, a + (2 * (i) + 1) * TILE, 64);
#define LOAD_B(i)                                                                                                      \
    tile_load(6, b0 + (i) * TILE, 64);                                                                                 \
    tile_load(7, b1 + (i) * TILE, 64);
#define FOUR_PRODUCTS(RENEW)                                                                                           \
    RENEW(0) tile_dot(0, 4, 6);                                                                                        \
    MEANWHILE                                                                                                          \
    RENEW(1) tile_dot(1, 4, 7);                                                                                        \
    MEANWHILE                                                                                                          \
    RENEW(2) tile_dot(2, 5, 6);                                                                                        \
    MEANWHILE                                                                                                          \
    RENEW(3) tile_dot(3, 5, 7);                                                                                        \
    MEANWHILE
#define KEEP_SUM(t)
/* Adds the products of the parts of two tiles of A and two of B, the smallest ones first where the order is free. RENEW
 * is done with each sum before its first product, MEANWHILE after each product. */
#define PRODUCTS_OF_PARTS(RENEW)                                                                                       \
    LOAD_A(0)                                                                                                          \
    LOAD_B(parts - 1)                                                                                                  \
    FOUR_PRODUCTS(RENEW)                                                                                               \
    if (parts == 3) {                                                                                                  \
        LOAD_B(1)                                                                                                      \
        FOUR_PRODUCTS(KEEP_SUM)                                                                                        \
    }                                                                                                                  \
    LOAD_B(0)                                                                                                          \
    FOUR_PRODUCTS(KEEP_SUM)                                                                                            \
    if (parts == 3) {                                                                                                  \
        LOAD_A(2)                                                                                                      \
        FOUR_PRODUCTS(KEEP_SUM)                                                                                        \
    }                                                                                                                  \
    LOAD_A(1)                                                                                                          \
    FOUR_PRODUCTS(KEEP_SUM)                                                                                            \
    if (parts == 3) {                                                                                                  \
        LOAD_B(1)                                                                                                      \
        FOUR_PRODUCTS(KEEP_SUM)                                                                                        \
    }
#define PRODUCTS(parts) ((parts) == 3 ? 24 : 12)

/* ---- scores ---- */

/* Forms the scores of a step. Meanwhile those of the step before are stored, if `stores`, and those before become
 * weights: `rows` rows by every 32 dimensions, and the rest, if any. */
INLINE vf float_step(int parts, int rows, int masked, float_pipe *x, const float_unit *u, int step, int stores,
                     vf top) {
    const int64_t size = u->depth * parts * TILE;
    const uint16_t *a = u->q, *b0 = u->k + 2 * step * size, *b1 = b0 + size;
    float *to = x->scores[(step + 1) & 1];
    const v_sixteenths c = load_sixteenths(u);
    const weigher w = weigher_of(parts, x, u, rows ? step - 2 : 0);
    int64_t row = 0;
#define STORE_AND_ZERO(t)                                                                                              \
    if (d == 0) {                                                                                                      \
        if (stores)                                                                                                    \
            tile_store(t, to + (t) / 2 * CA_LANES * STEP_KEYS + (t) % 2 * CA_LANES, 4 * STEP_KEYS);                    \
        tile_zero(t);                                                                                                  \
    }
#define MEANWHILE                                                                                                      \
    if (rows && some) {                                                                                                \
        EACH(j, rows *(product + 1) / PRODUCTS(parts) - rows * product / PRODUCTS(parts))                              \
        top = weigh_row(parts, masked, x, &c, &w, row++, top);                                                         \
    }                                                                                                                  \
    product++;
    for (int64_t d = 0; d < u->depth; d++) {
        const int some = row < STRIP;
        int product = 0;
        PRODUCTS_OF_PARTS(STORE_AND_ZERO)
        a += 2 * parts * TILE;
        b0 += parts * TILE;
        b1 += parts * TILE;
    }
#undef MEANWHILE
    for (; rows && row < STRIP; row++)
        top = weigh_row(parts, masked, x, &c, &w, row, top);
    return top;
}

#define FLOAT_STEP(parts, rows)                                                                                        \
    static NOINLINE vf all_seen_##parts##_##rows(float_pipe *x, const float_unit *u, int step, int stores, vf top) {   \
        return float_step(parts, rows, 0, x, u, step, stores, top);                                                    \
    }                                                                                                                  \
    static NOINLINE vf masked_##parts##_##rows(float_pipe *x, const float_unit *u, int step, int stores, vf top) {     \
        return float_step(parts, rows, 1, x, u, step, stores, top);                                                    \
    }
#define FLOAT_STEPS_OF(parts)                                                                                          \
    FLOAT_STEP(parts, 4)                                                                                               \
    FLOAT_STEP(parts, 8)                                                                                               \
    FLOAT_STEP(parts, 16)                                                                                              \
    static NOINLINE void scores_only_##parts(float_pipe *x, const float_unit *u, int step, int stores) {               \
        float_step(parts, 0, 0, x, u, step, stores, v_set1(0));                                                        \
    }
FLOAT_STEPS_OF(2)
FLOAT_STEPS_OF(3)

static void form_only(float_pipe *x, const float_unit *u, int step, int stores) {
    if (u->parts == 3)
        scores_only_3(x, u, step, stores);
    else
        scores_only_2(x, u, step, stores);
}
/* Forms a step whose rows by every 32 dimensions come to all 32. */
static vf form_float_step(float_pipe *x, const float_unit *u, int step, int stores, vf top) {
    const int masked = x->masked[step - 2];
#define STEP_OF_ROWS(rows)                                                                                             \
    if (u->parts == 3)                                                                                                 \
        return masked ? masked_3_##rows(x, u, step, stores, top) : all_seen_3_##rows(x, u, step, stores, top);         \
    return masked ? masked_2_##rows(x, u, step, stores, top) : all_seen_2_##rows(x, u, step, stores, top);
    if (u->depth >= 8) {
        STEP_OF_ROWS(4)
    }
    if (u->depth >= 4) {
        STEP_OF_ROWS(8)
    }
    STEP_OF_ROWS(16)
}

/* ---- references ---- */

INLINE vf seen_top(const float *s, uint32_t seen) {
    return v_max(v_keep_bits(v_load_f32(s), seen), v_keep_bits(v_load_f32(s + VL), seen >> VL));
}

static void refer_to(float_pipe *x, int row, float sixteenths) {
    x->start[row] = V_WHOLE + 16 * LIFT - sixteenths;
    x->m[row] = sixteenths / 16 - LIFT;
}

/* Sets where the rows' exponents start. search: rows that have no reference find one in the scores of up to two steps.
 * Returns 0 where that is too far from 0. A row that sees nothing there, but perhaps later, makes *late 1. */
static int find_float_references(float_pipe *x, const float_unit *u, int search, int *late) {
    int ok = 1;
    for (int r = 0; r < STRIP; r++) {
        vf top = v_set1(-INFINITY);
        x->start[r] = V_WHOLE + (x->m[r] == -INFINITY ? 16 * LIFT : -16 * x->m[r]);
        if (!search || r >= u->rows || x->m[r] != -INFINITY)
            continue;
        for (int i = 0; i < 2 && i < u->steps; i++)
            top = v_max(top, seen_top(x->scores[i] + r * STEP_KEYS, x->seen[i][r]));
        const float sixteenths = rintf(v_hmax(top) * u->scale);
        if (sixteenths > -INFINITY) {
            ok &= fabsf(sixteenths) < FAR_SIXTEENTHS;
            refer_to(x, r, sixteenths);
        }
        for (int i = 2; x->m[r] == -INFINITY && i < u->steps; i++)
            *late |= x->seen[i][r] != 0;
    }
    return ok;
}

static int shape_step(float_pipe *x, const float_unit *u, int step) {
    return !u->shape || u->shape(u->work, u->strip, step, x->scores[step & 1]);
}

/* Refers rows to their largest logits in the unit: those that have no reference, and those whose weights would grow too
 * much; the state of these follows. Returns 0 where that cannot be. */
static NOINLINE int refer_again(float_pipe *x, const float_unit *u) {
    vf tops[STRIP];
    int ok = 1;
    EACH(r, STRIP) tops[r] = v_set1(-INFINITY);
    for (int i = 0; i < u->steps; i++) {
        form_only(x, u, i, 0);
        store_scores(x->scores[i & 1]);
        ok &= shape_step(x, u, i);
        for (int r = 0; r < STRIP; r++)
            tops[r] = v_max(tops[r], seen_top(x->scores[i & 1] + r * STEP_KEYS, x->seen[i][r]));
    }
    for (int r = 0; r < STRIP; r++) {
        const float sixteenths = rintf(v_hmax(tops[r]) * u->scale), before = 16 * (x->m[r] + LIFT);
        if (sixteenths == -INFINITY || !(x->m[r] == -INFINITY || sixteenths - before > 16 * GROW))
            continue;
        if (x->m[r] != -INFINITY && !u->fresh) {
            const float by = exp2_one((before - sixteenths) / 16);
            x->l[r] *= by;
            scale_row(u->o + r * u->o_ld, 32 * u->passes, by);
        }
        ok &= fabsf(sixteenths) < FAR_SIXTEENTHS;
        refer_to(x, r, sixteenths);
    }
    return ok;
}

/* ---- a unit ---- */

enum { UNIT_DONE, UNIT_TOO_LARGE, UNIT_UNFIT };

static int too_large(vf top) { return v_any_less(v_set1(V_WHOLE + 16 * (LIFT + GROW)), top); }

/* Returns the largest exponents of a step that has no weights yet. */
static vf top_of_step(const float_pipe *x, const float_unit *u, int step) {
    vf top = v_set1(0);
    for (int r = 0; r < STRIP; r++) {
        const vf most = seen_top(x->scores[step & 1] + r * STEP_KEYS, x->seen[step][r]);
        top = v_max(top, v_fma(most, v_set1(u->scale), v_set1(x->start[r])));
    }
    return top;
}

/* Forms the scores of all steps, and the weights of all but the last two. again: references are there, and do. */
static int form_float_weights(float_pipe *x, const float_unit *u, int again) {
    int searches = 0, late = 0, ok = 1;
    vf top = v_set1(0);
    for (int r = 0; r < u->rows; r++)
        searches |= !again && x->m[r] == -INFINITY;
    const int early = searches || u->steps <= 2; /* scores of the first two steps are wanted at once */
    memset(x->sums, 0, sizeof x->sums);
    form_only(x, u, 0, 0);
    if (u->steps > 1)
        form_only(x, u, 1, 1);
    if (early)
        store_scores(x->scores[u->steps > 1]);
    for (int i = 0; i < 2 && i < u->steps && early; i++)
        ok &= shape_step(x, u, i);
    if (!ok || !find_float_references(x, u, searches, &late))
        return UNIT_UNFIT;
    if (late)
        return UNIT_TOO_LARGE;
    for (int i = 2; i < u->steps; i++) {
        if (i > 3 || !early)
            ok &= shape_step(x, u, i - 2);
        top = form_float_step(x, u, i, i > 2 || !early, top);
    }
    if (u->steps > 2) {
        store_scores(x->scores[(u->steps - 1) & 1]);
        for (int i = u->steps - 2; i < u->steps; i++)
            ok &= (i < 2 && early) || shape_step(x, u, i);
    }
    if (!ok)
        return UNIT_UNFIT;
    for (int i = (int)ca_max64(0, u->steps - 2); i < u->steps && !again; i++)
        top = v_max(top, top_of_step(x, u, i));
    return !again && too_large(top) ? UNIT_TOO_LARGE : UNIT_DONE;
}

/* Makes the weights of a row of the unit, of which there are STRIP a step. */
INLINE void weigh_any_row(int parts, float_pipe *x, const float_unit *u, const v_sixteenths *c, int row) {
    const weigher w = weigher_of(parts, x, u, row / STRIP);
    weigh_row(parts, 1, x, c, &w, row % STRIP, v_set1(0));
}

/* O (+)= P V, 32 columns at a time; beside the first ones the last two steps' weights are made. */
INLINE void float_pass(int parts, int weighs, float_pipe *x, const float_unit *u, int64_t pass) {
    const int64_t size = 2 * u->passes * parts * TILE, ld = 4 * u->o_ld;
    float *o = u->o + 32 * pass;
    int row = STRIP * (int)ca_max64(0, u->steps - 2);
    const int end = STRIP * u->steps, products = PRODUCTS(parts) * (u->steps - 2);
    const int rows = weighs && products > 0 ? (2 * STRIP + products - 1) / products : 0;
    const v_sixteenths c = load_sixteenths(u);
    for (; weighs && products <= 0 && row < end; row++)
        weigh_any_row(parts, x, u, &c, row);
#define MEANWHILE                                                                                                      \
    for (int j = 0; weighs && j < rows && row < end; j++, row++)                                                       \
        weigh_any_row(parts, x, u, &c, row);
#define STORE_AND_LOAD(t)                                                                                              \
    if (i == 0) {                                                                                                      \
        float *at = o + (t) / 2 * CA_LANES * u->o_ld + (t) % 2 * CA_LANES;                                             \
        if (pass > 0)                                                                                                  \
            tile_store(t, at - 32, ld);                                                                                \
        if (u->fresh)                                                                                                  \
            tile_zero(t);                                                                                              \
        else                                                                                                           \
            tile_load(t, at, ld);                                                                                      \
    }
    for (int i = 0; i < u->steps; i++) {
        const uint16_t *a = u->weights + (int64_t)i * 2 * parts * TILE;
        const uint16_t *b0 = u->v + i * size + 2 * pass * parts * TILE, *b1 = b0 + parts * TILE;
        PRODUCTS_OF_PARTS(STORE_AND_LOAD)
    }
#undef MEANWHILE
}

#define FLOAT_PASSES(parts)                                                                                            \
    static NOINLINE void first_pass_##parts(float_pipe *x, const float_unit *u) { float_pass(parts, 1, x, u, 0); }     \
    static NOINLINE void other_passes_##parts(float_pipe *x, const float_unit *u) {                                    \
        for (int64_t pass = 1; pass < u->passes; pass++)                                                               \
            float_pass(parts, 0, x, u, pass);                                                                          \
    }
FLOAT_PASSES(2)
FLOAT_PASSES(3)

static void add_float_values(float_pipe *x, const float_unit *u) {
    if (u->parts == 3) {
        first_pass_3(x, u);
        other_passes_3(x, u);
    } else {
        first_pass_2(x, u);
        other_passes_2(x, u);
    }
    store_sums(1, 1, u->o + 32 * (u->passes - 1), u->o_ld);
    tile_barrier();
}

/* Takes a strip through a block. Returns 0 where tiles cannot hold its logits; O may have been scaled then. */
static int run_float_unit(float_pipe *x, const float_unit *u) {
    int how = form_float_weights(x, u, 0);
    if (how == UNIT_TOO_LARGE)
        how = refer_again(x, u) ? form_float_weights(x, u, 1) : UNIT_UNFIT;
    if (how == UNIT_UNFIT)
        return 0;
    add_float_values(x, u);
    for (int r = 0; r < STRIP; r++)
        x->l[r] += v_hsum(v_load_f32(x->sums[r]));
    return 1;
}
