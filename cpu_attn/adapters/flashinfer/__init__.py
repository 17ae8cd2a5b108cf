# SPDX-License-Identifier: Apache-2.0
"""This module is FlashInfer's attention over paged caches on CPUs, for torch tensors: plan once a step, run for each
layer.

The arguments are those of FlashInfer 0.6, and what they mean; docs/flashinfer.md says which are refused. lse is in base
2, [T, Hq], -inf where a row sees no key. ValueError or TypeError is raised for what does not fit, before anything is
written, and for tensors that require grad while grad mode is on. torch.compile breaks its graph at a call.
"""

from __future__ import annotations

from cpu_attn._adapters import require

require("torch")

import math  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from cpu_attn import _check, ops  # noqa: E402
from cpu_attn._dtypes import dtype_name  # noqa: E402
from cpu_attn.plan import get_scheduler_metadata  # noqa: E402
from cpu_attn.torch.entry import axes, entry, optional, stand_in, tensors  # noqa: E402
from cpu_attn.torch.packed import Int32, int32, starts_of  # noqa: E402

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "install",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

LOG2E = math.log2(math.e)
_PLANNED = {
    "num_heads": "num_qo_heads",
    "head_size": "head_dim",
    "head_size_v": "head_dim_vo",
    "sliding_window": "window_left",
    "isa": "CPU_ATTN_ISA",
}
_RUN = {
    "query": "q",
    "key_cache": "paged_kv_cache",
    "value_cache": "paged_kv_cache",
    "output": "out",
    "s_aux": "sinks",
    "attn_bias": "custom_mask",
    "scale": "sm_scale",
    "softcap": "logits_soft_cap",
}
# These are FlashInfer's dtypes of caches that are not those of queries.
_QUANTISED = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def _dtype(x: Any) -> str:
    return str(x).removeprefix("torch.")


def _lengths(indptr: Int32, last_page_len: Int32, page_size: int) -> Int32:
    pages = np.diff(indptr)
    for b in np.flatnonzero((pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))):
        raise ValueError(f"last_page_len[{b}]: {last_page_len[b]}, outside 1..{page_size}, the tokens of a page")
    lens = np.where(pages > 0, (pages.astype(np.int64) - 1) * page_size + last_page_len, 0)
    for b in np.flatnonzero(lens > _check.INT32_MAX):
        raise ValueError(f"indptr[{b + 1}]: {pages[b]} pages of {page_size} tokens are more than {_check.INT32_MAX}")
    return lens.astype(np.int32)


def _mask_bias(mask: Tensor, q_lens: Int32, lens: Int32) -> Tensor:
    """Gives attn_bias [B, 1, Q, K] of custom_mask, bool, the [q_len, kv_len] of each sequence, flattened."""
    axes("custom_mask", mask, pairs=int((q_lens.astype(np.int64) * lens).sum()))
    if mask.dtype != torch.bool:
        raise TypeError(f"custom_mask: dtype {mask.dtype}, expected torch.bool")
    bias = torch.zeros(len(lens), 1, int(q_lens.max(initial=0)), int(lens.max(initial=0)))
    first = 0
    for b, (rows, keys) in enumerate(zip(q_lens.tolist(), lens.tolist(), strict=True)):
        seen = (
            mask[first : first + rows * keys].unflatten(0, (rows, keys)) if rows * keys else mask.new_zeros(rows, keys)
        )
        bias[b, 0, :rows, :keys].masked_fill_(~seen, -torch.inf)
        first += rows * keys
    return bias


class _Wrapper:
    """Holds what both wrappers have in common."""

    def __init__(self, kv_layout: str, use_cuda_graph: bool, jit_args: Any):
        if not (isinstance(kv_layout, str) and kv_layout in ("NHD", "HND")):
            raise ValueError(f"kv_layout: {kv_layout!r}, expected 'NHD' or 'HND'")
        wanted = {"use_cuda_graph": _check.boolean("use_cuda_graph", use_cuda_graph), "jit_args": jit_args is not None}
        for name, x in wanted.items():
            if x:
                raise ValueError(f"{name}: there is no such thing on a CPU")
        self._kv_layout = kv_layout
        self._plan: Any = None

    def _planned(
        self,
        starts: Int32,
        pages: tuple[Any, Any, Any],
        heads: tuple[int, int, int, int | None],
        page_size: int,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        dtypes: tuple[Any, Any, Any],
        sm_scale: float | None,
        disable_split_kv: bool,
        custom_mask: Tensor | None = None,
    ) -> None:
        if not (isinstance(pos_encoding_mode, str) and pos_encoding_mode == "NONE"):
            raise ValueError(
                f"pos_encoding_mode: {pos_encoding_mode!r}, expected 'NONE': rotate queries and keys before"
            )
        indices = int32("indices", pages[1])
        indptr = starts_of("indptr", pages[0], len(indices), len(starts))
        page_size = _check.integer("page_size", page_size, 1)
        lens = _lengths(indptr, int32("last_page_len", pages[2], len(starts) - 1), page_size)
        counts = np.diff(indptr)
        table = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = indices[: indptr[-1]]
        q_dtype = dtype_name(dtypes[0], "q_data_type")
        kv_dtype, o_dtype = (q_dtype if x is None else _dtype(x) for x in dtypes[1:])
        if o_dtype != q_dtype:
            raise ValueError(f"o_data_type: {o_dtype}, expected {q_dtype}, as q_data_type")
        if kv_dtype != q_dtype and kv_dtype not in _QUANTISED:
            raise ValueError(
                f"kv_data_type: {kv_dtype}, expected {q_dtype}, as q_data_type, or {', '.join(_QUANTISED)}"
            )
        left, (num_heads, num_kv_heads, head_size, head_size_v) = _check.integer("window_left", window_left, -1), heads
        head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
        self._scale = head_size**-0.5 if sm_scale is None else _check.number("sm_scale", sm_scale)
        self._softcap = max(0.0, 0.0 if logits_soft_cap is None else _check.number("logits_soft_cap", logits_soft_cap))
        self._bias = None if custom_mask is None else _mask_bias(custom_mask, np.diff(starts), lens)
        # The right side of a window is closed only if causal, which a mask takes the place of.
        self._plan = get_scheduler_metadata(
            *(len(lens), num_heads, num_kv_heads, head_size, lens, q_dtype, starts),
            causal=_check.boolean("causal", causal) and custom_mask is None,
            sliding_window=(left, -1),
            enable_kv_split=not _check.boolean("disable_split_kv", disable_split_kv),
            kv_cache_dtype=_QUANTISED.get(kv_dtype, "auto") if kv_dtype != q_dtype else "auto",
            head_size_v=head_size_v,
            kv_cache_layout=self._kv_layout,
        )
        self._table, self._page_size, self._window_left = table, page_size, left

    def _attend(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        scales: tuple[float | None, float | None, float | None],
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        window_left: int | None,
        sinks: Tensor | None,
    ) -> Any:
        if self._plan is None:
            raise RuntimeError("run() before plan()")
        if window_left is not None and _check.integer("window_left", window_left, -1) != self._window_left:
            raise ValueError(f"window_left: {window_left}, plan() was given {self._window_left}")
        plan, (query,), return_lse = self._plan, tensors(q=q), _check.boolean("return_lse", return_lse)
        if isinstance(paged_kv_cache, torch.Tensor):
            (cache,) = tensors(paged_kv_cache=paged_kv_cache)
            axes("paged_kv_cache", cache, pages=None, two=2, a=None, b=None, head_dim=None)
            key, value = cache.unbind(1)
        else:
            pair = _check.sequence("paged_kv_cache", paged_kv_cache)
            if len(pair) != 2:
                raise ValueError(f"paged_kv_cache: expected a tensor or (K, V), got {len(pair)} values")
            key, value = (tensors(paged_kv_cache=x)[0] for x in pair)
        size = key.shape[1 if self._kv_layout == "NHD" else 2] if key.dim() == 4 else None
        if size not in (None, self._page_size):
            raise ValueError(f"paged_kv_cache: pages of {size} tokens, plan() was given page_size {self._page_size}")
        named = zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)
        q_scale, k_scale, v_scale = (1.0 if x is None else _check.number(name, x) for name, x in named)
        if not plan.narrow:  # k_scale is then a factor of the logits like any other
            q_scale, k_scale = q_scale * k_scale, 1.0
        written, sinks, given = optional(out=out, sinks=sinks, lse=lse)
        num_tokens, num_heads = plan.num_tokens, plan.num_heads
        if out is None:
            out = written = query.new_empty(num_tokens, num_heads, plan.head_size_v)
        logs = query.new_empty(num_heads, num_tokens, dtype=torch.float32) if return_lse or given is not None else None
        if given is not None:
            axes("lse", given, T=num_tokens, num_qo_heads=num_heads)
            if given.dtype != torch.float32:
                raise TypeError(f"lse: dtype {given.dtype}, expected torch.float32")
        ops.attend(
            *(plan, query, key, value, written, self._table, self._scale * q_scale, self._softcap),
            _check.scales(k_scale, v_scale, plan.kv_dtypes),
            lse=logs,
            s_aux=sinks,
            attn_bias=self._bias,
        )
        if logs is None:
            return out
        logs = logs.T * LOG2E
        if given is None:
            lse = logs.contiguous()
        else:
            given.copy_(logs)
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Attends with the last query token of each sequence, or with its last ``q_len_per_req``, over pages.

    Args:
        float_workspace_buffer: not needed.
        kv_layout: of pages: ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D].
        use_cuda_graph: False.
        use_tensor_cores: not looked at.
        paged_kv_indptr_buffer: not needed.
        paged_kv_indices_buffer: not needed.
        paged_kv_last_page_len_buffer: not needed.
        backend: not looked at.
        jit_args: None.

    Raises:
        ValueError: ``kv_layout`` is unknown, or ``use_cuda_graph`` or ``jit_args`` is given.
    """

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
        """Makes a wrapper for pages in kv_layout, ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D]. It
        needs none of the buffers, and use_tensor_cores and backend mean nothing here."""
        super().__init__(kv_layout, use_cuda_graph, jit_args)

    @entry(**_PLANNED)
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
        *,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
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
            pos_encoding_mode: ``NONE``: rotate queries and keys before.
            window_left: how many keys before its own a query sees; -1: all.
            logits_soft_cap: None and 0 are off.
            q_data_type: of queries.
            kv_data_type: of pages: that of queries, or float8.
            o_data_type: that of queries.
            data_type: of queries and pages, older callers' name.
            sm_scale: the factor of q.k; 1 / sqrt(D) unless said.
            rope_scale: not looked at.
            rope_theta: not looked at.
            non_blocking: not looked at.
            fixed_split_size: not looked at: the bits are always the same.
            disable_split_kv: whether to keep the keys of a sequence on one thread.
            q_len_per_req: query tokens of each sequence.

        Raises:
            ValueError: an argument is out of range, or asks for what is not here.
            TypeError: an argument is no tensor, or has another dtype.
        """
        if data_type is not None:
            q_data_type = data_type
        num_reqs = len(int32("last_page_len", last_page_len))
        starts = np.arange(num_reqs + 1) * _check.integer("q_len_per_req", q_len_per_req, 1)
        self._planned(
            starts.astype(np.int32),
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, None),
            page_size,
            True,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            (q_data_type, kv_data_type, o_data_type),
            sm_scale,
            disable_split_kv,
        )

    begin_forward = plan

    @entry(**_RUN)
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q: [T, Hq, D], one sequence after another.
            paged_kv_cache: (keys, values) in ``kv_layout``, or one tensor [N, 2, ...] of both. They are read where they
                lie.
            q_scale: a factor of the logits.
            k_scale: a factor of the logits.
            v_scale: a factor of the values of float8 pages, else 1.
            out: [T, Hq, D] to write to, or None.
            lse: float32 [T, Hq] to write to, or None.
            return_lse: whether to return (out, lse).
            enable_pdl: not looked at.
            window_left: None, or what :meth:`plan` was given.
            sinks: float32 [Hq], or None: logits without a value, which lse includes.

        Returns:
            out, or (out, lse). lse is in base 2.

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
        """
        return self._attend(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, window_left, sinks)

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Gives (out, lse) of :meth:`run`."""
        found: tuple[Tensor, Tensor] = self.run(*args, return_lse=True, **options)
        return found


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Attends with the last query tokens of each sequence, any number of them, over pages."""

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
    ) -> None:
        """Takes the arguments that :class:`BatchDecodeWithPagedKVCacheWrapper` takes, and more buffers, none of which
        it needs."""
        super().__init__(kv_layout, use_cuda_graph, jit_args)

    @entry(**_PLANNED, indptr="paged_kv_indptr", indices="paged_kv_indices", last_page_len="paged_kv_last_page_len")
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
        *,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a step, as :meth:`BatchDecodeWithPagedKVCacheWrapper.plan` does, for any number of query tokens.

        ``qo_indptr``, int32 [B + 1], says where the query tokens of each sequence start. These are its last tokens;
        ``causal`` says whether each sees the keys up to its own only. ``custom_mask``, bool, is the [q_len, kv_len] of
        each sequence, flattened, one after another, in place of ``causal``. It becomes a bias of B * the most query
        tokens * the most keys numbers, and values that only it hides must be finite. ``packed_custom_mask`` is a
        ValueError. Other arguments and errors are the same.
        """
        if packed_custom_mask is not None:
            raise ValueError("packed_custom_mask: expected None; pass custom_mask")
        starts = starts_of("qo_indptr", qo_indptr, _check.INT32_MAX)
        (mask,) = optional(custom_mask=custom_mask)
        self._planned(
            starts,
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            page_size,
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            (q_data_type, kv_data_type, o_data_type),
            sm_scale,
            disable_split_kv,
            mask,
        )

    begin_forward = plan
    run = BatchDecodeWithPagedKVCacheWrapper.run
    run_return_lse = BatchDecodeWithPagedKVCacheWrapper.run_return_lse


# ---- merging ----


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges by lse in base 2, [T, Hq]; the core's is natural, [Hq, T]."""
    logs = [(s.float() / LOG2E).T.contiguous() for s in lses]
    out, lse = ops.merge_states(outs, logs)
    return out, (lse * LOG2E).T.contiguous()


@entry(outs="v", lses="s")
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Gives attention over several sets of keys, (V [T, Hq, D], S [T, Hq]), from that over each: v [T, sets, Hq, D], s
    [T, sets, Hq], whose lse is in base 2. See :func:`cpu_attn.merge_states`."""
    v, s = tensors(v=v, s=s)
    axes("v", v, T=None, sets=None, num_heads=None, head_dim=None)
    axes("s", s, T=v.shape[0], sets=v.shape[1], num_heads=v.shape[2])
    return _merged([*v.unbind(1)], [*s.unbind(1)])


@entry(outs="v", lses="s")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Does what :func:`merge_states` does for two sets: v_a and v_b [T, Hq, D], s_a and s_b [T, Hq]."""
    v_a, s_a, v_b, s_b = tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    axes("v_a", v_a, T=None, num_heads=None, head_dim=None)
    axes("v_b", v_b, T=v_a.shape[0], num_heads=v_a.shape[1], head_dim=v_a.shape[2])
    for name, x in (("s_a", s_a), ("s_b", s_b)):
        axes(name, x, T=v_a.shape[0], num_heads=v_a.shape[1])
    return _merged([v_a, v_b], [s_a, s_b])


@entry(v_a="v", s_a="s", v_b="v_other", s_b="s_other")
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Does what :func:`merge_state` does, and writes into v and s. mask: bool [T], the tokens for which that is done,
    None for all."""
    merged = merge_state(v, s, v_other, s_other)
    (mask,) = optional(mask=mask)
    if mask is not None:
        axes("mask", mask, T=len(v))
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: dtype {mask.dtype}, expected torch.bool")
    for x, new in zip((v, s), merged, strict=True):
        x.copy_(new if mask is None else torch.where(mask.unflatten(0, (-1, *[1] * (x.dim() - 1))), new, x))


# ---- FlashInfer as others know it ----


def install() -> None:
    """Makes ``import flashinfer`` find these, in this process. It may be called again.

    Importable are then flashinfer, flashinfer.decode, flashinfer.prefill and flashinfer.cascade.

    Raises:
        RuntimeError: another flashinfer is imported, or could be.
    """
    decode = {"BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper}
    prefill = {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper}
    merges = {f.__name__: f for f in (merge_state, merge_state_in_place, merge_states)}
    stand_in(
        {
            "flashinfer": decode | prefill | merges,
            "flashinfer.decode": decode,
            "flashinfer.prefill": prefill,
            "flashinfer.cascade": merges,
        }
    )
