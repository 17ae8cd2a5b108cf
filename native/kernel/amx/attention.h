/* SPDX-License-Identifier: Apache-2.0
 * This is the attention of one segment of keys by products of tiles, for bf16 in the PAIRS layout, in which the tiles
 * of B lie ready: 16 pairs of dimensions x 16 keys of a K group, and 16 pairs of keys x 16 columns of V. Its parameters
 * are those of parameters.h; ROWS and KEYS are the rows that share a chunk of K and V, and its keys.
 *
 * For every KEYS keys a strip of 32 query rows forms its scores, turns them to weights in place, by the softmax of the
 * vector kernels, and meets V in one trip of O through the tiles. All strips of a task prefetch what comes next, each
 * its share. Where rows are few, kv heads of a task go through its keys together, so that only the first head begins
 * with keys that nothing has prefetched; over NHD each head goes by itself.
 *
 * The softmax does not run between products of tiles, although these leave the vector ports idle: on an Emerald Rapids
 * that hid none of its time and cost its own way of weighing a few rows of few keys (MEASUREMENTS.md: AMX). */

#define STRIP 32 /* query rows under one pair of B tiles: two tiles of A */
#define DEPTH 32 /* dimensions or keys of one product of tiles */
#define STEPS_V (MAX_GROUPS / 2)
#define P_LD                                                                                                           \
    (2 * S_STRIDE) /* weights lie where the scores were; rows are an odd number of cache lines, in other sets */
#define CHUNK_BYTES (512 << 10) /* bytes of K and V that stay in L2 with those that come next */

#include "products.h"

typedef struct tile_work {
    const ca_plan *plan;
    const ca_call *call;
    const ca_task *task;
    const ca_state *state;
    int64_t head_size, head_size_v;
    int64_t products, passes; /* of 32 dimensions, for the scores; of 32 columns of V, for the output */
    int64_t v_now;            /* bytes of a group of this block's V that one product asks for where `cold` */
    int opening, cold;        /* the block is the segment's first; besides, nothing has prefetched it */
    scratch x;
    float *s; /* [STRIP][S_STRIDE] scores, then weights, bf16 */
    /* copies is [STEPS_V][DEPTH / 2][Dv][2]. kv[V].wide follows it, and both come once more for second parts. */
    uint16_t *copies;
    const uint16_t *v[STEPS_V]; /* V of each two groups: in the cache, unpacked or in copies */
    tile_sizes sizes;           /* those of the tiles as configured; 0: they are not yet */
    struct {
        /* bytes is what a group takes, and share what one product or pass asks for of a group of the next block. */
        int64_t bytes, share;
        uint16_t *wide; /* [MAX_GROUPS] groups of integers as bf16 */
        int parts;      /* 2 where a number times its scale is the sum of two bf16 numbers, else 1 */
        int64_t apart;  /* elements from a first part to the second one */
        int scaled;     /* scores, or weights, are multiplied by each token's scale */
    } kv[2];
    uint16_t *stage; /* a group of what has two parts, as integers */
} tile_work;

/* Returns how many elements of V tiles take: those of copies, and those of groups that had to be unpacked. */
static int64_t v_elements(const ca_plan *plan) {
    const int64_t unpacked =
        ca_is_scaled(plan->shape.v_dtype) ? MAX_GROUPS * CA_LANES * plan->shape.head_size_v + CA_NIBBLES : 0;
    return STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v + unpacked;
}

/* Returns whether a token has one scale. That can go to scores and weights, where several have to go to the numbers. */
static int has_one_scale(int dtype) { return ca_is_scaled(dtype) && !ca_has_scales(dtype); }

static int64_t carve_work(tile_work *w, uintptr_t base, const ca_plan *plan) {
    const int k_dtype = plan->shape.k_dtype, v_dtype = plan->shape.v_dtype;
    const int64_t k_elements = ca_is_scaled(k_dtype) ? MAX_GROUPS * ca_kv_form(plan, K).elements : 0;
    const int64_t staged = ca_max64(ca_has_scales(k_dtype) ? ca_kv_form(plan, K).elements : 0,
                                    ca_has_scales(v_dtype) ? ca_kv_form(plan, V).elements : 0);
    int64_t at = carve(&w->x, base, plan);
    w->kv[K].scaled = has_one_scale(k_dtype);
    w->kv[V].scaled = has_one_scale(v_dtype);
    w->kv[K].parts = ca_has_scales(k_dtype) ? 2 : 1;
    w->kv[V].parts = ca_has_scales(v_dtype) ? 2 : 1;
    w->kv[K].apart = k_elements;
    w->kv[V].apart = v_elements(plan);
#define TAKE(field, bytes)                                                                                             \
    w->field = (void *)(base + (uintptr_t)at);                                                                         \
    at = ca_round_up(at + (bytes), 64);
    TAKE(s, STRIP * S_STRIDE * 4)
    TAKE(copies, w->kv[V].parts * w->kv[V].apart * 2)
    TAKE(kv[K].wide, w->kv[K].parts * w->kv[K].apart * 2)
    TAKE(stage, staged ? (staged + 2 * VL) * 2 : 0)
#undef TAKE
    w->kv[V].wide = w->copies + STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v;
    return at;
}

/* This kernel computes the segments that are not for tiles. */
extern const ca_isa_row ca_isa_avx512_bf16;
static const ca_kernel *vector_kernel(void) { return ca_isa_avx512_bf16.kernels[CA_BF16]; }

static int64_t work_bytes(const ca_plan *plan) {
    tile_work unused;
    return ca_max64(carve_work(&unused, 0, plan), vector_kernel()->scratch_bytes(plan));
}

/* ---- a strip: up to STRIP query rows against a score block ---- */

typedef struct strip {
    int64_t row; /* number of its first row in the task */
    int rows, number;
    int opening, cold; /* the block is the segment's first, whose queries are still to be prefetched; V, too */
    int shaped;        /* scores are more than products: softcap, ALiBi, a tree, ... */
    int masked;        /* some row does not see all of the groups */
    const group *g;    /* groups that some row sees, from an even one on */
    int num_groups;
    const group *next; /* the next block's groups at the same places */
    int num_next;
    int64_t queries, rows_next; /* rows of the next strip whose queries two groups ask for, and all rows of it */
    const uint16_t *const *v;   /* V of each two groups */
    int64_t k0, k1;
} strip;

#include "scales.h"
#include "weights.h"

/* What the products of a strip's scores of two groups ask for, each its share: of the next block's K and, while the
 * first block's scores are formed, of these groups' V. */
typedef struct ahead_of {
    const char *next[2], *v[2];
} ahead_of;

/* The next strip's queries are asked for here, a few rows for every two groups. */
INLINE ahead_of look_ahead_of(const tile_work *w, const strip *t, int g) {
    ahead_of a = {{NULL, NULL}, {NULL, NULL}};
    EACH(j, 2) {
        if (g + j < t->num_next)
            a.next[j] = t->next[g + j].kv[K].at + t->number * w->products * w->kv[K].share;
        if (t->cold && t->number == 0 && g + j < t->num_groups)
            a.v[j] = t->g[g + j].kv[V].at;
    }
    for (int64_t r = g / 2 * t->queries; t->opening && r < ca_min64((g / 2 + 1) * t->queries, t->rows_next); r++)
        prefetch_bytes(w->x.query[t->row + STRIP + r], w->head_size * 2);
    return a;
}

/* Of the i-th product. What lies behind a group's last byte is asked for in vain. */
INLINE void prefetch_ahead(const tile_work *w, const ahead_of *a, int64_t i) {
    const int64_t share = w->kv[K].share;
    EACH(j, 2) if (a->next[j]) prefetch_bytes(a->next[j] + i * share, share);
    EACH(j, 2) if (a->v[j]) prefetch_bytes(a->v[j] + i * w->v_now, w->v_now);
}

/* S (+)= Q K^T over the dimensions [d, end). whole: there are STRIP rows, an even number of groups and one part. */
INLINE void tile_scores(int whole, tile_work *w, const strip *t, int64_t d, int64_t end) {
    const int tall = whole || t->rows > 16, num_groups = t->num_groups;
    const int64_t ld = query_width_bf16(w->head_size), parts = whole ? 1 : w->kv[K].parts, apart = w->kv[K].apart;
    const uint16_t *q = (const uint16_t *)w->x.q + t->row * ld;
    shape_tiles(&w->sizes, t->rows, (int)ca_min64(DEPTH, ca_round_up(end - d, 2)), CA_LANES);
    for (int g = 0; g < num_groups; g += 2) {
        const int wide = whole || g + 1 < num_groups;
        const uint16_t *k0 = (const uint16_t *)t->g[g].kv[K].at, *k1 = (const uint16_t *)t->g[g + wide].kv[K].at;
        const ahead_of ahead = look_ahead_of(w, t, g);
        float *s = w->s + g * CA_LANES;
        if (d == 0)
            zero_sums(tall, wide);
        else
            load_sums(tall, wide, s, S_STRIDE);
        for (int64_t at = d; at < end; at += DEPTH) {
            prefetch_ahead(w, &ahead, at / DEPTH);
            for (int64_t part = 0, from = at * CA_LANES; part < parts; part++, from += apart)
                multiply(tall, wide, q + at, ld, k0 + from, k1 + from, CA_LANES);
        }
        store_sums(tall, wide, s, S_STRIDE);
    }
}

static NOINLINE void form_scores(tile_work *w, const strip *t) {
    const int64_t square = w->head_size - w->head_size % DEPTH;
    if (square == w->head_size && t->rows == STRIP && t->num_groups % 2 == 0 && w->kv[K].parts == 1) {
        tile_scores(1, w, t, 0, square);
        return;
    }
    if (square > 0)
        tile_scores(0, w, t, 0, square);
    if (square < w->head_size)
        tile_scores(0, w, t, square, w->head_size);
}

/* O += P V, two tiles of columns at a time. Each pass asks for the strip's share of the next block's V. whole: there
 * are STRIP rows, a multiple of 32 columns and one part. */
INLINE void tile_values(int whole, tile_work *w, const strip *t) {
    const int tall = whole || t->rows > 16, steps = (t->num_groups + 1) / 2, num_next = t->num_next;
    const int64_t dv = w->head_size_v, parts = whole ? 1 : w->kv[V].parts, apart = w->kv[V].apart;
    const int64_t share = w->kv[V].share;
    const group *next = t->next;
    const float *p = w->s;
    float *o = w->state->o + t->row * dv;
    for (int64_t c = 0, pass = 0, columns, wide; c < dv; c += columns << wide, pass++) {
        const int64_t at = (t->number * w->passes + pass) * share;
        columns = whole ? CA_LANES : ca_min64(CA_LANES, dv - c);
        wide = whole || dv - c >= 2 * CA_LANES;
        shape_tiles(&w->sizes, t->rows, DEPTH, (int)columns);
        load_sums(tall, (int)wide, o + c, dv);
        for (int i = 0; i < steps; i++) {
            const uint16_t *v = t->v[i] + 2 * c;
            for (int g = 2 * i; g < 2 * i + 2 && g < num_next; g++)
                prefetch_bytes(next[g].kv[V].at + at, share);
            for (int part = 0; part < parts; part++, v += apart)
                multiply(tall, (int)wide, weights_at_bf16(p, i * DEPTH), P_LD, v, v + 2 * CA_LANES, dv);
        }
        store_sums(tall, (int)wide, o + c, dv);
    }
}

static NOINLINE void add_values(tile_work *w, const strip *t) {
    if (t->rows == STRIP && w->head_size_v % (2 * CA_LANES) == 0 && w->kv[V].parts == 1)
        tile_values(1, w, t);
    else
        tile_values(0, w, t);
}

/* Takes the groups of the block that some row of the strip sees, from an even one on, since each step of V is two
 * groups. */
static strip make_strip(const tile_work *w, const score_block *b, int64_t row, int rows) {
    const edges sees = edges_of(&w->x, b, row, rows);
    strip t = {.row = row,
               .rows = rows,
               .number = (int)(row / STRIP),
               .opening = w->opening,
               .cold = w->cold,
               .shaped =
                   w->call->softcap > 0 || w->call->alibi_slopes || w->call->attn_bias || w->x.tree || w->x.factor == 0,
               .g = b->groups,
               .next = b->next,
               .v = w->v,
               .k0 = b->k0,
               .k1 = b->k1};
    if (sees.hi <= sees.lo)
        return t;
    t.num_groups = b->num_groups;
    t.num_next = ca_ready(w->plan) ? b->num_next : 0;
    for (; t.num_groups > 2 && t.g[1].key + t.g[1].n <= sees.lo; t.g += 2, t.next += 2, t.v++) {
        t.num_groups -= 2;
        t.num_next -= 2;
    }
    while (t.num_groups > 0 && t.g[t.num_groups - 1].key >= sees.hi)
        t.num_groups--;
    t.rows_next = ca_min64(STRIP, ca_rows_of(w->plan, w->task) - row - rows);
    t.queries = ca_div_up(STRIP, ca_max64(1, ca_div_up(t.num_groups, 2)));
    t.masked = t.num_groups > 0 && (sees.all_lo > t.g->key || sees.all_hi < t.g[t.num_groups - 1].key + CA_LANES ||
                                    !whole(t.g, t.num_groups));
    return t; /* it has no groups only between blocks that are selected */
}

static void run_strip(tile_work *w, const score_block *b, int64_t row, int rows) {
    const strip t = make_strip(w, b, row, rows);
    if (t.opening)
        load_queries_bf16(w->plan, &w->x, row, rows);
    if (t.num_groups == 0)
        return;
    form_scores(w, &t);
    weigh(w, &t);
    add_values(w, &t);
}

/* ---- V ---- */

static int in_segment(const group *g, int t, int64_t k0, int64_t k1) {
    return t < g->n && g->key + t >= k0 && g->key + t < k1;
}

/* Copies V of a group's keys in the segment, from element `at` on, and 0 for other keys, whose V may be NaN. */
static void copy_values(const group *g, int64_t at, int64_t k0, int64_t k1, int64_t head_size_v, uint16_t *to) {
    const uint16_t *from = (const uint16_t *)g->kv[V].at + at;
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

/* Sets where tiles find the V of a score block, two groups at a time. Keys that a row may not see weigh 0 there, which
 * is as good as skipping them unless V is not finite. Returns 0 where such a key, which some of the task's rows see,
 * might spoil the others. */
static int take_values(tile_work *w, const score_block *b, int64_t rows) {
    const int64_t dv = w->head_size_v, group_bytes = CA_LANES * dv * 2;
    const edges e = edges_of(&w->x, b, 0, rows);
    for (int i = 0; i < b->num_groups; i += 2) {
        const group *g = b->groups + i, *h = i + 1 < b->num_groups ? g + 1 : NULL;
        int64_t first = ca_max64(g->key, b->k0), end = ca_min64((h ? h : g)->key + (h ? h : g)->n, b->k1);
        uint16_t *copy = w->copies + i / 2 * DEPTH * dv;
        int lie_together = h && g->n == CA_LANES && h->n == CA_LANES && h->kv[V].at == g->kv[V].at + group_bytes;
        if (lie_together && first == g->key && end == h->key + CA_LANES) {
            w->v[i / 2] = (const uint16_t *)g->kv[V].at;
        } else {
            w->v[i / 2] = copy;
            for (int64_t part = 0, at = 0; part < w->kv[V].parts;
                 part++, at += w->kv[V].apart, copy += w->kv[V].apart) {
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

/* Brings K, or V, of a block to where tiles find it; its groups may be changed. */
static void bring(tile_work *w, const score_block *b, int kv) {
    if (ca_is_scaled(ca_kv_dtype(&w->plan->shape, kv)))
        take_scaled(w, b, kv);
    else
        unpack_groups_bf16(w->plan, &w->x, &(prefetch){0}, b, kv, 0, b->num_groups, w->x.unpacked[kv], b->groups);
}

/* Computes a block of one head. Returns 0 where take_values does. */
static int run_block(tile_work *w, score_block b, int64_t rows) {
    if (!ca_ready(w->plan)) {
        b.groups = memcpy(w->x.groups[2], b.groups, (size_t)b.num_groups * sizeof(group));
        bring(w, &b, K);
        bring(w, &b, V);
    }
    if (!take_values(w, &b, rows))
        return 0;
    for (int64_t r = 0; r < rows; r += STRIP)
        run_strip(w, &b, r, (int)ca_min64(STRIP, rows - r));
    return 1;
}

/* Work on a task: num_strips go through a block. */
static tile_work begin_work(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                            int64_t num_strips, void *memory) {
    tile_work w = {.plan = plan,
                   .call = call,
                   .task = task,
                   .head_size = plan->shape.head_size,
                   .head_size_v = plan->shape.head_size_v};
    w.kv[K].bytes = CA_LANES * ca_round_up(w.head_size, 2) * 2;
    w.kv[V].bytes = CA_LANES * w.head_size_v * 2;
    w.products = ca_div_up(w.head_size, DEPTH);
    w.passes = ca_div_up(w.head_size_v, 2 * CA_LANES);
    w.kv[K].share = share_of(w.kv[K].bytes, num_strips * w.products);
    w.kv[V].share = share_of(w.kv[V].bytes, num_strips * w.passes);
    w.v_now = share_of(w.kv[V].bytes, w.products);
    carve_work(&w, (uintptr_t)memory, plan);
    w.x.integers = 0;
    w.x.q_bytes = query_width_bf16(w.head_size) * 2;
    load_rows_bf16(plan, call, task, kv_head, num_heads, &w.x);
    return w;
}

/* How many groups of a block stay in L2 with those of the next one. */
static int most_groups(const tile_work *w) {
    const int64_t fit = CHUNK_BYTES / (w->kv[K].parts * w->kv[K].bytes + w->kv[V].parts * w->kv[V].bytes);
    return (int)ca_max64(2, ca_min64(MAX_GROUPS, fit - fit % 2));
}

static int segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                   int64_t k0, int64_t k1, const ca_state *states, void *memory) {
    const int quantised = ca_is_scaled(plan->shape.k_dtype) || ca_is_scaled(plan->shape.v_dtype);
    int64_t rows = ca_rows_of(plan, task);
    /* A shared task computes what each request would by itself. */
    if (quantised && (rows <= CA_FEW_ROWS || task->shared))
        return vector_kernel()->segment(plan, call, task, kv_head, num_heads, k0, k1, states, memory);
    tile_work w = begin_work(plan, call, task, kv_head, num_heads, ca_div_up(rows, STRIP), memory);
    const int most = most_groups(&w);
    const int64_t past = listed_end(plan, call, task, k1);
    char spoilt[CA_HEADS] = {0};
    score_block b = {.k0 = k0, .groups = w.x.groups[0], .next = w.x.groups[1]};
    b.num_groups = list_groups(plan, call, task, kv_head, k0, k1, most, w.x.copies[0], b.groups, &b.k1);
    for (int64_t end, i = 1; b.k0 < k1; b = next_block(&b, end), i++) {
        b.num_next =
            list_groups(plan, call, task, kv_head, b.k1, b.k1 < k1 ? k1 : past, most, w.x.copies[i % 2], b.next, &end);
        w.opening = b.k0 == k0;
        for (int h = 0; h < num_heads; h++) {
            move_heads_bf16(plan, call, rows, h > 0, &w.x, &b);
            score_block here = b;
            if (num_heads > 1)
                list_coming(plan, call, 0, h, num_heads, w.x.groups[3], &here);
            w.state = states + h;
            w.cold = w.opening && h == 0;
            if (!spoilt[h])
                spoilt[h] = !run_block(&w, here, rows);
        }
        move_heads_bf16(plan, call, rows, 1 - num_heads, &w.x, &b);
    }
    /* Other code in this process configures tiles, too, and a context switch need not save unused ones. */
    tile_release();
    int status = 0;
    for (int h = 0; h < num_heads && !status; h++)
        if (spoilt[h]) {
            ca_clear(states + h, rows, w.head_size_v);
            status = vector_kernel()->segment(plan, call, task, kv_head + h, 1, k0, k1, states + h, memory);
        }
    return status;
}

#include "token_scores.h"

static const int integers = 1; /* the vector kernel multiplies caches of integers as integers */

static const ca_kernel kernel_amx = {
    .info = {.layout = CA_LAYOUT_PAIRS, .rows = ROWS, .integers = INTEGERS_BY, .method = TILE_METHOD},
    .scratch_bytes = work_bytes,
    .segment = segment,
    .merge = merge,
    .finish = finish_bf16,
    .write = {write_k_bf16, write_v_bf16},
    .widen = {widen_k_bf16, widen_v_bf16},
    .widen_row = widen_row_bf16,
    .unpack = unpack_group_bf16,
    .pack = pack_bf16,
    .scale = scale_bf16,
    .quantise = quantise_bf16,
    .turn = turn_bf16,
    .score_pages = score_pages_bf16,
    .score_tokens = score_tokens,
    .integers = &integers,
    .rounds_weights = 1,
};
