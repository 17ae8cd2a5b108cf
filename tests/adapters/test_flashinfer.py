# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers and merges on the CPU: against float64 maths, sequence by sequence."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cpu_attn import ops, reference

from ..harness.snippets import ROOT, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flashinfer  # noqa: E402

from .flashinfer_case import I32, LENS, WORKSPACE, Pages  # noqa: E402


def check(
    got: Any,
    q: Any,
    q_lens: list[int],
    pages: Pages,
    causal: bool = True,
    left: int = -1,
    softcap: float = 0.0,
    scale: float | None = None,
    **more: Any,
) -> None:
    """out and lse, in base 2, by the budgets; rows without a key exactly."""
    out, lse = got
    loc = np.cumsum([0, *q_lens]).astype(np.int32)
    keys, values = ([pair[i].float().numpy() for pair in pages.states] for i in range(2))
    want, want_lse = reference.attention(
        *(q.float().numpy(), keys, values, loc, np.array(pages.lens, np.int32)),
        *(q.shape[2] ** -0.5 if scale is None else scale, causal, None, (left, -1), softcap),
        **more,
    )
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and lse.shape == out.shape[:2] and lse.is_contiguous()
    bits = out.view(torch.uint16).numpy().view("bfloat16") if out.dtype == torch.bfloat16 else out.numpy()
    dtype = str(out.dtype).removeprefix("torch.")
    assert reference.relative_rms(bits, want, loc).max() <= reference.BUDGET[dtype]
    found = lse.T.double().numpy() * math.log(2)
    empty = want_lse == -np.inf
    assert ((found == -np.inf) == empty).all() and (out.float().numpy()[empty.T] == 0).all()
    error = np.abs(found[~empty] - want_lse[~empty]) / np.maximum(1, np.abs(want_lse[~empty]))
    assert error.max(initial=0) <= reference.LSE_BUDGET[dtype]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("left", "softcap"), [(-1, 0.0), (20, 0.0), (-1, 30.0), (7, 30.0)])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode(page_size: int, left: int, softcap: float, dtype: str, layout: str) -> None:
    """Planned once, run for two layers; pages as one tensor and as two."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    pages = Pages(LENS, page_size, layout, dtype)
    sizes = (4, 2, 64, page_size)
    options = {"window_left": left, "logits_soft_cap": softcap or None, "q_data_type": getattr(torch, dtype)}
    wrapper.plan(*pages.where, *sizes, **options)
    for cache in (pages.cache, pages.cache.unbind(1)):
        q = torch.randn(len(LENS), 4, 64).to(pages.cache.dtype)
        got = wrapper.run(q, cache, return_lse=True)
        check(got, q, [1] * len(LENS), pages, left=left, softcap=softcap)
        assert torch.equal(wrapper.run(q, cache), got[0])
    out, lse = torch.empty_like(q), torch.empty(len(LENS), 4)
    again = wrapper.run_return_lse(q, cache, out=out, lse=lse, window_left=left)
    assert again[0] is out and again[1] is lse and torch.equal(out, got[0]) and torch.equal(lse, got[1])


def test_several_tokens_each_with_sinks_and_scales() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
    pages = Pages([40, 3, 133], 16, "HND", "float32")
    wrapper.plan(*pages.where, 4, 2, 64, 16, q_data_type=None, data_type="float32", q_len_per_req=3, sm_scale=0.2)
    q, sinks = torch.randn(9, 4, 64), torch.randn(4)
    got = wrapper.run(q, pages.cache, return_lse=True, sinks=sinks, q_scale=0.5, k_scale=3.0)
    check(got, q, [3] * 3, pages, scale=0.2 * 0.5 * 3.0, s_aux=sinks.numpy())


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_pages(kind: str) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    pages = Pages(LENS, 16, "NHD", "bfloat16")
    stored = getattr(torch, kind)
    q = torch.randn(len(LENS), 4, 64).bfloat16()
    wrapper.plan(*pages.where, 4, 2, 64, 16, q_data_type="bfloat16", kv_data_type=stored)
    cache = pages.cache.to(stored)
    got = wrapper.run(q, cache, return_lse=True, k_scale=1.5, v_scale=0.5)
    factors = torch.tensor([1.5, 0.5])[:, None, None, None]
    pages.states = [x.to(stored).float() * factors for x in pages.states]
    check(got, q, [1] * len(LENS), pages)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("causal", "left", "softcap"), [(False, -1, 0.0), (True, -1, 0.0), (True, 9, 20.0), (False, 4, 0.0)]
)
def test_prefill(causal: bool, left: int, softcap: float, layout: str) -> None:
    """More queries than keys, none, one, many; values of another head size."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    pages, q_lens = Pages(LENS, 16, layout, "float32"), [5, 3, 2, 70, 0, 1]
    qo_indptr = torch.tensor([0, *np.cumsum(q_lens)], **I32)
    options = {"causal": causal, "window_left": left, "logits_soft_cap": softcap, "q_data_type": torch.float32}
    wrapper.plan(qo_indptr, *pages.where, 4, 2, 64, 16, 24, **options)
    q = torch.randn(sum(q_lens), 4, 64)
    key, value = pages.cache.unbind(1)
    got = wrapper.run(q, (key, value[..., :24]), return_lse=True)
    pages.states = [(x[0], x[1, ..., :24]) for x in pages.states]
    check(got, q, q_lens, pages, causal=causal, left=left, softcap=softcap)


def test_a_mask_of_ones_own() -> None:
    """In the place of causal, beside a window."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    lens, q_lens = [40, 6, 0, 17], [5, 6, 2, 3]
    pages = Pages(lens, 16, "NHD", "float32")
    pages.cache.nan_to_num_(7)
    g = torch.Generator().manual_seed(1)
    masks = [torch.rand(a, b, generator=g) < 0.5 for a, b in zip(q_lens, lens, strict=True)]
    masks[0][2] = False
    qo_indptr, flat = torch.tensor([0, *np.cumsum(q_lens)], **I32), torch.cat([m.flatten() for m in masks])
    bias = np.full((4, 1, 6, 40), np.nan, np.float32)
    for b, mask in enumerate(masks):
        bias[b, 0, : q_lens[b], : lens[b]] = np.where(mask, 0, -np.inf)
    q = torch.randn(sum(q_lens), 4, 64)
    for left in (-1, 12):
        options = {"custom_mask": flat, "causal": True, "window_left": left, "q_data_type": "float32"}
        wrapper.plan(qo_indptr, *pages.where, 4, 2, 64, 16, **options)
        got = wrapper.run(q, pages.cache, return_lse=True)
        check(got, q, q_lens, pages, causal=False, left=left, attn_bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging(dtype: str) -> None:
    """Of two and of three parts of the keys, one of them without any for some sequences."""
    kind = getattr(torch, dtype)
    cuts = [(0, 16), (16, 64), (64, 300)]
    whole = Pages(LENS, 16, "NHD", dtype)
    q, parts = torch.randn(len(LENS), 4, 64).to(kind), []
    for first, end in cuts:
        part = Pages([min(n, end) - min(n, first) for n in LENS], 16, "NHD", dtype)
        part.states = [x[:, first:end] for x in whole.states]
        for b, states in enumerate(part.states):
            for i, page in enumerate(states.split(16, 1) if states.shape[1] else ()):
                part.cache[part.indices[part.indptr[b] + i], :, : page.shape[1]] = page
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(*part.where, 4, 2, 64, 16, q_data_type=dtype)
        parts.append(wrapper.run(q, part.cache, return_lse=True))
    v, s = (torch.stack(x, 1) for x in zip(*parts, strict=True))
    whole.dtype = dtype
    check(flashinfer.merge_states(v, s), q, [1] * len(LENS), whole)
    (a, b, c) = parts
    got = flashinfer.merge_state(*flashinfer.merge_state(*a, *b), *c)
    check(got, q, [1] * len(LENS), whole)
    first = flashinfer.merge_state(*a, *b)
    v, s = (x.clone() for x in a)
    mask = torch.tensor([True, False, True, False, True, True])
    flashinfer.merge_state_in_place(v, s, *b, mask)
    assert torch.equal(v[mask], first[0][mask]) and torch.equal(s[mask], first[1][mask])
    assert torch.equal(v[~mask], a[0][~mask]) and torch.equal(s[~mask], a[1][~mask])
    flashinfer.merge_state_in_place(v := a[0].clone(), s := a[1].clone(), *b)
    assert torch.equal(v, first[0]) and torch.equal(s, first[1])


def test_pages_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    attend = ops.attend
    monkeypatch.setattr(ops, "attend", lambda *args, **options: (seen.append(args), attend(*args, **options)))
    for layout in ("NHD", "HND"):
        pages = Pages(LENS, 16, layout, "bfloat16")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(*pages.where, 4, 2, 64, 16, q_data_type="bfloat16")
        wrapper.run(torch.zeros(len(LENS), 4, 64).bfloat16(), pages.cache)
        memory = pages.cache.untyped_storage().data_ptr()
        assert [x.untyped_storage().data_ptr() for x in seen[-1][2:4]] == [memory] * 2


def test_what_is_refused() -> None:
    decode, prefill = flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper
    pages = Pages([40, 3], 16, "NHD", "float32")
    q = torch.zeros(2, 4, 64)
    for options, words in (
        ({"kv_layout": "ND"}, "^kv_layout: 'ND', expected 'NHD' or 'HND'"),
        ({"use_cuda_graph": True}, "^(paged_kv_indptr_buffer|qo_indptr_buf): is None"),
        ({"jit_args": [1]}, "^jit_args: expected None; no kernel is compiled"),
    ):
        for wrapper in (decode, prefill):
            with pytest.raises((ValueError, NotImplementedError), match=words):
                wrapper(WORKSPACE, **options)
    one = decode(WORKSPACE)
    with pytest.raises(RuntimeError, match="before plan"):
        one.run(q, pages.cache)
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    arguments = dict(zip(names, (*pages.where, 4, 2, 64, 16), strict=True)) | {"q_data_type": "float32"}
    for options, error, words in (
        ({"indptr": torch.tensor([0, 3, 5], **I32)}, ValueError, r"^indptr\[2\]: 5, the tensor has 4"),
        ({"indptr": torch.tensor([0, 4], **I32)}, ValueError, r"^indptr: shape \(2,\), expected \[3\]"),
        ({"indptr": torch.tensor([0, 3, 4])}, TypeError, "^indptr: dtype torch.int64, expected torch.int32"),
        ({"indices": pages.indices.long()}, TypeError, "^indices: dtype torch.int64, expected torch.int32"),
        ({"last_page_len": torch.tensor([17, 3], **I32)}, ValueError, r"^last_page_len\[0\]: 17, outside 1..16"),
        ({"last_page_len": torch.tensor([8, 0], **I32)}, ValueError, r"^last_page_len\[1\]: 0, outside 1..16"),
        ({"num_kv_heads": 3}, ValueError, "^num_kv_heads: 3 does not divide num_qo_heads = 4"),
        ({"page_size": 0}, ValueError, "^page_size: 0 is outside"),
        ({"page_size": 2**30}, ValueError, r"^indptr\[1\]: 3 pages of 1073741824 tokens are more"),
        ({"pos_encoding_mode": "ROPE"}, ValueError, "^pos_encoding_mode: 'ROPE', expected 'NONE' or"),
        ({"window_left": -2}, ValueError, "^window_left: -2 is outside"),
        ({"o_data_type": "int8"}, TypeError, "^o_data_type: int8 is none of"),
        ({"window_right": 3}, NotImplementedError, "^window_right: expected 0; windows end"),
        ({"is_causal": True}, NotImplementedError, "^is_causal: expected None"),
        ({"kv_data_type": "float16"}, ValueError, "^kv_data_type: float16, expected float32"),
        ({"q_data_type": "float64"}, TypeError, "float64"),
        ({"sm_scale": math.inf}, ValueError, "^sm_scale: inf is not a finite float32"),
        ({"q_len_per_req": 0}, ValueError, "^q_len_per_req: 0 is outside"),
    ):
        with pytest.raises(error, match=words):
            one.plan(**arguments | options)
    one.plan(**arguments)
    for options, error, words in (
        ({"q": q[:1]}, ValueError, "^q: axis 0 is 1, expected T = 2"),
        ({"q": q.half()}, TypeError, "^q: dtype float16, expected float32"),
        ({"q": q.clone().requires_grad_()}, ValueError, "^q: requires grad"),
        ({"paged_kv_cache": pages.cache[:1]}, ValueError, "^block_table: request 0: .* outside 0..0"),
        ({"paged_kv_cache": pages.cache[:, :, :8]}, ValueError, "^paged_kv_cache: pages of 8 tokens"),
        ({"paged_kv_cache": pages.cache[:, 0]}, ValueError, "^paged_kv_cache: 4 axes, expected 5"),
        ({"paged_kv_cache": pages.cache.bfloat16()}, TypeError, "^paged_kv_cache: dtype bfloat16, expected float32"),
        ({"kv_cache_sf": q}, NotImplementedError, "^kv_cache_sf: expected None; caches of 4 bits"),
        ({"v_scale": math.nan}, ValueError, "^v_scale: nan"),
        ({"q_len_per_req": 2}, ValueError, "^q: axis 0 is 2, expected T = 4: 2 sequences, q_len_per_req = 2"),
        ({"k_scale": "2"}, TypeError, "^k_scale: expected a number"),
        ({"window_left": -3}, ValueError, "^window_left: -3 is outside"),
        ({"sinks": torch.zeros(3)}, ValueError, "^sinks: axis 0 is 3"),
        ({"lse": torch.zeros(4, 2)}, ValueError, "^lse: axis 0 is 4, expected T = 2"),
        ({"lse": torch.zeros(2, 4).half()}, TypeError, "^lse: dtype torch.float16"),
        ({"out": torch.zeros(2, 4, 32)}, ValueError, "^out: axis 2 is 32"),
    ):
        with pytest.raises(error, match=words):
            one.run(**{"q": q, "paged_kv_cache": pages.cache} | options)
    starts = torch.tensor([0, 2, 3], **I32)
    many = prefill(WORKSPACE)
    for options, error, words in (
        (
            {"custom_mask": torch.ones(80, dtype=torch.bool)},
            ValueError,
            "^custom_mask: axis 0 is 80, expected pairs = 83",
        ),
        ({"custom_mask": torch.ones(83)}, TypeError, "^custom_mask: dtype torch.float32, expected torch.bool"),
        ({"packed_custom_mask": torch.ones(12, dtype=torch.uint8)}, ValueError, "^packed_custom_mask: axis 0 is 12"),
        ({"paged_kv_last_page_len": torch.tensor([17, 3], **I32)}, ValueError, r"^paged_kv_last_page_len\[0\]: 17"),
    ):
        given = {"paged_kv_last_page_len": pages.last, "q_data_type": "float32"} | options
        with pytest.raises(error, match=words):
            many.plan(
                starts,
                pages.indptr,
                pages.indices,
                num_qo_heads=4,
                num_kv_heads=2,
                head_dim_qk=64,
                page_size=16,
                **given,
            )
    with pytest.raises(ValueError, match=r"^s_b: axis 0 is 1, expected T = 2"):
        flashinfer.merge_state(q, torch.zeros(2, 4), q, torch.zeros(1, 4))


def test_snippet() -> None:
    (names,) = run(ROOT / "docs" / "flashinfer.md")
    lens = [40, 25]
    pages = Pages(lens, 16, "NHD", "float32", 8, 128)
    table = [names["kv_indices"][:3], names["kv_indices"][3:]]
    pages.states = [
        names["kv_cache"][t.long()].transpose(0, 1).flatten(1, 2)[:, :n] for t, n in zip(table, lens, strict=True)
    ]
    check((names["out"], names["lse"]), names["q"], [1, 1], pages)


def test_install() -> None:
    code = """
import importlib.util
from cpu_attn import flashinfer as ours
ours.install()
ours.install()
import flashinfer.cascade, flashinfer.decode, flashinfer.mla, flashinfer.page, flashinfer.prefill, flashinfer.sparse
assert flashinfer.BatchDecodeWithPagedKVCacheWrapper is ours.BatchDecodeWithPagedKVCacheWrapper
import flashinfer.triton
assert flashinfer.cascade.merge_state is ours.merge_state is flashinfer.triton.cascade.merge_state
for name in ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"):
    assert getattr(flashinfer.decode, name) is getattr(flashinfer.mla, name) and not hasattr(flashinfer, name)
assert importlib.util.find_spec("flashinfer").name == "flashinfer"
import flashinfer.xqa
from flashinfer.xqa import xqa_mla
assert flashinfer.xqa is ours.xqa and xqa_mla is flashinfer.xqa_mla is ours.xqa_mla
layer = flashinfer.mla.MLALayerDimensions(flashinfer.mla.deepseek_mla_dimensions, 128)
assert layer.head_dimensions == flashinfer.mla.MLAHeadDimensions(128, 64, 128, 512)
assert layer in flashinfer.mla.supported_mla_layer_dimensions
assert layer.head_dimensions in flashinfer.mla.supported_mla_head_dimensions
assert flashinfer.page.get_seq_lens is ours.get_seq_lens and flashinfer.__version__.startswith("0.7")
print(importlib.util.find_spec("flashinfer.gemm"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "None", done.stderr
