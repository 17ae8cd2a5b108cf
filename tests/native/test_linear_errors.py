# SPDX-License-Identifier: Apache-2.0
"""Linear attention refuses what it cannot take, before a byte is written, and says what is wrong."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn.linear import (
    causal_conv1d,
    get_linear_attention_metadata,
    linear_attention_with_state_cache,
    reference,
)

from ..cases.judge import same_bits
from ..cases.linear_cases import Case, build, relative, run
from ..harness.guard import Guarded
from ..harness.kernels import ONE_DTYPE
from ..python.test_arrays import Interface
from ..python.test_errors import refuses

F32, I32 = np.float32, np.int32
LOC = np.array([0, 1, 6], I32)


def zeros(*shape: int, dtype: Any = F32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def ints(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, I32)


def arguments(**changed: Any) -> dict[str, Any]:
    """Two requests of 1 and 5 tokens, 2 key heads of 8, 4 value heads of 16, 5 slots."""
    plan = get_linear_attention_metadata(LOC, "float32", 2, 4, 8, 16, has_initial_state=np.array([1, 1], I32))
    return {
        "query": zeros(6, 2, 8),
        "key": zeros(6, 2, 8),
        "value": zeros(6, 4, 16),
        "output": zeros(6, 4, 16),
        "state_cache": zeros(5, 4, 8, 16),
        "state_indices": ints(0, 1),
        "linear_attention_metadata": plan,
        "g": zeros(6, 4),
        "beta": zeros(6, 4),
    } | changed


RAW = {"gate": "softplus", "A_log": zeros(4)}
SHARED = zeros(6, 4, 16)
CALL: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"query": zeros(6, 2, 9)}, ValueError, ["query", "axis 2 is 9", "head_k_dim = 8"]),
    ({"query": zeros(5, 2, 8)}, ValueError, ["query", "axis 0 is 5", "T = 6"]),
    ({"query": zeros(6, 16)}, ValueError, ["query", "2 axes, expected 3: [T, num_k_heads, head_k_dim]"]),
    ({"query": zeros(6, 2, 8, dtype=np.float16)}, TypeError, ["query", "float16", "float32"]),
    ({"key": zeros(6, 2, 16)[..., ::2]}, ValueError, ["key", "stride 2"]),
    ({"key": None}, TypeError, ["key"]),
    ({"key": [1.0]}, TypeError, ["key", "list"]),
    ({"value": zeros(6, 2, 16)}, ValueError, ["value", "axis 1 is 2", "num_v_heads = 4"]),
    ({"output": zeros(6, 4, 16, dtype=np.float16)}, TypeError, ["output", "float16"]),
    ({"output": SHARED, "value": SHARED}, ValueError, ["output", "shares memory with value"]),
    ({"output": np.broadcast_to(zeros(1, 4, 16), (6, 4, 16))}, ValueError, ["output", "read-only"]),
    ({"state_cache": zeros(5, 4, 16, 8)}, ValueError, ["state_cache", "axis 2 is 16", "head_k_dim = 8"]),
    ({"state_layout": "VK"}, ValueError, ["state_cache", "axis 2 is 8", "head_v_dim = 16"]),
    ({"state_layout": "DK"}, ValueError, ["state_layout", "'DK'", "'KV', 'VK'"]),
    ({"state_cache": zeros(5, 4, 8, 16, dtype=np.float64)}, TypeError, ["state_cache", "float64"]),
    ({"g": zeros(6, 4, 16)}, ValueError, ["g", "axis 2 is 16", "head_k_dim = 8"]),
    ({"g": zeros(6, 4, dtype=I32)}, TypeError, ["g", "int32"]),
    ({"g": zeros(3)}, ValueError, ["g", "axis 1 is 3", "num_v_heads = 4"]),
    ({"beta": zeros(6, 4, 16)}, ValueError, ["beta", "3 axes, expected 2"]),
    ({"beta": zeros(6, 4, 8), "erase": zeros(6, 4, 8)}, ValueError, ["beta", "axis 2 is 8", "head_v_dim = 16"]),
    ({"erase": zeros(6, 4, 16)}, ValueError, ["erase", "axis 2 is 16", "head_k_dim = 8"]),
    ({"erase": zeros(6, 4, 8), "delta_rule": False}, ValueError, ["erase", "delta_rule"]),
    ({"A_log": zeros(4)}, ValueError, ["A_log", "'log'"]),
    ({"dt_bias": zeros(4)}, ValueError, ["dt_bias", "'log'"]),
    ({"gate": "softplus"}, ValueError, ["A_log", "None", "softplus"]),
    ({"gate": "raw"}, ValueError, ["gate", "'raw'", "'log', 'softplus', 'dt', 'sigmoid', 'logsigmoid'"]),
    ({"lower_bound": -5.0}, ValueError, ["lower_bound", "'log'"]),
    (RAW | {"lower_bound": -5.0}, ValueError, ["lower_bound", "'softplus'"]),
    (RAW | {"gate": "sigmoid"}, ValueError, ["lower_bound", "None", "sigmoid"]),
    (RAW | {"gate": "sigmoid", "lower_bound": 0.5}, ValueError, ["lower_bound", "0.5", "above 0"]),
    (RAW | {"gate": "sigmoid", "lower_bound": -np.inf}, ValueError, ["lower_bound", "inf"]),
    (RAW | {"gate": "sigmoid", "lower_bound": "low"}, TypeError, ["lower_bound", "'low'"]),
    (RAW | {"g": None}, ValueError, ["g", "None"]),
    (RAW | {"A_log": zeros(5)}, ValueError, ["A_log", "axis 0 is 5", "num_v_heads = 4"]),
    (RAW | {"dt_bias": zeros(4, 8)}, ValueError, ["dt_bias", "2 axes, expected 1"]),
    (RAW | {"dt_bias": zeros(4), "g": zeros(6, 4, 8)}, ValueError, ["dt_bias", "1 axes, expected 2"]),
    (RAW | {"gate": "dt"}, ValueError, ["beta", "'dt'"]),
    (RAW | {"gate": "dt", "beta": None, "g": zeros(6, 4, 8)}, ValueError, ["g", "3 axes, expected 2"]),
    (RAW | {"dt_limit": (2.0, 1.0)}, ValueError, ["dt_limit[1]", "1.0"]),
    (RAW | {"dt_limit": 1.0}, TypeError, ["dt_limit"]),
    ({"D": zeros(4, 8)}, ValueError, ["D", "axis 1 is 8", "head_v_dim = 16"]),
    ({"D": zeros(4, 16, 1)}, ValueError, ["D", "3 axes, expected 1"]),
    ({"D": zeros(3)}, ValueError, ["D", "axis 0 is 3", "num_v_heads = 4"]),
    ({"scale": np.inf}, ValueError, ["scale", "inf"]),
    ({"norm_eps": -1.0}, ValueError, ["norm_eps", "-1.0"]),
    ({"delta_rule": None}, TypeError, ["delta_rule"]),
    ({"state_indices": ints(0)}, ValueError, ["state_indices", "axis 0 is 1", "num_reqs = 2"]),
    ({"state_indices": np.arange(2)}, TypeError, ["state_indices", "int64", "int32"]),
    ({"state_indices": ints(0, 5)}, ValueError, ["state_indices[1]", "5", "num_slots = 5"]),
    ({"state_indices": ints(3, 3)}, ValueError, ["state_indices[1]", "slot 3", "twice"]),
    ({"initial_state_indices": ints(0, 9)}, ValueError, ["initial_state_indices[1]", "9", "num_slots = 5"]),
    ({"initial_state_indices": ints(1, 1)}, ValueError, ["initial_state_indices[0]", "slot 1", "request 1"]),
    ({"checkpoints": zeros(1, 2, dtype=I32)}, ValueError, ["checkpoints", "axis 1 is 2", "3"]),
    ({"checkpoints": ints(1, 2, 1).reshape(1, 3)}, ValueError, ["checkpoints[0]", "slot 1", "twice"]),
    ({"checkpoints": ints(2, 1, 3).reshape(1, 3)}, ValueError, ["checkpoints[0]", "request is 2", "0..1"]),
    ({"checkpoints": ints(1, 6, 3).reshape(1, 3)}, ValueError, ["checkpoints[0]", "tokens is 6", "1..5"]),
    ({"checkpoints": ints(1, 0, 3).reshape(1, 3)}, ValueError, ["checkpoints[0]", "tokens is 0", "1..5"]),
    ({"checkpoints": ints(1, 1, 5).reshape(1, 3)}, ValueError, ["checkpoints[0]", "slot is 5", "0..4"]),
    ({"checkpoints": ints(1, 3, 2, 1, 2, 3).reshape(2, 3)}, ValueError, ["checkpoints[1]", "ascend"]),
    ({"linear_attention_metadata": None}, TypeError, ["linear_attention_metadata", "NoneType"]),
    (
        {"linear_attention_metadata": get_linear_attention_metadata(LOC, "float32")},
        ValueError,
        ["linear_attention_metadata", "without heads"],
    ),
]


@pytest.mark.parametrize(("changed", "error", "words"), CALL)
def test_calls(changed: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    refuses(linear_attention_with_state_cache, arguments(**changed), error, *words)


def test_the_arguments_are_fine_otherwise() -> None:
    linear_attention_with_state_cache(**arguments())
    linear_attention_with_state_cache(**arguments(checkpoints=ints(-1, -1, -1, 1, 2, 3).reshape(2, 3)))
    linear_attention_with_state_cache(**arguments(initial_state_indices=ints(2, 2), **RAW))


@pytest.mark.parametrize("tokens", [1, 5])
def test_arrays_of_others(tokens: int) -> None:
    """Arrays that are not NumPy's count as those, the optional ones, too."""
    problem = build(Case("gdn_raw", (tokens,), starts=(9,)))
    want = run(problem)
    problem.arrays = {name: Interface(x) for name, x in problem.arrays.items()}  # type: ignore[misc]
    problem.arrays["value"].shape = want.output.shape
    problem.options = {n: Interface(x) if isinstance(x, np.ndarray) else x for n, x in problem.options.items()}
    got = run(problem)
    assert same_bits(got.output, want.output) and same_bits(got.states[0], want.states[0])


CONV: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"x": zeros(5, 8)}, ValueError, ["x", "axis 0 is 5", "T = 6"]),
    ({"weight": zeros(7, 4)}, ValueError, ["weight", "axis 0 is 7", "channels = 8"]),
    ({"weight": zeros(8, 1)}, ValueError, ["weight", "width", "1 is outside 2..8"]),
    ({"weight": zeros(8, 9)}, ValueError, ["weight", "width", "9 is outside 2..8"]),
    ({"weight": zeros(8, 4, dtype=np.float16)}, TypeError, ["weight", "float16"]),
    ({"bias": zeros(7)}, ValueError, ["bias", "axis 0 is 7", "channels = 8"]),
    ({"conv_state": zeros(3, 8, 2)}, ValueError, ["conv_state", "2 inputs", "3..8"]),
    ({"conv_state": zeros(3, 8, 9)}, ValueError, ["conv_state", "9 inputs", "3..8"]),
    ({"conv_state": zeros(3, 3, 8)}, ValueError, ["conv_state", "axis 1 is 3", "channels = 8"]),
    ({"state_layout": "LC"}, ValueError, ["conv_state", "axis 2 is 3", "channels = 8"]),
    ({"state_layout": "KV"}, ValueError, ["state_layout", "'CL', 'LC'"]),
    ({"activation": "gelu"}, ValueError, ["activation", "gelu"]),
    ({"state_indices": ints(0, 3)}, ValueError, ["state_indices[1]", "3", "num_slots = 3"]),
    ({"state_indices": ints(2, 2)}, ValueError, ["state_indices[1]", "twice"]),
    ({"output": zeros(6, 9)}, ValueError, ["output", "axis 1 is 9", "channels = 8"]),
]


@pytest.mark.parametrize(("changed", "error", "words"), CONV)
def test_convolutions(changed: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    given = {
        "x": zeros(6, 8),
        "weight": zeros(8, 4),
        "bias": zeros(8),
        "output": zeros(6, 8),
        "conv_state": zeros(3, 8, 3),
        "state_indices": ints(0, 1),
        "linear_attention_metadata": get_linear_attention_metadata(LOC, "float32"),
    }
    causal_conv1d(**given)
    refuses(causal_conv1d, given | changed, error, *words)


def test_an_output_that_overlaps_x_without_being_x() -> None:
    memory, plan = zeros(7, 8), get_linear_attention_metadata(LOC, "float32")
    with pytest.raises(ValueError, match="output: shares memory with x"):
        causal_conv1d(memory[:6], zeros(8, 4), None, memory[1:], zeros(3, 8, 3), ints(0, 1), plan)


PLAN: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"query_start_loc": ints(1, 2)}, ValueError, ["query_start_loc[0]", "1"]),
    ({"query_start_loc": ints(0, 5, 3)}, ValueError, ["query_start_loc[2]", "3"]),
    ({"query_start_loc": ints()}, ValueError, ["query_start_loc", "empty"]),
    ({"query_start_loc": np.arange(3)}, TypeError, ["query_start_loc", "int64"]),
    ({"dtype": "float64"}, TypeError, ["dtype", "float64"]),
    ({"num_k_heads": 0}, ValueError, ["num_k_heads", "0"]),
    ({"num_v_heads": 3}, ValueError, ["num_v_heads", "3", "num_k_heads = 2"]),
    ({"head_k_dim": 65537}, ValueError, ["head_k_dim", "65537"]),
    ({"head_v_dim": None}, ValueError, ["head_v_dim", "None"]),
    ({"seq_lens": ints(1, 4)}, ValueError, ["seq_lens[1]", "4", "5 tokens"]),
    ({"seq_lens": ints(1)}, ValueError, ["seq_lens", "axis 0 is 1", "num_reqs = 2"]),
    ({"has_initial_state": np.ones(3, np.bool_)}, ValueError, ["has_initial_state", "(3,)", "[2]"]),
    ({"has_initial_state": np.ones(2)}, TypeError, ["has_initial_state", "float64"]),
    ({"isa": "sse"}, ValueError, ["isa", "sse"]),
    ({"engine": "cuda"}, ValueError, ["engine", "cuda"]),
    ({"engine": "onednn"}, cpu_attn.UnavailableError, ["onednn", "reference"]),
]


@pytest.mark.parametrize(("changed", "error", "words"), PLAN)
def test_plans(changed: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 16}
    refuses(
        get_linear_attention_metadata, {"query_start_loc": LOC, "dtype": "float32", **sizes} | changed, error, *words
    )


def test_engines_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_ATTN_ENGINE", "reference")
    assert get_linear_attention_metadata(LOC, "float32").engine == "reference"
    monkeypatch.setenv("CPU_ATTN_ENGINE", "onednn")
    assert get_linear_attention_metadata(LOC, "float32").engine == "native"
    monkeypatch.setenv("CPU_ATTN_ENGINE", "typo")
    with pytest.raises(ValueError, match="typo"):
        get_linear_attention_metadata(LOC, "float32")


def test_plans_are_immutable() -> None:
    plan = get_linear_attention_metadata(LOC, "float32", 2, 4, 8, 16)
    with pytest.raises(AttributeError, match="immutable"):
        plan.engine = "reference"  # type: ignore[misc]
    assert copy.copy(plan) is plan and copy.deepcopy(plan) is plan
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(plan)
    sizes = (plan.num_reqs, plan.num_k_heads, plan.num_v_heads, plan.head_k_dim, plan.head_v_dim, plan.num_tokens)
    assert sizes == (2, 2, 4, 8, 16, 6) and plan.workspace_bytes > 0 and plan.dtype == np.float32


def test_sizes_that_no_memory_holds() -> None:
    plan = get_linear_attention_metadata(LOC, "float32", 1, 1, 65536, 65536)
    assert plan.workspace_bytes > 2**33


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_no_byte_past_an_end(isa: str, dtype: str, layout: str) -> None:
    """Every array ends at a page nobody may touch."""
    for variant, lens in (("gdn_raw", (1, 20)), ("gdn2", (1, 40)), ("kda_raw", (2, 1)), ("ssd_raw", (5, 17))):
        case = Case(variant, lens, dtype=dtype, head_k_dim=21, head_v_dim=13, state_layout=layout)
        problem = build(case)
        want = run(problem, isa)
        guarded: dict[str, Any] = {name: Guarded(x) for name, x in problem.arrays.items()}
        options = {n: Guarded(x) for n, x in problem.options.items() if isinstance(x, np.ndarray)}
        cache, output = Guarded(problem.cache()), Guarded(np.zeros_like(problem.arrays["value"]))
        plan = get_linear_attention_metadata(
            problem.query_start_loc, dtype, 2, 4, 21, 13, isa=isa, has_initial_state=problem.brings
        )
        a = {name: x.array for name, x in guarded.items()}
        given = problem.options | {name: x.array for name, x in options.items()}
        slots = Guarded(problem.slots)
        arrays = (a["query"], a["key"], a["value"], output.array, cache.array, slots.array, plan)
        linear_attention_with_state_cache(*arrays, state_layout=layout, **given)
        assert all(x.intact() for x in (*guarded.values(), *options.values(), cache, output, slots))
        for r, rows in enumerate((slice(0, lens[0]), slice(lens[0], None))):
            got = relative(output.array[rows], want.output[rows].astype(np.float64))
            assert got <= 2 * reference.BUDGET[dtype], (variant, r)
