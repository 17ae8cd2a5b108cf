# SPDX-License-Identifier: Apache-2.0
"""What tests/peers.py, `make peers`, notices of signatures; it needs no package of the index."""

from __future__ import annotations

import inspect
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations

from cpu_attn.flashinfer import arguments  # noqa: E402

from .. import peers  # noqa: E402
from ..harness.snippets import ROOT  # noqa: E402

TEXT = """
@overload
def run(q): ...
def run(q, k, *, scale=1.0, dtype=torch.float16, out=None): ...
class Wrapper:
    def __init__(self, buffer, layout: str = "NHD"): ...
    def plan(self, a, b=3): ...
alias = run
"""


def test_reading(tmp_path: Path) -> None:
    """Of a wheel and of a source distribution, whose last definition counts."""
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x/part.py", TEXT)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as packed:
        member = tarfile.TarInfo("x-1.0/x/part.py")
        member.size = len(TEXT)
        packed.addfile(member, io.BytesIO(TEXT.encode()))
    for name in ("x.whl", "x.tar.gz"):
        found = peers.theirs(tmp_path / name, {"x.part": ("x/part.py",)})["x.part"]
        assert [*found] == ["run", "Wrapper", "Wrapper.__init__", "Wrapper.plan", "alias"]
        assert found["run"]["dtype"] == (True, torch.float16) and found["run"]["q"] == (False, inspect.Parameter.empty)
        assert found["Wrapper.__init__"]["layout"] == (False, "NHD")


def test_differences() -> None:
    there = {"q": (False, peers.NEEDED), "k": (False, peers.NEEDED), "scale": (True, 1.0)}

    def same(q: Any, k: Any, *, scale: float = 1.0) -> None: ...
    def also(q: Any, k: Any, scale: float = 1.0, **more: Any) -> None: ...
    def missing(q: Any, k: Any) -> None: ...
    def other(q: Any, k: Any, *, scale: float = 2.0) -> None: ...
    def order(k: Any, q: Any, *, scale: float = 1.0) -> None: ...
    def more(q: Any, k: Any, *, scale: float = 1.0, out: Any = None) -> None: ...
    def keyword(q: Any, *, k: Any, scale: float = 1.0) -> None: ...

    for function in (same, also):
        assert [*peers.differences("f", function, there)] == []
    for function, words in (
        (missing, "f: has no scale"),
        (other, "f: scale is 2.0 by default, theirs 1.0"),
        (order, "f: the order is ['k', 'q'], theirs ['q', 'k']"),
        (more, "f: has out, which theirs has not"),
        (keyword, "f: k is a keyword only"),
    ):
        assert words in peers.differences("f", function, there)


def test_reasons_are_of_arguments() -> None:
    """Of FlashInfer's signatures, so that no row of the table is lost."""
    functions = [f for module in peers.FLASHINFER.values() for _, f in peers.ours(module)]
    there = {name for f in functions for name in inspect.signature(f).parameters}
    assert not {*arguments.IGNORED, *arguments.REFUSED} - there
    assert not arguments.IGNORED.keys() & arguments.REFUSED.keys()


def test_tables() -> None:
    """One of a library: modules that lack nothing have no row."""
    found = peers.tables("flash_attn", {"a": ["b", "c"], "d": []})
    assert found == {"flash_attn_missing": [["module", "names that are not here"], ["`a`", "`b`, `c`"]]}
    assert peers.as_csv(found["flash_attn_missing"]).endswith('\n`a`,"`b`, `c`"\n')


@pytest.mark.parametrize(("name", "reasons"), [("ignored", arguments.IGNORED), ("refused", arguments.REFUSED)])
def test_tables_are_written(name: str, reasons: dict[str, str]) -> None:
    """The page's tables have the reasons that errors have."""
    file = ROOT / "docs" / "reference" / f"flashinfer_{name}.csv"
    if not file.is_file():
        pytest.skip("a source tree has it")
    assert file.read_text(encoding="utf-8") == peers.as_csv(peers.tables("flashinfer", {})[f"flashinfer_{name}"])
