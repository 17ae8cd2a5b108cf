/* SPDX-License-Identifier: Apache-2.0
 * This file turns elements of quantised caches (cache/formats.h) into floats and back, VL at a time, in the words of
 * simd/vocabulary.md. */
#ifndef CPU_ATTN_NUMBERS_H
#define CPU_ATTN_NUMBERS_H
#include "cache/layout.h"

#if VL > 1
typedef int16_t vw __attribute__((vector_size(2 * VL)));
typedef uint8_t vw_bytes __attribute__((vector_size(VL)));
typedef int32_t vq __attribute__((vector_size(4 * VL)));
typedef uint32_t vq_unsigned __attribute__((vector_size(4 * VL)));
#else
typedef int16_t vw;
typedef int32_t vq;
typedef uint32_t vq_unsigned;
#endif

/* Loads n bytes as the upper halves of words. */
INLINE vw upper_bytes(const uint8_t *p, int n) {
#if VL > 1
    vw_bytes x = {0};
    memcpy(&x, p, (size_t)n);
    return __builtin_convertvector(x, vw) << 8;
#else
    return n ? (vw)(*p << 8) : 0;
#endif
}
INLINE vf floats_of_halves(vw x) {
    uint16_t halves[VL];
    memcpy(halves, &x, sizeof halves);
    return v_load_f16(halves);
}

/* Turns the upper bytes of words into numbers; a NaN may become any NaN. */
INLINE vf v_number(int element, vw x) {
    const vf half = floats_of_halves((vw)CA_HALF(ca_elements[element].shift, x));
    const vf number = v_mul(half, v_set1(ca_elements[element].unit)), most = v_set1(ca_elements[element].largest);
    return ca_elements[element].nan ? v_less(most, v_abs(number), v_set1(NAN), number) : number;
}
/* Turns the lower (shift 0) or the upper (shift 4) nibbles of these bytes into numbers. 0x6400 is 1024 in binary16,
 * where 1 is the unit in the last place. */
INLINE vf v_nibble(int zero, vw x, int shift) {
#if VL > 1
    return v_sub(floats_of_halves((vw)((x >> (8 + shift) & 15) | 0x6400)), v_set1((float)(1024 + zero)));
#else
    return (float)((x >> (8 + shift) & 15) - zero);
#endif
}

/* ---- elements of 5 and 6 bits ---- */

/* Loads 16 bytes CHUNKS times, since the lanes of each copy will be shifted by other amounts. */
#define CHUNKS (VL >= 4 ? VL / 4 : 1)
typedef uint32_t chunk __attribute__((vector_size(16)));
typedef uint32_t chunks __attribute__((vector_size(16 * CHUNKS)));
INLINE chunks repeated(const uint8_t *src) {
    chunk x;
    chunks all;
    memcpy(&x, src, sizeof x);
#if CHUNKS == 4
    all = (chunks){x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3]};
#elif CHUNKS == 2
    all = (chunks){x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3]};
#else
    all = x;
#endif
    return all;
}

/* Unpacks 128 elements to bytes of int8. One shift of 32-bit words brings a bit of every byte to its place; bits that
 * come from a neighbouring byte are masked off. */
INLINE void int8_of_bits(int bits, const uint8_t *src, uint8_t *dst) {
    chunks plane[2], x, half;
    EACH(j, bits - 4) plane[j] = repeated(src + 64 + 16 * j);
    EACH(i, 8 / CHUNKS) {
        memcpy(&x, src + i * CHUNKS % 4 * 16, sizeof x);
        half = (i * CHUNKS < 4 ? x : x >> 4) & 0x0f0f0f0f;
        EACH(j, bits - 4) {
            const int to = ca_plane_bit(bits, 4 + j);
            chunks left, right;
            EACH(k, 4 * CHUNKS) {
                const int shift = to - i * CHUNKS - k / 4;
                left[k] = shift > 0 ? (uint32_t)shift : 0;
                right[k] = shift < 0 ? (uint32_t)-shift : 0;
            }
            half |= (plane[j] << left >> right) & (0x01010101u << to);
        }
        memcpy(dst + 16 * CHUNKS * i, &half, sizeof half);
    }
}
/* Unpacks n elements of 5 or 6 bits, a multiple of 128, to bytes of int8. */
static void int8_of_packed(int dtype, const uint8_t *src, int64_t n, uint8_t *dst, const char *next_src) {
    const int64_t step = ca_bytes_of(dtype, CA_NIBBLES);
    for (int64_t i = 0; i < n; i += CA_NIBBLES, src += step, dst += CA_NIBBLES, next_src += step) {
        __builtin_prefetch(next_src, 0, 2);
        __builtin_prefetch(next_src + 64, 0, 2);
        if (ca_formats[dtype].bits == 5)
            int8_of_bits(5, src, dst);
        else
            int8_of_bits(6, src, dst);
    }
}

/* ---- on the way into a cache ---- */

/* Adding 1.5 * 2^23, whose unit in the last place is 1, rounds to the nearest whole number, ties to even (ca_nearest),
 * which is then in the lowest bits. */
INLINE vf v_whole_bits(vf x, vf least, vf largest) { return v_add(v_min(v_max(x, least), largest), v_set1(0x1.8p23f)); }

/* Stores the first n bytes of x, but at most VL. */
INLINE void put_some_bytes(uint8_t *dst, vf x, int64_t n) {
    uint8_t bytes[VL];
    v_put_bytes(bytes, x);
    memcpy(dst, bytes, (size_t)(n < VL ? n : VL));
}

/* Turns integers in -128..127 into sign and magnitude or, if zero is not 0, adds zero to them. */
INLINE void put_signs(int zero, uint8_t *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int8_t y = (int8_t)x[i];
        x[i] = (uint8_t)(zero ? y + zero : (y < 0 ? -y : y) | (y & 0x80));
    }
}

/* Turns numbers into bytes of fp8, to nearest even, saturating, infinities too. Adding 2^23 units rounds. The unit is
 * that of the number's exponent or, for a subnormal number, of the least exponent, which is 2^-14 in binary16. */
INLINE vf v_fp8(int element, vf f) {
    const int fraction = 2 + ca_elements[element].shift;
    const float least = ca_elements[element].unit * 0x1p-14f;
    const vf x = v_min(v_abs(f), v_set1(ca_elements[element].largest));
    vq u, e, n, first;
    memcpy(&e, &x, sizeof e);
    e &= 0x7f800000;
    vf power, unit;
    memcpy(&power, &e, sizeof e);
    power = v_max(power, v_set1(least));
    memcpy(&e, &power, sizeof e);
    const vq above = e + ((23 - fraction) << 23);
    memcpy(&unit, &above, sizeof unit);
    unit = v_add(x, unit);
    memcpy(&n, &unit, sizeof n);
    memcpy(&u, &f, sizeof u);
    const vf low = v_set1(least);
    memcpy(&first, &low, sizeof first);
    const vq nan = (0x7f800000 - (u & 0x7fffffff)) >> 31;
    n = ((e - first) >> (23 - fraction)) + (n - above);
    n = (n & ~nan) | (nan & 0x7f) | (u >> 24 & 0x80);
    memcpy(&f, &n, sizeof f);
    return f;
}
#endif
