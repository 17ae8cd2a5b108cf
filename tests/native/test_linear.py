# SPDX-License-Identifier: Apache-2.0
"""Linear attention against the recurrence in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn._check.linear import GATES
from cpu_attn.linear import get_linear_attention_metadata, linear_attention_with_state_cache, reference

from ..cases import linear_cases
from ..cases.linear_cases import VARIANTS, Case, build, errors, run
from ..harness.kernels import KERNELS, ONE_DTYPE

F32 = np.float32
ENGINES = [(isa, dtype, "native") for isa, dtype in KERNELS] + [("auto", "float32", "reference")]


def holds(case: Case, isa: str, engine: str = "native") -> None:
    problem = build(case)
    worst, where = errors(problem, run(problem, isa, engine))
    assert worst <= 1, f"{case.name} on {engine} {isa}: {worst} of its budget in the {where}"


@pytest.mark.parametrize(("isa", "dtype", "engine"), ENGINES)
def test_cases(isa: str, dtype: str, engine: str) -> None:
    for case in linear_cases.cases("default", dtype):
        holds(case, isa, engine)


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_sizes(isa: str, dtype: str, layout: str) -> None:
    """Sizes around the lanes of a vector, few tokens and chunks, groups of value heads."""
    for dk, dv in ((1, 1), (8, 16), (15, 17), (33, 5), (64, 128), (130, 24)):
        for variant in ("gdn", "kda", "ssd"):
            case = Case(variant, (1, 4, 33), dtype=dtype, head_k_dim=dk, head_v_dim=dv, state_layout=layout)
            holds(replace(case, num_k_heads=1, num_v_heads=1), isa)
    for heads in (2, 5, 8):
        holds(Case("gdn", (1, 66), dtype=dtype, num_k_heads=1, num_v_heads=heads, state_layout=layout), isa)


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
@pytest.mark.parametrize("variant", ["gdn", "kda", "erase"])
def test_adversarial(isa: str, dtype: str, variant: str) -> None:
    fills = ["g_edges", "g_minus_infinity", "beta_edges", "zero_keys", "large"]
    fills += [] if variant == "erase" else ["beta_two"]
    for fill in fills:
        holds(Case(variant, (130, 2, 64), dtype=dtype, fill=fill), isa)


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
def test_equal_keys(isa: str, dtype: str) -> None:
    for variant in ("gdn", "kda"):
        holds(Case(variant, (1000,), dtype=dtype, fill="equal_keys", num_k_heads=1, num_v_heads=2), isa)


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "bfloat16"])
@pytest.mark.parametrize("variant", ["gdn", "erase", "ssd", "none"])
def test_large_numbers_that_nothing_reads(isa: str, variant: str) -> None:
    """What is large in queries, keys or states takes no digits from the rest: products of integers would have one scale
    for both."""
    for fill in ("unread_channels", "unread_keys", "unread_tokens", "unread_states"):
        holds(Case(variant, (70, 200), dtype="bfloat16", fill=fill, num_k_heads=1, num_v_heads=2), isa)


@pytest.mark.skipif(("avx2", "bfloat16") not in KERNELS, reason="no avx2, which always has products of integers")
@pytest.mark.parametrize("variant", ["gdn", "erase", "ssd_raw"])
def test_ordinary_numbers_go_by_integers(variant: str) -> None:
    """By FMA, which takes twice as long, states would err by some 1e-7."""
    problem = build(Case(variant, (256,), dtype="bfloat16", head_k_dim=128, head_v_dim=64))
    assert linear_cases.relative(run(problem, "avx2").states[0], problem.expected().states[0]) > 2e-5


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if isa == "amx" and dtype == "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fill", ["", "unread_channels"])
def test_tiles_keep_16_bits(isa: str, variant: str, fill: str) -> None:
    """Operands that are no bfloat16 have two parts in it: with one, states would err by some 1e-3."""
    case = Case(variant, (200,), dtype="bfloat16", head_k_dim=48, head_v_dim=80, fill=fill, starts=(9,))
    problem = build(case)
    got, want = run(problem, isa), problem.expected()
    assert linear_cases.relative(got.states[0], want.states[0]) < 5e-5
    assert linear_cases.relative(got.output, want.output) < 2.5e-3


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("variant", ["kda", "gdn2"])
def test_channels_that_forget(isa: str, dtype: str, variant: str) -> None:
    """Some channels keep all and others next to nothing, slowly, fast, or at single tokens, so that what they are
    divided by, where tiles multiply, would leave float32."""
    for decays in (
        [-0.7],
        [-5],
        [-30],
        [-90],
        [-0.01] * 9 + [-80],
        [-3] * 20 + [0] * 7,
        [0, -28],
        [-40] * 3 + [-0.1] * 5,
        [-1.7],  # the first piece has 16 tokens, so that tiles multiply: here and below
        [0] * 22 + [-60] * 6,
    ):
        problem = build(Case(variant, (130, 64, 5), dtype=dtype, starts=(9, -1, 70), checkpoints=((0, 66), (0, 78))))
        g = problem.options["g"]
        g[:, :, ::3].T[...] = np.resize(F32(decays), len(g))
        g[:, 1, 5] = 0
        assert errors(problem, run(problem, isa))[0] <= 1, decays


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
@pytest.mark.parametrize("size", [1e-33, 1e24])
def test_numbers_of_any_size(isa: str, dtype: str, size: float) -> None:
    """Results grow with values and states. At 1e-33 float32 has 5 digits where numbers below 2^-126 are 0."""
    size = 2.0 ** (-100 if dtype == "float32" and size < 1 else round(np.log2(size)))
    for variant, fill in itertools.product(("gdn", "kda", "ssd"), ("", "unread_channels")):
        problem = build(Case(variant, (70, 70), dtype=dtype, starts=(9, -1), fill=fill))
        problem.options.pop("D", None)
        want = problem.expected()
        problem.arrays["value"] *= F32(size)
        problem.before = [None if state is None else state * F32(size) for state in problem.before]
        got = run(problem, isa)
        assert linear_cases.relative(got.output.astype(np.float64) / size, want.output) <= reference.BUDGET[dtype]
        for state, expected in zip(got.states, want.states, strict=True):
            assert linear_cases.relative(state.astype(np.float64) / size, expected) <= reference.STATE_BUDGET[dtype]


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("size", [2.0**-120, 2.0**64, 2.0**110])
def test_norms_of_any_size(isa: str, dtype: str, size: float) -> None:
    """Rows of any size have the length 1 after their norm."""
    if dtype == "float16":
        size = 2.0**-14 if size < 1 else 2.0**12
    problem = build(Case("gdn", (70, 1), dtype=dtype))
    problem.options["norm_eps"] = 0.0
    for name in ("query", "key"):
        problem.arrays[name] *= F32(size)
    assert errors(problem, run(problem, isa))[0] <= 1
    problem.arrays["query"][3] = np.inf
    got = run(problem, isa)
    assert np.isnan(got.output[3].astype(F32)).all() and np.isfinite(got.output[4:].astype(F32)).all()


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
@pytest.mark.parametrize("variant", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_growing_states(isa: str, dtype: str, variant: str, layout: str) -> None:
    """Gates above 0, from no state and from one, in chunks and token by token."""
    gates = ([85, 5, -30], [0, -60, 60], [0.01, 0.3, -0.2], [-1, -1, 70, -75], [-0.2, 0, 0, -0.1, 1, -1], [-0.1, 1e-8])
    for g, start in itertools.product(gates, (-1, 9)):
        for tokens in (3, 4, 70) if g[0] < 80 else (3,):
            if start >= 0 and g[0] > 80:
                continue  # float32 does not hold e^90
            kept = tuple((0, n) for n in (2, 5, 21, 64) if n <= tokens)
            case = Case(variant, (tokens,), dtype=dtype, starts=(start,), state_layout=layout, checkpoints=kept)
            problem = build(case)
            problem.options["g"].T[...] = np.resize(F32(g), tokens)
            got, want = run(problem, isa), problem.expected()
            for t in range(tokens):
                assert linear_cases.relative(got.output[t], want.output[t]) <= 2 * reference.BUDGET[dtype], (g, t)
            assert errors(problem, got)[0] <= 1, (g, start, tokens)


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("variant", ["gdn", "kda", "ssd"])
def test_states_that_leave_float32(isa: str, dtype: str, variant: str) -> None:
    """Tokens before are right, and a head that grows touches no other one."""
    problem = build(Case(variant, (70,), dtype=dtype, starts=(9,)))
    problem.options["g"][20:, 1] = 80
    got, want = run(problem, isa), problem.expected()
    grows = np.arange(4) == 1
    assert linear_cases.relative(got.output[:, ~grows], want.output[:, ~grows]) <= reference.BUDGET[dtype]
    assert linear_cases.relative(got.output[:20, 1], want.output[:20, 1]) <= reference.BUDGET[dtype]
    assert not np.isfinite(got.states[0][1]).all() and np.isfinite(got.states[0][~grows]).all()


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates(isa: str, gate: str) -> None:
    extremes = [0, -0.0, 1e-38, -1e-38, 5, -5, 88, -88, 89, -89, 1e19, -1e19, 3e38, -3e38, np.inf, -np.inf, np.nan]
    for x in extremes if gate != "log" else [x for x in extremes if not x > 5]:
        problem = build(Case("ssd" if gate == "dt" else "gdn", (1, 5), starts=(9, 9)))
        problem.options |= {"gate": gate, "A_log": None if gate == "log" else np.zeros(4, F32)}
        problem.options["g"][:, 1] = x
        if gate == "dt":
            problem.options.pop("beta")
            problem.options["dt_limit"] = (0.01, 2.0)
        else:
            problem.options["use_beta_sigmoid_in_kernel"] = True
            problem.options["beta"][:, 1] = x
        if gate == "sigmoid":
            problem.options["lower_bound"] = -3.0
        got, want = run(problem, isa), problem.expected()
        for found, expected in ((got.output, want.output), *zip(got.states, want.states, strict=True)):
            heads = np.moveaxis(found, found.shape.index(4), 0), np.moveaxis(expected, found.shape.index(4), 0)
            for f, e in zip(*heads, strict=True):
                size = np.abs(e).max(initial=0, where=~np.isnan(e))
                np.testing.assert_allclose(f, e, rtol=0, atol=1e-5 * size + 1e-35, err_msg=str(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["gdn", "kda", "lightning", "ssd_raw"])
def test_long(variant: str, dtype: str) -> None:
    """65,536 tokens on the best isa: errors do not add up."""
    holds(Case(variant, (65536,), dtype=dtype, num_k_heads=1, num_v_heads=1, head_k_dim=16, head_v_dim=16), "auto")


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_slow_decay(isa: str) -> None:
    """Decays so near 1 that float32 holds few digits of the difference: what a thousand decodes, or a prompt, keep."""
    case = Case("gdn", (1024,), num_k_heads=1, num_v_heads=1, head_k_dim=16, head_v_dim=16, starts=(0,))
    problem = build(case)
    problem.options["g"][...] = -3.3e-7
    problem.options["beta"][...] = 0  # so that nothing but the decay touches the state
    got = run(problem, isa)
    assert errors(problem, got)[0] <= 0.3
    before = problem.before[0]
    assert before is not None
    shrunk = 1 - float((got.states[0].astype(np.float64) / before).mean())
    assert abs(shrunk / (1 - np.exp(-3.3e-7 * 1024)) - 1) < 0.05


def test_nothing_to_do() -> None:
    """No requests, no tokens, requests without tokens: slots stay as they are."""
    sizes: tuple[int, ...] = (1, 2, 8, 8)
    for loc in ([0], [0, 0, 0]):
        reqs = len(loc) - 1
        plan = get_linear_attention_metadata(np.array(loc, np.int32), "float32", *sizes)
        cache = np.full((3, 2, 8, 8), 5, F32)
        key, value = np.empty((0, 1, 8), F32), np.empty((0, 2, 8), F32)
        slots = np.arange(reqs, dtype=np.int32)
        linear_attention_with_state_cache(key, key, value, np.empty_like(value), cache, slots, plan)
        assert (cache == 5).all()


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_first_slot(engine: str, tokens: int) -> None:
    problem = build(Case("gdn", (tokens,), starts=(9,)))
    problem.slots[...] = 0
    assert errors(problem, run(problem, engine=engine))[0] <= 1


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_negative_slots(isa: str, dtype: str, tokens: int) -> None:
    """A request whose slot is negative begins from zeros and keeps nothing, even if it is said to bring a state."""
    problem = build(Case("gdn", (tokens, tokens), dtype=dtype, starts=(-1, -1)))
    want = run(problem, isa)
    plan = get_linear_attention_metadata(
        problem.query_start_loc, dtype, 2, 4, 32, 32, isa=isa, has_initial_state=np.array([1, 1], np.int32)
    )
    cache = np.full((2, 4, 32, 32), np.nan, F32)
    a, output = problem.arrays, np.empty_like(problem.arrays["value"])
    slots = np.array([-1, -7], np.int32)
    linear_attention_with_state_cache(a["query"], a["key"], a["value"], output, cache, slots, plan, **problem.options)
    assert np.isnan(cache).all() and (output == want.output).all()


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
def test_nan_stays_in_its_token(isa: str, dtype: str) -> None:
    """NaN, or infinity, in one token's value reaches no token before it, no other value channel and no other request;
    and all tokens after it, by the state, too."""
    for variant, spoiler in itertools.product(("gdn", "kda", "ssd"), (np.nan, np.inf)):
        problem = build(Case(variant, (134, 20), dtype=dtype))
        want = run(problem, isa)
        problem.arrays["value"][37, 1, 5] = spoiler
        got = run(problem, isa)
        spoilt = ~np.isfinite(got.output.astype(F32))
        may = np.zeros_like(spoilt)
        may[37:134, 1, 5] = True
        assert spoilt[37:134, 1, 5].all() and not (spoilt & ~may).any()
        assert (got.output[~may] == want.output[~may]).all()


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_strides_and_slots_that_differ(isa: str, dtype: str) -> None:
    """States of a cache with free strides, read from one slot and left in another, two requests from the same."""
    problem = build(Case("gdn", (1, 1, 70), dtype=dtype, starts=(9, 9, 9)))
    problem.before[1] = problem.before[0]
    want = problem.expected()
    memory = np.full((9, 5, 40, 48), np.nan, F32)
    cache = memory[1:, :4, :32, :32]
    assert problem.before[0] is not None and problem.before[2] is not None
    cache[0], cache[1] = problem.before[0], problem.before[2]
    plan = get_linear_attention_metadata(
        problem.query_start_loc, dtype, 2, 4, 32, 32, isa=isa, has_initial_state=np.ones(3, np.bool_)
    )
    a, output = problem.arrays, np.empty_like(problem.arrays["value"])
    to, of = np.array([3, 4, 5], np.int32), np.array([0, 0, 1], np.int32)
    options: dict[str, Any] = problem.options | {"initial_state_indices": of}
    linear_attention_with_state_cache(a["query"], a["key"], a["value"], output, cache, to, plan, **options)
    assert linear_cases.relative(output, want.output) <= reference.BUDGET[dtype]
    for slot, state in zip(to, want.states, strict=True):
        assert linear_cases.relative(cache[slot], state) <= reference.STATE_BUDGET[dtype]
    assert (cache[0] == problem.before[0]).all() and (cache[1] == problem.before[2]).all()
    assert np.isnan(memory[:, 4:]).all() and np.isnan(memory[:, :, 32:]).all() and np.isnan(memory[:, :, :, 32:]).all()


def test_outputs_in_float32() -> None:
    problem = build(Case("gdn", (30,), dtype="bfloat16"))
    a, output = problem.arrays, np.empty(problem.arrays["value"].shape, F32)
    plan = get_linear_attention_metadata(
        problem.query_start_loc, "bfloat16", 2, 4, 32, 32, has_initial_state=problem.brings
    )
    qkv = (a["query"], a["key"], a["value"])
    linear_attention_with_state_cache(*qkv, output, problem.cache(), problem.slots, plan, **problem.options)
    assert linear_cases.relative(output, problem.expected().output) <= reference.STATE_BUDGET["bfloat16"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gates_in_16_bits(variant: str) -> None:
    problem = build(Case(variant, (70,), dtype="bfloat16"))
    for name in ("g", "beta", "erase", "A_log", "dt_bias", "D"):
        if name in problem.options:
            problem.options[name] = problem.options[name].astype(problem.arrays["query"].dtype)
    assert errors(problem, run(problem))[0] <= 1


def test_profile() -> None:
    with cpu_attn.profile() as profile:
        run(build(Case("gdn", (3, 4))))
    assert [(c.kind.name, c.num_reqs, c.num_tokens) for c in profile.calls] == [
        ("linear_attention_with_state_cache", 2, 7)
    ]
