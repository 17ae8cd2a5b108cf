/* SPDX-License-Identifier: Apache-2.0
 * This file checks the arrays of a call. Each call has a table, with a row for each array in the order in which they
 * are checked, and ca_check_arguments goes through every table alike. The rows are those of cpu_attn/_arguments.py, out
 * of which build_ffi.py makes argument_rows.h. */
#include "check.h"
#include "argument_rows.h"
#include "cache/layout.h"

/* No call has more heads, nor a larger head size, so that every product of sizes is within int64. This is
 * _check.MAX_SIZE. */
#define MAX_SIZE 65536

#define ONE(dtype) (UINT64_C(1) << (dtype))
#define INT32 ONE(CA_I32)
#define INT64 ONE(CA_I64)
#define FLOAT32 ONE(CA_F32)
#define FLOAT16 ONE(CA_F16)
#define BFLOAT16 ONE(CA_BF16)
#define OWN ONE(63) /* the call's dtype: what fit->dtype says, or what the first argument has that is OWN */

enum {
    OPTIONAL = 1,
    LENGTHS = 2, /* optional where fit->without_lengths */
    WRITTEN = 4,
    CACHE = 8,     /* a cache, of K unless OF_V is set; its dtype follows from what it holds */
    OF_V = 16,     /* the cache of V; that of K is in the row before */
    IN_PLACE = 32, /* the two of which this is said may be the very same array; one of them is WRITTEN */
    ONE_HEAD = 64, /* comes without the axis of kv heads, of which there is one; V of such a cache is a part of K */
    LISTS = 128,   /* its first axis counts query blocks where fit->sizes has these, its second one heads that select */
    WIDER = 256,   /* may have one axis more, the last of `axes` */
    SWAPS = 512,   /* its last two axes come the other way round where fit->swapped */
};

typedef struct ca_argument {
    uint64_t dtypes;
    uint8_t index;
    uint16_t flags;
    uint8_t ndim, axes[4];
} ca_argument;

struct ca_table {
    /* The outputs are the first arrays; they share no memory with one another and with the rest. */
    int num_arrays, num_outputs;
    ca_argument rows[CA_UPDATE_ARRAYS]; /* CA_UPDATE_ARRAYS is the most that a call has */
};

const ca_table ca_attention_table = CA_ATTENTION_ROWS;
const ca_table ca_step_table = CA_STEP_ROWS;
const ca_table ca_write_table = CA_WRITE_ROWS;
const ca_table ca_index_table = CA_INDEX_ROWS;
const ca_table ca_select_table = CA_SELECT_ROWS;
const ca_table ca_rotary_table = CA_ROTARY_ROWS;
const ca_table ca_bounds_table = CA_BOUNDS_ROWS;
const ca_table ca_scores_table = CA_SCORES_ROWS;
const ca_table ca_update_table = CA_UPDATE_ROWS;
const ca_table ca_linear_table = CA_LINEAR_ROWS;
const ca_table ca_conv_table = CA_CONV_ROWS;

int ca_check_array(const ca_array *a, uint64_t expected, int ndim, const int64_t *sizes, ca_fault *fault) {
    if (!(expected >> a->dtype & 1))
        return ca_refuse(fault, CA_WRONG_DTYPE, -1, a->dtype, -1);
    if (a->ndim != ndim)
        return ca_refuse(fault, CA_WRONG_NDIM, -1, a->ndim, ndim);
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] >= 0 && a->shape[i] != sizes[i])
            return ca_refuse(fault, CA_WRONG_SIZE, i, a->shape[i], sizes[i]);
        if (a->shape[i] > INT32_MAX)
            return ca_refuse(fault, CA_LARGE_SIZE, i, a->shape[i], INT32_MAX);
    }
    if (a->shape[ndim - 1] > 1 && a->strides[ndim - 1] != 1 && !ca_is_empty(a))
        return ca_refuse(fault, CA_NOT_DENSE, ndim - 1, a->strides[ndim - 1], 1);
    return CA_OK;
}

int ca_check_cache(const ca_array *a, int kv_cache_layout, ca_fault *fault) {
    if (ca_kv_of(a, kv_cache_layout, 0).block_size < 1)
        return ca_refuse(fault, CA_EMPTY_BLOCK, -1, 0, 1);
    if (kv_cache_layout == CA_PACKED && a->shape[2] > 1 && a->strides[2] != a->shape[3] && !ca_is_empty(a))
        return ca_refuse(fault, CA_BLOCK_NOT_DENSE, 2, a->strides[2], a->shape[3]);
    return CA_OK;
}

int64_t ca_cache_width(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size) {
    const int64_t k = ca_block_elements(isa, dtype, kv_dtype, block_size, head_size, K);
    const int64_t v = ca_block_elements(isa, dtype, kv_dtype, block_size, head_size, V);
    return ca_div_up(ca_max64(k, v), block_size);
}

int ca_check_width(const ca_array *a, int kv_cache_layout, int isa, int dtype, int kv_dtype, int64_t head_size,
                   ca_fault *fault) {
    int64_t width = head_size;
    if (kv_cache_layout == CA_PACKED)
        width = ca_cache_width(isa, dtype, kv_dtype, a->shape[2], head_size);
    if (a->shape[3] == width)
        return CA_OK;
    ca_refuse(fault, CA_WRONG_WIDTH, 3, a->shape[3], width);
    fault->head_size = head_size;
    fault->kv_cache_layout = kv_cache_layout;
    return fault->status;
}

/* Returns the dtypes that the memory of a cache may have: that of fp8 may also be called bytes, and that of integers
 * has to be. */
static uint64_t memory_of(int kv_dtype) {
    return (ca_is_scaled(kv_dtype) ? 0 : ONE(kv_dtype)) | (ca_is_quantised(kv_dtype) ? ONE(CA_U8) : 0);
}

int ca_find_meaning(ca_fit *fit, ca_fault *fault) {
    const ca_meaning *m = fit->meaning;
    if (!m->of[fit->dtype].known || fit->sizes[CA_HEAD_SIZE] % m->head_sizes)
        return ca_refuse(fault, CA_UNNAMED, -1, fit->dtype, fit->sizes[CA_HEAD_SIZE]);
    fit->isa = m->of[fit->dtype].isa;
    fit->kv_dtype[K] = m->of[fit->dtype].kv_dtype[K];
    fit->kv_dtype[V] = m->of[fit->dtype].kv_dtype[V];
    return CA_OK;
}

static uint64_t dtypes_of(const ca_argument *row, const ca_fit *fit) {
    if (row->flags & CACHE)
        return memory_of(fit->kv_dtype[row->flags & OF_V ? V : K]);
    const uint64_t own = fit->dtype < 0 ? ONE(CA_F32) | ONE(CA_F16) | ONE(CA_BF16) : ONE(fit->dtype);
    return row->dtypes & OWN ? (row->dtypes & ~OWN) | own : row->dtypes;
}

/* Takes from an array those sizes of the call, and the dtype, that no argument before it had. */
static int take_sizes(const ca_argument *row, const ca_array *a, ca_fit *fit, ca_fault *fault) {
    if (row->dtypes & OWN && fit->dtype < 0)
        fit->dtype = a->dtype;
    for (int i = row->ndim - 1; i >= 0; i--) {
        const int symbol = row->axes[i];
        const int64_t size = a->shape[i];
        int64_t least = 0, most = INT32_MAX;
        if (symbol == CA_ROT_DIM) {
            least = 2;
            most = fit->sizes[CA_HEAD_SIZE];
        } else if (symbol >= CA_FREE || fit->sizes[symbol] >= 0)
            continue;
        else if (symbol >= CA_NUM_HEADS && symbol <= CA_HEAD_SIZE_V) {
            least = 1;
            most = MAX_SIZE;
        }
        if (size < least || size > most) {
            ca_refuse(fault, CA_OUTSIDE, i, size, most);
            fault->least = least;
            return fault->status;
        }
        if (symbol == CA_ROT_DIM && size % 2)
            return ca_refuse(fault, CA_ODD_ROT_DIM, i, size, -1);
        if (symbol < CA_FREE)
            fit->sizes[symbol] = size;
        if (symbol == CA_NUM_REQS)
            fit->sizes[CA_NUM_REQS_1] = size + 1;
    }
    return CA_OK;
}

static int has_one_head(const ca_argument *row, const ca_fit *fit) {
    return row->flags & ONE_HEAD || (row->flags & CACHE && fit->latent);
}

/* Returns which axis is that of kv heads, where an array comes without, else -1. */
static int missing_axis(const ca_argument *row, const ca_fit *fit) {
    return has_one_head(row, fit) ? 1 + (row->flags & CACHE && fit->kv_cache_layout == CA_NHD) : -1;
}

static void insert_axis(ca_array *a, int axis) {
    for (int i = a->ndim++; i > axis; i--) {
        a->shape[i] = a->shape[i - 1];
        a->strides[i] = a->strides[i - 1];
    }
    a->shape[axis] = 1;
    a->strides[axis] = 0;
}

/* Says of a fault that it is about this argument, as the caller knows it. */
static int blame(const ca_argument *row, const ca_fit *fit, int status, ca_fault *fault) {
    const int missing = missing_axis(row, fit);
    if (!status)
        return status;
    fault->argument = row->index;
    fault->expected = dtypes_of(row, fit);
    fault->ndim = 0;
    for (int i = 0; i < row->ndim; i++)
        if (missing < 0 || row->axes[i] != CA_NUM_KV_HEADS)
            fault->axes[fault->ndim++] = row->axes[i];
    if (missing >= 0 && fault->position > missing)
        fault->position--;
    return status;
}

static int check_row(const ca_argument *row, const ca_array *a, ca_fit *fit, ca_fault *fault) {
    ca_argument here = *row;
    int64_t sizes[4];
    if (row->flags & LISTS && fit->sizes[CA_QUERY_BLOCKS] >= 0)
        here.axes[0] = CA_QUERY_BLOCKS;
    if (row->flags & LISTS && fit->select_by_query_head)
        here.axes[1] = CA_NUM_HEADS;
    if (row->flags & CACHE && fit->kv_cache_layout == CA_NHD) {
        here.axes[1] = row->axes[2];
        here.axes[2] = row->axes[1];
    }
    if (row->flags & SWAPS && fit->swapped) {
        here.axes[row->ndim - 2] = row->axes[row->ndim - 1];
        here.axes[row->ndim - 1] = row->axes[row->ndim - 2];
    }
    here.ndim = (uint8_t)(row->ndim + (row->flags & WIDER && a->ndim == row->ndim + 1));
    for (int i = 0; i < here.ndim; i++)
        sizes[i] = here.axes[i] & CA_OR_1 && a->shape[i] == 1 ? 1 : fit->sizes[here.axes[i] & ~CA_OR_1];
    int status = ca_check_array(a, dtypes_of(row, fit), here.ndim, sizes, fault);
    if (!status)
        status = take_sizes(&here, a, fit, fault);
    if (!status && row->flags & CACHE)
        status = ca_check_cache(a, fit->kv_cache_layout, fault);
    else if (!status && row->flags & WRITTEN)
        status = ca_check_written(a, fault);
    return blame(&here, fit, status, fault);
}

/* Checks what is left to check of a cache, once both caches are known to fit each other. */
static int check_memory(const ca_argument *row, const ca_array *a, const ca_fit *fit, ca_fault *fault) {
    const int v = row->flags & OF_V ? V : K;
    int status = row->flags & WRITTEN ? ca_check_written(a, fault) : CA_OK;
    if (!status)
        status = ca_check_width(a, fit->kv_cache_layout, fit->isa, fit->dtype, fit->kv_dtype[v],
                                fit->sizes[v ? CA_HEAD_SIZE_V : CA_HEAD_SIZE], fault);
    return blame(row, fit, status, fault);
}

static int unread(const ca_argument *row, const ca_fit *fit, ca_fault *fault) {
    return blame(row, fit, ca_refuse(fault, CA_UNREAD, -1, -1, -1), fault);
}

/* Returns whether one is the very array that the other is. */
static int is_same(const ca_array *a, const ca_array *b) {
    int same = a->address == b->address;
    for (int i = 0; i < a->ndim; i++)
        same &= a->shape[i] == b->shape[i] && (a->shape[i] <= 1 || a->strides[i] == b->strides[i]);
    return same;
}

int ca_check_apart(int num_outputs, int num_arrays, const int in_place[2], const ca_array *a, const ca_extent *at,
                   ca_fault *fault) {
    for (int o = 0; o < num_outputs; o++)
        for (int i = o + 1; i < num_arrays; i++)
            if (at[o].first < at[i].end && at[i].first < at[o].end &&
                !(in_place[0] == o && in_place[1] == i && is_same(&a[o], &a[i])) &&
                ca_meet(&a[o], at[o], &a[i], at[i])) {
                ca_refuse(fault, CA_SHARES_MEMORY, -1, i, -1);
                fault->argument = o;
                return CA_SHARES_MEMORY;
            }
    return CA_OK;
}

int ca_check_arguments(const ca_table *table, ca_fit *fit, uintptr_t objects, const ca_array *given, ca_array *a,
                       ca_fault *fault) {
    ca_extent at[CA_UPDATE_ARRAYS];
    int in_place[2] = {-1, -1};
    fault->status = CA_OK; /* an attempt before this one may have left CA_UNREAD */
    for (int i = 0; i < table->num_arrays; i++) {
        const ca_argument *row = &table->rows[i];
        const int one_head = has_one_head(row, fit);
        ca_array *x = &a[row->index];
        at[row->index] = (ca_extent){0, 0};
        if (row->flags & OF_V && one_head) {
            *x = a[row[-1].index];
            continue;
        }
        const uintptr_t object = objects ? ((const uintptr_t *)objects)[row->index] : 0;
        if (row->flags & CACHE && fit->isa < 0 && ca_find_meaning(fit, fault))
            return fault->status;
        if (!object)
            *x = given[row->index];
        else if (!ca_read_array(object, x))
            return unread(row, fit, fault);
        if (!x->itemsize) {
            if (row->flags & OPTIONAL || (row->flags & LENGTHS && fit->without_lengths))
                continue;
            return unread(row, fit, fault);
        }
        if (x->address & (uintptr_t)(x->itemsize - 1) || !ca_find_extent(x, &at[row->index]))
            return unread(row, fit, fault);
        if (one_head) {
            if (x->ndim != row->ndim - 1)
                return blame(row, fit, ca_refuse(fault, CA_WRONG_NDIM, -1, x->ndim, row->ndim - 1), fault);
            insert_axis(x, missing_axis(row, fit));
        }
        if (check_row(row, x, fit, fault))
            return fault->status;
        if (row->flags & OF_V &&
            (check_memory(row - 1, &a[row[-1].index], fit, fault) || check_memory(row, x, fit, fault)))
            return fault->status;
        if (row->flags & CACHE && one_head && check_memory(row, x, fit, fault))
            return fault->status;
        if (row->flags & IN_PLACE)
            in_place[row->flags & WRITTEN ? 0 : 1] = row->index;
    }
    return ca_check_apart(table->num_outputs, table->num_arrays, in_place, a, at, fault);
}

int ca_refuse_axes(const ca_table *table, const ca_fit *fit, int index, const ca_array *a, int ndim, ca_fault *fault) {
    const ca_argument *row = table->rows;
    while (row->index != index)
        row++;
    ca_argument here = *row;
    here.ndim = (uint8_t)ndim;
    return blame(&here, fit, ca_refuse(fault, CA_WRONG_NDIM, -1, a->ndim, ndim), fault);
}

void ca_attention_of_update(const ca_array *update, ca_array *attention) {
    static const int8_t where[] = CA_ATTENTION_IN_UPDATE;
    for (int i = 0; i < CA_ATTENTION_ARRAYS; i++)
        attention[i] = update[where[i]];
}
