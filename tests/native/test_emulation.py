# SPDX-License-Identifier: Apache-2.0
"""The instructions that `make emulate` has in software: each against a definition in plain C (emulation/check.c), and
whole calls against the machine's own instructions, where it has them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..cases.levels import cases

SOURCE = Path(__file__).resolve().parents[1] / "emulation" / "check.c"
FLAGS = ("-std=gnu11", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{SOURCE.parents[2] / 'native'}")
EMULATED = ("-mavx2", "-mfma", "-mf16c", "-Wno-psabi", "-DEMULATED")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
BF16 = ("-mavx512bf16", "-mavx512vbmi")
# The Python of a build without CPU_ATTN_EMULATE, for make emulate.
NATIVE = os.environ.get("CPU_ATTN_NATIVE_PYTHON", "")

pytestmark = [
    pytest.mark.isa,
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not SOURCE.exists(), reason="the instructions are those of x86-64"
    ),
]


def cpu_has(*features: str) -> bool:
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        return False
    flags = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")).split()
    return set(features) <= set(flags)


AVX512_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")
BF16_FEATURES = ("avx512_bf16", "avx512vbmi")


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    if "Free Software Foundation" not in subprocess.run([*command, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("the emulation is written for gcc")
    return command


def compiled(compiler: list[str], folder: Path, *flags: str) -> Path:
    program = folder / "check"
    subprocess.run([*compiler, *FLAGS, *flags, SOURCE, "-o", program, "-lm"], check=True)
    return program


def check(program: Path, broken: str = "") -> tuple[int, dict[str, str]]:
    """Exit status, and what check.c says of each name."""
    done = subprocess.run([program, broken], capture_output=True, text=True)
    return done.returncode, dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.skipif(not cpu_has("avx2", "fma", "f16c"), reason="the emulation needs AVX2")
def test_each_emulated_instruction(compiler: list[str], tmp_path: Path) -> None:
    program = compiled(compiler, tmp_path, *EMULATED)
    status, said = check(program)
    assert len(said) > 100 and set(said.values()) == {"holds"}, said
    assert status == 0
    status, said = check(program, broken="max_ps")
    assert status == 1 and said["max_ps"].startswith("lane 0 of trial 999")


@pytest.mark.skipif(not cpu_has(*AVX512_FEATURES), reason="this CPU lacks AVX-512")
def test_the_definitions_are_those_of_this_machine(compiler: list[str], tmp_path: Path) -> None:
    """What the emulations are held against is what silicon does."""
    status, said = check(compiled(compiler, tmp_path, *AVX512, *(BF16 if cpu_has(*BF16_FEATURES) else ())))
    assert len(said) > 95 and set(said.values()) == {"holds"}, said
    assert status == 0


def bits(python: str, dtype: str, vdpbf16ps: str) -> dict[str, str]:
    env = {**os.environ, "CPU_ATTN_VDPBF16PS": vdpbf16ps}
    command = [python, "-m", "cpu_attn.tests.programs.call_bits", "avx512", dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def emulated(python: str) -> bool:
    command = [python, "-m", "cpu_attn", "info", "--json"]
    info = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return any(i["emulated"] for i in info["isas"] if i["name"] == "avx512")


@pytest.mark.skipif(not NATIVE, reason="compares two builds: make emulate says where the other one is")
@pytest.mark.skipif(not cpu_has(*AVX512_FEATURES, "avx512_vnni"), reason="this CPU lacks AVX-512 or its VNNI")
@pytest.mark.parametrize(
    ("dtype", "vdpbf16ps"), [("float32", "0"), ("float16", "0"), ("bfloat16", "0"), ("bfloat16", "1")]
)
def test_whole_calls_have_the_bits_of_this_machine(dtype: str, vdpbf16ps: str) -> None:
    """But for softcap by VDPBF16PS, which goes through VRCP14PS: cores differ in its bits."""
    assert emulated(sys.executable) and not emulated(NATIVE)
    if vdpbf16ps == "1" and not cpu_has(*BF16_FEATURES):
        pytest.skip("this CPU lacks VDPBF16PS")
    by_name = {case.name: case for case in cases("default", dtype, 0)}
    ours, native = bits(sys.executable, dtype, vdpbf16ps), bits(NATIVE, dtype, vdpbf16ps)
    assert ours.keys() == native.keys() == by_name.keys()
    differ = [name for name in ours if ours[name] != native[name] and not (vdpbf16ps == "1" and by_name[name].softcap)]
    assert not differ, f"{len(differ)} of {len(ours)}: {differ}"
