# SPDX-License-Identifier: Apache-2.0
"""This module rotates queries and keys by their positions (arXiv:2104.09864), in float32, rounded once: FlashInfer's
``rope``.

Dimension pair i of rotary_dim dimensions turns by position * rope_theta**(-2 i / rotary_dim) / rope_scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.norm import floats
from cpu_attn.torch.entry import axes, tensors, written
from cpu_attn.torch.packed import narrowed, starts_of

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]


def frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> Tensor:
    """Gives by how much each pair turns from one position to the next: float64 [rotary_dim / 2]."""
    powers = torch.arange(rotary_dim // 2, dtype=torch.float64) * (2 / rotary_dim)
    return torch.pow(rope_theta, -powers) / rope_scale


def _llama31(plain: Tensor, rope_scale: float, low_freq_factor: float, high_freq_factor: float, old: int) -> Tensor:
    """Gives Llama 3.1's frequencies of the plain ones: those whose waves are longer than old / low_freq_factor are
    divided by rope_scale, those shorter than old / high_freq_factor stay, and those between are mixed."""
    waves = old * plain / (2 * math.pi)  # how often a pair turns round in the old context
    smooth = ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / rope_scale + smooth * plain


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool = False) -> Tensor:
    """Turns pairs of the first dimensions of x [..., heads, D] by cos and sin [..., rotary_dim / 2]."""
    cos, sin, half = cos.unsqueeze(-2), sin.unsqueeze(-2), cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleave else slice(half)
    second = slice(1, 2 * half, 2) if interleave else slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    out = x.clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def rotated(x: Tensor, positions: Tensor, inv_freq: Tensor, interleave: bool = False) -> Tensor:
    """Gives x [..., heads, D] rotated to positions [...]; inv_freq: what :func:`frequencies` says."""
    angles = positions.double().unsqueeze(-1) * inv_freq
    return turned(x, angles.cos().float(), angles.sin().float(), interleave)


def _states(q: Any, k: Any) -> list[Tensor]:
    q, k = tensors(q=q, k=k)
    axes("q", q, nnz=None, num_q_heads=None, head_dim=None)
    axes("k", k, nnz=len(q), num_k_heads=None, head_dim=q.shape[2])
    for name, x in (("q", q), ("k", k)):
        floats(name, x)
    return [q, k]


def _positions(indptr: Any, offsets: Any, num_tokens: int) -> Tensor:
    """Gives the position of each token: its place in its sequence, after offsets [B]."""
    starts = starts_of("indptr", indptr, num_tokens, read=narrowed)
    if starts[-1] != num_tokens:
        raise ValueError(f"indptr[{len(starts) - 1}]: {starts[-1]}, expected {num_tokens}, the tokens of q")
    first = _check.integers("offsets", offsets, np.int64)
    if len(first) != len(starts) - 1:
        raise ValueError(f"offsets: {len(first)} numbers, indptr has {len(starts) - 1} sequences")
    places = np.arange(num_tokens) + np.repeat(first - starts[:-1], np.diff(starts))
    return torch.from_numpy(places)


def _pos_ids(pos_ids: Any, num_tokens: int) -> Tensor:
    places = _check.integers("pos_ids", pos_ids, np.int64)
    if len(places) != num_tokens:
        raise ValueError(f"pos_ids: {len(places)} numbers, q has {num_tokens} tokens")
    return torch.from_numpy(places)


def _dims(rotary_dim: Any, head_dim: int) -> int:
    found = head_dim if rotary_dim is None else _check.integer("rotary_dim", rotary_dim, 0, head_dim)
    if found % 2:
        raise ValueError(f"rotary_dim: {found} is odd")
    return found


def _apply(q: Any, k: Any, places: Any, rotary_dim: Any, interleave: Any, kind: tuple[Any, ...]) -> list[Tensor]:
    """Rotates both. places: (indptr, offsets) or (pos_ids,); kind: rope_scale, rope_theta, and Llama 3.1's three."""
    states = _states(q, k)
    size = len(states[0])
    positions = _positions(places[0], places[1], size) if len(places) == 2 else _pos_ids(places[0], size)
    scale = _check.number("rope_scale", kind[0], _check.TINY)
    theta = _check.number("rope_theta", kind[1], _check.TINY)
    dims = _dims(rotary_dim, states[0].shape[2])
    inv_freq = frequencies(dims, 1.0 if kind[2:] else scale, theta)
    if kind[2:]:
        low, high = _check.number("low_freq_factor", kind[2]), _check.number("high_freq_factor", kind[3])
        if low >= high:
            raise ValueError(f"high_freq_factor: {high}, expected more than low_freq_factor = {low}")
        inv_freq = _llama31(inv_freq, scale, low, high, _check.integer("old_context_len", kind[4], 1))
    interleave = _check.boolean("interleave", interleave)
    return [rotated(x, positions, inv_freq, interleave) for x in states]


def _write(found: list[Tensor], given: dict[str, Any], **to: Tensor) -> None:
    for x, new in zip(written(given, **to), found, strict=True):
        x.copy_(new)


@interface()
def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys of packed sequences.

    Args:
        q: [nnz, Hq, D] of float32, float16 or bfloat16.
        k: [nnz, Hkv, D].
        indptr: int32 or int64 [B + 1], where each sequence starts; the last number is nnz.
        offsets: int32 or int64 [B], the position of each sequence's first token.
        rotary_dim: how many dimensions turn, from the first on; None: all.
        interleave: whether dimension 2 i turns with 2 i + 1, else i turns with i + rotary_dim / 2.
        rope_scale: what angles are divided by.
        rope_theta: the base of the frequencies.

    Returns:
        (q, k), rotated, new.

    Raises:
        ValueError: a shape or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    a, b = _apply(q, k, (indptr, offsets), rotary_dim, interleave, (rope_scale, rope_theta))
    return a, b


@interface()
def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Does what :func:`apply_rope` does, and writes into q and k."""
    found = _apply(q, k, (indptr, offsets), rotary_dim, interleave, (rope_scale, rope_theta))
    _write(found, {"indptr": indptr, "offsets": offsets}, q=q, k=k)


@interface()
def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Does what :func:`apply_rope` does; pos_ids: int32 or int64 [nnz], the position of each token."""
    a, b = _apply(q, k, (pos_ids,), rotary_dim, interleave, (rope_scale, rope_theta))
    return a, b


@interface()
def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Does what :func:`apply_rope_pos_ids` does, and writes into q and k."""
    found = _apply(q, k, (pos_ids,), rotary_dim, interleave, (rope_scale, rope_theta))
    _write(found, {"pos_ids": pos_ids}, q=q, k=k)


@interface()
def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Does what :func:`apply_rope` does with Llama 3.1's frequencies: pairs that turn round less than
    ``low_freq_factor`` times in ``old_context_len`` tokens turn by angles divided by ``rope_scale``, those with more
    than ``high_freq_factor`` rounds by their own, and those between by a mixture."""
    kind = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    a, b = _apply(q, k, (indptr, offsets), rotary_dim, interleave, kind)
    return a, b


@interface()
def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Does what :func:`apply_llama31_rope` does, and writes into q and k."""
    kind = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    found = _apply(q, k, (indptr, offsets), rotary_dim, interleave, kind)
    _write(found, {"indptr": indptr, "offsets": offsets}, q=q, k=k)


@interface()
def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Does what :func:`apply_llama31_rope` does; pos_ids: int32 or int64 [nnz], the position of each token."""
    kind = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    a, b = _apply(q, k, (pos_ids,), rotary_dim, interleave, kind)
    return a, b


@interface()
def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Does what :func:`apply_llama31_rope_pos_ids` does, and writes into q and k."""
    kind = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    found = _apply(q, k, (pos_ids,), rotary_dim, interleave, kind)
    _write(found, {"pos_ids": pos_ids}, q=q, k=k)


def cos_and_sin(cache: Any, positions: Any, num_tokens: int, head_dim: int, name: str) -> tuple[Tensor, Tensor]:
    """Gives the rows of a table, float32 [max_seq_len, rotary_dim], at positions [num_tokens], which are called
    ``name``: cosines and sines [num_tokens, rotary_dim / 2]."""
    (cache,) = tensors(cos_sin_cache=cache)
    axes("cos_sin_cache", cache, max_seq_len=None, rotary_dim=None)
    if cache.dtype != torch.float32:
        raise ValueError(f"cos_sin_cache: dtype {cache.dtype}, expected torch.float32")
    places = _pos_ids(positions, num_tokens)
    for i in torch.nonzero((places < 0) | (places >= len(cache))).flatten().tolist():
        raise ValueError(f"{name}[{i}]: {places[i]}, outside 0..{len(cache) - 1}, the rows of cos_sin_cache")
    _dims(cache.shape[1], head_dim)
    cos, sin = cache[places].chunk(2, -1)
    return cos, sin


def _by_cache(positions: Any, query: Any, key: Any, head_size: Any, cache: Any, is_neox: Any) -> list[Tensor]:
    query, key = tensors(query=query, key=key)
    head_size = _check.integer("head_size", head_size, 1)
    cos, sin = cos_and_sin(cache, positions, len(query), head_size, "positions")
    found = []
    for name, x in (("query", query), ("key", key)):
        floats(name, x)
        if x.dim() != 2 or len(x) != len(query) or x.shape[1] % head_size:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected [{len(query)}, a multiple of {head_size}]")
        heads = x.unflatten(1, (-1, head_size))
        found.append(turned(heads, cos, sin, not _check.boolean("is_neox", is_neox)).flatten(1))
    return found


@interface(pos_ids="positions", q="query", k="key", rotary_dim="cos_sin_cache")
def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by rows of a table.

    Args:
        positions: int32 or int64 [nnz], a row of the table for each token.
        query: [nnz, Hq * head_size] of float32, float16 or bfloat16.
        key: [nnz, Hkv * head_size].
        head_size: D, elements of a head.
        cos_sin_cache: float32 [max_seq_len, rotary_dim]: rotary_dim / 2 cosines, then as many sines.
        is_neox: whether dimension i turns with i + rotary_dim / 2, else 2 i turns with 2 i + 1.

    Returns:
        (query, key), rotated, new.

    Raises:
        ValueError: a shape, a position or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    a, b = _by_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
    return a, b


@interface(pos_ids="positions", q="query", k="key", rotary_dim="cos_sin_cache")
def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Does what :func:`apply_rope_with_cos_sin_cache` does, and writes into query and key."""
    found = _by_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
    _write(found, {"positions": positions, "cos_sin_cache": cos_sin_cache}, query=query, key=key)
