# SPDX-License-Identifier: Apache-2.0
"""Profiles say what was called, by whom, with which kernels, and how long it took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_attn

LOC, LENS = np.array([0, 5, 8], np.int32), np.array([5, 3], np.int32)
TABLE, SLOTS = np.array([[1], [0]], np.int32), np.array([16, 17, 18, 19, 20, 0, 1, 2])
QUERY = np.ones((8, 4, 32), np.float32)


def step(isa: str = "scalar", engine: str = "native", **options: Any) -> tuple[Any, Any]:
    """A plan, a write and an attention."""
    cache = cpu_attn.PagedKVCache(2, 16, 2, 32, isa=isa, **options)
    plan = cache.plan(LOC, LENS, num_heads=4, engine=engine)
    cache.update(QUERY[:, :2], QUERY[:, :2], SLOTS)
    return plan, cache.attend(QUERY, TABLE, plan)


def names(profile: Any) -> list[str]:
    return [call.kind.name for call in profile.calls]


@pytest.mark.parametrize("isa", [i.name for i in cpu_attn.isas() if i.supported and i.unit != "matrix"])
@pytest.mark.parametrize("engine", [e.name for e in cpu_attn.engines() if e.available])
def test_what_a_call_is_said_to_be(isa: str, engine: str) -> None:
    before = time.perf_counter_ns()
    with cpu_attn.profile() as profile:
        plan, _ = step(isa, engine, kv_cache_dtype="int8/int4")
    after = time.perf_counter_ns()
    assert names(profile) == ["get_scheduler_metadata", "reshape_and_cache", "attention_with_kv_cache"]
    planned, write, attention = profile.calls
    assert (planned.num_reqs, write.num_tokens) == (2, 8)
    assert (attention.num_reqs, attention.num_tokens, attention.num_threads) == (2, 8, plan.num_threads)
    assert (write.kind.engine, attention.kind.engine) == ("native", engine)
    for call in (write, attention):
        assert (call.kind.isa, call.kind.dtype, call.kind.kv_cache_dtype) == (isa, "float32", "int8/int4")
        assert call.thread == threading.get_native_id()
    if engine == "native":
        assert attention.kind.kernel and attention.kind.kernel in kernel(isa)["method"]
    assert profile.start <= planned.start <= planned.end <= write.start <= attention.start <= attention.end
    assert before <= profile.start and attention.end <= profile.end <= after
    shown = str(profile)
    assert f"float32 over int8/int4 by {engine} on {isa}" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def kernel(isa: str) -> dict[str, Any]:
    """What ``cpu-attn info`` says of an isa's float32."""
    command = [sys.executable, "-m", "cpu_attn", "info", "--json"]
    env = os.environ | {"CPU_ATTN_ISA": isa}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return next(k for k in json.loads(done.stdout)["auto"] if k["dtype"] == "float32")


def test_only_what_ends_within() -> None:
    step()
    with cpu_attn.profile() as outer:
        step()
        with cpu_attn.profile() as inner:
            cpu_attn.merge_states([QUERY, QUERY], [np.zeros((4, 8), np.float32)] * 2)
            with pytest.raises(ValueError, match="slot_mapping"):
                cpu_attn.PagedKVCache(1, 16, 2, 32).update(QUERY[:, :2], QUERY[:, :2], SLOTS)
    step()
    assert names(inner) == ["merge_states"]
    assert names(outer) == ["get_scheduler_metadata", "reshape_and_cache", "attention_with_kv_cache", "merge_states"]
    assert {kind.name: total.calls for kind, total in outer.totals.items()} == dict.fromkeys(names(outer), 1)


def test_each_write_has_its_name() -> None:
    index_cache = np.zeros(cpu_attn.get_index_cache_shape(2, 16, 32, "float32"), np.float32)
    cache = cpu_attn.PagedKVCache(2, 16, 2, 32)
    turned = (QUERY.copy(), QUERY[:, :2], QUERY[:, :2], cache.key_cache, cache.value_cache, SLOTS, np.arange(8))
    with cpu_attn.profile() as profile:
        cache.update(QUERY[:, :2], QUERY[:, :2], SLOTS)
        cpu_attn.rotary_reshape_and_cache(*turned, np.ones((8, 32), np.float32))
        cpu_attn.index_and_cache(QUERY[:, 0], index_cache, SLOTS)
    assert names(profile) == ["reshape_and_cache", "rotary_reshape_and_cache", "index_and_cache"]
    assert [call.num_tokens for call in profile.calls] == [8, 8, 8]


def test_calls_of_all_threads() -> None:
    with cpu_attn.profile() as profile:
        threads = [threading.Thread(target=lambda: [step() for _ in range(20)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({call.thread for call in profile.calls}) == 3
    assert [total.calls for total in profile.totals.values()] == [60] * 3
    for kind, total in profile.totals.items():
        calls = [call for call in profile.calls if call.kind == kind]
        assert total.nanoseconds == sum(call.end - call.start for call in calls)
        assert total.num_tokens == sum(call.num_tokens for call in calls)


# A trace function runs wherever a signal handler may: between two bytecodes of whoever is interrupted.
HANDLER = """
import random, sys
import numpy as np
import cpu_attn
from cpu_attn import profiling

parts = np.ones((2, 5, 1, 8), np.float32), np.zeros((2, 1, 5), np.float32)
calls, odds, inside = 0, random.Random(1), False

def call():
    global calls
    cpu_attn.merge_states(*parts)
    calls += 1

def handler(frame, event, argument):
    global inside
    frame.f_trace_opcodes = True
    if event == "opcode" and not inside and odds.random() < 0.25:
        inside = True
        with cpu_attn.profile() as own:
            call()
            assert [c.kind.name for c in own.calls] == ["merge_states"] and "merge_states" in str(own)
        str(profile), profile.trace(), profile.totals
        inside = False
    return handler if frame.f_code.co_filename == profiling.__file__ else None

with cpu_attn.profile() as profile:
    sys.settrace(handler)
    for _ in range(8):
        call()
    str(profile)
    sys.settrace(None)
assert calls > 150, calls
(total,) = profile.totals.values()
assert total.calls == len(profile.calls) == len(profile.trace()["traceEvents"]) == calls, (total, calls)
assert total.nanoseconds == sum(c.end - c.start for c in profile.calls)
"""


def test_a_handler_calls_in_at_any_bytecode() -> None:
    """Nothing hangs, and every call is counted once."""
    done = subprocess.run([sys.executable, "-c", HANDLER], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_a_signal_that_keeps_coming() -> None:
    script = """
import signal, time
import numpy as np
import cpu_attn
engines = [e.name for e in cpu_attn.engines() if e.available]
loc, lens = np.array([0, 1], np.int32), np.array([8], np.int32)
begun = handled = 0
def call():
    global begun
    begun += 1
    cpu_attn.get_scheduler_metadata(1, 1, 1, 8, lens, "float32", loc, engine=engines[begun % len(engines)])
def handler(*_):
    global handled
    handled += 1
    call()
    signal.setitimer(signal.ITIMER_REAL, 2e-5)
signal.signal(signal.SIGALRM, handler)
with cpu_attn.profile() as profile:
    signal.setitimer(signal.ITIMER_REAL, 2e-5)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        call()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert handled > 100 and len(profile.calls) > handled, (handled, len(profile.calls))
assert sum(total.calls for total in profile.totals.values()) >= len(profile.calls)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_trace(tmp_path: Path) -> None:
    with cpu_attn.profile() as profile:
        step()
    profile.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for event, call in zip(events, profile.calls, strict=True):
        assert (event["name"], event["ph"]) == (call.kind.name, "X")
        assert (event["pid"], event["tid"]) == (os.getpid(), call.thread)
        assert event["ts"] == call.start / 1e3 and event["dur"] == (call.end - call.start) / 1e3
        assert event["args"]["isa"] == call.kind.isa and event["args"]["num_tokens"] == call.num_tokens


def test_a_program_that_cannot_be_changed(tmp_path: Path) -> None:
    """And its child, which begins anew."""
    script = """
import os
import numpy as np
import cpu_attn

def call():
    cpu_attn.merge_states([np.ones((8, 4, 32), np.float32)] * 2, [np.zeros((4, 8), np.float32)] * 2)

call()
if child := os.fork():
    os.waitpid(child, 0)
else:
    call()
    call()
"""
    env = os.environ | {"CPU_ATTN_PROFILE": str(tmp_path / "calls.json")}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    found = {}
    for path in tmp_path.glob("calls.*.json"):
        found[path.name] = [event["pid"] for event in json.loads(path.read_text())["traceEvents"]]
    assert sorted(map(len, found.values())) == [1, 2]
    for name, pids in found.items():
        assert {f"calls.{pid}.json" for pid in pids} == {name}
