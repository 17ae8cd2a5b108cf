/* SPDX-License-Identifier: Apache-2.0
 * The tile operations that amx/attention.h uses are AMX's, or, with EMULATED, those of emulation/tiles.h. t, a and b
 * are numbers, written out, since they become part of an instruction's name. */
#ifndef CPU_ATTN_TILES_H
#define CPU_ATTN_TILES_H
#include "kernel/simd/inline.h"
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct tile_config { /* as LDTILECFG reads it (Intel SDM) */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

#ifdef EMULATED
#include "kernel/emulation/tiles.h"
#define tile_barrier() ((void)0)
#else
#define TILE_METHOD "TDPBF16PS, 16 x 16 x 32"

/* gcc 12 does not know that LDTILECFG reads more than 8 bytes, nor that TILELOADD reads any: the barrier makes it write
 * to memory what they are to read. */
#define tile_barrier() __asm__ volatile("" : : : "memory")

INLINE void tile_configure(const tile_config *c) {
    __asm__ volatile("" : : "r"(c) : "memory");
    _tile_loadconfig(c);
}
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, p, stride)                                                                                        \
    do {                                                                                                               \
        tile_barrier();                                                                                                \
        _tile_loadd(t, p, stride);                                                                                     \
    } while (0)
#define tile_stream(t, p, stride)                                                                                      \
    do {                                                                                                               \
        tile_barrier();                                                                                                \
        _tile_stream_loadd(t, p, stride);                                                                              \
    } while (0)
#define tile_store(t, p, stride) _tile_stored(t, p, stride)
#define tile_dot(t, a, b) _tile_dpbf16ps(t, a, b)
#define tile_dot_bytes(t, a, b) _tile_dpbssd(t, a, b)
#endif
#endif
