# SPDX-License-Identifier: Apache-2.0
"""This module makes exceptions of what native/check and the engines found, and gives errors the caller's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cpu_attn._arguments import FREE_AXES, SHARED_AXES, c_name
from cpu_attn._arrays import Array, view
from cpu_attn._dtypes import CODES, DTYPES
from cpu_attn._native import ffi, lib

# This is what errors call the sizes of enum ca_axis.
_AXES = {getattr(lib, c_name(axis)): axis for axis in (*SHARED_AXES, *FREE_AXES)}
_LAYOUTS = {lib.CA_HND: "HND", lib.CA_NHD: "NHD"}


def instance(name: str, x: Any, *kinds: type) -> None:
    """Raises TypeError unless ``x`` is an instance of one of these classes."""
    if not isinstance(x, kinds):
        raise TypeError(f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(x).__name__}")


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """Gives the same error with other names of arguments: our caller may call them otherwise. names: ours to theirs."""
    return type(error)(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error)))


def new_fault() -> Any:
    return ffi.new("ca_fault *")


def misfit(
    fault: Any, name: str, a: Array, dtypes: Sequence[str] = (), axes: Sequence[str] = (), other: str = ""
) -> Exception:
    """Gives the exception for what native/check/arguments.c found wrong with an array. dtypes, axes: what the array
    should have; other: the name of the array with which it shares memory."""
    status, axis, value, bound = fault.status, fault.position, fault.value, fault.bound
    if status == lib.CA_WRONG_DTYPE:
        return TypeError(f"{name}: dtype {a.dtype}, expected {' or '.join(dtypes)}")
    what = axes[axis] if 0 <= axis < len(axes) else ""
    or_1 = ", or 1" if axis >= 0 and fault.axes[axis] & lib.CA_OR_1 else ""
    if status == lib.CA_WRONG_WIDTH and fault.kv_cache_layout != lib.CA_PACKED:
        width = f"head_size = {bound} in layout {_LAYOUTS[fault.kv_cache_layout]}"
    elif status == lib.CA_WRONG_WIDTH:
        width = (
            f"{bound} for head_size {fault.head_size} and block_size {a.shape[-2]} on this isa (get_kv_cache_shape "
            "says what to allocate)"
        )
    else:
        width = ""
    found = {
        lib.CA_WRONG_NDIM: f"{len(a.shape)} axes, expected {len(axes)}: [{', '.join(axes)}]",
        lib.CA_WRONG_SIZE: f"axis {axis} is {value}, expected {what} = {bound}{or_1}",
        lib.CA_LARGE_SIZE: f"axis {axis} is {value}, more than {bound}",
        lib.CA_NOT_DENSE: f"the last axis has stride {value}, expected 1 (dense)",
        lib.CA_OUTSIDE: f"{'head size' if what.startswith('head_size') else what}: {value} is outside "
        f"{fault.least}..{bound}",
        lib.CA_ODD_ROT_DIM: f"rot_dim is {value}, expected an even number",
        lib.CA_EMPTY_BLOCK: "block_size is 0, expected at least 1",
        lib.CA_BLOCK_NOT_DENSE: f"axis {axis} has stride {value}, expected {bound}: a block must be dense",
        lib.CA_WRONG_WIDTH: f"axis {axis} is {value}, expected {width}",
        lib.CA_READ_ONLY: "is read-only",
        lib.CA_OVERLAPS_ITSELF: f"strides {a.strides} over shape {a.shape} make elements overlap",
        lib.CA_SHARES_MEMORY: f"shares memory with {other}",
    }
    return ValueError(f"{name}: {found[status]}")


def _expected(fault: Any) -> list[str]:
    return [name for name in DTYPES if fault.expected >> CODES[name][0] & 1]


def reread(fault: Any, names: Sequence[str], arrays: Sequence[Any], given: Any, alive: Any) -> tuple[int, Any, Any]:
    """Replaces one array that C could not read by a description that Python makes, and returns the arguments for a
    second attempt, as _arrays.objects does. given, alive: what _arrays.objects returned, or the attempt before this
    one. Any other fault that C found is raised."""
    if fault.status != lib.CA_UNREAD:
        raise_fault(fault, names, arrays)
    if given == ffi.NULL:
        given, alive = ffi.new("ca_array[]", len(arrays)), (ffi.new("uintptr_t[]", [id(x) for x in arrays]), {})
    addresses, views = alive
    i = fault.argument
    if i in views:
        raise RuntimeError("nothing was computed: native code does not take what Python has read")
    if arrays[i] is not None or not addresses[i]:  # where C does not know NumPy, it does not know None either
        views[i] = view(names[i], arrays[i], _expected(fault))
        ffi.memmove(given + i, views[i].described(), ffi.sizeof("ca_array"))
    addresses[i] = 0
    return int(ffi.cast("uintptr_t", addresses)), given, alive


def _of_states(fault: Any, names: Sequence[str]) -> str:
    """Gives in words what native/linear found wrong with slots."""
    at, value, bound, column = fault.position, fault.value, fault.bound, ("request", "tokens", "slot")[fault.token % 3]
    name = names[fault.argument]
    return {
        lib.CA_BAD_STATE: f"{name}[{at}]: {value}, expected less than num_slots = {bound}",
        lib.CA_STATE_TWICE: f"{name}[{at}]: slot {value} is written twice",
        lib.CA_STATE_WRITTEN: f"{name}[{at}]: slot {value} is written for request {bound} in this call",
        lib.CA_BAD_CHECKPOINT: f"{name}[{at}]: {column} is {value}, outside {fault.least}..{bound}",
        lib.CA_CHECKPOINT_ORDER: f"{name}[{at}]: rows have to ascend by request, then by tokens",
        lib.CA_STATE_LENGTH: f"conv_state: holds {value} inputs, expected {bound}..8 for this weight",
    }[fault.status]


def raise_fault(fault: Any, names: Sequence[str] = (), arrays: Sequence[Any] = ()) -> None:
    """Raises the exception for what native/check found, if it found anything. names, arrays: those of the call."""
    if fault.status == lib.CA_OK:
        return
    if lib.CA_WRONG_DTYPE <= fault.status <= lib.CA_SHARES_MEMORY:
        i, dtypes = fault.argument, _expected(fault)
        axes = [_AXES[code & ~lib.CA_OR_1] for code in fault.axes[0 : fault.ndim]]
        other = names[fault.value] if fault.status == lib.CA_SHARES_MEMORY else ""
        raise misfit(fault, names[i], view(names[i], arrays[i], dtypes), dtypes, axes, other)
    if fault.status == lib.CA_NO_MEMORY:
        raise MemoryError("no memory for the call")
    if fault.status == lib.CA_ENGINE_FAILED:
        from cpu_attn import _onednn_loader  # no other engine can fail; _dispatch imports it as late

        raise _onednn_loader.failure("engine onednn", fault.value)
    if fault.status == lib.CA_SMALL_STACK:
        raise RuntimeError(
            f"OMP_STACKSIZE: OpenMP's threads have {fault.value} bytes of stack, a call may take {fault.bound}; set it "
            "(or ulimit -s) higher, or set_num_threads(1)"
        )
    if fault.status >= lib.CA_BAD_STATE:
        raise ValueError(_of_states(fault, names))
    request, position, value, bound = fault.request, fault.position, fault.value, fault.bound
    where = f"request {request}: " if request >= 0 else ""
    list_of = f"query block {fault.query_block}: " if fault.query_block >= 0 else ""
    head = f"query head {fault.query_head}" if fault.query_head >= 0 else f"kv head {fault.kv_head}"
    what, unit = f"selected_blocks: {where}{list_of}{head}", "block"
    if fault.token >= 0:
        what, unit = f"selected_tokens: {where}query token {fault.token}", "token"
    raise ValueError(
        {
            lib.CA_BAD_QUERY_START_LOC: f"query_start_loc[{position}]: {where}{value}, expected at least {bound}"
            if position
            else f"query_start_loc[0]: {value}, expected 0",
            lib.CA_TOO_MANY_TASKS: f"query_start_loc: {value} blocks of query tokens, a plan holds {bound}",
            lib.CA_BAD_SEQ_LEN: f"seq_lens[{position}]: {value}, expected at least 0",
            lib.CA_BAD_BLOCK: f"block_table: {where}position {position} holds block {value}, outside 0..{bound - 1} "
            f"(num_blocks {bound})",
            lib.CA_BLOCK_TABLE_SHORT: f"block_table: {where}needs {value} blocks, the table has {bound} columns",
            lib.CA_BAD_SLOT: f"slot_mapping[{position}]: {value}, expected less than num_blocks * block_size = {bound}",
            lib.CA_BAD_POSITION: f"positions[{position}]: {value}, outside 0..{bound - 1} (rows of cos_sin_cache)",
            lib.CA_OTHER_TOKENS: f"query: axis 0 is {value}, expected query_start_loc[-1] = {bound}",
            lib.CA_UNEQUAL_GROUPS: f"block_min: {value} kv heads do not divide num_heads = {bound}",
            lib.CA_BAD_NODE: f"block_nodes[{position}]: {value}, outside 0..{bound - 1}",
            lib.CA_OTHER_LENGTHS: f"query_start_loc[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_SEQ_LENS: f"seq_lens[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_BLOCK_SIZE: f"key_cache: block_size is {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_BLOCKS: f"block_table: {where}position {position} holds block {value}, not {bound} as a "
            f"request that shares it; scheduler_metadata was made for other block tables",
            lib.CA_OTHER_CAUSAL: f"causal: {where}is {bool(value)}, scheduler_metadata was made for {bool(bound)}",
            lib.CA_TREE_TOKENS: f"tree_mask: axis 0 is {value}, expected T = {bound}",
            lib.CA_TREE_NARROW: f"tree_mask: {where}{value} query tokens, a row has {bound} bits",
            lib.CA_TREE_NOT_CAUSAL: f"tree_mask: {where}is not causal",
            lib.CA_TREE_ALIBI: "alibi_slopes: scheduler_metadata was made for a tree_mask, where a token's place among "
            "the keys is not its position",
            lib.CA_TOKENS_WITHOUT_KEYS: f"seq_lens[{position}]: {value}, expected at least the request's {bound} query "
            "tokens, whose own keys its mask goes by",
            lib.CA_SELECTED_SHARED: "selected_blocks: scheduler_metadata shares prefixes between requests, which may "
            "select other blocks of them; make it without block_table",
            lib.CA_SELECTED_TWICE: "selected_tokens: selected_blocks are given, too; a call takes one of the two",
            lib.CA_OTHER_SELECTED: "selected_tokens: scheduler_metadata was made "
            + ("without max_selected_tokens" if not bound else f"for max_selected_tokens = {bound}")
            + (f", the call has {value} columns" if value >= 0 else ", the call has none"),
            lib.CA_BAD_SELECTED: f"{what}: position {position} holds {unit} {value}, outside 0..{bound - 1} (the "
            f"request has {bound} {unit}s); -1 pads the end",
            lib.CA_BIAS_SMALL: f"attn_bias: {where}axis {position} is {value}, expected at least the request's {bound} "
            f"{'keys' if position == 3 else 'query tokens'}",
            lib.CA_SELECTED_ORDER: f"{what}: position {position} holds {unit} {value} after {bound}, expected "
            f"ascending {unit}s, then -1",
        }[fault.status]
    )
