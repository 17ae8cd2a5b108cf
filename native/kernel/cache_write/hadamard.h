/* SPDX-License-Identifier: Apache-2.0
 * This file rotates heads for a cache, by R = H S with S = diag(+1 or -1) and H a Walsh-Hadamard matrix over the square
 * root of its size. R is orthogonal: R q . R k = q . k, and R^T takes a sum of rotated values back. Each element of R x
 * is a sum of all elements of x, so one channel that is far larger than the others, as a model's keys have it, spreads
 * over the head, and a scale fits all of it (Ashkboos et al., QuaRot, arXiv:2404.00456). Without S a row that is nearly
 * constant would gather in one element.
 *
 * If the head size is no power of two, the head is cut into blocks whose sizes are, the largest first: 80 becomes 64
 * and
 * 16. Each sum of a level has the same operands in every vector width, so R x has the same bits on every isa. */
#ifndef CPU_ATTN_HADAMARD_H
#define CPU_ATTN_HADAMARD_H

#define LANE_LEVELS (VL == 16 ? 4 : VL == 8 ? 3 : VL == 4 ? 2 : 0)

/* Does the levels within a vector, in blocks of n elements: lanes i and i ^ h become their sum and their difference. */
INLINE vf hadamard_lanes(vf x, int64_t n) {
    static const float signs[4][16] = {{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                                       {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                                       {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                                       {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
    EACH(i, LANE_LEVELS) if (1 << i < n) x = v_fma(x, v_load_f32(signs[i]), v_exchange(x, 1 << i));
    return x;
}

/* These load a vector, or n elements, of float32 or bfloat16; the dtype is a constant. Float16 is left out, since not
 * every file can load it. */
INLINE vf load_of(int dtype, const void *x, int64_t i) {
    return dtype == CA_F32 ? v_load_f32((const float *)x + i) : v_load_bf16((const uint16_t *)x + i);
}
INLINE vf loadn_of(int dtype, const void *x, int64_t i, int n) {
    return dtype == CA_F32 ? v_loadn_f32((const float *)x + i, n) : v_loadn_bf16((const uint16_t *)x + i, n);
}

/* Does the first levels of nv vectors, a power of two, of src from element `at` on, in registers: the levels within
 * vectors, then those between them. signs: those of S, or NULL. */
#define PANEL (VL == 16 ? 16 : 8)
INLINE void hadamard_panel(int dtype, const void *src, int64_t at, float *x, int nv, const float *signs, vf factor) {
    vf y[PANEL];
    EACH(i, nv) {
        y[i] = v_mul(load_of(dtype, src, at + i * VL), factor);
        if (signs)
            y[i] = v_mul(y[i], v_load_f32(signs + i * VL));
        y[i] = hadamard_lanes(y[i], VL);
    }
    EACH(level, 4) {
        EACH(i, nv / 2) {
            const int h = 1 << level, low = i / h * 2 * h + i % h;
            if (h < nv) {
                const vf a = y[low], b = y[low + h];
                y[low] = v_add(a, b);
                y[low + h] = v_sub(a, b);
            }
        }
    }
    EACH(i, nv) v_store(x + at + i * VL, y[i]);
}

/* Does the levels between panels, two at a time while there are two. */
static void hadamard_panels(float *x, int64_t n) {
    int64_t h = PANEL * VL;
    for (; 4 * h <= n; h *= 4)
        for (int64_t i = 0; i < n; i += 4 * h)
            for (float *p = x + i; p < x + i + h; p += VL) {
                const vf a = v_load_f32(p), b = v_load_f32(p + h), c = v_load_f32(p + 2 * h), d = v_load_f32(p + 3 * h);
                const vf e = v_add(a, b), f = v_sub(a, b), g = v_add(c, d), k = v_sub(c, d);
                v_store(p, v_add(e, g));
                v_store(p + h, v_add(f, k));
                v_store(p + 2 * h, v_sub(e, g));
                v_store(p + 3 * h, v_sub(f, k));
            }
    for (float *p = x; 2 * h <= n && p < x + h; p += VL) {
        const vf a = v_load_f32(p), b = v_load_f32(p + h);
        v_store(p, v_add(a, b));
        v_store(p + h, v_sub(a, b));
    }
}

/* Transforms the block of n elements, a power of two, that begins at element `at` of src and of x. */
#define FACTOR_OF(n) v_set1((float)(1 / sqrt((double)(n))))
#define PANEL_CASE(nv)                                                                                                 \
    case (nv) * VL:                                                                                                    \
        hadamard_panel(dtype, src, at, x, nv, signs, FACTOR_OF((nv) * VL));                                            \
        return;
INLINE void hadamard_block(int dtype, const void *src, int64_t at, float *x, int64_t n, const float *signs) {
    switch (n) { PANEL_CASE(1) PANEL_CASE(2) PANEL_CASE(4) PANEL_CASE(8) }
    const vf factor = FACTOR_OF(n);
    if (n < VL) {
        vf y = v_mul(loadn_of(dtype, src, at, (int)n), factor);
        if (signs)
            y = v_mul(y, v_loadn_f32(signs, (int)n));
        v_storen_f32(x + at, hadamard_lanes(y, n), (int)n);
        return;
    }
    for (int64_t i = 0; i < n; i += PANEL * VL)
        hadamard_panel(dtype, src, at + i, x, PANEL, signs ? signs + i % CA_SIGNS : NULL, factor);
    hadamard_panels(x + at, n);
}
#undef PANEL_CASE

/* Stores R src, or R^T src if `back`, in x, which may be src. src has n elements of a dtype. */
INLINE void hadamard_of(int dtype, const void *src, float *x, int64_t n, int back) {
    for (int64_t at = 0, size; at < n; at += size) {
        size = (int64_t)1 << (63 - __builtin_clzll((unsigned long long)(n - at)));
        hadamard_block(dtype, src, at, x, size, back ? NULL : ca_signs + at % CA_SIGNS);
    }
    for (int64_t i = 0; back && i < n; i++)
        x[i] *= ca_signs[i % CA_SIGNS];
}
static void hadamard(float *x, int64_t n, int back) { hadamard_of(CA_F32, x, x, n, back); }
#endif
