/* SPDX-License-Identifier: Apache-2.0
 * This is the attention of one segment of keys for float16 and float32 by tiles of bfloat16 (parts.h, float_units.h).
 * Their caches are those of avx512, whose kernels do all else: other work than attention, tasks of few rows, tasks of
 * several requests, and segments that tiles cannot hold: where a number that counts is NaN, infinite or out of the
 * range of parts, or logits are too far from 0. Which way a segment goes depends on its request alone.
 *
 * A block of K and V is packed once for all strips of a task, which takes as long as its products with 8 to 12 rows. */

#include "parts.h"
struct float_work;
#include "float_units.h"

#define PACKED_BYTES (800 << 10) /* parts of K and V of a block, which stay in L2 */
#define FLOAT_ROWS 512           /* rows of a task */

typedef struct float_work {
    tile_work tiles; /* what strips.h and units.h say about strips takes this */
    int parts;
    int64_t depth, passes; /* of 32 dimensions, of 32 columns */
    const ca_state *state;
    float_pipe *pipe;
    uint16_t *q, *k, *v, *weights;
    float *o;       /* [STRIP][32 * passes], for strips of fewer rows, and where V has other columns */
    char *group[2]; /* two groups of V, or one of K, unpacked */
    uint8_t *strips;
    int unfit; /* Has a number, or a logit, been found that tiles do not hold? */
} float_work;
enum { UNTOUCHED, QUERIES_PACKED, OPENED, CLOSED }; /* what a strip is */

/* This isa has the caches, and the kernels for all that is not for tiles. */
extern const ca_isa_row ca_isa_avx512;
static const ca_kernel *float_vectors(const ca_plan *plan) { return ca_isa_avx512.kernels[plan->shape.dtype]; }
static int parts_of(const ca_plan *plan) { return plan->shape.dtype == CA_F32 ? 3 : 2; }

/* A task of fewer rows takes less time by FMA, and so does float32 of so few columns that tiles are mostly padding
 * (MEASUREMENTS.md: AMX). */
static int64_t fewest_rows(const ca_plan *plan) {
    const int narrow = plan->shape.head_size + plan->shape.head_size_v < 32;
    return parts_of(plan) == 2 ? 32 : narrow ? INT32_MAX : 64;
}
static int may_split(const ca_plan *plan) { return plan->rows >= fewest_rows(plan); }

/* Returns how many groups of keys a block has. */
static int packed_groups(const ca_plan *plan) {
    const int64_t columns = ca_round_up(plan->shape.head_size, 32) + ca_round_up(plan->shape.head_size_v, 32);
    const int64_t fit = PACKED_BYTES / (columns * parts_of(plan) * 2 * STEP_KEYS);
    return 2 * (int)ca_max64(1, ca_min64(FLOAT_STEPS, fit));
}

static int64_t carve_float_work(float_work *w, uintptr_t base, const ca_plan *plan) {
    int64_t at = carve(&w->tiles.scratch, base, plan);
    const int64_t groups = packed_groups(plan), strips = ca_div_up(plan->rows, STRIP);
    w->parts = parts_of(plan);
    w->depth = ca_div_up(plan->shape.head_size, 32);
    w->passes = ca_div_up(plan->shape.head_size_v, 32);
    const int64_t dtype_bytes = ca_dtype_size(plan->shape.dtype);
    const int64_t group_bytes[2] = {(plan->sides[K].elements + CA_NIBBLES) * dtype_bytes,
                                    (plan->sides[V].elements + CA_NIBBLES) * dtype_bytes};
    CA_CARVE(w->pipe, sizeof *w->pipe)
    CA_CARVE(w->q, strips * 2 * w->depth * w->parts * TILE * 2)
    CA_CARVE(w->k, groups * w->depth * w->parts * TILE * 2)
    CA_CARVE(w->v, groups * w->passes * w->parts * TILE * 2)
    CA_CARVE(w->weights, groups * w->parts * TILE * 2)
    CA_CARVE(w->o, STRIP * 32 * w->passes * 4)
    CA_CARVE(w->group[0], ca_max64(group_bytes[K], group_bytes[V]))
    CA_CARVE(w->group[1], group_bytes[V])
    CA_CARVE(w->strips, strips)
    return at;
}

static int64_t float_work_bytes(const ca_plan *plan) {
    float_work unused;
    const int64_t vectors = float_vectors(plan)->engine.scratch_bytes(plan);
    return may_split(plan) ? ca_max64(vectors, carve_float_work(&unused, 0, plan)) : vectors;
}

/* ---- a block ---- */

/* Finds K or V of a group in the layout LANES, unpacked to `room` where it lies otherwise, and which keys of it are in
 * the block. */
static packing find_packing(const float_work *w, const score_block *b, const group *g, int kv, char *room) {
    const ca_plan *plan = w->tiles.plan;
    const ca_side *s = &plan->sides[kv];
    packing p = {.from = g->kv[kv].at,
                 .ld = s->head_size,
                 .keys = seen_of_group(g, b->k0, b->k1),
                 .scales = s->scaled ? g->kv[kv].scales : NULL,
                 .shared = s->shared};
    if (s->ready)
        return p;
    if (kv == V && !s->quantised) {
        p.ld = g->kv[V].ld;
        return p;
    }
    plan->kernel->unpack(s, p.from, g->kv[kv].ld, g->n, room, w->tiles.scratch.rows, p.from);
    p.from = room;
    return p;
}

INLINE extent pack_block_of(int parts, const float_work *w, const score_block *b) {
    extent e = no_extent();
    for (int i = 0; i < b->num_groups; i += 2) {
        packing v[2] = {{.keys = 0}, {.keys = 0}};
        for (int j = 0; j < 2; j++) {
            uint16_t *to = w->k + (i + j) * w->depth * parts * TILE;
            if (i + j == b->num_groups) {
                memset(to, 0, (size_t)(w->depth * parts * TILE) * 2);
                continue;
            }
            const packing k = find_packing(w, b, b->groups + i + j, K, w->group[0]);
            pack_keys(parts, &k, w->tiles.head_size, w->depth, to, &e);
        }
        for (int j = 0; j < 2 && i + j < b->num_groups; j++)
            v[j] = find_packing(w, b, b->groups + i + j, V, w->group[j]);
        pack_values(parts, v, w->tiles.head_size_v, w->passes, w->v + i * w->passes * parts * TILE, &e);
    }
    return e;
}
static NOINLINE extent pack_block_2(const float_work *w, const score_block *b) { return pack_block_of(2, w, b); }
static NOINLINE extent pack_block_3(const float_work *w, const score_block *b) { return pack_block_of(3, w, b); }

/* ---- strips ---- */

INLINE extent pack_strip_of(int parts, const float_work *w, int64_t row, int64_t rows) {
    const scratch *x = &w->tiles.scratch;
    extent e = no_extent();
    uint16_t *to = w->q + row / CA_LANES * w->depth * parts * TILE;
    for (int64_t r = row + 2 * STRIP; r < ca_min64(row + 3 * STRIP, ca_rows_of(w->tiles.plan, w->tiles.task)); r++)
        prefetch_bytes(x->query[r], w->tiles.head_size * (parts == 3 ? 4 : 2));
    if (rows < STRIP)
        memset(to, 0, (size_t)(2 * w->depth * parts * TILE) * 2);
    for (int64_t r = 0; r < rows; r++)
        pack_query(parts, x->query[row + r], w->tiles.head_size, x->q_factor, w->depth, to + r * 2 * CA_LANES, &e);
    return e;
}
static NOINLINE extent pack_strip_2(const float_work *w, int64_t row, int64_t rows) {
    return pack_strip_of(2, w, row, rows);
}
static NOINLINE extent pack_strip_3(const float_work *w, int64_t row, int64_t rows) {
    return pack_strip_of(3, w, row, rows);
}

/* Takes away what a tree mask hides of a step. */
static void hide_by_tree(const scratch *x, const strip *t, int i, uint32_t *seen) {
    for (int r = 0; r < t->rows; r++)
        for (int j = 0; j < 2 * CA_LANES && 2 * i + j / CA_LANES < t->num_groups; j++) {
            const int64_t key = t->g[2 * i + j / CA_LANES].key + j % CA_LANES;
            if (seen[r] >> j & 1 && !ca_sees(x->tree[t->row + r], x->context, key))
                seen[r] -= 1u << j;
        }
}

/* Sets which keys the rows see. */
static void see_float_keys(const float_work *w, const strip *t, int steps) {
    const scratch *x = &w->tiles.scratch;
    const edges e = edges_of(x, &(score_block){.k0 = t->k0, .k1 = t->k1}, t->row, t->rows);
    for (int i = 0; i < steps; i++) {
        uint32_t *seen = w->pipe->seen[i];
        w->pipe->masked[i] = !all_see_step(t, i, e);
        if (!w->pipe->masked[i]) {
            memset(seen, 0xff, sizeof w->pipe->seen[i]);
            continue;
        }
        see_step(&w->tiles, t, i, seen);
        if (x->tree)
            hide_by_tree(x, t, i, seen);
    }
}

/* Makes logits of a step's scores where they are more than products: softcap, ALiBi, a bias. */
static int shape_scores(const float_work *w, const strip *t, int i, float *s) {
    const scratch *x = &w->tiles.scratch;
    const ca_shape *shape = &w->tiles.plan->shape;
    const float softcap = w->tiles.call->softcap;
    vf worst = v_set1(-INFINITY), lost = v_set1(0);
    for (int r = 0; r < t->rows; r++)
        for (int j = 0; j < 2 && 2 * i + j < t->num_groups; j++) {
            const group *g = t->g + 2 * i + j;
            const int64_t row = t->row + r, lo = ca_max64(t->k0, x->lo[row]), hi = ca_min64(t->k1, x->hi[row]);
            float *at = s + r * STEP_KEYS + j * CA_LANES;
            vf y = v_mul(v_load_f32(at), v_set1(x->factor));
            if (softcap > 0)
                y = v_mul(v_set1(softcap * CA_LOG2E), v_tanh(y));
            if (x->slope[row] != 0)
                y = v_fma(v_set1(x->slope[row]), distance_bf16(shape, g->key, x->pos[row]), y);
            if (x->bias[row] && g->key < hi)
                y = v_fma(v_loadn_f32(x->bias[row] + g->key, (int)ca_min64(hi - g->key, VL)), v_set1(CA_LOG2E), y);
            y = v_keep_bits(y, seen_of_group(g, lo, hi));
            v_store(at, y);
            worst = v_max(worst, y);
            lost = v_add(lost, v_sub(v_max(y, v_set1(-1)), v_max(y, v_set1(-1)))); /* NaN where y is, or is infinite */
        }
    return v_hmax(worst) < FAR_SIXTEENTHS / 16 && v_hsum(lost) == 0;
}

/* Copies the state of a strip to and from the pipe, O only where it has not STRIP rows of whole columns. */
static int in_place_o(const float_work *w, const strip *t) {
    return t->rows == STRIP && w->tiles.head_size_v == 32 * w->passes;
}
static void load_float_state(const float_work *w, const strip *t, int fresh) {
    const int64_t dv = w->tiles.head_size_v, ld = 32 * w->passes;
    for (int r = 0; r < STRIP; r++) {
        w->pipe->m[r] = r < t->rows ? w->state->m[t->row + r] : -INFINITY;
        w->pipe->l[r] = r < t->rows ? w->state->l[t->row + r] : 0;
    }
    if (fresh || in_place_o(w, t))
        return;
    memset(w->o, 0, (size_t)(STRIP * ld) * sizeof *w->o);
    for (int r = 0; r < t->rows; r++)
        memcpy(w->o + r * ld, w->state->o + (t->row + r) * dv, (size_t)dv * sizeof *w->o);
}
static void store_float_state(const float_work *w, const strip *t) {
    const int64_t dv = w->tiles.head_size_v, ld = 32 * w->passes;
    for (int r = 0; r < t->rows; r++) {
        w->state->m[t->row + r] = w->pipe->m[r];
        w->state->l[t->row + r] = w->pipe->l[r];
        if (!in_place_o(w, t))
            memcpy(w->state->o + (t->row + r) * dv, w->o + r * ld, (size_t)dv * sizeof *w->o);
    }
}

/* Refers a strip's rows to sums of weights in [1, 2): the lifted weights would leave merges and lse less exact. */
static void close_strip(const float_work *w, int64_t row, int64_t rows) {
    const int64_t dv = w->tiles.head_size_v;
    for (int64_t r = row; r < row + rows; r++) {
        int octaves;
        if (!(w->state->l[r] > 0))
            continue;
        frexpf(w->state->l[r], &octaves);
        const float by = exp2_one((float)(1 - octaves));
        w->state->m[r] += (float)(octaves - 1);
        w->state->l[r] *= by;
        scale_row(w->state->o + r * dv, dv, by);
    }
}

/* Takes a strip through a block. */
static void add_float_strip(float_work *w, const score_block *b, const strip *t) {
    const scratch *x = &w->tiles.scratch;
    uint8_t *is = w->strips + t->number;
    const int shaped =
        w->tiles.call->softcap > 0 || w->tiles.call->alibi_slopes || w->tiles.call->attn_bias || x->factor == 0;
    if (*is == UNTOUCHED) {
        const extent e = (w->parts == 3 ? pack_strip_3 : pack_strip_2)(w, t->row, t->rows);
        w->unfit |= !tiles_hold(e);
        *is = QUERIES_PACKED;
    }
    const int64_t first = t->g - b->groups, dv = w->tiles.head_size_v;
    const float_unit u = {.parts = w->parts,
                          .steps = (t->num_groups + 1) / 2,
                          .rows = t->rows,
                          .fresh = *is < OPENED,
                          .depth = w->depth,
                          .passes = w->passes,
                          .q = w->q + t->row / CA_LANES * w->depth * w->parts * TILE,
                          .k = w->k + first * w->depth * w->parts * TILE,
                          .v = w->v + first * w->passes * w->parts * TILE,
                          .weights = w->weights,
                          .o = in_place_o(w, t) ? w->state->o + t->row * dv : w->o,
                          .o_ld = 32 * w->passes,
                          .scale = shaped ? 16 : 16 * x->factor,
                          .shape = shaped ? shape_scores : NULL,
                          .work = w,
                          .strip = t};
    load_float_state(w, t, u.fresh);
    see_float_keys(w, t, u.steps);
    w->unfit = w->unfit || !run_float_unit(w->pipe, &u);
    store_float_state(w, t);
    *is = OPENED;
    if (x->hi[t->row + t->rows - 1] <= b->k1) {
        close_strip(w, t->row, t->rows);
        *is = CLOSED;
    }
}

static int begin_float_block(void *segment, score_block *b) {
    (void)segment;
    (void)b;
    return 0;
}

static void attend_float_block(void *segment, const score_block *b, int h) {
    float_work *w = segment;
    const int64_t rows = ca_rows_of(w->tiles.plan, w->tiles.task);
    (void)h; /* a task of so many rows has one kv head */
    if (w->unfit)
        return;
    w->unfit = !tiles_hold((w->parts == 3 ? pack_block_3 : pack_block_2)(w, b));
    w->tiles.regular = whole(b->groups, b->num_groups) &&
                       b->groups[b->num_groups - 1].key - b->groups->key == (b->num_groups - 1) * CA_LANES;
    shape_tiles(&w->tiles.sizes, STRIP, DEPTH, CA_LANES);
    for (int64_t r = 0; r < rows && !w->unfit; r += STRIP) {
        const strip t = make_strip(&w->tiles, b, r);
        if (t.num_groups > 0)
            add_float_strip(w, b, &t);
    }
}

/* Computes a segment by tiles. Returns 0 where they cannot hold it. */
static int attend_by_parts(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                           int64_t k1, const ca_state *state, void *memory) {
    const int64_t rows = ca_rows_of(plan, task), dv = plan->shape.head_size_v;
    float_work w = {
        .tiles = {.plan = plan, .call = call, .task = task, .head_size = plan->shape.head_size, .head_size_v = dv},
        .state = state};
    carve_float_work(&w, (uintptr_t)memory, plan);
    w.tiles.scratch.integers = 0;
    load_rows_bf16(plan, call, task, kv_head, 1, &w.tiles.scratch);
    if (!(w.tiles.scratch.factor < 0x1p50f))
        return 0;
    memset(w.strips, UNTOUCHED, (size_t)ca_div_up(rows, STRIP));
    ca_open(state, rows);
    const block_walk walk = {.plan = plan,
                             .call = call,
                             .task = task,
                             .kv_head = kv_head,
                             .num_heads = 1,
                             .max_groups = packed_groups(plan),
                             .k0 = k0,
                             .k1 = k1,
                             .listed_end = k1};
    walk_blocks(&walk, &w.tiles.scratch, begin_float_block, attend_float_block, &w);
    tile_release();
    for (int64_t r = 0; r < rows && !w.unfit; r += STRIP) {
        const int64_t n = ca_min64(STRIP, rows - r);
        if (w.strips[r / STRIP] == OPENED)
            close_strip(&w, r, n);
        else if (w.strips[r / STRIP] != CLOSED)
            memset(state->o + r * dv, 0, (size_t)(n * dv) * sizeof *state->o);
    }
    return !w.unfit;
}

static int float_segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                         int64_t k0, int64_t k1, const ca_state *states, void *memory) {
    const int64_t rows = ca_rows_of(plan, task);
    if (rows >= fewest_rows(plan) && num_heads == 1 && !task->shared &&
        attend_by_parts(plan, call, task, kv_head, k0, k1, states, memory))
        return 0;
    for (int h = 0; h < num_heads; h++)
        ca_clear(states + h, rows, plan->shape.head_size_v);
    return float_vectors(plan)->engine.segment(plan, call, task, kv_head, num_heads, k0, k1, states, memory);
}

/* choose.c takes the rest from avx512's kernels. */
static const ca_kernel kernel_amx_float = {
    .info = {.rows = FLOAT_ROWS, .method = TILE_METHOD ", numbers in two or three parts"},
    .engine = {.scratch_bytes = float_work_bytes, .segment = float_segment, .together = 1, .opens = 1},
};
