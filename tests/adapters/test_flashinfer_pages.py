# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers over pages and over packed keys, against float64, over the grid of its own tests."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flashinfer  # noqa: E402

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
    wanted,
)

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
FP8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("page_size", "d"), [(1, 64), (5, 128), (16, 256)])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_decode(page_size: int, d: int, group: int, layout: str, mode: str, softcap: float) -> None:
    pages = Pages(LENS, page_size, layout, "float16", 2, d)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    sizes = (2 * group, 2, d, page_size)
    wrapper.plan(*pages.where, *sizes, pos_encoding_mode=mode, logits_soft_cap=softcap, q_data_type=torch.float16)
    q = queries([1] * len(LENS), 2 * group, d, torch.float16)
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    want, want_lse = wanted(q, [1] * len(LENS), *keys_of(pages), mode=mode, softcap=softcap)
    close(out, want, lse, want_lse, 3.0 if mode == "ROPE_LLAMA" else 1.0)
    for b, n in enumerate(LENS):  # as their tests do: the same as of one sequence
        k, v = pages.states[b]
        one = flashinfer.single_decode_with_kv_cache(q[b], k, v, pos_encoding_mode=mode, logits_soft_cap=softcap)
        assert n == 0 or torch.allclose(one, out[b], rtol=1e-3, atol=1e-3)
    legacy = wrapper.forward(q, pages.cache, pos_encoding_mode=mode, logits_soft_cap=softcap)
    assert torch.equal(legacy, out)
    assert torch.equal(wrapper.run_return_lse(q, pages.cache)[1], lse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page_size", "group", "d"), [(1, 8, 64), (5, 4, 128), (16, 1, 256)])
@pytest.mark.parametrize(("softcap", "left"), [(0.0, -1), (30.0, -1), (0.0, 13)])
def test_prefill(
    page_size: int, group: int, d: int, layout: str, causal: bool, mode: str, softcap: float, left: int
) -> None:
    """Over pages and over packed keys."""
    pages = Pages(LENS, page_size, layout, "bfloat16", 2, d)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    more = {"causal": causal, "pos_encoding_mode": mode, "logits_soft_cap": softcap, "window_left": left}
    more["q_data_type"] = torch.bfloat16
    paged.plan(indptr(Q_LENS), *pages.where, 2 * group, 2, d, page_size, **more)
    q = queries(Q_LENS, 2 * group, d, torch.bfloat16)
    keys, values = keys_of(pages)
    options = {"causal": causal, "mode": mode, "softcap": softcap, "left": left}
    want, want_lse = wanted(q, Q_LENS, keys, values, **options)
    out, lse = paged.run(q, pages.cache, return_lse=True)
    close(out, want, lse, want_lse, 3.0 if mode == "ROPE_LLAMA" else 1.0)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(indptr(Q_LENS), indptr(LENS), 2 * group, 2, d, **more)
    out, lse = ragged.run(q, torch.cat(keys), torch.cat(values), return_lse=True)
    close(out, want, lse, want_lse, 3.0 if mode == "ROPE_LLAMA" else 1.0)
    names = {"q_data_type", "causal"}
    legacy = {"causal": causal, **{name: x for name, x in more.items() if name not in names}}
    assert torch.equal(ragged.forward(q, torch.cat(keys), torch.cat(values), **legacy), out)
    assert torch.equal(paged.forward_return_lse(q, pages.cache, **legacy)[0], paged.run(q, pages.cache))


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_float8_pages(kind: str, q_dtype: str, mode: str) -> None:
    """data_type and kv_data_type say what pages hold; the one fills only what is None."""
    stored = getattr(torch, kind)
    pages = Pages(LENS, 16, "NHD", q_dtype, 2, 128, stored)
    q = queries([1] * len(LENS), 8, 128, pages.dtype)
    keys, values = keys_of(pages)
    want, want_lse = wanted(q, [1] * len(LENS), keys, [v.double() * 0.5 for v in values], mode=mode, scale=0.1)
    for kinds in ({"data_type": stored}, {"kv_data_type": kind}, {"kv_data_type": stored, "data_type": "float32"}):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        options = {"q_data_type": q_dtype, "pos_encoding_mode": mode, "sm_scale": 0.05}
        wrapper.plan(*pages.where, 8, 2, 128, 16, **options, **kinds)
        out, lse = wrapper.run(q, pages.cache, k_scale=2.0, v_scale=0.5, return_lse=True)
        close(out, want, lse, want_lse, 3.0 if mode == "ROPE_LLAMA" else 1.0)


@pytest.mark.parametrize("kind", FP8)
def test_float8_queries(kind: str) -> None:
    """They are converted to the output's dtype, exactly; factors of heads are exact, too."""
    stored = getattr(torch, kind)
    pages = Pages(LENS, 16, "HND", "float32", 2, 64, stored)
    q = queries(Q_LENS, 4, 64, torch.float32).to(stored)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "HND")
    options = {"causal": True, "q_data_type": stored, "kv_data_type": stored, "o_data_type": "bfloat16"}
    wrapper.plan(indptr(Q_LENS), *pages.where, 4, 2, 64, 16, **options)
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    out = wrapper.run(q, pages.cache, k_scale=scales[0], v_scale=scales[1])
    keys, values = ([x.double() * s[:, None] for x in xs] for xs, s in zip(keys_of(pages), scales, strict=True))
    assert out.dtype == torch.bfloat16
    want = wanted(q.double(), Q_LENS, keys, values)[0]
    close(out, want)
    # Kernels of float8 take all three behind the keys; of packed keys the output has a divisor, too.
    behind = (torch.ones(4), *scales)
    close(wrapper.run(q, pages.cache, *behind), want)
    close(wrapper.run(q, pages.cache, *behind, v_scale=2.0), 2.0 * want)
    packed = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    packed.plan(indptr(Q_LENS), indptr(LENS), 4, 2, 64, **options)
    flat = [torch.cat(xs).to(stored) for xs in keys_of(pages)]
    close(packed.run(q, *flat, *behind, o_scale=0.25), 4.0 * want)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
    decode.plan(*pages.where, 4, 2, 64, 16, q_data_type=stored, kv_data_type=stored, o_data_type="bfloat16")
    one = queries([1] * len(LENS), 4, 64, torch.float32).to(stored)
    factor = torch.tensor([1.0, 2.0, 0.5, 3.0])
    want = wanted(one.double() * factor[:, None], [1] * len(LENS), keys, values)[0]
    close(decode.run(one, pages.cache, factor, *scales), want)
    with pytest.raises(NotImplementedError, match=r"^args: expected scale_q, scale_k, scale_v or none, got 1"):
        decode.run(one, pages.cache, factor)
    with pytest.raises(ValueError, match=r"^o_scale: 0.0"):
        packed.run(q, *flat, o_scale=0.0)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_of_outputs_and_factors_of_values(dtype: str, out_dtype: str) -> None:
    """v_scale over pages of 16 bits; lse in both bases and layouts, written where it is asked for."""
    pages = Pages(LENS, 16, "NHD", dtype)
    q = queries(Q_LENS, 4, 64, pages.dtype)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(indptr(Q_LENS), *pages.where, 4, 2, 64, 16, causal=True, q_data_type=dtype, o_data_type=out_dtype)
    keys, values = keys_of(pages)
    want, want_lse = wanted(q, Q_LENS, keys, [v.double() * 0.3 for v in values])
    to, log = torch.empty(len(q), 4, 64, dtype=getattr(torch, out_dtype)), torch.empty(4, len(q))
    options = {"v_scale": 0.3, "out": to, "lse": log, "lse_base": "ln", "lse_layout": "HN", "return_lse": True}
    out, lse = wrapper.run(q, pages.cache, **options)
    assert out is to and lse is log
    coarse = "float16" if "bfloat16" not in (dtype, out_dtype) else "bfloat16"
    loose = {"float32": 1.0}.get(dtype, 2.0) if out_dtype == "float32" == dtype else None
    close(out if loose else out.to(getattr(torch, coarse)), want)
    seen = want_lse > -1e20
    assert (
        np.abs(lse.T.double().numpy()[seen] / np.log(2) - want_lse[seen]).max() < 2e-2
        and (lse.T[~seen] == -torch.inf).all()
    )
    assert torch.equal(wrapper.run(q, pages.cache, v_scale=0.3), out)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_masks(packed: bool, mode: str) -> None:
    """Packed and not, over pages and packed keys, in place of causal."""
    lens, q_lens = [40, 6, 0, 17], [5, 6, 2, 3]
    pages = Pages(lens, 5, "NHD", "float32")
    pages.cache.nan_to_num_(7)
    g = torch.Generator().manual_seed(1)
    masks = [torch.rand(a, b, generator=g) < 0.5 for a, b in zip(q_lens, lens, strict=True)]
    masks[0][2] = False
    flat = torch.cat([m.flatten() for m in masks])
    starts = indptr([a * b for a, b in zip(q_lens, lens, strict=True)])
    bits, _ = flashinfer.segment_packbits(flat, starts, "little")
    given = {"packed_custom_mask": bits} if packed else {"custom_mask": flat}
    q, (keys, values) = queries(q_lens, 4, 64, torch.float32), keys_of(pages)
    want = wanted(q, q_lens, keys, values, mask=[m.numpy() for m in masks], mode=mode)
    options = {"causal": True, "q_data_type": "float32", "pos_encoding_mode": mode}
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    paged.plan(indptr(q_lens), *pages.where, 4, 2, 64, 5, **options, **given)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(indptr(q_lens), indptr(lens), 4, 2, 64, **options, **given)
    times = 3.0 if mode == "ROPE_LLAMA" else 1.0
    for out, lse in (
        paged.run(q, pages.cache, return_lse=True),
        ragged.run(q, torch.cat(keys), torch.cat(values), return_lse=True),
    ):
        close(out, want[0], lse, want[1], times)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("left", [-1, 7])
def test_items(ragged: bool, left: int) -> None:
    """Multi-item scoring: a prefix of 7 and items of 3, 2, 4; of the second sequence a prefix of 4 and one item."""
    places = [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5, 0]]
    prefix, q_lens = [7, 4], [15, 7]
    lens = [first + len(row) for first, row in zip(prefix, places, strict=True)]
    rows = [row + [0] * (20 - len(row)) for row in places]
    masks = []
    for first, row, n, m in zip(prefix, places, q_lens, lens, strict=True):
        seen = np.zeros((n, m), bool)
        for i in range(n):
            at = m - n + i
            for j in range(at + 1):
                item = at < first or (j >= first and row[at - first] > 0 and j > at - row[at - first])
                seen[i, j] = (j < first or item) and (left < 0 or at - j <= left)
        masks.append(seen)
    pages = Pages(lens, 5, "NHD", "float32")
    pages.cache.nan_to_num_(7)
    q, (keys, values) = queries(q_lens, 4, 64, torch.float32), keys_of(pages)
    want = wanted(q, q_lens, keys, values, mask=masks)
    options = {
        "q_data_type": "float32",
        "causal": True,
        "window_left": left,
        "prefix_len_ptr": torch.tensor(prefix, dtype=torch.uint32),
        "token_pos_in_items_ptr": torch.tensor(rows, dtype=torch.uint16).flatten(),
        "token_pos_in_items_len": 20,
        "max_item_len_ptr": torch.tensor([4, 5], dtype=torch.uint16),
    }
    if ragged:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        wrapper.plan(indptr(q_lens), indptr(lens), 4, 2, 64, **options)
        out, lse = wrapper.run(q, torch.cat(keys), torch.cat(values), return_lse=True)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(indptr(q_lens), *pages.where, 4, 2, 64, 5, **options)
        out, lse = wrapper.run(q, pages.cache, return_lse=True)
    close(out, want[0], lse, want[1])
    where = [indptr(q_lens), *([indptr(lens)] if ragged else pages.where), 4, 2, 64, *([] if ragged else [5])]
    with pytest.raises(ValueError, match=r"^token_pos_in_items_ptr: 40 numbers, expected 20"):
        wrapper.plan(*where, **options | {"token_pos_in_items_len": 10})


def test_items_without_padding() -> None:
    """The last row needs none. Of one sequence the prefix may be a number, and the length of the row left out."""
    row, first, n = [0, 1, 2, 0, 1, 0], 5, 8
    lens = [first + len(row)]
    seen = np.zeros((n, lens[0]), bool)
    item = np.cumsum([place == 0 for place in row])
    for i in range(n):
        at = lens[0] - n + i
        for j in range(at + 1):
            # A token sees the prefix, and the tokens of its item without the delimiter; a delimiter sees the prefix.
            same = j >= first and item[j - first] == item[at - first] and row[j - first] > 0 and row[at - first] > 0
            seen[i, j] = j < first or at < first or same
    pages, q = Pages(lens, 5, "NHD", "float32"), queries([n])
    pages.cache.nan_to_num_(7)
    want = wanted(q, [n], *keys_of(pages), mask=[seen])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    where = (indptr([n]), *pages.where, 4, 2, 64, 5)
    for prefix, more in (
        (torch.tensor(first, dtype=torch.uint32), {}),
        (torch.tensor([first]), {"token_pos_in_items_len": 10}),
        (torch.tensor([first]), {"token_pos_in_items_len": 6}),
    ):
        places = torch.tensor(row, dtype=torch.uint16)
        options = {"prefix_len_ptr": prefix, "token_pos_in_items_ptr": places, "q_data_type": "float32", **more}
        wrapper.plan(*where, **options)
        out, lse = wrapper.run(q, pages.cache, return_lse=True)
        close(out, want[0], lse, want[1])
    # The same sequence twice, in rows of 10.
    two = Pages(lens * 2, 5, "NHD", "float32")
    two.cache.nan_to_num_(7)
    q = queries([n, n])
    want = wanted(q, [n, n], *keys_of(two), mask=[seen, seen])
    options = {"token_pos_in_items_ptr": torch.tensor(row + [0] * 4 + row), "token_pos_in_items_len": 10}
    both = (indptr([n, n]), *two.where, 4, 2, 64, 5)
    wrapper.plan(*both, prefix_len_ptr=torch.tensor([first, first]), q_data_type="float32", **options)
    out, lse = wrapper.run(q, two.cache, return_lse=True)
    close(out, want[0], lse, want[1])
    with pytest.raises(ValueError, match=r"^prefix_len_ptr\[1\]: 4, outside 5..11"):
        wrapper.plan(*both, prefix_len_ptr=torch.tensor([first, 4]), q_data_type="float32", **options)
    short = {"token_pos_in_items_ptr": torch.arange(9), "token_pos_in_items_len": 10}
    with pytest.raises(ValueError, match=r"^token_pos_in_items_ptr: 9 numbers, expected 20"):
        wrapper.plan(*both, prefix_len_ptr=torch.tensor([first, 4]), q_data_type="float32", **short)
    for options, text in (
        ({"prefix_len_ptr": torch.tensor([4])}, r"^prefix_len_ptr\[0\]: 4, outside 5..11"),
        ({"prefix_len_ptr": torch.tensor([4, 4])}, "^prefix_len_ptr: 2 numbers, expected 1"),
        ({"prefix_len_ptr": torch.tensor([5]), "token_pos_in_items_ptr": None}, "^token_pos_in_items_ptr: is None"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.plan(*where, **{"token_pos_in_items_ptr": places, "q_data_type": "float32"} | options)


def test_tables_and_lengths_in_place_of_indices() -> None:
    pages = Pages(LENS, 16, "NHD", "float32")
    counts = np.diff(pages.indptr.numpy())
    table = torch.zeros(len(LENS), int(counts.max()), **I32)
    for b, n in enumerate(counts):
        table[b, :n] = pages.indices[pages.indptr[b] : pages.indptr[b + 1]]
    shorter = [max(0, n - 3) for n in LENS]
    q, (keys, values) = queries([1] * len(LENS), 4, 64, torch.float32), keys_of(pages)
    want = wanted(
        q,
        [1] * len(LENS),
        [k[:n] for k, n in zip(keys, shorter, strict=True)],
        [v[:n] for v, n in zip(values, shorter, strict=True)],
    )
    seq_lens = torch.tensor(shorter, **I32)
    nothing = torch.zeros_like(pages.indices)
    for name in ("Decode", "Prefill"):
        wrapper = getattr(flashinfer, f"Batch{name}WithPagedKVCacheWrapper")(WORKSPACE)
        for indices, where in ((nothing, {"block_tables": table}), (pages.indices, {})):
            first = [indptr([1] * len(LENS))] * (name == "Prefill")
            sizes = (pages.indptr, indices, pages.last, 4, 2, 64, 16)
            wrapper.plan(*first, *sizes, q_data_type="float32", seq_lens=seq_lens, **where)
            out, lse = wrapper.run(q, pages.cache, return_lse=True)
            close(out, want[0], lse, want[1])
    with pytest.raises(ValueError, match=r"^seq_lens\[1\]: 500, outside 0..304"):
        wrapper.plan(*first, *sizes, q_data_type="float32", seq_lens=(seq_lens + 500 * (seq_lens == 0)).int(), **where)


def test_fixed_buffers() -> None:
    """With use_cuda_graph: the same plan, whose arrays are written into the buffers, of so many sequences."""
    g = {
        "paged_kv_indptr": torch.zeros(4, **I32),
        "paged_kv_indices": torch.zeros(50, **I32),
        "last": torch.zeros(3, **I32),
    }
    decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *g.values(), "HND")
    starts = torch.zeros(4, **I32)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "HND", True, starts, *g.values())
    assert decode.is_cuda_graph_enabled and prefill.is_cuda_graph_enabled and not decode.use_tensor_cores
    for lens in ([40, 3, 133], [7, 200, 0]):
        pages = Pages(lens, 16, "HND", "float32")
        q = queries([1] * 3, 4, 64, torch.float32)
        want = wanted(q, [1] * 3, *keys_of(pages))[0]
        decode.plan(*pages.where, 4, 2, 64, 16, q_data_type="float32")
        close(decode.run(q, pages.cache), want)
        prefill.plan(indptr([1, 1, 1]), *pages.where, 4, 2, 64, 16, q_data_type="float32")
        close(prefill.run(q, pages.cache), want)
        assert torch.equal(g["paged_kv_indptr"], pages.indptr) and torch.equal(g["last"], pages.last)
        assert torch.equal(g["paged_kv_indices"][: len(pages.indices)], pages.indices) and starts.tolist() == [
            0,
            1,
            2,
            3,
        ]
    for wrong, words in (
        ([1, 2], "^indptr_buffer: 4 numbers, the plan has 3"),
        ([900] * 3, "^indices_buffer: 50 numbers"),
    ):
        pages = Pages(wrong, 16, "HND", "float32")
        before = g["paged_kv_indptr"].clone()
        with pytest.raises(ValueError, match=words):
            decode.plan(*pages.where, 4, 2, 64, 16, q_data_type="float32")
        assert torch.equal(g["paged_kv_indptr"], before)
    plain = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    plain.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    plain.end_forward()
    assert plain.use_tensor_cores and not plain.is_cuda_graph_enabled


def test_other_ways_to_plan() -> None:
    """fast_decode_plan, begin_forward; a window of run in place of that of the plan."""
    pages = Pages(LENS, 16, "NHD", "float16")
    q = queries([1] * len(LENS), 4, 64, torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    want, narrow = (wanted(q, [1] * len(LENS), *keys_of(pages), left=left)[0] for left in (-1, 9))
    flashinfer.fast_decode_plan(wrapper, *pages.where, 4, 2, 64, 16)
    close(wrapper.run(q, pages.cache), want)
    close(wrapper.run(q, pages.cache, window_left=9), narrow)
    wrapper.begin_forward(*pages.where, 4, 2, 64, 16, "NONE", 9)
    close(wrapper.run(q, pages.cache), narrow)
    close(wrapper.run(q, pages.cache, window_left=-1), want)
    wrapper.plan = functools.partial(flashinfer.fast_decode_plan, wrapper)  # as serving engines do
    wrapper.plan(*pages.where, 4, 2, 64, 16, window_left=9)
    close(wrapper.run(q, pages.cache), narrow)
    q = queries([3] * len(LENS), 4, 64, torch.float16)
    close(wrapper.run(q, pages.cache, q_len_per_req=3), wanted(q, [3] * len(LENS), *keys_of(pages), left=9)[0])
    wrapper.plan(*pages.where, 4, 2, 64, 16, q_len_per_req=2)
    with pytest.raises(ValueError, match=r"^q_len_per_req: 3, plan\(\) was given 2"):
        wrapper.run(q, pages.cache, q_len_per_req=3)
    with pytest.raises(ValueError, match=r"^q: axis 0 is 18, expected T = 12: 6 sequences, q_len_per_req = 2"):
        wrapper.run(q, pages.cache)


def test_a_plan_keeps_what_it_was_given() -> None:
    """Callers write to their arrays for the next step before they run this one's last layer."""
    pages = Pages(LENS, 16, "NHD", "float32")
    q, starts, seq_lens = queries(Q_LENS, 4, 64, torch.float32), indptr(Q_LENS), torch.tensor(LENS, **I32)
    table = torch.zeros(len(LENS), 20, **I32)
    for b in range(len(LENS)):
        mine = pages.indices[pages.indptr[b] : pages.indptr[b + 1]]
        table[b, : len(mine)] = mine
    keys, values = keys_of(pages)
    want = wanted(q, Q_LENS, keys, values)[0]
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    options = {"causal": True, "q_data_type": "float32"}
    paged.plan(starts, *pages.where, 4, 2, 64, 16, seq_lens=seq_lens, block_tables=table, **options)
    ragged, kv_starts = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE), indptr(LENS)
    ragged.plan(starts, kv_starts, 4, 2, 64, **options)
    for x in (starts, seq_lens, table, kv_starts, *pages.where):
        x.fill_(1)
    paged.prewarm_paged_kv_stride_variant()
    close(paged.run(q, pages.cache), want)
    close(ragged.run(q, torch.cat(keys), torch.cat(values)), want)


def test_sinks_with_every_encoding() -> None:
    pages = Pages(LENS, 16, "NHD", "float32")
    q, sinks = queries(Q_LENS, 4, 64, torch.float32), torch.randn(4)
    for mode in MODES:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(
            indptr(Q_LENS), *pages.where, 4, 2, 64, 16, causal=True, pos_encoding_mode=mode, q_data_type="float32"
        )
        out = wrapper.run(q, pages.cache, sinks=sinks)
        close(out, wanted(q, Q_LENS, *keys_of(pages), mode=mode, sinks=sinks.numpy())[0], times=3.0)


def test_pages_that_sequences_share_at_other_places() -> None:
    """A page is rotated for each place where a sequence has it."""
    pages = Pages([64], 16, "NHD", "float32")
    first = pages.indices.tolist()
    tables = [first, [first[2], first[0]], [first[3], first[3], first[1]]]
    lens, where = [64, 27, 48], (indptr([len(t) for t in tables]), torch.tensor([p for t in tables for p in t], **I32))
    k, v = pages.states[0]
    picked = [
        torch.cat([torch.arange(16 * first.index(p), 16 * first.index(p) + 16) for p in t])[:n]
        for t, n in zip(tables, lens, strict=True)
    ]
    q = queries([1] * 3, 4, 64, torch.float32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*where, torch.tensor([16, 11, 16], **I32), 4, 2, 64, 16, "ROPE_LLAMA", q_data_type="float32")
    want = wanted(q, [1] * 3, [k[i] for i in picked], [v[i] for i in picked], mode="ROPE_LLAMA")
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    close(out, want[0], lse, want[1], 3.0)


def test_packed_keys_that_are_parts_of_others() -> None:
    """Head sizes of 192 and 128, keys and values in one tensor, not all of a sequence's keys."""
    lens, q_lens = [70, 0, 33, 130], [70, 2, 1, 9]
    kv = torch.randn(sum(lens), 2, 192 + 128)
    q = queries(q_lens, 4, 192, torch.float32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    for used in (lens, [60, 0, 1, 130]):
        seq_lens = torch.tensor(used, **I32)
        wrapper.plan(
            indptr(q_lens), indptr(lens), 4, 2, 192, 128, causal=True, q_data_type="float32", seq_lens=seq_lens
        )
        out, lse = wrapper.run_return_lse(q, kv[..., :192], kv[..., 192:])
        parts = [x[:n] for x, n in zip(kv.split(lens), used, strict=True)]
        want = wanted(q, q_lens, [x[..., :192] for x in parts], [x[..., 192:] for x in parts])
        close(out, want[0], lse, want[1])
    for options, words in (
        ({"k": kv[:9, :, :192], "v": kv[:9, :, 192:]}, "^k: 9 tokens, kv_indptr ends at 233"),
        ({"v": kv[..., :64]}, "^v: axis 2 is 64, expected head_dim_vo = 128"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper.run(**{"q": q, "k": kv[..., :192], "v": kv[..., 192:]} | options)
    with pytest.raises(NotImplementedError, match=r"^v_indptr: expected None; values lie as keys do"):
        wrapper.plan(indptr(q_lens), indptr(lens), 4, 2, 192, 128, v_indptr=indptr(lens))


def test_the_formula() -> None:
    """attend64 against sums written out, so that it is not only itself that it agrees with."""
    q, k, v = np.random.randn(2, 1, 2), np.random.randn(3, 1, 2), np.random.randn(3, 1, 1)
    out, lse = attend64(q, k, v)
    weights = [np.exp(q[0, 0] @ k[j, 0] / 2**0.5) for j in range(2)]
    assert np.isclose(out[0, 0, 0], sum(w * v[j, 0, 0] for j, w in enumerate(weights)) / sum(weights))
    assert np.isclose(lse[0, 0], np.log2(sum(weights)))
