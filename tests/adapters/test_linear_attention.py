# SPDX-License-Identifier: Apache-2.0
"""The functions of fla, causal-conv1d and mamba_ssm on the CPU, against the recurrence in float64."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn.linear import reference

from ..cases.linear_cases import relative

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import linear_attention as face  # noqa: E402
from cpu_attn.linear_attention.install import MODULES  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
LENGTHS = (1, 70, 0, 33)  # of packed sequences
B, T, H, HV, K, V = 2, 67, 2, 4, 16, 24
F64 = np.float64


def f64(x: Any) -> Any:
    return x.double().numpy()


class Draw:
    def __init__(self, seed: int, dtype: str = "float32"):
        self.g, self.dtype = torch.Generator().manual_seed(seed), getattr(torch, dtype)

    def randn(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> Any:
        return (torch.randn(*shape, generator=self.g) * scale).to(dtype or self.dtype)

    def rand(self, *shape: int, dtype: Any = None) -> Any:
        return torch.rand(*shape, generator=self.g).to(dtype or self.dtype)


def close(got: Any, want: Any, dtype: str = "float32", budget: dict[str, float] = reference.BUDGET) -> None:
    assert got.shape == want.shape
    assert relative(f64(got), want) <= budget[dtype]


def expected(q: Any, k: Any, v: Any, starts: Any, initial: Any, **options: Any) -> tuple[Any, Any]:
    """Of packed tokens [T, ...]: output and states [N, Hv, Dk, Dv]."""
    options = {name: f64(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    before = [None if initial is None else f64(x) for x in ([0] * (len(starts) - 1) if initial is None else initial)]
    found = reference.linear_attention(*(f64(x) for x in (q, k, v)), np.asarray(starts), before, **options)
    return found.output, np.stack(found.states)


def flat(x: Any) -> Any:
    return x.flatten(0, 1)


# ---- the delta rule ----

RULES = {
    "chunk_gated_delta_rule": (face.chunk_gated_delta_rule, False),
    "fused_recurrent_gated_delta_rule": (face.fused_recurrent_gated_delta_rule, False),
    "chunk_kda": (face.chunk_kda, True),
    "fused_recurrent_kda": (face.fused_recurrent_kda, True),
}


def tokens(draw: Draw, channels: bool, *shape: int) -> dict[str, Any]:
    found = {
        "q": draw.randn(*shape, H, K),
        "k": draw.randn(*shape, H, K, scale=K**-0.5),
        "v": draw.randn(*shape, HV, V),
        "g": -draw.rand(*shape, HV, *[K] * channels, dtype=torch.float32),
        "beta": draw.rand(*shape, HV),
    }
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_delta_rule(name: str, dtype: str) -> None:
    """A batch, from given states and from zeros."""
    function, channels = RULES[name]
    draw = Draw(1, dtype)
    x, state = tokens(draw, channels, B, T), draw.randn(B, HV, K, V, dtype=torch.float32)
    kept = state.clone()
    starts = [0, T, 2 * T]
    for initial in (None, state):
        want = expected(*(flat(x[n]) for n in "qkv"), starts, initial, g=flat(x["g"]), beta=flat(x["beta"]))
        out, final = function(**x, initial_state=initial, output_final_state=True)
        assert out.dtype == x["v"].dtype and final.dtype == torch.float32
        close(flat(out), want[0], dtype)
        close(final, want[1], dtype, reference.STATE_BUDGET)
        out, final = function(**x, initial_state=initial)
        close(flat(out), want[0], dtype)
        assert final is None
    assert state.equal(kept)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_packed_sequences(name: str, v_first: bool) -> None:
    function, channels = RULES[name]
    draw, starts = Draw(2), np.cumsum([0, *LENGTHS])
    x = tokens(draw, channels, 1, sum(LENGTHS))
    state = draw.randn(len(LENGTHS), HV, K, V)
    for initial in (None, state):
        want = expected(*(flat(x[n]) for n in "qkv"), starts, initial, g=flat(x["g"]), beta=flat(x["beta"]), scale=0.3)
        given = initial.transpose(2, 3).contiguous() if v_first and initial is not None else initial
        out, final = function(
            *(x[n] for n in "qkv"),
            g=x["g"],
            beta=x["beta"],
            scale=0.3,
            initial_state=given,
            output_final_state=True,
            state_v_first=v_first,
            cu_seqlens=torch.from_numpy(starts),
        )
        close(flat(out), want[0])
        close(final.transpose(2, 3) if v_first else final, want[1])


@pytest.mark.parametrize("name", RULES)
def test_gates_and_norms_in_the_kernel(name: str) -> None:
    function, channels = RULES[name]
    draw = Draw(3)
    x = tokens(draw, channels, B, T)
    a_log, bias = draw.randn(HV, scale=0.5), draw.randn(HV, *[K] * channels)
    x["g"], x["beta"] = draw.randn(*x["g"].shape), draw.randn(B, T, HV)
    want = expected(
        *(flat(x[n]) for n in "qkv"),
        [0, T, 2 * T],
        None,
        g=flat(x["g"]),
        beta=flat(x["beta"]),
        gate="softplus",
        A_log=a_log,
        dt_bias=bias,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    out, final = function(
        **x,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=bias.flatten(),
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        output_final_state=True,
    )
    close(flat(out), want[0])
    close(final, want[1])


@pytest.mark.parametrize("bound", [-4.0, -5.0])
@pytest.mark.parametrize("with_a", [False, True])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_a_lower_bound(name: str, with_a: bool, bound: float) -> None:
    draw = Draw(4)
    x = tokens(draw, True, B, T)
    a_log, bias = draw.randn(HV, scale=0.5) if with_a else None, draw.randn(HV, K)
    x["g"] = draw.randn(B, T, HV, K)
    raw = f64(x["g"]) + f64(bias)
    g = bound * reference.sigmoid(np.exp(f64(a_log))[:, None] * raw if with_a else raw)
    want = expected(
        *(flat(x[n]) for n in "qkv"), [0, T, 2 * T], None, g=torch.from_numpy(g).flatten(0, 1), beta=flat(x["beta"])
    )
    more = {"safe_gate": True} if name == "chunk_kda" else {}
    more |= {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": bias.flatten(), "lower_bound": bound}
    out, _ = RULES[name][0](**x, **more)
    close(flat(out), want[0])


def test_decays_of_channels_and_no_beta() -> None:
    draw = Draw(5)
    x = tokens(draw, False, B, T)
    gk = -draw.rand(B, T, HV, K)
    beta = torch.ones(B, T, HV)
    for g in (None, x["g"]):
        both = gk if g is None else gk + g[..., None]
        want = expected(*(flat(x[n]) for n in "qkv"), [0, T, 2 * T], None, g=flat(both), beta=flat(beta))
        out, _ = face.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], g, gk)
        close(flat(out), want[0])


def test_strides() -> None:
    """What models give: views of one tensor, or with tokens side by side."""
    draw = Draw(6)
    mixed = draw.randn(B, 2 * H * K + HV * V, T).transpose(1, 2)
    beta, g = draw.rand(B, T, HV), -draw.rand(B, T, HV)
    for x in (mixed, mixed.contiguous(), torch.cat([mixed, mixed], 1).contiguous()[:, T:]):
        q, k, v = x.split([H * K, H * K, HV * V], 2)
        q, k, v = q.unflatten(2, (H, K)), k.unflatten(2, (H, K)) * 0.1, v.unflatten(2, (HV, V))
        want = expected(flat(q), flat(k), flat(v), [0, T, 2 * T], None, g=flat(g), beta=flat(beta))
        close(flat(face.chunk_gated_delta_rule(q, k, v, g, beta)[0]), want[0])


def test_an_older_name_of_state_v_first() -> None:
    x, state = tokens(Draw(7), False, B, T), torch.ones(B, HV, V, K)
    more = {"initial_state": state, "output_final_state": True}
    with pytest.warns(DeprecationWarning, match="^transpose_state_layout: fla calls it state_v_first$"):
        found = face.chunk_gated_delta_rule(**x, **more, transpose_state_layout=True)
    for got, want in zip(found, face.chunk_gated_delta_rule(**x, **more, state_v_first=True), strict=True):
        assert got.equal(want)


def test_nothing_to_do() -> None:
    for batch, length in ((0, 5), (2, 0)):
        x = tokens(Draw(7), False, batch, length)
        state = torch.ones(batch, HV, K, V)
        out, final = face.chunk_gated_delta_rule(**x, initial_state=state, output_final_state=True)
        assert out.shape == (batch, length, HV, V) and final.equal(state)


# ---- the convolution ----


def convolved(x: Any, weight: Any, bias: Any, initial: Any, length: int, activation: Any) -> tuple[Any, Any]:
    """Of x [B, C, T]."""
    batch, _, size = x.shape
    loc = np.arange(batch + 1, dtype=np.int32) * size
    before = [None] * batch if initial is None else [f64(s) for s in initial]
    rows = f64(x).transpose(0, 2, 1).reshape(batch * size, -1)
    found = reference.causal_conv1d(
        rows, f64(weight), None if bias is None else f64(bias), loc, before, length, activation
    )
    return found.output.reshape(batch, size, -1).transpose(0, 2, 1), np.stack(found.states)


def layouts(x: Any) -> list[Any]:
    """The same [B, C, T] with channels and with tokens side by side, and as a part of something longer."""
    return [
        x.contiguous(),
        x.mT.contiguous().mT,
        torch.cat([x, x], 1)[:, : x.shape[1]],
        x.repeat_interleave(2, 2)[..., ::2],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv(dtype: str, width: int, activation: Any) -> None:
    draw = Draw(8, dtype)
    x, weight = draw.randn(B, 12, T), draw.randn(12, width)
    for bias, initial in ((None, None), (draw.randn(12), draw.randn(B, 12, width - 1))):
        want, states = convolved(x, weight, bias, initial, width - 1, activation)
        for like in layouts(x):
            out = face.causal_conv1d_fn(like, weight, bias, initial_states=initial, activation=activation)
            close(out, want, dtype)
            assert (out.stride(1) == 1) == (like.stride(2) != 1 or like.stride(1) == 1)
            final = torch.empty(B, width - 1, 12, dtype=x.dtype).mT
            more = {"return_final_states": True, "activation": activation}
            out, same = face.causal_conv1d_fn(like, weight, bias, None, initial, final_states_out=final, **more)
            assert same.data_ptr() == final.data_ptr()
            close(out, want, dtype)
            close(final, states, dtype)


def test_conv_of_short_sequences() -> None:
    draw = Draw(9)
    x, weight = draw.randn(B, 5, 2), draw.randn(5, 6)
    want, states = convolved(x, weight, None, None, 5, None)
    out, final = face.causal_conv1d_fn(x, weight, return_final_states=True)
    close(out, want)
    close(final, states)


def test_conv_of_sequences_told_apart() -> None:
    draw = Draw(10)
    x, weight, bias = draw.randn(2, 6, 9), draw.randn(6, 4), draw.randn(6)
    idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, -1], [4, 4, 4, 4, 4, 4, 4, 4, 5]], dtype=torch.int32)
    out = face.causal_conv1d_fn(x, weight, bias, idx, activation="silu")
    for row, first, end in ((0, 0, 3), (0, 3, 7), (0, 7, 8), (1, 0, 8), (1, 8, 9)):
        want, _ = convolved(x[row : row + 1, :, first:end], weight, bias, None, 3, "silu")
        close(out[row : row + 1, :, first:end], want)
    assert not out[0, :, 8].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 5, 8])
def test_conv_update(dtype: str, length: int) -> None:
    draw = Draw(11, dtype)
    state, weight, bias = draw.randn(B, 12, length), draw.randn(12, 4), draw.randn(12)
    for count in (1, 3):
        x = draw.randn(B, 12, count)
        want, states = convolved(x, weight, bias, state, length, "silu")
        for like in layouts(state.clone()):
            close(face.causal_conv1d_update(x, like, weight, bias, "silu"), want, dtype)
            close(like, states, dtype)
        if count == 1:
            kept = state.clone()
            close(face.causal_conv1d_update(x[..., 0], kept, weight, bias, "silu"), want[..., 0], dtype)


def test_conv_update_in_chosen_rows() -> None:
    draw = Draw(12)
    cache, weight, x = draw.randn(6, 8, 4), draw.randn(8, 4), draw.randn(3, 8, 1)
    kept, rows = cache.clone(), torch.tensor([4, -1, 0], dtype=torch.int32)
    want, states = convolved(x, weight, None, cache[rows.long()], 4, None)
    out = face.causal_conv1d_update(x, cache, weight, conv_state_indices=rows)
    for i in (0, 2):
        close(out[i], want[i])
        close(cache[rows[i]], states[i])
    assert not out[1].any() and cache[[1, 2, 3, 5]].equal(kept[[1, 2, 3, 5]])


@pytest.mark.parametrize("ring", [3, 5, 11])
def test_conv_update_in_a_ring(ring: int) -> None:
    draw = Draw(13)
    weight, x = draw.randn(8, 4), draw.randn(2, 8, 40)
    cache, places = torch.zeros(4, 8, ring), torch.tensor([0, 0], dtype=torch.int32)
    want, _ = convolved(x, weight, None, None, 3, "silu")
    rows, at = torch.tensor([3, 1], dtype=torch.int32), 0
    for count in (1, 3, 2, 1, 1, 3, 3, 1):
        part = x[:, :, at : at + count]
        out = face.causal_conv1d_update(part, cache, weight, None, "silu", places + at, rows)
        close(out, want[:, :, at : at + count])
        at += count


# ---- state spaces ----


def scanned(x: Any, dt: Any, a: Any, b: Any, c: Any, starts: Any, initial: Any, d: Any = None, z: Any = None) -> Any:
    """Of packed tokens; dt is ready, states are [N, H, P, N]. By the recurrence as mamba_ssm writes it."""
    x, dt, a, b, c = (f64(y) for y in (x, dt, a, b, c))
    _, heads, size = x.shape
    b, c = (np.repeat(y, heads // y.shape[1], axis=1) for y in (b, c))
    out, states = np.zeros(x.shape), []
    for r, start in enumerate(starts[:-1]):
        s = np.zeros((heads, size, b.shape[2])) if initial is None else f64(initial[r])
        for t in range(int(start), int(starts[r + 1])):
            s = s * np.exp(dt[t] * a)[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None]
            out[t] = (s * c[t][:, None]).sum(2)
        states.append(s)
    if d is not None:
        out += x * f64(d if d.dim() == 2 else d[:, None])
    if z is not None:
        out *= f64(z) * reference.sigmoid(f64(z))
    return out, np.stack(states)


def steps(dt: Any, bias: Any, limit: tuple[float, float] = (0.0, np.inf)) -> Any:
    return torch.from_numpy(np.clip(reference.softplus(f64(dt) + f64(bias)), *limit))


class Spaces:
    """H heads of 24 channels, two groups, 16 elements of a state."""

    def __init__(self, seed: int, dtype: str = "float32", batch: int = B, length: int = T):
        draw, heads, size = Draw(seed, dtype), 4, 24
        self.x, self.dt = draw.randn(batch, length, heads, size), draw.randn(batch, length, heads)
        self.a, self.bias = -draw.rand(heads, dtype=torch.float32) * 3, draw.randn(heads, dtype=torch.float32)
        self.b, self.c = draw.randn(batch, length, 2, 16), draw.randn(batch, length, 2, 16)
        self.z, self.d, self.d2 = draw.randn(batch, length, heads, size), draw.randn(heads), draw.randn(heads, size)
        self.initial = draw.randn(batch, heads, size, 16, dtype=torch.float32)
        self.draw = draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("full", [False, True])
def test_scan(dtype: str, full: bool) -> None:
    s = Spaces(14, dtype)
    limit = (0.1, 2.0) if full else (0.0, float("inf"))
    d, z, initial = (s.d2, s.z, s.initial) if full else (s.d, None, None)
    arrays = (flat(s.x), flat(steps(s.dt, s.bias, limit)), s.a, flat(s.b), flat(s.c))
    want, states = scanned(*arrays, [0, T, 2 * T], initial, d, None if z is None else flat(z))
    options = {"D": d, "z": z, "dt_bias": s.bias, "initial_states": initial, "dt_softplus": True, "dt_limit": limit}
    out, final = face.mamba_chunk_scan_combined(s.x, s.dt, s.a, s.b, s.c, 256, **options, return_final_states=True)
    assert out.dtype == s.x.dtype and final.dtype == torch.float32
    close(flat(out), want, dtype)
    close(final, states, dtype, reference.STATE_BUDGET)
    assert face.mamba_chunk_scan_combined(s.x, s.dt, s.a, s.b, s.c, 64, **options).equal(out)


def test_scan_without_softplus() -> None:
    s = Spaces(15)
    dt = s.draw.rand(B, T, 4)
    want, _ = scanned(flat(s.x), flat(dt), s.a, flat(s.b), flat(s.c), [0, T, 2 * T], None)
    close(flat(face.mamba_chunk_scan_combined(s.x, dt, s.a, s.b, s.c, 64)), want)


def test_scan_of_sequences_told_apart() -> None:
    s, lengths = Spaces(16, batch=1, length=100), (3, 60, 37)
    idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    loc = np.cumsum([0, *lengths])
    initial = torch.zeros(3, 4, 24, 16)
    initial[0] = s.initial[0]
    arrays = (flat(s.x), flat(steps(s.dt, s.bias)), s.a, flat(s.b), flat(s.c))
    want, states = scanned(*arrays, loc, initial)
    out, final, each = face.mamba_chunk_scan_combined(
        *(s.x, s.dt, s.a, s.b, s.c, 64),
        dt_bias=s.bias,
        initial_states=s.initial,
        seq_idx=idx,
        cu_seqlens=torch.tensor([0, 3, 3, 63, 100]),
        dt_softplus=True,
        return_final_states=True,
        return_varlen_states=True,
    )
    close(flat(out), want)
    close(final, states[2:])
    close(each[[0, 2, 3]], states)
    assert not each[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["no D", "D by head", "D by channel", "D by both, z"])
def test_state_update(dtype: str, kind: str) -> None:
    """One decay a head, expanded as models do or written out."""
    s = Spaces(17, dtype, batch=3, length=1)
    by_head, by_channel = s.d[:, None].expand(-1, 24), s.d2[:1].expand(len(s.d2), -1)
    d = {"no D": None, "D by head": by_head, "D by channel": by_channel}.get(kind, s.d2)
    z = s.z if "z" in kind else None
    arrays = (flat(s.x), flat(steps(s.dt, s.bias)), s.a, flat(s.b), flat(s.c))
    want, states = scanned(*arrays, [0, 1, 2, 3], s.initial, d, None if z is None else flat(z))
    dt, a = s.dt[:, 0, :, None].expand(-1, -1, 24), s.a[:, None, None].expand(-1, 24, 16)
    bias = s.bias[:, None].expand(-1, 24)
    for copied in (False, True):
        dt, a, bias = (y.clone() if copied else y for y in (dt, a, bias))
        for state in (s.initial.clone(), s.initial.mT.contiguous().mT):
            out = face.selective_state_update(
                *(state, s.x[:, 0], dt, a, s.b[:, 0], s.c[:, 0], d),
                z=None if z is None else z[:, 0],
                dt_bias=bias,
                dt_softplus=True,
            )
            assert out.dtype == s.x.dtype
            close(out, want, dtype)
            close(state, states)


@pytest.mark.parametrize("p", [8, 2])
@pytest.mark.parametrize("heads", [False, True])
def test_state_update_by_channel(heads: bool, p: int) -> None:
    """Mamba-1: a decay for each channel and element of a state, of two channels by dt alone. In plain torch in
    float64."""
    draw = Draw(18)
    h, n, shape = 3, 16, (2, 3, p)
    state, x, dt = draw.randn(2, h, p, n), draw.randn(*shape), draw.randn(*shape)
    a, b, c = -draw.rand(h, p, n), draw.randn(2, 1, n), draw.randn(2, 1, n)
    if p == 2:
        a = a[:, :1, :1].expand(h, p, n)
    d, z, bias = draw.randn(h, p), draw.randn(*shape), draw.randn(h, p)
    step = torch.nn.functional.softplus(dt.double() + bias)
    want = state.double() * (step[..., None] * a).exp() + (step * x)[..., None] * b[:, :, None].double()
    out = ((want * c[:, :, None]).sum(3) + x * d) * torch.nn.functional.silu(z.double())
    if heads:
        got = face.selective_state_update(state, x, dt, a, b, c, d, z, bias, True)
        close(got, out.numpy())
        close(state, want.numpy())
        return
    for i in range(h):
        own = state[:, i].clone()
        got = face.selective_state_update(
            *(own, x[:, i], dt[:, i], a[i], b[:, 0], c[:, 0], d[i], z[:, i], bias[i], True)
        )
        close(got, out[:, i].numpy())
        close(own, want[:, i].numpy())


# ---- what is refused ----


def refusals() -> list[tuple[str, Any, dict[str, Any], type[Exception], str]]:
    x, k = tokens(Draw(20), False, 1, 5), tokens(Draw(20), True, 1, 5)
    conv = {"x": torch.randn(2, 4, 9), "weight": torch.randn(4, 3)}
    s = Spaces(21, batch=1, length=5)
    scan = {"x": s.x, "dt": s.dt, "A": s.a, "B": s.b, "C": s.c, "chunk_size": 64}
    rule, kda, fn, update = (
        face.chunk_gated_delta_rule,
        face.chunk_kda,
        face.causal_conv1d_fn,
        face.causal_conv1d_update,
    )
    recurrent, ssd = face.fused_recurrent_gated_delta_rule, face.mamba_chunk_scan_combined
    i32, safe = {"dtype": torch.int32}, {"use_gate_in_kernel": True, "safe_gate": True}
    return [
        ("head first", rule, x | {"head_first": False}, ValueError, r"head_first: fla has removed it"),
        ("no argument", rule, x | {"chunked": 3}, TypeError, r"chunked: there is no such argument"),
        ("chunk size", rule, x | {"chunk_size": 100}, ValueError, r"chunk_size: 100, expected one of 16, 32, 64"),
        ("context", rule, x | {"cp_context": 1}, ValueError, r"cp_context: 1, expected None"),
        ("heads", rule, x | {"v": x["v"][:, :, :3]}, ValueError, r"g: axis 2 is 4, expected HV = 3"),
        ("keys", rule, x | {"k": x["k"][..., :5]}, ValueError, r"k: axis 3 is 5, expected K = 16"),
        ("dtype", rule, x | {"k": x["k"].double()}, TypeError, r"k: dtype torch.float64, expected torch.float32, "),
        ("chunk sizes", rule, x | {"chunk_size": np.array([16, 64])}, TypeError, r"chunk_size: expected an i"),
        ("no tensor", rule, x | {"q": 1}, TypeError, r"q: .*int"),
        ("gradient", rule, x | {"q": x["q"].clone().requires_grad_()}, ValueError, r"q: requires grad"),
        ("state", rule, x | {"initial_state": torch.zeros(2, HV, K, V)}, ValueError, r"initial_state: axis 0 is 2"),
        ("starts", rule, x | {"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"cu_seqlens\[1\]: 4, expected the"),
        ("falling", rule, x | {"cu_seqlens": torch.tensor([0, 4, 3, 5])}, ValueError, r"cu_seqlens\[2\]: 3, expected"),
        ("huge", rule, x | {"cu_seqlens": torch.tensor([0, 2**40])}, ValueError, r"cu_seqlens\[1\]: 1099511627776"),
        ("double", rule, x | {"allow_neg_eigval": True}, ValueError, r"allow_neg_eigval: it goes with use_beta_sig"),
        ("no A", rule, x | {"use_gate_in_kernel": True}, ValueError, r"A_log: is None, use_gate_in_kernel needs it"),
        ("no g", rule, x | {"g": None}, ValueError, r"g: is None"),
        ("value decays", recurrent, x | {"gv": x["v"]}, ValueError, r"gv: a tensor, expected None: a state has"),
        ("states", kda, k | {"return_intermediate_states": True}, ValueError, r"return_intermediate_states: True, ex"),
        ("one decay", kda, k | {"g": x["g"]}, ValueError, r"g: 3 axes, expected 4: \[B, T, HV, K\]"),
        ("groups of heads", rule, x | {y: x[y][:, :, [0, 1, 0]] for y in "qk"}, ValueError, r"HV: 4 is no .* of H = 3"),
        ("high bound", kda, k | safe | {"lower_bound": 0.0}, ValueError, r"lower_bound: 0.0, expected -5 to below 0"),
        ("low bound", kda, k | safe | {"lower_bound": -5.1}, ValueError, r"lower_bound: -5.1, expected -5 to"),
        ("no bound", kda, k | safe, TypeError, r"lower_bound: .*None"),
        ("width", fn, conv | {"weight": torch.randn(4, 9)}, ValueError, r"weight: .*9"),
        ("channels", fn, conv | {"weight": torch.randn(5, 3)}, ValueError, r"weight: axis 0 is 5, expected C = 4"),
        ("activation", fn, conv | {"activation": "gelu"}, ValueError, r"activation: 'gelu' is none of 'silu', 'swish'"),
        ("index", fn, conv | {"seq_idx": torch.zeros(2, 8, **i32)}, ValueError, r"seq_idx: axis 1 is 8, expected T"),
        ("out", fn, conv | {"final_states_out": torch.zeros(2, 4, 2)}, ValueError, r"final_states_out: given, but re"),
        ("short", update, conv | {"conv_state": torch.zeros(2, 4, 1)}, ValueError, r"conv_state: L = 1, expected at"),
        (
            *(
                "row",
                update,
                conv | {"conv_state": torch.zeros(2, 4, 2), "conv_state_indices": torch.tensor([0, 2], **i32)},
            ),
            *(ValueError, r"conv_state_indices\[1\]: 2"),
        ),
        ("groups", ssd, scan | {"B": s.b[:, :, [0, 0, 1]], "C": s.c[:, :, [0, 0, 1]]}, ValueError, r"H: 4 is no mul"),
        ("limits", ssd, scan | {"dt_limit": (1.0, 0.5)}, ValueError, r"dt_limit\[1\]"),
        ("varlen", ssd, scan | {"return_varlen_states": True}, ValueError, r"cu_seqlens: is None, return_varlen"),
    ]


@pytest.mark.parametrize(
    ("name", "function", "arguments", "error", "text"), [pytest.param(*r, id=r[0]) for r in refusals()]
)
def test_refused(name: str, function: Any, arguments: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        function(**arguments)


# ---- names ----


def run(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_install(tmp_path: Path) -> None:
    code = """
        import cpu_attn.linear_attention as ours

        ours.install()
        ours.install()
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        found = {x for name, x in globals().items() if hasattr(x, "__wrapped__")}
        assert chunk_gdn is chunk_gated_delta_rule
        assert found == {getattr(ours, name) for name in ours.__all__ if name != "install"}
    """
    run(code, tmp_path)


def test_install_beside_the_real_one(tmp_path: Path) -> None:
    code = """
        import sys
        import types

        import cpu_attn.linear_attention as ours

        sys.modules["fla"] = types.ModuleType("fla")
        try:
            ours.install()
        except RuntimeError as e:
            assert str(e).startswith("fla: another one is here")
        else:
            raise AssertionError
        ours.install(["causal_conv1d"])
        import causal_conv1d
        assert causal_conv1d.causal_conv1d_fn is ours.causal_conv1d_fn
    """
    run(code, tmp_path)


def test_names_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"^libraries: 'fla2' is none of 'fla', 'causal_conv1d', 'mamba_ssm'$"):
        face.install(["fla2"])
    assert set(MODULES) == {"fla", "causal_conv1d", "mamba_ssm"}
