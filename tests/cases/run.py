# SPDX-License-Identifier: Apache-2.0
"""A problem by the public calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import compose
from cpu_attn._threads import threads

from .formats import numpy_dtype
from .memory import caches_of, copy_of, forbid_outside, wider, write
from .problem import Problem


class Written(NamedTuple):
    """What a problem's writes leave behind: queries, rotated if the case says so, and caches."""

    query: NDArray[Any]
    key_cache: NDArray[Any]
    value_cache: NDArray[Any]


def written(problem: Problem, isa: str = "auto", num_threads: int | None = None) -> Written:
    with _threads(num_threads):
        key_cache, value_cache = caches_of(problem, isa)
        return Written(write(problem, isa, key_cache, value_cache), key_cache, value_cache)


def run(
    problem: Problem,
    isa: str = "auto",
    engine: str = "auto",
    enable_kv_split: bool = True,
    num_threads: int | None = None,
    memory: Written | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Output [T, Hq, Dv] and lse [Hq, T] by the public calls. engine "onednn-python" is cpu_attn.compose.attention,
    for cases that are composable. num_threads: so many, however little there is to do. memory: what was written before
    for this isa."""
    memory = memory or written(problem, isa, num_threads)
    with _threads(num_threads):
        return _attend(problem, memory, isa, engine, enable_kv_split)


def _threads(num_threads: int | None) -> AbstractContextManager[None]:
    return nullcontext() if num_threads is None else threads(num_threads, forced=True)


def _attended(problem: Problem) -> NDArray[np.int32]:
    """The block table, -1 for blocks of a request of which no head, or no query token, selects what it sees, without
    the columns past all that are."""
    case = problem.case
    table: NDArray[np.int32] = problem.block_table.copy()
    needed: list[list[int]] = [[] for _ in table]
    if problem.selected_blocks is not None:
        lists = iter(problem.selected_blocks)
        for r, blocks in enumerate(needed):
            mask = case.mask(r) | bool(case.tree)  # blocks are needed whatever the tree hides
            tokens = case.query_block or max(1, len(mask))
            for first, own in zip(range(0, case.lists(r) * tokens, tokens), lists, strict=False):
                seen = np.flatnonzero(mask[first : first + tokens].any(axis=0)) // case.block_size
                blocks += np.intersect1d(own, seen).tolist()
    elif problem.selected_tokens is not None and not case.tree:
        rows = iter(problem.selected_tokens)
        for r, blocks in enumerate(needed):
            for mask, own in zip(case.mask(r), rows, strict=False):
                keys = own[own >= 0]
                blocks += (keys[mask[keys]] // case.block_size).tolist()
    else:
        return table
    for row, blocks in zip(table, needed, strict=True):
        row[~np.isin(np.arange(len(row)), blocks)] = -1
    return table[:, : np.flatnonzero((table >= 0).any(axis=0)).max(initial=-1) + 1]


def _attend(
    problem: Problem, memory: Written, isa: str, engine: str, enable_kv_split: bool
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    case, dtype = problem.case, numpy_dtype(problem.case.dtype)
    query = copy_of(memory.query, case.strided)
    output = wider((len(query), case.num_heads, case.value_size), dtype, case.strided)
    lse = wider((case.num_heads, len(query)), np.dtype(np.float32), case.strided)
    common: dict[str, Any] = {
        "query": query,
        "key_cache": memory.key_cache,
        "value_cache": memory.value_cache,
        "output": output,
        "query_start_loc": problem.query_start_loc,
        "seq_lens": problem.seq_lens,
        "scale": problem.scale,
        "causal": case.causal,
        "alibi_slopes": problem.alibi_slopes,
        "sliding_window": case.sliding_window,
        "block_table": _attended(problem),
        "softcap": case.softcap,
        "s_aux": problem.s_aux,
        "dynamic_causal": problem.dynamic_causal,
        "k_scale": problem.scales[0],
        "v_scale": problem.scales[1],
        "kv_cache_dtype": case.kv_cache_dtype,
        "lse": lse,
        "kv_cache_layout": case.kv_cache_layout,
    }
    if engine == "onednn-python":
        assert case.composable, case.name
        compose.attention(**common, isa=isa)
    else:
        cpu_attn.attention_with_kv_cache(
            **common,
            scheduler_metadata=plan_of(problem, isa, engine, enable_kv_split),
            selected_blocks=problem.selected_blocks,
            selected_tokens=problem.selected_tokens,
            kv_cache_rotation=case.kv_cache_rotation,
            attn_bias=None if problem.attn_bias is None else copy_of(problem.attn_bias, case.strided),
        )
    forbid_outside("output", output, case.strided)
    forbid_outside("lse", lse, case.strided)
    return output, lse


def plan_of(problem: Problem, isa: str, engine: str, enable_kv_split: bool) -> cpu_attn.SchedulerMetadata:
    case, tokens = problem.case, problem.selected_tokens
    return cpu_attn.get_scheduler_metadata(
        len(problem.seq_lens),
        case.num_heads,
        case.num_kv_heads,
        case.head_size,
        problem.seq_lens,
        numpy_dtype(case.dtype),
        problem.query_start_loc,
        case.causal,
        case.sliding_window,
        isa,
        enable_kv_split,
        problem.dynamic_causal,
        case.kv_cache_dtype,
        head_size_v=case.value_size,
        engine=engine,
        **case.masks,
        block_table=problem.block_table if case.shared else None,
        block_size=case.block_size if case.shared else None,
        kv_cache_layout=case.kv_cache_layout,
        kv_cache_rotation=case.kv_cache_rotation,
        max_selected_tokens=None if tokens is None else max(1, tokens.shape[1]),
        query_block_size=case.query_block,
        select_by_query_head=case.select_by_query_head,
    )
