# SPDX-License-Identifier: Apache-2.0
"""Many Python threads at once, other thread counts, a child after fork(): the same bits, and no hanging."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import cpu_attn
from cpu_attn._threads import force_num_threads, threads

from ..cases.case import Case
from ..cases.judge import check, same_bits
from ..cases.levels import invariant
from ..cases.problem import Problem, alone, build
from ..cases.run import run
from ..harness.kernels import ONE_DTYPE

ENGINES = [e.name for e in cpu_attn.engines() if e.available]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """More than one thread even on a machine with one core, and however little there is to do."""
    with threads(max(2, os.cpu_count() or 1), forced=True):
        yield


def problem(dtype: str = "float32") -> Problem:
    return build(
        Case(
            name="threads",
            dtype=dtype,
            query_lens=(1, 5, 1, 40),
            seq_lens=(2600, 70, 1030, 40),
            num_heads=6,
            num_kv_heads=2,
            head_size=40,
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_64_python_threads_give_the_bits_of_one(engine: str, dtype: str) -> None:
    p = problem(dtype)
    want = run(p, engine=engine)
    got: list[Any] = [None] * 64
    start = threading.Barrier(64)

    def work(i: int) -> None:
        start.wait()
        got[i] = run(p, engine=engine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=300)
    for output, lse in got:
        assert same_bits(output, want[0])
        assert same_bits(lse, want[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_thread_count_and_split_do_not_change_a_bit(isa: str, dtype: str, engine: str) -> None:
    p = problem(dtype)
    want = run(p, isa, engine, enable_kv_split=False, num_threads=1)
    for n in (1, 2, 3, 8, 64):
        for split in (False, True):
            got = run(p, isa, engine, enable_kv_split=split, num_threads=n)
            assert same_bits(got[0], want[0]), (n, split)
            assert same_bits(got[1], want[1]), (n, split)


def test_split_happens() -> None:
    """Else the test above would compare nothing."""
    lens, start = np.array([8000], np.int32), np.array([0, 1], np.int32)
    force_num_threads(8)
    assert cpu_attn.get_scheduler_metadata(1, 4, 1, 64, lens, "float32", start).num_splits == 1
    off = cpu_attn.get_scheduler_metadata(1, 4, 1, 64, lens, "float32", start, enable_kv_split=False)
    assert off.num_splits == 0


def plan_of(seq_lens: list[int], **options: Any) -> cpu_attn.SchedulerMetadata:
    """Decode, 32/8 heads of 128."""
    lens, start = np.array(seq_lens, np.int32), np.arange(len(seq_lens) + 1, dtype=np.int32)
    return cpu_attn.get_scheduler_metadata(len(lens), 32, 8, 128, lens, "bfloat16", start, **options)


def test_one_long_request_among_short_ones_is_split() -> None:
    """Its items are few and long, however many the short ones are."""
    force_num_threads(16)
    plan = plan_of([32768] + [64] * 31)
    assert plan.num_splits == 1
    assert plan.num_tasks == 32 + 31
    assert plan_of([2048] * 32).num_splits == 0


def test_the_longest_task_comes_first_and_nothing_is_lost() -> None:
    """Every length once, in the worst order, split and not."""
    force_num_threads(8)
    lens = [int(s) for s in np.random.default_rng(0).permutation(np.arange(0, 6000, 100))]
    case = Case(name="lengths", dtype="float32", query_lens=(1,) * 60, seq_lens=tuple(lens), head_size=8)
    p = build(case)
    want = run(p, enable_kv_split=False, num_threads=1)
    got = run(p, num_threads=8)
    assert same_bits(got[0], want[0])
    assert check(p, *got).ok


def test_little_work_takes_few_threads() -> None:
    cpu_attn.set_num_threads(64)
    assert plan_of([16]).num_threads == 1
    assert 1 < plan_of([2048]).num_threads < 64
    assert plan_of([32768] * 64).num_threads == 64
    force_num_threads(64)
    assert plan_of([16]).num_threads == 64


def test_no_more_threads_than_a_process_may_have() -> None:
    """libgomp would end it."""
    most = max(64, 8 * len(os.sched_getaffinity(0)))
    cpu_attn.set_num_threads(4096)
    assert cpu_attn.get_num_threads() == most
    cpu_attn.set_num_threads(0)
    with threadpoolctl.threadpool_limits(4096, user_api="openmp"):
        assert cpu_attn.get_num_threads() == most


def test_the_workspace_is_for_the_threads_that_a_call_uses() -> None:
    cpu_attn.set_num_threads(64)
    assert plan_of([16]).workspace_bytes < plan_of([2048] * 64).workspace_bytes / 32


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_a_request_alone_gives_the_bits_of_its_rows_in_a_batch(isa: str, dtype: str, engine: str) -> None:
    for case in invariant("quick", dtype):
        p = build(case)
        output, lse = run(p, isa, engine)
        loc = p.query_start_loc
        for r in range(len(p.seq_lens)):
            own, own_lse = run(alone(p, r), isa, engine)
            assert same_bits(own, output[loc[r] : loc[r + 1]]), (case.name, r)
            assert same_bits(own_lse, lse[:, loc[r] : loc[r + 1]]), (case.name, r)


def test_a_plan_is_shared_by_threads_and_outlives_a_change_of_their_number() -> None:
    from ..harness.steps import attention_args

    args = attention_args()
    cpu_attn.attention_with_kv_cache(**args)
    want = args["output"].copy()
    for n in (1, 2, 7):
        force_num_threads(n)
        args["output"][:] = 0
        cpu_attn.attention_with_kv_cache(**args)
        assert np.array_equal(args["output"], want)


def _child(engine: str, dtype: str, want: Any, pipe: Any) -> None:
    output, lse = run(problem(dtype), engine=engine)
    pipe.send((same_bits(output, want[0]), same_bits(lse, want[1]), cpu_attn.get_num_threads()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_computes_and_does_not_hang(engine: str, dtype: str) -> None:
    want = run(problem(dtype), engine=engine)  # the parent's OpenMP threads exist from here on
    fork = multiprocessing.get_context("fork")
    for _ in range(3):
        here, there = fork.Pipe()
        child = fork.Process(target=_child, args=(engine, dtype, want, there))
        child.start()
        try:
            assert here.poll(60), "the child hangs"
            assert here.recv() == (True, True, 1)
        finally:
            child.kill()
            child.join()


def test_what_was_asked_for_is_so_again() -> None:
    """Whoever asked: however little there is to do, or as many as OpenMP says."""
    force_num_threads(5)
    run(problem(), num_threads=2)
    with threads(64):
        assert plan_of([16]).num_threads == 1
    assert plan_of([16]).num_threads == 5
    cpu_attn.set_num_threads(0)
    run(problem(), num_threads=2)
    with threadpoolctl.threadpool_limits(3, user_api="openmp"):
        assert cpu_attn.get_num_threads() == 3
        assert plan_of([16]).num_threads == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_call_leaves_openmp_its_number(engine: str) -> None:
    """Of this thread, on which a small call runs. oneDNN is to compute on one, on which all that follows would stay."""
    small = build(Case("small", (1,), (16,)))
    cpu_attn.set_num_threads(0)
    with threadpoolctl.threadpool_limits(3, user_api="openmp"):
        run(small, engine=engine)
        assert cpu_attn.get_num_threads() == 3


def test_openmp_is_controlled_from_outside() -> None:
    cpu_attn.set_num_threads(0)
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert cpu_attn.get_num_threads() == 1
    done = subprocess.run(
        [sys.executable, "-c", "import cpu_attn; print(cpu_attn.get_num_threads())"],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3"


# libgomp keeps 64 bits of the number and hands out the lower 32: 2^31 reads as -2^31, 2^32 as 0, 2^63 - 1 as -1.
@pytest.mark.parametrize("number", [100_000, 2**31, 2**32, 2**63 - 1])
def test_more_threads_than_can_be_had(number: int) -> None:
    """No number in OMP_NUM_THREADS ends a call, and none is given back smaller than it was."""
    script = f"""
import numpy as np, cpu_attn
from cpu_attn import sparse
from click.testing import CliRunner
from cpu_attn.cli import main
asked = cpu_attn.get_num_threads()
loc, lens, table = np.array([0, 40], np.int32), np.array([64], np.int32), np.arange(4, dtype=np.int32)[None]
query, cache = np.ones((40, 2, 32), np.float32), cpu_attn.PagedKVCache(4, 16, 2, 32, "float32")
keys = np.zeros(sparse.get_index_cache_shape(4, 16, 32, "float32"), np.float32)
for engine in {ENGINES}:
    cache.update(query, query, np.arange(40))
    cache.attend(query, table, cache.plan(loc, lens, 2, engine=engine))
sparse.select_tokens(query, keys, np.ones((40, 2), np.float32), loc, lens, table, 8)
sparse.score_blocks(query, *[np.ones((4, 2, 32), np.float32)] * 2, table, lens, loc, 16)
cpu_attn.merge_states([np.ones((400, 4, 512), np.float32)] * 8, [np.zeros((4, 400), np.float32)] * 8)
info = CliRunner().invoke(main, ["info"], catch_exceptions=False)
print(asked, cpu_attn.get_num_threads(), info.exit_code)
"""
    env = {**os.environ, "OMP_NUM_THREADS": str(number)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    most = max(64, 8 * len(os.sched_getaffinity(0)))
    assert (done.returncode, done.stdout.split()) == (0, [str(most), str(most), "0"]), done.stderr


# Of the variable before Python starts: OpenMP reads it once.
SMALL_STACK = """
import numpy as np, cpu_attn
from cpu_attn import sparse
from cpu_attn._threads import force_num_threads
force_num_threads(2)
key = np.ones((64, 2, 32), np.float32)
cache = cpu_attn.PagedKVCache(8, 16, 2, 32, "float32", "scalar")
table, lens, starts = np.arange(4, dtype=np.int32)[None], np.array([64], np.int32), np.array([0, 1], np.int32)
bounds = [np.ones((8, 2, 32), np.float32)] * 2
calls = {
    "write": lambda: cache.update(key, key, np.arange(64)),
    "attend": lambda: cache.attend(key[:1], table, cache.plan(starts, lens, 2)),
    "score": lambda: sparse.score_blocks(key[:1], *bounds, table, lens, starts, 16),
}
for name, call in calls.items():
    try:
        call()
        print(name, "answered")
    except RuntimeError as e:
        print(name, str(e).split(":")[0])
force_num_threads(1)
for call in calls.values():
    call()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how large a thread's stack is, is asked on Linux")
@pytest.mark.parametrize(("size", "answer"), [("16k", "OMP_STACKSIZE"), ("48k", "OMP_STACKSIZE"), ("64k", "answered")])
def test_threads_with_little_stack_are_refused(size: str, answer: str) -> None:
    env = {**os.environ, "OMP_STACKSIZE": size}
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == [f"{name} {answer}" for name in ("write", "attend", "score")]
