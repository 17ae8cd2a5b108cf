# SPDX-License-Identifier: Apache-2.0
"""This module attends over pages with one wrapper for prefill and decode: FlashInfer's ``attention``."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.call import PLANNED, RUN, Results, Sequences, logits_of
from cpu_attn.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from cpu_attn.flashinfer.wrapper import PagedWrapper, check_lens, table_of
from cpu_attn.torch.packed import int32, starts_of

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(PagedWrapper):
    """Attends with the last query tokens of each sequence over pages, and always gives lse, too.

    Args:
        kv_layout: of pages: ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D].
        device: not looked at.

    Raises:
        ValueError: ``kv_layout`` is unknown.
    """

    @interface()
    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        """Makes a wrapper for this layout."""
        super().__init__(kv_layout)

    @interface(**PLANNED, indptr="kv_indptr", indices="kv_indices")
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a step, as ``BatchPrefillWithPagedKVCacheWrapper.plan`` does. ``kv_len_arr``, int32 [B], says how many
        keys each sequence has."""
        starts = starts_of("qo_indptr", qo_indptr, _check.INT32_MAX)
        found = int32("kv_indices", kv_indices)
        where = starts_of("kv_indptr", kv_indptr, len(found), len(starts))
        size = _check.integer("page_size", page_size, 1)
        table = table_of(where, found)
        lens = check_lens("kv_len_arr", kv_len_arr, table, size)
        check_pages("kv_len_arr", lens, where, size)
        logits = logits_of(sm_scale, causal, -1, logits_soft_cap)
        heads, dtypes = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type, None)
        self._plan_pages(Sequences(starts, lens, heads, (head_dim_qk, head_dim_vo), dtypes), table, size, logits)

    @interface(**RUN, key_cache="kv_cache", value_cache="kv_cache", paged_kv_cache="kv_cache")
    def run(
        self,
        q: Tensor,
        kv_cache: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Computes attention of one layer with the plan, as ``BatchPrefillWithPagedKVCacheWrapper.run`` does, and gives
        (out, lse). ``logits_soft_cap`` is that of :meth:`plan`, or 0."""
        step = self._ready()
        cap = 0.0 if logits_soft_cap is None else _check.number("logits_soft_cap", logits_soft_cap)
        if cap > 0 and cap != self._logits.softcap:
            raise ValueError(f"logits_soft_cap: {cap}, plan() was given {self._logits.softcap}")
        factors = step.factors(None, k_scale, v_scale)
        return self._run_pages(q, kv_cache, factors, Results(out, lse, True))


def check_pages(name: str, lens: Any, where: Any, page_size: int) -> None:
    """Checks that sequences have pages for their keys; where: where these start, [B + 1]."""
    room = np.diff(where).astype(np.int64) * page_size
    for b in np.flatnonzero(lens > room):
        raise ValueError(f"{name}[{b}]: {lens[b]}, the sequence's pages have {room[b]} slots")


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Is a ``BatchPrefillWithPagedKVCacheWrapper`` whose :meth:`run` takes sinks and the factor of q.k.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: as there; so are ``use_cuda_graph`` and the buffers.
        pos_encoding_mode: ``NONE``: the plan says what is encoded.
        q_data_type: what ``plan`` has, too; so are the other dtypes, head sizes and ``window_left``.

    Raises:
        ValueError: a name is unknown, or a buffer is missing.
    """

    @interface()
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        """Makes a wrapper. What it shares with :meth:`plan` counts there."""
        super().__init__(
            *(float_workspace_buffer, kv_layout, use_cuda_graph),
            *(qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf),
        )
        logits_of(None, False, window_left, None, pos_encoding_mode)  # raises what is out of range

    @interface(**RUN, key_cache="paged_kv_cache", value_cache="paged_kv_cache")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Does what ``BatchPrefillWithPagedKVCacheWrapper.run`` does. ``args`` are sinks, float32 [Hq], and sm_scale,
        the factor of q.k; both may be left out."""
        if len(args) > 2:
            raise TypeError(f"args: expected sinks and sm_scale, got {len(args)}")
        sinks, scale = (args[0] if args else sinks), (args[1] if len(args) > 1 else None)
        results = Results(out, lse, return_lse, lse_base, lse_layout)
        factors = self._ready().factors(q_scale, k_scale, v_scale)
        return self._run_pages(q, paged_kv_cache, factors, results, window_left, sinks, scale)

    run_return_lse = partialmethod(run, return_lse=True)
