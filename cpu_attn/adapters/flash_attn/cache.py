# SPDX-License-Identifier: Apache-2.0
"""This module has flash_attn_with_kvcache: it writes new keys and values into a cache, then attends over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn._arrays import dense_rows
from cpu_attn.flash_attn.call import NAMES, Attention, entry, logits_of, one_length
from cpu_attn.rotary import rotary_reshape_and_cache
from cpu_attn.torch.entry import axes, optional, tensors
from cpu_attn.torch.packed import Int32, Part, int32, overlapping

Int64 = NDArray[np.int64]


class _Cache:
    """Holds key [N, S, Hkv, D] and value, and says where in them B sequences lie: table [B, M], which the caller gave
    as ``name``."""

    def __init__(self, key: Tensor, value: Tensor, batch_size: int, head_size: int, batch_idx: Any, block_table: Any):
        paged = block_table is not None
        axes("k_cache", key, N=None, S=None, num_kv_heads=None, head_size=head_size)
        axes("v_cache", value, N=key.shape[0], S=key.shape[1], num_kv_heads=key.shape[2], head_size_v=None)
        self.key, self.value, self.paged = key, value, paged
        if paged and batch_idx is not None:
            raise ValueError("cache_batch_idx: not beside block_table, which says where sequences lie")
        if paged:
            sizes: list[tuple[str, int | None]] = [("batch_size", batch_size), ("blocks", None)]
            self.table = _check.array("block_table", block_table, ["int32"], sizes).numpy().copy()
        elif batch_idx is not None:
            self.table = int32("cache_batch_idx", batch_idx, batch_size).copy()[:, None]
            for b in np.flatnonzero((self.table < 0) | (self.table >= len(key))):
                raise ValueError(f"cache_batch_idx[{b}]: {self.table[b, 0]}, outside 0..{len(key) - 1}")
        elif len(key) < batch_size:
            raise ValueError(f"k_cache: {len(key)} sequences, q has {batch_size}")
        else:
            self.table = np.arange(batch_size, dtype=np.int32)[:, None]
        self.capacity = self.table.shape[1] * key.shape[1]

    def lengths(self, cache_seqlens: Any, new: int) -> Int64:
        """Gives how many tokens of each sequence are there before the new ones."""
        batch_size = len(self.table)
        if isinstance(cache_seqlens, torch.Tensor):
            lens = int32("cache_seqlens", cache_seqlens, batch_size).astype(np.int64)
        else:
            length = self.capacity if cache_seqlens is None else _check.integer("cache_seqlens", cache_seqlens, 0)
            lens = np.full(batch_size, length, np.int64)
        for b in np.flatnonzero((lens < 0) | (lens > self.capacity - new)):
            room = f"the {self.capacity} slots of a sequence less {new} new tokens"
            raise ValueError(f"cache_seqlens[{b}]: {lens[b]}, outside 0..{self.capacity - new}, {room}")
        return lens

    def slots(self, positions: Int64) -> Int64:
        """Gives the slots [B * n] of the tokens at these places [B, n] of their sequences."""
        size = max(1, self.key.shape[1])
        columns = positions // size
        blocks = np.take_along_axis(self.table, columns, 1).astype(np.int64)
        for b, i in np.argwhere((blocks < 0) | (blocks >= len(self.key))):
            raise ValueError(f"block_table[{b}, {columns[b, i]}]: {blocks[b, i]}, outside 0..{len(self.key) - 1}")
        slots: Int64 = (blocks * size + positions % size).ravel()
        return slots

    def parts(self, ends: Int64, leftpad: Any, lens: Int64) -> tuple[Int32, list[Part]]:
        """Gives how many keys sequences have that end at ``ends``, and where these lie. Behind a leftpad, which is at
        most lens, each sequence is one block of just its length."""
        if leftpad is None:
            return ends.astype(np.int32), [(0, len(ends), self.key, self.value, self.table)]
        if self.paged:
            raise ValueError("cache_leftpad: not beside block_table")
        pad = int32("cache_leftpad", leftpad, len(ends)).astype(np.int64)
        for b in np.flatnonzero((pad < 0) | (pad > lens)):
            raise ValueError(f"cache_leftpad[{b}]: {pad[b]}, outside 0..{lens[b]}, the sequence's cache_seqlens")
        one, parts = np.zeros((1, 1), np.int32), list[Part]()
        for r, (row, first, end) in enumerate(zip(self.table[:, 0].tolist(), pad.tolist(), ends.tolist(), strict=True)):
            key, value = (overlapping(x[row, first:end], max(1, end - first)) for x in (self.key, self.value))
            parts.append((r, r + 1, key, value, one))
        return (ends - pad).astype(np.int32), parts


def _check_new(query: Tensor, cache: _Cache, cache_seqlens: Any, k: Any, v: Any, cos: Any, sin: Any) -> None:
    """Checks what is to be appended, and what has to come with it."""
    if k is None:
        for name, x in (("v", v), ("rotary_cos", cos), ("rotary_sin", sin)):
            if x is not None:
                raise ValueError(f"{name}: only beside k")
        return
    for name, x in (("v", v), ("cache_seqlens", cache_seqlens)):
        if x is None:
            raise ValueError(f"{name}: is None, k is not")
    if cos is None and sin is not None:
        raise ValueError("rotary_cos: is None, rotary_sin is not")
    batch_size, heads = query.shape[0], cache.key.shape[2]
    axes("k", k, batch_size=batch_size, seqlen_new=None, num_kv_heads=heads, head_size=query.shape[3])
    axes("v", v, batch_size=batch_size, seqlen_new=k.shape[1], num_kv_heads=heads, head_size_v=cache.value.shape[3])
    for name, x in (("k", k), ("v", v)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {query.dtype}, that of q")


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
        """Gives the rows of these positions, cos and then sin: [B * n, rot_dim]."""
        last = int(positions.max(initial=-1))
        if last >= len(self.cos):
            raise ValueError(f"rotary_cos: axis 0 is {len(self.cos)}, expected at least {last + 1}, for the last token")
        at = torch.from_numpy(positions.ravel())
        return torch.cat([self.cos[at], self.sin[at]], 1)


def _append_rotated(
    query: Tensor, out: Tensor, new: tuple[Tensor, Tensor], cache: _Cache, positions: Int64, at: Int64, rotary: _Rotary
) -> None:
    """Rotates queries [T, Hq, D] at places ``at`` into out, and new keys [T_new, Hkv, D] into the cache. Where their
    places differ that takes two calls: one that writes no key, and one that rotates a head of the keys for nothing."""
    rows, query_rows, slots = rotary.rows(positions), rotary.rows(at), cache.slots(positions)

    def rotate(query: Tensor, out: Tensor, new: list[Tensor], slots: Int64, rows: Tensor) -> None:
        arrays = (query, new[0], new[1], cache.key, cache.value, slots, np.arange(len(slots)), rows)
        rotary_reshape_and_cache(*arrays, rotary.is_neox, query_out=out, kv_cache_layout="NHD")

    if np.array_equal(positions, at):
        rotate(query, out, [*new], slots, rows)
        return
    nothing = [x.new_zeros(x.shape[-1]).expand(len(query), *x.shape[1:]) for x in new]
    rotate(query, out, nothing, np.full(len(query), -1), query_rows)
    head = new[0][:, :1]
    rotate(head, torch.empty_like(head), [*new], slots, rows)


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
        cache_batch_idx: int32 [B], or None: which sequences of the cache these are. Where two are the same one and
            write to the same slot, one of them is there. It does not go with ``block_table``.
        cache_leftpad: int32 [B], or None: the slots before a sequence's first key, which ``cache_seqlens`` counts, too.
            Each sequence is then a call by itself. It does not go with ``block_table``.
        block_table: int32 [B, M], or None: the pages of each sequence.
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
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse, num_splits)
    return cached(q, k_cache, v_cache, new, where, rotary_interleaved, *options)


def cached(
    q: Any, k_cache: Any, v_cache: Any, new_states: Any, where: Any, rotary_interleaved: bool, *options: Any
) -> Any:
    """Does what :func:`flash_attn_with_kvcache` does. options: those of :func:`logits_of`."""
    cache_seqlens, cache_batch_idx, cache_leftpad, block_table = where
    query, k_cache, v_cache = tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    k, v, cos, sin = optional(**new_states)
    axes("q", query, batch_size=None, seqlen_q=None, num_heads=None, head_size=None)
    batch_size, q_length, _, head_size = query.shape
    logits = logits_of(query, 0.0, *options)
    cache = _Cache(k_cache, v_cache, batch_size, head_size, cache_batch_idx, block_table)
    _check_new(query, cache, cache_seqlens, k, v, cos, sin)
    rotary = None if cos is None else _Rotary(cos, sin, rotary_interleaved)
    new = 0 if k is None else k.shape[1]
    lens = cache.lengths(cache_seqlens, new)
    seq_lens, parts = cache.parts(lens + new, cache_leftpad, lens)
    query = states = dense_rows(query).flatten(0, 1)
    if rotary:
        states = query.new_empty(query.shape)
    call = Attention(states, one_length(batch_size, q_length), seq_lens, parts, v_cache.shape[3], logits)
    if k is not None and v is not None:
        call.run(only_check=True)  # this raises before a byte of the cache is written
        pair, positions = (dense_rows(k).flatten(0, 1), dense_rows(v).flatten(0, 1)), lens[:, None] + np.arange(new)
        if rotary:
            step = int(logits.causal or logits.window != (-1, -1))
            at = lens[:, None] + step * np.arange(q_length)
            _append_rotated(query, states, pair, cache, positions, at, rotary)
        else:
            ops.reshape_and_cache(*pair, cache.key, cache.value, cache.slots(positions), kv_cache_layout="NHD")
    out, lse = call.batch(batch_size, q_length)
    return out if lse is None else (out, lse)
