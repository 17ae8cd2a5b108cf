# SPDX-License-Identifier: Apache-2.0
"""Kernels for another architecture, compiled by a cross compiler and run by qemu, against the float64 oracle."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_attn import _check
from cpu_attn._dtypes import CODES

from ..cases.formats import DTYPES, numpy_dtype, rotates
from ..cases.judge import check
from ..cases.levels import cases
from ..cases.memory import slots_of
from ..cases.problem import Problem, build

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static"]
# What runs on which CPU: qemu's max has BF16 and FHM, neoverse-n1 has neither, and cortex-a72 has neither dot products
# nor half precision.
RUNS = [(isa, "max", dtype) for isa in ("neon", "scalar") for dtype in DTYPES]
RUNS += [("neon", "neoverse-n1", "bfloat16"), ("neon", "cortex-a72", "bfloat16"), ("neon", "cortex-a72", "float16")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and EMULATOR and (ROOT / "native").is_dir()),
        reason=f"needs {COMPILER}, qemu-user and a source tree",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("aarch64"), "run_case")


def compiled(folder: Path, driver: str) -> Path:
    """A program of tests/cross."""
    pytest.importorskip("setuptools", reason="build_ffi.py needs setuptools")
    sys.path.insert(0, str(ROOT))
    build_ffi = importlib.import_module("build_ffi")
    build_ffi.write_arguments(folder)
    sys.path.remove(str(ROOT))
    flags: dict[Path, tuple[str, ...]] = {}
    for of in build_ffi.FLAGGED:
        files = [file for file in build_ffi.flagged_files(of) if file.arch in ("any", "aarch64")]
        build_ffi.write_list(folder, of, files, [])
        flags |= {file.path: (*file.flags, *file.tuned) for file in files}
    apart = (*build_ffi.FLAGGED, build_ffi.ONEDNN)
    sources = [ROOT / "tests/cross" / f"{driver}.c", *flags]
    sources += [c for c in (ROOT / "native").rglob("*.c") if c.parent not in apart]
    common = [COMPILER, *FLAGS, f"-I{ROOT / 'native'}", f"-I{folder}"]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        subprocess.run([*common, *flags.get(source, ()), "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([*common, *objects, "-lm", "-lpthread", "-o", str(folder / driver)], check=True)
    return folder / driver


def arrays(problem: Problem) -> bytes:
    """What run_case.c reads."""
    case = problem.case
    kvs = _check.kv_dtypes(case.kv_cache_dtype, case.dtype)
    causal = case.causal if problem.dynamic_causal is None else bool(problem.dynamic_causal.all())
    left, right = _check.window(case.sliding_window)
    slots = slots_of(problem)
    query, key = problem.rotated
    tokens: list[NDArray[Any]] = [
        np.concatenate([*rows, np.zeros((0, case.num_kv_heads, size), numpy_dtype(case.dtype))])
        for rows, size in ((key, case.head_size), (problem.value, case.value_size))
    ]
    table = problem.block_table
    fields = [
        CODES[case.dtype][0],
        *(CODES[kv][0] for kv in kvs),
        len(problem.seq_lens),
        case.num_heads,
        case.num_kv_heads,
    ]
    fields += [case.head_size, case.value_size, problem.num_blocks, case.block_size, table.shape[1]]
    fields += [len(problem.query), len(slots), case.causal, left, -1 if causal else right]
    optional = (problem.alibi_slopes, problem.s_aux, problem.dynamic_causal)
    selected, tokens_of = problem.selected_blocks, problem.selected_tokens
    fields += [x is not None for x in optional]
    fields += [-1, 0] if selected is None else [selected.shape[2], len(selected)]
    fields += [case.query_block or 0, case.select_by_query_head]
    three = ("mm_prefix_range", "document_start_loc", "tree_mask")
    masks = _check.masks(len(problem.seq_lens), **{name: case.masks.get(name) for name in three}) or _check.Masks(
        *np.zeros((2, 0), np.int32), None
    )
    tree = None if masks.tree is None else masks.tree.numpy()
    fields += [_check.LAYOUTS[case.kv_cache_layout], _check.kv_cache_rotation(case.kv_cache_rotation)]
    fields += [bool(case.shared), len(masks.spans), len(masks.documents)]
    fields += [-1 if tree is None else tree.shape[1], case.clamped, case.chunk or 0]
    fields += [-1 if tokens_of is None else tokens_of.shape[1]]
    fields += [0] * 4 if problem.attn_bias is None else problem.attn_bias.shape
    numbers = [problem.scale, case.softcap, *problem.scales]
    slopes, sinks, flags = ([] if x is None else [x] for x in optional)
    body = [query, *tokens, slots, table, problem.query_start_loc, problem.seq_lens, *flags, *slopes, *sinks]
    body += [x for x in (selected, tokens_of, masks.spans, masks.documents, tree, problem.attn_bias) if x is not None]
    head = [np.array(fields, np.int64), np.array(numbers, np.float32)]
    return b"".join(np.ascontiguousarray(x).tobytes() for x in (*head, *body))


def run(program: Path, problem: Problem, isa: str, cpu: str) -> tuple[NDArray[Any], NDArray[np.float32], str]:
    """Gives output, lse, and the products by which they were made."""
    case = problem.case
    command = [str(EMULATOR), "-cpu", cpu, str(program), isa]
    done = subprocess.run(command, input=arrays(problem), capture_output=True, check=False)
    assert done.returncode == 0, (case.name, done.stderr)
    shape = (len(problem.query), case.num_heads, case.value_size)
    size = int(np.prod(shape)) * numpy_dtype(case.dtype).itemsize
    output = np.frombuffer(done.stdout[:size], numpy_dtype(case.dtype)).reshape(shape)
    return output, np.frombuffer(done.stdout[size:], np.float32).reshape(shape[1::-1]), done.stderr.decode()


@pytest.mark.parametrize(("isa", "cpu", "dtype"), RUNS)
def test_aarch64(program: Path, isa: str, cpu: str, dtype: str) -> None:
    # Of keys that are turned and rotated in one pass, and rounded once, only the one half would come from the oracle.
    twice = {case.name for case in cases("quick", dtype) if case.rotary and rotates(case.kv_cache_rotation)[0]}
    problems = [build(case) for case in cases("quick", dtype) if case.name not in twice]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda p: run(program, p, isa, cpu), problems))
    for problem, (*result, products) in zip(problems, results, strict=True):
        for name, of in (("BFMMLA", "bfloat16"), ("FMLAL", "float16")):
            assert (name in products) == ((isa, cpu, dtype) == ("neon", "max", of))
        judged = check(problem, *result)
        assert judged.ok, (problem.case.name, judged.message)
