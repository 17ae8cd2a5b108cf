/* SPDX-License-Identifier: Apache-2.0
 * These functions convert float32 from and to IEEE binary16 and bfloat16 by integer arithmetic. They round to nearest
 * even. Subnormal numbers of binary16 are kept, whatever the mode of cpu/float_mode.h makes of float32's. */
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

/* Exponent and fraction move up by 13 bits, and the exponent gets float32's bias. A subnormal fraction behind the
 * exponent of 2^-14 reads as the number plus 2^-14. */
static inline float ca_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00)
        return ca_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400)
        return ca_as_float(sign | ca_as_bits(ca_as_float(0x38800000 | rest << 13) - 0x1p-14f));
    return ca_as_float(sign | ((rest << 13) + (112 << 23)));
}
/* Below 2^-14 the unit of binary16 is 2^-24, which is also the float32 unit of 0.5: adding 0.5 rounds there. */
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

/* Returns the bits of the largest magnitude of n numbers. Infinity is above all numbers, and NaN above infinity. */
static inline uint32_t ca_top_bits(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = ca_as_bits(x[i]) & 0x7fffffff;
        top = u > top ? u : top;
    }
    return top;
}
/* Returns the integer nearest to x, ties to even, for |x| < 2^22. Adding 1.5 * 2^23 rounds, because its unit is 1. */
static inline int32_t ca_nearest(float x) { return (int32_t)(ca_as_bits(x + 0x1.8p23f) - ca_as_bits(0x1.8p23f)); }
#endif
