/* SPDX-License-Identifier: Apache-2.0
 * These functions say how many threads a call may take and how many are worth waking, and run them. */
#ifndef CPU_ATTN_THREADS_H
#define CPU_ATTN_THREADS_H
#include <stdint.h>

/* Returns how many threads are worth waking for what takes one thread so long. */
int64_t ca_threads_for(double nanoseconds);
/* Returns `wanted`, or 1 in a child of fork(), where a team of libgomp would wait for threads that are gone. */
int ca_team(int wanted);

/* Calls fn(work, thread, team) in each thread of a team, where `thread` is its number from 0 on and `team` how many
 * there are: as many as `threads` says, or fewer where OpenMP gives fewer. One thread is the caller's own, without
 * OpenMP: libgomp takes memory even for a team of one, and ends the process where there is none. fn runs in the mode of
 * cpu/float_mode.h, and each thread has its own mode back behind it. */
typedef void ca_team_fn(void *work, int thread, int team);
void ca_run_team(int threads, ca_team_fn *fn, void *work);
/* Waits until all threads of the team are here. */
void ca_wait_for_team(int team);

/* Returns how much stack a thread of a team has, if it is less than CA_STACK_BYTES, else 0. OMP_STACKSIZE or the
 * system's limit says how much it is; kernels and oneDNN worked with 32 KiB and crashed with 24 (avx512, avx2, scalar,
 * gcc 12). */
#define CA_STACK_BYTES (64 << 10)
int64_t ca_small_stack(int team);
#endif
