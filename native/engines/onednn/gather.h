/* SPDX-License-Identifier: Apache-2.0
 * Pages of the cache as operands of a matmul. K becomes [D][N], V [N][Dv], in one of three forms. */
#ifndef CPU_ATTN_ONEDNN_GATHER_H
#define CPU_ATTN_ONEDNN_GATHER_H
#include "kernel/kernel.h"

/* PLAIN: float32, rows dense. PANELS: float32, K as dnnl_BA16a64b, V as in PLAIN.
 * BF16: both as dnnl_BA16a64b2a, Q and P bfloat16, for AMX. */
typedef enum ca_form { CA_FORM_BF16, CA_FORM_PANELS, CA_FORM_PLAIN, CA_FORMS } ca_form;

/* Where the keys of a chunk come from: one kv head of one request. */
typedef struct ca_pages {
    const ca_plan *plan;
    const ca_call *call;
    int request, kv_head;
    void *wide;   /* ca_wide_bytes: a group of a cache that is not ready, unpacked */
    int32_t *key; /* of each column of the chunk, ascending; neighbours in a block lie side by side */
} ca_pages;

int64_t ca_wide_bytes(const ca_plan *plan);

int ca_form_fits(ca_form form, const ca_pages *pages);      /* before oneDNN is asked */
int64_t ca_form_head_size(ca_form form, int64_t head_size); /* the K dimension of QK: zeros behind head_size */
int64_t ca_form_k_bytes(int64_t head_size, int64_t keys);   /* enough for every form */
int64_t ca_form_v_bytes(int64_t head_size_v, int64_t keys);

/* n columns, of which the first `skip` count as padding; columns of K and rows of V in the padding, up to `keys`, are
 * zero. keys % 64 == 0; BF16: even columns are even keys. */
void ca_gather_k(ca_form form, const ca_pages *pages, int64_t skip, int64_t n, int64_t keys, void *dst);
void ca_gather_v(ca_form form, const ca_pages *pages, int64_t skip, int64_t n, int64_t keys, void *dst);
/* V's element (key, d) of a gathered chunk. */
float ca_form_v(ca_form form, const void *v, int64_t keys, int64_t head_size_v, int64_t key, int64_t d);
#endif
