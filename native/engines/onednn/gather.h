/* SPDX-License-Identifier: Apache-2.0
 * These functions gather pages of the cache as operands of a matmul. K becomes [D][N] and V [N][Dv], in one of three
 * forms. */
#ifndef CPU_ATTN_ONEDNN_GATHER_H
#define CPU_ATTN_ONEDNN_GATHER_H
#include "kernel/kernel.h"

/* PLAIN is float32 with dense rows. PANELS is float32 with K as dnnl_BA16a64b and V as in PLAIN. In BF16 both are
 * dnnl_BA16a64b2a, and Q and P are bfloat16, for AMX and VDPBF16PS. */
typedef enum ca_form { CA_FORM_BF16, CA_FORM_PANELS, CA_FORM_PLAIN, CA_FORMS } ca_form;

/* Says where the keys of a chunk come from: one kv head of one request. */
typedef struct ca_pages {
    const ca_plan *plan;
    const ca_call *call;
    int request, kv_head;
    void *wide;   /* [ca_wide_bytes]: a group of a cache that is not ready is unpacked here */
    int32_t *key; /* the key of each column of the chunk; keys ascend, so that neighbours in a block lie side by side */
} ca_pages;

int64_t ca_wide_bytes(const ca_plan *plan);

int ca_form_fits(ca_form form, const ca_pages *pages);      /* asked before oneDNN is */
int64_t ca_form_head_size(ca_form form, int64_t head_size); /* dimensions over which qk sums; zeros follow head_size */
int64_t ca_form_k_bytes(int64_t head_size, int64_t keys);   /* enough for every form */
int64_t ca_form_v_bytes(int64_t head_size_v, int64_t keys);

/* These gather n columns, of which the first `skip` count as padding. The padding goes up to `keys`, a multiple of 64;
 * columns of K and rows of V in it are zero. With BF16 even columns have to be even keys. */
void ca_gather_k(ca_form form, const ca_pages *pages, int64_t skip, int64_t n, int64_t keys, void *dst);
void ca_gather_v(ca_form form, const ca_pages *pages, int64_t skip, int64_t n, int64_t keys, void *dst);
/* Returns V's element (key, d) of a gathered chunk. */
float ca_form_v(ca_form form, const void *v, int64_t keys, int64_t head_size_v, int64_t key, int64_t d);
#endif
