/* SPDX-License-Identifier: Apache-2.0
 * This engine calls the fused kernel that the plan has from its row of the isa table. */
#include "kernel/kernel.h"

static int rows(const ca_kernel *kernel) { return kernel->info.rows; }

static int64_t scratch_bytes(const ca_plan *plan) { return plan->kernel->scratch_bytes(plan); }

static int segment(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int num_heads,
                   int64_t k0, int64_t k1, const ca_state *states, void *scratch) {
    return plan->kernel->segment(plan, call, task, kv_head, num_heads, k0, k1, states, scratch);
}

static const ca_engine engine = {rows, scratch_bytes, segment, 1};

const ca_engine *ca_fused_engine(void) { return &engine; }
