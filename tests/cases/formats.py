# SPDX-License-Identifier: Apache-2.0
"""Numbers as caches hold them: dtypes, and what rounding to narrow ones does."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = ("float32", "float16", "bfloat16")
# Of quantised caches, exact in float32. K's saturates a few of a thousand normal numbers in e4m3.
SCALES = (0.00634765625, 0.37109375)


class Whole(NamedTuple):
    """Whole numbers with scales of their own: the least and the largest; how many elements of a row share a scale
    (None: all); what the largest magnitude is divided by for the scales that are tried."""

    least: int
    largest: int
    shared: int | None
    divisors: tuple[float, ...]


INTEGERS = {
    "int8": Whole(-127, 127, None, (127,)),
    "int6": Whole(-31, 31, None, (31, 31.5, 32, 32.5)),
    "int5": Whole(-15, 15, None, (15, 15.5, 16, 16.5)),
    "int4": Whole(-8, 7, 32, (7, 7.5, 8, 8.5)),
    "int4_per_token_head": Whole(-8, 7, None, (8, 8.5, 9, 9.5)),
}
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def kinds_of(kv_cache_dtype: str) -> list[str]:
    """What the caches of K and of V hold."""
    return (kv_cache_dtype.split("/") * 2)[:2]


def memory_dtype(kind: str, dtype: str) -> np.dtype[Any]:
    """Of a cache that holds ``kind``."""
    if kind in INTEGERS:
        return np.dtype(np.uint8)
    return np.dtype(getattr(ml_dtypes, _FP8[kind])) if kind in _FP8 else numpy_dtype(dtype)


def quantised(x: NDArray[Any], kv_cache_dtype: str, scale: float) -> NDArray[Any]:
    """x / scale in float32, saturating, rounded to nearest even."""
    dtype = np.dtype(getattr(ml_dtypes, _FP8[kv_cache_dtype]))
    most = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: NDArray[Any] = np.clip(x.astype(np.float32) / np.float32(scale), -most, most).astype(dtype)
    return rounded


def integers(x: NDArray[Any], kind: str) -> NDArray[np.float64]:
    """x as a kind of INTEGERS holds it. A scale is the largest magnitude over one of the divisors, in float32, rounded
    up to bfloat16; 4 bits give it the sign that makes an integer below 0 of that number. Of these scales the first one
    that loses least is taken, or the first of all unless that number lies between 2^-50 and 2^50: the sum of squared
    errors in units of the scale, times the scale's square, in float32. x times its reciprocal, in float32, goes to the
    nearest even integer that there is. NaN where what shares a scale is not finite."""
    row = INTEGERS[kind]
    step = row.shared or x.shape[-1]
    out = np.zeros(x.shape)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        for first in range(0, x.shape[-1], step):
            part = x[..., first : first + step].astype(np.float32)
            out[..., first : first + step] = _held(part, _searched(part, row), row)
    return out


def fed_back(x: NDArray[Any], kind: str, feedback: NDArray[np.float32]) -> NDArray[np.float64]:
    """x [T, H, D] as a kind of INTEGERS holds it where errors are fed back by [H, D, D]: in float32, by channel,
    e = x_j - what is held of it, and x_d - e * feedback[h, j, d] takes the place of x_d for every d > j. The scale is
    that of what the numbers that share it are when the first of them has its turn."""
    row = INTEGERS[kind]
    step = row.shared or x.shape[-1]
    x, out = x.astype(np.float32), np.zeros(x.shape)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        for j in range(x.shape[-1]):
            if j % step == 0:
                scale = _searched(x[..., j : j + step], row)
            held = _held(x[..., j : j + 1], scale, row)
            x[..., j + 1 :] -= (x[..., j : j + 1] - held) * feedback[:, j, j + 1 :]
            out[..., j : j + 1] = held
    return out


def _searched(part: NDArray[np.float32], row: Whole) -> NDArray[np.float32]:
    """The scale of a last axis, as `integers` says."""
    most, least = part.max(axis=-1, keepdims=True), part.min(axis=-1, keepdims=True)
    peak = np.maximum(most, -least)
    if -row.least > row.largest:
        peak = np.where(most > -least, -peak, peak)
    normal = (np.abs(peak) > 2.0**-50) & (np.abs(peak) < 2.0**50)
    found: NDArray[np.float32] = np.zeros_like(peak)
    lowest = np.zeros_like(peak)
    for i, divisor in enumerate(row.divisors):
        scale = _scales(peak / np.float32(divisor))
        off = part * (np.float32(1) / scale)
        lost = _sum_of_squares(off - np.rint(np.clip(off, row.least, row.largest))) * (scale * scale)
        take = normal & (lost < lowest) if i else np.full(peak.shape, True)
        found, lowest = np.where(take, scale, found), np.where(take, lost, lowest)
    found[~np.isfinite(part).all(axis=-1)] = np.nan
    return found


def _scales(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Away from 0 to bfloat16."""
    rounded: NDArray[np.float32] = ((x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(x == 0, np.float32(0), rounded)


def _held(x: NDArray[np.float32], scale: NDArray[np.float32], row: Whole) -> NDArray[np.float32]:
    safe = np.where(scale == 0, np.float32(1), scale)
    whole = np.rint(np.where(np.abs(safe) >= 2.0**-126, x * (np.float32(1) / safe), x / safe))
    return np.clip(whole, row.least, row.largest) * scale


def _sum_of_squares(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis, in float32 as the contract orders it: element i goes to the (i mod 16)-th sum, the second
    half of the sums to the first until one is left."""
    sums = [np.zeros(x.shape[:-1], np.float32) for _ in range(16)]
    for i in range(x.shape[-1]):
        sums[i % 16] = sums[i % 16] + x[..., i] * x[..., i]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0][..., None]


def rotates(kv_cache_rotation: str) -> list[bool]:
    """Whether the cache of K, and that of V, is rotated."""
    return [name == "hadamard" for name in kinds_of(kv_cache_rotation)]


def _walsh_hadamard(x: NDArray[Any]) -> NDArray[Any]:
    """By Sylvester's construction, over a last axis of a power of two; sums in the order that the contract gives."""
    half = x.shape[-1] // 2
    if not half:
        return x
    a, b = _walsh_hadamard(x[..., :half]), _walsh_hadamard(x[..., half:])
    return np.concatenate([a + b, a - b], axis=-1)


def _signs(n: int) -> NDArray[np.float32]:
    """The contract's: by the last bit of a hash of the dimension, which repeat after 1024."""
    signs = []
    for d in range(n):
        h = d % 1024 + 1
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        signs.append(-1.0 if (h ^ h >> 16) & 1 else 1.0)
    return np.array(signs, np.float32)


def hadamard(x: NDArray[Any], back: bool = False) -> NDArray[Any]:
    """Each row of x [..., D] rotated as kv_cache_rotation says, or back; in x's dtype, float32 or float64."""
    n = x.shape[-1]
    signs, at, parts = _signs(n).astype(x.dtype), 0, []
    with np.errstate(invalid="ignore", over="ignore"):
        for size in (1 << i for i in reversed(range(n.bit_length())) if n >> i & 1):
            part = x[..., at : at + size] * x.dtype.type(1 / np.sqrt(size))
            parts.append(_walsh_hadamard(part if back else part * signs[at : at + size]))
            at += size
        rotated = np.concatenate(parts, axis=-1)
    return rotated * signs if back else rotated
