/* SPDX-License-Identifier: Apache-2.0
 * This file runs a plan: threads take items, each of them some kv heads of a task, from a counter, then merges from
 * another. Each NUMA node's tasks have a counter of their own, and a thread begins with that of its node. Segments
 * merge in order, so that results do not depend on which thread takes what. */
#include "cache/cache.h"
#include "kernel/kernel.h"
#include "plan/keys.h"
#include "cpu/nodes.h"
#include "sparse/selected_tokens.h"
#include "threads.h"
#include <stdatomic.h>

typedef struct run {
    const ca_plan *plan;
    const ca_call *given, *call; /* call: as given, with rotated queries where K is rotated */
    char *workspace;
    atomic_llong next_item[CA_NODES], next_merge; /* items of each NUMA node's tasks */
    atomic_int failed;
    int64_t groups; /* groups of kv heads; each makes an item of a task */
} run;

static ca_state state_at(void *memory, int64_t rows, int64_t head_size_v) {
    float *o = memory;
    return (ca_state){o, o + rows * head_size_v, o + rows * head_size_v + rows};
}

static ca_state part_at(const run *w, ca_part part, int kv_head) {
    const ca_plan *p = w->plan;
    const int64_t dv = p->shape.head_size_v;
    float *base = (float *)(w->workspace + p->num_threads * p->thread_bytes) + part.partial;
    ca_state s = state_at(base + kv_head * ca_state_floats(p, part.rows), part.rows, dv);
    return (ca_state){s.o + part.row * dv, s.m + part.row, s.l + part.row};
}

/* Moves [*k0, *k1) to the next chain where query blocks have lists. A segment is then so many blocks of the list in a
 * row: by position it would hold few keys that are selected, and to begin and to merge it takes as long as ever. */
static int next_chain_of_list(const run *w, const ca_task *task, int kv_head, int64_t segment, int64_t *k0,
                              int64_t *k1) {
    const ca_blocks b = ca_blocks_of(w->plan, w->call, task, kv_head);
    const int64_t size = w->call->block_size, chain = CA_CHAIN_KEYS / size;
    const int64_t blocks = ca_div_up(ca_segment_keys(w->plan->seq_lens[task->request]), size), from = segment * blocks;
    int64_t first, end;
    ca_task_keys(w->plan, task, &first, &end);
    first = ca_max64(ca_max64(first, ca_nth_block(b, from) * size), *k1);
    end = ca_min64(end, ca_nth_block(b, from + blocks) * size);
    *k0 = ca_next_key(w->plan, w->call, task, kv_head, first, end);
    if (*k0 >= end)
        return 0;
    *k1 = (*k0 / CA_CHAIN_KEYS + 1) * CA_CHAIN_KEYS;
    if (chain > 0)
        *k1 = ca_nth_block(b, from + ((ca_find_block(b, *k0 / size) - from) / chain + 1) * chain) * size;
    *k1 = ca_min64(end, *k1);
    return 1;
}

/* Moves [*k0, *k1) to the next chain of a segment's keys: it begins with the first key from *k1 on that the task may
 * see and that is selected. Returns 0 where there is none. */
static int next_chain(const run *w, const ca_task *task, int kv_head, int64_t segment, int64_t *k0, int64_t *k1) {
    int64_t size = ca_segment_keys(w->plan->seq_lens[task->request]), start = segment * size, first, end;
    if (w->plan->shape.query_block_size)
        return next_chain_of_list(w, task, kv_head, segment, k0, k1);
    ca_task_keys(w->plan, task, &first, &end);
    end = ca_min64(end, start + size);
    *k0 = ca_next_key(w->plan, w->call, task, kv_head, ca_max64(ca_max64(first, start), *k1), end);
    *k1 = ca_min64(end, start + ((*k0 - start) / CA_CHAIN_KEYS + 1) * CA_CHAIN_KEYS);
    return *k0 < *k1;
}

/* Returns whether several kv heads can go through the keys of a task together. */
static int together(const run *w, const ca_task *task) {
    return ca_rows_of(w->plan, task) <= CA_FEW_ROWS && !task->shared && w->call->num_selected < 0 &&
           w->call->block_size % CA_LANES == 0;
}

/* Computes the chains of a segment into the states, the first one directly, each other one by way of `part`, from which
 * it is merged. Returns how many chains there are, or the engine's status, negated, where it fails. */
static int run_segment(run *w, const ca_task *task, int kv_head, int num_heads, int64_t segment, const ca_state *total,
                       const ca_state *part, void *scratch) {
    const ca_plan *p = w->plan;
    const int64_t rows = ca_rows_of(p, task), dv = p->shape.head_size_v;
    int n = 0;
    if (p->shape.max_selected_tokens)
        return ca_attend_selected(p, w->call, task, kv_head, segment, total, scratch);
    for (int64_t k0, k1 = 0; next_chain(w, task, kv_head, segment, &k0, &k1); n++) {
        const ca_state *to = n ? part : total;
        for (int h = 0; h < num_heads; h++)
            if (p->engine->opens)
                ca_open(&to[h], rows);
            else
                ca_clear(&to[h], rows, dv);
        int status = p->engine->segment(p, w->call, task, kv_head, num_heads, k0, k1, to, scratch);
        if (status)
            return -status;
        for (int h = 0; h < num_heads && n; h++)
            p->kernel->merge(&total[h], &part[h], rows, dv);
    }
    return n;
}

/* Computes the task's segments in order, those that hold a key that counts, and merges them with what the states hold,
 * if they hold anything. */
static int run_segments(run *w, const ca_task *task, int kv_head, int num_heads, const ca_state *total, int holds,
                        char *memory) {
    const ca_plan *p = w->plan;
    const int64_t rows = ca_rows_of(p, task), dv = p->shape.head_size_v;
    char *scratch = memory + p->thread_bytes - p->scratch_bytes;
    ca_state part[2][CA_HEADS]; /* part[0] is for a segment, part[1] for a chain */
    for (int h = 0; h < num_heads; h++)
        for (int i = 0; i < 2; i++)
            part[i][h] = state_at(memory + (i + 1) * p->state_bytes + h * ca_state_bytes(p, rows), rows, dv);
    for (int32_t s = 0; s < task->num_segments; s++) {
        int n = run_segment(w, task, kv_head, num_heads, task->segment + s, holds ? part[0] : total, part[1], scratch);
        if (n < 0)
            return -n;
        for (int h = 0; h < num_heads && holds && n; h++)
            p->kernel->merge(&total[h], &part[0][h], rows, dv);
        holds |= n > 0;
    }
    for (int h = 0; h < num_heads && !holds; h++)
        ca_clear(&total[h], rows, dv);
    return 0;
}

/* Computes kv heads [first, end) of a task together. In a block their keys follow one another, so that memory is read
 * in longer runs, and only the first head begins with keys that nothing has prefetched. Over NHD their keys lie side by
 * side, so that the cache lines that one head reads hold the next head's keys, too (MEASUREMENTS.md: prefetch by
 * products or by unpacking). */
static int run_heads(run *w, const ca_task *task, int first, int end, char *memory) {
    const ca_plan *p = w->plan;
    const int64_t rows = ca_rows_of(p, task);
    ca_state total[CA_HEADS];
    int h = first;
    do
        total[h - first] = task->partial < 0
                               ? state_at(memory + (h - first) * ca_state_bytes(p, rows), rows, p->shape.head_size_v)
                               : part_at(w, (ca_part){task->partial, (int32_t)rows, 0}, h);
    while (++h < end);
    int status = run_segments(w, task, first, end - first, total, 0, memory);
    for (h = first; h < end && !status && task->partial < 0; h++)
        p->kernel->finish(p, w->call, task, h, &total[h - first]);
    return status;
}

/* Returns how many items to make of a task's kv heads: as many as the plan says, or, over NHD, two for each thread, of
 * so few heads that their keys stay in L2 with those that come next. */
static int64_t head_groups(const ca_plan *p, int team) {
    const ca_shape *s = &p->shape;
    const ca_kernel *k = p->kernel;
    int64_t heads = s->num_kv_heads, wanted = team > 1 ? ca_div_up(2 * team, ca_max64(1, p->num_tasks)) : 1;
    if (p->heads_together == 1 || s->kv_cache_layout != CA_NHD)
        return ca_div_up(heads, p->heads_together);
    int64_t bytes = ca_nhd_keys(p, k->nhd_keys, k->nhd_bytes) * ca_token_bytes(p);
    int64_t most = ca_max64(1, ca_min64(p->heads_together, 2 * k->nhd_bytes / bytes));
    return ca_min64(heads, ca_max64(wanted, ca_div_up(heads, most)));
}

/* Merges the parts in the order of the segments, as one thread would have merged them. */
static int merge_item(run *w, const ca_merge *m, int kv_head, char *memory) {
    const ca_plan *p = w->plan;
    ca_state total = part_at(w, m->parts[0], kv_head);
    for (int64_t i = 1; i < m->num_parts; i++) {
        ca_state part = part_at(w, m->parts[i], kv_head);
        p->kernel->merge(&total, &part, ca_rows_of(p, &m->task), p->shape.head_size_v);
    }
    int status = run_segments(w, &m->task, kv_head, 1, &total, 1, memory);
    if (!status)
        p->kernel->finish(p, w->call, &m->task, kv_head, &total);
    return status;
}

static int64_t take(atomic_llong *counter) { return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }

static int run_task(run *w, const ca_task *task, int first, int end, char *memory) {
    int status = 0;
    if (end - first > 1 && together(w, task))
        return run_heads(w, task, first, end, memory);
    for (int h = first; h < end && !status; h++)
        status = run_heads(w, task, h, h + 1, memory);
    return status;
}

/* Runs `count` tasks for all kv heads, or merges where tasks is NULL, until there are no more. */
static void run_items(run *w, atomic_llong *next, const ca_task *tasks, const ca_merge *merges, int64_t count,
                      int thread) {
    const ca_plan *p = w->plan;
    char *memory = w->workspace + thread * p->thread_bytes;
    int64_t heads = p->shape.num_kv_heads, groups = tasks ? w->groups : heads, items = count * groups;
    for (int64_t i; (i = take(next)) < items && !atomic_load_explicit(&w->failed, memory_order_relaxed);) {
        /* One division gives both numbers, since a division takes up to 90 cycles. */
        int64_t which = i / groups, group = i - which * groups;
        int first = (int)(groups == heads ? group : group * heads / groups);
        int end = (int)(groups == heads ? group + 1 : (group + 1) * heads / groups);
        int status =
            tasks ? run_task(w, &tasks[which], first, end, memory) : merge_item(w, &merges[which], first, memory);
        if (status)
            atomic_store(&w->failed, status);
    }
}

/* A thread runs tasks of its own node as long as there are any, and then those of the next nodes. */
static void run_tasks(run *w, int thread) {
    const ca_plan *p = w->plan;
    const int here = p->num_nodes > 1 ? ca_node_here() : 0;
    for (int i = 0; i < p->num_nodes; i++) {
        const int n = (here + i) % p->num_nodes;
        run_items(w, &w->next_item[n], p->tasks + p->first_task[n], NULL, p->first_task[n + 1] - p->first_task[n],
                  thread);
    }
}

static void run_merges(run *w, int thread) {
    run_items(w, &w->next_merge, NULL, w->plan->merges, w->plan->num_merges, thread);
}

static ca_call call_of(const ca_array *a, const ca_shape *s, const ca_indices *indices) {
    const ca_array *q = &a[CA_QUERY], *out = &a[CA_OUTPUT], *bias = &a[CA_ATTN_BIAS];
    const ca_kv k = ca_kv_of(&a[CA_KEY_CACHE], s->kv_cache_layout, s->head_size);
    return (ca_call){
        .query = (const void *)q->address,
        .q_stride_t = q->strides[0],
        .q_stride_h = q->strides[1],
        .kv = {k, ca_kv_of(&a[CA_VALUE_CACHE], s->kv_cache_layout, s->head_size_v)},
        .block_size = k.block_size,
        .output = (void *)out->address,
        .output_dtype = out->dtype,
        .o_stride_t = out->strides[0],
        .o_stride_h = out->strides[1],
        .lse = (float *)a[CA_LSE].address,
        .lse_stride_h = a[CA_LSE].strides[0],
        .block_table = indices->blocks,
        .table_at = indices->table_at,
        .alibi_slopes = (const float *)a[CA_ALIBI_SLOPES].address,
        .s_aux = (const float *)a[CA_S_AUX].address,
        .selected = indices->selected,
        .num_selected = indices->num_selected,
        .selected_tokens = indices->selected_tokens,
        .num_selected_tokens = indices->num_selected_tokens,
        .attn_bias = (const float *)bias->address,
        .bias_stride_r = bias->shape[0] > 1 ? bias->strides[0] : 0,
        .bias_stride_h = bias->shape[1] > 1 ? bias->strides[1] : 0,
        .bias_stride_q = bias->strides[2],
    };
}

/* Returns where the queries lie that meet rotated keys: behind all else in the workspace, as [T, Hq, D]. */
static char *rotated_queries(const ca_plan *p, void *workspace) {
    return (char *)workspace + p->num_threads * p->thread_bytes + p->partial_bytes;
}

/* Rotates one thread's share of the queries, once for all tasks that will read them. */
static void rotate_queries(const run *w, int thread, int team) {
    const ca_plan *p = w->plan;
    const ca_call *c = w->given;
    const ca_transform how = {.head_size = p->shape.head_size, .hadamard = 1};
    const int64_t size = ca_dtype_size(p->shape.dtype), heads = p->shape.num_heads, rows = p->num_tokens * heads;
    float *x = (float *)(w->workspace + thread * p->thread_bytes);
    char *to = rotated_queries(p, w->workspace);
    for (int64_t r = rows * thread / team; r < rows * (thread + 1) / team; r++) {
        const int64_t at = r / heads * c->q_stride_t + r % heads * c->q_stride_h;
        p->kernel->transform(&how, (const char *)c->query + at * size, x, to + r * how.head_size * size);
    }
}

static void attend_share(void *work, int thread, int team) {
    run *w = work;
    if (w->plan->shape.hadamard & 1 << K) {
        rotate_queries(w, thread, team);
        ca_wait_for_team(team);
    }
    run_tasks(w, thread);
    ca_wait_for_team(team);
    run_merges(w, thread);
}

/* Attends. What is to be written first is written once no argument can be refused any more. */
static int attend(const ca_plan *plan, const ca_call *call, const ca_written *first, void *workspace, ca_fault *fault) {
    ca_call rotated = *call;
    if (plan->shape.hadamard & 1 << K) {
        rotated.query = rotated_queries(plan, workspace);
        rotated.q_stride_h = plan->shape.head_size;
        rotated.q_stride_t = plan->shape.num_heads * rotated.q_stride_h;
    }
    run w = {.plan = plan, .given = call, .call = &rotated, .workspace = workspace};
    int64_t items = ca_max64(plan->num_tasks, plan->num_merges) * plan->shape.num_kv_heads;
    int team = ca_team((int)ca_min64(ca_min64(plan->num_threads, ca_get_num_threads()), items));
    w.groups = head_groups(plan, team);
    if (ca_check_stack(team, fault) || (first && ca_write_rows(first, fault)))
        return fault->status;
    ca_run_team(team, attend_share, &w);
    if (!w.failed)
        return CA_OK;
    return ca_fail(fault, CA_ENGINE_FAILED, -1, -1, w.failed, -1);
}

static ca_fit fit_of(const ca_plan *plan, int kind, int without_lengths) {
    const ca_shape *s = &plan->shape;
    ca_fit fit = ca_fit_anything(s->kv_cache_layout);
    fit.sizes[CA_T] = plan->num_tokens;
    fit.sizes[CA_NUM_REQS] = s->num_reqs;
    fit.sizes[CA_NUM_REQS_1] = (int64_t)s->num_reqs + 1;
    fit.sizes[CA_NUM_HEADS] = s->num_heads;
    fit.sizes[CA_NUM_KV_HEADS] = s->num_kv_heads / plan->readers;
    fit.sizes[CA_HEAD_SIZE] = s->head_size;
    fit.sizes[CA_HEAD_SIZE_V] = s->head_size_v;
    if (s->query_block_size)
        fit.sizes[CA_QUERY_BLOCKS] = plan->first_list[s->num_reqs];
    fit.dtype = s->dtype;
    fit.isa = s->isa;
    fit.kv_dtype[K] = s->k_dtype;
    fit.kv_dtype[V] = s->v_dtype;
    fit.latent = kind == CA_ATTEND_LATENT;
    fit.without_lengths = without_lengths;
    fit.select_by_query_head = s->select_by_query_head;
    return fit;
}

int ca_attend(const ca_plan *plan, uintptr_t objects, const ca_array *given, int kind, int causal, float scale,
              float softcap, float k_scale, float v_scale, void *workspace, int64_t workspace_bytes, ca_fault *fault) {
    const ca_shape *s = &plan->shape;
    const int updates = kind == CA_UPDATE_AND_ATTEND;
    const ca_table *table = updates ? &ca_update_table : &ca_attention_table;
    ca_array a[CA_ATTENTION_ARRAYS], u[CA_UPDATE_ARRAYS];
    ca_fit fit = fit_of(plan, kind, causal < 0);
    ca_plan_info info;
    if (ca_check_arguments(table, &fit, objects, given, updates ? u : a, fault))
        return fault->status;
    if (updates)
        ca_attention_of_update(u, a);
    ca_plan_describe(plan, &info);
    if (workspace_bytes < info.workspace_bytes)
        return CA_SMALL_WORKSPACE;
    if (plan->num_shared && a[CA_SELECTED_BLOCKS].itemsize)
        return ca_fail(fault, CA_SELECTED_SHARED, -1, -1, -1, -1);
    if (plan->tree && a[CA_ALIBI_SLOPES].itemsize)
        return ca_fail(fault, CA_TREE_ALIBI, -1, -1, -1, -1);
    if (causal >= 0 &&
        ca_check_step(plan, (const int32_t *)a[CA_SEQ_LENS].address, (const int32_t *)a[CA_QUERY_START_LOC].address,
                      causal, (const int32_t *)a[CA_DYNAMIC_CAUSAL].address, fault))
        return fault->status;
    ca_indices indices;
    const int64_t block_size = ca_kv_of(&a[CA_KEY_CACHE], s->kv_cache_layout, s->head_size).block_size;
    if (!ca_take_indices(plan, &a[CA_BLOCK_TABLE], &a[CA_SELECTED_BLOCKS], &a[CA_SELECTED_TOKENS],
                         a[CA_KEY_CACHE].shape[0], block_size, &indices, fault) &&
        !ca_check_bias(plan, &a[CA_ATTN_BIAS], fault) && workspace) {
        ca_call call = call_of(a, s, &indices);
        call.scale = scale;
        /* A larger softcap would make scale over softcap subnormal. Since tanh(u) is about u (1 - u^2/3), a softcap
         * changes no logit below 2^-12 of itself by as much as float32 rounds: this one bends only logits from 2^68
         * on. */
        call.softcap = fminf(softcap, fmaxf(1, fabsf(scale * k_scale)) * 0x1p80f);
        call.k_scale = k_scale;
        call.v_scale = v_scale;
        const ca_written first = {.fit = &fit,
                                  .caches = &u[CA_UPDATE_KEY_CACHE],
                                  .key = &u[CA_UPDATE_KEY],
                                  .value = &u[CA_UPDATE_VALUE],
                                  .slot_mapping = &u[CA_UPDATE_SLOT_MAPPING],
                                  .feedback = &u[CA_UPDATE_K_FEEDBACK],
                                  .hadamard = s->hadamard,
                                  .scale = {k_scale, v_scale}};
        attend(plan, &call, updates ? &first : NULL, workspace, fault);
    }
    ca_give_back(indices.memory, indices.few);
    return fault->status;
}
