# SPDX-License-Identifier: Apache-2.0
"""The oracle against loops over Python floats and against closed forms; the judge against made-up errors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cpu_attn import reference
from cpu_attn.tests.cases.case import Case
from cpu_attn.tests.cases.formats import DTYPES, numpy_dtype
from cpu_attn.tests.cases.judge import check, same_bits
from cpu_attn.tests.cases.levels import LEVELS, cases, invariant
from cpu_attn.tests.cases.problem import Problem, alone, build
from cpu_attn.tests.cases.trees import TREES

SMALL = [
    Case("plain", (3, 1), (5, 4), 4, 2, 3),
    Case("bidirectional", (3, 6), (5, 2), 2, 2, 3, causal=False),
    Case("more-queries-than-keys", (5,), (2,), 2, 1, 3),
    Case("window", (6,), (9,), 2, 1, 3, sliding_window=3),
    Case("window-bidirectional", (6,), (9,), 2, 1, 3, sliding_window=3, causal=False),
    Case("window-pair", (6, 12), (9, 7), 2, 1, 3, sliding_window=(1, 2), causal=False),
    Case("window-right-causal", (6,), (9,), 2, 1, 3, sliding_window=(-1, 2)),
    Case("dynamic", (4, 4), (6, 6), 2, 1, 3, dynamic_causal=(0, 1), sliding_window=2),
    Case("dynamic-over-bidirectional", (4, 4), (6, 6), 2, 1, 3, causal=False, dynamic_causal=(0, 1)),
    Case("alibi", (4, 2), (6, 5), 6, 3, 3, alibi=0.7),
    Case("softcap", (4, 2), (6, 5), 2, 1, 3, softcap=0.8),
    Case("sinks", (4, 5), (6, 3), 6, 2, 3, sinks="mixed"),
    Case("sizes", (4, 0, 1), (6, 4, 0), 3, 1, 5, head_size_v=2, sinks="moderate"),
    Case("spans", (6, 3), (9, 3), 2, 1, 3, mm_prefix_range=(((2, 4), (6, 20)), ((0, 1),))),
    Case("spans-window", (6,), (9,), 2, 1, 3, sliding_window=2, mm_prefix_range=(((2, 4), (5, 8)),)),
    Case("spans-both", (6,), (9,), 2, 1, 3, sliding_window=(1, 1), causal=False, mm_prefix_range=(((1, 6),),)),
    Case("spans-clamped", (7,), (9,), 2, 1, 3, sliding_window=3, clamped=True, mm_prefix_range=(((2, 8),),)),
    Case(
        "spans-clamped-both",
        *((7,), (9,), 2, 1, 3),
        sliding_window=(2, 1),
        causal=False,
        clamped=True,
        mm_prefix_range=(((2, 8),),),
    ),
    Case("documents", (6, 2), (9, 4), 2, 1, 3, document_start_loc=((0, 4, 5, 8, 30), ())),
    Case("documents-both", (6,), (9,), 2, 1, 3, causal=False, document_start_loc=((0, 4, 5),)),
    Case("documents-spans", (6,), (9,), 2, 1, 3, document_start_loc=((0, 5),), mm_prefix_range=(((2, 4), (5, 7)),)),
    Case("tree", (7, 1, 0), (10, 4, 3), 2, 1, 3, tree="binary"),
    Case("tree-window", (7, 2), (10, 2), 2, 1, 3, tree="binary", sliding_window=2),
    Case("tree-bits", (6, 9), (9, 11), 2, 1, 3, tree="bits", sliding_window=(2, -1)),
    Case("selected", (4, 2), (9, 6), 4, 2, 3, block_size=2, selected=0.5),
    Case("query-blocks", (5, 0, 2), (9, 3, 6), 4, 2, 3, block_size=2, selected=0.5, query_block=2),
    Case("by-query-head", (5, 0, 2), (9, 3, 6), 4, 2, 3, block_size=2, selected=0.5, select_by_query_head=True),
    Case("all", (4, 2), (8, 7), 6, 3, 4, alibi=0.3, softcap=2.0, sinks="mixed", sliding_window=(3, 1)),
]


def sees(case: Case, r: int, i: int, j: int) -> bool:
    causal = case.causal if case.dynamic_causal is None else case.dynamic_causal[r] != 0
    own = case.seq_lens[r] - case.query_lens[r] + i
    if case.tree:
        return sees_in_tree(case, r, i, j)
    if case.document_start_loc and any(min(own, j) < start <= max(own, j) for start in case.document_start_loc[r]):
        return False
    if case.mm_prefix_range and any(a <= own <= b and a <= j <= b for a, b in case.mm_prefix_range[r]):
        return not case.clamped or j >= own or sees_by_distance(case, causal, j - own)
    return sees_by_distance(case, causal, j - own)


def sees_in_tree(case: Case, r: int, i: int, j: int) -> bool:
    assert case.tree
    tree, context = TREES[case.tree](case.query_lens[r]), case.seq_lens[r] - case.query_lens[r]
    places = list(range(context)) + [
        context + sum(row[k] for k in range(len(row)) if k != n) for n, row in enumerate(tree)
    ]
    return (j < context or bool(tree[i, j - context])) and sees_by_distance(
        case, False, min(0, places[j] - places[context + i])
    )


def sees_by_distance(case: Case, causal: bool, ahead: int) -> bool:
    if causal and ahead > 0:
        return False
    if isinstance(case.sliding_window, tuple):
        left, right = case.sliding_window
        return (left < 0 or -ahead <= left) and (right < 0 or ahead <= right)
    return case.sliding_window < 0 or abs(ahead) < case.sliding_window


def row(p: Problem, r: int, i: int, h: int) -> tuple[list[float], float]:
    """One row of output and lse in Python floats, with nothing but math.exp."""
    case = p.case
    kv_head = h // (case.num_heads // case.num_kv_heads)
    q = [float(x) for x in p.query[int(p.query_start_loc[r]) + i, h]]
    own = case.chosen(r)[i // case.query_block if case.query_block else 0, h if case.select_by_query_head else kv_head]
    weights, values = [], []
    for j in range(case.seq_lens[r]):
        if sees(case, r, i, j) and own[j // case.block_size]:
            s = p.scale * sum(a * float(b) for a, b in zip(q, p.key[r][j, kv_head], strict=True))
            if case.softcap:
                s = case.softcap * math.tanh(s / case.softcap)
            if p.alibi_slopes is not None:
                s += float(p.alibi_slopes[h]) * (j - (case.seq_lens[r] - case.query_lens[r] + i))
            weights.append(s)
            values.append([float(x) for x in p.value[r][j, kv_head]])
    logits = [*weights, float(p.s_aux[h])] if p.s_aux is not None else weights
    largest = max(logits, default=-math.inf)
    if largest == -math.inf:
        return [0.0] * case.value_size, -math.inf
    total = sum(math.exp(s - largest) for s in logits)
    out = [
        sum(math.exp(s - largest) / total * v[d] for s, v in zip(weights, values, strict=True))
        for d in range(case.value_size)
    ]
    return out, largest + math.log(total)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_is_what_loops_say(case: Case, dtype: str) -> None:
    problem = build(dataclasses.replace(case, dtype=dtype))
    output, lse = problem.expected
    assert output.dtype == lse.dtype == np.float64
    for r, q_len in enumerate(case.query_lens):
        for i in range(q_len):
            for h in range(case.num_heads):
                token = int(problem.query_start_loc[r]) + i
                want, want_lse = row(problem, r, i, h)
                np.testing.assert_allclose(output[token, h], want, rtol=1e-12, atol=1e-14)
                np.testing.assert_allclose(lse[h, token], want_lse, rtol=1e-12)


def ask(query, key, value, **options):
    """One request of one head: query [q_len, D], key and value [seq_len, D] -> output [q_len, D], lse [q_len]."""
    query, key, value = (np.asarray(x, np.float64)[:, None] for x in (query, key, value))
    start, lens = np.array([0, len(query)], np.int32), np.array([len(key)], np.int32)
    output, lse = reference.attention(query, [key], [value], start, lens, **{"scale": 1.0, "causal": False, **options})
    return output[:, 0], lse[0]


def test_equal_scores_average() -> None:
    value = np.arange(14.0).reshape(7, 2)
    output, lse = ask([[2.0, 0.0]], np.tile([3.0, 9.0], (7, 1)), value)
    np.testing.assert_allclose(output, [value.mean(axis=0)])
    np.testing.assert_allclose(lse, [6 + math.log(7)])


def test_one_key_is_its_value() -> None:
    output, lse = ask([[2.0], [5.0]], [[3.0]], [[7.0]], scale=0.5)
    np.testing.assert_allclose(output, [[7.0], [7.0]])
    np.testing.assert_allclose(lse, [3.0, 7.5])


def test_huge_scores_do_not_overflow() -> None:
    output, lse = ask([[1e4], [-1e4]], [[1e4], [-1e4]], [[7.0], [8.0]])
    np.testing.assert_array_equal(output, [[7.0], [8.0]])
    np.testing.assert_array_equal(lse, [1e8, 1e8])


def test_sink_is_a_key_without_a_value() -> None:
    value = [[1.0], [2.0], [6.0]]
    output, lse = ask([[0.0]], np.zeros((3, 1)), value, s_aux=np.zeros(1))
    np.testing.assert_allclose(output, [[9 / 4]])
    np.testing.assert_allclose(lse, [math.log(4)])
    output, lse = ask([[0.0]], np.zeros((3, 1)), value, s_aux=np.array([-np.inf]))
    np.testing.assert_allclose(output, [[3.0]])
    np.testing.assert_allclose(lse, [math.log(3)])


def test_alibi_of_log_2_halves_with_distance() -> None:
    n = 6
    output, lse = ask(np.zeros((1, 1)), np.zeros((n, 1)), np.eye(n), causal=True, alibi_slopes=np.array([math.log(2)]))
    weights = 0.5 ** np.arange(n - 1, -1, -1)
    np.testing.assert_allclose(output, [weights / weights.sum()])
    np.testing.assert_allclose(lse, [math.log(weights.sum())])


def test_softcap_saturates() -> None:
    output, lse = ask([[1e6]], [[1.0], [-1.0]], [[1.0], [0.0]], softcap=math.log(3) / 2)
    np.testing.assert_allclose(output, [[0.75]])
    np.testing.assert_allclose(lse, [math.log(3**0.5 + 3**-0.5)])


def test_rows_that_see_nothing() -> None:
    output, lse = ask(np.ones((3, 1)), np.ones((1, 1)), [[5.0]], causal=True)
    np.testing.assert_array_equal(output, [[0.0], [0.0], [5.0]])
    np.testing.assert_array_equal(lse, [-np.inf, -np.inf, 1.0])
    output, lse = ask(np.ones((2, 1)), np.ones((0, 1)), np.ones((0, 1)), s_aux=np.array([0.25]))
    np.testing.assert_array_equal(output, [[0.0], [0.0]])
    np.testing.assert_array_equal(lse, [0.25, 0.25])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_odd_numbers_reach_only_who_sees_them(odd: float) -> None:
    ones, value = np.ones((3, 1)), np.array([[1.0], [2.0], [odd]])
    output, lse = ask(ones, ones, value, causal=True)
    np.testing.assert_allclose(output, [[1.0], [1.5], [odd]])
    assert np.isfinite(lse).all()
    output, lse = ask(ones, [[1.0], [1.0], [np.nan]], ones, causal=True)
    np.testing.assert_allclose(output, [[1.0], [1.0], [np.nan]])
    np.testing.assert_allclose(lse, [1.0, 1 + math.log(2), np.nan])


VISIBLE = {
    (True, -1): ["11100", "11110", "11111"],
    (False, -1): ["11111", "11111", "11111"],
    (True, 2): ["01100", "00110", "00011"],
    (False, 2): ["01110", "00111", "00011"],
    (False, (1, 0)): ["01100", "00110", "00011"],
    (False, (-1, 1)): ["11110", "11111", "11111"],
    (False, (0, -1)): ["00111", "00011", "00001"],
    (True, (-1, 1)): ["11100", "11110", "11111"],
    (False, 1): ["00100", "00010", "00001"],
}


@pytest.mark.parametrize(("how", "want"), VISIBLE.items(), ids=str)
def test_visible(how: tuple[bool, reference.Window], want: list[str]) -> None:
    mask = reference.visible(3, 5, *how)
    assert ["".join(str(int(see)) for see in seen) for seen in mask] == want


@pytest.mark.parametrize("window", [0, -2, (-2, 3), (3, -2)])
def test_meaningless_windows_are_refused(window: reference.Window) -> None:
    with pytest.raises(ValueError, match="sliding_window"):
        reference.visible(3, 5, True, window)


def test_relative_rms() -> None:
    start = np.array([0, 2, 2, 3, 4], np.int32)
    want = np.array([3.0, 4.0, 0.0, 1e-44]).reshape(4, 1, 1)
    got = np.array([3.0, 4.5, 0.0, 0.0], np.float32).reshape(4, 1, 1)
    errors = reference.relative_rms(got, want, start)
    np.testing.assert_allclose(errors, [0.1, 0.0, 0.0, 1e-44 / 2.0**-126])
    assert reference.relative_rms(np.float32([[[1e-30]]]), np.zeros((1, 1, 1)), np.array([0, 1]))[0] > 1e7
    assert math.isnan(reference.relative_rms(np.float32([[[np.nan]]]), np.ones((1, 1, 1)), np.array([0, 1]))[0])


# ---- the judge and the cases ----


def right(dtype: str = "float32", **fields) -> tuple[Problem, np.ndarray, np.ndarray]:
    """A problem and its answer, rounded to the dtype."""
    case = Case("judged", (3, 20), (30, 20), dtype=dtype, **fields)
    problem = build(case)
    output, lse = problem.expected
    return problem, output.astype(numpy_dtype(dtype)), lse.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_right_answer_passes(dtype: str) -> None:
    result = check(*right(dtype))
    assert result.ok
    assert not result.message
    assert result.worst < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_answers_fail(dtype: str) -> None:
    problem, output, lse = right(dtype)
    budget = reference.BUDGET[dtype]
    wrong = (output.astype(np.float64) * (1 + 1.2 * budget)).astype(np.float32 if dtype == "float32" else output.dtype)
    assert "relative RMS" in check(problem, wrong, lse).message
    assert "lse of head" in check(problem, output, lse + np.float32(9 * budget)).message
    wrong = output.copy()
    wrong[7, 2] = wrong[7, 1]
    assert "token 7 head 2" in check(problem, wrong, lse).message
    for odd in (np.nan, np.inf):
        wrong = output.copy()
        wrong[4, 1, 3] = odd
        result = check(problem, wrong, lse)
        assert not result.ok
        assert result.worst == math.inf
        assert "token 4 head 1" in result.message


def test_a_missing_nan_and_a_number_where_nothing_is_seen_fail() -> None:
    problem, output, lse = right(fill="odd-query")
    assert check(problem, output, lse).ok
    assert "NaN is missing" in check(problem, np.nan_to_num(output), lse).message
    case = Case("judged", (9,), (4,))
    problem = build(case)
    output, lse = (x.astype(np.float32) for x in problem.expected)
    assert check(problem, output, lse).ok
    output[0, 0, 0] = 1e-42
    assert "sees nothing" in check(problem, output, lse).message
    assert "lse of head" in check(problem, problem.expected[0].astype(np.float32), np.maximum(lse, -1e30)).message


def test_same_bits() -> None:
    a = np.array([1.0, np.nan, 0.0], np.float32)
    b = a.copy()
    b.view(np.uint32)[1] ^= 1
    assert same_bits(a, b)
    b[2] = -0.0
    assert not same_bits(a, b)


def test_levels_nest_and_are_deterministic() -> None:
    names = [{case.name for case in cases(level)} for level in LEVELS]
    assert names[0] < names[1] < names[2]
    assert len(names[2]) == len(cases("full"))
    assert all(case.name in names[i] for i, level in enumerate(LEVELS) for case in invariant(level))
    for case in cases("quick", "float16", seed=5):
        first, second = build(case), build(case)
        assert case.dtype == "float16"
        np.testing.assert_array_equal(first.query.view(np.uint16), second.query.view(np.uint16))
        np.testing.assert_array_equal(first.block_table, second.block_table)
    assert {case.name: case for case in cases("full", seed=5)}["random-3"] == cases("quick", seed=5)[-3]


def test_a_request_alone_has_the_same_answer() -> None:
    problem = build({case.name: case for case in cases("quick")}["mixed-everything"])
    output, lse = problem.expected
    for r in range(len(problem.seq_lens)):
        rows = slice(int(problem.query_start_loc[r]), int(problem.query_start_loc[r + 1]))
        lone_output, lone_lse = alone(problem, r).expected
        np.testing.assert_array_equal(lone_output, output[rows])
        np.testing.assert_array_equal(lone_lse, lse[:, rows])
