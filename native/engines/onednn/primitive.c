/* SPDX-License-Identifier: Apache-2.0 */
#include "primitive.h"
#include "guard.h"
#include "reserve.h"
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A head size uses at most 13 x 6 x 3 primitives (buckets of rows, buckets of keys, operations). */
#define TABLE 8192
#define PROBES 32
#define LENT 16 /* borrow takes 4 bits of a hash */
#define ARG_FACTOR (DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1)

typedef struct binding {
    dnnl_stream_t stream;
    dnnl_memory_t src, weights, dst, pad, factor;
} binding;

struct ca_prim {
    ca_prim_key key;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive; /* NULL: oneDNN is known to have none */
    const char *impl;
    size_t pad;
    int kept;
    _Atomic(binding *) lent[LENT];
};

static dnnl_engine_t cpu;
static int (*get_threads)(void);
static void (*set_threads)(int);
static _Atomic(ca_prim *) table[TABLE];

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

/* libgomp's number is below 1 where OMP_NUM_THREADS is more than an int holds; given back, it would mean 1. */
int ca_prim_enter(void) {
    if (!set_threads)
        return 0;
    const int threads = get_threads();
    set_threads(1);
    return threads > 0 ? threads : INT_MAX;
}

void ca_prim_leave(int threads) {
    if (set_threads)
        set_threads(threads);
}

static int matrix(dnnl_memory_desc_t *out, int64_t rows, int64_t cols, int32_t dtype, int32_t tag) {
    dnnl_dims_t dims = {rows, cols};
    return dnnl_memory_desc_create_with_tag(out, 2, dims, (dnnl_data_type_t)dtype, (dnnl_format_tag_t)tag);
}

/* Describes `parts` matrices, `apart` elements from one to the next, whose dense rows are ld apart. */
static int matrices(dnnl_memory_desc_t *out, int64_t parts, int64_t rows, int64_t cols, int32_t dtype, int64_t ld,
                    int64_t apart) {
    dnnl_dims_t dims = {parts, rows, cols}, strides = {apart, ld, 1};
    return dnnl_memory_desc_create_with_strides(out, 3, dims, (dnnl_data_type_t)dtype, strides);
}

/* Holds a primitive in the making, and what only serves to make it. */
typedef struct making {
    const ca_prim_key *key;
    const char *need;
    ca_prim *prim;
    int status; /* the dnnl_status_t of what failed */
    dnnl_memory_desc_t one, src, weights, dst;
    dnnl_post_ops_t ops;
    dnnl_primitive_attr_t attr;
} making;

static int attributes(making *m) {
    int status = dnnl_primitive_attr_create(&m->attr);
    if (!status)
        status = dnnl_post_ops_create(&m->ops);
    if (!status)
        status = dnnl_primitive_attr_set_scratchpad_mode(m->attr, dnnl_scratchpad_mode_user);
    if (!status && m->key->scaled)
        status = matrix(&m->one, 1, 1, dnnl_f32, dnnl_ab);
    if (!status && m->key->scaled)
        status = dnnl_post_ops_append_binary(m->ops, dnnl_binary_mul, m->one);
    if (!status && m->key->tanh)
        status = dnnl_post_ops_append_eltwise(m->ops, dnnl_eltwise_tanh, 0, 0);
    return status ? status : (int)dnnl_primitive_attr_set_post_ops(m->attr, m->ops);
}

static int operands(making *x) {
    const ca_prim_key *key = x->key;
    const int64_t m = key->m, n = key->n, k = key->k / key->parts;
    int status;
    if (key->op == CA_PRIM_SOFTMAX)
        return matrix(&x->dst, m, n, key->dst, dnnl_ab);
    if (key->parts == 1) {
        status = matrix(&x->src, m, k, key->dtype, dnnl_ab);
        if (!status)
            status = matrix(&x->weights, k, n, key->dtype, key->weights);
        return status ? status : matrix(&x->dst, m, n, key->dst, dnnl_ab);
    }
    status = matrices(&x->src, key->parts, m, k, key->dtype, key->k, k);
    if (!status)
        status = matrices(&x->weights, key->parts, k, n, key->dtype, n, k * n);
    return status ? status : matrices(&x->dst, key->parts, m, n, key->dst, n, m * n);
}

static int describe(making *m) {
    int status = attributes(m);
    if (!status)
        status = operands(m);
    if (status)
        return status;
    if (m->key->op == CA_PRIM_SOFTMAX)
        return dnnl_softmax_forward_primitive_desc_create(&m->prim->desc, cpu, dnnl_forward_inference,
                                                          dnnl_softmax_accurate, m->dst, m->dst, 1, m->attr);
    return dnnl_matmul_primitive_desc_create(&m->prim->desc, cpu, m->src, m->weights, NULL, m->dst, m->attr);
}

/* Reference implementations are 100 to 1000 times slower than anything else. They are refused, since the caller has
 * another form to try. */
static void build(void *with) {
    making *m = with;
    ca_prim *p = m->prim;
    m->status = describe(m);
    if (m->status)
        return;
    dnnl_primitive_desc_query(p->desc, dnnl_query_impl_info_str, 0, (void *)&p->impl);
    p->pad = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0));
    if (strncmp(p->impl, "ref", 3) == 0 || (m->need && !strstr(p->impl, m->need)))
        m->status = dnnl_unimplemented;
    else
        m->status = dnnl_primitive_create(&p->primitive, p->desc);
}

static void release_making(making *m) {
    dnnl_memory_desc_destroy(m->one);
    dnnl_memory_desc_destroy(m->src);
    dnnl_memory_desc_destroy(m->weights);
    dnnl_memory_desc_destroy(m->dst);
    dnnl_post_ops_destroy(m->ops);
    dnnl_primitive_attr_destroy(m->attr);
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

/* oneDNN's own cache keeps the promise of a primitive whose making an exception has ended, and would break it to
 * everybody who asks for that primitive again. This drops what is in the cache; primitives that are in use stay. */
static void empty_cache(void *unused) {
    int capacity = 0;
    (void)unused;
    if (!dnnl_get_primitive_cache_capacity(&capacity) && !dnnl_set_primitive_cache_capacity(0))
        dnnl_set_primitive_cache_capacity(capacity);
}

/* Makes a primitive, or the knowledge that there is none. Returns NULL where memory ended meanwhile, which says nothing
 * of what there is. Where one implementation finds no memory, oneDNN keeps silent and takes the next, of other bits and
 * speed: errno tells then. */
static ca_prim *make(const ca_prim_key *key, const char *need) {
    making m = {.key = key, .need = need, .prim = ca_reserve_fill() ? NULL : calloc(1, sizeof *m.prim)};
    if (!m.prim)
        return NULL;
    m.prim->key = *key;
    m.prim->impl = "";
    errno = 0;
    const int thrown = ca_guarded(build, &m), ended = errno == ENOMEM;
    if (thrown)
        ca_guarded(empty_cache, NULL);
    release_making(&m);
    if (!thrown && !ended && m.status != dnnl_out_of_memory)
        return m.prim;
    destroy(m.prim);
    return NULL;
}

static uint64_t hash(const ca_prim_key *key) {
    uint64_t words[sizeof *key / 8], h = 0xcbf29ce484222325u;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return h;
}

static int had(ca_prim *p, ca_prim **prim) {
    if (p->primitive) {
        *prim = p;
        return CA_ONEDNN_OK;
    }
    ca_prim_put(p);
    return CA_ONEDNN_NO_PRIMITIVE;
}

int ca_prim_new(const ca_prim_key *key, const char *need, ca_prim **prim) {
    ca_prim *p = make(key, need);
    return p ? had(p, prim) : CA_ONEDNN_NO_MEMORY;
}

/* Entries are never removed, so a reader needs no lock. Two threads may make the same primitive; the one whose exchange
 * fails destroys its own, which no other thread has seen. */
int ca_prim_get(const ca_prim_key *key, const char *need, ca_prim **prim) {
    uint64_t at = hash(key);
    ca_prim *made = NULL;
    for (int i = 0; i < PROBES; i++) {
        _Atomic(ca_prim *) *slot = &table[(at + (uint64_t)i) % TABLE];
        ca_prim *p = atomic_load_explicit(slot, memory_order_acquire);
        if (!p) {
            if (!made && !(made = make(key, need)))
                return CA_ONEDNN_NO_MEMORY;
            made->kept = 1;
            if (atomic_compare_exchange_strong(slot, &p, made))
                return had(made, prim);
            made->kept = 0;
        }
        if (memcmp(&p->key, key, sizeof *key) == 0) {
            if (made)
                destroy(made);
            return had(p, prim);
        }
    }
    return made ? had(made, prim) : ca_prim_new(key, need, prim);
}

void ca_prim_put(ca_prim *p) {
    if (p && !p->kept)
        destroy(p);
}

const char *ca_prim_impl(const ca_prim *p) { return p->impl; }

typedef struct binding_making {
    const ca_prim *prim;
    binding *to;
    int status;
} binding_making;

static void fill(void *with) {
    binding_making *m = with;
    const ca_prim *p = m->prim;
    binding *b = m->to;
    const struct {
        dnnl_memory_t *memory;
        dnnl_query_t what;
        int index, there;
    } all[] = {{&b->src, dnnl_query_src_md, 0, 1},
               {&b->weights, dnnl_query_weights_md, 0, p->key.op == CA_PRIM_MATMUL},
               {&b->dst, dnnl_query_dst_md, 0, 1},
               {&b->pad, dnnl_query_scratchpad_md, 0, 1},
               {&b->factor, dnnl_query_exec_arg_md, ARG_FACTOR, p->key.scaled}};
    m->status = dnnl_stream_create(&b->stream, cpu, dnnl_stream_default_flags);
    for (int i = 0; i < 5 && !m->status; i++)
        if (all[i].there)
            m->status = dnnl_memory_create(
                all[i].memory, dnnl_primitive_desc_query_md(p->desc, all[i].what, all[i].index), cpu, DNNL_MEMORY_NONE);
}

static binding *bind(const ca_prim *p) {
    binding_making m = {.prim = p, .to = calloc(1, sizeof *m.to)};
    if (!m.to)
        return NULL;
    if (!ca_guarded(fill, &m) && !m.status)
        return m.to;
    release(m.to);
    return NULL;
}

/* A memory object takes 0.45 us to create (v3.2), and 7 ns to point elsewhere. */
static binding *borrow(ca_prim *p, unsigned *slot) {
    /* Another thread has another stack, so the slot's address tells threads apart. */
    *slot = (unsigned)(((uint64_t)(uintptr_t)slot >> 12) * 0x9e3779b97f4a7c15u >> 60);
    binding *b = atomic_exchange(&p->lent[*slot], NULL);
    return b ? b : bind(p);
}

static void give_back(ca_prim *p, unsigned slot, binding *b) { release(atomic_exchange(&p->lent[slot], b)); }

typedef struct running {
    ca_prim *prim;
    const binding *binding;
    int status;
} running;

static void execute(void *with) {
    running *r = with;
    const binding *b = r->binding;
    const ca_prim_key *key = &r->prim->key;
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, b->src},
                              {DNNL_ARG_DST, b->dst},
                              {DNNL_ARG_SCRATCHPAD, b->pad},
                              {DNNL_ARG_WEIGHTS, b->weights},
                              {ARG_FACTOR, b->factor}};
    int number = 3 + (key->op == CA_PRIM_MATMUL) + (key->scaled != 0);
    r->status = dnnl_primitive_execute(r->prim->primitive, b->stream, number, args);
    if (!r->status)
        r->status = dnnl_stream_wait(b->stream);
}

int ca_prim_run(ca_prim *p, float factor, const void *src, const void *weights, void *dst, void *pad,
                size_t pad_bytes) {
    unsigned slot;
    binding *b = ca_reserve_fill() ? NULL : borrow(p, &slot);
    void *own = NULL;
    if (b && p->pad > pad_bytes)
        pad = own = aligned_alloc(64, (p->pad + 63) / 64 * 64);
    if (!b || (p->pad > pad_bytes && !own)) {
        release(b);
        return CA_ONEDNN_NO_MEMORY;
    }
    running r = {.prim = p, .binding = b};
    r.status = dnnl_memory_set_data_handle(b->src, (void *)src) || dnnl_memory_set_data_handle(b->dst, dst) ||
               dnnl_memory_set_data_handle(b->pad, pad) ||
               (b->weights && dnnl_memory_set_data_handle(b->weights, (void *)weights)) ||
               (b->factor && dnnl_memory_set_data_handle(b->factor, &factor));
    if (!r.status && ca_guarded(execute, &r))
        r.status = dnnl_out_of_memory;
    free(own);
    give_back(p, slot, b);
    return !r.status ? CA_ONEDNN_OK : r.status == dnnl_out_of_memory ? CA_ONEDNN_NO_MEMORY : CA_ONEDNN_FAILED;
}

static void create_engine(void *unused) {
    (void)unused;
    dnnl_engine_create(&cpu, dnnl_cpu, 0);
}

/* The first run of what oneDNN calls gemm:jit:f32 makes the kernels of all primitives of that name, by 36,000
 * allocations and in 30 ms. These are more than the reserve has, so they are made here, before anything depends on it;
 * this run may fail. */
static void make_gemm_kernels(void) {
    static const ca_prim_key key = {CA_PRIM_MATMUL, dnnl_f32, dnnl_f32, dnnl_ab, 0, 0, 64, 64, 256, 2};
    ca_prim *p;
    float *memory = aligned_alloc(64, 64 * 1024 * sizeof *memory);
    if (memory && !ca_prim_new(&key, NULL, &p)) {
        memset(memory, 0, 64 * 1024 * sizeof *memory);
        ca_prim_run(p, 1, memory, memory + 64 * 256, memory + 64 * 512, NULL, 0);
        ca_prim_put(p);
    }
    free(memory);
}

int ca_onednn_open(int (*get)(void), void (*set)(int)) {
    get_threads = get;
    set_threads = set;
    if (cpu)
        return CA_ONEDNN_OK;
    ca_guard_memory_of((uintptr_t)ca_onednn_bound(), (uintptr_t)get);
    const int threads = ca_prim_enter();
    ca_guarded(create_engine, NULL);
    if (cpu)
        make_gemm_kernels();
    ca_prim_leave(threads);
    return cpu ? CA_ONEDNN_OK : CA_ONEDNN_NOT_OPEN;
}
