# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of the pages: of measured figures, of the calls' arguments, and of CSV files.

A page has each of its tables between two comments, which name it. Where cpu_attn is installed, ``python
docs/tables.py`` writes all of them, and ``python docs/tables.py NAME`` prints one.

A file of docs/reports has reports of ``cpu-attn bench`` (``--save``) as its ``runs``, beside the machine, the date, the
command, and the commit that brought the figures. Results that were kept only as the ratio to the own kernels' time have
it in ``takes``. A file of CSV is a table as it stands, below lines of ``#`` that say the same of it.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from cpu_attn import _arguments

DOCS = Path(__file__).resolve().parent
REPORTS = DOCS / "reports"
README = DOCS.parent / "README.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))
CSV = {file.stem: file for file in DOCS.rglob("*.csv")}
SITE = ""  # the address at which .github/workflows/pages.yml publishes the site; "" while nobody does
NAMES = {"onednn": "oneDNN", "vllm": "vLLM"}
Report = dict[str, Any]
Rows = list[list[str]]


def load(name: str) -> Report:
    report: Report = json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))
    return report


def found(report: Report, engine: str, **same: Any) -> Iterator[Report]:
    """The result of each run. Those by ``enable_gqa`` are left out: there torch copied K and V for every query head."""
    wanted = {"engine": engine, **same}.items()
    for run in report["runs"]:
        for result in run["results"]:
            if not result.get("enable_gqa") and all(result.get(field) == value for field, value in wanted):
                yield result


def mean(results: Sequence[Report], field: str) -> float | None:
    values = [result[field] for result in results if result.get(field) is not None]
    return fmean(values) if values else None


def measured(result: Report) -> tuple[str, str]:
    """The field of what its limit bounds, and the unit in which the page says it."""
    if result.get("limit_of") is None:
        return "seconds_min", "us"
    return ("kv_gbps", "GB/s") if result["limit_of"] in ("read_gbps", "memcpy_gbps") else ("gflops", "GF")


def speed(results: Sequence[Report]) -> str:
    """The mean of the runs."""
    field, unit = measured(results[0])
    value = fmean(result[field] for result in results) * (1e6 if unit == "us" else 1)
    return f"{value:.{0 if value >= 100 else 1}f} {unit}"


def fraction(results: Sequence[Report], field: str = "fraction_of_limit") -> str:
    value = mean(results, field)
    return "" if value is None else f"{value:.2f}"


def ratio(own: Report, other: Report) -> float:
    """The time of the other as a multiple of the own kernels'."""
    if "takes" in other:
        return float(other["takes"])
    if "seconds_min" in other:
        return float(other["seconds_min"] / own["seconds_min"])
    field, _ = measured(own)
    return float(own[field] / other[field])


def takes(reports: Sequence[Report], engine: str, workload: str) -> str:
    """The mean ratio of the runs of the first report in which the engine has the workload."""
    for report in reports:
        own, theirs = (list(found(report, name, workload=workload)) for name in ("native", engine))
        if theirs:
            value = fmean(ratio(*pair) for pair in zip(own or theirs, theirs, strict=True))
            return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
    return ""


def workloads(report: Report) -> list[str]:
    return list(dict.fromkeys(result["workload"] for result in report["runs"][0]["results"]))


def compared(name: str, *more: str, engines: str, columns: dict[str, Callable[[list[Report]], str]]) -> Rows:
    """A row for each workload: own kernels, and how many times as long the others take."""
    reports = [load(file) for file in (name, *more)]
    rows = [["workload", *columns, *(f"{NAMES.get(engine, engine)} takes" for engine in engines.split())]]
    for workload in workloads(reports[0]):
        own = list(found(reports[0], "native", workload=workload))
        others = [takes(reports, engine, workload) for engine in engines.split()]
        rows.append([workload, *(of(own) for of in columns.values()), *others])
    return rows


def by_threads(name: str) -> Rows:
    """Speed, what it is for each thread as a part of one thread's."""
    report = load(name)
    counts = list(dict.fromkeys(result["threads"] for result in report["runs"][0]["results"]))
    rows = [["threads", *(cell for w in workloads(report) for cell in (w, "per thread"))]]
    for threads in counts:
        row = [str(threads)]
        for workload in workloads(report):
            one, now = (next(found(report, "native", workload=workload, threads=n)) for n in (counts[0], threads))
            field, _ = measured(now)
            row += [speed([now]), f"{now[field] / threads / one[field] * counts[0]:.2f}"]
        rows.append(row)
    return rows


def rivals(name: str) -> Rows:
    report = load(name)
    results = report["runs"][0]["results"]
    columns = list(dict.fromkeys((r["engine"], r.get("kv_cache_dtype")) for r in results))
    rows = [["workload", *(" over ".join(filter(None, column)) for column in columns)]]
    for workload in workloads(report):
        cells = [mean(list(found(report, e, workload=workload, kv_cache_dtype=kv)), "takes") for e, kv in columns]
        rows.append([workload, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return rows


def as_it_stands(name: str) -> Rows:
    with CSV[name].open(encoding="utf-8", newline="") as file:
        return list(csv.reader(line for line in file if not line.startswith("#")))


def arguments(call: _arguments.Call) -> Rows:
    """The rows of a call in cpu_attn/_arguments.py: name, dtype and shape or type, and default."""
    rows = [[f"argument of `{call.name}`", "what", "default"]]
    for row in call.rows:
        if isinstance(row, _arguments.Array):
            form = row.form.removesuffix(".").removesuffix(", or None")
            rows.append([f"`{row.name}`", form, "`None`" if row.optional else ""])
        else:
            given = "" if row.default is _arguments.REQUIRED else f"`{row.default!r}`"
            rows.append([f"`{row.name}`", f"`{row.type}`".replace("|", "\\|"), given.replace("'", '"')])
    return rows


Cell = tuple[str, int, str]  # engine, rows, tokens of context
Gains = dict[str, dict[Cell, tuple[str, str]]]


def gains_of() -> Gains:
    """For each model the time until the first token, and that of a further one, where both were measured."""
    head, *rows = as_it_stands("gains")
    found: Gains = {}
    for row in rows:
        model, engine, batch = row[:3]
        for context, cell in zip(head[3:], row[3:], strict=True):
            if "," in cell:
                first, step = cell.split(", ")
                found.setdefault(model, {})[engine, int(batch), context] = first, step
    return found


def gained() -> Rows:
    """README's lines: the same work without and with cpu-attn."""
    found = gains_of()

    def prompt(engine: str) -> str:
        seconds, _ = found["Gemma 3 270M"][engine, 1, "8192"]
        return f"{float(seconds.removesuffix(' s')):.1f} s"

    def chats(engine: str) -> str:
        _, milliseconds = found["SmolLM2 135M"][engine, 8, "2048"]
        return f"{float(milliseconds.removesuffix(' ms')):.0f} ms"

    works = {
        "a prompt of 8192 tokens: Gemma 3 270M in transformers": (
            prompt,
            "transformers, sdpa",
            "transformers, cpu_attn",
        ),
        "a token for each of eight chats of 2048 tokens: SmolLM2 135M in transformers": (
            chats,
            "transformers, sdpa",
            "transformers, cpu_attn, PagedCache",
        ),
        "the same in vLLM": (chats, "vLLM", "vLLM, cpu_attn"),
    }
    rows = [[work, time(without), time(own)] for work, (time, without, own) in works.items()]
    return [["work", "without", "with cpu-attn"], *rows]


def gains_in_short() -> Rows:
    """A line for each model and engine, of three pieces of work."""
    works = {
        "prompt of 8192": (1, "8192", 0),
        "token behind 8192": (1, "8192", 1),
        "8 rows, token behind 2048": (8, "2048", 1),
    }
    rows = [["model", "engine", *works]]
    for model, cells in gains_of().items():
        for engine in dict.fromkeys(key[0] for key in cells):
            found = [cells.get((engine, batch, context), ("", ""))[which] for batch, context, which in works.values()]
            if any(found):
                rows.append([model, engine, *found])
    return rows


OWN: dict[str, Callable[[list[Report]], str]] = {"own kernels": speed}
LIMIT = {**OWN, "of the limit": fraction}
ROOF = {**OWN, "of the roof": partial(fraction, field="fraction_of_roof")}
TABLES: dict[str, Callable[[], Rows]] = {
    "picture": lambda: compared("zen4-picture", engines="onednn vllm torch", columns=OWN),
    "zen4": lambda: compared("zen4", "zen4-onednn-decode", "zen4-picture", engines="onednn vllm torch", columns=LIMIT),
    "zen4-avx2": lambda: compared(
        "zen4-avx2", engines="torch", columns={**OWN, "of the roof": partial(fraction, field="fraction_of_roof")}
    ),
    "zen4-float16": lambda: rivals("zen4-float16"),
    "emerald-rapids": lambda: compared("emerald-rapids", engines="onednn torch", columns=LIMIT),
    "emerald-rapids-threads": lambda: by_threads("emerald-rapids-threads"),
    "cascade-lake": lambda: compared("cascade-lake", "cascade-lake-torch", engines="onednn torch", columns=LIMIT),
    **{call.name: partial(arguments, call) for call in (_arguments.PLAN, _arguments.WRITE, _arguments.ATTENTION)},
    **{name: partial(as_it_stands, name) for name in CSV if name != "gains"},
    "gained": gained,
    "gains": gains_in_short,
}


def site() -> str:
    """README's sentence on the site."""
    return f"All pages are on the [site]({SITE})." if SITE else "`make docs` builds the [site](docs/index.md)."


def markdown(name: str) -> str:
    if name == "site":
        return site()
    header, *rows = ("|".join(f" {cell} " if cell else " " for cell in row) for row in TABLES[name]())
    return "\n".join(f"|{row}|" for row in (header, "|".join(["---"] * (header.count("|") + 1)), *rows))


def written(page: str) -> str:
    """The page with what stands between comments made again."""
    return re.sub(
        r"(<!-- begin: docs/tables.py (\S+) -->\n).*?(<!-- end: docs/tables.py -->)",
        lambda place: f"{place[1]}\n{markdown(place[2])}\n\n{place[3]}",
        page,
        flags=re.DOTALL,
    )


def stale() -> list[Path]:
    """The pages whose tables are not those that their sources make."""
    return [page for page in PAGES if written(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(markdown(name))
    for page in [] if sys.argv[1:] else stale():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
