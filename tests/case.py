# SPDX-License-Identifier: Apache-2.0
"""What a case is: Case."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn.reference import Window, visible

from .case_trees import TREES, pack_tree

# Of an attn_bias: of each request and head, of each head, of each request with -inf among them, of all.
BIASES = ("heads", "batch", "holes", "one")


@dataclass(frozen=True)
class Case:
    """A call of attention_with_kv_cache in numbers. alibi: the largest slope, 0 for none; sinks: "moderate", "huge"
    (nothing else counts), "absent" (-inf), "mixed" or None; fill: a name from case_fills.FILLS; strided: K and V of a
    block interleaved in one array, tokens, output and lse as parts of wider rows; pieces: calls that write the
    cache; kv_cache_dtype: other than "auto", with scales (formats.SCALES); kv_cache_rotation: of such caches; rotary:
    what is done to queries and keys on their way (rotation.py), or None; mm_prefix_range, document_start_loc: of each
    request, () for none; clamped: mm_prefix_clamp_sliding_window; tree: of each request's query tokens, a name from
    case_trees.TREES; selected: the share of its request's blocks that a kv head attends, at random, None for all
    without a selection; select_by_query_head: a query head does; query_block: so many query tokens select blocks of
    their own; selected_tokens: the share of its
    request's keys that a query token attends, likewise; shared: for each request the number of an earlier one and how
    many of its blocks it starts with, which the plan is told;
    kv_cache_layout: of the caches (strided: in plain ones rows are apart, too, and blocks run backwards); latent: V is
    the first head_size_v columns of K; bias: an attn_bias, a name from BIASES, or None."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    causal: bool = True
    dynamic_causal: tuple[int, ...] | None = None
    sliding_window: Window = -1
    alibi: float = 0.0
    softcap: float = 0.0
    sinks: str | None = None
    fill: str = "normal"
    strided: bool = False
    pieces: int = 1
    kv_cache_dtype: str = "auto"
    kv_cache_layout: str = "packed"
    kv_cache_rotation: str = "none"
    latent: bool = False
    dtype: str = "float32"
    seed: int = 0
    rotary: str | None = None
    mm_prefix_range: tuple[tuple[tuple[int, int], ...], ...] | None = None
    document_start_loc: tuple[tuple[int, ...], ...] | None = None
    clamped: bool = False
    tree: str | None = None
    selected: float | None = None
    query_block: int | None = None
    select_by_query_head: bool = False
    selected_tokens: float | None = None
    shared: tuple[tuple[int, int], ...] = ()
    bias: str | None = None

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    def mask(self, r: int) -> NDArray[np.bool_]:
        """[q_len, seq_len]: what request r sees."""
        causal = self.causal if self.dynamic_causal is None else bool(self.dynamic_causal[r])
        spans = self.mm_prefix_range[r] if self.mm_prefix_range else ()
        documents = self.document_start_loc[r] if self.document_start_loc else ()
        tree = TREES[self.tree](self.query_lens[r]) if self.tree else None
        window = self.sliding_window
        return visible(self.query_lens[r], self.seq_lens[r], causal, window, spans, documents, tree, self.clamped)

    @property
    def masks(self) -> dict[str, Any]:
        """What get_scheduler_metadata takes of them."""
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
        if self.tree:
            rows = [pack_tree(TREES[self.tree](n), max(self.query_lens)) for n in self.query_lens]
            found["tree_mask"] = np.concatenate(rows)
        return found

    def lists(self, r: int) -> int:
        """How many query blocks of request r select, or 1 where it selects itself."""
        return 1 if self.query_block is None else -(-self.query_lens[r] // self.query_block)

    @property
    def selecting_heads(self) -> int:
        """Hkv or Hq."""
        return self.num_heads if self.select_by_query_head else self.num_kv_heads

    def chosen(self, r: int) -> NDArray[np.bool_]:
        """[lists, selecting_heads, blocks]: what request r has selected, or each of its query blocks."""
        shape = self.lists(r), self.selecting_heads, -(-self.seq_lens[r] // self.block_size)
        share = 1.0 if self.selected is None else self.selected
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), r]).random(shape) < share

    def picked(self, r: int) -> NDArray[np.bool_]:
        """[q_len, seq_len]: what the query tokens of request r have selected."""
        shape = self.query_lens[r], self.seq_lens[r]
        share = 1.0 if self.selected_tokens is None else self.selected_tokens
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), r, 1]).random(shape) < share

    def sees(self, r: int) -> NDArray[np.bool_]:
        """[q_len, selecting_heads, seq_len]: what each head of request r attends."""
        keys = self.chosen(r)[:, :, np.arange(self.seq_lens[r]) // self.block_size]
        own = keys.repeat(self.query_block or max(1, self.query_lens[r]), axis=0)[: self.query_lens[r]]
        return (self.mask(r) & self.picked(r))[:, None] & own


def ranges(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each of parts of these lengths, one after another, begins and ends."""
    ends = np.cumsum(lens, dtype=np.int64).tolist()
    return zip([0, *ends], ends, strict=False)
