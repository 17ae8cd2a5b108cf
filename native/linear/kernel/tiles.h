/* SPDX-License-Identifier: Apache-2.0
 * These are products by tiles (TDPBF16PS) for calls in bfloat16. An operand is one part in bfloat16, as queries and
 * keys come, or the sum of two, of which the second is what the first leaves: 16 bits of each number, however small it
 * is beside others. The product of two parts by two leaves out that of both second ones, and so errs by 2^-16 of each
 * term; products of words (words.h) err by 2^-15 of the largest.
 *
 * Tiles of 16 rows of X hold 32 numbers of each; tiles of 16 columns of Y hold pairs of them, the numbers 2 i and 2 i +
 * 1 of a column side by side. They lie by [tile][step of 32 numbers][part]. What pads the depth is 0 in both, so that
 * each sum is the same whatever the number of rows and columns. */

/* ---- operands ---- */

INLINE void linear_put_row(int parts, vf by, vf a, vf b, uint16_t *to) {
    a = v_mul(a, by);
    b = v_mul(b, by);
    v_store_pairs(to, v_round_pairs(v_high(a), v_high(b)));
    if (parts == 2)
        v_store_pairs(to + LINEAR_PART, v_round_pairs(v_rest(a), v_rest(b)));
}
/* Packs rows of `depth` numbers as tiles of X. by: what rows are multiplied by, or NULL. */
INLINE void linear_pack_x(int parts, const float *src, int64_t ld, int64_t rows, int64_t depth, const float *by,
                          linear_parts to) {
    for (int64_t r = 0; r < rows; r++) {
        const float *row = src + r * ld;
        const vf times = v_set1(by ? by[r] : 1);
        uint16_t *at = to.at + r / CA_LANES * to.tile + r % CA_LANES * 32;
        int64_t k = 0;
        for (; k + 32 <= depth; k += 32, at += parts * LINEAR_PART)
            linear_put_row(parts, times, v_load_f32(row + k), v_load_f32(row + k + VL), at);
        if (k < depth) {
            const int n = (int)(depth - k);
            linear_put_row(parts, times, v_loadn_f32(row + k, n < VL ? n : VL),
                           v_loadn_f32(row + k + VL, n < VL ? 0 : n - VL), at);
        }
    }
}
static NOINLINE void linear_pack_rows_1(const float *src, int64_t ld, int64_t rows, int64_t depth, linear_parts to) {
    linear_pack_x(1, src, ld, rows, depth, NULL, to);
}
static NOINLINE void linear_pack_rows_2(const float *src, int64_t ld, int64_t rows, int64_t depth, const float *by,
                                        linear_parts to) {
    linear_pack_x(2, src, ld, rows, depth, by, to);
}
static linear_parts linear_pack_rows(int parts, const float *src, int64_t ld, int64_t rows, int64_t depth,
                                     const float *by, linear_parts to) {
    to.tile = LINEAR_STEPS(depth) * parts * LINEAR_PART;
    if (parts == 1)
        linear_pack_rows_1(src, ld, rows, depth, to);
    else
        linear_pack_rows_2(src, ld, rows, depth, by, to);
    return to;
}

/* Packs rows [first, depth), `first` a multiple of 16, as the numbers of columns of Y. by: what rows are multiplied by,
 * or NULL. The last step's rows from `depth` on become 0. */
INLINE void linear_pack_y(int parts, const float *src, int64_t ld, int64_t first, int64_t depth, int64_t columns,
                          const float *by, linear_parts to) {
    const vf zero = v_set1(0);
    for (int64_t k = first; k < LINEAR_STEPS(depth) * 32; k += 2) {
        const float *row = src + k * ld;
        const vf even_by = v_set1(by && k < depth ? by[k] : 1), odd_by = v_set1(by && k + 1 < depth ? by[k + 1] : 1);
        uint16_t *at = to.at + k / 32 * parts * LINEAR_PART + k % 32 * CA_LANES;
        for (int64_t c = 0; c < columns; c += CA_LANES, at += to.tile) {
            const vf even = k < depth ? v_load_f32(row + c) : zero,
                     odd = k + 1 < depth ? v_load_f32(row + ld + c) : zero;
            split_pairs(parts, by ? v_mul(even, even_by) : even, by ? v_mul(odd, odd_by) : odd, at, LINEAR_PART);
        }
    }
}
static NOINLINE void linear_pack_columns_1(const float *src, int64_t ld, int64_t depth, int64_t columns,
                                           linear_parts to) {
    linear_pack_y(1, src, ld, 0, depth, columns, NULL, to);
}
static NOINLINE void linear_pack_columns_2(const float *src, int64_t ld, int64_t first, int64_t depth, int64_t columns,
                                           linear_parts to) {
    linear_pack_y(2, src, ld, first, depth, columns, NULL, to);
}
static NOINLINE void linear_pack_columns_2_by(const float *src, int64_t ld, int64_t depth, int64_t columns,
                                              const float *by, linear_parts to) {
    linear_pack_y(2, src, ld, 0, depth, columns, by, to);
}

/* ---- products ---- */

/* Says which rows of a product every other tile of X gives: its tiles, x_step apart, and rows first + u row_step on of
 * the result for tile u. */
typedef struct linear_side {
    const uint16_t *x;
    int64_t x_step, first, row_step;
    linear_to to;
} linear_side;

/* Gives operands X whose tiles alternate: tile u of one, tile u of the other. */
static void linear_two_sides(linear_side *side, linear_parts x, linear_to to, linear_parts other, linear_to other_to) {
    side[0] = (linear_side){x.at, x.tile, 0, CA_LANES, to};
    side[1] = (linear_side){other.at, other.tile, 0, CA_LANES, other_to};
}
/* Gives one operand X, whose odd tiles are the second side. */
static void linear_one_side(linear_side *side, linear_parts x, linear_to to) {
    for (int i = 0; i < 2; i++)
        side[i] = (linear_side){x.at + i * x.tile, 2 * x.tile, i * CA_LANES, 2 * CA_LANES, to};
}

/* Holds 2 x 2 tiles of sums that become rows of the result while tiles sum up the next ones. */
typedef struct linear_sums {
    const float *sums;
    int64_t row[2], column; /* the first row of each side, of the result */
    int rows, wide, next;   /* the next row out of `rows` */
} linear_sums;

INLINE void linear_rows_by(enum linear_mode mode, int nv, const linear_item *it, linear_to to, int64_t row, int64_t n,
                           const float *from, float *c) {
    for (int64_t end = row + n; row < end; row++, from += CA_LANES, c += to.ld) {
        const float factor = mode == LINEAR_DECAY ? it->factor[row] : 0;
        const float kept = mode == LINEAR_DECAY ? it->kept[row] : 0;
        to.mode = mode;
        EACH(v, nv) {
            vf x = v_load_f32(from + v * CA_LANES * CA_LANES);
            if (mode != LINEAR_DECAY)
                x = v_mul(x, v_set1(to.by[row]));
            linear_put(to, c + v * CA_LANES, x, factor, kept);
        }
    }
}
/* Puts out the next n rows, or those that are left. */
static NOINLINE void linear_rows_out(const linear_item *it, const linear_side *side, linear_sums *out, int n) {
    for (int rows; n > 0 && out->next < out->rows; n -= rows, out->next += rows) {
        const int s = out->next / CA_LANES, r = out->next % CA_LANES;
        const linear_to to = side[s].to;
        const int64_t row = out->row[s] + r;
        const float *from = out->sums + s * 2 * CA_LANES * CA_LANES + r * CA_LANES;
        float *c = to.c + row * to.ld + out->column;
        rows = n < CA_LANES - r ? n : CA_LANES - r;
#define LINEAR_ROWS_BY(MODE)                                                                                           \
    if (out->wide)                                                                                                     \
        linear_rows_by(MODE, 2, it, to, row, rows, from, c);                                                           \
    else                                                                                                               \
        linear_rows_by(MODE, 1, it, to, row, rows, from, c);
        if (to.mode == LINEAR_DECAY) {
            LINEAR_ROWS_BY(LINEAR_DECAY)
        } else if (to.mode == LINEAR_SUB) {
            LINEAR_ROWS_BY(LINEAR_SUB)
        } else {
            LINEAR_ROWS_BY(LINEAR_SET)
        }
    }
}

#define LINEAR_DOTS                                                                                                    \
    tile_dot(0, 4, 6);                                                                                                 \
    tile_dot(1, 4, 7);                                                                                                 \
    tile_dot(2, 5, 6);                                                                                                 \
    tile_dot(3, 5, 7);                                                                                                 \
    if (out.next < out.rows)                                                                                           \
        linear_rows_out(it, side, &out, due);                                                                          \
    linear_prefetch_rows(it->ahead, 1);
#define LINEAR_LOAD(S, T, P)                                                                                           \
    tile_load(S, (P)[0], 64);                                                                                          \
    tile_load(T, (P)[1], 64);

/* Multiplies `rows` tiles of X, whose sides take turns, by `columns` tiles of Y. lower: if not 0, the first two tiles
 * of X only count in so many columns, the next two in twice as many. Where nothing is to be done to the rows of a
 * product (no `by`, and they are set or added), tiles read and write the result themselves; SUB has a `by`, ADD has
 * none. */
INLINE void linear_tiles(int px, int py, const linear_item *it, const linear_side *side, int64_t rows, linear_parts y,
                         int64_t columns, int64_t steps, int lower) {
    const int groups = (px == 2 && py == 2 ? 3 : px * py) * (int)steps, due = (2 * CA_LANES + groups - 1) / groups;
    const int direct = side->to.mode == LINEAR_ADD || (side->to.mode == LINEAR_SET && !side->to.by);
    linear_sums out = {NULL, {0}, 0, 0, 0, 0};
    float sink[CA_LANES * CA_LANES] __attribute__((aligned(64))) = {0}; /* for tiles that are not there */
    int half = 0;
    for (int64_t n = 0; n < columns; n += 2)
        for (int64_t u = lower ? n / lower : 0; 2 * u < rows; u++, half ^= 1) {
            const int64_t end = lower ? ca_min64(columns, lower * (u + 1)) : columns;
            const int tall = 2 * u + 1 < rows, wide = n + 1 < end;
            const uint16_t *x[2] = {side[0].x + u * side[0].x_step, side[tall].x + u * side[tall].x_step};
            const uint16_t *b[2] = {y.at + n * y.tile, y.at + (n + wide) * y.tile};
            float *to[4];
            int64_t ld[4]; /* bytes */
            for (int i = 0; i < 4; i++) {
                const linear_side *of = &side[i / 2];
                const int there = (tall || i < 2) && (wide || i % 2 == 0);
                to[i] = !direct ? it->sums + half * LINEAR_SUMS + i * CA_LANES * CA_LANES
                        : there ? of->to.c + (of->first + u * of->row_step) * of->to.ld + (n + i % 2) * CA_LANES
                                : sink;
                ld[i] = direct && there ? of->to.ld * 4 : 64;
            }
            if (side[0].to.mode == LINEAR_ADD) {
                tile_load(0, to[0], ld[0]);
                tile_load(1, to[1], ld[1]);
            } else {
                tile_zero(0);
                tile_zero(1);
            }
            if (side[1].to.mode == LINEAR_ADD) {
                tile_load(2, to[2], ld[2]);
                tile_load(3, to[3], ld[3]);
            } else {
                tile_zero(2);
                tile_zero(3);
            }
            for (int64_t k = 0; k < steps; k++) {
                const uint16_t *high_x[2] = {x[0] + k * px * LINEAR_PART, x[1] + k * px * LINEAR_PART};
                const uint16_t *high_y[2] = {b[0] + k * py * LINEAR_PART, b[1] + k * py * LINEAR_PART};
                const uint16_t *low_x[2] = {high_x[0] + LINEAR_PART, high_x[1] + LINEAR_PART};
                const uint16_t *low_y[2] = {high_y[0] + LINEAR_PART, high_y[1] + LINEAR_PART};
                LINEAR_LOAD(4, 5, high_x)
                if (py == 2) {
                    LINEAR_LOAD(6, 7, low_y)
                    LINEAR_DOTS
                }
                LINEAR_LOAD(6, 7, high_y)
                LINEAR_DOTS
                if (px == 2) {
                    LINEAR_LOAD(4, 5, low_x)
                    LINEAR_DOTS
                }
            }
            tile_store(0, to[0], ld[0]);
            tile_store(1, to[1], ld[1]);
            tile_store(2, to[2], ld[2]);
            tile_store(3, to[3], ld[3]);
            tile_barrier();
            if (!direct)
                out = (linear_sums){to[0], {0}, n * CA_LANES, tall ? 2 * CA_LANES : CA_LANES, wide, 0};
            for (int s = 0; s < 2; s++)
                out.row[s] = side[s].first + u * side[s].row_step;
        }
    linear_rows_out(it, side, &out, 2 * CA_LANES);
}
#undef LINEAR_LOAD
#undef LINEAR_DOTS

#define LINEAR_TILES(px, py)                                                                                           \
    static NOINLINE void linear_tiles_##px##py(const linear_item *it, const linear_side *side, int64_t rows,           \
                                               linear_parts y, int64_t columns, int64_t steps, int lower) {            \
        linear_tiles(px, py, it, side, rows, y, columns, steps, lower);                                                \
    }
LINEAR_TILES(1, 1)
LINEAR_TILES(1, 2)
LINEAR_TILES(2, 1)
LINEAR_TILES(2, 2)
