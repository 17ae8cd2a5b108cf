# SPDX-License-Identifier: Apache-2.0
"""The commands on a terminal: its width, colours, Ctrl-C, completion."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from cpu_attn.cli import main, report

EIGHTY = {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}  # what rich takes for such a terminal
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def joined(text: str) -> str:
    return "".join(text.split())


def results() -> list[dict[str, Any]]:
    """What takes the most room: names of every kind, numbers of all digits."""
    workloads = ("decode-8x8k num_heads=128 num_kv_heads=128 head_size=128 sliding_window=1024 softcap=30", "write-8k")
    names = product(workloads, ("native", "onednn-graph"), ("avx512", "amx"), ("bfloat16", "float32"), (1, 16))
    numbers = {"seconds_min": 0.12345678, "spread": 12.3456, "tokens_per_second": 123456.7, "layers": None}
    numbers |= {"gflops": 12345.6, "kv_gbps": 123.4}
    fractions = {"limit_of": "matrix_gflops", "fraction_of_limit": 1.2345, "limit": 1.0, "fraction_of_roof": 1.2345}
    return [
        {
            **dict(zip(("workload", "engine", "isa", "dtype", "threads"), name, strict=True)),
            **{"kv_cache_dtype": "int4_per_token_head/fp8_e5m2", "kv_cache_rotation": "hadamard/none"},
            **{"kv_cache_layout": "packed", "roof_of": "vector_gflops", **numbers, **fractions},
        }
        for name in names
    ]


def test_nothing_of_bench_is_cut_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in EIGHTY.items():
        monkeypatch.setenv(name, value)
    rows = results()
    lacking = {"limit": "matrix_gflops", "what": "AMX bfloat16", "threads": None, "value": None, "unit": "GFLOP/s"}
    found = {"machine": {"version": "0", "brand": 9 * "long name "}, "limits": {}, "results": rows}
    report.show({**found, "probes": [{**lacking, "reason": 9 * "reason "}]})
    report.show_comparison(report.compare(found, found))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "\u2026" not in out
    shown = joined(out)
    for r in rows:
        assert joined(r["workload"]) in shown
        assert joined(f"{r['engine']} {r['isa']} {r['dtype']} on {r['threads']}") in shown
    assert "all rows: cache int4_per_token_head/fp8_e5m2 hadamard/none" in out
    for text in ("123.5 ms", "+1235%", "12.35 TF", "123%", "123% products", "123k", "1.00x"):
        assert f" {text}" in out


def test_nothing_of_verify_is_cut_off() -> None:
    case = "masks-spans-window-bidirectional-clamped-head-33-39"
    options = ["--case", case, "--case", "mixed-plain", "--dtype", "bfloat16"]
    options += ["--engine", "native", "--engine", "onednn-python"]
    result = CliRunner().invoke(main, ["verify", *options], env=EIGHTY)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80 and "\u2026" not in result.stdout
    lines = result.stdout.splitlines()
    column = next(line.index("in case") for line in lines if "in case" in line)
    assert case in joined("".join(line[column:] for line in lines)).replace("ok", "")


@pytest.mark.parametrize("command", ["", "info", "verify", "bench"])
def test_help_fits(command: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), "--help"], env=EIGHTY)
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 80
    assert "..." not in result.stdout.replace("WORKLOAD]...", "").replace("[ARGS]...", "").replace(", ...)", "")


@pytest.mark.parametrize(
    "options",
    [
        "bench decode-8x8",
        "bench decode-8x8k --kv-cache-dtype int9",
        "bench decode-8x8k --plot x.none",
        "verify --isa sse9",
        "verify --case decode-head-64 --dtype float8",
        "verify --nonsense-that-is-longer-than-a-line-of-a-terminal-of-eighty-columns-and-so-on",
    ],
)
def test_errors_break_between_words(options: str) -> None:
    """A line of the terminal ends with a whole word, unless a word by itself is longer."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, "-m", "cpu_attn", *options.split()], {**os.environ, "COLUMNS": "80"})
    shown = ""
    with suppress(OSError):
        while more := os.read(terminal, 2**16):
            shown += more.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    told = CliRunner().invoke(main, options.split(), prog_name="cpu-attn").stderr
    assert shown.split() == told.split()  # no word is broken
    assert all(len(line) <= 80 or " " not in line.removeprefix("Error: ") for line in shown.splitlines())


@pytest.mark.parametrize("command", ["info", "verify", "bench"])
def test_no_color(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there are colours without it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)

    def shown() -> str:
        if command == "bench":
            then, now = ({"machine": {}, "limits": {}, "results": results()} for _ in range(2))
            now["results"][0]["seconds_min"] *= 2
            report.show_comparison(report.compare(then, now))
        else:
            options = {"verify": ["--case", "chunk-head-1", "--engine", "reference", "--dtype", "float32"]}
            main([command, *options.get(command, [])], standalone_mode=False)
        return "".join(capsys.readouterr())

    assert COLOUR.search(shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(shown())


def test_completion() -> None:
    def completed(text: str, *before: str) -> list[str]:
        complete = BashComplete(main, {}, "cpu-attn", "_CPU_ATTN_COMPLETE")
        return [item.value for item in complete.get_completions(list(before), text)]

    assert completed("ver") == ["verify"]
    assert "decode-8x8k" in completed("decode-8", "bench")
    assert completed("--kv-cache-d", "bench") == ["--kv-cache-dtype"]
    assert "mixed-plain" in completed("mixed-", "verify", "--case")


def test_ctrl_c_on_a_terminal() -> None:
    """Which tells every process of it. Progress says how much time is left; nobody prints a traceback."""
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background would ignore it
        options = ["--jobs", "2", "--engine", "native", "--isa", "scalar", "--dtype", "float32"]
        command = [sys.executable, "-m", "cpu_attn", "verify", *options]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", "COLUMNS": "80"})
    shown = ""
    while not re.search(r" [1-9]\d*/\d+ \d+:\d\d:\d\d left", ESCAPE.sub("", shown)):
        shown += os.read(terminal, 2**16).decode()
    os.write(terminal, b"\x03")
    with suppress(OSError):  # which Linux gives at the end
        while more := os.read(terminal, 2**16):
            shown += more.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert "Traceback" not in shown and "checks passed on" in shown
    assert re.search(r"INTERRUPTED: \d+ of \d+ checks were not made\.", shown)
