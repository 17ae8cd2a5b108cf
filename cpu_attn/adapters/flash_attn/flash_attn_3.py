# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of flash-attn 3, which it calls ``flash_attn_interface``. They are those of flash-attn
2.8 but for these arguments:

- q, k, v: float8, too. The output is then bfloat16. q_descale, k_descale, v_descale: float32 [B, Hkv], what these are
  multiplied with, or None; NotImplementedError is raised for them beside other dtypes.
- qv: [..., Hq, Dv] or None. q.k gets qv.v added, as MLA with absorbed weights has it, and softmax_scale is 1 / sqrt(D +
  Dv) unless said. Queries are copied; so are keys and values, unless they lie beside one another in one tensor, values
  first.
- seqused_q, seqused_k: int32 [B], how many tokens of each sequence count, or None for all. Others give 0, and the last
  one that counts stands at the last key that counts.
- attention_chunk: so many places are a chunk, and a query sees keys of its own chunk only; 0: of all.
- num_splits, pack_gqa, sm_margin, deterministic and scheduler_metadata are not looked at: the bits are always the same.

A row that sees no key gives 0, and -inf as its lse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn.flash_attn.cache import CACHED, New, Places, cached
from cpu_attn.flash_attn.call import NAMES, Logits, entry, logits_of
from cpu_attn.flash_attn.flash_attn_interface import CALLED, STATES
from cpu_attn.flash_attn.sequences import FLOAT8, Descales, Where, attend
from cpu_attn.torch.entry import RefusedError, axes, optional, tensors

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def with_qv(q: Any, k: Any, v: Any, qv: Any) -> tuple[Tensor, Tensor]:
    """Gives queries and keys whose product is q.k + qv.v."""
    (qv,) = optional(qv=qv)
    if qv is None:
        return q, k
    q, k, v = tensors(q=q, k=k, v=v)
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"qv: shape {tuple(qv.shape)}, expected {(*q.shape[:-1], v.shape[-1])}")
    if qv.dtype != q.dtype or qv.dtype in FLOAT8:
        raise TypeError(f"qv: dtype {qv.dtype}, q has {q.dtype}; expected the same, of 16 or 32 bits")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v: shape {tuple(v.shape)}, expected {(*k.shape[:-1], v.shape[-1])}")
    beside = v.data_ptr() + v.shape[-1] * v.element_size() == k.data_ptr() and v.dtype == k.dtype
    if beside and k.stride() == v.stride() and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
        key = v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride(), v.storage_offset())
    else:
        key = torch.cat([v, k], -1)
    return torch.cat([qv, q], -1), key


def _logits(
    scale: float | None, causal: bool, window_size: Any, softcap: float, attention_chunk: int, with_lse: bool
) -> Logits:
    given = logits_of(0.0, scale, causal, window_size, softcap, None, with_lse, 0, None, attention_chunk)
    return replace(given, unseen=-torch.inf)


@entry(**NAMES, query="q", key_cache="k", value_cache="v")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Gives out of :func:`cpu_attn.flash_attn.flash_attn_func`, [B, S_q, Hq, Dv], or with return_attn_probs (out,
    softmax_lse [B, Hq, S_q])."""
    q, k, v = tensors(q=q, k=k, v=v)
    q, k = with_qv(q, k, v, qv)
    logits = _logits(softmax_scale, causal, window_size, softcap, attention_chunk, return_attn_probs)
    found = attend(q, k, v, logits, Where(), descales=Descales(q_descale, k_descale, v_descale))
    return found if return_attn_probs else found[0]


@entry(**NAMES, **dict.fromkeys(("q", *STATES), "qkv"))
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Gives what :func:`flash_attn_func` gives of q, k and v that are parts of qkv [B, S, 3, H, D], without a copy, or
    of [B, S, Hq + 2 Hkv, D] with num_heads_q = Hq."""
    (qkv,) = tensors(qkv=qkv)
    if qkv.dim() == 4 and num_heads_q is not None:
        heads = _check.integer("num_heads_q", num_heads_q, 1, qkv.shape[2])
        if (qkv.shape[2] - heads) % 2:
            raise ValueError(f"qkv: {qkv.shape[2]} heads, of which {heads} of queries leave an odd number")
        q, k, v = qkv.split([heads, (qkv.shape[2] - heads) // 2, (qkv.shape[2] - heads) // 2], 2)
    else:
        axes("qkv", qkv, batch_size=None, seqlen=None, three=3, num_heads=None, head_size=None)
        q, k, v = qkv.unbind(2)
    logits = _logits(softmax_scale, causal, window_size, softcap, attention_chunk, return_attn_probs)
    found = attend(q, k, v, logits, Where(), descales=Descales(q_descale, k_descale, v_descale))
    return found if return_attn_probs else found[0]


@entry(**NAMES, **CALLED, query="q", key="k", value="v", key_cache="k", value_cache="v")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Gives out of :func:`cpu_attn.flash_attn.flash_attn_varlen_func`, [T_q, Hq, Dv], or with return_attn_probs (out,
    softmax_lse [Hq, T_q]). Without cu_seqlens_q queries are dense, as :func:`flash_attn_func` has them, and so are keys
    and values without cu_seqlens_k."""
    q, k, v = tensors(q=q, k=k, v=v)
    named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    q, k = with_qv(q, k, v, qv)
    logits = _logits(softmax_scale, causal, window_size, softcap, attention_chunk, return_attn_probs)
    found = attend(q, k, v, logits, Where(*optional(**named)), descales=Descales(q_descale, k_descale, v_descale))
    return found if return_attn_probs else found[0]


@entry(**CACHED, block_table="page_table")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Does what :func:`cpu_attn.flash_attn.flash_attn_with_kvcache` does; page_table is its block_table.

    With cu_seqlens_q, int32 [B + 1], q is packed [T_q, Hq, D], and softmax_lse is [Hq, T_q]; with cu_seqlens_k_new k
    and v are [T_new, Hkv, D]. rotary_seqlens: int32 [B], the row of rotary_cos by which the first new token of each
    sequence turns, and its first query; None: cache_seqlens. qv is for calls that append nothing, and copies the caches
    unless they are parts of one tensor.
    """
    if qv is not None and k is not None:
        raise RefusedError("qv: expected None where k is given; append before")
    q, k_cache, v_cache = tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    q, k_cache = with_qv(q, k_cache, v_cache, qv)
    at = Places(cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    logits = _logits(softmax_scale, causal, window_size, softcap, attention_chunk, return_softmax_lse)
    new = New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new, rotary_seqlens)
    return cached(q, k_cache, v_cache, new, at, logits, cu_seqlens_q, Descales(q_descale, k_descale, v_descale))


@entry(outs="out_partial", lses="lse_partial")
def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Any = None, out_dtype: Any = None) -> Any:
    """Merges attention over several sets of keys.

    Args:
        out_partial: [sets, B, S, H, D] or [sets, T, H, D] of float32, float16 or bfloat16.
        lse_partial: float32 [sets, B, S, H] or [sets, T, H], natural logarithms.
        out: [B, S, H, D] or [T, H, D] to write to, or None.
        out_dtype: of the output; None: that of ``out``, else of ``out_partial``.

    Returns:
        (out, lse), lse float32 [B, S, H] or [T, H].

    Raises:
        ValueError: a shape does not fit.
        TypeError: an argument is no tensor, or has another dtype.

    Maths: arXiv:2501.01005; see :func:`cpu_attn.merge_states`.
    """
    parts, logs = tensors(out_partial=out_partial, lse_partial=lse_partial)
    (to,) = optional(out=out)
    if parts.dim() not in (4, 5):
        raise ValueError(f"out_partial: {parts.dim()} axes, expected [sets, B, S, H, D] or [sets, T, H, D]")
    shape = parts.shape[1:]
    axes("lse_partial", logs, **dict(zip(("sets", "a", "b", "c"), parts.shape[:-1], strict=False)))
    if to is not None and to.shape != shape:
        raise ValueError(f"out: shape {tuple(to.shape)}, expected {tuple(shape)}")
    kind = out_dtype or (parts.dtype if to is None else to.dtype)
    _check.instance("out_dtype", kind, torch.dtype)
    flat = parts.float().reshape(len(parts), -1, *shape[-2:])
    merged, lse = ops.merge_states([*flat], [x.T.contiguous() for x in logs.float().reshape(len(parts), -1, shape[-2])])
    merged, lse = merged.reshape(shape).to(kind), lse.T.reshape(shape[:-1]).contiguous()
    if to is None:
        return merged, lse
    to.copy_(merged)
    return out, lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Gives an empty int32 tensor: calls here plan for themselves, and do not look at scheduler_metadata. Nothing is
    looked at."""
    return torch.zeros(0, dtype=torch.int32)
