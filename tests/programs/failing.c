/* SPDX-License-Identifier: Apache-2.0
 * Preloaded, the allocator of the process, which fails when it is told to: tests/programs/memory_ends.py. */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* glibc's own, under these names for whoever takes the others. */
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

enum mode { NEVER, IN_A_ROW, AT_RANDOM };
static atomic_int mode;
static atomic_llong asked, failed, first, end;
static atomic_uint per_mille;
static atomic_ullong state;

static void begin(enum mode m) {
    asked = failed = 0;
    mode = m;
}

/* Allocation number n from here on fails, and so many in all. */
void failing_in_a_row(long long n, long long count) {
    first = n;
    end = n + count;
    begin(IN_A_ROW);
}

/* It alone. */
void failing_at(long long n) { failing_in_a_row(n, 1); }

/* It and all that follow. */
void failing_from(long long n) { failing_in_a_row(n, LLONG_MAX - n); }

/* Each fails with this probability. */
void failing_at_random(unsigned p, unsigned long long seed) {
    per_mille = p;
    state = seed * 0x9e3779b97f4a7c15u + 1;
    begin(AT_RANDOM);
}

/* None does any more. How many did? */
long long failing_end(void) {
    mode = NEVER;
    return failed;
}

/* And how many were asked for? */
long long failing_asked(void) { return asked; }

static int fails(void) {
    const int now = mode;
    if (now == NEVER)
        return 0;
    const long long n = asked++;
    uint64_t x = state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    state = x;
    if (now == IN_A_ROW ? n < first || n >= end : (x >> 20) % 1000 >= per_mille)
        return 0;
    failed++;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return fails() ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *memory, size_t size) { return fails() ? NULL : __libc_realloc(memory, size); }
void *aligned_alloc(size_t alignment, size_t size) { return fails() ? NULL : __libc_memalign(alignment, size); }
void *memalign(size_t alignment, size_t size) { return fails() ? NULL : __libc_memalign(alignment, size); }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    void *found = fails() ? NULL : __libc_memalign(alignment, size);
    if (!found)
        return ENOMEM;
    *memory = found;
    return 0;
}
