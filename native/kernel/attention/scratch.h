/* SPDX-License-Identifier: Apache-2.0
 * This file lays out the memory of a thread that computes a segment, and says what query rows see of a score block, for
 * every dtype. It takes parameters.h. */
#ifndef CPU_ATTN_SCRATCH_H
#define CPU_ATTN_SCRATCH_H
#include "prefetch.h"

/* Describes integers that share a unit (integers.h). */
typedef struct unit {
    float step;    /* the value of the integer 1 */
    int32_t start; /* what their sums of products begin with, as a format's zero point asks for */
    float from;    /* They count for keys whose scale is larger than this. */
} unit;
#define INTEGERS_WIDTH(head_size) (2 * ca_round_up(head_size, 8)) /* a row's integers, then those of its errors */

/* Holds what each query row sees and how, and room for what is computed. Arrays [heads] start with the kv head at hand.
 */
typedef struct scratch {
    const void **query; /* [heads][rows] as they are given */
    void *q;            /* [heads][rows][head_size], as the products take it */
    int64_t q_bytes;    /* bytes of a row of q */
    int integers;       /* Does q hold integers? */
    unit *units;        /* [heads][rows][q_units], if it does */
    int64_t q_units;    /* 2 for every 32 dimensions, or 0 */
    float *from;        /* [q_units / 2] the least `from` of all rows and heads */
    float q_factor;     /* what a query is multiplied by when it becomes q */
    float factor;       /* what scores are then still to be multiplied by */
    float octaves;      /* A logit, in units of log2, is at most so many times a score. */
    int64_t *lo, *hi;   /* [rows] keys visible */
    float *slope;       /* [heads][rows] ALiBi, in units of log2 */
    int64_t *pos;       /* [rows] position of the query among the keys */
    const float **bias; /* [heads][rows] ca_bias_row */
    float *s;           /* [TALL][S_STRIDE] scores, then weights */
    float *p[2];        /* [TALL][S_STRIDE] weights times the scales of some columns of V, and of the next columns */
    float *sums;        /* [TALL][head_size_v] sums over SUM_GROUPS groups */
    char *unpacked[2];  /* [MAX_GROUPS] groups of K, and of V, that had to be unpacked */
    void *rows;       /* rows of one group before it is packed (ca_rows_bytes), or its bytes (ca_side's staged_bytes) */
    group *groups[4]; /* [MAX_GROUPS] of this score block, of the next one, of this one unpacked, of the next head */
    char *copies[2];  /* copied rows of the first two of these (copy_groups), copies_bytes each */
    const uint8_t **tree; /* [rows] ca_tree_row; NULL: there is no tree mask */
    int64_t context;      /* ca_context_keys: keys before those that a tree mask covers */
} scratch;

/* Do the products take bytes of the cache, not elements of the query's dtype? */
static inline int reads_bytes(operand_source source) { return source == AS_INTEGERS || source == IN_REGISTERS; }
/* Returns the bytes of scratch that a group needs before the products: for the unpacked group, or for bytes of int8
 * made of shorter integers. They are 0 where the products read the cache. */
static inline int64_t group_scratch_bytes(const ca_side *s, operand_source source) {
    return reads_bytes(source) ? s->int8_bytes : source == ROWS_IN_PLACE ? 0 : s->unpacked_bytes;
}

/* Returns the bytes of BLOCK_KEYS rows of K, and of V, in a plain cache. */
static inline int64_t copies_bytes(const ca_plan *p) { return ca_is_plain(p) ? BLOCK_KEYS * ca_token_bytes(p) : 0; }

static inline int64_t carve(scratch *x, uintptr_t base, const ca_plan *plan) {
    const ca_side *k = &plan->sides[K], *v = &plan->sides[V];
    int64_t at = 0, rows = plan->rows, head_size = plan->shape.head_size;
    const int64_t all = ca_max64(rows, plan->heads_together * plan->few_rows);
    CA_CARVE(x->s, TALL * S_STRIDE * 4)
    CA_CARVE(x->query, all * (int64_t)sizeof *x->query)
    CA_CARVE(x->q, all * ca_max64(ca_round_up(head_size, 2) * 4, INTEGERS_WIDTH(head_size) * 2))
    x->q_units = k->integers ? ca_div_up(head_size, 32) * 2 : 0;
    CA_CARVE(x->units, all * x->q_units * (int64_t)sizeof *x->units)
    CA_CARVE(x->from, x->q_units / 2 * (int64_t)sizeof *x->from)
    CA_CARVE(x->lo, rows * 8)
    CA_CARVE(x->hi, rows * 8)
    CA_CARVE(x->slope, all * 4)
    CA_CARVE(x->pos, rows * 8)
    CA_CARVE(x->bias, all * (int64_t)sizeof *x->bias)
    CA_CARVE(x->p[0], v->scales ? TALL * S_STRIDE * 4 : 0)
    CA_CARVE(x->p[1], v->scales ? TALL * S_STRIDE * 4 : 0)
    CA_CARVE(x->sums, NG < SUM_GROUPS ? TALL * plan->shape.head_size_v * 4 : 0)
    CA_CARVE(x->unpacked[K], MAX_GROUPS * ca_max64(k->unpacked_bytes, k->int8_bytes))
    CA_CARVE(x->unpacked[V], MAX_GROUPS * ca_max64(v->unpacked_bytes, v->int8_bytes))
    CA_CARVE(x->rows, ca_max64(ca_rows_bytes(plan), ca_max64(k->staged_bytes, v->staged_bytes)))
    for (int i = 0; i < 4; i++) {
        CA_CARVE(x->groups[i], MAX_GROUPS * (int64_t)sizeof(group))
    }
    CA_CARVE(x->copies[0], copies_bytes(plan))
    CA_CARVE(x->copies[1], copies_bytes(plan))
    CA_CARVE(x->tree, plan->tree ? rows * (int64_t)sizeof *x->tree : 0)
    if (!plan->tree)
        x->tree = NULL;
    return at;
}

/* Holds the number of rows of a task and of its tiles. two: there are two tiles, which share the prefetching
 * (MEASUREMENTS.md: two tiles). */
typedef struct tiling {
    int64_t rows, tall;
    int two;
} tiling;

/* Holds a segment that is being computed: plan and call, scratch, the score block at hand, and what is prefetched. */
typedef struct segment_work {
    const ca_plan *plan;
    const ca_call *call;
    scratch scratch;
    score_block block;
    prefetch prefetch;
    tiling tiling;
    int together;           /* kv heads that go through the keys together over an NHD cache, or 0 */
    int unpacks;            /* Are groups of the block unpacked before its first tile? */
    const ca_state *states; /* [heads], of attention */
} segment_work;

/* Holds an indexer's scores that are being computed. */
typedef struct token_work {
    segment_work segment;
    int32_t num_tokens;
    const float *weights; /* [num_tokens][rows of a token] */
    float *scores;        /* [num_tokens], stride apart */
    int64_t stride;
} token_work;

static inline int64_t scratch_bytes(const ca_plan *plan) {
    scratch unused;
    return carve(&unused, 0, plan);
}

/* Names the keys of a score block that some of the rows see, [lo, hi), and that all of them see, [all_lo, all_hi). */
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

/* Does every one of these rows see all keys of a block whose groups are all full? */
static inline int sees_all(const scratch *x, const score_block *b, int64_t rows) {
    if (b->num_groups == 0 || !whole(b->groups, b->num_groups))
        return 0;
    const edges e = edges_of(x, b, 0, rows);
    return e.all_lo <= b->groups->key && e.all_hi >= b->groups[b->num_groups - 1].key + CA_LANES;
}

/* Says whose scores some rows have: those of the keys [k0, k1) of these groups. masked: a row may see less. */
typedef struct scored_keys {
    const group *g;
    int num_groups, masked;
    int64_t k0, k1;
} scored_keys;

/* x holds the scores of a group's keys from one of its lanes on. Those of keys outside [lo, hi) become -inf, whatever
 * they are. */
INLINE vf keep_seen(vf x, const group *g, int lane, int64_t lo, int64_t hi) {
    const int64_t key = g->key + lane, first = ca_max64(lo - key, 0), end = ca_min64(hi - key, g->n - lane);
    return v_keep(x, (int)ca_min64(first, VL), (int)ca_min64(ca_max64(end, 0), VL));
}

/* Sets the scores of a row's keys outside [lo, hi) to -inf, in the groups that have such keys. */
INLINE void hide_unseen(float *s, const group *g, int num_groups, int64_t lo, int64_t hi) {
    for (int i = 0; i < num_groups; i++, s += CA_LANES)
        if (g[i].key < lo || g[i].key + CA_LANES > hi || g[i].n < CA_LANES)
            for (int lane = 0; lane < CA_LANES; lane += VL)
                v_store(s + lane, keep_seen(v_load_f32(s + lane), g + i, lane, lo, hi));
}

/* Sets the scores of keys that a row of a tree mask does not see to -inf. */
INLINE void mask_tree(const scratch *x, int64_t row, const group *g, int num_groups, float *s) {
    for (int i = 0; x->tree && i < num_groups; i++)
        ca_hide(x->tree[row], x->context, g[i].key, ca_min64(g[i].n, x->hi[row] - g[i].key), s + i * CA_LANES);
}
#endif
