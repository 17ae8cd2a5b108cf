# SPDX-License-Identifier: Apache-2.0
"""This module has the scans of mamba_ssm 2.3: state space models with a decay for each head (Mamba-2), and in
``selective_state_update`` also with one for each channel and state (Mamba-1).

Symbols: B sequences of T tokens; H heads of P channels; G groups of heads, which share B and C; N elements of a
channel's state.

Both of them take tensors of float32, float16 or bfloat16 on the CPU; where x, B and C differ, they are computed in
float32. They raise ValueError or TypeError for what does not fit, before anything is written, and for tensors that
require grad while grad mode is on. torch.compile breaks its graph at a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from cpu_attn import _check
from cpu_attn._arrays import dense_rows
from cpu_attn.linear_attention.call import (
    Int32,
    States,
    attend,
    borrowed,
    clear,
    each,
    integers,
    optional,
    packed,
    runs,
    slots_of,
    starts_of,
    tensors,
    written,
)
from cpu_attn.torch.entry import axes, entry

_NAMES = {"query": "C", "key": "B", "value": "x", "state_cache": "initial_states", "num_k_heads": "G"}
_NAMES |= {"num_v_heads": "H", "head_k_dim": "N", "head_v_dim": "P", "isa": "CPU_ATTN_ISA"}


@entry(**_NAMES)
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # mamba_ssm calls them so
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Computes state space duality (arXiv:2405.21060): S = exp(dt A) S + dt x B^T; out = S C + D x.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H].
        A: [H].
        B: [B, T, G, N]; G divides H.
        C: [B, T, G, N].
        chunk_size: accepted: chunks have 64 tokens.
        D: [H] or [H, P], or None.
        z: [B, T, H, P], or None: silu of it multiplies the output.
        dt_bias: [H], or None: what is added to dt.
        initial_states: [B, H, P, N], or None: zeros. They stay as they are.
        seq_idx: integers [B, T]: where they change within a row, another sequence begins, from zeros.
        cu_seqlens: int64 or int32 [sequences + 1], where those of ``seq_idx`` start, for ``return_varlen_states``.
        dt_softplus: whether dt is the softplus of what is given, with its bias.
        dt_limit: the least and the largest dt.
        return_final_states: whether to return the states after the last token of each row, float32 [B, H, P, N].
        return_varlen_states: whether to return the states after each sequence of ``cu_seqlens``, float32
            [sequences, H, P, N]; the batch is 1.

    Returns:
        out [B, T, H, P], or (out, the states that are asked for).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    x, dt, A, B, C = tensors(x=x, dt=dt, A=A, B=B, C=C)  # noqa: N806
    D, z, dt_bias, initial_states = optional(D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)  # noqa: N806
    _check.integer("chunk_size", chunk_size, 1)
    axes("x", x, B=None, T=None, H=None, P=None)
    batch_size, length, heads, size = x.shape
    axes("dt", dt, B=batch_size, T=length, H=heads)
    axes("A", A, H=heads)
    axes("B", B, B=batch_size, T=length, G=None, N=None)
    axes("C", C, **dict(zip(("B", "T", "G", "N"), B.shape, strict=True)))
    if z is not None:
        axes("z", z, B=batch_size, T=length, H=heads, P=size)
    if dt_bias is not None:
        axes("dt_bias", dt_bias, H=heads)
    if D is not None:
        axes("D", D, **({"H": heads} if D.dim() == 1 else {"H": heads, "P": size}))
    if initial_states is not None:
        axes("initial_states", initial_states, B=batch_size, H=heads, P=size, N=B.shape[3])
    least, most = _check.limits("dt_limit", dt_limit)
    each_row = _check.boolean("return_final_states", return_final_states)
    each_sequence = _check.boolean("return_varlen_states", return_varlen_states)
    starts, firsts = each(batch_size, length), np.arange(batch_size, dtype=np.int32)
    if seq_idx is not None:
        starts, firsts = runs(integers("seq_idx", seq_idx, B=batch_size, T=length))
    if each_sequence:
        sequences = starts_of(batch_size, length, _given("cu_seqlens", cu_seqlens))
        if not np.array_equal(np.unique(sequences), starts):
            raise ValueError(f"cu_seqlens: {sequences.tolist()}, expected where seq_idx changes, {starts.tolist()}")
    dt = _step(dt, dt_bias, dt_softplus).clamp(least, most)
    shape = (len(starts) - 1, heads, size, B.shape[3])
    keep = each_row or each_sequence
    given = initial_states
    if given is not None and len(firsts) < shape[0]:
        given = torch.zeros(shape, dtype=torch.float32)
        given[torch.from_numpy(firsts).long()] = initial_states.float()
    states = States(given, shape, keep, torch.float32)
    out = _scan(x, dt * A.float(), dt, B, C, D, z, starts, states)
    found: list[Tensor] = []
    if each_row:
        last = np.append(firsts[1:], shape[0]) - 1
        found.append(states.cache if len(last) == shape[0] else states.cache[torch.from_numpy(last).long()])
    if each_sequence:
        found.append(_of_sequences(states.cache, np.diff(sequences)))
    return (out, *found) if found else out


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    held: tuple[Int32, States],
) -> Any:
    """Does what mamba_chunk_scan_combined does for a batch of 1, of which ``held`` says where its sequences start, and
    has their states."""
    starts, states = held
    step = _step(dt, dt_bias, dt_softplus).clamp(*_check.limits("dt_limit", dt_limit))
    out = _scan(x, step * A.float(), step, B, C, D, z, starts, states)
    return (out, states.cache) if return_final_states else out


@entry(**_NAMES | {"state_cache": "state", "state_indices": "state_batch_indices"})
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Takes one token of each sequence through its state: S = exp(dt A) S + dt x B^T; out = S C + D x.

    A, dt and dt_bias that are the same for all channels of a head, as Mamba-2 expands them, are one decay for the head.
    Where they differ (Mamba-1), each channel is a head of its own, which is slower.

    Args:
        state: [B, H, P, N], or more than B with ``state_batch_indices``; without heads [B, P, N], and so for all others
            with H or G. Changed in place.
        x: [B, H, P].
        dt: [B, H, P].
        A: [H, P, N].
        B: [B, G, N]; G divides H.
        C: [B, G, N].
        D: [H, P], or None.
        z: [B, H, P], or None: silu of it multiplies the output.
        dt_bias: [H, P], or None: what is added to dt.
        dt_softplus: whether dt is the softplus of what is given, with its bias.
        state_batch_indices: int32 [B], which row of ``state`` is each sequence's. Negative: padding, whose output is 0.

    Returns:
        out, of the shape of x.

    Raises:
        ValueError: a shape, an index or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    state, x, dt, A, B, C = tensors(state=state, x=x, dt=dt, A=A, B=B, C=C)  # noqa: N806
    D, z, dt_bias, indices = optional(D=D, z=z, dt_bias=dt_bias, state_batch_indices=state_batch_indices)  # noqa: N806
    one_head = state.dim() == 3
    if one_head:
        state, x, dt, B, C = (y.unsqueeze(1) for y in (state, x, dt, B, C))  # noqa: N806
        A, D, dt_bias = (y if y is None else y.unsqueeze(0) for y in (A, D, dt_bias))  # noqa: N806
        z = z if z is None else z.unsqueeze(1)
    axes("x", x, B=None, H=None, P=None)
    batch_size, heads, size = x.shape
    axes("state", state, B=None if indices is not None else batch_size, H=heads, P=size, N=None)
    written("state", state)
    axes("dt", dt, B=batch_size, H=heads, P=size)
    axes("A", A, H=heads, P=size, N=state.shape[3])
    axes("B", B, B=batch_size, G=None, N=state.shape[3])
    axes("C", C, B=batch_size, G=B.shape[1], N=state.shape[3])
    if z is not None:
        axes("z", z, B=batch_size, H=heads, P=size)
    for name, y in (("D", D), ("dt_bias", dt_bias)):
        if y is not None:
            axes(name, y, H=heads, P=size)
    slots = slots_of("state_batch_indices", indices, batch_size, len(state))
    out = _update(state, slots, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    clear(out, slots < 0)
    return out.squeeze(1) if one_head else out


def _update(
    state: Tensor,
    slots: Int32,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> Tensor:
    """Does what selective_state_update does, after its checks."""
    batch_size, heads, size = x.shape
    fits, b, c = state.stride(3) == 1, b.unsqueeze(1), c.unsqueeze(1)
    if _one(a, (1, 2)) and _one(dt, (2,)) and (dt_bias is None or _one(dt_bias, (1,))):
        step = _step(dt[:, :, 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus).unsqueeze(1)
        if d is not None and _one(d, (1,)):
            d = d[:, 0]
        values, z = x.unsqueeze(1), z if z is None else z.unsqueeze(1)
        g = step * a[:, 0, 0].float()
    else:  # each channel is a head
        fits = fits and (1 in (heads, size) or state.stride(1) == size * state.stride(2))
        step = _step(dt, dt_bias, dt_softplus).flatten(1).unsqueeze(1)
        g = step.unsqueeze(3) * a.float().flatten(0, 1)
        d, z = d if d is None else d.flatten().unsqueeze(1), z if z is None else z.reshape(batch_size, 1, -1, 1)
        values = x.reshape(batch_size, 1, heads * size, 1)
    with borrowed(state, slots, fits) as held:
        held.cache = held.cache.view(len(held.cache), *values.shape[2:], state.shape[3])
        return _scan(values, g, step, b, c, d, z, each(batch_size, 1), held).view(x.shape)


def _one(x: Tensor, over: tuple[int, ...]) -> bool:
    """Says whether x is the same along these axes: expanded, or equal."""
    if all(x.stride(axis) == 0 or x.shape[axis] == 1 for axis in over):
        return True
    first = x
    for axis in over:
        first = first.narrow(axis, 0, 1)
    return bool((x == first).all())


def _step(dt: Tensor, dt_bias: Tensor | None, with_softplus: bool) -> Tensor:
    """Gives the steps in float32."""
    raw = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    return softplus(raw) if _check.boolean("dt_softplus", with_softplus) else raw


def _scan(
    x: Tensor,
    g: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    starts: Any,
    states: States,
) -> Tensor:
    """Scans, and does in float32 what the kernel does not: z."""
    out = attend(
        *(c, b, x, starts, states),
        g=packed(g),
        beta=packed(dt),
        D=d if d is None else dense_rows(d),
        scale=1.0,
        delta_rule=False,
        state_layout="VK",
        out_dtype=x.dtype if z is None else torch.float32,
    )
    if z is not None:
        out = out * silu(z.float())
    return out.to(x.dtype)


def _given(name: str, x: Any) -> Any:
    if x is None:
        raise ValueError(f"{name}: is None, return_varlen_states needs it")
    return x


def _of_sequences(states: Tensor, lengths: Any) -> Tensor:
    """Gives the states of sequences, of which those without tokens have zeros."""
    if lengths.all():
        return states
    found = states.new_zeros(len(lengths), *states.shape[1:])
    found[torch.from_numpy(lengths > 0)] = states
    return found
