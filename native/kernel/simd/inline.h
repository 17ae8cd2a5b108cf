/* SPDX-License-Identifier: Apache-2.0
 * Register tiles exist only where the compiler inlines and unrolls, so both are asked for by name. What is rare is kept
 * out of them, by name, too. */
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

/* Asks for the cache lines of so many bytes, into L2. */
INLINE void prefetch_bytes(const void *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}
#endif
