# SPDX-License-Identifier: Apache-2.0
"""BlockManager beside a model without blocks: what each request's keys and values are follows from its tokens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from cpu_attn import BlockManager, NoFreeBlocksError, PagedKVCache, reference

STATES = 8191  # what a token and those before it can amount to; a key and a value for each
LAYERS, KV_HEADS, HEADS = 2, 1, 2


class Model:
    """Every request's tokens, and all operations on a manager of few, small blocks.

    attending: steps are attended and compared with the oracle; else the caches are only written.
    """

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 4,
        *,
        caching: bool = True,
        window: int = -1,
        head_size: int = 2,
        attending: bool = False,
        nodes: int = 1,
    ) -> None:
        sizes = (num_blocks, block_size, KV_HEADS, head_size)
        self.caches = [PagedKVCache(*sizes) for _ in range(LAYERS)]
        if nodes > 1:
            self.caches[0].block_nodes = np.arange(num_blocks, dtype=np.int32) * nodes // num_blocks
        self.manager = BlockManager(self.caches, enable_prefix_caching=caching, sliding_window=window)
        self.block_size, self.caching, self.window, self.attending = block_size, caching, window, attending
        self.rng = np.random.default_rng(0)
        self.states = self.rng.standard_normal((LAYERS, 2, STATES, KV_HEADS, head_size), np.float32)
        self.tokens: dict[int, list[int]] = {}
        self.rest: dict[int, list[int]] = {}  # of a prompt of which some was found: what steps have to be given
        self.roots: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.before: dict[int, int] = {}  # tokens before the last step
        self.counts: Counter[str] = Counter()
        self.made = self.epoch = 0

    def here(self) -> list[int]:
        return [r for r in self.tokens if r not in self.swapped]

    def least(self, request: int) -> int:
        """How few tokens are allowed to be left of it: its window may begin in no block that was given back."""
        return 0 if self.window < 0 else self.before.get(request, 0)

    # What can be done.

    def allocate(self, prompt: list[int], key: int = 0) -> int:
        request, self.made = self.made, self.made + 1
        found = self.manager.allocate(request, prompt, extra_key=str(key))
        assert found % self.block_size == 0 and found <= max(len(prompt) - 1, 0)
        self.counts["found"] += found
        self.tokens[request], self.roots[request] = prompt[:found], key * 31 + self.epoch
        self.rest[request] = prompt[found:] if found else []
        return request

    def fork(self, request: int) -> int:
        new, self.made = self.made, self.made + 1
        self.manager.fork(request, new)
        self.tokens[new], self.roots[new] = self.tokens[request].copy(), self.roots[request]
        self.before[new], self.rest[new] = self.before.get(request, 0), []
        return new

    def step(self, batch: list[tuple[int, list[int]]]) -> bool:
        """Whether there were blocks enough. A prompt that was begun goes on in place of as many tokens."""
        batch = [(r, self.rest[r][: len(new)] or new) for r, new in batch]
        needed, free, state = self.needed(batch), self.manager.num_free_blocks, self.state()
        given: Any = batch if self.caching else [(r, len(new)) for r, new in batch]
        try:
            step = self.manager.step(given)
        except NoFreeBlocksError as error:
            assert error.missing == needed - free > 0 and f"{error.missing} are missing" in str(error)
            assert self.state() == state
            self.counts["refused"] += 1
            return False
        assert needed <= free
        for request, new in batch:
            self.before[request] = len(self.tokens[request])
            self.tokens[request] += new
            del self.rest[request][: len(new)]
        lens = [len(self.tokens[r]) for r, _ in batch]
        assert step.requests == tuple(r for r, _ in batch) and step.seq_lens.tolist() == lens
        assert np.diff(step.query_start_loc).tolist() == [len(new) for _, new in batch]
        positions = [i for n, (_, new) in zip(lens, batch, strict=True) for i in range(n - len(new), n)]
        assert step.positions.tolist() == positions
        values = np.concatenate([np.zeros(0, int), *(self.values(r)[-len(new) :] for r, new in batch if new)])
        query = self.rng.standard_normal((len(values), HEADS, self.caches[0].head_size), np.float32)
        for cache, (keys, its_values) in zip(self.caches, self.states, strict=True):
            cache.update(keys[values], its_values[values], step)
            if self.attending:
                self.attend(cache, step, query, keys, its_values)
        return True

    def attend(self, cache: PagedKVCache, step: Any, query: Any, keys: Any, values: Any) -> None:
        output = cache.attend(query, step)
        seen = [self.values(r) for r in step.requests]
        want, _ = reference.attention(
            *(query, [keys[v] for v in seen], [values[v] for v in seen], step.query_start_loc, step.seq_lens),
            *(cache.head_size**-0.5, True, None, self.window),
        )
        errors = reference.relative_rms(output, want, step.query_start_loc)
        assert (errors[np.diff(step.query_start_loc) > 0] <= reference.BUDGET["float32"]).all(), errors

    def truncate(self, request: int, seq_len: int) -> None:
        self.manager.truncate(request, seq_len)
        if self.rest[request]:
            self.rest[request] = self.tokens[request][seq_len:] + self.rest[request] if seq_len else []
        del self.tokens[request][seq_len:]
        self.before[request] = min(self.before.get(request, 0), seq_len)

    def free(self, request: int) -> None:
        self.manager.free(request)
        del self.tokens[request]
        self.swapped.discard(request)

    def swap_out(self, request: int) -> None:
        self.manager.swap_out(request)
        self.swapped.add(request)

    def swap_in(self, request: int) -> None:
        state = self.state()
        try:
            self.manager.swap_in(request)
        except NoFreeBlocksError:
            assert self.state() == state
            self.counts["refused"] += 1
        else:
            self.swapped.discard(request)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.epoch = (self.epoch + 1) % 31

    # What has to hold.

    def values(self, request: int) -> Any:
        """Which state each of its tokens is in."""
        state, found = self.roots[request], []
        for token in self.tokens[request]:
            state = (state * 37 + token + 1) % STATES
            found.append(state)
        return np.array(found, int)

    def needed(self, batch: list[tuple[int, list[int]]]) -> int:
        """Blocks that the step needs, by whoever has which."""
        count, size = 0, self.block_size
        held = Counter(b for r in self.here() for b in self.manager.get_block_ids(r).tolist())
        writers: Counter[int] = Counter()
        for request, new in batch:
            old = len(self.tokens[request])
            count += -(-(old + len(new)) // size) - -(-old // size)
            if old % size and new:
                writers[self.manager.get_block_ids(request)[-1]] += 1
        for block, n in writers.items():
            count += n if held[block] + (block in self.manager._pool.hash_of) > n else n - 1
        return count

    def check(self, request: int) -> None:
        assert self.manager.seq_len(request) == len(self.tokens[request])
        if request in self.swapped:
            return
        blocks, values = self.manager.get_block_ids(request), self.values(request)
        first = int((blocks < 0).sum())
        assert (blocks[:first] < 0).all()
        if self.window < 0:
            assert first == 0
        else:
            assert first * self.block_size <= max(self.before.get(request, 0) - self.window + 1, 0)
        values = values[first * self.block_size :]
        for cache, (keys, its_values) in zip(self.caches, self.states, strict=True):
            got = cache.gather(blocks[first:], len(values))
            assert (got[0] == keys[values]).all() and (got[1] == its_values[values]).all()

    def check_blocks(self) -> None:
        """Each block is free, in the prefix cache alone, or with requests; and is counted."""
        m, pool = self.manager, self.manager._pool
        held = Counter(b for r in self.here() for b in m.get_block_ids(r).tolist() if b >= 0)
        assert [held[b] + (b in pool.hash_of) for b in range(m.num_blocks)] == pool.ref_cnt.tolist()
        free = [block for blocks in pool.free for block in blocks]
        assert len(set(free)) == len(free) and not set(free) & (held.keys() | pool.hash_of.keys())
        assert all(pool.node_of[block] == node for node, blocks in enumerate(pool.free) for block in blocks)
        assert set(pool.evictable) == pool.hash_of.keys() - held.keys()
        assert list(pool.evictable.values()) == sorted(pool.evictable.values())
        assert m.num_free_blocks == m.num_blocks - len(held)
        assert {h: b for b, h in pool.hash_of.items()} == pool.block_of
        assert sorted([*m._row_of.values(), *m._free_rows]) == list(range(len(m._table)))
        assert m._requests.keys() == set(m._row_of.values()) and not m._journal
        assert m._saved.keys() == {m._row_of[r] for r in self.swapped}
        assert all((m._table[m._row_of[r], len(m.get_block_ids(r)) :] == -1).all() for r in self.here())

    def state(self) -> Any:
        m = self.manager
        there = {r: None if r in self.swapped else m.get_block_ids(r).tolist() for r in self.tokens}
        pool = m._pool
        lists = ([x.copy() for x in pool.free], list(pool.evictable), pool.hash_of.copy(), pool.ref_cnt.tolist())
        return there, {r: m.seq_len(r) for r in there}, lists, [c.key_cache.tobytes() for c in self.caches]


def walk(model: Model, operations: int, seed: int = 0) -> None:
    """Random operations, few different tokens, so that prefixes recur. At the end nothing is left."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(most + 1))]

    for i in range(operations):
        here, kind = model.here(), rng.random()
        some = rng.choice(here) if here else None
        if some is None or (kind < 0.12 and len(model.tokens) < 8):
            model.allocate(tokens(4 * model.block_size), rng.randrange(8) // 7)
        elif kind < 0.6:
            batch = [(r, tokens(6)) for r in rng.sample(here, rng.randrange(len(here)) + 1)]
            model.step(batch)
        elif kind < 0.68:
            if len(model.tokens) < 8:
                model.fork(some)
        elif kind < 0.76:
            model.truncate(some, max(len(model.tokens[some]) - rng.randrange(6), model.least(some)))
        elif kind < 0.86:
            model.free(rng.choice(list(model.tokens)))
        elif kind < 0.92:
            model.swap_out(some)
        elif kind < 0.999:
            if model.swapped:
                model.swap_in(rng.choice(list(model.swapped)))
        else:
            model.reset()
        if model.tokens:
            model.check(rng.choice(list(model.tokens)))
        if i % 16 == 0:
            model.check_blocks()
    for request in list(model.tokens):
        model.free(request)
    model.check_blocks()
    assert model.manager.num_free_blocks == model.manager.num_blocks
