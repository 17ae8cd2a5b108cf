# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn bench --plot``: the roofline, speed over intensity under ceilings that were measured; or how speed grows
with threads, where several numbers of them were asked for."""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import click

from cpu_attn.cli.report import SAME, kind, per_thread, thread_counts

# Okabe and Ito's colours, told apart by everyone; an engine has one colour and one marker.
STYLES = {
    "native": ("#0072B2", "o"),
    "onednn": ("#D55E00", "s"),
    "onednn-python": ("#E69F00", "v"),
    "reference": ("#999999", "x"),
    "torch": ("#009E73", "^"),
    "vllm": ("#CC79A7", "D"),
}
WIDTH, HEIGHT = 11.0, 6.5  # inches
LABEL = 8.0  # points; labels are 1.5 of it apart
PERCENT = 0.055  # of the axes' width: a column of percents
Result = dict[str, Any]
Rows = dict[str, dict[str, Result]]


def check(path: Path, kinds: set[str]) -> None:
    """Refuses before anything is measured."""
    if not kinds & {"prefill", "decode", "cascade"}:
        raise click.UsageError("--plot: only prefill, decode and cascade have a place in a roofline")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'cpu-attn[plot]'")
    known = set(importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg.get_supported_filetypes())
    known.discard("pgf")  # needs TeX
    if path.suffix[1:].lower() not in known:
        raise click.UsageError(f"--plot {path}: the name must end in one of {', '.join(sorted(known))}")


def draw(report: dict[str, Any], path: Path) -> None:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(WIDTH, HEIGHT))
    (_scaling if len(thread_counts(report)) > 1 else _roofline)(report, figure.add_axes((0.07, 0.09, 0.64, 0.82)))
    figure.savefig(path, dpi=150)


def _placed(results: list[Result]) -> list[Result]:
    """Those with flops, bytes and a limit."""
    return [r for r in results if r["gflops"] and r["limit"]]


def _scaling(report: Result, axes: Any) -> None:
    """Speed, as a multiple of one thread of the fewest, over threads: a line for each workload and engine, dashed what
    limits it. Names stand at the ends of the lines."""
    counts, ends = thread_counts(report), {}
    for engine, rows in _curves(report["results"]):
        colour, marker = STYLES[engine]
        threads = [r["threads"] for r in rows]
        speeds = [r["threads"] * per_thread(r, report) for r in rows]
        axes.plot(threads, speeds, marker=marker, color=colour, markersize=5, zorder=3)
        name = f"{rows[0]['workload']} {rows[0]['isa'] or ''} {kind(rows[0])}"
        ends[name, engine] = (threads[-1], speeds[-1])
        limits = [r["limit"] / rows[0]["limit"] * rows[0]["threads"] for r in rows]
        axes.plot(threads, limits, "--", color="0.6", linewidth=1.0, zorder=2)
    axes.plot([0, counts[-1]], [0, counts[-1]], color="black", linewidth=1.0, zorder=1)
    axes.set(xlim=(0, counts[-1] * 1.02), ylim=(0, None), xticks=counts, xlabel="threads")
    axes.set_ylabel(
        "speed, as a multiple of one thread's" if counts[0] == 1 else f"speed; {counts[0]} threads have {counts[0]}"
    )
    axes.set_title(f"{report['machine']['brand']}; dashed: what limits them", loc="left")
    _bare(axes)
    _names_at_ends(axes, ends)


def _curves(results: list[Result]) -> list[tuple[str, list[Result]]]:
    """Engine, and results that differ in nothing but threads, in the order in which these ascend."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for r in _placed(results):
        found.setdefault(tuple(r[k] for k in SAME), []).append(r)
    return [(rows[0]["engine"], rows) for rows in found.values()]


def _names_at_ends(axes: Any, ends: dict[tuple[str, str], tuple[float, float]]) -> None:
    """In the engines' colours."""
    to_axes = axes.transData + axes.transAxes.inverted()
    order = sorted(ends, key=lambda who: ends[who][1])
    heights = spread([float(to_axes.transform(ends[who])[1]) for who in order], _gap(axes), 0.02, 0.98)
    for (name, engine), height in zip(order, heights, strict=True):
        axes.annotate(
            f"{name}, {engine}", (1.01, height), xycoords="axes fraction", va="center", fontsize=LABEL,
            color=STYLES[engine][0], annotation_clip=False,
        )  # fmt: skip


def _roofline(report: Result, axes: Any) -> None:
    """Points under ceilings; beside them, in a column each for what memory and what products bound, the labels."""
    rows = _rows(report["results"])
    _frame(axes, report, [r for row in rows.values() for r in row.values()])
    engines = list(dict.fromkeys(engine for row in rows.values() for engine in row))
    for engine in engines:
        colour, marker = STYLES[engine]
        x, y = zip(*(_place(row[engine]) for row in rows.values() if engine in row), strict=True)
        axes.plot(x, y, marker, color=colour, label=engine, markersize=7, zorder=3)
    for bound in ("read_gbps", "gflops"):
        some = {name: row for name, row in rows.items() if next(iter(row.values()))["limit_of"].endswith(bound)}
        if some:
            _labels(axes, some, engines, 1.03 if bound == "gflops" else _right_of(axes, some))
    axes.legend(loc="lower right", frameon=False, title="percent of its limit")


def _rows(results: list[dict[str, Any]]) -> Rows:
    """By workload (with isa and kind, where there are several), by engine."""
    isas = list(dict.fromkeys(r["isa"] for r in results if r["isa"]))
    several_kinds = len({kind(r) for r in results}) > 1
    rows: Rows = {}
    for r in _placed(results):
        name = r["workload"]
        name += f" {r['isa'] or isas[0]}" if len(isas) > 1 else ""
        name += f" {kind(r)}" if several_kinds else ""
        rows.setdefault(name, {})[r["engine"]] = r
    return rows


def _place(r: Result) -> tuple[float, float]:
    """Flops for each byte of K and V that is read once, and GFLOP/s."""
    return r["gflops"] / r["kv_gbps"], r["gflops"]


def _frame(axes: Any, report: Result, points: list[Result]) -> None:
    """Axes and ceilings: what is read as slopes, products as level lines from where they begin to bind."""
    slopes = {p["limit"] for p in points if p["limit_of"] == "read_gbps"} or {report["limits"]["read_gbps"]}
    used = {p["limit"] for p in points} | set(report["limits"].values())
    levels = {
        p["value"]: p["what"] for p in report["probes"] if p["unit"] == "GFLOP/s" and p["value"] and p["value"] in used
    }
    x, y = zip(*map(_place, points), strict=True)
    low, high = min(*x, max(levels) / max(slopes)) / 4, max(*x, max(levels) / min(slopes)) * 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(y) / 2, max(levels) * 2))
    over = {p["value"]: p["what"] for p in report["probes"] if p["limit"] == "read_gbps"}
    for slope in {min(slopes), max(slopes)} if max(slopes) > 1.1 * min(slopes) else {max(slopes)}:
        ends = [(low, low * slope), (max(levels) / slope, max(levels))]
        axes.plot(*zip(*ends, strict=True), color="black", linewidth=1.2)
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        turned = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
        axes.annotate(
            f"read {slope:.3g} GB/s {over[slope]}", ends[1], xytext=(-17, -4), textcoords="offset points",
            ha="right", va="top", fontsize=LABEL, **turned,
        )  # fmt: skip
    for level, what in levels.items():
        axes.plot([level / max(slopes), high], [level, level], color="black", linewidth=1.2)
        axes.annotate(
            f"{what}: {level:.4g} GFLOP/s", (high, level), xytext=(-4, 4), textcoords="offset points",
            ha="right", fontsize=LABEL,
        )  # fmt: skip
    machine, some = report["machine"], report["results"][0]
    axes.set_title(
        f"{machine['brand']}, {some['threads']} threads, {', '.join({p['dtype'] for p in points})}", loc="left"
    )
    axes.set_xlabel("useful flops for each byte of K and V")
    axes.set_ylabel("GFLOP/s")
    _bare(axes)


def _bare(axes: Any) -> None:
    axes.grid(which="major", color="0.92")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _gap(axes: Any) -> float:
    """Between labels under each other, of the axes' height."""
    return float(1.5 * LABEL / 72 / (HEIGHT * axes.get_position().height))


def _right_of(axes: Any, rows: Rows) -> float:
    """A little to the right of all the points, in axes fractions."""
    x = max(_place(r)[0] for row in rows.values() for r in row.values())
    place: float = axes.transAxes.inverted().transform(axes.transData.transform((x, 1)))[0]
    return place + 0.05


def _labels(axes: Any, rows: Rows, engines: list[str], left: float) -> None:
    """Name and, in the engines' colours, percent of the limit; at the height of the best point, if there is room."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {name: to_axes.transform(max(map(_place, row.values()), key=lambda p: p[1])) for name, row in rows.items()}
    names = sorted(rows, key=lambda name: float(ends[name][1]))
    heights = spread([float(ends[name][1]) for name in names], _gap(axes), 0.02, 0.98)
    width = (max(map(len, names)) * 0.55 + 1) * LABEL / 72 / (WIDTH * axes.get_position().width)
    style = {"xycoords": "axes fraction", "va": "center", "fontsize": LABEL, "annotation_clip": False}
    for name, height in zip(names, heights, strict=True):
        axes.plot(
            [ends[name][0], left - 0.005], [ends[name][1], height], transform=axes.transAxes, color="0.75",
            linewidth=0.7, clip_on=False, zorder=1,
        )  # fmt: skip
        axes.annotate(name, (left, height), bbox={"color": "white", "pad": 1}, **style)
        for column, engine in enumerate(engines):
            if engine in rows[name]:
                text = f"{rows[name][engine]['fraction_of_limit']:.0%}"
                place = (left + width + (column + 1) * PERCENT, height)
                axes.annotate(text, place, ha="right", color=STYLES[engine][0], fontweight="bold", **style)


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places near the ascending ``wanted``, ``gap`` apart, from ``low`` up to ``high`` if they fit."""
    places: list[float] = []
    for w in wanted:
        places.append(max(w, places[-1] + gap if places else low))
    for i, place in enumerate(places):
        places[i] = min(place, high - (len(places) - 1 - i) * gap)
    return places
