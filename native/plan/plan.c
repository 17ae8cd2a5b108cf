/* SPDX-License-Identifier: Apache-2.0
 * This file makes the metadata of a step: which query rows meet which keys, cut into tasks that threads take. What a
 * task computes never depends on how many tasks or threads there are: query blocks start at a request's first token,
 * and segments of keys at its first key. */
#include "check/check.h"
#include "plan.h"
#include "sparse/selected_tokens.h"
#include "run/threads.h"
#include <stdlib.h>
#include <string.h>

#define MAX_TASKS (1 << 24) /* they take half a gigabyte and have 10^9 query rows */

static int64_t count_blocks(const ca_plan *p) {
    int64_t n = 0, step = ca_block_tokens(p), size = p->shape.query_block_size ? p->shape.query_block_size : step;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = ca_q_len(p, r);
        n += q_len <= step ? q_len > 0 : q_len / size * ca_div_up(size, step) + ca_div_up(q_len % size, step);
    }
    return n;
}

/* Returns where the task begins that ends before query token `end`: at a multiple of `step`, counted from the first
 * token that shares its list. */
static int64_t first_of(const ca_plan *p, int64_t step, int64_t end) {
    if (end <= step)
        return 0;
    int64_t last = end - 1, first = p->shape.query_block_size ? last - last % p->shape.query_block_size : 0;
    return last - (last - first) % step;
}

/* Dividing by `size`, which is nearly always 1024, took a tenth of a plan's time. */
static int32_t segment_of(int32_t key, int32_t size) { return size == 1024 ? key / 1024 : key / size; }

/* Lists whole query blocks in the order of the requests, and returns what they cost together. */
static double list_blocks(ca_plan *p, ca_costed *c) {
    int64_t step = ca_block_tokens(p), num_keys = 0;
    int32_t *const first_key = p->first_key, *const end_key = p->end_key;
    const int32_t list_tokens = p->shape.query_block_size;
    double total = 0;
    p->first_list[0] = 0;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = ca_q_len(p, r), first = INT32_MAX, end = 0;
        /* The last query block of a causal request has the most keys, so it is listed first. */
        for (int64_t i, next = q_len; next > 0; next = i, c++) {
            i = first_of(p, step, next);
            *c = (ca_costed){
                .task = {.request = r, .token = (int32_t)i, .num_tokens = (int32_t)(next - i), .partial = -1},
                .whole = 1,
                .pieces = 1};
            ca_task *task = &c->task;
            const int32_t rows = (int32_t)ca_rows_of(p, task);
            p->rows = (int32_t)ca_max64(p->rows, rows);
            if (rows <= CA_FEW_ROWS)
                p->few_rows = (int32_t)ca_max64(p->few_rows, rows);
            int64_t k0, k1, size = ca_plan_segment_keys(p, r);
            ca_task_keys(p, task, &k0, &k1);
            if (k0 < k1) {
                first = ca_min64(first, k0);
                end = ca_max64(end, k1);
            }
            if (p->shape.max_selected_tokens) {
                k1 = ca_min64(p->shape.max_selected_tokens, k1 - k0);
                k0 = 0;
            }
            c->cost = ca_cost_of(p, task, k1 - k0);
            k0 = list_tokens ? 0 : k0; /* segments are those of the list, which begins anywhere before k0 */
            task->segment = segment_of((int32_t)k0, (int32_t)size);
            task->num_segments = k1 > k0 ? segment_of((int32_t)k1 - 1, (int32_t)size) + 1 - task->segment : 0;
            total += (double)c->cost;
        }
        first = ca_min64(first, end);
        first_key[r] = (int32_t)first;
        end_key[r] = (int32_t)end;
        p->first_list[r + 1] = p->first_list[r] + (list_tokens ? (int32_t)ca_div_up(q_len, list_tokens) : 1);
        num_keys += end - first;
    }
    p->num_keys = num_keys;
    return total;
}

static double total_cost(const ca_list *list) {
    double total = 0;
    for (const ca_costed *c = list->at; c < list->at + list->count; c++)
        total += (double)c->cost * (c->members ? c->pieces : 1);
    return total;
}

/* Threads take tasks longest first, so that the last one to finish keeps the others waiting for less than one task. A
 * task that costs more than a quarter of a thread's share therefore hands out its segments one by one. Fewer than 4 *
 * num_threads items are so long, and they have no more segments than MOST_PIECES, which bounds the partial results.
 * Over NHD the kv heads of a task are one item, and it is not its heads but its segments that are handed out. */
#define MOST_PIECES 64
static void split_tasks(const ca_plan *p, ca_list *list, double total) {
    double limit = total * (p->heads_together > 1 ? 1 : p->shape.num_kv_heads) / (4 * p->num_threads);
    if (!p->shape.enable_kv_split || p->num_threads < 2)
        return;
    for (ca_costed *c = list->at; c < list->at + list->count; c++)
        if ((double)c->cost > limit && c->task.num_segments > c->pieces && c->task.num_segments <= MOST_PIECES) {
            c->whole = 0;
            c->pieces = c->task.num_segments;
            c->cost = ca_min64(c->cost, ca_cost_of(p, &c->task, ca_plan_segment_keys(p, c->task.request)));
        }
}

/* Over other caches several kv heads of a task are one item, as long as that costs no more than a quarter of a thread's
 * share. */
static int32_t heads_of_item(const ca_plan *p, int64_t longest, double total) {
    const double most = total * p->shape.num_kv_heads / (4 * p->num_threads) / (double)longest;
    return (int32_t)fmax(1, fmin(most, (double)ca_min64(CA_HEADS, p->shape.num_kv_heads)));
}

static int64_t longest_of(const ca_list *list) {
    int64_t longest = 1;
    for (const ca_costed *c = list->at; c < list->at + list->count; c++)
        longest = ca_max64(longest, c->cost);
    return longest;
}

static void count_shared(ca_plan *p, const ca_list *list) {
    for (const ca_costed *c = list->at + list->num_blocks; c < list->at + list->count; c++) {
        p->num_shared += c->pieces;
        for (int32_t i = 0; i < c->members; i++)
            list->at[list->members[c->first + i]].shared += c->pieces;
    }
}

/* Gives the tasks that c became room for partial results, from `floats` on, and gives the query blocks whose rows are
 * in these tasks their parts. Returns how many floats that takes. */
static int64_t put_parts(const ca_plan *p, const ca_list *list, ca_costed *c, int64_t floats, ca_task *to,
                         ca_part *parts) {
    int32_t rows = (int32_t)ca_rows_of(p, &c->task), row = 0;
    int64_t slot = ca_state_floats(p, rows) * p->shape.num_kv_heads;
    for (int32_t i = 0; i < c->pieces; i++)
        to[i].partial = floats + i * slot;
    for (int32_t m = 0; m < ca_max64(1, c->members); m++) {
        ca_costed *block = c->members ? &list->at[list->members[c->first + m]] : c;
        for (int32_t i = 0; i < c->pieces; i++)
            parts[block->first++] = (ca_part){to[i].partial, rows, row};
        row += (int32_t)ca_rows_of(p, &block->task);
    }
    return c->pieces * slot;
}

/* Threads take tasks longest first, or nearly so: tasks whose costs are within one part in BUCKETS of the longest keep
 * their order. All tasks keep it where no item is more than a BUCKETS-th of a thread's share, so that tasks that meet
 * the same keys stay together (MEASUREMENTS.md: tasks). */
#define BUCKETS 64

static int order_tasks(ca_plan *p, ca_list *list, int64_t longest, double total) {
    int64_t next[BUCKETS + 1] = {0}, floats = 0, num_parts = 0;
    count_shared(p, list);
    const double share = total * p->shape.num_kv_heads / p->num_threads, item = (double)longest * p->heads_together;
    const double scale = BUCKETS * item <= share ? 0 : BUCKETS / (longest + 1.0);
    for (ca_costed *c = list->at; c < list->at + list->count; c++) {
        next[(int)((double)(longest - c->cost) * scale) + 1] += c->pieces;
        if (!c->whole && !c->members) {
            c->first = (int32_t)num_parts;
            num_parts += c->shared + c->pieces;
            p->num_merges++;
        }
    }
    for (int b = 0; b < BUCKETS; b++)
        next[b + 1] += next[b];
    p->num_tasks = next[BUCKETS];
    p->tasks = malloc(1 + sizeof *p->tasks * (size_t)p->num_tasks + sizeof *p->merges * (size_t)p->num_merges +
                      sizeof(ca_part) * (size_t)num_parts);
    if (!p->tasks)
        return CA_NO_MEMORY;
    ca_merge *merge = p->merges = (ca_merge *)(p->tasks + p->num_tasks);
    ca_part *parts = (ca_part *)(p->merges + p->num_merges);
    /* Shared tasks come first, since their segments come before those that a query block has for itself. */
    ca_costed *c = list->at + list->num_blocks, *end = list->at + list->count;
    for (int64_t i = 0; i < list->count; i++, c++) {
        if (c == end)
            c = list->at;
        int64_t *at = &next[(int)((double)(longest - c->cost) * scale)];
        ca_task *to = p->tasks + *at;
        *at += c->pieces;
        if (c->whole) {
            *to = c->task;
            continue;
        }
        for (int32_t j = 0; j < c->pieces; j++) {
            to[j] = c->task;
            to[j].segment += j;
            to[j].num_segments = c->pieces > 1 ? 1 : c->task.num_segments;
        }
        floats += put_parts(p, list, c, floats, to, parts);
        if (!c->members) {
            int32_t num = c->shared + c->pieces;
            *merge = (ca_merge){c->task, parts + c->first - num, num};
            merge++->task.num_segments *= c->pieces == 0; /* segments that no task took are left to the merge */
        }
    }
    p->partial_bytes = ca_round_up(floats * (int64_t)sizeof(float), 64);
    p->first_task[1] = p->num_tasks;
    p->num_nodes = 1;
    return CA_OK;
}

/* A thread does 100 to 150 multiplications and additions a nanosecond (MEASUREMENTS.md: tasks). */
static int threads_for(const ca_plan *p, double total) {
    double macs = total * p->shape.num_kv_heads * (p->shape.head_size + p->shape.head_size_v);
    return (int)ca_max64(1, ca_min64(p->shape.num_threads, ca_threads_for(macs / 120)));
}

static int fill(ca_plan *p, const ca_array *table, const ca_array *nodes, int64_t num_blocks, ca_fault *fault) {
    ca_list list = {.num_blocks = num_blocks, .count = num_blocks, .room = ca_max64(1, num_blocks)};
    list.at = malloc(sizeof *list.at * (size_t)list.room);
    if (!list.at)
        return CA_NO_MEMORY;
    double total = list_blocks(p, list.at);
    int status = CA_OK;
    const int selects = p->shape.max_selected_tokens > 0;
    const int together = p->engine->together && p->few_rows && !selects && p->readers == 1;
    const int nhd = p->shape.kv_cache_layout == CA_NHD;
    p->heads_together = 1;
    if (together && nhd && p->kernel->nhd_keys && p->rows == p->few_rows)
        p->heads_together = (int32_t)ca_min64(CA_HEADS, p->shape.num_kv_heads);
    if (p->shape.block_size) {
        status = ca_share(p, table, &list, fault);
        total = total_cost(&list);
    }
    p->num_threads = threads_for(p, total);
    split_tasks(p, &list, total);
    const int64_t longest = longest_of(&list);
    if (together && !nhd)
        p->heads_together = heads_of_item(p, longest, total);
    if (!status)
        status = order_tasks(p, &list, longest, total);
    if (!status && nodes->itemsize)
        status = ca_order_by_node(p, table, nodes, fault);
    free(list.at);
    free(list.members);
    p->state_bytes = ca_max64(ca_state_bytes(p, p->rows), p->heads_together * ca_state_bytes(p, p->few_rows));
    p->scratch_bytes = ca_round_up(selects ? ca_selected_bytes(p) : p->engine->scratch_bytes(p), 64);
    /* A segment of a list of selected blocks may be one block of any size. */
    const int64_t segment = p->shape.query_block_size ? ca_longest(p) : ca_segment_keys(ca_longest(p));
    const int chains = !selects && segment > CA_CHAIN_KEYS;
    p->thread_bytes = (2 + chains) * p->state_bytes + p->scratch_bytes;
    /* rotate_queries needs a head as float32 for each thread, and room for all queries. */
    if (p->shape.hadamard & 1 << K) {
        p->thread_bytes = ca_max64(p->thread_bytes, ca_round_up(p->shape.head_size * (int64_t)sizeof(float), 64));
        p->query_bytes = p->num_tokens * p->shape.num_heads * p->shape.head_size * ca_dtype_size(p->shape.dtype);
    }
    return status;
}

static const ca_masks no_masks = {.tree_rows = -1};

ca_plan *ca_plan_new(ca_shape *shape, const ca_engine *engine, uintptr_t objects, const ca_array *given,
                     const ca_masks *masks, ca_fault *fault) {
    ca_array a[CA_STEP_ARRAYS];
    size_t n = (size_t)shape->num_reqs;
    ca_fit fit = ca_fit_anything(shape->kv_cache_layout);
    fit.sizes[CA_NUM_REQS] = (int64_t)n;
    fit.sizes[CA_NUM_REQS_1] = (int64_t)n + 1;
    if (ca_check_arguments(&ca_step_table, &fit, objects, given, a, fault))
        return NULL;
    const int32_t *starts = (const int32_t *)a[CA_STEP_QUERY_START_LOC].address;
    const int32_t *lens = (const int32_t *)a[CA_STEP_SEQ_LENS].address;
    const int32_t *flags = (const int32_t *)a[CA_STEP_DYNAMIC_CAUSAL].address;
    ca_plan *p = malloc(sizeof *p + (7 * n + 2) * sizeof(int32_t));
    if (!p) {
        ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
        return NULL;
    }
    *p = (ca_plan){.kernel = ca_attention_kernel(shape), .rows = 1};
    p->engine = engine ? engine : &p->kernel->engine;
    p->query_start_loc = (int32_t *)(p + 1);
    p->seq_lens = p->query_start_loc + n + 1;
    p->causal = p->seq_lens + n;
    p->first_key = p->causal + n;
    p->end_key = p->first_key + n;
    p->all_lens = p->end_key + n;
    p->first_list = p->all_lens + n;
    memcpy(p->query_start_loc, starts, (n + 1) * sizeof(int32_t));
    memcpy(p->all_lens, lens, n * sizeof(int32_t));
    shape->all_causal = 1;
    for (size_t r = 0; r < n; r++) {
        p->seq_lens[r] = (int32_t)ca_local_keys(shape, p->all_lens[r]);
        shape->all_causal &= p->causal[r] = flags ? flags[r] != 0 : shape->causal;
    }
    if (!n)
        shape->all_causal = shape->causal;
    if (shape->all_causal)
        shape->window_right = -1;
    p->shape = *shape;
    p->sides[K] = ca_side_of(p->kernel, shape->dtype, K, shape->k_dtype, shape->head_size, shape->kv_cache_layout);
    p->sides[V] = ca_side_of(p->kernel, shape->dtype, V, shape->v_dtype, shape->head_size_v, shape->kv_cache_layout);
    p->group_size = shape->num_heads / shape->num_kv_heads;
    p->readers = 1;
    if (shape->select_by_query_head) {
        p->readers = (int32_t)p->group_size;
        p->shape.num_kv_heads = shape->num_heads;
        p->group_size = 1;
    }
    p->num_tokens = p->query_start_loc[n];
    if (shape->cp_world_size > 1 && !masks)
        masks = &no_masks;
    if (!ca_check_lengths(shape->num_reqs, p->all_lens, p->query_start_loc, fault)) {
        const int64_t num_blocks = count_blocks(p);
        if (num_blocks > MAX_TASKS) {
            ca_fail(fault, CA_TOO_MANY_TASKS, -1, -1, num_blocks, MAX_TASKS);
        } else if (!(masks && ca_take_masks(p, masks, fault))) {
            const int status = fill(p, &a[CA_STEP_BLOCK_TABLE], &a[CA_STEP_BLOCK_NODES], num_blocks, fault);
            if (status == CA_OK)
                return p;
            if (status == CA_NO_MEMORY)
                ca_fail(fault, status, -1, -1, -1, -1);
        }
    }
    ca_plan_free(p);
    return NULL;
}

void ca_plan_free(ca_plan *p) {
    if (p) {
        free(p->tasks); /* the merges and their parts lie behind them */
        free(p->tokens);
        free(p->same);
        free(p->lo); /* hi and tree lie behind it */
    }
    free(p);
}

void ca_plan_describe(const ca_plan *p, ca_plan_info *out) {
    *out = (ca_plan_info){
        .num_tokens = p->num_tokens,
        .num_tasks = p->num_tasks,
        .num_splits = p->num_merges,
        .workspace_bytes = p->num_threads * p->thread_bytes + p->partial_bytes + p->query_bytes,
        .num_threads = p->num_threads,
        .num_shared = p->num_shared,
    };
}

int64_t ca_plan_visible_pairs(const ca_plan *p) {
    int64_t pairs = 0, lo, hi, end;
    for (int32_t r = 0; r < p->shape.num_reqs; r++)
        for (int64_t i = 0; i < ca_q_len(p, r); i++) {
            ca_visible(p, r, i, &lo, &hi);
            for (; ca_run(ca_tree_row(p, r, i), ca_context_keys(p, r), hi, &lo, &end); lo = end)
                pairs += end - lo;
        }
    return pairs * p->shape.num_heads;
}
