# SPDX-License-Identifier: Apache-2.0
"""What native/check/check.c and the engines found, as exceptions; what is of another class; other words for both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cpu_attn._native import ffi, lib


def instance(name: str, x: Any, *kinds: type) -> None:
    """TypeError for what is of none of these classes."""
    if not isinstance(x, kinds):
        raise TypeError(f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(x).__name__}")


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error of a call whose arguments were called otherwise by who called us: our names to theirs."""
    return type(error)(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error)))


def new_fault() -> Any:
    return ffi.new("ca_fault *")


def raise_fault(fault: Any) -> None:
    """The exception for what native/check/check.c found, if it found anything."""
    if fault.status == lib.CA_OK:
        return
    if fault.status == lib.CA_NO_MEMORY:
        raise MemoryError("no memory for the call")
    if fault.status == lib.CA_ENGINE_FAILED:
        from cpu_attn import _onednn_loader  # of the only engine that can fail, as late as in _dispatch

        raise _onednn_loader.failure("engine onednn", fault.value)
    if fault.status == lib.CA_SMALL_STACK:
        raise RuntimeError(
            f"OMP_STACKSIZE: OpenMP's threads have {fault.value} bytes of stack, a call may take {fault.bound}; set it "
            "(or ulimit -s) higher, or set_num_threads(1)"
        )
    if fault.status == lib.CA_UNKNOWN:
        raise RuntimeError("nothing was computed: native code does not take what _check has accepted")
    request, position, value, bound = fault.request, fault.position, fault.value, fault.bound
    where = f"request {request}: " if request >= 0 else ""
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
            lib.CA_BAD_SELECTED: f"selected_blocks: {where}kv head {fault.kv_head}: position {position} holds block "
            f"{value}, outside 0..{bound - 1} (the request has {bound} blocks); -1 pads the end",
            lib.CA_BIAS_SMALL: f"attn_bias: {where}axis {position} is {value}, expected at least the request's {bound} "
            f"{'keys' if position == 3 else 'query tokens'}",
            lib.CA_SELECTED_ORDER: f"selected_blocks: {where}kv head {fault.kv_head}: position {position} holds block "
            f"{value} after {bound}, expected ascending blocks, then -1",
        }[fault.status]
    )
