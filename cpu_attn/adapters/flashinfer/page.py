# SPDX-License-Identifier: Apache-2.0
"""This module writes new keys and values into pages, and says where they go: FlashInfer's ``page``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn.flashinfer.arguments import interface, layout_of
from cpu_attn.flashinfer.wrapper import PAGES, pair_of
from cpu_attn.torch.entry import axes, tensors, written
from cpu_attn.torch.packed import int32, narrowed, starts_of

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


@interface()
def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Says how many tokens sequences have in their pages.

    Args:
        kv_indptr: int32 or int64 [B + 1], where the pages of each sequence start.
        kv_last_page_len: int32 or int64 [B], tokens of each sequence's last page.
        page_size: tokens of a page.

    Returns:
        int32 [B]: 0 where there is no page.

    Raises:
        ValueError: a shape or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    starts = narrowed("kv_indptr", kv_indptr)
    last = narrowed("kv_last_page_len", kv_last_page_len, len(starts) - 1)
    pages = np.maximum(np.diff(starts).astype(np.int64) - 1, 0)
    full = pages * _check.integer("page_size", page_size, 1)
    lens = np.where(np.diff(starts) > 0, full + last, 0)
    return torch.from_numpy(np.clip(lens, 0, _check.INT32_MAX).astype(np.int32))


@interface()
def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Says of new tokens which sequence they belong to, and at which position of it they are: its last ones.

    Args:
        append_indptr: int32 or int64 [B + 1], where the new tokens of each sequence start.
        seq_lens: int32 or int64 [B], how many tokens each sequence has with them.
        nnz: how many new tokens there are. Those past the last sequence get -1 and 0.
        batch_indices: int32 [nnz] to write to, or None.
        positions: int32 [nnz] to write to, or None.

    Returns:
        (batch_indices, positions), int32 [nnz] each.

    Raises:
        ValueError: a shape or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    nnz = _check.integer("nnz", nnz, 0)
    starts = starts_of("append_indptr", append_indptr, nnz, read=narrowed).astype(np.int64)
    lens = _check.integers("seq_lens", seq_lens, np.int64)
    if len(lens) != len(starts) - 1:
        raise ValueError(f"seq_lens: {len(lens)} numbers, append_indptr has {len(starts) - 1} sequences")
    new = np.diff(starts)
    owner = np.full(nnz, -1, np.int32)
    owner[: starts[-1]] = np.repeat(np.arange(len(lens)), new)
    place = np.zeros(nnz, np.int32)
    place[: starts[-1]] = np.arange(starts[-1]) + np.repeat(lens - starts[1:], new)
    read = {"append_indptr": append_indptr, "seq_lens": seq_lens}
    given = written(read, batch_indices=batch_indices, positions=positions)
    for name, to in zip(("batch_indices", "positions"), given, strict=True):
        if to is not None:
            int32(name, to, nnz)
    found = []
    for to, x, before in zip(given, (owner, place), (batch_indices, positions), strict=True):
        found.append(torch.from_numpy(x) if to is None else before)
        if to is not None:
            to.copy_(torch.from_numpy(x))
    return found[0], found[1]


def _slots(
    batch_indices: Any, positions: Any, indices: Any, indptr: Any, last_page_len: Any, num_tokens: int, sizes: Any
) -> Any:
    """Gives the slots of new tokens, int64 [T]; -1 where batch_indices is negative. sizes: how many pages there are,
    and the tokens of each."""
    num_pages, page_size = sizes
    found = narrowed("kv_indices", indices)
    starts = starts_of("kv_indptr", indptr, len(found), read=narrowed)
    narrowed("kv_last_page_len", last_page_len, len(starts) - 1)
    owner = narrowed("batch_indices", batch_indices, num_tokens).astype(np.int64)
    place = narrowed("positions", positions, num_tokens).astype(np.int64)
    for t in np.flatnonzero(owner >= len(starts) - 1):
        raise ValueError(f"batch_indices[{t}]: {owner[t]}, kv_indptr has {len(starts) - 1} sequences")
    kept = np.flatnonzero(owner >= 0)
    of, at = owner[kept], place[kept]
    room = np.diff(starts)[of].astype(np.int64) * page_size
    for t in np.flatnonzero((at < 0) | (at >= room)):
        raise ValueError(f"positions[{kept[t]}]: {at[t]}, outside 0..{room[t] - 1}, the slots of sequence {of[t]}")
    pages = found[starts[of] + at // page_size].astype(np.int64)
    for t in np.flatnonzero((pages < 0) | (pages >= num_pages)):
        raise ValueError(f"kv_indices[{starts[of[t]] + at[t] // page_size}]: {pages[t]}, outside 0..{num_pages - 1}")
    slots = np.full(num_tokens, -1, np.int64)
    slots[kept] = pages * page_size + at % page_size
    return slots


@interface(key="append_key", value="append_value", key_cache="paged_kv_cache", value_cache="paged_kv_cache")
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values of new tokens into their pages.

    Args:
        append_key: [T, Hkv, D] of the dtype of the pages.
        append_value: [T, Hkv, Dv] likewise.
        batch_indices: int32 or int64 [T], the sequence of each token; a token of a negative one is skipped.
        positions: int32 or int64 [T], its position there.
        paged_kv_cache: (keys, values) in ``kv_layout``, or one tensor [N, 2, ...] of both, written.
        kv_indices: int32 or int64, the pages of one sequence after another.
        kv_indptr: int32 or int64 [B + 1], where the pages of each sequence start.
        kv_last_page_len: int32 or int64 [B]; only its shape counts.
        kv_layout: ``NHD`` [N, page_size, Hkv, D] or ``HND`` [N, Hkv, page_size, D].

    Raises:
        ValueError: a shape, a position or a page is out of range. Nothing has been written then.
        TypeError: an argument is no tensor, or has another dtype. Nothing has been written then.
    """
    layout = layout_of(kv_layout)
    append_key, append_value = tensors(append_key=append_key, append_value=append_value)
    key, value = pair_of(paged_kv_cache, layout, None)
    axes("append_key", append_key, T=None, num_kv_heads=key.shape[2 if layout == "NHD" else 1], head_dim=key.shape[3])
    axes("append_value", append_value, T=len(append_key), num_kv_heads=append_key.shape[1], head_dim=value.shape[3])
    sizes = (len(key), key.shape[1 if layout == "NHD" else 2])
    where = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    slots = _slots(*where, len(append_key), sizes)
    for name, x, to in (("append_key", append_key, key), ("append_value", append_value, value)):
        if x.dtype != to.dtype:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {to.dtype}, that of the pages")
    read = {"append_key": append_key, "append_value": append_value}
    key, value = written(read, **dict(zip(PAGES, (key, value), strict=True)))
    if key.dtype.itemsize > 1:
        ops.reshape_and_cache(append_key, append_value, key, value, slots, kv_cache_layout=layout)
        return
    kept = torch.from_numpy(np.flatnonzero(slots >= 0))
    at = torch.from_numpy(slots)[kept]
    for x, to in ((append_key, key), (append_value, value)):  # bytes, which are not converted
        rows = (to if layout == "NHD" else to.transpose(1, 2)).view(torch.uint8)
        rows[at // sizes[1], at % sizes[1]] = x.view(torch.uint8)[kept]


@interface()
def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Writes latents and rotated keys of new tokens into their pages, each into a tensor of its own.

    Args:
        append_ckv: [T, L] of the dtype of the pages.
        append_kpe: [T, P] likewise.
        batch_indices: int32 or int64 [T], the sequence of each token; a token of a negative one is skipped.
        positions: int32 or int64 [T], its position there.
        ckv_cache: [N, page_size, L], written, or None.
        kpe_cache: [N, page_size, P], written, or None. Both may be parts of one tensor [N, page_size, L + P].
        kv_indices: int32 or int64, the pages of one sequence after another.
        kv_indptr: int32 or int64 [B + 1], where the pages of each sequence start.
        kv_last_page_len: int32 or int64 [B]; only its shape counts.

    Raises:
        ValueError: a shape, a position or a page is out of range. Nothing has been written then.
        TypeError: an argument is no tensor, or has another dtype. Nothing has been written then.
    """
    pairs = []
    states = tensors(append_ckv=append_ckv, append_kpe=append_kpe)
    read = {"append_ckv": states[0], "append_kpe": states[1]}
    given = written(read, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    for name, x, to in zip(("ckv", "kpe"), states, given, strict=True):
        axes(f"append_{name}", x, T=len(states[0]), dim=None)
        if to is not None:
            axes(f"{name}_cache", to, pages=None, page_size=None, dim=x.shape[1])
            if x.dtype != to.dtype:
                raise TypeError(f"append_{name}: dtype {x.dtype}, expected {to.dtype}, that of its pages")
            pairs.append((x, to))
    if not pairs:
        return
    sizes = pairs[0][1].shape[:2]
    if pairs[-1][1].shape[:2] != sizes:
        raise ValueError(f"kpe_cache: {tuple(pairs[-1][1].shape[:2])} pages and tokens, ckv_cache has {tuple(sizes)}")
    where = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    slots = _slots(*where, len(states[0]), tuple(sizes))
    at = torch.from_numpy(slots[slots >= 0])
    for x, to in pairs:
        byte = to.dtype.itemsize == 1
        rows, new = (to.view(torch.uint8), x.view(torch.uint8)) if byte else (to, x)
        rows[at // sizes[1], at % sizes[1]] = new[torch.from_numpy(slots >= 0)]
