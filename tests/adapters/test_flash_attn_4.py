# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's functions, against float64: its windows, where sequences may lie, sinks, latents and float8."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn.flash_attn import flash_attn_3, flash_attn_4  # noqa: E402

from .flashinfer_case import attend64, close, indptr  # noqa: E402

LN2 = math.log(2)
WINDOWS: list[tuple[int | None, int | None]]
WINDOWS = [(None, -1), (-1, None), (None, -3), (-2, 5), (4, -1), (-4, 4), (-3, 1), (-1, -1), (-1, 0), (6, None), (2, 3)]
WINDOWS += [(None, -40), (-40, None), (-(2**31), None), (None, None)]


def states(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    g = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def seen(n: int, m: int, causal: bool, window: Any) -> Any:
    """Which of m keys n queries see: bool [n, m]."""
    left, right = window
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if causal else None
    distance = np.arange(m) - np.arange(m - n, m)[:, None]
    ahead = distance <= right if right is not None else distance == distance
    return ahead & (distance >= -left if left is not None else ahead)


def wanted(parts: Any, causal: bool, window: Any, sinks: Any = None, scale: float | None = None) -> list[Any]:
    found = []
    for q, k, v in parts:
        mask = seen(len(q), len(k), causal, window)
        found.append(attend64(q, k, v, mask=mask, sinks=None if sinks is None else sinks.double().numpy(), scale=scale))
    return found


def check(out: Any, lse: Any, want: list[Any]) -> None:
    """out [T, Hq, Dv] and lse [Hq, T] of packed sequences."""
    close(out, np.concatenate([o for o, _ in want]), lse.T.contiguous() / LN2, np.concatenate([x for _, x in want]))


def test_a_negative_side_hides_the_diagonal() -> None:
    (x,) = states((1, 4, 1, 8))
    out, lse = flash_attn_4.flash_attn_func(x, x, x, window_size=(None, -1), return_lse=True)
    mask = np.tril(np.ones((4, 4), bool), -1)
    want, want_lse = attend64(x[0], x[0], x[0], mask=mask)
    close(out[0], want, lse[0].T.contiguous() / LN2, want_lse)
    assert (out[0, 0] == 0).all() and (lse[0, :, 0] == -torch.inf).all()


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: Any, has_sink: bool) -> None:
    """Dense and packed; more queries than keys, none of either, and tokens that do not count, which hold NaN."""
    sinks = states((4,))[0] if has_sink else None
    for causal in (False, True):
        more = {"causal": causal, "window_size": window, "learnable_sink": sinks, "return_lse": True}
        for n, m in ((9, 30), (9, 9), (12, 5)):
            q, k, v = states((2, n, 4, 32), (2, m, 2, 32), (2, m, 2, 32))
            out, lse = flash_attn_4.flash_attn_func(q, k, v, **more)
            want = wanted(zip(q, k, v, strict=True), causal, window, sinks)
            check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), want)
        q_lens, k_lens = [7, 0, 5, 9], [20, 3, 0, 4]
        q, k, v = states((4, 10, 4, 32), (4, 21, 2, 32), (4, 21, 2, 32))
        for b in range(4):
            q[b, q_lens[b] :], k[b, k_lens[b] :], v[b, k_lens[b] :] = torch.nan, torch.nan, torch.nan
        parts = [(q[b, :n], k[b, :m], v[b, :m]) for b, (n, m) in enumerate(zip(q_lens, k_lens, strict=True))]
        want = wanted(parts, causal, window, sinks)
        packed = [torch.cat(x) for x in zip(*parts, strict=True)]
        used = [{"seqused_q": indptr(q_lens).diff().int()}, {"seqused_k": indptr(k_lens).diff().int()}]
        for dense_q, dense_k in ((True, True), (True, False), (False, True), (False, False)):
            where = used[0] if dense_q else {"cu_seqlens_q": indptr(q_lens)}
            where = where | (used[1] if dense_k else {"cu_seqlens_k": indptr(k_lens)})
            keys = (k, v) if dense_k else packed[1:]
            out, lse = flash_attn_4.flash_attn_varlen_func(q if dense_q else packed[0], *keys, **where, **more)
            if dense_q:
                rest = [(b, slice(n, None)) for b, n in enumerate(q_lens)]
                assert all((out[at] == 0).all() for at in rest)
                out = torch.cat([out[b, :n] for b, n in enumerate(q_lens)])
                lse = torch.cat([lse[b, :, :n] for b, n in enumerate(q_lens)], 1)
            check(out, lse, want)


def test_pages_and_tokens_that_do_not_count() -> None:
    """seqused_q and seqused_k beside cu_seqlens, of which flash-attn 3 has the same, and pages."""
    q, k, v = states((20, 4, 32), (40, 2, 32), (40, 2, 32))
    starts_q, starts_k = indptr([9, 11]), indptr([25, 15])
    used = {"seqused_q": torch.tensor([6, 11]).int(), "seqused_k": torch.tensor([20, 0]).int()}
    parts = [(q[:6], k[:20], v[:20]), (q[9:20], k[25:25], v[25:25])]
    want = wanted(parts, True, (7, None))
    where = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "causal": True, **used}
    out, lse = flash_attn_4.flash_attn_varlen_func(q, k, v, window_size=(7, None), return_lse=True, **where)
    counts = [*range(6), *range(9, 20)]
    check(out[counts], lse[:, counts], want)
    assert (out[6:9] == 0).all()
    more = {"max_seqlen_q": 11, "max_seqlen_k": 25, "window_size": (7, -1), "return_attn_probs": True}
    for at, got in zip((out, lse), flash_attn_3.flash_attn_varlen_func(q, k, v, **where, **more), strict=True):
        assert torch.equal(at, got)
    # A table without seqused_k is full.
    table = torch.tensor([[1, 0], [0, 1]]).int()
    pages = [x[:32].unflatten(0, (2, 16)) for x in (k, v)]
    keys = [torch.cat([x[16:32], x[:16]]) for x in (k, v)]
    want = wanted([(q[:9], *keys), (q[9:20], k[:32], v[:32])], False, (None, -2))
    where = {"cu_seqlens_q": starts_q, "page_table": table, "window_size": (None, -2), "return_lse": True}
    check(*flash_attn_4.flash_attn_varlen_func(q, *pages, **where), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(dtype: Any) -> None:
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 32), dtype=dtype)
    want = wanted(zip(q, k, v, strict=True), True, (None, None))
    out, lse = flash_attn_4.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.dtype == torch.bfloat16
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), want)
    with pytest.raises(TypeError, match=r"^v: dtype torch.float32, expected torch.float8"):
        flash_attn_4.flash_attn_func(q, k, v.float())


def test_latents() -> None:
    """lse stands by tokens beside qv; where k is v and Dv is 512, or without q and k, values are the keys."""
    q, k, qv, v = states((2, 3, 4, 64), (2, 20, 1, 64), (2, 3, 4, 512), (2, 20, 1, 512))
    both = wanted(zip(torch.cat([qv, q], -1), torch.cat([v, k], -1), v, strict=True), True, (None, None))
    alone = wanted(zip(qv, v, v, strict=True), True, (None, None))
    for arguments, want in (
        ({"q": q, "k": k, "v": v, "qv": qv}, both),
        ({"q": None, "k": None, "v": v, "qv": qv}, alone),
        ({"q": qv, "k": v, "v": v}, alone),
        ({"q": q, "k": v, "v": v, "qv": qv}, alone),
    ):
        out, lse = flash_attn_4.flash_attn_func(**arguments, causal=True, return_lse=True)
        assert lse.shape == (2, 3, 4)
        close(out, np.stack([o for o, _ in want]), lse / LN2, np.stack([x for _, x in want]))
    x = v[..., :64]  # another Dv is attention like any
    assert flash_attn_4.flash_attn_func(qv[..., :64], x, x, return_lse=True)[1].shape == (2, 4, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_gathered_keys(causal: bool) -> None:
    q, k, v = states((2, 5, 4, 64), (2, 20, 1, 64), (2, 20, 1, 32))
    g = torch.Generator().manual_seed(1)
    chosen = torch.rand(2, 5, 20, generator=g).argsort(-1)[..., :8].int()
    chosen[:, 2, ::2], chosen[0, 3] = -1, -1
    masks = np.zeros((2, 5, 20), bool)
    for b, i, j in np.argwhere(chosen.numpy() >= 0):
        masks[b, i, chosen[b, i, j]] = True
    masks &= seen(5, 20, causal, (None, None))
    want = [attend64(*each, mask=mask) for *each, mask in zip(q, k, v, masks, strict=True)]
    more = {"causal": causal, "return_lse": True}
    out, lse = flash_attn_4.flash_attn_func(q, k, v, gather_kv_indices=chosen, **more)
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), want)
    where = {"cu_seqlens_q": indptr([5, 5]), "gather_kv_indices": torch.where(chosen < 0, 20, chosen).flatten(0, 1)}
    check(*flash_attn_4.flash_attn_varlen_func(q.flatten(0, 1), k, v, **where, **more), want)
    assert not flash_attn_4.flash_attn_func(q, k, v, gather_kv_indices=chosen[..., :0])[0].any()
    with pytest.raises(ValueError, match=r"^gather_kv_indices: shape \(1, 5, 8\), expected \(2, 5, 'n'\)"):
        flash_attn_4.flash_attn_func(q, k, v, gather_kv_indices=chosen[:1])
    with pytest.raises(TypeError, match=r"^gather_kv_indices: dtype torch.int64, expected torch.int32"):
        flash_attn_4.flash_attn_func(q, k, v, gather_kv_indices=chosen.long())


def test_combine() -> None:
    q, k, v = states((5, 4, 64), (40, 2, 64), (40, 2, 64))
    parts = [attend64(q, k[a:b], v[a:b], causal=False) for a, b in ((0, 7), (7, 40))]
    outs, lses = (torch.tensor(np.stack(x)).float() for x in zip(*parts, strict=True))
    want, want_lse = attend64(q, k, v, causal=False)
    out, lse = flash_attn_4.flash_attn_combine(outs, lses * LN2)
    close(out, want, lse / LN2, want_lse)
    assert flash_attn_4.flash_attn_combine(outs, lses, return_lse=False)[1] is None


def test_what_is_refused() -> None:
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    for options, error, words in (
        ({"window_size": (1,)}, ValueError, r"^window_size: expected \(left, right\), got 1"),
        ({"window_size": (1, 0.5)}, TypeError, r"^window_size\[1\]: expected an integer"),
        ({"seqused_q": torch.tensor([10, 9]).int()}, ValueError, r"^seqused_q\[0\]: 10, outside 0..9"),
        ({"seqused_k": torch.tensor([30, -1]).int()}, ValueError, r"^seqused_k\[1\]: -1, outside 0..30"),
        ({"seqused_k": torch.tensor([30]).int()}, ValueError, r"^seqused_k: shape \(1,\), expected \[2\]"),
        ({"score_mod": max}, NotImplementedError, "^score_mod: expected None"),
    ):
        with pytest.raises(error, match=words):
            flash_attn_4.flash_attn_varlen_func(q, k, v, **options)
