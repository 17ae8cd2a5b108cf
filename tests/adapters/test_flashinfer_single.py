# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions for one sequence, against float64, over the grid of its own tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import flashinfer  # noqa: E402

from .flashinfer_case import attend64, close  # noqa: E402

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def states(n: int, m: int, heads: int, kv_heads: int, d: int, dtype: str, seed: int = 0) -> Any:
    g, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype)
    shapes = ((n, heads, d), (m, kv_heads, d), (m, kv_heads, d))
    return [torch.randn(shape, generator=g).to(kind) for shape in shapes]


def laid(layout: str, *xs: Any) -> Any:
    return [x if layout == "NHD" else x.transpose(0, 1).contiguous() for x in xs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("kv_len", "d"), [(1, 64), (9, 128), (531, 64), (290, 256)])
def test_decode(kv_len: int, d: int, group: int, layout: str, mode: str) -> None:
    q, k, v = states(1, kv_len, 4 * group, 4, d, "float16", kv_len)
    more = {"pos_encoding_mode": mode, "kv_layout": layout}
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], *laid(layout, k, v), return_lse=True, **more)
    want, want_lse = attend64(q, k, v, mode=mode)
    close(out[None], want, lse[None], want_lse, 3.0 if mode == "ROPE_LLAMA" else 1.0)
    assert torch.equal(flashinfer.single_decode_with_kv_cache(q[0], *laid(layout, k, v), **more), out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("n", "m", "group", "d"), [(37, 37, 1, 128), (17, 177, 4, 64), (127, 333, 8, 64), (1, 54, 4, 256)]
)
@pytest.mark.parametrize(("softcap", "left"), [(0.0, -1), (30.0, -1), (0.0, 13)])
def test_prefill(
    n: int, m: int, group: int, d: int, layout: str, causal: bool, mode: str, softcap: float, left: int
) -> None:
    q, k, v = states(n, m, 2 * group, 2, d, "float16", n)
    more = {"causal": causal, "window_left": left, "logits_soft_cap": softcap, "pos_encoding_mode": mode}
    got = flashinfer.single_prefill_with_kv_cache(q, *laid(layout, k, v), kv_layout=layout, return_lse=True, **more)
    want = attend64(q, k, v, causal, left, softcap, mode=mode)
    close(got[0], want[0], got[1], want[1], 3.0 if mode == "ROPE_LLAMA" else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rope", [(1.0, 1e4), (4.0, 5e5)])
def test_rotation(dtype: str, rope: tuple[float, float]) -> None:
    """Of every dtype, by other scales and bases."""
    q, k, v = states(20, 90, 6, 3, 64, dtype)
    got = flashinfer.single_prefill_with_kv_cache_return_lse(
        q, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=rope[0], rope_theta=rope[1]
    )
    want = attend64(q, k, v, mode="ROPE_LLAMA", rope=rope)
    close(got[0], want[0], got[1], want[1], 3.0)


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 16])
def test_alibi_of_any_number_of_heads(heads: int) -> None:
    q, k, v = states(9, 60, heads, 1, 32, "float32")
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode="ALIBI")
    close(out, attend64(q, k, v, mode="ALIBI")[0])


@pytest.mark.parametrize(("n", "m"), [(1, 1), (17, 41), (32, 128), (5, 3)])
@pytest.mark.parametrize("left", [-1, 6])
def test_masks(n: int, m: int, left: int) -> None:
    """Of three forms, in place of causal; rows that see nothing are 0."""
    q, k, v = states(n, m, 4, 2, 64, "float32")
    mask = torch.rand(n, m, generator=torch.Generator().manual_seed(n)) < 0.5
    mask[n // 2] = False
    want = attend64(q, k, v, left=left, mask=mask.numpy())
    packed = flashinfer.packbits(mask.flatten(), bitorder="little")
    for given in ({"custom_mask": mask}, {"custom_mask": mask.flatten()}, {"packed_custom_mask": packed}):
        got = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=left, return_lse=True, **given)
        close(got[0], want[0], got[1], want[1])


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("mode", MODES)
def test_float8(kind: str, mode: str) -> None:
    """Of all three, with factors of each head; and of keys and values alone, with one factor each."""
    stored = getattr(torch, kind)
    q, k, v = (x.to(stored) for x in states(13, 70, 4, 2, 64, "float32"))
    a, b, c = torch.tensor([0.5, 1, 2, 0.75]), torch.tensor([1.5, 0.25]), torch.tensor([3.0, 0.5])
    options = {"causal": True, "pos_encoding_mode": mode}
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, a, b, c, o_dtype=torch.bfloat16, **options)
    whole = [x.double() * s[:, None] for x, s in ((q, a), (k, b), (v, c))]
    assert out.dtype == torch.bfloat16
    close(out, attend64(*whole, mode=mode)[0])
    out = flashinfer.single_prefill_with_kv_cache(q.half(), k, v, k_scale=1.5, v_scale=0.5, **options)
    want = attend64(q, k.double() * 1.5, v.double() * 0.5, mode=mode)[0]
    close(out, want, times=3.0 if mode == "ROPE_LLAMA" else 1.0)


def test_factors_of_sixteen_bits() -> None:
    """v_scale multiplies the output, q_scale and k_scale the logits; one number for a head, too."""
    q, k, v = states(1, 50, 4, 2, 64, "bfloat16")
    for given in ((0.5, 3.0, 0.25), (torch.tensor(0.5), torch.tensor([3.0]), torch.tensor(0.25))):
        names = dict(zip(("q_scale", "k_scale", "v_scale"), given, strict=True))
        out = flashinfer.single_decode_with_kv_cache(q[0], k, v, **names)
        close(out[None], attend64(q, k, v.double() * 0.25, scale=64**-0.5 * 1.5)[0])
    each = torch.tensor([2.0, -0.5])
    out = flashinfer.single_decode_with_kv_cache(q[0], k, v, k_scale=each, v_scale=each)
    close(out[None], attend64(q, k.double() * each[:, None], v.double() * each[:, None])[0], times=2.0)


def test_no_keys_and_no_queries() -> None:
    for n, m, layout in ((3, 0, "NHD"), (3, 0, "HND"), (0, 5, "NHD"), (0, 0, "NHD")):
        q, k, v = states(n, m, 4, 2, 64, "float16")
        for mode in MODES:
            out, lse = flashinfer.single_prefill_with_kv_cache(
                q, *laid(layout, k, v), kv_layout=layout, pos_encoding_mode=mode, return_lse=True
            )
            assert out.shape == (n, 4, 64) and not out.any() and (lse == -torch.inf).all()


def test_other_head_sizes_of_values_and_strides() -> None:
    q, k, v = states(8, 33, 4, 2, 64, "float32")
    wide = torch.zeros(33, 2, 200)
    wide[..., :64], wide[..., 64:112] = k, v[..., :48]
    out = flashinfer.single_prefill_with_kv_cache(q, wide[..., :64], wide[..., 64:112], causal=True)
    close(out, attend64(q, k, v[..., :48])[0])


def test_what_is_refused() -> None:
    q, k, v = states(2, 5, 4, 2, 64, "float16")
    run = flashinfer.single_prefill_with_kv_cache
    for options, error, words in (
        ({"kv_layout": "ND"}, ValueError, "^kv_layout: 'ND', expected 'NHD' or 'HND'"),
        ({"pos_encoding_mode": "ROPE"}, ValueError, "^pos_encoding_mode: 'ROPE', expected 'NONE' or"),
        ({"k": k[:, :, :32]}, ValueError, "^k: axis 2 is 32, expected head_dim = 64"),
        ({"v": v[:4]}, ValueError, "^v: axis 0 is 4"),
        ({"k": k.float()}, ValueError, "^k: float32, expected float16"),
        ({"v": v.float()}, TypeError, "^v: dtype float32, expected float16"),
        ({"custom_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, "^custom_mask: axis 1 is 4, expected kv_len"),
        ({"packed_custom_mask": torch.ones(3, dtype=torch.uint8)}, ValueError, "^packed_custom_mask: axis 0 is 3"),
        ({"packed_custom_mask": torch.ones(2)}, TypeError, "^packed_custom_mask: dtype torch.float32"),
        ({"scale_q": torch.ones(3)}, ValueError, "^scale_q: axis 0 is 3, expected heads = 4"),
        ({"scale_v": torch.tensor([1, torch.nan])}, ValueError, "^scale_v: a number is not finite"),
        ({"v_scale": float("inf")}, ValueError, "^v_scale: inf is not"),
        ({"o_dtype": torch.int8}, TypeError, "^o_dtype: torch.int8 is none of"),
        ({"kv_cache_sf": (k, v)}, NotImplementedError, "^kv_cache_sf: expected None; caches of 4 bits"),
        ({"q": q.clone().requires_grad_()}, ValueError, "^q: requires grad"),
        ({"rope_scale": 0.0, "pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "^rope_scale: 0.0"),
    ):
        with pytest.raises(error, match=words):
            run(**{"q": q, "k": k, "v": v} | options)
    with pytest.raises(ValueError, match=r"^num_kv_heads: 2 does not divide num_qo_heads = 3"):
        run(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"^q: 3 axes, expected 2"):
        flashinfer.single_decode_with_kv_cache(q, k, v)


def test_packed_bits() -> None:
    x = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert flashinfer.packbits(x).tolist() == [0b10011000, 0b11000000]
    assert flashinfer.packbits(x, bitorder="little").tolist() == [0b00011001, 0b00000011]
    bits, starts = flashinfer.segment_packbits(x, torch.tensor([0, 3, 3, 10], dtype=torch.int32), "little")
    assert torch.equal(flashinfer.segment_packbits(x, torch.tensor([0, 3, 3, 10]), "little")[0], bits)
    assert bits.tolist() == [0b001, 0b1100011] and starts.tolist() == [0, 1, 1, 2] and starts.dtype == torch.int32
    assert np.unpackbits(bits[1:].numpy(), bitorder="little")[:7].tolist() == x[3:].int().tolist()
    with pytest.raises(ValueError, match=r"^bitorder: 'middle', expected 'big' or 'little'"):
        flashinfer.packbits(x, "middle")
