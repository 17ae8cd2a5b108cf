/* SPDX-License-Identifier: Apache-2.0
 * This file runs the calls of linear attention: threads take items, which are value heads of a request, or channels of
 * a convolution, through all of its tokens. No bit depends on which thread takes which item. */
#include "linear.h"
#include "run/threads.h"
#include <stdatomic.h>

/* A thread takes 5 elements of a state a nanosecond through a token of decode, and 20 in prefill (Zen 5). */
#define ELEMENTS_OF_A_NANOSECOND 10
#define INPUTS_OF_A_NANOSECOND 1 /* of a convolution */

#define FEW_TOKENS 16 /* requests of fewer tokens are taken together */
#define MOST_TOGETHER 16

typedef struct running {
    const ca_linear_call *call; /* or a convolution */
    const ca_conv_call *conv;
    const ca_linear_plan *plan;
    int64_t num_items, parts; /* parts: items of a request, or of several that a convolution takes together */
    int64_t together;         /* items that a thread takes at once, or requests of an item of a convolution */
    char *workspace;
    atomic_llong next;
} running;

/* Says which value heads of which request an item is. */
typedef struct heads {
    int32_t request, first, end;
} heads;

static heads heads_of(const running *run, int64_t item) {
    const ca_linear_plan *p = run->plan;
    const int64_t group = ca_linear_group(p), parts = ca_div_up(group, p->heads);
    const int64_t part = item % run->parts, key_head = part / parts, first = part % parts * p->heads;
    return (heads){p->order[item / run->parts], (int32_t)(key_head * group + first),
                   (int32_t)(key_head * group + ca_min64(group, first + p->heads))};
}

/* Takes items [first, end). A state is prefetched while the one before it is written. */
static void attend_items(const running *run, int64_t first, int64_t end, void *scratch) {
    const ca_linear_plan *p = run->plan;
    const int32_t *from = run->call->states->from;
    heads here = heads_of(run, first);
    for (int64_t i = first; i < end; i++) {
        const heads next = heads_of(run, i + 1 < end ? i + 1 : i);
        const void *ahead = NULL;
        if (i + 1 < end && from[next.request] >= 0)
            ahead = ca_state_at(&run->call->a[CA_LINEAR_STATE_CACHE], from[next.request], next.first);
        p->kernel->run(run->call, here.request, here.first, here.end, ahead, scratch);
        here = next;
    }
}

static void conv_items(const running *run, int64_t first, int64_t end, void *scratch) {
    const int64_t channels = run->conv->a[CA_CONV_X].shape[1], active = run->plan->num_active;
    for (; first < end; first++) {
        const int64_t channel = first % run->parts * CA_CONV_CHANNELS, request = first / run->parts * run->together;
        run->plan->kernel->conv(run->conv, run->plan->order + request, ca_min64(run->together, active - request),
                                channel, ca_min64(channels, channel + CA_CONV_CHANNELS), scratch);
    }
}

static void run_share(void *work, int thread, int team) {
    running *run = work;
    void *scratch = run->workspace + thread * run->plan->thread_bytes;
    const int64_t step = run->call ? run->together : 1;
    (void)team;
    for (int64_t i; (i = step * atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->num_items;) {
        const int64_t end = ca_min64(run->num_items, i + step);
        if (run->call)
            attend_items(run, i, end, scratch);
        else
            conv_items(run, i, end, scratch);
    }
}

/* Returns how many items, or requests, are taken together: few enough that all threads have some. */
static int64_t together_of(const ca_linear_plan *p, int64_t count) {
    const int64_t most = p->longest < FEW_TOKENS ? MOST_TOGETHER : 1;
    return ca_max64(1, ca_min64(most, count / (4 * (int64_t)p->shape.num_threads)));
}

static int team_of(const ca_linear_plan *plan, int64_t num_items, double nanoseconds) {
    const int64_t most = ca_min64(ca_min64(plan->shape.num_threads, ca_get_num_threads()), ca_max64(1, num_items));
    return ca_team((int)ca_min64(most, ca_threads_for(nanoseconds)));
}

int ca_linear_num_threads(const ca_linear_plan *p) {
    const double elements = (double)p->num_tokens * p->shape.num_v_heads * p->shape.head_k_dim * p->shape.head_v_dim;
    const int64_t items = p->shape.num_k_heads ? (int64_t)p->num_active * p->shape.num_v_heads : INT32_MAX;
    return team_of(p, items, elements / ELEMENTS_OF_A_NANOSECOND);
}

/* Checks the room, runs the items, and gives back the states' memory. */
static int run_items(running *run, double nanoseconds, ca_states *states, void *workspace, int64_t workspace_bytes,
                     ca_fault *fault) {
    const int team = team_of(run->plan, run->num_items, nanoseconds);
    run->workspace = workspace;
    if (!fault->status && workspace_bytes < ca_linear_workspace_bytes(run->plan))
        ca_fail(fault, CA_SMALL_WORKSPACE, -1, -1, -1, -1);
    if (!fault->status && run->num_items && !ca_check_stack(team, fault))
        ca_run_team(team, run_share, run);
    ca_give_back(states->memory, states->few);
    return fault->status;
}

static ca_fit fit_of(const ca_linear_plan *p, int swapped) {
    const ca_linear_shape *s = &p->shape;
    ca_fit fit = ca_fit_anything(CA_PACKED);
    fit.dtype = s->dtype;
    fit.swapped = swapped;
    fit.sizes[CA_T] = p->num_tokens;
    fit.sizes[CA_NUM_REQS] = s->num_reqs;
    fit.sizes[CA_NUM_K_HEADS] = s->num_k_heads;
    fit.sizes[CA_NUM_V_HEADS] = s->num_v_heads;
    fit.sizes[CA_HEAD_K_DIM] = s->head_k_dim;
    fit.sizes[CA_HEAD_V_DIM] = s->head_v_dim;
    fit.sizes[CA_REQUEST_TOKENS_SLOT] = 3;
    return fit;
}

/* Checks that arrays which may have an axis of channels have it where the others ask for it. */
static int check_channels(const ca_array *a, const ca_fit *fit, const ca_linear_how *how, ca_fault *fault) {
    const ca_array *g = &a[CA_LINEAR_G], *beta = &a[CA_LINEAR_BETA], *bias = &a[CA_LINEAR_DT_BIAS];
    const ca_table *table = &ca_linear_table;
    if (how->gate == CA_GATE_DT && ca_is_wide(g))
        return ca_refuse_axes(table, fit, CA_LINEAR_G, g, 2, fault);
    if (bias->itemsize && bias->ndim != g->ndim - 1)
        return ca_refuse_axes(table, fit, CA_LINEAR_DT_BIAS, bias, g->ndim - 1, fault);
    if (how->delta_rule && ca_is_wide(beta) && !a[CA_LINEAR_ERASE].itemsize)
        return ca_refuse_axes(table, fit, CA_LINEAR_BETA, beta, 2, fault);
    return CA_OK;
}

int ca_linear_attend(const ca_linear_plan *p, uintptr_t objects, const ca_array *given, const ca_linear_how *how,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault) {
    ca_array a[CA_LINEAR_ARRAYS];
    ca_states states;
    ca_fit fit = fit_of(p, how->state_layout == CA_STATE_VK);
    if (ca_check_arguments(&ca_linear_table, &fit, objects, given, a, fault) || check_channels(a, &fit, how, fault))
        return fault->status;
    static const ca_slots slots = {CA_LINEAR_STATE_CACHE, CA_LINEAR_STATE_INDICES, CA_LINEAR_INITIAL_STATE_INDICES,
                                   CA_LINEAR_CHECKPOINTS};
    ca_take_states(p, a, &slots, &states, fault);
    const ca_linear_call call = {p, a, how, &states};
    running run = {.call = &call, .plan = p};
    run.parts = p->shape.num_k_heads * ca_div_up(ca_linear_group(p), p->heads);
    run.num_items = run.parts * p->num_active;
    run.together = together_of(p, run.num_items);
    const double elements = (double)p->num_tokens * p->shape.num_v_heads * p->shape.head_k_dim * p->shape.head_v_dim;
    return run_items(&run, elements / ELEMENTS_OF_A_NANOSECOND, &states, workspace, workspace_bytes, fault);
}

int ca_causal_conv1d(const ca_linear_plan *p, uintptr_t objects, const ca_array *given, int silu, int channels_last,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault) {
    ca_array a[CA_CONV_ARRAYS];
    ca_states states;
    ca_fit fit = fit_of(p, channels_last);
    if (ca_check_arguments(&ca_conv_table, &fit, objects, given, a, fault))
        return fault->status;
    const int64_t width = a[CA_CONV_WEIGHT].shape[1], length = a[CA_CONV_CONV_STATE].shape[channels_last ? 1 : 2];
    const int64_t channels = fit.sizes[CA_CHANNELS];
    if (width < 2 || width > CA_MOST_WIDTH) {
        *fault = (ca_fault){.status = CA_OUTSIDE,
                            .position = 1,
                            .value = width,
                            .bound = CA_MOST_WIDTH,
                            .least = 2,
                            .argument = CA_CONV_WEIGHT,
                            .ndim = 2,
                            .axes = {CA_CHANNELS, CA_WIDTH}};
        return fault->status;
    }
    if (length < width - 1 || length > CA_MOST_WIDTH)
        return ca_fail(fault, CA_STATE_LENGTH, -1, -1, length, width - 1);
    static const ca_slots slots = {CA_CONV_CONV_STATE, CA_CONV_STATE_INDICES, CA_CONV_INITIAL_STATE_INDICES,
                                   CA_CONV_CHECKPOINTS};
    ca_take_states(p, a, &slots, &states, fault);
    const ca_conv_call conv = {p, a, silu, channels_last, width, length, &states};
    running run = {.conv = &conv, .plan = p, .parts = ca_div_up(channels, CA_CONV_CHANNELS)};
    run.together = together_of(p, p->num_active * run.parts);
    run.num_items = run.parts * ca_div_up(p->num_active, run.together);
    const double inputs = (double)p->num_tokens * (double)channels;
    return run_items(&run, inputs / INPUTS_OF_A_NANOSECOND, &states, workspace, workspace_bytes, fault);
}
