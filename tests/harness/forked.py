# SPDX-License-Identifier: Apache-2.0
"""Ranks as forked processes, on this host or each on a host of its own, which is a network namespace."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_FORK = multiprocessing.get_context("fork")


def _enter(host: str) -> None:
    """Moves this thread, and what it starts, into a network namespace."""
    fd = os.open(f"/run/netns/{host}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"setns {host}")
    os.close(fd)


def _child(work: Callable[[int], Any], rank: int, host: str | None, interface: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        if host:
            _enter(host)
        pipe.send((work(rank), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    os._exit(0)  # what the parent would do when it ends is not the child's to do


def run(
    world_size: int,
    work: Callable[[int], Any],
    hosts: Sequence[str] | None = None,
    lost: int | None = None,
    seconds: float = 60.0,
) -> list[Any]:
    """What each rank's work returns, in so many seconds; None for the one that is lost, which is killed once the others
    have ended."""
    started = []
    for rank in range(world_size):
        here, there = _FORK.Pipe(duplex=False)
        host = hosts[rank] if hosts else None
        process = _FORK.Process(target=_child, args=(work, rank, host, "eth0" if host else "lo", there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    found = []
    try:
        for rank, (_, here) in enumerate(started):
            result, error = (None, "") if rank == lost else here.recv() if here.poll(seconds) else (None, "too late")
            assert not error, f"rank {rank}: {error}"
            found.append(result)
    finally:
        for process, here in started:
            process.kill()
            process.join()
            here.close()
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def separate_hosts(count: int) -> Iterator[list[str]]:
    """So many hosts 192.0.2.1, 192.0.2.2, ... (a network for documents, RFC 5737) on a switch of their own: a namespace
    for each and one for the switch, and no connection to any other network. OSError or CalledProcessError where that is
    not allowed."""
    name = f"ca{os.getpid()}"
    switch, hosts = f"{name}s", [f"{name}h{i}" for i in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"192.0.2.{i + 1}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for each in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", each], check=False, capture_output=True, timeout=30)


def unplug(hosts: Sequence[str], rank: int) -> None:
    """Takes the host off the switch: nothing reaches it, and nothing says so."""
    _ip("-n", f"{hosts[0].rpartition('h')[0]}s", "link", "set", f"port{rank}", "down")
