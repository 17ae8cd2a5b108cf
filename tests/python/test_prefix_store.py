# SPDX-License-Identifier: Apache-2.0
"""BlockManager with a PrefixStore: the same attention with it and without, here and in another process."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn import PagedKVCache
from cpu_attn.serving import BlockManager, PrefixStore, prefix_store

from ..harness.blocks_model import Model, walk
from ..harness.store_folders import Blocks, MappedBlocks, name_of, opened
from ..programs.blocks_failing import At, state
from ..programs.prefix_store_serving import BLOCK_SIZE, KINDS, TOKENS, made, run, tokens_of

FOUND = (TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
pytestmark = pytest.mark.filterwarnings("ignore:prefix store:RuntimeWarning")


def serving(folder: Path, kind: str, seed: int) -> tuple[int, str, int]:
    """What another process found, the hash of its outputs, and how many blocks it wrote."""
    command = [sys.executable, "-m", "cpu_attn.tests.programs.prefix_store_serving", str(folder), kind, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found, outputs, num_written = json.loads(done.stdout)
    return found, outputs, num_written


@pytest.mark.parametrize("kind", KINDS)
def test_equal_attention(tmp_path: Path, kind: str) -> None:
    """Of a manager without a store, of one that writes, and of one that finds; all bits."""
    tokens = tokens_of(0)
    _, alone = run(BlockManager(made(kind)), tokens)
    assert run(BlockManager(made(kind)), tokens_of(1))[1] != alone
    for found in (0, FOUND):
        with opened(tmp_path) as store:
            manager = BlockManager(made(kind), store=store, model="m")
            assert manager.allocate("other", tokens, extra_key="a LoRA") == 0
            assert run(manager, tokens) == (found, alone)
            assert manager.stats().prefix_store_hits == manager.stats().prefix_cache_hits == found
            manager.flush_store()
            assert store.stats().num_written_blocks == (0 if found else FOUND // BLOCK_SIZE)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_second_process(tmp_path: Path, kind: str) -> None:
    alone = run(BlockManager(made(kind)), tokens_of(0))[1]
    assert serving(tmp_path, kind, 0) == (0, alone, 9)
    assert serving(tmp_path, kind, 0) == (FOUND, alone, 0)
    assert serving(tmp_path, kind, 1)[0] == 0


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "scale": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5},
    "another scale": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25},
    "rotation": {"kv_cache_dtype": "int8", "kv_cache_rotation": "hadamard"},
    "feedback": {"kv_cache_dtype": "int8", "k_feedback": np.zeros((2, 8, 8), np.float32)},
    "layout": {"kv_cache_layout": "HND"},
    "another layout": {"kv_cache_layout": "NHD"},
    "head_size_v": {"head_size_v": 4},
    "head_size": {"head_size": 4, "head_size_v": 8},
    "heads": {"num_kv_heads": 1},
    "block_size": {"block_size": 32},
}


def test_what_decides_the_bytes_is_in_the_name(tmp_path: Path) -> None:
    """How many blocks and layers' caches are made of does not matter, all else does."""
    sizes = {"num_blocks": 8, "block_size": 16, "num_kv_heads": 2, "head_size": 8}

    def found(caches: Any, model: str = "m", **options: Any) -> int:
        with opened(tmp_path) as store:
            manager = BlockManager(caches, store=store, model=model, **options)
            there = manager.allocate("a", range(40))
            manager.step([("a", range(there, 40))])
            manager.flush_store()
            return there

    assert found(PagedKVCache(**sizes)) == 0
    for name, other in OTHERS.items():
        assert found(PagedKVCache(**{**sizes, **other})) == 0, name
    for name, other in OTHERS.items():
        assert found(PagedKVCache(**{**sizes, **other})) == 32, name
    assert found(PagedKVCache(**sizes), model="n") == 0
    assert found([PagedKVCache(**sizes)] * 2) == 0
    assert found(PagedKVCache(**{**sizes, "num_blocks": 20})) == 32
    assert found(PagedKVCache(**sizes), sliding_window=8) == 32


WALKS: list[dict[str, Any]] = [
    *({}, {"block_size": 1}, {"nodes": 2}, {"window": 6, "num_blocks": 16}),
    *({"slots": 14}, {"slots": 24, "num_blocks": 14}, {"slots": 30, "interval": 2, "block_size": 1}),
]
WALKS += [{**options, "store_blocks": 200} for options in WALKS]


@pytest.mark.parametrize("options", WALKS, ids=str)
def test_random_operations(tmp_path: Path, options: dict[str, Any]) -> None:
    """Managers that come one after the other, against a model: what is found is what would be computed. There is room
    for few segments."""
    hits = 0
    for seed in (0, 0, 1, 1):
        with opened(tmp_path, segment_bytes=2000, max_bytes=6 << 18) as store:
            model = Model(**options, store=store)
            walk(model, 250, seed)
            hits += model.manager.stats().prefix_store_hits
            model.manager.flush_store()
            stats = store.stats()
            assert not stats.num_faults and not stats.num_damaged_blocks and not stats.num_unreadable_segments
    assert hits > 0


def compute(manager: BlockManager, request: Any, tokens: Any, value: float = 1.0) -> Any:
    """Keys and values that are all ``value``."""
    step = manager.step([(request, tokens)])
    for cache in manager.caches:
        cache.update(*np.full((2, step.num_tokens, 1, 2), value, np.float32), step)
    return step


def small(store: PrefixStore, num_blocks: int = 8, model: str = "m", **options: Any) -> BlockManager:
    return BlockManager(PagedKVCache(num_blocks, 4, 1, 2), store=store, model=model, **options)


def values(manager: BlockManager, request: Any) -> set[float]:
    key, value = manager.caches[0].gather(manager.get_block_ids(request), manager.seq_len(request))
    return {*key.reshape(-1).tolist(), *value.reshape(-1).tolist()}


def test_a_step_is_written_once_it_counts_as_computed(tmp_path: Path) -> None:
    """With the next step. One that is taken back is not written."""
    with opened(tmp_path) as store:
        manager = small(store)
        for request in "abc":
            manager.allocate(request)
        compute(manager, "a", range(8))
        manager.free("c")
        store.flush()
        assert store.stats().num_written_blocks == 0
        manager.step([("b", range(100, 108))])  # which fails
        manager.truncate("b", 0)
        store.flush()
        assert store.stats().num_written_blocks == 2
        compute(manager, "b", range(200, 205), 2.0)
        manager.flush_store()
        assert store.stats().num_written_blocks == 3
    with opened(tmp_path) as store:
        manager = small(store, 9)
        prompts = {"a": (range(9), 8), "b": (range(100, 109), 0), "later": (range(200, 209), 4)}
        for name, (tokens, found) in prompts.items():
            assert manager.allocate(name, tokens) == found
        assert values(manager, "a") == {1.0} and values(manager, "later") == {2.0}


def test_blocks_that_are_needed_are_left_out(tmp_path: Path) -> None:
    """The queue does not hold them: they are evicted as without a store, and counted."""
    with opened(tmp_path, max_queued_blocks=3) as store:
        manager = small(store, 4)
        for i in range(30):
            manager.allocate(i)
            compute(manager, i, range(100 * i, 100 * i + 16), float(i))
            manager.free(i)
        manager.flush_store()
        stats = store.stats()
        assert stats.num_written_blocks + stats.num_skipped_blocks == 120 and stats.num_skipped_blocks >= 30
    with opened(tmp_path) as store:
        manager, there = small(store, 8), 0
        for i in range(30):
            found = manager.allocate(i, range(100 * i, 100 * i + 17))
            there += found // 4
            assert values(manager, i) <= {float(i)}
            manager.free(i)
        assert there <= stats.num_written_blocks and there > 0


def test_more_is_stored_than_there_is_room_for(tmp_path: Path) -> None:
    """What fits is found, and blocks that requests have are left alone."""
    with opened(tmp_path) as store:
        manager = small(store, 30)
        manager.allocate("a")
        compute(manager, "a", range(100))
        manager.flush_store()
    with opened(tmp_path) as store:
        manager = small(store, 8)
        manager.allocate("b")
        compute(manager, "b", range(500, 510), 3.0)
        assert manager.allocate("a", range(100)) == 20
        assert manager.num_free_blocks == 0 and values(manager, "b") == {3.0} and values(manager, "a") == {1.0}
        manager.free("a")
        compute(manager, "b", range(600, 612), 3.0)
        assert manager.allocate("a", range(100)) == 8  # of 2 in memory still, and 2 that are free


def test_what_is_found_in_memory_stays(tmp_path: Path) -> None:
    """The end of a prefix is read into blocks of others, though its beginning was unused for longer."""
    with opened(tmp_path) as store:
        manager = BlockManager(PagedKVCache(5, 16, 1, 8), store=store, model="m")
        for first, count in ((0, 65), (500, 33)):
            manager.allocate(first, range(first, first + count))
            manager.step([(first, range(first, first + count))])
            manager.flush_store()
            manager.free(first)
        assert manager.allocate("again", range(65)) == 64
        assert manager.stats().prefix_cache_hits == 64 and manager.stats().prefix_store_hits == 32


def test_hits_in_memory_count_as_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all prompts begin with stays in the folder, though nobody reads it from there."""
    monkeypatch.setattr(prefix_store, "MARK_SECONDS", 0.0)
    sizes = {"num_blocks": 200, "block_size": 16, "num_kv_heads": 1, "head_size": 8}
    with opened(tmp_path, max_bytes=1 << 19, segment_bytes=1) as store:
        manager = BlockManager(PagedKVCache(**sizes), store=store, model="m")
        for number in range(80):
            tokens = [*range(16), *[number] * 20]
            found = manager.allocate(number, tokens)
            assert found == (16 if number else 0)
            manager.step([(number, tokens[found:])])
            manager.flush_store()
            time.sleep(0.006)  # a clock of files goes by ticks
        assert store.stats().num_evicted_segments > 5
    with opened(tmp_path) as store:
        manager = BlockManager(PagedKVCache(**sizes), store=store, model="m")
        assert [manager.allocate(number, [*range(16), *[number] * 20]) for number in (1, 79)] == [16, 32]


def test_a_damaged_block_is_computed_again(tmp_path: Path) -> None:
    """The prefix ends before it, and is whole again afterwards."""
    for found in (0, 12, 24):
        with opened(tmp_path) as store:
            manager = small(store, 9)
            assert manager.allocate("a", range(25)) == found
            if found < 24:  # the last finds the block in whichever of two segments it looks first
                assert store.stats().num_damaged_blocks == (found == 12)
            assert found == 0 or values(manager, "a") == {1.0}
            compute(manager, "a", range(found, 25))
            manager.flush_store()
        if found == 0:
            (file,) = tmp_path.iterdir()
            data = bytearray(file.read_bytes())
            ones = np.ones(8, np.float32).tobytes()
            at = [i for i in range(0, len(data), 32) if data[i : i + 32] == ones]
            assert len(at) == 6  # V of each block
            data[at[3] + 5] ^= 16
            file.write_bytes(data)


def test_a_reset(tmp_path: Path) -> None:
    """Other weights go by another name, or without the store."""
    with opened(tmp_path) as store:
        manager = small(store, model="first")
        manager.allocate("a")
        compute(manager, "a", range(9))
        manager.free("a")
        manager.flush_store()
        manager.reset_prefix_cache(model="second")
        assert manager.allocate("a", range(9)) == 0
        compute(manager, "a", range(9), 2.0)
        manager.flush_store()
        manager.free("a")
        manager.reset_prefix_cache()
        for _ in range(2):
            assert manager.allocate("a", range(9)) == 0
            compute(manager, "a", range(9), 3.0)
            manager.reset_prefix_cache()
            manager.free("a")
        manager.flush_store()
        assert store.stats().num_written_blocks == 4
        for model, value in (("first", 1.0), ("second", 2.0)):
            manager = small(store, model=model)
            assert manager.allocate("a", range(9)) == 8 and values(manager, "a") == {value}
        with pytest.raises(ValueError, match=r"^model: is given without a store"):
            BlockManager(PagedKVCache(8, 4, 1, 2)).reset_prefix_cache(model="third")


def test_states_and_blocks_go_together(tmp_path: Path) -> None:
    """A prefix is found as far as there is a state, wherever that and the blocks are."""
    sizes, prompt = (40, 16, 1, 2), list(range(300))

    def made(store: PrefixStore, slots: int = 8) -> BlockManager:
        states = [np.zeros((slots, 3), np.float32), np.zeros((slots,), np.float16)]
        return BlockManager(PagedKVCache(*sizes), states=states, state_interval=64, store=store, model="m")

    def go(manager: BlockManager, request: Any, tokens: list[int]) -> None:
        step = manager.step([(request, tokens)])
        start = manager.seq_len(request) - len(tokens)
        for states in manager.states:
            states[step.state_indices[0]] = manager.seq_len(request)
            for _, count, slot in step.checkpoints.tolist():
                states[slot] = start + count
        manager.caches[0].update(*np.ones((2, step.num_tokens, 1, 2), np.float32), step)

    with opened(tmp_path) as store:
        manager = made(store)
        manager.allocate("a", prompt)
        go(manager, "a", prompt)  # 18 blocks, and snapshots after 64, 128, 192 and 256 tokens
        manager.flush_store()
        assert store.stats().num_written_blocks == 22
    for damaged, want in ((False, 256), (True, 192)):
        with opened(tmp_path) as store:
            manager = made(store)
            if damaged:
                (file,) = (x for x in tmp_path.iterdir() if b'"states"' in x.read_bytes()[:2000])
                data = file.read_bytes()
                at = data.index(np.full(3, 256, np.float32).tobytes())
                file.write_bytes(data[:at] + b"x" + data[at + 1 :])
            assert manager.allocate("b", prompt) == want
            assert manager.stats().prefix_store_hits == want
            assert all((x[manager._states.slot[0]] == want).all() for x in manager.states)
            assert manager.allocate("c", prompt[:250]) == 192
            assert manager.allocate("d", prompt[:60]) == 0
    with opened(tmp_path) as store:
        manager = made(store, 1)  # its only slot is another request's
        manager.allocate("a")
        go(manager, "a", [1, 2])
        assert manager.allocate("b", prompt) == 0


def test_whichever_line_fails(tmp_path: Path) -> None:
    """allocate from a store: requests are as they were, and the next call finds it all."""
    prompt = [*range(12), 99]

    def made(store: PrefixStore) -> BlockManager:
        states = [np.zeros((6, 2), np.float32)]
        manager = BlockManager(PagedKVCache(9, 2, 1, 2), states=states, store=store, model="m")
        manager._states.interval = 2
        return manager

    with opened(tmp_path) as store:
        manager = made(store)
        manager.allocate("a")
        compute(manager, "a", prompt)
        manager.flush_store()
        start = made(store)
        start.allocate("other")
        compute(start, "other", range(50, 53), 5.0)
        start.allocate("gone")
        compute(start, "gone", range(60, 64), 6.0)
        start.free("gone")
        was, line, failed = state(start), 0, True
        while failed:
            manager = copy.deepcopy(start)
            with At(line) as point, contextlib.suppress(MemoryError):
                manager.allocate("b", prompt)
            failed = point.failed
            if failed:
                found = state(manager)
                assert found["requests"] == was["requests"] and "b" not in manager._row_of, line
                assert sum(found["ref_cnt"]) == len(found["cached"]) + 2, line
                assert manager.allocate("b", prompt) == 12, line
            assert values(manager, "b") == {1.0} and values(manager, "other") == {5.0}
            line += 1
        assert line > 60


def test_copies(tmp_path: Path) -> None:
    """Each goes on by itself; copies of the caches are what is written then, and read into."""
    with opened(tmp_path) as store:
        manager = small(store)
        manager.allocate("a")
        compute(manager, "a", range(5))
        for number, copied in enumerate((copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)))):
            other = copied(manager)
            assert (other.caches[0] is manager.caches[0]) == (copied is copy.copy)
            other.free("a")
            other.allocate("b")
            compute(other, "b", range(100 * number + 100, 100 * number + 105), 2.0 + number)
            other.flush_store()
            if copied is copy.copy:
                manager = small(store)
                manager.allocate("a")
                compute(manager, "a", range(5))
    with opened(tmp_path) as store:
        manager = small(store)
        for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            other = copied(manager)
            for number in range(3):
                assert other.allocate(number, range(100 * number + 100, 100 * number + 105)) == 4
                assert values(other, number) == {2.0 + number}
            assert not manager.caches[0].key_cache.any()


def test_a_closed_store(tmp_path: Path) -> None:
    """Serving goes on without it."""
    with opened(tmp_path) as store:
        manager = small(store)
    manager.allocate("a", range(9))
    compute(manager, "a", range(9))
    manager.flush_store()
    assert store.stats().num_skipped_blocks == 2
    assert manager.allocate("b", range(9)) == 8 and manager.stats().prefix_store_hits == 0


def test_what_is_refused(tmp_path: Path) -> None:
    cache = PagedKVCache(4, 4, 1, 2)
    with opened(tmp_path) as store:
        for options, error, words in (
            ({"store": store}, ValueError, "model: is empty"),
            ({"store": store, "model": 3}, TypeError, "model: expected a str, got int"),
            ({"store": "/a/path", "model": "m"}, TypeError, "store: expected PrefixStore, got str"),
            ({"model": "m"}, ValueError, "model: is given without a store"),
            ({"store": store, "model": "m", "enable_prefix_caching": False}, ValueError, "store: is given, and enable"),
            ({"store": store, "model": "m", "decode_context_parallel_size": 2}, ValueError, "store: decode_context_pa"),
        ):
            with pytest.raises(error, match=f"^{words}"):
                BlockManager(cache, **options)  # type: ignore[arg-type]


def random_process(path: Path, seed: int, seconds: float, kind_of: type[Blocks]) -> None:
    """Publishes, finds and forgets at random; all that is found is right."""
    rng = random.Random(seed)
    with opened(path, segment_bytes=77 * rng.choice([2, 5, 20]), max_bytes=1 << 20) as store:
        blocks, end = kind_of(store), time.monotonic() + seconds
        while time.monotonic() < end:
            numbers = [rng.randrange(200) for _ in range(rng.randrange(1, 8))]
            kind = rng.random()
            if kind < 0.4:
                fresh = {n % 63 + 1: n for n in numbers}  # block 0 is what is read into
                blocks.stored.forget([*fresh])
                for block, number in fresh.items():
                    blocks.compute(block, number)
                blocks.stored.write([(block, name_of(number)) for block, number in fresh.items()])
            elif kind < 0.8:
                blocks.stored.look()
                blocks.found(numbers)
            elif kind < 0.9:
                store.flush()
            else:
                time.sleep(rng.random() / 50)
        stats = store.stats()
        assert not stats.num_damaged_blocks and not stats.num_unreadable_segments, stats


@pytest.mark.parametrize(("count", "seconds"), [(4, 2.0), pytest.param(8, 40.0, marks=pytest.mark.slow)])
def test_processes_beside_one_another(tmp_path: Path, count: int, seconds: float) -> None:
    """Some of them are killed, and others come. Every other one maps what it finds."""
    rng, living, ended, begun = random.Random(3), list[int](), list[int](), 0
    end = time.monotonic() + seconds
    while living or time.monotonic() < end:
        while len(living) < count and time.monotonic() < end:
            begun += 1
            process = os.fork()
            if not process:
                try:
                    random_process(tmp_path, begun, 0.8, (Blocks, MappedBlocks)[begun % 2])
                    os._exit(0)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
            living.append(process)
        time.sleep(0.1)
        if rng.random() < 0.2:
            os.kill(rng.choice(living), signal.SIGKILL)
        for process in living.copy():
            gone, status = os.waitpid(process, os.WNOHANG)
            if gone:
                living.remove(process)
                ended.append(status)
    assert set(ended) == {0, signal.SIGKILL} and len(ended) == begun > count
    with opened(tmp_path, max_bytes=1 << 20) as store:
        assert len(Blocks(store).found(range(200))) > 10
