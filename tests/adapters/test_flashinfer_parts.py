# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's writes, cascades, sparse wrappers, latents and rotations on the CPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flashinfer  # noqa: E402
from cpu_attn.flashinfer import mla, sparse  # noqa: E402

from .flashinfer_case import (  # noqa: E402
    I32,
    LENS,
    Q_LENS,
    WORKSPACE,
    Pages,
    attend64,
    close,
    indptr,
    keys_of,
    queries,
    turned,
    wanted,
)

# ---- page ----


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_append(page_size: int, dtype: str, layout: str) -> None:
    """In two steps, the second of which appends to some sequences; a token of no sequence is skipped."""
    kind, lens = getattr(torch, dtype), [[40, 3, 0, 17], [41, 3, 9, 33]]
    g = torch.Generator().manual_seed(0)
    pages = [-(-n // page_size) for n in lens[1]]
    pool = torch.zeros(sum(pages) + 2, 2, *((page_size, 2) if layout == "NHD" else (2, page_size)), 8).to(kind)
    order, states = torch.randperm(len(pool), generator=g).int(), torch.randn(2, 120, 2, 8, generator=g).to(kind)
    firsts, done, held = np.cumsum([0, *lens[1]]), [0] * 4, []
    for now in lens:
        counts = [-(-n // page_size) for n in now]
        indices = torch.cat([order[sum(pages[:b]) : sum(pages[:b]) + c] for b, c in enumerate(counts)])
        where = indices, indptr(counts), torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in now], **I32)
        seq_lens = flashinfer.get_seq_lens(where[1], where[2], page_size)
        assert seq_lens.tolist() == now and seq_lens.dtype == torch.int32
        new = [n - m for n, m in zip(now, done, strict=True)]
        owner, place = flashinfer.get_batch_indices_positions(indptr(new), seq_lens, sum(new) + 1)
        want = [(b, i) for b, (n, m) in enumerate(zip(now, done, strict=True)) for i in range(m, n)]
        assert [*zip(owner.tolist(), place.tolist(), strict=True)] == [*want, (-1, 0)]
        rows = torch.tensor([firsts[b] + i for b, i in want] + [119])
        cache = pool if layout == "NHD" else (pool[:, 0], pool[:, 1])
        flashinfer.append_paged_kv_cache(states[0, rows], states[1, rows], owner, place, cache, *where, layout)
        done, held = now, where
    plain = pool if layout == "NHD" else pool.transpose(2, 3)
    written = 0
    for b, n in enumerate(done):
        got = torch.cat([plain[i].float() for i in held[0][held[1][b] : held[1][b + 1]]], 1) if n else plain[0].float()
        assert torch.equal(got[:, :n], states[:, firsts[b] : firsts[b] + n].float())
        written += n
    assert int((plain.float().abs().sum((1, 3, 4)) > 0).sum()) == written


@pytest.mark.parametrize("whole", [False, True])
def test_append_latents(whole: bool) -> None:
    """Into two tensors and into parts of one."""
    rows, where = (
        torch.randn(5, 512 + 64),
        (torch.tensor([2, 0, 1], **I32), indptr([1, 2]), torch.tensor([3, 2], **I32)),
    )
    caches = torch.zeros(3, 4, 576).split([512, 64], 2) if whole else (torch.zeros(3, 4, 512), torch.zeros(3, 4, 64))
    owner, place = torch.tensor([0, 1, 1, -1, 0], **I32), torch.tensor([2, 0, 5, 0, 0], **I32)
    flashinfer.append_paged_mla_kv_cache(rows[:, :512], rows[:, 512:], owner, place, *caches, *where)
    both = torch.cat(caches, 2)
    for row, (page, slot) in ((0, (2, 2)), (1, (0, 0)), (2, (1, 1)), (4, (2, 0))):
        assert torch.equal(both[page, slot], rows[row])
    assert int((both != 0).any(2).sum()) == 4
    for change, words in (
        ((torch.tensor([0, 2, 1, 1, 0], **I32), place), r"^batch_indices\[1\]: 2, kv_indptr has 2 sequences"),
        ((owner, torch.tensor([4, 0, 5, 0, 0], **I32)), r"^positions\[0\]: 4, outside 0..3, the slots of sequence 0"),
    ):
        with pytest.raises(ValueError, match=words):
            flashinfer.append_paged_mla_kv_cache(rows[:, :512], rows[:, 512:], *change, *caches, *where)


# ---- cascade, attention, pod ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lens", [[1] * 5, [4, 1, 9, 0, 3]])
def test_cascade(q_lens: list[int], dtype: str) -> None:
    """A prefix of all, one of two groups, and keys of each, in one pool: as all of them in a row."""
    all_pages = Pages([48, 32, 16, 40, 7, 0, 133, 11], 16, "NHD", dtype)

    def level(a: int, b: int) -> Any:
        where = all_pages.indptr[a : b + 1]
        return where - where[0], all_pages.indices[where[0] : where[-1]], all_pages.last[a:b]

    groups = [sum(q_lens[:2]), sum(q_lens[2:])]
    parts = [level(0, 1), level(1, 3), level(3, 8)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "NHD")
    starts = [indptr([sum(q_lens)]), indptr(groups), indptr(q_lens)]
    wrapper.plan(starts, *(list(x) for x in zip(*parts, strict=True)), 4, 2, 64, 16, causal=True, q_data_type=dtype)
    q = queries(q_lens, dtype=all_pages.dtype)
    rows = [[0, 1 + (b >= 2), 3 + b] for b in range(5)]
    keys, values = ([torch.cat([all_pages.states[i][side] for i in row]) for row in rows] for side in range(2))
    masks = []  # causal within the last level alone
    for n, row, key in zip(q_lens, rows, keys, strict=True):
        before, m = len(key) - all_pages.lens[row[2]], all_pages.lens[row[2]]
        own = np.arange(m) <= m - n + np.arange(n)[:, None]
        masks.append(np.concatenate([np.ones((n, before), bool), own], 1))
    close(wrapper.run(q, all_pages.cache), wanted(q, q_lens, keys, values, mask=masks)[0])
    assert not wrapper.is_cuda_graph_enabled
    with pytest.raises(ValueError, match=r"^qo_indptr_arr: 2 items, expected 3"):
        wrapper.plan(starts[:2], *(list(x) for x in zip(*parts, strict=True)), 4, 2, 64, 16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_shared_prefixes(causal: bool, layout: str) -> None:
    pages, (shared_k, shared_v) = Pages(LENS, 5, layout, "bfloat16"), torch.randn(2, 37, 2, 64).bfloat16()
    keys, values = keys_of(pages)
    prefix = [x if layout == "NHD" else x.transpose(0, 1).contiguous() for x in (shared_k, shared_v)]
    for q_lens in ([1] * len(LENS), Q_LENS):
        q, masks = queries(q_lens, dtype=torch.bfloat16), []
        for n, m in zip(q_lens, LENS, strict=True):
            own = np.arange(m) <= m - n + np.arange(n)[:, None] if causal else np.ones((n, m), bool)
            masks.append(np.concatenate([np.ones((n, 37), bool), own], 1))
        all_keys, all_values = ([torch.cat([s, x]) for x in xs] for s, xs in ((shared_k, keys), (shared_v, values)))
        want = wanted(q, q_lens, all_keys, all_values, mask=masks)[0]
        many = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
        many.begin_forward(indptr(q_lens), *pages.where, 4, 2, 64, 5)
        close(many.forward(q, *prefix, pages.cache, causal=causal), want)
        if q_lens == [1] * len(LENS):
            one = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
            one.begin_forward(*pages.where, 4, 2, 64, 5, data_type="bfloat16")
            close(one.forward(q, *prefix, pages.cache), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attention(layout: str, causal: bool) -> None:
    """BatchAttention; that with sinks; prefills and decodes in one call."""
    pages, q = Pages(LENS, 16, layout, "bfloat16"), queries(Q_LENS, dtype=torch.bfloat16)
    keys, values = keys_of(pages)
    both = flashinfer.BatchAttention(layout)
    lens = torch.tensor(LENS, **I32)
    both.plan(indptr(Q_LENS), *pages.where[:2], lens, 4, 2, 64, 64, 16, causal=causal, logits_soft_cap=30.0)
    out, lse = both.run(q, pages.cache, v_scale=0.5, logits_soft_cap=30.0)
    want, want_lse = wanted(q, Q_LENS, keys, [v.double() * 0.5 for v in values], causal=causal, softcap=30.0)
    close(out, want, lse, want_lse)
    with pytest.raises(ValueError, match=r"^logits_soft_cap: 20.0, plan.. was given 30.0"):
        both.run(q, pages.cache, logits_soft_cap=20.0)
    with pytest.raises(ValueError, match=r"^kv_len_arr\[0\]: 90, the sequence's pages have 48 slots"):
        both.plan(indptr(Q_LENS), *pages.where[:2], lens + 50 * (lens == 40).int(), 4, 2, 64, 64, 16)
    sinks = torch.randn(4)
    with_sinks = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, layout, head_dim_qk=64, head_dim_vo=64)
    with_sinks.plan(indptr(Q_LENS), *pages.where, 4, 2, 64, 16, causal=causal, q_data_type=torch.bfloat16)
    out = with_sinks.run(q, pages.cache, sinks, 0.2)
    close(out, wanted(q, Q_LENS, keys, values, causal=causal, scale=0.2, sinks=sinks.numpy())[0])
    pod, q_d = flashinfer.PODWithPagedKVCacheWrapper(WORKSPACE, layout), queries([1] * len(LENS), dtype=torch.bfloat16)
    pod.plan(*pages.where, 4, 2, 64, 16, q_data_type="bfloat16")
    k, v = torch.randn(2, 90, 2, 64).bfloat16()
    first, second = pod.run(q, k, v, q_d, pages.cache, causal_p=causal)
    close(first, attend64(q, k, v, causal)[0])
    decoded = wanted(q_d, [1] * len(LENS), keys, values)[0]
    close(second, decoded)
    pod = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE, layout)
    tokens = [1] * len(LENS)
    where = (indptr(Q_LENS), *pages.where, indptr(tokens), *pages.where)
    pod.plan(*where, 4, 2, 64, 16, q_data_type="bfloat16")
    (first, lse), (second, _) = pod.run(q, pages.cache, q_d, pages.cache, causal_p=causal, return_lse=True)
    want, want_lse = wanted(q, Q_LENS, keys, values, causal=causal)
    close(first, want, lse, want_lse)
    close(second, decoded)


# ---- sparse ----


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 16), (7, 3), (64, 64)])
@pytest.mark.parametrize("form", ["blocks", "mask", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_block_sparse(rows: int, columns: int, form: str, dtype: str) -> None:
    g, blocks = torch.Generator().manual_seed(rows), 5
    m, n = rows * 4 - (rows > 1 and form == "blocks"), columns * blocks
    chosen = torch.rand(4, blocks, generator=g) < 0.6
    chosen[1], chosen[2, 0] = False, True
    indices, starts = chosen.nonzero()[:, 1].int(), indptr(chosen.sum(1).tolist())
    inner = torch.rand(len(indices), rows, columns, generator=g) < 0.7
    dense = torch.zeros(4 * rows, n, dtype=torch.bool)
    for i, (r, c) in enumerate(chosen.nonzero().tolist()):
        dense[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns] = True if form == "blocks" else inner[i]
    given: dict[str, Any] = {} if form == "blocks" else {"mask": inner}
    if form == "packed":
        flat = sparse.convert_bsr_mask_layout(inner, starts)
        sizes = (starts * rows * columns).int()
        given = {"packed_mask": flashinfer.segment_packbits(flat, sizes, "little")[0]}
    kind = getattr(torch, dtype)
    q, k, v = (torch.randn(size, heads, 64, generator=g).to(kind) for size, heads in ((m, 4), (n, 2), (n, 2)))
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(starts, indices, m, n, rows, columns, 4, 2, 64, q_data_type=kind, o_data_type=kind, **given)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want, want_lse = attend64(q, k, v, mask=dense[:m].numpy())
    close(out, want, lse, want_lse)
    assert torch.equal(wrapper.forward(q, k, v), out)


@pytest.mark.parametrize("whole", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2)])
def test_variable_block_sparse(heads: int, kv_heads: int, whole: int) -> None:
    """Sizes with 1 and with 16 as their divisor, some of them 0, other blocks for each kv head."""
    g = torch.Generator().manual_seed(heads)
    row = torch.tensor([[3, 0, 9, 1], [1, 5, 5, 2]], **I32)
    column = torch.tensor([[2, 7, 0, 1, 4], [5, 1, 1, 1, 6]], **I32) * whole
    chosen = torch.rand(2, 4, 5, generator=g) < 0.5
    chosen[0, 2] = False
    q, k, v = (torch.randn(h, n, 64, generator=g) for h, n in ((heads, 13), (2, 14 * whole), (2, 14 * whole)))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(chosen, row, column, heads, kv_heads, 64, q_data_type=torch.float32)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    group = heads // kv_heads
    for h in range(kv_heads):
        dense = chosen[h].repeat_interleave(row[h], 0).repeat_interleave(column[h], 1).numpy()
        of = slice(h * group, (h + 1) * group)
        want, want_lse = attend64(q[of].transpose(0, 1), k[h][:, None], v[h][:, None], mask=dense)
        close(out[of].transpose(0, 1), want, lse[of].T.contiguous(), want_lse)
    to, log = torch.empty_like(out), torch.empty_like(lse)
    assert wrapper.run(q, k, v, to, log) is to and torch.equal(to, out) and torch.equal(log, lse)
    with pytest.raises(ValueError, match=r"^block_row_sz: sums \[13, 14\], expected the same"):
        wrapper.plan(chosen, row + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]], **I32), column, heads, kv_heads, 64)


# ---- mla ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mla(dtype: str, page_size: int, causal: bool) -> None:
    """Rows in two tensors and in one, by indices and by block tables, for lse of both bases."""
    kind, scale, lens, q_lens = getattr(torch, dtype), 192**-0.5, [40, 1, 0, 133], [3, 1, 2, 9]
    pages = Pages(lens, page_size, "NHD", dtype, 1, 576)
    rows = [x[0] for x in pages.states]
    q = queries(q_lens, 16, 576, kind)
    want, want_lse = wanted(q, q_lens, rows, [x[..., :512] for x in rows], causal=causal, scale=scale)
    one = pages.cache[:, 0, :, 0]
    two = [x.contiguous() for x in one.split([512, 64], 2)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="fa2")
    table = torch.zeros(4, 200, **I32)
    for b in range(4):
        mine = pages.indices[pages.indptr[b] : pages.indptr[b + 1]]
        table[b, : len(mine)] = mine
    sizes = (16, 512, 64, page_size, causal, scale, kind, kind)
    names = (
        "num_heads",
        "head_dim_ckv",
        "head_dim_kpe",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
    )
    given = (indptr(q_lens), *pages.where[:2], torch.tensor(lens, **I32))
    split = [x.contiguous() for x in q.split([512, 64], 2)]
    wrapper.plan(*given, *sizes)
    out, lse = wrapper.run(*split, *two, return_lse=True)
    close(out, want, lse, want_lse)
    close(wrapper.run(*q.split([512, 64], 2), *one.split([512, 64], 2)), want)
    dense = mla.MLAPlanMetadata.dense(given[0], table, given[3])
    wrapper.plan(metadata=dense, **dict(zip(names, sizes, strict=True)))
    to = torch.empty_like(out)
    got, lse = wrapper.run(
        query=q, kv_cache=one, out=to, return_lse=True, return_lse_base_on_e=True, bmm1_scale=scale, bmm2_scale=0.5
    )
    assert got is to
    close(got, want * 0.5)
    assert np.allclose(lse.double().numpy()[want_lse > -1e20] / math.log(2), want_lse[want_lse > -1e20], atol=2e-2)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_mla_of_float8_rows(kind: str) -> None:
    stored, lens, q_lens = getattr(torch, kind), [40, 133], [3, 9]
    pages = Pages(lens, 16, "NHD", "bfloat16", 1, 576, stored)
    q, rows = queries(q_lens, 16, 576, torch.bfloat16), [x[0].double() * 0.5 for x in pages.states]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    given = (indptr(q_lens), *pages.where[:2], torch.tensor(lens, **I32))
    wrapper.plan(*given, 16, 512, 64, 16, True, 0.05, torch.bfloat16, stored)
    one = pages.cache[:, 0, :, 0]
    out = wrapper.run(query=q, kv_cache=one, ckv_scale=0.5, kpe_scale=0.5)
    close(out, wanted(q, q_lens, rows, [x[..., :512] for x in rows], scale=0.05)[0])
    for ckv_scale, kpe_scale in ((0.3, 2.7), (0.0, 1.0), (0.5, None)):
        factors = np.array([ckv_scale] * 512 + [1.0 if kpe_scale is None else kpe_scale] * 64)
        scaled = [x[0].double().numpy() * factors for x in pages.states]
        want, want_lse = wanted(q, q_lens, scaled, [x[..., :512] for x in scaled], scale=0.05)
        scales = {"ckv_scale": torch.tensor(ckv_scale), "kpe_scale": kpe_scale}
        out, lse = wrapper.run(query=q, kv_cache=one, **scales, return_lse=True)
        assert out.dtype == torch.bfloat16
        close(out, want, lse, want_lse)
    with pytest.raises(NotImplementedError, match=r"^kv_len: expected None"):
        wrapper.run(query=q, kv_cache=one, kv_len=given[3])
    with pytest.raises(ValueError, match=r"^kv_len_arr\[0\]: 60, the sequence's pages have 48 slots"):
        wrapper.plan(*given[:3], torch.tensor([60, 133], **I32), 16, 512, 64, 16, True, 0.05, torch.bfloat16, stored)
    with pytest.raises(ValueError, match=r"^sm_scale: is None"):
        wrapper.plan(*given, 16, 512, 64, 16, True, None, torch.bfloat16, stored)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_mla_of_float8_queries_and_outputs(kind: str) -> None:
    stored, lens, q_lens = getattr(torch, kind), [40, 133], [3, 9]
    pages = Pages(lens, 16, "NHD", "bfloat16", 1, 576)
    q, rows = queries(q_lens, 16, 576).to(stored), [x[0] for x in pages.states]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    given = (indptr(q_lens), *pages.where[:2], torch.tensor(lens, **I32), 16, 512, 64, 16, True, 0.05, stored)
    wrapper.plan(*given, torch.bfloat16)
    one = {"query": q, "kv_cache": pages.cache[:, 0, :, 0]}
    want = wanted(q.double(), q_lens, rows, [x[..., :512] for x in rows], scale=0.05)[0]
    out = wrapper.run(**one)
    assert out.dtype == torch.bfloat16
    close(out, want)
    halves = [x.double().numpy() * np.array([0.5] * 512 + [4.0] * 64) for x in rows]  # exact in rows of 16 bits
    scaled = wanted(q.double(), q_lens, halves, [x[..., :512] for x in halves], scale=0.05)[0]
    close(wrapper.run(**one, ckv_scale=0.5, kpe_scale=4.0), scaled)
    wrapper.plan(*given, torch.bfloat16, output_dtype=torch.float32)
    close(wrapper.run(**one, o_scale=0.5).bfloat16(), want / 0.5)
    wrapper.plan(*given, torch.bfloat16, output_dtype=stored, output_scale="per-tensor")
    out = torch.empty(want.shape, dtype=stored)
    assert wrapper.run(**one, out=out, o_scale=1e-3, bmm2_scale=2.0) is out
    info = torch.finfo(stored)
    clipped = np.clip(want * 2000, -info.max, info.max)
    assert np.abs(out.double().numpy() - clipped).max() <= 0.6 * info.eps * np.abs(clipped).max()
    with pytest.raises(TypeError, match=r"^q_nope: dtype torch.bfloat16, expected torch.float8"):
        wrapper.run(query=q.bfloat16(), kv_cache=one["kv_cache"])
    with pytest.raises(ValueError, match=r"^o_scale: 0.0"):
        wrapper.run(**one, o_scale=0.0)


# ---- rope ----


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotations(dtype: str, rotary_dim: int | None, interleave: bool) -> None:
    """By starts, positions and a table; Llama 3.1's frequencies; new tensors and in place."""
    counts, offsets = [3, 0, 9], torch.tensor([10, 5, 4000], **I32)
    at = [*range(10, 13), *range(4000, 4009)]
    q, k = queries([12], 4, 64, getattr(torch, dtype)), queries([12], 2, 64, getattr(torch, dtype))
    dims, more = rotary_dim or 64, {"rotary_dim": rotary_dim, "interleave": interleave}

    def check(got: Any, frequencies: Any) -> None:
        for x, y in zip((q, k), got, strict=True):
            want = x.double().numpy().copy()
            turn = np.exp(1j * np.outer(at, frequencies))[:, None]
            pairs = (
                (np.s_[..., 0:dims:2], np.s_[..., 1:dims:2])
                if interleave
                else (np.s_[..., : dims // 2], np.s_[..., dims // 2 : dims])
            )
            z = (want[pairs[0]] + 1j * want[pairs[1]]) * turn
            want[pairs[0]], want[pairs[1]] = z.real, z.imag
            close(y, want)

    plain = 1e4 ** (-2 * np.arange(dims // 2) / dims) / 2
    check(flashinfer.apply_rope(q, k, indptr(counts), offsets, rope_scale=2, **more), plain)
    places = torch.tensor(at)
    check(flashinfer.apply_rope_pos_ids(q, k, places.int(), rope_scale=2, **more), plain)
    base = 5e5 ** (-2 * np.arange(dims // 2) / dims)
    low, high = 8192 / 1, 8192 / 4  # lengths of waves
    waves = 2 * np.pi / base
    smooth = (8192 / waves - 1) / 3
    llama = np.where(waves < high, base, np.where(waves > low, base / 8, (1 - smooth) * base / 8 + smooth * base))
    assert (waves < high).any() and (waves > low).any()
    check(flashinfer.apply_llama31_rope(q, k, indptr(counts), offsets, **more), llama)
    check(flashinfer.apply_llama31_rope_pos_ids(q, k, places, **more), llama)
    for name, where in (
        ("rope", (indptr(counts), offsets)),
        ("llama31_rope", (indptr(counts), offsets)),
        ("rope_pos_ids", (places,)),
        ("llama31_rope_pos_ids", (places,)),
    ):
        a, b = q.clone(), k.clone()
        assert getattr(flashinfer, f"apply_{name}_inplace")(a, b, *where, **more) is None
        new = getattr(flashinfer, f"apply_{name}")(q, k, *where, **more)
        assert torch.equal(a, new[0]) and torch.equal(b, new[1]) and not torch.equal(a, q)
    angles = np.outer(np.arange(4100), plain)
    table = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], 1)).float()
    given = (places, q.flatten(1), k.flatten(1), 64, table, not interleave)
    found = flashinfer.apply_rope_with_cos_sin_cache(*given)
    check([x.unflatten(1, (-1, 64)) for x in found], plain)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(*given)
    assert torch.equal(q.flatten(1), found[0]) and torch.equal(k.flatten(1), found[1])
    with pytest.raises(ValueError, match=r"^positions\[3\]: 4000, outside 0..99, the rows"):
        flashinfer.apply_rope_with_cos_sin_cache(*given[:4], table[:100])
    with pytest.raises(ValueError, match=r"^indptr\[3\]: 11, expected 12, the tokens of q"):
        flashinfer.apply_rope(q, k, indptr([3, 0, 8]), offsets)


def test_turned() -> None:
    """The formula of the other tests, written out."""
    x = np.arange(4.0).reshape(1, 1, 4)
    got = turned(x, [2], 100.0)
    assert np.isclose(got[0, 0, 0], 0 * math.cos(2) - 2 * math.sin(2)) and np.isclose(
        got[0, 0, 3], 1 * math.sin(0.2) + 3 * math.cos(0.2)
    )
