# SPDX-License-Identifier: Apache-2.0
"""This module has the friendly layer: a paged KV cache that knows its own layout."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np

from cpu_attn import _check, _dispatch, _numa, ops
from cpu_attn._arrays import new_beside, plain_dtype, view
from cpu_attn._dtypes import DTYPES, dtype_name
from cpu_attn._native import lib
from cpu_attn.ops import Written
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata
from cpu_attn.step import Step
from cpu_attn.storage.descriptor import CacheDescriptor, layout_of
from cpu_attn.storage.files import StoredCache
from cpu_attn.storage.memory import Memory, aligned_copy, aligned_zeros, memory_dtype, move_blocks


class PagedKVCache:
    """Holds K and V of one layer in pages, which know their layout: it is the friendly layer over the three calls.

    A step calls :meth:`plan` once, then :meth:`update` and :meth:`attend`, or :meth:`update_and_attend`, for the cache
    of every layer.

    Args:
        num_blocks: N, blocks of the cache.
        block_size: B, tokens of a block. Multiples of 16 waste nothing.
        num_kv_heads: Hkv.
        head_size: D, elements of a head of keys.
        dtype: of queries, keys and values: float32, float16 or bfloat16, as NumPy dtype, torch dtype or name.
        isa: whose layout; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine.
        head_size_v: Dv, elements of a head of values; ``head_size`` unless said.
        kv_cache_dtype: what the memory holds: ``auto`` for elements of ``dtype``, ``fp8_e4m3`` (``fp8``), ``fp8_e5m2``,
            ``int8``, ``int6``, ``int5``, ``int4``, ``int4_per_token_head``, or two of these as ``K/V``.
            :func:`reshape_and_cache` says what each is.
        k_scale: what keys are divided by in fp8 caches; 1 for others.
        v_scale: what values are divided by in fp8 caches; 1 for others.
        kv_cache_layout: ``packed``, or ``HND`` or ``NHD`` for plain rows. Plain rows are slower to read, and are there
            to share the memory with others.
        kv_cache_rotation: ``hadamard`` for quantised caches, which keep a model's quality better so: docs/quality.md.
        k_feedback: float32 [Hkv, D, D] for keys of integers, finite, or None: the factors by which :meth:`update` feeds
            errors of rounding back (:func:`cpu_attn.rotation.error_feedback`). It belongs to writing alone, so files
            and descriptors do not have it.
        store_blocks: how many more blocks there is room for behind the ``num_blocks``. They take no memory:
            :class:`cpu_attn.serving.BlockManager` maps segments of a store there, so that what a
            :class:`cpu_attn.serving.PrefixStore` has is attended where it lies. Tokens are not written to them.
        numa: on which NUMA nodes the memory lies. None: each page on the node of the thread that first writes to it.
            ``interleave``: pages take turns over the nodes that the process may have memory of. ``blocks``: each of
            these nodes on whose CPUs calls may run has an equal run of blocks. docs/threads.md says what for.

    Attributes:
        key_cache: the array of keys, as the three calls take it, [N + store_blocks, ...].
        value_cache: the array of values.
        isa: the isa that ``auto`` meant.
        layout: what lies in a block. A plan for another layout is refused.
        descriptor: the :class:`CacheDescriptor`: all but ``k_feedback`` and ``numa`` as data, for files and other
            machines.
        k_feedback: the factors that :meth:`update` goes by, or None; a cache that is opened or loaded has none until
            they are set here.
        block_nodes: int32 [N + store_blocks], the node of each block, where ``numa`` is ``blocks`` and there are
            several; else None. Pages of files lie where their system has put them, and count to the first node.

    Raises:
        ValueError: a size or a scale is out of range, or a name is unknown.
        TypeError: an argument has another type.
        UnavailableError: this machine does not have the isa, or its system refuses to place memory by ``numa``, or it
            has no way to map files for ``store_blocks``.
        MemoryError: there is no memory for the cache.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import PagedKVCache
        >>> rng = np.random.default_rng(0)
        >>> query = rng.standard_normal((20, 8, 64), np.float32)  # a prompt of 20 tokens
        >>> key, value = rng.standard_normal((2, 20, 2, 64), np.float32)
        >>> cache = PagedKVCache(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> plan = cache.plan(np.array([0, 20], np.int32), np.array([20], np.int32), num_heads=8)
        >>> cache.update(key, value, np.arange(20))  # blocks 0 and 1
        >>> output = cache.attend(query, np.array([[0, 1]], np.int32), plan)
        >>> output.shape
        (20, 8, 64)
        >>> bool((cache.gather(np.array([0, 1], np.int32), 20)[0] == key).all())
        True
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: Any = "float32",
        isa: str = "auto",
        *,
        head_size_v: int | None = None,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_layout: str = "packed",
        kv_cache_rotation: str = "none",
        k_feedback: Any = None,
        store_blocks: int = 0,
        numa: str | None = None,
    ) -> None:
        name = dtype_name(dtype)
        head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
        head_size_v = _check.integer(
            "head_size_v", head_size if head_size_v is None else head_size_v, 1, _check.MAX_SIZE
        )
        resolved = _dispatch.resolve_isa(isa, name, head_size)
        kvs = _check.kv_dtypes(kv_cache_dtype, name)
        shapes = [
            get_kv_cache_shape(
                *(num_blocks, block_size, num_kv_heads, size, name, resolved.name, kv), kv_cache_layout=kv_cache_layout
            )
            for size, kv in zip((head_size, head_size_v), kvs, strict=True)
        ]
        num_blocks, num_kv_heads, block_size = _check.cache_sizes(shapes[0], kv_cache_layout)
        scales = _check.scales(k_scale, v_scale, kvs)
        packed = layout_of(resolved.index, name)
        assert packed is not None
        descriptor = CacheDescriptor(
            layout=packed if kv_cache_layout == "packed" else kv_cache_layout,
            dtype=name,
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            k_scale=scales[0],
            v_scale=scales[1],
            isa=resolved.name,
            kv_cache_rotation=kv_cache_rotation,
        )
        self.k_feedback: np.ndarray[Any, Any] | None = None
        if k_feedback is not None:
            self.k_feedback = _check.feedback("k_feedback", k_feedback, kvs[0], num_kv_heads, head_size)
        self._placement = _numa.placement(numa)
        more = _check.integer("store_blocks", store_blocks, 0, _check.INT32_MAX - num_blocks)
        self.store_blocks = more
        k, v = (
            aligned_zeros((first + more, *rest), memory_dtype(kv), self._placement, more)
            for (first, *rest), kv in zip(shapes, kvs, strict=True)
        )
        self._hold(descriptor, k, v)

    _placement: _numa.Placement | None = None  # None: the memory is there already
    store_blocks = 0

    def _hold(self, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any) -> None:
        d = self.descriptor = descriptor
        self.layout, self.kv_cache_layout, self.isa = d.layout, d.kv_cache_layout, d.isa
        self.dtype, self.kv_cache_dtype = DTYPES[d.dtype], d.kv_cache_dtype
        self.kv_cache_rotation = d.kv_cache_rotation
        self.num_blocks, self.block_size, self.num_kv_heads = d.num_blocks, d.block_size, d.num_kv_heads
        self.head_size, self.head_size_v, self.k_scale, self.v_scale = d.head_size, d.head_size_v, d.k_scale, d.v_scale
        self._format = ops.CacheFormat(d.isa, d.kv_cache_dtype, d.kv_cache_layout, d.kv_cache_rotation)
        self.key_cache: Memory = key_cache
        self.value_cache: Memory = value_cache
        self.numa = self._placement.numa if self._placement else None
        nodes = self._placement.block_nodes(d.num_blocks) if self._placement else None
        self.block_nodes = None if nodes is None else np.append(nodes, np.repeat(nodes[:1], self.store_blocks))

    @classmethod
    def open(cls, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any, isa: str = "auto") -> PagedKVCache:
        """Makes a cache over memory that is there (somebody's arrays, a memory map), without a copy.

        Args:
            descriptor: what the memory holds.
            key_cache: memory of keys, as another cache with this descriptor held it. The strides of blocks and heads
                are free, in ``HND`` and ``NHD`` those of tokens, too. Read-only memory may be attended over.
            value_cache: the same for values. In ``HND`` and ``NHD`` it may be a part of ``key_cache``.
            isa: whose kernels read the memory; the best isa of this machine that knows the layout unless said.

        Returns:
            The cache.

        Raises:
            ValueError: an array does not fit, or no such isa reads the layout; :func:`cpu_attn.storage.convert` makes a
                layout of this machine.
            TypeError: an argument has another type or dtype.
            UnavailableError: this machine does not have the isa.
        """
        stored = StoredCache(descriptor, key_cache, value_cache)
        cache = cls.__new__(cls)
        reader, cache.k_feedback = descriptor.reader(isa), None
        cache._hold(replace(descriptor, isa=reader.name), stored.key_cache, stored.value_cache)
        return cache

    def save(self, file: str | PathLike[str]) -> None:
        """Writes a safetensors file of ``key_cache``, ``value_cache`` and, in its metadata, the descriptor.

        Args:
            file: the path. The extra ``safetensors`` is needed.

        Raises:
            OSError: the file cannot be written.
            UnavailableError: safetensors is not installed.
        """
        own = slice(self.num_blocks)
        StoredCache(self.descriptor, self.key_cache[own], self.value_cache[own]).save(file)

    @classmethod
    def load(cls, file: str | PathLike[str], isa: str = "auto") -> PagedKVCache:
        """Reads a file that :meth:`save` wrote, on this machine or another.

        Args:
            file: the path. The extra ``safetensors`` is needed.
            isa: as in :meth:`open`.

        Returns:
            The cache.

        Raises:
            ValueError: the file is something else, or no such isa reads its layout; ``convert(StoredCache.load(file))``
                does.
            OSError: the file cannot be read.
            UnavailableError: safetensors is not installed, or this machine does not have the isa.
        """
        stored = StoredCache.load(file)
        return cls.open(stored.descriptor, stored.key_cache, stored.value_cache, isa)

    def __copy__(self) -> PagedKVCache:
        """Gives another cache over the same memory."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """Gives a cache over copies of the memory, which begin at cache lines as a new cache's does."""
        for memory in (self.key_cache, self.value_cache):
            if id(memory) not in memo:
                memo[id(memory)] = aligned_copy(memory, self._placement, self.store_blocks)
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reads a pickle. NumPy puts its arrays anywhere, so they are moved to cache lines; the pickle may be another
        machine's."""
        self.__dict__.update(state)
        self._placement = _numa.placement(self.numa)
        k, v = (aligned_copy(x, self._placement, self.store_blocks) for x in (self.key_cache, self.value_cache))
        self._hold(self.descriptor, k, v)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_blocks} blocks of {self.block_size}, {self.num_kv_heads} kv heads of "
            f"{self.head_size}/{self.head_size_v}, {self.dtype} as {self.key_cache.dtype}, {self.isa}, {self.layout}"
            f"{f', {self.store_blocks} store blocks' if self.store_blocks else ''})"
        )

    def update(self, key: Any, value: Any, slot_mapping: Any) -> None:
        """Writes the keys and values of T tokens: :func:`reshape_and_cache` for this cache.

        Args:
            key: [T, Hkv, D] of the cache's dtype.
            value: [T, Hkv, Dv] of the cache's dtype.
            slot_mapping: int64 [T], block * B + place in the block; a token with a negative slot is skipped. Or a
                :class:`cpu_attn.serving.Step`, which has one.

        Raises:
            ValueError: a shape, a stride or a slot is out of range, memory overlaps, or the step is of another
                block_size. Nothing has been written then.
            TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        """
        if isinstance(slot_mapping, Step):
            slot_mapping = slot_mapping._arrays_for(self).slot_mapping
        self._own_slots(slot_mapping)
        self._same_sizes("key", key, self.head_size)
        self._same_sizes("value", value, self.head_size_v)
        arrays = (self.key_cache, self.value_cache, key, value, slot_mapping, self.k_feedback)
        ops.run_write(lib.ca_write, _check.WRITE, arrays, self._format, self.k_scale, self.v_scale)

    def _own_slots(self, slot_mapping: Any) -> None:
        if self.store_blocks:
            _check.slots("slot_mapping", slot_mapping, self.num_blocks * self.block_size)

    def _same_sizes(self, name: str, x: Any, head_size: int) -> None:
        sizes = (self.num_kv_heads, head_size)
        if plain_dtype(x) == self.descriptor.dtype and x.shape[1:] == sizes:  # 0.2 us; what follows takes 8
            return
        axes = [("T", None), *zip(("num_kv_heads", "head size"), sizes, strict=True)]
        _check.array(name, x, [str(self.dtype)], axes)

    def gather(self, block_table: Any, seq_len: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Reads keys and values of one request back as plain arrays.

        Args:
            block_table: int32 [M], the request's blocks.
            seq_len: how many tokens to read.

        Returns:
            (K [seq_len, Hkv, D], V [seq_len, Hkv, Dv]), as they are stored: rotated heads stay rotated
            (:func:`cpu_attn.rotation.rotate` turns them back), fp8 stays fp8, integers become float32, times their
            scales.

        Raises:
            ValueError: ``seq_len`` or a block is out of range.
            TypeError: an argument has another type or dtype.
        """
        common: Any = {"isa": self.isa, "dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype}
        common["kv_cache_layout"] = self.kv_cache_layout
        return (
            ops.gather(self.key_cache, block_table, seq_len, self.head_size, value=False, **common),
            ops.gather(self.value_cache, block_table, seq_len, self.head_size_v, value=True, **common),
        )

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks, keys and values, within the cache. All blocks are read before any is written.

        Args:
            pairs: (source, destination) block numbers. A destination is one of the ``num_blocks``.

        Raises:
            ValueError: a block is out of range, a destination is named twice, or the memory is read-only. Nothing has
                been written then.
            TypeError: ``pairs`` holds something else than pairs of integers. Nothing has been written then.
        """
        moves = _check.moves("pairs", pairs, self.num_blocks + self.store_blocks, self.num_blocks)
        caches = self.key_cache, self.value_cache
        for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
            _check.writable(name, view(name, cache))
        move_blocks(caches, caches, moves)

    def plan(
        self, query_start_loc: Any, seq_lens: Any, num_heads: int, *, block_table: Any = None, **options: Any
    ) -> SchedulerMetadata:
        """Plans a step over this cache: :func:`get_scheduler_metadata` with what the cache knows.

        Args:
            query_start_loc: int32 [R + 1], where each request's query tokens start.
            seq_lens: int32 [R], how many keys each request has, this step's among them.
            num_heads: Hq, query heads; a multiple of ``num_kv_heads``.
            block_table: int32 [R, M], or None. With it, requests that start with the same blocks read these once, and
                threads begin with what lies on their own NUMA node (``block_nodes``).
            **options: more of :func:`get_scheduler_metadata`'s arguments: ``causal``, ``sliding_window``,
                ``tree_mask``, ...

        Returns:
            The plan, for all caches of this shape.

        Raises:
            ValueError: a length or a size is out of range, a name is unknown, or masks do not go together.
            TypeError: an argument has another type or dtype.
            UnavailableError: this build does not have the engine.
        """
        lens = seq_lens
        if not (type(lens) is np.ndarray and lens.ndim == 1):
            lens = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", None)])
        return get_scheduler_metadata(
            lens.shape[0],
            num_heads,
            self.num_kv_heads,
            self.head_size,
            seq_lens,
            self.dtype,
            query_start_loc,
            isa=self.isa,
            kv_cache_dtype=self.kv_cache_dtype,
            head_size_v=self.head_size_v,
            block_table=block_table,
            block_size=None if block_table is None else self.block_size,
            block_nodes=None if block_table is None else self.block_nodes,
            kv_cache_layout=self.kv_cache_layout,
            kv_cache_rotation=self.kv_cache_rotation,
            **options,
        )

    def attend(
        self,
        query: Written,
        block_table: Any,
        plan: SchedulerMetadata | None = None,
        *,
        scale: float | None = None,
        alibi_slopes: Any = None,
        softcap: float = 0.0,
        s_aux: Any = None,
        output: Written | None = None,
        lse: Any = None,
        selected_blocks: Any = None,
        attn_bias: Any = None,
        selected_tokens: Any = None,
    ) -> Written:
        """Computes attention over the pages of each request: :func:`attention_with_kv_cache` for this cache.

        Args:
            query: [T, Hq, D] of the cache's dtype.
            block_table: int32 [R, M], the blocks of each request in order. Or a :class:`cpu_attn.serving.Step`, which
                has one.
            plan: of :meth:`plan`, of this cache or one of the same shape. A step makes one without options for the
                first layer and keeps it for the others; layers with options take one of
                :meth:`cpu_attn.serving.Step.plan`.
            scale: the factor of q.k; 1 / sqrt(D) unless said.
            alibi_slopes: float32 [Hq], or None.
            softcap: 0 is off.
            s_aux: [Hq], or None: attention sinks.
            output: [T, Hq, Dv] to write to, or None for a new array.
            lse: float32 [Hq, T], or None: receives the log of each softmax's denominator.
            selected_blocks: int32 [R, Hkv, S], or None for all blocks. With a plan that has a ``query_block_size`` the
                first axis counts query blocks; of one that has ``select_by_query_head`` the second axis counts query
                heads.
            attn_bias: float32 [R or 1, Hq or 1, Q, K], or None.
            selected_tokens: int32 [T, S], or None for all keys.

        Returns:
            ``output``; a new one is a tensor where ``query`` is one.

        Raises:
            ValueError: an argument is out of range, memory overlaps, or the plan was made for another dtype, head size,
                ``kv_cache_dtype``, ``kv_cache_rotation`` or layout, or the step is of another block_size. Nothing has
                been written then.
            TypeError: an argument is no array, or has another dtype. Nothing has been written then.
            MemoryError: there is no memory for the plan's ``workspace_bytes``.
        """
        block_table, plan, out = self._planned(query, block_table, plan, output)
        lengths = (None, None, alibi_slopes, block_table, s_aux, None)
        states = (out, lse, query, self.key_cache, self.value_cache)
        factor = self.head_size**-0.5 if scale is None else scale
        arrays = (*states, *lengths, selected_blocks, attn_bias, selected_tokens)
        ops.run_attention(plan, arrays, factor, softcap, (self.k_scale, self.v_scale))
        return out

    def update_and_attend(
        self,
        key: Any,
        value: Any,
        query: Written,
        slot_mapping: Any,
        block_table: Any = None,
        plan: SchedulerMetadata | None = None,
        *,
        scale: float | None = None,
        alibi_slopes: Any = None,
        softcap: float = 0.0,
        s_aux: Any = None,
        output: Written | None = None,
        lse: Any = None,
        selected_blocks: Any = None,
        attn_bias: Any = None,
        selected_tokens: Any = None,
    ) -> Written:
        """Does what :meth:`update` and then :meth:`attend` do, as one call: a layer of a step crosses into C once.

        Args:
            key: [T, Hkv, D] of the cache's dtype.
            value: [T, Hkv, Dv] of the cache's dtype.
            query: [T, Hq, D] of the cache's dtype.
            slot_mapping: int64 [T], as in :meth:`update`. Or a :class:`cpu_attn.serving.Step`, which has a block table,
                too.
            block_table: int32 [R, M], as in :meth:`attend`; None with a step, and only then.
            plan: as in :meth:`attend`, and so are the arguments below.
            scale: the factor of q.k; 1 / sqrt(D) unless said.
            alibi_slopes: float32 [Hq], or None.
            softcap: 0 is off.
            s_aux: [Hq], or None: attention sinks.
            output: [T, Hq, Dv] to write to, or None for a new array.
            lse: float32 [Hq, T], or None: receives the log of each softmax's denominator.
            selected_blocks: int32 [R, Hkv, S], or None for all blocks.
            attn_bias: float32 [R or 1, Hq or 1, Q, K], or None.
            selected_tokens: int32 [T, S], or None for all keys.

        Returns:
            ``output``, as :meth:`attend` gives it, with the same bits.

        Raises:
            ValueError: what :meth:`update` and :meth:`attend` say. All arguments of both are checked first: nothing has
                been written then, neither to the cache nor to ``output``.
            TypeError: an argument is no array, or has another dtype. Nothing has been written then.
            MemoryError: there is no memory for the plan's ``workspace_bytes``.

        Example:
            >>> import numpy as np
            >>> from cpu_attn import PagedKVCache
            >>> from cpu_attn.serving import BlockManager
            >>> cache = PagedKVCache(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64)
            >>> manager = BlockManager(cache)
            >>> _ = manager.allocate("a")
            >>> step = manager.step([("a", [17, 4, 256])])  # a prompt of 3 tokens
            >>> key, value = np.random.default_rng(0).standard_normal((2, 3, 2, 64), np.float32)
            >>> output = cache.update_and_attend(key, value, np.ones((3, 8, 64), np.float32), step)
            >>> bool(np.allclose(output[0], value[0].repeat(4, axis=0)))  # the first token sees its own key alone
            True
        """
        self._same_sizes("key", key, self.head_size)
        self._same_sizes("value", value, self.head_size_v)
        slots = slot_mapping
        if isinstance(slot_mapping, Step):
            if block_table is not None:
                raise ValueError("block_table: is given, and slot_mapping is a step, which has one")
            block_table, slots = slot_mapping, slot_mapping.slot_mapping
        self._own_slots(slots)
        block_table, plan, out = self._planned(query, block_table, plan, output)
        lengths = (None, None, alibi_slopes, block_table, s_aux, None)
        states = (self.key_cache, self.value_cache, out, lse, key, value, slots, self.k_feedback, query)
        factor = self.head_size**-0.5 if scale is None else scale
        arrays, scales = (*states, *lengths, selected_blocks, attn_bias, selected_tokens), (self.k_scale, self.v_scale)
        ops.run_attention(plan, arrays, factor, softcap, scales, kind=lib.CA_UPDATE_AND_ATTEND)
        return out

    def _planned(
        self, query: Written, block_table: Any, plan: SchedulerMetadata | None, output: Written | None
    ) -> tuple[Any, SchedulerMetadata, Written]:
        """Gives the block table, the plan, once it is known to be for caches like this one, and the output."""
        if isinstance(block_table, Step):
            step = block_table._arrays_for(self)
            block_table = step.block_table
            if plan is None:
                plan = step._plan_for_all(self, _num_heads(query))
        plan = cast(SchedulerMetadata, _check.plan("plan", plan))
        if plan.dtype != self.dtype:
            raise ValueError(f"plan: made for {plan.dtype}, this cache takes {self.dtype}")
        _check.same_kv_cache_layout(plan, self.kv_cache_layout)
        packed = self.kv_cache_layout == "packed"
        if packed and plan.isa != self.isa and layout_of(plan._shape.isa, str(self.dtype)) != self.layout:
            raise ValueError(f"plan: made for isa {plan.isa}, which does not read {self.layout}")
        _check.same_kv_dtypes(plan, self.kv_cache_dtype)
        _check.same_kv_cache_rotation(plan, self.kv_cache_rotation)
        shape = plan._shape  # read without the frames of the plan's properties, since every layer comes here
        planned, sizes = (shape.head_size, shape.head_size_v), (self.head_size, self.head_size_v)
        if planned != sizes:  # other sizes may have the same width
            raise ValueError(f"plan: made for heads of {planned}, this cache has heads of {sizes} (K, V)")
        if output is None:
            output = cast(Written, new_beside(query, (plan.num_tokens, shape.num_heads, shape.head_size_v), self.dtype))
        return block_table, plan, output


def _num_heads(query: Any) -> int:
    if not (type(query) is np.ndarray and query.ndim == 3):
        query = _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    return int(query.shape[1])
