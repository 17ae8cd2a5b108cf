# SPDX-License-Identifier: Apache-2.0
"""The Python of the documents, as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def snippets(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def run(document: Path) -> Iterator[dict[str, Any]]:
    """The names that there are after each snippet; the next goes on from these."""
    names: dict[str, Any] = {}
    for snippet in snippets(document):
        exec(compile(snippet, str(document), "exec"), names)
        yield names
