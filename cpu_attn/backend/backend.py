# SPDX-License-Identifier: Apache-2.0
"""This module says which classes belong together."""

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
    """Says which classes and caches belong together. It has every head size from 1 on, every group and any block size.

    An engine asks it once for the other classes. docs/backend.md has the guide.

    Raises:
        ValueError: a size is out of range, a name is unknown, or ``copy_blocks`` and ``swap_blocks`` are given blocks
            that are not there.
        TypeError: an argument has another type.

    Example:
        >>> from cpu_attn import CPUAttentionBackend
        >>> CPUAttentionBackend.get_kv_cache_shape(num_blocks=64, block_size=16, num_kv_heads=8, head_size=128)
        (2, 64, 16384)
        >>> CPUAttentionBackend.get_impl_cls().__name__
        'CPUAttentionBackendImpl'
    """

    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """Gives ``CPU_ATTN``."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_dtypes() -> list[np.dtype[Any]]:
        """Lists float16, bfloat16 (ml_dtypes) and float32, as NumPy dtypes."""
        return [DTYPES[name] for name in ("float16", "bfloat16", "float32")]

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Gives an empty list, which in vLLM means every size."""
        return PagedAttention.get_supported_head_sizes()

    @staticmethod
    def validate_head_size(head_size: int) -> None:
        """Raises ValueError or TypeError unless ``head_size`` is an integer from 1 to 65536."""
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
        """Says what to allocate for a layer: :meth:`PagedAttention.get_kv_cache_shape`."""
        return PagedAttention.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str, layout=layout
        )

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Gives the class of a layer."""
        return CPUAttentionBackendImpl

    @staticmethod
    def get_metadata_cls() -> type[CPUAttentionMetadata]:
        """Gives the class of a step's metadata."""
        return CPUAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Gives the class that makes a step's metadata."""
        return CPUAttentionMetadataBuilder

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Any], src_to_dists: Any) -> None:
        """Copies blocks within each layer's cache: :meth:`PagedAttention.copy_blocks`."""
        PagedAttention.copy_blocks(kv_caches, src_to_dists)

    @staticmethod
    def swap_blocks(src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copies blocks from one cache to another: :meth:`PagedAttention.swap_blocks`."""
        PagedAttention.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)
