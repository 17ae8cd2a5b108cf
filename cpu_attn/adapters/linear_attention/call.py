# SPDX-License-Identifier: Apache-2.0
"""This module has what the functions over torch's tensors share: where sequences start, states that are given and
wanted, and the calls of :mod:`cpu_attn.linear` over packed tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_attn import _check, get_num_threads
from cpu_attn._arrays import dense_rows, view
from cpu_attn.linear import (
    causal_conv1d,
    get_linear_attention_metadata,
    linear_attention_with_state_cache,
)
from cpu_attn.torch import entry
from cpu_attn.torch.entry import RefusedError, axes

Int32 = NDArray[np.int32]


# ---- tensors ----


def tensors(**named: Any) -> list[Tensor]:
    """Does what :func:`cpu_attn.torch.entry.tensors` does, for tensors with which torch computes, too."""
    found = entry.tensors(**named)
    for name, x in named.items():
        if x.device.type != "cpu":
            raise TypeError(f"{name}: is on device {x.device}, expected cpu")
        if x.is_complex():
            raise TypeError(f"{name}: dtype {x.dtype}, expected real numbers")
    return found


def optional(**named: Any) -> list[Any]:
    """Does the same where some of them may be None."""
    return [x if x is None else tensors(**{name: x})[0] for name, x in named.items()]


def floats(name: str, x: Tensor) -> torch.dtype:
    """Gives the dtype of a tensor with which the kernels compute."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.float32, torch.float16 or torch.bfloat16")
    return x.dtype


def written(name: str, x: Tensor) -> None:
    """Checks a tensor that a function changes, before it changes any."""
    floats(name, x)
    _check.writable(name, view(name, x))


def integers(name: str, x: Any, **sizes: int | None) -> NDArray[np.int64]:
    """Gives a copy of a tensor of integers. sizes: its axes, as for :func:`cpu_attn.torch.entry.axes`."""
    (x,) = tensors(**{name: x})
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32 or torch.int64")
    axes(name, x, **sizes)
    found: NDArray[np.int64] = x.resolve_neg().numpy().astype(np.int64)
    return found


# ---- sequences ----


@lru_cache(maxsize=64)
def _plan(starts: bytes, brings: bytes, dtype: torch.dtype, heads: tuple[int, ...], *_: Any) -> Any:
    loc, flags = np.frombuffer(starts, np.int32), np.frombuffer(brings, np.bool_)
    return get_linear_attention_metadata(loc, dtype, *heads, has_initial_state=flags)


def plan(starts: Int32, brings: NDArray[np.bool_] | bool, dtype: torch.dtype, *heads: int) -> Any:
    """Gives the plan of such a step, which layers share. A thread count or an isa that has changed makes another."""
    flags = np.full(len(starts) - 1, brings) if isinstance(brings, bool) else brings
    setting = (get_num_threads(), os.environ.get("CPU_ATTN_ISA"), os.environ.get("CPU_ATTN_ENGINE"))
    return _plan(starts.tobytes(), flags.tobytes(), dtype, heads, *setting)


@lru_cache(maxsize=64)
def each(batch_size: int, length: int) -> Int32:
    """Gives where sequences of one length start."""
    if batch_size * length > _check.INT32_MAX:
        raise ValueError(f"{batch_size} sequences of {length} tokens: expected at most {_check.INT32_MAX} tokens")
    return (np.arange(batch_size + 1) * length).astype(np.int32)


def starts_of(batch_size: int, length: int, cu_seqlens: Any) -> Int32:
    """Gives where sequences start: those of a batch, or those that cu_seqlens [N + 1] packs into a batch of 1."""
    if cu_seqlens is None:
        return each(batch_size, length)
    starts = _check.rising("cu_seqlens", integers("cu_seqlens", cu_seqlens, **{"N + 1": None}))
    if batch_size != 1:
        raise ValueError(f"cu_seqlens: the batch size is {batch_size}, expected 1 of packed sequences")
    if starts[-1] != length:
        raise ValueError(f"cu_seqlens[{len(starts) - 1}]: {starts[-1]}, expected the number of tokens, {length}")
    return starts.astype(np.int32)


def runs(seq_idx: NDArray[np.int64]) -> tuple[Int32, Int32]:
    """Gives where sequences start that integers [B, T] tell apart in each row of a batch, and the first of each row
    among them [B]."""
    begins = np.ones(seq_idx.shape, np.bool_)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = np.append(np.flatnonzero(begins), seq_idx.size).astype(np.int32)
    firsts = np.searchsorted(starts, np.arange(len(seq_idx)) * seq_idx.shape[1]).astype(np.int32)
    return starts, firsts


def slots_of(name: str, indices: Any, batch_size: int, size: int) -> Int32:
    """Gives which of ``size`` rows is that of each sequence: the first ones, or those that indices, int32 [B], name,
    each once. Negative: none."""
    if indices is None:
        return np.arange(batch_size, dtype=np.int32)
    slots: Int32 = _check.array(name, indices, ["int32"], [("B", batch_size)]).numpy().copy()
    for b in np.flatnonzero(slots >= size)[:1]:
        raise ValueError(f"{name}[{b}]: {slots[b]}, expected less than {size}")
    own, counts = np.unique(slots[slots >= 0], return_counts=True)
    for row in own[counts > 1][:1]:
        raise ValueError(f"{name}: row {row} is that of two sequences")
    return slots


def packed(x: Tensor) -> Tensor:
    """Gives [B, T, ...] as [B * T, ...], a view where strides allow it, with a dense last axis."""
    return dense_rows(x.flatten(0, 1))


def clear(output: Tensor, padding: NDArray[np.bool_]) -> None:
    """Makes the output of padding 0."""
    if padding.any():
        output[torch.from_numpy(padding)] = 0


# ---- states ----


class States:
    """Holds the slots of a call. Sequences begin from those given, if any; where they are to be kept, they end in
    ``after``, which is memory of its own unless ``in_place`` says that it may be the given one.

    Args:
        initial: [N, ...], or None: from zeros.
        shape: of all states, N first.
        keep: whether states are wanted afterwards.
        dtype: of the states that are made.
        in_place: whether a given state of that dtype may be changed.
    """

    def __init__(
        self, initial: Tensor | None, shape: tuple[int, ...], keep: bool, dtype: torch.dtype, in_place: bool = False
    ) -> None:
        numbers = np.arange(shape[0], dtype=np.int32)
        self.brings: NDArray[np.bool_] | bool = initial is not None
        self.indices = numbers if keep else np.full(shape[0], -1, np.int32)
        self.initial_indices = None if keep or initial is None else numbers
        if initial is None:
            self.cache = torch.zeros(shape if keep else (0, *shape[1:]), dtype=dtype)  # no token may come
        elif not keep or (in_place and initial.dtype == dtype):
            self.cache = initial.contiguous()
        else:
            self.cache = torch.empty(shape, dtype=dtype).copy_(initial)

    @classmethod
    def at(cls, cache: Tensor, slots: Int32, brings: NDArray[np.bool_] | None = None) -> States:
        """Gives the states of sequences that have these slots of a cache, which is changed in place. Negative: a
        sequence begins from zeros, and keeps nothing. brings: which of them begin from what is there, all unless
        said."""
        states = cls.__new__(cls)
        states.cache, states.indices, states.initial_indices = cache, slots, None
        states.brings = slots >= 0 if brings is None else brings
        return states

    def after(self, keep: bool) -> Tensor | None:
        return self.cache if keep else None


@contextmanager
def borrowed(cache: Tensor, slots: Int32, in_place: bool) -> Iterator[States]:
    """Gives the states of sequences that have these slots of a cache, which a call changes: where they lie, or in a
    dense copy of their rows, which is put back after the call."""
    if in_place:
        yield States.at(cache, slots)
        return
    mine = slots >= 0
    rows = torch.from_numpy(slots[mine]).long()
    copy = cache[rows].contiguous()
    yield States.at(copy, np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32))
    cache[rows] = copy


# ---- calls ----


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Int32,
    states: States,
    *,
    out_dtype: torch.dtype | None = None,
    state_layout: str = "KV",
    **options: Any,
) -> Tensor:
    """Computes linear attention of query, key [B, T, Hk, Dk] and value [B, T, Hv, Dv], in float32 where their dtypes
    differ: gives [B, T, Hv, Dv], of the dtype of value unless ``out_dtype`` says otherwise. options: of
    :func:`cpu_attn.linear.linear_attention_with_state_cache`, tensors among them packed."""
    heads = (key.shape[2], value.shape[2], key.shape[3], value.shape[3])
    given = [floats(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    dtype = given[0] if len(set(given)) == 1 else torch.float32  # in which it is computed
    query, key, value = (x.to(dtype) for x in (query, key, value))
    wanted = out_dtype or given[2]
    output = torch.empty(value.shape, dtype=wanted if wanted == dtype else torch.float32)
    linear_attention_with_state_cache(
        *(packed(query), packed(key), packed(value), output.flatten(0, 1)),
        *(states.cache, states.indices, plan(starts, states.brings, dtype, *heads)),
        state_layout=state_layout,
        initial_state_indices=states.initial_indices,
        **options,
    )
    return output.to(wanted)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Int32, states: States, silu: bool, **options: Any
) -> Tensor:
    """Convolves x [B, T, C]: gives [B, T, C]. options: of :func:`cpu_attn.linear.causal_conv1d`."""
    output = torch.empty(x.shape, dtype=floats("x", x))
    weight, bias = (y if y is None or y.dtype == x.dtype else y.float() for y in (weight, bias))
    causal_conv1d(
        *(packed(x), dense_rows(weight), bias, output.flatten(0, 1)),
        *(states.cache, states.indices, plan(starts, states.brings, x.dtype)),
        activation="silu" if silu else None,
        initial_state_indices=states.initial_indices,
        **options,
    )
    return output


def only(name: str, x: Any, expected: Any, why: str) -> None:
    """Refuses an argument that says anything else than ``expected``."""
    if x is not expected and not (isinstance(x, type(expected)) and x == expected):
        found = "a tensor" if isinstance(x, Tensor) else repr(x)
        raise RefusedError(f"{name}: {found}, expected {expected!r}: {why}")
