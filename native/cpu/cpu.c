/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu.h"
#include "cpu/system.h"
#include <string.h>

static const char *const feature_names[] = {
#define X(name) #name,
    CA_FEATURES(X)
#undef X
};

#if defined(__x86_64__)
#include <cpuid.h>

/* XCR0 has a bit for each state that the operating system saves on a context switch (Intel SDM vol. 1, 13.3). */
#define XCR0_AVX 0x6u
#define XCR0_AVX512 0xe6u
#define XCR0_AMX 0x60000u

static uint64_t saved_state(void) {
    uint32_t a, d, regs[4];
    if (!__get_cpuid(1, regs, regs + 1, regs + 2, regs + 3) || !(regs[2] >> 27 & 1))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

static int saved(uint64_t xcr0, uint64_t mask) { return (xcr0 & mask) == mask; }

static void read_features(int8_t *has) {
    uint32_t a, b, c, d;
    uint64_t xcr0 = saved_state();
    int avx = saved(xcr0, XCR0_AVX), avx512 = saved(xcr0, XCR0_AVX512), amx = saved(xcr0, XCR0_AMX);
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        has[CA_HAS_avx] = avx && c >> 28 & 1;
        has[CA_HAS_fma] = avx && c >> 12 & 1;
        has[CA_HAS_f16c] = avx && c >> 29 & 1;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        has[CA_HAS_avx2] = avx && b >> 5 & 1;
        has[CA_HAS_avx512f] = avx512 && b >> 16 & 1;
        has[CA_HAS_avx512dq] = avx512 && b >> 17 & 1;
        has[CA_HAS_avx512bw] = avx512 && b >> 30 & 1;
        has[CA_HAS_avx512vl] = avx512 && b >> 31 & 1;
        has[CA_HAS_avx512vbmi] = avx512 && c >> 1 & 1;
        has[CA_HAS_avx512_vnni] = avx512 && c >> 11 & 1;
        has[CA_HAS_avx512_fp16] = avx512 && d >> 23 & 1;
        has[CA_HAS_amx_bf16] = amx && d >> 22 & 1;
        has[CA_HAS_amx_tile] = amx && d >> 24 & 1;
        has[CA_HAS_amx_int8] = amx && d >> 25 & 1;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            has[CA_HAS_avx_vnni] = avx && a >> 4 & 1;
            has[CA_HAS_avx512_bf16] = avx512 && a >> 5 & 1;
            has[CA_HAS_amx_fp16] = amx && a >> 21 & 1;
        }
    }
}

static void read_identity(ca_cpu_info *out) {
    uint32_t a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d)) {
        memcpy(out->vendor, &b, 4);
        memcpy(out->vendor + 4, &d, 4);
        memcpy(out->vendor + 8, &c, 4);
    }
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        out->family = (a >> 8 & 15) == 15 ? 15 + (int)(a >> 20 & 255) : (int)(a >> 8 & 15);
        out->model = (int)(a >> 4 & 15) | (int)(a >> 16 & 15) << 4;
        out->stepping = a & 15;
    }
    for (unsigned i = 0; i < 3; i++) {
        uint32_t part[4];
        if (__get_cpuid(0x80000002u + i, part, part + 1, part + 2, part + 3))
            memcpy(out->brand + 16 * i, part, 16);
    }
}
#elif defined(__aarch64__)
static void read_features(int8_t *has) {
    unsigned long hwcaps[2];
    ca_system_hwcaps(hwcaps);
    has[CA_HAS_neon] = hwcaps[0] >> 1 & 1;
    has[CA_HAS_sve] = hwcaps[0] >> 22 & 1;
    has[CA_HAS_fhm] = hwcaps[0] >> 23 & 1;
    has[CA_HAS_i8mm] = hwcaps[1] >> 13 & 1;
    has[CA_HAS_bf16_arm] = hwcaps[1] >> 14 & 1;
}
static void read_identity(ca_cpu_info *out) { strcpy(out->vendor, "ARM"); }
#else
static void read_features(int8_t *has) { (void)has; }
static void read_identity(ca_cpu_info *out) { (void)out; }
#endif

int ca_cpu_feature(int i, const char **name) {
    int8_t has[CA_NUM_FEATURES] = {0};
    if (i < 0 || i >= CA_NUM_FEATURES)
        return -1;
    read_features(has);
    *name = feature_names[i];
    return has[i];
}

const char *ca_cpu_missing(const int *features) {
    int8_t has[CA_NUM_FEATURES] = {0};
    read_features(has);
    for (; *features >= 0; features++)
        if (!has[*features])
            return feature_names[*features];
    return NULL;
}

int ca_cpu_is(const char *vendor) {
    ca_cpu_info id = {0};
    read_identity(&id);
    return strcmp(id.vendor, vendor) == 0;
}

int ca_cpu_intel, ca_cpu_vnni;

__attribute__((constructor)) static void look(void) {
    ca_cpu_intel = ca_cpu_is("GenuineIntel");
    ca_cpu_vnni = !CA_CPU_MISSING(CA_HAS_avx512_vnni);
}

int ca_cpu_amx_permission(const char **reason) {
    *reason = "this CPU or its operating system has no AMX";
    if (CA_CPU_MISSING(CA_HAS_amx_tile))
        return -1;
    const char *refused = ca_system_refuses_tiles();
    *reason = refused ? refused : "";
    return !refused;
}

void ca_cpu(ca_cpu_info *out) {
    memset(out, 0, sizeof *out);
    read_identity(out);
    ca_system_describe(out);
    out->amx_permission = ca_cpu_amx_permission(&out->amx_reason);
}
