# SPDX-License-Identifier: Apache-2.0
"""Rotated caches: what lies in them, what attention makes of them, and who has to say so."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import PagedAttention, PagedKVCache, convert, rotate

from . import case_levels, formats
from .backend_steps import Step, layer
from .case_problem import build
from .case_run import plan_of, run, written
from .formats import hadamard, rotates
from .judge import check
from .kernels import KERNELS
from .layout_caches import contents, filled, held

SIZES = (1, 2, 3, 16, 31, 40, 64, 80, 96, 128, 200, 256, 1100, 4096)


@pytest.mark.parametrize("size", SIZES)
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


@pytest.mark.parametrize("rotation", ["hadamard", "hadamard/none", "none/hadamard"])
@pytest.mark.parametrize("kind", ["auto", "int8", "int4", "fp8_e5m2", "int8/int4", "int6/int5"])
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
            want = held(turned.astype(dtype) if held_as == "auto" else turned, held_as, 1.0, rotated)
            np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("size", [1, 33, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", formats.DTYPES)
def test_plain_ones_change_nothing(dtype: str, size: int) -> None:
    """The result is that of the unrotated maths; bfloat16 and float16 round keys, values and queries once more."""
    case = next(c for c in case_levels.cases("quick", dtype) if c.name == "mixed-plain")
    plain = build(dataclasses.replace(case, head_size=size))
    rotated = dataclasses.replace(plain, case=dataclasses.replace(plain.case, kv_cache_rotation="hadamard"))
    output, lse = run(rotated)
    judged = check(plain, output, lse)
    assert max(judged.errors) <= (1 if dtype == "float32" else 2), judged.message


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
def test_a_plan_has_room_for_the_queries(engine: str) -> None:
    case = next(c for c in case_levels.cases("quick", "bfloat16") if c.name == "rotated-int8")
    cases = [dataclasses.replace(case, kv_cache_rotation=r) for r in ("none", "hadamard")]
    plan = [plan_of(build(c), "auto", engine, True) for c in cases]
    tokens = plan[0].num_tokens * case.num_heads * case.head_size * 2
    assert plan[1].workspace_bytes >= plan[0].workspace_bytes + tokens
    assert [p.kv_cache_rotation for p in plan] == ["none", "hadamard"]


def test_everyone_says_it() -> None:
    case = next(c for c in case_levels.cases("quick", "float32") if c.name == "rotated-int8")
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
        ("walsh", ValueError, "kv_cache_rotation: 'walsh' is none of none, hadamard, nor two of them as 'K/V'"),
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
