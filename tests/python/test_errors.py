# SPDX-License-Identifier: Apache-2.0
"""Bad input: a clear exception that names argument, position, value and bound, and not a byte written."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
import weakref
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn

from ..harness.steps import attention_args, plan_args, write_args

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16

pytestmark = pytest.mark.isa


def wide(*shape: int) -> Any:
    """Zeros whose last axis has stride 2."""
    return np.zeros((*shape, 2), F32)[..., 0]


def readonly(x: Any) -> Any:
    x.flags.writeable = False
    return x


def misaligned(shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape)) * 4
    return np.zeros(size + 8, np.uint8)[1 : size + 1].view(F32).reshape(shape)


def selected(blocks: list[int]) -> Any:
    """For attention_args, of request 0 and kv head 1; the others have their first block."""
    array = np.array([[[0, -1], [0, -1]], [[0, -1], [0, -1]]], np.int32)
    array[0, 1] = blocks
    return array


def bias(*shape: int) -> Any:
    return np.zeros(shape, F32)


def refuses(call: Any, args: dict[str, Any], error: type[Exception], *words: str) -> None:
    before = {k: v.tobytes() for k, v in args.items() if isinstance(v, np.ndarray)}
    with pytest.raises(error) as caught:
        call(**args)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert before == {k: v.tobytes() for k, v in args.items() if isinstance(v, np.ndarray)}


WRITE = [
    ({"slot_mapping": np.array([0, 1, 2, 64, 3])}, ValueError, ["slot_mapping[3]", "64", "num_blocks * block_size"]),
    ({"slot_mapping": np.array([2**62, 1, 2, 3, 4])}, ValueError, ["slot_mapping[0]", str(2**62)]),
    ({"slot_mapping": np.arange(5, dtype=np.int32)}, TypeError, ["slot_mapping", "int32", "int64"]),
    ({"slot_mapping": np.arange(4)}, ValueError, ["slot_mapping", "axis 0 is 4", "T = 5"]),
    ({"slot_mapping": np.arange(10)[::2]}, ValueError, ["slot_mapping", "stride 2"]),
    ({"key": np.zeros((5, 2, 7), F32)}, ValueError, ["key_cache", "axis 3 is 8", "head_size 7"]),
    ({"key": np.zeros((5, 3, 8), F32)}, ValueError, ["value", "axis 1 is 2", "num_kv_heads = 3"]),
    ({"key": np.zeros((5, 16), F32)}, ValueError, ["key", "2 axes, expected 3"]),
    ({"key": np.zeros((5, 2, 8), F16)}, TypeError, ["value", "float32", "float16"]),
    ({"key": np.zeros((5, 2, 8), np.float64)}, TypeError, ["key", "float64, expected float32 or float16 or bfloat16"]),
    ({"key": np.zeros((5, 2, 8), ">f4")}, TypeError, ["key", ">f4"]),
    ({"key": wide(5, 2, 8)}, ValueError, ["key", "last axis has stride 2"]),
    ({"key": misaligned((5, 2, 8))}, ValueError, ["key", "multiple of its 4-byte"]),
    ({"key": [[1.0]]}, TypeError, ["key", "expected an array", "list"]),
    ({"key": np.zeros((5, 2, 0), F32)}, ValueError, ["key", "head size", "0"]),
    ({"value": np.zeros((4, 2, 8), F32)}, ValueError, ["value", "axis 0 is 4", "T = 5"]),
    ({"key_cache": readonly(np.zeros((4, 2, 16, 8), F32))}, ValueError, ["key_cache", "read-only"]),
    ({"key_cache": np.zeros((3, 2, 16, 8), F32)}, ValueError, ["value_cache", "axis 0 is 4", "num_blocks = 3"]),
    ({"key_cache": np.zeros((4, 2, 0, 8), F32)}, ValueError, ["key_cache", "block_size is 0"]),
    ({"key_cache": np.zeros((4, 2, 32, 8), F32)[:, :, ::2]}, ValueError, ["key_cache", "axis 2 has stride 16"]),
    ({"key_cache": np.zeros((4, 2, 16, 8), BF16)}, TypeError, ["key_cache", "bfloat16", "float32"]),
    (
        {"value_cache": np.broadcast_to(np.zeros((1, 2, 16, 8), F32), (4, 2, 16, 8))},
        ValueError,
        ["value_cache", "read-only"],
    ),
    (
        {"value_cache": np.lib.stride_tricks.as_strided(np.zeros((4, 2, 16, 8), F32), strides=(0, 512, 32, 4))},
        ValueError,
        ["value_cache", "overlap"],
    ),
    ({"k_scale": 2.0}, ValueError, ["k_scale", "2.0", "fp8"]),
    ({"v_scale": float("nan")}, ValueError, ["v_scale", "nan"]),
    ({"kv_cache_dtype": "fp8"}, TypeError, ["key_cache", "float32", "float8_e4m3fn"]),
    ({"v_scale": 10**400}, ValueError, ["v_scale", "inf", "finite float32"]),
    ({"kv_cache_dtype": "int3"}, ValueError, ["kv_cache_dtype", "int3", "fp8_e4m3"]),
    ({"kv_cache_dtype": None}, TypeError, ["kv_cache_dtype", "NoneType"]),
    ({"kv_cache_layout": ["HND"]}, TypeError, ["kv_cache_layout", "list"]),
    ({"kv_cache_dtype": "fp7", "k_scale": 2.0}, ValueError, ["kv_cache_dtype", "fp7"]),
    ({"isa": "sse9"}, ValueError, ["isa", "sse9", "scalar"]),
    ({"isa": 3}, TypeError, ["isa", "int"]),
]

PLAN = [
    ({"seq_lens": np.array([20, -1], np.int32)}, ValueError, ["seq_lens[1]", "-1", "at least 0"]),
    ({"seq_lens": np.array([20], np.int32)}, ValueError, ["seq_lens", "axis 0 is 1", "num_reqs = 2"]),
    ({"seq_lens": np.array([20, 7])}, TypeError, ["seq_lens", "int64", "int32"]),
    ({"seq_lens": np.array([20, 7, 7, 7], np.int32)[::2]}, ValueError, ["seq_lens", "stride 2"]),
    ({"query_start_loc": np.array([0, 4, 3], np.int32)}, ValueError, ["query_start_loc[2]", "3", "at least 4"]),
    ({"query_start_loc": np.array([1, 2, 3], np.int32)}, ValueError, ["query_start_loc[0]", "1", "expected 0"]),
    ({"query_start_loc": np.array([0, -5, 3], np.int32)}, ValueError, ["query_start_loc[1]", "-5"]),
    ({"query_start_loc": np.array([0, 3], np.int32)}, ValueError, ["query_start_loc", "axis 0 is 2", "= 3"]),
    ({"num_reqs": -1}, ValueError, ["num_reqs", "-1"]),
    ({"num_reqs": 2.0}, TypeError, ["num_reqs", "float"]),
    ({"num_heads": 0}, ValueError, ["num_heads", "0"]),
    ({"num_heads": 2**31}, ValueError, ["num_heads", str(2**31)]),
    ({"num_heads": True}, TypeError, ["num_heads", "True"]),
    ({"num_kv_heads": 3}, ValueError, ["num_kv_heads", "3", "num_heads = 4"]),
    ({"num_kv_heads": 8}, ValueError, ["num_kv_heads", "8"]),
    ({"head_size": 0}, ValueError, ["head_size", "0"]),
    ({"head_size": 2**20}, ValueError, ["head_size", str(2**20)]),
    ({"head_size_v": -3}, ValueError, ["head_size_v", "-3"]),
    ({"dtype": "float64"}, TypeError, ["dtype", "float64"]),
    ({"dtype": "int32"}, TypeError, ["dtype", "int32"]),
    ({"dtype": "f4,(f"}, TypeError, ["dtype: ", "f4,(f"]),
    ({"dtype": ("f4", "x")}, TypeError, ["dtype: ", "('f4', 'x')"]),
    ({"dtype": {"f4": 1}}, TypeError, ["dtype: ", "{'f4': 1}"]),
    ({"causal": "yes"}, TypeError, ["causal", "yes"]),
    ({"sliding_window": 0}, ValueError, ["sliding_window", "0"]),
    ({"sliding_window": -2}, ValueError, ["sliding_window", "-2"]),
    ({"sliding_window": (1, 2, 3)}, ValueError, ["sliding_window", "3 values"]),
    ({"sliding_window": (-2, 0)}, ValueError, ["sliding_window[0]", "-2"]),
    ({"dynamic_causal": np.array([1], np.int32)}, ValueError, ["dynamic_causal", "num_reqs = 2"]),
    ({"dynamic_causal": np.array([True, False])}, TypeError, ["dynamic_causal: dtype bool, expected int32"]),
    ({"isa": "vec16", "head_size": 20}, ValueError, ["vec16", "16"]),
    ({"isa": "vec16", "head_size": 24}, ValueError, ["vec16", "16"]),
    ({"engine": "magic"}, ValueError, ["engine", "magic", "native"]),
    ({"kv_cache_dtype": "int3"}, ValueError, ["kv_cache_dtype", "int3"]),
]

ATTENTION = [
    (
        {"block_table": np.array([[1, 4], [2, 0]], np.int32)},
        ValueError,
        ["block_table", "request 0", "position 1", "block 4", "0..3"],
    ),
    ({"block_table": np.array([[1, 3], [-1, 0]], np.int32)}, ValueError, ["request 1", "position 0", "block -1"]),
    ({"block_table": np.array([[1], [2]], np.int32)}, ValueError, ["block_table", "request 0", "needs 2", "has 1"]),
    ({"block_table": np.array([[1, 3]], np.int32)}, ValueError, ["block_table", "axis 0 is 1", "num_reqs = 2"]),
    ({"block_table": np.array([[1, 3], [2, 0]])}, TypeError, ["block_table", "int64"]),
    ({"seq_lens": np.array([20, 8], np.int32)}, ValueError, ["seq_lens[1]", "8", "made for 7"]),
    ({"query_start_loc": np.array([0, 2, 4], np.int32)}, ValueError, ["query_start_loc[1]", "2", "made for 3"]),
    ({"query_start_loc": np.array([0, 3, 5], np.int32)}, ValueError, ["query_start_loc[2]", "5", "made for 4"]),
    ({"causal": False}, ValueError, ["causal", "request 0", "False", "True"]),
    ({"dynamic_causal": np.array([1, 0], np.int32)}, ValueError, ["causal", "request 1", "False", "True"]),
    ({"sliding_window": 5}, ValueError, ["sliding_window", "5", "(-1, -1)"]),
    ({"scheduler_metadata": None}, TypeError, ["scheduler_metadata", "NoneType"]),
    ({"query": np.zeros((4, 4, 9), F32)}, ValueError, ["query", "axis 2 is 9", "head_size = 8"]),
    ({"query": np.zeros((3, 4, 8), F32)}, ValueError, ["query", "axis 0 is 3", "T = 4"]),
    ({"query": np.zeros((4, 4, 8), BF16)}, TypeError, ["query", "bfloat16", "float32"]),
    ({"query": wide(4, 4, 8)}, ValueError, ["query", "stride 2"]),
    ({"output": np.zeros((4, 4, 7), F32)}, ValueError, ["output", "axis 2 is 7", "head_size_v = 8"]),
    ({"output": readonly(np.zeros((4, 4, 8), F32))}, ValueError, ["output", "read-only"]),
    ({"lse": np.zeros((4, 3), F32)}, ValueError, ["lse", "axis 1 is 3", "T = 4"]),
    ({"lse": np.zeros((4, 4), np.float64)}, TypeError, ["lse", "float64"]),
    ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
    ({"scale": 1e39}, ValueError, ["scale", "1e+39"]),
    ({"scale": None}, TypeError, ["scale", "NoneType"]),
    ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
    ({"softcap": float("inf")}, ValueError, ["softcap", "inf"]),
    ({"alibi_slopes": np.zeros(3, F32)}, ValueError, ["alibi_slopes", "axis 0 is 3", "num_heads = 4"]),
    ({"alibi_slopes": np.zeros(4, F16)}, TypeError, ["alibi_slopes", "float16"]),
    ({"s_aux": np.zeros(5, F32)}, ValueError, ["s_aux", "axis 0 is 5"]),
    ({"key_cache": np.zeros((4, 2, 16, 9), F32)}, ValueError, ["key_cache", "axis 3 is 9", "expected 8"]),
    ({"value_cache": np.zeros((4, 2, 8, 8), F32)}, ValueError, ["value_cache", "axis 2 is 8", "block_size = 16"]),
    ({"selected_blocks": selected([0, 2])}, ValueError, ["request 0", "kv head 1", "position 1", "block 2", "0..1"]),
    ({"selected_blocks": selected([-2, -1])}, ValueError, ["selected_blocks", "position 0", "block -2"]),
    ({"selected_blocks": selected([2**31 - 1, -1])}, ValueError, ["selected_blocks", str(2**31 - 1)]),
    ({"selected_blocks": selected([1, 0])}, ValueError, ["kv head 1", "position 1", "block 0 after 1", "ascending"]),
    ({"selected_blocks": selected([1, 1])}, ValueError, ["selected_blocks", "block 1 after 1"]),
    ({"selected_blocks": selected([-1, 1])}, ValueError, ["selected_blocks", "block 1 after -1"]),
    ({"selected_blocks": selected([0, 1])[:1]}, ValueError, ["selected_blocks", "axis 0 is 1", "num_reqs = 2"]),
    ({"selected_blocks": selected([0, 1])[:, :1]}, ValueError, ["selected_blocks", "axis 1 is 1", "num_kv_heads = 2"]),
    ({"selected_blocks": selected([0, 1])[0]}, ValueError, ["selected_blocks", "2 axes, expected 3"]),
    ({"selected_blocks": selected([0, 1]).astype(np.int64)}, TypeError, ["selected_blocks", "int64", "int32"]),
    ({"selected_blocks": selected([0, 1])[..., ::-1]}, ValueError, ["selected_blocks", "stride -1"]),
    (
        {"selected_blocks": selected([0, 1]), "block_table": np.array([[1, 9], [2, 0]], np.int32)},
        ValueError,
        ["block_table", "request 0", "position 1", "block 9"],
    ),
    (
        {"selected_blocks": selected([0, 1]), "block_table": np.array([[1], [2]], np.int32)},
        ValueError,
        ["block_table", "request 0", "needs 2", "has 1"],
    ),
    ({"attn_bias": bias(2, 4, 2, 20)}, ValueError, ["attn_bias", "request 0", "axis 2 is 2", "3 query tokens"]),
    ({"attn_bias": bias(1, 1, 3, 19)}, ValueError, ["attn_bias", "request 0", "axis 3 is 19", "20 keys"]),
    ({"attn_bias": bias(3, 4, 3, 20)}, ValueError, ["attn_bias", "axis 0 is 3", "num_reqs = 2, or 1"]),
    ({"attn_bias": bias(2, 2, 3, 20)}, ValueError, ["attn_bias", "axis 1 is 2", "num_heads = 4, or 1"]),
    ({"attn_bias": bias(4, 3, 20)}, ValueError, ["attn_bias", "3 axes, expected 4"]),
    ({"attn_bias": bias(2, 4, 3, 20).astype(F16)}, TypeError, ["attn_bias", "float16", "float32"]),
    ({"attn_bias": bias(2, 4, 3, 40)[..., ::2]}, ValueError, ["attn_bias", "stride 2"]),
    ({"kv_cache_dtype": "fp8_e4m3"}, ValueError, ["kv_cache_dtype", "fp8_e4m3"]),
    ({"k_scale": 0.5}, ValueError, ["k_scale", "0.5"]),
    ({"scale": 10**400}, ValueError, ["scale", "inf", "finite float32"]),
    ({"scale": -(10**400)}, ValueError, ["scale", "-inf"]),
    ({"softcap": 10**400}, ValueError, ["softcap", "inf"]),
    ({"softcap": np.ones(2)}, TypeError, ["softcap", "expected a number", "ndarray"]),
    ({"softcap": 1e-39}, ValueError, ["softcap", "1e-39", "1.17549"]),
    ({"softcap": 1e-46}, ValueError, ["softcap", "1e-46"]),
    ({"softcap": np.float32(1e-44)}, ValueError, ["softcap", "e-45"]),
    ({"softcap": 3.4e38}, ValueError, ["softcap", "3.4e+38", "2.3"]),
    ({"scheduler_metadata": type("SchedulerMetadata", (), {})()}, TypeError, ["scheduler_metadata: expected get_"]),
]


def _name(spoiled: dict[str, Any]) -> str:
    return "-".join(spoiled)


@pytest.mark.parametrize(("spoiled", "error", "words"), WRITE, ids=[_name(c[0]) for c in WRITE])
def test_write(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    refuses(cpu_attn.reshape_and_cache, write_args() | spoiled, error, *words)


@pytest.mark.parametrize(("spoiled", "error", "words"), PLAN, ids=[_name(c[0]) for c in PLAN])
def test_plan(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    refuses(cpu_attn.get_scheduler_metadata, plan_args() | spoiled, error, *words)


def test_more_tasks_than_a_plan_holds() -> None:
    """Said before room is made for them."""
    num_reqs = 2**24 + 1
    step = {"seq_lens": np.zeros(num_reqs, np.int32), "query_start_loc": np.arange(num_reqs + 1, dtype=np.int32)}
    with pytest.raises(ValueError, match=f"query_start_loc: {num_reqs} blocks of query tokens, a plan holds {2**24}"):
        cpu_attn.get_scheduler_metadata(**plan_args() | {"num_reqs": num_reqs} | step)


@pytest.mark.parametrize(("spoiled", "error", "words"), ATTENTION, ids=[_name(c[0]) for c in ATTENTION])
def test_attention(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    refuses(cpu_attn.attention_with_kv_cache, attention_args() | spoiled, error, *words)


@pytest.mark.parametrize("softcap", [0, -0.0, float(np.finfo(np.float32).tiny), 2.34e38])
def test_softcaps_at_the_bounds(softcap: float) -> None:
    args = attention_args() | {"softcap": softcap}
    cpu_attn.attention_with_kv_cache(**args)
    assert np.isfinite(args["output"]).all()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"scale": 3e38}, ["scale: 3e+38", "k_scale 1.0", "log2"]),
        ({"scale": -100, "softcap": 1.2e-38}, ["scale: -100.0", "softcap 1.2e-38"]),
    ],
)
def test_factors_that_are_not_finite(numbers: dict[str, float], words: list[str]) -> None:
    """Whatever was accepted before."""
    for _ in range(2):
        refuses(cpu_attn.attention_with_kv_cache, attention_args() | numbers, ValueError, *words)
        cpu_attn.attention_with_kv_cache(**attention_args() | {"scale": 2.3e38})


def test_factors_of_fp8_that_are_not_finite() -> None:
    """k_scale is one of them."""
    fp8 = {k: np.zeros((4, 2, 16, 8), np.uint8) for k in ("key_cache", "value_cache")}
    args = attention_args(kv_cache_dtype="fp8") | fp8 | {"kv_cache_dtype": "fp8", "scale": 1e5, "k_scale": 1e30}
    call = cpu_attn.attention_with_kv_cache
    refuses(call, args | {"softcap": 1e-5}, ValueError, "scale: 100000.0", "k_scale 1e+30", "softcap 1e-05")
    refuses(call, args | {"k_scale": 1e34}, ValueError, "scale: 100000.0", "k_scale 1e+34", "log2")


def test_scales_at_the_bounds() -> None:
    fp8 = {"kv_cache_dtype": "fp8_e5m2"} | {k: np.zeros((4, 2, 16, 8), np.uint8) for k in ("key_cache", "value_cache")}
    for scale in (float(np.finfo(np.float32).tiny), 3.4028e38):
        cpu_attn.reshape_and_cache(**write_args() | fp8 | {"k_scale": scale, "v_scale": scale})
    for scale in (1.17549e-38, 3.4029e38):
        refuses(cpu_attn.reshape_and_cache, write_args() | fp8 | {"v_scale": scale}, ValueError, "v_scale", str(scale))


def test_the_step_itself_is_valid() -> None:
    cpu_attn.reshape_and_cache(**write_args())
    args = attention_args()
    cpu_attn.attention_with_kv_cache(**args)
    assert args["output"].any()
    assert args["lse"].any()


@pytest.mark.parametrize("other", ["query", "key_cache", "value_cache"])
def test_output_may_not_be_an_input(other: str) -> None:
    args = attention_args()
    args["output"] = args[other].reshape(-1)[:128].reshape(4, 4, 8)
    refuses(cpu_attn.attention_with_kv_cache, args, ValueError, "output", "shares memory", other)


def test_lse_may_not_be_the_output() -> None:
    args = attention_args()
    args["lse"] = args["output"].reshape(-1)[3:19].reshape(4, 4)
    refuses(cpu_attn.attention_with_kv_cache, args, ValueError, "lse", "shares memory", "output")


def test_key_and_value_cache_may_interleave_but_not_overlap() -> None:
    args = write_args()
    both = np.zeros((4, 2, 16, 16), F32).reshape(4, 2, 256)
    args["key_cache"], args["value_cache"] = (x.reshape(4, 2, 16, 8) for x in (both[..., :128], both[..., 128:]))
    cpu_attn.reshape_and_cache(**args)
    assert both[..., :128].any()
    assert both[..., 128:].any()
    args["value_cache"] = np.lib.stride_tricks.as_strided(both[..., 127:], (4, 2, 16, 8), (2048, 1024, 32, 4))
    refuses(cpu_attn.reshape_and_cache, args, ValueError, "key_cache", "shares memory", "value_cache")


def test_query_and_output_may_interleave() -> None:
    args, plain = attention_args(), attention_args()
    both = np.zeros((4, 2, 4, 8), F32)
    both[:, 0] = args["query"]
    args["query"], args["output"] = both[:, 0], both[:, 1]
    cpu_attn.attention_with_kv_cache(**args)
    cpu_attn.attention_with_kv_cache(**plain)
    assert np.array_equal(args["output"], plain["output"])


def test_output_may_not_be_the_bias() -> None:
    memory = np.zeros(480, F32)
    args = attention_args() | {"attn_bias": memory.reshape(2, 4, 3, 20)}
    args["output"] = memory[100:228].reshape(4, 4, 8)
    refuses(cpu_attn.attention_with_kv_cache, args, ValueError, "output", "shares memory", "attn_bias")


def test_bias_is_checked_in_every_call() -> None:
    """The same shapes for a plan of more keys."""
    args = attention_args() | {"attn_bias": bias(1, 1, 3, 20)}
    cpu_attn.attention_with_kv_cache(**args)
    args["seq_lens"] = np.array([21, 7], np.int32)
    args["scheduler_metadata"] = cpu_attn.get_scheduler_metadata(**plan_args() | {"seq_lens": args["seq_lens"]})
    refuses(cpu_attn.attention_with_kv_cache, args, ValueError, "attn_bias", "request 0", "axis 3 is 20", "21 keys")


@pytest.mark.parametrize("engine", [e.name for e in cpu_attn.engines() if e.available])
@pytest.mark.parametrize("entry", [-9, -(2**31), 2**31 - 1])
def test_blocks_outside_the_window_are_not_needed(entry: int, engine: str) -> None:
    """A window that sees block 1 alone: block 0 may be freed, its entry may hold anything."""
    args = attention_args(sliding_window=2, engine=engine)
    args["block_table"] = np.array([[entry, 3], [2, 99]], np.int32)
    cpu_attn.attention_with_kv_cache(**args)


def test_isa_that_is_not_there_says_what_is() -> None:
    absent = [i for i in cpu_attn.isas() if not i.supported]
    assert absent, "every known isa runs here: nothing to refuse"
    for isa in absent:
        with pytest.raises(cpu_attn.UnavailableError) as caught:
            cpu_attn.get_scheduler_metadata(**plan_args(), isa=isa.name)
        assert isa.name in str(caught.value)
        assert isa.reason in str(caught.value)
        assert "scalar" in str(caught.value)


def test_environment_chooses_where_the_argument_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_ATTN_ISA", "scalar")
    monkeypatch.setenv("CPU_ATTN_ENGINE", "reference")
    plan = cpu_attn.get_scheduler_metadata(**plan_args())
    assert (plan.isa, plan.engine) == ("scalar", "reference")
    monkeypatch.setenv("CPU_ATTN_ISA", "nonsense")
    with pytest.raises(ValueError, match="CPU_ATTN_ISA: 'nonsense'"):
        cpu_attn.get_scheduler_metadata(**plan_args())
    monkeypatch.setenv("CPU_ATTN_ENGINE", "none")
    with pytest.raises(ValueError, match="CPU_ATTN_ENGINE: 'none'"):
        cpu_attn.get_scheduler_metadata(**plan_args(), isa="scalar")
    assert cpu_attn.get_scheduler_metadata(**plan_args(), isa="scalar", engine="native").engine == "native"


def test_plan_is_immutable_and_keeps_its_own_lengths() -> None:
    args = plan_args()
    plan = cpu_attn.get_scheduler_metadata(**args)
    with pytest.raises(AttributeError, match="immutable"):
        plan.isa = "amx"
    call = attention_args()
    call["scheduler_metadata"] = plan
    args["seq_lens"][:] = 2**30
    cpu_attn.attention_with_kv_cache(**call)


@pytest.mark.parametrize("x", [-1, 4097, 1.5, True])
def test_thread_counts(x: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="n: "):
        cpu_attn.set_num_threads(x)


def test_a_copy_of_a_plan_is_the_plan() -> None:
    """It is immutable, and two must not own one C object."""
    plan = cpu_attn.get_scheduler_metadata(**plan_args())
    assert copy.copy(plan) is plan
    assert copy.deepcopy([plan])[0] is plan


def test_a_plan_is_not_pickled() -> None:
    plan = cpu_attn.get_scheduler_metadata(**plan_args())
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"cannot be pickled.* make a new plan"):
            pickle.dumps([plan], protocol)


def test_a_plan_can_be_watched() -> None:
    """By a weak reference, as caches of plans have them."""
    plan = cpu_attn.get_scheduler_metadata(**plan_args())
    watched = weakref.ref(plan)
    assert watched() is plan
    del plan
    assert watched() is None


def test_nothing_is_kept_of_names_that_are_refused() -> None:
    """For ever, as a cache of results would."""
    caches = write_args()
    plan = plan_args()

    def refuse(names: range) -> None:
        for i in names:
            name = f"odd{i}"
            with suppress(ValueError):
                cpu_attn.get_kv_cache_shape(1, 16, 1, 8, "float32", kv_cache_dtype=name)
            with suppress(ValueError):
                cpu_attn.reshape_and_cache(**caches, kv_cache_dtype=name)
            with suppress(ValueError):
                cpu_attn.get_scheduler_metadata(**plan, kv_cache_dtype=name)
            for argument in ({"isa": name}, {"engine": name}, {"kv_cache_layout": name}):
                with suppress(ValueError):
                    cpu_attn.get_scheduler_metadata(**plan, **argument)

    refuse(range(100))
    tracemalloc.start()
    try:
        refuse(range(100, 200))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        refuse(range(200, 1200))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()
