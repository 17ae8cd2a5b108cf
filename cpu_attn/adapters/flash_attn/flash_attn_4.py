# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of flash-attn 4, which it calls ``flash_attn.cute``. They are those of flash-attn 2.8
but for these arguments:

- learnable_sink: [Hq] of float32, float16 or bfloat16, or None: one logit more for each head in the softmax, which has
  no value. lse includes it.
- qv: as in :mod:`cpu_attn.flash_attn.flash_attn_3`.
- window_size: a side of None is open.
- score_mod, mask_mod, block_sparse_tensors, gather_kv_indices and what goes with them, seqused_q: None.
  NotImplementedError is raised for others.
- num_splits, pack_gqa, deterministic, scheduler_metadata and the like are not looked at: the bits are always the same.

They return (out, lse), lse being None unless return_lse is True.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpu_attn import _check
from cpu_attn.flash_attn.call import NAMES, entry
from cpu_attn.flash_attn.flash_attn_3 import with_qv
from cpu_attn.flash_attn.flash_attn_interface import dense, varlen
from cpu_attn.torch.entry import RefusedError, optional, tensors

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

_NAMED = NAMES | {"with_lse": "return_lse", "s_aux": "learnable_sink", "block_table": "page_table"}
_REFUSED = {
    "gather_kv_indices": "cpu_attn.attention_mla has selected_tokens",
    "score_mod": "no kernel is compiled at run time",
    "score_mod_bwd": "there is no backward pass",
    "mask_mod": "no kernel is compiled at run time",
    "aux_tensors": "no kernel is compiled at run time",
    "aux_scalars": "no kernel is compiled at run time",
    "block_sparse_tensors": "cpu_attn.attention_with_kv_cache has selected_blocks",
    "block_sparse_tensors_bwd": "there is no backward pass",
    "gather_bwd_token_chunk": "there is no backward pass",
    "seqused_q": "cu_seqlens_q says how many query tokens there are",
}


def _refuse(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise RefusedError(f"{name}: expected None; {_REFUSED[name]}")


def _window(window_size: Any) -> list[Any]:
    return [-1 if x is None else x for x in _check.sequence("window_size", window_size)]


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
    _refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    _refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    _refuse(block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_token_chunk=gather_bwd_token_chunk)
    q, k, v = tensors(q=q, k=k, v=v)
    q, k, scale = with_qv(q, k, v, qv, softmax_scale)
    options = (0.0, scale, causal, _window(window_size), softcap, None, return_lse, 0, learnable_sink)
    found = dense(q, k, v, *options)
    return (found[0], found[1]) if return_lse else (found, None)


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
    page_table is its block_table. cu_seqlens_q is not None."""
    _refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    _refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    _refuse(seqused_q=seqused_q, gather_bwd_token_chunk=gather_bwd_token_chunk)
    q, k, v = tensors(q=q, k=k, v=v)
    q, k, scale = with_qv(q, k, v, qv, softmax_scale)
    keys = optional(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, page_table=page_table)
    options = (0.0, scale, causal, _window(window_size), softcap, None, return_lse, 0, learnable_sink)
    found = varlen(q, k, v, cu_seqlens_q, *keys, *options)
    return (found[0], found[1]) if return_lse else (found, None)
