/* SPDX-License-Identifier: Apache-2.0
 * This file defines a plan: which query rows meet which keys, cut into tasks. */
#ifndef CPU_ATTN_TASKS_H
#define CPU_ATTN_TASKS_H
#include "cache/side.h"
#include "cpu_attn.h"

/* Names a query token by its request and its number there. */
typedef struct ca_token {
    int32_t request, token;
} ca_token;

/* A task is query tokens [token, token + num_tokens) of a request against the keys of segments [segment, segment +
 * num_segments), for one kv head at a time. Its row r is query token token + r / group of query head kv_head * group +
 * r % group. */
typedef struct ca_task {
    int32_t request, token, num_tokens;
    int32_t segment, num_segments;
    /* shared is 0, or 1 + where in plan->tokens the task's query tokens are: those of several requests, whose blocks
     * are the same in these segments, and who see all of their keys. */
    int32_t shared;
    int64_t partial; /* where its partial results start, in floats; -1: it finishes at once */
} ca_task;

/* Names the rows from `row` on of partial results for `rows` rows; those of kv head 0 start at `partial`. */
typedef struct ca_part {
    int64_t partial;
    int32_t rows, row;
} ca_part;

/* A merge finishes a query block whose keys, or some of them, were handed out. Their results merge in the order of the
 * parts, which is that of the keys. The segments of `task` come after them; no task has computed these, so the merge
 * does. */
typedef struct ca_merge {
    ca_task task;
    const ca_part *parts;
    int64_t num_parts;
} ca_merge;

/* Names two requests for both of which a task reads the first blocks. */
typedef struct ca_same {
    int32_t request, other, num_blocks;
} ca_same;

/* A task of up to so many rows reads more than it computes, so its score blocks have FEW_KEYS keys (parameters.h), and
 * it may share. */
#define CA_FEW_ROWS 16

struct ca_plan {
    ca_shape shape;
    const ca_engine *engine;
    const ca_kernel *kernel;
    ca_side sides[2];               /* K, V */
    int64_t num_tokens, group_size; /* group_size: query heads of a kv head */
    /* So many of the plan's kv heads read the same keys. It is 1 except where query heads have lists of their own: then
     * each query head is a kv head to the plan, that is to tasks, states and lists, and only the caches have fewer
     * (ca_kv_block). */
    int32_t readers;
    int32_t *query_start_loc, *seq_lens, *causal; /* seq_lens: keys in the caches; causal[r]: resolved */
    int32_t *all_lens;                            /* keys of each request on all ranks */
    int32_t *first_key, *end_key;                 /* of each request: some row may see the keys [first, end) */
    int64_t num_keys;                             /* keys in these ranges */
    int32_t *first_list; /* [R + 1]: which list of selected_blocks is a request's first: ca_list_of */
    ca_task *tasks;      /* those of one NUMA node after another's, each longest first */
    int64_t num_tasks;
    int64_t first_task[CA_NODES + 1]; /* where the tasks of a node begin */
    int32_t num_nodes;                /* 1 where it is not known where memory lies */
    ca_merge *merges;
    int64_t num_merges;
    int32_t rows;        /* most query rows of a task */
    int32_t few_rows;    /* most query rows of a task of up to CA_FEW_ROWS; 0: there is no such task */
    int32_t num_threads; /* threads that are worth waking, up to shape.num_threads */
    int64_t state_bytes, scratch_bytes, thread_bytes, partial_bytes; /* state_bytes: of all heads of an item */
    /* query_bytes is room for queries that are rotated before any task runs. */
    int64_t query_bytes;
    int32_t heads_together; /* most kv heads of an item; tasks of few rows go through their keys together */
    int32_t *lo, *hi;       /* [num_tokens] where causal and window do not say it all, else NULL: ca_visible */
    uint8_t *tree;          /* [num_tokens][tree_bytes] or NULL: ca_tree_row */
    int64_t tree_bytes;
    int64_t num_shared;
    ca_token *tokens; /* query tokens of the shared tasks */
    ca_same *same;
    int64_t num_same;
};

static inline int64_t ca_rows_of(const ca_plan *plan, const ca_task *task) {
    return task->num_tokens * plan->group_size;
}

static inline ca_token ca_token_at(const ca_plan *plan, const ca_task *task, int64_t i) {
    return task->shared ? plan->tokens[task->shared - 1 + i] : (ca_token){task->request, (int32_t)(task->token + i)};
}
#endif
