# SPDX-License-Identifier: Apache-2.0
"""This module names the arrays of each call, and checks those of calls that have no rows in _arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_attn._arguments import CALLS
from cpu_attn._arrays import Array, view
from cpu_attn._check.arrays import FLOATS, apart, array, disjoint, writable
from cpu_attn._check.plans import lengths
from cpu_attn._check.values import MAX_SIZE, integer, sequence

# Each tuple has the order in which C has the arrays of a call: those that it writes come first.
ATTENTION, STEP, WRITE, INDEX, ROTARY, SELECT, UPDATE, LINEAR, CONV = (call.names for call in CALLS)
MLA = tuple("kv_cache" if name in ("key_cache", "value_cache") else name for name in ATTENTION)


def attention_arrays(**given: Any) -> tuple[Any, ...]:
    """Gives the arrays of an attention in the order of ATTENTION, and None for those that are not given."""
    return tuple(given.pop(name, None) for name in ATTENTION)


BOUNDS = ("block_min", "block_max", "key", "slot_mapping")
SCORES = ("scores", "query", "block_min", "block_max", "block_table", "query_start_loc", "seq_lens")


def bounds(block_min: Any, block_max: Any, dtypes: Sequence[str]) -> tuple[Array, Array]:
    """Checks block_min and block_max, both [N, Hkv, D]."""
    low = array("block_min", block_min, dtypes, [("num_blocks", None), ("num_kv_heads", None), ("head_size", None)])
    blocks, heads, head_size = low.shape
    sizes = [("num_blocks", blocks), ("num_kv_heads", heads), ("head_size", head_size)]
    integer("block_min: num_kv_heads", heads, 1, MAX_SIZE)
    integer("block_min: head_size", head_size, 1, MAX_SIZE)
    return low, array("block_max", block_max, [low.dtype], sizes)


def update_block_bounds(key: Any, slot_mapping: Any, block_min: Any, block_max: Any) -> list[Array | None]:
    """Checks the arrays of that call and gives them in the order of BOUNDS."""
    low, high = bounds(block_min, block_max, FLOATS)
    k = array("key", key, [low.dtype], [("T", None), ("num_kv_heads", low.shape[1]), ("head_size", low.shape[2])])
    slots = array("slot_mapping", slot_mapping, ["int64"], [("T", k.shape[0])])
    found: list[Array | None] = [writable("block_min", low), writable("block_max", high), k, slots]
    apart(BOUNDS, found, 2)
    return found


def score_blocks(
    query: Any, block_min: Any, block_max: Any, block_table: Any, seq_lens: Any, query_start_loc: Any
) -> list[Array | None]:
    """Checks the arrays of that call and gives them in the order of SCORES; None stands for the first, which the call
    makes."""
    q = array("query", query, FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    low, high = bounds(block_min, block_max, [q.dtype])
    if q.shape[2] != low.shape[2]:
        raise ValueError(f"block_min: axis 2 is {low.shape[2]}, expected head_size = {q.shape[2]}")
    integer("query: num_heads", q.shape[1], 1, MAX_SIZE)
    if q.shape[1] % low.shape[1]:
        raise ValueError(f"block_min: {low.shape[1]} kv heads do not divide num_heads = {q.shape[1]}")
    table = array("block_table", block_table, ["int32"], [("num_reqs", None), ("blocks", None)])
    starts, lens, _ = lengths(table.shape[0], query_start_loc, seq_lens, None)
    if starts.numpy()[-1] != q.shape[0]:
        raise ValueError(f"query: axis 0 is {q.shape[0]}, expected query_start_loc[-1] = {starts.numpy()[-1]}")
    return [None, q, low, high, table, starts, lens]


def _parts(name: str, x: Any, dtypes: Sequence[str]) -> list[Any]:
    """Reads several arrays: a list or a tuple of them, or one array that holds them along its first axis."""
    found = sequence(name, x if isinstance(x, (list, tuple)) else view(name, x, dtypes).numpy())
    if not found:
        raise ValueError(f"{name}: no parts, expected at least one")
    return found


def states(outs: Any, lses: Any) -> tuple[list[Array], list[Array]]:
    """Checks outputs [T, Hq, Dv] of one dtype and their lses [Hq, T], one of each for every set of keys."""
    parts, logs = _parts("outs", outs, FLOATS), _parts("lses", lses, ["float32"])
    if len(parts) != len(logs):
        raise ValueError(f"lses: {len(logs)} parts, outs has {len(parts)}")
    axes: list[tuple[str, int | None]] = [("T", None), ("num_heads", None), ("head_size_v", None)]
    first = array("outs[0]", parts[0], FLOATS, axes)
    axes = [(what, size) for (what, _), size in zip(axes, first.shape, strict=True)]
    return (
        [array(f"outs[{i}]", x, [first.dtype], axes) for i, x in enumerate(parts)],
        [array(f"lses[{i}]", x, ["float32"], [axes[1], axes[0]]) for i, x in enumerate(logs)],
    )


def merged(parts: Sequence[Array], logs: Sequence[Array], out: Any, lse: Any) -> tuple[Array, Array]:
    """Checks the arrays that merged states are written to: they have the shapes of the states and share no memory with
    them."""
    tokens, heads, size = zip(("T", "num_heads", "head_size_v"), parts[0].shape, strict=True)
    to = writable("out", array("out", out, [parts[0].dtype], [tokens, heads, size]))
    log = writable("lse", array("lse", lse, ["float32"], [heads, tokens]))
    inputs: dict[str, Array | None] = {f"outs[{i}]": a for i, a in enumerate(parts)}
    inputs |= {f"lses[{i}]": a for i, a in enumerate(logs)}
    disjoint("out", to, {"lse": log, **inputs})
    disjoint("lse", log, inputs)
    return to, log
