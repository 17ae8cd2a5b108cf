/* SPDX-License-Identifier: Apache-2.0 */
#include "gather.h"
#include "cache/half.h"
#include <string.h>

#define PANEL 64 /* both packed forms have panels of so many columns */

/* Returns where element (row, col) of a [rows, cols] matrix lies in dnnl_BA16a64b2a, which pads rows to a multiple of
 * 32. */
static int64_t packed_at(int64_t row, int64_t col, int64_t rows) {
    int64_t tile = col / PANEL * ca_div_up(rows, 32) + row / 32;
    return (tile * 16 + row % 32 / 2) * 2 * PANEL + col % PANEL * 2 + row % 2;
}

/* The BF16 form copies whole rows of pairs, since PAIRS lie in the cache as BA16a64b2a wants them. */
int ca_form_fits(ca_form form, const ca_pages *g) {
    if (form != CA_FORM_BF16)
        return 1;
    return g->plan->sides[K].dtype == CA_BF16 && g->plan->sides[V].dtype == CA_BF16 &&
           g->plan->kernel->info.layout == CA_LAYOUT_PAIRS && g->plan->shape.head_size % 2 == 0 &&
           g->plan->shape.head_size_v >= CA_FEW_COLUMNS && g->call->block_size % 2 == 0;
}

/* On AMX, oneDNN 3.7 to at least 3.13.1 leaks NaN across rows where K % 32 != 0. */
int64_t ca_form_head_size(ca_form form, int64_t head_size) {
    return form == CA_FORM_BF16 ? ca_round_up(head_size, 32) : head_size;
}

int64_t ca_form_k_bytes(int64_t head_size, int64_t keys) { return ca_round_up(head_size, 16) * keys * 4; }

int64_t ca_form_v_bytes(int64_t head_size_v, int64_t keys) {
    return ca_max64(head_size_v * 4, ca_round_up(head_size_v, PANEL) * 2) * keys;
}

static const char *block_of(const ca_pages *g, int kv, int64_t key) {
    const int64_t block = ca_block_of(g->call, g->request, key / g->call->block_size);
    return ca_kv_block(g->plan, g->call, kv, block, g->kv_head);
}

int64_t ca_wide_bytes(const ca_plan *plan) {
    int64_t most = 0;
    for (int kv = 0; kv < 2; kv++)
        if (!plan->sides[kv].ready)
            most = ca_max64(most, plan->sides[kv].elements * ca_dtype_size(plan->shape.dtype));
    return most + ca_rows_bytes(plan);
}

/* Returns the distance from a block to the group of a token, in bytes. */
static int64_t group_at(const ca_pages *g, int kv, int64_t token) {
    return token / CA_LANES * ca_kv_group_step(g->plan, g->call, kv);
}

/* Returns the group that is read AHEAD columns after this one, out of `end` columns of K and then as many of V. Its
 * lines are prefetched one by one meanwhile: pages lie anywhere, so that the hardware's prefetchers lose the trail at
 * each (kernel/MEASUREMENTS.md: oneDNN). */
#define AHEAD 32
static const char *coming(const ca_pages *g, int kv, int64_t column, int64_t end) {
    int64_t at = column + AHEAD;
    if (at >= end && !kv) {
        at -= end;
        kv = 1;
    }
    const int64_t key = g->key[ca_min64(at, end - 1)];
    return block_of(g, kv, key) + group_at(g, kv, key % g->call->block_size);
}

/* Returns the block of a column's key. Where that is not ready, it returns the key's group alone, unpacked, and *token
 * counts from there. */
static const void *packed_block(const ca_pages *g, int kv, int64_t column, int64_t end, int64_t *token) {
    const char *block = block_of(g, kv, g->key[column]);
    *token = g->key[column] % g->call->block_size;
    if (g->plan->sides[kv].ready)
        return block;
    const int64_t first = *token / CA_LANES * CA_LANES, n = ca_min64(CA_LANES, g->call->block_size - first);
    char *rows = (char *)g->wide + ca_wide_bytes(g->plan) - ca_rows_bytes(g->plan);
    g->plan->kernel->unpack(&g->plan->sides[kv], block + group_at(g, kv, *token), g->call->kv[kv].ld, (int)n, g->wide,
                            rows, coming(g, kv, column, end));
    *token -= first;
    return g->wide;
}

/* Multiplies n <= 16 keys from this one on by their scales. They are in one group and were gathered to dst, K as
 * [head_size][ld], V as [n][ld]. */
static void apply_scales(const ca_pages *g, int kv, int64_t key, int64_t n, float *dst, int64_t ld) {
    const ca_side *side = &g->plan->sides[kv];
    const int64_t token = key % g->call->block_size;
    for (int64_t s = 0; s < side->scales; s++) {
        const int64_t from = s * side->shared, to = ca_min64(side->head_size, from + side->shared);
        const char *at = block_of(g, kv, key) + ca_scales_at(side, g->call->block_size, token / CA_LANES);
        uint16_t bits[CA_LANES];
        float scales[CA_LANES];
        memcpy(bits, at + (s * CA_LANES + token % CA_LANES) * 2, (size_t)n * 2);
        for (int64_t i = 0; i < n; i++)
            scales[i] = ca_from_bf16(bits[i]);
        for (int64_t i = 0; kv && i < n; i++)
            for (int64_t d = from; d < to; d++)
                dst[i * ld + d] *= scales[i];
        for (int64_t d = from; !kv && d < to; d++)
            for (int64_t i = 0; i < n; i++)
                dst[d * ld + i] *= scales[i];
    }
}

/* Returns how many columns from this one on, up to end, lie in one block, one group of lanes and one panel. */
static int64_t piece(const ca_pages *g, int64_t column, int64_t end, int64_t lanes, int64_t panel) {
    int64_t token = g->key[column] % g->call->block_size;
    int64_t n = ca_min64(end - column, g->call->block_size - token);
    return ca_min64(n, ca_min64(lanes - token % lanes, panel - column % panel));
}

static int64_t lanes(const ca_pages *g, int kv) { return g->plan->sides[kv].ready ? g->call->block_size : CA_LANES; }

static void copy_k_pairs(const ca_pages *g, int64_t skip, int64_t end, uint16_t *dst) {
    int64_t head_size = g->plan->shape.head_size, n;
    for (int64_t column = skip; column < end; column += n) {
        int64_t token;
        const uint16_t *block = packed_block(g, 0, column, end, &token);
        const char *next = g->plan->sides[0].ready ? coming(g, 0, column, end) : NULL;
        n = piece(g, column, end, CA_LANES, PANEL);
        for (int64_t d = 0; d < head_size; d += 2) {
            uint16_t *to = dst + packed_at(d, column, head_size);
            const uint16_t *from = block + ca_k_offset(CA_LAYOUT_PAIRS, token, d, head_size);
            if (next)
                __builtin_prefetch(next + d * CA_LANES * 2, 0, 2);
            if (n == CA_LANES)
                memcpy(to, from, CA_LANES * 4); /* this memcpy is a move, the other one a call */
            else
                memcpy(to, from, (size_t)n * 4);
        }
    }
}

void ca_gather_k(ca_form form, const ca_pages *g, int64_t skip, int64_t n, int64_t keys, void *dst) {
    int64_t head_size = g->plan->shape.head_size, step;
    int64_t width = form == CA_FORM_PLAIN ? keys : PANEL;
    int64_t unit = form == CA_FORM_PLAIN ? 1 : form == CA_FORM_PANELS ? 16 : 32;
    if (n < keys || skip > 0 || head_size % unit != 0)
        memset(dst, 0, (size_t)ca_form_k_bytes(head_size, keys));
    if (form == CA_FORM_BF16) {
        copy_k_pairs(g, skip, n, dst);
        return;
    }
    int64_t panel = width * (form == CA_FORM_PLAIN ? head_size : ca_round_up(head_size, 16));
    for (int64_t column = skip; column < n; column += step) {
        int64_t token;
        const void *block = packed_block(g, 0, column, n, &token);
        float *to = (float *)dst + column / width * panel + column % width;
        step = piece(g, column, n, lanes(g, 0), width);
        g->plan->kernel->widen[K](block, head_size, token, token + step, to, width);
        apply_scales(g, 0, g->key[column], step, to, width);
    }
}

/* Copies a pair of keys, which has both rows of its line of dst; a half that does not count is set to 0 afterwards. */
static void copy_pair(const uint16_t *src, int64_t dv, int64_t row, int64_t keys, int even, int odd, uint16_t *dst) {
    for (int64_t d = 0; d < dv; d += PANEL) {
        uint16_t *line = dst + packed_at(row, d, keys);
        int64_t n = ca_min64(PANEL, dv - d);
        memcpy(line, src + 2 * d, (size_t)n * 4);
        for (int64_t i = 0; i < n && !(even && odd); i++)
            line[2 * i + even] = 0;
    }
}

static void copy_v_pairs(const ca_pages *g, int64_t skip, int64_t end, int64_t keys, uint16_t *dst) {
    int64_t dv = g->plan->shape.head_size_v, n;
    for (int64_t column = 0; column < end; column += n) {
        int64_t token;
        const uint16_t *block = packed_block(g, 1, column, end, &token);
        const char *next = g->plan->sides[1].ready ? coming(g, 1, column, end) : NULL;
        n = piece(g, column, end, CA_LANES, keys);
        for (int64_t i = 0; i < n; i += 2) {
            for (int64_t b = i * dv * 2; next && b < (i + 2) * dv * 2; b += 64)
                __builtin_prefetch(next + b, 0, 2);
            copy_pair(block + ca_v_offset(CA_LAYOUT_PAIRS, token + i, 0, dv), dv, column + i, keys, column + i >= skip,
                      column + i + 1 < end, dst);
        }
    }
}

void ca_gather_v(ca_form form, const ca_pages *g, int64_t skip, int64_t n, int64_t keys, void *dst) {
    int64_t dv = g->plan->shape.head_size_v, step;
    if (form == CA_FORM_BF16) {
        if (n < keys || dv % PANEL != 0)
            memset(dst, 0, (size_t)(ca_round_up(dv, PANEL) * keys * 2));
        copy_v_pairs(g, skip, n, keys, dst);
        return;
    }
    float *rows = dst;
    for (int64_t column = skip; column < n; column += step) {
        int64_t token;
        const void *block = packed_block(g, 1, column, n, &token);
        step = piece(g, column, n, lanes(g, 1), keys);
        g->plan->kernel->widen[V](block, dv, token, token + step, rows + column * dv, dv);
        apply_scales(g, 1, g->key[column], step, rows + column * dv, dv);
    }
    memset(rows, 0, (size_t)(skip * dv) * sizeof(float));
    memset(rows + n * dv, 0, (size_t)((keys - n) * dv) * sizeof(float));
}

float ca_form_v(ca_form form, const void *v, int64_t keys, int64_t dv, int64_t key, int64_t d) {
    if (form != CA_FORM_BF16)
        return ((const float *)v)[key * dv + d];
    uint32_t bits = (uint32_t)((const uint16_t *)v)[packed_at(key, d, keys)] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
