/* SPDX-License-Identifier: Apache-2.0
 * The C half of cpu_attn/_check.py: checks of what indices hold, before a byte is written.
 * Shapes, dtypes, strides and aliases have been checked there. */
#include "cpu_attn.h"

static int fail(ca_fault *fault, int status, int64_t request, int64_t position, int64_t value, int64_t bound) {
    *fault = (ca_fault){status, request, position, value, bound};
    return status;
}

int ca_check_blocks(const int32_t *table, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                    ca_fault *fault) {
    if (end > cols)
        return fail(fault, CA_BLOCK_TABLE_SHORT, request, -1, end, cols);
    for (int64_t i = first; i < end; i++)
        if (table[i] < 0 || table[i] >= num_blocks)
            return fail(fault, CA_BAD_BLOCK, request, i, table[i], num_blocks);
    return CA_OK;
}

int ca_check_step(const ca_plan *p, const int32_t *seq_lens, const int32_t *query_start_loc, int causal,
                  const int32_t *dynamic_causal, ca_fault *fault) {
    fail(fault, CA_OK, -1, -1, -1, -1);
    for (int r = 0; r <= p->shape.num_reqs; r++)
        if (query_start_loc[r] != p->query_start_loc[r])
            return fail(fault, CA_OTHER_LENGTHS, r, r, query_start_loc[r], p->query_start_loc[r]);
    for (int r = 0; r < p->shape.num_reqs; r++) {
        int here = dynamic_causal ? dynamic_causal[r] != 0 : causal;
        if (seq_lens[r] != p->seq_lens[r])
            return fail(fault, CA_OTHER_SEQ_LENS, r, r, seq_lens[r], p->seq_lens[r]);
        if (here != p->causal[r])
            return fail(fault, CA_OTHER_CAUSAL, r, r, here, p->causal[r]);
    }
    return CA_OK;
}

/* The blocks that hold a key some row may see. */
int ca_check_table(const ca_plan *p, const int32_t *table, int64_t stride, int64_t cols, int64_t num_blocks,
                   int64_t block_size, ca_fault *fault) {
    fail(fault, CA_OK, -1, -1, -1, -1);
    for (int r = 0; r < p->shape.num_reqs; r++) {
        ca_task whole = {.request = r, .num_tokens = p->query_start_loc[r + 1] - p->query_start_loc[r]};
        int64_t k0 = 0, k1 = 0;
        if (whole.num_tokens > 0)
            ca_task_keys(p, &whole, &k0, &k1);
        if (k1 > k0 &&
            ca_check_blocks(table + r * stride, r, k0 / block_size, ca_div_up(k1, block_size), cols, num_blocks, fault))
            return fault->status;
    }
    return CA_OK;
}

int ca_check_slots(const int64_t *slots, int64_t num_tokens, int64_t bound, ca_fault *fault) {
    fail(fault, CA_OK, -1, -1, -1, -1);
    for (int64_t i = 0; i < num_tokens; i++)
        if (slots[i] >= bound)
            return fail(fault, CA_BAD_SLOT, -1, i, slots[i], bound);
    return CA_OK;
}
