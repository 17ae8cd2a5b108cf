/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  30
 * flags: -mavx512f -mfma
 *
 * FP32 FMA multiplies 16 lanes. Two ports times a latency of 4 need 8 sums; there are 20. */
#include "limits/probe.h"
#include <immintrin.h>

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_fma); }

#define M 4
#define N 5
#define SUMS (M * N)

static float compute(const ca_probe_data *data, int64_t rounds) {
    __m512 x[M], y[N], sum[M][N];
    for (int i = 0; i < M; i++)
        x[i] = _mm512_load_ps(data->f32 + 16 * i);
    for (int j = 0; j < N; j++)
        y[j] = _mm512_load_ps(data->f32 + 16 * (M + j));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            sum[i][j] = _mm512_setzero_ps();
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                sum[i][j] = _mm512_fmadd_ps(x[i], y[j], sum[i][j]);
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            total = _mm512_add_ps(total, sum[i][j]);
    return _mm512_reduce_add_ps(total);
}

static uint64_t read(const void *data, int64_t bytes) {
    const char *p = data, *end = p + bytes;
    __m512i sum[8];
    for (int j = 0; j < 8; j++)
        sum[j] = _mm512_setzero_si512();
    for (; p < end; p += 512)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(p + 64 * j));
    for (int j = 1; j < 8; j++)
        sum[0] = _mm512_add_epi64(sum[0], sum[j]);
    return (uint64_t)_mm512_reduce_or_epi64(sum[0]); /* any use of every lane; the signed sum may overflow */
}

const ca_probe_row ca_probe_avx512 = {
    .isa = "avx512",
    .what = "FP32 FMA, 16 lanes",
    .dtypes = CA_ANY_DTYPE,
    .missing = missing,
    .flops = 2 * 16 * SUMS,
    .compute = compute,
    .read = read,
};
