/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  vector
 * rank:  31
 * flags: -mavx512f -mavx512bf16
 *
 * VDPBF16PS forms two products in each of 16 lanes. It has half the speed of FP32 FMA on Intel's cores, and twice that
 * on Zen 4 and 5. */
#include "limits/probe.h"
#include <immintrin.h>

static const char *missing(void) { return CA_CPU_MISSING(CA_HAS_avx512f, CA_HAS_avx512_bf16); }

#define M 4
#define N 5
#define SUMS (M * N)

static __m512bh load(const uint16_t *p) { return (__m512bh)_mm512_load_si512(p); }

static float compute(const ca_probe_data *data, int64_t rounds) {
    __m512bh x[M], y[N];
    __m512 sum[M][N];
    for (int i = 0; i < M; i++)
        x[i] = load(data->bf16 + 32 * i);
    for (int j = 0; j < N; j++)
        y[j] = load(data->bf16 + 32 * (M + j));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            sum[i][j] = _mm512_setzero_ps();
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                sum[i][j] = _mm512_dpbf16_ps(sum[i][j], x[i], y[j]);
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            total = _mm512_add_ps(total, sum[i][j]);
    return _mm512_reduce_add_ps(total);
}

const ca_probe_row ca_probe_avx512_bf16 = {
    .isa = "avx512",
    .what = "VDPBF16PS, 16 lanes",
    .dtypes = 1 << CA_BF16,
    .missing = missing,
    .flops = 2 * 32 * SUMS,
    .compute = compute,
};
