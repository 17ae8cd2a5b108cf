# SPDX-License-Identifier: Apache-2.0
"""This module has the calls that serving engines make without a wrapper. They bear the name of NVIDIA's kernels;
arguments of these that mean nothing on a CPU are refused or not looked at.

bmm1_scale is the whole factor of the logits, 1 / sqrt(D) in it, and bmm2_scale that of the output. lse is in base 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface, items, layout_of
from cpu_attn.flashinfer.call import Results, Sequences, dtype_of, fp8_name, logits_of
from cpu_attn.flashinfer.masks import draft_bias
from cpu_attn.flashinfer.wrapper import check_lens, pair_of, tables
from cpu_attn.torch.entry import RefusedError, axes, optional, tensors
from cpu_attn.torch.packed import Int32, packed, starts_of

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
    "xqa_batch_decode_with_kv_cache",
]

_NAMES = {
    "s_aux": "sinks",
    "output": "out",
    "isa": "CPU_ATTN_ISA",
    "num_heads": "query",
    "num_qo_heads": "query",
    "q": "query",
    "q_data_type": "query",
    "scale": "bmm1_scale",
    "block_table": "block_tables",
    "o_data_type": "out",
    **dict.fromkeys(("key_cache", "value_cache", "paged_kv_cache", "num_kv_heads", "kv_data_type"), "kv_cache"),
}


def factor(name: str, x: Any) -> float:
    """Gives a number, which may be in a tensor."""
    (x,) = tensors(**{name: x}) if isinstance(x, torch.Tensor) else (x,)
    return _check.number(name, x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x)


def sinks_of(name: str, sinks: Any) -> Any:
    """Gives the sinks, which may be a list of one tensor."""
    return items(name, sinks, 1)[0] if isinstance(sinks, (list, tuple)) else sinks


def two(block_tables: Any) -> list[Tensor]:
    """Gives the tables of keys and of values in [B, 2, M]."""
    (x,) = tensors(block_tables=block_tables)
    axes("block_tables", x, batch_size=None, two=2, pages=None)
    return [*x.unbind(1)]


def _apart(key: Tensor, value: Tensor, keys: Int32, values: Int32, counts: Int32) -> tuple[Tensor, Tensor, Int32]:
    """Gives keys and values without the first pages, so that those of a page have one index, the lower one, and the
    table of that. counts: how many pages of each sequence count."""
    needed = np.arange(keys.shape[1]) < counts[:, None]
    distances = np.unique(values[needed].astype(np.int64) - keys[needed])
    if len(distances) > 1:
        raise RefusedError(
            f"block_tables: values lie {distances[0]} to {distances[-1]} pages behind their keys, expected one distance"
        )
    distance = int(distances[0]) if len(distances) else 0
    key, value = key[max(0, -distance) :], value[max(0, distance) :]
    shared = min(len(key), len(value))
    return key[:shared], value[:shared], np.minimum(keys, values)


def paged(
    query: Any,
    kv_cache: Any,
    layout: Any,
    starts: Int32,
    block_tables: Any,
    seq_lens: Any,
    scales: tuple[Any, Any],
    causal: Any,
    window_left: Any,
    results: Results,
    out_dtype: Any,
    sinks: Any,
    uses_shared_paged_kv_idx: Any,
    mask: Any = None,
) -> Any:
    """Attends over pages with the last tokens of each sequence."""
    layout = layout_of(layout)
    (query,) = tensors(query=query)
    axes("query", query, T=None, num_heads=None, head_dim=None)
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    key, value = pair_of(kv_cache, layout, None)
    size, heads = (key.shape[1], key.shape[2]) if layout == "NHD" else (key.shape[2], key.shape[1])
    one = _check.boolean("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
    table, *others = [
        tables("block_tables", x, len(starts) - 1) for x in ([block_tables] if one else two(block_tables))
    ]
    lens = check_lens("seq_lens", seq_lens, table, size)
    for other in others:
        key, value, table = _apart(key, value, table, other, -(-lens // size))
    (out,) = optional(out=results.out)
    o_dtype = query.dtype if out is None else out.dtype
    if out_dtype is not None:
        o_dtype = dtype_of("out_dtype", out_dtype)
    dtypes, sizes = (query.dtype, key.dtype, o_dtype), (query.shape[2], value.shape[3])
    step = Sequences(starts, lens, (query.shape[1], heads), sizes, dtypes)
    bias = draft_bias(mask, starts, lens)
    causal = _check.boolean("causal", causal) and bias is None
    logits = logits_of(factor("bmm1_scale", scales[0]), causal, window_left, None)
    factors = step.factors(None, None, factor("bmm2_scale", scales[1]))
    parts = [(0, len(lens), key, value, table)]
    return step.attend(query, layout, parts, logits, factors, results, bias, sinks_of("sinks", sinks))


@interface(**_NAMES)
def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: Any = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
) -> Any:
    """Attends over pages with the last ``q_len_per_req`` query tokens of each sequence.

    Args:
        query: [T, Hq, D].
        kv_cache: (keys, values) in ``kv_layout``, or one tensor [N, 2, ...] of both, or [N, 1, ...] of keys that are
            the values, too.
        block_tables: int32 [B, M], the pages of each sequence; or [B, 2, M], those of keys and of values, which lie one
            distance apart.
        seq_lens: int32 [B], how many keys each has.
        bmm1_scale: the factor of q.k, with those of queries and keys in it.
        bmm1_scale_log2: float32, one number, or None: in place of ``bmm1_scale``, which is it * ln(2).
        bmm2_scale: the factor of the output.
        window_left: how many keys before its own a query sees; -1: all.
        out: [T, Hq, Dv] to write to, or None.
        out_dtype: of the output: float32, float16, bfloat16 or float8; None: that of ``out``, else of the queries.
        o_scale: not looked at: as in FlashInfer, callers have divided ``bmm2_scale`` by it.
        mask: uint16 or uint32 [B, q_len, words] or [T, words], or None: which query tokens of its sequence each of them
            sees, in place of causal, lowest bit first. Unless it is causal, too, it is a bias of B * the most query
            tokens * the most keys numbers.
        sinks: float32 [Hq], or a list of it, or None.
        kv_layout: ``HND`` or ``NHD``.
        q_len_per_req: query tokens of each sequence.
        cum_seq_lens_q: int32 [B + 1], or None: where the query tokens of each sequence start, in place of
            ``q_len_per_req``.
        uses_shared_paged_kv_idx: whether ``block_tables`` has two axes, else three.
        lse: float32 [T, Hq] to write to, or None.
        return_lse: whether to return (out, lse).

    Returns:
        out, or (out, lse).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
        NotImplementedError: an argument asks for what is not here.
    """
    if cum_seq_lens_q is None:
        size = 1 if q_len_per_req is None else _check.integer("q_len_per_req", q_len_per_req, 1)
        starts = (np.arange(len(_check.sequence("seq_lens", seq_lens)) + 1) * size).astype(np.int32)
    else:
        starts = starts_of("cum_seq_lens_q", cum_seq_lens_q, _check.INT32_MAX)
    where, results = (block_tables, seq_lens), Results(out, lse, return_lse)
    if bmm1_scale_log2 is not None:
        bmm1_scale = factor("bmm1_scale_log2", bmm1_scale_log2) * math.log(2)
    how: Any = ((bmm1_scale, bmm2_scale), True, window_left, results, out_dtype, sinks, uses_shared_paged_kv_idx, mask)
    return paged(query, kv_cache, kv_layout, starts, *where, *how)


@interface(**_NAMES)
def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """Attends over pages with the last ``q_len_per_req`` query tokens of each sequence, or with those that
    ``q_cu_seq_lens``, int32 [B + 1], says, as :func:`trtllm_batch_decode_with_kv_cache` does, but for the default of
    ``kv_layout``. Other arguments and errors are the same."""
    where: Any = (query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len)
    how: Any = (bmm1_scale, bmm2_scale, window_left, out, None, None, None, sinks, kv_layout, enable_pdl)
    drafts: Any = ("auto", q_len_per_req, o_scale, mask, None, q_cu_seq_lens)
    found: Tensor = trtllm_batch_decode_with_kv_cache(*where, *how, *drafts)
    return found


@interface(**_NAMES)
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Any:
    """Attends over pages with the last query tokens of each sequence, as ``trtllm_batch_decode_with_kv_cache`` does.
    ``cum_seq_lens_q``, int32 [B + 1], says where they start, and ``causal`` whether each sees the keys up to its own
    only."""
    starts = starts_of("cum_seq_lens_q", cum_seq_lens_q, _check.INT32_MAX)
    where, results = (block_tables, seq_lens), Results(out, lse, return_lse)
    how: Any = ((bmm1_scale, bmm2_scale), causal, window_left, results, out_dtype, sinks, uses_shared_paged_kv_idx)
    return paged(query, kv_cache, kv_layout, starts, *where, *how)


@interface(
    {"is_causal", "o_sf_scale"},
    **_NAMES | {"key_cache": "key", "value_cache": "value", "num_kv_heads": "key", "kv_data_type": "key"},
)
def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Any,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: Any = (None, None, None, None),
    num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:
    """Attends over keys that lie packed, one sequence after another, with head sizes of their own for keys and values.

    ``query`` [T, Hq, D], ``key`` [nnz, Hkv, D] and ``value`` [nnz, Hkv, Dv] start where ``cum_seq_lens_q`` and
    ``cum_seq_lens_kv`` say, int32 [B + 1]. ``value`` may be float8 where ``key`` is not, and is copied then. The output
    has the dtype of ``out``, else of the queries; of float8 it is bfloat16. ``o_sf_scale`` is not looked at. Other
    arguments and errors are those of ``trtllm_batch_context_with_kv_cache``.
    """
    query, key, value = tensors(query=query, key=key, value=value)
    axes("query", query, T=None, num_heads=None, head_dim=None)
    axes("key", key, nnz=None, num_kv_heads=None, head_dim=query.shape[2])
    axes("value", value, nnz=len(key), num_kv_heads=key.shape[1], head_dim_vo=None)
    starts = starts_of("cum_seq_lens_q", cum_seq_lens_q, _check.INT32_MAX)
    kv_starts = starts_of("cum_seq_lens_kv", cum_seq_lens_kv, len(key), len(starts))
    (to,) = optional(out=out)
    fp8 = query.dtype.itemsize == 1
    o_dtype = to.dtype if to is not None else torch.bfloat16 if fp8 else query.dtype
    dtypes, sizes = (query.dtype, key.dtype, o_dtype), (query.shape[2], value.shape[2])
    if fp8_name(value.dtype) and not fp8_name(key.dtype):
        value = value.to(key.dtype)
    step = Sequences(starts, np.diff(kv_starts), (query.shape[1], key.shape[1]), sizes, dtypes)
    logits = logits_of(factor("bmm1_scale", bmm1_scale), is_causal, window_left, None)
    factors = step.factors(None, None, factor("bmm2_scale", bmm2_scale))
    parts = [*packed(key, value, kv_starts, step.lens)]
    results, sinks = Results(out, lse, return_lse), sinks_of("attention_sinks", attention_sinks)
    return step.attend(query, "NHD", parts, logits, factors, results, sinks=sinks)
