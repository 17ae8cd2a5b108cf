/* SPDX-License-Identifier: Apache-2.0
 * Attention over several sets of keys follows from attention over each (arXiv:2501.01005): the weight of a part is
 * exp(lse_s - lse), where lse is the log of the sum of all exp(lse_s). */
#include "engine.h"
#include "cache/half.h"
#include "cache/layout.h"
#include "threads.h"

#define COLUMNS 512 /* columns that are summed at a time, in float32 */

typedef struct merging {
    int64_t num_parts;
    const ca_array *outs, *lses; /* [num_parts] for the parts, then one for the result */
} merging;

/* Returns -inf where the part saw no key, which FlashAttention 2 marks by +inf. */
static float lse_at(const ca_array *lse, int64_t t, int64_t h) {
    float x = ((const float *)lse->address)[h * lse->strides[0] + t];
    return x == INFINITY ? -INFINITY : x;
}

static void add_row(float *sum, const void *row, int64_t n, int dtype, float weight) {
    if (dtype == CA_F32)
        for (int64_t i = 0; i < n; i++)
            sum[i] += weight * ((const float *)row)[i];
    else if (dtype == CA_F16)
        for (int64_t i = 0; i < n; i++)
            sum[i] += weight * ca_from_f16(((const uint16_t *)row)[i]);
    else
        for (int64_t i = 0; i < n; i++)
            sum[i] += weight * ca_from_bf16(((const uint16_t *)row)[i]);
}

static void put_row(const float *sum, void *row, int64_t n, int dtype) {
    if (dtype == CA_F32)
        memcpy(row, sum, (size_t)n * sizeof *sum);
    else if (dtype == CA_F16)
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)row)[i] = ca_to_f16(sum[i]);
    else
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)row)[i] = ca_to_bf16(sum[i]);
}

/* A part that saw no key counts for nothing, whatever its output holds. Where the lse of a part is NaN, so is that of
 * the result. */
static void merge_row(const merging *m, int64_t t, int64_t h) {
    const ca_array *out = &m->outs[m->num_parts], *lse = &m->lses[m->num_parts];
    int64_t dv = out->shape[2], size = out->itemsize;
    float top = -INFINITY, total = 0, sum[COLUMNS];
    for (int64_t s = 0; s < m->num_parts; s++) {
        float x = lse_at(&m->lses[s], t, h);
        top = x > top || x != x ? x : top;
    }
    for (int64_t s = 0; top != -INFINITY && s < m->num_parts; s++)
        total += expf(lse_at(&m->lses[s], t, h) - top);
    for (int64_t c = 0; c < dv; c += COLUMNS) {
        int64_t n = ca_min64(COLUMNS, dv - c);
        memset(sum, 0, sizeof sum);
        for (int64_t s = 0; s < m->num_parts; s++) {
            float x = lse_at(&m->lses[s], t, h);
            if (x != -INFINITY)
                add_row(sum, ca_row_of(&m->outs[s], t, h) + c * size, n, out->dtype, expf(x - top) / total);
        }
        put_row(sum, ca_row_of(out, t, h) + c * size, n, out->dtype);
    }
    ((float *)lse->address)[h * lse->strides[0] + t] = top == -INFINITY ? top : top + logf(total);
}

static void merge_share(void *work, int thread, int team) {
    const merging *m = work;
    const int64_t tokens = m->outs[m->num_parts].shape[0], heads = m->outs[m->num_parts].shape[1];
    for (int64_t t = tokens * thread / team; t < tokens * (thread + 1) / team; t++)
        for (int64_t h = 0; h < heads; h++)
            merge_row(m, t, h);
}

void ca_merge_states(int64_t num_parts, const ca_array *outs, const ca_array *lses) {
    merging m = {num_parts, outs, lses};
    int64_t tokens = outs[num_parts].shape[0], heads = outs[num_parts].shape[1];
    /* A thread merges 2 elements a nanosecond in float16, which is the slowest, and 5 in float32 from its caches. */
    double elements = (double)num_parts * (double)(tokens * heads) * (double)outs[num_parts].shape[2];
    ca_run_team(ca_team((int)ca_min64(ca_get_num_threads(), ca_threads_for(elements / 2))), merge_share, &m);
}
