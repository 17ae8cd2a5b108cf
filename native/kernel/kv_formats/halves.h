/* SPDX-License-Identifier: Apache-2.0
 * This file turns elements of a quantised cache into binary16, for the FMA kernels. Whatever the query's dtype, f16's
 * products then read K and V, where loading a vector is one instruction, as it is with bfloat16.
 *
 * A byte of fp8 or int8 needs no table: shifted to its place it is the number over a power of two (formats.h). That
 * power goes into the query, or into the weights of V, which changes no rounding. Nibbles become bytes of e5m2 by a
 * table of 16. Bytes that are NaN, but would not be as binary16, are mended afterwards.
 *
 * Bytes lie in pairs for every dtype, since two vectors of binary16 come from one vector of pairs by shifts, while
 * bytes in rows would have to be spread first. During the conversion memory could not answer as fast as it would be
 * asked, so the products prefetch (attention/prefetch.h). MEASUREMENTS.md has the measurements under "quantised
 * caches".
 */

#ifndef CPU_ATTN_HALVES_H
#define CPU_ATTN_HALVES_H

#include "numbers.h"

typedef uint16_t vh __attribute__((vector_size(4 * VL)));
typedef int16_t vh_signed __attribute__((vector_size(4 * VL)));
typedef uint8_t bytes_of_halves __attribute__((vector_size(2 * VL)));

static float half_unit(int kv_dtype) { return ca_elements[ca_formats[kv_dtype].element].unit; }

/* Turns the upper byte of each word into binary16; the lower byte may hold anything. */
INLINE vh as_halves(int element, vh x) { return (vh)CA_HALF(ca_elements[element].shift, (vh_signed)x); }
INLINE uint16_t as_half(int element, uint8_t byte) {
    vh x = {0};
    x[0] = (uint16_t)(byte << 8);
    return as_halves(element, x)[0];
}

/* Stores 2 * VL words in rows of 16 that begin `gap` words apart. */
INLINE void put_halves(uint16_t *dst, int64_t gap, vh x) {
#if 2 * VL > CA_LANES
    if (gap != CA_LANES) {
        typedef uint16_t row __attribute__((vector_size(2 * CA_LANES)));
#if __has_builtin(__builtin_shufflevector) /* Without it gcc 12 goes through the stack; gcc 11 lacks it. */
        row low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        row high = __builtin_shufflevector(x, x, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
#else
        row low, high;
        memcpy(&low, &x, sizeof low);
        memcpy(&high, (const char *)&x + sizeof low, sizeof high);
#endif
        memcpy(dst, &low, sizeof low);
        memcpy(dst + gap, &high, sizeof high);
        return;
    }
#endif
    (void)gap;
    memcpy(dst, &x, sizeof x);
}

/* Marks NaN in `found`: adding 1 to a byte without its sign sets the top bit only if the byte is 0x7f. */
INLINE void look_for_nan(int element, vh x, vh *found) {
    if (ca_elements[element].nan)
        *found |= (x & 0x7f7f) + 0x0101;
}
static int any_nan(vh found) {
    uint64_t part[sizeof found / 8], all = 0;
    memcpy(part, &found, sizeof part);
    EACH(i, (int)(sizeof part / 8)) all |= part[i];
    return (all & 0x8080808080808080) != 0;
}

/* Stores the first and the second bytes of n pairs as binary16, in rows of 16 that begin `gap` elements apart. What is
 * less than a vector at the end is converted once more together with elements before it: 16 of 80 elements, one by one,
 * took 0.4 of decode's time. */
INLINE void unzip_vector(int element, const uint8_t *src, int64_t i, uint16_t *first, uint16_t *second, int64_t gap,
                         const char *next_src, vh *found) {
    const int64_t at = i / CA_LANES * gap + i % CA_LANES;
    vh x;
    memcpy(&x, src + 2 * i, sizeof x);
    __builtin_prefetch(next_src + 2 * i, 0, 2);
    look_for_nan(element, x, found);
    put_halves(first + at, gap, as_halves(element, x << 8));
    put_halves(second + at, gap, as_halves(element, x));
}
INLINE void unzip_halves(int element, const uint8_t *src, int64_t n, uint16_t *first, uint16_t *second, int64_t gap,
                         const char *next_src, vh *found) {
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL)
        unzip_vector(element, src, i, first, second, gap, next_src, found);
    if (i && i < n) {
        unzip_vector(element, src, n - 2 * VL, first, second, gap, next_src, found);
        return;
    }
    for (; i < n; i++) {
        int64_t at = i / CA_LANES * gap + i % CA_LANES;
        first[at] = as_half(element, src[2 * i]);
        second[at] = as_half(element, src[2 * i + 1]);
        look_for_nan(element, (vh){src[2 * i], src[2 * i + 1]}, found);
    }
}

INLINE void widen_vector(int element, const uint8_t *src, uint16_t *dst, const char *next_src, vh *found) {
    bytes_of_halves x;
    memcpy(&x, src, sizeof x);
    __builtin_prefetch(next_src, 0, 2);
    vh words = __builtin_convertvector(x, vh);
    look_for_nan(element, words, found);
    put_halves(dst, CA_LANES, as_halves(element, words << 8));
}
INLINE void widen_to_halves(int element, const uint8_t *src, int64_t n, uint16_t *dst, const char *next_src,
                            vh *found) {
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL)
        widen_vector(element, src + i, dst + i, next_src + i, found);
    if (i && i < n) {
        i = n - 2 * VL;
        widen_vector(element, src + i, dst + i, next_src + i, found);
        return;
    }
    for (; i < n; i++) {
        dst[i] = as_half(element, src[i]);
        look_for_nan(element, (vh){src[i]}, found);
    }
}

/* Does v_look_up for the bytes of x; vi may be another type of vector. */
INLINE vh look_up(const uint8_t *table, vh x) {
    vi bytes;
    memcpy(&bytes, &x, sizeof x);
    bytes = v_look_up(table, bytes);
    memcpy(&x, &bytes, sizeof x);
    return x;
}

/* Turns n nibbles into bytes of e5m2, which can represent each of -8..7. */
static void nibbles_to_bytes(const uint8_t *src, int64_t n, uint8_t *dst, const char *next_src) {
    static const uint8_t number[16] = {0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc,
                                       0,    0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47};
    for (int64_t i = 0; i < n; i += CA_NIBBLES, src += 64, dst += CA_NIBBLES, next_src += 64) {
        __builtin_prefetch(next_src, 0, 2);
        EACH(j, 16 / VL) {
            vh x, low, high;
            memcpy(&x, src + 4 * VL * j, sizeof x);
            low = look_up(number, x & 0x0f0f);
            high = look_up(number, x >> 4 & 0x0f0f);
            memcpy(dst + 4 * VL * j, &low, sizeof low);
            memcpy(dst + 64 + 4 * VL * j, &high, sizeof high);
        }
    }
}

/* Converts K or V of n tokens of a group, all but NaN. Returns whether one of them may be NaN. */
INLINE int halves_of_bytes(int element, int kv, const uint8_t *src, int n, int64_t head_size, uint16_t *dst,
                           const char *next_src) {
    const int64_t words = ca_div_up(head_size, 2) * CA_LANES;
    vh found = {0};
    if (!kv)
        unzip_halves(element, src, words, dst, dst + CA_LANES, 2 * CA_LANES, next_src, &found);
    for (int64_t t = 0; kv && t < n; t += 2)
        unzip_halves(element, src + t * head_size, head_size, dst + t * head_size, dst + (t + 1) * head_size, CA_LANES,
                     next_src + t * head_size, &found);
    return any_nan(found);
}

static void put_nan(int kv, const uint8_t *src, int n, int64_t head_size, uint16_t *dst) {
    for (int64_t t = 0; t < n; t++)
        for (int64_t d = 0; d < head_size; d++) {
            int64_t from =
                kv ? ca_v_offset(CA_LAYOUT_PAIRS, t, d, head_size) : ca_k_offset(CA_LAYOUT_PAIRS, t, d, head_size);
            int64_t to = kv ? t * head_size + d : d * CA_LANES + t;
            if ((src[from] & 0x7f) == 0x7f)
                dst[to] = 0x7e00;
        }
}

/* Converts a group of n tokens to a group of f16's layout. stage: room for its bytes, if elements have less than 8
 * bits. */
static void halves_of_group(const ca_side *s, const uint8_t *src, int n, uint16_t *dst, uint8_t *stage,
                            const char *next_src) {
    int element = ca_formats[s->dtype].element, nan = 0;
    if (s->packed) {
        if (s->nibbles)
            nibbles_to_bytes(src, s->elements, stage, next_src);
        else
            int8_of_packed(s->dtype, src, s->elements, stage, next_src);
        src = stage;
        next_src = (const char *)stage;
        element = s->nibbles ? CA_AS_E5M2 : element;
    }
    FOR_BYTE(element, nan = halves_of_bytes(BYTE, s->kv, src, n, s->head_size, dst, next_src))
    if (nan)
        put_nan(s->kv, src, n, s->head_size, dst);
}

/* Converts a row of n bytes of fp8. */
static void halves_of_row(int kv_dtype, const uint8_t *src, int64_t n, uint16_t *dst, const char *next_src) {
    vh found = {0};
    FOR_FP8(ca_formats[kv_dtype].element, widen_to_halves(BYTE, src, n, dst, next_src, &found))
    for (int64_t i = any_nan(found) ? 0 : n; i < n; i++)
        if ((src[i] & 0x7f) == 0x7f)
            dst[i] = 0x7e00;
}
#endif
