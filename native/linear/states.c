/* SPDX-License-Identifier: Apache-2.0
 * This file checks what the indices of states hold. */
#include "linear.h"
#include <stdlib.h>

/* Finds the place of a slot in a table of those that a call writes: a place holds `slot + 1, request`, or 0 where it is
 * free. */
static int32_t *place_of(int32_t *table, int64_t places, int32_t slot) {
    uint64_t i = (uint64_t)slot * UINT64_C(0x9e3779b97f4a7c15) >> 32;
    while (table[2 * (i &= (uint64_t)places - 1)] && table[2 * i] != slot + 1)
        i++;
    return &table[2 * i];
}

static int bad_state(ca_fault *fault, int status, int argument, int64_t position, int64_t value, int64_t bound) {
    ca_fail(fault, status, -1, position, value, bound);
    fault->argument = argument;
    return status;
}

static int claim(int32_t *table, int64_t places, int32_t slot, int32_t request, int argument, int64_t position,
                 ca_fault *fault) {
    int32_t *place = place_of(table, places, slot);
    if (place[0])
        return bad_state(fault, CA_STATE_TWICE, argument, position, slot, -1);
    place[0] = slot + 1;
    place[1] = request;
    return CA_OK;
}

/* Takes the rows (request, token, slot) of checkpoints, which ascend by request and token. A row with a negative slot
 * is none. */
static int take_checkpoints(const ca_linear_plan *plan, const ca_array *rows, int argument, int64_t num_slots,
                            ca_states *x, int32_t *table, int64_t places, ca_fault *fault) {
    const int32_t num_reqs = plan->shape.num_reqs;
    int32_t taken = 0, request = 0, token = 0;
    x->first_checkpoint[0] = 0;
    for (int64_t i = 0; rows->itemsize && i < rows->shape[0]; i++) {
        const int32_t *row = (const int32_t *)rows->address + i * rows->strides[0];
        const int32_t r = row[0], t = row[1], slot = row[2];
        if (slot < 0)
            continue;
        const int axis = slot >= num_slots ? 2 : r < 0 || r >= num_reqs ? 0 : 1;
        const int64_t bound = axis == 2 ? num_slots - 1 : axis == 0 ? num_reqs - 1 : ca_linear_q_len(plan, r);
        if (axis != 1 || t < 1 || t > bound) {
            bad_state(fault, CA_BAD_CHECKPOINT, argument, i, row[axis], bound);
            fault->token = axis;
            fault->least = axis == 1;
            return fault->status;
        }
        if (r < request || (r == request && t < token))
            return bad_state(fault, CA_CHECKPOINT_ORDER, argument, i, -1, -1);
        if (claim(table, places, slot, r, argument, i, fault))
            return fault->status;
        while (request < r)
            x->first_checkpoint[++request] = taken;
        token = t;
        x->checkpoints[taken++] = (ca_checkpoint){t, slot};
    }
    while (request < num_reqs)
        x->first_checkpoint[++request] = taken;
    return CA_OK;
}

int ca_take_states(const ca_linear_plan *plan, const ca_array *a, const ca_slots *index, ca_states *x,
                   ca_fault *fault) {
    const ca_array *to = &a[index->to], *from = &a[index->from], *rows = &a[index->checkpoints];
    const int64_t num_slots = a[index->states].shape[0];
    const int64_t num_reqs = plan->shape.num_reqs, num_rows = rows->itemsize ? rows->shape[0] : 0;
    int64_t places = 2;
    while (places < 2 * (num_reqs + num_rows))
        places *= 2;
    const int64_t ints = 3 * num_reqs + 1 + 2 * num_rows + 2 * places;
    x->memory = ints <= (int64_t)(sizeof x->few / sizeof *x->few) ? x->few : malloc((size_t)ints * sizeof *x->memory);
    if (!x->memory)
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    int32_t *table = x->memory;
    x->from = table + 2 * places;
    x->to = x->from + num_reqs;
    x->first_checkpoint = x->to + num_reqs;
    x->checkpoints = (ca_checkpoint *)(void *)(x->first_checkpoint + num_reqs + 1);
    memset(table, 0, (size_t)places * 2 * sizeof *table);
    for (int32_t r = 0; r < num_reqs; r++) {
        const int32_t slot = ((const int32_t *)to->address)[r];
        if (slot >= num_slots)
            return bad_state(fault, CA_BAD_STATE, index->to, r, slot, num_slots);
        x->to[r] = slot < 0 ? -1 : slot;
        if (slot >= 0 && claim(table, places, slot, r, index->to, r, fault))
            return fault->status;
    }
    if (take_checkpoints(plan, rows, index->checkpoints, num_slots, x, table, places, fault))
        return fault->status;
    for (int32_t r = 0; r < num_reqs; r++) {
        const int32_t slot = from->itemsize ? ((const int32_t *)from->address)[r] : x->to[r];
        x->from[r] = -1;
        if (slot >= num_slots)
            return bad_state(fault, CA_BAD_STATE, index->from, r, slot, num_slots);
        if (slot < 0 || !plan->has_initial_state[r])
            continue;
        const int32_t *place = place_of(table, places, slot);
        if (place[0] && place[1] != r)
            return bad_state(fault, CA_STATE_WRITTEN, index->from, r, slot, place[1]);
        x->from[r] = slot;
    }
    return CA_OK;
}
