# SPDX-License-Identifier: Apache-2.0
"""This module merges attention over several sets of keys, and attends over shared prefixes by it: FlashInfer's
``cascade`` (arXiv:2501.01005)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn.flashinfer.arguments import interface, items
from cpu_attn.flashinfer.call import LOG2E
from cpu_attn.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from cpu_attn.flashinfer.norm import floats
from cpu_attn.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from cpu_attn.torch.entry import axes, optional, tensors, written

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges by lse in base 2, [T, Hq]; the core's is natural, [Hq, T]."""
    logs = [(s.float() / LOG2E).T.contiguous() for s in lses]
    out, lse = ops.merge_states(outs, logs)
    return out, (lse * LOG2E).T.contiguous()


@interface(outs="v", lses="s")
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Gives attention over several sets of keys, (V [T, Hq, D], S [T, Hq]), from that over each: v [T, sets, Hq, D], s
    [T, sets, Hq], whose lse is in base 2. See :func:`cpu_attn.merge_states`."""
    v, s = tensors(v=v, s=s)
    axes("v", v, T=None, sets=None, num_heads=None, head_dim=None)
    axes("s", s, T=v.shape[0], sets=v.shape[1], num_heads=v.shape[2])
    return _merged([*v.unbind(1)], [*s.unbind(1)])


@interface(outs="v", lses="s")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Does what :func:`merge_states` does for two sets: v_a and v_b [T, Hq, D], s_a and s_b [T, Hq]."""
    v_a, s_a, v_b, s_b = tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    axes("v_a", v_a, T=None, num_heads=None, head_dim=None)
    axes("v_b", v_b, T=v_a.shape[0], num_heads=v_a.shape[1], head_dim=v_a.shape[2])
    for name, x in (("v_a", v_a), ("v_b", v_b)):
        floats(name, x)
        if x.dtype != v_a.dtype:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {v_a.dtype}, that of v_a")
    for name, x in (("s_a", s_a), ("s_b", s_b)):
        axes(name, x, T=v_a.shape[0], num_heads=v_a.shape[1])
    return _merged([v_a.resolve_neg(), v_b.resolve_neg()], [s_a, s_b])


@interface(v_a="v", s_a="s", v_b="v_other", s_b="s_other")
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Does what :func:`merge_state` does, and writes into v and s. mask: bool [T], the tokens for which that is done,
    None for all."""
    merged = merge_state(v, s, v_other, s_other)
    floats("s", s)
    (mask,) = optional(mask=mask)
    if mask is not None:
        axes("mask", mask, T=len(v))
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: dtype {mask.dtype}, expected torch.bool")
    to = written({"v_other": v_other, "s_other": s_other, "mask": mask}, v=v, s=s)
    for x, new in zip(to, merged, strict=True):
        x.copy_(new if mask is None else torch.where(mask.unflatten(0, (-1, *[1] * (x.dim() - 1))), new, x))


class MultiLevelCascadeAttentionWrapper:
    """Attends over prefixes that several sequences share, level by level, and merges.

    Args:
        num_levels: how many levels there are. Those of the first are shared by the most sequences.
        float_workspace_buffer: not needed.
        kv_layout: of pages, ``NHD`` or ``HND``.
        use_cuda_graph: whether plans keep the number of sequences of each level, in the buffers.
        qo_indptr_buf_arr: a buffer for each level, needed with ``use_cuda_graph``; so are the other three.
        paged_kv_indptr_buf_arr: likewise.
        paged_kv_indices_buf_arr: likewise.
        paged_kv_last_page_len_buf_arr: likewise.

    Raises:
        ValueError: a name or a number is out of range, or a buffer is missing.
    """

    @interface()
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
    ) -> None:
        """Makes a wrapper of so many levels."""
        size = _check.integer("num_levels", num_levels, 1)
        self._fixed = _check.boolean("use_cuda_graph", use_cuda_graph)
        given = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        buffers = [items(name, x, size) for name, x in given.items()] if self._fixed else [[None] * size] * 4
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, self._fixed, *each)
            for each in zip(*buffers, strict=True)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans have fixed buffers."""
        return self._fixed

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        """Does nothing: no workspace is needed."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: no kernel is compiled at run time."""

    @interface(paged_kv_last_page_len="paged_kv_last_page_len")
    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plans a step, once for all layers.

        Each of the first four has an item for each level: what ``BatchPrefillWithPagedKVCacheWrapper.plan`` takes of
        the same name. ``causal`` is for the last level; queries see all of the others. Other arguments and errors are
        the same. Positions of ``ROPE_LLAMA``, ``ALIBI`` and ``window_left`` count within a level, as in FlashInfer.
        """
        size = len(self._levels)
        given = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        arrays = [items(name, x, size) for name, x in given.items()]
        causal = _check.boolean("causal", causal)
        ends = {int(each[-1]) for each in arrays[0] if len(each)}
        if len(ends) > 1:
            raise ValueError(f"qo_indptr_arr: levels have {sorted(ends)} tokens, expected the same number")
        for level, (wrapper, *each) in enumerate(zip(self._levels, *arrays, strict=True)):
            wrapper.plan(
                *(*each, num_qo_heads, num_kv_heads, head_dim, page_size),
                causal=causal and level == size - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=torch.float32,
            )

    begin_forward = plan

    @interface()
    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        """Computes attention of one layer with the plan: q [T, Hq, D], paged_kv_cache as
        ``BatchPrefillWithPagedKVCacheWrapper.run`` has it, with the pages of all levels. It gives [T, Hq, D]."""
        outs, lses = zip(*(w.run(q, paged_kv_cache, return_lse=True) for w in self._levels), strict=True)
        return _merged([*outs], [*lses])[0].to(q.dtype)  # of float32, so that it is rounded once

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Attends with the last query token of each sequence over a prefix that all share, which lies by itself, and over
    pages of each.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages and of the prefix, ``NHD`` or ``HND``.

    Raises:
        ValueError: ``kv_layout`` is unknown.
    """

    @interface()
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        """Makes a wrapper for this layout."""
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Does nothing: no workspace is needed."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: no kernel is compiled at run time."""

    @interface(indptr="unique_kv_indptr", indices="unique_kv_indices", last_page_len="unique_kv_last_page_len")
    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        """Plans a step: where the pages of each sequence are, as ``BatchDecodeWithPagedKVCacheWrapper.plan`` has it."""
        where = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._unique.plan(*where, *sizes, q_data_type=None, data_type=data_type, o_data_type=torch.float32)

    @interface(k="k_shared", v="v_shared", paged_kv_cache="unique_kv_cache")
    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Any) -> Tensor:
        """Attends: q [B, Hq, D], k_shared and v_shared [kv_len, Hkv, D] or, of ``HND``, [Hkv, kv_len, D]. It gives [B,
        Hq, D]."""
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, o_dtype=torch.float32, kv_layout=self._kv_layout, return_lse=True
        )
        return merge_state(*shared, *self._unique.run(q, unique_kv_cache, return_lse=True))[0].to(q.dtype)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Does what :class:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper` does, with any number of query tokens of each
    sequence.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages and of the prefix, ``NHD`` or ``HND``.

    Raises:
        ValueError: ``kv_layout`` is unknown.
    """

    @interface()
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        """Makes a wrapper for this layout."""
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._planned: tuple[Any, ...] | None = None
        self._changed: dict[str, Any] = {}

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Does nothing: no workspace is needed."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: no kernel is compiled at run time."""

    @interface()
    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Plans a step, as ``BatchPrefillWithPagedKVCacheWrapper.plan`` does. The dtype is that of the queries of
        :meth:`forward`."""
        where: Any = [
            x.clone() for x in tensors(a=qo_indptr, b=paged_kv_indptr, c=paged_kv_indices, d=paged_kv_last_page_len)
        ]
        sizes: Any = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._unique.plan(*where, *sizes)  # raises what does not fit
        self._planned, self._changed = (*where, *sizes), {}

    @interface(k="k_shared", v="v_shared", paged_kv_cache="unique_kv_cache")
    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attends: q [T, Hq, D], k_shared and v_shared [kv_len, Hkv, D] or, of ``HND``, [Hkv, kv_len, D], which all
        tokens see; ``causal`` is for the pages. It gives [T, Hq, D]."""
        if self._planned is None:
            raise RuntimeError("forward() before begin_forward()")
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, o_dtype=torch.float32, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        changed: dict[str, Any] = {
            "causal": causal,
            "sm_scale": sm_scale,
            "q_data_type": q.dtype,
            "o_data_type": torch.float32,
        }
        if self._changed != changed:
            plan: Any = self._unique.plan
            plan(*self._planned, **changed)
            self._changed = changed
        return merge_state(*shared, *self._unique.run(q, unique_kv_cache, return_lse=True))[0].to(q.dtype)
