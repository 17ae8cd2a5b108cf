# SPDX-License-Identifier: Apache-2.0
"""This module finds where the keys and values of requests lie in torch's tensors, as NHD caches, without a copy.

Pages [N, B, Hkv, D] are an NHD cache. Packed ones [T_k, Hkv, D] are seen as the NHD cache whose block n is tokens n to
n + 63, blocks that overlap, so that a request's blocks may start at any token. The last block of a request then reads
up to 15 tokens past its end: memory of another request, which does not reach the result. Requests whose last block
would end past the tensor (the last one, and those of the last 63 tokens) are attended each by itself, as one block of
just their length; bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from cpu_attn import _arrays, _check
from cpu_attn.torch.entry import tensors

BLOCK = 64  # decode of 8 x 2048 keys takes 13.9 ms, as with 128; with 16 20 ms (Zen 4, bfloat16, two threads)
Int32 = NDArray[np.int32]
# A part of a call is requests [first, end) over two NHD caches and their block table.
Part = tuple[int, int, torch.Tensor, torch.Tensor, Any]


def int32(name: str, x: Any, size: int | None = None) -> Int32:
    """Gives a tensor [size] as an array."""
    if x is None:
        raise ValueError(f"{name}: is None")
    _check.instance(name, x, torch.Tensor)
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32")
    if x.dim() != 1 or size not in (None, len(x)):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected [{'N + 1' if size is None else size}]")
    return _arrays.view(name, x).numpy()


def narrowed(name: str, x: Any, size: int | None = None) -> Int32:
    """Does what :func:`int32` does for a tensor that may be int64, too. What does not fit becomes the nearest number,
    which checks of a range then refuse."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.int64:
        (x,) = tensors(**{name: x})
        x = x.clamp(-_check.INT32_MAX, _check.INT32_MAX).to(torch.int32)
    return int32(name, x, size)


def starts_of(name: str, x: Any, num_tokens: int, size: int | None = None, read: Callable[..., Int32] = int32) -> Int32:
    """Checks where requests start, ascending from 0 to at most num_tokens. read: :func:`int32` or :func:`narrowed`."""
    starts = _check.rising(name, read(name, x, size))
    if starts[-1] > num_tokens:
        raise ValueError(f"{name}[{len(starts) - 1}]: {starts[-1]}, the tensor has {num_tokens} tokens")
    return starts


def overlapping(x: torch.Tensor, size: int) -> torch.Tensor:
    """Gives [T, Hkv, D] as blocks of ``size`` tokens, one from each token on."""
    token, head, element = x.stride()
    shape = (max(0, x.shape[0] - size + 1), size, *x.shape[1:])
    return x.as_strided(shape, (token, token, head, element))


def packed(key: torch.Tensor, value: torch.Tensor, starts: Int32, lens: Int32) -> Iterator[Part]:
    blocks = -(-lens // BLOCK)
    past = np.flatnonzero(starts[:-1] + blocks * BLOCK > key.shape[0])
    fit = int(past[0]) if len(past) else len(lens)
    if fit:
        columns = np.arange(0, int(blocks[:fit].max()) * BLOCK, BLOCK, dtype=np.int32)
        table = starts[:fit, None] + columns
        yield 0, fit, overlapping(key, BLOCK), overlapping(value, BLOCK), torch.from_numpy(table)
    for r in range(fit, len(lens)):
        tokens = slice(int(starts[r]), int(starts[r] + lens[r]))
        size = max(1, int(lens[r]))
        yield r, r + 1, overlapping(key[tokens], size), overlapping(value[tokens], size), torch.zeros(1, 1).int()


def parts_of(
    key: torch.Tensor, value: torch.Tensor, cum_seq_k: Any, seqused_k: Any, block_table: Any, num_reqs: int
) -> tuple[Int32, Iterator[Part]]:
    """Gives how many keys the requests have, and the parts of the call."""
    axes = 3 if block_table is None else 4
    for name, x in (("key", key), ("value", value)):
        if x.dim() != axes:
            pages = "without block_table: [T_k, Hkv, D]" if axes == 3 else "with block_table: [N, page_size, Hkv, D]"
            raise ValueError(f"{name}: {x.dim()} axes, expected {axes} {pages}")
    if block_table is not None:
        return int32("seqused_k", seqused_k, num_reqs), iter([(0, num_reqs, key, value, block_table)])
    if len(key) != len(value):
        raise ValueError(f"value: {len(value)} tokens, key has {len(key)}")
    starts = starts_of("cu_seq_k", cum_seq_k, len(key), num_reqs + 1)
    lens: Int32 = np.diff(starts)
    if seqused_k is not None:
        used = int32("seqused_k", seqused_k, num_reqs)
        for r in np.flatnonzero((used < 0) | (used > lens)):
            raise ValueError(f"seqused_k[{r}]: {used[r]}, outside 0..{lens[r]}, the keys that cu_seq_k leaves it")
        lens = used
    return lens, packed(key, value, starts, lens)
