/* SPDX-License-Identifier: Apache-2.0
 * This file transforms rows (norm, rotary embedding, Hadamard transform) on their way: queries to where the caller
 * wants them, keys and values into the cache. A run of keys or values is transformed into a stage, whose rows the cache
 * write then takes in place of the caller's (native/cache/cache.c), so that it alone knows layouts and quantised
 * caches. */
#include "cpu/system.h"
#include "kernel/kernel.h"

/* A thread works in these: a head, the rows of cos_sin_cache for 16 tokens, and 16 tokens of a kv head, with the most
 * scales that these may have where errors are fed back. */
typedef struct room {
    float *head, *cos_sin;
    char *stage;
    uint16_t *scales;
} room;

static int64_t divide(const ca_transforms *t, uintptr_t base, room *out) {
    const int64_t most = ca_max64(t->rows[K]->shape[2], t->rows[V]->shape[2]);
    const int64_t head = ca_round_up(most * (int64_t)sizeof(float), 64);
    const int64_t cos_sin = t->cos_sin ? ca_round_up(CA_LANES * t->cos_sin->shape[1] * (int64_t)sizeof(float), 64) : 0;
    const int64_t scales = t->feedback ? ca_round_up(CA_LANES * ca_div_up(most, CA_SHARED) * 2, 64) : 0;
    const uintptr_t stage = base + (uintptr_t)(head + cos_sin), behind = stage + (uintptr_t)(CA_LANES * head);
    *out = (room){(float *)base, (float *)(base + (uintptr_t)head), (char *)stage, (uint16_t *)behind};
    return head + cos_sin + CA_LANES * head + scales;
}

static room room_of(const ca_transforms *t, int thread) {
    room found;
    divide(t, (uintptr_t)(t->memory + thread * t->thread_bytes), &found);
    return found;
}

int ca_transforms_begin(ca_transforms *t, int team) {
    const int64_t head_size = t->rows[K]->shape[2], weight = ca_round_up(head_size * 4, 64);
    room unused;
    t->thread_bytes = divide(t, 0, &unused);
    t->memory = ca_aligned_alloc(team * t->thread_bytes + 2 * weight);
    if (!t->memory)
        return CA_NO_MEMORY;
    for (int i = 0; i < 2 && t->cos_sin; i++) {
        const ca_array *given = &t->weights[i];
        float *wide = (float *)(t->memory + team * t->thread_bytes + i * weight);
        t->weight[i] = (const float *)given->address;
        if (given->itemsize && given->dtype != CA_F32) {
            t->kernel->widen_row((const void *)given->address, head_size, 1.0f, wide);
            t->weight[i] = wide;
        }
    }
    return CA_OK;
}

void ca_transforms_end(ca_transforms *t) { ca_aligned_free(t->memory); }

/* Returns how the queries (which 0) or the keys (which 1) of a token are rotated and normed. `wide` has room for the
 * token's row of cos_sin_cache where that is not float32; `new` says that the row does not lie there yet. */
static ca_transform rotary(const ca_transforms *t, int which, int64_t token, float *wide, int new) {
    const ca_array *table = t->cos_sin;
    const char *row = ca_row_of(table, t->positions[token], 0);
    const int64_t rot_dim = table->shape[1];
    if (table->dtype != CA_F32 && new)
        t->kernel->widen_row(row, rot_dim, 1.0f, wide);
    return (ca_transform){
        .head_size = t->rows[K]->shape[2],
        .weight = t->weight[which],
        .eps = t->eps,
        .cos_sin = table->dtype == CA_F32 ? (const float *)row : wide,
        .rot_dim = rot_dim,
        .is_neox = t->is_neox,
    };
}

void ca_transform_queries(const ca_transforms *t, int thread, int team) {
    const room at = room_of(t, thread);
    const int64_t num_tokens = t->cos_sin ? t->query->shape[0] : 0, end = num_tokens * (thread + 1) / team;
    for (int64_t i = num_tokens * thread / team; i < end; i++) {
        const ca_transform how = rotary(t, 0, i, at.cos_sin, 1);
        for (int h = 0; h < t->num_heads; h++)
            t->kernel->transform(&how, ca_row_of(t->query, i, h), at.head, ca_row_of(t->query_out, i, h));
    }
}

ca_array ca_transform_rows(const ca_transforms *t, int kv, int thread, int head, int first, int64_t token, int n) {
    const room at = room_of(t, thread);
    const int wide = t->wide >> kv & 1;
    ca_array staged = *t->rows[kv];
    if (wide) {
        staged.dtype = CA_F32;
        staged.itemsize = sizeof(float);
    }
    staged.address = (uintptr_t)at.stage;
    staged.strides[0] = staged.shape[2];
    staged.strides[1] = 0; /* one head */
    for (int i = 0; i < n; i++) {
        char *to = ca_row_of(&staged, i, 0);
        ca_transform how = {.head_size = staged.shape[2]};
        if (kv == K && t->cos_sin)
            how = rotary(t, 1, token + i, at.cos_sin + i * t->cos_sin->shape[1], first);
        how.hadamard = t->hadamard >> kv & 1;
        t->kernel->transform(&how, ca_row_of(t->rows[kv], token + i, head), wide ? (float *)to : at.head,
                             wide ? NULL : to);
    }
    return staged;
}

const uint16_t *ca_feed_back(const ca_transforms *t, int thread, int head, int n, const ca_array *rows, int isa,
                             const ca_side *side) {
    const ca_array *f = t->feedback;
    uint16_t *scales = room_of(t, thread).scales;
    ca_kernel_for(isa, CA_F32)
        ->feed_back(side, (float *)rows->address, n, (const float *)ca_row_of(f, head, 0), f->strides[1], scales);
    return scales;
}
