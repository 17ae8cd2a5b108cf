# SPDX-License-Identifier: Apache-2.0
"""This module helps quantised caches: it rotates heads in NumPy, finds factors that make queries and keys alike, and
those by which errors of rounding keys are fed back."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn import _check
from cpu_attn._native import ffi, lib


def _blocks(n: int) -> list[slice]:
    """Cuts a head into blocks of powers of two, the largest first."""
    found, at = [], 0
    while at < n:
        size = 1 << (n - at).bit_length() - 1
        found.append(slice(at, at + size))
        at += size
    return found


def _signs(n: int) -> NDArray[np.float32]:
    """Gives +1 or -1 for each dimension; they repeat."""
    signs = np.frombuffer(ffi.buffer(lib.ca_signs), np.float32)
    return np.resize(signs, n)


def rotate(x: Any, back: bool = False) -> NDArray[np.floating[Any]]:
    """Rotates heads as a cache with ``kv_cache_rotation="hadamard"`` holds them, or back.

    R = H S is orthogonal. S flips signs. H is a Walsh-Hadamard matrix over the square root of its size; where D is no
    power of two, H is a row of such blocks, the largest first. Each element of R x is a sum over all of x, so one
    channel that is larger than the others spreads, and one scale fits the whole head.

    Args:
        x: [..., D] of any float dtype.
        back: whether to compute R^T x in place of R x.

    Returns:
        A new array: float64 of float64, else float32 with the bits of the kernels.

    Raises:
        ValueError: ``x`` has no last axis, or an empty one.
        TypeError: ``x`` is no array, or has another dtype.

    Maths: QuaRot, arXiv:2404.00456; docs/reference/cache_memory.md has the signs.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.rotation import rotate
        >>> x = np.array([0, 0, 0, 4], np.float32)
        >>> np.abs(rotate(x)).tolist()
        [2.0, 2.0, 2.0, 2.0]
        >>> bool((rotate(rotate(x), back=True) == x).all())
        True
    """
    x, back = _check.rows("x", x), _check.boolean("back", back)
    y = np.array(x, x.dtype if x.dtype == np.float64 else np.float32)
    signs = _signs(y.shape[-1]).astype(y.dtype)
    for block in _blocks(y.shape[-1]):
        part = y[..., block] * y.dtype.type(1 / sqrt(block.stop - block.start))
        if not back:
            part *= signs[block]
        h = 1
        while h < part.shape[-1]:
            pairs = part.reshape(*part.shape[:-1], part.shape[-1] // (2 * h), 2, h)  # -1 fails where no heads are
            part = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
            part = part.reshape(*y.shape[:-1], block.stop - block.start)
            h *= 2
        y[..., block] = part
    return y * signs if back else y


def balance(query: Any, key: Any, rot_dim: int | None = None, is_neox: bool = True) -> NDArray[np.float32]:
    """Finds factors that make the channels of queries and keys alike, which helps rotated, quantised keys.

    Queries are multiplied by the factors and keys divided by them, so q.k stays as it is. What quantising a rotated key
    costs q.k grows with the lengths of both vectors, and the product of the lengths is least where a channel is as
    large in the keys as in the queries. So a factor is sqrt(key / query).

    Args:
        query: [..., D] of floats, not negative: how large the channels of the queries are. Take the magnitudes of the
            weights that make them: of the norm before the rotary embedding (Qwen3; Gemma 3 with 1 + its weight), or the
            norms of the rows of the projection. The factors are multiplied into the same weights.
        key: [..., D]: the same for keys. A query head's are those of its kv head.
        rot_dim: of the rotary embedding, as in :func:`cpu_attn.rotary_reshape_and_cache`; D unless said. The two
            channels that the embedding turns into one another share a factor.
        is_neox: as in :func:`cpu_attn.rotary_reshape_and_cache`.

    Returns:
        float32 [..., D]: the factors of the queries. A size below 0.01 of the mean counts as 0.01 of it.

    Raises:
        ValueError: shapes differ, a size is negative or not finite, or ``rot_dim`` is odd or out of range.
        TypeError: an argument is no array, or has another dtype.

    Maths: the inequality of Cauchy and Schwarz; docs/quality.md has what it brings.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.rotation import balance
        >>> balance(np.array([1.0, 1.0]), np.array([4.0, 1.0]), rot_dim=0).tolist()
        [2.0, 1.0]
    """
    sizes = [_check.sizes(name, x) for name, x in (("query", query), ("key", key))]
    if sizes[0].shape != sizes[1].shape:
        raise ValueError(f"key: shape {sizes[1].shape}, expected query's, {sizes[0].shape}")
    head_size = sizes[0].shape[-1]
    rot_dim = _check.integer("rot_dim", head_size // 2 * 2 if rot_dim is None else rot_dim, 0, head_size)
    if rot_dim % 2:
        raise ValueError(f"rot_dim: {rot_dim} is odd")
    neox = _check.boolean("is_neox", is_neox)
    pairs = np.arange(rot_dim).reshape((2, -1) if neox else (-1, 2))
    for x in sizes:
        x[..., pairs] = np.sqrt(np.square(x[..., pairs]).mean(-2 if neox else -1, keepdims=True))
        x[...] = np.maximum(x, 0.01 * x.mean(-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.sqrt(sizes[1] / sizes[0])
    return np.where(np.isfinite(factors) & (factors > 0), factors, 1).astype(np.float32)  # 1: a side that is all 0


def error_feedback(weights: Any, kv_cache_rotation: str = "hadamard") -> NDArray[np.float32]:
    """Finds the factors by which a write feeds the errors of rounding a key's channels back into its later channels.

    What q.k loses is q.e, e being the error of the key as it is stored, and its mean square over queries is e H e^T,
    where H is the second moment of the queries, rotated like the keys. With H = M S M^T, where M is upper triangular
    with ones on its diagonal and S is diagonal, that is the sum of S_d (e M)_d^2. Where each error of rounding is fed
    back by its row of M's inverse, (e M)_d is what rounding channel d loses by itself, however much was lost before.

    Args:
        weights: [Hkv, D] of floats, not negative: the mean square of each channel in the queries, before the rotation
            of the cache; the mean of both channels of a rotary pair is steadier. Of a balanced model (:func:`balance`)
            that of the keys will do.
        kv_cache_rotation: of the cache, as in :func:`cpu_attn.reshape_and_cache`; what it says of K counts.

    Returns:
        float32 [Hkv, D, D], ``k_feedback`` of :func:`cpu_attn.reshape_and_cache`: at [h, j, d], d > j, what a number of
        channel d loses for each unit by which channel j of the key was rounded down, and 0 elsewhere. Without rotation
        H is diagonal and all of it is 0. A hundredth of the mean weight is added to each weight.

    Raises:
        ValueError: ``weights`` is not [Hkv, D], a weight is negative or not finite, or a name is unknown.
        TypeError: an argument is no array or no name, or has another dtype.

    Maths: GPTQ, arXiv:2210.17323; LDLQ of QuIP, arXiv:2307.13304; in float64.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.rotation import error_feedback
        >>> error_feedback(np.array([[3.0, 1.0]])).round(3).tolist()  # errors of both channels count by their product
        [[[0.0, 0.495], [0.0, 0.0]]]
    """
    sigma = _check.sizes("weights", weights)
    if sigma.ndim != 2:
        raise ValueError(f"weights: {sigma.ndim} axes, expected 2: [Hkv, D]")
    n = sigma.shape[-1]
    turns = rotate(np.eye(n)) if _check.kv_cache_rotation(kv_cache_rotation) & 1 else np.eye(n)
    most = sigma.max(-1, keepdims=True)
    sigma = np.divide(sigma, most, where=most > 0, out=np.ones_like(sigma))  # a head that counts nothing is all alike
    sigma += 0.01 * sigma.mean(-1, keepdims=True)
    inverse = turns.T / sigma[:, None] @ turns
    factor = np.linalg.cholesky(inverse).swapaxes(-1, -2)
    factor /= np.diagonal(factor, axis1=-2, axis2=-1)[..., None]
    factors: NDArray[np.float32] = np.triu(factor, 1).astype(np.float32)
    return factors
