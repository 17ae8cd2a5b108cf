/* SPDX-License-Identifier: Apache-2.0
 * oneDNN's primitives are found by key. One primitive serves all threads; what a run binds it to (stream, memory
 * objects) is lent to one thread at a time. */
#ifndef CPU_ATTN_ONEDNN_PRIMITIVE_H
#define CPU_ATTN_ONEDNN_PRIMITIVE_H
#include "onednn.h"
#include <oneapi/dnnl/dnnl.h>

typedef enum ca_prim_op { CA_PRIM_MATMUL, CA_PRIM_SOFTMAX } ca_prim_op;

/* A matmul is dst [m, n] = f(factor * src [m, k] x weights [k, n]), where f is tanh or nothing. If it is `scaled`, each
 * run brings a factor: layers differ in theirs (fp8), and a primitive for each took 0.14 MiB. With `parts`, k is cut
 * into so many, and dst is [parts, m, n], whose sum is the product. A softmax goes over n, in float32. */
typedef struct ca_prim_key {
    int32_t op;
    int32_t dtype, dst; /* dnnl_data_type_t: that of src and weights, that of dst */
    int32_t weights;    /* dnnl_format_tag_t */
    int32_t tanh;
    int32_t scaled;
    int64_t m, n, k, parts;
} ca_prim_key;

typedef struct ca_prim ca_prim;

/* From here on oneDNN takes a team of one on this thread. Returns what ca_prim_leave has to give back. */
int ca_prim_enter(void);
void ca_prim_leave(int threads);

/* Lends the primitive. Returns CA_ONEDNN_NO_PRIMITIVE where oneDNN has none, only its reference, or (with need != NULL)
 * none whose name contains need, and CA_ONEDNN_NO_MEMORY where memory ends. The lookup takes no lock. */
int ca_prim_get(const ca_prim_key *key, const char *need, ca_prim **prim);
int ca_prim_new(const ca_prim_key *key, const char *need, ca_prim **prim); /* made for one use, not kept */
void ca_prim_put(ca_prim *p);

const char *ca_prim_impl(const ca_prim *p);
int ca_prim_run(ca_prim *p, float factor, const void *src, const void *weights, void *dst, void *pad, size_t pad_bytes);
#endif
