# SPDX-License-Identifier: Apache-2.0
"""cpu-attn verify: what it prints and exits with when kernels are right, and when they are broken."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import cpu_attn
from cpu_attn._native import lib
from cpu_attn.cli.verify import verify
from cpu_attn.reference import BUDGET
from cpu_attn.tests.cases.formats import DTYPES
from cpu_attn.tests.cases.levels import LEVELS, cases
from cpu_attn.tests.cases.problem import Problem
from cpu_attn.tests.cases.run import run as right_run
from cpu_attn.tests.harness.kernels import KERNELS

SCALAR = ("--engine", "native", "--isa", "scalar", "--dtype", "bfloat16")
verify_module = sys.modules[verify.callback.__module__]


def call(*args: str) -> Result:
    return CliRunner().invoke(verify, args)


def report(*args: str) -> dict[str, Any]:
    return json.loads(call("--json", *args).stdout)


def rerun_lines(result: Result) -> list[str]:
    return [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("cpu-attn verify")]


def break_kernel(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    """broken(problem, output, lse, **options) changes a result in place. It sees options as verify gave them."""

    def run(problem: Problem, isa: str, engine: str, **options: Any) -> Any:
        output, lse = right_run(problem, isa, engine, **options)
        broken(problem, output, lse, **options)
        return output, lse

    monkeypatch.setattr(verify_module, "run", run)


def test_quick_passes() -> None:
    result = call("--quick", *SCALAR)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("All ")
    assert "scalar" in result.stdout
    assert result.stderr == f"making {len(cases('quick', 'bfloat16'))} checks against the float64 oracle\n"
    assert not rerun_lines(result)


def test_json() -> None:
    found = report("--quick", *SCALAR, "--seed", "3")
    assert found["ok"] and not found["stopped"]
    assert (found["level"], found["seed"], found["failures"]) == ("quick", 3, [])
    (combo,) = found["combinations"]
    names = {case.name for case in cases("quick", "bfloat16", 3)}
    assert (combo["engine"], combo["isa"], combo["dtype"]) == ("native", "scalar", "bfloat16")
    assert combo["cases"] == len(names)
    assert 0 < combo["worst_error"] <= combo["budget"] == BUDGET["bfloat16"]
    assert combo["worst_case"] in names


def test_callers_that_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are made in that mode, which a line that runs a check again asks for, too; and it ends with them."""
    modes, before = set(), lib.ca_float_mode()

    def note(problem: Problem, output: Any, lse: Any, **options: Any) -> None:
        modes.add(lib.ca_float_mode() & lib.ca_computing_float_mode())
        output[:] = 0

    break_kernel(monkeypatch, note)
    result = call("--case", "mixed-plain", *SCALAR, "--flush-subnormals")
    assert modes == {lib.ca_computing_float_mode()} and lib.ca_float_mode() == before
    assert all(line.endswith(" --flush-subnormals") for line in rerun_lines(result)) and rerun_lines(result)


def test_requests_that_select_tokens_at_random() -> None:
    """Only --full has such cases; by itself a request has another number, and selects the same."""
    assert report("--case", "random-3", "--case", "random-10", *SCALAR)["ok"]


def test_everything_here_is_run_and_the_rest_has_a_reason() -> None:
    found = report("--case", "mixed-plain")
    ran = {(c["engine"], c["isa"], c["dtype"]) for c in found["combinations"]}
    absent = {(c["engine"], c["isa"], c["dtype"]): c["reason"] for c in found["unavailable"]}
    for isa in cpu_attn.isas():
        for dtype in DTYPES:
            assert (("native", isa.name, dtype) in ran) == ((isa.name, dtype) in KERNELS)
    assert {("reference", "auto", dtype) for dtype in DTYPES} <= ran
    onednn = next(engine for engine in cpu_attn.engines() if engine.name == "onednn")
    for name in ("onednn", "onednn-python"):
        assert ((name, "auto", "float32") in ran) == onednn.available
    assert not ran & absent.keys()
    assert all(absent.values())


def test_the_slow_engine_runs_most_cases_with_full_only() -> None:
    native, slow = (verify_module.Combo(engine, "auto", "float32") for engine in ("native", verify_module.SLOW))

    def names(combo: Any, level: str, *asked: str) -> set[str]:
        jobs = verify_module._jobs([native, slow], level, asked, 0)
        return {job.case.name for job in jobs if combo in job.combos}

    quick, default, full = (cases(level) for level in LEVELS)
    assert names(slow, "quick") == names(slow, "default") == {case.name for case in quick if case.composable}
    assert names(native, "default") == {case.name for case in default}
    assert names(native, "full") == {case.name for case in full}
    assert names(slow, "full") == {case.name for case in full if case.composable}
    assert names(slow, "default", "chunk-alibi", "full-70000") == {"chunk-alibi", "full-70000"}


def test_the_slow_engine_is_left_out_of_what_it_has_no_argument_for() -> None:
    """Unless it is asked for by name. What it takes counts every other field of a case."""
    odd = ("bias-one", "chunk-selected", "tokens-half", "masks-tree-everything", "rotated-int4-everything")
    odd = tuple(case.name for case in cases("default") if case.name in odd)
    assert len(odd) > 3 and not any(case.composable for case in cases("default") if case.name in odd)
    assert all(
        case.composable for case in cases("default") if case.name.startswith(("mixed-", "int4-head", "NHD-head"))
    )
    native, slow = (verify_module.Combo(engine, "auto", "float32") for engine in ("native", verify_module.SLOW))
    jobs = verify_module._jobs([native, slow], "default", (*odd, "mixed-plain"), 0)
    assert {job.case.name for job in jobs if slow in job.combos} == {"mixed-plain"}
    assert all(job.combos == [native] for job in verify_module._jobs([native, slow], "default", odd, 0))
    with pytest.raises(click.UsageError, match="onednn-python has causal and sliding_window, no other masks"):
        verify_module._jobs([native, slow], "default", odd, 0, ["native", verify_module.SLOW])


def test_processes_find_what_one_finds() -> None:
    assert report("--quick", *SCALAR, "--jobs", "2") == report("--quick", *SCALAR, "--jobs", "1")


def test_a_process_that_dies_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_verify_job", os._exit)
    with pytest.raises(click.ClickException, match="a check ended its process; --jobs 1 shows"):
        list(verify_module._outcomes([3, 3], 2))


def test_ctrl_c_leaves_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def interrupted(problem: Problem, *args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > 3:
            raise KeyboardInterrupt
        return right_run(problem, *args, **options)

    args = ("--case", "mixed-plain", "--case", "chunk-alibi", "--engine", "reference", "--dtype", "float32")
    monkeypatch.setattr(verify_module, "_differences", lambda *_: [])  # one run a check
    monkeypatch.setattr(verify_module, "run", interrupted)
    seen = 2
    result = call(*args)
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-2:] == [
        "The 1 check passed on 1 combination of engine, isa and dtype.",
        "INTERRUPTED: 1 of 2 checks was not made.",
    ]
    seen = 2
    found = report(*args)
    assert not found["ok"] and found["stopped"] and found["combinations"][0]["cases"] == 1
    seen = 3
    result = call(*args)
    assert (result.exit_code, result.stdout) == (130, "INTERRUPTED: 2 of 2 checks were not made.\n")


def test_a_failure_before_ctrl_c_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([ValueError, KeyboardInterrupt])

    def run(*_: Any, **__: Any) -> Any:
        raise next(errors)

    monkeypatch.setattr(verify_module, "run", run)
    result = call("--case", "mixed-plain", "--case", "chunk-alibi", "--engine", "reference", "--dtype", "float32")
    assert result.exit_code == 1 and "FAILED: 1 of 1 check;" in result.stdout and "INTERRUPTED: 1 of 2" in result.stdout


def test_a_broken_kernel_is_found_and_its_line_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, output: Any, lse: Any, **_: Any) -> None:
        if problem.case.head_size == 20:
            output[-1, -1] = 0

    break_kernel(monkeypatch, broken)
    result = call("--quick", *SCALAR, "--seed", "2")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("FAILED: ")
    (line,) = {line for line in rerun_lines(result) if "chunk-head-20" in line}
    assert line == "cpu-attn verify --case chunk-head-20 --engine native --isa scalar --dtype bfloat16 --seed 2"
    again = shlex.split(line)[2:]
    assert call(*again).exit_code == 1
    found = report(*again)
    assert not found["ok"]
    assert {f["case"] for f in found["failures"]} == {"chunk-head-20"}
    assert found["failures"][0]["rerun"] == line
    assert "relative RMS" in found["failures"][0]["message"]
    monkeypatch.undo()
    assert call(*again).exit_code == 0


def test_nan_and_exceptions_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(problem: Problem, output: Any, lse: Any, **_: Any) -> None:
        output[0, 0, 0] = np.nan

    break_kernel(monkeypatch, poison)
    found = report("--case", "mixed-plain", *SCALAR)
    assert found["combinations"][0]["worst_error"] is None
    assert not found["combinations"][0]["ok"]

    def die(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    break_kernel(monkeypatch, die)
    result = call("--case", "mixed-plain", *SCALAR)
    assert result.exit_code == 1
    assert "MemoryError: no room" in result.stdout
    assert rerun_lines(result)


@pytest.mark.parametrize(
    ("what", "message"),
    [("threads", "3 threads give"), ("split", "enable_kv_split=False"), ("batch", "request 1 alone")],
)
def test_a_change_of_one_bit_is_found(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, output: Any, lse: Any, **options: Any) -> None:
        here = {
            "threads": options.get("num_threads") == 3 and options.get("enable_kv_split", True),
            "split": not options.get("enable_kv_split", True),
            "batch": len(problem.seq_lens) == 1,
        }
        if here[what] and lse.size:
            lse[-1, -1] = np.nextafter(lse[-1, -1], np.float32(np.inf))

    break_kernel(monkeypatch, broken)
    found = report("--case", "mixed-plain", *SCALAR)
    assert any(message in failure["message"] for failure in found["failures"])
    assert all("bits" in failure["message"] for failure in found["failures"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--case", "mixed-plian"), "did you mean mixed-plain"),
        (("--case", "zzzz"), ", such as mixed-plain\n"),
        (("--isa", "avx1024"), "avx512"),
        (("--quick", "--full"), "exclude"),
        (("--dtype", "float64"), "bfloat16"),
    ],
)
def test_what_makes_no_sense_exits_with_2(args: tuple[str, ...], message: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert message in result.output


def test_an_isa_asked_for_that_is_not_here_exits_with_2() -> None:
    absent = [isa for isa in cpu_attn.isas() if not isa.supported]
    if not absent:
        pytest.skip("every isa runs here")
    result = call("--isa", absent[0].name, "--case", "mixed-plain")
    assert result.exit_code == 2
    assert " ".join(absent[0].reason.split()[:3]) in " ".join(result.output.split())


def test_vec16_runs_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("--case", "chunk-head-1", "--case", "mixed-plain")
    (combo,) = report(*names, "--isa", "vec16", "--engine", "native", "--dtype", "float32")["combinations"]
    assert (combo["cases"], combo["ok"]) == (1, True)
    result = call(*names[:2], "--isa", "vec16")
    assert result.exit_code == 2 and "vec16" in result.output and "chunk-head-1" in result.output
    monkeypatch.setenv("CPU_ATTN_ISA", "vec16")
    cases = {c["isa"]: c["cases"] for c in report(*names, "--dtype", "float32")["combinations"]}
    assert cases["auto"] == 1 and cases["scalar"] == 2


def test_an_isa_of_the_environment_that_is_none_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_ATTN_ISA", "avx1024")
    result = call("--case", "mixed-plain")
    assert result.exit_code == 2
    assert "CPU_ATTN_ISA=avx1024: there is auto, vec" in result.output


def test_an_engine_asked_for_that_is_not_here_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cpu_attn.get_scheduler_metadata

    def without_onednn(*args: Any, engine: str = "auto", **options: Any) -> Any:
        if engine == "onednn":
            raise cpu_attn.UnavailableError("no oneDNN on this planet")
        return plan(*args, engine=engine, **options)

    monkeypatch.setattr(cpu_attn, "get_scheduler_metadata", without_onednn)
    for engine in ("onednn", "onednn-python"):
        result = call("--engine", engine, "--case", "mixed-plain")
        assert result.exit_code == 2
        assert "no oneDNN on this planet" in result.output
    found = report("--case", "mixed-plain", "--dtype", "float32")
    assert found["ok"]
    reasons = {c["engine"]: c["reason"] for c in found["unavailable"] if c["engine"].startswith("onednn")}
    assert reasons == dict.fromkeys(("onednn", "onednn-python"), "no oneDNN on this planet")
