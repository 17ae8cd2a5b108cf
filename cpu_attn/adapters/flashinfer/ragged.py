# SPDX-License-Identifier: Apache-2.0
"""This module attends over keys that lie packed, one sequence after another: FlashInfer's
``BatchPrefillWithRaggedKVCacheWrapper``."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np
from torch import Tensor

from cpu_attn import _check
from cpu_attn._arrays import dense_rows
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.call import PLANNED, RUN, Factors, Results, Sequences, logits_of
from cpu_attn.flashinfer.masks import custom_bias, item_bias
from cpu_attn.flashinfer.wrapper import Wrapper
from cpu_attn.torch.entry import axes, tensors
from cpu_attn.torch.packed import Int32, packed, starts_of

__all__ = ["BatchPrefillWithRaggedKVCacheWrapper"]


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attends with the last query tokens of each sequence over keys that lie packed, without pages."""

    _kv_starts: Int32

    @interface()
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Makes a wrapper for keys [nnz, Hkv, D], in either ``kv_layout``, as in FlashInfer. It needs the first two
        buffers with ``use_cuda_graph``."""
        super().__init__(kv_layout, use_cuda_graph, qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)

    @interface(**PLANNED)
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plans a step, as ``BatchPrefillWithPagedKVCacheWrapper.plan`` does.

        ``kv_indptr``, int32 [B + 1], says where the keys of each sequence start. ``seq_lens``, int32 [B] or None, says
        how many of them count, if not all. Other arguments and errors are the same.
        """
        starts = starts_of("qo_indptr", qo_indptr, _check.INT32_MAX)
        kv_starts = starts_of("kv_indptr", kv_indptr, _check.INT32_MAX, len(starts))
        lens, q_lens = _lens(seq_lens, np.diff(kv_starts)), np.diff(starts)
        bias = custom_bias(custom_mask, packed_custom_mask, q_lens, lens)
        items = item_bias(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, q_lens, lens)
        if bias is not None and items is not None:
            raise ValueError("prefix_len_ptr: not beside a mask")
        logits = logits_of(sm_scale, causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
        heads, dtypes = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type, o_data_type)
        split = not _check.boolean("disable_split_kv", disable_split_kv)
        step = Sequences(starts, lens, heads, (head_dim_qk, head_dim_vo), dtypes, split)
        self._planned(step, logits, bias, items)
        self._kv_starts = kv_starts.copy()
        self._keep(qo_indptr, kv_indptr)

    begin_forward = plan

    @interface(**RUN, key_cache="k", value_cache="v", cu_seq_k="kv_indptr", key="k", value="v")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q: [T, Hq, D], one sequence after another.
            k: [nnz, Hkv, D], read where it lies. A tensor whose last axis is not dense is copied.
            v: [nnz, Hkv, Dv] likewise.
            args: as ``BatchDecodeWithPagedKVCacheWrapper.run`` has them.
            q_scale: a factor of the logits, or of each query head's [Hq].
            k_scale: a factor of the logits, or of each kv head's [Hkv].
            v_scale: a factor of the output, or of each kv head's [Hkv].
            o_scale: what the output is divided by, or None: 1.
            out: [T, Hq, Dv] to write to, or None.
            lse: float32 to write to, or None, in ``lse_layout``.
            return_lse: whether to return (out, lse).
            lse_base: ``log2``, or ``ln`` for the natural logarithm.
            lse_layout: ``NH`` [T, Hq], or ``HN`` [Hq, T].
            enable_pdl: not looked at.
            kv_cache_sf: None.

        Returns:
            out, or (out, lse).

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
            NotImplementedError: an argument asks for what is not here.
        """
        step = self._ready()
        k, v = tensors(k=k, v=v)
        axes("k", k, nnz=None, num_kv_heads=step.num_kv_heads, head_dim=step.head_size)
        axes("v", v, nnz=len(k), num_kv_heads=step.num_kv_heads, head_dim_vo=step.head_size_v)
        if self._kv_starts[-1] > len(k):
            raise ValueError(f"k: {len(k)} tokens, kv_indptr ends at {self._kv_starts[-1]}")
        parts = [*packed(dense_rows(k), dense_rows(v), self._kv_starts, step.lens)]
        results = Results(out, lse, return_lse, lse_base, lse_layout)
        divisor = 1.0 if o_scale is None else _check.number("o_scale", o_scale, _check.TINY)
        factors = step.factors(q_scale, k_scale, v_scale).times(step.factors_of(args)).times(Factors(v=1.0 / divisor))
        return step.attend(q, "NHD", parts, self._logits, factors, results, self._bias)

    run_return_lse = partialmethod(run, return_lse=True)

    @interface(**RUN, key_cache="k", value_cache="v")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Does what :meth:`run` does, with arguments of :meth:`plan` in place of those that it was given."""
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, causal, window_left, logits_soft_cap, *changed)
        return self.run(q, k, v)

    @interface(**RUN, key_cache="k", value_cache="v")
    def forward_return_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Does what :meth:`forward` does, and returns (out, lse)."""
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, causal, window_left, logits_soft_cap, *changed)
        return self.run(q, k, v, return_lse=True)


def _lens(seq_lens: Any, lens: Int32) -> Int32:
    """Gives how many keys count, at most lens."""
    if seq_lens is None:
        return lens
    used: Int32 = _check.integers("seq_lens", seq_lens)
    if len(used) != len(lens):
        raise ValueError(f"seq_lens: {len(used)} numbers, expected {len(lens)}")
    for b in np.flatnonzero((used < 0) | (used > lens)):
        raise ValueError(f"seq_lens[{b}]: {used[b]}, outside 0..{lens[b]}, the keys that kv_indptr leaves it")
    found: Int32 = used.copy()
    return found
