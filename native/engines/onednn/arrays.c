/* SPDX-License-Identifier: Apache-2.0
 * These are matmul and softmax of whole arrays, for cpu_attn.primitives. Their sizes may be any, so these primitives
 * are not kept here; oneDNN's own cache finds one again in 2 to 10 us. */
#include "cpu/float_mode.h"
#include "primitive.h"
#include <stdio.h>
#include <stdlib.h>

static int dnnl_type(int dtype) {
    static const int types[] = {dnnl_f32, dnnl_f16, dnnl_bf16};
    return dtype >= 0 && dtype < 3 ? types[dtype] : dnnl_data_type_undef;
}

static int run_once(const ca_prim_key *key, const void *src, const void *weights, void *dst, char *impl,
                    size_t impl_size) {
    ca_prim *p;
    int threads = ca_prim_enter(), status = ca_prim_new(key, NULL, &p);
    if (!status) {
        snprintf(impl, impl_size, "%s", ca_prim_impl(p));
        const uint64_t mode = ca_get_mode();
        ca_set_mode(CA_COMPUTING);
        if (dst)
            status = ca_prim_run(p, 1, src, weights, dst, NULL, 0);
        ca_set_mode(mode);
        ca_prim_put(p);
    }
    ca_prim_leave(threads);
    return status;
}

int ca_onednn_matmul(int dtype, int out, int transpose_b, int64_t m, int64_t n, int64_t k, const void *a, const void *b,
                     void *c, char *impl, size_t impl_size) {
    ca_prim_key key = {
        CA_PRIM_MATMUL, dnnl_type(dtype), dnnl_type(out), transpose_b ? dnnl_ba : dnnl_ab, 0, 0, m, n, k, 1};
    return run_once(&key, a, b, c, impl, impl_size);
}

int ca_onednn_softmax(int64_t rows, int64_t cols, const float *x, float *y, char *impl, size_t impl_size) {
    ca_prim_key key = {CA_PRIM_SOFTMAX, dnnl_f32, dnnl_f32, dnnl_ab, 0, 0, rows, cols, 0, 1};
    return run_once(&key, x, NULL, y, impl, impl_size);
}
