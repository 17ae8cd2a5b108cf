/* SPDX-License-Identifier: Apache-2.0
 * A strip is up to STRIP query rows against a block of keys. This file takes strips of any shape through a block, KEYS
 * keys at a time, for amx/attention.h: it forms scores, turns them into weights in place by the softmax of the vector
 * kernels, and adds values. pipeline.h does this for most strips of whole tiles. */

typedef struct strip {
    int64_t row; /* number of its first row in the task */
    int rows, number;
    int opening, unprefetched; /* the block is the segment's first, and queries are still to be prefetched; so is V */
    int masked;                /* some row does not see all of the groups */
    const group *g;            /* groups that some row sees, from an even one on */
    int num_groups;
    const group *next; /* the next block's groups at the same places */
    int num_next;
    int64_t queries, rows_next; /* rows of the next strip that are prefetched with two groups, and all of its rows */
    const uint16_t *const *v;   /* V of each two groups */
    int64_t k0, k1;
} strip;

#include "weights.h"

/* Holds what the products of a strip's scores of two groups prefetch, each its share: the next block's K and, while the
 * first block's scores are formed, these groups' V. */
typedef struct share_targets {
    const char *next[2], *v[2];
} share_targets;

/* Lists these targets, and prefetches the next strip's queries, a few rows for every two groups. */
INLINE share_targets list_share_targets(const tile_work *w, const strip *t, int g) {
    share_targets a = {{NULL, NULL}, {NULL, NULL}};
    EACH(j, 2) {
        if (g + j < t->num_next)
            a.next[j] = t->next[g + j].kv[K].at + t->number * w->products * w->kv[K].share;
        if (t->unprefetched && t->number == 0 && g + j < t->num_groups)
            a.v[j] = t->g[g + j].kv[V].at;
    }
    for (int64_t r = g / 2 * t->queries; t->opening && r < ca_min64((g / 2 + 1) * t->queries, t->rows_next); r++)
        prefetch_bytes(w->scratch.query[t->row + STRIP + r], w->head_size * 2);
    return a;
}

/* Prefetches the share of the i-th product. The last shares of a group may reach behind its last byte, in vain. */
INLINE void prefetch_share(const tile_work *w, const share_targets *a, int64_t i) {
    const int64_t share = w->kv[K].share;
    EACH(j, 2) if (a->next[j]) prefetch_bytes(a->next[j] + i * share, share);
    EACH(j, 2) if (a->v[j]) prefetch_bytes(a->v[j] + i * w->v_now, w->v_now);
}

/* S (+)= Q K^T over the dimensions [d, end). whole: there are STRIP rows, an even number of groups and one part. */
INLINE void tile_scores(int whole, tile_work *w, const strip *t, int64_t d, int64_t end) {
    const int tall = whole || t->rows > 16, num_groups = t->num_groups;
    const int64_t ld = query_width_bf16(w->head_size), parts = whole ? 1 : w->kv[K].parts, apart = w->kv[K].apart;
    const uint16_t *q = (const uint16_t *)w->scratch.q + t->row * ld;
    shape_tiles(&w->sizes, t->rows, (int)ca_min64(DEPTH, ca_round_up(end - d, 2)), CA_LANES);
    for (int g = 0; g < num_groups; g += 2) {
        const int wide = whole || g + 1 < num_groups;
        const uint16_t *k0 = (const uint16_t *)t->g[g].kv[K].at, *k1 = (const uint16_t *)t->g[g + wide].kv[K].at;
        const share_targets targets = list_share_targets(w, t, g);
        float *s = w->s + g * CA_LANES;
        if (d == 0)
            zero_sums(tall, wide);
        else
            load_sums(tall, wide, s, S_STRIDE);
        for (int64_t at = d; at < end; at += DEPTH) {
            prefetch_share(w, &targets, at / DEPTH);
            for (int64_t part = 0, from = at * CA_LANES; part < parts; part++, from += apart)
                multiply(0, tall, wide, q + at, 2 * ld, k0 + from, k1 + from, 4 * CA_LANES);
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

/* O += P V, two tiles of columns at a time. Each pass prefetches the strip's share of the next block's V. whole: there
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
                multiply(0, tall, (int)wide, weights_at_bf16(p, i * DEPTH), 2 * P_LD, v, v + 2 * CA_LANES, 4 * dv);
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
static strip make_strip(const tile_work *w, const score_block *b, int64_t row) {
    const int rows = (int)ca_min64(STRIP, ca_rows_of(w->plan, w->task) - row);
    const edges sees = edges_of(&w->scratch, b, row, rows);
    strip t = {.row = row,
               .rows = rows,
               .number = (int)(row / STRIP),
               .opening = w->opening,
               .unprefetched = w->unprefetched,
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
    if (w->regular)
        t.num_groups = (int)ca_min64(t.num_groups, ca_div_up(ca_max64(0, sees.hi - t.g->key), CA_LANES));
    while (t.num_groups > 0 && t.g[t.num_groups - 1].key >= sees.hi)
        t.num_groups--;
    t.rows_next = ca_min64(STRIP, ca_rows_of(w->plan, w->task) - row - rows);
    t.queries = ca_div_up(STRIP, ca_max64(1, ca_div_up(t.num_groups, 2)));
    t.masked = t.num_groups > 0 && (sees.all_lo > t.g->key || sees.all_hi < t.g[t.num_groups - 1].key + CA_LANES ||
                                    (!w->regular && !whole(t.g, t.num_groups)));
    return t; /* It has no groups only between blocks that are selected. */
}

/* Copies queries of the strips up to one, unless that is done, and fills up the last one with rows of zeros. The
 * pipeline takes what is behind the last whole 32 dimensions from last_queries. */
static void load_strip(tile_work *w, int64_t row) {
    const int64_t end = ca_rows_of(w->plan, w->task), width = query_width_bf16(w->head_size);
    for (; w->loaded <= row; w->loaded += STRIP) {
        const int64_t rows = ca_min64(STRIP, end - w->loaded);
        load_queries_bf16(w->plan, &w->scratch, w->loaded, rows);
        if (!w->pipe)
            continue;
        uint16_t *q =
            (uint16_t *)w->scratch.q + w->loaded * width; /* x.q has room for floats, so for twice the rows. */
        memset(q + rows * width, 0, (size_t)((STRIP - rows) * width) * 2);
        const int64_t last = width % DEPTH, counted = DEPTH - last;
        uint16_t *to = w->last_queries + w->loaded * DEPTH;
        for (int r = 0; last && r < STRIP; r++, to += DEPTH) {
            memset(to, 0, (size_t)counted * 2);
            memcpy(to + counted, q + (r + 1) * width - last, (size_t)last * 2);
        }
    }
}

/* Adds the values of a strip's keys, KEYS at a time. */
static void run_strip(tile_work *w, const strip *all) {
    enum { GROUPS = KEYS / CA_LANES };
    load_strip(w, all->row);
    for (int i = 0; i < all->num_groups; i += GROUPS) {
        strip t = *all;
        t.g += i;
        t.next += i;
        t.v += i / 2;
        t.num_groups = (int)ca_min64(GROUPS, all->num_groups - i);
        t.num_next = (int)ca_max64(0, ca_min64(GROUPS, all->num_next - i));
        form_scores(w, &t);
        weigh(w, &t);
        add_values(w, &t);
    }
}
