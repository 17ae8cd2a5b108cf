# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prefix store that are attended where they lie in its files: the same bits as in memory, whoever writes,
evicts, forks or cuts files meanwhile."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn import PagedKVCache, UnavailableError, _mapping, reshape_and_cache
from cpu_attn._native import lib
from cpu_attn.serving import BlockManager, PrefixStore, store_map
from cpu_attn.storage import convert

from ..harness.store_folders import Blocks, MappedBlocks, name_of, opened
from ..programs.blocks_failing import At, state
from ..programs.prefix_store_serving import BLOCK_SIZE, KINDS, TOKENS, made, run, tokens_of
from .test_prefix_store import FOUND, compute, serving, values

pytestmark = pytest.mark.filterwarnings("ignore:prefix store:RuntimeWarning")
SIZES = {"num_blocks": 8, "block_size": 4, "num_kv_heads": 1, "head_size": 2}


def small(store: PrefixStore, store_blocks: int = 512, **sizes: Any) -> BlockManager:
    return BlockManager(PagedKVCache(**{**SIZES, **sizes}, store_blocks=store_blocks), store=store, model="m")


def published(path: Path, prompts: dict[float, range], **options: Any) -> None:
    """A folder in which the keys and values of each prompt are a number."""
    with opened(path, **options) as store:
        for value, tokens in prompts.items():
            manager = small(store, 0, num_blocks=40)
            manager.allocate("a")
            compute(manager, "a", tokens, value)
            manager.flush_store()


def mapped(manager: BlockManager, request: Any) -> list[bool]:
    """Which of its blocks are."""
    return [block >= manager.num_blocks for block in manager.get_block_ids(request).tolist()]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_attention(tmp_path: Path, kind: str, verify: bool) -> None:
    """All bits, and not a block is copied."""
    alone = run(BlockManager(made(kind)), tokens_of(0))[1]
    with opened(tmp_path, segment_bytes=100_000) as store:
        manager = BlockManager(made(kind), store=store, model="m")
        run(manager, tokens_of(0))
        manager.flush_store()
    with opened(tmp_path, segment_bytes=100_000, verify=verify) as store:
        manager = BlockManager(made(kind, store_blocks=1 << 16), store=store, model="m")
        assert run(manager, tokens_of(0)) == (FOUND, alone)
        stats, count = manager.stats(), FOUND // BLOCK_SIZE
        assert stats.prefix_store_hits == FOUND and stats.num_mapped_blocks == store.stats().num_mapped_blocks == count
        assert stats.num_used_blocks == 1 and stats.num_cached_blocks == store.stats().num_read_blocks == 0
        assert mapped(manager, "a") == [True] * count + [False]


def test_a_second_process(tmp_path: Path) -> None:
    alone = run(BlockManager(made("bfloat16")), tokens_of(0))[1]
    assert serving(tmp_path, "bfloat16", 0) == (0, alone, 9)
    with opened(tmp_path) as store:
        manager = BlockManager(made("bfloat16", store_blocks=1 << 15), store=store, model="m")
        assert run(manager, tokens_of(0)) == (FOUND, alone) and TOKENS > FOUND
        assert manager.stats().num_mapped_blocks == FOUND // BLOCK_SIZE


def test_what_is_written_to_is_copied(tmp_path: Path) -> None:
    """Requests that go on inside a mapped block leave it alone: after truncate, after a fork, one by one."""
    published(tmp_path, {1.0: range(13)})
    (before,) = (file.read_bytes() for file in tmp_path.iterdir())
    with opened(tmp_path) as store:
        manager = small(store)
        assert manager.allocate("a", range(13)) == 12 and mapped(manager, "a") == [True] * 3
        manager.truncate("a", 10)
        manager.fork("a", "b")
        manager.step([("a", [10])])  # the prompt's, which is not computed
        manager.truncate("a", 0)
        manager.free("a")
        assert manager.allocate("c", range(13)) == 12
        compute(manager, "b", [10, 11, 12], 2.0)
        assert mapped(manager, "b") == [True, True, False, False]
        key, value = manager.caches[0].gather(manager.get_block_ids("b"), 13)
        for x in (key, value):
            assert (x[:10] == 1).all() and (x[10:] == 2).all()
        assert values(manager, "c") == {1.0}
        manager.swap_out("c")
        manager.swap_in("c")
        assert values(manager, "c") == {1.0} and mapped(manager, "c") == [True] * 3
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_the_last_who_has_it_copies_too(tmp_path: Path) -> None:
    """Alone, and with a fork in one step, since the store finds the block again."""
    published(tmp_path, {1.0: range(13)})
    with opened(tmp_path) as store:
        for others in ((), ("b",)):
            manager = small(store)
            manager.allocate("a", range(13))
            manager.truncate("a", 10)
            for other in others:
                manager.fork("a", other)
            step = manager.step([(request, [10]) for request in ("a", *others)])
            cache, rows = manager.caches[0], np.full((2, step.num_tokens, 1, 2), 2, np.float32)
            cache.update(*rows, step)
            for request in ("a", *others):
                assert mapped(manager, request) == [True, True, False]
                assert cache.gather(manager.get_block_ids(request), 11)[0][:, 0, 0].tolist() == [1.0] * 10 + [2.0]
            assert manager.allocate("again", range(13)) == 12 and values(manager, "again") == {1.0}


def test_slots_given_by_hand(tmp_path: Path) -> None:
    """A cache refuses those of mapped blocks. A call that knows no cache writes to copies of pages."""
    published(tmp_path, {1.0: range(13)})
    (before,) = (file.read_bytes() for file in tmp_path.iterdir())
    with opened(tmp_path) as store:
        manager = small(store)
        manager.allocate("a", range(13))
        cache, (block, *_) = manager.caches[0], manager.get_block_ids("a").tolist()
        rows = np.full((2, 1, 1, 2), 9, np.float32)
        slots = np.array([block * 4])
        text = rf"^slot_mapping\[0\]: {block * 4}, expected less than num_blocks \* block_size = 32"
        plan = cache.plan(np.array([0, 1], np.int32), np.array([1], np.int32), 1)
        with pytest.raises(ValueError, match=text):
            cache.update(*rows, slots)
        with pytest.raises(ValueError, match=text):
            cache.update_and_attend(*rows, rows[0], slots, np.array([[block]], np.int32), plan)
        with pytest.raises(ValueError, match=rf"^pairs\[0\]\[1\]: block {block} is outside 0..7"):
            cache.copy_blocks([(0, block)])
        assert values(manager, "a") == {1.0}
        cache.copy_blocks([(block, 5)])
        assert (cache.gather(np.array([5], np.int32), 4)[0] == 1).all()
        for each in (block, block + 3, 8, 8 + 511):  # mapped, and where nothing is
            reshape_and_cache(*rows, cache.key_cache, cache.value_cache, np.array([each * 4]), cache.isa)
            assert (cache.gather(np.array([each], np.int32), 1)[0] == 9).all()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


PROMPTS = {float(i): range(100 * i, 100 * i + 17) for i in range(1, 7)}  # four blocks each, a segment


def test_room_for_few(tmp_path: Path) -> None:
    """Segments give way that were unused for longest, none that a request has; what finds no room is copied."""
    published(tmp_path, PROMPTS, segment_bytes=256 * 4)
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        unit = small(store)._pool.room.unit  # type: ignore[union-attr]
        manager = small(store, 3 * unit + unit - 8)
        for value in (1.0, 2.0, 3.0):
            assert manager.allocate(value, PROMPTS[value]) == 16 and all(mapped(manager, value))
        manager.free(2.0)
        manager.free(1.0)
        manager.allocate("again", PROMPTS[1.0])
        manager.free("again")
        assert manager.allocate(4.0, PROMPTS[4.0]) == 16 and all(mapped(manager, 4.0))  # in the place of 2
        assert manager.stats().num_mapped_blocks == 12 and manager.stats().num_evictions == 0
        assert manager.allocate(5.0, PROMPTS[5.0]) == 16 and all(mapped(manager, 5.0))  # in the place of 1
        assert manager.allocate(6.0, PROMPTS[6.0]) == 16 and not any(mapped(manager, 6.0))
        for value in (3.0, 4.0, 5.0, 6.0):
            assert values(manager, value) == {value}
        assert store.stats().num_mapped_blocks == 20 and store.stats().num_read_blocks == 4
        manager.free(3.0)
        assert manager.allocate(1.0, PROMPTS[1.0]) == 16 and all(mapped(manager, 1.0)) and values(manager, 1.0) == {1.0}


def test_what_is_found_stays(tmp_path: Path) -> None:
    """The end of a prefix is copied where it would be mapped in the place of its beginning."""
    published(tmp_path, {1.0: range(33)}, segment_bytes=256 * 4)
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        unit = small(store)._pool.room.unit  # type: ignore[union-attr]
        manager = small(store, 2 * unit - 8)
        assert manager.allocate("a", range(17)) == 16
        manager.free("a")
        assert manager.allocate("b", range(33)) == 32
        assert mapped(manager, "b") == [True] * 4 + [False] * 4 and values(manager, "b") == {1.0}


def test_what_is_being_found_stays(tmp_path: Path) -> None:
    """A segment that is mapped already does not give way to the next one of the same prompt."""
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        manager = small(store, 0, num_blocks=40)
        manager.allocate("a")
        compute(manager, "a", range(16), 1.0)
        compute(manager, "a", range(16, 33), 2.0)
        manager.flush_store()
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        unit = small(store)._pool.room.unit  # type: ignore[union-attr]
        manager = small(store, 2 * unit - 8)
        assert manager.allocate("a", range(17)) == 16
        manager.free("a")
        manager._pool.forget(list(manager._pool.hash_of))
        manager._journal.clear()
        assert manager.allocate("b", range(33)) == 32 and mapped(manager, "b") == [True] * 4 + [False] * 4
        key, value = manager.caches[0].gather(manager.get_block_ids("b"), 32)
        assert all((x[:16] == 1).all() and (x[16:] == 2).all() for x in (key, value))


def test_segments_of_other_sizes(tmp_path: Path) -> None:
    """One takes the place of several, and is refused where it fits nowhere."""
    for value, tokens in PROMPTS.items():
        published(tmp_path, {value: tokens}, segment_bytes=256 * (4 if value < 4 else 80))
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        unit = small(store)._pool.room.unit  # type: ignore[union-attr]
        manager = small(store, 4 * unit - 8)
        assert unit < 80 <= 3 * unit
        for value in (1.0, 2.0, 3.0, 4.0, 5.0, 2.0):
            assert manager.allocate(value, PROMPTS[value]) == 16 and all(mapped(manager, value))
            assert values(manager, value) == {value}
            manager.free(value)
    with opened(tmp_path, segment_bytes=256 * 80) as store:
        least = 8 + (-(-8 // unit) + -(-80 // unit)) * unit - 16
        small(store, least)
        text = rf"^store_blocks: {least - 1}, expected at least {least}: by its segment_bytes .* has 80 blocks"
        with pytest.raises(ValueError, match=text):
            small(store, least - 1)


def test_leases(tmp_path: Path) -> None:
    """Another process removes what somebody has mapped after all else. What it removes stays while it is mapped, and a
    lease ends with its process."""
    options: Any = {"segment_bytes": 256 * 4, "max_bytes": 7 * 69632}
    published(tmp_path, PROMPTS, **options)
    files = {name.name for name in tmp_path.iterdir()}

    def write(numbers: range) -> set[str]:
        """Writes more, and gives what was there at the beginning and is left."""
        published(tmp_path, {1000.0 + n: range(10000 + 100 * n, 10017 + 100 * n) for n in numbers}, **options)
        return files & {name.name for name in tmp_path.iterdir()}

    with opened(tmp_path, **options) as store:
        manager = small(store)
        assert manager.allocate("a", PROMPTS[1.0]) == 16
        (name,) = manager._pool.room.runs  # type: ignore[union-attr]
        os.utime(tmp_path / name, (1, 1))  # as if it was unused for longest
        assert write(range(40)) == {name}
        assert not store._folder.remove(name, leased=False) and store._folder.remove(name)
        assert values(manager, "a") == {1.0}
        manager.free("a")
        assert manager.allocate("b", PROMPTS[1.0]) == 16 and values(manager, "b") == {1.0}
    here, there = os.pipe()
    (name, *_) = (each.name for each in tmp_path.iterdir())
    process = os.fork()
    if not process:
        with opened(tmp_path, **options) as store:
            blocks = store._folder.open_file(name)
            os.write(there, bytes([store_map.lease(blocks)]))
            signal.pause()
    assert os.read(here, 1) == b"\1"
    with opened(tmp_path, **options) as store:
        assert not store._folder.remove(name, leased=False)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert store._folder.remove(name, leased=False)


def test_a_segment_that_is_appended_to(tmp_path: Path) -> None:
    """It can be mapped before it is full; what comes later is found in it, too, and the lease comes once it can."""
    with opened(tmp_path, segment_bytes=256 * 100) as writer, opened(tmp_path, segment_bytes=256 * 100) as reader:
        theirs, ours = small(writer, 0, num_blocks=40), small(reader)
        for number in range(3):
            tokens = range(100 * number, 100 * number + 9)
            theirs.allocate(number)
            compute(theirs, number, tokens, float(number))
            theirs.flush_store()
            reader._looked_at = -1.0
            assert ours.allocate(number, tokens) == 8 and all(mapped(ours, number))
            assert values(ours, number) == {float(number)}
        (segment,) = ours._pool.room.runs.values()  # type: ignore[union-attr]
        assert not segment.leased
        writer.close()
        ours.allocate("again", range(9))
        assert segment.leased


def test_a_file_is_cut(tmp_path: Path) -> None:
    """Before it is mapped: what is left of it is copied, the rest is computed again, and nobody is killed."""
    published(tmp_path, {1.0: range(21)})
    (file,) = tmp_path.iterdir()
    with opened(tmp_path) as store:
        manager = small(store)
        os.truncate(file, 131072 + 300)
        with pytest.warns(RuntimeWarning, match="cannot map a file, and copies its blocks: .*bytes, expected"):
            found = manager.allocate("a", range(21))
        assert found == 8 and not any(mapped(manager, "a")) and values(manager, "a") == {1.0}
        assert store.stats().num_faults == 1


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL, errno.EACCES])
def test_a_system_that_refuses(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To map any of the arrays: all of it is copied."""
    published(tmp_path, {1.0: range(21)})
    for call in range(2):
        left = [call]

        def map_file(*given: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
            _mapping.map_file(*given)

        monkeypatch.setattr(store_map, "map_file", map_file)
        with opened(tmp_path) as store:
            manager = small(store)
            with pytest.warns(RuntimeWarning, match="cannot map a file"):
                assert manager.allocate("a", range(21)) == 20
            assert not any(mapped(manager, "a")) and values(manager, "a") == {1.0}
            assert store.stats().num_faults == 1 and store.stats().num_read_blocks == 5


def test_reads_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO is a miss, where the kernel would else kill who touches the page."""
    published(tmp_path, {1.0: range(21)})

    def read(self: Any, *given: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, opened(tmp_path) as store:
        patch.setattr(store_map.Room, "read", read)
        manager = small(store)
        assert manager.allocate("a", range(21)) == 0 and store.stats().num_faults == 1
    pages = _mapping.reserve(1 << 16)
    at = np.frombuffer(pages, np.uint8).ctypes.data
    with (tmp_path / "short").open("w+b") as file:
        _mapping.map_file(at, 1 << 16, file.fileno(), 0)  # nothing is there
        if lib.ca_read_pages(at, 1 << 16) != errno.EINVAL:  # of Linux before 5.14
            with pytest.raises(OSError, match=r"Bad address|Input/output"):
                _mapping.read_pages(at, 1 << 16)
    _mapping.unmap(at, 1 << 16)
    assert not np.frombuffer(pages, np.uint8).any()
    with pytest.raises(OSError, match="Bad file descriptor"):
        _mapping.map_file(at, 1 << 16, 1 << 20, 0)
    assert not np.frombuffer(pages, np.uint8).any()  # and no hole


def test_a_damaged_block(tmp_path: Path) -> None:
    """The prefix ends before it; who takes files as they are, does."""
    published(tmp_path, {1.0: range(25)})
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    ones = np.ones(8, np.float32).tobytes()
    at = [i for i in range(0, len(data), 32) if data[i : i + 32] == ones]
    assert len(at) == 6  # V of each block
    data[at[3]] ^= 16
    file.write_bytes(data)
    for verify, found in ((True, 12), (False, 24)):
        with opened(tmp_path, verify=verify) as store:
            manager = small(store)
            assert manager.allocate("a", range(25)) == found
            assert store.stats().num_damaged_blocks == verify and (values(manager, "a") == {1.0}) == verify


def test_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path, {1.0: range(25)})
    seen = list[int]()
    original = store_map.Room.is_right

    def is_right(self: Any, run: Any, record: Any) -> bool:
        seen.append(record.place)
        return original(self, run, record)

    monkeypatch.setattr(store_map.Room, "is_right", is_right)
    with opened(tmp_path) as store:
        manager = small(store)
        for tokens in (range(9), range(25), range(17)):
            manager.allocate("a", tokens)
            manager.truncate("a", 0)
            manager.free("a")
            manager._pool.forget(list(manager._pool.hash_of))
            manager._journal.clear()
        assert seen == [*range(6)]


def test_another_file_of_the_name(tmp_path: Path) -> None:
    """What is mapped is of the file that was there before: blocks of the new one are looked at again."""
    published(tmp_path / "old", {1.0: range(13)})
    published(tmp_path / "new", {2.0: range(50, 63)})
    (old,), (new,) = ([*(tmp_path / name).iterdir()] for name in ("old", "new"))
    with opened(tmp_path / "old") as store:
        manager = small(store)
        assert manager.allocate("a", range(13)) == 12
        new.rename(old)
        store._segments.clear()
        store._indexes[manager._pool.stored.layout.fingerprint].clear()  # type: ignore[union-attr]
        store._looked_at = -1.0
        assert manager.allocate("b", range(50, 63)) == 0 and store.stats().num_damaged_blocks == 1
        assert values(manager, "a") == {1.0}


def test_copies(tmp_path: Path) -> None:
    """Copies of managers go on over copies of what was mapped, whatever becomes of the first and its files."""
    published(tmp_path, PROMPTS, segment_bytes=256 * 4)
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        manager = small(store)
        for value in (1.0, 2.0):
            manager.allocate(value, PROMPTS[value])
        manager.free(2.0)
        manager.allocate("begun", PROMPTS[4.0][:9])
        others = [copy.deepcopy(manager), pickle.loads(pickle.dumps(manager))]
        del manager
        for other in others:  # what nobody has looked at before is read from the file
            assert other.allocate(4.0, PROMPTS[4.0]) == 16 and mapped(other, 4.0) == [True, True, False, False]
            assert values(other, 4.0) == {4.0}
        for file in tmp_path.iterdir():
            file.unlink()
        for other in others:
            assert values(other, 1.0) == {1.0}
            assert other.allocate(2.0, PROMPTS[2.0]) == 16 and values(other, 2.0) == {2.0}
            assert other.allocate(3.0, PROMPTS[3.0]) == 0
    published(tmp_path, {3.0: PROMPTS[3.0]}, segment_bytes=256 * 4)
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        manager = small(store)
        assert manager.allocate(3.0, PROMPTS[3.0]) == 16
        twin = copy.copy(manager)
        assert twin.caches[0] is manager.caches[0] and all(mapped(twin, 3.0)) and values(twin, 3.0) == {3.0}


def test_after_fork(tmp_path: Path) -> None:
    """A child attends what its parent has mapped, and maps more."""
    published(tmp_path, PROMPTS, segment_bytes=256 * 4)
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        manager = small(store)
        manager.allocate(1.0, PROMPTS[1.0])
        process = os.fork()
        if not process:
            with contextlib.suppress(BaseException):
                signal.alarm(20)
                manager._pool.stored.look()  # type: ignore[union-attr]
                good = values(manager, 1.0) == {1.0} and manager.allocate(2.0, PROMPTS[2.0]) == 16
                manager.free(1.0)
                os._exit(0 if good and all(mapped(manager, 2.0)) and values(manager, 2.0) == {2.0} else 1)
            os._exit(2)
        assert os.waitpid(process, 0)[1] == 0
        assert values(manager, 1.0) == {1.0} and manager.allocate(3.0, PROMPTS[3.0]) == 16


def test_other_weights(tmp_path: Path) -> None:
    """After a reset what was mapped is found no more, and requests that have it go on."""
    published(tmp_path, {1.0: range(13)})
    with opened(tmp_path) as store:
        manager = small(store)
        manager.allocate("a", range(13))
        manager.reset_prefix_cache(model="n")
        assert manager.stats().num_mapped_blocks == 0 and values(manager, "a") == {1.0}
        assert manager.allocate("b", range(13)) == 0
        compute(manager, "b", range(13), 2.0)
        manager.free("a")
        manager.reset_prefix_cache()
        assert manager.allocate("c", range(13)) == 0 and values(manager, "b") == {2.0}


def test_closed_files(tmp_path: Path) -> None:
    """Whoever is gone has no file open."""
    published(tmp_path, PROMPTS, segment_bytes=256 * 4)
    before = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path, segment_bytes=256 * 4) as store:
        manager = small(store)
        for value, tokens in PROMPTS.items():
            manager.allocate(value, tokens)
        assert len(os.listdir("/proc/self/fd")) == before + 1 + len(PROMPTS)
        del manager
    assert len(os.listdir("/proc/self/fd")) == before


def test_whichever_line_fails(tmp_path: Path) -> None:
    """allocate that maps in the place of another segment: requests are as they were, the next call finds it all."""
    published(tmp_path, {1.0: range(13), 2.0: range(50, 63), 3.0: range(70, 83)}, segment_bytes=256 * 3)

    def begun(store: PrefixStore) -> BlockManager:
        manager = small(store, 64 - 8)
        for value, tokens in ((2.0, range(50, 63)), (3.0, range(70, 83))):
            assert manager.allocate(value, tokens) == 12
            manager.free(value)
        manager.allocate("other")
        compute(manager, "other", range(90, 93), 5.0)
        return manager

    with opened(tmp_path, segment_bytes=256 * 3) as store:
        assert begun(store)._pool.room.unit == 32  # type: ignore[union-attr]
        line, failed = 0, True
        while failed:
            manager = begun(store)
            was = state(manager)
            with At(line) as point, contextlib.suppress(MemoryError):
                manager.allocate("b", range(13))
            failed = point.failed
            if failed:
                found = state(manager)
                assert found["requests"] == was["requests"] and "b" not in manager._row_of, line
                assert manager.allocate("b", range(13)) == 12, line
            assert values(manager, "b") == {1.0} and values(manager, "other") == {5.0}, line
            for value, tokens in ((2.0, range(50, 63)), (3.0, range(70, 83))):
                assert manager.allocate(value, tokens) == 12 and values(manager, value) == {value}, line
                manager.free(value)
            line += 1
        assert line > 100


def test_caches(tmp_path: Path) -> None:
    """What else there is to do with a cache leaves the blocks of files out."""
    cache, plain = PagedKVCache(**SIZES, store_blocks=100), PagedKVCache(**SIZES)
    rows = np.random.default_rng(0).standard_normal((2, 32, 1, 2), np.float32)
    for each in (cache, plain):
        each.update(*rows, np.arange(32))
    assert cache.num_blocks == 8 and cache.key_cache.shape[0] == 108 and "100 store blocks" in repr(cache)
    assert cache.descriptor == plain.descriptor and cache.key_cache.ctypes.data % 4096 == 0
    pytest.importorskip("safetensors")
    cache.save(tmp_path / "file")
    for other in (PagedKVCache.load(tmp_path / "file"), convert(cache, kv_cache_layout="NHD"), copy.deepcopy(cache)):
        found = other.gather(np.arange(8, dtype=np.int32), 32)
        assert (found[0] == rows[0]).all() and (found[1] == rows[1]).all()
    for value, error, text in (
        (-1, ValueError, r"store_blocks: -1 is outside 0..2147483639"),
        ("3", TypeError, "store"),
    ):
        with pytest.raises(error, match=f"^{text}"):
            PagedKVCache(**SIZES, store_blocks=value)  # type: ignore[arg-type]


def test_nodes() -> None:
    """Blocks of files count to the first node, and are planned like others."""
    cache = PagedKVCache(**SIZES, store_blocks=4)
    assert cache.block_nodes is None
    for numa in ("interleave", "blocks"):
        with contextlib.suppress(UnavailableError):
            PagedKVCache(**{**SIZES, "num_blocks": 0}, store_blocks=4, numa=numa)
            cache = PagedKVCache(**SIZES, store_blocks=4, numa=numa)
            assert cache.block_nodes is None or cache.block_nodes.tolist()[8:] == [cache.block_nodes[0]] * 4
    cache.block_nodes = np.array([0] * 4 + [1] * 4 + [0] * 4, np.int32)
    with pytest.raises(ValueError, match=r"^model: is given without a store"):
        BlockManager(cache, model="m")
    assert BlockManager(cache)._pool.node_of.tolist() == [0] * 4 + [1] * 4


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is mapped over memory that was not reserved for it."""
    caches = [PagedKVCache(**SIZES, store_blocks=n) for n in (512, 0)]
    with opened(tmp_path) as store:
        with pytest.raises(ValueError, match=r"^caches\[1\]: store_blocks 0, expected 512"):
            BlockManager(caches, store=store, model="m")
        for replaced in (np.zeros_like(caches[0].key_cache), caches[0].key_cache.copy()):
            other = copy.copy(caches[0])
            other.value_cache = replaced
            with pytest.raises(ValueError, match=r"^caches: an array is not the memory that its cache was made with"):
                BlockManager(other, store=store, model="m")
    monkeypatch.setattr(_mapping, "lib", type("Lib", (), {"ca_no_reserve": lambda: 0}))
    with pytest.raises(UnavailableError, match=r"^store_blocks: this system maps no file"):
        PagedKVCache(**SIZES, store_blocks=1)


def test_blocks_without_a_page_in_common(tmp_path: Path) -> None:
    """Of 36 and of 41 bytes: runs begin where both begin at pages."""
    with opened(tmp_path) as store:
        blocks = Blocks(store)
        blocks.put(range(50, 60))
        store.flush()
        there = MappedBlocks(store)
        assert there.found(range(50, 60)) == [*range(50, 60)]
        (segment,) = there.pool.room.runs.values()  # type: ignore[union-attr]
        assert segment.blocks.start % 4096 == 0 and store.stats().num_mapped_blocks == 10
        assert name_of(50) not in there.pool.block_of
