/* SPDX-License-Identifier: Apache-2.0
 * Slots and blocks: writes tokens into the cache and gathers them back. */
#include "cpu_attn.h"
#include <stdatomic.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* From here on writes go past the caches. Measured on Zen 4 with 32 MiB of L3, one thread, write and then a decode step
 * that reads it all, streamed against not: 4 MiB 17.5 and 20.3 GB/s written, 705 and 442 us for both; 8 MiB 18.6
 * and 20.8, 1339 and 838; 16 MiB 20.6 and 12.5, 2579 and 2781; 32 MiB 18.6 and 9.2, 5779 and 7565. */
#define STREAM_BYTES (16 << 20)

static const ca_kernel *kernel_of(const ca_cache *c) { return ca_isa_get(c->isa)->kernels[c->dtype]; }

static int layout_of(const ca_cache *c) {
    return c->kv_cache_layout == CA_PACKED ? kernel_of(c)->info.layout : CA_LAYOUT_ROWS;
}

/* Of one (block, head), the element (token, d). */
static char *element_of(const ca_cache *c, int value, char *block, int64_t token, int64_t d) {
    int layout = layout_of(c);
    int64_t i = value ? ca_v_offset(layout, token, d, c->ld) : ca_k_offset(layout, token, d, c->ld);
    return block + i * ca_dtype_size(c->kv_dtype);
}

typedef struct write_call {
    const ca_cache *key_cache, *value_cache;
    const ca_rows *key, *value;
    const int64_t *slots;
    int64_t num_tokens;
    int stream;
} write_call;

static char *row_of(const ca_rows *rows, int64_t t, int head, int dtype) {
    return (char *)rows->data + (t * rows->stride_t + head * rows->stride_h) * ca_dtype_size(dtype);
}

/* One token as bytes. An odd last d of K is paired with zero, for kernels that read pairs. */
static void write_narrow(const ca_cache *c, int value, char *block, int64_t token, const char *row) {
    const ca_kernel *kernel = kernel_of(c);
    int layout = layout_of(c), rows = layout == CA_LAYOUT_ROWS;
    int64_t head_size = c->head_size, step = layout == CA_LAYOUT_LANES ? CA_LANES : 0;
    if (rows || value)
        step = layout == CA_LAYOUT_PAIRS ? 2 : 1;
    uint8_t bytes[512];
    for (int64_t d = 0, n; d < head_size; d += n) {
        n = ca_min64(head_size - d, (int64_t)sizeof bytes);
        kernel->pack(row + d * ca_dtype_size(c->dtype), n, c->scale, c->kv_dtype, bytes);
        char *dst = element_of(c, value, block, token, d);
        for (int64_t i = 0; i < n; i++)
            dst[step ? i * step : i / 2 * 2 * CA_LANES + i % 2] = (char)bytes[i];
    }
    if (!step && head_size % 2)
        block[ca_k_offset(layout, token, head_size, head_size + 1)] = 0;
}

/* A whole group in pairs. Two bytes side by side are moved as one 16-bit element: so K in pairs of bytes lies as K of
 * half as many halves does in lanes. */
static int write_narrow_group(const ca_cache *c, int value, char *block, int64_t token, const char *rows, int64_t ld,
                              int stream) {
    const ca_kernel *kernel = kernel_of(c), *halves = ca_isa_get(c->isa)->kernels[CA_F16];
    int64_t head_size = c->head_size;
    uint8_t bytes[CA_LANES][512];
    if (layout_of(c) != CA_LAYOUT_PAIRS || !halves || head_size % 2 || head_size > (int64_t)sizeof bytes[0])
        return 0;
    for (int t = 0; t < CA_LANES; t++)
        kernel->pack(rows + t * ld, head_size, c->scale, c->kv_dtype, bytes[t]);
    if (!value) {
        halves->write_k(block, head_size / 2, token, CA_LANES, bytes, sizeof bytes[0] / 2, bytes, stream);
        return 1;
    }
    for (int t = 0; t < CA_LANES; t += 2) {
        uint8_t *dst = (uint8_t *)block + ca_v_offset(CA_LAYOUT_PAIRS, token + t, 0, head_size);
        for (int64_t d = 0; d < head_size; d++) {
            dst[2 * d] = bytes[t][d];
            dst[2 * d + 1] = bytes[t + 1][d];
        }
    }
    return 1;
}

static void write_run(const ca_cache *c, int value, const ca_rows *rows, int head, int64_t slot, int64_t t, int n,
                      int stream) {
    const ca_kernel *kernel = kernel_of(c);
    char *block = (char *)ca_block(c->data, c->stride_n, c->stride_h, slot / c->block_size, head, c->kv_dtype);
    const char *row = row_of(rows, t, head, c->dtype);
    int64_t token = slot % c->block_size, ld = rows->stride_t * ca_dtype_size(c->dtype);
    if (!ca_is_narrow(c->kv_dtype) && c->kv_cache_layout != CA_PACKED)
        for (int i = 0; i < n; i++)
            memcpy(element_of(c, value, block, token + i, 0), row + i * ld,
                   (size_t)c->head_size * ca_dtype_size(c->dtype));
    else if (!ca_is_narrow(c->kv_dtype))
        (value ? kernel->write_v : kernel->write_k)(block, c->head_size, token, n, row, rows->stride_t,
                                                    row + CA_LANES * ld, stream);
    else if (n < CA_LANES || !write_narrow_group(c, value, block, token, row, ld, stream))
        for (int i = 0; i < n; i++)
            write_narrow(c, value, block, token + i, row + i * ld);
}

/* Tokens from t on, at most one K group of them, that lie one after another in one block. */
static int run_length(const write_call *w, int64_t t, int64_t block_size) {
    int64_t token = w->slots[t] % block_size;
    int64_t most = ca_min64(w->num_tokens - t, ca_min64(block_size - token, CA_LANES - token % CA_LANES));
    int n = 1;
    while (n < most && w->slots[t + n] == w->slots[t] + n)
        n++;
    return n;
}

/* The share of one thread: some heads, and every so many-th K group. All heads of a run before the next run, so that
 * the source is read in the order of memory. A slot of a head has one thread, which goes in order of tokens: of those
 * that share a slot the last one stays, whole. */
static void write_part(const write_call *w, int head0, int head1, int64_t part, int64_t parts) {
    int64_t block_size = w->key_cache->block_size;
    for (int64_t t = 0, n; t < w->num_tokens; t += n) {
        int64_t slot = w->slots[t];
        n = 1;
        if (slot < 0)
            continue;
        n = run_length(w, t, block_size);
        if (parts > 1 && (slot / block_size + slot % block_size / CA_LANES) % parts != part)
            continue;
        for (int h = head0; h < head1; h++)
            write_run(w->key_cache, 0, w->key, h, slot, t, (int)n, w->stream);
        for (int h = head0; h < head1; h++)
            write_run(w->value_cache, 1, w->value, h, slot, t, (int)n, w->stream);
    }
    /* Streamed lines become visible to other threads in no order until a locked instruction (Intel SDM 3, 12.3.1). */
    if (w->stream)
        atomic_thread_fence(memory_order_seq_cst);
}

static int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

static void write_all(const ca_cache *kc, const ca_cache *vc, const ca_rows *key, const ca_rows *value,
                      const int64_t *slots, int64_t num_tokens) {
    int64_t work = num_tokens * kc->num_kv_heads * (kc->head_size + vc->head_size);
    write_call w = {kc, vc, key, value, slots, num_tokens, work * ca_dtype_size(kc->kv_dtype) >= STREAM_BYTES};
    /* 8 elements a nanosecond: bfloat16 in runs, on a Zen 4 core; token by token it is a tenth of that */
    int team = ca_team((int)ca_min64(ca_get_num_threads(), ca_threads_for((double)work / 8)));
    if (team <= 1) {
        write_part(&w, 0, kc->num_kv_heads, 0, 1);
        return;
    }
    int heads = kc->num_kv_heads, groups = gcd(heads, team), parts = team / groups, each = heads / groups;
#ifdef _OPENMP
#pragma omp parallel for num_threads(team)
#endif
    for (int i = 0; i < team; i++)
        write_part(&w, i / parts * each, (i / parts + 1) * each, i % parts, parts);
}

static ca_cache cache_of(const ca_array *a, const ca_array *rows, const struct ca_accepted *call, int kv_cache_layout,
                         float scale) {
    const ca_axes axes = ca_cache_axes(a, kv_cache_layout, rows->shape[2]);
    return (ca_cache){
        .data = (void *)a->address,
        .stride_n = axes.stride_n,
        .stride_h = axes.stride_h,
        .ld = axes.ld,
        .num_blocks = axes.num_blocks,
        .num_kv_heads = (int32_t)axes.num_kv_heads,
        .block_size = axes.block_size,
        .head_size = (int32_t)rows->shape[2],
        .dtype = rows->dtype,
        .kv_dtype = (int32_t)call->kv_dtype,
        .isa = (int32_t)call->isa,
        .kv_cache_layout = kv_cache_layout,
        .scale = scale,
    };
}

static ca_rows rows_of(const ca_array *a) { return (ca_rows){(void *)a->address, a->strides[0], a->strides[1]}; }

int ca_write(ca_known *known, const uintptr_t *objects, const ca_array *given, int named, int isa, int kv_dtype,
             int kv_cache_layout, float k_scale, float v_scale, ca_fault *fault) {
    const int64_t sizes[11] = {named, kv_cache_layout};
    ca_array a[CA_WRITE_ARRAYS];
    const struct ca_accepted *call =
        ca_accept(known, sizes, isa, kv_dtype, objects, given, a, CA_WRITE_ARRAYS, CA_TO_VALUE_CACHE + 1);
    if (!call)
        return CA_UNKNOWN;
    ca_cache kc = cache_of(&a[CA_TO_KEY_CACHE], &a[CA_KEY], call, kv_cache_layout, k_scale);
    ca_cache vc = cache_of(&a[CA_TO_VALUE_CACHE], &a[CA_VALUE], call, kv_cache_layout, v_scale);
    ca_rows key = rows_of(&a[CA_KEY]), value = rows_of(&a[CA_VALUE]);
    const int64_t *slots = (const int64_t *)a[CA_SLOT_MAPPING].address, num_tokens = a[CA_KEY].shape[0];
    if (ca_check_slots(slots, num_tokens, kc.num_blocks * kc.block_size, fault))
        return fault->status;
    write_all(&kc, &vc, &key, &value, slots, num_tokens);
    return CA_OK;
}

/* n elements of 1, 2 or 4 bytes, step bytes apart. */
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

static void gather_token(const ca_cache *c, int value, const char *block, int64_t token, char *dst) {
    int layout = layout_of(c), size = ca_dtype_size(c->kv_dtype);
    int64_t n = c->head_size;
    const char *src = element_of(c, value, (char *)block, token, 0);
    if (layout == CA_LAYOUT_ROWS || (value && layout == CA_LAYOUT_LANES))
        memcpy(dst, src, (size_t)(n * size));
    else if (value)
        copy_apart(dst, src, n, 2 * size, size);
    else if (layout == CA_LAYOUT_LANES)
        copy_apart(dst, src, n, CA_LANES * size, size);
    else {
        copy_apart(dst, src, n / 2, 2 * CA_LANES * size, 2 * size);
        copy_apart(dst + n / 2 * 2 * size, src + n / 2 * 2 * CA_LANES * size, n % 2, 0, size);
    }
}

/* Head by head over the tokens of a K group, whose lines stay in L1 so. */
int ca_gather(const ca_cache *c, int value, const int32_t *block_table, int64_t num_entries, int64_t num_tokens,
              const ca_rows *dst, ca_fault *fault) {
    *fault = (ca_fault){CA_OK, -1, -1, -1, -1};
    if (ca_check_blocks(block_table, -1, 0, ca_div_up(num_tokens, c->block_size), num_entries, c->num_blocks, fault))
        return fault->status;
    for (int64_t t = 0, n; t < num_tokens; t += n) {
        int64_t token = t % c->block_size, block = block_table[t / c->block_size];
        n = ca_min64(num_tokens - t, ca_min64(c->block_size - token, CA_LANES - token % CA_LANES));
        for (int h = 0; h < c->num_kv_heads; h++)
            for (int64_t i = 0; i < n; i++)
                gather_token(c, value, ca_block(c->data, c->stride_n, c->stride_h, block, h, c->kv_dtype), token + i,
                             row_of(dst, t + i, h, c->kv_dtype));
    }
    return CA_OK;
}
