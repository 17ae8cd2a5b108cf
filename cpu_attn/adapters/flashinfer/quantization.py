# SPDX-License-Identifier: Apache-2.0
"""This module packs masks into bits: FlashInfer's ``packbits`` and ``segment_packbits``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cpu_attn.flashinfer.arguments import choice, interface
from cpu_attn.torch.entry import axes, tensors
from cpu_attn.torch.packed import narrowed, starts_of

__all__ = ["packbits", "segment_packbits"]


@interface()
def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Packs eight booleans into a byte.

    Args:
        x: bool [n].
        bitorder: ``big``: the first of eight is the highest bit; ``little``: the lowest.

    Returns:
        uint8 [ceil(n / 8)]; the last byte is filled with 0.

    Raises:
        ValueError: a shape or a name is out of range.
        TypeError: x is no tensor.
    """
    (x,) = tensors(x=x)
    axes("x", x, n=None)
    order = choice("bitorder", bitorder, "big", "little")
    return torch.from_numpy(np.packbits((x != 0).numpy(), bitorder="big" if order == "big" else "little"))


@interface()
def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Does what :func:`packbits` does for each segment of x, from ``indptr[i]`` to ``indptr[i + 1] - 1``.

    Args:
        x: bool [n].
        indptr: int32 or int64 [segments + 1].
        bitorder: as :func:`packbits` has it.

    Returns:
        (uint8, int32 [segments + 1]): the bytes of one segment after another, and where each starts.

    Raises:
        ValueError: a shape or a name is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    (x,) = tensors(x=x)
    axes("x", x, n=None)
    starts = starts_of("indptr", indptr, len(x), read=narrowed)
    parts = [packbits(x[a:b], bitorder) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    sizes = np.cumsum([0, *map(len, parts)])
    return torch.cat([x.new_empty(0, dtype=torch.uint8), *parts]), torch.from_numpy(sizes.astype(np.int32))
