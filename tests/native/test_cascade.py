# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes: found in the block table, read once, the same bits; refused where the call's table lacks them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn._threads import threads

from ..cases.case import Case
from ..cases.judge import check, same_bits
from ..cases.levels import cases
from ..cases.problem import Problem, build
from ..cases.run import run
from ..harness.backend_steps import Step, layer
from ..harness.kernels import KERNELS, ONE_DTYPE
from ..programs.numa_engine import Recorder, decode

CASCADES = [case.name for case in cases("default") if case.name.startswith("cascade-")]
ENGINES = [e.name for e in cpu_attn.engines() if e.available]


def by_name(name: str, dtype: str) -> Case:
    return next(case for case in cases("default", dtype) if case.name == name)


@functools.cache
def built(name: str, dtype: str) -> Problem:
    """For every isa the same one, and one oracle."""
    return build(by_name(name, dtype))


def unshared(p: Problem) -> Problem:
    """The same arrays, of which the plan is told nothing."""
    return dataclasses.replace(p, case=dataclasses.replace(p.case, shared=()))


def plan_of(table: Any, seq_lens: Any, query_lens: Any = None, block_size: int = 16, **options: Any) -> Any:
    query_lens = [1] * len(seq_lens) if query_lens is None else query_lens
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return cpu_attn.get_scheduler_metadata(
        *(len(seq_lens), options.pop("num_heads", 4), options.pop("num_kv_heads", 1), 16),
        *(np.array(seq_lens, np.int32), "float32", starts),
        block_table=table,
        block_size=block_size,
        **options,
    )


def prefixes(*shared: tuple[int, ...], columns: int = 300) -> Any:
    """A table whose row r starts with `n` blocks of row `source` for each (source, n)."""
    table = np.arange(len(shared) * columns, dtype=np.int32).reshape(len(shared), columns)
    for r, (source, n) in enumerate(shared):
        table[r, :n] = table[source, :n]
    return table


# ---- results ----


@pytest.mark.parametrize("name", CASCADES)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_the_bits_of_every_request_by_itself(isa: str, dtype: str, name: str) -> None:
    p = built(name, dtype)
    got, want = run(p, isa), run(unshared(p), isa)
    assert check(p, *got).ok
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_threads_and_split_do_not_change_a_bit(isa: str, dtype: str, engine: str) -> None:
    p = build(by_name("cascade-tree", dtype))
    want = run(p, isa, engine, enable_kv_split=False, num_threads=1)
    assert check(p, *want).ok
    for n, split in itertools.product((1, 2, 3, 8, 64), (False, True)):
        got = run(p, isa, engine, enable_kv_split=split, num_threads=n)
        assert same_bits(got[0], want[0]), (n, split)
        assert same_bits(got[1], want[1]), (n, split)


def random_case(seed: int) -> Case:
    """Some tree of prefixes, cut anywhere."""
    rng = np.random.default_rng(seed)
    block_size, reqs = int(rng.choice([1, 7, 16, 24, 128])), int(rng.integers(2, 9))
    seq_lens = [int(n) for n in rng.integers(900, 3300, reqs)]
    shared = [(0, 0)]
    for r in range(1, reqs):
        source = int(rng.integers(r))
        most = min(seq_lens[r], seq_lens[source]) // block_size
        shared.append((source, int(rng.choice([0, most, int(rng.integers(most + 1)), min(most, 1024 // block_size)]))))
    return Case(
        f"random-cascade-{seed}",
        tuple(int(n) for n in rng.choice([1, 1, 1, 2, 5], reqs)),
        tuple(seq_lens),
        num_heads=int(rng.choice([1, 4, 6])),
        num_kv_heads=1,
        head_size=int(rng.choice([8, 24, 48, 64])),
        block_size=block_size,
        causal=bool(rng.random() < 0.8),
        sliding_window=int(rng.choice([-1, -1, 1500])),
        alibi=float(rng.choice([0, 0.25])),
        sinks=[None, "mixed"][int(rng.integers(2))],
        shared=tuple(shared),
        dtype=str(rng.choice(["float32", "float16", "bfloat16", "bfloat16"])),
        kv_cache_dtype=str(rng.choice(["auto", "fp8", "int8", "int4", "int4/int8"])),
        seed=seed,
    )


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in range(20, 60))])
def test_any_tree(seed: int) -> None:
    p = build(random_case(seed))
    want, threads = run(unshared(p)), int(np.random.default_rng(seed).integers(1, 9))
    got = run(p, num_threads=threads)
    assert check(p, *got).ok
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


def test_calls_do_not_change_a_plan() -> None:
    """Partial results are merged in place, in the workspace."""
    rng = np.random.default_rng(0)
    cache = cpu_attn.PagedKVCache(150, 16, 2, 32)
    cache.key_cache[...] = rng.standard_normal(cache.key_cache.shape)
    cache.value_cache[...] = rng.standard_normal(cache.value_cache.shape)
    table = np.stack([np.arange(70), np.r_[:64, 70:76], np.r_[:64, 76:82]]).astype(np.int32)
    starts, lens = np.arange(4, dtype=np.int32), np.array([1100, 1110, 1025], np.int32)
    plan, alone = cache.plan(starts, lens, 4, block_table=table), cache.plan(starts, lens, 4)
    assert (plan.num_shared, alone.num_shared) == (1, 0)
    assert "1 shared" in repr(plan)
    for seed in range(3):
        query = np.random.default_rng(seed).standard_normal((3, 4, 32), np.float32)
        assert same_bits(cache.attend(query, table, plan), cache.attend(query, table, alone))


# ---- what is shared ----

WHOLE = 64  # blocks of 16 in a segment


@pytest.mark.parametrize(
    ("shared", "seq_lens", "options", "expected"),
    [
        ([(0, 0), (0, WHOLE)], [1100, 1200], {}, 1),
        ([(0, 0), (0, WHOLE - 1)], [1100, 1200], {}, 0),
        ([(0, 0), (0, WHOLE + 60)], [2100, 2200], {}, 1),
        ([(0, 0), (0, 2 * WHOLE)], [2048, 2048], {}, 1),
        ([(0, 0), (0, WHOLE)], [1024, 1023], {}, 0),
        ([(0, 0), (0, 100), (0, 100)], [2048, 2048, 900], {}, 1),
        ([(0, 0), (0, WHOLE), (1, 3 * WHOLE)], [4000, 4000, 4000], {}, 1 + 2),  # past the first, segment by segment
        ([(0, 0), (0, WHOLE), (0, 2 * WHOLE)], [2100, 1100, 2100], {}, 2),  # one table begins another
        ([(0, 0), (0, 2 * WHOLE), (0, 0), (2, WHOLE)], [3000, 3000, 3000, 3000], {}, 2),
        ([(0, 0), (0, 2 * WHOLE)], [3000, 3000], {"sliding_window": 2999}, 0),
        ([(0, 0), (0, 2 * WHOLE)], [3000, 3000], {"sliding_window": 3000}, 1),
        ([(0, 0), (0, WHOLE)], [1100, 1100], {"query_lens": [77, 76]}, 0),  # many rows read little
        ([(0, 0), (0, WHOLE)], [1100, 1100], {"query_lens": [4, 3]}, 1),
        ([(0, 0), (0, WHOLE)], [1026, 1026], {"query_lens": [3, 4]}, 0),  # a query among the keys does not see them all
        ([(0, 0), (0, WHOLE)], [1026, 1026], {"query_lens": [3, 4], "causal": False}, 1),
        ([(0, 0), (0, WHOLE)], [1100, 1100], {"query_lens": [1, 0]}, 0),
        ([(0, 0), (0, WHOLE)], [1100, 1100], {"num_heads": 32}, 0),
        ([(0, 0), (0, 200)], [3000, 70000], {}, 0),  # segments of another size
    ],
)
def test_what_is_shared(shared: Any, seq_lens: Any, options: dict[str, Any], expected: int) -> None:
    columns = max(300, -(-max(seq_lens) // 16))
    plan = plan_of(prefixes(*shared, columns=columns), seq_lens, enable_kv_split=False, engine="native", **options)
    assert plan.num_shared == expected


def test_a_large_group_is_cut_by_the_rows_of_the_engine() -> None:
    table = prefixes((0, 0), *[(0, WHOLE)] * 299, columns=80)
    plan = plan_of(table, [1100] * 300, engine="onednn" if "onednn" in ENGINES else "native")
    assert 1 < plan.num_shared <= 300 * 4 // 32 + 1
    assert plan.num_splits == 300


class Shares(Recorder):
    """sizes: how many query tokens each task has that is for several requests."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def segment(self, plan: Any, call: Any, task: Any, *rest: Any) -> int:
        self.sizes += [task.num_tokens] if task.shared else []
        return super().segment(plan, call, task, *rest)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([[1] * 34, [1] * 34], [10, 10, 12, 12, 12, 12]),
        ([[8, 8]], [16]),
        ([[7, 7, 7]], [7, 14]),
        ([[1] * 17], [8, 9]),
    ],
)
def test_as_many_tasks_as_the_rows_of_the_engine_ask_for(groups: list[list[int]], sizes: list[int]) -> None:
    """About equal ones of at most 16 rows, for requests with these query tokens."""
    query_lens = [n for group in groups for n in group]
    first = [sum(map(len, groups[:i])) for i, group in enumerate(groups) for _ in group]
    table, lens = prefixes(*((source, WHOLE) for source in first), columns=80), [1100] * len(query_lens)
    recorder, cache = Shares(), cpu_attn.PagedKVCache(table.size, 16, 1, 16)
    with recorder.installed(), threads(1, forced=True):
        plan = plan_of(table, lens, query_lens, num_heads=1)
        cache.attend(np.zeros((sum(query_lens), 1, 16), np.float32), table, plan)
    assert sorted(recorder.sizes) == sizes


def test_the_longest_task_comes_first() -> None:
    """A task costs its keys times 8 more than its rows (LOAD, native/plan/plan.h). A shared task is one segment where
    others come before it. What a request has for itself behind shared segments follows when these are merged."""
    table = prefixes((0, 0), (0, WHOLE), (1, 3 * WHOLE), (3, 0), (4, 0))
    whole, parts, long, short = 1024 * (3 + 8), 1024 * (2 + 8), 1200 * (1 + 8), 1050 * (1 + 8)
    assert whole > long > parts > short
    ran = decode(Recorder(), [4000, 4000, 4000, 1200, 1050], table, [0] * table.size, 1, 1)
    order = [(request if request > 2 else "shared", segment) for request, segment, _ in ran]
    assert order[:7] == [("shared", 0), (3, 0), (3, 1), ("shared", 1), ("shared", 2), (4, 0), (4, 1)]


def test_less_to_do() -> None:
    """What is shared costs once: the plan of 32 requests wakes no more threads than that takes."""
    table = prefixes((0, 0), *[(0, 256)] * 31, columns=256)
    with threads(64):
        plan, alone = plan_of(table, [4096] * 32), plan_of(prefixes(*[(r, 0) for r in range(32)]), [4096] * 32)
    assert plan.num_threads < alone.num_threads


def test_split_among_threads() -> None:
    with threads(4, forced=True):
        plan = plan_of(prefixes((0, 0), (0, 256), columns=256), [4096, 4096])
    assert plan.num_shared == 4


# ---- errors ----


def attend(p: Problem, plan: Any, table: Any, block_size: int = 16) -> Any:
    case = p.case
    cache = cpu_attn.PagedKVCache(int(table.max()) + 1, block_size, case.num_kv_heads, case.head_size)
    output = np.full((len(p.query), case.num_heads, case.head_size), np.nan, np.float32)
    arrays = p.query, cache.key_cache, cache.value_cache, output, p.query_start_loc, p.seq_lens
    try:
        cpu_attn.attention_with_kv_cache(*arrays, 1.0, True, None, -1, table, 0.0, plan)
    except ValueError:
        assert np.isnan(output).all()  # before a byte is written
        raise
    return output


def test_the_call_has_to_share_too() -> None:
    case = Case("two", (1, 1, 1), (1100, 1200, 1300), num_heads=4, num_kv_heads=1, head_size=16)
    p, table = build(case), prefixes((0, 0), (0, 70), (0, 66), columns=90)
    plan = plan_of(table, case.seq_lens)
    assert plan.num_shared == 1
    attend(p, plan, table)
    other = table.copy()
    other[:, :64] = table[:, 63::-1]  # elsewhere, but together
    attend(p, plan, other)
    other = table.copy()
    other[:, 64:] += 1  # past what is shared
    attend(p, plan, other)
    for request, position in itertools.product(range(3), (0, 31, 63)):
        other = table.copy()
        other[request, position] += 3
        with pytest.raises(ValueError, match=rf"position {position} holds block \d+, .*made for other block tables"):
            attend(p, plan, other)
    with pytest.raises(ValueError, match="block_size is 32, scheduler_metadata was made for 16"):
        attend(p, plan, table, 32)
    short = np.ascontiguousarray(table[:, :40])
    with pytest.raises(ValueError, match="needs 69 blocks"):
        attend(p, plan, short)


def test_the_block_that_a_shared_segment_ends_in() -> None:
    """1024 keys in blocks of 24: the last of them lie in the 43rd."""
    case = Case("two", (1, 1), (1100, 1200), num_heads=4, num_kv_heads=1, head_size=16)
    p, table = build(case), prefixes((0, 0), (0, 45), columns=50)
    plan = plan_of(table, case.seq_lens, block_size=24)
    assert plan.num_shared == 1
    other = table.copy()
    other[1, 43] += 3
    attend(p, plan, other, 24)
    other[1, 42] += 3
    with pytest.raises(ValueError, match=r"position 42 holds block \d+, .*made for other block tables"):
        attend(p, plan, other, 24)


def test_selected_blocks_and_trees_do_not_share() -> None:
    """A selection is each request's own, and would say which of the shared keys count; a tree's bits hide keys."""
    table = prefixes((0, 0), (0, 128))
    cache = cpu_attn.PagedKVCache(600, 16, 1, 16, "float32")
    lens, query = np.array([2100, 2100], np.int32), np.ones((2, 4, 16), np.float32)
    plan = cache.plan(np.arange(3, dtype=np.int32), lens, 4, block_table=table)
    assert plan.num_shared == 1
    with pytest.raises(ValueError, match=r"selected_blocks: scheduler_metadata shares prefixes.*without block_table"):
        cache.attend(query, table, plan, selected_blocks=np.zeros((2, 1, 1), np.int32))
    with pytest.raises(ValueError, match="selected_blocks"):  # whose table may be narrower than what is shared
        cache.attend(query, table[:, :1], plan, selected_blocks=np.zeros((2, 1, 1), np.int32))
    cache.attend(query, table, plan)
    tree = np.ones((2, 1), np.uint8)
    assert cache.plan(np.arange(3, dtype=np.int32), lens, 4, block_table=table, tree_mask=tree).num_shared == 0
    spans = {0: [(5, 2000)], 1: [(5, 2000)]}
    assert cache.plan(np.arange(3, dtype=np.int32), lens, 4, block_table=table, mm_prefix_range=spans).num_shared == 1


@pytest.mark.parametrize(
    ("table", "block_size", "error", "match"),
    [
        (prefixes((0, 0), (0, 64)), None, ValueError, "block_size: is None, block_table is given"),
        (None, 16, ValueError, "block_table: is None, block_size is given"),
        (prefixes((0, 0), (0, 64)), 0, ValueError, "block_size: 0 is outside"),
        (prefixes((0, 0), (0, 64)), 16.0, TypeError, "block_size: expected an integer"),
        (prefixes((0, 0)), 16, ValueError, "block_table: axis 0 is 1, expected num_reqs = 2"),
        (prefixes((0, 0), (0, 64)).astype(np.int64), 16, TypeError, "block_table: dtype int64"),
        (prefixes((0, 0), (0, 64))[0], 16, ValueError, "block_table: 1 axes, expected 2"),
        (prefixes((0, 0), (0, 64))[:, ::2], 16, ValueError, "last axis"),
        (prefixes((0, 0), (0, 64), columns=63), 16, ValueError, "request 0: needs 64 blocks, the table has 63 columns"),
        ([[0, 1], [0, 1]], 16, TypeError, "block_table: expected an array"),
    ],
)
def test_tables_that_no_plan_takes(table: Any, block_size: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        plan_of(table, [1100, 1200], block_size=block_size)


def test_tables_of_any_strides_and_contents() -> None:
    """Rows may lie anywhere; entries that no key needs hold anything, and the blocks need not exist."""
    table = prefixes((0, 0), (0, 64), columns=80)
    table[:, 75:] = [[-(2**31)], [2**31 - 1]]
    wide = np.zeros((2, 160), np.int32)
    wide[:, 3:83] = table
    for t in (table, wide[:, 3:83], np.ascontiguousarray(table[::-1])[::-1], table - 2**30):
        assert plan_of(t, [1100, 1200]).num_shared == 1
    assert plan_of(np.zeros((0, 0), np.int32), []).num_shared == 0
    assert plan_of(np.zeros((2, 0), np.int32), [0, 0]).num_shared == 0


# ---- the backend layer ----


def test_a_layer_shares_by_itself() -> None:
    """Whatever it is told of a common prefix; blocks that move between layers make a new plan."""
    step = Step([1, 1, 1], [1100, 1090, 1080], 0)
    own, keys, values = step.table.copy(), list(step.keys), list(step.values)
    for r in (1, 2):
        step.table[r, :WHOLE] = step.table[0, :WHOLE]
        step.keys[r], step.values[r] = (np.concatenate([x[0][:1024], x[r][1024:]]) for x in (keys, values))
    metadata = step.metadata()
    for _ in range(2):
        step.check(step.forward(layer(), metadata))
    ((*_, plan),) = metadata._plans.values()
    assert plan.num_shared > 0
    step.table[...], step.keys, step.values = own, keys, values
    step.check(step.forward(layer(), metadata))
    ((*_, plan),) = metadata._plans.values()
    assert plan.num_shared == 0
