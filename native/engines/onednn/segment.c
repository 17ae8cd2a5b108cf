/* SPDX-License-Identifier: Apache-2.0
 * The engine gathers K and V, forms qk by matmul, weights by softmax and pv by matmul, and merges the chunks of keys.
 *
 * oneDNN's softmax divides by the sum and keeps neither sum nor max (no version offers a log-sum-exp). Both come back
 * from one element: with s* the largest score of a row, softmax(s*) = exp(s* - s*) / L = 1 / L, the largest weight. The
 * state refers to m = fl(s* log2 e), so l = L 2^(s* log2 e - m), where the exponent is what m lost in rounding. */
#include "plan/keys.h"
#include "gather.h"
#include "primitive.h"
#include <math.h>
#include <string.h>

#define ROWS 256 /* query rows of a matmul; with 512 keys they are the fastest tile (v3.2, AMX and AVX-512) */
#define KEYS 512
/* One sum takes so many keys of float32's weights times V. Where V is one number the products are alike and are rounded
 * to the same side: one sum over 512 keys came to 2.4 times the error budget, and sums over 128 to 0.86 (in 1.01 to
 * 1.03 of prefill's time). */
#define CHAIN 128
#define PAD (256 << 10) /* bytes of oneDNN's scratchpad, of which v3.2 asks for 132 KB at most */

/* The engine takes bf16 where the CPU multiplies it faster than float32: by AMX, or where the isa's own kernel found it
 * so. Elsewhere it loses time (kernel/MEASUREMENTS.md: oneDNN). */
static const char *bf16_needs(const ca_plan *plan) { return plan->kernel->info.bf16_products ? "bf16" : "amx"; }

typedef struct gemm_work {
    ca_pages pages;
    const ca_task *task;
    ca_form form;
    int64_t rows, group, head_size, head_size_v;
    int64_t k0, k1; /* [k0, k1): the segment's keys */
    float q_factor; /* what Q is multiplied by where it is float32; bfloat16 stays as it is */
    float factor;   /* what the product is multiplied by */
    /* The fields below are scratch. */
    void *q, *k, *v, *p, *pad;
    float *s, *slope;
    float *top; /* a row's largest score; NaN: one is NaN or +inf */
    int64_t *lo, *hi, *pos;
    ca_state part;
    const uint8_t **tree; /* of each row: ca_tree_row */
    const float **bias;   /* of each row: ca_bias_row */
    int64_t context;
} gemm_work;

/* Rounds rows up to 1, 2, 4, ... 32 or a multiple of 32: these are at most 13 sizes, with little padding. */
static int64_t row_bucket(int64_t rows) {
    int64_t m = 1;
    while (m < rows && m < 32)
        m *= 2;
    return rows <= m ? m : ca_round_up(rows, 32);
}

static int64_t key_bucket(int64_t keys) {
    return keys <= 256 ? ca_round_up(ca_max64(keys, 1), 64) : ca_round_up(keys, 128);
}

static int64_t carve(gemm_work *w, uintptr_t base, const ca_plan *plan) {
    int64_t at = 0, rows = plan->rows, padded = row_bucket(ca_min64(rows, ROWS));
    int64_t q_rows = ca_round_up(rows, padded);
    CA_CARVE(w->q, q_rows * ca_max64(w->head_size * 4, ca_round_up(w->head_size, 32) * 2))
    CA_CARVE(w->k, ca_form_k_bytes(w->head_size, KEYS))
    CA_CARVE(w->v, ca_form_v_bytes(w->head_size_v, KEYS))
    CA_CARVE(w->s, padded * KEYS * 4)
    CA_CARVE(w->p, padded * KEYS * 2)
    CA_CARVE(w->part.o, padded * w->head_size_v * 4 * (KEYS / CHAIN))
    CA_CARVE(w->part.m, padded * 4)
    CA_CARVE(w->part.l, padded * 4)
    CA_CARVE(w->top, padded * 4)
    CA_CARVE(w->slope, rows * 4)
    CA_CARVE(w->lo, rows * sizeof(int64_t))
    CA_CARVE(w->hi, rows * sizeof(int64_t))
    CA_CARVE(w->pos, rows * sizeof(int64_t))
    CA_CARVE(w->tree, rows * sizeof *w->tree)
    CA_CARVE(w->bias, rows * sizeof *w->bias)
    CA_CARVE(w->pad, PAD)
    CA_CARVE(w->pages.wide, ca_wide_bytes(plan))
    CA_CARVE(w->pages.key, KEYS * sizeof(int32_t))
    return at;
}

static int64_t scratch_bytes(const ca_plan *plan) {
    gemm_work w = {.head_size = plan->shape.head_size, .head_size_v = plan->shape.head_size_v};
    return carve(&w, 0, plan);
}

static int engine_rows(const ca_kernel *kernel) {
    (void)kernel;
    return ROWS;
}

/* ---- the primitives ---- */

static int matmul(const gemm_work *w, int64_t m, int64_t n, int64_t k, int64_t parts, int packed, int tanh, int scaled,
                  ca_prim **prim) {
    int bf16 = w->form == CA_FORM_BF16;
    int32_t type = bf16 ? dnnl_bf16 : dnnl_f32;
    int32_t layout = !packed ? dnnl_ab : bf16 ? dnnl_BA16a64b2a : dnnl_BA16a64b;
    ca_prim_key key = {CA_PRIM_MATMUL, type, dnnl_f32, layout, tanh, scaled, m, n, k, parts};
    return ca_prim_get(&key, bf16 ? bf16_needs(w->pages.plan) : NULL, prim);
}

static int qk(const gemm_work *w, int64_t m, int64_t n, ca_prim **prim) {
    return matmul(w, m, n, ca_form_head_size(w->form, w->head_size), 1, w->form != CA_FORM_PLAIN,
                  w->pages.call->softcap > 0, w->factor != 1, prim);
}

/* bf16's error budget has room for one sum. */
static int64_t chains(const gemm_work *w, int64_t keys) {
    return w->form == CA_FORM_BF16 ? 1 : keys % CHAIN == 0 ? keys / CHAIN : keys / 64;
}

static int pv(const gemm_work *w, int64_t m, int64_t n, ca_prim **prim) {
    return matmul(w, m, w->head_size_v, n, chains(w, n), w->form == CA_FORM_BF16, 0, 0, prim);
}

static int softmax(const gemm_work *w, int64_t m, int64_t n, ca_prim **prim) {
    (void)w;
    ca_prim_key key = {CA_PRIM_SOFTMAX, dnnl_f32, dnnl_f32, dnnl_ab, 0, 0, m, n, 0, 1};
    return ca_prim_get(&key, NULL, prim);
}

typedef int primitive_fn(const gemm_work *w, int64_t m, int64_t n, ca_prim **prim);

static int run(const gemm_work *w, primitive_fn *primitive, int64_t m, int64_t n, const void *src, const void *weights,
               void *dst) {
    ca_prim *p;
    int status = primitive(w, m, n, &p);
    if (status)
        return status;
    status = ca_prim_run(p, w->factor, src, weights, dst, w->pad, PAD);
    ca_prim_put(p);
    return status;
}

/* Takes the next columns: keys from `key` on, of the blocks that count. Returns how many it took. */
static int64_t take_keys(const gemm_work *w, int64_t key) {
    const ca_pages *g = &w->pages;
    int64_t n = 0, size = g->call->block_size;
    while (n < KEYS && (key = ca_next_key(g->plan, g->call, w->task, g->kv_head, key, w->k1)) < w->k1)
        for (int64_t end = ca_min64(w->k1, (key / size + 1) * size); key < end && n < KEYS; key++)
            g->key[n++] = (int32_t)key;
    return n;
}

static int64_t first_chunk(const gemm_work *w) { return w->form == CA_FORM_BF16 ? w->k0 & ~(int64_t)1 : w->k0; }

/* Asks for all primitives that a segment will need, so that no form is given up half way. Returns a
 * ca_onednn_status. */
static int form_is_there(const gemm_work *w) {
    static primitive_fn *const all[] = {qk, pv, softmax};
    if (!ca_form_fits(w->form, &w->pages))
        return CA_ONEDNN_NO_PRIMITIVE;
    for (int64_t keys, key = first_chunk(w); (keys = take_keys(w, key)) > 0; key = w->pages.key[keys - 1] + 1)
        for (int64_t r = 0; r < w->rows; r += ROWS) {
            int64_t n = key_bucket(keys), m = row_bucket(ca_min64(ROWS, w->rows - r));
            for (int i = 0; i < 3; i++) {
                ca_prim *p;
                int status = all[i](w, m, n, &p);
                if (status)
                    return status;
                ca_prim_put(p);
            }
        }
    return CA_ONEDNN_OK;
}

static int choose_form(gemm_work *w) {
    const ca_call *c = w->pages.call;
    const double scale = (double)c->scale * c->k_scale, factor = c->softcap > 0 ? scale / c->softcap : scale;
    int status = CA_ONEDNN_NO_PRIMITIVE;
    for (w->form = 0; w->form < CA_FORMS; w->form++) {
        const double in_q = w->form == CA_FORM_BF16 ? 1 : ca_query_factor(scale, factor);
        w->q_factor = (float)in_q;
        w->factor = (float)(in_q == 0 ? 1 : factor / in_q);
        status = form_is_there(w);
        if (status != CA_ONEDNN_NO_PRIMITIVE)
            break;
    }
    return status;
}

/* ---- queries ---- */

static void take_rows(gemm_work *w) {
    const ca_plan *plan = w->pages.plan;
    int64_t columns = ca_form_head_size(w->form, w->head_size);
    w->context = ca_context_keys(plan, w->task->request);
    if (w->form == CA_FORM_BF16)
        memset(w->q, 0, (size_t)(w->rows * columns * 2));
    for (int64_t r = 0; r < w->rows; r++) {
        const int64_t head = w->pages.kv_head * w->group + r % w->group;
        const ca_query_row row = ca_query_row_of(plan, w->pages.call, ca_token_at(plan, w->task, r / w->group), head);
        if (w->form == CA_FORM_BF16)
            memcpy((uint16_t *)w->q + r * columns, row.query, (size_t)w->head_size * 2);
        else
            plan->kernel->widen_row(row.query, w->head_size, w->q_factor, (float *)w->q + r * columns);
        w->lo[r] = row.lo;
        w->hi[r] = row.hi;
        w->tree[r] = row.tree;
        w->bias[r] = row.bias;
        w->pos[r] = row.pos;
        w->slope[r] = row.slope;
    }
}

/* Sets the rows behind the last one, up to the matmul's size, to zero, so that they cost no more than others. */
static void pad_rows(gemm_work *w, int64_t r0, int64_t rows) {
    int64_t row = ca_form_head_size(w->form, w->head_size) * (w->form == CA_FORM_BF16 ? 2 : 4);
    if (rows > 0)
        memset((char *)w->q + (r0 + rows) * row, 0, (size_t)((row_bucket(rows) - rows) * row));
}

/* ---- scores ---- */

/* A vector has four floats, as every machine has for which this module is built. */
typedef float vec __attribute__((vector_size(16)));
typedef int32_t mask __attribute__((vector_size(16)));
typedef int16_t words __attribute__((vector_size(8)));

static vec load(const float *x) {
    vec y;
    memcpy(&y, x, sizeof y);
    return y;
}

static vec larger(vec a, vec b) {
    mask more = a > b;
    return (vec)((more & (mask)a) | (~more & (mask)b));
}

/* Returns the largest of x[0..n), -inf if there is none, or NaN if one of them is NaN or +inf. */
static float largest(const float *x, int64_t n) {
    const vec inf = (vec){0} + INFINITY;
    vec a = -inf, b = -inf;
    mask fine = a < inf;
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) {
        vec y = load(x + j), z = load(x + j + 4);
        a = larger(y, a);
        b = larger(z, b);
        fine &= (y < inf) & (z < inf);
    }
    a = larger(a, b);
    float top = -INFINITY;
    for (int i = 0; i < 4; i++) {
        top = a[i] > top ? a[i] : top;
        if (!fine[i])
            return NAN;
    }
    for (; j < n; j++) {
        if (!(x[j] < INFINITY))
            return NAN;
        top = x[j] > top ? x[j] : top;
    }
    return top;
}

/* Returns how many of the chunk's n columns have keys before this one. */
static int64_t columns_before(const gemm_work *w, int64_t n, int64_t key) {
    const int32_t *keys = w->pages.key;
    int64_t low = keys[n - 1] < key ? n : 0, high = n; /* most rows see all columns */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Columns [a, b) are what the row sees. */
static void seen(const gemm_work *w, int64_t row, int64_t n, int64_t *a, int64_t *b) {
    *a = columns_before(w, n, w->lo[row]);
    *b = ca_max64(*a, columns_before(w, n, w->hi[row]));
}

/* Applies softcap's factor, ALiBi, bias and the mask. A row whose scores are all -inf, or of which one is NaN or +inf,
 * becomes zeros; w->top tells these apart. */
static void finish_scores(gemm_work *w, int64_t r0, int64_t r, int64_t n, int64_t keys) {
    float *s = w->s + r * keys, cap = w->pages.call->softcap, slope = w->slope[r0 + r];
    const ca_shape *shape = &w->pages.plan->shape;
    int64_t a, b, pos = w->pos[r0 + r];
    seen(w, r0 + r, n, &a, &b);
    if (cap > 0)
        for (int64_t j = a; j < b; j++)
            s[j] *= cap;
    if (slope != 0)
        for (int64_t j = a; j < b; j++)
            s[j] += slope * (float)(int32_t)(ca_key_position(shape, w->pages.key[j]) - pos);
    for (int64_t j = a; w->bias[r0 + r] && j < b; j++)
        s[j] += w->bias[r0 + r][w->pages.key[j]];
    for (int64_t j = a; w->tree[r0 + r] && j < b; j++)
        if (!ca_sees(w->tree[r0 + r], w->context, w->pages.key[j]))
            s[j] = -INFINITY;
    w->top[r] = largest(s + a, b - a);
    if (!(w->top[r] > -INFINITY)) {
        memset(s, 0, (size_t)keys * sizeof *s);
        return;
    }
    for (int64_t j = 0; j < a; j++)
        s[j] = -INFINITY;
    for (int64_t j = b; j < keys; j++)
        s[j] = -INFINITY;
}

/* Rounds x[0..n), finite, n a multiple of 4, to bfloat16, nearest even. Returns the sum of what they became. */
static float round_weights(const float *x, int64_t n, uint16_t *to) {
    vec sum = {0};
    for (int64_t j = 0; j < n; j += 4) {
        mask bits = (mask)load(x + j);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & (mask)((mask){0} - 0x10000);
        sum += (vec)bits;
        words half = __builtin_convertvector(bits >> 16, words);
        memcpy(to + j, &half, sizeof half);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* After softmax, m is L until finish_row has the reference max, and l is the sum of the weights that pv takes, times L.
 * Weights that count nowhere become 0. */
static void finish_weights(gemm_work *w, int64_t r, int64_t keys) {
    float *p = w->s + r * keys, sum = 1;
    int counts = w->top[r] > -INFINITY;
    if (!counts)
        memset(p, 0, (size_t)keys * sizeof *p);
    w->part.m[r] = counts ? 1 / largest(p, keys) : 0;
    if (w->form == CA_FORM_BF16)
        sum = round_weights(p, keys, (uint16_t *)w->p + r * keys);
    w->part.l[r] = w->part.m[r] * sum;
}

/* ---- results ---- */

/* Adds the other chains of a row to the first; each chain has m rows. */
static void add_chains(gemm_work *w, int64_t r, int64_t m, int64_t keys) {
    const int64_t dv = w->head_size_v;
    float *restrict o = w->part.o + r * dv;
    for (int64_t i = 1; i < chains(w, keys); i++) {
        const float *restrict x = w->part.o + (i * m + r) * dv;
        for (int64_t d = 0; d < dv; d++)
            o[d] += x[d];
    }
}

static int all_finite(const float *x, int64_t n) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= !(fabsf(x[i]) < INFINITY);
    return !bad;
}

/* Weighs the keys that the row sees one by one. A key that it may not see, but that others may, holds NaN or inf in V,
 * and 0 * NaN is NaN. */
static void weigh_seen(gemm_work *w, int64_t r0, int64_t r, int64_t a, int64_t b, int64_t keys) {
    const float *p = w->s + r * keys;
    const uint8_t *bits = w->tree[r0 + r];
    float *o = w->part.o + r * w->head_size_v;
    for (int64_t d = 0; d < w->head_size_v; d++) {
        double sum = 0;
        for (int64_t j = a; j < b; j++)
            if (!bits || ca_sees(bits, w->context, w->pages.key[j]))
                sum += (double)p[j] * ca_form_v(w->form, w->v, keys, w->head_size_v, j, d);
        o[d] = (float)sum;
    }
}

static void finish_row(gemm_work *w, int64_t r0, int64_t r, int64_t n, int64_t keys) {
    float *o = w->part.o + r * w->head_size_v, *m = &w->part.m[r], *l = &w->part.l[r];
    int64_t a, b;
    if (!(w->top[r] > -INFINITY)) {
        *m = isnan(w->top[r]) ? 0 : -INFINITY;
        *l = isnan(w->top[r]) ? NAN : 0;
        for (int64_t d = 0; d < w->head_size_v; d++)
            o[d] = *l;
        return;
    }
    seen(w, r0 + r, n, &a, &b);
    if ((b - a < n || w->tree[r0 + r]) && !all_finite(o, w->head_size_v))
        weigh_seen(w, r0, r, a, b, keys);
    const double top = w->top[r] * CA_LOG2E_D, rest = top - (double)(float)top;
    /* A maximum below float32's range counts as -inf. Past 2^24 float32 has no digits for the rest, which is left
     * out. */
    const float lost = (float)top == -INFINITY  ? 0
                       : (float)top == INFINITY ? NAN
                       : fabs(rest) < 1         ? exp2f((float)rest)
                                                : 1;
    const float share = *m * lost;
    *m = (float)top;
    *l *= lost;
    for (int64_t d = 0; d < w->head_size_v; d++)
        o[d] *= share;
}

static int sees_any(const gemm_work *w, int64_t r0, int64_t rows, int64_t n) {
    for (int64_t r = r0; r < r0 + rows; r += w->group) {
        int64_t a, b;
        seen(w, r, n, &a, &b);
        if (a < b)
            return 1;
    }
    return 0;
}

/* Computes rows [r0, r0 + rows) against the chunk, and merges them into the state. */
static int run_rows(gemm_work *w, int64_t r0, int64_t rows, int64_t n, const ca_state *state) {
    int64_t m = row_bucket(rows), keys = key_bucket(n);
    const ca_state into = {state->o + r0 * w->head_size_v, state->m + r0, state->l + r0};
    const int64_t q_row = ca_form_head_size(w->form, w->head_size) * (w->form == CA_FORM_BF16 ? 2 : 4);
    if (!sees_any(w, r0, rows, n))
        return CA_ONEDNN_OK;
    int status = run(w, qk, m, keys, (char *)w->q + r0 * q_row, w->k, w->s);
    for (int64_t r = 0; r < rows && !status; r++)
        finish_scores(w, r0, r, n, keys);
    if (!status)
        status = run(w, softmax, m, keys, w->s, NULL, w->s);
    for (int64_t r = 0; r < rows && !status; r++)
        finish_weights(w, r, keys);
    if (!status)
        status = run(w, pv, m, keys, w->form == CA_FORM_BF16 ? w->p : w->s, w->v, w->part.o);
    for (int64_t r = 0; r < rows && !status; r++) {
        add_chains(w, r, m, keys);
        finish_row(w, r0, r, n, keys);
    }
    if (!status)
        w->pages.plan->kernel->merge(&into, &w->part, rows, w->head_size_v);
    return status;
}

static int run_chunks(gemm_work *w, const ca_state *state) {
    int status = choose_form(w);
    if (status)
        return status;
    take_rows(w);
    pad_rows(w, w->rows / ROWS * ROWS, w->rows % ROWS);
    for (int64_t n, key = first_chunk(w); (n = take_keys(w, key)) > 0; key = w->pages.key[n - 1] + 1) {
        int64_t keys = key_bucket(n), skip = w->pages.key[0] < w->k0;
        ca_gather_k(w->form, &w->pages, skip, n, keys, w->k);
        ca_gather_v(w->form, &w->pages, skip, n, keys, w->v);
        for (int64_t r = 0; r < w->rows && !status; r += ROWS)
            status = run_rows(w, r, ca_min64(ROWS, w->rows - r), n, state);
        if (status)
            return status;
    }
    return CA_ONEDNN_OK;
}

static int segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                   int64_t k0, int64_t k1, const ca_state *state, void *scratch) {
    (void)num_heads;
    int64_t group = plan->group_size, rows = ca_rows_of(plan, task);
    if (k1 <= k0)
        return CA_ONEDNN_OK;
    gemm_work w = {.pages = {plan, call, task->request, kv_head, NULL, NULL},
                   .task = task,
                   .rows = rows,
                   .group = group,
                   .head_size = plan->shape.head_size,
                   .head_size_v = plan->shape.head_size_v,
                   .k0 = k0,
                   .k1 = k1};
    carve(&w, (uintptr_t)scratch, plan);
    int threads = ca_prim_enter(), status = run_chunks(&w, state);
    ca_prim_leave(threads);
    return status;
}

static const ca_engine engine = {.rows = engine_rows, .scratch_bytes = scratch_bytes, .segment = segment};

const ca_engine *ca_onednn_engine(void) { return &engine; }
