# SPDX-License-Identifier: Apache-2.0
"""Checks of what the calls of linear attention take beside their arrays, and of what their plans are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_attn._arrays import numpy_view
from cpu_attn._check.arrays import array, integers, rising
from cpu_attn._check.values import HUGE, INT32_MAX, MAX_SIZE, boolean, choice, integer, number
from cpu_attn._native import ffi, lib

_OF_C = ffi.typeof("enum ca_gate").elements
GATES = {name.removeprefix("CA_GATE_").lower(): number for number, name in sorted(_OF_C.items())}


def linear_step(query_start_loc: Any, seq_lens: Any, has_initial_state: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """Checks what a plan is told of its requests, and gives copies: query_start_loc [R + 1], how many tokens each
    request had before the step [R], whether it brings a state [R]."""
    starts = array("query_start_loc", query_start_loc, ["int32"], [("num_reqs + 1", None)]).numpy().copy()
    rising("query_start_loc", starts)
    counts, reqs = np.diff(starts), [("num_reqs", len(starts) - 1)]
    before = np.zeros(len(counts), np.int32)
    if seq_lens is not None:
        lens = array("seq_lens", seq_lens, ["int32"], reqs).numpy().copy()
        for r in np.flatnonzero(lens < counts)[:1]:
            raise ValueError(f"seq_lens[{r}]: {lens[r]}, expected at least the request's {counts[r]} tokens")
        before = lens - counts
    brings = before > 0
    if has_initial_state is not None:
        found = numpy_view("has_initial_state", has_initial_state, ("bool", "int32"))
        if found.dtype != np.bool_:
            found = integers("has_initial_state", found)
        if found.shape != counts.shape:
            raise ValueError(f"has_initial_state: shape {found.shape}, expected [num_reqs] = [{len(counts)}]")
        brings = found != 0
    return starts, np.ascontiguousarray(before), np.ascontiguousarray(brings).astype(np.uint8)


def linear_heads(num_k_heads: Any, num_v_heads: Any, head_k_dim: Any, head_v_dim: Any) -> tuple[int, int, int, int]:
    """Checks the heads of a plan. None of them gives zeros."""
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    given = (num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    if all(x is None for x in given):
        return 0, 0, 0, 0
    for name, x in zip(names, given, strict=True):
        if x is None:
            raise ValueError(f"{name}: is None; a plan has all four of {', '.join(names)}, or none of them")
    k_heads, v_heads, k_dim, v_dim = (integer(n, x, 1, MAX_SIZE) for n, x in zip(names, given, strict=True))
    if v_heads % k_heads:
        raise ValueError(f"num_v_heads: {v_heads} is no multiple of num_k_heads = {k_heads}")
    return k_heads, v_heads, k_dim, v_dim


def linear_plan(name: str, x: Any, kind: type, with_heads: bool) -> Any:
    shape = getattr(x, "_shape", None)
    if not isinstance(x, kind) or shape is None:
        raise TypeError(f"{name}: expected get_linear_attention_metadata's result, got {type(x).__name__}")
    if with_heads and not shape.num_k_heads:
        raise ValueError(f"{name}: was made without heads, for convolutions alone")
    return x


def linear_how(
    head_k_dim: int,
    gates: tuple[Any, Any, Any, Any, Any, Any],
    erase: Any,
    flags: tuple[Any, Any, Any, Any],
    scale: Any,
    norm_eps: Any,
    dt_limit: Any,
    layout: Any,
) -> Any:
    """Gives the ``ca_linear_how *`` of a call. gates: what linear_gates takes; flags: delta_rule,
    use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval. A dict of all arguments would cost 2 us."""
    how, bound = ffi.new("ca_linear_how *"), gates[-1]
    how.gate = linear_gates(*gates)
    how.lower_bound = 0.0 if bound is None else lower_bound(bound)
    delta_rule, l2norm, beta_sigmoid, neg_eigval = flags
    how.delta_rule = boolean("delta_rule", delta_rule)
    if erase is not None and not how.delta_rule:
        raise ValueError("erase: given, but there is no delta_rule")
    how.use_qk_l2norm_in_kernel = boolean("use_qk_l2norm_in_kernel", l2norm)
    how.use_beta_sigmoid_in_kernel = boolean("use_beta_sigmoid_in_kernel", beta_sigmoid)
    how.allow_neg_eigval = boolean("allow_neg_eigval", neg_eigval)
    how.scale = head_k_dim**-0.5 if scale is None else number("scale", scale)
    how.norm_eps = number("norm_eps", norm_eps, 0.0)
    how.dt_limit = limits("dt_limit", dt_limit)
    how.state_layout = lib.CA_STATE_VK if state_layout(layout, ("KV", "VK")) else lib.CA_STATE_KV
    return how


def linear_gates(gate: Any, g: Any, beta: Any, a_log: Any, dt_bias: Any, lower_bound: Any) -> int:
    """Checks that what goes with a gate is given, and nothing else, and gives its number."""
    code: int = GATES[choice("gate", gate, GATES)]
    bounded = code == lib.CA_GATE_SIGMOID
    if lower_bound is not None and not bounded:
        raise ValueError(f"lower_bound: given, but gate is {gate!r}, and 'sigmoid' has one")
    if code == lib.CA_GATE_LOG:
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(f"{name}: given, but gate is 'log', which takes g as it is")
        return code
    needed = {"g": g, "lower_bound": lower_bound} if bounded else {"g": g}
    if code in (lib.CA_GATE_SOFTPLUS, lib.CA_GATE_DT):
        needed["A_log"] = a_log
    for name, x in needed.items():
        if x is None:
            raise ValueError(f"{name}: is None, gate {gate!r} needs it")
    if code == lib.CA_GATE_DT and beta is not None:
        raise ValueError("beta: given, but gate 'dt' makes it of g")
    return code


def lower_bound(x: Any) -> float:
    """Checks the least logarithm of a decay."""
    found = number("lower_bound", x)
    if found > 0:
        raise ValueError(f"lower_bound: {found} is above 0, and decays are at most 1")
    return found


def limits(name: str, x: Any) -> tuple[float, float]:
    """Checks a pair (least, most) of numbers that are not negative; the second may be infinite."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise TypeError(f"{name}: expected (least, most), got {x!r}")
    least = number(f"{name}[0]", x[0], 0.0)
    most = HUGE if isinstance(x[1], float) and x[1] == np.inf else number(f"{name}[1]", x[1], least)
    return least, most


def state_layout(x: Any, known: Sequence[str]) -> bool:
    """Says whether the second of two layouts is named."""
    return bool(choice("state_layout", x, known) == known[1])


def activation(x: Any) -> bool:
    """Says whether SiLU is asked for."""
    return choice("activation", x, ("silu", "swish", None)) is not None


def each_token(x: Any, num_tokens: int) -> Any:
    """Gives [H] as [T, H], without a copy; anything else as it is."""
    if x is None or getattr(x, "ndim", 2) != 1:
        return x
    rows = numpy_view("g", x)
    return np.broadcast_to(rows, (min(num_tokens, INT32_MAX), len(rows)))
