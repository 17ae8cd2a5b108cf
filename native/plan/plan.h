/* SPDX-License-Identifier: Apache-2.0
 * These are the parts of a plan that is being made. */
#ifndef CPU_ATTN_PLAN_H
#define CPU_ATTN_PLAN_H
#include "keys.h"
#include "kernel/kernel.h"

/* Describes a query block, or a shared task, which computes segments for several query blocks. */
typedef struct ca_costed {
    ca_task task;
    int64_t cost;    /* for one kv head: first that of the task, then that of a piece */
    int32_t whole;   /* it is one task that finishes at once, without parts to merge */
    int32_t pieces;  /* tasks that it becomes: num_segments where it hands them out one by one, 1, or 0 where all are
                        left to the merge */
    int32_t shared;  /* parts of a query block that come from shared tasks */
    int32_t members; /* query blocks that a shared task is for */
    /* A shared task has its members from here on in ca_list.members; the next part of a query block goes here. */
    int32_t first;
} ca_costed;

typedef struct ca_list {
    ca_costed *at; /* query blocks, then shared tasks */
    int64_t num_blocks, count, room;
    int32_t *members; /* query blocks that share, as indices into `at` */
} ca_list;

/* Returns how many query tokens a task has: as many as fill the engine's rows, but one where each selects its keys.
 * Where query_block_size of them share a list of selected_blocks, these are cut into equal tasks. */
static inline int64_t ca_block_tokens(const ca_plan *p) {
    const int rows = p->engine->rows ? p->engine->rows(p->kernel) : p->kernel->info.rows;
    const int64_t most = ca_max64(1, rows / p->group_size), size = p->shape.query_block_size;
    if (p->shape.max_selected_tokens)
        return 1;
    return size ? ca_div_up(size, ca_div_up(size, most)) : most;
}

/* A task costs its query rows times its keys, and LOAD rows more for reading each key. On a Zen 4 core, which reads 33
 * GB/s and computes 230 GFLOP/s in bfloat16, reading costs as much as 6 rows. */
#define LOAD 8

static inline int64_t ca_cost_of(const ca_plan *p, const ca_task *task, int64_t keys) {
    return ca_max64(1, keys) * (ca_rows_of(p, task) + LOAD);
}

/* Fills lo, hi and tree of a plan that has none yet, for its lengths and window. */
int ca_take_masks(ca_plan *plan, const ca_masks *masks, ca_fault *fault);

/* Adds a task for each group of query blocks that meet the same physical blocks from their first key on, and takes
 * these segments from the query blocks. Returns CA_OK, CA_NO_MEMORY or CA_BLOCK_TABLE_SHORT. */
int ca_share(ca_plan *plan, const ca_array *table, ca_list *list, ca_fault *fault);

/* Sorts the tasks by the NUMA nodes of the blocks that they read: nodes[block] is that of a block. Returns CA_OK or why
 * not: CA_NO_MEMORY, or what is in *fault. */
int ca_order_by_node(ca_plan *plan, const ca_array *table, const ca_array *nodes, ca_fault *fault);
#endif
