/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/system.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#if !defined(_WIN32)
#include <sys/mman.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32)
#include <malloc.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>

/* Returns 1 where the system says that the CPU has a feature of Arm's, else 0. */
static unsigned long offers(const char *feature) {
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname(feature, &there, &size, NULL, 0) == 0 && there;
}
#endif

/* The numbers are those of AT_HWCAP and AT_HWCAP2 (Linux, Documentation/arch/arm64/elf_hwcaps.rst). Other systems for
 * aarch64 take Advanced SIMD, its second bit, for granted. */
void ca_system_hwcaps(unsigned long hwcaps[2]) {
#if defined(__linux__)
    hwcaps[0] = getauxval(16);
    hwcaps[1] = getauxval(26);
#else
    hwcaps[0] = 2;
    hwcaps[1] = 0;
#endif
#if defined(__APPLE__)
    hwcaps[0] |= offers("hw.optional.arm.FEAT_FHM") << 23;
    hwcaps[1] = offers("hw.optional.arm.FEAT_I8MM") << 13 | offers("hw.optional.arm.FEAT_BF16") << 14;
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
        if (kib < 0 || kib > INT32_MAX)
            continue;
        if (level == 1 && type[0] == 'D')
            out->l1d = kib * 1024;
        if (level == 2)
            out->l2 = kib * 1024;
        if (level == 3)
            out->l3 = kib * 1024;
    }
}

void ca_system_describe(ca_cpu_info *out) {
    read_caches(out);
    out->cpus = 1;
#if defined(__linux__)
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        online = CPU_COUNT(&set);
    out->cpus = online > 0 ? (int32_t)online : 1;
#endif
}

const char *ca_system_refuses_tiles(void) {
#if defined(__linux__) && defined(__x86_64__)
    /* This is ARCH_REQ_XCOMP_PERM for XTILEDATA (Linux, Documentation/arch/x86/xstate.rst). */
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0)
        return NULL;
    return "the kernel refused AMX tile state (arch_prctl ARCH_REQ_XCOMP_PERM)";
#else
    return "AMX permission is only known how to ask for on Linux";
#endif
}

#define LINE 64
#if defined(_WIN32)
void *ca_aligned_alloc(int64_t bytes) { return _aligned_malloc((size_t)bytes, LINE); }
void ca_aligned_free(void *memory) { _aligned_free(memory); }
#else
void *ca_aligned_alloc(int64_t bytes) { return aligned_alloc(LINE, ((size_t)bytes + LINE - 1) / LINE * LINE); }
void ca_aligned_free(void *memory) { free(memory); }
#endif

#if defined(_WIN32)
int ca_map(uintptr_t address, int64_t bytes, int fd, int64_t offset) {
    (void)address, (void)bytes, (void)fd, (void)offset;
    return ENOSYS;
}

int ca_no_reserve(void) { return 0; }
#else
static int map_pages(uintptr_t address, int64_t bytes, int fd, int64_t offset) {
    const int zeros = fd < 0 ? MAP_ANON : 0, flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | zeros;
    return mmap((void *)address, (size_t)bytes, PROT_READ | PROT_WRITE, flags, fd, offset) == MAP_FAILED ? errno : 0;
}

/* A call that fails may have removed what was there, and a hole would be a fault for whoever reads it. */
int ca_map(uintptr_t address, int64_t bytes, int fd, int64_t offset) {
    const int failed = map_pages(address, bytes, fd, offset);
    if (failed)
        map_pages(address, bytes, -1, 0);
    return failed;
}

int ca_no_reserve(void) { return MAP_NORESERVE; }
#endif

int ca_read_pages(uintptr_t address, int64_t bytes) {
#if defined(MADV_POPULATE_READ) /* Linux 5.14 */
    return madvise((void *)address, (size_t)bytes, MADV_POPULATE_READ) ? errno : 0;
#else
    (void)address, (void)bytes;
    return ENOSYS;
#endif
}
