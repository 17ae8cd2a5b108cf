# SPDX-License-Identifier: Apache-2.0
"""Latents in a PagedCache: attended as they are in decode, the same tokens as where every head's keys are made."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_models, hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, tokens  # noqa: E402
from cpu_attn.transformers import PagedCache, latents  # noqa: E402
from cpu_attn.transformers.attention import attention  # noqa: E402
from cpu_attn.transformers.pages import Held, PagedLayer  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
OTHERS = ("glm4_moe_lite", "kimi_linear", "minicpm3", "youtu")


@cache
def model(name: str) -> Any:
    if name in hf_models.DECODERS:
        return hf_models.model(name)
    model_class = getattr(hf, model_sweep.architectures()[name])
    return hf_tiny.build(model_class, hf_tiny.tiny(CONFIG_MAPPING[name]))


def generate(name: str, implementation: str, cache: Any, inputs: Any, **options: Any) -> Any:
    made = model(name)
    made.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return made.generate(**inputs, **{CACHE: cache}, **GREEDY, **options).tolist()
    finally:
        made.set_attn_implementation("eager")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How often latents were attended, and how often latents or keys were made dense."""
    found = SimpleNamespace(attended=0, gathered=0)

    def counted(kind: Any, method: str, name: str) -> None:
        real = getattr(kind, method)

        def call(*args: Any) -> Any:
            setattr(found, name, getattr(found, name) + 1)
            return real(*args)

        monkeypatch.setattr(kind, method, call)

    counted(latents.Expansion, "attend", "attended")
    counted(Held, "gather", "gathered")
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", *OTHERS])
def test_same_tokens(name: str, calls: Any) -> None:
    inputs = tokens(19, 5, 13)
    want = generate(name, "eager", None, inputs, max_new_tokens=12)
    cache = PagedCache(model(name).config, block_size=8)
    assert generate(name, "cpu_attn", cache, inputs, max_new_tokens=12) == want
    layers = sum(isinstance(layer, latents.LatentLayer) for layer in cache.layers)
    assert layers and (calls.attended, calls.gathered) == (11 * layers, 2 * layers)  # the prompt is expanded


def test_beams_and_assistance(calls: Any) -> None:
    inputs, options = tokens(14, 9), {"max_new_tokens": 12, "num_beams": 3}
    want = generate("deepseek_v3", "eager", None, inputs, **options)
    config = model("deepseek_v3").config
    assert generate("deepseek_v3", "cpu_attn", PagedCache(config, block_size=4), inputs, **options) == want
    inputs = {"input_ids": torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9]])}
    want = generate("deepseek_v3", "eager", None, inputs, max_new_tokens=20)
    options = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
    assert generate("deepseek_v3", "cpu_attn", PagedCache(config, block_size=4), inputs, **options) == want
    assert calls.attended


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_implementations_expand(implementation: str, calls: Any) -> None:
    inputs = tokens(9, 4)
    want = generate("deepseek_v3", "eager", None, inputs, max_new_tokens=6)
    cache = PagedCache(model("deepseek_v3").config)
    assert generate("deepseek_v3", implementation, cache, inputs, max_new_tokens=6) == want
    assert not calls.attended and calls.gathered


def test_an_expansion_that_is_no_plain_product(calls: Any) -> None:
    """A bias of kv_b_proj is not absorbed."""
    made = copy.deepcopy(model("deepseek_v3"))
    for layer in made.model.layers:
        product = layer.self_attn.kv_b_proj
        product.bias = torch.nn.Parameter(torch.linspace(-1, 1, product.out_features))
    ids = tokens(9)["input_ids"]
    with torch.no_grad():
        want = made(ids, use_cache=False).logits[:, -1]
        made.set_attn_implementation("cpu_attn")
        cache = PagedCache(made.config)
        made(ids[:, :-1], **{CACHE: cache})
        assert torch.allclose(made(ids[:, -1:], **{CACHE: cache}).logits[:, -1], want, rtol=1e-4, atol=1e-4)
    assert not calls.attended


def test_gradients_are_tracked_without_no_grad() -> None:
    made, ids = model("deepseek_v3"), tokens(9)["input_ids"]
    made.set_attn_implementation("cpu_attn")
    want = made(ids, use_cache=False).logits[:, -1]
    cache = PagedCache(made.config)
    made(ids[:, :-1], **{CACHE: cache})
    found = made(ids[:, -1:], **{CACHE: cache}).logits[:, -1]
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="cpu_attn has no backward pass"):
        found.sum().backward()


def test_expansions_go_at_once() -> None:
    """With the pages that they hold, without the garbage collector."""
    made, cache = model("deepseek_v3"), PagedCache(model("deepseek_v3").config)
    made.set_attn_implementation("cpu_attn")
    gc.disable()
    try:
        with torch.no_grad():
            made(tokens(9)["input_ids"], **{CACHE: cache})
        memory = [weakref.ref(layer.held) for layer in cache.layers]
        cache.reset()
        assert [x() for x in memory] == [None] * len(memory)
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_held_once(dtype: Any, copied: Any) -> None:
    """In copies of a layer, too, which go on by themselves."""
    layer = latents.LatentLayer(8, kv_cache_dtype="auto")
    generator = torch.Generator().manual_seed(4)
    latent, rotated = (torch.randn(2, 1, 21, size, generator=generator).to(dtype) for size in (32, 16))
    layer.update(latent[:, :, :20], rotated[:, :, :20])
    twin = copied(layer)
    found = twin.update(latent[:, :, 20:], rotated[:, :, 20:])
    assert found[0].clone().equal(latent) and found[1].clone().equal(rotated)
    assert twin.nbytes == 2 * 3 * 8 * (32 + 16) * dtype.itemsize
    twin.batch_repeat_interleave(2)
    found = twin.update(latent[[0, 0, 1, 1], :, :9] * 2, rotated[[0, 0, 1, 1], :, :9] * 2)
    assert found[0].clone().equal(torch.cat([latent, 2 * latent[:, :, :9]], 2).repeat_interleave(2, 0))
    if twin is not layer:
        assert layer.keys.clone().equal(torch.cat([latent, rotated], -1)[:, :, :20])


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "int8/int4"])
def test_quantised_latents(kind: str) -> None:
    """Attention over the latents is that over the keys and values that they expand to."""
    made = model("deepseek_v3").model.layers[0].self_attn
    generator = torch.Generator().manual_seed(4)
    layer = latents.LatentLayer(8, kv_cache_dtype=kind)
    assert latents.layer_classes(made.config)[PagedLayer] is latents.LatentLayer
    sizes = made.kv_lora_rank, made.qk_rope_head_dim
    held = layer.update(*(torch.randn(2, 1, 21, size, generator=generator) for size in sizes))
    query = torch.randn(2, 4, 1, made.qk_head_dim, generator=generator)
    with torch.no_grad():
        key, value = made.expand_kv(*held)
        assert isinstance(key, latents.Expanded)
        got = attention(made, query, key, value, None)[0]
        # K of its own rows: of K's kind, V of V's.
        rows, values = layer.held.gather(False), layer.held.gather(True)
        k, _ = made.expand_kv(rows[..., : made.kv_lora_rank], rows[..., made.kv_lora_rank :])
        _, v = made.expand_kv(values, rows[..., made.kv_lora_rank :])
    want = ((query.double() @ k.double().mT * made.qk_head_dim**-0.5).softmax(-1) @ v.double()).transpose(1, 2)
    assert torch.allclose(got.double(), want, atol=1e-4)
