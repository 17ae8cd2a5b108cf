# SPDX-License-Identifier: Apache-2.0
"""Keys of integers whose errors of rounding are fed back: what is stored, what it brings, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn.rotation import error_feedback

from ..cases.formats import INTEGERS, fed_back, hadamard, integers, numpy_dtype
from ..harness.kernels import KERNELS, ONE_DTYPE

KINDS = tuple(INTEGERS)
HADAMARD: Any = {"kv_cache_rotation": "hadamard"}


def factors(heads: int, head_size: int, seed: int = 3) -> NDArray[np.float32]:
    """Of any kind, half of them as large as the errors themselves; below the diagonal there is what must not count."""
    rng = np.random.default_rng(seed)
    found = rng.uniform(-0.5, 0.5, (heads, head_size, head_size)).astype(np.float32) / np.float32(head_size**0.5)
    found[:, np.arange(head_size)[:, None] >= np.arange(head_size)] = np.nan
    return found


def written(x: NDArray[Any], dtype: str, isa: str, slots: Any, kind: str, **how: Any) -> cpu_attn.PagedKVCache:
    """A cache whose keys are x by the raw call; the table may hold NaN."""
    feedback = how.pop("k_feedback", None)
    heads, size = x.shape[1:]
    cache = cpu_attn.PagedKVCache(-(-len(x) // 32) + 1, 32, heads, size, dtype, isa, kv_cache_dtype=kind, **how)
    arrays = (x, x, cache.key_cache, cache.value_cache, slots)
    cpu_attn.reshape_and_cache(*arrays, isa, kv_cache_dtype=kind, k_feedback=feedback, **how)
    return cache


def gathered(cache: cpu_attn.PagedKVCache, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return cache.gather(np.arange(cache.num_blocks, dtype=np.int32), n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_size", [64, 33, 5, 128, 600])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_stored_as_the_formula_says(isa: str, dtype: str, head_size: int, kind: str) -> None:
    """In whole groups of tokens and in runs of any length, with gaps; values do not change."""
    x = np.random.default_rng(4).standard_normal((70, 2, head_size)).astype(numpy_dtype(dtype))
    x[5] *= 0  # a scale of 0
    x[6] = (x[6].astype(np.float32) * np.float32(2.0**-80)).astype(x.dtype)
    x[7, :, 1:] *= 0
    table, slots = factors(2, head_size), np.arange(70)
    slots[40:43], slots[47] = -1, -5
    there = slots >= 0
    keys, values = gathered(written(x, dtype, isa, slots, kind, k_feedback=table), 70)
    assert np.array_equal(keys[there].astype(np.float64), fed_back(x, kind, table)[there])
    assert np.array_equal(values[there].astype(np.float64), integers(x, kind)[there])
    assert not keys[~there].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_rotated(isa: str, dtype: str, head_size: int, kind: str) -> None:
    x = np.random.default_rng(5).standard_normal((40, 3, head_size)).astype(numpy_dtype(dtype))
    table = error_feedback(np.random.default_rng(6).exponential(1, (3, head_size)))
    cache = written(x, dtype, isa, np.arange(40), kind, k_feedback=table, **HADAMARD)
    want = fed_back(hadamard(x.astype(np.float32)), kind, table)
    assert np.array_equal(gathered(cache, 40)[0].astype(np.float64), want)
    plain = cpu_attn.PagedKVCache(2, 32, 3, head_size, "float32")
    plain.update(x.astype(np.float32), x.astype(np.float32), np.arange(40))
    converted = cpu_attn.convert(plain, isa=isa, dtype=dtype, kv_cache_dtype=kind, k_feedback=table, **HADAMARD)
    assert np.array_equal(gathered(converted, 40)[0].astype(np.float64), want)
    friendly = cpu_attn.PagedKVCache(2, 32, 3, head_size, dtype, isa, kv_cache_dtype=kind, k_feedback=table, **HADAMARD)
    for t in (0, 1, 17):  # a token by itself has the same bits
        friendly.update(x[t : t + 1], x[t : t + 1], np.array([t]))
        assert np.array_equal(gathered(friendly, t + 1)[0][t].astype(np.float64), want[t])


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_rotary(isa: str, dtype: str) -> None:
    """A rotary embedding of right angles is exact."""
    rng = np.random.default_rng(7)
    key = rng.standard_normal((20, 2, 64)).astype(numpy_dtype(dtype))
    query, value = rng.standard_normal((2, 20, 2, 64)).astype(key.dtype)
    turn = np.tile(np.array([0, 1], np.float32).repeat(32), (20, 1))  # cos 0, sin 1
    turned = np.concatenate([-key[..., 32:].astype(np.float32), key[..., :32].astype(np.float32)], axis=-1)
    for rotation in ("none", "hadamard"):
        table = factors(2, 64)
        cache = cpu_attn.PagedKVCache(1, 32, 2, 64, dtype, isa, kv_cache_dtype="int4", kv_cache_rotation=rotation)
        cpu_attn.rotary_reshape_and_cache(
            *(query.copy(), key, value, cache.key_cache, cache.value_cache, np.arange(20), np.arange(20), turn),
            **{"isa": isa, "kv_cache_dtype": "int4", "kv_cache_rotation": rotation, "k_feedback": table},
        )
        want = fed_back(hadamard(turned) if rotation == "hadamard" else turned, "int4", table)
        assert np.array_equal(gathered(cache, 20)[0].astype(np.float64), want)


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_factors_of_0_change_no_byte(isa: str, dtype: str) -> None:
    x = np.random.default_rng(8).standard_normal((40, 2, 64)).astype(numpy_dtype(dtype))
    x[3, 0, 5], x[4, 1, 9] = np.nan, np.inf
    for kind in KINDS:
        for how in ({}, HADAMARD):
            caches = [
                written(x, dtype, isa, np.arange(40), kind, **how, **more)
                for more in ({}, {"k_feedback": np.zeros((2, 64, 64), np.float32)})
            ]
            rows = [gathered(cache, 40)[0] for cache in caches]
            behind = np.isnan(rows[1])  # an error that is NaN spreads to what comes later
            assert np.array_equal(np.where(behind, np.nan, rows[0]), rows[1], equal_nan=True)
            assert behind[3, 0].any() and behind[4, 1].any() and not behind[5:].any() and not behind[3, 1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("head_size", [64, 96])
def test_less_is_lost(kind: str, heads: int, head_size: int) -> None:
    """e H e^T over keys and queries of channels of unlike sizes, in the metric of queries like the keys."""
    rng = np.random.default_rng(9)
    sigma = np.exp(rng.normal(0, 1, (heads, head_size)))
    x = (rng.standard_normal((320, heads, head_size)) * sigma).astype(np.float32)
    table = error_feedback(sigma**2)
    lost = []
    for more in ({}, {"k_feedback": table}):
        keys = gathered(written(x, "float32", "auto", np.arange(320), kind, **HADAMARD, **more), 320)[0]
        error = hadamard(keys.astype(np.float64), back=True) - x
        lost.append((np.square(error) * sigma**2).sum())
    assert lost[1] < (0.75 if kind == "int8" else 0.7) * lost[0]


def test_the_factors_are_those_of_the_maths() -> None:
    """Given the errors of the channels before it, a channel's error that makes e H e^T least is -e_1 H_12 / H_22."""
    rng = np.random.default_rng(10)
    sigma = rng.exponential(1, (2, 24))
    table = error_feedback(sigma).astype(np.float64)
    rotated = hadamard(np.eye(24))
    for h in range(2):
        weights = sigma[h] + 0.01 * sigma[h].mean()
        second = rotated.T * weights @ rotated
        rounding = rng.standard_normal(24)  # what is lost where each channel is rounded
        shift = np.zeros(24)
        for j in range(24):
            shift[j + 1 :] -= rounding[j] * table[h, j, j + 1 :]
        error = rounding - shift  # of the key before anything was fed back
        for d in range(1, 24):
            best = -error[:d] @ second[:d, d:] @ np.linalg.inv(second[d:, d:])
            assert np.isclose(-shift[d], best[0], atol=1e-5)
    assert not np.tril(table).any() and table.shape == (2, 24, 24)
    assert not error_feedback(sigma, "none").any() and not error_feedback(sigma, "none/hadamard").any()
    for alike in (0.0, 1e308):
        assert np.abs(error_feedback(np.full((1, 8), alike))).max() < 1e-12
    spread = error_feedback(np.array([[1e300, 0, 1e-300, 1]]))
    assert np.isfinite(spread).all() and spread.any()


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_odd_numbers_stay_in_their_head(isa: str, dtype: str, poison: float) -> None:
    x = np.random.default_rng(11).standard_normal((20, 3, 64)).astype(numpy_dtype(dtype))
    table = error_feedback(np.ones((3, 64)) + np.arange(64))
    for kind in KINDS:
        want = fed_back(hadamard(x.astype(np.float32)), kind, table)
        bad = table.copy()
        bad[1, 10, 20:50] = poison
        got = gathered(written(x, dtype, isa, np.arange(20), kind, k_feedback=bad, **HADAMARD), 20)[0]
        assert np.array_equal(got[:, ::2].astype(np.float64), want[:, ::2])
        y = x.copy()
        with np.errstate(over="ignore"):
            y[7, 1, 3] = poison
        got = gathered(written(y, dtype, isa, np.arange(20), kind, k_feedback=table, **HADAMARD), 20)[0]
        kept = np.arange(20) != 7
        assert np.array_equal(got[kept].astype(np.float64), want[kept])
        assert np.array_equal(got[7, ::2].astype(np.float64), want[7, ::2])
        if not np.isfinite(y[7, 1, 3]):
            assert np.isnan(got[7, 1]).all()


def test_strides_are_free() -> None:
    x = np.random.default_rng(12).standard_normal((20, 2, 64)).astype(np.float32)
    large = np.full((5, 70, 80), np.nan, np.float32)
    table = large[::3, 3:67, 7:71][:2]
    table[...] = factors(2, 64)
    got = gathered(written(x, "float32", "auto", np.arange(20), "int6", k_feedback=table), 20)[0]
    assert np.array_equal(got.astype(np.float64), fed_back(x, "int6", table))


def test_copies_go_by_the_same_factors() -> None:
    x = np.random.default_rng(13).standard_normal((20, 2, 64)).astype(np.float32)
    table = np.triu(factors(2, 64), 1)
    cache = cpu_attn.PagedKVCache(1, 32, 2, 64, "float32", kv_cache_dtype="int4", k_feedback=table)
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.update(x, x, np.arange(20))
        assert np.array_equal(gathered(other, 20)[0].astype(np.float64), fed_back(x, "int4", table))
    assert cpu_attn.PagedKVCache.open(cache.descriptor, cache.key_cache, cache.value_cache).k_feedback is None


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"k_feedback": np.zeros((2, 64, 63), np.float32)}, ValueError, "k_feedback: axis 2 is 63, expected head_size"),
    ({"k_feedback": np.zeros((1, 64, 64), np.float32)}, ValueError, "k_feedback: axis 0 is 1, expected num_kv_heads"),
    ({"k_feedback": np.zeros((64, 64), np.float32)}, ValueError, "k_feedback: "),
    ({"k_feedback": np.zeros((2, 64, 64))}, TypeError, "k_feedback: dtype float64, expected float32"),
    ({"k_feedback": np.zeros((2, 64, 128), np.float32)[..., ::2]}, ValueError, "k_feedback: "),
    ({"k_feedback": "none"}, TypeError, "k_feedback: "),
    ({"kv_cache_dtype": "fp8_e4m3"}, ValueError, "k_feedback: applies to keys of integers (int8, "),
    ({"kv_cache_dtype": "auto"}, ValueError, "this cache's are "),
    ({"kv_cache_dtype": "float32/int4"}, ValueError, "this cache's are float32"),
    ({"kv_cache_dtype": "int4/int3"}, ValueError, "kv_cache_dtype: 'int4/int3'"),
)


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """Before a byte is written."""
    cache = cpu_attn.PagedKVCache(1, 16, 2, 64, "float32", kv_cache_dtype="int4")
    x = np.ones((3, 2, 64), np.float32)
    how = {"kv_cache_dtype": "int4", "k_feedback": np.zeros((2, 64, 64), np.float32), **change}
    with pytest.raises(error, match=re.escape(words)):
        cpu_attn.reshape_and_cache(x, x, cache.key_cache, cache.value_cache, np.arange(3), **how)
    turn = np.ones((4, 64), np.float32)
    caches = (cache.key_cache, cache.value_cache)
    with pytest.raises(error, match=re.escape(words)):
        cpu_attn.rotary_reshape_and_cache(x, x, x, *caches, np.arange(3), np.arange(3), turn, query_out=x.copy(), **how)
    with pytest.raises(error, match=re.escape(words)):
        cpu_attn.PagedKVCache(1, 16, 2, 64, "float32", **how)
    assert not cache.key_cache.any() and (x == 1).all()


def test_a_cache_refuses_what_is_not_finite() -> None:
    table = np.zeros((2, 64, 64), np.float32)
    table[1, 2, 3] = np.inf
    with pytest.raises(ValueError, match=re.escape("k_feedback[1, 2, 3]: inf")):
        cpu_attn.PagedKVCache(1, 16, 2, 64, "float32", kv_cache_dtype="int4", k_feedback=table)


def test_the_table_shares_no_memory_with_a_cache() -> None:
    x = np.ones((3, 1, 64), np.float32)
    memory = np.zeros(64 * 64 * 4 + 2**14, np.uint8)
    shape = cpu_attn.get_kv_cache_shape(1, 16, 1, 64, "float32", kv_cache_dtype="int4")
    size = int(np.prod(shape))
    key_cache, table = memory[64 * 64 * 4 - 64 :][:size].reshape(shape), memory[: 64 * 64 * 4].view(np.float32)
    arrays = (x, x, key_cache, np.zeros(shape, np.uint8), np.arange(3))
    with pytest.raises(ValueError, match=r"key_cache.*k_feedback"):
        cpu_attn.reshape_and_cache(*arrays, kv_cache_dtype="int4", k_feedback=table.reshape(1, 64, 64))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((np.ones(4),), ValueError, "weights: 1 axes, expected 2: [Hkv, D]"),
        ((-np.ones((1, 4)),), ValueError, "weights[0, 0]: -1.0"),
        ((np.array([[1, np.nan]]),), ValueError, "weights[0, 1]: nan"),
        ((np.ones((1, 4), np.int32),), TypeError, "weights: dtype int32"),
        ((np.ones((1, 4)), "fourier"), ValueError, "kv_cache_rotation: 'fourier'"),
    ],
)
def test_factors_refused(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        error_feedback(*arguments)
