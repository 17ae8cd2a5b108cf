# SPDX-License-Identifier: Apache-2.0
"""Calls give back what they allocate, also those that are refused."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import sparse
from cpu_attn._threads import threads

from ..harness.steps import attention_args, plan_args, write_args
from ..native.test_indexer import Indexer


class Mallinfo2(ctypes.Structure):
    """glibc's: number 4 is what mmap gave, number 7 what lies in the heap."""

    _fields_ = (("bytes", ctypes.c_size_t * 10),)


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
pytestmark = pytest.mark.skipif(mallinfo2 is None, reason="glibc 2.33 and newer say how much memory is in use")


def in_use() -> int:
    assert mallinfo2 is not None
    mallinfo2.restype = Mallinfo2
    found = mallinfo2().bytes
    return int(found[4] + found[7])


TREE = np.array([[1], [3], [7], [1]], np.uint8)
TABLE = np.arange(70, dtype=np.int32)[None].repeat(3, axis=0)
LONG = {"seq_lens": np.array([1100, 1110], np.int32), "block_table": TABLE[:2], "block_size": 16}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "spans": {"mm_prefix_range": {0: [(5, 9)]}},
    "tree": {"tree_mask": TREE},
    "shared": LONG,
    "nodes": {**LONG, "block_nodes": np.zeros(70, np.int32)},
    "ranks": {"cp_world_size": 2},
    "refused-table": {**LONG, "block_table": TABLE[:2, :9]},
    "refused-nodes": {**LONG, "block_nodes": np.full(70, 64, np.int32)},
    "refused-tree": {"tree_mask": TREE, "causal": False},
}


def plan(name: str) -> Callable[[], Any]:
    return lambda: cpu_attn.get_scheduler_metadata(**plan_args() | PLANS[name])


def attention(**changed: Any) -> Callable[[], Any]:
    args = attention_args() | changed
    return lambda: cpu_attn.attention_with_kv_cache(**args)


def rotary() -> Callable[[], Any]:
    args, table = write_args(), np.ones((64, 8), np.float32)
    query, slots, positions = np.ones((5, 4, 8), np.float32), args.pop("slot_mapping"), np.arange(5)
    return lambda: cpu_attn.rotary_reshape_and_cache(query, *args.values(), slots, positions, table, query_out=query)


def pages(**changed: Any) -> Callable[[], Any]:
    args = {name: x for name, x in attention_args().items() if name in ("query", "query_start_loc", "seq_lens")}
    args |= {"block_min": np.ones((4, 2, 8), np.float32), "block_max": np.ones((4, 2, 8), np.float32), "block_size": 16}
    args |= {"block_table": np.array([[1, 3], [2, 0]], np.int32)} | changed
    return lambda: sparse.score_blocks(**args)


def wide_table(block: int) -> Callable[[], Any]:
    """More blocks than a call checks on its stack."""
    cache, table, lens = (
        cpu_attn.PagedKVCache(300, 16, 2, 8),
        np.arange(300, dtype=np.int32),
        np.array([4800], np.int32),
    )
    table[-1] = block
    query, made = np.ones((1, 4, 8), np.float32), cache.plan(np.array([0, 1], np.int32), lens, 4)
    return lambda: cache.attend(query, table[None], made)


def gather(block: int) -> Callable[[], Any]:
    cache, table = cpu_attn.PagedKVCache(4, 16, 2, 8), np.array([1, block], np.int32)
    return lambda: cache.gather(table, 20)


def write(slot: int) -> Callable[[], Any]:
    """More tokens than a call checks the slots of on its stack."""
    cache, row = cpu_attn.PagedKVCache(64, 16, 2, 8), np.ones((1000, 2, 8), np.float32)
    slots = np.append(np.arange(999), slot)
    return lambda: cache.update(row, row, slots)


def select(**changed: Any) -> Callable[[], Any]:
    indexer = Indexer("float32")
    return lambda: indexer.select(**changed)


BAD_TABLE = np.array([[1, 9], [2, -7]], np.int32)
CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    **{f"plan-{name}": functools.partial(plan, name) for name in PLANS},
    "attention": attention,
    "attention-refused": lambda: attention(block_table=BAD_TABLE),
    "attention-wide": lambda: wide_table(0),
    "attention-wide-refused": lambda: wide_table(300),
    "write": lambda: write(-1),
    "write-refused": lambda: write(1024),
    "rotary": rotary,
    "gather": lambda: gather(0),
    "gather-refused": lambda: gather(4),
    "pages": pages,
    "pages-refused": lambda: pages(block_table=BAD_TABLE),
    "select": select,
    "select-refused": lambda: select(block_table=np.full((5, 20), -1, np.int32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_stays_allocated(name: str) -> None:
    """A call that kept what malloc gives at least would keep 32 bytes."""
    call = CALLS[name]()

    def calls(n: int) -> None:
        for _ in range(n):
            try:
                call()
                assert "refused" not in name
            except ValueError:
                assert "refused" in name

    with threads(1):
        calls(100)
        before = in_use()
        calls(300)
        assert in_use() - before < 300 * 16
