# SPDX-License-Identifier: Apache-2.0
"""Checks of what a plan is made of, and of what later has to fit a plan."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

from cpu_attn._arguments import PLAN
from cpu_attn._arrays import Array
from cpu_attn._check.arrays import array
from cpu_attn._check.kv_cache import kv_cache_layout, kv_cache_rotation, kv_dtypes
from cpu_attn._check.values import MAX_SIZE, boolean, integer, window


class Plan:
    """Makes plans known to this package: get_scheduler_metadata returns an instance of a subclass."""

    __slots__ = ()


def plan(name: str, x: Any) -> Any:
    if not isinstance(x, Plan):
        raise TypeError(f"{name}: expected get_scheduler_metadata's result, got {type(x).__name__}")
    return x


def lengths(
    num_reqs: int, query_start_loc: Any, seq_lens: Any, dynamic_causal: Any
) -> tuple[Array, Array, Array | None]:
    """Checks the three int32 arrays that say which requests a step has."""
    reqs = [("num_reqs", num_reqs)]
    lens = array("seq_lens", seq_lens, ["int32"], reqs)
    starts = array("query_start_loc", query_start_loc, ["int32"], [("num_reqs + 1", num_reqs + 1)])
    return starts, lens, None if dynamic_causal is None else array("dynamic_causal", dynamic_causal, ["int32"], reqs)


def table_block_size(block_table: Any, block_size: Any) -> int:
    if block_table is None or block_size is None:
        given, missing = ("block_size", "block_table") if block_table is None else ("block_table", "block_size")
        raise ValueError(f"{missing}: is None, {given} is given; a plan takes both or neither")
    return integer("block_size", block_size, 1)


class Ranks(NamedTuple):
    """Says how the ranks of context parallelism share the keys of a request, in the words of get_scheduler_metadata:
    how many ranks there are, which one this is, and how many consecutive positions each has."""

    cp_world_size: int = 1
    cp_rank: int = 0
    cp_kv_cache_interleave_size: int = 1

    def __str__(self) -> str:
        return f"({', '.join(self._fields)}) = {tuple(self)}"


def ranks(world_size: Any, rank: Any, interleave: Any) -> Ranks:
    if type(world_size) is type(interleave) is type(rank) is int and world_size == interleave == 1 and rank == 0:
        return _NO_RANKS
    size = integer("cp_world_size", world_size, 1, MAX_SIZE)
    return Ranks(size, integer("cp_rank", rank, 0, size - 1), integer("cp_kv_cache_interleave_size", interleave, 1))


_NO_RANKS = Ranks()


def plan_of_ranks(name: str, x: Any, ranks: Ranks) -> Any:
    """Checks that a plan was made for this rank's keys."""
    shape = plan(name, x)._shape
    made_for = Ranks(*(getattr(shape, field) for field in Ranks._fields))
    if made_for != ranks:
        raise ValueError(f"{name}: made for {made_for}, expected {tuple(ranks)}")
    return x


_OPTIONS = {row.name: row for row in PLAN.fields}
_DEFAULTS = tuple(row.default for row in PLAN.fields)


def options(shape: Any, given: tuple[Any, ...]) -> None:
    """Checks the options of a plan that ca_shape holds, in the order of the table, and puts there those that are not
    the defaults, which it has. Its block_size is not 0 where the plan shares prefixes."""
    if all(map(is_, given, _DEFAULTS)):  # 0.2 us
        return
    named = dict(zip(_OPTIONS, given, strict=True))
    ranks(*(named[field] for field in Ranks._fields))
    for name, x in named.items():
        row = _OPTIONS[name]
        if x is not row.default:
            setattr(shape, name, boolean(name, x) if row.type == "bool" else integer(name, x, row.least))
    selects = ("max_selected_tokens", "query_block_size", "select_by_query_head")
    asked = [name for name in selects if getattr(shape, name)]
    if asked and shape.block_size:
        raise ValueError(f"{asked[0]}: goes without block_table, since keys that are selected are no shared prefix")
    if len(asked) > 1 and shape.max_selected_tokens:
        raise ValueError(f"{asked[1]}: goes without max_selected_tokens; a plan has one of them")


def same_call(
    plan: Any, sliding_window: Any, kv_cache_dtype: Any, kv_cache_layout: Any, kv_cache_rotation: Any
) -> None:
    """Checks that a call is what its plan was made for. The words of the plan are compared by identity first, which
    takes 0.1 us in place of 0.6: to compare by value could mislead or raise where an argument is an array."""
    planned_window, kv_dtype, layout, rotation = plan._words
    if kv_cache_dtype is kv_dtype and kv_cache_layout is layout and kv_cache_rotation is rotation:
        kind = type(sliding_window)
        if sliding_window == planned_window if kind is int else kind is tuple and sliding_window is planned_window:
            return
    shape = plan._shape
    asked, planned = window(sliding_window), (shape.window_left, shape.window_right)
    if asked != planned and not (shape.all_causal and asked[0] == planned[0]):  # a causal request never looks right
        raise ValueError(f"sliding_window: {sliding_window}, scheduler_metadata was made for (left, right) = {planned}")
    same_kv_dtypes(plan, kv_cache_dtype)
    same_kv_cache_layout(plan, kv_cache_layout)
    same_kv_cache_rotation(plan, kv_cache_rotation)


def latent(plan: Any) -> None:
    """Checks that a plan is for rows of which V is a part of K."""
    shape, kvs = plan._shape, plan.kv_dtypes
    if shape.num_kv_heads != 1 or shape.head_size_v > shape.head_size:
        raise ValueError(
            f"scheduler_metadata: made for {shape.num_kv_heads} kv heads of {shape.head_size}/{shape.head_size_v}, "
            "expected 1 whose head_size_v is a part of head_size"
        )
    if kvs[0] != kvs[1]:
        raise ValueError(f"scheduler_metadata: made for K of {kvs[0]} and V of {kvs[1]}, which are the same rows")


def same_kv_dtypes(plan: Any, kv_cache_dtype: Any) -> None:
    if kv_cache_dtype is not plan._words[1] and kv_dtypes(kv_cache_dtype, plan.dtype) != plan.kv_dtypes:
        made_for = "/".join(dict.fromkeys(plan.kv_dtypes))
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r}, scheduler_metadata was made for {made_for}")


def same_kv_cache_layout(plan: Any, layout: Any) -> None:
    if layout is not plan.kv_cache_layout and kv_cache_layout(layout) != plan.kv_cache_layout:
        raise ValueError(f"kv_cache_layout: {layout!r}, scheduler_metadata was made for {plan.kv_cache_layout!r}")


def same_kv_cache_rotation(plan: Any, rotation: Any) -> None:
    if kv_cache_rotation(rotation) != plan._shape.hadamard:
        raise ValueError(f"kv_cache_rotation: {rotation!r}, scheduler_metadata was made for {plan.kv_cache_rotation!r}")
