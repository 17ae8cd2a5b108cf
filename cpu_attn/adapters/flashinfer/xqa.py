# SPDX-License-Identifier: Apache-2.0
"""This module has the calls of FlashInfer's ``xqa``, which write attention of the last query tokens of each sequence
over pages into their ``output``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface, layout_of
from cpu_attn.flashinfer.call import Results
from cpu_attn.flashinfer.trtllm import factor, paged
from cpu_attn.flashinfer.wrapper import flat
from cpu_attn.torch.entry import axes, optional, tensors, written
from cpu_attn.torch.packed import Int32, starts_of

__all__ = ["xqa", "xqa_mla"]

_NAMES = {
    "query": "q",
    "num_heads": "q",
    "num_qo_heads": "q",
    "block_tables": "page_table",
    "block_table": "page_table",
    "out": "output",
    "o_data_type": "output",
    "q_data_type": "q",
    "s_aux": "sinks",
    "cum_seq_lens_q": "q_cu_seq_lens",
    "scale": "q_scale",
    "bmm1_scale": "q_scale",
    "bmm2_scale": "kv_scale",
    "window_left": "sliding_win_size",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "paged_kv_cache": "k_cache",
    "kv_data_type": "k_cache",
    "isa": "CPU_ATTN_ISA",
}


@interface({"page_table"}, **_NAMES)
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Any,
    semaphores: Any,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
) -> None:
    """Attends over pages with the last ``q_seq_len`` query tokens of each sequence.

    Args:
        q: [B, 1, Hq, D]; of several query tokens [B, 1, q_seq_len, Hq, D]; with ``q_cu_seq_lens`` [T, Hq, D].
        k_cache: keys in ``kv_layout``, of the dtype of ``q``, or float8.
        v_cache: values likewise.
        page_table: int32 [B, M], the pages of each sequence.
        seq_lens: int32 or uint32 [B, 1] or [B], how many keys each has.
        output: of the shape of ``q``, written.
        num_kv_heads: Hkv.
        page_size: tokens of a page.
        sinks: float32 [Hkv, Hq / Hkv] or [Hq], or None.
        q_scale: a factor of the logits, besides ``kv_scale`` and 1 / sqrt(D).
        kv_scale: a factor of the logits and of the output.
        sliding_win_size: how many keys a query sees, its own the last of them; 0: all.
        kv_layout: ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D].
        rcp_out_scale: a factor of the output.
        q_seq_len: query tokens of each sequence; with ``q_cu_seq_lens`` the most of one.
        mask: as ``trtllm_batch_decode_with_kv_cache`` has it; None: causal.
        q_cu_seq_lens: int32 [B + 1], or None: where the query tokens of each sequence start.

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
        NotImplementedError: an argument asks for what is not here.
    """
    layout = layout_of(kv_layout)
    q, k_cache, v_cache, seq_lens = tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    (sinks,) = optional(sinks=sinks)
    heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
    rows = {"page_size": _check.integer("page_size", page_size, 1), "num_kv_heads": heads}
    rows = rows if layout == "NHD" else dict(reversed(rows.items()))
    axes("k_cache", k_cache, pages=None, **rows, head_dim=None)
    axes("v_cache", v_cache, pages=len(k_cache), **rows, head_dim=None)
    query, starts = _queries(q, _check.integer("q_seq_len", q_seq_len, 1), q_cu_seq_lens)
    read = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": sinks}
    _check.instance("output", output, Tensor)
    (to,) = written(read, output=output)
    to = flat("output", to, (*q.shape[:-1], v_cache.shape[3]), 2)
    if sinks is not None and sinks.dim() == 2:
        axes("sinks", sinks, num_kv_heads=heads, group=None)
        sinks = sinks.flatten()
    both = factor("kv_scale", kv_scale)
    scale = factor("q_scale", q_scale) * both * max(1, q.shape[-1]) ** -0.5
    scales = (scale, both * _check.number("rcp_out_scale", rcp_out_scale))
    window = _check.integer("sliding_win_size", sliding_win_size, 0)
    where = (page_table, seq_lens.squeeze(1) if seq_lens.dim() == 2 else seq_lens)
    how: Any = (scales, True, window - 1, Results(to), None, sinks, True, mask)
    paged(query, (k_cache, v_cache), layout, starts, *where, *how)


@interface({"page_table"}, **_NAMES)
def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Any,
    semaphores: Any,
    page_size: int,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """Attends over latent rows in pages with the last query token of each sequence.

    ``q`` is [B, 1, Hq, D], ``k_cache`` [N, page_size, 1, D] and ``v_cache`` the same rows or others, the first Dv
    elements of which are values, where ``output`` is [B, 1, Hq, Dv]. ``q_scale`` times ``kv_scale`` is the whole factor
    of the logits. Other arguments and errors are those of :func:`xqa`.
    """
    v_cache, output = tensors(v_cache=v_cache, output=output)
    values = output.shape[-1] if output.dim() else 0
    if v_cache.dim() != 4 or v_cache.shape[3] < values:
        raise ValueError(f"v_cache: shape {tuple(v_cache.shape)}, expected [N, page_size, 1, at least {values}]")
    size = q.shape[-1] if isinstance(q, Tensor) and q.dim() else 1
    scale = factor("q_scale", q_scale) * max(1, size) ** 0.5
    given = (q, k_cache, v_cache[..., :values], page_table, seq_lens, output, workspace_buffer, semaphores)
    xqa(*given, 1, page_size, None, scale, kv_scale)


def _queries(q: Tensor, size: int, q_cu_seq_lens: Any) -> tuple[Tensor, Int32]:
    """Gives query tokens [T, Hq, D], and where those of each sequence start."""
    if q_cu_seq_lens is not None:
        axes("q", q, T=None, num_heads=None, head_dim=None)
        return q, starts_of("q_cu_seq_lens", q_cu_seq_lens, len(q))
    more = {} if size == 1 and q.dim() == 4 else {"q_seq_len": size}
    axes("q", q, batch_size=None, beam_width=1, **more, num_heads=None, head_dim=None)
    return q.flatten(0, -3), (np.arange(len(q) + 1) * size).astype(np.int32)
