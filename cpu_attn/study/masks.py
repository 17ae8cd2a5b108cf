# SPDX-License-Identifier: Apache-2.0
"""This module works out which keys a token sees, before any key is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import Array as Memory

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tree:
    """Holds a tree_mask. mask: [T, W]; left: how many keys before a token's own its window leaves, -1 for all."""

    mask: Array
    query_start_loc: Array
    seq_lens: Array
    left: int

    def tokens(self, r: int) -> slice:
        return slice(*self.query_start_loc[r : r + 2].tolist())

    def context(self, r: int) -> int:
        """Gives how many keys stand before those of request r's query tokens."""
        return int(self.seq_lens[r] - len(self.mask[self.tokens(r)]))

    @cached_property
    def depth(self) -> Array:
        """Gives [T], how many query tokens each one sees besides itself."""
        depth = np.zeros(len(self.mask), np.int64)
        for r in range(len(self.seq_lens)):
            rows = self.mask[self.tokens(r)]
            bits = np.unpackbits(rows, axis=1, count=len(rows), bitorder="little")
            depth[self.tokens(r)] = bits.sum(axis=1, dtype=np.int64) - bits.diagonal()
        return depth

    def ranges(self) -> Array:
        """Gives [T, 2], the first key and the one after the last that a token may see; `shows` says which of these it
        sees."""
        q_lens: Array = np.diff(self.query_start_loc)
        end = np.repeat(self.seq_lens, q_lens).astype(np.int64)
        context = end - np.repeat(q_lens, q_lens)
        low = np.clip(context + self.depth - self.left, 0, context) if self.left >= 0 else np.zeros_like(end)
        return np.stack([low, end], axis=1)

    def shows(self, r: int, rows: slice, keys: Array) -> Array:
        """Says which keys in their range some tokens of request r see: [n, keys]."""
        is_new, new = keys >= self.context(r), np.maximum(keys - self.context(r), 0)
        seen = self.mask[rows][:, new // 8] >> (new % 8).astype(np.uint8) & 1 == 1
        if self.left >= 0 and is_new.any():
            seen &= self.depth[rows, None] - self.depth[self.tokens(r)][new] <= self.left
        shown: Array = seen | np.logical_not(is_new)
        return shown


def visible(
    starts: Array, lens: Array, causal: bool, flags: Any, sliding_window: int | tuple[int, int]
) -> tuple[Array, Array]:
    """Gives the positions and the visible keys of all tokens: pos - left <= key <= pos + right, and key <= pos where
    causal."""
    left, right = _check.window(sliding_window)
    q_lens: Array = starts[1:].astype(np.int64) - starts[:-1]
    ends = np.repeat(lens.astype(np.int64), q_lens)
    position = ends - np.repeat(starts[1:], q_lens) + np.arange(len(ends))
    past_only = np.repeat(np.full(len(lens), bool(causal)) if flags is None else flags.numpy() != 0, q_lens)
    low = np.maximum(0, position - left) if left >= 0 else np.zeros_like(position)
    high = np.minimum(ends, position + right + 1) if right >= 0 else ends
    high = np.where(past_only, np.minimum(high, position + 1), high)
    return position, np.stack([low, np.maximum(low, high)], axis=1)


def with_masks(masks: _check.Masks, clamped: bool, starts: Array, lens: Array, position: Array, sees: Array) -> Array:
    """Adds to sees [T, 2] the spans that tokens lie in, and takes off the documents of others."""
    low, high = sees.T.copy()
    for r, first, last in masks.spans.tolist():
        rows = slice(starts[r], starts[r + 1])
        inside = (first <= position[rows]) & (position[rows] <= last)
        if not clamped:
            low[rows] = np.where(inside, np.minimum(low[rows], first), low[rows])
        high[rows] = np.where(inside, np.maximum(high[rows], min(lens[r], last + 1)), high[rows])
    for r in np.unique(masks.documents[:, 0]):
        rows = slice(starts[r], starts[r + 1])
        borders = np.append(masks.documents[masks.documents[:, 0] == r, 1], _check.INT32_MAX)
        own = np.searchsorted(borders, position[rows], "right")
        low[rows] = np.maximum(low[rows], borders[own - 1])
        high[rows] = np.minimum(high[rows], borders[own])
    return np.stack([low, high], axis=1)


def list_of_token(starts: Array, query_block_size: int | None) -> Array:
    """Gives by which list of selected_blocks each token goes, [T]: that of its query block, or of its request."""
    q_lens: Array = np.diff(starts).astype(np.int64)
    if query_block_size is None:
        return np.repeat(np.arange(len(q_lens)), q_lens)
    first = np.append(0, np.cumsum(-(-q_lens // query_block_size)))[:-1]
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], q_lens)
    lists: Array = np.repeat(first, q_lens) + place // query_block_size
    return lists


def chosen_blocks(selected: Memory | None, num_lists: int, num_heads: int, blocks: int) -> Array:
    """Says which blocks count: [lists, heads that select, blocks]."""
    chosen = np.full((num_lists, num_heads, blocks + 1), selected is None)
    if selected is not None:
        named = selected.numpy().astype(np.int64)
        np.put_along_axis(chosen, np.where((named >= 0) & (named < blocks), named, blocks), True, axis=2)
    return chosen[:, :, :-1]


def chosen_tokens(selected: Array, keys: Array) -> Array:
    """Says which of these keys, which ascend, each of n tokens has selected: [n, keys]."""
    chosen = np.zeros((len(selected), len(keys)), np.bool_)
    at = np.minimum(np.searchsorted(keys, selected), len(keys) - 1)
    row, column = np.nonzero(keys[at] == selected)
    chosen[row, at[row, column]] = True
    return chosen
