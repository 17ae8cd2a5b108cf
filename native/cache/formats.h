/* SPDX-License-Identifier: Apache-2.0
 * This file says what caches hold: it has a row for each dtype, and converts elements of fp8 and integers to numbers. A
 * format that has the elements of another one, but scales of its own, needs only a row. */
#ifndef CPU_ATTN_FORMATS_H
#define CPU_ATTN_FORMATS_H
#include "half.h"

enum ca_element { CA_AS_IT_IS, CA_AS_E4M3, CA_AS_E5M2, CA_AS_INT8, CA_AS_INT4 };

/* A byte is a sign and 7 bits. The binary16 of this sign, `shift` zeros and these bits is the number divided by `unit`,
 * for subnormals, too:
 *   e5m2  seeeeemm00000000    e4m3  s0eeeemmm0000000    int8, which is sign and magnitude  s00000mmmmmmm000
 * int6 and int5 are bytes of int8 that need fewer bits of the magnitude; layout.h packs them. A nibble is the number
 * plus `zero`; halves.h makes a byte of e5m2 of it first. */
static const struct {
    int shift;
    float unit;
    int nan;       /* 0x7f is NaN, although its binary16 is a number */
    int zero;      /* nibble that stands for 0 */
    float largest; /* largest number that is written in fp8 */
} ca_elements[] = {[CA_AS_IT_IS] = {.unit = 1},
                   [CA_AS_E4M3] = {1, 0x1p8f, 1, 0, 448},
                   [CA_AS_E5M2] = {0, 1, 0, 0, 57344},
                   [CA_AS_INT8] = {.shift = 5, .unit = 0x1p21f},
                   [CA_AS_INT4] = {.unit = 1, .zero = 8}};

/* These make `call` with the element of a byte as a constant BYTE, so that each element has a loop of its own. FOR_FP8
 * has the elements without scales alone. */
#define BYTE_CASE(element, call)                                                                                       \
    case element: {                                                                                                    \
        enum { BYTE = element };                                                                                       \
        call;                                                                                                          \
        break;                                                                                                         \
    }
#define FP8_CASES(call) BYTE_CASE(CA_AS_E4M3, call) BYTE_CASE(CA_AS_E5M2, call)
#define FOR_FP8(element, call)                                                                                         \
    switch (element) { FP8_CASES(call) }
#define FOR_BYTE(element, call)                                                                                        \
    switch (element) { FP8_CASES(call) BYTE_CASE(CA_AS_INT8, call) }

#define CA_TOKEN (-1)
#define CA_SHARED 32 /* elements that share a scale are a multiple of this */
/* X(dtype, bits, element, shared, divisor) says of a dtype how many bits an element has, how it is a number, how many
 * elements of a token share a scale (0: they have no scale, CA_TOKEN: all of them share one), and the least of the
 * CA_TRIED numbers, half apart, by which the largest magnitude is divided for scales to try (8 bits try it alone). */
#define CA_TRIED 4
#define CA_FORMATS(X)                                                                                                  \
    X(CA_F32, 32, CA_AS_IT_IS, 0, 0)                                                                                   \
    X(CA_F16, 16, CA_AS_IT_IS, 0, 0)                                                                                   \
    X(CA_BF16, 16, CA_AS_IT_IS, 0, 0)                                                                                  \
    X(CA_E4M3, 8, CA_AS_E4M3, 0, 0)                                                                                    \
    X(CA_E5M2, 8, CA_AS_E5M2, 0, 0)                                                                                    \
    X(CA_I8, 8, CA_AS_INT8, CA_TOKEN, 127)                                                                             \
    X(CA_I6, 6, CA_AS_INT8, CA_TOKEN, 31)                                                                              \
    X(CA_I5, 5, CA_AS_INT8, CA_TOKEN, 15)                                                                              \
    X(CA_I4, 4, CA_AS_INT4, 32, 7)                                                                                     \
    X(CA_I4_TOKEN, 4, CA_AS_INT4, CA_TOKEN, 8)

static const struct {
    int bits, size; /* size: bytes of an element, 1 where it has fewer bits */
    int element, shared;
    float divisor;
} ca_formats[CA_CACHE_DTYPES] = {
#define ROW(dtype, bits, element, shared, divisor)                                                                     \
    [dtype] = {bits, (bits) < 8 ? 1 : (bits) / 8, element, shared, divisor},
    CA_FORMATS(ROW)
#undef ROW
};

static inline int ca_is_quantised(int dtype) { return dtype >= CA_DTYPES; }
static inline int ca_is_nibbles(int dtype) { return ca_formats[dtype].bits == 4; }
/* Returns whether an element shares its byte, or lies in several. */
static inline int ca_is_packed(int dtype) { return ca_formats[dtype].bits < 8; }
/* Returns whether elements have 5 or 6 bits, which become bytes of int8 before anything else is done with them. */
static inline int ca_is_short_int8(int dtype) { return ca_is_packed(dtype) && !ca_is_nibbles(dtype); }
static inline int ca_is_scaled(int dtype) { return ca_formats[dtype].shared != 0; }
/* Returns whether a token may have several scales. */
static inline int ca_has_scales(int dtype) { return ca_formats[dtype].shared > 0; }
static inline int ca_dtype_size(int dtype) { return ca_formats[dtype].size; }
static inline int64_t ca_bytes_of(int dtype, int64_t elements) { return elements * ca_formats[dtype].bits / 8; }
/* Returns how many elements of a token share a scale. */
static inline int64_t ca_scale_elements(int dtype, int64_t head_size) {
    return ca_has_scales(dtype) ? ca_formats[dtype].shared : head_size;
}
static inline int ca_zero_of(int dtype) { return ca_elements[ca_formats[dtype].element].zero; }
/* Returns the largest integer of a dtype with scales. */
static inline float ca_largest_of(int dtype) { return (float)((1 << (ca_formats[dtype].bits - 1)) - 1); }
/* Returns the least integer of a dtype with scales. */
static inline float ca_least_of(int dtype) {
    return ca_zero_of(dtype) ? (float)-ca_zero_of(dtype) : -ca_largest_of(dtype);
}

/* Returns how many scales are tried. */
static inline int ca_tried(int dtype) { return ca_is_packed(dtype) ? CA_TRIED : 1; }

/* Makes a binary16 of a byte in the upper half of a signed word, or of each word of a vector, whatever the lower half
 * holds. */
#define CA_HALF(shift, x) ((x) >> (int16_t)(shift) & (int16_t)(-0x8000 | 0x7f00 >> (shift)))

/* Returns the number that a byte, or a nibble, stands for, without its scale. */
static inline float ca_number(int dtype, int x) {
    const int element = ca_formats[dtype].element, byte = (int16_t)(x << 8);
    if (ca_is_nibbles(dtype))
        return (float)(x - ca_zero_of(dtype));
    if (ca_elements[element].nan && (x & 0x7f) == 0x7f)
        return ca_as_float(0x7fc00000);
    return ca_from_f16((uint16_t)CA_HALF(ca_elements[element].shift, byte)) * ca_elements[element].unit;
}
#endif
