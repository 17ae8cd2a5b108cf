# SPDX-License-Identifier: Apache-2.0
"""This module has what vLLM's layers of linear attention share: which tokens of a step are whose, and where states lie.

vLLM's builders of metadata split a batch by what its own kernels can do together. One of ours makes what it makes,
since layers that stay vLLM's need it, and a :class:`Step` beside it, which describes the whole batch in its own order:
decodes, prefills, parts of prompts and drafts, all of which go through one call a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpu_attn.linear import (
    LinearAttentionMetadata,
    causal_conv1d,
    get_linear_attention_metadata,
    linear_attention_with_state_cache,
)
from cpu_attn.plan import Plans
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend, ShortConvAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor

Int32 = NDArray[np.int32]


class Step:
    """Describes a step to layers whose states lie in the same slots.

    Args:
        common: vLLM's CommonAttentionMetadata.
        table: int32 [R, 1 + D], the slots of each request: the one that it goes on from, and one for each of the D
            drafts that a request may have.
        accepted: int32 [R], how many of its last tokens were kept of a request with drafts, or None.
        drafts: int32 [R], how many drafts each request has among its tokens, negative: none ever, or None.
        checkpoint: vLLM's MambaPrefillCheckpointMetadata, states within prompts that are to be kept, or None.

    A request with drafts goes on from the slot of its last token that was kept, and leaves the state after its i-th
    token in its i-th slot.
    """

    def __init__(self, common: Any, table: Any, accepted: Any, drafts: Any, checkpoint: Any) -> None:
        reqs = common.num_reqs
        self.query_start_loc: Int32 = common.query_start_loc[: reqs + 1].to(torch.int32).numpy().copy()
        self.seq_lens: Int32 = common.seq_lens[:reqs].to(torch.int32).numpy().copy()
        lens = np.diff(self.query_start_loc)
        slots: Int32 = table[:reqs].to(torch.int32).numpy()
        slots = np.where(slots == NULL_BLOCK_ID, -1, slots).astype(np.int32)
        self.first_slots, self.offsets = slots[:, 0].copy(), np.zeros(reqs, np.int32)
        self.drafting = np.zeros(reqs, np.bool_)
        if drafts is not None and accepted is not None:
            self.drafting = drafts[:reqs].numpy() >= 0
            # A request that kept no draft may have a count of 0, as vLLM's kernels take it: max(n - 1, 0).
            counts = accepted[:reqs].numpy()[self.drafting]
            self.offsets[self.drafting] = (counts - 1).clip(0, slots.shape[1] - 1)
        rows = np.arange(reqs)
        last = np.where(self.drafting, lens - 1, 0).clip(0)
        self.state_indices: Int32 = slots[rows, last]
        self.initial_state_indices: Int32 | None = slots[rows, self.offsets] if self.drafting.any() else None
        self.within = _within(checkpoint)
        made = [(int(r), t + 1, int(slots[r, t])) for r in np.flatnonzero(self.drafting) for t in range(last[r])]
        self.checkpoints = _rows(sorted(made + self.within))
        self._plans: dict[Any, LinearAttentionMetadata] = Plans()

    def plan(self, dtype: torch.dtype, *heads: int) -> LinearAttentionMetadata:
        """Gives the plan of num_k_heads, num_v_heads, head_k_dim and head_v_dim, or that of convolutions alone."""
        key = (dtype, *heads)
        if key not in self._plans:
            self._plans[key] = get_linear_attention_metadata(
                self.query_start_loc, dtype, *heads, seq_lens=self.seq_lens
            )
        return self._plans[key]


def _within(checkpoint: Any) -> list[tuple[int, int, int]]:
    """Lists the states within prompts that are to be kept: request, number of its tokens in this step, slot."""
    if checkpoint is None:
        return []
    parts = (checkpoint.request_rows, checkpoint.checkpoint_offsets, checkpoint.state_indices)
    found = zip(*(x.tolist() for x in parts), strict=True)
    return [(r, offset, slot) for r, offset, slot in found if offset > 0 and slot != NULL_BLOCK_ID]


def _rows(found: list[tuple[int, int, int]]) -> Int32 | None:
    return np.array(found, np.int32) if found else None


# ---- backends ----


class _StepBuilder:
    """Comes before a builder of vLLM's."""

    supports_update_block_table = False  # a step is made for one block table
    checkpoint_name = ""  # the field of the metadata that has the checkpoints

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        if config.speculative_config is not None and not config.model_config.is_hybrid:
            raise ValueError("speculative_config: of a model without attention vLLM does not count the drafts it keeps")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)  # type: ignore[misc]
        spec, config = self.kv_cache_spec, self.vllm_config.cache_config  # type: ignore[attr-defined]
        common = common_attn_metadata
        metadata.step = Step(
            common,
            mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, spec, config.mamba_cache_mode),
            kwargs.get("num_accepted_tokens"),
            kwargs.get("num_decode_draft_tokens_cpu"),
            getattr(metadata, self.checkpoint_name, None),
        )
        return metadata


class GDNBuilder(_StepBuilder, GDNAttentionMetadataBuilder):  # type: ignore[misc]
    checkpoint_name = "checkpoint"


class Mamba2Builder(_StepBuilder, Mamba2AttentionMetadataBuilder):  # type: ignore[misc]
    checkpoint_name = "checkpoint_meta"


class ShortConvBuilder(_StepBuilder, ShortConvAttentionMetadataBuilder):  # type: ignore[misc]
    checkpoint_name = "checkpoint"


class GDNBackend(GDNAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[GDNBuilder]:
        return GDNBuilder


class Mamba2Backend(Mamba2AttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[Mamba2Builder]:
        return Mamba2Builder


class ShortConvBackend(ShortConvAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[ShortConvBuilder]:
        return ShortConvBuilder


# ---- layers ----


def step_of(layer: Any) -> Step | None:
    """Gives the step that vLLM is in, or None in a warm-up."""
    found = get_forward_context().attn_metadata
    metadata = None if found is None else found.get(layer.prefix)
    return None if metadata is None else metadata.step


def convolve(step: Step, layer: Any, conv: Any, x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Convolves x [T, C] with the weights of ``conv`` and the first state of the layer: gives [T, C]."""
    output = torch.empty(x.shape, dtype=x.dtype)
    weight = getattr(conv, "_cpu_unpacked_conv_weight", conv.weight).detach()  # vLLM may have packed the other
    weight = weight.view(x.shape[1], -1)
    if weight.dtype != x.dtype:
        weight = weight.float()
    bias = None if conv.bias is None else conv.bias.detach()
    state, layout = layer.kv_cache[0], "CL" if is_conv_state_dim_first() else "LC"
    plan, wide = step.plan(x.dtype), state.shape[2 if layout == "CL" else 1] > weight.shape[1] - 1
    options: dict[str, Any] = {"activation": activation, "state_layout": layout}
    if not wide:
        causal_conv1d(
            x, weight, bias, output, state, step.state_indices, plan, checkpoints=_rows(step.within), **options
        )
        return output
    rows = state.transpose(1, 2) if layout == "CL" else state
    windows, slots = _windows(step, rows, weight.shape[1] - 1)
    kept = [(r, t, len(slots) + i) for i, (r, t, _) in enumerate(step.within)]
    old = windows[: len(slots)].clone()
    options["state_layout"] = "LC"
    causal_conv1d(x, weight, bias, output, windows, slots, plan, checkpoints=_rows(kept), **options)
    _keep(step, rows, windows, old, x)
    return output


def _windows(step: Step, rows: torch.Tensor, length: int) -> tuple[torch.Tensor, Int32]:
    """Gives the last inputs of each request, [R + checkpoints, length, C], out of states [N, L, C] that are longer for
    drafts: those of a request begin as many inputs later as drafts of it were kept."""
    windows = torch.zeros(len(step.first_slots) + len(step.within), length, rows.shape[2], dtype=rows.dtype)
    for window, slot, offset in zip(windows, step.first_slots, step.offsets, strict=False):
        if slot >= 0:
            window.copy_(rows[slot, offset : offset + length])
    return windows, np.arange(len(step.first_slots), dtype=np.int32)


def _keep(step: Step, rows: torch.Tensor, windows: torch.Tensor, old: torch.Tensor, x: torch.Tensor) -> None:
    """Puts the last inputs back into states that are longer for drafts. Of a request with drafts these are all that may
    be the last ones, whichever are kept."""
    length = windows.shape[1]
    for r, slot in enumerate(step.first_slots):
        first, end = step.query_start_loc[r : r + 2]
        if slot < 0 or first == end:
            continue
        if step.drafting[r]:
            inputs = torch.cat([old[r], x[first:end].to(rows.dtype)])[1:]
            rows[slot, : len(inputs)] = inputs
        else:
            rows[slot, :length] = windows[r]
    for i, (_, _, slot) in enumerate(step.within):
        rows[slot, :length] = windows[len(step.first_slots) + i]


def attend(step: Step, query: Any, key: Any, value: Any, output: Any, state_cache: Any, **options: Any) -> None:
    """Computes linear attention of query, key [T, Hk, Dk] and value [T, Hv, Dv] into output [T, Hv, Dv]. options: those
    of linear_attention_with_state_cache."""
    heads = (key.shape[1], value.shape[1], key.shape[2], value.shape[2])
    linear_attention_with_state_cache(
        *(query, key, value, output, state_cache, step.state_indices, step.plan(value.dtype, *heads)),
        initial_state_indices=step.initial_state_indices,
        checkpoints=step.checkpoints,
        **options,
    )


def gated_delta_net(layer: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
    """Does what lies between a layer's projections: mixed_qkv [T, C], b and a [T, Hv] to core_attn_out [T, Hv, Dv]."""
    step = step_of(layer)
    if step is None:
        return
    tokens, tp = int(step.query_start_loc[-1]), layer.tp_size
    x = convolve(step, layer, layer.conv1d, mixed_qkv[:tokens], layer.activation)
    query, key, value = x.split([layer.key_dim // tp, layer.key_dim // tp, layer.value_dim // tp], dim=1)
    attend(
        step,
        query.unflatten(1, (-1, layer.head_k_dim)),
        key.unflatten(1, (-1, layer.head_k_dim)),
        value.unflatten(1, (-1, layer.head_v_dim)),
        core_attn_out[:tokens],
        by_key(layer.kv_cache[1]),
        g=a[:tokens],
        beta=b[:tokens],
        gate="softplus",
        A_log=layer.A_log.detach(),
        dt_bias=layer.dt_bias.detach(),
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )


def by_key(states: torch.Tensor) -> torch.Tensor:
    """Gives states [N, Hv, Dv, Dk] as [N, Hv, Dk, Dv]: vLLM's own kernels for CPUs keep them so, too, whatever the
    shape says."""
    slots, heads, v_dim, k_dim = states.shape
    return states.view(slots, heads, k_dim, v_dim)


def mamba2(layer: Any, projected_states: torch.Tensor, output: torch.Tensor) -> None:
    """Does what lies between the projections of a layer of Mamba-2: projected_states [T, ...] to output [T, Hv * Dv].
    The state is [N, Hv, Dv, Dk]."""
    step = step_of(layer)
    if step is None:
        output.zero_()
        return
    tokens, tp = int(step.query_start_loc[-1]), layer.tp_size
    parts = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
    _, x, dt = projected_states[:tokens].split(parts, dim=1)
    x = convolve(step, layer, layer.conv1d, x, layer.activation)
    groups = layer.groups_ssm_state_size // tp
    value, key, query = x.split([layer.tped_intermediate_size, groups, groups], dim=1)
    attend(
        step,
        query.unflatten(1, (-1, layer.ssm_state_size)),
        key.unflatten(1, (-1, layer.ssm_state_size)),
        value.unflatten(1, (-1, layer.head_dim)),
        output[:tokens].unflatten(1, (-1, layer.head_dim)),
        layer.kv_cache[1],
        g=dt,
        gate="dt",
        A_log=(-layer.A.detach()).log(),
        dt_bias=layer.dt_bias.detach(),
        D=layer.D.detach(),
        scale=1.0,
        delta_rule=False,
        state_layout="VK",
    )


def short_conv(layer: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """Does a layer of LFM2: hidden_states [T, C] to output [T, C]."""
    step = step_of(layer)
    before, after, x = layer.in_proj(hidden_states)[0].chunk(3, dim=1)
    x = before * x
    tokens = len(x) if step is None else int(step.query_start_loc[-1])
    if step is not None:
        x = convolve(step, layer, layer.conv, x[:tokens], None)
    output[:tokens] = layer.out_proj(after[:tokens] * x)[0]
