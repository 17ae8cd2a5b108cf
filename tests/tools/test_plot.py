# SPDX-License-Identifier: Apache-2.0
"""cpu-attn bench --plot: where labels are. What is drawn at all: test_bench.py."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import pytest

from cpu_attn.cli import contest, plot
from cpu_attn.cli.workloads import WORKLOADS


def test_plot_has_a_style_for_whoever_runs() -> None:
    assert plot.STYLES.keys() == {*contest.ENGINES, *contest.RIVALS}


@pytest.mark.parametrize("wanted", [[0.5], [0.1, 0.1, 0.1], [0.0, 0.9, 0.95, 1.0], [0.3, 0.31, 0.7]])
def test_labels_are_spread(wanted: list[float]) -> None:
    places = plot.spread(wanted, 0.1, 0.0, 1.0)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(places))
    assert places[0] >= 0 and places[-1] <= 1
    assert plot.spread([0.2, 0.5], 0.1, 0.0, 1.0) == [0.2, 0.5]


def full_report(
    engines: list[str],
    caches: tuple[str, ...] = ("auto",),
    reads: tuple[float, ...] = (57.3, 41.2),
    tiles: float = 0.0,
    only: str = "",
) -> Any:
    """Every workload, at about the share of its roof that an engine reaches: decodes lie close together. tiles: GFLOP/s
    of a matrix unit, if there is one. only: one workload alone."""
    shares = {
        "native": 0.85,
        "onednn": 0.52,
        "reference": 0.01,
        "torch": 0.24,
        "vllm": 0.33,
        "zentorch": 0.42,
        "ggml": 0.2,
    }
    rng = random.Random(1)
    results = []
    for w, cache, engine in product(WORKLOADS.values(), caches, engines):
        if not (w.attends or w.linear) or w.kind == "call" or only not in ("", w.name):
            continue
        intensity, read = (
            w.flops / w.kv_bytes(2.0 if cache == "auto" else 1.0),
            reads["8x8k" in w.name and len(reads) - 1],
        )
        peak = tiles or 468.0
        of, limit = ("gflops", peak) if intensity * read > peak else ("read_gbps", read)
        share = shares[engine] * rng.uniform(0.85, 1.1)
        gflops = share * limit * (1 if of == "gflops" else intensity)
        results.append(
            {"workload": w.name, "engine": engine, "isa": None if engine == "torch" else "avx512", "dtype": "bfloat16",
             "kv_cache_dtype": cache, "kv_cache_rotation": "none", "threads": 2, "gflops": gflops,
             "kv_gbps": gflops / intensity, "limit": limit, "limit_of": of, "fraction_of_roof": share}
        )  # fmt: skip
    probes = [{"what": "VDPBF16PS, 16 lanes", "unit": "GFLOP/s", "value": 468.0, "limit": "gflops"}]
    if tiles:
        probes += [{"what": "TDPBF16PS, 16x16x32", "unit": "GFLOP/s", "value": tiles, "limit": "matrix_gflops"}]
    probes += [{"what": f"over {n} MiB", "unit": "GB/s", "value": n, "limit": "read_gbps"} for n in reads]
    return {
        "machine": {"brand": "A machine"},
        "limits": {
            "gflops": 468.0,
            **({"matrix_gflops": tiles} if tiles else {}),
            "read_gbps": max(reads),
            "memcpy_gbps": 29.0,
        },
        "probes": probes,
        "results": results,
    }


def outline(text: Any) -> Any:
    """Of a label, which may be turned, around its lower right corner."""
    paths, transforms = (pytest.importorskip(f"matplotlib.{name}") for name in ("path", "transforms"))
    turn, box = text.get_rotation(), text.get_window_extent()
    if turn % 90:
        text.set_rotation(0)
        box = text.get_window_extent()
        text.set_rotation(turn)
        corners = transforms.Affine2D().rotate_deg_around(box.x1, box.y0, turn).transform(box.corners())
    else:
        corners = box.corners()
    return paths.Path(corners[[0, 1, 3, 2, 0]])


# A second or two each.
REPORTS = {
    "native": full_report(["native"]),
    "rivals": full_report(["native", "onednn", "vllm", "torch"]),
    "all rivals": full_report(["native", "onednn", "vllm", "torch", "zentorch", "ggml"]),
    "reference": full_report(["native", "onednn", "reference"], reads=(57.3,)),
    "caches": full_report(["native", "onednn"], caches=("auto", "int8")),
    "tiles": full_report(["native", "onednn"], tiles=3712.0),
    "slow reads": full_report(["native", "onednn", "vllm", "torch"], reads=(13.5,), tiles=2100.0),
    "like peaks": full_report(["native"], reads=(310.0, 250.0), tiles=520.0),
    "tiles, one prefill": full_report(["native"], reads=(25.8,), tiles=3700.0, only="prefill-2k"),
    "tiles, one mla": full_report(["native"], reads=(9.85,), tiles=2000.0, only="mla-8x4k-h16"),
}
QUICK = ("all rivals", "tiles, one mla")


@pytest.mark.parametrize(
    "report",
    [pytest.param(r, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, r in REPORTS.items()],
)
def test_labels_of_a_roofline_overlap_nothing(report: dict[str, Any]) -> None:
    """No other label, no point, and they lie in the picture."""
    text, transforms = (pytest.importorskip(f"matplotlib.{name}") for name in ("text", "transforms"))
    figure = plot.roofline(report)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [t for t in figure.findobj(text.Text) if t.get_text() and t.get_visible()]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        for label, place in zip(axis.get_majorticklabels(), axis.get_majorticklocs(), strict=True):
            if not low <= place <= high:
                labels.remove(label)
    points = [
        axes.transData.transform(point)
        for line in axes.lines
        if line.get_marker() != "None"
        for point in zip(*line.get_data(), strict=True)
    ]
    assert len(points) == len(report["results"])
    across = plot.MARKER * figure.dpi / 72
    markers = [transforms.Bbox.from_bounds(x - across / 2, y - across / 2, across, across) for x, y in points]
    outlines = list(map(outline, labels))
    for number, (label, one) in enumerate(zip(labels, outlines, strict=True)):
        x, y = one.vertices.T
        assert min(x.min(), y.min()) >= 0 and x.max() <= figure.bbox.x1 and y.max() <= figure.bbox.y1, label
        assert not any(one.intersects_bbox(marker) for marker in markers), label
        for other, two in zip(labels[number + 1 :], outlines[number + 1 :], strict=True):
            assert not one.intersects_path(two, filled=True), (label, other)
    workloads = len(report["results"]) // len({r["engine"] for r in report["results"]})
    numbers = [t.get_text() for t in labels if t.axes is axes and t.get_text().isdigit() and t.get_weight() == "bold"]
    assert sorted(map(int, numbers)) == list(range(1, workloads + 1))
