/* SPDX-License-Identifier: Apache-2.0
 * These are products of small matrices of float32 by FMA. Every element of a result is one sum in the order of k,
 * whatever tile it falls into, so that its bits depend on nothing but its row and its column. */

#ifdef V_ACCUMULATE
#define LINEAR_FMA(sum, a, b) v_accumulate(sum, a, b)
#else
#define LINEAR_FMA(sum, a, b) v_fma(a, b, sum)
#endif

/* Says what becomes of a product XY: C = XY, C + XY, C - XY, or kept C + factor C + XY with such numbers for each row.
 */
enum linear_mode { LINEAR_SET, LINEAR_ADD, LINEAR_SUB, LINEAR_DECAY };

/* Element (i, k) of X is x[i * row + k * column]. Column c of Y lies in group c / 16: element (k, c) is y[c / 16 *
 * group + k * ld + c % 16]; rows that follow one another have group 16. */
typedef struct linear_x {
    const float *at;
    int64_t row, column;
} linear_x;
typedef struct linear_y {
    const float *at;
    int64_t group, ld;
} linear_y;

INLINE void linear_tile(int mr, int nv, int64_t depth, const float *x, int64_t row, int64_t column, const float *y,
                        int64_t group, int64_t ld, float *c, int64_t ld_c, enum linear_mode mode, const float *factor,
                        const float *kept) {
    vf acc[LINEAR_MR][LINEAR_NV];
    EACH(r, mr) EACH(v, nv) acc[r][v] = v_set1(0);
    for (int64_t k = 0; k < depth; k++) {
        vf by[LINEAR_NV];
        EACH(v, nv) by[v] = v_load_f32(y + v * VL / CA_LANES * group + k * ld + v * VL % CA_LANES);
        EACH(r, mr) {
            const vf a = v_set1(x[r * row + k * column]);
            EACH(v, nv) acc[r][v] = LINEAR_FMA(acc[r][v], a, by[v]);
        }
    }
    EACH(r, mr) EACH(v, nv) {
        float *to = c + r * ld_c + v * VL;
        if (mode == LINEAR_SET)
            v_store(to, acc[r][v]);
        else if (mode == LINEAR_ADD)
            v_store(to, v_add(v_load_f32(to), acc[r][v]));
        else if (mode == LINEAR_SUB)
            v_store(to, v_sub(v_load_f32(to), acc[r][v]));
        else
            v_store(to,
                    v_add(v_fma(v_load_f32(to), v_set1(factor[r]), v_mul(v_load_f32(to), v_set1(kept[r]))), acc[r][v]));
    }
}

#define LINEAR_TILE(M, N)                                                                                              \
    linear_tile(M, N, depth, at, x.row, x.column, y_at, y.group, y.ld, c_at, ld_c, mode, factor + m, kept + m)
#define LINEAR_WIDTH(M)                                                                                                \
    switch (nv) {                                                                                                      \
    case LINEAR_NV:                                                                                                    \
        LINEAR_TILE(M, LINEAR_NV);                                                                                     \
        break;                                                                                                         \
        LINEAR_NARROWER(M)                                                                                             \
    }
#if VL == 16
#define LINEAR_NARROWER(M)                                                                                             \
    case 1:                                                                                                            \
        LINEAR_TILE(M, 1);                                                                                             \
        break;                                                                                                         \
    case 2:                                                                                                            \
        LINEAR_TILE(M, 2);                                                                                             \
        break;                                                                                                         \
    case 3:                                                                                                            \
        LINEAR_TILE(M, 3);                                                                                             \
        break;
#else
#define LINEAR_NARROWER(M) /* 16 columns are whole tiles */
#endif
#define LINEAR_HEIGHT(M)                                                                                               \
    case M:                                                                                                            \
        LINEAR_WIDTH(M)                                                                                                \
        break;
#if LINEAR_MR == 6
#define LINEAR_HEIGHTS                                                                                                 \
    LINEAR_HEIGHT(1) LINEAR_HEIGHT(2) LINEAR_HEIGHT(3) LINEAR_HEIGHT(4) LINEAR_HEIGHT(5) LINEAR_HEIGHT(6)
#else
#define LINEAR_HEIGHTS LINEAR_HEIGHT(1) LINEAR_HEIGHT(2)
#endif

INLINE void linear_prefetch_row(linear_ahead *ahead) {
    for (int i = 0; i < LINEAR_AHEAD; i++)
        if (ahead[i].rows) {
            prefetch_bytes(ahead[i].at, ahead[i].bytes);
            ahead[i].at += ahead[i].step;
            ahead[i].rows--;
            break;
        }
}

/* Multiplies X [rows, depth] by Y [depth, columns], columns rounded up to 16. lower: of each row only the columns up to
 * the row's own number count, and the others may get anything, or stay. */
static NOINLINE void linear_product(const linear_item *it, int64_t rows, int64_t columns, int64_t depth, linear_x x,
                                    linear_y y, float *c, int64_t ld_c, enum linear_mode mode, int lower) {
    const float *factor = it->factor, *kept = it->kept;
    columns = LINEAR_PAD(columns);
    for (int64_t n = 0; n < columns; n += LINEAR_NV * VL)
        for (int64_t m = 0; m < rows; m += LINEAR_MR) {
            const int64_t mr = ca_min64(LINEAR_MR, rows - m);
            const int64_t end = lower ? ca_min64(columns, LINEAR_PAD(m + mr)) : columns;
            const int64_t nv = ca_min64(LINEAR_NV, (end - n) / VL);
            const float *at = x.at + m * x.row, *y_at = y.at + n / CA_LANES * y.group + n % CA_LANES;
            float *c_at = c + m * ld_c + n;

            linear_prefetch_row(it->ahead);
            if (nv > 0)
                switch (mr) { LINEAR_HEIGHTS }
        }
}
