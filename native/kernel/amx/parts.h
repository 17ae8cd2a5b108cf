/* SPDX-License-Identifier: Apache-2.0
 * This file splits float16 and float32 into bfloat16 parts for TDPBF16PS, for amx/floats.h, and packs them as tiles.
 *
 * The first part of a number is its upper 16 bits, the next one those of what is left, and so on: two parts are all of
 * a float16, three are all of a float32, subnormals of float16 included. Of the products of parts those count whose
 * numbers of a part, from 0 on, add up to less than PARTS: three of nine would do for no float32, and six of them err
 * less than FMA does (MEASUREMENTS.md: AMX). The first part of a float32 is of its size, the last one 2^-16 of that,
 * and tiles take products below 2^-126 for 0: so a float32 that is not 0 has to be in [2^-100, 2^30).
 *
 * A vector of pairs has a number of one vector and one of another side by side, as a truncation and a shift make it:
 * the pairs of a product are dimensions d and d + 16, or keys j and j + 16. K as the layout LANES has it, and V by
 * rows, so need no transposition. A tile is 16 such vectors. The parts of a tile of B follow one another; of A, the
 * first parts of both tiles of a strip come first, and so on. */

#define TILE (CA_LANES * 2 * CA_LANES) /* elements */

/* Holds of the numbers that were packed the largest bits of a float without its sign, and of their negatives, which the
 * smallest number but 0 makes. */
typedef struct extent {
    vi most, least;
} extent;

INLINE extent no_extent(void) { return (extent){v_set1_int(0), v_set1_int(0)}; }
INLINE void extend(extent *e, vf x) {
    x = v_abs(x);
    e->most = v_top(e->most, x);
    e->least = v_bottom(e->least, x);
}
/* Are all of the numbers finite, less than 2^30, and 0 or at least 2^-100? */
static int tiles_hold(extent e) {
    const uint32_t least = v_htop(e.least);
    return v_htop(e.most) < (127 + 30) << 23 && (least == 0 || -least >= (127 - 100) << 23);
}

/* Loads up to VL numbers of the dtype that has so many parts; n <= 0 makes zeros. */
INLINE vf load_number(int parts, const char *from, int64_t at, int64_t n) {
    if (n >= VL)
        return parts == 3 ? v_load_f32((const float *)from + at) : v_load_f16((const uint16_t *)from + at);
    if (n <= 0)
        return v_set1(0);
    return parts == 3 ? v_loadn_f32((const float *)from + at, (int)n)
                      : v_loadn_f16((const uint16_t *)from + at, (int)n);
}

/* Packs a query, times a sign, as a row of `depth` pairs of tiles: those of a strip's first 16 rows, and of its others.
 */
INLINE void pack_query(int parts, const char *from, int64_t head_size, float sign, int64_t depth, uint16_t *to,
                       extent *e) {
    for (int64_t d = 0; d < depth; d++, to += 2 * parts * TILE) {
        const vf a = v_mul(v_set1(sign), load_number(parts, from, 32 * d, head_size - 32 * d));
        const vf b = v_mul(v_set1(sign), load_number(parts, from, 32 * d + 16, head_size - 32 * d - 16));
        extend(e, a);
        extend(e, b);
        split_pairs(parts, a, b, to, 2 * TILE);
    }
}

/* Says where K or V of a group lies, in the layout LANES, which of its keys count, and what they are multiplied by. */
typedef struct packing {
    const char *from;
    int64_t ld; /* of V: elements from key to key */
    uint32_t keys;
    const char *scales; /* [scales of a token][16] in bfloat16, maybe unaligned, or NULL */
    int64_t shared;     /* elements of a token that share one */
} packing;

INLINE vf key_numbers(int parts, const packing *g, int64_t d, int64_t head_size) {
    if (d >= head_size)
        return v_set1(0);
    vf x = load_number(parts, g->from, d * CA_LANES, CA_LANES);
    if (g->scales)
        x = v_mul(x, v_load_bf16((const void *)(g->scales + d / g->shared * CA_LANES * 2)));
    return v_keep_or_0(x, g->keys);
}
/* Packs K of a group to `depth` tiles. */
INLINE void pack_keys(int parts, const packing *g, int64_t head_size, int64_t depth, uint16_t *to, extent *e) {
    for (int64_t d = 0; d < 32 * depth; d += 32, to += parts * TILE)
        for (int64_t r = 0; r < CA_LANES; r++) {
            const vf a = key_numbers(parts, g, d + r, head_size), b = key_numbers(parts, g, d + 16 + r, head_size);
            extend(e, a);
            extend(e, b);
            split_pairs(parts, a, b, to + r * 2 * CA_LANES, TILE);
        }
}

INLINE vf value_numbers(int parts, const packing *g, int64_t key, int64_t column, int64_t n) {
    if (!(g->keys >> key & 1))
        return v_set1(0);
    const vf x = load_number(parts, g->from, key * g->ld + column, n);
    return g->scales && n > 0 ? v_mul(x, scale_of_token(g->scales, column / g->shared, (int)key)) : x;
}
/* Packs V of two groups to two tiles for every 32 columns. */
INLINE void pack_values(int parts, const packing *g, int64_t head_size_v, int64_t passes, uint16_t *to, extent *e) {
    for (int64_t key = 0; key < CA_LANES; key++)
        for (int64_t c = 0; c < 2 * passes; c++) {
            const int64_t at = c * CA_LANES;
            const vf a = value_numbers(parts, g, key, at, head_size_v - at);
            const vf b = value_numbers(parts, g + 1, key, at, head_size_v - at);
            extend(e, a);
            extend(e, b);
            split_pairs(parts, a, b, to + c * parts * TILE + key * 2 * CA_LANES, TILE);
        }
}
