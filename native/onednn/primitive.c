/* SPDX-License-Identifier: Apache-2.0 */
#include "primitive.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A head size uses at most 13 x 6 x 3 of these (buckets of rows, of keys, the operations). */
#define TABLE 8192
#define PROBES 32
#define LENT 16 /* 2^4: see borrow */
#define ARG_FACTOR (DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1)

typedef struct binding {
    dnnl_stream_t stream;
    dnnl_memory_t src, weights, dst, pad, factor;
} binding;

struct ca_prim {
    ca_prim_key key;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive; /* NULL: known not to be had */
    const char *impl;
    size_t pad;
    int kept;
    _Atomic(binding *) lent[LENT];
};

static dnnl_engine_t cpu;
static int (*get_threads)(void);
static void (*set_threads)(int);
static _Atomic(ca_prim *) table[TABLE];

int ca_onednn_open(int (*get)(void), void (*set)(int)) {
    get_threads = get;
    set_threads = set;
    if (cpu || dnnl_engine_create(&cpu, dnnl_cpu, 0) == dnnl_success)
        return CA_ONEDNN_OK;
    return CA_ONEDNN_NOT_OPEN;
}

const void *ca_onednn_bound(void) { return (const void *)(uintptr_t)dnnl_version; }

const char *ca_onednn_text(int status) {
    switch (status) {
    case CA_ONEDNN_OK:
        return "done";
    case CA_ONEDNN_NOT_OPEN:
        return "oneDNN has no CPU engine here";
    case CA_ONEDNN_NO_PRIMITIVE:
        return "oneDNN has no optimised primitive for these sizes and types on this CPU";
    case CA_ONEDNN_NO_MEMORY:
        return "out of memory in oneDNN";
    default:
        return "an oneDNN primitive failed while running";
    }
}

int ca_prim_enter(void) {
    if (!set_threads)
        return 0;
    int threads = get_threads();
    set_threads(1);
    return threads;
}

void ca_prim_leave(int threads) {
    if (set_threads)
        set_threads(threads);
}

static int matrix(dnnl_memory_desc_t *out, int64_t rows, int64_t cols, int32_t dtype, int32_t tag) {
    dnnl_dims_t dims = {rows, cols};
    *out = NULL;
    return dnnl_memory_desc_create_with_tag(out, 2, dims, (dnnl_data_type_t)dtype, (dnnl_format_tag_t)tag);
}

/* Dense rows, ld apart, in parts. */
static int matrices(dnnl_memory_desc_t *out, int64_t parts, int64_t rows, int64_t cols, int32_t dtype, int64_t ld,
                    int64_t apart) {
    dnnl_dims_t dims = {parts, rows, cols}, strides = {apart, ld, 1};
    *out = NULL;
    return dnnl_memory_desc_create_with_strides(out, 3, dims, (dnnl_data_type_t)dtype, strides);
}

static dnnl_primitive_attr_t attributes(const ca_prim_key *key) {
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t ops = NULL;
    dnnl_memory_desc_t one = NULL;
    int bad = matrix(&one, 1, 1, dnnl_f32, dnnl_ab) || dnnl_primitive_attr_create(&attr) ||
              dnnl_post_ops_create(&ops) || dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) ||
              (key->scaled && dnnl_post_ops_append_binary(ops, dnnl_binary_mul, one)) ||
              (key->tanh && dnnl_post_ops_append_eltwise(ops, dnnl_eltwise_tanh, 0, 0)) ||
              dnnl_primitive_attr_set_post_ops(attr, ops);
    dnnl_post_ops_destroy(ops);
    dnnl_memory_desc_destroy(one);
    if (!bad)
        return attr;
    dnnl_primitive_attr_destroy(attr);
    return NULL;
}

static int operands(const ca_prim_key *key, dnnl_memory_desc_t *src, dnnl_memory_desc_t *weights,
                    dnnl_memory_desc_t *dst) {
    const int64_t m = key->m, n = key->n, k = key->k / key->parts;
    if (key->parts == 1)
        return matrix(src, m, k, key->dtype, dnnl_ab) || matrix(weights, k, n, key->dtype, key->weights) ||
               matrix(dst, m, n, key->dst, dnnl_ab);
    return matrices(src, key->parts, m, k, key->dtype, key->k, k) ||
           matrices(weights, key->parts, k, n, key->dtype, n, k * n) ||
           matrices(dst, key->parts, m, n, key->dst, n, m * n);
}

static dnnl_primitive_desc_t describe(const ca_prim_key *key) {
    dnnl_primitive_desc_t desc = NULL;
    dnnl_memory_desc_t src = NULL, weights = NULL, dst = NULL;
    dnnl_primitive_attr_t attr = attributes(key);
    if (attr && key->op == CA_PRIM_SOFTMAX && !matrix(&dst, key->m, key->n, key->dst, dnnl_ab))
        dnnl_softmax_forward_primitive_desc_create(&desc, cpu, dnnl_forward_inference, dnnl_softmax_accurate, dst, dst,
                                                   1, attr);
    if (attr && key->op == CA_PRIM_MATMUL && !operands(key, &src, &weights, &dst))
        dnnl_matmul_primitive_desc_create(&desc, cpu, src, weights, NULL, dst, attr);
    dnnl_memory_desc_destroy(src);
    dnnl_memory_desc_destroy(weights);
    dnnl_memory_desc_destroy(dst);
    dnnl_primitive_attr_destroy(attr);
    return desc;
}

static void release(binding *b) {
    if (!b)
        return;
    dnnl_memory_destroy(b->src);
    dnnl_memory_destroy(b->weights);
    dnnl_memory_destroy(b->dst);
    dnnl_memory_destroy(b->pad);
    dnnl_memory_destroy(b->factor);
    dnnl_stream_destroy(b->stream);
    free(b);
}

static void destroy(ca_prim *p) {
    for (int i = 0; i < LENT; i++)
        release(atomic_load(&p->lent[i]));
    dnnl_primitive_destroy(p->primitive);
    dnnl_primitive_desc_destroy(p->desc);
    free(p);
}

/* Reference implementations are 100 to 1000 times slower than anything else: none at all is the
 * better answer, the caller has another form to try. */
static ca_prim *make(const ca_prim_key *key, const char *need) {
    ca_prim *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->key = *key;
    p->impl = "";
    p->desc = cpu ? describe(key) : NULL;
    if (!p->desc)
        return p;
    dnnl_primitive_desc_query(p->desc, dnnl_query_impl_info_str, 0, (void *)&p->impl);
    p->pad = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0));
    if (strncmp(p->impl, "ref", 3) != 0 && (!need || strstr(p->impl, need)) &&
        dnnl_primitive_create(&p->primitive, p->desc) != dnnl_success)
        p->primitive = NULL;
    return p;
}

static uint64_t hash(const ca_prim_key *key) {
    uint64_t words[sizeof *key / 8], h = 0xcbf29ce484222325u;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return h;
}

static ca_prim *had(ca_prim *p) {
    if (p->primitive)
        return p;
    ca_prim_put(p);
    return NULL;
}

ca_prim *ca_prim_new(const ca_prim_key *key, const char *need) {
    ca_prim *p = make(key, need);
    return p ? had(p) : NULL;
}

/* Entries are never removed, so a reader needs no lock. Two threads may make the same primitive;
 * the one whose exchange fails throws its own away, which nobody else has seen. */
ca_prim *ca_prim_get(const ca_prim_key *key, const char *need) {
    uint64_t at = hash(key);
    ca_prim *made = NULL;
    for (int i = 0; i < PROBES; i++) {
        _Atomic(ca_prim *) *slot = &table[(at + (uint64_t)i) % TABLE];
        ca_prim *p = atomic_load_explicit(slot, memory_order_acquire);
        if (!p) {
            if (!made && !(made = make(key, need)))
                return NULL;
            made->kept = 1;
            if (atomic_compare_exchange_strong(slot, &p, made))
                return had(made);
            made->kept = 0;
        }
        if (memcmp(&p->key, key, sizeof *key) == 0) {
            if (made)
                destroy(made);
            return had(p);
        }
    }
    return made ? had(made) : ca_prim_new(key, need);
}

void ca_prim_put(ca_prim *p) {
    if (p && !p->kept)
        destroy(p);
}

const char *ca_prim_impl(const ca_prim *p) { return p->impl; }

static binding *bind(const ca_prim *p) {
    binding *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    const struct {
        dnnl_memory_t *memory;
        dnnl_query_t what;
        int index, there;
    } all[] = {{&b->src, dnnl_query_src_md, 0, 1},
               {&b->weights, dnnl_query_weights_md, 0, p->key.op == CA_PRIM_MATMUL},
               {&b->dst, dnnl_query_dst_md, 0, 1},
               {&b->pad, dnnl_query_scratchpad_md, 0, 1},
               {&b->factor, dnnl_query_exec_arg_md, ARG_FACTOR, p->key.scaled}};
    int bad = dnnl_stream_create(&b->stream, cpu, dnnl_stream_default_flags) != dnnl_success;
    for (int i = 0; i < 5 && !bad; i++)
        if (all[i].there)
            bad = dnnl_memory_create(all[i].memory, dnnl_primitive_desc_query_md(p->desc, all[i].what, all[i].index),
                                     cpu, DNNL_MEMORY_NONE) != dnnl_success;
    if (!bad)
        return b;
    release(b);
    return NULL;
}

/* A memory object costs 0.45 us to create (v3.2) against 7 ns to point elsewhere. */
static binding *borrow(ca_prim *p, unsigned *slot) {
    /* another thread has another stack */
    *slot = (unsigned)(((uint64_t)(uintptr_t)slot >> 12) * 0x9e3779b97f4a7c15u >> 60);
    binding *b = atomic_exchange(&p->lent[*slot], NULL);
    return b ? b : bind(p);
}

static void give_back(ca_prim *p, unsigned slot, binding *b) { release(atomic_exchange(&p->lent[slot], b)); }

static int execute(ca_prim *p, const binding *b) {
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, b->src},
                              {DNNL_ARG_DST, b->dst},
                              {DNNL_ARG_SCRATCHPAD, b->pad},
                              {DNNL_ARG_WEIGHTS, b->weights},
                              {ARG_FACTOR, b->factor}};
    int number = 3 + (p->key.op == CA_PRIM_MATMUL) + (p->key.scaled != 0);
    int status = dnnl_primitive_execute(p->primitive, b->stream, number, args);
    return status || dnnl_stream_wait(b->stream) ? CA_ONEDNN_FAILED : CA_ONEDNN_OK;
}

int ca_prim_run(ca_prim *p, float factor, const void *src, const void *weights, void *dst, void *pad,
                size_t pad_bytes) {
    unsigned slot;
    binding *b = borrow(p, &slot);
    void *own = NULL;
    if (b && p->pad > pad_bytes)
        pad = own = aligned_alloc(64, (p->pad + 63) / 64 * 64);
    if (!b || (p->pad > pad_bytes && !own)) {
        release(b);
        return CA_ONEDNN_NO_MEMORY;
    }
    int status = dnnl_memory_set_data_handle(b->src, (void *)src) || dnnl_memory_set_data_handle(b->dst, dst) ||
                 dnnl_memory_set_data_handle(b->pad, pad) ||
                 (b->weights && dnnl_memory_set_data_handle(b->weights, (void *)weights)) ||
                 (b->factor && dnnl_memory_set_data_handle(b->factor, &factor));
    status = status ? CA_ONEDNN_FAILED : execute(p, b);
    free(own);
    give_back(p, slot, b);
    return status;
}
