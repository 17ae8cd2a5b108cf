/* SPDX-License-Identifier: Apache-2.0
 * An isa file includes this file once, after it has defined its vocabulary (simd/vocabulary.md) and these parameters:
 *
 *   MR        is the number of query rows of a full register tile, at least 1 and at most TALL.
 *   TALL      is the largest number of query rows that still make one tile; such a tile takes fewer groups and columns
 *             at a time (TILE_GROUPS, TILE_VECTORS). It is at most 12, up to which FOR_ROWS has cases.
 *   NG        is the number of groups of 16 keys that go through the product of queries and keys together.
 *   NDV       is the largest number of vectors of V's columns that go through the other product together.
 *   ROWS      is the largest number of query rows of a task.
 *   KEYS      is the number of keys of a score block, a multiple of 16.
 *   FEW_KEYS  takes the place of KEYS where a task has at most CA_FEW_ROWS rows, as in decode. It is at most KEYS.
 *
 * These parameters are optional:
 *
 *   TILE_GROUPS(mr)   is how many groups a register tile of mr rows takes, a divisor of NG. Tiles of fewer rows need
 *                     more groups, until there are enough sums that do not wait for one another.
 *   TILE_VECTORS(mr)  is how many vectors of V's columns such a tile takes. It is defined if TILE_GROUPS is.
 *   BLOCK_KEYS        is how many keys are listed as groups at once, at least KEYS and by default KEYS.
 *   NHD_KEYS          takes the place of FEW_KEYS over NHD caches. It is at most KEYS, by default FEW_KEYS.
 *   NHD_BYTES         limits the bytes of K and V in a score block of all heads there (kernel.h), by default 256 KiB.
 *   TILE_ROWS         is the number of rows of a tile where a task has more than TALL rows. It is at most TALL, by
 *                     default MR.
 *   SOFTMAX_ROWS      is how many rows of logits become weights together, since the maximum, the exponentials and the
 *                     sum of a single row wait for one another. It is at most 12, by default 4.
 *   SUM_GROUPS        is how many groups share one float32 sum of P V, by default 4. If V is one number, all products
 *                     are alike and rounded to the same side: one sum over 1024 keys then takes 4 times the error
 *                     budget, sums over 64 keys take 0.4.
 *   PREFETCH          says how far ahead lines are prefetched, by default {2, 2, 3, 0} (prefetch.h).
 *   HALF_PAGES        is not 0 if only the first halves of pages are to be prefetched, by default 0 (prefetch.h).
 *   INTEGERS          is the address of an int which says whether this machine multiplies int8 to int4 caches of
 *                     16-bit dtypes as integers.h does. Without it none are.
 *   INTEGERS_BY       is a string that names the instruction for that. It is defined if INTEGERS is.
 *
 * These values are tested: MR 2 and 6; TALL 2, 6, 8 and 12; NG 1 and 4; NDV 4 and 8; VL 1, 4, 8 and 16. */
#ifndef CPU_ATTN_PARAMETERS_H
#define CPU_ATTN_PARAMETERS_H
#include "kernel/kernel.h"
#include "kernel/simd/math.h"
#include "plan/keys.h"

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)
#define NAME(x) GLUE(x, DTYPE) /* what a .inc calls x has the dtype in its name */

#ifndef BLOCK_KEYS
#define BLOCK_KEYS KEYS
#endif
#ifndef NHD_KEYS
#define NHD_KEYS FEW_KEYS
#endif
#ifndef NHD_BYTES
#define NHD_BYTES (256 << 10)
#endif
#ifndef TILE_GROUPS
#define TILE_GROUPS(mr) ((mr) <= MR ? NG : NG / 2)
#define TILE_VECTORS(mr) ((mr) <= MR ? NDV : NDV / 2)
#endif
#ifndef TILE_ROWS
#define TILE_ROWS MR
#endif
#ifndef SUM_GROUPS
#define SUM_GROUPS 4
#endif
#ifndef SOFTMAX_ROWS
#define SOFTMAX_ROWS 4
#endif
#define MAX_GROUPS (BLOCK_KEYS / CA_LANES) /* groups that are listed at once */
#define NV (NG * CA_LANES / VL)            /* vectors of logits of a register tile */
#define S_STRIDE (KEYS + 16) /* from row to row of logits: no power of two, lest rows share sets of the cache */
/* One sum of q k takes so many dimensions: a sum over 576 took 0.93 of float32's error budget in the worst of 1200
 * random requests. */
#define QK_DIMS 128

_Static_assert(MR <= TALL && TILE_ROWS <= TALL && TALL <= 12, "FOR_ROWS has cases for up to 12 rows");
_Static_assert(CA_LANES % VL == 0 && KEYS % CA_LANES == 0 && FEW_KEYS <= KEYS && NHD_KEYS <= KEYS, "groups are whole");

/* FOR_ROWS makes mr, in 1..TALL, a constant M, so that loops over the rows of a register tile unroll. FOR_SOFTMAX_ROWS
 * does so up to SOFTMAX_ROWS, and FOR_WIDE_ROWS up to MR. */
#define ROW_CASE(n, call)                                                                                              \
    case n: {                                                                                                          \
        enum { M = n };                                                                                                \
        call;                                                                                                          \
        break;                                                                                                         \
    }
#define CASES_1(call) ROW_CASE(1, call)
#define CASES_2(call) CASES_1(call) ROW_CASE(2, call)
#define CASES_3(call) CASES_2(call) ROW_CASE(3, call)
#define CASES_4(call) CASES_3(call) ROW_CASE(4, call)
#define CASES_5(call) CASES_4(call) ROW_CASE(5, call)
#define CASES_6(call) CASES_5(call) ROW_CASE(6, call)
#define CASES_7(call) CASES_6(call) ROW_CASE(7, call)
#define CASES_8(call) CASES_7(call) ROW_CASE(8, call)
#define CASES_9(call) CASES_8(call) ROW_CASE(9, call)
#define CASES_10(call) CASES_9(call) ROW_CASE(10, call)
#define CASES_11(call) CASES_10(call) ROW_CASE(11, call)
#define CASES_12(call) CASES_11(call) ROW_CASE(12, call)
#define CASES_UP_TO(n) GLUE(CASES, n)
#define FOR_ROWS(mr, call)                                                                                             \
    switch (mr) { CASES_UP_TO(TALL)(call) }
#define FOR_SOFTMAX_ROWS(n, call)                                                                                      \
    switch (n) { CASES_UP_TO(SOFTMAX_ROWS)(call) }
#define FOR_WIDE_ROWS(mr, call)                                                                                        \
    switch (mr) { CASES_UP_TO(MR)(call) }
#endif
