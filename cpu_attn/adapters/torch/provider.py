# SPDX-License-Identifier: Apache-2.0
"""This module is torch's flash attention on the CPU: what ``torch.nn.attention.varlen`` and
``aten::_flash_attention_forward`` call.

Keys and values are read where they lie.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from cpu_attn import UnavailableError, _arrays, _check, ops
from cpu_attn.plan import get_scheduler_metadata
from cpu_attn.torch.packed import parts_of, starts_of
from torch.library import Library, register_kernel
from torch.nn.attention import register_flash_attention_impl

NAME = "cpu_attn"
# These are the core's names of arguments and torch's.
_NAMES = {
    "query_start_loc": "cu_seq_q",
    "seq_lens": "seqused_k",
    "key_cache": "key",
    "value_cache": "value",
    "output": "out",
    "sliding_window": "window_size",
    "isa": "CPU_ATTN_ISA",
}


def _attend(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Writes out, and returns lse float32 [Hq, T_q]. max_q and max_k are not needed: the lengths are there."""
    left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
    causal = is_causal or right == 0
    if dropout_p:
        raise ValueError(f"dropout_p: {dropout_p}, expected 0: {NAME} is for inference")
    if return_debug_mask:
        raise ValueError("return_debug_mask: True, expected False: the attention matrix never exists")
    if alibi_slopes is not None and not causal:
        raise ValueError("alibi_slopes: only for causal attention (window_size_right 0)")
    if query.dim() != 3:
        raise ValueError(f"query: {query.dim()} axes, expected 3: [T_q, Hq, D] and cu_seq_q")
    if out.dim() != 3 or len(out) != len(query):
        raise ValueError(f"out: shape {tuple(out.shape)}, expected [{len(query)}, Hq, D] for the tokens of query")
    if num_splits is not None and num_splits < 0:
        raise ValueError(f"num_splits: {num_splits}, expected at least 0")
    starts = starts_of("cu_seq_q", cum_seq_q, len(query))
    if starts[-1] != len(query):
        raise ValueError(f"query: {len(query)} tokens, expected cu_seq_q[-1] = {starts[-1]}")
    lens, parts = parts_of(key, value, cum_seq_k, seqused_k, block_table, len(starts) - 1)
    lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    scale = max(1, query.shape[2]) ** -0.5 if scale is None else scale  # the plan refuses a head size of 0
    for first, end, k, v, table in parts:
        tokens = slice(int(starts[first]), int(starts[end]))
        plan = get_scheduler_metadata(
            *(end - first, query.shape[1], k.shape[2], query.shape[2], lens[first:end], query.dtype),
            *(starts[first : end + 1] - starts[first], causal, (left, -1 if causal else right), "auto"),
            enable_kv_split=num_splits != 1,
            kv_cache_layout="NHD",
        )
        arrays = (query[tokens], k, v, out[tokens], table)
        ops.attend(plan, *arrays, ops.Logits(scale, alibi_slopes=alibi_slopes), lse=lse[:, tokens])
    return lse


def flash_attention_forward_out(out: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Serves as ``aten::_flash_attention_forward_no_dropout_inplace``: out [T_q, Hq, D] is written, lse [Hq, T_q]
    returned."""
    try:
        tensors, names = [x.detach() if x.requires_grad else x for x in args[:3]], ("query", "key", "value")
        inputs = [_arrays.view(*x, _check.FLOATS) for x in zip(names, tensors, strict=True)]
        memory = [_arrays.view("out", out, _check.FLOATS), *inputs]
        _check.apart(("out", *names), memory, 1)  # all are checked before the first part is written
        return _attend(out, *tensors, *args[3:], **options)
    except (TypeError, ValueError, UnavailableError) as e:
        raise _check.renamed(e, _NAMES) from None


def flash_attention_forward(query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Serves as ``aten::_flash_attention_forward``: it gives out, lse [Hq, T_q], and what only dropout would need."""
    out = torch.empty_like(query, requires_grad=False)
    lse = flash_attention_forward_out(out, query, *args, **options)
    none = torch.zeros((), dtype=torch.uint64)
    return out, lse, torch.zeros(2, dtype=torch.uint64), none, query.new_empty(0)


def flash_attention_backward(*args: Any, **options: Any) -> None:
    raise NotImplementedError(f"{NAME} has no backward: it is for inference, under torch.no_grad()")


class _Handle:
    """Keeps the kernels registered until torch removes them (``restore_flash_attention_impl``). Their fakes are torch's
    own. No graph holds the in-place form: dynamo breaks there, and traces what is called between graphs, from which
    register_kernel hides the kernels."""

    def __init__(self) -> None:
        importlib.import_module("torch.nn.attention.varlen")  # it tells dynamo so; inductor cannot compile that form
        self.library = Library("aten", "IMPL", "CPU")
        for name, run in (
            ("forward", flash_attention_forward),
            ("forward_no_dropout_inplace", flash_attention_forward_out),
            ("backward", flash_attention_backward),
        ):
            register_kernel(f"aten::_flash_attention_{name}", "cpu", run, lib=self.library)

    def remove(self) -> None:
        self.library._destroy()


def register() -> None:
    """Tells torch the name; ``torch.nn.attention.activate_flash_attention_impl("cpu_attn")`` is for users to call."""
    register_flash_attention_impl(NAME, register_fn=_Handle)
