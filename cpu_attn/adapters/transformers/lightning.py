# SPDX-License-Identifier: Apache-2.0
"""This module computes the layers of lightning attention (MiniMax-01), whose rule is written out in their forward:
S = exp(-slope) S + k v^T, o = q^T S, with one slope for each head (arXiv:2401.04658).

Such a layer keeps its states in its model's own cache (``MiniMaxCache``), [B, H, D, D] for each layer, in float32 where
transformers' own forward has them in the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cpu_attn.linear_attention.call import States, attend, each
from cpu_attn.transformers import private

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(qkv: Tensor, slopes: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gives output [B, T, H, D] and states [B, H, D, D] of qkv [B, T, H, 3, D], with slopes [H]."""
    batch_size, length, heads, _, size = qkv.shape
    states = States(before, (batch_size, heads, size, size), True, torch.float32)
    query, key, value = qkv.unbind(3)
    starts = each(batch_size, length)
    output = attend(query, key, value, starts, states, g=-slopes, delta_rule=False, scale=1.0)
    return output, states.cache


def _forward(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None, cache: Any) -> tuple[Tensor, Tensor]:
    """Does what the forward of a layer does. attention_mask: [B, T], or None."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask.unsqueeze(2)).to(qkv.dtype)
    qkv = qkv.unflatten(2, (layer.num_attention_heads, 3, layer.head_dim))
    before = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    output, after = _attend(qkv.detach(), layer.slope_rate.detach().float().flatten(), before)
    output = layer.norm(output.flatten(2)) * layer.output_gate(hidden_states).sigmoid()
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, after)
    return layer.out_proj(output), after


def _is_ours(layer: Any, hidden_states: Any) -> bool:
    inputs = (hidden_states, *layer.parameters())
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return bool(hidden_states.device.type == "cpu" and hidden_states.dtype in _FLOATS and not wanted)


def _instead(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Gives what is called in place of the forward of such layers, which is called where gradients are wanted, and for
    other devices and dtypes."""

    @wraps(theirs)
    def forward(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        held = kwargs.get("past_key_values") if cache is None else cache  # its name before transformers 5.24
        if _is_ours(self, hidden_states):
            return _forward(self, hidden_states, attention_mask, held)
        if held is not None and (before := held.get_linear_cache(self.layer_idx)) is not None:
            held.set_linear_cache(self.layer_idx, before.to(hidden_states.dtype))
        named = {"cache": cache} if cache is not None else {}
        return theirs(self, hidden_states, position_embeddings, attention_mask, **named, **kwargs)

    return forward


def enable() -> None:
    """Gives layers of lightning attention a forward that calls cpu-attn."""
    private.give_forward(private.lightning_attention(), _instead)


def disable() -> None:
    """Gives them their own forward back."""
    private.take_forwards_back()
