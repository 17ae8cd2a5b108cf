# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of flash-attn 2.8. Each is one call of cpu-attn, or one for each part of it that lies
by itself.

Symbols: B sequences of S tokens, T tokens of packed sequences, Hq and Hkv heads of D (of V: Dv, which may differ).

All of them:

- Tensors are float32, float16, bfloat16 or float8, of one dtype, on the CPU; any head size; Hkv divides Hq. Of float8
  the output is bfloat16, computed in float32 over keys and values that are read where they lie.
- causal and window_size (left, right; negative: open) count from a token's place among the keys, the last query token's
  being that of the last key. softmax_scale: 1 / sqrt(D) unless said. softcap: 0 is off.
- alibi_slopes: float32 [Hq] or [B, Hq], adds -slope * distance, the distance between the places of the query token and
  of the key.
- dropout_p: 0. deterministic: accepted, every call is.
- return_attn_probs, return_softmax_lse: lse float32, [B, Hq, S] or, of packed sequences, [Hq, T]. It holds ALiBi as
  above, where flash-attn's causal kernels leave out what all keys of a row have in common. S_dmask is empty, as it is
  in flash-attn without dropout.
- A row that sees no key gives 0, and +inf as its lse, as in flash-attn 2.8.
- K and V are read where they lie, whatever their strides. They are copied where their last axis is not dense, but for
  pages and caches, whose last axis must be; queries also where they lie by heads ([B, H, S, D].transpose(1, 2) with
  more than one sequence).
- ValueError, which is a RuntimeError, too, as flash-attn raises, or TypeError is raised for what does not fit, before
  anything is written, and for tensors that require grad while grad mode is on: there is no backward pass. torch.compile
  breaks its graph at a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_attn.flash_attn.cache import flash_attn_with_kvcache
from cpu_attn.flash_attn.call import NAMES, entry, logits_of, returned
from cpu_attn.flash_attn.sequences import Where, attend
from cpu_attn.torch.entry import RefusedError, axes, optional, tensors

__all__ = [
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# Errors use these names for the arguments of which packed tensors are made, and for where packed sequences start.
STATES = ("query", "key", "value", "k", "v", "key_cache", "value_cache")
CALLED = {"cu_seq_k": "cu_seqlens_k", "seq_lens": "cu_seqlens_k", "query_start_loc": "cu_seqlens_q"}

# ---- sequences of one length ----


def dense(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    return returned(*attend(query, key, value, logits_of(*options), Where()))


@entry(**NAMES, query="q", key_cache="k", value_cache="v")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of sequences of one length over keys of one length.

    Args:
        q: [B, S_q, Hq, D].
        k: [B, S_k, Hkv, D].
        v: [B, S_k, Hkv, Dv].
        dropout_p: 0.
        softmax_scale: the factor of q.k; 1 / sqrt(D) unless said.
        causal: whether a token sees the keys up to its own place only. The last query stands at the last key.
        window_size: (left, right), so many keys to each side; negative: all.
        softcap: 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq], or None.
        deterministic: accepted; every call is.
        return_attn_probs: whether to return more than ``out``.

    Returns:
        out [B, S_q, Hq, Dv]; with ``return_attn_probs`` (out, softmax_lse [B, Hq, S_q], an empty S_dmask).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return dense(*tensors(q=q, k=k, v=v), *options)


@entry(**NAMES, **dict.fromkeys(("q", *STATES), "qkv"))
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes :func:`flash_attn_func` of q, k and v that are parts of qkv [B, S, 3, H, D], without a copy."""
    (qkv,) = tensors(qkv=qkv)
    axes("qkv", qkv, batch_size=None, seqlen=None, three=3, num_heads=None, head_size=None)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return dense(*qkv.unbind(2), *options)


@entry(**NAMES, **dict.fromkeys(STATES, "kv") | {"query": "q"})
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes :func:`flash_attn_func` of k and v that are parts of kv [B, S_k, 2, Hkv, D], without a copy."""
    q, kv = tensors(q=q, kv=kv)
    axes("kv", kv, batch_size=None, seqlen_k=None, two=2, num_kv_heads=None, head_size=None)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return dense(q, *kv.unbind(2), *options)


# ---- packed sequences ----


def varlen(query: Tensor, key: Tensor, value: Tensor, at: Where, *options: Any) -> Any:
    if at.cu_seqlens_k is None and (at.block_table is None or at.seqused_k is None):
        raise ValueError("cu_seqlens_k: is None")
    return returned(*attend(query, key, value, logits_of(*options), at))


@entry(**NAMES, **CALLED, query="q", key="k", value="v", key_cache="k", value_cache="v")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
) -> Any:
    """Computes attention of packed sequences, over packed keys or over pages.

    Args:
        q: [T_q, Hq, D], one sequence after another. Rows past the last sequence give 0.
        k: [T_k, Hkv, D]; with ``block_table`` pages [N, page_block_size, Hkv, D] of any size.
        v: [T_k, Hkv, Dv], or pages likewise.
        cu_seqlens_q: int32 [B + 1], where the queries of each sequence start.
        cu_seqlens_k: int32 [B + 1], where the keys of each sequence start; with ``block_table`` only their lengths
            count, and with ``seqused_k`` it may then be None.
        max_seqlen_q: not looked at.
        max_seqlen_k: not looked at.
        dropout_p: 0.
        softmax_scale: the factor of q.k; 1 / sqrt(D) unless said.
        causal: whether a token sees the keys up to its own place only. The last query stands at the last key.
        window_size: (left, right), so many keys to each side; negative: all.
        softcap: 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq], or None.
        deterministic: accepted; every call is.
        return_attn_probs: whether to return more than ``out``.
        block_table: int32 [B, M], or None: the pages of each sequence.
        seqused_k: int32 [B], or None: how many of a sequence's keys count, as vLLM's flash-attn has it.

    Returns:
        out [T_q, Hq, Dv]; with ``return_attn_probs`` (out, softmax_lse [Hq, T_q], an empty S_dmask).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    q, k, v, cu_seqlens_q = tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    cu_seqlens_k, seqused_k, block_table = optional(
        cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=block_table
    )
    at = Where(cu_seqlens_q, cu_seqlens_k, seqused_k=seqused_k, block_table=block_table)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return varlen(q, k, v, at, *options)


@entry(**NAMES, **dict.fromkeys(("q", *STATES), "qkv") | dict.fromkeys((*CALLED, *CALLED.values()), "cu_seqlens"))
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes :func:`flash_attn_varlen_func` of q, k and v that are parts of qkv [T, 3, H, D], without a copy."""
    qkv, cu_seqlens = tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    axes("qkv", qkv, T=None, three=3, num_heads=None, head_size=None)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return varlen(*qkv.unbind(1), Where(cu_seqlens, cu_seqlens), *options)


@entry(**NAMES, **dict.fromkeys(STATES, "kv") | CALLED | {"query": "q"})
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes :func:`flash_attn_varlen_func` of k and v that are parts of kv [T_k, 2, Hkv, D], without a copy."""
    q, kv, cu_seqlens_q, cu_seqlens_k = tensors(q=q, kv=kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    axes("kv", kv, T_k=None, two=2, num_kv_heads=None, head_size=None)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return varlen(q, *kv.unbind(1), Where(cu_seqlens_q, cu_seqlens_k), *options)


# ---- what others import, though it is not public ----


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gives (out, softmax_lse, an empty S_dmask, rng_state) of :func:`flash_attn_func`. No dropout reads rng_state,
    int64 [2], which is 0; return_softmax is not looked at."""
    window = (window_size_left, window_size_right)
    out = flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, True)
    return (*out, torch.zeros(2, dtype=torch.int64))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gives (out, softmax_lse, an empty S_dmask, rng_state) of :func:`flash_attn_varlen_func`, as
    :func:`_flash_attn_forward` does. leftpad_k is None, else NotImplementedError; zero_tensors and num_splits are not
    looked at."""
    if leftpad_k is not None:
        raise RefusedError("leftpad_k: expected None; cu_seqlens_k says where keys start")
    where = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    out = flash_attn_varlen_func(*where, *options, False, True, block_table, seqused_k=seqused_k)
    return (*out, torch.zeros(2, dtype=torch.int64))
