/* SPDX-License-Identifier: Apache-2.0
 * Which lines are fetched while others are computed with: the only file that knows. Parameters: parameters.h.
 *
 * Pages lie anywhere, so the hardware's prefetchers lose the trail at each. Every step of the products therefore asks
 * for as many lines of the groups that come next as it reads itself, into L2, since L1 waits for few lines at a time
 * (MEASUREMENTS.md: prefetch). */
#ifndef CPU_ATTN_PREFETCH_H
#define CPU_ATTN_PREFETCH_H
#include "score_block.h"

/* What an isa file says as PREFETCH. */
typedef struct prefetch_policy {
    int steps;         /* of NG groups ahead of what is read */
    int narrow_steps;  /* the same where a cache is narrow */
    int integer_steps; /* and where integers.h multiplies, which does less for every line */
    int paced_rows;    /* up to so many query rows a step waits for what it has read: wait_for_line */
} prefetch_policy;
#ifndef PREFETCH
#define PREFETCH {2, 2, 3, 0}
#endif
INLINE prefetch_policy policy(void) { return (prefetch_policy)PREFETCH; }
/* What an isa file says as HALF_PAGES, if it may ever be so: the hardware fetches the second half of a page whose first
 * half is asked for. */
#ifdef HALF_PAGES
#define MAY_HALVE 1
#else
#define MAY_HALVE 0
#define HALF_PAGES 0
#endif

#ifdef HALVES
#define PREFETCHES_NARROW 1 /* do the products fetch what halves.h will unpack? */
#else
#define PREFETCHES_NARROW 0
#endif
#define PAGE 4096

/* Which lines of K, or of V, the products ask for: 1/2^narrower of the bytes that they read; of half_of bytes at a
 * multiple of as many, a power of two, the first half, unless it is 0. */
typedef struct asked {
    int narrower;
    unsigned half_of;
} asked;

/* What is fetched meanwhile, for a segment and, where it says so, for a score block. */
typedef struct prefetch {
    int steps;        /* of the policy */
    int together;     /* kv heads that fetch for one another, or 0 */
    int block_ahead;  /* of a block: not so many steps, but a block ahead */
    int by_unpacking; /* of a block: what is next is asked for as groups are unpacked, not by the products */
    int share;        /* of two tiles that share what is asked for the first, 1, or the second; 0: the first asks */
    struct {
        asked lines;
        int64_t scales; /* of a token, where these are read as they lie */
    } kv[2];
} prefetch;

/* The groups that a step of the products asks for. */
typedef struct ahead {
    const char *at[NG];
    asked lines;
} ahead;

/* ---- by the products ---- */

/* Bytes of n groups from the i-th on, or of the first halves of them, where these are as far. */
INLINE void prefetch_lines(const ahead *next, int i, int n, int64_t at, int64_t bytes) {
    for (int end = i + n; next && i < end; i++) {
        const char *p = next->at[i] + at;
        if (MAY_HALVE && next->lines.half_of)
            p -= ((uintptr_t)p & (next->lines.half_of - 1)) / 2;
        prefetch_bytes(p, bytes);
    }
}
/* Byte `at` of what the products read is this one in the cache; narrow: could a narrow one be next? */
INLINE int64_t prefetch_at(int narrow, const ahead *next, int64_t at) {
    return narrow && next ? at >> next->lines.narrower : at;
}
/* Which steps ask, 2 each: those whose number has none of these bits. */
INLINE int prefetch_mask(int narrow, const ahead *next) {
    return (narrow || MAY_HALVE) && next ? (2 << next->lines.narrower << (next->lines.half_of > 0)) - 1 : 0;
}
/* Of a plain cache's groups as many rows as belong to [i, end) of `steps`, row by row, ld bytes apart. */
INLINE void prefetch_rows(const ahead *next, int which, int groups, int64_t ld, int64_t bytes, int64_t i, int64_t end,
                          int64_t steps) {
    for (int64_t r = i * CA_LANES / steps; r < end * CA_LANES / steps; r++)
        prefetch_lines(next, which, groups, r * ld, bytes);
}

/* 0, once what the products have just read is there: the address of the step after the next one waits for it. Where few
 * rows leave the core time to run ahead of memory, it reaches lines that it has not asked for, and waits for these in
 * place of asking (MEASUREMENTS.md: paced rows). */
INLINE int64_t wait_for_line(int mr, const ahead *next, const void *p) {
    int64_t zero = 0;
    int32_t there = 0;
    if (mr > policy().paced_rows || !next)
        return 0;
    __asm__("" : "+r"(zero)); /* the compiler does not know what it is */
    memcpy(&there, p, sizeof there);
    return there & zero;
}

/* In a walk over K of n groups, V of them, K and V of the next block: what comes so many steps after the i-th, and its
 * scales. Of two tiles that share it each asks for half of the groups and, in place of the others, for what it reads.
 */
static inline const ahead *look_ahead(const prefetch *f, const score_block *b, const group *g, int n, int i,
                                      ahead *next) {
    const int far = i + (f->block_ahead || f->steps * NG > 2 * n ? 2 * n : f->steps * NG), m = b->num_next;
    const char *read = i < n ? g[i].kv[K].at : g[i - n].kv[V].at;
    for (int j = 0; j < NG; j++) {
        if (f->share && (j < NG / 2) != (f->share == 1)) {
            next->at[j] = read;
            continue;
        }
        const int behind = far + j >= 2 * n && m, at = behind ? far + j - 2 * n : far + j, count = behind ? m : n;
        const int kv = at >= count;
        const group *here = (behind ? b->next : g) + (kv ? ca_min64(at, 2 * count - 1) - count : at);
        next->at[j] = here->kv[kv].at;
        next->lines = f->kv[kv].lines;
        for (int64_t s = 0; s < f->kv[kv].scales; s += 2)
            __builtin_prefetch(here->kv[kv].scales + s * CA_LANES * 2, 0, 2);
    }
    return next;
}

/* ---- by unpacking ---- */

#define GROUPS_AHEAD 4 /* of the one that is unpacked */
/* The group to fetch while the i-th of a block is unpacked. What the products have asked for is in L2: rows of K that
 * follow one another are fetched from there. */
static inline const group *while_unpacking(const ca_plan *plan, const prefetch *f, const score_block *b, int kv,
                                           int i) {
    const group *g = &b->groups[i];
    const int over = i + GROUPS_AHEAD - b->num_groups;
    if (f->by_unpacking)
        return over < 0 ? g + GROUPS_AHEAD : b->num_next ? b->next + ca_min64(over, b->num_next - 1) : g;
    if (!is_plain(plan))
        return g;
    return kv == K && g->kv[K].ld == plan->shape.head_size && i + 1 < b->num_groups ? g + 1 : NULL;
}

static inline void prefetch_group(const ca_plan *plan, int kv, const group *g) {
    const int64_t bytes = is_plain(plan) ? ca_kv_row_bytes(&plan->shape, kv) : ca_kv_form(plan, kv).bytes;
    const int64_t ld = g->kv[kv].ld * ca_dtype_size(ca_kv_dtype(&plan->shape, kv));
    for (int row = 0; row < (is_plain(plan) ? g->n : 1); row++)
        prefetch_bytes(g->kv[kv].at + row * ld, bytes);
}

/* ---- in shares, by the tiles of amx ---- */

/* Whole lines of which n are at least these bytes. */
INLINE int64_t share_of(int64_t bytes, int64_t n) { return ca_round_up(ca_div_up(bytes, n), 64); }

/* ---- what a segment fetches, and when ---- */

/* Half of pages, or of half pages where these lie by themselves. What is read 1 KiB at a time leaves the hardware no
 * time; the rows of heads that go together are not read in order. */
static inline asked lines_of(const ca_plan *plan, const ca_call *call, int together, int kv) {
    const ca_group_form f = ca_kv_form(plan, kv);
    const int dtype = ca_kv_dtype(&plan->shape, kv);
    const int64_t block = ca_div_up(call->block_size, CA_LANES) * f.bytes;
    asked l = {.narrower = !PREFETCHES_NARROW ? 0 : ca_is_nibbles(dtype) ? 2 : ca_is_narrow(dtype)};
    if (HALF_PAGES && !together && !f.scales)
        l.half_of = block % PAGE == 0 ? PAGE : block == PAGE / 2 ? PAGE / 2 : 0;
    return l;
}

/* integers: is K or V multiplied so? */
static inline prefetch prefetch_of(const ca_plan *plan, const ca_call *call, int together, int integers) {
    const prefetch_policy p = policy();
    return (prefetch){.steps = integers                      ? p.integer_steps
                               : ca_any_narrow(&plan->shape) ? p.narrow_steps
                                                             : p.steps,
                      .together = together,
                      .kv = {{lines_of(plan, call, together, K), 0}, {lines_of(plan, call, together, V), 0}}};
}

/* While products run memory has time for what comes next, if that is lines that follow one another: a group of a packed
 * cache; rows of a plain one where they are dense; or, since heads that go together bring what the others need, a share
 * of the rows of all of them. Otherwise unpacking fetches, and waits for it (MEASUREMENTS.md: prefetch by products or
 * by unpacking). */
static inline int products_prefetch(const ca_plan *plan, const ca_call *call, int together) {
    const ca_shape *s = &plan->shape;
    const int64_t heads = together ? together : 1;
    if (ca_any_narrow(s) && !(PREFETCHES_NARROW && (!is_plain(plan) || together)))
        return 0;
    if (!is_plain(plan))
        return 1;
    if (together && call->kv[K].stride_h != s->head_size)
        return 0;
    return call->kv[K].ld == heads * s->head_size &&
           (call->kv[V].ld == heads * s->head_size_v || ca_v_is_in_k(s, call));
}

/* What is fetched while the h-th of some kv heads is at work: what lies next, the keys of the next head, or of the
 * first one in the next block; a share of the rows of all heads there, where these fetch for one another. */
static inline void list_coming(const ca_plan *plan, const ca_call *call, int together, int h, int num_heads,
                               group *room, score_block *b) {
    const int here = !together && h + 1 < num_heads;
    const int heads = together ? h : here, rows = together ? h * (CA_LANES - 1) : 0;
    if (here)
        b->num_next = b->num_groups;
    move_groups(plan, call, heads, rows, here ? b->groups : b->next, b->num_next, room);
    b->next = room;
}
#endif
