# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention of cpu_attn.vllm, called over states in vLLM's pages, against the float64 oracle; and how
the plugin gives them to vLLM, or leaves vLLM's."""

from __future__ import annotations

import dataclasses
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integrations
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec  # noqa: E402
from vllm.v1.attention.backends import registry  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # noqa: E402
from vllm.v1.worker import mamba_utils  # noqa: E402

from cpu_attn.linear import reference  # noqa: E402
from cpu_attn.vllm import copies, layers, linear  # noqa: E402

SLOTS, WIDTH, DK, DV, HK, HV = 20, 4, 16, 32, 2, 4
CHANNELS = 2 * HK * DK + HV * DV
LENGTHS = (150, 40, 9)  # tokens of each request


class Page(MambaBase):  # type: ignore[misc]
    """Gives a layer's states their places in pages, as vLLM does."""

    def __init__(self, length: int, dtype: Any, rows_first: bool) -> None:
        conv = (length, CHANNELS) if rows_first else (CHANNELS, length)
        self.shapes, self.dtypes = (conv, (HV, DV, DK)), (dtype, torch.float32)
        size = sum(int(np.prod(s)) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))
        self.bind_kv_cache(torch.full((SLOTS, 1, 1, size + 64), 77, dtype=torch.int8))

    def get_state_shape(self) -> Any:
        return self.shapes

    def get_state_dtype(self) -> Any:
        return self.dtypes

    mamba_type = None


class Layer:
    """A layer, all tokens of its requests, and what should come out for them."""

    def __init__(self, kind: str, dtype: str = "float32", drafts: int = 0, rows_first: bool = True) -> None:
        self.dtype, self.kind = getattr(torch, dtype), kind
        rng = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=rng)

        gates = 2 * HV if kind == "gated_delta_net" else HV
        self.x = [normal(n, CHANNELS + gates).to(self.dtype) for n in LENGTHS]
        conv = SimpleNamespace(weight=(normal(CHANNELS, 1, WIDTH) / 2).to(self.dtype), bias=None)
        a_log, dt_bias = normal(HV) / 2, normal(HV)
        common = {"prefix": "layer", "tp_size": 1, "conv1d": conv, "activation": "silu", "dt_bias": dt_bias}
        if kind == "mamba2":
            conv.bias = normal(CHANNELS).to(self.dtype)
            common |= {"A": -a_log.exp(), "D": normal(HV), "tped_intermediate_size": HV * DV, "head_dim": DV}
            common |= {"tped_conv_size": CHANNELS, "tped_dt_size": HV, "groups_ssm_state_size": HK * DK}
            common |= {"ssm_state_size": DK}
        else:
            common |= {"A_log": a_log, "key_dim": HK * DK, "value_dim": HV * DV, "head_k_dim": DK, "head_v_dim": DV}
        page = Page(WIDTH - 1 + drafts, self.dtype, rows_first)
        self.layer = SimpleNamespace(**common, kv_cache=page.kv_cache)
        self.wanted = [self.oracle(x.float().numpy(), a_log.numpy()) for x in self.x]

    def oracle(self, x: Any, a_log: Any) -> Any:
        conv, starts = self.layer.conv1d, np.array([0, len(x)], np.int32)
        bias = None if conv.bias is None else conv.bias.float().numpy()
        mixed, gates = x[:, :CHANNELS], x[:, CHANNELS:]
        weight = conv.weight.float().numpy()[:, 0]
        mixed = reference.causal_conv1d(mixed, weight, bias, starts, [None], WIDTH - 1).output
        options: dict[str, Any] = {"A_log": a_log, "dt_bias": self.layer.dt_bias.numpy()}
        if self.kind == "mamba2":
            value, key, query = np.split(mixed, [HV * DV, HV * DV + HK * DK], axis=1)
            options |= {"g": gates, "gate": "dt", "D": self.layer.D.numpy(), "scale": 1.0, "delta_rule": False}
        else:
            query, key, value = np.split(mixed, [HK * DK, 2 * HK * DK], axis=1)
            options |= {"g": gates[:, HV:], "beta": gates[:, :HV], "gate": "softplus"}
            options |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        heads = (query.reshape(-1, HK, DK), key.reshape(-1, HK, DK), value.reshape(-1, HV, DV))
        return reference.linear_attention(*heads, starts, [None], **options).output

    def run(self, monkeypatch: pytest.MonkeyPatch, step: linear.Step, tokens: Any) -> Any:
        """The output [T, Hv, Dv] for the tokens of a step."""
        monkeypatch.setattr(linear, "step_of", lambda layer: step)
        output = torch.zeros(len(tokens) + 2, HV, DV, dtype=self.dtype)  # vLLM may pad a batch
        mixed = torch.cat([tokens, tokens[:2]])
        if self.kind == "mamba2":
            gate = torch.zeros(len(mixed), HV * DV, dtype=self.dtype)
            linear.mamba2(self.layer, torch.cat([gate, mixed], dim=1), output.view(len(mixed), -1))
        else:
            x, b, a = mixed.split([CHANNELS, HV, HV], dim=1)
            linear.gated_delta_net(self.layer, x, b, a, output)
        assert not output[-2:].any()
        return output[:-2].double().numpy()

    def near(self, output: Any, wanted: Any) -> bool:
        error = np.linalg.norm(output - wanted) / np.linalg.norm(wanted)
        return bool(error < 3 * reference.BUDGET[str(self.dtype).split(".")[1]])  # the convolution is rounded, too


def step_of(parts: list[tuple[int, int]], table: Any, **more: Any) -> linear.Step:
    """Of requests with so many tokens before and in the step."""
    before, now = (torch.tensor(x, dtype=torch.int32) for x in zip(*parts, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), now.cumsum(0).int()])
    common = SimpleNamespace(num_reqs=len(parts), query_start_loc=starts, seq_lens=before + now)
    options = {"accepted": None, "drafts": None, "checkpoint": None, **more}
    return linear.Step(common, torch.tensor(table, dtype=torch.int32), **options)


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows_first", [True, False])
def test_batches(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, rows_first: bool) -> None:
    """A part of a prompt; then the rest of it with a whole one, and a request without tokens; then a decode, a part and
    a prompt."""
    monkeypatch.setattr(linear, "is_conv_state_dim_first", lambda: not rows_first)
    it = Layer(kind, dtype, rows_first=rows_first)
    slots = {0: 7, 1: 3, 2: 12}
    seen = [0, 0, 0]
    for counts in ({0: 70}, {0: 79, 1: 30, 2: 0}, {0: 1, 1: 10, 2: 9}):
        parts = [(seen[r], n) for r, n in counts.items()]
        step = step_of(parts, [[slots[r] if n else 0] for r, n in counts.items()])
        tokens = torch.cat([it.x[r][seen[r] : seen[r] + n] for r, n in counts.items()])
        output = it.run(monkeypatch, step, tokens)
        assert it.near(output, np.concatenate([it.wanted[r][seen[r] : seen[r] + n] for r, n in counts.items()]))
        for r, n in counts.items():
            seen[r] += n


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_checkpoints(monkeypatch: pytest.MonkeyPatch, kind: str, drafts: int) -> None:
    """A state within a prompt, from which another request goes on as if it had had the prompt. Where drafts may come,
    states are longer."""
    it = Layer(kind, drafts=drafts)
    monkeypatch.setattr(linear, "is_conv_state_dim_first", lambda: False)
    names = ("request_rows", "checkpoint_offsets", "state_indices")
    checkpoint = SimpleNamespace(**{k: torch.tensor(x) for k, x in zip(names, ([0, 1], [0, 64], [9, 5]), strict=True)})
    table = [[3] + [0] * drafts, [7] + [0] * drafts]
    step = step_of([(0, 40), (0, 150)], table, checkpoint=checkpoint)
    it.run(monkeypatch, step, torch.cat([it.x[1], it.x[0]]))
    output = it.run(monkeypatch, step_of([(64, 86)], [[5] + [0] * drafts]), it.x[0][64:])
    assert it.near(output, it.wanted[0][64:])


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("counts", [{}, {1: 0, 4: 9}])
def test_drafts(monkeypatch: pytest.MonkeyPatch, kind: str, rows_first: bool, counts: dict[int, int]) -> None:
    """Of three drafts so many are kept as the steps say, beside a part of a prompt and a decode that has none. A count
    of 0 means 1, and one past the table its end."""
    monkeypatch.setattr(linear, "is_conv_state_dim_first", lambda: not rows_first)
    it = Layer(kind, drafts=3, rows_first=rows_first)
    table = [[7, 8, 9, 10], [3, 4, 5, 6], [12, 13, 14, 15]]
    step = step_of([(0, 40), (0, 20)], table[:2])
    it.run(monkeypatch, step, torch.cat([it.x[0][:40], it.x[1][:20]]))
    seen, other, accepted = 40, 20, 1
    wrong = torch.randn(4, it.x[0].shape[1], generator=torch.Generator().manual_seed(5))
    for kept, drafted in ((1, 3), (4, 3), (2, 3), (1, 0), (3, 2), (1, 1)):
        tokens = torch.cat([it.x[0][seen : seen + kept], wrong[: drafted + 1 - kept]])
        step = step_of(
            [(seen, drafted + 1), (other, 2)],
            table[:2],
            accepted=torch.tensor([counts.get(accepted, accepted), 1]),
            drafts=torch.tensor([drafted, -1]),
        )
        output = it.run(monkeypatch, step, torch.cat([tokens, it.x[1][other : other + 2]]))
        assert it.near(output[:kept], it.wanted[0][seen : seen + kept])
        assert it.near(output[drafted + 1 :], it.wanted[1][other : other + 2])
        seen, other, accepted = seen + kept, other + 2, kept


BLOCK = 8  # tokens
TABLE = torch.tensor([[7, 1, 9, 14, 3, 5, 16, 11], [2, 8, 12, 4, 6, 10, 18, 13]], dtype=torch.int32)


def copies_of(layer: Any) -> Any:
    """What vLLM would make for a layer of two requests."""
    made = copies.StateCopies()
    made.mamba_group_ids, made.block_size, made.num_accepted_tokens_out = [0], BLOCK, ints([0, 0])
    groups, layer.mamba_type = [SimpleNamespace(layer_names=["layer"])], "kind"
    how = {"kind": (get_conv_copy_spec, get_temporal_copy_spec)}
    made.initialize_from_forward_context(SimpleNamespace(kv_cache_groups=groups), {"layer": layer}, how, [TABLE[:1]])
    return made


def ints(found: Any) -> Any:
    return torch.tensor(list(found), dtype=torch.int32)


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
@pytest.mark.parametrize("rows_first", [True, False])
def test_drafts_fill_blocks(monkeypatch: pytest.MonkeyPatch, kind: str, rows_first: bool) -> None:
    """Two requests with three drafts, of which so many are kept. Where they fill a block, the state at its end is in
    the block's slot, from which another request goes on."""
    for module in (linear, copies):
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: not rows_first)
    it = Layer(kind, drafts=3, rows_first=rows_first)
    made, wrong = copies_of(it.layer), torch.randn(4, it.x[0].shape[1], generator=torch.Generator().manual_seed(5))
    seen, columns, accepted, ends = [13, 6], [1, 0], [1, 1], 0
    it.run(
        monkeypatch,
        step_of([(0, n) for n in seen], [TABLE[r, c : c + 4].tolist() for r, c in enumerate(columns)]),
        torch.cat([x[:n] for x, n in zip(it.x, seen, strict=False)]),
    )
    for kept in ([4, 1], [2, 4], [4, 4], [1, 3], [4, 2], [3, 4], [1, 1]):
        before, columns = columns, [(n + 3) // BLOCK for n in seen]
        made.run_fused_precopy(2, ints(columns), ints(before), ints(a - 1 for a in accepted), None)
        accepted = [a if c == b else 1 for a, b, c in zip(accepted, before, columns, strict=True)]
        tables = [TABLE[r, c : c + 4].tolist() for r, c in enumerate(columns)]
        step = step_of([(n, 4) for n in seen], tables, accepted=ints(accepted), drafts=ints([3, 3]))
        rows = [torch.cat([it.x[r][seen[r] : seen[r] + k], wrong[: 4 - k]]) for r, k in enumerate(kept)]
        output = it.run(monkeypatch, step, torch.cat(rows))
        made.run_fused_postprocess(2, ints(kept), ints(columns), ints([4, 4]), ints(seen), ints([3, 3]))
        accepted = made.num_accepted_tokens_out.tolist()
        for r, k in enumerate(kept):
            assert it.near(output[4 * r : 4 * r + k], it.wanted[r][seen[r] : seen[r] + k])
            seen[r] += k
            end = seen[r] // BLOCK * BLOCK
            if k == 4 and end == seen[r]:  # the state is in the first slot, where the next step begins
                assert accepted[r] == 1
            if end > seen[r] - k:
                ends += 1
                was = [state.clone() for state in it.layer.kv_cache]
                other = step_of([(end, 5)], [[int(TABLE[r, end // BLOCK - 1]), 0, 0, 0]])
                assert it.near(it.run(monkeypatch, other, it.x[r][end : end + 5]), it.wanted[r][end : end + 5])
                for state, old in zip(it.layer.kv_cache, was, strict=True):
                    state.copy_(old)
    assert ends == 6


# ---- the plugin ----

CONTEXT = "MambaSpecDecodeGPUContext"
OWN_CONTEXT: Any = next(c for c in getattr(mamba_utils, CONTEXT).__mro__ if c.__module__ == mamba_utils.__name__)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Has vLLM's code as it is without us, and gives what the plugin logs."""
    monkeypatch.setattr(registry, "_MAMBA_ATTN_OVERRIDES", {})
    monkeypatch.setattr(mamba_utils, CONTEXT, OWN_CONTEXT)
    for kind in layers.KINDS.values():
        owner, name = kind.place()
        theirs = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(theirs, "__wrapped__", theirs))
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(layers.logger, "handle", said.append)
    return said


def test_both_or_neither(own: Any) -> None:
    assert layers.give() == layers.give() == list(layers.KINDS)  # a process may load plugins more than once
    assert mamba_mixer2.MambaMixer2.conv_ssm_forward is layers.KINDS["Mamba-2"].ours
    assert MambaAttentionBackendEnum.GDN_ATTN.get_class() is linear.GDNBackend
    assert issubclass(getattr(mamba_utils, CONTEXT), copies.StateCopies)
    assert not own


def test_copies_that_are_not_as_they_were_stay(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OWN_CONTEXT, "run_fused_precopy", lambda self, other: None)
    assert layers.give() == list(layers.KINDS)
    assert getattr(mamba_utils, CONTEXT) is OWN_CONTEXT
    (warning,) = own
    assert "run_fused_precopy takes self other, expected self num_reqs" in warning.getMessage()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer": "mamba_mixer2:Gone"}, "has no attribute 'Gone'"),
        ({"function": "mamba_mixer2:MambaMixer2.forward"}, "takes self hidden_states"),
        ({"reads": {"conv1d", "odd"}}, "has no odd"),
        ({"our_backend": linear.GDNBackend}, "Mamba2AttentionBackend makes its metadata"),
    ],
)
def test_a_layer_that_is_not_as_it_was_stays(own: Any, monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:
    theirs = mamba_mixer2.MambaMixer2.conv_ssm_forward, MambaAttentionBackendEnum.MAMBA2.get_class()
    monkeypatch.setitem(layers.KINDS, "Mamba-2", dataclasses.replace(layers.KINDS["Mamba-2"], **change))
    assert layers.give() == [name for name in layers.KINDS if name != "Mamba-2"]
    assert theirs == (mamba_mixer2.MambaMixer2.conv_ssm_forward, MambaAttentionBackendEnum.MAMBA2.get_class())
    (warning,) = own
    assert warning.levelname == "WARNING" and said in warning.getMessage() and "Mamba-2" in warning.getMessage()
