# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's calls that serving engines make without a wrapper, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn.flashinfer import decode as decoding  # noqa: E402
from cpu_attn.flashinfer import mla, prefill, xqa, xqa_mla  # noqa: E402

from .flashinfer_case import I32, LENS, Q_LENS, WORKSPACE, Pages, close, indptr, keys_of, queries, wanted  # noqa: E402


def table_of(pages: Pages) -> Any:
    counts = pages.indptr.diff().tolist()
    table = torch.full((len(counts), max(counts) + 1), -1, **I32)
    for b, n in enumerate(counts):
        table[b, :n] = pages.indices[pages.indptr[b] : pages.indptr[b + 1]]
    return table


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_calls_of_serving_engines(stored: Any, layout: str) -> None:
    pages = Pages(LENS, 16, layout, "bfloat16", 2, 64, stored)
    keys, values = keys_of(pages)
    values = [v.double() * 0.5 for v in values]
    table, lens, sinks = table_of(pages), torch.tensor(LENS, **I32), torch.randn(4)
    options = {"kv_layout": layout, "window_left": 50, "sinks": [sinks]}
    q = queries([2] * len(LENS), dtype=torch.bfloat16)
    want = wanted(q, [2] * len(LENS), keys, values, scale=0.2, left=50, sinks=sinks.numpy())
    where = (q, pages.cache, WORKSPACE, table, lens, 300)
    out, lse = decoding.trtllm_batch_decode_with_kv_cache(*where, 0.2, 0.5, q_len_per_req=2, return_lse=True, **options)
    close(out, want[0])
    assert np.allclose(lse.double().numpy(), want[1], atol=2e-2)
    for causal in (True, False):
        q = queries(Q_LENS, dtype=torch.bfloat16)
        scales = (torch.tensor([0.2]), torch.tensor([0.5]))
        where = (q, pages.cache.unbind(1), WORKSPACE, table, lens, 70, 300, *scales, len(LENS))
        more = {"causal": causal, "out_dtype": torch.float32, "kv_layout": layout}
        out = prefill.trtllm_batch_context_with_kv_cache(*where, indptr(Q_LENS), indptr(LENS), **more)
        assert out.dtype == torch.float32
        close(out.bfloat16(), wanted(q, Q_LENS, keys, values, scale=0.2, causal=causal)[0])
    with pytest.raises(TypeError, match=r"^seq_lens: dtype torch.int64, expected torch.int32"):
        decoding.trtllm_batch_decode_with_kv_cache(*where[:4], lens.long(), 300)


def test_what_serving_engines_say_otherwise() -> None:
    """A tree of drafts; the factor in base 2; outputs of float8; tables of keys and of values in one tensor."""
    lens, run = [40, 4, 133], decoding.trtllm_batch_decode_with_kv_cache
    pages = Pages(lens, 16, "HND", "bfloat16", 2, 64)
    (keys, values), q = keys_of(pages), queries([4] * 3, dtype=torch.bfloat16)
    where = (pages.cache, WORKSPACE, table_of(pages), torch.tensor(lens, **I32), 133)
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    words = torch.tensor([1, 3, 5, 13], **I32).view(torch.uint16).reshape(1, 4, 2).expand(3, 4, 2)
    masks = [torch.cat([torch.ones(4, n - 4, dtype=torch.bool), seen], 1) for n in lens]
    want = wanted(q, [4] * 3, keys, values, scale=0.2, mask=masks)[0]
    log2 = torch.tensor([0.2 / math.log(2)])
    close(run(q, *where, 7.0, bmm1_scale_log2=log2, mask=words, q_len_per_req=4, o_scale=3.0), want)
    flat = words.reshape(12, 2).contiguous().view(torch.uint32)
    starts = indptr([4] * 3)
    close(run(q, *where, 0.2, mask=flat, cum_seq_lens_q=starts, skip_softmax_threshold_scale_factor=1.0), want)
    for bad, kind, text in (
        (words[:, :3], ValueError, "^mask: axis 1 is 3, expected q_len = 4"),
        (words.int(), TypeError, "^mask: dtype torch.int32"),
        (words[..., :0], ValueError, "^mask: 0 words of 16 bits"),
    ):
        with pytest.raises(kind, match=text):
            run(q, *where, 0.2, mask=bad, q_len_per_req=4)

    plain = wanted(q, [4] * 3, keys, values, scale=0.2)[0]
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        out = run(q, *where, 0.2, 1000.0, out_dtype=kind, q_len_per_req=4)
        info = torch.finfo(kind)
        clipped = np.clip(plain * 1000, -info.max, info.max)
        assert out.dtype == kind and np.abs(out.double().numpy() - clipped).max() <= 0.6 * info.eps * info.max
    pool = pages.cache.flatten(0, 1)  # keys and values take turns
    both = torch.stack([2 * where[2], 2 * where[2] + 1], 1)
    close(
        run(q, (pool, pool), WORKSPACE, both, *where[3:], 0.2, q_len_per_req=4, uses_shared_paged_kv_idx=False), plain
    )
    swapped = (pages.cache.flip(1).flatten(0, 1),) * 2
    turn = both.flip(1).contiguous()
    close(run(q, swapped, WORKSPACE, turn, *where[3:], 0.2, q_len_per_req=4, uses_shared_paged_kv_idx=False), plain)
    both[0, 1, 0] += 1
    with pytest.raises(NotImplementedError, match=r"^block_tables: values lie 1 to 2 pages behind"):
        run(q, (pool, pool), WORKSPACE, both, *where[3:], 0.2, q_len_per_req=4, uses_shared_paged_kv_idx=False)


def test_packed_values_of_eight_bits() -> None:
    lens = [70, 33]
    q, k, v = queries(lens, 4, 64, torch.bfloat16), torch.randn(103, 4, 64), torch.randn(103, 4, 64)
    k, v = k.bfloat16(), v.to(torch.float8_e4m3fn)
    where = (WORKSPACE, torch.tensor(lens, **I32), 70, 70, 0.1, 2.0, -1.0, 2, -1)
    rest = (indptr(lens), indptr(lens), None, True, False)
    for q_, k_ in ((q, k), (q.to(v.dtype), k.to(v.dtype))):
        out = prefill.trtllm_ragged_attention_deepseek(q_, k_, v, *where, *rest)
        parts = [2.0 * x for x in v.double().split(lens)]
        assert out.dtype == torch.bfloat16
        close(out, wanted(q_.double(), lens, k_.double().split(lens), parts, scale=0.1)[0])


def test_packed_heads_of_deepseek() -> None:
    lens = [70, 33, 130]
    q, k, v = queries(lens, 4, 192), torch.randn(sum(lens), 4, 192), torch.randn(sum(lens), 4, 128)
    where = (q, k, v, WORKSPACE, torch.tensor(lens, **I32), 130, 130, 0.1, 1.0, -1.0, 3, -1)
    out, lse = prefill.trtllm_ragged_attention_deepseek(*where, indptr(lens), indptr(lens), None, True, True)
    want = wanted(q, lens, k.split(lens), v.split(lens), scale=0.1)
    close(out, want[0], lse, want[1])


@pytest.mark.parametrize("four", [False, True])
def test_latents_of_serving_engines(four: bool) -> None:
    """Of all keys and of selected ones."""
    lens = [40, 5, 133]
    pages = Pages(lens, 16, "NHD", "bfloat16", 1, 576)
    rows, q = [x[0] for x in pages.states], queries([2] * 3, 16, 576, torch.bfloat16).unflatten(0, (3, 2))
    cache = pages.cache[:, 0] if four else pages.cache[:, 0, :, 0]
    cache = cache.transpose(1, 2) if four else cache
    run = mla.trtllm_batch_decode_with_kv_cache_mla
    table, flat = table_of(pages), q.flatten(0, 1)
    sizes = (WORKSPACE, 128, 512, 64)
    out, lse = run(q, cache, *sizes, table, torch.tensor(lens, **I32), 133, bmm1_scale=0.05, return_lse=True)
    want = wanted(flat, [2] * 3, rows, [x[..., :512] for x in rows], scale=0.05)
    close(out.flatten(0, 1), want[0], lse, want[1])
    picked = [
        sorted(torch.randperm(n, generator=torch.Generator().manual_seed(i))[:5].tolist())
        for i, n in enumerate(lens * 2)
    ]
    picked = [picked[i % 3 + 3 * (j == 1)] for i in range(3) for j in range(2)]
    slots = torch.full((3, 2, 8), -1, **I32)
    for i, keys in enumerate(picked):
        b = i // 2
        for s, key in enumerate(keys):
            slots[b, i % 2, s] = int(pages.indices[pages.indptr[b] + key // 16]) * 16 + key % 16
    out = run(q, cache, *sizes, slots, torch.tensor([8] * 3, **I32), 133, 8, bmm1_scale=0.05)
    chosen = [rows[i // 2][keys] for i, keys in enumerate(picked)]
    want = wanted(flat, [1] * 6, chosen, [x[..., :512] for x in chosen], scale=0.05)
    close(out.flatten(0, 1), want[0])
    # Of 4, 1 and 9 keys the last tokens see as many slots, the others one fewer.
    out = run(q, cache, *sizes, slots, torch.tensor([4, 1, 9], **I32), 133, 8, bmm1_scale=0.05)
    fewer = [x[:count] for x, count in zip(chosen, [3, 4, 0, 1, 5, 5], strict=True)]
    close(out.flatten(0, 1), wanted(flat, [1] * 6, fewer, [x[..., :512] for x in fewer], scale=0.05)[0])


def packed_masks(masks: list[Any], words: int = 2) -> Any:
    """bool [q_len, q_len] of each sequence as rows of words of 16 bits, lowest first."""
    rows = [np.pad(row, (0, 16 * words - len(row))) for mask in masks for row in np.asarray(mask)]
    packed = np.packbits(np.array(rows, bool), axis=-1, bitorder="little").view(np.int16)
    return torch.from_numpy(packed).view(torch.uint16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("left", [-1, 7])
def test_xqa(left: int, layout: str) -> None:
    """Drafts that see one another, as many for each sequence or not; one token of each sequence; float8 outputs."""
    lens, run, q_lens = [40, 9, 133], decoding.xqa_batch_decode_with_kv_cache, [5, 0, 3]
    pages = Pages(lens, 16, layout, "bfloat16", 2, 64)
    (keys, values), sinks = keys_of(pages), torch.randn(4)
    where = (pages.cache, WORKSPACE, table_of(pages), torch.tensor(lens, dtype=torch.uint32), 133, 0.2, 0.5, left)
    options, halves = {"kv_layout": layout, "sinks": sinks}, [0.5 * v.double() for v in values]
    maths = {"scale": 0.2, "left": left, "sinks": sinks.numpy()}

    def full(counts: list[int]) -> list[Any]:
        """Every key but those before the window, which ends at a token's own place."""
        return [np.ones((n, m), bool) for n, m in zip(counts, lens, strict=True)]

    q = queries([4] * 3, dtype=torch.bfloat16)
    mask = packed_masks([np.ones((4, 4))] * 3).reshape(3, 4, 2)
    got = run(q, *where, **options, q_len_per_req=4, mask=mask, o_scale=0.5)
    close(got, wanted(q, [4] * 3, keys, halves, mask=full([4] * 3), **maths)[0])
    q = queries(q_lens, dtype=torch.bfloat16)
    mask, starts = packed_masks([np.ones((n, n)) for n in q_lens]), indptr(q_lens)
    got = run(q, *where, **options, q_len_per_req=5, mask=mask, q_cu_seq_lens=starts)
    close(got, wanted(q, q_lens, keys, halves, mask=full(q_lens), **maths)[0])
    q = queries([1] * 3, dtype=torch.bfloat16)
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn)
    want = wanted(q, [1] * 3, keys, halves, **maths)[0]
    assert run(q, *where, out, sinks, layout) is out
    assert np.abs(out.double().numpy() - want).max() <= 0.6 * torch.finfo(out.dtype).eps * np.abs(want).max()
    with pytest.raises(NotImplementedError, match=r"^kv_cache_sf: expected None"):
        run(q, *where, **options, kv_cache_sf=sinks)


def test_masks_that_are_causal() -> None:
    """They have the bits of no mask, and no bias."""
    lens, run = [40, 4, 133], decoding.trtllm_batch_decode_with_kv_cache
    pages, q = Pages(lens, 16, "HND", "bfloat16", 2, 64), queries([4] * 3, dtype=torch.bfloat16)
    where = (q, pages.cache, WORKSPACE, table_of(pages), torch.tensor(lens, **I32), 133, 0.2)
    masks = [np.tri(4)] * 3
    plain = run(*where, q_len_per_req=4)
    close(plain, wanted(q, [4] * 3, *keys_of(pages), scale=0.2)[0])
    assert torch.equal(run(*where, q_len_per_req=4, mask=packed_masks(masks).reshape(3, 4, 2)), plain)
    masks[2] = np.tri(4) * [[1], [1], [0], [1]] + np.eye(4) * [[0], [0], [1], [0]]  # the last differs
    got = run(*where, q_len_per_req=4, mask=packed_masks(masks).reshape(3, 4, 2))
    seen = [np.concatenate([np.ones((4, n - 4)), m], 1) > 0 for n, m in zip(lens, masks, strict=True)]
    close(got, wanted(q, [4] * 3, *keys_of(pages), scale=0.2, mask=seen)[0])


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_latents_of_eight_bits(stored: Any) -> None:
    """Queries of float8 over rows of bfloat16 and of float8; the pages said twice; both names of the call."""
    lens = [40, 5, 133]
    pages = Pages(lens, 16, "NHD", "bfloat16", 1, 576, stored)
    rows, q = [x[0] for x in pages.states], queries([2] * 3, 16, 576).to(torch.float8_e4m3fn).unflatten(0, (3, 2))
    where = (q, pages.cache[:, 0, :, 0], WORKSPACE, 128, 512, 64)
    table, rest, scales = table_of(pages), (torch.tensor(lens, **I32), 133), {"bmm1_scale": 0.05, "bmm2_scale": 2.0}
    want = wanted(q.double().flatten(0, 1), [2] * 3, rows, [2 * x[..., :512].double() for x in rows], scale=0.05)[0]
    twice = torch.stack([table, table], 1)
    run = mla.trtllm_batch_decode_with_kv_cache_mla
    for out in (
        run(*where, table, *rest, **scales),
        run(*where, twice, *rest, **scales, uses_shared_paged_kv_idx=False),
        mla.xqa_batch_decode_with_kv_cache_mla(*where, table, *rest, **scales),
    ):
        assert out.dtype == torch.bfloat16 and out.shape == (3, 2, 16, 512)
        close(out.flatten(0, 1), want)
    twice[2, 1, 0] += 1
    with pytest.raises(NotImplementedError, match=r"^block_tables: latents have other pages than keys"):
        run(*where, twice, *rest, **scales, uses_shared_paged_kv_idx=False)
    with pytest.raises(ValueError, match=r"^block_tables: 2 axes, expected 3|^block_tables"):
        run(*where, table, *rest, **scales, uses_shared_paged_kv_idx=False)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_the_operator_xqa(stored: Any, layout: str) -> None:
    lens, d = [40, 4, 133], 64
    pages = Pages(lens, 16, layout, "bfloat16", 2, 64, stored)
    keys, values = keys_of(pages)
    values = [v.double() * 0.5 for v in values]
    table, sinks = table_of(pages).clamp(min=0), torch.randn(2, 2)
    where = (*pages.cache.unbind(1), table, torch.tensor(lens, dtype=torch.uint32)[:, None])
    options = {"q_scale": torch.tensor(0.7), "kv_scale": 0.5, "kv_layout": layout, "sliding_win_size": 20}
    options["sinks"] = sinks
    how = {"scale": 0.35 * d**-0.5, "left": 19, "sinks": sinks.flatten().numpy()}
    for q_len, packed in ((1, False), (3, False), (3, True)):
        q_lens = [2, 0, 3] if packed else [q_len] * 3
        q = queries(q_lens, dtype=torch.bfloat16)
        shape = (sum(q_lens), 4, d) if packed else (3, 1, 4, d) if q_len == 1 else (3, 1, q_len, 4, d)
        output, more = torch.empty(shape, dtype=torch.bfloat16), {"q_cu_seq_lens": indptr(q_lens)} if packed else {}
        args = (q.view(shape), *where, output, WORKSPACE, WORKSPACE, 2, 16)
        assert xqa(*args, **options, q_seq_len=q_len, **more) is None
        close(output.view(-1, 4, d), wanted(q, q_lens, keys, values, **how)[0])
    small = torch.empty(shape).to(torch.float8_e4m3fn)
    xqa(*args[:5], small, *args[6:], **options, rcp_out_scale=4.0, q_seq_len=3, **more)
    got, want = small.double().view(-1, 4, d).numpy(), wanted(q, q_lens, keys, values, **how)[0] * 4
    assert np.sqrt(((got - want) ** 2).sum() / (want**2).sum()) < 0.04
    for change, text in (
        ({"q_seq_len": 2, "q_cu_seq_lens": None}, r"^q: 3 axes, expected 5"),
        ({"sinks": torch.randn(4, 2)}, r"^sinks: axis 0 is 4, expected num_kv_heads = 2"),
        ({"k_sf_cache": output}, r"^k_sf_cache: expected None; caches of 4 bits"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=text):
            xqa(*args, **options | {"q_seq_len": 3, **more} | change)
    with pytest.raises(ValueError, match=r"^output: shape"):
        xqa(*args[:5], output[:, :2], *args[6:], **options, q_seq_len=3, **more)


def test_xqa_of_latents() -> None:
    """Queries and rows of float8, 576 elements of a key and 512 of a value."""
    lens = [40, 4, 133]
    pages = Pages(lens, 16, "NHD", "float32", 1, 576, torch.float8_e4m3fn)
    keys, values = keys_of(pages)
    q = queries([1] * 3, 4, 576).to(torch.float8_e4m3fn)
    output = torch.empty(3, 1, 4, 512, dtype=torch.bfloat16)
    where = (table_of(pages).clamp(min=0), torch.tensor(lens, **I32), output, WORKSPACE, WORKSPACE, 16)
    xqa_mla(q[:, None], *pages.cache.unbind(1), *where, q_scale=0.1, kv_scale=0.5)
    values = [v[..., :512].double() * 0.5 for v in values]
    close(output[:, 0], wanted(q.double(), [1] * 3, keys, values, scale=0.05)[0])
