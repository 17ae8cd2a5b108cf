# SPDX-License-Identifier: Apache-2.0
"""This module names the arrays of each call, and checks those of calls that have no rows in _arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_attn._arguments import CALLS
from cpu_attn._arrays import Array, view
from cpu_attn._check.arrays import FLOATS, array, disjoint, writable
from cpu_attn._check.values import sequence

# Each tuple has the order in which C has the arrays of a call: those that it writes come first.
ATTENTION, STEP, WRITE, INDEX, ROTARY, SELECT, BOUNDS, SCORES, UPDATE, LINEAR, CONV = (call.names for call in CALLS)
MLA = tuple("kv_cache" if name in ("key_cache", "value_cache") else name for name in ATTENTION)


def attention_arrays(**given: Any) -> tuple[Any, ...]:
    """Gives the arrays of an attention in the order of ATTENTION, and None for those that are not given."""
    return tuple(given.pop(name, None) for name in ATTENTION)


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
