/* SPDX-License-Identifier: Apache-2.0
 * What operating systems tell and give in ways of their own: everything in the core that is not C11 or OpenMP,
 * but for NUMA nodes (nodes.c). */
#ifndef CPU_ATTN_SYSTEM_H
#define CPU_ATTN_SYSTEM_H
#include "cpu_attn.h"
#include <stddef.h>

/* Fills in the features of an aarch64 CPU as Linux numbers them in AT_HWCAP and AT_HWCAP2. */
void ca_system_hwcaps(unsigned long hwcaps[2]);
/* Fills in l1d, l2, l3 and cpus, as far as the system tells. */
void ca_system_describe(ca_cpu_info *out);
/* Asks for the state of AMX tiles. Returns NULL where this process has it now, else why not. */
const char *ca_system_refuses_tiles(void);
/* Returns memory that begins at a cache line, or NULL. Only ca_aligned_free frees it. */
void *ca_aligned_alloc(int64_t bytes);
void ca_aligned_free(void *memory);
#endif
