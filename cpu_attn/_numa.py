# SPDX-License-Identifier: Apache-2.0
"""This module says which CPUs each NUMA node has, which nodes this process may use, and on which of them a cache's
memory lies."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._errors import UnavailableError
from cpu_attn._native import ffi, lib


def _cpus(file: Path) -> list[int]:
    """Reads a list of CPUs as Linux writes it, "0-3,8", and gives those below CA_CPUS; none where the file holds
    something else."""
    try:
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        bounds = [(max(int(first), 0), min(int(last or first) + 1, lib.CA_CPUS)) for first, _, last in ranges]
    except (OSError, ValueError):
        return []
    return [cpu for bound in bounds for cpu in range(*bound)]


def read(root: Path = Path("/")) -> dict[int, list[int]]:
    """Gives the CPUs of each node; nothing where the system knows no nodes. root: another top of the file system, for
    tests."""
    folders = [root / f"sys/devices/system/node/node{node}" for node in range(lib.CA_NODES)]
    return {node: _cpus(folder / "cpulist") for node, folder in enumerate(folders) if os.path.isdir(folder)}


@functools.cache
def cpus_of_nodes() -> dict[int, list[int]]:
    """Does what :func:`read` does once in a process, and tells C."""
    found = read()
    tell(found)
    return found


def tell(cpus: dict[int, list[int]]) -> None:
    """Sets what C goes by when it looks for the node of a thread."""
    nodes = np.zeros(lib.CA_CPUS, np.int32)
    for node, own in cpus.items():
        nodes[own] = node
    lib.ca_set_cpu_nodes(ffi.from_buffer("int32_t[]", nodes), len(nodes))


def cpus() -> set[int]:
    """Gives the CPUs on which calls may run: OpenMP's places where it binds its threads, else those of the calling
    thread."""
    places = ffi.new("uint8_t[]", lib.CA_CPUS)
    if lib.ca_place_cpus(places):
        return {cpu for cpu, there in enumerate(places) if there}
    try:
        return set(os.sched_getaffinity(0))
    except OSError as error:
        raise _refused("sched_getaffinity", error.errno or 0) from None


def thread_nodes(n: int) -> list[int]:
    """Gives the node on which each of n threads of a call runs at present."""
    found = ffi.new("int32_t[]", [-1] * n)
    lib.ca_thread_cpus(found, n)
    node_of = {cpu: node for node, own in cpus_of_nodes().items() for cpu in own}
    return [node_of.get(cpu, 0) for cpu in found]


@dataclass(frozen=True)
class Placement:
    """Says on which node each block of a cache lies."""

    numa: str
    nodes: tuple[int, ...]

    def block_nodes(self, num_blocks: int) -> np.ndarray[Any, Any] | None:
        """Gives int32 [N], the node of each block; None where all are on one node, or a block may be on several."""
        if self.numa != "blocks" or len(self.nodes) == 1:
            return None
        return np.array(self.nodes, np.int32)[np.arange(num_blocks) * len(self.nodes) // num_blocks]

    def apply(self, address: int, size: int, num_blocks: int) -> None:
        """Places memory that nobody has touched and that starts with a page: num_blocks blocks of one size. A page in
        which blocks of two nodes meet goes to the second."""
        if self.numa == "interleave":
            return self._place(address, address + size, self.nodes)
        n = len(self.nodes)
        first = [-(-i * num_blocks // n) for i in range(n + 1)]
        at = [address + size * i // num_blocks // mmap.PAGESIZE * mmap.PAGESIZE for i in first[:-1]]
        for node, start, end in zip(self.nodes, at, [*at[1:], address + size], strict=True):
            self._place(start, end, [node])

    def _place(self, start: int, end: int, nodes: Iterable[int]) -> None:
        mask = sum(1 << node for node in nodes)
        if start < end and (error := lib.ca_place(start, end - start, self.numa == "interleave", mask)):
            raise _refused("mbind", error)


def _refused(call: str, error: int) -> UnavailableError:
    return UnavailableError(
        f"numa: this system refuses {call} ({os.strerror(error)}), which placing memory takes; a container may need "
        "the capability SYS_NICE for it, and None asks for nothing"
    )


def memory_nodes() -> list[int]:
    """Lists the nodes that this process may have memory of, by its cpuset and by its policy (numactl --membind)."""
    allowed = ffi.new("uint64_t *")
    if error := lib.ca_memory_nodes(allowed):
        raise _refused("get_mempolicy", error)
    return [node for node in range(lib.CA_NODES) if allowed[0] >> node & 1]


def placement(numa: Any) -> Placement | None:
    """Gives what PagedKVCache's argument means for this process."""
    if _check.numa(numa) is None:
        return None
    nodes = memory_nodes()
    if numa == "blocks":
        here, own = cpus(), cpus_of_nodes()
        nodes = [node for node in nodes if here & set(own.get(node, ()))] or nodes
    return Placement(numa, tuple(nodes))
