/* SPDX-License-Identifier: Apache-2.0
 * A file of native/limits/probe offers `const ca_probe_row ca_probe_NAME`: one way to multiply, as fast as this machine
 * can do it from registers, and, where it has one of its own, the widest way to read memory. */
#ifndef CPU_ATTN_PROBE_H
#define CPU_ATTN_PROBE_H
#include "cpu/cpu.h"

/* The data are random, +-[0.5, 1): with zeros or ones a core draws less power and runs faster than it ever will. */
typedef struct ca_probe_data {
    _Alignas(64) float f32[1024];
    _Alignas(64) uint16_t bf16[2048];
} ca_probe_data;

typedef struct ca_probe_row {
    const char *isa, *what; /* the isa whose products it limits, the instruction */
    int dtypes;             /* 1 << ca_dtype for each dtype that it can multiply */
    const char *(*missing)(void);
    double flops; /* of a round, on one thread */
    float (*compute)(const ca_probe_data *data, int64_t rounds);
    uint64_t (*read)(const void *data, int64_t bytes); /* bytes: a multiple of 512; NULL: it has no way of its own */
} ca_probe_row;

#define CA_ANY_DTYPE ((1 << CA_DTYPES) - 1)
#endif
