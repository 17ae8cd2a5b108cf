/* SPDX-License-Identifier: Apache-2.0
 * arch:  any
 * unit:  scalar
 * rank:  0
 * flags:
 *
 * This isa is plain C of one lane, for any machine. The compiler decides which instructions it becomes. */
#include "cpu/cpu.h"
#include "cache/half.h"
#include "cache/layout.h"

#define ISA scalar
#define METHOD "plain C"
#define VL 1
#define MR 2
#define TALL 2
#define NG 1
#define NDV 4
#define ROWS 32
#define KEYS 256
#define FEW_KEYS 128
#include "kernel/simd/inline.h"
#include <math.h>

static const char *missing(void) { return NULL; }

typedef float vf;

INLINE vf v_set1(float x) { return x; }
INLINE float v_first(vf x) { return x; }
INLINE vf v_iota(void) { return 0; }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_div(vf a, vf b) { return a / b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_max(vf a, vf b) { return a > b ? a : b; }
INLINE vf v_min(vf a, vf b) { return a < b ? a : b; }
INLINE vf v_abs(vf x) { return fabsf(x); }
INLINE vf v_copysign(vf x, vf sign) { return copysignf(x, sign); }
/* Adding 1.5 * 2^23 leaves no bits below the ones. */
INLINE vf v_round(vf x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE vf v_scale(vf x, vf n) {
    uint32_t bits = n == n ? (uint32_t)((int32_t)n + 127) << 23 : 0x7fc00000u;
    float power;
    memcpy(&power, &bits, 4);
    return x * power;
}
INLINE vf v_less(vf a, vf b, vf yes, vf no) { return a < b ? yes : no; }
INLINE vf v_keep(vf x, int first, int end) { return first <= 0 && end > 0 ? x : -INFINITY; }
INLINE float v_hmax(vf x) { return x; }
INLINE float v_hsum(vf x) { return x; }
INLINE vf v_exchange(vf x, int distance) { return (void)distance, x; }

INLINE vf v_load_f32(const float *p) { return *p; }
INLINE vf v_loadn_f32(const float *p, int n) { return n ? *p : 0; }
INLINE void v_store(float *p, vf x) { *p = x; }
INLINE void v_storen_f32(float *p, vf x, int n) {
    if (n)
        *p = x;
}
INLINE vf v_load_f16(const uint16_t *p) { return ca_from_f16(*p); }
INLINE vf v_loadn_f16(const uint16_t *p, int n) { return n ? ca_from_f16(*p) : 0; }
INLINE void v_storen_f16(uint16_t *p, vf x, int n) {
    if (n)
        *p = ca_to_f16(x);
}
INLINE vf v_load_bf16(const void *p) { /* scales lie at any address */
    uint16_t h;
    memcpy(&h, p, 2);
    return ca_from_bf16(h);
}
INLINE vf v_loadn_bf16(const uint16_t *p, int n) { return n ? ca_from_bf16(*p) : 0; }
INLINE vf v_even_bf16(const uint16_t *p) { return ca_from_bf16(p[0]); }
INLINE vf v_odd_bf16(const uint16_t *p) { return ca_from_bf16(p[1]); }
INLINE vf v_evenn_bf16(const uint16_t *p, int n) { return n ? ca_from_bf16(p[0]) : 0; }
INLINE vf v_oddn_bf16(const uint16_t *p, int n) { return n ? ca_from_bf16(p[1]) : 0; }
INLINE void v_storen_bf16(uint16_t *p, vf x, int n) {
    if (n)
        *p = ca_to_bf16(x);
}

/* ---- words of quantised caches ---- */

#define UNPACK_WORDS
INLINE void unpack_words(const uint8_t *src, int64_t n, const uint16_t *table, uint16_t *dst, const char *next_src) {
    (void)next_src;
    for (int64_t i = 0; i < n; i++)
        dst[i] = (uint16_t)(table[src[i] & 127] | (src[i] & 128) << 8);
}
INLINE void unpack_nibbles(const uint8_t *src, int64_t n, const uint16_t *table, uint16_t *dst, const char *next_src) {
    (void)next_src;
    for (int64_t i = 0; i < n; i += 128, src += 64)
        for (int j = 0; j < 64; j += 8) /* one by one gcc makes vectors of them, which takes four times as long */
            EACH(k, 8) {
                dst[i + j + k] = table[src[j + k] & 15];
                dst[i + 64 + j + k] = table[src[j + k] >> 4];
            }
}
INLINE void v_put_bytes(uint8_t *p, vf x) { *p = (uint8_t)ca_as_bits(x); }

/* ---- words of the cache write ---- */

#define LINES 1
INLINE void v_lines_f32(void *dst, const void *src, int64_t ld, int n) {
    (void)n;
    EACH(i, CA_LANES) memcpy((char *)dst + i * 4, (const char *)src + i * ld, 4);
}
INLINE void v_lines_bf16(void *dst, const void *src, int64_t ld, int n) { v_lines_f32(dst, src, ld, n); }
INLINE void v_lines_f16(void *dst, const void *src, int64_t ld, int n) {
    (void)n;
    EACH(i, CA_LANES) {
        memcpy((char *)dst + i * 2, (const char *)src + i * ld, 2);
        memcpy((char *)dst + 32 + i * 2, (const char *)src + i * ld + 2, 2);
    }
}
INLINE void v_zip_bf16(uint16_t *dst, const uint16_t *a, const uint16_t *b, int n) {
    (void)n;
    dst[0] = *a;
    dst[1] = *b;
}
INLINE void v_stream_line(void *to, const void *from) { memcpy(to, from, 64); }
#define STREAMS 0

#include "kernel/all_dtypes.h"
