/* SPDX-License-Identifier: Apache-2.0
 * Bounds of the keys of each block, kept as tokens are written, and the scores that they give to queries. */
#include "check.h"
#include "kernel.h"
#include "threads.h"
#ifdef _OPENMP
#include <omp.h>
#endif

/* Bits as integers in the order of the floats that they are (-0 before 0), and which of them are NaN: SSE2 compares
 * these, eight halves at once. A bound that is NaN stays so, and a key that is makes it so. */
#define FOLD(name, UINT, INT, SIGN, INF)                                                                               \
    static INT name##_order(UINT x) { return (INT)(x & SIGN ? x ^ (SIGN - 1) : x); }                                   \
    static int name##_nan(UINT x) { return (x & (SIGN - 1)) > INF; }                                                   \
    static void name(const UINT *key, int64_t n, UINT *least, UINT *most) {                                            \
        for (int64_t d = 0; d < n; d++) {                                                                              \
            INT k = name##_order(key[d]);                                                                              \
            int nan = name##_nan(key[d]), kept = !name##_nan(least[d]);                                                \
            UINT low = least[d], high = most[d];                                                                       \
            least[d] = nan | (kept & (k < name##_order(low))) ? key[d] : low;                                          \
            most[d] = nan | (kept & (k > name##_order(high))) ? key[d] : high;                                         \
        }                                                                                                              \
    }
FOLD(fold_f32, uint32_t, int32_t, 0x80000000u, 0x7f800000u)
FOLD(fold_f16, uint16_t, int16_t, 0x8000u, 0x7c00u)
FOLD(fold_bf16, uint16_t, int16_t, 0x8000u, 0x7f80u)

static void fold(const ca_array *a, int64_t t, int64_t head, int64_t block, int begun) {
    const ca_array *key = &a[CA_BOUNDS_KEY];
    const int64_t head_size = key->shape[2];
    void *least = ca_row_of(&a[CA_BOUNDS_MIN], block, head), *most = ca_row_of(&a[CA_BOUNDS_MAX], block, head);
    const void *k = ca_row_of(key, t, head);
    if (!begun) {
        memcpy(least, k, (size_t)(head_size * key->itemsize));
        memcpy(most, k, (size_t)(head_size * key->itemsize));
    } else if (key->dtype == CA_F32)
        fold_f32(k, head_size, least, most);
    else
        (key->dtype == CA_F16 ? fold_f16 : fold_bf16)(k, head_size, least, most);
}

int ca_update_page_bounds(const ca_array *a, int64_t block_size, ca_fault *fault) {
    const int64_t *slots = (const int64_t *)a[CA_BOUNDS_SLOT_MAPPING].address;
    int64_t num_tokens = a[CA_BOUNDS_KEY].shape[0], heads = a[CA_BOUNDS_KEY].shape[1];
    if (ca_check_slots(slots, num_tokens, a[CA_BOUNDS_MIN].shape[0] * block_size, fault))
        return fault->status;
    /* first the blocks that start anew, wherever in the call their first token is */
    for (int begun = 0; begun < 2; begun++)
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t h = 0; slots[t] >= 0 && h < heads; h++)
                if (begun || slots[t] % block_size == 0)
                    fold(a, t, h, slots[t] / block_size, begun);
    return CA_OK;
}

static int check_scores(const ca_array *a, int64_t block_size, ca_fault *fault) {
    const ca_array *table = &a[CA_SCORES_BLOCK_TABLE];
    const int32_t *seq_lens = (const int32_t *)a[CA_SCORES_SEQ_LENS].address;
    const int32_t *blocks = (const int32_t *)table->address;
    int64_t num_reqs = table->shape[0];
    if (ca_check_lengths(num_reqs, seq_lens, (const int32_t *)a[CA_SCORES_QUERY_START_LOC].address, fault))
        return fault->status;
    for (int64_t r = 0; r < num_reqs; r++, blocks += table->strides[0])
        if (ca_check_blocks(blocks, r, 0, ca_div_up(seq_lens[r], block_size), table->shape[1],
                            a[CA_SCORES_MIN].shape[0], fault))
            return fault->status;
    return CA_OK;
}

/* 20 multiplications and additions a nanosecond, on a Zen 4 core. */
static double nanoseconds(const ca_array *a) {
    const ca_array *query = &a[CA_SCORES_QUERY], *scores = &a[CA_SCORES];
    return (double)query->shape[0] * query->shape[1] * query->shape[2] * scores->shape[2] * 2 / 20;
}

int64_t ca_score_floats(int64_t head_size) { return ca_round_up(2 * CA_PAGE_ROWS * head_size, CA_LANES); }

int ca_score_pages(const ca_array *a, int isa, int64_t block_size, float *scratch, int num_threads, ca_fault *fault) {
    const ca_array *query = &a[CA_SCORES_QUERY];
    const ca_kernel *kernel = ca_isa_get(isa)->kernels[query->dtype];
    int64_t heads = a[CA_SCORES_MIN].shape[1], items = a[CA_SCORES_BLOCK_TABLE].shape[0] * heads;
    int64_t floats = ca_score_floats(query->shape[2]);
    (void)floats;
    if (check_scores(a, block_size, fault))
        return fault->status;
    int team = ca_team((int)ca_min64(ca_min64(num_threads, ca_threads_for(nanoseconds(a))), items));
    if (team <= 1) {
        for (int64_t i = 0; i < items; i++)
            kernel->score_pages(a, block_size, i / heads, i % heads, scratch);
        return CA_OK;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t i = 0; i < items; i++)
        kernel->score_pages(a, block_size, i / heads, i % heads, scratch + omp_get_thread_num() * floats);
#endif
    return CA_OK;
}
