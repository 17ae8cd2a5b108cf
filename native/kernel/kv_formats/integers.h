/* SPDX-License-Identifier: Apache-2.0
 * This file forms both products over bytes and nibbles in the cache, by dot products of pairs of 16-bit integers, which
 * are exact in 32 bits (VPMADDWD, VPDPWSSD). It takes parameters.h; the words are in simd/vocabulary.md.
 *
 * The other operand is quantised to integers up to 32767. In a query, 32 or 64 dimensions share a unit. Weights are
 * multiplied by the scales of V first, and share a unit by rows of a score block, so a key whose V is small takes no
 * room from others. A dither is added before weights are rounded: thousands of small weights rounded to the same side
 * would take 10 times the error budget where they meet a V that is large in one column.
 *
 * The unit of a query is a power of two, so numbers from 1/16 of the largest on are exact in float16, and from 1/128 on
 * in bfloat16. What a query loses by rounding is multiplied with a unit of its own, for keys whose scale says that it
 * may change their logit by a share of the error budget. Without that, outliers and channels as SmoothQuant describes
 * them took 19 budgets.
 *
 * `span` / columns keys, but at least 16, share a unit of weights. Where a few keys outweigh the others and have V in a
 * column of their own, the error is about 0.5 sqrt(span) / 32767 of the output. MEASUREMENTS.md has the measurements
 * under "integers". */
#ifndef CPU_ATTN_INTEGERS_H
#define CPU_ATTN_INTEGERS_H
#include "kernel/attention/operands.h"
#include "kernel/attention/scratch.h"
#include "fits.h"

_Static_assert((int64_t)MOST * 240 * KEYS <= INT32_MAX,
               "Sums over a score block fit into 32 bits, even those of nibbles that count 16 times.");

/* Returns how many dimensions of a query share a unit, as those of a key share a scale, and how many units that makes.
 */
static int64_t unit_dims(const ca_side *k) { return k->several_scales ? ca_min64(64, k->shared) : 64; }
static int64_t units_of(const ca_side *k) { return ca_div_up(k->head_size, unit_dims(k)); }
/* Returns the bytes of n elements, which are nibbles or bytes. */
INLINE int64_t integer_bytes(int nibbles, int64_t n) { return nibbles ? n / 2 : n; }

/* ---- S = Q K^T ---- */

/* Holds what qk takes besides its operands: queries as integers. */
typedef struct integer_operands {
    const int16_t *q;
    int64_t width; /* integers from row to row; the rounding errors follow half of it behind */
    const unit *units;
    int64_t units_ld; /* units of a row */
} integer_operands;

/* Adds the products over 32 bytes of each group: two dimensions of bytes, or four of nibbles, two of which are 4
 * dimensions further on. */
INLINE void qk_bytes_step(int nibbles, int mr, int nv, const int16_t *q, int64_t width, const group *g, int64_t at,
                          vi acc[TALL][NV]) {
    const int halves = nibbles ? 2 : 1;
    vi z[NV], k[NV];
    EACH(v, nv)
    z[v] = v_bytes((const uint8_t *)g[v * VL / CA_LANES].kv[K].at + at + v * VL % CA_LANES * 2);
    EACH(half, halves) {
        EACH(v, nv) k[v] = nibbles ? v_halves_of_bytes(z[v], half) : v_int8(z[v]);
        EACH(r, mr) {
            vi x = v_set1_words(q + r * width + 4 * half);
            EACH(v, nv) acc[r][v] = v_dot_words(acc[r][v], x, k[v]);
        }
    }
}

/* Returns, lane by lane, the largest magnitudes of the scales of ng groups. Unused slots may hold NaN, which v_max
 * leaves out as its first operand. */
INLINE vf largest_scales(const group *g, int ng, int64_t scale) {
    vf top = v_set1(0);
    EACH(v, ng * CA_LANES / VL) top = v_max(v_abs(scales_of(g, K, scale, v * VL)), top);
    return top;
}

/* S[mr][ng * 16] (+)= q k^T over the dimensions [d, end), which share a unit, times the scale-th scales. rest: q is the
 * rounding errors, which count for keys with large enough scales. */
INLINE void qk_unit(int nibbles, int add, int rest, int mr, int ng, integer_operands q, qk_operands t, int which,
                    int64_t d, int64_t end, int64_t scale) {
    const int nv = ng * CA_LANES / VL;
    vi acc[TALL][NV];
    q.q += rest ? q.width / 2 : 0;
    q.units += rest;
    EACH(r, mr) EACH(v, nv) acc[r][v] = v_set1_int(q.units[r * q.units_ld].start);
    for (; d < end; d += 8) {
        const int64_t at = integer_bytes(nibbles, d * CA_LANES);
        const int steps = nibbles ? 2 : (int)ca_min64(4, (end - d + 1) / 2);
        prefetch_lines(rest ? NULL : t.next, which, ng, at, integer_bytes(nibbles, 8 * CA_LANES));
        PRAGMA(GCC unroll 1)
        for (int h = 0; h < steps; h++)
            qk_bytes_step(nibbles, mr, nv, q.q + d + 2 * h, q.width, t.g, at + 32 * h, acc);
    }
    EACH(v, nv) {
        vf scales = scales_of(t.g, K, scale, v * VL);
        EACH(r, mr) {
            const unit of = q.units[r * q.units_ld];
            float *to = t.s + r * S_STRIDE + v * VL;
            vf x = v_mul(v_float(acc[r][v]), v_set1(of.step)), before = add ? v_load_f32(to) : v_set1(0);
            v_store(to, rest  ? v_less(v_set1(of.from), v_abs(scales), v_fma(x, scales, before), before)
                        : add ? v_fma(x, scales, before)
                              : v_mul(x, scales));
        }
    }
}

/* Adds the products of one row's rounding errors. */
static NOINLINE void qk_rest(int nibbles, int ng, integer_operands q, qk_operands t, int64_t d, int64_t end,
                             int64_t scale) {
    for (int i = 0; i < ng; i++, t.g++, t.s += CA_LANES)
        if (!v_any_less(v_set1(q.units[1].from), largest_scales(t.g, 1, scale)))
            continue;
        else if (nibbles)
            qk_unit(1, 1, 1, 1, 1, q, t, 0, d, end, scale);
        else
            qk_unit(0, 1, 1, 1, 1, q, t, 0, d, end, scale);
}

INLINE void qk_unit_tiles(int nibbles, int add, int rest, int mr, integer_operands q, qk_operands t, int64_t d,
                          int64_t end, int64_t scale) {
    for (int i = 0; i < NG; i += TILE_GROUPS(mr))
        qk_unit(nibbles, add, rest, mr, TILE_GROUPS(mr), q, qk_from(t, 0, i), i, d, end, scale);
}

/* Does what qk_unit does for any number of rows and for ng groups, 1 or NG, rounding errors included. from: the least
 * scale from which on the errors of any row count. */
INLINE void qk_unit_rows(int nibbles, int mr, int ng, integer_operands q, qk_operands t, int64_t d, int64_t end,
                         int64_t scale, float from) {
    if (ng == 1)
        FOR_ROWS(mr, qk_unit(nibbles, d > 0, 0, M, 1, q, t, 0, d, end, scale))
    else
        FOR_ROWS(mr, qk_unit_tiles(nibbles, d > 0, 0, M, q, t, d, end, scale))
    const vf top = ng == 1 ? largest_scales(t.g, 1, scale) : largest_scales(t.g, NG, scale);
    if (!v_any_less(v_set1(from), top))
        return;
    int needed = 0;
    for (int r = 0; r < mr; r++)
        needed += !!v_any_less(v_set1(q.units[r * q.units_ld + 1].from), top);
    if (2 * needed > mr && mr <= MR && ng == NG) {
        FOR_WIDE_ROWS(mr, qk_unit_tiles(nibbles, 1, 1, M, q, t, d, end, scale))
        return;
    }
    for (int r = 0; r < mr; r++, q.q += q.width, q.units += q.units_ld, t.s += S_STRIDE)
        qk_rest(nibbles, ng, q, t, d, end, scale);
}

/* Makes S of ng groups, 1 or NG. */
static void qk_integers(const ca_side *k, const scratch *x, int64_t row, int mr, int ng, const qk_operands *operands) {
    const qk_operands t = *operands;
    const int64_t head_size = k->head_size, units = 2 * units_of(k), dims = unit_dims(k);
    const int64_t width = INTEGERS_WIDTH(head_size);
    integer_operands q = {(const int16_t *)x->q + row * width, width, x->units + row * units, units};
    for (int64_t d = 0, end, i = 0; d < head_size; d = end, i++, q.units += 2) {
        end = ca_min64(head_size, d + dims);
        if (k->nibbles)
            qk_unit_rows(1, mr, ng, q, t, d, end, d / k->shared, x->from[i]);
        else
            qk_unit_rows(0, mr, ng, q, t, d, end, d / k->shared, x->from[i]);
    }
}

/* ---- O += P V ---- */

/* Stores weights times the scale-th scales of V, quantised, as pairs of integers. A weight of 0 stays 0, since the
 * scale of a key that no row sees may be NaN. */
INLINE void put_weights_of_scales(int zero, int mr, const float *s, const group *g, int num_groups, int64_t scale,
                                  float *p, unit *of) {
    const int vectors = num_groups * CA_LANES / VL;
    const vi ones = v_set1_int(0x10001);
    vi top[TALL], sum[TALL];
    vf inv_step[TALL];
    EACH(r, mr) top[r] = sum[r] = v_set1_int(0);
    for (int v = 0; v < vectors; v++) {
        vf x = scales_of(g, V, scale, v * VL);
        EACH(r, mr) {
            vf w = v_mul_unless_0(v_load_f32(s + r * S_STRIDE + v * VL), x);
            top[r] = v_top(top[r], v_abs(w));
            v_store(p + r * S_STRIDE + v * VL, w);
        }
    }
    EACH(r, mr) {
        float *x = p + r * S_STRIDE;
        const fit fit = fit_to(v_htop(top[r]), MOST);
        of[r].step = fit.step;
        inv_step[r] = v_set1(fit.inv_step);
        if (vectors % 2)
            v_store(x + vectors * VL, v_set1(0));
        if (fit.boost != 1)
            for (int i = 0; i < vectors * VL; i++) /* 0 * NaN would not be 0 */
                x[i] = fit.boost > 0 ? x[i] * fit.boost : 0;
    }
    for (int v = 0; v < vectors; v += 2)
        EACH(r, mr) {
            const float *x = p + r * S_STRIDE + v * VL, *add = spread + v * VL % (4 * CA_LANES);
            int16_t *to = (int16_t *)(p + r * S_STRIDE) + v * VL;
            vi a = v_integers(v_fma(v_load_f32(x), inv_step[r], v_load_f32(add)));
            vi b = v_integers(v_fma(v_load_f32(x + VL), inv_step[r], v_load_f32(add + VL)));
            a = v_pack_words(a, b);
            sum[r] = v_dot_words(sum[r], a, ones);
            v_store_words(to, a);
        }
    EACH(r, mr) of[r].start = -zero * v_hsum_int(sum[r]);
}

static void put_weights_any(int zero, int mr, const float *s, const group *g, int num_groups, int64_t scale, float *p,
                            unit *of) {
    FOR_ROWS(mr, put_weights_of_scales(zero, M, s, g, num_groups, scale, p, of))
}

/* Says how the columns of a strip lie in V, for each key: IN_LINE, as bytes or all in the lower, or all in the upper,
 * nibbles of bytes; IN_BOTH_HALVES, 64 columns in both nibbles; BY_TURNS, 16 columns now in lower and then in upper
 * ones.
 */
enum { IN_LINE, IN_BOTH_HALVES, BY_TURNS };
static int lie_of(int nibbles, int64_t strip, int64_t head_size_v) {
    return !nibbles ? IN_LINE : head_size_v % 64 ? BY_TURNS : strip == 64 ? IN_BOTH_HALVES : IN_LINE;
}
/* Returns the number of columns of the strip that begins at column c. */
INLINE int64_t strip_of(int nibbles, int mr, int64_t c, int64_t head_size_v) {
    const int64_t most = ca_min64(TILE_VECTORS(mr) * VL, head_size_v - c);
    return most < 32 || (nibbles && head_size_v % 64) ? 16 : most < 64 ? 32 : 64;
}

/* Adds the products over two keys, for `nv` vectors of columns; element `at` of the group is the first. mask: which
 * nibbles of bytes are meant. w: the weights of the keys. */
INLINE void pv_of_keys(int nibbles, int each, int lie, int mr, int nv, const int16_t *const *w, const char *v,
                       int64_t at, vi mask, vi acc[TALL][NDV]) {
    const int weights = each && nv * VL > 32 ? 2 : 1;
    const int loads = lie == IN_BOTH_HALVES ? nv / 2 : nv;
    vi x[NDV];
    EACH(j, loads) {
        const int64_t e = at + j * 2 * VL;
        const vi z = v_bytes((const uint8_t *)v + (lie == BY_TURNS ? ca_nibble_byte(e) : e));
        x[j] = lie == BY_TURNS  ? v_halves_of_bytes(z, ca_nibble_shift(e) != 0)
               : lie == IN_LINE ? nibbles ? v_and(z, mask) : v_int8(z)
                                : v_halves_of_bytes(z, 0);
        if (lie == IN_BOTH_HALVES)
            x[nv / 2 + j] = v_halves_of_bytes(z, 1);
    }
    EACH(r, mr) {
        vi weight[2];
        EACH(h, weights) weight[h] = v_set1_words(w[h] + r * 2 * S_STRIDE);
        EACH(j, nv) acc[r][j] = v_dot_words(acc[r][j], weight[each ? j * VL / 32 : 0], x[j]);
    }
}

/* Holds what a strip of columns takes: the groups [first, end) of g, which share a unit, and weights and units, for
 * each 32 columns or for all. */
typedef struct strip_operands {
    float *const *p;
    const unit *const *units;
    const group *g;
    int num_groups, first, end;
    int fetches;
    float *o;
    int64_t head_size_v;
} strip_operands;

/* O[mr][c .. c + nv * VL) += P V. each: every 32 columns have weights of their own. Upper nibbles are multiplied where
 * they are, as 16 times their value, which the unit makes up for. */
INLINE void pv_strip(int nibbles, int each, int lie, int mr, int nv, const segment_work *w, strip_operands t,
                     int64_t c) {
    const int upper = nibbles && lie == IN_LINE && ca_nibble_shift(2 * c);
    const int64_t first = nibbles && lie != BY_TURNS ? ca_nibble_byte(2 * c) : 2 * c;
    const vi mask = v_set1_int(upper ? 0xf000f0 : 0xf000f);
    prefetch_targets found;
    const prefetch_targets *next = NULL;
    vi acc[TALL][NDV];
    EACH(r, mr)
    EACH(j, nv) acc[r][j] = v_set1_int(nibbles ? t.units[each ? j * VL / 32 : 0][r].start * (upper ? 16 : 1) : 0);
    for (int i = t.first; i < t.end; i++) {
        if ((i == t.first || i % NG == 0) && t.fetches)
            next = list_targets(&w->prefetch, &w->block, t.g, t.num_groups, t.num_groups + i - i % NG, &found);
        for (unsigned key = 0; key < CA_LANES; key += 4) {
            const unsigned lane = (unsigned)(i - t.first) * CA_LANES + key, n = lane / VL;
            const unsigned at = n / 2 * 2 * VL + n % 2 * 4 + 2 * (lane % VL); /* v_pack_words has put weights there */
            prefetch_lines(next, i % NG, 1, integer_bytes(nibbles, c * CA_LANES + key * nv * VL),
                           integer_bytes(nibbles, 4 * nv * VL));
            EACH(odd, 2) {
                const int16_t *p[2] = {(const int16_t *)t.p[0] + at + 2 * odd, (const int16_t *)t.p[1] + at + 2 * odd};
                const int64_t rows = (int64_t)(key + 2 * odd) * t.head_size_v;
                pv_of_keys(nibbles, each, lie, mr, nv, p, t.g[i].kv[V].at,
                           first + (lie == BY_TURNS ? rows : integer_bytes(nibbles, rows)), mask, acc);
            }
        }
    }
    EACH(r, mr) EACH(j, nv) {
        float *to = t.o + r * t.head_size_v + c + j * VL;
        const float one = t.units[each ? j * VL / 32 : 0][r].step * (upper ? 1.0f / 16 : 1);
        v_store(to, v_fma(v_float(acc[r][j]), v_set1(one), v_load_f32(to)));
    }
}

INLINE void pv_strip_of(int nibbles, int each, int lie, int mr, int64_t strip, const segment_work *w, strip_operands t,
                        int64_t c) {
    if (lie == (nibbles ? IN_BOTH_HALVES : IN_LINE) && TILE_VECTORS(mr) * VL >= 64 && strip == 64)
        pv_strip(nibbles, each, lie, mr, 64 / VL, w, t, c);
    else if (lie == IN_LINE && TILE_VECTORS(mr) * VL >= 32 && strip == 32)
        pv_strip(nibbles, each, lie, mr, 32 / VL, w, t, c);
    else if (lie != IN_BOTH_HALVES)
        pv_strip(nibbles, each, lie, mr, 16 / VL, w, t, c);
}

INLINE void pv_integer_rows(int nibbles, int each, const segment_work *w, int mr, const group *g, int num_groups,
                            int fetches, int64_t span, float *o) {
    const scratch *x = &w->scratch;
    const ca_side *v = &w->plan->sides[V];
    const int zero = ca_zero_of(v->dtype);
    const int64_t dv = v->head_size, shared = v->shared;
    unit units[2][MAX_GROUPS][TALL];
    const int most = (int)ca_max64(1, ca_min64(span / shared / CA_LANES, MAX_GROUPS));
    for (int64_t c = 0, strip; c < dv; c += strip) {
        strip = strip_of(nibbles, mr, c, dv);
        const int lie = lie_of(nibbles, strip, dv);
        for (int i = 0, end; i < num_groups; i = end) {
            const int at = i * CA_LANES;
            float *const p[2] = {x->p[0] + at, x->p[1] + at};
            const unit *const of[2] = {units[0][i], units[1][i]};
            end = (int)ca_min64(num_groups, i + most);
            for (int h = 0; 32 * h < strip; h++)
                if ((c + 32 * h) % shared == 0) /* These columns have other scales. */
                    put_weights_any(zero, mr, x->s + at, g + i, end - i, (c + 32 * h) / shared, p[h], units[h][i]);
            const strip_operands t = {p, of, g, num_groups, i, end, fetches && w->block.num_next, o, dv};
            if (lie == IN_LINE)
                FOR_ROWS(mr, pv_strip_of(nibbles, each, IN_LINE, M, strip, w, t, c))
            else if (nibbles && lie == IN_BOTH_HALVES)
                FOR_ROWS(mr, pv_strip_of(nibbles, each, IN_BOTH_HALVES, M, strip, w, t, c))
            else if (nibbles)
                FOR_ROWS(mr, pv_strip_of(nibbles, each, BY_TURNS, M, strip, w, t, c))
        }
    }
}

/* Is there a dtype of 8 bits of which 32 elements share a scale? If not, no code is made for it. */
#define SHARES(dtype, bits, element, shared, divisor) || ((bits) == 8 && (shared) == 32)
enum { BYTES_SHARE = 0 CA_FORMATS(SHARES) };
#undef SHARES

/* O += P V of mr rows over a score block. span: keys times columns whose weights, as integers, share a unit. */
static void pv_integers(const segment_work *w, int mr, const group *g, int num_groups, int fetches, int64_t span,
                        float *o) {
    const ca_side *v = &w->plan->sides[V];
    if (v->nibbles && v->several_scales)
        pv_integer_rows(1, 1, w, mr, g, num_groups, fetches, span, o);
    else if (v->nibbles)
        pv_integer_rows(1, 0, w, mr, g, num_groups, fetches, span, o);
    else if (BYTES_SHARE && v->several_scales && v->shared == 32)
        pv_integer_rows(0, 1, w, mr, g, num_groups, fetches, span, o);
    else
        pv_integer_rows(0, 0, w, mr, g, num_groups, fetches, span, o);
}
#endif
