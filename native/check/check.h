/* SPDX-License-Identifier: Apache-2.0
 * What indices hold, and calls that have been accepted before. */
#ifndef CPU_ATTN_CHECK_H
#define CPU_ATTN_CHECK_H
#include "run/engine.h"

static inline int ca_fail(ca_fault *fault, int status, int64_t request, int64_t position, int64_t value,
                          int64_t bound) {
    *fault = (ca_fault){status, request, position, value, bound, -1};
    return status;
}

/* What one call reads of its block table, and of its selection, copied and checked: see ca_call. */
typedef struct ca_indices {
    int64_t *table_at;
    int32_t *blocks, *selected;
    int64_t num_selected;
    void *memory; /* `few`, or where they do not fit */
    int64_t few[128];
} ca_indices;

/* The blocks that hold a key some row may see: below num_blocks, and the same for requests that share them in the plan.
 * Whether it succeeds or not: ca_give_back(x->memory, x->few). */
int ca_take_indices(const ca_plan *plan, const ca_array *table, const ca_array *selected, int64_t num_blocks,
                    int64_t block_size, ca_indices *x, ca_fault *fault);
/* int64 [T], copied and checked: where they fit to `few`, of CA_FEW_INDICES. NULL: *fault says why. */
#define CA_FEW_INDICES 256
int64_t *ca_take_slots(const ca_array *slots, int64_t bound, int64_t *few, ca_fault *fault);
int64_t *ca_take_positions(const ca_array *positions, int64_t bound, int64_t *few, ca_fault *fault);
/* Frees what is not `few`. */
void ca_give_back(void *memory, void *few);

/* Blocks [first, end) of a request's row of a table with so many columns, copied and checked. */
int ca_take_blocks(const int32_t *row, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                   int32_t *to, ca_fault *fault);
/* Have the threads of a team enough stack? */
int ca_check_stack(int team, ca_fault *fault);
int ca_check_lengths(int64_t num_reqs, const int32_t *seq_lens, const int32_t *query_start_loc, ca_fault *fault);
int ca_check_step(const ca_plan *plan, const int32_t *seq_lens, const int32_t *query_start_loc, int causal,
                  const int32_t *dynamic_causal, ca_fault *fault);
/* Reads the call's arrays into `a`. NULL unless all is known to be right with them but what indices hold. */
const struct ca_accepted *ca_accept(ca_known *known, const int64_t *sizes, int64_t isa, int64_t k_dtype,
                                    int64_t v_dtype, uintptr_t objects, const ca_array *given, ca_array *a,
                                    int num_arrays, int num_outputs);
/* Reads the arrays at `objects`, or those given; 0: one of them is like none that we take. */
int ca_read_arrays(uintptr_t objects, const ca_array *given, ca_array *out, int n);
int ca_accept_step(uintptr_t objects, const ca_array *given, int64_t num_reqs, ca_array *a);
#endif
