/* SPDX-License-Identifier: Apache-2.0
 * This file says how one side of a cache, K or V, lies, and what its bytes take to become operands. That is decided
 * once, where a plan is made or a write begins (ca_side_of). What comes after asks a side, never a format. */
#ifndef CPU_ATTN_SIDE_H
#define CPU_ATTN_SIDE_H
#include "layout.h"

typedef struct ca_kernel ca_kernel;

typedef struct ca_side {
    int kv;             /* K or V */
    int dtype;          /* what the cache holds */
    int layout;         /* enum ca_layout: where an element lies in a group, or that there are rows */
    int plain;          /* Do tokens lie as rows (NHD, HND)? */
    int quantised;      /* Are elements fp8 or integers? */
    int packed;         /* Have elements fewer than 8 bits? */
    int nibbles;        /* Have they 4? */
    int scaled;         /* Has a token scales of its own? */
    int one_scale;      /* Has it one? */
    int several_scales; /* May it have more? */
    int64_t shared;     /* elements of a token that share a scale; all of them where it has one, or none */
    int64_t scales;     /* of a token */
    int64_t head_size;
    int64_t size, row_bytes; /* bytes of an element, 1 where it has fewer than 8 bits, and of a token */
    /* A group is 16 tokens in the kernel's layout, rounded up to what elements are packed by. A block of a cache with
     * scales holds whole groups, and behind all of them [groups][scales][16] bfloat16. */
    int64_t elements, group_bytes;
    /* These say what attention by the kernel does. */
    int ready;              /* The products read elements as they lie. */
    int integers;           /* They multiply bytes and nibbles as integers (kernel/kv_formats/integers.h). */
    int64_t unpacked_bytes; /* of a group that becomes elements of the query's dtype; 0: none ever does */
    int64_t staged_bytes;   /* of a group of packed elements of which each becomes a byte, else 0 */
    int64_t int8_bytes;     /* the same of 5 or 6 bits, whose bytes of int8 the products read, else 0 */
} ca_side;

/* Says how K or V of kv_dtype lies for a kernel, whose queries or new rows have `dtype`. */
ca_side ca_side_of(const ca_kernel *kernel, int dtype, int kv, int kv_dtype, int64_t head_size, int kv_cache_layout);

/* Do the products read the cache? */
static inline int ca_in_place(const ca_side *s) { return s->ready || s->integers; }
/* Returns where element d of a token lies in its group, or in a plain cache whose rows are ld apart in its block. */
static inline int64_t ca_offset(const ca_side *s, int64_t token, int64_t d, int64_t ld) {
    return s->kv ? ca_v_offset(s->layout, token, d, ld) : ca_k_offset(s->layout, token, d, ld);
}
/* Returns where the scales of a group lie in its block, in bytes. */
static inline int64_t ca_scales_at(const ca_side *s, int64_t block_size, int64_t group) {
    return ca_div_up(block_size, CA_LANES) * s->group_bytes + group * s->scales * CA_LANES * 2;
}
/* Returns the elements of a packed block, or the bytes where tokens have scales. */
static inline int64_t ca_block_size_of(const ca_side *s, int64_t block_size) {
    const int64_t groups = ca_div_up(block_size, CA_LANES);
    if (s->scaled)
        return ca_scales_at(s, block_size, groups);
    if (s->kv == K)
        return groups * s->elements;
    return ca_round_up(block_size, s->layout == CA_LAYOUT_PAIRS ? 2 : 1) * s->head_size;
}
/* Returns where a block of one kv head lies. */
static inline char *ca_block_at(const ca_side *s, const ca_kv *at, int64_t block, int64_t kv_head) {
    return (char *)at->cache + (block * at->stride_n + kv_head * at->stride_h) * s->size;
}
/* Returns the at-th element of memory of a dtype, of a group of packed elements, too, without its scale. */
float ca_number_at(const void *data, int dtype, int64_t at);
/* Returns element d of a token of a block, multiplied by its scale where it has one. ld: ca_kv's. */
float ca_read_element(const ca_side *s, const char *block, int64_t block_size, int64_t ld, int64_t token, int64_t d);
#endif
