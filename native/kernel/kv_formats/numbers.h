/* SPDX-License-Identifier: Apache-2.0
 * Elements of narrow caches (cache/formats.h) as floats, VL at a time, in the words of simd/vocabulary.md. */
#ifndef CPU_ATTN_NUMBERS_H
#define CPU_ATTN_NUMBERS_H
#include "cache/formats.h"

#if VL > 1
typedef int16_t vw __attribute__((vector_size(2 * VL)));
typedef uint8_t vw_bytes __attribute__((vector_size(VL)));
#else
typedef int16_t vw;
#endif

/* n bytes, each the upper half of a word. */
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

/* Upper bytes of words as numbers; any NaN for NaN. */
INLINE vf v_number(int element, vw x) {
    const vf half = floats_of_halves((vw)CA_HALF(ca_elements[element].shift, x));
    const vf number = v_mul(half, v_set1(ca_elements[element].unit)), most = v_set1(ca_elements[element].largest);
    return ca_elements[element].nan ? v_less(most, v_abs(number), v_set1(NAN), number) : number;
}
/* Their lower (shift 0) or upper (4) halves. 0x6400 is 1024, whose last bit is worth 1. */
INLINE vf v_nibble(float zero, vw x, int shift) {
    return v_sub(floats_of_halves((vw)((x >> (8 + shift) & 15) | 0x6400)), v_set1(1024 + zero));
}
#endif
