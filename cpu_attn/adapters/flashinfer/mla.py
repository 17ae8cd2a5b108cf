# SPDX-License-Identifier: Apache-2.0
"""This module attends over latent rows in pages, multi-head latent attention with absorbed weights: FlashInfer's
``mla`` (arXiv:2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import choice, interface, items
from cpu_attn.flashinfer.attention import check_pages
from cpu_attn.flashinfer.latent import (
    Latents,
    MLAHeadDimensions,
    MLALayerDimensions,
    deepseek_mla_dimensions,
    joined,
    nope_mla_dimensions,
    rows_of,
    smaller_mla_dimensions,
    supported_mla_head_dimensions,
    supported_mla_layer_dimensions,
)
from cpu_attn.flashinfer.trtllm import factor, sinks_of, two
from cpu_attn.flashinfer.wrapper import Wrapper, check_lens, flat, table_of, tables
from cpu_attn.torch.entry import RefusedError, axes, tensors, written
from cpu_attn.torch.packed import Int32, int32, starts_of

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]

_NAMES = {"num_reqs": "kv_len_arr", "isa": "CPU_ATTN_ISA", "s_aux": "sinks", "output": "out", "scale": "sm_scale"}
# These are the names where a call takes sizes and dtypes from its tensors.
_ALONE = {
    "num_heads": "query",
    "head_dim_ckv": "kv_lora_rank",
    "head_dim_kpe": "qk_rope_head_dim",
    "q_data_type": "query",
    "kv_data_type": "kv_cache",
    "block_table": "block_tables",
}


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Says where sequences lie: by indptr and indices, by block tables, or by both."""

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        """Gives it by indptr [B + 1] of queries and pages, indices, and how many keys sequences have, int32 each."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """Gives it by where query tokens start [B + 1], block tables [B, M] and how many keys sequences have [B]."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        *,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Gives it by both, of which the first is taken."""
        first = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        return cls(*first, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


def _where(given: MLAPlanMetadata, page_size: int) -> tuple[Int32, Int32, Int32]:
    """Gives where query tokens start, how many keys sequences have, and their pages."""
    if given.qo_indptr is not None:
        starts = starts_of("qo_indptr", given.qo_indptr, _check.INT32_MAX)
        found = int32("kv_indices", given.kv_indices)
        first = torch.from_numpy(int32("kv_indptr", given.kv_indptr)[: len(starts)])
        where = starts_of("kv_indptr", first, len(found), len(starts))
        table = table_of(where, found)
        lens = check_lens("kv_len_arr", given.kv_len_arr, table, page_size)
        check_pages("kv_len_arr", lens, where, page_size)
    elif given.cum_seq_lens_q is not None:
        starts = starts_of("cum_seq_lens_q", given.cum_seq_lens_q, _check.INT32_MAX)
        table = tables("block_tables", given.block_tables, len(starts) - 1)
        lens = check_lens("seq_lens", given.seq_lens, table, page_size)
    else:
        raise ValueError("qo_indptr: is None, and so is cum_seq_lens_q; one of them says where query tokens start")
    return starts, lens.copy(), table


def _query(q: Any, rank: int, rope: int) -> Tensor:
    """Gives queries [T, H, L + P] of a tensor or of a pair, which is copied unless it lies in one tensor."""
    if isinstance(q, torch.Tensor):
        (q,) = tensors(query=q)
        axes("query", q, T=None, num_heads=None, row=rank + rope)
        return q
    nope, pe = (tensors(**{name: x})[0] for name, x in zip(("q_nope", "q_pe"), items("query", q, 2), strict=True))
    axes("q_nope", nope, T=None, num_heads=None, head_dim_ckv=rank)
    axes("q_pe", pe, T=nope.shape[0], num_heads=nope.shape[1], head_dim_kpe=rope)
    if nope.dtype != pe.dtype:
        raise TypeError(f"q_pe: dtype {pe.dtype}, expected {nope.dtype}, that of q_nope")
    found = joined(nope, pe)
    return torch.cat([nope, pe], -1) if found is None else found


def _pair(first: str, a: Any, second: str, b: Any, name: str, whole: Any) -> Any:
    """Gives what is structured, a tensor or a pair, of either form of an argument."""
    if whole is None:
        for each, x in ((first, a), (second, b)):
            if x is None:
                raise ValueError(f"{each}: is None, and so is {name}")
        return a, b
    if a is not None or b is not None:
        raise ValueError(f"{name}: not beside {first} and {second}")
    return whole


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attends over latent rows in pages, with the last query tokens of each sequence.

    Args:
        float_workspace_buffer: not needed.
        use_cuda_graph: whether plans keep the number of sequences, and write their arrays into the four buffers.
        qo_indptr: int32 [B + 1]; needed with ``use_cuda_graph``; so are the other three.
        kv_indptr: int32 [B + 1].
        kv_indices: int32, at least as many as a plan has pages.
        kv_len_arr: int32 [B].
        backend: not looked at.

    Raises:
        ValueError: a buffer is missing.
    """

    _found: Latents | None = None
    _size: int
    _sm_scale: float

    @interface()
    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        """Makes a wrapper."""
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        super().__init__("NHD", use_cuda_graph, **buffers)

    @interface(**_NAMES)
    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Plans a step, once for all layers.

        Args:
            qo_indptr: int32 [B + 1], where the query tokens of each sequence start.
            kv_indptr: int32, its first B + 1 say where the pages of sequences start in ``kv_indices``.
            kv_indices: int32, pages.
            kv_len_arr: int32 [B], how many keys each sequence has.
            num_heads: H.
            head_dim_ckv: L, elements of a latent.
            head_dim_kpe: P, of the rotated key.
            page_size: tokens of a page.
            causal: whether a token sees the keys up to its own only.
            sm_scale: the factor of q.k, of the heads before absorption: 1 / sqrt(128 + 64) in DeepSeek's models.
            q_data_type: of queries: float32, float16, bfloat16 or float8.
            kv_data_type: of pages: that of queries, of float8 bfloat16, or float8.
            metadata: the first four, or the next three, or None.
            cum_seq_lens_q: int32 [B + 1], where the query tokens of each sequence start.
            block_tables: int32 [B, M], the pages of each sequence.
            seq_lens: int32 [B], how many keys each sequence has.
            output_dtype: of the output: float32, float16, bfloat16 or float8; None: that of queries, of float8
                bfloat16.
            output_scale: not looked at: :meth:`run` has it.
            skip_softmax: False.

        Raises:
            ValueError: an argument is missing or out of range.
            TypeError: an argument is no tensor, or has another dtype.
            NotImplementedError: an argument asks for what is not here.
        """
        given: dict[str, Any] = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "causal": causal,
        }
        given |= {"page_size": page_size, "sm_scale": sm_scale, "q_data_type": q_data_type}
        for name, x in given.items():
            if x is None:
                raise ValueError(f"{name}: is None")
        if metadata is None:
            first = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            metadata = MLAPlanMetadata(*first, cum_seq_lens_q, block_tables, seq_lens)
        _check.instance("metadata", metadata, MLAPlanMetadata)
        size = _check.integer("page_size", page_size, 1)
        dtypes = (q_data_type, q_data_type if kv_data_type is None else kv_data_type, output_dtype)
        sizes = (num_heads, head_dim_ckv, head_dim_kpe)
        found = Latents.planned(*_where(metadata, size), sizes, dtypes, causal)
        scale = _check.number("sm_scale", sm_scale)
        if metadata.qo_indptr is not None:
            self._keep(metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        self._found, self._size, self._sm_scale = found, size, scale

    @interface(**_NAMES | {"query": "q_nope", "kv_cache": "ckv_cache"})
    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q_nope: [T, H, L]: q_nope W_UK of each head.
            q_pe: [T, H, P]. Queries are copied unless both are parts of one tensor.
            ckv_cache: [N, page_size, L].
            kpe_cache: [N, page_size, P]. The pages of the step are copied, in every call, unless both are parts of one
                tensor [N, page_size, L + P], which is read where it lies.
            out: [T, H, L] to write to, or None.
            lse: float32 [T, H] to write to, or None.
            return_lse: whether to return (out, lse).
            return_lse_base_on_e: whether lse is the natural logarithm, not the one to base 2.
            o_scale: what the output is divided by, or None: 1.
            query: [T, H, L + P], or (q_nope, q_pe), in their place.
            kv_cache: [N, page_size, L + P], or (ckv_cache, kpe_cache), in their place.
            ckv_scale: a factor of latents, None: 1.
            kpe_scale: a factor of rotated keys, None: 1. Where the two differ, queries are multiplied by them instead,
                which float8 rows leave in float32.
            sinks: float32 [H], or None: logits without a value.
            bmm1_scale: the factor of q.k in place of ``sm_scale``, or None.
            bmm2_scale: a factor of the output, or None.

        Returns:
            out [T, H, L], or (out, lse).

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
            NotImplementedError: an argument asks for what is not here.
        """
        found = self._found
        if found is None:
            raise RuntimeError("run() before plan()")
        rank, rope = found.rank, found.rope
        parts = _pair("q_nope", q_nope, "q_pe", q_pe, "query", query)
        q = _query(parts, rank, rope)
        if not isinstance(parts, Tensor):
            written(dict(zip(("q_nope", "q_pe"), parts, strict=True)), out=out, lse=lse)  # they may be copied
        cache = _pair("ckv_cache", ckv_cache, "kpe_cache", kpe_cache, "kv_cache", kv_cache)
        axes("query", q, T=int(found.starts[-1]), num_heads=found.num_heads, row=rank + rope)
        if isinstance(cache, torch.Tensor):
            ((rows,), table) = tensors(kv_cache=cache), found.table
            axes("kv_cache", rows, pages=None, page_size=self._size, row=rank + rope)
        else:
            ckv, kpe = items("kv_cache", cache, 2)
            ckv, kpe = tensors(ckv_cache=ckv, kpe_cache=kpe)
            axes("ckv_cache", ckv, pages=None, page_size=self._size, head_dim_ckv=rank)
            axes("kpe_cache", kpe, pages=len(ckv), page_size=self._size, head_dim_kpe=rope)
            if ckv.dtype != kpe.dtype:
                raise TypeError(f"kpe_cache: dtype {kpe.dtype}, expected {ckv.dtype}, that of ckv_cache")
            written({"ckv_cache": ckv, "kpe_cache": kpe}, out=out, lse=lse)  # they may be copied
            rows, table = rows_of(ckv, kpe, found.table, found.lens)
        scales = (
            1.0 if ckv_scale is None else factor("ckv_scale", ckv_scale),
            1.0 if kpe_scale is None else factor("kpe_scale", kpe_scale),
        )
        scale = self._sm_scale if bmm1_scale is None else factor("bmm1_scale", bmm1_scale)
        results = (
            out,
            lse,
            return_lse,
            "basee" if _check.boolean("return_lse_base_on_e", return_lse_base_on_e) else "base2",
        )
        times = 1.0 if bmm2_scale is None else factor("bmm2_scale", bmm2_scale)
        times /= 1.0 if o_scale is None else _check.number("o_scale", o_scale, _check.TINY)
        return found.attend(q, rows, table, scale, scales, sinks, results, times)


@interface(**_NAMES | _ALONE)
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Attends over latent rows in pages with the last query tokens of each sequence, causal.

    Args:
        query: [B, q_len, H, L + P]; with ``cum_seq_lens_q`` [T, H, L + P].
        kv_cache: [N, page_size, L + P] or [N, 1, page_size, L + P], read where it lies.
        kv_lora_rank: L, elements of a latent.
        qk_rope_head_dim: P, of the rotated key.
        block_tables: int32 [B, M], the pages of each sequence. With ``sparse_mla_top_k`` [B, q_len, S] or [T, S]: the
            slots, page * page_size + place, of the keys that each query token attends; -1 ends them.
        uses_shared_paged_kv_idx: whether ``block_tables`` has two axes, else [B, 2, M]: twice the same pages, as
            latents are parts of keys' rows.
        seq_lens: int32 [B], how many keys each sequence has. With ``sparse_mla_top_k`` so many slots of its last query
            token count, one fewer of the token before it, and so on; None: all.
        sparse_mla_top_k: S, or 0 for all keys.
        out: [B, q_len, H, L], or [T, H, L], to write to, or None.
        bmm1_scale: the factor of q.k, with those of queries and rows in it.
        bmm2_scale: the factor of the output.
        sinks: float32 [H], or a list of it, or None.
        lse: float32 [B, q_len, H] or [T, H] to write to, or None.
        return_lse: whether to return (out, lse [T, H]).
        cum_seq_lens_q: int32 [B + 1], or None: where the query tokens of each sequence start.
        return_lse_base: ``base2``, which None means, too, or ``basee``.

    Returns:
        out, of the shape of ``query`` but for its last axis, or (out, lse).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
        NotImplementedError: an argument asks for what is not here.
    """
    query, rows = tensors(query=query, kv_cache=kv_cache)
    rows = rows.squeeze(1) if rows.dim() == 4 and rows.shape[1] == 1 else rows
    axes("kv_cache", rows, pages=None, page_size=None, row=None)
    shape = query.shape[:-1]
    if cum_seq_lens_q is None:
        axes("query", query, batch_size=None, q_len=None, num_heads=None, row=rows.shape[2])
        starts = (np.arange(shape[0] + 1) * shape[1]).astype(np.int32)
        query = query.flatten(0, 1)
    else:
        axes("query", query, T=None, num_heads=None, row=rows.shape[2])
        starts = starts_of("cum_seq_lens_q", cum_seq_lens_q, len(query))
    if starts[-1] != len(query):
        raise ValueError(f"cum_seq_lens_q[{len(starts) - 1}]: {starts[-1]}, query has {len(query)} tokens")
    if _check.integer("sparse_mla_top_k", sparse_mla_top_k, 0):
        rows = rows.reshape(-1, 1, rows.shape[2])
        starts, lens, table = _selected(block_tables, seq_lens, starts)
    else:
        one = _check.boolean("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
        table = _table(block_tables, one, len(starts) - 1)
        lens = check_lens("seq_lens", seq_lens, table, rows.shape[1])
    sizes = (query.shape[1], kv_lora_rank, qk_rope_head_dim)
    found = Latents.planned(starts, lens, table, sizes, (query.dtype, rows.dtype, None), True)
    axes("kv_cache", rows, pages=None, page_size=None, row=found.rank + found.rope)
    to = flat("out", out, (*shape, found.rank), 2), flat("lse", lse, shape, 1)
    base = "base2" if return_lse_base is None else choice("return_lse_base", return_lse_base, "base2", "basee")
    results = (*to, return_lse, base)
    scale, times = factor("bmm1_scale", bmm1_scale), factor("bmm2_scale", bmm2_scale)
    got = found.attend(query, rows, table, scale, (1.0, 1.0), sinks_of("sinks", sinks), results, times)
    new = (got[0] if return_lse else got).view(*shape, found.rank) if out is None else out
    return (new, got[1] if lse is None else lse) if return_lse else new


@interface(**_NAMES | _ALONE)
def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Does what :func:`trtllm_batch_decode_with_kv_cache_mla` does, with the same arguments and errors."""
    what: Any = (query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim)
    where: Any = (block_tables, seq_lens, max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks)
    found: Tensor = trtllm_batch_decode_with_kv_cache_mla(*what, *where)
    return found


def _table(block_tables: Any, one: bool, num_reqs: int) -> Int32:
    """Gives the pages of sequences; one: whether they are said once."""
    table, *others = [tables("block_tables", x, num_reqs) for x in ([block_tables] if one else two(block_tables))]
    if not all(np.array_equal(table, other) for other in others):
        raise RefusedError("block_tables: latents have other pages than keys, expected parts of the same rows")
    return table


def _selected(block_tables: Any, seq_lens: Any, starts: Int32) -> tuple[Int32, Int32, Int32]:
    """Makes every query token a sequence of its own, whose pages are the slots that it selects."""
    (slots,) = tensors(block_tables=block_tables)
    num_tokens = int(starts[-1])
    table = tables("block_tables", slots.reshape(-1, slots.shape[-1]), num_tokens).copy()
    ended = table < 0
    lens = np.where(ended.any(1), ended.argmax(1), table.shape[1])
    if seq_lens is not None:
        most = _check.integers("seq_lens", seq_lens)
        if len(most) != len(starts) - 1:
            raise ValueError(f"seq_lens: {len(most)} numbers, expected {len(starts) - 1}")
        behind = np.repeat(starts[1:], np.diff(starts)) - np.arange(1, num_tokens + 1)  # tokens of the same sequence
        lens = np.clip(np.repeat(most, np.diff(starts)) - behind, 0, lens)
    table[ended] = 0
    return np.arange(num_tokens + 1, dtype=np.int32), lens.astype(np.int32), table
