# SPDX-License-Identifier: Apache-2.0
"""The arrays of each call: that they fit one another and the plan, and lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_attn import _dispatch
from cpu_attn._arrays import Array, view
from cpu_attn._check.arrays import FLOATS, apart, array, disjoint, writable
from cpu_attn._check.kv_cache import cache_width, caches, kv_cache_layout, kv_dtypes
from cpu_attn._check.plans import attn_bias, lengths, selected_blocks
from cpu_attn._check.values import MAX_SIZE, integer, sequence
from cpu_attn._dtypes import DTYPE_CODES

# The arrays of a call, in the order that native/cpu_attn.h has them in too: those that it writes first.
STEP = ("query_start_loc", "seq_lens", "dynamic_causal")
_FEATURES = ("alibi_slopes", "s_aux", "selected_blocks", "attn_bias")
ATTENTION = ("output", "lse", "query", "key_cache", "value_cache", "block_table", *STEP, *_FEATURES)
WRITE = ("key_cache", "value_cache", "key", "value", "slot_mapping")
_TURNS = ("positions", "cos_sin_cache", "q_weight", "k_weight")
ROTARY = ("key_cache", "value_cache", "query_out", "query", "key", "value", "slot_mapping", *_TURNS)


def attention(plan: Any, arrays: Sequence[Any], same_step: bool) -> list[Array | None]:
    """``arrays`` as ATTENTION names them, of shapes and dtypes that fit the plan, apart from one another.
    same_step: lengths are among them."""
    output, lse, query, key_cache, value_cache, table, starts, lens, flags, slopes, sinks, selected, bias = arrays
    shape, dtype, tokens = plan._shape, str(plan.dtype), ("T", plan.num_tokens)
    heads = ("num_heads", shape.num_heads)
    if same_step:
        starts, lens, flags = lengths(plan.num_reqs, starts, lens, flags)
    q = array("query", query, [dtype], [tokens, heads, ("head_size", shape.head_size)])
    out = writable("output", array("output", output, [dtype], [tokens, heads, ("head_size_v", shape.head_size_v)]))
    (k_dtype, v_dtype), layout = plan.kv_dtypes, plan.kv_cache_layout
    kc, vc = caches(key_cache, value_cache, plan.kv_dtypes, shape.num_kv_heads, layout)
    cache_width("key_cache", kc, shape.isa, shape.dtype, k_dtype, shape.head_size, layout)
    cache_width("value_cache", vc, shape.isa, shape.dtype, v_dtype, shape.head_size_v, layout)
    found: list[Array | None] = [
        out,
        None if lse is None else writable("lse", array("lse", lse, ["float32"], [heads, tokens])),
        q,
        kc,
        vc,
        array("block_table", table, ["int32"], [("num_reqs", shape.num_reqs), ("blocks", None)]),
        starts,
        lens,
        flags,
        None if slopes is None else array("alibi_slopes", slopes, ["float32"], [heads]),
        None if sinks is None else array("s_aux", sinks, ["float32"], [heads]),
        selected_blocks(selected, shape.num_reqs, shape.num_kv_heads),
        attn_bias(plan, bias),
    ]
    apart(ATTENTION, found, 2)
    return found


def write(
    arrays: Sequence[Any], isa: str, kv_cache_dtype: Any, layout: str = "packed"
) -> tuple[list[Array | None], int, tuple[str, ...]]:
    """``arrays`` as WRITE names them, of shapes and dtypes that fit one another, the index of the isa, and what the
    caches hold."""
    key_cache, value_cache, key, value, slot_mapping = arrays
    k = array("key", key, FLOATS, [("T", None), ("num_kv_heads", None), ("head_size", None)])
    tokens, heads, head_size = k.shape
    v = array("value", value, [k.dtype], [("T", tokens), ("num_kv_heads", heads), ("head_size_v", None)])
    for name, a in (("key", k), ("value", v)):
        integer(f"{name}: head size", a.shape[2], 1, MAX_SIZE)
    integer("key: num_kv_heads", heads, 1, MAX_SIZE)
    k_dtype, v_dtype = kvs = kv_dtypes(kv_cache_dtype, k.dtype)
    resolved, code = _dispatch.resolve_isa(isa, k.dtype, head_size), DTYPE_CODES[k.dtype]
    kv_cache_layout(layout, kvs)
    kc, vc = caches(key_cache, value_cache, kvs, heads, layout)
    cache_width("key_cache", writable("key_cache", kc), resolved.index, code, k_dtype, head_size, layout)
    cache_width("value_cache", writable("value_cache", vc), resolved.index, code, v_dtype, v.shape[2], layout)
    found: list[Array | None] = [kc, vc, k, v, array("slot_mapping", slot_mapping, ["int64"], [("T", tokens)])]
    apart(WRITE, found, 2)
    return found, resolved.index, kvs


def rotary(
    arrays: Sequence[Any], isa: str, kv_cache_dtype: Any, layout: str
) -> tuple[list[Array | None], int, tuple[str, ...]]:
    """The same of ``arrays`` as ROTARY names them."""
    key_cache, value_cache, query_out, query, key, value, slot_mapping, positions, cos_sin_cache, *weights = arrays
    written = (key_cache, value_cache, key, value, slot_mapping)
    (kc, vc, k, v, slots), index, kvs = write(written, isa, kv_cache_dtype, layout)
    assert k is not None
    tokens, head_size, dtypes = ("T", k.shape[0]), ("head_size", k.shape[2]), list(dict.fromkeys(("float32", k.dtype)))
    q = array("query", query, [k.dtype], [tokens, ("num_heads", None), head_size])
    heads = ("num_heads", integer("query: num_heads", q.shape[1], 1, MAX_SIZE))
    name = "query" if query_out is query else "query_out"
    out = writable(name, array(name, query_out, [k.dtype], [tokens, heads, head_size]))
    table = array("cos_sin_cache", cos_sin_cache, dtypes, [("max_position", None), ("rot_dim", None)])
    if integer("cos_sin_cache: rot_dim", table.shape[1], 2, head_size[1]) % 2:
        raise ValueError(f"cos_sin_cache: rot_dim is {table.shape[1]}, expected an even number")
    found: list[Array | None] = [kc, vc, out, q, k, v, slots, array("positions", positions, ["int64"], [tokens]), table]
    for what, weight in zip(_TURNS[2:], weights, strict=True):
        found.append(None if weight is None else array(what, weight, dtypes, [head_size]))
    same = [a == b for a, b, n in zip(out.strides, q.strides, q.shape, strict=True) if n > 1]
    in_place = out.address == q.address and all(same)
    apart(ROTARY, [None if in_place and a is q else a for a in found], 3)
    return found, index, kvs


BOUNDS = ("page_min", "page_max", "key", "slot_mapping")
SCORES = ("scores", "query", "page_min", "page_max", "block_table", "query_start_loc", "seq_lens")


def bounds(page_min: Any, page_max: Any, dtypes: Sequence[str]) -> tuple[Array, Array]:
    """Both [N, Hkv, D]."""
    low = array("page_min", page_min, dtypes, [("num_blocks", None), ("num_kv_heads", None), ("head_size", None)])
    blocks, heads, head_size = low.shape
    sizes = [("num_blocks", blocks), ("num_kv_heads", heads), ("head_size", head_size)]
    integer("page_min: num_kv_heads", heads, 1, MAX_SIZE)
    integer("page_min: head_size", head_size, 1, MAX_SIZE)
    return low, array("page_max", page_max, [low.dtype], sizes)


def update_page_bounds(key: Any, slot_mapping: Any, page_min: Any, page_max: Any) -> list[Array | None]:
    """The arrays as BOUNDS names them."""
    low, high = bounds(page_min, page_max, FLOATS)
    k = array("key", key, [low.dtype], [("T", None), ("num_kv_heads", low.shape[1]), ("head_size", low.shape[2])])
    slots = array("slot_mapping", slot_mapping, ["int64"], [("T", k.shape[0])])
    found: list[Array | None] = [writable("page_min", low), writable("page_max", high), k, slots]
    apart(BOUNDS, found, 2)
    return found


def score_pages(
    query: Any, page_min: Any, page_max: Any, block_table: Any, seq_lens: Any, query_start_loc: Any
) -> list[Array | None]:
    """The arrays as SCORES names them, but for the first, which is new."""
    q = array("query", query, FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    low, high = bounds(page_min, page_max, [q.dtype])
    if q.shape[2] != low.shape[2]:
        raise ValueError(f"page_min: axis 2 is {low.shape[2]}, expected head_size = {q.shape[2]}")
    integer("query: num_heads", q.shape[1], 1, MAX_SIZE)
    if q.shape[1] % low.shape[1]:
        raise ValueError(f"page_min: {low.shape[1]} kv heads do not divide num_heads = {q.shape[1]}")
    table = array("block_table", block_table, ["int32"], [("num_reqs", None), ("blocks", None)])
    starts, lens, _ = lengths(table.shape[0], query_start_loc, seq_lens, None)
    if starts.numpy()[-1] != q.shape[0]:
        raise ValueError(f"query: axis 0 is {q.shape[0]}, expected query_start_loc[-1] = {starts.numpy()[-1]}")
    return [None, q, low, high, table, starts, lens]


def _parts(name: str, x: Any, dtypes: Sequence[str]) -> list[Any]:
    """A list or a tuple of arrays, or the arrays along the first axis of one."""
    found = sequence(name, x if isinstance(x, (list, tuple)) else view(name, x, dtypes).numpy())
    if not found:
        raise ValueError(f"{name}: no parts, expected at least one")
    return found


def states(outs: Any, lses: Any) -> tuple[list[Array], list[Array]]:
    """Outputs [T, Hq, Dv] of one dtype and lses [Hq, T] of several sets of keys."""
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
    """Where states go to: of their shapes, apart from them."""
    tokens, heads, size = zip(("T", "num_heads", "head_size_v"), parts[0].shape, strict=True)
    to = writable("out", array("out", out, [parts[0].dtype], [tokens, heads, size]))
    log = writable("lse", array("lse", lse, ["float32"], [heads, tokens]))
    inputs: dict[str, Array | None] = {f"outs[{i}]": a for i, a in enumerate(parts)}
    inputs |= {f"lses[{i}]": a for i, a in enumerate(logs)}
    disjoint("out", to, {"lse": log, **inputs})
    disjoint("lse", log, inputs)
    return to, log
