/* SPDX-License-Identifier: Apache-2.0
 * Here are the list of tests, the numbers that they draw, and the memory that words read and write. */
/* ---- the tests ---- */

typedef struct test {
    const char *word;
    void (*run)(void);
} test;
static test tests[256];
static int num_tests, trial, failed;

#define TEST(name)                                                                                                     \
    static void test_##name(void);                                                                                     \
    __attribute__((constructor)) static void add_##name(void) { tests[num_tests++] = (test){#name, test_##name}; }     \
    static void test_##name(void)
/* Prints the first lane that is wrong. */
static void check(int right, int lane, double got, double want) {
    if (!right && !failed++)
        printf("lane %d of trial %d is %.9g, not %.9g\n", lane, trial, got, want);
}
#define SAME_BITS(lane, got, want) check((got) == (want), lane, (double)(got), (double)(want))
#define LANES(i) for (int i = 0; i < VL; i++)

/* ---- numbers ---- */

static uint64_t state = 88172645463325252u;
static uint32_t random_bits(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
/* Returns a number in [low, high). */
static float between(double low, double high) { return (float)(low + (high - low) * (random_bits() / 4294967296.0)); }
static float finite_number(void) { return (float)ldexp(between(-1, 1), (int)(random_bits() % 40) - 20); }
static float any_number(void) {
    const float special[] = {0,          -0.0f,    INFINITY,  -INFINITY, NAN,          1,      -1,
                             0x1p-149f,  -FLT_MIN, 0x1p-140f, 0x1.01p0f, 65519,        65520,  0x1p-25f,
                             0x1.8p-24f, -NAN,     FLT_MAX,   0x1.03p0f, 0x1.002p-14f, -65536, 0x1p-24f};
    const uint32_t kind = random_bits() % 8;
    return kind == 0   ? special[random_bits() % (sizeof special / sizeof *special)]
           : kind == 1 ? float_of(random_bits())
                       : finite_number();
}
static int same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

/* Returns the value of bits of a 16-bit format with so many bits of fraction, and the bits of a value, rounded to
 * nearest even. They define binary16 and bfloat16 by arithmetic alone. */
static double value_of(uint16_t h, int fraction) {
    const int most = (1 << (15 - fraction)) - 1, exponent = h >> fraction & most, bias = most / 2;
    const int rest = h & ((1 << fraction) - 1);
    const double size = exponent == most ? (rest ? NAN : INFINITY)
                        : exponent       ? ldexp((1 << fraction) + rest, exponent - bias - fraction)
                                         : ldexp(rest, 1 - bias - fraction);
    return h & 0x8000 ? -size : size;
}
static uint16_t rounded_to(float x, int fraction) {
    const int most = (1 << (15 - fraction)) - 1, bias = most / 2;
    const uint16_t sign = (uint16_t)(signbit(x) ? 0x8000 : 0);
    int exponent;
    if (isinf(x) || x == 0)
        return (uint16_t)(sign | (x == 0 ? 0 : most << fraction));
    frexp(fabs(x), &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    /* In units of the last place; a subnormal lacks the leading bit, and so does not add 1 to the exponent. */
    const double units = nearbyint(ldexp(fabs(x), fraction - exponent));
    const double bits = units + ldexp(exponent + bias - 1, fraction);
    return (uint16_t)(sign | (int)fmin(bits, most << fraction));
}
enum { F16 = 10, BF16 = 7 };
static int right_16_bits(uint16_t got, float x, int fraction) {
    return x != x ? isnan(value_of(got, fraction)) : got == rounded_to(x, fraction);
}

/* ---- memory ---- */

#define MOST 512 /* bytes at most that a word writes at one place */

/* Returns where n bytes begin that end right before a page which cannot be read. */
static void *before_guard(size_t n) {
    static char *guard;
    if (!guard) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        guard = pages + page;
        if (pages == MAP_FAILED || mprotect(guard, page, PROT_NONE))
            exit(2);
    }
    return guard - n;
}
/* Returns memory for a word to write to, none of which is as a word would leave it. */
static void *target(void) {
    static _Alignas(64) uint8_t bytes[MOST];
    memset(bytes, 0xa5, sizeof bytes);
    return bytes;
}
static void nothing_written_from(const void *at, int64_t bytes) {
    for (int64_t i = bytes; i < MOST; i++)
        SAME_BITS((int)i, ((const uint8_t *)at)[i], 0xa5);
}
static float A[16], B[16], C[16];
static void fill(float *x, float (*number)(void)) { LANES(i) x[i] = number(); }
static void random_bytes(void *at, size_t n) {
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)at)[i] = (uint8_t)random_bits();
}
/* Fills A, B and C, and names what a word makes of them. */
#define VECTORS(number)                                                                                                \
    fill(A, number), fill(B, number), fill(C, number);                                                                 \
    const vf a = v_load_f32(A), b = v_load_f32(B), c = v_load_f32(C);                                                  \
    (void)a, (void)b, (void)c;
static const float *lanes_of(vf x) {
    static float lanes[16];
    v_store(lanes, x);
    return lanes;
}
#define EACH_IS(x, want)                                                                                               \
    do {                                                                                                               \
        const float *got = lanes_of(x);                                                                                \
        LANES(i) {                                                                                                     \
            const float expected = (want);                                                                             \
            check(same(got[i], expected), i, got[i], expected);                                                        \
        }                                                                                                              \
    } while (0)
