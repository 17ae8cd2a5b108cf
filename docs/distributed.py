# SPDX-License-Identifier: Apache-2.0
"""What docs/distributed.md measures, and its picture.

    python docs/distributed.py gloo               # two ranks of this machine; so does ray
    mpiexec -n 2 python docs/distributed.py mpi
    python docs/distributed.py draw               # docs/distributed.svg, by the numbers below

gloo and MPI need two cores, Ray its package besides torch's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from math import ceil, log2
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
MESSAGE = 4 * HEADS * (HEAD_SIZE + 1)  # bytes of a rank, a token and a layer: output and lse in float32
KEY = 2 * KV_HEADS * HEAD_SIZE * 2  # bytes of K and V in bfloat16
KEYS = 2**20
"""Measured by the above, of two ranks on two cores: microseconds until both have a message of 4 bytes, and of MESSAGE;
microseconds of merging one rank's part; GB/s at which one machine reads keys in decode."""
MEASURED: dict[str, tuple[float, float]] = {"gloo": (177, 192), "MPI": (3.6, 10.0), "Ray": (230, 239)}
MERGE, READ = 0.95, 32.0
CALL, LAYERS = 793, 32  # Ray's owner calls the actors once a token: microseconds, and layers that share them


def times(what: Callable[[], Any], number: int = 2000) -> float:
    """Microseconds of a call: the tenth part of the calls are faster, so that it counts little what else runs."""
    found = [perf_counter()]
    for _ in range(number):
        what()
        found.append(perf_counter())
    return float(np.quantile(np.diff(found), 0.1)) * 1e6


def measure(name: str, group: Any) -> str:
    """Of one rank, while the others do the same."""
    sizes = (4, MESSAGE)
    small, large = (times(partial(group.all_gather, np.zeros(size, np.uint8))) for size in sizes)
    return f"{name}, {group.world_size} ranks: {small:.1f} us for 4 bytes, {large:.1f} us for {MESSAGE}"


def measure_merge() -> str:
    from cpu_attn.ops import merge_stacked

    def merging(ranks: int) -> float:
        outs, lses = np.zeros((ranks, 1, HEADS, HEAD_SIZE), np.float32), np.zeros((ranks, HEADS, 1), np.float32)
        out, lse = outs[0].copy(), lses[0].copy()
        return times(lambda: merge_stacked(outs, lses, out, lse))

    return f"merging: {merging(2):.1f} us for 2 ranks, {(merging(34) - merging(2)) / 32:.2f} us for one more"


def measure_reading(keys: int = 2**17) -> str:
    from cpu_attn import PagedKVCache

    cache = PagedKVCache(keys // 64, 64, KV_HEADS, HEAD_SIZE, "bfloat16")
    for memory in (cache.key_cache, cache.value_cache):
        memory.fill(1)  # pages that nobody has written are one page of zeros
    query = np.zeros((1, HEADS, HEAD_SIZE), cache.dtype)
    plan = cache.plan(np.array([0, 1], np.int32), np.array([keys], np.int32), HEADS)
    table, output = np.arange(keys // 64, dtype=np.int32)[None], np.empty_like(query)
    us = times(lambda: cache.attend(query, table, plan, output=output), 30)
    return f"attention: {keys} keys in {us:.0f} us, {keys * KEY / us / 1e3:.1f} GB/s"


def layer_ms(name: str, machines: int, network: float = 0.0) -> float:
    """Of one token and layer over KEYS keys. gloo passes messages along a ring, in machines - 1 rounds; MPI doubles
    what a rank has in each round. network: microseconds of a round besides those within a machine."""
    small, large = MEASURED[name]
    rounds = ceil(log2(machines)) if name == "MPI" else machines - 1
    collective = rounds * (small + network) + (machines - 1) * (large - small)
    collective += machines * MERGE + (CALL / LAYERS if name == "Ray" else 0)
    return (KEYS / machines * KEY / READ / 1e3 + (collective if machines > 1 else 0)) / 1e3


@click.group()
def main() -> None:
    """Measure on this machine, or draw."""


@main.command()
def gloo() -> None:
    import torch.distributed as dist
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_gloo_rank, (dist, f"file://{folder}/meeting"), nprocs=2, start_method="fork")
    click.echo(measure_merge())
    click.echo(measure_reading())


def _gloo_rank(rank: int, dist: Any, meeting: str) -> None:
    from cpu_attn.distributed.gloo import GlooGroup

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    said = measure("gloo", GlooGroup())
    if rank == 0:
        click.echo(said)
    dist.destroy_process_group()


@main.command()
def mpi() -> None:
    from cpu_attn.distributed.mpi import MPIGroup

    group = MPIGroup()
    said = measure("MPI", group)
    if group.rank == 0:
        click.echo(said)


@main.command()
def ray() -> None:
    import ray

    class Rank:
        def __init__(self, rank: int) -> None:
            from cpu_attn.distributed.ray import RayGroup

            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self.group = RayGroup(rank, 2)

        def measure(self) -> str:
            return measure("Ray", self.group)

        def nothing(self) -> None:
            pass

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    actors = [ray.remote(Rank).remote(rank) for rank in range(2)]
    click.echo(ray.get([actor.measure.remote() for actor in actors])[0])
    call = times(lambda: ray.get([actor.nothing.remote() for actor in actors]), 300)
    click.echo(f"Ray: {call:.0f} us to call both actors")
    ray.shutdown()


@main.command()
def draw() -> None:
    """Draw docs/distributed.svg, and print what is drawn as a table."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cpu-attn"  # the same bytes every time
    from matplotlib import pyplot as plt

    machines = [1, 2, 4, 8, 16, 32, 64]
    for n in machines:
        click.echo("| " + " | ".join([str(n), *(f"{layer_ms(name, n):.1f} ms" for name in MEASURED)]) + " |")
    click.echo(f"gloo is fastest on {min(range(1, 65), key=lambda n: layer_ms('gloo', n))} machines")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, colour in zip(MEASURED, ("#1d7874", "#ee2e31", "#f4a261"), strict=True):
        axes.plot(machines, [layer_ms(name, n) for n in machines], color=colour, marker="o", label=name)
        axes.plot(machines, [layer_ms(name, n, 25) for n in machines], color=colour, linestyle="--")
    axes.plot(machines, [layer_ms("gloo", 1) / n for n in machines], color="#495057", linewidth=1, label="keys alone")
    axes.set(xscale="log", yscale="log", xlabel="machines", ylabel="ms a token and layer", xticks=machines)
    axes.set_xticklabels(machines)
    axes.minorticks_off()
    axes.set_title(
        "2^20 keys of bfloat16, 32 heads over 8: by measured parts\n(dashed: 25 us more a round)", fontsize=10
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
