# SPDX-License-Identifier: Apache-2.0
"""The reference of the site: every public name is in it, and its docstring says arguments, errors and an example, which
runs."""

from __future__ import annotations

import ast
import doctest
import enum
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import cpu_attn
import cpu_attn.distributed

from ..harness.snippets import ROOT

SOURCES, PAGES = ROOT / "cpu_attn", ROOT / "docs" / "reference"
if not PAGES.is_dir():
    pytest.skip("these tests belong to a source tree", allow_module_level=True)

ADAPTERS = [*(SOURCES / "adapters").glob("[!_]*/__init__.py"), SOURCES / "distributed" / "__init__.py"]
MADE_BY_OTHERS = {"SchedulerMetadata", "UnavailableError", "RankError"}  # nobody calls these classes
HERE = {module.__name__: module for module in (cpu_attn, cpu_attn.distributed)}  # without other libraries
NAMES = [(module, name) for module, what in HERE.items() for name in what.__all__]
SECTION = r"^{}:\n((?:    .*\n|\n)+)"


def public(file: Path) -> set[str]:
    """What ``__all__`` of an adapter's source says, whose library need not be here."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"cpu_attn.{file.parent.name}.{name}" for name in ast.literal_eval(node.value)}
    raise AssertionError(f"{file} has no __all__")


def section(doc: str, title: str) -> str:
    found = re.search(SECTION.format(title), doc + "\n", re.MULTILINE)
    return found[1] if found else ""


def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    entries = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    for adapter, module in re.findall(r"^\.\. automodule:: cpu_attn\.(\w+)\.(\w+)\n   :members:", text, re.MULTILINE):
        entries += public(SOURCES / "adapters" / adapter / f"{module}.py")
    names = {f"cpu_attn.{name}" for name in cpu_attn.__all__}.union(*map(public, ADAPTERS))
    assert not names - set(entries)


def check_arguments(what: Any, doc: str) -> None:
    """In the order of the signature."""
    parameters = inspect.signature(what).parameters.values()
    prefix = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    want = [prefix.get(p.kind, "") + p.name for p in parameters if p.name != "self"]
    assert re.findall(r"^    ([*\w]+): ", section(doc, "Args"), re.MULTILINE) == want


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_docstring(module: str, name: str) -> None:
    what = getattr(HERE[module], name)
    doc = inspect.getdoc(what)
    assert doc and section(doc, "Example")
    if name not in MADE_BY_OTHERS:
        assert re.search(
            r"^    \w+Error: .", section(doc, "Raises"), re.MULTILINE
        ) or "raises no errors" in doc.replace("\n", " ")
        if not (inspect.isclass(what) and issubclass(what, enum.Enum)):
            check_arguments(what, doc)
    example = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    assert example.examples
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    said: list[str] = []
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


METHODS = [
    (module, name, method)
    for module, name in NAMES
    if inspect.isclass(what := getattr(HERE[module], name)) and name not in MADE_BY_OTHERS and name != "AttentionType"
    for method in vars(what)
    if not method.startswith("_") and callable(getattr(what, method))
]


@pytest.mark.parametrize(("module", "name", "method"), METHODS)
def test_docstring_of_method(module: str, name: str, method: str) -> None:
    """It says its arguments, or refers to what does."""
    what = getattr(getattr(HERE[module], name), method)
    doc = inspect.getdoc(what) or ""
    if inspect.isclass(what):  # an attribute that holds one
        return
    if "Args:" in doc:
        check_arguments(what, doc)
    else:
        refers = re.search(r":(meth|func):`", doc) or all(f"``{p}``" in doc for p in inspect.signature(what).parameters)
        assert doc and refers
