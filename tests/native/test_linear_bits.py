# SPDX-License-Identifier: Apache-2.0
"""Linear attention: what must not change a bit, and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn.linear import get_linear_attention_metadata, linear_attention_with_state_cache

from ..cases.judge import same_bits
from ..cases.linear_cases import Case, Problem, build, differences, errors, run
from ..harness.kernels import KERNELS

F32 = np.float32
MIXED = Case(lens=(1, 70, 3, 130, 64, 1), checkpoints=((1, 17), (3, 64), (3, 130)))
# Some rows of chunks go another way: by FMA in bfloat16, or token by token.
FILLS = ("", "unread_channels", "growth")
# bfloat16 may go by products of words, the others go by FMA.
EACH = pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])


@EACH
@pytest.mark.parametrize("variant", ["gdn", "kda", "ssd_raw"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_batch_and_threads(isa: str, dtype: str, variant: str, layout: str) -> None:
    for fill in FILLS:
        problem = build(replace(MIXED, variant=variant, state_layout=layout, dtype=dtype, fill=fill))
        assert not list(differences(problem, run(problem, isa), isa, (1, 2, 3, 5))), fill


class Prompt:
    """A prompt that is computed by calls of any lengths, one after the other, from a state or from none."""

    def __init__(self, problem: Problem, isa: str) -> None:
        self.problem, self.isa = problem, isa

    def run(self, cuts: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        c, a = self.problem.case, self.problem.arrays
        cache, output = np.zeros((1, c.num_v_heads, c.head_k_dim, c.head_v_dim), F32), np.empty_like(a["value"])
        if c.state_layout == "VK":
            cache = np.ascontiguousarray(cache.transpose(0, 1, 3, 2))
        at, tokens = 0, len(output)
        for n in cuts:
            rows = slice(at, at + n)
            plan = get_linear_attention_metadata(
                np.array([0, n], np.int32),
                c.dtype,
                *(c.num_k_heads, c.num_v_heads, c.head_k_dim, c.head_v_dim),
                seq_lens=np.array([at + n], np.int32),
                isa=self.isa,
            )
            options = {
                name: x[rows] if isinstance(x, np.ndarray) and x.ndim > 1 and len(x) == tokens else x
                for name, x in self.problem.options.items()
            }
            arrays = (a["query"][rows], a["key"][rows], a["value"][rows], output[rows], cache, np.zeros(1, np.int32))
            linear_attention_with_state_cache(*arrays, plan, state_layout=c.state_layout, **options)
            at += n
        return output, cache


@EACH
@pytest.mark.parametrize("variant", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_cuts(isa: str, dtype: str, variant: str, layout: str) -> None:
    """A prompt that is cut at multiples of 64 has the same bits; cut elsewhere it stays within the budget."""
    case = Case(variant, (194,), starts=(-1,), state_layout=layout, dtype=dtype)
    problem = build(case)
    prompt = Prompt(problem, isa)
    want = prompt.run([194])
    for cuts in ([64, 130], [128, 66], [64, 64, 64, 2], [192, 2]):
        assert all(map(same_bits, prompt.run(cuts), want)), cuts
    assert all(map(same_bits, prompt.run([100, 94]), prompt.run([100, 28, 66])))  # chunks begin where the request's do
    for cuts in ([100, 94], [1] * 194, [63, 1, 65, 65]):
        output, cache = prompt.run(cuts)
        state = cache[0] if layout == "KV" else cache[0].transpose(0, 2, 1)
        got = run(problem, isa)
        got.output, got.states = output, [state]
        assert errors(problem, got)[0] <= 1, cuts


@EACH
@pytest.mark.parametrize("variant", ["gdn", "kda", "ssd_raw"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_checkpoints(isa: str, dtype: str, variant: str, layout: str) -> None:
    """They change no bit of anything else, and one within a chunk has the bits of a call that ends there, unless it is
    among the first tokens, of which a call goes another way."""
    for fill in FILLS:
        check_checkpoints(isa, Case(variant, (130, 3), starts=(-1, -1), state_layout=layout, dtype=dtype, fill=fill))


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "bfloat16"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_forgetting(isa: str, layout: str) -> None:
    """Where decays of channels part a chunk into pieces."""
    case = Case("kda", dtype="bfloat16", fill="forgetting", state_layout=layout)
    check_checkpoints(isa, replace(case, lens=(130, 3), starts=(-1, -1)))
    problem = build(replace(MIXED, variant="kda", dtype="bfloat16", fill="forgetting", state_layout=layout))
    assert not list(differences(problem, run(problem, isa), isa, (1, 2, 3)))


def check_checkpoints(isa: str, case: Case) -> None:
    after = tuple((0, n) for n in (1, 5, 16, 24, 30, 64, 64, 80, 88, 129, 130))
    plain = run(build(case), isa)
    problem = build(replace(case, checkpoints=(*dict.fromkeys(after), (1, 1), (1, 2), (1, 3))))
    got = run(problem, isa)
    assert same_bits(got.output, plain.output) and all(map(same_bits, got.states, plain.states))
    assert errors(problem, got)[0] <= 1
    assert same_bits(got.checkpoints[0, 130], got.states[0]) and same_bits(got.checkpoints[1, 3], got.states[1])
    few = 5 if (isa, case.dtype) != ("amx", "bfloat16") else 24 if case.variant.startswith("kda") else 16
    for n in (few, 30, 64, 64 + max(few, 16)):
        short = build(replace(case, lens=(n,), starts=(-1,)))
        short.arrays = {name: x[:n] for name, x in problem.arrays.items()}
        short.options = {
            name: x[:n] if isinstance(x, np.ndarray) and x.ndim > 1 and len(x) == 133 else x
            for name, x in problem.options.items()
        }
        assert same_bits(run(short, isa).states[0], got.checkpoints[0, n]), n


def test_drafts() -> None:
    """The state after each draft token is had in one call, and the next one goes on from the one that was accepted."""
    problem = build(Case("gdn", (4,), starts=(10,), checkpoints=((0, 1), (0, 2), (0, 3), (0, 4))))
    got = run(problem)
    assert errors(problem, got)[0] <= 1
    follow = build(Case("gdn", (1,), starts=(12,), seed=3))
    follow.before = [got.checkpoints[0, 2]]
    plan = get_linear_attention_metadata(
        follow.query_start_loc, "float32", 2, 4, 32, 32, has_initial_state=np.ones(1, np.bool_)
    )
    cache = np.full((5, 4, 32, 32), np.nan, F32)
    for (_, n), state in got.checkpoints.items():
        cache[n] = state
    a, output, slots = follow.arrays, np.empty_like(follow.arrays["value"]), np.zeros(1, np.int32)
    options = follow.options | {"initial_state_indices": np.array([2], np.int32)}
    linear_attention_with_state_cache(a["query"], a["key"], a["value"], output, cache, slots, plan, **options)
    again = run(follow)
    again.output, again.states = output, [cache[0]]
    assert errors(follow, again)[0] <= 1 and (cache[2] == got.checkpoints[0, 2]).all()
