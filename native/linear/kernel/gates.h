/* SPDX-License-Identifier: Apache-2.0
 * These functions make decays and betas of what a call gives. Beside a decay a there is a - 1: a state becomes S + (a -
 * 1) S where a is at least 1/2, so that decays near 1, which take thousands of tokens to matter, keep all of their
 * digits, and a S where it is less. */

#define LINEAR_LN2_127 88.0297f         /* 127 ln 2, and a little less than the largest float's logarithm */
#define LINEAR_LOG2E_LOW 1.92596299e-8f /* log2(e) less the float CA_LOG2E */

/* Splits e^x for |x| <= 88 into a power of two and 2^f - 1 for |f| <= 1/2, which a polynomial (exp2_full) gives to all
 * its digits. */
INLINE vf linear_power(vf x, vf *n) {
    *n = v_round(v_mul(x, v_set1(CA_LOG2E)));
    const vf f = v_fma(x, v_set1(LINEAR_LOG2E_LOW), v_fma(x, v_set1(CA_LOG2E), v_sub(v_set1(0), *n)));
    vf p = v_set1(exp2_full[0]);
    EACH(i, 5) p = v_fma(p, f, v_set1(exp2_full[i + 1]));
    return v_mul(p, f);
}
INLINE vf linear_bounded(vf x) { return v_min(v_set1(88), v_max(v_set1(-LINEAR_LN2_127), x)); } /* NaN stays */
/* Returns e^x, exactly 0 from -127 ln 2 down; *less gets e^x - 1. */
INLINE vf linear_exp_and_less(vf x, vf *less) {
    vf n;
    const vf f = linear_power(linear_bounded(x), &n);
    *less = v_add(v_scale(f, n), v_sub(v_scale(v_set1(1), n), v_set1(1)));
    return v_scale(v_add(f, v_set1(1)), n);
}
INLINE vf linear_exp(vf x) {
    vf less;
    return linear_exp_and_less(x, &less);
}
/* Splits a decay into factors such that a S is kept S + factor S. */
INLINE vf linear_split(vf a, vf less, vf *kept) {
    const vf half = v_set1(-0.5f);
    *kept = v_less(half, less, v_set1(1), v_set1(0));
    return v_less(half, less, less, a);
}
/* Returns log(1 + t) for t in 0..1, which is 2 atanh(z) of z = t / (2 + t): the series ends where z^14 / 15 is below
 * 2^-25. */
INLINE vf linear_log1p(vf t) {
    const vf z = v_div(t, v_add(t, v_set1(2))), u = v_mul(z, z);
    vf p = v_set1(1.0f / 13);
    p = v_fma(p, u, v_set1(1.0f / 11));
    p = v_fma(p, u, v_set1(1.0f / 9));
    p = v_fma(p, u, v_set1(1.0f / 7));
    p = v_fma(p, u, v_set1(1.0f / 5));
    p = v_fma(p, u, v_set1(1.0f / 3));
    return v_mul(v_add(z, z), v_fma(p, u, v_set1(1)));
}
INLINE vf linear_softplus(vf x) {
    return v_add(v_max(v_set1(0), x), linear_log1p(linear_exp(v_sub(v_set1(0), v_abs(x)))));
}
INLINE vf linear_sigmoid(vf x) { return v_div(v_set1(1), v_add(v_set1(1), linear_exp(v_sub(v_set1(0), x)))); }

/* Holds what a value head has for all tokens. */
typedef struct linear_head {
    int32_t head;
    float rate, bias, skip;      /* -exp(A_log); dt_bias and D where they are one number */
    const float *biases, *skips; /* [Dk], [Dv], where they are one for each channel, else NULL */
} linear_head;

static float linear_of_head(const ca_array *a, int32_t head, float absent) {
    return a->itemsize ? linear_number((const void *)a->address, a->dtype, head) : absent;
}

/* Reads an array [Hv, n] into `room`, or gives NULL where it is none. */
static const float *linear_of_channels(const ca_array *a, int32_t head, int64_t n, float *room) {
    if (!a->itemsize || a->ndim != 2)
        return NULL;
    linear_widen((const char *)a->address + head * a->strides[0] * a->itemsize, a->dtype, n, room);
    return room;
}

/* `biases` and `skips` are for a dt_bias and a D of each channel. */
static linear_head linear_open_head(const ca_linear_call *c, int32_t head, float *biases, float *skips) {
    const ca_array *bias = &c->a[CA_LINEAR_DT_BIAS], *skip = &c->a[CA_LINEAR_D];
    linear_head h = {.head = head};
    h.rate = -v_first(linear_exp(v_set1(linear_of_head(&c->a[CA_LINEAR_A_LOG], head, 0))));
    h.biases = linear_of_channels(bias, head, c->plan->shape.head_k_dim, biases);
    h.bias = h.biases ? 0 : linear_of_head(bias, head, 0);
    h.skips = linear_of_channels(skip, head, c->plan->shape.head_v_dim, skips);
    h.skip = h.skips ? 0 : linear_of_head(skip, head, 0);
    return h;
}

/* Turns n numbers of g into decays, and less gets these less 1; biases: n of them, or NULL. dt, where it is not NULL,
 * gets softplus(...). */
static void linear_decays(const ca_linear_how *how, const linear_head *h, const float *biases, int64_t n, float *g,
                          float *less, float *dt) {
    for (int64_t i = 0; i < n; i += VL) {
        vf x = v_load_f32(g + i);
        if (how->gate != CA_GATE_LOG) {
            x = v_add(x, biases ? v_load_f32(biases + i) : v_set1(h->bias));
            if (how->gate == CA_GATE_SIGMOID)
                x = v_mul(v_set1(how->lower_bound), linear_sigmoid(v_mul(x, v_set1(-h->rate))));
            else {
                x = linear_softplus(how->gate == CA_GATE_LOGSIGMOID ? v_sub(v_set1(0), x) : x);
                if (how->gate == CA_GATE_DT)
                    x = v_min(v_set1(how->dt_limit[1]), v_max(v_set1(how->dt_limit[0]), x));
                if (dt)
                    v_store(dt + i, x);
                x = v_mul(x, v_set1(h->rate));
            }
        }
        v_store(g + i, linear_exp_and_less(x, &x));
        v_store(less + i, x);
    }
}

static void linear_betas(const ca_linear_how *how, int64_t n, float *beta) {
    const vf scale = v_set1(how->allow_neg_eigval ? 2 : 1);
    for (int64_t i = 0; i < n; i += VL) {
        const vf x = v_load_f32(beta + i);
        v_store(beta + i, v_mul(scale, how->use_beta_sigmoid_in_kernel ? linear_sigmoid(x) : x));
    }
}

/* Gathers one number of each of n tokens. */
static void linear_gather(const ca_array *a, int64_t t, int64_t n, int32_t head, float *dst) {
    for (int64_t i = 0; i < LINEAR_PAD(n); i++)
        dst[i] = i < n ? linear_number(ca_gate_at(a, t + i, head), a->dtype, 0) : 0;
}

/* Fills in one decay, and that less 1, and one beta, for each of n <= CA_CHUNK tokens from t on; a wide g or beta is
 * left out. */
static void linear_numbers(const ca_linear_call *c, const linear_head *h, int64_t t, int64_t n, float *decay,
                           float *less, float *beta) {
    const ca_array *g = &c->a[CA_LINEAR_G], *b = &c->a[CA_LINEAR_BETA];
    const int by_dt = c->how->gate == CA_GATE_DT;
    for (int64_t i = 0; i < LINEAR_PAD(n); i++) {
        decay[i] = beta[i] = 1;
        less[i] = 0;
    }
    if (g->itemsize && !ca_is_wide(g)) {
        linear_gather(g, t, n, h->head, decay);
        linear_decays(c->how, h, NULL, n, decay, less, by_dt ? beta : NULL);
    }
    if (b->itemsize && !ca_is_wide(b)) {
        linear_gather(b, t, n, h->head, beta);
        linear_betas(c->how, n, beta);
    }
}

/* Fills in a decay, and that less 1, for each key channel of one token. */
static void linear_wide_decay(const ca_linear_call *c, const linear_head *h, int64_t t, float *decay, float *less) {
    const ca_array *g = &c->a[CA_LINEAR_G];
    const int64_t dk = c->plan->shape.head_k_dim;
    linear_widen(ca_gate_at(g, t, h->head), g->dtype, dk, decay);
    linear_decays(c->how, h, h->biases, dk, decay, less, NULL);
    for (int64_t i = dk; i < LINEAR_PAD(dk); i++)
        decay[i] = less[i] = 0;
}

/* Puts beta v of one token into `value`; `room` is for a beta of each channel. */
static void linear_value(const ca_linear_call *c, const linear_head *h, int64_t t, float beta, float *value,
                         float *room) {
    const ca_array *v = &c->a[CA_LINEAR_VALUE], *b = &c->a[CA_LINEAR_BETA];
    const int64_t dv = c->plan->shape.head_v_dim;
    const int wide = b->itemsize && ca_is_wide(b);
    linear_widen(ca_row_of(v, t, h->head), v->dtype, dv, value);
    if (wide) {
        linear_widen(ca_gate_at(b, t, h->head), b->dtype, dv, room);
        linear_betas(c->how, dv, room);
    }
    for (int64_t j = 0; j < dv; j += VL)
        v_store(value + j, v_mul(v_load_f32(value + j), wide ? v_load_f32(room + j) : v_set1(beta)));
}

/* Puts what a token reads the state by into `erase`: beta k, or erase k. */
static void linear_eraser(const ca_linear_call *c, const linear_head *h, int64_t t, float beta, const float *key,
                          float *erase) {
    const ca_array *e = &c->a[CA_LINEAR_ERASE];
    const int64_t dk = c->plan->shape.head_k_dim;
    if (e->itemsize)
        linear_widen(ca_gate_at(e, t, h->head), e->dtype, dk, erase);
    for (int64_t i = 0; i < LINEAR_PAD(dk); i += VL)
        v_store(erase + i, v_mul(v_load_f32(key + i), e->itemsize ? v_load_f32(erase + i) : v_set1(beta)));
}

/* Adds D v of one token to its output; `room` is for v. */
static void linear_skip(const ca_linear_call *c, const linear_head *h, int64_t t, float *o, float *room) {
    const ca_array *v = &c->a[CA_LINEAR_VALUE];
    if (!c->a[CA_LINEAR_D].itemsize)
        return;
    linear_widen(ca_row_of(v, t, h->head), v->dtype, c->plan->shape.head_v_dim, room);
    for (int64_t i = 0; i < c->plan->shape.head_v_dim; i += VL) {
        const vf d = h->skips ? v_load_f32(h->skips + i) : v_set1(h->skip);
        v_store(o + i, v_fma(d, v_load_f32(room + i), v_load_f32(o + i)));
    }
}

/* Reads a query or a key, divides it by its norm where that is asked for, and multiplies it by scale. */
static void linear_read(const ca_linear_call *c, int index, int64_t t, int32_t key_head, float scale, float *to) {
    const ca_array *a = &c->a[index];
    const int64_t dk = c->plan->shape.head_k_dim;
    linear_widen(ca_row_of(a, t, key_head), a->dtype, dk, to);
    if (c->how->use_qk_l2norm_in_kernel)
        scale /= norm_of(to, dk, 1, c->how->norm_eps);
    for (int64_t i = 0; i < dk; i += VL)
        v_store(to + i, v_mul(v_load_f32(to + i), v_set1(scale)));
}

/* Holds one token of one value head, as a step takes it. */
typedef struct linear_token {
    float *k, *qa, *ea;   /* [Dk]: key; query and eraser times the decay */
    float *factor, *kept; /* [Dk]: the decay, split (linear_split) */
    float *v, *u, *w, *o; /* [Dv]: beta v; what the token reads of the state, writes to it, and gives out */
    float kq;             /* the product of key and query */
    const void *ahead;    /* a state to be prefetched, whose rows lie as this one's do */
    int delta;
} linear_token;
