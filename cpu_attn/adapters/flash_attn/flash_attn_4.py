# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of flash-attn 4, which it calls ``flash_attn.cute``. They are those of flash-attn 2.8
but for these arguments:

- q, k, v: float8, too. The output is then bfloat16.
- learnable_sink: [Hq] of float32, float16 or bfloat16, or None: one logit more for each head in the softmax, which has
  no value. lse includes it.
- qv: as in :mod:`cpu_attn.flash_attn.flash_attn_3`. q and k may then be None, and count for nothing where k is v and Dv
  is 512. lse is [B, S_q, Hq] or [T_q, Hq] with qv, and also without where k is v and Dv is 512.
- gather_kv_indices: int32 [B, S_q, n] or [T_q, n], which keys of its sequence a token sees, of those that masks leave
  it, in any order and none twice; others, as -1, count for nothing. None: all keys.
- window_size: a side of None is open, and so are both if their sum is negative. Otherwise a token at place p sees the
  keys from p - left to p + right, also where one side is negative: (None, -1) leaves it those before its own.
- seqused_q, seqused_k: as in :mod:`cpu_attn.flash_attn.flash_attn_3`.
- score_mod, mask_mod, block_sparse_tensors and what goes with them: None. NotImplementedError is raised for others.
- num_splits, pack_gqa, deterministic, scheduler_metadata and the like are not looked at: the bits are always the same.

They return (out, lse), lse being None unless return_lse is True. A row that sees no key gives 0, and as its lse the
sink, or -inf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flash_attn import flash_attn_3
from cpu_attn.flash_attn.call import NAMES, entry, logits_of
from cpu_attn.flash_attn.flash_attn_3 import with_qv
from cpu_attn.flash_attn.sequences import Where, attend
from cpu_attn.torch.entry import RefusedError, optional, tensors

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

_NAMED = NAMES | {"with_lse": "return_lse", "s_aux": "learnable_sink", "block_table": "page_table"}
_REFUSED = {
    "score_mod": "no kernel is compiled at run time",
    "score_mod_bwd": "there is no backward pass",
    "mask_mod": "no kernel is compiled at run time",
    "aux_tensors": "no kernel is compiled at run time",
    "aux_scalars": "no kernel is compiled at run time",
    "block_sparse_tensors": "cpu_attn.attention_with_kv_cache has selected_blocks",
    "block_sparse_tensors_bwd": "there is no backward pass",
    "gather_bwd_token_chunk": "there is no backward pass",
}


def _refuse(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise RefusedError(f"{name}: expected None; {_REFUSED[name]}")


def _window(causal: Any, window_size: Any) -> tuple[bool, tuple[int, int], tuple[int, int]]:
    """Gives causal and window_size as logits_of takes them, and ``hidden`` of attend, which moves the place of a token
    by as much as a side is negative."""
    sides = _check.sequence("window_size", window_size)
    if len(sides) != 2:
        raise ValueError(f"window_size: expected (left, right), got {len(sides)} values")
    left, right = (x if x is None else _check.integer(f"window_size[{i}]", x, -(2**31)) for i, x in enumerate(sides))
    causal = _check.boolean("causal", causal)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return causal, (-1, -1), (0, 0)
    tokens, keys = (0 if x is None else min(max(0, -x), _check.INT32_MAX) for x in (left, right))
    shift = tokens - keys
    window = (-1 if left is None else left + shift, -1 if right is None else right - shift)
    return causal, window, (tokens, keys)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    qv: Any,
    gather_kv_indices: Any,
    at: Where,
    window: tuple[bool, tuple[int, int], tuple[int, int]],
    softmax_scale: float | None,
    softcap: float,
    learnable_sink: Any,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    (v,), shared = tensors(v=v), k is v
    latent = qv is not None
    if shared and v.dim() and v.shape[-1] == 512:
        q, k, qv, latent = q if qv is None else qv, v, None, True
    elif q is None and k is None and latent:
        q, k, qv = qv, v, None
    q, k = tensors(q=q, k=k)
    (selected,) = optional(gather_kv_indices=gather_kv_indices)
    q, k = with_qv(q, k, v, qv)
    causal, sides, hidden = window
    logits = logits_of(0.0, softmax_scale, causal, sides, softcap, None, return_lse, 0, learnable_sink)
    out, lse = attend(q, k, v, replace(logits, unseen=-torch.inf), at, hidden=hidden, selected=selected)
    return out, lse.transpose(-1, -2).contiguous() if latent and lse is not None else lse


@entry(**_NAMED, query="q", key_cache="k", value_cache="v")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gives (out [B, S_q, Hq, Dv], lse [B, Hq, S_q] or None) of :func:`cpu_attn.flash_attn.flash_attn_func`."""
    _refuse(score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    _refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    _refuse(block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_token_chunk=gather_bwd_token_chunk)
    options = (_window(causal, window_size), softmax_scale, softcap, learnable_sink, return_lse)
    return _attend(q, k, v, qv, gather_kv_indices, Where(), *options)


@entry(**_NAMED, query="q", key="k", value="v", key_cache="k", value_cache="v", cu_seq_k="cu_seqlens_k")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gives (out [T_q, Hq, Dv], lse [Hq, T_q] or None) of :func:`cpu_attn.flash_attn.flash_attn_varlen_func`;
    page_table is its block_table. Queries without cu_seqlens_q are dense, as :func:`flash_attn_func` has them, and so
    are keys and values without cu_seqlens_k and page_table. A page_table without seqused_k is full."""
    _refuse(score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    _refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    _refuse(gather_bwd_token_chunk=gather_bwd_token_chunk)
    named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options = (_window(causal, window_size), softmax_scale, softcap, learnable_sink, return_lse)
    return _attend(q, k, v, qv, gather_kv_indices, Where(*optional(**named, page_table=page_table)), *options)


@entry(outs="out_partial", lses="lse_partial")
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gives (out, lse or None) of :func:`cpu_attn.flash_attn.flash_attn_3.flash_attn_combine`. cu_seqlens, seqused and
    virtual_batch_idx are not looked at: all rows are merged."""
    merged, lse = flash_attn_3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> Tensor:
    """Gives an empty int32 tensor: calls here plan for themselves, and do not look at scheduler_metadata. Nothing is
    looked at."""
    return torch.zeros(0, dtype=torch.int32)
