/* SPDX-License-Identifier: Apache-2.0
 * This file runs the calls of linear attention: threads take items, which are value heads of a request, or channels of
 * a convolution, through all of its tokens. No bit depends on which thread takes which item. */
#include "linear.h"
#include "run/threads.h"
#include <stdatomic.h>

/* One thread updates 10 elements of a state a nanosecond where these come from memory, and multiplies 20 in prefill. */
#define ELEMENTS_OF_A_NANOSECOND 10
#define INPUTS_OF_A_NANOSECOND 1 /* of a convolution */

typedef struct running {
    const ca_linear_call *call; /* or a convolution */
    const ca_conv_call *conv;
    const ca_linear_plan *plan;
    int64_t num_items, parts; /* parts: items of a request */
    char *workspace;
    atomic_llong next;
} running;

static void attend_item(const running *run, int64_t item, void *scratch) {
    const ca_linear_plan *p = run->plan;
    const int64_t group = ca_linear_group(p), parts = ca_div_up(group, p->heads);
    const int64_t part = item % run->parts, key_head = part / parts;
    const int64_t first = part % parts * p->heads, end = ca_min64(group, first + p->heads);
    p->kernel->run(run->call, p->order[item / run->parts], (int32_t)(key_head * group + first),
                   (int32_t)(key_head * group + end), scratch);
}

static void conv_item(const running *run, int64_t item, void *scratch) {
    const int64_t channel = item % run->parts * CA_CONV_CHANNELS, channels = run->conv->a[CA_CONV_X].shape[1];
    run->plan->kernel->conv(run->conv, run->plan->order[item / run->parts], channel,
                            ca_min64(channels, channel + CA_CONV_CHANNELS), scratch);
}

static void run_share(void *work, int thread, int team) {
    running *run = work;
    void *scratch = run->workspace + thread * run->plan->thread_bytes;
    (void)team;
    for (int64_t i; (i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->num_items;)
        if (run->call)
            attend_item(run, i, scratch);
        else
            conv_item(run, i, scratch);
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

static void known_sizes(const ca_linear_plan *p, int64_t *sizes) {
    const ca_linear_shape *s = &p->shape;
    for (int i = 0; i < CA_SYMBOLS; i++)
        sizes[i] = -1;
    sizes[CA_T] = p->num_tokens;
    sizes[CA_NUM_REQS] = s->num_reqs;
    sizes[CA_NUM_K_HEADS] = s->num_k_heads;
    sizes[CA_NUM_V_HEADS] = s->num_v_heads;
    sizes[CA_HEAD_K_DIM] = s->head_k_dim;
    sizes[CA_HEAD_V_DIM] = s->head_v_dim;
    sizes[CA_REQUEST_TOKEN_SLOT] = 3;
}

/* Checks that arrays which may have an axis of channels have it where the others ask for it. */
static int check_channels(const ca_array *a, const ca_linear_how *how, ca_fault *fault) {
    const ca_array *g = &a[CA_LINEAR_G], *beta = &a[CA_LINEAR_BETA], *bias = &a[CA_LINEAR_DT_BIAS];
    const ca_linear_table *table = &ca_linear_attention_table;
    if (how->gate == CA_GATE_DT && ca_is_wide(g))
        return ca_linear_refuse_axes(table, CA_LINEAR_G, g, 2, fault);
    if (bias->itemsize && bias->ndim != g->ndim - 1)
        return ca_linear_refuse_axes(table, CA_LINEAR_DT_BIAS, bias, g->ndim - 1, fault);
    if (how->delta_rule && ca_is_wide(beta) && !a[CA_LINEAR_ERASE].itemsize)
        return ca_linear_refuse_axes(table, CA_LINEAR_BETA, beta, 2, fault);
    return CA_OK;
}

int ca_linear_attend(const ca_linear_plan *p, uintptr_t objects, const ca_array *given, const ca_linear_how *how,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault) {
    ca_array a[CA_LINEAR_ARRAYS];
    ca_states states;
    int64_t sizes[CA_SYMBOLS];
    known_sizes(p, sizes);
    if (ca_linear_check(&ca_linear_attention_table, how->state_layout == CA_STATE_VK, sizes, p->shape.dtype, objects,
                        given, a, fault) ||
        check_channels(a, how, fault))
        return fault->status;
    ca_take_states(p, a, CA_LINEAR_STATE_INDICES, sizes[CA_NUM_SLOTS], &states, fault);
    const ca_linear_call call = {p, a, how, &states};
    running run = {.call = &call, .plan = p};
    run.parts = p->shape.num_k_heads * ca_div_up(ca_linear_group(p), p->heads);
    run.num_items = run.parts * p->num_active;
    const double elements = (double)p->num_tokens * p->shape.num_v_heads * p->shape.head_k_dim * p->shape.head_v_dim;
    return run_items(&run, elements / ELEMENTS_OF_A_NANOSECOND, &states, workspace, workspace_bytes, fault);
}

int ca_causal_conv1d(const ca_linear_plan *p, uintptr_t objects, const ca_array *given, int silu, int channels_last,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault) {
    ca_array a[CA_CONV_ARRAYS];
    ca_states states;
    int64_t sizes[CA_SYMBOLS];
    known_sizes(p, sizes);
    if (ca_linear_check(&ca_conv_table, channels_last, sizes, p->shape.dtype, objects, given, a, fault))
        return fault->status;
    const int64_t width = sizes[CA_WIDTH], length = sizes[CA_STATE_LEN];
    if (width < 2 || width > CA_MOST_WIDTH) {
        *fault = (ca_fault){.status = CA_OUTSIDE, .position = 1, .value = width, .bound = CA_MOST_WIDTH, .least = 2,
                            .argument = CA_CONV_WEIGHT, .ndim = 2, .axes = {CA_CHANNELS, CA_WIDTH}};
        return fault->status;
    }
    if (length < width - 1 || length > CA_MOST_WIDTH)
        return ca_fail(fault, CA_STATE_LENGTH, -1, -1, length, width - 1);
    ca_take_states(p, a, CA_CONV_STATE_INDICES, sizes[CA_NUM_SLOTS], &states, fault);
    const ca_conv_call conv = {p, a, silu, channels_last, width, length, &states};
    running run = {.conv = &conv, .plan = p, .parts = ca_div_up(sizes[CA_CHANNELS], CA_CONV_CHANNELS)};
    run.num_items = run.parts * p->num_active;
    const double inputs = (double)p->num_tokens * (double)sizes[CA_CHANNELS];
    return run_items(&run, inputs / INPUTS_OF_A_NANOSECOND, &states, workspace, workspace_bytes, fault);
}
