# SPDX-License-Identifier: Apache-2.0
"""Which block of a paged cache holds which tokens of which request."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import view
from cpu_attn.step import Step
from cpu_attn.storage import PagedKVCache

Array = np.ndarray[Any, Any]


class NoFreeBlocksError(RuntimeError):
    """There are fewer free blocks than a call needs. The call has changed nothing.

    ``missing`` says how many there are too few.

    Args:
        name: the argument that needs them.
        needed: how many blocks the call needs.
        free: how many there are.

    This class raises no errors itself.

    Example:
        >>> from cpu_attn import BlockManager, NoFreeBlocksError, PagedKVCache
        >>> manager = BlockManager(PagedKVCache(num_blocks=2, block_size=16, num_kv_heads=1, head_size=64))
        >>> manager.allocate("a")
        0
        >>> try:
        ...     step = manager.step([("a", range(40))])
        ... except NoFreeBlocksError as e:
        ...     print(e.missing)
        1
    """

    def __init__(self, name: str, needed: int, free: int) -> None:
        super().__init__(
            f"{name}: needs {needed} blocks, {free} are free, {needed - free} are missing: free requests, or swap them "
            "out"
        )
        self.missing = needed - free


def _hash(kind: bytes, before: bytes, data: bytes) -> bytes:
    """Of a root or a block. All that is hashed can be read back from these bytes in one way: the first of them says
    which of the two it is, and with that the length of ``before``; that of ``data`` stands ahead of it. So no key has
    the hash of a block, and blocks behind different keys have different hashes, unless SHA-256 itself collides."""
    return sha256(kind + before + len(data).to_bytes(8, "little") + data).digest()


def _root(extra_key: str | bytes) -> bytes:
    """What the first blocks of requests with this key come after."""
    key = extra_key.encode(errors="surrogatepass") if isinstance(extra_key, str) else extra_key
    return _hash(b"root", b"", key)


def _child(before: bytes, ids: Array) -> bytes:
    """The hash of a block of these ids behind a root or another block, int64 [block_size]."""
    return _hash(b"block", before, ids.tobytes())


@dataclass
class _Request:
    """root: what its first block comes after, None where it was there before a reset of the prefix cache; hashes: of its
    full blocks, each over the one before, none without a root; saved: what swap_out has copied, token ids first."""

    root: bytes | None
    hashes: list[bytes] = field(default_factory=list)
    saved: list[Array] = field(default_factory=list)


class BlockManager:
    """Blocks of caches for requests that come, grow, share and go, and the arrays of their steps.

    A request is whatever its user calls it by, anything hashable. Which requests run, wait or give way is the user's
    choice: a call that needs more blocks than are free raises :class:`NoFreeBlocksError` and changes nothing. A manager
    serves one thread at a time.

    Args:
        caches: the :class:`PagedKVCache` of each layer, or one cache. All have the same num_blocks and block_size, and
            a block has the same number in each of them. The manager copies and swaps the blocks of all caches. Where
            the first has ``block_nodes``, a request's blocks are of one NUMA node as long as that has free ones, and
            requests are dealt out to the nodes evenly.
        enable_prefix_caching: whether full blocks are found again by the token ids in them and before them, also once
            their request is gone, until their memory is needed: those unused for longest go first. Without it, tokens
            may be given by their number.
        sliding_window: w, where every layer of these caches sees the last w keys only: blocks behind these are given
            back by each step, whose plans have this window unless they are told another. -1: none is.
        decode_context_parallel_size: how many ranks share the keys of a request, each in caches and with a manager of
            its own (:class:`cpu_attn.distributed.ContextParallel`). A block then holds so many times the caches'
            block_size tokens, and steps are for all ranks: ``ContextParallel.step`` makes them this rank's.

    Raises:
        ValueError: caches do not go together, or are read-only.
        TypeError: an argument has another type.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import BlockManager, PagedKVCache
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
    ) -> None:
        layers = [caches] if isinstance(caches, PagedKVCache) else _check.sequence("caches", caches)
        if not layers:
            raise ValueError("caches: is empty, expected the cache of each layer")
        for i, cache in enumerate(layers):
            if not isinstance(cache, PagedKVCache):
                raise TypeError(f"caches[{i}]: expected a PagedKVCache, got {type(cache).__name__}")
            for size in ("num_blocks", "block_size"):
                if getattr(cache, size) != getattr(layers[0], size):
                    raise ValueError(f"caches[{i}]: {size} {getattr(cache, size)}, expected {getattr(layers[0], size)}")
            for name in ("key_cache", "value_cache"):
                _check.writable(f"caches[{i}].{name}", view(name, getattr(cache, name)))
        self.caches: tuple[PagedKVCache, ...] = tuple(layers)
        ranks = _check.integer("decode_context_parallel_size", decode_context_parallel_size, 1, _check.MAX_SIZE)
        self.num_blocks, self.block_size = layers[0].num_blocks, layers[0].block_size * ranks
        self.enable_prefix_caching = _check.boolean("enable_prefix_caching", enable_prefix_caching)
        self.sliding_window = _check.integer("sliding_window", sliding_window, -1)
        if self.sliding_window == 0:
            raise ValueError("sliding_window: 0 would see nothing; -1 turns it off")

        # Each request has a row of the arrays.
        self._row_of: dict[Hashable, int] = {}
        self._free_rows: list[int] = []
        self._requests: list[_Request] = []  # [rows]
        self._table = np.zeros((0, 1), np.int32)  # [rows, columns]: its blocks, then -1
        self._seq_lens = np.zeros(0, np.int64)  # [rows]
        self._num_dropped = np.zeros(0, np.int64)  # [rows]: how many of its first blocks lay behind the window
        self._swapped = np.zeros(0, bool)  # [rows]
        self._prompts: dict[int, Array] = {}  # of rows: tokens of which some were found, until a step has had the last
        self._home = np.zeros(0, np.int64)  # [rows]: the node that its blocks should be of

        # Nodes are counted from 0 on here, also where the machine's have other numbers.
        nodes = np.zeros(self.num_blocks) if layers[0].block_nodes is None else layers[0].block_nodes
        self._node_of = np.unique(nodes, return_inverse=True)[1]
        self._free: list[list[int]] = [[] for _ in range(self._node_of.max(initial=0) + 1)]
        for block in range(self.num_blocks - 1, -1, -1):
            self._free[self._node_of[block]].append(block)
        # Of each block the requests that have it, and one more where it is in the prefix cache.
        self._ref_cnt = np.zeros(self.num_blocks, np.int64)
        self._hash_of: dict[int, bytes] = {}  # the prefix cache, which has a block of each hash
        self._block_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # blocks that it alone has, the next to go first
        ids = (self.num_blocks, self.block_size) if self.enable_prefix_caching else (self.num_blocks, 0)
        self._token_ids = np.zeros(ids, np.int64)  # which are in the blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request has; the prefix cache may still know some of them."""
        return sum(map(len, self._free)) + len(self._evictable)

    def seq_len(self, request: Hashable) -> int:
        """Returns how many tokens the request has, in blocks or swapped out.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there.
        """
        return int(self._seq_lens[self._find("request", request)])

    def get_block_ids(self, request: Hashable) -> Array:
        """Returns int32 [M], the blocks of the request, -1 where one was behind the sliding window.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there, or swapped out.
        """
        row = self._present("request", request)
        return np.array(self._table[row, : self._num_blocks(self._seq_lens[row])])

    def allocate(self, request: Hashable, tokens: Any = (), *, extra_key: str | bytes = b"") -> int:
        """Makes a new request, with the blocks of the prefix cache that begin its tokens.

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
        here = root = _root(extra_key)
        new, blocks = _Request(root), []
        for start in range(0, len(ids) - self.block_size if self.enable_prefix_caching else 0, self.block_size):
            here = _child(here, ids[start : start + self.block_size])
            if here not in self._block_of:
                break
            new.hashes.append(here)
            blocks.append(self._block_of[here])
        found = len(blocks) * self.block_size
        row = self._enter(request, new, np.array(blocks, np.int32), found, 0)
        if found:
            self._prompts[row] = ids.copy()
        return found

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
        self._enter(new_request, new, self.get_block_ids(request), self._seq_lens[row], self._num_dropped[row])

    def step(self, batch: Iterable[tuple[Hashable, Any]]) -> Step:
        """Appends tokens to requests, and gives the arrays with which every layer writes and attends them.

        The tokens count as computed from now on: a step that is not computed is taken back by :meth:`truncate`.

        Args:
            batch: (request, tokens) pairs, each request once. tokens: ids, integers [n]; without prefix caching also
                their number.

        Returns:
            The :class:`Step`, its requests in the order of the batch.

        Raises:
            NoFreeBlocksError: blocks are missing. The manager is as it was before, here and below.
            ValueError: a request is not there, swapped out or named twice, a token is out of range, or tokens are not
                those of a prompt that come after what :meth:`allocate` found of it: all of its tokens, say.
            TypeError: the batch is no pairs, or tokens are no ids.
        """
        requests, counts, ids = _check.batch("batch", batch, self.enable_prefix_caching)
        rows = self._rows(requests)
        old = self._seq_lens[rows]
        new = old + counts
        if len(new) and new.max() > _check.INT32_MAX:
            raise ValueError(f"batch[{new.argmax()}]: {new.max()} tokens in all, expected at most {_check.INT32_MAX}")
        if self._prompts and ids is not None:
            self._check_continuations(rows, ids, counts)
        had, has = self._num_blocks(old), self._num_blocks(new)

        fresh, begun = has - had, np.flatnonzero((had * self.block_size > old) & (counts > 0))
        copied, last = self._shared_writers(begun, self._table[rows[begun], had[begun] - 1])
        wanted = np.concatenate([np.ones(len(copied), np.int64), fresh])
        ready = self._ready("batch", np.concatenate([rows[copied], rows]), wanted)
        blocks, copies = ready[len(copied) :], ready[: len(copied)]
        self._make_columns(int(has.max(initial=0)))
        if len(copied):
            self._copy(last, copies)

        # From here on nothing raises.
        self._take(ready)
        if len(copied):
            self._table[rows[copied], had[copied] - 1] = copies
            self._release(last)
        behind = had - np.cumsum(fresh) + fresh
        self._table[np.repeat(rows, fresh), np.arange(len(blocks)) + np.repeat(behind, fresh)] = blocks
        self._seq_lens[rows] = new
        for row in [row for row, prompt in self._prompts.items() if self._seq_lens[row] >= len(prompt)]:
            del self._prompts[row]

        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(query_start_loc[-1]) + np.repeat(old - query_start_loc[:-1], counts)
        column, offset = np.divmod(positions, self.block_size)
        slot_mapping = self._table[np.repeat(rows, counts), column] * np.int64(self.block_size) + offset
        step = Step(
            query_start_loc=query_start_loc,
            seq_lens=new.astype(np.int32),
            block_table=self._table[:, : has.max(initial=0)][rows],
            slot_mapping=slot_mapping,
            positions=positions,
            requests=requests,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
        )
        if ids is not None:
            self._token_ids.reshape(-1)[slot_mapping] = ids
            self._publish(rows, old // self.block_size, new // self.block_size)
        self._drop_behind_window(rows, old)
        return step

    def truncate(self, request: Hashable, seq_len: int) -> None:
        """Takes the last tokens of a request back: drafts that were rejected, or a step that was not computed.

        Args:
            request: what it was allocated as.
            seq_len: how many tokens it then has.

        Raises:
            ValueError: the request is not there or swapped out, ``seq_len`` is more than it has, or its sliding window
                would begin in a block that was given back.
            TypeError: ``seq_len`` is no integer.
        """
        row, least = self._present("request", request), 0
        old = int(self._seq_lens[row])
        if self._num_dropped[row]:
            least = int(self._num_dropped[row]) * self.block_size + self.sliding_window - 1
        seq_len = _check.integer("seq_len", seq_len, least, old)
        full = seq_len // self.block_size
        for block in self._table[row, full : old // self.block_size].tolist():
            if block in self._hash_of and self._ref_cnt[block] == 2:  # its tokens may never have been computed
                self._forget(block)
        columns = slice(self._num_blocks(seq_len), self._num_blocks(old))
        self._release(self._table[row, columns])
        self._table[row, columns] = -1
        del self._requests[row].hashes[full:]
        self._seq_lens[row] = seq_len
        if not seq_len:
            self._prompts.pop(row, None)

    def free(self, request: Hashable) -> None:
        """Ends a request. Its full blocks stay in the prefix cache until their memory is needed.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there.
        """
        row = self._find("request", request)
        if not self._swapped[row]:
            self._leave(row)
        self._requests[row] = _Request(b"")
        self._prompts.pop(row, None)
        self._free_rows.append(row)
        del self._row_of[request]

    def swap_out(self, request: Hashable) -> None:
        """Copies the keys and values of a request out of all caches, into memory of their own, and gives its blocks
        back.

        Args:
            request: what it was allocated as.

        Raises:
            ValueError: the request is not there, or swapped out already.
        """
        row = self._present("request", request)
        blocks = self._held(row)
        self._requests[row].saved = [memory[blocks] for memory in self._memory()]
        self._leave(row)
        self._swapped[row] = True

    def swap_in(self, request: Hashable) -> None:
        """Brings a request back that was swapped out, so that it can go on.

        Blocks that the prefix cache still has are not copied.

        Args:
            request: what it was allocated as.

        Raises:
            NoFreeBlocksError: blocks are missing. Nothing has changed then.
            ValueError: the request is not there, or not swapped out.
        """
        row = self._find("request", request)
        if not self._swapped[row]:
            raise ValueError(f"request: {request!r} is not swapped out")
        found, there = self._requests[row], []
        for here in found.hashes[self._num_dropped[row] :]:
            if here not in self._block_of:
                break
            there.append(self._block_of[here])
        count = len(found.saved[0])
        blocks = self._ready("request", np.array([row]), np.array([count - len(there)]), there)
        for memory, saved in zip(self._memory(), found.saved, strict=True):
            memory[blocks] = saved[len(there) :]
        self._acquire(there)
        self._take(blocks)
        self._table[row, self._num_dropped[row] :][:count] = [*there, *blocks.tolist()]
        found.saved, self._swapped[row] = [], False

    def reset_prefix_cache(self) -> None:
        """Forgets all that was cached, as a change of the weights asks for.

        Requests that are there go on, swapped out or not, with the keys and values that they have. Nobody finds these
        any more, nor what is computed after them, which depends on both weights.
        """
        for block in list(self._hash_of):
            self._forget(block)
        for row in self._row_of.values():
            self._requests[row].root, self._requests[row].hashes = None, []

    def _find(self, name: str, request: Hashable) -> int:
        try:
            return self._row_of[request]
        except KeyError:
            raise ValueError(f"{name}: {request!r} is not there: allocate it, or fork another") from None
        except TypeError as e:
            raise TypeError(f"{name}: {e}") from None

    def _present(self, name: str, request: Hashable) -> int:
        row = self._find(name, request)
        if self._swapped[row]:
            raise ValueError(f"{name}: {request!r} is swapped out")
        return row

    def _check_new(self, request: Hashable, name: str = "request") -> None:
        try:
            there = request in self._row_of
        except TypeError as e:
            raise TypeError(f"{name}: {e}") from None
        if there:
            raise ValueError(f"{name}: {request!r} is there already")

    def _rows(self, requests: tuple[Hashable, ...]) -> Array:
        try:
            rows = np.fromiter(map(self._row_of.__getitem__, requests), np.int64, len(requests))
        except (KeyError, TypeError):
            rows = np.array([self._find(f"batch[{i}][0]", request) for i, request in enumerate(requests)])
        if len(set(requests)) < len(requests):
            i = next(i for i, request in enumerate(requests) if request in requests[:i])
            raise ValueError(f"batch[{i}][0]: {requests[i]!r} is named twice")
        for i in np.flatnonzero(self._swapped[rows])[:1]:
            raise ValueError(f"batch[{i}][0]: {requests[i]!r} is swapped out")
        return rows

    def _check_continuations(self, rows: Array, ids: Array, counts: Array) -> None:
        end = np.cumsum(counts)
        for i, row in enumerate(rows.tolist()):
            if row in self._prompts:
                given = ids[end[i] - counts[i] : end[i]]
                _check.continuation(f"batch[{i}][1]", given, self._prompts[row], int(self._seq_lens[row]))

    def _num_blocks(self, seq_lens: Any) -> Any:
        return -(-seq_lens // self.block_size)

    def _held(self, row: int) -> Array:
        return self._table[row, self._num_dropped[row] : self._num_blocks(self._seq_lens[row])]

    def _memory(self) -> list[Array]:
        """All that a block has."""
        return [self._token_ids, *(x for cache in self.caches for x in (cache.key_cache, cache.value_cache))]

    def _copy(self, sources: Array, destinations: Array) -> None:
        for memory in self._memory():
            memory[destinations] = memory[sources]

    def _make_columns(self, count: int) -> None:
        if count > self._table.shape[1]:
            grown = np.full((len(self._table), max(count, 2 * self._table.shape[1])), -1, np.int32)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown

    def _enter(self, request: Hashable, new: _Request, blocks: Array, seq_len: int, num_dropped: int) -> int:
        if not self._free_rows:
            rows = max(8, len(self._table))
            self._table = np.pad(self._table, [(0, rows), (0, 0)], constant_values=-1)
            arrays = (self._seq_lens, self._num_dropped, self._swapped, self._home)
            self._seq_lens, self._num_dropped, self._swapped, self._home = (np.pad(x, (0, rows)) for x in arrays)
            self._free_rows = list(range(len(self._table) - 1, len(self._requests) - 1, -1))
            self._requests += [new] * rows
        self._make_columns(len(blocks))
        row = self._free_rows.pop()
        if len(self._free) > 1:
            homes = self._home[list(self._row_of.values())]
            self._home[row] = np.bincount(homes, minlength=len(self._free)).argmin()
        self._row_of[request] = row
        self._requests[row] = new
        self._table[row, : len(blocks)] = blocks
        self._seq_lens[row], self._num_dropped[row], self._swapped[row] = seq_len, num_dropped, False
        self._acquire(blocks[num_dropped:].tolist())
        return row

    def _leave(self, row: int) -> None:
        self._release(self._held(row))
        self._table[row] = -1

    def _publish(self, rows: Array, first: Array, end: Array) -> None:
        """Blocks first to end of each row, which have become full, go into the prefix cache, those excepted that it has
        under another number."""
        counts = end - first
        rows, columns = np.repeat(rows, counts), np.repeat(end - np.cumsum(counts), counts) + np.arange(counts.sum())
        blocks = self._table[rows, columns]
        for row, block, ids in zip(rows.tolist(), blocks.tolist(), self._token_ids[blocks], strict=True):
            request = self._requests[row]
            if request.root is None:
                continue
            here = _child(request.hashes[-1] if request.hashes else request.root, ids)
            request.hashes.append(here)
            if here not in self._block_of:
                self._block_of[here], self._hash_of[block] = block, here
                self._ref_cnt[block] += 1

    def _forget(self, block: int) -> None:
        """The prefix cache no longer has the block."""
        del self._block_of[self._hash_of.pop(block)]
        self._ref_cnt[block] -= 1
        if block in self._evictable:
            del self._evictable[block]
            self._free[self._node_of[block]].append(block)

    def _ready(self, name: str, rows: Array, counts: Array, wanted: Sequence[int] = ()) -> Array:
        """So many free blocks for each of the rows, for :meth:`_take`, beside those that are ``wanted`` from the prefix
        cache."""
        count, free = int(counts.sum()), self.num_free_blocks - sum(block in self._evictable for block in wanted)
        if count > free:
            raise NoFreeBlocksError(name, count, free)
        for block in wanted:
            if block in self._evictable:
                self._evictable.move_to_end(block)
        for _ in range(count - sum(map(len, self._free))):
            self._forget(next(iter(self._evictable)))
        if len(self._free) == 1:
            return np.array(self._free[0][: -count - 1 : -1], np.int32)
        piles = [reversed(free) for free in self._free]
        homes = (chain(piles[home], *piles) for home in self._home[np.repeat(rows, counts)].tolist())
        return np.fromiter(map(next, homes), np.int32, count)

    def _take(self, blocks: Array) -> None:
        """What :meth:`_ready` gave."""
        self._ref_cnt[blocks] = 1
        counts = np.bincount(self._node_of[blocks], minlength=len(self._free)).tolist()
        for free, count in zip(self._free, counts, strict=True):
            del free[len(free) - count :]

    def _acquire(self, blocks: Sequence[int]) -> None:
        self._ref_cnt[blocks] += 1
        for block in blocks:
            self._evictable.pop(block, None)

    def _release(self, blocks: Array) -> None:
        np.subtract.at(self._ref_cnt, blocks, 1)
        backwards = blocks[::-1]  # the end of a prefix is evicted before its beginning
        for block, left in zip(backwards.tolist(), self._ref_cnt[backwards].tolist(), strict=True):
            if left == 0:
                self._free[self._node_of[block]].append(block)
            elif left == 1 and block in self._hash_of:
                self._evictable[block] = None

    def _shared_writers(self, begun: Array, last: Array) -> tuple[Array, Array]:
        """Of requests that go on inside their last block, those whose block somebody else has, too, and which it is. Of
        all who have a block, the last to write may do so in place."""
        writers: Counter[int] = Counter()
        copied = []
        for i in np.flatnonzero(self._ref_cnt[last] > 1).tolist():
            writers[last[i]] += 1
            if writers[last[i]] < self._ref_cnt[last[i]]:
                copied.append(i)
        return begun[copied], last[copied]

    def _drop_behind_window(self, rows: Array, old: Array) -> None:
        """Gives back what no token from ``old`` on sees."""
        if self.sliding_window < 0:
            return
        end = np.maximum(old - self.sliding_window + 1, 0) // self.block_size
        for row, last in zip(rows[end > self._num_dropped[rows]], end[end > self._num_dropped[rows]], strict=True):
            columns = slice(self._num_dropped[row], last)
            self._release(self._table[row, columns])
            self._table[row, columns] = -1
            self._num_dropped[row] = last
