/* SPDX-License-Identifier: Apache-2.0
 * This file knows where threads run and decides where memory lies, by NUMA node. Linux takes a page from the memory of
 * the node that the policy of its range names (mbind, get_mempolicy: linux/Documentation/admin-guide/mm/
 * numa_memory_policy.rst). A policy holds in children of fork() and for huge pages alike, which placing pages by
 * touching them does not. */
#include "nodes.h"
#include "cpu_attn.h"
#include <errno.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static int8_t node_of_cpu[CA_CPUS];

void ca_set_cpu_nodes(const int32_t *nodes, int32_t n) {
    for (int32_t cpu = 0; cpu < CA_CPUS; cpu++)
        node_of_cpu[cpu] = cpu < n && nodes[cpu] >= 0 && nodes[cpu] < CA_NODES ? (int8_t)nodes[cpu] : 0;
}

#ifdef __linux__
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static int cpu_here(void) { return sched_getcpu(); }

/* Masks of nodes have as many bits as Linux ever has nodes (CONFIG_NODES_SHIFT is 10 at most), and the system calls
 * take one bit less than they are told. */
#define WORDS (1024 / (8 * sizeof(unsigned long)))
#define BITS (1024 + 1)

int ca_memory_nodes(uint64_t *nodes) {
    unsigned long allowed[WORDS] = {0}, bound[WORDS] = {0}, above = 0;
    int policy;
    if (syscall(SYS_get_mempolicy, NULL, allowed, BITS, NULL, MPOL_F_MEMS_ALLOWED) ||
        syscall(SYS_get_mempolicy, &policy, bound, BITS, NULL, 0))
        return errno;
    for (size_t i = 0; i < WORDS; i++) {
        if ((policy & ~MPOL_MODE_FLAGS) == MPOL_BIND)
            allowed[i] &= bound[i];
        above |= i * 8 * sizeof *allowed < CA_NODES ? 0 : allowed[i];
    }
    *nodes = 0;
    for (int i = 0; i < CA_NODES; i++)
        *nodes |= (uint64_t)(allowed[i / (8 * sizeof *allowed)] >> i % (8 * sizeof *allowed) & 1) << i;
    return above ? ERANGE : 0;
}

int ca_place(uintptr_t address, int64_t bytes, int32_t interleave, uint64_t nodes) {
    unsigned long mask[WORDS] = {0};
    for (int i = 0; i < CA_NODES; i++)
        mask[i / (8 * sizeof *mask)] |= (unsigned long)(nodes >> i & 1) << i % (8 * sizeof *mask);
    return syscall(SYS_mbind, address, bytes, interleave ? MPOL_INTERLEAVE : MPOL_PREFERRED, mask, BITS, 0) ? errno : 0;
}
#else
static int cpu_here(void) { return -1; }

int ca_memory_nodes(uint64_t *nodes) {
    (void)nodes;
    return ENOSYS;
}

int ca_place(uintptr_t address, int64_t bytes, int32_t interleave, uint64_t nodes) {
    (void)address, (void)bytes, (void)interleave, (void)nodes;
    return ENOSYS;
}
#endif

int ca_node_here(void) {
    const int cpu = cpu_here();
    return cpu >= 0 && cpu < CA_CPUS ? node_of_cpu[cpu] : 0;
}

#ifdef _OPENMP
int ca_place_cpus(uint8_t *cpus) {
    const int places = omp_get_num_places();
    int here[CA_CPUS];
    for (int i = 0; i < places; i++) {
        const int n = omp_get_place_num_procs(i);
        if (n > CA_CPUS)
            continue;
        omp_get_place_proc_ids(i, here);
        for (int j = 0; j < n; j++)
            if (here[j] >= 0 && here[j] < CA_CPUS)
                cpus[here[j]] = 1;
    }
    return places;
}

void ca_thread_cpus(int32_t *cpus, int32_t n) {
#pragma omp parallel num_threads(n) if (n > 1)
    cpus[omp_get_thread_num()] = cpu_here();
}
#else
int ca_place_cpus(uint8_t *cpus) {
    (void)cpus;
    return 0;
}

void ca_thread_cpus(int32_t *cpus, int32_t n) {
    (void)n;
    cpus[0] = cpu_here();
}
#endif
