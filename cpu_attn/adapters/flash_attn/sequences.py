# SPDX-License-Identifier: Apache-2.0
"""This module computes attention of sequences whose queries and keys are dense, packed or in pages, in any combination.

float8 queries, keys and values are attended in float32: queries are widened, which is exact, keys and values are read
where they lie. The output is bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn._arrays import dense_rows
from cpu_attn.flash_attn.call import Attention, Logits, one_length
from cpu_attn.torch.entry import RefusedError, axes, optional
from cpu_attn.torch.packed import Int32, Part, int32, parts_of, starts_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


@dataclass(frozen=True)
class Where:
    """Says where sequences lie. cu_seqlens_q, cu_seqlens_k: of packed ones, None for dense ones; seqused_q, seqused_k:
    how many of their tokens count, None for all; block_table: of pages."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    block_table: Any = None


@dataclass(frozen=True)
class Descales:
    """Holds what float8 queries, keys and values are multiplied with: float32 [B, Hkv] each, or None."""

    q: Any = None
    k: Any = None
    v: Any = None


NO_DESCALES = Descales()


class Queries:
    """Holds q, whose sequences start at ``starts`` [B + 1]. states: its tokens [T, Hq, D], in float32 if q is
    float8."""

    def __init__(self, query: Tensor, cu_seqlens_q: Any):
        if cu_seqlens_q is None:
            axes("q", query, batch_size=None, seqlen_q=None, num_heads=None, head_size=None)
            self.starts, self.states = one_length(*query.shape[:2]), dense_rows(query).flatten(0, 1)
        else:
            axes("q", query, T_q=None, num_heads=None, head_size=None)
            self.starts, self.states = starts_of("cu_seqlens_q", cu_seqlens_q, len(query)), dense_rows(query)
        if query.dtype not in (*FLOATS, *FLOAT8):
            kinds = ", ".join(str(x).removeprefix("torch.") for x in (*FLOATS, *FLOAT8))
            raise TypeError(f"q: dtype {query.dtype}, expected one of {kinds}")
        self.shape, self.dtype, self.batch_size = query.shape[:-2], query.dtype, len(self.starts) - 1
        self.by_value: Tensor | None = None  # what the output [T, Hq, Dv] is multiplied with

    def attends(self, **keys: Tensor) -> None:
        """Checks that keys and values have the dtype of q."""
        for name, x in keys.items():
            if x.dtype != self.dtype:
                raise TypeError(f"{name}: dtype {x.dtype}, expected {self.dtype}, that of q")

    def widen(self, num_kv_heads: int, logits: Logits, descales: Descales) -> Logits:
        """Makes states of what q is, and gives the logits of these."""
        named = {"q_descale": descales.q, "k_descale": descales.k, "v_descale": descales.v}
        if self.dtype not in FLOAT8:
            for name, x in named.items():
                if x is not None:
                    raise RefusedError(f"{name}: expected None; q is not float8")
            return logits
        self.states = self.states.float()
        for name, x in zip(named, optional(**named), strict=True):
            if x is None:
                continue
            axes(name, x, batch_size=self.batch_size, num_kv_heads=num_kv_heads)
            if x.dtype != torch.float32:
                raise TypeError(f"{name}: dtype {x.dtype}, expected torch.float32")
            factors = self._of_tokens(x, num_kv_heads)
            if name == "v_descale":
                self.by_value = factors
            else:
                self.states *= factors
        return replace(logits, kv_cache_dtype=FLOAT8[self.dtype])

    def _of_tokens(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """Gives factors [B, Hkv] for each token and query head [T, Hq, 1], 0 for tokens past the last sequence."""
        num_tokens, num_heads = self.states.shape[:2]
        lens = np.diff(self.starts, append=num_tokens).astype(np.int64)
        rows = torch.nn.functional.pad(x, (0, 0, 0, 1)).repeat_interleave(torch.from_numpy(lens), 0)
        return rows.repeat_interleave(num_heads // max(1, num_kv_heads), 1)[..., None]

    def results(self, call: Attention) -> tuple[Tensor, Tensor | None]:
        """Gives out as q has its tokens, [B, S_q, Hq, Dv] or [T_q, Hq, Dv], and lse [B, Hq, S_q] or [Hq, T_q]."""
        out, lse = call.results()
        if self.by_value is not None:
            out = out * self.by_value
        if self.dtype in FLOAT8:
            out = out.bfloat16()
        if len(self.shape) == 1:
            return out, lse
        if lse is not None:
            lse = lse.unflatten(1, self.shape).transpose(0, 1).contiguous()
        return out.unflatten(0, self.shape), lse


def _counts(name: str, x: Any, most: Int32, what: str) -> Int32:
    used: Int32 = int32(name, x, len(most)).copy()
    for b in np.flatnonzero((used < 0) | (used > most)):
        raise ValueError(f"{name}[{b}]: {used[b]}, outside 0..{most[b]}, {what}")
    return used


def _keys_of(key: Tensor, value: Tensor, batch_size: int, head_size: int, at: Where) -> tuple[Int32, Iterable[Part]]:
    """Gives how many keys sequences have, and where these lie."""
    if at.block_table is not None:
        sizes: list[tuple[str, int | None]] = [("batch_size", batch_size), ("blocks", None)]
        columns = _check.array("block_table", at.block_table, ["int32"], sizes).shape[1]
        axes("k", key, N=None, page_size=None, num_kv_heads=None, head_size=head_size)
        most = np.full(batch_size, min(columns * key.shape[1], _check.INT32_MAX), np.int32)
        used = at.seqused_k
        if used is None and at.cu_seqlens_k is not None:
            starts = starts_of("cu_seqlens_k", at.cu_seqlens_k, _check.INT32_MAX, batch_size + 1)
            used = torch.from_numpy(np.diff(starts))
        lens = most if used is None else _counts("seqused_k", used, most, "the slots that block_table has room for")
        return parts_of(key, value, None, torch.from_numpy(lens), at.block_table, batch_size)
    if at.cu_seqlens_k is not None:
        return parts_of(dense_rows(key), dense_rows(value), at.cu_seqlens_k, at.seqused_k, None, batch_size)
    axes("k", key, batch_size=batch_size, seqlen_k=None, num_kv_heads=None, head_size=head_size)
    axes("v", value, batch_size=batch_size, seqlen_k=key.shape[1], num_kv_heads=key.shape[2], head_size_v=None)
    lens = np.full(batch_size, key.shape[1], np.int32)
    if at.seqused_k is not None:
        lens = _counts("seqused_k", at.seqused_k, lens, "the keys of a sequence")
    if not key.shape[1]:  # a block has at least one token
        key, value = (x.reshape(0, 1, *x.shape[2:]) for x in (key, value))
    return lens, [(0, batch_size, dense_rows(key), dense_rows(value), np.arange(batch_size, dtype=np.int32)[:, None])]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: Logits,
    at: Where,
    *,
    descales: Descales = NO_DESCALES,
    hidden: Sequence[int] = (0, 0),
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gives out [B, S_q, Hq, Dv] and lse [B, Hq, S_q], or of packed queries [T_q, Hq, Dv] and [Hq, T_q].

    hidden: so many query tokens at the end of each sequence see nothing, and so many keys at its end are not seen,
    whatever else hides. The others keep their places. selected: int32 [B, S_q, k] or [T_q, k], the keys of its sequence
    that each token may see, in any order, others being -1; or None.
    """
    queries = Queries(query, at.cu_seqlens_q)
    lens, parts = _keys_of(key, value, queries.batch_size, query.shape[-1], at)
    queries.attends(k=key, v=value)
    used: Int32 = np.diff(queries.starts)
    if at.seqused_q is not None:
        used = _counts("seqused_q", at.seqused_q, used, "the query tokens of a sequence")
    # The last query token stands at the last key. Where fewer keys are left, all tokens stand further to the left, and
    # where fewer query tokens are left, further to the right.
    used, lens = (np.maximum(x - n, 0) for x, n in zip((used, lens), hidden, strict=True))
    logits = queries.widen(key.shape[-2], logits, descales)
    chosen = None if selected is None else _ascending(selected, queries, lens)
    call = Attention(queries.states, queries.starts, lens, parts, value.shape[-1], logits, used, chosen)
    return queries.results(call)


def _ascending(selected: Tensor, queries: Queries, lens: Int32) -> Tensor:
    """Gives selected_tokens [T, k] as the core takes them: those below lens of their sequence, ascending, then -1."""
    if selected.dtype != torch.int32:
        raise TypeError(f"gather_kv_indices: dtype {selected.dtype}, expected torch.int32")
    if not selected.dim() or selected.shape[:-1] != queries.shape:
        raise ValueError(f"gather_kv_indices: shape {tuple(selected.shape)}, expected {(*queries.shape, 'n')}")
    past = np.diff(queries.starts, append=len(queries.states))
    ends = torch.from_numpy(np.repeat(np.append(lens, 0), past).astype(np.int32))[:, None]
    flat, nothing = selected.reshape(len(queries.states), selected.shape[-1]), _check.INT32_MAX
    flat = torch.where((flat < 0) | (flat >= ends), nothing, flat).sort(1).values
    return torch.where(flat == nothing, -1, flat)
