# SPDX-License-Identifier: Apache-2.0
"""What documents and comments name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu_attn._adapters import ADAPTERS
from cpu_attn._dtypes import FORMATS

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
if not NATIVE.is_dir():
    pytest.skip("these tests belong to a source tree", allow_module_level=True)

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *NATIVE.rglob("*.md")]
SOURCES = [p for kind in ("c", "h", "inc") for p in NATIVE.rglob(f"*.{kind}")]
MADE = {"isa_list.h", "probe_list.h", "arguments.h", "argument_rows.h"}  # by build_ffi.py
FOREIGN = {"Python.h", "omp.h", "cpu_attn.py"}
# As they are in this repository, or from native, native/kernel or cpu_attn on; of more than one place, {a,b}.
BELOW = (
    ROOT,
    NATIVE,
    NATIVE / "kernel",
    NATIVE / "kernel" / "attention",
    NATIVE / "kernel" / "kv_formats",
    ROOT / "cpu_attn",
)


def expanded(text: str) -> Iterator[str]:
    """`a/{b,c}.d` as `a/b.d` and `a/c.d`."""
    if not (found := re.fullmatch(r"(.*)\{(.*)\}(.*)", text)):
        yield text
        return
    for part in found[2].split(","):
        yield found[1] + part + found[3]


def files_named(text: str) -> set[str]:
    """What stands between backquotes and looks like a file of this repository."""
    named = re.findall(r"`((?:[\w.{},-]+/)*[\w.{},-]+\.(?:c|h|inc|py|md|toml))`", text)
    return {name for each in named for name in expanded(each)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_files_that_documents_name(document: Path) -> None:
    everywhere = {
        p.name
        for folder in ("native", "cpu_attn", "cli", "tests", "examples", "docs")
        for p in (ROOT / folder).rglob("*")
    }
    everywhere |= {p.name for p in ROOT.iterdir()}
    for name in files_named(document.read_text(encoding="utf-8")) - MADE - FOREIGN:
        if "NAME" in name:  # of a file to be added
            continue
        found = any((folder / name).exists() for folder in (*BELOW, document.parent))
        assert found or ("/" not in name and name in everywhere), f"{name} is not there"


@pytest.mark.parametrize("name", [row.name for row in ADAPTERS])
def test_what_an_adapter_is(name: str) -> None:
    """The files of CONTRIBUTING's list."""
    for file in (f"cpu_attn/adapters/{name}/__init__.py", f"docs/{name}.md", f"tests/adapters/test_{name}.py"):
        assert (ROOT / file).is_file(), file


def test_files_that_comments_name() -> None:
    names = {p.name for p in SOURCES} | MADE | FOREIGN
    for path in SOURCES:
        for comment in re.findall(r"/\*.*?\*/", path.read_text(encoding="utf-8"), re.DOTALL):
            for name in re.findall(r"\b\w+\.(?:inc|h|c)\b(?!\w)", comment):
                assert name in names or not re.search(r"\.(inc|c)$", name), f"{path.relative_to(ROOT)} names {name}"
            for name in re.findall(r"(?:\w+/)*\w+\.md\b", comment):
                found = any((folder / name).exists() for folder in (*BELOW, NATIVE / "kernel" / "simd"))
                assert found, f"{path.relative_to(ROOT)} names {name}"


def test_measurements_that_comments_name() -> None:
    """`MEASUREMENTS.md: section`, or `Measurements: section, in MEASUREMENTS.md`."""
    text = (NATIVE / "kernel" / "MEASUREMENTS.md").read_text(encoding="utf-8")
    sections = {title.lower() for title in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    found = 0
    for path in SOURCES:
        plain = re.sub(r"\s*\n\s*\*\s*", " ", path.read_text(encoding="utf-8"))
        named = re.findall(r"MEASUREMENTS\.md: ([\w ,]+)\)", plain) + re.findall(r"Measurements: ([\w ]+), in", plain)
        for section in (part.strip().lower() for each in named for part in each.split(",")):
            assert section in sections, f"{path.relative_to(ROOT)} names {section}"
            found += 1
    assert found > 15


def test_what_a_kv_dtype_touches() -> None:
    """CONTRIBUTING's lists are those of the files in which one is named, and a row names it once."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Add a KV dtype")[1].split("\n## ")[0]
    listed = section.split("A test holds these lists")[1]
    native = files_named(listed.split("- Python:")[0])
    rows = (NATIVE / "cache" / "formats.h").read_text(encoding="utf-8")
    kinds = re.findall(r"X\((CA_\w+), [4-8], ", rows)
    assert len(kinds) == len(FORMATS) and all(len(re.findall(rf"\b{kind}\b", rows)) == 1 for kind in kinds)
    codes = re.compile(rf"\b({'|'.join(kinds)})\b")
    assert native == {str(p.relative_to(NATIVE)) for p in SOURCES if codes.search(p.read_text(encoding="utf-8"))}
    names = re.compile("|".join(rf"\"{name}\"|``{name}``" for name in FORMATS))
    python = {p for p in (ROOT / "cpu_attn").rglob("*.py") if names.search(p.read_text(encoding="utf-8"))}
    assert files_named(listed.split("- Python:")[1]) == {str(p.relative_to(ROOT / "cpu_attn")) for p in python}
