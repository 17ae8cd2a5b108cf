/* SPDX-License-Identifier: Apache-2.0 */
#include "side.h"
#include "kernel/kernel.h"
#include <string.h>

ca_side ca_side_of(const ca_kernel *kernel, int dtype, int kv, int kv_dtype, int64_t head_size, int kv_cache_layout) {
    ca_side s = {.kv = kv,
                 .dtype = kv_dtype,
                 .plain = kv_cache_layout != CA_PACKED,
                 .quantised = ca_is_quantised(kv_dtype),
                 .packed = ca_is_packed(kv_dtype),
                 .nibbles = ca_is_nibbles(kv_dtype),
                 .scaled = ca_is_scaled(kv_dtype),
                 .several_scales = ca_has_scales(kv_dtype),
                 .shared = ca_scale_elements(kv_dtype, head_size),
                 .head_size = head_size,
                 .size = ca_dtype_size(kv_dtype),
                 .row_bytes = head_size * ca_dtype_size(kv_dtype)};
    /* Quantised caches lie in pairs whatever the dtype: so kernel/kv_formats/integers.h multiplies integers, and
     * halves.h makes two vectors of halves of one of bytes by shifts alone. */
    const int layout = s.quantised ? CA_LAYOUT_PAIRS : kernel->info.layout;
    s.layout = s.plain ? CA_LAYOUT_ROWS : layout;
    s.one_scale = s.scaled && !s.several_scales;
    s.scales = s.scaled ? ca_div_up(head_size, s.shared) : 0;
    s.elements = CA_LANES * (kv == K && layout == CA_LAYOUT_PAIRS ? ca_round_up(head_size, 2) : head_size);
    if (s.packed)
        s.elements = ca_round_up(s.elements, CA_NIBBLES);
    s.group_bytes = ca_bytes_of(kv_dtype, s.elements);
    s.ready = !s.quantised && !s.plain;
    s.integers = kernel->integers && *kernel->integers && s.scaled && (kv == K || head_size % CA_LANES == 0);
    /* Rows of V in a plain cache lie as the layout LANES has them. */
    const int as_lanes = kv == V && layout == CA_LAYOUT_LANES;
    s.unpacked_bytes = as_lanes || ca_in_place(&s) ? 0 : s.elements * ca_dtype_size(dtype);
    s.staged_bytes = s.packed ? s.elements : 0;
    s.int8_bytes = s.packed && !s.nibbles ? s.elements : 0;
    return s;
}

float ca_number_at(const void *data, int dtype, int64_t at) {
    uint16_t half;
    float single;
    if (ca_is_quantised(dtype))
        return ca_number(dtype, ca_element(dtype, data, at));
    if (dtype == CA_F32) {
        memcpy(&single, (const char *)data + at * 4, sizeof single);
        return single;
    }
    memcpy(&half, (const char *)data + at * 2, sizeof half);
    return dtype == CA_F16 ? ca_from_f16(half) : ca_from_bf16(half);
}

float ca_read_element(const ca_side *s, const char *block, int64_t block_size, int64_t ld, int64_t token, int64_t d) {
    const int64_t group = token / CA_LANES, lane = token % CA_LANES;
    if (!s->scaled)
        return ca_number_at(block, s->dtype, ca_offset(s, token, d, ld));
    uint16_t scale;
    memcpy(&scale, block + ca_scales_at(s, block_size, group) + (d / s->shared * CA_LANES + lane) * 2, 2);
    const float x = ca_number_at(block + group * s->group_bytes, s->dtype, ca_offset(s, lane, d, s->head_size));
    return x * ca_from_bf16(scale) + 0.0f; /* no -0 */
}
