/* SPDX-License-Identifier: Apache-2.0
 * This file defines what an isa offers for each dtype: the functions that the rest of native/ calls. */
#ifndef CPU_ATTN_KERNEL_H
#define CPU_ATTN_KERNEL_H
#include "run/engine.h"
#include "cache/layout.h"

#define CA_SCORED_ROWS 4 /* query rows that meet the bounds of a block while it is in registers */

/* Says what is done to one head of one token, in float32 and in this order: norm, rotary embedding, rotation. */
typedef struct ca_transform {
    int64_t head_size;
    const float *weight; /* of the RMS norm; NULL: there is none */
    float eps;
    const float *cos_sin; /* of the rotary embedding: rot_dim / 2 cos, then as many sin; NULL: there is none */
    int64_t rot_dim;
    int32_t is_neox, hadamard; /* hadamard: the rotation of the cache */
} ca_transform;

/* Says what a write does to rows of K and V before they are in the cache, and to queries. */
typedef struct ca_transforms {
    const ca_kernel *kernel;
    const ca_array *rows[2]; /* key, value */
    int32_t num_kv_heads;
    int hadamard; /* ca_shape's */
    int wide;     /* bit mask of K and V: the sides whose rows stay float32, so that they are rounded only once */
    const ca_array *feedback; /* float32 [Hkv, D, D] for K of integers (kernel/kv_formats/feedback.inc), or NULL */
    /* Only rotary_reshape_and_cache sets these: */
    const ca_array *query, *query_out, *cos_sin; /* cos_sin NULL: none of it is done */
    const ca_array *weights;                     /* of the norms of Q and K; absent: there is none */
    const int64_t *positions;
    int32_t num_heads, is_neox;
    float eps;
    /* ca_transforms_begin sets these: */
    const float *weight[2]; /* of Q and K as float32, or NULL */
    char *memory;           /* thread_bytes for each thread */
    int64_t thread_bytes;
} ca_transforms;

/* Is K, or V, changed before it is written to the cache? */
static inline int ca_transforms_rows(const ca_transforms *transforms, int kv) {
    return (kv == K && (transforms->cos_sin || transforms->feedback)) || transforms->hadamard >> kv & 1;
}
/* Allocates what a team of threads needs, or returns CA_NO_MEMORY. */
int ca_transforms_begin(ca_transforms *transforms, int team);
void ca_transforms_end(ca_transforms *transforms);
/* Transforms this thread's share of the queries. */
void ca_transform_queries(const ca_transforms *transforms, int thread, int team);
/* Returns K or V of one head of the n <= 16 tokens from t on: row i of the result is token t + i, in float32 where the
 * side is `wide`. first: this is the first head of these tokens. */
ca_array ca_transform_rows(const ca_transforms *transforms, int kv, int thread, int head, int first, int64_t t, int n);
/* Rounds rows of K of ca_transform_rows with error feedback: makes of them what quantise has to round, and returns
 * their scales, of a row behind those of the row before. */
const uint16_t *ca_feed_back(const ca_transforms *transforms, int thread, int head, int n, const ca_array *rows,
                             int isa, const ca_side *side);

/* Holds what an isa file offers for one dtype. */
struct ca_kernel {
    ca_kernel_info info;
    ca_engine engine;
    /* Over NHD caches several kv heads go through the keys together, with the same bits. A score block then has
     * nhd_keys keys, or fewer where K and V of so many keys, for all heads, exceed nhd_bytes. 0: each head goes by
     * itself. */
    int64_t nhd_keys, nhd_bytes;
    /* into = merge(into, from). The order matters, since sums of floats depend on it. */
    void (*merge)(const ca_state *into, const ca_state *from, int64_t rows, int64_t head_size_v);
    /* Turns a state into output and lse: sinks join here, and o/l is rounded to the output's dtype. */
    void (*finish)(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, const ca_state *state);
    /* Writes tokens [token, token + n) of one group of 16, in one block of one kv head, from rows that lie ld elements
     * apart. Meanwhile as many rows are prefetched from `next_src`, whatever lies there, unless it is NULL. stream: the
     * stores go past the caches. */
    void (*write[2])(void *block, int64_t head_size, int64_t token, int n, const void *src, int64_t ld,
                     const void *next_src, int stream);
    /* Widens tokens [t0, t1) of one block of one kv head to float32: K goes to dst[d * ld + (t - t0)] (transposed), V
     * to dst[(t - t0) * ld + d]. */
    void (*widen[2])(const void *block, int64_t head_size, int64_t t0, int64_t t1, float *dst, int64_t ld);
    /* Widens one query row to float32 and multiplies it by factor. */
    void (*widen_row)(const void *src, int64_t n, float factor, float *dst);
    /* Unpacks the first n tokens of a group of a side that is not `ready` to a group of the kernel's own
     * layout and dtype, exactly, without applying scales. rows: room of ca_rows_bytes. Meanwhile as much is prefetched
     * from `next_src`, whatever lies there. */
    void (*unpack)(const ca_side *side, const void *src, int64_t ld, int n, void *dst, void *rows,
                   const void *next_src);
    /* Quantises a row, divided by scale, to fp8, a byte each: to nearest even, saturating. */
    void (*pack)(const ca_side *side, const void *src, float scale, uint8_t *dst);
    /* `scale` finds the scales of rows of an integer format; rows begin ld elements apart, their scales scales_ld.
     * `quantise` makes the integers of one row, a byte each. */
    void (*scale)(const ca_side *side, const void *src, int64_t ld, int tokens, uint16_t *scales, int64_t scales_ld);
    void (*quantise)(const ca_side *side, const void *src, const uint16_t *scales, uint8_t *dst);
    /* Makes of the first of 16 rows, one behind another, those that `quantise` rounds where errors are fed back, and
     * finds their scales. feedback is [D][D], with rows ld apart. Only float32 has it. */
    void (*feed_back)(const ca_side *side, float *x, int tokens, const float *feedback, int64_t ld, uint16_t *scales);
    /* Does what `how` says to one head. The result goes to x as float32 and, unless dst is NULL, rounded to dst, which
     * may be src. */
    void (*transform)(const ca_transform *how, const void *src, float *x, void *dst);
    /* Makes the scores [M] of one request's blocks for one head of the scores, from the arrays of ca_score_blocks.
     * scratch: room of ca_score_floats. */
    void (*score_blocks)(const ca_array *arrays, int64_t block_size, int64_t request, int64_t head, float *scratch);
    /* Makes an indexer's scores of the keys [k0, k1) for a task's query tokens: scores[i * stride + j] is the score of
     * key j for token i, the sum over the token's heads of weight times relu(q.k). The weights of token i are
     * weights[i * num_heads ...]. */
    void (*score_tokens)(const ca_plan *plan, const ca_call *call, const ca_task *task, const float *weights,
                         int64_t k0, int64_t k1, float *scores, int64_t stride, void *scratch);
    const int *integers; /* Are int8 to int4 caches multiplied as pairs of integers? NULL: they never are. */
    int weights;         /* the dtype to which weights are rounded before they meet V; CA_F32: they are not */
};

/* Holds what a file of native/isa offers, as `const ca_isa_row ca_isa_NAME`. */
typedef struct ca_isa_row {
    const char *(*missing)(
        void); /* a feature that this machine lacks, or another reason, in words; NULL: the isa runs */
    const ca_kernel *kernels[CA_DTYPES];
    /* An isa, or NULL. A kernel without `merge` says what attention by it is (info.rows and method, engine); all else
     * of it is what the kernel of this isa for the dtype has, its caches included. */
    const struct ca_isa_row *rest;
    const struct ca_linear_kernel *linear; /* for every dtype; NULL in a variant */
} ca_isa_row;

const ca_isa_row *ca_isa_get(int isa);
/* Returns the kernel whose attention a shape takes. Rounding weights to 8 bits costs as much accuracy as rounding the
 * output to 8 bits, which leaves room in the error budget while V has many columns. If V has few, all of them may
 * nearly cancel: over requests of one token and one head with 100 or 200 keys, 27 % exceeded the budget with one
 * column, 7 % with 4, 0.24 % with 16, 0.025 % with 24, and 1 of 24,000 with 32 (it took 1.05 of the budget). So shapes
 * with fewer columns go by FMA. So does V with scales where weights become float16, which has no room for their
 * products with scales. */
const ca_kernel *ca_attention_kernel(const ca_shape *shape);
#define CA_FEW_COLUMNS 32
/* Returns an isa's kernel for a dtype. Where the isa has none, it is the kernel of the next best isa that this machine
 * has. */
const ca_kernel *ca_kernel_for(int isa, int dtype);

static inline int ca_any_quantised(const ca_plan *p) { return p->sides[K].quantised || p->sides[V].quantised; }
static inline int ca_is_plain(const ca_plan *p) { return p->sides[K].plain; /* both are, or neither */ }
/* Can the products read both K and V in the cache without any conversion? */
static inline int ca_ready(const ca_plan *p) { return p->sides[K].ready && p->sides[V].ready; }

/* Returns whether each of V's rows in a plain cache is a part of K's row of the same token (MLA's latent rows). */
static inline int ca_v_is_in_k(const ca_plan *p, const ca_call *c) {
    const ca_kv *k = &c->kv[K], *v = &c->kv[V];
    const uintptr_t at = (uintptr_t)v->cache - (uintptr_t)k->cache;
    const int64_t rest = p->sides[K].row_bytes - p->sides[V].row_bytes;
    return ca_is_plain(p) && p->sides[K].dtype == p->sides[V].dtype && k->stride_n == v->stride_n &&
           k->stride_h == v->stride_h && k->ld == v->ld && rest >= 0 && at <= (uintptr_t)rest;
}
/* Returns the bytes from a group of 16 tokens to the next group of its block. */
static inline int64_t ca_kv_group_step(const ca_plan *p, const ca_call *c, int kv) {
    const ca_side *s = &p->sides[kv];
    return s->plain ? CA_LANES * c->kv[kv].ld * s->size : s->group_bytes;
}
static inline const char *ca_kv_block(const ca_plan *p, const ca_call *c, int kv, int64_t block, int kv_head) {
    return ca_block_at(&p->sides[kv], &c->kv[kv], block, kv_head / p->readers);
}
/* Returns the room for a group of a plain, quantised cache whose rows are widened and not yet packed. */
static inline int64_t ca_rows_bytes(const ca_plan *p) {
    const int needed = ca_is_plain(p) && ca_any_quantised(p);
    return needed * CA_LANES * ca_max64(p->shape.head_size, p->shape.head_size_v) * ca_dtype_size(p->shape.dtype);
}

/* Returns the size of one kv head's ca_state. */
static inline int64_t ca_state_floats(const ca_plan *plan, int64_t rows) {
    return rows * ((int64_t)plan->shape.head_size_v + 2);
}
static inline int64_t ca_state_bytes(const ca_plan *plan, int64_t rows) {
    return ca_round_up(ca_state_floats(plan, rows) * (int64_t)sizeof(float), 64);
}

/* Returns the bytes of K and V for one token and kv head, in a cache without scales. */
static inline int64_t ca_token_bytes(const ca_plan *p) { return p->sides[K].row_bytes + p->sides[V].row_bytes; }
/* Halves `keys` until K and V of so many keys, for all kv heads, fit into `bytes`, or only a group is left. */
static inline int64_t ca_nhd_keys(const ca_plan *p, int64_t keys, int64_t bytes) {
    while (keys >= 2 * CA_LANES && keys * p->shape.num_kv_heads * ca_token_bytes(p) > bytes)
        keys /= 2;
    return keys;
}
#define CA_HEADS 64 /* the most kv heads that go through the keys together */

/* Writes of at least so many bytes are streamed past the caches. On Zen 4 with 32 MiB of L3 and one thread, a write
 * followed by a decode step that reads all of it took, streamed and not streamed: for 4 MiB 705 and 442 us (the write
 * alone ran at 17.5 and 20.3 GB/s), for 8 MiB 1339 and 838 us (18.6 and 20.8), for 16 MiB 2579 and 2781 us (20.6 and
 * 12.5), for 32 MiB 5779 and 7565 us (18.6 and 9.2). */
#define CA_STREAM_BYTES (16 << 20)
#endif
