# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions on the CPU, over the cases that its own tests are known for, against float64 maths."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn import ops, reference

from ..harness.guard import Guarded
from ..harness.snippets import ROOT, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flash_attn  # noqa: E402
from cpu_attn.flash_attn import (  # noqa: E402
    bert_padding,
    call,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    rotary,
)

DTYPES = ("bfloat16", "float16", "float32")
KV_HEADS = (6, 3, 1)  # for 6 of queries
LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1, 147)]
CACHE_LENGTHS = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 1000), (1, 239)]
CACHE_LENGTHS += [(127, 512), (127, 513), (128, 128), (113, 203), (128, 217), (108, 256)]
HEAD_SIZES = (32, 59, 64, 96, 111, 128, 160, 192, 256)
I32 = {"dtype": torch.int32}


class Case:
    """Choices: four whose combinations 16 numbers go through, others drawn; random tensors."""

    def __init__(self, number: int, lengths: list[tuple[int, int]]):
        self.g = torch.Generator().manual_seed(7919 * number)
        self.causal, self.local, self.alibi, capped = (bool(number >> bit & 1) for bit in range(4))
        self.q_length, self.k_length = lengths[number % len(lengths)]
        self.d, self.dtype, self.kv_heads = (self.one_of(*x) for x in (HEAD_SIZES, DTYPES, KV_HEADS))
        self.softcap = 50.0 * capped
        self.window = (self.integer(0, self.k_length), self.integer(0, self.k_length)) if self.local else (-1, -1)
        self.batch = 2

    def integer(self, low: int, high: int) -> int:
        """Less than high."""
        return int(torch.randint(low, high, (1,), generator=self.g))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.integer(0, len(choices))]

    def randn(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.g).to(getattr(torch, self.dtype))

    def slopes(self) -> Any:
        shape = self.one_of((6,), (self.batch, 6))
        return torch.rand(*shape, generator=self.g) * 0.3 if self.alibi else None

    def options(self, slopes: Any) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": slopes,
        }


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    softmax_scale: float | None = None,
) -> tuple[Any, Any]:
    """float64 output [S_q, Hq, D] and lse [Hq, S_q] of one sequence; without a key 0 and +inf."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The last query token stands at the last key.
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    for side, ahead in ((left, -distance), (right, distance)):
        if side >= 0:
            scores = scores.masked_fill(ahead > side, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return (weights @ v).transpose(0, 1), torch.where(lse == -torch.inf, torch.inf, lse)


def check(out: Any, lse: Any, want: list[tuple[Any, Any]], dtype: str) -> None:
    """out and lse of packed sequences, or of a batch of them, by the budgets; rows without a key exactly."""
    if lse is not None and lse.dim() == 3:
        assert lse.shape == (out.shape[0], out.shape[2], out.shape[1]) and lse.is_contiguous()
        lse = lse.transpose(0, 1).flatten(1)
    out = out.flatten(0, 1) if out.dim() == 4 else out
    wanted, wanted_lse = torch.cat([o for o, _ in want]), torch.cat([x for _, x in want], 1)
    assert out.dtype == getattr(torch, dtype) and out.shape == wanted.shape
    empty = (wanted_lse == torch.inf).T
    assert not out.isnan().any() and (out[empty] == 0).all()
    loc = np.cumsum([0, *(len(o) for o, _ in want)])
    bits = out.view(torch.uint16).numpy().view("bfloat16") if dtype == "bfloat16" else out.numpy()
    rms = reference.relative_rms(bits, wanted.numpy(), loc.astype(np.int32))
    assert rms.max(initial=0.0) <= reference.BUDGET[dtype], rms
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == wanted_lse.shape
        assert ((lse == torch.inf) == empty.T).all() and not lse.isnan().any()
        error = ((lse.double() - wanted_lse).abs() / wanted_lse.abs().clamp(min=1))[~empty.T]
        assert error.max() <= reference.LSE_BUDGET[dtype] if len(error) else True


def starts(lens: Any) -> Any:
    return torch.tensor([0, *itertools.accumulate(lens)], **I32)


def row(slopes: Any, b: int) -> Any:
    return slopes[b] if slopes is not None and slopes.dim() == 2 else slopes


# ---- sequences of one length, and packed ones ----


@pytest.mark.parametrize("number", range(32))
def test_dense(number: int) -> None:
    case = Case(number, LENGTHS)
    slopes = case.slopes()
    q = case.randn(case.batch, case.q_length, 6, case.d)
    kv = case.randn(case.batch, case.k_length, 2, case.kv_heads, case.d)
    k, v = kv.unbind(2)
    options = case.options(slopes)
    out, lse, p = flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options)
    assert p.shape == (0,)
    want = [attention(q[b], k[b], v[b], **options | {"alibi_slopes": row(slopes, b)}) for b in range(case.batch)]
    check(out, lse, want, case.dtype)
    assert torch.equal(flash_attn_func(q, k, v, 0.0, None, *options.values()), out)


@pytest.mark.parametrize("number", range(32))
def test_packed(number: int) -> None:
    """Sequences of other lengths, one of them without tokens and one without keys."""
    case = Case(number, LENGTHS[::-1])
    case.batch = 5
    q_lens = [case.integer(1, case.q_length + 1), 0, case.q_length, 3, case.integer(1, case.q_length + 1)]
    k_lens = [case.integer(1, case.k_length + 1), 5, case.k_length, 0, case.integer(1, case.k_length + 1)]
    slopes = case.slopes()
    q, kv = case.randn(sum(q_lens), 6, case.d), case.randn(sum(k_lens), 2, case.kv_heads, case.d)
    lengths = (starts(q_lens), starts(k_lens), max(q_lens), max(k_lens))
    options = case.options(slopes)
    out, lse, _ = flash_attn_varlen_kvpacked_func(q, kv, *lengths, return_attn_probs=True, **options)
    parts = zip(q.split(q_lens), *(x.split(k_lens) for x in kv.unbind(1)), strict=True)
    want = [attention(*part, **options | {"alibi_slopes": row(slopes, b)}) for b, part in enumerate(parts)]
    check(out, lse, want, case.dtype)
    assert torch.equal(flash_attn_varlen_func(q, *kv.unbind(1), *lengths, 0.0, None, *options.values()), out)
    pages, page_options = paged(kv.unbind(1), k_lens, case.one_of(16, 256))
    again = flash_attn_varlen_func(q, *pages, *lengths, **options, block_table=page_options["block_table"])
    check(again, None, want, case.dtype)
    lengths = (lengths[0], None, *lengths[2:])
    assert torch.equal(flash_attn_varlen_func(q, *pages, *lengths, **options, **page_options), again)


def paged(packed: Any, lens: list[int], size: int) -> tuple[list[Any], dict[str, Any]]:
    """Packed keys and values in shuffled pages; what is not theirs holds NaN, and no block that there is."""
    needed = [-(-n // size) for n in lens]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lens), max(needed) + 1), -7, **I32)
    pools = [torch.full((len(order), size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in packed]
    for b, n in enumerate(needed):
        table[b, :n], order = order[:n], order[n:]
        for x, pool in zip(packed, pools, strict=True):
            for i, page in enumerate(x.split(lens)[b].split(size) if n else ()):
                pool[table[b, i], : len(page)] = page
    return pools, {"block_table": table, "seqused_k": torch.tensor(lens, **I32)}


def test_self_attention_in_one_tensor() -> None:
    case = Case(9, LENGTHS)
    qkv = case.randn(2, 97, 3, 6, 59)
    options = {"causal": True, "window_size": (40, 3), "softmax_scale": 0.3}
    want = [attention(*x.unbind(1), **options) for x in qkv]
    check(*flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)[:2], want, case.dtype)
    lens = [90, 7, 97]
    packed, want = qkv.flatten(0, 1), []
    for x in packed.split(lens):
        want.append(attention(*x.unbind(1), **options))
    out, lse, _ = flash_attn_varlen_qkvpacked_func(packed, starts(lens), 97, return_attn_probs=True, **options)
    check(out, lse, want, case.dtype)


def test_rows_that_see_no_key() -> None:
    """More queries than keys, no keys, no queries, no sequences, a window that lies past the keys."""
    for q_length, k_length, options in (
        (5, 2, {"causal": True}),
        (4, 0, {}),
        (0, 3, {"causal": True}),
        (6, 3, {"window_size": (1, 0), "alibi_slopes": torch.ones(6)}),
        (6, 3, {"window_size": (0, 1), "alibi_slopes": torch.ones(2, 6)}),
        (3, 0, {"alibi_slopes": torch.ones(2, 6)}),
    ):
        q, k, v = torch.randn(2, q_length, 6, 32), *torch.randn(2, 2, k_length, 3, 32)
        want = [
            attention(q[b], k[b], v[b], **options | {"alibi_slopes": row(options.get("alibi_slopes"), b)})
            for b in range(2)
        ]
        check(*flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2], want, "float32")
    out = flash_attn_func(torch.zeros(0, 3, 6, 32), *torch.zeros(2, 0, 4, 3, 32))
    assert out.shape == (0, 3, 6, 32)


def test_tokens_past_the_last_sequence() -> None:
    q, k, v = torch.randn(7, 6, 32), *torch.randn(2, 9, 6, 32)
    out, lse, _ = flash_attn_varlen_func(q, k, v, starts([4]), starts([9]), 4, 9, return_attn_probs=True)
    check(out[:4], lse[:, :4], [attention(q[:4], k, v)], "float32")
    assert (out[4:] == 0).all() and (lse[:, 4:] == torch.inf).all()


def test_values_of_another_head_size() -> None:
    q, k, v = torch.randn(2, 5, 6, 32), torch.randn(2, 9, 3, 32), torch.randn(2, 9, 3, 20)
    want = [attention(q[b], k[b], v[b]) for b in range(2)]
    check(*flash_attn_func(q, k, v, return_attn_probs=True)[:2], want, "float32")
    out = flash_attn_varlen_func(q[0], k[0], v[0], starts([5]), starts([9]), 5, 9)
    check(out, None, want[:1], "float32")
    check(flash_attn_with_kvcache(q, k, v), None, want, "float32")


# ---- a cache that grows ----


def turned(x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """x [S, H, D] by float64 maths."""
    rows = torch.cat([cos, sin], 1).double().numpy()
    return torch.from_numpy(reference.rotary(x.double().numpy(), positions.numpy(), rows, not interleaved))


@pytest.mark.parametrize("number", range(80))
def test_kvcache(number: int) -> None:
    """Each of flash-attn's choices as its test has them: those of a page rule out cache_batch_idx and cache_leftpad."""
    case = Case(number, CACHE_LENGTHS)
    page_size = case.one_of(None, None, 16, 256)
    has_batch_idx, has_leftpad = (page_size is None and case.one_of(False, True) for _ in range(2))
    new = case.one_of(0, case.q_length, case.q_length, case.integer(1, case.q_length + 1))
    rot_dim = int(case.one_of(0.0, 0.5, 1.0) * (new > 0) * case.d) // 16 * 16
    interleaved, num_splits, slopes = case.one_of(False, True), case.one_of(0, 1), case.slopes()

    # The sequences as plain keys and values, NaN where nobody may read.
    room = case.k_length - max(new, case.q_length * bool(rot_dim))
    lens = [case.integer(0 if new else 1, room + 1) for _ in range(case.batch)]
    pad = [case.integer(0, n + 1) if has_leftpad else 0 for n in lens]
    plain = case.randn(2, case.batch, case.k_length, case.kv_heads, case.d)
    for b in range(case.batch):
        plain[:, b, lens[b] :] = torch.nan
        plain[:, b, : pad[b]] = torch.nan
    q = case.randn(case.batch, case.q_length, 6, case.d)
    fresh = case.randn(2, case.batch, new, case.kv_heads, case.d) if new else [None, None]
    angles = torch.rand(case.k_length, rot_dim // 2, generator=case.g) * 6.28
    cos, sin = (f(angles).to(q.dtype) if rot_dim else None for f in (torch.cos, torch.sin))

    # The caches that hold them.
    more: dict[str, Any] = {}
    if page_size is None:
        where = torch.randperm(2 * case.batch, generator=case.g)[: case.batch]
        caches = torch.full((2, 2 * case.batch, *plain.shape[2:]), torch.nan, dtype=q.dtype)
        if has_batch_idx:
            caches[:, where], more["cache_batch_idx"] = plain, where.int()
        else:
            caches, where = plain.clone(), torch.arange(case.batch)
        if has_leftpad:
            more["cache_leftpad"] = torch.tensor(pad, **I32)
    else:
        pages, found = paged([x.flatten(0, 1) for x in plain], [case.k_length] * case.batch, page_size)
        caches, more["block_table"] = torch.stack(pages), found["block_table"][:, :-1]
    before = caches.clone()
    options = case.options(slopes) | {"num_splits": num_splits, "return_softmax_lse": True}
    turn = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    given = torch.tensor(lens, **I32)
    out, lse = flash_attn_with_kvcache(q, *caches, *fresh, cache_seqlens=given, **turn, **more, **options)

    want, touched = [], torch.zeros(caches.shape[1:3], dtype=torch.bool)
    for b, n in enumerate(lens):
        at = torch.arange(n, n + new)
        block, offset = (
            (where[b].expand(new), at)
            if page_size is None
            else (
                more["block_table"][b, at // page_size].long(),
                at % page_size,
            )
        )
        touched[block, offset] = True
        stored_k, stored_v = (x[block, offset] for x in caches)
        states = q[b].double()
        if rot_dim:
            steps = torch.arange(case.q_length) if case.causal or case.local else torch.zeros(case.q_length).long()
            states = turned(q[b], n + steps, cos, sin, interleaved)
        if new:
            key = turned(fresh[0][b], at, cos, sin, interleaved) if rot_dim else fresh[0][b]
            assert torch.allclose(
                stored_k.double(), key.to(q.dtype).double(), rtol=1e-2 * (q.element_size() == 2), atol=1e-6
            )
            assert torch.equal(stored_v, fresh[1][b])
        keys = [torch.cat([plain[i, b, pad[b] : n], x]) for i, x in enumerate((stored_k, stored_v))]
        how = case.options(row(slopes, b))
        want.append(attention(states.to(q.dtype), *keys, **how))
    check(out, lse, want, case.dtype)
    assert torch.equal(caches[:, ~touched].nan_to_num(7), before[:, ~touched].nan_to_num(7))  # nothing else is written


def test_an_int_or_nothing_for_the_lengths() -> None:
    q, k, v = torch.randn(2, 3, 6, 32), *torch.randn(2, 3, 20, 3, 32)
    for given, n in ((None, 20), (13, 13), (np.int64(13), 13), (0, 0)):
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, causal=True, return_softmax_lse=True)
        check(out, lse, [attention(q[b], k[b, :n], v[b, :n], causal=True) for b in range(2)], "float32")


def test_two_sequences_in_one_place() -> None:
    q, k, v = torch.randn(2, 1, 6, 32), *torch.randn(2, 3, 20, 3, 32)
    new = torch.randn(1, 1, 3, 32).expand(2, 1, 3, 32)
    options = {"cache_seqlens": torch.tensor([4, 4], **I32), "cache_batch_idx": torch.tensor([2, 2], **I32)}
    out = flash_attn_with_kvcache(q, k, v, new, new, **options)
    assert torch.equal(k[2, 4], new[0, 0])
    check(out, None, [attention(q[b], k[2, :5], v[2, :5]) for b in range(2)], "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splits_change_no_bit(dtype: str) -> None:
    q, k, v = (torch.randn(1, n, 2, 64).to(getattr(torch, dtype)) for n in (1, 5000, 5000))
    outs = [flash_attn_with_kvcache(q, k, v, num_splits=n) for n in (0, 1, 7)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# ---- memory ----


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arrays of every call that came to our kernels."""
    seen: list[Any] = []
    attend = ops.run_attention

    def counted(plan: Any, arrays: Any, *args: Any, **options: Any) -> None:
        seen.append(arrays)
        attend(plan, arrays, *args, **options)

    monkeypatch.setattr(ops, "run_attention", counted)
    return seen


def memory(x: Any) -> int:
    return x.untyped_storage().data_ptr()


def test_keys_are_read_where_they_lie(calls: list[Any]) -> None:
    """By tokens, by heads, as a part of a projection; queries, too, but of several sequences by heads."""
    by_heads = torch.randn(3, 2, 6, 9, 32).transpose(2, 3)
    qkv = torch.randn(2, 9, 3, 6, 32)
    loc = starts([9, 9])
    flash_attn_func(*by_heads)
    flash_attn_qkvpacked_func(qkv)
    flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), loc, 9)
    flash_attn_with_kvcache(qkv[:, :, 0], by_heads[1], by_heads[2], qkv[:, :, 1], qkv[:, :, 2], cache_seqlens=0)
    flash_attn_with_kvcache(qkv[:, :, 0], *by_heads[1:], cache_seqlens=9, cache_leftpad=torch.tensor([3, 4], **I32))
    states = {memory(by_heads), memory(qkv)}
    assert len(calls) >= 6
    assert all(memory(x) in states for arrays in calls for x in arrays[3:5])
    assert all(memory(arrays[2]) in states for arrays in calls[1:])
    want = [attention(*by_heads[:, b]) for b in range(2)]
    check(flash_attn_func(*by_heads), None, want, "float32")


def test_a_last_axis_that_is_not_dense() -> None:
    states = torch.randn(3, 2, 9, 6, 64)[..., ::2]
    check(flash_attn_func(*states), None, [attention(*states[:, b]) for b in range(2)], "float32")
    out = flash_attn_varlen_func(*states[:, 0], starts([9]), starts([9]), 9, 9)
    check(out, None, [attention(*states[:, 0])], "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_byte_past_the_keys(dtype: str) -> None:
    """K and V end where memory does: dense, padded on the left and packed."""
    bits = torch.int16 if dtype == "bfloat16" else torch.float32
    q, *states = (torch.randn(2, n, 3, 20).to(getattr(torch, dtype)) for n in (3, 37, 37))
    guards = [Guarded(x.view(bits).numpy()) for x in states]
    k, v = (torch.from_numpy(g.array).view(q.dtype) for g in guards)
    check(flash_attn_func(q, k, v), None, [attention(q[b], k[b], v[b]) for b in range(2)], dtype)
    out = flash_attn_with_kvcache(q, k, v, cache_leftpad=torch.tensor([5, 36], **I32))
    check(out, None, [attention(q[b], k[b, n:], v[b, n:]) for b, n in ((0, 5), (1, 36))], dtype)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_varlen_func(*packed, starts([3, 3]), starts([60, 14]), 3, 60)
    parts = zip(packed[0].split(3), *(x.split([60, 14]) for x in packed[1:]), strict=True)
    check(out, None, [attention(*part) for part in parts], dtype)
    assert all(g.intact() for g in guards)


def test_alibi_stores_diagonals() -> None:
    """Where the core has no such ALiBi it gets a bias, of Q + K numbers for each head, not Q * K."""
    lens = np.array([700, 650], np.int32)
    bias = call._alibi_bias(np.ones((1, 6), np.float32), np.array([500, 400], np.int32), lens)
    assert bias.shape == (2, 6, 500, 700)
    assert np.ptp(np.array(np.lib.array_utils.byte_bounds(bias))) <= 4 * 2 * 6 * 1200


# ---- errors ----


def refused(error: type[Exception], words: str, function: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=words):
        function(*args, **options)


def test_what_is_refused() -> None:
    q, k, v = torch.zeros(2, 5, 6, 32), *torch.zeros(2, 2, 9, 3, 32)
    for options, error, words in (
        ({"dropout_p": 0.1}, ValueError, "^dropout_p: 0.1, expected 0.0"),
        ({"window_size": 3}, TypeError, "^window_size: expected a sequence"),
        ({"window_size": (3,)}, ValueError, "^window_size: expected .left, right., got 1"),
        ({"window_size": (3, 0.5)}, TypeError, r"^window_size\[1\]: expected an integer"),
        ({"softmax_scale": float("nan")}, ValueError, "^softmax_scale: nan is not a finite float32"),
        ({"softmax_scale": 3e38}, ValueError, "^softmax_scale: 3e[+]38 times .* is not a finite float32"),
        ({"softcap": float("inf")}, ValueError, "^softcap: inf is not a finite float32"),
        ({"causal": None}, TypeError, "^causal: expected True or False"),
        ({"alibi_slopes": torch.zeros(5)}, ValueError, "^alibi_slopes: axis 0 is 5, expected num_heads = 6"),
        ({"alibi_slopes": torch.zeros(3, 6)}, ValueError, "^alibi_slopes: axis 0 is 3, expected batch_size = 2"),
        ({"alibi_slopes": torch.zeros(6).half()}, TypeError, "^alibi_slopes: dtype float16, expected float32"),
        ({"alibi_slopes": [0.5] * 6}, TypeError, "^alibi_slopes: expected Tensor, got list"),
        ({"q": torch.zeros(2, 5, 6, 32).double()}, TypeError, "^q: dtype torch.float64, expected one of float32"),
        ({"q": torch.zeros(5, 6, 32)}, ValueError, "^q: 3 axes, expected 4"),
        ({"q": torch.zeros(2, 5, 6, 32, device="meta")}, ValueError, "^q: lies on meta, expected cpu"),
        ({"k": torch.zeros(2, 9, 3, 32).half()}, TypeError, "^k: dtype torch.float16, expected torch.float32"),
        ({"k": torch.zeros(3, 9, 3, 32)}, ValueError, "^k: axis 0 is 3, expected batch_size = 2"),
        ({"k": torch.zeros(2, 9, 3, 16)}, ValueError, "^k: axis 3 is 16, expected head_size = 32"),
        ({"v": torch.zeros(2, 8, 3, 32)}, ValueError, "^v: axis 1 is 8, expected seqlen_k = 9"),
        ({"k": torch.zeros(2, 9, 4, 32), "v": torch.zeros(2, 9, 4, 32)}, ValueError, "4 does not divide"),
        ({"k": None}, TypeError, "^k: expected Tensor, got NoneType"),
        ({"q": torch.zeros(2, 5, 6, 32, requires_grad=True)}, ValueError, "^q: requires grad"),
        ({"v": torch.zeros(2, 9, 3, 32, requires_grad=True)}, ValueError, "^v: requires grad"),
        ({"alibi_slopes": torch.zeros(6, requires_grad=True)}, ValueError, "^alibi_slopes: requires grad"),
    ):
        refused(error, words, flash_attn_func, **{"q": q, "k": k, "v": v} | options)
    with torch.no_grad():
        flash_attn_func(q.clone().requires_grad_(), k, v)
    refused(ValueError, "^qkv: axis 2 is 2, expected three = 3", flash_attn_qkvpacked_func, torch.zeros(2, 5, 2, 6, 32))
    refused(ValueError, "^kv: axis 2 is 3, expected two = 2", flash_attn_kvpacked_func, q, torch.zeros(2, 5, 3, 6, 32))
    refused(TypeError, "^kv: dtype torch.float16", flash_attn_kvpacked_func, q, torch.zeros(2, 5, 2, 6, 32).half())


def test_what_is_refused_of_packed_sequences() -> None:
    arguments = {"q": torch.zeros(9, 6, 32), "k": torch.zeros(31, 3, 32), "v": torch.zeros(31, 3, 32)}
    arguments |= {
        "cu_seqlens_q": starts([3, 6]),
        "cu_seqlens_k": starts([5, 26]),
        "max_seqlen_q": 6,
        "max_seqlen_k": 26,
    }
    pages, table = torch.zeros(4, 16, 3, 32), torch.tensor([[0, 1], [2, 3]], **I32)
    for options, error, words in (
        (
            {"cu_seqlens_q": torch.tensor([0, 3, 9])},
            TypeError,
            "^cu_seqlens_q: dtype torch.int64, expected torch.int32",
        ),
        ({"cu_seqlens_q": starts([3, 7])}, ValueError, r"^cu_seqlens_q\[2\]: 10, the tensor has 9 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 3], **I32)}, ValueError, r"^cu_seqlens_q\[2\]: 3, expected at least 9"),
        ({"cu_seqlens_k": starts([5, 27])}, ValueError, r"^cu_seqlens_k\[2\]: 32, the tensor has 31 tokens"),
        ({"cu_seqlens_k": starts([5])}, ValueError, r"^cu_seqlens_k: shape \(2,\), expected \[3\]"),
        ({"cu_seqlens_k": None}, ValueError, "^cu_seqlens_k: is None"),
        ({"seqused_k": torch.tensor([6, 1], **I32)}, ValueError, r"^seqused_k\[0\]: 6, outside 0..5"),
        ({"v": torch.zeros(30, 3, 32)}, ValueError, "^v: 30 tokens, k has 31"),
        ({"block_table": table}, ValueError, "^k: 3 axes, expected 4"),
        (
            {"block_table": table, "k": pages, "v": pages, "cu_seqlens_k": starts([5, 33])},
            ValueError,
            r"^seqused_k\[1\]: 33, outside 0..32",
        ),
        ({"block_table": table, "k": pages, "v": pages, "seqused_k": -starts([3])}, ValueError, r"^seqused_k\[1\]: -3"),
        ({"block_table": table + 1, "k": pages, "v": pages}, ValueError, "^block_table: request 1: .* block 4"),
        (
            {"block_table": table + 1, "k": pages, "v": pages, "causal": True, "alibi_slopes": torch.ones(2, 6)},
            ValueError,
            "^block_table: request 1: .* block 4",
        ),
    ):
        refused(error, words, flash_attn_varlen_func, **arguments | options)
    strided = torch.zeros(4, 16, 3, 64)[..., ::2]
    more = {"block_table": table, "k": strided, "v": strided}
    refused(ValueError, "^k: the last axis has stride 2", flash_attn_varlen_func, **arguments | more)
    qkv = torch.zeros(9, 3, 6, 32)
    refused(ValueError, r"^cu_seqlens\[1\]: 10", flash_attn_varlen_qkvpacked_func, qkv, starts([10]), 10)
    refused(TypeError, "^qkv: dtype torch.float64", flash_attn_varlen_qkvpacked_func, qkv.double(), starts([9]), 9)


def test_nothing_is_written_before_an_error() -> None:
    """Of flash_attn_with_kvcache."""
    q, k, v = torch.zeros(2, 3, 6, 32), *torch.zeros(2, 2, 3, 3, 32)
    caches = torch.full((2, 4, 16, 3, 32), 7.0)
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    arguments["cache_seqlens"] = torch.tensor([4, 13], **I32)
    angles, table = torch.zeros(16, 8), torch.tensor([[0], [3]], **I32)
    turn = {"rotary_cos": angles, "rotary_sin": angles}
    for options, error, words in (
        (
            {"cache_seqlens": torch.tensor([4, 14], **I32)},
            ValueError,
            r"^cache_seqlens\[1\]: 14, outside 0..13, the 16 slots .* less 3 new",
        ),
        ({"cache_seqlens": torch.tensor([-1, 4], **I32)}, ValueError, r"^cache_seqlens\[0\]: -1, outside 0..13"),
        ({"cache_seqlens": torch.tensor([4, 4])}, TypeError, "^cache_seqlens: dtype torch.int64, expected torch.int32"),
        ({"cache_seqlens": 2.5}, TypeError, "^cache_seqlens: expected an integer"),
        ({"cache_seqlens": None}, ValueError, "^cache_seqlens: is None, k is not"),
        ({"cache_batch_idx": torch.tensor([4, 0], **I32)}, ValueError, r"^cache_batch_idx\[0\]: 4, outside 0..3"),
        ({"cache_batch_idx": [0, 1]}, TypeError, "^cache_batch_idx: expected Tensor, got list"),
        ({"cache_leftpad": torch.tensor([5, 0], **I32)}, ValueError, r"^cache_leftpad\[0\]: 5, outside 0..4"),
        ({"cache_leftpad": torch.tensor([-1, 0], **I32)}, ValueError, r"^cache_leftpad\[0\]: -1, outside 0..4"),
        (
            {"block_table": table, "cache_leftpad": torch.tensor([0, 14], **I32)},
            ValueError,
            r"^cache_leftpad\[1\]: 14, outside 0..13",
        ),
        (
            {"block_table": table, "cache_batch_idx": torch.tensor([1, 2], **I32)},
            ValueError,
            r"^cache_batch_idx\[1\]: 2, outside 0..1",
        ),
        (
            {"block_table": table + 1, "cache_batch_idx": torch.tensor([1, 0], **I32)},
            ValueError,
            r"^block_table\[1, 0\]: 4, outside 0..3",
        ),
        ({"block_table": table[:1]}, ValueError, "^block_table: axis 0 is 1, expected batch_size = 2"),
        ({"block_table": table + 1}, ValueError, r"^block_table\[1, 0\]: 4, outside 0..3"),
        ({"block_table": table, "cache_seqlens": 14}, ValueError, r"^cache_seqlens\[0\]: 14, outside 0..13"),
        (
            {"block_table": table + 1, "window_size": (-1, 0), "q": q[:, :0]},
            ValueError,
            r"^block_table\[1, 0\]: 4, outside",
        ),
        ({"k": k[:, :2]}, ValueError, "^v: axis 1 is 3, expected seqlen_new = 2"),
        ({"v": None}, ValueError, "^v: is None, k is not"),
        ({"k": None}, ValueError, "^v: only beside k"),
        ({"k": k.half()}, TypeError, "^k: dtype torch.float16, expected torch.float32"),
        ({"k": caches[0, 0, :6].unflatten(0, (2, 3))}, ValueError, "^k_cache: shares memory with k"),
        (
            {"q": caches[0, :2, :3].repeat_interleave(2, 2)[..., :16]},
            ValueError,
            "^k_cache: axis 3 is 32, expected head_size = 16",
        ),
        ({"alibi_slopes": torch.zeros(5)}, ValueError, "^alibi_slopes: axis 0 is 5"),
        ({"num_splits": -1}, ValueError, "^num_splits: -1"),
        ({**turn, "rotary_sin": None}, ValueError, "^rotary_sin: is None, rotary_cos is not"),
        ({**turn, "rotary_cos": None}, ValueError, "^rotary_cos: is None, rotary_sin is not"),
        ({**turn, "rotary_sin": angles[:9]}, ValueError, "^rotary_sin: axis 0 is 9, expected positions = 16"),
        ({**turn, "rotary_sin": angles.half()}, TypeError, "^rotary_sin: dtype torch.float16, expected torch.float32"),
        (
            {"rotary_cos": angles[:15], "rotary_sin": angles[:15]},
            ValueError,
            "^rotary_cos: axis 0 is 15, expected at least 16",
        ),
        (
            {"rotary_cos": angles.half(), "rotary_sin": angles.half()},
            TypeError,
            "^rotary_cos: dtype float16, expected float32",
        ),
        ({"rotary_cos": torch.zeros(16, 17), "rotary_sin": torch.zeros(16, 17)}, ValueError, "rot_dim: 34 is outside"),
        ({"k_cache": caches[0, ..., ::2], "k": k[..., :16], "q": q[..., :16]}, ValueError, "^k_cache: .* stride 2"),
        ({"k_cache": caches[0].expand(4, 16, 3, 32)[:1]}, ValueError, "^v_cache: axis 0 is 4, expected N = 1"),
        ({"k_cache": caches[0, :1], "v_cache": caches[1, :1]}, ValueError, "^k_cache: 1 sequences, q has 2"),
        ({"k_cache": caches[0].clone().requires_grad_()}, ValueError, "^k_cache: requires grad"),
    ):
        refused(error, words, flash_attn_with_kvcache, **arguments | options)
        assert (caches == 7).all(), words


# ---- flash_attn as others know it ----


NOTHING = inspect.Parameter.empty
COMMON = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
COMMON |= {"alibi_slopes": None, "deterministic": False, "return_attn_probs": False}
LENS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NOTHING)
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", NOTHING) | COMMON,
    "flash_attn_qkvpacked_func": {"qkv": NOTHING} | COMMON,
    "flash_attn_kvpacked_func": {"q": NOTHING, "kv": NOTHING} | COMMON,
    "flash_attn_varlen_func": dict.fromkeys("qkv", NOTHING) | LENS | COMMON | {"block_table": None, "seqused_k": None},
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), NOTHING) | COMMON,
    "flash_attn_varlen_kvpacked_func": {"q": NOTHING, "kv": NOTHING} | LENS | COMMON,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), NOTHING)
    | dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"))
    | {"block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    | {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """Names, order and defaults of flash-attn 2.8; seqused_k is ours, by name alone."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters.items()) == [(n, p) for n, p in parameters.items() if n == p.name]
    assert [(n, p.default) for n, p in parameters.items()] == list(SIGNATURES[name].items())
    assert {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} <= {"seqused_k"}


def test_compiled_and_in_inference_mode() -> None:
    q, k, v = torch.randn(2, 3, 6, 32), *torch.randn(2, 2, 9, 3, 32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q * 2, k, v) * 2, backend="eager")
    want = flash_attn_func(q * 2, k, v) * 2
    for _ in range(2):
        assert torch.equal(compiled(q, k, v), want)
    with torch.inference_mode():
        assert torch.equal(compiled(q.clone(), k, v), want)


def printed(code: str, path: Path | None = None) -> str:
    start = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_install() -> None:
    code = """
import importlib.util, sys
from cpu_attn import flash_attn as ours
assert "flash_attn" not in sys.modules
ours.install()
ours.install()
import flash_attn, flash_attn.layers.rotary
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
assert flash_attn_func is ours.flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary"):
    spec = importlib.util.find_spec(name)
    assert spec.name == name and spec.parent == sys.modules[name].__package__, spec
assert importlib.util.find_spec("flash_attn.losses") is None
try:
    import flash_attn.losses
except ModuleNotFoundError:
    print(flash_attn.__version__)
"""
    assert printed(code) == "2.8.3"


def test_install_leaves_a_real_one_alone(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '9'")
    code = """
import sys
from cpu_attn.flash_attn import install
for _ in range(2):
    try:
        install()
    except RuntimeError as e:
        print("another one is here" in str(e) and "__init__.py" in str(e), "flash_attn" in sys.modules)
    import flash_attn
    assert flash_attn.__version__ == "9"
"""
    assert printed(code, tmp_path).split() == ["True", "False", "True", "True"]


def test_padding() -> None:
    states, mask = torch.randn(3, 5, 2, 4), torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, indices, loc, longest, used = bert_padding.unpad_input(states, mask)
    assert torch.equal(packed, states[mask.bool()]) and loc.tolist() == [0, 2, 2, 6] and loc.dtype == torch.int32
    assert indices.tolist() == [0, 1, 11, 12, 13, 14] and longest == 4 and used.tolist() == [2, 0, 4]
    assert torch.equal(bert_padding.pad_input(packed, indices, 3, 5), states * mask[..., None, None])
    assert torch.equal(bert_padding.index_first_axis(states.flatten(0, 1), indices), packed)
    packed, indices, loc, longest, used = bert_padding.unpad_input(states, mask.bool(), unused.bool())
    assert loc.tolist() == [0, 3, 3, 7] and longest == 4 and used.tolist() == [2, 0, 4] and len(packed) == 7


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [16, 32])
def test_rotary(rot_dim: int, interleaved: bool) -> None:
    x, angles = torch.randn(2, 5, 3, 32), torch.rand(40, rot_dim // 2) * 6.28
    cos, sin = angles.cos(), angles.sin()
    for offsets in (0, 7, torch.tensor([3, 30], **I32)):
        first = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
        want = [turned(x[b], torch.arange(5) + first[b], cos, sin, interleaved) for b in range(2)]
        out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        assert torch.allclose(out.double(), torch.stack(want), atol=1e-5)
        packed = x.flatten(0, 1)
        options = {"seqlen_offsets": offsets, "cu_seqlens": starts([5, 5]), "max_seqlen": 5}
        assert torch.equal(rotary.apply_rotary_emb(packed, cos, sin, interleaved, **options), out.flatten(0, 1))
    again = x.clone()
    assert rotary.apply_rotary_emb(again, cos, sin, interleaved, inplace=True, seqlen_offsets=offsets) is again
    assert torch.equal(again, out)


def test_snippet() -> None:
    (names,) = run(ROOT / "docs" / "flash_attn.md")
    n = 0
    for b, length in enumerate(names["cache_seqlens"].tolist()):
        keys = (names[x][b, : length + 1] for x in ("k_cache", "v_cache"))
        check(names["out"][b], None, [attention(names["q"][b], *keys, causal=True)], "float32")
        n += 1
    assert n == 2
