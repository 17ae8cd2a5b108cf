/* SPDX-License-Identifier: Apache-2.0
 * This file makes the plan of a step of linear attention. */
#include "linear.h"
#include "kernel/kernel.h"
#include "run/threads.h"
#include <stdlib.h>

#define STATES_BYTES (1 << 18) /* states of an item that lie side by side, unless it has only one */
#define ITEMS_OF_A_THREAD 4    /* fewer leave threads idle at the end */

/* Sorts requests that have tokens by their number, the longest first; others keep their order. */
static void sort_requests(ca_linear_plan *p) {
    int32_t *order = p->order, *spare = order + p->shape.num_reqs;
    int32_t n = 0;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        if (ca_linear_q_len(p, r))
            order[n++] = r;
        p->longest = (int32_t)ca_max64(p->longest, ca_linear_q_len(p, r));
    }
    p->num_active = n;
    for (int32_t width = 1; width < n; width *= 2) { /* merges runs */
        for (int32_t i = 0; i < n; i += 2 * width) {
            const int32_t middle = (int32_t)ca_min64(n, i + (int64_t)width);
            const int32_t end = (int32_t)ca_min64(n, i + 2 * (int64_t)width);
            for (int32_t a = i, b = middle, to = i; to < end; to++) {
                const int first =
                    b >= end || (a < middle && ca_linear_q_len(p, order[a]) >= ca_linear_q_len(p, order[b]));
                spare[to] = first ? order[a++] : order[b++];
            }
        }
        memcpy(order, spare, (size_t)n * sizeof *order);
    }
}

/* Returns how many value heads of a key head one thread takes together. */
static int32_t heads_of_an_item(const ca_linear_plan *p) {
    const ca_linear_shape *s = &p->shape;
    const int64_t group = ca_linear_group(p), state = 4 * (int64_t)s->head_k_dim * s->head_v_dim;
    int64_t heads = ca_max64(1, ca_min64(ca_min64(group, CA_LINEAR_HEADS), STATES_BYTES / state));
    while (heads > 1 && (int64_t)p->num_active * s->num_k_heads * ca_div_up(group, heads) <
                            (int64_t)s->num_threads * ITEMS_OF_A_THREAD)
        heads = ca_div_up(heads, 2);
    return (int32_t)heads;
}

ca_linear_plan *ca_linear_plan_new(const ca_linear_shape *shape, const int32_t *query_start_loc,
                                   const int32_t *first_token, const uint8_t *has_initial_state) {
    const size_t n = (size_t)shape->num_reqs;
    ca_linear_plan *p = calloc(1, sizeof *p + (4 * n + 1) * sizeof(int32_t) + n);
    if (!p)
        return NULL;
    p->shape = *shape;
    p->query_start_loc = (int32_t *)(void *)(p + 1);
    p->first_token = p->query_start_loc + n + 1;
    p->order = p->first_token + n;
    p->has_initial_state = (uint8_t *)(p->order + 2 * n);
    memcpy(p->query_start_loc, query_start_loc, (n + 1) * sizeof(int32_t));
    memcpy(p->first_token, first_token, n * sizeof(int32_t));
    memcpy(p->has_initial_state, has_initial_state, n);
    p->num_tokens = query_start_loc[n];
    p->kernel = shape->reference ? &ca_linear_reference : ca_isa_get(shape->isa)->linear;
    sort_requests(p);
    p->heads = shape->num_k_heads ? heads_of_an_item(p) : 1;
    p->thread_bytes = ca_round_up(p->kernel->scratch_bytes(p), 64);
    return p;
}

void ca_linear_plan_free(ca_linear_plan *plan) { free(plan); }

int64_t ca_linear_workspace_bytes(const ca_linear_plan *plan) { return plan->thread_bytes * plan->shape.num_threads; }
