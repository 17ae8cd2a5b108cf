# SPDX-License-Identifier: Apache-2.0
"""This module makes attn_bias [B, 1, Q, K] of FlashInfer's masks: 0 where a token sees a key, -inf where it does not.
Q and K are the most query tokens and the most keys of a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.torch.entry import axes, optional
from cpu_attn.torch.packed import Int32


def _bias(seen: list[Tensor], q_lens: Int32, lens: Int32) -> Tensor:
    """seen: bool [q_len, kv_len] of each sequence."""
    bias = torch.zeros(len(lens), 1, int(q_lens.max(initial=0)), int(lens.max(initial=0)))
    for b, each in enumerate(seen):
        bias[b, 0, : each.shape[0], : each.shape[1]].masked_fill_(~each, -torch.inf)
    return bias


def custom_bias(custom_mask: Any, packed_custom_mask: Any, q_lens: Int32, lens: Int32, one: bool = False) -> Any:
    """Gives the bias of either mask, or None where there is none. custom_mask: bool, the [q_len, kv_len] of each
    sequence, flattened, one after another; or, of one sequence, [q_len, kv_len]. packed_custom_mask: uint8, the same
    bits, lowest first, each sequence from a byte of its own on; it comes before custom_mask."""
    custom_mask, packed = optional(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
    if custom_mask is None and packed is None:
        return None
    sizes = q_lens.astype(np.int64) * lens
    if packed is not None:
        counts = -(-sizes // 8)
        axes("packed_custom_mask", packed, bytes=int(counts.sum()))
        if packed.dtype != torch.uint8:
            raise TypeError(f"packed_custom_mask: dtype {packed.dtype}, expected torch.uint8")
        flat, counts = (
            torch.from_numpy(np.unpackbits(packed.resolve_neg().numpy(), bitorder="little")).bool(),
            counts * 8,
        )
    else:
        if one and custom_mask.dim() == 2:
            axes("custom_mask", custom_mask, qo_len=int(q_lens[0]), kv_len=int(lens[0]))
            custom_mask = custom_mask.flatten()
        axes("custom_mask", custom_mask, pairs=int(sizes.sum()))
        if custom_mask.dtype != torch.bool:
            raise TypeError(f"custom_mask: dtype {custom_mask.dtype}, expected torch.bool")
        flat, counts = custom_mask, sizes
    parts = flat.split(counts.tolist()) if len(counts) else ()
    shapes = zip(parts, q_lens.tolist(), lens.tolist(), strict=True)
    return _bias([part[: rows * keys].reshape(rows, keys) for part, rows, keys in shapes], q_lens, lens)


def item_bias(prefix_len_ptr: Any, token_pos_in_items_ptr: Any, row_len: Any, q_lens: Int32, lens: Int32) -> Any:
    """Gives the bias of multi-item scoring, or None where prefix_len_ptr is: behind the first prefix_len tokens of a
    sequence, which all see, lie items, and a token sees those of its own item only. token_pos_in_items_ptr: for each
    sequence row_len numbers, how many tokens of its item come before a token behind the prefix, counted from the
    delimiter before it, which is 0 and sees the prefix alone; what no token needs may be missing at the end. Causal is
    left to the plan."""
    if prefix_len_ptr is None:
        return None
    prefix, places = (
        _integers("prefix_len_ptr", prefix_len_ptr),
        _integers("token_pos_in_items_ptr", token_pos_in_items_ptr),
    )
    row_len = _check.integer("token_pos_in_items_len", row_len, 0) or (len(places) if len(lens) == 1 else 0)
    least, most = max(0, len(lens) - 1) * row_len, len(lens) * row_len  # the last row needs no padding
    for name, x, low, high in (
        ("prefix_len_ptr", prefix, len(lens), len(lens)),
        ("token_pos_in_items_ptr", places, least, most),
    ):
        if not low <= len(x) <= high:
            raise ValueError(f"{name}: {len(x)} numbers, expected {high}")
    seen = []
    for b, (first, rows, keys) in enumerate(zip(prefix.tolist(), q_lens.tolist(), lens.tolist(), strict=True)):
        row = torch.from_numpy(places[b * row_len : (b + 1) * row_len])
        if first < 0 or keys - first > len(row):
            raise ValueError(f"prefix_len_ptr[{b}]: {first}, outside {max(0, keys - len(row))}..{keys}")
        at = torch.arange(keys - rows, keys)  # of the query tokens
        key = torch.arange(keys)
        inside = row[(at - first).clamp(0, len(row) - 1)] if len(row) else torch.zeros(rows, dtype=torch.int64)
        own = key > (at - inside)[:, None]
        seen.append(own | (key < first) | (at < first)[:, None])
    return _bias(seen, q_lens, lens)


def draft_bias(mask: Any, starts: Int32, lens: Int32) -> Any:
    """Gives the bias of masks among the query tokens of sequences, their last tokens, or None where mask is, or all of
    them are causal. They see all keys before them. mask: [B, q_len, words] or, one sequence after another, [T, words]
    of uint16 or uint32: bit i of a row, lowest first, says whether its token sees token i of the query tokens of its
    sequence."""
    (mask,) = optional(mask=mask)
    if mask is None:
        return None
    q_lens = np.diff(starts)
    if mask.dim() == 3:
        sizes = {"batch_size": len(lens), "q_len": int(q_lens.max(initial=0)), "words": None}
        axes("mask", mask, **sizes)
        for b in np.flatnonzero(q_lens != mask.shape[1]):
            raise ValueError(f"mask: {mask.shape[1]} rows, sequence {b} has {q_lens[b]} query tokens")
    else:
        axes("mask", mask, T=int(starts[-1]), words=None)
    if mask.dtype not in (torch.uint16, torch.uint32):
        raise TypeError(f"mask: dtype {mask.dtype}, expected torch.uint16 or torch.uint32")
    most, bits = int(q_lens.max(initial=0)), 8 * mask.dtype.itemsize
    if mask.shape[-1] * bits < most:
        raise ValueError(f"mask: {mask.shape[-1]} words of {bits} bits, sequences have {most} query tokens")
    rows = np.ascontiguousarray(mask.resolve_neg().reshape(int(starts[-1]), mask.shape[-1]).numpy()).view(np.uint8)
    flat = torch.from_numpy(np.unpackbits(rows, axis=-1, bitorder="little")).bool()
    seen, causal = [], True
    for first, rows_of, keys in zip(starts[:-1].tolist(), q_lens.tolist(), lens.tolist(), strict=True):
        if keys < rows_of:
            raise ValueError(f"seq_lens: {keys} keys, the sequence has {rows_of} query tokens")
        among = flat[first : first + rows_of, :rows_of]
        causal = causal and torch.equal(among, torch.ones_like(among).tril())
        seen.append(torch.cat([torch.ones(rows_of, keys - rows_of, dtype=torch.bool), among], 1))
    return None if causal else _bias(seen, q_lens, lens)


def _integers(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Gives a tensor of any integers, as int64."""
    if x is None:
        raise ValueError(f"{name}: is None, prefix_len_ptr is not")
    (x,) = optional(**{name: x})
    x = x.reshape(1) if x.dim() == 0 else x  # of one sequence
    axes(name, x, numbers=None)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name}: dtype {x.dtype}, expected integers")
    found: np.ndarray[Any, Any] = x.to(torch.int64).resolve_neg().numpy()
    return found
