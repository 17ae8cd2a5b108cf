# SPDX-License-Identifier: Apache-2.0
"""Who writes into the indices of a call that runs gets wrong numbers at worst."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cpu_attn
from cpu_attn.tests.programs.disturb import CALLS

ABSENT = [f"attend-{e.name}" for e in cpu_attn.engines() if not e.available]


@pytest.mark.parametrize("call", [call for call in CALLS if not call.startswith(tuple(ABSENT))])
def test_no_index_that_changes_during_a_call_crashes_it(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cpu_attn.tests.programs.disturb", call, "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.returncode} after:\n{done.stdout}{done.stderr}"
