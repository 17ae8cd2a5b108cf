# SPDX-License-Identifier: Apache-2.0
"""This module is vLLM's interface over the three calls: ``Backend`` says what there is and how large a page is,
``MetadataBuilder`` makes the ``Metadata`` of a step, ``Impl`` is the attention of one layer.

A page of vLLM's is [Hkv, B, C]. For each kv head it holds B tokens' keys, then their values, packed as
:func:`cpu_attn.reshape_and_cache` does it.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch

from cpu_attn import (
    SchedulerMetadata,
    _check,
    get_kv_cache_shape,
    get_scheduler_metadata,
    ops,
    reshape_and_cache,
    rotation,
)
from cpu_attn._arrays import numpy_view
from cpu_attn._dtypes import DTYPES, dtype_name, is_fp8, is_scaled, rotation_of
from cpu_attn.plan import Plans
from cpu_attn.storage import LANES, lined_up
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVQuantMode

Ints = np.ndarray[Any, np.dtype[np.int32]]
SCRATCH_BLOCK_SIZE = 128  # for an encoder's keys, which no cache holds
# These are vLLM's names of kv_cache_dtype, and ours.
KV_CACHE_DTYPES = {
    "auto": "auto",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}
QUANTISED = {
    KVQuantMode.FP8_PER_TENSOR: "fp8_e4m3",
    KVQuantMode.INT8_PER_TOKEN_HEAD: "int8",
    KVQuantMode.INT4_PER_TOKEN_HEAD: "int4",
}


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """Stands in the place of vLLM's own, whose name, layout (LBHNC), dtypes and kinds of attention it has."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in KV_CACHE_DTYPES

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(LANES)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # it means every size

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Sets how many bytes a token and kv head take: more than K and V for odd head sizes, fewer as int4."""
        if spec.kv_quant_mode == KVQuantMode.NONE:
            kv, dtype = "auto", spec.dtype
        else:  # the spec does not say which dtype keys have; it makes no difference
            kv, dtype = QUANTISED[spec.kv_quant_mode], torch.bfloat16
        width = _width(spec.head_size, dtype, kv) + _width(spec.head_size_v, dtype, kv)
        return replace(spec, state_content_bytes=width * spec.dtype.itemsize)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder


@functools.cache
def _width(head_size: int, dtype: torch.dtype, kv: str) -> int:
    """Gives how many elements of the cache's dtype a token of K or V takes."""
    return get_kv_cache_shape(1, LANES, 1, head_size, dtype, kv_cache_dtype=kv)[3]


@dataclass
class Metadata:
    """Describes a step to the layers that share a block table. The first layer that needs a plan makes it: layers of a
    group may differ in their windows. Its arrays are NumPy's, over vLLM's memory: a call takes 1 us less for each than
    for a tensor, and several times that behind a layer's weights, which leave nothing of it in the caches."""

    num_reqs: int
    query_start_loc: Ints
    seq_lens: Ints
    block_table: Ints
    slot_mapping: Ints
    causal: bool
    dynamic_causal: Ints | None
    mm_prefix_range: dict[int, list[tuple[int, int]]] | None
    plans: dict[Any, SchedulerMetadata] = field(default_factory=Plans)
    scratch: Scratch | None = None

    def plan(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, block_table: Any, **options: Any
    ) -> SchedulerMetadata:
        """Gives the plan of a shape: num_heads, num_kv_heads, head_size, sliding_window. options: those of
        get_scheduler_metadata."""
        key = (*shape, dtype, *options.items())
        if key not in self.plans:
            num_heads, num_kv_heads, head_size, sliding_window = shape
            self.plans[key] = get_scheduler_metadata(
                self.num_reqs,
                num_heads,
                num_kv_heads,
                head_size,
                self.seq_lens,
                dtype,
                self.query_start_loc,
                self.causal,
                sliding_window,
                dynamic_causal=self.dynamic_causal,
                mm_prefix_range=self.mm_prefix_range,
                block_table=block_table,
                **options,
            )
        return self.plans[key]


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and "Nixl" in str(transfer.kv_connector):
            raise NotImplementedError(
                f"kv_connector: {transfer.kv_connector} may pack blocks that it receives as vLLM's own CPU attention "
                "reads them; CPU_ATTN_VLLM=0 runs that one"
            )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Takes what :class:`Impl` needs of a CommonAttentionMetadata, without a copy."""
        common = common_attn_metadata
        if common.rswa_prefix_lens is not None:
            raise NotImplementedError("rswa_prefix_lens: there is no reference sliding window attention here")
        dynamic = isinstance(common.causal, torch.Tensor)
        ranges = common.mm_req_doc_ranges or {}
        return Metadata(
            common.num_reqs,
            common.query_start_loc.numpy(),
            common.seq_lens.numpy(),
            common.block_table_tensor.numpy(),
            common.slot_mapping.numpy(),
            causal=not dynamic and common.causal,
            dynamic_causal=common.causal.to(torch.int32).numpy() if dynamic else None,
            mm_prefix_range={r: sorted(found) for r, found in ranges.items()} or None,
        )


@dataclass
class Pages:
    """Holds keys and values as the calls take them."""

    key_cache: np.ndarray[Any, Any]
    value_cache: np.ndarray[Any, Any]
    kv_cache_dtype: str
    kv_cache_rotation: str


@dataclass
class Scratch(Pages):
    """Holds pages of a step for keys that no cache holds; layers write into the same ones, one after the other."""

    block_table: Ints
    slot_mapping: Ints

    @classmethod
    def of(cls, seq_lens: Ints, key: torch.Tensor, value: torch.Tensor) -> Scratch:
        num_blocks, table, slots = lined_up(seq_lens, SCRATCH_BLOCK_SIZE)
        size = (num_blocks, SCRATCH_BLOCK_SIZE, key.shape[1])
        shapes = (get_kv_cache_shape(*size, x.shape[2], x.dtype) for x in (key, value))
        key_cache, value_cache = (np.empty(shape, DTYPES[dtype_name(key.dtype)]) for shape in shapes)
        return cls(key_cache, value_cache, "auto", "none", table, slots)


class Impl(AttentionImpl[Metadata]):  # type: ignore[misc]
    """Computes the attention of one layer. Arguments are as vLLM has them; sinks [Hq] are read in every call, since
    weights are loaded later."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        _check.choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_cache_rotation = os.environ.get("CPU_ATTN_KV_CACHE_ROTATION") or rotation_of(
            [KV_CACHE_DTYPES[kv_cache_dtype]]
        )
        slopes = None if alibi_slopes is None else np.array(alibi_slopes, np.float32)
        self.k_feedback: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self._logits = ops.Logits(self.scale, logits_soft_cap or 0.0, slopes)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.shape = (self.num_heads, self.num_kv_heads, head_size, self.sliding_window)
        self._is_encoder = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self._split: tuple[Any, ...] = ()
        self._parts: Pages

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes key [T, Hkv, D] and value [T, Hkv, Dv] into kv_cache [N, Hkv, B, C] at slot_mapping int64 [T];
        rows past it are padding, and so are slots < 0."""
        if self._is_encoder:
            return
        tokens = len(slot_mapping)
        pages = self._pages(kv_cache, key.dtype, value.shape[2])
        reshape_and_cache(
            key[:tokens],
            value[:tokens],
            pages.key_cache,
            pages.value_cache,
            slot_mapping,
            "auto",
            *self._scales(layer, pages),
            pages.kv_cache_dtype,
            kv_cache_rotation=pages.kv_cache_rotation,
            k_feedback=self.k_feedback,
        )

    @property
    def rounds_rotated_keys(self) -> bool:
        """Says whether keys are rotated integers."""
        rotated = bool(_check.kv_cache_rotation(self.kv_cache_rotation) & 1)
        return rotated and is_scaled(KV_CACHE_DTYPES[self.kv_cache_dtype])

    def feed_back(self, weights: np.ndarray[Any, Any]) -> None:
        """Has writes feed errors of rounding back where keys are rotated integers. ``weights`` [Hkv, D] are those of
        :func:`cpu_attn.rotation.error_feedback`."""
        if self.rounds_rotated_keys:
            self.k_feedback = rotation.error_feedback(weights, self.kv_cache_rotation)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of query [T, Hq, D] into output [T, Hq, Dv], which is returned; rows past the plan's are
        padding.

        key and value are an encoder's; others' are in kv_cache already. Where attn_metadata is None, a warm-up, output
        is zeros. It raises NotImplementedError for output scales.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale, output_block_scale: the output is not quantised here")
        if attn_metadata is None:
            return output.zero_()
        head_size_v = output.shape[2]
        if self._is_encoder:
            scratch = self._encoded(attn_metadata, key, value)
            pages, block_table = cast(Pages, scratch), scratch.block_table
        else:
            pages, block_table = self._pages(kv_cache, query.dtype, head_size_v), attn_metadata.block_table
        plan = attn_metadata.plan(
            self.shape,
            query.dtype,
            block_table,
            block_size=pages.key_cache.shape[2],
            head_size_v=head_size_v,
            kv_cache_dtype=pages.kv_cache_dtype,
            kv_cache_rotation=pages.kv_cache_rotation,
            mm_prefix_clamp_sliding_window=bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)),
        )
        sinks = None if self.sinks is None else self.sinks.detach()
        tokens, logits = plan.num_tokens, self._logits if sinks is None else replace(self._logits, s_aux=sinks)
        scales = _check.scales(*self._scales(layer, pages), plan.kv_dtypes)
        caches = pages.key_cache, pages.value_cache
        ops.attend(plan, query[:tokens], *caches, output[:tokens], block_table, logits, scales)
        return output

    def _scales(self, layer: Any, pages: Pages) -> tuple[float, float]:
        """Gives the scales of an fp8 cache, and 1 for any other: a checkpoint may have scales that its cache does not
        use."""
        return (layer._k_scale_float, layer._v_scale_float) if is_fp8(pages.kv_cache_dtype) else (1.0, 1.0)

    def _pages(self, kv_cache: torch.Tensor, dtype: torch.dtype, head_size_v: int) -> Pages:
        """Splits kv_cache [N, Hkv, B, C] in two, once for as long as the layer has the same one in the same place; a
        block of a head is dense."""
        split = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype, dtype, head_size_v)
        if split != self._split:
            self._parts, self._split = self._cut(kv_cache, dtype, head_size_v), split
        return self._parts

    def _cut(self, kv_cache: torch.Tensor, dtype: torch.dtype, head_size_v: int) -> Pages:
        kv = KV_CACHE_DTYPES[self.kv_cache_dtype]
        (blocks, heads, size, width), strides = kv_cache.shape, kv_cache.stride()
        k_width, v_width = (_width(d, dtype, kv) for d in (self.head_size, head_size_v))
        if size % LANES or k_width + v_width > width or strides[2:] != (width, 1):
            raise ValueError(
                f"kv_cache: blocks of {size} tokens times {width} elements, strides {strides}; head sizes "
                f"{self.head_size} and {head_size_v} need dense blocks of a multiple of {LANES} tokens times "
                f"{k_width + v_width}"
            )
        if is_scaled(kv):
            kv_cache = kv_cache.view(torch.uint8)
        first = kv_cache.storage_offset()
        key_cache = kv_cache.as_strided((blocks, heads, size, k_width), (*strides[:2], k_width, 1), first)
        first += size * k_width
        value_cache = kv_cache.as_strided((blocks, heads, size, v_width), (*strides[:2], v_width, 1), first)
        views = numpy_view("key_cache", key_cache), numpy_view("value_cache", value_cache)
        return Pages(*views, kv, self.kv_cache_rotation)

    def _encoded(self, metadata: Metadata, key: torch.Tensor, value: torch.Tensor) -> Scratch:
        if metadata.scratch is None:
            metadata.scratch = Scratch.of(metadata.seq_lens, key, value)
        scratch = metadata.scratch
        tokens = len(scratch.slot_mapping)
        reshape_and_cache(key[:tokens], value[:tokens], scratch.key_cache, scratch.value_cache, scratch.slot_mapping)
        return scratch
