/* SPDX-License-Identifier: Apache-2.0
 * The softmax state, the per-thread scratch and what a row sees of a score block: the same for every dtype. The
 * including file has defined its vocabulary (vocabulary.md) and
 *   MR    query rows of a register tile           NG  K groups (of 16 keys) of a register tile
 *   NDV   vectors of V columns of a register tile ROWS, KEYS  block sizes of a work item
 *   TALL  MR, or more: a task of so few rows is one tile of half the columns
 *   FEW_KEYS  instead of KEYS for up to CA_FEW_ROWS rows of a request (decode)
 *   NHD_KEYS, NHD_BYTES  over NHD caches: of kernel.h, FEW_KEYS and 256 KiB unless said
 *   AHEAD     how many steps of NG groups ahead memory is asked for, 2 unless said; NARROW_AHEAD: over narrow caches;
 *             INTEGERS_AHEAD: of what integers.inc multiplies, where there is less to do for every line, 3 unless said
 *   PACED_ROWS  up to how many rows the products wait for what they read before they ask for more (products.inc), 0
 *             unless said
 *   SUM_GROUPS  so many groups of P V are summed up by themselves where the dtype is float32, 4 unless said: of V that
 *             is one number, whose products are alike and rounded to the same side, one sum of 1024 keys comes to 4
 *             times the error budget, sums of 64 to 0.4
 *   ASK_HALF  whether the hardware fetches the second half of a page whose first half is asked for
 *   INTEGERS  address of an int: do int8 and int4 caches of 16-bit dtypes go through integers.inc?
 * Tested: MR 2..8, NG 1, 3 and 4, NDV 2, 3 and 4, VL 1, 4, 8 and 16. */
#include "kernel/kernel.h"
#include "plan/keys.h"
#include "kernel/simd/math.h"
#include "kernel/cache_write/rotary.h"

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)
#define NAME(x) GLUE(x, DTYPE)

#ifndef NHD_KEYS
#define NHD_KEYS FEW_KEYS
#endif
#ifndef NHD_BYTES
#define NHD_BYTES (256 << 10)
#endif
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef NARROW_AHEAD
#define NARROW_AHEAD 2
#endif
#ifndef INTEGERS_AHEAD
#define INTEGERS_AHEAD 3
#endif
#ifndef PACED_ROWS
#define PACED_ROWS 0
#endif
#ifndef SUM_GROUPS
#define SUM_GROUPS 4
#endif
#ifdef ASK_HALF
#define MAY_ASK_HALF 1
#else
#define MAY_ASK_HALF 0
#define ASK_HALF 0
#endif
#define MAX_GROUPS (KEYS / CA_LANES)
/* One chain over 576 dimensions came to 0.93 of float32's error budget (worst of 1200 random requests). */
#define CHAIN 128
/* Of so few rows a step of the scores waits for the one before it, whether it is one of NG groups or of one: the last
 * two or three are as good as NG. Zen 4, two threads, in turns: 64 requests of 17 to 125 keys 0.84 to 0.89 of the time,
 * 32 of 300 to 800, a kv head for every query head, 0.96. */
#define WAITING_ROWS 4

#define WEIGHED 4               /* rows whose scores become weights together */
#define S_STRIDE (KEYS + 16)    /* not a power of two: rows of S in different cache sets */
#define NV (NG * CA_LANES / VL) /* vectors of scores of a register tile */

/* How K or V reach the products: as these read them; narrow, a ca_dtype; or as rows of a plain cache. */
#define NATIVE 0
#define PLAIN CA_CACHE_DTYPES
#define PLAIN_BYTES (PLAIN + 1) /* and a ca_dtype more: rows of fp8 */
/* Bytes of n elements. */
#define BYTES_OF(kind, n)                                                                                              \
    ((kind) == CA_I4 ? (n) / 2 : (kind) == NATIVE || (kind) == PLAIN ? (n) * (int64_t)sizeof(ELEM) : (n))

enum { BOTH, EVEN, ODD }; /* of a pair of dimensions or of keys, those that count */

/* Up to 16 keys that lie together: lanes [0, n) are keys key, key + 1, ... Scales: [scales][16] bfloat16, at any
 * address. */
typedef struct group {
    const char *k, *v;
    const char *k_scales, *v_scales;
    int64_t key, k_ld, v_ld; /* k_ld, v_ld: from a token of rows to the next one */
    int32_t n;
    int32_t last; /* of SUM_GROUPS */
} group;

/* What the products ask for takes 1/2^narrower of the bytes that they read. half_of: of so many bytes at a multiple of
 * as many, a power of two, they ask for the first half; 0: for all. */
typedef struct asking {
    int narrower;
    unsigned half_of;
} asking;
#define PAGE 4096

/* A score block: those of the keys [k0, k1) that count lie in its groups. `next` are the groups after it, of keys or of
 * heads, to be fetched meanwhile. */
typedef struct block {
    int64_t k0, k1;
    int k_kind, v_kind; /* NATIVE, or what stays as it lies until the products */
    int passing;        /* what has to be unpacked is unpacked for the products at hand, not all at once */
    int v_rows;         /* V is read as rows where they are */
    int fetched;        /* what comes next is, while this is unpacked: the products need not */
    int together;       /* kv heads that fetch for one another, or 0 */
    int far;            /* is what the products fetch a block ahead? */
    int ahead;          /* else how many steps of NG groups */
    int half;           /* of two tiles that share what is asked for: the first, 1, or the second; 0: the first asks */
    int64_t k_scales, v_scales; /* of a token */
    asking k_next, v_next;      /* how what comes next is asked for */
    group *groups, *next;
    int num_groups, num_next;
} block;

/* What the products ask for while they run: the groups that come next. */
typedef struct ahead {
    const char *at[NG];
    asking how;
} ahead;

static block next_block(const block *b, int64_t end) {
    return (block){.k0 = b->k1,
                   .k1 = end,
                   .ahead = b->ahead,
                   .k_scales = b->k_scales,
                   .v_scales = b->v_scales,
                   .k_next = b->k_next,
                   .v_next = b->v_next,
                   .groups = b->next,
                   .next = b->groups,
                   .num_groups = b->num_next};
}

/* Integers that share a unit; what sums begin with, which is not in the query; the scales of keys from which on they
 * count (integers.inc). */
typedef struct chain {
    float unit;
    int32_t start;
    float from;
} chain;
#define INTEGERS_WIDTH(head_size) (2 * ca_round_up(head_size, 8)) /* with what is left of a row when it is rounded */

/* What a segment needs besides the state. Per query row: where it may look and how. What differs between kv heads that
 * go together starts with the one at hand. */
typedef struct scratch {
    int64_t *token;       /* [rows] of the query */
    int32_t *head;        /* [heads][rows] */
    void *q;              /* [heads][rows][head_size], as the products like it */
    int64_t q_bytes;      /* of one of these */
    int integers;         /* are they integers? */
    chain *chains;        /* [heads][rows][q_chains] of them, then */
    int64_t q_chains;     /* for every 32 dimensions 2 */
    float *from;          /* [q_chains / 2] the least of all rows' and heads' */
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
    char *wide;           /* [MAX_GROUPS] K, then V, what has to be unpacked of them */
    void *rows;           /* of one group, before: ca_rows_bytes, or of int4 */
    group *groups[4];     /* [MAX_GROUPS] of this score block, the next one, this one unpacked, and the next head */
    char *copies[2];      /* copies_bytes, of the first two of these: copy_groups */
    const uint8_t **tree; /* [rows] of a tree mask: ca_tree_row; else NULL */
    int64_t context;
} scratch;

/* Is K, or V, multiplied as integers.inc does? */
static int by_integers(const ca_plan *p, int value) {
    const int *integers = p->kernel->integers;
    return integers && *integers && ca_is_scaled(ca_kv_dtype(&p->shape, value)) &&
           (!value || p->shape.head_size_v % CA_LANES == 0);
}
static int as_it_lies(const ca_plan *p, int value) { return ca_side_ready(p, value) || by_integers(p, value); }
/* Bytes of one, unpacked; 0: it is read as it lies, as rows of V are where they are as LANES has them. */
static int64_t wide_bytes(const ca_plan *p, int value) {
    int as_lanes = value && p->kernel->info.layout == CA_LAYOUT_LANES && !ca_is_narrow(p->shape.v_dtype);
    const ca_group_form f = ca_kv_form(p, value);
    return as_lanes || as_it_lies(p, value) ? 0 : f.elements * ca_dtype_size(p->shape.dtype);
}

/* Bytes of a group of int4, one for each element. */
static int64_t nibbles_bytes(const ca_plan *p) {
    return ca_max64(p->shape.k_dtype == CA_I4 ? ca_kv_form(p, 0).elements : 0,
                    p->shape.v_dtype == CA_I4 ? ca_kv_form(p, 1).elements : 0);
}

/* KEYS rows of K, then of V, of a plain cache. */
static int64_t copies_bytes(const ca_plan *p) {
    return p->shape.kv_cache_layout == CA_PACKED ? 0 : KEYS * ca_token_bytes(&p->shape);
}

static int64_t carve(scratch *x, uintptr_t base, const ca_plan *plan) {
    const ca_group_form v = ca_kv_form(plan, 1);
    int64_t at = 0, rows = plan->rows, head_size = plan->shape.head_size;
    const int64_t all = ca_max64(rows, plan->heads_together * plan->few_rows);
#define TAKE(field, count)                                                                                             \
    x->field = (void *)(base + (uintptr_t)at);                                                                         \
    at = ca_round_up(at + (count), 64);
    TAKE(s, TALL * S_STRIDE * 4)
    TAKE(token, rows * 8)
    TAKE(head, all * 4)
    TAKE(q, all * ca_max64(ca_round_up(head_size, 2) * 4, INTEGERS_WIDTH(head_size) * 2))
    x->q_chains = by_integers(plan, 0) ? ca_div_up(head_size, 32) * 2 : 0;
    TAKE(chains, all * x->q_chains * (int64_t)sizeof *x->chains)
    TAKE(from, x->q_chains / 2 * (int64_t)sizeof *x->from)
    TAKE(lo, rows * 8)
    TAKE(hi, rows * 8)
    TAKE(slope, all * 4)
    TAKE(pos, rows * 8)
    TAKE(bias, all * (int64_t)sizeof *x->bias)
    TAKE(p[0], v.scales ? TALL * S_STRIDE * 4 : 0)
    TAKE(p[1], v.scales ? TALL * S_STRIDE * 4 : 0)
    TAKE(sums, NG < SUM_GROUPS ? TALL * plan->shape.head_size_v * 4 : 0)
    TAKE(wide, MAX_GROUPS * (wide_bytes(plan, 0) + wide_bytes(plan, 1)))
    TAKE(rows, ca_max64(ca_rows_bytes(plan), nibbles_bytes(plan)))
    TAKE(groups[0], MAX_GROUPS * (int64_t)sizeof(group))
    TAKE(groups[1], MAX_GROUPS * (int64_t)sizeof(group))
    TAKE(groups[2], MAX_GROUPS * (int64_t)sizeof(group))
    TAKE(groups[3], MAX_GROUPS * (int64_t)sizeof(group))
    TAKE(copies[0], copies_bytes(plan))
    TAKE(copies[1], copies_bytes(plan))
    TAKE(tree, plan->tree ? rows * (int64_t)sizeof *x->tree : 0)
#undef TAKE
    if (!plan->tree)
        x->tree = NULL;
    return at;
}

/* Of as many bytes as halves.h makes of K or V, 1/2^n lie in the cache. */
INLINE int narrower(int dtype) { return dtype == CA_I4 ? 2 : ca_is_narrow(dtype); }

static int64_t scratch_bytes(const ca_plan *plan) {
    scratch unused;
    return carve(&unused, 0, plan);
}

INLINE void scale_row(float *o, int64_t n, float factor) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(o + i, v_mul(v_load_f32(o + i), v_set1(factor)));
    if (i < n)
        v_storen_f32(o + i, v_mul(v_loadn_f32(o + i, (int)(n - i)), v_set1(factor)), (int)(n - i));
}

INLINE void add_row(float *o, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(o + i, v_add(v_load_f32(o + i), v_load_f32(x + i)));
    if (i < n)
        v_storen_f32(o + i, v_add(v_loadn_f32(o + i, (int)(n - i)), v_loadn_f32(x + i, (int)(n - i))), (int)(n - i));
}

/* -inf - -inf would be NaN: rows that have seen nothing refer to 0. */
INLINE float reference(float m) { return m == -INFINITY ? 0 : m; }

/* A score times a factor is up to half a unit of its last place more or less than the same product as a reference,
 * rounded; that is an exponent. Where the unit may be above 2^-4, or the factor has no room to grow, rows are referred
 * with each step rounded. */
INLINE int is_far(float m, float factor) { return !(fabsf(m) < 0x1p20f && factor < 0x1p100f); }
INLINE void refer_row(float *s, int64_t n, float factor, float to) {
    scale_row(s, n, factor);
    for (int64_t i = 0; i < n; i += VL)
        v_store(s + i, v_sub(v_load_f32(s + i), v_set1(to)));
}

/* into.o = into.o * 2^(into.m - m) + from.o * 2^(from.m - m), m the larger of the two. What has seen nothing leaves the
 * other as it is: a zero keeps its sign. */
static void merge(const ca_state *into, const ca_state *from, int64_t rows, int64_t head_size_v) {
    for (int64_t r = 0; r < rows; r++) {
        float a = into->m[r], b = from->m[r], m = a > b ? a : b;
        float fa = exp2_one(a - reference(m)), fb = exp2_one(b - reference(m));
        float *x = into->o + r * head_size_v, *y = from->o + r * head_size_v;
        if (b == -INFINITY && from->l[r] == 0)
            continue;
        if (a == -INFINITY && into->l[r] == 0) {
            memcpy(x, y, (size_t)head_size_v * sizeof *x);
            into->m[r] = b;
            into->l[r] = from->l[r];
            continue;
        }
        int64_t i = 0;
        for (; i + VL <= head_size_v; i += VL)
            v_store(x + i, v_fma(v_load_f32(y + i), v_set1(fb), v_mul(v_load_f32(x + i), v_set1(fa))));
        if (i < head_size_v) {
            int n = (int)(head_size_v - i);
            v_storen_f32(x + i, v_fma(v_loadn_f32(y + i, n), v_set1(fb), v_mul(v_loadn_f32(x + i, n), v_set1(fa))), n);
        }
        into->l[r] = into->l[r] * fa + from->l[r] * fb;
        into->m[r] = m;
    }
}

/* The sink joins max and sum, with no value (contract: s_aux). Returns 1 / sum, 0 for an empty row. */
INLINE float close_row(float *m, float *l, const float *s_aux, int64_t head) {
    float factor = 1;
    if (s_aux) {
        float sink = s_aux[head] * CA_LOG2E, top = *m > sink ? *m : sink;
        factor = exp2_one(*m - reference(top));
        *l = *l * factor + exp2_one(sink - reference(top));
        *m = top;
    }
    return *l == 0 ? 0 : factor / *l;
}

/* Of the keys of a score block, those that some of the rows see, [lo, hi), and those that all of them do. */
typedef struct edges {
    int64_t lo, all_lo, all_hi, hi;
} edges;

INLINE edges edges_of(const scratch *x, const block *b, int64_t row, int64_t rows) {
    int64_t last = row + rows - 1;
    edges e = {x->lo[row], x->lo[last], x->hi[row], x->hi[last]};
    for (int64_t r = row; x->tree && r <= last; r++) {
        e.lo = ca_min64(e.lo, x->lo[r]);
        e.all_lo = ca_max64(e.all_lo, x->lo[r]);
        e.all_hi = ca_min64(e.all_hi, x->context);
    }
    return (edges){ca_max64(b->k0, e.lo), ca_max64(b->k0, e.all_lo), ca_min64(b->k1, e.all_hi), ca_min64(b->k1, e.hi)};
}

/* Has every group 16 tokens? */
static int whole(const group *g, int num_groups) {
    while (num_groups > 0 && g[num_groups - 1].n == CA_LANES)
        num_groups--;
    return num_groups == 0;
}

/* How many of them are summed up together. */
static int up_to_last(const group *g, int num_groups) {
    int n = 1;
    while (n < num_groups && !g[n - 1].last)
        n++;
    return n;
}

/* Does every one of these rows see all of a block, which is whole? */
static int sees_all(const scratch *x, const block *b, int64_t rows) {
    if (b->num_groups == 0 || !whole(b->groups, b->num_groups))
        return 0;
    const edges e = edges_of(x, b, 0, rows);
    return e.all_lo <= b->groups->key && e.all_hi >= b->groups[b->num_groups - 1].key + CA_LANES;
}

/* -inf to the scores of what a row of a tree mask does not see. */
INLINE void hide(const scratch *x, int64_t row, const group *g, int num_groups, float *s) {
    for (int i = 0; x->tree && i < num_groups; i++)
        ca_hide(x->tree[row], x->context, g[i].key, ca_min64(g[i].n, x->hi[row] - g[i].key), s + i * CA_LANES);
}

/* The tile's rows as a constant: register tiles are unrolled. */
#define FOR_ROWS(mr, call)                                                                                             \
    switch (mr) {                                                                                                      \
        FOR_ROW(1, call)                                                                                               \
        FOR_ROW(2, call)                                                                                               \
        FOR_ROW(3, call)                                                                                               \
        FOR_ROW(4, call)                                                                                               \
        FOR_ROW(5, call)                                                                                               \
        FOR_ROW(6, call)                                                                                               \
        FOR_ROW(7, call)                                                                                               \
        FOR_ROW(8, call)                                                                                               \
    }
#define FOR_ROW(n, call)                                                                                               \
    case n: {                                                                                                          \
        enum { M = n <= TALL ? n : TALL };                                                                             \
        call;                                                                                                          \
        break;                                                                                                         \
    }

#include "score_block.h"
