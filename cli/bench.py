# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn bench`` measures how fast the engines are, beside limits that are measured in the same run."""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import cpu_attn
from cpu_attn import _threads
from cpu_attn._check import INT32_MAX, MAX_SIZE, kv_dtypes
from cpu_attn._check import kv_cache_layout as check_layout
from cpu_attn._check import kv_cache_rotation as check_rotation
from cpu_attn.cli import contest, plot, report
from cpu_attn.cli.choose import chosen, show_list
from cpu_attn.cli.info import cpu, onednn
from cpu_attn.cli.limits import DEFAULT_BYTES, Limit, Limits, best_isa, products, roof
from cpu_attn.cli.rivals import RIVALS
from cpu_attn.cli.workloads import GROUPS, WORKLOADS, Step, Workload
from cpu_attn.tests.cases.formats import DTYPES

# One contestant has so many seconds and runs on one workload, unless --repeat says how many. After TURN seconds the
# next one has its turn.
BUDGET, LONG, MIN_RUNS, MAX_RUNS = 0.8, 4.0, 3, 20_000
TURN = 0.05
Engines = dict[tuple[str, str], list[str]]  # the engines that take part, for each (isa, dtype)
Measured = tuple[dict[str, Any], tuple[Limit, ...]]


# ---- who runs ----


def engines_here(
    asked: Sequence[str], rivals: Sequence[str], isa: str, dtype: str, head_sizes: Collection[int]
) -> list[str]:
    """Lists the engines to run: native beside oneDNN where nothing was asked for. It is an error where one was asked
    for and is not here."""
    found = []
    for engine in [*(asked or ("native", "onednn")), *rivals]:
        reason = contest.missing(engine, isa, dtype, head_sizes)
        if not reason:
            found.append(engine)
        elif engine in rivals:
            raise click.UsageError(f"--rival {engine} cannot run here: {reason}")
        elif asked or engine == "native":
            raise click.UsageError(f"{engine} cannot run here: {reason}")
        else:
            click.echo(f"without {engine}: {reason}", err=True)
    return found


def refuse_idle(
    workloads: Sequence[Workload],
    engines: Engines,
    asked: Sequence[str],
    kv_cache_dtype: str,
    block_size: int,
    kv_cache_rotation: str = "none",
) -> None:
    """Raises an error for a workload that nobody runs, and for an engine or a rival that was asked for and runs
    none."""
    cache = (kv_cache_dtype, block_size, kv_cache_rotation)
    for engine in asked:
        reasons = [_idle(engine, w, *cache) for w in workloads]
        if all(reasons):
            raise click.UsageError(reasons[0])
    for some, w in product(engines.values(), workloads):
        able = [e for e in some if not contest.unable(e, w, *cache)]
        if not contest.takes_part(able, w.kind):
            raise click.UsageError(_idle(some[0], w, *cache))


def _idle(engine: str, w: Workload, *cache: Any) -> str:
    """Says why an engine has nothing to do with a workload, "" if it has."""
    if engine in contest.takes_part([engine], w.kind):
        return contest.unable(engine, w, *cache)
    return f"{w.name}: {engine} has no part in it"


# ---- measuring ----


@dataclass
class Timer:
    """Times the runs of one call. The first is not counted, unless it is so long that it has to be the only one. under:
    a context in which each of its turns runs. turns: the shortest run of each turn, or the only one."""

    call: Callable[[], Any]
    repeat: int | None
    under: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        with self.under():
            self._run()
        if self.repeat or self.total <= LONG:
            self.seconds, self.total = [], 0.0
        else:
            self.turns = self.seconds[:]

    def _run(self) -> None:
        start = perf_counter()
        self.call()
        self.seconds.append(perf_counter() - start)
        self.total += self.seconds[-1]

    @property
    def done(self) -> bool:
        runs = len(self.seconds)
        if self.repeat:
            return runs >= self.repeat
        return self.total > LONG or runs >= MAX_RUNS or (runs >= MIN_RUNS and self.total >= BUDGET)

    def turn(self) -> None:
        end, before = perf_counter() + TURN, len(self.seconds)
        with self.under():
            self._run()
            while not self.done and perf_counter() < end:
                self._run()
        self.turns.append(min(self.seconds[before:]))


def times(timers: Sequence[Timer], between: Callable[[], Any] = lambda: None) -> list[list[float]]:
    """Gives the seconds of each call's runs. The calls take turns, so that what slows the machine for a while slows
    them all. ``between`` is called before, between and after the rounds."""
    between()
    while left := [timer for timer in timers if not timer.done]:
        for timer in left:
            timer.turn()
        between()
    return [timer.seconds for timer in timers]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turns garbage collection off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def usable(threads: Collection[int]) -> list[int]:
    """Gives these numbers of threads in ascending order. It is an error where one is more than a call uses."""
    for n in threads:
        with _threads.threads(n):
            most = cpu_attn.get_num_threads()
        if n > most:
            raise click.UsageError(f"--threads {n}: a call uses at most {most} threads here")
    return sorted(set(threads))


def _always(workloads: Sequence[Workload], dtypes: Sequence[str], threads: int) -> list[Limit]:
    """Lists the limits that every report has: the best products of this machine, whoever reaches for them, and memory
    where no workload says how much."""
    kinds = {w.kind for w in workloads if not w.latent_rank}
    found = [limit for d in dtypes for matrix in (True, False) for limit in products(best_isa(d, matrix), d, threads)]
    found += [Limit("read_gbps", threads, num_bytes=DEFAULT_BYTES)] if "decode" not in kinds else []
    found += [Limit("memcpy_gbps", threads, num_bytes=DEFAULT_BYTES)] if "write" not in kinds else []
    return list(dict.fromkeys(found))


def _one_workload(
    steps: Sequence[Step], engines: Sequence[str], threads: Sequence[int], limits: Limits, repeat: int | None
) -> Iterator[Measured]:
    """Measures one workload over some caches, by some numbers of threads. All contestants take turns; engines that
    cannot run it are left out."""
    rows: list[contest.Contestant] = []
    for step in steps:
        cache = (step.kv_cache_dtype, step.block_size, step.kv_cache_rotation)
        reasons = {e: contest.unable(e, step.workload, *cache) for e in engines}
        for engine in filter(reasons.get, engines):
            click.echo(f"  without {engine}: {reasons[engine]}", err=True, nl=False)
        able = [e for e in engines if not reasons[e]]
        rows += [row for n in threads for row in contest.contestants(step, able, n)]
    needed = dict.fromkeys(limit for row in rows for limit in (*row.limits, *row.roof))
    timers = [Timer(row.call, repeat, partial(contest.threads, row.threads)) for row in rows]
    looks: list[dict[Limit, float]] = []
    times(timers, lambda: looks.append(limits.measure(needed)))
    for row, timer in zip(rows, timers, strict=True):
        who = f"{row.engine} on {row.threads}" if len(threads) > 1 else row.engine
        click.echo(f"  {who} {report.seconds(min(timer.seconds))}", err=True, nl=False)
        yield _result(row, timer, looks), row.limits
    click.echo(err=True)


def under_roof(row: contest.Contestant, turns: Sequence[float], looks: Sequence[dict[Limit, float]]) -> dict[str, Any]:
    """Gives what binds a contestant, and which part of that speed it reaches: the median of its turns, each against
    what was seen right before and after it, since memory, above all, is not always as fast."""
    if not row.roof:
        return {"roof_of": None, "fraction_of_roof": None}
    w, found = row.step.workload, []
    for taken, before, after in zip(turns, looks, [*looks[1:], looks[-1]], strict=False):
        seen = {limit: max(before[limit], after[limit]) for limit in row.roof}
        least, kind = roof(w.flops, w.kv_bytes(row.step.itemsize), seen)
        found.append((least / taken, kind))
    fraction, kind = sorted(found)[len(found) // 2]
    return {"roof_of": kind, "fraction_of_roof": fraction}


def _result(row: contest.Contestant, timer: Timer, looks: Sequence[dict[Limit, float]]) -> dict[str, Any]:
    """Gives a contestant's result without the limit, which may still rise."""
    step, runs = row.step, timer.seconds
    best = min(runs)
    w = step.workload
    computes = w.attends or w.linear
    moves = computes or w.kind == "write"
    return {
        "workload": w.name,
        "engine": row.engine,
        "isa": row.isa,
        "dtype": step.dtype,
        "kv_cache_dtype": step.kv_cache_dtype,
        "kv_cache_layout": step.kv_cache_layout,
        "kv_cache_rotation": step.kv_cache_rotation,
        "threads": row.threads,
        "seconds_min": best,
        "seconds_median": statistics.median(runs),
        "runs": len(runs),
        "spread": statistics.median(runs) / best - 1 if len(runs) > 1 else None,
        "tokens_per_second": w.num_tokens / best if moves else None,
        "layers": w.layers or None,
        "gflops": w.flops / best * 1e-9 if computes else None,
        "kv_gbps": w.kv_bytes(step.itemsize) / best * 1e-9 if moves else None,
        "limit": None,
        "limit_of": None,
        "fraction_of_limit": None,
        **under_roof(row, timer.turns, looks),
        "workspace_bytes": row.workspace_bytes,
    }


def _bound(result: dict[str, Any], limits: Limits, of: Iterable[Limit]) -> dict[str, Any]:
    """Gives the result beside its limit, the fastest of ``of``."""
    limit = limits.fastest(of)
    if limit is None:
        return result
    reached = result["gflops" if limit.probe else "kv_gbps"]
    value = limits.kept[limit]
    return {**result, "limit": value, "limit_of": limit.kind, "fraction_of_limit": reached / value}


def run(
    workloads: Sequence[Workload],
    engines: Engines,
    threads: Sequence[int],
    repeat: int | None,
    caches: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Makes the report; after Ctrl-C it has the workloads that were done by then. caches: what a Step takes besides
    workload, isa and dtype."""
    measured: list[Measured] = []
    limits, todo, begun, stopped = Limits(), list(product(workloads, engines)), perf_counter(), True
    always = _always(workloads, [dtype for _, dtype in engines], max(threads))
    with _undisturbed():
        with suppress(KeyboardInterrupt):
            limits.measure(always)
            for done, (w, (isa, dtype)) in enumerate(todo):
                left = (perf_counter() - begun) * (len(todo) - done) / done if done else 0
                ahead = f" ({left:.0f} s left)" if done else ""
                click.echo(f"{done + 1}/{len(todo)}{ahead} {w.name} {isa} {dtype}:", err=True, nl=False)
                steps = [Step(w, isa, dtype, **cache) for cache in caches]
                measured += _one_workload(steps, engines[isa, dtype], threads, limits, repeat)
            stopped = False
        if stopped:
            click.echo("  stopped", err=True)
        if not measured:
            sys.exit(report.INTERRUPTED)
        limits.measure(always)
    results = [_bound(result, limits, of) for result, of in measured]
    return {
        "machine": machine(),
        "limits": limits.summary(),
        "probes": limits.details(),
        "results": results,
        "warnings": report.warnings(results),
        "stopped": stopped,
    }


def machine() -> dict[str, Any]:
    one = onednn()
    return {
        "version": cpu_attn.__version__,
        **cpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "onednn": one["version"] if one["available"] else None,
    }


# ---- the command ----


class Number(click.FloatRange):
    """Takes a range of numbers; click's own has NaN in it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


def _of_option(name: str, error: Exception) -> str:
    """Gives what an error says of an argument, as of the option that it came by."""
    return str(error).replace(name, f"--{name.replace('_', '-')}", 1)


def _write(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that describe the shape: of the workloads named, or of a free one."""
    size, length = click.IntRange(1, MAX_SIZE), click.IntRange(1, INT32_MAX)
    for option in reversed(
        [
            click.option("--q-len", type=length, help="A free shape: query tokens of each request (1: decode)."),
            click.option("--kv-len", type=length, help="A free shape: keys of each request."),
            click.option("--batch", type=size, help="A free shape: requests."),
            click.option("--num-heads", type=size, help="Query heads, of named workloads too."),
            click.option("--num-kv-heads", type=size, help="Kv heads, likewise."),
            click.option("--head-size", type=size, help="Head size, likewise."),
            click.option("--sliding-window", type=length, help="Keys that a query sees, its own counted; likewise."),
            click.option("--softcap", type=Number(1.18e-38, 2.34e38), help="Softcap of the logits; likewise."),
            click.option("--sinks", is_flag=True, help="A sink for each head; likewise."),
            click.option("--alibi", is_flag=True, help="ALiBi slopes; likewise."),
            click.option("--attn-bias", is_flag=True, help="A bias for each head, query and key; likewise."),
            click.option("--selected", type=Number(0, 1, min_open=True), help="Share of blocks; likewise."),
            click.option("--no-cascade", is_flag=True, help="Shared keys read for each request by itself; likewise."),
        ]
    ):
        command = option(command)
    return command


FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Time attention beside this machine's limits.")
@click.argument(
    "names",
    nargs=-1,
    metavar="[WORKLOAD]...",
    shell_complete=lambda ctx, param, text: [name for name in (*GROUPS, *WORKLOADS) if name.startswith(text)],
)
@click.option("--engine", multiple=True, type=click.Choice(contest.ENGINES), help="Only this engine. Repeatable.")
@click.option("--rival", multiple=True, type=click.Choice(list(RIVALS)), help="And somebody else's attention.")
@click.option(
    "--isa", multiple=True, default=["auto"], show_default=True, help="Kernels, and layout of the cache. Repeatable."
)
@click.option(
    "--dtype",
    multiple=True,
    type=click.Choice(DTYPES),
    default=["bfloat16"],
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--kv-cache-dtype",
    multiple=True,
    default=["auto"],
    show_default=True,
    help="fp8_e4m3, fp8_e5m2, int8, int6, int5, int4, int4_per_token_head, or two of them as K/V. Repeatable.",
)
@click.option(
    "--kv-cache-layout",
    type=click.Choice(["packed", "HND", "NHD"]),
    default="packed",
    show_default=True,
    help="Packed by the isa, or rows as others own them; mla has NHD instead of packed.",
)
@click.option(
    "--kv-cache-rotation",
    multiple=True,
    default=["none"],
    show_default=True,
    help="hadamard, or none and hadamard as K/V. Repeatable.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, INT32_MAX),
    default=128,
    show_default=True,
    help="Tokens of a block (vLLM's on CPUs).",
)
@click.option(
    "--threads",
    multiple=True,
    type=click.IntRange(1, 4096),
    help="Of limits and engines alike. Repeatable: how they scale.  [default: OpenMP's]",
)
@click.option("--repeat", type=click.IntRange(1), help="Runs of each.  [default: as many as fit a second]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV instead of the table.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Markdown instead of the table.")
@click.option("--list", "as_list", is_flag=True, help="List the workloads, and run none.")
@click.option("--plot", "plot_to", type=FILE, help="Draw a roofline, or how threads scale (png, svg, pdf).")
@click.option("--save", type=FILE, help="Write the JSON there, too.")
@click.option("--compare", "compare_to", type=FILE, help="Ratios against a report of --save; beside --csv on stderr.")
@click.option(
    "--model-config",
    type=FILE,
    help="A model's config.json (Hugging Face): its heads, head size, windows, softcap and layers.",
)
@_options
def bench(
    names: tuple[str, ...],
    engine: tuple[str, ...],
    rival: tuple[str, ...],
    isa: tuple[str, ...],
    dtype: tuple[str, ...],
    kv_cache_dtype: tuple[str, ...],
    kv_cache_layout: str,
    kv_cache_rotation: tuple[str, ...],
    block_size: int,
    threads: tuple[int, ...],
    repeat: int | None,
    as_json: bool,
    as_csv: bool,
    as_markdown: bool,
    as_list: bool,
    plot_to: Path | None,
    save: Path | None,
    compare_to: Path | None,
    model_config: Path | None,
    **shape: Any,
) -> None:
    """Time attention, cache writes and plans beside the limits of this machine, measured in the same run.

    WORKLOAD is a name (prefill-2k, decode-8x8k, write-8k, ...), or prefill, decode, mla, cascade, linear or all; all
    unless told. Own kernels and oneDNN take turns. The limit of a prefill, of mla, and of decodes that share most of
    their keys (cascade), is the peak of its isa's products, of a decode the read bandwidth, of a cache write memcpy, as
    of decodes and convolutions of linear. The roof that binds is whichever takes longer, products or memory, and was
    measured right before and after. After Ctrl-C the workloads that were done are shown and saved, and the exit status
    is 130.

    cpu-attn bench prefix-store, which has options of its own, times prompts out of a prefix store.
    """
    if as_list:
        show_list()
        return
    if as_json + as_csv + as_markdown > 1:
        raise click.UsageError("--json, --csv and --markdown exclude each other")
    then = report.load(compare_to) if compare_to else None
    for path in (plot_to, save):
        if path and not path.parent.is_dir():
            raise click.UsageError(f"{path}: there is no folder {path.parent}")
        if path and path.is_dir():
            raise click.UsageError(f"{path}: a folder, expected a file")
    kvs: set[str] = set()
    for kind, d in product(kv_cache_dtype, dtype):
        try:
            kvs.update(kv_dtypes(kind, d))
            check_layout(kv_cache_layout, kv_dtypes(kind, d))
        except ValueError as error:
            raise click.UsageError(_of_option("kv_cache_dtype", error)) from None
    for rotation in kv_cache_rotation:
        try:
            check_rotation(rotation)
        except ValueError as error:
            raise click.UsageError(_of_option("kv_cache_rotation", error)) from None
    workloads = chosen(names, shape, kvs, model_config)
    if set(kv_cache_rotation) != {"none"} and any(w.latent_rank for w in workloads):
        raise click.UsageError("--kv-cache-rotation: mla has K and V in the same rows, which are not rotated")
    sizes = {w.head_size for w in workloads}
    engines = {(i, d): engines_here(engine, rival, i, d, sizes) for i, d in product(*map(dict.fromkeys, (isa, dtype)))}
    for kind, rotation in product(kv_cache_dtype, kv_cache_rotation):
        refuse_idle(workloads, engines, engine + rival, kind, block_size, rotation)
    numbers = usable(threads or [cpu_attn.get_num_threads()])
    if plot_to:
        plot.check(plot_to, {w.kind for w in workloads})
    cache = {"block_size": block_size, "kv_cache_layout": kv_cache_layout}
    caches = [
        {**cache, "kv_cache_dtype": kind, "kv_cache_rotation": rotation}
        for kind, rotation in product(dict.fromkeys(kv_cache_dtype), dict.fromkeys(kv_cache_rotation))
    ]
    try:
        found = run(workloads, engines, numbers, repeat, caches)
    except MemoryError as error:
        raise click.ClickException(f"no memory for it: {error}") from None
    if then:
        found["comparison"] = report.compare(then, found)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif as_csv:
        click.echo(report.as_csv(found), nl=False)
    elif as_markdown:
        click.echo(report.as_markdown(found), nl=False)
    else:
        report.show(found)
    if then and not as_json:
        with redirect_stdout(sys.stderr if as_csv or as_markdown else sys.stdout):
            report.show_comparison(found["comparison"])
    for warning in found["warnings"]:
        click.echo(report.fold(warning, "warning: "), err=True)
    for path, write in ((save, _write), (plot_to, plot.draw)):
        if path:
            try:
                write(found, path)
            except OSError as error:
                raise click.ClickException(f"{path}: {error.strerror or error}") from None
            click.echo(f"written: {path}", err=True)
    if found["stopped"]:
        sys.exit(report.INTERRUPTED)
