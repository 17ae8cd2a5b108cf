# SPDX-License-Identifier: Apache-2.0
"""This module attends over the pages of transformers' continuous batching, where they lie.

Its PagedAttentionCache keeps K and V of a layer as rows [Hkv, D] of one tensor, pages of them for each request, and
says in ``read_index`` and ``write_index`` in which rows a step's tokens are. Every ``block`` rows are a block of an NHD
cache to us. A sliding layer keeps its last ``sliding_window`` tokens in a ring: position p in slot
``p % sliding_window``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cpu_attn import merge_states
from cpu_attn.ops import Logits
from cpu_attn.transformers import private
from cpu_attn.transformers.plans import Ints, Requests, run


def attend(
    layer_idx: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Any,
    logits: Logits,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: dict[str, torch.Tensor],
    read_index: list[torch.Tensor],
    write_index: list[torch.Tensor],
    block_table: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Writes key and value [1, Hkv, T, D] into the layer's pages, and gives output [1, T, H, D] of query [1, H, T,
    D]."""
    if block_table is not None:
        raise ValueError("block_table: cpu_attn takes read_index and write_index (max_blocks_per_request=0)")
    allocator, rows = private.pages(cache, layer_idx)
    # All layers of a step are called with the one tensor that was made for it, so what they share hangs on it.
    steps = cu_seq_lens_q.__dict__.setdefault("_cpu_attn_steps", {})
    if allocator.index not in steps:
        lengths = cu_seq_lens_q.numpy(), cu_seq_lens_k[allocator.layer_type].numpy()
        indices = read_index[allocator.index].numpy(), write_index[allocator.index]
        steps[allocator.index] = BatchOfPages.of(allocator, *lengths, *indices)
    return steps[allocator.index].attend(rows, query, key, value, logits)


def _blocks(rows: Ints, block: int) -> tuple[Ints, int]:
    """Gives the blocks that hold these rows, a request's tokens in order, and how many keys that makes. Those before
    the first token in its block are counted, and lie outside every query's window."""
    if not len(rows):
        return rows, 0
    before = int(rows[0] % block)
    return rows[np.maximum(np.arange(-before, len(rows), block), 0)] // block, before + len(rows)


def _lengths(*counts: int) -> np.ndarray[Any, Any]:
    return np.array(counts, np.int32)


@dataclass
class BatchOfPages:
    """Holds what the layers of an allocator share in a step: which blocks each request reads once its tokens are
    written. ``prompts``: those whose tokens drive keys out of the ring that their first ones see."""

    block: int
    write: torch.Tensor
    table: np.ndarray[Any, Any]
    requests: Requests
    prompts: list[Prompt]

    @classmethod
    def of(cls, allocator: Any, cu_q: Ints, cu_k: Ints, read: Ints, write: torch.Tensor) -> BatchOfPages:
        window = getattr(allocator, "sliding_window", 0)
        # Neither a page nor the ring's end cuts a block of this size.
        block = math.gcd(window, allocator.tokens_per_page)
        tables, lengths, prompts = [], [], []
        for r in range(len(cu_q) - 1):
            tokens = slice(int(cu_q[r]), int(cu_q[r + 1]))
            new, keys = tokens.stop - tokens.start, int(cu_k[r + 1] - cu_k[r])
            rows = read[cu_k[r] : cu_k[r] + keys - new]  # empty where no request of the step has a past
            if window and keys > window:
                prompts.append(Prompt.of(tokens, *_blocks(rows, block), window))
                rows = rows[:0]
            else:
                rows = np.concatenate([rows, write.numpy()[tokens]])
            blocks, length = _blocks(rows, block)
            tables.append(blocks)
            lengths.append(length)
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        sides = (window - 1, -1) if window else (-1, -1)
        each, starts = np.arange(len(tables)), cu_q.astype(np.int32)
        shared = {"block_table": table, "block_size": block}
        requests = Requests(each, starts, _lengths(*lengths), True, sides, shared=shared)
        return cls(block, write, table, requests, prompts)

    def attend(
        self,
        rows: list[torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        logits: Logits,
    ) -> torch.Tensor:
        count = min(map(len, rows)) // self.block
        caches = [x[: count * self.block].unflatten(0, (count, self.block)) for x in rows]
        # These attend before the keys that they still see are written over.
        early = [(p.tokens, p.attend(query, key, value, caches, logits)) for p in self.prompts]
        for to, states in zip(rows, (key, value), strict=True):
            to.index_copy_(0, self.write, states[0].transpose(0, 1))
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        plan = self.requests.plan(*sizes, query.dtype, "NHD")
        real = plan.num_tokens  # a compiled step is padded
        output = run(plan, query[:, :, :real], caches[0], caches[1], self.table, logits)
        if real < query.shape[2]:
            output = torch.cat([output, output.new_zeros(1, query.shape[2] - real, *output.shape[2:])], 1)
        for tokens, found in early:
            output[:, tokens] = found
        return output


@dataclass
class Prompt:
    """Holds new tokens that are more than the ring has place for. They attend their own keys as they came and, up to
    the window, the old ones in the ring; both results merge."""

    tokens: slice
    own: Requests
    old: Requests
    table: np.ndarray[Any, Any]

    @classmethod
    def of(cls, tokens: slice, blocks: Ints, length: int, window: int) -> Prompt:
        one, new = np.zeros(1, np.int64), tokens.stop - tokens.start
        own = Requests(one, _lengths(0, new), _lengths(new), True, (window - 1, -1))
        # In truth query i stands at key length + i. A bidirectional plan of ``reach`` query tokens puts it at length -
        # reach + i, so the left side of its window is that much shorter.
        reach = min(new, window - 1)
        old = Requests(one, _lengths(0, reach), _lengths(length), False, (window - 1 - reach, -1))
        return cls(tokens, own, old, blocks.astype(np.int32)[None])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        caches: list[torch.Tensor],
        logits: Logits,
    ) -> torch.Tensor:
        query, key, value = (x[:, :, self.tokens] for x in (query, key, value))
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3], query.dtype
        reach = int(self.old.query_start_loc[-1])
        own_lse = query.new_empty(query.shape[1], query.shape[2], dtype=torch.float32)
        plan = self.own.plan(*sizes, "HND")
        own = run(plan, query, key, value, self.own.block_table, logits, lse=own_lse)
        if not self.old.seq_lens[0] or not reach:
            return own
        old_lse = torch.empty_like(own_lse[:, :reach])
        plan = self.old.plan(*sizes, "NHD")
        without = replace(logits, s_aux=None)  # the result over the own keys has it
        first = run(plan, query[:, :, :reach], caches[0], caches[1], self.table, without, lse=old_lse)
        own[0, :reach] = merge_states(
            [first[0], own[0, :reach]], [old_lse, own_lse[:, :reach]], out=torch.empty_like(first[0])
        )[0]
        return own
