# SPDX-License-Identifier: Apache-2.0
"""Who writes into the indices of a call that runs gets wrong numbers at worst."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cpu_attn
from cpu_attn.tests.programs.disturb import CALLS

ABSENT = [f"attend-{e.name}" for e in cpu_attn.engines() if not e.available]
HERE = [call for call in CALLS if not call.startswith(tuple(ABSENT))]
# Two seconds for each array of indices: where the checks of most calls are, and where those of writes are.
QUICK = ("attend-native", "write")


@pytest.mark.parametrize(
    "call", [call if call in QUICK else pytest.param(call, marks=pytest.mark.slow) for call in HERE]
)
def test_no_index_that_changes_during_a_call_crashes_it(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cpu_attn.tests.programs.disturb", call, "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.returncode} after:\n{done.stdout}{done.stderr}"
