/* SPDX-License-Identifier: Apache-2.0
 * These functions say which keys a query token sees, and in which blocks a kv head looks for them. */
#ifndef CPU_ATTN_KEYS_H
#define CPU_ATTN_KEYS_H
#include "run/engine.h"
#include "cache/layout.h"

static inline int64_t ca_q_len(const ca_plan *plan, int r) {
    return (int64_t)plan->query_start_loc[r + 1] - plan->query_start_loc[r];
}

static inline int32_t ca_longest(const ca_plan *plan) {
    int32_t longest = 0;
    for (int r = 0; r < plan->shape.num_reqs; r++)
        longest = plan->seq_lens[r] > longest ? plan->seq_lens[r] : longest;
    return longest;
}

/* Returns how many of the first n positions of a request have their keys in this rank's caches. Such keys are counted
 * without gaps, in the order of their positions: "key" means this number, wherever it is not said to be a position. */
static inline int64_t ca_local_keys(const ca_shape *s, int64_t n) {
    if (s->cp_world_size <= 1)
        return n;
    const int64_t step = s->cp_kv_cache_interleave_size, period = step * s->cp_world_size;
    return n / period * step + ca_max64(0, ca_min64(n % period - s->cp_rank * step, step));
}

/* Returns the position of a key. */
static inline int64_t ca_key_position(const ca_shape *s, int64_t key) {
    if (s->cp_world_size <= 1)
        return key;
    const int64_t step = s->cp_kv_cache_interleave_size;
    return (key / step * s->cp_world_size + s->cp_rank) * step + key % step;
}

/* Returns how many positions come before those of the request's query tokens, and how many keys. */
static inline int64_t ca_context(const ca_plan *plan, int r) { return plan->all_lens[r] - ca_q_len(plan, r); }
static inline int64_t ca_context_keys(const ca_plan *plan, int r) {
    return ca_local_keys(&plan->shape, ca_context(plan, r));
}

/* Returns the position of query token i of request r. */
static inline int64_t ca_position(const ca_plan *plan, int r, int64_t i) { return ca_context(plan, r) + i; }

/* Query token i of request r may see the keys [*lo, *hi). From token to token neither end falls, except lo under a tree
 * mask, which besides may hide keys between the two ends (ca_run). Where ranks share the keys a plan has lo and hi;
 * until it has them, these are positions. */
static inline void ca_visible(const ca_plan *plan, int r, int64_t i, int64_t *lo, int64_t *hi) {
    if (plan->lo) {
        *lo = plan->lo[plan->query_start_loc[r] + i];
        *hi = plan->hi[plan->query_start_loc[r] + i];
        return;
    }
    int64_t len = plan->all_lens[r], pos = ca_position(plan, r, i);
    int64_t left = plan->shape.window_left, right = plan->shape.window_right;
    *lo = left < 0 ? 0 : ca_max64(0, pos - left);
    *hi = right < 0 ? len : ca_min64(len, pos + right + 1);
    if (plan->causal[r])
        *hi = ca_min64(*hi, pos + 1);
    if (plan->shape.attention_chunk_size) {
        const int64_t size = plan->shape.attention_chunk_size, chunk = pos < 0 ? -1 : pos / size;
        *lo = ca_max64(*lo, chunk * size);
        *hi = ca_min64(*hi, (chunk + 1) * size);
    }
    if (*hi < *lo)
        *hi = *lo;
}

/* Some row of the task may see the keys [*k0, *k1). Those of a shared task are no fewer than the keys of its
 * segments. */
static inline void ca_task_keys(const ca_plan *plan, const ca_task *task, int64_t *k0, int64_t *k1) {
    int64_t unused;
    ca_token first = ca_token_at(plan, task, 0), last = ca_token_at(plan, task, task->num_tokens - 1);
    ca_visible(plan, first.request, first.token, k0, &unused);
    ca_visible(plan, last.request, last.token, &unused, k1);
    for (int32_t i = 1; plan->tree && i < task->num_tokens; i++)
        *k0 = ca_min64(*k0, plan->lo[plan->query_start_loc[task->request] + task->token + i]);
    if (*k1 < *k0)
        *k1 = *k0;
}

/* Returns a row of the tree mask: its bit j says whether query token i of request r sees the key that is j keys after
 * ca_context_keys. NULL says that the token sees all of its range. */
static inline const uint8_t *ca_tree_row(const ca_plan *plan, int r, int64_t i) {
    return plan->tree ? plan->tree + (plan->query_start_loc[r] + i) * plan->tree_bytes : NULL;
}

/* Returns whether a key is seen: keys before `context` always are, and keys from there on where their bit is set. */
static inline int ca_sees(const uint8_t *bits, int64_t context, int64_t key) {
    return key < context || (bits[(key - context) / 8] >> (key - context) % 8 & 1);
}

/* Moves [*a, *b) to the next of the keys [*a, hi) that are seen without a gap. Returns 0 where none is left. */
static inline int ca_run(const uint8_t *bits, int64_t context, int64_t hi, int64_t *a, int64_t *b) {
    while (bits && *a < hi && !ca_sees(bits, context, *a))
        ++*a;
    *b = bits ? ca_max64(*a, ca_min64(context, hi)) : hi;
    while (bits && *b < hi && ca_sees(bits, context, *b))
        ++*b;
    return *a < *b;
}

/* Sets to -inf the scores of those of n keys from `key` on that are not seen. */
static inline void ca_hide(const uint8_t *bits, int64_t context, int64_t key, int64_t n, float *s) {
    for (int64_t i = ca_max64(0, context - key); i < n; i++)
        if (!ca_sees(bits, context, key + i))
            s[i] = -INFINITY;
}

/* `factor` makes logits of q.k, and scale is a part of it. Returns the part by which queries are multiplied before the
 * product. That is all of it, unless it is above 1, where queries might become infinite, or below 2^-40, where a large
 * softcap might make them subnormal: then it is scale, or 1 where scale is larger. Its sign is scale's. */
static inline double ca_query_factor(double scale, double factor) {
    const double size = fabs(factor);
    return size >= 0x1p-40 && size <= 1 ? factor : copysign(fmin(fabs(scale), 1), scale);
}

/* The request's length alone fixes the keys of a segment, so that results do not depend on which requests share the
 * batch. A request has at most 64 segments, so that the partial results stay small. */
static inline int64_t ca_segment_keys(int64_t seq_len) { return 1024 * ca_max64(1, ca_div_up(seq_len, 64 * 1024)); }

/* A query token that selects its keys has them in segments of so many, counted among those that it sees: 2048 of them
 * keep 8 threads busy. Segments of 1024, for two, take 0.95 of the time on two (MEASUREMENTS.md: tasks). */
#define CA_SELECTED_KEYS 256

static inline int64_t ca_plan_segment_keys(const ca_plan *plan, int r) {
    return plan->shape.max_selected_tokens ? CA_SELECTED_KEYS : ca_segment_keys(plan->seq_lens[r]);
}

/* One float sums up at most so many keys one by one; the chains of a longer segment are merged in order. In float32,
 * equal weights of 2^20 keys come to 0.53 of the error budget, and to 1.76 by chains of 16,384. */
#define CA_CHAIN_KEYS 4096

/* Returns which list of selected_blocks a task goes by: that of its query block, or of its request. */
static inline int64_t ca_list_of(const ca_plan *plan, const ca_task *task) {
    const int32_t size = plan->shape.query_block_size;
    return plan->first_list[task->request] + (size ? task->token / size : 0);
}

/* Lists the blocks that a task and kv head attend, ascending: all blocks, or those that are selected. */
typedef struct ca_blocks {
    const int32_t *selected;
    int64_t count; /* -1: all */
} ca_blocks;

static inline ca_blocks ca_blocks_of(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head) {
    ca_blocks b = {NULL, call->num_selected};
    if (b.count > 0)
        b.selected = call->selected + (ca_list_of(plan, task) * plan->shape.num_kv_heads + kv_head) * b.count;
    return b;
}

/* Returns block number i of the list. Past the last it returns UINT32_MAX, which is past every key: -1, which pads the
 * selected blocks, is the same as unsigned. */
static inline int64_t ca_nth_block(ca_blocks b, int64_t i) {
    return b.count < 0 ? i : i < b.count ? (int64_t)(uint32_t)b.selected[i] : UINT32_MAX;
}

/* Returns which of the blocks is the first that is no less than `block`. The search has no branches, because no core
 * can predict what is selected. */
static inline int64_t ca_find_block(ca_blocks b, int64_t block) {
    int64_t first = 0;
    if (b.count < 0)
        return block;
    for (int64_t n = b.count, half; n > 0; n -= half) {
        half = (n + 1) / 2;
        first += (int64_t)(uint32_t)b.selected[first + half - 1] < block ? half : 0;
    }
    return first;
}

/* Returns the first key from `key` on that the task and kv head attend, or `end` where there is none before that. */
static inline int64_t ca_next_key(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head,
                                  int64_t key, int64_t end) {
    ca_blocks b = ca_blocks_of(plan, call, task, kv_head);
    if (b.count < 0)
        return ca_min64(end, key);
    int64_t block = ca_nth_block(b, ca_find_block(b, key / call->block_size));
    return ca_min64(end, ca_max64(key, block * call->block_size));
}

/* Returns what is added to the logits of a query token's head, a float for each key, or NULL where there is nothing. */
static inline const float *ca_bias_row(const ca_call *c, ca_token at, int64_t head) {
    return c->attn_bias
               ? c->attn_bias + at.request * c->bias_stride_r + head * c->bias_stride_h + at.token * c->bias_stride_q
               : NULL;
}

/* Describes a query row: where its query lies, what it sees, and what is added to its logits. */
typedef struct ca_query_row {
    int64_t token, lo, hi, pos; /* token: that of the query; lo and hi: keys; pos: its position */
    const void *query;
    const uint8_t *tree; /* ca_tree_row */
    const float *bias;   /* ca_bias_row */
    float slope;         /* ALiBi */
} ca_query_row;

/* Makes it the row of the same token and another head. */
static inline void ca_query_row_move(const ca_plan *plan, const ca_call *c, ca_token at, int64_t head,
                                     ca_query_row *row) {
    const int64_t at_query = row->token * c->q_stride_t + head * c->q_stride_h;
    row->query = (const char *)c->query + at_query * ca_dtype_size(plan->shape.dtype);
    row->bias = ca_bias_row(c, at, head);
    row->slope = c->alibi_slopes ? c->alibi_slopes[head] : 0;
}

static inline ca_query_row ca_query_row_of(const ca_plan *plan, const ca_call *c, ca_token at, int64_t head) {
    ca_query_row row = {.token = (int64_t)plan->query_start_loc[at.request] + at.token,
                        .pos = ca_position(plan, at.request, at.token),
                        .tree = ca_tree_row(plan, at.request, at.token)};
    ca_visible(plan, at.request, at.token, &row.lo, &row.hi);
    ca_query_row_move(plan, c, at, head, &row);
    return row;
}
#endif
