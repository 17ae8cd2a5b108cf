# SPDX-License-Identifier: Apache-2.0
"""Which native files compile for other systems, by zig's clang and its headers: ``make systems``, or
``python tests/cross/systems.py aarch64-macos``. Nothing is linked or run."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from build_ffi import BASE_FLAGS, FLAGGED, ONEDNN, flagged_files, write_arguments, write_list  # noqa: E402

TARGETS = {"x86_64-linux-musl": "x86_64", "aarch64-macos": "aarch64", "x86_64-windows-gnu": "x86_64"}
FLAGS = [flag for flag in BASE_FLAGS if flag != "-O3"] + ["-Werror", "-O0", f"-I{ROOT / 'native'}"]


def compiled(target: str, source: Path, flags: tuple[str, ...], folder: Path) -> str:
    """What the compiler says of a file that it refuses, else nothing."""
    object_file = folder / f"{source.parent.name}-{source.stem}.o"
    # zig takes -march for the name of a CPU.
    flags = tuple(re.sub(r"^-march=armv8\.(\d)-a\+", r"-mcpu=generic+v8_\1a+", flag) for flag in flags)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS, f"-I{folder}", *flags]
    done = subprocess.run([*command, "-c", str(source), "-o", str(object_file)], capture_output=True, text=True)
    return f"{target}: {source.relative_to(ROOT)}\n{done.stderr}" if done.returncode else ""


def main() -> None:
    refused: list[str] = []
    count = 0
    for target in sys.argv[1:] or TARGETS:
        arch = TARGETS[target]
        folder = ROOT / "build/systems" / target
        folder.mkdir(parents=True, exist_ok=True)
        write_arguments(folder)
        plain = (p for p in (ROOT / "native").rglob("*.c") if p.parent not in (*FLAGGED, ONEDNN))
        sources: dict[Path, tuple[str, ...]] = dict.fromkeys(plain, ())
        for of in FLAGGED:
            files = [file for file in flagged_files(of) if file.arch in ("any", arch)]
            write_list(folder, of, files, [])
            sources |= {file.path: file.flags for file in files}
        with ThreadPoolExecutor(2) as pool:
            refused += filter(None, pool.map(lambda s: compiled(target, s, sources[s], folder), sources))  # noqa: B023
        count += len(sources)
    print(*refused, f"{count - len(refused)} of {count} compiled", sep="\n")
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
