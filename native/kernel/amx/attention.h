/* SPDX-License-Identifier: Apache-2.0
 * The attention of one segment of keys by products of tiles, for bf16 in the PAIRS layout, in which the tiles of B lie
 * ready: 16 pairs of dimensions x 16 keys of a K group, and 16 pairs of keys x 16 columns of V. Parameters: those of
 * state.h and SUB; ROWS and KEYS are the rows that share a chunk of K and V, and its keys.
 *
 * For every KEYS keys a strip of 32 query rows forms its scores SUB keys at a time and turns them to weights, a few
 * rows of one sub-block after each product of the next one's tiles, which leave the vector ports idle. The weights of
 * all KEYS keys then meet V in one trip of O through the tiles. All strips of a task fetch what comes next, each its
 * share. Where rows are few, kv heads of a task go through its keys together, so that only the first begins with what
 * nobody asked for; over NHD each goes by itself.
 *
 * Not known: how fast this is. It has run under emulation only (CONTRIBUTING.md). Its shape follows prototypes that
 * were measured elsewhere (two cores of a Granite Rapids, D = 128): 32 x 64 scores in L1, 512 keys a trip of O, 256
 * query rows under a chunk and softmax between the tiles came to 2.2 TFLOP/s of 6.2 to 6.6 (2.3 to 2.5 with weights
 * made by integers, coarser than v_powers), where the same in 32 x 256 blocks without overlap came to 1.8. Scores
 * stored 64 keys wide cost the tiles 1.2 times their time, 128 wide 1.3, 256 wide 1.7; O's trips 2.0, 1.58 and 1.5
 * times at 64, 128 and 256 keys.
 *
 * What goes on beside the tiles was timed on a Cascade Lake core, the divider in place of the tile unit (a product of
 * tiles as 4 VDIVPD: 16 cycles, 52 until its sum is there; tile loads and stores as 8 loads and 16 stores). Cycles a
 * score, of which 0.5 are the tile unit's; they say which of two forms is better, not how fast either is:
 *   prefill                                                        8k     2k   64x512   8k softcap  8k ALiBi
 *   128 keys at a time, a row after a row, 8 rows after 4 products 3.6    4.0    6.0       5.6        11.9
 *   as it is                                                       2.5    2.7    4.0       3.5         4.5
 * One row's maximum, exponentials and sum wait for one another; four rows do not (3.3 to 2.5 for that, exponentials of
 * 7 instructions instead of 11, horizontal sums and maxima when they are needed only, and masks for the sub-blocks
 * that have an edge). Queries fetched a strip ahead: 64x512 4.2 to 3.9. Without gain: two or eight rows at a time, 256
 * or 384 keys, asking for the lines of O; 384 rows 1 %, 128 -8 %. */

#define STRIP 32 /* query rows under one pair of B tiles: two tiles of A */
#define DEPTH 32 /* dimensions or keys of one product of tiles */
#define SUB_GROUPS (SUB / CA_LANES)
#define SUBS (KEYS / SUB)
#define STEPS_V (MAX_GROUPS / 2)
#define S_LD (SUB + 16) /* rows of S and P are an odd number of cache lines: different sets */
#define P_LD (KEYS + DEPTH)
#define CHUNK_BYTES (512 << 10) /* of K and V, which stay in L2 with those that come next */

#include "products.h"

typedef struct work {
    const ca_plan *plan;
    const ca_call *call;
    const ca_task *task;
    const ca_state *state;
    int64_t head_size, head_size_v;
    int64_t k_bytes, v_bytes; /* of a group */
    int64_t products, passes; /* of 32 dimensions, for the scores; of 32 columns of V */
    int64_t k_share, v_share; /* bytes of a group of the next block that one of them asks for */
    int64_t v_now;            /* and of this one, where it is the segment's first */
    int opening, cold;        /* is it? and has nobody asked for it? */
    scratch x;
    float *s[2];                /* [STRIP][S_LD] scores of this sub-block and of the last one */
    float *p;                   /* [STRIP][P_LD] weights, bf16 */
    float *l;                   /* [STRIP][VL] sums of weights, to be added to the state's */
    float (*m)[STRIP];          /* [1 + SUBS] reference max of each row: before this block; of each sub-block */
    uint16_t *copies;           /* [STEPS_V][DEPTH / 2][Dv][2]; behind them wide_v; then both for second parts */
    const uint16_t *v[STEPS_V]; /* of each two groups: in the cache, unpacked or in copies */
    tile_sizes sizes;           /* as loaded; 0: none are */
    /* of int8 and int4 */
    uint16_t *wide_k, *wide_v; /* [MAX_GROUPS] groups as bf16 */
    int k_parts, v_parts;      /* whose sum a number is; 1 else */
    int64_t k_apart, v_apart;  /* elements from a first part to the second one */
    int scaled;                /* are scores and weights multiplied by k_by and v_by? */
    float *k_by, *v_by;        /* [MAX_GROUPS + 1][16] */
    float *ones;               /* [SUB] */
    uint16_t *stage;           /* a group of int4 as integers */
} work;

/* Elements of V as tiles take it: of copies, and of groups that had to be unpacked. */
static int64_t v_elements(const ca_plan *plan) {
    const int64_t unpacked =
        ca_is_scaled(plan->shape.v_dtype) ? MAX_GROUPS * CA_LANES * plan->shape.head_size_v + 2 * VL : 0;
    return STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v + unpacked;
}

static int64_t carve_work(work *w, uintptr_t base, const ca_plan *plan) {
    const int k_dtype = plan->shape.k_dtype, v_dtype = plan->shape.v_dtype;
    const int64_t k_elements = ca_is_scaled(k_dtype) ? MAX_GROUPS * ca_kv_form(plan, 0).elements : 0;
    const int64_t nibbles = nibbles_bytes(plan);
    int64_t at = carve(&w->x, base, plan);
    w->scaled = k_dtype == CA_I8 || v_dtype == CA_I8;
    w->k_parts = k_dtype == CA_I4 ? 2 : 1;
    w->v_parts = v_dtype == CA_I4 ? 2 : 1;
    w->k_apart = k_elements;
    w->v_apart = v_elements(plan);
#define TAKE(field, bytes)                                                                                             \
    w->field = (void *)(base + (uintptr_t)at);                                                                         \
    at = ca_round_up(at + (bytes), 64);
    TAKE(s[0], STRIP * S_LD * 4)
    TAKE(s[1], STRIP * S_LD * 4)
    TAKE(p, STRIP * P_LD * 2)
    TAKE(l, STRIP * VL * 4)
    TAKE(m, (1 + SUBS) * (int64_t)sizeof *w->m)
    TAKE(copies, w->v_parts * w->v_apart * 2)
    TAKE(wide_k, w->k_parts * w->k_apart * 2)
    TAKE(k_by, w->scaled * (MAX_GROUPS + 1) * CA_LANES * 4)
    TAKE(v_by, w->scaled * (MAX_GROUPS + 1) * CA_LANES * 4)
    TAKE(ones, w->scaled * SUB * 4)
    TAKE(stage, nibbles ? (nibbles + 2 * VL) * 2 : 0)
#undef TAKE
    w->wide_v = w->copies + STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v;
    return at;
}

static int64_t work_bytes(const ca_plan *plan) {
    work unused;
    return carve_work(&unused, 0, plan);
}

/* Asks for the i-th share of these bytes: pages lie anywhere, and the hardware's prefetchers lose the trail at each. */
INLINE void ask_share(const char *p, int64_t bytes, int64_t share, int64_t i) {
    const int64_t end = ca_min64(bytes, (i + 1) * share);
    for (int64_t at = i * share; at < end; at += 64)
        __builtin_prefetch(p + at, 0, 2);
}

/* Whole lines of which n are at least these bytes. */
INLINE int64_t share_of(int64_t bytes, int64_t n) { return ca_round_up(ca_div_up(bytes, n), 64); }

/* ---- a strip: up to STRIP query rows against a score block ---- */

typedef struct strip {
    int64_t row; /* of the task's */
    int rows, number;
    int opening, cold; /* the block is the segment's first: queries are still to be fetched; V, too */
    int shaped;        /* softcap, ALiBi, ...: scores are more than products */
    edges sees;
    const group *g; /* those that some row sees, from an even one on */
    int num_groups;
    const group *next; /* of the next block, those at these groups' places */
    int num_next;
    int64_t queries, rows_next; /* of the next strip, those that one product asks for, and all of them */
    const uint16_t *const *v;   /* of each two groups */
    const float *k_by, *v_by;   /* of each group's keys */
    int64_t k0, k1;
} strip;

/* Groups of a strip whose scores are in s; rows from `row` on have yet to become weights. */
typedef struct sub_block {
    float *s;
    int group, num_groups, row;
    int masked;
} sub_block;

#include "scales.h"
#include "weights.h"

static const char *query_at(const work *w, int64_t row) {
    const ca_call *c = w->call;
    return (const char *)((const uint16_t *)c->query + w->x.token[row] * c->q_stride_t +
                          w->x.head[row] * c->q_stride_h);
}

/* What the i-th product of a strip's scores of two groups asks for: its share of the next block's K and, while the
 * first block's scores are formed, of these groups' V and of the next strip's queries. */
INLINE void ask_ahead(const work *w, const strip *t, int g, int i) {
    for (int j = g; j < g + 2 && j < t->num_next; j++)
        ask_share(t->next[j].k, w->k_bytes, w->k_share, t->number * w->products + i);
    if (!t->opening)
        return;
    for (int j = g; j < g + 2 && j < t->num_groups && t->number == 0 && t->cold; j++)
        ask_share(t->g[j].v, w->v_bytes, w->v_now, i);
    const int64_t row = (g / 2 * w->products + i) * t->queries;
    for (int64_t r = row; r < row + t->queries && r < t->rows_next; r++)
        ask_share(query_at(w, t->row + STRIP + r), w->head_size * 2, w->head_size * 2, 0);
}

/* S (+)= Q K^T over the dimensions [d, end), and the rows of the sub-block before, a few after each product: as many
 * as the tiles have time for. */
static void tile_scores(work *w, const strip *t, const sub_block *b, sub_block *before, int64_t d, int64_t end) {
    const int tall = t->rows > 16, products = (int)ca_div_up(end - d, DEPTH);
    const int each = ca_div_up(t->rows, ca_div_up(b->num_groups, 2) * products);
    const int64_t ld = query_width_bf16(w->head_size);
    const uint16_t *q = (const uint16_t *)w->x.q + t->row * ld;
    int due = before->row;
    shape_tiles(&w->sizes, t->rows, (int)ca_min64(DEPTH, ca_round_up(end - d, 2)), CA_LANES);
    for (int i = 0; i < b->num_groups; i += 2) {
        const group *g = t->g + b->group + i;
        const int wide = i + 1 < b->num_groups;
        const uint16_t *k0 = (const uint16_t *)g[0].k, *k1 = (const uint16_t *)g[wide].k;
        float *s = b->s + i * CA_LANES;
        if (d == 0)
            zero_sums(tall, wide);
        else
            load_sums(tall, wide, s, S_LD);
        for (int64_t at = d; at < end; at += DEPTH) {
            ask_ahead(w, t, b->group + i, (int)(at / DEPTH));
            for (int64_t part = 0, from = at * CA_LANES; part < w->k_parts; part++, from += w->k_apart)
                multiply(tall, wide, q + at, ld, k0 + from, k1 + from, CA_LANES);
            weigh_until(w, t, before, due = (int)ca_min64(t->rows, due + each));
        }
        store_sums(tall, wide, s, S_LD);
    }
}

/* O += P V, two tiles of columns at a time, asking for the strip's share of the next block's V. */
static void tile_values(work *w, const strip *t) {
    const int tall = t->rows > 16, steps = (t->num_groups + 1) / 2;
    const int64_t dv = w->head_size_v;
    float *o = w->state->o + t->row * dv;
    for (int64_t c = 0, pass = 0, columns, wide; c < dv; c += columns << wide, pass++) {
        columns = ca_min64(CA_LANES, dv - c);
        wide = dv - c >= 2 * CA_LANES;
        shape_tiles(&w->sizes, t->rows, DEPTH, (int)columns);
        load_sums(tall, (int)wide, o + c, dv);
        for (int i = 0; i < steps; i++) {
            const uint16_t *v = t->v[i] + 2 * c;
            for (int g = 2 * i; g < 2 * i + 2 && g < t->num_next; g++)
                ask_share(t->next[g].v, w->v_bytes, w->v_share, t->number * w->passes + pass);
            for (int part = 0; part < w->v_parts; part++, v += w->v_apart)
                multiply(tall, (int)wide, weights_at_bf16(w->p, i * DEPTH), P_LD, v, v + 2 * CA_LANES, dv);
        }
        store_sums(tall, (int)wide, o + c, dv);
    }
}

/* The groups of the block that some row of the strip sees, from an even one on, as V's steps are. */
static strip make_strip(const work *w, const block *b, int64_t row, int rows) {
    strip t = {.row = row,
               .rows = rows,
               .number = (int)(row / STRIP),
               .opening = w->opening,
               .cold = w->cold,
               .shaped = w->call->softcap > 0 || w->call->alibi_slopes || w->call->attn_bias || w->x.factor == 0,
               .sees = edges_of(&w->x, b, row, rows),
               .g = b->groups,
               .next = b->next,
               .v = w->v,
               .k0 = b->k0,
               .k1 = b->k1};
    if (t.sees.hi <= t.sees.lo)
        return t;
    t.num_groups = b->num_groups;
    t.num_next = ca_ready(w->plan) ? b->num_next : 0;
    for (; t.num_groups > 2 && t.g[1].key + t.g[1].n <= t.sees.lo; t.g += 2, t.next += 2, t.v++) {
        t.num_groups -= 2;
        t.num_next -= 2;
    }
    while (t.num_groups > 0 && t.g[t.num_groups - 1].key >= t.sees.hi)
        t.num_groups--;
    t.rows_next = ca_min64(STRIP, ca_rows_of(w->plan, w->task) - row - rows);
    t.queries = ca_div_up(STRIP, ca_max64(1, ca_div_up(t.num_groups, 2) * w->products));
    if (w->scaled) {
        t.k_by = w->k_by + (t.g - b->groups) * CA_LANES;
        t.v_by = w->v_by + (t.g - b->groups) * CA_LANES;
    }
    return t; /* no groups: only between blocks that are selected */
}

static sub_block make_sub_block(const work *w, const strip *t, int g) {
    sub_block b = {w->s[g / SUB_GROUPS % 2], g, (int)ca_min64(SUB_GROUPS, t->num_groups - g), 0, 0};
    const group *first = t->g + g, *last = first + b.num_groups - 1;
    b.masked = t->sees.all_lo > first->key || t->sees.all_hi < last->key + CA_LANES || !whole(first, b.num_groups) ||
               (w->scaled && b.num_groups % 2); /* what follows may have a scale that is NaN */
    return b;
}

static void run_strip(work *w, const block *b, int64_t row, int rows) {
    const strip t = make_strip(w, b, row, rows);
    const int64_t square = w->head_size - w->head_size % DEPTH;
    sub_block last = {.row = rows};
    if (t.opening)
        load_queries_bf16(w->plan, w->call, &w->x, row, rows);
    if (t.num_groups == 0)
        return;
    memset(w->l, 0, STRIP * VL * sizeof(float));
    memcpy(w->m[0], w->state->m + row, (size_t)rows * sizeof(float));
    for (int g = 0; g < t.num_groups; g += SUB_GROUPS) {
        sub_block here = make_sub_block(w, &t, g);
        if (square > 0)
            tile_scores(w, &t, &here, &last, 0, square);
        if (square < w->head_size)
            tile_scores(w, &t, &here, &last, square, w->head_size);
        weigh_until(w, &t, &last, rows);
        last = here;
    }
    weigh_until(w, &t, &last, rows);
    settle(w, &t);
    tile_values(w, &t);
    for (int r = 0; r < rows; r++)
        w->state->l[row + r] += v_hsum(v_load_f32(w->l + r * VL));
}

/* ---- V ---- */

static int in_segment(const group *g, int t, int64_t k0, int64_t k1) {
    return t < g->n && g->key + t >= k0 && g->key + t < k1;
}

/* V of a group's keys in the segment, from element `at` on, 0 for others: what lies there may be NaN. */
static void copy_values(const group *g, int64_t at, int64_t k0, int64_t k1, int64_t head_size_v, uint16_t *to) {
    const uint16_t *from = (const uint16_t *)g->v + at;
    const size_t bytes = (size_t)head_size_v * 4;
    for (int t = 0; t < CA_LANES; t += 2, from += 2 * head_size_v, to += 2 * head_size_v) {
        int even = in_segment(g, t, k0, k1), odd = in_segment(g, t + 1, k0, k1);
        if (even || odd)
            memcpy(to, from, bytes);
        else
            memset(to, 0, bytes);
        for (int64_t c = 0; even != odd && c < head_size_v; c++)
            to[2 * c + even] = 0;
    }
}

/* x - x is 0 where x is finite, NaN else. */
static int all_finite(const uint16_t *pairs, int64_t n) {
    vf even = v_set1(0), odd = v_set1(0);
    for (int64_t i = 0; i < n; i += VL) {
        int lanes = (int)ca_min64(VL, n - i);
        vf x = v_evenn_bf16(pairs + 2 * i, lanes), y = v_oddn_bf16(pairs + 2 * i, lanes);
        even = v_add(even, v_sub(x, x));
        odd = v_add(odd, v_sub(y, y));
    }
    return v_hsum(v_add(even, odd)) == 0;
}

/* Where tiles find the V of a score block, two groups at a time. Keys that a row may not see weigh 0 there, which is as
 * good as skipping them unless V is not finite: returns 0 where such a key, some of the task's rows seeing it, might
 * spoil the others. */
static int take_values(work *w, const block *b, int64_t rows) {
    const int64_t dv = w->head_size_v, group_bytes = CA_LANES * dv * 2;
    const edges e = edges_of(&w->x, b, 0, rows);
    for (int i = 0; i < b->num_groups; i += 2) {
        const group *g = b->groups + i, *h = i + 1 < b->num_groups ? g + 1 : NULL;
        int64_t first = ca_max64(g->key, b->k0), end = ca_min64((h ? h : g)->key + (h ? h : g)->n, b->k1);
        uint16_t *copy = w->copies + i / 2 * DEPTH * dv;
        int lie_together = h && g->n == CA_LANES && h->n == CA_LANES && h->v == g->v + group_bytes;
        if (lie_together && first == g->key && end == h->key + CA_LANES) {
            w->v[i / 2] = (const uint16_t *)g->v;
        } else {
            w->v[i / 2] = copy;
            for (int64_t part = 0, at = 0; part < w->v_parts; part++, at += w->v_apart, copy += w->v_apart) {
                copy_values(g, at, b->k0, b->k1, dv, copy);
                if (h)
                    copy_values(h, at, b->k0, b->k1, dv, copy + CA_LANES * dv);
                else
                    memset(copy + CA_LANES * dv, 0, (size_t)group_bytes);
            }
        }
        int ragged = first < e.all_lo || end > e.all_hi;
        if (ragged && !all_finite(w->v[i / 2], DEPTH / 2 * dv))
            return 0;
    }
    return 1;
}

/* ---- a segment ---- */

/* A block of one head; 0: take_values says no. */
static int run_block(work *w, block b, int64_t rows) {
    const ca_shape *shape = &w->plan->shape;
    if (!ca_ready(w->plan))
        b.groups = memcpy(w->x.groups[2], b.groups, (size_t)b.num_groups * sizeof(group));
    for (int value = 0; value < 2 && !ca_ready(w->plan); value++)
        if (ca_is_scaled(ca_kv_dtype(shape, value)))
            take_scaled(w, &b, value);
        else
            unpack_side_bf16(w->plan, &w->x, &b, value);
    if (!take_values(w, &b, rows))
        return 0;
    for (int64_t r = 0; r < rows; r += STRIP)
        run_strip(w, &b, r, (int)ca_min64(STRIP, rows - r));
    return 1;
}

static int segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                   int64_t k0, int64_t k1, const ca_state *states, void *memory) {
    const int quantised = ca_is_scaled(plan->shape.k_dtype) || ca_is_scaled(plan->shape.v_dtype);
    int64_t rows = ca_rows_of(plan, task);
    if (quantised && (rows <= CA_FEW_ROWS || task->shared)) /* as each request by itself */
        return kernel_bf16.segment(plan, call, task, kv_head, num_heads, k0, k1, states, memory);
    work w = {.plan = plan,
              .call = call,
              .task = task,
              .head_size = plan->shape.head_size,
              .head_size_v = plan->shape.head_size_v};
    w.k_bytes = CA_LANES * ca_round_up(w.head_size, 2) * 2;
    w.v_bytes = CA_LANES * w.head_size_v * 2;
    w.products = ca_div_up(w.head_size, DEPTH);
    w.passes = ca_div_up(w.head_size_v, 2 * CA_LANES);
    w.k_share = share_of(w.k_bytes, ca_div_up(rows, STRIP) * w.products);
    w.v_share = share_of(w.v_bytes, ca_div_up(rows, STRIP) * w.passes);
    w.v_now = share_of(w.v_bytes, w.products);
    carve_work(&w, (uintptr_t)memory, plan);
    w.x.integers = 0;
    w.x.q_bytes = query_width_bf16(w.head_size) * 2;
    load_rows_bf16(plan, call, task, kv_head, num_heads, &w.x);
    if (w.scaled)
        prepare_scales(&w);
    const int64_t past = listed_end(plan, call, task, k1);
    const int64_t fit = CHUNK_BYTES / (w.k_parts * w.k_bytes + w.v_parts * w.v_bytes);
    const int most = (int)ca_max64(2, ca_min64(MAX_GROUPS, fit - fit % 2));
    char spoilt[CA_HEADS] = {0};
    block b = {.k0 = k0, .groups = w.x.groups[0], .next = w.x.groups[1]};
    b.num_groups = list_groups(plan, call, task, kv_head, k0, k1, most, &w.x, b.groups, &b.k1);
    for (int64_t end; b.k0 < k1; b = next_block(&b, end)) {
        b.num_next = list_groups(plan, call, task, kv_head, b.k1, b.k1 < k1 ? k1 : past, most, &w.x, b.next, &end);
        w.opening = b.k0 == k0;
        for (int h = 0; h < num_heads; h++) {
            move_heads_bf16(plan, call, rows, h > 0, &w.x, &b);
            block here = b;
            if (num_heads > 1)
                list_coming(plan, call, h, num_heads, w.x.groups[3], &here);
            w.state = states + h;
            w.cold = w.opening && h == 0;
            if (!spoilt[h])
                spoilt[h] = !run_block(&w, here, rows);
        }
        move_heads_bf16(plan, call, rows, 1 - num_heads, &w.x, &b);
    }
    tile_release(); /* others in this process configure tiles, too; and a context switch need not save unused ones */
    int status = 0;
    for (int h = 0; h < num_heads && !status; h++)
        if (spoilt[h]) {
            ca_clear(states + h, rows, w.head_size_v);
            status = kernel_bf16.segment(plan, call, task, kv_head + h, 1, k0, k1, states + h, memory);
        }
    return status;
}

static const ca_kernel kernel_amx = {
    .info = {.layout = CA_LAYOUT_PAIRS, .rows = ROWS, .method = TILE_METHOD},
    .scratch_bytes = work_bytes,
    .segment = segment,
    .merge = merge,
    .finish = finish_bf16,
    .write_k = write_k_bf16,
    .write_v = write_v_bf16,
    .widen_k = widen_k_bf16,
    .widen_v = widen_v_bf16,
    .widen_row = widen_row_bf16,
    .unpack = unpack_group_bf16,
    .pack = pack_bf16,
    .quantise = quantise_bf16,
    .rotate = rotate_bf16,
    .score_pages = score_pages_bf16,
    .integers = INTEGERS,
    .rounds_weights = 1,
};
