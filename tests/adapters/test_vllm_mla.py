# SPDX-License-Identifier: Apache-2.0
"""One MLA layer of cpu_attn.vllm, called as vLLM's layer calls it, against the float64 oracle over latents; and what
vLLM's platform says of MLA once the plugin is loaded."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integrations
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode  # noqa: E402

from cpu_attn import reference  # noqa: E402
from cpu_attn._adapters import vllm_plugin  # noqa: E402
from cpu_attn.vllm import MLABackend  # noqa: E402

from ..models.vllm_steps import CONFIG, HEADS, LAYER, Step  # noqa: E402

RANK, ROPE = 40, 8
SCALE = 0.2  # of the heads before absorption; not what the width of a row would give


class LatentStep(Step):
    """Keys are rows [kv_c | k_pe] of one head, values their first part."""

    def __init__(self, dtype: str = "float32", kv_cache_dtype: str = "auto", block_size: int = 16) -> None:
        super().__init__(dtype, RANK + ROPE, kv_cache_dtype, block_size, RANK)
        self.keys = [x[:, :1] for x in self.keys]
        self.values = [x[..., :RANK] for x in self.keys]

    def spec(self, cls: Any = MLAAttentionSpec) -> Any:
        plain = cls(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.head_size,
            dtype=self.dtype if self.kv_cache_dtype == "auto" else torch.uint8,
            cache_dtype_str=self.kv_cache_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )
        return MLABackend.customize_spec(plain)

    def layer(self, backend: Any = MLABackend, **options: Any) -> Any:
        given = {
            **{"num_heads": HEADS, "head_size": self.head_size, "scale": SCALE, "num_kv_heads": 1},
            **{"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None},
            **{"kv_cache_dtype": self.kv_cache_dtype, "attn_type": AttentionType.DECODER},
            **{"kv_sharing_target_layer_name": None, "kv_lora_rank": RANK, "q_lora_rank": None},
            **options,
        }
        return backend.get_impl_cls()(**given)

    def attend(self, impl: Any, padding: int = 0, backend: Any = MLABackend, **changes: Any) -> Any:
        spec = self.spec()
        cache = self.cache(spec).squeeze(1)  # as MLAAttention.bind_kv_cache does
        metadata = backend.get_builder_cls()(spec, ["layer"], CONFIG, torch.device("cpu")).build(
            0, self.common(**changes)
        )
        scale = torch.tensor(LAYER._k_scale_float)
        for r, rows in enumerate(self.keys):
            at = torch.arange(len(rows))
            for part in (at[::2], at[1::2]):
                slots = torch.cat([self.slots(r, part), torch.full((3,), -1)])
                padded = rows[torch.cat([part, torch.zeros(3 + padding, dtype=torch.int64)])]
                latent, rotated = padded[:, 0, :RANK], padded[..., RANK:]
                impl.do_kv_cache_update(latent, rotated, cache, slots, self.kv_cache_dtype, scale)
        if self.kv_cache_dtype != "auto":
            cache = cache.view(torch.float8_e4m3fn)  # as MLAAttention.forward_impl does
        assert (metadata.num_decode_tokens, metadata.num_prefills) == (len(self.query), 0)
        output, lse = impl.forward_mqa(self.query.split([RANK, ROPE], -1), cache, metadata, LAYER)
        assert lse is None
        return output

    def expected(self, causal: bool = True, **options: Any) -> Any:
        keys, values = ([x.double().numpy() for x in some] for some in (self.keys, self.values))
        lens = self.seq_lens.astype(np.int32), self.starts.astype(np.int32)
        query = self.query.double().numpy()
        return reference.attention(query, keys, values, lens[1], lens[0], SCALE, causal, **options)[0]


@pytest.mark.parametrize("block_size", [16, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decodes_and_chunks_in_one_call(dtype: str, block_size: int) -> None:
    step = LatentStep(dtype, block_size=block_size)
    assert step.error(step.attend(step.layer(), padding=2), step.expected()) < 1


def test_window_and_softcap() -> None:
    step = LatentStep()
    output = step.attend(step.layer(sliding_window=6, logits_soft_cap=0.8))
    assert step.error(output, step.expected(sliding_window=6, softcap=0.8)) < 1


def test_causal_by_request() -> None:
    step, flags = LatentStep(), [True, False, True, False]
    output = step.attend(step.layer(), causal=torch.tensor(flags))
    assert step.error(output, step.expected(dynamic_causal=np.array(flags, np.int32))) < 1


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("kv_cache_dtype", "least", "most"), [("fp8", 0.015, 0.045), ("fp8_e5m2", 0.03, 0.09)])
def test_fp8(kv_cache_dtype: str, least: float, most: float, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near as its bits allow; tests/adapters/test_vllm.py compares with rounded latents."""
    monkeypatch.setattr(LAYER, "_k_scale_float", scale)
    step = LatentStep("bfloat16", kv_cache_dtype)
    if scale > 1 and kv_cache_dtype == "fp8":  # more than fp8_e4m3 holds without a scale
        step.keys = [x * 200 for x in step.keys]
        step.values = [x[..., :RANK] for x in step.keys]
        step.query = step.query / 200
    error = step.error(step.attend(step.layer()), step.expected()) * reference.BUDGET["bfloat16"]
    assert least < error < most


def test_scales_of_fp8_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAYER, "_k_scale_float", 2.0)
    step = LatentStep("bfloat16")
    assert step.error(step.attend(step.layer()), step.expected()) < 1


def test_layers_share_a_plan() -> None:
    step = LatentStep()
    metadata = MLABackend.get_builder_cls()(step.spec(), ["a", "b"], CONFIG, torch.device("cpu")).build(
        0, step.common()
    )
    cache = torch.zeros_like(step.cache(step.spec()).squeeze(1))
    for window in (None, None, 6):
        step.layer(sliding_window=window).forward_mqa(step.query, cache, metadata, LAYER)
    assert len(metadata.decode.plans) == 2


def test_no_cache_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures memory before it allocates a cache."""
    written: list[Any] = []
    monkeypatch.setattr("cpu_attn.vllm.mla.concat_and_cache_mla", lambda *given: written.append(given))
    step = LatentStep()
    step.layer().do_kv_cache_update(None, None, torch.tensor([]), None, "auto", torch.ones(1))
    assert not written


@pytest.mark.parametrize(
    "given",
    [{"alibi_slopes": [1.0]}, {"attn_type": "encoder"}, {"kv_sharing_target_layer_name": "layers.0.attn"}],
)
def test_what_a_layer_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        LatentStep().layer(**given)


def test_no_rotated_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_ATTN_KV_CACHE_ROTATION", "hadamard")
    with pytest.raises(NotImplementedError, match="CPU_ATTN_KV_CACHE_ROTATION: not with latent caches"):
        LatentStep().layer()


# ---- the platform ----


class Platform(vllm_plugin.MLAPlatform, CpuPlatform):  # type: ignore[misc]
    """What the plugin makes of vLLM's."""


def asked(kv_cache_dtype: str | None = None, **options: Any) -> Any:
    options = {"use_mla": True, **options}
    return AttentionSelectorConfig(576, torch.bfloat16, kv_cache_dtype, block_size=None, **options)


@pytest.mark.parametrize("kv_cache_dtype", [None, "auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_the_platform_names_our_backend(kv_cache_dtype: str | None) -> None:
    assert Platform.get_attn_backend_cls(None, asked(kv_cache_dtype)) == vllm_plugin.MLA_BACKEND


def test_what_the_platform_refuses() -> None:
    for kv_cache_dtype in ("int8_per_token_head", "int4_per_token_head", "fp8_ds_mla"):
        with pytest.raises(ValueError, match=f"--kv-cache-dtype {kv_cache_dtype}: latent caches .* take auto, "):
            Platform.get_attn_backend_cls(None, asked(kv_cache_dtype))
    with pytest.raises(NotImplementedError, match="Sparse"):
        Platform.get_attn_backend_cls(None, asked(use_sparse=True))


def test_other_attention_is_asked_of_vllm() -> None:
    assert "MLA" not in Platform.get_attn_backend_cls(None, asked("auto", use_mla=False))


@pytest.mark.parametrize(("use_mla", "sparse"), [(True, False), (True, True), (False, False)])
def test_settings_are_kept_for_our_mla_alone(use_mla: bool, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform turns them off for its own backend."""

    def turned_off(cls: Any, config: Any) -> None:
        config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = False
        config.cache_config.block_size, config.scheduler_config.max_num_batched_tokens = 16, 4096

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(turned_off))
    text = SimpleNamespace(index_topk=2048) if sparse else SimpleNamespace()
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=64),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=512),
        model_config=SimpleNamespace(use_mla=use_mla, hf_text_config=text),
    )
    Platform.check_and_update_config(config)
    cache, scheduler, kept = config.cache_config, config.scheduler_config, use_mla and not sparse
    assert cache.enable_prefix_caching == scheduler.enable_chunked_prefill == kept
    assert (cache.block_size, scheduler.max_num_batched_tokens) == ((64, 512) if kept else (16, 4096))
