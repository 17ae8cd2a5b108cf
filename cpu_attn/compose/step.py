# SPDX-License-Identifier: Apache-2.0
"""This module has the arguments of one call: it checks them, and says which keys each token sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import view
from cpu_attn.ops import run_attention
from cpu_attn.plan import get_scheduler_metadata

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Arguments:
    """Holds one call's arguments, checked. position [T]: where a token itself stands among its request's keys; sees
    [T, 2]: the first key that it sees, and the one after the last."""

    query: Array
    caches: tuple[Any, Any]  # of keys and of values
    cache: dict[str, Any]  # what gather_pages takes to read them
    scales: tuple[float, float]  # k_scale, v_scale
    output: Array
    lse: Array | None
    query_start_loc: Array
    block_table: Array
    block_size: int
    group: int  # query heads that read one kv head
    scale: float
    softcap: float
    alibi_slopes: Array
    s_aux: Array
    position: Array
    sees: Array


def checked(
    arrays: dict[str, Any],
    cache: dict[str, Any],
    scale: float,
    causal: bool,
    sliding_window: int | tuple[int, int],
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> Arguments:
    """Checks what attention_with_kv_cache would, against a plan of the same sizes. Lengths and block table are copied
    first, so that no other thread changes what was checked. cache: isa, kv_cache_dtype and kv_cache_layout."""
    rows = [("T", None), ("num_heads", None)]
    query = _check.array("query", arrays["query"], _check.FLOATS, [*rows, ("head_size", None)])
    output = _check.array("output", arrays["output"], ["float32", query.dtype], [*rows, ("head_size_v", None)])
    table = _check.array("block_table", arrays["block_table"], ["int32"], [("num_reqs", None), ("blocks", None)])
    kvs = _check.kv_dtypes(cache["kv_cache_dtype"], query.dtype)
    layout = _check.kv_cache_layout(cache["kv_cache_layout"], kvs)
    key_cache, _ = _check.caches(arrays["key_cache"], arrays["value_cache"], kvs, None, layout)
    _, num_kv_heads, block_size = _check.cache_sizes(key_cache.shape, layout)
    (_, num_heads, head_size), blocks = query.shape, table.numpy().copy()
    starts, lens = (view(name, arrays[name]).numpy().copy() for name in ("query_start_loc", "seq_lens"))
    flags = arrays["dynamic_causal"]
    if flags is not None:
        flags = view("dynamic_causal", flags).numpy().copy()
    plan = get_scheduler_metadata(
        *(len(blocks), num_heads, num_kv_heads, head_size, lens, query.dtype, starts, causal, sliding_window),
        **cache,
        dynamic_causal=flags,
        head_size_v=output.shape[2],
        engine="reference",
    )
    scales, causal = _check.scales(k_scale, v_scale, kvs), _check.boolean("causal", causal)
    factor, cap = _check.logit_factors(scale, softcap, scales[0])
    run_attention(plan, _check.attention_arrays(**arrays), factor, cap, scales, causal, only_check=True)
    slopes = _check.small_floats("alibi_slopes", arrays["alibi_slopes"], ["float32"], num_heads)
    sinks = _check.small_floats("s_aux", arrays["s_aux"], _check.FLOATS, num_heads)
    lse, (position, sees) = arrays["lse"], visible(starts, lens, causal, flags, sliding_window)
    return Arguments(
        query=query.numpy(),
        caches=(arrays["key_cache"], arrays["value_cache"]),
        cache={**cache, "isa": plan.isa, "dtype": query.dtype},
        scales=scales,
        output=output.numpy(),
        lse=None if lse is None else view("lse", lse).numpy(),
        query_start_loc=starts,
        block_table=blocks,
        block_size=block_size,
        group=num_heads // num_kv_heads,
        scale=factor,
        softcap=cap,
        alibi_slopes=np.zeros(num_heads, np.float32) if slopes is None else slopes,
        s_aux=np.full(num_heads, -np.inf) if sinks is None else sinks,
        position=position,
        sees=sees,
    )


def visible(
    starts: Array, lens: Array, causal: bool, flags: Array | None, sliding_window: int | tuple[int, int]
) -> tuple[Array, Array]:
    """Gives the positions and the visible keys of all tokens: pos - left <= key <= pos + right, and key <= pos where
    causal."""
    left, right = _check.window(sliding_window)
    q_lens: Array = np.diff(starts).astype(np.int64)
    ends = np.repeat(lens.astype(np.int64), q_lens)
    position = ends - np.repeat(starts[1:], q_lens) + np.arange(len(ends))
    past_only = np.repeat(np.full(len(lens), causal) if flags is None else flags != 0, q_lens)
    low = np.maximum(0, position - left) if left >= 0 else np.zeros_like(position)
    high = np.minimum(ends, position + right + 1) if right >= 0 else ends
    high = np.where(past_only, np.minimum(high, position + 1), high)
    return position, np.stack([low, np.maximum(low, high)], axis=1)
