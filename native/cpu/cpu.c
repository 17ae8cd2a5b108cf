/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu.h"
#include <stdio.h>
#include <string.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
#include <sys/auxv.h>

/* The numbers are those of AT_HWCAP (16), AT_HWCAP2 (26) and their bits (Linux,
 * Documentation/arch/arm64/elf_hwcaps.rst). */
static void read_features(int8_t *has) {
    unsigned long cap = getauxval(16), cap2 = getauxval(26);
    has[CA_HAS_neon] = cap >> 1 & 1;
    has[CA_HAS_sve] = cap >> 22 & 1;
    has[CA_HAS_i8mm] = cap2 >> 13 & 1;
    has[CA_HAS_bf16_arm] = cap2 >> 14 & 1;
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
#if defined(__linux__) && defined(__x86_64__)
    /* This is ARCH_REQ_XCOMP_PERM for XTILEDATA (Linux, Documentation/arch/x86/xstate.rst). */
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
        *reason = "";
        return 1;
    }
    *reason = "the kernel refused AMX tile state (arch_prctl ARCH_REQ_XCOMP_PERM)";
    return 0;
#else
    *reason = "AMX permission is only known how to ask for on Linux";
    return 0;
#endif
}

/* Linux describes every level in sysfs, whatever the vendor. */
static void read_caches(ca_cpu_info *out) {
    for (int i = 0; i < 8; i++) {
        char path[96], type[16] = "";
        int level = 0;
        long kib = 0;
        FILE *f;
#define READ(leaf, ...)                                                                                                \
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/" leaf, i);                                \
    if (!(f = fopen(path, "r")))                                                                                       \
        continue;                                                                                                      \
    if (fscanf(f, __VA_ARGS__) != 1)                                                                                   \
        level = -1;                                                                                                    \
    fclose(f);
        READ("level", "%d", &level)
        READ("type", "%15s", type)
        READ("size", "%ldK", &kib)
#undef READ
        if (level == 1 && type[0] == 'D')
            out->l1d = kib * 1024;
        if (level == 2)
            out->l2 = kib * 1024;
        if (level == 3)
            out->l3 = kib * 1024;
    }
}

void ca_cpu(ca_cpu_info *out) {
    memset(out, 0, sizeof *out);
    read_identity(out);
    read_caches(out);
    out->amx_permission = ca_cpu_amx_permission(&out->amx_reason);
    out->cpus = 1;
#if defined(__linux__)
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        online = CPU_COUNT(&set);
    out->cpus = online > 0 ? (int32_t)online : 1;
#endif
}
