/* SPDX-License-Identifier: Apache-2.0
 * This file defines the operands of the two products, for every dtype of an isa file. It takes parameters.h and FACTOR
 * (dtype.inc). */
#ifndef CPU_ATTN_OPERANDS_H
#define CPU_ATTN_OPERANDS_H
#include "prefetch.h"
#include "spread.h"

typedef FACTOR operand;

/* Says which of a pair of dimensions, or of keys, count in a step of a product, or that both of two pairs do. */
enum { BOTH, EVEN, ODD, TWO_PAIRS };

/* Loads the scale-th scale of VL keys, the first being `lane` of the groups from g on. */
INLINE vf scales_of(const group *g, int kv, int64_t scale, int lane) {
    const char *scales = g[lane / CA_LANES].kv[kv].scales;
    return v_load_bf16((const void *)(scales + (scale * CA_LANES + lane % CA_LANES) * 2));
}

/* The same of V, spread for weights that are rounded to bfloat16 once they are multiplied: by up to half a unit of the
 * last digit to either side (a quarter, where the weight is a power of two). */
INLINE vf spread_scales_of(const group *g, int64_t scale, int lane) {
    const float *here = spread + g[lane / CA_LANES].key / CA_LANES % 4 * CA_LANES + lane % CA_LANES;
    return v_mul(scales_of(g, V, scale, lane), v_fma(v_load_f32(here), v_set1(0x1p-8f), v_set1(1)));
}

/* Holds what one call of the product of queries and keys reads and writes. */
typedef struct qk_operands {
    const operand *q;             /* query rows */
    int64_t q_ld;                 /* elements from row to row */
    const group *g;               /* groups of K */
    const prefetch_targets *next; /* groups to prefetch, or NULL */
    float *s;                     /* scores, S_STRIDE apart */
} qk_operands;

/* Returns the operands of the rows from r on and the groups from the i-th on. */
INLINE qk_operands qk_from(qk_operands t, int r, int i) {
    t.q += r * t.q_ld;
    t.g += i;
    t.s += r * S_STRIDE + i * CA_LANES;
    return t;
}

/* Holds what one call of the product of weights and V reads and writes. */
typedef struct pv_operands {
    const operand *p; /* weights of the columns from `first` on; those of the next 32 columns lie `apart` from there */
    int64_t apart, first;
    const group *g;
    int num_groups;
    int64_t lo, hi;               /* the keys [lo, hi) count */
    int from_zero;                /* sums begin with 0, not with O */
    const prefetch_targets *next; /* groups to prefetch, or NULL */
    float *o;                     /* sums, head_size_v apart */
    int64_t head_size_v;
} pv_operands;
#endif
