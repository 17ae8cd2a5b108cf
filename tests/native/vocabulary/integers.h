/* SPDX-License-Identifier: Apache-2.0
 * These are the words of files that multiply integers. */
#ifdef INTEGERS
static int16_t S[2 * VL], T[2 * VL];
static int32_t M[VL], N[VL];
static vi vector_of(const void *at) {
    vi x;
    memcpy(&x, at, sizeof x);
    return x;
}
static const int32_t *integers_of(vi x) {
    static int32_t lanes[VL];
    memcpy(lanes, &x, sizeof lanes);
    return lanes;
}
#define EACH_INTEGER_IS(x, want)                                                                                       \
    do {                                                                                                               \
        const int32_t *got = integers_of(x);                                                                           \
        LANES(i) SAME_BITS(i, got[i], (int32_t)(want));                                                                \
    } while (0)
#define EACH_INT16_IS(x, want)                                                                                         \
    do {                                                                                                               \
        const int16_t *got = (const int16_t *)integers_of(x);                                                          \
        for (int i = 0; i < 2 * VL; i++)                                                                               \
            SAME_BITS(i, got[i], (int16_t)(want));                                                                     \
    } while (0)
#define INTEGER_VECTORS                                                                                                \
    random_bytes(S, sizeof S), random_bytes(T, sizeof T), random_bytes(M, sizeof M), random_bytes(N, sizeof N);

TEST(v_set1_int) {
    const int32_t x = (int32_t)random_bits();
    EACH_INTEGER_IS(v_set1_int(x), x);
}
TEST(v_set1_words) {
    int16_t *p = before_guard(4);
    random_bytes(p, 4);
    EACH_INT16_IS(v_set1_words(p), p[i % 2]);
}
TEST(v_dot_words) {
    INTEGER_VECTORS
    EACH_INTEGER_IS(v_dot_words(vector_of(M), vector_of(S), vector_of(T)),
                    (uint32_t)M[i] + (uint32_t)(S[2 * i] * T[2 * i]) + (uint32_t)(S[2 * i + 1] * T[2 * i + 1]));
}
TEST(v_hsum_int) {
    INTEGER_VECTORS
    uint32_t want = 0;
    LANES(i) want += (uint32_t)M[i];
    SAME_BITS(0, v_hsum_int(vector_of(M)), (int32_t)want);
}
TEST(v_float) {
    INTEGER_VECTORS
    EACH_IS(v_float(vector_of(M)), (float)M[i]);
}
TEST(v_integers) {
    LANES(i) A[i] = random_bits() % 4 ? between(0, 32767) : (float)(random_bits() % 65534) / 2;
    const int32_t *got = integers_of(v_integers(v_load_f32(A)));
    LANES(i) check(fabs(got[i] - (double)A[i]) <= 0.5, i, got[i], rintf(A[i]));
}
TEST(v_bytes) {
    uint8_t *p = before_guard(2 * VL);
    random_bytes(p, 2 * VL);
    EACH_INT16_IS(v_bytes(p), p[i]);
}
TEST(v_int8) {
    uint8_t p[2 * VL];
    random_bytes(p, sizeof p);
    EACH_INT16_IS(v_int8(v_bytes(p)), p[i] & 128 ? -(p[i] & 127) : p[i]);
}
TEST(v_halves_of_bytes) {
    uint8_t p[2 * VL];
    random_bytes(p, sizeof p);
    EACH_INT16_IS(v_halves_of_bytes(v_bytes(p), 0), p[i] & 15);
    EACH_INT16_IS(v_halves_of_bytes(v_bytes(p), 1), p[i] >> 4);
}
TEST(v_and) {
    INTEGER_VECTORS
    EACH_INTEGER_IS(v_and(vector_of(M), vector_of(N)), M[i] & N[i]);
}
TEST(v_pack_words) {
    LANES(i) M[i] = (int16_t)random_bits(), N[i] = (int16_t)random_bits();
    EACH_INT16_IS(v_pack_words(vector_of(M), vector_of(N)), (i % 8 < 4 ? M : N)[i / 8 * 4 + i % 4]);
}
TEST(v_pair_words) {
    INTEGER_VECTORS
    EACH_INT16_IS(v_pair_words(vector_of(M), vector_of(N)), (i % 2 ? N : M)[i / 2]);
}
TEST(v_sqrt) {
    LANES(i) A[i] = fabsf(between(0, 1e4f));
    EACH_IS(v_sqrt(v_load_f32(A)), sqrtf(A[i]));
}
TEST(v_load_words) {
    int16_t *p = before_guard(4 * VL);
    random_bytes(p, 4 * VL);
    EACH_INT16_IS(v_load_words(p), p[i]);
}
TEST(v_store_words) {
    INTEGER_VECTORS
    int16_t *p = target();
    v_store_words(p, vector_of(S));
    SAME_BITS(0, memcmp(p, S, sizeof S), 0);
    nothing_written_from(p, sizeof S);
}
TEST(v_mul_unless_0) {
    VECTORS(any_number)
    EACH_IS(v_mul_unless_0(a, b), A[i] == 0 ? 0 : A[i] * B[i]);
}
static uint32_t size_of(float x) { return bits_of(x) & 0x7fffffff; }
TEST(v_top) {
    VECTORS(any_number)
    const vi first = v_top(v_set1_int(0), v_abs(a));
    EACH_INTEGER_IS(v_top(first, v_abs(b)), size_of(A[i]) > size_of(B[i]) ? size_of(A[i]) : size_of(B[i]));
}
TEST(v_htop) {
    VECTORS(any_number)
    uint32_t want = 0;
    LANES(i) want = size_of(A[i]) > want ? size_of(A[i]) : want;
    SAME_BITS(0, v_htop(v_top(v_set1_int(0), v_abs(a))), want);
}
#endif
