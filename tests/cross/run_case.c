/* SPDX-License-Identifier: Apache-2.0
 * One call of reshape_and_cache and of attention_with_kv_cache without Python, for machines that are emulated:
 * test_cross.py writes the arrays to standard input and reads output and lse from standard output, and from standard
 * error by what products the kernel goes. */
#include "cache/layout.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DTYPE,
    K_DTYPE,
    V_DTYPE,
    REQS,
    HEADS,
    KV_HEADS,
    SIZE,
    SIZE_V,
    BLOCKS,
    BLOCK_SIZE,
    COLUMNS,
    TOKENS,
    WRITTEN,
    CAUSAL,
    LEFT,
    RIGHT,
    SLOPES,
    SINKS,
    FLAGS,
    SELECTED, /* blocks for each list and head, -1: all */
    LISTS,    /* one for each request, or query block */
    QUERY_BLOCK,
    BY_QUERY_HEAD, /* query heads have lists */
    KV_CACHE_LAYOUT,
    HADAMARD,
    SHARED, /* the plan is given the block table */
    SPANS,
    DOCUMENTS,
    TREE_BYTES, /* of a row of the tree mask, -1: there is none */
    CLAMPED,
    CHUNK, /* attention_chunk_size, 0: there is none */
    SELECTED_TOKENS, /* for each query token, -1: all */
    BIAS,            /* four sizes, 0: there is none */
    FIELDS = BIAS + 4
};

static int64_t f[FIELDS];

static void die(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

static void *memory(int64_t bytes, int fill) {
    void *p = aligned_alloc(64, (size_t)ca_round_up(ca_max64(bytes, 1), 64));
    if (!p)
        die("no memory");
    return memset(p, fill, (size_t)bytes);
}

static ca_array array(int dtype, int itemsize, int ndim, const int64_t *shape, int fill) {
    ca_array a = {.ndim = ndim, .dtype = dtype, .itemsize = itemsize, .writable = 1};
    int64_t size = 1;
    for (int i = ndim - 1; i >= 0; size *= shape[i--]) {
        a.shape[i] = shape[i];
        a.strides[i] = size;
    }
    a.address = (uintptr_t)memory(size * itemsize, fill);
    return a;
}

static int64_t bytes_of(const ca_array *a) {
    int64_t size = a->itemsize;
    for (int i = 0; i < a->ndim; i++)
        size *= a->shape[i];
    return size;
}

static ca_array given(int dtype, int itemsize, int ndim, const int64_t *shape) {
    ca_array a = array(dtype, itemsize, ndim, shape, 0);
    size_t bytes = (size_t)bytes_of(&a);
    if (fread((void *)a.address, 1, bytes, stdin) != bytes)
        die("standard input is short");
    return a;
}

static ca_array floats(int there) { return there ? given(CA_F32, 4, 1, &f[HEADS]) : (ca_array){0}; }

static int isa_by_name(const char *name) {
    ca_isa_info info;
    for (int i = 0; ca_isa(i, &info); i++)
        if (!strcmp(info.name, name) && info.supported)
            return i;
    die("no such isa");
    return -1;
}

static ca_array cache(int isa, int value) {
    int64_t size = f[value ? SIZE_V : SIZE];
    int dtype = (int)f[DTYPE], kv_dtype = (int)f[value ? V_DTYPE : K_DTYPE];
    int64_t width = ca_max64(ca_block_elements(isa, dtype, kv_dtype, f[BLOCK_SIZE], size, 0),
                             ca_block_elements(isa, dtype, kv_dtype, f[BLOCK_SIZE], size, 1));
    int64_t shape[] = {f[BLOCKS], f[KV_HEADS], f[BLOCK_SIZE], ca_div_up(width, f[BLOCK_SIZE])};
    if (f[KV_CACHE_LAYOUT] != CA_PACKED)
        shape[3] = size;
    if (f[KV_CACHE_LAYOUT] == CA_NHD) {
        shape[1] = f[BLOCK_SIZE];
        shape[2] = f[KV_HEADS];
    }
    return array(ca_is_quantised(kv_dtype) ? CA_U8 : kv_dtype, ca_dtype_size(kv_dtype), 4, shape, 0xff);
}

int main(int argc, char **argv) {
    float x[4]; /* scale, softcap, k_scale, v_scale */
    if (argc != 2 || fread(f, sizeof *f, FIELDS, stdin) != FIELDS || fread(x, sizeof *x, 4, stdin) != 4)
        die("usage: run_case ISA < arrays");
    int isa = isa_by_name(argv[1]), item = ca_dtype_size((int)f[DTYPE]), dtype = (int)f[DTYPE];
    ca_array kc = cache(isa, 0), vc = cache(isa, 1);
    ca_array q = given(dtype, item, 3, (int64_t[]){f[TOKENS], f[HEADS], f[SIZE]});
    ca_array k = given(dtype, item, 3, (int64_t[]){f[WRITTEN], f[KV_HEADS], f[SIZE]});
    ca_array v = given(dtype, item, 3, (int64_t[]){f[WRITTEN], f[KV_HEADS], f[SIZE_V]});
    ca_array slots = given(CA_I64, 8, 1, &f[WRITTEN]);
    ca_array table = given(CA_I32, 4, 2, (int64_t[]){f[REQS], f[COLUMNS]});
    ca_array starts = given(CA_I32, 4, 1, (int64_t[]){f[REQS] + 1}), lens = given(CA_I32, 4, 1, &f[REQS]);
    ca_array flags = f[FLAGS] ? given(CA_I32, 4, 1, &f[REQS]) : (ca_array){0};
    ca_array slopes = floats(f[SLOPES] != 0), sinks = floats(f[SINKS] != 0);
    ca_array selected = {0};
    if (f[SELECTED] >= 0)
        selected = given(CA_I32, 4, 3, (int64_t[]){f[LISTS], f[f[BY_QUERY_HEAD] ? HEADS : KV_HEADS], f[SELECTED]});
    ca_array tokens = {0};
    if (f[SELECTED_TOKENS] >= 0)
        tokens = given(CA_I32, 4, 2, (int64_t[]){f[TOKENS], f[SELECTED_TOKENS]});
    const ca_array spans = given(CA_I32, 4, 2, (int64_t[]){f[SPANS], 3});
    const ca_array documents = given(CA_I32, 4, 2, (int64_t[]){f[DOCUMENTS], 2});
    const int64_t tree_rows = f[TREE_BYTES] < 0 ? -1 : f[TOKENS];
    const ca_array tree = given(CA_U8, 1, 2, (int64_t[]){ca_max64(tree_rows, 0), ca_max64(f[TREE_BYTES], 0)});
    const ca_array bias = f[BIAS] ? given(CA_F32, 4, 4, &f[BIAS]) : (ca_array){0};
    const ca_masks masks = {.spans = (const int32_t *)spans.address,
                            .documents = (const int32_t *)documents.address,
                            .tree = (const uint8_t *)tree.address,
                            .num_spans = f[SPANS],
                            .num_documents = f[DOCUMENTS],
                            .tree_rows = tree_rows,
                            .tree_bytes = f[TREE_BYTES],
                            .tree_stride = f[TREE_BYTES]};
    const int masked = f[SPANS] + f[DOCUMENTS] > 0 || tree_rows >= 0;
    ca_array output = array(dtype, item, 3, (int64_t[]){f[TOKENS], f[HEADS], f[SIZE_V]}, 0xff);
    ca_array lse = array(CA_F32, 4, 2, (int64_t[]){f[HEADS], f[TOKENS]}, 0xff);
    ca_meaning meaning = {.head_sizes = 1};
    meaning.of[dtype].known = 1;
    meaning.of[dtype].isa = isa;
    meaning.of[dtype].kv_dtype[K] = (int32_t)f[K_DTYPE];
    meaning.of[dtype].kv_dtype[V] = (int32_t)f[V_DTYPE];
    ca_fault fault = {0};
    ca_shape shape = {.num_reqs = (int32_t)f[REQS],
                      .num_heads = (int32_t)f[HEADS],
                      .num_kv_heads = (int32_t)f[KV_HEADS],
                      .head_size = (int32_t)f[SIZE],
                      .head_size_v = (int32_t)f[SIZE_V],
                      .dtype = dtype,
                      .k_dtype = (int32_t)f[K_DTYPE],
                      .v_dtype = (int32_t)f[V_DTYPE],
                      .isa = isa,
                      .causal = (int32_t)f[CAUSAL],
                      .window_left = (int32_t)f[LEFT],
                      .window_right = (int32_t)f[RIGHT],
                      .enable_kv_split = 1,
                      .mm_prefix_clamp_sliding_window = (int32_t)f[CLAMPED],
                      .attention_chunk_size = (int32_t)f[CHUNK],
                      .num_threads = 1,
                      .kv_cache_layout = (int32_t)f[KV_CACHE_LAYOUT],
                      .hadamard = (int32_t)f[HADAMARD],
                      .block_size = f[SHARED] ? (int32_t)f[BLOCK_SIZE] : 0,
                      .max_selected_tokens = f[SELECTED_TOKENS] < 0 ? 0 : (int32_t)ca_max64(1, f[SELECTED_TOKENS]),
                      .query_block_size = (int32_t)f[QUERY_BLOCK],
                      .select_by_query_head = (int32_t)f[BY_QUERY_HEAD]};
    const ca_array written[CA_WRITE_ARRAYS] = {kc, vc, k, v, slots};
    const ca_array step[CA_STEP_ARRAYS] = {[CA_STEP_QUERY_START_LOC] = starts,
                                           [CA_STEP_SEQ_LENS] = lens,
                                           [CA_STEP_DYNAMIC_CAUSAL] = flags,
                                           [CA_STEP_BLOCK_TABLE] = f[SHARED] ? table : (ca_array){0}};
    const ca_array call[CA_ATTENTION_ARRAYS] = {[CA_OUTPUT] = output,
                                                [CA_LSE] = lse,
                                                [CA_QUERY] = q,
                                                [CA_KEY_CACHE] = kc,
                                                [CA_VALUE_CACHE] = vc,
                                                [CA_BLOCK_TABLE] = table,
                                                [CA_QUERY_START_LOC] = starts,
                                                [CA_SEQ_LENS] = lens,
                                                [CA_DYNAMIC_CAUSAL] = flags,
                                                [CA_ALIBI_SLOPES] = slopes,
                                                [CA_S_AUX] = sinks,
                                                [CA_SELECTED_BLOCKS] = selected,
                                                [CA_ATTN_BIAS] = bias,
                                                [CA_SELECTED_TOKENS] = tokens};
    ca_plan_info info;
    ca_write(0, written, &meaning, (int)f[KV_CACHE_LAYOUT], (int)f[HADAMARD], x[2], x[3], &fault);
    ca_plan *plan =
        fault.status ? NULL : ca_plan_new(&shape, NULL, 0, step, masked ? &masks : NULL, &fault);
    if (!plan)
        die("no plan");
    ca_plan_describe(plan, &info);
    ca_attend(plan, 0, call, 0, (int)f[CAUSAL], x[0], x[1], x[2], x[3], memory(info.workspace_bytes, 0xff),
              info.workspace_bytes, &fault);
    if (fault.status)
        die("the call failed");
    ca_kernel_info kernel;
    ca_isa_kernel(isa, dtype, &kernel);
    fprintf(stderr, "%s\n", kernel.method);
    fwrite((void *)output.address, 1, (size_t)bytes_of(&output), stdout);
    fwrite((void *)lse.address, 1, (size_t)bytes_of(&lse), stdout);
    return 0;
}
