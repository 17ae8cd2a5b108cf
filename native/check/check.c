/* SPDX-License-Identifier: Apache-2.0
 * This file checks what lengths and indices hold. Another thread of the caller may write into them meanwhile, so what a
 * call goes by is copied first, and is checked and used in the copy. */
#include "check.h"
#include "plan/keys.h"
#include "cache/layout.h"
#include "run/threads.h"
#include <stdlib.h>

/* `blocks` points to block number `first` of a request's row of the table. */
static int check_blocks(const int32_t *blocks, int64_t request, int64_t first, int64_t end, int64_t cols,
                        int64_t num_blocks, ca_fault *fault) {
    if (end > cols)
        return ca_fail(fault, CA_BLOCK_TABLE_SHORT, request, -1, end, cols);
    for (int64_t i = first; i < end; i++, blocks++)
        if (*blocks < 0 || *blocks >= num_blocks)
            return ca_fail(fault, CA_BAD_BLOCK, request, i, *blocks, num_blocks);
    return CA_OK;
}

int ca_check_stack(int team, ca_fault *fault) {
    const int64_t bytes = ca_small_stack(team);
    return bytes ? ca_fail(fault, CA_SMALL_STACK, -1, -1, bytes, CA_STACK_BYTES) : CA_OK;
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
        if (seq_lens[r] != p->all_lens[r])
            return ca_fail(fault, CA_OTHER_SEQ_LENS, r, r, seq_lens[r], p->all_lens[r]);
        if (here != p->causal[r])
            return ca_fail(fault, CA_OTHER_CAUSAL, r, r, here, p->causal[r]);
    }
    return CA_OK;
}

/* Checks n entries of a selection, from `position` on: they ascend below `bound`, then -1. `before` is the entry before
 * them as unsigned, or -1 where there is none. */
static int check_selected(const int32_t *list, int64_t n, int64_t position, int64_t before, int64_t bound,
                          ca_fault *fault) {
    for (int64_t i = 0; i < n; before = (uint32_t)list[i++])
        if (list[i] < -1 || list[i] >= bound)
            return ca_fail(fault, CA_BAD_SELECTED, -1, position + i, list[i], bound);
        else if (list[i] != -1 && (uint32_t)list[i] <= before)
            return ca_fail(fault, CA_SELECTED_ORDER, -1, position + i, list[i], (int32_t)before);
    return CA_OK;
}

/* Copies n of the entries of a selection to `list`, and checks all of them: those behind the n have to be -1. */
static int take_list(const int32_t *from, int64_t all, int64_t n, int64_t bound, int32_t *list, ca_fault *fault) {
    memcpy(list, from, (size_t)n * sizeof *list);
    if (check_selected(list, n, 0, -1, bound, fault) || all == n)
        return fault->status;
    return check_selected(from + n, all - n, n, n ? (int64_t)(uint32_t)list[n - 1] : -1, bound, fault);
}

/* Requests that share blocks in the plan have to share them in the call's table. They see all of their first keys, so
 * that these blocks are copied. */
static int check_shared(const ca_plan *p, const ca_indices *indices, ca_fault *fault) {
    for (int64_t n = 0; n < p->num_same; n++) {
        const ca_same *s = &p->same[n];
        const int32_t *here = indices->blocks + indices->table_at[s->request],
                      *there = indices->blocks + indices->table_at[s->other];
        if (memcmp(here, there, (size_t)s->num_blocks * sizeof *here) == 0)
            continue;
        int64_t i = 0;
        while (here[i] == there[i])
            i++;
        return ca_fail(fault, CA_OTHER_BLOCKS, s->request, i, here[i], there[i]);
    }
    return CA_OK;
}

/* The query tokens that list number i of request r is for see only keys in the blocks [*first, *end). */
static void blocks_of_list(const ca_plan *p, int64_t r, int64_t i, int64_t block_size, int64_t *first, int64_t *end) {
    const int64_t size = p->shape.query_block_size;
    int64_t k0 = p->first_key[r], k1 = p->end_key[r];
    if (size) {
        const ca_task task = {.request = (int32_t)r,
                              .token = (int32_t)(i * size),
                              .num_tokens = (int32_t)ca_min64(size, ca_q_len(p, (int)r) - i * size)};
        ca_task_keys(p, &task, &k0, &k1);
    }
    *first = k0 / block_size;
    *end = k0 < k1 ? ca_div_up(k1, block_size) : *first;
}

/* Copies and checks the lists of request r, whose table is copied. A list keeps only as many entries as the
 * longest request has blocks: all entries behind these have to be -1. */
static int take_selected(const ca_plan *p, const ca_array *selected, int64_t r, int64_t cols, int64_t num_blocks,
                         int64_t block_size, ca_indices *indices, ca_fault *fault) {
    const int64_t heads = selected->shape[1], lists = p->first_list[r + 1] - p->first_list[r];
    const int64_t seq_blocks = ca_div_up(p->seq_lens[r], block_size), n = indices->num_selected;
    for (int64_t k = 0; k < lists * heads; k++) {
        const int64_t at = p->first_list[r] + k / heads, h = k % heads;
        const int32_t *from = (const int32_t *)selected->address + at * selected->strides[0] + h * selected->strides[1];
        int32_t *list = indices->selected + (at * heads + h) * n;
        int64_t first, end;
        if (take_list(from, selected->shape[2], n, seq_blocks, list, fault)) {
            fault->request = r;
            *(p->shape.select_by_query_head ? &fault->query_head : &fault->kv_head) = h;
            fault->query_block = p->shape.query_block_size ? at : -1;
            return fault->status;
        }
        blocks_of_list(p, r, k / heads, block_size, &first, &end);
        for (int64_t i = 0; i < n; i++)
            if (list[i] >= first && list[i] < end &&
                check_blocks(&indices->blocks[indices->table_at[r] + list[i]], r, list[i], list[i] + 1, cols,
                             num_blocks, fault))
                return fault->status;
    }
    return CA_OK;
}

/* Copies and checks what the query tokens of request r select, whose table is copied, and the blocks of the keys that a
 * token sees of these. */
static int take_selected_tokens(const ca_plan *p, const ca_array *tokens, int64_t r, int64_t cols, int64_t num_blocks,
                                int64_t block_size, ca_indices *indices, ca_fault *fault) {
    const int64_t n = indices->num_selected_tokens;
    for (int64_t i = 0; i < ca_q_len(p, (int)r); i++) {
        const int64_t t = p->query_start_loc[r] + i;
        int32_t *list = indices->selected_tokens + t * n;
        int64_t lo, hi, end = 0; /* blocks that end up to there have been looked at */
        if (take_list((const int32_t *)tokens->address + t * tokens->strides[0], tokens->shape[1], n, p->seq_lens[r],
                      list, fault)) {
            fault->request = r;
            fault->token = t;
            return fault->status;
        }
        ca_visible(p, (int)r, i, &lo, &hi);
        for (int64_t j = 0; j < n && list[j] < hi && list[j] >= 0; j++) {
            if (list[j] < lo || list[j] < end)
                continue;
            const int64_t block = list[j] / block_size;
            if (check_blocks(&indices->blocks[indices->table_at[r] + block], r, block, block + 1, cols, num_blocks,
                             fault))
                return fault->status;
            end = (block + 1) * block_size;
        }
    }
    return CA_OK;
}

/* Makes room for what a call reads of its table and its selections. Returns 0 where there is no memory. */
static int make_room(const ca_plan *p, const ca_array *table, const ca_array *selected, const ca_array *tokens,
                     int64_t block_size, ca_indices *indices) {
    const int64_t num_reqs = p->shape.num_reqs;
    /* A range of n keys lies in up to n / block_size + 2 blocks. */
    double entries =
        fmin((double)(p->num_keys / block_size + 2 * num_reqs), (double)num_reqs * (double)table->shape[1]);
    indices->num_selected = -1;
    if (selected->itemsize) {
        indices->num_selected = ca_min64(selected->shape[2], ca_div_up(ca_longest(p), block_size));
        entries += (double)p->first_list[num_reqs] * (double)selected->shape[1] * (double)indices->num_selected;
    }
    indices->num_selected_tokens = ca_min64(tokens->shape[1], ca_longest(p));
    entries += (double)p->num_tokens * (double)indices->num_selected_tokens;
    const double bytes = (double)num_reqs * sizeof *indices->table_at + entries * sizeof *indices->blocks;
    indices->memory = bytes <= sizeof indices->few  ? indices->few
                      : bytes < (double)PTRDIFF_MAX ? malloc((size_t)bytes)
                                                    : NULL;
    indices->table_at = indices->memory;
    indices->blocks = (int32_t *)(indices->table_at + num_reqs);
    return indices->memory != NULL;
}

/* Copies n blocks, and returns whether all of the copies are below num_blocks: then neither a block nor its distance to
 * the last one has the sign bit. */
static int copy_blocks(const int32_t *restrict from, int64_t n, int64_t num_blocks, int32_t *restrict to) {
    const uint32_t last = (uint32_t)(num_blocks - 1);
    uint32_t signs = 0;
    for (int64_t i = 0; i < n; i++) {
        to[i] = from[i];
        signs |= (uint32_t)to[i] | (last - (uint32_t)to[i]);
    }
    return !(signs >> 31);
}

static int64_t there(int64_t first, int64_t end, int64_t cols) { return ca_max64(0, ca_min64(end, cols) - first); }

int ca_take_blocks(const int32_t *row, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                   int32_t *to, ca_fault *fault) {
    const int fine = copy_blocks(row + first, there(first, end, cols), num_blocks, to);
    return fine && end <= cols ? CA_OK : check_blocks(to, request, first, end, cols, num_blocks, fault);
}

/* A plan is for calls that select tokens, up to so many each, or for others. */
static int check_selects(const ca_plan *p, const ca_array *selected, const ca_array *tokens, ca_fault *fault) {
    const int64_t most = p->shape.max_selected_tokens, columns = tokens->itemsize ? tokens->shape[1] : -1;
    if (selected->itemsize && tokens->itemsize)
        return ca_fail(fault, CA_SELECTED_TWICE, -1, -1, -1, -1);
    if (columns > most || (columns < 0) != (most == 0))
        return ca_fail(fault, CA_OTHER_SELECTED, -1, -1, columns, most);
    return CA_OK;
}

int ca_take_indices(const ca_plan *p, const ca_array *table, const ca_array *selected, const ca_array *tokens,
                    int64_t num_blocks, int64_t block_size, ca_indices *indices, ca_fault *fault) {
    const int64_t cols = table->shape[1];
    const int selects = selected->itemsize || tokens->itemsize;
    int64_t taken = 0;
    int status = CA_OK;
    indices->memory = NULL;
    if (p->shape.block_size && block_size != p->shape.block_size)
        return ca_fail(fault, CA_OTHER_BLOCK_SIZE, -1, -1, block_size, p->shape.block_size);
    if (check_selects(p, selected, tokens, fault))
        return fault->status;
    if (!make_room(p, table, selected, tokens, block_size, indices))
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    for (int r = 0; r < p->shape.num_reqs && !status; r++) {
        const int64_t first = p->first_key[r] / block_size, end = ca_div_up(p->end_key[r], block_size);
        const int32_t *row = (const int32_t *)table->address + r * table->strides[0];
        int32_t *to = indices->blocks + taken;
        if (selects) /* which of the blocks count is not known yet */
            memcpy(to, row + first, (size_t)there(first, end, cols) * sizeof *to);
        else
            status = ca_take_blocks(row, r, first, end, cols, num_blocks, to, fault);
        indices->table_at[r] = taken - first;
        taken += there(first, end, cols);
    }
    if (!selects)
        return status ? status : check_shared(p, indices, fault);
    indices->selected = indices->selected_tokens = indices->blocks + taken;
    for (int r = 0; r < p->shape.num_reqs && !status; r++)
        status = selected->itemsize ? take_selected(p, selected, r, cols, num_blocks, block_size, indices, fault)
                                    : take_selected_tokens(p, tokens, r, cols, num_blocks, block_size, indices, fault);
    return status;
}

void ca_give_back(void *memory, void *few) {
    if (memory != few)
        free(memory);
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

/* Copies the integers, to `few` where they fit. Returns NULL where one is out of range, or where there is no memory. */
static int64_t *take_integers(const ca_array *from, int64_t least, int64_t bound, int64_t *few, int status,
                              ca_fault *fault) {
    const int64_t n = from->shape[0];
    int64_t *to = n <= CA_FEW_INDICES ? few : malloc((size_t)n * sizeof *to);
    if (!to) {
        ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
        return NULL;
    }
    memcpy(to, (const void *)from->address, (size_t)n * sizeof *to);
    for (int64_t i = 0; i < n; i++)
        if (to[i] < least || to[i] >= bound) {
            ca_fail(fault, status, -1, i, to[i], bound);
            ca_give_back(to, few);
            return NULL;
        }
    return to;
}

int64_t *ca_take_slots(const ca_array *slots, int64_t bound, int64_t *few, ca_fault *fault) {
    return take_integers(slots, INT64_MIN, bound, few, CA_BAD_SLOT, fault);
}

int64_t *ca_take_positions(const ca_array *positions, int64_t bound, int64_t *few, ca_fault *fault) {
    return take_integers(positions, 0, bound, few, CA_BAD_POSITION, fault);
}
