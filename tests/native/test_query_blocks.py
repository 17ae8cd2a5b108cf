# SPDX-License-Identifier: Apache-2.0
"""Blocks selected by query block: what the shared cases do not say (what is refused, tasks, bits, the other calls)."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference, sparse
from cpu_attn._threads import threads
from cpu_attn.cli.workloads import Step, Workload

from ..cases.judge import check, same_bits
from ..cases.levels import cases
from ..cases.problem import Problem, build
from ..cases.run import run, written
from ..harness.kernels import KERNELS
from ..harness.steps import attention_args, plan_args
from ..python.test_errors import refuses

F32 = np.float32
TABLE: dict[str, Any] = {"block_table": np.zeros((2, 2), np.int32), "block_size": 16}


def problem_of(name: str, dtype: str = "float32") -> Problem:
    return build(next(c for c in cases("quick", dtype) if c.name == f"query-blocks-{name}"))


def lists(*rows: list[list[int]]) -> NDArray[np.int32]:
    return np.array(rows, np.int32)


# Of two query blocks of a request of 20 keys, the second of one token, and of one of a request of 7.
FINE = lists([[0, 1], [1, -1]], [[1, -1], [0, 1]], [[0, -1], [-1, -1]])


def selecting(selected: Any = FINE, size: int | None = 2) -> dict[str, Any]:
    plan = cpu_attn.get_scheduler_metadata(**plan_args(), query_block_size=size)
    return attention_args() | {"scheduler_metadata": plan, "selected_blocks": selected}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        (lists([[0, 2], [1, -1]], *FINE[1:]), ["request 0", "query block 0", "kv head 0", "position 1", "block 2"]),
        (lists(FINE[0], [[1, -1], [2, -1]], FINE[2]), ["query block 1", "kv head 1", "position 0", "block 2", "0..1"]),
        (lists(*FINE[:2], [[0, -1], [1, -1]]), ["request 1", "query block 2", "kv head 1", "block 1", "0..0"]),
        (lists(*FINE[:2], [[0, 0], [0, -1]]), ["query block 2", "kv head 0", "block 0 after 0", "ascending"]),
        (lists(FINE[0], [[-1, 1], [0, 1]], FINE[2]), ["query block 1", "kv head 0", "position 1", "block 1 after -1"]),
        (FINE[:2], ["axis 0 is 2", "query blocks = 3"]),
        (FINE[:, :1], ["axis 1 is 1", "num_kv_heads = 2"]),
        (FINE[0], ["2 axes, expected 3: [query blocks, num_kv_heads, blocks]"]),
    ],
)
def test_refused(selected: Any, words: list[str]) -> None:
    cpu_attn.attention_with_kv_cache(**selecting())
    refuses(cpu_attn.attention_with_kv_cache, selecting(selected), ValueError, "selected_blocks", *words)


def test_a_plan_says_whose_lists_they_are() -> None:
    cpu_attn.attention_with_kv_cache(**selecting(None))
    refuses(cpu_attn.attention_with_kv_cache, selecting(size=None), ValueError, "axis 0 is 3, expected num_reqs = 2")
    cpu_attn.attention_with_kv_cache(**selecting(FINE[::2], None))
    for wrong, words in (
        ({"query_block_size": 0}, "0 is outside 1"),
        ({"query_block_size": 2**31}, "outside 1"),
        ({"query_block_size": 4, **TABLE}, "goes without block_table"),
        ({"query_block_size": 4, "max_selected_tokens": 1}, "max_selected_tokens"),
    ):
        with pytest.raises(ValueError, match=f"query_block_size: .*{words}"):
            cpu_attn.get_scheduler_metadata(**plan_args(), **wrong)
    with pytest.raises(TypeError, match=r"query_block_size: .*float"):
        cpu_attn.get_scheduler_metadata(**plan_args(), query_block_size=2.0)


def test_blocks_of_what_is_selected_and_seen_have_to_be_there() -> None:
    """And no others: of request 0 the second block holds what its first query block may not see."""
    step = {"seq_lens": np.array([17, 7], np.int32), "query_start_loc": np.array([0, 2, 4], np.int32)}
    missing = attention_args(**step, query_block_size=1)
    missing["block_table"] = np.array([[1, 99], [99, 99]], np.int32)
    missing["selected_blocks"] = lists([[0, 1]] * 2, [[0, -1]] * 2, [[-1, -1]] * 2, [[-1, -1]] * 2)
    cpu_attn.attention_with_kv_cache(**missing)
    missing["selected_blocks"][1] = [0, 1]
    refuses(cpu_attn.attention_with_kv_cache, missing, ValueError, "block_table: request 0: position 1 holds block 99")


# ---- tasks and bits ----


@pytest.mark.parametrize(("size", "tasks"), [(None, 4 + 1), (1, 32), (8, 4 + 1), (12, 2 + 2 + 2 + 1), (31, 4 + 1)])
def test_no_task_has_tokens_of_two_query_blocks(size: int | None, tasks: int) -> None:
    """The reference engine takes 8 tokens of 2 heads: blocks of 12 are two tasks of 6."""
    lens, start = np.array([31, 9], np.int32), np.array([0, 31, 32], np.int32)
    options: dict[str, Any] = {"engine": "reference", "query_block_size": size, "enable_kv_split": False}
    assert cpu_attn.get_scheduler_metadata(2, 2, 1, 8, lens, "float32", start, **options).num_tasks == tasks


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
@pytest.mark.parametrize("name", ["half-everything", "2300", "tall"])
def test_all_blocks_give_the_bits_of_no_selection(name: str, engine: str) -> None:
    if not any(e.name == engine and e.available for e in cpu_attn.engines()):
        pytest.skip(f"no {engine} here")
    case = problem_of(name).case
    problem = build(dataclasses.replace(case, selected=1.0, fill="normal"))
    none = dataclasses.replace(problem, case=dataclasses.replace(case, selected=None), selected_blocks=None)
    assert all(map(same_bits, run(problem, engine=engine), run(none, engine=engine)))


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_a_query_block_has_the_bits_of_a_chunk(isa: str) -> None:
    """Of a request that ends with it, which selects the same blocks."""
    problem = problem_of("2300")
    memory, size = written(problem, isa), problem.case.query_block
    output, lse = run(problem, isa, memory=memory)
    starts, lens, _ = sparse.query_blocks(problem.query_start_loc, problem.seq_lens, size)
    assert problem.selected_blocks is not None and problem.alibi_slopes is not None
    for i, (first, last) in enumerate(pairwise(starts)):
        selected = problem.selected_blocks[i : i + 1]
        own = np.where(selected * problem.case.block_size < lens[i], selected, -1)
        start, length = np.array([0, last - first], np.int32), lens[i : i + 1]
        plan = cpu_attn.get_scheduler_metadata(
            1, 2, 1, 32, length, "float32", start, isa=isa, query_block_size=problem.case.query_block
        )
        rows, log = np.empty_like(output[first:last]), np.empty((2, last - first), F32)
        cpu_attn.attention_with_kv_cache(
            *(memory.query[first:last], memory.key_cache, memory.value_cache, rows, start, length, problem.scale, True),
            *(problem.alibi_slopes, -1, problem.block_table, 0.0, plan),
            lse=log,
            selected_blocks=own,
        )
        assert same_bits(rows, output[first:last]) and same_bits(log, lse[:, first:last]), i


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
@pytest.mark.parametrize(("seq_len", "block_size"), [(10000, 9000), (140000, 2500)])
def test_blocks_of_many_chains(isa: str, seq_len: int, block_size: int) -> None:
    """A segment is a block of more than 4096 keys, or two blocks that are more together."""
    rng, blocks = np.random.default_rng(8), -(-seq_len // block_size)
    cache = cpu_attn.PagedKVCache(blocks, block_size, 1, 16, "float32", isa)
    key, value = rng.standard_normal((2, seq_len, 1, 16), F32)
    cache.update(key, value, np.arange(seq_len))
    start, lens = np.array([0, 3], np.int32), np.array([seq_len], np.int32)
    query, table = rng.standard_normal((3, 1, 16), F32), np.arange(blocks, dtype=np.int32)[None]
    selected = np.arange(blocks, dtype=np.int32) + np.zeros((2, 1, 1), np.int32)
    selected[1, 0] = [*selected[1, 0, 1:], -1]
    want, _ = reference.attention(
        query, [key], [value], start, lens, 0.25, selected_blocks=selected, block_size=block_size, query_block_size=2
    )
    for split in (False, True):
        with threads(2, forced=True):
            plan = cache.plan(start, lens, 1, query_block_size=2, enable_kv_split=split)
            output = cache.attend(query, table, plan, selected_blocks=selected)
        assert (reference.relative_rms(output, want, start) <= reference.BUDGET["float32"]).all()


# ---- the other calls ----


def test_paged_kv_cache_takes_them() -> None:
    rng = np.random.default_rng(7)
    cache = cpu_attn.PagedKVCache(8, 16, num_kv_heads=1, head_size=16)
    key, value = rng.standard_normal((2, 100, 1, 16), F32)
    cache.update(key, value, np.arange(100, dtype=np.int64))
    query, table = rng.standard_normal((3, 2, 16), F32), np.arange(8, dtype=np.int32)[None]
    start, lens = np.array([0, 3], np.int32), np.array([100], np.int32)
    plan = cache.plan(start, lens, num_heads=2, query_block_size=2)
    got = cache.attend(query, table, plan, selected_blocks=lists([[1, 6]], [[0, 2]]))
    seen = [np.r_[16:32, 96:98], np.r_[16:32, 96:99], np.r_[0:16, 32:48]]
    for i, keys in enumerate(seen):
        for h in range(2):
            p = np.exp(0.25 * key[keys, 0].astype(np.float64) @ query[i, h])
            assert np.allclose(got[i, h], p / p.sum() @ value[keys, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_query_blocks_one_by_one(size: int) -> None:
    starts, lens = np.array([0, 5, 5, 6, 10], np.int32), np.array([9, 3, 4, 2], np.int32)
    found, want = sparse.query_blocks(starts, lens, size), []
    for r, (first, last) in enumerate(pairwise(starts.tolist())):
        for begin in range(first, last, size):
            end = min(begin + size, last)
            want.append((begin, end, max(0, int(lens[r]) - (last - end)), r))
    assert [(*span, int(n), int(r)) for span, n, r in zip(pairwise(found[0].tolist()), *found[1:], strict=True)] == want
    assert [x.dtype for x in found] == [np.int32, np.int32, np.int64]
    none = sparse.query_blocks(np.zeros(1, np.int32), np.zeros(0, np.int32), size)
    assert [x.tolist() for x in none] == [[0], [], []]


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"query_start_loc": np.array([0, 2, 1], np.int32)}, "query_start_loc[2]: 1"),
        ({"query_start_loc": np.array([1, 2, 3], np.int32)}, "query_start_loc[0]: 1"),
        ({"query_start_loc": np.array([0, 2], np.int32)}, "query_start_loc: axis 0 is 2"),
        ({"seq_lens": np.array([4, -1], np.int32)}, "seq_lens[1]: -1"),
        ({"query_block_size": 0}, "query_block_size: 0"),
    ],
)
def test_query_blocks_refuse(spoiled: dict[str, Any], words: str) -> None:
    fine = {"query_start_loc": np.array([0, 2, 3], np.int32), "seq_lens": np.array([4, 5], np.int32)}
    with pytest.raises(ValueError, match=re.escape(words)):
        sparse.query_blocks(**{**fine, "query_block_size": 2} | spoiled)


def test_from_keys_to_attention() -> None:
    """Bounds of blocks, their scores for each query block, what these select, attended."""
    problem = problem_of("all")
    case, step = problem.case, (problem.query_start_loc, problem.seq_lens)
    slots = [problem.block_table[r, np.arange(n) // 16] * 16 + np.arange(n) % 16 for r, n in enumerate(step[1])]
    shape = problem.num_blocks, case.num_kv_heads, case.head_size
    low, high = np.empty(shape, F32), np.empty(shape, F32)
    sparse.update_block_bounds(np.concatenate(problem.key), np.concatenate(slots), low, high, 16)
    starts, lens, requests = sparse.query_blocks(*step, case.query_block)
    scores = sparse.score_blocks(problem.query, low, high, problem.block_table[requests], lens, starts, 16)
    assert scores.shape[:2] == (len(lens), case.num_kv_heads)
    selected = sparse.select_blocks(scores, lens, 16, max_selected_blocks=3, always_last=2)
    chosen = dataclasses.replace(problem, selected_blocks=selected)
    assert check(chosen, *run(chosen)).ok
    assert not same_bits(run(chosen)[0], run(problem)[0])


def test_the_bench_attends_the_share_it_says() -> None:
    w = Workload("w", "prefill", ((64, 96), (40, 40)), 4, 2, 16, selected=0.25, query_block=16)
    step = Step(w, "auto", "float32", 4)
    selected = step.selected_blocks
    assert selected is not None
    assert [(row >= 0).sum() for row in selected[:, 0]] == [3, 4, 5, 6, 1, 2, 2]
    whole = dataclasses.replace(w, selected=None)
    assert (w.flops, w.kv_bytes(4)) == (whole.flops // 4, whole.kv_bytes(4))
    with threads(2, forced=True):
        output = cpu_attn.attention_with_kv_cache(**step.arguments(), scheduler_metadata=step.plan("native"))
    pages = [step.cache.gather(step.block_table[r], int(n)) for r, n in enumerate(step.seq_lens)]
    keys, values = zip(*pages, strict=True)
    want, _ = reference.attention(
        *(step.query, keys, values, step.query_start_loc, step.seq_lens, 0.25),
        selected_blocks=selected,
        block_size=4,
        query_block_size=16,
    )
    assert (reference.relative_rms(output, want, step.query_start_loc) <= reference.BUDGET["float32"]).all()
