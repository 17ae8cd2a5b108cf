/* SPDX-License-Identifier: Apache-2.0
 * Queries and keys rotated on their way: queries to where the caller wants them, keys into the cache. A run of keys is
 * rotated into a stage, whose rows the cache write takes for the caller's (native/cache.c): layouts and quantised
 * caches are its affair alone. */
#include "kernel/kernel.h"
#include <stdlib.h>

/* cos, then sin, of token t as float32. */
static const float *cos_sin_of(const ca_rotary *r, int64_t t, float *wide) {
    const char *row = ca_row_of(r->cos_sin, r->positions[t], 0);
    if (r->cos_sin->dtype == CA_F32)
        return (const float *)row;
    r->kernel->widen_row(row, r->rot_dim, 1.0f, wide);
    return wide;
}

/* What a thread works in: a head, a row of cos_sin_cache, 16 tokens of all kv heads. */
typedef struct room {
    float *head, *cos_sin;
    char *stage;
} room;

static int64_t divide(const ca_rotary *r, uintptr_t base, room *out) {
    int64_t head = ca_round_up(r->head_size * 4, 64), cos_sin = ca_round_up(r->rot_dim * 4, 64);
    int64_t stage = r->num_kv_heads * CA_LANES * r->head_size * r->key->itemsize;
    *out = (room){(float *)base, (float *)(base + (uintptr_t)head), (char *)(base + (uintptr_t)(head + cos_sin))};
    return head + cos_sin + ca_round_up(stage, 64);
}

static room room_of(const ca_rotary *r, int thread) {
    room found;
    divide(r, (uintptr_t)(r->memory + thread * r->thread_bytes), &found);
    return found;
}

/* A weight as float32: itself, or widened to `wide`. */
static const float *widened(const ca_rotary *r, const ca_array *weight, float *wide) {
    if (!weight->itemsize || weight->dtype == CA_F32)
        return (const float *)weight->address;
    r->kernel->widen_row((const void *)weight->address, r->head_size, 1.0f, wide);
    return wide;
}

int ca_rotary_begin(ca_rotary *r, int team) {
    room unused;
    int64_t weight = ca_round_up(r->head_size * 4, 64);
    r->thread_bytes = divide(r, 0, &unused);
    r->memory = aligned_alloc(64, (size_t)(team * r->thread_bytes + 2 * weight));
    if (!r->memory)
        return CA_NO_MEMORY;
    char *weights = r->memory + team * r->thread_bytes;
    r->q_weight = widened(r, r->weights, (float *)weights);
    r->k_weight = widened(r, r->weights + 1, (float *)(weights + weight));
    return CA_OK;
}

void ca_rotary_end(ca_rotary *r) { free(r->memory); }

void ca_rotate_queries(const ca_rotary *r, int thread, int team) {
    room at = room_of(r, thread);
    int64_t end = r->num_tokens * (thread + 1) / team;
    for (int64_t t = r->num_tokens * thread / team; t < end; t++) {
        const float *cos_sin = cos_sin_of(r, t, at.cos_sin);
        for (int h = 0; h < r->num_heads; h++)
            r->kernel->rotate(r, r->q_weight, cos_sin, ca_row_of(r->query, t, h), at.head,
                              ca_row_of(r->query_out, t, h));
    }
}

ca_array ca_rotate_keys(const ca_rotary *r, int thread, int head0, int head1, int64_t t, int n) {
    room at = room_of(r, thread);
    ca_array staged = *r->key;
    staged.address = (uintptr_t)at.stage;
    staged.strides[0] = r->head_size;
    staged.strides[1] = CA_LANES * r->head_size;
    for (int i = 0; i < n; i++) {
        const float *cos_sin = cos_sin_of(r, t + i, at.cos_sin);
        for (int h = head0; h < head1; h++)
            r->kernel->rotate(r, r->k_weight, cos_sin, ca_row_of(r->key, t + i, h), at.head, ca_row_of(&staged, i, h));
    }
    return staged;
}
