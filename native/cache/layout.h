/* SPDX-License-Identifier: Apache-2.0
 * These functions say where the elements of a cache lie. */
#ifndef CPU_ATTN_LAYOUT_H
#define CPU_ATTN_LAYOUT_H
#include "common.h"
#include "formats.h"

#define CA_LANES 16 /* tokens of a K group in every layout */

/* Returns the row of a token and a head of an array [T, heads, any]. */
static inline char *ca_row_of(const ca_array *rows, int64_t t, int64_t head) {
    return (char *)rows->address + (t * rows->strides[0] + head * rows->strides[1]) * rows->itemsize;
}
/* These two alone say where element (token, d) of a block lies in each layout. In ROWS head_size is ld. */
static inline int64_t ca_k_offset(int layout, int64_t token, int64_t d, int64_t head_size) {
    int64_t group = token / CA_LANES, lane = token % CA_LANES;
    if (layout == CA_LAYOUT_ROWS)
        return token * head_size + d;
    if (layout == CA_LAYOUT_LANES)
        return (group * head_size + d) * CA_LANES + lane;
    return (group * ((head_size + 1) / 2) + d / 2) * 2 * CA_LANES + lane * 2 + d % 2;
}
static inline int64_t ca_v_offset(int layout, int64_t token, int64_t d, int64_t head_size) {
    return layout != CA_LAYOUT_PAIRS ? token * head_size + d : (token / 2 * head_size + d) * 2 + token % 2;
}

/* Holds the axes of a cache, whatever their order. */
typedef struct ca_axes {
    int64_t num_blocks, num_kv_heads, block_size;
    int64_t stride_n, stride_h, ld;
} ca_axes;

static inline ca_axes ca_cache_axes(const ca_array *a, int kv_cache_layout, int64_t head_size) {
    int h = kv_cache_layout == CA_NHD ? 2 : 1, b = 3 - h;
    return (ca_axes){a->shape[0],   a->shape[h],   a->shape[b],
                     a->strides[0], a->strides[h], kv_cache_layout == CA_PACKED ? head_size : a->strides[b]};
}

/* Quantised caches lie in pairs whatever the dtype: so kernel/kv_formats/integers.h multiplies integers, and halves.h
 * makes two vectors of halves of one of bytes by shifts alone. */
static inline int ca_layout_of_kind(int layout, int kv_dtype) {
    return ca_is_quantised(kv_dtype) ? CA_LAYOUT_PAIRS : layout;
}
static inline int ca_layout_of(int kv_cache_layout, int layout, int kv_dtype) {
    return kv_cache_layout == CA_PACKED ? ca_layout_of_kind(layout, kv_dtype) : CA_LAYOUT_ROWS;
}

/* Elements of fewer than 8 bits are packed by 128, in the order of the layout. 64 bytes hold their lowest 4 bits: byte
 * b has those of element b in its low half, and those of element 64 + b in its high half. For 5 or 6 bits, 16 bytes
 * follow for each further bit: bit i of byte b belongs to element 16 i + b. The last bit is the sign, which is bit 7 of
 * a byte of int8. */
#define CA_NIBBLES 128
static inline int64_t ca_nibble_byte(int64_t element) { return element / 128 * 64 + element % 64; }
static inline int ca_nibble_shift(int64_t element) { return element % 128 < 64 ? 0 : 4; }

/* Returns which bit of a byte of int8 is bit `bit` of an element of so many bits. */
static inline int ca_plane_bit(int bits, int bit) { return bit == bits - 1 ? 7 : bit; }
/* Returns the bits of element i, those of fewer than 8 bits as ca_plane_bit places them. */
static inline int ca_element(int dtype, const uint8_t *data, int64_t i) {
    if (!ca_is_packed(dtype))
        return data[i];
    const uint8_t *p = data + i / CA_NIBBLES * ca_bytes_of(dtype, CA_NIBBLES);
    int x = p[i % 64] >> ca_nibble_shift(i) & 15;
    for (int bit = 4; bit < ca_formats[dtype].bits; bit++)
        x |= (p[bit * 16 + i % 16] >> i % CA_NIBBLES / 16 & 1) << ca_plane_bit(ca_formats[dtype].bits, bit);
    return x;
}
static inline void ca_put_bit(uint8_t *to, int bit, int x) { *to = (uint8_t)((*to & ~(1 << bit)) | (x & 1) << bit); }
static inline void ca_put_element(int dtype, uint8_t *data, int64_t i, int x) {
    if (!ca_is_packed(dtype)) {
        data[i] = (uint8_t)x;
        return;
    }
    uint8_t *p = data + i / CA_NIBBLES * ca_bytes_of(dtype, CA_NIBBLES), *both = p + i % 64;
    *both = (uint8_t)((*both & 0xf0 >> ca_nibble_shift(i)) | (x & 15) << ca_nibble_shift(i));
    for (int bit = 4; bit < ca_formats[dtype].bits; bit++)
        ca_put_bit(p + bit * 16 + i % 16, (int)(i % CA_NIBBLES / 16), x >> ca_plane_bit(ca_formats[dtype].bits, bit));
}

/* Says what a group of 16 tokens of one kv head takes, in K or V: elements in the order of its layout, their bytes, and
 * how many scales each token has. A block of a cache with scales holds whole groups, and behind all of them
 * [groups][scales][16] bfloat16. */
typedef struct ca_group_form {
    int64_t elements, bytes, scales;
} ca_group_form;

static inline ca_group_form ca_group_form_of(int layout, int kv_dtype, int64_t head_size, int kv) {
    const int64_t pair = ca_layout_of_kind(layout, kv_dtype) == CA_LAYOUT_PAIRS ? 2 : 1;
    int64_t n = CA_LANES * (kv ? head_size : ca_round_up(head_size, pair));
    if (ca_is_packed(kv_dtype))
        n = ca_round_up(n, CA_NIBBLES);
    return (ca_group_form){n, ca_bytes_of(kv_dtype, n),
                           ca_is_scaled(kv_dtype) ? ca_div_up(head_size, ca_scale_elements(kv_dtype, head_size)) : 0};
}
/* Returns where the scales of a group lie in its block, in bytes. */
static inline int64_t ca_scales_at(const ca_group_form *f, int64_t block_size, int64_t group) {
    return ca_div_up(block_size, CA_LANES) * f->bytes + group * f->scales * CA_LANES * 2;
}

static inline const char *ca_block(const void *base, int64_t stride_n, int64_t stride_h, int64_t block, int kv_head,
                                   int dtype) {
    return (const char *)base + (block * stride_n + kv_head * stride_h) * ca_dtype_size(dtype);
}

/* Returns element d of a token of a dtype with scales, multiplied by its scale. */
float ca_scaled_element(int kv_dtype, int64_t head_size, int kv, const char *block, int64_t block_size, int64_t token,
                        int64_t d);
/* Returns [128]: what each byte without its sign is, as binary16 or bfloat16; for nibbles the 16 numbers, eight times.
 */
const uint16_t *ca_quantised_words(int kv_dtype, int bf16);
/* Returns the bytes of these numbers in bfloat16: [128] low ones, then [128] high ones. */
const uint8_t *ca_quantised_bytes(int kv_dtype);
#endif
