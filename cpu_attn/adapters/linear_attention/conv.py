# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of causal-conv1d 1.7.

Symbols: B sequences of T tokens, C channels, W inputs of an output.

Both of them take x of float32, float16 or bfloat16 on the CPU, of any strides, and weights and biases of any of these.
Channels side by side ([B, T, C].transpose(1, 2)) are read where they lie; x with tokens side by side is copied. They
raise ValueError or TypeError for what does not fit, before anything is written, and for tensors that require grad while
grad mode is on. torch.compile breaks its graph at a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.linear_attention.call import States, convolve, each, only, optional, runs, tensors
from cpu_attn.torch.entry import axes, entry

_NAMES = {"conv_state": "initial_states", "output": "x", "state_indices": "conv_state_indices", "isa": "CPU_ATTN_ISA"}


@entry(**_NAMES)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolves each channel of sequences with its last inputs.

    Args:
        x: [B, C, T].
        weight: [C, W], W from 2 to 8.
        bias: [C], or None.
        seq_idx: int32 [B, T]: where it changes within a row, another sequence begins, from zeros. Negative: padding,
            whose output is 0. It goes without states.
        initial_states: [B, C, W - 1], the inputs before the first, or None: zeros.
        return_final_states: whether to return the last W - 1 inputs, too.
        final_states_out: [B, C, W - 1], where they go, or None: new memory of the dtype of x.
        activation: ``silu``, ``swish`` or None.

    Returns:
        out [B, C, T], laid out as x; with ``return_final_states`` (out, the final states).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    x, weight = tensors(x=x, weight=weight)
    bias, initial_states, final_states_out = optional(
        bias=bias, initial_states=initial_states, final_states_out=final_states_out
    )
    axes("x", x, B=None, C=None, T=None)
    axes("weight", weight, C=x.shape[1], W=None)
    silu, keep = _check.activation(activation), _check.boolean("return_final_states", return_final_states)
    (batch_size, channels, length), inputs = x.shape, weight.shape[1] - 1
    for name, states in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if states is not None:
            axes(name, states, B=batch_size, C=channels, **{"W - 1": inputs})
    starts, shape = each(batch_size, length), (batch_size, channels, inputs)
    padding = None
    if seq_idx is not None:
        only("initial_states", initial_states, None, "seq_idx goes without states")
        only("return_final_states", keep, False, "seq_idx goes without states")
        (seq_idx,) = tensors(seq_idx=seq_idx)
        starts, _ = runs("seq_idx", seq_idx, batch_size, length)
        shape, padding = (len(starts) - 1, channels, inputs), seq_idx < 0
    if final_states_out is not None and not keep:
        raise ValueError("final_states_out: given, but return_final_states is False")
    states = States(initial_states, shape, keep, x.dtype)
    out = convolve(x.transpose(1, 2), weight, bias, starts, states, silu)
    if padding is not None and padding.any():
        out[padding] = 0
    out = _like(x, out)
    if not keep:
        return out
    return out, states.cache if final_states_out is None else final_states_out.copy_(states.cache)


@entry(**_NAMES | {"conv_state": "conv_state"})
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolves the next tokens of sequences whose last inputs are in a cache, and puts them there.

    Args:
        x: [B, C] or [B, C, T].
        conv_state: [B, C, L], or more than B with ``conv_state_indices``; L is W - 1 to 8. Changed in place.
        weight: [C, W], W from 2 to 8.
        bias: [C], or None.
        activation: ``silu``, ``swish`` or None.
        cache_seqlens: int32 [B], where each sequence is in its L inputs, which are then a ring (of any length from
            W - 1 on, at least T). None: the oldest input comes first.
        conv_state_indices: int32 [B], which row of ``conv_state`` is each sequence's. Negative: padding, whose output
            is 0.

    Returns:
        out, of the shape of x.

    Raises:
        ValueError: a shape, an index or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    x, conv_state, weight = tensors(x=x, conv_state=conv_state, weight=weight)
    bias, cache_seqlens, conv_state_indices = optional(
        bias=bias, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
    )
    single, silu = x.dim() == 2, _check.activation(activation)
    x = x.unsqueeze(2) if single else x
    axes("x", x, B=None, C=None, T=None)
    axes("weight", weight, C=x.shape[1], W=None)
    rows = None if conv_state_indices is not None else x.shape[0]
    axes("conv_state", conv_state, B=rows, C=x.shape[1], L=None)
    if conv_state.shape[2] < weight.shape[1] - 1:
        raise ValueError(f"conv_state: L = {conv_state.shape[2]}, expected at least W - 1 = {weight.shape[1] - 1}")
    if conv_state_indices is None:
        slots = np.arange(x.shape[0], dtype=np.int32)
    else:
        slots = _check.array("conv_state_indices", conv_state_indices, ["int32"], [("B", x.shape[0])]).numpy()
    if cache_seqlens is None:
        out = _in_place(x, conv_state, weight, bias, silu, slots)
    else:
        out = _in_ring(x, conv_state, weight, bias, silu, slots, cache_seqlens)
    return out.squeeze(2) if single else out


def _in_place(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, slots: Any) -> Tensor:
    by_channel = state.stride(2) == 1 or state.stride(1) != 1
    memory = state if by_channel else state.transpose(1, 2)
    cache = memory.contiguous() if memory.stride(2) != 1 else memory
    held, layout = States.at(cache, slots), "CL" if by_channel else "LC"
    out = convolve(x.transpose(1, 2), weight, bias, each(x.shape[0], x.shape[2]), held, silu, state_layout=layout)
    if cache is not memory:
        memory.copy_(cache)
    if (slots < 0).any():
        out[torch.from_numpy(slots < 0)] = 0
    return _like(x, out)


def _in_ring(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, slots: Any, cache_seqlens: Tensor
) -> Tensor:
    (size, channels, ring), inputs, length = state.shape, weight.shape[1] - 1, x.shape[2]
    places = _check.array("cache_seqlens", cache_seqlens, ["int32"], [("B", x.shape[0])]).numpy().astype(np.int64)
    if length > ring:
        raise ValueError(f"x: T = {length}, expected at most conv_state's L = {ring} with cache_seqlens")
    for b in np.flatnonzero(places < 0)[:1]:
        raise ValueError(f"cache_seqlens[{b}]: {places[b]}, expected at least 0")
    for b in np.flatnonzero(slots >= size)[:1]:
        raise ValueError(f"conv_state_indices[{b}]: {slots[b]}, expected at most {size - 1}")
    there = np.flatnonzero(slots >= 0)
    own = slots[there]
    if len(np.unique(own)) != len(own):
        raise ValueError("conv_state_indices: two sequences have the same row")
    rows, at = torch.from_numpy(own).long(), torch.from_numpy(places[there])[:, None]
    before = state[rows].gather(2, _spread((at + torch.arange(-inputs, 0)) % ring, channels))
    out = torch.zeros(x.shape[0], length, channels, dtype=x.dtype)
    states = States(before, (len(own), channels, inputs), False, x.dtype)
    new = x[torch.from_numpy(there)]
    out[torch.from_numpy(there)] = convolve(new.transpose(1, 2), weight, bias, each(len(own), length), states, silu)
    changed = state[rows].scatter(2, _spread((at + torch.arange(length)) % ring, channels), new.to(state.dtype))
    state[rows] = changed
    return _like(x, out)


def _spread(places: Tensor, channels: int) -> Tensor:
    """Gives [B, T] for each channel, [B, C, T]."""
    return places[:, None].expand(-1, channels, -1)


def _like(x: Tensor, out: Tensor) -> Tensor:
    """Gives out [B, T, C] as [B, C, T], laid out as x."""
    out = out.transpose(1, 2)
    return out.contiguous() if x.stride(2) == 1 and x.stride(1) != 1 else out
