# SPDX-License-Identifier: Apache-2.0
"""mutants.toml fits the sources and the tests, and the script that applies it tells what it finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import mutants

MUTANTS = mutants.read()
TESTS = Path(__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_it_applies_and_its_tests_are_there(mutant: mutants.Mutant) -> None:
    assert mutant.applied() != (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.breaks.endswith(".")
    assert mutant.tests
    for name in mutant.tests:
        file, _, test = name.partition("::")
        assert (TESTS / file).is_file(), name
        test = test.partition("[")[0]
        assert not test or re.search(rf"^def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), name
    for isa in mutant.isas:
        assert (mutants.ROOT / "native" / "isa" / f"{isa}.c").is_file()


@pytest.mark.parametrize("find", ["no such text", "return"])
def test_a_text_that_is_not_there_once_is_stale(find: str) -> None:
    mutant = mutants.Mutant("x", "native/check/check.c", find, "", ("test_errors.py",), "")
    with pytest.raises(ValueError, match=f"native/check/check.c has .* times '{find}', expected once"):
        mutant.applied()
