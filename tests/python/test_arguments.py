# SPDX-License-Identifier: Apache-2.0
"""The tables of native/check/arguments.c, row by row, and whose memory native/check/overlap.c takes for shared."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cpu_attn
from cpu_attn import _arguments, _arrays, _check, sparse
from cpu_attn._arguments import ATTENTION, PLAN, REQUIRED, WRITE, Array, Call
from cpu_attn._native import lib

from ..harness.steps import plan_args, write_args
from ..native.test_repeated import feeding_args, full_attention_args, selecting_args
from ..python.test_errors import refuses

F32 = np.float32
Args = dict[str, Any]


def rotary_args() -> Args:
    """Every array that there can be."""
    return write_args() | {
        "query": np.ones((5, 4, 8), F32),
        "query_out": np.zeros((5, 4, 8), F32),
        "positions": np.arange(5),
        "cos_sin_cache": np.ones((9, 6), F32),
        "q_weight": np.ones(8, F32),
        "k_weight": np.ones(8, F32),
    }


def step_args() -> Args:
    arrays = {"dynamic_causal": np.ones(2, np.int32), "block_table": np.array([[1, 3], [2, 0]], np.int32)}
    return plan_args() | arrays | {"block_size": 16, "block_nodes": np.zeros(4, np.int32)}


def bounds_args() -> Args:
    block_min, block_max = np.zeros((2, 4, 2, 8), F32)
    return {
        "key": np.ones((5, 2, 8), F32),
        "slot_mapping": np.arange(5),
        "block_min": block_min,
        "block_max": block_max,
        "block_size": 16,
    }


def scores_args() -> Args:
    step, bounds = plan_args(), bounds_args()
    return {
        "query": np.ones((int(step["query_start_loc"][-1]), 4, 8), F32),
        **{name: bounds[name] for name in ("block_min", "block_max", "block_size")},
        "block_table": np.array([[1, 3], [2, 0]], np.int32),
        **{name: step[name] for name in ("seq_lens", "query_start_loc")},
    }


def _without(name: str, names: tuple[str, ...] = _check.ATTENTION) -> tuple[str, ...]:
    return tuple(x for x in names if x != name)


CALLS = {
    "attention": (cpu_attn.attention_with_kv_cache, full_attention_args, _without("selected_tokens")),
    "selecting": (cpu_attn.attention_with_kv_cache, selecting_args, _without("selected_blocks")),
    "write": (cpu_attn.reshape_and_cache, write_args, _without("k_feedback", _check.WRITE)),
    "rotary": (cpu_attn.rotary_reshape_and_cache, rotary_args, _without("k_feedback", _check.ROTARY)),
    "feeding": (cpu_attn.rotary_reshape_and_cache, lambda: rotary_args() | feeding_args(), _check.ROTARY),
    "step": (cpu_attn.get_scheduler_metadata, step_args, _check.STEP),
    "bounds": (sparse.update_block_bounds, bounds_args, _check.BOUNDS),
    "scores": (sparse.score_blocks, scores_args, _without("scores", _check.SCORES)),
}
ROWS = [(call, name) for call, (_, _, names) in CALLS.items() for name in names]
ROWS = [row for row in ROWS if row not in (("feeding", "key_cache"), ("feeding", "value_cache"))]  # of bytes
OPTIONAL = {"lse", "dynamic_causal", "alibi_slopes", "s_aux", "selected_blocks", "attn_bias", "query_out"}
OPTIONAL |= {"q_weight", "k_weight", "selected_tokens", "block_nodes", "k_feedback"}
# Axes that no other argument has, of arrays that may be larger than a call needs: with one more they are no less valid.
FREE = {("block_table", 1), ("selected_blocks", 2), ("attn_bias", 2), ("attn_bias", 3), ("cos_sin_cache", 0)}
FREE |= {("selected_tokens", 1), ("block_nodes", 0)}
# Axes that the first argument which has them binds: it is another one that does not fit then.
BOUND = {("key", 0): "value", ("key", 1): "value", ("query", 1): "query_out"}
BOUND |= {("key_cache", 0): "value_cache", ("key_cache", 2): "value_cache"}
BOUND |= {("key", 2): "key_cache", ("value", 2): "value_cache"}
BOUND_OF = {
    "bounds": {("key", 0): "slot_mapping", ("key", 1): "block_min", ("key", 2): "block_min"}
    | {("block_min", 0): "block_max"},
    "scores": {("query", 2): "block_min", ("block_table", 0): "seq_lens"}
    | {("block_min", axis): "block_max" for axis in (0, 1)},
}
OUTPUTS = {"attention": 2, "selecting": 2, "write": 2, "rotary": 3, "feeding": 3, "step": 0, "bounds": 2, "scores": 0}


def bound(call: str, name: str, axis: int) -> str:
    """Which argument does not fit where this one has one more along an axis."""
    if call in BOUND_OF:
        return BOUND_OF[call].get((name, axis), name)
    first = {"attention": ("key_cache",), "selecting": ("key_cache",), "rotary": ("key", "value", "key_cache", "query")}
    first["feeding"] = first["rotary"]
    return BOUND.get((name, axis), name) if call == "write" or name in first.get(call, ()) else name


@pytest.mark.parametrize(("call", "name"), ROWS)
def test_every_row(call: str, name: str) -> None:
    """Refused by name, before a byte is written."""
    function, make, _ = CALLS[call]
    good = make()
    x = good[name]

    def spoiled(other: Any, error: type[Exception], *words: str) -> None:
        refuses(function, good | {name: other}, error, *words)

    for dtype in (np.float64, np.uint16, np.int32 if x.dtype.kind == "f" else F32):
        spoiled(np.zeros(x.shape, dtype), TypeError, f"{name}: dtype {np.dtype(dtype)}, expected {x.dtype}")
    for other in (x[None], x[None, None, None, None], x[0]):
        spoiled(other, ValueError, f"{name}: {other.ndim} axes, expected {x.ndim}: [")
    spoiled(np.stack([x, x], axis=-1)[..., 0], ValueError, f"{name}: the last axis has stride 2, expected 1 (dense)")
    memory = np.zeros(x.nbytes + 8, np.uint8)[1 : x.nbytes + 1].view(x.dtype).reshape(x.shape)
    spoiled(memory, ValueError, f"{name}: address", f"multiple of its {x.itemsize}-byte")
    spoiled([1.0], TypeError, f"{name}: expected an array on the CPU, got list")
    if name not in OPTIONAL and (call, name) != ("step", "block_table"):
        spoiled(None, TypeError, f"{name}: expected an array on the CPU, got NoneType")


@pytest.mark.parametrize(("call", "name"), ROWS)
def test_every_axis(call: str, name: str) -> None:
    function, make, _ = CALLS[call]
    good = make()
    x = good[name]
    for axis in range(x.ndim):
        shape = [n + (i == axis) for i, n in enumerate(x.shape)]
        other = np.ones(shape, x.dtype) if x.dtype.kind == "f" else np.full(shape, -1, x.dtype)
        if (name, axis) in (("block_table", 1), ("block_nodes", 0)):
            other[..., :-1] = x
        if (name, axis) in FREE:
            function(**good | {name: other})
        elif (name, axis) == ("cos_sin_cache", 1):
            refuses(function, good | {name: other}, ValueError, "cos_sin_cache: rot_dim is 7, expected an even number")
        elif (call, name, axis) == ("scores", "query", 1):
            refuses(function, good | {name: other}, ValueError, "block_min: 2 kv heads do not divide num_heads = 5")
        else:
            refuses(function, good | {name: other}, ValueError, f"{bound(call, name, axis)}: axis ", ", expected ")


@pytest.mark.parametrize(
    ("call", "output", "other"),
    [
        (call, names[o], names[i])
        for call, (_, _, names) in CALLS.items()
        for o in range(OUTPUTS[call])
        for i in range(o + 1, len(names))
    ],
)
def test_every_overlap(call: str, output: str, other: str) -> None:
    """The last bytes of one are the first of the other."""
    function, make, _ = CALLS[call]
    good = make()
    a, b = good[output], good[other]
    memory = np.zeros(a.nbytes + b.nbytes, np.uint8)
    for first, second in ((a, b), (b, a)):
        at = first.nbytes - 8
        x = memory[: first.nbytes].view(first.dtype).reshape(first.shape)
        y = memory[at : at + second.nbytes].view(second.dtype).reshape(second.shape)
        arrays = {output: x, other: y} if first is a else {output: y, other: x}
        arrays[other][...] = b
        refuses(function, good | arrays, ValueError, f"{output}: shares memory with {other}")


@pytest.mark.parametrize(("call", "name"), [(c, n) for c, (_, _, names) in CALLS.items() for n in names[: OUTPUTS[c]]])
def test_every_output(call: str, name: str) -> None:
    function, make, _ = CALLS[call]
    good = make()
    x = good[name]
    x.flags.writeable = False
    refuses(function, good, ValueError, f"{name}: is read-only")
    x.flags.writeable = True
    for axis in range(x.ndim - 1 - (name.endswith("_cache"))):
        strides = [0 if i == axis else s for i, s in enumerate(x.strides)]
        other = np.lib.stride_tricks.as_strided(x.copy(), strides=strides)
        refuses(function, good | {name: other}, ValueError, f"{name}: strides", "make elements overlap")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_plain_caches(layout: str, name: str) -> None:
    """Axes in the order of the layout; rows of a block may lie apart."""
    shape = (4, 2, 16, 8) if layout == "HND" else (4, 16, 2, 8)
    caches = {n: np.zeros((*shape[:3], 12), F32)[..., :8] for n in ("key_cache", "value_cache")}
    good = write_args() | caches | {"kv_cache_layout": layout}
    cpu_attn.reshape_and_cache(**good)
    names = ("num_blocks", "num_kv_heads", "block_size", "head_size")
    names = names if layout == "HND" else (names[0], names[2], names[1], names[3])
    for axis in range(4):
        other = np.zeros([n + (i == axis) for i, n in enumerate(shape)], F32)
        refused = "value_cache" if names[axis] in ("num_blocks", "block_size") else name
        words = f"{refused}: axis {axis} is ", f", expected {names[axis]} = "
        refuses(cpu_attn.reshape_and_cache, good | {name: other}, ValueError, *words)
    refuses(cpu_attn.reshape_and_cache, good | {name: caches[name][..., ::2]}, ValueError, f"{name}: the last axis")


def test_names_that_other_arrays_had() -> None:
    """What isa and kv_cache_dtype meant for one dtype, head size and layout is not believed of another."""
    call, wide = cpu_attn.reshape_and_cache, {}
    for name, x in write_args().items():
        wide[name] = x if name == "slot_mapping" else np.concatenate([x, x], axis=-1)
    for _ in range(2):
        call(**wide, isa="vec16")
        refuses(call, write_args() | {"isa": "vec16"}, ValueError, "isa: 'vec16' is for head sizes that are multiples")
        halves = {k: x if k == "slot_mapping" else x.astype(np.float16) for k, x in wide.items()}
        call(**halves, isa="vec16")
        caches = {k: np.zeros((4, 2, 16, 10), np.uint8) for k in ("key_cache", "value_cache")}
        call(**write_args() | caches, kv_cache_dtype="int8")
        plain = {"kv_cache_dtype": "int8", "kv_cache_layout": "HND"}
        refuses(call, write_args() | caches | plain, ValueError, "kv_cache_layout: 'HND' holds no int8")
        refuses(call, halves | {"kv_cache_dtype": "float32"}, ValueError, "kv_cache_dtype: 'float32' is none of")
        call(**wide, kv_cache_dtype="float32")


def test_sizes_that_no_int32_holds() -> None:
    """Memory that is one element."""
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2, 2**31), (0, 0))
    with pytest.raises(ValueError, match=f"block_table: axis 1 is {2**31}, more than {2**31 - 1}"):
        cpu_attn.get_scheduler_metadata(**step_args() | {"block_table": x})


Strided = tuple[int, tuple[int, ...], tuple[int, ...], int]  # address in elements, shape, strides, itemsize
AXES = st.lists(st.tuples(st.integers(0, 4), st.integers(-7, 7)), max_size=4)
STRIDED = st.builds(
    lambda at, axes, item: (at, tuple(n for n, _ in axes), tuple(s for _, s in axes), item),
    st.integers(1000, 1040),
    AXES,
    st.sampled_from([1, 2, 4, 8]),
)
NAMES = {1: "uint8", 2: "float16", 4: "float32", 8: "int64"}


def array_of(x: Strided) -> _arrays.Array:
    """Nobody reads what lies there."""
    at, shape, strides, item = x
    return _arrays.Array(at * item, shape, strides, NAMES[item], True, None)


def elements_of(x: Strided) -> list[int]:
    at, shape, strides, _ = x
    return [at + sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*map(range, shape))]


def bytes_of(x: Strided) -> set[int]:
    return {at * x[3] + i for at in elements_of(x) for i in range(x[3])}


def shares(a: _arrays.Array, b: _arrays.Array) -> bool:
    try:
        _check.disjoint("a", a, {"b": b})
    except ValueError as error:
        assert str(error) == "a: shares memory with b"
        return True
    return False


@given(STRIDED, STRIDED)
@example((1000, (4, 4), (7, -3), 4), (1001, (4, 4), (7, 3), 4))
def test_shared_memory(a: Strided, b: Strided) -> None:
    """Exactly where two arrays have a byte in common."""
    want = bool(bytes_of(a) & bytes_of(b))
    assert shares(array_of(a), array_of(b)) == want
    assert shares(array_of(b), array_of(a)) == want
    given = [_arrays.described([array_of(x)]) for x in (a, b)]
    assert lib.ca_share_memory(*given) == want


@given(STRIDED)
def test_written_memory(x: Strided) -> None:
    """Where no axis steps into what the shorter ones reach no two elements coincide; where two do it is refused."""
    at = elements_of(x)
    try:
        _check.writable("x", array_of(x))
    except ValueError as error:
        assert "make elements overlap" in str(error)
    else:
        assert len(set(at)) == len(at)


def test_caches_that_interleave_are_apart() -> None:
    """However many blocks: K and V of a block, of a head, of a token side by side, one layer among others."""
    for shape, strides, apart in (
        ((2**20, 8, 16, 128), (2**15, 2048, 128, 1), 2**14),
        ((2**20, 8, 16, 128), (2**15, 4096, 128, 1), 2048),
        ((2**20, 16, 8, 128), (2**15, 2048, 256, 1), 128),
        ((2**10, 8, 16, 100), (40 * 12800, 1600, 100, 1), 12800),
    ):
        a = _arrays.Array(4096, shape, strides, "float16", True, None)
        assert not shares(a, _arrays.Array(4096 + 2 * apart, shape, strides, "float16", True, None))
        assert shares(a, _arrays.Array(4096 + 2 * apart - 2, shape, strides, "float16", True, None))


def test_what_would_take_long_counts_as_shared() -> None:
    """Even bytes and an odd one, told apart by no order of the strides."""
    a = _arrays.Array(2**20, (10**6, 10**6, 10**6), (10, 6, 14), "uint8", True, None)
    assert shares(a, _arrays.Array(2**20 + 10**6 + 1, (10**6,), (6,), "uint8", True, None))


@given(st.integers(1, 4), st.integers(1, 2**62), st.integers(-(2**62), 2**62), st.integers(1, 2**61))
def test_sizes_that_no_memory_has(ndim: int, size: int, stride: int, address: int) -> None:
    """Nothing overflows on the way to an answer."""
    a = _arrays.Array(address * 4, (size,) * ndim, (stride,) * ndim, "float32", True, None)
    b = _arrays.Array(4096, (4,), (1,), "float32", True, None)
    assert lib.ca_share_memory(_arrays.described([a]), _arrays.described([b])) in (0, 1)


@pytest.mark.parametrize("call", [PLAN, WRITE, ATTENTION], ids=lambda call: call.name)
def test_functions_take_what_the_table_says(call: Call) -> None:
    """Names, order and defaults; and the docstring has every row."""
    function = getattr(cpu_attn, call.name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [row.name for row in call.rows]
    for row in call.rows:
        default = parameters[row.name].default
        if isinstance(row, Array):
            assert default in (inspect.Parameter.empty, None)
            assert row.optional or default is inspect.Parameter.empty
        else:
            assert default == (inspect.Parameter.empty if row.default is REQUIRED else row.default), row.name
        assert f"\n    {row.name}: " in inspect.getdoc(function)


def test_every_option_is_in_the_plan() -> None:
    """get_scheduler_metadata hands them to _check.options by their places, since ``locals()`` takes 2 us."""
    ranks = {"cp_world_size": 3, "cp_rank": 2, "cp_kv_cache_interleave_size": 5}
    others = [{row.name: True if row.type == "bool" else 7} for row in PLAN.fields if row.name not in ranks]
    assert {*ranks, *(name for one in others for name in one)} == {row.name for row in PLAN.fields}
    for options in (ranks, *others):
        shape = cpu_attn.get_scheduler_metadata(**plan_args() | options)._shape
        for row in PLAN.fields:
            assert getattr(shape, row.name) == options.get(row.name, row.default or 0), (options, row.name)


def test_no_sentence_of_the_table_is_unfinished() -> None:
    for call in _arguments.CALLS:
        for row in call.rows:
            assert row.what.endswith("."), row
