# SPDX-License-Identifier: Apache-2.0
"""This module measures the limits of this machine by the library's own probes (native/limits/probe.c), and keeps the
best of all looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib

UNITS = {"matrix_gflops": "GFLOP/s", "vector_gflops": "GFLOP/s", "read_gbps": "GB/s", "memcpy_gbps": "GB/s"}
DEFAULT_BYTES = 256 * 2**20  # so many are read and copied where no workload says how many
LOOKS = 3  # a limit is looked at so often each time that it is measured
SECONDS = 0.01  # one look at a product takes so long


@dataclass(frozen=True)
class Probe:
    """Holds a row of native/limits/probe. reason: what it lacks here, "" for nothing."""

    index: int
    name: str
    unit: str
    isa: str
    what: str
    dtypes: frozenset[str]
    reason: str


@dataclass(frozen=True)
class Limit:
    """Names what is to be measured: a limit of ``kind`` (a key of UNITS) on so many threads, with a probe or over this
    many bytes."""

    kind: str
    threads: int
    probe: Probe | None = None
    num_bytes: int = 0

    @property
    def what(self) -> str:
        return self.probe.what if self.probe else f"over {self.num_bytes / 2**20:.4g} MiB"


@cache
def probes() -> tuple[Probe, ...]:
    """Lists all of them, best first."""
    found: list[Probe] = []
    info = ffi.new("ca_probe_info *")
    while lib.ca_probe(len(found), info):
        name, unit, isa, what, reason = (
            ffi.string(s).decode() for s in (info.name, info.unit, info.isa, info.what, info.reason)
        )
        dtypes = frozenset(d for d, code in DTYPE_CODES.items() if info.dtypes >> code & 1)
        found.append(Probe(len(found), name, unit, isa, what, dtypes, reason))
    return tuple(found)


def products(isa: str | None, dtype: str, threads: int) -> list[Limit]:
    """Lists the ways in which the kernels of an isa might multiply: the fastest of them is their limit."""
    return [
        Limit("matrix_gflops" if p.unit == "matrix" else "vector_gflops", threads, p)
        for p in probes()
        if not p.reason and p.isa == isa and dtype in p.dtypes
    ]


def best_isa(dtype: str, matrix: bool) -> str:
    """Gives the best isa that can run here, without a matrix unit unless told so."""
    return next(p.isa for p in probes() if not p.reason and dtype in p.dtypes and (matrix or p.unit != "matrix"))


def roof(flops: float, num_bytes: float, seen: Mapping[Limit, float]) -> tuple[float, str]:
    """Gives the seconds that so much work takes at least, and what binds it, a key of UNITS: the fastest of its
    products, or reading. seen: limits, and what was measured of them."""
    peak, product = max((value, limit.kind) for limit, value in seen.items() if limit.probe)
    reads, reading = max((value, limit.kind) for limit, value in seen.items() if not limit.probe)
    return max((flops * 1e-9 / peak, product), (num_bytes * 1e-9 / reads, reading))


class Limits:
    """Measures and keeps the highest. Memory is as large as asked for, and random."""

    def __init__(self) -> None:
        self.kept: dict[Limit, float] = {}
        self._memory = np.zeros(0, np.uint8)

    def measure(self, limits: Iterable[Limit]) -> dict[Limit, float]:
        """Looks a few times at each, and returns what it sees now."""
        found = {limit: self._look(limit) for limit in limits}
        for limit, value in found.items():
            self.kept[limit] = max(self.kept.get(limit, 0.0), value)
        return found

    def _look(self, limit: Limit) -> float:
        look = self._product(limit, limit.probe) if limit.probe else self._memory_traffic(limit)
        return max(float(look()) for _ in range(LOOKS))

    def _product(self, limit: Limit, probe: Probe) -> Callable[[], float]:
        return lambda: lib.ca_probe_gflops(probe.index, limit.threads, SECONDS)

    def _memory_traffic(self, limit: Limit) -> Callable[[], float]:
        if len(self._memory) < limit.num_bytes:
            self._memory = np.resize(np.frombuffer(np.random.default_rng(1).bytes(2**24), np.uint8), limit.num_bytes)
        source = ffi.from_buffer(self._memory)
        if limit.kind == "read_gbps":
            return lambda: lib.ca_probe_read_gbps(source, limit.num_bytes, limit.threads)
        target = ffi.from_buffer(np.zeros(limit.num_bytes, np.uint8), require_writable=True)
        return lambda: lib.ca_probe_copy_gbps(target, source, limit.num_bytes, limit.threads)

    def fastest(self, limits: Iterable[Limit]) -> Limit | None:
        return max(limits, key=lambda limit: self.kept[limit], default=None)

    def summary(self) -> dict[str, float | None]:
        """Gives one number for each kind, of the most threads: the fastest product, memory of the largest size. None
        means that it was not measured here."""
        found: dict[str, float | None] = {}
        for kind in UNITS:
            of_kind = [limit for limit in self.kept if limit.kind == kind]
            chosen = max(of_kind, key=lambda limit: (limit.threads, limit.num_bytes, self.kept[limit]), default=None)
            found[kind] = self.kept[chosen] if chosen else None
        return found

    def details(self) -> list[dict[str, Any]]:
        """Lists every limit that was measured, and the products that could not be, with the reason."""
        rows: list[dict[str, Any]] = [
            {
                "limit": limit.kind,
                "what": limit.what,
                "threads": limit.threads,
                "value": value,
                "unit": UNITS[limit.kind],
                "reason": "",
            }
            for limit, value in sorted(self.kept.items(), key=lambda item: (list(UNITS).index(item[0].kind), -item[1]))
        ]
        for p in probes():
            if p.unit == "matrix" and p.reason:
                missing = {"limit": "matrix_gflops", "what": p.what or p.name, "threads": None, "value": None}
                rows.append({**missing, "unit": "GFLOP/s", "reason": p.reason})
        return rows
