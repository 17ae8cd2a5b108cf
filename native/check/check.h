/* SPDX-License-Identifier: Apache-2.0
 * These functions check arguments against their tables, and what indices hold. */
#ifndef CPU_ATTN_CHECK_H
#define CPU_ATTN_CHECK_H
#include "run/engine.h"

static inline int ca_fail(ca_fault *fault, int status, int64_t request, int64_t position, int64_t value,
                          int64_t bound) {
    *fault = (ca_fault){.status = status, .request = request, .position = position, .value = value, .bound = bound};
    fault->kv_head = fault->query_head = fault->query_block = fault->token = -1;
    return status;
}

/* Fails because of an argument, which ca_check_arguments adds to the fault. */
static inline int ca_refuse(ca_fault *fault, int status, int64_t position, int64_t value, int64_t bound) {
    return ca_fail(fault, status, -1, position, value, bound);
}

static inline int ca_is_empty(const ca_array *a) {
    for (int i = 0; i < a->ndim && i < 4; i++)
        if (!a->shape[i])
            return 1;
    return 0;
}

/* Holds what one call reads of its block table, and of what is selected, copied and checked: see ca_call. */
typedef struct ca_indices {
    int64_t *table_at;
    int32_t *blocks, *selected, *selected_tokens;
    int64_t num_selected, num_selected_tokens;
    void *memory; /* `few`, or memory for more than fits there */
    int64_t few[128];
} ca_indices;

/* Copies and checks the blocks that hold a key some row may see: they have to be below num_blocks, and the same for
 * requests that share them in the plan. Whether this succeeds or not, ca_give_back(x->memory, x->few) has to follow. */
int ca_take_indices(const ca_plan *plan, const ca_array *table, const ca_array *selected, const ca_array *tokens,
                    int64_t num_blocks, int64_t block_size, ca_indices *indices, ca_fault *fault);
/* These copy int64 [T], to `few`, which holds CA_FEW_INDICES, where they fit, and check the copy. They return NULL
 * where *fault says why. */
#define CA_FEW_INDICES 256
int64_t *ca_take_slots(const ca_array *slots, int64_t bound, int64_t *few, ca_fault *fault);
int64_t *ca_take_positions(const ca_array *positions, int64_t bound, int64_t *few, ca_fault *fault);
/* Frees `memory`, unless it is `few`. */
void ca_give_back(void *memory, void *few);

/* Copies and checks blocks [first, end) of a request's row of a table with so many columns. */
int ca_take_blocks(const int32_t *row, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                   int32_t *to, ca_fault *fault);
/* Checks that the threads of a team have enough stack. */
int ca_check_stack(int team, ca_fault *fault);
int ca_check_lengths(int64_t num_reqs, const int32_t *seq_lens, const int32_t *query_start_loc, ca_fault *fault);
int ca_check_step(const ca_plan *plan, const int32_t *seq_lens, const int32_t *query_start_loc, int causal,
                  const int32_t *dynamic_causal, ca_fault *fault);

/* Holds what the arguments of a call have to fit, and what has been found of it so far. */
typedef struct ca_fit {
    int64_t sizes[CA_AXES];          /* -1: any */
    int32_t dtype, isa, kv_dtype[2]; /* -1: dtype is that of the first argument, and `meaning` says the others */
    int32_t kv_cache_layout;
    int32_t without_lengths;      /* the lengths may be absent */
    int32_t select_by_query_head; /* that of ca_shape */
    int32_t latent;               /* the cache is one of latent rows: ca_attend */
    int32_t swapped;              /* the last two axes of states come the other way round */
    const ca_meaning *meaning;
} ca_fit;

static inline ca_fit ca_fit_anything(int kv_cache_layout) {
    ca_fit fit;
    memset(&fit, -1, sizeof fit);
    fit.kv_cache_layout = kv_cache_layout;
    fit.without_lengths = fit.select_by_query_head = fit.latent = fit.swapped = 0;
    return fit;
}

typedef struct ca_table ca_table;
extern const ca_table ca_attention_table, ca_step_table, ca_write_table, ca_index_table, ca_select_table,
    ca_rotary_table, ca_bounds_table, ca_scores_table, ca_update_table, ca_linear_table, ca_conv_table;

/* Reads the call's arrays, those at `objects` or given, into `a`, and checks all but what indices hold. */
int ca_check_arguments(const ca_table *table, ca_fit *fit, uintptr_t objects, const ca_array *given, ca_array *a,
                       ca_fault *fault);

/* Finds the isa, and what caches hold, from the names that the caller has for them. Asks Python (CA_UNNAMED) where it
 * has not said yet what these mean. */
int ca_find_meaning(ca_fit *fit, ca_fault *fault);

/* Refuses an array of a call because it has to have so many axes. */
int ca_refuse_axes(const ca_table *table, const ca_fit *fit, int index, const ca_array *a, int ndim, ca_fault *fault);

/* Copies those of update_and_attend's arrays that an attention has. */
void ca_attention_of_update(const ca_array *update, ca_array *attention);

/* An array lies in the bytes [first, end). */
typedef struct ca_extent {
    int64_t first, end;
} ca_extent;
int ca_find_extent(const ca_array *a, ca_extent *out); /* 0: no memory can be there */
int ca_meet(const ca_array *a, ca_extent of_a, const ca_array *b, ca_extent of_b);
/* Checks that the outputs, which are the first of the arrays, share no memory with one another and with the rest. Array
 * in_place[0] may be the very array in_place[1]; -1: there is none. */
int ca_check_apart(int num_outputs, int num_arrays, const int in_place[2], const ca_array *a, const ca_extent *at,
                   ca_fault *fault);
#endif
