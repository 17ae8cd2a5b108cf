# SPDX-License-Identifier: Apache-2.0
"""Makes a folder that holds Debian's Python for arm64, which runs by qemu-user: ``make aarch64``, or
``python tests/cross/aarch64_python.py FOLDER``. It prints the path of that Python.

apt-get takes the packages from where this machine's own come from, and keeps what it knows of them in the folder, too.
They are unpacked and not installed, so nothing else on the machine changes. A process under qemu starts programs of
this machine as any other does: that Python compiles by the cross compiler, at its full speed."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("python3-venv", "libpython3-dev", "libgomp1", "libstdc++6")
# Python knows by the name it was called under where it is, and in which virtual environment. QEMU_CPU, which qemu reads
# by itself, says which CPU there is.
WRAPPER = """#!/bin/sh
exec {emulator} -L {root} -0 "$0" {python} "$@"
"""


def apt_get(folder: Path, *command: str) -> None:
    """Runs apt-get as if for a machine on which nothing is installed."""
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::Cache": folder / "cache",
        "Dir::State": folder / "state",
        "Dir::State::status": "/dev/null",
    }
    for below in ("cache/archives/partial", "state/lists/partial"):
        (folder / below).mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items()), *command], check=True)


def unpack(packages: list[Path], root: Path) -> None:
    """Unpacks packages, some of which have files in /lib and others in /usr/lib, as they are one folder nowadays."""
    for name in ("bin", "lib", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in packages:
        archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", str(root)], input=archive, check=True)


def relocate(root: Path) -> None:
    """Tells that Python's own record where its headers and pip lie, which setuptools and venv ask for."""
    for record in root.glob("usr/lib/python3.*/_sysconfigdata_*.py"):
        here = re.sub("'/usr/(?=include/python|share/python-wheels)", f"'{root}/usr/", record.read_text())
        record.write_text(here)
    for headers in root.glob("usr/include/python3.*"):
        (headers / "aarch64-linux-gnu").symlink_to("../aarch64-linux-gnu")


def wrap(root: Path) -> Path:
    """Gives a program that runs the folder's Python by qemu, and that is beside it, where Python looks for its own
    modules."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        sys.exit("qemu-user is not there: on Debian and Ubuntu, apt-get install qemu-user-static")
    wrapper = root / "usr/bin/python"
    wrapper.write_text(WRAPPER.format(emulator=emulator, root=root, python=(root / "usr/bin/python3").resolve()))
    wrapper.chmod(0o755)
    return wrapper


def download(folder: Path) -> list[Path]:
    """Gives the packages. It raises CalledProcessError where this machine's sources have none for arm64."""
    apt_get(folder, "update")
    apt_get(folder, "install", "-y", "--no-install-recommends", "--download-only", *PACKAGES)
    return sorted((folder / "cache/archives").glob("*.deb"))


def main() -> None:
    if platform.machine() == "aarch64":
        sys.exit("this machine is aarch64 itself: make test-all")
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    root = folder / "root"
    unpack(download(folder / "apt"), root)
    relocate(root)
    print(wrap(root))


if __name__ == "__main__":
    main()
