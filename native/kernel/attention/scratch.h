/* SPDX-License-Identifier: Apache-2.0
 * The memory of one thread's segment and what its query rows see of a score block, for every dtype. Parameters:
 * parameters.h. */
#ifndef CPU_ATTN_SCRATCH_H
#define CPU_ATTN_SCRATCH_H
#include "prefetch.h"

/* Integers that share a unit (integers.h); what their sums begin with, which is not in the query; the scales of keys
 * from which on they count. */
typedef struct unit {
    float one;
    int32_t start;
    float from;
} unit;
#define INTEGERS_WIDTH(head_size) (2 * ca_round_up(head_size, 8)) /* with what is left of a row when it is rounded */

/* Per query row: where it may look and how. What differs between kv heads that go together starts with the one at hand.
 */
typedef struct scratch {
    const void **query;   /* [heads][rows] as they are given */
    void *q;              /* [heads][rows][head_size], as the products like it */
    int64_t q_bytes;      /* of one of these */
    int integers;         /* are they integers? */
    unit *units;          /* [heads][rows][q_units] of them, then */
    int64_t q_units;      /* for every 32 dimensions 2 */
    float *from;          /* [q_units / 2] the least of all rows' and heads' */
    float q_factor;       /* of what is given, in q */
    float factor;         /* of the scores that they give: the scale, where it is not in q */
    float octaves;        /* a logit, in units of log2, is at most so many times a score */
    int64_t *lo, *hi;     /* [rows] keys visible */
    float *slope;         /* [heads][rows] ALiBi, in units of log2 */
    int64_t *pos;         /* [rows] position of the query among the keys */
    const float **bias;   /* [heads][rows] ca_bias_row */
    float *s;             /* [TALL][S_STRIDE] scores, then weights */
    float *p[2];          /* [TALL][S_STRIDE] weights times the scales of some columns of V, and of the next */
    float *sums;          /* [TALL][head_size_v] of SUM_GROUPS groups */
    char *unpacked[2];    /* [MAX_GROUPS] of K, of V: what has to be unpacked */
    void *rows;           /* of one group, before: ca_rows_bytes, or staged_bytes */
    group *groups[4];     /* [MAX_GROUPS] of this score block, the next one, this one unpacked, and the next head */
    char *copies[2];      /* copies_bytes, of the first two of these: copy_groups */
    const uint8_t **tree; /* [rows] of a tree mask: ca_tree_row; else NULL */
    int64_t context;
} scratch;

/* Is K, or V, multiplied as integers.h does? */
static inline int by_integers(const ca_plan *p, int kv) {
    const int *integers = p->kernel->integers;
    const int dtype = ca_kv_dtype(&p->shape, kv);
    return integers && *integers && ca_is_scaled(dtype) && (kv == K || p->shape.head_size_v % CA_LANES == 0);
}
/* Can the products read it in the cache? */
static inline int in_place(const ca_plan *p, int kv) { return ca_side_ready(p, kv) || by_integers(p, kv); }

/* Bytes of a group, unpacked; 0: it never is, as rows of V are not where they lie as LANES has them. */
static inline int64_t unpacked_bytes(const ca_plan *p, int kv) {
    const int as_lanes = kv == V && p->kernel->info.layout == CA_LAYOUT_LANES && !ca_is_narrow(p->shape.v_dtype);
    return as_lanes || in_place(p, kv) ? 0 : ca_kv_form(p, kv).elements * ca_dtype_size(p->shape.dtype);
}
/* Bytes of a group as it meets the products, if that is not in the cache: unpacked, or bytes of int8 of what is
 * shorter; 0: it does. */
static inline int feeds_bytes(feed feed) { return feed == AS_INTEGERS || feed == IN_REGISTERS; }
static inline int64_t fed_bytes(const ca_plan *p, feed feed, int kv) {
    if (feeds_bytes(feed))
        return ca_is_short_int8(ca_kv_dtype(&p->shape, kv)) ? ca_kv_form(p, kv).elements : 0;
    return feed == ROWS_IN_PLACE ? 0 : unpacked_bytes(p, kv);
}

/* Bytes of a group whose elements are packed, one for each. */
static inline int64_t staged_bytes(const ca_plan *p) {
    return ca_max64(ca_is_packed(p->shape.k_dtype) ? ca_kv_form(p, K).elements : 0,
                    ca_is_packed(p->shape.v_dtype) ? ca_kv_form(p, V).elements : 0);
}

/* BLOCK_KEYS rows of K, then of V, of a plain cache. */
static inline int64_t copies_bytes(const ca_plan *p) {
    return is_plain(p) ? BLOCK_KEYS * ca_token_bytes(&p->shape) : 0;
}

static inline int64_t carve(scratch *x, uintptr_t base, const ca_plan *plan) {
    const ca_group_form v = ca_kv_form(plan, V);
    int64_t at = 0, rows = plan->rows, head_size = plan->shape.head_size;
    const int64_t all = ca_max64(rows, plan->heads_together * plan->few_rows);
#define TAKE(field, count)                                                                                             \
    x->field = (void *)(base + (uintptr_t)at);                                                                         \
    at = ca_round_up(at + (count), 64);
    TAKE(s, TALL * S_STRIDE * 4)
    TAKE(query, all * (int64_t)sizeof *x->query)
    TAKE(q, all * ca_max64(ca_round_up(head_size, 2) * 4, INTEGERS_WIDTH(head_size) * 2))
    x->q_units = by_integers(plan, K) ? ca_div_up(head_size, 32) * 2 : 0;
    TAKE(units, all * x->q_units * (int64_t)sizeof *x->units)
    TAKE(from, x->q_units / 2 * (int64_t)sizeof *x->from)
    TAKE(lo, rows * 8)
    TAKE(hi, rows * 8)
    TAKE(slope, all * 4)
    TAKE(pos, rows * 8)
    TAKE(bias, all * (int64_t)sizeof *x->bias)
    TAKE(p[0], v.scales ? TALL * S_STRIDE * 4 : 0)
    TAKE(p[1], v.scales ? TALL * S_STRIDE * 4 : 0)
    TAKE(sums, NG < SUM_GROUPS ? TALL * plan->shape.head_size_v * 4 : 0)
    TAKE(unpacked[K], MAX_GROUPS * ca_max64(unpacked_bytes(plan, K), fed_bytes(plan, AS_INTEGERS, K)))
    TAKE(unpacked[V], MAX_GROUPS * ca_max64(unpacked_bytes(plan, V), fed_bytes(plan, AS_INTEGERS, V)))
    TAKE(rows, ca_max64(ca_rows_bytes(plan), staged_bytes(plan)))
    for (int i = 0; i < 4; i++) {
        TAKE(groups[i], MAX_GROUPS * (int64_t)sizeof(group))
    }
    TAKE(copies[0], copies_bytes(plan))
    TAKE(copies[1], copies_bytes(plan))
    TAKE(tree, plan->tree ? rows * (int64_t)sizeof *x->tree : 0)
#undef TAKE
    if (!plan->tree)
        x->tree = NULL;
    return at;
}

/* A segment at work: the plan and the call, its scratch, the score block at hand and what is fetched meanwhile. */
typedef struct work {
    const ca_plan *plan;
    const ca_call *call;
    scratch x;
    score_block b;
    prefetch f;
} work;

/* The rows of a task, and of its tiles; two: there are two, which share what is asked for (MEASUREMENTS.md: two tiles).
 */
typedef struct tiling {
    int64_t rows, tall;
    int two;
} tiling;

static inline int64_t scratch_bytes(const ca_plan *plan) {
    scratch unused;
    return carve(&unused, 0, plan);
}

/* Of the keys of a score block, those that some of the rows see, [lo, hi), and those that all of them do. */
typedef struct edges {
    int64_t lo, all_lo, all_hi, hi;
} edges;

INLINE edges edges_of(const scratch *x, const score_block *b, int64_t row, int64_t rows) {
    int64_t last = row + rows - 1;
    edges e = {x->lo[row], x->lo[last], x->hi[row], x->hi[last]};
    for (int64_t r = row; x->tree && r <= last; r++) {
        e.lo = ca_min64(e.lo, x->lo[r]);
        e.all_lo = ca_max64(e.all_lo, x->lo[r]);
        e.all_hi = ca_min64(e.all_hi, x->context);
    }
    return (edges){ca_max64(b->k0, e.lo), ca_max64(b->k0, e.all_lo), ca_min64(b->k1, e.all_hi), ca_min64(b->k1, e.hi)};
}

/* Does every one of these rows see all of a block, which is whole? */
static inline int sees_all(const scratch *x, const score_block *b, int64_t rows) {
    if (b->num_groups == 0 || !whole(b->groups, b->num_groups))
        return 0;
    const edges e = edges_of(x, b, 0, rows);
    return e.all_lo <= b->groups->key && e.all_hi >= b->groups[b->num_groups - 1].key + CA_LANES;
}

/* The scores x of a group's keys from one of its lanes on: -inf in place of those outside [lo, hi), whatever they are.
 */
INLINE vf keep_seen(vf x, const group *g, int lane, int64_t lo, int64_t hi) {
    const int64_t key = g->key + lane, first = ca_max64(lo - key, 0), end = ca_min64(hi - key, g->n - lane);
    return v_keep(x, (int)ca_min64(first, VL), (int)ca_min64(ca_max64(end, 0), VL));
}

/* -inf to the scores of a row's keys outside [lo, hi), group by group where some are. */
INLINE void hide_unseen(float *s, const group *g, int num_groups, int64_t lo, int64_t hi) {
    for (int i = 0; i < num_groups; i++, s += CA_LANES)
        if (g[i].key < lo || g[i].key + CA_LANES > hi || g[i].n < CA_LANES)
            for (int lane = 0; lane < CA_LANES; lane += VL)
                v_store(s + lane, keep_seen(v_load_f32(s + lane), g + i, lane, lo, hi));
}

/* -inf to the scores of what a row of a tree mask does not see. */
INLINE void mask_tree(const scratch *x, int64_t row, const group *g, int num_groups, float *s) {
    for (int i = 0; x->tree && i < num_groups; i++)
        ca_hide(x->tree[row], x->context, g[i].key, ca_min64(g[i].n, x->hi[row] - g[i].key), s + i * CA_LANES);
}
#endif
