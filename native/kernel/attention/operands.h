/* SPDX-License-Identifier: Apache-2.0
 * This file defines the operands of the two products, for every dtype of an isa file. It takes parameters.h and FACTOR
 * (dtype.inc). */
#ifndef CPU_ATTN_OPERANDS_H
#define CPU_ATTN_OPERANDS_H
#include "prefetch.h"

typedef FACTOR operand;

/* Says which of a pair of dimensions, or of keys, count in a step of a product, or that both of two pairs do. */
enum { BOTH, EVEN, ODD, TWO_PAIRS };

/* Loads the scale-th scale of VL keys, the first being `lane` of the groups from g on. */
INLINE vf scales_of(const group *g, int kv, int64_t scale, int lane) {
    const char *scales = g[lane / CA_LANES].kv[kv].scales;
    return v_load_bf16((const void *)(scales + (scale * CA_LANES + lane % CA_LANES) * 2));
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
