# SPDX-License-Identifier: Apache-2.0
"""The examples run, and the two ways of examples/transformers_batching.py compute the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integrations


def lines(name: str, *options: str) -> list[str]:
    file = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = CliRunner().invoke(module.main, options)
    assert result.exit_code == 0, result.output
    return [line for line in result.output.splitlines() if "Logger" not in line]


def test_batching() -> None:
    sizes = {"requests": 3, "keys": 100, "heads": 4, "kv-heads": 2, "head-size": 16, "page-size": 16, "repeat": 1}
    found = lines("transformers_batching", *(word for name, n in sizes.items() for word in (f"--{name}", str(n))))
    assert [line.split()[0] for line in found] == ["stock", "cpu_attn", "ratio"]
    assert 0 < float(found[-1].split()[-1]) < 0.02


def test_chat() -> None:
    found = lines("transformers_chat", "--context", "20", "--turns", "2", "--answer", "3", "--layers", "1")
    assert len(found) == 4 and all(line.endswith("tokens/s") for line in found)
