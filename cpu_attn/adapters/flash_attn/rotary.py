# SPDX-License-Identifier: Apache-2.0
"""This module rotates queries or keys: flash_attn.layers.rotary.apply_rotary_emb, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
