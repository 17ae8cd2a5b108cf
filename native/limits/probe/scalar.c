/* SPDX-License-Identifier: Apache-2.0
 * arch:  any
 * unit:  scalar
 * rank:  0
 * flags:
 *
 * This is what the compiler makes of plain C: on x86-64, a multiplication and an addition on four lanes of SSE2. */
#include "limits/probe.h"

static const char *missing(void) { return NULL; }

/* There are 32 sums, eight registers of four, since an addition takes 4 cycles and two start in each. */
#define SUMS 32

static float compute(const ca_probe_data *data, int64_t rounds) {
    float sum[SUMS] = {0}, total = 0;
    for (int64_t n = 0; n < rounds; n++) {
        const float *x = data->f32 + n % 16 * SUMS; /* x is the same in every round, so the compiler multiplies once */
        for (int i = 0; i < SUMS; i++)
            sum[i] += x[i] * data->f32[n % 16];
    }
    for (int i = 0; i < SUMS; i++)
        total += sum[i];
    return total;
}

static uint64_t read(const void *data, int64_t bytes) {
    const uint64_t *p = data;
    uint64_t sum[8] = {0};
    for (int64_t i = 0; i < bytes / 8; i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] += p[i + j];
    for (int j = 1; j < 8; j++)
        sum[0] += sum[j];
    return sum[0];
}

const ca_probe_row ca_probe_scalar = {
    .isa = "scalar",
    .what = "plain C",
    .dtypes = CA_ANY_DTYPE,
    .missing = missing,
    .flops = 2 * SUMS,
    .compute = compute,
    .read = read,
};
