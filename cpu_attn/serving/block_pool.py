# SPDX-License-Identifier: Apache-2.0
"""This module knows which blocks are free, how often each other block is in use, and which the prefix cache has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from cpu_attn._errors import NoFreeBlocksError
from cpu_attn.serving.journal import Journal
from cpu_attn.serving.prefix_store import Segment, StoredBlocks
from cpu_attn.serving.store_map import Room, Run

Array = np.ndarray[Any, Any]


def _hash(kind: bytes, before: bytes, data: bytes) -> bytes:
    """Hashes a root or a block. The bytes that are hashed can be read back in one way only: the first of them say which
    kind it is and with that how long ``before`` is, and the length of ``data`` stands ahead of ``data``. So no
    key has the hash of a block, and blocks behind different keys have different hashes, unless SHA-256 itself
    collides."""
    data = kind + before + len(data).to_bytes(8, "little") + data
    try:
        return sha256(data).digest()
    except ValueError as error:  # OpenSSL raises it where it has no memory for its state
        raise MemoryError(f"SHA-256: {error}") from None


def root(extra_key: str | bytes, fingerprint: bytes = b"") -> bytes:
    """Gives the hash that the first blocks of requests with this key come after. fingerprint: 32 bytes that stand for
    all that decides the bytes of blocks, where they are kept in a store; otherwise none."""
    key = extra_key.encode(errors="surrogatepass") if isinstance(extra_key, str) else extra_key
    return _hash(b"store" if fingerprint else b"root", fingerprint, key)


def child(before: bytes, ids: Array) -> bytes:
    """Gives the hash of a block of these ids, int64 [block_size], behind a root or another block."""
    return _hash(b"block", before, ids.tobytes())


class BlockStats(NamedTuple):
    """Says what a manager's blocks are used for, and what its prefix cache was worth: :meth:`BlockManager.stats`.

    Args:
        num_blocks: how many blocks each cache has.
        num_free_blocks: how many of them no request has.
        num_used_blocks: how many of them requests have; a block that several share counts once.
        num_cached_blocks: how many of them the prefix cache knows, whether a request has them or not.
        prefix_cache_queries: how many tokens :meth:`BlockManager.allocate` was given since the manager was made; 0
            without prefix caching. The names of this and the next are vLLM's.
        prefix_cache_hits: how many of these tokens it found.
        num_evictions: how many blocks the prefix cache gave up since then, because a request needed their memory.
        num_state_slots: how many slots of states there are; 0, as the next two are, for a manager without states.
        num_free_state_slots: how many of them no request has.
        num_snapshots: how many of them hold a state that the prefix cache knows.
        prefix_store_hits: how many of ``prefix_cache_hits`` were in blocks that came from a :class:`PrefixStore`.
        num_mapped_blocks: how many blocks the prefix cache has besides, in files that are mapped.

    This class raises no errors itself.

    Example:
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager
        >>> manager = BlockManager(PagedKVCache(num_blocks=8, block_size=16, num_kv_heads=1, head_size=64))
        >>> for request in ("a", "b"):
        ...     found = manager.allocate(request, range(40))
        ...     step = manager.step([(request, range(found, 40))])
        >>> stats = manager.stats()
        >>> stats.num_used_blocks, stats.num_free_blocks, stats.num_cached_blocks
        (4, 4, 2)
        >>> stats.prefix_cache_hits, stats.prefix_cache_queries
        (32, 80)
    """

    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_evictions: int
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_snapshots: int = 0
    prefix_store_hits: int = 0
    num_mapped_blocks: int = 0


class BlockPool:
    """Keeps for each block whether it is free or in use ``ref_cnt`` times: once by every request that has it, and once
    by the prefix cache. ``num_evicted`` counts the blocks that the prefix cache gave up for others, int64 [1].

    Blocks behind the first ``num_blocks`` are files' (:class:`Room`). Nobody writes to them, they are never free, and
    the prefix cache has them until their files are unmapped.

    Args:
        nodes: [num_blocks], the NUMA node of each.
        journal: where all changes are written down.
        what: what errors call the blocks.
        attached: another pool, whose cached blocks have hashes of blocks here and are forgotten with these.
        num_mapped: how many blocks there are behind those.

    Attributes:
        stored: where blocks of the prefix cache are kept, too, or None.
        room: where files of that are mapped, or None.
        unsaved: blocks that came into the prefix cache since :meth:`save` was called, and their hashes; of a pool with
            ``stored`` only.
    """

    def __init__(
        self,
        nodes: Array,
        journal: Journal,
        what: str = "blocks",
        attached: BlockPool | None = None,
        num_mapped: int = 0,
    ) -> None:
        self._journal, self._what, self._attached = journal, what, attached
        self.num_blocks = len(nodes)
        self.stored: StoredBlocks | None = None
        self.room: Room | None = None
        self.unsaved: dict[int, bytes] = {}
        # Nodes are numbered from 0 on here, whatever their numbers in the machine are.
        self.node_of = np.unique(nodes, return_inverse=True)[1]
        self.free: list[list[int]] = [[] for _ in range(self.node_of.max(initial=0) + 1)]  # a list for each node
        for block in range(len(nodes) - 1, -1, -1):
            self.free[self.node_of[block]].append(block)
        self.ref_cnt = np.zeros(self.num_blocks + num_mapped, np.int64)
        self.hash_of: dict[int, bytes] = {}  # the prefix cache, which has one block for each hash
        self.block_of: dict[bytes, int] = {}
        self.evictable: OrderedDict[int, int] = OrderedDict()  # blocks that it alone has, and since when, oldest first
        self._time = 0
        self.num_evicted = np.zeros(1, np.int64)

    @property
    def num_mapped(self) -> int:
        """Says how many mapped blocks the prefix cache has."""
        return sum(block >= self.num_blocks for block in self.hash_of) if self.room else 0

    @property
    def num_free(self) -> int:
        return sum(map(len, self.free)) + len(self.evictable)

    def _num_free_besides(self, spared: Collection[int]) -> int:
        return self.num_free - sum(block in self.evictable for block in spared)

    def make_room(self, name: str, count: int, spared: Collection[int] = (), too_long: str = "") -> None:
        """Evicts blocks of the prefix cache where fewer than ``count`` are free, but none of ``spared``. too_long: what
        the error says of a request that never fits.

        Raises:
            NoFreeBlocksError: so many are not free.
        """
        free = self._num_free_besides(spared)
        if count > free:
            raise NoFreeBlocksError(name, count, free, too_long, self._what)
        missing = max(0, count - sum(map(len, self.free)))
        self.forget(list(islice((block for block in self.evictable if block not in spared), missing)))
        self._journal.put(self.num_evicted, 0, self.num_evicted[0] + missing)

    def take(self, homes: Array, counts: Array) -> Array:
        """Takes as many blocks for each home, which is a node, as ``counts`` says, from other nodes where that one has
        none left. :meth:`make_room` comes first."""
        count = int(counts.sum())
        if len(self.free) == 1:
            blocks = np.array(self.free[0][: -count - 1 : -1], np.int64)
        else:
            piles = [reversed(free) for free in self.free]
            turns = (chain(piles[home], *piles) for home in np.repeat(homes, counts).tolist())
            blocks = np.fromiter(map(next, turns), np.int64, count)
        self._journal.put(self.ref_cnt, blocks, 1)
        for pile, taken in zip(
            self.free, np.bincount(self.node_of[blocks], minlength=len(self.free)).tolist(), strict=True
        ):
            if taken:
                self._journal.put(pile, slice(len(pile) - taken, None), [])
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Counts one more owner of each block."""
        self._journal.put(self.ref_cnt, blocks, self.ref_cnt[blocks] + 1)
        self._journal.drop(self.evictable, blocks)

    def release(self, blocks: Array) -> None:
        """Counts one owner less of each block, as often as the block is named."""
        blocks = blocks.astype(np.int64)  # this copies, too: a table may change before the journal is read
        self._journal.keep(self.ref_cnt, blocks)
        np.subtract.at(self.ref_cnt, blocks, 1)
        backwards = blocks[::-1]  # the end of a prefix is evicted before its beginning
        left = dict(zip(backwards.tolist(), self.ref_cnt[backwards].tolist(), strict=True))
        self._give_back([block for block, count in left.items() if count == 0])
        known = [b for b, count in left.items() if count == 1 and b in self.hash_of and b < self.num_blocks]
        self._journal.update(self.evictable, known, range(self._time, self._time + len(known)))
        self._time += len(known)

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Puts blocks into the prefix cache. Where it has another block of the same hash, the new one stays out."""
        new = {here: block for block, here in zip(blocks, hashes, strict=True) if here not in self.block_of}
        self._journal.update(self.block_of, new.keys(), new.values())
        self._journal.update(self.hash_of, new.values(), new.keys())
        at = list(new.values())
        self._journal.put(self.ref_cnt, at, self.ref_cnt[at] + 1)
        if self.stored:
            self._journal.update(self.unsaved, new.values(), new.keys())

    def save(self) -> None:
        """Has the blocks written that have come into the prefix cache, all of which have been computed by now."""
        if self.stored and self.unsaved:
            self.stored.write(list(self.unsaved.items()))
            self._journal.drop(self.unsaved, list(self.unsaved))

    def load(self, hashes: Sequence[bytes], homes: Array, spared: Collection[int] = ()) -> int:
        """Puts stored blocks into the prefix cache, which has none of them: mapped ones, and for those whose files
        cannot be mapped copies in free blocks, as far as there is room. What it has besides gives way, but none of
        ``spared``. What has changed before stays so, whatever happens. Gives how many of the first of them are there
        then."""
        if not self.stored:
            return 0
        if self.room:
            self._map(self.stored, self.room, hashes, spared)
        self._copy(self.stored, [here for here in hashes if here not in self.block_of], homes, spared)
        return sum(1 for _ in takewhile(self.block_of.__contains__, hashes))

    def _copy(self, stored: StoredBlocks, hashes: Sequence[bytes], homes: Array, spared: Collection[int]) -> None:
        room = max(0, self._num_free_besides(spared))
        wanted = list(takewhile(stored.__contains__, hashes[:room]))
        if not wanted:
            return
        self.make_room("tokens", len(wanted), spared)
        self._journal.keep_evictions()
        self._journal.settle()
        blocks = self.take(homes, np.array([len(wanted)]))
        count = stored.read(wanted, blocks.tolist())
        self.publish(blocks[:count].tolist(), wanted[:count])
        self.release(blocks)

    def _map(self, stored: StoredBlocks, room: Room, hashes: Sequence[bytes], spared: Collection[int]) -> None:
        room.use_runs(list(spared))
        found = []
        for segment, names in stored.by_segment(hashes):
            run = room.find(segment.name) or self._new_run(stored, room, segment)
            if run and run.fd is not None:
                stored.begin_to_read(room, run, segment, names)
                found.append((run, segment, names))
        for run, segment, names in found:
            blocks = stored.find_in(room, run, segment, names)
            self.publish(blocks, names[: len(blocks)])

    def _new_run(self, stored: StoredBlocks, room: Room, segment: Segment) -> Run | None:
        """Maps a segment in the place of others that nobody uses; None where it cannot be."""
        place = room.place(segment.layout.capacity, self._has_owners)
        if not place:
            return None
        blocks, runs = place
        self.forget([block for run in runs for block in run.blocks if block in self.hash_of])
        self._journal.keep_evictions()
        self._journal.settle()
        for run in runs:
            room.unmap(run)
        return stored.map(segment, room, blocks)

    def _has_owners(self, blocks: range) -> bool:
        """Says whether a request has one of these blocks."""
        counts = self.ref_cnt[blocks.start : blocks.stop].tolist()
        return any(count > (block in self.hash_of) for block, count in zip(blocks, counts, strict=True))

    def forget(self, blocks: Sequence[int]) -> None:
        """Takes blocks out of the prefix cache. Until then nobody writes to them."""
        if self.stored:
            self.stored.forget(blocks)
            self._journal.drop(self.unsaved, blocks)
        if self._attached:
            known = self._attached.block_of
            self._attached.forget([known[here] for here in map(self.hash_of.__getitem__, blocks) if here in known])
        self._journal.drop(self.block_of, [self.hash_of[block] for block in blocks])
        self._journal.drop(self.hash_of, blocks)
        self._journal.put(self.ref_cnt, blocks, self.ref_cnt[blocks] - 1)
        self._give_back([block for block in blocks if block in self.evictable])
        self._journal.drop(self.evictable, blocks)

    def _give_back(self, blocks: list[int]) -> None:
        blocks = [block for block in blocks if block < self.num_blocks]
        for node, pile in enumerate(self.free):
            own = blocks if len(self.free) == 1 else [block for block in blocks if self.node_of.item(block) == node]
            if own:
                self._journal.put(pile, slice(len(pile), None), own)
