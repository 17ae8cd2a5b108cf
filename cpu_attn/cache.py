# SPDX-License-Identifier: Apache-2.0
"""The friendly layer: a paged KV cache that knows its own layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch, ops
from cpu_attn._arrays import DTYPES, dtype_name
from cpu_attn._native import ffi, lib
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata

LAYOUT_NAMES = {lib.CA_LAYOUT_LANES: "lanes-v1", lib.CA_LAYOUT_PAIRS: "pairs-v1"}


class PagedKVCache:
    """K and V of one layer in pages, packed as the kernels of one isa read them.

    num_blocks N, block_size B, num_kv_heads Hkv, head_size D (of K), head_size_v Dv (of V, D unless said);
    dtype float32, float16 or bfloat16, of keys, values and queries; kv_cache_dtype ``auto``: the memory is of it too,
    ``fp8_e4m3`` (``fp8``) or ``fp8_e5m2``: it holds key / k_scale and value / v_scale. ``key_cache`` and
    ``value_cache`` are the raw arrays for :func:`reshape_and_cache` and :func:`attention_with_kv_cache`; ``isa`` is
    resolved and ``layout`` names what lies inside, so that a plan for another isa or dtype is refused.
    kv_cache_layout: ``packed``, or ``HND`` or ``NHD``: plain rows, slower to read, for whoever shares the memory.

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
    ) -> None:
        name = dtype_name(dtype)
        self.head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
        self.head_size_v = _check.integer(
            "head_size_v", head_size if head_size_v is None else head_size_v, 1, _check.MAX_SIZE
        )
        resolved = _dispatch.resolve_isa(isa, name, head_size)
        self.isa, self.dtype = resolved.name, DTYPES[name]
        self._isa, self._dtype = resolved.index, _dispatch.DTYPE_CODES[name]
        kernel = ffi.new("ca_kernel_info *")
        lib.ca_isa_kernel(self._isa, self._dtype, kernel)
        self.kv_cache_layout = _check.kv_cache_layout(kv_cache_layout)
        self.layout = LAYOUT_NAMES[kernel.layout] if kv_cache_layout == "packed" else kv_cache_layout
        common: Any = {"isa": self.isa, "kv_cache_dtype": kv_cache_dtype, "kv_cache_layout": kv_cache_layout}
        shapes = [
            get_kv_cache_shape(num_blocks, block_size, num_kv_heads, size, name, **common)
            for size in (self.head_size, self.head_size_v)
        ]
        self.num_blocks, self.num_kv_heads, self.block_size = _check.cache_sizes(shapes[0], kv_cache_layout)
        self.kv_cache_dtype = kv_cache_dtype
        kv = _check.kv_dtype(kv_cache_dtype, name)
        self.k_scale, self.v_scale = _check.scales(k_scale, v_scale, kv != name)
        self.key_cache, self.value_cache = (np.zeros(shape, DTYPES[kv]) for shape in shapes)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_blocks} blocks of {self.block_size}, {self.num_kv_heads} kv heads of "
            f"{self.head_size}/{self.head_size_v}, {self.dtype} as {self.key_cache.dtype}, {self.isa}, {self.layout})"
        )

    def update(self, key: Any, value: Any, slot_mapping: Any) -> None:
        """Writes key [T, Hkv, D] and value [T, Hkv, Dv] to slot_mapping int64 [T]; see :func:`reshape_and_cache`."""
        self._same_sizes("key", key, self.head_size)
        self._same_sizes("value", value, self.head_size_v)
        scales = self.k_scale, self.v_scale, self.kv_cache_dtype
        ops.reshape_and_cache(
            *(key, value, self.key_cache, self.value_cache, slot_mapping, self.isa, *scales),
            kv_cache_layout=self.kv_cache_layout,
        )

    def _same_sizes(self, name: str, x: Any, head_size: int) -> None:
        _check.array(
            name,
            x,
            [str(self.dtype)],
            [("T", None), ("num_kv_heads", self.num_kv_heads), ("head size", head_size)],
        )

    def gather(self, block_table: Any, seq_len: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Plain K [seq_len, Hkv, D] and V [seq_len, Hkv, Dv] of one request; block_table: int32 [M], its blocks."""
        common: Any = {"isa": self.isa, "dtype": self.dtype, "kv_cache_layout": self.kv_cache_layout}
        return (
            ops.gather(self.key_cache, block_table, seq_len, self.head_size, value=False, **common),
            ops.gather(self.value_cache, block_table, seq_len, self.head_size_v, value=True, **common),
        )

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks, K and V: (source, destination) pairs, all read before any is written.

        Raises ValueError for a block out of range or a destination named twice.
        """
        numbers = [
            tuple(_check.integer(f"pairs[{i}][{j}]", x, 0, self.num_blocks - 1) for j, x in enumerate(pair))
            for i, pair in enumerate(pairs)
        ]
        if any(len(n) != 2 for n in numbers):
            raise ValueError("pairs: expected (source, destination) each")
        sources, destinations = [n[0] for n in numbers], [n[1] for n in numbers]
        if len(set(destinations)) != len(destinations):
            raise ValueError("pairs: a destination is named twice")
        for cache in (self.key_cache, self.value_cache):
            cache[destinations] = cache[sources]

    def plan(self, query_start_loc: Any, seq_lens: Any, num_heads: int, **options: Any) -> SchedulerMetadata:
        """A plan for this cache; options are those of :func:`get_scheduler_metadata` (causal, sliding_window, ...)."""
        num_reqs = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", None)]).shape[0]
        return get_scheduler_metadata(
            num_reqs,
            num_heads,
            self.num_kv_heads,
            self.head_size,
            seq_lens,
            self.dtype,
            query_start_loc,
            isa=self.isa,
            kv_cache_dtype=self.kv_cache_dtype,
            head_size_v=self.head_size_v,
            kv_cache_layout=self.kv_cache_layout,
            **options,
        )

    def attend(
        self,
        query: Any,
        block_table: Any,
        plan: SchedulerMetadata,
        *,
        scale: float | None = None,
        alibi_slopes: Any = None,
        softcap: float = 0.0,
        s_aux: Any = None,
        output: Any = None,
        lse: Any = None,
    ) -> Any:
        """Output [T, Hq, Dv] (a new array unless given) of query [T, Hq, D] over the pages in block_table [R, M].

        scale is 1 / sqrt(D) unless said; the rest as in :func:`attention_with_kv_cache`.
        """
        if _check.plan("plan", plan).isa != self.isa:
            raise ValueError(f"plan: made for isa {plan.isa}, this cache was written for {self.isa}")
        if str(plan.dtype) != str(self.dtype):
            raise ValueError(f"plan: made for {plan.dtype}, this cache takes {self.dtype}")
        _check.same_kv_dtype(plan, self.kv_cache_dtype)
        _check.same_kv_cache_layout(plan, self.kv_cache_layout)
        if output is None:
            output = np.empty((plan.num_tokens, plan.num_heads, plan.head_size_v), self.dtype)
        arrays = (output, lse, query, self.key_cache, self.value_cache, block_table, None, None, None)
        ops.attend(
            plan,
            (*arrays, alibi_slopes, s_aux),
            self.head_size**-0.5 if scale is None else scale,
            softcap,
            -1,
            (self.k_scale, self.v_scale),
        )
        return output
