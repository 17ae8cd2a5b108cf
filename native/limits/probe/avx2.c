/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  20
 * flags: -mavx2 -mfma
 *
 * FP32 FMA multiplies 8 lanes. Two ports times a latency of 4 need 8 sums; there are 9, all that 16 registers leave
 * room for. */
#include "limits/probe.h"
#include <immintrin.h>

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_avx2, CA_HAS_fma); }

#define M 3
#define N 3
#define SUMS (M * N)

static float compute(const ca_probe_data *data, int64_t rounds) {
    __m256 x[M], y[N], sum[M][N];
    for (int i = 0; i < M; i++)
        x[i] = _mm256_load_ps(data->f32 + 8 * i);
    for (int j = 0; j < N; j++)
        y[j] = _mm256_load_ps(data->f32 + 8 * (M + j));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            sum[i][j] = _mm256_setzero_ps();
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                sum[i][j] = _mm256_fmadd_ps(x[i], y[j], sum[i][j]);
    __m256 total = _mm256_setzero_ps();
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            total = _mm256_add_ps(total, sum[i][j]);
    return _mm256_cvtss_f32(total);
}

static uint64_t read(const void *data, int64_t bytes) {
    const __m256i *p = data, *end = p + bytes / 32;
    __m256i sum[8];
    for (int j = 0; j < 8; j++)
        sum[j] = _mm256_setzero_si256();
    for (; p < end; p += 8)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256(p + j));
    for (int j = 1; j < 8; j++)
        sum[0] = _mm256_add_epi64(sum[0], sum[j]);
    return (uint64_t)_mm256_extract_epi64(sum[0], 0) + (uint64_t)_mm256_extract_epi64(sum[0], 1) +
           (uint64_t)_mm256_extract_epi64(sum[0], 2) + (uint64_t)_mm256_extract_epi64(sum[0], 3);
}

const ca_probe_row ca_probe_avx2 = {
    .isa = "avx2",
    .what = "FP32 FMA, 8 lanes",
    .dtypes = CA_ANY_DTYPE,
    .missing = missing,
    .flops = 2 * 8 * SUMS,
    .compute = compute,
    .read = read,
};
