/* SPDX-License-Identifier: Apache-2.0 */
#include "threads.h"
#include "cpu_attn.h"
#include "common.h"
#include "cpu/float_mode.h"
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static atomic_int num_threads; /* what ca_set_num_threads was told */
static atomic_int cpu_quota = INT_MAX;
static atomic_int forked;

#ifndef _WIN32 /* which has no fork */
static void after_fork(void) { atomic_store(&forked, 1); }

__attribute__((constructor)) static void watch_fork(void) { pthread_atfork(NULL, NULL, after_fork); }
#endif

#ifdef _OPENMP
#define STRING(x) #x
#define TEXT(x) STRING(x)
const char *ca_threading(void) { return "OpenMP " TEXT(_OPENMP); }
/* libgomp keeps 64 bits of OMP_NUM_THREADS and returns the lower 32, so a number below 1 stands for one that no int
 * holds. */
static int openmps_number(void) {
    const int n = omp_get_max_threads();
    return n > 0 ? n : INT_MAX;
}

/* The number is bounded, because libgomp ends the process where the system refuses it a thread. */
static int threads_of(int asked) {
    int n = asked ? abs(asked) : (int)ca_min64(openmps_number(), atomic_load(&cpu_quota));
    return n <= 64 ? n : (int)ca_min64(n, ca_max64(64, 8 * (int64_t)omp_get_num_procs()));
}
#else
const char *ca_threading(void) { return "none: the compiler had no OpenMP"; }
static int threads_of(int asked) {
    (void)asked;
    return 1;
}
#endif

int ca_get_num_threads(void) { return ca_team(threads_of(atomic_load(&num_threads))); }

void ca_set_num_threads(int n) { atomic_store(&num_threads, n); }

void ca_set_cpu_quota(int n) { atomic_store(&cpu_quota, n); }

/* A thread is woken only for so much work. One that still spins costs 4 us, one that sleeps more
 * (kernel/MEASUREMENTS.md: tasks). */
#define NANOSECONDS_OF_A_THREAD 25e3

int64_t ca_threads_for(double nanoseconds) {
    if (atomic_load(&num_threads) < 0)
        return INT32_MAX;
    return (int64_t)fmax(1, fmin(nanoseconds / NANOSECONDS_OF_A_THREAD, INT32_MAX));
}

#if defined(_OPENMP) && defined(__linux__)
static int64_t stack_of_this_thread(void) {
    pthread_attr_t attr;
    void *unused;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attr))
        return INT64_MAX;
    pthread_attr_getstack(&attr, &unused, &size);
    pthread_attr_destroy(&attr);
    return (int64_t)size;
}

int64_t ca_small_stack(int team) {
    static atomic_llong found; /* 0: no call has looked yet */
    if (team <= 1)
        return 0;
    if (!atomic_load_explicit(&found, memory_order_relaxed)) {
        int64_t size = INT64_MAX;
#pragma omp parallel num_threads(2)
        if (omp_get_thread_num() == 1)
            size = stack_of_this_thread();
        atomic_store(&found, size);
    }
    const int64_t size = atomic_load_explicit(&found, memory_order_relaxed);
    return size < CA_STACK_BYTES ? size : 0;
}
#else
int64_t ca_small_stack(int team) {
    (void)team;
    return 0;
}
#endif

int ca_team(int wanted) { return atomic_load(&forked) ? 1 : wanted; }

/* Calls fn in CA_COMPUTING, and gives the thread its own mode back: OpenMP's threads serve the caller's program, too.
 */
static void run_share(ca_team_fn *fn, void *work, int thread, int team) {
    const uint64_t before = ca_get_mode();
    ca_set_mode(CA_COMPUTING);
    fn(work, thread, team);
    ca_set_mode(before);
}

void ca_run_team(int threads, ca_team_fn *fn, void *work) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        run_share(fn, work, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    run_share(fn, work, 0, 1);
}

uint64_t ca_float_mode(void) { return ca_get_mode(); }
void ca_set_float_mode(uint64_t mode) { ca_set_mode(mode); }
uint64_t ca_computing_float_mode(void) { return CA_COMPUTING; }

void ca_wait_for_team(int team) {
    (void)team;
#ifdef _OPENMP
    if (team > 1) { /* else the barrier would be that of a team to which the caller belongs */
#pragma omp barrier
    }
#endif
}
