# SPDX-License-Identifier: Apache-2.0
"""Files of a prefix store that changed, processes and machines that stop, and systems that refuse: a block is found
with the bytes that belong to its name, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import struct
import threading
import time
import traceback
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cpu_attn.serving import PrefixStore, prefix_store, store_folder
from cpu_attn.serving.store_segment import HEAD, RECORD

from ..harness.store_folders import Blocks, DyingSystem, MappedBlocks, Unsynced, always, failing, name_of, opened

pytestmark = pytest.mark.filterwarnings("ignore:prefix store:RuntimeWarning")


def written(path: Path, numbers: range, **options: Any) -> Path:
    """A folder with these blocks in one segment, which is given."""
    with opened(path, **options) as store:
        blocks = Blocks(store)
        blocks.put(numbers)
        store.flush()
        assert store.stats().num_written_blocks == len(numbers)
    (file,) = path.glob("*.segment")
    return file


def found_in(path: Path, numbers: range, kind: type[Blocks] = Blocks) -> list[int]:
    with opened(path) as store:
        return kind(store).found(numbers)


@pytest.fixture(params=[Blocks, MappedBlocks], ids=["copied", "mapped"])
def kind(request: pytest.FixtureRequest) -> type[Blocks]:
    found: type[Blocks] = request.param
    return found


class Parts:
    """Where what is in a segment, read by the table of docs/prefix_store.md alone."""

    def __init__(self, data: bytes) -> None:
        magic, version, self.capacity, num_arrays, num_text = struct.unpack_from("<8sIIII", data)
        assert (magic, version) == (b"CPUATTNS", 1)
        nbytes = struct.unpack_from(f"<{num_arrays}Q", data, 24)
        text = 24 + 8 * num_arrays
        self.about = json.loads(data[text : text + num_text])
        self.header = text + num_text + 16
        self.records = -(-self.header // 64) * 64
        end = self.records + 64 * self.capacity
        self.regions = []
        for size in nbytes:
            begin = -(-end // 65536) * 65536
            self.regions.append((begin, size))
            end = begin + size * self.capacity
        self.size = -(-end // 65536) * 65536

    def owner(self, offset: int) -> int | str:
        """Which place the byte belongs to, "header", or "nothing"."""
        if offset < self.header:
            return "header"
        if self.records <= offset < self.records + 64 * self.capacity:
            return (offset - self.records) // 64
        for begin, size in self.regions:
            if begin <= offset < begin + size * self.capacity:
                return (offset - begin) // size
        return "nothing"


NUMBERS = range(8)


def test_the_format(tmp_path: Path) -> None:
    """It is as the page says: blocks of one array lie one after the other from a page on, and records name them."""
    data = written(tmp_path, NUMBERS).read_bytes()
    parts = Parts(data)
    assert parts.about == {"model": "m", "nbytes": [36, 41]} and parts.size == len(data)
    with opened(tmp_path) as store:
        blocks = Blocks(store)
        for number in NUMBERS:
            assert data[parts.records + 64 * number :].startswith(name_of(number))
            for (begin, size), content in zip(parts.regions, blocks.bytes_of(number), strict=True):
                assert begin % 65536 == 0
                assert data[begin + size * number :][:size] == content.tobytes()


def interesting(parts: Parts) -> list[int]:
    """All bytes that something was written to, and some behind them."""
    ranges = [(0, parts.records + 64 * 9), *((begin, begin + size * 9) for begin, size in parts.regions)]
    return [offset for first, end in ranges for offset in range(first, end)]


def test_flipped_bits(tmp_path: Path, kind: type[Blocks]) -> None:
    """A bit of each byte: who loses it is missed, and all others are found."""
    file = written(tmp_path, NUMBERS)
    data, rng = file.read_bytes(), random.Random(0)
    parts = Parts(data)
    for offset in interesting(parts):
        with file.open("r+b") as there:
            there.seek(offset)
            there.write(bytes([data[offset] ^ 1 << rng.randrange(8)]))
        owner = parts.owner(offset)
        lost = NUMBERS if owner == "header" else [owner]
        assert found_in(tmp_path, NUMBERS, kind) == [n for n in NUMBERS if n not in lost], offset
        with file.open("r+b") as there:
            there.seek(offset)
            there.write(data[offset : offset + 1])
    assert found_in(tmp_path, NUMBERS) == [*NUMBERS]


def test_cut_files(tmp_path: Path, kind: type[Blocks]) -> None:
    """A file that is shorter than it was is not read. One that is cut after it was looked at gives what is left."""
    file = written(tmp_path, NUMBERS)
    data = file.read_bytes()
    parts = Parts(data)
    rng = random.Random(1)
    cuts = {*rng.sample(interesting(parts), 300), *rng.sample(range(len(data)), 100), 0, len(data) - 1}
    for size in sorted(cuts):
        file.write_bytes(data)
        with opened(tmp_path) as store:
            blocks = kind(store)
            os.truncate(file, size)
            whole = [n for n in NUMBERS if all(begin + length * (n + 1) <= size for begin, length in parts.regions)]
            assert blocks.found(NUMBERS) == whole
            assert store.stats().num_damaged_blocks == len(NUMBERS) - len(whole)
        assert found_in(tmp_path, NUMBERS, kind) == []
    file.write_bytes(data + b"more")
    assert found_in(tmp_path, NUMBERS) == [*NUMBERS]


def mutated(data: bytearray, rng: random.Random, offsets: list[int]) -> None:
    """Any damage: flipped bits, runs of one byte, parts of the file in other places of it."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, kind = rng.choice(offsets), rng.randrange(4)
        length = min(rng.choice([1, 4, 16, 64, 200]), len(data) - at)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + length] = bytes([rng.choice([0, 255, rng.randrange(256)])]) * length
        elif kind == 2:
            data[at : at + length] = rng.randbytes(length)
        else:
            other = rng.choice(offsets)
            part = data[other : other + length]
            data[at : at + len(part)] = part


@pytest.mark.parametrize("mutations", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_any_damage(tmp_path: Path, mutations: int, kind: type[Blocks]) -> None:
    """Also where records and blocks of one segment stand in another's place."""
    file = written(tmp_path, NUMBERS)
    data, rng = file.read_bytes(), random.Random(2)
    offsets, missed = interesting(Parts(data)), 0
    with file.open("r+b", buffering=0) as there:
        for _ in range(mutations):
            changed = bytearray(data)
            mutated(changed, rng, offsets)
            end = max(offsets) + 300
            there.seek(0)
            there.write(changed[:end])
            missed += len(NUMBERS) - len(found_in(tmp_path, NUMBERS, kind))
    assert missed > mutations / 2


def child_of(work: Any) -> tuple[int, bytes]:
    """What a forked child's work wrote into a pipe before it ended, and by which signal it did."""
    here, there = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(here)
            signal.alarm(20)
            work(lambda number: os.write(there, bytes([number])))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        said = pipe.read()
    return os.waitpid(process, 0)[1], said


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    """What was flushed is found, and all that is found is right. Nobody waits for a lock of the dead."""
    for calls in count():
        path = tmp_path / str(calls)

        def work(say: Any, path: Path = path, calls: int = calls) -> None:
            with opened(path, segment_bytes=77 * 3) as store:  # three blocks in a segment
                blocks = Blocks(store)
                store_folder.os = DyingSystem(calls)  # type: ignore[attr-defined]
                for number in range(0, 8, 2):
                    blocks.put([number, number + 1])
                    store.flush()
                    say(number)

        status, said = child_of(work)
        with opened(path, max_bytes=1 << 20) as store:
            blocks = Blocks(store)
            found = blocks.found(range(8))
            assert {*said, *(number + 1 for number in said)} <= {*found}
            blocks.put([*range(8)])
            store.flush()
            stats = store.stats()
            assert blocks.found(range(8)) == [*range(8)] and stats.num_written_blocks == 8 - len(found)
            assert not stats.num_unreadable_segments and not stats.num_faults
        if status == 0:
            assert len(said) == 4
            break
        assert status == signal.SIGKILL
    assert calls > 60


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)], ids=str)
def test_power_is_lost(tmp_path: Path, seeds: range) -> None:
    """Of what was not synced any part may be missing."""
    lost = 0
    for seed in seeds:
        path, rng = tmp_path / str(seed), random.Random(seed)
        disks: list[Unsynced] = []

        class Losing(Unsynced):
            stop = rng.randrange(1, 14)

            def __init__(self, path: Any, disks: list[Unsynced] = disks) -> None:
                super().__init__(path)
                disks.append(self)

            def sync(self, fd: int) -> None:
                self.stop -= 1
                if self.stop <= 0:
                    raise OSError(errno.EIO, "the power is gone")
                super().sync(fd)

            def remove(self, name: str, leased: bool = True) -> bool:
                return self.stop > 0 and super().remove(name, leased)

        flushed: set[int] = set()
        with opened(path, Losing, segment_bytes=77 * 4) as store:
            blocks = Blocks(store)
            for number in range(0, 12, 3):
                blocks.put(range(number, number + 3))
                store.flush()
                if not store.stats().num_faults:
                    flushed |= {number, number + 1, number + 2}
        lost += disks[0].lose_power(path, rng)
        with opened(path) as store:
            assert flushed <= {*Blocks(store).found(range(12))}
            assert not store.stats().num_damaged_blocks  # no record without its block
    assert lost > len(seeds) // 2


def test_what_is_no_file(tmp_path: Path) -> None:
    """Nothing waits for a FIFO, and no link is followed, to a good file neither. Files of others' are not touched."""
    good, other = tmp_path / "good", tmp_path / "other"
    file = written(other, NUMBERS)
    written(good, range(8, 12))
    names = iter(f"{i:032x}.segment" for i in count())
    os.mkfifo(good / next(names), 0o600)
    (good / next(names)).mkdir()
    (good / next(names)).symlink_to(file)
    (good / next(names)).symlink_to("nowhere")
    os.link(file, good / next(names))
    for mode in (0o620, 0o602):
        shared = good / next(names)
        shared.write_bytes(file.read_bytes())
        shared.chmod(mode)
    (good / next(names)).write_bytes(b"garbage" * 100)
    (good / next(names)).write_bytes(b"")
    later = bytearray(file.read_bytes())
    later[8:12] = struct.pack("<I", 2)
    end = Parts(file.read_bytes()).header
    later[end - 16 : end] = xxhash.xxh3_128_digest(bytes(later[: end - 16]))
    (good / next(names)).write_bytes(later)
    (good / "notes.txt").write_text("mine")
    (good / f"{0:032x}.new").write_bytes(b"left by a process that was killed")
    with opened(good) as store:
        with pytest.warns(RuntimeWarning, match="goes on without a file") as caught:
            blocks = Blocks(store)
        assert blocks.found(range(12)) == [8, 9, 10, 11]
        blocks.put(range(12, 16))
        store.flush()
        assert blocks.found(range(16)) == [*range(8, 16)]
        assert store.stats().num_unreadable_segments == 10 and not store.stats().num_faults
    assert len(caught) == 1
    assert (good / "notes.txt").read_text() == "mine" and file.read_bytes()[: HEAD.size].startswith(b"CPUATTNS")


def test_whose_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b"
    opened(path).close()
    assert path.stat().st_mode & 0o777 == 0o700
    for mode in (0o750, 0o701, 0o720):
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"^path: {path} has mode 0{mode:o}, .*expected 0700"):
            opened(path)
    path.chmod(0o700)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ValueError, match=f"^path: .*{name} is a link or no folder"):
            opened(tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ValueError, match=r"^path: .* is owned by user \d+, expected 12345"):
            opened(path)
    with pytest.raises(OSError, match="File name too long"):
        opened(tmp_path / ("x" * 300))


def test_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, NUMBERS)
    with opened(tmp_path) as store:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert Blocks(store).found(NUMBERS) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_writes_that_fail(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of the calls: what was there stays, the rest is left out and counted, and later writes go on."""
    monkeypatch.setattr(prefix_store, "PAUSE_SECONDS", 0.0)
    for call in range(16):
        path = tmp_path / str(call)
        calls = (i == call for i in count())
        with opened(path, failing(code, calls), segment_bytes=77 * 3) as store:
            blocks = Blocks(store)
            for number in range(0, 8, 2):
                blocks.put([number, number + 1])
                store.flush()
            stats = store.stats()
            assert stats.num_faults == 1 and stats.num_written_blocks + stats.num_skipped_blocks == 8
            assert 1 <= stats.num_skipped_blocks <= 2
            found = blocks.found(range(8))
            assert len(found) == stats.num_written_blocks
        assert {*found} <= {*found_in(path, range(8))}  # a record may be there that could not be synced


def test_one_warning(tmp_path: Path) -> None:
    """Where the system refuses for good, nothing is tried again at once, and no empty file is left."""
    with opened(tmp_path, always(names=("write",))) as store:
        blocks = Blocks(store)

        def put() -> None:
            for number in range(5):
                blocks.put([number])
                store.flush()

        with pytest.warns(RuntimeWarning, match="cannot write, and goes on without.*No space left") as caught:
            put()
        stats = store.stats()
    assert len(caught) == 1
    assert stats.num_faults == 1 and stats.num_skipped_blocks == 5 and not stats.num_segments
    assert not [*tmp_path.iterdir()]


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    """Serving goes on, too."""
    with opened(tmp_path, always()) as store:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            blocks = Blocks(store)
            blocks.put([1])
            store.flush()
            assert store.stats().num_faults == 1 and blocks.found([1]) == []


def test_no_thread_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with opened(tmp_path) as store:
        blocks = Blocks(store)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            blocks.put([1, 2])
        store.flush()
        assert store.stats().num_faults == 1 and store.stats().num_skipped_blocks == 2


def test_a_file_may_be_no_larger(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the system's own refusal, EFBIG, once SIGXFSZ is ignored as Python does."""

    def work(say: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with opened(tmp_path) as store:
            blocks = Blocks(store)
            blocks.put([1])
            store.flush()
            say(store.stats().num_faults)
            say(len(blocks.found([1])))

    assert child_of(work) == (0, bytes([1, 0]))
    assert not [*tmp_path.iterdir()]


def test_reads_that_fail(tmp_path: Path) -> None:
    """EIO of any call is a miss. What was not read is found by the next store."""
    written(tmp_path, NUMBERS)
    lost = []
    for call in range(20):  # one lists the folder, two read the header, one the records, and two each block
        with opened(tmp_path, failing(errno.EIO, (i == call for i in count()), ("read", "names"))) as store:
            lost.append(8 - len(Blocks(store).found(NUMBERS)))
            assert store.stats().num_faults + store.stats().num_unreadable_segments == 1
    assert lost == [8] * 4 + [1] * 16
    assert found_in(tmp_path, NUMBERS) == [*NUMBERS]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    written(tmp_path, NUMBERS)
    tmp_path.chmod(0o500)
    with opened(tmp_path) as store:
        blocks = Blocks(store)
        assert blocks.found(NUMBERS) == [*NUMBERS]
        blocks.put([20])
        store.flush()
        assert store.stats().num_faults == 1


def test_eviction(tmp_path: Path) -> None:
    """Whole segments, those unused for longest first. A block that is read counts as used."""
    with opened(tmp_path, max_bytes=1 << 18, segment_bytes=77 * 2) as store:
        blocks = Blocks(store, 1)
        size = 0
        for number in range(0, 40, 2):
            for each in (number, number + 1):
                blocks.put([each])
                store.flush()
            time.sleep(0.006)  # a clock of files goes by ticks
            assert blocks.found([0]) == [0]
            size = max(size, store.stats().num_bytes)
            assert store.stats().num_bytes <= 1 << 18
        stats = store.stats()
        assert stats.num_evicted_segments > 5 and not stats.num_faults and size > 1 << 15
        found = blocks.found(range(40))
        assert found[:2] == [0, 1] and found[2:] == [*range(40 - len(found) + 2, 40)]
        assert stats.num_stored_blocks == len(found)
    assert found_in(tmp_path, range(40)) == found


def test_an_evicted_segment_is_a_miss_elsewhere(tmp_path: Path) -> None:
    """Another process removes it after it was found, or while it is being read."""
    file = written(tmp_path, NUMBERS)
    with opened(tmp_path) as store:
        blocks = Blocks(store)
        file.unlink()
        assert blocks.found(NUMBERS) == [] and not store.stats().num_faults
    file = written(tmp_path, NUMBERS)

    class Removing(store_folder.Folder):
        def mark_used(self, fd: int) -> None:
            file.unlink()

    with opened(tmp_path, Removing) as store:
        blocks = Blocks(store)
        assert blocks.stored.read([name_of(3)], [0]) == 1
        assert all((x[0] == y).all() for x, y in zip(blocks.arrays, blocks.bytes_of(3), strict=True))


def test_a_segment_in_use_is_not_evicted(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=1 << 18) as first, opened(tmp_path, max_bytes=1 << 18) as second:
        ours, theirs = Blocks(first), Blocks(second, model="other")
        ours.put([1])
        first.flush()
        theirs.put([2])
        second.flush()
        assert second.stats().num_faults == 1 and second.stats().num_segments == 1
        (file,) = tmp_path.iterdir()
        assert not second._folder.remove(file.name) and file.exists()
        assert ours.found([1]) == [1]


class Gate(store_folder.Folder):
    """Syncs wait until the gate is open."""

    gate = threading.Event()

    def sync(self, fd: int) -> None:
        assert self.gate.wait(30)
        super().sync(fd)


def test_a_full_queue_skips(tmp_path: Path) -> None:
    Gate.gate.clear()
    with opened(tmp_path, Gate, max_queued_blocks=5) as store:
        blocks = Blocks(store)
        blocks.put([0])
        while store.stats().num_queued_blocks:
            time.sleep(0.001)
        blocks.put(range(1, 12))
        stats = store.stats()
        assert stats.num_queued_blocks == 5 and stats.num_skipped_blocks == 6
        blocks.put(range(1, 4))  # these wait already
        assert store.stats().num_skipped_blocks == 6
        Gate.gate.set()
        store.flush()
        assert blocks.found(range(12)) == [*range(6)]


def test_forgotten_blocks_are_not_written(tmp_path: Path) -> None:
    """Their bytes may change from then on, and others' must not get their names."""
    Gate.gate.clear()
    with opened(tmp_path, Gate) as store:
        blocks = Blocks(store)
        blocks.put([0])
        while store.stats().num_queued_blocks:
            time.sleep(0.001)
        blocks.put(range(1, 6))
        blocks.stored.forget([2, 3, 60])
        for block in (2, 3):
            blocks.compute(block, 99)
        gone = Blocks(store)
        gone.put([7])
        del gone  # and with it whoever knows what the bytes are
        Gate.gate.set()
        store.flush()
        assert blocks.found(range(10)) == [0, 1, 4, 5] and store.stats().num_skipped_blocks == 3


def test_forget_waits_while_a_block_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not return before the bytes have been read."""
    copying, events = threading.Event(), list[str]()
    original = prefix_store.StoredBlocks.copied_out

    def slow(self: Any, block: int) -> bytearray:
        copying.set()
        time.sleep(0.05)
        found = original(self, block)
        events.append("copied")
        return found

    monkeypatch.setattr(prefix_store.StoredBlocks, "copied_out", slow)
    with opened(tmp_path) as store:
        blocks = Blocks(store)
        blocks.put([5])
        assert copying.wait(30)
        blocks.stored.forget([5])
        events.append("forgotten")
        blocks.compute(5, 99)
        store.flush()
        assert events == ["copied", "forgotten"] and blocks.found([5]) == [5]


def test_after_fork(tmp_path: Path) -> None:
    """A child reads and writes with a thread and segments of its own, whatever the parent was doing. What a store had
    open that is closed by now is others'."""
    with opened(tmp_path / "old") as old:
        before = Blocks(old)
        before.put([1])
        old.flush()
    Gate.gate.clear()
    with opened(tmp_path, Gate) as store:
        blocks = Blocks(store)
        Gate.gate.set()
        blocks.put([1])
        store.flush()
        Gate.gate.clear()
        blocks.put([2, 3])

        def work(say: Any) -> None:
            Gate.gate = threading.Event()
            Gate.gate.set()
            blocks.stored.look()
            say(len(blocks.found([1])))
            blocks.put([4])
            store.flush()
            say(len(blocks.found([4])))
            store.close()

        assert child_of(work) == (0, bytes([1, 1]))
        Gate.gate.set()
        store.flush()
        time.sleep(prefix_store.LOOK_SECONDS)
        blocks.stored.look()
        assert blocks.found(range(6)) == [1, 2, 3, 4]


def test_kinds_do_not_meet(tmp_path: Path) -> None:
    written(tmp_path, NUMBERS)
    with opened(tmp_path) as store:
        assert Blocks(store, model="other").found(NUMBERS) == []
        assert Blocks(store).found(NUMBERS) == [*NUMBERS]


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_bytes": 0}, ValueError, r"max_bytes: 0 is outside 1\.\."),
    ({"max_bytes": "1"}, TypeError, "max_bytes: expected an integer"),
    ({"segment_bytes": 0}, ValueError, r"segment_bytes: 0 is outside 1\.\."),
    ({"max_queued_blocks": -1}, ValueError, r"max_queued_blocks: -1 is outside 1\.\."),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=str)
def test_arguments(tmp_path: Path, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        opened(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_what_fits_no_segment(tmp_path: Path) -> None:
    for path in (3, None, b"/tmp", ["/tmp"]):
        with pytest.raises(TypeError, match=r"^path: expected a str, got "):
            PrefixStore(path, max_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^path: 'a\\x00b' has a null character"):
        PrefixStore("a\0b", max_bytes=1)
    with opened(tmp_path, max_bytes=1000) as store, pytest.raises(ValueError, match=r"^store: max_bytes 1000, a segm"):
        Blocks(store)
    with pytest.raises(ValueError, match=r"^store: is closed"):
        Blocks(store)


def test_without_xxhash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from cpu_attn import UnavailableError

    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UnavailableError, match=r"pip install 'cpu-attn\[store\]'"):
        opened(tmp_path / "store")
    assert not (tmp_path / "store").exists() and RECORD.size == 64
