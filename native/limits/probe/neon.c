/* SPDX-License-Identifier: Apache-2.0
 * arch:  aarch64
 * unit:  vector
 * rank:  20
 * flags:
 *
 * FP32 FMA multiplies 4 lanes. Four pipes times a latency of 4 need 16 sums; there are 20. */
#include "limits/probe.h"
#include <arm_neon.h>

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_neon); }

#define M 4
#define N 5
#define SUMS (M * N)

static float compute(const ca_probe_data *data, int64_t rounds) {
    float32x4_t x[M], y[N], sum[M][N];
    for (int i = 0; i < M; i++)
        x[i] = vld1q_f32(data->f32 + 4 * i);
    for (int j = 0; j < N; j++)
        y[j] = vld1q_f32(data->f32 + 4 * (M + j));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            sum[i][j] = vdupq_n_f32(0);
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                sum[i][j] = vfmaq_f32(sum[i][j], x[i], y[j]);
    float32x4_t total = vdupq_n_f32(0);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            total = vaddq_f32(total, sum[i][j]);
    return vaddvq_f32(total);
}

static uint64_t read(const void *data, int64_t bytes) {
    const uint64_t *p = data, *end = p + bytes / 8;
    uint64x2_t sum[8];
    for (int j = 0; j < 8; j++)
        sum[j] = vdupq_n_u64(0);
    for (; p < end; p += 16)
        for (int j = 0; j < 8; j++)
            sum[j] = vaddq_u64(sum[j], vld1q_u64(p + 2 * j));
    for (int j = 1; j < 8; j++)
        sum[0] = vaddq_u64(sum[0], sum[j]);
    return vgetq_lane_u64(sum[0], 0) + vgetq_lane_u64(sum[0], 1);
}

const ca_probe_row ca_probe_neon = {
    .isa = "neon",
    .what = "FP32 FMA, 4 lanes",
    .dtypes = CA_ANY_DTYPE,
    .missing = missing,
    .flops = 2 * 4 * SUMS,
    .compute = compute,
    .read = read,
};
