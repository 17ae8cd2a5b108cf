# SPDX-License-Identifier: Apache-2.0
"""Calls of a BlockManager that fail: whatever raises MemoryError within a method, nothing has changed.

Two ways to fail: a line, or a bytecode, of its modules raises MemoryError in place of what it does (:class:`At`); and
with `LD_PRELOAD=failing.so python -m cpu_attn.tests.programs.blocks_failing` each allocation that the system is asked
for fails, alone or with those that follow. Python's own small ones, of PYTHONMALLOC=malloc, NumPy does not survive:
`array > 1` ends the process there.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from cpu_attn import PagedKVCache
from cpu_attn.serving import BlockManager, block_manager, block_pool, journal, state_slots

FILES = {module.__file__ for module in (block_manager, block_pool, journal, state_slots)}
Call = Callable[[BlockManager, int], Any]


class At:
    """Within it, line or bytecode number ``at`` of the manager's modules raises MemoryError, if it comes to that
    (``failed``). What begins and ends a journal is left alone: nothing is allocated there that changes depend on."""

    def __init__(self, at: int, unit: str = "line") -> None:
        self.left, self.unit, self.failed = at, unit, False

    def __enter__(self) -> At:
        self.before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.settrace(self.before)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "whole":
            return None
        frame.f_trace_opcodes = self.unit == "opcode"
        return self._at

    def _at(self, frame: Any, event: str, arg: Any) -> Any:
        if event == self.unit:
            self.left -= 1
            if self.left == -1:
                self.failed = True
                raise MemoryError
        return self._at


def made(scale: int = 1, num_slots: int = 0, **options: Any) -> BlockManager:
    """A manager with requests of each kind. a and b share a block that both are within, "out" is swapped out, "begun"
    was found, and the prefix cache alone has all that no request has, so that whoever takes a block evicts one. scale:
    an odd number, how much of all there is. num_slots: of states with a snapshot at each block."""
    caches, rng = [PagedKVCache(22 * scale, 2, 1, 2) for _ in range(2)], np.random.default_rng(0)
    states = [rng.standard_normal((num_slots, 2), np.float32)] if num_slots else []
    manager = BlockManager(caches, states=states, **options)
    manager._states.interval = 2
    for request, first, end in (("a", 0, 7), ("gone", 50, 58), ("out", 20, 29), ("full", 30, 49)):
        tokens = range(first * scale, end * scale)
        manager.allocate(request, tokens)
        step = manager.step([(request, tokens)])
        for cache in caches:
            key, value = rng.standard_normal((2, step.num_tokens, 1, 2), np.float32)
            cache.update(key, value, step)
        if request == "gone":
            manager.free("gone")
    manager.fork("a", "b")
    manager.swap_out("out")
    manager.truncate("full", 9 * scale // 2 * 2 if num_slots else 9 * scale)
    manager.allocate("begun", [*range(30 * scale, 36 * scale), -1, -2])
    if manager._pool.evictable:
        manager.allocate("rest")
        manager.step([("rest", range(-2 * len(manager._pool.free[0]), 0))])
    return manager


def state(manager: BlockManager) -> dict[str, Any]:
    """All that a manager goes by, and the bytes of all blocks that somebody has."""
    assert manager.num_free_blocks >= 0  # which undoes what a failing call left
    m, pool, requests = manager, manager._pool, {}
    for request, row in m._row_of.items():
        size, dropped = m._seq_lens.item(row), m._num_dropped.item(row)
        chain, prompt = m._requests[row], m._prompts.get(row)
        there: list[Any] = [x.tobytes() for x in m._saved.get(row, ())]
        if not there:
            assert not m._swapped[row]
            held, left = m._held(row), size - dropped * m.block_size
            assert (m._table[row, m._num_blocks(size) :] == -1).all()
            there += [m._table[row, : m._num_blocks(size)].tolist()]
            there += [m._token_ids[held].reshape(-1)[:left].tolist()]
            there += [x[held].tobytes() for x in m._memory()]
        if m.states and not m._swapped[row]:
            slot, earlier = m._states.slot.item(row), m._states.earlier.get(row, {})
            there += [slot, dict(earlier), m.states[0][[slot, *earlier.values()]].tobytes()]
        there += [x.tobytes() for x in m._states.saved.get(row, ())]
        requests[request] = size, dropped, chain.root, list(chain.hashes), prompt is None or prompt.tolist(), there
    slots = m._states.pool
    for each in (pool, slots):
        assert {here: block for block, here in each.hash_of.items()} == each.block_of
        assert list(each.evictable.values()) == sorted(each.evictable.values())
    assert sorted([*m._row_of.values(), *m._free_rows]) == list(range(len(m._seq_lens)))
    return {
        "requests": requests,
        "ref_cnt": pool.ref_cnt.tolist(),
        "free": sorted(block for pile in pool.free for block in pile),
        "evictable": list(pool.evictable),
        "stats": manager.stats(),
        "slot_ref_cnt": slots.ref_cnt.tolist(),
        "free_slots": sorted(slots.free[0]),
        "snapshots": {slot: (here, m.states[0][slot].tobytes()) for slot, here in slots.hash_of.items()},
        "cached": {b: (h, [x[b].tobytes() for x in (m._token_ids, *m._memory())]) for b, h in pool.hash_of.items()},
    }


def without_evicted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """``before``, had the prefix cache given up the blocks that it has not got in ``after``."""
    gone = set(before["evictable"]) - set(after["evictable"])
    lost = set(before["snapshots"]) - set(after["snapshots"])
    counts = [n - (slot in lost) for slot, n in enumerate(before["slot_ref_cnt"])]
    free = sorted([*before["free_slots"], *(slot for slot in lost if not counts[slot])])
    return before | {
        "slot_ref_cnt": counts,
        "free_slots": free,
        "snapshots": {slot: x for slot, x in before["snapshots"].items() if slot not in lost},
        "ref_cnt": [n - (block in gone) for block, n in enumerate(before["ref_cnt"])],
        "free": sorted([*before["free"], *gone]),
        "evictable": [block for block in before["evictable"] if block not in gone],
        "cached": {block: x for block, x in before["cached"].items() if block not in gone},
        "stats": before["stats"]._replace(
            num_cached_blocks=before["stats"].num_cached_blocks - len(gone),
            num_evictions=before["stats"].num_evictions + len(gone),
            num_free_state_slots=len(free) + sum(counts[slot] == 1 for slot in set(before["snapshots"]) - lost),
            num_snapshots=before["stats"].num_snapshots - len(lost),
        ),
    }


def many(manager: BlockManager) -> None:
    """Up to the last row."""
    while manager._free_rows:
        manager.allocate(len(manager._free_rows))


def one(manager: BlockManager) -> None:
    for request in ("a", "b", "full", "begun", "rest"):
        manager.free(request)
    manager.allocate("new")


# What stands before the call, and the call.
CALLS: dict[str, tuple[Callable[[BlockManager], Any] | None, Call]] = {
    "allocate": (None, lambda m, k: m.allocate("new", [*range(6 * k), 9, 9], extra_key="")),
    "allocate a row": (many, lambda m, k: m.allocate("new", range(50 * k, 59 * k))),
    "fork": (None, lambda m, k: m.fork("a", "new")),
    "fork a row": (many, lambda m, k: m.fork("full", "new")),
    "step": (None, lambda m, k: m.step([("full", range(5 * k)), ("begun", [-1])])),
    "step to the end": (None, lambda m, k: m.step([("begun", [-1, -2, *range(k)])])),
    "step far": (one, lambda m, k: m.step([("new", range(40 * k))])),
    "step with copies": (None, lambda m, k: m.step([("a", range(3 * k)), ("b", [4]), ("full", [1])])),
    "step with drafts": (None, lambda m, k: m.step([("a", range(3 * k)), ("full", [1])], num_draft_tokens=[1, 1])),
    "truncate": (None, lambda m, k: m.truncate("full", 2 if m.states else 1)),
    "truncate to 0": (None, lambda m, k: m.truncate("begun", 0)),
    "free": (None, lambda m, k: m.free("full")),
    "free swapped": (None, lambda m, k: m.free("out")),
    "swap_out": (None, lambda m, k: m.swap_out("full")),
    "swap_in": (None, lambda m, k: m.swap_in("out")),
    "reset_prefix_cache": (None, lambda m, k: m.reset_prefix_cache()),
}
# Those that write bytes into blocks, which the prefix cache then no longer has.
WRITING = ("step with copies", "step with drafts", "swap_in")


def sweep(
    name: str, fails: Callable[[Callable[[], Any], int], tuple[bool, bool]], scale: int = 1, **options: Any
) -> Any:
    """fails(call, n): whether the call raised, and whether anything failed in it, as thing number n fails."""
    before, call = CALLS[name]
    start = made(scale, **options)
    if before:
        before(start)
    was, after = state(start), copy.deepcopy(start)
    call(after, scale)
    want, outcomes, n, failed = state(after), Counter[str](), 0, True
    while failed:
        manager = copy.deepcopy(start)
        raised, failed = fails(partial(call, manager, scale), n)
        if raised:
            found = state(manager)
            expected = without_evicted(was, found) if name in WRITING else was
            assert not [key for key in was if found[key] != expected[key]], f"changed as number {n} failed"
            call(manager, scale)
        found = state(manager)
        same = () if raised and name in WRITING else want
        assert not [key for key in same if found[key] != want[key]], f"does something else after number {n} failed"
        outcomes["raised" if raised else "answered"] += 1
        n += 1
    return outcomes


def at(unit: str) -> Callable[[Callable[[], Any], int], tuple[bool, bool]]:
    def fails(call: Callable[[], Any], n: int) -> tuple[bool, bool]:
        raised = True
        with At(n, unit) as point:
            try:
                call()
                raised = False
            except MemoryError:
                pass
        assert raised == point.failed
        return raised, point.failed

    return fails


def in_a_row(count: int) -> Callable[[Callable[[], Any], int], tuple[bool, bool]]:
    from cpu_attn.tests.programs.memory_ends import _failing

    def fails(call: Callable[[], Any], n: int) -> tuple[bool, bool]:
        raised = True
        try:
            _failing.failing_in_a_row(n, count)
            call()
            raised = False
        except (MemoryError, SystemError):  # the second is NumPy's, parts of which do not say what is missing
            pass
        while True:
            try:
                return raised, _failing.failing_end() > 0
            except MemoryError:  # of those that still fail
                pass

    return fails


if __name__ == "__main__":
    for each in sys.argv[1:] or CALLS:
        for count in (1, 30):
            print(each, count, json.dumps(sweep(each, in_a_row(count), 11)), flush=True)
