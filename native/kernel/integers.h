/* SPDX-License-Identifier: Apache-2.0
 * How numbers become integers up to 32767, for integers.inc. Parameters: those of state.inc. */
#ifndef CPU_ATTN_INTEGERS_H
#define CPU_ATTN_INTEGERS_H
#define MOST 32767
_Static_assert((int64_t)MOST * 127 * KEYS <= INT32_MAX, "sums over a score block fit");

INLINE int64_t chain_dims(int kind) { return kind == CA_I4 ? 32 : 64; }
INLINE int64_t chains_of(int kind, int64_t head_size) { return ca_div_up(head_size, chain_dims(kind)); }

/* How numbers become integers: times boost, times by; unit is what one is worth. */
typedef struct fit {
    float boost, by, unit;
} fit;

/* For numbers of which the largest is the float with these bits; NaN where one of them is not finite. Where that is
 * small its reciprocal would be infinite. */
INLINE fit fit_to(uint32_t top) {
    const float boost = top < ca_as_bits(0x1p-60f) ? 0x1p64f : 1, most = ca_as_float(top) * boost;
    if (top == 0 || top >= 0x7f800000)
        return (fit){0, 0, top ? NAN : 0};
    return (fit){boost, MOST / most, most / MOST / boost};
}

/* n numbers, zeros up to a multiple of 8 behind them, as integers, and in the second chain what was rounded off, if a
 * quarter of them are less than `few`: next to a few that are large, in dimensions where keys are small, they may
 * decide. */
static void put_chain(int kind, int few, int64_t n, const float *x, int16_t *restrict whole, int16_t *restrict rest,
                      chain *of) {
    const fit fit = fit_to(ca_top_bits(x, n));
    int32_t small = 0, numbers = 0, sum = 0, rests = 0;
    for (int64_t i = 0; i < ca_round_up(n, 8); i++) {
        const float y = x[i] * fit.boost * fit.by;
        const int32_t near = ca_nearest(y), off = ca_nearest((y - (float)near) * (2 * MOST));
        whole[i] = (int16_t)near;
        rest[i] = (int16_t)off;
        numbers += y != 0;
        small += (y != 0) & (near < few) & (near > -few);
        sum += whole[i];
        rests += rest[i];
    }
    of[0] = (chain){fit.unit, kind == CA_I4 ? -8 * sum : 0};
    of[1] = (chain){4 * small > numbers ? fit.unit / (2 * MOST) : 0, kind == CA_I4 ? -8 * rests : 0};
}

/* What is added before weights are rounded, (k + 1/2) / 64 - 1/2 in van der Corput's order: many that are small and
 * alike would all be rounded to the same side. 0 stays 0. */
#define SPREAD_2(x) (x), (x) + 1 / 2.0f
#define SPREAD_4(x) SPREAD_2(x), SPREAD_2((x) + 1 / 4.0f)
#define SPREAD_8(x) SPREAD_4(x), SPREAD_4((x) + 1 / 8.0f)
#define SPREAD_16(x) SPREAD_8(x), SPREAD_8((x) + 1 / 16.0f)
#define SPREAD_32(x) SPREAD_16(x), SPREAD_16((x) + 1 / 32.0f)
#define SPREAD_64(x) SPREAD_32(x), SPREAD_32((x) + 1 / 64.0f)
static const float spread[4 * CA_LANES] = {SPREAD_64(1 / 128.0f - 0.5f)};
#endif
