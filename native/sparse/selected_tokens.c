/* SPDX-License-Identifier: Apache-2.0
 * This file attends the keys that a query token selects. It copies a segment of them into one block, as they lie in the
 * cache, where the engine meets them as it meets any request: one of a single query token that sees all of its keys.
 * What goes by a key's position is done here: keys that a mask hides are not copied, and ALiBi becomes a bias. */
#include "selected_tokens.h"
#include "kernel/kernel.h"
#include "plan/keys.h"

/* A thread works in these. */
typedef struct copy_work {
    int32_t *key;   /* [CA_SELECTED_KEYS] */
    float *bias;    /* [group_size][CA_SELECTED_KEYS] */
    char *block[2]; /* of K, of V: CA_SELECTED_KEYS tokens */
    void *scratch;  /* the engine's */
} copy_work;

static int64_t block_bytes(const ca_side *s) {
    return s->plain ? CA_SELECTED_KEYS * s->row_bytes : ca_scales_at(s, CA_SELECTED_KEYS, CA_SELECTED_KEYS / CA_LANES);
}

static int64_t carve(copy_work *w, uintptr_t base, const ca_plan *p) {
    int64_t at = 0;
    CA_CARVE(w->key, CA_SELECTED_KEYS * sizeof *w->key)
    CA_CARVE(w->bias, p->group_size * CA_SELECTED_KEYS * (int64_t)sizeof *w->bias)
    CA_CARVE(w->block[K], block_bytes(&p->sides[K]))
    CA_CARVE(w->block[V], block_bytes(&p->sides[V]))
    CA_CARVE(w->scratch, 0)
    return at;
}

/* Makes the plan that a segment has for the engine: one request of one query token and so many keys of one kv head. Of
 * the step's plan it has what is written here, which are sizes, dtypes and the kernel, and none of the masks. `step`
 * holds its lengths. */
static ca_plan segment_plan(const ca_plan *p, int64_t keys, int32_t step[4]) {
    const ca_shape *s = &p->shape;
    step[0] = 0;
    step[1] = 1;
    step[2] = (int32_t)keys;
    step[3] = 0;
    return (ca_plan){.shape = {.num_reqs = 1,
                               .num_heads = (int32_t)p->group_size,
                               .num_kv_heads = 1,
                               .head_size = s->head_size,
                               .head_size_v = s->head_size_v,
                               .dtype = s->dtype,
                               .k_dtype = s->k_dtype,
                               .v_dtype = s->v_dtype,
                               .isa = s->isa,
                               .window_left = -1,
                               .window_right = -1,
                               .kv_cache_layout = ca_is_plain(p) ? CA_HND : CA_PACKED,
                               .hadamard = s->hadamard},
                     .engine = p->engine,
                     .kernel = p->kernel,
                     .sides = {p->sides[K], p->sides[V]},
                     .num_tokens = 1,
                     .group_size = p->group_size,
                     .readers = 1,
                     .query_start_loc = step,
                     .seq_lens = step + 2,
                     .all_lens = step + 2,
                     .causal = step + 3,
                     .rows = p->rows,
                     .few_rows = p->few_rows,
                     .heads_together = 1};
}

int64_t ca_selected_bytes(const ca_plan *p) {
    int32_t step[4];
    copy_work unused;
    const ca_plan alone = segment_plan(p, CA_SELECTED_KEYS, step);
    return carve(&unused, 0, p) + p->engine->scratch_bytes(&alone);
}

/* Lists the keys of a segment, and returns how many there are. */
static int64_t list_keys(const ca_plan *p, const ca_call *c, const ca_task *task, const ca_query_row *row,
                         int64_t segment, int32_t *key) {
    const int64_t columns = c->num_selected_tokens;
    const ca_blocks list = {c->selected_tokens + row->token * columns, columns}; /* of one key each */
    const int64_t first = ca_find_block(list, row->lo) + segment * CA_SELECTED_KEYS;
    const int64_t end = ca_min64(ca_find_block(list, row->hi), first + CA_SELECTED_KEYS);
    int64_t n = 0;
    for (int64_t i = first; i < end; i++)
        if (!row->tree || ca_sees(row->tree, ca_context_keys(p, task->request), list.selected[i]))
            key[n++] = list.selected[i];
    return n;
}

/* Finds the block of the cache that holds a key, and which of the block's tokens the key is. */
static const char *find_key(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int kv, int32_t key,
                            int64_t *token) {
    const uint32_t size = (uint32_t)c->block_size, block = (uint32_t)key / size;
    *token = (uint32_t)key % size;
    return ca_kv_block(p, c, kv, ca_block_of(c, task->request, block), kv_head);
}

#define COPIED_AHEAD 16 /* keys whose rows are fetched while one's is copied */

static void copy_rows(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int kv, const int32_t *key,
                      int64_t n, char *to) {
    const int64_t bytes = p->sides[kv].row_bytes, ld = c->kv[kv].ld * p->sides[kv].size;
    int64_t token;
    for (int64_t i = 0; i < n + COPIED_AHEAD; i++) {
        if (i < n) {
            const char *ahead = find_key(p, c, task, kv_head, kv, key[i], &token) + token * ld;
            for (int64_t at = 0; at < bytes; at += 64)
                __builtin_prefetch(ahead + at);
        }
        if (i >= COPIED_AHEAD) {
            const char *row = find_key(p, c, task, kv_head, kv, key[i - COPIED_AHEAD], &token) + token * ld;
            memcpy(to + (i - COPIED_AHEAD) * bytes, row, (size_t)bytes);
        }
    }
    memset(to + n * bytes, 0, (size_t)((ca_round_up(n, CA_LANES) - n) * bytes));
}

/* Copies count units that lie `stride` bytes apart here and there. */
static void copy_units(const char *from, char *to, int64_t count, int64_t unit, int64_t stride) {
#define UNITS(size)                                                                                                    \
    case size:                                                                                                         \
        for (int64_t i = 0; i < count; i++)                                                                            \
            memcpy(to + i * stride, from + i * stride, size);                                                          \
        break;
    switch (unit) {
        UNITS(1)
        UNITS(2)
        UNITS(4)
    default: /* a row */
        memcpy(to, from, (size_t)unit);
    }
#undef UNITS
}

/* Copies one token of a group to another group. */
static void copy_elements(const ca_side *s, const char *from, int64_t token, char *to, int64_t as) {
    const int64_t n = s->head_size, size = s->size, pair = 1 + (s->layout == CA_LAYOUT_PAIRS);
    if (s->packed) {
        for (int64_t d = 0; d < n; d++)
            ca_put_element(s->dtype, (uint8_t *)to, ca_offset(s, as, d, n),
                           ca_element(s->dtype, (const uint8_t *)from, ca_offset(s, token, d, n)));
        return;
    }
    from += ca_offset(s, token, 0, n) * size;
    to += ca_offset(s, as, 0, n) * size;
    if (s->kv == K)
        copy_units(from, to, ca_div_up(n, pair), pair * size, CA_LANES * pair * size);
    else if (pair == 2)
        copy_units(from, to, n, size, 2 * size);
    else
        memcpy(to, from, (size_t)(n * size));
}

static void copy_packed(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int kv,
                        const int32_t *key, int64_t n, char *to) {
    const ca_side *s = &p->sides[kv];
    for (int64_t i = 0; i < n; i++) {
        int64_t token, as = i % CA_LANES;
        const char *block = find_key(p, c, task, kv_head, kv, key[i], &token);
        const char *scales = block + ca_scales_at(s, c->block_size, token / CA_LANES) + token % CA_LANES * 2;
        char *group = to + i / CA_LANES * s->group_bytes;
        char *to_scales = to + ca_scales_at(s, CA_SELECTED_KEYS, i / CA_LANES);
        if (as == 0 && n - i < CA_LANES) { /* what no key fills is 0 */
            memset(group, 0, (size_t)s->group_bytes);
            memset(to_scales, 0, (size_t)(s->scales * CA_LANES * 2));
        }
        copy_elements(s, block + token / CA_LANES * s->group_bytes, token % CA_LANES, group, as);
        for (int64_t j = 0; j < s->scales; j++)
            memcpy(to_scales + (j * CA_LANES + as) * 2, scales + j * CA_LANES * 2, 2);
    }
}

static void copy_keys(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int64_t n,
                      const copy_work *w, ca_kv kv[2]) {
    const int latent = ca_v_is_in_k(p, c); /* one copy is both */
    for (int i = K; i <= (latent ? K : V); i++) {
        (ca_is_plain(p) ? copy_rows : copy_packed)(p, c, task, kv_head, i, w->key, n, w->block[i]);
        kv[i] = (ca_kv){.cache = w->block[i], .ld = p->sides[i].head_size};
    }
    if (latent)
        kv[V] = (ca_kv){.cache = w->block[K] + ((const char *)c->kv[V].cache - (const char *)c->kv[K].cache),
                        .ld = kv[K].ld};
}

/* Adds up, for each query head and key, what depends on the key's position. */
static void fill_bias(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, ca_query_row row, int64_t n,
                      const copy_work *w) {
    for (int64_t g = 0; g < p->group_size; g++) {
        float *bias = w->bias + g * CA_SELECTED_KEYS;
        ca_query_row_move(p, c, (ca_token){task->request, task->token}, kv_head * p->group_size + g, &row);
        for (int64_t i = 0; i < n; i++) {
            const float distance = (float)(ca_key_position(&p->shape, w->key[i]) - row.pos);
            bias[i] = (row.slope != 0 ? row.slope * distance : 0) + (row.bias ? row.bias[w->key[i]] : 0);
        }
    }
}

int ca_attend_selected(const ca_plan *p, const ca_call *c, const ca_task *task, int kv_head, int64_t segment,
                       const ca_state *state, void *memory) {
    const ca_query_row row =
        ca_query_row_of(p, c, (ca_token){task->request, task->token}, (int64_t)kv_head * p->group_size);
    const int64_t table_at = 0;
    const int32_t table = 0;
    const ca_task whole = {.num_tokens = 1, .num_segments = 1, .partial = -1};
    int32_t step[4];
    copy_work w;
    carve(&w, (uintptr_t)memory, p);
    const int64_t n = list_keys(p, c, task, &row, segment, w.key);
    if (!n)
        return 0;
    const ca_plan alone = segment_plan(p, n, step);
    ca_call call = {.query = row.query,
                    .q_stride_t = c->q_stride_t,
                    .q_stride_h = c->q_stride_h,
                    .block_size = CA_SELECTED_KEYS,
                    .block_table = &table,
                    .table_at = &table_at,
                    .scale = c->scale,
                    .softcap = c->softcap,
                    .k_scale = c->k_scale,
                    .v_scale = c->v_scale,
                    .num_selected = -1};
    copy_keys(p, c, task, kv_head, n, &w, call.kv);
    if (c->alibi_slopes || c->attn_bias) {
        fill_bias(p, c, task, kv_head, row, n, &w);
        call.attn_bias = w.bias;
        call.bias_stride_h = CA_SELECTED_KEYS;
    }
    ca_clear(state, p->group_size, p->shape.head_size_v);
    const int status = p->engine->segment(&alone, &call, &whole, 0, 1, 0, n, state, w.scratch);
    return status ? -status : 1;
}
