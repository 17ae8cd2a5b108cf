# SPDX-License-Identifier: Apache-2.0
"""Rotated caches: what lies in them, what attention makes of them, and who has to say so."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import PagedAttention, PagedKVCache, balance, convert, reference, rotate

from ..cases import formats, levels
from ..cases.formats import hadamard, rotates
from ..cases.judge import check
from ..cases.problem import build
from ..cases.run import plan_of, run, written
from ..harness.backend_steps import Step, layer
from ..harness.kernels import KERNELS
from ..harness.layout_caches import contents, filled, held

SIZES = (1, 2, 3, 16, 31, 40, 64, 80, 96, 128, 200, 256, 1100, 4096)


@pytest.mark.parametrize("size", SIZES[:-1])
def test_rotation_is_orthogonal(size: int) -> None:
    r = hadamard(np.eye(size)).T
    np.testing.assert_allclose(r @ r.T, np.eye(size), atol=1e-13)
    np.testing.assert_allclose(hadamard(np.eye(size), back=True).T, r.T, atol=1e-13)
    blocks = [int(b) for b in bin(size)[2:]]
    assert np.count_nonzero(r) == sum((bit << i) ** 2 for i, bit in enumerate(reversed(blocks)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("back", [False, True])
def test_in_numpy(size: int, back: bool) -> None:
    x = np.random.default_rng(size).standard_normal((3, 2, size))
    np.testing.assert_allclose(rotate(x, back), hadamard(x, back), atol=1e-13)
    narrow = x.astype(np.float32)
    kept = narrow.copy()
    got = rotate(narrow, back)
    assert got.dtype == np.float32 and (narrow == kept).all()
    np.testing.assert_array_equal(got, hadamard(narrow, back))
    half = x.astype(formats.numpy_dtype("bfloat16"))
    np.testing.assert_array_equal(rotate(half, back), hadamard(half.astype(np.float32), back))


@pytest.mark.parametrize(
    ("x", "back", "error", "words"),
    [
        (np.float32(1), False, ValueError, "x: shape (), expected a last axis of at least 1"),
        (np.ones((3, 0)), False, ValueError, "x: shape (3, 0), expected a last axis of at least 1"),
        (np.ones(4, np.int32), False, TypeError, "x: dtype int32"),
        ([1.0, 2.0], False, TypeError, "x: "),
        (np.ones(4), "yes", TypeError, "back: expected True or False"),
    ],
)
def test_rotate_refuses(x: Any, back: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as found:
        rotate(x, back)
    assert str(found.value).startswith(words)


@pytest.mark.parametrize("rotation", ["hadamard", "hadamard/none", "none/hadamard"])
@pytest.mark.parametrize("kind", ["auto", "int8", "int4", "fp8_e5m2", "int6/int4_per_token_head", "int5"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_what_lies_in_them(isa: str, dtype: str, kind: str, rotation: str) -> None:
    """The bits that the contract gives, on every isa, in groups of 16 tokens and token by token."""
    for sizes in ((64, 33), (80, 256)):
        cache, key, value = filled(dtype, isa, sizes, kv_cache_dtype=kind, kv_cache_rotation=rotation)
        for i in (0, 17, 34):
            cache.update(key[i : i + 1], value[i : i + 1], np.array([i]))
        sides = zip(contents(cache), (key, value), formats.kinds_of(kind), rotates(rotation), strict=True)
        for got, x, held_as, rotated in sides:
            turned = hadamard(x.astype(np.float32)) if rotated else x
            want = held(turned.astype(x.dtype) if held_as == "auto" else turned, held_as, 1.0)
            np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("size", [1, 33, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", formats.DTYPES)
def test_plain_ones_change_nothing(dtype: str, size: int) -> None:
    """The result is that of the unrotated maths; bfloat16 and float16 round keys, values and queries once more."""
    case = next(c for c in levels.cases("quick", dtype) if c.name == "mixed-plain")
    plain = build(dataclasses.replace(case, head_size=size))
    rotated = dataclasses.replace(plain, case=dataclasses.replace(plain.case, kv_cache_rotation="hadamard"))
    output, lse = run(rotated)
    judged = check(plain, output, lse)
    assert max(judged.errors) <= (1 if dtype == "float32" else 2), judged.message


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
def test_a_plan_has_room_for_the_queries(engine: str) -> None:
    case = next(c for c in levels.cases("quick", "bfloat16") if c.name == "rotated-int8")
    cases = [dataclasses.replace(case, kv_cache_rotation=r) for r in ("none", "hadamard")]
    plan = [plan_of(build(c), "auto", engine, True) for c in cases]
    tokens = plan[0].num_tokens * case.num_heads * case.head_size * 2
    assert plan[1].workspace_bytes >= plan[0].workspace_bytes + tokens
    assert [p.kv_cache_rotation for p in plan] == ["none", "hadamard"]


def test_everyone_says_it() -> None:
    case = next(c for c in levels.cases("quick", "float32") if c.name == "rotated-int8")
    problem = build(case)
    memory = written(problem)
    for rotation in ("none", "hadamard/none"):
        other = dataclasses.replace(problem, case=dataclasses.replace(case, kv_cache_rotation=rotation))
        assert not check(problem, *run(other, memory=memory)).ok  # nothing in memory tells
    cache, key, _ = filled("float32", sizes=(32, 32), kv_cache_dtype="int8", kv_cache_rotation="hadamard")
    unlike, _, _ = filled("float32", sizes=(32, 32), kv_cache_dtype="int8")
    starts, lens, table = np.array([0, 1], np.int32), np.array([40], np.int32), np.arange(5, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="kv_cache_rotation: 'hadamard', scheduler_metadata was made for 'none'"):
        cache.attend(key[:1], table, unlike.plan(starts, lens, 2))
    with pytest.raises(ValueError, match="kv_cache_rotation: 'none', scheduler_metadata was made for 'hadamard'"):
        unlike.attend(key[:1], table, cache.plan(starts, lens, 2))


@pytest.mark.parametrize(
    ("rotation", "error", "words"),
    [
        ("walsh", ValueError, "kv_cache_rotation: 'walsh' is none of 'none', 'hadamard', nor two of them as 'K/V'"),
        ("hadamard/none/none", ValueError, "kv_cache_rotation: 'hadamard/none/none'"),
        ("", ValueError, "kv_cache_rotation: ''"),
        (None, TypeError, "kv_cache_rotation: expected a name, got NoneType"),
        (["none"], TypeError, "kv_cache_rotation: expected a name, got list"),
    ],
)
def test_refused(rotation: Any, error: type[Exception], words: str) -> None:
    cache, key, value = filled("float32", kv_cache_dtype="int8")
    before = cache.key_cache.copy()
    arrays = (key, value, cache.key_cache, cache.value_cache, np.arange(len(key)))
    lens = np.array([1], np.int32)
    calls: list[Any] = [
        lambda: PagedKVCache(1, 16, 1, 8, kv_cache_rotation=rotation),
        lambda: cpu_attn.reshape_and_cache(*arrays, kv_cache_dtype="int8", kv_cache_rotation=rotation),
        lambda: cpu_attn.get_scheduler_metadata(
            1, 2, 2, 24, lens, "float32", np.array([0, 1], np.int32), kv_cache_rotation=rotation
        ),
        lambda: (
            convert(cache, kv_cache_rotation=rotation)
            if rotation is not None
            else PagedKVCache(1, 16, 1, 8, kv_cache_rotation=rotation)
        ),
    ]
    for call in calls:
        with pytest.raises(error) as found:
            call()
        assert str(found.value).startswith(words)
    np.testing.assert_array_equal(cache.key_cache, before)


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8_e4m3", "int4/int8"])
def test_conversion(kind: str) -> None:
    """Rotating a cache of float32 is what a write does; turning back gives the numbers that it held."""
    plain, _, _ = filled("float32", sizes=(40, 64))
    direct, _, _ = filled("float32", sizes=(40, 64), kv_cache_dtype=kind, kv_cache_rotation="hadamard")
    got = convert(plain, kv_cache_dtype=kind, kv_cache_rotation="hadamard")
    assert got.descriptor == direct.descriptor
    for a, b in zip((got.key_cache, got.value_cache), (direct.key_cache, direct.value_cache), strict=True):
        np.testing.assert_array_equal(a, b)
    back = convert(got, kv_cache_dtype="auto", kv_cache_rotation="none")
    for x, turned in zip(contents(back), contents(got), strict=True):
        np.testing.assert_allclose(x, hadamard(turned.astype(np.float64), back=True), rtol=1e-6, atol=1e-6)
    same = convert(got, kv_cache_layout="packed")
    np.testing.assert_array_equal(same.key_cache, got.key_cache)
    assert same.kv_cache_rotation == "hadamard"


def test_backend_layer() -> None:
    class Rotated(PagedAttention):
        kv_cache_rotation = "hadamard"

    caches = []
    for kind in (PagedAttention, Rotated):
        step = Step([5, 40, 1], [5, 40, 1], 0)  # all keys are this step's
        step.check(step.forward(layer(kind)))
        caches.append(np.array(step.kv_cache))
    assert not np.array_equal(*caches, equal_nan=True)


def test_norms_turns_and_rotates_at_once() -> None:
    """The queries that come back are not rotated; the keys are, once they have turned."""
    rng = np.random.default_rng(0)
    arrays: list[NDArray[Any]] = [rng.standard_normal((20, n, 64)).astype(np.float32) for n in (4, 2, 2)]
    positions, table = np.arange(20), rng.standard_normal((32, 64)).astype(np.float32)
    found = []
    for rotation in ("none", "hadamard"):
        cache = PagedKVCache(2, 16, 2, 64, kv_cache_rotation=rotation)
        query = arrays[0].copy()
        memory = (cache.key_cache, cache.value_cache, np.arange(20), positions, table)
        cpu_attn.rotary_reshape_and_cache(query, *arrays[1:], *memory, kv_cache_rotation=rotation)
        found.append((query, *cache.gather(np.arange(2, dtype=np.int32), 20)))
    (query, key, value), (same, rotated_key, rotated_value) = found
    np.testing.assert_array_equal(query, same)
    np.testing.assert_array_equal(rotated_key, hadamard(key))
    np.testing.assert_array_equal(rotated_value, hadamard(value))


@pytest.mark.parametrize(("rot_dim", "is_neox"), [(None, True), (None, False), (16, True), (16, False), (0, True)])
def test_balance(rot_dim: int | None, is_neox: bool) -> None:
    """q.k stays, before the rotary embedding and behind it; a channel has the same size in both."""
    rng = np.random.default_rng(1)
    q_size, k_size = rng.uniform(0.1, 2, (2, 3, 40))
    k_size[:, 5] = 30
    kept = k_size.copy()
    factors = balance(q_size, k_size, rot_dim, is_neox).astype(np.float64)
    assert (k_size == kept).all()
    turned = 40 if rot_dim is None else rot_dim
    first = np.arange(turned // 2) if is_neox else np.arange(0, turned, 2)
    second = first + (turned // 2 if is_neox else 1)
    np.testing.assert_array_equal(factors[:, first], factors[:, second])
    sizes = [np.hypot(x[:, first], x[:, second]) for x in (q_size, k_size)]
    np.testing.assert_allclose(sizes[0] * factors[:, first], sizes[1] / factors[:, first], rtol=1e-6)
    alone = slice(turned, None)
    np.testing.assert_allclose((q_size * factors)[:, alone], (k_size / factors)[:, alone], rtol=1e-6)
    query, key = rng.standard_normal((2, 7, 3, 40))
    table = rng.standard_normal((7, max(turned, 2)))
    found = []
    for q, k in ((query, key), (query * factors, key / factors)):
        if turned:
            q, k = (reference.rotary(x, np.arange(7), table[:, :turned], is_neox) for x in (q, k))
        found.append(np.einsum("qhd,khd->hqk", q, k))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_balance_of_a_channel_that_is_left_out() -> None:
    factors = balance(np.array([1.0, 0.0, 1.0, 1.0]), np.zeros(4), 0)
    np.testing.assert_array_equal(factors, 1)
    factors = balance(np.array([1.0, 0.0, 1.0, 1.0]), np.ones(4), 0)
    np.testing.assert_allclose(factors, [1, 1 / np.sqrt(0.0075), 1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("query", "key", "more", "error", "words"),
    [
        (np.ones(4), np.ones(6), {}, ValueError, "key: shape (6,), expected query's, (4,)"),
        (np.ones(4), -np.ones(4), {}, ValueError, "key[0]: -1.0, expected a finite size"),
        (np.array([[1, np.nan]]), np.ones((1, 2)), {}, ValueError, "query[0, 1]: nan"),
        (np.ones(4, int), np.ones(4), {}, TypeError, "query: dtype int64"),
        (np.ones(4), np.ones(4), {"rot_dim": 3}, ValueError, "rot_dim: 3 is odd"),
        (np.ones(4), np.ones(4), {"rot_dim": 6}, ValueError, "rot_dim: 6"),
        (np.ones(()), np.ones(()), {}, ValueError, "query: shape (), expected a last axis of at least 1"),
    ],
)
def test_balance_refuses(query: Any, key: Any, more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as found:
        balance(query, key, **more)
    assert str(found.value).startswith(words)
