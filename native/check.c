/* SPDX-License-Identifier: Apache-2.0
 * The C half of cpu_attn/_check: what may differ between calls that look alike (addresses, and what lengths and
 * indices hold), and which calls look alike. A call of one token over 16 keys took 65 us where Python looked at every
 * array of every call, and takes 12 us so (Zen 4; 8 us are the kernel's). */
#include "check.h"
#include "keys.h"
#include "layout.h"

int ca_check_blocks(const int32_t *table, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                    ca_fault *fault) {
    if (end > cols)
        return ca_fail(fault, CA_BLOCK_TABLE_SHORT, request, -1, end, cols);
    for (int64_t i = first; i < end; i++)
        if (table[i] < 0 || table[i] >= num_blocks)
            return ca_fail(fault, CA_BAD_BLOCK, request, i, table[i], num_blocks);
    return CA_OK;
}

int ca_check_lengths(int64_t num_reqs, const int32_t *seq_lens, const int32_t *query_start_loc, ca_fault *fault) {
    for (int64_t r = 0; r < num_reqs; r++) {
        if (seq_lens[r] < 0)
            return ca_fail(fault, CA_BAD_SEQ_LEN, r, r, seq_lens[r], 0);
        if (query_start_loc[r + 1] < query_start_loc[r])
            return ca_fail(fault, CA_BAD_QUERY_START_LOC, r, r + 1, query_start_loc[r + 1], query_start_loc[r]);
    }
    if (query_start_loc[0] != 0)
        return ca_fail(fault, CA_BAD_QUERY_START_LOC, -1, 0, query_start_loc[0], 0);
    return CA_OK;
}

int ca_check_step(const ca_plan *p, const int32_t *seq_lens, const int32_t *query_start_loc, int causal,
                  const int32_t *dynamic_causal, ca_fault *fault) {
    for (int r = 0; r <= p->shape.num_reqs; r++)
        if (query_start_loc[r] != p->query_start_loc[r])
            return ca_fail(fault, CA_OTHER_LENGTHS, r, r, query_start_loc[r], p->query_start_loc[r]);
    for (int r = 0; r < p->shape.num_reqs; r++) {
        int here = dynamic_causal ? dynamic_causal[r] != 0 : causal;
        if (seq_lens[r] != p->seq_lens[r])
            return ca_fail(fault, CA_OTHER_SEQ_LENS, r, r, seq_lens[r], p->seq_lens[r]);
        if (here != p->causal[r])
            return ca_fail(fault, CA_OTHER_CAUSAL, r, r, here, p->causal[r]);
    }
    return CA_OK;
}

/* One kv head's selected blocks: ascending, then -1. */
static int check_selected(const int32_t *list, int64_t n, int64_t r, int64_t head, int64_t seq_blocks,
                          ca_fault *fault) {
    for (int64_t i = 0; i < n && !fault->status; i++) {
        if (list[i] < -1 || list[i] >= seq_blocks)
            ca_fail(fault, CA_BAD_SELECTED, r, i, list[i], seq_blocks);
        else if (i && list[i] != -1 && (uint32_t)list[i] <= (uint32_t)list[i - 1])
            ca_fail(fault, CA_SELECTED_ORDER, r, i, list[i], list[i - 1]);
    }
    fault->kv_head = head;
    return fault->status;
}

static const int32_t *table_row(const ca_array *table, int64_t request) {
    return (const int32_t *)table->address + request * table->strides[0];
}

/* Requests that share blocks in the plan have to share them in the call's table, whose width has been checked. */
static int check_shared(const ca_plan *p, const ca_array *table, ca_fault *fault) {
    for (int64_t n = 0; n < p->num_same; n++) {
        const ca_same *s = &p->same[n];
        const int32_t *here = table_row(table, s->request), *there = table_row(table, s->other);
        if (memcmp(here, there, (size_t)s->num_blocks * sizeof *here) == 0)
            continue;
        int64_t i = 0;
        while (here[i] == there[i])
            i++;
        return ca_fail(fault, CA_OTHER_BLOCKS, s->request, i, here[i], there[i]);
    }
    return CA_OK;
}

/* The blocks that hold a key some row may see. */
int ca_check_table(const ca_plan *p, const ca_array *table, const ca_array *selected, int64_t num_blocks,
                   int64_t block_size, ca_fault *fault) {
    if (p->shape.block_size && block_size != p->shape.block_size)
        return ca_fail(fault, CA_OTHER_BLOCK_SIZE, -1, -1, block_size, p->shape.block_size);
    for (int r = 0; r < p->shape.num_reqs; r++) {
        ca_task whole = {.request = r, .num_tokens = (int32_t)ca_q_len(p, r)};
        int64_t k0 = 0, k1 = 0;
        if (whole.num_tokens > 0)
            ca_task_keys(p, &whole, &k0, &k1);
        int64_t first = k0 < k1 ? k0 / block_size : 0, end = k0 < k1 ? ca_div_up(k1, block_size) : 0;
        const int32_t *blocks = table_row(table, r);
        if (!selected->itemsize && ca_check_blocks(blocks, r, first, end, table->shape[1], num_blocks, fault))
            return fault->status;
        for (int64_t h = 0, n = selected->shape[2]; n > 0 && h < selected->shape[1]; h++) {
            const int32_t *list =
                (const int32_t *)selected->address + r * selected->strides[0] + h * selected->strides[1];
            if (check_selected(list, n, r, h, ca_div_up(p->seq_lens[r], block_size), fault))
                return fault->status;
            for (int64_t i = 0; i < n; i++)
                if (list[i] >= first && list[i] < end &&
                    ca_check_blocks(blocks, r, list[i], list[i] + 1, table->shape[1], num_blocks, fault))
                    return fault->status;
        }
    }
    return check_shared(p, table, fault);
}

int ca_check_bias(const ca_plan *p, const ca_array *bias, ca_fault *fault) {
    for (int r = 0; bias->itemsize && r < p->shape.num_reqs; r++) {
        const int64_t q_len = ca_q_len(p, r);
        if (bias->shape[2] < q_len)
            return ca_fail(fault, CA_BIAS_SMALL, r, 2, bias->shape[2], q_len);
        if (q_len && bias->shape[3] < p->seq_lens[r])
            return ca_fail(fault, CA_BIAS_SMALL, r, 3, bias->shape[3], p->seq_lens[r]);
    }
    return CA_OK;
}

int ca_check_slots(const int64_t *slots, int64_t num_tokens, int64_t bound, ca_fault *fault) {
    for (int64_t i = 0; i < num_tokens; i++)
        if (slots[i] >= bound)
            return ca_fail(fault, CA_BAD_SLOT, -1, i, slots[i], bound);
    return CA_OK;
}

int ca_check_positions(const int64_t *positions, int64_t num_tokens, int64_t bound, ca_fault *fault) {
    for (int64_t i = 0; i < num_tokens; i++)
        if (positions[i] < 0 || positions[i] >= bound)
            return ca_fail(fault, CA_BAD_POSITION, -1, i, positions[i], bound);
    return CA_OK;
}

#define CALLS ((int64_t)(sizeof((ca_known *)0)->calls / sizeof((ca_known *)0)->calls[0]))

static int same_layout(const ca_array *a, const ca_array *b) {
    return !memcmp(a->shape, b->shape, sizeof *a - offsetof(ca_array, shape));
}

static struct ca_accepted *find(ca_known *known, const int64_t *sizes, const ca_array *a, int num_arrays) {
    for (int64_t c = 0; c < ca_min64(known->count, CALLS); c++) {
        struct ca_accepted *call = &known->calls[c];
        int same = !memcmp(call->sizes, sizes, sizeof call->sizes);
        for (int i = 0; same && i < num_arrays; i++)
            same = same_layout(&call->arrays[i], &a[i]);
        if (same)
            return call;
    }
    return NULL;
}

static const struct ca_accepted *remember(ca_known *known, const int64_t *sizes, int64_t isa, int64_t k_dtype,
                                          int64_t v_dtype, const ca_array *a, int num_arrays) {
    struct ca_accepted *call = find(known, sizes, a, num_arrays);
    if (!call)
        call = &known->calls[known->count++ % CALLS];
    memcpy(call->sizes, sizes, sizeof call->sizes);
    memcpy(call->arrays, a, (size_t)num_arrays * sizeof *a);
    call->isa = isa;
    call->k_dtype = k_dtype;
    call->v_dtype = v_dtype;
    return call;
}

/* First byte, and the one after the last. */
static void extent(const ca_array *a, uintptr_t *first, uintptr_t *end) {
    int64_t low = 0, high = 1;
    for (int i = 0; i < a->ndim; i++) {
        int64_t step = (a->shape[i] - 1) * a->strides[i];
        *(step < 0 ? &low : &high) += step;
        if (a->shape[i] == 0) {
            *first = *end = a->address;
            return;
        }
    }
    *first = a->address + (uintptr_t)(low * a->itemsize);
    *end = a->address + (uintptr_t)(high * a->itemsize);
}

/* 0: an address is no multiple of the itemsize, or an output may overlap another array. One may lie in the gaps of the
 * other (K and V of a block side by side), if that is where it lay in the call that was accepted. */
static int well_placed(const struct ca_accepted *call, const ca_array *a, int num_arrays, int num_outputs) {
    uintptr_t first[CA_ATTENTION_ARRAYS], end[CA_ATTENTION_ARRAYS];
    const ca_array *then = call->arrays;
    for (int i = 0; i < num_arrays; i++) {
        first[i] = end[i] = 0;
        if (!a[i].itemsize)
            continue;
        if (a[i].address & (uintptr_t)(a[i].itemsize - 1))
            return 0;
        extent(&a[i], &first[i], &end[i]);
        for (int o = 0; o < num_outputs && o < i; o++)
            if (first[o] < end[i] && first[i] < end[o] && first[i] < end[i] && first[o] < end[o] &&
                a[i].address - a[o].address != then[i].address - then[o].address)
                return 0;
    }
    return 1;
}

const struct ca_accepted *ca_accept(ca_known *known, const int64_t *sizes, int64_t isa, int64_t k_dtype,
                                    int64_t v_dtype, uintptr_t objects, const ca_array *given, ca_array *a,
                                    int num_arrays, int num_outputs) {
    if (!objects) {
        memcpy(a, given, (size_t)num_arrays * sizeof *a);
        return remember(known, sizes, isa, k_dtype, v_dtype, a, num_arrays);
    }
    if (!ca_read_arrays(objects, given, a, num_arrays))
        return NULL;
    const struct ca_accepted *call = find(known, sizes, a, num_arrays);
    return call && well_placed(call, a, num_arrays, num_outputs) ? call : NULL;
}

/* int32, dense: [num_reqs + 1], [num_reqs] and, where they are given, [num_reqs] and [num_reqs, any], whose rows may
 * lie anywhere. */
int ca_accept_step(uintptr_t objects, const ca_array *given, int64_t num_reqs, ca_array *a) {
    if (!objects) {
        memcpy(a, given, CA_STEP_ARRAYS * sizeof *a);
        return 1;
    }
    if (!ca_read_arrays(objects, given, a, CA_STEP_ARRAYS))
        return 0;
    for (int i = 0; i < CA_STEP_ARRAYS; i++) {
        if (i >= CA_STEP_DYNAMIC_CAUSAL && !a[i].itemsize)
            continue;
        int last = i == CA_STEP_BLOCK_TABLE;
        if (a[i].dtype != CA_I32 || a[i].ndim != 1 + last ||
            a[i].shape[0] != num_reqs + (i == CA_STEP_QUERY_START_LOC) ||
            (a[i].shape[last] > 1 && a[i].strides[last] != 1) || a[i].address % sizeof(int32_t))
            return 0;
    }
    return 1;
}
