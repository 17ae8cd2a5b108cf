# SPDX-License-Identifier: Apache-2.0
"""This module maps segments of a prefix store behind the blocks of caches, where attention reads them as any block.

The caches' arrays have room there (:class:`cpu_attn.PagedKVCache`, ``store_blocks``). A segment that is mapped has a
run of blocks in it, with the same numbers in each array, since its blocks lie in its file as they do in the arrays.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from cpu_attn._arrays import address
from cpu_attn._mapping import is_reserved, map_file, read_pages, unmap
from cpu_attn.serving.store_folder import Folder, lease
from cpu_attn.serving.store_segment import Layout, Record, digest, read_layout

Array = np.ndarray[Any, Any]


class Run:
    """Is a segment that is mapped.

    Args:
        name: of the file.
        layout: what is where in it.
        blocks: those of the arrays that are its own.
        fd: the file, which is closed with the run.

    Attributes:
        fd: None for a run in a copy of the arrays, which is a copy of what was mapped, and so ends with that.
        leased: whether other files are removed before this one.
        verified: records of blocks whose bytes are known to be what was written.
        last_use: when the room was asked for it last, on the clock of that.
    """

    def __init__(self, name: str, layout: Layout, blocks: range, fd: int) -> None:
        self.name, self.layout, self.blocks, self.leased, self.last_use = name, layout, blocks, False, 0
        self.verified: set[Record] = set()
        self.fd: int | None = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "fd": None, "leased": False, "close": _nothing}


def _nothing() -> None:
    """Closes the file of a run that has none."""


class _Place(NamedTuple):
    """Says where a segment may go. unused_since: when the last of the runs that lie there was used."""

    unused_since: int
    blocks: range
    runs: list[Run]


class Room:
    """Is the room that arrays have behind their first ``num_blocks`` blocks.

    Args:
        arrays: [num_blocks + room, ...] each, of memory for files to be mapped to (:mod:`cpu_attn._mapping`).
        num_blocks: how many blocks of them are memory.

    Raises:
        ValueError: an array is other memory.
    """

    def __init__(self, arrays: Sequence[Array], num_blocks: int) -> None:
        self.use(arrays)
        self._num_blocks = num_blocks
        self.nbytes = tuple(array[:1].nbytes for array in arrays)
        # Runs begin at multiples of so many blocks, which is where blocks of all arrays begin at pages.
        self.unit = max(mmap.PAGESIZE // gcd(mmap.PAGESIZE, size) for size in self.nbytes)
        self.blocks = range(self._whole(num_blocks), len(arrays[0]))
        self.runs: dict[str, Run] = {}
        self._time = 0

    def use(self, arrays: Sequence[Array]) -> None:
        """Goes on with these arrays, of the same shapes."""
        for array in arrays:
            if not (array.flags.c_contiguous and is_reserved(array)):
                raise ValueError("caches: an array is not the memory that its cache was made with")
        self._arrays = [array.view(np.uint8).reshape(len(array), -1) for array in arrays]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": []}

    def _whole(self, count: int) -> int:
        return -(-count // self.unit) * self.unit

    def check(self, name: str, capacity: int) -> None:
        """Raises ValueError unless a segment of so many blocks can be mapped. name: what the room is called."""
        missing = self.blocks.start + self._whole(capacity) - self.blocks.stop
        if missing > 0:
            there = self.blocks.stop - self._num_blocks
            raise ValueError(
                f"{name}: {there}, expected at least {there + missing}: by its segment_bytes a segment of the store "
                f"has {capacity} blocks"
            )

    def use_runs(self, blocks: Sequence[int]) -> None:
        """Has the runs of these blocks stay before others. None of them gives way before the next call of this method,
        nor does one that is mapped until then."""
        self._time += 1
        used = np.array(blocks, np.int64)
        for run in self.runs.values():
            if ((used >= run.blocks.start) & (used < run.blocks.stop)).any():
                run.last_use = self._time
                if run.fd is not None and not run.leased:  # somebody appended to it before
                    run.leased = lease(run.fd)

    def find(self, name: str) -> Run | None:
        """Gives the run of a segment that is mapped, which does not give way before the next call of
        :meth:`use_runs`."""
        run = self.runs.get(name)
        if run:
            run.last_use = self._time
        return run

    def place(self, capacity: int, in_use: Callable[[range], bool]) -> tuple[range, list[Run]] | None:
        """Finds blocks for a segment: those whose runs, which then have to be unmapped, were unused for longest.
        in_use: whether somebody has any of these blocks.

        Returns:
            The blocks and those runs; None where all are in use.
        """
        ends = [self.blocks.start, *(self._whole(run.blocks.stop) for run in self.runs.values())]
        starts = sorted({*ends, *(run.blocks.start for run in self.runs.values())})
        busy = {name for name, run in self.runs.items() if run.last_use == self._time or in_use(run.blocks)}
        found: list[_Place] = []
        for start in starts:
            blocks = range(start, start + self._whole(capacity))
            there = [run for run in self.runs.values() if _meet(run.blocks, blocks)]
            if blocks.stop <= self.blocks.stop and not busy & {run.name for run in there}:
                found.append(_Place(max((run.last_use for run in there), default=-1), blocks[:capacity], there))
        if not found:
            return None
        best = min(found, key=lambda place: (place.unused_since, place.blocks.start))
        return best.blocks, best.runs

    def map(self, folder: Folder, name: str, layout: Layout, blocks: range) -> Run:
        """Maps a segment.

        Raises:
            ValueError: the file is not what it was, or is cut.
            OSError: the system refuses.
        """
        run = Run(name, layout, blocks, folder.open_file(name))
        assert run.fd is not None
        try:
            if read_layout(folder, run.fd) != layout:
                raise ValueError(f"{name}: has another header than before")
            for (at, size), offset in zip(self._pages(run), layout.regions, strict=False):
                map_file(at, size, run.fd, offset)
        except BaseException:
            self.unmap(run)
            raise
        self.runs[name] = run
        run.last_use = self._time
        run.leased = lease(run.fd)
        return run

    def _pages(self, run: Run) -> list[tuple[int, int]]:
        """Lists where the pages of a run begin in each array, and how many bytes they have."""
        rows = [array[run.blocks.start : run.blocks.stop] for array in self._arrays]
        return [(address(x), -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE) for x in rows]

    def unmap(self, run: Run) -> None:
        """Puts zeros in the place of a segment."""
        self.runs.pop(run.name, None)
        for at, size in self._pages(run):
            unmap(at, size)
        run.close()

    def begin_to_read(self, folder: Folder, run: Run, places: Sequence[int]) -> None:
        """Has the system read places of a run, rising, from the disk, and does not wait for that.

        Raises:
            OSError: it refuses.
        """
        assert run.fd is not None
        for _, size, offset in self._parts(run, places):
            folder.read_ahead(run.fd, offset, size)

    def read(self, run: Run, places: Sequence[int]) -> None:
        """Waits until places of a run, rising, have been read.

        Raises:
            OSError: they cannot be read.
        """
        for at, size, _ in self._parts(run, places):
            read_pages(at, size)

    def _parts(self, run: Run, places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Gives the pages of places, rising: their addresses, how many bytes they have, and where in the file they
        begin."""
        for _, group in groupby(enumerate(places), lambda item: item[1] - item[0]):
            together = [place for _, place in group]
            for (at, _), size, offset in zip(self._pages(run), self.nbytes, run.layout.regions, strict=False):
                first, end = together[0] * size, (together[-1] + 1) * size
                first -= first % mmap.PAGESIZE
                yield at + first, end - first, offset + first

    def is_right(self, run: Run, record: Record) -> bool:
        """Compares what is mapped of a block with its checksum."""
        block = run.blocks[record.place]
        return digest(*(array[block] for array in self._arrays)) == record.digest


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
