# SPDX-License-Identifier: Apache-2.0
"""Plain caches (HND, NHD) and latent ones: whose memory they are, what is read and written of it, and errors. The maths
is in the cases (tables.PLAIN and LATENT)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import ops, reference

from ..cases.formats import numpy_dtype
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS

SHAPES = {"HND": (3, 2, 24, 20), "NHD": (3, 24, 2, 20)}
TABLE = np.array([[2, 0, 1]], np.int32)


def _rows(pages: NDArray[Any], layout: str) -> NDArray[Any]:
    """What a request whose blocks are TABLE's sees: [tokens, heads, D]."""
    blocks = pages[TABLE[0]]
    if layout == "HND":
        blocks = blocks.swapaxes(1, 2)
    return blocks.reshape(-1, *blocks.shape[2:])


def _random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def _attend(
    k: NDArray[Any], v: NDArray[Any], query: NDArray[Any], n: int, isa: str, engine: str = "native", **options: Any
) -> NDArray[Any]:
    loc, lens = np.array([0, len(query)], np.int32), np.array([n], np.int32)
    layout = options.pop("kv_cache_layout")
    heads = k.shape[1 if layout == "HND" else 2]
    plan = cpu_attn.get_scheduler_metadata(
        *(1, query.shape[1], heads, query.shape[2], lens, query.dtype, loc),
        isa=isa,
        engine=engine,
        head_size_v=v.shape[3],
        kv_cache_layout=layout,
    )
    out = np.empty((*query.shape[:2], v.shape[3]), query.dtype)
    arguments = (query, k, v, out, loc, lens, 0.25, True, None, -1, TABLE, 0.0, plan)
    result: NDArray[Any] = cpu_attn.attention_with_kv_cache(*arguments, kv_cache_layout=layout)
    return result


def _error(got: NDArray[Any], query: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> float:
    loc, lens = np.array([0, len(query)], np.int32), np.array([len(k)], np.int32)
    want, _ = reference.attention(query, [k], [v], loc, lens, 0.25)
    return float(reference.relative_rms(got, want, loc)[0]) / reference.BUDGET[str(query.dtype)]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_no_byte_past_the_pages(isa: str, dtype: str, layout: str) -> None:
    """The last group of a block of 24 has 8 tokens, and the last block ends where memory does."""
    k, v = Guarded(_random(SHAPES[layout], dtype)), Guarded(_random(SHAPES[layout], dtype, 1))
    query = _random((5, 4, 20), dtype, 2)
    got = _attend(k.array, v.array, query, 70, isa, kv_cache_layout=layout)
    assert _error(got, query, _rows(k.array, layout)[:70], _rows(v.array, layout)[:70]) <= 1


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_rows_are_where_they_belong(dtype: str, layout: str) -> None:
    """And nothing else is touched. The same for every isa, so that one may write and another read."""
    pages = [np.full(SHAPES[layout], 7, numpy_dtype(dtype)) for _ in range(2)]
    key, value = _random((6, 2, 20), dtype), _random((6, 2, 20), dtype, 1)
    slots = np.array([3, 4, 5, -1, 71, 24], np.int64)
    cpu_attn.reshape_and_cache(key, value, *pages, slots, kv_cache_layout=layout)
    for rows, page in zip((key, value), pages, strict=True):
        want = np.full((72, 2, 20), 7, page.dtype)
        want[slots[slots >= 0]] = rows[slots >= 0]
        blocks = page.swapaxes(1, 2) if layout == "HND" else page
        assert (blocks.reshape(72, 2, 20) == want).all()


@pytest.mark.parametrize("layout", SHAPES)
def test_gather(layout: str) -> None:
    pages = _random(SHAPES[layout], "float16")
    got = ops.gather(pages, TABLE[0], 60, 20, value=False, kv_cache_layout=layout)
    assert (got == _rows(pages, layout)[:60]).all()


def test_the_friendly_cache() -> None:
    key, query, table = _random((40, 2, 20), "float32"), _random((1, 4, 20), "float32", 1), np.arange(3, dtype=np.int32)
    for layout in ("packed", "HND", "NHD"):
        cache = cpu_attn.PagedKVCache(3, 24, 2, 20, kv_cache_layout=layout)
        cache.update(key, key + 1, np.arange(40))
        k, v = cache.gather(table, 40)
        assert (k == key).all() and (v == key + 1).all()
        plan = cache.plan(np.array([0, 1], np.int32), np.array([40], np.int32), 4)
        got = cache.attend(query, table[None], plan, scale=0.25)
        assert _error(got, query, key, key + 1) <= 1
        other = cpu_attn.PagedKVCache(3, 24, 2, 20, kv_cache_layout="HND" if layout == "packed" else "packed")
        with pytest.raises(ValueError, match=r"kv_cache_layout: .* was made for"):
            other.attend(query, table[None], plan)


def test_axes_that_look_alike() -> None:
    """[3, 4, 4, 20] passes as HND and as NHD: what has been accepted as one is not remembered as the other."""
    k, v = _random((3, 4, 4, 20), "float32"), _random((3, 4, 4, 20), "float32", 1)
    query = _random((1, 4, 20), "float32", 2)
    for layout in ("HND", "NHD", "HND", "NHD"):
        got = _attend(k, v, query, 11, "auto", kv_cache_layout=layout)
        assert _error(got, query, _rows(k, layout)[:11], _rows(v, layout)[:11]) <= 1
        pages = [np.zeros((3, 4, 4, 20), np.float32) for _ in range(2)]
        cpu_attn.reshape_and_cache(query, query, *pages, np.array([1]), kv_cache_layout=layout)
        at = pages[0][0, :, 1] if layout == "HND" else pages[0][0, 1]
        assert (at == query[0]).all()


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_what_the_strides_may_be(engine: str) -> None:
    """One token for all (stride 0), or negative; only the last axis is dense."""
    base = _random((3, 24, 2, 20), "float32")
    query = _random((2, 4, 20), "float32", 1)
    for k in (base[::-1, ::-1, ::-1], np.broadcast_to(base[:, :1], base.shape)):
        got = _attend(k, base, query, 50, "auto", engine, kv_cache_layout="NHD")
        assert _error(got, query, _rows(k, "NHD")[:50], _rows(base, "NHD")[:50]) <= 1
    with pytest.raises(ValueError, match="key_cache: the last axis has stride 2"):
        _attend(_random((3, 24, 2, 40), "float32")[..., ::2], base, query, 50, "auto", engine, kv_cache_layout="NHD")


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_one_block_of_any_length_has_the_bits_of_many(isa: str, dtype: str) -> None:
    """As an adapter sees dense K and V: 2100 tokens are one block whose last group has 4, or blocks of 16."""
    k, v = _random((2112, 2, 64), dtype), _random((2112, 2, 64), dtype, 1)
    query, lens, n = _random((40, 8, 64), dtype, 2), np.array([2100], np.int32), 2100
    loc, results = np.array([0, 40], np.int32), []
    plan = cpu_attn.get_scheduler_metadata(1, 8, 2, 64, lens, dtype, loc, isa=isa, kv_cache_layout="NHD")
    for block_size in (n, 16):
        pages = [x[: -(-n // block_size) * block_size].reshape(-1, block_size, 2, 64) for x in (k, v)]
        table, out = np.arange(len(pages[0]), dtype=np.int32)[None], np.empty_like(query)
        step = (loc, lens, 0.125, True, None, -1, table, 0.0, plan)
        results.append(cpu_attn.attention_with_kv_cache(query, *pages, out, *step, kv_cache_layout="NHD"))
    assert results[0].tobytes() == results[1].tobytes()


def test_errors() -> None:
    k = np.zeros(SHAPES["NHD"], np.float32)
    rows, slots = np.zeros((1, 2, 20), np.float32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="kv_cache_layout: 'nhd' is none of 'packed', 'HND', 'NHD'"):
        cpu_attn.reshape_and_cache(rows, rows, k, k.copy(), slots, kv_cache_layout="nhd")
    with pytest.raises(ValueError, match="kv_cache_layout: 'nhd' is none of"):
        cpu_attn.get_kv_cache_shape(1, 16, 1, 16, "float32", kv_cache_layout="nhd")
    with pytest.raises(ValueError, match="key_cache: axis 1 is 24, expected num_kv_heads = 2"):
        cpu_attn.reshape_and_cache(rows, rows, k, k.copy(), slots, kv_cache_layout="HND")
    with pytest.raises(ValueError, match="key_cache: axis 3 is 20, expected head_size = 18 in layout NHD"):
        cpu_attn.reshape_and_cache(rows[..., :18], rows, k, k.copy(), slots, kv_cache_layout="NHD")
    with pytest.raises(ValueError, match="key_cache: shares memory with value_cache"):
        cpu_attn.reshape_and_cache(rows, rows, k, k, slots, kv_cache_layout="NHD")
    wide = np.lib.stride_tricks.as_strided(k.copy(), SHAPES["NHD"], (3840, 0, 80, 4))
    with pytest.raises(ValueError, match="make elements overlap"):
        cpu_attn.reshape_and_cache(rows, rows, wide, k, slots, kv_cache_layout="NHD")
    with pytest.raises(ValueError, match=r"slot_mapping\[0\]: 72, expected less than num_blocks \* block_size = 72"):
        cpu_attn.reshape_and_cache(rows, rows, k, k.copy(), slots + 72, kv_cache_layout="NHD")
    with pytest.raises(ValueError, match="block_size is 0"):
        cpu_attn.reshape_and_cache(rows, rows, k[:, :0], k[:, :0], slots, kv_cache_layout="NHD")
    plan = cpu_attn.get_scheduler_metadata(
        1, 2, 2, 20, np.array([1], np.int32), "float32", np.array([0, 1], np.int32), kv_cache_layout="NHD"
    )
    step = (np.array([0, 1], np.int32), np.array([1], np.int32), 1.0, True, None, -1, TABLE, 0.0, plan)
    with pytest.raises(ValueError, match="kv_cache_layout: 'packed', scheduler_metadata was made for 'NHD'"):
        cpu_attn.attention_with_kv_cache(rows, k, k, np.empty_like(rows), *step)
    assert not k.any()


# ---- latent ----


def _latent(dtype: str = "bfloat16", rank: int = 32, rope: int = 8) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """kv_c, k_pe of 40 tokens, and their cache in 3 blocks of 16, in order."""
    kv_c, k_pe = _random((40, rank), dtype), _random((40, rope), dtype, 1)
    cache = np.full((3, 16, rank + rope), np.nan, numpy_dtype(dtype))
    cpu_attn.concat_and_cache_mla(kv_c, k_pe, cache, np.arange(40))
    return kv_c, k_pe, cache


def _plan(n: int, heads: int, dtype: str = "bfloat16", **options: Any) -> cpu_attn.SchedulerMetadata:
    options = {"head_size_v": 32, "kv_cache_layout": "NHD", **options}
    loc, lens = np.array([0, 2], np.int32), np.array([n], np.int32)
    return cpu_attn.get_scheduler_metadata(1, heads, 1, 40, lens, dtype, loc, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mla(dtype: str) -> None:
    kv_c, k_pe, cache = _latent(dtype)
    rows = np.concatenate([kv_c, k_pe], axis=1)
    assert (cache.reshape(48, 40)[:40] == rows).all()
    assert np.isnan(cache.reshape(48, 40)[40:].astype(np.float32)).all()
    query, out = _random((2, 16, 40), dtype, 2), np.empty((2, 16, 32), numpy_dtype(dtype))
    loc, lens, table = np.array([0, 2], np.int32), np.array([40], np.int32), np.arange(3, dtype=np.int32)[None]
    lse = np.empty((16, 2), np.float32)
    plan = _plan(40, 16, dtype)
    got = cpu_attn.attention_mla(query, cache, out, loc, lens, 0.25, True, table, plan, lse=lse)
    assert got is out
    assert _error(got, query, rows[:, None], kv_c[:, None]) <= 1
    _, want = reference.attention(query, [rows[:, None]], [kv_c[:, None]], loc, lens, 0.25)
    assert np.abs(lse - want).max() < 1e-2


@pytest.mark.integrations
def test_mla_of_torch() -> None:
    import torch

    kv_c, k_pe = torch.randn(40, 32).bfloat16(), torch.randn(40, 8).bfloat16()
    cache = torch.zeros(3, 16, 40).bfloat16()
    cpu_attn.concat_and_cache_mla(kv_c, k_pe, cache, torch.arange(40))
    assert (cache.reshape(48, 40)[:40] == torch.cat([kv_c, k_pe], 1)).all()
    query, out = torch.randn(2, 16, 40).bfloat16(), torch.empty(2, 16, 32).bfloat16()
    lens, loc = torch.tensor([40], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    table = torch.arange(3, dtype=torch.int32)[None]
    cpu_attn.attention_mla(query, cache, out, loc, lens, 0.25, False, table, _plan(40, 16, causal=False))
    rows = cache.reshape(48, 40)[:40].float()
    want = torch.softmax(query.float() @ rows.T * 0.25, -1) @ rows[:, :32]
    assert float((out.float() - want).norm() / want.norm()) < 4e-3


def test_mla_errors() -> None:
    kv_c, k_pe, cache = _latent()
    before = cache.copy()
    slots = np.arange(40)
    for arguments, error, words in (
        ((kv_c[0], k_pe, cache, slots), ValueError, "kv_c: 1 axes, expected 2"),
        ((kv_c, k_pe[:3], cache, slots), ValueError, "k_pe: axis 0 is 3, expected T = 40"),
        ((kv_c, k_pe.astype(np.float32), cache, slots), TypeError, "k_pe: dtype float32"),
        ((kv_c, k_pe, cache[..., :39], slots), ValueError, r"kv_cache: axis 2 is 39, expected L \+ P = 40"),
        ((kv_c, k_pe, cache.astype(np.float32), slots), TypeError, "kv_cache: dtype float32"),
        ((kv_c, k_pe, cache, slots + 9), ValueError, r"slot_mapping\[39\]: 48"),
        ((cache.reshape(48, 40)[:40, :32], k_pe, cache, slots), ValueError, "^kv_cache: shares memory with kv_c$"),
        ((kv_c[:, :0], k_pe, cache[..., :8], slots), ValueError, "^kv_c: head size: 0"),
        ((kv_c, k_pe, cache, slots, "auto", 2.0), ValueError, "^scale: 2.0 applies to fp8"),
        ((kv_c, k_pe, np.broadcast_to(cache, cache.shape), slots), ValueError, "^kv_cache: is read-only"),
    ):
        with pytest.raises(error, match=words):
            cpu_attn.concat_and_cache_mla(*arguments)
    assert cache.tobytes() == before.tobytes()
    query, out = _random((2, 16, 40), "bfloat16"), np.empty((2, 16, 32), numpy_dtype("bfloat16"))
    loc, lens, table = np.array([0, 2], np.int32), np.array([40], np.int32), np.arange(3, dtype=np.int32)[None]
    step = (loc, lens, 0.25, True, table)
    with pytest.raises(ValueError, match="kv_cache: axis 2 is 39"):
        cpu_attn.attention_mla(query, cache[..., :39], out, *step, _plan(40, 16))
    with pytest.raises(ValueError, match="kv_cache_layout: 'NHD', scheduler_metadata was made for 'packed'"):
        cpu_attn.attention_mla(query, cache, out, *step, _plan(40, 16, kv_cache_layout="packed"))
    with pytest.raises(ValueError, match="scheduler_metadata: made for 1 kv heads of 40/41"):
        cpu_attn.attention_mla(query, cache, out, *step, _plan(40, 16, head_size_v=41))
    with pytest.raises(ValueError, match=r"^output: shares memory with kv_cache$"):
        cpu_attn.attention_mla(query, cache, cache.reshape(-1)[:1024].reshape(2, 16, 32), *step, _plan(40, 16))


@pytest.mark.parametrize("kind", ["int8", "int4", "auto/int8", "int4/fp8"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_no_integers(kind: str, layout: str) -> None:
    refused = rf"kv_cache_layout: '{layout}' holds no int"
    rows, slots = _random((2, 2, 20), "float32"), np.arange(2)
    pages = np.zeros((3, 24, 2, 20) if layout == "NHD" else (3, 2, 24, 20), np.uint8)
    with pytest.raises(ValueError, match=refused):
        cpu_attn.PagedKVCache(3, 24, 2, 20, kv_cache_dtype=kind, kv_cache_layout=layout)
    with pytest.raises(ValueError, match=refused):
        cpu_attn.reshape_and_cache(rows, rows, pages, pages.copy(), slots, kv_cache_dtype=kind, kv_cache_layout=layout)
    step = (np.array([1], np.int32), "float32", np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match=refused):
        cpu_attn.get_scheduler_metadata(1, 2, 2, 20, *step, kv_cache_dtype=kind, kv_cache_layout=layout)
    if "/" not in kind:
        with pytest.raises(ValueError, match=refused):
            cpu_attn.get_kv_cache_shape(3, 24, 2, 20, "float32", kv_cache_dtype=kind, kv_cache_layout=layout)
        with pytest.raises(ValueError, match=refused):
            ops.gather(
                *(pages, TABLE[0], 8, 20),
                value=False,
                dtype="float32",
                kv_cache_dtype=kind,
                kv_cache_layout=layout,
            )


def test_mla_of_integers() -> None:
    latent, rotated = _random((2, 32), "float32"), _random((2, 8), "float32")
    for kind, refused in (("int8", "'NHD' holds no int8"), ("fp8/auto", "K and V are the same rows")):
        with pytest.raises(ValueError, match=refused):
            cpu_attn.concat_and_cache_mla(
                latent, rotated, np.zeros((3, 16, 40), np.uint8), np.arange(2), kv_cache_dtype=kind
            )
