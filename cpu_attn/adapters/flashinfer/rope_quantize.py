# SPDX-License-Identifier: Apache-2.0
"""This module rotates queries and keys and rounds them to float8: FlashInfer's ``rope_quantize_fp8`` and what writes
into pages, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface, items
from cpu_attn.flashinfer.call import dtype_of
from cpu_attn.flashinfer.norm import FP8, floats, to_fp8
from cpu_attn.flashinfer.page import append_paged_kv_cache, append_paged_mla_kv_cache
from cpu_attn.flashinfer.rope import cos_and_sin, turned
from cpu_attn.flashinfer.wrapper import PAGES
from cpu_attn.torch.entry import axes, optional, tensors, written

__all__ = ["mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"]


class _States:
    """Holds queries and keys, of which the first dimensions, those that turn, lie in tensors of their own."""

    def __init__(self, q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any):
        q, k = tensors(q_rope=q_rope, k_rope=k_rope)
        axes("q_rope", q, nnz=None, num_qo_heads=None, rope_dim=None)
        self.latent = k.dim() == 2
        heads = {} if self.latent else {"num_kv_heads": None if k.dim() < 2 else k.shape[1]}
        axes("k_rope", k, nnz=len(q), **heads, rope_dim=q.shape[2])
        plain_q, plain_k = optional(q_nope=q_nope, k_nope=k_nope)
        plain_q = q[..., :0] if plain_q is None else plain_q
        plain_k = k[..., :0] if plain_k is None else plain_k
        axes("q_nope", plain_q, nnz=len(q), num_qo_heads=q.shape[1], no_rope_dim=None)
        axes("k_nope", plain_k, nnz=len(q), **heads, no_rope_dim=None)
        self.named = {"q_rope": q, "k_rope": k, "q_nope": plain_q, "k_nope": plain_k}
        for name, x in self.named.items():
            floats(name, x)

    def rounded(
        self, cache: Any, pos_ids: Any, is_neox: Any, scales: tuple[Any, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Gives them rotated, times factors of queries and keys, in float8."""
        q, k, plain_q, plain_k = self.named.values()
        cos, sin = cos_and_sin(cache, pos_ids, len(q), q.shape[2], "pos_ids")
        if 2 * cos.shape[1] != q.shape[2]:
            raise ValueError(f"cos_sin_cache: rows of {2 * cos.shape[1]} numbers, q_rope has {q.shape[2]}")
        interleave = not _check.boolean("is_neox", is_neox)
        key = k.unsqueeze(1) if self.latent else k
        key = turned(key.float(), cos, sin, interleave)
        found = [
            turned(q.float(), cos, sin, interleave),
            key.squeeze(1) if self.latent else key,
            plain_q.float(),
            plain_k.float(),
        ]
        factors = _factors(*scales) * 2
        return {name: to_fp8(x * factor, dtype) for name, x, factor in zip(self.named, found, factors, strict=True)}


def _table(cos_sin_cache: Any, pos_ids: Any) -> dict[str, Any]:
    table, places = tensors(cos_sin_cache=cos_sin_cache, pos_ids=pos_ids)
    return {"cos_sin_cache": table, "pos_ids": places}


def _factors(quant_scale_q: Any, quant_scale_kv: Any) -> tuple[float, float]:
    return _check.number("quant_scale_q", quant_scale_q), _check.number("quant_scale_kv", quant_scale_kv)


def _outputs(
    states: _States, read: dict[str, Any], quantize_dtype: Any, **outs: Any
) -> tuple[torch.dtype, dict[str, Any]]:
    """Checks tensors to write to, float8 of the shapes of the states, and gives the dtype, which is theirs unless
    said. read: what the call reads besides the states."""
    given = dict(zip(outs, written(states.named | read, **outs), strict=True))
    first = next((x.dtype for x in given.values() if x is not None), torch.float8_e4m3fn)
    dtype = dtype_of("quantize_dtype", first if quantize_dtype is None else quantize_dtype, *FP8)
    for name, x in given.items():
        if x is None:
            continue
        shape = states.named[name.removesuffix("_out")].shape
        if x.shape != shape:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {dtype}")
    return dtype, {name.removesuffix("_out"): x for name, x in given.items()}


def _write(found: dict[str, Tensor], to: dict[str, Any], outs: dict[str, Any]) -> list[Tensor]:
    """Writes into the tensors that were given, and returns what the caller gets."""
    results = []
    for name, x in to.items():
        if x is not None:
            x.copy_(found[name])
        results.append(found[name] if x is None else outs[name])
    return results


@interface(rotary_dim="cos_sin_cache")
def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotates queries and keys by rows of a table, multiplies them, and rounds them to float8, once.

    Args:
        q_rope: [nnz, Hq, R] of float32, float16 or bfloat16: the dimensions that turn.
        k_rope: [nnz, Hkv, R], or [nnz, R] of latent rows.
        q_nope: [nnz, Hq, P], the other dimensions, or None.
        k_nope: [nnz, Hkv, P], or [nnz, P] of latent rows, or None.
        cos_sin_cache: float32 [max_seq_len, R]: R / 2 cosines, then as many sines.
        pos_ids: int32 or int64 [nnz], a row of the table for each token.
        is_neox: whether dimension i turns with i + R / 2, else 2 i turns with 2 i + 1.
        quantize_dtype: float8_e4m3fn or float8_e5m2; None: that of the first output given, else float8_e4m3fn.
        quant_scale_q: what queries are multiplied by.
        quant_scale_kv: what keys are multiplied by.
        q_rope_out: [nnz, Hq, R] to write to, or None; the other three likewise.

    Returns:
        (q_rope, k_rope, q_nope, k_nope) in float8. What is too large becomes the largest number.

    Raises:
        ValueError: a shape, a position or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    states = _States(q_rope, k_rope, q_nope, k_nope)
    given = {"q_rope": q_rope_out, "k_rope": k_rope_out, "q_nope": q_nope_out, "k_nope": k_nope_out}
    read = _table(cos_sin_cache, pos_ids)
    dtype, to = _outputs(states, read, quantize_dtype, **{f"{name}_out": x for name, x in given.items()})
    found = states.rounded(cos_sin_cache, pos_ids, is_neox, (quant_scale_q, quant_scale_kv), dtype)
    a, b, c, d = _write(found, to, given)
    return a, b, c, d


@interface(rotary_dim="cos_sin_cache")
def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Does what :func:`rope_quantize_fp8` does."""
    where = (cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv)
    outs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, *where, *outs)
    return found


@interface(rotary_dim="cos_sin_cache", append_key="k_rope", append_value="v", append_ckv="k_nope", append_kpe="k_rope")
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Does what :func:`rope_quantize_fp8` does, and writes keys and values into their pages.

    ``v``, [nnz, Hkv, Dv], is multiplied by ``quant_scale_kv``, too; of latent rows it is None. ``paged_kv_cache`` is
    (keys, values) of float8 in ``kv_layout``, where a key has the dimensions that turn before the others, or, of latent
    rows, (latents [N, page_size, P], rotated keys [N, page_size, R]). ``kv_indices``, ``kv_indptr``, ``batch_indices``
    and ``positions`` are those of ``append_paged_kv_cache``; a token of a negative ``batch_indices`` is not written.
    It returns (q_rope, q_nope).
    """
    states = _States(q_rope, k_rope, q_nope, k_nope)
    given = {"q_rope": q_rope_out, "q_nope": q_nope_out}
    (v,) = optional(v=v)
    read = _table(cos_sin_cache, pos_ids) | {"v": v}
    dtype, to = _outputs(states, read, quantize_dtype, **{f"{name}_out": x for name, x in given.items()})
    if (v is None) != states.latent:
        what = "is not for" if states.latent else "is None, expected values beside"
        raise ValueError(f"v: {what} a k_rope of {states.named['k_rope'].dim()} axes")
    pages = tensors(**dict(zip(PAGES, items("paged_kv_cache", paged_kv_cache, 2), strict=True)))
    outs = {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out}
    first, second = written(states.named | read | outs, **dict(zip(PAGES, pages, strict=True)))
    size = _check.integer("page_size", page_size, 1)
    axis = 1 if states.latent or kv_layout == "NHD" else 2
    for x in pages:
        if x.dtype != dtype or x.dim() <= axis or x.shape[axis] != size:
            raise ValueError(f"paged_kv_cache: {x.dtype} {tuple(x.shape)}, expected {dtype} in pages of {size} tokens")
    found = states.rounded(cos_sin_cache, pos_ids, is_neox, (quant_scale_q, quant_scale_kv), dtype)
    (indptr,) = tensors(kv_indptr=kv_indptr)
    axes("kv_indptr", indptr, starts=None)
    last = indptr.new_zeros(max(0, len(indptr) - 1), dtype=torch.int32)
    where = (kv_indices, kv_indptr, last)
    if states.latent:
        append_paged_mla_kv_cache(found["k_nope"], found["k_rope"], batch_indices, positions, first, second, *where)
    else:
        floats("v", v)
        key = torch.cat([found["k_rope"].view(torch.uint8), found["k_nope"].view(torch.uint8)], -1).view(dtype)
        value = to_fp8(v.float() * _factors(quant_scale_q, quant_scale_kv)[1], dtype)
        append_paged_kv_cache(key, value, batch_indices, positions, (first, second), *where, kv_layout)
    a, b = _write(found, to, given)
    return a, b
