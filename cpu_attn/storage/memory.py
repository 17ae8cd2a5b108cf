# SPDX-License-Identifier: Apache-2.0
"""This module makes the memory of caches, moves whole blocks of it, and knows what NumPy calls it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import address
from cpu_attn._dtypes import DTYPES
from cpu_attn._mapping import reserve
from cpu_attn._numa import Placement

HUGE_PAGE = 2 << 20
Memory = np.ndarray[Any, Any]


def memory_dtype(kind: str) -> np.dtype[Any]:
    """Gives the dtype of memory that holds ``kind``."""
    return DTYPES[_check.memory(kind)[0]]


def aligned_zeros(
    shape: tuple[int, ...], dtype: np.dtype[Any], placement: Placement | None = None, num_mapped: int = 0
) -> Memory:
    """Gives zeros that begin at a cache line. NumPy's own begin 16 bytes into one, which costs a cache write 8 % of its
    speed in bfloat16, 20 % in float32 (kernel/cache_write/write.inc). They are in huge pages where the system has them,
    which is 1 to 4 % of decode's speed (Cascade Lake). placement: where each of shape[0] blocks lies. num_mapped: how
    many of the last of these are there for files to be mapped to, and lie nowhere yet."""
    size, align = prod(shape) * dtype.itemsize, 64
    if num_mapped or ((size >= HUGE_PAGE or placement) and hasattr(mmap, "MADV_HUGEPAGE")):
        align = HUGE_PAGE
        memory = np.frombuffer(_pages(size + align, bool(num_mapped)), np.uint8)
    else:
        memory = np.zeros(size + align, np.uint8)
    memory = memory[-address(memory) % align :][:size]
    own = shape[0] - num_mapped
    if placement and size and own:
        placement.apply(address(memory), size // shape[0] * own, own)
    return memory.view(dtype).reshape(shape)


def _pages(size: int, mapped: bool) -> mmap.mmap:
    try:
        pages = reserve(size) if mapped else mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"no memory for {size} bytes") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may have been built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def aligned_copy(x: Memory, placement: Placement | None = None, num_mapped: int = 0) -> Memory:
    """Copies blocks to memory as :func:`aligned_zeros` gives it. Of the last ``num_mapped`` those that are zeros take
    none."""
    copied, own = aligned_zeros(x.shape, x.dtype, placement, num_mapped), len(x) - num_mapped
    copied[:own] = x[:own]
    for block in range(own, len(x)):
        if x[block].view(np.uint8).any():
            copied[block] = x[block]
    return copied


def move_blocks(sources: Sequence[Memory], destinations: Sequence[Memory], moves: tuple[Any, Any]) -> None:
    """Copies blocks of K and V; all are read before one is written, which V as a view of K needs."""
    from_blocks, to_blocks = moves
    found = [source[from_blocks] for source in sources]
    for destination, blocks in zip(destinations, found, strict=True):
        destination[to_blocks] = blocks


def lined_up(seq_lens: Memory, block_size: int) -> tuple[int, Memory, Memory]:
    """Puts the tokens of some requests into pages, one after the other, and gives how many pages, block_table int32 [R,
    M] and slot_mapping int64 [T]."""
    lens = seq_lens.astype(np.int64)
    blocks = -(-lens // block_size)
    first = np.cumsum(blocks) - blocks
    offsets = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    table = (first[:, None] + np.arange(blocks.max(initial=0))).astype(np.int32)
    return int(blocks.sum()), table, np.repeat(first, lens) * block_size + offsets
