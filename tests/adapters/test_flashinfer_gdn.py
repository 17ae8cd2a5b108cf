# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's gated delta net on the CPU, against the recurrence in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu_attn.linear import reference

from ..cases.linear_cases import relative

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn.flashinfer.gdn import (  # noqa: E402
    chunk_gated_delta_rule,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
)

K, V, LENGTHS = 16, 24, (130, 1, 0, 64)
STARTS = np.cumsum([0, *LENGTHS])
TOKENS = int(STARTS[-1])
I32 = {"dtype": torch.int32}


def close(got: Any, want: Any, dtype: str = "float32", budget: dict[str, float] = reference.BUDGET) -> None:
    assert got.shape == want.shape
    assert relative(got.double().numpy(), want) <= budget[dtype]


def expected(q: Any, k: Any, v: Any, starts: Any, states: Any, **options: Any) -> Any:
    """States [.., V, K]."""
    heads = max(q.shape[1], v.shape[1])
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) if q.shape[1] == heads else x for x in (k, v))
    options = {n: x.double().numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    before = [None if x is None else x.double().numpy().swapaxes(1, 2) for x in states]
    return reference.linear_attention(*(x.double().numpy() for x in (q, k, v)), starts, before, **options)


def rand(*shape: int) -> Any:
    return torch.rand(*shape, generator=G)


def randn(*shape: int) -> Any:
    return torch.randn(*shape, generator=G)


G = torch.Generator().manual_seed(5)


def heads_of(kind: str) -> tuple[int, int, int]:
    return {"values": (2, 2, 4), "queries": (4, 2, 2), "equal": (3, 3, 3)}[kind]


@pytest.mark.parametrize("kind", ["values", "queries", "equal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill(kind: str, dtype: str) -> None:
    hq, hk, hv = heads_of(kind)
    h, to = max(hq, hv), getattr(torch, dtype)
    q, k, v = randn(TOKENS, hq, K).to(to), (randn(TOKENS, hk, K) * 0.3).to(to), randn(TOKENS, hv, V).to(to)
    g, beta, state = rand(TOKENS, h), rand(TOKENS, h), randn(4, h, V, K)
    loc, options = torch.from_numpy(STARTS), {"beta": beta, "use_qk_l2norm_in_kernel": True}
    want = expected(q, k, v, STARTS, state, g=g.log(), **options)
    for pool in (False, True):
        rows = torch.tensor([5, 0, 3, 2])
        held = torch.zeros(7, h, V, K).index_copy(0, rows, state) if pool else state
        kept, after = held.clone(), held if pool else None
        where = {"state_indices": rows, "output_state": after} if pool else {}
        out, states = chunk_gated_delta_rule(q, k, v, g, beta, None, held, True, loc, True, **where)
        close(out, want.output, dtype)
        close((states[rows] if pool else states).mT, np.stack(want.states), dtype, reference.STATE_BUDGET)
        if pool:
            assert states.data_ptr() == held.data_ptr() and states[[1, 4, 6]].equal(kept[[1, 4, 6]])
        else:
            assert held.equal(kept)


def test_prefill_from_zeros_into_what_is_given() -> None:
    q, k, v = randn(TOKENS, 2, K), randn(TOKENS, 2, K) * 0.3, randn(TOKENS, 2, V)
    want = expected(q, k, v, STARTS, [None] * 4, scale=0.5)
    output, states = torch.empty(TOKENS, 2, V), torch.full((4, 2, V, K), 7.0, dtype=torch.bfloat16)
    found = chunk_gated_delta_rule(
        *(q, k, v),
        scale=0.5,
        output_final_state=True,
        cu_seqlens=torch.from_numpy(STARTS).int(),
        output=output,
        output_state=states,
    )
    assert [x.data_ptr() for x in found] == [output.data_ptr(), states.data_ptr()]
    close(output, want.output)
    full = np.flatnonzero(np.diff(STARTS))  # the row of a sequence without tokens stays as it is
    close(states[full].mT, np.stack(want.states)[full], "bfloat16")
    assert (states[2] == 7).all()
    assert chunk_gated_delta_rule(q, k, v, scale=0.5, cu_seqlens=torch.from_numpy(STARTS)).equal(output)


def test_checkpoints() -> None:
    q, k, v, g = randn(TOKENS, 2, K), randn(TOKENS, 2, K) * 0.3, randn(TOKENS, 2, V), rand(TOKENS, 2)
    kept, counts = torch.zeros(3, 2, V, K), torch.tensor([0, 2, 2, 2, 3])
    want = expected(q, k, v, STARTS, [None] * 4, g=g.log(), checkpoints={0: (64, 128), 3: (64,)})
    arguments = {"state_checkpoints": kept, "checkpoint_cu_starts": counts, "checkpoint_every_n_tokens": 64}
    out = chunk_gated_delta_rule(q, k, v, g, cu_seqlens=torch.from_numpy(STARTS), **arguments)
    close(out, want.output)
    for i, key in enumerate(((0, 64), (0, 128), (3, 64))):
        close(kept[i].mT, want.checkpoints[key])
    wrong: Any = (
        ({"checkpoint_cu_starts": counts + 1}, r"^checkpoint_cu_starts: expected \[0, 2, 2, 2, 3\]"),
        ({"checkpoint_every_n_tokens": 0}, "^state_checkpoints: given without checkpoint_every_n_tokens"),
        ({"checkpoint_every_n_tokens": 0, "state_checkpoints": None}, "^checkpoint_cu_starts: given without"),
        ({"state_checkpoints": kept.double()}, "^state_checkpoints: dtype torch.float64, expected"),
        ({"state_checkpoints": kept.int()}, "^state_checkpoints: dtype torch.int32, expected"),
        ({"initial_state": torch.zeros(4, 2, V, K).double()}, "^initial_state: dtype torch.float64, expected"),
        (
            {"output_state": torch.zeros(4, 2, V, K).int(), "output_final_state": True},
            "^output_state: dtype torch.int32, expected",
        ),
    )
    for change, words in wrong:
        with pytest.raises((ValueError, TypeError), match=words):
            chunk_gated_delta_rule(q, k, v, g, cu_seqlens=torch.from_numpy(STARTS), **arguments | change)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_states_of_other_dtypes(dtype: str) -> None:
    """They are rounded once, from float32; what is too large becomes the largest number."""
    q, k, v = randn(TOKENS, 2, K), randn(TOKENS, 2, K) * 0.3, randn(TOKENS, 2, V)
    v[64, 0, 0] = 1e6 if dtype.startswith("float8") else 1.0
    kind = getattr(torch, dtype)
    state, starts = randn(4, 2, V, K).to(kind), torch.from_numpy(STARTS)
    options = {"output_final_state": True, "cu_seqlens": starts}
    _, want = chunk_gated_delta_rule(q, k, v, initial_state=state.float(), **options)
    assert want.dtype == torch.float32
    after = torch.zeros(4, 2, V, K).to(kind)
    chunk_gated_delta_rule(q, k, v, initial_state=state, output_state=after, **options)
    limit = torch.finfo(kind).max
    assert after[[0, 1, 3]].float().equal(want[[0, 1, 3]].clamp(-limit, limit).to(kind).float())


class Decode:
    def __init__(self, length: int = 1, batch: int = 3):
        self.q, self.k, self.v = randn(batch, length, 2, K), randn(batch, length, 2, K), randn(batch, length, 4, V)
        self.a_log, self.a, self.bias, self.b = (
            randn(4) * 0.5,
            randn(batch, length, 4),
            randn(4),
            randn(batch, length, 4),
        )
        self.loc = np.arange(batch + 1) * length

    def arguments(self, state: Any) -> tuple[Any, ...]:
        return self.q, self.k, self.v, state, self.a_log, self.a, self.bias, self.b

    def expected(self, states: Any) -> Any:
        """States [.., V, K]."""
        gate = {"g": self.a.flatten(0, 1), "gate": "softplus", "A_log": self.a_log, "dt_bias": self.bias}
        flags = {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        packed = (x.flatten(0, 1) for x in (self.q, self.k, self.v))
        return expected(*packed, self.loc, states, beta=self.b.flatten(0, 1), **gate, **flags)


def test_decode() -> None:
    d, state = Decode(), randn(3, 4, V, K)
    want = d.expected(state)
    for function, held in (
        (gated_delta_rule_decode, state.mT.contiguous()),
        (gated_delta_rule_decode_pretranspose, state.clone()),
    ):
        output = torch.empty(3, 4, 1, V).transpose(1, 2)
        out, same = function(*d.arguments(held), output=output)
        assert same is held and out.data_ptr() == output.data_ptr()
        close(output.flatten(0, 1), want.output)
        close(held if function is gated_delta_rule_decode else held.mT, np.stack(want.states))


@pytest.mark.parametrize("length", [1, 5])
def test_decode_in_slots(length: int) -> None:
    d, pool = Decode(length), randn(6, 4, V, K)
    kept, of, to = pool.clone(), torch.tensor([4, -1, 1]), torch.tensor([0, 5, 1], **I32)
    want = d.expected([pool[4], None, pool[1]])
    pooled = {"initial_state": pool, "initial_state_indices": of}
    out, _ = gated_delta_rule_decode_pretranspose(*d.arguments(None), **pooled, disable_state_update=True)
    assert pool.equal(kept)
    again, same = gated_delta_rule_decode_pretranspose(*d.arguments(None), **pooled, output_state_indices=to)
    assert same is pool and again.equal(out)
    for r, slot in ((0, 0), (2, 1)):
        close(out[r], want.output[d.loc[r] : d.loc[r + 1]])
        close(pool[slot].mT, want.states[r])
    assert not out[1].any() and pool[[2, 3, 4, 5]].equal(kept[[2, 3, 4, 5]])


def test_what_is_refused() -> None:
    d = Decode(2)
    state = randn(3, 4, V, K)
    with pytest.raises(ValueError, match=r"^q: T = 2, expected 1"):
        gated_delta_rule_decode(*d.arguments(state.mT.contiguous()))
    with pytest.raises(ValueError, match=r"^initial_state: expected with initial_state_indices"):
        gated_delta_rule_decode_pretranspose(*d.arguments(None))
    with pytest.raises(NotImplementedError, match=r"^intermediate_states_buffer: expected None"):
        gated_delta_rule_decode_pretranspose(*d.arguments(state), intermediate_states_buffer=state)
    pooled = {"initial_state": state, "initial_state_indices": torch.tensor([0, 1, 3])}
    with pytest.raises(ValueError, match=r"^initial_state_indices\[2\]: 3"):
        gated_delta_rule_decode_pretranspose(*d.arguments(None), **pooled)
    q, k, v = randn(4, 2, K), randn(4, 3, K), randn(4, 3, V)
    with pytest.raises(ValueError, match=r"^k: Hk = 3, expected Hq = 2"):
        chunk_gated_delta_rule(q, k, v, cu_seqlens=torch.tensor([0, 4]))
    packed: Any = (k, k, v, None, None, None, randn(2, 3, V, K))
    where = {"cu_seqlens": torch.tensor([0, 4]), "state_indices": torch.tensor([2])}
    with pytest.raises(ValueError, match=r"^state_indices\[0\]: 2, outside 0\.\.1"):
        chunk_gated_delta_rule(*packed, **where)
