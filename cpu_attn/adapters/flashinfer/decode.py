# SPDX-License-Identifier: Apache-2.0
"""This module attends with the last query token of each sequence: FlashInfer's ``decode``."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface, layout_of
from cpu_attn.flashinfer.call import ALONE, PLANNED, RUN, Results, Sequences, logits_of
from cpu_attn.flashinfer.trtllm import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from cpu_attn.flashinfer.wrapper import PagedWrapper, part_of_one
from cpu_attn.torch.entry import axes, tensors
from cpu_attn.torch.packed import int32

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


@interface(**ALONE)
def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attends with one query token over the keys of its sequence.

    Args:
        q: [Hq, D].
        k: [kv_len, Hkv, D]; with ``HND`` [Hkv, kv_len, D]. It is read where it lies.
        v: likewise, of a head size of its own.
        kv_layout: ``NHD`` or ``HND``.
        pos_encoding_mode: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``.
        q_scale: a factor of the logits, or of each query head's [Hq].
        k_scale: a factor of the logits, or of each kv head's [Hkv].
        v_scale: a factor of the output, or of each kv head's [Hkv].
        window_left: how many keys before its own a query sees; -1: all.
        logits_soft_cap: None and 0 are off.
        sm_scale: the factor of q.k; 1 / sqrt(D) unless said.
        rope_scale: what angles of ``ROPE_LLAMA`` are divided by; 1 unless said.
        rope_theta: the base of its frequencies; 10000 unless said.
        return_lse: whether to return (out, lse).

    Returns:
        out [Hq, Dv]; with ``return_lse`` (out, lse [Hq]).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    layout = layout_of(kv_layout)
    q, k, v = tensors(q=q, k=k, v=v)
    axes("q", q, num_qo_heads=None, head_dim=None)
    axes("k", k, a=None, b=None, head_dim=q.shape[1])
    axes("v", v, a=k.shape[0], b=k.shape[1], head_dim_vo=None)
    tokens, heads = (0, 1) if layout == "NHD" else (1, 0)
    lens = np.array([k.shape[tokens]], np.int32)
    dtypes = (q.dtype, k.dtype, None)
    step = Sequences(np.array([0, 1], np.int32), lens, (q.shape[0], k.shape[heads]), (q.shape[1], v.shape[2]), dtypes)
    logits = logits_of(sm_scale, True, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
    results, factors = Results(return_lse=return_lse), step.factors(q_scale, k_scale, v_scale)
    found = step.attend(q[None], layout, part_of_one(k, v, layout), logits, factors, results)
    return (found[0][0], found[1][0]) if results.return_lse else found[0]


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attends with the last query token of each sequence, or with its last ``q_len_per_req``, over pages.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages: ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D].
        use_cuda_graph: whether plans keep the number of sequences, and write their arrays into the three buffers.
        use_tensor_cores: not looked at.
        paged_kv_indptr_buffer: int32 [B + 1]; needed with ``use_cuda_graph``.
        paged_kv_indices_buffer: int32, at least as many as a plan has pages; needed with ``use_cuda_graph``.
        paged_kv_last_page_len_buffer: int32 [B]; needed with ``use_cuda_graph``.
        backend: not looked at.
        jit_args: None.

    Raises:
        ValueError: ``kv_layout`` is unknown, or a buffer is missing.
        NotImplementedError: ``jit_args`` is given.
    """

    _q_len = 1
    _by_q_len: dict[int, Sequences]

    @interface()
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        """Makes a wrapper for pages in kv_layout, ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D]."""
        super().__init__(
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        self._use_tensor_cores = _check.boolean("use_tensor_cores", use_tensor_cores)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given."""
        return self._use_tensor_cores

    @interface(**PLANNED)
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
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Plans a step, once for all layers.

        Sequence b has the pages ``indices[indptr[b]]`` to ``indices[indptr[b + 1] - 1]``.

        Args:
            indptr: int32 [B + 1].
            indices: int32, the pages of one sequence after another.
            last_page_len: int32 [B], tokens of each sequence's last page.
            num_qo_heads: Hq.
            num_kv_heads: Hkv.
            head_dim: D, of values, too.
            page_size: tokens of a page.
            pos_encoding_mode: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``.
            window_left: how many keys before its own a query sees; -1: all.
            logits_soft_cap: None and 0 are off.
            q_data_type: of queries: float32, float16, bfloat16 or float8; None: ``data_type``, else float16.
            kv_data_type: of pages: that of queries, or float8; None: ``data_type``, else that of queries.
            o_data_type: of the output: float32, float16, bfloat16 or float8; None: that of queries, of float8 float16.
            data_type: what the other two are where they are None.
            sm_scale: the factor of q.k; 1 / sqrt(D) unless said.
            rope_scale: what angles of ``ROPE_LLAMA`` are divided by; 1 unless said.
            rope_theta: the base of its frequencies; 10000 unless said.
            non_blocking: not looked at.
            block_tables: int32 [B, M], or None: the pages of each sequence in place of ``indices``.
            seq_lens: int32 [B], or None: how many keys each sequence has, in place of ``last_page_len``.
            fixed_split_size: not looked at: the bits are always the same.
            disable_split_kv: whether to keep the keys of a sequence on one thread.
            q_len_per_req: query tokens of each sequence.
            window_right: 0.
            is_causal: None.

        Raises:
            ValueError: an argument is out of range.
            TypeError: an argument is no tensor, or has another dtype.
            NotImplementedError: an argument asks for what is not here.
        """
        q_data_type = (data_type or "float16") if q_data_type is None else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        num_reqs = len(int32("last_page_len", last_page_len))
        size = _check.integer("q_len_per_req", q_len_per_req, 1)
        starts = np.arange(num_reqs + 1) * size
        where = (indptr, indices, last_page_len)
        lens, table, page_size = self._pages(*where, page_size, seq_lens, block_tables, num_reqs + 1)
        logits = logits_of(sm_scale, True, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
        heads, dtypes = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type, o_data_type)
        split = not _check.boolean("disable_split_kv", disable_split_kv)
        step = Sequences(starts.astype(np.int32), lens, heads, (head_dim, None), dtypes, split)
        self._plan_pages(step, table, page_size, logits)
        self._q_len, self._by_q_len = size, {}
        self._keep(*where)

    begin_forward = plan

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q: [T, Hq, D], one sequence after another.
            paged_kv_cache: (keys, values) in ``kv_layout``, or one tensor [N, 2, ...] of both. They are read where they
                lie, but for ``ROPE_LLAMA``.
            args: scale_q, scale_k and scale_v, which multiply the next three, or none.
            q_scale: a factor of the logits, or of each query head's [Hq].
            k_scale: a factor of the logits, or of each kv head's [Hkv].
            v_scale: a factor of the output, or of each kv head's [Hkv].
            out: [T, Hq, D] to write to, or None.
            lse: float32 [T, Hq] to write to, or None.
            return_lse: whether to return (out, lse).
            enable_pdl: not looked at.
            window_left: in place of that of :meth:`plan`, or None.
            sinks: float32 [Hq], or None: logits without a value, which lse includes.
            q_len_per_req: what :meth:`plan` was given, or None; in place of its 1 any number.
            skip_softmax_threshold_scale_factor: None.
            kv_cache_sf: None.

        Returns:
            out, or (out, lse). lse is in base 2.

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
            NotImplementedError: an argument asks for what is not here.
        """
        step = self._step_of(q, q_len_per_req)
        factors = step.factors(q_scale, k_scale, v_scale).times(step.factors_of(args))
        results = Results(out, lse, return_lse)
        return self._run_pages(q, paged_kv_cache, factors, results, window_left, sinks, step=step)

    def _step_of(self, q: Any, q_len_per_req: Any) -> Sequences:
        """Gives the step of the plan, or, where that has one token of each sequence, that of so many."""
        step, planned = self._ready(), self._q_len
        size = planned if q_len_per_req is None else _check.integer("q_len_per_req", q_len_per_req, 1)
        if size != planned and planned > 1:
            raise ValueError(f"q_len_per_req: {size}, plan() was given {planned}")
        num_tokens = size * len(step.lens)
        (q,) = tensors(q=q)
        if q.dim() == 3 and len(q) != num_tokens:
            raise ValueError(
                f"q: axis 0 is {len(q)}, expected T = {num_tokens}: {len(step.lens)} sequences, q_len_per_req = {size}"
            )
        if size == planned:
            return step
        if size not in self._by_q_len:
            self._by_q_len[size] = step.with_starts(np.arange(len(step.lens) + 1) * size)
        return self._by_q_len[size]

    run_return_lse = partialmethod(run, return_lse=True)

    @interface(**RUN, key_cache="paged_kv_cache", value_cache="paged_kv_cache")
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Does what :meth:`run` does, with arguments of :meth:`plan` in place of those that it was given."""
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, True, window_left, logits_soft_cap, *changed)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    @interface(**RUN, key_cache="paged_kv_cache", value_cache="paged_kv_cache")
    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Does what :meth:`forward` does, and returns (out, lse)."""
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, True, window_left, logits_soft_cap, *changed)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, return_lse=True, **scales)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Is a :class:`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph``: the same plan, with fixed buffers.

    Args:
        workspace_buffer: not needed.
        indptr_buffer: int32 [B + 1].
        indices_buffer: int32, at least as many as a plan has pages.
        last_page_len_buffer: int32 [B].
        kv_layout: of pages, ``NHD`` or ``HND``.
        use_tensor_cores: not looked at.

    Raises:
        ValueError: ``kv_layout`` is unknown, or a buffer is missing.
    """

    @interface(
        paged_kv_indptr_buffer="indptr_buffer",
        paged_kv_indices_buffer="indices_buffer",
        paged_kv_last_page_len_buffer="last_page_len_buffer",
    )
    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """Makes a wrapper with these buffers."""
        super().__init__(
            *(workspace_buffer, kv_layout, True, use_tensor_cores),
            *(indptr_buffer, indices_buffer, last_page_len_buffer),
        )
        self._buffers = {name.removeprefix("paged_kv_"): x for name, x in self._buffers.items()}


@interface(**PLANNED)
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Any = None,
) -> None:
    """Plans a step, as :meth:`BatchDecodeWithPagedKVCacheWrapper.plan` does. Callers put it in the place of that method
    of ``self``."""
    BatchDecodeWithPagedKVCacheWrapper.plan(
        *(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
        *(pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, None, data_type),
        *(sm_scale, rope_scale, rope_theta),
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
