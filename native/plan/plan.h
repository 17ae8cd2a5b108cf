/* SPDX-License-Identifier: Apache-2.0
 * A plan in the making. */
#ifndef CPU_ATTN_PLAN_H
#define CPU_ATTN_PLAN_H
#include "keys.h"
#include "kernel/kernel.h"

/* A query block, or a task that segments of several of them share. */
typedef struct ca_costed {
    ca_task task;
    int64_t cost;    /* of one kv head: of the task, then of a piece */
    int32_t whole;   /* it is one task that finishes at once, without parts to merge */
    int32_t pieces;  /* num_segments, if it hands them out one by one, or 1, or 0: they are left to the merge */
    int32_t shared;  /* of a query block: parts of it that come from shared tasks */
    int32_t members; /* of a shared task: how many query blocks */
    int32_t first;   /* where they start in ca_list.members; of a query block: where its next part goes */
} ca_costed;

typedef struct ca_list {
    ca_costed *at; /* query blocks, then shared tasks */
    int64_t num_blocks, count, room;
    int32_t *members; /* query blocks that share, as numbers in this list */
} ca_list;

/* Query tokens of a task: as many as fill the engine's rows. */
static inline int64_t ca_block_tokens(const ca_plan *p) {
    return ca_max64(1, p->engine->rows(p->kernel) / p->group_size);
}

/* What a task costs: query rows times keys, and LOAD rows' worth for reading a key (33 GB/s and 230 GFLOP/s of a Zen 4
 * core, bfloat16: 6 rows). */
#define LOAD 8

static inline int64_t ca_cost_of(const ca_plan *p, const ca_task *t, int64_t keys) {
    return ca_max64(1, keys) * (ca_rows_of(p, t) + LOAD);
}

/* Fills lo, hi and tree of a plan that has none yet, for its lengths and window. */
int ca_take_masks(ca_plan *plan, const ca_masks *masks, ca_fault *fault);

/* Adds a task for each group of query blocks that meet the same physical blocks from their first key on, and takes
 * these segments from them. Returns CA_OK, CA_NO_MEMORY or CA_BLOCK_TABLE_SHORT. */
int ca_share(ca_plan *plan, const ca_array *table, ca_list *list, ca_fault *fault);
#endif
