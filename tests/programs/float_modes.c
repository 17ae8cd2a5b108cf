/* SPDX-License-Identifier: Apache-2.0
 * This library tells how OpenMP's threads compute with floats: test_float_mode.py compiles it. */
#include "cpu/float_mode.h"
#include <omp.h>

void float_modes(int threads, uint64_t *modes) {
#pragma omp parallel num_threads(threads)
    modes[omp_get_thread_num()] = ca_get_mode();
}
