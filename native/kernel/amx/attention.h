/* SPDX-License-Identifier: Apache-2.0
 * This is the attention of one segment of keys by products of tiles, for bf16 in the PAIRS layout, in which the tiles
 * of B lie ready: 16 pairs of dimensions x 16 keys of a K group, and 16 pairs of keys x 16 columns of V. Its parameters
 * are those of parameters.h; ROWS and BLOCK_KEYS are the rows that share a block of K and V, and its keys.
 *
 * Strips of 32 query rows go through a block one after another. Where there are more rows than CA_FEW_ROWS they are
 * units of a pipeline, in which vectors make the weights of one strip while tiles multiply those of another
 * (pipeline.h). Other strips form the scores of KEYS keys, turn them to weights in place, by the softmax of the vector
 * kernels, and meet V in one trip of O through the tiles (strips.h); all of these prefetch what comes next, each its
 * share. Where rows are few, kv heads of a task go through its keys together, so that only the first head
 * begins with keys that nothing has prefetched; over NHD each head goes by itself. */

#include <stdatomic.h>
#include <stddef.h>

#define DEPTH 32 /* dimensions or keys of one product of tiles */
#define STEPS_V (MAX_GROUPS / 2)
#define P_LD                                                                                                           \
    (2 * S_STRIDE) /* weights lie where the scores were; rows are an odd number of cache lines, in other sets */
#define CHUNK_BYTES (512 << 10)   /* bytes of K and V that stay in L2 with those that come next */
#define UNPACKED_BYTES (32 << 10) /* bytes of K and V that stay in L1 */

#include "kernel/kv_formats/fits.h"
#include "products.h"
#include "words.h"
#include "pipeline.h"

/* Holds what the pipeline makes of scales, where a token has one: what steps of keys have, what is left of V's scales
 * when the powers of two in them are taken out, and key_scales.more and shares by the mantissa of what is left. */
typedef struct scale_work {
    key_scales keys[STEPS];
    uint16_t rests[MAX_GROUPS * CA_LANES];
    float more[128];
    uint16_t shares[2][128];
} scale_work;

typedef struct tile_work {
    const ca_plan *plan;
    const ca_call *call;
    const ca_task *task;
    const ca_state *states, *state; /* [heads]; that of the head at hand */
    int64_t k0;                     /* the segment's first key */
    int64_t head_size, head_size_v;
    int64_t products, passes;     /* of 32 dimensions, for the scores; of 32 columns of V, for the output */
    int64_t v_now;                /* bytes of a group of this block's V that one product prefetches if `unprefetched` */
    int opening, unprefetched;    /* the block is the segment's first; besides, nothing has prefetched it */
    int regular;                  /* the block's groups are whole, and follow one another */
    int64_t loaded;               /* queries up to this row are in x.q */
    pipeline *pipe;               /* NULL: all strips go by scores */
    float *partial_o;             /* [STRIP][head_size_v], for pipe->o */
    scale_work *scales;           /* of the pipeline, where K or V has one scale a token */
    uint16_t *last_queries;       /* [rows][DEPTH]: pipe_unit.q_last of a head size that is no multiple of it */
    uint8_t *left;                /* of each strip: has it left the pipeline? */
    uint8_t by_vectors[CA_HEADS]; /* heads that the vector kernel computes from the start */
    scratch scratch;
    float *s; /* [STRIP][S_STRIDE] scores, then weights, bf16 */
    /* copies is [STEPS_V][DEPTH / 2][Dv][2]. kv[V].wide follows it, and both come once more for second parts. */
    uint16_t *copies;
    const uint16_t *v[STEPS_V]; /* V of each two groups: in the cache, unpacked or in copies */
    tile_sizes sizes;           /* those of the tiles as configured; 0: they are not yet */
    struct {
        /* bytes is what a group takes, and share what one product or pass prefetches of a group of the next block. */
        int64_t bytes, share;
        uint16_t *wide; /* [MAX_GROUPS] groups of integers as bf16 */
        int parts;      /* 2 where a number times its scale is the sum of two bf16 numbers, else 1 */
        int64_t apart;  /* elements from a first part to the second one */
    } kv[2];
    uint16_t *stage; /* a group of what has two parts, as integers */
} tile_work;

/* Returns how many elements of V tiles take: those of copies, and those of groups that had to be unpacked. */
static int64_t v_elements(const ca_plan *plan) {
    const int64_t unpacked = plan->sides[V].scaled ? MAX_GROUPS * CA_LANES * plan->shape.head_size_v + CA_NIBBLES : 0;
    return STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v + unpacked;
}

/* May strips of a task with more than CA_FEW_ROWS rows be units of the pipeline? */
static int may_pipe(const ca_plan *plan) {
    const ca_shape *s = &plan->shape;
    return plan->rows > CA_FEW_ROWS && !plan->tree &&
           has_pipeline(s->head_size, plan->sides[K].several_scales ? 2 : 1) && has_pipeline(s->head_size_v, 1);
}

static int64_t carve_work(tile_work *w, uintptr_t base, const ca_plan *plan) {
    const ca_side *k = &plan->sides[K], *v = &plan->sides[V];
    const int64_t k_elements = k->scaled ? MAX_GROUPS * k->elements : 0;
    const int64_t staged = ca_max64(k->several_scales ? k->elements : 0, v->scaled ? v->elements : 0);
    const int pipes = may_pipe(plan);
    int64_t at = carve(&w->scratch, base, plan);
    w->kv[K].parts = k->several_scales ? 2 : 1;
    w->kv[V].parts = v->several_scales ? 2 : 1;
    w->kv[K].apart = k_elements;
    w->kv[V].apart = v_elements(plan);
    CA_CARVE(w->s, STRIP * S_STRIDE * 4)
    CA_CARVE(w->copies, w->kv[V].parts * w->kv[V].apart * 2)
    CA_CARVE(w->kv[K].wide, w->kv[K].parts * w->kv[K].apart * 2)
    CA_CARVE(w->stage, staged ? (staged + 2 * VL) * 2 : 0)
    CA_CARVE(w->pipe, pipes ? sizeof *w->pipe : 0)
    CA_CARVE(w->partial_o, pipes ? STRIP * plan->shape.head_size_v * 4 : 0)
    CA_CARVE(w->scales, pipes && (k->one_scale || v->one_scale) ? sizeof *w->scales : 0)
    CA_CARVE(w->last_queries, pipes ? ca_round_up(plan->rows, STRIP) * DEPTH * 2 : 0)
    CA_CARVE(w->left, ca_div_up(plan->rows, STRIP))
    w->kv[V].wide = w->copies + STEPS_V * DEPTH * (int64_t)plan->shape.head_size_v;
    return at;
}

/* This kernel computes the segments that are not for tiles. */
extern const ca_isa_row ca_isa_avx512_bf16;
static const ca_kernel *vector_kernel(void) { return ca_isa_avx512_bf16.kernels[CA_BF16]; }

#include "bytes.h"

static int64_t work_bytes(const ca_plan *plan) {
    tile_work unused;
    const int64_t few = goes_by_bytes(plan) ? byte_work_bytes(plan) : 0;
    return ca_max64(ca_max64(carve_work(&unused, 0, plan), few), vector_kernel()->engine.scratch_bytes(plan));
}

#include "scales.h"
#include "strips.h"
#include "units.h"
#include "values.h"

/* ---- a segment ---- */

/* Unpacks K of a block, and V unless `last` is K, to where tiles read it. */
static void unpack_block(tile_work *w, score_block *b, int last) {
    b->groups = memcpy(w->scratch.groups[2], b->groups, (size_t)b->num_groups * sizeof(group));
    for (int kv = K; kv <= last; kv++)
        if (w->plan->sides[kv].scaled)
            dequantise(w, b, kv);
        else
            unpack_groups_bf16(w->plan, &w->scratch, &(prefetch){.by_unpacking = 1}, b, kv, 0, b->num_groups,
                               w->scratch.unpacked[kv], b->groups);
}

/* Computes a block of one head. Returns 0 where lay_out_values does. */
static int run_block(tile_work *w, score_block b, int64_t rows) {
    if (!ca_ready(w->plan))
        unpack_block(w, &b, V);
    if (!lay_out_values(w, &b, rows))
        return 0;
    w->loaded = w->opening ? 0 : INT64_MAX;
    w->regular = whole(b.groups, b.num_groups) &&
                 b.groups[b.num_groups - 1].key - b.groups->key == (b.num_groups - 1) * CA_LANES;
    if (w->pipe) {
        if (values_are_tiny(w, b.num_groups))
            memset(w->left, 1, (size_t)ca_div_up(rows, STRIP));
        run_units(w, &b, rows);
        return 1;
    }
    for (int64_t r = 0; r < rows; r += STRIP) {
        const strip t = make_strip(w, &b, r);
        run_strip(w, &t);
    }
    return 1;
}

/* Begins the work on a task, of which num_strips strips go through a block. */
static tile_work begin_work(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                            int64_t num_strips, void *memory) {
    tile_work w = {.plan = plan,
                   .call = call,
                   .task = task,
                   .head_size = plan->shape.head_size,
                   .head_size_v = plan->shape.head_size_v};
    w.kv[K].bytes = CA_LANES * ca_round_up(w.head_size, 2) * 2;
    w.kv[V].bytes = CA_LANES * w.head_size_v * 2;
    w.products = ca_div_up(w.head_size, DEPTH);
    w.passes = ca_div_up(w.head_size_v, 2 * CA_LANES);
    w.kv[K].share = share_of(w.kv[K].bytes, num_strips * w.products);
    w.kv[V].share = share_of(w.kv[V].bytes, num_strips * w.passes);
    w.v_now = share_of(w.kv[V].bytes, w.products);
    carve_work(&w, (uintptr_t)memory, plan);
    w.scratch.integers = 0;
    w.scratch.q_bytes = query_width_bf16(w.head_size) * 2;
    load_rows_bf16(plan, call, task, kv_head, num_heads, &w.scratch);
    return w;
}

/* Returns how many groups of a block stay in L2 with those of the next one, or in L1 where few rows read them unpacked.
 */
static int most_groups(const tile_work *w) {
    const int few = !ca_ready(w->plan) && ca_rows_of(w->plan, w->task) <= CA_FEW_ROWS;
    const int64_t fit =
        (few ? UNPACKED_BYTES : CHUNK_BYTES) / (w->kv[K].parts * w->kv[K].bytes + w->kv[V].parts * w->kv[V].bytes);
    return (int)ca_max64(2, ca_min64(w->pipe ? MAX_GROUPS : KEYS / CA_LANES, fit - fit % 2));
}

/* Do the strips of a task go by units? These hold logits that are products times a positive factor, or capped ones. */
static int goes_by_units(const ca_plan *plan, const ca_call *call, const ca_task *task, float factor) {
    return may_pipe(plan) && !task->shared && ca_rows_of(plan, task) > CA_FEW_ROWS && !call->alibi_slopes &&
           !call->attn_bias && factor > 0 && factor < 0x1p100f;
}

static int begin_block(void *segment, score_block *b) {
    tile_work *w = segment;
    w->opening = b->k0 == w->k0;
    return 0;
}

static void attend_block(void *segment, const score_block *b, int h) {
    tile_work *w = segment;
    w->state = w->states + h;
    w->unprefetched = w->opening && h == 0;
    if (!w->by_vectors[h])
        w->by_vectors[h] = !run_block(w, *b, ca_rows_of(w->plan, w->task));
}

static int segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                   int64_t k0, int64_t k1, const ca_state *states, void *memory) {
    const int quantised = plan->sides[K].scaled || plan->sides[V].scaled;
    const int64_t rows = ca_rows_of(plan, task);
    /* A shared task computes what each request would by itself. */
    if (quantised && (rows <= CA_FEW_ROWS || task->shared)) {
        for (int h = 0; h < num_heads; h++)
            ca_clear(states + h, rows, plan->shape.head_size_v);
        ca_segment_fn *few = goes_by_bytes(plan) ? byte_segment : vector_kernel()->engine.segment;
        return few(plan, call, task, kv_head, num_heads, k0, k1, states, memory);
    }
    tile_work w = begin_work(plan, call, task, kv_head, num_heads, ca_div_up(rows, STRIP), memory);
    if (goes_by_units(plan, call, task, w.scratch.factor)) {
        begin_pipeline(w.pipe, w.partial_o,
                       w.plan->sides[K].one_scale || w.plan->sides[V].one_scale ? w.scales->keys : NULL);
        if (w.pipe->keys)
            find_rest_factors(w.scales);
        w.kv[V].parts = 1;
        memset(w.left, 0, (size_t)ca_div_up(rows, STRIP));
        for (int64_t r = 0; r < ca_min64(rows, 3 * STRIP); r++)
            prefetch_bytes(w.scratch.query[r], w.head_size * 2);
    } else {
        w.pipe = NULL;
        for (int h = 0; h < num_heads; h++)
            ca_clear(states + h, rows, w.head_size_v);
    }
    w.states = states;
    w.k0 = k0;
    const block_walk walk = {.plan = plan,
                             .call = call,
                             .task = task,
                             .kv_head = kv_head,
                             .num_heads = num_heads,
                             .max_groups = most_groups(&w),
                             .k0 = k0,
                             .k1 = k1,
                             .listed_end = listed_end(plan, call, task, k1)};
    walk_blocks(&walk, &w.scratch, begin_block, attend_block, &w);
    /* Other code in this process may configure tiles, too, and a context switch need not save unused ones. */
    tile_release();
    int status = 0;
    for (int h = 0; h < num_heads && !status; h++)
        if (w.by_vectors[h]) {
            ca_clear(states + h, rows, w.head_size_v);
            status = vector_kernel()->engine.segment(plan, call, task, kv_head + h, 1, k0, k1, states + h, memory);
        }
    return status;
}

#include "output.h"
#include "token_scores.h"

static const int integers = 1; /* the vector kernel multiplies caches of integers as integers */

static const ca_kernel kernel_amx = {
    .info = {.layout = CA_LAYOUT_PAIRS, .rows = ROWS, .integers = INTEGERS_BY " or TDPBSSD", .method = TILE_METHOD},
    .engine = {.scratch_bytes = work_bytes, .segment = segment, .together = 1, .opens = 1},
    .merge = merge,
    .finish = finish,
    .write = {write_k_bf16, write_v_bf16},
    .widen = {widen_k_bf16, widen_v_bf16},
    .widen_row = widen_row_bf16,
    .unpack = unpack_group_bf16,
    .pack = pack_bf16,
    .scale = scale_bf16,
    .quantise = quantise_bf16,
    .transform = transform_bf16,
    .score_blocks = score_blocks_bf16,
    .score_tokens = score_tokens,
    .integers = &integers,
    .weights = CA_BF16,
};
