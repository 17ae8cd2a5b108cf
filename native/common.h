/* SPDX-License-Identifier: Apache-2.0
 * This file has what every part of native/ needs: arithmetic of sizes, and the names of keys and values. */
#ifndef CPU_ATTN_COMMON_H
#define CPU_ATTN_COMMON_H
#include <stdint.h>

/* These index arrays that hold one thing for keys and one for values, such as kv[K] and kv[V]; `kv` alone is one of the
 * two. */
enum { K, V };

static inline int64_t ca_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ca_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ca_div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t ca_round_up(int64_t a, int64_t b) { return ca_div_up(a, b) * b; }
#endif
