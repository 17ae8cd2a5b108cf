# SPDX-License-Identifier: Apache-2.0
"""A source tree without its compiled module."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_attn

ROOT = Path(__file__).resolve().parents[2]


def test_an_import_from_sources_says_what_to_do(tmp_path: Path) -> None:
    """As from a clone's root, where Python finds the folder of sources first."""
    sources = Path(cpu_attn.__file__).parent
    shutil.copytree(sources, tmp_path / "cpu_attn", ignore=shutil.ignore_patterns("*.so", "*.pyd", "tests", "cli"))
    script = "import sys; sys.path.insert(0, ''); import cpu_attn"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: cpu_attn: no compiled module in {tmp_path / 'cpu_attn'}"), done.stderr
    assert "make verify" in last and "pip install" in last


def test_every_file_names_this_version() -> None:
    if not (ROOT / "CITATION.cff").exists():
        pytest.skip("a source tree has them")
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    latest, *_ = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cpu_attn.__version__ == cited == latest
