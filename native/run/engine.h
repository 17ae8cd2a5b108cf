/* SPDX-License-Identifier: Apache-2.0
 * This file defines what a plan asks of an engine: the states that it computes for the rows of tasks, and the call that
 * they are part of. */
#ifndef CPU_ATTN_ENGINE_H
#define CPU_ATTN_ENGINE_H
#include "plan/tasks.h"
#include <math.h>
#include <string.h>

#define CA_LOG2E_D 1.44269504088896340736
#define CA_LOG2E 1.44269504088896340736f
#define CA_LN2 0.69314718055994530942f

/* Holds one call of attention_with_kv_cache, once its arguments have been checked. */
typedef struct ca_call {
    const void *query;
    int64_t q_stride_t, q_stride_h;
    ca_kv kv[2];
    int64_t block_size;
    void *output;
    int32_t output_dtype; /* the plan's, or CA_F32 */
    int64_t o_stride_t, o_stride_h;
    float *lse; /* [Hq, T] or NULL */
    int64_t lse_stride_h;
    const int32_t *block_table;        /* ca_block_of reads it */
    const int64_t *table_at;           /* [R]: where a request's block number 0 is, or would be */
    const float *alibi_slopes, *s_aux; /* [Hq] or NULL */
    float scale, softcap, k_scale, v_scale;
    const int32_t *selected;        /* [lists, the plan's Hkv, num_selected], blocks of a request, ascending, then -1 */
    int64_t num_selected;           /* -1: none is given, all blocks count */
    const int32_t *selected_tokens; /* [T, num_selected_tokens], keys of a request, ascending, then -1 */
    int64_t num_selected_tokens;
    const float *attn_bias;                              /* ca_bias_row reads it; NULL: there is none */
    int64_t bias_stride_r, bias_stride_h, bias_stride_q; /* 0 along an axis of size 1 */
} ca_call;

/* Returns which block of the cache is number `block` of a request. That has to be one that holds a key some row may
 * see, and that is selected: only these have been checked. */
static inline int64_t ca_block_of(const ca_call *call, int request, int64_t block) {
    return call->block_table[call->table_at[request] + block];
}

/* The softmax state of `rows` query rows over some keys: o is the sum of p*v, m the reference max, and l the sum of p.
 * m is in units of log2: p = exp2(s*log2(e) - m). Where no key was seen, m is -inf, and l and o are 0. */
typedef struct ca_state {
    float *o; /* [rows][Dv] */
    float *m, *l;
} ca_state;

/* Clears all of a state but o. */
static inline void ca_open(const ca_state *s, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        s->m[r] = -INFINITY;
        s->l[r] = 0;
    }
}

static inline void ca_clear(const ca_state *s, int64_t rows, int64_t head_size_v) {
    memset(s->o, 0, (size_t)(rows * head_size_v) * sizeof(float));
    ca_open(s, rows);
}

/* Places a field of a struct at `base` + at, and moves at past so many bytes, to the next line. */
#define CA_CARVE(field, bytes)                                                                                         \
    field = (void *)(base + (uintptr_t)at);                                                                            \
    at = ca_round_up(at + (int64_t)(bytes), 64);

/* Computes the states of a task's rows, which are clear (open, if the engine `opens`), over the keys [k0, k1): one
 * state for each of the kv heads [kv_head, kv_head + num_heads). scratch is 64-aligned and holds
 * engine->scratch_bytes(plan). Returns 0, or the engine's own status. */
typedef int ca_segment_fn(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                          int64_t k0, int64_t k1, const ca_state *states, void *scratch);

struct ca_engine {
    int (*rows)(const ca_kernel *kernel); /* query rows it wants in a task; NULL: as many as the kernel's info says */
    int64_t (*scratch_bytes)(const ca_plan *plan);
    ca_segment_fn *segment;
    /* Says whether segment may get several kv heads at once: it does so where blocks hold whole groups, for no more
     * than CA_FEW_ROWS rows. */
    int together;
    int opens; /* segment writes o of its states, whatever that held */
};
#endif
