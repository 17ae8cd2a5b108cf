/* SPDX-License-Identifier: Apache-2.0
 * This file has the elements of fp8 and integer caches in tables of 16-bit words, for kernels that unpack by
 * permutation, and returns single elements with their scale. */
#include "layout.h"

#define KINDS (CA_CACHE_DTYPES - CA_DTYPES)
/* words[kind] holds the numbers as binary16, then as bfloat16; bytes[kind] has the bytes of bfloat16, low ones first.
 * Both are written once, when the library loads. */
static uint16_t words[KINDS][2][128];
static uint8_t bytes[KINDS][2][128];

__attribute__((constructor)) static void fill(void) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < 128; i++) {
            const int dtype = CA_DTYPES + kind;
            const float x = ca_number(dtype, ca_is_nibbles(dtype) ? i % 16 : i);
            words[kind][0][i] = ca_to_f16(x);
            words[kind][1][i] = ca_to_bf16(x);
            bytes[kind][0][i] = words[kind][1][i] & 0xff;
            bytes[kind][1][i] = (uint8_t)(words[kind][1][i] >> 8);
        }
}

const uint16_t *ca_quantised_words(int kv_dtype, int bf16) { return words[kv_dtype - CA_DTYPES][bf16]; }

const uint8_t *ca_quantised_bytes(int kv_dtype) { return bytes[kv_dtype - CA_DTYPES][0]; }

ca_format ca_format_of(int kv_dtype) {
    const int scaled = ca_is_scaled(kv_dtype);
    return (ca_format){.bits = ca_formats[kv_dtype].bits,
                       .scaled = scaled,
                       .shared = ca_has_scales(kv_dtype) ? ca_formats[kv_dtype].shared : 0,
                       .largest = scaled ? (int)ca_largest_of(kv_dtype) : 0,
                       .zero = ca_zero_of(kv_dtype),
                       .tried = scaled ? ca_tried(kv_dtype) : 0,
                       .divisor = ca_formats[kv_dtype].divisor};
}
