# SPDX-License-Identifier: Apache-2.0
"""Checks of caches: what they hold, their layouts, their scales and their sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn._arrays import Array, describe
from cpu_attn._check.arrays import FLOATS, array, disjoint
from cpu_attn._check.faults import misfit, new_fault
from cpu_attn._check.values import TINY, choice, number
from cpu_attn._dtypes import CODES, FORMATS, dtype_name, is_scaled
from cpu_attn._errors import none_of
from cpu_attn._native import lib

LAYOUTS = {"packed": lib.CA_PACKED, "HND": lib.CA_HND, "NHD": lib.CA_NHD}  # vLLM has the last two names, too
ROTATIONS = ("none", "hadamard")
# These are the names that users have for the formats of quantised caches; several may mean the same format.
NARROW = {name: kv for kv, row in FORMATS.items() for name in (*row.aliases, kv)}


@functools.cache  # there are few names, and a call that raises leaves nothing in it
def _kv_dtypes(kv_cache_dtype: str, dtype: str) -> tuple[str, ...]:
    names = kv_cache_dtype.split("/")
    found = tuple(dtype if name in ("auto", dtype) else NARROW.get(name, "") for name in names)
    if not all(found) or len(names) > 2:
        what = none_of("kv_cache_dtype", kv_cache_dtype, ("auto", *NARROW))
        raise ValueError(f"{what}, nor the dtype {dtype!r}, nor two of them as 'K/V'")
    return found * (3 - len(names))


def kv_dtypes(kv_cache_dtype: Any, dtype: Any) -> tuple[str, ...]:
    """Says what the cache of K and the cache of V hold: ``dtype``, or a name of FORMATS."""
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype: expected a name, got {type(kv_cache_dtype).__name__}")
    return _kv_dtypes(kv_cache_dtype, dtype if isinstance(dtype, str) else dtype_name(dtype))


def keys_alone(kv_cache_dtype: Any) -> str:
    """Says what a cache of keys without values holds. A name that is unknown passes, since kv_dtypes refuses it."""
    if not isinstance(kv_cache_dtype, str):
        return "?"
    found = list(dict.fromkeys(NARROW.get(kv, kv) for kv in kv_cache_dtype.split("/")))
    if len(found) > 1:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, an indexer has keys alone")
    return found[0]


def kv_cache_layout(x: Any, kvs: Sequence[str] = ()) -> str:
    """Checks the name of a layout. kvs: what the caches are to hold, as kv_dtypes says it."""
    layout: str = choice("kv_cache_layout", x, LAYOUTS)
    for kv in kvs:
        if layout != "packed" and is_scaled(kv):
            raise ValueError(f"kv_cache_layout: {x!r} holds no {kv}")
    return layout


@functools.cache  # there are as few rotations
def _rotated(rotation: str) -> int:
    names = rotation.split("/")
    if len(names) > 2 or any(name not in ROTATIONS for name in names):
        raise ValueError(f"{none_of('kv_cache_rotation', rotation, ROTATIONS)}, nor two of them as 'K/V'")
    return sum((name != "none") << i for i, name in enumerate((names * 2)[:2]))


def kv_cache_rotation(x: Any) -> int:
    """Gives the bits of ca_shape.hadamard: 1 where K is to be rotated, and 2 where V is."""
    if not isinstance(x, str):
        raise TypeError(f"kv_cache_rotation: expected a name, got {type(x).__name__}")
    return _rotated(x)


def numa(x: Any) -> str | None:
    """Checks the name of the way in which a cache's memory lies on NUMA nodes."""
    found: str | None = choice("numa", x, ("interleave", "blocks", None))
    return found


def memory(kv: str) -> tuple[str, ...]:
    """Gives the dtypes that an array may have whose memory holds ``kv``."""
    return FORMATS[kv].memory if kv in FORMATS else (kv,)


def scales(k_scale: Any, v_scale: Any, kvs: Sequence[str]) -> tuple[float, float]:
    """Gives both scales as floats. They are positive, and 1 unless the cache is fp8. kvs: what kv_dtypes says; a name
    that is unknown passes, since kv_dtypes refuses it."""
    if type(k_scale) is float and type(v_scale) is float and k_scale == v_scale == 1.0:
        return k_scale, v_scale
    found = number("k_scale", k_scale), number("v_scale", v_scale)
    for name, x, kv in zip(("k_scale", "v_scale"), found, kvs, strict=True):
        if (kv in ("auto", *FLOATS) or is_scaled(NARROW.get(kv, kv))) and x != 1.0:
            holds = "integers with scales of their own" if kv in FORMATS else "plain numbers"
            raise ValueError(f"{name}: {x} applies to fp8 caches, this one holds {holds}; expected 1.0")
        if x < TINY:
            raise ValueError(f"{name}: {x} is not a positive, normal float32 >= {TINY}")
    return found


def feeds_back(name: str, kv: str) -> None:
    """Raises ValueError unless errors of rounding can be fed back in a cache of K that holds ``kv``. A name that is
    unknown passes, since kv_dtypes refuses it."""
    if kv in ("auto", *FLOATS) or (kv in NARROW and not is_scaled(NARROW[kv])):
        names = ", ".join(name for name in FORMATS if is_scaled(name))
        raise ValueError(f"{name}: applies to keys of integers ({names}), this cache's are {kv}; expected None")


def feedback(name: str, x: Any, kv: str, num_kv_heads: int | None, head_size: int | None) -> NDArray[np.float32]:
    """Gives a copy of factors for :func:`feeds_back`, which have to be finite."""
    feeds_back(name, kv)
    sizes = [("num_kv_heads", num_kv_heads), ("head_size", head_size), ("head_size", head_size)]
    found = np.array(array(name, x, ["float32"], sizes).numpy())
    for where in np.argwhere(~np.isfinite(found))[:1]:
        at = ", ".join(map(str, where))
        raise ValueError(f"{name}[{at}]: {found[tuple(where)]}, expected a finite number")
    return found


def cache(
    name: str,
    x: Any,
    kv: str,
    num_kv_heads: int | None,
    num_blocks: int | None,
    block_size: int | None,
    layout: str = "packed",
) -> Array:
    """Checks a cache [N, Hkv, B, width], or [N, B, Hkv, D] in layout NHD. Strides are free, but a packed block of a
    head is dense."""
    axes = [("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("block_size", block_size), ("width", None)]
    if layout == "NHD":
        axes[1], axes[2] = axes[2], axes[1]
    a, fault = array(name, x, memory(kv), axes), new_fault()
    if lib.ca_check_cache(describe(a), LAYOUTS[layout], fault):
        raise misfit(fault, name, a)
    return a


def caches(
    key_cache: Any, value_cache: Any, kvs: Sequence[str], num_kv_heads: int | None, layout: str
) -> tuple[Array, Array]:
    """Checks both caches, whose sizes are the same but for the last axis."""
    k = cache("key_cache", key_cache, kvs[0], num_kv_heads, None, None, layout)
    num_blocks, num_kv_heads, block_size = cache_sizes(k.shape, layout)
    return k, cache("value_cache", value_cache, kvs[1], num_kv_heads, num_blocks, block_size, layout)


def cache_sizes(shape: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Gives num_blocks, num_kv_heads and block_size of a cache's shape. The exchange undoes itself, so it also gives
    the first axes of a shape from these three."""
    n, h, b = shape[:3]
    return (n, b, h) if layout == "NHD" else (n, h, b)


def pages(
    arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]], kvs: Sequence[str], layout: str
) -> list[np.ndarray[Any, Any]]:
    """Gives the memory of K and of V, which must have these shapes, as NumPy arrays."""
    found = {}
    for name, x, kv, shape in zip(("key_cache", "value_cache"), arrays, kvs, shapes, strict=True):
        num_blocks, num_kv_heads, block_size = cache_sizes(shape, layout)
        a = found[name] = cache(name, x, kv, num_kv_heads, num_blocks, block_size, layout)
        if a.shape[3] != shape[3]:
            raise ValueError(f"{name}: axis 3 is {a.shape[3]}, expected {shape[3]}")
    if layout == "packed":
        disjoint("key_cache", found["key_cache"], {"value_cache": found["value_cache"]})
    return [
        np.asarray(x) if isinstance(x, np.ndarray) else a.numpy() for x, a in zip(arrays, found.values(), strict=True)
    ]


def width(isa: int, dtype: int, kv: str, block_size: int, head_size: int) -> int:
    """Gives the size of a cache's last axis: a block of block_size * width elements has room for K or V in the isa's
    layout."""
    return int(lib.ca_cache_width(isa, dtype, CODES[kv][0], block_size, head_size))


def cache_width(name: str, a: Array, isa: int, dtype: int, kv: str, head_size: int, layout: str = "packed") -> None:
    fault = new_fault()
    if lib.ca_check_width(describe(a), LAYOUTS[layout], isa, dtype, CODES[kv][0], head_size, fault):
        raise misfit(fault, name, a)
