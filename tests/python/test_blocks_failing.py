# SPDX-License-Identifier: Apache-2.0
"""A BlockManager's methods change all or nothing."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest

from cpu_attn.serving.journal import Journal

from ..programs.blocks_failing import CALLS, WRITING, At, at, made, state, sweep, without_evicted

STATEFUL = ("allocate", "allocate a row", "fork", "step", "step far", "truncate", "free", "swap_out", "swap_in")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"num_slots": 14} if "drafts" in name else {}) for name in CALLS),
        ("step", {"sliding_window": 3}),
        *((name, {"num_slots": 14}) for name in STATEFUL),
    ],
    ids=str,
)
def test_whichever_line_fails(name: str, options: dict[str, Any]) -> None:
    outcomes = sweep(name, at("line"), **options)
    assert outcomes["raised"] > 40 and outcomes["answered"] == 1


class FailingJournal(Journal):
    """Undoing fails, once, at this line of it."""

    at = -1

    def undo(self) -> None:
        line, self.at = self.at, -1
        with At(line):
            super().undo()


@pytest.mark.parametrize("name", ["step with copies", "truncate", "swap_in"])
def test_what_is_not_undone_as_memory_is_missing_still(name: str) -> None:
    """The next call does it."""
    start, call, lines = made(), CALLS[name][1], sweep(name, at("line"))["raised"]
    was = state(start)
    for line in count():
        manager = copy.deepcopy(start)
        manager._journal.__class__ = FailingJournal
        manager._journal.at = line  # type: ignore[attr-defined]
        with pytest.raises(MemoryError), At(lines - 2):
            call(manager, 1)
        done, found = not manager._journal, state(manager)
        assert found == (without_evicted(was, found) if name in WRITING else was), line
        if done:
            break
    assert line > 10
