/* SPDX-License-Identifier: Apache-2.0
 * This file writes tokens into the slots of a cache and gathers them back. */
#include "cache.h"
#include "kernel/kernel.h"
#include "run/threads.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct cache {
    ca_side side;
    ca_kv at;
    int32_t dtype; /* that of new tokens and of queries */
    int32_t isa;
    const ca_kernel *kernel; /* the isa's kernel for dtype */
    float scale;             /* an fp8 cache holds x / scale */
} cache;

typedef struct write_call {
    const cache *caches;             /* [2] */
    const ca_transforms *transforms; /* rows [T, Hkv, D] of K and of V, and what is done to them first */
    const int64_t *slots;
    int64_t num_tokens;
    int stream;
    int last; /* V, or K where there are no values */
} write_call;

static int64_t offset_of(const cache *c, int64_t token, int64_t d) { return ca_offset(&c->side, token, d, c->at.ld); }

/* Writes the scales of n tokens of one group. */
static void put_scales(const cache *c, char *block, int64_t token, int n, const uint16_t *scales, int64_t ld) {
    char *to = block + ca_scales_at(&c->side, c->at.block_size, token / CA_LANES) + token % CA_LANES * 2;
    for (int64_t s = 0; s < c->side.scales; s++)
        for (int t = 0; t < n; t++)
            memcpy(to + (s * CA_LANES + t) * 2, &scales[t * ld + s], 2);
}

/* These make the scales of tokens that lie ld bytes apart, and a token's elements, a byte each. */
static void scale_rows(const cache *c, const char *rows, int64_t ld, int n, uint16_t *scales, int64_t scales_ld) {
    if (c->side.scaled)
        c->kernel->scale(&c->side, rows, ld / ca_dtype_size(c->dtype), n, scales, scales_ld);
}
static void quantise_row(const cache *c, const char *row, const uint16_t *scales, uint8_t *bytes) {
    if (c->side.scaled)
        c->kernel->quantise(&c->side, row, scales, bytes);
    else
        c->kernel->pack(&c->side, row, c->scale, bytes);
}

/* Writes one token of a plain cache. */
static void write_plain(const cache *c, char *block, int64_t token, const char *row) {
    char *to = block + offset_of(c, token, 0) * c->side.size;
    if (c->side.quantised)
        quantise_row(c, row, NULL, (uint8_t *)to);
    else
        memcpy(to, row, (size_t)c->side.row_bytes);
}

/* Writes one token of a packed cache of fp8 or integers. scales: the row's, or NULL, which is to find them. In K of an
 * odd head size the element beside the last one is set to zero where it could be NaN. */
static void write_quantised(const cache *c, char *block, int64_t token, const char *row, const uint16_t *scales) {
    const ca_side *s = &c->side;
    uint8_t bytes[s->head_size]; /* at most _check.MAX_SIZE */
    uint16_t found[ca_div_up(s->head_size, CA_SHARED)];
    uint8_t *group = (uint8_t *)block + token / CA_LANES * s->group_bytes;
    if (!scales) {
        scale_rows(c, row, 0, 1, found, 0);
        scales = found;
    }
    quantise_row(c, row, scales, bytes);
    for (int64_t d = 0; d < s->head_size; d++)
        ca_put_element(s->dtype, group, offset_of(c, token % CA_LANES, d), bytes[d]);
    put_scales(c, block, token, 1, scales, 0);
    if (s->kv == K && s->head_size % 2 && !s->scaled)
        group[ca_k_offset(CA_LAYOUT_PAIRS, token % CA_LANES, s->head_size, s->head_size + 1)] = 0;
}

#define WIDE 512 /* elements of a token that are written 16 tokens at a time */

/* Puts the bytes of 16 tokens in the order of their group. K in pairs of bytes lies as K of half as many 16-bit
 * elements does in lanes, so that the kernel of float16 moves it. */
static void arrange(const cache *c, uint8_t bytes[CA_LANES][WIDE], uint8_t *to, int stream) {
    const int64_t n = c->side.head_size;
    if (c->side.kv == K) {
        ca_kernel_for(c->isa, CA_F16)->write[K](to, n / 2, 0, CA_LANES, bytes, WIDE / 2, bytes, stream);
        return;
    }
    for (int t = 0; t < CA_LANES; t += 2)
        for (int64_t d = 0; d < n; d++) {
            to[t * n + 2 * d] = bytes[t][d];
            to[t * n + 2 * d + 1] = bytes[t + 1][d];
        }
}

/* Packs 128 elements, a byte each, as layout.h says. A bit goes to its place by one shift of 16-bit words; what comes
 * from the other byte is masked off. */
static void pack_elements(int dtype, const uint8_t *from, uint8_t *to) {
    typedef uint16_t words __attribute__((vector_size(16)));
    for (int b = 0; b < 64; b++)
        to[b] = (uint8_t)((from[b] & 15) | from[64 + b] << 4);
    for (int bit = 4; bit < ca_formats[dtype].bits; bit++) {
        const int at = ca_plane_bit(ca_formats[dtype].bits, bit);
        words x, plane = {0};
        for (int i = 0; i < 8; i++) {
            memcpy(&x, from + 16 * i, sizeof x);
            plane |= (i < at ? x >> (at - i) : x << (i - at)) & (uint16_t)(0x0101 << i);
        }
        memcpy(to + bit * 16, &plane, sizeof plane);
    }
}

/* Writes a whole group; scales as above. Returns 0 where that has to be written token by token. */
static int write_quantised_group(const cache *c, char *block, int64_t token, const char *rows, int64_t ld,
                                 const uint16_t *scales, int stream) {
    const ca_side *s = &c->side;
    uint8_t bytes[CA_LANES][WIDE], stage[CA_LANES * WIDE + CA_NIBBLES];
    uint16_t found[CA_LANES * WIDE / CA_SHARED];
    uint8_t *group = (uint8_t *)block + token / CA_LANES * s->group_bytes;
    if (s->head_size > WIDE || s->head_size % 2)
        return 0;
    for (int t = 0; t < CA_LANES; t++) /* The next group's rows are prefetched, as in write.inc. */
        for (int64_t i = 0; i < s->head_size * ca_dtype_size(c->dtype); i += 64)
            __builtin_prefetch(rows + (t + CA_LANES) * ld + i, 0, 2);
    if (!scales) {
        scale_rows(c, rows, ld, CA_LANES, found, s->scales);
        scales = found;
    }
    for (int t = 0; t < CA_LANES; t++)
        quantise_row(c, rows + t * ld, scales + t * s->scales, bytes[t]);
    if (s->packed) {
        memset(stage + ca_max64(0, s->elements - CA_NIBBLES), 0, CA_NIBBLES);
        arrange(c, bytes, stage, 0);
        for (int64_t i = 0; i < s->elements; i += CA_NIBBLES)
            pack_elements(s->dtype, stage + i, group + ca_bytes_of(s->dtype, i));
    } else {
        arrange(c, bytes, group, stream);
    }
    put_scales(c, block, token, CA_LANES, scales, s->scales);
    return 1;
}

static void write_run(const cache *c, const ca_array *rows, int head, int64_t slot, int64_t t, int n,
                      const uint16_t *scales, int stream) {
    const ca_side *s = &c->side;
    char *block = ca_block_at(s, &c->at, slot / c->at.block_size, head);
    const char *row = ca_row_of(rows, t, head);
    const int64_t token = slot % c->at.block_size, ld = rows->strides[0] * rows->itemsize;
    if (s->plain)
        for (int i = 0; i < n; i++)
            write_plain(c, block, token + i, row + i * ld);
    else if (!s->quantised)
        c->kernel->write[s->kv](block, s->head_size, token, n, row, rows->strides[0], row + CA_LANES * ld, stream);
    else if (n < CA_LANES || !write_quantised_group(c, block, token, row, ld, scales, stream))
        for (int i = 0; i < n; i++)
            write_quantised(c, block, token + i, row + i * ld, scales ? scales + i * s->scales : NULL);
}

/* Returns how many tokens from t on, at most one K group of them, lie one after another in one block. */
static int run_length(const write_call *w, int64_t t, int64_t block_size) {
    int64_t token = w->slots[t] % block_size;
    int64_t most = ca_min64(w->num_tokens - t, ca_min64(block_size - token, CA_LANES - token % CA_LANES));
    int n = 1;
    while (n < most && w->slots[t + n] == w->slots[t] + n)
        n++;
    return n;
}

/* Writes the share of one thread: some heads, and every parts-th K group. All heads of a run come before the next run,
 * so that the source is read in the order of memory. Each slot of a head belongs to one thread, which goes in order of
 * tokens, so that the last token of those that share a slot stays, whole. */
static void write_part(const write_call *w, int thread, int head0, int head1, int64_t part, int64_t parts) {
    int64_t block_size = w->caches[K].at.block_size;
    for (int64_t t = 0, n; t < w->num_tokens; t += n) {
        int64_t slot = w->slots[t];
        n = 1;
        if (slot < 0)
            continue;
        n = run_length(w, t, block_size);
        if (parts > 1 && (slot / block_size + slot % block_size / CA_LANES) % parts != part)
            continue;
        for (int kv = K; kv <= w->last; kv++) {
            const int transformed = ca_transforms_rows(w->transforms, kv);
            for (int h = head0; h < head1; h++) {
                const cache *c = &w->caches[kv];
                const uint16_t *scales = NULL;
                ca_array staged;
                if (transformed)
                    staged = ca_transform_rows(w->transforms, kv, thread, h, h == head0, t, (int)n);
                if (kv == K && w->transforms->feedback)
                    scales = ca_feed_back(w->transforms, thread, h, (int)n, &staged, c->isa, &c->side);
                write_run(c, transformed ? &staged : w->transforms->rows[kv], h, slot, transformed ? 0 : t, (int)n,
                          scales, w->stream);
            }
        }
    }
    /* Streamed lines become visible to other threads in no order until a locked instruction (Intel SDM 3, 12.3.1). */
    if (w->stream)
        atomic_thread_fence(memory_order_seq_cst);
}

static int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

/* Does one thread's share of the queries of rotary_reshape_and_cache, then of the cache. */
static void write_share(void *work, int thread, int team) {
    const write_call *w = work;
    int heads = w->transforms->num_kv_heads, groups = gcd(heads, team), parts = team / groups, each = heads / groups;
    if (w->transforms->cos_sin)
        ca_transform_queries(w->transforms, thread, team);
    write_part(w, thread, thread / parts * each, (thread / parts + 1) * each, thread % parts, parts);
}

static int write_all(const cache caches[2], const int64_t *slots, ca_transforms *transforms, ca_fault *fault) {
    const int64_t num_tokens = transforms->rows[K]->shape[0], heads = caches[K].at.num_kv_heads;
    int64_t work = 0, transformed = transforms->cos_sin ? transforms->num_heads * caches[K].side.head_size : 0;
    const int last = transforms->rows[V] ? V : K;
    for (int kv = K; kv <= last; kv++) {
        work += heads * caches[kv].side.head_size;
        transformed += ca_transforms_rows(transforms, kv) ? heads * caches[kv].side.head_size : 0;
    }
    int stream = num_tokens * work * caches[K].side.size >= CA_STREAM_BYTES;
    write_call w = {caches, transforms, slots, num_tokens, stream, last};
    /* A Zen 4 core writes 8 elements of bfloat16 a nanosecond in runs, and a tenth of that token by token. */
    const double cost = (double)(num_tokens * (work + 2 * transformed)) / 8;
    int team = ca_team((int)ca_min64(ca_get_num_threads(), ca_threads_for(cost)));
    if (ca_check_stack(team, fault))
        return fault->status;
    if (transformed && ca_transforms_begin(transforms, (int)ca_max64(1, team)))
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    ca_run_team(team, write_share, &w);
    ca_transforms_end(transforms);
    return CA_OK;
}

/* `rows` are the tokens to write; where `wide` is set they come as float32. */
static cache cache_of(const ca_array *a, int kv, const ca_array *rows, int wide, int isa, int kv_dtype,
                      int kv_cache_layout, float scale) {
    const int64_t head_size = rows->shape[2];
    const int dtype = wide ? CA_F32 : rows->dtype;
    const ca_kernel *kernel = wide ? ca_kernel_for(isa, dtype) : ca_isa_get(isa)->kernels[dtype];
    return (cache){.side = ca_side_of(kernel, dtype, kv, kv_dtype, head_size, kv_cache_layout),
                   .at = ca_kv_of(a, kv_cache_layout, head_size),
                   .dtype = dtype,
                   .isa = isa,
                   .kernel = kernel,
                   .scale = scale};
}

/* Describes the caches, and the part of transforms that every write has. */
static void begin(const ca_written *w, cache out[2], ca_transforms *transforms) {
    const ca_fit *fit = w->fit;
    const int k_dtype = fit->kv_dtype[K], v_dtype = fit->kv_dtype[V], feeds = w->feedback && w->feedback->itemsize;
    const int wide = (w->hadamard & (ca_is_quantised(k_dtype) << K | ca_is_quantised(v_dtype) << V)) | feeds << K;
    const ca_array *rows[2] = {w->key, w->value};
    for (int kv = K; kv <= (w->value ? V : K); kv++)
        out[kv] = cache_of(&w->caches[kv], kv, rows[kv], wide & 1 << kv, fit->isa, fit->kv_dtype[kv],
                           fit->kv_cache_layout, w->scale[kv]);
    *transforms = (ca_transforms){.kernel = ca_isa_get(fit->isa)->kernels[w->key->dtype],
                                  .rows = {w->key, w->value},
                                  .num_kv_heads = (int32_t)out[K].at.num_kv_heads,
                                  .hadamard = w->hadamard,
                                  .wide = wide,
                                  .feedback = feeds ? w->feedback : NULL};
}

int ca_write_rows(const ca_written *w, ca_fault *fault) {
    cache out[2];
    ca_transforms transforms;
    begin(w, out, &transforms);
    int64_t few[CA_FEW_INDICES];
    int64_t *slots = ca_take_slots(w->slot_mapping, out[K].at.num_blocks * out[K].at.block_size, few, fault);
    if (!slots)
        return fault->status;
    write_all(out, slots, &transforms, fault);
    ca_give_back(slots, few);
    return fault->status;
}

int ca_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout, int hadamard,
             float k_scale, float v_scale, ca_fault *fault) {
    ca_array a[CA_WRITE_ARRAYS];
    ca_fit fit = ca_fit_anything(kv_cache_layout);
    fit.meaning = meaning;
    if (ca_check_arguments(&ca_write_table, &fit, objects, given, a, fault))
        return fault->status;
    const ca_written w = {.fit = &fit,
                          .caches = a,
                          .key = &a[CA_WRITE_KEY],
                          .value = &a[CA_WRITE_VALUE],
                          .slot_mapping = &a[CA_WRITE_SLOT_MAPPING],
                          .feedback = &a[CA_WRITE_K_FEEDBACK],
                          .hadamard = hadamard,
                          .scale = {k_scale, v_scale}};
    return ca_write_rows(&w, fault);
}

int ca_index_and_cache(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                       int hadamard, float k_scale, float v_scale, ca_fault *fault) {
    ca_array a[CA_INDEX_ARRAYS];
    ca_fit fit = ca_fit_anything(kv_cache_layout);
    fit.meaning = meaning;
    if (ca_check_arguments(&ca_index_table, &fit, objects, given, a, fault))
        return fault->status;
    const ca_written w = {.fit = &fit,
                          .caches = a,
                          .key = &a[CA_INDEX_K],
                          .slot_mapping = &a[CA_INDEX_SLOT_MAPPING],
                          .hadamard = hadamard,
                          .scale = {k_scale, v_scale}};
    return ca_write_rows(&w, fault);
}

int ca_rotary_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                    int hadamard, float k_scale, float v_scale, int is_neox, float eps, ca_fault *fault) {
    ca_array a[CA_ROTARY_ARRAYS];
    ca_fit fit = ca_fit_anything(kv_cache_layout);
    fit.meaning = meaning;
    if (ca_check_arguments(&ca_rotary_table, &fit, objects, given, a, fault))
        return fault->status;
    const ca_array *queries = &a[CA_ROTARY_QUERY], *table = &a[CA_ROTARY_COS_SIN_CACHE];
    cache caches[2];
    ca_transforms transforms;
    const ca_written w = {.fit = &fit,
                          .caches = a,
                          .key = &a[CA_ROTARY_KEY],
                          .value = &a[CA_ROTARY_VALUE],
                          .feedback = &a[CA_ROTARY_K_FEEDBACK],
                          .hadamard = hadamard,
                          .scale = {k_scale, v_scale}};
    begin(&w, caches, &transforms);
    transforms.query = queries;
    transforms.query_out = &a[CA_ROTARY_QUERY_OUT];
    transforms.cos_sin = table;
    transforms.weights = &a[CA_ROTARY_Q_WEIGHT];
    transforms.num_heads = (int32_t)queries->shape[1];
    transforms.is_neox = is_neox;
    transforms.eps = eps;
    int64_t few[2][CA_FEW_INDICES], *positions = NULL;
    int64_t *slots =
        ca_take_slots(&a[CA_ROTARY_SLOT_MAPPING], caches[K].at.num_blocks * caches[K].at.block_size, few[0], fault);
    if (slots)
        positions = ca_take_positions(&a[CA_ROTARY_POSITIONS], table->shape[0], few[1], fault);
    transforms.positions = positions;
    if (positions)
        write_all(caches, slots, &transforms, fault);
    ca_give_back(positions, few[1]);
    ca_give_back(slots, few[0]);
    return fault->status;
}

/* Copies n elements of 1, 2 or 4 bytes that lie `step` bytes apart. */
static void copy_apart(char *dst, const char *src, int64_t n, int64_t step, int size) {
    if (size == 1)
        for (int64_t i = 0; i < n; i++)
            dst[i] = src[i * step];
    else if (size == 2)
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * 2, src + i * step, 2);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * 4, src + i * step, 4);
}

/* The product of an integer and its scale is exact in float32. */
static void gather_scaled(const cache *c, const char *block, int64_t token, float *dst) {
    for (int64_t d = 0; d < c->side.head_size; d++)
        dst[d] = ca_read_element(&c->side, block, c->at.block_size, c->at.ld, token, d);
}

static void gather_token(const cache *c, const char *block, int64_t token, char *dst) {
    const ca_side *s = &c->side;
    const int size = (int)s->size;
    const int64_t n = s->head_size;
    const char *src = block + offset_of(c, token, 0) * size;
    if (s->plain || (s->kv == V && s->layout == CA_LAYOUT_LANES))
        memcpy(dst, src, (size_t)s->row_bytes);
    else if (s->kv == V)
        copy_apart(dst, src, n, 2 * size, size);
    else if (s->layout == CA_LAYOUT_LANES)
        copy_apart(dst, src, n, CA_LANES * size, size);
    else {
        copy_apart(dst, src, n / 2, 2 * CA_LANES * size, 2 * size);
        copy_apart(dst + n / 2 * 2 * size, src + n / 2 * 2 * CA_LANES * size, n % 2, 0, size);
    }
}

typedef struct gather_call {
    const cache *cache;
    const int32_t *blocks;
    const ca_array *out;
} gather_call;

/* Goes head by head over the tokens of a K group, so that the group's lines stay in L1. */
static void gather_share(void *work, int thread, int team) {
    const gather_call *g = work;
    const cache *c = g->cache;
    const int64_t num_tokens = g->out->shape[0];
    (void)thread, (void)team;
    for (int64_t t = 0, n; t < num_tokens; t += n) {
        const int64_t size = c->at.block_size, token = t % size, block = g->blocks[t / size];
        n = ca_min64(num_tokens - t, ca_min64(size - token, CA_LANES - token % CA_LANES));
        for (int64_t h = 0; h < c->at.num_kv_heads; h++)
            for (int64_t i = 0; i < n; i++) {
                const char *from = ca_block_at(&c->side, &c->at, block, h);
                char *to = ca_row_of(g->out, t + i, h);
                if (c->side.scaled)
                    gather_scaled(c, from, token + i, (float *)to);
                else
                    gather_token(c, from, token + i, to);
            }
    }
}

int ca_gather(const ca_array *a, int kv, int isa, int dtype, int kv_dtype, int kv_cache_layout, ca_fault *fault) {
    const ca_array *out = &a[CA_GATHERED], *table = &a[CA_GATHER_BLOCK_TABLE];
    ca_array written = *out; /* tokens of this shape; out has the dtype that is stored */
    written.dtype = dtype;
    const cache c = cache_of(&a[CA_GATHER_CACHE], kv, &written, 0, isa, kv_dtype, kv_cache_layout, 1);
    const int64_t needed = ca_div_up(out->shape[0], c.at.block_size), cols = table->shape[0];
    int32_t *blocks = malloc(1 + (size_t)ca_min64(needed, cols) * sizeof *blocks);
    if (!blocks)
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    const int bad =
        ca_take_blocks((const int32_t *)table->address, -1, 0, needed, cols, c.at.num_blocks, blocks, fault);
    gather_call g = {&c, blocks, out};
    if (!bad)
        ca_run_team(1, gather_share, &g);
    free(blocks);
    return bad;
}
