# SPDX-License-Identifier: Apache-2.0
"""`cpu-attn bench prefix-store` with tiny prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cpu_attn.cli import main
from cpu_attn.cli.prefix_store import WAYS
from cpu_attn.serving import store_folder

TINY = [
    "--layers",
    "2",
    "--num-heads",
    "4",
    "--num-kv-heads",
    "2",
    "--head-size",
    "32",
    "--block-size",
    "16",
    "--repeat",
    "1",
]
NAMES = [name for name, _, _ in WAYS]


def bench(*words: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["bench", "prefix-store", *TINY, *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def test_json(tmp_path: Path) -> None:
    """Every way is there, with what it read, and the folder is as empty as it was."""
    told = bench("--tokens", 100, "--tokens", 33, "--kv-cache-dtype", "int8", "--folder", tmp_path, "--json")
    data = json.loads(told.stdout)
    assert data["machine"]["cpus"] >= 1 and [each["tokens"] for each in data["results"]] == [100, 33]
    for each, blocks in zip(data["results"], (6, 2), strict=True):
        assert each["kv_cache_dtype"] == "int8" and each["bytes"] >= blocks * 16 * 2 * 2 * 2 * (32 + 2)
        rows = {row["from"]: row for row in each["ways"]}
        assert set(rows) >= {f"{way}, {where}" for way in NAMES for where in ("this process", "new process, cold")}
        assert all(row["seconds"] > 0 for row in rows.values())
        for name, row in rows.items():
            read = ("cold" in name and "unverified" not in name) or name.startswith("safetensors")
            assert (row["gbps"] is not None) == read, name
            assert not read or row["gbps"] == pytest.approx(each["bytes"] / row["seconds"] / 1e9)
        assert each["decode_mapped_speed"] > 0 and each["publishing_share"] >= 0
    assert not [*tmp_path.iterdir()]


def test_table() -> None:
    shown = bench("--tokens", 40, "--kv-cache-dtype", "auto").stdout
    assert shown.startswith("40 tokens, 2 layers of 2 kv heads of 32, bfloat16: ")
    for name in (
        "computed anew, attention alone",
        "memory: the prefix cache",
        *(f"{way}, new process" for way in NAMES),
    ):
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{name} ") and "cold" not in line)
        assert line.split()[-1] in ("s", "ms", "us")
    assert "decode of one token: " in shown


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, text in (
        (("--tokens", 16), "--tokens 16: expected more than --block-size 16"),
        (("--num-kv-heads", 3), "--num-heads 4: expected a multiple of --num-kv-heads 3"),
        (("--kv-cache-dtype", "int3"), "int3"),
        (("--folder", tmp_path / "missing"), "does not exist"),
    ):
        assert text in bench(*words, code=2).output
    monkeypatch.setattr(store_folder.Folder, "create", _refuse)
    with pytest.warns(RuntimeWarning, match="cannot write"):
        assert "the system refuses to write" in bench("--tokens", 40, "--folder", tmp_path, code=1).output


def _refuse(*given: Any) -> int:
    raise OSError(28, "No space left on device")


def test_a_process_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "a process that restores" in bench("--tokens", 40, code=1).output
