# SPDX-License-Identifier: Apache-2.0
"""Kernels that replace an isa's own on some cores only: both, whatever this core prefers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import cpu_attn

pytestmark = pytest.mark.isa
MAIN = "from cpu_attn.cli import main; main()"


def command(vdpbf16ps: str, *words: str) -> str:
    environment = {**os.environ, "CPU_ATTN_VDPBF16PS": vdpbf16ps, "CPU_ATTN_ISA": "avx512"}
    done = subprocess.run([sys.executable, "-c", MAIN, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("vdpbf16ps", ["0", "1"])
def test_bfloat16_products_of_avx512(vdpbf16ps: str) -> None:
    isa = next(i for i in cpu_attn.isas() if i.name == "avx512")
    if not isa.supported:
        pytest.skip(isa.reason)
    command(vdpbf16ps, "verify", "--quick", "--engine", "native", "--isa", "avx512", "--dtype", "bfloat16")
    info = json.loads(command(vdpbf16ps, "info", "--json"))
    uses = "VDPBF16PS" in next(d["method"] for d in info["auto"] if d["dtype"] == "bfloat16")
    emulated = any(i["emulated"] for i in info["isas"])
    assert uses == (vdpbf16ps == "1" and (emulated or info["cpu"]["features"]["avx512_bf16"]))
    vnni = emulated or info["cpu"]["features"]["avx512_vnni"]
    by_integers = {d["dtype"]: "VPDPWSSD" in d["method"] for d in info["auto"]}
    assert by_integers == {"float32": False, "float16": vnni, "bfloat16": vnni and not uses}
