# SPDX-License-Identifier: Apache-2.0
"""This module knows which rank has which token, and merges the results of the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import new_beside, view
from cpu_attn.distributed.group import Group
from cpu_attn.ops import Written, merge_stacked
from cpu_attn.plan import SchedulerMetadata
from cpu_attn.step import Step
from cpu_attn.storage import PagedKVCache

Array = np.ndarray[Any, Any]


class ContextParallel:
    """Computes attention over requests whose keys are spread over the ranks of a group.

    Every rank makes the same calls with the same arguments: queries, lengths and masks are those of the whole problem.
    Before the first layer of a plan the ranks compare its lengths and masks; arguments of a call they do not compare.
    Position p of a request belongs to rank ``p // cp_kv_cache_interleave_size % group.world_size``. A block of the
    engine holds ``block_size * group.world_size`` positions, of which each rank has ``block_size`` in its own cache's
    block of the same number, so that one block table serves all ranks (vLLM's decode context parallel).

    Args:
        group: what connects the ranks, such as :class:`cpu_attn.distributed.gloo.GlooGroup`.
        cp_kv_cache_interleave_size: how many positions in a row belong to the same rank; divides the caches'
            block_size.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument has another type.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import numpy as np
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager
        >>> from cpu_attn.distributed import ContextParallel, ThreadGroup
        >>> rng = np.random.default_rng(0)
        >>> query, key, value = rng.standard_normal((3, 100, 2, 64), np.float32)
        >>> def run(group):  # on every rank
        ...     ranks = ContextParallel(group, cp_kv_cache_interleave_size=16)
        ...     cache = PagedKVCache(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
        ...     manager = BlockManager(cache, decode_context_parallel_size=group.world_size)
        ...     done = manager.allocate("a", range(100))
        ...     step = ranks.step(manager.step([("a", range(100))]))
        ...     cache.update(key, value, step)
        ...     return ranks.attend(cache, query, step)
        >>> with ThreadPoolExecutor(2) as pool:
        ...     two = list(pool.map(run, ThreadGroup.make(2)))
        >>> (one,) = map(run, ThreadGroup.make(1))
        >>> bool((two[0] == two[1]).all()), bool(np.allclose(two[0], one, atol=1e-6))
        (True, True)
    """

    def __init__(self, group: Group, cp_kv_cache_interleave_size: int = 1) -> None:
        _check.instance("group", group, Group)
        self.group = group
        size, rank = group.world_size, group.rank
        self.ranks = _check.ranks(size, rank, cp_kv_cache_interleave_size)
        self._agreed: WeakSet[Any] = WeakSet()  # the plans that are known to be alike on all ranks

    def local_seq_lens(self, seq_lens: Any) -> Array:
        """Says how many keys of each request this rank has.

        Args:
            seq_lens: int32 [R], how many keys each request has on all ranks.

        Returns:
            int32 [R].

        Raises:
            ValueError: ``seq_lens`` has another shape.
            TypeError: ``seq_lens`` is no array, or has another dtype.
        """
        lens = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", None)]).numpy()
        size, rank, step = self.ranks
        found: Array = lens // (size * step) * step + np.clip(lens % (size * step) - rank * step, 0, step)
        return found.astype(np.int32)

    def slot_mapping(self, slot_mapping: Any, block_size: int) -> Array:
        """Turns the engine's slots, which count the positions of all ranks, into this rank's.

        Args:
            slot_mapping: int64 [T], block * block_size * world_size + place in the block, negative to skip a token.
            block_size: tokens of a block of this rank's caches.

        Returns:
            int64 [T], slots of this rank's caches, -1 for tokens of other ranks.

        Raises:
            ValueError: ``block_size`` is no multiple of ``cp_kv_cache_interleave_size``, or a shape is another.
            TypeError: an argument has another type or dtype.
        """
        slots = _check.array("slot_mapping", slot_mapping, ["int64"], [("T", None)]).numpy()
        size, rank, step = self.ranks
        if _check.integer("block_size", block_size, 1) % step:
            raise ValueError(f"block_size: {block_size} is no multiple of cp_kv_cache_interleave_size = {step}")
        turn, place = np.divmod(slots, size * step)  # a block holds whole turns of the ranks
        found: Array = turn * step + place % step
        found[(place // step != rank) | (slots < 0)] = -1
        return found

    def step(self, step: Step) -> Step:
        """Turns a step of the engine into this rank's, with which every layer writes and attends.

        Args:
            step: of a :class:`cpu_attn.serving.BlockManager` with ``decode_context_parallel_size=group.world_size``.

        Returns:
            The same requests, lengths, positions and blocks, with this rank's slots. Its plans are this rank's.

        Raises:
            ValueError: the step's blocks are not for so many ranks, or no multiple of ``cp_kv_cache_interleave_size``.
        """
        _check.instance("step", step, Step)
        block_size, rest = divmod(step.block_size, self.group.world_size)
        if rest or step.ranks != _check.Ranks():
            raise ValueError(
                f"step: blocks of {step.block_size} positions, {step.ranks}, expected those of a BlockManager "
                f"with decode_context_parallel_size = {self.group.world_size}"
            )
        slots = self.slot_mapping(step.slot_mapping, block_size)
        return replace(step, slot_mapping=slots, block_size=block_size, ranks=self.ranks)

    def attend(
        self,
        cache: PagedKVCache,
        query: Written,
        block_table: Any,
        plan: SchedulerMetadata | None = None,
        *,
        s_aux: Any = None,
        output: Written | None = None,
        lse: Any = None,
        **options: Any,
    ) -> Written:
        """Computes attention over the keys of all ranks: each attends its own, sends one message, and merges all.

        Args:
            cache: this rank's :class:`cpu_attn.PagedKVCache` of the layer.
            query: [T, Hq, D] of the cache's dtype, the same on all ranks.
            block_table: int32 [R, M], or a step of :meth:`step`.
            plan: of the step, or of ``cache.plan`` with ``cp_world_size``, ``cp_rank`` and
                ``cp_kv_cache_interleave_size``. Without one, the step's.
            s_aux: [Hq], or None: attention sinks, which count once.
            output: [T, Hq, Dv] to write to, or None for a new array.
            lse: float32 [Hq, T], or None: receives the log of each softmax's denominator.
            **options: ``scale``, ``alibi_slopes``, ``softcap``, and of this rank's keys ``selected_blocks``,
                ``attn_bias`` and ``selected_tokens``.

        Returns:
            ``output``, the same bits on all ranks; a new one is a tensor where ``query`` is one.

        Raises:
            RankError: a rank is dead or hangs. ``output`` and ``lse`` are as before.
            ValueError: as :meth:`cpu_attn.PagedKVCache.attend` says, or the plan is not this rank's. Other ranks raise
                a RankError then, unless they find the same fault. Or the ranks' plans are not for the same lengths,
                masks, heads and windows, which all of them find before the first layer of a plan.
            TypeError: as :meth:`cpu_attn.PagedKVCache.attend` says.
        """
        _check.instance("cache", cache, PagedKVCache)
        if isinstance(block_table, Step) and plan is None:
            axes = [("T", None), ("num_heads", None), ("head_size", None)]
            plan = block_table._plan_for_all(cache, _check.array("query", query, _check.FLOATS, axes).shape[1])
        plan = _check.plan_of_ranks("plan", plan, self.ranks)
        shape = (plan.num_tokens, plan.num_heads, plan.head_size_v)
        if output is None:
            output = cast(Written, new_beside(query, shape, cache.dtype))
        if lse is None:
            lse = np.empty((plan.num_heads, plan.num_tokens), np.float32)
        sizes = list(zip(("T", "num_heads", "head_size_v"), shape, strict=True))
        to = _check.writable("output", _check.array("output", output, [str(cache.dtype), "float32"], sizes))
        log = _check.writable("lse", _check.array("lse", lse, ["float32"], [sizes[1], sizes[0]]))
        given = {"query": query, "key_cache": cache.key_cache, "value_cache": cache.value_cache}
        inputs: dict[str, Any] = {name: view(name, x) for name, x in given.items()}
        _check.disjoint("output", to, {"lse": log, **inputs})
        _check.disjoint("lse", log, inputs)

        self._agree(plan)
        message = np.empty(plan.num_heads * plan.num_tokens * (plan.head_size_v + 1), np.float32)
        (own_out,), (own_lse,) = _split(message[None], shape)
        sinks = s_aux if self.group.rank == 0 else None
        cache.attend(query, block_table, plan, s_aux=sinks, output=own_out, lse=own_lse, **options)
        if plan.num_tokens:
            outs, lses = _split(self.group.all_gather(message), shape)
            merged = np.empty(shape, np.float32)
            merge_stacked(outs, lses, merged, log.numpy())
            to.numpy()[...] = merged
        return output

    def _agree(self, plan: Any) -> None:
        """Compares 8 bytes of each rank, once for all layers of a plan. Their number does not depend on the plan, so
        ranks whose later messages would differ in size find that here, where no library ends a process for it."""
        if self.group.world_size == 1 or plan in self._agreed:
            return
        found = self.group.all_gather(np.frombuffer(plan._checksum, np.uint64))[:, 0]
        for other in np.flatnonzero(found != found[self.group.rank])[:1]:
            raise ValueError(
                f"plan: rank {other} has another one than rank {self.group.rank}: for other lengths, masks, heads or "
                "windows"
            )
        self._agreed.add(plan)

    def all_gather_heads(self, x: Any) -> Array:
        """Puts the heads of all ranks side by side, for ranks that are tensor parallel, too, and have some heads each.

        Args:
            x: [T, H, D], this rank's query heads.

        Returns:
            [T, H * world_size, D]; after :meth:`attend` a rank takes its own heads out of the output.

        Raises:
            RankError: a rank is dead or hangs.
            ValueError: ``x`` has other axes.
            TypeError: ``x`` is no array, or has another dtype.
        """
        heads = view("x", x)
        if len(heads.shape) != 3:
            raise ValueError(f"x: {len(heads.shape)} axes, expected 3: [T, num_heads, head_size]")
        return np.concatenate(self.group.all_gather(heads.numpy()), axis=1)


def _split(messages: Array, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Gives outputs [S, T, Hq, Dv] and lses [S, Hq, T] of the ranks' messages, one a row."""
    tokens, heads, size = shape
    end = tokens * heads * size
    sets = len(messages)
    return messages[:, :end].reshape(sets, *shape), messages[:, end:].reshape(sets, heads, tokens)
