# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn bench --plot`` draws the roofline, which is speed over intensity under ceilings that were measured; or how
speed grows with threads, where several numbers of them were asked for."""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import click
import numpy as np

from cpu_attn.cli.linear import KINDS
from cpu_attn.cli.report import SAME, kind, per_thread, thread_counts

# These are Okabe and Ito's colours, which everyone can tell apart; an engine has one colour and one marker.
STYLES = {
    "native": ("#0072B2", "o"),
    "onednn": ("#D55E00", "s"),
    "onednn-python": ("#E69F00", "v"),
    "reference": ("#999999", "x"),
    "torch": ("#009E73", "^"),
    "zentorch": ("#000000", "<"),
    "ggml": ("#56B4E9", "P"),
    "onnxruntime": ("#F0E442", "X"),
    "vllm": ("#CC79A7", "D"),
}
COLOURS = [colour for colour, _ in STYLES.values()]
LIMITS = {"matrix_gflops": "products", "vector_gflops": "products", "read_gbps": "reads", "memcpy_gbps": "copies"}
MOVES = {"read_gbps": "read", "memcpy_gbps": "copy"}
WIDTH, HEIGHT = 11.0, 6.5  # inches
LABEL = 8.0  # points; labels stand 1.5 times as far apart
MARKER = 7.0  # points across
ROOM = 0.35  # this part of the axes, on the left of where the products begin to bind, holds the name of the slopes
# These are the measures of the roofline in inches. The first four: from the left to the axes, their width, from the
# bottom to them, and from them to the table, which leaves room for the names of the ceilings. The others are the
# table's: between its lines, of its columns, of a letter.
LEFT, ACROSS, BELOW, BESIDE = 0.8, 6.6, 0.65, 1.45
LINE, COLUMN, LETTER = 0.2, 0.55, 0.078
Result = dict[str, Any]
Rows = dict[str, dict[str, Result]]


def check(path: Path, kinds: set[str]) -> None:
    """Refuses, before anything is measured, what could not be drawn or written."""
    if not kinds & {"prefill", "decode", "cascade", *KINDS}:
        raise click.UsageError("--plot: only prefill, decode and cascade have a place in a roofline, and linear")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'cpu-attn[plot]'")
    known = set(importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg.get_supported_filetypes())
    known.discard("pgf")  # it needs TeX
    if path.suffix[1:].lower() not in known:
        raise click.UsageError(f"--plot {path}: the name must end in one of {', '.join(sorted(known))}")


def draw(report: dict[str, Any], path: Path) -> None:
    drawn = scaling(report) if len(thread_counts(report)) > 1 else roofline(report)
    drawn.savefig(path, dpi=150)


def _figure(width: float, height: float) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height))


def _placed(results: list[Result]) -> list[Result]:
    """Gives the results that have flops, bytes and a limit."""
    return [r for r in results if r["gflops"] and r["limit"]]


def scaling(report: Result) -> Any:
    """Draws speed, as a multiple of one thread of the fewest, over threads: a line for each workload and engine, and
    dashed what limits a workload. A workload has a colour, an engine its marker. Names stand at the ends of the
    lines."""
    figure = _figure(WIDTH, HEIGHT)
    axes = figure.add_axes((0.07, 0.09, 0.64, 0.82))
    counts, ends = thread_counts(report), {}
    colours: dict[str, str] = {}
    for engine, rows in _curves(report["results"]):
        name = f"{rows[0]['workload']} {rows[0]['isa'] or ''} {kind(rows[0])}"
        colour = colours.setdefault(rows[0]["workload"], COLOURS[len(colours) % len(COLOURS)])
        threads = [r["threads"] for r in rows]
        speeds = [r["threads"] * per_thread(r, report) for r in rows]
        axes.plot(threads, speeds, marker=STYLES[engine][1], color=colour, markersize=5, zorder=3)
        ends[f"{name}, {engine}", colour] = (threads[-1], speeds[-1])
        bound = f"limit of {rows[0]['workload']}: {LIMITS[rows[0]['limit_of']]}", colour
        if bound not in ends:
            limits = [r["limit"] / rows[0]["limit"] * rows[0]["threads"] for r in rows]
            axes.plot(threads, limits, "--", color=colour, linewidth=1.0, zorder=2)
            ends[bound] = (threads[-1], limits[-1])
    axes.plot([0, counts[-1]], [0, counts[-1]], color="black", linewidth=1.0, zorder=1)
    ends["as many times as threads", "black"] = (counts[-1], counts[-1])
    axes.set(xlim=(0, counts[-1] * 1.02), ylim=(0, None), xticks=counts, xlabel="threads")
    axes.set_ylabel(
        "speed, as a multiple of one thread's" if counts[0] == 1 else f"speed; {counts[0]} threads have {counts[0]}"
    )
    axes.set_title(report["machine"]["brand"], loc="left")
    _bare(axes)
    _names_at_ends(axes, ends)
    return figure


def _curves(results: list[Result]) -> list[tuple[str, list[Result]]]:
    """Gives each engine with results that differ in nothing but threads, in the order in which these ascend."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for r in _placed(results):
        found.setdefault(tuple(r[k] for k in SAME), []).append(r)
    return [(rows[0]["engine"], rows) for rows in found.values()]


def _names_at_ends(axes: Any, ends: dict[tuple[str, str], tuple[float, float]]) -> None:
    """Writes names in their colours."""
    to_axes = axes.transData + axes.transAxes.inverted()
    order = sorted(ends, key=lambda who: ends[who][1])
    heights = spread([float(to_axes.transform(ends[who])[1]) for who in order], _gap(axes), 0.02, 0.98)
    for (name, colour), height in zip(order, heights, strict=True):
        axes.annotate(
            name, (1.01, height), xycoords="axes fraction", va="center", fontsize=LABEL, color=colour,
            annotation_clip=False,
        )  # fmt: skip


def roofline(report: Result) -> Any:
    """Draws points under ceilings, each workload numbered at its best one; beside them it says what the numbers mean,
    and percents of the roofs that bind."""
    rows = _rows(report["results"])
    rows = dict(sorted(rows.items(), key=lambda row: _best(row[1])))
    engines = list(dict.fromkeys(engine for row in rows.values() for engine in row))
    room = max(map(len, rows)) * LETTER + 0.3
    lines = len(rows) + len(engines) + 2
    size = LEFT + ACROSS + BESIDE + room + len(engines) * COLUMN + 0.2, max(HEIGHT, BELOW + lines * LINE + 0.6)
    figure = _figure(*size)
    height = size[1] - BELOW - 0.6
    axes = figure.add_axes((LEFT / size[0], BELOW / size[1], ACROSS / size[0], height / size[1]))
    names, ceilings = _frame(axes, report, [r for row in rows.values() for r in row.values()])
    for engine in engines:
        colour, marker = STYLES[engine]
        x, y = zip(*(_place(row[engine]) for row in rows.values() if engine in row), strict=True)
        axes.plot(x, y, marker, color=colour, markersize=MARKER, zorder=3)
    _number(axes, rows, names, ceilings)
    _table(figure, rows, engines, (LEFT + ACROSS + BESIDE, BELOW + height), room)
    return figure


def _rows(results: list[dict[str, Any]]) -> Rows:
    """Groups results by workload (with isa and kind, where there are several), then by engine."""
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
    """Gives flops for each byte of K and V, or of states, that is moved once, and GFLOP/s."""
    return r["gflops"] / r["kv_gbps"], r["gflops"]


def _best(row: dict[str, Result]) -> tuple[float, float]:
    return max(map(_place, row.values()), key=lambda place: place[1])


def _frame(axes: Any, report: Result, points: list[Result]) -> tuple[Any, Any]:
    """Draws axes and ceilings: what is read as slopes, products as level lines from where they begin to bind. It
    returns boxes: of the slopes' names, and along the lines."""
    slopes = {p["limit"] for p in points if p["limit_of"] in MOVES} or {report["limits"]["read_gbps"]}
    used = {p["limit"] for p in points} | set(report["limits"].values())
    levels = {
        p["value"]: p["what"] for p in report["probes"] if p["unit"] == "GFLOP/s" and p["value"] and p["value"] in used
    }
    x, y = zip(*map(_place, points), strict=True)
    ridge = max(levels) / max(slopes)
    low, high = min(*x, ridge) / 4, max(*x, max(levels) / min(slopes)) * 2
    low = min(low, ridge / (high / ridge) ** (ROOM / (1 - ROOM)))
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(y) / 2, max(levels) * 2))
    over = {p["value"]: (MOVES[p["limit"]], p["what"]) for p in report["probes"] if p["limit"] in MOVES}
    drawn = sorted({min(slopes), max(slopes)} if max(slopes) > 1.1 * min(slopes) else {max(slopes)}, reverse=True)
    lines = [[(low, low * slope), (max(levels) / slope, max(levels))] for slope in drawn]
    name = _name_slopes(
        axes, "\n".join("{0} {2:.3g} GB/s {1}".format(*over[slope], slope) for slope in drawn), *lines[0]
    )
    lines += [[(level / max(slopes), level), (high, level)] for level in levels]
    for line in lines:
        axes.plot(*zip(*line, strict=True), color="black", linewidth=1.2)
    to_axes = axes.transData + axes.transAxes.inverted()
    order = sorted(levels)
    heights = [float(to_axes.transform((high, level))[1]) for level in order]
    for level, height in zip(order, spread(heights, 2 * _gap(axes), 0.02, 0.98), strict=True):
        axes.annotate(
            f"{levels[level]}:\n{level:.4g} GFLOP/s", (1.01, height), xycoords="axes fraction", va="center",
            fontsize=LABEL, annotation_clip=False,
        )  # fmt: skip
    machine, some = report["machine"], report["results"][0]
    axes.set_title(
        f"{machine['brand']}, {some['threads']} threads, {', '.join({p['dtype'] for p in points})}", loc="left"
    )
    axes.set_xlabel("useful flops for each byte of K and V, or of states")
    axes.set_ylabel("GFLOP/s")
    _bare(axes)
    ticker = importlib.import_module("matplotlib.ticker")
    for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if most < 1000 * least else (1,)))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(ticker.NullFormatter())
    return name, np.vstack([_along(axes.transData.transform(line), 2) for line in lines])


def _name_slopes(axes: Any, words: str, start: Any, end: Any) -> Any:
    """Writes words above the line from start to end, near its end, and returns boxes along them."""
    text = axes.annotate(
        words, end, xytext=(-17, 4), textcoords="offset points", ha="right", va="bottom", fontsize=LABEL,
        rotation_mode="anchor",
    )  # fmt: skip
    length, height = text.get_window_extent().size
    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    angle = math.atan2(y1 - y0, x1 - x0)
    text.set_rotation(math.degrees(angle))
    along, across = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    last = (x1, y1) + np.array([-17, 4]) * axes.figure.dpi / 72 + height / 2 * across
    return _along([last - length * along, last], height / 2)


def _along(ends: Any, half: float) -> Any:
    """Gives boxes on a line, one behind the other: (left, bottom, right, top), half as wide and high as that."""
    start, end = ends
    steps = np.linspace(start, end, 2 + int(math.dist(start, end) / 4))
    return np.hstack([steps - half, steps + half])


def _bare(axes: Any) -> None:
    axes.grid(which="major", color="0.92")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _gap(axes: Any) -> float:
    """Gives the distance between labels under each other, as a part of the axes' height."""
    return float(1.5 * LABEL / 72 / (HEIGHT * axes.get_position().height))


def _number(axes: Any, rows: Rows, texts: Any, lines: Any) -> None:
    """Writes numbers, from 1 on, as near to the best point of each workload as there is room beside points, texts,
    lines and the strokes that lead to numbers, which cross no text. All of these are boxes of pixels [n, 4]."""
    half = MARKER / 2 * axes.figure.dpi / 72 + 1
    points = axes.transData.transform([_place(r) for row in rows.values() for r in row.values()])
    (left, bottom), (right, top), far = axes.bbox.min, axes.bbox.max, np.inf
    outside = [(-far, -far, left, far), (right, -far, far, far), (-far, -far, far, bottom), (-far, top, far, far)]
    taken, to_data = np.vstack([lines, outside, np.hstack([points - half, points + half])]), axes.transData.inverted()
    turns = np.radians([90, 60, 120, 30, 150, 0, 180, -30, 210, -60, 240, -90])
    for number, row in enumerate(rows.values(), 1):
        text = axes.text(1, 1, str(number), ha="center", va="center", fontsize=LABEL + 1, fontweight="bold")
        size, at = text.get_window_extent().size / 2 + 1, axes.transData.transform(_best(row))
        reach = np.arange(half + size[1], 300, 3)[:, None, None]
        ends = (at + reach * np.stack([np.cos(turns), np.sin(turns)], 1)).reshape(-1, 2)  # the nearest ones first
        places = np.hstack([ends - size, ends + size])
        room = ~_meet(places, np.vstack([taken, texts]))
        strokes = at + np.linspace(0, 1, 25)[:, None, None] * (ends - at)
        clear = ~_meet(np.tile(strokes.reshape(-1, 2), 2), texts).reshape(25, -1).any(0)
        best = int(np.argmax(2 * room + clear))
        texts, taken = np.vstack([texts, places[best]]), np.vstack([taken, _along([at, ends[best]], 2)])
        text.set_position(to_data.transform(ends[best]))
        axes.plot(*to_data.transform([at, ends[best]]).T, color="0.5", linewidth=0.7, zorder=2)
        text.set_bbox({"color": "white", "pad": 0.5})


def _meet(some: Any, others: Any) -> Any:
    """Says which of some boxes [n, 4] meet any of the others."""
    return ((some[:, None, :2] < others[:, 2:]) & (others[:, :2] < some[:, None, 2:])).all(2).any(1)


def _table(figure: Any, rows: Rows, engines: list[str], corner: tuple[float, float], room: float) -> None:
    """Writes the table from its upper left corner, in inches: the engines, and for each workload its number, its name,
    for which there is ``room``, and, in the engines' colours, percents."""
    width, height = figure.get_size_inches()

    def put(x: float, line: int, text: str, **style: Any) -> None:
        place = (corner[0] + x) / width, (corner[1] - (line + 0.5) * LINE) / height
        figure.text(*place, text, va="center", fontsize=LABEL + 1, **style)

    put(0, 0, "percent of its roof")
    lines = importlib.import_module("matplotlib.lines")
    for line, engine in enumerate(engines, 1):
        colour, marker = STYLES[engine]
        put(0.2, line, engine, color=colour, fontweight="bold")
        place = [corner[0] + 0.08], [corner[1] - (line + 0.5) * LINE]
        figure.add_artist(
            lines.Line2D(*place, marker=marker, color=colour, markersize=MARKER, transform=figure.dpi_scale_trans)
        )
    for number, (name, row) in enumerate(rows.items(), 1):
        line = len(engines) + 1 + number
        put(0.2, line, str(number), ha="right", fontweight="bold")
        put(0.3, line, name)
        for column, engine in enumerate(engines, 1):
            if engine in row:
                text = f"{row[engine]['fraction_of_roof']:.0%}"
                put(room + column * COLUMN, line, text, ha="right", color=STYLES[engine][0], fontweight="bold")


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Gives ascending places near the ascending ``wanted``, ``gap`` apart, from ``low`` up to ``high`` if they fit."""
    places: list[float] = []
    for w in wanted:
        places.append(max(w, places[-1] + gap if places else low))
    for i, place in enumerate(places):
        places[i] = min(place, high - (len(places) - 1 - i) * gap)
    return places
