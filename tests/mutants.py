# SPDX-License-Identifier: Apache-2.0
"""Would the tests notice? Breaks the package in one place at a time, as mutants.toml says, and runs the tests that are
to fail then. ``make mutants`` runs it.

The package of the environment is copied to build/mutants/overlay, where tests find it first, and only this copy is
changed: a Python file in place; for native files what build_ext links of a copy of the sources, by what ``make``
installed for builds, through ccache where that is there. A mutant whose library (an adapter's) or isa is not here is
left out.

With --random the mutants are drawn from all places of native/ that tests/mutate.py knows how to break, or of what of
native/ and cpu_attn/ TOUCHING has tests for. One of native/ whose types do not fit, or whose modules have the bytes of
the unchanged ones, is none and is left out.
"""

from __future__ import annotations

import dataclasses
import filecmp
import fnmatch
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import cpu_attn
from cpu_attn.tests import mutate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
WORK = ROOT / "build" / "mutants"
OVERLAY, SOURCE = WORK / "overlay", WORK / "source"
ADAPTERS = {
    **{name: name for name in ("torch", "transformers", "vllm", "sglang")},
    **dict.fromkeys(("flash_attn", "flashinfer", "linear_attention"), "torch"),
}
TO_BUILD = (
    *("native", "build_ffi.py", "pyproject.toml", "README.md", "LICENSE"),
    *("cpu_attn/__init__.py", "cpu_attn/_arguments.py", "cpu_attn/_quota.py"),  # its version, its table, its CPUs
)
BUILD_EXT = "import setuptools; setuptools.setup()"
KILLED, SURVIVED, STALE, TIMEOUT, BROKEN, LEFT_OUT = "killed", "SURVIVED", "STALE", "timeout", "BROKEN", "left out"
# What of native/ no random mutant breaks: what cffi reads, what only bench asks for, what stands in for instructions.
UNTOUCHED = ("native/cpu_attn.h", "native/limits/", "native/kernel/emulation/")
# Files of tests that a random mutant of a file has to pass, quick ones first. The longest name counts.
TOUCHING = {
    "cpu_attn/adapters/linear_attention/": "linear_attention_states linear_attention",
    "native/cache/": "write leaks cache quantised fp8 layout rotary selected layout_convert",
    "native/cache/hadamard.c": "rotated quantised",
    "native/cache/transforms.c": "rotary leaks rotated write",
    "native/check/": "errors leaks arguments repeated mla selected_tokens query_blocks indexer context_parallel "
    "cascade",
    "native/cpu/": "info threads variants self_test",
    "native/cpu/nodes.c": "numa info",
    "native/engines/": "context_parallel onednn attention",
    "native/engines/onednn/": "onednn quantised numbers attention memory_ends",
    "native/isa/": "quantised fp8 indexer context_parallel write attention numbers",
    "native/kernel/": "quantised mla selected indexer context_parallel attention numbers",
    "native/kernel/amx/": "parts pipeline quantised mla selected selected_tokens indexer context_parallel attention "
    "numbers",
    "native/kernel/cache_write/": "write rotary rotated quantised",
    "native/kernel/kv_formats/": "quantised fp8 context_parallel attention numbers",
    "native/kernel/attention/block_scores.inc": "selected query_heads",
    "native/kernel/attention/token_scores.inc": "indexer",
    "native/kernel/attention/token_sums.inc": "indexer",
    "native/linear/": "linear_errors linear_conv linear_bits linear",
    "native/plan/": "query_blocks leaks query_heads errors threads context_parallel cascade attention",
    "native/plan/by_node.c": "numa leaks",
    "native/plan/masks.c": "masks leaks errors context_parallel cascade",
    "native/plan/share.c": "cascade leaks masks memory_ends",
    "native/run/": "repeated leaks masks mla selected query_heads threads context_parallel cascade rotated attention",
    "native/run/merge_states.c": "merge_states context_parallel",
    "native/run/threads.c": "threads quota info",
    "native/sparse/": "selected_tokens indexer selected",
    "native/sparse/block_bounds.c": "selected leaks query_heads query_blocks",
    "native/sparse/indexer.c": "indexer leaks query_heads",
    "native/sparse/selected_tokens.c": "selected_tokens context_parallel",
}
# Builds of few isas, the quickest first.
ISAS: tuple[tuple[str, ...], ...]
ISAS = ((), ("scalar",), ("scalar", "avx2"), ("scalar", "avx512"), ("scalar", "avx512", "avx512_bf16"))
ISAS += ((*ISAS[-1], "amx"),)
# For pytest's -k: what is compiled once is tried through the best isa alone.
BEST = " and ".join(f"not {isa.name}-" for isa in [isa for isa in cpu_attn.isas() if isa.supported][1:])
# Of a kernel's mutant, which is built with few isas, no test that wants several.
SEVERAL = "not test_a_plan_for_another_layout_is_refused and not test_isa_that_is_not_there_says_what_is"
LIMIT, LIMIT_OF_A_TEST = 1800, 300  # seconds, of random mutants
# Whoever reads what gcc says sees these: arguments of other types, a function that ends without its value.
MISFIT = re.compile(r"\[-W(?:int-conversion|incompatible-pointer-types|return-type)\]")


@dataclass(frozen=True)
class Mutant:
    """file: of the repository; find: what stands in it exactly once; replace: what comes in its place; tests: files of
    tests/*/, or ``file::test``; select: for pytest's -k; breaks: what is wrong then; isas: files of native/isa to build
    it with, all of them unless said (a file takes a minute)."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    breaks: str
    select: str = ""
    isas: tuple[str, ...] = ()

    @property
    def native(self) -> bool:
        return self.file.startswith("native/") or self.file == "cpu_attn/_arguments.py"

    @property
    def library(self) -> str:
        """Without which neither the file nor its tests run, "" for none."""
        return ADAPTERS.get(Path(self.file).parts[2], "") if self.file.startswith("cpu_attn/adapters/") else ""

    @property
    def missing(self) -> str:
        """What it needs and is not here, "" for nothing."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return self.library
        unsupported = [isa.name for isa in cpu_attn.isas() if isa.name in self.isas and not isa.supported]
        return ", ".join(unsupported)

    @property
    def installed(self) -> str:
        """The file's place in the package."""
        return re.sub(r"^(?:(cli|tests)|cpu_attn/adapters/(\w+))/", r"cpu_attn/\1\2/", self.file)

    def applied(self) -> str:
        """The file's text with the change. ValueError unless there is one place for it."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.find)) != 1:
            raise ValueError(f"{self.file} has {times} times {self.find!r}, expected once")
        return text.replace(self.find, self.replace)


class BrokenError(Exception):
    """A mutant that says nothing of the tests: it does not build, or they fail without it."""


def place(test: str) -> str:
    """Gives ``file::test`` as pytest takes it, wherever below tests/ the file is."""
    file, *name = test.split("::")
    (path,) = (ROOT / "tests").glob(f"*/{file}")
    return "::".join((str(path), *name))


def read() -> list[Mutant]:
    """mutants.toml in its order. TypeError for an entry that lacks something or has more."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text(encoding="utf-8"))
    found = []
    for name, entry in entries.items():
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in entry.items()}
        found.append(Mutant(name, **fields))
    return found


@cache
def included(file: str) -> frozenset[str]:
    """The file and what of native/ it includes, and so on."""
    named = re.findall(r'^#include "(.+)"', (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    found = {str(folder / name) for name in named for folder in (Path("native"), Path(file).parent)}
    return frozenset({file}).union(*(included(name) for name in found if (ROOT / name).is_file()))


def drawn(number: int, seed: int, under: str = "native/") -> list[Mutant]:
    """Mutants of native/, or of what of TOUCHING has paths that begin like this, at random: the same ones for the same
    sources, number and seed."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("native", "cpu_attn")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".h", ".inc", ".py")
    ]
    files = [file for file in files if file.startswith(tuple(TOUCHING)) and not file.startswith(UNTOUCHED)]
    files = [file for file in files if file.startswith(under)]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    found = []
    for i, (kind, file, change) in enumerate(mutate.draw(texts, number, seed)):
        text = texts[file]
        name = max((name for name in TOUCHING if file.startswith(name)), key=len)
        tests = tuple(f"test_{test}.py" for test in TOUCHING[name].split())
        place, old = f"{file}:{text.count(chr(10), 0, change.start) + 1}", text[change.start : change.end]
        breaks = " ".join(f"{place}: {kind}: {old} -> {change.replacement}".split())
        found.append(Mutant(f"random-{seed}-{i:03}", file, *mutate.as_texts(text, change), tests, breaks))
    return found


def ended(command: Sequence[Any], log: Path, limit: float | None = None, **options: Any) -> int:
    """Its exit status; output goes to the log. TimeoutError after so many seconds, when all that it started is gone."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Workshop:
    """The overlay, and what is known of the unchanged package."""

    def __init__(self) -> None:
        self.package = Path(cpu_attn.__file__).parent
        self.seconds: dict[tuple[Any, ...], float] = {}  # that tests take without a mutant
        self.built: dict[tuple[str, ...], Path] = {}
        shutil.rmtree(OVERLAY, ignore_errors=True)
        shutil.copytree(self.package, OVERLAY / "cpu_attn", ignore=shutil.ignore_patterns("__pycache__"))

    def restore(self) -> None:
        for path in OVERLAY.rglob("*"):
            original = self.package / path.relative_to(OVERLAY / "cpu_attn") if path.is_file() else path
            if path.is_file() and path.stat().st_mtime_ns != original.stat().st_mtime_ns:
                shutil.copy2(original, path)

    def put(self, library: Path) -> None:
        """The extension modules of a build; under a new name first, since others may have them open."""
        for built in (library / "cpu_attn").glob("*.so"):
            new = OVERLAY / "cpu_attn" / f"{built.name}.new"
            shutil.copy(built, new)
            new.replace(new.with_suffix(""))

    def build(self, isas: tuple[str, ...], mutant: Mutant | None = None) -> Path:
        """The folder that build_ext filled."""
        shutil.rmtree(SOURCE, ignore_errors=True)
        SOURCE.mkdir(parents=True)
        for name in TO_BUILD:
            (SOURCE / name).parent.mkdir(exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, SOURCE / name)
        for path in (SOURCE / "native" / "isa").glob("*.c"):
            if isas and path.stem not in isas:
                path.unlink()
        if mutant:
            (SOURCE / mutant.file).write_text(mutant.applied(), encoding="utf-8")
        target = WORK / "lib" / ("mutant" if mutant else "-".join(("unchanged", *isas)))
        shutil.rmtree(target, ignore_errors=True)
        environment = {**os.environ, "CCACHE_NOHASHDIR": "1"}
        compiler = environment.get("CC", "cc")
        if shutil.which("ccache") and "ccache" not in compiler:
            environment["CC"] = f"ccache {compiler}"
        log = WORK / f"{mutant.name if mutant else target.name}.build.log"
        command = [sys.executable, "-c", BUILD_EXT, "build_ext", "--build-lib", target, "--build-temp", "temp"]
        module = "_onednn" if mutant and mutant.file.startswith("native/engines/onednn/") else "_native"
        if ended(command, log, cwd=SOURCE, env=environment) or not list(target.glob(f"cpu_attn/{module}.*")):
            raise BrokenError(f"did not build: {log}")
        return target

    def base(self, isas: tuple[str, ...]) -> Path:
        """What build gives of the unchanged sources."""
        if isas not in self.built:
            self.built[isas] = self.build(isas)
        return self.built[isas]

    def compiled(self, mutant: Mutant) -> tuple[Mutant, Path] | None:
        """The mutant, with the fewest isas in whose modules it is to be seen, and its build; None where it is in none
        of them, or where gcc says what is wrong."""
        kernel = mutant.file.startswith("native/isa/") or not mutant.file.endswith(".c")
        for isas in ISAS[1:] if kernel else ISAS[:1]:
            if kernel and mutant.file not in included(f"native/isa/{isas[-1]}.c"):
                continue
            mutant = dataclasses.replace(mutant, isas=isas, select=SEVERAL if kernel else BEST)
            if mutant.missing:
                continue
            base = self.base(isas)
            try:
                made = self.build(isas, mutant)
            except BrokenError:
                return None
            if MISFIT.search((WORK / f"{mutant.name}.build.log").read_text(encoding="utf-8")):
                return None
            modules = [path.name for path in (base / "cpu_attn").glob("*.so")]
            if filecmp.cmpfiles(base / "cpu_attn", made / "cpu_attn", modules, shallow=False)[1]:
                return mutant, made
        return None

    def test(self, mutant: Mutant, limit: float | None, log: Path) -> int:
        marks = "integrations" if mutant.library else "not packaging and not integrations"
        command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-x", "-m", marks]
        command += ["-o", f"faulthandler_timeout={LIMIT_OF_A_TEST}", "-o", "faulthandler_exit_on_timeout=true"]
        command += ["-p", "no:cacheprovider", *(["-k", mutant.select] if mutant.select else [])]
        command += map(place, mutant.tests)
        environment = {**os.environ, "PYTHONPATH": str(OVERLAY), "PYTHONDONTWRITEBYTECODE": "1"}
        return ended(command, log, limit, cwd=WORK, env={**environment, "OMP_WAIT_POLICY": "passive"})

    def unchanged(self, mutant: Mutant) -> float:
        """Seconds that the mutant's tests take where nothing is broken, in a build of its isas."""
        key = (mutant.tests, mutant.select, mutant.isas, mutant.library)
        if key not in self.seconds:
            if mutant.isas:
                self.put(self.base(mutant.isas))
            start, log = perf_counter(), WORK / f"{mutant.name}.unchanged.log"
            if status := self.test(mutant, None, log):
                raise BrokenError(f"its tests end with {status} without it: {log}")
            self.seconds[key] = perf_counter() - start
        return self.seconds[key]

    def outcome(self, mutant: Mutant, library: Path | None = None) -> tuple[str, str]:
        """What became of it, and which test failed or what went wrong. library: the build of a random one, whose tests
        are known to pass without it."""
        if mutant.missing:
            return LEFT_OUT, f"needs {mutant.missing}"
        try:
            text = mutant.applied()
            limit = LIMIT if library else 60 + 5 * self.unchanged(mutant)
            if mutant.native:
                self.put(library or self.build(mutant.isas, mutant))
            else:
                (OVERLAY / mutant.installed).write_text(text, encoding="utf-8")
            log = WORK / f"{mutant.name}.log"
            status = self.test(mutant, limit, log)
        except ValueError as error:
            return STALE, str(error)
        except BrokenError as error:
            return BROKEN, str(error)
        except TimeoutError:
            return TIMEOUT, f"after {limit:.0f} s"
        finally:
            self.restore()
        if status == 0:
            return SURVIVED, mutant.breaks
        if status in (1, 2) or status < 0:  # a test failed, none could be collected, or the process crashed
            said = log.read_text(encoding="utf-8")
            if re.search(r"Timeout \(\d+:\d+:\d+\)!$", said, re.MULTILINE):
                return TIMEOUT, f"a test takes more than {LIMIT_OF_A_TEST} s"
            failed = re.search(r"^(?:FAILED|ERROR) (?:\S*tests/)?(.+?)(?: - |$)", said, re.MULTILINE)
            return KILLED, failed[1] if failed else f"ended with {status}"
        return BROKEN, f"pytest ended with {status}: {log}"


def sampled(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Gives so many of the mutants, or all where there are no more, in their order."""
    places = random.Random(seed).sample(range(len(mutants)), min(number, len(mutants)))
    return [mutants[place] for place in sorted(places)]


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="Say what there is.")
@click.option("--random", "number", type=click.IntRange(1), help="Draw so many mutants of --under instead.")
@click.option("--under", default="native/", show_default=True, help="How the paths begin where --random draws.")
@click.option("--sample", type=click.IntRange(1), help="Take so many of those that can run here.")
@click.option("--seed", default=0, show_default=True, help="Which ones --random and --sample draw.")
def main(
    names: tuple[str, ...], only_list: bool, number: int | None, under: str, sample: int | None, seed: int
) -> None:
    """Break the package as tests/mutants.toml says, one mutant after the other, and see whether tests fail.

    NAME is that of a mutant, or a pattern like 'plan-*'; all unless said. Exits with 1 if a mutant survived, if its
    text is no longer in its file, or if it does not build or its tests fail without it.
    """
    mutants = drawn(number, seed, under) if number else read()
    for name in names:
        if not fnmatch.filter([m.name for m in mutants], name):
            raise click.UsageError(f"no mutant {name!r}; --list says which there are")
    chosen = [m for m in mutants if not names or any(fnmatch.fnmatch(m.name, name) for name in names)]
    if sample:
        chosen = sampled([m for m in chosen if not m.missing], sample, seed)
    width = max(len(m.name) for m in chosen)
    if only_list:
        for mutant in chosen:
            click.echo(f"{mutant.name:{width}}  {mutant.file}: {mutant.breaks}")
        return
    WORK.mkdir(parents=True, exist_ok=True)
    workshop = Workshop()
    found: list[str] = []
    try:
        for mutant in chosen:
            start = perf_counter()
            built = workshop.compiled(mutant) if number and mutant.native else (mutant,)
            outcome, why = workshop.outcome(*built) if built else (LEFT_OUT, f"none: {mutant.breaks}")
            found.append(outcome)
            click.echo(f"{outcome:8}  {mutant.name:{width}}  {perf_counter() - start:5.0f} s  {why}")
    except KeyboardInterrupt:
        click.echo(f"stopped, {len(chosen) - len(found)} did not run")
    counts = {outcome: found.count(outcome) for outcome in dict.fromkeys(found)}
    click.echo(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    if len(found) < len(chosen) or any(outcome in counts for outcome in (SURVIVED, STALE, BROKEN)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
