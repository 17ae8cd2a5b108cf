# SPDX-License-Identifier: Apache-2.0
"""How many threads a call may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpu_attn import _check
from cpu_attn._native import lib


def get_num_threads() -> int:
    """Threads a call may use: what :func:`set_num_threads` said, else OpenMP's count for this thread."""
    return int(lib.ca_get_num_threads())


def set_num_threads(n: int) -> None:
    """Most threads of a call, for the whole process; 0 goes back to OpenMP's count. ValueError outside 0..4096.

    A call with little to do uses fewer; none uses more than 64 or, if that is more, 8 for each CPU.
    """
    _tell(_check.integer("n", n, 0, 4096))


def force_num_threads(n: int) -> None:
    """Sets the thread count of calls with little to do as well, for tests."""
    _tell(-n)


_told = 0  # get_num_threads gives neither 0 nor -n back


def _tell(n: int) -> None:
    global _told
    _told = n
    lib.ca_set_num_threads(n)


@contextmanager
def threads(n: int, forced: bool = False) -> Iterator[None]:
    """set_num_threads, or force_num_threads, and then again what was said before."""
    before = _told
    (force_num_threads if forced else set_num_threads)(n)
    try:
        yield
    finally:
        _tell(before)
