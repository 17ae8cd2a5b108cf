# SPDX-License-Identifier: Apache-2.0
"""Numbers that differ by orders of magnitude, infinities and NaN, in caches that hold them and in quantised ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference
from cpu_attn._threads import threads

from ..cases.formats import DTYPES, numpy_dtype
from ..harness.kernels import KERNELS

KINDS = ("auto", "int8", "int6", "int5", "int4", "int4_per_token_head")
COMBINATIONS = [("native", *k) for k in KERNELS] + [
    (e.name, "auto", dtype) for e in cpu_attn.engines() if e.available and e.name != "native" for dtype in DTYPES
]
CASES = (
    "query",
    "outlier",
    "outliers",
    "channels",
    "alike",
    "one column",
    "turns",
    "sink",
    "one value",
    "last bits",
    "late",
)
EXTREMES = ("tiny keys", "tiny queries")  # of which float16 has none


def far_apart(case: str, rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """Queries [8, 4, 128], keys and values [300, 1, 128] whose numbers differ by orders of magnitude."""
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((8, 4, 128), (300, 1, 128), (300, 1, 128)))
    if case == "query":  # as models have it: a dimension that is large in all queries, and small in keys
        q[..., 17] *= 100
        k[..., 17] /= 100
    elif case == "outlier":
        q[..., 17], k[..., 17] = 3000, 0
    elif case == "outliers":
        q[..., 17], k[..., 17] = 300 * q[..., 17], 0
    elif case == "channels":  # as SmoothQuant finds them: large in queries where they are small in keys
        channel = np.exp(1.5 * rng.standard_normal(128)).astype(np.float32)
        q, k = 4 * q * channel, k / channel
    elif case in ("alike", "one column", "turns"):  # weights of about 1 / 3000, then one on a single large value
        q[...], q[..., [0, 32]] = 0, 128**0.5
        k[..., 0], k[255] = -np.log(3000), 0
        k[..., 32] /= 4
        v = 0.1 * v + 0.5 if case == "alike" else np.sign(v)
        if case == "turns":  # signs by turns, and next to the heavy key less than one of 32767 parts
            k[..., 0], k[..., 32], k[255] = -np.log(72000), 0, 0
            v[::2], v[1::2] = 1, -1
        v[255], v[255, 0, 5] = 0, 10 if case != "turns" else 1
    elif case == "sink":  # nearly all of the weight is on a key whose value is nearly 0
        k[0] = 3 * q.mean(axis=(0, 1)) * 8**0.5
        v[0] /= 1000
    elif case == "tiny keys":
        q *= np.float32(2.0**100)
        k *= np.float32(2.0**-100)
        v *= np.float32(2.0**-100)
    elif case == "tiny queries":
        q *= np.float32(2.0**-100)
        k *= np.float32(2.0**100)
    elif case == "one value":
        v[np.arange(300) != 250] = 0
    elif case == "last bits":  # 5 times a scale of 211 / 128: 1055 is 0.7 % more than its first 8 bits say
        v[...], v[..., ::32] = 1056 / 128, 1472 / 128
    elif case == "late":  # weights grow by orders of magnitude along the keys
        k = np.linspace(-1, 6, 300, dtype=np.float32)[:, None, None] * q.mean(axis=(0, 1)) + 0.3 * k
    return [q, k, v]


def against_oracle(
    isa: str,
    dtype: str,
    kv_cache_dtype: str,
    qkv: Sequence[NDArray[Any]],
    scale: float,
    softcap: float = 0.0,
    engine: str = "native",
) -> tuple[float, float]:
    """One request whose query tokens are its last: relative RMS of its output, and the largest error of its lse, as a
    share of lse where that is more than 1."""
    q, k, v = (x.astype(numpy_dtype(dtype)) for x in qkv)
    table, lens = np.arange(-(-len(k) // 16), dtype=np.int32), np.array([len(k)], np.int32)
    starts, lse = np.array([0, len(q)], np.int32), np.empty((q.shape[1], len(q)), np.float32)
    shape = (len(table), 16, *k.shape[1:])
    cache = cpu_attn.PagedKVCache(*shape, dtype, isa, head_size_v=v.shape[2], kv_cache_dtype=kv_cache_dtype)
    cache.update(k, v, np.arange(len(k)))
    plan = cache.plan(starts, lens, q.shape[1], engine=engine)
    got = cache.attend(q, table[None], plan, scale=scale, softcap=softcap, lse=lse)
    kv = ([x] for x in cache.gather(table, len(k)))
    want, want_lse = reference.attention(q, *kv, starts, lens, scale, softcap=softcap)
    error: float = reference.relative_rms(got.astype(np.float64), want, starts)[0]
    return error, np.abs(lse - want_lse).max() / max(1, np.abs(want_lse).max())


@pytest.mark.parametrize("kv_cache_dtype", [*KINDS, "int8/int4"])
@pytest.mark.parametrize(
    ("isa", "dtype", "case"),
    [(*k, case) for k in KERNELS for case in (CASES if k[1] == "float16" else CASES + EXTREMES)],
)
def test_numbers_far_apart(isa: str, dtype: str, case: str, kv_cache_dtype: str) -> None:
    q, *kv = far_apart(case, np.random.default_rng(11))
    one_token = q[:3].reshape(1, 12, 128)  # of as many heads as amx multiplies bytes for
    for queries in (q[:1], q[:2], q, one_token):
        error, _ = against_oracle(isa, dtype, kv_cache_dtype, [queries, *kv], 128**-0.5)
        assert error <= reference.BUDGET[dtype], queries.shape


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize(
    ("isa", "dtype", "small"),
    [(*k, x) for k in KERNELS for x in (0.0053, 0.02, 0.042, 0.07, 0.16) if k[1] != "float32" or x < 0.1],
)
def test_what_a_query_loses_has_one_sign(isa: str, dtype: str, kv_cache_dtype: str, small: float) -> None:
    """Every second key is small in all dimensions, the others have the same logit in one: rounded next to 1000, as
    integers of 15 bits, 65/64 would become 1 in all of them. That is of 16-bit queries: float32's products of integers
    and then their scale take up to 2.2 of its budget, at numbers from 0.09 to 0.2."""
    q, k, v = np.full((1, 1, 1024), 65 / 64), np.full((32, 1, 1024), small), np.zeros((32, 1, 32))
    k[1::2], v[::2] = 0, np.random.default_rng(16).uniform(0.5, 1, 32)
    for d in range(0, 1024, 32):
        q[..., d], k[..., d], k[1::2, :, d + 1] = 1000, 0, 31 * small
    for kind, heads in ((f"{kv_cache_dtype}/auto", 1), (kv_cache_dtype, 9)):  # amx multiplies bytes of so many heads
        error, lse_error = against_oracle(isa, dtype, kind, [q.repeat(heads, axis=1), k, v], 1 / 32)
        assert error <= reference.BUDGET[dtype], kind
        assert lse_error <= reference.LSE_BUDGET[dtype], kind


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_what_one_head_loses_changes_no_other(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """Not one bit, where some heads are multiplied a second time and others that share the products are not."""
    q, k, v = (x.astype(numpy_dtype(dtype)) for x in far_apart("", np.random.default_rng(17)))
    outlier = q[:3].reshape(1, 12, 128).copy()
    plain = outlier.copy()
    outlier[:, ::3, 17] = 3000
    table, starts, lens = np.arange(19, dtype=np.int32), np.array([0, 1], np.int32), np.array([300], np.int32)
    cache = cpu_attn.PagedKVCache(19, 16, 1, 128, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.update(k, v, np.arange(300))
    plan = cache.plan(starts, lens, 12)
    got, want = (cache.attend(x, table[None], plan, scale=128**-0.5) for x in (outlier, plain))
    others = [head for head in range(12) if head % 3]
    assert np.array_equal(got[:, others].view(np.uint8), want[:, others].view(np.uint8))
    assert not np.array_equal(got[:, ::3], want[:, ::3])


@pytest.mark.parametrize("kv_cache_dtype", KINDS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_a_query_that_is_no_number(isa: str, dtype: str, number: float, kv_cache_dtype: str) -> None:
    rng = np.random.default_rng(12)
    q, k, v = (rng.standard_normal((n, 2, 72)).astype(numpy_dtype(dtype)) for n in (3, 40, 40))
    q[1, 1, 70] = number
    cache = cpu_attn.PagedKVCache(3, 16, 2, 72, dtype, isa, kv_cache_dtype=kv_cache_dtype)
    cache.update(k, v, np.arange(40))
    plan = cache.plan(np.array([0, 3], np.int32), np.array([40], np.int32), 2)
    nan = np.isnan(cache.attend(q, np.arange(3, dtype=np.int32)[None], plan).astype(np.float32))
    assert nan[1, 1].all()
    assert nan.sum() == 72


@pytest.mark.parametrize(
    ("kv_cache_dtype", "large"),
    [
        ("auto", 2.0**100),
        ("auto", 2.0**-120),
        ("int8", 2.0**120),
        ("int4", 2.0**120),
        ("int8", 2.0**-100),
        ("fp8_e4m3", 2.0**16),
    ],
)
@pytest.mark.parametrize(("isa", "dtype"), [k for k in KERNELS if k[1] != "float16"])
def test_scales_far_from_one(isa: str, dtype: str, kv_cache_dtype: str, large: float) -> None:
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(np.float32) for n in (1, 48, 48))
    q, k = q * np.float32(large**-0.5), k * np.float32(large**-0.5)
    error, _ = against_oracle(isa, dtype, kv_cache_dtype, [q, k, v], large / 8)
    assert error <= reference.BUDGET[dtype]


@pytest.mark.parametrize(
    ("size", "softcap"),
    [(1, 1.2e-38), (1e10, 1e-29), (1e10, 3e-5), (1e-10, 1e30), (1e3, 1e37), (1e10, 1e35), (1, 2.3e38)],
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize(("engine", "isa", "dtype"), COMBINATIONS)
def test_softcaps_near_the_bounds(
    engine: str, isa: str, dtype: str, kv_cache_dtype: str, size: float, softcap: float
) -> None:
    """What is small makes all logits equal, what is large changes nothing. Queries of that size, scale over it."""
    size = min(size, 1e3) if dtype == "float16" else size
    rng = np.random.default_rng(17)
    q, *kv = (rng.standard_normal((n, 2, 64)) for n in (1, 48, 48))
    errors = against_oracle(isa, dtype, kv_cache_dtype, [size * q, *kv], 1 / (8 * size), softcap, engine)
    assert max(errors) <= reference.BUDGET[dtype]


@pytest.mark.parametrize(("num_tokens", "number"), [(1, 1), (16, 0.7), (1, 0.7), (16, 5.3)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize(("engine", "isa", "dtype"), [c for c in COMBINATIONS if c[2] == "float32"])
def test_values_that_are_one_number(
    engine: str, isa: str, dtype: str, kv_cache_dtype: str, number: float, num_tokens: int
) -> None:
    """Their products with weights, of two logits, are alike, and would all be rounded to the same side."""
    rng = np.random.default_rng(18)
    q, k, v = np.ones((num_tokens, 4, 64)), np.zeros((2048, 1, 64)), np.full((2048, 1, 64), number)
    k[rng.random(2048) < 0.5, :, 0] = 0.3
    errors = against_oracle(isa, dtype, kv_cache_dtype, [q, k, v], 1.0, engine=engine)
    assert max(errors) <= reference.BUDGET[dtype]


@pytest.mark.parametrize(("isa", "dtype"), [k for k in KERNELS if k[1] == "bfloat16"])  # rounds weights, all alike
def test_errors_of_equal_weights_do_not_add_up(isa: str, dtype: str) -> None:
    """A key and 255 others, whose weights are equal: in every request something else from 1 to 1/2. lse is near 0."""
    n, keys, real = 3000, 256, numpy_dtype(dtype)
    score = np.full((n, keys), -np.log(keys))
    score[:, 1:] -= np.linspace(0, np.log(2), n)[:, None]
    q, k, v = np.ones((n, 1, 32), real), np.zeros((n, keys, 32), real), np.zeros((n * keys, 1, 32), real)
    for d in range(3):  # as a sum
        k[..., d] = score - k.astype(np.float64).sum(axis=2)
    k = k.reshape(-1, 1, 32)
    cache = cpu_attn.PagedKVCache(n, keys, 1, 32, dtype, isa)
    cache.update(k, v, np.arange(n * keys))
    plan = cache.plan(np.arange(n + 1, dtype=np.int32), np.full(n, keys, np.int32), 1)
    lse = np.empty((1, n), np.float32)
    cache.attend(q, np.arange(n, dtype=np.int32)[:, None], plan, scale=1.0, lse=lse)
    want = np.log(np.exp(k.astype(np.float64).reshape(n, keys, 32).sum(axis=2)).sum(axis=1))
    assert np.abs(want).max() < 1
    assert np.abs(lse[0] - want).max() <= reference.LSE_BUDGET[dtype]


@pytest.mark.parametrize(("isa", "dtype"), [k for k in KERNELS if k[1] == "bfloat16"])
def test_weights_are_as_near_as_by_the_best_table(isa: str, dtype: str) -> None:
    """1 + w/512 stands for 2^(w/512), less an entry of a table for every four w: each is the best, but for that of 1,
    which stays 1. lse says what the second of two weights is, in an even lane and in an odd one."""
    n, real, powers = 512, numpy_dtype(dtype), np.arange(512)
    k = np.zeros((2, n, 2, 32), real)
    for second in range(2):
        k[second, :, second, 0], k[second, :, second, 1] = -(powers % 256), -(powers // 256 * 256)
    k = k.reshape(-1, 1, 32)
    cache = cpu_attn.PagedKVCache(2 * n, 2, 1, 32, dtype, isa)
    cache.update(k, k, np.arange(4 * n))
    plan = cache.plan(np.arange(2 * n + 1, dtype=np.int32), np.full(2 * n, 2, np.int32), 1)
    q, table, lse = np.ones((2 * n, 1, 32), real), np.arange(2 * n, dtype=np.int32)[:, None], np.empty((1, 2 * n), "f4")
    cache.attend(q, table, plan, scale=np.log(2) / 512, lse=lse)

    word = 127 * 512 + 2 - powers  # of bfloat16's bits and two more; 2 rounds those
    four = word // 4 % 128

    def squares(weights: NDArray[Any]) -> NDArray[np.float64]:
        sums = np.zeros(128)
        np.add.at(sums, four, (weights * 2.0 ** (powers / 512) - 1) ** 2)
        return sums

    entries = [((word - entry) // 4 * 2**16).astype(np.uint32).view(np.float32) for entry in range(64)]
    best = np.min([squares(weights) for weights in entries], axis=0)
    for weights in np.exp(lse.reshape(2, n).astype(np.float64)) - 1:
        assert (squares(weights)[1:] <= 1.03 * best[1:]).all()


@pytest.mark.parametrize("engine", [e.name for e in cpu_attn.engines() if e.available])
def test_logits_past_float32(engine: str) -> None:
    """In units of log2 2.4e38 is infinite, which makes the row NaN, and so its lse."""
    cache = cpu_attn.PagedKVCache(1, 16, 1, 8, dtype="float32")
    key = np.ones((2, 1, 8), np.float32)
    cache.update(key, key, np.arange(2))
    lens, starts, lse = np.array([2], np.int32), np.array([0, 1], np.int32), np.zeros((1, 1), np.float32)
    plan = cache.plan(starts, lens, 1, engine=engine)
    bias = np.array([2.4e38, 0], np.float32).reshape(1, 1, 1, 2)
    output = cache.attend(key[:1], np.zeros((1, 1), np.int32), plan, attn_bias=bias, lse=lse)
    assert np.isnan(output).all() and np.isnan(lse).all()


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_a_million_keys_of_equal_weight(isa: str) -> None:
    """Summed up one by one, the 16,384 of a segment take 1.8 times the error budget."""
    n = 2**20
    keys = np.broadcast_to(np.zeros(16, np.float32), (1, 2, n, 16))
    values = np.random.default_rng(14).standard_normal((n, 16), np.float32)
    caches = keys, np.broadcast_to(values, (1, 2, n, 16))
    starts, lens, zeros = np.array([0, 1], np.int32), np.array([n], np.int32), np.zeros((1, 1), np.int32)
    got = []
    for count in (1, 3):
        with threads(count, forced=True):
            plan = cpu_attn.get_scheduler_metadata(1, 2, 2, 16, lens, "float32", starts, isa=isa, kv_cache_layout="HND")
        step = (starts, lens, 1.0, True, None, -1, zeros, 0.0, plan)
        query, output = np.zeros((2, 1, 2, 16), np.float32)
        got.append(cpu_attn.attention_with_kv_cache(query, *caches, output, *step, kv_cache_layout="HND"))
    assert got[0].tobytes() == got[1].tobytes()
    want = np.broadcast_to(values.mean(axis=0, dtype=np.float64), (1, 2, 16))
    assert reference.relative_rms(got[0], want, starts)[0] <= reference.BUDGET["float32"]


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_millions_of_keys_that_are_alike(isa: str) -> None:
    """Products of a column are one number; as one sum the 65,536 of a segment take 1.6 or more error budgets."""
    n = 2**22
    value = np.linspace(0.5, 1, 16, dtype=np.float32)
    key_cache, value_cache = (np.broadcast_to(x, (1, 1, n, 16)) for x in (np.zeros(16, np.float32), value))
    starts, lens, table = np.array([0, 1], np.int32), np.array([n], np.int32), np.zeros((1, 1), np.int32)
    plan = cpu_attn.get_scheduler_metadata(1, 1, 1, 16, lens, "float32", starts, isa=isa, kv_cache_layout="HND")
    query, output = np.zeros((2, 1, 1, 16), np.float32)
    cpu_attn.attention_with_kv_cache(
        *(query, key_cache, value_cache, output, starts, lens, 1.0, True, None, -1, table, 0.0, plan),
        kv_cache_layout="HND",
    )
    want = value.astype(np.float64)[None, None]
    assert reference.relative_rms(output, want, starts)[0] <= reference.BUDGET["float32"]
