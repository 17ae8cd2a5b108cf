/* SPDX-License-Identifier: Apache-2.0
 * What an isa file says about its kernels, once a file. It has defined its vocabulary (simd/vocabulary.md) and
 *   MR        query rows of a register tile
 *   TALL      MR, or more: a task of so few rows is one tile
 *   NG        groups of 16 keys that go through the products together
 *   NDV       vectors of V's columns that do, at most
 *   ROWS      query rows of a task
 *   KEYS      keys of a score block
 *   FEW_KEYS  the same where a task has up to CA_FEW_ROWS rows (decode)
 * and may define
 *   TILE_GROUPS(mr)      groups of a register tile of mr rows, a divisor of NG: the fewer rows, the more groups,
 *                        until FMA has enough sums that do not wait for one another
 *   TILE_VECTORS(mr)     vectors of V's columns of such a tile
 *   BLOCK_KEYS           keys whose groups are listed at once, KEYS or more
 *   NHD_KEYS, NHD_BYTES  the same as FEW_KEYS over NHD caches (kernel.h)
 *   TILE_ROWS            rows of a tile where a task has more than TALL; MR unless told
 *   SOFTMAX_ROWS         rows whose logits become weights together: maxima, exponentials and sums of a row wait for one
 *                        another
 *   SUM_GROUPS           groups whose P V has a sum of its own in float32: of V that is one number all products are
 *                        alike and rounded to the same side, and one sum over 1024 keys takes 4 times the error
 *                        budget, sums over 64 take 0.4
 *   PREFETCH, HALF_PAGES what prefetch.h says
 *   INTEGERS             address of an int: does this machine multiply int8 to int4 caches of 16-bit dtypes as
 *                        integers.h does? INTEGERS_BY: the instruction that does
 * Tested: MR 2 to 8, NG 1, 3 and 4, NDV 2, 3, 4 and 8, VL 1, 4, 8 and 16. */
#ifndef CPU_ATTN_PARAMETERS_H
#define CPU_ATTN_PARAMETERS_H
#include "kernel/kernel.h"
#include "kernel/simd/math.h"
#include "plan/keys.h"

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)
#define NAME(x) GLUE(x, DTYPE) /* of a .inc: x of this dtype */

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
#define MAX_GROUPS (BLOCK_KEYS / CA_LANES) /* of a block */
#define NV (NG * CA_LANES / VL)            /* vectors of logits of a register tile */
#define S_STRIDE (KEYS + 16) /* from row to row of logits: no power of two, so that rows share no cache sets */
/* Dimensions of q k that one sum takes: one over 576 dimensions took 0.93 of float32's error budget (the worst of 1200
 * random requests). */
#define QK_DIMS 128

_Static_assert(MR <= TALL && TILE_ROWS <= TALL && TALL <= 12, "FOR_ROWS has cases for up to 12 rows");
_Static_assert(CA_LANES % VL == 0 && KEYS % CA_LANES == 0 && FEW_KEYS <= KEYS && NHD_KEYS <= KEYS, "groups are whole");

/* The rows of a register tile, up to TALL or, of a wide one, up to MR, as a constant M, so that loops over them unroll.
 */
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
