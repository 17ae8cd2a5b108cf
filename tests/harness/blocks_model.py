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
from cpu_attn.serving import PrefixStore

from ..programs.blocks_failing import At, state, without_evicted

STATES = 8191  # what a token and those before it can amount to; a key and a value for each
LAYERS, KV_HEADS, HEADS = 2, 1, 2


class Model:
    """Every request's tokens, and all operations on a manager of few, small blocks.

    What a token's key and value are follows from those before it, from the token and from the weights, which a reset
    changes: what requests have is what they computed, and what they find is what they would compute.

    attending: steps are attended and compared with the oracle; else the caches are only written. ranks: each of them
    has caches and a manager, all of which do the same. slots: how many slots of states each manager has; 0: no states.
    interval: tokens between snapshots, of any number of blocks. store: where the manager keeps blocks, too.
    store_blocks: how many of these may be mapped.
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
        slots: int = 0,
        interval: int = 4,
        store: PrefixStore | None = None,
        store_blocks: int = 0,
    ) -> None:
        sizes = (num_blocks, block_size, KV_HEADS, head_size)
        options: Any = {"enable_prefix_caching": caching, "sliding_window": window}
        self.made = self.epoch = 0
        self.stored = store is not None
        options |= {"store": store, **self.named()}
        self.managers = []
        for _ in range(ranks):
            caches = [PagedKVCache(*sizes, store_blocks=store_blocks) for _ in range(LAYERS)]
            if nodes > 1:
                caches[0].block_nodes = np.arange(num_blocks, dtype=np.int32) * nodes // num_blocks
            options["states"] = [np.zeros((slots, *shape), np.float32) for shape in ((), (2, 1)) if slots]
            self.managers.append(BlockManager(caches, decode_context_parallel_size=ranks, **options))
            self.managers[-1]._states.interval = interval  # what 64 is for is not looked at here
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
        self.drafted: dict[int, int] = {}  # how many of them the last step said were drafts
        self.counts: Counter[str] = Counter()

    def named(self) -> dict[str, str]:
        """What a manager with a store is told of the weights."""
        return {"model": f"weights {self.epoch}"} if self.stored else {}

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
        self.drafted[new] = self.drafted.get(request, 0)
        return new

    def step(self, batch: list[tuple[int, list[int]]], most_drafts: int = 0) -> bool:
        """Whether there were blocks enough. A prompt that was begun goes on in place of as many tokens."""
        batch = [(r, self.rest[r][: len(new)] or new) for r, new in batch]
        drafts = [min(len(new), most_drafts) for _, new in batch]
        needed, free, before = self.needed(batch), self.manager.num_free_blocks, self.state()
        given: Any = batch if self.caching else [(r, len(new)) for r, new in batch]
        try:
            step, *others = self.every("step", given, num_draft_tokens=drafts)
        except NoFreeBlocksError as error:
            what, lacking = "blocks", needed - free
            if lacking <= 0:
                what, lacking = "state slots", self.needed_slots(batch, drafts) - self.manager._states.pool.num_free
            assert error.missing == lacking > 0 and f"{lacking} are missing" in str(error) and what in str(error)
            assert self.state() == before
            self.counts[f"refused {what}"] += 1
            return False
        assert needed <= free
        begun = {r: self.computed[r][-1] if self.computed[r] else self.keys[r] for r, _ in batch}
        for (request, new), count in zip(batch, drafts, strict=True):
            self.before[request] = len(self.tokens[request])
            if new:
                self.drafted[request] = count
            self.compute(request, new)
            del self.rest[request][: len(new)]
        for manager, its_step in zip(self.managers, [step, *others], strict=True):
            self.compute_states(manager, its_step, batch, begun)
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

    def compute_states(
        self, manager: BlockManager, step: Any, batch: list[tuple[int, list[int]]], begun: dict[int, int]
    ) -> None:
        """As the calls of cpu_attn.linear do: all states are read before one is written, each slot is written once."""
        if not manager.states:
            assert step.state_indices is None and step.checkpoints is None
            return
        after, before, checkpoints = step.state_indices, step.initial_state_indices, step.checkpoints.tolist()
        assert all(x.dtype == np.int32 for x in (after, before, step.checkpoints))
        assert checkpoints == sorted(checkpoints)
        written = [*after[after >= 0].tolist(), *(slot for _, _, slot in checkpoints)]
        assert len(set(written)) == len(written)
        for (request, new), to, of in zip(batch, after.tolist(), before.tolist(), strict=True):
            assert (to >= 0) == bool(new) and (of >= 0) == bool(new and len(self.tokens[request]) > len(new))
            assert of == to or of not in written
            assert of < 0 or all((x[of] == begun[request]).all() for x in manager.states)
        for states in manager.states:
            for (request, new), to in zip(batch, after.tolist(), strict=True):
                if new:
                    states[to] = self.computed[request][-1]
            for i, count, slot in checkpoints:
                request, new = batch[i]
                assert 1 <= count <= len(new)
                states[slot] = self.computed[request][len(self.tokens[request]) - len(new) + count - 1]

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
        """Back to so many tokens or, with states, to the next before of which there is one."""
        before = self.state()
        try:
            self.every("truncate", request, seq_len)
        except ValueError as error:
            assert self.manager.states and f"no state after {seq_len} tokens" in str(error) and self.state() == before
            last = int(str(error).split()[-1])
            assert seq_len != 0 and last < seq_len < len(self.tokens[request])
            assert seq_len < len(self.tokens[request]) - self.drafted.get(request, 0)
            self.counts["without a state"] += 1
            if last < self.least(request):
                return
            seq_len = last
            self.every("truncate", request, seq_len)
        self.drafted[request] = 0
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
        self.drafted[request] = 0

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
        self.epoch += 1
        self.every("reset_prefix_cache", **self.named())

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
            shared = held[block] + (block in self.manager._pool.hash_of) > n or block >= self.manager.num_blocks
            count += n if shared else n - 1
        return count

    def needed_slots(self, batch: list[tuple[int, list[int]]], drafts: list[int]) -> int:
        """Slots of states that the step needs, by whoever has which. A snapshot that one request begins from is given
        up for it if need be."""
        states, count, own = self.manager._states, 0, 0
        for (request, new), back in zip(batch, drafts, strict=True):
            slot = states.slot.item(self.manager._row_of[request])
            if new:
                count += min(back, len(new) - 1)
                shared = slot >= 0 and states.pool.ref_cnt[slot] > 1
                count += slot < 0 or back == len(new) or shared
                own += shared and back < len(new) and states.pool.ref_cnt[slot] == 2 and slot in states.pool.hash_of
        return count - min(own, max(0, count - states.pool.num_free))

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
            slot = manager._states.slot.item(manager._row_of[request])
            assert (slot >= 0) == bool(manager.states and self.tokens[request])
            assert slot < 0 or all((x[slot] == self.computed[request][-1]).all() for x in manager.states)
            for cache, (keys, its_values) in zip(manager.caches, self.states, strict=True):
                got = cache.gather(blocks[first:], len(own))
                assert (got[0] == keys[own]).all() and (got[1] == its_values[own]).all()

    def check_blocks(self) -> None:
        """Each block is free, in the prefix cache alone, or with requests; and is counted. The first manager is looked
        at, since the others do the same."""
        m, pool = self.manager, self.manager._pool
        held = Counter(b for r in self.here() for b in m.get_block_ids(r).tolist() if b >= 0)
        assert [held[b] + (b in pool.hash_of) for b in range(len(pool.ref_cnt))] == pool.ref_cnt.tolist()
        own = {b for b in held | pool.hash_of if b < m.num_blocks}
        mapped = {b for run in (pool.room.runs.values() if pool.room else ()) for b in run.blocks}
        assert (held.keys() | pool.hash_of.keys()) - own <= mapped
        free = [block for blocks in pool.free for block in blocks]
        assert len(set(free)) == len(free) and not set(free) & (held.keys() | pool.hash_of.keys())
        assert all(pool.node_of[block] == node for node, blocks in enumerate(pool.free) for block in blocks)
        assert set(pool.evictable) == own & (pool.hash_of.keys() - held.keys())
        assert list(pool.evictable.values()) == sorted(pool.evictable.values())
        assert m.num_free_blocks == m.num_blocks - len(own & held.keys())
        assert {h: b for b, h in pool.hash_of.items()} == pool.block_of
        assert sorted([*m._row_of.values(), *m._free_rows]) == list(range(len(m._table)))
        assert m._requests.keys() == set(m._row_of.values()) and not m._journal
        self.check_slots()
        assert m._saved.keys() == {m._row_of[r] for r in self.swapped}
        assert all((m._table[m._row_of[r], len(m.get_block_ids(r)) :] == -1).all() for r in self.here())

    def check_slots(self) -> None:
        """Each slot is free, a snapshot, or with requests; and is counted. A snapshot is at the end of a cached
        block."""
        m, states, pool = self.manager, self.manager._states, self.manager._states.pool
        rows = {m._row_of[r] for r in self.here()}
        held = Counter(slot for row in rows for slot in [states.slot.item(row), *states.earlier.get(row, {}).values()])
        del held[-1]
        assert [held[x] + (x in pool.hash_of) for x in range(len(pool.ref_cnt))] == pool.ref_cnt.tolist()
        assert states.earlier.keys() <= rows and pool.block_of.keys() <= m._pool.block_of.keys()
        assert sorted([*pool.free[0], *pool.evictable, *held]) == list(range(len(pool.ref_cnt)))
        assert set(pool.evictable) == pool.hash_of.keys() - held.keys()
        assert states.saved.keys() <= {m._row_of[r] for r in self.swapped}
        for request in self.here():
            for i, here in enumerate(m._requests[m._row_of[request]].hashes, 1):
                if here in pool.block_of:
                    assert self.computed[request][i * self.block_size - 1] == m.states[0][pool.block_of[here]]

    def state(self) -> Any:
        """What a call that fails leaves as it is. A store may write meanwhile to files that are mapped."""
        m = self.manager
        there = {r: None if r in self.swapped else m.get_block_ids(r).tolist() for r in self.tokens}
        pool = m._pool
        lists = ([x.copy() for x in pool.free], list(pool.evictable), pool.hash_of.copy(), pool.ref_cnt.tolist())
        states = m._states
        slots = (states.slot.tolist(), dict(states.earlier), states.pool.hash_of.copy(), states.pool.ref_cnt.tolist())
        keys = [c.key_cache[: m.num_blocks].tobytes() for c in m.caches]
        return there, {r: m.seq_len(r) for r in there}, lists, slots, keys


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
            model.step(batch, rng.choice((0, 0, 1, 3)) if model.manager.states else 0)
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
    assert model.manager._states.pool.num_free == model.manager.stats().num_state_slots
