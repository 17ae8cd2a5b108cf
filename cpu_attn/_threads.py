# SPDX-License-Identifier: Apache-2.0
"""This module says how many threads a call may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cpu_attn import _check
from cpu_attn._native import lib
from cpu_attn._quota import cpu_quota

# The quota does not count where a user has set OpenMP's number.
if "OMP_NUM_THREADS" not in os.environ and (quota := cpu_quota()):
    lib.ca_set_cpu_quota(quota)


def get_num_threads() -> int:
    """Says how many threads a call may use.

    Returns:
        What :func:`set_num_threads` said, else OpenMP's number for this thread, or less where control groups grant
        fewer CPUs' time and OMP_NUM_THREADS was not set; 1 in a child process that was forked.

    The function raises no errors.

    Example:
        >>> from cpu_attn import get_num_threads
        >>> get_num_threads() >= 1
        True
    """
    return int(lib.ca_get_num_threads())


def set_num_threads(n: int) -> None:
    """Sets how many threads a call may use at most, for the whole process. Plans that are made from now on follow it.

    A call with little work uses fewer. None uses more than 64 or, if that is more, 8 for each CPU.

    Args:
        n: 1 to 4096, or 0 for OpenMP's number.

    Raises:
        ValueError: ``n`` is out of range.
        TypeError: ``n`` is no integer.

    Example:
        >>> from cpu_attn import get_num_threads, set_num_threads
        >>> set_num_threads(1)
        >>> get_num_threads()
        1
        >>> set_num_threads(0)
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
    """Sets the number as set_num_threads or force_num_threads does, and on leaving sets the one that was told
    before."""
    before = _told
    (force_num_threads if forced else set_num_threads)(n)
    try:
        yield
    finally:
        _tell(before)
