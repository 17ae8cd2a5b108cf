# SPDX-License-Identifier: Apache-2.0
"""This module has paged attention under the names of vLLM's older CPU backend: shapes of caches, writing, decoding,
whole blocks.

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
    """Gives K and V as views whose axis 0 counts blocks."""
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
    """Computes paged attention under the names of vLLM's older CPU backend, for every head size and dtype.

    The class attributes ``engine`` and ``isa`` say what computes: ``auto`` follows CPU_ATTN_ENGINE and CPU_ATTN_ISA,
    then takes the native kernels of the best isa. ``kv_cache_rotation`` is that of the caches. Arrays are NumPy arrays,
    torch CPU tensors or anything with DLPack.

    Raises:
        ValueError: methods raise it for what is out of range, before anything is written.
        TypeError: methods raise it for arguments of another type or dtype, before anything is written.
        UnavailableError: this machine does not have the isa or the engine.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import PagedAttention
        >>> kv_cache = np.zeros(PagedAttention.get_kv_cache_shape(4, 16, 2, 64), np.float32)
        >>> key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, 2, 64)  # [N, Hkv, B, width], views
        >>> key = value = np.ones((1, 2, 64), np.float32)
        >>> PagedAttention.write_to_paged_cache(key, value, key_cache, value_cache, np.array([16]))
        >>> query, table, lens = np.ones((1, 8, 64), np.float32), np.array([[1]], np.int32), np.array([1], np.int32)
        >>> output = PagedAttention.forward_decode(
        ...     np.empty_like(query), query, key_cache, value_cache, table, lens, 1, "auto", 2, 64**-0.5, None)
        >>> bool((output == 1).all())
        True
    """

    engine: ClassVar[str] = "auto"
    isa: ClassVar[str] = "auto"
    kv_cache_rotation: ClassVar[str] = "none"

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Gives an empty list, which in vLLM means every size."""
        return []

    @classmethod
    def validate_head_size(cls, head_size: int) -> tuple[bool, list[int]]:
        """Says whether ``head_size`` is an integer from 1 to 65536, and gives :meth:`get_supported_head_sizes`."""
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
        """Says what to allocate for a layer.

        Args:
            num_blocks: N.
            block_size: B; in layout ``flat`` a multiple of 16.
            num_kv_heads: Hkv.
            head_size: D.
            cache_dtype_str: what the cache holds. ``auto`` is the model's dtype; for odd head sizes name that dtype
                (``bfloat16``), as the width may depend on it.
            layout: ``flat`` or ``pair``.

        Returns:
            ``(2, N, B * Hkv * width)`` for layout ``flat``; ``(N, Hkv, B, width)`` for each of K and V for layout
            ``pair``.

        Raises:
            ValueError: a size is out of range, a name is unknown, or the width depends on a dtype that is not named.
            TypeError: an argument has another type.
        """
        _check.choice("layout", layout, ("flat", "pair"))
        if isinstance(cache_dtype_str, str) and cache_dtype_str in _check.FLOATS:
            names = [cache_dtype_str]
        else:
            names = [x for x in _check.FLOATS if _dispatch.serves(cls.isa, x)] or list(_check.FLOATS)
        sizes = num_blocks, block_size, num_kv_heads, head_size
        try:
            shapes = {get_kv_cache_shape(*sizes, name, cls.isa, cache_dtype_str) for name in names}
        except (ValueError, TypeError) as e:
            raise _check.renamed(e, {"kv_cache_dtype": "cache_dtype_str"}) from None
        if len(shapes) > 1:
            raise ValueError(
                f"cache_dtype_str: {cache_dtype_str!r} does not say the dtype, and with head_size {head_size} and "
                f"block_size {block_size} the shape depends on it; expected {', '.join(names)}"
            )
        (shape,) = shapes
        if layout == "pair":
            return shape
        if block_size % LANES:
            raise ValueError(f"block_size: {block_size} is no multiple of {LANES}: only layout 'pair' can hold it")
        return 2, num_blocks, block_size * num_kv_heads * shape[3]

    @classmethod
    def split_kv_cache(
        cls, kv_cache: Any, num_kv_heads: int, head_size: int, kv_cache_dtype: str = "auto"
    ) -> tuple[Array, Array]:
        """Splits a layer's cache into its keys and its values, without a copy.

        Args:
            kv_cache: in either layout.
            num_kv_heads: Hkv.
            head_size: D.
            kv_cache_dtype: what the cache holds.

        Returns:
            (key_cache, value_cache), each [N, Hkv, B, width].

        Raises:
            ValueError: the shape is that of neither layout, or a size is out of range.
            TypeError: an argument is no array, or has another dtype.
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
        named = str(key_cache.dtype) if isinstance(kv_cache_dtype, str) and kv_cache_dtype == "auto" else kv_cache_dtype
        try:
            width = cls.get_kv_cache_shape(1, LANES, 1, head_size, named, layout="pair")[3]
        except (ValueError, TypeError) as e:
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
        """Writes keys and values into their slots: :func:`reshape_and_cache`, with its errors.

        Args:
            key: [T, Hkv, D].
            value: [T, Hkv, Dv].
            key_cache: of :meth:`split_kv_cache`.
            value_cache: of :meth:`split_kv_cache`.
            slot_mapping: int32 or int64, T in all; a token with a negative slot is skipped.
            kv_cache_dtype: what the cache holds.
            k_scale: a number or a 0-d array, of fp8 caches.
            v_scale: a number or a 0-d array, of fp8 caches.
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
        """Computes attention of one query token for each request, into ``output``, which is returned.

        Args:
            output: [R, Hq, Dv], written.
            query: [R, Hq, D].
            key_cache: of :meth:`split_kv_cache`.
            value_cache: of :meth:`split_kv_cache`.
            block_tables: [R, M].
            context_lens: [R], keys of each request, its new token among them.
            max_context_len: no context is longer.
            kv_cache_dtype: what the cache holds.
            num_kv_heads: Hkv.
            scale: the factor of q.k.
            alibi_slopes: [Hq], or None.
            k_scale: a number or a 0-d array, of fp8 caches.
            v_scale: a number or a 0-d array, of fp8 caches.
            sliding_window: as in :func:`get_scheduler_metadata`.
            softcap: 0 is off.
            s_aux: [Hq], or None.
            scheduler_metadata: the plan for just this, where the caller has one.

        Returns:
            ``output``.

        Raises:
            ValueError: an argument is out of range; otherwise as :func:`attention_with_kv_cache`.
            TypeError: an argument is no array, or has another dtype.
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
        """Copies whole blocks, K and V, within each layer's cache. All blocks are read before any is written.

        Args:
            kv_caches: one cache for each layer. Layers may share memory, the same blocks of it under the same numbers.
            src_to_dists: [n, 2], pairs (source, destination), or {source: [destinations]}.

        Raises:
            ValueError: a block is out of range, a destination is named twice, or memory is read-only. No layer has been
                written then.
            TypeError: an argument holds something else than caches or pairs. No layer has been written then.
        """
        kv_caches = _check.sequence("kv_caches", kv_caches)
        layers = [_writable(f"kv_caches[{i}]", kv_cache) for i, kv_cache in enumerate(kv_caches)]
        num_blocks = min((len(half) for layer in layers for half in layer), default=_check.INT32_MAX)
        sources, destinations = _check.moves("src_to_dists", src_to_dists, num_blocks, num_blocks)
        halves = [half for layer in layers for half in layer]
        chained = np.isin(sources, destinations)  # no move writes the other sources, so their order is free
        move_blocks(halves, halves, (sources[chained], destinations[chained]))
        for half in halves:
            half[destinations[~chained]] = half[sources[~chained]]

    @staticmethod
    def swap_blocks(src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copies whole blocks, K and V, from one cache of a layer to another of the same layout, dtype and block size.

        Args:
            src_kv_cache: the cache to read.
            dst_kv_cache: the cache to write.
            src_to_dst: [n, 2], pairs (source, destination), or {source: destination}.

        Raises:
            ValueError: a block is out of range, a destination is named twice, memory is read-only, or the caches differ
                in more than their number of blocks. Nothing has been written then.
            TypeError: an argument holds something else than caches or pairs. Nothing has been written then.
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
    """Computes what :class:`PagedAttention` does with the ``onednn`` engine.

    Raises:
        UnavailableError: oneDNN is not here.

    Example:
        >>> from cpu_attn import OneDNNPagedAttention
        >>> OneDNNPagedAttention.engine
        'onednn'
    """

    engine: ClassVar[str] = "onednn"
