/* SPDX-License-Identifier: Apache-2.0
 * This file alone decides which lines are prefetched while others are computed with. It takes parameters.h.
 *
 * Pages lie anywhere, so the hardware's prefetchers lose the trail at each. Every step of the products therefore
 * prefetches as many lines of coming groups as it reads itself. The lines go into L2, since L1 can wait for few lines
 * at a time (MEASUREMENTS.md: prefetch). */
#ifndef CPU_ATTN_PREFETCH_H
#define CPU_ATTN_PREFETCH_H
#include "score_block.h"

/* Holds what an isa file defines as PREFETCH. */
typedef struct prefetch_policy {
    int steps;           /* steps, of NG groups each, from what is read to what is prefetched */
    int quantised_steps; /* takes the place of `steps` where a cache is quantised */
    int integer_steps;   /* takes the place of both where integers.h multiplies, which does less work for every line */
    int paced_rows;      /* up to so many query rows, a step waits for what it has read (wait_for_line) */
} prefetch_policy;
#ifndef PREFETCH
#define PREFETCH {2, 2, 3, 0}
#endif
INLINE prefetch_policy policy(void) { return (prefetch_policy)PREFETCH; }
/* An isa file defines HALF_PAGES if the hardware of some machines fetches the second half of a page by itself once the
 * first half has been prefetched; its value, at run time, says whether this machine does. */
#ifdef HALF_PAGES
#define MAY_HALVE 1
#else
#define MAY_HALVE 0
#define HALF_PAGES 0
#endif

#ifdef HALVES
#define PREFETCHES_QUANTISED 1 /* Do the products prefetch what halves.h will unpack? */
#else
#define PREFETCHES_QUANTISED 0
#endif
#define PAGE 4096

/* Says which lines of K, or of V, the products prefetch. `shift` is log2 of how much smaller the cached bytes are
 * than the unpacked ones that the products read. Of each chunk of `half_of` bytes, a power of two, only the first half
 * is prefetched; 0: all bytes are. */
typedef struct part_to_fetch {
    int shift;
    unsigned half_of;
} part_to_fetch;

/* Says what is prefetched while products run, for a segment; choose_sources (operand_sources.inc) settles it for each
 * score block. */
typedef struct prefetch {
    int steps;        /* steps ahead, as the policy has them */
    int together;     /* the number of kv heads that prefetch for one another, or 0 */
    int block_ahead;  /* Is the next score block prefetched, in place of what is `steps` ahead? */
    int by_unpacking; /* Do groups that are unpacked prefetch what comes next, in place of the products? */
    int share; /* Two row tiles may share the prefetching: 1 is the first, 2 the second. 0: the first does all. */
    struct {
        part_to_fetch part;
        int64_t scales; /* scales of a token, where products read these in the cache */
    } kv[2];
} prefetch;

/* Holds the groups that a step of the products prefetches. */
typedef struct prefetch_targets {
    const char *at[NG];
    part_to_fetch part;
} prefetch_targets;

/* ---- by the products ---- */

/* Prefetches bytes [at, at + bytes) of n groups from the i-th on. Where only first halves of chunks are prefetched,
 * the offset into a chunk is halved. */
INLINE void prefetch_lines(const prefetch_targets *next, int i, int n, int64_t at, int64_t bytes) {
    for (int end = i + n; next && i < end; i++) {
        const char *p = next->at[i] + at;
        if (MAY_HALVE && next->part.half_of)
            p -= ((uintptr_t)p & (next->part.half_of - 1)) / 2;
        prefetch_bytes(p, bytes);
    }
}
/* Returns which byte of a cached group corresponds to byte `at` of what the products read. quantised: the coming groups
 * may be quantised. */
INLINE int64_t prefetch_at(int quantised, const prefetch_targets *next, int64_t at) {
    return quantised && next ? at >> next->part.shift : at;
}
/* A step prefetches as many bytes as it reads if the number of its first dimension or key has none of these bits; other
 * steps prefetch nothing. */
INLINE int prefetch_mask(int quantised, const prefetch_targets *next) {
    return (quantised || MAY_HALVE) && next ? (2 << next->part.shift << (next->part.half_of > 0)) - 1 : 0;
}
/* Prefetches the share of steps [i, end), of all `steps`, in the 16 rows of a plain cache's groups. Rows lie ld bytes
 * apart. */
INLINE void prefetch_rows(const prefetch_targets *next, int which, int groups, int64_t ld, int64_t bytes, int64_t i,
                          int64_t end, int64_t steps) {
    for (int64_t r = i * CA_LANES / steps; r < end * CA_LANES / steps; r++)
        prefetch_lines(next, which, groups, r * ld, bytes);
}

/* Returns 0, but only once the bytes at p, which the products have just read, have arrived: the address of the step
 * after the next one depends on it. With few rows the core would run ahead of memory, reach lines that have not been
 * prefetched, and wait for these in place of prefetching others (MEASUREMENTS.md: paced rows). */
INLINE int64_t wait_for_line(int mr, const prefetch_targets *next, const void *p) {
    int64_t zero = 0;
    int32_t there = 0;
    if (mr > policy().paced_rows || !next)
        return 0;
    __asm__("" : "+r"(zero)); /* The compiler must not know that it is 0. */
    memcpy(&there, p, sizeof there);
    return there & zero;
}

/* Fills `next` with the groups to prefetch at the i-th place of a walk over K of n groups, V of these, then K and V of
 * the next block; it prefetches their scales at once. Where two row tiles share the prefetching, each issues half of
 * it. Its other slots repeat an address that it is reading, so that the loop has no branch. */
static inline const prefetch_targets *list_targets(const prefetch *f, const score_block *b, const group *g, int n,
                                                   int i, prefetch_targets *next) {
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
        next->part = f->kv[kv].part;
        for (int64_t s = 0; s < f->kv[kv].scales; s += 2)
            __builtin_prefetch(here->kv[kv].scales + s * CA_LANES * 2, 0, 2);
    }
    return next;
}

/* ---- by unpacking ---- */

#define GROUPS_AHEAD 4 /* from the group that is unpacked to the one that is prefetched */
/* Returns the group to prefetch while the i-th of a block is unpacked, or NULL. What the products have prefetched is in
 * L2 already; from there dense rows of K are prefetched once more. */
static inline const group *while_unpacking(const ca_plan *plan, const prefetch *f, const score_block *b, int kv,
                                           int i) {
    const group *g = &b->groups[i];
    const int over = i + GROUPS_AHEAD - b->num_groups;
    if (f->by_unpacking)
        return over < 0 ? g + GROUPS_AHEAD : b->num_next ? b->next + ca_min64(over, b->num_next - 1) : g;
    if (!ca_is_plain(plan))
        return g;
    return kv == K && g->kv[K].ld == plan->shape.head_size && i + 1 < b->num_groups ? g + 1 : NULL;
}

static inline void prefetch_group(const ca_plan *plan, int kv, const group *g) {
    const ca_side *s = &plan->sides[kv];
    const int64_t bytes = s->plain ? s->row_bytes : s->group_bytes, ld = g->kv[kv].ld * s->size;
    for (int row = 0; row < (s->plain ? g->n : 1); row++)
        prefetch_bytes(g->kv[kv].at + row * ld, bytes);
}

/* ---- by the tiles of amx, in shares ---- */

/* Returns the size of one of n equal shares, in whole lines, that together have at least these bytes. */
INLINE int64_t share_of(int64_t bytes, int64_t n) { return ca_round_up(ca_div_up(bytes, n), 64); }

/* ---- what a segment fetches, and when ---- */

/* Says which lines of a side to prefetch. With HALF_PAGES it is the first half of each page or, where a block is half a
 * page, of each block. Smaller blocks are prefetched whole, since reading 1 KiB at a time leaves the hardware no time,
 * and so are the rows of heads that go together, which are not read in order. */
static inline part_to_fetch part_of(const ca_plan *plan, const ca_call *call, int together, int kv) {
    const ca_side *s = &plan->sides[kv];
    const int64_t block = ca_div_up(call->block_size, CA_LANES) * s->group_bytes;
    part_to_fetch l = {.shift = !PREFETCHES_QUANTISED ? 0 : s->nibbles ? 2 : s->quantised};
    if (HALF_PAGES && !together && !s->scaled)
        l.half_of = block % PAGE == 0 ? PAGE : block == PAGE / 2 ? PAGE / 2 : 0;
    return l;
}

/* integers: K or V is multiplied as integers. */
static inline prefetch prefetch_of(const ca_plan *plan, const ca_call *call, int together, int integers) {
    const prefetch_policy p = policy();
    return (prefetch){.steps = integers                 ? p.integer_steps
                               : ca_any_quantised(plan) ? p.quantised_steps
                                                        : p.steps,
                      .together = together,
                      .kv = {{part_of(plan, call, together, K), 0}, {part_of(plan, call, together, V), 0}}};
}

/* Do the products prefetch? They leave memory time for what comes next if its lines follow one another: groups of a
 * packed cache, dense rows of a plain one, or, where heads that go together prefetch for one another, a share of the
 * rows of all these heads. Otherwise unpacking prefetches, and waits for it (MEASUREMENTS.md: prefetch by products or
 * by unpacking). */
static inline int products_prefetch(const ca_plan *plan, const ca_call *call, int together) {
    const ca_shape *s = &plan->shape;
    const int64_t heads = together ? together : 1;
    if (ca_any_quantised(plan) && !(PREFETCHES_QUANTISED && (!ca_is_plain(plan) || together)))
        return 0;
    if (!ca_is_plain(plan))
        return 1;
    if (together && call->kv[K].stride_h != s->head_size)
        return 0;
    return call->kv[K].ld == heads * s->head_size &&
           (call->kv[V].ld == heads * s->head_size_v || ca_v_is_in_k(plan, call));
}

/* Lists in `room`, as b->next, what is prefetched while the h-th of num_heads kv heads is computed: the same keys of
 * the next head or, for the last head, the next block of the first one. Where heads prefetch for one another, it is a
 * share of the rows that all of them have in the next block. */
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
