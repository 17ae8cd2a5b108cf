/* SPDX-License-Identifier: Apache-2.0
 * This file stores a task's output in whole vectors, for amx/attention.h. Where all of a call's output is more than the
 * caches keep for whoever reads it next, it is streamed past them: a prefill of 2048 tokens has 1.04 times the speed so
 * (MEASUREMENTS.md: AMX).
 */

#define TOKENS_AHEAD                                                                                                   \
    4 /* from the token that is stored to the one whose output lines are prefetched, where nothing is streamed */

/* Rounds n columns of o times a factor. Returns 0 where one is NaN, for which these bits are not right. */
INLINE int put_row(int streams, const float *o, int64_t n, float factor, uint16_t *to) {
    const vf factors = v_set1(factor);
    int nan = 0;
    for (int64_t c = 0; c < n; c += 2 * VL) {
        const vf a = v_mul(v_load_f32(o + c), factors), b = v_mul(v_load_f32(o + c + VL), factors);
        nan |= v_any_nan(a, b);
        if (streams)
            v_stream_pairs(to + c, v_bf16_of(a, b));
        else
            v_store_pairs(to + c, v_bf16_of(a, b));
    }
    return !nan;
}

INLINE void put_rows(int streams, const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head,
                     const ca_state *state) {
    const int64_t start = plan->query_start_loc[task->request] + task->token, dv = plan->shape.head_size_v;
    const int64_t end = start + task->num_tokens;
    for (int64_t t = start, r = 0; t < end; t++)
        for (int64_t i = 0, head = kv_head * plan->group_size; i < plan->group_size; i++, head++, r++) {
            uint16_t *to = (uint16_t *)call->output + t * call->o_stride_t + head * call->o_stride_h;
            const float *o = state->o + r * dv;
            const float factor = close_row(state->m + r, state->l + r, call->s_aux, head) * call->v_scale;
            for (int64_t c = 0; c < dv && !streams && t + TOKENS_AHEAD < end; c += 2 * VL)
                __builtin_prefetch(to + TOKENS_AHEAD * call->o_stride_t + c, 1, 3);
            if (!put_row(streams, o, dv, factor, to))
                for (int64_t c = 0; c < dv; c += VL)
                    v_storen_bf16(to + c, v_mul(v_load_f32(o + c), v_set1(factor)), VL);
            if (call->lse)
                call->lse[head * call->lse_stride_h + t] = (state->m[r] + log2f(state->l[r])) * CA_LN2;
        }
}

static void finish(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, const ca_state *state) {
    const int64_t dv = plan->shape.head_size_v, bytes = plan->num_tokens * plan->shape.num_heads * dv * 2;
    const int lines = (call->o_stride_t | call->o_stride_h) % (2 * VL) == 0 && (uintptr_t)call->output % 64 == 0;
    if (dv % (2 * VL) || call->output_dtype == CA_F32 || plan->shape.hadamard & 1 << V) {
        finish_bf16(plan, call, task, kv_head, state);
    } else if (lines && bytes >= CA_STREAM_BYTES) {
        put_rows(1, plan, call, task, kv_head, state);
        /* Streamed lines become visible to other threads in no order until a locked instruction (SDM 3, 12.3.1). */
        atomic_thread_fence(memory_order_seq_cst);
    } else {
        put_rows(0, plan, call, task, kv_head, state);
    }
}
