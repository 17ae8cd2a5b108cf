# SPDX-License-Identifier: Apache-2.0
"""The short convolutions before linear attention, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn._threads import threads
from cpu_attn.linear import causal_conv1d, get_linear_attention_metadata, reference

from ..cases.formats import numpy_dtype
from ..cases.judge import same_bits
from ..cases.linear_cases import relative
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS, ONE_DTYPE

F32, I32 = np.float32, np.int32
ENGINES = [(isa, dtype, "native") for isa, dtype in KERNELS] + [("auto", "float32", "reference")]
BUDGET = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}


class Step:
    """Requests of several lengths, some of which bring a state; NaN in what nobody may read."""

    def __init__(
        self,
        dtype: str,
        state_dtype: str = "float32",
        layout: str = "CL",
        *,
        channels: int = 40,
        width: int = 4,
        length: int = 3,
        lens: tuple[int, ...] = (5, 1, 0, 9, 1),
    ) -> None:
        rng = np.random.default_rng([channels, width, length])
        kind, self.dtype, self.layout, self.length = numpy_dtype(dtype), dtype, layout, length
        self.loc = np.concatenate([[0], np.cumsum(lens)]).astype(I32)
        self.x = rng.standard_normal((sum(lens), channels), F32).astype(kind)
        self.weight = rng.standard_normal((channels, width), F32).astype(kind)
        self.bias: NDArray[Any] | None = rng.standard_normal(channels, F32)
        self.before: list[NDArray[Any] | None] = [
            None if r % 3 == 1 else rng.standard_normal((channels, length), F32).astype(numpy_dtype(state_dtype))
            for r in range(len(lens))
        ]
        self.slots = rng.permutation(len(lens) + 3).astype(I32)
        shape = (channels, length) if layout == "CL" else (length, channels)
        self.states = np.full((len(lens) + 3, *shape), np.nan, numpy_dtype(state_dtype))
        for slot, state in zip(self.slots, self.before, strict=False):
            if state is not None:
                self.states[slot] = state if layout == "CL" else state.T
        self.checkpoints = {0: [2, 5], 3: [1]}
        self.rows = np.array([(0, 2, self.slots[-3]), (0, 5, self.slots[-2]), (3, 1, self.slots[-1])], I32)

    def plan(self, isa: str, engine: str = "auto") -> Any:
        brings = np.array([state is not None for state in self.before])
        return get_linear_attention_metadata(self.loc, self.dtype, isa=isa, engine=engine, has_initial_state=brings)

    def run(self, isa: str, engine: str = "auto", **changed: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        states, output = self.states.copy(), np.full_like(self.x, np.nan)
        arrays = (self.x, self.weight, self.bias, output, states, self.slots[: len(self.before)])
        options: dict[str, Any] = {"state_layout": self.layout, "checkpoints": self.rows} | changed
        causal_conv1d(*arrays, self.plan(isa, engine), **options)
        return output, states

    def check(self, output: NDArray[Any], states: NDArray[Any], activation: str | None = "silu") -> None:
        given = (self.x, self.weight, self.bias, self.loc, self.before, self.length, activation)
        want = reference.causal_conv1d(*given, checkpoints=self.checkpoints)
        assert relative(output, want.output) <= BUDGET[self.dtype]
        rounding = {2: 4e-3, 4: 1e-7}[states.dtype.itemsize]
        kept = [*want.states, *(want.checkpoints[r, n] for r, n in ((0, 2), (0, 5), (3, 1)))]
        for r, (slot, state) in enumerate(zip(self.slots, kept, strict=True)):
            got = states[slot] if self.layout == "CL" else states[slot].T
            if r >= len(self.before) or self.before[r] is not None or self.loc[r] < self.loc[r + 1]:
                assert relative(got, state) <= rounding, r


@pytest.mark.parametrize(("isa", "dtype", "engine"), ENGINES)
@pytest.mark.parametrize("layout", ["CL", "LC"])
def test_sizes(isa: str, dtype: str, engine: str, layout: str) -> None:
    for channels, width, length in ((40, 4, 3), (1, 2, 1), (17, 3, 4), (513, 4, 3), (600, 8, 8), (15, 5, 4)):
        for state_dtype in ("float32", dtype):
            step = Step(dtype, state_dtype, layout, channels=channels, width=width, length=length)
            step.check(*step.run(isa, engine))


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_activation_and_bias(activation: str | None) -> None:
    step = Step("float32")
    step.check(*step.run("auto", activation=activation), activation)
    step.bias = None
    step.check(*step.run("auto", activation=activation), activation)


@pytest.mark.parametrize("isa", [isa for isa, dtype in KERNELS if dtype == "float32"])
def test_extreme_numbers(isa: str) -> None:
    """y sigmoid(y) from 0 to infinity, one channel each."""
    y = np.array([0, -0.0, 1e-37, 30, 1e19, 3e38, np.inf, -30, -80, -87, -89, -110, -1e19, -1e37, -3e38, np.nan], F32)
    plan = get_linear_attention_metadata(np.array([0, 1], I32), "float32", isa=isa)
    weight, states = np.tile(F32([0, 1]), (len(y), 1)), np.zeros((1, len(y), 1), F32)
    output = np.empty((1, len(y)), F32)
    causal_conv1d(y[None], weight, None, output, states, np.zeros(1, I32), plan)
    want = y.astype(np.float64) * reference.sigmoid(y.astype(np.float64))
    np.testing.assert_allclose(output[0], want, rtol=2e-6, atol=1e-35)


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_in_place_and_strides(isa: str, dtype: str) -> None:
    step = Step(dtype, channels=30)
    memory = np.full((len(step.x), 50), np.nan, step.x.dtype)
    states = np.full((8, 33, 5), np.nan, F32)
    x, cache = memory[:, 7:37], states[:, 1:31, 1:4]
    x[...], cache[...] = step.x, step.states
    wide = np.full((30, 9), np.nan, step.weight.dtype)
    wide[:, :4] = step.weight
    given = (x, wide[:, :4], step.bias, x, cache, step.slots[:5])
    causal_conv1d(*given, step.plan(isa), checkpoints=step.rows)
    step.check(x, cache)
    memory[:, 7:37], states[:, 1:31, 1:4] = np.nan, np.nan
    assert np.isnan(memory.astype(F32)).all() and np.isnan(states).all()


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_bits(isa: str, dtype: str) -> None:
    """Threads change no bit, nor does a cut of the prompt anywhere."""
    step = Step(dtype, channels=1100, lens=(40,))
    step.checkpoints, step.rows = {}, step.rows[:0]
    want, state = step.run(isa, "auto", checkpoints=None)
    for n in (1, 2, 3):
        with threads(n, forced=True):
            assert all(map(same_bits, step.run(isa, "auto", checkpoints=None), (want, state)))
    states, output = step.states.copy(), np.empty_like(step.x)
    for first, end in ((0, 1), (1, 30), (30, 32), (32, 40)):
        plan = get_linear_attention_metadata(
            np.array([0, end - first], I32), dtype, isa=isa, has_initial_state=np.ones(1, np.bool_)
        )
        causal_conv1d(step.x[first:end], step.weight, step.bias, output[first:end], states, step.slots[:1], plan)
    assert same_bits(output, want) and same_bits(states[step.slots[0]], state[step.slots[0]])


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("layout", ["CL", "LC"])
def test_no_byte_past_an_end(isa: str, dtype: str, layout: str) -> None:
    step = Step(dtype, layout=layout, channels=531)
    guarded = [Guarded(x) for x in (step.x, step.weight, np.zeros(531, F32), np.zeros_like(step.x), step.states)]
    x, weight, bias, output, states = (g.array for g in guarded)
    step.bias = bias
    guarded.append(Guarded(np.zeros((531, 9), weight.dtype)))
    apart = guarded[-1].array[:, 5:]  # rows that do not follow one another
    apart[...] = weight
    for each in (weight, apart):
        states[...] = step.states
        given = (x, each, bias, output, states, step.slots[:5], step.plan(isa))
        causal_conv1d(*given, state_layout=layout, checkpoints=step.rows)
        step.check(output, states)
    assert all(g.intact() for g in guarded)
