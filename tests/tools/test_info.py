# SPDX-License-Identifier: Apache-2.0
"""What `cpu-attn info` says, against what the kernel says of this CPU."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import cpu_attn
from cpu_attn import _adapters
from cpu_attn.cli import main, report
from cpu_attn.cli.info import show

from ..harness.kernels import KERNELS


def info(**env: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["info", "--json"], env=env)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.output)
    return data


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_features_are_those_in_cpuinfo() -> None:
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    said = {name.strip(): words.split() for name, words in lines}
    cpu, flags = info()["cpu"], set(said["flags"])
    assert cpu["brand"].split() == said["model name"]
    assert [[str(cpu["family"])], [str(cpu["model"])]] == [said["cpu family"], said["model"]]
    features = cpu["features"]
    x86 = {k: v for k, v in features.items() if k not in ("neon", "fhm", "bf16_arm", "i8mm", "sve")}
    assert len(x86) >= 12
    assert {k for k, v in x86.items() if v} == set(x86) & flags


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize(
    ("isa", "needs"),
    [("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}), ("avx2", {"avx2", "fma", "f16c"})],
)
def test_an_isa_runs_where_the_cpu_has_what_it_needs(isa: str, needs: set[str]) -> None:
    """Or all of its tests would be missing without a word."""
    flags = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")).split()
    (row,) = (i for i in cpu_attn.isas() if i.name == isa)
    if any(i["name"] == isa and i["emulated"] for i in info()["isas"]):
        needs = {"avx2", "fma", "f16c"}
    assert row.supported == (needs <= set(flags)), row.reason


def test_every_isa_has_a_state_and_a_reason() -> None:
    isas = info()["isas"]
    assert {"amx", "avx512", "avx2", "neon", "scalar"} <= {i["name"] for i in isas}
    for i in isas:
        assert i["supported"] or i["reason"], i
        assert i["compiled"] or not i["supported"], i
        assert i["supported"] or not i["permitted"], i
    scalar = next(i for i in isas if i["name"] == "scalar")
    assert scalar["compiled"] and scalar["supported"] and scalar["permitted"]


def test_auto_is_the_best_isa_or_the_one_asked_for() -> None:
    best = {dtype: isa for isa, dtype in reversed(KERNELS)}
    assert {k["dtype"]: k["isa"] for k in info(CPU_ATTN_ISA="")["auto"]} == best
    asked = info(CPU_ATTN_ISA="scalar")["auto"]
    assert all(k["isa"] == "scalar" and "CPU_ATTN_ISA=scalar" in k["why"] for k in asked)
    assert all(k["isa"] is None and "nonsense" in k["why"] for k in info(CPU_ATTN_ISA="nonsense")["auto"])


def test_what_multiplies_caches_of_integers() -> None:
    if not next(i for i in cpu_attn.isas() if i.name == "avx2").supported:
        pytest.skip("no AVX2")
    found = info(CPU_ATTN_ISA="avx2")
    has_vnni = found["cpu"]["features"]["avx_vnni"] or any(i["emulated"] for i in found["isas"])
    how = f"int8 to int4 caches: 16-bit integers ({'VPDPWSSD' if has_vnni else 'VPMADDWD'})"
    said = {k["dtype"]: how in k["method"] for k in found["auto"]}
    assert said == {"float32": False, "float16": True, "bfloat16": True}
    without = {k["dtype"] for k in found["auto"] if "without its variant avx2_vnni: " in k["why"]}
    assert without == (set() if has_vnni else {"float16", "bfloat16"})


@pytest.mark.parametrize("vdpbf16ps", ["0", "1"])
def test_a_variant_that_is_not_used_says_why(vdpbf16ps: str) -> None:
    """avx512_bf16, which replaces bfloat16's kernel of avx512. A process chooses once."""
    if not next(i for i in cpu_attn.isas() if i.name == "avx512").supported:
        pytest.skip("avx512 does not run here")
    command = [sys.executable, "-m", "cpu_attn", "info", "--json"]
    env = {**os.environ, "CPU_ATTN_ISA": "avx512", "CPU_ATTN_VDPBF16PS": vdpbf16ps}
    data = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    why = {k["dtype"]: k["why"].split("; ") for k in data["auto"]}
    assert why["float32"] == why["float16"] == ["CPU_ATTN_ISA=avx512"] == why["bfloat16"][:1]
    emulated = any(i["emulated"] for i in data["isas"])
    lacking = [f for f in ("avx512_bf16", "avx512vbmi") if not (emulated or data["cpu"]["features"][f])]
    reasons = [f"this CPU or its operating system lacks {f}" for f in lacking] or ["CPU_ATTN_VDPBF16PS is not 1"]
    used = vdpbf16ps == "1" and not lacking
    assert why["bfloat16"][1:] == ([] if used else [f"without its variant avx512_bf16: {reasons[0]}"])


def test_auto_is_the_native_engine_or_the_one_asked_for() -> None:
    assert info(CPU_ATTN_ENGINE="")["auto_engine"]["name"] == "native"
    assert info(CPU_ATTN_ENGINE="reference")["auto_engine"] == {"name": "reference", "why": "CPU_ATTN_ENGINE=reference"}
    wrong = info(CPU_ATTN_ENGINE="nonsense")["auto_engine"]
    assert wrong["name"] is None and "nonsense" in wrong["why"]


def test_onednn_names_its_library_and_what_a_matmul_got() -> None:
    one = info()["onednn"]
    if not one["available"]:
        assert one["reason"]
        return
    assert Path(one["library"]).exists()
    assert one["version"].startswith("3.")
    for dtype in ("bfloat16", "float32"):
        assert one[dtype], one
    assert one["amx_used"] == ("amx" in one["bfloat16"] + one["float32"])


def test_the_table_answers_the_question() -> None:
    result = CliRunner().invoke(main, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Is AMX used?" in result.output
    for isa in cpu_attn.isas():
        assert isa.name in result.output


def joined(text: str) -> str:
    """Without blanks and ends of lines, which folding adds and moves."""
    return "".join(text.split())


def test_the_first_lines_say_what_computes_and_why() -> None:
    folded = re.split(r"\n(?=\S)", CliRunner().invoke(main, ["info"]).output)
    lines = [" ".join(line.split()) for line in folded]
    for line, k in zip(lines, info()["auto"], strict=False):
        assert line.startswith(f"{k['dtype']} {k['isa']}: ")
        assert k["method"].split(";")[0] in line and k["why"] in line
    assert lines[4].startswith("Is AMX used?")


@pytest.mark.parametrize("height", [20, 200])
def test_what_runs_is_in_sight(height: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal whose first lines scroll away it comes last."""
    console = Console(markup=False, force_terminal=True, no_color=True, width=80, height=height)
    show(info(), console)
    lines = capsys.readouterr().out.splitlines()
    seen = lines[-height + 1 :] if height == 20 else lines[:12]
    for words in ("float32", "float16", "bfloat16", "engine", "Is AMX used?"):
        assert any(words in line.split("  ")[0] for line in seen), words
    assert any("isas that can run" in line for line in lines)


def test_json_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what the text says, and what a report of a fault needs."""
    monkeypatch.setenv("CPU_ATTN_ISA", "scalar")
    found = info()
    assert found["environment"]["CPU_ATTN_ISA"] == "scalar" and found["python"] == platform.python_version()
    assert set(found["amx_used"]) == {"native", "onednn"} and not found["amx_used"]["native"]
    assert (
        {a["name"] for a in found["adapters"]}
        == set(_adapters.NEEDS)
        >= {"flash_attn", "flashinfer", "linear_attention"}
    )


def test_nothing_is_cut_off() -> None:
    shown = CliRunner(charset="ascii").invoke(main, ["info"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.exception
    assert max(map(len, shown.output.splitlines())) <= 80
    data, found = info(), joined(shown.output)
    for row in (*data["isas"], *data["engines"]):
        assert joined(row["reason"]) in found
    for row in data["auto"]:
        assert all(joined(part) in found for part in (*row["method"].split("; "), row["why"]))
    for row in data["adapters"]:
        assert joined(row["state"] or row["reason"]) in found


def test_what_is_to_be_typed_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    data = info()
    for row in data["adapters"]:
        state = next(a.state for a in _adapters.ADAPTERS if a.name == row["name"])
        row |= {"usable": True, "state": state if isinstance(state, str) else state()}
    show(data, Console(markup=False, width=80))
    shown = capsys.readouterr().out.split()
    for row in data["adapters"]:
        assert set(row["state"].split()) <= set(shown)


FOREIGN = "[/x][red]:x:" + 30 * "a"


def foreign(x: Any) -> Any:
    """Every text of ``x`` somebody else's."""
    if isinstance(x, dict):
        return {k: foreign(v) for k, v in x.items()}
    return [foreign(v) for v in x] if isinstance(x, list) else FOREIGN if isinstance(x, str) else x


@pytest.mark.parametrize("onednn", [{"available": False, "reason": ""}, {}])
def test_foreign_text_is_shown_as_it_is(onednn: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither read as markup, nor cut off where a terminal is narrow."""
    data, console = info(), report.new_console()
    names = ("version", "runtime", "isa", "bfloat16", "float32", "library")
    data["onednn"] = onednn or {"available": True, "amx_used": False, **dict.fromkeys(names, "")}
    show(foreign(data), console)
    wide = Counter(capsys.readouterr().out)
    assert wide["["] == wide["]"] > 2 * 20 and wide["\u2026"] == 0
    console.width = 60
    show(foreign(data), console)
    narrow = Counter(capsys.readouterr().out)
    assert all(narrow[x] == wide[x] for x in "[]:\u2026")


def test_as_a_module() -> None:
    for arguments in (["--version"], ["info", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "cpu_attn", *arguments], capture_output=True, text=True, check=True
        )
        assert cpu_attn.__version__ in done.stdout


def test_adapters_are_those_of_the_extras() -> None:
    """What pip brings or leaves is from the oldest version on that the adapters work with."""
    extras: dict[str, dict[str, str]] = {}
    for line in metadata.requires("cpu-attn") or []:
        if found := re.fullmatch(r"""([\w-]+)([<>=,.\d]+); extra == ["'](\w+)["']""", line.replace(" ;", ";")):
            extras.setdefault(found[3], {})[found[1]] = found[2]
    for row in _adapters.ADAPTERS:
        oldest = {d: f">={_adapters.TESTED[d][0]}" for d in row.needs}
        assert extras.get(row.name) == (oldest if row.tested and not row.docs else None)
        assert not row.docs or (Path(__file__).resolve().parents[2] / row.docs).is_file()


OLD = "transformers is 5.22.2, older than those tested (>=5.23,<5.25)"


def test_what_is_said_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.13.4+cpu", "transformers": "5.22.2"}
    monkeypatch.setattr(_adapters, "version", here.get)
    torch, transformers, vllm, sglang, *functions = info()["adapters"]
    assert torch["usable"] and torch["version"] == "2.13.4+cpu" and "activate_flash_attention_impl" in torch["state"]
    assert not transformers["usable"] and transformers["reason"] == OLD
    assert not vllm["usable"] and vllm["version"] is None and "vllm is not installed" in vllm["reason"]
    assert {row["name"] for row in functions} == {"flash_attn", "flashinfer", "linear_attention"}
    for row in functions:
        assert row["usable"] and f"cpu_attn.{row['name']}.install()" in row["state"]
    assert not sglang["usable"] and "sglang is not installed; docs/sglang.md says how" in sglang["reason"]
    with pytest.raises(ImportError, match=f"cpu_attn.transformers: {re.escape(OLD)}"):
        _adapters.require("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _adapters.require("torch")
    shown = joined(CliRunner().invoke(main, ["info"]).output)
    assert joined("vllm is not installed; docs/vllm.md says how to install its build for CPUs, >=0.32,<0.34") in shown
    del here["torch"]
    for name in ("torch", "flash_attn", "flashinfer", "linear_attention"):
        assert _adapters.missing(name) == "torch is not installed; pip install 'cpu-attn[torch]' brings it"


VERSIONS = {"2.13": "tested", "2.12.9": "refused", "2.13.9+cpu": "tested", "2.99.0a0+git1": "new", "unknown": "new"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_version_warns_once_and_works(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_adapters, "version", {"torch": version, "transformers": "5.24.0"}.get)
    monkeypatch.setattr(_adapters, "BROKEN", {"torch": {"2.99.1": "it adds"}, "transformers": {"5.24.1": "it draws"}})
    adapters = {a["name"]: a for a in info()["adapters"]}
    _adapters._warn.cache_clear()
    if VERSIONS[version] == "refused":
        assert not adapters["torch"]["usable"] and not adapters["transformers"]["usable"]
        with pytest.raises(ImportError, match=f"^cpu_attn.torch: torch is {version}, older than those tested"):
            _adapters.require("torch")
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for name in ("torch", "transformers", "torch"):
            _adapters.require(name)
            assert adapters[name]["usable"] and adapters[name]["state"].startswith("on request")
    said = f"torch is {version}, newer than those that cpu-attn was tested with ({_adapters.tested('torch')})"
    new = VERSIONS[version] == "new"
    assert [str(w.message) for w in found] == [said] * new
    assert adapters["torch"]["state"].endswith(said) == adapters["transformers"]["state"].endswith(said) == new


def test_a_version_that_is_known_to_be_broken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.99.10"}
    monkeypatch.setattr(_adapters, "version", here.get)
    monkeypatch.setattr(_adapters, "BROKEN", {"torch": {"2.99.1": "it adds where it should multiply"}})
    assert not _adapters.missing("torch")
    here["torch"] = "2.99.1+cpu"
    why = "torch is 2.99.1+cpu, with which cpu_attn.torch does not work: it adds where it should multiply"
    assert _adapters.missing("torch") == why and info()["adapters"][0]["reason"] == why


def test_whether_vllm_loads_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.13.0", "vllm": "0.33.0"}
    monkeypatch.setattr(_adapters, "version", here.get)
    (point,) = metadata.entry_points(group="vllm.general_plugins", name="cpu_attn")
    assert f'{point.name} = "{point.value}"' in (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert callable(point.load())
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])

    def state(**env: str) -> str:
        return str(info(**env)["adapters"][2]["state"])

    assert state().startswith("on")
    assert state(CPU_ATTN_VLLM="0").startswith("off: CPU_ATTN_VLLM=0")
    assert state(VLLM_PLUGINS="other").startswith("off: VLLM_PLUGINS=other")
    assert state(VLLM_PLUGINS="other,cpu_attn").startswith("on")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert "no vllm.general_plugins entry point" in state()


def test_adapters_are_not_imported() -> None:
    code = "import sys; from cpu_attn.cli.info import collect; collect(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm", "sglang"} & set(done.stdout.split())
