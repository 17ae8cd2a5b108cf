# SPDX-License-Identifier: Apache-2.0
"""What functions of cpu_attn.linear_attention change, whatever its strides, and that what they refuse changes
nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cpu_attn.linear import reference

from ..cases.linear_cases import relative
from ..python.test_odd_arguments import Args, arguments

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|Converting a tensor).*"),
]
from cpu_attn import linear_attention as face  # noqa: E402

B, T, H, P, N, C, W = 2, 3, 2, 4, 5, 6, 4


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape).to(dtype)


def ints(*x: int) -> Any:
    return torch.tensor(x, dtype=torch.int32)


def rule(channels: bool) -> Args:
    q, k, v = randn(1, T, H, P), randn(1, T, H, P), randn(1, T, H, N)
    gates = {"g": -torch.rand(1, T, H, *[P] * channels), "beta": torch.rand(1, T, H)}
    return {"q": q, "k": k, "v": v, **gates, "initial_state": randn(2, H, P, N), "cu_seqlens": ints(0, 1, T)}


def scan() -> Args:
    x, dt, a = randn(1, T, H, P), torch.rand(1, T, H), -torch.rand(H)
    more = {"B": randn(1, T, 1, N), "C": randn(1, T, 1, N), "chunk_size": 64, "D": randn(H), "z": randn(1, T, H, P)}
    sequences = {"seq_idx": ints(0, 1, 1)[None], "cu_seqlens": ints(0, 1, T), "initial_states": randn(1, H, P, N)}
    return {"x": x, "dt": dt, "A": a, **more, **sequences, "return_varlen_states": True}


def conv() -> Args:
    x, states = {"x": randn(B, C, T), "weight": randn(C, W), "bias": randn(C)}, randn(B, C, W - 1)
    return {**x, "initial_states": states, "final_states_out": randn(B, C, W - 1), "return_final_states": True}


def conv_update(length: int = W - 1, tokens: int = T, ring: bool = False, rows: Any = (3, 0)) -> Args:
    x = {"x": randn(B, C, tokens), "weight": randn(C, W), "bias": randn(C), "conv_state": randn(4, C, length)}
    return {**x, "conv_state_indices": ints(*rows), "cache_seqlens": ints(2, 9) if ring else None}


def state_update(by_channel: bool = True, rows: Any = (3, 0)) -> Args:
    dt, a, bias = torch.rand(B, H, P), -torch.rand(H, P, N), randn(H, P)
    if not by_channel:
        dt, a, bias = dt[..., :1].expand(B, H, P), a[:, :1, :1].expand(H, P, N), bias[:, :1].expand(H, P)
    more = {"B": randn(B, 1, N), "C": randn(B, 1, N), "D": randn(H, P), "z": randn(B, H, P), "dt_bias": bias}
    indices = {"state_batch_indices": ints(*rows)}
    return {"state": randn(4, H, P, N), "x": randn(B, H, P), "dt": dt, "A": a, **more, **indices}


# Of every function: how to call it, and which arguments it changes.
CALLS: dict[str, tuple[Callable[[], Args], tuple[str, ...]]] = {
    "chunk_gated_delta_rule": (lambda: rule(False), ()),
    "fused_recurrent_gated_delta_rule": (lambda: rule(False), ()),
    "chunk_kda": (lambda: rule(True), ()),
    "fused_recurrent_kda": (lambda: rule(True), ()),
    "causal_conv1d_fn": (conv, ("final_states_out",)),
    "causal_conv1d_update": (conv_update, ("conv_state",)),
    "causal_conv1d_varlen_states": (lambda: {"x": randn(T, C), "cu_seqlens": ints(0, 1, T), "state_len": 4}, ()),
    "mamba_chunk_scan_combined": (scan, ()),
    "selective_state_update": (state_update, ("state",)),
}


def tensors(args: Args) -> Args:
    return {name: x for name, x in args.items() if isinstance(x, torch.Tensor)}


def copies(args: Args) -> Args:
    return {name: x.clone() for name, x in tensors(args).items()}


def close(got: Any, want: Any, dtype: str = "float32") -> None:
    assert got.shape == want.shape
    assert relative(got.double().numpy(), want.double().numpy()) <= reference.BUDGET[dtype]


def test_every_function_is_here() -> None:
    assert CALLS.keys() == {*face.__all__} - {"install"}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_else_changes(name: str) -> None:
    make, written = CALLS[name]
    args = make()
    before = copies(args)
    getattr(face, name)(**args)
    for argument, x in tensors(args).items():
        assert x.equal(before[argument]) == (argument not in written), argument


def odd_tensors() -> Args:
    floats, whole = randn(B, C, T), ints(0, 1, T)
    return {
        "sparse": floats.to_sparse(),
        "sparse integers": whole.to_sparse(),
        "nested": torch.nested.nested_tensor([randn(3, 8)]),
        "meta": floats.to("meta"),
        "meta integers": whole.to("meta"),
        "complex": floats.to(torch.complex64),
        "float64": floats.double(),
        "integers": whole,
        "bytes": whole.to(torch.uint8),
        "gradients": floats.clone().requires_grad_(),
        "flag": torch.tensor(True),
        "no axes": torch.tensor(1.0),
    }


def like(x: Any) -> Iterator[tuple[str, Any]]:
    """What a tensor might be by mistake."""
    for axis in range(x.dim()):
        if x.shape[axis] > 1:
            yield f"axis {axis} expanded", x.narrow(axis, 0, 1).expand(x.shape)
        yield f"axis {axis} longer", torch.cat([x, x.narrow(axis, 0, 1)], axis)
        yield f"axis {axis} gone", x.select(axis, 0)
    yield "negative", torch._neg_view(x)
    for kind in (torch.complex64, torch.float64, torch.int64, torch.int16, torch.float8_e4m3fn):
        yield str(kind), x.to(kind)
    yield "meta", x.to("meta")
    yield "sparse", x.to_sparse()
    shrunk = x.clone()
    shrunk.untyped_storage().resize_(4)
    yield "shrunk", shrunk


@pytest.mark.parametrize(("name", "argument"), [(name, a) for name in CALLS for a in arguments(getattr(face, name))])
def test_what_is_refused_changes_nothing(name: str, argument: str) -> None:
    """And names the argument. What is taken is taken by this call alone."""
    function, (make, written) = getattr(face, name), CALLS[name]
    named = re.compile(rf"({'|'.join(arguments(function))})\b")
    odd = odd_tensors() | dict(like(x) if (x := tensors(make()).get(argument)) is not None else ())
    for what, x in odd.items():
        args = make()
        states = {n: args[n] for n in written if n != argument}
        if argument in written and "expanded" in what:
            states[argument] = x
        before = copies(states)
        try:
            function(**args | {argument: x})
        except (ValueError, TypeError) as error:
            assert named.match(str(error)), f"{what}: {error}"
            for n, state in states.items():
                assert state.equal(before[n]), f"{what}: {n} has changed"
        else:
            assert "expanded" not in what or argument not in written, what


def test_starts_that_are_negatives() -> None:
    """A tensor whose memory holds the negatives of its elements."""
    for name in ("chunk_gated_delta_rule", "causal_conv1d_varlen_states", "mamba_chunk_scan_combined"):
        args, function = CALLS[name][0](), getattr(face, name)
        want = function(**args)
        given = {n: torch._neg_view(-args[n]) for n in ("cu_seqlens", "seq_idx") if n in args}
        assert all(x.is_neg() for x in given.values())
        for got, x in zip(function(**args | given), want, strict=True):
            assert got is x or got.equal(x)


# ---- strides ----


def laid_out(x: Any) -> Iterator[Any]:
    """The same tensor in other memory: axes in other orders, and a part of something longer."""
    axes = range(x.dim())
    for a in axes:
        for b in axes:
            if a < b:
                yield x.transpose(a, b).contiguous().transpose(a, b)
        yield torch.cat([x, x], a).narrow(a, 0, x.shape[a])
        yield x.repeat_interleave(2, a)[(slice(None),) * a + (slice(None, None, 2),)]
    yield x.permute(*reversed(axes)).contiguous().permute(*reversed(axes))


def convolved(args: Args) -> tuple[Any, Any]:
    """What causal_conv1d_update gives, token by token in float64: the output, and all rows of the states."""
    states, weight = args["conv_state"].double().clone(), args["weight"].double()
    out, (_, _, length) = torch.zeros(args["x"].shape, dtype=torch.float64), states.shape
    for b, row in enumerate(args["conv_state_indices"].tolist()):
        place = 0 if args["cache_seqlens"] is None else int(args["cache_seqlens"][b])
        for t in range(args["x"].shape[2] if row >= 0 else 0):
            x, ring = args["x"][b, :, t].double(), states[row]
            inputs = [ring[:, (place + t - i) % length] for i in range(W - 1, 0, -1)] + [x]
            sums = (torch.stack(inputs, 1) * weight).sum(1) + args["bias"].double()
            out[b, :, t], ring[:, (place + t) % length] = sums * torch.sigmoid(sums), x
        if args["cache_seqlens"] is None and row >= 0:
            states[row] = states[row].roll(-args["x"].shape[2], 1)
    return out, states


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("length", [W - 1, 8, 9, 12])
@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conv_update(ring: bool, length: int, tokens: int, dtype: str) -> None:
    """States of any length and strides, fewer and more tokens than they hold, and padding."""
    kind, args = getattr(torch, dtype), conv_update(length, tokens, ring, (3, 0))
    args |= {name: args[name].to(kind) for name in ("x", "conv_state")}
    for rows in (ints(3, 0), ints(-1, 2)):
        args["conv_state_indices"] = rows
        out, states = convolved(args)
        for state in laid_out(args["conv_state"]):
            got = face.causal_conv1d_update(**args | {"conv_state": state}, activation="silu")
            close(got, out, dtype)
            assert state.equal(states.to(kind))


def updated(args: Args) -> tuple[Any, Any]:
    """What selective_state_update gives, in float64: the output, and all rows of the states."""
    x, dt, a, bias, states = (args[n].double() for n in ("x", "dt", "A", "dt_bias", "state"))
    step = torch.nn.functional.softplus(dt + bias)[..., None]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i, row in enumerate(args["state_batch_indices"].tolist()):
        if row >= 0:
            states[row] = states[row] * (step[i] * a).exp() + step[i] * x[i][..., None] * args["B"][i].double()[:, None]
            sums = (states[row] * args["C"][i].double()[:, None]).sum(2) + x[i] * args["D"].double()
            out[i] = sums * torch.nn.functional.silu(args["z"][i].double())
    return out, states


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("rows", [(3, 0), (-1, 2)])
def test_state_update(by_channel: bool, rows: Any) -> None:
    """States of any strides, and padding."""
    args = state_update(by_channel, rows)
    out, states = updated(args)
    for state in laid_out(args["state"]):
        close(face.selective_state_update(**args | {"state": state}, dt_softplus=True), out)
        close(state, states)


@pytest.mark.parametrize("initial", [False, True])
def test_final_states(initial: bool) -> None:
    """They may be the memory of those from which sequences begin."""
    args = conv()
    want = torch.cat([args["initial_states"], args["x"]], 2)[..., -(W - 1) :]
    for out in laid_out(args["initial_states"]):
        more = {"initial_states": out} if initial else {}
        _, found = face.causal_conv1d_fn(**args | {"final_states_out": out} | more)
        assert found.data_ptr() == out.data_ptr() and out.equal(want)


def test_last_inputs_of_sequences() -> None:
    """Of none, of fewer and of more than are asked for."""
    x, starts = randn(12, C, dtype=torch.bfloat16).mT.contiguous().mT, [0, 0, 2, 5, 12]
    for dtype in (torch.int32, torch.int64):
        found = face.causal_conv1d_varlen_states(x, torch.tensor(starts, dtype=dtype), 4)
        assert found.shape == (4, C, 4) and found.dtype == x.dtype
        for state, first, end in zip(found, starts, starts[1:], strict=False):
            last = x[max(first, end - 4) : end]
            assert state[:, 4 - len(last) :].equal(last.T) and not state[:, : 4 - len(last)].any()
    with pytest.raises(ValueError, match=r"^state_len: 0 is outside 1"):
        face.causal_conv1d_varlen_states(x, torch.tensor(starts), 0)
    with pytest.raises(ValueError, match=r"^cu_seqlens\[1\]: 5, expected the number of tokens, 12$"):
        face.causal_conv1d_varlen_states(x, ints(0, 5), 4)


# ---- dtypes ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_wide_b_and_c(dtype: str, by_channel: bool) -> None:
    """Beside x of 16 bits, as mamba_ssm's own tests have them."""
    kind, args = getattr(torch, dtype), state_update(by_channel)
    args |= {name: args[name].to(kind) for name in ("x", "dt", "z")}
    out, states = updated(args)
    got = face.selective_state_update(**args, dt_softplus=True)
    assert got.dtype == kind
    close(got, out, dtype)
    close(args["state"], states)


@pytest.mark.parametrize("name", [name for name in CALLS if "rule" in name or "kda" in name])
@pytest.mark.parametrize("dtypes", [("float32", "float32", "float16"), ("bfloat16", "float16", "bfloat16")])
def test_mixed_q_k_and_v(name: str, dtypes: Any) -> None:
    args = CALLS[name][0]()
    args |= {n: args[n].to(getattr(torch, dtype)) for n, dtype in zip("qkv", dtypes, strict=True)}
    given = {n: args[n][0].double().numpy() for n in ("q", "k", "v", "g", "beta")}
    states = [x.double().numpy() for x in args["initial_state"]]
    options = {"g": given["g"], "beta": given["beta"]}
    want = reference.linear_attention(*(given[n] for n in "qkv"), np.array([0, 1, T]), states, **options)
    out, final = getattr(face, name)(**args, output_final_state=True)
    assert out.dtype == args["v"].dtype and final.dtype == torch.float32
    close(out[0], torch.from_numpy(want.output), dtypes[2])
    close(final, torch.from_numpy(np.stack(want.states)))
