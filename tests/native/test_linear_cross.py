# SPDX-License-Identifier: Apache-2.0
"""Linear attention for another architecture, compiled by a cross compiler and run by qemu, against the float64
oracle."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn import _arguments, _check
from cpu_attn._dtypes import CODES, NAMES
from cpu_attn._native import ffi

from ..cases.formats import DTYPES
from ..cases.linear_cases import Problem, Result, build, cases, errors
from .test_cross import EMULATOR, compiled, pytestmark  # noqa: F401

DEFAULTS = {row.name: getattr(row, "default", None) for row in _arguments.LINEAR.rows}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("aarch64"), "run_linear")


def described(x: NDArray[Any] | None) -> bytes:
    if x is None:
        return np.zeros(7, np.int64).tobytes()
    code, size = CODES[NAMES[x.dtype]]
    head = [code, size, x.ndim, *x.shape, *[0] * (4 - x.ndim)]
    return np.array(head, np.int64).tobytes() + np.ascontiguousarray(x).tobytes()


def run(program: Path, problem: Problem, isa: str) -> Result:
    c, options = problem.case, problem.options
    sizes = (c.num_k_heads, c.num_v_heads, c.head_k_dim, c.head_v_dim)
    shape = ffi.new("ca_linear_shape *", [len(c.lens), *sizes, CODES[c.dtype][0], 0, 1, 0])
    cache, value = problem.cache(), problem.arrays["value"]
    rows = [(*key, slot) for key, slot in problem.kept.items()]
    given = problem.arrays | {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    given |= {"output": np.zeros_like(value), "state_cache": cache, "state_indices": problem.slots}
    given["checkpoints"] = np.array(rows, np.int32).reshape(-1, 3)
    given["g"] = _check.each_token(given.get("g"), len(value))
    all_of = DEFAULTS | options | given
    gates = tuple(all_of[name] for name in ("gate", "g", "beta", "A_log", "dt_bias", "lower_bound"))
    flags = tuple(all_of[f.name] for f in _arguments.LINEAR.fields if f.type == "bool")
    others = (all_of[name] for name in ("scale", "norm_eps", "dt_limit"))
    how = _check.linear_how(c.head_k_dim, gates, all_of["erase"], flags, *others, c.state_layout)
    parts = [problem.query_start_loc, np.maximum(problem.starts, 0).astype(np.int32), problem.brings.astype(np.uint8)]
    body = bytes(ffi.buffer(shape)) + bytes(ffi.buffer(how)) + b"".join(x.tobytes() for x in parts)
    body += b"".join(described(given.get(name)) for name in _check.LINEAR)
    command = [str(EMULATOR), "-cpu", "max", str(program), isa]
    done = subprocess.run(command, input=body, capture_output=True, check=False)
    assert done.returncode == 0, (c.name, done.stderr)
    output = np.frombuffer(done.stdout[: value.nbytes], value.dtype).reshape(value.shape)
    states = np.frombuffer(done.stdout[value.nbytes :], cache.dtype).reshape(cache.shape)
    states = states if c.state_layout == "KV" else states.transpose(0, 1, 3, 2)
    return Result(output, [states[s] for s in problem.slots], {key: states[s] for key, s in problem.kept.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["neon", "scalar"])
def test_aarch64(program: Path, isa: str, dtype: str) -> None:
    for case in cases("default", dtype):
        problem = build(case)
        worst, where = errors(problem, run(program, problem, isa))
        assert worst <= 1, (case.name, worst, where)
