# SPDX-License-Identifier: Apache-2.0
"""This module copies states from block to block where drafts meet prefix caching (``mamba_cache_mode="align"``).

vLLM says which states those are, and copies them by Triton kernels, which its builds for CPUs do not have. The state
after a request's first token of a step lies in the column of its block table in which the step ends, and the states
after its drafts in the columns behind. Of a convolution only the first of these columns has a state, with an input more
for each draft.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from torch import Tensor

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, is_conv_state_dim_first
from vllm.triton_utils import HAS_TRITON

_THEIRS = "vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext"


class StateCopies:
    """Comes before vLLM's class of what it knows about such states. Tensors whose names end in ``_gpu`` are int32, a
    number for each request of the batch."""

    block_size: int
    mamba_group_ids: list[int]
    num_accepted_tokens_out: Tensor
    is_initialized: bool

    def initialize_from_forward_context(
        self,
        kv_cache_config: Any,
        forward_context: dict[str, Any],
        mamba_state_copy_funcs: Any,
        block_tables: list[Tensor],
        aligned_index_block_tables: Any = None,
    ) -> None:
        """Notes every state, its block table and whether it is that of a convolution. block_tables: int32 [requests of
        this batch, columns], of each group of layers; later batches have theirs in the same memory."""
        self.places = []
        for group, table in zip(self.mamba_group_ids, block_tables, strict=True):
            table = table.as_strided((len(self.num_accepted_tokens_out), table.shape[1]), table.stride())
            for name in kv_cache_config.kv_cache_groups[group].layer_names:
                layer = forward_context[name]
                copied = zip(layer.kv_cache, mamba_state_copy_funcs[layer.mamba_type], strict=False)
                self.places += [(state, table, how is get_conv_copy_spec) for state, how in copied]
        self.is_initialized = True

    def run_fused_precopy(
        self, num_reqs: int, state_idx_gpu: Tensor, src_col_gpu: Tensor, token_bias_gpu: Tensor, idx_mapping: None
    ) -> None:
        """Brings the state from which a request goes on into the column in which its step ends."""
        columns = (x[:num_reqs].tolist() for x in (src_col_gpu, state_idx_gpu, token_bias_gpu))
        for row, (source, target, later) in enumerate(zip(*columns, strict=True)):
            if source >= 0 and source != target:
                self._copy(row, source, target, later)

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> None:
        """Keeps the state at the end of a block that accepted tokens have filled, in its column."""
        counts = [num_accepted_tokens_gpu, num_scheduled_tokens_gpu, num_computed_tokens_gpu, num_draft_tokens_gpu]
        rows = zip(*(x[:num_reqs].tolist() for x in (mamba_state_idx_gpu, *counts)), strict=True)
        self.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
        for row, (source, accepted, scheduled, computed, drafts) in enumerate(rows):
            first = computed + scheduled - drafts  # tokens of which the state in the source column is
            end = (first + accepted - 1) // self.block_size * self.block_size
            if end < first:
                continue
            target = end // self.block_size - 1
            if (target, end) != (source, first):
                self._copy(row, source, target, end - first)
            if target == source:
                self.num_accepted_tokens_out[row] = 1

    def _copy(self, row: int, source: int, target: int, later: int) -> None:
        """Copies the states of a request that are so many tokens later than those in the source column."""
        for state, table, is_conv in self.places:
            to = state[int(table[row, target])]
            if is_conv:
                axis = 1 if is_conv_state_dim_first() else 0
                length = to.shape[axis] - later
                inputs = state[int(table[row, source])].narrow(axis, later, length)
                to.narrow(axis, 0, length).copy_(inputs.clone())  # of the same slot, maybe
            else:
                to.copy_(state[int(table[row, source + later])])


def give() -> str:
    """Puts ours before vLLM's class where vLLM has no Triton. Says what of vLLM's code is not as it was, or nothing."""
    if HAS_TRITON:
        return ""
    try:
        theirs = pkgutil.resolve_name(_THEIRS)
        for name in ("initialize_from_forward_context", "run_fused_precopy", "run_fused_postprocess"):
            has, wants = (" ".join(inspect.signature(getattr(x, name)).parameters) for x in (theirs, StateCopies))
            if has != wants:
                return f"{name} takes {has}, expected {wants}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    if not issubclass(theirs, StateCopies):
        module, _, name = _THEIRS.partition(":")
        setattr(pkgutil.resolve_name(module), name, type(name, (StateCopies, theirs), {}))
    return ""
