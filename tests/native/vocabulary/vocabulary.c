/* SPDX-License-Identifier: Apache-2.0
 * This program holds every word of native/kernel/simd/vocabulary.md against plain C, lane by lane. It is compiled with
 * the flags of an isa file, which is ISA_FILE, and prints a line for each word: that it holds, or where it does not.
 * What may not be read ends at a page that cannot be, and what may not be written is compared. Numbers are random ones
 * and special ones: NaN, infinities, subnormals, zeros, ties. test_vocabulary.py runs it. */
#include ISA_FILE
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define TRIALS 400

/* ---- lane by lane ---- */

TEST(v_set1) {
    const float x = any_number();
    EACH_IS(v_set1(x), x);
}
TEST(v_first) {
    VECTORS(any_number)
    check(same(v_first(a), A[0]), 0, v_first(a), A[0]);
}
TEST(v_iota) { EACH_IS(v_iota(), (float)i); }
#define LANE_BY_LANE(word, call, want)                                                                                 \
    TEST(word) {                                                                                                       \
        VECTORS(any_number)                                                                                            \
        EACH_IS(call, want);                                                                                           \
    }
LANE_BY_LANE(v_add, v_add(a, b), A[i] + B[i])
LANE_BY_LANE(v_sub, v_sub(a, b), A[i] - B[i])
LANE_BY_LANE(v_mul, v_mul(a, b), A[i] * B[i])
LANE_BY_LANE(v_div, v_div(a, b), A[i] / B[i])
LANE_BY_LANE(v_max, v_max(a, b), A[i] > B[i] ? A[i] : B[i])
LANE_BY_LANE(v_min, v_min(a, b), A[i] < B[i] ? A[i] : B[i])
LANE_BY_LANE(v_abs, v_abs(a), fabsf(A[i]))
LANE_BY_LANE(v_copysign, v_copysign(v_abs(a), b), copysignf(fabsf(A[i]), B[i]))
LANE_BY_LANE(v_less, v_less(a, b, c, a), A[i] < B[i] ? C[i] : A[i])
/* The product may be rounded before it is added, as plain C does. */
static void is_fma(vf x) {
    const float *got = lanes_of(x);
    LANES(i) {
        const float fused = fmaf(A[i], B[i], C[i]), apart = A[i] * B[i] + C[i];
        check(same(got[i], fused) || same(got[i], apart), i, got[i], fused);
    }
}
TEST(v_fma) {
    VECTORS(any_number)
    is_fma(v_fma(a, b, c));
}
#ifdef V_FACTOR
TEST(v_factor_at) {
    float *p = before_guard(4);
    *p = any_number();
    SAME_BITS(0, bits_of(v_first(v_factor_at(p))), bits_of(*p));
}
TEST(v_add_product) {
    const float x = between(-2, 2);
    VECTORS(finite_number)
    const float *got = lanes_of(v_add_product(a, v_factor_at(&x), b));
    LANES(i) SAME_BITS(i, bits_of(got[i]), bits_of(fmaf(x, B[i], A[i])));
}
#endif
#ifdef V_ACCUMULATE
TEST(v_accumulate) {
    VECTORS(any_number)
    is_fma(v_accumulate(c, a, b));
}
#endif
#ifdef V_EXP2_BY
TEST(v_exp2_by) {
    const float c[] = {0.000154614478f, 0.00133908668f, 0.00961805694f, 0.0555035695f, 0.240226507f, 0.693147182f, 1};
    LANES(i) A[i] = random_bits() % 4 ? between(-126, 127) : (float)(int)between(-126, 127);
    A[random_bits() % VL] = random_bits() % 2 ? float_of(0x7fc00001) : random_bits() % 2 ? -INFINITY : -127;
    const float *got = lanes_of(v_exp2_by(c, 7, v_load_f32(A)));
    LANES(i) {
        const double want = A[i] <= -127 ? 0 : exp2(A[i]), error = A[i] == (int)A[i] ? 0 : 2e-7;
        check(A[i] != A[i] ? got[i] != got[i] : fabs(got[i] - want) <= error * want, i, got[i], want);
    }
}
#endif
TEST(v_round) {
    LANES(i) A[i] = random_bits() % 8 ? between(-200, 200) : random_bits() % 2 ? NAN : (float)(int)between(-9, 9) / 2;
    const float *got = lanes_of(v_round(v_load_f32(A)));
    LANES(i) {
        const int whole = fabs(got[i] - (double)A[i]) <= 0.5 && got[i] == rintf(got[i]);
        check(A[i] != A[i] ? got[i] != got[i] : whole, i, got[i], rintf(A[i]));
    }
}
TEST(v_scale) {
    LANES(i) A[i] = finite_number(), B[i] = (float)(int)between(-127, 129);
    const float *got = lanes_of(v_scale(v_load_f32(A), v_load_f32(B)));
    LANES(i) {
        const float want = B[i] == -127 ? 0 : B[i] == 128 ? A[i] * INFINITY : ldexpf(A[i], (int)B[i]);
        check(got[i] == want, i, got[i], want);
    }
}
TEST(v_keep) {
    VECTORS(any_number)
    const int first = (int)(random_bits() % (VL + 1)), end = (int)(random_bits() % (VL + 1));
    EACH_IS(v_keep(a, first, end), i >= first && i < end ? A[i] : -INFINITY);
}
TEST(v_exchange) {
    VECTORS(any_number)
#if VL > 1
    EACH_IS(v_exchange(a, 1), A[i ^ 1]);
    EACH_IS(v_exchange(a, 2), A[i ^ 2]);
#endif
#if VL > 4
    EACH_IS(v_exchange(a, 4), A[i ^ 4]);
#endif
#if VL > 8
    EACH_IS(v_exchange(a, 8), A[i ^ 8]);
#endif
}
TEST(v_hmax) {
    VECTORS(finite_number)
    float want = A[0];
    LANES(i) want = A[i] > want ? A[i] : want;
    check(v_hmax(a) == want, 0, v_hmax(a), want);
}
TEST(v_hsum) {
    VECTORS(finite_number)
    double want = 0, size = 0;
    LANES(i) want += A[i], size += fabs(A[i]);
    check(fabs(v_hsum(a) - want) <= size * VL * 0x1p-24, 0, v_hsum(a), want);
}

/* ---- loads and stores ---- */

#define LOAD(T, elem, value)                                                                                           \
    TEST(v_load_##T) {                                                                                                 \
        elem *p = before_guard(VL * sizeof *p);                                                                        \
        random_bytes(p, VL * sizeof *p);                                                                               \
        EACH_IS(v_load_##T(p), (float)(value));                                                                        \
    }                                                                                                                  \
    TEST(v_loadn_##T) {                                                                                                \
        const int n = (int)(random_bits() % (VL + 1));                                                                 \
        elem *p = before_guard((size_t)n * sizeof *p);                                                                 \
        random_bytes(p, (size_t)n * sizeof *p);                                                                        \
        EACH_IS(v_loadn_##T(p, n), i < n ? (float)(value) : 0);                                                        \
    }
LOAD(f32, float, p[i])
LOAD(f16, uint16_t, value_of(p[i], F16))
LOAD(bf16, uint16_t, value_of(p[i], BF16))
#define LOAD_HALF(word, wordn, odd)                                                                                    \
    TEST(word) {                                                                                                       \
        uint16_t *p = before_guard(VL * 4);                                                                            \
        random_bytes(p, VL * 4);                                                                                       \
        EACH_IS(word(p), (float)value_of(p[2 * i + odd], BF16));                                                       \
    }                                                                                                                  \
    TEST(wordn) {                                                                                                      \
        const int n = (int)(random_bits() % (VL + 1));                                                                 \
        uint16_t *p = before_guard((size_t)n * 4);                                                                     \
        random_bytes(p, (size_t)n * 4);                                                                                \
        EACH_IS(wordn(p, n), i < n ? (float)value_of(p[2 * i + odd], BF16) : 0);                                       \
    }
LOAD_HALF(v_even_bf16, v_evenn_bf16, 0)
LOAD_HALF(v_odd_bf16, v_oddn_bf16, 1)

TEST(v_store) {
    VECTORS(any_number)
    float *p = target();
    v_store(p, a);
    LANES(i) SAME_BITS(i, bits_of(p[i]), bits_of(A[i]));
    nothing_written_from(p, VL * 4);
}
TEST(v_storen_f32) {
    VECTORS(any_number)
    const int n = (int)(random_bits() % (VL + 1));
    float *p = target();
    v_storen_f32(p, a, n);
    for (int i = 0; i < n; i++)
        SAME_BITS(i, bits_of(p[i]), bits_of(A[i]));
    nothing_written_from(p, n * 4);
}
#define STORE_16_BITS(T, fraction)                                                                                     \
    TEST(v_storen_##T) {                                                                                               \
        VECTORS(any_number)                                                                                            \
        const int n = (int)(random_bits() % (VL + 1));                                                                 \
        uint16_t *p = target();                                                                                        \
        v_storen_##T(p, a, n);                                                                                         \
        for (int i = 0; i < n; i++)                                                                                    \
            check(right_16_bits(p[i], A[i], fraction), i, p[i], rounded_to(A[i], fraction));                           \
        nothing_written_from(p, n * 2);                                                                                \
    }
STORE_16_BITS(f16, F16)
STORE_16_BITS(bf16, BF16)
TEST(v_put_bytes) {
    VECTORS(any_number)
    uint8_t *p = target();
    v_put_bytes(p, a);
    LANES(i) SAME_BITS(i, p[i], (uint8_t)bits_of(A[i]));
    nothing_written_from(p, VL);
}
TEST(v_stream_line) {
    uint8_t from[64], *p = target();
    random_bytes(from, sizeof from);
    v_stream_line(p, from);
    for (int i = 0; i < 64; i++)
        SAME_BITS(i, p[i], from[i]);
    nothing_written_from(p, 64);
}

/* ---- bytes and rows ---- */

#if VL > 1
TEST(v_look_up) {
    uint8_t table[16], x[4 * VL], got[4 * VL];
    vi indices;
    random_bytes(table, sizeof table);
    for (int i = 0; i < 4 * VL; i++)
        x[i] = random_bits() % 16;
    memcpy(&indices, x, sizeof x);
    indices = v_look_up(table, indices);
    memcpy(got, &indices, sizeof got);
    for (int i = 0; i < 4 * VL; i++)
        SAME_BITS(i, got[i], table[x[i]]);
}
#endif
/* Tests words of 16 rows, which end before the guard. The lines go to memory of their own, since they are many. */
static void test_lines(void (*lines)(void *, const void *, int64_t, int), int halves) {
    static _Alignas(64) uint8_t got[16 * 64 + MOST];
    const int n = 1 + (int)(random_bits() % LINES);
    const int64_t ld = 4 * (n + (int)(random_bits() % 3));
    uint8_t *src = before_guard((size_t)(15 * ld + 4 * n));
    random_bytes(src, (size_t)(15 * ld + 4 * n));
    memset(got, 0xa5, sizeof got);
    lines(got, src, ld, n);
    for (int p = 0; p < n; p++)
        for (int r = 0; r < 16; r++)
            for (int i = 0; i < 4; i++)
                SAME_BITS(r, got[64 * p + (halves ? i / 2 * 32 + 2 * r + i % 2 : 4 * r + i)], src[r * ld + 4 * p + i]);
    nothing_written_from(got + 64 * n, 0);
}
#define TEST_LINES(T, halves)                                                                                          \
    static void lines_##T(void *dst, const void *src, int64_t ld, int n) { v_lines_##T(dst, src, ld, n); }             \
    TEST(v_lines_##T) { test_lines(lines_##T, halves); }
TEST_LINES(f32, 0)
TEST_LINES(bf16, 0)
TEST_LINES(f16, 1)
TEST(v_zip_bf16) {
    const int n = 1 + (int)(random_bits() % VL);
    uint16_t other[16], *p = target(), *guarded = before_guard((size_t)n * 2);
    const int which = random_bits() % 2;
    const uint16_t *even = which ? guarded : other, *odd = which ? other : guarded;
    random_bytes(guarded, (size_t)n * 2);
    random_bytes(other, sizeof other);
    v_zip_bf16(p, even, odd, n);
    for (int i = 0; i < 2 * n; i++)
        SAME_BITS(i, p[i], i % 2 ? odd[i / 2] : even[i / 2]);
    nothing_written_from(p, n * 4);
}
#ifdef UNPACK_WORDS
static void random_table(uint16_t *table, int n) {
    random_bytes(table, (size_t)n * 2);
    for (int i = 0; i < n; i++)
        table[i] &= 0x7fff; /* the sign comes from the byte */
}
static uint16_t word_of_byte(const uint16_t *table, uint8_t byte) {
    return (uint16_t)(table[byte & 127] | (byte & 128) << 8);
}
TEST(unpack_words) {
    const int n = 1 + (int)(random_bits() % 150);
    uint16_t table[128], *p = target();
    uint8_t *src = before_guard((size_t)n);
    random_table(table, 128);
    random_bytes(src, (size_t)n);
    unpack_words(src, n, table, p, (const char *)src);
    for (int i = 0; i < n; i++)
        SAME_BITS(i, p[i], word_of_byte(table, src[i]));
    nothing_written_from(p, 2 * n);
}
TEST(unpack_nibbles) {
    uint16_t table[32], *p = target();
    uint8_t *src = before_guard(64);
    random_table(table, 16);
    memcpy(table + 16, table, 32);
    random_bytes(src, 64);
    unpack_nibbles(src, 128, table, p, (const char *)src);
    for (int i = 0; i < 64; i++) {
        SAME_BITS(i, p[i], table[src[i] & 15]);
        SAME_BITS(64 + i, p[64 + i], table[src[i] >> 4]);
    }
    nothing_written_from(p, 256);
}
#endif

#if (defined MICROKERNEL && !defined V_LONG) || defined INTEGERS
TEST(v_any_less) {
    VECTORS(any_number)
    int want = 0;
    LANES(i) want |= A[i] < B[i];
    SAME_BITS(0, !!v_any_less(a, b), want);
    const int lane = (int)(random_bits() % VL);
    LANES(i) A[i] = B[i] = 1;
    A[lane] = random_bits() % 2 ? NAN : 0;
    SAME_BITS(lane, !!v_any_less(v_load_f32(A), v_load_f32(B)), A[lane] == 0);
}
#endif

#include "integers.h"
#include "pairs.h"

_Static_assert(16 % VL == 0 && 16 % LINES == 0 && (STREAMS == 0 || STREAMS == 1),
               "constants are as vocabulary.md says");

int main(void) {
    int wrong = 0;
    const char *lacks = missing();
    if (lacks) {
        printf("this machine lacks %s\n", lacks);
        return 77;
    }
    for (const test *t = tests; t < tests + num_tests; t++) {
        failed = 0;
        printf("%s: ", t->word);
        fflush(stdout);
        for (trial = 0; trial < TRIALS && !failed; trial++)
            t->run();
        if (!failed)
            puts("holds");
        wrong |= failed;
    }
    return wrong != 0;
}
