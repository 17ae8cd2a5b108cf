/* SPDX-License-Identifier: Apache-2.0
 * This file lists a score block, the keys that a tile of queries meets at once, as groups of 16 keys that lie together.
 * It takes parameters.h. */
#ifndef CPU_ATTN_SCORE_BLOCK_H
#define CPU_ATTN_SCORE_BLOCK_H
#include "parameters.h"

/* Says how K, or V, of a score block reaches the products. choose_sources (operand_sources.inc) decides. */
typedef enum operand_source {
    IN_PLACE,      /* the products read the cache */
    UNPACK_BLOCK,  /* all groups are unpacked before the first tile, for many rows */
    UNPACK_GROUPS, /* NG groups at a time are unpacked right before their product, for one tile; a side that could be
                      read in place is only prefetched then */
    ROWS_IN_PLACE, /* as UNPACK_GROUPS, but V's rows are read where they lie in a plain cache */
    IN_REGISTERS,  /* packed bytes and rows become vectors in the steps of the product: in_registers.inc */
    AS_INTEGERS    /* int8 and int4 are multiplied as they lie: integers.h */
} operand_source;

/* Holds up to 16 keys that lie together: lanes [0, n) are keys key, key + 1, ... */
typedef struct group {
    struct {
        const char *at;
        const char *scales; /* [scales of a token][16] in bfloat16, maybe unaligned */
        int64_t ld;         /* elements from a token's row to the next one */
    } kv[2];
    int64_t key;
    int32_t n;
    int32_t last; /* Does the group end a sum over SUM_GROUPS groups? */
} group;

/* The keys [k0, k1) of a score block count. `next` lists the groups of the following block, which are prefetched. */
typedef struct score_block {
    int64_t k0, k1;
    operand_source source[2];
    group *groups, *next;
    int num_groups, num_next;
} score_block;

/* Has every one of these groups 16 tokens? */
static inline int whole(const group *g, int num_groups) {
    while (num_groups > 0 && g[num_groups - 1].n == CA_LANES)
        num_groups--;
    return num_groups == 0;
}

/* Returns how many groups, from the first on, share one sum. */
static inline int up_to_last(const group *g, int num_groups) {
    int n = 1;
    while (n < num_groups && !g[n - 1].last)
        n++;
    return n;
}

/* Returns where the keys end that the thread of this task will read. */
static inline int64_t keys_end(const ca_plan *plan, const ca_task *task) {
    int64_t begin, end;
    ca_task_keys(plan, task, &begin, &end);
    if (task->partial >= 0)
        end = ca_min64(end, (task->segment + task->num_segments) * ca_segment_keys(plan->seq_lens[task->request]));
    return end;
}

/* Says where a key lies among the blocks that count: the block's number among them and in the request. */
typedef struct place {
    int64_t which, block, key;
} place;
static inline place place_of(ca_blocks blocks, int64_t size, int64_t key) {
    const int64_t which = ca_find_block(blocks, key / size), block = ca_nth_block(blocks, which);
    return (place){which, block, ca_max64(key, block * size)};
}
/* Returns the place n keys further on, or the start of the next block that counts if p's block ends before. */
static inline place next_place(ca_blocks blocks, int64_t size, place p, int64_t n) {
    p.key += n;
    if (p.key < (p.block + 1) * size)
        return p;
    p.block = ca_nth_block(blocks, ++p.which);
    p.key = p.block * size;
    return p;
}

/* Returns the address of a key's row of K, or of V. */
static inline const char *row_at(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int kv,
                                 place p) {
    const int64_t block = ca_block_of(call, task->request, p.block);
    const int64_t token = p.key - p.block * call->block_size;
    return ca_kv_block(plan, call, kv, block, kv_head) + token * call->kv[kv].ld * plan->sides[kv].size;
}

/* This is the number of keys from the copied row to the prefetched one. With 32, copying takes 1.2 times as long. */
#define PREFETCHED_ROWS 64

/* Does what list_groups does for a plain cache whose blocks hold no whole groups (MEASUREMENTS.md: copied groups). Rows
 * are copied to `room`, so that a group has the keys from one multiple of 16 to the next, as far as these follow one
 * another. The rows of keys before k0 and from k1 on, which no query row sees, are 0. */
static inline int copy_groups(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                              int64_t k1, int most, char *room, group *g, int64_t *end) {
    const ca_blocks blocks = ca_blocks_of(plan, call, task, kv_head);
    const ca_side *k = &plan->sides[K], *v = &plan->sides[V];
    const int64_t bytes[2] = {k->row_bytes, v->row_bytes};
    place at = place_of(blocks, call->block_size, k0),
          prefetched = place_of(blocks, call->block_size, k0 + PREFETCHED_ROWS);
    const int64_t past = keys_end(plan, task);
    int n = 0;
    for (; n < most && at.key < k1; n++) {
        char *copy[2] = {room + n * CA_LANES * bytes[K], room + BLOCK_KEYS * bytes[K] + n * CA_LANES * bytes[V]};
        const int64_t first = at.key == k0 ? at.key - at.key % CA_LANES : at.key;
        const int64_t last = ca_min64(k1, at.key - at.key % CA_LANES + CA_LANES);
        int64_t there = at.key - first;
        EACH(kv, 2) memset(copy[kv], 0, (size_t)(there * bytes[kv]));
        for (; at.key == first + there && at.key < last; there++) {
            EACH(kv, 2) {
                const char *far = row_at(plan, call, task, kv_head, kv, prefetched.key < past ? prefetched : at);
                prefetch_bytes(far, bytes[kv]);
                memcpy(copy[kv] + there * bytes[kv], row_at(plan, call, task, kv_head, kv, at), (size_t)bytes[kv]);
            }
            at = next_place(blocks, call->block_size, at, 1);
            prefetched = next_place(blocks, call->block_size, prefetched, 1);
        }
        if (first + there == k1) {
            EACH(kv, 2) memset(copy[kv] + there * bytes[kv], 0, (size_t)((CA_LANES - there) * bytes[kv]));
            there = CA_LANES;
        }
        g[n] = (group){.kv = {{copy[K], NULL, k->head_size}, {copy[V], NULL, v->head_size}},
                       .key = first,
                       .n = (int32_t)there,
                       .last = n % SUM_GROUPS == SUM_GROUPS - 1};
    }
    *end = ca_min64(at.key, k1);
    return n;
}

static inline int copies_groups(const ca_plan *plan, const ca_call *call) {
    return ca_is_plain(plan) && call->block_size % CA_LANES;
}

/* Returns the end of the keys whose groups are listed for prefetching while the thread works on keys up to k1. Groups
 * that have to be copied are not: the copies would be made for nothing. */
static inline int64_t listed_end(const ca_plan *plan, const ca_call *call, const ca_task *task, int64_t k1) {
    return copies_groups(plan, call) ? k1 : keys_end(plan, task);
}

/* Lists the groups that hold the keys [k0, k1) of the blocks that count, but at most `most` groups. copies: room for
 * their rows where these have to be copied. Returns how many groups there are; *end becomes the first key that counts
 * after them, or k1. */
static inline int list_groups(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                              int64_t k1, int most, char *copies, group *g, int64_t *end) {
    if (copies_groups(plan, call))
        return copy_groups(plan, call, task, kv_head, k0, k1, most, copies, g, end);
    const ca_blocks blocks = ca_blocks_of(plan, call, task, kv_head);
    const int64_t size = call->block_size;
    const int64_t step[2] = {ca_kv_group_step(plan, call, K), ca_kv_group_step(plan, call, V)};
    place at = place_of(blocks, size, k0);
    int n = 0;
    for (; n < most && at.key < k1; n++) {
        const int64_t i = (at.key - at.block * size) / CA_LANES;
        const int64_t block = ca_block_of(call, task->request, at.block);
        at.key = at.block * size + i * CA_LANES;
        g[n].key = at.key;
        g[n].n = (int32_t)ca_min64(CA_LANES, size - i * CA_LANES);
        g[n].last = n % SUM_GROUPS == SUM_GROUPS - 1;
        EACH(kv, 2) {
            const char *start = ca_kv_block(plan, call, kv, block, kv_head);
            g[n].kv[kv].at = start + i * step[kv];
            g[n].kv[kv].scales = start + ca_scales_at(&plan->sides[kv], size, i);
            g[n].kv[kv].ld = call->kv[kv].ld;
        }
        at = next_place(blocks, size, at, g[n].n);
    }
    *end = ca_min64(at.key, k1);
    return n;
}

/* Lists in `to` the groups that lie so many kv heads, and so many rows, behind those of `from`. */
static inline void move_groups(const ca_plan *plan, const ca_call *call, int heads, int rows, const group *from, int n,
                               group *to) {
    int64_t offset[2];
    EACH(kv, 2)
    offset[kv] = heads * call->kv[kv].stride_h * plan->sides[kv].size + rows * plan->sides[kv].row_bytes;
    for (int i = 0; i < n; i++) {
        to[i] = from[i];
        EACH(kv, 2) {
            to[i].kv[kv].at += offset[kv];
            to[i].kv[kv].scales += offset[kv];
        }
    }
}

/* Returns the following score block, whose groups are b's `next`. */
static inline score_block next_block(const score_block *b, int64_t end) {
    return (score_block){.k0 = b->k1, .k1 = end, .groups = b->next, .next = b->groups, .num_groups = b->num_next};
}
#endif
