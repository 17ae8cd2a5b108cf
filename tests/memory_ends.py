# SPDX-License-Identifier: Apache-2.0
"""Calls while memory ends: `LD_PRELOAD=failing.so python -m cpu_attn.tests.memory_ends ENGINE DTYPE`.

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
from typing import Any

import numpy as np

import cpu_attn
from cpu_attn._threads import force_num_threads
from cpu_attn.tests.formats import numpy_dtype
from cpu_attn.tests.judge import same_bits

_failing = ctypes.CDLL(None)
_failing.failing_at.argtypes = (ctypes.c_longlong,)
_failing.failing_from.argtypes = (ctypes.c_longlong,)
_failing.failing_at_random.argtypes = (ctypes.c_uint, ctypes.c_ulonglong)
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


def copies(arrays: Iterable[Any]) -> list[Any]:
    return [a.copy() for a in arrays]


def close(x: Any, y: Any) -> bool:
    """As two engines are."""
    return np.allclose(x.astype(np.float32), y.astype(np.float32), atol=0.02)


def attempt(call: Callable[[], Any]) -> tuple[Any, bool]:
    """What the call gives, or None where it raises MemoryError; and whether an allocation failed meanwhile."""
    try:
        got = call()
    except MemoryError:
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
            _failing.failing_at_random(per_mille, seed)
            got, _ = attempt(call)
            outcomes["MemoryError" if got is None else "answered"] += 1
        for x, y in zip(call(), want, strict=True):
            assert close(x, y), f"head size {size}"
    return outcomes


def one_by_one(engine: str, dtype: str) -> Counter[str]:
    """Each allocation of calls that have been made before."""
    call, outcomes, n = calls(dtype, engine, 64), Counter[str](), 0
    want = copies(call())
    while True:
        _failing.failing_at(n)
        got, failed = attempt(call)
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
            _failing.failing_from(n)
            got, failed = attempt(call)
            same = all(close(x, y) for x, y in zip(call(), want, strict=True))
            os._exit((10 if got is None else 11 if failed else 12) if same else 13)
        _, status = os.waitpid(child, 0)
        assert status in (10 << 8, 11 << 8, 12 << 8), f"status {status:#x} as allocations from {n} on failed"
        if status == 12 << 8:
            return outcomes
        outcomes["MemoryError" if status == 10 << 8 else "answered"] += 1
        n += 7


if __name__ == "__main__":
    force_num_threads(2)
    calls(sys.argv[2], sys.argv[1], 64)()  # libraries are loaded, and threads have what is theirs
    for sweep in (from_some_on, at_random, one_by_one):
        print(sweep.__name__, json.dumps(sweep(*sys.argv[1:3])), flush=True)
