# SPDX-License-Identifier: Apache-2.0
"""This module connects ranks by MPI, through mpi4py."""

from __future__ import annotations

import time
from typing import Any

from mpi4py import MPI

from cpu_attn.distributed.group import Array, Group

__all__ = ["MPIGroup"]


class MPIGroup(Group):
    """Connects ranks by a copy of an MPI communicator.

    MPI itself has no timeouts: what makes a call end after ``timeout`` is that it asks, over and over, whether the
    message has come. Where a process dies, ``mpiexec`` ends all others, unless it is told otherwise; then they, too,
    raise a :class:`cpu_attn.distributed.RankError` after ``timeout``.

    Args:
        comm: the communicator; None for ``MPI.COMM_WORLD``. All of its processes make the group.
        timeout: seconds within which every call returns, or raises.

    Raises:
        ValueError: ``timeout`` is out of range.
    """

    errors = (MPI.Exception, TimeoutError)

    def __init__(self, comm: Any = None, timeout: float = 30.0) -> None:
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout)
        self._lost: Any = None

    def _all_gather(self, message: Array, gathered: Array) -> None:
        end = time.monotonic() + self.timeout
        request = self._comm.Iallgather(message, gathered)
        while not request.Test():
            if time.monotonic() > end:
                self._lost = request, message, gathered  # MPI may still write there
                raise TimeoutError("the request of MPI is pending")
