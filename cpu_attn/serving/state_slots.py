# SPDX-License-Identifier: Apache-2.0
"""This module knows which slot holds which state of which request, for layers that have states in place of keys and
values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cpu_attn.serving.block_pool import BlockPool
from cpu_attn.serving.journal import Journal

Array = np.ndarray[Any, Any]


class _Taken(NamedTuple):
    """Says which slots a step takes. moves: bool [R], whether a request's state goes to another slot than the one that
    it comes from; stays: bool [R], whether the state in that one is kept for the request; marks: int64 [R], how many
    states before its last one are kept."""

    moves: Array
    stays: Array
    marks: Array


class StateSlots:
    """Deals out the slots of arrays of states. A slot holds the state that a request goes on from, one that
    ``truncate`` may take it back to, or a snapshot: a state at the end of a block that the prefix cache has.

    Requests share a slot after a fork, and with the prefix cache after a hit. Slots that are shared are only read: the
    next step of such a request begins from the shared slot and leaves its state in a new one.

    Args:
        arrays: of each layer, [num_slots, ...].
        interval: tokens between snapshots.
        journal: where all changes are written down.
    """

    def __init__(self, arrays: Sequence[Array], interval: int, journal: Journal) -> None:
        self.arrays, self.interval, self._journal = tuple(arrays), interval, journal
        self.pool = BlockPool(np.zeros(len(arrays[0]) if arrays else 0), journal, "state slots")
        self.slot = np.zeros(0, np.int64)  # [rows]: of the state after a request's last token; -1: it has no tokens
        self.earlier: dict[int, dict[int, int]] = {}  # of a row: by numbers of tokens, slots of states before the last
        self.saved: dict[int, list[Array]] = {}  # the states of rows that are swapped out

    def grow(self, rows: int) -> None:
        self._journal.put(vars(self), "slot", np.append(self.slot, np.zeros(rows, np.int64)))

    def enter(self, row: int, slot: int) -> None:
        """Gives a new request the state in a slot."""
        self.slot[row] = slot
        self.pool.acquire([slot] if slot >= 0 else [])

    def knows(self, here: bytes) -> bool:
        """Says whether there is a snapshot at the end of the block of this hash, in a slot or in the store."""
        return here in self.pool.block_of or (self.pool.stored is not None and here in self.pool.stored)

    def found(self, here: bytes) -> int:
        """Gives the slot of that snapshot, into which it is read where it is in the store; -1 where that fails."""
        if here not in self.pool.block_of and not self.pool.load([here], np.zeros(1, np.int64)):
            return -1
        return self.pool.block_of[here]

    def fork(self, row: int, new_row: int) -> None:
        """Gives a new request, which has entered with the state of ``row``, the earlier states of that, too."""
        if row in self.earlier:
            self.pool.acquire(list(self.earlier[row].values()))
            self._journal.put(self.earlier, new_row, self.earlier[row])

    def make_room(self, rows: Array, counts: Array, drafts: Array) -> _Taken:
        """Finds out which slots a step takes, and evicts as many snapshots as that needs. counts, drafts: [R], how many
        tokens each request has in the step, and how many of them may be taken back.

        Raises:
            NoFreeBlocksError: so many are not free.
        """
        pool, slot = self.pool, self.slot[rows]
        held = (slot >= 0) & (counts > 0)
        stays = held & (drafts == counts)
        moves = (counts > 0) & (~held | stays | (pool.ref_cnt[slot] > 1))
        marks = np.minimum(drafts, np.maximum(counts - 1, 0))
        # A snapshot that nobody else has may become the request's own.
        own = [i for i in np.flatnonzero(moves & held & ~stays).tolist() if self._is_snapshot_of_one(slot.item(i))]
        for i in own[: max(0, int(moves.sum() + marks.sum()) - pool.num_free)]:
            pool.forget([slot.item(i)])
            moves[i] = False
        count, most, too_long = moves + marks, len(pool.ref_cnt), ""
        if count.size and count.max() > most:
            too_long = f"batch[{count.argmax()}] needs {count.max()} of {most} state slots, never fits"
        pool.make_room("batch", int(count.sum()), too_long=too_long)
        return _Taken(moves, stays, marks)

    def _is_snapshot_of_one(self, slot: int) -> bool:
        return slot in self.pool.hash_of and self.pool.ref_cnt.item(slot) == 2

    def advance(
        self, rows: Array, old: Array, counts: Array, taken: _Taken, hashes: Sequence[Sequence[bytes]], block_size: int
    ) -> dict[str, Array]:
        """Takes the slots of a step, and those of its snapshots as far as there are some. old: [R], how many tokens
        each request had. hashes: of the full blocks of each request; none without prefix caching.

        Returns:
            What a :class:`cpu_attn.serving.Step` says of states.
        """
        put, active = self._journal.put, counts > 0
        before = np.where(active, self.slot[rows], -1)
        total = int(taken.moves.sum() + taken.marks.sum())
        slots = self.pool.take(np.zeros(1, np.int64), np.array([total]))
        new = int(taken.moves.sum())
        after, marked = before.copy(), slots[new:].tolist()
        after[taken.moves] = slots[:new]
        left = before[taken.moves & ~taken.stays]
        unused = [*left[left >= 0].tolist(), *self._drop_earlier(rows[active].tolist())]
        put(self.slot, rows[taken.moves], slots[:new])
        checkpoints = []
        for i in np.flatnonzero(taken.stays | (taken.marks > 0)).tolist():
            length, count, marks = old.item(i), counts.item(i), taken.marks.item(i)
            own, marked = marked[:marks], marked[marks:]
            rising = list(zip(range(count - marks, count), own, strict=True))
            checkpoints += [(i, n, slot) for n, slot in rising]
            kept = {length: before.item(i)} if taken.stays[i] else {}
            put(self.earlier, rows.item(i), kept | {length + n: slot for n, slot in rising})
        checkpoints += self._snapshot(hashes, old, old + counts, block_size) if hashes else []
        self._release(unused)  # at last, since the step reads some of them
        rows_of_calls = np.array(sorted(checkpoints), np.int32).reshape(-1, 3)
        return dict(
            state_indices=after.astype(np.int32),
            initial_state_indices=before.astype(np.int32),
            checkpoints=rows_of_calls,
        )

    def _snapshot(
        self, hashes: Sequence[Sequence[bytes]], old: Array, new: Array, block_size: int
    ) -> list[tuple[int, int, int]]:
        """Puts the states at every ``interval`` tokens of a step into the prefix cache and gives their checkpoints.
        Where slots are few, the states nearest to the ends of requests have them; these are evicted last, too."""
        wanted: dict[bytes, tuple[int, int, int]] = {}
        last = new // self.interval * self.interval
        for i in np.flatnonzero(last > old).tolist():
            for length in range(last.item(i), old.item(i), -self.interval):
                for here in hashes[i][length // block_size - 1 : length // block_size]:
                    if here not in self.pool.block_of:
                        wanted.setdefault(here, (new.item(i) - length, i, length - old.item(i)))
        chosen = sorted(wanted, key=wanted.__getitem__)[: self.pool.num_free]
        if not chosen:
            return []
        self.pool.make_room("batch", len(chosen))
        slots = self.pool.take(np.zeros(1, np.int64), np.array([len(chosen)]))
        self.pool.publish(slots.tolist(), chosen)
        self.pool.release(slots)
        return [(*wanted[here][1:], slot) for here, slot in zip(chosen, slots.tolist(), strict=True)]

    def truncate(self, row: int, old: int, seq_len: int, hashes: Sequence[bytes], block_size: int) -> None:
        """Takes a request of ``old`` tokens back to the state after ``seq_len``. Snapshots after it that nobody else
        has may never have been computed, and are forgotten. hashes: of its full blocks.

        Raises:
            ValueError: there is no such state.
        """
        known = self.pool.block_of
        at_blocks = {(i + 1) * block_size: known[here] for i, here in enumerate(hashes) if here in known}
        slots = {0: -1, **at_blocks, **self.earlier.get(row, {}), old: self.slot.item(row)}
        if seq_len not in slots:
            below = max(n for n in slots if n < seq_len)
            raise ValueError(f"seq_len: there is no state after {seq_len} tokens; the last before it is after {below}")
        slot = slots[seq_len]
        self.pool.acquire([slot] if slot >= 0 else [])
        self.leave(row)
        self._journal.put(self.slot, row, slot)
        later = [at for n, at in at_blocks.items() if n > seq_len and self.pool.ref_cnt.item(at) == 1]
        self.pool.forget(later)

    def leave(self, row: int) -> None:
        """Gives the slots of a request back."""
        slot = self.slot.item(row)
        self._release([*([slot] if slot >= 0 else []), *self._drop_earlier([row])])

    def swap_out(self, row: int) -> None:
        slot = self.slot.item(row)
        if slot >= 0:
            self._journal.put(self.saved, row, [states[slot].copy() for states in self.arrays])
        self.leave(row)
        self._journal.put(self.slot, row, -1)

    def swap_in(self, row: int) -> tuple[Array, list[Array]]:
        """Takes a slot for a request that comes back, for which :meth:`make_room` was told. Gives the slot, int64 [1],
        and what is to be written there."""
        saved = self.saved.get(row, [])
        slot = self.pool.take(np.zeros(1, np.int64), np.array([len(saved[:1])]))
        if saved:
            self._journal.put(self.slot, row, slot.item())
            self._journal.drop(self.saved, [row])
        return slot, saved

    def _drop_earlier(self, rows: Sequence[int]) -> list[int]:
        """Forgets the earlier states of rows, and gives their slots, which are to be released."""
        there = [row for row in rows if row in self.earlier] if self.earlier else []
        slots = [slot for row in there for slot in self.earlier[row].values()]
        self._journal.drop(self.earlier, there)
        return slots

    def _release(self, slots: Sequence[int]) -> None:
        if slots:
            self.pool.release(np.array(slots, np.int64))
