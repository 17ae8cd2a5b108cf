# SPDX-License-Identifier: Apache-2.0
"""Memory, tasks and threads by NUMA node. Two nodes are faked, in folders as Linux shows them and as numbers of CPUs;
where pages really lie can be seen of one."""

from __future__ import annotations

import copy
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import _numa
from cpu_attn._threads import threads

from ..cases.judge import check, same_bits
from ..cases.levels import invariant
from ..cases.problem import build
from ..cases.run import run
from ..harness.steps import plan_args
from ..programs.numa_engine import Recorder, decode, faked

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is placed on Linux")
SIZES: tuple[Any, ...] = (6, 16, 2, 64)


def has_policies() -> bool:
    try:
        return bool(_numa.memory_nodes())
    except cpu_attn.UnavailableError:
        return False


POLICIES = pytest.mark.skipif(not has_policies(), reason="this system refuses get_mempolicy")


# What there is.


def fake(root: Path, nodes: dict[int, str]) -> Path:
    for node, cpus in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    (root / "sys/devices/system/node").mkdir(parents=True, exist_ok=True)
    (root / "sys/devices/system/node/online").write_text("0-1\n")
    return root


def test_nodes_are_as_linux_lists_them(tmp_path: Path) -> None:
    """Of node 10 memory alone is there."""
    root = fake(tmp_path, {1: "4-5,12\n", 0: "0-3,8-11\n", 10: "\n"})
    found = _numa.read(root)
    assert list(found.items()) == [(0, [0, 1, 2, 3, 8, 9, 10, 11]), (1, [4, 5, 12]), (10, [])]
    assert _numa.read(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("listed", "cpus"),
    [("0-99999999999", 4096), ("-3--1", 0), ("words", 0), ("9-3", 0), ("4095,4096", 1), ("9" * 5000, 0)],
)
def test_lists_that_no_machine_has(tmp_path: Path, listed: str, cpus: int) -> None:
    found = _numa.read(fake(tmp_path, {0: listed, 70: "1"}))
    assert found.keys() == {0} and len(found[0]) == cpus  # CA_NODES and CA_CPUS bound them


@LINUX
def test_this_machine() -> None:
    known = _numa.read()
    if not known:
        pytest.skip("this kernel was built without NUMA")
    of_nodes = [cpu for cpus in known.values() for cpu in cpus]
    assert _numa.cpus() <= set(of_nodes) and len(set(of_nodes)) == len(of_nodes)
    with threads(3):
        assert set(_numa.thread_nodes(3)) <= known.keys()


@pytest.mark.parametrize(
    ("memory", "usable", "numa", "nodes"),
    [
        ([0, 1], {0, 2}, "blocks", (0, 1)),
        ([0, 1], {0, 1}, "blocks", (0,)),  # a cpuset without cpuset.mems: docker run --cpuset-cpus=0,1
        ([0, 1], {0, 1}, "interleave", (0, 1)),
        ([1], {0, 1}, "blocks", (1,)),  # numactl --cpunodebind=0 --membind=1
        ([0, 1, 2], {1, 3}, "blocks", (0, 1)),
        ([0, 2], {0, 3}, "interleave", (0, 2)),
    ],
)
def test_which_nodes_count(
    monkeypatch: pytest.MonkeyPatch, memory: list[int], usable: set[int], numa: str, nodes: tuple[int, ...]
) -> None:
    """Node 2 has no CPUs."""
    monkeypatch.setattr(_numa, "memory_nodes", lambda: memory)
    monkeypatch.setattr(_numa, "cpus", lambda: usable)
    monkeypatch.setattr(_numa, "cpus_of_nodes", lambda: {0: [0, 1], 1: [2, 3], 2: []})
    assert _numa.placement(numa) == _numa.Placement(numa, nodes)


# Where memory lies.


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """Two nodes, 3 and 5, and what has been placed on them: (start, end, nodes)."""
    placed: list[tuple[int, int, list[int]]] = []
    monkeypatch.setattr(_numa, "placement", lambda numa: numa and _numa.Placement(numa, (3, 5)))
    monkeypatch.setattr(
        _numa.Placement, "_place", lambda self, start, end, nodes: placed.append((start, end, list(nodes)))
    )
    return placed


@pytest.mark.parametrize("kv_cache_layout", ["packed", "NHD"])
@pytest.mark.parametrize(("num_blocks", "first"), [(7, 4), (2, 1), (1, 1), (600, 300)])
def test_each_node_has_a_run_of_blocks(
    two_nodes: list[tuple[int, int, list[int]]], num_blocks: int, first: int, kv_cache_layout: str
) -> None:
    cache = cpu_attn.PagedKVCache(num_blocks, 16, 2, 24, numa="blocks", kv_cache_layout=kv_cache_layout)
    assert cache.numa == "blocks" and cache.block_nodes is not None and cache.block_nodes.dtype == np.int32
    assert cache.block_nodes.tolist() == [3] * first + [5] * (num_blocks - first)
    for memory, (low, high) in zip((cache.key_cache, cache.value_cache), (two_nodes[:2], two_nodes[2:]), strict=True):
        start, size = memory.ctypes.data, memory.nbytes
        assert (low[0], low[2], high[1], high[2]) == (start, [3], start + size, [5])
        assert low[1] == high[0] and low[1] % mmap.PAGESIZE == 0
        assert 0 <= start + memory[:first].nbytes - low[1] < mmap.PAGESIZE


def test_copies_lie_as_the_original(two_nodes: list[tuple[int, int, list[int]]]) -> None:
    cache = cpu_attn.PagedKVCache(*SIZES, numa="blocks")
    for copied in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        two_nodes.clear()
        other = copied(cache)
        assert other.numa == "blocks" and np.array_equal(other.block_nodes, cache.block_nodes)
        starts = [start for start, _, nodes in two_nodes if nodes == [3]]
        assert starts == [other.key_cache.ctypes.data, other.value_cache.ctypes.data]
    two_nodes.clear()
    opened = cpu_attn.PagedKVCache.open(cache.descriptor, cache.key_cache, cache.value_cache)
    assert opened.numa is None and opened.block_nodes is None and not two_nodes


def test_no_blocks(two_nodes: list[tuple[int, int, list[int]]]) -> None:
    for numa in ("interleave", "blocks"):
        assert cpu_attn.PagedKVCache(0, *SIZES[1:], numa=numa).key_cache.size == 0


def test_names_that_are_refused() -> None:
    with pytest.raises(ValueError, match="numa: 'local' is none of 'interleave', 'blocks', None"):
        cpu_attn.PagedKVCache(*SIZES, numa="local")
    with pytest.raises(TypeError, match="numa: expected a name or None, got int"):
        cpu_attn.PagedKVCache(*SIZES, numa=0)  # type: ignore[arg-type]


GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
GETAFFINITY = {"x86_64": 204, "aarch64": 123}.get(platform.machine())
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3
NODE, ADDR = 1, 2


def policy(address: int) -> tuple[int, set[int]]:
    """What Linux says of the page there."""
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    answer = ctypes.CDLL(None).syscall(
        GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(1025), ctypes.c_void_p(address), ctypes.c_ulong(ADDR)
    )
    assert answer == 0
    return mode.value, {node for node in range(1024) if mask[node // 64] >> node % 64 & 1}


def node_of(address: int) -> int:
    """On which node the page lies, which somebody has touched."""
    node = ctypes.c_int()
    flags = ctypes.c_ulong(NODE | ADDR)
    at = ctypes.c_void_p(address)
    assert ctypes.CDLL(None).syscall(GET_MEMPOLICY, ctypes.byref(node), None, ctypes.c_ulong(0), at, flags) == 0
    return node.value


@POLICIES
@pytest.mark.skipif(GET_MEMPOLICY is None, reason="the system call's number here is not known")
@pytest.mark.parametrize("num_blocks", [6, 600])  # of NumPy's memory without numa, and of huge pages
def test_pages_have_the_policy(num_blocks: int) -> None:
    nodes = set(_numa.memory_nodes())
    for numa in (None, "interleave", "blocks"):
        cache = cpu_attn.PagedKVCache(num_blocks, *SIZES[1:], numa=numa)
        for memory in (cache.key_cache, cache.value_cache):
            memory[...] = 1
            first, last = memory.ctypes.data, memory.ctypes.data + memory.nbytes - 1
            assert {node_of(first), node_of(last)} <= nodes
            if numa == "interleave":
                assert policy(first) == policy(last) == (INTERLEAVE, nodes)
            elif numa == "blocks":
                of_blocks = nodes if cache.block_nodes is None else set(cache.block_nodes.tolist())
                (_, low), (_, high) = policy(first), policy(last)
                assert policy(first)[0] == policy(last)[0] == PREFERRED
                assert low == {min(of_blocks)} and high == {max(of_blocks)}
            else:
                assert policy(first)[0] == DEFAULT


def _child(cache: cpu_attn.PagedKVCache, pipe: Any) -> None:
    cache.key_cache[...] = 2
    own = cpu_attn.PagedKVCache(*SIZES, numa="interleave")
    pipe.send([policy(c.key_cache.ctypes.data)[0] for c in (cache, own)])


@POLICIES
@pytest.mark.skipif(GET_MEMPOLICY is None, reason="the system call's number here is not known")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_the_policy_too() -> None:
    cache = cpu_attn.PagedKVCache(*SIZES, numa="interleave")
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_child, args=(cache, there))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        assert here.recv() == [INTERLEAVE, INTERLEAVE]
    finally:
        child.kill()
        child.join()


@POLICIES
def test_a_node_that_is_not_there_is_an_error() -> None:
    absent = next(node for node in range(63, -1, -1) if node not in _numa.memory_nodes())
    memory = mmap.mmap(-1, 1 << 16)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    with pytest.raises(cpu_attn.UnavailableError, match=r"numa: this system refuses mbind \(Invalid argument\)"):
        _numa.Placement("blocks", (absent,)).apply(address, 1 << 16, 4)


# A container without the right: its filter answers some system calls with EPERM.
REFUSING = """
import ctypes, struct, sys
import cpu_attn
from cpu_attn import _numa
libc, number = ctypes.CDLL(None), int(sys.argv[1])
load, is_it, error, allow = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in (load, is_it, error, allow)))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
cpu_attn.PagedKVCache(6, 16, 2, 64)
for numa in ("interleave", "blocks"):
    try:
        cpu_attn.PagedKVCache(6, 16, 2, 64, numa=numa)
        print("placed")
    except cpu_attn.UnavailableError as e:
        print(e)
"""


@POLICIES
@pytest.mark.skipif(MBIND is None, reason="the system call's number here is not known")
@pytest.mark.parametrize("name", ["mbind", "get_mempolicy"])
def test_a_system_that_refuses(name: str) -> None:
    number = MBIND if name == "mbind" else GET_MEMPOLICY
    command = [sys.executable, "-c", REFUSING, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"numa: this system refuses {name} (Operation not permitted)") and "SYS_NICE" in line


@pytest.mark.skipif(GETAFFINITY is None, reason="the system call's number here is not known")
def test_a_system_that_does_not_say_where_it_may_run() -> None:
    """By which blocks take to nodes; pages in turns need no CPUs."""
    command = [sys.executable, "-c", REFUSING, str(GETAFFINITY)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2 and (lines[0] == "placed" or "get_mempolicy" in lines[0])
    assert lines[1] == lines[0] or lines[1].startswith("numa: this system refuses sched_getaffinity (Operation not")


def test_info_where_nobody_says_where_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cpu_attn.cli import main

    def refuse(_: int) -> Any:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr("os.sched_getaffinity", refuse)
    monkeypatch.setattr(_numa, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(_numa, "cpus_of_nodes", lambda: {0: [0], 1: [1]})
    with pytest.raises(cpu_attn.UnavailableError, match="numa: this system refuses sched_getaffinity"):
        cpu_attn.PagedKVCache(*SIZES, numa="blocks")
    as_json = CliRunner().invoke(main, ["info", "--json"]).output
    assert [n["usable_cpus"] for n in json.loads(as_json)["numa"]] == [None, None]
    assert "unknown which of 1 cpus" in CliRunner().invoke(main, ["info"]).output


# Which thread takes which task.


@pytest.fixture
def all_on() -> Iterator[Any]:
    """Says on which node all CPUs are."""
    with ExitStack() as stack:
        yield lambda node: stack.enter_context(faked({node: list(range(4096))}))


TABLE = np.arange(24, dtype=np.int32).reshape(4, 6)


def test_a_thread_begins_with_tasks_of_its_node(all_on: Any) -> None:
    """Those of most of whose blocks its node has: of five, request 1 has two on node 0, request 3 has three."""
    nodes = np.array([[0] * 6, [0, 1, 0, 1, 1, 0], [0] * 6, [1, 0, 0, 1, 0, 1]], np.int32).reshape(-1)
    order = {}
    for node in (0, 1):
        all_on(node)
        ran = decode(Recorder(), [80] * 4, TABLE, nodes, 1, 1)
        order[node] = [request for request, _, _ in ran]
    assert order == {0: [0, 2, 3, 1], 1: [1, 0, 2, 3]}


def test_unneeded_blocks_have_no_vote(all_on: Any) -> None:
    """A request of one block, and two of two, the last of which the window hides."""
    all_on(1)
    nodes = np.array([0, 1, 1, 1, 1, 1, *[1, 0, 0, 0, 0, 0] * 3], np.int32)
    ran = decode(Recorder(), [16, 16, 16, 16], TABLE, nodes, 1, 1)
    assert [request for request, _, _ in ran] == [1, 2, 3, 0]


def test_segments_of_a_request_have_nodes_of_their_own(all_on: Any) -> None:
    """A plan for eight threads hands out the segments of the long request; one thread runs them."""
    all_on(1)
    table = np.arange(8 * 64, dtype=np.int32)[None]
    ran = decode(Recorder(), [8 * 1024], table, np.repeat([0, 1, 1, 0, 0, 1, 0, 1], 64), 8, 1)
    assert [segment for _, segment, _ in ran] == [1, 2, 5, 7, 0, 3, 4, 6]


def test_nodes_come_in_turn(all_on: Any) -> None:
    """A thread whose node has no task, as CPUs without memory have none, goes on with the next."""
    for node, order in ((2, [2, 3, 0, 1]), (3, [3, 0, 1, 2])):
        all_on(node)
        ran = decode(Recorder(), [96] * 4, TABLE, np.repeat([0, 1, 2, 4], 6), 1, 1)
        assert [request for request, _, _ in ran] == order


@LINUX
def test_bound_threads_take_what_lies_on_their_node() -> None:
    """On two CPUs that are taken for a node each; nobody waits for a node that is busy."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env["OMP_PLACES"] = f"{{{cpus[0]}}},{{{cpus[-1]}}}"
    command = [sys.executable, "-m", "cpu_attn.tests.programs.numa_engine"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["cpus"] == [cpus[0], cpus[-1]]  # not the first place alone, to which this thread is bound
    if found["threads"] == [0]:
        pytest.skip("no OpenMP")
    assert sorted(found["own"]) == [[r, node] for r, node in enumerate([0, 1, 1, 0, 1, 0, 0, 1])]
    assert [request for request, _ in sorted(found["stolen"])] == list(range(8))
    assert {node for _, node in found["stolen"]} == {0, 1}


# Preloaded, it says on which CPU threads run. C is told that all CPUs, and more than it keeps, are on node 7.
ELSEWHERE = "static int cpu; void elsewhere(int n) { cpu = n; } int sched_getcpu(void) { return cpu; }"
CPUS_PAST_THE_TABLE = """
import ctypes
import numpy as np
from cpu_attn import _numa
from cpu_attn._native import ffi, lib
from cpu_attn.tests.programs.numa_engine import Recorder, decode
_numa.cpus_of_nodes()  # which tells C by itself, once
table, nodes = np.arange(2, dtype=np.int32)[:, None], np.full(lib.CA_CPUS + 2, 7, np.int32)
lib.ca_set_cpu_nodes(ffi.from_buffer("int32_t[]", nodes), len(nodes))
for cpu in (0, lib.CA_CPUS - 1, lib.CA_CPUS, 2**31 - 1, -1):
    ctypes.CDLL(None).elsewhere(cpu)
    print([request for request, _, _ in decode(Recorder(), [16, 16], table, [0, 7], 1, 1)])
"""


@LINUX
def test_cpus_past_the_table_are_on_node_0(tmp_path: Path) -> None:
    """The first one past it is read from other memory where that is not so: only the sanitizers are sure to see it."""
    library = tmp_path / "elsewhere.so"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-xc", "-", "-o", library], input=ELSEWHERE, text=True, check=True)
    env = {**os.environ, "LD_PRELOAD": " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))}
    done = subprocess.run([sys.executable, "-c", CPUS_PAST_THE_TABLE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 0]"] * 2 + ["[0, 1]"] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_nodes(all_on: Any, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    cases = [case for case in invariant("quick", dtype) if not (case.selected_tokens or case.query_block)]
    cases = [case for case in cases if not case.select_by_query_head]
    real = cpu_attn.get_scheduler_metadata
    for i, case in enumerate(cases):
        p = build(case)
        want = run(p, num_threads=1)
        nodes = np.random.default_rng(i).integers(0, 3, p.num_blocks).astype(np.int32)
        given = {"block_table": p.block_table, "block_size": case.block_size, "block_nodes": nodes}
        all_on(i % 3)
        monkeypatch.setattr(cpu_attn, "get_scheduler_metadata", lambda *a, g=given, **k: real(*a, **k | g))
        for n in (1, 3):
            got = run(p, num_threads=n)
            assert same_bits(got[0], want[0]) and same_bits(got[1], want[1]), case.name
        monkeypatch.setattr(cpu_attn, "get_scheduler_metadata", real)
        assert check(p, *got).ok, case.name


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_nodes": np.array([0, 0, 0, 64], np.int32)}, "block_nodes[3]: 64, outside 0..63"),
        ({"block_nodes": np.array([0, 0, -1, 0], np.int32)}, "block_nodes[2]: -1, outside 0..63"),
        ({"block_nodes": np.zeros(3, np.int32)}, "block_table: request 0: position 1 holds block 3, outside 0..2"),
        ({"block_table": np.array([[1, -1], [2, 0]], np.int32)}, "block_table: request 0: position 1 holds block -1"),
        ({"block_table": np.array([[1], [2]], np.int32)}, "block_table: request 0: needs 2 blocks"),
        ({"block_table": None, "block_size": None}, "block_table: is None, block_nodes is given"),
    ],
)
def test_plans_that_are_refused(changed: dict[str, Any], words: str) -> None:
    table = np.array([[1, 3], [2, -7]], np.int32)  # request 1 needs one block
    good = plan_args() | {"block_table": table, "block_size": 16, "block_nodes": np.array([-9, 0, 1, 1], np.int32)}
    cpu_attn.get_scheduler_metadata(**good)
    with pytest.raises(ValueError, match=re.escape(words)):
        cpu_attn.get_scheduler_metadata(**good | changed)


# Blocks of requests.


def manager_of(nodes: list[int]) -> cpu_attn.BlockManager:
    cache = cpu_attn.PagedKVCache(len(nodes), 16, 1, 8)
    cache.block_nodes = np.array(nodes, np.int32)
    return cpu_attn.BlockManager(cache)


def test_a_request_stays_on_a_node() -> None:
    """Requests take turns over the nodes; blocks of the other are taken when there are no more."""
    manager = manager_of([4] * 6 + [2] * 6)
    nodes = manager.caches[0].block_nodes
    assert nodes is not None
    for name in "abcd":
        manager.allocate(name)
    manager.step([(name, range(100 * i, 100 * i + 20)) for i, name in enumerate("abcd")])
    homes = [set(nodes[manager.get_block_ids(name)].tolist()) for name in "abcd"]
    assert homes in ([{2}, {4}, {2}, {4}], [{4}, {2}, {4}, {2}])
    manager.step([("a", range(500, 540))])  # two blocks, which its node has, and one more, which it has not
    assert nodes[manager.get_block_ids("a")].tolist().count(min(homes[0])) == 4
    manager.step([("a", range(600, 616))])
    assert nodes[manager.get_block_ids("a")].tolist().count(min(homes[1])) == 1
    manager.free("b")
    manager.allocate("e")
    manager.step([("e", range(700, 716))])
    assert set(nodes[manager.get_block_ids("e")].tolist()) == homes[1]


def test_a_step_tells_its_plan_where_blocks_lie(all_on: Any) -> None:
    manager, recorder = manager_of([0, 1] * 4), Recorder()
    for name in "abcd":
        manager.allocate(name)
    step = manager.step([(name, range(100 * i, 100 * i + 16)) for i, name in enumerate("abcd")])
    (cache,) = manager.caches
    query = np.zeros((64, 1, 8), np.float32)
    all_on(1)
    with recorder.installed(), threads(1):
        cache.attend(query, step)
    assert [request for request, _, _ in recorder.ran] == [1, 3, 0, 2]
    with threads(1):  # by itself, without a table in the plan
        for selects in ({"max_selected_tokens": 2}, {"query_block_size": 2}, {"select_by_query_head": True}):
            assert step.plan(cache, 1, **selects).num_tokens == 64


def test_info_shows_nodes() -> None:
    from click.testing import CliRunner

    from cpu_attn.cli import main

    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)["numa"]
    known = _numa.read()
    assert {n["node"]: n["cpus"] for n in found} == {node: len(cpus) for node, cpus in known.items()}
    if known:
        assert sum(n["usable_cpus"] for n in found) == len(_numa.cpus())
        assert sum(n["threads"] for n in found) == cpu_attn.get_num_threads()
        assert "NUMA node 0" in CliRunner().invoke(main, ["info"]).output
