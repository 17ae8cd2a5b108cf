# SPDX-License-Identifier: Apache-2.0
"""This module makes the plans of a step, once for its layers, and runs them over a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from cpu_attn import get_num_threads, ops
from cpu_attn._arrays import dense_rows
from cpu_attn.ops import Logits
from cpu_attn.plan import SchedulerMetadata, get_scheduler_metadata

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Requests:
    """Holds what a plan is made of. rows: of which row of the batch each request is; documents: where a request's
    documents start; dynamic_causal: for each request, or None: all are as ``causal`` says; shared: block_table and
    block_size, for prefixes that requests have in common."""

    rows: Ints
    query_start_loc: np.ndarray[Any, Any]
    seq_lens: np.ndarray[Any, Any]
    causal: bool
    window: tuple[int, int] = (-1, -1)
    documents: dict[int, list[int]] = field(default_factory=dict)
    dynamic_causal: np.ndarray[Any, Any] | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], SchedulerMetadata] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_table = self.rows.astype(np.int32)[:, None]

    def plan(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
        dtype: Any,
        kv_cache_layout: str,
        kv_cache_dtype: str = "auto",
        kv_cache_rotation: str = "none",
        max_selected_tokens: int | None = None,
        query_block_size: int | None = None,
    ) -> SchedulerMetadata:
        """Gives the plan, which is made once for all layers of a kind."""
        cache = (kv_cache_layout, kv_cache_dtype, kv_cache_rotation, max_selected_tokens, query_block_size)
        key = (num_heads, num_kv_heads, head_size, head_size_v, dtype, *cache, get_num_threads())
        if key not in self.plans:
            self.plans[key] = get_scheduler_metadata(
                *(len(self.rows), num_heads, num_kv_heads, head_size, self.seq_lens, dtype, self.query_start_loc),
                causal=self.causal,
                sliding_window=self.window,
                dynamic_causal=self.dynamic_causal,
                head_size_v=head_size_v,
                document_start_loc=self.documents or None,
                kv_cache_layout=kv_cache_layout,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_rotation=kv_cache_rotation,
                max_selected_tokens=max_selected_tokens,
                query_block_size=query_block_size,
                **self.shared,
            )
        return self.plans[key]

    @cached_property
    def all_causal(self) -> Requests:
        """Gives requests of the same meaning that are all causal: each token of one that is not becomes a request."""
        tokens, flags = np.diff(self.query_start_loc), self.dynamic_causal
        if flags is None or flags.all():
            return self
        each = np.where(flags, 1, tokens)
        first = np.cumsum(each) - each
        starts = np.append(0, np.cumsum(np.repeat(np.where(flags, tokens, 1), each))).astype(np.int32)
        documents = {int(first[r]): borders for r, borders in self.documents.items()}
        return Requests(self.rows.repeat(each), starts, self.seq_lens.repeat(each), True, self.window, documents)

    def those_there(self, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Gives ``selected_tokens`` of ascending keys [tokens, k] of the rows: -1 from the first one on that is past
        the keys of the token's request."""
        return self._within(chosen, self.seq_lens)

    def blocks_there(self, chosen: np.ndarray[Any, Any], block_size: int) -> np.ndarray[Any, Any]:
        """Gives ``selected_blocks`` of ascending blocks [tokens, Hkv, k] in the same way."""
        return self._within(chosen, -(-self.seq_lens // block_size))

    def _within(self, chosen: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        bounds = np.repeat(ends, np.diff(self.query_start_loc))
        return np.where(chosen < bounds.reshape(-1, *[1] * (chosen.ndim - 1)), chosen, np.int32(-1))


@lru_cache(maxsize=64)
def unmasked(batch_size: int, q_length: int, kv_length: int, causal: bool) -> Requests:
    """Gives requests of which every row sees all keys, or those up to its own."""
    starts = np.arange(batch_size + 1, dtype=np.int32) * np.int32(q_length)
    lengths = np.full(batch_size, kv_length, np.int32)
    return Requests(np.arange(batch_size), starts, lengths, causal)


def by_token(states: torch.Tensor) -> torch.Tensor:
    """Gives [B * T, H, D] of [B, H, T, D], its last axis dense. It is a view, but for batches that lie by heads."""
    rows = states.select(2, 0) if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)
    dense: torch.Tensor = dense_rows(rows)
    return dense


def autocast(dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gives the tensors, in ``dtype`` where autocast is on, which leaves float64 as it is."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(x if x.dtype in (dtype, torch.float64) else x.to(dtype) for x in tensors)


def run(
    plan: Any,
    query: torch.Tensor,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    logits: Logits,
    scales: tuple[float, float] = (1.0, 1.0),
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives output [B, T, H, Dv] of query [B, H, T, D]: the tokens of a plan, row after row of the batch."""
    batch_size, num_heads, q_length, _ = query.shape
    output = query.new_empty(batch_size, q_length, num_heads, plan.head_size_v)
    ops.attend(*(plan, by_token(query), key_cache, value_cache, output.flatten(0, 1), block_table, logits, scales, lse))
    return output
