/* SPDX-License-Identifier: Apache-2.0
 * Memory set aside for oneDNN: what it asks for in vain while it makes or runs a primitive. */
#ifndef CPU_ATTN_ONEDNN_RESERVE_H
#define CPU_ATTN_ONEDNN_RESERVE_H
#include <stddef.h>

/* Before a primitive is made or run. 0: all of it is there. */
int ca_reserve_fill(void);
/* A block for so many bytes, 64-aligned, to be freed like any other; NULL: there is none. */
void *ca_reserve_take(size_t size);
#endif
