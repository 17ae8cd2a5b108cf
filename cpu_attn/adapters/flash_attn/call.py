# SPDX-License-Identifier: Apache-2.0
"""This module has what the functions of flash-attn have in common: their checks, ALiBi as flash-attn has it, and the
call itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn.plan import get_scheduler_metadata
from cpu_attn.torch.entry import RefusedError, Run, optional
from cpu_attn.torch.entry import entry as named
from cpu_attn.torch.packed import Int32, Part

# Errors use these names for the arguments that all of the functions have.
NAMES = {"scale": "softmax_scale", "sliding_window": "window_size", "isa": "CPU_ATTN_ISA", "output": "out"}
NAMES |= {"with_lse": "return_attn_probs"}


class ArgumentError(ValueError, RuntimeError):
    """An argument does not fit: flash-attn's extension raises RuntimeError for it, cpu-attn ValueError."""


def entry(**names: str) -> Callable[[Run], Run]:
    """Decorates a function of flash-attn's as :func:`cpu_attn.torch.entry.entry` does; its ValueErrors are
    ArgumentErrors."""

    def wrapped(run: Run) -> Run:
        @functools.wraps(run)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return run(*args, **options)
            except RefusedError:
                raise
            except ValueError as e:
                raise ArgumentError(str(e)) from None

        return named(**names)(call)  # type: ignore[return-value]

    return wrapped


@dataclass(frozen=True)
class Logits:
    """Says what becomes of q.k. scale: None is 1 / sqrt(D); window: a side of -1 is open; alibi_slopes: float32 [Hq] or
    [B, Hq]; s_aux: [Hq]. chunk: attention_chunk_size. unseen: the lse of a row that sees no key, without s_aux."""

    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    with_lse: bool
    split: bool = True
    s_aux: Tensor | None = None
    chunk: int | None = None
    unseen: float = math.inf
    kv_cache_dtype: str = "auto"


def logits_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    with_lse: bool,
    num_splits: int = 0,
    s_aux: Tensor | None = None,
    attention_chunk: int = 0,
) -> Logits:
    if _check.number("dropout_p", dropout_p):
        raise ValueError(f"dropout_p: {dropout_p}, expected 0.0: cpu_attn is for inference")
    sides = _check.sequence("window_size", window_size)
    if len(sides) != 2:
        raise ValueError(f"window_size: expected (left, right), got {len(sides)} values")
    left, right = (max(-1, _check.integer(f"window_size[{i}]", x, -(2**31))) for i, x in enumerate(sides))
    causal = _check.boolean("causal", causal) or right == 0
    scale = None if softmax_scale is None else _check.number("softmax_scale", softmax_scale)
    cap = max(0.0, _check.number("softcap", softcap))
    split = _check.integer("num_splits", num_splits, 0) != 1
    slopes, sinks = optional(alibi_slopes=alibi_slopes, s_aux=s_aux)
    with_lse = _check.boolean("with_lse", with_lse)
    chunk = _check.integer("attention_chunk", attention_chunk, 0) or None
    return Logits(scale, causal, (left, -1 if causal else right), cap, slopes, with_lse, split, sinks, chunk)


def _alibi_bias(slopes: NDArray[np.float32], q_lens: Int32, lens: Int32) -> NDArray[np.float32]:
    """Gives attn_bias for -slope * |distance|, slopes [R or 1, Hq]. It is the same along a request's diagonals, which
    are all that is stored, Q + K numbers for each request and head: row i is a view that begins one number before row i
    - 1."""
    num_rows, num_keys = int(q_lens.max()), int(lens.max())
    first = lens - q_lens  # the place of a request's first query token
    if len(slopes) == 1 and (first == first[0]).all():
        first = first[:1]
    distance = np.arange(1 - num_rows, num_keys, dtype=np.float32) - first.astype(np.float32)[:, None]
    diagonals = -slopes[:, :, None] * np.abs(distance)[:, None]
    request, head, key = diagonals.strides
    shape = (*diagonals.shape[:2], num_rows, num_keys)
    return np.lib.stride_tricks.as_strided(diagonals[:, :, num_rows - 1 :], shape, (request, head, -key, key))


def _alibi(
    logits: Logits, num_heads: int, starts: Int32, lens: Int32
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """Gives the core's alibi_slopes, [Hq] or for each request [R, Hq], or its attn_bias where a token may see keys to
    its right: flash-attn takes off the distance on both sides, while slopes would add it on the right."""
    slopes, num_reqs = logits.alibi_slopes, len(lens)
    if slopes is None:
        return None, None
    by_request = slopes.dim() == 2
    sizes = [*[("batch_size", num_reqs)] * by_request, ("num_heads", num_heads)]
    array = _check.array("alibi_slopes", slopes, ["float32"], sizes).numpy()
    q_lens: Int32 = np.diff(starts)
    if not lens[q_lens > 0].any():
        return None, None
    if not logits.causal and q_lens.max() > 1:
        return None, _alibi_bias(np.atleast_2d(array), q_lens, lens)
    return array, None


def _each(parts: Iterable[Part]) -> Iterator[Part]:
    """Makes every request a part by itself."""
    for first, end, key, value, table in parts:
        for r in range(first, end):
            yield r, r + 1, key, value, table[r - first : r - first + 1]


class Attention:
    """Holds a call that is planned and not yet run.

    query [T, Hq, D]; starts and lens are query_start_loc and seq_lens; parts cover all requests. used [B]: how many of
    each request's query tokens count, None for all; with fewer the query is copied. selected: selected_tokens, one row
    for each token of query, or None. Tokens that no request has, or that do not count, give 0.
    """

    def __init__(
        self,
        query: Tensor,
        starts: Int32,
        lens: Int32,
        parts: Iterable[Part],
        head_size_v: int,
        logits: Logits,
        used: Int32 | None = None,
        selected: Tensor | None = None,
    ):
        _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
        self.logits, self.num_tokens = logits, len(query)
        self.rows: Tensor | None = None  # of query and results, which tokens count
        if used is not None and (used != np.diff(starts)).any():
            packed = starts_after(used)
            self.rows = torch.from_numpy(np.repeat(starts[:-1] - packed[:-1], used) + np.arange(packed[-1]))
            query, starts, selected = query[self.rows], packed, None if selected is None else selected[self.rows]
        self.used = int(starts[-1])
        _, num_heads, head_size = query.shape
        self.scale = max(1, head_size) ** -0.5 if logits.scale is None else logits.scale
        self.out = query.new_empty(len(query), num_heads, head_size_v)
        self.lse = query.new_empty(num_heads, len(query), dtype=torch.float32) if logits.with_lse else None
        slopes, bias = _alibi(logits, num_heads, starts, lens)
        by_request = slopes is not None and slopes.ndim == 2
        self.calls: list[tuple[int, Any, tuple[Any, ...]]] = []
        for first, end, key, value, table in _each(parts) if by_request else parts:
            tokens = slice(int(starts[first]), int(starts[end]))
            plan = get_scheduler_metadata(
                *(end - first, num_heads, key.shape[2], head_size, lens[first:end], query.dtype),
                *(starts[first : end + 1] - starts[first], logits.causal, logits.window),
                enable_kv_split=logits.split,
                kv_cache_dtype=logits.kv_cache_dtype,
                head_size_v=head_size_v,
                kv_cache_layout="NHD",
                attention_chunk_size=logits.chunk,
                max_selected_tokens=None if selected is None else max(1, selected.shape[1]),
            )
            arrays = _check.attention_arrays(
                output=self.out[tokens],
                lse=None if self.lse is None else self.lse[:, tokens],
                query=query[tokens],
                key_cache=key,
                value_cache=value,
                block_table=table,
                s_aux=logits.s_aux,
                alibi_slopes=slopes[first] if slopes is not None and by_request else slopes,
                attn_bias=bias if bias is None or len(bias) == 1 else bias[first:end],
                selected_tokens=None if selected is None else selected[tokens],
            )
            self.calls.append((first, plan, arrays))

    def run(self, only_check: bool = False) -> None:
        for first, plan, arrays in self.calls:
            try:
                ops.run_attention(plan, arrays, self.scale, self.logits.softcap, (1.0, 1.0), only_check=only_check)
            except ValueError as e:  # a part counts requests from its first one
                raise ValueError(str(e).replace("request 0:", f"request {first}:")) from None

    def results(self) -> tuple[Tensor, Tensor | None]:
        """Gives out [T, Hq, Dv] and lse [Hq, T]."""
        self.run()
        out, lse, sinks = self.out, self.lse, self.logits.s_aux
        if self.rows is None:
            out[self.used :] = 0
        else:
            out = out.new_zeros(self.num_tokens, *out.shape[1:]).index_copy(0, self.rows, out)
        if lse is None:
            return out, None
        if sinks is None:
            lse[lse == -torch.inf] = self.logits.unseen
        rest = self.logits.unseen if sinks is None else sinks[:, None]
        if self.rows is None:
            lse[:, self.used :] = rest
        else:
            lse = (lse.new_zeros(len(lse), self.num_tokens) + rest).index_copy(1, self.rows, lse)
        return out, lse


def returned(out: Tensor, lse: Tensor | None) -> Any:
    return out if lse is None else (out, lse, out.new_empty(0))


def one_length(batch_size: int, q_length: int) -> Int32:
    return (np.arange(batch_size + 1) * q_length).astype(np.int32)


def starts_after(lens: Int32) -> Int32:
    """Gives where sequences of these lengths start that lie one after another, [B + 1]."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
