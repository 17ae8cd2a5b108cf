# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's norms, and its rotations into float8, against formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations

from cpu_attn import flashinfer  # noqa: E402
from cpu_attn.flashinfer import norm, rope_quantize  # noqa: E402

from .flashinfer_case import I32, Pages, close, indptr, turned  # noqa: E402

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def rms64(x: Any, weight: Any, bias: float = 0.0, eps: float = 1e-6) -> Any:
    x = x.double().numpy() if isinstance(x, torch.Tensor) else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (weight.double().numpy() + bias)


def near(got: Any, want: Any) -> None:
    """Float8: within half a step of it, and 1 of 10,000 of that for the float32 before it; saturated."""
    info = torch.finfo(got.dtype)
    want = np.clip(want, -info.max, info.max)
    step = np.maximum(np.abs(want), info.tiny) * info.eps
    assert (np.abs(got.double().numpy() - want) <= step / 2 * 1.0001).all()


@pytest.mark.parametrize("shape", [(5, 96), (3, 7, 64), (2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_norms(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    x, residual = (torch.randn(*shape, 2)[..., 0].to(kind) for _ in range(2))  # rows that are not dense
    weight, beta = torch.randn(shape[-1]).to(kind), torch.randn(shape[-1])
    both = x.double().numpy() + residual.double().numpy()
    for name, bias in (("", 0.0), ("gemma_", 1.0)):
        run, add = getattr(flashinfer, f"{name}rmsnorm"), getattr(flashinfer, f"{name}fused_add_rmsnorm")
        close(run(x, weight, 1e-3), rms64(x, weight, bias, 1e-3))
        if dtype != "float16":  # squares beyond float32
            close(run(x * 1e25, weight), rms64(x * 1e25, weight, bias))
        out = torch.empty_like(x)
        assert run(x, weight, out=out) is out
        close(out, rms64(x, weight, bias))
        a, b = x.clone(), residual.clone()
        assert add(a, b, weight) is None
        close(a, rms64(both, weight, bias))
        close(b, both)
    y = rms64(x, weight)
    close(flashinfer.fused_rmsnorm_silu(x, weight), y / (1 + np.exp(-y)))
    centred = x.double().numpy() - x.double().numpy().mean(-1, keepdims=True)
    want = (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight.double().numpy() + beta.double().numpy()
    )
    if shape[-1] > 1:
        close(flashinfer.layernorm(x, weight, beta), want)


@pytest.mark.parametrize("kind", FP8)
def test_norms_of_eight_bits(kind: Any) -> None:
    """Divided by a scale, saturated; NaN stays NaN."""
    x, residual, weight, beta = torch.randn(9, 64), torch.randn(9, 64), torch.randn(64), torch.randn(64)
    both = x.double().numpy() + residual.double().numpy()
    for scale in (0.001, torch.tensor([0.7]), torch.tensor(3.0)):
        out = torch.empty(9, 64).to(kind)
        flashinfer.rmsnorm_quant(out, x, weight, scale)
        near(out, rms64(x, weight) / float(scale))
        kept = residual.clone()
        flashinfer.fused_add_rmsnorm_quant(out, x, kept, weight, scale)
        near(out, rms64(both, weight) / float(scale))
        close(kept, both)
        flashinfer.layernorm_quant(out, x, weight, beta, scale)
        near(out, flashinfer.layernorm(x, weight, beta).double().numpy() / float(scale))
        y = rms64(x, weight)
        near(flashinfer.fused_rmsnorm_silu(x, weight, out=out), y / (1 + np.exp(-y)))
    x[3, 3] = torch.nan
    flashinfer.rmsnorm_quant(out, x, weight, 1.0)
    assert out[3].isnan().all() and not out[4].isnan().any()


def test_what_norms_refuse() -> None:
    x, w, out = torch.randn(4, 8), torch.randn(8), torch.zeros(4, 8).to(FP8[0])
    residual = torch.randn(4, 8)
    before = residual.clone()
    for run, kind, words in (
        (lambda: norm.rmsnorm(x, w[:7]), ValueError, r"^weight: shape \(7,\), expected \[8\]"),
        (lambda: norm.rmsnorm(x.long(), w), TypeError, "^input: dtype torch.int64"),
        (lambda: norm.rmsnorm(x, w, out=x[:2]), ValueError, r"^out: shape \(2, 8\), expected \(4, 8\)"),
        (lambda: norm.rmsnorm(x, w, -1.0), ValueError, "^eps: -1.0"),
        (lambda: norm.rmsnorm_quant(x, x, w, 1.0), TypeError, "^out: dtype torch.float32"),
        (lambda: norm.rmsnorm_quant(out, x, w, torch.ones(2)), ValueError, "scale must be a scalar tensor"),
        (lambda: norm.fused_add_rmsnorm_quant(out, x, residual, w, 0.0), ValueError, "^scale: 0.0"),
        (lambda: norm.fused_rmsnorm_silu(x, w, block_scale=x), NotImplementedError, "^block_scale: expected None"),
        (lambda: norm.layernorm(x[0, 0], w, w), ValueError, "^input: has no axes"),
    ):
        with pytest.raises(kind, match=words):
            run()
    assert torch.equal(residual, before)


def states(latent: bool, n: int, turn: int, rest: int) -> tuple[Any, ...]:
    q, k = torch.randn(n, 4, turn + rest), torch.randn(n, *(() if latent else (2,)), turn + rest)
    return (q[..., :turn], k[..., :turn], q[..., turn:], k[..., turn:])


def table(turn: int, rows: int = 100) -> Any:
    angles = np.outer(np.arange(rows), 1e4 ** (-2 * np.arange(turn // 2) / turn))
    return torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], 1)).float()


def rotated64(x: Any, at: Any, interleave: bool) -> Any:
    x = x.double().numpy()
    return turned(x[:, None], at, interleave=interleave)[:, 0] if x.ndim == 2 else turned(x, at, interleave=interleave)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("kind", FP8)
def test_rotations_into_eight_bits(kind: Any, latent: bool, interleave: bool) -> None:
    at = [3, 0, 99, 40, 41]
    given = states(latent, 5, 32, 16)
    options = {"is_neox": not interleave, "quant_scale_q": 3.0, "quant_scale_kv": 0.25}
    out = torch.zeros(5, 4, 48).to(kind)
    found = rope_quantize.rope_quantize_fp8(*given, table(32), torch.tensor(at), q_rope_out=out[..., :32], **options)
    assert found[0].data_ptr() == out.data_ptr() and all(x.dtype == kind for x in found)
    wanted = [rotated64(x, at, interleave) for x in given[:2]] + [x.double().numpy() for x in given[2:]]
    for x, want, factor in zip(found, wanted, [3.0, 0.25] * 2, strict=True):
        near(x, want * factor)
    again = rope_quantize.mla_rope_quantize_fp8(
        *given, table(32), torch.tensor(at, **I32), quantize_dtype=kind, **options
    )
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, again, strict=True))
    few = rope_quantize.rope_quantize_fp8(*given[:2], None, None, table(32), torch.tensor(at))
    assert few[2].shape == (5, 4, 0) and few[3].shape == given[3][..., :0].shape


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("latent", [False, True])
def test_rotations_into_pages(latent: bool, layout: str) -> None:
    """The last tokens of two sequences, and one token that is padding; int64 starts."""
    pages, kind, turn, rest = Pages([20, 37], 16, "NHD", "float32"), FP8[0], 32, 16
    given, v = states(latent, 4, turn, rest), None if latent else torch.randn(4, 2, 24)
    count = len(pages.cache)
    shapes = [(count, 16, rest), (count, 16, turn)] if latent else [(count, 16, 2, turn + rest), (count, 16, 2, 24)]
    caches = [torch.randn(s).to(kind) for s in shapes]
    if layout == "HND" and not latent:
        caches = [x.transpose(1, 2).contiguous() for x in caches]
    before = [x.clone() for x in caches]
    owner, place = torch.tensor([0, -1, 1, 1]), torch.tensor([19, 0, 35, 36])
    where = (pages.indices.long(), pages.indptr.long(), owner, place)
    run = rope_quantize.rope_quantize_fp8_append_paged_kv_cache
    options = {"page_size": 16, "kv_layout": layout, "quant_scale_kv": 0.5}
    q_rope, q_nope = run(*given, v, table(turn), torch.tensor([19, 7, 35, 36]), tuple(caches), *where, **options)
    at = [19, 7, 35, 36]
    near(q_rope, rotated64(given[0], at, False))
    near(q_nope, given[2].double().numpy())
    key, rest_of_it = rotated64(given[1], at, False), given[3].double().numpy()
    wanted = [rest_of_it, key] if latent else [np.concatenate([key, rest_of_it], -1), v.double().numpy()]
    for cache, old, want in zip(caches, before, wanted, strict=True):
        rows, kept = ((x if latent or layout == "NHD" else x.transpose(1, 2)) for x in (cache, old))
        written = torch.zeros(count, 16, dtype=torch.bool)
        for t in (0, 2, 3):
            page = int(pages.indices[pages.indptr[owner[t]] + place[t] // 16])
            near(rows[page, place[t] % 16], want[t] * 0.5)
            written[page, place[t] % 16] = True
        assert torch.equal(rows.view(torch.uint8)[~written], kept.view(torch.uint8)[~written])
    for change, words in (
        ({"page_size": 8}, "^paged_kv_cache: .* in pages of 8 tokens"),
        ({"quantize_dtype": FP8[1]}, "^paged_kv_cache: "),
    ):
        with pytest.raises(ValueError, match=words):
            run(*given, v, table(turn), torch.tensor(at), tuple(caches), *where, **options | change)
    with pytest.raises(ValueError, match=r"^v: "):
        run(*given, torch.randn(4, 2, 24) if latent else None, table(turn), torch.tensor(at), caches, *where, **options)
    with pytest.raises(ValueError, match=r"^pos_ids\[2\]: 100, outside 0..99"):
        rope_quantize.rope_quantize_fp8(*given, table(turn), torch.tensor([0, 0, 100, 0]))


def test_starts_of_64_bits() -> None:
    q, k = torch.randn(5, 2, 32), torch.randn(5, 1, 32)
    starts, offsets = indptr([2, 3]), torch.tensor([4, 9])
    for x, y in zip(
        flashinfer.apply_rope(q, k, starts.long(), offsets), flashinfer.apply_rope(q, k, starts, offsets), strict=True
    ):
        assert torch.equal(x, y)
    lens = flashinfer.get_seq_lens(torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 16]), 16)
    assert lens.tolist() == [19, 0, 48]
    owner, place = flashinfer.get_batch_indices_positions(starts.long(), torch.tensor([7, 3]), 5)
    assert owner.tolist() == [0, 0, 1, 1, 1] and place.tolist() == [5, 6, 0, 1, 2]
    with pytest.raises(ValueError, match=r"^append_indptr\[2\]: 2147483647"):
        flashinfer.get_batch_indices_positions(torch.tensor([0, 2, 1 << 40]), torch.tensor([7, 3]), 5)
