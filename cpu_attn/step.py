# SPDX-License-Identifier: Apache-2.0
"""This module has the arrays of one step, which :class:`cpu_attn.serving.BlockManager` makes and every layer uses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cpu_attn._check import Ranks
from cpu_attn.plan import Plans, SchedulerMetadata

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Step:
    """Holds the new tokens of R requests, T in all, one request's after another's, and where their keys and values go.

    :meth:`BlockManager.step` makes it; ``num_reqs`` is R, ``num_tokens`` is T.

    Args:
        query_start_loc: int32 [R + 1], where each request's tokens start; the last is T.
        seq_lens: int32 [R], tokens of each request, the new ones counted.
        block_table: int32 [R, M], the blocks of each request; -1 past these, and where a block behind the sliding
            window was given back.
        slot_mapping: int64 [T], the slot of each new token: block * block_size + offset.
        positions: int64 [T], the place of each new token in its request, for a rotary embedding.
        requests: what the requests are called by.
        block_size: tokens of a block.
        sliding_window: of plans that are not told another; -1 is none.
        ranks: cp_world_size, cp_rank and cp_kv_cache_interleave_size of its plans:
            :meth:`cpu_attn.distributed.ContextParallel.step`.

    This class raises no errors itself.

    Example:
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager
        >>> manager = BlockManager(PagedKVCache(num_blocks=4, block_size=16, num_kv_heads=1, head_size=64))
        >>> manager.allocate("a"), manager.allocate("b")
        (0, 0)
        >>> step = manager.step([("a", [17, 4, 256]), ("b", [9])])
        >>> step.query_start_loc.tolist(), step.slot_mapping.tolist()
        ([0, 3, 4], [0, 1, 2, 16])
    """

    query_start_loc: Array
    seq_lens: Array
    block_table: Array
    slot_mapping: Array
    positions: Array
    requests: tuple[Hashable, ...]
    block_size: int
    sliding_window: int = -1
    ranks: Ranks = Ranks()  # noqa: RUF009  # it is immutable
    _plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def num_reqs(self) -> int:
        """Is R, the requests of the step."""
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Is T, the new tokens of all requests."""
        return len(self.slot_mapping)

    def plan(self, cache: Any, num_heads: int, **options: Any) -> SchedulerMetadata:
        """Makes a plan of this step for every layer whose cache is like ``cache``.

        Requests that start with the same block read the blocks that they share once, and threads begin with what lies
        on their own NUMA node where the cache has ``block_nodes``, unless options have ``block_table=None``,
        ``max_selected_tokens``, ``query_block_size`` or ``select_by_query_head``.

        Args:
            cache: a :class:`cpu_attn.PagedKVCache` with the step's block_size.
            num_heads: query heads.
            **options: those of :func:`cpu_attn.get_scheduler_metadata` (``causal``, ``engine``, ``sliding_window``,
                which is the manager's unless said, ...).

        Returns:
            The plan.

        Raises:
            ValueError: the cache's block_size is another than the step's, or what that function says.
            TypeError: as that function says.
            UnavailableError: as that function says.
        """
        self._arrays_for(cache)
        first = np.sort(self.block_table[:, :1], axis=0)
        shared = (first[1:] == first[:-1]).any()
        selects = any(options.get(name) for name in ("max_selected_tokens", "query_block_size", "select_by_query_head"))
        if (shared or cache.block_nodes is not None) and not selects:
            options.setdefault("block_table", self.block_table)
        options.setdefault("sliding_window", self.sliding_window)
        options |= Ranks(*self.ranks)._asdict()
        plan: SchedulerMetadata = cache.plan(self.query_start_loc, self.seq_lens, num_heads, **options)
        return plan

    def _plan_for_all(self, cache: Any, num_heads: int) -> SchedulerMetadata:
        """Gives the plan without options, which the first of the layers makes whose heads, dtype and layout are the
        same."""
        kind = (cache.num_kv_heads, cache.head_size, cache.head_size_v, cache.dtype, cache.kv_cache_dtype)
        key = (num_heads, *kind, cache.isa, cache.kv_cache_layout, cache.kv_cache_rotation, cache.numa)
        if key not in self._plans:
            self._plans[key] = self.plan(cache, num_heads)
        plan: SchedulerMetadata = self._plans[key]
        return plan

    def _arrays_for(self, cache: Any) -> Step:
        """Gives the step itself, once it is known to be of the cache's block_size."""
        if cache.block_size != self.block_size:
            raise ValueError(f"step: for blocks of {self.block_size} tokens, this cache has {cache.block_size}")
        return self
