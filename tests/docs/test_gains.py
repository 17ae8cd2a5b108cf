# SPDX-License-Identifier: Apache-2.0
"""examples/gains.py compares what engines say of the same prompts, and names those that say nothing."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ..harness.snippets import example

gains = example("gains")
engines = sys.modules["gains_engines"]
NONE = f"transformers, {engines.NONE}"
SAID = {  # what each engine says of (batch, context)
    "transformers, eager": {(1, 8): ([[1, 2, 3, 4]], 0.002), (2, 8): ([[1, 2, 3, 4], [5, 6, 7, 8]], 0.004)},
    "transformers, sdpa": {(1, 8): ([[1, 2, 9, 4]], 0.001), (2, 8): ([[1, 2, 3, 4], [9, 6, 7, 8]], 0.003)},
    NONE: {(1, 8): ([[5, 5, 5, 5]], 0.0005)},
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Answers in the place of the engines, and gives how each was called."""
    called = []

    def answer(python: str, *words: str) -> Iterator[str]:
        called.append((python, *words))
        if words[0] == "prepare":
            Path(words[1], "tokens.json").write_text("[0]")
            return
        if words[0] not in SAID:
            raise click.ClickException("ImportError: it is broken")
        for (batch, context), (tokens, step) in SAID[words[0]].items():
            found = {"batch": batch, "context": context, "first": 0.5, "step": step, "cache": 2**21, "tokens": tokens}
            yield json.dumps(found)
        skipped = "would take 99 s or more" if "sdpa" in words[0] else "would take 99 GiB"
        yield json.dumps({"batch": 2, "context": 16, "skipped": skipped})

    monkeypatch.setattr(gains, "run", answer)
    monkeypatch.setattr(gains, "has", lambda python, package: "" if python else "nobody said where")
    return called


def test_the_table(run: list[tuple[str, ...]], tmp_path: Path) -> None:
    names = ["transformers, eager", "transformers, sdpa", NONE, "transformers, cpu_attn", "llama.cpp"]
    report, table = tmp_path / "gains.json", tmp_path / "gains.csv"
    words = ["--environment", f"transformers={sys.executable}", "--model", "smollm2", "--json", str(report)]
    words += ["--csv", str(table), "--shape", "1x8", "--shape", "2x8", "--shape", "1x9000"]
    result = CliRunner().invoke(gains.main, [*words, *(word for name in names for word in ("--engine", name))])
    assert result.exit_code == 0, result.output
    assert [row[1] for row in run] == ["prepare", *names[:4]]
    assert run[1][3:7] == ("--shape", "1x8", "--shape", "2x8")  # the model does not have the longest
    with table.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head == ["model", "engine", "rows", "8", "16"]
    assert [row[1:] for row in rows] == [
        ["transformers, eager", "1", "0.50 s, 2.0 ms", ""],
        ["transformers, eager", "2", "0.50 s, 4.0 ms", "too large"],
        ["transformers, sdpa", "1", "0.50 s, 1.0 ms", ""],
        ["transformers, sdpa", "2", "0.50 s, 3.0 ms", "too slow"],
        [NONE, "1", "0.50 s, 0.5 ms", ""],
        [NONE, "2", "", "too large"],
        ["transformers, cpu_attn", "", "ImportError: it is broken", ""],
        ["llama.cpp", "", "nobody said where", ""],
    ]
    assert len(json.loads(report.read_text())["results"]) == 10


@pytest.mark.parametrize(("model", "count"), [("gemma3", 9), ("smollm2", 6), ("8b", 4)])
def test_shapes_that_a_model_has(run: list[tuple[str, ...]], tmp_path: Path, model: str, count: int) -> None:
    found = list(
        gains.measure(model, tmp_path, {"transformers": sys.executable}, ["transformers, sdpa"], gains.SHAPES, ())
    )
    assert found and run[0].count("--shape") == count


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "HERE", tmp_path)
    (tmp_path / "gains_engines.py").write_text("print('{}'); raise ValueError('no such engine')")
    with pytest.raises(click.ClickException, match=r"^ValueError: no such engine$"):
        assert list(gains.run(sys.executable)) == ["{}\n"]


def test_prompts_begin_alike_and_differ(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps([7, *range(100, 200)]))
    prompts: Any = engines.prompts_of(tmp_path, 3, 10)
    assert prompts == [[7, *range(100, 109)], [7, *range(130, 139)], [7, *range(160, 169)]]
    with pytest.raises(click.UsageError, match="no 20 rows of 90"):
        engines.prompts_of(tmp_path, 20, 90)


@pytest.mark.parametrize("shape", ["8", "8x", "x8", "0x8", "8x0", "-1x8", "8x8x8", "8.0x8", "8xa"])
def test_no_shape(shape: str) -> None:
    for main, words in ((gains.main, ()), (engines.main, ("llama.cpp", "folder"))):
        result = CliRunner().invoke(main, [*words, "--shape", shape])
        assert result.exit_code == 2
        assert f"{shape}: expected rows x tokens of a prompt" in result.output.replace("\n", " ")
