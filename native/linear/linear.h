/* SPDX-License-Identifier: Apache-2.0
 * In linear attention a request has one state [Dk, Dv] for each value head in place of keys and values. A token does
 *
 *     S = diag(a) S;   w = beta v - (e k)^T S, without the delta rule beta v;   S = S + k w^T;   o = scale q^T S + D v
 *
 * where a is one number or one for each key channel, e is beta, or one for each key channel, and beta is one number or
 * one for each value channel. README.md beside this file says how a call flows. */
#ifndef CPU_ATTN_LINEAR_H
#define CPU_ATTN_LINEAR_H
#include "cache/layout.h"
#include "check/check.h"

#define CA_CHUNK 64     /* tokens of a chunk; chunks begin at multiples of it, counted from the request's first token */
#define CA_MOST_WIDTH 8 /* inputs that an output of a convolution has at most */

typedef struct ca_linear_call ca_linear_call;
typedef struct ca_conv_call ca_conv_call;

/* Holds what an isa, or the reference engine, offers. */
typedef struct ca_linear_kernel {
    int64_t (*scratch_bytes)(const ca_linear_plan *plan); /* of a thread, a multiple of 64 */
    /* Takes value heads [head, end), which share a key head, through all tokens of a request. ahead: a state of the
     * same cache that this thread will read next, to be prefetched, or NULL. */
    void (*run)(const ca_linear_call *call, int32_t request, int32_t head, int32_t end, const void *ahead,
                void *scratch);
    /* Takes channels [channel, end), at most CA_CONV_CHANNELS, through all tokens of some requests. */
    void (*conv)(const ca_conv_call *call, const int32_t *requests, int64_t num_requests, int64_t channel, int64_t end,
                 void *scratch);
} ca_linear_kernel;
extern const ca_linear_kernel ca_linear_reference;
#define CA_CONV_CHANNELS 512
#define CA_LINEAR_HEADS 4 /* most value heads of an item: what they share is a small part of what they take */

struct ca_linear_plan {
    ca_linear_shape shape;
    const ca_linear_kernel *kernel;
    int64_t num_tokens;
    int32_t longest, num_active; /* most tokens of a request; requests that have tokens */
    int32_t heads;               /* most value heads of an item */
    int64_t thread_bytes;
    int32_t *query_start_loc; /* [R + 1] */
    int32_t *first_token;     /* [R] */
    int32_t *order;           /* [num_active]: requests that have tokens, the longest first */
    uint8_t *has_initial_state;
};

static inline int64_t ca_linear_q_len(const ca_linear_plan *plan, int32_t request) {
    return plan->query_start_loc[request + 1] - plan->query_start_loc[request];
}
static inline int32_t ca_linear_group(const ca_linear_plan *plan) {
    return plan->shape.num_v_heads / plan->shape.num_k_heads;
}

typedef struct ca_checkpoint {
    int32_t token, slot; /* the state after so many of the request's tokens in this call */
} ca_checkpoint;

/* Holds what one call reads of the indices of states, copied and checked. */
typedef struct ca_states {
    int32_t *from, *to; /* [R]: the slot that a request begins from (-1: zeros), and leaves its state in (-1: none) */
    int32_t *first_checkpoint; /* [R + 1] */
    ca_checkpoint *checkpoints;
    int32_t *memory; /* `few`, or memory for more than fits there */
    int32_t few[1024];
} ca_states;

struct ca_linear_call {
    const ca_linear_plan *plan;
    const ca_array *a; /* CA_LINEAR_ARRAYS */
    const ca_linear_how *how;
    const ca_states *states;
};

struct ca_conv_call {
    const ca_linear_plan *plan;
    const ca_array *a; /* CA_CONV_ARRAYS */
    int silu, channels_last;
    int64_t width, length; /* inputs of an output, inputs in a state */
    const ca_states *states;
};

/* Returns a state of a head: rows of ld elements. */
static inline char *ca_state_at(const ca_array *cache, int64_t slot, int64_t head) {
    return ca_row_of(cache, slot, head);
}
/* Returns element (t, h, 0) of an array [T, H] or [T, H, any]. */
static inline const char *ca_gate_at(const ca_array *a, int64_t t, int64_t head) { return ca_row_of(a, t, head); }
/* Says whether an array [T, H] has one more axis, of channels. */
static inline int ca_is_wide(const ca_array *a) { return a->ndim == 3; }

/* Says which of a call's arrays hold states and their indices. */
typedef struct ca_slots {
    int states, to, from, checkpoints;
} ca_slots;
/* Copies and checks state_indices, initial_state_indices and checkpoints. Whether this succeeds or not,
 * ca_give_back(x->memory, x->few) has to follow. */
int ca_take_states(const ca_linear_plan *plan, const ca_array *a, const ca_slots *index, ca_states *x, ca_fault *fault);
#endif
