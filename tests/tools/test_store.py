# SPDX-License-Identifier: Apache-2.0
"""`cpu-attn store` over folders that a store has written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cpu_attn.cli import main

from ..harness.store_folders import Blocks, opened


def store(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["store", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two segments of four blocks of one model, which are older, and one of another with two."""
    for age, (model, count) in enumerate((("first", 8), ("second", 2))):
        with opened(tmp_path, segment_bytes=77 * 4) as each:
            blocks = Blocks(each, model=model)
            for number in range(count):
                blocks.put([number])
                each.flush()
        for file in tmp_path.iterdir():
            if file.stat().st_mtime > 10_000:
                os.utime(file, (1000 + age, 1000 + age))
    assert len([*tmp_path.iterdir()]) == 3
    return tmp_path


def test_info(folder: Path) -> None:
    (folder / f"{7:032x}.segment").write_text("garbage")
    data = json.loads(store("info", folder, "--json"))
    *rows, bad = data["segments"]
    assert [(row["model"], row["num_blocks"], row["block_bytes"]) for row in rows] == [
        *2 * [("first", 4, 77)],
        ("second", 2, 77),
    ]
    assert bad == {"name": f"{7:032x}.segment", "why": "is cut within its header"}
    shown = store("info", folder)
    first, second = (next(line for line in shown.splitlines() if line.startswith(name)) for name in ("first", "second"))
    assert first.split()[1:6] == ["2", "0", "8", "77", "B"] and second.split()[1:6] == ["1", "0", "2", "77", "B"]
    assert f"not read: {7:032x}.segment: is cut within its header" in shown


def test_info_of_a_segment_in_use(folder: Path) -> None:
    with opened(folder) as each:
        blocks = Blocks(each, model="third")
        blocks.put([1])
        each.flush()
        *_, row = json.loads(store("info", folder, "--json"))["segments"]
        assert row["in_use"] and row["model"] == "third" and row["num_blocks"] == 1
        assert "3 of 4 files removed" in store("prune", folder, "--max-bytes", 0)
        assert blocks.found([1]) == [1]


def test_verify(folder: Path) -> None:
    assert store("verify", folder) == "3 of 3 segments are whole\n"
    name = json.loads(store("info", folder, "--json"))["segments"][0]["name"]
    data = bytearray((folder / name).read_bytes())
    data[65536] ^= 1  # of the first block of the first array
    (folder / name).write_bytes(data)
    shown = store("verify", folder, code=1)
    assert "2 of 3 segments are whole" in shown
    row = next(line for line in shown.splitlines() if line.startswith(name))
    assert row.split() == [name, "first", "4", "1"]
    damaged = json.loads(store("verify", folder, "--json", code=1))["segments"]
    assert sorted(row["num_damaged"] for row in damaged) == [0, 0, 1]


def test_prune(folder: Path) -> None:
    each = sum(file.stat().st_blocks * 512 for file in folder.iterdir()) // 3
    assert store("prune", folder, "--max-bytes", each, "--dry-run").startswith("2 of 3 files would be removed")
    assert len([*folder.iterdir()]) == 3
    assert store("prune", folder, "--max-bytes", "1G").startswith("0 of 3 files removed")
    assert store("prune", folder, "--max-bytes", each).startswith("2 of 3 files removed")
    (row,) = json.loads(store("info", folder, "--json"))["segments"]
    assert row["model"] == "second"
    assert store("prune", folder, "--max-bytes", "0").startswith("1 of 1 files removed, 0 B stay")
    assert store("info", folder) == "no segments\n"


def test_what_is_no_store(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "has mode 0755" in store("info", tmp_path, code=1)
    assert "does not exist" in store("info", tmp_path / "no", code=2)
    for size in ("1X", "", "-1", "1.5G"):
        assert "is no size" in store("prune", tmp_path, "--max-bytes", size, code=2)
