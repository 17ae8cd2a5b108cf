# SPDX-License-Identifier: Apache-2.0
"""This module has the gated delta rule and Kimi delta attention with the names of flash-linear-attention (fla) 0.6.

Symbols: B sequences of T tokens, or one row of T tokens in which ``cu_seqlens`` says where N sequences start; H heads
of queries and keys with K elements, HV of values with V elements. HV is a multiple of H.

All of them:

- Tensors are on the CPU, of float32, float16 or bfloat16. Where q, k and v differ, they are computed in float32. The
  output has the dtype of v.
- Every call is computed alike, by chunks where there are tokens for it (docs/linear_attention.md): that a function is
  called ``chunk`` or ``fused_recurrent`` makes no difference, and neither does ``chunk_size``.
- ``initial_state`` stays as it is. The final state is float32, in new memory.
- ValueError or TypeError is raised for what does not fit, before anything is computed, and for tensors that require
  grad while grad mode is on: there is no backward pass. torch.compile breaks its graph at a call.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.linear_attention.call import Int32, States, attend, only, optional, packed, starts_of, tensors
from cpu_attn.torch.entry import RefusedError, axes, entry

_NAMES = {"query": "q", "key": "k", "value": "v", "state_cache": "initial_state", "query_start_loc": "cu_seqlens"}
_NAMES |= {"num_v_heads": "HV", "num_k_heads": "H", "head_k_dim": "K", "head_v_dim": "V", "isa": "CPU_ATTN_ISA"}


@entry(**_NAMES)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule (arXiv:2412.06464).

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], the logarithm of each token's decay; with ``use_gate_in_kernel`` what it is made of.
        beta: [B, T, HV].
        scale: the factor of q; None: K ** -0.5.
        initial_state: [N, HV, K, V], or None: zeros. N is B without ``cu_seqlens``.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: whether q and k are divided by sqrt(sum of squares + 1e-6).
        use_beta_sigmoid_in_kernel: whether beta is the sigmoid of what is given.
        allow_neg_eigval: whether that sigmoid is doubled.
        state_v_first: whether states are [N, HV, V, K].
        cu_seqlens: int64 or int32 [N + 1], where sequences start in a batch of 1.
        cu_seqlens_cpu: accepted: it repeats ``cu_seqlens``.
        chunk_indices: accepted: it follows from ``cu_seqlens``.
        cp_context: None.
        **kwargs: ``use_gate_in_kernel``, with ``A_log`` [HV] and ``dt_bias`` [HV] or None:
            g = -exp(A_log) softplus(g + dt_bias). ``chunk_size``: accepted.

    Returns:
        (o [B, T, HV, V], the final state or None).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    only("cp_context", cp_context, None, "there is one process; cpu_attn.distributed shares work among several")
    gate = {name: kwargs.pop(name, default) for name, default in _GATE.items()}
    state_v_first = _extra(kwargs, state_v_first, (16, 32, 64))
    if g is None or beta is None:
        raise ValueError(f"{'g' if g is None else 'beta'}: is None")
    return run(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens),
        **gate,
    )


@entry(**_NAMES)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803  # fla calls it so
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes what :func:`chunk_gated_delta_rule` does, with other arguments.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], or None: no decay.
        gk: [B, T, HV, K], the logarithm of a decay for each key channel, which is added to ``g``.
        gv: None: states have no decay for each value channel.
        beta: [B, T, HV], or None: 1.
        scale: as there, like what follows.
        initial_state: as there.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        use_gate_in_kernel: whether g = -exp(A_log) softplus(g + dt_bias).
        A_log: [HV].
        dt_bias: [HV] or None.
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        state_v_first: as there.
        cu_seqlens: as there.

    Returns:
        (o [B, T, HV, V], the final state or None).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    only("gv", gv, None, "a state has one decay, or K of them, and none for each of V")
    state_v_first = _extra(kwargs, state_v_first)
    if gk is not None:
        if _check.boolean("use_gate_in_kernel", use_gate_in_kernel):
            raise RefusedError("gk: given, but use_gate_in_kernel makes the decays of g alone")
        q_, gk_, g_ = *tensors(q=q, gk=gk), *optional(g=g)
        axes("gk", gk_, B=None, T=None, HV=None, K=q_.shape[-1])
        if g_ is not None:
            axes("g", g_, **dict(zip(("B", "T", "HV"), gk_.shape[:3], strict=True)))
        g = gk_ if g_ is None else gk_.float() + g_.float().unsqueeze(3)
    return run(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens),
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        by_channel=gk is not None,
    )


@entry(**_NAMES)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes Kimi delta attention (arXiv:2510.26692): the gated delta rule with a decay for each key channel.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], the logarithm of each token's decays; with ``use_gate_in_kernel`` what they are made of.
        beta: [B, T, HV].
        scale: as for :func:`chunk_gated_delta_rule`, like what is not named below.
        initial_state: as there.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        use_gate_in_kernel: whether g = -exp(A_log) softplus(g + dt_bias) or, with ``lower_bound``,
            g = lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        safe_gate: accepted: with ``use_gate_in_kernel`` it needs a ``lower_bound`` from -5 to below 0.
        lower_bound: a number, or None.
        disable_recompute: accepted: it is about a backward pass.
        return_intermediate_states: False.
        state_v_first: as there.
        cu_seqlens: as there.
        cu_seqlens_cpu: accepted: it repeats ``cu_seqlens``.
        cp_context: None.
        use_graph: accepted, with ``max_num_seqs``: they are about graphs of a GPU.
        max_num_seqs: accepted.
        **kwargs: ``A_log`` [HV], None only with ``lower_bound``, and ``dt_bias`` [HV * K] or None, for
            ``use_gate_in_kernel``. ``chunk_size``: accepted.

    Returns:
        (o [B, T, HV, V], the final state or None).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    only("cp_context", cp_context, None, "there is one process; cpu_attn.distributed shares work among several")
    only("return_intermediate_states", return_intermediate_states, False, "no state is kept after each chunk")
    gate = {name: kwargs.pop(name, None) for name in ("A_log", "dt_bias")}
    state_v_first = _extra(kwargs, state_v_first, (32, 64))
    if _check.boolean("safe_gate", safe_gate) and _check.boolean("use_gate_in_kernel", use_gate_in_kernel):
        bound = _check.number("lower_bound", lower_bound)
        if not -5 <= bound < 0:
            raise ValueError(f"lower_bound: {bound}, expected -5 to below 0 with safe_gate")
    return run(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens),
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        **gate,
        by_channel=True,
    )


@entry(**_NAMES)
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes what :func:`chunk_kda` does, with those of its arguments that follow.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K].
        beta: [B, T, HV].
        A_log: [HV], for ``use_gate_in_kernel``.
        dt_bias: [HV * K] or None, for ``use_gate_in_kernel``.
        scale: as there, like what follows.
        initial_state: as there.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        use_gate_in_kernel: as there.
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        lower_bound: as there.
        state_v_first: as there.
        cu_seqlens: as there.

    Returns:
        (o [B, T, HV, V], the final state or None).

    Raises:
        ValueError: a shape or an argument does not fit, or a tensor requires grad while grad mode is on.
        TypeError: an argument is no tensor, or has another dtype.
    """
    state_v_first = _extra(kwargs, state_v_first)
    return run(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens),
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        by_channel=True,
    )


_GATE: dict[str, Any] = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}


def _extra(kwargs: dict[str, Any], state_v_first: bool, chunk_sizes: tuple[int, ...] = ()) -> bool:
    """Reads fla's arguments without a name in its signature, and gives state_v_first, which had another name."""
    if "head_first" in kwargs:
        raise RefusedError("head_first: fla has removed it; tensors are [B, T, H, ...]")
    state_v_first = _check.boolean("state_v_first", state_v_first)
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError("transpose_state_layout: given beside state_v_first, its newer name")
        state_v_first = _check.boolean("transpose_state_layout", kwargs.pop("transpose_state_layout"))
        warnings.warn("transpose_state_layout: fla calls it state_v_first", DeprecationWarning, stacklevel=6)
    if chunk_sizes and "chunk_size" in kwargs:
        size = _check.integer("chunk_size", kwargs.pop("chunk_size"), 1)
        if size not in chunk_sizes:
            raise ValueError(f"chunk_size: {size}, expected one of {', '.join(map(str, chunk_sizes))}")
    for name in kwargs:
        raise TypeError(f"{name}: there is no such argument")
    return state_v_first


def _gate(
    g: Tensor | None, use: bool, a_log: Any, dt_bias: Any, lower_bound: Any, heads: tuple[int, int] | None
) -> tuple[Tensor | None, dict[str, Any]]:
    """Gives what g and the other arguments of its gate are in :mod:`cpu_attn.linear`. heads: (HV, K) where each key
    channel has a decay of its own."""
    if not use:
        return g, {}
    if g is None:
        raise ValueError("g: is None, use_gate_in_kernel makes decays of it")
    if a_log is None and lower_bound is None:
        raise ValueError("A_log: is None, use_gate_in_kernel needs it")
    a_log, dt_bias = optional(A_log=a_log, dt_bias=dt_bias)
    a_log = a_log if a_log is None else a_log.flatten()  # models keep [1, 1, HV, 1]
    if heads and dt_bias is not None:
        if dt_bias.numel() != heads[0] * heads[1]:
            raise ValueError(f"dt_bias: {dt_bias.numel()} elements, expected HV * K = {heads[0] * heads[1]}")
        dt_bias = dt_bias.reshape(heads)
    gate = "softplus" if lower_bound is None else "sigmoid"
    return g, {"gate": gate, "A_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound}


def run(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    use_qk_l2norm_in_kernel: Any = False,
    use_beta_sigmoid_in_kernel: Any = False,
    allow_neg_eigval: Any = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    use_gate_in_kernel: Any = False,
    A_log: Any = None,  # noqa: N803
    dt_bias: Any = None,
    lower_bound: Any = None,
    by_channel: bool = False,
    in_place: bool = False,
    held: tuple[Int32, States] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Does what all of them do, with their arguments. by_channel: g has a decay for each key channel. in_place: the
    final state may be the memory of a float32 initial_state. held: where sequences start in a batch of 1, and their
    states, in place of ``cu_seqlens`` and ``initial_state``."""
    q, k, v = tensors(q=q, k=k, v=v)
    g, beta, initial_state = optional(g=g, beta=beta, initial_state=initial_state)
    axes("q", q, B=None, T=None, H=None, K=None)
    batch_size, length, _, k_size = q.shape
    axes("k", k, **dict(zip(("B", "T", "H", "K"), q.shape, strict=True)))
    axes("v", v, B=batch_size, T=length, HV=None, V=None)
    each_head = {"B": batch_size, "T": length, "HV": v.shape[2]}
    if g is not None:
        axes("g", g, **each_head, **({"K": k_size} if by_channel else {}))
    if beta is not None:
        axes("beta", beta, **each_head)
    sigmoid = _check.boolean("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    if _check.boolean("allow_neg_eigval", allow_neg_eigval) and not sigmoid:
        raise ValueError("allow_neg_eigval: it goes with use_beta_sigmoid_in_kernel")
    starts = starts_of(batch_size, length, cu_seqlens) if held is None else held[0]
    sizes = (v.shape[3], k_size) if state_v_first else (k_size, v.shape[3])
    shape = (len(starts) - 1, v.shape[2], *sizes)
    if initial_state is not None:
        axes("initial_state", initial_state, **dict(zip(("N", "HV", *("VK" if state_v_first else "KV")), shape)))  # noqa: B905
    use = _check.boolean("use_gate_in_kernel", use_gate_in_kernel)
    g, gate = _gate(g, use, A_log, dt_bias, lower_bound, (v.shape[2], k_size) if by_channel else None)
    keep = _check.boolean("output_final_state", output_final_state)
    states = States(initial_state, shape, keep, torch.float32, in_place) if held is None else held[1]
    output = attend(
        *(q, k, v, starts, states),
        g=None if g is None else packed(g),
        beta=None if beta is None else packed(beta),
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        state_layout="VK" if state_v_first else "KV",
        **gate,
    )
    return output, states.after(keep)
