/* SPDX-License-Identifier: Apache-2.0
 * This file keeps bounds of the keys of each block as tokens are written, and scores blocks by them for queries. */
#include "check/check.h"
#include "cpu/system.h"
#include "kernel/kernel.h"
#include "run/threads.h"
#include <stdatomic.h>
#include <stdlib.h>

/* Floats are compared as integers that have their order (-0 before 0), because SSE2 compares eight such halves at once.
 * A bound that is NaN stays NaN, and a key that is NaN makes its bounds NaN. */
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
    void *least = ca_row_of(&a[CA_BOUNDS_BLOCK_MIN], block, head);
    void *most = ca_row_of(&a[CA_BOUNDS_BLOCK_MAX], block, head);
    const void *k = ca_row_of(key, t, head);
    if (!begun) {
        memcpy(least, k, (size_t)(head_size * key->itemsize));
        memcpy(most, k, (size_t)(head_size * key->itemsize));
    } else if (key->dtype == CA_F32)
        fold_f32(k, head_size, least, most);
    else
        (key->dtype == CA_F16 ? fold_f16 : fold_bf16)(k, head_size, least, most);
}

int ca_update_block_bounds(uintptr_t objects, const ca_array *given, int64_t block_size, ca_fault *fault) {
    ca_array a[CA_BOUNDS_ARRAYS];
    ca_fit fit = ca_fit_anything(CA_PACKED);
    if (ca_check_arguments(&ca_bounds_table, &fit, objects, given, a, fault))
        return fault->status;
    const int64_t num_tokens = fit.sizes[CA_T], heads = fit.sizes[CA_NUM_KV_HEADS];
    int64_t few[CA_FEW_INDICES];
    int64_t *slots = ca_take_slots(&a[CA_BOUNDS_SLOT_MAPPING], fit.sizes[CA_NUM_BLOCKS] * block_size, few, fault);
    if (!slots)
        return fault->status;
    /* Blocks that start anew come first, wherever in the call their first token is. */
    for (int begun = 0; begun < 2; begun++)
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t h = 0; slots[t] >= 0 && h < heads; h++)
                if (begun || slots[t] % block_size == 0)
                    fold(a, t, h, slots[t] / block_size, begun);
    ca_give_back(slots, few);
    return CA_OK;
}

/* Copies the lengths and the blocks that they ask for to memory of the call, checks the copies, and makes a[] refer to
 * them. Returns the memory, or NULL where *fault says why not. */
static int32_t *take_scored(ca_array *a, int64_t block_size, ca_fault *fault) {
    ca_array *table = &a[CA_SCORES_BLOCK_TABLE], *starts = &a[CA_SCORES_QUERY_START_LOC],
             *lens = &a[CA_SCORES_SEQ_LENS];
    const int64_t num_reqs = table->shape[0], cols = table->shape[1];
    int32_t *memory = malloc(sizeof *memory * (size_t)(2 * num_reqs + 1 + num_reqs * cols));
    if (!memory) {
        ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
        return NULL;
    }
    int32_t *to_starts = memory, *to_lens = to_starts + num_reqs + 1, *blocks = to_lens + num_reqs;
    memcpy(to_starts, (const void *)starts->address, (size_t)(num_reqs + 1) * sizeof *memory);
    memcpy(to_lens, (const void *)lens->address, (size_t)num_reqs * sizeof *memory);
    int bad = ca_check_lengths(num_reqs, to_lens, to_starts, fault);
    if (!bad && to_starts[num_reqs] != a[CA_SCORES_QUERY].shape[0])
        bad = ca_fail(fault, CA_OTHER_TOKENS, -1, -1, a[CA_SCORES_QUERY].shape[0], to_starts[num_reqs]);
    for (int64_t r = 0; r < num_reqs && !bad; r++) {
        const int64_t needed = ca_div_up(to_lens[r], block_size);
        bad = ca_take_blocks((const int32_t *)table->address + r * table->strides[0], r, 0, needed, cols,
                             a[CA_SCORES_BLOCK_MIN].shape[0], blocks + r * cols, fault);
    }
    starts->address = (uintptr_t)to_starts;
    lens->address = (uintptr_t)to_lens;
    table->address = (uintptr_t)blocks;
    table->strides[0] = cols;
    if (!bad)
        return memory;
    free(memory);
    return NULL;
}

/* A Zen 4 core takes 20 multiplications and additions a nanosecond. */
static double nanoseconds(const ca_array *a) {
    const ca_array *query = &a[CA_SCORES_QUERY], *scores = &a[CA_SCORES_SCORES];
    return (double)query->shape[0] * query->shape[1] * query->shape[2] * scores->shape[2] * 2 / 20;
}

typedef struct scoring {
    const ca_array *arrays;
    const ca_kernel *kernel;
    int64_t block_size, heads, items, floats; /* floats: scratch of a thread */
    float *scratch;
    atomic_llong next_item; /* one head of one request */
} scoring;

static void score_items(void *work, int thread, int team) {
    scoring *s = work;
    (void)team;
    for (int64_t i; (i = atomic_fetch_add(&s->next_item, 1)) < s->items;)
        s->kernel->score_blocks(s->arrays, s->block_size, i / s->heads, i % s->heads, s->scratch + thread * s->floats);
}

static int run_scoring(ca_array *a, const ca_fit *fit, int64_t block_size, ca_fault *fault) {
    const int64_t heads = a[CA_SCORES_SCORES].shape[1];
    scoring s = {.arrays = a,
                 .kernel = ca_isa_get(fit->isa)->kernels[fit->dtype],
                 .block_size = block_size,
                 .heads = heads,
                 .items = fit->sizes[CA_NUM_REQS] * heads,
                 .floats = ca_round_up(2 * CA_SCORED_ROWS * fit->sizes[CA_HEAD_SIZE], CA_LANES)};
    const int64_t threads = ca_min64(ca_get_num_threads(), ca_threads_for(nanoseconds(a)));
    const int team = ca_team((int)ca_min64(threads, s.items));
    s.scratch = ca_aligned_alloc(ca_max64(1, team) * s.floats * (int64_t)sizeof *s.scratch);
    if (!s.scratch)
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    if (!ca_check_stack(team, fault))
        ca_run_team(team, score_items, &s);
    ca_aligned_free(s.scratch);
    return fault->status;
}

int ca_score_blocks(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                    int by_query_head, int64_t block_size, ca_fault *fault) {
    ca_array a[CA_SCORES_ARRAYS];
    ca_fit fit = ca_fit_anything(kv_cache_layout);
    fit.meaning = meaning;
    fit.select_by_query_head = by_query_head;
    if (ca_check_arguments(&ca_scores_table, &fit, objects, given, a, fault) || ca_find_meaning(&fit, fault))
        return fault->status;
    const int64_t heads = fit.sizes[CA_NUM_HEADS], kv_heads = fit.sizes[CA_NUM_KV_HEADS];
    if (heads % kv_heads)
        return ca_fail(fault, CA_UNEQUAL_GROUPS, -1, -1, kv_heads, heads);
    int32_t *memory = take_scored(a, block_size, fault);
    if (memory)
        run_scoring(a, &fit, block_size, fault);
    free(memory);
    return fault->status;
}
