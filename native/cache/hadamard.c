/* SPDX-License-Identifier: Apache-2.0
 * The signs of kernel/cache_write/hadamard.h. */
#include "layout.h"

_Alignas(64) float ca_signs[CA_SIGNS]; /* written once, when the library loads */

/* The top bit of a hash that lets every bit of d reach it. */
__attribute__((constructor)) static void fill(void) {
    for (uint32_t d = 0; d < CA_SIGNS; d++) {
        uint32_t h = (d + 1) * 0x9e3779b1u;
        h = (h ^ h >> 15) * 0x85ebca77u;
        h = (h ^ h >> 13) * 0xc2b2ae3du;
        ca_signs[d] = h >> 31 ? -1.0f : 1.0f;
    }
}
