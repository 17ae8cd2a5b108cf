/* SPDX-License-Identifier: Apache-2.0
 * These are the words of long products of float16, of dot products of bfloat16 pairs, of weights, and of decode's
 * registers. */
#ifdef V_LONG
static uint16_t H[2 * VL];
static const uint16_t *words_of(v16 x) {
    static uint16_t words[2 * VL];
    v_store_halves(words, x);
    return words;
}
#define EACH_HALF_IS(x, want)                                                                                          \
    do {                                                                                                               \
        const uint16_t *got = words_of(x);                                                                             \
        for (int i = 0; i < 2 * VL; i++)                                                                               \
            SAME_BITS(i, got[i], (uint16_t)(want));                                                                    \
    } while (0)
TEST(v_load_halves) {
    uint16_t *p = before_guard(VL * 4);
    random_bytes(p, VL * 4);
    EACH_HALF_IS(v_load_halves(p), p[i]);
}
TEST(v_loadn_halves) {
    const int n = (int)(random_bits() % (VL + 1));
    uint16_t *p = before_guard((size_t)n * 2);
    random_bytes(p, (size_t)n * 2);
    EACH_HALF_IS(v_loadn_halves(p, n), i < n ? p[i] : 0);
}
TEST(v_store_halves) {
    random_bytes(H, sizeof H);
    uint16_t *p = target();
    v_store_halves(p, v_load_halves(H));
    for (int i = 0; i < 2 * VL; i++)
        SAME_BITS(i, p[i], H[i]);
    nothing_written_from(p, VL * 4);
}
TEST(v_half_at) {
    uint16_t *p = before_guard(2);
    random_bytes(p, 2);
    SAME_BITS(0, words_of(v_half_at(p))[0], *p);
}
TEST(v_round_halves) {
    VECTORS(any_number)
    const uint16_t *got = words_of(v_round_halves(a, b));
    for (int i = 0; i < 2 * VL; i++) {
        const float x = i < VL ? A[i] : B[i - VL];
        check(right_16_bits(got[i], x, F16), i, value_of(got[i], F16), x);
    }
}
/* Every product of two numbers is exact, subnormal ones included, and the sum is rounded once. */
TEST(v_add_long) {
    const int upper = (int)(random_bits() % 2);
    uint16_t factor = (uint16_t)random_bits();
    random_bytes(H, sizeof H);
    fill(A, any_number);
    const float *got = lanes_of(v_add_long(v_load_f32(A), v_half_at(&factor), v_load_halves(H), upper));
    LANES(i) {
        const float want = fmaf((float)value_of(factor, F16), (float)value_of(H[upper * VL + i], F16), A[i]);
        check(same(got[i], want), i, got[i], want);
    }
}
#elif defined MICROKERNEL
static uint16_t X[64], Y[64];
static const uint16_t *words_of(vp x) {
    static uint16_t words[2 * VL];
    memcpy(words, &x, sizeof words);
    return words;
}
#define EACH_WORD_IS(x, want)                                                                                          \
    do {                                                                                                               \
        const uint16_t *got = words_of(x);                                                                             \
        for (int i = 0; i < 2 * VL; i++)                                                                               \
            SAME_BITS(i, got[i], (uint16_t)(want));                                                                    \
    } while (0)
#define WORDS                                                                                                          \
    random_bytes(X, sizeof X), random_bytes(Y, sizeof Y);                                                              \
    const vp x = v_load_pairs(X), y = v_load_pairs(Y);                                                                 \
    (void)x, (void)y;

TEST(v_load_pairs) {
    uint16_t *p = before_guard(VL * 4);
    random_bytes(p, VL * 4);
    EACH_WORD_IS(v_load_pairs(p), p[i]);
}
TEST(v_loadn_pairs) {
    const int n = (int)(random_bits() % (VL + 1));
    uint16_t *p = before_guard((size_t)n * 4);
    random_bytes(p, (size_t)n * 4);
    EACH_WORD_IS(v_loadn_pairs(p, n), i < 2 * n ? p[i] : 0);
}
TEST(v_set1_pair) {
    uint16_t *p = before_guard(4);
    random_bytes(p, 4);
    EACH_WORD_IS(v_set1_pair(p), p[i % 2]);
}
TEST(v_keep_half) {
    WORDS
    EACH_WORD_IS(v_keep_half(x, 0), i % 2 ? 0 : X[i]);
    EACH_WORD_IS(v_keep_half(x, 1), i % 2 ? X[i] : 0);
}
TEST(v_store_pairs) {
    WORDS
    uint16_t *p = target();
    v_store_pairs(p, x);
    for (int i = 0; i < 2 * VL; i++)
        SAME_BITS(i, p[i], X[i]);
    nothing_written_from(p, VL * 4);
}
TEST(v_dot) {
    for (int i = 0; i < 2 * VL; i++)
        X[i] = rounded_to(finite_number(), BF16), Y[i] = rounded_to(finite_number(), BF16);
    fill(A, finite_number);
    const float *got = lanes_of(v_dot(v_load_f32(A), v_load_pairs(X), v_load_pairs(Y)));
    LANES(i) {
        const double even = value_of(X[2 * i], BF16) * value_of(Y[2 * i], BF16);
        const double odd = value_of(X[2 * i + 1], BF16) * value_of(Y[2 * i + 1], BF16), want = A[i] + even + odd;
        check(fabs(got[i] - want) <= 0x1p-22 * (fabs(A[i]) + fabs(even) + fabs(odd)) + FLT_MIN, i, got[i], want);
    }
}
TEST(v_rcp) {
    LANES(i) A[i] = between(1, 2);
    const float *got = lanes_of(v_rcp(v_load_f32(A)));
    LANES(i) check(fabs((double)got[i] * A[i] - 1) <= 0x1p-22, i, got[i], 1 / (double)A[i]);
}
#define ELEMENT(i) ((i) < VL ? A[i] : B[(i) - VL])
TEST(v_round_pairs) {
    VECTORS(finite_number)
    EACH_WORD_IS(v_round_pairs(a, b), fabsf(ELEMENT(i)) < FLT_MIN ? got[i] & 0x807f : rounded_to(ELEMENT(i), BF16));
}
#ifdef V_MATRIX
TEST(v_matrix) {
    for (int i = 0; i < 2 * VL; i++)
        X[i] = rounded_to(finite_number(), BF16), Y[i] = rounded_to(finite_number(), BF16);
    fill(A, finite_number);
    const float *got = lanes_of(v_matrix(v_load_f32(A), v_load_pairs(X), v_load_pairs(Y)));
    LANES(i) B[i] = got[i];
    LANES(i) { /* two dot products, in this order */
        const uint16_t *x = X + i / 2 * 4, *y = Y + i % 2 * 4;
        vf sum = v_set1(A[i]);
        EACH(pair, 2) sum = v_dot(sum, v_set1_pair(x + 2 * pair), v_set1_pair(y + 2 * pair));
        SAME_BITS(i, bits_of(B[i]), bits_of(v_first(sum)));
    }
}
TEST(v_quads_of_pairs) {
    WORDS
    EACH_WORD_IS(v_quads_of_pairs(x, y, 0), (i / 2 % 2 ? Y : X)[i / 4 * 2 + i % 2]);
    EACH_WORD_IS(v_quads_of_pairs(x, y, 1), (i / 2 % 2 ? Y : X)[VL + i / 4 * 2 + i % 2]);
}
TEST(v_keep_pairs) {
    WORDS
    EACH_WORD_IS(v_keep_pairs(x), i / 2 % 2 ? 0 : X[i]);
}
TEST(v_two_quads) {
    random_bytes(Y, sizeof Y);
    uint16_t *p = before_guard(8);
    random_bytes(p, 8);
    EACH_WORD_IS(v_two_quads(Y, p), i < 4 ? Y[i] : p[i - 4]);
    EACH_WORD_IS(v_two_quads(p, Y), i < 4 ? p[i] : Y[i - 4]);
}
TEST(v_join) {
    VECTORS(any_number)
    EACH_IS(v_join(a, b, 0), i < VL / 2 ? A[i] : B[i - VL / 2]);
    EACH_IS(v_join(a, b, 1), i < VL / 2 ? A[VL / 2 + i] : B[i]);
}
#endif
#if VL == 16
TEST(v_put_pairs) {
    VECTORS(any_number)
    uint16_t *p = target();
    v_put_pairs(p, a, b);
    for (int i = 0; i < 2 * VL; i++)
        SAME_BITS(i, p[i], (uint16_t)(bits_of(i % 2 ? B[i / 2] : A[i / 2]) >> 16));
    nothing_written_from(p, VL * 4);
}
TEST(v_nearest_bf16) {
    VECTORS(any_number)
    EACH_IS(v_nearest_bf16(a), ELEMENT(i) != ELEMENT(i) ? got[i] : (float)value_of(rounded_to(ELEMENT(i), BF16), BF16));
}
#endif
#endif

/* ---- weights ---- */

#ifdef V_OCTAVE
/* A weight may be off by 0.6 %: its rounding, that of the table, and what a dither adds. */
static int is_power(uint16_t got, double x) {
    const double power = value_of(got, BF16), want = exp2(x / V_OCTAVE);
    if (x != x || x < -127.0 * V_OCTAVE - 1)
        return got == 0;
    return x < -126.0 * V_OCTAVE ? power >= 0 && power < 0x1.02p-126 : fabs(power - want) <= 0.006 * want;
}
static float exponent(void) {
    const uint32_t kind = random_bits() % 16;
    return kind == 0 ? NAN : kind == 1 ? -INFINITY : kind == 2 ? between(-0.25, 0.25) : between(-130.0 * V_OCTAVE, 0);
}
TEST(v_powers) {
    VECTORS(exponent)
    const uint16_t *got = words_of(v_powers(a, b));
    for (int i = 0; i < 2 * VL; i++) {
        const float x = ELEMENT(i);
        check(fabsf(x) <= 0.25f ? got[i] == 0x3f80 : is_power(got[i], x), i, value_of(got[i], BF16),
              exp2(x / V_OCTAVE));
    }
}
TEST(v_dither) {
    const float *got = lanes_of(v_dither());
    LANES(i) check(fabsf(got[i]) <= 0.25f && got[i] * got[i ^ 1] < 0, i, got[i], got[i ^ 1]);
}
TEST(v_any_nan) {
    VECTORS(finite_number)
    const int lane = (int)(random_bits() % VL), which = (int)(random_bits() % 3);
    (which ? A : B)[lane] = which == 2 ? INFINITY : NAN;
    SAME_BITS(lane, !!v_any_nan(v_load_f32(A), v_load_f32(B)), which != 2);
}

/* ---- weights by words ---- */

TEST(v_rest_of_words) {
    const v_word_order order = v_load_word_order();
    WORDS
    const uint16_t *got = words_of(v_rest_of_words(&order, x));
    for (int i = 0; i < 2 * VL; i++)
        SAME_BITS(i, got[i] + X[i], 65535);
}
TEST(v_least_room) {
    WORDS
    EACH_WORD_IS(v_least_room(x, y), X[i] < 0x7fff - (Y[i] & 0x7fff) ? X[i] : 0x7fff - (Y[i] & 0x7fff));
}
TEST(v_powers_of_words) {
    const v_powers_table table = v_load_powers();
    for (int i = 0; i < 2 * VL; i++)
        X[i] = (uint16_t)between(2 * V_OCTAVE, V_ONE + 1);
    const uint16_t *got = words_of(v_powers_of_words(&table, v_load_words(X)));
    for (int i = 0; i < 2 * VL; i++)
        check(is_power(got[i], X[i] - V_ONE), i, value_of(got[i], BF16), exp2((X[i] - V_ONE) / (double)V_OCTAVE));
}
/* These two load what the word before and the word after it take; here all of both meets one vector. */
TEST(v_load_powers) {
    const v_powers_table table = v_load_powers();
    LANES(i) A[i] = (float)(int)between(-126.0 * V_OCTAVE, 1), B[i] = (float)(int)between(-126.0 * V_OCTAVE, 1);
    for (int i = 0; i < 2 * VL; i++)
        X[i] = (uint16_t)(V_ONE + ELEMENT(i));
    uint16_t want[2 * VL];
    memcpy(want, words_of(v_powers(v_load_f32(A), v_load_f32(B))), sizeof want);
    EACH_WORD_IS(v_powers_of_words(&table, v_load_words(X)), want[i]);
}
TEST(v_load_word_order) {
    const v_word_order order = v_load_word_order();
    LANES(i) A[i] = (float)(3 * i), B[i] = (float)(3 * (VL + i));
    EACH_WORD_IS(v_words(&order, 1, v_load_f32(A), v_load_f32(B), 0), 3 * i);
}
TEST(v_words) {
    const v_word_order order = v_load_word_order();
    const float special[] = {NAN, INFINITY, -INFINITY, 3e9f, -3e9f, 65536, 70000, -1, 0.5f, 65535, FLT_MAX};
    const uint32_t seen = random_bits();
    LANES(i) A[i] = between(-100, 70000), B[i] = between(0, 65535);
    A[random_bits() % VL] = special[random_bits() % 11];
    const vf a = v_load_f32(A), b = v_load_f32(B);
#define WORD(x) (fabs(x) < 0x1p31 ? fmin(fmax(rint(x), 0), 65535) : 0)
    EACH_WORD_IS(v_words(&order, 1, a, b, 0), WORD(ELEMENT(i)));
    EACH_WORD_IS(v_words(&order, 0, a, b, seen), seen >> i & 1 ? WORD(ELEMENT(i)) : 65535);
}
#define EACH_BYTE_IS(x, want)                                                                                          \
    do {                                                                                                               \
        uint8_t got[4 * VL];                                                                                           \
        v_store_words(got, x);                                                                                         \
        for (int i = 0; i < 4 * VL; i++)                                                                               \
            SAME_BITS(i / 4, got[i], (uint8_t)(want));                                                                 \
    } while (0)
TEST(v_join_halves) {
    uint8_t p[4 * VL], q[4 * VL];
    random_bytes(p, sizeof p), random_bytes(q, sizeof q);
    for (int upper = 0; upper < 2; upper++)
        EACH_BYTE_IS(v_join_halves(v_load_words(p), v_load_words(q), upper),
                     (i < 2 * VL ? p : q)[upper * 2 * VL + i % (2 * VL)]);
}
TEST(v_quads) {
    uint8_t p[4 * VL];
    random_bytes(p, sizeof p);
#define BYTE_OF_QUAD p[i % 4 / 2 * 2 * VL + i / 4 * 2 + i % 2]
    EACH_BYTE_IS(v_quads(0, v_load_words(p)), BYTE_OF_QUAD);
    EACH_BYTE_IS(v_quads(1, v_load_words(p)), BYTE_OF_QUAD & 128 ? -(BYTE_OF_QUAD & 127) : BYTE_OF_QUAD);
}
TEST(v_nibbles) {
    uint8_t p[4 * VL];
    random_bytes(p, sizeof p);
    EACH_BYTE_IS(v_nibbles(v_load_words(p), 0), (p[i] & 15) - 8);
    EACH_BYTE_IS(v_nibbles(v_load_words(p), 1), (p[i] >> 4) - 8);
}
TEST(v_put_digits) {
    int32_t x[4 * VL];
    int8_t high[4 * VL], low[4 * VL];
    vi v[4];
    for (int i = 0; i < 4 * VL; i++)
        x[i] = i == 0 ? 32639 : i == 1 ? -32639 : (int32_t)(random_bits() % 65279) - 32639;
    for (int i = 0; i < 4; i++)
        v[i] = v_load_words(x + i * VL);
    v_put_digits(high, low, v);
    for (int i = 0; i < 4 * VL; i++)
        SAME_BITS(i % VL, 256 * high[i] + low[i], x[i]);
}
TEST(v_keep_bits) {
    VECTORS(any_number)
    const uint32_t bits = random_bits();
    EACH_IS(v_keep_bits(a, bits), bits >> i & 1 ? A[i] : -INFINITY);
}
TEST(v_hmax_of_each) {
    vf v[VL];
    float want[VL];
    LANES(j) {
        fill(A, finite_number);
        v[j] = v_load_f32(A);
        want[j] = v_hmax(v[j]);
    }
    EACH_IS(v_hmax_of_each(v), want[i]);
}
TEST(v_keep_or_0) {
    VECTORS(any_number)
    const uint32_t bits = random_bits();
    EACH_IS(v_keep_or_0(a, bits), bits >> i & 1 ? A[i] : 0);
}
TEST(v_high) {
    VECTORS(finite_number)
    EACH_IS(v_high(a), (float)value_of((uint16_t)(bits_of(A[i]) >> 16), BF16));
}
TEST(v_rest) {
    VECTORS(finite_number)
    EACH_IS(v_rest(a), A[i] - value_of((uint16_t)(bits_of(A[i]) >> 16), BF16));
}
/* The smallest number but 0 is the most of what is negated. */
TEST(v_bottom) {
    VECTORS(finite_number)
    uint32_t want = 0;
    LANES(i) {
        A[i] = fabsf(A[i]);
        B[i] = random_bits() % 4 ? fabsf(B[i]) : 0;
        want = -bits_of(A[i]) > want ? -bits_of(A[i]) : want;
        want = -bits_of(B[i]) > want ? -bits_of(B[i]) : want;
    }
    vi bottom = v_set1_int(0);
    bottom = v_bottom(v_bottom(bottom, v_load_f32(A)), v_load_f32(B));
    SAME_BITS(0, v_htop(bottom), want);
}
TEST(v_load_sixteenths) {
    const v_sixteenths c = v_load_sixteenths(1, V_WHOLE - 1000);
    vf top = v_set1(0);
    LANES(i) A[i] = (float)(16 * i - 160);
    const float *got = lanes_of(v_sixteenth_powers(1, 0, &c, v_load_f32(A), v_set1(V_WHOLE), 0, &top));
    LANES(i) SAME_BITS(i, bits_of(got[i]), bits_of(exp2f((float)(i - 10))));
}
TEST(v_sixteenth_powers) {
    const float scale = between(0.1f, 30), least = V_WHOLE - 16 * 100, offset = rintf(between(-500, 500));
    const v_sixteenths c = v_load_sixteenths(scale, least);
    const uint32_t seen = random_bits();
    float most = V_WHOLE - 5000;
    LANES(i) A[i] = i == 3 ? -1e30f : between(-1500, 1000) / scale;
    for (int kind = 0; kind < 4; kind++) {
        const int cubic = kind % 2, masked = kind / 2;
        vf top = v_set1(most);
        float got[VL];
        const vf start = v_set1(V_WHOLE + offset);
        memcpy(got, lanes_of(v_sixteenth_powers(cubic, masked, &c, v_load_f32(A), start, seen, &top)), sizeof got);
        float want_top = most;
        LANES(i) {
            const float t = fmaf(A[i], scale, V_WHOLE + offset);
            const double want =
                (!masked || seen >> i & 1) && t > least ? exp2(((double)A[i] * scale + offset) / 16) : 0;
            check(fabs(got[i] - want) <= (cubic ? 3e-7 : 4e-6) * want, i, got[i], want);
            want_top = !masked || seen >> i & 1 ? fmaxf(want_top, t) : want_top;
        }
        SAME_BITS(0, bits_of(v_hmax(top)), bits_of(want_top));
    }
}
TEST(v_bf16_of) {
    VECTORS(any_number)
    EACH_WORD_IS(v_bf16_of(a, b), ELEMENT(i) != ELEMENT(i) ? got[i] : rounded_to(ELEMENT(i), BF16));
}
TEST(v_stream_pairs) {
    WORDS
    uint16_t *p = target();
    v_stream_pairs(p, x);
    for (int i = 0; i < 2 * VL; i++)
        SAME_BITS(i, p[i], X[i]);
    nothing_written_from(p, VL * 4);
}
#endif

/* ---- quantised elements and rows in registers ---- */

#ifdef V_QUANTISED_PAIRS
/* Makes the table of 128 words as v_table has it: all low bytes, then all high ones. */
static v_table table_of_bytes(uint16_t *table) {
    uint8_t bytes[256];
    random_table(table, 128);
    for (int i = 0; i < 128; i++)
        bytes[i] = (uint8_t)table[i], bytes[128 + i] = (uint8_t)(table[i] >> 8);
    return v_load_table(4, bytes);
}
static v_table table_of_halves(uint16_t *table) {
    random_table(table, 16);
    memcpy(table + 16, table, 32);
    return v_load_table(1, table);
}
#define HALF_OF(byte, half) ((half) ? (byte) >> 4 : (byte) & 15)
TEST(v_load_table) {
    uint8_t bytes[256], got[256];
    random_bytes(bytes, sizeof bytes);
    const v_table t = v_load_table(4, bytes), one = v_load_table(1, bytes);
    memcpy(got, &t, sizeof got);
    SAME_BITS(0, memcmp(got, bytes, sizeof got), 0);
    SAME_BITS(0, memcmp(&one, bytes, 64), 0);
}
TEST(v_quantised_vector) {
    uint16_t table[128];
    const int half = random_bits() % 2;
    uint8_t *p = before_guard(32);
    random_bytes(p, 32);
    v_table t = table_of_bytes(table);
    EACH_WORD_IS(v_quantised_vector(0, p, 0, &t), word_of_byte(table, p[i]));
    t = table_of_halves(table);
    EACH_WORD_IS(v_quantised_vector(1, p, half, &t), table[HALF_OF(p[i], half)]);
}
TEST(v_quantised_pairs) {
    uint16_t table[128];
    vp out[2];
    const int half = random_bits() % 2;
    uint8_t *p = before_guard((size_t)(64 + 64 * half));
    random_bytes(p, (size_t)(64 + 64 * half));
    v_table t = table_of_bytes(table);
    v_quantised_pairs(0, p, half, &t, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], word_of_byte(table, p[64 * half + 32 * j + i]));
    p = before_guard(64);
    t = table_of_halves(table);
    v_quantised_pairs(1, p, half, &t, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], table[HALF_OF(p[32 * j + i], half)]);
}
TEST(v_pairs_of_rows) {
    const int64_t ld = 16 + 2 * (int)(random_bits() % 9);
    uint16_t *src = before_guard((size_t)(15 * ld + 16) * 2);
    vp out[8];
    random_bytes(src, (size_t)(15 * ld + 16) * 2);
    v_pairs_of_rows((const char *)src, ld, out);
    for (int d = 0; d < 8; d++)
        EACH_WORD_IS(out[d], src[i / 2 * ld + 2 * d + i % 2]);
}
TEST(v_quads_of_rows) {
    const int64_t ld = 32 + 4 * (int)(random_bits() % 9);
    uint8_t *src = before_guard((size_t)(15 * ld + 32));
    vp out[8];
    random_bytes(src, (size_t)(15 * ld + 32));
    v_quads_of_rows((const char *)src, ld, out);
    for (int d = 0; d < 8; d++)
        for (int i = 0; i < 64; i++)
            SAME_BITS(i, ((const uint8_t *)words_of(out[d]))[i], src[i / 4 * ld + 4 * d + i % 4]);
}
TEST(v_zip_pairs) {
    uint16_t *a = before_guard(64), b[32];
    vp out[2];
    random_bytes(a, 64), random_bytes(b, sizeof b);
    v_zip_pairs(a, b, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], (i % 2 ? b : a)[16 * j + i / 2]);
    v_zip_pairs(b, a, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], (i % 2 ? a : b)[16 * j + i / 2]);
}
TEST(v_pairs_of_quads) {
    uint16_t table[128];
    uint8_t bytes[64];
    vp x, out[2];
    const v_table t = table_of_bytes(table);
    random_bytes(bytes, sizeof bytes);
    memcpy(&x, bytes, sizeof x);
    v_pairs_of_quads(x, &t, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], word_of_byte(table, bytes[i / 2 * 4 + 2 * j + i % 2]));
}
TEST(v_zip_bytes) {
    uint16_t table[128];
    uint8_t *a = before_guard(32), b[32];
    vp out[2];
    const v_table t = table_of_bytes(table);
    random_bytes(a, 32), random_bytes(b, sizeof b);
    v_zip_bytes(a, b, &t, out);
    for (int j = 0; j < 2; j++)
        EACH_WORD_IS(out[j], word_of_byte(table, (i % 2 ? b : a)[16 * j + i / 2]));
}
#endif
