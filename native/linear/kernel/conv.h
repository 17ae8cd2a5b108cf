/* SPDX-License-Identifier: Apache-2.0
 * This is a depthwise convolution over the tokens of a request, for some channels: output t is bias + sum over i of
 * weight[i] times input t - (width - 1) + i. Inputs before the first token are those of the state. */

typedef struct linear_conv_rows {
    float *weight, *bias, *out;      /* [width][CA_CONV_CHANNELS], [CA_CONV_CHANNELS] twice */
    float *input[CA_MOST_WIDTH + 1]; /* the inputs of the state, the oldest first, then that of the token */
    float *room;                     /* [CA_MOST_WIDTH + 1][CA_CONV_CHANNELS] */
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
    const ca_array *a = &c->a[CA_CONV_STATE];
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
    const ca_array *a = &c->a[CA_CONV_STATE];
    char *to = (char *)a->address + slot * a->strides[0] * a->itemsize;
    for (int64_t i = 0; c->channels_last && i < c->length; i++)
        linear_narrow(x->input[i], n, a->dtype, to + (i * a->strides[1] + channel) * a->itemsize);
    if (!c->channels_last)
        linear_columns_to_rows(x->input, n, c->length, a->dtype, a->strides[1],
                               to + channel * a->strides[1] * a->itemsize);
}

INLINE void linear_convolve(int width, const linear_conv_rows *x, const float *const *input, int silu, int64_t n) {
    for (int64_t c = 0; c < n; c += VL) {
        vf y = v_load_f32(x->bias + c);
        EACH(i, width) y = v_fma(v_load_f32(x->weight + i * CA_CONV_CHANNELS + c), v_load_f32(input[i] + c), y);
        v_store(x->out + c, silu ? v_mul(y, linear_sigmoid(y)) : y);
    }
}

#define LINEAR_CONV_CASE(W)                                                                                            \
    case W:                                                                                                            \
        linear_convolve(W, &x, input, c->silu, n);                                                                     \
        break;

static void linear_conv_request(const ca_conv_call *c, int32_t request, int64_t channel, int64_t n,
                                const linear_conv_rows *shared) {
    const ca_array *in = &c->a[CA_CONV_X], *out = &c->a[CA_CONV_OUTPUT];
    const ca_states *s = c->states;
    const int64_t length = c->length, first = c->plan->query_start_loc[request];
    linear_conv_rows x = *shared;
    for (int64_t i = 0; i <= length; i++)
        x.input[i] = x.room + i * CA_CONV_CHANNELS;
    if (s->from[request] >= 0)
        linear_load_inputs(c, s->from[request], channel, n, &x);
    else
        memset(x.room, 0, (size_t)(length * CA_CONV_CHANNELS) * sizeof *x.room);
    int32_t next = s->first_checkpoint[request];
    for (int64_t t = 0; t < ca_linear_q_len(c->plan, request); t++) {
        const float *const *input = (const float *const *)&x.input[length + 1 - c->width];
        linear_widen((const char *)in->address + ((first + t) * in->strides[0] + channel) * in->itemsize, in->dtype, n,
                     x.input[length]);
        switch (c->width) {
            LINEAR_CONV_CASE(2)
            LINEAR_CONV_CASE(3)
            LINEAR_CONV_CASE(4)
            LINEAR_CONV_CASE(5)
            LINEAR_CONV_CASE(6)
            LINEAR_CONV_CASE(7)
            LINEAR_CONV_CASE(8)
        }
        linear_narrow(x.out, n, out->dtype,
                      (char *)out->address + ((first + t) * out->strides[0] + channel) * out->itemsize);
        float *oldest = x.input[0];
        for (int64_t i = 0; i < length; i++)
            x.input[i] = x.input[i + 1];
        x.input[length] = oldest;
        for (; next < s->first_checkpoint[request + 1] && s->checkpoints[next].token == t + 1; next++)
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
    x.out = x.bias + CA_CONV_CHANNELS;
    x.room = x.out + CA_CONV_CHANNELS;
    memset(x.weight, 0, sizeof(float) * (CA_MOST_WIDTH + 2) * CA_CONV_CHANNELS);
    linear_rows_to_columns((const char *)weight->address + channel * weight->strides[0] * weight->itemsize,
                           weight->dtype, weight->strides[0], n, c->width, x.weight);
    if (bias->itemsize)
        linear_widen((const char *)bias->address + channel * bias->itemsize, bias->dtype, n, x.bias);
    for (int64_t r = 0; r < num_requests; r++)
        linear_conv_request(c, requests[r], channel, n, &x);
}
