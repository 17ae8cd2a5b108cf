# SPDX-License-Identifier: Apache-2.0
"""This module rotates queries or keys: functions of flash_attn.layers.rotary, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_attn.flash_attn.call import ArgumentError


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns the dimensions below rot_dim in pairs, of x [B, S, H, D], or packed [T, H, D] with cu_seqlens int32 [B +
    1].

    cos, sin: [positions, rot_dim / 2]; a token turns by the row of its place in its sequence plus seqlen_offsets, an
    int or an int tensor [B]. interleaved: dimension 2 i turns with 2 i + 1, else i with i + rot_dim / 2. inplace: x
    itself is written and returned. All is computed in float32 and rounded once. max_seqlen is not needed.
    """
    if cu_seqlens is None:
        places = torch.arange(x.shape[1]).expand(x.shape[:2])
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    else:
        lens: Any = cu_seqlens.diff()
        places = torch.arange(len(x)) - cu_seqlens[:-1].repeat_interleave(lens)
        offsets = seqlen_offsets.repeat_interleave(lens) if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    c, s = (angles[places + offsets].unsqueeze(-2).float() for angles in (cos, sin))
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., first].float(), x[..., second].float()
    out = x if inplace else x.clone()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates, in place, the queries and keys of qkv [B, S, 3, H, D], or of [B, S, Hq + 2 Hkv, D] with num_heads_q =
    Hq, and returns qkv. cos_k, sin_k: those of keys, where they are others; the rest is as :func:`apply_rotary_emb` has
    it. ValueError is raised for other shapes."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        query, key = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and 0 < num_heads_q < qkv.shape[2]:
        if (qkv.shape[2] - num_heads_q) % 2:
            raise ArgumentError(f"qkv: {qkv.shape[2]} heads, of which {num_heads_q} of queries leave an odd number")
        query, key = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (qkv.shape[2] + num_heads_q) // 2]
    else:
        shape = "[B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D] with num_heads_q"
        raise ArgumentError(f"qkv: shape {tuple(qkv.shape)}, num_heads_q {num_heads_q}, expected {shape}")
    of_keys = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    for x, angles in ((query, (cos, sin)), (key, of_keys)):
        apply_rotary_emb(x, *angles, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates, in place, the keys of kv [B, S, 2, H, D], and returns kv. The rest is as :func:`apply_rotary_emb` has
    it. ValueError is raised for other shapes."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ArgumentError(f"kv: shape {tuple(kv.shape)}, expected [B, S, 2, H, D]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
