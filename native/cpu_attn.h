/* SPDX-License-Identifier: Apache-2.0
 * The whole C ABI. cffi reads what stands between the two markers; nothing else is public.
 * Shapes: R num_reqs, T num_tokens, Hq num_heads, Hkv num_kv_heads, D head_size, Dv head_size_v,
 * N num_blocks, B block_size, M blocks per request. Strides count elements, not bytes. */
#ifndef CPU_ATTN_H
#define CPU_ATTN_H
#include <stddef.h>
#include <stdint.h>
/* cffi: begin */
/* Of queries and caches; of caches only: fp8 (e4m3 without infinities, e5m2: arXiv:2209.05433) and integers with
 * scales, bfloat16, int8 for a token of a kv head, int4 for each 32 of its elements; of indices. */
enum ca_dtype {
    CA_F32,
    CA_F16,
    CA_BF16,
    CA_DTYPES,
    CA_E4M3 = CA_DTYPES,
    CA_E5M2,
    CA_I8,
    CA_I4,
    CA_CACHE_DTYPES,
    CA_I32 = 64,
    CA_I64,
    CA_U8
};

/* How one block of one kv head lies in memory (element offsets from the start of the block).
 * LANES: K [B/16][D][16], V [B][Dv].
 * PAIRS: K [B/16][D/2][16][2], V [B/2][Dv][2]: two neighbours of the summed axis side by side,
 *        as VDPBF16PS and TDPBF16PS read them.
 * ROWS:  K and V token by token, as whoever owns a plain cache strides them. */
enum ca_layout { CA_LAYOUT_LANES, CA_LAYOUT_PAIRS, CA_LAYOUT_ROWS };

/* A cache as an array: packed by the isa, [N, Hkv, B, width]; or rows, [N, Hkv, B, D] or [N, B, Hkv, D]. */
enum ca_kv_cache_layout { CA_PACKED, CA_HND, CA_NHD };

enum ca_status {
    CA_OK,
    CA_NO_MEMORY,
    CA_BAD_QUERY_START_LOC, /* position, value, bound (the least it may be, or T for the last) */
    CA_TOO_MANY_TASKS,      /* value: query blocks, bound: how many a plan holds */
    CA_BAD_SEQ_LEN,         /* request, value, bound */
    CA_BAD_BLOCK,           /* request, position, value, bound: 0 <= value < bound */
    CA_BLOCK_TABLE_SHORT,   /* request, value = blocks needed, bound = M */
    CA_BAD_SLOT,            /* position, value, bound: value < bound */
    CA_OTHER_LENGTHS,       /* position, value, bound = the plan's: query_start_loc */
    CA_OTHER_SEQ_LENS,      /* request, value, bound = the plan's */
    CA_OTHER_CAUSAL,        /* request, value, bound = the plan's */
    CA_ENGINE_FAILED,       /* value: the engine's own status */
    CA_UNKNOWN,             /* not a fault: _check has to look at the arrays first */
    CA_BAD_POSITION,        /* position, value, bound: 0 <= value < bound */
    CA_TREE_TOKENS,         /* value = rows of tree_mask, bound = T */
    CA_TREE_NARROW,         /* request, value = query tokens, bound = bits of a row of tree_mask */
    CA_TREE_NOT_CAUSAL,     /* request */
    CA_TREE_ALIBI,
    CA_TOKENS_WITHOUT_KEYS, /* request, value = seq_len, bound = q_len: a mask goes by the keys of the query tokens */
    CA_BAD_SELECTED,        /* request, kv_head, position, value, bound: -1 <= value < bound */
    CA_SELECTED_ORDER,      /* request, kv_head, position, value, bound = the value before */
    CA_OTHER_BLOCK_SIZE,    /* value, bound = the plan's */
    CA_OTHER_BLOCKS,        /* request, position, value, bound = that of a request that shared it */
    CA_SELECTED_SHARED,     /* of a plan that shares prefixes */
    CA_BIAS_SMALL           /* request, position = axis, value, bound = what the request needs */
};

/* Where a check failed. Fields that a status does not use are -1. */
typedef struct ca_fault {
    int32_t status;
    int64_t request, position, value, bound;
    int64_t kv_head;
} ca_fault;

/* What a plan was made for; a call is checked against it. */
typedef struct ca_shape {
    int32_t num_reqs, num_heads, num_kv_heads, head_size, head_size_v;
    int32_t dtype, k_dtype, v_dtype;   /* enum ca_dtype, of queries and of the caches */
    int32_t isa;                       /* index into the isa table */
    int32_t causal;                    /* of every request, where dynamic_causal does not say it */
    int32_t all_causal;                /* no request is bidirectional: window_right has no meaning; the plan says it */
    int32_t window_left, window_right; /* keys visible to each side of the query, -1: all */
    int32_t enable_kv_split;
    int32_t num_threads;
    int32_t kv_cache_layout; /* enum ca_kv_cache_layout */
    int32_t block_size;      /* of the block table that the plan was given, 0: none */
} ca_shape;

/* Masks besides causal and window, as _check.masks had them: both lists by request, then by key. */
typedef struct ca_masks {
    const int32_t *spans;     /* [num_spans][3] request, first key, last key */
    const int32_t *documents; /* [num_documents][2] request, first key */
    const uint8_t *tree;      /* [tree_rows][tree_bytes], tree_rows -1: there is none */
    int64_t num_spans, num_documents, tree_rows, tree_bytes, tree_stride;
} ca_masks;

typedef struct ca_plan ca_plan;
typedef struct ca_engine ca_engine;

typedef struct ca_plan_info {
    int64_t num_tokens, num_tasks, num_splits, workspace_bytes;
    int32_t rows, num_threads;
    int64_t num_shared; /* tasks for several requests */
} ca_plan_info;

/* Tokens to write or read: [T, Hkv, D], the last dimension dense. */
typedef struct ca_rows {
    void *data;
    int64_t stride_t, stride_h;
} ca_rows;

typedef struct ca_cache {
    void *data;
    int64_t stride_n, stride_h;
    int64_t num_blocks, block_size;
    int32_t num_kv_heads, head_size;
    int32_t dtype, kv_dtype, isa; /* dtype: of the tokens that come and of the queries; kv_dtype: of the memory */
    float scale;                  /* a narrow cache holds x / scale */
    int32_t kv_cache_layout;
    int64_t ld; /* from token to token of a plain cache; packed: head_size */
} ca_cache;

/* Somebody's memory: _arrays.Array in C. Absent: all zero. */
typedef struct ca_array {
    uintptr_t address; /* of the first element */
    int64_t shape[4], strides[4];
    int32_t ndim, dtype, itemsize, writable;
} ca_array;

/* The arrays of a call, in the order of _check.ATTENTION, WRITE and ROTARY: those that it writes first. */
enum ca_attention_arrays {
    CA_OUTPUT,
    CA_LSE,
    CA_QUERY,
    CA_KEY_CACHE,
    CA_VALUE_CACHE,
    CA_BLOCK_TABLE,
    CA_QUERY_START_LOC,
    CA_SEQ_LENS,
    CA_DYNAMIC_CAUSAL,
    CA_ALIBI_SLOPES,
    CA_S_AUX,
    CA_SELECTED_BLOCKS,
    CA_ATTN_BIAS,
    CA_ATTENTION_ARRAYS
};
enum ca_step_arrays {
    CA_STEP_QUERY_START_LOC,
    CA_STEP_SEQ_LENS,
    CA_STEP_DYNAMIC_CAUSAL,
    CA_STEP_BLOCK_TABLE,
    CA_STEP_ARRAYS
};
enum ca_write_arrays { CA_TO_KEY_CACHE, CA_TO_VALUE_CACHE, CA_KEY, CA_VALUE, CA_SLOT_MAPPING, CA_WRITE_ARRAYS };
enum ca_rotary_arrays {
    CA_ROTARY_KEY_CACHE,
    CA_ROTARY_VALUE_CACHE,
    CA_ROTARY_QUERY_OUT,
    CA_ROTARY_QUERY,
    CA_ROTARY_KEY,
    CA_ROTARY_VALUE,
    CA_ROTARY_SLOT_MAPPING,
    CA_POSITIONS,
    CA_COS_SIN_CACHE,
    CA_Q_WEIGHT,
    CA_K_WEIGHT,
    CA_ROTARY_ARRAYS
};

/* Calls that _check has accepted: all that its answer depends on, which is everything about the arrays but where
 * they lie (but where they lie to one another), and the sizes that they have to fit. For one Python thread and one kind
 * of call. */
typedef struct ca_known {
    int64_t count; /* remembered so far; the oldest makes room */
    struct ca_accepted {
        int64_t sizes[11];
        /* of a write: what the isa and kv_cache_dtype that the caller named mean for these arrays */
        int64_t isa, k_dtype, v_dtype;
        ca_array arrays[13];
    } calls[8];
} ca_known;

/* One line of the isa table, and what this machine says to it. */
typedef struct ca_isa_info {
    const char *name, *unit; /* unit: "matrix", "vector" or "scalar" */
    int32_t compiled, supported;
    const char *reason; /* why it cannot run here; "" when it can */
} ca_isa_info;

typedef struct ca_kernel_info {
    int32_t layout, rows, keys; /* query rows of a work item, keys of a score block */
    int32_t bf16_products;      /* multiplies bf16 as it is, because here that is faster than FP32 FMA */
    const char *method;         /* how the products are formed, in words */
} ca_kernel_info;

typedef struct ca_cpu_info {
    char vendor[16], brand[64];
    int32_t family, model, stepping;
    int64_t l1d, l2, l3;    /* bytes, 0: unknown */
    int32_t cpus;           /* this process may run on */
    int32_t amx_permission; /* 1 granted, 0 refused, -1 no AMX here */
    const char *amx_reason;
} ca_cpu_info;

void ca_cpu(ca_cpu_info *out);
int ca_cpu_feature(int i, const char **name); /* 1 here, 0 not, -1: no such i */

int ca_isa(int i, ca_isa_info *out);                        /* 0: no such i */
int ca_isa_kernel(int isa, int dtype, ca_kernel_info *out); /* 0: no kernel */
/* Elements of kv_dtype (int8, int4: bytes) that a block of one kv head takes. */
int64_t ca_block_elements(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size, int value);

const char *ca_threading(void); /* "OpenMP 201511" or why there is none */
int ca_get_num_threads(void);
void ca_set_num_threads(int n); /* 0: as OpenMP says; -n: n, however little there is to do */

const ca_engine *ca_native_engine(void);
const ca_engine *ca_reference_engine(void);

/* NULL and *fault on failure; CA_UNKNOWN: unless objects are NumPy arrays fit for a step, _check has to look at
 * them first, and to say with objects 0 what is given. masks: NULL where there are none. */
ca_plan *ca_plan_new(ca_shape *shape, const ca_engine *engine, uintptr_t objects, const ca_array *given,
                     const ca_masks *masks, ca_fault *fault);
void ca_plan_free(ca_plan *plan);
void ca_plan_describe(const ca_plan *plan, ca_plan_info *out);
int64_t ca_plan_visible_pairs(const ca_plan *plan); /* (query, key) pairs over all query heads */

/* Does a block table [R, cols] name blocks below num_blocks wherever the plan will look, and the same for requests that
 * share them in the plan? selected: CA_SELECTED_BLOCKS of a call, checked too. */
int ca_check_table(const ca_plan *plan, const int32_t *table, int64_t stride, int64_t cols, int64_t num_blocks,
                   int64_t block_size, const ca_array *selected, ca_fault *fault);
/* Is CA_ATTN_BIAS of a call large enough? */
int ca_check_bias(const ca_plan *plan, const ca_array *bias, ca_fault *fault);

/* NumPy arrays as C reads them: type(array), the None that stands for no array, sizeof(PyObject), and what dtype
 * objects mean. Once, on import; without it (ndarray 0) every call is CA_UNKNOWN. */
void ca_know_numpy(uintptr_t ndarray, uintptr_t none, int64_t head);
void ca_know_dtype(uintptr_t object, int32_t dtype, int32_t itemsize);
int ca_read_array(uintptr_t object, ca_array *out); /* 0: not a NumPy array, or one unlike all that we take */

/* attention_with_kv_cache and reshape_and_cache. Their arrays are Python objects, whose addresses lie at `objects`;
 * where one is 0, given[i]. CA_UNKNOWN unless such a call has been accepted before; without objects, _check has
 * accepted what is given.
 * What indices hold and whether outputs overlap inputs is checked every time, before a byte is written.
 * causal: -1 where there are no lengths and masks to compare with the plan's. */
int ca_attend(const ca_plan *plan, ca_known *known, uintptr_t objects, const ca_array *given, int causal, float scale,
              float softcap, float k_scale, float v_scale, void *workspace, int64_t workspace_bytes, ca_fault *fault);
/* named: a number for the isa's name. isa: its index, which goes with `given`. A slot < 0 is skipped. */
int ca_write(ca_known *known, uintptr_t objects, const ca_array *given, int named, int isa, int k_dtype, int v_dtype,
             int kv_cache_layout, float k_scale, float v_scale, ca_fault *fault);

/* rotary_reshape_and_cache, in the same way. */
int ca_rotary_write(ca_known *known, uintptr_t objects, const ca_array *given, int named, int isa, int k_dtype,
                    int v_dtype, int is_neox, float eps, float k_scale, float v_scale, ca_fault *fault);

/* Tokens 0..num_tokens-1 of one request back to [T, Hkv, D], as they are stored, int8 and int4 as float32 times their
 * scales; value: 0 for K, 1 for V. */
int ca_gather(const ca_cache *cache, int value, const int32_t *block_table, int64_t num_entries, int64_t num_tokens,
              const ca_rows *dst, ca_fault *fault);

/* Pages (cpu_attn/pages.py). Arrays in the order of _check.BOUNDS and _check.SCORES, accepted there; what indices hold
 * is checked before a byte is written. */
enum ca_bounds_arrays { CA_BOUNDS_MIN, CA_BOUNDS_MAX, CA_BOUNDS_KEY, CA_BOUNDS_SLOT_MAPPING, CA_BOUNDS_ARRAYS };
enum ca_scores_arrays {
    CA_SCORES,
    CA_SCORES_QUERY,
    CA_SCORES_MIN,
    CA_SCORES_MAX,
    CA_SCORES_BLOCK_TABLE,
    CA_SCORES_QUERY_START_LOC,
    CA_SCORES_SEQ_LENS,
    CA_SCORES_ARRAYS
};
int ca_update_page_bounds(const ca_array *arrays, int64_t block_size, ca_fault *fault);
/* scratch: ca_score_floats for each of num_threads */
int ca_score_pages(const ca_array *arrays, int isa, int64_t block_size, float *scratch, int num_threads,
                   ca_fault *fault);
int64_t ca_score_floats(int64_t head_size);

/* A way to multiply that `cpu-attn bench` measures, best first: a row of native/probe. */
typedef struct ca_probe_info {
    const char *name, *unit; /* unit: "matrix", "vector" or "scalar" */
    const char *isa, *what;  /* the isa whose products it limits, the instruction; "" where not compiled */
    int32_t dtypes;          /* 1 << ca_dtype for inputs that it can multiply */
    int32_t supported;
    const char *reason; /* why it cannot run here; "" when it can */
} ca_probe_info;

int ca_probe(int i, ca_probe_info *out); /* 0: no such i */

/* Attention over num_parts sets of keys to that over all of them. outs: [T, Hq, Dv] of each, then where the result
 * goes, of one dtype, the last axis dense; lses: float32 [Hq, T], likewise. _check has accepted them. */
void ca_merge_states(int64_t num_parts, const ca_array *outs, const ca_array *lses);

/* Limits on this many threads, 0 where they cannot be measured. Products from registers for this long; one pass
 * of reads or of memcpy (bytes copied, counted once) over memory of this size. */
double ca_probe_gflops(int probe, int threads, double seconds);
double ca_probe_read_gbps(const void *data, int64_t bytes, int threads);
double ca_probe_copy_gbps(void *dst, const void *src, int64_t bytes, int threads);
/* cffi: end */

/* ---- inside the library: engines and isa files ---- */
#include <math.h>
#include <string.h>

/* One call of attention_with_kv_cache. */
typedef struct ca_call {
    const void *query;
    int64_t q_stride_t, q_stride_h;
    const void *key_cache, *value_cache;
    int64_t k_stride_n, k_stride_h, v_stride_n, v_stride_h;
    int64_t num_blocks, block_size;
    void *output;
    int64_t o_stride_t, o_stride_h;
    float *lse; /* [Hq, T] or NULL */
    int64_t lse_stride_h;
    const int32_t *block_table;
    int64_t table_stride, table_cols;
    const float *alibi_slopes, *s_aux; /* [Hq] or NULL */
    float scale, softcap, k_scale, v_scale;
    const int32_t *selected; /* [R, Hkv, num_selected], block numbers within a request, ascending, then -1 */
    int64_t selected_stride_r, selected_stride_h, num_selected; /* -1: none is given, all blocks count */
    int64_t k_ld, v_ld;     /* from token to token of a plain cache; packed: head_size, head_size_v */
    const float *attn_bias; /* ca_bias_row, or NULL */
    int64_t bias_stride_r, bias_stride_h, bias_stride_q; /* 0 along an axis of size 1 */
} ca_call;

#define CA_LANES 16    /* tokens of a K group in every layout */
#define CA_PAGE_ROWS 4 /* query rows that share a page's way through the registers */
#define CA_LOG2E_D 1.44269504088896340736
#define CA_LOG2E 1.44269504088896340736f
#define CA_LN2 0.69314718055994530942f

static inline int64_t ca_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ca_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ca_div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t ca_round_up(int64_t a, int64_t b) { return ca_div_up(a, b) * b; }

static inline int ca_dtype_size(int dtype) { return dtype == CA_F32 ? 4 : dtype < CA_DTYPES ? 2 : 1; }
static inline int ca_is_narrow(int dtype) { return dtype >= CA_DTYPES; }
static inline int ca_is_scaled(int dtype) { return dtype == CA_I8 || dtype == CA_I4; }
/* Elements of a token that share a scale. */
static inline int64_t ca_scale_elements(int dtype, int64_t head_size) { return dtype == CA_I4 ? 32 : head_size; }

/* The one truth about the layouts: where element (token, d) of a block lies. In ROWS head_size is ld. */
static inline int64_t ca_k_offset(int layout, int64_t token, int64_t d, int64_t head_size) {
    int64_t group = token / CA_LANES, lane = token % CA_LANES;
    if (layout == CA_LAYOUT_ROWS)
        return token * head_size + d;
    if (layout == CA_LAYOUT_LANES)
        return (group * head_size + d) * CA_LANES + lane;
    return (group * ((head_size + 1) / 2) + d / 2) * 2 * CA_LANES + lane * 2 + d % 2;
}
static inline int64_t ca_v_offset(int layout, int64_t token, int64_t d, int64_t head_size) {
    return layout != CA_LAYOUT_PAIRS ? token * head_size + d : (token / 2 * head_size + d) * 2 + token % 2;
}

/* The axes of a cache, whatever their order. */
typedef struct ca_axes {
    int64_t num_blocks, num_kv_heads, block_size;
    int64_t stride_n, stride_h, ld;
} ca_axes;

static inline ca_axes ca_cache_axes(const ca_array *a, int kv_cache_layout, int64_t head_size) {
    int h = kv_cache_layout == CA_NHD ? 2 : 1, b = 3 - h;
    return (ca_axes){a->shape[0],   a->shape[h],   a->shape[b],
                     a->strides[0], a->strides[h], kv_cache_layout == CA_PACKED ? head_size : a->strides[b]};
}

/* int4: byte b of 64 holds elements b, in its low half, and 64 + b of 128 that would otherwise lie in these places; as
 * an element plus 8. int8: sign and magnitude. */
#define CA_I4_ELEMENTS 128
static inline int64_t ca_i4_byte(int64_t element) { return element / 128 * 64 + element % 64; }
static inline int ca_i4_shift(int64_t element) { return element % 128 < 64 ? 0 : 4; }

/* What a group of 16 tokens of one kv head takes, K or V: elements in the order of its layout, their bytes, and, of a
 * cache that keeps scales, as many for each token. Its block then holds whole groups, and behind all of them
 * [groups][scales][16] bfloat16. */
typedef struct ca_group_form {
    int64_t elements, bytes, scales;
} ca_group_form;

static inline ca_group_form ca_group_form_of(int layout, int kv_dtype, int64_t head_size, int value) {
    int64_t pair = layout == CA_LAYOUT_PAIRS ? 2 : 1, n = CA_LANES * (value ? head_size : ca_round_up(head_size, pair));
    if (kv_dtype == CA_I4)
        n = ca_round_up(n, CA_I4_ELEMENTS);
    return (ca_group_form){n, kv_dtype == CA_I4 ? n / 2 : n * ca_dtype_size(kv_dtype),
                           ca_is_scaled(kv_dtype) ? ca_div_up(head_size, ca_scale_elements(kv_dtype, head_size)) : 0};
}
/* Where the scales of a group lie in its block. */
static inline int64_t ca_scales_at(const ca_group_form *f, int64_t block_size, int64_t group) {
    return ca_div_up(block_size, CA_LANES) * f->bytes + group * f->scales * CA_LANES * 2;
}

/* Query token `token` of a request. */
typedef struct ca_token {
    int32_t request, token;
} ca_token;

/* A piece of work: query tokens [token, token + num_tokens) of a request, keys of segments
 * [segment, segment + num_segments), for one kv head at a time. Row r of it is query token
 * token + r / group, query head kv_head * group + r % group. */
typedef struct ca_task {
    int32_t request, token, num_tokens;
    int32_t segment, num_segments;
    int32_t together; /* do all kv heads go together through the keys? */
    int32_t shared;   /* 0, or 1 + where in plan->tokens its query tokens are: of several requests, whose blocks are the
                         same in these segments, which all of them see whole */
    int64_t partial;  /* floats into the partial results, -1: finish at once */
} ca_task;

/* Rows from `row` on of partial results for `rows` rows, of kv head 0. */
typedef struct ca_part {
    int64_t partial;
    int32_t rows, row;
} ca_part;

/* A query block whose keys, or some, were handed out: their results merge in the order of the parts, which is that of
 * the keys. Then come the segments of the task, which are left to whoever merges. */
typedef struct ca_merge {
    ca_task task;
    const ca_part *parts;
    int64_t num_parts;
} ca_merge;

/* Requests whose first blocks a task reads for both. */
typedef struct ca_same {
    int32_t request, other, num_blocks;
} ca_same;

/* A task of up to so many rows reads more than it computes: FEW_KEYS of state.inc. Such tasks may share. */
#define CA_FEW_ROWS 16

/* Softmax state of `rows` query rows over some keys: sum of p*v, the reference max and sum of p.
 * m is in units of log2: p = exp2(s*log2(e) - m). Nothing seen: m = -inf, l = 0, o = 0. */
typedef struct ca_state {
    float *o; /* [rows][Dv] */
    float *m, *l;
} ca_state;

static inline void ca_clear(const ca_state *s, int64_t rows, int64_t head_size_v) {
    memset(s->o, 0, (size_t)(rows * head_size_v) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        s->m[r] = -INFINITY;
        s->l[r] = 0;
    }
}

typedef struct ca_kernel ca_kernel;

struct ca_plan {
    ca_shape shape;
    const ca_engine *engine;
    const ca_kernel *kernel;
    int64_t num_tokens, group_size;               /* query heads of a kv head */
    int32_t *query_start_loc, *seq_lens, *causal; /* causal[r]: resolved for each request */
    ca_task *tasks;                               /* longest first */
    int64_t num_tasks;
    ca_merge *merges;
    int64_t num_merges;
    int32_t rows;        /* most query rows of a task */
    int32_t num_threads; /* no more than shape.num_threads, and worth waking */
    int64_t state_bytes, scratch_bytes, thread_bytes, partial_bytes;
    int64_t head_bytes; /* of a state, in a step of decodes whose kv heads may go together through the keys; else 0 */
    int32_t *lo, *hi;   /* [num_tokens] where there are masks besides causal and window, else NULL: ca_visible */
    uint8_t *tree;      /* [num_tokens][tree_bytes] or NULL: ca_tree_row */
    int64_t tree_bytes;
    int64_t num_shared;
    ca_token *tokens; /* of the shared tasks */
    ca_same *same;
    int64_t num_same;
};

/* Computes the state of a task's rows, which is clear, over the keys [k0, k1) for one kv head. scratch is
 * 64-aligned and holds engine->scratch_bytes(plan). Returns 0, or the engine's own status. */
typedef int ca_segment_fn(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                          int64_t k1, const ca_state *state, void *scratch);

struct ca_engine {
    const char *name;
    int (*rows)(const ca_kernel *kernel); /* query rows it wants in a task */
    int64_t (*scratch_bytes)(const ca_plan *plan);
    ca_segment_fn *segment;
};

/* One call of rotary_reshape_and_cache, as far as it rotates. */
typedef struct ca_rotary {
    const ca_kernel *kernel;
    ca_rows query, query_out, key, cos_sin;
    const int64_t *positions;
    int64_t num_tokens, head_size, rot_dim;
    int32_t num_heads, num_kv_heads, dtype, cos_sin_dtype, is_neox;
    float eps;
    const ca_array *weights;          /* of the norms of Q and K; absent: no norm */
    const float *q_weight, *k_weight; /* the same as float32, or NULL */
    char *memory;                     /* thread_bytes for each thread */
    int64_t thread_bytes;
} ca_rotary;

int ca_rotary_begin(ca_rotary *rotary, int team); /* what else a team needs, or CA_NO_MEMORY */
void ca_rotary_end(ca_rotary *rotary);
void ca_rotate_queries(const ca_rotary *rotary, int thread, int team); /* this thread's share */
/* Keys of n <= 16 tokens from t on: row i of the result is token t + i. */
ca_rows ca_rotate_keys(const ca_rotary *rotary, int thread, int head0, int head1, int64_t t, int n);

/* Rows of the isa table: what an isa file offers for one dtype. */
struct ca_kernel {
    ca_kernel_info info;
    int64_t (*scratch_bytes)(const ca_plan *plan);
    ca_segment_fn *segment;
    /* keys after which a segment of up to CA_FEW_ROWS may be left and, with the state as it then is, gone on with, the
     * bits being the same, where blocks hold whole groups; 0: never */
    int few_keys, nhd_keys; /* the second of NHD caches */
    /* into = merge(into, from), in this order: float results depend on it */
    void (*merge)(const ca_state *into, const ca_state *from, int64_t rows, int64_t head_size_v);
    /* state -> output and lse: sinks join here, o/l is rounded to the output's dtype */
    void (*finish)(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, const ca_state *state);
    /* tokens [token, token + n) of one group of 16 of one block of one kv head, from rows ld elements apart;
     * meanwhile as many rows are fetched from `ahead`, whatever lies there; stream: past the caches */
    void (*write_k)(void *block, int64_t head_size, int64_t token, int n, const void *src, int64_t ld,
                    const void *ahead, int stream);
    void (*write_v)(void *block, int64_t head_size, int64_t token, int n, const void *src, int64_t ld,
                    const void *ahead, int stream);
    /* tokens [t0, t1) of one block of one kv head, widened to float32:
     * K to dst[d * ld + (t - t0)] (transposed), V to dst[(t - t0) * ld + d] */
    void (*widen_k)(const void *block, int64_t head_size, int64_t t0, int64_t t1, float *dst, int64_t ld);
    void (*widen_v)(const void *block, int64_t head_size, int64_t t0, int64_t t1, float *dst, int64_t ld);
    /* one query row times factor, as float32 */
    void (*widen_row)(const void *src, int64_t n, float factor, float *dst);
    /* the first n tokens of a group, K or V, that is not ca_half_ready, as a group of the kernel's own layout and
     * dtype, exactly, without its scales; rows: ca_rows_bytes; meanwhile as much is fetched from `ahead`, whatever lies
     * there */
    void (*unpack)(const ca_plan *plan, int value, const void *src, int64_t ld, int n, void *dst, void *rows,
                   const void *ahead);
    /* n numbers over scale as such elements, a byte each (fp8): nearest even, saturating */
    void (*pack)(const void *src, int64_t n, float scale, int kv_dtype, uint8_t *dst);
    /* one token of int8 or int4 likewise, over its own scales */
    void (*quantise)(const void *src, int64_t n, int kv_dtype, uint8_t *dst, uint16_t *scales);
    /* one head, normed unless weight is NULL, rotated by cos_sin (cos, then sin), to dst, which may be src; x: room for
     * it as float32 */
    void (*rotate)(const ca_rotary *rotary, const float *weight, const float *cos_sin, const void *src, float *x,
                   void *dst);
    /* scores [M] of one request's pages for one kv head, of the arrays of ca_score_pages; scratch: ca_score_floats */
    void (*score_pages)(const ca_array *arrays, int64_t block_size, int64_t request, int64_t kv_head, float *scratch);
};

/* What a file of native/isa offers, as `const ca_isa_row ca_isa_NAME`. */
typedef struct ca_isa_row {
    const char *(*missing)(void); /* a feature that this machine lacks, or why not, in words; NULL: nothing */
    const ca_kernel *kernels[CA_DTYPES];
} ca_isa_row;

const ca_isa_row *ca_isa_get(int isa);
/* Element d of a token of int8 or int4, its scale applied. */
float ca_scaled_element(int layout, int kv_dtype, int64_t head_size, int value, const char *block, int64_t block_size,
                        int64_t token, int64_t d);
/* [128] bytes of e4m3, e5m2 or int8 without their sign, as binary16 or bfloat16; of int4 [16], twice */
const uint16_t *ca_narrow_words(int kv_dtype, int bf16);
const uint8_t *ca_narrow_bytes(int kv_dtype); /* of bfloat16: [128] low ones, [128] high ones */
int ca_check_blocks(const int32_t *table, int64_t request, int64_t first, int64_t end, int64_t cols, int64_t num_blocks,
                    ca_fault *fault);
int ca_check_lengths(int64_t num_reqs, const int32_t *seq_lens, const int32_t *query_start_loc, ca_fault *fault);
int ca_check_step(const ca_plan *plan, const int32_t *seq_lens, const int32_t *query_start_loc, int causal,
                  const int32_t *dynamic_causal, ca_fault *fault);
int ca_check_slots(const int64_t *slots, int64_t num_tokens, int64_t bound, ca_fault *fault);
int ca_check_positions(const int64_t *positions, int64_t num_tokens, int64_t bound, ca_fault *fault);
/* Reads the call's arrays into `a`. NULL unless nothing is wrong with them but what indices may hold. */
const struct ca_accepted *ca_accept(ca_known *known, const int64_t *sizes, int64_t isa, int64_t k_dtype,
                                    int64_t v_dtype, uintptr_t objects, const ca_array *given, ca_array *a,
                                    int num_arrays, int num_outputs);
/* Those at `objects`, or given; 0: they are not all like what we take. */
int ca_read_arrays(uintptr_t objects, const ca_array *given, ca_array *out, int n);
int ca_accept_step(uintptr_t objects, const ca_array *given, int64_t num_reqs, ca_array *a);
/* Fills lo, hi and tree of a plan that has none yet, for its lengths and window. */
int ca_take_masks(ca_plan *plan, const ca_masks *masks, ca_fault *fault);
/* Threads that are worth waking for what takes one thread so long. */
int64_t ca_threads_for(double nanoseconds);
/* A child of fork() must not enter a parallel region of libgomp: it would wait for threads that are gone. */
int ca_team(int wanted);

static inline int64_t ca_rows_of(const ca_plan *plan, const ca_task *task) {
    return task->num_tokens * plan->group_size;
}

static inline ca_token ca_token_at(const ca_plan *plan, const ca_task *task, int64_t i) {
    return task->shared ? plan->tokens[task->shared - 1 + i] : (ca_token){task->request, (int32_t)(task->token + i)};
}

/* Of query token i of request r among its keys. */
static inline int64_t ca_position(const ca_plan *plan, int r, int64_t i) {
    return plan->seq_lens[r] - ((int64_t)plan->query_start_loc[r + 1] - plan->query_start_loc[r]) + i;
}

/* First and last+1 key that query token i of request r may see, before the sequence's own end. Neither falls from token
 * to token, but lo in a tree mask, which may hide some of them besides: ca_run. */
static inline void ca_visible(const ca_plan *plan, int r, int64_t i, int64_t *lo, int64_t *hi) {
    if (plan->lo) {
        *lo = plan->lo[plan->query_start_loc[r] + i];
        *hi = plan->hi[plan->query_start_loc[r] + i];
        return;
    }
    int64_t len = plan->seq_lens[r], pos = ca_position(plan, r, i);
    int64_t left = plan->shape.window_left, right = plan->shape.window_right;
    *lo = left < 0 ? 0 : ca_max64(0, pos - left);
    *hi = right < 0 ? len : ca_min64(len, pos + right + 1);
    if (plan->causal[r])
        *hi = ca_min64(*hi, pos + 1);
    if (*hi < *lo)
        *hi = *lo;
}

/* The keys [*k0, *k1) that some row of the task may see; of a shared one, no fewer than those of its segments. */
static inline void ca_task_keys(const ca_plan *plan, const ca_task *task, int64_t *k0, int64_t *k1) {
    int64_t unused;
    ca_token first = ca_token_at(plan, task, 0), last = ca_token_at(plan, task, task->num_tokens - 1);
    ca_visible(plan, first.request, first.token, k0, &unused);
    ca_visible(plan, last.request, last.token, &unused, k1);
    for (int32_t i = 1; plan->tree && i < task->num_tokens; i++)
        *k0 = ca_min64(*k0, plan->lo[plan->query_start_loc[task->request] + task->token + i]);
    if (*k1 < *k0)
        *k1 = *k0;
}

/* A row of a tree mask: bit j says whether query token i of request r sees the key of the request's query token j.
 * NULL: it sees all of its range. */
static inline const uint8_t *ca_tree_row(const ca_plan *plan, int r, int64_t i) {
    return plan->tree ? plan->tree + (plan->query_start_loc[r] + i) * plan->tree_bytes : NULL;
}

/* Keys before those of the request's query tokens. */
static inline int64_t ca_context(const ca_plan *plan, int r) {
    return plan->seq_lens[r] - ((int64_t)plan->query_start_loc[r + 1] - plan->query_start_loc[r]);
}

/* Keys from `context` on are seen where their bit is set. */
static inline int ca_sees(const uint8_t *bits, int64_t context, int64_t key) {
    return key < context || (bits[(key - context) / 8] >> (key - context) % 8 & 1);
}

/* Of the keys [*a, hi) the next [*a, *b) that are seen without a gap; 0: none is left. */
static inline int ca_run(const uint8_t *bits, int64_t context, int64_t hi, int64_t *a, int64_t *b) {
    while (bits && *a < hi && !ca_sees(bits, context, *a))
        ++*a;
    *b = bits ? ca_max64(*a, ca_min64(context, hi)) : hi;
    while (bits && *b < hi && ca_sees(bits, context, *b))
        ++*b;
    return *a < *b;
}

/* -inf to the scores of those of n keys from `key` on that are not seen. */
static inline void ca_hide(const uint8_t *bits, int64_t context, int64_t key, int64_t n, float *s) {
    for (int64_t i = ca_max64(0, context - key); i < n; i++)
        if (!ca_sees(bits, context, key + i))
            s[i] = -INFINITY;
}

/* Keys of a segment: fixed by the request's length alone, so that results do not depend on who
 * shares the batch. At most 64 segments, so that the partial results stay small. */
static inline int64_t ca_segment_keys(int64_t seq_len) { return 1024 * ca_max64(1, ca_div_up(seq_len, 64 * 1024)); }

/* Do the kernels read K, or V, as it lies? Both? */
static inline int ca_half_ready(const ca_plan *plan, int value) {
    int dtype = value ? plan->shape.v_dtype : plan->shape.k_dtype;
    return !ca_is_narrow(dtype) && plan->shape.kv_cache_layout == CA_PACKED;
}
static inline int ca_ready(const ca_plan *plan) { return ca_half_ready(plan, 0) && ca_half_ready(plan, 1); }
static inline int ca_layout_of(const ca_plan *plan) {
    return plan->shape.kv_cache_layout == CA_PACKED ? plan->kernel->info.layout : CA_LAYOUT_ROWS;
}
/* A group of a plain, narrow cache on its way: widened, not yet packed. */
static inline int64_t ca_rows_bytes(const ca_plan *plan) {
    int narrow = ca_is_narrow(plan->shape.k_dtype) || ca_is_narrow(plan->shape.v_dtype);
    int needed = narrow && plan->shape.kv_cache_layout != CA_PACKED;
    return needed * CA_LANES * ca_max64(plan->shape.head_size, plan->shape.head_size_v) *
           ca_dtype_size(plan->shape.dtype);
}

/* Where may a segment of up to CA_FEW_ROWS be left? */
static inline int64_t ca_few_keys(const ca_plan *p) {
    return p->shape.kv_cache_layout == CA_NHD ? p->kernel->nhd_keys : p->kernel->few_keys;
}

/* The blocks that a request and kv head attend, ascending: all of them, or those selected. */
typedef struct ca_blocks {
    const int32_t *selected;
    int64_t count; /* -1: all */
} ca_blocks;

static inline ca_blocks ca_blocks_of(const ca_call *call, int request, int kv_head) {
    int64_t at = request * call->selected_stride_r + kv_head * call->selected_stride_h;
    return (ca_blocks){call->num_selected > 0 ? call->selected + at : NULL, call->num_selected};
}

/* Number i of them; past the last, one that is past every key: -1 as unsigned, which pads the selected ones, too. */
static inline int64_t ca_nth_block(ca_blocks b, int64_t i) {
    return b.count < 0 ? i : i < b.count ? (int64_t)(uint32_t)b.selected[i] : UINT32_MAX;
}

/* Which of them is the first that is no less than `block`? Without branches: what is selected cannot be foreseen. */
static inline int64_t ca_find_block(ca_blocks b, int64_t block) {
    int64_t first = 0;
    if (b.count < 0)
        return block;
    for (int64_t n = b.count, half; n > 0; n -= half) {
        half = (n + 1) / 2;
        first += (int64_t)(uint32_t)b.selected[first + half - 1] < block ? half : 0;
    }
    return first;
}

/* The first key from `key` on that the request and kv head attend, or `end` where none is before it. */
static inline int64_t ca_next_key(const ca_call *call, int request, int kv_head, int64_t key, int64_t end) {
    ca_blocks b = ca_blocks_of(call, request, kv_head);
    if (b.count < 0)
        return ca_min64(end, key);
    int64_t block = ca_nth_block(b, ca_find_block(b, key / call->block_size));
    return ca_min64(end, ca_max64(key, block * call->block_size));
}

/* What is added to the logits of a query token's head, by key. NULL: nothing. */
static inline const float *ca_bias_row(const ca_call *c, ca_token at, int64_t head) {
    return c->attn_bias
               ? c->attn_bias + at.request * c->bias_stride_r + head * c->bias_stride_h + at.token * c->bias_stride_q
               : NULL;
}

static inline const char *ca_block(const void *base, int64_t stride_n, int64_t stride_h, int64_t block, int kv_head,
                                   int dtype) {
    return (const char *)base + (block * stride_n + kv_head * stride_h) * ca_dtype_size(dtype);
}
#endif
