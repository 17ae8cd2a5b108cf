# SPDX-License-Identifier: Apache-2.0
"""Calls while another thread writes into what they read: `python -m cpu_attn.tests.programs.disturb CALL SECONDS`.

While it calls again and again, a process that shares the memory (no lock of Python's in its way) fills one of the
call's arrays of indices with nonsense and puts back what was there, for some seconds an array. A call may then refuse,
or answer with wrong numbers. The process ends with 0 unless it crashes, an exception is none of those that calls
document, or a byte before a cache was written: behind it begins memory that nobody may touch.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import compose, sparse
from cpu_attn._threads import force_num_threads

from ..harness.guard import Guarded

R, HEADS, SIZE, BLOCK, CONTEXT = 4, 2, 32, 16, 1500
LENS, STARTS = np.array([CONTEXT, CONTEXT - 300, 700, 40], np.int32), np.array([0, 1, 4, 8, 9], np.int32)
T, M = int(STARTS[-1]), -(-CONTEXT // BLOCK)
N = R * M
TOKENS = 90  # that a query token selects


@dataclass
class Calls:
    """A call, and the arrays of indices that it reads, by name; what may not be written around."""

    call: Callable[[], Any]
    indices: dict[str, NDArray[Any]]
    guards: list[Guarded] = field(default_factory=list)


def _shared(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that a child shares."""
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _caches(layout: str = "packed") -> tuple[Guarded, Guarded]:
    shape = cpu_attn.get_kv_cache_shape(N, BLOCK, HEADS, SIZE, "float32", kv_cache_layout=layout)
    return Guarded(_floats(*shape)), Guarded(_floats(*shape))


def _table() -> NDArray[np.int32]:
    """The first two requests share 1024 keys."""
    table = np.random.default_rng(0).permutation(N).astype(np.int32).reshape(R, M)
    table[1, : 1024 // BLOCK] = table[0, : 1024 // BLOCK]
    return _shared(table)


def _slots() -> NDArray[np.int64]:
    return _shared(np.random.default_rng(1).permutation(N * BLOCK)[:2000].astype(np.int64))


def _step() -> dict[str, NDArray[Any]]:
    step = {"query_start_loc": STARTS, "seq_lens": LENS, "dynamic_causal": np.ones(R, np.int32)}
    return {name: _shared(array) for name, array in step.items()}


def _plan(engine: str = "auto", **options: Any) -> cpu_attn.SchedulerMetadata:
    return cpu_attn.get_scheduler_metadata(
        *(R, 2 * HEADS, HEADS, SIZE, LENS, "float32", STARTS), engine=engine, **options
    )


def _attend(engine: str, selected: str = "", **options: Any) -> Calls:
    (key, value), step, table = _caches(), _step(), _table()
    plan = _plan(engine, dynamic_causal=step["dynamic_causal"], **options)
    indices, query = {"block_table": table, **step}, _floats(T, 2 * HEADS, SIZE)
    if selected == "tokens":
        lists = np.arange(0, 10 * TOKENS, 10, dtype=np.int32) + np.zeros((T, 1), np.int32)
        lists[lists >= np.repeat(LENS, np.diff(STARTS))[:, None]] = -1
        indices["selected_tokens"] = _shared(lists)
    if selected == "blocks":
        _, lens, _ = cpu_attn.query_blocks(STARTS, LENS, options.get("query_block_size", T))
        indices["selected_blocks"] = _shared(np.full((len(lens), HEADS, M), -1, np.int32))
        for lists, length in zip(indices["selected_blocks"], lens, strict=True):
            blocks = np.arange(0, -(-length // BLOCK), 2)
            lists[:, : len(blocks)] = blocks
    output, lse = np.empty_like(query), np.empty((2 * HEADS, T), np.float32)

    def call() -> None:
        cpu_attn.attention_with_kv_cache(
            *(query, key.array, value.array, output, step["query_start_loc"], step["seq_lens"], 0.1, True, None, -1),
            *(table, 0.0, plan, None, step["dynamic_causal"]),
            lse=lse,
            selected_blocks=indices.get("selected_blocks"),
            selected_tokens=indices.get("selected_tokens"),
        )

    return Calls(call, indices, [key, value])


def _compose() -> Calls:
    (key, value), step, table, query = _caches(), _step(), _table(), _floats(T, 2 * HEADS, SIZE)
    output = np.empty_like(query)

    def call() -> None:
        compose.attention(
            *(query, key.array, value.array, output, step["query_start_loc"], step["seq_lens"], 0.1, True, None, -1),
            *(table, 0.0, None, step["dynamic_causal"]),
        )

    return Calls(call, {**step, "block_table": table}, [key, value])


def _make_plans() -> Calls:
    step, table, masks = _step(), _table(), _shared(np.full((T, 1), 0xFF, np.uint8))

    def call() -> None:
        cpu_attn.get_scheduler_metadata(
            *(R, 2 * HEADS, HEADS, SIZE, step["seq_lens"], "float32", step["query_start_loc"]),
            dynamic_causal=step["dynamic_causal"],
            block_table=table,
            block_size=BLOCK,
        )
        cpu_attn.get_scheduler_metadata(
            *(R, 2 * HEADS, HEADS, SIZE, step["seq_lens"], "float32", step["query_start_loc"]), tree_mask=masks
        )

    return Calls(call, {**step, "block_table": table, "tree_mask": masks})


def _write(layout: str) -> Calls:
    (key, value), slots = _caches(layout), _slots()
    rows = _floats(len(slots), HEADS, SIZE)

    def call() -> None:
        cpu_attn.reshape_and_cache(rows, rows, key.array, value.array, slots, kv_cache_layout=layout)

    return Calls(call, {"slot_mapping": slots}, [key, value])


def _update_and_attend() -> Calls:
    (key, value), table, plan = _caches(), _table(), _plan()
    cache = cpu_attn.PagedKVCache(N, BLOCK, HEADS, SIZE, "float32")
    cache.key_cache, cache.value_cache = key.array, value.array
    rows, query, slots = _floats(T, HEADS, SIZE), _floats(T, 2 * HEADS, SIZE), _shared(_slots()[:T])
    call = lambda: cache.update_and_attend(rows, rows, query, slots, table, plan)  # noqa: E731
    return Calls(call, {"slot_mapping": slots, "block_table": table}, [key, value])


def _rotary() -> Calls:
    (key, value), slots = _caches(), _slots()
    rows, positions = _floats(len(slots), HEADS, SIZE), _shared(np.arange(len(slots)))
    table = Guarded(_floats(len(slots), SIZE))
    query = np.empty_like(rows)

    def call() -> None:
        cpu_attn.rotary_reshape_and_cache(
            *(rows, rows, rows, key.array, value.array, slots, positions, table.array), query_out=query
        )

    return Calls(call, {"slot_mapping": slots, "positions": positions}, [key, value, table])


def _gather() -> Calls:
    cache = cpu_attn.PagedKVCache(N, BLOCK, HEADS, SIZE, "float32")
    table = _shared(_table()[0])
    return Calls(lambda: cache.gather(table, CONTEXT), {"block_table": table})


def _copy() -> Calls:
    cache, halves = cpu_attn.PagedKVCache(N, BLOCK, HEADS, SIZE, "float32"), _floats(2, N, BLOCK * HEADS * SIZE)
    pairs = _shared(np.random.default_rng(2).permutation(N).astype(np.int64).reshape(-1, 2))

    def call() -> None:
        cache.copy_blocks(pairs)
        cpu_attn.PagedAttention.copy_blocks([halves], pairs)
        cpu_attn.PagedAttention.swap_blocks(halves, halves.copy(), pairs)

    return Calls(call, {"pairs": pairs})


def _bounds() -> Calls:
    slots = _slots()
    key, least, most = _floats(len(slots), HEADS, SIZE), *(Guarded(_floats(N, HEADS, SIZE)) for _ in range(2))
    call = lambda: sparse.update_block_bounds(key, slots, least.array, most.array, BLOCK)  # noqa: E731
    return Calls(call, {"slot_mapping": slots}, [least, most])


def _scores() -> Calls:
    table, query, step = _table(), _floats(T, 2 * HEADS, SIZE), _step()
    least, most = (Guarded(_floats(N, HEADS, SIZE)) for _ in range(2))
    lens, starts = step["seq_lens"], step["query_start_loc"]

    def call() -> None:
        scores = sparse.score_blocks(query, least.array, most.array, table, lens, starts, BLOCK)
        sparse.select_blocks(scores, lens, BLOCK, 5)

    indices = {"block_table": table, "seq_lens": lens, "query_start_loc": starts}
    return Calls(call, indices, [least, most])


def _indexer() -> Calls:
    table, slots, query, step = _table(), _slots(), _floats(T, HEADS, SIZE), _step()
    cache = Guarded(_floats(*cpu_attn.get_index_cache_shape(N, BLOCK, SIZE, "float32")))
    rows, lens, starts = _floats(len(slots), SIZE), step["seq_lens"], step["query_start_loc"]

    def call() -> None:
        cpu_attn.index_and_cache(rows, cache.array, slots)
        cpu_attn.select_tokens(query, cache.array, _floats(T, HEADS), starts, lens, table, 20)

    indices: dict[str, Any] = {"slot_mapping": slots, "block_table": table, "seq_lens": lens, "query_start_loc": starts}
    return Calls(call, indices, [cache])


CALLS: dict[str, Callable[[], Calls]] = {
    "attend-native": lambda: _attend("native", block_table=_table(), block_size=BLOCK),
    "attend-native-selected": lambda: _attend("native", "blocks", query_block_size=2),
    "attend-native-tokens": lambda: _attend("native", "tokens", max_selected_tokens=TOKENS),
    "attend-onednn": lambda: _attend("onednn"),
    "attend-onednn-selected": lambda: _attend("onednn", "blocks"),
    "attend-onednn-tokens": lambda: _attend("onednn", "tokens", max_selected_tokens=TOKENS),
    "attend-reference": lambda: _attend("reference"),
    "compose": _compose,
    "plan": _make_plans,
    "write": lambda: _write("packed"),
    "write-plain": lambda: _write("NHD"),
    "update-and-attend": _update_and_attend,
    "rotary": _rotary,
    "gather": _gather,
    "copy": _copy,
    "bounds": _bounds,
    "scores": _scores,
    "indexer": _indexer,
}


def _disturb(array: NDArray[Any]) -> None:
    """Nonsense of all sizes, a part of it or all, and again what was right, as long as the parent lives."""
    good, rng, parent = array.copy(), np.random.default_rng(3), os.getppid()
    limits = np.iinfo(array.dtype)
    nonsense = [rng.integers(limits.min, limits.max, array.shape, array.dtype, endpoint=True) for _ in range(8)]
    few = [np.where(rng.random(array.shape) < 0.05, junk, good) for junk in nonsense]
    small = [np.where(rng.random(array.shape) < 0.2, rng.integers(0, 100, array.shape), good) for _ in range(8)]
    while os.getppid() == parent:
        # a call may begin with either, and meet the other
        for junk, spins in zip((*nonsense, *few, *small), rng.integers(0, 2000, (24, 2)), strict=True):
            for content, wait in zip((junk, good), spins, strict=True):
                array[...] = content
                for _ in range(wait):
                    pass


def hammer(call: Callable[[], Any], array: NDArray[Any], seconds: float) -> tuple[int, int]:
    """How many calls answered, and how many refused."""
    good, answered, refused = array.copy(), 0, 0
    child = os.fork()
    if not child:
        try:
            _disturb(array)
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            call()
            answered += 1
        except (ValueError, MemoryError):
            refused += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    array[...] = good
    return answered, refused


def main(name: str, seconds: float) -> int:
    force_num_threads(2)
    calls, bad = CALLS[name](), 0
    calls.call()
    for argument, array in calls.indices.items():
        print(f"{name}: {argument}", end=" ", flush=True)  # a crash leaves this as the last line
        answered, refused = hammer(calls.call, array, seconds)
        written = sum(not guard.intact() for guard in calls.guards)
        print(f"{answered} answered, {refused} refused, {written} written around", flush=True)
        bad += written or not answered
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
