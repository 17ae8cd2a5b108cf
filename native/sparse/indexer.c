/* SPDX-License-Identifier: Apache-2.0
 * This file selects, for each query token, the keys that an indexer scores best (DeepSeek-V3.2's lightning indexer).
 * The kernels score as many query tokens at a time as there is room for, in pieces of their keys that threads take;
 * then threads take the query tokens, and find the best of each. */
#include "check/check.h"
#include "cpu/system.h"
#include "kernel/kernel.h"
#include "plan/plan.h"
#include "run/threads.h"
#include <stdatomic.h>

#define PIECE 1024       /* keys that a thread scores at a time */
#define SCORES (1 << 20) /* scores that there is room for, unless one query token has more */
#define DIGIT 2048       /* values of a digit of a rank; the last digit has a bit of the one before, too */

typedef struct selection {
    const ca_plan *plan;
    ca_call call;
    const ca_array *out;
    const ca_array *given; /* weights as the call has them */
    float scale, *weights; /* [T, H], with the scale */
    ca_task *tasks;
    int64_t num_tasks, tokens; /* tokens: most query tokens of a task */
    int64_t stride;            /* scores of a query token */
    float *scores;             /* [tasks_at_once * tokens][stride], or their ranks */
    int64_t tasks_at_once;
    int32_t *keys;                     /* [stride] of each thread */
    char *scratch;                     /* of each thread */
    atomic_llong next_piece, next_row; /* 0 wherever a loop over these begins */
} selection;

/* Makes of scores integers of the same order, in their place: NaN is +inf, and -0 is 0. */
static void rank(float *scores, int64_t n) {
    const uint32_t infinity = UINT32_C(0xff) << 23, sign = UINT32_C(1) << 31;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &scores[i], sizeof bits);
        bits = (bits & ~sign) > infinity ? infinity : bits;
        bits = bits == sign ? 0 : bits;
        bits = bits & sign ? ~bits : bits | sign;
        memcpy(&scores[i], &bits, sizeof bits);
    }
}

/* Counts the digits of the ranks that agree so far, in two tables: an addition waits for the last one to the same
 * place, and ranks of one digit often follow each other. There are no branches, because no core can predict which ranks
 * agree. */
static void count_digits(const uint32_t *rank, const int32_t *key, int64_t n, int shift, uint32_t known,
                         uint32_t agreed, int32_t *count) {
    int32_t counts[2][DIGIT] = {{0}};
    for (int64_t i = 0; i < n; i++)
        counts[i & 1][rank[key[i]] >> shift & (DIGIT - 1)] += (rank[key[i]] & known) == agreed;
    for (int i = 0; i < DIGIT; i++)
        count[i] = counts[0][i] + counts[1][i];
}

/* Lists the keys of the `most` best ranks of those in [lo, hi), ascending, then -1; of equal ones the first. The last
 * one among them is found digit by digit: its digit is where, counted from above, `wanted` ranks are reached that agree
 * so far. Keys that a digit rules out leave the list `key`, which has room for all. */
static void select_best(const uint32_t *rank, int64_t lo, int64_t hi, int64_t most, int32_t *key, int32_t *to) {
    static const int shifts[] = {21, 10, 0};
    uint32_t last = 0, known = 0;
    int64_t wanted = most, m = 0, n = ca_max64(0, hi - lo);
    for (int64_t i = 0; i < n; i++)
        key[i] = (int32_t)(lo + i);
    for (int d = 0; d < 3 && n > most; d++) {
        int32_t count[DIGIT];
        uint32_t digit = DIGIT - 1;
        count_digits(rank, key, n, shifts[d], known, last, count);
        while (count[digit] < wanted)
            wanted -= count[digit--];
        last |= digit << shifts[d];
        known |= (uint32_t)(DIGIT - 1) << shifts[d];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            key[kept] = key[i];
            kept += rank[key[i]] >= last;
        }
        n = kept;
    }
    for (int64_t i = 0; i < n && m < most; i++) {
        const int equal = rank[key[i]] == last && wanted > 0;
        to[m] = key[i];
        m += rank[key[i]] > last || equal;
        wanted -= equal;
    }
    while (m < most)
        to[m++] = -1;
}

/* Scores piece number i of the keys of these tasks, whose ranks take the place of the scores. */
static void score_piece(const selection *s, const ca_task *tasks, int64_t i, int thread) {
    const int64_t pieces = ca_div_up(s->stride, PIECE), piece = i % pieces, row = i / pieces * s->tokens;
    const ca_plan *p = s->plan;
    const ca_task *task = &tasks[i / pieces];
    int64_t first, end; /* keys that some token of the task may see, then those of the piece */
    ca_task_keys(p, task, &first, &end);
    first = ca_max64(first, piece * PIECE);
    end = ca_min64(end, (piece + 1) * PIECE);
    const float *weights = s->weights + (p->query_start_loc[task->request] + task->token) * p->shape.num_heads;
    float *scores = s->scores + row * s->stride;
    if (first >= end)
        return;
    p->kernel->score_tokens(p, &s->call, task, weights, first, end, scores, s->stride,
                            s->scratch + thread * p->scratch_bytes);
    for (int32_t token = 0; token < task->num_tokens; token++, scores += s->stride)
        rank(scores + first, end - first);
}

static void select_of(const selection *s, const ca_task *tasks, int64_t row, int thread) {
    const ca_task *task = &tasks[row / s->tokens];
    const int64_t token = row % s->tokens;
    const int64_t at = s->plan->query_start_loc[task->request] + task->token + token, most = s->out->shape[1];
    int64_t lo, hi;
    if (token >= task->num_tokens)
        return;
    ca_visible(s->plan, task->request, task->token + token, &lo, &hi);
    select_best((const uint32_t *)s->scores + row * s->stride, lo, hi, most, s->keys + thread * s->stride,
                (int32_t *)s->out->address + at * s->out->strides[0]);
}

static void scale_weights(const selection *s) {
    const ca_array *a = s->given;
    float *to = s->weights;
    for (int64_t t = 0; t < a->shape[0]; t++)
        for (int64_t h = 0; h < a->shape[1]; h++)
            *to++ = ((const float *)a->address)[t * a->strides[0] + h] * s->scale;
}

/* Does one thread's part of the work. A counter is set back where the threads are at the loop over the other one. */
static void select_share(void *work, int thread, int team) {
    selection *s = work;
    if (thread == 0)
        scale_weights(s);
    ca_wait_for_team(team);
    for (int64_t first = 0; first < s->num_tasks; first += s->tasks_at_once) {
        const ca_task *tasks = s->tasks + first;
        const int64_t n = ca_min64(s->tasks_at_once, s->num_tasks - first);
        const int64_t scored = n * ca_div_up(s->stride, PIECE), selected = n * s->tokens;
        for (int64_t i; (i = atomic_fetch_add(&s->next_piece, 1)) < scored;)
            score_piece(s, tasks, i, thread);
        ca_wait_for_team(team);
        if (thread == 0)
            atomic_store(&s->next_piece, 0);
        for (int64_t i; (i = atomic_fetch_add(&s->next_row, 1)) < selected;)
            select_of(s, tasks, i, thread);
        ca_wait_for_team(team);
        if (thread == 0)
            atomic_store(&s->next_row, 0);
    }
}

/* Lists the query tokens as tasks, whose tokens are of one request. */
static int64_t list_tasks(const ca_plan *p, int64_t tokens, ca_task *to) {
    int64_t n = 0;
    for (int32_t r = 0; r < p->shape.num_reqs; r++)
        for (int64_t i = 0; i < ca_q_len(p, r); i += tokens, n++)
            if (to)
                to[n] = (ca_task){.request = r,
                                  .token = (int32_t)i,
                                  .num_tokens = (int32_t)ca_min64(tokens, ca_q_len(p, r) - i),
                                  .partial = -1};
    return n;
}

static int run_plan(const ca_plan *p, const ca_array *a, const ca_indices *indices, float scale, ca_fault *fault) {
    const ca_array *q = &a[CA_SELECT_QUERY], *cache = &a[CA_SELECT_INDEX_CACHE];
    const ca_kv kv = ca_kv_of(cache, p->shape.kv_cache_layout, p->shape.head_size);
    selection s = {
        .plan = p, .out = &a[CA_SELECT_SELECTED], .stride = ca_round_up(ca_max64(1, ca_longest(p)), CA_LANES)};
    s.tokens = ca_max64(1, ca_min64(ca_block_tokens(p), SCORES / s.stride));
    s.num_tasks = list_tasks(p, s.tokens, NULL);
    s.tasks_at_once = ca_max64(1, ca_min64(s.num_tasks, SCORES / (s.tokens * s.stride)));
    const int team = ca_team((int)ca_min64(p->num_threads, ca_get_num_threads()));
    const int64_t sizes[] = {team * p->scratch_bytes, s.tasks_at_once * s.tokens * s.stride * 4,
                             p->num_tokens * p->shape.num_heads * 4, s.num_tasks * (int64_t)sizeof *s.tasks,
                             team * s.stride * 4};
    int64_t at[5], bytes = 0;
    for (int i = 0; i < 5; i++) {
        at[i] = bytes;
        bytes = ca_round_up(bytes + sizes[i], 64);
    }
    char *memory = ca_aligned_alloc(ca_max64(64, bytes));
    if (!memory)
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    s.scratch = memory;
    s.scores = (float *)(memory + at[1]);
    s.given = &a[CA_SELECT_WEIGHTS];
    s.scale = scale;
    s.weights = (float *)(memory + at[2]);
    s.tasks = (ca_task *)(memory + at[3]);
    s.keys = (int32_t *)(memory + at[4]);
    list_tasks(p, s.tokens, s.tasks);
    s.call = (ca_call){.query = (const void *)q->address,
                       .q_stride_t = q->strides[0],
                       .q_stride_h = q->strides[1],
                       .kv = {kv, kv},
                       .block_size = kv.block_size,
                       .block_table = indices->blocks,
                       .table_at = indices->table_at,
                       .scale = 1,
                       .k_scale = 1,
                       .v_scale = 1,
                       .num_selected = -1};
    if (!ca_check_stack(team, fault))
        ca_run_team(team, select_share, &s);
    ca_aligned_free(memory);
    return fault->status;
}

/* Returns the shape of a plan for the one kv head of an indexer. */
static ca_shape shape_of(const ca_fit *fit, int causal) {
    const int32_t head_size = (int32_t)fit->sizes[CA_HEAD_SIZE], kv_dtype = fit->kv_dtype[K];
    return (ca_shape){.num_reqs = (int32_t)fit->sizes[CA_NUM_REQS],
                      .num_heads = (int32_t)fit->sizes[CA_NUM_HEADS],
                      .num_kv_heads = 1,
                      .head_size = head_size,
                      .head_size_v = head_size,
                      .dtype = fit->dtype,
                      .k_dtype = kv_dtype,
                      .v_dtype = kv_dtype,
                      .isa = fit->isa,
                      .causal = causal,
                      .window_left = -1,
                      .window_right = -1,
                      .num_threads = ca_get_num_threads(),
                      .kv_cache_layout = fit->kv_cache_layout};
}

int ca_select_tokens(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                     int causal, float scale, const ca_masks *masks, ca_fault *fault) {
    ca_array a[CA_SELECT_ARRAYS];
    const ca_array none = {0}, *cache = &a[CA_SELECT_INDEX_CACHE];
    ca_fit fit = ca_fit_anything(kv_cache_layout);
    ca_indices indices;
    fit.meaning = meaning;
    if (ca_check_arguments(&ca_select_table, &fit, objects, given, a, fault))
        return fault->status;
    const ca_array step[CA_STEP_ARRAYS] = {
        [CA_STEP_QUERY_START_LOC] = a[CA_SELECT_QUERY_START_LOC], [CA_STEP_SEQ_LENS] = a[CA_SELECT_SEQ_LENS]};
    const int64_t block_size = fit.sizes[CA_BLOCK_SIZE], tokens = fit.sizes[CA_T];
    ca_shape shape = shape_of(&fit, causal);
    ca_plan *p = ca_plan_new(&shape, NULL, 0, step, masks, fault);
    if (!p)
        return fault->status;
    if (p->num_tokens != tokens)
        ca_fail(fault, CA_OTHER_TOKENS, -1, -1, tokens, p->num_tokens);
    else {
        if (!ca_take_indices(p, &a[CA_SELECT_BLOCK_TABLE], &none, &none, cache->shape[0], block_size, &indices, fault))
            run_plan(p, a, &indices, scale, fault);
        ca_give_back(indices.memory, indices.few);
    }
    ca_plan_free(p);
    return fault->status;
}
