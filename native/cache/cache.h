/* SPDX-License-Identifier: Apache-2.0
 * This is how a call writes tokens to a cache once its arguments have been checked. */
#ifndef CPU_ATTN_CACHE_H
#define CPU_ATTN_CACHE_H
#include "check/check.h"

/* Holds what a write takes. `fit` says isa, layout and what the caches hold; caches are that of K and, next to it, that
 * of V. value is NULL where there is neither V nor a cache of V; feedback is absent where errors are not fed back. */
typedef struct ca_written {
    const ca_fit *fit;
    const ca_array *caches, *key, *value, *slot_mapping, *feedback;
    int hadamard; /* that of ca_shape */
    float scale[2];
} ca_written;

/* Checks the slots, then writes the rows. */
int ca_write_rows(const ca_written *w, ca_fault *fault);
#endif
