# SPDX-License-Identifier: Apache-2.0
"""This module knows which block of a paged cache holds which tokens of which request."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import view
from cpu_attn._native import ffi, lib
from cpu_attn.serving.block_pool import BlockPool, BlockStats, child, root
from cpu_attn.serving.journal import Journal, all_or_nothing
from cpu_attn.serving.prefix_store import PrefixStore
from cpu_attn.serving.state_slots import StateSlots
from cpu_attn.serving.store_map import Room
from cpu_attn.step import Step
from cpu_attn.storage import PagedKVCache

Array = np.ndarray[Any, Any]


def decides(cache: PagedKVCache) -> dict[str, Any]:
    """Says what of a cache decides the bytes of its blocks. Not its isa: what counts is the layout."""
    about = dataclasses.asdict(cache.descriptor)
    for name in ("num_blocks", "isa"):
        del about[name]
    signs = sha256(ffi.buffer(lib.ca_signs)).hexdigest() if cache.kv_cache_rotation != "none" else None
    feedback = None if cache.k_feedback is None else sha256(cache.k_feedback.tobytes()).hexdigest()
    return {**about, "signs": signs, "k_feedback": feedback}


@dataclass
class _Request:
    """Holds what is hashed of a request. root: the hash that its first block comes after, None where the request was
    there before the prefix cache was reset. hashes: one for each of its full blocks, each over the one before; none
    without a root."""

    root: bytes | None
    hashes: list[bytes] = field(default_factory=list)


class BlockManager:
    """Gives requests that come, grow, share and go their blocks of caches, and makes the arrays of their steps.

    A request is whatever its user calls it by, anything hashable. Which requests run, wait or give way is the user's
    choice: a call that needs more blocks than are free raises :class:`NoFreeBlocksError`. A call that raises has
    changed nothing. A manager serves one thread at a time.

    Args:
        caches: the :class:`cpu_attn.PagedKVCache` of each layer, or one cache. All have the same num_blocks, block_size
            and store_blocks, and a block has the same number in each of them. The manager copies and swaps the blocks
            of all caches. Where the first has ``block_nodes``, a request's blocks are of one NUMA node as long as that
            has free ones, and requests are dealt out to the nodes evenly.
        enable_prefix_caching: whether full blocks are found again by the token ids in them and before them, also once
            their request is gone, until their memory is needed: those unused for longest go first. Without it, tokens
            may be given by their number.
        sliding_window: w, where every layer of these caches sees the last w keys only: blocks behind these are given
            back by each step, whose plans have this window unless they are told another. -1: none is.
        decode_context_parallel_size: how many ranks share the keys of a request, each in caches and with a manager of
            its own (:class:`cpu_attn.distributed.ContextParallel`). A block then holds so many times the caches'
            block_size tokens, and steps are for all ranks: ``ContextParallel.step`` makes them this rank's.
        states: of a model with layers of ``cpu_attn.linear``, the ``state_cache`` and ``conv_state`` of each of
            these, [num_slots, ...]. A slot has the same number in each of them. A request that has tokens has a slot,
            and the prefix cache has snapshots in others: a prefix is found up to the last of its snapshots.
        state_interval: tokens between snapshots, a multiple of 64 and of the block size.
        store: the :class:`PrefixStore` that keeps full blocks and snapshots in files, or None. :meth:`allocate` then
            also finds what this or another process has put there. Where the caches have ``store_blocks``, files are
            mapped there, and requests have blocks of them as any others, with numbers from ``num_blocks`` on; what is
            to be written to is copied first. Otherwise what is found is copied into the caches. A step has to be
            computed, or taken back by :meth:`truncate`, before the next one is made, since that has the first one's
            blocks written. :meth:`flush_store` comes before the caches are used without this manager.
        model: with a store, what else than tokens, ``extra_key`` and caches decides keys and values: the model's name
            and a hash or version of its weights, say. Where it is the same, what is stored is taken for the same.

    Raises:
        ValueError: caches or states do not go together, are read-only, or have no blocks or slots; ``state_interval``
            is no such multiple; a store is given without a model, without prefix caching or for several ranks, or a
            model without a store; ``store_blocks`` are too few for a segment of the store.
        TypeError: an argument has another type.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager
        >>> caches = [PagedKVCache(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64) for _ in range(2)]
        >>> manager = BlockManager(caches)
        >>> prompt = list(range(20))
        >>> done = manager.allocate("a", prompt)  # tokens whose keys and values are there already
        >>> step = manager.step([("a", prompt[done:])])
        >>> rng = np.random.default_rng(0)
        >>> for cache in caches:  # key, value and query of each layer
        ...     cache.update(*rng.standard_normal((2, 20, 2, 64), np.float32), step)
        ...     output = cache.attend(rng.standard_normal((20, 8, 64), np.float32), step)
        >>> step = manager.step([("a", [7])])  # the next token
        >>> step.seq_lens.tolist(), step.positions.tolist()
        ([21], [20])
    """

    def __init__(
        self,
        caches: PagedKVCache | Sequence[PagedKVCache],
        *,
        enable_prefix_caching: bool = True,
        sliding_window: int = -1,
        decode_context_parallel_size: int = 1,
        states: Sequence[Any] = (),
        state_interval: int = 512,
        store: PrefixStore | None = None,
        model: str = "",
    ) -> None:
        layers = [caches] if isinstance(caches, PagedKVCache) else _check.sequence("caches", caches)
        if not layers:
            raise ValueError("caches: is empty, expected the cache of each layer")
        for i, cache in enumerate(layers):
            if not isinstance(cache, PagedKVCache):
                raise TypeError(f"caches[{i}]: expected a PagedKVCache, got {type(cache).__name__}")
            for size in ("num_blocks", "block_size", "store_blocks"):
                if getattr(cache, size) != getattr(layers[0], size):
                    raise ValueError(f"caches[{i}]: {size} {getattr(cache, size)}, expected {getattr(layers[0], size)}")
            if not cache.num_blocks:
                raise ValueError(f"caches[{i}]: has no blocks, so that no request could have a token")
            for name in ("key_cache", "value_cache"):
                _check.writable(f"caches[{i}].{name}", view(name, getattr(cache, name)))
        self.caches: tuple[PagedKVCache, ...] = tuple(layers)
        ranks = _check.integer("decode_context_parallel_size", decode_context_parallel_size, 1, _check.MAX_SIZE)
        self.num_blocks, self.block_size = layers[0].num_blocks, layers[0].block_size * ranks
        self.enable_prefix_caching = _check.boolean("enable_prefix_caching", enable_prefix_caching)
        self.sliding_window = _check.integer("sliding_window", sliding_window, -1)
        if self.sliding_window == 0:
            raise ValueError("sliding_window: 0 would see nothing; -1 turns it off")
        self.states = _check.state_arrays("states", states)
        self.state_interval = _check.integer("state_interval", state_interval, 1)
        if self.states and self.state_interval % np.lcm(64, self.block_size):
            raise ValueError(
                f"state_interval: {self.state_interval}, expected a multiple of 64 and of {self.block_size}"
            )

        # Each request has a row of the arrays. A row that no request has holds nothing of meaning.
        self._row_of: dict[Hashable, int] = {}
        self._free_rows: list[int] = []
        self._table = np.zeros((0, 1), np.int32)  # [rows, columns]: the blocks of a request, then -1
        self._seq_lens = np.zeros(0, np.int64)  # [rows]
        self._num_dropped = np.zeros(0, np.int64)  # [rows]: how many of its first blocks are behind the window
        self._swapped = np.zeros(0, bool)  # [rows]
        self._home = np.zeros(0, np.int64)  # [rows]: the node that its blocks should be of
        self._requests: dict[int, _Request] = {}
        self._prompts: dict[int, Array] = {}  # prompts of which some tokens were found, until a step has the last
        self._saved: dict[int, list[Array]] = {}  # what swap_out has copied, token ids first

        nodes = np.zeros(self.num_blocks) if layers[0].block_nodes is None else layers[0].block_nodes[: self.num_blocks]
        more = layers[0].store_blocks
        self._journal = Journal()
        self._states = StateSlots(self.states, self.state_interval, self._journal)
        self._pool = BlockPool(nodes, self._journal, attached=self._states.pool, num_mapped=more)
        ids = (self.num_blocks + more, self.block_size if self.enable_prefix_caching else 0)
        self._token_ids = np.zeros(ids, np.int64)  # the ids of the tokens in each block
        # How many tokens allocate was given, how many of them it found, and how many of these in blocks of the store.
        self._hits = np.zeros(3, np.int64)

        model = _check.text("model", model)
        if store is not None:
            _check.instance("store", store, PrefixStore)
        if store and ranks > 1:
            raise ValueError(f"store: decode_context_parallel_size {ranks}, expected 1: ranks have blocks of their own")
        if store and not self.enable_prefix_caching:
            raise ValueError("store: is given, and enable_prefix_caching is off")
        if model and not store:
            raise ValueError("model: is given without a store")
        self._fingerprint = b""  # of all that decides the bytes of blocks, where there is a store
        if store:
            self._pool.room = Room(self._memory(), self.num_blocks) if more else None
            self._attach(store, model)

    def _attach(self, store: PrefixStore, model: str) -> None:
        """Begins to use the store for blocks of this model."""
        if not model:
            raise ValueError("model: is empty, expected what tells its weights from those of other models")
        about = {"model": model, "caches": [decides(cache) for cache in self.caches]}
        blocks = store.blocks({**about, "kind": "blocks"}, self._memory())
        shapes = [(states.dtype.name, states.shape[1:]) for states in self.states]
        states = store.blocks({**about, "kind": "states", "states": shapes}, self.states) if self.states else None
        if self._pool.room:
            self._pool.room.check("store_blocks", blocks.layout.capacity)
        self._pool.stored, self._states.pool.stored = blocks, states
        self._fingerprint = blocks.layout.fingerprint

    def __repr__(self) -> str:
        stats = self.stats()
        cached = f", {stats.num_cached_blocks} cached" if self.enable_prefix_caching else ""
        window = f", sliding_window {self.sliding_window}" if self.sliding_window >= 0 else ""
        return (
            f"BlockManager({self.num_blocks} blocks of {self.block_size}: {stats.num_free_blocks} free, "
            f"{stats.num_used_blocks} used{cached}; requests: {len(self._row_of)}, caches: {len(self.caches)}{window})"
        )

    def __copy__(self) -> BlockManager:
        """Gives a manager that goes on from here by itself, over the same caches and with the same names of
        requests."""
        shared: Iterable[Any] = (*self.caches, *self.states, *self._row_of)
        return copy.deepcopy(self, {id(x): x for x in shared})

    def __getstate__(self) -> dict[str, Any]:
        if self._journal:
            self._journal.undo()
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for pool, arrays in ((self._pool, self._memory()), (self._states.pool, self.states)):
            if pool.stored:
                pool.stored.use(arrays)
            if pool.room:
                pool.room.use(arrays)

    @property
    @all_or_nothing
    def num_free_blocks(self) -> int:
        """Says how many blocks no request has; the prefix cache may still know some of them."""
        return self._pool.num_free

    @all_or_nothing
    def stats(self) -> BlockStats:
        """Counts blocks, and what :meth:`allocate` found in the prefix cache.

        Returns:
            The :class:`BlockStats`.

        The method raises no errors.
        """
        pool, num_free, (queries, hits, store_hits) = self._pool, self._pool.num_free, self._hits.tolist()
        num_used, num_mapped, slots = self.num_blocks - num_free, pool.num_mapped, self._states.pool
        num_cached = len(pool.hash_of) - num_mapped
        return BlockStats(
            *(self.num_blocks, num_free, num_used, num_cached, queries, hits, pool.num_evicted.item()),
            *(len(slots.ref_cnt), slots.num_free, len(slots.hash_of), store_hits, num_mapped),
        )

    @all_or_nothing
    def seq_len(self, request: Hashable) -> int:
        """Returns how many tokens the request has, in blocks or swapped out.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there.
        """
        return self._seq_lens.item(self._find("request", request))

    @all_or_nothing
    def get_block_ids(self, request: Hashable) -> Array:
        """Returns int32 [M], the blocks of the request, -1 where one was behind the sliding window.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there, or swapped out.
        """
        return self._blocks(self._present("request", request))

    @all_or_nothing
    def allocate(self, request: Hashable, tokens: Any = (), *, extra_key: str | bytes = b"") -> int:
        """Makes a new request, with the blocks of the prefix cache that begin its tokens. What this has not, but the
        store has, is mapped, or read into free blocks; what the prefix cache alone has gives way for it.

        Args:
            request: what it is called by from now on, anything hashable.
            tokens: ids, integers [n]. The last of them is always left to be computed, as its logits are needed. An id
                may be any int64: what stands for an image takes ids made from the image's hash.
            extra_key: what else keys and values depend on, such as a LoRA's name: requests with different ones share
                nothing. A str counts as its UTF-8 bytes.

        Returns:
            How many of the tokens are in blocks that were found. The rest is given to :meth:`step`, at once or in
            parts; where some were found, that refuses other ids.

        Raises:
            ValueError: the request is there already, or a token is out of range.
            TypeError: the request is not hashable, or an argument has another type.
        """
        ids = _check.tokens("tokens", tokens)
        if not isinstance(extra_key, (str, bytes)):
            raise TypeError(f"extra_key: expected str or bytes, got {type(extra_key).__name__}")
        self._check_new(request)
        here, stored = root(extra_key, self._fingerprint), self._pool.stored
        new = _Request(here)
        hashes = new.hashes
        if stored:
            stored.look()
        for start in range(0, len(ids) - self.block_size if self.enable_prefix_caching else 0, self.block_size):
            here = child(here, ids[start : start + self.block_size])
            if here not in self._pool.block_of and not (stored and here in stored):
                break
            hashes.append(here)
        slot, num_loaded = self._make_present(hashes, ids)
        blocks = np.array([self._pool.block_of[each] for each in hashes], np.int32)
        if stored:
            stored.mark_used(hashes)
        if self._pool.room:
            self._pool.room.use_runs(blocks.tolist())
        found = len(hashes) * self.block_size
        row = self._enter(request, new, blocks, found, 0, slot)
        if found:
            self._journal.put(self._prompts, row, ids.copy())
        if self.enable_prefix_caching:
            seen = len(ids), found, num_loaded * self.block_size
            self._journal.put(self._hits, slice(None), np.add(self._hits, seen))
        return found

    @all_or_nothing
    def fork(self, request: Hashable, new_request: Hashable) -> None:
        """Makes a new request with the tokens of another, in the same blocks.

        Whichever of the two goes on first inside the last block gets a copy of that.

        Args:
            request: the one that is there.
            new_request: what the new one is called by.

        Raises:
            ValueError: ``request`` is not there or swapped out, or ``new_request`` is there already.
            TypeError: ``new_request`` is not hashable.
        """
        row = self._present("request", request)
        self._check_new(new_request, "new_request")
        new = _Request(self._requests[row].root, self._requests[row].hashes.copy())
        dropped, slot = self._num_dropped.item(row), self._states.slot.item(row)
        entered = self._enter(new_request, new, self._blocks(row), self._seq_lens.item(row), dropped, slot)
        self._states.fork(row, entered)
        if row in self._prompts:
            self._journal.put(self._prompts, entered, self._prompts[row])

    @all_or_nothing
    def step(self, batch: Iterable[tuple[Hashable, Any]], *, num_draft_tokens: Sequence[int] | None = None) -> Step:
        """Appends tokens to requests, and gives the arrays with which every layer writes and attends them.

        The tokens count as computed from now on: a step that is not computed is taken back by :meth:`truncate`.

        Args:
            batch: (request, tokens) pairs, each request once. tokens: ids, integers [n]; without prefix caching also
                their number.
            num_draft_tokens: [R], how many of these tokens of each request :meth:`truncate` may take back; None: none.
                A manager with states keeps the states before them, in as many more slots, until the request is
                truncated or its next step is made. Keys and values can be taken back without.

        Returns:
            The :class:`Step`, its requests in the order of the batch.

        Raises:
            NoFreeBlocksError: blocks or slots of states are missing; ``never_fits`` says that one request alone needs
                more than there are. The manager is as it was before, here and below.
            ValueError: a request is not there, swapped out or named twice, a token or a number of drafts is out of
                range, or tokens are not those of a prompt that come after what :meth:`allocate` found of it: all of its
                tokens, say.
            TypeError: the batch is no pairs, or tokens are no ids.
        """
        requests, counts, ids = _check.batch("batch", batch, self.enable_prefix_caching)
        self._save()
        drafts = _check.draft_tokens("num_draft_tokens", num_draft_tokens, counts)
        rows = self._rows(requests)
        old = self._seq_lens[rows]
        new = old + counts
        if len(new) and new.max() > _check.INT32_MAX:
            raise ValueError(f"batch[{new.argmax()}]: {new.max()} tokens in all, expected at most {_check.INT32_MAX}")
        if self._prompts and ids is not None:
            self._check_continuations(rows, ids, counts)
        had, has = self._num_blocks(old), self._num_blocks(new)

        fresh, begun = has - had, np.flatnonzero((had * self.block_size > old) & (counts > 0))
        copied, last = self._shared_writers(begun, self._table[rows[begun], had[begun] - 1].astype(np.int64))
        wanted = np.concatenate([np.ones(len(copied), np.int64), fresh])
        homes = self._home[np.concatenate([rows[copied], rows])]
        too_long = self._too_long(has - self._num_dropped[rows], new, rows)
        self._pool.make_room("batch", int(wanted.sum()), too_long=too_long)
        moved = self._states.make_room(rows, counts, drafts) if self.states else None
        self._journal.keep_evictions()
        taken = self._pool.take(homes, wanted)
        filled = taken.astype(np.int32)
        blocks, copies = filled[len(copied) :], taken[: len(copied)]
        self._make_columns(int(has.max(initial=0)))

        put = self._journal.put
        if len(copied):
            put(self._table, (rows[copied], had[copied] - 1), filled[: len(copied)])
            put(self._token_ids, copies, self._token_ids[last])
            self._pool.release(last)
        behind = had - np.cumsum(fresh) + fresh
        put(self._table, (np.repeat(rows, fresh), np.arange(len(blocks)) + np.repeat(behind, fresh)), blocks)
        put(self._seq_lens, rows, new)
        self._journal.drop(
            self._prompts, [r for r, prompt in self._prompts.items() if self._seq_lens[r] >= len(prompt)]
        )

        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(query_start_loc[-1]) + np.repeat(old - query_start_loc[:-1], counts)
        column, offset = np.divmod(positions, self.block_size)
        slot_mapping = self._table[np.repeat(rows, counts), column] * np.int64(self.block_size) + offset
        if ids is not None:
            put(self._token_ids.reshape(-1), slot_mapping, ids)
            self._publish(rows, old // self.block_size, new // self.block_size)
        step = Step(
            query_start_loc=query_start_loc,
            seq_lens=new.astype(np.int32),
            block_table=self._table[:, : has.max(initial=0)][rows],
            slot_mapping=slot_mapping,
            positions=positions,
            requests=requests,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            **(self._state_arrays(rows, old, counts, moved) if moved else {}),
        )
        self._drop_behind_window(rows, old)
        if len(copied):
            self._write(copies, (memory[last] for memory in self._memory()))
        return step

    @all_or_nothing
    def truncate(self, request: Hashable, seq_len: int) -> None:
        """Takes the last tokens of a request back: drafts that were rejected, or a step that was not computed.

        Args:
            request: what it was allocated as.
            seq_len: how many tokens it then has.

        Raises:
            ValueError: the request is not there or swapped out, ``seq_len`` is more than it has, its sliding window
                would begin in a block that was given back, or there is no state after so many tokens: states are kept
                for ``num_draft_tokens``, at snapshots and for 0.
            TypeError: ``seq_len`` is no integer.
        """
        row, least = self._present("request", request), 0
        old, dropped = self._seq_lens.item(row), self._num_dropped.item(row)
        if dropped:
            least = dropped * self.block_size + self.sliding_window - 1
        seq_len = _check.integer("seq_len", seq_len, least, old)
        if self.states:
            self._states.truncate(row, old, seq_len, self._requests[row].hashes, self.block_size)
        full = seq_len // self.block_size
        known = [b for b in self._table[row, full : old // self.block_size].tolist() if b in self._pool.hash_of]
        # Nobody else has these blocks, so their tokens may never have been computed.
        self._pool.forget([block for block in known if self._pool.ref_cnt.item(block) == 2])
        columns = slice(self._num_blocks(seq_len), self._num_blocks(old))
        self._pool.release(self._table[row, columns])
        self._journal.put(self._table, (row, columns), -1)
        self._journal.put(self._requests[row].hashes, slice(full, None), [])
        self._journal.put(self._seq_lens, row, seq_len)
        if not seq_len:
            self._journal.drop(self._prompts, [row])

    @all_or_nothing
    def free(self, request: Hashable) -> None:
        """Ends a request. Its full blocks stay in the prefix cache until their memory is needed.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there.
        """
        row = self._find("request", request)
        if not self._swapped[row]:
            self._pool.release(self._held(row))
            self._states.leave(row)
        for of_rows in (self._requests, self._prompts, self._saved, self._states.saved):
            self._journal.drop(of_rows, [row])
        self._journal.put(self._free_rows, slice(len(self._free_rows), None), [row])
        self._journal.drop(self._row_of, [request])

    @all_or_nothing
    def swap_out(self, request: Hashable) -> None:
        """Copies the keys and values of a request out of all caches, and its state, into memory of their own, and gives
        its blocks and slots back.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there, or swapped out already.
        """
        row = self._present("request", request)
        blocks = self._held(row)
        self._journal.put(self._saved, row, [memory[blocks] for memory in (self._token_ids, *self._memory())])
        self._pool.release(blocks)
        self._states.swap_out(row)
        self._journal.put(self._swapped, row, True)

    @all_or_nothing
    def swap_in(self, request: Hashable) -> None:
        """Brings a request back that was swapped out, so that it can go on.

        Blocks that the prefix cache still has are not copied.

        Args:
            request: what it was allocated as.

        Raises:
            NoFreeBlocksError: blocks are missing, or a slot of states. Nothing has changed then.
            ValueError: the request is not there, or not swapped out.
        """
        row = self._find("request", request)
        if not self._swapped[row]:
            raise ValueError(f"request: {request!r} is not swapped out")
        (ids, *saved), dropped = self._saved[row], self._num_dropped.item(row)
        hashes = takewhile(self._pool.block_of.__contains__, self._requests[row].hashes[dropped:])
        there = [self._pool.block_of[here] for here in hashes]
        count = np.array([len(ids) - len(there)])
        self._pool.make_room("request", count.item(), there)
        self._states.pool.make_room("request", int(row in self._states.saved))
        self._journal.keep_evictions()
        blocks, (slot, state) = self._pool.take(self._home[[row]], count), self._states.swap_in(row)
        self._pool.acquire(there)
        self._journal.put(self._table, (row, slice(dropped, dropped + len(ids))), [*there, *blocks.tolist()])
        self._journal.put(self._token_ids, blocks, ids[len(there) :])
        self._journal.drop(self._saved, [row])
        self._journal.put(self._swapped, row, False)
        self._write(blocks, (memory[len(there) :] for memory in saved), slot, state)

    @all_or_nothing
    def reset_prefix_cache(self, *, model: str = "") -> None:
        """Forgets all that was cached, as a change of the weights asks for.

        Requests that are there go on, swapped out or not, with the keys and values that they have. :meth:`allocate`
        finds neither these any more nor what is computed after them, which depends on both weights.

        Args:
            model: with a store, what tells the new weights from others. Without it the store is left alone from now on.

        Raises:
            ValueError: a model is given to a manager without a store.
            TypeError: ``model`` is no name.
        """
        stored, model = self._pool.stored, _check.text("model", model)
        if model and not stored:
            raise ValueError("model: is given without a store")
        self._pool.forget(list(self._pool.hash_of))
        self._journal.update(self._requests, self._requests.keys(), [_Request(None) for _ in self._requests])
        if stored and model:
            self._attach(stored.store, model)
        else:
            self._fingerprint, self._pool.stored, self._states.pool.stored = b"", None, None

    @all_or_nothing
    def flush_store(self) -> None:
        """Waits until all full blocks and snapshots are in the files of the store, or were left out. The last step has
        to have been computed. Without a store there is nothing to do.

        The method raises no errors.
        """
        self._save()
        if self._pool.stored:
            self._pool.stored.store.flush()

    def _save(self) -> None:
        """Has what was computed written to the store. The last step counts as computed: it would have been taken back
        otherwise."""
        self._pool.save()
        self._states.pool.save()

    def _make_present(self, hashes: list[bytes], ids: Array) -> tuple[int, int]:
        """Reads what is not in memory from the store, and shortens ``hashes``, of the first tokens of ``ids``, to what
        the request can begin with. Gives the slot of its state, -1 where it has none, and how many of these blocks were
        read."""
        pool, slot, loaded = self._pool, -1, set[bytes]()
        while True:
            while self.states and hashes and not self._states.knows(hashes[-1]):
                hashes.pop()
            missing = [i for i, here in enumerate(hashes) if here not in pool.block_of]
            if missing:
                there = [pool.block_of[here] for here in hashes if here in pool.block_of]
                count = pool.load([hashes[i] for i in missing], np.array([self._least_home()]), there)
                at = np.array(missing[:count], np.int64)
                blocks = np.array([pool.block_of[hashes[i]] for i in at.tolist()], np.int64)
                whole = ids[: len(hashes) * self.block_size].reshape(-1, self.block_size)
                self._journal.put(self._token_ids, blocks, whole[at])
                loaded |= {hashes[i] for i in at.tolist()}
                if count < len(missing):
                    del hashes[missing[count] :]
                    continue
            if not self.states or not hashes:
                break
            slot = self._states.found(hashes[-1])
            if slot >= 0:
                break
            hashes.pop()  # its state could not be read
        return slot, sum(here in loaded for here in hashes)

    def _find(self, name: str, request: Hashable) -> int:
        row = self._row(name, request)
        if row is None:
            raise ValueError(f"{name}: {request!r} is not there: allocate it, or fork another")
        return row

    def _row(self, name: str, request: Hashable) -> int | None:
        try:
            return self._row_of.get(request)
        except MemoryError:
            raise
        except Exception as e:  # it cannot be hashed, or compared with another
            raise TypeError(f"{name}: {e}") from None

    def _present(self, name: str, request: Hashable) -> int:
        row = self._find(name, request)
        if self._swapped[row]:
            raise ValueError(f"{name}: {request!r} is swapped out")
        return row

    def _check_new(self, request: Hashable, name: str = "request") -> None:
        if self._row(name, request) is not None:
            raise ValueError(f"{name}: {request!r} is there already")

    def _rows(self, requests: tuple[Hashable, ...]) -> Array:
        try:
            rows = np.fromiter(map(self._row_of.__getitem__, requests), np.int64, len(requests))
        except MemoryError:
            raise
        except Exception:  # a request is not there, or no key, and has to be named
            rows = np.array([self._find(f"batch[{i}][0]", request) for i, request in enumerate(requests)])
        if len(set(requests)) < len(requests):
            i = next(i for i, request in enumerate(requests) if request in requests[:i])
            raise ValueError(f"batch[{i}][0]: {requests[i]!r} is named twice")
        for i in np.flatnonzero(self._swapped[rows])[:1]:
            raise ValueError(f"batch[{i}][0]: {requests[i]!r} is swapped out")
        return rows

    def _check_continuations(self, rows: Array, ids: Array, counts: Array) -> None:
        end = 0
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            end += count
            if row in self._prompts:
                there = self._seq_lens.item(row)
                _check.continuation(f"batch[{i}][1]", ids[end - count : end], self._prompts[row], there)

    def _too_long(self, blocks: Array, seq_lens: Array, rows: Array) -> str:
        """Says which request of a batch needs more blocks by itself than there are, "" where none does. blocks: [R],
        how many each then has; seq_lens: [R], how many tokens."""
        if not blocks.size or blocks.max() <= self.num_blocks:
            return ""
        blocks = blocks - (self._table[rows] >= self.num_blocks).sum(1)  # but for those that are mapped
        i = blocks.argmax()
        if blocks[i] <= self.num_blocks:
            return ""
        parts = "" if self.sliding_window < 0 else " at once: give it in parts, between which blocks come free"
        return f"batch[{i}] with {seq_lens[i]} tokens needs {blocks[i]} of {self.num_blocks} blocks, never fits{parts}"

    def _num_blocks(self, seq_lens: Any) -> Any:
        return -(-seq_lens // self.block_size)

    def _blocks(self, row: int) -> Array:
        return np.array(self._table[row, : self._num_blocks(self._seq_lens.item(row))])

    def _held(self, row: int) -> Array:
        """Gives the blocks that a row has, as int64. All indices and indexed values here are int64: where memory runs
        out, NumPy 2.4 crashes on those that it has to convert."""
        first, end = self._num_dropped.item(row), self._num_blocks(self._seq_lens.item(row))
        return self._table[row, first:end].astype(np.int64)

    def _memory(self) -> list[Array]:
        """Lists the arrays of all caches."""
        return [x for cache in self.caches for x in (cache.key_cache, cache.value_cache)]

    def _write(
        self, blocks: Array, contents: Iterable[Array], slot: Array | None = None, state: Iterable[Array] = ()
    ) -> None:
        """Writes blocks into the caches, and a state into its slot. It has to be the last change of a call, since what
        was there before is not kept."""
        self._journal.settle()
        for memory, content in zip(self.states, state, strict=False):
            memory[slot] = content
        for memory, content in zip(self._memory(), contents, strict=True):
            memory[blocks] = content

    def _make_columns(self, count: int) -> None:
        if count > self._table.shape[1]:
            grown = np.full((len(self._table), max(count, 2 * self._table.shape[1])), -1, np.int32)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown

    def _state_arrays(self, rows: Array, old: Array, counts: Array, moved: Any) -> dict[str, Any]:
        """Gives what a step says of states. Its blocks have been published."""
        hashes = [self._requests[row].hashes for row in rows.tolist()] if self.enable_prefix_caching else []
        return self._states.advance(rows, old, counts, moved, hashes, self.block_size)

    def _enter(self, request: Hashable, new: _Request, blocks: Array, seq_len: int, num_dropped: int, slot: int) -> int:
        if not self._free_rows:
            have, rows = len(self._table), max(8, len(self._table))
            free = list(range(have + rows - 1, have - 1, -1))
            names = ("_table", "_seq_lens", "_num_dropped", "_swapped", "_home")
            arrays = [getattr(self, name) for name in names]
            grown = [np.append(x, np.zeros((rows, *x.shape[1:]), x.dtype), 0) for x in arrays]
            self._journal.update(vars(self), ("_free_rows", *names), (free, *grown))
            self._states.grow(rows)
        self._make_columns(len(blocks))
        row = self._free_rows[-1]
        if len(self._pool.free) > 1:
            self._home[row] = self._least_home()
        self._table[row], self._table[row, : len(blocks)] = -1, blocks
        self._seq_lens[row], self._num_dropped[row], self._swapped[row] = seq_len, num_dropped, False
        self._pool.acquire(blocks[num_dropped:].tolist())
        self._states.enter(row, slot)
        self._journal.put(self._free_rows, slice(len(self._free_rows) - 1, None), [])
        self._journal.put(self._requests, row, new)
        self._journal.put(self._row_of, request, row)
        return row

    def _least_home(self) -> int:
        """Says which node has the fewest requests."""
        homes = self._home[list(self._row_of.values())]
        return int(np.bincount(homes, minlength=len(self._pool.free)).argmin())

    def _publish(self, rows: Array, first: Array, end: Array) -> None:
        """Puts blocks ``first`` to ``end`` of each row, which have become full, into the prefix cache. Where it has
        another block of the same hash, the new one stays out."""
        published, hashes = [], []
        for row, begin, stop in np.stack([rows, first, end])[:, end > first].T.tolist():
            blocks, request = self._table[row, begin:stop].astype(np.int64), self._requests[row]
            if request.root is None:
                continue
            chained = [request.hashes[-1] if request.hashes else request.root]
            for ids in self._token_ids[blocks]:
                chained.append(child(chained[-1], ids))
            self._journal.put(request.hashes, slice(len(request.hashes), None), chained[1:])
            published += blocks.tolist()
            hashes += chained[1:]
        if hashes:
            self._pool.publish(published, hashes)

    def _shared_writers(self, begun: Array, last: Array) -> tuple[Array, Array]:
        """Finds the requests that go on inside a last block that others have, too, and gives them and these blocks. The
        last of all owners of a block to write may do so in place, and is left out, but not where the block is
        mapped."""
        writers: Counter[int] = Counter()
        copied = []
        for i in np.flatnonzero((self._pool.ref_cnt[last] > 1) | (last >= self.num_blocks)).tolist():
            block = last.item(i)
            writers[block] += 1
            if writers[block] < self._pool.ref_cnt.item(block) or block >= self.num_blocks:
                copied.append(i)
        return begun[copied], last[copied]

    def _drop_behind_window(self, rows: Array, old: Array) -> None:
        """Gives back the blocks that no token from ``old`` on sees."""
        if self.sliding_window < 0:
            return
        end = np.maximum(old - self.sliding_window + 1, 0) // self.block_size
        dropped = self._num_dropped[rows]
        for row, first, last in np.stack([rows, dropped, end])[:, end > dropped].T.tolist():
            columns = slice(first, last)
            self._pool.release(self._table[row, columns])
            self._journal.put(self._table, (row, columns), -1)
            self._journal.put(self._num_dropped, row, last)
