# SPDX-License-Identifier: Apache-2.0
"""Caches with a number in every slot, and what they hold, for the tests of caches as data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn import PagedKVCache

from ..cases.formats import INTEGERS, integers, kinds_of, numpy_dtype, quantised

NARROW = ["fp8_e4m3", "fp8_e5m2", "int8", "int4", "int8/int4", "int6/int5", "fp8/auto", "auto/int4"]
NARROW += ["int4_per_token_head"]
GOOD: dict[str, Any] = {
    "layout": "pairs-v1",
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8_e4m3",
    "num_blocks": 5,
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 24,
    "head_size_v": 7,
    "k_scale": 0.37,
    "v_scale": 1.5,
    "isa": "amx",
    "kv_cache_rotation": "hadamard/none",
}


def filled(dtype: str, isa: str = "auto", sizes: tuple[int, int] = (24, 7), block_size: int = 16, **how: Any) -> Any:
    """A cache with a number in every slot, and the numbers [slots, Hkv, D], [slots, Hkv, Dv]."""
    rng, slots = np.random.default_rng(3), 5 * block_size
    cache = PagedKVCache(5, block_size, 2, sizes[0], dtype, isa, head_size_v=sizes[1], **how)
    key, value = ((rng.standard_normal((slots, 2, n)) * 4).astype(numpy_dtype(dtype)) for n in sizes)
    cache.update(key, value, np.arange(slots))
    return cache, key, value


def scales_for(kv_cache_dtype: str, k_scale: float, v_scale: float) -> dict[str, float]:
    """Those that apply."""
    named = zip(("k_scale", "v_scale"), (k_scale, v_scale), kinds_of(kv_cache_dtype), strict=True)
    return {name: scale for name, scale, kind in named if kind.startswith("fp8")}


def held(x: NDArray[Any], kind: str, scale: float) -> NDArray[np.float64]:
    """The numbers that a cache holds of x."""
    if kind in INTEGERS:
        return integers(x, kind) + 0.0  # an integer has no negative zero
    if kind.startswith("fp8"):
        numbers: NDArray[np.float64] = quantised(x, kind, scale).astype(np.float64) * np.float64(np.float32(scale))
        return numbers
    return x.astype(np.float64)


def contents(cache: PagedKVCache) -> tuple[NDArray[Any], NDArray[Any]]:
    return cache.gather(np.arange(cache.num_blocks, dtype=np.int32), cache.num_blocks * cache.block_size)
