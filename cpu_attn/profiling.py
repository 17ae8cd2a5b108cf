# SPDX-License-Identifier: Apache-2.0
"""This module tells how long the calls of a running program took, and by which kernels: :func:`profile`, or
``CPU_ATTN_PROFILE=FILE``."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from time import perf_counter_ns as now
from typing import Any

from cpu_attn import _dispatch
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib

MOST_CALLS = 100_000  # a profile keeps so many one by one, the latest


@dataclass(frozen=True)
class Kind:
    """Calls that a profile counts together have these fields in common. kernel: what multiplies, in the words of
    ``info``."""

    name: str
    engine: str
    isa: str
    kernel: str
    dtype: str
    kv_cache_dtype: str


@dataclass(frozen=True)
class Call:
    """Describes one call. start, end: nanoseconds of time.perf_counter_ns; thread: the Python thread's native id;
    num_threads: most threads that computed it; num_tokens: query tokens, or those written."""

    kind: Kind
    start: int
    end: int
    thread: int
    num_threads: int
    num_reqs: int
    num_tokens: int


@dataclass
class Total:
    """Holds the sums over all calls of a kind."""

    calls: int = 0
    nanoseconds: int = 0
    num_tokens: int = 0
    num_threads: int = 0

    def __add__(self, other: Total) -> Total:
        return Total(
            self.calls + other.calls,
            self.nanoseconds + other.nanoseconds,
            self.num_tokens + other.num_tokens,
            max(self.num_threads, other.num_threads),
        )


class _Tally:
    """Adds up totals without a lock. Were there one, a signal handler or a finalizer, which may run between any two
    bytecodes of the thread that holds it, could make a call and wait for ever. Whoever adds takes a part for itself, or
    begins one where all are taken, so there are as many parts as were ever taken at once. All that several threads see
    changes by methods of C only."""

    def __init__(self) -> None:
        self._parts: list[dict[Kind, Total]] = []
        self._free: deque[dict[Kind, Total]] = deque()

    def add(self, kind: Kind, one: Total) -> None:
        try:
            part = self._free.pop()
        except IndexError:
            part = {}
            self._parts.append(part)
        part[kind] = part.get(kind, Total()) + one
        self._free.append(part)

    def totals(self) -> dict[Kind, Total]:
        found: dict[Kind, Total] = {}
        for part in self._parts.copy():
            for kind, total in part.copy().items():
                found[kind] = found.get(kind, Total()) + total
        return found


@dataclass(eq=False)
class Profile:
    """Holds what a program called while it was profiled.

    ``totals``: a :class:`Total` of every :class:`Kind`; ``calls``: the latest hundred thousand :class:`Call`, in the
    order in which they ended; ``start``, ``end``: nanoseconds of ``time.perf_counter_ns``, ``end`` 0 while it runs.
    ``print(profile)`` shows the totals as a table of 80 columns.
    """

    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    start: int = field(default_factory=now)
    end: int = 0  # 0 while it runs
    _tally: _Tally = field(default_factory=_Tally, repr=False)

    @property
    def totals(self) -> dict[Kind, Total]:
        return self._tally.totals()

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self._tally.add(call.kind, Total(1, call.end - call.start, call.num_tokens, call.num_threads))

    def begin_anew(self) -> None:
        """Forgets the calls. What is being added meanwhile may stay among them, never in the totals."""
        self.calls.clear()
        self._tally = _Tally()

    def __str__(self) -> str:
        ranked = sorted(self.totals.items(), key=lambda item: -item[1].nanoseconds)
        wall = max((self.end or now()) - self.start, 1)
        lines = [f"{wall / 1e9:.3f} s, of which calls took", ""]
        lines += [f"{'calls':>8} {'ms':>10} {'of all':>7} {'us each':>9} {'threads':>7}  what"]
        for kind, total in ranked:
            took = total.nanoseconds
            share, each = f"{took / wall:.1%}", f"{took / 1e3 / total.calls:.1f}"
            numbers = f"{total.calls:>8} {took / 1e6:>10.2f} {share:>7} {each:>9} {total.num_threads:>7}"
            lines += [f"{numbers}  {kind.name}"]
            if kind.isa:
                cache = "" if kind.kv_cache_dtype == "auto" else f" over {kind.kv_cache_dtype}"
                how = f"{kind.dtype}{cache} by {kind.engine} on {kind.isa}" + (kind.kernel and f": {kind.kernel}")
                lines += wrap(how, 80, initial_indent=" " * 10, subsequent_indent=" " * 12)
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Gives the calls in Chrome's format of traces, which chrome://tracing and https://ui.perfetto.dev show."""
        pid = os.getpid()
        events = [
            {
                "name": call.kind.name,
                "cat": call.kind.engine or "cpu_attn",
                "ph": "X",
                "ts": call.start / 1e3,
                "dur": (call.end - call.start) / 1e3,
                "pid": pid,
                "tid": call.thread,
                "args": asdict(call.kind)
                | {name: getattr(call, name) for name in ("num_threads", "num_reqs", "num_tokens")},
            }
            for call in self.calls.copy()
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Writes :meth:`trace` as JSON.

        Args:
            path: of the file, which is written over.
        """
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")


_profiles: dict[Profile, None] = {}  # the profiles that run; a dict is an ordered set


def _begin_anew() -> None:
    """Empties all profiles in the child of a fork: what the parent has called is not the child's."""
    for running in _profiles.copy():
        running.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def profile() -> Iterator[Profile]:
    """Records the calls of all threads of this process that end within it.

    It tells which engine, isa and kernel each attention, cache write, selection of tokens, plan and merge took, how
    many threads, requests and tokens, and how long. The bounds of blocks are not recorded. A call costs a few
    microseconds more while it is recorded. A program that cannot be changed is profiled by ``CPU_ATTN_PROFILE=FILE``:
    each of its processes then writes a trace to FILE, with its number before the suffix, when it ends as Python
    programs do.

    It takes no arguments, and raises no errors.

    Returns:
        A context manager, which gives a :class:`cpu_attn.profiling.Profile`.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import merge_states, profiling
        >>> with profiling.profile() as profile:
        ...     output, lse = merge_states(np.ones((2, 5, 1, 8), np.float32), np.zeros((2, 1, 5), np.float32))
        >>> [call.kind.name for call in profile.calls]  # print(profile) shows a table
        ['merge_states']
        >>> profile.save("/dev/null")  # a trace for chrome://tracing or https://ui.perfetto.dev
    """
    running = Profile()
    _profiles[running] = None
    try:
        yield running
    finally:
        _profiles.pop(running, None)
        running.end = now()


_thread = threading.local()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keeps the calls of this thread within it out of all profiles: they are not the program's own."""
    before, _thread.unrecorded = getattr(_thread, "unrecorded", False), True
    try:
        yield
    finally:
        _thread.unrecorded = before


def clock() -> int:
    """Gives the time at which a call starts, or 0 where no profile records it."""
    return now() if _profiles and not getattr(_thread, "unrecorded", False) else 0


def record(
    name: str,
    start: int,
    engine: str = "",
    isa: str = "",
    dtype: str = "",
    kv_cache_dtype: str = "",
    num_threads: int = 1,
    num_reqs: int = 0,
    num_tokens: int = 0,
    kernel: str = "",
) -> None:
    """Adds a call that ends now to every profile that runs. start: what clock() gave, which was not 0."""
    kind = Kind(name, engine, isa, kernel, dtype, kv_cache_dtype)
    call = Call(kind, start, now(), threading.get_native_id(), num_threads, num_reqs, num_tokens)
    for running in _profiles.copy():
        running.add(call)


def record_plan(name: str, start: int, plan: Any) -> None:
    """Does what :func:`record` does for a call that a plan describes."""
    kvs = "/".join(dict.fromkeys(plan.kv_dtypes)) if plan.narrow else "auto"
    which = plan.engine, plan.isa, str(plan.dtype)
    record(name, start, *which, kvs, plan.num_threads, plan.num_reqs, plan.num_tokens, _kernel(*which))


def _kernel(engine: str, isa: str, dtype: str) -> str:
    if engine != "native":
        return {"onednn": "oneDNN's matmul and softmax", "reference": "plain C"}[engine]
    info = ffi.new("ca_kernel_info *")
    index = next(i.index for i in _dispatch.isas() if i.name == isa)
    return ffi.string(info.method).decode() if lib.ca_isa_kernel(index, DTYPE_CODES[dtype], info) else ""


def _profile_all(path: Path) -> None:
    running = Profile()
    _profiles[running] = None

    def save() -> None:
        if running.calls:
            running.save(path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}"))

    atexit.register(save)


if asked := os.environ.get("CPU_ATTN_PROFILE"):
    _profile_all(Path(asked))
