# SPDX-License-Identifier: Apache-2.0
"""mutants.toml fits the sources and the tests, and the script that applies it tells what it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .. import mutants, mutate

MUTANTS = mutants.read()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_it_applies_and_its_tests_are_there(mutant: mutants.Mutant) -> None:
    assert mutant.applied() != (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.breaks.endswith(".")
    assert mutant.tests
    for name in mutant.tests:
        file, _, test = mutants.place(name).partition("::")
        test = test.partition("[")[0]
        assert not test or re.search(rf"^def {test}\(", Path(file).read_text(encoding="utf-8"), re.MULTILINE), name
    for isa in mutant.isas:
        assert (mutants.ROOT / "native" / "isa" / f"{isa}.c").is_file()


def test_the_parameters_of_its_tests_are_there() -> None:
    """pytest finds every test that is named with its parameters. Left out are those of libraries, and of isas that a
    machine may lack."""
    named = {mutants.place(x) for m in MUTANTS if not (m.library or m.isas) or m.isas == ("scalar",) for x in m.tests}
    command = [sys.executable, "-m", "pytest", "-c", mutants.ROOT / "pyproject.toml", "--rootdir", mutants.ROOT]
    command += ["-m", "", "-n", "0", "--collect-only", *sorted(x for x in named if "[" in x)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("find", ["no such text", "return"])
def test_a_text_that_is_not_there_once_is_stale(find: str) -> None:
    mutant = mutants.Mutant("x", "native/check/check.c", find, "", ("test_errors.py",), "")
    with pytest.raises(ValueError, match=f"native/check/check.c has .* times '{find}', expected once"):
        mutant.applied()


TEXT = """/* a < b; f(a, b); */
#define LESS(a, b) ((a) < (b) ? 1 : \\
                    2)
static int f(int a, const char *b) {
    int n = a + 1;
    if (n <= 16) /* 3 */
        return g(a, h(b, 0x10), 2.5f);
    n++;
    s->at[n - 1].x += "9 < 9"[n];
    for (int i = 0; i < n; i++)
        f(a, a);
    n++;
    return n;
}
"""


def test_places_to_break() -> None:
    """Not in comments, macros, strings, declarations or numbers that are no integers."""
    found = {
        kind: [(TEXT[x.start : x.end], x.replacement) for x in places] for kind, places in mutate.changes(TEXT).items()
    }
    assert found == {
        "comparison": [("<=", "<"), ("<", "<=")],
        "off by one": [("1", "0"), ("1", "2"), ("16", "15"), ("16", "17"), ("1", "0"), ("1", "2"), ("0", "1")],
        "swapped arguments": [
            ("a, h(b, 0x10)", "h(b, 0x10), a"),
            ("h(b, 0x10), 2.5f", "2.5f, h(b, 0x10)"),
            ("b, 0x10", "0x10, b"),
        ],
        "dropped statement": [
            (statement, ";")
            for statement in (
                "return g(a, h(b, 0x10), 2.5f);",
                "n++;",
                's->at[n - 1].x += "9 < 9"[n];',
                "f(a, a);",
                "n++;",
                "return n;",
            )
        ],
    }


PYTHON = '''"""1 < 2: f(1, 2)."""


@cache
def f(a: tuple[int, 2], *, b: int = 3) -> int:
    """Gives 4."""
    n: list[5] = [-6]
    if a is None or (b) <= 7 < a:
        raise ValueError(f"{a}: {b < 8}")
    "µ"; n.append(9)
    for x in n:
        n[0] += g(a, h(b, 1.5), c=a not in b)
    return n
'''


def test_places_to_break_in_python() -> None:
    """Not in docstrings, types or the words of an error."""
    found = {
        kind: [(PYTHON[x.start : x.end], x.replacement) for x in places]
        for kind, places in mutate.changes(PYTHON, "py").items()
    }
    assert found == {
        "comparison": [("is", "is not"), ("<=", "<"), ("<", "<="), ("not in", "in")],
        "off by one": [
            *(("3", "2"), ("3", "4"), ("6", "5"), ("6", "7"), ("7", "6"), ("7", "8"), ("9", "8"), ("9", "10")),
            ("0", "1"),
        ],
        "swapped arguments": [("a, h(b, 1.5)", "h(b, 1.5), a"), ("b, 1.5", "1.5, b")],
        "dropped statement": [
            (statement, "pass")
            for statement in (
                'raise ValueError(f"{a}: {b < 8}")',
                "n.append(9)",
                "n[0] += g(a, h(b, 1.5), c=a not in b)",
                "return n",
            )
        ],
    }


def test_a_change_as_a_text_that_is_there_once() -> None:
    for places in mutate.changes(TEXT).values():
        for change in places:
            find, replace = mutate.as_texts(TEXT, change)
            assert TEXT.count(find) == 1
            assert TEXT.replace(find, replace) == TEXT[: change.start] + change.replacement + TEXT[change.end :]


def test_random_mutants_are_those_of_their_seed() -> None:
    assert mutants.sampled(MUTANTS, 5, 1) == mutants.sampled(MUTANTS, 5, 1) != mutants.sampled(MUTANTS, 5, 2)
    assert mutants.sampled(MUTANTS, 10**6, 1) == MUTANTS
    some, others = mutants.drawn(8, 1), mutants.drawn(8, 2)
    assert {m.file.startswith("native/linear/") for m in mutants.drawn(8, 1, "native/linear/")} == {True}
    assert {m.library for m in mutants.drawn(8, 1, "cpu_attn/")} == {"torch"}
    assert some == mutants.drawn(8, 1) and {m.find for m in some} != {m.find for m in others}
    for mutant in some:
        assert mutant.applied() != (mutants.ROOT / mutant.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", mutants.TOUCHING)
def test_files_of_tests_that_touch_a_file(name: str) -> None:
    assert (mutants.ROOT / name).exists()
    assert all(mutants.place(f"test_{test}.py") for test in mutants.TOUCHING[name].split())
