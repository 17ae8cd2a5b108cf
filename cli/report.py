# SPDX-License-Identifier: Apache-2.0
"""This module tells what ``cpu-attn bench`` measured: a table, CSV, and one report against another."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

MOST = 2**24  # the most characters of a report; a device may have no end
INTERRUPTED = 130  # exit status after Ctrl-C, as a shell has it of a command that the signal ended
NO_TERMINAL = 10_000  # columns of a file or a pipe, unless COLUMNS says how many: more than any table has
RESULT_FIELDS = (
    "workload",
    "engine",
    "isa",
    "dtype",
    "kv_cache_dtype",
    "kv_cache_layout",
    "kv_cache_rotation",
    "threads",
    "seconds_min",
    "seconds_median",
    "runs",
    "spread",
    "tokens_per_second",
    "layers",
    "gflops",
    "kv_gbps",
    "limit",
    "limit_of",
    "fraction_of_limit",
    "roof_of",
    "fraction_of_roof",
    "workspace_bytes",
)
# Two results can be compared where these are the same.
SAME = ("workload", "engine", "isa", "dtype", "kv_cache_dtype", "kv_cache_layout", "kv_cache_rotation")
Columns = dict[str, Callable[[dict[str, Any]], str | Text]]  # for each header of a table, what a result has there
MACHINE = ("brand", "vendor", "family", "model", "stepping", "cpus", "amx_permission")


def new_console() -> Console:
    """Makes a console for stdout. Names and reasons from elsewhere are no markup; whatever has a style is a Text."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdigit() and int(columns) else NO_TERMINAL
    return console


def new_table(*names: str, numbers: Sequence[str]) -> Table:
    """Makes a table. Where it is too wide, names are folded, and nothing is cut off."""
    left = (Column(name, overflow="fold") for name in names)
    right = (Column(name, justify="right", no_wrap=True) for name in numbers)
    return Table(*left, *right, box=box.SIMPLE_HEAD, show_edge=False, padding=0)


def fold(text: str, begin: str = "") -> str:
    """Gives a text behind ``begin`` for stderr, folded between its words where it goes to a terminal, which would break
    inside of them."""
    if not sys.stderr.isatty():
        return begin + text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, initial_indent=begin, break_on_hyphens=False, break_long_words=False)


def counted(n: int, what: str) -> str:
    """Gives "1 check", "2 checks"."""
    return f"{n} {what}{'s' * (n != 1)}"


def seconds(x: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / size:.4g} {unit}"
    return f"{x * 1e6:.3g} us"


def cache(result: dict[str, Any]) -> str:
    """Says what a result's cache holds where that is something else than its dtype, and whether it is rotated."""
    held, rotation = result["kv_cache_dtype"], result["kv_cache_rotation"]
    return " ".join([*([held] if held != "auto" else []), *([rotation] if rotation != "none" else [])])


def kind(result: dict[str, Any]) -> str:
    """Gives a result's dtype, and what is said of its cache."""
    return f"{result['dtype']} {cache(result)}".strip()


def speed(result: dict[str, Any]) -> str:
    """Gives the figure that a result's limit bounds."""
    if result["limit_of"] in ("read_gbps", "memcpy_gbps"):
        return f"{result['kv_gbps']:.3g} GB/s"
    if result["limit_of"] is None:
        return ""
    return f"{result['gflops']:.4g} GF" if result["gflops"] < 1e4 else f"{result['gflops'] / 1e3:.4g} TF"


def of_roof(result: dict[str, Any]) -> str:
    """Says how near a result comes to the roof that binds it, and which this is."""
    if result["roof_of"] is None:
        return ""
    words = {"read_gbps": "reads", "memcpy_gbps": "copies"}
    return f"{result['fraction_of_roof']:.0%} {words.get(result['roof_of'], 'products')}"


def of_limit(result: dict[str, Any]) -> str:
    return "" if result["limit"] is None else f"{result['fraction_of_limit']:.0%}"


def spread(result: dict[str, Any]) -> str:
    """Says how much longer the middle run took than the shortest."""
    return "" if result["spread"] is None else f"+{result['spread']:.0%}"


def tokens(result: dict[str, Any]) -> str:
    """Gives tokens a second: 950, 12.3k, 1.23M."""
    rate = result["tokens_per_second"]
    if rate is None:
        return ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= 0.9995 * size:
            return f"{rate / size:.3g}{unit}" if rate < 999.5 * size else f"{rate / size:.0f}{unit}"
    return f"{rate:.3g}"


def thread_counts(report: dict[str, Any]) -> list[int]:
    return sorted({r["threads"] for r in report["results"]})


def per_thread(result: dict[str, Any], report: dict[str, Any]) -> float:
    """Gives a result's speed for each thread, as a part of what that is on the fewest threads."""
    same = (r for r in report["results"] if all(r[k] == result[k] for k in SAME))
    cost, least = (r["seconds_min"] * r["threads"] for r in (result, min(same, key=lambda r: int(r["threads"]))))
    return float(least / cost)


def show_limits(report: dict[str, Any], console: Console) -> None:
    several = len(thread_counts(report)) > 1
    for row in report["probes"]:
        value = "not here: lacks " + row["reason"] if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
        on = f" on {row['threads']}" if several and row["value"] else ""
        console.print(f"limit {row['limit']:14} {row['what']:22} {value}{on}")


def columns_of(report: dict[str, Any]) -> Columns:
    """Gives the columns of the table. "x as long" is how many times as long as the own kernels a row took in the same
    work."""

    def of_native(r: dict[str, Any]) -> str:
        own = next((x for x in report["results"] if x["engine"] == "native" and _together(x, r)), r)
        return "" if own is r else f"{r['seconds_min'] / own['seconds_min']:.2f}"

    columns: Columns = {
        "min": lambda r: seconds(r["seconds_min"]),
        "spread": spread,
        "speed": speed,
        "of\nlimit": of_limit,
        "of roof": of_roof,
        "tokens\n/s": tokens,
        "x as\nlong": of_native,
    }
    if len(thread_counts(report)) > 1:
        columns["per\nthread"] = lambda r: f"{per_thread(r, report):.2f}"
    return columns


def show(report: dict[str, Any]) -> None:
    """Prints limits, the table, and what it means for a model whose layers were said."""
    machine, counts, console = report["machine"], thread_counts(report), new_console()
    threads = f"{' and '.join(map(str, counts))} thread{'s' * (counts != [1])}"
    console.print(f"cpu-attn {machine['version']} on {machine['brand']}, {threads}")
    show_limits(report, console)
    _show_rows(report["results"], columns_of(report), console)
    for line in of_models(report["results"]):
        console.print(line)


def of_models(results: Sequence[dict[str, Any]]) -> list[str]:
    """Says what attention takes in all layers of a model together, where results are of its kinds of layers."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in results:
        if r["layers"]:
            name = r["workload"].split(" sliding_window=")[0]
            found.setdefault((name, " ".join(v for k, v in _names(r).items() if v)), []).append(r)
    lines = []
    for (name, who), rows in found.items():
        took = sum(r["layers"] * r["seconds_min"] for r in rows)
        kinds = " and ".join(f"{r['layers']} x {seconds(r['seconds_min'])}" for r in rows)
        line = f"{name}, {who}: attention of all layers takes {seconds(took)} ({kinds})"
        if rate := rows[0]["tokens_per_second"]:
            line += f", {tokens({'tokens_per_second': rate * rows[0]['seconds_min'] / took})} tokens/s"
        lines.append(line)
    return lines


# ---- what is to be doubted ----

NOISY, OVER = 0.25, 1.01


def warnings(results: Sequence[dict[str, Any]]) -> list[str]:
    """Says which figures something else on the machine has spoilt: those whose middle run took much longer than the
    shortest, and those over 100 % of a roof or a limit, which was then measured too low."""
    told = []
    noisy = [r for r in results if (r["spread"] or 0) > NOISY]
    if noisy:
        worst = max(noisy, key=lambda r: float(r["spread"]))
        told.append(
            f"the machine was busy: in {len(noisy)} of {counted(len(results), 'figure')} the middle run took over "
            f"{1 + NOISY:g} times as long as the shortest, in {_called(worst)} {1 + worst['spread']:.3g} times. Close "
            "other programs, and run it again"
        )
    over = [r for r in results if max(r["fraction_of_roof"] or 0, r["fraction_of_limit"] or 0) > OVER]
    if over:
        shares = (f"{_called(r)} {max(r['fraction_of_roof'] or 0, r['fraction_of_limit'] or 0):.0%}" for r in over)
        told.append(
            f"over 100 % of what was measured as its roof or limit: {', '.join(shares)}. The limit was measured while "
            "something else ran; run it again on an idle machine"
        )
    return told


def _called(result: dict[str, Any]) -> str:
    return f"{result['workload']} {result['engine']}"


def _names(result: dict[str, Any]) -> dict[str, str]:
    """Gives what a row is called besides its workload."""
    on = {"threads": f"on {result['threads']}"} if "threads" in result else {}
    names = {"engine": result["engine"], "isa": result["isa"] or "", "dtype": result["dtype"], "cache": cache(result)}
    return {**names, **on}


def _common(results: Sequence[dict[str, Any]]) -> tuple[list[dict[str, str]], dict[str, str], str]:
    """Gives the names of each row, those that all rows have in common, and these as a text."""
    names = [_names(r) for r in results]
    found = {key: {n[key] for n in names} for key in names[0]}
    found["isa"].discard("")  # a rival has none
    same = {key: " ".join(values) for key, values in found.items() if len(values) < 2}
    return names, same, ", ".join(f"{key} {value}" for key, value in same.items() if value and key != "threads")


def _differing(names: dict[str, str], same: dict[str, str]) -> str:
    """Gives what a row is called besides its workload and what all rows have in common."""
    return " ".join(value for key, value in names.items() if value and key not in same)


def _show_rows(results: Sequence[dict[str, Any]], columns: Columns, console: Console) -> None:
    """Prints a table of numbers. Names that all rows have in common are said once above it, a workload's above its
    rows."""
    names, same, common = _common(results)
    if common:
        console.print("all rows: " + common)
    cells = {header: column for header, of in columns.items() if any(column := [of(r) for r in results])}
    table, workload = new_table("workload", numbers=list(cells)), None
    for r, n, *row in zip(results, names, *cells.values(), strict=True):
        name = _differing(n, same)
        if name and workload != r["workload"]:
            table.add_row(Text(r["workload"], "bold"))
        table.add_row(Padding(name, (0, 0, 0, 2)) if name else r["workload"], *row)
        workload = r["workload"]
    console.print(table)


def _together(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Says whether they ran on the same arrays. A rival has no isa of ours."""
    same = all(a[k] == b[k] for k in ("workload", "dtype", "kv_cache_dtype", "kv_cache_rotation", "threads"))
    return same and b["isa"] in (None, a["isa"])


def as_csv(report: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, RESULT_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(report["results"])
    return text.getvalue()


def as_markdown(report: dict[str, Any]) -> str:
    """Gives the table in Markdown, with what all rows have in common in a sentence above it."""
    results, columns = report["results"], columns_of(report)
    names, same, common = _common(results)
    machine = report["machine"]
    cells = {" ".join(h.split()): column for h, of in columns.items() if any(column := [of(r) for r in results])}
    heads = ["workload", *cells]
    lines = [f"cpu-attn {machine['version']} on {machine['brand']}{'; ' * bool(common)}{common}.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * len(cells)]
    for r, n, *row in zip(results, names, *cells.values(), strict=True):
        name = f"{r['workload']} {_differing(n, same)}".strip()
        lines.append("| " + " | ".join([name, *map(str, row)]) + " |")
    models = of_models(results)
    return "\n".join([*lines, *([""] * bool(models)), *models, ""])


# ---- one report against another ----


def load(path: Path) -> dict[str, Any]:
    """Reads a report that --save or --json wrote."""
    try:
        with path.open() as file:
            report: dict[str, Any] = json.loads(file.read(MOST))
        for row in report["results"]:
            row.setdefault("kv_cache_rotation", "none")  # earlier reports did not know it
        for row in compare(report, report)["results"]:
            seconds(row["seconds_then"])
    except OSError as error:
        raise click.UsageError(f"--compare {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise click.UsageError(f"--compare {path}: no report that bench --save wrote ({why})") from None
    return report


def compare(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Gives ratios of what both reports hold, and what else differs between them.

    speedup: seconds then / seconds now. of_limit: fraction of the limit now / then, which a slower or busier machine
    changes less. machine: what is not the same, then and now; limits: now / then. Numbers of threads are compared with
    their like where a report has several.
    """
    threads = [thread_counts(report) for report in (then, now)]
    same = SAME if max(map(len, threads)) < 2 else (*SAME, "threads")
    old = {tuple(r[k] for k in same): r for r in then["results"]}
    results = []
    for r in now["results"]:
        before = old.get(tuple(r[k] for k in same))
        if before:
            row = {k: r[k] for k in same}
            row |= {"seconds_then": before["seconds_min"], "seconds_now": r["seconds_min"]}
            row["speedup"] = _ratio(before["seconds_min"], r["seconds_min"])
            row["of_limit"] = _ratio(r["fraction_of_limit"], before["fraction_of_limit"])
            results.append(row)
    machine = {
        k: [then["machine"].get(k), now["machine"].get(k)]
        for k in MACHINE
        if then["machine"].get(k) != now["machine"].get(k)
    }
    if threads[0] != threads[1]:
        machine["threads"] = threads
    limits = {k: _ratio(v, then["limits"].get(k)) for k, v in now["limits"].items()}
    return {"machine": machine, "limits": limits, "results": results}


def _ratio(a: float | None, b: float | None) -> float | None:
    return 1.0 * a / b if a and b else None  # 1.0: load refuses an integer that is no float


def _times(x: float | None) -> Text:
    if x is None:
        return Text()
    return Text(f"{x:.2f}x", "green" if x > 1.03 else "red" if x < 0.97 else "")


def show_comparison(comparison: dict[str, Any]) -> None:
    console = new_console()
    for name, (then, now) in comparison["machine"].items():
        console.print(f"ANOTHER MACHINE: {name} was {then!r}, is {now!r}")
    ratios = [f"{k} {v:.2f}x" for k, v in comparison["limits"].items() if v]
    console.print("limits, now to then: " + ", ".join(ratios))
    if not comparison["results"]:
        console.print("nothing to compare: the two reports share no workload, engine, isa and dtype")
        return
    columns: Columns = {
        "then": lambda r: seconds(r["seconds_then"]),
        "now": lambda r: seconds(r["seconds_now"]),
        "speed": lambda r: _times(r["speedup"]),
        "of\nlimit": lambda r: _times(r["of_limit"]),
    }
    _show_rows(comparison["results"], columns, console)
