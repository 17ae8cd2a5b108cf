# SPDX-License-Identifier: Apache-2.0
"""This module maps pages of files into memory that was reserved for them, so that an array goes on in a file."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np

from cpu_attn._errors import UnavailableError
from cpu_attn._native import lib

Array = np.ndarray[Any, Any]
_RESERVED: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def reserve(size: int) -> mmap.mmap:
    """Gives zeros in which pages may be replaced by those of files, and which take memory once they are written to.

    Raises:
        UnavailableError: this system cannot replace pages.
        OSError: it refuses so many.
    """
    if not (flag := lib.ca_no_reserve()):
        raise UnavailableError("store_blocks: this system maps no file into the middle of an array")
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flag)
    _RESERVED.add(pages)
    return pages


def is_reserved(memory: Array) -> bool:
    """Says whether an array is a part of what :func:`reserve` gave, so that its pages may be replaced."""
    owner: Any = memory
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap) and owner in _RESERVED


def _heed(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


def map_file(address: int, size: int, fd: int, offset: int) -> None:
    """Puts pages of an open file, from ``offset`` on, in the place of reserved ones. Whoever writes to them writes to
    copies of this process alone.

    Raises:
        OSError: the system refuses. Those pages are zeros then.
    """
    _heed(lib.ca_map(address, size, fd, offset))


def unmap(address: int, size: int) -> None:
    """Puts zeros in the place of pages of a file.

    Raises:
        OSError: the system refuses.
    """
    _heed(lib.ca_map(address, size, -1, 0))


def read_pages(address: int, size: int) -> None:
    """Reads mapped pages, which may lie on a disk. Systems without a call for that read them when they are touched.

    Raises:
        OSError: they cannot be read.
    """
    if (error := lib.ca_read_pages(address, size)) not in (errno.ENOSYS, errno.EINVAL):  # Linux before 5.14: EINVAL
        _heed(error)
