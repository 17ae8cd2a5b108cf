# SPDX-License-Identifier: Apache-2.0
"""Whatever was accepted before, what has changed since is seen: in objects that C reads where they lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn
from cpu_attn import _arrays, _check, _dtypes, ops, rotary
from cpu_attn._native import ffi, lib

from ..cases.case import Case
from ..cases.judge import same_bits
from ..cases.problem import build
from ..cases.run import run
from ..harness.kernels import KERNELS
from ..harness.steps import attention_args, plan_args, write_args
from ..python.test_arrays import WRAP, Tensor
from ..python.test_errors import ATTENTION, WRITE, refuses

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
attention, write = cpu_attn.attention_with_kv_cache, cpu_attn.reshape_and_cache
Args = dict[str, Any]


def full_attention_args(dtype: str = "float32") -> Args:
    """Every array that there can be."""
    args = attention_args(dtype, dynamic_causal=np.array([1, 1], np.int32))
    args["dynamic_causal"] = np.array([1, 1], np.int32)
    args["alibi_slopes"], args["s_aux"] = np.full(4, 0.5, F32), np.array([-1, 0, 1, 2], F32)
    args["selected_blocks"] = np.array([[[0, 1], [1, -1]], [[0, -1], [0, -1]]], np.int32)
    args["attn_bias"] = np.ones((2, 4, 3, 20), F32)
    return args


def selecting_args() -> Args:
    """The same where query tokens select their keys in place of blocks."""
    args = full_attention_args()
    del args["selected_blocks"]
    plan = plan_args() | {"dynamic_causal": args["dynamic_causal"], "max_selected_tokens": 4}
    args["scheduler_metadata"] = cpu_attn.get_scheduler_metadata(**plan)
    args["selected_tokens"] = np.array([[0, 3, 17], [18, -1, -1], [1, 2, 19], [-1, -1, -1]], np.int32)
    return args


def feeding_args() -> Args:
    """Caches of integers, which alone feed errors back."""
    shape = cpu_attn.get_kv_cache_shape(4, 16, 2, 8, "float32", kv_cache_dtype="int8")
    caches = {name: np.zeros(shape, np.uint8) for name in ("key_cache", "value_cache")}
    return write_args() | caches | {"kv_cache_dtype": "int8", "k_feedback": np.ones((2, 8, 8), F32)}


def raised_by(call: Callable[..., Any], args: Args) -> tuple[type[Exception], str] | None:
    try:
        call(**args)
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    return None


def refused_again(call: Callable[..., Any], good: Args, spoiled: Args, *, times: int = 2) -> None:
    """After a call that is accepted, the spoiled one raises what it raises without that, and writes nothing."""
    want = raised_by(call, spoiled)
    assert want is not None, "nothing is wrong with it"
    call(**good)
    for _ in range(times):
        refuses(call, spoiled, want[0], want[1])


SPOILED = [(attention, attention_args, *c) for c in ATTENTION] + [(write, write_args, *c) for c in WRITE]


@pytest.mark.parametrize(("call", "make", "spoiled", "error", "words"), SPOILED, ids=["-".join(c[2]) for c in SPOILED])
def test_bad_input_after_good(call: Any, make: Any, spoiled: Args, error: type[Exception], words: list[str]) -> None:
    good = make()
    call(**good)
    call(**good)
    refuses(call, good | spoiled, error, *words)
    call(**good)


NAMES = {attention: _check.ATTENTION, write: _check.WRITE}
MAKE = ((attention, full_attention_args), (write, write_args))
OTHERS = {"selected_tokens": (attention, selecting_args), "k_feedback": (write, feeding_args)}  # of calls of their own
EACH = [(call, make, name) for call, make in MAKE for name in NAMES[call] if name not in OTHERS]
EACH += [(*call, name) for name, call in OTHERS.items()]


@pytest.mark.parametrize(("call", "make", "name"), EACH, ids=[c[2] for c in EACH])
@pytest.mark.parametrize("what", ["dtype", "order", "shape", "reversed", "one-more-axis", "fewer", "none"])
def test_each_array_is_seen_to_change(call: Any, make: Any, name: str, what: str) -> None:
    good = make()
    x = good[name]
    other: Any = {
        "dtype": lambda: x.view({4: np.uint32, 8: np.uint64}[x.itemsize]),
        "order": lambda: x.astype(x.dtype.newbyteorder()),
        "shape": lambda: np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype),
        "reversed": lambda: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "one-more-axis": lambda: x.copy()[None],
        "fewer": lambda: np.zeros((*x.shape[:-1], x.shape[-1] - 1), x.dtype),
        "none": lambda: None,
    }[what]()
    spoiled = good | {name: other}
    if raised_by(call, spoiled) is not None:
        refused_again(call, good, spoiled)


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")  # of NumPy 2.5
@pytest.mark.parametrize(("call", "make", "name"), EACH, ids=[c[2] for c in EACH])
def test_the_same_object_is_seen_to_change(call: Any, make: Any, name: str) -> None:
    """In place: its shape, its dtype of the same itemsize, its place."""
    good = make()
    call(**good)
    x = good[name]
    shape = x.shape
    x.shape = (1, *shape)
    refuses(call, good, ValueError, name, f"{len(shape) + 1} axes")
    x.shape = shape
    call(**good)
    own = x.dtype
    with np.errstate(all="ignore"):
        x.dtype = {4: np.uint32, 8: np.uint64}[own.itemsize]
    refuses(call, good, TypeError, name, "uint")
    x.dtype = own
    call(**good)


@pytest.mark.parametrize(("given", "made"), [(F16, "bfloat16"), (BF16, "float16")])
@pytest.mark.parametrize("name", ["query", "output", "key_cache", "value_cache"])
def test_dtypes_of_the_same_itemsize(given: Any, made: str, name: str) -> None:
    good = attention_args(made)
    refused_again(attention, good, good | {name: good[name].view(given)})


@pytest.mark.parametrize(("call", "make", "name"), [e for e in EACH if e[2] in NAMES[e[0]][:2]])
def test_what_becomes_readonly(call: Any, make: Any, name: str) -> None:
    good = make()
    call(**good)
    good[name].flags.writeable = False
    refuses(call, good, ValueError, name, "read-only")
    good[name].flags.writeable = True
    call(**good)


FULL = [name for name in _check.ATTENTION if name != "selected_tokens"]
PAIRS = [("output", n) for n in FULL[1:]] + [("lse", n) for n in FULL[2:]]


@pytest.mark.parametrize(("output", "other"), PAIRS)
def test_overlap_is_looked_for_every_time(output: str, other: str) -> None:
    """Same shapes and strides as before: only the address differs, by all but one element."""
    good = full_attention_args()
    attention(**good)
    a, b = good[output], good[other]
    memory = np.zeros(a.nbytes + b.nbytes + 64, np.uint8)
    for first, second in ((a, b), (b, a)):
        at = first.nbytes - 4
        x = memory[: first.nbytes].view(first.dtype).reshape(first.shape)
        y = memory[at : at + second.nbytes].view(second.dtype).reshape(second.shape)
        x[...], y[...] = first, second
        spoiled = good | {output: x if first is a else y, other: y if first is a else x}
        spoiled[other][...] = b
        refuses(attention, spoiled, ValueError, f"{output}: shares memory with {other}")
        apart = memory[first.nbytes : first.nbytes + second.nbytes].view(second.dtype).reshape(second.shape)
        apart[...] = second
        x[...] = first
        attention(**(good | {output: x if first is a else apart, other: apart if first is a else x}))


@pytest.mark.parametrize(("backwards", "forwards"), [("query", "output"), ("output", "query")])
def test_overlap_with_tokens_that_go_backwards(backwards: str, forwards: str) -> None:
    """All of such an array but its first token lies before where it begins."""
    good = attention_args()
    size, shape = good["query"].size, good["query"].shape
    memory = np.zeros(3 * size, F32)

    def step(apart: int) -> Args:
        """The other array so many elements behind the lowest one of the array that goes backwards."""
        at = size + apart
        arrays = {backwards: memory[size : 2 * size].reshape(shape)[::-1], forwards: memory[at : at + size]}
        arrays[forwards] = arrays[forwards].reshape(shape)
        arrays["query"][...] = good["query"]
        return good | arrays

    attention(**step(size))
    want = attention_args()
    attention(**want)
    for apart in (-size, size):
        given = step(apart)
        attention(**given)
        assert np.array_equal(given["output"], want["output"])
    for apart in (1 - size, -1, 0, 1, size - 1):
        refuses(attention, step(apart), ValueError, "output: shares memory with query")


def test_caches_that_overlap() -> None:
    good = write_args()
    write(**good)
    memory = np.zeros(2 * good["key_cache"].size, F32)
    shape, size = good["key_cache"].shape, good["key_cache"].size
    near, far = memory[size - 1 : 2 * size - 1].reshape(shape), memory[size:].reshape(shape)
    first = memory[:size].reshape(shape)
    refuses(write, good | {"key_cache": first, "value_cache": near}, ValueError, "shares memory with value_cache")
    write(**(good | {"key_cache": first, "value_cache": far}))
    for name in ("key", "value"):
        inside = memory[: good[name].size].reshape(good[name].shape)
        refuses(write, good | {"key_cache": first, name: inside}, ValueError, f"key_cache: shares memory with {name}")


def test_what_interleaves_may_do_so_again_and_not_otherwise() -> None:
    """K and V of a block side by side, then somewhere else, then nearer by one element."""
    good = write_args()
    both = [np.zeros((4, 2, 256), F32) for _ in range(2)]

    def caches(x: Any, apart: int) -> Args:
        strides = (2048, 1024, 32, 4)
        views = [np.lib.stride_tricks.as_strided(x.reshape(-1)[at:], (4, 2, 16, 8), strides) for at in (0, apart)]
        return good | {"key_cache": views[0], "value_cache": views[1]}

    write(**caches(both[0], 128))
    write(**(caches(both[0], 128)))
    write(**(caches(both[1], 128)))
    assert np.array_equal(*both)
    for apart in (127, 0):
        refuses(write, caches(both[0], apart), ValueError, "key_cache: shares memory with value_cache")
        write(**(caches(both[0], 128)))


def test_strides_and_places() -> None:
    good = attention_args()
    attention(**good)
    wide = np.zeros((4, 4, 8, 2), F32)[..., 0]
    refused_again(attention, good, good | {"query": wide})
    odd = np.zeros(4 * 4 * 8 * 4 + 8, np.uint8)[2:-6].view(F32).reshape(4, 4, 8)
    refused_again(attention, good, good | {"query": odd})
    refused_again(attention, good, good | {"output": odd})
    bytewise = np.lib.stride_tricks.as_strided(np.zeros(4000, F32), (4, 4, 8), (130, 32, 4))
    refused_again(attention, good, good | {"query": bytewise})
    thick = np.lib.stride_tricks.as_strided(np.zeros(4000, F32), (4, 4, 8), (64, 32, 4))
    refused_again(attention, good, good | {"output": thick})
    args = good | {"query": np.ascontiguousarray(good["query"][::-1])[::-1], "output": np.zeros((4, 4, 8), F32)}
    attention(**args)
    assert np.array_equal(args["output"], good["output"])


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("call", "make", "backwards", "other"),
    [
        (attention, attention_args, "query", "output"),
        (attention, attention_args, "output", "query"),
        (write, write_args, "key", "key_cache"),
        (write, write_args, "key_cache", "key"),
    ],
)
def test_memory_that_is_read_backwards(call: Any, make: Any, backwards: str, other: str, axes: tuple[int, ...]) -> None:
    """It ends at its address and begins before it: the other array right behind or before it is apart, one head nearer
    it is not."""
    good = make()
    one, two, head = good[backwards], good[other], 8
    good[backwards] = np.flip(np.flip(one, axes).copy(), axes)

    def placed(first: int, second: int) -> Args:
        memory = np.zeros(one.size + two.size, F32)
        views = {
            backwards: np.flip(memory[first:][: one.size].reshape(one.shape), axes),
            other: memory[second:][: two.size].reshape(two.shape),
        }
        views[backwards][...], views[other][...] = one, two
        return good | views

    call(**good)
    call(**(placed(0, one.size)))
    call(**(placed(two.size, 0)))
    refused_again(call, good, placed(0, one.size - head))
    refused_again(call, good, placed(two.size - head, 0))


def test_contents_are_looked_at_every_time() -> None:
    good = attention_args()
    attention(**good)
    for name, at, value, words in (
        ("seq_lens", 1, 8, "seq_lens[1]: 8, scheduler_metadata was made for 7"),
        ("query_start_loc", 1, 2, "query_start_loc[1]: 2, scheduler_metadata was made for 3"),
        ("block_table", (0, 1), 4, "block_table: request 0: position 1 holds block 4"),
        ("block_table", (1, 0), -1, "block_table: request 1: position 0 holds block -1"),
    ):
        before = good[name][at]
        good[name][at] = value
        refuses(attention, good, ValueError, words)
        good[name][at] = before
        attention(**good)
    full = full_attention_args()
    attention(**full)
    full["dynamic_causal"][1] = 0
    refuses(attention, full, ValueError, "causal: request 1: is False")
    slots = write_args()
    write(**slots)
    slots["slot_mapping"][3] = 64
    refuses(write, slots, ValueError, "slot_mapping[3]: 64")


def test_another_plan() -> None:
    """Accepted for one plan says nothing of another."""
    good = attention_args()
    attention(**good)
    for plan in ({"num_heads": 8}, {"num_kv_heads": 4}, {"head_size": 16}, {"head_size_v": 4}, {"num_reqs": 1}):
        if "num_reqs" in plan:
            plan |= {"seq_lens": np.array([20], np.int32), "query_start_loc": np.array([0, 4], np.int32)}
        other = good | {"scheduler_metadata": attention_args(**plan)["scheduler_metadata"]}
        refused_again(attention, good, other)
    for isa in [isa for isa, dtype in KERNELS if dtype == "float32"]:  # all of them take these caches
        plan = attention_args(isa=isa)["scheduler_metadata"]
        assert attention(**good | {"scheduler_metadata": plan}) is good["output"]


def test_lengths_may_not_be_missing_where_a_cache_had_none() -> None:
    good = attention_args()
    cache = cpu_attn.PagedKVCache(4, 16, 2, 8)
    for _ in range(2):
        cache.attend(good["query"], good["block_table"], good["scheduler_metadata"], output=good["output"])
    refuses(attention, good | {"seq_lens": None, "query_start_loc": None, "lse": None}, TypeError, "query_start_loc")


@pytest.mark.parametrize("kind", WRAP)
def test_foreign_arrays_after_numpy_and_back(kind: str) -> None:
    args = attention_args()
    attention(**args)
    want = args["output"].copy()
    wrapped = {k: WRAP[kind](v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    for _ in range(2):
        for mixed in (args, wrapped, args | {"query": wrapped["query"]}, wrapped | {"query": args["query"]}):
            args["output"][:] = 0
            attention(**mixed)
            assert np.array_equal(args["output"], want)
    attention(**wrapped)


def test_tensors_are_looked_at_every_time() -> None:
    args = attention_args()
    wrapped = {k: Tensor(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    attention(**wrapped)
    query = wrapped["query"]
    for field, value, error, words in (
        ("shape", (4, 8, 4), ValueError, "query: axis 1 is 8"),
        ("dtype", "torch.int32", TypeError, "query: dtype int32"),
        ("requires_grad", True, ValueError, "query: requires grad"),
        ("device", SimpleNamespace(type="cuda"), ValueError, "query: lies on"),
        ("stride", lambda: (32, 8, 2), ValueError, "query: the last axis has stride 2"),
        ("data_ptr", lambda: args["query"].ctypes.data + 2, ValueError, "query: address"),
    ):
        before = getattr(query, field)
        setattr(query, field, value)
        with pytest.raises(error, match=words):
            attention(**wrapped)
        setattr(query, field, before)
        attention(**wrapped)


def test_subclasses_are_not_taken_for_arrays() -> None:
    """Their attributes may be anything; what they say of themselves is believed, as before."""

    class Sub(np.ndarray):
        pass

    args = attention_args()
    attention(**args)
    want = args["output"].copy()
    args["output"][:] = 0
    args["query"] = args["query"].view(Sub)
    attention(**args)
    assert np.array_equal(args["output"], want)


@pytest.mark.parametrize("x", [True, 1.0])
def test_what_equals_but_is_not(x: Any) -> None:
    good = attention_args()
    attention(**good | {"sliding_window": (-1, -1)})
    attention(**good)
    refused_again(attention, good, good | {"sliding_window": x})
    refused_again(attention, good, good | {"k_scale": True})
    refused_again(attention, good, good | {"kv_cache_dtype": F32})
    refused_again(attention, good, good | {"causal": 1.0})
    refused_again(attention, good, good | {"scale": True})
    refused_again(attention, good, good | {"sliding_window": (-1.0, -1)})
    narrow = attention_args(sliding_window=1)
    refused_again(attention, narrow, narrow | {"sliding_window": x})


def test_isa_by_name_is_resolved_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_args()
    write(**good)
    write(**good)
    monkeypatch.setenv("CPU_ATTN_ISA", "nonsense")
    refuses(write, good, ValueError, "nonsense")
    refuses(write, good | {"isa": ["auto"]}, TypeError, "isa")
    refuses(write, good | {"isa": "auto", "kv_cache_dtype": ["auto"]}, TypeError, "kv_cache_dtype")


@pytest.mark.parametrize("dtype", list(_dtypes.DTYPES))
def test_c_reads_what_numpy_says(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        shape = tuple(rng.integers(0, 4, rng.integers(1, 6)))
        x = np.zeros(tuple(2 * n + 1 for n in shape), _dtypes.DTYPES[dtype])
        x = x[tuple(slice(None, None, int(rng.choice([-2, -1, 1, 2]))) for _ in shape)]
        x = np.asarray(x).transpose(rng.permutation(x.ndim))
        x.flags.writeable = bool(rng.integers(2))
        got = ffi.new("ca_array *")
        assert lib.ca_read_array(id(x), got) == (x.ndim <= 4)
        if x.ndim <= 4:
            n = x.ndim
            assert got.address == x.ctypes.data
            assert (got.ndim, got.itemsize, got.writable) == (n, x.itemsize, x.flags.writeable)
            assert tuple(got.shape)[:n] == x.shape
            assert tuple(s * x.itemsize for s in got.strides)[:n] == x.strides
            assert bytes(ffi.buffer(got)) == bytes(ffi.buffer(_arrays.described([_arrays.view("x", x)])))


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(3, F32).view(np.recarray),
        np.zeros(3, ">f4"),
        np.zeros(3, np.float64),
        np.zeros(3, "V2"),
        [1],
        5,
        np.ndarray,
        "x",
    ],
)
def test_c_does_not_read_what_it_does_not_know(x: Any) -> None:
    assert not lib.ca_read_array(id(x), ffi.new("ca_array *"))


@pytest.mark.parametrize("isa", ["auto", "vec", "vec16", *dict(KERNELS)])
def test_every_name_of_an_isa_is_known_again(isa: str) -> None:
    args = {**write_args("bfloat16"), "isa": isa}
    for name in ("key", "value", "key_cache", "value_cache"):
        args[name] = np.concatenate([args[name]] * 2, axis=-1)
    for kv_cache_dtype in ("auto", "bfloat16/auto"):
        written = []
        for _ in range(2):
            caches = {name: np.zeros_like(args[name]) for name in ("key_cache", "value_cache")}
            write(**args | caches, kv_cache_dtype=kv_cache_dtype)
            written.append([cache.view(np.uint16) for cache in caches.values()])
        assert all(first.any() and np.array_equal(first, again) for first, again in zip(*written, strict=True))


def test_what_c_would_not_take_after_all_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*given: Any) -> int:
        given[-1].status = lib.CA_UNREAD
        return int(lib.CA_UNREAD)

    args = write_args()
    turned = args | {
        "query": np.zeros((5, 2, 8), F32),
        "positions": np.arange(5),
        "cos_sin_cache": np.ones((9, 8), F32),
    }
    names = {name: getattr(lib, name) for name in ("CA_UNREAD", "CA_UNNAMED", "CA_SMALL_WORKSPACE")}
    for module in (ops, rotary):
        calls = dict.fromkeys(("ca_attend", "ca_write", "ca_rotary_write"), unread)
        monkeypatch.setattr(module, "lib", SimpleNamespace(**names, **calls))
    for call, given in ((attention, attention_args()), (write, args), (cpu_attn.rotary_reshape_and_cache, turned)):
        with pytest.raises(RuntimeError, match="nothing was computed"):
            call(**given)


def test_python_reads_where_c_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another Python than CPython."""
    args = attention_args()
    attention(**args)
    want = args["output"].copy()
    lib.ca_know_numpy(0, 0, 0)
    try:
        args["output"][:] = 0
        for _ in range(2):
            attention(**args)
            assert np.array_equal(args["output"], want)
        refuses(attention, args | {"query": np.zeros((4, 4, 9), F32)}, ValueError, "query", "axis 2 is 9")
        write(**write_args())
    finally:
        _arrays._let_c_read_numpy()
    attention(**args)
    assert ops.thread_state.workspace[1] >= args["scheduler_metadata"].workspace_bytes


def test_memory_outlives_a_call_within_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler or __del__ may make one."""
    used: list[tuple[Any, Any]] = []

    def attend(*given: Any) -> int:
        ops.thread_state.grow(2**22)
        used.append((given[-3], ops.thread_state.workspace[0]))
        return int(lib.ca_attend(*given))

    names = {"CA_SMALL_WORKSPACE": lib.CA_SMALL_WORKSPACE}
    monkeypatch.setattr(ops, "lib", SimpleNamespace(ca_attend=attend, **names))
    thread = threading.Thread(target=lambda: attention(**attention_args()))  # which has no memory yet
    thread.start()
    thread.join()
    assert len(used) == 2
    assert used[1][0] is used[1][1]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8", "int4", "auto/int8"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_what_the_workspace_held_does_not_matter(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """Zeros, or bytes that make NaN of every dtype; a prompt alone and beside others, and one of whose keys few are
    selected, so that rows see none of them within their window."""
    kinds: list[tuple[Any, ...]] = [((40,), (40,), 4, {}), ((40, 70, 3, 1), (40, 1100, 300, 17), 4, {})]
    kinds.append(((300,), (300,), 2, {"selected": 0.5, "sliding_window": 5}))
    for *sizes, more in kinds:
        problem = build(Case("filled", *sizes, 2, 64, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **more))
        results = [run(problem, isa)]
        for fill in (0, 0xFF, 0x7F):
            memory, size = ops.thread_state.workspace
            ffi.memmove(memory, bytes([fill]) * size, size)
            results.append(run(problem, isa))
        for result in results[1:]:
            assert all(same_bits(one, other) for one, other in zip(result, results[0], strict=True))
