# SPDX-License-Identifier: Apache-2.0
"""Context parallel over processes that gloo connects: equal to the oracle of the undivided problem on every rank, and
an error where a rank dies, hangs or cannot be reached."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn.distributed import RankError

from ..cases.judge import check
from ..cases.levels import cases
from ..cases.problem import Problem, build
from ..harness.forked import run, separate_hosts, unplug
from ..harness.ranks import merged, spreads
from ..harness.snippets import ROOT, printed
from ..harness.snippets import run as run_snippets

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations

from cpu_attn.distributed.gloo import GlooGroup  # noqa: E402

SPLITS = {2: 1, 3: 16, 4: 5}  # ranks and interleave
TIMEOUT = 1.5
LATEST = 15.0  # seconds, on a machine that has other things to do


def group(rank: int, world_size: int, folder: Path, timeout: float = 30.0) -> GlooGroup:
    """Of processes that meet in a file."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world_size)
    return GlooGroup(timeout=timeout)


@cache
def problems() -> list[Problem]:
    return [build(case) for i, case in enumerate(filter(spreads, cases("quick", "bfloat16"))) if i % 3 == 0]


@pytest.mark.parametrize("world_size", SPLITS)
def test_cases(world_size: int, tmp_path: Path) -> None:
    built = problems()  # before the ranks are forked

    def work(rank: int) -> list[tuple[Any, Any]]:
        ranks = group(rank, world_size, tmp_path)
        return [merged(problem, ranks, SPLITS[world_size]) for problem in built]

    first, *others = run(world_size, work)
    checked = [check(p, *x) for p, x in zip(built, first, strict=True)]
    failed = [c.message for c in checked if not c.ok]
    assert not failed, "\n".join(failed)
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert x[0].tobytes() == y[0].tobytes() and x[1].tobytes() == y[1].tobytes()


def error_of(ranks: GlooGroup) -> tuple[str, float]:
    """What a rank is told that goes on, and after how many seconds; from then on it is told the same at once."""
    begin = time.monotonic()
    with pytest.raises(RankError) as error:
        ranks.all_gather(np.ones(4096, np.float32))
    seconds = time.monotonic() - begin
    with pytest.raises(RankError) as again:
        ranks.barrier()
    assert str(again.value) == str(error.value)
    return str(error.value), seconds


def lose(how: Callable[[], Any], folder: Path, hosts: list[str] | None = None) -> list[Any]:
    """Three ranks that have met once, of which rank 1 then is lost: what the others are told."""

    def work(rank: int) -> tuple[str, float]:
        ranks = group(rank, 3, folder, TIMEOUT)
        assert ranks.all_gather(np.array([rank])).tolist() == [[0], [1], [2]]
        if rank == 1:
            how()
        return error_of(ranks)

    return run(3, work, hosts, lost=1, seconds=LATEST)


def check_lost(found: list[Any]) -> None:
    (text, seconds), nothing, (other, later) = found
    assert nothing is None and max(seconds, later) < LATEST
    for rank, said in ((0, text), (2, other)):
        assert said.startswith(f"rank {rank} of 3: no message of every other rank within 1.5 s, one is dead or hangs (")


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost(signal_: signal.Signals, tmp_path: Path) -> None:
    """Killed, or stopped where it is."""
    check_lost(lose(lambda: os.kill(os.getpid(), signal_), tmp_path))


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    try:
        made = separate_hosts(3)
        names = made.__enter__()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces cannot be made here, which takes root and the program ip: {error}")
    yield names
    made.__exit__(None, None, None)


def test_separate_hosts(hosts: list[str], tmp_path: Path) -> None:
    """Each with an address of its own; then one is unplugged, which nobody is told of."""

    built = problems()[:10]

    def work(rank: int) -> list[tuple[Any, Any]]:
        ranks = group(rank, 3, tmp_path)
        return [merged(problem, ranks, 16) for problem in built]

    for found in run(3, work, hosts):
        assert all(check(p, *x).ok for p, x in zip(built, found, strict=True))
    (tmp_path / "again").mkdir()
    check_lost(lose(lambda: (unplug(hosts, 1), time.sleep(60)), tmp_path / "again", hosts))


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank and two say the same."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one, two = printed("long_context", "--quick")
    assert re.match(r"ranks 1: [\d.]+ tokens/s, 1000 of 1000 tokens a rank, says \[", one)
    assert two.startswith("ranks 2: ") and one.partition("says")[2] == two.partition("says")[2]


MPI_RANK = """
import os, signal, sys, time
import numpy as np
from cpu_attn.distributed import RankError
from cpu_attn.distributed.mpi import MPIGroup

group = MPIGroup(timeout=1.5)
assert group.all_gather(np.arange(3) + group.rank).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
if group.rank == 1 and sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if group.rank == 1 and sys.argv[1] == "hangs":
    time.sleep(60)
try:
    group.barrier()
    print("all came", flush=True)
except RankError as error:
    print(error, flush=True)
    time.sleep(2)  # mpiexec ends the others with the first one
    os._exit(1)  # MPI's own end would wait for the rank that is lost
"""


@pytest.mark.parametrize("what", ["lives", "dies", "hangs"])
def test_mpi(what: str, tmp_path: Path) -> None:
    """mpiexec ends a job of which a rank dies; a rank that hangs is an error on the others."""
    pytest.importorskip("mpi4py")
    (tmp_path / "rank.py").write_text(MPI_RANK)
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    command = [str(mpiexec), "-n", "3", sys.executable, str(tmp_path / "rank.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert bool(done.returncode) == (what != "lives"), done.stderr
    assert done.stdout.count("all came") == (3 if what == "lives" else 0)
    told = re.findall(r"rank (\d) of 3: no message of every other rank within 1\.5 s", done.stdout)
    assert sorted(told) == (["0", "2"] if what == "hangs" else [])


RAY_RANKS = """
import os
import ray
from cpu_attn.tests.cases.levels import cases
from cpu_attn.tests.cases.problem import build
from cpu_attn.tests.cases.judge import check

problem = next(build(case) for case in cases("quick", "bfloat16") if case.name == "mixed-everything")


class Rank:
    def __init__(self, rank):
        from cpu_attn.distributed.ray import RayGroup

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.group = RayGroup(rank, 3, timeout=1.5)

    def attend(self):
        from cpu_attn.tests.harness.ranks import merged

        return merged(problem, self.group, 16)

    def die(self):
        os._exit(1)

    def error(self):
        from cpu_attn.distributed import RankError

        try:
            self.group.barrier()
        except RankError as error:
            return str(error)


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
actors = [ray.remote(Rank).remote(rank) for rank in range(3)]
found = ray.get([actor.attend.remote() for actor in actors], timeout=60)
assert all(check(problem, *x).ok and x[0].tobytes() == found[0][0].tobytes() for x in found)
actors[1].die.remote()
print(*ray.get([actors[rank].error.remote() for rank in (0, 2)], timeout=30), sep="\\n")
"""


def test_ray(tmp_path: Path) -> None:
    """Actors are ranks; where one dies, the others get an error."""
    pytest.importorskip("ray")
    (tmp_path / "ranks.py").write_text(RAY_RANKS)
    done = subprocess.run([sys.executable, tmp_path / "ranks.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank (\d) of 3: no message of every other rank within 1\.5 s", done.stdout)
    assert said == ["0", "2"], done.stdout


def test_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that torch's launcher has told that it is the only one computes what the threads of the guide do."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    try:
        *_, names = run_snippets(ROOT / "docs" / "distributed.md")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert isinstance(names["output"], np.ndarray) and np.allclose(names["output"], names["outputs"][0], atol=1e-6)
