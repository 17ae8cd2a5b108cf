# SPDX-License-Identifier: Apache-2.0
"""Paged attention under the names of vLLM's older CPU backend: shapes of caches, writing, decoding, whole blocks.

A ``kv_cache`` of one layer is one of

- ``[2, N, B * Hkv * width]``, K first ("flat"; B a multiple of 16, so that the row alone tells B);
- a pair ``(key_cache, value_cache)``, each ``[N, Hkv, B, width]``, or both in one array ``[2, N, Hkv, B, width]``
  ("pair"; any B).

width is the head size where that is even and B a multiple of 16, otherwise it may be larger (``get_kv_cache_shape``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from cpu_attn import _check, _dispatch
from cpu_attn._arrays import numpy_view
from cpu_attn.ops import attention_with_kv_cache, reshape_and_cache
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata
from cpu_attn.storage import LANES, move_blocks

Array = np.ndarray[Any, Any]


def _blocks(name: str, kv_cache: Any) -> tuple[Array, Array]:
    """K and V with their blocks along axis 0, as views."""
    if isinstance(kv_cache, (tuple, list)):
        both = [numpy_view(name, x) for x in kv_cache]
    else:
        array = numpy_view(name, kv_cache)
        both = [array[0], array[1]] if array.ndim > 1 and array.shape[0] == 2 else []
    if len(both) != 2 or min(x.ndim for x in both) < 1:
        raise ValueError(f"{name}: expected [2, num_blocks, ...] or a pair (key_cache, value_cache)")
    return both[0], both[1]


def _writable(name: str, kv_cache: Any) -> tuple[Array, Array]:
    both = _blocks(name, kv_cache)
    if not all(half.flags.writeable for half in both):
        raise ValueError(f"{name}: is read-only")
    return both


class PagedAttention:
    """The older interface over this library's calls: for every head size, dtype and engine that those have.

    ``engine`` and ``isa`` are theirs; ``auto`` follows CPU_ATTN_ENGINE and CPU_ATTN_ISA, then takes the native kernels
    of the best isa. ``kv_cache_rotation`` is that of the caches. Arrays are what the calls
    take: NumPy, torch CPU tensors, DLPack.
    """

    engine: ClassVar[str] = "auto"
    isa: ClassVar[str] = "auto"
    kv_cache_rotation: ClassVar[str] = "none"

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Empty, which in vLLM means: every size."""
        return []

    @classmethod
    def validate_head_size(cls, head_size: int) -> tuple[bool, list[int]]:
        """Whether ``head_size`` can be served (an integer, 1 to 65536), and :meth:`get_supported_head_sizes`."""
        try:
            _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
        except (TypeError, ValueError):
            return False, cls.get_supported_head_sizes()
        return True, cls.get_supported_head_sizes()

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        *,
        layout: str = "flat",
    ) -> tuple[int, ...]:
        """What to allocate for a layer: layout "flat": ``(2, N, B * Hkv * width)``; "pair": ``(N, Hkv, B, width)`` for
        each of K and V.

        cache_dtype_str: "auto" is the model's dtype; for odd head sizes name it ("bfloat16"), as the width may depend
        on it. Raises ValueError where it does, for sizes out of range and for a flat block size that is not a multiple
        of 16.
        """
        if cache_dtype_str in _check.FLOATS:
            names = [cache_dtype_str]
        else:
            names = [x for x in _check.FLOATS if _dispatch.serves(cls.isa, x)] or list(_check.FLOATS)
        sizes = num_blocks, block_size, num_kv_heads, head_size
        try:
            shapes = {get_kv_cache_shape(*sizes, name, cls.isa, cache_dtype_str) for name in names}
        except ValueError as e:
            raise _check.renamed(e, {"kv_cache_dtype": "cache_dtype_str"}) from None
        if len(shapes) > 1:
            raise ValueError(
                f"cache_dtype_str: {cache_dtype_str!r} does not say the dtype, and with head_size {head_size} and "
                f"block_size {block_size} the shape depends on it; expected {', '.join(names)}"
            )
        (shape,) = shapes
        if layout == "pair":
            return shape
        if layout != "flat":
            raise ValueError(f"layout: {layout!r} is neither 'flat' nor 'pair'")
        if block_size % LANES:
            raise ValueError(f"block_size: {block_size} is no multiple of {LANES}: only layout 'pair' can hold it")
        return 2, num_blocks, block_size * num_kv_heads * shape[3]

    @classmethod
    def split_kv_cache(
        cls, kv_cache: Any, num_kv_heads: int, head_size: int, kv_cache_dtype: str = "auto"
    ) -> tuple[Array, Array]:
        """key_cache and value_cache ``[N, Hkv, B, width]`` of a layer's cache in either layout: NumPy views.

        Raises ValueError or TypeError for a shape that is none of them, and for sizes out of range.
        """
        num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
        key_cache, value_cache = _blocks("kv_cache", kv_cache)
        if key_cache.ndim == value_cache.ndim == 4:
            return key_cache, value_cache
        if isinstance(kv_cache, (tuple, list)) or key_cache.ndim != 2:
            raise ValueError(
                f"kv_cache: {key_cache.ndim} axes of K, expected (num_blocks, num_kv_heads, block_size, width) or "
                "one array [2, num_blocks, block_size * num_kv_heads * width]"
            )
        named = str(key_cache.dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
        try:
            width = cls.get_kv_cache_shape(1, LANES, 1, head_size, named, layout="pair")[3]
        except ValueError as e:
            raise _check.renamed(e, {"cache_dtype_str": "kv_cache_dtype"}) from None
        num_blocks, row = key_cache.shape
        token = num_kv_heads * width
        if row == 0 or row % (LANES * token):
            raise ValueError(
                f"kv_cache: axis 2 is {row}, expected block_size * {num_kv_heads} heads * {width} with block_size a "
                f"multiple of {LANES}; pass a pair for other block sizes"
            )
        shape = (num_blocks, num_kv_heads, row // token, width)  # to split an axis never copies
        return key_cache.reshape(shape), value_cache.reshape(shape)

    @classmethod
    def write_to_paged_cache(
        cls,
        key: Any,
        value: Any,
        key_cache: Any,
        value_cache: Any,
        slot_mapping: Any,
        kv_cache_dtype: str = "auto",
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> None:
        """Writes key [T, Hkv, D] and value [T, Hkv, Dv] to slot_mapping (int32 or int64, T in all; negative: skipped).

        Caches as :meth:`split_kv_cache` gives them, scales numbers or 0-d arrays. Errors are those of
        :func:`cpu_attn.reshape_and_cache`.
        """
        slots = _check.integers("slot_mapping", slot_mapping, np.int64, None).reshape(-1)
        reshape_and_cache(
            *(key, value, key_cache, value_cache, slots, cls.isa, k_scale, v_scale, kv_cache_dtype),
            kv_cache_rotation=cls.kv_cache_rotation,
        )

    @classmethod
    def forward_decode(
        cls,
        output: Any,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        context_lens: Any,
        max_context_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: Any,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        *,
        sliding_window: int | tuple[int, int] = -1,
        softcap: float = 0.0,
        s_aux: Any = None,
        scheduler_metadata: SchedulerMetadata | None = None,
    ) -> Any:
        """Attention of one query token for each request, into ``output``, which is returned.

        query [R, Hq, D], output [R, Hq, Dv], block_tables [R, M]. context_lens [R]: keys of each request, its new token
        counted, at most max_context_len. scheduler_metadata: the plan for just this, where the caller has one. The
        rest, and the errors, are those of :func:`cpu_attn.attention_with_kv_cache`.
        """
        axes = [("num_reqs", None), ("num_heads", None), ("head_size", None)]
        q = _check.array("query", query, _check.FLOATS, axes)
        num_reqs, num_heads, head_size = q.shape
        lens, starts = _check.integers("context_lens", context_lens), np.arange(num_reqs + 1, dtype=np.int32)
        max_context_len = _check.integer("max_context_len", max_context_len, 0)
        out = _check.array("output", output, [q.dtype], [*axes[:2], ("head_size_v", None)])
        if lens.size and lens.max() > max_context_len:
            raise ValueError(
                f"context_lens[{lens.argmax()}]: {lens.max()}, expected at most max_context_len = {max_context_len}"
            )
        table = _check.integers("block_tables", block_tables, ndim=None)
        try:
            if scheduler_metadata is None:
                scheduler_metadata = get_scheduler_metadata(
                    *(num_reqs, num_heads, num_kv_heads, head_size, lens, q.dtype, starts),
                    sliding_window=sliding_window,
                    isa=cls.isa,
                    kv_cache_dtype=kv_cache_dtype,
                    head_size_v=out.shape[2],
                    engine=cls.engine,
                    kv_cache_rotation=cls.kv_cache_rotation,
                )
            return attention_with_kv_cache(
                *(query, key_cache, value_cache, output, starts, lens, scale, True, alibi_slopes, sliding_window),
                *(table, softcap, scheduler_metadata, s_aux),
                k_scale=k_scale,
                v_scale=v_scale,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_rotation=cls.kv_cache_rotation,
            )
        except (TypeError, ValueError) as e:
            raise _check.renamed(e, {"seq_lens": "context_lens", "block_table": "block_tables"}) from None

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Any], src_to_dists: Any) -> None:
        """Copies whole blocks, K and V, within each layer's cache: all are read before any is written. Layers may
        share memory, the same blocks of it under the same numbers.

        src_to_dists: [n, 2], pairs (source, destination), or {source: [destinations]}. Raises ValueError or TypeError,
        before any layer is written, for what are no pairs or caches, a block out of range, a destination named twice
        and memory that is read-only.
        """
        kv_caches = _check.sequence("kv_caches", kv_caches)
        layers = [_writable(f"kv_caches[{i}]", kv_cache) for i, kv_cache in enumerate(kv_caches)]
        num_blocks = min((len(half) for layer in layers for half in layer), default=_check.INT32_MAX)
        sources, destinations = _check.moves("src_to_dists", src_to_dists, num_blocks, num_blocks)
        halves = [half for layer in layers for half in layer]
        chained = np.isin(sources, destinations)  # other sources are never written: of those, any order will do
        move_blocks(halves, halves, (sources[chained], destinations[chained]))
        for half in halves:
            half[destinations[~chained]] = half[sources[~chained]]

    @staticmethod
    def swap_blocks(src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copies whole blocks, K and V, from one cache of a layer to another of the same layout, dtype and block size.

        src_to_dst: [n, 2], pairs (source, destination), or {source: destination}. Raises ValueError or TypeError,
        before anything is written, for what are no pairs or caches, a block out of range, a destination named twice,
        memory that is read-only, or caches that differ in more than num_blocks.
        """
        sources, destinations = _blocks("src_kv_cache", src_kv_cache), _writable("dst_kv_cache", dst_kv_cache)
        for src, dst in zip(sources, destinations, strict=True):
            if (src.shape[1:], src.dtype) != (dst.shape[1:], dst.dtype):
                raise ValueError(
                    f"dst_kv_cache: blocks of {dst.dtype} {dst.shape[1:]}, those of src_kv_cache are {src.dtype} "
                    f"{src.shape[1:]}"
                )
        moves = _check.moves("src_to_dst", src_to_dst, min(map(len, sources)), min(map(len, destinations)))
        move_blocks(sources, destinations, moves)


class OneDNNPagedAttention(PagedAttention):
    """The same over the onednn engine; UnavailableError where oneDNN is not there."""

    engine: ClassVar[str] = "onednn"
