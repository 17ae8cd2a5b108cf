# SPDX-License-Identifier: Apache-2.0
"""The rotation of a cache in NumPy: what ``kv_cache_rotation="hadamard"`` does to each head."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn._native import ffi, lib


def _blocks(n: int) -> list[slice]:
    """A head as blocks of powers of two, the largest first."""
    found, at = [], 0
    while at < n:
        size = 1 << (n - at).bit_length() - 1
        found.append(slice(at, at + size))
        at += size
    return found


def _signs(n: int) -> NDArray[np.float32]:
    """+1 or -1 for each dimension; they repeat."""
    signs = np.frombuffer(ffi.buffer(lib.ca_signs), np.float32)
    return np.resize(signs, n)


def rotate(x: NDArray[np.floating[Any]], back: bool = False) -> NDArray[np.floating[Any]]:
    """R x of each row of x [..., D], or back: R^T x. float64 stays; all else is float32, with the bits of the kernels.

    R = H S is orthogonal: S flips signs, H is a Walsh-Hadamard matrix over the square root of its size; a D that is no
    power of two is a row of such blocks, the largest first. An element of R x is a sum of all of x, so that one
    channel which is larger than all others spreads, and a scale fits the whole head (arXiv:2404.00456).
    """
    y = np.array(x, x.dtype if x.dtype == np.float64 else np.float32)
    signs = _signs(y.shape[-1]).astype(y.dtype)
    for block in _blocks(y.shape[-1]):
        part = y[..., block] * y.dtype.type(1 / sqrt(block.stop - block.start))
        if not back:
            part *= signs[block]
        h = 1
        while h < part.shape[-1]:
            pairs = part.reshape(*part.shape[:-1], -1, 2, h)
            part = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
            part = part.reshape(*y.shape[:-1], -1)
            h *= 2
        y[..., block] = part
    return y * signs if back else y
