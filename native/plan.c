/* SPDX-License-Identifier: Apache-2.0
 * Metadata of a step: which query rows meet which keys, cut into tasks that threads take.
 * What a task computes never depends on how many tasks or threads there are: query blocks start
 * at a request's first token, segments of keys at its first key. */
#include "cpu_attn.h"
#include <stdlib.h>
#include <string.h>

static int fail(ca_fault *fault, int status, int64_t request, int64_t position, int64_t value, int64_t bound) {
    *fault = (ca_fault){status, request, position, value, bound, -1};
    return status;
}

#define MAX_TASKS (1 << 24) /* half a gigabyte of them: 10^9 query rows */

static int64_t align(int64_t bytes) { return ca_round_up(bytes, 64); }

static int64_t state_floats(const ca_plan *p, int64_t rows) { return rows * ((int64_t)p->shape.head_size_v + 2); }

static int64_t group(const ca_plan *p) { return p->shape.num_heads / p->shape.num_kv_heads; }

/* Query tokens of a task: as many as fill the engine's rows. */
static int64_t block_tokens(const ca_plan *p) { return ca_max64(1, p->engine->rows(p->kernel) / group(p)); }

static int64_t count_tasks(const ca_plan *p) {
    int64_t n = 0, step = block_tokens(p);
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = (int64_t)p->query_start_loc[r + 1] - p->query_start_loc[r];
        n += q_len <= step ? q_len > 0 : ca_div_up(q_len, step);
    }
    return n;
}

typedef struct costed {
    ca_task task;
    int64_t cost;   /* of one kv head: of the task, then of a piece */
    int32_t pieces; /* num_segments, if it hands them out one by one, or 1 */
} costed;

/* What a task costs: query rows times keys, and LOAD rows' worth for reading a key (33 GB/s and 230 GFLOP/s of a Zen 4
 * core, bfloat16: 6 rows). */
#define LOAD 8

static int64_t cost_of(const ca_plan *p, const ca_task *t, int64_t keys) {
    return ca_max64(1, keys) * (t->num_tokens * group(p) + LOAD);
}

/* Whole tasks in the order of the requests; returns what they cost together. */
static double list_tasks(ca_plan *p, costed *list) {
    int64_t step = block_tokens(p);
    double total = 0;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = (int64_t)p->query_start_loc[r + 1] - p->query_start_loc[r];
        /* the last block of a causal request is its longest */
        for (int64_t i = q_len <= step ? 0 : (q_len - 1) / step * step; q_len > 0 && i >= 0; i -= step, list++) {
            ca_task *t = &list->task;
            *t = (ca_task){.request = r, .token = (int32_t)i, .num_tokens = (int32_t)ca_min64(step, q_len - i)};
            p->rows = (int32_t)ca_max64(p->rows, t->num_tokens * group(p));
            int64_t k0, k1, size = ca_segment_keys(p->seq_lens[r]);
            ca_task_keys(p, t, &k0, &k1);
            t->segment = (int32_t)k0 / (int32_t)size;
            t->num_segments = k1 > k0 ? (int32_t)(k1 - 1) / (int32_t)size + 1 - t->segment : 0;
            t->partial = -1;
            list->pieces = 1;
            list->cost = cost_of(p, t, k1 - k0);
            total += (double)list->cost;
        }
    }
    return total;
}

/* Threads take tasks longest first, so that the last to finish waits for less than one task: one of more than a quarter
 * of a thread's share hands out its segments one by one. Fewer than 4 * num_threads items are so long, which bounds the
 * partial results. */
static void split_tasks(const ca_plan *p, costed *list, int64_t num_listed, double total) {
    double limit = total * p->shape.num_kv_heads / (4 * p->num_threads);
    if (!p->shape.enable_kv_split || p->num_threads < 2)
        return;
    for (costed *c = list; c < list + num_listed; c++)
        if ((double)c->cost > limit && c->task.num_segments > 1) {
            c->pieces = c->task.num_segments;
            c->cost = ca_min64(c->cost, cost_of(p, &c->task, ca_segment_keys(p->seq_lens[c->task.request])));
        }
}

/* Segment by segment, with room for the partial results, which merge in this order as one thread would have merged
 * them. Returns the floats of that room. */
static int64_t put_pieces(const ca_plan *p, const costed *c, int64_t floats, ca_task *to, ca_task *merge) {
    int64_t slot = state_floats(p, c->task.num_tokens * group(p)) * p->shape.num_kv_heads;
    *merge = c->task;
    merge->partial = floats;
    for (int32_t i = 0; i < c->pieces; i++) {
        to[i] = *merge;
        to[i].segment += i;
        to[i].num_segments = 1;
        to[i].partial += i * slot;
    }
    return c->pieces * slot;
}

/* Tasks as threads take them, longest first, or as good as: what is within one part in BUCKETS of the longest keeps its
 * order. */
#define BUCKETS 64

static int order_tasks(ca_plan *p, const costed *list, int64_t num_listed) {
    int64_t longest = 0, next[BUCKETS + 1] = {0}, floats = 0;
    for (const costed *c = list; c < list + num_listed; c++)
        longest = ca_max64(longest, c->cost);
    double scale = BUCKETS / (longest + 1.0);
    for (const costed *c = list; c < list + num_listed; c++) {
        next[(int)((double)(longest - c->cost) * scale) + 1] += c->pieces;
        p->num_merges += c->pieces > 1;
    }
    for (int b = 0; b < BUCKETS; b++)
        next[b + 1] += next[b];
    p->num_tasks = next[BUCKETS];
    p->tasks = malloc(sizeof *p->tasks * (size_t)ca_max64(1, p->num_tasks + p->num_merges));
    if (!p->tasks)
        return CA_NO_MEMORY;
    ca_task *merge = p->merges = p->tasks + p->num_tasks;
    for (const costed *c = list; c < list + num_listed; c++) {
        int64_t *at = &next[(int)((double)(longest - c->cost) * scale)];
        if (c->pieces > 1)
            floats += put_pieces(p, c, floats, p->tasks + *at, merge++);
        else
            p->tasks[*at] = c->task;
        *at += c->pieces;
    }
    p->partial_bytes = align(floats * (int64_t)sizeof(float));
    return CA_OK;
}

/* 100 to 150 multiplications and additions a nanosecond: 64 to 2048 keys, 32/8 heads of 128, bfloat16, Zen 4. */
static int threads_for(const ca_plan *p, double total) {
    double macs = total * p->shape.num_kv_heads * (p->shape.head_size + p->shape.head_size_v);
    return (int)ca_max64(1, ca_min64(p->shape.num_threads, ca_threads_for(macs / 120)));
}

static int fill(ca_plan *p, int64_t num_tasks) {
    costed *list = malloc(sizeof *list * (size_t)ca_max64(1, num_tasks));
    if (!list)
        return CA_NO_MEMORY;
    double total = list_tasks(p, list);
    p->num_threads = threads_for(p, total);
    split_tasks(p, list, num_tasks, total);
    int status = order_tasks(p, list, num_tasks);
    free(list);
    p->state_bytes = align(state_floats(p, p->rows) * (int64_t)sizeof(float));
    p->scratch_bytes = align(p->engine->scratch_bytes(p));
    p->thread_bytes = 2 * p->state_bytes + p->scratch_bytes;
    return status;
}

ca_plan *ca_plan_new(ca_shape *shape, const ca_engine *engine, const uintptr_t *objects, const ca_array *given,
                     const ca_masks *masks, ca_fault *fault) {
    ca_array a[CA_STEP_ARRAYS];
    size_t n = (size_t)shape->num_reqs;
    fail(fault, CA_OK, -1, -1, -1, -1);
    if (!ca_accept_step(objects, given, shape->num_reqs, a)) {
        fail(fault, CA_UNKNOWN, -1, -1, -1, -1);
        return NULL;
    }
    const int32_t *starts = (const int32_t *)a[CA_STEP_QUERY_START_LOC].address;
    const int32_t *lens = (const int32_t *)a[CA_STEP_SEQ_LENS].address;
    const int32_t *flags = (const int32_t *)a[CA_STEP_DYNAMIC_CAUSAL].address;
    ca_plan *p = malloc(sizeof *p + (3 * n + 1) * sizeof(int32_t));
    if (!p) {
        fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
        return NULL;
    }
    *p = (ca_plan){.engine = engine, .kernel = ca_isa_get(shape->isa)->kernels[shape->dtype], .rows = 1};
    p->query_start_loc = (int32_t *)(p + 1);
    p->seq_lens = p->query_start_loc + n + 1;
    p->causal = p->seq_lens + n;
    memcpy(p->query_start_loc, starts, (n + 1) * sizeof(int32_t));
    memcpy(p->seq_lens, lens, n * sizeof(int32_t));
    shape->all_causal = 1;
    for (size_t r = 0; r < n; r++)
        shape->all_causal &= p->causal[r] = flags ? flags[r] != 0 : shape->causal;
    if (!n)
        shape->all_causal = shape->causal;
    if (shape->all_causal)
        shape->window_right = -1;
    p->shape = *shape;
    p->num_tokens = p->query_start_loc[n];
    if (!ca_check_lengths(shape->num_reqs, p->seq_lens, p->query_start_loc, fault) &&
        !(masks && ca_take_masks(p, masks, fault))) {
        int64_t num_tasks = count_tasks(p);
        int status = num_tasks > MAX_TASKS ? CA_TOO_MANY_TASKS : fill(p, num_tasks);
        if (status == CA_OK)
            return p;
        fail(fault, status, -1, -1, num_tasks, MAX_TASKS);
    }
    ca_plan_free(p);
    return NULL;
}

void ca_plan_free(ca_plan *p) {
    if (p) {
        free(p->tasks); /* and merges */
        free(p->lo);    /* and hi and tree */
    }
    free(p);
}

void ca_plan_describe(const ca_plan *p, ca_plan_info *out) {
    *out = (ca_plan_info){
        .num_tokens = p->num_tokens,
        .num_tasks = p->num_tasks,
        .num_splits = p->num_merges,
        .workspace_bytes = p->num_threads * p->thread_bytes + p->partial_bytes,
        .rows = p->rows,
        .num_threads = p->num_threads,
    };
}

int64_t ca_plan_visible_pairs(const ca_plan *p) {
    int64_t pairs = 0, lo, hi, end;
    for (int32_t r = 0; r < p->shape.num_reqs; r++)
        for (int64_t i = 0; i < p->query_start_loc[r + 1] - p->query_start_loc[r]; i++) {
            ca_visible(p, r, i, &lo, &hi);
            for (; ca_run(ca_tree_row(p, r, i), ca_context(p, r), hi, &lo, &end); lo = end)
                pairs += end - lo;
        }
    return pairs * p->shape.num_heads;
}
