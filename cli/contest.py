# SPDX-License-Identifier: Apache-2.0
"""This module says who runs a workload in ``cpu-attn bench``: a call to time, and what bounds it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cpu_attn
from cpu_attn import _onednn_loader, _threads, compose, sparse
from cpu_attn.cli import linear
from cpu_attn.cli.limits import Limit, best_isa, products
from cpu_attn.cli.rivals import RIVALS
from cpu_attn.cli.workloads import Step, Workload

PLANNED = ("native", "onednn", "reference")  # these have a plan of get_scheduler_metadata
ENGINES = ("native", "onednn", "onednn-python", "reference")
LEAST_BYTES = 2**16  # a limit is measured over no less


@dataclass(frozen=True)
class Contestant:
    """Holds what runs a workload. engine: of ENGINES or RIVALS; isa: of ours, None for others; threads: how many it was
    made for and runs on; limits: the fastest of them bounds it; roof: where it computes a layer, its products and
    reads or copies, of which the slower binds it; call: one run, for which all is made that can be made before."""

    step: Step
    engine: str
    isa: str | None
    threads: int
    limits: tuple[Limit, ...]
    roof: tuple[Limit, ...]
    workspace_bytes: int | None
    call: Callable[[], Any]


def missing(engine: str, isa: str, dtype: str, head_sizes: Iterable[int] = (16,)) -> str:
    """Says why a combination cannot run here, "" if it can."""
    try:
        if engine in RIVALS:
            RIVALS[engine].load()
        planned = {"onednn-python": "onednn", **dict.fromkeys(RIVALS, "native")}.get(engine, engine)
        none = np.zeros(0, np.int32)
        for size in head_sizes:
            cpu_attn.get_scheduler_metadata(0, 1, 1, size, none, dtype, np.zeros(1, np.int32), isa=isa, engine=planned)
    except (cpu_attn.UnavailableError, ImportError, ValueError) as error:
        return str(error)
    return ""


def unable(
    engine: str, workload: Workload, kv_cache_dtype: str, block_size: int, kv_cache_rotation: str = "none"
) -> str:
    """Says what of a workload an engine has no notion of, "" if nothing."""
    name, odd = engine, []
    if engine in RIVALS:
        name, odd = RIVALS[engine].name, RIVALS[engine].lacks(workload, kv_cache_dtype, block_size)
    elif workload.linear:
        odd = ["linear attention"] * (engine not in ("native", "reference"))
    elif engine == "onednn-python":
        odd = [what for what in ("attn_bias", "tree", "selected", "topk_tokens") if getattr(workload, what)]
        odd += ["kv_cache_rotation"] * (kv_cache_rotation != "none")
    return f"{name} has no {' and no '.join(odd)}" if odd else ""


def takes_part(engines: Sequence[str], kind: str) -> list[str]:
    """Lists the engines that have something to do. Whichever engine reads a cache, reshape_and_cache writes it: it runs
    once, as native."""
    here = [engine for engine in engines if engine not in RIVALS or kind in RIVALS[engine].kinds]
    if kind == "write":
        return ["native", *(engine for engine in here if engine in RIVALS)]
    if kind == "plan":
        return [engine for engine in here if engine in PLANNED or engine in RIVALS]
    return here


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Sets the number of our threads and of the rivals', and on leaving sets what was there before."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    with _threads.threads(n):
        if torch:
            torch.set_num_threads(n)
        try:
            yield
        finally:
            if torch:
                torch.set_num_threads(before)


def contestants(step: Step, engines: Sequence[str], num_threads: int) -> list[Contestant]:
    found = []
    with threads(num_threads):  # plans depend on their number
        for engine in takes_part(engines, step.workload.kind):
            call, workspace_bytes, isa = _prepare(step, engine)
            limits, roof = _limits(step, engine, isa, num_threads)
            found.append(Contestant(step, engine, isa, num_threads, limits, roof, workspace_bytes, call))
    return found


def _limits(step: Step, engine: str, isa: str | None, threads: int) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    """Gives limits and roof of a Contestant."""
    w = step.workload
    num_bytes = max(w.kv_bytes(step.itemsize), LEAST_BYTES)
    copies = Limit("memcpy_gbps", threads, num_bytes=num_bytes)
    if w.kind == "write":
        return (copies,), ()
    if not w.linear and w.kind not in ("prefill", "decode", "cascade"):
        return (), ()
    if engine != "native":
        isa = best_isa(step.dtype, _uses_matrix(engine, step))
    multiplies = products(isa, step.dtype, threads)
    if w.linear:
        return tuple(multiplies) if w.kind == "linear-prefill" else (copies,), (*multiplies, copies)
    reads = Limit("read_gbps", threads, num_bytes=num_bytes)
    is_read = w.kind == "decode" and not w.latent_rank  # latent rows serve so many heads that products limit them
    return (reads,) if is_read else tuple(multiplies), (*multiplies, reads)


def _uses_matrix(engine: str, step: Step) -> bool:
    """Says whether it may multiply on the matrix unit, where there is one. oneDNN says itself what it took."""
    if engine == "onednn" and step.dtype in ("bfloat16", "float32"):
        return "amx" in getattr(_onednn_loader.describe(), step.dtype)
    return engine in RIVALS and RIVALS[engine].uses_matrix(step)


def _prepare(step: Step, engine: str) -> tuple[Callable[[], Any], int | None, str | None]:
    """Gives the call, the memory that it needs besides, and the isa, where it is ours."""
    if engine in RIVALS:
        return RIVALS[engine].call(step), None, None
    if step.workload.linear:
        return linear.prepare(step, engine)
    plan = step.plan("native" if engine == "onednn-python" else engine)
    if step.workload.kind == "plan":
        return partial(step.plan, engine), plan.workspace_bytes, plan.isa
    if step.workload.kind == "write":
        tokens = (*step.key_value(0), step.cache.key_cache, step.cache.value_cache, step.slots(0))
        how: Any = {"isa": plan.isa, "kv_cache_dtype": step.kv_cache_dtype}
        how |= {"kv_cache_layout": step.kv_cache_layout, "kv_cache_rotation": step.kv_cache_rotation}
        if not step.workload.rotary:
            return partial(cpu_attn.reshape_and_cache, *tokens, **how), None, plan.isa
        rotary = (np.arange(len(step.query)), step.cos_sin_cache)
        return partial(cpu_attn.rotary_reshape_and_cache, step.query, *tokens, *rotary, **how), None, plan.isa
    arguments = step.arguments()
    if engine == "onednn-python":
        return partial(compose.attention, **arguments, isa=plan.isa), None, plan.isa
    call = partial(cpu_attn.attention_with_kv_cache, **arguments, scheduler_metadata=plan)
    if step.workload.topk_tokens:
        call = partial(_select_and_attend, step.indexer, call)
    return call, plan.workspace_bytes, plan.isa


def _select_and_attend(indexer: dict[str, Any], attend: Callable[..., Any]) -> Any:
    return attend(selected_tokens=sparse.select_tokens(**indexer))
