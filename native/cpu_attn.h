/* SPDX-License-Identifier: Apache-2.0
 * The whole C ABI. cffi reads what stands between the two markers; nothing else is public.
 * Shapes: R num_reqs, T num_tokens, Hq num_heads, Hkv num_kv_heads, D head_size, Dv head_size_v,
 * N num_blocks, B block_size, M blocks per request. Strides count elements, not bytes. */
#ifndef CPU_ATTN_H
#define CPU_ATTN_H
#include <stddef.h>
#include <stdint.h>
/* cffi: begin */
/* First those of queries and caches. Then those of caches alone: fp8 (e4m3 without infinities, e5m2: arXiv:2209.05433)
 * and integers with bfloat16 scales: int8, int6 and int5 have one for a token of a kv head, int4 one for each 32 of its
 * elements, int4_per_token_head (CA_I4_TOKEN) one as int8 has. Then those of indices and bytes. */
enum ca_dtype {
    CA_F32,
    CA_F16,
    CA_BF16,
    CA_DTYPES,
    CA_E4M3 = CA_DTYPES,
    CA_E5M2,
    CA_I8,
    CA_I6,
    CA_I5,
    CA_I4,
    CA_I4_TOKEN,
    CA_CACHE_DTYPES,
    CA_I32 = 32,
    CA_I64,
    CA_U8
};

/* How one block of one kv head lies in memory (element offsets from the start of the block).
 * LANES: K [B/16][D][16], V [B][Dv].
 * PAIRS: K [B/16][D/2][16][2], V [B/2][Dv][2]: two neighbours of the summed axis side by side,
 *        as VDPBF16PS and TDPBF16PS read them. Elements of a byte and less lie so in every packed cache.
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
    CA_UNREAD,              /* argument, expected: an array that Python has to read, or to refuse */
    CA_UNNAMED,             /* value = dtype, bound = head size: Python has to say what names mean, or to refuse them */
    CA_SMALL_WORKSPACE,     /* the plan asks for a larger one */
    CA_WRONG_DTYPE,         /* argument, expected; the next ones, too, are about an argument: of its axis `position` */
    CA_WRONG_NDIM,          /* ndim, axes */
    CA_WRONG_SIZE,          /* axes, position, value, bound = what it has to be */
    CA_LARGE_SIZE,          /* position, value, bound */
    CA_NOT_DENSE,           /* value = stride of the last axis */
    CA_OUTSIDE,             /* axes, position, value, least, bound: least <= value <= bound */
    CA_ODD_ROT_DIM,         /* value */
    CA_EMPTY_BLOCK,         /* a cache of block_size 0 */
    CA_BLOCK_NOT_DENSE,     /* position, value = stride, bound = what it has to be */
    CA_WRONG_WIDTH,         /* value, bound = what it has to be, head_size, kv_cache_layout */
    CA_READ_ONLY,
    CA_OVERLAPS_ITSELF,
    CA_SHARES_MEMORY,   /* value = the other argument */
    CA_BAD_POSITION,    /* position, value, bound: 0 <= value < bound */
    CA_TREE_TOKENS,     /* value = rows of tree_mask, bound = T */
    CA_TREE_NARROW,     /* request, value = query tokens, bound = bits of a row of tree_mask */
    CA_TREE_NOT_CAUSAL, /* request */
    CA_TREE_ALIBI,
    CA_TOKENS_WITHOUT_KEYS, /* request, value = seq_len, bound = q_len: a mask goes by the keys of the query tokens */
    CA_BAD_SELECTED,        /* request, kv_head, position, value, bound: -1 <= value < bound */
    CA_SELECTED_ORDER,      /* request, kv_head, position, value, bound = the value before */
    CA_OTHER_BLOCK_SIZE,    /* value, bound = the plan's */
    CA_OTHER_BLOCKS,        /* request, position, value, bound = that of a request that shared it */
    CA_SELECTED_SHARED,     /* of a plan that shares prefixes */
    CA_BIAS_SMALL,          /* request, position = axis, value, bound = what the request needs */
    CA_SMALL_STACK          /* value = bytes of an OpenMP thread's stack, bound = those that a call may take */
};

/* What an axis counts, as faults name it. A size up to CA_FREE is that of the call: its plan says it, or the first
 * argument that has it. The others are any. */
enum ca_symbol {
    CA_T,
    CA_NUM_REQS,
    CA_NUM_REQS_1, /* num_reqs + 1 */
    CA_NUM_HEADS,
    CA_NUM_KV_HEADS,
    CA_HEAD_SIZE,
    CA_HEAD_SIZE_V,
    CA_NUM_BLOCKS,
    CA_BLOCK_SIZE,
    CA_FREE,
    CA_ROT_DIM = CA_FREE, /* even, from 2 to the head size */
    CA_BLOCKS,
    CA_MAX_POSITION,
    CA_WIDTH, /* of a cache: what its block takes */
    CA_QUERIES,
    CA_KEYS,
    CA_SYMBOLS,
    CA_OR_1 = 32 /* added to one of the call's: 1 will do */
};

/* Where a check failed: fields that the status does not use are -1. The caller begins with zeros, which is CA_OK; who
 * finds nothing writes nothing. */
typedef struct ca_fault {
    int32_t status;
    int64_t request, position, value, bound;
    int64_t kv_head;
    /* of what is said of an argument */
    int32_t argument, ndim, axes[4]; /* among the call's arrays; enum ca_symbol */
    uint64_t expected;               /* 1 << ca_dtype of each that it may have */
    int64_t least, head_size;
    int32_t kv_cache_layout;
} ca_fault;

/* What a plan was made for; a call is checked against it. */
typedef struct ca_shape {
    int32_t num_reqs, num_heads, num_kv_heads, head_size, head_size_v;
    int32_t dtype, k_dtype, v_dtype;   /* enum ca_dtype, of queries and of the caches */
    int32_t isa;                       /* index into the isa table */
    int32_t causal;                    /* of every request, where dynamic_causal does not say it */
    int32_t all_causal;                /* no request is bidirectional: window_right has no meaning; by ca_plan_new */
    int32_t window_left, window_right; /* keys visible to each side of the query, -1: all */
    int32_t enable_kv_split;
    int32_t num_threads;
    int32_t kv_cache_layout; /* enum ca_kv_cache_layout */
    int32_t hadamard;        /* 1 for a rotated cache of K, 2 of V, 3 of both: kernel/cache_write/hadamard.h */
    int32_t block_size;      /* of the block table that the plan was given, 0: none */
} ca_shape;

/* Masks besides causal and window, as _check.masks had them: both lists by request, then by key. */
typedef struct ca_masks {
    const int32_t *spans;     /* [num_spans][3] request, first key, last key */
    const int32_t *documents; /* [num_documents][2] request, first key */
    const uint8_t *tree;      /* [tree_rows][tree_bytes], tree_rows -1: there is none */
    int64_t num_spans, num_documents, tree_rows, tree_bytes, tree_stride;
    int32_t clamp_spans; /* to the left side of the window */
} ca_masks;

typedef struct ca_plan ca_plan;
typedef struct ca_engine ca_engine;

typedef struct ca_plan_info {
    int64_t num_tokens, num_tasks, num_splits, workspace_bytes;
    int32_t num_threads;
    int64_t num_shared; /* tasks for several requests */
} ca_plan_info;

/* Somebody's memory: _arrays.Array in C. Absent: all zero. */
typedef struct ca_array {
    uintptr_t address; /* of the first element */
    int64_t shape[4], strides[4];
    int32_t ndim, dtype, itemsize, writable;
} ca_array;

/* The arrays of a call, in the order of _check.ATTENTION, STEP, WRITE and ROTARY: those that it writes first. What each
 * has to be: native/check/arguments.c. */
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

/* What the names of an isa and of a kv_cache_dtype mean for keys of each dtype, as far as it has been said. */
typedef struct ca_meaning {
    int32_t head_sizes; /* the isa takes multiples of this */
    struct {
        int32_t known, isa, kv_dtype[2];
    } of[CA_DTYPES];
} ca_meaning;

/* A row of the isa table, and whether it can run here. */
typedef struct ca_isa_info {
    const char *name, *unit; /* unit: "matrix", "vector" or "scalar" */
    int32_t compiled, supported;
    const char *reason; /* why it cannot run here; "" when it can */
} ca_isa_info;

typedef struct ca_kernel_info {
    int32_t layout, rows;         /* query rows of a work item */
    int32_t bf16_products;        /* multiplies bf16 as it is, because here that is faster than FP32 FMA */
    int32_t integers;             /* multiplies int8 and int4 caches as integers (kernel/integers.inc) */
    const char *method;           /* how the other products are formed, in words */
    const char *variant, *reason; /* a file of native/isa whose kernel would replace this one, and why not; NULL */
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

const ca_engine *ca_fused_engine(void);
const ca_engine *ca_reference_engine(void);

/* NULL and *fault on failure. objects, given: as for ca_attend. masks: NULL where there are none. */
ca_plan *ca_plan_new(ca_shape *shape, const ca_engine *engine, uintptr_t objects, const ca_array *given,
                     const ca_masks *masks, ca_fault *fault);
void ca_plan_free(ca_plan *plan);
void ca_plan_describe(const ca_plan *plan, ca_plan_info *out);
int64_t ca_plan_visible_pairs(const ca_plan *plan); /* (query, key) pairs over all query heads */

/* Does CA_BLOCK_TABLE of a call name blocks below num_blocks wherever the plan will look, and the same for requests
 * that share them in the plan? selected: CA_SELECTED_BLOCKS of the call, checked too. */
int ca_check_table(const ca_plan *plan, const ca_array *table, const ca_array *selected, int64_t num_blocks,
                   int64_t block_size, ca_fault *fault);
/* Is CA_ATTN_BIAS of a call large enough? */
int ca_check_bias(const ca_plan *plan, const ca_array *bias, ca_fault *fault);

/* Checks of one array, as tables of native/check/arguments.c make them, for what has no table.
 * expected: 1 << ca_dtype of each that it may be; sizes: of its axes, -1: any. */
int ca_check_array(const ca_array *a, uint64_t expected, int ndim, const int64_t *sizes, ca_fault *fault);
int ca_check_written(const ca_array *a, ca_fault *fault); /* it may be, and no two elements coincide */
int ca_check_cache(const ca_array *a, int kv_cache_layout, ca_fault *fault);
int ca_check_width(const ca_array *a, int kv_cache_layout, int isa, int dtype, int kv_dtype, int64_t head_size,
                   ca_fault *fault);
/* Of a packed cache: so that a block of block_size * width elements holds K or V. */
int64_t ca_cache_width(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size);
/* Have two arrays a byte in common? Yes, too, where it would take long to tell. */
int ca_share_memory(const ca_array *a, const ca_array *b);

/* NumPy arrays as C reads them: type(array), the None that stands for no array, sizeof(PyObject), and what dtype
 * objects mean. Once, on import; without it (ndarray 0) every call is CA_UNREAD. */
void ca_know_numpy(uintptr_t ndarray, uintptr_t none, int64_t head);
void ca_know_dtype(uintptr_t object, int32_t dtype, int32_t itemsize);
int ca_read_array(uintptr_t object, ca_array *out); /* 0: not a NumPy array, or one unlike all that we take */

/* attention_with_kv_cache and reshape_and_cache. Their arrays are Python objects, whose addresses lie at `objects`;
 * where one is 0, or without any, given[i]. CA_UNREAD: one of them is like none that C reads. Everything is checked
 * before a byte is written.
 * causal: -1 where there are no lengths and masks to compare with the plan's. workspace NULL: only checks. */
int ca_attend(const ca_plan *plan, uintptr_t objects, const ca_array *given, int causal, float scale, float softcap,
              float k_scale, float v_scale, void *workspace, int64_t workspace_bytes, ca_fault *fault);
/* hadamard: as in ca_shape. A slot < 0 is skipped. */
int ca_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout, int hadamard,
             float k_scale, float v_scale, ca_fault *fault);
/* rotary_reshape_and_cache. */
int ca_rotary_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                    int hadamard, float k_scale, float v_scale, int is_neox, float eps, ca_fault *fault);

/* The first T tokens of one request, block table [M], out of the cache to [T, Hkv, D], as they are stored, int8 and
 * int4 as float32 times their scales. Arrays as cpu_attn.ops.gather has accepted them; value: 0 for K, 1 for V; dtype:
 * of the tokens that were written. */
enum ca_gather_arrays { CA_GATHERED, CA_GATHER_CACHE, CA_GATHER_BLOCK_TABLE, CA_GATHER_ARRAYS };
int ca_gather(const ca_array *arrays, int value, int isa, int dtype, int kv_dtype, int kv_cache_layout,
              ca_fault *fault);

/* +1 or -1 for dimension d % CA_SIGNS of a rotated cache: kernel/cache_write/hadamard.h. */
enum { CA_SIGNS = 1024 };
extern float ca_signs[1024];

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
#endif
