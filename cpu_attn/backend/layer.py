# SPDX-License-Identifier: Apache-2.0
"""This module computes the attention of one layer.

A step's tokens stand prefills first, then decodes. Both go through one ``attention_with_kv_cache``; chunked prefill and
prefix caching are nothing but lengths and block tables there. Keys and values that no cache of the engine holds
(encoders, profiling) pass through pages that a layer makes for the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import numpy_view
from cpu_attn._dtypes import dtype_name, is_fp8
from cpu_attn.backend.attention_metadata import AttentionType, CPUAttentionMetadata, Part, attention_type
from cpu_attn.backend.paged_attention import Array, PagedAttention
from cpu_attn.ops import reshape_and_cache, run_attention
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape
from cpu_attn.storage import lined_up

SCRATCH_BLOCK_SIZE = 64


class CPUAttentionBackendImpl:
    """Computes the attention of one layer.

    The class attribute ``paged_attn_impl`` says which engine computes: :class:`PagedAttention` or
    :class:`OneDNNPagedAttention`.

    Args:
        num_heads: Hq.
        head_size: D.
        scale: the factor of q.k.
        num_kv_heads: Hkv, which divides ``num_heads``; ``num_heads`` unless said.
        alibi_slopes: [Hq], or None.
        sliding_window: w: the last w keys, the query's own among them, and w - 1 ahead where not causal; None: off.
        kv_cache_dtype: what the cache holds.
        logits_soft_cap: None and 0 are off.
        attn_type: ``decoder``: causal unless the metadata says otherwise. ``encoder`` and ``encoder_only``:
            bidirectional, without a cache. ``encoder_decoder``: cross attention, bidirectional; for windows and slopes
            the last query stands at the last key.
        kv_sharing_target_layer_name: a layer whose cache this one reads and does not write.
        sinks: [Hq], or None.

    Raises:
        ValueError: an argument is out of range or a name is unknown.
        TypeError: an argument has another type or dtype.

    Maths: docs/contract.md.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
        >>> impl = CPUAttentionBackendImpl(8, 64, 64**-0.5, num_kv_heads=2, attn_type="encoder_only")
        >>> step = CPUAttentionMetadata(num_prefills=1, num_prefill_tokens=3, num_decode_tokens=0, seq_lens=[3])
        >>> query, (key, value) = np.ones((3, 8, 64), np.float32), np.ones((2, 3, 2, 64), np.float32)
        >>> impl.forward(None, query, key, value, None, step).shape
        (3, 512)
    """

    paged_attn_impl: type[PagedAttention] = PagedAttention

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
    ) -> None:
        self.head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
        self.num_heads = _check.integer("num_heads", num_heads, 1, _check.MAX_SIZE)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = _check.integer("num_kv_heads", kv_heads, 1, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {num_kv_heads} does not divide num_heads = {num_heads}")
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.scale = _check.number("scale", scale)
        soft_cap = 0.0 if logits_soft_cap is None else logits_soft_cap
        self.logits_soft_cap = _check.softcap("logits_soft_cap", soft_cap)
        self.sliding_window = _check.window(-1 if sliding_window is None else sliding_window)
        self.alibi_slopes = self._per_head("alibi_slopes", alibi_slopes, ["float32"])
        self.sinks = self._per_head("sinks", sinks, _check.FLOATS)
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attention_type(attn_type)
        self._cached = self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if kv_sharing_target_layer_name is not None and not self._cached:
            raise ValueError(f"kv_sharing_target_layer_name: {self.attn_type.value} attention has no cache to share")

    def _per_head(self, name: str, x: Any, dtypes: Sequence[str]) -> Array | None:
        if isinstance(x, (list, tuple)):
            x = _check.listed(name, x, np.float32)
        return _check.small_floats(name, x, dtypes, self.num_heads)

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: CPUAttentionMetadata | None,
        output: Any = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Writes this step's keys and values into the cache and attends.

        Args:
            layer: an object with ``_k_scale`` and ``_v_scale``, numbers or 0-d arrays; 1 where it has none. Only fp8
                caches have scales.
            query: [T, Hq, D] or [T, Hq * D]; rows past T are padding.
            key: [T, Hkv, D] or [T, Hkv * D]; in cross attention the keys of the new requests' encoder tokens; None,
                with ``value``, where the cache has them already.
            value: [T, Hkv, Dv] or [T, Hkv * Dv].
            kv_cache: in a layout of :meth:`PagedAttention.get_kv_cache_shape`. Empty or None means a profiling run:
                nothing is written, and the keys are those given. Encoders do not look at it.
            attn_metadata: of the step; None means a warm-up, whose output is zeros.
            output: [T, Hq, Dv] or [T, Hq * Dv] to write to, or None.
            output_scale: None.
            output_block_scale: None.

        Returns:
            ``output``, or a new [T, Hq * Dv], 0 in padding: a tensor for torch queries, else a NumPy array. Where
            ``value`` is None, too, Dv is D.

        Raises:
            ValueError: an argument does not fit. The cache has not been written then.
            TypeError: an argument is no array, or has another dtype. The cache has not been written then.
            NotImplementedError: an output scale is given, or the metadata holds a dense bias.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale, output_block_scale: the output is not quantised here; pass None")
        q = self._rows("query", query, self.num_heads, self.head_size)
        dtype = dtype_name(q.dtype, "query")
        if (key is None) != (value is None):
            raise ValueError("key, value: one of them is None")
        k = None if key is None else self._rows("key", key, self.num_kv_heads, self.head_size)
        v = None if value is None else self._rows("value", value, self.num_kv_heads, None)
        if output is None:
            output = _zeros_like(query, q.dtype, len(q), self.num_heads * (self.head_size if v is None else v.shape[2]))
        out = self._rows("output", output, self.num_heads, None if v is None else v.shape[2])
        if attn_metadata is None:
            axes = [("T", None), ("num_heads", self.num_heads), ("head_size", None)]
            _check.array("query", q, [dtype], axes)
            _check.writable("output", _check.array("output", out, [dtype], axes))
            out[...] = 0
            return output
        _check.instance("attn_metadata", attn_metadata, CPUAttentionMetadata)
        if attn_metadata.get_attn_bias(self.attn_type) is not None:
            raise NotImplementedError("attn_bias: a layer takes alibi_slopes and sliding_window, no dense bias")
        caches = None
        if self._cached and not _is_empty(kv_cache):
            caches = self.paged_attn_impl.split_kv_cache(
                kv_cache, self.num_kv_heads, self.head_size, self.kv_cache_dtype
            )
        parts = self._parts(attn_metadata, caches is not None)
        self._validate(parts, q, k, v, out, caches)
        scales = (1.0, 1.0) if caches is None else self._scales(layer, dtype)
        calls = [self._call(attn_metadata, part, dtype, q, k, v, out, caches, scales) for part in parts]
        write: tuple[Any, ...] = ()
        if caches is not None and k is not None and v is not None and self.kv_sharing_target_layer_name is None:
            slots = self._slots(attn_metadata, len(k))
            write = (k[: len(slots)], v[: len(slots)], *caches, slots, self.kv_cache_dtype, *scales)
        for call in calls:  # errors come before the cache is written
            call(only_check=True)
        if write:
            self.paged_attn_impl.write_to_paged_cache(*write)
        for call in calls:
            call()
        return output

    def _rows(self, name: str, x: Any, num_heads: int, head_size: int | None) -> Array:
        """Gives [T, num_heads, head_size] of such an array or of [T, num_heads * head_size], in the same memory."""
        a = numpy_view(name, x, _check.FLOATS)
        if a.ndim == 2 and a.shape[1] % num_heads == 0:
            a = a.reshape(len(a), num_heads, a.shape[1] // num_heads)  # to split an axis never copies
        if a.ndim != 3 or a.shape[1] != num_heads or head_size not in (None, a.shape[2]):
            size = "head_size_v" if head_size is None else head_size
            raise ValueError(f"{name}: shape {a.shape}, expected [T, {num_heads}, {size}] or [T, {num_heads} * {size}]")
        return a

    @property
    def _is_cross(self) -> bool:
        return self.attn_type is AttentionType.ENCODER_DECODER

    def _scales(self, layer: Any, dtype: str) -> tuple[float, float]:
        """Gives the scales of an fp8 cache, and 1 for any other: a checkpoint may have scales that its cache does not
        use."""
        kvs = _check.kv_dtypes(self.kv_cache_dtype, dtype)
        k_scale, v_scale = (
            _scale(layer, name) if is_fp8(kv) else 1.0 for name, kv in zip(("_k_scale", "_v_scale"), kvs, strict=True)
        )
        return _check.scales(k_scale, v_scale, kvs)

    def _parts(self, metadata: CPUAttentionMetadata, has_cache: bool) -> list[Part]:
        if self.attn_type is AttentionType.ENCODER:
            return [metadata._encoder_part()]
        parts = [metadata._cross_part()] if self._is_cross else metadata._decoder_parts()
        if has_cache:
            return parts
        return [Part(part.first, part.query_start_loc, part.seq_lens, None) for part in parts]

    def _plan(
        self, metadata: CPUAttentionMetadata, part: Part, block_size: int | None, dtype: str, head_size_v: int
    ) -> SchedulerMetadata:
        return metadata._plan(
            part,
            self.attn_type,
            block_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            causal=self._causal(metadata),
            sliding_window=self.sliding_window,
            isa=self.paged_attn_impl.isa,
            kv_cache_dtype="auto" if block_size is None else self.kv_cache_dtype,
            kv_cache_rotation="none" if block_size is None else self.paged_attn_impl.kv_cache_rotation,
            head_size_v=head_size_v,
            engine=self.paged_attn_impl.engine,
        )

    def _causal(self, metadata: CPUAttentionMetadata) -> bool:
        return self.attn_type is AttentionType.DECODER and _check.boolean("causal", metadata.causal)

    def _validate(
        self,
        parts: Sequence[Part],
        query: Array,
        key: Array | None,
        value: Array | None,
        output: Array,
        caches: tuple[Array, Array] | None,
    ) -> None:
        """Checks what no call can check, since each of them sees the rows of one part only."""
        tokens = max((part.rows.stop for part in parts), default=0)
        for name, rows in (("query", query), ("output", output)):
            if len(rows) < tokens:
                raise ValueError(f"{name}: {len(rows)} tokens, attn_metadata says {tokens}")
        if key is not None and value is not None and len(key) != len(value):
            raise ValueError(f"value: {len(value)} tokens, key has {len(key)}")
        if key is not None and key.dtype != query.dtype:
            raise TypeError(f"key: dtype {key.dtype}, query has {query.dtype}")
        _check.apart_from("output", output, {"query": query, "key": key, "value": value})
        if caches is not None:
            _check.apart_from("output", output, {"key_cache": caches[0], "value_cache": caches[1]})
        for part in parts if len(parts) > 1 else ():
            step = {"query_start_loc": part.query_start_loc, "seq_lens": part.seq_lens, "block_table": part.block_table}
            _check.apart_from("output", output, step)

    def _call(
        self,
        metadata: CPUAttentionMetadata,
        part: Part,
        dtype: str,
        query: Array,
        key: Array | None,
        value: Array | None,
        output: Array,
        caches: tuple[Array, Array] | None,
        scales: tuple[float, float],
    ) -> partial[None]:
        """Prepares the attention of some of the requests."""
        if caches is None or part.block_table is None:
            self._check_given(part, key, caches is not None)
            pages, scales, block_size = self._scratch(part, key, value), (1.0, 1.0), None
        else:
            pages, block_size = (*caches, part.block_table), caches[0].shape[2]
        plan = self._plan(metadata, part, block_size, dtype, output.shape[2])
        key_cache, value_cache, block_table = pages
        arrays = _check.attention_arrays(
            output=output[part.rows],
            query=query[part.rows],
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            query_start_loc=part.query_start_loc,
            seq_lens=part.seq_lens,
            alibi_slopes=self.alibi_slopes,
            s_aux=self.sinks,
        )
        return partial(run_attention, plan, arrays, self.scale, self.logits_soft_cap, scales, self._causal(metadata))

    def _check_given(self, part: Part, key: Array | None, has_cache: bool) -> None:
        """Checks that the keys that forward was given are all the keys of requests that have no blocks."""
        if has_cache and (self._is_cross or self.kv_sharing_target_layer_name is not None):
            name = "cross_block_tables" if self._is_cross else "block_tables"
            raise ValueError(f"{name}: needed, this layer's keys are in the cache")
        if key is None:
            raise ValueError("key: is None, and no cache holds the keys")
        if not self._is_cross and (differ := np.flatnonzero(np.diff(part.query_start_loc) != part.seq_lens)).size:
            r = int(differ[0])
            queries = part.query_start_loc[r + 1] - part.query_start_loc[r]
            raise ValueError(
                f"seq_lens: request {r} has {part.seq_lens[r]} keys and {queries} query tokens; where no cache holds "
                "keys they must be the same"
            )
        needed = part.first + int(part.seq_lens.sum(dtype=np.int64))
        if len(key) < needed:
            raise ValueError(f"key: {len(key)} tokens, attn_metadata says {needed}")

    def _slots(self, metadata: CPUAttentionMetadata, num_keys: int) -> Array:
        """Gives the slots of the given keys. In cross attention every key has one; a decoder's keys may be followed by
        padding."""
        if self._is_cross:
            slots = _check.integers("cross_slot_mapping", metadata.cross_slot_mapping, np.int64, None).reshape(-1)
            if len(slots) != num_keys:
                raise ValueError(f"cross_slot_mapping: {len(slots)} slots, key has {num_keys} tokens")
            return slots
        slots = _check.integers("slot_mapping", metadata.slot_mapping, np.int64, None).reshape(-1)
        tokens = metadata._num_tokens
        if min(len(slots), num_keys) < tokens:
            raise ValueError(f"slot_mapping: {len(slots)} slots and {num_keys} keys for {tokens} tokens")
        return slots[:tokens]

    def _scratch(self, part: Part, key: Any, value: Any) -> tuple[Array, Array, Array]:
        """Writes the keys of some requests one after the other into new pages, and gives these and their block
        table."""
        isa = self.paged_attn_impl.isa
        num_blocks, table, slots = lined_up(part.seq_lens, SCRATCH_BLOCK_SIZE)
        size = (num_blocks, SCRATCH_BLOCK_SIZE, self.num_kv_heads)
        shapes = (get_kv_cache_shape(*size, x.shape[2], x.dtype, isa) for x in (key, value))
        key_cache, value_cache = (np.empty(shape, key.dtype) for shape in shapes)
        rows = slice(part.first, part.first + len(slots))
        reshape_and_cache(key[rows], value[rows], key_cache, value_cache, slots, isa)
        return key_cache, value_cache, table


def _is_empty(kv_cache: Any) -> bool:
    if kv_cache is None:
        return True
    halves = kv_cache if isinstance(kv_cache, (tuple, list)) else [kv_cache]
    return all(numpy_view("kv_cache", half).size == 0 for half in halves)


def _scale(layer: Any, name: str) -> float:
    x = getattr(layer, name, 1.0)
    if hasattr(x, "__dlpack__") and not hasattr(x, "__float__"):
        x = numpy_view(name, x)
    return _check.number(name, x)


def _zeros_like(query: Any, dtype: Any, rows: int, columns: int) -> Any:
    """Gives zeros of query's dtype: a tensor where query is one, made by itself, else a NumPy array."""
    if hasattr(query, "new_zeros"):
        return query.new_zeros((rows, columns))
    return np.zeros((rows, columns), dtype)
