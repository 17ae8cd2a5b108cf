/* SPDX-License-Identifier: Apache-2.0
 * This is the whole C ABI. cffi reads what stands between the two markers; nothing else is public.
 * arguments.h has the arrays of each call and the axes of these, which build_ffi.py writes from cpu_attn/_arguments.py.
 * In shapes R is num_reqs, T num_tokens, Hq num_heads, Hkv num_kv_heads, D head_size, Dv head_size_v, N num_blocks, B
 * block_size, and M is how many blocks of a request a block table holds. Strides count elements, not bytes. */
#ifndef CPU_ATTN_H
#define CPU_ATTN_H
#include <stddef.h>
#include <stdint.h>
#include "arguments.h"
/* cffi: begin */
/* The dtypes that queries and caches may have come first. Those of caches alone follow: fp8 (e4m3 without infinities
 * and e5m2: arXiv:2209.05433), and integers with bfloat16 scales, of which int4 has one for each 32 elements of a
 * token, and the others (int8, int6, int5, and CA_I4_TOKEN for int4_per_token_head) one for each token of a kv head.
 * The dtypes of indices and bytes come last. */
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

/* These say how one block of one kv head lies in memory, as element offsets from the start of the block.
 * LANES: K is [B/16][D][16], V is [B][Dv].
 * PAIRS: K is [B/16][D/2][16][2], V is [B/2][Dv][2]. Two neighbours of the axis over which a product sums lie side by
 *        side, as VDPBF16PS and TDPBF16PS read them. Elements of a byte or less lie so in every packed cache.
 * ROWS: K and V lie token by token, with the strides that the owner of a plain cache gave them. */
enum ca_layout { CA_LAYOUT_LANES, CA_LAYOUT_PAIRS, CA_LAYOUT_ROWS };

/* These say which axes a cache has: a packed one is [N, Hkv, B, width] and each isa packs its blocks in its own way;
 * HND is [N, Hkv, B, D], NHD is [N, B, Hkv, D]. */
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
    CA_OTHER_TOKENS,        /* value = axis 0 of the query, bound = the last of query_start_loc */
    CA_OTHER_LENGTHS,       /* position, value, bound = the plan's: query_start_loc */
    CA_OTHER_SEQ_LENS,      /* request, value, bound = the plan's */
    CA_OTHER_CAUSAL,        /* request, value, bound = the plan's */
    CA_ENGINE_FAILED,       /* value: the engine's own status */
    CA_UNREAD,              /* argument, expected: an array that Python has to read, or to refuse */
    CA_UNNAMED,             /* value = dtype, bound = head size: Python has to say what names mean, or to refuse them */
    CA_SMALL_WORKSPACE,     /* the plan asks for a larger one */
    /* The statuses from here to CA_SHARES_MEMORY are about an argument, and `position` is one of its axes. */
    CA_WRONG_DTYPE,     /* argument, expected */
    CA_WRONG_NDIM,      /* ndim, axes */
    CA_WRONG_SIZE,      /* axes, position, value, bound = what it has to be */
    CA_LARGE_SIZE,      /* position, value, bound */
    CA_NOT_DENSE,       /* value = stride of the last axis */
    CA_OUTSIDE,         /* axes, position, value, least, bound: least <= value <= bound */
    CA_ODD_ROT_DIM,     /* value */
    CA_EMPTY_BLOCK,     /* a cache of block_size 0 */
    CA_BLOCK_NOT_DENSE, /* position, value = stride, bound = what it has to be */
    CA_WRONG_WIDTH,     /* value, bound = what it has to be, head_size, kv_cache_layout */
    CA_READ_ONLY,
    CA_OVERLAPS_ITSELF,
    CA_SHARES_MEMORY,   /* value = the other argument */
    CA_BAD_POSITION,    /* position, value, bound: 0 <= value < bound */
    CA_TREE_TOKENS,     /* value = rows of tree_mask, bound = T */
    CA_TREE_NARROW,     /* request, value = query tokens, bound = bits of a row of tree_mask */
    CA_TREE_NOT_CAUSAL, /* request */
    CA_TREE_ALIBI,
    CA_TOKENS_WITHOUT_KEYS, /* request, value = seq_len, bound = q_len: a mask goes by the keys of the query tokens */
    CA_BAD_SELECTED,        /* request, list or token, position, value, bound: -1 <= value < bound */
    CA_SELECTED_ORDER,      /* request, list or token, position, value, bound = the value before */
    CA_OTHER_BLOCK_SIZE,    /* value, bound = the plan's */
    CA_OTHER_BLOCKS,        /* request, position, value, bound = that of a request that shared it */
    CA_SELECTED_SHARED,     /* selected_blocks were given, and the plan shares prefixes */
    CA_SELECTED_TWICE,      /* selected_blocks and selected_tokens were given */
    CA_OTHER_SELECTED,      /* value = columns of selected_tokens, -1: there are none; bound = the plan's most, or 0 */
    CA_BIAS_SMALL,          /* request, position = axis, value, bound = what the request needs */
    CA_BAD_NODE,            /* position = block, value, bound: 0 <= value < bound */
    CA_SMALL_STACK,         /* value = bytes of an OpenMP thread's stack, bound = those that a call may take */
    CA_UNEQUAL_GROUPS,      /* value = kv heads, bound = query heads, which are no multiple of them */
    /* The statuses below are those of linear attention. */
    CA_BAD_STATE,        /* argument, position, value, bound: value < bound */
    CA_STATE_TWICE,      /* argument, position, value: a call writes a slot once */
    CA_STATE_WRITTEN,    /* position, value: the call writes the slot for another request */
    CA_BAD_CHECKPOINT,   /* position, token = axis, value, least, bound: least <= value <= bound */
    CA_CHECKPOINT_ORDER, /* position */
    CA_STATE_LENGTH      /* value = inputs that a state of a convolution holds, bound = the least, at most 8 */
};

/* Says where a check failed. request, position, value, bound, kv_head, query_head, query_block and token (a query block
 * and a token are numbered through the step) are -1 where the status does not use them; a list of blocks has a kv_head
 * or a query_head, and a query_block where the plan has these. The caller hands over zeros, which mean CA_OK, and a
 * check that finds no fault writes nothing. */
typedef struct ca_fault {
    int32_t status;
    int64_t request, position, value, bound;
    int64_t kv_head, query_head, query_block, token;
    /* The fields below are used where the fault is about an argument. */
    int32_t argument, ndim, axes[4]; /* argument: its place among the call's arrays; axes: enum ca_axis */
    uint64_t expected;               /* 1 << ca_dtype for each dtype that it may have */
    int64_t least, head_size;
    int32_t kv_cache_layout;
} ca_fault;

/* Says what a plan was made for; every call is checked against it. */
typedef struct ca_shape {
    int32_t num_reqs, num_heads, num_kv_heads, head_size, head_size_v;
    int32_t dtype, k_dtype, v_dtype; /* enum ca_dtype, of queries and of the caches */
    int32_t isa;                     /* index into the isa table */
    int32_t causal;                  /* whether requests are causal where dynamic_causal is not given */
    int32_t all_causal; /* no request is bidirectional, so that window_right means nothing; set by ca_plan_new */
    int32_t window_left, window_right; /* keys visible to each side of the query, -1: all */
    int32_t enable_kv_split;
    int32_t num_threads;
    int32_t kv_cache_layout; /* enum ca_kv_cache_layout */
    int32_t hadamard;        /* 1 for a rotated cache of K, 2 of V, 3 of both: kernel/cache_write/hadamard.h */
    int32_t block_size;      /* block size of the table that the plan was given; 0: it was given none */
    CA_PLAN_FIELDS           /* its options, of cpu_attn/_arguments.py */
} ca_shape;

/* Holds the masks besides causal and window, as _check.masks has accepted them. Both lists ascend by request, then by
 * key. */
typedef struct ca_masks {
    const int32_t *spans;     /* [num_spans][3]: request, first key, last key */
    const int32_t *documents; /* [num_documents][2]: request, first key */
    const uint8_t *tree;      /* [tree_rows][tree_bytes]; tree_rows -1: there is none */
    int64_t num_spans, num_documents, tree_rows, tree_bytes, tree_stride;
} ca_masks;

typedef struct ca_plan ca_plan;
typedef struct ca_engine ca_engine;

typedef struct ca_plan_info {
    int64_t num_tokens, num_tasks, num_splits, workspace_bytes;
    int32_t num_threads;
    int64_t num_shared; /* tasks that compute for several requests */
} ca_plan_info;

/* An array in memory that the caller owns, as _arrays.Array is in Python. An argument that is absent is all zeros. */
typedef struct ca_array {
    uintptr_t address; /* of the first element */
    int64_t shape[4], strides[4];
    int32_t ndim, dtype, itemsize, writable;
} ca_array;

/* Says what the caller's names of an isa and of a kv_cache_dtype mean for keys of each dtype. Python resolves a name
 * when it is first needed; `known` says for which dtypes it has. */
typedef struct ca_meaning {
    int32_t head_sizes; /* the isa takes head sizes that are multiples of this */
    struct {
        int32_t known, isa, kv_dtype[2];
    } of[CA_DTYPES];
} ca_meaning;

/* Describes a row of the isa table, and says whether it can run here. */
typedef struct ca_isa_info {
    const char *name, *unit; /* unit: "matrix", "vector" or "scalar" */
    int32_t compiled, supported;
    const char *reason; /* why it cannot run here; "" when it can */
} ca_isa_info;

typedef struct ca_kernel_info {
    int32_t layout, rows;  /* rows: query rows of a task */
    int32_t bf16_products; /* whether bf16 is multiplied as it is, which on this machine is faster than FP32 FMA */
    const char *integers;  /* what multiplies caches of integers as integers (kernel/kv_formats/integers.h), or NULL */
    const char *method;    /* how the other products are formed, in words */
    const char *variant, *reason; /* a file of native/isa whose kernel would replace this one, and why it does not;
                                     NULL: there is none */
} ca_kernel_info;

typedef struct ca_cpu_info {
    char vendor[16], brand[64];
    int32_t family, model, stepping;
    int64_t l1d, l2, l3;    /* bytes, 0: unknown */
    int32_t cpus;           /* CPUs that this process may run on */
    int32_t amx_permission; /* 1 granted, 0 refused, -1 no AMX here */
    const char *amx_reason;
} ca_cpu_info;

void ca_cpu(ca_cpu_info *out);
int ca_cpu_feature(int i, const char **name); /* 1: this machine has it, 0: it has not, -1: there is no such i */

int ca_isa(int i, ca_isa_info *out);                        /* 0: there is no such i */
int ca_isa_kernel(int isa, int dtype, ca_kernel_info *out); /* 0: there is no kernel */
/* Returns how many elements of kv_dtype (bytes for integers) a block of one kv head takes, or -1 where the isa has no
 * kernel for dtype. */
int64_t ca_block_elements(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size, int value);

const char *ca_threading(void); /* "OpenMP 201511" or why there is none */
int ca_get_num_threads(void);
void ca_set_num_threads(int n); /* 0: as many as OpenMP says; -n: n, however little there is to do */
void ca_set_cpu_quota(int n);   /* as many as OpenMP says, but no more than n */

/* These tell and set how this thread computes with floats (native/cpu/float_mode.h), as libraries of a caller's program
 * may set it: MXCSR of x86-64 or FPCR of aarch64. Calls compute as ca_computing_float_mode says, and keep what the
 * caller has set. */
uint64_t ca_float_mode(void);
void ca_set_float_mode(uint64_t mode);
uint64_t ca_computing_float_mode(void);

/* Nodes are NUMA's: memory is near some CPUs and farther from others. What is here knows nodes and CPUs with numbers
 * below these. */
enum { CA_NODES = 64, CA_CPUS = 4096 };
void ca_set_cpu_nodes(const int32_t *nodes, int32_t n); /* nodes[cpu], n of them: on which node threads run */
/* Marks in cpus[CA_CPUS] those to which OpenMP binds its threads. Returns in how many places, 0: it binds none. */
int ca_place_cpus(uint8_t *cpus);
void ca_thread_cpus(int32_t *cpus, int32_t n); /* where each of n threads of a call runs at present; -1: unknown */
/* The two below return 0 or errno. */
/* Sets bit i of *nodes where this thread may have memory of node i: where its cpuset allows it and, where the thread's
 * policy binds memory (numactl --membind), where this does. */
int ca_memory_nodes(uint64_t *nodes);
/* Says on which nodes pages are to lie that nobody has touched yet: on each of them in turn, or on the one. A node
 * whose memory is used up leaves pages to others. */
int ca_place(uintptr_t address, int64_t bytes, int32_t interleave, uint64_t nodes);

/* Pages of a file in the place of memory that was mapped. Writing to them changes copies that this process alone has,
 * as it would change memory. The two return 0 or errno; ENOSYS: this system has no such call. */
/* Maps bytes of an open file, from `offset` on, in the place of pages that the caller has mapped; pages of zeros where
 * fd is -1. */
int ca_map(uintptr_t address, int64_t bytes, int fd, int64_t offset);
/* Reads the pages of a mapped file. What cannot be read is an error here, and a signal where it is touched. */
int ca_read_pages(uintptr_t address, int64_t bytes);
int ca_no_reserve(void); /* the flag of mmap for memory that counts once it is used; 0: there is none */

const ca_engine *ca_reference_engine(void);

/* Returns NULL and fills *fault on failure. engine: NULL is the isa's own kernel. objects and given are those of
 * ca_attend; masks is NULL where there are none. */
ca_plan *ca_plan_new(ca_shape *shape, const ca_engine *engine, uintptr_t objects, const ca_array *given,
                     const ca_masks *masks, ca_fault *fault);
void ca_plan_free(ca_plan *plan);
void ca_plan_describe(const ca_plan *plan, ca_plan_info *out);
int64_t ca_plan_visible_pairs(const ca_plan *plan); /* (query, key) pairs that the masks leave, over all query heads */

/* Checks that CA_ATTN_BIAS of a call has every query token and every key of every request. */
int ca_check_bias(const ca_plan *plan, const ca_array *bias, ca_fault *fault);

/* These check one array, as the tables of native/check/arguments.c do, for calls that have no table. `expected` has a
 * bit 1 << ca_dtype for each dtype that the array may have, and `sizes` says how large each axis has to be; -1 allows
 * any size. */
int ca_check_array(const ca_array *a, uint64_t expected, int ndim, const int64_t *sizes, ca_fault *fault);
int ca_check_written(const ca_array *a, ca_fault *fault); /* it may be written, and no two elements coincide */
int ca_check_cache(const ca_array *a, int kv_cache_layout, ca_fault *fault);
int ca_check_width(const ca_array *a, int kv_cache_layout, int isa, int dtype, int kv_dtype, int64_t head_size,
                   ca_fault *fault);
/* Returns the width of a packed cache, at which a block of block_size * width elements holds K or V. */
int64_t ca_cache_width(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size);
/* A row of ca_formats (cache/formats.h). scaled: tokens have scales of their own; shared: how many elements share one,
 * 0: all of a token; largest: the largest integer; zero: the nibble that stands for 0. Scales that are tried are the
 * largest magnitude over divisor + 0.5 c, for each c below `tried`. */
typedef struct ca_format {
    int32_t bits, scaled, shared, largest, zero, tried;
    float divisor;
} ca_format;
ca_format ca_format_of(int kv_dtype);
/* Returns whether two arrays have a byte in common, and 1, too, where it would take long to tell. */
int ca_share_memory(const ca_array *a, const ca_array *b);

/* These tell C how to read NumPy arrays: type(array), the None that stands for no array, sizeof(PyObject), and what
 * each dtype object means. Python calls them once, on import; before that, or with ndarray 0, C reads no object, and
 * calls that are given some return CA_UNREAD. */
void ca_know_numpy(uintptr_t ndarray, uintptr_t none, int64_t head);
void ca_know_dtype(uintptr_t object, int32_t dtype, int32_t itemsize);
int ca_read_array(uintptr_t object, ca_array *out); /* 0: it is no NumPy array, or one of a kind that C does not read */

/* These tell C of torch's tensors: the class, and the address of the DLPackExchangeAPI in its
 * __dlpack_c_exchange_api__, and what the numbers of a DLDataType mean. ca_know_tensors returns 0 where the API is of
 * another version. */
int ca_know_tensors(uintptr_t type, uintptr_t exchange);
void ca_know_dlpack_dtype(int code, int bits, int32_t dtype, int32_t itemsize);
/* Reads the tensors among `count` objects to `given`, and copies the addresses of the others to `to`, where those of
 * tensors that were read become 0. Python's lock must be held, so it is not called through cffi, which lets go of it.
 * Returns -1 where torch has set an exception. */
int ca_borrow_tensors(const uintptr_t *objects, int count, uintptr_t *to, ca_array *given);

/* ca_attend is attention_with_kv_cache, and ca_write is reshape_and_cache. `objects` points to the addresses of their
 * arrays as Python objects; where it is 0, or such an address is, given[i] is the array. A call returns CA_UNREAD where
 * an array is of a kind that C does not read. Everything is checked before a byte is written.
 * causal is -1 where the call has no lengths and masks to compare with the plan's. Without a workspace (NULL) ca_attend
 * only checks. */
enum ca_attend_kind {
    CA_ATTEND,
    /* CA_KEY_CACHE is [N, B, D] of a plan for one kv head over NHD, V is the first Dv columns of it, and CA_VALUE_CACHE
     * is not looked at (attention_mla). */
    CA_ATTEND_LATENT,
    CA_UPDATE_AND_ATTEND, /* the arrays are those of ca_update_arrays: keys and values are written first */
};
int ca_attend(const ca_plan *plan, uintptr_t objects, const ca_array *given, int kind, int causal, float scale,
              float softcap, float k_scale, float v_scale, void *workspace, int64_t workspace_bytes, ca_fault *fault);
/* hadamard is that of ca_shape. A token whose slot is negative is not written. */
int ca_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout, int hadamard,
             float k_scale, float v_scale, ca_fault *fault);
/* This is index_and_cache: ca_write of K alone. */
int ca_index_and_cache(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                       int hadamard, float k_scale, float v_scale, ca_fault *fault);
/* This is rotary_reshape_and_cache. */
int ca_rotary_write(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                    int hadamard, float k_scale, float v_scale, int is_neox, float eps, ca_fault *fault);

/* Copies the first T tokens of one request, whose block table is [M], out of the cache to [T, Hkv, D], as they are
 * stored, but integers as float32 times their scales. cpu_attn.ops.gather has accepted the arrays. value is 0 for K and
 * 1 for V, and dtype is that of the tokens that were written. */
enum ca_gather_arrays { CA_GATHERED, CA_GATHER_CACHE, CA_GATHER_BLOCK_TABLE, CA_GATHER_ARRAYS };
int ca_gather(const ca_array *arrays, int value, int isa, int dtype, int kv_dtype, int kv_cache_layout,
              ca_fault *fault);

/* ca_signs[d % CA_SIGNS] is the sign, +1 or -1, that dimension d of a rotated cache is given:
 * kernel/cache_write/hadamard.h. */
enum { CA_SIGNS = 1024 };
extern float ca_signs[1024];

/* These are update_block_bounds and score_blocks. */
int ca_update_block_bounds(uintptr_t objects, const ca_array *given, int64_t block_size, ca_fault *fault);
int ca_score_blocks(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                    int by_query_head, int64_t block_size, ca_fault *fault);

/* This is select_tokens. scale, which is positive, is that of q.k and of the cache together. masks may be NULL. */
int ca_select_tokens(uintptr_t objects, const ca_array *given, const ca_meaning *meaning, int kv_cache_layout,
                     int causal, float scale, const ca_masks *masks, ca_fault *fault);

/* ---- linear attention: native/linear ---- */

/* Says what a plan of linear attention was made for. */
typedef struct ca_linear_shape {
    int32_t num_reqs;
    int32_t num_k_heads, num_v_heads, head_k_dim, head_v_dim; /* all 0: the plan is for convolutions alone */
    int32_t dtype, isa, num_threads;
    int32_t reference; /* whether the engine is the reference */
} ca_linear_shape;

/* These say how a call comes by the logarithms of its decays.
 * CA_GATE_LOG: g holds them. CA_GATE_SOFTPLUS: they are -exp(A_log) softplus(g + dt_bias). CA_GATE_DT: as the one
 * before, with softplus(...) kept within dt_limit, and beta is that, too (Mamba-2). CA_GATE_SIGMOID: they are
 * lower_bound sigmoid(exp(A_log) (g + dt_bias)). CA_GATE_LOGSIGMOID: exp(A_log) log(sigmoid(g + dt_bias)) (GLA). */
enum ca_gate { CA_GATE_LOG, CA_GATE_SOFTPLUS, CA_GATE_DT, CA_GATE_SIGMOID, CA_GATE_LOGSIGMOID };
/* These say which axis of a state is dense: [Dk, Dv] or [Dv, Dk]. */
enum ca_state_layout { CA_STATE_KV, CA_STATE_VK };

/* Holds the options of a call, of cpu_attn/_arguments.py. */
typedef struct ca_linear_how {
    CA_LINEAR_FIELDS
} ca_linear_how;

typedef struct ca_linear_plan ca_linear_plan;
/* Makes a plan, or returns NULL where there is no memory. query_start_loc [R + 1] ascends from 0; first_token [R]: how
 * many tokens a request had before this step; has_initial_state [R]. cpu_attn/_check has accepted all of it. */
ca_linear_plan *ca_linear_plan_new(const ca_linear_shape *shape, const int32_t *query_start_loc,
                                   const int32_t *first_token, const uint8_t *has_initial_state);
void ca_linear_plan_free(ca_linear_plan *plan);
int64_t ca_linear_workspace_bytes(const ca_linear_plan *plan);
int ca_linear_num_threads(const ca_linear_plan *plan);

/* This is linear_attention_with_state_cache; objects and given are those of ca_attend. */
int ca_linear_attend(const ca_linear_plan *plan, uintptr_t objects, const ca_array *given, const ca_linear_how *how,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault);
/* This is causal_conv1d. silu: whether outputs x become x sigmoid(x). channels_last: whether a state is [L, C], in
 * place of [C, L]. */
int ca_causal_conv1d(const ca_linear_plan *plan, uintptr_t objects, const ca_array *given, int silu, int channels_last,
                     void *workspace, int64_t workspace_bytes, ca_fault *fault);

/* Describes a way to multiply that `cpu-attn bench` measures: a file of native/limits/probe. The best come first. */
typedef struct ca_probe_info {
    const char *name, *unit; /* unit: "matrix", "vector" or "scalar" */
    const char *isa, *what;  /* the isa whose products it limits, the instruction; "" where not compiled */
    int32_t dtypes;          /* 1 << ca_dtype for each dtype that it can multiply */
    int32_t supported;
    const char *reason; /* why it cannot run here; "" when it can */
} ca_probe_info;

int ca_probe(int i, ca_probe_info *out); /* 0: there is no such i */

/* Merges attention over num_parts sets of keys to attention over all of them. outs has [T, Hq, Dv] of each set, then
 * where the result goes, all of one dtype, with a dense last axis; lses has float32 [Hq, T] in the same order. _check
 * has accepted them. */
void ca_merge_states(int64_t num_parts, const ca_array *outs, const ca_array *lses);

/* These measure limits on this many threads, and return 0 where they cannot: products from registers for this long, and
 * one pass of reads or of memcpy (bytes copied, counted once) over memory of this size. */
double ca_probe_gflops(int probe, int threads, double seconds);
double ca_probe_read_gbps(const void *data, int64_t bytes, int threads);
double ca_probe_copy_gbps(void *dst, const void *src, int64_t bytes, int threads);
/* cffi: end */
#endif
