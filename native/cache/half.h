/* SPDX-License-Identifier: Apache-2.0
 * float32 from and to IEEE binary16, bfloat16 and fp8 (e4m3 without infinities, e5m2: arXiv:2209.05433), by integers:
 * nearest even, subnormals kept; to fp8 saturating, infinities too. */
#ifndef CPU_ATTN_HALF_H
#define CPU_ATTN_HALF_H
#include "cpu_attn.h"
#include <stdint.h>
#include <string.h>

static inline float ca_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t ca_as_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float ca_from_bf16(uint16_t h) { return ca_as_float((uint32_t)h << 16); }
static inline uint16_t ca_to_bf16(float f) {
    uint32_t u = ca_as_bits(f);
    if (f != f)
        return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Exponent and fraction moved up by 13 bits read as 2^-112 times the value, subnormals included. */
static inline float ca_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00)
        return ca_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return ca_as_float(sign | ca_as_bits(ca_as_float(rest << 13) * 0x1p112f));
}
/* Below 2^-14 the unit is 2^-24: adding 0.5, whose own unit that is, rounds there. */
static inline uint16_t ca_to_f16(float f) {
    uint32_t u = ca_as_bits(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000)
        return (uint16_t)(sign | (ca_as_bits(ca_as_float(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10)));
}

/* fp8 to the bits of a float. e4m3's unit below 2^-6, where its exponent bits are 0, is 2^-9. */
static inline uint32_t ca_from_e4m3(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80) << 24, rest = b & 0x7f;
    uint32_t bits = rest < 8 ? ca_as_bits((float)(int32_t)rest * 0x1p-9f) : (rest << 20) + (120u << 23);
    return sign | (rest == 0x7f ? 0x7fc00000 : bits);
}
/* The upper half of a binary16: its unit below 2^-14 is 2^-16. */
static inline uint32_t ca_from_e5m2(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80) << 24, rest = b & 0x7f;
    uint32_t bits = rest < 4 ? ca_as_bits((float)(int32_t)rest * 0x1p-16f) : (rest << 21) + (112u << 23);
    return sign | (rest > 0x7c ? 0x7fc00000 : rest == 0x7c ? 0x7f800000 : bits);
}
/* Of either, as a float. */
static inline float ca_from_fp8(int dtype, uint8_t b) {
    return ca_as_float(dtype == CA_E4M3 ? ca_from_e4m3(b) : ca_from_e5m2(b));
}
/* The largest magnitude of n numbers, as its bits: infinity above all numbers, NaN above that. */
static inline uint32_t ca_top_bits(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = ca_as_bits(x[i]) & 0x7fffffff;
        top = u > top ? u : top;
    }
    return top;
}
/* The integer nearest to x, |x| < 2^22, ties to even: 1 is the unit of 1.5 * 2^23. */
static inline int32_t ca_nearest(float x) { return (int32_t)(ca_as_bits(x + 0x1.8p23f) - ca_as_bits(0x1.8p23f)); }
/* To `bits` of fraction, exponents from `least` on (of a float, as their bits): adding 2^23 units rounds, a unit being
 * that of the exponent or, where numbers are subnormal, of the least. */
static inline uint8_t ca_to_fp8(float f, int bits, uint32_t least, float most) {
    uint32_t u = ca_as_bits(f), rest = u & 0x7fffffff;
    float x = ca_as_float(rest);
    x = x < most ? x : most;
    uint32_t e = ca_as_bits(x) & 0x7f800000;
    e = e > least ? e : least;
    uint32_t unit = e + ((23u - (uint32_t)bits) << 23), n = ca_as_bits(x + ca_as_float(unit)) - unit;
    return (uint8_t)((u >> 24 & 0x80) | (rest > 0x7f800000 ? 0x7f : ((e - least) >> (23 - bits)) + n));
}
static inline uint8_t ca_to_e4m3(float f) { return ca_to_fp8(f, 3, 121u << 23, 448); }
static inline uint8_t ca_to_e5m2(float f) { return ca_to_fp8(f, 2, 113u << 23, 57344); }
#endif
