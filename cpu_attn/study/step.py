# SPDX-License-Identifier: Apache-2.0
"""This module has the arguments of one call and checks them: those of attention_with_kv_cache, which has a plan to
check against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import Array as Memory
from cpu_attn._dtypes import DTYPES
from cpu_attn.plan import get_scheduler_metadata
from cpu_attn.rotation import rotate
from cpu_attn.study.masks import Array, Tree, chosen_blocks, list_of_token, visible, with_masks


@dataclass(frozen=True)
class Step:
    """Holds one call's arguments, checked, as NumPy views. Caches are [N, Hkv, B, width], so kv_cache_layout is never
    NHD. sees [T, 2]: first key of a token and the one after its last; position [T]: where a token itself stands among
    its request's keys; chosen [lists, Hkv or Hq, M]: blocks that count; lists [T]: by which of these a token goes;
    selected_tokens [T, S] or None; attn_bias [R, Hq, Q, K]."""

    query: Array
    key_cache: Array
    value_cache: Array
    kv_dtypes: tuple[str, ...]
    head_size_v: int
    query_start_loc: Array
    block_table: Array
    isa: str
    scale: float
    kv_scales: tuple[float, float]
    softcap: float
    alibi_slopes: Array
    attn_bias: Array | None
    s_aux: Array
    position: Array
    sees: Array
    tree: Tree | None
    chosen: Array
    lists: Array
    selected_tokens: Array | None
    kv_cache_layout: str
    dtype: str  # of the queries, as they were given
    rotated: tuple[bool, bool]  # K, V

    @property
    def group(self) -> int:
        """Says how many query heads read one kv head."""
        return int(self.query.shape[1] // self.key_cache.shape[1])


def checked(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    alibi_slopes: Any,
    sliding_window: int | tuple[int, int],
    block_table: Any,
    softcap: float,
    s_aux: Any,
    dynamic_causal: Any,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
    lse: Any,
    isa: str,
    selected_blocks: Any,
    attn_bias: Any,
    masks: dict[str, Any],
    kv_cache_layout: str,
    kv_cache_rotation: str,
    selected_tokens: Any,
    query_block_size: int | None,
    select_by_query_head: bool,
) -> tuple[Step, Memory, Memory | None]:
    q = _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    kvs = _check.kv_dtypes(kv_cache_dtype, q.dtype)
    layout = _check.kv_cache_layout(kv_cache_layout, kvs)
    kc, vc = _check.caches(key_cache, value_cache, kvs, None, layout)
    num_blocks, num_kv_heads, block_size = _check.cache_sizes(kc.shape, layout)
    table = _check.array("block_table", block_table, ["int32"], [("num_reqs", None), ("blocks", None)])
    (tokens, num_heads, head_size), num_reqs = q.shape, table.shape[0]
    out = _check.array("output", output, [q.dtype], [("T", tokens), ("num_heads", num_heads), ("head_size_v", None)])
    log = None if lse is None else _check.array("lse", lse, ["float32"], [("num_heads", num_heads), ("T", tokens)])
    starts, lens, flags = _check.lengths(num_reqs, query_start_loc, seq_lens, dynamic_causal)
    given: dict[str, Memory | None] = {"block_table": table, "query_start_loc": starts, "seq_lens": lens}
    own = _check.selected_tokens(selected_tokens, tokens)
    given |= {"dynamic_causal": flags, "selected_tokens": own}
    table, starts, lens = _check.copied(table), _check.copied(starts), _check.copied(lens)
    flags, own = (x and _check.copied(x) for x in (flags, own))
    plan = get_scheduler_metadata(
        *(num_reqs, num_heads, num_kv_heads, head_size, lens.numpy(), q.dtype, starts.numpy(), causal, sliding_window),
        isa=isa,
        kv_cache_dtype=kv_cache_dtype,
        dynamic_causal=None if flags is None else flags.numpy(),
        head_size_v=out.shape[2],
        engine="reference",
        **masks,
        kv_cache_layout=layout,
        kv_cache_rotation=kv_cache_rotation,
        max_selected_tokens=None if own is None else max(1, own.shape[1]),
        query_block_size=query_block_size,
        select_by_query_head=select_by_query_head,
    )
    if plan.num_tokens != tokens:
        raise ValueError(f"query: axis 0 is {tokens}, expected query_start_loc[-1] = {plan.num_tokens}")
    lists = list_of_token(starts.numpy(), query_block_size)
    axis = ("num_reqs", num_reqs) if query_block_size is None else ("query blocks", int(lists.max(initial=-1)) + 1)
    heads = ("num_heads", num_heads) if select_by_query_head else ("num_kv_heads", num_kv_heads)
    given["selected_blocks"] = selected = _check.selected_blocks(selected_blocks, axis, heads)
    selected = selected and _check.copied(selected)
    for name, cache, kv, size in (("key_cache", kc, kvs[0], head_size), ("value_cache", vc, kvs[1], out.shape[2])):
        _check.cache_width(name, cache, plan._shape.isa, plan._shape.dtype, kv, size, layout)
    _check.block_table(plan, table, num_blocks, block_size, selected, own)
    inputs: dict[str, Memory | None] = {"query": q, "key_cache": kc, "value_cache": vc, **given}
    bias = inputs["attn_bias"] = _check.attn_bias(plan, attn_bias)
    _check.disjoint("output", _check.writable("output", out), inputs)
    if log is not None:
        _check.disjoint("lse", _check.writable("lse", log), {**inputs, "output": out})
    position, sees = visible(starts.numpy(), lens.numpy(), causal, flags, sliding_window)
    clamped = masks.pop("mm_prefix_clamp_sliding_window")
    found, tree = _check.masks(num_reqs, **masks), None
    if found and found.tree is not None:
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes: do not go with tree_mask, where a token's place is not its position")
        tree = Tree(found.tree.numpy(), starts.numpy(), lens.numpy(), _check.window(sliding_window)[0])
        sees = tree.ranges()
    elif found:
        sees = with_masks(found, clamped, starts.numpy(), lens.numpy(), position, sees)
    slopes = _check.small_floats("alibi_slopes", alibi_slopes, ["float32"], num_heads)
    sinks = _check.small_floats("s_aux", s_aux, _check.FLOATS, num_heads)
    kv_scales = _check.scales(k_scale, v_scale, kvs)
    factor, cap = _check.logit_factors(scale, softcap, kv_scales[0])
    hadamard = plan._shape.hadamard
    asked = q.numpy()
    if hadamard & 1:  # the calls rotate queries as they do keys
        with np.errstate(over="ignore", invalid="ignore"):
            asked = rotate(rotate(asked).astype(asked.dtype), back=True)
    step = Step(
        query=asked,
        key_cache=_heads_first(kc, kvs[0], layout),
        value_cache=_heads_first(vc, kvs[1], layout),
        kv_dtypes=kvs,
        head_size_v=out.shape[2],
        query_start_loc=starts.numpy(),
        block_table=table.numpy(),
        isa=plan.isa,
        scale=factor,
        kv_scales=kv_scales,
        softcap=cap,
        alibi_slopes=np.zeros(num_heads, np.float32) if slopes is None else slopes,
        attn_bias=None if bias is None else np.broadcast_to(bias.numpy(), (num_reqs, num_heads, *bias.shape[2:])),
        s_aux=np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64),
        position=position,
        sees=sees,
        tree=tree,
        chosen=chosen_blocks(selected, axis[1], heads[1], table.shape[1]),
        lists=lists,
        selected_tokens=None if own is None else own.numpy(),
        kv_cache_layout="HND" if layout == "NHD" else layout,
        dtype=q.dtype,
        rotated=(hadamard & 1 > 0, hadamard & 2 > 0),
    )
    return step, out, log


def _heads_first(cache: Memory, kv: str, layout: str) -> Array:
    pages = cache.numpy().view(DTYPES[_check.memory(kv)[0]])
    return pages.swapaxes(1, 2) if layout == "NHD" else pages
