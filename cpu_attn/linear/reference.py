# SPDX-License-Identifier: Apache-2.0
"""This module defines linear attention in float64 NumPy, token by token. It is slow and short, and every engine is
measured against it.

With S [Dk, Dv] the state of a value head, each token of a request does

    S = diag(a) S                         a: one decay, or one for each key channel
    w = beta v - (e k)^T S                with the delta rule; e: erase where it is given, else beta
    w = beta v                            without
    S = S + k w^T
    o = scale q^T S + D v

Queries and keys are first divided by sqrt(sum of their squares + norm_eps) where that is asked for. A number below
2^-126 counts as 0 where it is given and where it results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpu_attn.reference import widened

Float64 = NDArray[np.float64]

# Outputs of a request may have this relative RMS error, by dtype of the inputs, and states by their own dtype, or
# STATE_BUDGET by dtype of the inputs where that is more: calls in bfloat16 may multiply integers of 16 bits.
BUDGET = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
STATE_BUDGET = {"float32": 1e-5, "float16": 1e-5, "bfloat16": 2e-3}


class Expected(NamedTuple):
    """Holds what a call has to give: outputs [T, Hv, Dv], the state of each request after its last token [Hv, Dk, Dv],
    and the states after other numbers of its tokens, by (request, number)."""

    output: Float64
    states: list[Float64]
    checkpoints: dict[tuple[int, int], Float64]


def softplus(x: Float64) -> Float64:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: Float64) -> Float64:
    with np.errstate(over="ignore"):
        found: Float64 = 1 / (1 + np.exp(-x))
    return found


def gates(
    tokens: int,
    heads: int,
    g: Any,
    beta: Any,
    gate: str,
    a_log: Any,
    dt_bias: Any,
    dt_limit: tuple[float, float],
    lower_bound: float | None,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> tuple[Float64, Float64]:
    """Gives decays [T, Hv, Dk or 1] and betas [T, Hv, Dv or 1]."""
    if g is None:
        raw = np.zeros((tokens, heads, 1))
    else:
        raw = widened(g)
        raw = np.broadcast_to(raw, (tokens, heads))[..., None] if raw.ndim < 3 else raw
    betas = np.ones((tokens, heads, 1)) if beta is None else widened(beta)
    betas = betas[..., None] if betas.ndim < 3 else betas
    if beta_sigmoid:
        betas = sigmoid(betas)
    if allow_neg_eigval and beta is not None:
        betas = 2 * betas
    if gate != "log":
        bias = np.zeros(1) if dt_bias is None else widened(dt_bias)
        raw = raw + (bias[:, None] if bias.ndim == 1 and dt_bias is not None else bias)
        rate = np.exp(np.zeros(heads) if a_log is None else widened(a_log))[:, None]
        if gate == "sigmoid":
            raw = np.float64(lower_bound) * sigmoid(rate * raw)
        elif gate == "logsigmoid":
            raw = -rate * softplus(-raw)
        else:
            dt = softplus(raw)
            if gate == "dt":
                dt = betas = np.clip(dt, *dt_limit)
            raw = -rate * dt
    return np.exp(raw), betas


def linear_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    query_start_loc: NDArray[np.int32],
    states: Sequence[NDArray[Any] | None],
    *,
    g: Any = None,
    beta: Any = None,
    erase: Any = None,
    scale: float | None = None,
    delta_rule: bool = True,
    gate: str = "log",
    A_log: Any = None,  # noqa: N803
    dt_bias: Any = None,
    dt_limit: tuple[float, float] = (0.0, np.inf),
    lower_bound: float | None = None,
    D: Any = None,  # noqa: N803
    use_qk_l2norm_in_kernel: bool = False,
    norm_eps: float = 1e-6,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    checkpoints: Mapping[int, Sequence[int]] | None = None,
) -> Expected:
    """Computes what the call of that name does. states: what each request begins from, [Hv, Dk, Dv], None: zeros.
    checkpoints: after how many tokens of which request the state is wanted."""
    tokens, heads, dv = value.shape
    q, k = (np.repeat(widened(x), heads // x.shape[1], axis=1) for x in (query, key))
    v, dk = widened(value), q.shape[2]
    if use_qk_l2norm_in_kernel:
        q, k = (x / np.sqrt((x * x).sum(axis=2, keepdims=True) + norm_eps) for x in (q, k))
    q = q * (dk**-0.5 if scale is None else scale)
    gating = (gate, A_log, dt_bias, dt_limit, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    a, b = gates(tokens, heads, g, beta, *gating)
    e = k * (b if erase is None else widened(erase)) if delta_rule else k
    skip = np.zeros(heads) if D is None else widened(D)
    skip = skip[:, None] if skip.ndim == 1 else skip
    output = np.zeros((tokens, heads, dv))
    after: list[Float64] = []
    kept: dict[tuple[int, int], Float64] = {}
    for r, start in enumerate(states):
        s = np.zeros((heads, dk, dv)) if start is None else widened(start)
        first, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        wanted = set((checkpoints or {}).get(r, ()))
        for t in range(first, end):
            s = a[t][:, :, None] * s
            w = b[t] * v[t]
            if delta_rule:
                w = w - np.einsum("hk,hkv->hv", e[t], s)
            s = s + k[t][:, :, None] * w[:, None, :]
            output[t] = np.einsum("hk,hkv->hv", q[t], s) + skip * v[t]
            if t + 1 - first in wanted:
                kept[r, t + 1 - first] = widened(s)
        after.append(widened(s))
    return Expected(widened(output), after, kept)


def causal_conv1d(
    x: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None,
    query_start_loc: NDArray[np.int32],
    states: Sequence[NDArray[Any] | None],
    length: int,
    activation: str | None = "silu",
    checkpoints: Mapping[int, Sequence[int]] | None = None,
) -> Expected:
    """Computes what the call of that name does. states: what each request begins from, [C, length], None: zeros."""
    width, w = weight.shape[1], widened(weight)
    output = np.zeros(x.shape)
    after: list[Float64] = []
    kept: dict[tuple[int, int], Float64] = {}
    for r, start in enumerate(states):
        first, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        before = np.zeros((x.shape[1], length)) if start is None else start.astype(np.float64)
        inputs = np.concatenate([before, x[first:end].astype(np.float64).T], axis=1)  # [C, length + tokens]
        for t in range(end - first):
            output[first + t] = (widened(inputs[:, length + t + 1 - width : length + t + 1]) * w).sum(axis=1)
        kept |= {(r, n): inputs[:, n : n + length] for n in (checkpoints or {}).get(r, ())}
        after.append(inputs[:, end - first :])
    if bias is not None:
        output += widened(bias)
    if activation is not None:
        output *= sigmoid(output)
    return Expected(widened(output), after, kept)
