/* SPDX-License-Identifier: Apache-2.0
 * These are operands of products. Calls in bfloat16 multiply words of 16 bits where the isa multiplies pairs of them
 * at once (INTEGERS), twice as fast as FMA does: a row of X, and a column of Y, is divided by a scale that makes its
 * Euclidean norm 32767, and rounded to integers. By the inequality of Cauchy and Schwarz no sum overflows 32 bits.
 *
 * A result errs by 1e-5 |x| |y|. Of 128 numbers alike that is 1e-4 of it, where operands in bfloat16 make 2e-3 of it.
 * It is more where numbers of X are small just where those of Y are large. So P w and A w, whose decays follow from the
 * token, are left to FMA, and so are decays of channels, and the rows of a chunk that coarse.h finds.
 *
 * The scale of a row or column that has a NaN or an infinity is one, too, and makes all its results NaN, as sums in
 * float32 become. */

#ifdef INTEGERS
#define LINEAR_PACKED 4 /* vectors of columns that are packed at once */

/* Sums up the squares of columns times `by`. */
INLINE void linear_squares(const float *src, int64_t ld, int64_t rows, int nv, const vf *by, vf *sum) {
    EACH(v, nv) sum[v] = v_set1(0);
    for (int64_t r = 0; r < rows; r++)
        EACH(v, nv) {
            const vf x = v_mul(v_load_f32(src + r * ld + v * VL), by[v]);
            sum[v] = v_fma(x, x, sum[v]);
        }
}

/* Finds the norms of columns as norm / by. by is 1 unless the squares would leave the range of float32. */
INLINE void linear_norms(const float *src, int64_t ld, int64_t rows, int nv, vf *by, vf *norm) {
    const vf zero = v_set1(0), one = v_set1(1), least = v_set1(1e-24f), most = v_set1(1e30f);
    vf outside[LINEAR_PACKED], any = zero;
    EACH(v, nv) by[v] = one;
    linear_squares(src, ld, rows, nv, by, norm);
    EACH(v, nv) {
        outside[v] = v_less(norm[v], most, v_less(norm[v], least, one, zero), one);
        any = v_max(any, outside[v]);
    }
    if (v_any_less(zero, any)) {
        vf top[LINEAR_PACKED], again[LINEAR_PACKED];
        EACH(v, nv) top[v] = v_set1(0x1p-126f);
        for (int64_t r = 0; r < rows; r++)
            EACH(v, nv) top[v] = v_max(v_abs(v_load_f32(src + r * ld + v * VL)), top[v]);
        EACH(v, nv) by[v] = v_less(zero, outside[v], v_div(one, top[v]), one);
        linear_squares(src, ld, rows, nv, by, again);
        EACH(v, nv) norm[v] = v_less(zero, outside[v], v_max(one, again[v]), norm[v]); /* NaN stays */
    }
    EACH(v, nv) norm[v] = v_sqrt(norm[v]);
}

INLINE void linear_pack_columns(const float *src, int64_t ld, int64_t rows, int nv, float *words, float *scale) {
    vf by[LINEAR_PACKED], norm[LINEAR_PACKED];
    linear_norms(src, ld, rows, nv, by, norm);
    EACH(v, nv) {
        v_store(scale + v * VL, v_div(norm[v], by[v]));
        by[v] = v_mul(by[v], v_div(v_set1(32767), norm[v]));
    }
    for (int64_t r = 0; r < rows; r += 2)
        EACH(v, nv) {
            const float *at = src + r * ld + v * VL;
            const vi even = v_integers(v_mul(v_load_f32(at), by[v]));
            const vi odd = r + 1 < rows ? v_integers(v_mul(v_load_f32(at + ld), by[v])) : v_set1_int(0);
            v_store_words(words + r / 2 * ld + v * VL, v_pair_words(even, odd));
        }
}

/* Packs columns, rounded up to 16, of a matrix whose rows are ld apart; so are rows of pairs. */
static NOINLINE void linear_pack(const float *src, int64_t ld, int64_t rows, int64_t columns, float *words,
                                 float *scale) {
    int64_t c = 0;
    columns = LINEAR_PAD(columns);
    for (; c + LINEAR_PACKED * VL <= columns; c += LINEAR_PACKED * VL)
        linear_pack_columns(src + c, ld, rows, LINEAR_PACKED, words + c, scale + c);
    for (; c < columns; c += VL)
        linear_pack_columns(src + c, ld, rows, 1, words + c, scale + c);
}
#else
static void linear_pack(const float *src, int64_t ld, int64_t rows, int64_t columns, float *words, float *scale) {
    (void)src, (void)ld, (void)rows, (void)columns, (void)words, (void)scale;
}
#endif

/* Gives an X without its rows before `first`. */
static linear_x linear_x_from(linear_x x, int64_t first) {
    return (linear_x){x.at + first * x.row, x.row, x.column, x.scale ? x.scale + first : NULL};
}

/* Transposes rows [n][kp] to [kp][64], in it->keys. */
static void linear_turn_rows(const linear_item *it, const float *rows, int64_t n) {
    for (int64_t g = 0; g < n; g += CA_LANES)
        linear_transpose(rows + g * it->kp, it->kp, CA_LANES, it->kp, it->keys + g, CA_CHUNK);
}

/* Gives rows [n][Dk] as an X. */
static linear_x linear_rows(const linear_item *it, const float *rows, int64_t n, linear_packed to) {
    if (!it->words)
        return (linear_x){rows, it->kp, 1, NULL};
    linear_turn_rows(it, rows, n);
    linear_pack(it->keys, CA_CHUNK, it->dk, n, to.words, to.scale);
    return (linear_x){to.words, 1, CA_CHUNK, to.scale};
}
/* Gives rows [n][Dk], of which `packed` holds an X, as the columns of a Y. */
static linear_y linear_rows_as_columns(const linear_item *it, const float *rows, int64_t n, linear_packed packed) {
    if (it->words)
        return (linear_y){packed.words, CA_LANES, CA_CHUNK, packed.scale};
    linear_turn_rows(it, rows, n);
    return (linear_y){it->keys, CA_LANES, CA_CHUNK, NULL};
}
/* Gives the transpose of rows [n][Dk] as an X. */
static linear_x linear_rows_turned(const linear_item *it, const float *rows, int64_t n, linear_packed to) {
    if (!it->words)
        return (linear_x){rows, 1, it->kp, NULL};
    linear_pack(rows, it->kp, n, it->dk, to.words, to.scale);
    return (linear_x){to.words, 1, it->kp, to.scale};
}
/* Gives rows [n][Dv] as a Y. */
static linear_y linear_columns(const linear_item *it, const float *rows, int64_t n, linear_packed to) {
    if (!it->words)
        return (linear_y){rows, CA_LANES, it->vp, NULL};
    linear_pack(rows, it->vp, n, it->dv, to.words, to.scale);
    return (linear_y){to.words, CA_LANES, it->vp, to.scale};
}
