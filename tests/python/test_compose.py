# SPDX-License-Identifier: Apache-2.0
"""The building blocks in cpu_attn.primitives, and the attention that cpu_attn.compose makes of them."""

from __future__ import annotations

import tracemalloc
from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import compose, primitives, reference

from ..cases.case import Case
from ..cases.formats import DTYPES, numpy_dtype
from ..cases.judge import check
from ..cases.levels import added
from ..cases.problem import build
from ..cases.run import run, written
from ..harness.kernels import KERNELS
from ..harness.snippets import ROOT
from ..harness.snippets import run as snippets_of

AVAILABLE = next(e for e in cpu_attn.engines() if e.name == "onednn")
pytestmark = pytest.mark.skipif(not AVAILABLE.available, reason=AVAILABLE.reason)
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


# ---- matmul ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (64, 48, 32), (130, 257, 100)])
def test_matmul(dtype: str, out_dtype: str | None, transpose_b: bool, sizes: tuple[int, int, int]) -> None:
    rng, (m, n, k) = np.random.default_rng(0), sizes
    a, b = _random(rng, (m, k), dtype), _random(rng, (n, k) if transpose_b else (k, n), dtype)
    c, impl = primitives.matmul(a, b, transpose_b=transpose_b, out_dtype=out_dtype)
    x, y = a.astype(np.float64), b.astype(np.float64)
    y = y.T if transpose_b else y
    assert c.dtype == numpy_dtype(out_dtype or dtype) and c.shape == (m, n)
    assert impl and not impl.startswith("ref")
    magnitude = np.abs(x) @ np.abs(y)
    bound = k * UNIT["float32"] * magnitude + 2 * UNIT[out_dtype or dtype] * np.abs(x @ y)
    assert (np.abs(c - x @ y) <= bound).all()


def test_matmul_takes_strided_and_unaligned_arrays() -> None:
    rng = np.random.default_rng(1)
    wide, tall = _random(rng, (21, 40), "float32"), _random(rng, (50, 13), "float32")
    for a, b in (
        (wide[1:, 3:16], tall.T[:, ::2]),
        (wide.T[::-1][:13].T, tall[:13]),
        (wide[::2, :25:2], tall[:13, ::-1]),
    ):
        c, _ = primitives.matmul(a, b)
        assert np.allclose(c, a.astype(np.float64) @ b, atol=1e-5)


def test_matmul_keeps_nan_in_its_row() -> None:
    a, b = np.ones((5, 40), np.float32), np.ones((40, 30), np.float32)
    a[2, 7] = np.nan
    c, _ = primitives.matmul(a, b)
    assert np.isnan(c[2]).all() and (np.delete(c, 2, axis=0) == 40).all()


def test_empty_matmul() -> None:
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        c, impl = primitives.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32))
        assert impl == "empty" and c.shape == (m, n) and not c.any()


F32 = np.ones((4, 5), np.float32)


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ValueError, "b: axis 0 is 4, expected K = 5", lambda: primitives.matmul(F32, F32)),
        (ValueError, "b: axis 1 is 4, expected K = 5", lambda: primitives.matmul(F32, F32.T, transpose_b=True)),
        (TypeError, "b: dtype float16", lambda: primitives.matmul(F32, F32.T.astype(np.float16))),
        (TypeError, "a: dtype", lambda: primitives.matmul(F32.astype(np.float64), F32.T)),
        (TypeError, "a: dtype int32", lambda: primitives.matmul(F32.astype(np.int32), F32.T)),
        (ValueError, "a: 1 axes", lambda: primitives.matmul(F32[0], F32)),
        (ValueError, "out_dtype: float16", lambda: primitives.matmul(F32, F32.T, out_dtype="float16")),
        (TypeError, "out_dtype: 'float64'", lambda: primitives.matmul(F32, F32.T, out_dtype="float64")),
        (TypeError, "a: expected an array", lambda: primitives.matmul([1.0], F32)),
        (TypeError, "transpose_b", lambda: primitives.matmul(F32, F32, transpose_b="yes")),  # type: ignore[arg-type]
        (ValueError, "axis: 2", lambda: primitives.softmax(F32, axis=2)),
        (ValueError, "no axis", lambda: primitives.softmax(np.array(1, np.float32))),
        (TypeError, "x: dtype int64", lambda: primitives.softmax(np.ones(3, np.int64))),
    ],
)
def test_errors_of_the_primitives(error: type[Exception], says: str, call: Any) -> None:
    with pytest.raises(error, match=says):
        call()


# ---- softmax ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((7,), 0), ((5, 33), -1), ((5, 33), 0), ((3, 4, 100), 1), ((2, 3, 1), 2)])
def test_softmax(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = _random(np.random.default_rng(2), shape, dtype) * 4
    x.reshape(-1)[::3] = -np.inf
    got, impl = primitives.softmax(x, axis)
    x64 = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        p = np.exp(x64 - x64.max(axis=axis, keepdims=True))
        want = np.nan_to_num(p / p.sum(axis=axis, keepdims=True))
    assert got.dtype == x.dtype and impl and not impl.startswith("ref")
    assert (np.abs(got - want) <= (8 * UNIT["float32"] + 2 * UNIT[dtype]) * want + 1e-7).all()
    assert (got[x == -np.inf] == 0).all()


def test_softmax_of_nothing_and_of_nonsense() -> None:
    x = np.zeros((5, 20), np.float32)
    x[1], x[2, 3], x[3, 4], x[4, :19] = -np.inf, np.nan, np.inf, -np.inf
    p, _ = primitives.softmax(x)
    assert np.allclose(p[0], 1 / 20) and not p[1].any() and np.isnan(p[2:4]).all() and p[4, 19] == 1
    assert primitives.softmax(np.zeros((0, 3), np.float32))[0].shape == (0, 3)


# ---- gather_pages ----


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("value", [False, True])
def test_gather_pages(isa: str, dtype: str, value: bool) -> None:
    rng, (head_size, head_size_v), block_size, seq_len = np.random.default_rng(3), (24, 7), 5, 23
    size = head_size_v if value else head_size
    caches = [
        np.zeros(cpu_attn.get_kv_cache_shape(8, block_size, 2, s, dtype, isa), numpy_dtype(dtype))
        for s in (head_size, head_size_v)
    ]
    tokens = [_random(rng, (seq_len, 2, s), dtype) for s in (head_size, head_size_v)]
    row, j = np.array([6, 1, 7, 0, 3, -1], np.int32), np.arange(seq_len)
    cpu_attn.reshape_and_cache(
        *tokens, *caches, (row[j // block_size] * block_size + j % block_size).astype(np.int64), isa
    )
    out = np.empty((seq_len, 2, size), numpy_dtype(dtype))
    got = primitives.gather_pages(caches[value], row, seq_len, head_size=size, isa=isa, value=value, out=out)
    assert got is out and np.array_equal(got, tokens[value])
    with pytest.raises(ValueError, match="block_table_row: position 5 holds"):
        primitives.gather_pages(caches[value], row, seq_len + 3, head_size=size, isa=isa, value=value)
    with pytest.raises(ValueError, match="block_table_row: needs 7 blocks, has 6"):
        primitives.gather_pages(caches[value], row, seq_len + 8, head_size=size, isa=isa, value=value)


# ---- attention ----


@pytest.mark.parametrize("level", ["quick", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_cases(isa: str, dtype: str, level: str) -> None:
    failed = []
    for case in added(level, dtype):
        if not case.composable:
            continue
        problem = build(case)
        result = check(problem, *run(problem, isa, "onednn-python"))
        if not result.ok:
            failed.append(f"{case.name}: {result.message}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [True, False])
def test_chunks_of_keys(dtype: str, first: bool) -> None:
    """Windows that begin within a page, pages of more keys than a chunk has, and rows that see some of the chunks."""
    for block_size, window in product((7, 16, 700), (-1, (600, -1), (20, 4))):
        lens = {"query_lens": (300, 1), "seq_lens": (1300, 1025)} if first else {"query_lens": (9,), "seq_lens": (5,)}
        case = Case("compose-chunks", **lens, block_size=block_size, sliding_window=window, causal=False, dtype=dtype)
        problem = build(case)
        result = check(problem, *run(problem, engine="onednn-python"))
        assert result.ok, (block_size, window, result.message)


def test_float32_outputs_of_bfloat16() -> None:
    problem = build(Case("compose-float32", (20,), (60,), dtype="bfloat16"))
    memory, output = written(problem), np.empty((20, 4, 32), np.float32)
    arguments = (memory.query, memory.key_cache, memory.value_cache, output, problem.query_start_loc, problem.seq_lens)
    compose.attention(*arguments, problem.scale, True, None, -1, problem.block_table, 0.0)
    want, _ = problem.expected
    assert reference.relative_rms(output, want, problem.query_start_loc).max() <= reference.BUDGET["float32"]


def test_what_it_does_not_have_is_no_argument() -> None:
    wide = set(signature(cpu_attn.attention_with_kv_cache).parameters)
    wide |= set(signature(cpu_attn.get_scheduler_metadata).parameters)
    taken = set(signature(compose.attention).parameters)
    assert taken < wide and {"attn_bias", "tree_mask", "selected_blocks", "kv_cache_rotation"} <= wide - taken
    for name in wide - taken:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            compose.attention(**_arguments(), **{name: None})


def _arguments() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    shape = cpu_attn.get_kv_cache_shape(8, 16, 2, 32, "float32")
    return {
        "query": _random(rng, (6, 4, 32), "float32"),
        "key_cache": np.zeros(shape, np.float32),
        "value_cache": np.zeros(shape, np.float32),
        "output": np.full((6, 4, 32), 7, np.float32),
        "query_start_loc": np.array([0, 2, 6], np.int32),
        "seq_lens": np.array([20, 40], np.int32),
        "scale": 0.2,
        "causal": True,
        "alibi_slopes": None,
        "sliding_window": -1,
        "block_table": np.array([[1, 2, -1], [3, 4, 5]], np.int32),
        "softcap": 0.0,
        "lse": np.full((4, 6), 7, np.float32),
    }


def test_arguments_are_good() -> None:
    """Else the test below could not tell what it complains about."""
    arguments = _arguments()
    assert compose.attention(**arguments) is arguments["output"]
    assert not arguments["output"].any() and np.allclose(arguments["lse"][:, 5], np.log(40))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"block_table": np.array([[1, 2, 0], [3, 4, 8]], np.int32)},
            ValueError,
            "request 1: position 2 holds block 8",
        ),
        (
            {"block_table": np.array([[1, -1, 0], [3, 4, 5]], np.int32)},
            ValueError,
            "request 0: position 1 holds block -1",
        ),
        ({"block_table": np.array([[1, 2], [3, 4]], np.int32)}, ValueError, "request 1: needs 3 blocks"),
        ({"block_table": np.array([[1, 2, 0]], np.int32)}, ValueError, "seq_lens"),
        ({"query_start_loc": np.array([0, 2, 7], np.int32)}, ValueError, "query: axis 0 is 6, expected T = 7"),
        ({"query_start_loc": np.array([0, 3, 2], np.int32)}, ValueError, "query_start_loc"),
        ({"seq_lens": np.array([20, -1], np.int32)}, ValueError, "seq_lens"),
        ({"seq_lens": np.array([20, 40])}, TypeError, "seq_lens: dtype int64"),
        ({"key_cache": np.zeros((8, 3, 16, 32), np.float32)}, ValueError, "value_cache: axis 1"),
        ({"key_cache": np.zeros((8, 2, 16, 30), np.float32)}, ValueError, "key_cache: axis 3"),
        ({"value_cache": np.zeros((8, 2, 16, 32), np.float16)}, TypeError, "value_cache: dtype"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"scale": 10**400}, ValueError, "scale: inf"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": 1e-39}, ValueError, "softcap: 1e-39"),
        ({"sliding_window": 0}, ValueError, "sliding_window"),
        ({"alibi_slopes": np.ones(3, np.float32)}, ValueError, "alibi_slopes"),
        ({"s_aux": np.ones(5, np.float32)}, ValueError, "s_aux"),
        ({"dynamic_causal": np.ones(3, np.int32)}, ValueError, "dynamic_causal"),
        ({"lse": np.ones((6, 4), np.float32)}, ValueError, "lse: axis 0"),
        ({"isa": "none"}, ValueError, "isa"),
    ],
)
def test_errors_come_before_anything_is_written(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments = {**_arguments(), **change}
    with pytest.raises(error, match=says):
        compose.attention(**arguments)
    assert (arguments["output"] == 7).all()


def test_output_must_be_memory_of_its_own() -> None:
    arguments = _arguments()
    arguments["output"] = arguments["query"]
    with pytest.raises(ValueError, match="output: shares memory with query"):
        compose.attention(**arguments)


def test_no_array_grows_with_rows_times_context() -> None:
    """4 heads x 256 tokens x 16,384 keys: the scores alone would be 64 MB."""
    peaks = []
    for seq_len in (2_048, 16_384):
        cache = cpu_attn.PagedKVCache(seq_len // 64, 64, 1, 8)
        table, lens = np.arange(seq_len // 64, dtype=np.int32)[None], np.array([seq_len], np.int32)
        query = np.zeros((256, 4, 8), np.float32)
        steps = (np.empty_like(query), np.array([0, 256], np.int32), lens, 1.0, True, None, -1, table, 0.0)
        tracemalloc.start()
        try:
            compose.attention(query, cache.key_cache, cache.value_cache, *steps)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[0] > 5e5
    assert peaks[1] - peaks[0] < 1e6


def test_its_page() -> None:
    (names,) = snippets_of(ROOT / "docs" / "compose.md")
    query, key, value = (names[name] for name in ("query", "key", "value"))
    want, _ = reference.attention(query, [key], [value], names["query_start_loc"], names["seq_lens"], names["scale"])
    for got in (names["output"], names["by_hand"][:, None]):
        assert (reference.relative_rms(got, want, names["query_start_loc"]) <= reference.BUDGET["float32"]).all()
