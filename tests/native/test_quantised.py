# SPDX-License-Identifier: Apache-2.0
"""Caches of integers: every rounding, tokens beside one another, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn.primitives import gather_pages

from ..cases.formats import INTEGERS, hadamard, integers, numpy_dtype
from ..harness.kernels import KERNELS, ONE_DTYPE

KINDS = tuple(INTEGERS)


def rows(dtype: str, head_size: int) -> NDArray[Any]:
    """Every number of a 16-bit dtype from 2^-100 on, whose scales are not subnormal, NaN and infinities in rows of
    their own; ties; zeros."""
    rng = np.random.default_rng(7)
    bits = np.arange(2**16, dtype=np.uint16)
    every = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "float32" else bits.view(numpy_dtype(dtype))
    every = np.resize(every, (-(-len(every) // head_size), head_size)).astype(np.float32)
    every[np.abs(every) < 2.0**-100] = 0
    ties = rng.integers(-15, 16, (64, head_size)).astype(np.float32) / 2
    ties[:, ::7] = 7.5
    normal = rng.standard_normal((64, head_size)).astype(np.float32)
    mixed = rng.permutation(np.concatenate([ties, normal, normal * 0, ties * np.float32(2.0**-20)]))
    with np.errstate(invalid="ignore"):
        return np.concatenate([every, mixed]).astype(numpy_dtype(dtype))[:, None]


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("head_size", [64, 33, 600])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_every_rounding(isa: str, dtype: str, head_size: int, kv_cache_dtype: str) -> None:
    x = rows(dtype, head_size)
    cache = cpu_attn.PagedKVCache(-(-len(x) // 48), 48, 1, head_size, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.update(x, x, np.arange(len(x)))
    want = integers(x, kv_cache_dtype)
    for got in cache.gather(np.arange(cache.num_blocks, dtype=np.int32), len(x)):
        assert got.dtype == np.float32
        assert np.array_equal(got.astype(np.float64), want, equal_nan=True)


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("head_size", [64, 33, 600])
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_rotated_rows(isa: str, dtype: str, head_size: int, kv_cache_dtype: str) -> None:
    """The same bits on every isa, and from convert."""
    spikes = hadamard(np.eye(head_size, dtype=np.float32)[:3, None], back=True).astype(numpy_dtype(dtype))
    x = np.concatenate([rows(dtype, head_size)[::3], spikes])
    how: Any = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_rotation": "hadamard"}
    cache = cpu_attn.PagedKVCache(-(-len(x) // 48), 48, 1, head_size, dtype, isa, **how)
    cache.update(x, x, np.arange(len(x)))
    with np.errstate(invalid="ignore", over="ignore"):
        want = integers(hadamard(x.astype(np.float32)), kv_cache_dtype)
    plain_cache = cpu_attn.PagedKVCache(cache.num_blocks, 48, 1, head_size, dtype)
    plain_cache.update(x, x, np.arange(len(x)))
    table = np.arange(cache.num_blocks, dtype=np.int32)
    for c in (cache, cpu_attn.convert(plain_cache, isa=isa, **how)):
        for got in c.gather(table, len(x)):
            assert np.array_equal(got.astype(np.float64), want, equal_nan=True)


# Of the squared error by the largest magnitude over the largest integer as it is, not rounded to bfloat16.
SHARES = {"int8": 1.04, "int6": 0.97, "int5": 0.95, "int4": 0.76, "int4_per_token_head": 0.74}


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_a_search_loses_less(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """Whichever sign the largest magnitude has."""
    row, x = (
        INTEGERS[kv_cache_dtype],
        np.random.default_rng(12).standard_normal((512, 1, 64)).astype(numpy_dtype(dtype)),
    )
    cache = cpu_attn.PagedKVCache(32, 16, 1, 64, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.update(x, x, np.arange(512))
    parts = x.astype(np.float64).reshape(512, -1, row.shared or 64)
    scale = np.abs(parts).max(axis=-1, keepdims=True) / row.largest
    simple = np.square(np.rint(parts / scale) * scale - parts)
    for got in cache.gather(np.arange(32, dtype=np.int32), 512):
        lost = np.square(got.reshape(parts.shape) - parts)
        for which in (parts.max(axis=-1) > -parts.min(axis=-1), parts.max(axis=-1) < -parts.min(axis=-1)):
            assert lost[which].mean() < SHARES[kv_cache_dtype] * simple[which].mean()


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("head_size", [5, 40, 600])
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_a_write_leaves_the_neighbours_alone(isa: str, dtype: str, head_size: int, kv_cache_dtype: str) -> None:
    """Two tokens of int4 may share a byte."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((40, 2, head_size)).astype(numpy_dtype(dtype))
    cache = cpu_attn.PagedKVCache(2, 20, 2, head_size, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.key_cache[...] = cache.value_cache[...] = 0xFF
    table = np.arange(2, dtype=np.int32)
    for n, t in enumerate(rng.permutation(40)):
        cache.update(x[t : t + 1], x[t : t + 1], np.array([t]))
        if n % 13 == 0 or n == 39:
            there = np.isfinite(cache.gather(table, 40)[0]).all(axis=(1, 2))
            assert there.sum() == n + 1
    for got in cache.gather(table, 40):
        assert np.array_equal(got.astype(np.float64), integers(x, kv_cache_dtype))


def test_k_and_v_apart() -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((20, 2, 64)).astype(np.float32)
    cache = cpu_attn.PagedKVCache(2, 16, 2, 64, "float32", kv_cache_dtype="int8/int4")
    cache.update(x, x, np.arange(20))
    assert (cache.key_cache.shape[3], cache.value_cache.shape[3]) == (64 + 2, 32 + 4)
    for got, kind in zip(cache.gather(np.arange(2, dtype=np.int32), 20), ("int8", "int4"), strict=True):
        assert np.array_equal(got.astype(np.float64), integers(x, kind))


def test_gather_has_to_be_told_what_bytes_hold() -> None:
    x = np.ones((16, 1, 64), np.float32)
    cache = cpu_attn.PagedKVCache(1, 16, 1, 64, "float32", kv_cache_dtype="int8")
    cache.update(x, x, np.arange(16))
    table, common = np.zeros(1, np.int32), {"head_size": 64, "dtype": "float32"}
    got = gather_pages(cache.key_cache, table, 16, **common, kv_cache_dtype="int8")
    assert np.array_equal(got, integers(x, "int8"))
    with pytest.raises(ValueError, match="cache: axis 3 is 66, expected 64"):
        gather_pages(cache.key_cache, table, 16, **common)  # bytes by themselves are e4m3
    with pytest.raises(ValueError, match="kv_cache_dtype: 'fp8_e5m2' of float32, this cache holds float32"):
        gather_pages(np.zeros((1, 1, 16, 64), np.float32), table, 16, **common, kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_cache_dtype": "int8/int4/int8"}, ["kv_cache_dtype", "int8/int4/int8", "'K/V'"]),
        ({"kv_cache_dtype": "int8/"}, ["kv_cache_dtype", "int8/", "int4"]),
        ({"kv_cache_dtype": "int8", "k_scale": 2.0}, ["k_scale", "2.0", "fp8", "of their own"]),
        ({"kv_cache_dtype": "fp8/int8", "v_scale": 0.5}, ["v_scale", "0.5", "fp8", "of their own"]),
        ({"kv_cache_dtype": "auto/int8", "k_scale": 0.5}, ["k_scale", "0.5", "plain"]),
    ],
)
def test_refused(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        cpu_attn.PagedKVCache(1, 16, 1, 32, "float32", **arguments)


def test_a_shape_is_of_k_or_of_v() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int8/int4' names two"):
        cpu_attn.get_kv_cache_shape(1, 16, 1, 32, "float32", kv_cache_dtype="int8/int4")
    assert cpu_attn.get_kv_cache_shape(3, 16, 2, 128, "bfloat16", kv_cache_dtype="int8") == (3, 2, 16, 130)
    widths = {"int6": 96 + 2, "int5": 80 + 2, "int4": 64 + 8, "int4_per_token_head": 64 + 2}
    for kind, width in widths.items():
        assert cpu_attn.get_kv_cache_shape(3, 16, 2, 128, "bfloat16", kv_cache_dtype=kind) == (3, 2, 16, width)


def test_a_plan_is_for_what_the_cache_holds() -> None:
    cache = cpu_attn.PagedKVCache(1, 16, 1, 32, "float32", kv_cache_dtype="int8/int4")
    other = cpu_attn.PagedKVCache(1, 16, 1, 32, "float32", kv_cache_dtype="int8")
    plan = cache.plan(np.array([0, 1], np.int32), np.array([1], np.int32), 1)
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int8', scheduler_metadata was made for int8/int4"):
        other.attend(np.zeros((1, 1, 32), np.float32), np.zeros((1, 1), np.int32), plan)


def test_a_third_name_is_refused_after_the_two_before_it() -> None:
    """A write keeps what names mean that it knows."""
    cache = cpu_attn.PagedKVCache(2, 16, 2, 64, "float32", kv_cache_dtype="int8/int4")
    rows = np.ones((3, 2, 64), np.float32)
    arrays = (rows, rows, cache.key_cache, cache.value_cache, np.arange(3))
    cpu_attn.reshape_and_cache(*arrays, kv_cache_dtype="int8/int4")
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int8/int4/int8'"):
        cpu_attn.reshape_and_cache(*arrays, kv_cache_dtype="int8/int4/int8")
