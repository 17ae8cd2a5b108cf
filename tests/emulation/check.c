/* SPDX-License-Identifier: Apache-2.0
 * Every intrinsic that avx512.h uses, against a definition of its own in plain C after the pseudo-code of Intel's SDM
 * (vol. 2) and of its intrinsics guide: with EMULATED those of native/kernel's emulations, else the machine's, which
 * says whether the definitions are right. Numbers are random ones and special ones (NaN, infinities, subnormals, ties),
 * masks are all of 16 bits. Prints a line for each name; ends with 1 where one differs. */
#include "lanes.h"
#include <stdio.h>
#include <stdlib.h>

static const in *X; /* a, b, c, k of this trial */
static lanes *R;
typedef struct test {
    const char *name;
    void (*does)(void), (*is)(void);
    int floats; /* one NaN is as good as another */
} test;
static test tests[256];
static int count;

/* TEST(name, floats, call, definition...): what the call leaves in R, and what it should. */
#define TEST(name, floats, call, ...)                                                                                  \
    static void does_##name(void) { call; }                                                                            \
    static void is_##name(void) { __VA_ARGS__; }                                                                       \
    __attribute__((constructor)) static void add_##name(void) {                                                        \
        tests[count++] = (test){#name, does_##name, is_##name, floats};                                                \
    }
#define PS(x) _mm512_loadu_ps(&X->x)
#define SI(x) _mm512_loadu_si512(&X->x)
#define HALF(x) _mm256_loadu_si256((const void *)&X->x)
#define QUARTER(x) _mm_loadu_si128((const void *)&X->x)
#define GIVES_PS(x) _mm512_storeu_ps(R, x)
#define GIVES_SI(x) _mm512_storeu_si512(R, x)
#define GIVES_HALF(x) _mm256_storeu_si256((void *)R, x)
#define GIVES_MASK(x) R->u64[0] = (x)
#define F32(definition)                                                                                                \
    for (int i = 0; i < 16; i++) {                                                                                     \
        const float a = X->a.f32[i], b = X->b.f32[i], c = X->c.f32[i];                                                 \
        (void)a, (void)b, (void)c;                                                                                     \
        R->f32[i] = definition;                                                                                        \
    }
#define U32(definition)                                                                                                \
    for (int i = 0; i < 16; i++) {                                                                                     \
        const uint32_t a = X->a.u32[i], b = X->b.u32[i], c = X->c.u32[i];                                              \
        (void)a, (void)b, (void)c;                                                                                     \
        R->u32[i] = definition;                                                                                        \
    }
#define U16(definition)                                                                                                \
    for (int i = 0; i < 32; i++) {                                                                                     \
        const uint16_t a = X->a.u16[i], b = X->b.u16[i];                                                               \
        (void)a, (void)b;                                                                                              \
        R->u16[i] = (uint16_t)(definition);                                                                            \
    }
#define U8(definition)                                                                                                 \
    for (int i = 0; i < 64; i++)                                                                                       \
        R->u8[i] = (uint8_t)(definition);
#define MASK(n, bit)                                                                                                   \
    for (int i = 0; i < (n); i++)                                                                                      \
        R->u64[0] |= (uint64_t)(bit) << i;
#define HAS(i) (X->k >> (i) & 1)

/* ---- lane by lane ---- */

TEST(add_ps, 1, GIVES_PS(_mm512_add_ps(PS(a), PS(b))), F32(a + b))
TEST(sub_ps, 1, GIVES_PS(_mm512_sub_ps(PS(a), PS(b))), F32(a - b))
TEST(mul_ps, 1, GIVES_PS(_mm512_mul_ps(PS(a), PS(b))), F32(a *b))
TEST(div_ps, 1, GIVES_PS(_mm512_div_ps(PS(a), PS(b))), F32(a / b))
TEST(fmadd_ps, 1, GIVES_PS(_mm512_fmadd_ps(PS(a), PS(b), PS(c))), F32(fmaf(a, b, c)))
TEST(fnmadd_ps, 1, GIVES_PS(_mm512_fnmadd_ps(PS(a), PS(b), PS(c))), F32(fmaf(-a, b, c)))
TEST(min_ps, 0, GIVES_PS(_mm512_min_ps(PS(a), PS(b))), U32(X->a.f32[i] < X->b.f32[i] ? a : b))
TEST(max_ps, 0, GIVES_PS(_mm512_max_ps(PS(a), PS(b))), U32(X->a.f32[i] > X->b.f32[i] ? a : b))
TEST(and_ps, 0, GIVES_PS(_mm512_and_ps(PS(a), PS(b))), U32(a &b))
TEST(or_ps, 0, GIVES_PS(_mm512_or_ps(PS(a), PS(b))), U32(a | b))
TEST(abs_ps, 0, GIVES_PS(_mm512_abs_ps(PS(a))), U32(a & 0x7fffffff))
TEST(roundscale_ps, 1, GIVES_PS(_mm512_roundscale_ps(PS(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)),
     F32(nearest(a)))
TEST(cvtps_epi32, 0, GIVES_SI(_mm512_cvtps_epi32(PS(a))), U32((uint32_t)to_int(X->a.f32[i])))
TEST(cvtepi32_ps, 0, GIVES_PS(_mm512_cvtepi32_ps(SI(a))), F32((float)X->a.i32[i]))
TEST(add_epi32, 0, GIVES_SI(_mm512_add_epi32(SI(a), SI(b))), U32(a + b))
TEST(sub_epi32, 0, GIVES_SI(_mm512_sub_epi32(SI(a), SI(b))), U32(a - b))
TEST(add_epi16, 0, GIVES_SI(_mm512_add_epi16(SI(a), SI(b))), U16(a + b))
TEST(sub_epi8, 0, GIVES_SI(_mm512_sub_epi8(SI(a), SI(b))), U8(X->a.u8[i] - X->b.u8[i]))
TEST(sub_epi16, 0, GIVES_SI(_mm512_sub_epi16(SI(a), SI(b))), U16(a - b))
TEST(and_si512, 0, GIVES_SI(_mm512_and_si512(SI(a), SI(b))), U32(a &b))
TEST(or_si512, 0, GIVES_SI(_mm512_or_si512(SI(a), SI(b))), U32(a | b))
TEST(max_epu32, 0, GIVES_SI(_mm512_max_epu32(SI(a), SI(b))), U32(a > b ? a : b))
TEST(min_epu16, 0, GIVES_SI(_mm512_min_epu16(SI(a), SI(b))), U16(a < b ? a : b))
TEST(madd_epi16, 0, GIVES_SI(_mm512_madd_epi16(SI(a), SI(b))),
     U32((uint32_t)((int16_t)a *(int16_t)b) + (uint32_t)((int16_t)(a >> 16) * (int16_t)(b >> 16))))
TEST(slli_epi32, 0, GIVES_SI(_mm512_slli_epi32(SI(a), 16)), U32(a << 16))
TEST(slli_epi32_23, 0, GIVES_SI(_mm512_slli_epi32(SI(a), 23)), U32(a << 23))
TEST(srli_epi32, 0, GIVES_SI(_mm512_srli_epi32(SI(a), 16)), U32(a >> 16))
TEST(slli_epi16, 0, GIVES_SI(_mm512_slli_epi16(SI(a), 8)), U16(a << 8))
TEST(srli_epi16, 0, GIVES_SI(_mm512_srli_epi16(SI(a), 4)), U16(a >> 4))
TEST(srai_epi16, 0, GIVES_SI(_mm512_srai_epi16(SI(a), 8)), U16((int16_t)a >> 8))
TEST(ternarylogic_epi32, 0, GIVES_SI(_mm512_ternarylogic_epi32(SI(a), SI(b), SI(c), 0xf8)), U32(a | (b & c)))
TEST(ternarylogic_epi32_odd, 0, GIVES_SI(_mm512_ternarylogic_epi32(SI(a), SI(b), SI(c), 0x96)), U32(a ^ b ^ c))
TEST(ternarylogic_epi32_b_not_c, 0, GIVES_SI(_mm512_ternarylogic_epi32(SI(a), SI(b), SI(c), 0x44)), U32(b & ~c))
TEST(set1_ps, 0, GIVES_PS(_mm512_set1_ps(X->b.f32[3])), U32(X->b.u32[3]))
TEST(set1_epi32, 0, GIVES_SI(_mm512_set1_epi32(X->b.i32[3])), U32(X->b.u32[3]))
TEST(set1_epi16, 0, GIVES_SI(_mm512_set1_epi16(X->b.i16[3])), U16(X->b.u16[3]))
TEST(set1_epi8, 0, GIVES_SI(_mm512_set1_epi8(X->b.i8[3])), U8(X->b.u8[3]))
TEST(setzero_ps, 0, GIVES_PS(_mm512_setzero_ps()), U32(0))
TEST(castps_si512, 0, GIVES_SI(_mm512_castps_si512(PS(a))), U32(a))
TEST(castsi512_ps, 0, GIVES_PS(_mm512_castsi512_ps(SI(a))), U32(a))
#define B(i) X->b.f32[i]
TEST(setr_ps, 0,
     GIVES_PS(_mm512_setr_ps(B(0), B(1), B(2), B(3), B(4), B(5), B(6), B(7), B(8), B(9), B(10), B(11), B(12), B(13),
                             B(14), B(15))),
     U32(b))
TEST(setr4_ps, 0, GIVES_PS(_mm512_setr4_ps(B(0), B(1), B(2), B(3))), U32(X->b.u32[i % 4]))
#define L(i) X->b.i64[i]
TEST(setr_epi64, 0, GIVES_SI(_mm512_setr_epi64(L(0), L(1), L(2), L(3), L(4), L(5), L(6), L(7))), U32(b))

/* ---- within 128 bits ---- */

#define LANES(bits, x, definition)                                                                                     \
    for (int lane = 0; lane < 512 / bits; lane += 128 / bits)                                                          \
        for (int i = 0; i < 128 / bits; i++)                                                                           \
            R->x[lane + i] = definition;
#define UNPACK(bits, x, upper) LANES(bits, x, (i % 2 ? X->b.x : X->a.x)[lane + i / 2 + (upper) * 64 / bits])
TEST(unpacklo_epi8, 0, GIVES_SI(_mm512_unpacklo_epi8(SI(a), SI(b))), UNPACK(8, u8, 0))
TEST(unpackhi_epi8, 0, GIVES_SI(_mm512_unpackhi_epi8(SI(a), SI(b))), UNPACK(8, u8, 1))
TEST(unpacklo_epi32, 0, GIVES_SI(_mm512_unpacklo_epi32(SI(a), SI(b))), UNPACK(32, u32, 0))
TEST(unpackhi_epi32, 0, GIVES_SI(_mm512_unpackhi_epi32(SI(a), SI(b))), UNPACK(32, u32, 1))
TEST(unpacklo_ps, 0, GIVES_PS(_mm512_unpacklo_ps(PS(a), PS(b))), UNPACK(32, u32, 0))
TEST(unpackhi_ps, 0, GIVES_PS(_mm512_unpackhi_ps(PS(a), PS(b))), UNPACK(32, u32, 1))
TEST(unpacklo_epi64, 0, GIVES_SI(_mm512_unpacklo_epi64(SI(a), SI(b))), UNPACK(64, u64, 0))
TEST(unpackhi_epi64, 0, GIVES_SI(_mm512_unpackhi_epi64(SI(a), SI(b))), UNPACK(64, u64, 1))
TEST(shuffle_epi8, 0, GIVES_SI(_mm512_shuffle_epi8(SI(a), SI(b))),
     LANES(8, u8, X->b.u8[lane + i] & 0x80 ? 0 : X->a.u8[lane + X->b.u8[lane + i] % 16]))
#define PACK(least, most) LANES(16, u16, (uint16_t)within((i < 4 ? X->a.i32 : X->b.i32)[lane / 2 + i % 4], least, most))
TEST(packs_epi32, 0, GIVES_SI(_mm512_packs_epi32(SI(a), SI(b))), PACK(-32768, 32767))
TEST(packus_epi32, 0, GIVES_SI(_mm512_packus_epi32(SI(a), SI(b))), PACK(0, 65535))
#define PACK_BYTES(least, most)                                                                                        \
    LANES(8, u8, (uint8_t)within((i < 8 ? X->a.i16 : X->b.i16)[lane / 2 + i % 8], least, most))
TEST(packs_epi16, 0, GIVES_SI(_mm512_packs_epi16(SI(a), SI(b))), PACK_BYTES(-128, 127))
TEST(packus_epi16, 0, GIVES_SI(_mm512_packus_epi16(SI(a), SI(b))), PACK_BYTES(0, 255))
TEST(broadcast_i32x4, 0, GIVES_SI(_mm512_broadcast_i32x4(QUARTER(a))), U32(X->a.u32[i % 4]))

/* ---- masks ---- */

#define COMPARE(name, holds)                                                                                           \
    TEST(cmp_ps_##name, 0, GIVES_MASK(_mm512_cmp_ps_mask(PS(a), PS(b), _CMP_##name)),                                  \
         MASK(16, ({                                                                                                   \
                  const float a = X->a.f32[i], b = X->b.f32[i];                                                        \
                  holds;                                                                                               \
              })))
COMPARE(LT_OQ, a < b)
COMPARE(GT_OQ, a > b)
COMPARE(NLT_UQ, !(a < b))
COMPARE(NEQ_UQ, !(a == b))
COMPARE(UNORD_Q, isnan(a) || isnan(b))
TEST(test_epi16, 0, GIVES_MASK(_mm512_test_epi16_mask(SI(a), SI(b))), MASK(32, (X->a.u16[i] & X->b.u16[i]) != 0))
TEST(movepi8, 0, GIVES_MASK(_mm512_movepi8_mask(SI(a))), MASK(64, X->a.u8[i] >> 7))
TEST(cmpeq_epi16, 0, GIVES_MASK(_mm256_cmpeq_epi16_mask(HALF(a), HALF(b))), MASK(16, X->a.u16[i] == X->b.u16[i]))
TEST(mask_blend_epi32, 0, GIVES_SI(_mm512_mask_blend_epi32(K16, SI(a), SI(b))), U32(HAS(i) ? b : a))
TEST(mask_blend_ps, 0, GIVES_PS(_mm512_mask_blend_ps(K16, PS(a), PS(b))), U32(HAS(i) ? b : a))
TEST(maskz_mul_ps, 1, GIVES_PS(_mm512_maskz_mul_ps(K16, PS(a), PS(b))), F32(HAS(i) ? a *b : 0))
TEST(maskz_fmadd_ps, 1, GIVES_PS(_mm512_maskz_fmadd_ps(K16, PS(a), PS(b), PS(c))), F32(HAS(i) ? fmaf(a, b, c) : 0))
TEST(mask_blend_epi16, 0, GIVES_HALF(_mm256_mask_blend_epi16(K16, HALF(a), HALF(b))),
     for (int i = 0; i < 16; i++) R->u16[i] = HAS(i) ? X->b.u16[i] : X->a.u16[i])
TEST(mask_mov_epi16, 0, GIVES_SI(_mm512_mask_mov_epi16(SI(a), K32, SI(b))), U16(HAS(i) ? b : a))
TEST(mask_sub_epi16, 0, GIVES_SI(_mm512_mask_sub_epi16(SI(c), K32, SI(a), SI(b))), U16(HAS(i) ? a - b : X->c.u16[i]))
TEST(mask_sub_epi8, 0, GIVES_SI(_mm512_mask_sub_epi8(SI(c), X->k, SI(a), SI(b))),
     U8(HAS(i) ? X->a.u8[i] - X->b.u8[i] : X->c.u8[i]))

/* ---- memory: at the end of a page, behind which reading and writing kill ---- */

#define EDGE(bytes, n) (memcpy(edge - (n) * (bytes), &X->a, (n) * (bytes)), edge - (n) * (bytes))
#define FIRST (X->k % 17)
#define LOAD(name, bytes, u, gives, call)                                                                              \
    TEST(name, 0, { gives(call(K16, &X->a)); }, for (int i = 0; i < 16; i++) R->u[i] = HAS(i) ? X->a.u[i] : 0)         \
    TEST(                                                                                                              \
        name##_at_the_edge, 0, { gives(call((__mmask16)((1u << FIRST) - 1), EDGE(bytes, FIRST))); },                   \
        for (int i = 0; i < (int)FIRST; i++) R->u[i] = X->a.u[i])
LOAD(maskz_loadu_epi32, 4, u32, GIVES_SI, _mm512_maskz_loadu_epi32)
LOAD(maskz_loadu_ps, 4, u32, GIVES_PS, _mm512_maskz_loadu_ps)
LOAD(maskz_loadu_epi16, 2, u16, GIVES_HALF, _mm256_maskz_loadu_epi16)
LOAD(maskz_loadu_epi8, 1, u8, GIVES_QUARTER, _mm_maskz_loadu_epi8)
TEST(maskz_loadu_epi8_32, 0, GIVES_HALF(_mm256_maskz_loadu_epi8(K32, &X->a)),
     for (int i = 0; i < 32; i++) R->u8[i] = HAS(i) ? X->a.u8[i] : 0)
TEST(maskz_loadu_epi32_8, 0, GIVES_HALF(_mm256_maskz_loadu_epi32((__mmask8)X->k, &X->a)),
     for (int i = 0; i < 8; i++) R->u32[i] = HAS(i) ? X->a.u32[i] : 0)
TEST(loadu_ps, 0, GIVES_PS(_mm512_loadu_ps((const char *)&X->a + 4)), memcpy(R, (const char *)&X->a + 4, 64))
TEST(loadu_si512, 0, GIVES_SI(_mm512_loadu_si512((const char *)&X->a + 1)), memcpy(R, (const char *)&X->a + 1, 64))
#define STORE(name, n, bytes, u, call)                                                                                 \
    TEST(                                                                                                              \
        name, 0,                                                                                                       \
        {                                                                                                              \
            *R = X->c;                                                                                                 \
            call;                                                                                                      \
        },                                                                                                             \
        *R = X->c;                                                                                                     \
        for (int i = 0; i < n; i++) if (HAS(i)) R->u[i] = X->a.u[i])
STORE(mask_storeu_ps, 16, 4, u32, _mm512_mask_storeu_ps(R, K16, PS(a)))
STORE(mask_storeu_epi16, 16, 2, u16, _mm256_mask_storeu_epi16(R, K16, HALF(a)))
STORE(mask_storeu_epi16_32, 32, 2, u16, _mm512_mask_storeu_epi16(R, K32, SI(a)))
TEST(
    mask_storeu_ps_at_the_edge, 0,
    {
        _mm512_mask_storeu_ps(edge - 4 * FIRST, (__mmask16)((1u << FIRST) - 1), PS(b));
        memcpy(R, edge - 4 * FIRST, 4 * FIRST);
    },
    memcpy(R, &X->b, 4 * FIRST))
TEST(
    mask_storeu_epi16_at_the_edge, 0,
    {
        _mm256_mask_storeu_epi16(edge - 2 * FIRST, (__mmask16)((1u << FIRST) - 1), HALF(b));
        memcpy(R, edge - 2 * FIRST, 2 * FIRST);
    },
    memcpy(R, &X->b, 2 * FIRST))
TEST(stream_si512, 0, _mm512_stream_si512((void *)R, SI(a)); _mm_sfence(), *R = X->a)

/* ---- halves, widths ---- */

TEST(zextsi256_si512, 0, GIVES_SI(_mm512_zextsi256_si512(HALF(a))), memcpy(R, &X->a, 32))
TEST(castsi256_si512, 0, GIVES_SI(_mm512_castsi256_si512(HALF(a))); memset(R->u8 + 32, 0, 32), memcpy(R, &X->a, 32))
TEST(inserti64x4_0, 0, GIVES_SI(_mm512_inserti64x4(SI(a), HALF(b), 0)), U32(i < 8 ? b : a))
TEST(inserti64x4_1, 0, GIVES_SI(_mm512_inserti64x4(SI(a), HALF(b), 1)), U32(i < 8 ? a : X->b.u32[i - 8]))
TEST(cvtepu8_epi16, 0, GIVES_SI(_mm512_cvtepu8_epi16(HALF(a))), U16(X->a.u8[i]))
TEST(cvtepu16_epi32, 0, GIVES_SI(_mm512_cvtepu16_epi32(HALF(a))), U32(X->a.u16[i]))
TEST(cvtepi16_epi32, 0, GIVES_SI(_mm512_cvtepi16_epi32(HALF(a))), U32((uint32_t)X->a.i16[i]))
TEST(cvtepi32_epi8, 0, _mm_storeu_si128((void *)R, _mm512_cvtepi32_epi8(SI(a))),
     for (int i = 0; i < 16; i++) R->u8[i] = (uint8_t)X->a.u32[i])
TEST(cvtepi32_epi16, 0, GIVES_HALF(_mm512_cvtepi32_epi16(SI(a))),
     for (int i = 0; i < 16; i++) R->u16[i] = (uint16_t)X->a.u32[i])
TEST(cvtepi16_epi8, 0, GIVES_HALF(_mm512_cvtepi16_epi8(SI(a))),
     for (int i = 0; i < 32; i++) R->u8[i] = (uint8_t)X->a.u16[i])
TEST(cvtph_ps, 1, GIVES_PS(_mm512_cvtph_ps(HALF(a))), F32(of_half(X->a.u16[i])))
TEST(cvtps_ph, 0, GIVES_HALF(_mm512_cvtps_ph(PS(a), _MM_FROUND_TO_NEAREST_INT)),
     for (int i = 0; i < 16; i++) R->u16[i] = to_half(X->a.f32[i]))
TEST(cvtss_f32, 0, R->f32[0] = _mm512_cvtss_f32(PS(a)), R->u32[0] = X->a.u32[0])

/* ---- permutations ---- */

#define PERMUTE(bits, u, n)                                                                                            \
    TEST(permutex2var_epi##bits, 0, GIVES_SI(_mm512_permutex2var_epi##bits(SI(a), SI(c), SI(b))),                      \
         for (int i = 0; i < n; i++) R->u[i] = (X->c.u[i] & n ? X->b.u : X->a.u)[X->c.u[i] % n])                       \
    TEST(permutexvar_epi##bits, 0, GIVES_SI(_mm512_permutexvar_epi##bits(SI(c), SI(a))),                               \
         for (int i = 0; i < n; i++) R->u[i] = X->a.u[X->c.u[i] % n])
PERMUTE(16, u16, 32)
PERMUTE(64, u64, 8)
TEST(permutexvar_epi32, 0, GIVES_SI(_mm512_permutexvar_epi32(SI(c), SI(a))), U32(X->a.u32[X->c.u32[i] % 16]))
#define PERMUTE_PS(how)                                                                                                \
    TEST(permute_ps_##how, 0, GIVES_PS(_mm512_permute_ps(PS(a), how)), LANES(32, u32, X->a.u32[lane + (how >> 2 * i & 3)]))
PERMUTE_PS(0xb1)
PERMUTE_PS(0x4e)
#define SHUFFLE_F32X4(how)                                                                                             \
    TEST(shuffle_f32x4_##how, 0, GIVES_PS(_mm512_shuffle_f32x4(PS(a), PS(b), how)),                                    \
         U32((i < 8 ? X->a : X->b).u32[(how >> i / 4 * 2 & 3) * 4 + i % 4]))
SHUFFLE_F32X4(0xb1)
SHUFFLE_F32X4(0x4e)
SHUFFLE_F32X4(0x44)
SHUFFLE_F32X4(0xee)

/* ---- over the lanes ---- */

#define REDUCE(type, u, op)                                                                                            \
    {                                                                                                                  \
        type x[16], y[16];                                                                                             \
        memcpy(x, &X->a, 64);                                                                                          \
        for (int step = 8; step; step /= 2) {                                                                          \
            for (int i = 0; i < step; i++) {                                                                           \
                const type high = x[i + step], low = x[i], one = step > 2 ? high : low, two = step > 2 ? low : high;   \
                y[i] = op;                                                                                             \
            }                                                                                                          \
            memcpy(x, y, sizeof x);                                                                                    \
        }                                                                                                              \
        R->u[0] = x[0];                                                                                                \
    }
TEST(reduce_add_ps, 1, R->f32[0] = _mm512_reduce_add_ps(PS(a)), REDUCE(float, f32, one + two))
TEST(reduce_max_ps, 1, R->f32[0] = _mm512_reduce_max_ps(PS(a)), REDUCE(float, f32, one > two ? one : two))
TEST(reduce_add_epi32, 0, R->i32[0] = _mm512_reduce_add_epi32(SI(a)), REDUCE(uint32_t, u32, one + two))
TEST(reduce_max_epu32, 0, R->u32[0] = _mm512_reduce_max_epu32(SI(a)), REDUCE(uint32_t, u32, one > two ? one : two))

/* ---- arithmetic of AVX-512 alone ---- */

TEST(rcp14_ps, 0, GIVES_PS(_mm512_rcp14_ps(PS(a))); U32(reciprocal(X->a.f32[i], R->f32[i])), U32(1))

#if defined EMULATED || defined __AVX512BF16__
#define DOT(p, q, sum) fused(of_bf16(p), of_bf16(q), fused(of_bf16((p) >> 16), of_bf16((q) >> 16), sum))
TEST(dpbf16_ps, 1, GIVES_PS(_mm512_dpbf16_ps(PS(c), (__m512bh)SI(a), (__m512bh)SI(b))),
     F32(DOT(X->a.u32[i], X->b.u32[i], c)))
TEST(cvtne2ps_pbh, 0, GIVES_SI((__m512i)_mm512_cvtne2ps_pbh(PS(a), PS(b))),
     U16(to_bf16((i < 16 ? X->b.f32 : X->a.f32)[i % 16])))
PERMUTE(8, u8, 64)
TEST(mask_permutexvar_epi16, 0, GIVES_SI(_mm512_mask_permutexvar_epi16(SI(a), (__mmask32)X->k, SI(b), SI(c))),
     U16(HAS(i) ? X->c.u16[b % 32] : a))
TEST(maskz_permutex2var_epi8, 0, GIVES_SI(_mm512_maskz_permutex2var_epi8(X->k, SI(a), SI(b), SI(c))),
     for (int i = 0; i < 64; i++) {
         const int from = X->b.u8[i] % 128;
         R->u8[i] = HAS(i) ? (from < 64 ? X->a.u8[from] : X->c.u8[from - 64]) : 0;
     })
#endif

#ifdef EMULATED
/* Makes c of `was`, all of 16 x 16: its first rows and columns plus A B. */
static void multiply(void (*dot)(int, int, int), int rows, int depth, int columns, const void *a, const void *b,
                     const void *was, void *c) {
    tile_config shape = {
        .palette = 1, .rows = {rows, rows, depth}, .row_bytes = {4 * columns, 4 * depth, 4 * columns}};
    tile_configure(&shape), tile_zero(0);
    tile_load(0, was, 64), tile_load(1, a, 64), tile_load(2, b, 64);
    dot(0, 1, 2);
    memcpy(c, was, 1024);
    tile_store(0, c, 64);
    tile_release();
}

/* TDPBF16PS of tiles of any shape: of each row of C sums over the even elements of a pair and over the odd ones. */
static int tiles_hold(void) {
    static float c[16][16], was[16][16];
    static uint32_t a[16][16], b[16][16];
    for (int trial = 0; trial < 2000; trial++) {
        const int rows = 1 + (int)(random_32() % 16), pairs = 1 + (int)(random_32() % 16),
                  columns = 1 + (int)(random_32() % 16), mild = trial % 2;
        for (int i = 0; i < 256; i++) { /* mild: no NaN, or every sum soon is one */
            const uint32_t x = number(), y = number();
            was[i / 16][i % 16] = as_float(number() & (mild ? 0xbfffffff : 0xffffffff));
            a[i / 16][i % 16] = mild ? (x & 0xbfffbfff) : x, b[i / 16][i % 16] = mild ? (y & 0xbfffbfff) : y;
        }
        multiply(tile_dot, rows, pairs, columns, a, b, was, c);
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < 16; n++) {
                float even = 0, odd = 0, wanted = was[m][n];
                for (int k = 0; m < rows && n < columns && k < pairs; k++) {
                    even = fused(of_bf16(a[m][k]), of_bf16(b[k][n]), even);
                    odd = fused(of_bf16(a[m][k] >> 16), of_bf16(b[k][n] >> 16), odd);
                }
                if (m < rows && n < columns)
                    wanted = flush(flush(wanted) + flush(even + odd));
                if (as_bits(c[m][n]) != as_bits(wanted) && !(isnan(c[m][n]) && isnan(wanted))) {
                    printf("tile_dot: row %d column %d of trial %d: %a, not %a\n", m, n, trial, c[m][n], wanted);
                    return 0;
                }
            }
    }
    printf("tile_dot: holds\n");
    return 1;
}

/* TDPBSSD of tiles of any shape. */
static int byte_tiles_hold(void) {
    static int32_t c[16][16], was[16][16];
    static int8_t a[16][64], b[16][64];
    for (int trial = 0; trial < 2000; trial++) {
        const int rows = 1 + (int)(random_32() % 16), quads = 1 + (int)(random_32() % 16),
                  columns = 1 + (int)(random_32() % 16);
        for (int i = 0; i < 256; i++)
            was[i / 16][i % 16] = (int32_t)random_32();
        for (int i = 0; i < 1024; i++)
            a[i / 64][i % 64] = (int8_t)random_32(), b[i / 64][i % 64] = (int8_t)random_32();
        multiply(tile_dot_bytes, rows, quads, columns, a, b, was, c);
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < 16; n++) {
                uint32_t wanted = (uint32_t)was[m][n];
                for (int k = 0; m < rows && n < columns && k < 4 * quads; k++)
                    wanted += (uint32_t)(a[m][k] * b[k / 4][4 * n + k % 4]);
                if ((uint32_t)c[m][n] != wanted) {
                    printf("tile_dot_bytes: row %d column %d of trial %d\n", m, n, trial);
                    return 0;
                }
            }
    }
    printf("tile_dot_bytes: holds\n");
    return 1;
}
#else
static int tiles_hold(void) { return 1; } /* no machine at hand has them */
#define byte_tiles_hold tiles_hold
#endif

static void draw(in *x, uint64_t trial) {
    lanes *const all[] = {&x->a, &x->b, &x->c};
    for (int j = 0; j < 3; j++)
        for (int i = 0; i < 16; i++)
            all[j]->u32[i] = number();
    x->k = trial | (uint64_t)random_32() << 16; /* every mask of 16 bits */
}

int main(int argc, char **argv) {
    const char *broken = argc > 1 ? argv[1] : ""; /* this one alone, with a bit turned, to see that it is found */
    int failed = 0;
    make_edge();
    for (int t = 0; t < count; t++) {
        int differs = 0;
        if (*broken && strcmp(broken, tests[t].name))
            continue;
        seed(t);
        for (uint64_t trial = 0; trial < 1 << 16 && !differs; trial++) {
            static in x;
            static lanes got, wanted;
            draw(&x, trial);
            X = &x;
            memset(&got, 0, sizeof got), memset(&wanted, 0, sizeof wanted);
            R = &got, tests[t].does();
            R = &wanted, tests[t].is();
            got.u32[0] ^= *broken && trial == 999;
            for (int i = 0; i < 16 && !differs; i++)
                if (got.u32[i] != wanted.u32[i] && !(tests[t].floats && isnan(got.f32[i]) && isnan(wanted.f32[i]))) {
                    printf("%s: lane %d of trial %d: %08x, not %08x, of %08x %08x %08x, mask %llx\n", tests[t].name, i,
                           (int)trial, got.u32[i], wanted.u32[i], x.a.u32[i], x.b.u32[i], x.c.u32[i],
                           (unsigned long long)x.k);
                    differs = 1;
                }
        }
        if (!differs)
            printf("%s: holds\n", tests[t].name);
        failed |= differs;
    }
    return failed || (!*broken && (!tiles_hold() || !byte_tiles_hold()));
}
