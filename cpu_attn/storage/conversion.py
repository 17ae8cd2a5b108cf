# SPDX-License-Identifier: Apache-2.0
"""This module converts a cache to another layout, dtype or quantisation, from any to any other, in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpu_attn import _check
from cpu_attn._dtypes import DTYPES, FORMATS, KVFormat, dtype_name, is_fp8
from cpu_attn.rotation import rotate
from cpu_attn.storage.cache import PagedKVCache
from cpu_attn.storage.descriptor import CacheDescriptor
from cpu_attn.storage.files import StoredCache
from cpu_attn.storage.layout import LANES, Form, groups_of, pack, padded, unpack
from cpu_attn.storage.memory import Memory, memory_dtype

CHUNK = 1 << 20  # elements converted at a time
Factors = NDArray[np.float32]


def convert(
    cache: PagedKVCache | StoredCache,
    *,
    isa: str = "auto",
    dtype: Any = None,
    kv_cache_dtype: str | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    kv_cache_layout: str | None = None,
    kv_cache_rotation: str | None = None,
    k_feedback: Any = None,
) -> PagedKVCache:
    """Makes a new cache of the same tokens in the same slots, for another isa, dtype, quantisation or layout.

    What has the same kind, scale and rotation keeps its bits, scales of integers among them. Other numbers are exact
    where the new cache can hold them, and are rounded once to nearest even where not. Into a quantised cache they go as
    :func:`cpu_attn.reshape_and_cache` would write float32. Besides the new cache it takes a few megabytes.

    Args:
        cache: a :class:`cpu_attn.PagedKVCache`, or a :class:`StoredCache` of any machine.
        isa: whose layout; ``auto`` takes the best isa of this machine.
        dtype: of keys and values; what the old cache has unless said.
        kv_cache_dtype: what the old cache has unless said.
        k_scale: what the old cache has unless said; 1 where the new one is not fp8.
        v_scale: what the old cache has unless said; 1 where the new one is not fp8.
        kv_cache_layout: ``packed``, ``HND`` or ``NHD``; what the old cache has unless said.
        kv_cache_rotation: what the old cache has unless said.
        k_feedback: of the new cache, as :class:`cpu_attn.PagedKVCache` takes it; the old one's is not taken over. Keys
            that keep their bits are as they were.

    Returns:
        The new cache.

    Raises:
        ValueError: :class:`cpu_attn.PagedKVCache` refuses what is asked for.
        TypeError: an argument has another type.
        UnavailableError: this machine does not have the isa.
        MemoryError: there is no memory for the new cache.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.storage import PagedKVCache, convert
        >>> cache = PagedKVCache(4, 16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> cache.update(np.ones((1, 2, 64), np.float32), np.ones((1, 2, 64), np.float32), np.array([5]))
        >>> rows = convert(cache, kv_cache_layout="NHD")
        >>> bool((rows.key_cache[0, 5] == 1).all())  # block 0, token 5
        True
    """
    _check.instance("cache", cache, PagedKVCache, StoredCache)
    old = cache.descriptor
    name = old.dtype if dtype is None else dtype_name(dtype)
    if kv_cache_dtype is None:
        kv_cache_dtype = "/".join("auto" if kv == old.dtype else kv for kv in old.kv_cache_dtype.split("/"))
    fp8 = [is_fp8(kind) for kind in _check.kv_dtypes(kv_cache_dtype, name)]
    new = PagedKVCache(
        old.num_blocks,
        old.block_size,
        old.num_kv_heads,
        old.head_size,
        name,
        isa,
        head_size_v=old.head_size_v,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_scale if k_scale is not None else old.k_scale if fp8[0] else 1.0,
        v_scale=v_scale if v_scale is not None else old.v_scale if fp8[1] else 1.0,
        kv_cache_layout=old.kv_cache_layout if kv_cache_layout is None else kv_cache_layout,
        kv_cache_rotation=old.kv_cache_rotation if kv_cache_rotation is None else kv_cache_rotation,
        k_feedback=k_feedback,
    )
    for value, (source, target) in enumerate(
        ((cache.key_cache, new.key_cache), (cache.value_cache, new.value_cache)),
    ):
        _convert_pages(
            source[: old.num_blocks], target, old, new.descriptor, bool(value), None if value else new.k_feedback
        )
    return new


def _convert_pages(
    source: Memory, target: Memory, old: CacheDescriptor, new: CacheDescriptor, value: bool, feedback: Factors | None
) -> None:
    head_size = old.head_size_v if value else old.head_size
    forms = [Form(d.layout, d.stored[value], head_size, value) for d in (old, new)]
    scales = [_scale(d.v_scale if value else d.k_scale) for d in (old, new)]
    source, target = (x.view(memory_dtype(form.kind)) for x, form in zip((source, target), forms, strict=True))
    rotated = [_check.kv_cache_rotation(d.kv_cache_rotation) >> value & 1 for d in (old, new)]
    as_it_is = (forms[0].kind, scales[0], rotated[0]) == (forms[1].kind, scales[1], rotated[1])
    step = max(1, CHUNK // (old.num_kv_heads * groups_of(old.block_size) * LANES * head_size))
    with np.errstate(all="ignore"):
        for first in range(0, old.num_blocks, step):
            blocks = slice(first, first + step)
            stored = unpack(source[blocks], forms[0])
            if not as_it_is:
                numbers = _numbers(*stored, forms[0], scales[0])
                if rotated[0] != rotated[1]:
                    turned = rotate(numbers if rotated[0] else numbers.astype(np.float32), back=rotated[0] > 0)
                    numbers = turned.astype(np.float64)
                stored = _stored(numbers, new, forms[1], scales[1], feedback)
            pack(*stored, forms[1], target[blocks])


def _scale(x: float) -> float:
    """Rounds a scale to float32, as C takes it."""
    return float(np.float32(x))


def _numbers(elements: Memory, scales: Memory, form: Form, scale: float) -> NDArray[np.float64]:
    """Gives what elements mean, exactly: 0, not -0, times a negative scale; a NaN scale makes all of them NaN."""
    if not form.scales:
        return elements.astype(np.float64) * scale
    each = np.repeat(_widened(scales), form.scale_elements, axis=-1)[..., : form.head_size]
    return _whole_numbers(FORMATS[form.kind])[elements] * each + 0.0


def _whole_numbers(row: KVFormat) -> NDArray[np.float64]:
    """Gives what integers mean before their scale, by how they are stored."""
    if row.zero:
        return np.arange(2.0**row.bits) - row.zero
    return np.append(np.arange(128.0), 0 - np.arange(128.0))


def _widened(bits: Memory) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _stored(
    numbers: NDArray[np.float64], to: CacheDescriptor, form: Form, scale: float, feedback: Factors | None
) -> tuple[Memory, Memory]:
    """Gives elements and scales as pack wants them."""
    dtype, none = memory_dtype(form.kind), np.zeros((*numbers.shape[:3], 0), np.uint16)
    if form.scales:
        return _integers(numbers.astype(np.float32), form, feedback)
    if form.kind == to.dtype:
        return _round_once(numbers, dtype), none
    most = float(ml_dtypes.finfo(dtype).max)
    divided = numbers.astype(np.float32) / np.float32(scale)
    return np.clip(divided, -most, most).astype(dtype), none


def _integers(x: NDArray[np.float32], form: Form, feedback: Factors | None) -> tuple[Memory, Memory]:
    """Quantises as kv_formats/quantised.inc does, and feeds errors back as kv_formats/feedback.inc does."""
    (n, heads, size, _), row = x.shape, FORMATS[form.kind]
    x = padded(x, size, form.scales * form.scale_elements).reshape(n, heads, size, form.scales, -1)
    scales = _scales_of(x, row) if feedback is None else _feed_back(x, form, feedback)
    whole = _rounded(x, scales[..., None], row).reshape(n, heads, size, -1)[..., : form.head_size]
    stored = whole + row.zero if row.zero else np.where(whole < 0, 128 - whole, whole)
    return stored.astype(np.uint8), scales


def _rounded(x: NDArray[np.float32], scales: Memory, row: KVFormat) -> NDArray[np.float32]:
    """Gives the integers of x: x times the reciprocal of the scale, or x over the scale where that has no normal
    reciprocal, rounded to nearest even and clipped."""
    over = _widened(np.where(scales == 0, 0x3F80, scales))
    whole = np.rint(np.where(np.abs(over) >= 2.0**-126, x * (1 / over), x / over))
    return np.where(np.isnan(over), 0, np.clip(whole, -row.zero or -row.largest, row.largest))


def _feed_back(x: NDArray[np.float32], form: Form, feedback: Factors) -> Memory:
    """Makes of x [N, Hkv, B, parts, elements] what is rounded where errors are fed back, and gives the scales."""
    row, flat = FORMATS[form.kind], x.reshape(*x.shape[:3], -1)
    scales = np.zeros(x.shape[:4], np.uint16)
    for j in range(form.head_size):
        part, at = divmod(j, x.shape[4])
        if not at:
            scales[..., part] = _scales_of(x[..., part, :], row)
        its = scales[..., part]
        error = flat[..., j] - _rounded(flat[..., j], its, row) * _widened(its)
        flat[..., j + 1 : form.head_size] -= error[..., None] * feedback[:, None, j, j + 1 :]
    return scales


def _scales_of(x: NDArray[np.float32], row: KVFormat) -> Memory:
    """Finds a scale for each last axis of x as kv_formats/scales.inc does: of the largest magnitude over each divisor,
    rounded away from 0 to bfloat16, the one that loses least. Where there are more integers below 0 than above, it has
    the sign that makes one of them of the largest magnitude."""
    above, below = x.max(axis=-1), -x.min(axis=-1)
    peak = np.where(above > below, -above if row.zero else above, below)
    normal = (np.abs(peak) > 2.0**-50) & (np.abs(peak) < 2.0**50)
    best, lowest = np.zeros(peak.shape, np.uint32), np.full(peak.shape, np.nan, np.float32)
    for divisor in row.divisors:
        up = (peak / np.float32(divisor)).view(np.uint32) + np.uint32(0xFFFF) >> 16
        scale = _widened(up)
        over = x * (np.float32(1) / scale)[..., None]
        off: NDArray[np.float32] = over - np.rint(np.clip(over, -row.zero or -row.largest, row.largest))
        lost = _sum_of_squares(off)
        lost *= scale * scale
        better = normal & (lost < lowest) if divisor > row.divisors[0] else np.full(peak.shape, True)
        best, lowest = np.where(better, up, best), np.where(better, lost, lowest)
    best[best == 0x8000] = 0  # -0
    return np.where(np.isfinite(x).all(axis=-1), best, 0x7FC0).astype(np.uint16)


def _sum_of_squares(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums squares over the last axis in the order of kv_formats/numbers.h: 16 sums of every 16th square, then these by
    halves."""
    square = np.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])
    sums = np.zeros((*x.shape[:-1], 16), np.float32)
    for first in range(0, square.shape[-1], 16):
        sums = sums + square[..., first : first + 16]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _round_once(numbers: NDArray[np.float64], dtype: np.dtype[Any]) -> Memory:
    """Rounds doubles to a dtype once. ml_dtypes takes them by way of float32, so they are first rounded to odd there,
    which leaves the last rounding to the second step (Boldo and Melquiond, "When double rounding is odd")."""
    if dtype.kind == "f" and dtype.itemsize <= 8 and dtype != DTYPES["bfloat16"]:
        return numbers.astype(dtype)
    single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(numbers)
    bits |= (single != numbers) & ~np.isnan(numbers)
    return single.astype(dtype)
