# SPDX-License-Identifier: Apache-2.0
"""This module turns padded batches into packed sequences and back: flash_attn.bert_padding, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Gives the rows of input [N, ...] that int64 indices name."""
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of hidden_states [B, S, ...] for which attention_mask [B, S], or else unused_mask, is not 0.

    Returns them packed [T, ...], their places int64 [T] in the flattened batch, cu_seqlens int32 [B + 1], the length of
    the longest sequence, and int32 [B], how many tokens attention_mask alone leaves each (seqused).
    """
    kept = attention_mask != 0 if unused_mask is None else (attention_mask != 0) | (unused_mask != 0)
    lens = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    seqused = (attention_mask != 0).sum(1, dtype=torch.int32)
    longest = int(lens.max()) if len(lens) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Gives [batch, seqlen, ...] of packed tokens [T, ...]; 0 where there is none."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
