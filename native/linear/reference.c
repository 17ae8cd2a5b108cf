/* SPDX-License-Identifier: Apache-2.0
 * This is the reference engine of linear attention: the recurrence in float64, token by token, in plain C. */
#include "linear.h"
#include "cache/half.h"

static void put(void *p, int dtype, int64_t i, double x) {
    if (dtype == CA_F32)
        ((float *)p)[i] = (float)x;
    else
        ((uint16_t *)p)[i] = dtype == CA_F16 ? ca_to_f16((float)x) : ca_to_bf16((float)x);
}

static double softplus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }
static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* Returns element (t, head, d) of an array [T, H, any] or [T, H]; `absent` where there is none. */
static double gate(const ca_array *a, int64_t t, int64_t head, int64_t d, double absent) {
    return a->itemsize ? ca_number_at(ca_gate_at(a, t, head), a->dtype, ca_is_wide(a) ? d : 0) : absent;
}

typedef struct token {
    double *q, *k, *e, *a, *v,
        *b; /* [Dk] 4 times, [Dv] twice: scaled query, key, what to erase, decay, value, beta v */
} token;

static int64_t doubles(const ca_linear_plan *p) {
    const int64_t dk = p->shape.head_k_dim, dv = p->shape.head_v_dim;
    return dk * dv + 4 * dk + 2 * dv;
}
static int64_t scratch_bytes(const ca_linear_plan *p) { return 8 * doubles(p); }

static void read_row(const ca_array *a, int64_t t, int64_t head, int64_t n, const ca_linear_how *how, int norm,
                     double *to) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        to[i] = ca_number_at(ca_row_of(a, t, head), a->dtype, i);
        squares += to[i] * to[i];
    }
    for (int64_t i = 0; norm && i < n; i++)
        to[i] /= sqrt(squares + how->norm_eps);
}

/* Reads A_log, [Hv], or dt_bias or D, [Hv] or with an axis of channels. */
static double of_head(const ca_array *a, int64_t head, int64_t d, double absent) {
    return !a->itemsize   ? absent
           : a->ndim == 1 ? ca_number_at((const void *)a->address, a->dtype, head)
                          : ca_number_at((const char *)a->address + head * a->strides[0] * a->itemsize, a->dtype, d);
}

static void read_token(const ca_linear_call *c, int64_t t, int32_t head, token *to) {
    const ca_array *a = c->a;
    const ca_linear_how *how = c->how;
    const int64_t dk = c->plan->shape.head_k_dim, dv = c->plan->shape.head_v_dim;
    const int32_t key_head = head / ca_linear_group(c->plan);
    double dt = 1;
    read_row(&a[CA_LINEAR_QUERY], t, key_head, dk, how, how->use_qk_l2norm_in_kernel, to->q);
    read_row(&a[CA_LINEAR_KEY], t, key_head, dk, how, how->use_qk_l2norm_in_kernel, to->k);
    read_row(&a[CA_LINEAR_VALUE], t, head, dv, how, 0, to->v);
    for (int64_t i = 0; i < dk; i++) {
        double g = gate(&a[CA_LINEAR_G], t, head, i, 0);
        if (how->gate != CA_GATE_LOG) {
            const double rate = exp(of_head(&a[CA_LINEAR_A_LOG], head, 0, 0));
            g += of_head(&a[CA_LINEAR_DT_BIAS], head, i, 0);
            if (how->gate == CA_GATE_SIGMOID)
                g = how->lower_bound * sigmoid(rate * g);
            else {
                dt = softplus(how->gate == CA_GATE_LOGSIGMOID ? -g : g);
                if (how->gate == CA_GATE_DT)
                    dt = fmin(fmax(dt, how->dt_limit[0]), how->dt_limit[1]);
                g = -rate * dt;
            }
        }
        to->a[i] = exp(g);
        to->q[i] *= how->scale;
    }
    for (int64_t j = 0; j < dv; j++) {
        const double x = gate(&a[CA_LINEAR_BETA], t, head, j, how->gate == CA_GATE_DT ? dt : 1);
        const double given = how->use_beta_sigmoid_in_kernel ? sigmoid(x) : x;
        const double beta = a[CA_LINEAR_BETA].itemsize ? given * (how->allow_neg_eigval ? 2 : 1) : x;
        to->b[j] = beta * to->v[j];
        if (j == 0)
            for (int64_t i = 0; i < dk; i++)
                to->e[i] = how->delta_rule ? gate(&a[CA_LINEAR_ERASE], t, head, i, beta) * to->k[i] : 0;
    }
}

static void step(const ca_linear_call *c, const token *x, int64_t t, int32_t head, double *state) {
    const int64_t dk = c->plan->shape.head_k_dim, dv = c->plan->shape.head_v_dim;
    const ca_array *out = &c->a[CA_LINEAR_OUTPUT];
    for (int64_t j = 0; j < dv; j++) {
        double w = x->b[j], o = of_head(&c->a[CA_LINEAR_D], head, j, 0) * x->v[j];
        if (!c->a[CA_LINEAR_D].itemsize)
            o = 0;
        for (int64_t i = 0; i < dk; i++)
            state[i * dv + j] *= x->a[i];
        for (int64_t i = 0; c->how->delta_rule && i < dk; i++)
            w -= x->e[i] * state[i * dv + j];
        for (int64_t i = 0; i < dk; i++) {
            state[i * dv + j] += x->k[i] * w;
            o += x->q[i] * state[i * dv + j];
        }
        put(ca_row_of(out, t, head), out->dtype, j, o);
    }
}

static void move_state(const ca_linear_call *c, int64_t slot, int32_t head, double *state, int out) {
    const int64_t dk = c->plan->shape.head_k_dim, dv = c->plan->shape.head_v_dim;
    const ca_array *cache = &c->a[CA_LINEAR_STATE_CACHE];
    char *to = ca_state_at(cache, slot, head);
    for (int64_t i = 0; i < dk; i++)
        for (int64_t j = 0; j < dv; j++) {
            const int64_t row = c->how->state_layout == CA_STATE_VK ? j : i;
            const int64_t at = row * cache->strides[2] + (c->how->state_layout == CA_STATE_VK ? i : j);
            if (out)
                put(to, cache->dtype, at, state[i * dv + j]);
            else
                state[i * dv + j] = ca_number_at(to, cache->dtype, at);
        }
}

static void run(const ca_linear_call *c, int32_t request, int32_t head, int32_t end, const void *ahead, void *scratch) {
    const ca_linear_plan *p = c->plan;
    const ca_states *s = c->states;
    const int64_t dk = p->shape.head_k_dim, dv = p->shape.head_v_dim;
    double *state = scratch, *rest = state + dk * dv;
    (void)ahead;
    token x = {rest, rest + dk, rest + 2 * dk, rest + 3 * dk, rest + 4 * dk, rest + 4 * dk + dv};
    for (; head < end; head++) {
        int32_t next = s->first_checkpoint[request];
        memset(state, 0, (size_t)(dk * dv) * sizeof *state);
        if (s->from[request] >= 0)
            move_state(c, s->from[request], head, state, 0);
        for (int32_t t = 0; t < ca_linear_q_len(p, request); t++) {
            read_token(c, p->query_start_loc[request] + t, head, &x);
            step(c, &x, p->query_start_loc[request] + t, head, state);
            for (; next < s->first_checkpoint[request + 1] && s->checkpoints[next].token == t + 1; next++)
                move_state(c, s->checkpoints[next].slot, head, state, 1);
        }
        if (s->to[request] >= 0)
            move_state(c, s->to[request], head, state, 1);
    }
}

/* Returns the place of input i, the oldest first, in the state of a convolution. The state's last inputs count. */
static char *input_of(const ca_conv_call *c, int64_t slot, int64_t channel, int64_t i) {
    const ca_array *a = &c->a[CA_CONV_CONV_STATE];
    const int64_t row = c->channels_last ? i : channel, column = c->channels_last ? channel : i;
    return (char *)a->address + (slot * a->strides[0] + row * a->strides[1] + column) * a->itemsize;
}

static void keep(const ca_conv_call *c, const double *last, int64_t channel, int64_t slot) {
    for (int64_t i = 0; i < c->length; i++)
        put(input_of(c, slot, channel, i), c->a[CA_CONV_CONV_STATE].dtype, 0, last[i]);
}

static void conv_channel(const ca_conv_call *c, int32_t request, int64_t channel) {
    const ca_array *x = &c->a[CA_CONV_X], *out = &c->a[CA_CONV_OUTPUT], *weight = &c->a[CA_CONV_WEIGHT];
    const ca_states *s = c->states;
    const int64_t first = c->plan->query_start_loc[request];
    double last[CA_MOST_WIDTH + 1] = {0}; /* the inputs of a state, then that of the token */
    int32_t next = s->first_checkpoint[request];
    for (int64_t i = 0; s->from[request] >= 0 && i < c->length; i++)
        last[i] = ca_number_at(input_of(c, s->from[request], channel, i), c->a[CA_CONV_CONV_STATE].dtype, 0);
    for (int32_t t = 0; t < ca_linear_q_len(c->plan, request); t++) {
        const char *row = (const char *)x->address + (first + t) * x->strides[0] * x->itemsize;
        double y = of_head(&c->a[CA_CONV_BIAS], channel, 0, 0);
        last[c->length] = ca_number_at(row, x->dtype, channel);
        for (int64_t i = 0; i < c->width; i++)
            y += last[c->length + 1 - c->width + i] *
                 ca_number_at((const char *)weight->address + channel * weight->strides[0] * weight->itemsize,
                              weight->dtype, i);
        put((char *)out->address + (first + t) * out->strides[0] * out->itemsize, out->dtype, channel,
            c->silu ? y * sigmoid(y) : y);
        memmove(last, last + 1, (size_t)c->length * sizeof *last);
        for (; next < s->first_checkpoint[request + 1] && s->checkpoints[next].token == t + 1; next++)
            keep(c, last, channel, s->checkpoints[next].slot);
    }
    if (s->to[request] >= 0)
        keep(c, last, channel, s->to[request]);
}

static void conv(const ca_conv_call *c, const int32_t *requests, int64_t num_requests, int64_t channel, int64_t end,
                 void *scratch) {
    (void)scratch;
    for (int64_t r = 0; r < num_requests; r++)
        for (int64_t i = channel; i < end; i++)
            conv_channel(c, requests[r], i);
}

const ca_linear_kernel ca_linear_reference = {scratch_bytes, run, conv};
