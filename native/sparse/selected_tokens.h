/* SPDX-License-Identifier: Apache-2.0
 * These functions attend the keys that a query token selects (selected_tokens). */
#ifndef CPU_ATTN_SELECTED_TOKENS_H
#define CPU_ATTN_SELECTED_TOKENS_H
#include "run/engine.h"

/* Returns the scratch that ca_attend_selected needs, that of the engine included. */
int64_t ca_selected_bytes(const ca_plan *plan);

/* Computes the state of a task's one query token over a segment of the keys that it selects and sees. Returns 1, 0
 * where there is no such key, or the engine's status, negated, where it fails. */
int ca_attend_selected(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t segment,
                       const ca_state *state, void *scratch);
#endif
