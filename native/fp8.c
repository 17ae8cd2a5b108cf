/* SPDX-License-Identifier: Apache-2.0
 * fp8 as tables of 16-bit words, for kernels that unpack by permutation: of the 128 bytes without a sign. */
#include "cpu_attn.h"
#include "half.h"

static uint16_t words[2][2][128]; /* e4m3, e5m2; binary16, bfloat16: written once, when the library loads */

__attribute__((constructor)) static void fill(void) {
    for (int i = 0; i < 128; i++) {
        const uint32_t bits[2] = {ca_from_e4m3((uint8_t)i), ca_from_e5m2((uint8_t)i)};
        for (int kind = 0; kind < 2; kind++) {
            words[kind][0][i] = ca_to_f16(ca_as_float(bits[kind]));
            words[kind][1][i] = ca_to_bf16(ca_as_float(bits[kind]));
        }
    }
}

const uint16_t *ca_fp8_words(int kv_dtype, int bf16) { return words[kv_dtype == CA_E5M2][bf16]; }
