# SPDX-License-Identifier: Apache-2.0
"""This module has the calls of linear attention over states in slots."""

from __future__ import annotations

from typing import Any

from cpu_attn import _check, profiling
from cpu_attn._arrays import objects
from cpu_attn._native import ffi, lib
from cpu_attn.linear.plan import LinearAttentionMetadata
from cpu_attn.ops import thread_state

_GATES = {name: getattr(lib, f"CA_GATE_{name.upper()}") for name in ("log", "softplus", "dt", "sigmoid")}


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
        query: [T, Hk, Dk], of the plan's dtype. The last axis is dense, here and below; other strides are free.
        key: [T, Hk, Dk], of the same dtype.
        value: [T, Hv, Dv], of the same dtype.
        output: [T, Hv, Dv], of the same dtype or float32, changed in place.
        state_cache: [num_slots, Hv, Dk, Dv], or what ``state_layout`` says, of float32, float16 or bfloat16, changed in
            place. A state in 16 bits is rounded once a call.
        state_indices: int32 [R], the slot in which each request leaves its state, and from which it begins unless
            ``initial_state_indices`` says otherwise. Negative: it begins from zeros, and keeps nothing.
        linear_attention_metadata: the plan of the step.
        g: the logarithm of each token's decay, of float32, float16 or bfloat16: [T, Hv]; [T, Hv, Dk] with one for each
            key channel (KDA); or [Hv], the same for all tokens (lightning attention, RetNet). None: no decay. Decays
            above e^88 count as that, and below e^-87 as 0. A state or an output beyond float32 becomes infinite or NaN,
            and so do from there on the outputs of its value channel.
        beta: [T, Hv] of any of these dtypes; or [T, Hv, Dv], one for each value channel, with ``erase`` or without the
            delta rule. None: 1.
        erase: [T, Hv, Dk], what takes the place of beta in beta k: erase and write gates of their own (GDN-2).
        scale: the factor of the query; None: Dk ** -0.5.
        delta_rule: whether a token first takes from the state what its key reads there. Mamba-2, lightning attention
            and RetNet do not.
        gate: how g is made. ``log``: it is what is given. ``softplus``: what is given is raw, and
            g = -exp(A_log) softplus(g + dt_bias) (gated delta net, KDA). ``dt``: with dt = softplus(g + dt_bias), kept
            within ``dt_limit``, g = -exp(A_log) dt and beta = dt (Mamba-2), so that no beta is given. ``sigmoid``:
            g = lower_bound sigmoid(exp(A_log) (g + dt_bias)) (KDA with fla's ``lower_bound``).
        A_log: [Hv] of any of these dtypes, for gates other than ``log``. None, with ``sigmoid`` alone: 0.
        dt_bias: [Hv], or [Hv, Dk] where g is [T, Hv, Dk], for gates other than ``log``; None: 0.
        dt_limit: the least and the largest dt.
        lower_bound: the least g that the gate ``sigmoid`` makes, at most 0; for no other gate.
        D: [Hv], or [Hv, Dv] with one for each value channel, of any of these dtypes, or None: what D v is added to the
            output (Mamba-2).
        use_qk_l2norm_in_kernel: whether queries and keys are divided by sqrt(sum of their squares + ``norm_eps``).
        norm_eps: see there.
        use_beta_sigmoid_in_kernel: whether beta is the sigmoid of what is given.
        allow_neg_eigval: whether beta, after its sigmoid, is doubled.
        state_layout: ``KV`` for states [Dk, Dv], as transformers keeps them, or ``VK`` for [Dv, Dk], as vLLM and
            FlashInfer do.
        initial_state_indices: int32 [R], the slots from which requests begin that bring a state, in place of
            ``state_indices``. Several may begin from the same. Negative: from zeros.
        checkpoints: int32 [C, 3], rows (request, number of tokens, slot) that ascend: the state after so many of the
            request's tokens in this call, from 1 on, is left in the slot, too. They change no bit of anything else. A
            row with a negative slot is none.

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
    start, how = profiling.clock(), ffi.new("ca_linear_how *")
    how.gate = _check.linear_gates(gate, _GATES, g, beta, A_log, dt_bias, lower_bound)
    how.lower_bound = 0.0 if lower_bound is None else _check.lower_bound(lower_bound)
    how.delta_rule = _check.boolean("delta_rule", delta_rule)
    if erase is not None and not how.delta_rule:
        raise ValueError("erase: given, but there is no delta_rule")
    how.l2norm = _check.boolean("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    how.beta_sigmoid = _check.boolean("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    how.beta_scale = 2.0 if _check.boolean("allow_neg_eigval", allow_neg_eigval) else 1.0
    how.scale = plan.head_k_dim**-0.5 if scale is None else _check.number("scale", scale)
    how.norm_eps = _check.number("norm_eps", norm_eps, 0.0)
    how.dt_min, how.dt_max = _check.limits("dt_limit", dt_limit)
    how.state_layout = lib.CA_STATE_VK if _check.state_layout(state_layout, ("KV", "VK")) else lib.CA_STATE_KV
    features = (_check.each_token(g, plan.num_tokens), beta, erase, A_log, dt_bias, D)
    arrays = (output, state_cache, query, key, value, *features, state_indices, initial_state_indices, checkpoints)
    _run(lib.ca_linear_attend, plan, _check.LINEAR, arrays, how)
    if start:
        _record("linear_attention_with_state_cache", start, plan)
    return output


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
        x: [T, C], of the plan's dtype. The last axis is dense, here and below; other strides are free.
        weight: [C, W], W from 2 to 8, of the same dtype or float32. The last input of a window comes last.
        bias: [C], of the same dtype or float32, or None.
        output: [T, C], of the dtype of x, changed in place. It may be x itself.
        conv_state: [num_slots, C, L], or what ``state_layout`` says, of float32, float16 or bfloat16, changed in place:
            the last L inputs, the oldest first. L is W - 1 to 8.
        state_indices: int32 [R], as in :func:`linear_attention_with_state_cache`.
        linear_attention_metadata: the plan of the step, with or without heads.
        activation: ``silu`` (``swish``), or None.
        state_layout: ``CL`` for states [C, L], or ``LC`` for [L, C].
        initial_state_indices: int32 [R], or None, as in :func:`linear_attention_with_state_cache`.
        checkpoints: int32 [C, 3], or None, as in :func:`linear_attention_with_state_cache`.

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
    addresses, given, alive = objects(arrays)
    # A Python finalizer may make a call meanwhile and replace the workspace, so this one is held here.
    room = thread_state.workspace
    while status := call(plan._pointer, addresses, given, *how, *room, fault):
        if status == lib.CA_SMALL_WORKSPACE:
            thread_state.grow(plan.workspace_bytes)
            room, fault.status = thread_state.workspace, lib.CA_OK
        else:
            addresses, given, alive = _check.reread(fault, names, arrays, given, alive)


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
