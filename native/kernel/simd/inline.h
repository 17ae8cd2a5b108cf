/* SPDX-License-Identifier: Apache-2.0
 * INLINE and EACH demand inlining and unrolling, without which arrays of vectors would not stay in registers. NOINLINE
 * keeps rare code out of such functions. */
#ifndef CPU_ATTN_INLINE_H
#define CPU_ATTN_INLINE_H
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define NOINLINE __attribute__((noinline))
#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define EACH(i, n) PRAGMA(clang loop unroll(full)) for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) PRAGMA(GCC unroll 16) for (int i = 0; i < (n); i++)
#endif

/* Prefetches the cache lines of so many bytes into L2. */
INLINE void prefetch_bytes(const void *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}
#endif
