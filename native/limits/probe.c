/* SPDX-License-Identifier: Apache-2.0
 * This file measures the limits of this machine for `cpu-attn bench`: products from registers, reads and copies, on any
 * number of threads. build_ffi.py writes probe_list.h of the files of native/limits/probe, as it writes isa_list.h. */
#include "common.h"
#include "probe.h"
#include "probe_list.h"
#include "run/threads.h"
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define PROBE(name, unit) extern const ca_probe_row ca_probe_##name;
CA_PROBE_LIST
#undef PROBE

static const struct {
    const char *name, *unit;
    const ca_probe_row *row;
} rows[] = {
#define PROBE(name, unit) {#name, unit, &ca_probe_##name},
    CA_PROBE_LIST
#undef PROBE
};
static const struct {
    const char *name, *unit, *reason;
} absent[] = {
#define ABSENT(name, unit, reason) {#name, unit, reason},
    CA_PROBE_ABSENT
#undef ABSENT
    {NULL, NULL, NULL}};

#define NUM_ROWS ((int)(sizeof rows / sizeof rows[0]))
#define NUM_ABSENT ((int)(sizeof absent / sizeof absent[0]) - 1)
#define ROUNDS 2000 /* between two looks at the clock there are some 10 microseconds */

int ca_probe(int i, ca_probe_info *out) {
    if (i < 0 || i >= NUM_ROWS + NUM_ABSENT)
        return 0;
    *out = (ca_probe_info){.isa = "", .what = ""};
    if (i >= NUM_ROWS) {
        out->name = absent[i - NUM_ROWS].name;
        out->unit = absent[i - NUM_ROWS].unit;
        out->reason = absent[i - NUM_ROWS].reason;
        return 1;
    }
    const ca_probe_row *row = rows[i].row;
    const char *missing = row->missing();
    out->name = rows[i].name;
    out->unit = rows[i].unit;
    out->isa = row->isa;
    out->what = row->what;
    out->dtypes = row->dtypes;
    out->supported = missing == NULL;
    out->reason = missing ? missing : "";
    return 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fill(ca_probe_data *data) {
    uint64_t x = 0x9e3779b97f4a7c15u; /* this is xorshift64 (Marsaglia 2003) */
    for (int i = 0; i < 1024; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint32_t bits = ((uint32_t)(x >> 32) & 0x807fffffu) | 0x3f000000u;
        memcpy(&data->f32[i], &bits, 4);
        data->bf16[2 * i] = (uint16_t)((x & 0x807f) | 0x3f00);
        data->bf16[2 * i + 1] = (uint16_t)((x >> 16 & 0x807f) | 0x3f00);
    }
}

static double rate(const ca_probe_row *row, const ca_probe_data *data, double seconds) {
    volatile float sink = 0;
    int64_t rounds = 0;
    double start = now(), passed;
    do {
        sink = row->compute(data, ROUNDS);
        rounds += ROUNDS;
    } while ((passed = now() - start) < seconds);
    (void)sink;
    return (double)rounds * row->flops / passed;
}

double ca_probe_gflops(int probe, int threads, double seconds) {
    if (probe < 0 || probe >= NUM_ROWS || rows[probe].row->missing())
        return 0;
    const ca_probe_row *row = rows[probe].row;
    double total = 0;
    ca_probe_data data;
    fill(&data);
#ifdef _OPENMP
#pragma omp parallel num_threads(ca_team(threads)) reduction(+ : total)
    {
#pragma omp barrier
        total = rate(row, &data, seconds);
    }
#else
    (void)threads;
    total = rate(row, &data, seconds);
#endif
    return total * 1e-9;
}

/* Pieces are small enough that no thread waits long for another, and large enough for the hardware's prefetchers. */
static int64_t piece(int64_t bytes, int threads) {
    return ca_max64(512, ca_min64(256 * 1024, bytes / (16 * ca_max64(1, threads))) & ~(int64_t)511);
}

double ca_probe_read_gbps(const void *data, int64_t bytes, int threads) {
    const ca_probe_row *row = NULL;
    for (int i = 0; i < NUM_ROWS && !row; i++)
        if (rows[i].row->read && !rows[i].row->missing())
            row = rows[i].row;
    int64_t size = piece(bytes, threads), pieces = bytes / size;
    if (!row || !pieces)
        return 0;
    uint64_t sum = 0;
    double start = now();
#ifdef _OPENMP
#pragma omp parallel for num_threads(ca_team(threads)) schedule(dynamic) reduction(+ : sum)
#endif
    for (int64_t i = 0; i < pieces; i++)
        sum += row->read((const char *)data + i * size, size);
    double passed = now() - start;
    volatile uint64_t sink = sum;
    (void)sink;
    return (double)(size * pieces) * 1e-9 / passed;
}

double ca_probe_copy_gbps(void *dst, const void *src, int64_t bytes, int threads) {
    int64_t size = piece(bytes, threads), pieces = bytes / size;
    if (!pieces)
        return 0;
    double start = now();
#ifdef _OPENMP
#pragma omp parallel for num_threads(ca_team(threads)) schedule(dynamic)
#endif
    for (int64_t i = 0; i < pieces; i++)
        memcpy((char *)dst + i * size, (const char *)src + i * size, (size_t)size);
    return (double)(size * pieces) * 1e-9 / (now() - start);
}
