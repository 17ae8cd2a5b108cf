# SPDX-License-Identifier: Apache-2.0
"""This module has flash_attn_with_kvcache: it writes new keys and values into a cache, then attends over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn._arrays import dense_rows
from cpu_attn.flash_attn.call import NAMES, Attention, Logits, entry, logits_of, one_length
from cpu_attn.flash_attn.sequences import FLOAT8, NO_DESCALES, Descales, Queries
from cpu_attn.rotary import rotary_reshape_and_cache
from cpu_attn.torch.entry import RefusedError, axes, optional, tensors
from cpu_attn.torch.packed import Int32, Part, int32, overlapping, starts_of

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Says where in the caches sequences lie, as :func:`flash_attn_with_kvcache` has it."""

    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any


@dataclass(frozen=True)
class New:
    """Holds what is appended, as :func:`flash_attn_with_kvcache` has it. cu_seqlens: of packed ones [T_new, Hkv, D],
    None for dense ones; rotary_seqlens: the row of rotary_cos for the first token of each sequence, int32 [B], None for
    cache_seqlens."""

    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: bool
    cu_seqlens: Any = None
    rotary_seqlens: Any = None


class _Tokens:
    """Says of T tokens, which lie sequence by sequence, which sequence each is of and how many are before it there."""

    def __init__(self, starts: Int32):
        self.starts, self.lens = starts, np.diff(starts).astype(np.int64)
        self.sequence = np.repeat(np.arange(len(self.lens)), self.lens)
        self.before = np.arange(starts[-1]) - np.repeat(starts[:-1], self.lens)

    def after(self, first: Int64, step: int = 1) -> Int64:
        """Gives places [T] that begin at first [B] in each sequence."""
        places: Int64 = first[self.sequence] + step * self.before
        return places


class _Cache:
    """Holds key [N, S, Hkv, D] and value, and says where in them B sequences lie: table [B, M]."""

    def __init__(self, key: Tensor, value: Tensor, batch_size: int, head_size: int, at: Places):
        axes("k_cache", key, N=None, S=None, num_kv_heads=None, head_size=head_size)
        axes("v_cache", value, N=key.shape[0], S=key.shape[1], num_kv_heads=key.shape[2], head_size_v=None)
        self.key, self.value, self.paged = key, value, at.block_table is not None
        if not self.paged:
            table = np.arange(len(key), dtype=np.int32)[:, None]
        else:
            sizes: list[tuple[str, int | None]] = [("rows", None), ("blocks", None)]
            table = _check.array("block_table", at.block_table, ["int32"], sizes).numpy().copy()
        if at.cache_batch_idx is not None:
            self.row = int32("cache_batch_idx", at.cache_batch_idx, batch_size).copy()
            for b in np.flatnonzero((self.row < 0) | (self.row >= len(table))):
                raise ValueError(f"cache_batch_idx[{b}]: {self.row[b]}, outside 0..{len(table) - 1}")
        elif not self.paged and len(table) < batch_size:
            raise ValueError(f"k_cache: {len(table)} sequences, q has {batch_size}")
        elif self.paged and len(table) != batch_size:
            raise ValueError(f"block_table: axis 0 is {len(table)}, expected batch_size = {batch_size}")
        else:
            self.row = np.arange(batch_size, dtype=np.int32)
        self.table = table[self.row]
        self.form: Any = {"kv_cache_dtype": FLOAT8.get(key.dtype, "auto"), "kv_cache_layout": "NHD"}
        self.size = max(1, key.shape[1])
        self.capacity = self.table.shape[1] * key.shape[1]

    def lengths(self, cache_seqlens: Any, new: Int64) -> Int64:
        """Gives how many tokens of each sequence are there before the new ones, and checks the table up to these."""
        batch_size = len(self.table)
        if isinstance(cache_seqlens, torch.Tensor):
            lens = int32("cache_seqlens", cache_seqlens, batch_size).astype(np.int64)
        else:
            length = self.capacity if cache_seqlens is None else _check.integer("cache_seqlens", cache_seqlens, 0)
            lens = np.full(batch_size, length, np.int64)
        for b in np.flatnonzero((lens < 0) | (lens > self.capacity - new)):
            slots = f"{self.capacity} slots of a sequence{' in block_table' * self.paged}"
            room = f"the {slots} less {new[b]} new tokens"
            raise ValueError(f"cache_seqlens[{b}]: {lens[b]}, outside 0..{self.capacity - new[b]}, {room}")
        needed = np.arange(self.table.shape[1]) * self.size < (lens + new)[:, None]
        for b, i in np.argwhere(needed & ((self.table < 0) | (self.table >= len(self.key)))):
            raise ValueError(f"block_table[{self.row[b]}, {i}]: {self.table[b, i]}, outside 0..{len(self.key) - 1}")
        return lens

    def slots(self, sequence: Int64, places: Int64) -> Int64:
        """Gives the slots [T] of the tokens at these places of these sequences."""
        slots: Int64 = self.table[sequence, places // self.size].astype(np.int64) * self.size + places % self.size
        return slots

    def parts(self, ends: Int64, leftpad: Any, lens: Int64) -> tuple[Int32, list[Part]]:
        """Gives how many keys sequences have that end at ``ends``, and where these lie. Behind a leftpad, which is at
        most lens, a sequence without pages is one block of just its length."""
        if leftpad is None:
            return ends.astype(np.int32), [(0, len(ends), self.key, self.value, self.table)]
        pad = int32("cache_leftpad", leftpad, len(ends)).astype(np.int64)
        for b in np.flatnonzero((pad < 0) | (pad > lens)):
            raise ValueError(f"cache_leftpad[{b}]: {pad[b]}, outside 0..{lens[b]}, the sequence's cache_seqlens")
        if self.paged:
            return (ends - pad).astype(np.int32), [(0, len(ends), *self._cut(pad))]
        one, parts = np.zeros((1, 1), np.int32), list[Part]()
        for r, (row, first, end) in enumerate(zip(self.table[:, 0].tolist(), pad.tolist(), ends.tolist(), strict=True)):
            key, value = (overlapping(x[row, first:end], max(1, end - first)) for x in (self.key, self.value))
            parts.append((r, r + 1, key, value, one))
        return (ends - pad).astype(np.int32), parts

    def _cut(self, pad: Int64) -> tuple[Tensor, Tensor, Int32]:
        """Gives the pages as blocks of so many tokens that the first key of every sequence starts one, and their
        table."""
        size = math.gcd(self.size, *pad.tolist())
        in_page = self.size // size
        columns = (pad // size)[:, None] + np.arange(self.table.shape[1] * in_page)
        pages = np.take_along_axis(self.table, np.minimum(columns // in_page, self.table.shape[1] - 1), 1)
        if in_page == 1:
            return self.key, self.value, pages
        # A block starts at every token, and pages lie ``apart`` tokens apart.
        apart, rest = divmod(self.key.stride(0), max(1, self.key.stride(1)))
        if rest or self.value.stride(0) != apart * self.value.stride(1):
            raise RefusedError(
                "cache_leftpad: the pages of k_cache and v_cache do not lie the same whole number of tokens apart"
            )
        tokens = (len(self.key) - 1) * apart + self.size
        key, value = (
            overlapping(x.as_strided((tokens, *x.shape[2:]), x.stride()[1:]), size) for x in (self.key, self.value)
        )
        return key, value, (pages.astype(np.int64) * apart + columns % in_page * size).astype(np.int32)


def _starts_of_new(queries: Queries, cache: _Cache, cache_seqlens: Any, new: New) -> Int32:
    """Checks what is to be appended, and what has to come with it. Gives where the new tokens of sequences start."""
    k, v, batch_size = new.k, new.v, queries.batch_size
    if k is None:
        for name, x in (("v", v), ("rotary_cos", new.rotary_cos), ("rotary_sin", new.rotary_sin)):
            if x is not None:
                raise ValueError(f"{name}: only beside k")
        return one_length(batch_size, 0)
    for name, x in (("v", v), ("cache_seqlens", cache_seqlens)):
        if x is None:
            raise ValueError(f"{name}: is None, k is not")
    if new.rotary_cos is None and new.rotary_sin is not None:
        raise ValueError("rotary_cos: is None, rotary_sin is not")
    tokens: dict[str, int | None] = {"batch_size": batch_size, "seqlen_new": None}
    if new.cu_seqlens is not None:
        tokens = {"T_new": None}
    heads = cache.key.shape[2]
    axes("k", k, **tokens, num_kv_heads=heads, head_size=cache.key.shape[3])
    tokens = dict(zip(tokens, k.shape, strict=False))
    axes("v", v, **tokens, num_kv_heads=heads, head_size_v=cache.value.shape[3])
    queries.attends(k=k, v=v)
    if new.cu_seqlens is None:
        return one_length(batch_size, k.shape[1])
    return starts_of("cu_seqlens_k_new", new.cu_seqlens, len(k), batch_size + 1)


class _Rotary:
    """Holds a rotary embedding by cos and sin [positions, rot_dim / 2], of which a call takes the rows that it
    needs."""

    def __init__(self, cos: Tensor, sin: Tensor | None, interleaved: bool):
        if sin is None:
            raise ValueError("rotary_sin: is None, rotary_cos is not")
        axes("rotary_cos", cos, positions=None, angles=None)
        axes("rotary_sin", sin, positions=cos.shape[0], angles=cos.shape[1])
        if sin.dtype != cos.dtype:
            raise TypeError(f"rotary_sin: dtype {sin.dtype}, expected {cos.dtype}, that of rotary_cos")
        self.cos, self.sin, self.is_neox = cos, sin, not _check.boolean("rotary_interleaved", interleaved)

    def rows(self, positions: Int64) -> Tensor:
        """Gives the rows of these positions, cos and then sin: [T, rot_dim]."""
        last = int(positions.max(initial=-1))
        if last >= len(self.cos):
            raise ValueError(f"rotary_cos: axis 0 is {len(self.cos)}, expected at least {last + 1}, for the last token")
        at = torch.from_numpy(positions)
        found = torch.cat([self.cos[at], self.sin[at]], 1)
        return found.float() if found.dtype in FLOAT8 else found

    def turns(
        self, rotary_seqlens: Any, lens: Int64, starts: Int32, tokens: _Tokens, logits: Logits
    ) -> tuple[Tensor, Tensor]:
        """Gives the rows of queries that start at ``starts``, and of new tokens, the first of which stand at
        rotary_seqlens, None for lens."""
        if rotary_seqlens is not None:
            lens = int32("rotary_seqlens", rotary_seqlens, len(lens)).astype(np.int64)
            for b in np.flatnonzero(lens < 0):
                raise ValueError(f"rotary_seqlens[{b}]: {lens[b]}, expected at least 0")
        moves = logits.causal or logits.window != (-1, -1) or logits.chunk is not None
        return self.rows(_Tokens(starts).after(lens, int(moves))), self.rows(tokens.after(lens))


def _append_rotated(
    query: Tensor,
    out: Tensor,
    new: list[Tensor],
    cache: _Cache,
    slots: Int64,
    turns: tuple[Tensor, Tensor],
    is_neox: bool,
) -> None:
    """Rotates queries [T, Hq, D] into out by turns[0], and new keys [T_new, Hkv, D] by turns[1] into the cache. Where
    these differ that takes two calls: one that writes no key, and one that rotates a head of the keys for nothing."""

    def rotate(query: Tensor, out: Tensor, new: list[Tensor], slots: Int64, rows: Tensor) -> None:
        arrays = (query, new[0], new[1], cache.key, cache.value, slots, np.arange(len(slots)), rows)
        rotary_reshape_and_cache(*arrays, is_neox, query_out=out, **cache.form)

    if torch.equal(*turns):
        rotate(query, out, new, slots, turns[1])
        return
    nothing = [x.new_zeros(x.shape[-1]).expand(len(query), *x.shape[1:]) for x in new]
    rotate(query, out, nothing, np.full(len(query), -1), turns[0])
    head = new[0][:, :1]
    rotate(head, torch.empty_like(head), new, slots, turns[1])


# Errors use these names for the arguments of flash_attn_with_kvcache.
CACHED = NAMES | {"with_lse": "return_softmax_lse", "query": "q", "query_out": "q", "key": "k", "value": "v"}
CACHED |= {"key_cache": "k_cache", "value_cache": "v_cache", "cos_sin_cache": "rotary_cos", "seq_lens": "cache_seqlens"}


@entry(**CACHED)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends new keys and values to a cache and computes attention over it.

    Args:
        q: [B, S_q, Hq, D].
        k_cache: [N, S, Hkv, D], N at least B; with ``block_table`` pages [N, page_block_size, Hkv, D] of any size. The
            last axis is dense. It is never copied.
        v_cache: [N, S, Hkv, Dv], or pages likewise.
        k: [B, S_new, Hkv, D] to append, or None.
        v: [B, S_new, Hkv, Dv] to append, or None.
        rotary_cos: [positions, rot_dim / 2], float32 or q's dtype, or None; only beside ``k``. A new key turns by the
            row of its slot in the sequence. If causal or with a window, so do the queries, the first one as the first
            new key; else all queries turn as that one. It is computed in float32 and rounded once.
        rotary_sin: the same of sines.
        cache_seqlens: how many tokens of each sequence the cache holds before the call: an int or int32 [B]. None,
            where nothing is appended: as many as there are slots.
        cache_batch_idx: int32 [B], or None: which sequences of the cache these are, or which rows of ``block_table``.
            Where two are the same one and write to the same slot, one of them is there.
        cache_leftpad: int32 [B], or None: the slots before a sequence's first key, which ``cache_seqlens`` counts, too.
            Each sequence is then a call by itself, or with ``block_table`` pages are read in blocks of their size's
            greatest common divisor with all of ``cache_leftpad``.
        block_table: int32 [B, M], or None: the pages of each sequence; with ``cache_batch_idx`` any number of rows.
        softmax_scale: the factor of q.k; 1 / sqrt(D) unless said.
        causal: whether a token sees the keys up to its own place only. The last query stands at the last key.
        window_size: (left, right), so many keys to each side; negative: all.
        softcap: 0 is off.
        rotary_interleaved: whether dimension 2 i turns with 2 i + 1, else i turns with i + rot_dim / 2.
        alibi_slopes: float32 [Hq] or [B, Hq], or None.
        num_splits: 1 keeps the keys of a sequence on one thread. The bits are the same.
        return_softmax_lse: whether to return (out, softmax_lse).

    Returns:
        out [B, S_q, Hq, Dv]; with ``return_softmax_lse`` (out, softmax_lse [B, Hq, S_q]).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on. The cache has
            not been written then.
        TypeError: an argument is no tensor, or has another dtype. The cache has not been written then.
    """
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    at = Places(cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    logits = logits_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse, num_splits)
    return cached(q, k_cache, v_cache, new, at, logits)


def cached(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    new: New,
    at: Places,
    logits: Logits,
    cu_seqlens_q: Any = None,
    descales: Descales = NO_DESCALES,
) -> Any:
    """Does what :func:`flash_attn_with_kvcache` does; with cu_seqlens_q q is packed [T_q, Hq, D]."""
    query, k_cache, v_cache = tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    k, v, cos, sin = optional(k=new.k, v=new.v, rotary_cos=new.rotary_cos, rotary_sin=new.rotary_sin)
    queries = Queries(query, cu_seqlens_q)
    cache = _Cache(k_cache, v_cache, queries.batch_size, query.shape[-1], at)
    queries.attends(k_cache=k_cache, v_cache=v_cache)
    new = replace(new, k=k, v=v, rotary_cos=cos, rotary_sin=sin)
    tokens = _Tokens(_starts_of_new(queries, cache, at.cache_seqlens, new))
    rotary = None if cos is None else _Rotary(cos, sin, new.rotary_interleaved)
    lens = cache.lengths(at.cache_seqlens, tokens.lens)
    seq_lens, parts = cache.parts(lens + tokens.lens, at.cache_leftpad, lens)
    logits = queries.widen(k_cache.shape[2], logits, descales)
    states = queries.states if rotary is None else torch.empty_like(queries.states)
    call = Attention(states, queries.starts, seq_lens, parts, v_cache.shape[3], logits)
    if k is not None:
        pair = [x.float() if x.dtype in FLOAT8 else x for x in (k, v)]
        pair = [dense_rows(x) if new.cu_seqlens is not None else dense_rows(x).flatten(0, 1) for x in pair]
        pair, slots = [x[: len(tokens.before)] for x in pair], cache.slots(tokens.sequence, tokens.after(lens))
        turns = None if rotary is None else rotary.turns(new.rotary_seqlens, lens, queries.starts, tokens, logits)
        call.run(only_check=True)  # this raises before a byte of the cache is written
        if rotary is None or turns is None:
            ops.reshape_and_cache(pair[0], pair[1], cache.key, cache.value, slots, **cache.form)
        else:
            asked = slice(int(queries.starts[-1]))
            _append_rotated(queries.states[asked], states[asked], pair, cache, slots, turns, rotary.is_neox)
    out, lse = queries.results(call)
    return out if lse is None else (out, lse)
