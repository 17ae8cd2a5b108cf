/* SPDX-License-Identifier: Apache-2.0
 * This is a depthwise convolution over the tokens of a request, for some channels: output t is bias + sum over i of
 * weight[i] times input t - (width - 1) + i. Inputs before the first token are those of the state. */

typedef struct linear_conv_rows {
    float *weight, *bias;            /* [width][CA_CONV_CHANNELS], [CA_CONV_CHANNELS] */
    float *input[2 * CA_MOST_WIDTH]; /* the inputs of the state, the oldest first, then those that take their places */
    float *room;                     /* [2 * CA_MOST_WIDTH][CA_CONV_CHANNELS] */
} linear_conv_rows;

/* Turns 16 rows [columns] in `rows` into columns, or back. The number of columns is a constant, so that the loops
 * become shuffles. */
INLINE void linear_columns_of(int columns, const float *rows, float *dst) {
    for (int c = 0; c < columns; c++)
        for (int i = 0; i < CA_LANES; i++)
            dst[c * CA_CONV_CHANNELS + i] = rows[i * columns + c];
}
INLINE void linear_rows_of(int columns, float *const *src, int64_t r, float *rows) {
    for (int c = 0; c < columns; c++)
        for (int i = 0; i < CA_LANES; i++)
            rows[i * columns + c] = src[c][r + i];
}
#define LINEAR_COLUMN_CASE(n, call)                                                                                    \
    case n: {                                                                                                          \
        enum { COLUMNS = n };                                                                                          \
        call;                                                                                                          \
        break;                                                                                                         \
    }
#define LINEAR_FOR_COLUMNS(n, call)                                                                                    \
    switch (n) {                                                                                                       \
        LINEAR_COLUMN_CASE(1, call)                                                                                    \
        LINEAR_COLUMN_CASE(2, call)                                                                                    \
        LINEAR_COLUMN_CASE(3, call)                                                                                    \
        LINEAR_COLUMN_CASE(4, call)                                                                                    \
        LINEAR_COLUMN_CASE(5, call)                                                                                    \
        LINEAR_COLUMN_CASE(6, call)                                                                                    \
        LINEAR_COLUMN_CASE(7, call)                                                                                    \
        LINEAR_COLUMN_CASE(8, call)                                                                                    \
    }

/* Reads n rows [columns], which lie ld elements apart, as columns: dst[c * CA_CONV_CHANNELS + r]. */
static void linear_rows_to_columns(const char *src, int dtype, int64_t ld, int64_t n, int64_t columns, float *dst) {
    const int64_t size = dtype == CA_F32 ? 4 : 2;
    float rows[CA_LANES * (CA_MOST_WIDTH + 1)] = {0};
    for (int64_t r = 0; r < n; r += CA_LANES) {
        const int64_t here = ca_min64(CA_LANES, n - r);
        if (ld == columns)
            linear_widen(src + r * ld * size, dtype, here * columns, rows);
        for (int64_t i = 0; ld != columns && i < here; i++)
            for (int64_t c = 0; c < columns; c++)
                rows[i * columns + c] = linear_number(src + (r + i) * ld * size, dtype, c);
        LINEAR_FOR_COLUMNS(columns, linear_columns_of(COLUMNS, rows, dst + r));
    }
}
/* Writes columns as such rows. */
static void linear_columns_to_rows(float *const *src, int64_t n, int64_t columns, int dtype, int64_t ld, char *dst) {
    const int64_t size = dtype == CA_F32 ? 4 : 2;
    float rows[CA_LANES * (CA_MOST_WIDTH + 1)] = {0};
    for (int64_t r = 0; r < n; r += CA_LANES) {
        const int64_t here = ca_min64(CA_LANES, n - r);
        LINEAR_FOR_COLUMNS(columns, linear_rows_of(COLUMNS, src, r, rows));
        if (ld == columns)
            linear_narrow(rows, here * columns, dtype, dst + r * ld * size);
        for (int64_t i = 0; ld != columns && i < here; i++)
            linear_narrow(rows + i * columns, columns, dtype, dst + (r + i) * ld * size);
    }
}

static void linear_load_inputs(const ca_conv_call *c, int64_t slot, int64_t channel, int64_t n, linear_conv_rows *x) {
    const ca_array *a = &c->a[CA_CONV_CONV_STATE];
    const char *from = (const char *)a->address + slot * a->strides[0] * a->itemsize;
    if (!c->channels_last)
        linear_rows_to_columns(from + channel * a->strides[1] * a->itemsize, a->dtype, a->strides[1], n, c->length,
                               x->input[0]);
    else
        for (int64_t i = 0; i < c->length; i++)
            linear_widen(from + (i * a->strides[1] + channel) * a->itemsize, a->dtype, n, x->input[i]);
}

static void linear_store_inputs(const ca_conv_call *c, int64_t slot, int64_t channel, int64_t n,
                                const linear_conv_rows *x) {
    const ca_array *a = &c->a[CA_CONV_CONV_STATE];
    char *to = (char *)a->address + slot * a->strides[0] * a->itemsize;
    for (int64_t i = 0; c->channels_last && i < c->length; i++)
        linear_narrow(x->input[i], n, a->dtype, to + (i * a->strides[1] + channel) * a->itemsize);
    if (!c->channels_last)
        linear_columns_to_rows(x->input, n, c->length, a->dtype, a->strides[1],
                               to + channel * a->strides[1] * a->itemsize);
}

/* A vector of channels goes through LINEAR_CONV_TOKENS tokens before the next does, and prefetches the rows so many
 * tokens later, which may lie past the end: a prefetch reads nothing. The outputs of LINEAR_CONV_ROUND tokens are in
 * registers together. Rows often lie 2^n bytes apart and share few places of a cache, so that more tokens than 16 lose
 * what they prefetch. */
#define LINEAR_CONV_TOKENS 16
#define LINEAR_CONV_ROUND 4

/* Says where some tokens' rows of channels lie, `in` and `out` bytes apart. */
typedef struct linear_conv_tokens {
    const char *from;
    char *to;
    int64_t in, out, n; /* n: tokens */
} linear_conv_tokens;

INLINE vf linear_load(int dtype, const void *p) {
    return dtype == CA_F32 ? v_load_f32(p) : dtype == CA_F16 ? v_load_f16(p) : v_load_bf16(p);
}
INLINE void linear_store(int dtype, void *p, vf x) {
    if (dtype == CA_F32)
        v_store(p, x);
    else if (dtype == CA_F16)
        v_storen_f16(p, x, VL);
    else
        v_storen_bf16(p, x, VL);
}

/* Makes y sigmoid(y) = y / (1 + e^-y) of some vectors; e^-y is infinite from 2^128 on. Stage by stage they keep the
 * units busy, where one after the other, each of 20 operations in a row, would fill the schedulers with what waits. */
INLINE void linear_silu(int count, vf *y) {
    vf x[LINEAR_CONV_ROUND], n[LINEAR_CONV_ROUND], p[LINEAR_CONV_ROUND];
    EACH(i, count) x[i] = v_max(v_set1(-127), v_min(v_set1(128), v_mul(v_set1(-CA_LOG2E), y[i])));
    EACH(i, count) n[i] = v_round(x[i]);
    EACH(i, count) x[i] = v_sub(x[i], n[i]);
    EACH(i, count) p[i] = v_set1(exp2_full[0]);
    EACH(c, 6) EACH(i, count) p[i] = v_fma(p[i], x[i], v_set1(exp2_full[c + 1]));
    EACH(i, count) p[i] = v_add(v_set1(1), v_scale(p[i], n[i]));
    EACH(i, count) y[i] = v_div(y[i], p[i]);
}

/* Takes VL channels, from number `channel` of `x` on, through some tokens. Their weights and the inputs of the tokens
 * before stay in registers. */
INLINE void linear_convolve_lanes(int width, int dtype, int silu, const linear_conv_rows *x, float *const *past,
                                  linear_conv_tokens at, int64_t channel) {
    const vf bias = v_load_f32(x->bias + channel);
    vf weight[CA_MOST_WIDTH], input[CA_MOST_WIDTH + LINEAR_CONV_ROUND];
    EACH(i, width) weight[i] = v_load_f32(x->weight + i * CA_CONV_CHANNELS + channel);
    EACH(i, width - 1) input[i] = v_load_f32(past[i] + channel);
#define LINEAR_CONV_TAKE(COUNT)                                                                                        \
    do {                                                                                                               \
        vf y[COUNT];                                                                                                   \
        EACH(i, COUNT) input[width - 1 + i] = linear_load(dtype, at.from + i * at.in);                                 \
        EACH(i, COUNT) __builtin_prefetch(at.from + (LINEAR_CONV_TOKENS + i) * at.in, 0, 2);                           \
        EACH(i, COUNT) __builtin_prefetch(at.to + (LINEAR_CONV_TOKENS + i) * at.out, 1, 2);                            \
        EACH(i, COUNT) y[i] = bias;                                                                                    \
        EACH(j, width) EACH(i, COUNT) y[i] = v_fma(weight[j], input[i + j], y[i]);                                     \
        EACH(j, width - 1) input[j] = input[j + COUNT];                                                                \
        if (silu)                                                                                                      \
            linear_silu(COUNT, y);                                                                                     \
        EACH(i, COUNT) linear_store(dtype, at.to + i * at.out, y[i]);                                                  \
        at.from += COUNT * at.in;                                                                                      \
        at.to += COUNT * at.out;                                                                                       \
    } while (0)
    for (; at.n >= LINEAR_CONV_ROUND; at.n -= LINEAR_CONV_ROUND)
        LINEAR_CONV_TAKE(LINEAR_CONV_ROUND);
    for (; at.n; at.n--)
        LINEAR_CONV_TAKE(1);
#undef LINEAR_CONV_TAKE
}

/* Takes channels [channel, end), whole vectors, through some tokens. */
INLINE void linear_convolve(int width, int dtype, int silu, const linear_conv_rows *x, float *const *past,
                            linear_conv_tokens at, int64_t channel, int64_t end) {
    const int64_t bytes = VL * (dtype == CA_F32 ? 4 : 2);
    for (; channel < end; channel += VL, at.from += bytes, at.to += bytes)
        linear_convolve_lanes(width, dtype, silu, x, past, at, channel);
}

#define LINEAR_CONV_CASE(W)                                                                                            \
    case W:                                                                                                            \
        if (dtype == CA_F32)                                                                                           \
            linear_convolve(W, CA_F32, silu, x, past, at, channel, end);                                               \
        else if (dtype == CA_F16)                                                                                      \
            linear_convolve(W, CA_F16, silu, x, past, at, channel, end);                                               \
        else                                                                                                           \
            linear_convolve(W, CA_BF16, silu, x, past, at, channel, end);                                              \
        break;
static void linear_convolve_any(int64_t width, int dtype, int silu, const linear_conv_rows *x, float *const *past,
                                linear_conv_tokens at, int64_t channel, int64_t end) {
    switch (width) {
        LINEAR_CONV_CASE(2)
        LINEAR_CONV_CASE(3)
        LINEAR_CONV_CASE(4)
        LINEAR_CONV_CASE(5)
        LINEAR_CONV_CASE(6)
        LINEAR_CONV_CASE(7)
        LINEAR_CONV_CASE(8)
    }
}

/* Takes n channels through some tokens. Those past the last whole vector go by a copy of its size. */
static void linear_convolve_channels(const ca_conv_call *c, const linear_conv_rows *x, const linear_conv_tokens *at,
                                     int64_t n) {
    const int dtype = c->a[CA_CONV_X].dtype;
    const int64_t size = c->a[CA_CONV_X].itemsize, whole = n / VL * VL;
    float *const *past = &x->input[c->length + 1 - c->width];
    const char *from = at->from + whole * size;
    char *to = at->to + whole * size;
    linear_convolve_any(c->width, dtype, c->silu, x, past, *at, 0, whole);
    if (whole == n)
        return;
    float rows[LINEAR_CONV_TOKENS * VL] = {0};
    const linear_conv_tokens copy = {(const char *)rows, (char *)rows, VL * size, VL * size, at->n};
    for (int64_t t = 0; t < at->n; t++)
        memcpy(copy.to + t * copy.out, from + t * at->in, (size_t)((n - whole) * size));
    linear_convolve_any(c->width, dtype, c->silu, x, past, copy, whole, whole + VL);
    for (int64_t t = 0; t < at->n; t++)
        memcpy(to + t * at->out, copy.to + t * copy.out, (size_t)((n - whole) * size));
}

static void linear_conv_request(const ca_conv_call *c, int32_t request, int64_t channel, int64_t n,
                                const linear_conv_rows *shared) {
    const ca_array *in = &c->a[CA_CONV_X], *out = &c->a[CA_CONV_OUTPUT];
    const ca_states *s = c->states;
    const int64_t length = c->length, first = c->plan->query_start_loc[request];
    const int64_t q_len = ca_linear_q_len(c->plan, request), last = s->first_checkpoint[request + 1];
    linear_conv_tokens at = {.in = in->strides[0] * in->itemsize, .out = out->strides[0] * out->itemsize};
    at.from = (const char *)in->address + (first * in->strides[0] + channel) * in->itemsize;
    at.to = (char *)out->address + (first * out->strides[0] + channel) * out->itemsize;
    linear_conv_rows x = *shared;
    for (int64_t i = 0; i < 2 * length; i++)
        x.input[i] = x.room + i * CA_CONV_CHANNELS;
    if (s->from[request] >= 0)
        linear_load_inputs(c, s->from[request], channel, n, &x);
    else
        memset(x.room, 0, (size_t)(length * CA_CONV_CHANNELS) * sizeof *x.room);
    int32_t next = s->first_checkpoint[request];
    for (int64_t t = 0; t < q_len; t += at.n, at.from += at.n * at.in, at.to += at.n * at.out) {
        at.n = ca_min64(LINEAR_CONV_TOKENS, (next < last ? s->checkpoints[next].token : q_len) - t);
        const int64_t taken = ca_min64(at.n, length);
        for (int64_t i = 0; i < taken; i++)
            linear_widen(at.from + (at.n - taken + i) * at.in, in->dtype, n, x.input[length + i]);
        linear_convolve_channels(c, &x, &at, n);
        for (int64_t i = 0; i < taken; i++) {
            float *oldest = x.input[0];
            memmove(x.input, x.input + 1, (size_t)(length + taken - 1) * sizeof *x.input);
            x.input[length + taken - 1] = oldest;
        }
        for (; next < last && s->checkpoints[next].token == t + at.n; next++)
            linear_store_inputs(c, s->checkpoints[next].slot, channel, n, &x);
    }
    if (s->to[request] >= 0)
        linear_store_inputs(c, s->to[request], channel, n, &x);
}

static void linear_conv(const ca_conv_call *c, const int32_t *requests, int64_t num_requests, int64_t channel,
                        int64_t end, void *scratch) {
    const ca_array *bias = &c->a[CA_CONV_BIAS], *weight = &c->a[CA_CONV_WEIGHT];
    const int64_t n = end - channel;
    linear_conv_rows x = {.weight = scratch};
    x.bias = x.weight + CA_MOST_WIDTH * CA_CONV_CHANNELS;
    x.room = x.bias + CA_CONV_CHANNELS;
    memset(x.weight, 0, sizeof(float) * (CA_MOST_WIDTH + 1) * CA_CONV_CHANNELS);
    linear_rows_to_columns((const char *)weight->address + channel * weight->strides[0] * weight->itemsize,
                           weight->dtype, weight->strides[0], n, c->width, x.weight);
    if (bias->itemsize)
        linear_widen((const char *)bias->address + channel * bias->itemsize, bias->dtype, n, x.bias);
    for (int64_t r = 0; r < num_requests; r++)
        linear_conv_request(c, requests[r], channel, n, &x);
}
