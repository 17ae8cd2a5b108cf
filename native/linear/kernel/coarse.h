/* SPDX-License-Identifier: Apache-2.0
 * These functions say where words are too coarse (words.h). A product of words errs by about LINEAR_STEP_OF_WORDS |x|
 * |y|, however small x^T y is: with one channel of q 1000 times the others, where keys are 0, the error is that of the
 * large channel and the product that of the others. So sums over the chunk's rows up to each row are compared:
 *
 *     outputs   |q_i|^2 H_i          with |o_i|^2            H_i: a_i^2 H_(i-1) + |k_i|^2 |w_i|^2, from |S|^2 on
 *     w         |e_i|^2 a_i^2 H_(i-1) with |w_i|^2 + |beta v_i|^2
 *     states    |K|^2 |W|^2          with the sum of |k_j|^2 |w_j|^2, W with the decays that follow
 *
 * Each left side is at most that many times the right one where nothing is large without being read; of vectors alike
 * it is the number of their elements. From the first row on that exceeds its bound, the chunk's rows go by FMA, and so
 * do the states after them. What rows say follows from the tokens up to their own, so that a call that ends within the
 * chunk has the same bits. */

/* The errors of both factors are uniform: sqrt(2 / 12) / 32767 = 1.25e-5. Times the root of a bound: 1.6e-3 of outputs,
 * 8e-4 of w and of states. */
#define LINEAR_MOST_OF_OUTPUTS 16384.0
#define LINEAR_MOST_OF_W 4096.0
#define LINEAR_MOST_OF_STATES 4096.0
#define LINEAR_LEAST_SQUARES 1e-24 /* sums of squares that float32 holds to all their digits */

INLINE double linear_square(double x) { return x * x; }

/* Sums up the squares of two rows of n numbers, a multiple of 16. */
INLINE void linear_two_rows(const float *const *row, int64_t n, double *sum) {
    enum { PARTS = CA_LANES / VL };
    vf part[2][PARTS];
    EACH(r, 2) EACH(v, PARTS) part[r][v] = v_set1(0);
    for (int64_t i = 0; i < n; i += CA_LANES)
        EACH(r, 2) EACH(v, PARTS) {
            const vf x = v_load_f32(row[r] + i + v * VL);
            part[r][v] = v_fma(x, x, part[r][v]);
        }
    EACH(r, 2) {
        for (int v = 1; v < PARTS; v++)
            part[r][0] = v_add(part[r][0], part[r][v]);
        sum[r] = v_hsum(part[r][0]);
    }
}

/* Returns a sum of squares, but NaN where an element is infinite, so that infinity says that float32 does not hold the
 * sum. */
static double linear_finite(double sum, const float *row, int64_t n) {
    for (int64_t i = 0; isinf(sum) && i < n; i++)
        if (!isfinite(row[i]))
            return NAN;
    return sum;
}

/* Says whether an error is too large beside what it is an error of. Not of NaN, which is as right by words. */
INLINE int linear_exceeds(double error, double most, double size) {
    return error > most * size || size < LINEAR_LEAST_SQUARES || size == HUGE_VAL;
}

/* Returns the first of n rows from which on words are too coarse, n for none. careful: beta v counts, which a hasty
 * look leaves out. */
static int64_t linear_look_for_coarse(const linear_item *it, const linear_head *h, int64_t t, int64_t n,
                                      const float *eraser, int careful) {
    const float *decay = it->decays, *beta = it->betas;
    double state = 0, output = 0, of_output = 0, read = 0, of_read = 0;
    for (int64_t j = 0; j < it->dv; j++)
        state += linear_square(it->state_words.scale[j]);
    for (int64_t i = 0; i < n; i++) {
        const float *const rows[] = {it->w + i * it->vp, it->o + i * it->vp};
        double sums[2];
        linear_two_rows(rows, it->vp, sums);
        for (int r = 0; careful && r < 2; r++)
            sums[r] = linear_finite(sums[r], rows[r], it->vp);
        state *= linear_square(decay[i]);
        if (it->delta) {
            read += linear_square(eraser[i]) * linear_square(it->erases ? 1 : beta[i]) * state;
            of_read += sums[0];
            if (careful) {
                linear_value(it->c, h, t + i, beta[i], it->x.v, it->x.u);
                of_read += linear_finite(squares(it->x.v, it->vp), it->x.v, it->vp);
            }
        }
        it->w_squares[i] = (float)sums[0];
        state += linear_square(it->k_words.scale[i]) * sums[0];
        output += linear_square(it->q_words.scale[i]) * state;
        of_output += sums[1];
        if (i + 1 >= LINEAR_FEW && (linear_exceeds(output, LINEAR_MOST_OF_OUTPUTS, of_output) ||
                                    (it->delta && linear_exceeds(read, LINEAR_MOST_OF_W, of_read))))
            return i + 1 == LINEAR_FEW ? 0 : i;
    }
    return n;
}
static int64_t linear_first_coarse(const linear_item *it, const linear_head *h, int64_t t, int64_t n,
                                   const float *eraser) {
    const int64_t first = linear_look_for_coarse(it, h, t, n, eraser, 0);
    return first < n ? linear_look_for_coarse(it, h, t, n, eraser, 1) : n;
}

/* Says whether words are too coarse for what m tokens add to the state; d: the decays that follow each. */
static int linear_state_is_coarse(const linear_item *it, int64_t m, const float *d) {
    double keys = 0, values = 0, both = 0;
    for (int64_t j = 0; j < m; j++) {
        const double key = linear_square(it->k_words.scale[j]), value = linear_square(d[j]) * it->w_squares[j];
        keys += key;
        values += value;
        both += key * value;
    }
    return keys * values > LINEAR_MOST_OF_STATES * both;
}
