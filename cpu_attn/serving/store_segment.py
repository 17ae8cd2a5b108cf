# SPDX-License-Identifier: Apache-2.0
"""This module knows the format of a segment, which is a file of a prefix store: docs/prefix_store.md has it as a table.

A segment has room for some blocks, and so many records. The record in place i says what the block in place i is called
and what its bytes hash to. A block consists of its bytes in each array (K and V of each layer, say); those of one array
lie one after the other, so that they can be mapped as a part of such an array. Blocks are written and synced before
their records, so a record that is there belongs to a block that is there.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from cpu_attn._errors import UnavailableError
from cpu_attn.serving.store_folder import Folder

VERSION = 1
MAGIC = b"CPUATTNS"
HEAD = struct.Struct("<8sIIII")  # the magic, the version, how many blocks, arrays and bytes of text
RECORD = struct.Struct("<32s16s16s")  # the block's name, the hash of its bytes, the hash of the header, place and these
DIGEST_BYTES = 16
CHUNK_BYTES = 4096 * RECORD.size  # of records that are read at once
PAGE_BYTES = 2**16  # the largest page of the systems that may map a segment
MOST_BLOCKS, MOST_ARRAYS, MOST_TEXT, MOST_BYTES = 2**16, 2**16, 2**24, 2**40


def load_xxhash() -> Any:
    """Imports the library that hashes blocks.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import xxhash  # imported in a function: the package works without it
    except ImportError as error:
        raise UnavailableError(f"a prefix store needs xxhash: pip install 'cpu-attn[store]' ({error})") from None
    return xxhash


def digest(*parts: Any) -> bytes:
    """Hashes bytes against faults of disks and memory by XXH3, 128 bits."""
    state = load_xxhash().xxh3_128()
    for part in parts:
        state.update(part)
    found: bytes = state.digest()
    return found


def _aligned(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES


class Record(NamedTuple):
    """Says of the block in a place what it is called, 32 bytes, and what its bytes hash to, 16 bytes."""

    place: int
    name: bytes
    digest: bytes


@dataclass(frozen=True)
class Layout:
    """Says where what is in a segment.

    Args:
        text: what decides the bytes of blocks, as JSON.
        nbytes: of a block in each array.
        capacity: how many blocks there is room for.
    """

    text: bytes
    nbytes: tuple[int, ...]
    capacity: int

    @cached_property
    def fingerprint(self) -> bytes:
        return sha256(self.text).digest()

    @cached_property
    def block_bytes(self) -> int:
        return sum(self.nbytes)

    @cached_property
    def header(self) -> bytes:
        head = HEAD.pack(MAGIC, VERSION, self.capacity, len(self.nbytes), len(self.text))
        whole = head + struct.pack(f"<{len(self.nbytes)}Q", *self.nbytes) + self.text
        return whole + digest(whole)

    @cached_property
    def records(self) -> int:
        """Where the records begin."""
        return -(-len(self.header) // RECORD.size) * RECORD.size

    @cached_property
    def regions(self) -> tuple[int, ...]:
        """Where the blocks of each array begin, and where the file ends."""
        found = [_aligned(self.records + self.capacity * RECORD.size)]
        for size in self.nbytes:
            found.append(_aligned(found[-1] + self.capacity * size))
        return tuple(found)

    @property
    def size(self) -> int:
        return self.regions[-1]

    def pack(self, record: Record) -> bytes:
        place, name, of_bytes = record
        return RECORD.pack(
            name, of_bytes, digest(self.header[-DIGEST_BYTES:], struct.pack("<Q", place), name, of_bytes)
        )

    def unpack(self, data: bytes, first: int) -> list[Record | None]:
        """Reads the records from place ``first`` on. None stands for one that was never written or has changed."""
        found: list[Record | None] = []
        for place, (name, of_bytes, _) in enumerate(RECORD.iter_unpack(data), first):
            record, at = Record(place, name, of_bytes), (place - first) * RECORD.size
            found.append(record if self.pack(record) == data[at : at + RECORD.size] else None)
        return found

    def parts(self, block: memoryview, place: int) -> list[tuple[int, memoryview]]:
        """Cuts the bytes of a block, [block_bytes], into those of each array, and says where in the file each goes."""
        found, at = [], 0
        for region, size in zip(self.regions, self.nbytes, strict=False):  # the last of the regions is the end
            found.append((region + place * size, block[at : at + size]))
            at += size
        return found


def read_layout(folder: Folder, fd: int) -> Layout:
    """Reads the header of an open file.

    Raises:
        ValueError: it is no segment of this version, has changed, or is cut.
        OSError: it cannot be read.
    """
    head = bytearray(HEAD.size)
    if folder.read(fd, head, 0) < len(head):
        raise ValueError("is cut within its header")
    magic, version, capacity, num_arrays, num_text = HEAD.unpack(head)
    if magic != MAGIC:
        raise ValueError("is no segment")
    if version != VERSION:
        raise ValueError(f"has version {version}, this library knows {VERSION}")
    if not (1 <= capacity <= MOST_BLOCKS and num_arrays <= MOST_ARRAYS and num_text <= MOST_TEXT):
        raise ValueError("has numbers in its header that are out of range")
    rest = bytearray(8 * num_arrays + num_text + DIGEST_BYTES)
    if folder.read(fd, rest, HEAD.size) < len(rest):
        raise ValueError("is cut within its header")
    if digest(head, rest[:-DIGEST_BYTES]) != rest[-DIGEST_BYTES:]:
        raise ValueError("has another header than was written")
    nbytes = struct.unpack_from(f"<{num_arrays}Q", rest)
    if not all(1 <= size <= MOST_BYTES for size in nbytes):
        raise ValueError("has numbers in its header that are out of range")
    layout = Layout(bytes(rest[8 * num_arrays : -DIGEST_BYTES]), nbytes, capacity)
    if folder.size(fd) < layout.size:
        raise ValueError(f"has {folder.size(fd)} bytes, expected {layout.size}")
    return layout


def read_records(folder: Folder, fd: int, layout: Layout, first: int) -> list[Record | None]:
    """Reads the records of an open segment from place ``first`` to the last one that is there. None stands for one that
    has changed."""
    data, num_bytes = bytearray(), (layout.capacity - first) * RECORD.size
    while len(data) < num_bytes:
        chunk = bytearray(min(CHUNK_BYTES, num_bytes - len(data)))
        count = folder.read(fd, chunk, layout.records + first * RECORD.size + len(data))
        data += chunk[: count // RECORD.size * RECORD.size]
        if count < len(chunk) or not any(chunk[-RECORD.size :]):
            break
    written = -(-len(data.rstrip(b"\0")) // RECORD.size) * RECORD.size
    found = layout.unpack(bytes(data[:written]), first)
    while found and found[-1] is None:  # it may be being written
        found.pop()
    return found


def read_block(folder: Folder, fd: int, layout: Layout, record: Record, block: bytearray) -> bool:
    """Reads the bytes of a block, [block_bytes], and says whether they are those that were written."""
    for offset, part in layout.parts(memoryview(block), record.place):
        if folder.read(fd, part, offset) < len(part):
            return False
    return digest(block) == record.digest


class SegmentWriter:
    """Appends to a new segment, which no other process does.

    Args:
        folder: where it is made.
        name: of the file.
        layout: what will be where.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Folder, name: str, layout: Layout) -> None:
        self.name, self.layout, self._folder = name, layout, folder
        self._synced: int = 0  # how many blocks have records
        self._written: list[Record] = []  # blocks that have none yet
        self._fd = folder.create(name, layout.size, layout.header)

    @property
    def is_full(self) -> bool:
        return self._synced + len(self._written) == self.layout.capacity

    def append(self, name: bytes, block: bytearray) -> None:
        """Writes the bytes of a block, [block_bytes]."""
        record = Record(self._synced + len(self._written), name, digest(block))
        for offset, part in self.layout.parts(memoryview(block), record.place):
            self._folder.write(self._fd, part, offset)
        self._written.append(record)

    def commit(self) -> list[Record]:
        """Makes the blocks that were appended last. Once it returns their records, a loss of power does not lose
        them."""
        layout, written = self.layout, self._written
        self._folder.sync(self._fd)
        data = b"".join(map(layout.pack, written))
        self._folder.write(self._fd, data, layout.records + self._synced * RECORD.size)
        self._folder.sync(self._fd)
        self._synced += len(written)
        self._written = []
        return written

    def close(self) -> None:
        """Gives the segment up: nothing is appended to it any more. One without a block is removed."""
        self._folder.close_file(self._fd)
        if not self._synced:
            with contextlib.suppress(OSError, ValueError):
                self._folder.remove(self.name)
