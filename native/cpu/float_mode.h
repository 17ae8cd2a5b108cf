/* SPDX-License-Identifier: Apache-2.0
 * These functions read and set how this thread's unit for floating point rounds, and what it does with subnormal
 * numbers: MXCSR of x86-64, FPCR of aarch64.
 *
 * An operation that takes or gives a subnormal number costs 100 cycles or more, and decayed states and weights of far
 * keys are such numbers. So calls compute in CA_COMPUTING, where they are 0. It also rounds to nearest and traps
 * nothing, whatever the caller's mode is. */
#ifndef CPU_ATTN_FLOAT_MODE_H
#define CPU_ATTN_FLOAT_MODE_H
#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
/* Flush to zero (bit 15) is of results, denormals are zeros (bit 6) of operands; bits 7 to 12 mask the exceptions
 * (Intel SDM 1, 10.2.3). */
#define CA_COMPUTING 0x9fc0u
static inline uint64_t ca_get_mode(void) { return _mm_getcsr(); }
static inline void ca_set_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__)
/* FZ (bit 24) is of operands and results in float32 and float64. binary16 has a bit of its own, which stays 0. */
#define CA_COMPUTING (UINT64_C(1) << 24)
static inline uint64_t ca_get_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void ca_set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else /* an architecture whose mode is unknown here keeps the caller's */
#define CA_COMPUTING 0u
static inline uint64_t ca_get_mode(void) { return 0; }
static inline void ca_set_mode(uint64_t mode) { (void)mode; }
#endif
#endif
