/* SPDX-License-Identifier: Apache-2.0
 * Slots and blocks: writes tokens into the cache and gathers them back. */
#include "cpu_attn.h"
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static const ca_kernel *kernel_of(const ca_cache *c) { return ca_isa_get(c->isa)->kernels[c->dtype]; }

/* One part of a write: some tokens of some kv heads, chosen so that a slot belongs to one part:
 * of tokens that share a slot the last one stays, whole. */
static void write_part(const ca_cache *kc, const ca_cache *vc, const ca_rows *key, const ca_rows *value,
                       const int64_t *slots, int64_t num_tokens, int64_t item, int64_t parts) {
    int head = (int)(item / parts);
    kernel_of(kc)->write(kc, 0, key, head, slots, num_tokens, item % parts, parts);
    kernel_of(vc)->write(vc, 1, value, head, slots, num_tokens, item % parts, parts);
}

static void write_all(const ca_cache *kc, const ca_cache *vc, const ca_rows *key, const ca_rows *value,
                      const int64_t *slots, int64_t num_tokens) {
    /* 4 elements a nanosecond: 32 tokens of 8 heads of 128, bfloat16, take 16 us on a Zen 4 core */
    double nanoseconds = (double)num_tokens * kc->num_kv_heads * (kc->head_size + vc->head_size) / 4;
    int team = ca_team((int)ca_min64(ca_get_num_threads(), ca_threads_for(nanoseconds)));
    int64_t parts = ca_div_up(team, kc->num_kv_heads), items = parts * kc->num_kv_heads;
    if (team <= 1) {
        for (int64_t i = 0; i < items; i++)
            write_part(kc, vc, key, value, slots, num_tokens, i, parts);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t i = 0; i < items; i++)
        write_part(kc, vc, key, value, slots, num_tokens, i, parts);
#endif
}

static ca_cache cache_of(const ca_array *a, const ca_array *rows, int isa) {
    return (ca_cache){
        .data = (void *)a->address,
        .stride_n = a->strides[0],
        .stride_h = a->strides[1],
        .num_blocks = a->shape[0],
        .num_kv_heads = (int32_t)a->shape[1],
        .block_size = a->shape[2],
        .head_size = (int32_t)rows->shape[2],
        .dtype = a->dtype,
        .isa = isa,
    };
}

static ca_rows rows_of(const ca_array *a) { return (ca_rows){(void *)a->address, a->strides[0], a->strides[1]}; }

int ca_write(ca_known *known, const uintptr_t *objects, const ca_array *given, int named, int isa, ca_fault *fault) {
    const int64_t sizes[9] = {named};
    ca_array a[CA_WRITE_ARRAYS];
    const struct ca_accepted *call =
        ca_accept(known, sizes, isa, objects, given, a, CA_WRITE_ARRAYS, CA_TO_VALUE_CACHE + 1);
    if (!call)
        return CA_UNKNOWN;
    ca_cache kc = cache_of(&a[CA_TO_KEY_CACHE], &a[CA_KEY], (int32_t)call->isa);
    ca_cache vc = cache_of(&a[CA_TO_VALUE_CACHE], &a[CA_VALUE], (int32_t)call->isa);
    ca_rows key = rows_of(&a[CA_KEY]), value = rows_of(&a[CA_VALUE]);
    const int64_t *slots = (const int64_t *)a[CA_SLOT_MAPPING].address, num_tokens = a[CA_KEY].shape[0];
    if (ca_check_slots(slots, num_tokens, kc.num_blocks * kc.block_size, fault))
        return fault->status;
    write_all(&kc, &vc, &key, &value, slots, num_tokens);
    return CA_OK;
}

static void gather_token(const ca_cache *c, int value, const char *block, int64_t token, char *dst) {
    int layout = kernel_of(c)->info.layout, size = ca_dtype_size(c->dtype);
    for (int64_t d = 0; d < c->head_size; d++) {
        int64_t at = value ? ca_v_offset(layout, token, d, c->head_size) : ca_k_offset(layout, token, d, c->head_size);
        memcpy(dst + d * size, block + at * size, (size_t)size);
    }
}

int ca_gather(const ca_cache *c, int value, const int32_t *block_table, int64_t num_entries, int64_t num_tokens,
              const ca_rows *dst, ca_fault *fault) {
    *fault = (ca_fault){CA_OK, -1, -1, -1, -1};
    if (ca_check_blocks(block_table, -1, 0, ca_div_up(num_tokens, c->block_size), num_entries, c->num_blocks, fault))
        return fault->status;
    for (int64_t t = 0; t < num_tokens; t++)
        for (int h = 0; h < c->num_kv_heads; h++)
            gather_token(c, value,
                         ca_block(c->data, c->stride_n, c->stride_h, block_table[t / c->block_size], h, c->dtype),
                         t % c->block_size,
                         (char *)dst->data + (t * dst->stride_t + h * dst->stride_h) * ca_dtype_size(c->dtype));
    return CA_OK;
}
