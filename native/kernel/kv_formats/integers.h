/* SPDX-License-Identifier: Apache-2.0
 * How numbers become integers up to 32767, for integers.inc. Parameters: those of state.h. */
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

/* The same with a power of two for a unit: numbers of at most 11 digits are exact down to 1/16 of the largest one, and
 * their integers are at most MOST. */
INLINE fit fit_octaves(uint32_t top) {
    const fit f = fit_to(top);
    const float octave = ca_as_float(ca_as_bits(ca_as_float(top) * f.boost) & 0x7f800000);
    return f.by > 0 ? (fit){f.boost, 0x1p14f / octave, octave * 0x1p-14f / f.boost} : f;
}

/* n elements of a query, zeros up to a multiple of 8 behind them, as integers, and in the second chain what was rounded
 * off. That counts for keys whose scale is so large that it may change a logit by more than `error` of an octave: a key
 * is up to 127 (7) scales in every dimension. */
static void put_chain(int kind, float error, float octaves, int64_t n, const float *x, int16_t *restrict whole,
                      int16_t *restrict rest, chain *of) {
    const fit fit = fit_octaves(ca_top_bits(x, n));
    int32_t sum = 0, rests = 0;
    float lost = 0;
    for (int64_t i = 0; i < ca_round_up(n, 8); i++) {
        const float y = x[i] * fit.boost * fit.by;
        const int32_t near = ca_nearest(y), off = ca_nearest((y - (float)near) * 0x1p15f);
        whole[i] = (int16_t)near;
        rest[i] = (int16_t)off;
        lost += fabsf(y - (float)near);
        sum += whole[i];
        rests += rest[i];
    }
    of[0] = (chain){fit.unit, kind == CA_I4 ? -8 * sum : 0, 0};
    of[1] = (chain){fit.unit * 0x1p-15f, kind == CA_I4 ? -8 * rests : 0,
                    error / (fit.unit * octaves * lost * (kind == CA_I4 ? 7 : 127))};
}

/* What is added before weights are rounded, ((37 k) mod 64 + 1/2) / 64 - 1/2: many that are small and alike would all
 * be rounded to the same side. Of the odd factors 37 is among those whose sums over every second, third, ... 32nd key
 * stay smallest: with van der Corput's order V of turning signs came to 13 times the error budget. 0 stays 0. */
#define SPREAD(k) ((37 * (k)) % 64 + 0.5f) / 64 - 0.5f
#define SPREAD_4(k) SPREAD(k), SPREAD((k) + 1), SPREAD((k) + 2), SPREAD((k) + 3)
#define SPREAD_16(k) SPREAD_4(k), SPREAD_4((k) + 4), SPREAD_4((k) + 8), SPREAD_4((k) + 12)
static const float spread[4 * CA_LANES] = {SPREAD_16(0), SPREAD_16(16), SPREAD_16(32), SPREAD_16(48)};
#endif
