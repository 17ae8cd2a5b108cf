# SPDX-License-Identifier: Apache-2.0
"""Building: how many compilers run, what is said meanwhile, and how make ends after Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "build_ffi.py").exists():
    pytest.skip("these tests belong to a source tree", allow_module_level=True)


@pytest.fixture(scope="module")
def build_ffi() -> Any:
    spec = importlib.util.spec_from_file_location("build_ffi", ROOT / "build_ffi.py")
    assert spec and spec.loader
    module = sys.modules["build_ffi"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("cpus", "limit", "expected"), [(8, "max", 8), (8, "300000", 3), (2, "300000", 2)])
def test_compilers(
    build_ffi: Any, cpus: int, limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    for name, text in {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit} 100000\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert build_ffi.processes(tmp_path) == expected


def test_an_object_is_kept_while_nothing_that_it_was_made_of_changes(build_ffi: Any, tmp_path: Path) -> None:
    source, header, made = (tmp_path / name for name in ("a b.c", "with space.h", "a b.o"))
    source.write_text('#include "with space.h"\n')
    header.write_text("int x;\n")

    def kept(*flags: str) -> bool:
        """Compiles it if it has to be, and says whether it had not."""
        one = build_ffi.Made(made, ["cc", *flags])
        if one.current():
            return True
        with one.recorded() as more:
            subprocess.run(["cc", "-c", str(source), "-o", str(made), *flags, *more], check=True)
        return False

    assert not kept() and kept()
    header.write_text("int y;\n")
    assert not kept() and kept()
    assert not kept("-O1") and kept("-O1")
    made.unlink()
    assert not kept("-O1") and kept("-O1")
    source.write_text("#error it fails\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            kept("-O1")
    source.write_text('#include "with space.h"\n')
    header.unlink()
    with pytest.raises(subprocess.CalledProcessError):
        kept("-O1")


def told(build_ffi: Any) -> None:
    progress = build_ffi.Progress("cpu_attn._native", 2)
    progress.count("avx2.c")
    progress.count("check.c")


def test_pythons_share_a_compiler_cache(build_ffi: Any) -> None:
    """Commands of the Pythons that we know, but for what changes code: where there is hardening, it stays."""
    of_310 = ["gcc", "-Wno-unused-result", "-Wsign-compare", "-DNDEBUG", "-g", "-fwrapv", "-O3", "-Wall", "-fPIC"]
    of_313 = ["gcc", "-fno-strict-overflow", "-Wsign-compare", "-DNDEBUG", "-g", "-O3", "-Wall", "-fPIC"]
    assert build_ffi.alike(of_310) == ["gcc", "-DNDEBUG", "-fwrapv", "-O3", "-fPIC"]
    assert sorted(build_ffi.alike(of_313)) == sorted(build_ffi.alike(of_310))
    assert build_ffi.alike(["gcc", "-Wp,-D_FORTIFY_SOURCE=2", "-g"]) == ["gcc", "-Wp,-D_FORTIFY_SOURCE=2"]


def test_progress(build_ffi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_ffi.time, "monotonic", lambda: 0.0)
    want = ["0 of 2 files compiled, 0 s", "1 of 2 files compiled, 0 s (avx2.c)", "2 of 2 files compiled, 0 s (check.c)"]
    monkeypatch.delenv("CPU_ATTN_PROGRESS", raising=False)
    told(build_ffi)
    monkeypatch.setenv("CPU_ATTN_PROGRESS", str(tmp_path / "file"))
    told(build_ffi)
    assert (tmp_path / "file").read_text().splitlines() == [f"cpu_attn._native: {line}" for line in want]
    monkeypatch.setenv("CPU_ATTN_PROGRESS", str(tmp_path))  # which cannot be written to
    told(build_ffi)
    controller, terminal = pty.openpty()
    monkeypatch.setenv("CPU_ATTN_PROGRESS", os.ttyname(terminal))
    told(build_ffi)
    read = ""
    while not read.endswith("\r\n"):
        read += os.read(controller, 4096).decode()
    shown = read.removesuffix("\r\n").split("\r")
    assert [line.rstrip() for line in shown] == ["", *(f"cpu_attn._native: {line}" for line in want)]
    assert {len(line) for line in shown[1:]} == {79}  # each covers the one before


@pytest.mark.parametrize(("interrupted", "says"), [(True, "make verify: stopped"), (False, "make verify: FAILED")])
def test_make_verify(interrupted: bool, says: str, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "cpu-attn"
    command.parent.mkdir()
    (command.parent / "python").touch()
    wait = "echo ready; trap 'exit 130' INT; while :; do sleep 0.1; done"
    command.write_text(f"#!/bin/sh\n{wait if interrupted else 'echo ready; exit 1'}\n")
    command.chmod(0o755)
    for done in ("builder", "packaged", "compiled", "installed"):
        (tmp_path / done).touch()
    make = subprocess.Popen(
        ["make", "--no-print-directory", "verify", f"VENV={tmp_path}"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert make.stdout and make.stdout.readline().startswith("make verify: it is installed")
    assert make.stdout.readline() == "ready\n"
    if interrupted:
        os.killpg(make.pid, signal.SIGINT)
    lines = make.stdout.read().splitlines()
    assert make.wait(timeout=60) and any(line.startswith(says) for line in lines)
    assert sum("FAILED" in line or "stopped" in line for line in lines) == 1
