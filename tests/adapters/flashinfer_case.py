# SPDX-License-Identifier: Apache-2.0
"""What the tests of FlashInfer's functions share: sequences in shuffled pages, and attention in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cpu_attn import reference

torch = pytest.importorskip("torch")

I32 = {"dtype": torch.int32}
WORKSPACE = torch.empty(0, dtype=torch.uint8)
LENS = [40, 1, 0, 133, 16, 300]
Q_LENS = [5, 3, 2, 70, 0, 1]


def indptr(counts: Any) -> Any:
    return torch.tensor([0, *np.cumsum(counts)], **I32)


class Pages:
    """Random keys and values of sequences in shuffled pages; what is not theirs holds NaN."""

    def __init__(
        self,
        lens: list[int],
        page_size: int,
        layout: str,
        dtype: Any,
        kv_heads: int = 2,
        d: int = 64,
        stored: Any = None,
    ):
        g = torch.Generator().manual_seed(sum(lens))
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.lens, self.page_size, self.dtype = lens, page_size, kind
        self.states = [torch.randn(2, n, kv_heads, d, generator=g).to(kind) for n in lens]
        if stored is not None:
            self.states = [x.to(stored).to(kind) for x in self.states]
        counts = [-(-n // page_size) for n in lens]
        self.indptr = indptr(counts)
        self.indices = torch.randperm(sum(counts) + 3, generator=g).int()[: sum(counts)]
        self.last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lens], **I32)
        pool = torch.full((sum(counts) + 3, 2, page_size, kv_heads, d), torch.nan).to(kind)
        for b, states in enumerate(self.states):
            for i, page in enumerate(states.split(page_size, 1) if lens[b] else ()):
                pool[self.indices[self.indptr[b] + i], :, : page.shape[1]] = page
        pool = pool if stored is None else pool.to(stored)
        self.cache = pool if layout == "NHD" else pool.transpose(2, 3).contiguous()

    @property
    def where(self) -> tuple[Any, Any, Any]:
        return self.indptr, self.indices, self.last


def queries(q_lens: list[int], heads: int = 4, d: int = 64, dtype: Any = torch.float32, seed: int = 7) -> Any:
    return torch.randn(sum(q_lens), heads, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def keys_of(pages: Pages) -> Any:
    return [x[0] for x in pages.states], [x[1] for x in pages.states]


def turned(x: Any, positions: Any, theta: float = 1e4, scale: float = 1.0, interleave: bool = False) -> Any:
    """Rotates float64 [n, heads, D] by complex numbers."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half) / scale
    turn = np.exp(1j * angles)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    z = (a + 1j * b) * turn
    out = np.empty_like(x)
    if interleave:
        out[..., ::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., :half], out[..., half:] = z.real, z.imag
    return out


def slopes(heads: int) -> list[float]:
    """Of the ALiBi paper's code: geometric of the next lower power of 2, then every second one of twice as many."""
    whole = 2 ** int(math.log2(heads))
    if whole == heads:
        return [2 ** (-8 / heads * (i + 1)) for i in range(heads)]
    return slopes(whole) + slopes(2 * whole)[::2][: heads - whole]


def attend64(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = True,
    left: int = -1,
    softcap: float = 0.0,
    scale: float | None = None,
    mode: str = "NONE",
    mask: Any = None,
    sinks: Any = None,
    rope: tuple[float, float] = (1.0, 1e4),
) -> tuple[Any, Any]:
    """Attention of one sequence in float64: q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] give [n, Hq, Dv] and lse in
    base 2 [n, Hq]. mask: bool [n, m] in place of causal."""
    q, k, v = (x.double().numpy() if isinstance(x, torch.Tensor) else x for x in (q, k, v))
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    at = np.arange(m - n, m)
    if mode == "ROPE_LLAMA":
        q, k = turned(q, at, rope[1], rope[0]), turned(k, np.arange(m), rope[1], rope[0])
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = np.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    distance = np.arange(m) - at[:, None]
    if mode == "ALIBI":
        logits = logits + np.array(slopes(q.shape[1]))[:, None, None] * distance
    seen = (distance <= 0 if causal else distance == distance) if mask is None else np.asarray(mask)
    seen = seen & ((distance >= -left) if left >= 0 else True)
    logits = np.where(seen, logits, -np.inf)
    if sinks is not None:
        logits = np.concatenate([logits, np.broadcast_to(np.asarray(sinks)[:, None, None], (*logits.shape[:2], 1))], 2)
        v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.max(logits, 2, keepdims=True, initial=-1e30)
        weights = np.exp(logits - top)
        total = weights.sum(2, keepdims=True)
        lse = (np.log(total) + top)[..., 0]
        weights = np.where(total > 0, weights / total, 0)
    return np.einsum("hnm,mhd->nhd", weights, v), lse.T / math.log(2)


def wanted(q: Any, q_lens: Any, keys: Any, values: Any, **options: Any) -> tuple[Any, Any]:
    """Attention of all sequences; mask: a list of them."""
    masks = options.pop("mask", None) or [None] * len(q_lens)
    parts = [
        attend64(*one, mask=mask, **options) for *one, mask in zip(q.split([*q_lens]), keys, values, masks, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return np.concatenate(outs), np.concatenate(lses)


def close(got: Any, want: Any, lse: Any = None, want_lse: Any = None, times: float = 1.0) -> None:
    """out is within ``times`` its dtype's budget; rows that see no key are 0, and their lse -inf."""
    name = str(got.dtype).removeprefix("torch.")
    assert tuple(got.shape) == want.shape
    error = got.double().numpy() - want
    assert np.isfinite(error).all()
    assert np.sqrt((error**2).sum() / max((want**2).sum(), 1e-30)) <= times * reference.BUDGET[name]
    if lse is None:
        return
    assert lse.dtype == torch.float32 and tuple(lse.shape) == want_lse.shape and lse.is_contiguous()
    found, empty = lse.double().numpy(), want_lse < -1e20
    assert ((found == -np.inf) == empty).all() and (got.float().numpy()[empty] == 0).all()
    error = np.abs(found[~empty] - want_lse[~empty]) / np.maximum(1, np.abs(want_lse[~empty]))
    assert error.max(initial=0) <= 2 * times * reference.LSE_BUDGET[name]
