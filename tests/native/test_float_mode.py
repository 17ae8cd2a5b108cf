# SPDX-License-Identifier: Apache-2.0
"""Calls compute with subnormal numbers as 0, to nearest and without traps, whatever the caller's mode is, and leave
this as it was."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn._native import lib
from cpu_attn.linear import get_linear_attention_metadata, linear_attention_with_state_cache

from ..cases import linear_cases
from ..cases.formats import numpy_dtype
from ..cases.judge import check, same_bits
from ..cases.levels import cases
from ..cases.problem import build
from ..cases.run import run
from ..harness.kernels import KERNELS

F32 = np.float32
STICKY = 0x3F if platform.machine() == "x86_64" else 0  # bits of MXCSR that any arithmetic sets
# The caller flushes, rounds down, or both; or its arithmetic traps on overflow, division by 0 and what is invalid.
MODES = {
    "x86_64": {"flush": 0x9FC0, "down": 0x3F80, "flush and down": 0xBFC0, "trap": 0x1900},
    "aarch64": {"flush": 1 << 24, "down": 2 << 22, "flush and down": 1 << 24 | 2 << 22},
}[platform.machine()]
ENGINES = [e.name for e in cpu_attn.engines() if e.available]
TINY = 2.0**-130
QUERY = np.ones((1, 1, 16), F32)
START, LENS, SLOT, TABLE = (np.array(x, np.int32) for x in ([0, 1], [1], [0], [[0]]))


def in_mode(mode: int, call: Callable[[], Any]) -> Any:
    """Gives what a call gives to a thread in this mode, which it has to keep."""
    before = lib.ca_float_mode()
    lib.ca_set_float_mode(mode)
    try:
        found = call()
    finally:
        kept = lib.ca_float_mode()
        lib.ca_set_float_mode(before)
    assert kept & ~STICKY == mode & ~STICKY
    return found


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["mixed-everything", "fp8_e5m2-everything", "int4-everything", "rotary-everything"])
def test_attention(engine: str, num_threads: int, mode: int, name: str) -> None:
    problem = build(next(case for case in cases("quick", "float32") if case.name == name))
    found = in_mode(mode, lambda: run(problem, "auto", engine, num_threads=num_threads))
    assert check(problem, *found).ok
    assert all(map(same_bits, found, run(problem, "auto", engine)))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("variant", ["gdn_raw", "kda", "ssd_raw"])
def test_linear_attention(engine: str, variant: str, mode: int) -> None:
    problem = linear_cases.build(linear_cases.Case(variant, (1, 70)))
    found = in_mode(mode, lambda: linear_cases.run(problem, "auto", engine))
    assert linear_cases.errors(problem, found)[0] <= 1
    assert same_bits(found.output, linear_cases.run(problem, "auto", engine).output)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8", "int6", "int5", "int4"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_gather(kv_cache_dtype: str, mode: int) -> None:
    """int8's elements are subnormal numbers of binary16 on their way to floats."""
    cache = cpu_attn.PagedKVCache(1, 16, 1, 64, "float32", kv_cache_dtype=kv_cache_dtype)
    rows = (np.arange(16 * 64, dtype=F32).reshape(16, 1, 64) % 15 - 7) / 8  # exact with a scale of 1/8, 7/127, ...
    cache.update(rows, rows, np.arange(16))
    for found in in_mode(mode, lambda: cache.gather(np.zeros(1, np.int32), 16)):
        assert np.abs(found.astype(F32) - rows).max() <= 1 / 16


def test_calls_that_raise_keep_the_mode() -> None:
    cache = cpu_attn.PagedKVCache(1, 16, 1, 16, "float32")

    def call() -> None:
        with pytest.raises(ValueError, match="slot_mapping"):
            cache.update(QUERY, QUERY, np.array([16]))
        with pytest.raises(ValueError, match="block_table"):
            cache.attend(QUERY, TABLE + 1, cache.plan(START, LENS, 1))

    in_mode(MODES["flush"], call)


@pytest.fixture(scope="module")
def openmp(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library of this process whose OpenMP threads are those of the calls."""
    made = tmp_path_factory.mktemp("float_modes") / "float_modes.so"
    here, native = Path(__file__).parent.parent / "programs", Path(__file__).parents[2] / "native"
    compiler = sysconfig.get_config_var("CC").split()[0]
    flags = ["-shared", "-fPIC", "-fopenmp", f"-I{native}"]
    subprocess.run([compiler, *flags, str(here / "float_modes.c"), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.skipif(not lib.ca_threading(), reason="there is no OpenMP")
def test_threads_of_a_team_have_their_own_mode_back(openmp: ctypes.CDLL) -> None:
    found = np.zeros(2, np.uint64)

    def modes() -> set[int]:
        openmp.float_modes(2, ctypes.c_void_p(found.ctypes.data))
        return {int(mode) & ~STICKY for mode in found}

    before = modes()
    problem = build(next(case for case in cases("quick", "float32") if case.name == "mixed-everything"))
    run(problem, num_threads=2)
    assert modes() == before


# ---- what is 0 ----


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] != "float16"])
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_values_below_the_normal_numbers(isa: str, dtype: str, engine: str) -> None:
    """One key has all of the weight: its value is 0 where it is subnormal, and else the result."""
    kind = numpy_dtype(dtype)
    value = np.where(np.arange(16) % 2, TINY, 2.0**-125).astype(kind).reshape(1, 1, 16)
    cache = cpu_attn.PagedKVCache(1, 16, 1, 16, dtype, isa)
    cache.update(QUERY.astype(kind), value, np.zeros(1, np.int64))
    output = cache.attend(QUERY.astype(kind), TABLE, cache.plan(START, LENS, 1, engine=engine))
    assert output[0, 0].astype(np.float64).tolist() == [2.0**-125, 0] * 8


@pytest.mark.parametrize(
    ("isa", "engine"), [*((isa, "native") for isa, d in KERNELS if d == "float16"), ("auto", "reference")]
)
def test_subnormal_numbers_of_float16_are_kept(isa: str, engine: str) -> None:
    kind = np.float16
    value = np.arange(16, dtype=np.uint16).view(kind).reshape(1, 1, 16)
    cache = cpu_attn.PagedKVCache(1, 16, 1, 16, "float16", isa)
    cache.update(QUERY.astype(kind), value, np.zeros(1, np.int64))
    assert (cache.attend(QUERY.astype(kind), TABLE, cache.plan(START, LENS, 1, engine=engine)) == value).all()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_states_below_the_normal_numbers(isa: str, dtype: str, engine: str, tokens: int) -> None:
    """A state that decays past 2^-126 is 0 then."""
    zeros = np.zeros((tokens, 1, 16), numpy_dtype(dtype))
    state, output = np.full((1, 1, 16, 16), 2.0**-120, F32), np.ones_like(zeros)
    start, lens = np.array([0, tokens], np.int32), np.array([tokens + 1], np.int32)
    plan = get_linear_attention_metadata(start, dtype, 1, 1, 16, 16, seq_lens=lens, isa=isa, engine=engine)
    g = np.full((tokens, 1), -10 / tokens, F32)
    linear_attention_with_state_cache(zeros + 1, zeros, zeros, output, state, SLOT, plan, g=g, delta_rule=False)
    assert not state.any() and (output[-1] == 0).all()
