# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of linear attention that transformers' models call, and gives them to the models.

They are called with the arguments of fla, causal-conv1d and mamba_ssm, some of them by position, and with others that
are for other layers. transformers' own function is called where gradients are wanted, and for what
:mod:`cpu_attn.linear` does not have: other devices and dtypes, activations other than SiLU, windows of more than eight
inputs, and decays for each channel and element of a state (Mamba-1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.linear_attention import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kda,
    delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    mamba,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from cpu_attn.linear_attention.call import States, convolve, each, integers, runs
from cpu_attn.transformers import lightning, private, states

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 8  # inputs of a convolution, and of its state


_RULE = set(inspect.signature(delta_rule.run).parameters)


def _rule(by_channel: bool) -> Callable[..., Any]:
    """Lets a state become the next one where it lies: models put that back to where they had the state from."""
    return lambda call: delta_rule.run(**call, by_channel=by_channel, in_place=True)


def _has_rule(call: dict[str, Any]) -> bool:
    return call["q"].dtype == call["k"].dtype == call["v"].dtype and call.keys() <= _RULE


def _convolve(call: dict[str, Any]) -> Any:
    """Leaves channels side by side, as what follows reads them."""
    if call.keys() - {"x", "weight", "bias", "activation"}:
        return causal_conv1d_fn(**call)
    x, weight, (batch_size, channels, length) = call["x"], call["weight"], call["x"].shape
    states = States(None, (batch_size, channels, weight.shape[1] - 1), False, x.dtype)
    silu = call.get("activation") is not None
    out = convolve(x.transpose(1, 2), weight, call.get("bias"), each(batch_size, length), states, silu)
    return out.transpose(1, 2)


def _has_convolution(call: dict[str, Any]) -> bool:
    x, weight, state = call["x"], call["weight"], call.get("conv_state")
    lengths = [weight.shape[1]] if state is None else [weight.shape[1], state.shape[2]]
    return (
        x.dim() == 3
        and call.get("activation") in (None, "silu", "swish")
        and 2 <= min(lengths) <= max(lengths) <= _WIDEST
    )


def _has_scan(call: dict[str, Any]) -> bool:
    state = call.get("state")
    return call["x"].dtype == call["B"].dtype == call["C"].dtype and (state is None or state.dim() == 4)


# By the names of the functions: whose signature names what is given by position, when it is ours, and what is called.
FUNCTIONS: dict[str, tuple[Any, Any, Any]] = {
    "chunk_gated_delta_rule": (chunk_gated_delta_rule, _has_rule, _rule(False)),
    "fused_recurrent_gated_delta_rule": (fused_recurrent_gated_delta_rule, _has_rule, _rule(False)),
    "chunk_kda": (chunk_kda, _has_rule, _rule(True)),
    "fused_recurrent_kda": (fused_recurrent_kda, _has_rule, _rule(True)),
    "causal_conv1d_fn": (causal_conv1d_fn, _has_convolution, _convolve),
    "causal_conv1d_update": (causal_conv1d_update, _has_convolution, lambda call: causal_conv1d_update(**call)),
    "mamba_chunk_scan_combined": (
        *(mamba_chunk_scan_combined, _has_scan),
        lambda call: mamba_chunk_scan_combined(**call),
    ),
    "selective_state_update": (selective_state_update, _has_scan, lambda call: selective_state_update(**call)),
}


def _held_rule(by_channel: bool) -> Callable[..., Any]:
    def rule(call: dict[str, Any], held: Any) -> Any:
        call = {name: x for name, x in call.items() if name not in ("cu_seqlens", "initial_state")}
        return delta_rule.run(**call, by_channel=by_channel, held=held)

    return rule


def _held_scan(call: dict[str, Any], held: Any) -> Any:
    given = {name: x for name, x in call.items() if name not in ("seq_idx", "cu_seqlens", "initial_states")}
    return mamba.scan(**given, held=held)


def _held_convolution(call: dict[str, Any], held: Any) -> Any:
    starts, states = held
    options = call["weight"], call.get("bias"), starts, states, call.get("activation") is not None
    return convolve(call["x"].transpose(1, 2), *options).transpose(1, 2)


# For a step of continuous batching: what asks for the states, what is called with them, and which axis has tokens, of
# the first result and of these arguments.
_TOKENS = ("q", "k", "v", "g", "beta")
HELD: dict[str, tuple[str, Any, int, tuple[str, ...]]] = {
    "chunk_gated_delta_rule": ("rule", _held_rule(False), 1, _TOKENS),
    "chunk_kda": ("rule", _held_rule(True), 1, _TOKENS),
    "mamba_chunk_scan_combined": ("rule", _held_scan, 1, ("x", "dt", "B", "C")),
    "causal_conv1d_fn": ("conv", _held_convolution, 2, ("x",)),
}


def _with_states(name: str, call: dict[str, Any], held: Any) -> Any:
    """Computes the tokens of a step, without those that pad it."""
    _, function, axis, tokens = HELD[name]
    count, length = int(held[0][-1]), call[tokens[0]].shape[axis]
    found = function(call | {x: call[x].narrow(axis, 0, count) for x in tokens if x in call}, held)
    if count == length:
        return found
    first = found[0] if isinstance(found, tuple) else found
    shape = list(first.shape)
    shape[axis] = length - count
    padded = torch.cat([first, first.new_zeros(shape)], axis)
    return (padded, *found[1:]) if isinstance(found, tuple) else padded


def _told_apart(name: str, call: dict[str, Any], order: list[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Gives what keeps packed sequences apart in a call that does not have it, of a model that was told where they
    start: by ``cu_seq_lens_q``, which attention reads, or by ``seq_idx``, which convolutions and scans read."""
    starts, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if "seq_idx" in order and "seq_idx" not in call and starts is not None:
        return _seq_idx(starts, call["x"].shape[0], call["x"].shape[HELD[name][2]])
    if "seq_idx" in order or "cu_seqlens" not in order or "cu_seqlens" in call:
        return {}
    if starts is None and numbers is not None:
        rows, length = call["q"].shape[:2]
        found, firsts = runs(integers("seq_idx", numbers, B=rows, T=length))
        if len(found) - 1 == rows == len(firsts):
            return {}
        _one_row("seq_idx", rows)
        starts = torch.from_numpy(found)
    return {} if starts is None else {"cu_seqlens": starts}


def _seq_idx(cu_seq_lens_q: Any, rows: int, length: int) -> dict[str, Any]:
    """Gives the numbers of the sequences that begin there. Tokens before them, which a cache has added, belong to the
    first."""
    starts = _check.rising("cu_seq_lens_q", integers("cu_seq_lens_q", cu_seq_lens_q, **{"N + 1": None}))
    if len(starts) <= 2:
        return {}
    _one_row("cu_seq_lens_q", rows)
    if starts[-1] > length:
        raise ValueError(f"cu_seq_lens_q[{len(starts) - 1}]: {starts[-1]}, expected at most {length} tokens")
    counts = np.diff(starts)
    counts[0] += length - starts[-1]
    return {"seq_idx": torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))[None]}


def _one_row(name: str, rows: int) -> None:
    if rows != 1:
        raise ValueError(f"{name}: the batch size is {rows}, expected 1 of packed sequences")


def _computable(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return True
    wanted = torch.is_grad_enabled() and x.requires_grad
    return bool(x.device.type == "cpu" and (x.dtype in _FLOATS or not x.is_floating_point()) and not wanted)


def _instead(name: str, theirs: Any) -> Any:
    """Gives what is called in place of transformers' function, or None where there is nothing."""
    if name not in FUNCTIONS:
        return None
    like, has, ours = FUNCTIONS[name]
    parameters = [p for p in inspect.signature(like).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    order, needed = [p.name for p in parameters], {p.name for p in parameters if p.default is p.empty}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        call = {
            k: x for k, x in (dict(zip(order, args, strict=False)) | kwargs).items() if k in order and x is not None
        }
        held = states.taken(HELD[name][0], kwargs) if name in HELD else None
        if held is None:
            if not (needed <= call.keys() and all(map(_computable, call.values()))):
                return theirs(*args, **kwargs)
            told = _told_apart(name, call, order, kwargs)
            call |= told
            if not has(call):  # theirs refuses sequences that it does not keep apart
                return theirs(*args, **kwargs | told)
        call = {k: x.detach() if isinstance(x, Tensor) else x for k, x in call.items()}
        return ours(call) if held is None else _with_states(name, call, held)

    return function


def enable() -> None:
    """Gives models the functions of :data:`FUNCTIONS`, and layers of lightning attention their forward."""
    private.give_functions(_instead)
    lightning.enable()


def disable() -> None:
    """Gives models what is transformers' own back."""
    private.take_functions_back()
    lightning.disable()


@contextmanager
def states_of(model: Any, config: Any) -> Iterator[None]:
    """Lets continuous batching keep the states of a model's layers, which have our functions meanwhile."""
    if not states.has_states(config):
        yield
        return
    enabled = private.has_given()
    enable()
    try:
        states.open_model(model, config)
        yield
    finally:
        states.close_model(config)
        if not enabled:
            disable()
