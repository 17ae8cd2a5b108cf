# SPDX-License-Identifier: Apache-2.0
"""This module has the calls of linear attention over states in slots."""

from __future__ import annotations

from typing import Any

from cpu_attn import _check, profiling
from cpu_attn._arguments import CONV, LINEAR, documented
from cpu_attn._arrays import objects
from cpu_attn._native import ffi, lib
from cpu_attn.linear.plan import LinearAttentionMetadata
from cpu_attn.ops import thread_state


@documented(LINEAR)
def linear_attention_with_state_cache(
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    state_cache: Any,
    state_indices: Any,
    linear_attention_metadata: LinearAttentionMetadata,
    *,
    g: Any = None,
    beta: Any = None,
    erase: Any = None,
    scale: float | None = None,
    delta_rule: bool = True,
    gate: str = "log",
    A_log: Any = None,  # noqa: N803  # models and fla call it so
    dt_bias: Any = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    lower_bound: float | None = None,
    D: Any = None,  # noqa: N803
    use_qk_l2norm_in_kernel: bool = False,
    norm_eps: float = 1e-6,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_layout: str = "KV",
    initial_state_indices: Any = None,
    checkpoints: Any = None,
) -> Any:
    """Takes the tokens of a step through the states of their requests.

    With S [Dk, Dv] the state of a value head, and k, v, q those of a token, per token

        S = diag(exp(g)) S;   w = beta v - (beta k)^T S;   S = S + k w^T;   output = scale q^T S + D v

    where, without the delta rule, w = beta v. A request begins from the state in its slot, or from zeros where it
    brings none, and leaves its state after its last token in its slot. A request without tokens leaves its slot as it
    is. Symbols: R requests, T tokens, Hk key heads of Dk elements, Hv value heads of Dv elements; value head h has the
    query and the key of head h // (Hv // Hk).

    Args:
        {arguments}

    Returns:
        ``output``.

    Raises:
        ValueError: a shape, a stride, a slot or a number is out of range, memory overlaps, a slot is written twice, or
            a request begins from a slot that another one writes. Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        MemoryError: there is no memory for the workspace.

    Maths: arXiv:2412.06464 (gated delta net), 2510.26692 (KDA), 2605.22791 (GDN-2), 2405.21060 (Mamba-2), 2401.04658
    (lightning attention). docs/linear_attention.md says how prompts are computed.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.linear import get_linear_attention_metadata, linear_attention_with_state_cache
        >>> plan = get_linear_attention_metadata(np.array([0, 2], np.int32), "float32", 1, 1, 2, 2)
        >>> key = np.array([[[1, 0]], [[1, 0]]], np.float32)
        >>> value = np.array([[[3, 4]], [[5, 6]]], np.float32)
        >>> states, output = np.zeros((1, 1, 2, 2), np.float32), np.empty((2, 1, 2), np.float32)
        >>> slots = np.array([0], np.int32)
        >>> linear_attention_with_state_cache(key, key, value, output, states, slots, plan, scale=1.0)[1].tolist()
        [[5.0, 6.0]]
        >>> states[0, 0].tolist()  # the second value replaced the first, which had the same key
        [[5.0, 6.0], [0.0, 0.0]]
    """
    plan = _check.linear_plan("linear_attention_metadata", linear_attention_metadata, LinearAttentionMetadata, True)
    start, gates = profiling.clock(), (gate, g, beta, A_log, dt_bias, lower_bound)
    flags = (delta_rule, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    how = _check.linear_how(plan.head_k_dim, gates, erase, flags, scale, norm_eps, dt_limit, state_layout)
    features = (_check.each_token(g, plan.num_tokens), beta, erase, A_log, dt_bias, D)
    slots = (state_indices, *features, initial_state_indices, checkpoints)
    _run(lib.ca_linear_attend, plan, _check.LINEAR, (output, state_cache, query, key, value, *slots), how)
    if start:
        _record("linear_attention_with_state_cache", start, plan)
    return output


@documented(CONV)
def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any,
    output: Any,
    conv_state: Any,
    state_indices: Any,
    linear_attention_metadata: LinearAttentionMetadata,
    *,
    activation: str | None = "silu",
    state_layout: str = "CL",
    initial_state_indices: Any = None,
    checkpoints: Any = None,
) -> Any:
    """Convolves each channel of a step's tokens with the tokens before, and keeps a request's last inputs as its state.

    Token t of a request gets ``activation(bias + sum over i of weight[:, i] * x[t - (W - 1) + i])``; inputs before the
    request's first token of the step are those of its state, or 0 where it brings none. Symbols: T tokens, C channels,
    W inputs of an output, L inputs of a state.

    Args:
        {arguments}

    Returns:
        ``output``.

    Raises:
        ValueError: a shape, a stride or a slot is out of range, memory overlaps, a slot is written twice, or a request
            begins from a slot that another one writes. Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        MemoryError: there is no memory for the workspace.

    Maths: causal-conv1d's ``causal_conv1d_fn`` and ``causal_conv1d_update``.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.linear import causal_conv1d, get_linear_attention_metadata
        >>> plan = get_linear_attention_metadata(np.array([0, 3], np.int32), "float32")
        >>> x, weight = np.array([[1], [2], [3]], np.float32), np.array([[10, 1]], np.float32)
        >>> state, output = np.zeros((1, 1, 1), np.float32), np.empty((3, 1), np.float32)
        >>> causal_conv1d(x, weight, None, output, state, np.array([0], np.int32), plan, activation=None).tolist()
        [[1.0], [12.0], [23.0]]
        >>> state.item()  # the last input
        3.0
    """
    plan = _check.linear_plan("linear_attention_metadata", linear_attention_metadata, LinearAttentionMetadata, False)
    start, silu = profiling.clock(), _check.activation(activation)
    last = _check.state_layout(state_layout, ("CL", "LC"))
    arrays = (output, conv_state, x, weight, bias, state_indices, initial_state_indices, checkpoints)
    _run(lib.ca_causal_conv1d, plan, _check.CONV, arrays, silu, last)
    if start:
        _record("causal_conv1d", start, plan)
    return output


def _run(call: Any, plan: LinearAttentionMetadata, names: tuple[str, ...], arrays: tuple[Any, ...], *how: Any) -> None:
    fault = ffi.new("ca_fault *")
    addresses, described, alive = objects(arrays)
    # A Python finalizer may make a call meanwhile and replace the workspace, so this one is held here.
    room = thread_state.workspace
    while status := call(plan._pointer, addresses, described, *how, *room, fault):
        if status == lib.CA_SMALL_WORKSPACE:
            thread_state.grow(plan.workspace_bytes)
            room, fault.status = thread_state.workspace, lib.CA_OK
        else:
            addresses, described, alive = _check.reread(fault, names, arrays, described, alive)


def _record(name: str, start: int, plan: LinearAttentionMetadata) -> None:
    profiling.record(
        name,
        start,
        plan.engine,
        plan.isa,
        str(plan.dtype),
        "auto",
        num_threads=lib.ca_linear_num_threads(plan._pointer),
        num_reqs=plan.num_reqs,
        num_tokens=plan.num_tokens,
    )
