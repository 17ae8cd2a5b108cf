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
from cpu_attn import flash_attn, reference  # noqa: E402
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


def _row_of(table: Any, b: int, places: Any, size: int) -> tuple[Any, Any]:
    return table[b, places // size].long(), places % size


@pytest.mark.parametrize("number", range(48))
def test_kvcache(number: int) -> None:
    """Packed queries and new tokens, places of their own for the rotary embedding, rows of the cache in any order,
    padding before sequences, in pages and without, float8."""
    g = torch.Generator().manual_seed(number)
    paged, has_leftpad, packed_q, packed_new = (bool(number >> bit & 1) for bit in range(4))
    has_batch_idx, has_rows = (bool(torch.rand(1, generator=g) < 0.5) for _ in range(2))
    masks: Any = ({"causal": True}, {"window_size": (5, 2)}, {"attention_chunk": 8}, {})[number % 7 % 4]
    rotary, dtype = number % 3 > 0, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)[number // 16]
    batch, room, size = 3, 48, (1, 4, 16)[number % 3] if paged else 48

    def numbers(low: Any, high: Any) -> Any:
        return [int(torch.randint(a, b + 1, (1,), generator=g)) for a, b in zip(low, high, strict=True)]

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=g).to(dtype)

    q_lens = numbers([0] * 3, [7] * 3) if packed_q else [6] * 3
    new = numbers([0] * 3, [5] * 3) if packed_new else [4] * 3
    lens = numbers([1] * 3, [room - 8] * 3)
    pad = numbers([0] * 3, lens) if has_leftpad else [0] * 3
    first = numbers([0] * 3, [30] * 3) if has_rows else lens
    q, k, v = randn(3, 7, 4, 32), randn(3, 5, 2, 32), randn(3, 5, 2, 32)
    # The cache holds NaN where no sequence has a key.
    rows = torch.randperm(5, generator=g)[:batch].int() if has_batch_idx else torch.arange(batch).int()
    table = torch.randperm(5 * room // size, generator=g).int().unflatten(0, (5, room // size))
    table = table if paged else torch.arange(5).int()[:, None]
    pool = torch.full((5 * room // size, 2, size, 2, 32), torch.nan).to(dtype)
    caches = pool.unbind(1) if number % 2 else [x.clone() for x in pool.unbind(1)]
    plain = [randn(batch, room, 2, 32) for _ in range(2)]
    for b in range(batch):
        at = _row_of(table, int(rows[b]), torch.arange(pad[b], lens[b]), size)
        for cache, x in zip(caches, plain, strict=True):
            cache.view(torch.uint8)[at] = x[b, pad[b] : lens[b]].view(torch.uint8)
    angles = torch.rand(room, 8, generator=g) * 6.28
    cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
    where = {"cache_seqlens": torch.tensor(lens).int(), "rotary_interleaved": bool(number % 2), **masks}
    where |= {"rotary_cos": cos, "rotary_sin": sin} if rotary else {}
    where |= {"rotary_seqlens": torch.tensor(first).int()} if has_rows or number % 5 == 0 else {}
    where |= {"cache_leftpad": torch.tensor(pad).int()} if has_leftpad else {}
    where |= {"cache_batch_idx": rows} if has_batch_idx else {}
    where |= {"page_table": table if has_batch_idx else table[:batch]} if paged else {}
    asked = torch.cat([q[b, :n] for b, n in enumerate(q_lens)]) if packed_q else q[:, :6]
    where |= {"cu_seqlens_q": indptr(q_lens), "max_seqlen_q": 7} if packed_q else {}
    given = [torch.cat([x[b, :n] for b, n in enumerate(new)]) if packed_new else x[:, :4] for x in (k, v)]
    where |= {"cu_seqlens_k_new": indptr(new)} if packed_new else {}
    out, lse = flash_attn_3.flash_attn_with_kvcache(asked, *caches, *given, return_softmax_lse=True, **where)

    want = []
    for b, n in enumerate(q_lens):
        states, keys = q[b, :n].double().numpy(), k[b, : new[b]].double().numpy()
        if rotary:
            angle = torch.cat([cos, sin], 1).double().numpy()
            is_neox, steps = not number % 2, np.arange(n) if masks else np.zeros(n, int)
            states = reference.rotary(states, first[b] + steps, angle, is_neox)
            keys = reference.rotary(keys, first[b] + np.arange(new[b]), angle, is_neox)
        at = _row_of(table, int(rows[b]), torch.arange(lens[b], lens[b] + new[b]), size)
        stored = caches[0][at].double().numpy()
        step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float8_e4m3fn: 2**-4}[dtype]
        assert np.allclose(stored, keys, rtol=step, atol=1e-2 if dtype == torch.float8_e4m3fn else 1e-6)
        assert torch.equal(caches[1][at].float(), v[b, : new[b]].float())
        seen = [x[b, pad[b] : lens[b]].double().numpy() for x in plain]
        all_keys, values = np.concatenate([seen[0], stored]), np.concatenate([seen[1], v[b, : new[b]].double().numpy()])
        place, key = np.arange(len(all_keys) - n, len(all_keys))[:, None], np.arange(len(all_keys))
        left, right = masks.get("window_size", (100, 0 if "causal" in masks else 100))
        mask = (place - key <= left) & (key - place <= right)
        if "attention_chunk" in masks:
            mask &= place // 8 == key // 8
        want.append(attend64(states, all_keys, values, mask=mask))
    if not packed_q:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert out.dtype == (torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)
    lses = np.concatenate([x for _, x in want])
    close(out, np.concatenate([o for o, _ in want]), lse.T.contiguous() / math.log(2), lses, times=1.5)


@pytest.mark.parametrize("packed", [False, True])
def test_float8(packed: bool) -> None:
    """Factors of each sequence and kv head, over keys without pages and in pages."""
    q, k, v = states((2, 9, 4, 64), (2, 32, 2, 64), (2, 32, 2, 32), dtype=torch.float8_e4m3fn)
    g = torch.Generator().manual_seed(3)
    factors = [torch.rand(2, 2, generator=g) + 0.5 for _ in range(3)]
    by_head = [x.double()[:, None, :, None] for x in factors]
    wide = [q.double() * by_head[0].repeat_interleave(2, 2), k.double() * by_head[1], v.double() * by_head[2]]
    want = wanted(*wide, causal=True, softcap=3.0)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    more = {"causal": True, "softcap": 3.0, **descales}
    if packed:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out = flash_attn_3.flash_attn_varlen_func(*flat, indptr([9, 9]), indptr([32, 32]), 9, 32, **more)
        out = out.unflatten(0, (2, 9))
    else:
        out = flash_attn_3.flash_attn_func(q, k, v, **more)
        pages, table = [x.reshape(4, 16, *x.shape[2:]) for x in (k, v)], torch.tensor([[0, 1], [2, 3]]).int()
        again = flash_attn_3.flash_attn_with_kvcache(q, *pages, cache_seqlens=32, page_table=table, **more)
        assert torch.equal(again, out)
    assert out.dtype == torch.bfloat16
    close(out, want)
    for options, error, words in (
        ({"q_descale": torch.ones(2, 4)}, ValueError, "^q_descale: axis 1 is 4, expected num_kv_heads = 2"),
        ({"v_descale": torch.ones(2, 2).half()}, TypeError, "^v_descale: dtype torch.float16, expected torch.float32"),
        ({"qv": q[..., :32]}, TypeError, "^qv: dtype torch.float8_e4m3fn"),
    ):
        with pytest.raises(error, match=words):
            flash_attn_3.flash_attn_func(q, k, v, **options)


def test_pages_that_no_blocks_cut() -> None:
    q, pool = states((2, 3, 4, 64), (5, 16 * 2 * 64 + 64))
    pages = pool[:, :-64].unflatten(1, (16, 2, 64))
    where = {"page_table": torch.tensor([[0, 1], [2, 3]]).int(), "cache_seqlens": 30}
    for pad, error, words in (
        ([16, 0], None, ""),
        ([3, 0], NotImplementedError, "^cache_leftpad: the pages of k_cache and v_cache do not lie the same"),
        ([31, 0], ValueError, r"^cache_leftpad\[0\]: 31, outside 0..30"),
    ):
        more = where | {"cache_leftpad": torch.tensor(pad).int()}
        if error is None:
            rows = [pages[[i, i + 1]].flatten(0, 1)[n:30] for i, n in zip((0, 2), pad, strict=True)]
            want = np.stack([attend64(x, row, row, causal=False)[0] for x, row in zip(q, rows, strict=True)])
            close(flash_attn_3.flash_attn_with_kvcache(q, pages, pages, **more), want)
        else:
            with pytest.raises(error, match=words):
                flash_attn_3.flash_attn_with_kvcache(q, pages, pages, **more)


def test_packed_heads() -> None:
    (qkv,) = states((2, 9, 8, 64))
    want = wanted(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], causal=True)
    out, lse = flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, return_attn_probs=True)
    close(out, want)
    assert lse.shape == (2, 4, 9)
    with pytest.raises(ValueError, match=r"^qkv: 8 heads, of which 5 of queries leave an odd number"):
        flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=5)


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
    with pytest.raises(NotImplementedError, match=r"^k_descale: expected None; q is not float8"):
        flash_attn_3.flash_attn_func(q, k, v, k_descale=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^attention_chunk: -1 is outside 0"):
        flash_attn_3.flash_attn_func(q, k, v, attention_chunk=-1)
    with pytest.raises(NotImplementedError, match=r"^qv: expected None where k is given"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, k, v, qv=q)
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
