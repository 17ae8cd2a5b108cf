/* SPDX-License-Identifier: Apache-2.0
 * Metadata of a step: which query rows meet which keys, cut into tasks that threads take.
 * What a task computes never depends on how many tasks or threads there are: query blocks start
 * at a request's first token, segments of keys at its first key. */
#include "cpu_attn.h"
#include <stdlib.h>
#include <string.h>

static int fail(ca_fault *fault, int status, int64_t request, int64_t position, int64_t value, int64_t bound) {
    *fault = (ca_fault){status, request, position, value, bound};
    return status;
}

#define MAX_TASKS (1 << 24) /* half a gigabyte of them: 10^9 query rows */

static int check_lengths(const ca_shape *s, const int32_t *seq_lens, const int32_t *query_start_loc, ca_fault *fault) {
    for (int32_t r = 0; r < s->num_reqs; r++) {
        if (seq_lens[r] < 0)
            return fail(fault, CA_BAD_SEQ_LEN, r, r, seq_lens[r], 0);
        if (query_start_loc[r + 1] < query_start_loc[r])
            return fail(fault, CA_BAD_QUERY_START_LOC, r, r + 1, query_start_loc[r + 1], query_start_loc[r]);
    }
    if (query_start_loc[0] != 0)
        return fail(fault, CA_BAD_QUERY_START_LOC, -1, 0, query_start_loc[0], 0);
    return CA_OK;
}

static int64_t align(int64_t bytes) { return ca_round_up(bytes, 64); }

static int64_t state_floats(const ca_plan *p, int64_t rows) { return rows * ((int64_t)p->shape.head_size_v + 2); }

static int64_t group(const ca_plan *p) { return p->shape.num_heads / p->shape.num_kv_heads; }

/* Query tokens of a task: as many as fill the engine's rows. */
static int64_t block_tokens(const ca_plan *p) { return ca_max64(1, p->engine->rows(p->kernel) / group(p)); }

static int64_t count_tasks(const ca_plan *p) {
    int64_t n = 0;
    for (int32_t r = 0; p->query_start_loc && r < p->shape.num_reqs; r++)
        n += ca_div_up((int64_t)p->query_start_loc[r + 1] - p->query_start_loc[r], block_tokens(p));
    return n;
}

static int64_t task_keys(const ca_plan *p, const ca_task *t) {
    int64_t k0, k1;
    ca_task_keys(p, t, &k0, &k1);
    return k1 - k0;
}

static void set_segments(const ca_plan *p, ca_task *t) {
    int64_t k0, k1, size = ca_segment_keys(p->seq_lens[t->request]);
    ca_task_keys(p, t, &k0, &k1);
    t->segment = (int32_t)(k0 / size);
    t->num_segments = k1 > k0 ? (int32_t)(ca_div_up(k1, size) - t->segment) : 0;
    t->partial = -1;
}

static void list_tasks(ca_plan *p) {
    int64_t step = block_tokens(p);
    ca_task *t = p->tasks;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = (int64_t)p->query_start_loc[r + 1] - p->query_start_loc[r];
        /* the last block of a causal request is its longest */
        for (int64_t i = (q_len - 1) / step * step; q_len > 0 && i >= 0; i -= step, t++) {
            t->request = r;
            t->token = (int32_t)i;
            t->num_tokens = (int32_t)ca_min64(step, q_len - i);
            p->rows = (int32_t)ca_max64(p->rows, t->num_tokens * group(p));
            set_segments(p, t);
        }
    }
    p->num_tasks = t - p->tasks;
}

/* Where tasks leave threads idle, long ones hand out their segments one by one; the partial
 * results are merged in the order of the segments, as one thread would have merged them. */
static int split_tasks(ca_plan *p) {
    int64_t wanted = 4 * (int64_t)p->shape.num_threads, items = p->num_tasks * p->shape.num_kv_heads;
    if (!p->shape.enable_kv_split || p->shape.num_threads < 2 || items == 0 || items >= wanted)
        return CA_OK;
    int64_t total = 0, floats = 0;
    for (int64_t i = 0; i < p->num_tasks; i++)
        total += ca_max64(1, p->tasks[i].num_segments);
    ca_task *split = malloc(sizeof *split * (size_t)total), *next = split;
    p->merges = malloc(sizeof *p->merges * (size_t)p->num_tasks);
    if (!split || !p->merges) {
        free(split);
        return CA_NO_MEMORY;
    }
    for (int64_t i = 0; i < p->num_tasks; i++) {
        ca_task whole = p->tasks[i];
        if (whole.num_segments < 2) {
            *next++ = whole;
            continue;
        }
        int64_t slot = state_floats(p, whole.num_tokens * group(p)) * p->shape.num_kv_heads;
        whole.partial = floats;
        p->merges[p->num_merges++] = whole;
        for (int32_t s = 0; s < whole.num_segments; s++, floats += slot) {
            *next = whole;
            next->segment = whole.segment + s;
            next->num_segments = 1;
            next->partial = floats;
            next++;
        }
    }
    free(p->tasks);
    p->tasks = split;
    p->num_tasks = next - split;
    p->partial_bytes = align(floats * (int64_t)sizeof(float));
    return CA_OK;
}

typedef struct ranked {
    int64_t cost;
    ca_task task;
} ranked;

static int by_cost(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost < y->cost ? 1 : -1;
    if (x->task.request != y->task.request)
        return x->task.request < y->task.request ? -1 : 1;
    if (x->task.token != y->task.token)
        return x->task.token < y->task.token ? -1 : 1;
    return x->task.segment < y->task.segment ? -1 : x->task.segment > y->task.segment;
}

/* Longest first: the last task a thread takes is a short one. */
static int sort_tasks(ca_plan *p) {
    ranked *list = malloc(sizeof *list * (size_t)ca_max64(1, p->num_tasks));
    if (!list)
        return CA_NO_MEMORY;
    int sorted = 1;
    for (int64_t i = 0; i < p->num_tasks; i++) {
        const ca_task *t = &p->tasks[i];
        int64_t keys = task_keys(p, t), size = ca_segment_keys(p->seq_lens[t->request]);
        list[i].task = *t;
        list[i].cost = ca_min64(keys, t->num_segments * size) * t->num_tokens;
        sorted &= i == 0 || list[i - 1].cost >= list[i].cost;
    }
    if (!sorted) {
        qsort(list, (size_t)p->num_tasks, sizeof *list, by_cost);
        for (int64_t i = 0; i < p->num_tasks; i++)
            p->tasks[i] = list[i].task;
    }
    free(list);
    return CA_OK;
}

static int fill(ca_plan *p, const int32_t *seq_lens, const int32_t *query_start_loc, const int32_t *dynamic_causal) {
    size_t n = (size_t)p->shape.num_reqs;
    p->query_start_loc = malloc((n + 1) * sizeof(int32_t));
    p->seq_lens = malloc((n + 1) * sizeof(int32_t));
    p->causal = malloc((n + 1) * sizeof(int32_t));
    if (!p->query_start_loc || !p->seq_lens || !p->causal)
        return CA_NO_MEMORY;
    memcpy(p->query_start_loc, query_start_loc, (n + 1) * sizeof(int32_t));
    memcpy(p->seq_lens, seq_lens, n * sizeof(int32_t));
    for (size_t r = 0; r < n; r++)
        p->causal[r] = dynamic_causal ? dynamic_causal[r] != 0 : p->shape.causal;
    p->num_tokens = query_start_loc[n];
    p->rows = 1;
    if (count_tasks(p) > MAX_TASKS)
        return CA_TOO_MANY_TASKS;
    p->tasks = malloc(sizeof *p->tasks * (size_t)ca_max64(1, count_tasks(p)));
    if (!p->tasks)
        return CA_NO_MEMORY;
    list_tasks(p);
    if (split_tasks(p) || sort_tasks(p))
        return CA_NO_MEMORY;
    p->state_bytes = align(state_floats(p, p->rows) * (int64_t)sizeof(float));
    p->scratch_bytes = align(p->engine->scratch_bytes(p));
    p->thread_bytes = 2 * p->state_bytes + p->scratch_bytes;
    return CA_OK;
}

ca_plan *ca_plan_new(const ca_shape *shape, const ca_engine *engine, const int32_t *seq_lens,
                     const int32_t *query_start_loc, const int32_t *dynamic_causal, ca_fault *fault) {
    fail(fault, CA_OK, -1, -1, -1, -1);
    if (check_lengths(shape, seq_lens, query_start_loc, fault))
        return NULL;
    ca_plan *p = calloc(1, sizeof *p);
    if (p) {
        p->shape = *shape;
        p->engine = engine;
        p->kernel = ca_isa_get(shape->isa)->kernels[shape->dtype];
        int status = fill(p, seq_lens, query_start_loc, dynamic_causal);
        if (status == CA_OK)
            return p;
        fail(fault, status, -1, -1, count_tasks(p), MAX_TASKS);
    } else {
        fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    }
    ca_plan_free(p);
    return NULL;
}

void ca_plan_free(ca_plan *p) {
    if (!p)
        return;
    free(p->query_start_loc);
    free(p->seq_lens);
    free(p->causal);
    free(p->tasks);
    free(p->merges);
    free(p);
}

void ca_plan_describe(const ca_plan *p, ca_plan_info *out) {
    *out = (ca_plan_info){
        .num_tokens = p->num_tokens,
        .num_tasks = p->num_tasks,
        .num_splits = p->num_merges,
        .workspace_bytes = p->shape.num_threads * p->thread_bytes + p->partial_bytes,
        .rows = p->rows,
    };
}

int64_t ca_plan_visible_pairs(const ca_plan *p) {
    int64_t pairs = 0, lo, hi;
    for (int32_t r = 0; r < p->shape.num_reqs; r++)
        for (int64_t i = 0; i < p->query_start_loc[r + 1] - p->query_start_loc[r]; i++) {
            ca_visible(p, r, i, &lo, &hi);
            pairs += hi - lo;
        }
    return pairs * p->shape.num_heads;
}
