/* SPDX-License-Identifier: Apache-2.0
 * oneDNN is C++ behind a C interface that lets exceptions through: std::bad_alloc where memory ends. */
#ifndef CPU_ATTN_ONEDNN_GUARD_H
#define CPU_ATTN_ONEDNN_GUARD_H

/* run(with). Returns 0, or 1 where a C++ exception came out of it, at which `run` stopped like a function that returns
 * there. */
int ca_guarded(void (*run)(void *), void *with);

/* From here on the library that has this address throws std::bad_alloc where malloc or posix_memalign has no memory for
 * it. */
void ca_guard_memory_of(const void *address);
#endif
