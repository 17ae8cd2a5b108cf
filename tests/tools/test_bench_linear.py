# SPDX-License-Identifier: Apache-2.0
"""What `cpu-attn bench linear` runs: what it counts, that it is linear attention, whoever runs it, and what limits
it."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cpu_attn.__main__ import main
from cpu_attn.cli import choose, contest, ggml, limits, linear, report
from cpu_attn.cli.limits import Limit
from cpu_attn.cli.linear import WIDTH, Layer
from cpu_attn.cli.rivals import RIVALS
from cpu_attn.cli.workloads import GROUPS, WORKLOADS, Step, Workload
from cpu_attn.linear import reference

NAMES = [w.name for w in GROUPS["linear"]]


def small(name: str) -> Workload:
    """The workload with few, small heads and few tokens."""
    w = WORKLOADS[name]
    lens = ((150, 150),) if w.kind != "linear-decode" else ((1, 1024),) * min(3, len(w.lens))
    layer = replace(w.linear, size_v=24 if name.startswith("ssd") else 32)  # type: ignore[type-var]
    return replace(w, lens=lens, num_heads=4, num_kv_heads=2 if w.num_kv_heads < w.num_heads else 4, head_size=32,
                   linear=layer)  # fmt: skip


def expected(step: Step) -> tuple[Any, Any]:
    """Outputs, and the states after the step."""
    w, layer = step.workload, step.workload.linear
    assert layer
    arrays = step.arrays_of_layer
    if layer.rule == "conv":
        x, weight = arrays.inputs
        found = reference.causal_conv1d(x, weight, None, step.query_start_loc, [None] * len(w.lens), WIDTH - 1)
        return found.output, np.stack(found.states)
    rows = (arrays.query, arrays.key, arrays.value)
    begin = [arrays.states[i] if w.kind == "linear-decode" else None for i in range(len(w.lens))]
    how: Any = {"g": arrays.g, "beta": arrays.beta, "delta_rule": layer.has_delta_rule}
    found = reference.linear_attention(*rows, step.query_start_loc, begin, **how)
    return found.output, np.stack(found.states)


def close(got: Any, want: Any, budget: float) -> bool:
    got = np.asarray(got).astype(np.float64).reshape(want.shape)
    return bool(np.linalg.norm(got - want) <= budget * np.linalg.norm(want))


def test_groups() -> None:
    assert sorted(NAMES) == sorted(n for n in WORKLOADS if n[:3] in ("gdn", "kda", "ssd", "con"))
    assert {w.kind for w in GROUPS["linear"]} == set(linear.KINDS)


def test_flops_and_bytes() -> None:
    """Those of the recurrence, and of Qwen3.5's states: 2 MiB each."""
    names = ("gdn-prefill-2k", "gdn-decode-64", "ssd-decode-64", "conv-prefill-2k")
    gdn, decode, ssd, conv = (WORKLOADS[name] for name in names)
    assert gdn.flops == 2048 * 32 * 128 * 128 * 6 and ssd.flops == 64 * 128 * 128 * 64 * 4
    assert conv.flops == 2048 * 8192 * 4 * 2 and conv.kv_bytes(2) == 2048 * 8192 * 2
    assert decode.kv_bytes(2) == decode.kv_bytes(4) == 64 * 2 * 2**20
    assert gdn.kv_bytes(2) == 2 * 2**20 + 2 * 2048 * (2 * 16 + 2 * 32) * 128
    assert Layer("conv", 128).channels(32, 16, 128) == 8192


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_it_is_linear_attention(name: str, engine: str) -> None:
    step = Step(small(name), "auto", "float32")
    call: Any
    call, workspace, isa = linear.prepare(step, engine)
    output, states = call(), call.args[4]
    want, after = expected(step)
    assert workspace >= 0 and isa and close(output, want, reference.BUDGET["float32"])
    assert close(states[step.arrays_of_layer.slots], after, reference.BUDGET["float32"])


@pytest.mark.parametrize("rival", ["torch", "ggml", "onnxruntime"])
@pytest.mark.parametrize("name", NAMES)
def test_rivals_compute_the_same(name: str, rival: str) -> None:
    try:
        RIVALS[rival].load()
    except ImportError as error:
        pytest.skip(str(error))
    step = Step(small(name), "auto", "float32")
    if odd := RIVALS[rival].lacks(step.workload, "auto", 16):
        pytest.skip(f"{rival} has no {odd[0]}")
    call = RIVALS[rival].call(step)  # which keeps the memory of what it returns
    found = call()
    want, after = expected(step)
    if rival == "ggml":
        order, requests = np.argsort(_ggml_order(step)), len(step.workload.lens)
        rows = found[0].reshape(-1, 4, 32)
        output, states = rows[: len(want), order], rows[len(want) :].reshape(requests, 4, 32, 32)
        states = states[:, order].swapaxes(2, 3)
    elif step.workload.kind == "conv":
        output, states = found.transpose(1, 2), None
    else:
        output, states = found
    assert close(output, want, 1e-4)
    assert states is None or close(states, after, 1e-4)


def _ggml_order(step: Step) -> Any:
    return np.arange(4).reshape(step.workload.num_kv_heads, -1).T.reshape(-1)


def test_a_ggml_from_before_the_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "load", lambda: ctypes.CDLL(None))
    w = WORKLOADS["gdn-decode-1"]
    assert RIVALS["ggml"].lacks(w, "auto", 128) == ["ggml_gated_delta_net"]
    assert RIVALS["ggml"].lacks(WORKLOADS["ssd-decode-64"], "auto", 128) == ["ssd"]


@pytest.mark.parametrize("name", NAMES)
def test_which_limit_binds(name: str) -> None:
    step = Step(small(name), "auto", "bfloat16")
    (row,) = contest.contestants(step, ["native"], 2)
    products = limits.products(row.isa, "bfloat16", 2)
    copies = Limit("memcpy_gbps", 2, num_bytes=max(step.workload.kv_bytes(2), contest.LEAST_BYTES))
    assert list(row.limits) == (products if step.workload.kind == "linear-prefill" else [copies])
    assert row.roof == (*products, copies)


def test_who_runs_it() -> None:
    w = WORKLOADS["gdn-decode-1"]
    assert not contest.unable("native", w, "auto", 16) and not contest.unable("reference", w, "auto", 16)
    for engine in ("onednn", "onednn-python"):
        assert contest.unable(engine, w, "auto", 16) == f"{engine} has no linear attention"
    assert choose.impossible(replace(w, softcap=30.0)).endswith("linear attention has no softcap")
    assert choose.impossible(w, {"bfloat16", "fp8_e4m3"}).endswith("linear attention has no KV cache")


def test_the_command() -> None:
    small = ("--num-heads", "2", "--num-kv-heads", "1", "--head-size", "16", "--repeat", "1", "--threads", "1")
    result = CliRunner().invoke(main, ["bench", "gdn-decode-64", "conv-prefill-2k", *small, "--json"])
    assert result.exit_code == 0, result.output
    decode, conv = json.loads(result.stdout)["results"]
    assert (decode["limit_of"], conv["limit_of"]) == ("memcpy_gbps", "memcpy_gbps")
    assert decode["kv_gbps"] == pytest.approx(64 * 2 * 16 * 128 * 4 / decode["seconds_min"] / 1e9)
    assert decode["gflops"] > 0 and decode["fraction_of_roof"] > 0


@pytest.mark.parametrize(
    ("kind", "word"), [("read_gbps", "reads"), ("memcpy_gbps", "copies"), ("matrix_gflops", "products")]
)
def test_what_binds_in_words(kind: str, word: str) -> None:
    assert report.of_roof({"roof_of": kind, "fraction_of_roof": 0.5}) == f"50% {word}"
