# SPDX-License-Identifier: Apache-2.0
"""Every way to install the package, each into a fresh virtual environment, with and without oneDNN."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = (".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis")

# What an installed package must do. Arguments: the folder it is expected in, whether oneDNN must be there.
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import cpu_attn
from cpu_attn import reference

folder, onednn = Path(sys.argv[1]).resolve(), sys.argv[2] == "1"
assert folder in Path(cpu_attn.__file__).resolve().parents, cpu_attn.__file__
there = {e.name: e for e in cpu_attn.engines()}
assert there["native"].available and there["reference"].available
assert there["onednn"].available == onednn and bool(there["onednn"].reason) != onednn, there["onednn"]
assert onednn or "this build has no oneDNN engine" in there["onednn"].reason, there["onednn"]
rng = np.random.default_rng(0)
key, value = rng.standard_normal((2, 5, 1, 8), np.float32)
query = rng.standard_normal((5, 2, 8), np.float32)
start, lens = np.array([0, 5], np.int32), np.array([5], np.int32)
expected = reference.attention(query, [key], [value], start, lens, 8**-0.5)[0]
for engine in (e.name for e in there.values() if e.available):
    cache = cpu_attn.PagedKVCache(2, 4, 1, 8)
    cache.update(key, value, np.array([4, 5, 6, 7, 0]))
    plan = cache.plan(start, lens, num_heads=2, engine=engine)
    output = cache.attend(query, np.array([[1, 0]], np.int32), plan)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6, err_msg=engine)
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-6000:]}"
    return done.stdout


@dataclass(frozen=True)
class Flavour:
    """A copy of the sources, and the environment that a build of them sees."""

    source: Path
    env: dict[str, str]
    onednn: bool


@pytest.fixture(scope="module", params=[True, False], ids=["onednn", "no-onednn"])
def flavour(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Flavour:
    if not (ROOT / "build_ffi.py").exists():
        pytest.skip("these tests belong to a source tree")
    here = ("CPU_ATTN_", "PYTHON", "VIRTUAL_ENV", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(here)}
    env["SOURCE_DATE_EPOCH"] = "1764115200"
    if not request.param:
        env["CPU_ATTN_NO_ONEDNN"] = "1"
    source = tmp_path_factory.mktemp("flavour") / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return Flavour(source, env, request.param)


@pytest.fixture(scope="module")
def dist(flavour: Flavour) -> Path:
    """What `python -m build` makes: an sdist, and a wheel that is built from it."""
    bin_ = venv(flavour.source.parent / "tools", flavour)
    run(bin_ / "pip", "install", "-q", "build", cwd=flavour.source, env=flavour.env)
    run(bin_ / "python", "-m", "build", cwd=flavour.source, env=flavour.env)
    return flavour.source / "dist"


def venv(folder: Path, flavour: Flavour) -> Path:
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent, env=flavour.env)
    return folder / "bin"


def works(bin_: Path, flavour: Flavour, expected_in: Path, cwd: Path) -> None:
    """The installed package computes and verifies, away from its sources."""
    script = cwd / "script.py"
    script.write_text(SCRIPT)
    run(bin_ / "python", script, expected_in, str(int(flavour.onednn)), cwd=cwd, env=flavour.env)
    verify = (bin_ / "cpu-attn", "verify", "--quick", "--isa", "scalar", "--engine", "native")
    run(*verify, cwd=cwd, env=flavour.env)


def test_the_same_sources_give_the_same_bytes(flavour: Flavour, dist: Path, tmp_path: Path) -> None:
    """In another folder, later."""
    if not flavour.onednn:
        pytest.skip("oneDNN changes nothing about it")
    source = tmp_path / "source"
    shutil.copytree(flavour.source, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    run(flavour.source.parent / "tools" / "bin" / "python", "-m", "build", cwd=source, env=flavour.env)
    made = {path.name: path.read_bytes() for path in (source / "dist").iterdir()}
    assert made == {path.name: path.read_bytes() for path in dist.iterdir()}
    assert len(made) == 2


@pytest.mark.parametrize("editable", ["no", "default", "strict"])
def test_install_from_tree(flavour: Flavour, editable: str, tmp_path: Path) -> None:
    if not flavour.onednn:
        pytest.skip("oneDNN changes nothing about it, and the wheel is without it")
    source = tmp_path / "source"
    shutil.copytree(flavour.source, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    bin_ = venv(tmp_path / "venv", flavour)
    how = {"no": ["."], "default": ["-e", "."], "strict": ["-e", ".", "--config-settings", "editable_mode=strict"]}
    run(bin_ / "pip", "install", "-q", *how[editable], cwd=source, env=flavour.env)
    works(bin_, flavour, bin_.parent if editable == "no" else source, tmp_path)


def test_wheel(flavour: Flavour, dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert re.fullmatch(r"cpu_attn-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub("-.*", "", name.split("/")[0]) for name in names} == {"cpu_attn"}
    modules = {name for name in names if name.endswith(".so")}
    assert modules == {f"cpu_attn/{m}.abi3.so" for m in ("_native", "_onednn")[: 1 + flavour.onednn]}
    bin_ = venv(tmp_path / "venv", flavour)
    run(bin_ / "pip", "install", "-q", wheel, cwd=tmp_path, env=flavour.env)
    works(bin_, flavour, bin_.parent, tmp_path)


def test_sdist(flavour: Flavour, dist: Path, tmp_path: Path) -> None:
    if not flavour.onednn:
        pytest.skip("the wheel was made from it")
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = (flavour.source / folder for folder in ("native", "cli", "tests"))
    sources = {str(p.relative_to(flavour.source)) for folder in folders for p in folder.rglob("*.*")}
    assert sources | {"LICENSE", "Makefile", "CHANGELOG.md", ".ci/run"} <= names
    bin_ = venv(tmp_path / "venv", flavour)
    run(bin_ / "pip", "install", "-q", sdist, cwd=tmp_path, env=flavour.env)
    works(bin_, flavour, bin_.parent, tmp_path)
