# SPDX-License-Identifier: Apache-2.0
"""Selected tokens: what the shared cases do not say (what is refused, what a plan asks for, the other calls)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference
from cpu_attn._threads import threads

from ..cases.judge import check, same_bits
from ..cases.levels import cases
from ..cases.problem import build
from ..cases.run import run, written
from ..harness.steps import attention_args, plan_args
from ..python.test_errors import refuses

F32 = np.float32
Rows = list[list[int]]


def tokens(*rows: list[int]) -> NDArray[np.int32]:
    return np.array(rows, np.int32)


FINE = tokens([0, 5, 17], [1, 18, -1], [2, 16, 19], [0, 6, -1])


def selecting(selected: Any = FINE, most: int | None = 3) -> dict[str, Any]:
    """Three query tokens of a request of 20 keys, one of a request of 7."""
    plan = cpu_attn.get_scheduler_metadata(**plan_args(), max_selected_tokens=most)
    return attention_args() | {"scheduler_metadata": plan, "selected_tokens": selected}


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        (tokens([0, 5, 20], *FINE[1:]), ["request 0", "query token 0", "position 2", "token 20", "0..19", "20 tokens"]),
        (tokens(*FINE[:3], [0, 7, -1]), ["request 1", "query token 3", "position 1", "token 7", "0..6"]),
        (tokens(FINE[0], [-2, 1, 2], *FINE[2:]), ["query token 1", "position 0", "token -2"]),
        (tokens(*FINE[:2], [2, 2, 3], FINE[3]), ["query token 2", "position 1", "token 2 after 2", "ascending"]),
        (tokens(*FINE[:2], [2, 1, 3], FINE[3]), ["query token 2", "position 1", "token 1 after 2"]),
        (tokens(*FINE[:2], [2, -1, 3], FINE[3]), ["query token 2", "position 2", "token 3 after -1"]),
        (FINE[:3], ["axis 0 is 3", "T = 4"]),
        (FINE[None], ["3 axes, expected 2"]),
        (np.zeros((4, 4), np.int32), ["max_selected_tokens = 3", "4 columns"]),
        (None, ["max_selected_tokens = 3", "the call has none"]),
    ],
)
def test_refused(selected: Any, words: list[str]) -> None:
    cpu_attn.attention_with_kv_cache(**selecting())
    refuses(cpu_attn.attention_with_kv_cache, selecting(selected), ValueError, "selected_tokens", *words)


def test_a_plan_is_for_a_selection_or_for_none() -> None:
    refuses(
        cpu_attn.attention_with_kv_cache,
        selecting(most=None),
        ValueError,
        "selected_tokens: scheduler_metadata was made without max_selected_tokens, the call has 3 columns",
    )
    both = selecting() | {"selected_blocks": np.zeros((2, 2, 1), np.int32)}
    refuses(cpu_attn.attention_with_kv_cache, both, ValueError, "selected_tokens: selected_blocks are given, too")
    table = {"block_table": np.zeros((2, 2), np.int32), "block_size": 16}
    for wrong, word in (
        ({"max_selected_tokens": 0}, "0"),
        ({"max_selected_tokens": 1, **table}, "without block_table"),
    ):
        with pytest.raises(ValueError, match=f"max_selected_tokens: .*{word}"):
            cpu_attn.get_scheduler_metadata(**plan_args(), **wrong)


def test_blocks_of_what_is_selected_and_seen_have_to_be_there() -> None:
    """And no others: the second block of request 0 holds what its first query token may not see."""
    missing = selecting(tokens([0, 19, -1], [0, 5, 15], [3, -1, -1], [-1, -1, -1]))
    missing |= {"block_table": np.array([[1, 99], [99, 99]], np.int32)}
    cpu_attn.attention_with_kv_cache(**missing)
    missing["selected_tokens"] = tokens([0, 16, -1], *missing["selected_tokens"][1:])
    refuses(cpu_attn.attention_with_kv_cache, missing, ValueError, "block_table: request 0: position 1", "block 99")
    missing["block_table"] = missing["block_table"][:, :1].copy()
    refuses(cpu_attn.attention_with_kv_cache, missing, ValueError, "block_table: request 0: needs 2 blocks")


def test_no_columns_are_no_keys() -> None:
    args = selecting(np.zeros((4, 0), np.int32)) | {"s_aux": np.full(4, 2, F32)}
    args["output"][:] = 7
    cpu_attn.attention_with_kv_cache(**args)
    assert not args["output"].any() and (args["lse"] == 2).all()


def test_the_workspace_does_not_grow_with_what_is_selected() -> None:
    def workspace(seq_len: int, most: int) -> int:
        lens = np.array([seq_len], np.int32)
        step = (1, 8, 1, 64, lens, "float32", np.array([0, 1], np.int32))
        with threads(1):
            return cpu_attn.get_scheduler_metadata(*step, max_selected_tokens=most).workspace_bytes

    assert workspace(4096, 2048) == workspace(1 << 20, 2048) == workspace(1 << 20, 1 << 20)


@pytest.mark.parametrize("engine", ["native", "onednn", "reference"])
@pytest.mark.parametrize("name", ["tokens-most-of-3000", "tokens-latent-2500"])
def test_segments_that_are_handed_out_change_no_bit(name: str, engine: str) -> None:
    if not any(e.name == engine and e.available for e in cpu_attn.engines()):
        pytest.skip(f"no {engine} here")
    problem = build(next(case for case in cases("quick", "bfloat16") if case.name == name))
    memory = written(problem)
    one = run(problem, engine=engine, num_threads=1, memory=memory)
    assert all(map(same_bits, one, run(problem, engine=engine, num_threads=4, memory=memory)))
    with threads(4, forced=True):
        lens = problem.seq_lens[:1]
        step = (1, 16, 1, 576, lens, "float32", np.array([0, 1], np.int32))
        assert cpu_attn.get_scheduler_metadata(*step, max_selected_tokens=2000).num_splits == 1


def test_more_columns_than_anybody_has_keys() -> None:
    case = next(case for case in cases("quick") if case.name == "tokens-half")
    problem = build(case)
    rows = problem.selected_tokens
    assert rows is not None
    wide = np.concatenate([rows, np.full((len(rows), 500), -1, np.int32)], axis=1)
    wider = dataclasses.replace(problem, selected_tokens=wide)
    assert all(map(same_bits, run(problem), run(wider)))
    wide[0, -1] = 0
    with pytest.raises(ValueError, match=f"position {wide.shape[1] - 1} holds token 0 after -1"):
        run(wider)


def mla() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    kv_cache, query = rng.standard_normal((9, 16, 24), F32), rng.standard_normal((2, 4, 24), F32)
    return query, kv_cache, np.zeros((2, 4, 16), F32), np.array([0, 2], np.int32), np.array([130], np.int32)


def test_mla_takes_them() -> None:
    query, kv_cache, output, starts, lens = mla()
    table, selected = np.arange(9, dtype=np.int32)[None], tokens([0, 3, 128, 129], [7, 100, 129, -1])
    plan = cpu_attn.get_scheduler_metadata(
        *(1, 4, 1, 24, lens, "float32", starts), head_size_v=16, kv_cache_layout="NHD", max_selected_tokens=4
    )
    cpu_attn.attention_mla(query, kv_cache, output, starts, lens, 0.2, True, table, plan, selected_tokens=selected)
    keys = kv_cache.reshape(-1, 1, 24)[:130]
    want, _ = reference.attention(query, [keys], [keys[..., :16]], starts, lens, 0.2, selected_tokens=selected)
    assert reference.relative_rms(output, want, starts).max() <= reference.BUDGET["float32"]


def test_paged_kv_cache_takes_them() -> None:
    rng = np.random.default_rng(7)
    cache = cpu_attn.PagedKVCache(8, 16, num_kv_heads=2, head_size=16)
    key, value = (rng.standard_normal((100, 2, 16), F32) for _ in range(2))
    cache.update(key, value, np.arange(100, dtype=np.int64))
    query, table = rng.standard_normal((1, 4, 16), F32), np.arange(8, dtype=np.int32)[None]
    starts, lens, selected = np.array([0, 1], np.int32), np.array([100], np.int32), tokens([1, 6, 99])
    plan = cache.plan(starts, lens, num_heads=4, max_selected_tokens=3)
    got = cache.attend(query, table, plan, selected_tokens=selected)
    want, _ = reference.attention(query, [key], [value], starts, lens, 0.25, selected_tokens=selected)
    assert reference.relative_rms(got, want, starts).max() <= reference.BUDGET["float32"]


def test_a_case_fails_where_a_token_attends_what_it_did_not_select() -> None:
    """The oracle looks at them."""
    problem = build(next(case for case in cases("quick") if case.name == "tokens-all"))
    output, lse = run(problem)
    assert problem.selected_tokens is not None and check(problem, output, lse).ok
    fewer = problem.selected_tokens.copy()
    fewer[0, 3:] = -1
    assert not check(dataclasses.replace(problem, selected_tokens=fewer), output, lse).ok
