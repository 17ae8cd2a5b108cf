# SPDX-License-Identifier: Apache-2.0
"""Calls while memory ends: `LD_PRELOAD=failing.so python -m cpu_attn.tests.programs.memory_ends ENGINE DTYPE SWEEP`.

Whichever allocation of a call fails, the call answers as ever or raises MemoryError, and with memory there again it
gives the bits that it gave before. The process ends with 0 if so.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np

import cpu_attn
from cpu_attn import sparse
from cpu_attn._arrays import view
from cpu_attn._threads import force_num_threads
from cpu_attn.tests.cases.formats import numpy_dtype
from cpu_attn.tests.cases.judge import same_bits

_failing = ctypes.CDLL(None)
_failing.failing_in_a_row.argtypes = (ctypes.c_longlong, ctypes.c_longlong)
_failing.failing_at.argtypes = (ctypes.c_longlong,)
_failing.failing_from.argtypes = (ctypes.c_longlong,)
_failing.failing_at_random.argtypes = (ctypes.c_uint, ctypes.c_ulonglong)
for _fail in (_failing.failing_at, _failing.failing_from, _failing.failing_at_random):
    _fail.restype = None  # else an int is made of what it returns, which may fail
_failing.failing_end.restype = ctypes.c_longlong


def calls(dtype: str, engine: str, head_size: int) -> Callable[[], tuple[Any, Any]]:
    """Tokens written, with rotary and without, and attended by a new plan, beside another one, with spans, in which
    requests share their keys; everything else is there before."""
    rng, np_dtype = np.random.default_rng(head_size), numpy_dtype(dtype)
    starts, lens, heads, blocks = np.array([0, 1, 34, 41], np.int32), np.array([600, 300, 90], np.int32), 2, 38
    rows = [rng.standard_normal((600, heads, head_size)).astype(np_dtype) for _ in range(2)]
    query = rng.standard_normal((41, 2 * heads, head_size)).astype(np_dtype)
    shape = cpu_attn.get_kv_cache_shape(3 * blocks, 16, heads, head_size, dtype)
    key_cache, value_cache = (rng.standard_normal(shape).astype(np_dtype) for _ in range(2))
    slots, cos_sin = np.arange(600), rng.standard_normal((600, head_size // 2 * 2)).astype(np.float32)
    table = np.arange(3 * blocks, dtype=np.int32).reshape(3, blocks)
    shared, two = np.arange(70, dtype=np.int32)[None].repeat(2, axis=0), np.arange(3, dtype=np.int32)
    sharing = (2, 2 * heads, heads, head_size, np.array([1100, 1120], np.int32), dtype, two)
    turned, output, lse = np.empty_like(rows[0]), np.empty_like(query), np.empty((2 * heads, 41), np.float32)

    def call() -> tuple[Any, Any]:
        plan = cpu_attn.get_scheduler_metadata(
            *(3, 2 * heads, heads, head_size, lens, dtype, starts), block_table=table, block_size=16, engine=engine
        )
        cpu_attn.get_scheduler_metadata(
            *sharing, block_table=shared, block_size=16, engine=engine, mm_prefix_range={0: [(5, 9)]}
        )
        cpu_attn.rotary_reshape_and_cache(
            *(rows[0], rows[0], rows[1], key_cache, value_cache, slots, slots, cos_sin), query_out=turned
        )
        cpu_attn.reshape_and_cache(rows[0], rows[1], key_cache, value_cache, slots)
        cpu_attn.attention_with_kv_cache(
            *(query, key_cache, value_cache, output, starts, lens, 0.2, True, None, -1, table, 0.0, plan), lse=lse
        )
        return output, lse

    return call


class DLPack:
    """An array of which nothing is known but ``__dlpack__``."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Interface:
    """One of which nothing is known but what it once said."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def written(call: Callable[..., Any], arguments: tuple[Any, ...], *arrays: Any) -> Callable[[], Any]:
    """An entry that gives what it has written to."""

    def entry() -> Any:
        call(*arguments)
        return arrays

    return entry


def entries() -> dict[str, Callable[[], Any]]:
    """Entries of the package, over arrays that are there before; called again each gives the same bits. Those are left
    out whose arithmetic is NumPy's: where a ufunc finds no memory for its buffers, NumPy 2.4.6 loses the exception
    (select_blocks) or touches Python's state without the GIL, which ends the process (rotate, convert)."""
    rng = np.random.default_rng(7)
    rows, wide = (rng.standard_normal((40, n, 32), np.float32) for n in (2, 4))
    starts, lens, slots = np.array([0, 1, 40], np.int32), np.array([30, 64], np.int32), np.arange(40)
    table, heads = np.arange(8, dtype=np.int32).reshape(2, 4), np.ones((40, 2), np.float32)
    cache = cpu_attn.PagedKVCache(8, 16, 2, 32, "float32")
    index = np.zeros(sparse.get_index_cache_shape(8, 16, 32, "float32"), np.float32)
    latents, up = np.zeros((8, 16, 40), np.float32), rng.standard_normal((40, 40), np.float32)
    low, high = (np.zeros((8, 2, 32), np.float32) for _ in range(2))
    turned, parts, logs = np.empty_like(wide), np.ones((2, 40, 4, 32), np.float32), np.zeros((2, 4, 40), np.float32)
    cos_sin, brain = rng.standard_normal((64, 32), np.float32), rows.astype(numpy_dtype("bfloat16"))[:, ::-1]

    def attend(**options: Any) -> Any:
        plan = cache.plan(starts, lens, 4, **options)
        return cache.attend(wide, table, plan)

    def foreign(kind: Callable[[Any], Any]) -> Callable[[], Any]:
        """A write and a merge of arrays that C cannot read."""
        rows_and_cache = tuple(map(kind, (rows, rows, cache.key_cache, cache.value_cache, slots)))
        write = written(cpu_attn.reshape_and_cache, rows_and_cache, cache.key_cache)
        merged = [kind(x) for x in (parts, logs)]
        return lambda: (write(), cpu_attn.merge_states(*merged))

    def latent() -> Any:
        plan = cpu_attn.get_scheduler_metadata(
            2, 4, 1, 40, lens, "float32", starts, head_size_v=32, kv_cache_layout="NHD"
        )
        cpu_attn.concat_and_cache_mla(up[:, :32], up[:, 32:], latents, slots)
        query, output = np.repeat(up[:, None], 4, 1), np.empty_like(wide)
        cpu_attn.attention_mla(query, latents, output, starts, lens, 0.2, True, table, plan)
        return latents, output

    return {
        "PagedKVCache": lambda: cpu_attn.PagedKVCache(8, 16, 2, 32, "bfloat16", kv_cache_dtype="int8").key_cache,
        "update": written(cache.update, (rows, rows, slots), cache.value_cache),
        "attend": attend,
        "masks": lambda: attend(mm_prefix_range={0: [(2, 9)]}),
        "rotary": lambda: cpu_attn.rotary_reshape_and_cache(
            *(wide, rows, rows, cache.key_cache, cache.value_cache, slots, slots, cos_sin), query_out=turned
        ),
        "index_and_cache": written(sparse.index_and_cache, (rows[:, 0], index, slots), index),
        "select_tokens": lambda: sparse.select_tokens(rows, index, heads, starts, lens, table, 8),
        "update_block_bounds": written(sparse.update_block_bounds, (rows, slots, low, high, 16), low, high),
        "score_blocks": lambda: sparse.score_blocks(wide, low, high, table, lens, starts, 16),
        "query_blocks": lambda: sparse.query_blocks(starts, lens, 16),
        "merge_states": lambda: cpu_attn.merge_states(parts, logs),
        "mla": latent,
        "DLPack": foreign(DLPack),
        "interface": foreign(Interface),
        "read": lambda: np.array(view("x", brain).extent()),
    }


def flat(got: Any) -> list[Any]:
    """The arrays of what an entry gives."""
    if isinstance(got, (tuple, list)):
        return [x for part in got for x in flat(part)]
    return [] if got is None else [got]


def copies(arrays: Iterable[Any]) -> list[Any]:
    return [a.copy() for a in arrays]


def close(x: Any, y: Any) -> bool:
    """As two engines are."""
    return np.allclose(x.astype(np.float32), y.astype(np.float32), atol=0.02)


def attempt(call: Callable[[], Any], fail: Callable[..., None], *which: int) -> tuple[Any, bool]:
    """What the call gives as ``fail(*which)`` begins to let allocations fail, or None where it raises MemoryError; and
    whether one failed meanwhile. CPython from 3.11 on forgets to raise that where a frame finds no room on its stack,
    and where its objects come from malloc."""
    try:
        fail(*which)  # here, since a frame of this function is an allocation, too
        got = call()
    except MemoryError:
        got = None
    except SystemError as e:
        if str(e) != "error return without exception set":
            raise
        got = None
    return got, _failing.failing_end() > 0


def at_random(engine: str, dtype: str) -> Counter[str]:
    """Head size by head size, most of which oneDNN has not met before; compared with the native engine's answer, since
    an implementation that was made while memory was short must not stay."""
    outcomes: Counter[str] = Counter()
    for seed, size in enumerate(range(32, 128, 4)):
        call, native = calls(dtype, engine, size), calls(dtype, "native", size)
        want = copies(native())
        for per_mille in (5, 40, 100):
            got, _ = attempt(call, _failing.failing_at_random, per_mille, seed)
            outcomes["MemoryError" if got is None else "answered"] += 1
        for x, y in zip(call(), want, strict=True):
            assert close(x, y), f"head size {size}"
    return outcomes


def one_by_one(engine: str, dtype: str) -> Counter[str]:
    """Each allocation of calls that have been made before."""
    call, outcomes, n = calls(dtype, engine, 64), Counter[str](), 0
    want = copies(call())
    while True:
        got, failed = attempt(call, _failing.failing_at, n)
        if not failed:
            return outcomes
        assert got is None or all(map(same_bits, got, want)), f"other bits as allocation {n} failed"
        assert all(map(same_bits, call(), want)), f"other bits after allocation {n} failed"
        outcomes["MemoryError" if got is None else "answered"] += 1
        n += 1


def from_some_on(engine: str, dtype: str) -> Counter[str]:
    """All allocations from one on, every seventh, of the first calls of their shape, each in a child process."""
    call, want, outcomes, n = calls(dtype, engine, 72), copies(calls(dtype, "native", 72)()), Counter[str](), 0
    while True:
        child = os.fork()
        if not child:
            got, failed = attempt(call, _failing.failing_from, n)
            same = all(close(x, y) for x, y in zip(call(), want, strict=True))
            os._exit((10 if got is None else 11 if failed else 12) if same else 13)
        _, status = os.waitpid(child, 0)
        assert status in (10 << 8, 11 << 8, 12 << 8), f"status {status:#x} as allocations from {n} on failed"
        if status == 12 << 8:
            return outcomes
        outcomes["MemoryError" if status == 10 << 8 else "answered"] += 1
        n += 7


def each_entry(engine: str, dtype: str) -> Counter[str]:
    """Each allocation of each entry, by one thread and by two. With PYTHONMALLOC=malloc Python's own are among them."""
    outcomes: Counter[str] = Counter()
    for threads, (name, call) in product((1, 2), entries().items()):
        force_num_threads(threads)
        for _ in range(3):  # what is kept from call to call is there then
            want, n, failed = copies(flat(call())), 0, True
        while failed:
            got, failed = attempt(call, _failing.failing_at, n)
            assert got is None or all(map(same_bits, flat(got), want)), f"{name}: other bits as allocation {n} failed"
            outcomes["MemoryError" if got is None else "answered"] += failed
            n += 1
        assert all(map(same_bits, flat(call()), want)), f"{name}: other bits afterwards"
    return outcomes


if __name__ == "__main__":
    force_num_threads(2)
    calls(sys.argv[2], sys.argv[1], 64)()  # libraries are loaded, and threads have what is theirs
    sweeps = {sweep.__name__: sweep for sweep in (from_some_on, at_random, one_by_one, each_entry)}
    for name in sys.argv[3:]:
        print(name, json.dumps(sweeps[name](*sys.argv[1:3])), flush=True)
