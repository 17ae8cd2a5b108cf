# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn bench prefix-store`` measures how long a prompt that was computed before takes until attention begins."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from rich.text import Text

from cpu_attn import PagedKVCache, UnavailableError
from cpu_attn._check import INT32_MAX, MAX_SIZE, kv_dtypes
from cpu_attn.cli.bench import machine
from cpu_attn.cli.report import new_console, new_table
from cpu_attn.cli.report import seconds as in_words
from cpu_attn.serving import BlockManager, PrefixStore
from cpu_attn.tests.cases.formats import DTYPES, numpy_dtype

DECODED = 24  # steps of one token that are timed over memory and over files, in turns
CHUNK = 8 << 20  # bytes of a file that are read at once
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Describes a prompt and the caches that it is in."""

    tokens: int
    layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    kv_cache_dtype: str

    @property
    def blocks(self) -> int:
        """Says how many full blocks the prompt has of which a hit may consist."""
        return (self.tokens - 1) // self.block_size

    def caches(self, mapped: bool) -> list[PagedKVCache]:
        """Makes the caches of all layers: with memory for the prompt or, where it is mapped, for what follows it."""
        few = 2 + DECODED // self.block_size
        more = 4 * self.blocks + 4 * 4096 if mapped else 0
        sizes = (few if mapped else self.blocks + few, self.block_size, self.num_kv_heads, self.head_size, self.dtype)
        how: Any = {"kv_cache_dtype": self.kv_cache_dtype, "store_blocks": more}
        return [PagedKVCache(*sizes, **how) for _ in range(self.layers)]

    def num_bytes(self, caches: list[PagedKVCache]) -> int:
        return self.blocks * sum(x[:1].nbytes for cache in caches for x in (cache.key_cache, cache.value_cache))

    def random(self, tokens: int, heads: int) -> Any:
        rows = np.random.default_rng(tokens).standard_normal((tokens, heads, self.head_size), np.float32)
        return rows.astype(numpy_dtype(self.dtype))

    @property
    def prompt(self) -> range:
        return range(self.tokens)


@dataclass(frozen=True)
class Folder:
    """Says where the blocks of a case are, and how they are looked at."""

    path: str
    max_bytes: int
    segment_bytes: int

    def store(self, verify: bool = True) -> PrefixStore:
        how: Any = {"segment_bytes": self.segment_bytes, "max_queued_blocks": INT32_MAX, "verify": verify}
        return PrefixStore(self.path, max_bytes=self.max_bytes, **how)

    def forget(self) -> None:
        """Has the system drop its page cache of the files, as far as nobody has them mapped."""
        gc.collect()
        for file in Path(self.path).iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> None:
        """Reads all files from their beginnings to their ends."""
        buffer = bytearray(CHUNK)
        for file in Path(self.path).iterdir():
            with file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while opened.readinto(buffer):
                    pass


def _begin(manager: BlockManager, case: Case) -> Any:
    """Finds the prompt, and gives the arrays with which the attention over it begins."""
    found = manager.allocate("prompt", case.prompt)
    if found != case.blocks * case.block_size:
        raise click.ClickException(f"of {case.tokens} tokens {found} were found: {manager.caches}")
    return manager.step([("prompt", case.prompt[found:])])


def restore(case: Case, folder: Folder, mapped: bool, verify: bool) -> tuple[BlockManager, float]:
    """Opens a store and gives a manager that has found the prompt there, and how long that took from nothing on."""
    begun = perf_counter()
    manager = BlockManager(case.caches(mapped), store=folder.store(verify), model="bench")
    _begin(manager, case)
    return manager, perf_counter() - begun


def _in_new_process(case: Case, folder: Folder, mapped: bool, verify: bool) -> float:
    given = json.dumps([asdict(case), asdict(folder), mapped, verify])
    command = [sys.executable, "-m", "cpu_attn.cli.prefix_store", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"a process that restores: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def _best(repeat: int, call: Callable[..., float], *given: Any) -> float:
    return min(call(*given) for _ in range(repeat))


def _timed(call: Callable[..., Any], *given: Any) -> float:
    begun = perf_counter()
    call(*given)
    return perf_counter() - begun


def _attend(manager: BlockManager, query: Any, step: Any) -> None:
    for cache in manager.caches:
        cache.attend(query, step)


class Bench:
    """Measures one case.

    Args:
        case: what.
        path: an empty folder.
        repeat: how often each way is taken; the shortest counts.
    """

    def __init__(self, case: Case, path: str, repeat: int) -> None:
        self.case, self.repeat = case, repeat
        self.caches = case.caches(mapped=False)
        self.num_bytes = case.num_bytes(self.caches)
        self.folder = Folder(
            f"{path}/store", 4 * self.num_bytes + (1 << 24) * case.layers, min(256 << 20, self.num_bytes)
        )
        self.safetensors = f"{path}/file.safetensors"
        self.rows: list[Row] = []

    def row(self, name: str, seconds: float, moved: bool = False) -> None:
        """Takes down what one way took. moved: whether all bytes were read meanwhile."""
        gbps = self.num_bytes / seconds / 1e9 if moved else None
        self.rows.append({"from": name, "seconds": seconds, "gbps": gbps})
        click.echo(f"  {name} {in_words(seconds)}", err=True, nl=False)

    def run(self) -> Row:
        case, repeat = self.case, self.repeat
        with self.folder.store() as store:
            manager = BlockManager(self.caches, store=store, model="bench")
            alone = self.compute(manager)
            self.row("computed anew, attention alone", alone * case.layers)
            share = self.publish(manager, alone)
            manager.free("prompt")
            self.row("memory: the prefix cache", _timed(_begin, manager, case))
        self.warm()
        for name, mapped, verify in WAYS:
            self.row(f"{name}, new process", _best(repeat, _in_new_process, case, self.folder, mapped, verify))
        found = self.decode(manager)
        for name, mapped, verify in WAYS:
            self.row(f"{name}, new process, cold", _best(repeat, self.cold, mapped, verify), moved=verify)
        self.row("disk: files read in order, cold", _best(repeat, self.limit), moved=True)
        self.load()
        return {**asdict(case), "bytes": self.num_bytes, "ways": self.rows, "publishing_share": share, **found}

    def compute(self, manager: BlockManager) -> float:
        """Writes random keys and values, and gives how long one layer's attention over the prompt takes."""
        case = self.case
        manager.allocate("prompt", case.prompt)
        step = manager.step([("prompt", case.prompt)])
        key, value = case.random(case.tokens, case.num_kv_heads), case.random(case.tokens, case.num_kv_heads)
        for cache in self.caches:
            cache.update(key, value, step)
        query = case.random(case.tokens, case.num_heads)
        output = np.empty_like(query)
        self.attend = partial(self.caches[0].attend, query, step, output=output)
        self.attend()
        return _best(self.repeat, _timed, self.attend)

    def publish(self, manager: BlockManager, alone: float) -> float:
        """Has the prompt written behind attention, and gives which part of a prefill's time that takes: what calls lost
        meanwhile, of all layers' attention."""
        begun, calls = perf_counter(), 0
        store = manager._pool.stored.store  # type: ignore[union-attr]
        manager.step([])
        while store.stats().num_written_blocks < self.case.blocks:
            self.attend()
            calls += 1
            if store.stats().num_faults:
                raise click.ClickException(f"{self.folder.path}: the system refuses to write")
        lost = perf_counter() - begun - calls * alone
        store.flush()
        return max(0.0, lost) / (self.case.layers * alone)

    def warm(self) -> None:
        """Finds the prompt with a warm page cache in this process."""

        def once(mapped: bool, verify: bool) -> float:
            manager, taken = restore(self.case, self.folder, mapped, verify)
            self.close(manager)
            return taken

        for name, mapped, verify in WAYS:
            self.row(f"{name}, this process", _best(self.repeat, once, mapped, verify))

    def close(self, manager: BlockManager) -> None:
        manager._pool.stored.store.close()  # type: ignore[union-attr]

    def cold(self, mapped: bool, verify: bool) -> float:
        self.folder.forget()
        return _in_new_process(self.case, self.folder, mapped, verify)

    def limit(self) -> float:
        self.folder.forget()
        return _timed(self.folder.read)

    def decode(self, memory: BlockManager) -> Row:
        """Times steps of one token over the prompt in memory and in files, in turns."""
        mapped, _ = restore(self.case, self.folder, mapped=True, verify=True)
        case, taken = self.case, {"memory": list[float](), "mapped": list[float]()}
        query, key = case.random(1, case.num_heads), case.random(1, case.num_kv_heads)
        for _ in range(DECODED):
            for name, manager in (("memory", memory), ("mapped", mapped)):
                step = manager.step([("prompt", [0])])
                for cache in manager.caches:
                    cache.update(key, key, step)
                taken[name].append(_timed(_attend, manager, query, step))
        self.close(mapped)
        seconds = {f"decode_{name}_seconds": statistics.median(each[2:]) for name, each in taken.items()}
        ratio = statistics.median(m / f for m, f in zip(taken["memory"][2:], taken["mapped"][2:], strict=True))
        return {**seconds, "decode_mapped_speed": ratio}

    def load(self) -> None:
        """Loads a safetensors file of as many bytes, where that library is there."""
        try:
            import safetensors.numpy
        except ImportError:
            return
        rows = np.zeros(self.num_bytes, np.uint8)
        safetensors.numpy.save_file({"cache": rows}, self.safetensors)
        del rows

        def load(cold: bool) -> float:
            with open(self.safetensors, "rb") as file:
                os.fsync(file.fileno())
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _timed(safetensors.numpy.load_file, self.safetensors)

        for words, cold in (("", False), (", cold", True)):
            self.row(f"safetensors.numpy.load_file{words}", _best(self.repeat, load, cold), moved=True)


# How a prompt is found in a store: what it is called, whether it is mapped, and whether its checksums are looked at.
WAYS = (("store: mapped, unverified", True, False), ("store: mapped", True, True), ("store: copied", False, True))


@contextmanager
def _folder(at: str | None) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="cpu-attn-bench-", dir=at)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _show(results: list[Row]) -> None:
    console = new_console()
    for each in results:
        kind = each["dtype"] if each["kv_cache_dtype"] == "auto" else f"{each['dtype']} as {each['kv_cache_dtype']}"
        heads = f"{each['layers']} layers of {each['num_kv_heads']} kv heads of {each['head_size']}"
        console.print(Text(f"{each['tokens']} tokens, {heads}, {kind}: {each['bytes'] / 2**20:.4g} MiB", "bold"))
        table = new_table("a prompt from", numbers=("until attention begins", "GB/s"))
        for row in each["ways"]:
            table.add_row(row["from"], in_words(row["seconds"]), f"{row['gbps']:.3g}" if row["gbps"] else "")
        console.print(table)
        console.print(
            f"decode of one token: {in_words(each['decode_memory_seconds'])} over memory, "
            f"{in_words(each['decode_mapped_seconds'])} over files, which is {each['decode_mapped_speed']:.2f} of its "
            f"speed; writing takes {each['publishing_share']:.1%} of the attention of a prefill\n"
        )


SIZE = click.IntRange(1, MAX_SIZE)


@click.command(short_help="Time prompts out of a prefix store.")
@click.option(
    "--tokens", multiple=True, type=click.IntRange(2, 2**24), default=[8192], show_default=True, help="Repeatable."
)
@click.option("--layers", type=SIZE, default=32, show_default=True)
@click.option("--num-heads", type=SIZE, default=32, show_default=True, help="Query heads.")
@click.option("--num-kv-heads", type=SIZE, default=8, show_default=True)
@click.option("--head-size", type=SIZE, default=128, show_default=True)
@click.option("--block-size", type=SIZE, default=128, show_default=True, help="Tokens of a block.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--kv-cache-dtype", multiple=True, default=["auto", "int8"], show_default=True, help="Repeatable.")
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False), help="On which disk.  [default: temporary files']"
)
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of each; the shortest counts."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def prefix_store(
    tokens: tuple[int, ...],
    layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: str,
    kv_cache_dtype: tuple[str, ...],
    folder: str | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Time how long a prompt that was computed before takes until the attention of what follows it can begin: from the
    memory of a prefix cache, and from a store's files, in this process and in a new one, with the system's page cache
    and without (cold).

    Beside it stand attention over the prompt anew, which is less than a model takes, a safetensors file of as many
    bytes, and the disk. Memory and disk are needed for about three times the caches of the prompt.
    """
    if not hasattr(os, "posix_fadvise"):
        raise click.ClickException("this system takes no advice on its page cache, so nothing can be cold")
    if num_heads % num_kv_heads:
        raise click.UsageError(f"--num-heads {num_heads}: expected a multiple of --num-kv-heads {num_kv_heads}")
    if min(tokens) <= block_size:
        raise click.UsageError(f"--tokens {min(tokens)}: expected more than --block-size {block_size}")
    sizes = (layers, num_heads, num_kv_heads, head_size, block_size, dtype)
    results = []
    try:
        for kind in kv_cache_dtype:
            kv_dtypes(kind, dtype)
        for count in dict.fromkeys(tokens):
            for kind in dict.fromkeys(kv_cache_dtype):
                click.echo(f"{count} tokens, {kind}:", err=True, nl=False)
                with _folder(folder) as path:
                    results.append(Bench(Case(count, *sizes, kind), path, repeat).run())
                click.echo(err=True)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (MemoryError, UnavailableError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"machine": machine(), "results": results}, indent=2))
    else:
        _show(results)


if __name__ == "__main__":
    case, folder, mapped, verify = json.loads(sys.argv[1])
    print(restore(Case(**case), Folder(**folder), mapped, verify)[1])
