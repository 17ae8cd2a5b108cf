/* SPDX-License-Identifier: Apache-2.0
 * What check.c defines instructions by, and the numbers that it tries. */
#ifdef EMULATED
#include "kernel/emulation/bf16.h"
#include "kernel/amx/tiles.h"
#else
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef union lanes {
    _Alignas(64) uint8_t u8[64];
    int8_t i8[64];
    uint16_t u16[32];
    int16_t i16[32];
    uint32_t u32[16];
    int32_t i32[16];
    uint64_t u64[8];
    int64_t i64[8];
    float f32[16];
} lanes;
typedef struct in {
    lanes a, b, c;
    uint64_t k;
} in;
#define K16 ((__mmask16)X->k)
#define K32 ((__mmask32)X->k)
#define GIVES_QUARTER(x) _mm_storeu_si128((void *)R, x)

static char *edge; /* the end of a page; the next one may not be touched */
static void make_edge(void) {
    const long page = sysconf(_SC_PAGESIZE);
    char *two = mmap(NULL, (size_t)(2 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(two + page, (size_t)page, PROT_NONE);
    edge = two + page;
}

/* ---- definitions ---- */

static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static int64_t within(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

/* Ties to even, without the machine's rounding: a double holds x and twice its fraction. */
static double nearest(double x) {
    const double below = floor(x), off = x - below;
    if (!isfinite(x) || off == 0)
        return x;
    const double r = off < 0.5 || (off == 0.5 && fmod(below, 2) == 0) ? below : below + 1;
    return copysign(r, x);
}
static int32_t to_int(float x) {
    const double r = nearest(x);
    return r >= -0x1p31 && r < 0x1p31 ? (int32_t)r : INT32_MIN;
}

static float of_half(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float sign = h >> 15 ? -1 : 1;
    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    return sign * (float)(exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}
static uint16_t to_half(float x) {
    const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000;
    if (isnan(x))
        return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (isinf(x))
        return (uint16_t)(sign | 0x7c00);
    const int exponent = x == 0 || ilogb(x) < -14 ? -14 : ilogb(x);
    const double r = nearest(ldexp(fabs(x), 10 - exponent)) + 1024 * (exponent + 14);
    return (uint16_t)(sign | (r < 0x7c00 ? (uint32_t)r : 0x7c00));
}

/* Where subnormals count as 0. */
static float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
/* a b + c so, a and b of 8 bits. Less than 2^-126 is what is so after rounding to 24 bits with any exponent. */
static inline float fused(float a, float b, float c) {
    const float r = fmaf(flush(a), flush(b), flush(c));
    const double exact = (double)flush(a) * flush(b) + flush(c);
    return fabs(exact) < 0x1p-126 - 0x1p-151 ? copysignf(0, r) : r;
}
static inline float of_bf16(uint32_t low) { return as_float(low << 16); }
static inline uint16_t to_bf16(float x) {
    const uint32_t bits = as_bits(flush(x)), upper = bits >> 16, rest = bits & 0xffff;
    if (isnan(x))
        return (uint16_t)(upper | 0x40);
    return (uint16_t)(upper + (rest > 0x8000 || (rest == 0x8000 && upper & 1)));
}

/* VRCP14PS: cores differ in the bits, within 2^-14 of the quotient. */
static int reciprocal(float x, float r) {
    if (isnan(x))
        return isnan(r);
    if (x == 0)
        return r == copysignf(INFINITY, x);
    if (isinf(x))
        return as_bits(r) == as_bits(copysignf(0, x));
    return fabsf(x) < 0x1p-126f || fabsf(x) > 0x1p126f || fabs((double)x * r - 1) <= 0x1p-14;
}

/* ---- numbers ---- */

static uint64_t state;
static void seed(int n) { state = 0x9e3779b97f4a7c15 + (uint64_t)n; }
static uint32_t random_32(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (uint32_t)(z >> 32);
}
/* Random bits; special floats; small whole numbers, halves and their neighbours; floats near 1, of bf16's and of
 * binary16's ties, in the range of binary16; integers near what 16 bits hold. */
static uint32_t number(void) {
    static const uint32_t special[] = {
        0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0xffbfffff,
        1,          0x80000001, 0x007fffff, 0x807fffff, 0x00800000, 0x80800000, 0x7f7fffff, 0xff7fffff,
        0x3f800000, 0xbf800000, 0x3f7fffff, 0xbf800001, 0x3f000000, 0xbf000000, 0x477fe000, 0x477fefff,
        0x477ff000, 0x38800000, 0x387fffff, 0x33800000, 0x33000000, 0x33000001, 0xb3000000, 0x4f000000,
        0xcf000000, 0x4effffff, 0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0xc2fe0000, 0x43160000,
        0x7f7f8000, 0x7f7f7fff, 0x80008000, 0x7fff7fff, 0x00ff00ff, 0x80ff7f01, 0x0000ffff, 0xffff0000,
    };
    const uint32_t how = random_32(), bits = random_32();
    switch (how % 8) {
    case 0:
    case 1:
        return special[bits % (sizeof special / sizeof *special)];
    case 2:
        return as_bits((float)((int32_t)(bits % 2001) - 1000) / 2) + (how >> 8) % 3 - 1;
    case 3:
        return (0x3f800000 ^ (bits & 0x80ffffff)) & ((how & 256) ? 0xffffffff : 0xffff8000);
    case 4:
        return 0x38000000 + bits % 0x10000000;
    case 5:
        return (bits & 0x83ffffff) | (how & 256 ? 0x40000000 : 0x3c000000);
    case 6:
        return (uint32_t)((int32_t)bits >> (how >> 8) % 32);
    default:
        return bits;
    }
}
