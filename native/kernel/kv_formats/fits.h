/* SPDX-License-Identifier: Apache-2.0
 * This file makes integers of queries and says how weights become some, for products with the integers of a cache
 * (integers.h, amx/bytes.h). It takes parameters.h. */
#ifndef CPU_ATTN_FITS_H
#define CPU_ATTN_FITS_H
#include "cache/half.h"
#include "kernel/attention/scratch.h"
#include "kernel/attention/spread.h"

#define MOST 32767
#define DIGITS_MOST 32639 /* the largest integer of two digits to base 256 from -128 to 127 */

/* Keys times columns whose weights share a unit: for float16's output, and for bfloat16's. */
enum { FINE_SPAN = 2048, COARSE_SPAN = 16384 };

/* Says how numbers are quantised: q = round(x * boost * inv_step). `step` is the value of one unit. */
typedef struct fit {
    float boost, inv_step, step;
} fit;

/* Returns the fit of numbers to integers up to `integer`. The largest magnitude is the float with the bits `top`; the
 * step is NaN if one of them is not finite. Small numbers get a boost, without which the reciprocal might be infinite.
 */
INLINE fit fit_to(uint32_t top, float integer) {
    const float boost = top < ca_as_bits(0x1p-60f) ? 0x1p64f : 1, most = ca_as_float(top) * boost;
    if (top == 0 || top >= 0x7f800000)
        return (fit){0, 0, top ? NAN : 0};
    return (fit){boost, integer / most, most / integer / boost};
}

/* Does what fit_to does, with a power of two as the step. Numbers with significands of at most 11 bits are then exact
 * from 1/16 of the largest one on (1/8, where that is nearly 2 to a power), and their integers are at most DIGITS_MOST.
 */
INLINE fit fit_octaves(uint32_t top) {
    const fit f = fit_to(top, MOST);
    const float half = 0.502f; /* 1/2, and so much more that what is rounded to 2^15 counts as the next octave */
    const float octave = ca_as_float(ca_as_bits(ca_as_float(top) * f.boost * half) & 0x7f800000);
    return f.inv_step > 0 ? (fit){f.boost, 0x1p13f / octave, octave * 0x1p-13f / f.boost} : f;
}

/* Quantises n elements of a query, followed by zeros up to a multiple of 8, to `whole`, and their rounding errors to
 * `rest` with a unit of their own. The latter count for keys whose scale is so large that they may change a logit by
 * more than `error` of an octave: in each dimension a key is up to ca_largest_of scales, or one more where it is the
 * least integer of nibbles. `start` takes the format's zero point out of the sums. */
static void put_unit(int kv_dtype, float error, float octaves, int64_t n, const float *x, int16_t *restrict whole,
                     int16_t *restrict rest, unit *of) {
    const fit fit = fit_octaves(ca_top_bits(x, n));
    const int zero = ca_zero_of(kv_dtype);
    int32_t sum = 0, rests = 0;
    float lost = 0;
    for (int64_t i = 0; i < ca_round_up(n, 8); i++) {
        const float y = x[i] * fit.boost * fit.inv_step;
        const int32_t near = ca_nearest(y), off = ca_nearest((y - (float)near) * 0x1p15f);
        whole[i] = (int16_t)near;
        rest[i] = (int16_t)off;
        lost += fabsf(y - (float)near);
        sum += whole[i];
        rests += rest[i];
    }
    of[0] = (unit){fit.step, -zero * sum, 0};
    of[1] = (unit){fit.step * 0x1p-15f, -zero * rests, error / (fit.step * octaves * lost * ca_largest_of(kv_dtype))};
}
#endif
