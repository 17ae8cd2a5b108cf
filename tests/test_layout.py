# SPDX-License-Identifier: Apache-2.0
"""Caches as data: descriptors, files, and memory in layouts that no isa of this machine reads."""

from __future__ import annotations

import dataclasses
import fractions
import itertools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn import CacheDescriptor, PagedKVCache, StoredCache, convert, layout, reference

from .cases import KERNELS, numpy_dtype, quantised

LAYOUTS = ("lanes-v1", "pairs-v1")
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
}


def filled(dtype: str, isa: str = "auto", sizes: tuple[int, int] = (24, 7), block_size: int = 16, **how: Any) -> Any:
    """A cache with a number in every slot, and the numbers [slots, Hkv, D], [slots, Hkv, Dv]."""
    rng, slots = np.random.default_rng(3), 5 * block_size
    cache = PagedKVCache(5, block_size, 2, sizes[0], dtype, isa, head_size_v=sizes[1], **how)
    key, value = ((rng.standard_normal((slots, 2, n)) * 4).astype(numpy_dtype(dtype)) for n in sizes)
    cache.update(key, value, np.arange(slots))
    return cache, key, value


def contents(cache: PagedKVCache) -> tuple[NDArray[Any], NDArray[Any]]:
    return cache.gather(np.arange(cache.num_blocks, dtype=np.int32), cache.num_blocks * cache.block_size)


def foreign(rows: NDArray[Any], name: str, value: bool, block_size: int, width: int) -> NDArray[Any]:
    """[slots, Hkv, D] in the memory of a layout, one element after another, as native/cpu_attn.h says; all else NaN."""
    slots, heads, size = rows.shape
    memory = np.full((slots // block_size, heads, block_size * width), np.nan, rows.dtype)
    for slot, d in itertools.product(range(slots), range(size)):
        block, token = divmod(slot, block_size)
        group, lane = divmod(token, 16)
        if name == "lanes-v1":
            at = token * size + d if value else (group * size + d) * 16 + lane
        elif value:
            at = (token // 2 * size + d) * 2 + token % 2
        else:
            at = (group * ((size + 1) // 2) + d // 2) * 32 + lane * 2 + d % 2
        memory[block, :, at] = rows[slot, :, d]
    return memory.reshape(-1, heads, block_size, width)


def described(**fields: Any) -> CacheDescriptor:
    return CacheDescriptor(**{**GOOD, **fields})


# ---- descriptors ----


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 24])
def test_descriptor_says_it_all(isa: str, dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    scales = {} if kv_cache_dtype == "auto" else {"k_scale": 0.1, "v_scale": 3.0}
    cache = PagedKVCache(3, block_size, 2, 33, dtype, isa, head_size_v=7, kv_cache_dtype=kv_cache_dtype, **scales)
    d = cache.descriptor
    assert d.layout == cache.layout == ("pairs-v1" if dtype == "bfloat16" else "lanes-v1")
    assert d.shapes == (cache.key_cache.shape, cache.value_cache.shape)
    assert d.stored == (str(cache.key_cache.dtype),) * 2 or "fp8" in d.stored[0]
    assert CacheDescriptor.from_json(d.to_json()) == d
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.isa = "scalar"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "version: 2, this library knows 1"),
        ({"version": True}, "version: True"),
        ({"layout": "rows-v1"}, "layout: 'rows-v1' is none of lanes-v1, pairs-v1"),
        ({"dtype": "float64"}, "dtype: 'float64'"),
        ({"dtype": 3}, "dtype: 3"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: 'int3'"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype: None"),
        ({"num_blocks": -1}, "num_blocks: -1"),
        ({"num_blocks": 1.5}, "num_blocks: expected an integer"),
        ({"block_size": 0}, "block_size: 0"),
        ({"num_kv_heads": 2**17}, "num_kv_heads: 131072"),
        ({"head_size": 0}, "head_size: 0"),
        ({"head_size_v": True}, "head_size_v: expected an integer"),
        ({"k_scale": 0.0}, "k_scale: 0.0"),
        ({"v_scale": "1"}, "v_scale: expected a number"),
        ({"kv_cache_dtype": "auto"}, "k_scale: 0.37 applies to quantised"),
        ({"isa": 3}, "isa: expected a name"),
        ({"color": "red"}, "color: no field"),
    ],
)
def test_bad_descriptors(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        CacheDescriptor.from_json(json.dumps({"version": 1, **GOOD, **fields}))


@pytest.mark.parametrize("name", ["version", *GOOD])
def test_missing_fields(name: str) -> None:
    fields = {"version": 1, **GOOD}
    del fields[name]
    with pytest.raises(ValueError, match=f"^{name}: "):
        CacheDescriptor.from_json(json.dumps(fields))


@pytest.mark.parametrize(("text", "words"), [("", "Expecting"), ("[]", "list"), ("3", "int"), ('{"a": 1', "Expect")])
def test_what_is_no_descriptor(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
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
    return [np.zeros(shape, _memory(d.stored[0])) for shape in dataclasses.replace(d, layout=name).shapes]


def test_memory_begins_with_a_cache_line() -> None:
    for size in (1, 7, 64):
        cache = PagedKVCache(3, 16, 1, size)
        assert cache.key_cache.ctypes.data % 64 == cache.value_cache.ctypes.data % 64 == 0
        assert not cache.key_cache.any()


# ---- files ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_files(tmp_path: Path, dtype: str, kv_cache_dtype: str) -> None:
    scales = {} if kv_cache_dtype == "auto" else {"k_scale": 0.37, "v_scale": 2.5}
    cache, _, _ = filled(dtype, kv_cache_dtype=kv_cache_dtype, **scales)
    file = tmp_path / "cache.safetensors"
    cache.save(file)
    loaded = PagedKVCache.load(file)
    assert loaded.descriptor == cache.descriptor
    for a, b in ((cache.key_cache, loaded.key_cache), (cache.value_cache, loaded.value_cache)):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    loaded.update(*(np.zeros((1, 2, n), numpy_dtype(dtype)) for n in (24, 7)), np.zeros(1, np.int64))
    torch = pytest.importorskip("safetensors.torch")
    theirs = torch.load_file(file)["key_cache"]
    assert str(theirs.dtype).removeprefix("torch.") == cache.key_cache.dtype.name
    assert theirs.view(pytest.importorskip("torch").uint8).numpy().tobytes() == cache.key_cache.tobytes()


def test_files_of_somebody_else(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    cache, _, _ = filled("float32")
    arrays = {"key_cache": cache.key_cache, "value_cache": cache.value_cache}
    said = {"cpu_attn": cache.descriptor.to_json()}
    file = tmp_path / "file"
    for tensors, metadata, words in [
        (arrays, None, "not written by"),
        ({"key_cache": cache.key_cache}, said, "not written by"),
        (arrays, {"cpu_attn": "{}"}, "version: "),
        ({**arrays, "key_cache": cache.key_cache.astype(np.float16)}, said, "key_cache: holds F16"),
        ({**arrays, "key_cache": cache.key_cache[:4]}, said, "key_cache: axis 0 is 4"),
    ]:
        save_file(tensors, file, metadata=metadata)
        with pytest.raises(ValueError, match=words):
            PagedKVCache.load(file)
    for junk in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}" * 3, bytes(100)):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match=str(file)):
            PagedKVCache.load(file)
    with pytest.raises(FileNotFoundError):
        PagedKVCache.load(tmp_path / "nowhere")


# ---- conversion ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("sizes", "block_size"), [((24, 7), 16), ((33, 33), 5), ((1, 2), 24)])
def test_any_layout_of_elsewhere(
    monkeypatch: pytest.MonkeyPatch, dtype: str, name: str, sizes: tuple[int, int], block_size: int
) -> None:
    """Every layout with every dtype, its padding NaN; also in chunks of a block."""
    rng, count = np.random.default_rng(4), 3 * block_size
    d = described(
        layout=name,
        dtype=dtype,
        kv_cache_dtype="auto",
        num_blocks=3,
        block_size=block_size,
        head_size=sizes[0],
        head_size_v=sizes[1],
        k_scale=1.0,
        v_scale=1.0,
    )
    rows = [rng.standard_normal((count, 2, n)).astype(numpy_dtype(dtype)) for n in sizes]
    stored = [foreign(r, name, bool(i), block_size, d.shapes[i][3]) for i, r in enumerate(rows)]
    for chunk in (layout.CHUNK, 1):
        monkeypatch.setattr(layout, "CHUNK", chunk)
        for to in ("float32", dtype):
            got = convert(StoredCache(d, *stored), dtype=to)
            assert got.layout == ("pairs-v1" if to == "bfloat16" else "lanes-v1")
            for a, b in zip(contents(got), rows, strict=True):
                assert a.tobytes() == b.astype(numpy_dtype(to)).tobytes()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("origin", ["auto", "fp8_e4m3"])
def test_conversions(isa: str, dtype: str, to: str, origin: str) -> None:
    """As if the numbers, or those that a quantised cache held, had been written there at once. And it attends."""
    how: Any = {} if origin == "auto" else {"kv_cache_dtype": origin, "k_scale": 0.37, "v_scale": 1.5}
    cache, key, value = filled(dtype, isa, (24, 24), **how)
    rows: Any = (key, value)
    if origin != "auto":
        rows = [
            quantised(x, origin, s).astype(np.float64) * np.float64(np.float32(s))
            for x, s in zip(rows, (0.37, 1.5), strict=True)
        ]
    if to.startswith("fp8"):
        got = convert(cache, isa=isa, kv_cache_dtype=to, k_scale=0.01, v_scale=0.5)
        want = [quantised(x, to, s) for x, s in zip(rows, (0.01, 0.5), strict=True)]
        assert (got.k_scale, got.v_scale) == (0.01, 0.5)
    else:
        got = convert(cache, dtype=to, kv_cache_dtype="auto")
        want = [nearest(x.astype(np.float64), numpy_dtype(to)) for x in rows]
        assert (got.k_scale, got.v_scale) == (1.0, 1.0)
    for a, b in zip(contents(got), want, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    query = np.ones((1, 2, 24), got.dtype)
    plan = got.plan(np.array([0, 1], np.int32), np.array([80], np.int32), 2)
    assert np.isfinite(got.attend(query, np.arange(5, dtype=np.int32)[None], plan).astype(np.float32)).all()


def nearest(x: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """To nearest even by integers: for numbers that are normal in the dtype."""
    bits = ml_dtypes.finfo(dtype).nmant + 1
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32).astype(dtype)


def test_one_rounding() -> None:
    """Just above the middle of two bfloat16, by less than float32 has digits for; and its mirror image."""
    d = described(layout="lanes-v1", dtype="float32", kv_cache_dtype="fp8_e4m3", num_blocks=1, num_kv_heads=1)
    scale = np.float32(1 + 2**-8 + 2**-23)  # times 1.125 and so on: products of 28 bits
    d = dataclasses.replace(d, head_size=16, head_size_v=16, k_scale=float(scale), v_scale=1.0)
    bytes_ = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    memory = np.resize(bytes_, 256).reshape(1, 1, 16, 16)
    for kind in ("bfloat16", "float16", "float32"):
        got = convert(StoredCache(d, memory, memory.copy()), dtype=kind, kv_cache_dtype="auto")
        key = contents(got)[0][:, 0].T.reshape(-1)  # lanes: [d][token]
        finite = np.isfinite(bytes_.astype(np.float32))
        exact = [fractions.Fraction(float(b)) * fractions.Fraction(float(scale)) for b in bytes_[finite]]
        for x, want in zip(key[finite], exact, strict=True):
            near = [np.nextafter(x, x.dtype.type(np.inf)), np.nextafter(x, x.dtype.type(-np.inf))]
            error = abs(fractions.Fraction(float(x)) - want)
            assert all(error <= abs(fractions.Fraction(float(n)) - want) for n in near)


def test_round_to_nearest_of_doubles() -> None:
    """Doubles that float32 would take to the middle of two bfloat16 first."""
    middle = 1 + 2.0**-8
    x = np.array(
        [middle + 2.0**-40, middle - 2.0**-40, middle, 1 + 3 * 2.0**-8, -middle - 2.0**-40, 1e-50, -1e-50, 1e39]
    )
    x = np.append(x, [np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        got = layout._round_once(x, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    want = [1 + 2.0**-7, 1, 1, 1 + 2.0**-6, -1 - 2.0**-7, 0, 0, np.inf, np.nan, np.inf, -np.inf]
    assert np.array_equal(got, want, equal_nan=True)


def test_what_is_not_said_stays() -> None:
    cache, key, _ = filled("bfloat16", kv_cache_dtype="fp8_e5m2", k_scale=0.3, v_scale=0.7)
    same = convert(cache)
    assert same.descriptor == cache.descriptor
    assert same.key_cache.tobytes() == cache.key_cache.tobytes()
    assert not np.shares_memory(same.key_cache, cache.key_cache)
    wide = convert(cache, dtype="float32")
    assert (wide.kv_cache_dtype, wide.k_scale, wide.v_scale) == ("fp8_e5m2", 0.3, 0.7)
    assert contents(wide)[0].tobytes() == contents(cache)[0].tobytes()
    with pytest.raises(ValueError, match="v_scale"):
        convert(cache, kv_cache_dtype="auto", v_scale=2.0)
    with pytest.raises(TypeError, match="dtype"):
        convert(cache, dtype="int32")
    empty = PagedKVCache(0, 16, 2, 8)
    assert convert(empty, dtype="bfloat16").num_blocks == 0
    assert contents(convert(filled("float32")[0], isa="scalar"))[0].shape == key.shape
