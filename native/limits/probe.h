/* SPDX-License-Identifier: Apache-2.0
 * What a file of native/probe offers, as `const ca_probe_row ca_probe_NAME`: one way to multiply, as fast as
 * this machine can do it from registers, and where it has one of its own, the widest way to read memory. */
#ifndef CPU_ATTN_PROBE_H
#define CPU_ATTN_PROBE_H
#include "cpu/cpu.h"

/* Random, +-[0.5, 1): with zeros or ones for data a core draws less power and runs faster than it ever will. */
typedef struct ca_probe_data {
    _Alignas(64) float f32[1024];
    _Alignas(64) uint16_t bf16[2048];
} ca_probe_data;

typedef struct ca_probe_row {
    const char *isa, *what; /* the isa whose products it limits, the instruction */
    int dtypes;             /* 1 << CA_x for inputs that it can multiply */
    const char *(*missing)(void);
    double flops; /* of a round, on one thread */
    float (*compute)(const ca_probe_data *data, int64_t rounds);
    uint64_t (*read)(const void *data, int64_t bytes); /* bytes: a multiple of 512. NULL: none of its own */
} ca_probe_row;

#define CA_ANY_DTYPE ((1 << CA_DTYPES) - 1)
#endif
