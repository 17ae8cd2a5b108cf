# SPDX-License-Identifier: Apache-2.0
"""This module keeps blocks that were computed in files, where the processes after this one, and those beside it, find
them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cpu_attn import _check
from cpu_attn.serving.store_folder import Folder
from cpu_attn.serving.store_map import Room, Run
from cpu_attn.serving.store_segment import (
    MOST_BLOCKS,
    Layout,
    Record,
    SegmentWriter,
    load_xxhash,
    read_block,
    read_layout,
    read_records,
)

Array = np.ndarray[Any, Any]
LOOK_SECONDS = 0.1  # for so long what other processes have written may be missed
MARK_SECONDS = 10.0  # for so long a segment counts as used without being marked so again
PAUSE_SECONDS = 60.0  # for so long nothing is written after the system has refused to
SYNC_BYTES = 64 << 20  # so many are written between two syncs, and may be lost with the process
MOST = 2**62


class StoreStats(NamedTuple):
    """Says what a store holds and what it did since it was opened: :meth:`PrefixStore.stats`. A snapshot of states
    counts as a block.

    Args:
        num_segments: how many files of blocks the folder has.
        num_bytes: how many bytes of the disk they take.
        num_stored_blocks: how many blocks can be found, of those that go with the managers that use this store.
        num_queued_blocks: how many blocks wait to be written.
        num_written_blocks: how many blocks were written.
        num_skipped_blocks: how many blocks were not written, as the queue was full, the block was needed for other
            tokens before its turn came, or the system refuses writes.
        num_read_blocks: how many blocks were read into caches.
        num_damaged_blocks: how many blocks were not what had been written, and were computed again.
        num_evicted_segments: how many segments were removed to make room.
        num_unreadable_segments: how many files the folder has that are called as segments are, and are something else,
            of another version, damaged in their headers, links, or others' to write to.
        num_faults: how many reads and writes the system refused.
        num_mapped_blocks: how many blocks were found in files that are mapped, and not read into caches.

    This class raises no errors itself.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from cpu_attn.serving import PrefixStore
        >>> with TemporaryDirectory() as folder, PrefixStore(folder, max_bytes=1 << 30) as store:
        ...     store.stats().num_segments
        0
    """

    num_segments: int
    num_bytes: int
    num_stored_blocks: int
    num_queued_blocks: int
    num_written_blocks: int
    num_skipped_blocks: int
    num_read_blocks: int
    num_damaged_blocks: int
    num_evicted_segments: int
    num_unreadable_segments: int
    num_faults: int
    num_mapped_blocks: int = 0


_Key = tuple[int, int]  # whose block, by id, and which


class _Queued(NamedTuple):
    """Is a block that waits to be written. of: whoever has its bytes; once they are gone, somebody else may have those
    bytes, and the block is left out."""

    of: Callable[[], StoredBlocks | None]
    fingerprint: bytes
    name: bytes


class Segment:
    """Is what this process knows of a segment. num_read: how many of its places have been looked at; marked: when it
    was marked as used; records: by name, of those that this store finds here."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name, self.layout, self.num_read = name, layout, 0
        self.marked = -MARK_SECONDS
        self.records: dict[bytes, Record] = {}


class PrefixStore:
    """Keeps the blocks of prefix caches in a folder, so that they survive the process, and processes beside it find
    them: ``BlockManager(caches, store=store, model=...)``.

    A thread of the store's own writes blocks behind the thread that serves. Any number of processes of one machine may
    use one folder. Whatever goes wrong with it, serving goes on: what cannot be read is computed again, what cannot be
    written is left out, one RuntimeWarning says so, and :meth:`stats` counts. docs/prefix_store.md says what is
    guaranteed. At the end of the process the store is closed.

    Args:
        path: of the folder, which is made where it is missing. Nobody but the user may enter it (mode 0700).
        max_bytes: how many bytes of the disk the files of all processes may take. Segments that were unused for longest
            are removed for new ones.
        segment_bytes: about how many bytes of blocks a file has, and so are evicted at once; at most a quarter of
            ``max_bytes``.
        max_queued_blocks: how many blocks may wait to be written; more are left out. They wait in the caches, so
            waiting takes no memory.
        verify: whether mapped blocks are read and compared with their checksums when they are first found, as copied
            ones always are. Without it finding them takes no time, attention reads them, and what has changed on the
            disk or in memory goes unnoticed.

    Raises:
        ValueError: the folder is a link, somebody else owns it or may enter it, or a number is out of range.
        TypeError: an argument has another type.
        OSError: the folder can neither be opened nor made.
        UnavailableError: xxhash is not installed, which the extra ``store`` brings.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager, PrefixStore
        >>> def serve(folder, prompt):
        ...     with PrefixStore(folder, max_bytes=1 << 30) as store:
        ...         cache = PagedKVCache(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
        ...         manager = BlockManager(cache, store=store, model="an example")
        ...         found = manager.allocate("a", prompt)
        ...         step = manager.step([("a", prompt[found:])])
        ...         cache.update(*np.ones((2, step.num_tokens, 2, 64), np.float32), step)
        ...         manager.flush_store()
        ...     return found
        >>> with TemporaryDirectory() as folder:
        ...     [serve(folder, range(40)) for _ in range(2)]
        [0, 32]
    """

    _open_folder = Folder  # tests put one in its place whose system calls fail

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        segment_bytes: int = 256 << 20,
        max_queued_blocks: int = 4096,
        verify: bool = True,
    ) -> None:
        self.path = _check.path("path", path)
        self.max_bytes = _check.integer("max_bytes", max_bytes, 1, MOST)
        self.segment_bytes = _check.integer("segment_bytes", segment_bytes, 1, MOST)
        self.max_queued_blocks = _check.integer("max_queued_blocks", max_queued_blocks, 1)
        self.verify = _check.boolean("verify", verify)
        load_xxhash()
        self._folder = self._open_folder(self.path)
        self._closed = False
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._forget_threads()
        _STORES.add(self)
        atexit.register(self.close)

    def _forget_threads(self) -> None:
        """Begins without a writer, locks and what was read of the folder: at first, and in a child after fork()."""
        self._changed = threading.Condition()  # holds while one of the five below, or a count, is used
        self._queue: OrderedDict[_Key, _Queued] = OrderedDict()
        self._queued: set[tuple[bytes, bytes]] = set()  # fingerprints and names: of the queue, and what is written now
        self._copied: _Key | None = None  # which block's bytes are being read
        self._writing = False
        self._paused_until = 0.0
        self._thread: threading.Thread | None = None

        self._looking = threading.Lock()  # holds while the segments that are known change
        self._looked_at = -LOOK_SECONDS
        self._segments: dict[str, Segment] = {}
        self._unreadable: set[str] = set()
        self._indexes: dict[bytes, dict[bytes, Segment]] = {}  # by fingerprint, where a block of some name is
        self._writers: dict[bytes, SegmentWriter] = {}  # by fingerprint; the thread's own

    def __repr__(self) -> str:
        return f"PrefixStore({self.path!r}, max_bytes={self.max_bytes})"

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return self

    def __reduce__(self) -> Any:
        return _reopened, (self.path, self.max_bytes, self.segment_bytes, self.max_queued_blocks, self.verify)

    def blocks(self, description: Mapping[str, Any], arrays: Sequence[Array]) -> StoredBlocks:
        """Gives the blocks of one kind that the store has, for whoever manages the arrays that they are copied to and
        from; :class:`BlockManager` does so by itself.

        Args:
            description: all that decides the bytes of a block, as JSON can hold it. Blocks with different ones never
                meet.
            arrays: [num_blocks, ...] each, of any dtypes.

        Returns:
            The :class:`StoredBlocks`.

        Raises:
            ValueError: a segment of one block would take more than ``max_bytes``, or the store is closed.
        """
        if self._closed:
            raise ValueError("store: is closed")
        nbytes = tuple(array.dtype.itemsize * prod(array.shape[1:]) for array in arrays if array.size)
        text = json.dumps({**description, "nbytes": nbytes}, sort_keys=True, separators=(",", ":")).encode()
        wanted = min(self.segment_bytes, self.max_bytes // 4) // max(1, sum(nbytes))
        layout = Layout(text, nbytes, min(max(1, wanted), MOST_BLOCKS))
        while layout.size > self.max_bytes and layout.capacity > 1:  # pages of many arrays may be larger than blocks
            layout = Layout(text, nbytes, layout.capacity // 2)
        if layout.size > self.max_bytes:
            raise ValueError(f"store: max_bytes {self.max_bytes}, a segment of one block takes {layout.size}")
        return StoredBlocks(self, layout, arrays)

    def flush(self) -> None:
        """Waits until all blocks that were queued are on the disk, or were left out."""
        with self._changed:
            while self._queue or self._writing:
                self._changed.wait()

    def close(self) -> None:
        """Writes what is queued, and ends the store's thread. Managers of a closed store go on without it."""
        atexit.unregister(self.close)
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()
        self._close_writers()
        with self._looking:
            self._indexes.clear()
            self._folder.close()

    def _close_writers(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def stats(self) -> StoreStats:
        """Counts what the folder holds, and what the store did.

        Returns:
            The :class:`StoreStats`.

        The method raises no errors.
        """
        files = []
        if not self._closed:
            with self._heeding_faults():
                files = self._folder.survey()
        counts = self._counts
        return StoreStats(
            num_segments=len(files),
            num_bytes=sum(each.num_bytes for each in files),
            num_stored_blocks=sum(map(len, list(self._indexes.values()))),  # another thread may add to them
            num_queued_blocks=len(self._queue),
            num_written_blocks=counts["written"],
            num_skipped_blocks=counts["skipped"],
            num_read_blocks=counts["read"],
            num_damaged_blocks=counts["damaged"],
            num_evicted_segments=counts["evicted"],
            num_unreadable_segments=len(self._unreadable),
            num_faults=counts["faults"],
            num_mapped_blocks=counts["mapped"],
        )

    def _warn(self, what: str, why: object) -> None:
        """Says that something of the folder is of no use, once for each kind of thing."""
        if what not in self._warned:
            self._warned.add(what)
            with contextlib.suppress(RuntimeWarning):  # whoever makes errors of warnings goes on without the store, too
                warnings.warn(f"prefix store {self.path}: {what}: {why}", RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def _heeding_faults(self) -> Iterator[None]:
        """Goes on where the system refuses to read."""
        try:
            yield
        except OSError as error:
            self._count("faults")
            self._warn("cannot read, and goes on without", error)

    # What is found.

    def _index(self, fingerprint: bytes) -> dict[bytes, Segment]:
        """Gives where the blocks of this kind are, of which the store takes note from now on."""
        with self._looking:
            if fingerprint not in self._indexes:
                self._indexes[fingerprint] = {}
                self._looked_at = -LOOK_SECONDS
        self._look()
        return self._indexes[fingerprint]

    def _look(self) -> None:
        """Reads what has been added to the folder since it was looked at last."""
        with self._looking:
            if self._closed or time.monotonic() - self._looked_at < LOOK_SECONDS:
                return
            with self._heeding_faults():
                names = self._folder.names()
                for name in self._segments.keys() - names:
                    self._forget(name)
                self._unreadable &= set(names)
                for name in names:
                    segment = self._segments.get(name)
                    if segment is None or segment.num_read < segment.layout.capacity:
                        self._look_at(name, segment)
            self._looked_at = time.monotonic()

    def _look_at(self, name: str, segment: Segment | None) -> None:
        try:
            if segment and segment.layout.fingerprint not in self._indexes:
                return
            with self._folder.opened(name) as fd:
                if segment is None:
                    segment = self._segments[name] = Segment(name, read_layout(self._folder, fd))
                if segment.layout.fingerprint in self._indexes:
                    found = read_records(self._folder, fd, segment.layout, segment.num_read)
                    segment.num_read += len(found)
                    self._add(segment, filter(None, found))
            self._unreadable.discard(name)
        except FileNotFoundError:  # another process has evicted it meanwhile
            pass
        except (OSError, ValueError) as error:
            self._unreadable.add(name)
            self._warn("goes on without a file", f"{name}: {error}")

    def _add(self, segment: Segment, records: Iterable[Record]) -> None:
        index = self._indexes[segment.layout.fingerprint]
        for record in records:
            segment.records[record.name] = record
            index.setdefault(record.name, segment)

    def _forget(self, name: str) -> None:
        """Forgets a segment that is gone."""
        segment = self._segments.pop(name)
        for each in list(segment.records):
            self._drop(each, segment)

    def _drop(self, name: bytes, segment: Segment) -> None:
        """Forgets that a block is in a segment. Another segment may have it, too: of processes that computed it at
        once, or since one was damaged."""
        segment.records.pop(name, None)
        index = self._indexes.get(segment.layout.fingerprint, {})
        if index.get(name) is segment:
            same = (x for x in self._segments.values() if x.layout.fingerprint == segment.layout.fingerprint)
            other = next((x for x in same if name in x.records), None)
            if other:
                index[name] = other
            else:
                del index[name]

    # What is written.

    def _count(self, what: str, number: int = 1) -> None:
        with self._changed:
            self._counts[what] += number

    def _put(self, stored: StoredBlocks, items: Sequence[tuple[int, bytes]], keep: bool) -> None:
        fingerprint, of = stored.layout.fingerprint, (lambda: stored) if keep else weakref.ref(stored)
        index = self._indexes.get(fingerprint, {})
        with self._changed:
            new = [(b, name) for b, name in items if name not in index and (fingerprint, name) not in self._queued]
            room = self.max_queued_blocks - len(self._queue)
            if self._closed or time.monotonic() < self._paused_until:
                room = 0
            for block, name in new[:room]:
                self._queue[id(stored), block] = _Queued(of, fingerprint, name)
                self._queued.add((fingerprint, name))
            self._count("skipped", len(new) - len(new[:room]))
            if self._queue and not self._thread:
                thread = threading.Thread(target=self._write, name="prefix store", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # the system has no room for another
                    self._pause(error)
            self._changed.notify_all()

    def _cancel(self, stored: StoredBlocks, blocks: Sequence[int]) -> None:
        keys = {(id(stored), block) for block in blocks}
        with self._changed:
            for key in keys & self._queue.keys():
                self._leave_out(self._queue.pop(key))
            while self._copied in keys:
                self._changed.wait()
            self._changed.notify_all()

    def _leave_out(self, queued: _Queued) -> None:
        self._queued.discard((queued.fingerprint, queued.name))
        self._count("skipped")

    def _write(self) -> None:
        """Is what the store's thread does."""
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                self._writing = True
            try:
                self._write_some()
            except Exception as error:  # whatever it is, serving goes on
                self._pause(error)

    def _pause(self, error: Exception) -> None:
        """Leaves out what is queued, and writes nothing for a while."""
        self._warn("cannot write, and goes on without", error)
        with self._changed:
            self._count("faults")
            while self._queue:
                self._leave_out(self._queue.popitem()[1])
            self._paused_until = time.monotonic() + PAUSE_SECONDS

    def _copy_next(self, layout: Layout | None) -> tuple[Layout, bytes, bytearray] | None:
        """Takes the first block off the queue and copies its bytes; None where the queue is empty, or the block is of
        another kind than ``layout``."""
        with self._changed:
            while True:
                key, queued = next(iter(self._queue.items()), (None, None))
                if key is None or queued is None or (layout and queued.fingerprint != layout.fingerprint):
                    return None
                del self._queue[key]
                stored = queued.of()
                if stored:
                    break
                self._leave_out(queued)
            self._copied = key
        try:
            return stored.layout, queued.name, stored.copied_out(key[1])
        finally:
            with self._changed:
                self._copied = None
                self._changed.notify_all()

    def _write_some(self) -> None:
        """Writes the next blocks of the queue that are of one kind, and syncs them."""
        names: list[bytes] = []
        layout, writer, records = None, None, list[Record]()
        try:
            while found := self._copy_next(layout):
                layout, name, block = found
                names.append(name)
                if name not in self._index(layout.fingerprint):  # nor has another process written it meanwhile
                    writer = writer or self._writer(layout)
                    writer.append(name, block)
                if (writer and writer.is_full) or len(names) * len(block) >= SYNC_BYTES:
                    break
            if writer:
                records = writer.commit()
        except BaseException:  # nothing is appended behind what may be half there
            self._count("skipped", len(names))
            if writer and layout:
                self._writers.pop(layout.fingerprint).close()
            raise
        finally:
            if layout:
                with self._changed:
                    self._queued -= {(layout.fingerprint, name) for name in names}
        if writer and layout:
            with self._looking:
                if segment := self._segments.get(writer.name):
                    segment.num_read = records[-1].place + 1
                    self._add(segment, records)
            self._count("written", len(records))
            if writer.is_full:
                self._writers.pop(layout.fingerprint).close()

    def _writer(self, layout: Layout) -> SegmentWriter:
        """Gives the segment that is appended to, a new one where there is none."""
        if layout.fingerprint not in self._writers:
            self._make_room(layout.size)
            writer = SegmentWriter(self._folder, f"{os.urandom(16).hex()}.segment", layout)
            self._writers[layout.fingerprint] = writer
            with self._looking:
                self._segments[writer.name] = Segment(writer.name, layout)
        return self._writers[layout.fingerprint]

    def _make_room(self, num_bytes: int) -> None:
        """Removes segments that were unused for longest, those that a process has mapped after all others, until there
        is room for one of so many bytes."""
        files = self._folder.survey()
        excess = sum(each.num_bytes for each in files) + num_bytes - self.max_bytes
        for each, leased in [(each, leased) for leased in (False, True) for each in files]:
            if excess > 0 and not each.in_use and self._folder.remove(each.name, leased):
                excess -= each.num_bytes
                self._count("evicted")
                with self._looking:
                    if each.name in self._segments:
                        self._forget(each.name)
        if excess > 0:
            raise OSError(f"max_bytes {self.max_bytes}: segments in use leave {num_bytes - excess} of {num_bytes}")


class StoredBlocks:
    """Are the blocks of a store that have one fingerprint, and the arrays that they are copied from and to.

    A block is known by its name, 32 bytes, which stands for all that its bytes depend on besides the fingerprint. Of
    one that was given to :meth:`write` the bytes must stay until it is written, or named to :meth:`forget`.
    """

    def __init__(self, store: PrefixStore, layout: Layout, arrays: Sequence[Array]) -> None:
        self.store, self.layout = store, layout
        self.use(arrays)
        self.look()

    def __reduce__(self) -> Any:
        """Copies all but the arrays, which are their manager's to copy."""
        return StoredBlocks, (self.store, self.layout, ())

    def use(self, arrays: Sequence[Array]) -> None:
        """Goes on with these arrays, of the same shapes."""
        self.arrays = [array for array in arrays if array.size]

    def look(self) -> None:
        """Takes note of what other processes have written, but for the last :data:`LOOK_SECONDS`."""
        self.store._index(self.layout.fingerprint)

    def __contains__(self, name: bytes) -> bool:
        return self._where(name) is not None

    def _where(self, name: bytes) -> Segment | None:
        return self.store._indexes.get(self.layout.fingerprint, {}).get(name)

    def mark_used(self, names: Iterable[bytes]) -> None:
        """Has the segments of these blocks, which somebody uses in memory, stay before others."""
        store = self.store
        for segment in {id(found): found for name in names if (found := self._where(name))}.values():
            if time.monotonic() - segment.marked >= MARK_SECONDS:
                segment.marked = time.monotonic()
                with contextlib.suppress(OSError, ValueError), store._folder.opened(segment.name) as fd:
                    store._folder.mark_used(fd)

    def write(self, items: Sequence[tuple[int, bytes]], keep: bool = False) -> None:
        """Queues (block, name) pairs to be written, but for what is there and what the queue has no room for. keep:
        whether the arrays stay until then where nobody else has them any more."""
        if items:
            self.store._put(self, items, keep)

    def forget(self, blocks: Sequence[int]) -> None:
        """Takes blocks off the queue, since their bytes are about to change. It waits while one of them is being
        copied, never for the disk."""
        self.store._cancel(self, blocks)

    def _parts(self, block: int, buffer: bytearray) -> Iterator[tuple[Array, Array]]:
        """Pairs what a block has in each array with its place in a buffer, as unsigned integers, which NumPy copies
        without holding up other threads."""
        at = 0
        for array, size in zip(self.arrays, self.layout.nbytes, strict=True):
            here = array[block, ...].view(f"u{array.dtype.itemsize}")
            yield here, np.frombuffer(buffer, here.dtype, here.size, at).reshape(here.shape)
            at += size

    def copied_out(self, block: int) -> bytearray:
        """Copies the bytes of a block in all arrays, one after the other."""
        buffer = bytearray(self.layout.block_bytes)
        for here, there in self._parts(block, buffer):
            there[...] = here
        return buffer

    def read(self, names: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Copies stored blocks into ``blocks`` of the arrays, in order, and says how many it did before one could not
        be read or was not what had been written. Bytes are written to an array once they were found to be right."""
        done = 0
        while done < len(names) and (segment := self._where(names[done])):
            run = [*takewhile(lambda name: self._where(name) is segment, names[done:])]
            done += self._had(segment, run, self._copies(segment, run, blocks[done:]))
        self.store._count("read", done)
        return done

    def _copies(self, segment: Segment, names: Sequence[bytes], blocks: Sequence[int]) -> Iterator[None]:
        """Copies blocks of one segment, one at a time."""
        folder, buffer = self.store._folder, bytearray(self.layout.block_bytes)
        with folder.opened(segment.name) as fd:
            folder.mark_used(fd)
            for name, block in zip(names, blocks, strict=False):
                if not read_block(folder, fd, segment.layout, segment.records[name], buffer):
                    raise ValueError(f"{segment.name}: a block is not what was written")
                for here, there in self._parts(block, buffer):
                    here[...] = there
                yield

    def by_segment(self, names: Iterable[bytes]) -> Iterator[tuple[Segment, list[bytes]]]:
        """Cuts a list of names where the segments change that the blocks are in; those that are in none are left
        out."""
        for segment, run in groupby(names, self._where):
            if segment:
                yield segment, list(run)

    def map(self, segment: Segment, room: Room, blocks: range) -> Run | None:
        """Maps a segment to ``blocks`` of the room; None where that fails, so that its blocks have to be copied."""
        store = self.store
        try:
            return room.map(store._folder, segment.name, segment.layout, blocks)
        except FileNotFoundError:  # another process has evicted it meanwhile
            pass
        except (OSError, ValueError) as error:
            store._count("faults")
            store._warn("cannot map a file, and copies its blocks", error)
        return None

    def begin_to_read(self, room: Room, run: Run, segment: Segment, names: Sequence[bytes]) -> None:
        """Has the system read these blocks of a run ahead of :meth:`find_in`, which says what cannot be read."""
        with contextlib.suppress(OSError, KeyError):
            room.begin_to_read(self.store._folder, run, self._unknown(run, [segment.records[each] for each in names]))

    def _unknown(self, run: Run, records: Sequence[Record]) -> list[int]:
        """Lists the places, rising, whose blocks have to be compared with their checksums."""
        return sorted({each.place for each in {*records} - run.verified}) if self.store.verify else []

    def find_in(self, room: Room, run: Run, segment: Segment, names: Sequence[bytes]) -> list[int]:
        """Gives the blocks that these are of a run of their segment, up to the first that is not what had been written.
        Each is compared with its checksum once."""
        found: list[int] = []
        self._had(segment, names, self._verifies(room, run, segment, names, found))
        self.store._count("mapped", len(found))
        return found

    def _verifies(
        self, room: Room, run: Run, segment: Segment, names: Sequence[bytes], found: list[int]
    ) -> Iterator[None]:
        """Looks at blocks of one run, one at a time, and lists those that are right."""
        records = [segment.records[name] for name in names]
        unknown = self._unknown(run, records)
        room.read(run, unknown)
        compared = {*unknown}
        for record in records:
            if record.place in compared:
                if not room.is_right(run, record):
                    raise ValueError(f"{segment.name}: a block is not what was written")
                run.verified.add(record)
            found.append(run.blocks[record.place])
            yield

    def _had(self, segment: Segment, names: Sequence[bytes], steps: Iterator[None]) -> int:
        """Takes steps, one for each of these blocks of one segment, and forgets the first block that cannot be had.
        Gives how many there were before."""
        store, done = self.store, 0
        try:
            for _ in steps:
                done += 1
            return done
        except (FileNotFoundError, KeyError):  # it has been evicted since it was found
            pass
        except ValueError as error:
            store._count("damaged")
            store._warn("computes again what is damaged", error)
        except OSError as error:
            store._count("faults")
            store._warn("cannot read, and goes on without", error)
        with store._looking:
            store._drop(names[done], segment)
        return done


def _reopened(path: str, max_bytes: int, segment_bytes: int, max_queued_blocks: int, verify: bool) -> PrefixStore:
    how: Any = {"segment_bytes": segment_bytes, "max_queued_blocks": max_queued_blocks, "verify": verify}
    return PrefixStore(path, max_bytes=max_bytes, **how)


_STORES: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _STORES:
        store._close_writers()  # the parent's go on, and stay locked until the parent closes them, too
        store._forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
