# SPDX-License-Identifier: Apache-2.0
"""The friendly layer: a paged KV cache that knows its own layout."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np

from cpu_attn import _check, _dispatch, ops
from cpu_attn._arrays import bridged, new_beside, view
from cpu_attn._dtypes import DTYPES, dtype_name
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata
from cpu_attn.step import Step
from cpu_attn.storage.descriptor import CacheDescriptor, layout_of
from cpu_attn.storage.files import StoredCache
from cpu_attn.storage.memory import aligned_copy, aligned_zeros, memory_dtype, move_blocks


class PagedKVCache:
    """K and V of one layer in pages, packed as the kernels of one isa read them.

    num_blocks N, block_size B, num_kv_heads Hkv, head_size D (of K), head_size_v Dv (of V, D unless said);
    dtype float32, float16 or bfloat16, of keys, values and queries; kv_cache_dtype ``auto``: the memory is of it too,
    ``fp8_e4m3`` (``fp8``) or ``fp8_e5m2``: it holds key / k_scale and value / v_scale, ``int8``, ``int6``, ``int5``,
    ``int4`` or ``int4_per_token_head``: integers with scales of their own, or two of these as ``K/V``. ``key_cache``
    and ``value_cache`` are the raw arrays for :func:`reshape_and_cache` and :func:`attention_with_kv_cache`; ``isa`` is
    resolved and ``layout`` names what lies inside, so that a plan for another layout or dtype is refused; all of that
    is ``descriptor``, which goes with the memory into files and to other machines.
    kv_cache_layout: ``packed``, or ``HND`` or ``NHD``: plain rows, slower to read, for whoever shares the memory
    (``layout`` then has the same name).
    kv_cache_rotation: ``hadamard``, for quantised caches, whose quality it saves: see :func:`reshape_and_cache`.
    Raises ValueError or TypeError for what is out of range, UnavailableError for an isa that is not there, MemoryError.

    >>> cache = PagedKVCache(64, 16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> cache.update(key, value, slot_mapping)
    >>> plan = cache.plan(query_start_loc, seq_lens, num_heads=32)
    >>> output = cache.attend(query, block_table, plan)
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
        self._hold(descriptor, *(aligned_zeros(x, memory_dtype(kv)) for x, kv in zip(shapes, kvs, strict=True)))

    def _hold(self, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any) -> None:
        d = self.descriptor = descriptor
        self.layout, self.kv_cache_layout, self.isa = d.layout, d.kv_cache_layout, d.isa
        self.dtype, self.kv_cache_dtype = DTYPES[d.dtype], d.kv_cache_dtype
        self.kv_cache_rotation = d.kv_cache_rotation
        self.num_blocks, self.block_size, self.num_kv_heads = d.num_blocks, d.block_size, d.num_kv_heads
        self.head_size, self.head_size_v, self.k_scale, self.v_scale = d.head_size, d.head_size_v, d.k_scale, d.v_scale
        self.key_cache, self.value_cache = key_cache, value_cache

    @classmethod
    def open(cls, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any, isa: str = "auto") -> PagedKVCache:
        """A cache over memory that is there (somebody's arrays, a memory map), without a copy.

        key_cache, value_cache: as another cache with this descriptor held them; strides of blocks and heads are free,
        of HND and NHD those of tokens, too, and value_cache may be a part of key_cache there; read-only memory may be
        attended over. isa: whose kernels read it, the best that know the layout unless said.
        Raises ValueError or TypeError for arrays that do not fit, and for a layout that no such isa reads here, which
        :func:`cpu_attn.convert` turns into one of this machine.
        """
        stored = StoredCache(descriptor, key_cache, value_cache)
        cache = cls.__new__(cls)
        reader = descriptor.reader(isa)
        cache._hold(replace(descriptor, isa=reader.name), stored.key_cache, stored.value_cache)
        return cache

    def save(self, file: str | PathLike[str]) -> None:
        """Writes a safetensors file (extra ``safetensors``): ``key_cache``, ``value_cache``, the descriptor in its
        metadata. Raises OSError for a file that cannot be written, UnavailableError without safetensors."""
        StoredCache(self.descriptor, self.key_cache, self.value_cache).save(file)

    @classmethod
    def load(cls, file: str | PathLike[str], isa: str = "auto") -> PagedKVCache:
        """What :meth:`save` wrote, on this machine or another; isa as in :meth:`open`, errors as there and in
        :meth:`StoredCache.load`. A layout that is foreign here: ``convert(StoredCache.load(file))``."""
        stored = StoredCache.load(file)
        return cls.open(stored.descriptor, stored.key_cache, stored.value_cache, isa)

    def __copy__(self) -> PagedKVCache:
        """Another cache over the same memory."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A cache over copies of the memory, which begin at cache lines as a new cache's does."""
        for memory in (self.key_cache, self.value_cache):
            if id(memory) not in memo:
                memo[id(memory)] = aligned_copy(memory)
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle, whose arrays begin wherever NumPy puts them."""
        self.__dict__.update(state)
        self.key_cache, self.value_cache = aligned_copy(self.key_cache), aligned_copy(self.value_cache)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_blocks} blocks of {self.block_size}, {self.num_kv_heads} kv heads of "
            f"{self.head_size}/{self.head_size_v}, {self.dtype} as {self.key_cache.dtype}, {self.isa}, {self.layout})"
        )

    def update(self, key: Any, value: Any, slot_mapping: Any) -> None:
        """Writes key [T, Hkv, D] and value [T, Hkv, Dv] to slot_mapping int64 [T], or to that of a :class:`Step`; more,
        and the errors: see :func:`reshape_and_cache`."""
        if isinstance(slot_mapping, Step):
            slot_mapping = slot_mapping._arrays_for(self).slot_mapping
        key, value, slot_mapping = bridged((key, value, slot_mapping))
        self._same_sizes("key", key, self.head_size)
        self._same_sizes("value", value, self.head_size_v)
        scales = self.k_scale, self.v_scale, self.kv_cache_dtype
        ops.reshape_and_cache(
            *(key, value, self.key_cache, self.value_cache, slot_mapping, self.isa, *scales),
            kv_cache_layout=self.kv_cache_layout,
            kv_cache_rotation=self.kv_cache_rotation,
        )

    def _same_sizes(self, name: str, x: Any, head_size: int) -> None:
        sizes = (self.num_kv_heads, head_size)
        if type(x) is np.ndarray and x.dtype == self.dtype and x.shape[1:] == sizes:  # 0.2 us, what follows 8
            return
        axes = [("T", None), *zip(("num_kv_heads", "head size"), sizes, strict=True)]
        _check.array(name, x, [str(self.dtype)], axes)

    def gather(self, block_table: Any, seq_len: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Plain K [seq_len, Hkv, D] and V [seq_len, Hkv, Dv] of one request; block_table: int32 [M], its blocks.
        As they are stored (:func:`cpu_attn.rotate` turns rotated ones back); integers in float32, times their
        scales. Raises ValueError or TypeError for a seq_len or blocks out of range."""
        common: Any = {"isa": self.isa, "dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype}
        common["kv_cache_layout"] = self.kv_cache_layout
        return (
            ops.gather(self.key_cache, block_table, seq_len, self.head_size, value=False, **common),
            ops.gather(self.value_cache, block_table, seq_len, self.head_size_v, value=True, **common),
        )

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks, K and V: (source, destination) pairs, all read before any is written.

        Raises ValueError or TypeError, before any is written, for what are no pairs, a block out of range, a
        destination named twice, and memory that is read-only.
        """
        moves = _check.moves("pairs", pairs, self.num_blocks, self.num_blocks)
        caches = self.key_cache, self.value_cache
        for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
            _check.writable(name, view(name, cache))
        move_blocks(caches, caches, moves)

    def plan(
        self, query_start_loc: Any, seq_lens: Any, num_heads: int, *, block_table: Any = None, **options: Any
    ) -> SchedulerMetadata:
        """A plan for this cache; options are those of :func:`get_scheduler_metadata` (causal, sliding_window, ...).

        block_table: int32 [R, M] or None; given, requests that share a prefix of blocks read it once. Errors are that
        function's.
        """
        (lens,) = bridged((seq_lens,))
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
            kv_cache_layout=self.kv_cache_layout,
            kv_cache_rotation=self.kv_cache_rotation,
            **options,
        )

    def attend(
        self,
        query: Any,
        block_table: Any,
        plan: SchedulerMetadata | None = None,
        *,
        scale: float | None = None,
        alibi_slopes: Any = None,
        softcap: float = 0.0,
        s_aux: Any = None,
        output: Any = None,
        lse: Any = None,
        selected_blocks: Any = None,
        attn_bias: Any = None,
        selected_tokens: Any = None,
    ) -> Any:
        """Output [T, Hq, Dv] of query [T, Hq, D] over the pages in block_table [R, M]: a new array unless given, a
        tensor where query is one.

        block_table: int32 [R, M] with the plan for it, or a :class:`Step`, which makes a plan without options for the
        first layer and keeps it for the others. Layers with options have a plan of their own, from :meth:`Step.plan`.
        scale is 1 / sqrt(D) unless said; the rest, and the errors, as in :func:`attention_with_kv_cache`. ValueError
        for a plan that was made for another dtype, head size, layout, kv_cache_dtype or kv_cache_rotation, or for an
        isa that does not read this layout, and for a step of another block_size.
        """
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
        planned, sizes = (plan.head_size, plan.head_size_v), (self.head_size, self.head_size_v)
        if planned != sizes:  # which may have the same width
            raise ValueError(f"plan: made for heads of {planned}, this cache has heads of {sizes} (K, V)")
        if output is None:
            output = new_beside(query, (plan.num_tokens, plan.num_heads, plan.head_size_v), self.dtype)
        ops.attend(
            *(plan, query, self.key_cache, self.value_cache, output, block_table),
            self.head_size**-0.5 if scale is None else scale,
            softcap,
            (self.k_scale, self.v_scale),
            lse=lse,
            alibi_slopes=alibi_slopes,
            s_aux=s_aux,
            selected_blocks=selected_blocks,
            attn_bias=attn_bias,
            selected_tokens=selected_tokens,
        )
        return output


def _num_heads(query: Any) -> int:
    if not (type(query) is np.ndarray and query.ndim == 3):
        query = _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    return int(query.shape[1])
