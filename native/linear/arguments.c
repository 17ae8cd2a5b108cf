/* SPDX-License-Identifier: Apache-2.0
 * This file says what the arrays of the calls of linear attention have to be, in tables like those of
 * check/arguments.c, and checks what their indices hold. */
#include "linear.h"
#include <stdlib.h>

#define ONE(dtype) (UINT64_C(1) << (dtype))
#define INT32 ONE(CA_I32)
#define FLOAT32 ONE(CA_F32)
#define FLOATS (ONE(CA_F32) | ONE(CA_F16) | ONE(CA_BF16))
#define OWN ONE(63) /* the plan's dtype */

enum {
    OPTIONAL = 1,
    WRITTEN = 2,
    WIDER = 4,    /* may have one axis more, the last of the row */
    IN_PLACE = 8, /* the output may be this very array */
    SWAPS = 16,   /* the caller says in which order its last two axes are */
};

typedef struct argument {
    uint64_t dtypes;
    uint8_t index, flags, ndim, axes[4];
} argument;

/* The outputs are the first arrays; they share no memory with one another and with the rest. */
struct ca_linear_table {
    int num_arrays, num_outputs;
    argument rows[CA_LINEAR_ARRAYS];
};

#define AXES(n, ...)                                                                                                   \
    (n), { __VA_ARGS__ }
#define KEY_AXES AXES(3, CA_T, CA_NUM_K_HEADS, CA_HEAD_K_DIM)
#define VALUE_AXES AXES(3, CA_T, CA_NUM_V_HEADS, CA_HEAD_V_DIM)

const ca_linear_table ca_linear_attention_table = {
    CA_LINEAR_ARRAYS,
    2,
    {
        {OWN, CA_LINEAR_QUERY, 0, KEY_AXES},
        {OWN, CA_LINEAR_KEY, 0, KEY_AXES},
        {OWN, CA_LINEAR_VALUE, 0, VALUE_AXES},
        {OWN | FLOAT32, CA_LINEAR_OUTPUT, WRITTEN, VALUE_AXES},
        {FLOATS, CA_LINEAR_STATE_CACHE, WRITTEN | SWAPS,
         AXES(4, CA_NUM_SLOTS, CA_NUM_V_HEADS, CA_HEAD_K_DIM, CA_HEAD_V_DIM)},
        {FLOATS, CA_LINEAR_G, OPTIONAL | WIDER, AXES(2, CA_T, CA_NUM_V_HEADS, CA_HEAD_K_DIM)},
        {FLOATS, CA_LINEAR_BETA, OPTIONAL | WIDER, AXES(2, CA_T, CA_NUM_V_HEADS, CA_HEAD_V_DIM)},
        {FLOATS, CA_LINEAR_ERASE, OPTIONAL, AXES(3, CA_T, CA_NUM_V_HEADS, CA_HEAD_K_DIM)},
        {FLOATS, CA_LINEAR_A_LOG, OPTIONAL, AXES(1, CA_NUM_V_HEADS)},
        {FLOATS, CA_LINEAR_DT_BIAS, OPTIONAL | WIDER, AXES(1, CA_NUM_V_HEADS, CA_HEAD_K_DIM)},
        {FLOATS, CA_LINEAR_D, OPTIONAL | WIDER, AXES(1, CA_NUM_V_HEADS, CA_HEAD_V_DIM)},
        {INT32, CA_LINEAR_STATE_INDICES, 0, AXES(1, CA_NUM_REQS)},
        {INT32, CA_LINEAR_INITIAL_STATE_INDICES, OPTIONAL, AXES(1, CA_NUM_REQS)},
        {INT32, CA_LINEAR_CHECKPOINTS, OPTIONAL, AXES(2, CA_CHECKPOINTS, CA_REQUEST_TOKENS_SLOT)},
    },
};

const ca_linear_table ca_conv_table = {
    CA_CONV_ARRAYS,
    2,
    {
        {OWN, CA_CONV_X, IN_PLACE, AXES(2, CA_T, CA_CHANNELS)},
        {OWN, CA_CONV_OUTPUT, WRITTEN, AXES(2, CA_T, CA_CHANNELS)},
        {OWN | FLOAT32, CA_CONV_WEIGHT, 0, AXES(2, CA_CHANNELS, CA_WIDTH)},
        {OWN | FLOAT32, CA_CONV_BIAS, OPTIONAL, AXES(1, CA_CHANNELS)},
        {FLOATS, CA_CONV_STATE, WRITTEN | SWAPS, AXES(3, CA_NUM_SLOTS, CA_CHANNELS, CA_INPUTS)},
        {INT32, CA_CONV_STATE_INDICES, 0, AXES(1, CA_NUM_REQS)},
        {INT32, CA_CONV_INITIAL_STATE_INDICES, OPTIONAL, AXES(1, CA_NUM_REQS)},
        {INT32, CA_CONV_CHECKPOINTS, OPTIONAL, AXES(2, CA_CHECKPOINTS, CA_REQUEST_TOKENS_SLOT)},
    },
};

static uint64_t dtypes_of(const argument *row, int32_t dtype) {
    return row->dtypes & OWN ? (row->dtypes & ~OWN) | ONE(dtype) : row->dtypes;
}

/* Says of a fault that it is about this argument. */
static int blame(const argument *row, int32_t dtype, int status, ca_fault *fault) {
    fault->argument = row->index;
    fault->expected = dtypes_of(row, dtype);
    fault->ndim = row->ndim;
    for (int i = 0; i < row->ndim; i++)
        fault->axes[i] = row->axes[i];
    return status;
}

static int check_row(const argument *row, const ca_array *a, int swapped, int64_t *sizes, int32_t dtype,
                     ca_fault *fault) {
    argument here = *row;
    int64_t wanted[4];
    if (row->flags & SWAPS && swapped) {
        here.axes[row->ndim - 2] = row->axes[row->ndim - 1];
        here.axes[row->ndim - 1] = row->axes[row->ndim - 2];
    }
    here.ndim = (uint8_t)(row->ndim + (row->flags & WIDER && a->ndim == row->ndim + 1));
    for (int i = 0; i < here.ndim; i++)
        wanted[i] = sizes[here.axes[i]];
    int status = ca_check_array(a, dtypes_of(row, dtype), here.ndim, wanted, fault);
    if (!status && row->flags & WRITTEN)
        status = ca_check_written(a, fault);
    if (status)
        return blame(&here, dtype, status, fault);
    for (int i = 0; i < here.ndim; i++)
        sizes[here.axes[i]] = a->shape[i];
    return CA_OK;
}

int ca_linear_check(const ca_linear_table *table, int swapped, int64_t *sizes, int32_t dtype, uintptr_t objects,
                    const ca_array *given, ca_array *a, ca_fault *fault) {
    ca_extent at[CA_LINEAR_ARRAYS];
    int in_place[2] = {0, -1};
    fault->status = CA_OK; /* an attempt before this one may have left CA_UNREAD */
    for (int i = 0; i < table->num_arrays; i++) {
        const argument *row = &table->rows[i];
        ca_array *x = &a[row->index];
        const uintptr_t object = objects ? ((const uintptr_t *)objects)[row->index] : 0;
        at[row->index] = (ca_extent){0, 0};
        if (!object)
            *x = given[row->index];
        else if (!ca_read_array(object, x))
            return blame(row, dtype, ca_refuse(fault, CA_UNREAD, -1, -1, -1), fault);
        if (!x->itemsize && row->flags & OPTIONAL)
            continue;
        if (!x->itemsize || x->address & (uintptr_t)(x->itemsize - 1) || !ca_find_extent(x, &at[row->index]))
            return blame(row, dtype, ca_refuse(fault, CA_UNREAD, -1, -1, -1), fault);
        if (check_row(row, x, swapped, sizes, dtype, fault))
            return fault->status;
        if (row->flags & IN_PLACE)
            in_place[1] = row->index;
    }
    return ca_check_apart(table->num_outputs, table->num_arrays, in_place, a, at, fault);
}

int ca_linear_refuse_axes(const ca_linear_table *table, int index, const ca_array *a, int ndim, ca_fault *fault) {
    for (int i = 0; i < table->num_arrays; i++)
        if (table->rows[i].index == index) {
            argument here = table->rows[i];
            here.ndim = (uint8_t)ndim;
            return blame(&here, CA_F32, ca_refuse(fault, CA_WRONG_NDIM, -1, a->ndim, ndim), fault);
        }
    return CA_OK;
}

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

int ca_take_states(const ca_linear_plan *plan, const ca_array *a, int index, int64_t num_slots, ca_states *x,
                   ca_fault *fault) {
    const ca_array *to = &a[index], *from = &a[index + 1], *rows = &a[index + 2];
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
            return bad_state(fault, CA_BAD_STATE, index, r, slot, num_slots);
        x->to[r] = slot < 0 ? -1 : slot;
        if (slot >= 0 && claim(table, places, slot, r, index, r, fault))
            return fault->status;
    }
    if (take_checkpoints(plan, rows, index + 2, num_slots, x, table, places, fault))
        return fault->status;
    for (int32_t r = 0; r < num_reqs; r++) {
        const int32_t slot = from->itemsize ? ((const int32_t *)from->address)[r] : x->to[r];
        x->from[r] = -1;
        if (slot >= num_slots)
            return bad_state(fault, CA_BAD_STATE, index + 1, r, slot, num_slots);
        if (slot < 0 || !plan->has_initial_state[r])
            continue;
        const int32_t *place = place_of(table, places, slot);
        if (place[0] && place[1] != r)
            return bad_state(fault, CA_STATE_WRITTEN, index + 1, r, slot, place[1]);
        x->from[r] = slot;
    }
    return CA_OK;
}
