# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of causal-conv1d 1.7.

Symbols: B sequences of T tokens, or N sequences packed into one row of T tokens, C channels, W inputs of an output.

The convolutions take x of float32, float16 or bfloat16 on the CPU, of any strides, and weights and biases of any of
these. Channels side by side ([B, T, C].transpose(1, 2)) are read where they lie; x with tokens side by side is copied.
All functions raise ValueError or TypeError for what does not fit, before anything is written, and for tensors that
require grad while grad mode is on. torch.compile breaks its graph at a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.linear_attention.call import (
    States,
    clear,
    convolve,
    each,
    integers,
    only,
    optional,
    runs,
    slots_of,
    starts_of,
    tensors,
    written,
)
from cpu_attn.torch.entry import axes, entry

_MOST_INPUTS = 8  # of a state that the kernel changes in place
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
    if final_states_out is not None:
        written("final_states_out", final_states_out)
    starts, shape = each(batch_size, length), (batch_size, channels, inputs)
    padding = None
    if seq_idx is not None:
        only("initial_states", initial_states, None, "seq_idx goes without states")
        only("return_final_states", keep, False, "seq_idx goes without states")
        numbers = integers("seq_idx", seq_idx, B=batch_size, T=length)
        starts, _ = runs(numbers)
        shape, padding = (len(starts) - 1, channels, inputs), numbers < 0
    if final_states_out is not None and not keep:
        raise ValueError("final_states_out: given, but return_final_states is False")
    states = States(initial_states, shape, keep, x.dtype)
    out = convolve(x.transpose(1, 2), weight, bias, starts, states, silu)
    if padding is not None:
        clear(out, padding)
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
        conv_state: [B, C, L], or any number of rows with ``conv_state_indices``; L is at least W - 1. Changed in place.
        weight: [C, W], W from 2 to 8.
        bias: [C], or None.
        activation: ``silu``, ``swish`` or None.
        cache_seqlens: int32 [B], where each sequence is in its L inputs, which are then a ring. None: the oldest input
            comes first.
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
    written("conv_state", conv_state)
    if conv_state.shape[2] < max(weight.shape[1] - 1, 1):  # the kernel refuses W of 1
        raise ValueError(f"conv_state: L = {conv_state.shape[2]}, expected at least W - 1 = {weight.shape[1] - 1}")
    slots = slots_of("conv_state_indices", conv_state_indices, x.shape[0], len(conv_state))
    places = None
    if cache_seqlens is not None:
        places = _check.array("cache_seqlens", cache_seqlens, ["int32"], [("B", x.shape[0])]).numpy().astype(np.int64)
        for b in np.flatnonzero(places < 0)[:1]:
            raise ValueError(f"cache_seqlens[{b}]: {places[b]}, expected at least 0")
    in_place = places is None and conv_state.shape[2] <= _MOST_INPUTS and 1 in conv_state.stride()[1:]
    how = (x, conv_state, weight, bias, silu, slots)
    out = _like(x, _in_place(*how) if in_place else _in_ring(*how, places))
    clear(out, slots < 0)
    return out.squeeze(2) if single else out


def _in_place(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, slots: Any) -> Tensor:
    memory, layout = (state, "CL") if state.stride(2) == 1 else (state.transpose(1, 2), "LC")
    held = States.at(memory, slots)
    return convolve(x.transpose(1, 2), weight, bias, each(x.shape[0], x.shape[2]), held, silu, state_layout=layout)


def _in_ring(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, slots: Any, places: Any
) -> Tensor:
    """Takes states of any length and strides, whose inputs are a ring that begins at ``places``. If that is None, they
    begin at 0, and are turned so that they do afterwards, too."""
    (_, channels, ring), inputs, length = state.shape, weight.shape[1] - 1, x.shape[2]
    mine = torch.from_numpy(slots >= 0)
    rows, new = torch.from_numpy(slots).long()[mine], x[mine]
    at = torch.zeros(len(rows), 1, dtype=torch.int64) if places is None else torch.from_numpy(places)[mine, None]
    old = state[rows]
    before = old.gather(2, _spread((at + torch.arange(-inputs, 0)) % ring, channels))
    states = States(before, (len(rows), channels, inputs), False, x.dtype)
    out = torch.zeros(x.shape[0], length, channels, dtype=x.dtype)
    out[mine] = convolve(new.transpose(1, 2), weight, bias, each(len(rows), length), states, silu)
    kept = torch.arange(max(length - ring, 0), length)
    after = old.scatter(2, _spread((at + kept) % ring, channels), new[..., kept].to(state.dtype))
    state[rows] = after.roll(-length, 2) if places is None else after
    return out


@entry()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Gives the last inputs of packed sequences, as :func:`causal_conv1d_update` goes on from them.

    Args:
        x: [T, C].
        cu_seqlens: int64 or int32 [N + 1], where sequences start.
        state_len: how many inputs.

    Returns:
        [N, C, state_len], of the dtype of x. Inputs before a sequence are 0.

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    (x,) = tensors(x=x)
    axes("x", x, T=None, C=None)
    starts = torch.from_numpy(starts_of(1, len(x), cu_seqlens)).long()[:, None]
    at = starts[1:] + torch.arange(-_check.integer("state_len", state_len, 1), 0)
    found = torch.zeros(*at.shape, x.shape[1], dtype=x.dtype)
    there = at >= starts[:-1]
    found[there] = x[at[there]]
    return found.transpose(1, 2)


def _spread(places: Tensor, channels: int) -> Tensor:
    """Gives [B, T] for each channel, [B, C, T]."""
    return places[:, None].expand(-1, channels, -1)


def _like(x: Tensor, out: Tensor) -> Tensor:
    """Gives out [B, T, C] as [B, C, T], laid out as x."""
    out = out.transpose(1, 2)
    return out.contiguous() if x.stride(2) == 1 and x.stride(1) != 1 else out
