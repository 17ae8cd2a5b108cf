# SPDX-License-Identifier: Apache-2.0
"""This module says what a case is: Case."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn.reference import Window, visible

from .trees import TREES, pack_tree

# An attn_bias may differ for each request and head, for each head, for each request with -inf in it, or be one for all.
BIASES = ("heads", "batch", "holes", "one")


@dataclass(frozen=True)
class Case:
    """Holds a call of attention_with_kv_cache in numbers. Fields that name an argument hold what it takes, unless
    said."""

    name: str  # unique among the cases; it seeds what is random beside `seed`
    query_lens: tuple[int, ...]  # query tokens of each request
    seq_lens: tuple[int, ...]  # keys of each request, the new ones among them
    num_heads: int = 4  # query heads, a multiple of num_kv_heads
    num_kv_heads: int = 2  # heads of K and V in the cache
    head_size: int = 32  # elements of a head of queries and keys
    head_size_v: int | None = None  # elements of a head of values; None: head_size
    block_size: int = 16  # tokens of a block of the cache
    causal: bool = True  # of all requests, unless dynamic_causal says it of each
    dynamic_causal: tuple[int, ...] | None = None  # a flag for each request, in place of causal
    sliding_window: Window = -1  # w or (left, right); -1: off
    alibi: float = 0.0  # the largest slope; 0: none
    softcap: float = 0.0  # 0: off
    sinks: str | None = None  # "moderate", "huge" (nothing else counts), "absent" (-inf), "mixed" (all three); None
    fill: str = "normal"  # what the numbers are like, a name from fills.FILLS
    # K and V of a block interleave in one array; tokens, output and lse are parts of wider rows. In plain layouts rows
    # are apart, too, and blocks run backwards.
    strided: bool = False
    pieces: int = 1  # how many calls write the cache
    kv_cache_dtype: str = "auto"  # "auto" or a format; fp8 has the scales of formats.SCALES
    kv_cache_layout: str = "packed"  # or plain rows, "HND" or "NHD"
    kv_cache_rotation: str = "none"  # of K and V, for quantised caches
    latent: bool = False  # whether V is the first head_size_v columns of K
    dtype: str = "float32"  # the dtype of queries, keys, values and output
    seed: int = 0  # the seed of all that is random
    rotary: str | None = None  # how queries and keys are rotated on their way (rotation.py); None: not at all
    mm_prefix_range: tuple[tuple[tuple[int, int], ...], ...] | None = None  # for each request, () for none
    document_start_loc: tuple[tuple[int, ...], ...] | None = None  # for each request, () for none
    clamped: bool = False  # the argument mm_prefix_clamp_sliding_window
    chunk: int | None = None  # the argument attention_chunk_size
    tree: str | None = None  # the tree of each request's query tokens, a name from trees.TREES
    selected: float | None = None  # the share of a request's blocks that a head attends, at random; None: no selection
    query_block: int | None = None  # so many query tokens select blocks together; None: all of a request do
    select_by_query_head: bool = False  # whether query heads select blocks; else kv heads do
    selected_tokens: float | None = None  # the share of a request's keys that each query token attends, at random
    shared: tuple[tuple[int, int], ...] = ()  # for each request an earlier one, and how many blocks both start with
    bias: str | None = None  # an attn_bias, a name from BIASES

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    def mask(self, r: int) -> NDArray[np.bool_]:
        """Says what request r sees: [q_len, seq_len]."""
        causal = self.causal if self.dynamic_causal is None else bool(self.dynamic_causal[r])
        spans = self.mm_prefix_range[r] if self.mm_prefix_range else ()
        documents = self.document_start_loc[r] if self.document_start_loc else ()
        tree = TREES[self.tree](self.query_lens[r]) if self.tree else None
        lens, window = (self.query_lens[r], self.seq_lens[r]), self.sliding_window
        return visible(*lens, causal, window, spans, documents, tree, self.clamped, self.chunk)

    @property
    def masks(self) -> dict[str, Any]:
        """Gives the masks as get_scheduler_metadata takes them."""
        found: dict[str, Any] = {
            name: {r: x for r, x in enumerate(kind) if x}
            for name, kind in (
                ("mm_prefix_range", self.mm_prefix_range),
                ("document_start_loc", self.document_start_loc),
            )
            if kind is not None
        }
        if self.clamped:
            found["mm_prefix_clamp_sliding_window"] = True
        if self.chunk:
            found["attention_chunk_size"] = self.chunk
        if self.tree:
            rows = [pack_tree(TREES[self.tree](n), max(self.query_lens)) for n in self.query_lens]
            found["tree_mask"] = np.concatenate(rows)
        return found

    @property
    def composable(self) -> bool:
        """Says whether cpu_attn.compose.attention, the engine "onednn-python", takes it: that has no masks besides
        causal and window, no bias, no selection and no rotation."""
        selects = (self.selected, self.selected_tokens, self.query_block) != (None,) * 3 or self.select_by_query_head
        return not (self.masks or self.bias or selects) and self.kv_cache_rotation == "none"

    def lists(self, r: int) -> int:
        """Gives how many query blocks of request r select, or 1 where it selects itself."""
        return 1 if self.query_block is None else -(-self.query_lens[r] // self.query_block)

    @property
    def selecting_heads(self) -> int:
        """Says how many heads select, Hkv or Hq."""
        return self.num_heads if self.select_by_query_head else self.num_kv_heads

    def chosen(self, r: int) -> NDArray[np.bool_]:
        """Says what request r has selected, or each of its query blocks: [lists, selecting_heads, blocks]."""
        shape = self.lists(r), self.selecting_heads, -(-self.seq_lens[r] // self.block_size)
        share = 1.0 if self.selected is None else self.selected
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), r]).random(shape) < share

    def picked(self, r: int) -> NDArray[np.bool_]:
        """Says what the query tokens of request r have selected: [q_len, seq_len]."""
        shape = self.query_lens[r], self.seq_lens[r]
        share = 1.0 if self.selected_tokens is None else self.selected_tokens
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), r, 1]).random(shape) < share

    def sees(self, r: int) -> NDArray[np.bool_]:
        """Says what each head of request r attends: [q_len, selecting_heads, seq_len]."""
        keys = self.chosen(r)[:, :, np.arange(self.seq_lens[r]) // self.block_size]
        own = keys.repeat(self.query_block or max(1, self.query_lens[r]), axis=0)[: self.query_lens[r]]
        return (self.mask(r) & self.picked(r))[:, None] & own


def ranges(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Gives where each of parts of these lengths, one after another, begins and ends."""
    ends = np.cumsum(lens, dtype=np.int64).tolist()
    return zip([0, *ends], ends, strict=False)
