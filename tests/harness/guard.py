# SPDX-License-Identifier: Apache-2.0
"""Arrays that end at a page nobody may touch, with a known pattern before them.

One byte read or written past the end kills the process; one byte written before the start is found by `intact`.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATTERN = 0xA5
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """`array`: a copy of what it was made from, its last byte just before a forbidden page."""

    def __init__(self, source: NDArray[Any]) -> None:
        pages = -(-(source.nbytes + 64) // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        whole = np.frombuffer(self._memory, np.uint8)
        end = pages * mmap.PAGESIZE
        if _libc.mprotect(whole.ctypes.data + end, mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self._before = whole[: end - source.nbytes]
        self._before[:] = PATTERN
        self.array = whole[end - source.nbytes : end].view(source.dtype).reshape(source.shape)
        self.array[...] = source

    def intact(self) -> bool:
        return bool((self._before == PATTERN).all())
