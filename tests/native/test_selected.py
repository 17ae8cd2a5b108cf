# SPDX-License-Identifier: Apache-2.0
"""Selected blocks: what the shared cases do not say (which bits, what is read, what the bench runs), and the page
scores that select them."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference, sparse
from cpu_attn._threads import threads
from cpu_attn.cli.workloads import Step, Workload
from cpu_attn.tests.cases.formats import DTYPES
from cpu_attn.tests.cases.judge import check, same_bits
from cpu_attn.tests.cases.levels import cases
from cpu_attn.tests.cases.memory import slots_of
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.run import run
from cpu_attn.tests.harness.kernels import KERNELS, ONE_DTYPE

from ..harness.steps import attention_args

F32, BF16 = np.float32, ml_dtypes.bfloat16


# ---- attention over them ----


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mixed-everything", "long-3000", "block-5", "fp8_e4m3-everything"])
def test_all_blocks_give_the_bits_of_no_selection(name: str, dtype: str, engine: str) -> None:
    if not any(e.name == engine and e.available for e in cpu_attn.engines()):
        pytest.skip(f"no {engine} here")
    case = next(c for c in cases("quick", dtype) if c.name == name)
    problem = build(case)
    every = np.full((len(case.seq_lens), case.num_kv_heads, max(-(-s // case.block_size) for s in case.seq_lens)), -1)
    for r, seq_len in enumerate(case.seq_lens):
        blocks = -(-seq_len // case.block_size)
        every[r, :, :blocks] = np.arange(blocks)
    selected = dataclasses.replace(problem, selected_blocks=every.astype(np.int32))
    assert all(map(same_bits, run(selected, engine=engine), run(problem, engine=engine)))


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_a_zero_keeps_its_sign_where_segments_have_no_blocks(isa: str) -> None:
    """Such segments are left out, or parts of their own where threads share them. -0: what of FMA underflows to it."""
    cache = cpu_attn.PagedKVCache(188, 16, 1, 16, "float32", isa)
    key, value = np.zeros((3000, 1, 16), F32), np.full((3000, 1, 16), -1e-45, F32)
    key[1130], value[1130] = 10, -0.0
    cache.update(key, value, np.arange(3000))
    query, table, lens = np.ones((1, 1, 16), F32), np.arange(188, dtype=np.int32)[None], np.array([3000], np.int32)
    found = []
    for split in (False, True):
        with threads(2, forced=True):
            plan = cache.plan(np.array([0, 1], np.int32), lens, 1, enable_kv_split=split)
        assert plan.num_splits == split
        output = cache.attend(query, table, plan, selected_blocks=np.array([[[70, 80, 90]]], np.int32))
        assert not output.any()
        found.append(output.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
@pytest.mark.parametrize("blocks", [[0], [0, 130], [3, 70], [70], [70, 130], [130], [0, 70, 130]])
def test_segments_without_blocks_change_nothing(isa: str, blocks: list[int]) -> None:
    """Of three segments of 64 blocks each."""
    rng, lens, start = np.random.default_rng(6), np.array([2200], np.int32), np.array([0, 2], np.int32)
    cache = cpu_attn.PagedKVCache(138, 16, 1, 16, "float32", isa)
    key, value = rng.standard_normal((2, 2200, 1, 16), F32)
    cache.update(key, value, np.arange(2200))
    query, selected = rng.standard_normal((2, 2, 16), F32), np.array([[blocks]], np.int32)
    plan = cache.plan(start, lens, 2, enable_kv_split=False)
    output = cache.attend(query, np.arange(138, dtype=np.int32)[None], plan, scale=0.25, selected_blocks=selected)
    want, _ = reference.attention(query, [key], [value], start, lens, 0.25, selected_blocks=selected)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET["float32"]).all()


def test_no_columns_are_no_keys() -> None:
    args = attention_args()
    args["block_table"][:] = -9
    cpu_attn.attention_with_kv_cache(**args, selected_blocks=np.zeros((2, 2, 0), np.int32))
    assert (args["output"] == 0).all()
    assert (args["lse"] == -np.inf).all()


def test_entries_that_no_head_selects_are_not_read() -> None:
    args = attention_args()
    selected = np.array([[[1, -1], [1, -1]], [[-1, -1], [0, -1]]], np.int32)
    want = args["output"].copy()
    cpu_attn.attention_with_kv_cache(**args | {"output": want}, selected_blocks=selected)
    args["block_table"][0, 0] = 2**31 - 1
    cpu_attn.attention_with_kv_cache(**args, selected_blocks=selected)
    assert np.array_equal(args["output"], want)


def test_blocks_selected_outside_the_window_are_not_needed() -> None:
    args = attention_args(sliding_window=2)
    args["block_table"] = np.array([[-9, 3], [2, 99]], np.int32)
    every = np.array([[[0, 1], [0, 1]], [[0, -1], [0, -1]]], np.int32)
    cpu_attn.attention_with_kv_cache(**args, selected_blocks=every)
    want = np.empty_like(args["output"])
    cpu_attn.attention_with_kv_cache(**args | {"block_table": np.array([[0, 3], [2, 0]], np.int32), "output": want})
    assert np.array_equal(args["output"], want) and want.any()


def test_a_request_without_queries_is_checked_too() -> None:
    args = attention_args(query_start_loc=np.array([0, 4, 4], np.int32))
    selected = np.array([[[0, 1], [0, 1]], [[0, 1], [0, -1]]], np.int32)
    with pytest.raises(ValueError, match=r"request 1: kv head 0: position 1 holds block 1, outside 0\.\.0"):
        cpu_attn.attention_with_kv_cache(**args, selected_blocks=selected)


def test_strides_are_free() -> None:
    selected = np.array([[[0, 1], [1, -1]], [[-1, -1], [0, -1]]], np.int32)
    odd = np.full((2, 3, 5), 77, np.int32)[::-1, ::2, 1:3]
    odd[...] = selected
    results = []
    for x in (selected, odd):
        args = attention_args()
        cpu_attn.attention_with_kv_cache(**args, selected_blocks=x)
        results.append(args["output"])
    assert np.array_equal(*results)


def test_the_bench_attends_the_share_it_says() -> None:
    step = Step(Workload("w", "decode", ((1, 400), (1, 160)), 4, 2, 32, selected=0.25), "auto", "float32", 16)
    selected = step.selected_blocks
    assert selected is not None
    assert [(row >= 0).sum() for request in selected for row in request] == [6, 6, 2, 2]
    cpu_attn.attention_with_kv_cache(**step.arguments(), scheduler_metadata=step.plan("native"))
    whole = dataclasses.replace(step.workload, selected=None)
    assert (step.workload.flops, step.workload.kv_bytes(4)) == (whole.flops // 4, whole.kv_bytes(4) // 4)


# ---- bounds of blocks ----

DTYPES = {"float32": F32, "float16": np.float16, "bfloat16": BF16}


def bounds_of(keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Least and largest of [n, Hkv, D], NaN where one is NaN."""
    wide = keys.astype(np.float64)
    return wide.min(axis=0), wide.max(axis=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [1, 3])
def test_bounds_are_those_of_the_tokens_written(dtype: str, pieces: int) -> None:
    rng = np.random.default_rng(3)
    key = (rng.standard_normal((40, 3, 19)) * 100).astype(DTYPES[dtype])
    key[5, 1, 2], key[33, 0, 3], key[2, 2, 2], key[3, 2, 2], key[7] = np.nan, -np.inf, 0.0, -0.0, 0
    key[9, 0, 0] = -np.array(np.nan, DTYPES[dtype])
    slots = np.arange(40) // 5 * 8 + np.arange(40) % 5  # 5 of 8 slots of 4 blocks
    slots[20:] = -1
    least, most = (np.full((6, 3, 19), np.nan, DTYPES[dtype]) for _ in range(2))
    for part in np.array_split(np.arange(40), pieces):
        sparse.update_block_bounds(key[part], slots[part], least, most, 8)
    for block in range(4):
        low, high = bounds_of(key[5 * block : 5 * block + 5])
        assert np.array_equal(least[block].astype(np.float64), low, equal_nan=True)
        assert np.array_equal(most[block].astype(np.float64), high, equal_nan=True)
    assert np.isnan(least[4:].astype(F32)).all(), "blocks of nobody"


def test_bounds_start_anew_where_a_block_does() -> None:
    """In a call whose tokens come in any order, too."""
    rng = np.random.default_rng(4)
    least, most = np.zeros((2, 1, 4), F32), np.zeros((2, 1, 4), F32)
    for _ in range(3):
        key = rng.standard_normal((4, 1, 4)).astype(F32)
        order = rng.permutation(4)
        sparse.update_block_bounds(key[order], order + 4, least, most, 4)
        assert np.array_equal([least[1], most[1]], bounds_of(key))
    more = np.full((1, 1, 4), 50, F32)
    sparse.update_block_bounds(more, np.array([6]), least, most, 4)
    assert (most[1] == 50).all() and np.array_equal(least[1], key.min(axis=0))
    sparse.update_block_bounds(key[:1], np.array([4]), least, most, 4)
    assert np.array_equal([least[1], most[1]], bounds_of(key[:1]))
    assert not least[0].any() and not most[0].any()


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        ({"slot_mapping": np.array([0, 16, 1])}, ValueError, ["slot_mapping[1]", "16", "= 16"]),
        ({"slot_mapping": np.array([0, 1])}, ValueError, ["slot_mapping", "T = 3"]),
        ({"slot_mapping": np.arange(3, dtype=np.int32)}, TypeError, ["slot_mapping", "int32"]),
        ({"key": np.zeros((3, 2, 5), F32)}, ValueError, ["block_min", "axis 2 is 6", "head_size = 5"]),
        ({"key": np.zeros((3, 2, 6), BF16)}, TypeError, ["block_min", "float32", "bfloat16"]),
        ({"block_max": np.zeros((4, 2, 7), F32)}, ValueError, ["block_max", "axis 2 is 7"]),
        ({"block_max": np.zeros((4, 2, 6), np.float16)}, TypeError, ["block_max", "float16"]),
        ({"block_min": np.broadcast_to(F32(0), (4, 2, 6))}, ValueError, ["block_min"]),
        ({"block_size": 0}, ValueError, ["block_size", "0"]),
    ],
)
def test_bounds_refuse(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    args: dict[str, Any] = {
        "key": np.ones((3, 2, 6), F32),
        "slot_mapping": np.array([0, -1, 1]),
        "block_min": np.zeros((4, 2, 6), F32),
        "block_max": np.zeros((4, 2, 6), F32),
        "block_size": 4,
    }
    sparse.update_block_bounds(**args)
    with pytest.raises(error) as caught:
        sparse.update_block_bounds(**args | spoiled)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(ValueError, match="block_min: shares memory with block_max"):
        sparse.update_block_bounds(**args | {"block_max": args["block_min"]})


# ---- scores of blocks ----


def oracle(
    query: Any, least: Any, most: Any, table: Any, lens: Any, starts: Any, block_size: int
) -> NDArray[np.float64]:
    """[R, Hkv, M], one product at a time."""
    heads, group = least.shape[1], query.shape[1] // least.shape[1]
    scores = np.full((len(lens), heads, table.shape[1]), -np.inf)
    q, low, high = (x.astype(np.float64) for x in (query, least, most))
    for r, (first, last) in enumerate(pairwise(starts)):
        for m in range(-(-int(lens[r]) // block_size)):
            for t in range(first, last):
                for h in range(heads * group):
                    block, kv = table[r, m], h // group
                    bound = np.maximum(q[t, h] * low[block, kv], q[t, h] * high[block, kv]).sum()
                    scores[r, kv, m] = max(scores[r, kv, m], bound if np.isfinite(bound) else np.inf)
    return scores


def scored(dtype: str, group: int, head_size: int, block_size: int = 4) -> dict[str, Any]:
    """Arguments of score_blocks; blocks past a request's own are not blocks at all."""
    rng = np.random.default_rng([group, head_size])
    kind, heads = DTYPES[dtype], 2
    both = np.sort(rng.standard_normal((2, 11, heads, head_size)), axis=0).astype(kind)
    table = np.full((4, 7), 2**31 - 1, np.int32)
    table[0, :5], table[1, :1], table[3, :3] = [3, 0, 10, 7, 7], [1], [9, 8, 2]
    return {
        "query": rng.standard_normal((9, heads * group, head_size)).astype(kind),
        "block_min": both[0],
        "block_max": both[1],
        "block_table": table,
        "seq_lens": np.array([5 * block_size - 1, 1, 0, 2 * block_size + 1], np.int32),
        "query_start_loc": np.array([0, 1, 8, 9, 9], np.int32),
        "block_size": block_size,
    }


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(("group", "head_size"), [(1, 1), (1, 128), (3, 20), (4, 64), (5, 33), (8, 7)])
def test_scores(isa: str, dtype: str, group: int, head_size: int) -> None:
    args = scored(dtype, group, head_size)
    got, want = sparse.score_blocks(**args, isa=isa), oracle(*args.values())
    assert got.dtype == np.float32
    assert np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert np.allclose(got[finite], want[finite], rtol=2e-6, atol=2e-6 * head_size)


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_cannot_be_ruled_out(isa: str, dtype: str, bad: float) -> None:
    args = scored(dtype, 3, 20)
    args["block_min"][10, 1, 4] = bad
    args["block_max"][10, 1, 4] = bad
    args["block_min"][0, 0, 19], args["block_max"][0, 0, 19] = -np.inf, np.inf
    got = sparse.score_blocks(**args, isa=isa)
    assert got[0, 1, 2] == np.inf and got[0, 0, 1] == np.inf
    assert np.isfinite(got[0, 0, [0, 2, 3, 4]]).all() and np.isfinite(got[0, 1, [0, 1, 3, 4]]).all()
    args = scored(dtype, 3, 20)
    args["query"][0, 2, 5] = bad
    got = sparse.score_blocks(**args, isa=isa)
    assert (got[0, 0, :5] == np.inf).all() and np.isfinite(got[0, 1, :5]).all()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(("group", "head_size"), [(1, 7), (3, 40), (4, 64)])
def test_scores_over_infinite_keys(isa: str, dtype: str, group: int, head_size: int) -> None:
    """An infinite bound that a query leaves out by its sign does not count. Request 0's heads all leave them out, but
    for one block where it has to multiply one by 0."""
    args = scored(dtype, group, head_size)
    rng = np.random.default_rng([group, head_size, 1])
    up = rng.random(head_size) < 0.5
    query, bad = args["query"], rng.random((11, 2, head_size)) < 2 / head_size
    query[0] = np.where(up, np.abs(query[0]), -np.abs(query[0]))
    args["block_min"][bad & up] = -np.inf
    args["block_max"][bad & ~up] = np.inf
    query[0, :, 1] = 0
    args["block_min"][:, :, 1], args["block_max"][:, :, 1] = -1, 1
    args["block_max"][10, 1, 1] = np.inf
    with np.errstate(invalid="ignore"):
        got, want = sparse.score_blocks(**args, isa=isa), oracle(*args.values())
    finite = np.isfinite(want)
    assert finite[0, :, :5].sum() == 9 and want[0, 1, 2] == np.inf and not finite[1, :, 0].all()
    assert np.array_equal(got[~finite], want[~finite])
    assert np.allclose(got[finite], want[finite], rtol=2e-6, atol=2e-6 * head_size)


def test_scores_of_a_request_are_its_own() -> None:
    """Whatever the batch and the threads."""
    args = scored("float32", 4, 64)
    want = sparse.score_blocks(**args)
    one = args | {"query": args["query"][1:8], "query_start_loc": np.array([0, 7], np.int32)}
    one |= {"block_table": args["block_table"][1:2, :1], "seq_lens": args["seq_lens"][1:2]}
    assert np.array_equal(sparse.score_blocks(**one)[0], want[1, :, :1])
    with threads(3, forced=True):
        assert np.array_equal(sparse.score_blocks(**args), want)


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        ({"block_table": np.full((4, 7), 11, np.int32)}, ValueError, ["block_table", "request 0", "block 11", "0..10"]),
        ({"block_table": np.zeros((4, 4), np.int32)}, ValueError, ["block_table", "needs 5", "4 columns"]),
        ({"block_table": np.zeros((3, 7), np.int32)}, ValueError, ["axis 0 is 4", "num_reqs = 3"]),
        ({"seq_lens": np.array([1, 1, 1, -1], np.int32)}, ValueError, ["seq_lens[3]", "-1"]),
        ({"query_start_loc": np.array([0, 2, 1, 9, 9], np.int32)}, ValueError, ["query_start_loc[2]", "1"]),
        ({"query_start_loc": np.array([1, 2, 3, 9, 9], np.int32)}, ValueError, ["query_start_loc[0]"]),
        ({"query_start_loc": np.array([0, 2, 3, 9, 10], np.int32)}, ValueError, ["query", "axis 0 is 9", "10"]),
        ({"query": np.zeros((9, 3, 20), F32)}, ValueError, ["2 kv heads", "num_heads = 3"]),
        ({"query": np.zeros((9, 0, 20), F32)}, ValueError, ["num_heads", "0"]),
        ({"query": np.zeros((9, 4, 21), F32)}, ValueError, ["block_min", "axis 2 is 20", "head_size = 21"]),
        ({"block_max": np.zeros((10, 2, 20), F32)}, ValueError, ["block_max", "axis 0 is 10"]),
        ({"block_min": np.zeros((11, 2, 20), BF16)}, TypeError, ["block_min", "bfloat16"]),
        ({"block_size": 2**40}, ValueError, ["block_size"]),
        ({"isa": "sse9"}, ValueError, ["isa", "sse9"]),
    ],
)
def test_scores_refuse(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        sparse.score_blocks(**scored("float32", 2, 20) | spoiled)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- selecting ----


def best(scores: NDArray[Any], blocks: int, max_selected_blocks: int, last: int, first: int) -> list[int]:
    """By sorting; of equal scores the first block."""
    forced = [i for i in range(blocks) if i < first or i >= blocks - last]
    rest = sorted((i for i in range(blocks) if i not in forced), key=lambda i: (-scores[i], i))
    return sorted((forced + rest)[:max_selected_blocks])


@pytest.mark.parametrize(
    ("max_selected_blocks", "last", "first"), [(1, 1, 0), (3, 1, 1), (4, 0, 0), (6, 2, 3), (99, 1, 0)]
)
def test_the_best_pages(max_selected_blocks: int, last: int, first: int) -> None:
    rng = np.random.default_rng(5)
    scores = rng.integers(-3, 4, (5, 3, 12)).astype(F32)  # many are equal
    scores[0, 0, 3], scores[0, 1, 2], scores[1, 2, 1] = np.nan, np.inf, -np.inf
    lens = np.array([48, 45, 8, 1, 0], np.int32)
    got = sparse.select_blocks(scores, lens, 4, max_selected_blocks, last, first)
    assert got.dtype == np.int32 and got.shape == (5, 3, min(max_selected_blocks, 12))
    for r, seq_len in enumerate(lens):
        for h in range(3):
            plain = np.where(np.isnan(scores[r, h]), np.inf, scores[r, h])
            want = best(plain, -(-int(seq_len) // 4), max_selected_blocks, last, first)
            assert got[r, h].tolist() == want + [-1] * (got.shape[2] - len(want)), (r, h)


def test_what_is_selected_does_not_depend_on_the_batch() -> None:
    scores = np.random.default_rng(6).integers(0, 3, (4, 2, 40)).astype(F32)
    lens = np.array([160, 20, 77, 99], np.int32)
    got = sparse.select_blocks(scores, lens, 4, 7)
    for r, seq_len in enumerate(lens):
        alone = sparse.select_blocks(scores[r : r + 1, :, : -(-seq_len // 4)], lens[r : r + 1], 4, 7)
        assert np.array_equal(alone[0], got[r, :, : alone.shape[2]])


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"max_selected_blocks": 0}, ["max_selected_blocks", "0"]),
        ({"max_selected_blocks": 3, "always_last": 2, "always_first": 2}, ["max_selected_blocks", "3 is outside 4"]),
        ({"always_last": -1}, ["always_last"]),
        ({"seq_lens": np.array([49, 1], np.int32)}, ["seq_lens[0]", "49", "0..48"]),
        ({"seq_lens": np.array([1, -1], np.int32)}, ["seq_lens[1]", "-1"]),
    ],
)
def test_select_refuses(spoiled: dict[str, Any], words: list[str]) -> None:
    args = {"scores": np.zeros((2, 1, 12), F32), "seq_lens": np.array([4, 5], np.int32), "block_size": 4}
    with pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words)):
        sparse.select_blocks(**{**args, "max_selected_blocks": 4} | spoiled)


# ---- all together ----


@pytest.mark.parametrize("name", ["mixed-plain", "long-3000", "fp8_e4m3-decode"])
@pytest.mark.parametrize("max_selected_blocks", [2, 5, 1000])
def test_from_keys_to_attention(name: str, max_selected_blocks: int) -> None:
    """Bounds bound, what they select is attended, and a budget for all pages gives what no selection gives."""
    case = next(c for c in cases("quick", "float32") if c.name == name)
    problem, size = build(case), case.block_size
    shape = problem.num_blocks, case.num_kv_heads, case.head_size
    least, most = np.empty(shape, F32), np.empty(shape, F32)
    sparse.update_block_bounds(np.concatenate(problem.key), slots_of(problem), least, most, size)
    step = problem.block_table, problem.seq_lens, problem.query_start_loc
    scores = sparse.score_blocks(problem.query, least, most, *step, size)
    group = case.num_heads // case.num_kv_heads
    for r, (first, last) in enumerate(pairwise(problem.query_start_loc)):
        for h in range(case.num_kv_heads):
            rows = problem.query[first:last, h * group : (h + 1) * group].reshape(-1, case.head_size)
            products = rows.astype(np.float64) @ problem.key[r][:, h].astype(np.float64).T
            for j in range(products.shape[1] if len(rows) else 0):
                assert products[:, j].max() <= scores[r, h, j // size] + 1e-4
    selected = sparse.select_blocks(scores, problem.seq_lens, size, max_selected_blocks)
    chosen = dataclasses.replace(problem, selected_blocks=selected)
    output, lse = run(chosen)
    assert check(chosen, output, lse).ok
    if max_selected_blocks == 1000:
        assert all(map(same_bits, (output, lse), run(problem)))


def test_paged_kv_cache_takes_them() -> None:
    rng = np.random.default_rng(7)
    cache = cpu_attn.PagedKVCache(8, 16, num_kv_heads=2, head_size=16)
    key, value = (rng.standard_normal((100, 2, 16)).astype(F32) for _ in range(2))
    cache.update(key, value, np.arange(100, dtype=np.int64))
    query, table = rng.standard_normal((1, 4, 16)).astype(F32), np.arange(8, dtype=np.int32)[None]
    plan = cache.plan(np.array([0, 1], np.int32), np.array([100], np.int32), num_heads=4)
    got = cache.attend(query, table, plan, selected_blocks=np.array([[[1, 6], [0, 2]]], np.int32))
    seen = [np.r_[16:32, 96:100], np.r_[0:16, 32:48]]
    for h in range(4):
        p = np.exp(0.25 * key[seen[h // 2], h // 2].astype(np.float64) @ query[0, h])
        assert np.allclose(got[0, h], p / p.sum() @ value[seen[h // 2], h // 2], rtol=1e-5, atol=1e-6)
