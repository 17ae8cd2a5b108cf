# SPDX-License-Identifier: Apache-2.0
"""The engine on oneDNN beyond what test_attention.py asks of every engine: its forms of K and V, its primitive cache,
children after fork(), and what it says when oneDNN is not there."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import _onednn_loader, primitives

from ..cases.case import Case
from ..cases.formats import DTYPES
from ..cases.judge import check
from ..cases.levels import cases
from ..cases.problem import build
from ..cases.run import run

AVAILABLE = next(e for e in cpu_attn.engines() if e.name == "onednn")
needs_onednn = pytest.mark.skipif(not AVAILABLE.available, reason=AVAILABLE.reason)


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_is_there_where_its_package_is() -> None:
    try:
        importlib.metadata.version(_onednn_loader.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        if sys.platform == "linux" and platform.machine() == "x86_64":
            raise  # pyproject.toml asks for it there
        pytest.skip(f"{_onednn_loader.PACKAGE} is a dependency on x86-64 Linux alone")
    if not os.environ.get("CPU_ATTN_ONEDNN"):
        assert AVAILABLE.available, AVAILABLE.reason


@needs_onednn
def test_description() -> None:
    said = _onednn_loader.describe()
    major, minor, _ = (int(n) for n in said.version.split("."))
    assert (major, minor) >= (3, 2)
    assert said.runtime in ("sequential", "OpenMP", "threadpool")
    assert said.float32.startswith(("brg", "gemm", "jit"))
    assert said.bfloat16.startswith(("brg", "gemm", "jit", "none: oneDNN has no optimised"))
    assert Path(said.library).name.startswith("libdnnl")


@pytest.mark.parametrize(
    ("machine", "name"),
    [("x86_64", "avx2"), ("aarch64", "sve_256"), ("arm64", "sve_256")],
    ids=["x86-64", "Linux on Arm", "macOS on Arm"],
)
def test_a_number_means_another_isa_on_arm(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    """oneDNN's headers name its numbers for x86 alone."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert _onednn_loader._isa_name(7) == name
    assert _onednn_loader._isa_name(0x4000) == "0x4000"


@needs_onednn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"query_lens": (3, 1), "seq_lens": (700, 1600), "num_heads": 300, "num_kv_heads": 1},
        {"query_lens": (300,), "seq_lens": (1300,), "num_heads": 2, "num_kv_heads": 2, "sliding_window": 600},
        {"query_lens": (130,), "seq_lens": (641,), "num_heads": 6, "num_kv_heads": 2, "causal": False, "block_size": 7},
    ],
    ids=["more-rows-than-a-matmul", "window-over-chunks", "odd-blocks"],
)
def test_chunks_and_row_blocks(shape: dict[str, Any], dtype: str) -> None:
    problem = build(Case("onednn-chunks", head_size=20, dtype=dtype, **shape))
    result = check(problem, *run(problem, engine="onednn"))
    assert result.ok, result.message


@needs_onednn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 192])
@pytest.mark.parametrize("seq_len", [63, 64, 65])
def test_a_chunk_that_one_key_does_not_fill(seq_len: int, head_size: int, dtype: str) -> None:
    """V of bfloat16 lies by pairs of keys, in panels of 64 columns: what the last pair lacks is 0, and nothing behind
    it is. Nearly all the weight is on the key whose place comes next."""
    problem = build(
        Case("onednn-pairs", (1,), (seq_len,), num_heads=1, num_kv_heads=1, head_size=head_size, dtype=dtype)
    )
    problem.key[0][1] = problem.query[0] * 4
    result = check(problem, *run(problem, engine="onednn"))
    assert result.ok, result.message


@needs_onednn
@pytest.mark.parametrize("engine", ["onednn", "onednn-python"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [-1, 9])
def test_nan_reaches_exactly_the_rows_that_see_it(engine: str, dtype: str, window: int) -> None:
    """Not only keys that nobody sees: in a prompt early rows must not see what late rows do, though a matmul reads
    all of it for all of them."""
    problem = build(Case("onednn-nan", (60,), (60,), sliding_window=window, dtype=dtype))
    problem.value[0][20, 0, 7], problem.value[0][33, 1, ::2], problem.value[0][40, 0, 5] = np.nan, np.inf, -np.inf
    problem.key[0][50, 1, 3] = np.nan
    expected, _ = problem.expected
    assert np.isnan(expected).any() and np.isinf(expected).any() and np.isfinite(expected[:20]).all()
    output, lse = run(problem, engine=engine)
    infinite = np.isinf(expected)
    assert np.array_equal(output[infinite].astype(np.float64), expected[infinite])
    expected[infinite], output[infinite] = 0, 0
    result = check(problem, output, lse)
    assert result.ok, result.message


FORMS = """
import sys
from cpu_attn import _onednn_loader
from cpu_attn.tests.cases.levels import cases
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.run import run
from cpu_attn.tests.cases.formats import DTYPES
from cpu_attn.tests.cases.judge import check
for dtype in DTYPES:
    for case in cases("quick", dtype):
        problem = build(case)
        result = check(problem, *run(problem, engine="onednn"))
        assert result.ok, (dtype, case.name, result.message)
print(_onednn_loader.describe().isa)
"""


@needs_onednn
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names x86 ISAs")
@pytest.mark.parametrize("isa", [pytest.param("sse41", marks=pytest.mark.slow), "avx2"])
def test_where_onednn_has_less(isa: str) -> None:
    """Without AVX-512 v3.2 multiplies float32 by gemm, which wants K as plain rows: another form."""
    assert _python(FORMS, ONEDNN_MAX_CPU_ISA=isa.upper()).split() == [isa]


THREADS = """
import threading
import numpy as np
import cpu_attn
from cpu_attn.tests.cases.case import Case
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.run import run
from cpu_attn.tests.cases.judge import check
sizes = [1, 7, 16, 40, 64, 72, 96, 130]
problems = [build(Case(f"cold-{d}", (1, 40, 3), (90, 40, 600), head_size=d)) for d in sizes]
for p in problems:
    p.expected
cpu_attn.set_num_threads(2)
results, barrier = [None] * 64, threading.Barrier(64)
def work(i):
    p = problems[i % len(problems)]
    barrier.wait()
    results[i] = [check(p, *run(p, engine="onednn")) for _ in range(3)]
threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
for t in threads: t.start()
for t in threads: t.join()
print(sum(r.ok for three in results for r in three))
"""


@needs_onednn
def test_64_threads_fill_a_cold_primitive_cache() -> None:
    assert _python(THREADS).split() == [str(3 * 64)]


def test_one_thread_opens_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def load() -> ModuleType:
        opened.append(threading.get_ident())
        time.sleep(0.05)
        return sys

    monkeypatch.setattr(_onednn_loader, "_load", load)
    monkeypatch.setattr(_onednn_loader, "_outcome", functools.cache(_onednn_loader._outcome.__wrapped__))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: _onednn_loader.load(), range(8))) == [sys] * 8
    assert len(opened) == 1


GROWTH = """
import dataclasses, itertools, resource
import numpy as np
from cpu_attn import primitives
from cpu_attn.tests.cases.case import Case
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.run import run
p = build(Case("growth", (1, 20), (90, 600), num_heads=4))
halves = build(Case("growth", (1, 20), (90, 600), num_heads=4, dtype="bfloat16"))
scales = itertools.count(1)
def once():
    run(p, engine="onednn")
    run(dataclasses.replace(halves, scale=next(scales) / 1024), engine="onednn")  # a layer has a scale of its own
    primitives.matmul(np.ones((3, 5), np.float32), np.ones((5, 7), np.float32))
def peak(n):
    for _ in range(n): once()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak(50), peak(250))
"""


@needs_onednn
def test_memory_does_not_grow() -> None:
    before, after = (int(kib) for kib in _python(GROWTH).split())
    assert after - before < 2048


def _child(pipe: Any) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    product, _ = primitives.matmul(a, a, transpose_b=True)
    problem = build(Case("onednn-fork", (5, 30), (77, 30), head_size=52))  # a head size that the parent never had
    pipe.send((np.array_equal(product, a @ a.T), check(problem, *run(problem, engine="onednn")).message))


@needs_onednn
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_new_primitives() -> None:
    parent = build(Case("onednn-fork-parent", (40, 30), (77, 30)))
    run(parent, engine="onednn", num_threads=2)
    primitives.matmul(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32))
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_child, args=(there,))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        assert here.recv() == (True, "")
    finally:
        child.kill()
        child.join()


@needs_onednn
def test_the_callers_thread_count_is_left_alone() -> None:
    """The engine takes oneDNN's team down to one; OpenMP elsewhere in the process keeps its own count."""
    count = ctypes.CDLL(_onednn_loader.describe().library)
    if not hasattr(count, "omp_get_max_threads"):
        pytest.skip("this oneDNN runs without OpenMP")
    before = count.omp_get_max_threads()
    problem = build(cases("quick")[0])
    run(problem, engine="onednn")
    primitives.softmax(np.ones((3, 3), np.float32))
    assert count.omp_get_max_threads() == before


ABSENT = """
import numpy as np
import cpu_attn
from cpu_attn.tests.cases.levels import cases
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.run import run
from cpu_attn.tests.cases.judge import check
engine = {e.name: e for e in cpu_attn.engines()}["onednn"]
assert not engine.available
for use in ("onednn", "onednn-python"):
    try:
        run(build(cases("quick")[0]), engine=use)
    except cpu_attn.UnavailableError as e:
        assert engine.reason in str(e)
    else:
        raise AssertionError(use)
problem = build(cases("quick")[0])
assert check(problem, *run(problem, engine="native")).ok
print(engine.reason)
"""


def test_a_build_without_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever library is there: to install one would not help."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for library in ("", "/nowhere/libdnnl.so.3"):
        monkeypatch.setenv("CPU_ATTN_ONEDNN", library)
        with pytest.raises(cpu_attn.UnavailableError, match=r"^this build has no oneDNN engine: .* anew"):
            _onednn_loader._load()


def test_no_library_says_why(tmp_path: Path) -> None:
    said = _python(ABSENT, CPU_ATTN_ONEDNN=str(tmp_path / "nowhere"))
    assert "CPU_ATTN_ONEDNN" in said and str(tmp_path / "nowhere") in said


def test_a_file_that_is_no_library_says_why(tmp_path: Path) -> None:
    (tmp_path / "libdnnl.so.3").write_text("not a library")
    assert "does not load" in _python(ABSENT, CPU_ATTN_ONEDNN=str(tmp_path))


def test_another_library_says_why() -> None:
    other = ctypes.util.find_library("m")
    path = next((p for p in Path("/lib").glob(f"**/{other}") if p.is_file()), None)
    if path is None:
        pytest.skip("no libm under /lib")
    assert "is not oneDNN" in _python(ABSENT, CPU_ATTN_ONEDNN=str(path))


@pytest.mark.parametrize(
    ("version", "runtime", "why"),
    [
        ((2, 7), 2, "at least 3.2"),
        ((3, 1), 2, "at least 3.2"),
        ((4, 0), 2, "at least 3.2"),
        ((3, 9), 4, "TBB"),
        ((3, 9), 512, "SYCL"),
    ],
)
def test_other_builds_are_refused(version: tuple[int, int], runtime: int, why: str) -> None:
    class Library:
        def __init__(self) -> None:
            said = _onednn_loader._Version(*version, 0, b"", runtime, 0)
            self.dnnl_version = _Function(ctypes.pointer(said))

    class _Function:
        def __init__(self, result: Any) -> None:
            self.result = result

        def __call__(self) -> Any:
            return self.result

    library: Any = Library()
    with pytest.raises(cpu_attn.UnavailableError, match=why):
        _onednn_loader._judge("libdnnl.so.3", library)


@needs_onednn
def test_python_threads_run_primitives_at_once() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((33, 70)), rng.standard_normal((70, 45))
    wrong: list[float] = []

    def work() -> None:
        for _ in range(20):
            c, _ = primitives.matmul(a.astype(np.float32), b.astype(np.float32))
            error = float(np.abs(c - a @ b).max())
            if error > 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
