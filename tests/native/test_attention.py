# SPDX-License-Identifier: Apache-2.0
"""Every engine, isa and dtype that runs here, over the shared cases, against the float64 oracle; and each once more
with every buffer between a known pattern and a forbidden page."""

from __future__ import annotations

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference

from ..cases.formats import DTYPES, numpy_dtype
from ..cases.judge import check
from ..cases.levels import added
from ..cases.problem import build
from ..cases.run import run
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS

ENGINES = [e.name for e in cpu_attn.engines() if e.available]
COMBINATIONS = [("native", isa, dtype) for isa, dtype in KERNELS]
COMBINATIONS += [(engine, "auto", dtype) for engine in ENGINES if engine != "native" for dtype in DTYPES]
# `make verify` runs the default level, too, but under no sanitizer.
LEVELS = [(*combination, "quick") for combination in COMBINATIONS]
LEVELS += [pytest.param("native", *kernel, "default", marks=pytest.mark.slow) for kernel in KERNELS]


@pytest.mark.parametrize(("engine", "isa", "dtype", "level"), LEVELS)
def test_cases(engine: str, isa: str, dtype: str, level: str) -> None:
    failed = []
    for case in added(level, dtype):
        problem = build(case)
        result = check(problem, *run(problem, isa, engine))
        if not result.ok:
            failed.append(f"{case.name}: {result.message}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("engine", "isa", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (16, 16), (31, 17), (66, 100)])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("layout", ["packed", "HND"])
def test_guarded_memory(
    engine: str, isa: str, dtype: str, sizes: tuple[int, int], block_size: int, layout: str
) -> None:
    kind, rng, seq_len, heads = numpy_dtype(dtype), np.random.default_rng(7), 19, 2
    head_size, head_size_v = sizes
    num_blocks = -(-seq_len // block_size)
    shapes = [(num_blocks, heads, block_size, s) for s in sizes]
    if layout == "packed":
        shapes = [cpu_attn.get_kv_cache_shape(num_blocks, block_size, heads, s, dtype, isa) for s in sizes]
    key, value, query = (
        Guarded(rng.standard_normal((seq_len, h, s), np.float32).astype(kind))
        for h, s in ((heads, head_size), (heads, head_size_v), (2 * heads, head_size))
    )
    key_cache, value_cache = (Guarded(np.full(shape, np.nan, kind)) for shape in shapes)
    output = Guarded(np.zeros((seq_len, 2 * heads, head_size_v), kind))
    lse = Guarded(np.zeros((2 * heads, seq_len), np.float32))
    table = Guarded(np.arange(num_blocks, dtype=np.int32)[None, ::-1])
    start, lens = Guarded(np.array([0, seq_len], np.int32)), Guarded(np.array([seq_len], np.int32))
    j = np.arange(seq_len)
    slots = Guarded((table.array[0, j // block_size] * block_size + j % block_size).astype(np.int64))
    slopes = Guarded(np.full(2 * heads, 0.1, np.float32))
    cpu_attn.reshape_and_cache(
        key.array, value.array, key_cache.array, value_cache.array, slots.array, isa, kv_cache_layout=layout
    )
    plan = cpu_attn.get_scheduler_metadata(
        1, 2 * heads, heads, head_size, lens.array, dtype, start.array,
        isa=isa, engine=engine, head_size_v=head_size_v, kv_cache_layout=layout,
    )  # fmt: skip
    cpu_attn.attention_with_kv_cache(
        query.array, key_cache.array, value_cache.array, output.array, start.array, lens.array, 0.3, True,
        slopes.array, -1, table.array, 2.0, plan, lse=lse.array, kv_cache_layout=layout,
    )  # fmt: skip
    everything = (key, value, query, key_cache, value_cache, output, lse, table, start, lens, slots, slopes)
    assert all(x.intact() for x in everything)
    want, want_lse = reference.attention(
        query.array, [key.array], [value.array], start.array, lens.array, 0.3, True, slopes.array, -1, 2.0, None, None
    )
    assert (reference.relative_rms(output.array, want, start.array) <= reference.BUDGET[dtype]).all()
    assert np.allclose(lse.array, want_lse, atol=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize(("engine", "isa", "dtype"), [c for c in COMBINATIONS if c[2] != "float32"])
def test_outputs_are_rounded_to_nearest_even(engine: str, isa: str, dtype: str) -> None:
    """Two keys of equal weight: every output lies just between a number and its neighbour. Subnormals included, but for
    bfloat16, whose subnormals count as 0; and it ends below half of the largest, so that sums fit."""
    first, finite = {"float16": (0, 0x7C00), "bfloat16": (0x100, 0x7F00)}[dtype]
    bits = np.arange(first, finite - 1, dtype=np.uint16)
    value = np.stack([bits, bits + 1]).view(numpy_dtype(dtype))[:, None]
    start, lens, table = np.array([0, 1], np.int32), np.array([2], np.int32), np.zeros((1, 1), np.int32)
    cache = cpu_attn.PagedKVCache(1, 16, 1, 2, dtype, isa, head_size_v=len(bits))
    cache.update(np.zeros((2, 1, 2), value.dtype), value, np.arange(2))
    plan = cache.plan(start, lens, 1, engine=engine)
    output = cache.attend(np.zeros((1, 1, 2), value.dtype), table, plan)[0, 0]
    middle = value[:, 0].astype(np.float64).mean(axis=0)
    assert output.tobytes() == middle.astype(value.dtype).tobytes()


@pytest.mark.parametrize(("engine", "isa", "dtype"), [c for c in COMBINATIONS if c[2] == "bfloat16"])
@pytest.mark.parametrize("head_size_v", [1, 4, 16, 31])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8"])
def test_few_columns(engine: str, isa: str, dtype: str, head_size_v: int, kv_cache_dtype: str) -> None:
    """400 requests of one token, one head and 100 keys: weights of 8 bits took 103 of them past the budget with one
    column, 31 with 4, 1 with 16, none with 31 (VDPBF16PS)."""
    n, keys, kind = 400, 100, numpy_dtype(dtype)
    rng, table = np.random.default_rng(10), np.arange(n, dtype=np.int32)[:, None]
    sizes = {"head_size": 64, "head_size_v": head_size_v, "kv_cache_dtype": kv_cache_dtype}
    cache = cpu_attn.PagedKVCache(n, 112, 1, dtype=dtype, isa=isa, **sizes)
    slots = (table * 112 + np.arange(keys)).reshape(-1)
    cache.update(*(rng.standard_normal((n * keys, 1, s), np.float32).astype(kind) for s in (64, head_size_v)), slots)
    query = rng.standard_normal((n, 1, 64), np.float32).astype(kind)
    starts, lens = np.arange(n + 1, dtype=np.int32), np.full(n, keys, np.int32)
    output = cache.attend(query, table, cache.plan(starts, lens, 1, engine=engine))
    key, value = zip(*(cache.gather(row, keys) for row in table), strict=True)
    want, _ = reference.attention(query, key, value, starts, lens, 0.125, True, None, -1, 0.0, None, None)
    assert (reference.relative_rms(output, want, starts) <= reference.BUDGET[dtype]).all()


@pytest.mark.parametrize(("engine", "isa", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("seq_len", [1, 16, 32, 48])
def test_a_scale_of_0_gives_the_mean(engine: str, isa: str, dtype: str, seq_len: int) -> None:
    """Also where all rows see all keys, and where groups of 16 keys are an odd number."""
    rng, start, lens = np.random.default_rng(8), np.array([0, 1], np.int32), np.array([seq_len], np.int32)
    value = rng.standard_normal((seq_len, 1, 8), np.float32).astype(numpy_dtype(dtype))
    cache = cpu_attn.PagedKVCache(3, 16, 1, 8, dtype, isa)
    cache.update(value, value, np.arange(seq_len))
    output, table = np.empty_like(value[:1]), np.arange(3, dtype=np.int32)[None]
    plan = cache.plan(start, lens, 1, engine=engine)
    cpu_attn.attention_with_kv_cache(
        value[:1], cache.key_cache, cache.value_cache, output, start, lens, 0.0, True, None, -1, table, 0.0, plan
    )
    want = value[:, 0].astype(np.float64).mean(axis=0)
    assert np.allclose(output[0, 0].astype(np.float64), want, rtol=0, atol=3 * reference.BUDGET[dtype])


@pytest.mark.parametrize(("engine", "isa", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("seq_len", [16, 600])
def test_biases_near_the_end_of_float32(engine: str, isa: str, dtype: str, seq_len: int) -> None:
    """-2e38 for a whole row leaves it what it was; float32's lowest, less than it in units of log2, is -inf."""
    rng, start, lens = np.random.default_rng(9), np.array([0, 2], np.int32), np.array([seq_len], np.int32)
    value = rng.standard_normal((seq_len, 1, 8), np.float32).astype(numpy_dtype(dtype))
    cache = cpu_attn.PagedKVCache(40, 16, 1, 8, dtype, isa)
    cache.update(np.zeros_like(value), value, np.arange(seq_len))
    plan = cache.plan(start, lens, 1, engine=engine, causal=False)
    bias = np.full((1, 1, 2, seq_len), [[-2e38], [np.finfo(np.float32).min]], np.float32)
    lse, table = np.empty((1, 2), np.float32), np.arange(40, dtype=np.int32)[None]
    output = cache.attend(np.zeros_like(value[:2]), table, plan, lse=lse, attn_bias=bias).astype(np.float64)
    want = value[:, 0].astype(np.float64).mean(axis=0)
    assert np.allclose(output[0, 0], want, rtol=0, atol=3 * reference.BUDGET[dtype])
    assert np.isclose(lse[0, 0], -2e38, rtol=1e-6)
    assert not output[1].any()
    assert lse[0, 1] == -np.inf
