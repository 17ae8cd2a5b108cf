# SPDX-License-Identifier: Apache-2.0
"""merge_states: attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference
from cpu_attn._threads import threads

from ..cases.case import Case
from ..cases.formats import DTYPES, numpy_dtype
from ..cases.judge import check, same_bits
from ..cases.problem import build
from ..cases.run import run
from ..python.test_arrays import Capsule

TOKENS, HEADS, SIZE = 5, 3, 40


def states(dtype: str, parts: int, size: int = SIZE, seed: int = 0) -> tuple[NDArray[Any], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((parts, TOKENS, HEADS, size), np.float32).astype(numpy_dtype(dtype))
    return outs, rng.uniform(-8, 8, (parts, HEADS, TOKENS)).astype(np.float32)


def oracle(outs: NDArray[Any], lses: NDArray[Any]) -> tuple[reference.Float64, reference.Float64]:
    """A lse of either infinity: that part saw nothing."""
    with np.errstate(invalid="ignore"):
        lses = np.where(np.isinf(lses), -np.inf, lses.astype(np.float64))
        lse = np.logaddexp.reduce(lses)
        weights = np.exp(lses - lse).transpose(0, 2, 1)[..., None]
        seen = (lses != -np.inf).transpose(0, 2, 1)[..., None]
        return np.where(seen, weights * outs.astype(np.float64), 0.0).sum(axis=0), lse


def judge(got: tuple[Any, Any], want: tuple[Any, Any], dtype: str) -> None:
    with np.errstate(invalid="ignore"):
        for g, w in zip(got, want, strict=True):
            g = g.astype(np.float64)
            assert (np.isnan(g) == np.isnan(w)).all()
            assert (np.isinf(g) == np.isinf(w)).all()
            real = np.isfinite(w)
            assert reference.rms((g - w)[real]) <= reference.BUDGET[dtype] * reference.rms(w[real])


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 40, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_oracle(dtype: str, size: int, parts: int) -> None:
    outs, lses = states(dtype, parts, size)
    got = cpu_attn.merge_states(outs, lses)
    assert got[0].dtype == outs.dtype
    assert got[1].dtype == np.float32
    judge(got, oracle(outs, lses), dtype)
    again = cpu_attn.merge_states(list(outs), tuple(lses))
    assert same_bits(again[0], got[0])
    assert same_bits(again[1], got[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nothing", [-np.inf, np.inf])
def test_parts_that_saw_nothing_and_lses_that_are_no_numbers(nothing: float, dtype: str) -> None:
    outs, lses = states(dtype, 3)
    outs[1, 0, 0], lses[1, 0, 0] = np.nan, nothing  # token 0, head 0
    outs[:, 1, 1], lses[:, 1, 1] = np.nan, nothing
    lses[0, 2, 2] = np.nan
    lses[:, 0, 3] = np.nan, np.inf, -np.inf
    lses[1, 1, 4], lses[0, 1, 4] = -3e38, 3e38
    lses[:, 2, 4] = 80, 1000, 999
    want, want_lse = oracle(outs, lses)
    want[1, 1], want_lse[1, 1] = 0, -np.inf  # not NaN
    assert np.isnan(want[2, 2]).all()
    assert np.isnan(want[3, 0]).all()
    got, lse = cpu_attn.merge_states(outs, lses)
    big = (1, 4)
    np.testing.assert_allclose(lse[big], want_lse[big], rtol=1e-6)
    lse[big] = want_lse[big] = 0
    judge((got, lse), (want, want_lse), dtype)


@pytest.mark.parametrize("size", [32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads"), [(256, 4), (613, 8), (64, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases_of_vllm(dtype: str, tokens: int, heads: int, size: int) -> None:
    """What its tests of merge_attn_states have: one row in ten of either part, not of both, saw nothing and has +inf.
    Rows are independent: more tokens and heads would say no more."""
    rng = np.random.default_rng(size)
    outs = rng.standard_normal((2, tokens, heads, size), np.float32).astype(numpy_dtype(dtype))
    lses = rng.standard_normal((2, heads, tokens), np.float32)
    drawn = rng.random((heads, tokens))
    lses[0][drawn < 0.1] = np.inf
    lses[1][drawn > 0.9] = np.inf
    judge(cpu_attn.merge_states(outs, lses), oracle(outs, lses), dtype)


@pytest.mark.parametrize("engine", [engine.name for engine in cpu_attn.engines() if engine.available])
def test_rows_that_overflowed_are_no_rows_that_saw_nothing(engine: str) -> None:
    part = build(Case("part", (1,), (9,), sinks="moderate"))
    part.s_aux = np.full(part.case.num_heads, np.inf, np.float32)
    output, lse = run(part, engine=engine)
    assert np.isnan(lse).all()
    merged, lse = cpu_attn.merge_states([output, np.zeros_like(output)], [lse, np.zeros_like(lse)])
    assert np.isnan(merged).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_request_in_parts(engine: str, dtype: str) -> None:
    """Keys cut at arbitrary points, each part a request of its own. The sink is in one part only."""
    cuts = [0, 1, 37, 100, 1130, 1500]
    case = Case("parts", (1,), (cuts[-1],), head_size=24, causal=False, sinks="moderate", dtype=dtype)
    whole = build(case)
    outs, lses = [], []
    for i, (first, last) in enumerate(pairwise(cuts)):
        part = build(Case("part", (1,), (last - first,), head_size=24, causal=False, dtype=dtype))
        part.query, part.scale = whole.query, whole.scale
        part.key, part.value = [whole.key[0][first:last]], [whole.value[0][first:last]]
        part.s_aux = whole.s_aux if i == 2 else None
        output, lse = run(part, engine=engine)
        outs.append(output)
        lses.append(lse)
    result = check(whole, *cpu_attn.merge_states(outs, lses))
    assert result.errors[0] < (1 if dtype == "float32" else 1.5), result.message  # the parts are rounded, too
    assert result.lse_error < 1


def test_outputs_given_and_strides() -> None:
    outs, lses = states("float32", 3)
    want = cpu_attn.merge_states(outs, lses)
    wide = np.full((TOKENS, HEADS + 2, SIZE + 5), np.nan, np.float32)
    log = np.full((HEADS, TOKENS + 1), np.nan, np.float32)
    out, lse = wide[::-1, 1:-1, :SIZE], log[:, 1:]
    got = cpu_attn.merge_states([x[::-1][::-1] for x in outs], lses, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert same_bits(out, want[0])
    assert same_bits(lse, want[1])
    assert np.isnan(wide[:, 0]).all()
    assert np.isnan(wide[:, :, SIZE:]).all()
    assert np.isnan(log[:, 0]).all()


def test_stacked_arrays_that_are_nothing_but_dlpack() -> None:
    outs, lses = states("float32", 3)
    want = cpu_attn.merge_states(outs, lses)
    got = cpu_attn.merge_states(Capsule(np.stack(outs)), Capsule(np.stack(lses)))
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


def test_many_rows_on_threads() -> None:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((4, 3000, 8, 64), np.float32)
    lses = rng.standard_normal((4, 8, 3000), np.float32)
    with threads(3):
        judge(cpu_attn.merge_states(outs, lses), oracle(outs, lses), "float32")


def test_no_rows() -> None:
    out, lse = cpu_attn.merge_states(np.empty((2, 0, 3, 8), np.float32), np.empty((2, 3, 0), np.float32))
    assert out.shape == (0, 3, 8)
    assert lse.shape == (3, 0)


def broken() -> list[Any]:
    outs, lses = states("float32", 2)
    one, log = outs[0].copy(), lses[0].copy()
    return [
        ((outs[:0], lses[:0]), ValueError, "outs: no parts"),
        ((list(outs), [log]), ValueError, "lses: 1 parts, outs has 2"),
        (([one, one[:, :2]], lses), ValueError, r"outs\[1\]: axis 1 is 2, expected num_heads = 3"),
        (([one, one.astype(np.float16)], lses), TypeError, r"outs\[1\]: dtype float16"),
        ((outs.astype(np.float64), lses), TypeError, "outs: dtype float64, expected float32 or float16 or bfloat16$"),
        ((outs, [log, log.astype(np.float16)]), TypeError, r"lses\[1\]: dtype float16"),
        ((outs, [log, log[:, :-1]]), ValueError, r"lses\[1\]: axis 1 is 4, expected T = 5"),
        ((outs[..., ::2], lses), ValueError, "last axis"),
        ((outs, lses, one[:-1]), ValueError, "out: axis 0 is 4, expected T = 5"),
        ((outs, lses, outs[1]), ValueError, r"out: shares memory with outs\[1\]"),
        ((outs, lses, np.broadcast_to(one[:1], one.shape)), ValueError, "out: is read-only"),
        ((outs, lses, None, lses[0]), ValueError, r"lse: shares memory with lses\[0\]"),
        ((outs, lses, None, log.astype(np.float16)), TypeError, "lse: dtype float16"),
        ((outs[:, :, 0], lses), ValueError, r"outs\[0\]: 2 axes, expected 3"),
        ((3, lses), TypeError, "outs: expected an array"),
        ((np.zeros((), np.float32), lses), TypeError, "outs: expected a sequence"),
        ((outs, np.zeros((), np.float32)), TypeError, "lses: expected a sequence"),
    ]


@pytest.mark.parametrize("i", range(len(broken())))
def test_errors(i: int) -> None:
    arguments, error, match = broken()[i]
    names = dict(zip(("out", "lse"), arguments[2:], strict=False))
    with pytest.raises(error, match=match):
        cpu_attn.merge_states(*arguments[:2], **names)


def test_inputs_are_only_read() -> None:
    outs, lses = states("bfloat16", 2)
    copies = outs.copy(), lses.copy()
    cpu_attn.merge_states(outs, lses)
    assert same_bits(outs, copies[0])
    assert same_bits(lses, copies[1])
