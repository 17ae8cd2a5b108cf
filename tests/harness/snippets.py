# SPDX-License-Identifier: Apache-2.0
"""The Python of the documents, as it stands, and the examples."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def snippets(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def run(document: Path, wanted: Callable[[str], bool] = lambda snippet: True) -> Iterator[dict[str, Any]]:
    """The names that there are after each snippet; the next goes on from these."""
    names: dict[str, Any] = {}
    for snippet in filter(wanted, snippets(document)):
        exec(compile(snippet, str(document), "exec"), names)
        yield names


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:  # where a script finds its neighbours
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(name: str, *options: str) -> list[str]:
    """The lines that an example prints."""
    result = CliRunner().invoke(example(name).main, options)
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if "Logger" not in line]
