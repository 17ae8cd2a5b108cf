/* SPDX-License-Identifier: Apache-2.0
 * How many threads a call may take, and how many are worth waking. */
#ifndef CPU_ATTN_THREADS_H
#define CPU_ATTN_THREADS_H
#include <stdint.h>

/* Threads that are worth waking for what takes one thread so long. */
int64_t ca_threads_for(double nanoseconds);
/* So many, or 1 in a child of fork(): a team of libgomp would wait there for threads that are gone. */
int ca_team(int wanted);

/* Has a thread of a team less stack than CA_STACK_BYTES? Then how much, else 0. OMP_STACKSIZE or the system's limit
 * says how much it has; kernels and oneDNN worked with 32 KiB and crashed with 24 (avx512, avx2, scalar, gcc 12). */
#define CA_STACK_BYTES (64 << 10)
int64_t ca_small_stack(int team);
#endif
