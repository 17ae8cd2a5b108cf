/* SPDX-License-Identifier: Apache-2.0
 * oneDNN does not survive that it has no memory in the middle of something: a constructor that an exception ends frees
 * twice (v3.2, softmax's kernel), and the promise of a primitive breaks with a message for which there is no memory
 * either. So more blocks than a primitive takes are set aside, and are handed out where an allocation fails. They are
 * the allocator's own, so that whoever frees one need not know. A call that finds some missing fills up the reserve
 * first, and where that fails there is no memory for the call. Several threads that make primitives at once share the
 * reserve. */
#include "reserve.h"
#include <stdatomic.h>
#include <stdlib.h>

#define MOST 2048
/* These are 1.6 MB. The most that one primitive took, the first run of its own threads included, was 631, 28, 4, 1, 3
 * and 0 of them (v3.2, float32, float16 and bfloat16, AVX-512). */
static struct {
    const size_t size;
    const int count;
    _Atomic(void *) blocks[MOST];
} kinds[] = {{64, MOST, {0}}, {256, 256, {0}}, {1024, 32, {0}}, {4096, 16, {0}}, {16384, 16, {0}}, {65536, 16, {0}}};
#define KINDS ((int)(sizeof kinds / sizeof *kinds))
static atomic_int taken = 1; /* whether some were taken since the reserve was filled; at first it is empty */

int ca_reserve_fill(void) {
    if (!atomic_load_explicit(&taken, memory_order_relaxed))
        return 0;
    atomic_store(&taken, 0);
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < kinds[k].count; i++) {
            void *block = NULL, *none = NULL;
            if (atomic_load_explicit(&kinds[k].blocks[i], memory_order_relaxed))
                continue;
            if (posix_memalign(&block, 64, kinds[k].size)) {
                atomic_store(&taken, 1);
                return 1;
            }
            if (!atomic_compare_exchange_strong(&kinds[k].blocks[i], &none, block))
                free(block);
        }
    return 0;
}

void *ca_reserve_take(size_t size) {
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; size <= kinds[k].size && i < kinds[k].count; i++)
            if (atomic_load_explicit(&kinds[k].blocks[i], memory_order_relaxed)) {
                void *block = atomic_exchange(&kinds[k].blocks[i], NULL);
                if (block) {
                    atomic_store(&taken, 1);
                    return block;
                }
            }
    return NULL;
}
