# SPDX-License-Identifier: Apache-2.0
"""fp8 caches: every rounding, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference

from ..cases.formats import numpy_dtype, quantised
from ..harness.kernels import KERNELS

KINDS = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def numbers(dtype: str) -> NDArray[Any]:
    """Every number of a 16-bit dtype; of float32 those, their neighbours, and what lies just between two fp8 ones."""
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype != "float32":
        return bits.view(numpy_dtype(dtype))
    wide = bits.astype(np.uint32) << 16
    middles = []
    for kind in KINDS.values():
        every = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
        finite = np.unique(every[np.isfinite(every)])
        middles.append((finite[1:] + finite[:-1]) / 2)
    middle = np.concatenate(middles).astype(np.float32).view(np.uint32)
    return np.concatenate([wide, wide + 1, wide - 1, middle, middle + 1, middle - 1]).view(np.float32)


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("scale", [1.0, 0.37109375])
def test_every_rounding(isa: str, dtype: str, kv_cache_dtype: str, scale: float) -> None:
    x = numbers(dtype)
    x = np.resize(x, (-(-len(x) // 48), 1, 48))
    scales = scale, 3 * scale
    cache = cpu_attn.PagedKVCache(
        -(-len(x) // 16), 16, 1, 48, dtype, isa, kv_cache_dtype=kv_cache_dtype, k_scale=scales[0], v_scale=scales[1]
    )
    cache.update(x, x, np.arange(len(x)))
    table = np.arange(cache.num_blocks, dtype=np.int32)
    for got, own in zip(cache.gather(table, len(x)), scales, strict=True):
        want = quantised(x, kv_cache_dtype, own)
        assert got.dtype == want.dtype
        nan = np.isnan(want.astype(np.float32))
        assert np.isnan(got[nan].astype(np.float32)).all()
        assert got[~nan].tobytes() == want[~nan].tobytes()


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_every_byte_is_read_exactly(isa: str, engine: str, dtype: str, kv_cache_dtype: str) -> None:
    """One key: the output is its value."""
    every = np.arange(256, dtype=np.uint8).view(KINDS[kv_cache_dtype])
    value = np.resize(every, (1, 1, 16, 256)).copy()  # all tokens alike, so that it lies as in every layout
    cache = cpu_attn.PagedKVCache(1, 16, 1, 2, dtype, isa, head_size_v=256, kv_cache_dtype=kv_cache_dtype)
    cache.value_cache.view(np.uint8)[...] = 0
    tokens = np.repeat(value[:, 0, :1], 16, axis=1).astype(numpy_dtype(dtype))[0][:, None]
    with np.errstate(invalid="ignore"):
        cache.update(np.zeros((16, 1, 2), numpy_dtype(dtype)), np.nan_to_num(tokens, posinf=1, neginf=1), np.arange(16))
    plan = cache.plan(np.array([0, 1], np.int32), np.array([1], np.int32), 1, engine=engine)
    got = cache.attend(np.zeros((1, 1, 2), numpy_dtype(dtype)), np.zeros((1, 1), np.int32), plan)[0, 0]
    finite = np.isfinite(every.astype(np.float32))
    assert (got[finite].astype(np.float32) == every[finite].astype(np.float32)).all()


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9, 80])
@pytest.mark.parametrize("of_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_nan_is_seen_by_who_sees_its_key(
    isa: str, dtype: str, of_value: bool, num_tokens: int, kv_cache_dtype: str
) -> None:
    size, n, at = 72, 160, 100
    numbers = np.random.default_rng(7).standard_normal((3, n, 2, size)).astype(numpy_dtype(dtype))
    numbers[int(of_value), at, 0, -1] = np.nan
    cache = cpu_attn.PagedKVCache(10, 16, 1, size, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.update(numbers[0, :, :1], numbers[1, :, :1], np.arange(n))
    plan = cache.plan(np.array([0, num_tokens], np.int32), np.array([n], np.int32), 2)
    got = np.isnan(cache.attend(numbers[2, :num_tokens], np.arange(10, dtype=np.int32)[None], plan).astype(np.float32))
    want = np.zeros_like(got)
    want[np.arange(n - num_tokens, n) >= at, :, -1 if of_value else 0 :] = True
    assert (got == want).all()


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_odd_head_sizes_over_memory_that_held_nan(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """What lies between the elements is no part of them. V of 33 columns: of fewer, bfloat16 goes by FMA."""
    n, start, table = 20, np.array([0, 20], np.int32), np.array([[1, 0]], np.int32)
    cache = cpu_attn.PagedKVCache(2, 16, 1, 7, dtype, isa, head_size_v=33, kv_cache_dtype=kv_cache_dtype)
    for memory in (cache.key_cache, cache.value_cache):
        memory.view(np.uint8)[...] = 0x7F
    key, query, value = (
        np.random.default_rng(8).standard_normal((n, heads, size)).astype(numpy_dtype(dtype))
        for heads, size in ((1, 7), (2, 7), (1, 33))
    )
    cache.update(key, value, (np.arange(n) + 16) % 32)
    output = cache.attend(query, table, cache.plan(start, start[1:], 2), scale=0.4)
    stored = [x.astype(np.float64) for x in cache.gather(table[0], n)]
    want, _ = reference.attention(query, stored[:1], stored[1:], start, start[1:], 0.4)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET[dtype]).all()


def attended(cache: cpu_attn.PagedKVCache, key_cache: Any, value_cache: Any, **arguments: Any) -> Any:
    query = np.ones((1, 2, 32), np.float32)
    start, lens, table = np.array([0, 1], np.int32), np.array([5], np.int32), np.zeros((1, 1), np.int32)
    plan = cache.plan(start, lens, 2)
    return cpu_attn.attention_with_kv_cache(
        query, key_cache, value_cache, np.zeros_like(query), start, lens, 0.25, True, None, -1, table, 0.0, plan,
        **{"k_scale": 0.5, "v_scale": 2.0, "kv_cache_dtype": "fp8", **arguments},
    )  # fmt: skip


@pytest.fixture
def cache() -> cpu_attn.PagedKVCache:
    made = cpu_attn.PagedKVCache(1, 16, 1, 32, "float32", kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    rng = np.random.default_rng(3)
    made.update(*rng.standard_normal((2, 5, 1, 32)).astype(np.float32), np.arange(5))
    return made


def test_bytes_are_as_good_as_float8(cache: cpu_attn.PagedKVCache) -> None:
    k, v = cache.key_cache, cache.value_cache
    as_bytes = attended(cache, k.view(np.uint8), v.view(np.uint8))
    assert np.abs(as_bytes).max() > 0.1
    assert as_bytes.tobytes() == attended(cache, k, v).tobytes()


def test_a_cache_attends_by_its_own_scales(cache: cpu_attn.PagedKVCache) -> None:
    query = np.random.default_rng(4).standard_normal((1, 2, 32), np.float32)
    start, lens, table = np.array([0, 1], np.int32), np.array([5], np.int32), np.zeros((1, 1), np.int32)
    output = cache.attend(query, table, cache.plan(start, lens, 2), scale=0.25)
    key, value = (x.astype(np.float32) * s for x, s in zip(cache.gather(table[0], 5), (0.5, 2.0), strict=True))
    want, _ = reference.attention(query, [key], [value], start, lens, 0.25)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET["float32"]).all()


def test_scales_take_part(cache: cpu_attn.PagedKVCache) -> None:
    k, v = cache.key_cache, cache.value_cache
    output = attended(cache, k, v)
    assert np.allclose(attended(cache, k, v, v_scale=4.0), 2 * output)
    assert not np.allclose(attended(cache, k, v, k_scale=1.5), output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_cache_dtype": "auto"}, ["kv_cache_dtype", "auto", "fp8_e4m3"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype", "fp8_e5m2", "fp8_e4m3"]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype", "int4", "fp8_e4m3"]),
        ({"k_scale": 0.0}, ["k_scale", "0.0", "positive"]),
        ({"v_scale": -1.0}, ["v_scale", "-1.0", "positive"]),
        ({"k_scale": float("nan")}, ["k_scale", "nan"]),
        ({"v_scale": float("inf")}, ["v_scale", "inf"]),
    ],
)
def test_refused(cache: cpu_attn.PagedKVCache, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        attended(cache, cache.key_cache, cache.value_cache, **arguments)


def test_another_float8_is_refused(cache: cpu_attn.PagedKVCache) -> None:
    other = cache.key_cache.view(ml_dtypes.float8_e5m2)
    with pytest.raises(TypeError, match="key_cache: dtype float8_e5m2, expected float8_e4m3fn or uint8"):
        attended(cache, other, cache.value_cache)
    attended(cache, cache.key_cache, cache.value_cache)  # accepted and remembered: still refused
    with pytest.raises(TypeError, match="value_cache: dtype float8_e5m2"):
        attended(cache, cache.key_cache, cache.value_cache.view(ml_dtypes.float8_e5m2))


def test_writes_by_their_own_name_only(cache: cpu_attn.PagedKVCache) -> None:
    """One signature, two meanings: uint8 caches of e4m3 and of e5m2, by turns."""
    x = np.full((1, 1, 32), 3.3, np.float32)
    k, v = (np.zeros_like(c.view(np.uint8)) for c in (cache.key_cache, cache.value_cache))
    for kv_cache_dtype, kind in (*KINDS.items(), *KINDS.items()):
        cpu_attn.reshape_and_cache(x, x, k, v, np.zeros(1, np.int64), cache.isa, 1.0, 1.0, kv_cache_dtype)
        assert v.ravel()[0] == np.float32(3.3).astype(kind).view(np.uint8)
    with pytest.raises(TypeError, match="key_cache: dtype uint8, expected float32"):
        cpu_attn.reshape_and_cache(x, x, k, v, np.zeros(1, np.int64), cache.isa)
