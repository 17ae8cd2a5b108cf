# SPDX-License-Identifier: Apache-2.0
"""An engine that computes nothing and says which task ran when, and on which CPU. As a program it shows what threads
that OpenMP has bound take: tests/native/test_numa.py."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cffi
import numpy as np

import cpu_attn
from cpu_attn import _dispatch, _numa
from cpu_attn._native import ffi as native
from cpu_attn._threads import threads

own = cffi.FFI()
own.cdef(
    """
    typedef struct { int32_t request, token, num_tokens, segment, num_segments, shared; int64_t partial; } task;
    typedef struct {
        int (*rows)(const void *kernel);
        int64_t (*scratch_bytes)(const void *plan);
        int (*segment)(const void *plan, const void *call, const task *t, int kv_head, int num_heads, int64_t k0,
                       int64_t k1, const void *states, void *scratch);
        int together;
    } engine;
    """
)


class Recorder:
    """ran: (request, segment of its keys, CPU) of each task. meet: how many threads have to be in a task at once."""

    def __init__(self, meet: int = 1) -> None:
        self.ran: list[tuple[int, int, int]] = []
        self.barrier = threading.Barrier(meet)
        self.functions = (
            own.callback("int(const void *)", lambda kernel: 16),
            own.callback("int64_t(const void *)", lambda plan: 64),
            own.callback(
                "int(const void *, const void *, const task *, int, int, int64_t, int64_t, const void *, void *)",
                self.segment,
            ),
        )
        self.engine = own.new("engine *", [*self.functions, 0])

    def segment(self, plan: Any, call: Any, task: Any, head: int, heads: int, k0: int, *rest: Any) -> int:
        self.ran.append((task.request, k0 // 1024, ctypes.CDLL(None).sched_getcpu()))
        self.barrier.wait(timeout=30)
        return 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What plans made meanwhile run."""
        before = _dispatch.resolve_engine
        pointer = native.cast("ca_engine *", int(own.cast("uintptr_t", self.engine)))
        _dispatch.resolve_engine = lambda name: ("reference", pointer)
        try:
            yield
        finally:
            _dispatch.resolve_engine = before


@contextmanager
def faked(cpus: dict[int, list[int]]) -> Iterator[None]:
    """Nodes of these CPUs in place of the machine's."""
    before = _numa.cpus_of_nodes
    _numa.cpus_of_nodes = lambda: cpus  # type: ignore[assignment]
    _numa.tell(cpus)
    try:
        yield
    finally:
        _numa.cpus_of_nodes = before
        _numa.tell(before())


def decode(
    recorder: Recorder, seq_lens: list[int], table: Any, nodes: Any, planned: int, called: int
) -> list[tuple[int, int, int]]:
    """What ran in which order, of one query token of each request over blocks of 16. planned, called: threads."""
    cache = cpu_attn.PagedKVCache(len(nodes), 16, 1, 8)
    lens, starts = np.array(seq_lens, np.int32), np.arange(len(seq_lens) + 1, dtype=np.int32)
    cache.block_nodes = np.array(nodes, np.int32)
    with recorder.installed(), threads(planned, forced=True):
        plan = cache.plan(starts, lens, 1, block_table=table)
    with threads(called, forced=True):
        cache.attend(np.zeros((len(lens), 1, 8), np.float32), table, plan)
    return recorder.ran


def main() -> None:
    """Two threads, on a CPU each, which are taken for a node each."""
    cpus, found = sorted(_numa.cpus()), {}
    table = np.arange(32, dtype=np.int32).reshape(8, 4)
    with faked({0: cpus[:1], 1: cpus[1:]}):
        for name, nodes in {"own": [0, 1, 1, 0, 1, 0, 0, 1], "stolen": [1] * 8}.items():
            ran = decode(Recorder(meet=2), [64] * 8, table, np.repeat(nodes, 4), 2, 2)
            found[name] = [(request, cpus.index(cpu)) for request, _, cpu in ran]
        print(json.dumps({"cpus": cpus, "threads": _numa.thread_nodes(2), **found}))


if __name__ == "__main__":
    main()
