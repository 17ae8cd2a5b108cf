# SPDX-License-Identifier: Apache-2.0
"""No allocation that fails ends the process: in C, in oneDNN, or in Python."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_attn

PROGRAMS = "cpu_attn.tests.programs"
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64",
    reason="the failing allocator stands on glibc's; oneDNN's exceptions are caught on x86-64",
)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that is preloaded."""
    library = tmp_path_factory.mktemp("failing") / "failing.so"
    source = Path(__file__).parents[1] / "programs" / "failing.c"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def sweep(failing: Path, *arguments: str, **env: str) -> None:
    """In a process of its own, which has to say of each sweep that allocations did fail."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-m", f"{PROGRAMS}.memory_ends", *arguments],
        env={**os.environ, "LD_PRELOAD": str(failing), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode} after:\n{done.stdout}{done.stderr}"
    counts = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(counts) == len(arguments) - 2 and all(c["MemoryError"] for c in counts), done.stdout


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", [e.name for e in cpu_attn.engines() if e.available and e.name != "reference"])
def test_a_call_survives_whichever_allocation_fails(failing: Path, engine: str, dtype: str) -> None:
    sweep(failing, engine, dtype, "from_some_on", "at_random", "one_by_one")


# Where Python's own objects find no memory, generators of CPython 3.12 and 3.13 seem to have ended and its garbage
# collector crashes later; and so does cumsum of NumPy 2.2, which is the newest for Python 3.10.
PYTHONS_OWN = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Python and NumPy survive it with 3.11 alone")


@pytest.mark.parametrize("allocator", ["pymalloc", pytest.param("malloc", marks=PYTHONS_OWN)])
def test_every_entry_survives_whichever_allocation_fails(failing: Path, allocator: str) -> None:
    sweep(failing, "native", "float32", "each_entry", PYTHONMALLOC=allocator)


def test_a_block_manager_survives_whichever_allocation_fails(failing: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{PROGRAMS}.blocks_failing", "step", "step with copies", "swap_in", "fork a row"],
        env={**os.environ, "LD_PRELOAD": str(failing)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode} after:\n{done.stdout}{done.stderr}"
    assert done.stdout.count('"raised"') == 8, done.stdout
