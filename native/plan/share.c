/* SPDX-License-Identifier: Apache-2.0
 * This file finds query blocks that see the same physical blocks, so that one task can read these for all of them
 * (cascade inference: FlashInfer's, flashinfer.ai/2024/02/02/cascade-inference.html; RadixAttention's tree,
 * arXiv:2312.07104).
 *
 * Whole segments from the first key on are shared. A segment is the unit in which results are defined: a row's state
 * over a segment has the same bits whichever task computes it, and merges in the same place. Sorting the block tables
 * brings the requests of every shared prefix side by side. One pass over neighbours then finds how much they have in
 * common, and the tree of prefixes follows from these numbers: what all requests of a run have in common is shared by
 * the run, and the rest by the runs within it. */
#include "check/check.h"
#include "plan.h"
#include <stdlib.h>

/* Describes a query block that may share. */
typedef struct sharer {
    const int32_t *blocks; /* its request's row of the table, copied */
    int64_t num_blocks;    /* blocks that hold the segments */
    int32_t segments;      /* segments that all its rows see whole */
    int32_t size;          /* keys of a segment */
    int32_t listed;        /* its index in the list */
    int32_t common;        /* segments that the next sharer has too */
    int64_t token;         /* where in plan->tokens its query tokens begin */
} sharer;

static int64_t first_difference(const sharer *x, const sharer *y) {
    int64_t n = ca_min64(x->num_blocks, y->num_blocks), i = 0;
    while (i < n && x->blocks[i] == y->blocks[i])
        i++;
    return i;
}

/* Orders tables by their bytes: any order will do that keeps common beginnings together. */
static int in_order(const void *a, const void *b) {
    const sharer *x = a, *y = b;
    if (x->size != y->size)
        return x->size < y->size ? -1 : 1;
    int order = memcmp(x->blocks, y->blocks, (size_t)ca_min64(x->num_blocks, y->num_blocks) * sizeof *x->blocks);
    if (order)
        return order;
    if (x->num_blocks != y->num_blocks)
        return x->num_blocks < y->num_blocks ? -1 : 1;
    return x->listed < y->listed ? -1 : 1;
}

/* Finds the query blocks that read more than they compute, and of which a task holds several. Returns how many there
 * are, or -1 where the table is too short. */
static int64_t find_sharers(const ca_plan *p, const ca_array *table, const ca_list *list, sharer *x, int32_t *blocks,
                            ca_fault *fault) {
    int64_t n = 0, block_size = p->shape.block_size;
    for (int64_t i = 0; i < list->num_blocks && !p->tree; i++) { /* a tree mask may hide keys below hi */
        const ca_task *task = &list->at[i].task;
        int64_t lo, hi, unused, size = ca_segment_keys(p->seq_lens[task->request]);
        ca_visible(p, task->request, task->token, &unused, &hi);
        ca_visible(p, task->request, task->token + task->num_tokens - 1, &lo, &unused);
        if (lo > 0 || hi < size || ca_rows_of(p, task) > CA_FEW_ROWS || 2 * task->num_tokens > ca_block_tokens(p))
            continue;
        int64_t num_blocks = ca_div_up(hi / size * size, block_size);
        if (num_blocks > table->shape[1]) {
            ca_fail(fault, CA_BLOCK_TABLE_SHORT, task->request, -1, num_blocks, table->shape[1]);
            return -1;
        }
        memcpy(blocks, (const int32_t *)table->address + task->request * table->strides[0],
               (size_t)num_blocks * sizeof *blocks);
        x[n++] = (sharer){.blocks = blocks,
                          .num_blocks = num_blocks,
                          .segments = (int32_t)(hi / size),
                          .size = (int32_t)size,
                          .listed = (int32_t)i};
        blocks += num_blocks;
    }
    return n;
}

/* Sorts the sharers and finds what each has in common with the next. Returns how many have anything in common with
 * it. */
static int64_t compare(sharer *x, int64_t n, int64_t block_size) {
    int64_t neighbours = 0;
    qsort(x, (size_t)n, sizeof *x, in_order);
    for (int64_t i = 0; i + 1 < n; i++) {
        int64_t blocks = x[i].size == x[i + 1].size ? first_difference(&x[i], &x[i + 1]) : 0;
        int64_t most = ca_min64(x[i].segments, x[i + 1].segments);
        x[i].common = (int32_t)ca_min64(most, blocks * block_size / x[i].size);
        neighbours += x[i].common > 0;
    }
    return neighbours;
}

/* Keeps the query tokens of the sharers in this order, and which requests have to share which blocks in the table of a
 * call, too. */
static int keep(ca_plan *p, ca_list *list, sharer *x, int64_t n, int64_t neighbours) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < n; i++)
        tokens += list->at[x[i].listed].task.num_tokens;
    list->members = malloc(sizeof *list->members * (size_t)n);
    p->tokens = malloc(sizeof *p->tokens * (size_t)tokens);
    p->same = malloc(sizeof *p->same * (size_t)neighbours);
    if (!list->members || !p->tokens || !p->same)
        return CA_NO_MEMORY;
    tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        const ca_task *task = &list->at[x[i].listed].task;
        list->members[i] = x[i].listed;
        x[i].token = tokens;
        for (int32_t j = 0; j < task->num_tokens; j++)
            p->tokens[tokens++] = ca_token_at(p, task, j);
        if (x[i].common > 0)
            p->same[p->num_same++] =
                (ca_same){task->request, list->at[x[i + 1].listed].task.request,
                          (int32_t)ca_div_up((int64_t)x[i].common * x[i].size, p->shape.block_size)};
    }
    return CA_OK;
}

/* Adds a task for the segments [s, end) of the sharers [a, b), whose segments before s other tasks compute. */
static int add_task(ca_plan *p, ca_list *list, const sharer *x, int64_t a, int64_t b, int32_t s, int32_t end) {
    if (list->count == list->room) {
        ca_costed *more = realloc(list->at, sizeof *more * (size_t)(list->room *= 2));
        if (!more)
            return CA_NO_MEMORY;
        list->at = more;
    }
    ca_costed *c = &list->at[list->count++];
    *c = (ca_costed){.task = {.request = p->tokens[x[a].token].request,
                              .segment = s,
                              .num_segments = end - s,
                              .shared = (int32_t)x[a].token + 1,
                              .partial = -1},
                     .pieces = s > 0 ? end - s : 1, /* the task merges segments from the first on by itself */
                     .first = (int32_t)a,
                     .members = (int32_t)(b - a)};
    for (int64_t i = a; i < b; i++) {
        ca_costed *block = &list->at[x[i].listed];
        int64_t k0, k1;
        ca_task_keys(p, &block->task, &k0, &k1);
        block->task.num_segments -= end - block->task.segment;
        block->task.segment = end;
        block->whole = block->pieces = 0;
        block->cost = ca_cost_of(p, &block->task, k1 - (int64_t)end * x[i].size);
        c->task.num_tokens += block->task.num_tokens;
    }
    c->cost = ca_cost_of(p, &c->task, (int64_t)x[a].size * (end - s) / c->pieces);
    p->rows = (int32_t)ca_max64(p->rows, ca_rows_of(p, &c->task));
    return CA_OK;
}

/* Adds as many tasks as the engine's rows ask for, about equal ones, for the segments [s, end) of the sharers [a,
 * b). */
static int add_tasks(ca_plan *p, ca_list *list, const sharer *x, int64_t a, int64_t b, int32_t s, int32_t end) {
    int64_t most = ca_block_tokens(p), tokens = 0, here = 0;
    for (int64_t i = a; i < b; i++)
        tokens += list->at[x[i].listed].task.num_tokens;
    int64_t enough = ca_div_up(tokens, ca_div_up(tokens, most));
    for (int64_t i = a; i < b; i++) {
        here += list->at[x[i].listed].task.num_tokens;
        if (i + 1 < b && here < enough && here + list->at[x[i + 1].listed].task.num_tokens <= most)
            continue;
        int status = add_task(p, list, x, a, i + 1, s, end);
        if (status)
            return status;
        a = i + 1;
        here = 0;
    }
    return CA_OK;
}

/* Adds the tasks of the sharers [a, b), which have the segments before s in common. Every level of the recursion takes
 * at least one segment more, so that there are 64 at most. */
static int add_tree(ca_plan *p, ca_list *list, const sharer *x, int64_t a, int64_t b, int32_t s) {
    int32_t end = INT32_MAX;
    for (int64_t i = a; i + 1 < b; i++)
        end = (int32_t)ca_min64(end, x[i].common);
    int status = end > s ? add_tasks(p, list, x, a, b, s, end) : CA_OK;
    for (int64_t last; !status && a < b; a = last + 1) {
        for (last = a; last + 1 < b && x[last].common > end;)
            last++;
        if (last > a)
            status = add_tree(p, list, x, a, last + 1, end);
    }
    return status;
}

int ca_share(ca_plan *p, const ca_array *table, ca_list *list, ca_fault *fault) {
    /* Full query blocks do not share, so a request has at most one sharer: its last query block. */
    const int64_t num_reqs = p->shape.num_reqs;
    const int64_t most = ca_min64(p->num_keys / p->shape.block_size + num_reqs, num_reqs * table->shape[1]);
    sharer *x = malloc(sizeof *x * (size_t)ca_max64(1, list->num_blocks) + sizeof(int32_t) * (size_t)most);
    if (!x)
        return CA_NO_MEMORY;
    int32_t *blocks = (int32_t *)(x + ca_max64(1, list->num_blocks));
    int64_t n = find_sharers(p, table, list, x, blocks, fault),
            neighbours = n > 0 ? compare(x, n, p->shape.block_size) : 0;
    int status = n < 0 ? CA_BLOCK_TABLE_SHORT : CA_OK;
    if (neighbours) {
        status = keep(p, list, x, n, neighbours);
        if (!status)
            status = add_tree(p, list, x, 0, n, 0);
    }
    free(x);
    return status;
}
