# SPDX-License-Identifier: Apache-2.0
"""How the package's modules import one another, read out of their sources: no circles, no way in but the door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cpu_attn

ROOT = Path(cpu_attn.__file__).parent
DOORS = ("_check", "backend", "compose", "linear", "storage")
# What functions import when they are called. Of the package itself only what finds oneDNN, for what that imports.
LATE = {"cpu_attn._onednn_loader"}


def _name(path: Path) -> str:
    return ".".join(("cpu_attn", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py")) if "tests" not in path.relative_to(ROOT).parts}


def _named(node: ast.AST, module: str) -> Iterator[str]:
    """The modules that a statement, or a call of import_module, imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
            source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [source])])
        for name in (f"{source}.{alias.name}" for alias in node.names):
            yield name if name in MODULES else source
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _imported(tree: ast.AST, module: str) -> set[str]:
    """Modules of this package, wherever in the tree they are imported: in functions and for type checkers, too."""
    return {name for node in ast.walk(tree) for name in _named(node, module)} & MODULES.keys()


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
IMPORTS = {name: _imported(tree, name) for name, tree in TREES.items()}


def test_there_is_no_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imported by ".join(error.args[1]))


def test_functions_import_nothing_of_the_package_but_what_is_expensive() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    late = {
        (name, found)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, functions)
        for found in _imported(node, name) - LATE
    }
    assert not late


@pytest.mark.parametrize("package", DOORS)
def test_others_come_through_the_door(package: str) -> None:
    inside = f"cpu_attn.{package}"
    past = {
        (name, found)
        for name, imported in IMPORTS.items()
        if not f"{name}.".startswith(f"{inside}.")
        for found in imported
        if found.startswith(f"{inside}.")
    }
    assert not past


def test_only_what_is_distributed_imports_it() -> None:
    """And of that the modules that need other libraries only one another."""
    inside = {name for name in MODULES if name.startswith("cpu_attn.distributed")}
    needy = {f"cpu_attn.distributed.{name}" for name in ("gloo", "mpi", "ray")}
    assert not {name for name in MODULES.keys() - inside if IMPORTS[name] & inside}
    assert needy < inside and not {name for name in inside - needy if IMPORTS[name] & needy}
