/* SPDX-License-Identifier: Apache-2.0
 * What the products take, for every dtype of a file. Parameters: parameters.h and FACTOR, the type of numbers on the
 * query's side of a product: float where the microkernel is fma.inc, uint16_t for dot.inc. */
#ifndef CPU_ATTN_OPERANDS_H
#define CPU_ATTN_OPERANDS_H
#include "prefetch.h"

typedef FACTOR operand;

/* Which of a pair of dimensions, or of keys, count in a step. */
enum { BOTH, EVEN, ODD };

/* The scale-th scale of VL keys from one of the lanes of some groups on. */
INLINE vf scales_of(const group *g, int kv, int64_t scale, int lane) {
    const char *scales = g[lane / CA_LANES].kv[kv].scales;
    return v_load_bf16((const void *)(scales + (scale * CA_LANES + lane % CA_LANES) * 2));
}

/* Of qk over some groups. */
typedef struct qk_operands {
    const operand *q;
    int64_t q_ld;
    const group *g;
    const ahead *next;
    float *s;
} qk_operands;

/* The same from row r and from the i-th group on. */
INLINE qk_operands qk_from(qk_operands t, int r, int i) {
    t.q += r * t.q_ld;
    t.g += i;
    t.s += r * S_STRIDE + i * CA_LANES;
    return t;
}

/* Of pv. */
typedef struct pv_operands {
    const operand *p; /* weights for the columns from `first` on; those of the next 32 columns lie `apart` */
    int64_t apart, first;
    const group *g;
    int num_groups;
    int64_t lo, hi; /* keys that count */
    int from_zero;  /* sums begin with 0, not with O */
    const ahead *next;
    float *o;
    int64_t head_size_v;
} pv_operands;
#endif
