# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of native/ with build_ffi.py's own flags, read with nm and objdump.

A weak symbol, or an instruction wider than the machine offers, would end the process on older CPUs: the linker may
keep the copy of a function that was compiled for the widest isa."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.isa

# How objdump shows what x86-64 did not have from birth, by the macro of the compiler that allows it. VEX names begin
# with v; EVEX shows by registers 16..31, masks and zmm. Left out: tzcnt, which is bsf on CPUs that lack it.
WIDER = {
    "__SSE3__": r"\t(addsubp[sd]|h(add|sub)p[sd]|lddqu|movddup|movs[hl]dup)\b",
    "__SSSE3__": r"\t(pshufb|palignr|pabs[bwd]|psign[bwd]|ph(add|sub)\w+|pmaddubsw|pmulhrsw)\b",
    "__SSE4_1__": r"\t(blendv?p[sd]|dpp[sd]|(extract|insert)ps|mpsadbw|packusdw|pblend\w+|pcmpeqq|p(extr|insr)[bdq]|"
    r"phminposuw|p(max|min)(s[bd]|u[dw])|pmov[sz]x\w+|pmul(dq|ld)|ptest|round[ps][sd]|movntdqa)\b",
    "__SSE4_2__": r"\t(pcmpgtq|pcmp[ei]str[im]|crc32[bwlq]?|popcnt[wlq]?)\b",
    "__AVX__": r"\tv(?!er[rw]\b)|%ymm",
    "__AVX2__": r"\tv(p(?!erm[i2]).*%ymm|(broadcast|insert|extract)i)",
    "__FMA__": r"\tvfn?m(add|sub)",
    "__F16C__": r"\tvcvt(ph2ps|ps2ph)\b",
    "__BMI__": r"\t(andn|bextr|bls(i|r|msk))[lq]?\b",
    "__BMI2__": r"\t(bzhi|mulx|pdep|pext|rorx|s[ah][rl]x)[lq]?\b",
    "__LZCNT__": r"\tlzcnt",
    "__MOVBE__": r"\tmovbe",
    "__AVX512F__": r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]|\{1to",
    "__AVX512BW__": r"\t(vmovdqu(8|16)|kmov[dq]|vp(abs|add|broad|max|min|mov[sz]x|mul|s[lr][al]|sub)\w*[bw]\b.*%zmm)",
    "__AVX512DQ__": r"\t(v(extract|insert|broadcast)[fi](32x[28]|64x2)|kmovb|vpmullq|v(andn?|x?or)p[sd].*%zmm)",
    "__AVX512VL__": r"\tv(?!mov[dq]\b|\w+s[sd]\b|cvt\w*s[sdi]2)(?!.*%zmm).*%[xy]mm(1[6-9]|2\d|3[01]|.*%k)",
    "__AVX512BF16__": r"\tv(cvtne2?ps2bf16|dpbf16ps)",
    "__AVXVNNI__": r"\t\{vex\} vpdp",
    "__AVX512VNNI__": r"\tvpdp(bu|ws)",
    "__AVX512VBMI__": r"\tv(perm([it]2)?b\b|pmultishift)",
    "__AVX512FP16__": r"\tv(add|sub|mul|div|max|min|sqrt|fn?m\w+|reduce|rndscale|scalef|cmp)[ps]h\b",
    "__AMX_TILE__": r"%tmm|\t((ld|st)tilecfg|tilerelease)",
    "__AMX_BF16__": r"\ttdpbf16ps",
    "__AMX_INT8__": r"\ttdpb[su][su]d",
}
# Where the objects that `make` left are not current, this takes minutes.
slow = pytest.mark.slow
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the table of instructions is for x86-64")


@pytest.fixture(scope="session")
def build_ffi() -> Any:
    pytest.importorskip("setuptools", reason="build_ffi.py needs setuptools")
    spec = importlib.util.spec_from_file_location("build_ffi", ROOT / "build_ffi.py")
    if spec is None or spec.loader is None or not (ROOT / "build_ffi.py").exists():
        pytest.skip("these tests belong to a source tree")
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_ffi"] = module
    spec.loader.exec_module(module)
    return module


class Built(NamedTuple):
    temp: Path  # has native/**/*.o
    modules: list[Path]


@pytest.fixture(scope="session")
def built(build_ffi: Any, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What the build of this environment has, or would have: objects that `make` left and that are current are taken as
    they are, which spares five minutes."""
    from setuptools import Distribution, Extension

    folder = tmp_path_factory.mktemp("objects")
    names = ("_native", "_onednn")
    extensions = [Extension(f"cpu_attn.{name}", ["native/cpu/choose.c"], py_limited_api=True) for name in names]
    distribution = Distribution({"name": "cpu-attn", "ext_modules": extensions})
    if extra := os.environ.get("DIST_EXTRA_CONFIG"):  # where `make emulate` builds
        config = ConfigParser()
        config.read(extra)
        distribution.get_option_dict("build")["build_base"] = (extra, config["build"]["build_base"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.delenv("CPU_ATTN_SANITIZE", raising=False)
        command = build_ffi.BuildExt(distribution)
        command.build_lib = str(folder)
        command.ensure_finalized()
        command.run()
    return Built(ROOT / command.build_temp, list((folder / "cpu_attn").glob("*.so")))


@pytest.fixture(scope="session")
def objects(built: Built) -> dict[str, Path]:
    """Object files by the path of their source: native/run/attend.c, ..."""
    named = {str(o.relative_to(built.temp).with_suffix(".c")): o for o in (built.temp / "native").rglob("*.o")}
    found = {source: path for source, path in named.items() if (ROOT / source).exists()}
    assert "native/isa/scalar.c" in found
    return found


def tool(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def code(path: Path, *options: str) -> list[str]:
    """Instructions, as objdump writes them: a tab, the name, the operands."""
    listing = tool("objdump", "-d", "--no-show-raw-insn", *options, path)
    return ["\t" + line.split("\t", 1)[1] for line in listing.splitlines() if "\t" in line]


def compiler() -> list[str]:
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()


@functools.cache
def allowed(*flags: str) -> frozenset[str]:
    """The macros of WIDER that the compiler defines under these flags."""
    text = re.sub("__AMX(?!_)", "__AMX_", tool(*compiler(), *flags, "-dM", "-E", "-xc", "/dev/null"))  # clang < 15
    return frozenset(re.findall(r"^#define (\w+)", text, re.MULTILINE)) & WIDER.keys()


def beyond(instructions: list[str], macros: Iterable[str]) -> list[str]:
    """The instructions that these macros do not allow."""
    forbidden = [re.compile(text) for macro, text in WIDER.items() if macro not in macros]
    return [line for line in instructions if any(f.search(line) for f in forbidden)]


@pytest.fixture(scope="session")
def flagged(build_ffi: Any) -> list[Any]:
    """The files of native/isa and native/limits/probe that are for this architecture."""
    files = [file for folder in build_ffi.FLAGGED for file in build_ffi.flagged_files(folder)]
    return [file for file in files if file.arch in ("any", platform.machine())]


@slow
def test_every_source_is_looked_at(build_ffi: Any, objects: dict[str, Path], flagged: list[Any]) -> None:
    apart = (*build_ffi.FLAGGED, build_ffi.ONEDNN)
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "native").rglob("*.c") if p.parent not in apart}
    assert sources | {file.source for file in flagged} <= objects.keys()


def test_what_the_compiler_lacks_is_said(build_ffi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of isas and of their variants; native/cpu/choose.c takes what is written of them."""
    from setuptools import Distribution

    command = build_ffi.BuildExt(Distribution())
    command.build_temp = str(tmp_path)
    monkeypatch.setattr(command, "accepts", lambda *flags: False)
    built = command.choose(build_ffi.NATIVE / "isa")
    assert [file.name for file in built] == ["scalar"]
    text = (tmp_path / "isa_list.h").read_text()
    why = "the compiler that built this lacks one of" if platform.machine() == "x86_64" else "its kernels are for"
    assert f'ABSENT(avx512, "vector", "{why}' in text
    assert f'ABSENT_VARIANT(avx512_bf16, avx512, CA_BF16, "{why}' in text
    assert all(f'ABSENT_VARIANT(avx2_vnni, avx2, {dtype}, "{why}' in text for dtype in ("CA_F16", "CA_BF16"))
    build_ffi.write_arguments(tmp_path)
    native = ROOT / "native"
    flags = ("-fsyntax-only", "-Werror", "-Wall", "-Wextra", f"-I{native}", f"-I{tmp_path}")
    tool(*compiler(), *flags, native / "cpu" / "choose.c")


@slow
def test_no_weak_symbols(objects: dict[str, Path]) -> None:
    for source, path in objects.items():
        names = [line for line in tool("nm", path).splitlines() if re.search(r" [VvWwu] ", line)]
        assert not names, f"{source}: weak symbols {names}"


@slow
@x86_64
def test_no_wider_instruction(objects: dict[str, Path], flagged: list[Any]) -> None:
    flags = {file.source: (*file.flags, *file.guarded) for file in flagged}
    for source, path in objects.items():
        instructions = code(path)
        assert len(instructions) > 5, f"{source}: objdump shows no code"
        wider = beyond(instructions, allowed(*flags.get(source, ())))
        assert not wider, f"{source}: {len(wider)} instructions beyond its flags: {wider[:5]}"


@slow
@x86_64
def test_table_sees_every_flag(objects: dict[str, Path], flagged: list[Any]) -> None:
    for file in flagged:
        instructions = code(objects[file.source]) if file.source in objects else []
        for flag in (flag for flag in file.flags if instructions and flag.startswith("-m")):
            macro = f"__{flag[2:].upper().replace('-', '_')}__"
            assert macro in WIDER, f"{file.source}: the table does not know {flag}"
            found = beyond(instructions, WIDER.keys() - {macro})
            assert found, f"{file.source} uses nothing of {flag}, or the table does not know it"


@slow
@x86_64
def test_asking_needs_no_isa(objects: dict[str, Path], flagged: list[Any]) -> None:
    """`missing` runs on every machine, whatever its file was compiled for."""
    for file in flagged:
        if path := objects.get(file.source):
            instructions = code(path, "--disassemble=missing")
            wider = beyond(instructions, allowed())
            assert instructions and not wider, f"{file.source}: missing(): {wider}"


@slow
@x86_64
def test_tiles_are_released(objects: dict[str, Path]) -> None:
    """By each function that uses tiles, or by all that call it. Emulation cannot tell: others in the process use tiles
    too, and a context switch saves what is in use."""
    for source, path in ((s, p) for s, p in objects.items() if s.endswith("/amx.c")):
        _, *parts = re.split(r"^[0-9a-f]+ <(.+)>:$", tool("objdump", "-d", path), flags=re.MULTILINE)
        bodies = dict(zip(parts[::2], parts[1::2], strict=True))
        calls = {name: set(re.findall(r"\t(?:call|jmp) .*<([^+>]+)>", text)) - {name} for name, text in bodies.items()}
        keeping = {name for name, text in bodies.items() if "tilerelease" not in text}
        left = {name for name in keeping if re.search(WIDER["__AMX_TILE__"], bodies[name])}
        while more := {name for name in keeping - left if calls[name] & left}:
            left |= more
        left = left.difference(*calls.values())
        assert not left, f"{source}: tiles are left in use by {left}"


@slow
def test_exported_symbols(built: Built) -> None:
    modules = built.modules
    assert modules
    for path in modules:
        names = {line.split()[-1] for line in tool("nm", "-D", "--defined-only", path).splitlines()}
        names -= {"__bss_start", "_edata", "_end", "_init", "_fini"}  # the linker's own
        assert names == {"PyInit_" + path.name.split(".")[0]}
