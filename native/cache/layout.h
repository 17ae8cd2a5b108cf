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

/* Says where the cache of keys, or of values, lies. */
typedef struct ca_kv {
    const void *cache;
    int64_t num_blocks, num_kv_heads, block_size;
    int64_t stride_n, stride_h; /* from block to block, from kv head to kv head, in elements */
    int64_t ld;                 /* from token to token of a plain cache; packed: the head size */
} ca_kv;

static inline ca_kv ca_kv_of(const ca_array *a, int kv_cache_layout, int64_t head_size) {
    const int h = kv_cache_layout == CA_NHD ? 2 : 1, b = 3 - h;
    return (ca_kv){.cache = (const void *)a->address,
                   .num_blocks = a->shape[0],
                   .num_kv_heads = a->shape[h],
                   .block_size = a->shape[b],
                   .stride_n = a->strides[0],
                   .stride_h = a->strides[h],
                   .ld = kv_cache_layout == CA_PACKED ? head_size : a->strides[b]};
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

/* Returns [128]: what each byte without its sign is, as binary16 or bfloat16; for nibbles the 16 numbers, eight times.
 */
const uint16_t *ca_quantised_words(int kv_dtype, int bf16);
/* Returns the bytes of these numbers in bfloat16: [128] low ones, then [128] high ones. */
const uint8_t *ca_quantised_bytes(int kv_dtype);
#endif
