# SPDX-License-Identifier: Apache-2.0
"""This module attends with prefills and decodes in one call: FlashInfer's ``pod`` (arXiv:2410.18038). On a CPU the two
run one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from cpu_attn.flashinfer.masks import custom_bias
from cpu_attn.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from cpu_attn.torch.entry import RefusedError

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

_PREFILL = {"q": "q_p", "k": "k_p", "v": "v_p", "custom_mask": "custom_mask_p"}


class PODWithPagedKVCacheWrapper:
    """Attends with the prefill of one sequence, whose keys lie by themselves, and with decodes over pages.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages, ``NHD`` or ``HND``.
        use_cuda_graph: whether plans keep the number of sequences, in the three buffers.
        paged_kv_indptr_buffer: needed with ``use_cuda_graph``; so are the other two.
        jit_args: None.

    Raises:
        ValueError: ``kv_layout`` is unknown, or a buffer is missing.
        NotImplementedError: ``jit_args`` is given.
    """

    @interface()
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        jit_args: Any = None,
    ) -> None:
        """Makes a wrapper for this layout."""
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, *buffers
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans have fixed buffers."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Does nothing: no workspace is needed."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    @interface()
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans the decodes, as ``BatchDecodeWithPagedKVCacheWrapper.plan`` does."""
        self._decode.plan(
            *(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
            *(pos_encoding_mode, window_left, None, q_data_type, kv_data_type, None, data_type),
            *(sm_scale, rope_scale, rope_theta),
        )

    begin_forward = plan

    @interface(**_PREFILL, paged_kv_cache="paged_kv_cache_d")
    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Tensor, Tensor]:
        """Computes both of one layer.

        Arguments that end in ``_p`` are those of ``single_prefill_with_kv_cache``; ``q_d`` [B, Hq, D] and
        ``paged_kv_cache_d`` those of ``BatchDecodeWithPagedKVCacheWrapper.run``, as are ``q_scale``, ``k_scale`` and
        ``v_scale``. Masks of the decodes are refused: NotImplementedError. It gives (out of the prefill, out of the
        decodes).
        """
        for name, x in (("custom_mask_d", custom_mask_d), ("packed_custom_mask_d", packed_custom_mask_d)):
            if x is not None:
                raise RefusedError(f"{name}: expected None; decodes have no mask")
        if args:
            raise RefusedError(f"args: expected none, got {len(args)}; no kernel is compiled at run time")
        self._decode._ready()
        prefill = single_prefill_with_kv_cache(
            *(q_p, k_p, v_p),
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return prefill, self._decode.run(q_d, paged_kv_cache_d, **scales)


class BatchPODWithPagedKVCacheWrapper:
    """Attends with prefills and decodes of many sequences, both over pages.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages, ``NHD`` or ``HND``.

    Raises:
        ValueError: ``kv_layout`` is unknown.
    """

    @interface()
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        """Makes a wrapper for this layout."""
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False, as in FlashInfer."""
        return False

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    @interface()
    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plans both. Arguments that end in ``_p`` are those of ``BatchPrefillWithPagedKVCacheWrapper.plan``, those
        that end in ``_d`` are of the decodes; the others are of both."""
        q_data_type = (data_type or "float16") if q_data_type is None else q_data_type
        common = {
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": data_type if kv_data_type is None else kv_data_type,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes, **common)
        self._prefill.plan(qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *sizes, **common)

    begin_forward = plan

    @interface(**_PREFILL)
    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Any,
        q_d: Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Computes both of one layer. ``causal_p`` and the masks are of the prefills, whose tokens are the last of
        their sequences; tokens of the decodes see all keys of theirs. ``q_scale``, ``k_scale`` and ``v_scale`` are of
        the decodes. It gives (out of the prefills, out of the decodes), or, with ``return_lse``, a pair (out, lse) of
        each."""
        step, prefill = self._prefill._ready(), self._prefill
        bias = custom_bias(custom_mask_p, packed_custom_mask_p, np.diff(step.starts), step.lens)
        logits = replace(prefill._logits, causal=_check.boolean("causal", causal_p))
        prefill._planned(step, logits, bias)
        first = prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return first, self._decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **scales)
