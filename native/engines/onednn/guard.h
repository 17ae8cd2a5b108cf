/* SPDX-License-Identifier: Apache-2.0
 * oneDNN is C++ behind a C interface that lets exceptions through: std::bad_alloc where memory ends. */
#ifndef CPU_ATTN_ONEDNN_GUARD_H
#define CPU_ATTN_ONEDNN_GUARD_H
#include <stdint.h>

/* Calls run(with). Returns 0, or 1 where a C++ exception came out of it, at which `run` stopped like a function that
 * returns there. */
int ca_guarded(void (*run)(void *), void *with);

/* From here on, libdnnl and its OpenMP, which are the libraries that have these addresses (0 names none), and C++'s
 * operator new get memory of the reserve where the allocator has none. Where the reserve ends, too, std::bad_alloc is
 * thrown. */
void ca_guard_memory_of(uintptr_t dnnl, uintptr_t openmp);
#endif
