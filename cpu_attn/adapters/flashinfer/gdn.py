# SPDX-License-Identifier: Apache-2.0
"""This module has FlashInfer's gated delta net: ``gdn_prefill`` and ``gdn_decode``.

Symbols: B sequences, T tokens; Hq, Hk and Hv heads of queries, keys and values with K, K and V elements; H is the
larger of Hq and Hv. States that are changed in place may have any strides but for the last axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.norm import FLOATS, FP8, put, rounded
from cpu_attn.linear import linear_attention_with_state_cache
from cpu_attn.linear_attention.call import Int32, each, floats, optional, packed, plan, starts_of, tensors
from cpu_attn.torch.entry import axes, written

__all__ = ["chunk_gated_delta_rule", "gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose"]

_DECODE = {"use_qk_l2norm_in_kernel": "use_qk_l2norm", "g": "a", "beta": "b"}
_NAMES = {"query": "q", "key": "k", "value": "v", "state_cache": "initial_state", "isa": "CPU_ATTN_ISA"}


@interface(**_NAMES)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Any:
    """Computes the gated delta rule of packed sequences (arXiv:2412.06464).

    Args:
        q: [T, Hq, K].
        k: [T, Hk, K].
        v: [T, Hv, V]. Of Hq, Hk and Hv two are equal and divide the third, Hq or Hv.
        g: [T, H], the decay itself, not its logarithm; None: 1.
        beta: [T, H]; None: 1.
        scale: the factor of q; None and, as in FlashInfer, 0: K ** -0.5.
        initial_state: [B, H, V, K] of float32, float16, bfloat16 or float8, or None: zeros; with ``state_indices``
            [slots, H, V, K].
        output_final_state: whether to return the states after the last tokens.
        cu_seqlens: int32 or int64 [B + 1], where sequences start.
        use_qk_l2norm_in_kernel: whether q and k are divided by sqrt(sum of squares + 1e-6).
        output: [T, H, V] to write to, of the dtype of v, or None.
        output_state: [B, H, V, K] to write to, or None; with ``state_indices`` [slots, H, V, K]. It may be
            ``initial_state``. As in FlashInfer, the row of a sequence without tokens stays as it is.
        state_checkpoints: [checkpoints, H, V, K] to write to, sequence after sequence.
        checkpoint_cu_starts: int32 or int64 [B + 1], where the checkpoints of each sequence start.
        checkpoint_every_n_tokens: after how many tokens each is, a multiple of 64; 0: there are none.
        use_cp: not looked at.
        state_indices: int32 or int64 [B], the rows of ``initial_state`` and ``output_state`` that are each sequence's.
        _cp_chunk_len: not looked at.
        backend: not looked at.
        max_seqlen: not looked at.

    Returns:
        output [T, H, V]; with ``output_final_state`` (output, the states).

    Raises:
        ValueError: a shape, an index or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    q, k, v = tensors(q=q, k=k, v=v)
    g, beta, initial = optional(g=g, beta=beta, initial_state=initial_state)
    out, after, kept = written(
        *({"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial}, "initial_state"),
        output=output,
        output_state=output_state,
        state_checkpoints=state_checkpoints,
    )
    axes("q", q, T=None, Hq=None, K=None)
    axes("k", k, T=len(q), Hk=None, K=q.shape[2])
    axes("v", v, T=len(q), Hv=None, V=None)
    q, k, v = _grouped(q, k, v)
    heads, sizes = v.shape[1], {"H": v.shape[1], "V": v.shape[2], "K": q.shape[2]}
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            axes(name, x, T=len(q), H=heads)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: is None, expected where sequences start")
    starts = starts_of(1, len(q), cu_seqlens)
    number = len(starts) - 1
    rows = np.arange(number, dtype=np.int32)
    if state_indices is not None:
        rows = _rows("state_indices", state_indices, number)
        if output_final_state and after is None:
            raise ValueError("output_state: is None, state_indices says where states go in it")
    count = None if state_indices is not None else number
    for name, x in (("initial_state", initial), ("output_state", after), ("state_checkpoints", kept)):
        if x is not None:
            axes(name, x, B=count if x is not kept else None, **sizes)
            if x.dtype not in (*FLOATS, *FP8):
                raise TypeError(f"{name}: dtype {x.dtype}, expected {', '.join(map(str, (*FLOATS, *FP8)))}")
    every = _check.integer("checkpoint_every_n_tokens", checkpoint_every_n_tokens, 0)
    marks = _marks(starts, every, kept, checkpoint_cu_starts)
    states = torch.zeros(number + len(marks), heads, sizes["V"], sizes["K"])
    if initial is not None:
        states[:number] = initial[_within("state_indices", rows, len(initial))].float()
    keep = _check.boolean("output_final_state", output_final_state)
    if keep and after is not None:
        places = _within("state_indices", rows, len(after))
    out = torch.empty(len(q), heads, sizes["V"], dtype=v.dtype) if out is None else out
    axes("output", out, T=len(q), H=heads, V=sizes["V"])
    linear_attention_with_state_cache(
        *(packed(q[None]), packed(k[None]), packed(v[None]), out, states, np.arange(number, dtype=np.int32)),
        plan(starts, initial is not None, floats("v", v), q.shape[1], heads, sizes["K"], sizes["V"]),
        g=None if g is None else g.float().log(),
        beta=beta,
        scale=None if scale is None or _check.number("scale", scale) == 0 else scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_layout="VK",
        checkpoints=marks if len(marks) else None,
    )
    if kept is not None:
        put(kept[: len(marks)], states[number:])
    if keep and after is not None:
        full = torch.from_numpy(np.flatnonzero(np.diff(starts)))
        after[places[full]] = rounded(states[full], after.dtype)
    return (out, states[:number] if after is None else after) if keep else out


@interface(**_NAMES | _DECODE | {"state_cache": "state"})
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,  # noqa: N803  # FlashInfer calls it so
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Takes one token of each sequence through its state, with g = -exp(A_log) softplus(a + dt_bias) and
    beta = sigmoid(b).

    Args:
        q: [B, 1, Hq, K].
        k: [B, 1, Hq, K].
        v: [B, 1, Hv, V]; Hq divides Hv.
        state: [B, Hv, K, V], changed in place.
        A_log: [Hv].
        a: [B, 1, Hv].
        dt_bias: [Hv].
        b: [B, 1, Hv].
        scale: the factor of q; None: K ** -0.5.
        output: [B, 1, Hv, V] to write to, of the dtype of v, or None.
        use_qk_l2norm: whether q and k are divided by sqrt(sum of squares + 1e-6).
        backend: not looked at.

    Returns:
        (output, state).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    (q,) = tensors(q=q)
    if q.dim() == 4 and q.shape[1] != 1:
        raise ValueError(f"q: T = {q.shape[1]}, expected 1")
    slots = np.arange(q.shape[0] if q.dim() else 0, dtype=np.int32)
    out = _decode(
        q, k, v, "state", state, "KV", A_log, a, dt_bias, b, scale, output, use_qk_l2norm, slots, slots, len(slots)
    )
    return out, state


@interface(**_NAMES | _DECODE | {"state_indices": "output_state_indices"})
def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Does what :func:`gated_delta_rule_decode` does, with states [.., V, K], of several tokens, or in slots.

    Args:
        q: [B, T, Hq, K].
        k: [B, T, Hq, K].
        v: [B, T, Hv, V]; Hq divides Hv.
        state: [B, Hv, V, K], changed in place; None with ``initial_state``.
        A_log: [Hv].
        a: [B, T, Hv].
        dt_bias: [Hv].
        b: [B, T, Hv].
        scale: the factor of q; None: K ** -0.5.
        output: [B, T, Hv, V] to write to, of the dtype of v, or None.
        use_qk_l2norm: whether q and k are divided by sqrt(sum of squares + 1e-6).
        initial_state: [slots, Hv, V, K], changed in place.
        initial_state_indices: int32 or int64 [B], the slots from which sequences begin. Negative: padding, whose output
            is 0.
        output_state_indices: int32 or int64 [B], the slots in which they end, or None: the same.
        intermediate_states_buffer: None.
        disable_state_update: whether states stay as they are.
        backend: not looked at.

    Returns:
        (output, the states).

    Raises:
        ValueError: a shape, an index or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    if (initial_state is None) == (state is None) or (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state: expected with initial_state_indices, or state instead of both")
    if initial_state is None and output_state_indices is not None:
        raise ValueError("output_state_indices: given without initial_state")
    states: Any = state if initial_state is None else initial_state
    name = "state" if initial_state is None else "initial_state"
    (q,) = tensors(q=q)
    _check.instance(name, states, Tensor)
    numbers = np.arange(q.shape[0] if q.dim() else 0, dtype=np.int32)
    of = (
        numbers
        if initial_state_indices is None
        else _rows("initial_state_indices", initial_state_indices, len(numbers))
    )
    to = of if output_state_indices is None else _rows("output_state_indices", output_state_indices, len(numbers))
    for name, slots in (("initial_state_indices", of), ("output_state_indices", to)):
        for i in np.flatnonzero(slots >= states.shape[0])[:1] if states.dim() and state is None else ():
            raise ValueError(f"{name}[{i}]: {slots[i]}, expected at most {states.shape[0] - 1}")
    to = np.where(of < 0, -1, to).astype(np.int32)
    count = None if state is None else len(numbers)
    if _check.boolean("disable_state_update", disable_state_update):
        to = np.full(len(numbers), -1, np.int32)
    out = _decode(q, k, v, name, states, "VK", A_log, a, dt_bias, b, scale, output, use_qk_l2norm, of, to, count)
    return out, states


def _decode(
    q: Any,
    k: Any,
    v: Any,
    name: str,
    state: Any,
    layout: str,
    a_log: Any,
    a: Any,
    dt_bias: Any,
    b: Any,
    scale: Any,
    output: Any,
    l2norm: Any,
    of: Int32,
    to: Int32,
    count: int | None,
) -> Tensor:
    """Does what both do. name: how errors call the states; of, to: the slots in which sequences begin and end; count:
    of the states, None: any."""
    read = {"q": q, "k": k, "v": v, "A_log": a_log, "a": a, "dt_bias": dt_bias, "b": b}
    q, k, v, a_log, a, dt_bias, b = tensors(**read)
    _check.instance(name, state, Tensor)
    out, state = written(read, output=output, **{name: state})
    axes("q", q, B=None, T=None, Hq=None, K=None)
    batch_size, length, _, size = q.shape
    axes("k", k, **dict(zip(("B", "T", "Hq", "K"), q.shape, strict=True)))
    axes("v", v, B=batch_size, T=length, Hv=None, V=None)
    heads, sizes = v.shape[2], {"K": size, "V": v.shape[3]}
    axes(name, state, B=count, Hv=heads, **{x: sizes[x] for x in layout})
    for gate, x in (("a", a), ("b", b)):
        axes(gate, x, B=batch_size, T=length, Hv=heads)
    out = torch.empty(v.shape, dtype=v.dtype) if out is None else out
    axes("output", out, **dict(zip(("B", "T", "Hv", "V"), v.shape, strict=True)))
    own = out if out.is_contiguous() else torch.empty(v.shape, dtype=out.dtype)
    brings = of >= 0
    linear_attention_with_state_cache(
        *(packed(q), packed(k), packed(v), own.flatten(0, 1), state, to),
        plan(each(batch_size, length), brings, floats("v", v), q.shape[2], heads, size, v.shape[3]),
        g=packed(a),
        beta=packed(b),
        gate="softplus",
        A_log=a_log,
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm_in_kernel=l2norm,
        use_beta_sigmoid_in_kernel=True,
        state_layout=layout,
        initial_state_indices=of,
    )
    if not brings.all():
        own[torch.from_numpy(~brings)] = 0
    return out if own is out else out.copy_(own)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives q, k and v of which q and k have as many heads. Where several queries share a key, keys and values are
    repeated for them."""
    queries, keys, values = q.shape[1], k.shape[1], v.shape[1]
    if queries == keys:
        return q, k, v
    if keys != values or not keys or queries % keys:
        raise ValueError(f"k: Hk = {keys}, expected Hq = {queries}, or Hv = {values} where that divides Hq")
    return q, *(x.repeat_interleave(queries // keys, 1) for x in (k, v))


def _rows(name: str, x: Any, size: int) -> Int32:
    found = _check.integers(name, x, np.int64)
    if len(found) != size:
        raise ValueError(f"{name}: {len(found)} numbers, expected B = {size}")
    for b in np.flatnonzero((found > _check.INT32_MAX) | (found < -_check.INT32_MAX))[:1]:
        raise ValueError(f"{name}[{b}]: {found[b]}, expected at most {_check.INT32_MAX}")
    return found.astype(np.int32)


def _within(name: str, rows: Int32, size: int) -> Tensor:
    """Checks rows of a tensor, of which each is one sequence's."""
    for b in np.flatnonzero((rows < 0) | (rows >= size))[:1]:
        raise ValueError(f"{name}[{b}]: {rows[b]}, outside 0..{size - 1}")
    if len(np.unique(rows)) != len(rows):
        raise ValueError(f"{name}: two sequences have the same row")
    return torch.from_numpy(rows).long()


def _marks(starts: Int32, every: int, kept: Tensor | None, counts: Any) -> Int32:
    """Gives rows (sequence, tokens, slot) of checkpoints, behind the sequences' own slots."""
    number = len(starts) - 1
    if not every:
        for name, x in (("state_checkpoints", kept), ("checkpoint_cu_starts", counts)):
            if x is not None:
                raise ValueError(f"{name}: given without checkpoint_every_n_tokens")
        return np.empty((0, 3), np.int32)
    if every % 64:
        raise ValueError(f"checkpoint_every_n_tokens: {every} is no multiple of 64")
    lens = np.diff(starts)
    found = [(r, n) for r in range(number) for n in range(every, int(lens[r]) + 1, every)]
    if kept is None:
        raise ValueError("state_checkpoints: is None, checkpoint_every_n_tokens needs it")
    if len(kept) < len(found):
        raise ValueError(f"state_checkpoints: {len(kept)} rows, expected at least {len(found)}")
    wanted = np.append(0, np.cumsum(lens // every))
    given = _rows("checkpoint_cu_starts", counts, number + 1) if counts is not None else None
    if given is None or not np.array_equal(given, wanted):
        raise ValueError(f"checkpoint_cu_starts: expected {wanted.tolist()}, where each sequence's checkpoints start")
    return np.array([(r, n, number + i) for i, (r, n) in enumerate(found)], np.int32).reshape(-1, 3)
