# SPDX-License-Identifier: Apache-2.0
"""This module is ``torch.ops.cpu_attn``: the three calls as ops of torch, under vLLM's names and with vLLM's arguments
in its order (those of its ``torch.ops._C``). What cpu-attn has besides is keyword-only, so that only the namespace
changes::

    get_scheduler_metadata       the plan of a step, as a tensor
    cpu_attn_reshape_and_cache   writes key_cache and value_cache
    cpu_attention_with_kv_cache  writes output, and lse where given

Meaning, shapes and errors are those of cpu_attn's functions. ``sliding_window_size`` is an int or (left, right).
mm_prefix_range is int32 [n, 3], rows of (request, start, end); document_start_loc int32 [n, 2], of (request, start).
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import torch
from cpu_attn import UnavailableError, _arguments, _check, ops
from cpu_attn.plan import SchedulerMetadata
from cpu_attn.plan import get_scheduler_metadata as make_plan
from torch.library import Library, register_fake, register_kernel


def _options(call: _arguments.Call) -> str:
    """Gives what a call takes besides vLLM's arguments, which end with kv_cache_dtype, in torch's schema language."""
    first = 1 + [row.name for row in call.rows].index("kv_cache_dtype")
    found = []
    for row in call.rows[first:]:
        if isinstance(row, _arguments.Array):
            kind, default = "Tensor(b!)?" if _arguments.WRITTEN in row.flags else "Tensor?", None
        else:
            kind, default = row.schema, row.default
        found.append(f"{kind} {row.name}={json.dumps(default) if isinstance(default, str) else default}")
    return ", ".join(found)


_SCHEMAS = (
    "get_scheduler_metadata(SymInt num_req, SymInt num_heads_q, SymInt num_heads_kv, SymInt head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool casual, int[1] window_size, str isa_hint, bool enable_kv_split, "
    f'Tensor? dynamic_causal, str kv_cache_dtype="auto", *, {_options(_arguments.PLAN)}) -> Tensor',
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    'Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto", *, '
    f"{_options(_arguments.WRITE)}) -> ()",
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, "
    "int[1] sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux, "
    'Tensor? dynamic_causal, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto", *, '
    f"{_options(_arguments.ATTENTION)}) -> ()",
)

# ---- plans as tensors ----


# The tensors hold numbers that nobody guesses, and the plans are found by these. A plan lives as long as the memory of
# its tensor.
_plans: dict[int, tuple[SchedulerMetadata, weakref.ref[Any]]] = {}
_numbers = itertools.count(int.from_bytes(os.urandom(8), "big") >> 2)


def tensor_of(plan: SchedulerMetadata) -> torch.Tensor:
    """Gives a plan of :func:`cpu_attn.get_scheduler_metadata` as the ops take it. The op of that name does the same,
    and takes the time that torch needs to hand it its arguments besides."""
    number, forget = next(_numbers), _plans.pop
    memory = np.array([number], np.int64)
    _plans[number] = plan, weakref.ref(memory, lambda _: forget(number))
    return torch.from_numpy(memory)


def plan_of(scheduler_metadata: torch.Tensor) -> SchedulerMetadata:
    """Gives the plan that a tensor of ``get_scheduler_metadata`` stands for; ValueError where it stands for none."""
    try:
        return _plans[scheduler_metadata.item()][0]
    except (AttributeError, KeyError, RuntimeError):  # torch takes None for a tensor
        raise ValueError(
            "scheduler_metadata: no plan of this process that is still there; expected the tensor that "
            "torch.ops.cpu_attn.get_scheduler_metadata returned (a copy is of no use once that one is gone)"
        ) from None


# ---- the ops ----


# These are the core's names of arguments and vLLM's.
_PLAN_NAMES = {
    "num_reqs": "num_req",
    "num_heads": "num_heads_q",
    "num_kv_heads": "num_heads_kv",
    "head_size": "head_dim",
    "sliding_window": "window_size",
    "isa": "isa_hint",
}
_ATTENTION_NAMES = {"sliding_window": "sliding_window_size"}


def _window(x: list[int]) -> Any:
    return x[0] if len(x) == 1 else x


def _rows(name: str, x: torch.Tensor | None, width: int) -> dict[int, list[Any]] | None:
    """Gives rows (request, ...) as the mapping by request that the core takes."""
    if x is None:
        return None
    found: dict[int, list[Any]] = {}
    _check.array(name, x, ["int32"], [("rows", None), ("columns", width)])
    for request, *rest in x.tolist():
        found.setdefault(request, []).append(tuple(rest) if width > 2 else rest[0])
    return found


def _get_scheduler_metadata(
    num_req: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    seq_lens: Any,
    dtype: torch.dtype,
    query_start_loc: Any,
    casual: bool,
    window_size: list[int],
    isa_hint: str,
    enable_kv_split: bool,
    dynamic_causal: Any,
    kv_cache_dtype: str = "auto",
    *,
    mm_prefix_range: Any = None,
    document_start_loc: Any = None,
    **options: Any,
) -> torch.Tensor:
    try:
        plan = make_plan(
            *(num_req, num_heads_q, num_heads_kv, head_dim, seq_lens, dtype, query_start_loc, casual),
            *(_window(window_size), isa_hint, enable_kv_split, dynamic_causal, kv_cache_dtype),
            mm_prefix_range=_rows("mm_prefix_range", mm_prefix_range, 3),
            document_start_loc=_rows("document_start_loc", document_start_loc, 2),
            **options,
        )
    except (TypeError, ValueError, UnavailableError) as e:
        raise _check.renamed(e, _PLAN_NAMES) from None
    return tensor_of(plan)


def _attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    alibi_slopes: Any,
    sliding_window_size: list[int],
    block_table: Any,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: Any,
    dynamic_causal: Any,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> None:
    try:
        ops.attention_with_kv_cache(
            query,
            key_cache,
            value_cache,
            output,
            query_start_loc,
            seq_lens,
            scale,
            causal,
            alibi_slopes,
            _window(sliding_window_size),
            block_table,
            softcap,
            plan_of(scheduler_metadata),
            s_aux,
            dynamic_causal,
            k_scale,
            v_scale,
            kv_cache_dtype,
            **options,
        )
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, _ATTENTION_NAMES) from None


def _fake_metadata(
    num_req: int, num_heads_q: int, num_heads_kv: int, head_dim: int, seq_lens: Any, *_: Any, **__: Any
) -> Any:
    return seq_lens.new_empty(1, dtype=torch.int64)


def _fake_of(run: Callable[..., None]) -> Callable[..., None]:
    """Makes the fake of a kernel, which writes into arguments and returns nothing. A graph would hand the kernel its
    inputs detached, so what needs gradients is refused here."""
    names = tuple(inspect.signature(run).parameters)

    def fake(*args: Any, **kwargs: Any) -> None:
        for name, x in (*zip(names, args, strict=False), *kwargs.items()):
            if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
                raise ValueError(f"{name}: requires grad; pass it detached")

    return fake


def _transformed(*_: Any, **__: Any) -> None:
    raise RuntimeError("cpu_attn's ops have no rules for torch.func (grad, jvp, vmap, ...), nor gradients")


_IMPLEMENTATIONS = (
    # A plan lives as long as its tensor: whoever folds a graph's constants must not keep a copy of one.
    (_get_scheduler_metadata, _fake_metadata, torch.Tag.nondeterministic_seeded),
    (ops.reshape_and_cache, _fake_of(ops.reshape_and_cache)),
    (_attention, _fake_of(_attention)),
)
library = Library("cpu_attn", "FRAGMENT")
for _schema, (_run, _shapes, *_tags) in zip(_SCHEMAS, _IMPLEMENTATIONS, strict=True):
    _name = library.define(_schema, tags=_tags)
    # This hides the kernel from dynamo, which else traces what an op calls where that op is called between graphs.
    register_kernel(f"cpu_attn::{_name}", "cpu", _run, lib=library)
    register_fake(f"cpu_attn::{_name}", _shapes, lib=library)
    # The kernel refuses meta tensors by name, whereas the one that register_fake leaves there would pass over them.
    library.impl(_name, _run, "Meta", allow_override=True)
    if not _tags:  # torch.func.grad and jvp would else pass over what they write
        library.impl(_name, _transformed, "FuncTorchDynamicLayerFrontMode")
