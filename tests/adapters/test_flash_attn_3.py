# SPDX-License-Identifier: Apache-2.0
"""flash-attn 3's functions, those that others import though they are not public, and its errors, against float64."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flash_attn  # noqa: E402
from cpu_attn.flash_attn import flash_attn_3, flash_attn_4, flash_attn_interface, rotary  # noqa: E402

from .flashinfer_case import attend64, close, indptr, turned  # noqa: E402


def states(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    g = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def wanted(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return np.stack([attend64(*one, **options)[0] for one in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_and_packed(causal: bool, dtype: Any) -> None:
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 32), dtype=dtype)
    want = wanted(q, k, v, causal=causal, softcap=20.0)
    options = {"causal": causal, "softcap": 20.0}
    close(flash_attn_3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, **options), want)
    where = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), indptr([9, 9]), indptr([30, 30]), 9, 30)
    out = flash_attn_3.flash_attn_varlen_func(*where, **options)
    close(out.unflatten(0, (2, 9)), want)
    qkv = torch.stack([q, q.flip(1), q * 0.5], 2)
    close(flash_attn_3.flash_attn_qkvpacked_func(qkv, **options), wanted(*qkv.unbind(2), causal=causal, softcap=20.0))


def test_chunks() -> None:
    """attention_chunk: dense, of one tensor, packed and over a cache whose sequences begin behind padding."""
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    place, key = np.arange(21, 30)[:, None], np.arange(30)
    seen = (key <= place) & (key // 8 == place // 8)
    want, options = wanted(q, k, v, mask=seen), {"causal": True, "attention_chunk": 8}
    close(flash_attn_3.flash_attn_func(q, k, v, **options), want)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_3.flash_attn_varlen_func(*flat, indptr([9, 9]), indptr([30, 30]), 9, 30, **options)
    close(out.unflatten(0, (2, 9)), want)
    padded = [torch.cat([torch.full_like(x[:, :3], torch.nan), x], 1) for x in (k, v)]
    where = {"cache_seqlens": 33, "cache_leftpad": torch.tensor([3, 3], dtype=torch.int32)}
    close(flash_attn_3.flash_attn_with_kvcache(q, *padded, **where, **options), want)
    both = np.arange(9)[:, None] // 4 == np.arange(9) // 4
    out = flash_attn_3.flash_attn_qkvpacked_func(torch.stack([q, q.flip(1), q], 2), attention_chunk=4)
    close(out, wanted(q, q.flip(1), q, mask=both))


@pytest.mark.parametrize("beside", [False, True])
def test_queries_of_values(beside: bool) -> None:
    """qv: MLA with absorbed weights, over rows in one tensor and in two; dense, packed and over pages."""
    rows, q, qv = states((2, 32, 1, 192 + 64), (2, 3, 16, 64), (2, 3, 16, 192))
    v, k = rows.split([192, 64], -1)
    if not beside:
        k, v = k.contiguous(), v.contiguous()
    want = wanted(torch.cat([qv, q], -1), rows, rows[..., :192], scale=256**-0.5)
    close(flash_attn_3.flash_attn_func(q, k, v, causal=True, qv=qv), want)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_3.flash_attn_varlen_func(
        *flat, indptr([3, 3]), indptr([32, 32]), 3, 32, causal=True, qv=qv.flatten(0, 1)
    )
    close(out.unflatten(0, (2, 3)), want)
    pages, lens = [x.reshape(4, 16, *x.shape[2:]) for x in (k, v)], torch.tensor([32, 32], dtype=torch.int32)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    more = {"cache_seqlens": lens, "page_table": table, "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_3.flash_attn_with_kvcache(q, *pages, qv=qv, **more)
    close(out, want)
    one = attend64(torch.cat([qv, q], -1)[0], rows[0], rows[0, ..., :192], scale=256**-0.5)[1]
    assert np.allclose(lse[0].double().T.numpy() / math.log(2), one, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_of_flash_attn_4(dtype: Any) -> None:
    """Dense, packed and over pages, beside a window that is open on one side."""
    q, k, v, sinks = states((2, 9, 4, 64), (2, 32, 2, 64), (2, 32, 2, 64), (4,), dtype=dtype)
    options = {"causal": True, "left": 12, "sinks": sinks.double().numpy()}
    want, lses = zip(*(attend64(*one, **options) for one in zip(q, k, v, strict=True)), strict=True)
    more = {"window_size": (12, None), "causal": True, "learnable_sink": sinks}
    out, lse = flash_attn_4.flash_attn_func(q, k, v, return_lse=True, **more)
    close(out, np.stack(want))
    assert np.allclose(lse[1].double().T.numpy() / math.log(2), lses[1], atol=1e-2)
    out, lse = flash_attn_4.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=indptr([9, 9]), cu_seqlens_k=indptr([32, 32]), **more
    )
    close(out.unflatten(0, (2, 9)), np.stack(want))
    assert lse is None
    table, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([32, 32], dtype=torch.int32)
    pages = [x.reshape(4, 16, 2, 64) for x in (k, v)]
    where = {"cu_seqlens_q": indptr([9, 9]), "seqused_k": lens, "page_table": table}
    out, _ = flash_attn_4.flash_attn_varlen_func(q.flatten(0, 1), *pages, **where, **more)
    close(out.unflatten(0, (2, 9)), np.stack(want))
    with pytest.raises(NotImplementedError, match=r"^mask_mod: expected None; no kernel is compiled"):
        flash_attn_4.flash_attn_func(q, k, v, mask_mod=max)
    with pytest.raises(RuntimeError, match=r"^learnable_sink: axis 0 is 3"):
        flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sinks[:3])


def test_install() -> None:
    code = """
from cpu_attn import flash_attn as ours
ours.install()
ours.install()
import flash_attn.cute.interface, flash_attn_interface
from flash_attn.layers.rotary import apply_rotary_emb_qkv_
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward
from flash_attn.cute import flash_attn_varlen_func
assert flash_attn_interface.flash_attn_func.__module__.endswith("flash_attn_3")
assert flash_attn_varlen_func is flash_attn.cute.interface.flash_attn_varlen_func
print(flash_attn.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2.8.3", done.stderr


def test_combine() -> None:
    q, k, v = states((5, 4, 64), (40, 2, 64), (40, 2, 64))
    parts = [attend64(q, k[a:b], v[a:b], causal=False) for a, b in ((0, 7), (7, 30), (30, 40))]
    outs = torch.tensor(np.stack([out for out, _ in parts])).float()
    lses = torch.tensor(np.stack([lse for _, lse in parts]) * math.log(2)).float()
    want, want_lse = attend64(q, k, v, causal=False)
    out, lse = flash_attn_3.flash_attn_combine(outs, lses)
    close(out, want, lse / math.log(2), want_lse)
    to = torch.empty(1, 5, 4, 64, dtype=torch.bfloat16)
    got, lse = flash_attn_3.flash_attn_combine(outs[:, None], lses[:, None], to)
    assert got is to and lse.shape == (1, 5, 4)
    close(got[0], want)


def test_what_is_refused() -> None:
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    with pytest.raises(NotImplementedError, match=r"^k_descale: expected None; keys are not of 8 bits"):
        flash_attn_3.flash_attn_func(q, k, v, k_descale=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^attention_chunk: -1 is outside 0"):
        flash_attn_3.flash_attn_func(q, k, v, attention_chunk=-1)
    with pytest.raises(NotImplementedError, match=r"^rotary_seqlens: expected None"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, rotary_seqlens=torch.zeros(2))
    with pytest.raises(ValueError, match=r"^qv: shape \(2, 9, 4, 32\), expected \(2, 9, 4, 64\)"):
        flash_attn_3.flash_attn_func(q, k, v, qv=q[..., :32])
    metadata = flash_attn_3.get_scheduler_metadata(2, 9, 30, 4, 2, 64, torch.tensor([30, 30]))
    assert flash_attn_3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata).shape == q.shape


def test_errors_are_both() -> None:
    """flash-attn's extension raises RuntimeError for what does not fit."""
    q, k, v = states((2, 9, 4, 64), (2, 30, 3, 64), (2, 30, 3, 64))
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=r"^num_kv_heads: 3 does not divide"):
            flash_attn.flash_attn_func(q, k, v)
        with pytest.raises(error, match=r"^cache_leftpad: not beside block_table"):
            flash_attn.flash_attn_with_kvcache(
                q[:, :, :3],
                k,
                v,
                cache_seqlens=torch.tensor([30, 30], dtype=torch.int32),
                cache_leftpad=torch.tensor([1, 1], dtype=torch.int32),
                block_table=torch.tensor([[0], [1]], dtype=torch.int32),
            )
    with pytest.raises(TypeError):
        flash_attn.flash_attn_func(q[:, :, :3], k.half(), v)


def test_what_others_import() -> None:
    q, k, v = states((2, 9, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    out, lse, dmask, rng = flash_attn_interface._flash_attn_forward(q, k, v, 0.0, 0.1, True, 12, 0, 5.0, None, False)
    close(out, wanted(q, k, v, scale=0.1, left=12, softcap=5.0))
    assert lse.shape == (2, 4, 9) and not dmask.numel() and rng.tolist() == [0, 0]
    where = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), indptr([9, 9]), indptr([30, 30]), 9, 30)
    out, lse, _, _ = flash_attn_interface._flash_attn_varlen_forward(*where, 0.0, 0.1, True, 12, 0, 5.0)
    close(out.unflatten(0, (2, 9)), wanted(q, k, v, scale=0.1, left=12, softcap=5.0))
    assert lse.shape == (4, 18)
    with pytest.raises(NotImplementedError, match=r"^leftpad_k: expected None"):
        flash_attn_interface._flash_attn_varlen_forward(*where, 0.0, 0.1, True, leftpad_k=torch.zeros(2))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_packed_tensors(interleaved: bool, grouped: bool) -> None:
    (x,) = states((2, 7, 8, 64) if grouped else (2, 7, 3, 4, 64))
    angles = np.arange(50)[:, None] * 1e4 ** (-np.arange(32) / 32)
    cos, sin = torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()
    offsets, before = torch.tensor([3, 20], dtype=torch.int32), x.double().numpy().copy()
    more = {"num_heads_q": 4} if grouped else {}
    got = rotary.apply_rotary_emb_qkv_(x, cos, sin, None, None, interleaved, offsets, **more)
    assert got is x
    for b, first in enumerate((3, 20)):
        at = np.arange(first, first + 7)
        parts = [np.s_[b, :, :4], np.s_[b, :, 4:6], np.s_[b, :, 6:]] if grouped else [np.s_[b, :, i] for i in range(3)]
        for i, part in enumerate(parts):
            want = before[part] if i == 2 else turned(before[part], at, interleave=interleaved)
            assert np.allclose(x.numpy()[part], want, atol=1e-5)
    (kv,) = states((2, 7, 2, 4, 64))
    before = kv.double().numpy().copy()
    assert rotary.apply_rotary_emb_kv_(kv, cos, sin, interleaved, 5) is kv
    want = turned(before[1, :, 0], np.arange(5, 12), interleave=interleaved)
    assert np.allclose(kv.numpy()[1, :, 0], want, atol=1e-5) and np.allclose(kv.numpy()[:, :, 1], before[:, :, 1])
    with pytest.raises(RuntimeError, match=r"^qkv: shape"):
        rotary.apply_rotary_emb_qkv_(kv, cos, sin)
    with pytest.raises(ValueError, match=r"^kv: shape"):
        rotary.apply_rotary_emb_kv_(kv[:, :, 0], cos, sin)
