/* SPDX-License-Identifier: Apache-2.0
 * arch:  x86_64
 * unit:  matrix
 * rank:  40
 * flags: -mamx-tile -mamx-bf16
 *
 * TDPBF16PS multiplies 16 x 16 x 32. One starts every 16 cycles and takes 52, so there are four sums, of two tiles of A
 * and two of B. */
#include "kernel/amx/tiles.h"
#include "limits/probe.h"

static const char *missing(void) {
    const char *reason = CA_CPU_MISSING(CA_HAS_amx_tile, CA_HAS_amx_bf16);
    if (!reason)
        ca_cpu_amx_permission(&reason);
    return reason && *reason ? reason : NULL;
}

static void configure(void) {
    _Alignas(64) tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    tile_configure(&config);
}

static float compute(const ca_probe_data *data, int64_t rounds) {
    _Alignas(64) float sum[4][256];
    configure();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, data->bf16, 64);
    _tile_loadd(5, data->bf16 + 512, 64);
    _tile_loadd(6, data->bf16 + 1024, 64);
    _tile_loadd(7, data->bf16 + 1536, 64);
    for (int64_t n = 0; n < rounds; n++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
    _tile_release(); /* a context switch need not save tiles that are not in use */
    return sum[0][0] + sum[1][17] + sum[2][34] + sum[3][255];
}

const ca_probe_row ca_probe_amx = {
    .isa = "amx",
    .what = "TDPBF16PS, 16x16x32",
    .dtypes = 1 << CA_BF16 | 1 << CA_F16 | 1 << CA_F32, /* f16 takes three products for one, f32 six */
    .missing = missing,
    .flops = 4 * 2 * 16 * 16 * 32,
    .compute = compute,
};
