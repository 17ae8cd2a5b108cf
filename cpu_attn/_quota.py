# SPDX-License-Identifier: Apache-2.0
"""The CPU time that Linux' control groups grant this process, which OpenMP does not ask for.

A container that was given 2 of 64 CPUs' time (``docker run --cpus=2``, a Kubernetes limit) sees all 64. With a thread
for each of them the system stops all threads for most of every period.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 2**31 - 1  # CPUs, the most that C holds
PATH_MAX = 4096  # Linux opens no longer one


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """The folder of each group that this process is in, with those above it, and what its mount is called: "" in
    version 2, "cpu" in version 1. A container may see its own group as the mount's top and yet be told a longer
    path."""
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
    """CPUs' time in CPUs, rounded up; UNLIMITED where the group says no limit that C can hold."""
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
    """How many CPUs' time this process gets at most, rounded up; 0 where nothing limits it. root: for tests."""
    try:
        least = min((_granted(*group) for group in _groups(root)), default=UNLIMITED)
    except (OSError, ValueError):
        return 0
    return 0 if least == UNLIMITED else least
