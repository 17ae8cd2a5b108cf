# SPDX-License-Identifier: Apache-2.0
"""This module says what context parallelism asks of a library that connects processes, and does the same between
threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from cpu_attn import _check

Array = np.ndarray[Any, Any]


class RankError(RuntimeError):
    """A message of another rank did not come: that rank is dead or hangs, or the network between is down.

    The group stays broken: whatever it is asked afterwards raises the same error, so that messages of different calls
    are never taken for one another. The ranks that are left make a new group.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.distributed import RankError, ThreadGroup
        >>> first, second = ThreadGroup.make(2, timeout=0.01)
        >>> try:
        ...     first.all_gather(np.zeros(4, np.float32))  # the second never calls
        ... except RankError as error:
        ...     print(error)
        rank 0 of 2: no message of every other rank within 0.01 s, one is dead or hangs (BrokenBarrierError)
    """


class Group(ABC):
    """Connects ranks that send one another messages of the same size. A library's group is a subclass of a few lines.

    A copy is the group itself. It cannot be pickled, since it is a connection of this process (TypeError).

    Args:
        rank: which of the ranks this is.
        world_size: how many there are.
        timeout: seconds within which every call returns, or raises :class:`RankError`.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument has another type.

    Example:
        >>> from cpu_attn.distributed import Group, ThreadGroup
        >>> [isinstance(group, Group) for group in ThreadGroup.make(2)]
        [True, True]
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)  # the library raises these where a rank is lost

    def __init__(self, rank: int, world_size: int, timeout: float = 30.0) -> None:
        self.world_size = _check.integer("world_size", world_size, 1, _check.MAX_SIZE)
        self.rank = _check.integer("rank", rank, 0, self.world_size - 1)
        self.timeout = _check.timeout("timeout", timeout)
        self._broken = ""

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name}: cannot be pickled, it connects this process to others; make a group in each of them")

    def all_gather(self, message: Array) -> Array:
        """Gives every rank the messages of all ranks.

        Args:
            message: an array. Every rank calls with one of the same shape and dtype.

        Returns:
            An array [world_size, ...], in the order of the ranks.

        Raises:
            RankError: a rank is dead or hangs, or did so in an earlier call.
        """
        if self._broken:
            raise RankError(self._broken)
        message = np.ascontiguousarray(message)
        gathered = np.empty((self.world_size, *message.shape), message.dtype)
        try:
            self._all_gather(message.reshape(-1).view(np.uint8), gathered.reshape(-1).view(np.uint8))
        except self.errors as error:
            why = f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(": ")
            self._broken = (
                f"rank {self.rank} of {self.world_size}: no message of every other rank within {self.timeout:g} s, one "
                f"is dead or hangs ({why})"
            )
            raise RankError(self._broken) from error
        return gathered

    def barrier(self) -> None:
        """Waits for all ranks.

        Raises:
            RankError: as :meth:`all_gather` does; this method takes ``self`` alone.
        """
        self.all_gather(np.zeros(1, np.uint8))

    @abstractmethod
    def _all_gather(self, message: Array, gathered: Array) -> None:
        """Sends the bytes of this rank, and writes those of all ranks to ``gathered``."""


class ThreadGroup(Group):
    """Connects ranks that are threads of one process, to try things out and to test them: :meth:`make` makes them.

    Args:
        rank: which of the ranks this is.
        parts: where the threads leave their messages.
        barrier: what they wait at.
        timeout: seconds within which every call returns, or raises :class:`RankError`.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument has another type.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import numpy as np
        >>> from cpu_attn.distributed import ThreadGroup
        >>> with ThreadPoolExecutor(2) as pool:
        ...     found = list(pool.map(lambda g: g.all_gather(np.array([g.rank * 10])).tolist(), ThreadGroup.make(2)))
        >>> found
        [[[0], [10]], [[0], [10]]]
    """

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier, timeout: float = 30.0) -> None:
        super().__init__(rank, len(parts), timeout)
        self._parts, self._wait = parts, barrier.wait

    @classmethod
    def make(cls, world_size: int, timeout: float = 30.0) -> list[ThreadGroup]:
        """Returns the group of each thread.

        Args:
            world_size: how many threads there are.
            timeout: as in the class.

        Raises:
            ValueError: a number is out of range.
        """
        parts: list[Any] = [None] * _check.integer("world_size", world_size, 1, _check.MAX_SIZE)
        barrier = threading.Barrier(len(parts))
        return [cls(rank, parts, barrier, timeout) for rank in range(len(parts))]

    def _all_gather(self, message: Array, gathered: Array) -> None:
        self._parts[self.rank] = message
        self._wait(self.timeout)
        np.concatenate(self._parts, out=gathered)
        self._wait(self.timeout)  # no rank may go on until all have read
