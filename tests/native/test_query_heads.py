# SPDX-License-Identifier: Apache-2.0
"""Blocks selected by query head: what the shared cases do not say (what is refused, bits, the other calls)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference, sparse

from ..cases.judge import same_bits
from ..cases.levels import cases
from ..cases.problem import Problem, build
from ..cases.run import run
from ..harness.kernels import KERNELS
from ..harness.steps import attention_args, plan_args
from ..native.test_selected import oracle, scored
from ..python.test_errors import refuses

F32 = np.float32
TABLE: dict[str, Any] = {"block_table": np.zeros((2, 2), np.int32), "block_size": 16}


def problem_of(name: str) -> Problem:
    return build(next(c for c in cases("quick") if c.name == f"query-heads-{name}"))


# Of 4 query heads of 2 kv heads: of a request of 20 keys, and of one of 7.
FINE = np.array([[[0, 1], [1, -1], [-1, -1], [0, -1]], [[0, -1], [-1, -1], [0, -1], [0, -1]]], np.int32)


def with_entry(request: int, head: int, position: int, block: int) -> NDArray[np.int32]:
    lists = FINE.copy()
    lists[request, head, position] = block
    return lists


def selecting(selected: Any = FINE, by_head: bool = True) -> dict[str, Any]:
    return attention_args(select_by_query_head=by_head) | {"selected_blocks": selected}


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        (with_entry(0, 3, 1, 2), ["request 0: query head 3: position 1 holds block 2, outside 0..1"]),
        (with_entry(1, 2, 1, 0), ["request 1: query head 2: position 1 holds block 0 after 0", "ascending"]),
        (FINE[:1], ["axis 0 is 1", "num_reqs = 2"]),
        (FINE[:, ::2], ["axis 1 is 2", "num_heads = 4"]),
        (FINE[0], ["2 axes, expected 3: [num_reqs, num_heads, blocks]"]),
    ],
)
def test_refused(selected: Any, words: list[str]) -> None:
    cpu_attn.attention_with_kv_cache(**selecting())
    refuses(cpu_attn.attention_with_kv_cache, selecting(selected), ValueError, "selected_blocks", *words)


def test_a_plan_says_whose_lists_they_are() -> None:
    words = ["selected_blocks: axis 1 is 4, expected num_kv_heads = 2"]
    refuses(cpu_attn.attention_with_kv_cache, selecting(by_head=False), ValueError, *words)
    for wrong, why in ((TABLE, "goes without block_table"), ({"max_selected_tokens": 1}, "max_selected_tokens")):
        with pytest.raises(ValueError, match=f"select_by_query_head: .*{why}"):
            cpu_attn.get_scheduler_metadata(**plan_args(), select_by_query_head=True, **wrong)
    with pytest.raises(TypeError, match="select_by_query_head: expected True or False, got 2"):
        cpu_attn.get_scheduler_metadata(**plan_args(), select_by_query_head=2)


def test_blocks_that_only_one_head_selects_have_to_be_there() -> None:
    missing = selecting(with_entry(0, 0, 1, -1))
    missing["block_table"] = np.array([[1, 99], [2, -7]], np.int32)
    refuses(cpu_attn.attention_with_kv_cache, missing, ValueError, "block_table: request 0: position 1 holds block 99")
    missing["selected_blocks"][0, 1, 0] = -1
    cpu_attn.attention_with_kv_cache(**missing)


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
def test_all_blocks_give_the_bits_of_no_selection(engine: str) -> None:
    if not any(e.name == engine and e.available for e in cpu_attn.engines()):
        pytest.skip(f"no {engine} here")
    problem = problem_of("all")
    assert problem.selected_blocks is not None and problem.selected_blocks.shape[1] == 4
    none = dataclasses.replace(problem, selected_blocks=None)
    assert all(map(same_bits, run(problem, engine=engine), run(none, engine=engine)))


@pytest.mark.parametrize(("num_heads", "query_block"), [(2, None), (2, 16)])
def test_heads_of_one_kv_head_each_are_kv_heads(num_heads: int, query_block: int | None) -> None:
    """Then both plans mean the same and give the same bits, with and without lists."""
    case = dataclasses.replace(problem_of("half").case, num_heads=num_heads, query_block=query_block)
    for share in (case.selected, None):
        problem = build(dataclasses.replace(case, selected=share))
        other = dataclasses.replace(problem, case=dataclasses.replace(problem.case, select_by_query_head=False))
        assert all(map(same_bits, run(problem), run(other)))


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(("group", "head_size"), [(1, 128), (3, 20), (5, 33)])
def test_scores_by_query_head(isa: str, dtype: str, group: int, head_size: int) -> None:
    args = scored(dtype, group, head_size)
    got = sparse.score_blocks(**args, isa=isa, by_query_head=True)
    each = {name: args[name].repeat(group, axis=1) for name in ("block_min", "block_max")}
    want = oracle(*(args | each).values())
    assert got.shape == want.shape and np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert np.allclose(got[finite], want[finite], rtol=2e-6, atol=2e-6 * head_size)


def test_from_keys_to_attention() -> None:
    """Bounds of blocks, their scores for each query block and head, what these select, over a cache and a step."""
    rng = np.random.default_rng(3)
    cache = cpu_attn.PagedKVCache(16, 16, num_kv_heads=2, head_size=32)
    manager = cpu_attn.BlockManager(cache)
    key, value = rng.standard_normal((2, 100, 2, 32), F32)
    query = rng.standard_normal((100, 6, 32), F32)
    low, high = np.empty((16, 2, 32), F32), np.empty((16, 2, 32), F32)
    manager.allocate("a")
    step = manager.step([("a", range(100))])
    cache.update(key, value, step)
    sparse.update_block_bounds(key, step.slot_mapping, low, high, 16)
    starts, lens, requests = sparse.query_blocks(step.query_start_loc, step.seq_lens, 32)
    table = step.block_table[requests]
    scores = sparse.score_blocks(query, low, high, table, lens, starts, 16, by_query_head=True)
    selected = sparse.select_blocks(scores, lens, 16, max_selected_blocks=4, always_last=3)
    assert selected.shape == (4, 6, 4) and (selected[:, 0] != selected[:, 1]).any()
    plan = step.plan(cache, 6, query_block_size=32, select_by_query_head=True)
    got = cache.attend(query, step, plan, selected_blocks=selected)
    want, _ = reference.attention(
        *(query, [key], [value], step.query_start_loc, step.seq_lens, 32**-0.5),
        selected_blocks=selected,
        query_block_size=32,
    )
    assert (reference.relative_rms(got, want, step.query_start_loc) <= reference.BUDGET["float32"]).all()
