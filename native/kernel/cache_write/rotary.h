/* SPDX-License-Identifier: Apache-2.0
 * This file applies RMS norm (Zhang and Sennrich, arXiv:1910.07467) and rotary embedding (Su et al., arXiv:2104.09864)
 * to one head, in float32 and in place. */

#ifndef CPU_ATTN_ROTARY_H
#define CPU_ATTN_ROTARY_H

static void norm_head(float *restrict x, int64_t n, const float *restrict weight, float eps) {
    const float factor = 1 / norm_of(x, n, (float)n, eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * factor * weight[i];
}

/* Rotates each pair (a[i * step], b[i * step]) by the angle whose cosine and sine are cos[i] and sin[i]. */
INLINE void rotate_pairs(float *restrict a, float *restrict b, const float *restrict cos, const float *restrict sin,
                         int64_t n, int step) {
    for (int64_t i = 0; i < n; i++) {
        float x = a[i * step], y = b[i * step];
        a[i * step] = x * cos[i] - y * sin[i];
        b[i * step] = y * cos[i] + x * sin[i];
    }
}

static void rotate_head(float *x, const float *cos_sin, int64_t rot_dim, int is_neox) {
    int64_t half = rot_dim / 2;
    if (is_neox)
        rotate_pairs(x, x + half, cos_sin, cos_sin + half, half, 1);
    else
        rotate_pairs(x, x + 1, cos_sin, cos_sin + half, half, 2);
}
#endif
