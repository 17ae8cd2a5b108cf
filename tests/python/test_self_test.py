# SPDX-License-Identifier: Apache-2.0
"""``auto`` takes an isa with a matrix unit only where its self-test passes; else the next one, with a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import cpu_attn
from cpu_attn import _dispatch, _self_test
from cpu_attn.cli import main

from ..harness.kernels import KERNELS

ISAS = [isa for isa in cpu_attn.isas() if isa.supported]
EMULATED_TILES = any(
    i["name"] == "amx" and i["emulated"]
    for i in json.loads(CliRunner().invoke(main, ["info", "--json"]).output)["isas"]
)


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_kernels_that_hold_pass(isa: str, dtype: str) -> None:
    assert _self_test.fault(isa, dtype) == ""


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_results_past_the_budget_fail(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request by 1 %, of one row's lse, by NaN."""
    attention = _self_test.attention_with_kv_cache

    def off(*args: Any, spoil: str, **options: Any) -> None:
        attention(*args, **options)
        if options["kv_cache_dtype"] == kv_cache_dtype:
            output, lse = args[3], options["lse"]
            if spoil == "output":
                output[40:41] *= output.dtype.type(1.01)
            elif spoil == "lse":
                lse[1, 7] += 0.1
            else:
                output[3, 2, 1] = float("nan")

    for spoil in ("output", "lse", "nan"):
        monkeypatch.setattr(_self_test, "attention_with_kv_cache", lambda *a, s=spoil, **o: off(*a, spoil=s, **o))
        assert f"over a cache of {kv_cache_dtype} its error is" in _self_test.fault(*KERNELS[0])


class Verdicts(dict[str, str]):
    """What the self-test says of each dtype here, and how often it was asked."""

    calls = 0


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verdicts]:
    """The best isa as one with a matrix unit, whatever it is, that nobody has tested yet."""
    if len(ISAS) < 2:
        pytest.skip("there is no next isa here")
    verdicts = Verdicts()

    def fault(isa: str, dtype: str) -> str:
        verdicts.calls += 1
        if isa != ISAS[0].name:
            return ""
        threading.Event().wait(0.05)  # long enough for another thread to come along
        return verdicts.get(dtype, "")

    rows = (dataclasses.replace(ISAS[0], unit="matrix"), *(dataclasses.replace(i, unit="vector") for i in ISAS[1:]))
    monkeypatch.delenv("CPU_ATTN_ISA", raising=False)
    monkeypatch.setattr(_dispatch, "isas", lambda: rows)
    monkeypatch.setattr(_dispatch, "_found", {})
    monkeypatch.setattr(_dispatch, "_fault", fault)
    _dispatch._resolve_isa.cache_clear()
    yield verdicts
    _dispatch._resolve_isa.cache_clear()


DTYPE = next(dtype for isa, dtype in KERNELS if isa == ISAS[0].name)
NEXT = next(isa for isa, dtype in KERNELS if isa != ISAS[0].name and dtype == DTYPE)


def test_one_that_passes_is_taken_and_tested_once(matrix: Verdicts) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = {_dispatch.resolve_isa("auto", DTYPE, size).name for size in (64, 80)}
        assert "self-test" not in CliRunner().invoke(main, ["info"], env={"COLUMNS": "400"}).output
    assert taken == {ISAS[0].name} and matrix.calls == sum(isa == ISAS[0].name for isa, _ in KERNELS)


def test_one_that_fails_is_passed_over(matrix: Verdicts) -> None:
    """By auto alone, with a warning for the first call, and info says why."""
    matrix[DTYPE] = "its error is 7 of the budget"
    said = (
        rf"isa '{ISAS[0].name}' fails its self-test in {DTYPE}: its error is 7 of the budget. auto takes the next one"
    )
    with pytest.warns(RuntimeWarning, match=said) as seen:
        assert _dispatch.resolve_isa("auto", DTYPE, 64).name == NEXT
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _dispatch.resolve_isa("auto", DTYPE, 32).name == NEXT
        assert cpu_attn.PagedKVCache(4, 16, 1, 64, dtype=DTYPE).isa == NEXT
        assert _dispatch.resolve_isa(ISAS[0].name, DTYPE, 64).name == ISAS[0].name
        auto = {k["dtype"]: k for k in json.loads(CliRunner().invoke(main, ["info", "--json"]).output)["auto"]}
    assert auto[DTYPE]["isa"] == NEXT
    assert f"not {ISAS[0].name}, whose self-test fails: its error is 7 of the budget" in auto[DTYPE]["why"]


def test_a_reader_of_caches_passes_it_over_too(matrix: Verdicts) -> None:
    matrix[DTYPE] = "it is wrong"
    with pytest.warns(RuntimeWarning):
        cache = cpu_attn.PagedKVCache(4, 16, 1, 64, dtype=DTYPE)
    assert cache.isa == cache.descriptor.reader().name == NEXT


def test_threads_at_once_test_once(matrix: Verdicts) -> None:
    matrix[DTYPE] = "it is wrong"
    names: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        threads = [
            threading.Thread(target=lambda: names.append(_dispatch.resolve_isa("auto", DTYPE, 64).name))
            for _ in range(4)
        ]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert names == [NEXT] * 4 and matrix.calls == 1
    assert [w.category for w in seen] == [RuntimeWarning]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_does_not_wait_for_a_thread_that_it_lacks() -> None:
    """Forked while another thread tests, it tests by itself."""
    script = f"""
import os, threading, time
from cpu_attn import _dispatch
from cpu_attn._dispatch import Isa
held, over = threading.Event(), threading.Event()
def hold():
    with _dispatch._testing:
        held.set(); over.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if not pid:
    os._exit(_dispatch.self_test({ISAS[0]!r}, {DTYPE!r}) != "")
for _ in range(600):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(pid, 9)
    status = "the child waits"
over.set()
assert status == 0, status
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not EMULATED_TILES, reason="only emulated tiles can be broken: make emulate")
def test_broken_tiles_are_not_taken() -> None:
    """The kernel itself: every product of tiles is left out."""
    script = """
import json, warnings
import cpu_attn
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    caches = [cpu_attn.PagedKVCache(4, 16, 1, 64, dtype="bfloat16", isa=i) for i in ("auto", "auto", "amx")]
print(json.dumps([[c.isa for c in caches], [str(w.message) for w in seen]]))
"""
    env = {k: v for k, v in os.environ.items() if k != "CPU_ATTN_ISA"}

    def run(broken: str, *command: str) -> Any:
        e = {**env, "CPU_ATTN_BROKEN_TILES": broken}
        done = subprocess.run([sys.executable, *command], env=e, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    assert run("0", "-c", script) == [["amx", "amx", "amx"], []]
    taken, said = run("1", "-c", script)
    assert taken == ["avx512", "avx512", "amx"]
    assert len(said) == 1 and "isa 'amx' fails its self-test in bfloat16" in said[0]
    auto = {k["dtype"]: k for k in run("1", "-m", "cpu_attn", "info", "--json")["auto"]}
    assert auto["bfloat16"]["isa"] == "avx512" and "not amx, whose self-test fails" in auto["bfloat16"]["why"]
