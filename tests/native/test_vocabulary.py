# SPDX-License-Identifier: Apache-2.0
"""The words in which the kernels are written (native/kernel/simd/vocabulary.md), as each isa file defines them, against
plain C (vocabulary/)."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from .test_cross import COMPILER, EMULATOR, ROOT

ISAS, SOURCE = ROOT / "native/isa", Path(__file__).with_name("vocabulary") / "vocabulary.c"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unused-function"]  # kernels would use them
MISSES = 77  # what the program ends with where this machine lacks something
# These stand in place of the kernels, which an isa file includes after its vocabulary.
KERNELS = {
    "kernel/all_dtypes.h": "",
    "kernel/attention/parameters.h": "",
    "kernel/dtype.inc": """#include "kernel/kernel.h"
#if DIGITS == 11
static const ca_kernel kernel_f16;
#else
static const ca_kernel kernel_bf16;
#endif""",
    "kernel/amx/attention.h": "static const ca_kernel kernel_amx;",
    "kernel/amx/floats.h": "static const ca_kernel kernel_amx_float;\nstatic const ca_isa_row ca_isa_avx512;",
    "linear/kernel/all.h": "static const struct ca_linear_kernel { int none; } linear_kernel;",
}

pytestmark = [pytest.mark.isa, pytest.mark.skipif(not ISAS.is_dir(), reason="needs a source tree")]


class Build(NamedTuple):
    """Holds an isa file, and which flags it is compiled with. kind is "" for its own, "emulated" for those of
    ``make emulate``, and "qemu" where a cross compiler makes a program that qemu runs."""

    isa: str
    kind: str

    @property
    def command(self) -> list[str]:
        """Gives the compiler and its flags, or skips the test."""
        said = dict(re.findall(r"^ \* (\w+):[ \t]*(.*)$", (ISAS / f"{self.isa}.c").read_text(), re.MULTILINE))
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
        if self.kind == "qemu":
            compiler = [COMPILER, "-static"]
        elif said["arch"] not in ("any", platform.machine()):
            pytest.skip(f"its words are for {said['arch']}")
        command = [*compiler, *FLAGS, *said["emulated" if self.kind == "emulated" else "flags"].split()]
        try:
            subprocess.run([*command, "-E", "-x", "c", os.devnull], check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip(f"no compiler that takes {' '.join(command)}")
        if self.kind == "emulated" and "__clang__" in preprocessed([*compiler, "-dM", "-E", "-x", "c", os.devnull]):
            pytest.skip("the emulation is written for gcc")
        return command


BUILDS = [Build(file.stem, "") for file in sorted(ISAS.glob("*.c"))]
# The emulation of avx512_bf16.c has no float16, which that file's kernel does not use; amx has all of its other words.
BUILDS += [Build(isa, "emulated") for isa in ("avx512", "amx", "avx2_vnni")]
BUILDS += [Build(isa, "qemu") for isa in ("neon", "neon_bf16", "neon_fhm", "scalar")]


def preprocessed(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the headers that stand in for the kernels, and those that the build makes."""
    pytest.importorskip("setuptools", reason="build_ffi.py needs setuptools")
    made = tmp_path_factory.mktemp("vocabulary")
    for name, text in KERNELS.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text + "\n")
    sys.path.insert(0, str(ROOT))
    importlib.import_module("build_ffi").write_arguments(made)
    sys.path.remove(str(ROOT))
    return made


def sources(folder: Path, isa_file: Path) -> list[str]:
    return [f'-DISA_FILE="{isa_file}"', f"-I{folder}", f"-I{ROOT / 'native'}"]


def words(folder: Path, build: Build, isa_file: Path | None = None) -> tuple[int, dict[str, str]]:
    """Gives the exit status of the program, and what it says of each word; skips the test where it cannot run here."""
    isa_file = isa_file or ISAS / f"{build.isa}.c"
    program = folder / f"{build.isa}-{build.kind or 'native'}"
    command = build.command
    plain = [flag for flag in command if not flag.startswith("-m")]  # what says which instructions there are uses none
    objects = [folder / f"{program.name}-{name}.o" for name in ("cpu", "system")]
    for made in objects:
        name = made.stem.rpartition("-")[2]
        include = [f"-I{folder}", f"-I{ROOT / 'native'}"]
        subprocess.run([*plain, *include, "-c", ROOT / f"native/cpu/{name}.c", "-o", made], check=True)
    subprocess.run([*command, *sources(folder, isa_file), SOURCE, *objects, "-o", program, "-lm"], check=True)
    if build.kind == "qemu" and not EMULATOR:
        pytest.skip("needs qemu-user")
    run = [str(EMULATOR), str(program)] if build.kind == "qemu" else [str(program)]
    # avx512_bf16.c is chosen only where it is known to be fast; its words hold everywhere.
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "CPU_ATTN_VDPBF16PS": "1"})
    if done.returncode == MISSES:
        pytest.skip(done.stdout.strip())
    return done.returncode, {word: said for word, _, said in (x.partition(": ") for x in done.stdout.splitlines())}


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: "-".join(filter(None, build)))
def test_words(folder: Path, build: Build) -> None:
    status, said = words(folder, build)
    assert set(said.values()) == {"holds"}, {word: how for word, how in said.items() if how != "holds"}
    assert status == 0 and len(said) > 35


def listed() -> set[str]:
    """Gives the functions that vocabulary.md lists."""
    spans = " ".join(re.findall("`([^`]+)`", (ROOT / "native/kernel/simd/vocabulary.md").read_text()))
    found = set(re.findall(r"\b(?:v|unpack)_\w+", spans)) - {"v_table"}
    return {name for word in found for name in (of_dtypes(word) if word.endswith("_T") else [word])}


def of_dtypes(word: str) -> list[str]:
    return [word[:-1] + dtype for dtype in ("f32", "f16", "bf16")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the files that have every word are for x86-64")
def test_every_word_is_tested(folder: Path) -> None:
    """Those that vocabulary.md lists, in every file that defines them."""
    tested_somewhere = set()
    crosses = shutil.which(COMPILER) is not None
    builds = [Build(isa, "") for isa in ("scalar", "avx2", "avx512", "avx512_bf16")]
    for build in builds + [Build(isa, "qemu") for isa in ("neon_bf16", "neon_fhm")] * crosses:
        text = preprocessed([*build.command, *sources(folder, ISAS / f"{build.isa}.c"), "-E", "-P", str(SOURCE)])
        defined = set(re.findall(r"\bunused\)\)\s+\w[\w *]*?\b((?:v|unpack)_\w+)\(", text))
        tested = set(re.findall(r"\bvoid test_((?:v|unpack)_\w+)\(void\) \{", text))
        assert listed() & defined == tested
        assert tested and not {word for word in defined if word.startswith("v_")} - listed()
        tested_somewhere |= tested
    assert tested_somewhere == listed() if crosses else tested_somewhere < listed()


BROKEN = [
    ("v_max", "return a > b ? a : b;", "return a < b ? b : a;"),  # takes NaN of a
    ("v_keep", "first <= 0 && end > 0 ? x : -INFINITY", "first <= 0 && end > 0 ? x : x - INFINITY"),
    ("v_loadn_bf16", "return n ? ca_from_bf16(*p) : 0;", "float x = ca_from_bf16(*p);\n    return n ? x : 0;"),
    ("v_storen_f16", "        *p = ca_to_f16(x);", "        *p = ca_to_f16(x - x / 4096);"),
    ("v_lines_f32", "(const char *)src + i * ld, 4);", "(const char *)src + i * ld + i, 4);"),
]


@pytest.mark.parametrize(("word", "right", "wrong"), BROKEN, ids=[word for word, *_ in BROKEN])
def test_a_broken_word_is_found(folder: Path, word: str, right: str, wrong: str) -> None:
    text = (ISAS / "scalar.c").read_text()
    assert text.count(right) == 1
    file = folder / f"broken_{word}.c"
    file.write_text(text.replace(right, wrong))
    status, said = words(folder, Build("scalar", ""), file)
    assert status != 0 and said[word] != "holds"
