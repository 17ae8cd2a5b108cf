# SPDX-License-Identifier: Apache-2.0
"""This module reads the CPU time that Linux' control groups grant this process, which OpenMP does not ask for.

A container that was given 2 of 64 CPUs' time (``docker run --cpus=2``, a Kubernetes limit) sees all 64. With a thread
for each of them the system stops all threads for most of every period.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 2**31 - 1  # CPUs; C holds no larger number
PATH_MAX = 4096  # Linux opens no longer path


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Gives the folder of each group that this process is in and of those above it, and the name of its mount: "" in
    version 2, "cpu" in version 1. A container may see its own group as the mount's top and yet be told a longer path,
    so all folders of the path are tried."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers and "cpu" not in controllers.split(",")) or len(path) > PATH_MAX:
            continue
        mount = "cpu" if controllers else ""
        top = root / "sys/fs/cgroup" / mount
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield top / folder, mount


def _granted(folder: Path, mount: str) -> int:
    """Gives the CPU time of a group as a number of CPUs, rounded up; UNLIMITED where the group has no limit that C can
    hold."""
    try:
        if mount:
            said = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        else:
            said = (folder / "cpu.max").read_text().split()
        quota, period = map(int, said)
    except (OSError, ValueError):  # "max" is no number
        return UNLIMITED
    return min(-(-quota // period), UNLIMITED) if quota > 0 and period > 0 else UNLIMITED


def cpu_quota(root: Path = Path("/")) -> int:
    """Says how many CPUs' time this process gets at most, rounded up; 0 where nothing limits it. root: another top of
    the file system, for tests."""
    try:
        least = min((_granted(*group) for group in _groups(root)), default=UNLIMITED)
    except (OSError, ValueError):
        return 0
    return 0 if least == UNLIMITED else least
