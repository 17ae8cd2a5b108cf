# SPDX-License-Identifier: Apache-2.0
"""AMX's pipeline (native/kernel/amx/pipeline.h), whose softmax is of integers: every shape that it takes, and numbers
at the edges of what its words of 16 bits hold, where strips of query rows leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference

from ..cases.case import Case
from ..cases.fills import FILLS
from ..cases.formats import numpy_dtype
from ..cases.judge import check, same_bits
from ..cases.problem import alone, build
from ..cases.run import run

ISAS = [isa.name for isa in cpu_attn.isas() if isa.supported and isa.unit == "matrix"]
pytestmark = [pytest.mark.isa, pytest.mark.skipif(not ISAS, reason="no isa here has tiles")]

Floats = NDArray[np.float32]


# ---- shapes ----

# Strips have 32 rows, tasks 512; blocks have 1024 keys, 512 at a head size of 256. Fewer than 17 rows go by scores.
QUERIES = {"17 rows": (17, 1), "32": (8, 4), "33": (33, 1), "63": (21, 3), "two strips": (16, 4), "two tasks": (131, 4)}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window of 1": {"sliding_window": 1},
    "window of 40": {"sliding_window": 40},
    "window of 700": {"sliding_window": (699, 0)},
    "both sides": {"causal": False, "sliding_window": (50, 30)},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 30.0, "sliding_window": 100},
    "sinks": {"sinks": "moderate"},
    "huge sinks": {"sinks": "huge"},
}


def case_of(name: str, q_len: int, group: int, seq_len: int, **options: Any) -> Case:
    options = {"num_heads": 2 * group, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", **options}
    return Case(name, (q_len,), (seq_len,), **options)


def holds(case: Case) -> None:
    problem = build(case)
    for isa in ISAS:
        result = check(problem, *run(problem, isa))
        assert result.ok, result.message


def has_its_bits_alone(case: Case) -> None:
    """Each request of a case has the bits that it has by itself, on one thread and on three."""
    problem = build(case)
    for isa in ISAS:
        got, got_lse = run(problem, isa)
        assert check(problem, got, got_lse).ok
        for r in range(len(case.query_lens)):
            rows = slice(problem.query_start_loc[r], problem.query_start_loc[r + 1])
            for threads in (1, 3):
                want, want_lse = run(alone(problem, r), isa, num_threads=threads)
                assert same_bits(got[rows], want) and same_bits(got_lse[:, rows], want_lse)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", QUERIES)
def test_masks_and_rows(rows: str, mask: str) -> None:
    q_len, group = QUERIES[rows]
    holds(case_of(f"pipeline-{rows}-{mask}", q_len, group, q_len + 217, **MASKS[mask]))


@pytest.mark.parametrize("seq_len", [33, 64, 65, 1024, 1039, 2100])
@pytest.mark.parametrize(
    "sizes", [(64, 64), (96, 96), (128, 64), (64, 128), (192, 128), (256, 256), (160, 160), (224, 32), (320, 288)]
)
def test_head_sizes_and_blocks(sizes: tuple[int, int], seq_len: int) -> None:
    holds(case_of(f"pipeline-{sizes}-{seq_len}", 33, 2, seq_len, head_size=sizes[0], head_size_v=sizes[1]))


# What is no multiple of 32 dimensions has a last product of its own, and columns of V of their own: 16, fewer, or both.
@pytest.mark.parametrize("seq_len", [40, 1100])
@pytest.mark.parametrize(
    "sizes",
    [(32, 32), (33, 33), (40, 72), (72, 40), (80, 80), (100, 63), (112, 112), (130, 47), (144, 144), (576, 512)],
)
def test_odd_head_sizes(sizes: tuple[int, int], seq_len: int) -> None:
    options: dict[str, Any] = {"head_size": sizes[0], "head_size_v": sizes[1]}
    holds(case_of(f"pipeline-{sizes}-{seq_len}", 33, 2, seq_len, **options))
    holds(case_of(f"pipeline-{sizes}-{seq_len}-softcap", 70, 2, seq_len + 70, softcap=5.0, **options))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("size", [64, 72, 256])
def test_fills(size: int, fill: str) -> None:
    holds(case_of(f"pipeline-fill-{fill}-{size}", 70, 2, 1100, head_size=size, fill=fill))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_layout": "HND"},
        {"kv_cache_layout": "NHD", "block_size": 8},
        {"block_size": 24},
        {"strided": True},
        {"selected": 0.3, "causal": True},
        {"selected": 0.3, "query_block": 16},
        {"mm_prefix_range": (((5, 60),),)},
        {"document_start_loc": ((0, 77, 150),)},
    ],
    ids=lambda o: next(iter(o)),
)
def test_caches_and_lists(options: dict[str, Any]) -> None:
    holds(case_of(f"pipeline-{sorted(options)}", 100, 2, 300, **options))


# Tokens of int8 and int4_per_token_head have one scale, those of int4 several; the fills from "leaping" on make strips
# leave the pipeline, or have scales that are no numbers in slots that nothing sees.
@pytest.mark.parametrize(
    "fill", ["normal", "equal", "large", "leaping", "rising", "dominant", "tiny", "masked", "nan-value"]
)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int5", "int4", "int4_per_token_head", "int8/int4", "int4/int8"])
def test_integers(kv_cache_dtype: str, fill: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "fill": fill}
    holds(case_of(f"pipeline-{kv_cache_dtype}-{fill}", 33, 2, 1039, **options))


@pytest.mark.parametrize("sizes", [(32, 32), (64, 40), (72, 72), (128, 128), (160, 144), (256, 256)])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "auto/int8", "int8/auto"])
def test_integers_of_head_sizes(kv_cache_dtype: str, sizes: tuple[int, int]) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "head_size": sizes[0], "head_size_v": sizes[1]}
    holds(case_of(f"pipeline-{kv_cache_dtype}-{sizes}", 70, 2, 300, **options))
    holds(case_of(f"pipeline-{kv_cache_dtype}-{sizes}-softcap", 33, 2, 90, softcap=5.0, sliding_window=40, **options))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int5", "int4", "auto/int8"])
def test_the_same_queries_have_the_same_bits_wherever_in_a_strip(kv_cache_dtype: str) -> None:
    """Where every row sees all keys. That a row's sums lack a few bits is far below its budget."""
    rng, tokens = np.random.default_rng(0), 300
    key, value = rng.standard_normal((2, tokens, 1, 64), np.float32).astype(numpy_dtype("bfloat16"))
    query = np.repeat(rng.standard_normal((1, 1, 64), np.float32).astype(key.dtype), tokens, 0)
    for isa in ISAS:
        cache = cpu_attn.PagedKVCache(20, 16, 1, 64, "bfloat16", isa, kv_cache_dtype=kv_cache_dtype)
        plan = cache.plan(np.array([0, tokens], np.int32), np.array([tokens], np.int32), 1, causal=False)
        lse, table = np.empty((1, tokens), np.float32), np.arange(20, dtype=np.int32)[None]
        output = cache.update_and_attend(key, value, query, np.arange(tokens), table, plan, lse=lse)
        assert (output == output[0]).all() and (lse == lse[0, 0]).all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_a_request_has_its_bits_whatever_is_beside_it(kv_cache_dtype: str) -> None:
    case = Case(
        f"pipeline-batch-{kv_cache_dtype}",
        (40, 17, 1, 100),
        (1100, 40, 300, 100),
        4,
        2,
        64,
        dtype="bfloat16",
        sliding_window=150,
        kv_cache_dtype=kv_cache_dtype,
    )
    has_its_bits_alone(case)


# ---- numbers ----


def attend(q: Any, k: Any, v: Any, dtype: str = "bfloat16", **options: Any) -> tuple[float, float]:
    """The error of a request's output as relative RMS, and the largest one of lse as a share of lse where that is more
    than 1, for each isa the worst."""
    q, k, v = (x.astype(numpy_dtype(dtype)) for x in (q, k, v))
    table, lens = np.arange(-(-len(k) // 16), dtype=np.int32), np.array([len(k)], np.int32)
    starts, worst = np.array([0, len(q)], np.int32), (0.0, 0.0)
    scale = options.pop("scale", q.shape[2] ** -0.5)
    window = options.get("sliding_window", -1)
    softcap = options.pop("softcap", 0.0)
    for isa in ISAS:
        lse = np.full((q.shape[1], len(q)), np.nan, np.float32)
        cache = cpu_attn.PagedKVCache(len(table), 16, k.shape[1], k.shape[2], dtype, isa, head_size_v=v.shape[2])
        cache.update(k, v, np.arange(len(k)))
        plan = cache.plan(starts, lens, q.shape[1], engine="native", sliding_window=window)
        got = cache.attend(q, table[None], plan, scale=scale, softcap=softcap, lse=lse).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            want, want_lse = reference.attention(
                q, [k], [v], starts, lens, scale, softcap=softcap, sliding_window=window
            )
            assert (np.isnan(got) == np.isnan(want)).all()
            assert (np.isnan(lse) == np.isnan(want_lse)).all()
            finite = np.isfinite(want).all(axis=(1, 2))
            error = reference.relative_rms(
                np.where(finite[:, None, None], got, 0), np.where(finite[:, None, None], want, 0), starts
            )[0]
            apart = np.where(np.isfinite(want_lse), lse - want_lse, 0)
            lse_error = np.abs(apart).max() / max(1, np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0))
        worst = (max(worst[0], error), max(worst[1], float(lse_error)))
    return worst


def numbers(rng: np.random.Generator, rows: int = 48, keys: int = 1300, size: int = 64) -> list[Floats]:
    shapes = ((rows, 2, size), (keys, 1, size), (keys, 1, size))
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def grow_by(octaves: float) -> Callable[[np.random.Generator], list[Floats]]:
    """One key late in the context has a logit of so many octaves more than the first ones can have."""

    def make(rng: np.random.Generator) -> list[Floats]:
        q, k, v = numbers(rng)
        q[..., 0] = 8
        k[..., 0] = 0
        k[700, 0, 0] = octaves * np.log(2)
        return [q, k, v]

    return make


def mirrored(rng: np.random.Generator) -> list[Floats]:
    """Scores of 10^10 and more, of both signs, which cancel in any sum over rows."""
    q, k, v = numbers(rng)
    q[1::2] = -q[::2]
    k[600:] *= 1e12
    return [q, k, v]


def set_of(which: int, at: tuple[Any, ...], value: float) -> Callable[[np.random.Generator], list[Floats]]:
    def make(rng: np.random.Generator) -> list[Floats]:
        qkv = numbers(rng)
        qkv[which][at] = value
        return qkv

    return make


def times(which: int, factor: float) -> Callable[[np.random.Generator], list[Floats]]:
    def make(rng: np.random.Generator) -> list[Floats]:
        qkv = numbers(rng)
        qkv[which] *= np.float32(factor)
        return qkv

    return make


# Numbers of any dtype.
COMMON_NUMBERS: dict[str, Callable[[np.random.Generator], list[Floats]]] = {
    "normal": numbers,
    "zero": times(0, 0),
    "peaked": times(1, 6),
    "mirrored": mirrored,
    "no values": times(2, 0),
    "a row of infinity": set_of(0, (5,), np.inf),
    "a row of NaN": set_of(0, (5,), np.nan),
    "a NaN in a query": set_of(0, (47, 1, 63), np.nan),
    "an infinite key": set_of(1, (1250,), np.inf),
    "a key of -inf": set_of(1, (3,), -np.inf),
    "a NaN in a key": set_of(1, (20, 0, 7), np.nan),
    "an infinite value": set_of(2, (1290, 0, 3), np.inf),
    "a NaN in a value": set_of(2, (1299, 0, 3), np.nan),
}
NUMBERS = {
    **COMMON_NUMBERS,
    **{f"a key {octaves} octaves above": grow_by(octaves) for octaves in (0.4, 0.6, 9, 29, 30, 31, 32, 40, 300, 1e7)},
    "huge": times(1, 1e20),
    "tiny": times(1, 1e-20),
    "tiny values": times(2, 2.0**-110),
}


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, softcap: float) -> None:
    q, k, v = NUMBERS[name](np.random.default_rng(5))
    error, lse_error = attend(q, k, v, softcap=softcap)
    assert error <= reference.BUDGET["bfloat16"]
    assert lse_error <= reference.BUDGET["bfloat16"]


@pytest.mark.parametrize("first", [0, 10, 32, 64, 100])
@pytest.mark.parametrize("octaves", [0.6, 9, 300])
def test_references_grow_between_blocks(octaves: float, first: int) -> None:
    """256 dimensions have blocks of 512 keys, so O and l of the first one follow the second one's references."""
    q, k, v = numbers(np.random.default_rng(7), size=256)
    q[..., 0] = 16
    k[..., 0] = 0
    k[520 + first, 0, 0] = octaves * np.log(2)
    error, lse_error = attend(q, k, v)
    assert error <= reference.BUDGET["bfloat16"]
    assert lse_error <= reference.BUDGET["bfloat16"]


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-30, 1e30])
def test_scales(scale: float) -> None:
    error, _ = attend(*numbers(np.random.default_rng(9)), scale=scale)
    assert error <= reference.BUDGET["bfloat16"]


def test_what_nobody_sees_does_not_send_strips_away() -> None:
    """NaN in keys outside a window leaves the other rows' bits as they are."""
    q, k, v = numbers(np.random.default_rng(11), rows=64)
    got = attend(q, k, v, sliding_window=33)
    k[: 1300 - 64 - 33] = np.nan
    v[: 1300 - 64 - 33] = np.nan
    assert attend(q, k, v, sliding_window=33) == got
