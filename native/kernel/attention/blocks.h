/* SPDX-License-Identifier: Apache-2.0
 * This is the loop over the score blocks of a segment, for every kernel. It lists the groups of a block and, to be
 * prefetched, those of the next one, and takes each kv head of a task through the block. What accumulates is its
 * parameter: an online softmax (attention.inc, amx/attention.h), or an indexer's scores (token_scores.inc,
 * amx/token_scores.h). It takes parameters.h. */
#ifndef CPU_ATTN_BLOCKS_H
#define CPU_ATTN_BLOCKS_H
#include "scratch.h"

/* Says which keys of a task are walked over, by which kv heads, in blocks of how many groups. */
typedef struct block_walk {
    const ca_plan *plan;
    const ca_call *call;
    const ca_task *task;
    int kv_head, num_heads;
    int max_groups;
    int64_t k0, k1;     /* keys [k0, k1) */
    int64_t listed_end; /* keys [k1, listed_end) may be listed as what follows the last block */
} block_walk;

/* Decides how K and V of a block reach the products. Returns the number of kv heads that prefetch for one another over
 * it, or 0. */
typedef int begin_block_fn(void *work, score_block *b);
/* Accumulates over a block for the h-th kv head, with which the arrays [heads] of the scratch start. The groups of b
 * may be replaced, but not changed. */
typedef void add_block_fn(void *work, const score_block *b, int h);

/* Moves x to the rows of the kv head that is so many heads further on. */
static inline void move_rows(int64_t rows, int heads, scratch *x) {
    x->q = (char *)x->q + heads * rows * x->q_bytes;
    x->units += heads * rows * x->q_units;
    x->query += heads * rows;
    x->slope += heads * rows;
    x->bias += heads * rows;
}

INLINE void walk_blocks(const block_walk *walk, scratch *x, begin_block_fn *begin_block, add_block_fn *add_block,
                        void *work) {
    const ca_plan *plan = walk->plan;
    const ca_call *call = walk->call;
    const int64_t k1 = walk->k1, rows = ca_rows_of(plan, walk->task);
    const int kv_head = walk->kv_head, num_heads = walk->num_heads, most = walk->max_groups;
    score_block b = {.k0 = walk->k0, .groups = x->groups[0], .next = x->groups[1]};
    b.num_groups = list_groups(plan, call, walk->task, kv_head, b.k0, k1, most, x->copies[0], b.groups, &b.k1);
    for (int64_t end, i = 1; b.k0 < k1; b = next_block(&b, end), i++) {
        b.num_next = list_groups(plan, call, walk->task, kv_head, b.k1, b.k1 < k1 ? k1 : walk->listed_end, most,
                                 x->copies[i % 2], b.next, &end);
        const int together = begin_block(work, &b);
        for (int h = 0; h < num_heads; h++) {
            if (h > 0) {
                move_rows(rows, 1, x);
                move_groups(plan, call, 1, 0, b.groups, b.num_groups, b.groups);
            }
            score_block here = b;
            if (num_heads > 1)
                list_coming(plan, call, together, h, num_heads, x->groups[3], &here);
            add_block(work, &here, h);
        }
        if (num_heads > 1) {
            move_rows(rows, 1 - num_heads, x);
            move_groups(plan, call, 1 - num_heads, 0, b.groups, b.num_groups, b.groups);
        }
    }
}
#endif
