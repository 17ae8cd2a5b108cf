# SPDX-License-Identifier: Apache-2.0
"""Caches as data: descriptors, and memory that is opened with one."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn import CacheDescriptor, PagedKVCache, StoredCache, reference

from ..cases.formats import kinds_of, memory_dtype
from ..harness.kernels import KERNELS
from ..harness.layout_caches import GOOD, NARROW, contents, filled, held, scales_for

# ---- descriptors ----


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *NARROW])
@pytest.mark.parametrize("block_size", [1, 5, 16, 24])
def test_descriptor_says_it_all(isa: str, dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    scales = scales_for(kv_cache_dtype, 0.1, 3.0)
    cache = PagedKVCache(3, block_size, 2, 33, dtype, isa, head_size_v=7, kv_cache_dtype=kv_cache_dtype, **scales)
    d = cache.descriptor
    assert d.layout == cache.layout == ("pairs-v1" if dtype == "bfloat16" else "lanes-v2")
    assert d.shapes == (cache.key_cache.shape, cache.value_cache.shape)
    assert [memory_dtype(kind, dtype) for kind in d.stored] == [cache.key_cache.dtype, cache.value_cache.dtype]
    assert CacheDescriptor.from_json(d.to_json()) == d
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.isa = "scalar"  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2", "fp8/auto"])
@pytest.mark.parametrize("name", ["HND", "NHD"])
def test_descriptor_of_plain_rows(dtype: str, kv_cache_dtype: str, name: str) -> None:
    scales = scales_for(kv_cache_dtype, 0.1, 3.0)
    sizes: dict[str, Any] = {"head_size_v": 7, "kv_cache_dtype": kv_cache_dtype, "kv_cache_layout": name}
    cache = PagedKVCache(3, 5, 2, 33, dtype, **sizes, **scales)
    d = cache.descriptor
    assert d.layout == d.kv_cache_layout == cache.layout == cache.kv_cache_layout == name
    assert d.shapes == (cache.key_cache.shape, cache.value_cache.shape)
    assert CacheDescriptor.from_json(d.to_json()) == d


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 3}, "version: 3, this library knows 2"),
        ({"version": 1}, "version: 1, this library knows 2"),
        ({"version": True}, "version: True"),
        ({"layout": "rows-v1"}, "layout: 'rows-v1' is none of 'lanes-v2', 'pairs-v1', 'HND', 'NHD'"),
        ({"layout": "NHD", "kv_cache_dtype": "fp8/int4", "v_scale": 1.0}, "layout: 'NHD' holds no int4"),
        ({"layout": []}, "layout: expected a name, got list"),
        ({"dtype": "float64"}, "dtype: 'float64'"),
        ({"dtype": 3}, "dtype: expected a name, got int"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: 'int3'"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype: expected a name, got NoneType"),
        ({"num_blocks": -1}, "num_blocks: -1"),
        ({"num_blocks": 1.5}, "num_blocks: expected an integer"),
        ({"block_size": 0}, "block_size: 0"),
        ({"num_kv_heads": 2**17}, "num_kv_heads: 131072"),
        ({"head_size": 0}, "head_size: 0"),
        ({"head_size_v": True}, "head_size_v: expected an integer"),
        ({"k_scale": 0.0}, "k_scale: 0.0"),
        ({"v_scale": "1"}, "v_scale: expected a number"),
        ({"kv_cache_dtype": "auto"}, "k_scale: 0.37 applies to fp8 caches"),
        ({"isa": 3}, "isa: expected a name"),
        ({"kv_cache_rotation": "fourier"}, "kv_cache_rotation: 'fourier' is none of 'none', 'hadamard', nor"),
        ({"kv_cache_rotation": None}, "kv_cache_rotation: expected a name"),
        ({"color": "red"}, "color: no field"),
    ],
)
def test_bad_descriptors(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        CacheDescriptor.from_json(json.dumps({"version": 2, **GOOD, **fields}))


def test_version_1_knew_no_rotation() -> None:
    fields = {name: x for name, x in GOOD.items() if name != "kv_cache_rotation"}
    found = CacheDescriptor.from_json(json.dumps({"version": 1, **fields}))
    assert found == CacheDescriptor(**fields) and found.kv_cache_rotation == "none"


def test_numbers_of_numpy() -> None:
    sizes = {name: np.int64(x) for name, x in GOOD.items() if type(x) is int}
    given: dict[str, Any] = {**GOOD, **sizes, "k_scale": np.float32(0.5), "v_scale": np.array(2.0)}
    d = CacheDescriptor(**given)
    assert CacheDescriptor.from_json(d.to_json()) == d == CacheDescriptor(**{**GOOD, "k_scale": 0.5, "v_scale": 2.0})


@pytest.mark.parametrize("name", ["version", *GOOD])
def test_missing_fields(name: str) -> None:
    fields = {"version": 2, **GOOD}
    del fields[name]
    with pytest.raises(ValueError, match=f"^{name}: "):
        CacheDescriptor.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "Expect"), ("[]", "list"), ("3", "int"), ('{"a": 1', "Expect"), ("[" * 10**6, "recursion"), (None, "None")],
    ids=["nothing", "list", "number", "cut off", "deep", "None"],
)
def test_what_is_no_descriptor(text: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^descriptor: .*{words}"):
        CacheDescriptor.from_json(text)


# ---- memory that is there ----


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_open_copies_nothing(isa: str, dtype: str) -> None:
    """Interleaved and read-only memory too; by any isa that knows the layout, whoever wrote it."""
    cache, key, value = filled(dtype, isa, (24, 24))
    both = np.stack([cache.key_cache, cache.value_cache], axis=1)
    both.flags.writeable = False
    written_elsewhere = dataclasses.replace(cache.descriptor, isa="neon")
    for descriptor, name in ((written_elsewhere, "auto"), (cache.descriptor, isa)):
        opened = PagedKVCache.open(descriptor, both[:, 0], both[:, 1], name)
        assert np.shares_memory(opened.key_cache, both) and np.shares_memory(opened.value_cache, both)
        assert [x.tobytes() for x in contents(opened)] == [key.tobytes(), value.tobytes()]
        assert opened.descriptor == dataclasses.replace(descriptor, isa=opened.isa)
        with pytest.raises(ValueError, match="read-only"):
            opened.update(key, value, np.arange(80))


def test_open_attends() -> None:
    cache, key, value = filled("float32", sizes=(16, 16))
    opened = PagedKVCache.open(cache.descriptor, memoryless(cache.key_cache), memoryless(cache.value_cache))
    query = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float32)
    start, lens = np.array([0, 3], np.int32), np.array([70], np.int32)
    got = opened.attend(query, np.arange(5, dtype=np.int32)[None], opened.plan(start, lens, 4))
    want, _ = reference.attention(query, [key[:70]], [value[:70]], start, lens, 0.25)
    assert (reference.relative_rms(got, want, start) <= reference.BUDGET["float32"]).all()


@pytest.mark.parametrize("name", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_open_plain_rows(name: str, dtype: str) -> None:
    """Where somebody else has them: blocks backwards, tokens apart, V the first columns of K."""
    cache, key, _ = filled(dtype, sizes=(24, 8), kv_cache_layout=name)
    apart = np.zeros((*cache.key_cache.shape[:3], 40), cache.dtype)[::-1]
    apart[..., :24] = cache.key_cache
    apart.flags.writeable = False
    rows = apart[..., :24]
    written_elsewhere = dataclasses.replace(cache.descriptor, isa="neon")
    opened = PagedKVCache.open(written_elsewhere, rows, rows[..., :8])
    assert np.shares_memory(opened.key_cache, apart) and np.shares_memory(opened.value_cache, apart)
    assert [x.tobytes() for x in contents(opened)] == [key.tobytes(), key[..., :8].tobytes()]
    query = np.random.default_rng(0).standard_normal((3, 40, 24), np.float32).astype(cache.dtype)
    start, lens = np.array([0, 3], np.int32), np.array([70], np.int32)
    got = opened.attend(query, np.arange(5, dtype=np.int32)[None], opened.plan(start, lens, 40))
    want, _ = reference.attention(query, [key[:70]], [key[:70, :, :8]], start, lens, 24**-0.5)
    assert (reference.relative_rms(got, want, start) <= reference.BUDGET[dtype]).all()
    with pytest.raises(ValueError, match="read-only"):
        opened.update(key, key[..., :8], np.arange(80))
    other = dataclasses.replace(cache.descriptor, layout={"HND": "NHD", "NHD": "HND"}[name])
    with pytest.raises(ValueError, match="key_cache: axis 1 is"):
        PagedKVCache.open(other, rows, rows[..., :8])


class memoryless:  # noqa: N801
    """An array that is not NumPy's."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


def test_bytes_are_as_good_as_float8() -> None:
    cache, _, _ = filled("bfloat16", kv_cache_dtype="fp8_e4m3", k_scale=0.5)
    opened = PagedKVCache.open(cache.descriptor, cache.key_cache.view(np.uint8), cache.value_cache.view(np.uint8))
    assert opened.key_cache.dtype == cache.key_cache.dtype and np.shares_memory(opened.key_cache, cache.key_cache)


def test_open_refuses() -> None:
    cache, _, _ = filled("float32")
    k, v, d = cache.key_cache, cache.value_cache, cache.descriptor
    for descriptor, key_cache, value_cache, error, words in [
        ({}, k, v, TypeError, "descriptor: expected CacheDescriptor, got dict"),
        (d, k[1:], v, ValueError, "key_cache: axis 0 is 4, expected num_blocks = 5"),
        (d, k, v[:, :1], ValueError, "value_cache: axis 1 is 1"),
        (d, k, v[..., :6], ValueError, "value_cache: axis 2 has stride"),
        (d, k[..., :8].copy(), v, ValueError, "key_cache: axis 3 is 8, expected 24"),
        (d, k.astype(np.float16), v, TypeError, "key_cache: dtype float16, expected float32"),
        (dataclasses.replace(d, head_size_v=24), k, k, ValueError, "key_cache: shares memory with value_cache"),
        (dataclasses.replace(d, layout="pairs-v1"), *pages(d, "pairs-v1"), ValueError, "no isa of this machine reads"),
    ]:
        with pytest.raises(error) as caught:
            PagedKVCache.open(descriptor, key_cache, value_cache)
        assert words in str(caught.value)
    with pytest.raises(ValueError, match=r"layout: isa scalar does not read float32 in pairs-v1.*convert"):
        PagedKVCache.open(dataclasses.replace(d, layout="pairs-v1"), *pages(d, "pairs-v1"), "scalar")


def pages(d: CacheDescriptor, name: str) -> list[NDArray[Any]]:
    return [np.zeros(shape, memory_dtype(d.stored[0], d.dtype)) for shape in dataclasses.replace(d, layout=name).shapes]


def test_memory_begins_with_a_cache_line() -> None:
    for blocks, size in ((3, 1), (3, 7), (3, 64), (700, 64), (700, 65)):  # the last ones are huge pages
        cache = PagedKVCache(blocks, 16, 1, size)
        assert cache.key_cache.ctypes.data % 64 == cache.value_cache.ctypes.data % 64 == 0
        assert not cache.key_cache.any()
        cache.key_cache[...], cache.value_cache[...] = 1, 2
        assert (cache.key_cache == 1).all() and (cache.value_cache == 2).all()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "fp8/int4"])
def test_open_reads_integers(kv_cache_dtype: str) -> None:
    cache, *rows = filled("bfloat16", kv_cache_dtype=kv_cache_dtype)
    opened = PagedKVCache.open(cache.descriptor, cache.key_cache, cache.value_cache)
    assert np.shares_memory(opened.key_cache, cache.key_cache)
    for got, x, kind in zip(contents(opened), rows, kinds_of(kv_cache_dtype), strict=True):
        assert np.array_equal(got.astype(np.float64), held(x, kind, 1.0))
    with pytest.raises(TypeError, match="value_cache: dtype float16, expected uint8"):
        StoredCache(cache.descriptor, cache.key_cache, cache.value_cache.view(np.float16))
