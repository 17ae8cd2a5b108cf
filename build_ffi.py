# SPDX-License-Identifier: Apache-2.0
"""Builds the two extension modules through cffi's API mode (one stable-ABI file each).

``cpu_attn._native``: the core. Every file of ``native/isa`` and ``native/limits/probe`` is compiled with the flags its
first lines state. What this compiler or architecture cannot build is left out with the reason, which ``cpu-attn
info`` shows. ``cpu_attn._onednn``: the engine on oneDNN, where its headers are found.

Environment, read at build time:
    ONEDNN_ROOT            prefix of a oneDNN v3 to build against (include/, lib/)
    CPU_ATTN_NO_ONEDNN=1   leave the oneDNN engine out
    CPU_ATTN_SANITIZE=1    address and undefined-behaviour sanitizers
    CPU_ATTN_EMULATE=1     files that state `emulated` flags are compiled with these: avx512 and amx run on AVX2,
                           slowly. For tests
    CPU_ATTN_PROGRESS      a file or a terminal that is told which source was compiled, and how many are left: pip shows
                           nothing of a build that succeeds
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "native"
ONEDNN = NATIVE / "engines" / "onednn"
FLAGGED = (NATIVE / "isa", NATIVE / "limits" / "probe")  # folders whose files state their own flags
# Contraction is off, as a row's bits must not depend on which expressions the compiler chose to fuse. Debug
# information, which Python's own flags ask for, is off, too: it was 24.9 of the module's 27.5 MB.
BASE_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# With these flags an isa file takes 65 s to compile at -O3, 55 s at -O1, and 20 s at -O1 without the -fwrapv of
# Python's own flags, which would also hide signed overflow.
SANITIZE = ["-O1", "-fno-wrapv", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]
SANITIZE += ["-fno-omit-frame-pointer"]
# The unrolled kernels go without the checks of what the hardware traps itself: avx2.c takes 42 s so, else 90 s (Cascade
# Lake). Calls in place of inline checks of addresses compile faster still, but a test of minutes then takes many.
SANITIZE_KERNELS = ["-fno-sanitize=null,object-size,alignment,pointer-overflow"]


@dataclass(frozen=True)
class FlaggedFile:
    """Holds a file of FLAGGED and what its first lines say."""

    path: Path
    arch: str
    unit: str
    rank: int
    flags: tuple[str, ...]  # the emulated ones where the environment asks for them
    of: tuple[str, ...]  # the isa and the ca_dtypes whose kernels it replaces where it can run; empty for none
    guarded: tuple[str, ...]  # flags of further instructions, which it runs only where a check at run time allows them
    tuned: tuple[str, ...]  # flags that make it faster, for compilers that take them

    @classmethod
    def read(cls, path: Path) -> FlaggedFile:
        said = dict(re.findall(r"^ \* (\w+):[ \t]*(.*)$", path.read_text().split("*/")[0], re.MULTILINE))
        emulate = "emulated" in said and os.environ.get("CPU_ATTN_EMULATE") == "1"
        flags = tuple(said["emulated" if emulate else "flags"].split())
        guarded = () if emulate else tuple(said.get("guarded", "").split())
        of = tuple(said.get("of", "").split())
        tuned = tuple(said.get("tuned", "").split())
        return cls(path, said["arch"], said["unit"], int(said["rank"]), flags, of, guarded, tuned)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def source(self) -> str:
        return str(self.path.relative_to(ROOT))


def sanitizing() -> bool:
    return os.environ.get("CPU_ATTN_SANITIZE") == "1"


def flagged_files(folder: Path) -> list[FlaggedFile]:
    """Lists a folder's files, best first, which is the order in which ``auto`` looks."""
    return sorted(map(FlaggedFile.read, folder.glob("*.c")), key=lambda f: -f.rank)


def write_list(to: Path, folder: Path, built: list[FlaggedFile], absent: list[tuple[FlaggedFile, str]]) -> None:
    """Writes the header for C that lists the files of a folder of FLAGGED that were built and, with the reason, the
    others."""
    kind = folder.name.upper()
    lists = {
        "LIST": [f'{kind}({f.name}, "{f.unit}")' for f in built if not f.of],
        "ABSENT": [f'ABSENT({f.name}, "{f.unit}", "{why}")' for f, why in absent if not f.of],
    }
    if folder.name == "isa":
        lists["VARIANTS"] = [f"VARIANT({f.name}, {f.of[0]}, {d})" for f in built for d in f.of[1:]]
        lists["ABSENT_VARIANTS"] = [
            f'ABSENT_VARIANT({f.name}, {f.of[0]}, {d}, "{why}")' for f, why in absent for d in f.of[1:]
        ]
    lines = (f"#define CA_{kind}_{name} {' '.join(rows)}\n" for name, rows in lists.items())
    (to / f"{folder.name}_list.h").write_text("".join(lines))


def cdef(header: Path) -> str:
    """Gives the part of a header that cffi reads, with what it takes from arguments.h."""
    text = header.read_text().split("/* cffi: begin */")[1].split("/* cffi: end */")[0]
    if "CA_PLAN_FIELDS" not in text:
        return text
    enums, fields, _ = arguments()
    for name, what in fields.items():
        text = text.replace(name, what)
    return enums + text


def arguments() -> tuple[str, dict[str, str], str]:
    """Gives C the table of cpu_attn/_arguments.py: enums of axes and of each call's arrays, the fields of ca_shape and
    of ca_linear_how that hold options, and the rows of native/check/arguments.c."""
    table = runpy.run_path(str(ROOT / "cpu_attn" / "_arguments.py"))
    c_name = table["c_name"]
    shared, (first, *free) = (list(map(c_name, table[f"{kind}_AXES"])) for kind in ("SHARED", "FREE"))
    axes = [*shared, "CA_FREE", f"{first} = CA_FREE", *free, "CA_AXES", "CA_OR_1 = 32"]
    enums = f"enum ca_axis {{ {', '.join(axes)} }};\n"
    rows = ""
    for call in table["CALLS"]:
        prefix = "_".join(filter(None, ("CA", call.prefix)))
        index = {name: f"{prefix}_{name.upper()}" for name in call.names}
        kind = (call.prefix or "attention").lower()
        enums += f"enum ca_{kind}_arrays {{ {', '.join(index.values())}, CA_{kind.upper()}_ARRAYS }};\n"
        written = sum(table["WRITTEN"] in array.flags for array in call.arrays)
        checked = [c_row(row, index[row.name], table) for row in call.rows if isinstance(row, table["Array"])]
        rows += f"#define CA_{kind.upper()}_ROWS {{ {len(checked)}, {written}, {{ {', '.join(checked)} }} }}\n"
    where = ", ".join(f"CA_UPDATE_{name.upper()}" for name in table["ATTENTION"].names)
    rows += f"#define CA_ATTENTION_IN_UPDATE {{ {where} }}\n"
    fields = {
        f"CA_{call}_FIELDS": " ".join(row.declaration for row in table[call].fields) for call in ("PLAN", "LINEAR")
    }
    return enums, fields, rows


def c_row(row: Any, index: str, table: dict[str, Any]) -> str:
    """Gives an array's row as native/check/arguments.c has it."""
    kinds = [kind.upper() for kind in row.kinds if kind != table["CACHE"]]
    flags = [*row.flags, *(["CACHE"] if table["CACHE"] in row.kinds else [])]
    c_name, or_1 = table["c_name"], table["OR_1"]
    axes = [c_name(axis.removesuffix(or_1)) + " | CA_OR_1" * axis.endswith(or_1) for axis in row.axes]
    ndim = len(axes) - (table["WIDER"] in flags)
    return f"{{ {' | '.join(kinds) or 0}, {index}, {' | '.join(flags) or 0}, {ndim}, {{ {', '.join(axes)} }} }}"


def write_arguments(folder: Path) -> None:
    """Writes arguments.h, which cpu_attn.h includes, and argument_rows.h, which check/arguments.c does."""
    enums, fields, rows = arguments()
    defined = "".join(f"#define {name} {what}\n" for name, what in fields.items())
    (folder / "arguments.h").write_text(enums + defined)
    (folder / "argument_rows.h").write_text(rows)


def processes(root: Path = Path("/")) -> int:
    """Says how many compilers run at once: one for each CPU that this process may use and is granted the time of. root:
    another top of the file system, for tests."""
    spec = importlib.util.spec_from_file_location("_quota", ROOT / "cpu_attn" / "_quota.py")
    assert spec and spec.loader
    quota = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quota)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, quota.cpu_quota(root) or cpus)


class Progress:
    """Tells CPU_ATTN_PROGRESS of each of ``total`` files of ``module`` that was compiled. A terminal has one line of
    it, which the next one replaces."""

    def __init__(self, module: str, total: int) -> None:
        self.module, self.total, self.done, self.begun = module, total, 0, time.monotonic()
        self.path, self.lock = os.environ.get("CPU_ATTN_PROGRESS"), threading.Lock()
        self.tell("")

    def tell(self, source: str) -> None:
        if not self.path:
            return
        line = f"{self.module}: {self.done} of {self.total} files compiled, {time.monotonic() - self.begun:.0f} s"
        line += f" ({source})" * bool(source)
        # There may be no way to it: a socket has a name in /proc and cannot be opened.
        with suppress(OSError), open(self.path, "a") as file:
            if file.isatty():
                end = "\n" if self.done == self.total else ""
                file.write(f"\r{line[:79]:79}{end}")
            else:
                file.write(line + "\n")

    def count(self, source: str) -> None:
        with self.lock:
            self.done += 1
            self.tell(source)


class Made:
    """Holds what an object was made of: the command, and a digest of each file that the compiler read, but for system
    headers. An object that an earlier build left is current where these are the same."""

    def __init__(self, made: Path, command: list[str]) -> None:
        self.made, self.command, self.record = made, command, made.with_suffix(".json")

    def current(self) -> bool:
        try:
            before = json.loads(self.record.read_text())
            return self.made.exists() and before == self._now(before["files"])
        except (OSError, ValueError, LookupError):
            return False

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """Gives flags by which the compiler lists what it reads."""
        read = self.made.with_suffix(".d")
        self.record.unlink(missing_ok=True)
        yield ["-MMD", "-MF", str(read)]
        names = re.split(r"(?<!\\)\s+", read.read_text().partition(": ")[2].replace("\\\n", " ").strip())
        self.record.write_text(json.dumps(self._now([name.replace("\\ ", " ") for name in names])))

    def _now(self, names: Iterable[str]) -> dict[str, Any]:
        digests = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names}
        return {"command": self.command, "files": digests}


class BuildExt(build_ext):  # type: ignore[misc]
    """Compiles each source with its own flags and links them with cffi's glue."""

    def build_extension(self, ext: Extension) -> None:
        self.compiler.compiler_so = alike(self.compiler.compiler_so)
        if ext.name == "cpu_attn._native":
            self.build_native(ext)
        else:
            self.build_onednn(ext)

    def accepts(self, *flags: str, code: str = "int probe(void) { return 0; }") -> bool:
        probe = self.temp / "probe.c"
        probe.write_text(code + "\n")
        try:
            self.compiler.compile([str(probe)], output_dir=self.build_temp, extra_postargs=["-Werror", *flags])
        except CompileError:
            return False
        return True

    @property
    def temp(self) -> Path:
        path = Path(self.build_temp)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def headers(self) -> str:
        """Gives a folder of the headers that were written to ``temp``. Its name follows from what they hold, so that a
        compiler cache knows a source for every Python, and in every folder, that has the same ones."""
        texts = {header.name: header.read_bytes() for header in sorted(self.temp.glob("*.h"))}
        digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
        folder = self.temp.parent / "headers" / digest
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if not (folder / name).exists():
                written = folder / f"{name}.{os.getpid()}"  # another build may write it, too
                written.write_bytes(text)
                written.replace(folder / name)
        return str(folder)

    def common_flags(self) -> list[str]:
        flags = [*BASE_FLAGS]
        flags += SANITIZE if sanitizing() else []
        if self.accepts("-fopenmp", code="#include <omp.h>"):  # clang takes the flag without having the header
            flags.append("-fopenmp")
        return flags

    def build_native(self, ext: Extension) -> None:
        common = self.common_flags()
        sanitized = SANITIZE_KERNELS if sanitizing() else []
        elsewhere = (*FLAGGED, ONEDNN)
        sources = {path: common for path in sorted(NATIVE.rglob("*.c")) if path.parent not in elsewhere}
        write_arguments(self.temp)
        for folder in FLAGGED:
            for file in self.choose(folder):
                tuned = filter(self.accepts, file.tuned)
                sources[file.path] = [*common, *sanitized, *file.flags, *tuned]
        self.assemble(ext, NATIVE / "cpu_attn.h", sources, common)

    def choose(self, folder: Path) -> list[FlaggedFile]:
        """Gives the files that can be built here, and writes their list."""
        built, absent = [], []
        for file in flagged_files(folder):
            if file.arch not in ("any", platform.machine()):
                absent.append((file, f"its kernels are for {file.arch}, this build is for {platform.machine()}"))
            elif file.flags and not self.accepts(*file.flags):
                absent.append((file, f"the compiler that built this lacks one of {' '.join(file.flags)}"))
            else:
                built.append(file)
        write_list(self.temp, folder, built, absent)
        return built

    def build_onednn(self, ext: Extension) -> None:
        """Builds the engine, or leaves it out where no oneDNN is found: it is optional, and ``cpu-attn info`` says so.
        One that was asked for by ONEDNN_ROOT must be there."""
        found = find_onednn()
        if isinstance(found, str):
            if os.environ.get("ONEDNN_ROOT") and os.environ.get("CPU_ATTN_NO_ONEDNN") != "1":
                raise FileNotFoundError(found)
            self.announce(f"oneDNN engine left out: {found}", level=3)
            self.extensions.remove(ext)
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # what an earlier build left would be packed
            return
        include, library = found
        common = self.common_flags()
        sources = {path: common for path in sorted(ONEDNN.glob("*.c"))}
        self.assemble(ext, ONEDNN / "onednn.h", sources, common, [str(include)], [str(library)])

    def assemble(
        self,
        ext: Extension,
        header: Path,
        sources: dict[Path, list[str]],
        link_flags: list[str],
        include_dirs: list[str] | None = None,
        link_objects: list[str] | None = None,
    ) -> None:
        ffi = cffi.FFI()
        ffi.cdef(cdef(header))
        ffi.set_source(ext.name, f'#include "{header.relative_to(NATIVE)}"')
        glue = self.temp / f"{ext.name}.c"
        ffi.emit_c_code(str(glue))
        # Paths are relative, and only the glue is told of Python's headers, which lie elsewhere for each environment:
        # a compiler cache knows the same sources in another folder.
        include = [os.path.relpath(NATIVE), self.headers(), *(include_dirs or [])]
        pythons, self.compiler.include_dirs = self.compiler.include_dirs, []
        macros = [("Py_LIMITED_API", "0x030a0000")]

        of_glue = [f for f in link_flags if f not in ("-Wall", "-Wextra")] + [f"-I{folder}" for folder in pythons]
        sources = {**sources, glue: of_glue}
        how: dict[str, Any] = {"output_dir": self.build_temp, "macros": macros, "include_dirs": include}
        compiler = self.compiler.compiler_so
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
        command = [version, *compiler, *map(str, macros), *include]
        objects = self.compiler.object_filenames([name_of(source) for source in sources], output_dir=self.build_temp)
        made = {source: Made(Path(o), [*command, *sources[source]]) for source, o in zip(sources, objects, strict=True)}
        # The files of isas take longest by far, so they begin first, while there is something to do beside them.
        order = sorted(sources, key=lambda path: path.parent != FLAGGED[0])
        stale = [source for source in order if not made[source].current()]
        progress = Progress(ext.name, len(stale))

        def compile_one(source: Path) -> None:
            with made[source].recorded() as flags:
                self.compiler.compile([name_of(source)], extra_postargs=[*sources[source], *flags], **how)
            progress.count(source.name)

        with ThreadPoolExecutor(processes()) as pool:
            list(pool.map(compile_one, stale))
        self.compiler.include_dirs = pythons
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shared = [f for f in link_flags if f == "-fopenmp" or f.startswith("-fsanitize=")]
        self.compiler.link_shared_object(
            [*objects, *(link_objects or [])], str(target), libraries=["m"], extra_postargs=shared, target_lang="c"
        )


class BuildPy(build_py):  # type: ignore[misc]
    """Packs each folder of cpu_attn/adapters as cpu_attn.NAME, and of tests/ only what tests share with one another,
    with ``verify`` and with ``bench``."""

    def finalize_options(self) -> None:
        for door in sorted((ROOT / "cpu_attn" / "adapters").glob("*/__init__.py")):
            name = f"cpu_attn.{door.parent.name}"
            self.distribution.packages.append(name)
            self.distribution.package_dir[name] = str(door.parent.relative_to(ROOT))
        super().finalize_options()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [m for m in modules if not m[1].startswith(("test_", "conftest"))]


class Sdist(sdist):  # type: ignore[misc]
    """Gives the same bytes for the same sources where SOURCE_DATE_EPOCH is set
    (https://reproducible-builds.org/specs/source-date-epoch): every file has that time and nobody's name."""

    def make_archive(self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, **more: Any) -> str:
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            made: str = super().make_archive(base_name, format, root_dir, base_dir, **more)
            return made

        def timeless(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=timeless)  # it adds files in the order of their names
        return path


def alike(command: list[str]) -> list[str]:
    """Takes from a compiler's command what differs between Pythons and means the same, so that a compiler cache knows
    an object for all of them: warnings, debug information, and the name of -fwrapv."""
    meant = {"-fno-strict-overflow": "-fwrapv"}
    kept = [meant.get(f, f) for f in command if f != "-g" and not re.match(r"-W(?!p,|l,|a,)", f)]
    return list(dict.fromkeys(kept))


def name_of(source: Path) -> str:
    """Names a source as the compiler is told of it: from here, so that a compiler cache knows it in another folder."""
    return str(source.relative_to(ROOT) if source.is_relative_to(ROOT) else source)


def find_onednn() -> tuple[Path, Path] | str:
    """Gives the include folder and the library file of a oneDNN v3 to build against, or says why there is none."""
    if os.environ.get("CPU_ATTN_NO_ONEDNN") == "1":
        return "CPU_ATTN_NO_ONEDNN is set"
    if root := os.environ.get("ONEDNN_ROOT"):
        return pick_onednn(
            [Path(root, "include", "oneapi", "dnnl", "dnnl.h")],
            [
                *Path(root, "lib").glob("libdnnl.so*"),
                *Path(root, "lib").glob("*/libdnnl.so*"),
                *Path(root, "lib64").glob("libdnnl.so*"),
            ],
            f"ONEDNN_ROOT={root}",
        )
    files: list[Any] = []
    for name in ("onednn-devel-cpu-gomp", "onednn-cpu-gomp"):
        try:
            files += importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            return f"neither ONEDNN_ROOT nor the package {name} is there"
    paths = [Path(str(f.locate())).resolve() for f in files]
    return pick_onednn(
        [p for p in paths if p.parts[-3:] == ("oneapi", "dnnl", "dnnl.h")],
        [p for p in paths if "libdnnl.so" in p.name],
        "the onednn-devel-cpu-gomp package",
    )


def pick_onednn(headers: list[Path], libraries: list[Path], where: str) -> tuple[Path, Path] | str:
    headers = [h for h in headers if h.exists()]
    libraries = [lib for lib in libraries if lib.name == "libdnnl.so.3" and lib.exists()]
    if not headers or not libraries:
        return f"{where} has no oneapi/dnnl/dnnl.h or no libdnnl.so.3"
    return headers[0].parents[2], libraries[0]
