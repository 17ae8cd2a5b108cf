# SPDX-License-Identifier: Apache-2.0
"""Threads follow the CPU time that control groups grant, in folders made as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cpu_attn
from cpu_attn import _numa
from cpu_attn._native import lib
from cpu_attn._quota import cpu_quota

NO_QUOTA = 2**31 - 1


def make(root: Path, membership: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def second(folder: str, limit: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}cpu.max": limit}


def first(folder: str, quota: str, period: str = "100000\n") -> dict[str, str]:
    at = f"sys/fs/cgroup/cpu/{folder}cpu.cfs"
    return {f"{at}_quota_us": quota, f"{at}_period_us": period}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", second("", "200000 100000\n"), 2),
        ("0::/\n", second("", "350000 100000\n"), 4),
        ("0::/\n", second("", "5000 100000\n"), 1),
        ("0::/\n", second("", "max 100000\n"), 0),
        ("0::/\n", {}, 0),
        ("0::/a/b\n", second("a/b/", "800000 100000\n") | second("a/", "300000 100000\n"), 3),
        ("0::/a/b\n", second("a/b/", "max 100000\n") | second("a/", "300000 100000\n"), 3),
        ("0::/elsewhere/c\n", second("", "100000 50000\n"), 2),  # the mount's top is the process's own group
        ("0::/../x\n", second("", "100000 50000\n"), 2),
        ("4:memory:/m\n3:cpu,cpuacct:/d\n0::/d\n", first("d/", "150000\n"), 2),
        ("3:cpuacct,cpu:/d\n", first("d/", "-1\n") | first("", "600000\n"), 6),
        ("3:cpu:/d\n", first("d/", "-1\n"), 0),
        ("3:cpuset:/d\n", first("d/", "100000\n"), 0),
        ("0::/\n", second("", "words\n"), 0),
        ("0::/\n", second("", "100000 0\n"), 0),
        ("no groups", second("", "100000 100000\n"), 0),
        ("0::/\n", second("", "17592186044415 1000\n"), 0),  # Linux' largest quota: more than any machine has
        ("0::/\n", second("", f"{2**31 - 2}000 1000\n"), 2**31 - 2),
        ("0::/\n", second("", "9" * 400 + " 1\n"), 0),
        ("0::/\n", second("", "100000 " + "9" * 400 + "\n"), 1),
        ("0::/\n", second("", "-100000 100000\n"), 0),
        ("0::/\n", second("", "100000 -100000\n"), 0),
        ("0::/\n", second("", "0 100000\n"), 0),
        ("0::/\n", second("", "nan 100000\n"), 0),
        ("0::/\n", second("", "inf inf\n"), 0),
        ("0::/\n", second("", "100000 nan\n"), 0),
        ("0::/\n", second("", ""), 0),
        ("3:cpu:/\n", first("", "-5\n"), 0),
        ("3:cpu:/\n", first("", "100000\n", ""), 0),
        ("0::/" + "a/" * 100_000 + "\n", second("", "100000 100000\n"), 0),
        ("0::/\0\n0::/\n", second("", "100000 100000\n"), 1),
    ],
)
def test_what_is_granted(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    assert cpu_quota(make(tmp_path, membership, files)) == expected


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def huge(path: Path) -> None:
    path.write_bytes(b"9" * 5_000_000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    """A link in a circle, which refuses root as well."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("spoil", [emptied, binary, huge, folder, unreadable])
@pytest.mark.parametrize("name", ["proc/self/cgroup", "sys/fs/cgroup/cpu.max", "sys/devices/system/node/node1/cpulist"])
def test_files_that_hold_no_words_of_linux(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    make(tmp_path, "0::/\n", second("", "200000 100000\n"))
    for node in range(2):
        make(tmp_path, "0::/\n", {f"sys/devices/system/node/node{node}/cpulist": f"{node}\n"})
    spoil(tmp_path / name)
    assert cpu_quota(tmp_path) == (2 if "node1" in name else 0)
    assert _numa.read(tmp_path) == {0: [0], 1: [] if "node1" in name else [1]}


def test_where_there_are_no_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == 0


def test_a_quota_bounds_openmps_number_alone() -> None:
    cpu_attn.set_num_threads(0)
    before = cpu_attn.get_num_threads()
    try:
        lib.ca_set_cpu_quota(1)
        assert cpu_attn.get_num_threads() == 1
        cpu_attn.set_num_threads(3)
        assert cpu_attn.get_num_threads() == 3
    finally:
        cpu_attn.set_num_threads(0)
        lib.ca_set_cpu_quota(NO_QUOTA)
    assert cpu_attn.get_num_threads() == before


@pytest.mark.parametrize(
    ("limit", "omp_num_threads", "expected"),
    [
        ("100000 100000\n", None, 1),
        ("100000 100000\n", "3", 3),
        ("17592186044415 1000\n", None, cpu_attn.get_num_threads()),
        ("\0\xff", None, cpu_attn.get_num_threads()),
    ],
)
def test_what_an_import_goes_by(tmp_path: Path, limit: str, omp_num_threads: str | None, expected: int) -> None:
    """A process that is told of a quota."""
    script = """
import pathlib, sys
root, read = pathlib.Path(sys.argv[1]), pathlib.Path.read_text
pathlib.Path.read_text = lambda path: read(root / path.relative_to("/") if root not in path.parents else path)
import cpu_attn
print(cpu_attn.get_num_threads())
"""
    make(tmp_path, "0::/\n", second("", limit))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if omp_num_threads:
        env["OMP_NUM_THREADS"] = omp_num_threads
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == expected
