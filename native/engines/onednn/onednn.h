/* SPDX-License-Identifier: Apache-2.0
 * This is the ABI of the oneDNN engine's own module. It shares no symbol with the core: the engine is reached by its
 * pointer, and the core's kernels by those in the plan. */
#ifndef CPU_ATTN_ONEDNN_H
#define CPU_ATTN_ONEDNN_H
#include "run/engine.h"
/* cffi: begin */
typedef struct ca_engine ca_engine;

enum ca_onednn_dtype { CA_ONEDNN_F32, CA_ONEDNN_F16, CA_ONEDNN_BF16 };

enum ca_onednn_status {
    CA_ONEDNN_OK,
    CA_ONEDNN_NOT_OPEN,
    CA_ONEDNN_NO_PRIMITIVE, /* oneDNN has none, or only its reference implementation */
    CA_ONEDNN_NO_MEMORY,
    CA_ONEDNN_FAILED
};

/* This has to be called before anything else. get and set are omp_get_max_threads and omp_set_num_threads of the very
 * OpenMP that libdnnl is linked to, or NULL where its run time has no threads of its own. */
int ca_onednn_open(int (*get)(void), void (*set)(int));
const ca_engine *ca_onednn_engine(void);
const char *ca_onednn_text(int status);
const void *ca_onednn_bound(void); /* dnnl_version of the libdnnl that this module is bound to */

/* Computes c [m, n] = a [m, k] times b, which is [k, n], or [n, k] with transpose_b. All are dense and 64-aligned. a
 * and b have dtype, and c has out. impl takes the name of what runs; with a, b, c NULL this only names what would
 * run. */
int ca_onednn_matmul(int dtype, int out, int transpose_b, int64_t m, int64_t n, int64_t k, const void *a, const void *b,
                     void *c, char *impl, size_t impl_size);
/* Computes the softmax of every row of x [rows, cols], float32, dense, 64-aligned, into y, which may be x. */
int ca_onednn_softmax(int64_t rows, int64_t cols, const float *x, float *y, char *impl, size_t impl_size);
/* cffi: end */
#endif
