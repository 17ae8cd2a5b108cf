# SPDX-License-Identifier: Apache-2.0
"""cpu-attn bench: what it does with its options, times and tells. How fast anything is, no test asks."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import cpu_attn
from cpu_attn import _threads
from cpu_attn.cli import choose, contest, ggml, limits, main, plot, report
from cpu_attn.cli.bench import bench
from cpu_attn.cli.workloads import GROUPS, WORKLOADS, Workload

bench_module: Any = sys.modules[bench.callback.__module__]
UNKNOWN = {"spread": None, "tokens_per_second": None, "layers": None, "fraction_of_roof": None}
DECODE = ("--kv-len", "40", "--num-heads", "4", "--num-kv-heads", "2", "--head-size", "16", "--repeat", "2")
FREE = ("--q-len", "5", *DECODE)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that look for a moment only."""
    monkeypatch.setattr(bench_module, "DEFAULT_BYTES", 2**16)
    monkeypatch.setattr(limits, "SECONDS", 1e-4)
    monkeypatch.setattr(limits, "LOOKS", 1)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["bench", *args])


def run(*args: str) -> dict[str, Any]:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# ---- timing, on a clock of our own ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """now: seconds. work(name, *durations) makes a call that takes that long (the last one ever after)."""
    state = SimpleNamespace(now=0.0, order=[])

    def work(name: str, *durations: float) -> Any:
        left = list(durations)

        def one() -> None:
            state.order.append(name)
            state.now += left.pop(0) if len(left) > 1 else left[0]

        return one

    state.work = work
    monkeypatch.setattr(bench_module, "perf_counter", lambda: state.now)
    return state


def test_repeat_and_the_first_run(clock: SimpleNamespace) -> None:
    (seconds,) = bench_module.times([bench_module.Timer(clock.work("a", 100.0, 3.0, 2.0, 4.0, 1.0), 3)])
    assert seconds == pytest.approx([3.0, 2.0, 4.0])


def test_as_many_runs_as_fit(clock: SimpleNamespace) -> None:
    budget, least, long = bench_module.BUDGET, bench_module.MIN_RUNS, bench_module.LONG
    calls = [clock.work("a", budget / 8), clock.work("b", budget), clock.work("c", long * 1.5)]
    short, slow, very_slow = bench_module.times([bench_module.Timer(call, None) for call in calls])
    assert 8 <= len(short) <= 9
    assert len(slow) == least
    assert very_slow == pytest.approx([long * 1.5])


def test_contestants_and_limits_take_turns(clock: SimpleNamespace) -> None:
    turn = bench_module.TURN
    calls = [clock.work("a", turn / 2), clock.work("b", turn)]

    @contextmanager
    def under(name: str) -> Iterator[None]:
        clock.order.append(name)
        yield

    timers = [bench_module.Timer(call, 4, partial(under, name)) for call, name in zip(calls, "AB", strict=True)]
    bench_module.times(timers, clock.work("|", 0.0))
    assert "".join(clock.order) == "AaBb|" + "AaaBb|" + "AaaBb|" + "Bb|" + "Bb|"


def test_limits_are_looked_at_while_their_workload_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[limits.Limit] = []
    monkeypatch.setattr(limits.Limits, "_look", lambda self, limit: looks.append(limit) or 1.0)
    monkeypatch.setattr(bench_module, "TURN", 0.0)
    run(*DECODE, "--engine", "native")
    assert sum(limit.kind == "read_gbps" for limit in looks) >= 1 + 2  # before, and after each of the two runs


# ---- the report ----


def test_json() -> None:
    found = run(*FREE, "--threads", "1")
    assert set(found) == {"machine", "limits", "probes", "results", "warnings", "stopped"}
    assert list(found["limits"]) == ["matrix_gflops", "vector_gflops", "read_gbps", "memcpy_gbps"]
    matrix = any(p.unit == "matrix" and not p.reason for p in limits.probes())
    assert (found["limits"]["matrix_gflops"] is None) == (not matrix)
    assert all(found["limits"][k] > 0 for k in ("vector_gflops", "read_gbps", "memcpy_gbps"))
    assert found["machine"]["version"] == cpu_attn.__version__ and found["machine"]["brand"]
    here = [e.name for e in cpu_attn.engines() if e.available]
    assert [r["engine"] for r in found["results"]] == [e for e in ("native", "onednn") if e in here]
    w = Workload("", "prefill", ((5, 40),), 4, 2, 16)
    for r in found["results"]:
        assert tuple(r) == report.RESULT_FIELDS
        assert r["workload"] == "1x(5,40) num_heads=4 num_kv_heads=2 head_size=16"
        assert (r["dtype"], r["kv_cache_dtype"], r["threads"]) == ("bfloat16", "auto", 1)
        assert 0 < r["seconds_min"] <= r["seconds_median"] and r["runs"] == 2 and r["layers"] is None
        assert r["spread"] == pytest.approx(r["seconds_median"] / r["seconds_min"] - 1)
        assert r["tokens_per_second"] == pytest.approx(5 / r["seconds_min"])
        assert r["gflops"] == pytest.approx(w.flops / r["seconds_min"] / 1e9)
        assert r["kv_gbps"] == pytest.approx(w.kv_bytes(2) / r["seconds_min"] / 1e9)
        assert r["limit"] == found["limits"][r["limit_of"]]
        assert r["fraction_of_limit"] == pytest.approx(r["gflops"] / r["limit"])
        assert r["roof_of"] in ("matrix_gflops", "vector_gflops", "read_gbps") and r["fraction_of_roof"] > 0
        assert r["workspace_bytes"] > 0


def test_the_roof_that_binds() -> None:
    """Reads of few flops, the fastest product of many."""
    slow, fast = (limits.Limit("vector_gflops", 2, probe) for probe in limits.probes()[:2])
    reads = limits.Limit("read_gbps", 2, num_bytes=2**20)
    seen = {slow: 100.0, fast: 200.0, reads: 50.0}
    assert limits.roof(1e9, 1e9, seen) == (pytest.approx(0.02), "read_gbps")
    assert limits.roof(8e9, 1e9, seen) == (pytest.approx(0.04), "vector_gflops")


def test_a_turn_is_measured_against_the_looks_around_it(clock: SimpleNamespace) -> None:
    """Memory of two speeds: each turn takes 1.25 of its own roof, though all of them together see 4 GB/s."""
    step = SimpleNamespace(workload=Workload("", "decode", ((1, 1000),), 1, 1, 1000), itemsize=4)  # 8 MB
    probe = limits.probes()[0]
    reads, product = limits.Limit("read_gbps", 1, num_bytes=2**20), limits.Limit("vector_gflops", 1, probe)
    row: Any = SimpleNamespace(roof=(product, reads), step=step)
    looks = [{reads: gbps, product: 100.0} for gbps in (2.0, 1.0, 1.0, 4.0)]
    found = bench_module.under_roof(row, [0.004 * 1.25, 0.008 * 1.25, 0.002 * 1.25], looks)
    assert found == {"roof_of": "read_gbps", "fraction_of_roof": pytest.approx(0.8)}
    found = bench_module.under_roof(row, [0.004 * 1.25], looks[:1])  # a run that was the only one
    assert found["fraction_of_roof"] == pytest.approx(0.8)
    assert bench_module.under_roof(SimpleNamespace(roof=()), [1.0], looks)["roof_of"] is None
    turn = bench_module.TURN
    timer = bench_module.Timer(clock.work("a", turn, turn * 2, turn / 2, turn, turn * 3), 4)
    bench_module.times([timer])
    assert timer.turns == pytest.approx([turn * 2, turn / 2, turn * 3]) and len(timer.seconds) == 4
    alone = bench_module.Timer(clock.work("a", bench_module.LONG * 2), None)
    assert alone.turns == alone.seconds == [bench_module.LONG * 2]


def test_decode_is_bound_by_reading() -> None:
    found = run(*DECODE, "--engine", "native", "--dtype", "float32", "--dtype", "float16")
    assert [r["dtype"] for r in found["results"]] == ["float32", "float16"]
    for r in found["results"]:
        assert (r["limit_of"], r["limit"]) == ("read_gbps", found["limits"]["read_gbps"])
        assert r["fraction_of_limit"] == pytest.approx(r["kv_gbps"] / r["limit"])


def test_every_isa_has_its_own_limit() -> None:
    names = [i.name for i in cpu_attn.isas() if i.supported and i.unit != "matrix"]
    found = run(*FREE, "--engine", "native", "--dtype", "float32", *(x for n in names for x in ("--isa", n)))
    assert [r["isa"] for r in found["results"]] == names
    of = {p["what"]: p["value"] for p in found["probes"]}
    for r in found["results"]:
        assert r["limit"] == max(of[x.what] for x in limits.products(r["isa"], "float32", r["threads"]))


def test_plan_write_and_call_by_name() -> None:
    found = run("plan-256", "write-8k", "call-tiny", "--engine", "native", "--repeat", "1")
    by_name = {r["workload"]: r for r in found["results"]}
    assert list(by_name) == ["plan-256", "write-8k", "call-tiny"]
    plan, write, tiny = by_name.values()
    assert plan["gflops"] is plan["kv_gbps"] is plan["limit"] is tiny["limit"] is tiny["fraction_of_limit"] is None
    assert plan["roof_of"] is write["roof_of"] is tiny["fraction_of_roof"] is None
    assert (write["limit_of"], write["gflops"]) == ("memcpy_gbps", None)
    assert write["kv_gbps"] == pytest.approx(8192 * 8 * 128 * 2 * 2 / write["seconds_min"] / 1e9)


def test_progress_on_stderr_table_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which a process of pytest-xdist may have
    result = call(*FREE, "--engine", "native")
    assert result.exit_code == 0
    assert "1/1 1x(5,40)" in result.stderr and "1/1" not in result.stdout
    for text in ("1x(5,40)", "all rows: engine native, isa ", "vector_gflops", "memcpy_gbps", "of roof"):
        assert text in result.stdout
    assert "\n1x(5,40) num_heads=4 num_kv_heads=2 head_size=16 " in result.stdout  # not folded


def test_csv() -> None:
    result = call(*FREE, "--csv", "--engine", "native")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(rows) == 1 and tuple(rows[0]) == report.RESULT_FIELDS
    assert rows[0]["engine"] == "native" and float(rows[0]["seconds_min"]) > 0


def test_rows_say_what_their_cache_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """And take as many times as long as our own kernels over the same."""
    rows = [
        {**sample(seconds, 0.5)["results"][0], "engine": engine, "kv_cache_dtype": kind}
        for kind, engine, seconds in (
            ("auto", "native", 1.0),
            ("auto", "onednn", 2.0),
            ("int8", "native", 3.0),
            ("int8", "onednn", 4.0),
        )
    ]
    more = {**UNKNOWN, "limit": None, "limit_of": None, "roof_of": None}
    found = {"machine": {"version": "0", "brand": "A"}, "probes": [], "results": [r | more for r in rows]}
    report.show(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if re.match("  (native|onednn) ", line)]
    assert [line[1] == "int8" for line in lines] == [False, False, True, True]
    assert [line[-1] for line in lines[1::2]] == ["2.00", "1.33"]
    both = {"results": rows, "limits": {}, "machine": {}}
    report.show_comparison(report.compare(both, both))
    assert "  native int8 " in capsys.readouterr().out


def test_speed_is_the_figure_that_its_limit_bounds() -> None:
    write: dict[str, Any] = {"kv_gbps": 12.34, "gflops": None}
    said = [report.speed(write | {"limit_of": limit}) for limit in ("read_gbps", "memcpy_gbps", None)]
    assert said == ["12.3 GB/s", "12.3 GB/s", ""]
    found = [report.speed({"gflops": n, "limit_of": "vector_gflops"}) for n in (456.78, 9999.0, 12345.6)]
    assert found == ["456.8 GF", "9999 GF", "12.35 TF"]
    rates = (None, 3.21, 950.4, 999.9, 12_340.0, 999_900.0, 1_234_000.0)
    assert [report.tokens({"tokens_per_second": n}) for n in rates] == ["", "3.21", "950", "1k", "12.3k", "1M", "1.23M"]


def test_threads_are_used_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By plans, limits and calls, each number with its own."""
    before, looked, planned, called = cpu_attn.get_num_threads(), set(), set(), set()
    prepare, run_once = contest._prepare, bench_module.Timer._run
    monkeypatch.setattr(limits.Limits, "_look", lambda self, limit: looked.add(limit.threads) or 1.0)
    monkeypatch.setattr(contest, "_prepare", lambda *a: planned.add(cpu_attn.get_num_threads()) or prepare(*a))

    def count(timer: Any) -> None:
        called.add((timer.under.args[0], cpu_attn.get_num_threads()))
        run_once(timer)

    monkeypatch.setattr(bench_module.Timer, "_run", count)
    found = run(*FREE, "--engine", "native", "--threads", "3", "--threads", "1", "--threads", "3")
    assert looked == planned == {1, 3} and called == {(1, 1), (3, 3)}
    assert [r["threads"] for r in found["results"]] == [1, 3]
    assert cpu_attn.get_num_threads() == before


def test_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter of the time on eight threads is half the speed for each."""
    rows = [
        {**sample(seconds, 0.5, threads=n)["results"][0], "engine": engine, **UNKNOWN, "roof_of": None}
        for n, engine, seconds in ((1, "native", 4.0), (1, "onednn", 8.0), (8, "native", 1.0), (8, "onednn", 1.0))
    ]
    rows = [r | {"limit": None, "limit_of": None} for r in rows]
    found = {"machine": {"version": "0", "brand": "A"}, "probes": [], "results": rows}
    assert [report.per_thread(r, found) for r in found["results"]] == [1.0, 1.0, 0.5, 1.0]
    report.show(found)
    out = capsys.readouterr().out
    assert "on A, 1 and 8 threads" in out and "all rows: isa avx2, dtype float32" in out
    lines = [line.split() for line in out.splitlines() if " on 1 " in line or " on 8 " in line]
    assert [line[:3] for line in lines[:2]] == [["native", "on", "1"], ["onednn", "on", "1"]]
    assert [line[-1] for line in lines] == ["1.00", "1.00", "0.50", "1.00"]
    assert [line[-2] for line in lines[1::2]] == ["2.00", "1.00"]  # x as long, on as many threads
    both = {"results": rows, "limits": {}, "machine": {}}
    assert [r["threads"] for r in report.compare(both, both)["results"]] == [1, 1, 8, 8]
    assert [r["threads"] for r in report.compare(sample(1.0, 0.5, threads=8), both)["results"]] == [8]
    report.show_comparison(report.compare(both, both))
    assert "  onednn on 8 " in capsys.readouterr().out


def test_more_threads_than_a_call_uses() -> None:
    with _threads.threads(4096):
        most = cpu_attn.get_num_threads()
    if most == 4096:
        pytest.skip("512 CPUs, of which a call uses all that --threads takes")
    result = call(*DECODE, "--threads", "1", "--threads", str(most + 1))
    assert result.exit_code == 2
    assert f"--threads {most + 1}: a call uses at most {most} threads here" in result.stderr


def test_shape_options_change_named_workloads() -> None:
    found = choose.chosen(["prefill-2k"], {"num_heads": 16, "sliding_window": 64, "sinks": True, "softcap": None})
    (w,) = found
    assert w.name == "prefill-2k num_heads=16 sliding_window=64 sinks"
    assert (w.lens, w.num_heads, w.sliding_window, w.sinks, w.softcap) == (((2048, 2048),), 16, 64, True, 0.0)
    assert [w.name for w in choose.chosen(["decode", "decode-8x8k"], {})] == [w.name for w in GROUPS["decode"]]
    assert len(choose.chosen([], {})) == len(WORKLOADS)
    (w,) = choose.chosen([], {"q_len": 7, "batch": 3})
    assert (w.lens, w.kind) == (((7, 7),) * 3, "prefill")
    (w,) = choose.chosen([], {"kv_len": 7})
    assert (w.lens, w.kind) == (((1, 7),), "decode")


def test_list() -> None:
    result = CliRunner().invoke(main, ["bench", "--list"], env={"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 80
    first = [line.split()[0] for line in result.stdout.splitlines()[2:] if line.strip() and line[2:3].strip()]
    assert set(first) >= set(WORKLOADS)
    assert "1 x 2048 of 2048" in result.stdout and "576" in result.stdout


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("100", 100), ("0", 10_000), ("", 10_000)])
def test_columns_of_a_pipe(columns: str, most: int) -> None:
    """What COLUMNS says; where it says nothing every row is one line."""
    result = CliRunner().invoke(main, ["bench", "--list"], env={"COLUMNS": columns})
    lengths = [len(line.rstrip()) for line in result.stdout.splitlines()]
    assert most - 30 < max(lengths) <= most if most < 10_000 else max(lengths) > 100


GEMMA = {"model_type": "gemma9", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
GEMMA |= {"hidden_size": 640, "num_hidden_layers": 6, "sliding_window": 512, "attn_logit_softcapping": 50.0}
GEMMA |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
GPT2 = {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 3}
DEEPSEEK = {"model_type": "deepseek", "num_attention_heads": 16, "num_hidden_layers": 2}
DEEPSEEK |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
QWEN = {**GPT2, "model_type": "qwen9", "sliding_window": 64, "use_sliding_window": False}


def config(folder: Path, data: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (GEMMA, [(4, 1, 256, 512, 50.0, 5), (4, 1, 256, -1, 50.0, 1)]),
        ({"text_config": GEMMA}, [(4, 1, 256, 512, 50.0, 5), (4, 1, 256, -1, 50.0, 1)]),
        (GPT2, [(12, 12, 64, -1, 0.0, 3)]),
        (QWEN, [(12, 12, 64, -1, 0.0, 3)]),
        ({**QWEN, "use_sliding_window": True}, [(12, 12, 64, 64, 0.0, 3)]),
        (DEEPSEEK, [(16, 1, 576, -1, 0.0, 2)]),
        ({**GPT2, "layer_types": ["linear_attention", "full_attention"]}, [(12, 12, 64, -1, 0.0, 1)]),
    ],
)
def test_shapes_of_a_model(data: Any, expected: list[Any], tmp_path: Path) -> None:
    found = choose.chosen(["decode-8x8k"], {}, model=config(tmp_path, data))
    fields = ("num_heads", "num_kv_heads", "head_size", "sliding_window", "softcap", "layers")
    assert [tuple(getattr(w, name) for name in fields) for w in found] == expected
    assert all(w.lens == WORKLOADS["decode-8x8k"].lens and w.name.startswith("decode-8x8k ") for w in found)
    assert len({w.name for w in found}) == len(found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no config.json of a model"),
        ({}, "lacks num_attention_heads"),
        ({"num_attention_heads": 4, "num_hidden_layers": 2}, "lacks hidden_size"),
        ({**GPT2, "n_head": "many"}, "no config.json of a model (num_attention_heads: 'many')"),
        ({**GPT2, "layer_types": ["linear_attention"]}, "no layers of full or sliding attention"),
    ],
)
def test_no_model(data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match=re.escape(words)):
        choose.chosen([], {}, model=config(tmp_path, data))


def test_a_model_and_its_layers(tmp_path: Path) -> None:
    """Its options may still be changed, and the time of all layers is the sum of those of its kinds."""
    path = config(tmp_path, GEMMA)
    result = call("--kv-len", "600", "--model-config", str(path), "--engine", "native", "--repeat", "2", "--json")
    rows = json.loads(result.stdout)["results"]
    assert [r["layers"] for r in rows] == [5, 1]
    took = 5 * rows[0]["seconds_min"] + rows[1]["seconds_min"]
    (line,) = report.of_models(rows)
    assert line.startswith("1x(1,600) gemma9, native ") and f"takes {report.seconds(took)} (5 x " in line
    assert line.endswith(f", {report.tokens({'tokens_per_second': 1 / took})} tokens/s")
    (w,) = choose.chosen(["prefill-2k"], {"head_size": 64}, model=config(tmp_path, GPT2))
    assert w.name == "prefill-2k gpt2" and w.head_size == 64
    names = {w.name for w in choose.chosen([], {}, model=config(tmp_path, GPT2))}
    assert not any(name.startswith("mla") for name in names)


def test_what_is_doubted() -> None:
    row = {"workload": "w", "engine": "native", "spread": 0.1, "fraction_of_roof": 0.9, "fraction_of_limit": 1.0}
    assert report.warnings([row, {**row, "spread": None, "fraction_of_roof": None, "fraction_of_limit": None}]) == []
    (busy,) = report.warnings([row, {**row, "spread": 0.3}, {**row, "engine": "onednn", "spread": 29.0}])
    assert "in 2 of 3 figures" in busy and "w onednn 30 times" in busy
    (over,) = report.warnings([row, {**row, "fraction_of_roof": 1.24}])
    assert "w native 124%" in over and "over 100 %" in over
    (over,) = report.warnings([{**row, "fraction_of_limit": 1.3}])
    assert "w native 130%" in over


def test_warnings_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "warnings", lambda results: ["the machine was busy"])
    saved = tmp_path / "report.json"
    result = call(*FREE, "--engine", "native", "--save", str(saved))
    assert result.stderr.endswith(f"warning: the machine was busy\nwritten: {saved}\n")
    assert json.loads(saved.read_text())["warnings"] == ["the machine was busy"]


def test_markdown() -> None:
    result = call(*FREE, "--engine", "native", "--engine", "reference", "--markdown")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cpu-attn ") and "dtype bfloat16" in lines[0]
    heads, rule, *rows = (line.strip("|").split("|") for line in lines[2:])
    assert [h.strip() for h in heads][:3] == ["workload", "min", "spread"] and "x as long" in lines[2]
    assert len(rows) == 2 and {len(row) for row in (heads, rule, *rows)} == {len(heads)}
    assert rows[1][0].strip().endswith("head_size=16 reference") and float(rows[1][-1]) > 0


LINEAR = {n for n, w in WORKLOADS.items() if w.linear}
MLA, TREES, CASCADES = ({n for n in WORKLOADS if n.startswith(kind)} for kind in ("mla-", "tree-", "cascade-"))


@pytest.mark.parametrize(
    ("shape", "kvs", "without"),
    [
        ({"head_size": 512}, set(), MLA),
        ({"head_size": 513}, set(), {"rope-write-8k"}),
        ({"selected": 0.5}, set(), {*CASCADES, *LINEAR, "mla-1x64k-sparse"}),
        ({"selected": 0.5, "no_cascade": True}, set(), {*LINEAR, "mla-1x64k-sparse"}),
        ({"num_heads": 8}, set(), {n for n, w in WORKLOADS.items() if w.num_kv_heads > 8}),
        ({"alibi": True}, set(), TREES | LINEAR),
        ({"sliding_window": 9}, set(), TREES | LINEAR),
        ({}, {"bfloat16", "int8"}, MLA | LINEAR),
    ],
)
def test_a_group_leaves_out_what_cannot_be(
    shape: dict[str, Any], kvs: set[str], without: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {w.name.split()[0] for w in choose.chosen([], shape, kvs)}
    told = {line.removeprefix("without ").split(":")[0].split()[0] for line in capsys.readouterr().err.splitlines()}
    assert told == without == WORKLOADS.keys() - found
    for name in without:
        with pytest.raises(click.UsageError, match=f"^{name}"):
            choose.chosen(["all", name], shape, kvs)


# ---- errors ----


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["prefill-3k"], "no workload 'prefill-3k'"),
        (["prefill-2k", "--q-len", "5"], "--q-len is for a free shape"),
        (["--q-len", "9", "--kv-len", "5"], "more than --kv-len 5"),
        (["--kv-len", "9", "--num-heads", "3"], "does not divide 3 heads"),
        (["--kv-len", "9", "--json", "--csv"], "exclude each other"),
        (["--kv-len", "9", "--isa", "neon64"], "neon64"),
        (["--kv-len", "9", "--compare", "/nowhere.json"], "Error: --compare /nowhere.json: No such file or directory"),
        (["--kv-len", "9", "--compare", "/dev/zero"], "no report that bench --save wrote"),
        (["--kv-len", "9", "--save", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--kv-len", "9", "--rival", "torch", "--softcap", "3"], "torch"),
        (["plan-256", "--engine", "onednn-python"], "has no part in it"),
        (["mla-8x4k-h16", "--head-size", "64"], "--head-size 64: at least 513"),
        (["mla", "--head-size", "64"], "--head-size 64: at least 513"),
        (["rope-write-8k", "--head-size", "65"], "--head-size 65 is odd"),
        (["cascade-32x4k", "--selected", "0.5"], "--selected needs --no-cascade"),
        (["mla-8x4k-h16", "--kv-cache-dtype", "int8"], "NHD holds no int8"),
        (
            ["decode-64x512", "--isa", "vec16", "--head-size", "72"],
            "head sizes that are multiples of 16",
        ),
        (["--batch", "65536", "--q-len", "32769"], "2147549184 query tokens, at most 2147483647"),
        (["--kv-len", "9", "--kv-cache-dtype", "fp9"], "Error: --kv-cache-dtype: 'fp9' is none of"),
        (["--kv-len", "9", "--kv-cache-rotation", "fft"], "Error: --kv-cache-rotation: 'fft' is none of"),
        (["--kv-len", "9", "--markdown", "--csv"], "exclude each other"),
        (["decode-8x8"], "no workload 'decode-8x8': did you mean decode-8x8k"),
        (["--model-config", "/nowhere.json"], "Error: --model-config /nowhere.json: No such file or directory"),
        (["--model-config", "/dev/zero"], "no config.json of a model"),
        (["--kv-len", "9", "--save", ""], "a folder, expected a file"),
        (["--kv-len", "9", "--plot", "/"], "is a directory"),
        (["--head-size", "65537"], "--head-size"),
        (["--num-heads", "70000", "--num-kv-heads", "70000"], "--num-heads"),
        (["--block-size", "3000000000"], "--block-size"),
        (["--sliding-window", "99999999999"], "--sliding-window"),
        (["--kv-len", "99999999999"], "--kv-len"),
        (["--softcap", "nan"], "--softcap"),
        (["--softcap", "inf"], "--softcap"),
        (["--softcap", "1e-39"], "'--softcap': 1e-39 is not in the range 1.18e-38<=x<=2.34e+38"),
        (["--selected", "nan"], "--selected"),
        (["--repeat", "0"], "repeat"),
        (["--threads", "0"], "threads"),
    ],
)
def test_errors(args: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "run", lambda *a, **k: pytest.fail("it ran"))
    if "onednn-python" in args and contest.missing("onednn-python", "auto", "bfloat16"):
        pytest.skip("no oneDNN")
    result = call(*args)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.split())


def test_memory_that_cannot_be_had() -> None:
    result = call("--kv-len", "2147483647", "--num-kv-heads", "65536", "--num-heads", "65536", "--repeat", "1")
    assert result.exit_code == 1
    assert "no memory for it" in result.stderr


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder that takes no files")
@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_a_file_that_cannot_be_written_comes_after_the_table(option: str) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    result = call(*FREE, "--engine", "native", option, "/proc/x.png")
    assert result.exit_code == 1
    assert "of roof" in result.stdout
    assert "/proc/x.png" in result.stderr and "Error: " in result.stderr


def test_ctrl_c_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure, begun = bench_module._one_workload, []

    def interrupted(steps: Any, *rest: Any) -> Iterator[Any]:
        begun.append(steps[0].dtype)
        if len(begun) == 2:
            raise KeyboardInterrupt
        yield from measure(steps, *rest)

    monkeypatch.setattr(bench_module, "_one_workload", interrupted)
    options = (*FREE, "--dtype", "float32", "--dtype", "float16", "--engine", "native", "--save", str(tmp_path / "r"))
    result = call(*options)
    assert result.exit_code == 130 and "2/2 (" in result.stderr and "stopped" in result.stderr
    saved = json.loads((tmp_path / "r").read_text())
    assert saved["stopped"] and [r["dtype"] for r in saved["results"]] == ["float32"] == begun[:1]
    assert "float32" in result.stdout and "float16" not in result.stdout
    begun.clear()
    begun.append("nothing was measured yet")
    nothing = call(*options)
    assert nothing.exit_code == 130 and not nothing.stdout


def test_left_out_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "unable", lambda e, w, *cache: "no plans" * (e == "reference" and w.kind == "plan"))
    engines = ("--engine", "native", "--engine", "reference", "--repeat", "1", "--json")
    result = call("plan-256", "call-tiny", *engines)
    took = [(r["workload"], r["engine"]) for r in json.loads(result.stdout)["results"]]
    assert took == [("plan-256", "native"), ("call-tiny", "native"), ("call-tiny", "reference")]
    assert "without reference: no plans" in result.stderr
    result = call("plan-256", *engines)
    assert result.exit_code == 2 and "no plans" in result.output


@pytest.mark.parametrize("engine", ["torch", "onednn", "onednn-python"])
def test_who_has_no_part_in_it(engine: str) -> None:
    """Only who was asked for: a write runs once, as native."""
    write, plan, decode = (WORKLOADS[name] for name in ("write-8k", "plan-256", "decode-64x512"))
    here = {("auto", "bfloat16"): ["native", engine]}
    idle = [[write]] if engine == "onednn" else [[write], [plan], [plan, write]]
    for some in idle:
        with pytest.raises(click.UsageError, match=f"{some[0].name}: {engine} has no part in it"):
            bench_module.refuse_idle(some, here, [engine], "auto", 128)
        bench_module.refuse_idle(some, here, [], "auto", 128)
    bench_module.refuse_idle([write, plan, decode], here, ["native", engine], "auto", 128)


@pytest.mark.parametrize(("rival", "module"), [("torch", "torch"), ("zentorch", "zentorch"), ("ggml", "llama_cpp")])
def test_without_a_rival(rival: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    ggml.load.cache_clear()
    result = call(*FREE, "--rival", rival)
    assert result.exit_code == 2
    assert f"--rival {rival} cannot run here" in result.output


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    result = call(*FREE, "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert "pip install 'cpu-attn[plot]'" in result.output


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contest.missing
    monkeypatch.setattr(contest, "missing", lambda e, *a: "it is not here" if e == "onednn" else right(e, *a))
    result = call(*FREE, "--json")
    assert [r["engine"] for r in json.loads(result.stdout)["results"]] == ["native"]
    assert "without onednn: it is not here" in result.stderr
    assert call(*FREE, "--engine", "onednn").exit_code == 2


# ---- one report against another ----


def sample(
    seconds: float, fraction: float | None, brand: str = "A", threads: int = 2, **changed: Any
) -> dict[str, Any]:
    result = {"workload": "w", "engine": "native", "isa": "avx2", "dtype": "float32", "kv_cache_dtype": "auto"}
    result |= {"kv_cache_layout": "packed", "kv_cache_rotation": "none"}
    result |= {"threads": threads, "seconds_min": seconds, "fraction_of_limit": fraction} | changed
    return {"machine": {"brand": brand}, "limits": {"read_gbps": 10.0 * seconds}, "results": [result]}


def test_a_report_of_before_rotation(tmp_path: Path) -> None:
    then, now = sample(3.0, 0.25), sample(2.0, 0.5)
    del then["results"][0]["kv_cache_rotation"]
    file = tmp_path / "then.json"
    file.write_text(json.dumps(then))
    assert len(report.compare(report.load(file), now)["results"]) == 1


def test_compare() -> None:
    found = report.compare(sample(3.0, 0.25), sample(2.0, 0.5))
    assert found["machine"] == {}
    assert found["limits"]["read_gbps"] == pytest.approx(2 / 3)
    (row,) = found["results"]
    assert (row["seconds_then"], row["seconds_now"]) == (3.0, 2.0)
    assert (row["speedup"], row["of_limit"]) == (pytest.approx(1.5), pytest.approx(2.0))
    assert report.compare(sample(3.0, None), sample(2.0, None))["results"][0]["of_limit"] is None
    assert report.compare(sample(3.0, 0.25), sample(2.0, 0.5, engine="onednn"))["results"] == []


def test_another_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = report.compare(sample(3.0, 0.25), sample(2.0, 0.5, brand="\ud800", threads=4))  # which is no text
    assert found["machine"] == {"brand": ["A", "\ud800"], "threads": [[2], [4]]}
    report.show_comparison(found)
    out = capsys.readouterr().out
    assert r"ANOTHER MACHINE: brand was 'A', is '\ud800'" in out
    assert "1.50x" in out and "2.00x" in out


def test_save_and_compare(tmp_path: Path) -> None:
    path = tmp_path / "then.json"
    assert call(*FREE, "--engine", "native", "--save", str(path)).exit_code == 0
    saved = json.loads(path.read_text())
    saved["results"][0]["seconds_min"] *= 1e6
    path.write_text(json.dumps(saved))
    found = run(*FREE, "--engine", "native", "--compare", str(path))
    (row,) = found["comparison"]["results"]
    assert row["speedup"] == pytest.approx(saved["results"][0]["seconds_min"] / found["results"][0]["seconds_min"])
    assert "limits, now to then" in call(*FREE, "--engine", "native", "--compare", str(path)).stdout
    beside_csv = call(*FREE, "--engine", "native", "--compare", str(path), "--csv")
    # The table may break a name over two lines, so that the speedup isn't always in the last one.
    assert re.search(r"limits, now to then.*\d\.\d\dx", beside_csv.stderr, re.DOTALL)
    assert len(list(csv.DictReader(io.StringIO(beside_csv.stdout)))) == 1


NULL = json.dumps(sample(1.0, None)).replace('"seconds_min": 1.0', '"seconds_min": null')


HUGE = 10**400  # no float


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"results": [{}], "limits": {}, "machine": {}}', NULL, NULL.replace("null", '"1"')),
        pytest.param(json.dumps(sample(1.0, 0.5, seconds_min=HUGE)), id="huge seconds"),
        pytest.param(json.dumps(sample(1.0, HUGE)), id="huge fraction"),
        pytest.param(json.dumps({**sample(1.0, 0.5), "limits": {"read_gbps": HUGE}}), id="huge limit"),
        pytest.param(json.dumps({**sample(1.0, 0.5), "limits": []}), id="no limits"),
        pytest.param(json.dumps({**sample(1.0, 0.5), "limits": [1]}), id="limits without names"),
    ],
)
def test_no_report_to_compare_with(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    result = call(*FREE, "--compare", str(path))
    assert result.exit_code == 2
    assert "no report that bench --save wrote" in " ".join(result.output.split())


# ---- the roofline ----


def test_plot_names_every_workload_engine_and_ceiling(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path, features = tmp_path / "roofline.svg", [*DECODE[2:], "--engine", "native", "--engine", "reference"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        found = run("--q-len", "5", "--kv-len", "40", *features, "--plot", str(path))
        text = path.read_text()
        for r in found["results"]:
            assert r["workload"] in text and r["engine"] in text
            assert f">{r['fraction_of_roof']:.0%}<" in text
        for p in found["probes"]:
            if p["value"] in found["limits"].values() and p["unit"] == "GFLOP/s" and p["value"]:
                assert p["what"] in text
        assert f"read {found['limits']['read_gbps']:.3g} GB/s" in text
        run("--kv-len", "40", *features, "--plot", str(path))
        assert "1x(1,40)" in path.read_text()


def test_plot_of_several_numbers_of_threads_is_how_they_scale(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path, engines = tmp_path / "scaling.svg", ("--engine", "native", "--engine", "reference")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        found = run(*DECODE, *engines, "--threads", "1", "--threads", "3", "--plot", str(path))
        text = path.read_text()
    for name in {r["workload"] for r in found["results"]}:
        assert text.count(f">limit of {name}: reads<") == 1  # both engines have the same
    colours = set(re.findall(r"stroke: (#[0-9a-f]{6})", text))
    assert {plot.COLOURS[0].lower()} <= colours and plot.COLOURS[1].lower() not in colours
    assert ">as many times as threads<" in text
    for r in found["results"]:
        assert f"{r['workload']} {r['isa']} bfloat16, {r['engine']}" in text
    assert ">threads<" in text and "multiple of one thread" in text and "roofline" not in text
    assert [len(rows) for _, rows in plot._curves(found["results"])] == [2, 2]


def test_plot_refuses_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_module, "run", lambda *a, **k: pytest.fail("it ran"))
    for args, suffix, text in (
        (FREE, "nothing", "must end in"),
        (FREE, "pgf", "must end in"),
        (("plan-256",), "png", "only prefill, decode and cascade"),
    ):
        result = call(*args, "--plot", str(tmp_path / f"x.{suffix}"))
        assert result.exit_code == 2
        assert text in " ".join(result.output.split())
