/* SPDX-License-Identifier: Apache-2.0
 * These functions say how many threads a call may take, and how many are worth waking. */
#ifndef CPU_ATTN_THREADS_H
#define CPU_ATTN_THREADS_H
#include <stdint.h>

/* Returns how many threads are worth waking for what takes one thread so long. */
int64_t ca_threads_for(double nanoseconds);
/* Returns `wanted`, or 1 in a child of fork(), where a team of libgomp would wait for threads that are gone. */
int ca_team(int wanted);

/* Returns how much stack a thread of a team has, if it is less than CA_STACK_BYTES, else 0. OMP_STACKSIZE or the
 * system's limit says how much it is; kernels and oneDNN worked with 32 KiB and crashed with 24 (avx512, avx2, scalar,
 * gcc 12). */
#define CA_STACK_BYTES (64 << 10)
int64_t ca_small_stack(int team);
#endif
