# SPDX-License-Identifier: Apache-2.0
"""Blocks whose bytes follow from their names, and folders of a prefix store whose system calls fail."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import shake_128
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from cpu_attn._mapping import reserve
from cpu_attn.serving import PrefixStore
from cpu_attn.serving.block_pool import BlockPool
from cpu_attn.serving.journal import Journal
from cpu_attn.serving.prefix_store import StoredBlocks
from cpu_attn.serving.store_folder import Folder
from cpu_attn.serving.store_map import Room

WRITING = ("create", "write", "sync")


def name_of(number: int) -> bytes:
    return shake_128(b"name %d" % number).digest(32)


class Blocks:
    """Arrays of two layers whose blocks have an odd number of bytes, one of them strided, beside a store."""

    def __init__(self, store: PrefixStore, num_blocks: int = 64, model: str = "m") -> None:
        wide = np.zeros((num_blocks, 3, 12), np.uint16)
        self.arrays: list[Any] = [wide[:, :, ::2], np.zeros((num_blocks, 41), np.uint8)]
        self.stored: StoredBlocks = store.blocks({"model": model}, self.arrays)

    def bytes_of(self, number: int) -> list[Any]:
        """What a block of this name holds, whoever asks."""
        size = [x[0].nbytes for x in self.arrays]
        data = shake_128(b"bytes %d" % number).digest(sum(size))
        parts = data[: size[0]], data[size[0] :]
        return [np.frombuffer(d, x.dtype).reshape(x.shape[1:]) for d, x in zip(parts, self.arrays, strict=True)]

    def compute(self, block: int, number: int) -> None:
        for array, content in zip(self.arrays, self.bytes_of(number), strict=True):
            array[block] = content

    def put(self, numbers: Sequence[int]) -> None:
        """Computes and writes blocks of these names, each in the block of its number."""
        for number in numbers:
            self.compute(number % len(self.arrays[0]), number)
        self.stored.write([(number % len(self.arrays[0]), name_of(number)) for number in numbers])

    def found(self, numbers: Sequence[int]) -> list[int]:
        """Which of them can be read. All that are read are right, and nothing but whole blocks is written."""
        there = []
        for number in numbers:
            for array in self.arrays:
                array[0] = 7
            if self.stored.read([name_of(number)], [0]):
                there.append(number)
                wanted = self.bytes_of(number)
            else:
                wanted = [np.full(x.shape[1:], 7, x.dtype) for x in self.arrays]
            for array, want in zip(self.arrays, wanted, strict=True):
                assert (array[0] == want).all(), f"block {number} has other bytes"
        return there


class MappedBlocks(Blocks):
    """The same arrays with room for a few segments behind their blocks. What is found is mapped where it can be."""

    def __init__(self, store: PrefixStore, num_blocks: int = 64, model: str = "m", room: int = 4 * 4096) -> None:
        super().__init__(store, num_blocks, model)
        count = 4096 + room  # a run begins at a multiple of 4096 blocks, where 41 bytes of each end at a page
        shapes = [(count, 3, 6), (count, 41)]
        self.arrays = [
            np.frombuffer(reserve(count * x[0].nbytes), x.dtype).reshape(shape)
            for x, shape in zip(self.arrays, shapes, strict=True)
        ]
        self.stored.use(self.arrays)
        self.pool = BlockPool(np.zeros(num_blocks), Journal(), num_mapped=count - num_blocks)
        self.pool.stored, self.pool.room = self.stored, Room(self.arrays, num_blocks)

    def found(self, numbers: Sequence[int]) -> list[int]:
        there, none = [], np.zeros(1, np.int64)
        for number in numbers:
            if self.pool.load([name_of(number)], none):
                there.append(number)
                block = self.pool.block_of[name_of(number)]
                for array, want in zip(self.arrays, self.bytes_of(number), strict=True):
                    assert (array[block] == want).all(), f"block {number} has other bytes"
                self.pool.forget([block])
        self.pool._journal.clear()
        return there


def opened(path: Path, folder: Any = Folder, **options: Any) -> PrefixStore:
    """A store over a folder whose system calls are those of ``folder``, a class of it."""

    class Store(PrefixStore):
        _open_folder = folder

    return Store(path, **{"max_bytes": 1 << 30, "segment_bytes": 4096, **options})


class DyingSystem:
    """Stands in for the module ``os`` of store_folder: call number ``calls`` kills the process, a write after half of
    it is done."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return partial(self._call, found) if isinstance(found, BuiltinFunctionType) else found

    def _call(self, function: Any, *given: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            if function is os.pwrite:
                fd, data, offset = given
                os.pwrite(fd, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)


def failing(code: int, calls: Iterator[bool], names: Sequence[str] = WRITING) -> Any:
    """Folders whose methods ``names`` raise OSError where ``calls`` says so; a write has then done half."""

    class Failing(Folder):
        pass

    def method(name: str) -> Any:
        original = getattr(Folder, name)

        def call(self: Folder, *given: Any) -> Any:
            if next(calls):
                if name == "write":
                    fd, data, offset = given
                    view = memoryview(data).cast("B")
                    original(self, fd, view[: len(view) // 2], offset)
                raise OSError(code, os.strerror(code))
            return original(self, *given)

        return call

    for name in names:
        setattr(Failing, name, method(name))
    return Failing


class Unsynced(Folder):
    """A folder of a disk that loses power: :meth:`lose_power` takes back any part of what was written and not synced,
    in pieces of 16 bytes."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.before: dict[int, list[tuple[int, bytes]]] = {}  # by inode: (offset, what was there)

    def write(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        old = bytearray(len(view))
        self.read(fd, old, offset)
        pieces = [(offset + i, bytes(old[i : i + 16])) for i in range(0, len(old), 16)]
        self.before.setdefault(os.fstat(fd).st_ino, []).extend(pieces)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.before.pop(os.fstat(fd).st_ino, None)

    def lose_power(self, path: Path, rng: random.Random) -> int:
        lost = 0
        for file in path.iterdir():
            pieces, share = self.before.get(file.stat().st_ino, []), rng.random()
            with file.open("r+b") as opened:
                for offset, old in reversed(pieces):
                    if rng.random() < share:
                        opened.seek(offset)
                        opened.write(old)
                        lost += 1
        return lost


def always(code: int = errno.ENOSPC, names: Sequence[str] = WRITING) -> Any:
    def forever() -> Iterator[bool]:
        while True:
            yield True

    return failing(code, forever(), names)
