/* SPDX-License-Identifier: Apache-2.0
 * This engine says what attention is: it computes one score, one weight and one value at a time, in double. It reads
 * the same caches as the kernels, by the layouts' definition in layout.h. */
#include "kernel/kernel.h"
#include "plan/keys.h"

/* Reads K or V of key j of a request. */
static void read_key(const ca_plan *p, const ca_call *c, int kv, int request, int kv_head, int64_t j, float *x) {
    const ca_side *s = &p->sides[kv];
    const char *block = ca_kv_block(p, c, kv, ca_block_of(c, request, j / c->block_size), kv_head);
    for (int64_t d = 0; d < s->head_size; d++)
        x[d] = ca_read_element(s, block, c->block_size, c->kv[kv].ld, j % c->block_size, d);
}

static double score(const ca_plan *p, const ca_call *c, const float *query, const float *key) {
    double dot = 0;
    for (int64_t d = 0; d < p->shape.head_size; d++)
        dot += (double)query[d] * key[d];
    dot *= (double)c->scale * c->k_scale;
    return c->softcap > 0 ? c->softcap * tanh(dot / c->softcap) : dot;
}

/* A thread works in these: a row of the output, one of queries, and a chain of K and V, those keys that are selected. A
 * key becomes floats once for all rows of a task, which is four times as fast as once for each row. */
typedef struct row_work {
    double *o;
    float *query, *key, *value;
} row_work;

/* Computes one row over the keys that it sees among [k0, k1), which w holds. */
static void attend_row(const ca_plan *p, const ca_call *c, const ca_task *task, int64_t r, int kv_head, int64_t k0,
                       int64_t k1, const ca_state *state, const row_work *w) {
    const int64_t group = p->group_size, d_end = p->shape.head_size, dv = p->shape.head_size_v;
    const ca_query_row row = ca_query_row_of(p, c, ca_token_at(p, task, r / group), kv_head * group + r % group);
    double m = -INFINITY, l = 0, *o = w->o;
    for (int64_t d = 0; d < d_end; d++)
        w->query[d] = ca_number_at(row.query, p->shape.dtype, d);
    memset(o, 0, (size_t)dv * sizeof *o);
    const int64_t hi = ca_min64(row.hi, k1);
    int64_t n = 0;
    for (int64_t j, next = k0; (j = ca_next_key(p, c, task, kv_head, next, hi)) < hi; next = j + 1, n++) {
        if (j < row.lo || (row.tree && !ca_sees(row.tree, ca_context_keys(p, task->request), j)))
            continue;
        const float *v = w->value + n * dv;
        double s = score(p, c, w->query, w->key + n * d_end), old = m;
        if (row.slope != 0)
            s += (double)row.slope * (double)(ca_key_position(&p->shape, j) - row.pos);
        if (row.bias)
            s += row.bias[j];
        m = s > m ? s : m;
        double rescale = old == m ? 1 : exp(old - m), weight = m == -INFINITY ? exp(s) : exp(s - m);
        l = l * rescale + weight;
        for (int64_t d = 0; d < dv; d++)
            o[d] = o[d] * rescale + weight * v[d];
    }
    state->m[r] = (float)(m * CA_LOG2E_D);
    /* A maximum below float32's range counts as -inf. */
    const int past_float = m > -INFINITY && state->m[r] == -INFINITY;
    /* m was rounded to float32. l and o take the difference, so that (o, l, m) stay one consistent triple. Past 2^24 it
     * may be 1 or more; float32 has no digits for it there, and it is left out. */
    double lost = m * CA_LOG2E_D - (double)state->m[r];
    double correct = past_float ? 0 : state->m[r] == INFINITY ? NAN : fabs(lost) < 1 ? exp2(lost) : 1;
    state->l[r] = (float)(l * correct);
    for (int64_t d = 0; d < dv; d++)
        state->o[r * dv + d] = (float)(o[d] * correct);
}

/* Returns how many keys a chain has at most. */
static int64_t chain_keys(const ca_plan *p) {
    const int64_t segment = p->shape.query_block_size ? CA_CHAIN_KEYS : ca_segment_keys(ca_longest(p));
    return ca_min64(ca_longest(p), ca_min64(segment, CA_CHAIN_KEYS));
}

static int segment(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int num_heads, int64_t k0,
                   int64_t k1, const ca_state *state, void *scratch) {
    (void)num_heads;
    const int64_t rows = ca_rows_of(p, task), d_end = p->shape.head_size, dv = p->shape.head_size_v;
    float *query = (float *)((double *)scratch + dv), *key = query + d_end;
    const row_work w = {scratch, query, key, key + chain_keys(p) * d_end};
    int64_t n = 0;
    for (int64_t j, next = k0; (j = ca_next_key(p, c, task, kv_head, next, k1)) < k1; next = j + 1, n++) {
        read_key(p, c, K, task->request, kv_head, j, w.key + n * d_end);
        read_key(p, c, V, task->request, kv_head, j, w.value + n * dv);
    }
    for (int64_t r = 0; r < rows; r++)
        attend_row(p, c, task, r, kv_head, k0, k1, state, &w);
    return 0;
}

static int rows(const ca_kernel *kernel) {
    (void)kernel;
    return 16;
}

static int64_t scratch_bytes(const ca_plan *p) {
    const int64_t d_end = p->shape.head_size, dv = p->shape.head_size_v;
    return dv * (int64_t)sizeof(double) + (d_end + chain_keys(p) * (d_end + dv)) * (int64_t)sizeof(float);
}

static const ca_engine engine = {.rows = rows, .scratch_bytes = scratch_bytes, .segment = segment};

const ca_engine *ca_reference_engine(void) { return &engine; }
