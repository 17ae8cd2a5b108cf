/* SPDX-License-Identifier: Apache-2.0
 * Memory is set aside for oneDNN: for what it asks for in vain while it makes or runs a primitive. */
#ifndef CPU_ATTN_ONEDNN_RESERVE_H
#define CPU_ATTN_ONEDNN_RESERVE_H
#include <stddef.h>

/* This has to be called before a primitive is made or run. Returns 0 where all of the reserve is there. */
int ca_reserve_fill(void);
/* Returns a block for so many bytes, 64-aligned, which is freed like any other, or NULL where there is none. */
void *ca_reserve_take(size_t size);
#endif
