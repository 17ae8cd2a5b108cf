# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn verify`` checks every engine and isa that this machine can run against the float64 oracle."""

from __future__ import annotations

import difflib
import json
import math
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import cpu_attn
from cpu_attn import _dispatch
from cpu_attn._native import lib
from cpu_attn.cli.info import cpu
from cpu_attn.cli.report import INTERRUPTED, counted, new_console, new_table
from cpu_attn.linear import get_linear_attention_metadata
from cpu_attn.reference import BUDGET
from cpu_attn.tests.cases import linear_cases
from cpu_attn.tests.cases.case import Case
from cpu_attn.tests.cases.formats import DTYPES
from cpu_attn.tests.cases.judge import check, same_bits
from cpu_attn.tests.cases.levels import cases, invariant
from cpu_attn.tests.cases.problem import Problem, alone, build
from cpu_attn.tests.cases.run import Written, run, written

ENGINES = ("native", "onednn", "onednn-python", "reference", "linear", "linear-reference")
LINEAR = {"linear": "native", "linear-reference": "reference"}  # linear attention, by these engines of its own
# This is Python over oneDNN's primitives, which the engine onednn takes through every case. It runs the cases that are
# composable, and without options only those of --quick: through all of them it took a quarter of the time.
SLOW = "onednn-python"
ISA_HINTS = ("auto", "vec", "vec16")
THREADS = (1, 2, 3, 5)
Memory = Callable[[str, int | None], Written]  # gives what so many threads wrote for an isa
# This is what must not change a bit, by engine. onednn picks its kernels by the shapes of a whole step.
SAME_BITS = {
    "native": ("batch", "threads", "split"),
    "reference": ("batch", "threads", "split"),
    "onednn": ("threads", "split"),
    "linear": ("batch", "threads"),
}


@dataclass(frozen=True)
class Combo:
    engine: str
    isa: str
    dtype: str


@dataclass(frozen=True)
class Failure:
    engine: str
    isa: str
    dtype: str
    case: str
    message: str
    rerun: str


@dataclass
class Tally:
    """Says what became of one combination. worst: the largest error in units of the budget."""

    combo: Combo
    ran: int = 0
    worst: float = -1.0
    worst_case: str = ""
    failures: list[Failure] = field(default_factory=list)

    def add(self, job: Job, worst: float, messages: Sequence[str]) -> None:
        self.ran += 1
        case = job.case
        if worst > self.worst:
            self.worst, self.worst_case = worst, case.name
        combo = self.combo
        options = f"--engine {combo.engine} --isa {combo.isa} --dtype {combo.dtype} --seed {case.seed}"
        rerun = f"cpu-attn verify --case {case.name} {options}{' --flush-subnormals' * job.flush_subnormals}"
        self.failures += [Failure(**asdict(combo), case=case.name, message=m, rerun=rerun) for m in messages]

    def summary(self) -> dict[str, Any]:
        budget = (linear_cases.BUDGET if self.combo.engine in LINEAR else BUDGET)[self.combo.dtype]
        error = self.worst * budget
        return {
            **asdict(self.combo),
            "cases": self.ran,
            "worst_error": error if math.isfinite(error) else None,
            "budget": budget,
            "worst_case": self.worst_case,
            "ok": not self.failures,
        }


# ---- what there is to run ----


def _missing(combo: Combo) -> str:
    """Says why a combination cannot run here, "" if it can."""
    engine = "onednn" if combo.engine == "onednn-python" else combo.engine
    for row in cpu_attn.isas():
        if row.name == combo.isa and not row.supported:
            return row.reason
    try:
        if combo.engine in LINEAR:
            loc, engine = np.zeros(1, np.int32), LINEAR[combo.engine]
            get_linear_attention_metadata(loc, combo.dtype, 1, 1, 16, 16, isa=combo.isa, engine=engine)
            return ""
        none = np.zeros(0, np.int32)
        cpu_attn.get_scheduler_metadata(
            0, 1, 1, 16, none, combo.dtype, np.zeros(1, np.int32), isa=combo.isa, engine=engine
        )
    except cpu_attn.UnavailableError as error:
        return str(error)
    return ""


def _combos(engines: Sequence[str], isas: Sequence[str], dtypes: Sequence[str]) -> tuple[list[Combo], dict[Combo, str]]:
    """Gives what runs, and what does not with its reason. Unless told otherwise the engines that are not made of isa
    kernels run over one cache layout only."""
    runs, missing = [], {}
    for engine in engines or ENGINES:
        for isa in isas or ([row.name for row in cpu_attn.isas()] if engine in ("native", "linear") else ["auto"]):
            for dtype in dtypes or DTYPES:
                combo = Combo(engine, isa, dtype)
                reason = _missing(combo)
                if reason:
                    missing[combo] = reason
                else:
                    runs.append(combo)
    return runs, missing


def _refuse_missing(asked: dict[str, Sequence[str]], runs: Sequence[Combo], missing: dict[Combo, str]) -> None:
    """Raises an error for an engine, isa or dtype that was asked for by name and runs in no combination."""
    for option, names in asked.items():
        for name in names:
            if not any(getattr(combo, option) == name for combo in runs):
                reasons = dict.fromkeys(why for combo, why in missing.items() if getattr(combo, option) == name)
                raise click.UsageError(f"--{option} {name} cannot run here: {'; '.join(reasons)}")


def _select(level: str, names: Sequence[str], dtype: str, seed: int) -> tuple[list[Case], set[str]]:
    """Gives the cases to run, and the names of those on which bits are compared too."""
    if not names:
        return cases(level, dtype, seed), {case.name for case in invariant(level, dtype, seed)}
    known = {case.name: case for case in cases("full", dtype, seed)}
    others = [case.name for case in linear_cases.cases("full", dtype, seed)]
    for name in names:
        if name not in known and name not in others:
            near = difflib.get_close_matches(name, [*known, *others], 3)
            there = f"there are {len(known) + len(others)}, such as {next(iter(known))}"
            raise click.UsageError(f"no case {name!r}: " + (f"did you mean {' or '.join(near)}?" if near else there))
    return [known[name] for name in names if name in known], set(names)


def _takes(combo: Combo, case: Case) -> bool:
    if combo.engine == SLOW and not case.composable:
        return False
    isa = _dispatch.asked("isa", combo.isa, "CPU_ATTN_ISA")
    return isa != "vec16" or case.head_size % 16 == case.value_size % 16 == 0


# ---- running it ----


def _differences(problem: Problem, combo: Combo, memory: Memory, output: Any, lse: Any) -> Iterator[str]:
    """Gives what changes the bits of a result and must not."""
    promised = SAME_BITS.get(combo.engine, ())

    def same(p: Problem, wanted: Any, **options: Any) -> bool:
        return all(map(same_bits, run(p, combo.isa, combo.engine, **options), wanted))

    if "threads" in promised:
        for n in THREADS:
            if not same(problem, (output, lse), num_threads=n, memory=memory(combo.isa, n)):
                yield f"{n} threads give other bits"
    if "split" in promised:
        for n in THREADS:
            options = {"num_threads": n, "enable_kv_split": False}
            if not same(problem, (output, lse), **options, memory=memory(combo.isa, n)):
                yield f"enable_kv_split=False on {n} threads gives other bits"
    if "batch" in promised:
        for r, first in enumerate(problem.query_start_loc[:-1]):
            rows = slice(int(first), int(problem.query_start_loc[r + 1]))
            if not same(alone(problem, r), (output[rows], lse[:, rows]), num_threads=THREADS[r % len(THREADS)]):
                yield f"request {r} alone gives other bits than in its batch"


def _verify_one(problem: Problem, combo: Combo, memory: Memory, compare_bits: bool) -> tuple[float, list[str]]:
    """Gives the worst error in units of the budget, and what is wrong."""
    try:
        got = run(problem, combo.isa, combo.engine, memory=memory(combo.isa, None))
        result = check(problem, *got)
        messages = [] if result.ok else [result.message]
        if compare_bits:
            messages += _differences(problem, combo, memory, *got)
    except Exception as error:
        return math.inf, [f"{type(error).__name__}: {error}"]
    return result.worst, messages


def _verify_linear(problem: linear_cases.Problem, combo: Combo, compare_bits: bool) -> tuple[float, list[str]]:
    """Does for linear attention what _verify_one does."""
    try:
        got = linear_cases.run(problem, combo.isa, LINEAR[combo.engine])
        worst, where = linear_cases.errors(problem, got)
        messages = [] if worst <= 1 else [f"{worst:.3g} of the budget in the {where}"]
        if compare_bits and combo.engine in SAME_BITS:
            messages += linear_cases.differences(problem, got, combo.isa, THREADS)
    except Exception as error:
        return math.inf, [f"{type(error).__name__}: {error}"]
    return worst, messages


class Job(NamedTuple):
    """Holds a case, what it is checked on, whether bits are compared, too, and whether the caller's threads take
    subnormal numbers for 0. The oracle computes once for all, and caches are written once for all engines that read
    them."""

    case: Case | linear_cases.Case
    combos: list[Combo]
    compare_bits: bool
    flush_subnormals: bool = False


def _verify_job(job: Job) -> list[tuple[float, list[str]]]:
    mode = lib.ca_float_mode()
    if job.flush_subnormals:
        lib.ca_set_float_mode(lib.ca_computing_float_mode())
    try:
        return _verify_combos(job)
    finally:
        lib.ca_set_float_mode(mode)


def _verify_combos(job: Job) -> list[tuple[float, list[str]]]:
    if isinstance(job.case, linear_cases.Case):
        made = linear_cases.build(job.case)
        return [_verify_linear(made, combo, job.compare_bits) for combo in job.combos]
    problem = build(job.case)
    memory = lru_cache(1 + len(THREADS))(partial(written, problem))  # engines of an isa follow one another
    return [_verify_one(problem, combo, memory, job.compare_bits) for combo in job.combos]


def _jobs(runs: Sequence[Combo], level: str, names: Sequence[str], seed: int, engines: Sequence[str] = ()) -> list[Job]:
    """Gives all jobs. engines: those that were asked for by name, for which there have to be some."""
    jobs = []
    for dtype in dict.fromkeys(combo.dtype for combo in runs):
        selected, compared = _select(level, names, dtype, seed)
        here = [combo for combo in runs if combo.dtype == dtype and combo.engine not in LINEAR]
        few = {*names, *(case.name for case in cases("quick" if level == "default" else level, dtype, seed))}
        found = []
        for case in selected:
            combos = [c for c in here if _takes(c, case) and (c.engine != SLOW or case.name in few)]
            found.append(Job(case, combos, case.name in compared))
        for combo in set(here).difference(*(job.combos for job in found)) if selected else ():
            if combo.engine != SLOW or any(case.composable for case in selected):
                raise click.UsageError(f"--case {' '.join(names)}: vec16 is for head sizes that are multiples of 16")
            if SLOW in engines:
                raise click.UsageError(
                    f"--case {' '.join(names)}: {SLOW} has causal and sliding_window, no other masks, no attn_bias, no "
                    "selection and no kv_cache_rotation"
                )
        jobs += [job for job in found if job.combos]
        linear = [combo for combo in runs if combo.dtype == dtype and combo.engine in LINEAR]
        of = linear_cases.cases("full" if names else level, dtype, seed)
        for one in of if linear else ():
            if not names or one.name in names:
                even = one.head_k_dim % 16 == 0
                jobs.append(Job(one, [c for c in linear if even or c.isa != "vec16"], True))
    return jobs


def _num_checks(jobs: Sequence[Job]) -> int:
    return sum(len(job.combos) for job in jobs)


def _processes(num_checks: int) -> int:
    """Gives the number of processes. A check is small and takes one core, and few of them are done before another
    process has begun."""
    return min(8, cpu()["cpus"]) if num_checks > 3000 else 1


def _outcomes(jobs: Sequence[Job], processes: int) -> Generator[list[tuple[float, list[str]]], None, None]:
    """Gives the outcomes of each job, in their order."""
    if processes == 1:
        yield from map(_verify_job, jobs)
        return
    # Threads that wait must not spin on a core that another process needs, nor those of NumPy's products. The variables
    # are read where OpenMP and OpenBLAS are loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(processes, get_context("spawn"))
    try:
        # A terminal tells all of its processes of Ctrl-C. Those that are started here inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        outcomes = pool.map(_verify_job, jobs, chunksize=4)
        signal.signal(signal.SIGINT, handler)
        yield from outcomes
    except BrokenProcessPool:
        raise click.ClickException("a check ended its process; --jobs 1 shows in the progress line which") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _verify(jobs: Sequence[Job], processes: int, console: Console) -> list[Tally]:
    """Runs all cases of all combinations, and gives those that were done where Ctrl-C came."""
    tallies = {combo: Tally(combo) for job in jobs for combo in job.combos}
    columns = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), "left"
    progress = Progress(
        *columns,
        console=console,
        speed_estimate_period=600,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
    )
    task = progress.add_task("", total=_num_checks(jobs))
    with suppress(KeyboardInterrupt), progress, closing(_outcomes(jobs, processes)) as outcomes:
        for job in jobs:
            progress.update(task, description=f"{job.case.dtype} {job.case.name}")
            for combo, outcome in zip(job.combos, next(outcomes), strict=True):
                tallies[combo].add(job, *outcome)
            progress.advance(task, len(job.combos))
    return [tally for tally in tallies.values() if tally.ran]


# ---- telling it ----


def _tell(tallies: Sequence[Tally], missing: dict[Combo, str], failures: Sequence[Failure], num_checks: int) -> None:
    """Prints what became of the checks. num_checks: how many were to be made."""
    table = new_table("engine", "isa", "dtype", numbers=("cases", "worst\nerror", "budget"))
    table.add_column("in case", overflow="fold")
    table.add_column("", no_wrap=True)
    for tally in tallies:
        row = tally.summary()
        error = "infinite" if row["worst_error"] is None else f"{row['worst_error']:.1e}"
        verdict = Text("ok", "green") if row["ok"] else Text(f"{len(tally.failures)} failed", "red")
        numbers = (str(row["cases"]), error, f"{row['budget']:.1e}")
        table.add_row(row["engine"], row["isa"], row["dtype"], *numbers, row["worst_case"], verdict)
    console = new_console()
    if tallies:
        console.print(table)
    absent: dict[str, list[str]] = {}
    for combo, reason in missing.items():
        absent.setdefault(f"{combo.engine} {combo.isa}: {reason}", []).append(combo.dtype)
    for what, dtypes in absent.items():
        console.print(f"not here ({', '.join(dtypes)}): {what}")
    for failure in failures:
        click.echo(f"{failure.case}: {failure.message}\n    {failure.rerun}")
    ran = sum(tally.ran for tally in tallies)
    if failures:
        bad = len({(f.engine, f.isa, f.dtype, f.case) for f in failures})
        click.echo(f"FAILED: {bad} of {counted(ran, 'check')}; each has a line above that runs it again.")
    elif ran:
        on = counted(len(tallies), "combination")
        click.echo(f"{'The' if ran == 1 else 'All'} {counted(ran, 'check')} passed on {on} of engine, isa and dtype.")
    if ran < num_checks:
        left = counted(num_checks, "check")
        click.echo(f"INTERRUPTED: {num_checks - ran} of {left} {'was' if num_checks - ran == 1 else 'were'} not made.")


@click.command(short_help="Check engines and isas against an oracle.")
@click.option("--engine", multiple=True, type=click.Choice(ENGINES), help="Only this engine. Repeatable.")
@click.option("--isa", multiple=True, help="Only this isa. Repeatable.")
@click.option("--dtype", multiple=True, type=click.Choice(DTYPES), help="Only this dtype. Repeatable.")
@click.option("--quick", is_flag=True, help="Fewer cases: seconds.")
@click.option("--full", is_flag=True, help="More cases, of onednn-python too: minutes.")
@click.option(
    "--case",
    "names",
    multiple=True,
    metavar="NAME",
    shell_complete=lambda ctx, param, text: [
        name
        for name in (*(c.name for c in cases("full")), *(c.name for c in linear_cases.cases("full")))
        if name.startswith(text)
    ],
    help="Only this case. Repeatable.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of all random numbers.")
@click.option("--flush-subnormals", is_flag=True, help="Call with threads that take them for 0, as -ffast-math does.")
@click.option("--jobs", type=click.IntRange(1, 64), help="Processes: as a rule one for each CPU, 8 at most.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def verify(
    engine: tuple[str, ...],
    isa: tuple[str, ...],
    dtype: tuple[str, ...],
    quick: bool,
    full: bool,
    names: tuple[str, ...],
    seed: int,
    flush_subnormals: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check every engine and isa of this machine against a float64 oracle.

    Also, bit for bit: a request alone against the same in a batch, any number of threads, keys split or not.
    Exits with 1 if a check fails, with 2 if something asked for by name is not there. Ctrl-C leaves what was checked
    by then: it is shown, and the exit status is 130 if none of it failed.
    """
    if quick and full:
        raise click.UsageError("--quick and --full exclude each other")
    known = [*ISA_HINTS, *(row.name for row in cpu_attn.isas())]
    for name in (*isa, _dispatch.asked("isa", "auto", "CPU_ATTN_ISA")):
        if name not in known:
            raise click.UsageError(f"{'--isa ' if name in isa else 'CPU_ATTN_ISA='}{name}: there is {', '.join(known)}")
    level = "quick" if quick else "full" if full else "default"
    runs, missing = _combos(engine, isa, dtype)
    _refuse_missing({"engine": engine, "isa": isa, "dtype": dtype}, runs, missing)
    work = [job._replace(flush_subnormals=flush_subnormals) for job in _jobs(runs, level, names, seed, engine)]
    num_checks = _num_checks(work)
    if not as_json:
        click.echo(f"making {counted(num_checks, 'check')} against the float64 oracle", err=True)
    tallies = _verify(work, jobs or _processes(num_checks), Console(stderr=True))
    interrupted = sum(tally.ran for tally in tallies) < num_checks
    failures = [failure for tally in tallies for failure in tally.failures]
    if as_json:
        report = {
            "ok": not failures and not interrupted,
            "stopped": interrupted,
            "level": level,
            "seed": seed,
            "flush_subnormals": flush_subnormals,
            "combinations": [tally.summary() for tally in tallies],
            "unavailable": [{**asdict(combo), "reason": reason} for combo, reason in missing.items()],
            "failures": [asdict(failure) for failure in failures],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        _tell(tallies, missing, failures, num_checks)
    if failures:
        raise SystemExit(1)
    if interrupted:
        raise SystemExit(INTERRUPTED)
