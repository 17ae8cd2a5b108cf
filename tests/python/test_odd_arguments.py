# SPDX-License-Identifier: Apache-2.0
"""Objects that no argument expects, in the place of each: an error that begins with an argument's name, or a result."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import linear, primitives, sparse
from cpu_attn.distributed import ContextParallel, Group, ThreadGroup
from cpu_attn.serving import BlockManager
from cpu_attn.storage import convert

from ..harness.steps import attention_args, plan_args, write_args
from ..python.test_arguments import rotary_args

F32 = np.float32
Args = dict[str, Any]
PagedAttention, KV = cpu_attn.PagedAttention, np.zeros((2, 4, 2 * 16 * 8), F32)
STARTS, LENS, TABLE = (np.array(x, np.int32) for x in ([0, 3, 4], [20, 7], [[1, 3], [2, 0]]))


def tensor(shape: Any = (2, 3), strides: Any = (3, 1), address: Any = 4096, dtype: Any = "torch.float32") -> Any:
    """It is asked as a tensor of torch's is, and says what it likes."""
    device = SimpleNamespace(type="cpu")
    said = {"data_ptr": lambda: address, "stride": lambda: strides, "device": device}
    return SimpleNamespace(shape=shape, dtype=dtype, **said)


class Raises:
    """Whatever it is asked, it fails as nobody expects."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("odd")

    __bool__ = __eq__ = __float__ = __getitem__ = __index__ = __iter__ = __len__ = _fail
    __hash__ = object.__hash__
    shape = property(_fail)


class Unhashable(Raises):
    """It cannot even be looked up."""

    __hash__ = Raises._fail


ODD: dict[str, Any] = {
    "array": np.zeros(2),
    "empty array": np.zeros(0),
    "array of one name": np.array(["auto"]),
    "name of no axes": np.array("auto"),
    "array of names": np.array(["auto", "fp8"]),
    "array of objects": np.array([None, "auto"], object),
    "records": np.zeros(2, [("a", "f4")]),
    "tuple of arrays": (np.zeros(2), np.zeros(2)),
    "none": None,
    "names": ["auto"],
    "mapping": {1: 2},
    "set": {1},
    "surrogate": "\ud800",
    "bytes": b"auto",
    "nan": float("nan"),
    "huge": 10**400,
    "complex": 1j,
    "date": np.datetime64("2020-01-01"),
    "no date": np.datetime64("NaT"),
    "duration": np.timedelta64(5),
    "no duration": np.timedelta64("NaT"),
    "raises": Raises(),
    "raises when hashed": Unhashable(),
    **{f"shape {shape!r}": SimpleNamespace(shape=shape) for shape in (None, 5, "ab", (1.5, 2), (-3, 2), (2**70,), {})},
    "float address": tensor(address=4096.0),
    "address of NumPy's": tensor(address=np.float64(4096)),
    "no address": tensor(address=None),
    "negative address of nothing": tensor((0, 3), address=-8),
    "address past all memory": tensor((0, 3), address=2**70),
    "float strides": tensor(strides=(3.0, 1.0)),
    "float shape": tensor((2.0, 3.0)),
    "text as a shape": tensor("ab"),
    "few strides": tensor(strides=(1,)),
    "few strides of nothing": tensor((0, 3), strides=(1,)),
    "strides past all memory": tensor((1, 3), strides=(2**70, 1)),
    "sizes past all memory": tensor((0, 2**70), strides=(1, 1)),
}


def cache() -> cpu_attn.PagedKVCache:
    return cpu_attn.PagedKVCache(4, 16, 2, 8)


def attend_args() -> Args:
    plan = cache().plan(STARTS, LENS, 4)
    return {"query": np.zeros((4, 4, 8), F32), "block_table": TABLE, "plan": plan}


def index_args() -> Args:
    return {"k": np.zeros((3, 8), F32), "index_cache": np.zeros((4, 16, 8), F32), "slot_mapping": np.arange(3)}


def select_args() -> Args:
    arrays = {"query": np.zeros((4, 2, 8), F32), "index_cache": np.zeros((4, 16, 8), F32)}
    step = {"query_start_loc": STARTS, "seq_lens": LENS, "block_table": TABLE}
    return {**arrays, "weights": np.zeros((4, 2), F32), **step, "topk_tokens": 3}


def bounds(**more: Any) -> Args:
    return {**{name: np.zeros((4, 2, 8), F32) for name in ("block_min", "block_max")}, "block_size": 16, **more}


def score_args() -> Args:
    step = {"query_start_loc": STARTS, "seq_lens": LENS, "block_table": TABLE}
    return bounds(query=np.zeros((4, 4, 8), F32), **step)


def latent_args() -> Args:
    return {
        "kv_c": np.zeros((3, 6), F32),
        "k_pe": np.zeros((3, 2), F32),
        "kv_cache": np.zeros((4, 16, 8), F32),
        "slot_mapping": np.arange(3),
    }


def stored_args() -> Args:
    some = cache()
    return {"descriptor": some.descriptor, "key_cache": some.key_cache, "value_cache": some.value_cache}


def mla_args() -> Args:
    plan = cpu_attn.get_scheduler_metadata(
        2, 4, 1, 8, LENS, "float32", STARTS, head_size_v=6, kv_cache_layout="NHD", isa="auto"
    )
    arrays = {"query": np.zeros((4, 4, 8), F32), "kv_cache": np.zeros((4, 16, 8), F32)}
    step = {"query_start_loc": STARTS, "seq_lens": LENS, "block_table": TABLE}
    how = {"scale": 0.5, "causal": True, "scheduler_metadata": plan}
    return {**arrays, "output": np.zeros((4, 4, 6), F32), **step, **how}


def decode_args() -> Args:
    arrays = {"output": np.zeros((2, 4, 8), F32), "query": np.zeros((2, 4, 8), F32)}
    caches = dict.fromkeys(("key_cache", "value_cache"), np.zeros((4, 2, 16, 8), F32))
    step = {"block_tables": TABLE, "context_lens": LENS, "max_context_len": 20, "kv_cache_dtype": "auto"}
    return {**arrays, **caches, **step, "num_kv_heads": 2, "scale": 0.5, "alibi_slopes": None}


def linear_plan_args() -> Args:
    heads = {"num_k_heads": 2, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    return {"query_start_loc": STARTS, "dtype": "float32", **heads}


def linear_args() -> Args:
    return {
        **{name: np.zeros((4, 2, 8), F32) for name in ("query", "key", "value", "output")},
        **{"state_cache": np.zeros((2, 2, 8, 8), F32), "state_indices": np.arange(2, dtype=np.int32)},
        "linear_attention_metadata": linear.get_linear_attention_metadata(**linear_plan_args()),
    }


def conv_args() -> Args:
    return {
        **{"x": np.zeros((4, 8), F32), "weight": np.zeros((8, 4), F32), "bias": None, "output": np.zeros((4, 8), F32)},
        **{"conv_state": np.zeros((2, 8, 3), F32), "state_indices": np.arange(2, dtype=np.int32)},
        "linear_attention_metadata": linear.get_linear_attention_metadata(STARTS, "float32"),
    }


SIZES = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
KEYS_OF_INDEXER = {name: x for name, x in SIZES.items() if name != "num_kv_heads"}
(ALONE,) = ThreadGroup.make(1)
MANAGER, REQUESTS = BlockManager(cache()), itertools.count()
MANAGER.allocate("a", range(3))
MANAGER.step([("a", range(3))])
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Args]]] = {
    "write": (cpu_attn.reshape_and_cache, write_args),
    "rotary": (cpu_attn.rotary_reshape_and_cache, rotary_args),
    "plan": (cpu_attn.get_scheduler_metadata, plan_args),
    "attention": (cpu_attn.attention_with_kv_cache, attention_args),
    "latents": (cpu_attn.concat_and_cache_mla, latent_args),
    "shape": (cpu_attn.get_kv_cache_shape, lambda: dict(SIZES)),
    "index shape": (sparse.get_index_cache_shape, lambda: dict(KEYS_OF_INDEXER)),
    "index": (sparse.index_and_cache, index_args),
    "select": (sparse.select_tokens, select_args),
    "bounds": (
        sparse.update_block_bounds,
        lambda: bounds(key=np.zeros((3, 2, 8), F32), slot_mapping=np.arange(3)),
    ),
    "score": (sparse.score_blocks, score_args),
    "query blocks": (
        sparse.query_blocks,
        lambda: {"query_start_loc": STARTS, "seq_lens": LENS, "query_block_size": 2},
    ),
    "select pages": (
        sparse.select_blocks,
        lambda: {"scores": np.zeros((2, 2, 4), F32), "seq_lens": LENS, "block_size": 16, "max_selected_blocks": 2},
    ),
    "merge": (
        cpu_attn.merge_states,
        lambda: {"outs": np.zeros((2, 3, 4, 8), F32), "lses": np.zeros((2, 4, 3), F32)},
    ),
    "rotate": (cpu_attn.rotate, lambda: {"x": np.zeros((3, 8), F32)}),
    "balance": (cpu_attn.balance, lambda: {"query": np.ones((3, 8), F32), "key": np.ones((3, 8), F32)}),
    "error feedback": (cpu_attn.error_feedback, lambda: {"weights": np.ones((3, 8), F32)}),
    "cache": (cpu_attn.PagedKVCache, lambda: dict(SIZES)),
    "open": (cpu_attn.PagedKVCache.open, stored_args),
    "stored": (cpu_attn.StoredCache, stored_args),
    "descriptor": (cpu_attn.CacheDescriptor, lambda: asdict(cache().descriptor)),
    "plan of a cache": (
        cache().plan,
        lambda: {"query_start_loc": STARTS, "seq_lens": LENS, "num_heads": 4, "block_table": None},
    ),
    "update": (
        cache().update,
        lambda: {**dict.fromkeys(("key", "value"), np.zeros((3, 2, 8), F32)), "slot_mapping": np.arange(3)},
    ),
    "gather": (cache().gather, lambda: {"block_table": np.arange(3, dtype=np.int32), "seq_len": 20}),
    "copy": (cache().copy_blocks, lambda: {"pairs": [(0, 1)]}),
    "attend": (cache().attend, attend_args),
    "alibi": (
        cpu_attn.make_alibi_bias,
        lambda: {"alibi_slopes": np.zeros(4, F32), "dtype": "float32", "seq_lens": [3, 4]},
    ),
    "window": (
        cpu_attn.make_sliding_window_bias,
        lambda: {"seq_lens": [3, 4], "window_size": 2, "dtype": "float32"},
    ),
    "latent attention": (cpu_attn.attention_mla, mla_args),
    "convert": (convert, lambda: {"cache": cache()}),
    "linear plan": (linear.get_linear_attention_metadata, linear_plan_args),
    "linear": (linear.linear_attention_with_state_cache, linear_args),
    "convolution": (linear.causal_conv1d, conv_args),
    "manager": (BlockManager, lambda: {"caches": cache()}),
    "allocate": (MANAGER.allocate, lambda: {"request": next(REQUESTS)}),
    "batch": (MANAGER.step, lambda: {"batch": [("a", [1])]}),
    "truncate": (MANAGER.truncate, lambda: {"request": "a", "seq_len": 2}),
    "number of threads": (cpu_attn.set_num_threads, lambda: {"n": 0}),
    "layer": (cpu_attn.CPUAttentionBackendImpl, lambda: {"num_heads": 4, "head_size": 8, "scale": 0.5}),
    "shape of the backend": (
        cpu_attn.CPUAttentionBackend.get_kv_cache_shape,
        lambda: {name: x for name, x in SIZES.items() if name != "dtype"},
    ),
    "split": (
        PagedAttention.split_kv_cache,
        lambda: {"kv_cache": np.zeros((2, 4, 16 * 2 * 8), F32), "num_kv_heads": 2, "head_size": 8},
    ),
    "write to pages": (PagedAttention.write_to_paged_cache, write_args),
    "decode": (PagedAttention.forward_decode, decode_args),
    "copies of layers": (PagedAttention.copy_blocks, lambda: {"kv_caches": [KV], "src_to_dists": [(0, 1)]}),
    "swap": (
        PagedAttention.swap_blocks,
        lambda: {"src_kv_cache": KV, "dst_kv_cache": KV.copy(), "src_to_dst": [(0, 1)]},
    ),
    "threads": (ThreadGroup.make, lambda: {"world_size": 1}),
    "ranks": (ContextParallel, lambda: {"group": ALONE}),
    "lengths of a rank": (ContextParallel(ALONE).local_seq_lens, lambda: {"seq_lens": LENS}),
    "slots of a rank": (
        ContextParallel(ALONE).slot_mapping,
        lambda: {"slot_mapping": np.arange(3), "block_size": 16},
    ),
    "attend of a rank": (ContextParallel(ALONE).attend, lambda: attend_args() | {"cache": cache()}),
    "heads of ranks": (ContextParallel(ALONE).all_gather_heads, lambda: {"x": np.zeros((3, 4, 8), F32)}),
}

if any(engine.name == "onednn" and engine.available for engine in cpu_attn.engines()):
    CALLS["softmax"] = (primitives.softmax, lambda: {"x": np.zeros((2, 3), F32)})
    CALLS["product"] = (primitives.matmul, lambda: {"a": np.zeros((2, 3), F32), "b": np.zeros((3, 4), F32)})


def arguments(function: Callable[..., Any]) -> list[str]:
    """All but those that are handed on to others (**options)."""
    kinds = inspect.signature(function).parameters.values()
    return [p.name for p in kinds if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def refused_by_name_or_taken(function: Callable[..., Any], make: Callable[[], Args], name: str, odd: Args) -> None:
    function(**make())
    named = re.compile(rf"({'|'.join(arguments(function))})\b")
    for what, x in odd.items():
        try:
            function(**make() | {name: x})
        except (ValueError, TypeError) as error:
            assert named.match(str(error)), f"{what}: {error}"
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (f, _) in CALLS.items() for name in arguments(f)])
def test_every_argument(call: str, name: str) -> None:
    refused_by_name_or_taken(*CALLS[call], name, ODD)


@pytest.mark.parametrize("name", ["kv_cache_dtype", "kv_cache_layout", "kv_cache_rotation"])
def test_an_array_is_no_name(name: str) -> None:
    """Though one that holds the plan's own name is equal to it."""
    word = {"kv_cache_dtype": "auto", "kv_cache_layout": "packed", "kv_cache_rotation": "none"}[name]
    for x in (np.array(word), np.array([word])):
        with pytest.raises(TypeError, match=f"{name}: expected a name, got ndarray"):
            cpu_attn.attention_with_kv_cache(**attention_args() | {name: x})


@pytest.mark.parametrize("window", [[4, 0], np.array(5)])
def test_a_window_that_changed_after_the_plan(window: Any) -> None:
    args = attention_args(sliding_window=window)
    cpu_attn.attention_with_kv_cache(**args)
    if isinstance(window, list):
        window[0] = 3
    else:
        window[...] = 4
    with pytest.raises(ValueError, match=r"sliding_window: .*made for"):
        cpu_attn.attention_with_kv_cache(**args)


def test_words_that_are_equal_to_the_plans() -> None:
    """Those are other objects, and mean the same."""
    args = attention_args(sliding_window=(4, 0))
    words = {name: "".join(word) for name, word in (("kv_cache_dtype", "auto"), ("kv_cache_layout", "packed"))}
    cpu_attn.attention_with_kv_cache(**args | words | {"sliding_window": tuple([4, 0])})


class Alone(Group):
    def _all_gather(self, message: Any, gathered: Any) -> None:
        gathered[...] = message


@pytest.mark.parametrize("timeout", [1e10, 3e38, 2**31, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("make", [lambda t: ThreadGroup.make(2, timeout=t), lambda t: Alone(0, 1, t)])
def test_timeouts_that_no_library_counts(make: Callable[[Any], Any], timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout: .* (outside 0\.\.\d+|finite float32 >= 0\.0)"):
        make(timeout)


def test_the_longest_timeout() -> None:
    """The first call takes it."""
    (group,) = ThreadGroup.make(1, timeout=min(2**31 - 1, 4294967))
    assert group.all_gather(np.arange(2)).tolist() == [[0, 1]]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["info", "info --json", "--version", "bench --help", "verify --list-none"])
def test_output_that_finds_no_room(command: str, buffered: bool) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "cpu_attn", *command.split()]
        found = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=300)
    if command.endswith("none"):  # a mistake of the user's, which goes to stderr alone
        assert found.returncode == 2 and "No such option" in found.stderr
    else:
        assert found.returncode == 1 and found.stderr == "Error: No space left on device\n", found.stderr
