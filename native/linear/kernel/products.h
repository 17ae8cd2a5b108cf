/* SPDX-License-Identifier: Apache-2.0
 * These are products of small matrices of float32, by FMA or of words (words.h). Every element of a result is one sum
 * in the order of k, whatever tile it falls into, so that its bits depend on nothing but its row and its column. */

#ifdef V_ACCUMULATE
#define LINEAR_FMA(sum, a, b) v_accumulate(sum, a, b)
#else
#define LINEAR_FMA(sum, a, b) v_fma(a, b, sum)
#endif

/* Says what becomes of a product XY, whose rows are multiplied by `by` unless that is NULL: C = XY, C + XY, C - XY, or
 * kept C + factor C + XY with such numbers for each row, which the item has. */
enum linear_mode { LINEAR_SET, LINEAR_ADD, LINEAR_SUB, LINEAR_DECAY };
typedef struct linear_to {
    float *c;
    int64_t ld;
    enum linear_mode mode;
    const float *by;
} linear_to;

/* Makes of a row's product x what `to` asks for, at c. */
INLINE void linear_put(linear_to to, float *c, vf x, float factor, float kept) {
    if (to.mode == LINEAR_SET)
        v_store(c, x);
    else if (to.mode == LINEAR_ADD)
        v_store(c, v_add(v_load_f32(c), x));
    else if (to.mode == LINEAR_SUB)
        v_store(c, v_sub(v_load_f32(c), x));
    else
        v_store(c, v_add(v_fma(v_load_f32(c), v_set1(factor), v_mul(v_load_f32(c), v_set1(kept))), x));
}

/* Both sum up a tile of mr rows from m on by nv vectors of columns from n on. */
INLINE void linear_sum(int mr, int nv, int64_t depth, linear_x x, linear_y y, int64_t m, int64_t n,
                       vf (*acc)[LINEAR_NV]) {
    const float *x_at = x.at + m * x.row, *y_at = y.at + n / CA_LANES * y.group + n % CA_LANES;
    EACH(r, mr) EACH(v, nv) acc[r][v] = v_set1(0);
    for (int64_t k = 0; k < depth; k++) {
        vf by[LINEAR_NV];
        EACH(v, nv) by[v] = v_load_f32(y_at + v * VL / CA_LANES * y.group + k * y.ld + v * VL % CA_LANES);
        EACH(r, mr) {
            const vf a = v_set1(x_at[r * x.row + k * x.column]);
            EACH(v, nv) acc[r][v] = LINEAR_FMA(acc[r][v], a, by[v]);
        }
    }
}
#ifdef INTEGERS
/* Rows of X, and groups of Y, follow one another where they are words. */
INLINE void linear_sum_words(int mr, int nv, int64_t depth, linear_x x, linear_y y, int64_t m, int64_t n,
                             vf (*acc)[LINEAR_NV]) {
    const float *x_at = x.at + m, *y_at = y.at + n;
    vi sum[LINEAR_MR][LINEAR_NV];
    EACH(r, mr) EACH(v, nv) sum[r][v] = v_set1_int(0);
    for (int64_t k = 0; k < depth; k += 2, x_at += x.column, y_at += y.ld) {
        vi by[LINEAR_NV];
        EACH(v, nv) by[v] = v_load_words(y_at + v * VL);
        EACH(r, mr) {
            const vi a = v_set1_words((const void *)(x_at + r));
            EACH(v, nv) sum[r][v] = v_dot_words(sum[r][v], a, by[v]);
        }
    }
    EACH(r, mr) EACH(v, nv) {
        const vf part = v_mul(v_float(sum[r][v]), v_set1(x.scale[m + r] * (1 / 32767.0f / 32767.0f)));
        acc[r][v] = v_mul(part, v_load_f32(y.scale + n + v * VL)); /* the scales' product may be below all floats */
    }
}
#endif

INLINE void linear_tile(int mr, int nv, int64_t depth, linear_x x, linear_y y, int64_t m, int64_t n, linear_to to,
                        const float *factor, const float *kept) {
    vf acc[LINEAR_MR][LINEAR_NV];
#ifdef INTEGERS
    if (x.scale)
        linear_sum_words(mr, nv, depth, x, y, m, n, acc);
    else
#endif
        linear_sum(mr, nv, depth, x, y, m, n, acc);
    if (to.by)
        EACH(r, mr) EACH(v, nv) acc[r][v] = v_mul(acc[r][v], v_set1(to.by[m + r]));
    EACH(r, mr)
    EACH(v, nv) linear_put(to, to.c + (m + r) * to.ld + n + v * VL, acc[r][v], factor[m + r], kept[m + r]);
}

#define LINEAR_TILE(M, N) linear_tile(M, N, depth, x, y, m, n, to, it->factor, it->kept)
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

/* Prefetches the next rows that the item names. */
INLINE void linear_prefetch_rows(linear_ahead *ahead, int rows) {
    for (int i = 0, n = 0; i < LINEAR_AHEAD && n < rows; i++)
        for (; ahead[i].rows && n < rows; n++) {
            const int64_t before = (int64_t)((uintptr_t)ahead[i].at % 64); /* rows may begin within a line */
            prefetch_bytes(ahead[i].at - before, before + ahead[i].bytes);
            ahead[i].at += ahead[i].step;
            ahead[i].rows--;
        }
}

/* Multiplies X [rows, depth] by Y [depth, columns], columns rounded up to 16. lower: of each row only the columns up to
 * the row's own number count, and the others may get anything, or stay. */
static NOINLINE void linear_product(const linear_item *it, int64_t rows, int64_t columns, int64_t depth, linear_x x,
                                    linear_y y, linear_to to, int lower) {
    columns = LINEAR_PAD(columns);
    for (int64_t n = 0; n < columns; n += LINEAR_NV * VL)
        for (int64_t m = 0; m < rows; m += LINEAR_MR) {
            const int64_t mr = ca_min64(LINEAR_MR, rows - m);
            const int64_t end = lower ? ca_min64(columns, LINEAR_PAD(m + mr)) : columns;
            const int64_t nv = ca_min64(LINEAR_NV, (end - n) / VL);
            linear_prefetch_rows(it->ahead, 2); /* there are at least half as many tiles as rows */
            if (nv > 0)
                switch (mr) { LINEAR_HEIGHTS }
        }
}
