/* SPDX-License-Identifier: Apache-2.0
 * How many threads a call may take, and how many are worth waking. */
#ifndef CPU_ATTN_THREADS_H
#define CPU_ATTN_THREADS_H
#include <stdint.h>

/* Threads that are worth waking for what takes one thread so long. */
int64_t ca_threads_for(double nanoseconds);
/* So many, or 1 in a child of fork(): a team of libgomp would wait there for threads that are gone. */
int ca_team(int wanted);
#endif
