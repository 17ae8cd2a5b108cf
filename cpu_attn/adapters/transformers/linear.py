# SPDX-License-Identifier: Apache-2.0
"""This module has the functions of linear attention that transformers' models call, and gives them to the models.

They are called with the arguments of fla, causal-conv1d and mamba_ssm, some of them by position, and with others that
are for other layers. transformers' own function is called where gradients are wanted, and for what
:mod:`cpu_attn.linear` does not have: other devices and dtypes, activations other than SiLU, windows of more than eight
inputs, and decays for each channel and element of a state (Mamba-1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cpu_attn.linear_attention import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kda,
    delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from cpu_attn.linear_attention.call import States, convolve, each
from cpu_attn.transformers import private

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
        if needed <= call.keys() and all(map(_computable, call.values())) and has(call):
            return ours({k: x.detach() if isinstance(x, Tensor) else x for k, x in call.items()})
        return theirs(*args, **kwargs)

    return function


def enable() -> None:
    """Gives models the functions of :data:`FUNCTIONS`."""
    private.give_functions(_instead)


def disable() -> None:
    """Gives models transformers' functions back."""
    private.take_functions_back()
