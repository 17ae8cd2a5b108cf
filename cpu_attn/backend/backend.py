# SPDX-License-Identifier: Apache-2.0
"""Which classes belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from cpu_attn import _check
from cpu_attn._dtypes import DTYPES
from cpu_attn.backend.attention_metadata import CPUAttentionMetadata
from cpu_attn.backend.builder import CPUAttentionMetadataBuilder
from cpu_attn.backend.layer import CPUAttentionBackendImpl
from cpu_attn.backend.paged_attention import PagedAttention


class CPUAttentionBackend:
    """Which classes and caches belong together. Every head size from 1 on, every group, any block size."""

    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """CPU_ATTN."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_dtypes() -> list[np.dtype[Any]]:
        """float16, bfloat16 (ml_dtypes) and float32, as NumPy dtypes."""
        return [DTYPES[name] for name in ("float16", "bfloat16", "float32")]

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Empty, which in vLLM means: every size."""
        return PagedAttention.get_supported_head_sizes()

    @staticmethod
    def validate_head_size(head_size: int) -> None:
        """ValueError or TypeError unless head_size is an integer from 1 to 65536."""
        _check.integer("head_size", head_size, 1, _check.MAX_SIZE)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        *,
        layout: str = "flat",
    ) -> tuple[int, ...]:
        """``(2, N, B * Hkv * width)``, or for layout="pair" ``(N, Hkv, B, width)`` for each of K and V; see
        :meth:`PagedAttention.get_kv_cache_shape`."""
        return PagedAttention.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str, layout=layout
        )

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Of a layer."""
        return CPUAttentionBackendImpl

    @staticmethod
    def get_metadata_cls() -> type[CPUAttentionMetadata]:
        """Of a step."""
        return CPUAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Of what makes a step's metadata."""
        return CPUAttentionMetadataBuilder

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Any], src_to_dists: Any) -> None:
        """See :meth:`PagedAttention.copy_blocks`."""
        PagedAttention.copy_blocks(kv_caches, src_to_dists)

    @staticmethod
    def swap_blocks(src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """See :meth:`PagedAttention.swap_blocks`."""
        PagedAttention.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)
