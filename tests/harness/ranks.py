# SPDX-License-Identifier: Apache-2.0
"""A problem whose keys are spread over ranks: what each rank writes and attends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn.distributed import Group

from ..cases.case import Case
from ..cases.formats import numpy_dtype
from ..cases.memory import forbid_outside, wider
from ..cases.problem import Problem
from ..cases.run import written

Ranks = tuple[int, int, int]  # cp_world_size, cp_rank, cp_kv_cache_interleave_size


def owned(seq_len: int, ranks: Ranks) -> NDArray[np.int64]:
    """The positions of a rank's keys."""
    size, rank, interleave = ranks
    return np.flatnonzero(np.arange(seq_len) // interleave % size == rank)


def spreads(case: Case) -> bool:
    """Not what goes by blocks of all keys, nor what writes by itself, nor logits so far from 0 that float32 has no
    digits left in lse to merge float32 by."""
    far = case.fill == "negative" and case.dtype == "float32"
    return case.selected is None and not case.shared and case.rotary is None and not far


def _of_rank(problem: Problem, ranks: Ranks) -> Problem:
    """Its keys, as a problem of their own; queries, masks and the block table as they are."""
    positions = [owned(n, ranks) for n in problem.seq_lens]
    lens = tuple(map(len, positions))
    return dataclasses.replace(
        problem,
        case=dataclasses.replace(problem.case, seq_lens=lens, mm_prefix_range=None, document_start_loc=None),
        key=[k[p] for k, p in zip(problem.key, positions, strict=True)],
        value=[v[p] for v, p in zip(problem.value, positions, strict=True)],
        seq_lens=np.array(lens, np.int32),
    )


def _bias(problem: Problem, ranks: Ranks) -> NDArray[np.float32] | None:
    bias = problem.attn_bias
    return None if bias is None else np.ascontiguousarray(bias[..., owned(bias.shape[3], ranks)])


def _selected_tokens(problem: Problem, ranks: Ranks) -> NDArray[np.int32] | None:
    """Of the keys that a query token selects this rank's, by their number among these."""
    tokens = problem.selected_tokens
    if tokens is None:
        return None
    here = owned(int(max(problem.seq_lens, default=0)), ranks)
    found = np.full_like(tokens, -1)
    for row, own in zip(found, tokens, strict=True):
        keys = np.searchsorted(here, own[np.isin(own, here)])
        row[: len(keys)] = keys
    return found


def run_rank(
    problem: Problem, ranks: Ranks, isa: str = "auto", engine: str = "auto"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A rank's output [T, Hq, Dv], in float32, and lse [Hq, T]."""
    case, dtype = problem.case, numpy_dtype(problem.case.dtype)
    memory = written(_of_rank(problem, ranks), isa)
    tokens, selected = len(problem.query), _selected_tokens(problem, ranks)
    output = wider((tokens, case.num_heads, case.value_size), np.dtype(np.float32), case.strided)
    lse = wider((case.num_heads, tokens), np.dtype(np.float32), case.strided)
    how: dict[str, Any] = {"kv_cache_layout": case.kv_cache_layout, "kv_cache_rotation": case.kv_cache_rotation}
    plan = cpu_attn.get_scheduler_metadata(
        len(problem.seq_lens),
        case.num_heads,
        case.num_kv_heads,
        case.head_size,
        problem.seq_lens,
        dtype,
        problem.query_start_loc,
        case.causal,
        case.sliding_window,
        isa,
        True,
        problem.dynamic_causal,
        case.kv_cache_dtype,
        head_size_v=case.value_size,
        engine=engine,
        **case.masks,
        **how,
        max_selected_tokens=None if selected is None else max(1, selected.shape[1]),
        cp_world_size=ranks[0],
        cp_rank=ranks[1],
        cp_kv_cache_interleave_size=ranks[2],
    )
    cpu_attn.attention_with_kv_cache(
        *(memory.query, memory.key_cache, memory.value_cache, output, problem.query_start_loc, problem.seq_lens),
        *(problem.scale, case.causal, problem.alibi_slopes, case.sliding_window, problem.block_table, case.softcap),
        *(plan, problem.s_aux if ranks[1] == 0 else None, problem.dynamic_causal, *problem.scales),
        case.kv_cache_dtype,
        lse=lse,
        attn_bias=_bias(problem, ranks),
        selected_tokens=selected,
        **how,
    )
    forbid_outside("output", output, case.strided)
    forbid_outside("lse", lse, case.strided)
    return output, lse


def run_ranks(
    problem: Problem, world_size: int, interleave: int, isa: str = "auto", engine: str = "auto"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The merged results of all ranks, one after another in this process."""
    parts = [run_rank(problem, (world_size, rank, interleave), isa, engine) for rank in range(world_size)]
    outs, lses = zip(*parts, strict=True)
    found: tuple[NDArray[np.float32], NDArray[np.float32]] = cpu_attn.merge_states(outs, lses)
    return found


def merged(problem: Problem, group: Group, interleave: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The same on one rank of a group, as ContextParallel.attend does it: one message, one merge."""
    out, lse = run_rank(problem, (group.world_size, group.rank, interleave))
    parts = group.all_gather(np.concatenate([out.reshape(-1), lse.reshape(-1)]))
    outs = [part[: out.size].reshape(out.shape) for part in parts]
    lses = [part[out.size :].reshape(lse.shape) for part in parts]
    found: tuple[NDArray[np.float32], NDArray[np.float32]] = cpu_attn.merge_states(outs, lses)
    return found
