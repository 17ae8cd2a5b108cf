# SPDX-License-Identifier: Apache-2.0
"""Caches from one layout or dtype to another, also from layouts that no isa of this machine reads."""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn import CacheDescriptor, PagedKVCache, StoredCache, convert
from cpu_attn.storage import conversion

from ..cases.formats import INTEGERS, integers, kinds_of, numpy_dtype, quantised
from ..harness.kernels import KERNELS
from ..harness.layout_caches import GOOD, contents, filled, held, scales_for
from ..native.test_quantised import rows as roundings

LAYOUTS = ("lanes-v2", "pairs-v1")
BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4, "int4_per_token_head": 4}


def place(name: str, value: bool, token: int, d: int, size: int) -> int:
    """Of an element among those of its block, as native/cache/layout.h says."""
    group, lane = divmod(token, 16)
    if name == "lanes-v2":
        return token * size + d if value else (group * size + d) * 16 + lane
    if value:
        return (token // 2 * size + d) * 2 + token % 2
    return (group * ((size + 1) // 2) + d // 2) * 32 + lane * 2 + d % 2


def foreign(rows: NDArray[Any], name: str, value: bool, block_size: int, width: int) -> NDArray[Any]:
    """[slots, Hkv, D] in the memory of a layout, one element after another, bytes in pairs in every one; all else
    NaN."""
    slots, heads, size = rows.shape
    name = "pairs-v1" if rows.dtype.itemsize == 1 else name
    memory = np.full((slots // block_size, heads, block_size * width), np.nan, rows.dtype)
    for slot, d in itertools.product(range(slots), range(size)):
        block, token = divmod(slot, block_size)
        memory[block, :, place(name, value, token, d, size)] = rows[slot, :, d]
    return memory.reshape(-1, heads, block_size, width)


def foreign_integers(
    tokens: tuple[Any, Any], kind: str, value: bool, shape: tuple[int, ...], unused: int
) -> NDArray[np.uint8]:
    """The same of integers, pairs in every layout, as they are stored, uint8, and the bits of their scales, uint16
    [slots, Hkv, scales]."""
    codes, scales = tokens
    (slots, heads, size), (*_, block_size, _), each = codes.shape, shape, scales.shape[2]
    bits = BITS[kind]
    memory = np.full((shape[0], heads, block_size * shape[3]), unused, np.uint8)
    group_elements = 16 * (size + size % 2 * (not value))
    group_bytes = -(-group_elements // 128) * 16 * bits if bits < 8 else group_elements
    for slot in range(slots):
        block, token = divmod(slot, block_size)
        group, lane = divmod(token, 16)
        for d in range(size):
            at, first, x = place("pairs-v1", value, lane, d, size), group * group_bytes, codes[slot, :, d]
            if bits == 8:
                memory[block, :, first + at] = x
                continue
            first, at = first + at // 128 * 16 * bits, at % 128
            byte = memory[block, :, first + at % 64]
            byte[:] = (byte & 0x0F) | (x & 15) << 4 if at >= 64 else (byte & 0xF0) | x & 15
            for bit in range(4, bits):
                byte, one = memory[block, :, first + 16 * bit + at % 16], np.uint8(1 << at // 16)
                byte[:] = np.where(x >> (7 if bit == bits - 1 else bit) & 1, byte | one, byte & ~one)
        for s in range(each):
            to = -(-block_size // 16) * group_bytes + ((group * each + s) * 16 + lane) * 2
            memory[block, :, to : to + 2] = scales[slot, :, s, None].view(np.uint8)
    return memory.reshape(shape)


def described(**fields: Any) -> CacheDescriptor:
    return CacheDescriptor(**{**GOOD, **fields})


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
    for chunk in (conversion.CHUNK, 1):
        monkeypatch.setattr(conversion, "CHUNK", chunk)
        for to in ("float32", dtype):
            got = convert(StoredCache(d, *stored), dtype=to)
            assert got.layout == ("pairs-v1" if to == "bfloat16" else "lanes-v2")
            for a, b in zip(contents(got), rows, strict=True):
                assert a.tobytes() == b.astype(numpy_dtype(to)).tobytes()


@pytest.mark.parametrize("names", list(itertools.permutations(["packed", "HND", "NHD"], 2)), ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8/auto"])
@pytest.mark.parametrize("block_size", [5, 32])
def test_plain_rows(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], dtype: str, kv_cache_dtype: str, block_size: int
) -> None:
    """There and back: the same bits, also in chunks of a block."""
    sizes: dict[str, Any] = {"sizes": (33, 7), "block_size": block_size, **scales_for(kv_cache_dtype, 0.37, 1.5)}
    cache, _, _ = filled(dtype, kv_cache_dtype=kv_cache_dtype, kv_cache_layout=names[0], **sizes)
    monkeypatch.setattr(conversion, "CHUNK", 1)
    got = convert(cache, kv_cache_layout=names[1])
    assert got.kv_cache_layout == names[1]
    back = convert(got, kv_cache_layout=names[0])
    assert back.descriptor == cache.descriptor == convert(cache).descriptor
    for other in (got, back, convert(cache)):
        assert [x.tobytes() for x in contents(other)] == [x.tobytes() for x in contents(cache)]


@pytest.mark.parametrize("name", ["HND", "NHD"])
def test_plain_rows_to_integers(name: str) -> None:
    plain, key, value = filled("bfloat16", kv_cache_layout=name)
    got = convert(plain, kv_cache_dtype="int8/int4", kv_cache_layout="packed")
    for x, rows, kind in zip(contents(got), (key, value), ("int8", "int4"), strict=True):
        assert np.array_equal(x.astype(np.float64), held(rows, kind, 1.0))
    with pytest.raises(ValueError, match=f"kv_cache_layout: '{name}' holds no int8"):
        convert(plain, kv_cache_dtype="int8")


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(
    "to",
    ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "fp8_e5m2/int4", "int8/auto"],
)
@pytest.mark.parametrize("origin", ["auto", "fp8_e4m3", "int8", "int4", "int4/int8", "auto/int4"])
def test_conversions(isa: str, dtype: str, to: str, origin: str) -> None:
    """As if the numbers, or those that a quantised cache held, had been written there at once. And it attends."""
    cache, *rows = filled(dtype, isa, (40, 33), kv_cache_dtype=origin, **scales_for(origin, 0.37, 1.5))
    numbers = [held(x, kind, s) for x, kind, s in zip(rows, kinds_of(origin), (0.37, 1.5), strict=True)]
    if "float" in to:
        got = convert(cache, dtype=to, kv_cache_dtype="auto")
        assert (got.k_scale, got.v_scale) == (1.0, 1.0)
    else:
        got = convert(cache, isa=isa, kv_cache_dtype=to, **scales_for(to, 0.01, 0.5))
    kinds = kinds_of("auto" if "float" in to else to)
    found = zip(contents(got), numbers, kinds_of(origin), kinds, (0.01, 0.5), strict=True)
    for x, number, before, now, scale in found:
        if now.startswith("int"):
            assert np.array_equal(x, number if now == before else integers(number, now))
            continue
        want = quantised(number, now, scale) if now.startswith("fp8") else nearest(number, got.dtype)
        assert x.dtype == want.dtype and x.tobytes() == want.tobytes()
    query = np.ones((1, 2, 40), got.dtype)
    plan = got.plan(np.array([0, 1], np.int32), np.array([80], np.int32), 2)
    assert np.isfinite(got.attend(query, np.arange(5, dtype=np.int32)[None], plan).astype(np.float32)).all()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "int8/int4", "int6/int5", "int4_per_token_head/int6"])
@pytest.mark.parametrize(("sizes", "block_size"), [((40, 7), 16), ((33, 65), 5), ((9, 96), 24)])
def test_integers_of_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
    kv_cache_dtype: str,
    sizes: tuple[int, int],
    block_size: int,
) -> None:
    """Bit for bit in any layout, NaN scales too, whatever lies in places of nobody; also in chunks of a block."""
    rng, kinds = np.random.default_rng(5), kinds_of(kv_cache_dtype)
    how: Any = {"num_blocks": 3, "block_size": block_size, "head_size": sizes[0], "head_size_v": sizes[1]}
    d = described(layout=name, dtype=dtype, kv_cache_dtype=kv_cache_dtype, k_scale=1.0, v_scale=1.0, **how)
    tokens: list[Any] = []
    for size, kind in zip(sizes, kinds, strict=True):
        each = -(-size // (INTEGERS[kind].shared or size))
        scales = rng.standard_normal((3 * block_size, 2, each)).astype(np.float32).view(np.uint32) >> 16
        scales[rng.random(scales.shape) < 0.1] = 0xFFC1
        codes = rng.integers(0, 2 ** BITS[kind], (3 * block_size, 2, size), np.uint8)
        if kind in ("int5", "int6"):  # the highest bit is that of a byte
            codes += (codes >> BITS[kind] - 1) * np.uint8(128 - 2 ** (BITS[kind] - 1))
        tokens.append((codes, scales.astype(np.uint16)))
    memory = [foreign_integers(x, kinds[i], bool(i), d.shapes[i], 0xFF) for i, x in enumerate(tokens)]
    for chunk in (conversion.CHUNK, 1):
        monkeypatch.setattr(conversion, "CHUNK", chunk)
        got = convert(StoredCache(d, *memory))
        assert got.kv_cache_dtype == kv_cache_dtype and got.descriptor.shapes[0] == got.key_cache.shape
        for i, x in enumerate(tokens):
            want = foreign_integers(x, kinds[i], bool(i), got.descriptor.shapes[i], 0)
            assert (got.key_cache, got.value_cache)[i].tobytes() == want.tobytes()
    wide = convert(StoredCache(d, *memory), dtype="float32", kv_cache_dtype="auto")
    for x, (codes, bits), kind in zip(contents(wide), tokens, kinds, strict=True):
        signed = codes.astype(int) - 8 if BITS[kind] == 4 else np.where(codes < 128, codes, 128 - codes.astype(int))
        scales = (bits.astype(np.uint32) << 16).view(np.float32)
        which = np.arange(codes.shape[2]) // (INTEGERS[kind].shared or codes.shape[2])
        assert np.array_equal(x, signed * scales[..., which], equal_nan=True)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "int4/int8", "int5/int6", "int4_per_token_head/int5"])
@pytest.mark.parametrize(("sizes", "block_size"), [((64, 24), 16), ((33, 7), 5), ((9, 70), 24)])
def test_integers_as_they_are_written_here(kv_cache_dtype: str, sizes: tuple[int, int], block_size: int) -> None:
    """The memory of caches that reshape_and_cache filled, of every layout here, from one another."""
    rng, slots = np.random.default_rng(6), np.arange(3 * block_size)
    rows = [rng.standard_normal((len(slots), 2, n)).astype(ml_dtypes.bfloat16) for n in sizes]
    written = {}
    for dtype in ("float32", "bfloat16"):
        for kind in ("auto", kv_cache_dtype):
            cache = PagedKVCache(3, block_size, 2, sizes[0], dtype, head_size_v=sizes[1], kv_cache_dtype=kind)
            cache.update(*(x.astype(numpy_dtype(dtype)) for x in rows), slots)
            written[dtype, kind] = cache
    for (origin, kind), (dtype, want) in itertools.product(written, [x for x in written.items() if x[0][1] != "auto"]):
        got = convert(written[origin, kind], dtype=dtype[0], kv_cache_dtype=kv_cache_dtype)
        assert got.key_cache.tobytes() == want.key_cache.tobytes()
        assert got.value_cache.tobytes() == want.value_cache.tobytes()


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("head_size", [64, 33])
def test_every_integer_that_a_write_rounds_to(kind: str, head_size: int) -> None:
    """Ties, zeros, NaN and infinities; back as NaN in any kind. No numbers whose scale is subnormal: gather gives 0."""
    x = roundings("float32", head_size)
    x[np.abs(x) < 2.0**-100] = 0
    cache = PagedKVCache(-(-len(x) // 48), 48, 1, head_size, "float32")
    cache.update(x, x, np.arange(len(x)))
    quantised_here, want = convert(cache, kv_cache_dtype=kind), integers(x, kind)
    for got in contents(quantised_here):
        assert np.array_equal(got[: len(x)], want, equal_nan=True)
    other = "int4" if kind == "int8" else "int8"
    with np.errstate(over="ignore"):  # largest floats, rounded up twice: gather says infinity
        twice = integers(want, other).astype(np.float32)
    for to, expected in ((other, twice), ("auto", want)):
        for got in contents(convert(quantised_here, kv_cache_dtype=to)):
            assert np.array_equal(got[: len(x)], expected, equal_nan=True)
    for got in contents(convert(quantised_here, kv_cache_dtype="fp8")):
        assert np.array_equal(np.isnan(got[: len(x)].astype(np.float32)), np.isnan(want))


def nearest(x: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """To nearest even by integers: for numbers that are normal in the dtype."""
    bits = ml_dtypes.finfo(dtype).nmant + 1
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32).astype(dtype)


def test_one_rounding() -> None:
    """Just above the middle of two bfloat16, by less than float32 has digits for; and its mirror image."""
    d = described(layout="lanes-v2", dtype="float32", kv_cache_dtype="fp8_e4m3", num_blocks=1, num_kv_heads=1)
    scale = np.float32(1 + 2**-8 + 2**-23)  # times 1.125 and so on: products of 28 bits
    d = dataclasses.replace(d, head_size=16, head_size_v=16, k_scale=float(scale), v_scale=1.0)
    bytes_ = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    memory = np.resize(bytes_, 256).reshape(1, 1, 16, 16)
    for kind in ("bfloat16", "float16", "float32"):
        got = convert(StoredCache(d, memory, memory.copy()), dtype=kind, kv_cache_dtype="auto")
        key = contents(got)[0][:, 0].reshape(16, 8, 2).swapaxes(0, 1).reshape(-1)  # pairs: [d / 2][token][2]
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
        got = conversion._round_once(x, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
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
    pairs = convert(convert(cache, kv_cache_dtype="int8/bfloat16"), dtype="float32")
    assert (pairs.kv_cache_dtype, pairs.v_scale, pairs.value_cache.dtype) == ("int8/auto", 1.0, np.float32)
    with pytest.raises(ValueError, match="v_scale"):
        convert(cache, kv_cache_dtype="auto", v_scale=2.0)
    with pytest.raises(TypeError, match="dtype"):
        convert(cache, dtype="int32")
    empty = PagedKVCache(0, 16, 2, 8)
    assert convert(empty, dtype="bfloat16").num_blocks == 0
    assert contents(convert(filled("float32")[0], isa="scalar"))[0].shape == key.shape


def test_what_is_no_cache() -> None:
    with pytest.raises(TypeError, match="cache: expected PagedKVCache or StoredCache, got NoneType"):
        convert(None)  # type: ignore[arg-type]
