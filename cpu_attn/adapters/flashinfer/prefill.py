# SPDX-License-Identifier: Apache-2.0
"""This module attends with any number of query tokens of each sequence, its last ones: FlashInfer's ``prefill``."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import numpy as np
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface, layout_of
from cpu_attn.flashinfer.call import ALONE, PLANNED, RUN, Results, Sequences, logits_of
from cpu_attn.flashinfer.masks import custom_bias, item_bias
from cpu_attn.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from cpu_attn.flashinfer.trtllm import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from cpu_attn.flashinfer.wrapper import PagedWrapper, part_of_one
from cpu_attn.torch.entry import axes, tensors
from cpu_attn.torch.packed import starts_of

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
]


@interface(**ALONE)
def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: Any = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Attends with the last query tokens of one sequence over its keys.

    Args:
        q: [qo_len, Hq, D].
        k: [kv_len, Hkv, D]; with ``HND`` [Hkv, kv_len, D]. It is read where it lies.
        v: likewise, of head size Dv.
        scale_q: float32 [Hq], or None: factors of the logits of each query head.
        scale_k: float32 [Hkv], or None: factors of the logits of each kv head.
        scale_v: float32 [Hkv], or None: factors of the output of each kv head.
        o_dtype: of the output: float32, float16, bfloat16 or float8; None: that of ``q``, of float8 float16.
        custom_mask: bool [qo_len, kv_len], or flattened, or None: which keys tokens see, in place of ``causal``. Values
            that only it hides must be finite.
        packed_custom_mask: uint8, in place of it: the bits of the flattened mask, lowest first.
        causal: whether a token sees the keys up to its own only.
        kv_layout: ``NHD`` or ``HND``.
        pos_encoding_mode: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``.
        sm_scale: the factor of q.k; 1 / sqrt(D) unless said.
        window_left: how many keys before its own a query sees; -1: all.
        logits_soft_cap: None and 0 are off.
        rope_scale: what angles of ``ROPE_LLAMA`` are divided by; 1 unless said.
        rope_theta: the base of its frequencies; 10000 unless said.
        return_lse: whether to return (out, lse).
        k_scale: a factor of the logits, or of each kv head's [Hkv].
        v_scale: a factor of the output, or of each kv head's [Hkv].

    Returns:
        out [qo_len, Hq, Dv]; with ``return_lse`` (out, lse [qo_len, Hq]).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
        NotImplementedError: an argument asks for what is not here.
    """
    layout = layout_of(kv_layout)
    q, k, v = tensors(q=q, k=k, v=v)
    axes("q", q, qo_len=None, num_qo_heads=None, head_dim=None)
    axes("k", k, a=None, b=None, head_dim=q.shape[2])
    axes("v", v, a=k.shape[0], b=k.shape[1], head_dim_vo=None)
    tokens, heads = (0, 1) if layout == "NHD" else (1, 0)
    starts, lens = np.array([0, len(q)], np.int32), np.array([k.shape[tokens]], np.int32)
    sizes = (q.shape[2], v.shape[2])
    step = Sequences(starts, lens, (q.shape[1], k.shape[heads]), sizes, (q.dtype, k.dtype, o_dtype))
    bias = custom_bias(custom_mask, packed_custom_mask, np.diff(starts), lens, True)
    causal = _check.boolean("causal", causal) and bias is None
    logits = logits_of(sm_scale, causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
    factors = step.factors(scale_q, scale_k, scale_v, names="scale_q")
    factors = factors.times(step.factors(None, k_scale, v_scale))
    results = Results(return_lse=return_lse)
    return step.attend(q, layout, part_of_one(k, v, layout), logits, factors, results, bias)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attends with the last query tokens of each sequence, any number of them, over pages."""

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
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Takes the arguments that ``BatchDecodeWithPagedKVCacheWrapper`` takes, and more buffers, of which it needs
        those of ``qo_indptr`` and of the pages with ``use_cuda_graph``."""
        super().__init__(
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )

    @interface(**PLANNED, indptr="paged_kv_indptr", indices="paged_kv_indices", last_page_len="paged_kv_last_page_len")
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plans a step, as ``BatchDecodeWithPagedKVCacheWrapper.plan`` does, for any number of query tokens.

        ``qo_indptr``, int32 [B + 1], says where the query tokens of each sequence start. These are its last tokens;
        ``causal`` says whether each sees the keys up to its own only. A mask is in place of ``causal``:
        ``custom_mask``, bool, the [q_len, kv_len] of each sequence, flattened, one after another, or
        ``packed_custom_mask``, uint8, the same bits, lowest first, each sequence from a byte of its own on
        (``segment_packbits``). It becomes a bias of B * the most query tokens * the most keys numbers, and values that
        only it hides must be finite.

        ``prefix_len_ptr`` [B], ``token_pos_in_items_ptr`` [B * token_pos_in_items_len] and ``token_pos_in_items_len``
        are multi-item scoring: behind the first tokens of a sequence, which all see, lie items, each behind a
        delimiter; a token sees of them its own only. The second has, for each token behind the prefix, its place in its
        item, counted from the delimiter, which is 0. It is a bias likewise, and causal.

        Other arguments and errors are the same.
        """
        starts = starts_of("qo_indptr", qo_indptr, _check.INT32_MAX)
        where = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        lens, table, page_size = self._pages(*where, page_size, seq_lens, block_tables, len(starts))
        q_lens = np.diff(starts)
        bias = custom_bias(custom_mask, packed_custom_mask, q_lens, lens)
        items = item_bias(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, q_lens, lens)
        if bias is not None and items is not None:
            raise ValueError("prefix_len_ptr: not beside a mask")
        logits = logits_of(sm_scale, causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
        heads, dtypes = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type, o_data_type)
        split = not _check.boolean("disable_split_kv", disable_split_kv)
        step = Sequences(starts, lens, heads, (head_dim_qk, head_dim_vo), dtypes, split)
        self._plan_pages(step, table, page_size, logits, bias, items)
        self._keep(qo_indptr, *where)

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
        """Computes attention of one layer with the plan, as ``BatchDecodeWithPagedKVCacheWrapper.run`` does.

        ``lse_base`` is ``log2``, or ``ln`` for the natural logarithm; ``lse_layout`` is ``NH`` [T, Hq] or ``HN`` [Hq,
        T].
        """
        results = Results(out, lse, return_lse, lse_base, lse_layout)
        factors = self._ready().factors(q_scale, k_scale, v_scale).times(self._ready().factors_of(args))
        return self._run_pages(q, paged_kv_cache, factors, results, window_left, sinks)

    run_return_lse = partialmethod(run, return_lse=True)

    @interface(**RUN, key_cache="paged_kv_cache", value_cache="paged_kv_cache")
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        self._again(sm_scale, causal, window_left, logits_soft_cap, *changed)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    @interface(**RUN, key_cache="paged_kv_cache", value_cache="paged_kv_cache")
    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        self._again(sm_scale, causal, window_left, logits_soft_cap, *changed)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
