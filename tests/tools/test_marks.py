# SPDX-License-Identifier: Apache-2.0
"""No test that takes an isa lacks the mark by which `make emulate` finds it (conftest.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_attn

ROOT = Path(__file__).resolve().parents[2]
# Those of tests/tools ask which isas there are, and measure by probes, of which an emulation has none.
FOLDERS = [ROOT / "tests" / name for name in ("native", "python", "docs")]
NAMES = [isa.name for isa in cpu_attn.isas()]


@pytest.mark.slow
def test_no_test_of_an_isa_lacks_the_mark() -> None:
    others = "not isa and not integrations and not packaging"
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "--collect-only"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", others, *FOLDERS], cwd=sys.prefix, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    of_an_isa = re.compile(rf"\[(.*-)?({'|'.join(NAMES)})[-\]]")
    assert len(ids) > 1000 and not [line for line in ids if of_an_isa.search(line)]


def test_files_that_go_through_isas_have_the_mark() -> None:
    asking = re.compile(r"\bcpu_attn\.isas\(\)")
    marked = re.compile(r"import .*(KERNELS|ONE_DTYPE)|parametrize\(\"isa\"|pytest\.mark\.isa\b")
    texts = {file.name: file.read_text() for folder in FOLDERS for file in folder.glob("test_*.py")}
    assert not [name for name, text in texts.items() if asking.search(text) and not marked.search(text)]
