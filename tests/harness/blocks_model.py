# SPDX-License-Identifier: Apache-2.0
"""BlockManager beside a model without blocks: what each request's keys and values are follows from its tokens."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from cpu_attn import BlockManager, NoFreeBlocksError, PagedKVCache, reference
from cpu_attn.distributed import ContextParallel, ThreadGroup

from ..programs.blocks_failing import At, state, without_evicted

STATES = 8191  # what a token and those before it can amount to; a key and a value for each
LAYERS, KV_HEADS, HEADS = 2, 1, 2


class Model:
    """Every request's tokens, and all operations on a manager of few, small blocks.

    What a token's key and value are follows from those before it, from the token and from the weights, which a reset
    changes: what requests have is what they computed, and what they find is what they would compute.

    attending: steps are attended and compared with the oracle; else the caches are only written. ranks: each of them
    has caches and a manager, all of which do the same.
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
        ranks: int = 1,
    ) -> None:
        sizes = (num_blocks, block_size, KV_HEADS, head_size)
        options: Any = {"enable_prefix_caching": caching, "sliding_window": window}
        self.managers = []
        for _ in range(ranks):
            caches = [PagedKVCache(*sizes) for _ in range(LAYERS)]
            if nodes > 1:
                caches[0].block_nodes = np.arange(num_blocks, dtype=np.int32) * nodes // num_blocks
            self.managers.append(BlockManager(caches, decode_context_parallel_size=ranks, **options))
        self.manager, self.parallel = self.managers[0], [ContextParallel(g) for g in ThreadGroup.make(ranks)]
        self.block_size, self.caching, self.window, self.attending = block_size * ranks, caching, window, attending
        self.rng = np.random.default_rng(0)
        self.states = self.rng.standard_normal((LAYERS, 2, STATES, KV_HEADS, head_size), np.float32)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, list[int]] = {}  # which state each of them is in
        self.fails_at: int | None = None  # at which line the next operation fails at first
        self.rest: dict[int, list[int]] = {}  # of a prompt of which some was found: what steps have to be given
        self.keys: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.before: dict[int, int] = {}  # tokens before the last step
        self.counts: Counter[str] = Counter()
        self.made = self.epoch = 0

    def here(self) -> list[int]:
        return [r for r in self.tokens if r not in self.swapped]

    def least(self, request: int) -> int:
        """How few tokens are allowed to be left of it: its window may begin in no block that was given back."""
        return 0 if self.window < 0 else self.before.get(request, 0)

    def every(self, method: str, *given: Any, **named: Any) -> list[Any]:
        """What the method of each manager returns. Where it is to fail at first, that has changed nothing."""
        fails_at, self.fails_at = self.fails_at, None
        results: list[Any] = []
        missing = []
        for manager in self.managers:
            call = partial(getattr(manager, method), *given, **named)
            try:
                results.append(call() if fails_at is None else self.failing(manager, call, method, fails_at))
            except NoFreeBlocksError as error:
                missing.append(error)
        assert not missing or len(missing) == len(self.managers)
        if missing:
            raise missing[0]
        return results

    def failing(self, manager: BlockManager, call: Any, method: str, line: int) -> Any:
        was = state(manager)
        try:
            with At(line):
                return call()
        except MemoryError:
            found = state(manager)
        assert found == (without_evicted(was, found) if method in ("step", "swap_in") else was)
        self.counts["failed"] += 1
        return call()

    # What can be done.

    def allocate(self, prompt: list[int], key: int = 0) -> int:
        request, self.made = self.made, self.made + 1
        found, *others = self.every("allocate", request, prompt, extra_key=str(key))
        assert all(other == found for other in others)
        assert found % self.block_size == 0 and found <= max(len(prompt) - 1, 0)
        self.counts["found"] += found
        self.tokens[request], self.keys[request], self.computed[request] = [], key, []
        self.compute(request, prompt[:found])
        self.rest[request] = prompt[found:] if found else []
        return request

    def fork(self, request: int) -> int:
        new, self.made = self.made, self.made + 1
        self.every("fork", request, new)
        self.tokens[new], self.keys[new] = self.tokens[request].copy(), self.keys[request]
        self.computed[new] = self.computed[request].copy()
        self.before[new], self.rest[new] = self.before.get(request, 0), self.rest[request].copy()
        return new

    def step(self, batch: list[tuple[int, list[int]]]) -> bool:
        """Whether there were blocks enough. A prompt that was begun goes on in place of as many tokens."""
        batch = [(r, self.rest[r][: len(new)] or new) for r, new in batch]
        needed, free, before = self.needed(batch), self.manager.num_free_blocks, self.state()
        given: Any = batch if self.caching else [(r, len(new)) for r, new in batch]
        try:
            step, *others = self.every("step", given)
        except NoFreeBlocksError as error:
            assert error.missing == needed - free > 0 and f"{error.missing} are missing" in str(error)
            assert self.state() == before
            self.counts["refused"] += 1
            return False
        assert needed <= free
        for request, new in batch:
            self.before[request] = len(self.tokens[request])
            self.compute(request, new)
            del self.rest[request][: len(new)]
        lens = [len(self.tokens[r]) for r, _ in batch]
        assert step.requests == tuple(r for r, _ in batch) and step.seq_lens.tolist() == lens
        assert np.diff(step.query_start_loc).tolist() == [len(new) for _, new in batch]
        positions = [i for n, (_, new) in zip(lens, batch, strict=True) for i in range(n - len(new), n)]
        assert step.positions.tolist() == positions
        values = np.concatenate([np.zeros(0, int), *(self.values(r)[-len(new) :] for r, new in batch if new)])
        query = self.rng.standard_normal((len(values), HEADS, self.manager.caches[0].head_size), np.float32)
        for manager, parallel, its_step in zip(self.managers, self.parallel, [step, *others], strict=True):
            assert (its_step.slot_mapping == step.slot_mapping).all()
            for cache, (keys, its_values) in zip(manager.caches, self.states, strict=True):
                cache.update(keys[values], its_values[values], parallel.step(its_step))
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
        self.every("truncate", request, seq_len)
        if self.rest[request]:
            self.rest[request] = self.tokens[request][seq_len:] + self.rest[request] if seq_len else []
        del self.tokens[request][seq_len:], self.computed[request][seq_len:]
        self.before[request] = min(self.before.get(request, 0), seq_len)

    def free(self, request: int) -> None:
        self.every("free", request)
        del self.tokens[request]
        self.swapped.discard(request)

    def swap_out(self, request: int) -> None:
        self.every("swap_out", request)
        self.swapped.add(request)

    def swap_in(self, request: int) -> None:
        before = self.state()
        try:
            self.every("swap_in", request)
        except NoFreeBlocksError:
            assert self.state() == before
            self.counts["refused"] += 1
        else:
            self.swapped.discard(request)

    def reset(self) -> None:
        self.every("reset_prefix_cache")
        self.epoch += 1

    # What has to hold.

    def compute(self, request: int, new: list[int]) -> None:
        """By the weights of now."""
        for token in new:
            before = self.computed[request][-1] if self.computed[request] else self.keys[request]
            self.computed[request].append((before * 37 + token + 1 + 1009 * self.epoch) % STATES)
        self.tokens[request] += new

    def values(self, request: int) -> Any:
        return np.array(self.computed[request], int)

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
        assert all(manager.seq_len(request) == len(self.tokens[request]) for manager in self.managers)
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
        for rank, manager in enumerate(self.managers):
            assert (manager.get_block_ids(request) == blocks).all()
            own = values[rank :: len(self.managers)]
            for cache, (keys, its_values) in zip(manager.caches, self.states, strict=True):
                got = cache.gather(blocks[first:], len(own))
                assert (got[0] == keys[own]).all() and (got[1] == its_values[own]).all()

    def check_blocks(self) -> None:
        """Each block is free, in the prefix cache alone, or with requests; and is counted. The first manager is looked
        at, since the others do the same."""
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
        return there, {r: m.seq_len(r) for r in there}, lists, [c.key_cache.tobytes() for c in m.caches]


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
