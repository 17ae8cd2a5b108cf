/* SPDX-License-Identifier: Apache-2.0
 * The engine that says what attention is: one score, one weight, one value at a time, in double.
 * It reads the same caches as the kernels, by the layouts' definition in cpu_attn.h. */
#include "cpu_attn.h"
#include "half.h"

static double element(const void *base, int64_t i, int dtype) {
    if (ca_is_narrow(dtype)) {
        uint8_t b = ((const uint8_t *)base)[i];
        return ca_as_float(dtype == CA_E4M3 ? ca_from_e4m3(b) : ca_from_e5m2(b));
    }
    if (dtype == CA_F32)
        return ((const float *)base)[i];
    uint16_t h = ((const uint16_t *)base)[i];
    return dtype == CA_F16 ? ca_from_f16(h) : ca_from_bf16(h);
}

static double score(const ca_plan *p, const ca_call *c, const char *query, const char *k, int64_t token) {
    int64_t d_end = p->shape.head_size;
    double dot = 0;
    for (int64_t d = 0; d < d_end; d++)
        dot += element(query, d, p->shape.dtype) *
               element(k, ca_k_offset(ca_layout_of(p), token, d, c->k_ld), p->shape.kv_dtype);
    dot *= (double)c->scale * c->k_scale;
    return c->softcap > 0 ? c->softcap * tanh(dot / c->softcap) : dot;
}

/* One row over the keys it sees among [k0, k1); o is a row of doubles. */
static void attend_row(const ca_plan *p, const ca_call *c, const ca_task *t, int64_t r, int kv_head, int64_t k0,
                       int64_t k1, const ca_state *state, double *o) {
    int64_t group = p->shape.num_heads / p->shape.num_kv_heads, i = t->token + r / group, lo, hi;
    int64_t head = kv_head * group + r % group, dv = p->shape.head_size_v, start = p->query_start_loc[t->request];
    int64_t pos = (int64_t)p->seq_lens[t->request] - (p->query_start_loc[t->request + 1] - start) + i;
    const char *query = ca_block(c->query, c->q_stride_t, c->q_stride_h, start + i, (int)head, p->shape.dtype);
    const int32_t *table = c->block_table + t->request * c->table_stride;
    double m = -INFINITY, l = 0;
    memset(o, 0, (size_t)dv * sizeof *o);
    ca_visible(p, t->request, i, &lo, &hi);
    for (int64_t j = ca_max64(lo, k0); j < ca_min64(hi, k1); j++) {
        int64_t block = table[j / c->block_size], token = j % c->block_size;
        const char *k = ca_block(c->key_cache, c->k_stride_n, c->k_stride_h, block, kv_head, p->shape.kv_dtype);
        const char *v = ca_block(c->value_cache, c->v_stride_n, c->v_stride_h, block, kv_head, p->shape.kv_dtype);
        double s = score(p, c, query, k, token), old = m;
        if (c->alibi_slopes)
            s += (double)c->alibi_slopes[head] * (double)(j - pos);
        m = s > m ? s : m;
        double rescale = old == m ? 1 : exp(old - m), w = m == -INFINITY ? exp(s) : exp(s - m);
        l = l * rescale + w;
        for (int64_t d = 0; d < dv; d++)
            o[d] = o[d] * rescale + w * element(v, ca_v_offset(ca_layout_of(p), token, d, c->v_ld), p->shape.kv_dtype);
    }
    state->m[r] = (float)(m * CA_LOG2E_D);
    /* m was rounded: l and o take the difference, so that (o, l, m) stay one consistent triple */
    double correct = m == -INFINITY ? 1 : exp2(m * CA_LOG2E_D - (double)state->m[r]);
    state->l[r] = (float)(l * correct);
    for (int64_t d = 0; d < dv; d++)
        state->o[r * dv + d] = (float)(o[d] * correct);
}

static int segment(const ca_plan *p, const ca_call *c, const ca_task *t, int kv_head, int64_t k0, int64_t k1,
                   const ca_state *state, void *scratch) {
    int64_t rows = (int64_t)t->num_tokens * (p->shape.num_heads / p->shape.num_kv_heads);
    for (int64_t r = 0; r < rows; r++)
        attend_row(p, c, t, r, kv_head, k0, k1, state, scratch);
    return 0;
}

static int rows(const ca_kernel *kernel) {
    (void)kernel;
    return 16;
}

static int64_t scratch_bytes(const ca_plan *p) { return p->shape.head_size_v * (int64_t)sizeof(double); }

static const ca_engine engine = {"reference", rows, scratch_bytes, segment};

const ca_engine *ca_reference_engine(void) { return &engine; }
