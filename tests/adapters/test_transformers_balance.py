# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.transformers.balance: the same outputs, keys as large as queries, and weights as they were after a second
call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_models, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, CONTINUOUS, DECODERS, tokens  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import ODD  # noqa: E402
from cpu_attn.tests.models.hf_tiny import build, tiny  # noqa: E402
from cpu_attn.transformers import PagedCache, balance  # noqa: E402
from cpu_attn.transformers.attention import attention  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
# Modules of tiny models of the sweep, and what is hard about them.
SWEEP = {
    "phi3": 2,  # one projection for queries, keys and values, a part of each head is rotated
    "gpt2": 2,  # weights [in, out], biases
    "gpt_neox": 2,  # one projection that has them head by head
    "stablelm": 2,
    "persimmon": 2,
    "cohere2": 2,  # channels 0 and 1, 2 and 3, ... are pairs
    "glm4": 2,
    "olmo2": 2,  # norms over all heads
    "qwen2": 2,
    "qwen3_next": 1,  # one projection for queries and a gate
    "gemma3n_text": 4,  # layers without keys of their own
    "gemma4_text": 4,
    "zamba2": 2,  # one module for several layers
    "gpt_bigcode": 2,
    "modernbert": 2,
    "bart": 6,
    "mt5": 6,
}


@contextmanager
def changed(name: str) -> Iterator[Any]:
    """A copy of a tiny model whose channels of queries and keys differ by up to 64."""
    model = copy.deepcopy(hf_models.model(name))
    generator = torch.Generator().manual_seed(2)
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in ("k_proj", "k_norm")):
            scale = 2 ** (6 * torch.rand(len(parameter), generator=generator) - 3)
            parameter.data *= scale.reshape(-1, *[1] * (parameter.dim() - 1))
    model.set_attn_implementation("cpu_attn")
    with torch.no_grad():
        yield model


def states(model: Any, inputs: Any) -> list[tuple[Any, Any]]:
    """Queries [B, Hkv, G, T, D] and keys [B, Hkv, T, D] of each layer, in float64."""
    found = []

    def seen(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((query.double().unflatten(1, (key.shape[1], -1)), key.double()))
        return attention(module, query, key, *args, **kwargs)

    hf.AttentionInterface.register("cpu_attn", seen)
    try:
        model(**inputs, use_cache=False)
    finally:
        adapter.enable()
    return found


def unlike(query: Any, key: Any, name: str) -> float:
    """How far apart the largest ratio of a pair's sizes in keys and queries is from the least, in a head. NeoX's pairs
    are D / 2 apart; norms are those of all heads."""
    sizes = query.square().mean((0, 2, 3)), key.square().mean((0, 2))  # [Hkv, D]
    if name in ("qwen3", "gemma3"):
        sizes = sizes[0].mean(0, keepdim=True), sizes[1].mean(0, keepdim=True)
    queries, keys = (x.unflatten(-1, (2, -1)).mean(-2).sqrt() for x in sizes)
    ratio = keys / queries
    return float((ratio.amax(1) / ratio.amin(1)).min())


def weights(model: Any) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


def same(before: list[Any], model: Any) -> bool:
    return all(x.equal(y) for x, y in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("deepseek_v3", "llama4")])
def test_products_stay_and_sizes_meet(name: str) -> None:
    """q.k is what it was in float64, and a channel of a kv head, or a rotary pair, is as large in the keys as in the
    queries: over random tokens other than those that the factors come from, within half."""
    inputs = {"input_ids": torch.randint(24, 72, (1, 100), generator=torch.Generator().manual_seed(8))}
    with changed(name) as model:
        before, kept, want = states(model, inputs), weights(model), model(**inputs, use_cache=False).logits
        assert balance(model) == LAYERS
        assert torch.allclose(model(**inputs, use_cache=False).logits, want, atol=1e-4 * float(want.abs().max()))
        for (q, k), (q_before, k_before) in zip(states(model, inputs), before, strict=True):
            products, expected = q @ k[:, :, None].mT, q_before @ k_before[:, :, None].mT
            assert (products - expected).abs().max() < 1e-5 * expected.abs().max()
            assert unlike(q, k, name) < 2.4 < 3 < unlike(q_before, k_before, name)
        assert not same(kept, model)
        assert balance(model) == [] and same(kept, model)
        assert model(**inputs, use_cache=False).logits.equal(want)


def of_sweep(architecture: str) -> tuple[Any, dict[str, Any]]:
    """A model of the sweep, and what it takes."""
    if architecture in ODD:
        model, inputs = ODD[architecture]()
    else:
        config = model_sweep.CONFIG_MAPPING[architecture]
        model, inputs = build(getattr(hf, model_sweep.architectures()[architecture]), tiny(config)), None
    return model, inputs or model_sweep.given(model)


@pytest.mark.parametrize("architecture", SWEEP)
def test_other_architectures(architecture: str) -> None:
    model, inputs = of_sweep(architecture)
    want = model_sweep.under(model, "cpu_attn", model_sweep.forward, inputs)
    kept = weights(model)
    assert len(balance(model)) == SWEEP[architecture]
    assert not same(kept, model)
    got = model_sweep.under(model, "cpu_attn", model_sweep.forward, inputs)
    assert model_sweep.difference(got, want) < model_sweep.TOLERANCE
    assert balance(model) == [] and same(kept, model)


def test_inputs_of_a_model_that_needs_others() -> None:
    model = copy.deepcopy(hf_models.model("whisper"))
    inputs = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": tokens(9)["input_ids"]}
    want = model(**inputs).logits
    with pytest.raises(ValueError, match=r"^inputs: WhisperForConditionalGeneration does not take random input_ids"):
        balance(model)
    assert model.config._attn_implementation == "eager"
    assert len(balance(model, inputs)) == 6  # of the encoder, the decoder, and between them
    assert torch.allclose(model(**inputs).logits, want, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_bfloat16_and_generate(name: str) -> None:
    """In float32 a balanced model writes the tokens of the other; in bfloat16 its weights keep their dtype."""
    inputs = tokens(19, 5)
    with changed(name) as model:
        options = {"max_new_tokens": 8, "do_sample": False}
        want = model.generate(**inputs, **options).tolist()
        kept = weights(model)
        balance(model)
        assert model.generate(**inputs, **{CACHE: PagedCache(model.config)}, **options).tolist() == want
        balance(model)
        model.to(torch.bfloat16)
        kept = weights(model)
        assert balance(model) == LAYERS
        assert all(p.dtype == torch.bfloat16 for p in model.parameters()) and not same(kept, model)
        assert balance(model) == [] and same(kept, model)


def test_balanced_pages_lose_less() -> None:
    """Logits of tokens behind a prompt in pages of integers: rotated alone, and balanced."""
    ids, errors = torch.randint(3, 90, (32, 60), generator=torch.Generator().manual_seed(4)), []
    with changed("llama") as model:
        want = model(ids, use_cache=False).logits[:, 40:]
        for _ in range(2):
            cache = PagedCache(model.config, kv_cache_dtype="int8/auto")
            model(ids[:, :40], **{CACHE: cache})
            got = model(ids[:, 40:], **{CACHE: cache}).logits
            errors.append(float((got - want).square().mean().sqrt() / want.square().mean().sqrt()))
            balance(model)
    assert 0 < errors[1] < 0.9 * errors[0]


def test_rotary_layers_of_llama_4_stay() -> None:
    """Their norm has no weights, and stands behind the projections; the layer without positions has none."""
    with changed("llama4") as model:
        assert balance(model) == LAYERS[1:]


def test_what_cannot_be_balanced() -> None:
    with pytest.raises(TypeError, match=r"^model: expected Module, got int"):
        balance(3)
    model = copy.deepcopy(hf_models.model("deepseek_v3"))
    with pytest.raises(ValueError, match=r"^model: .* can be balanced; model.layers.0.self_attn: it caches latents"):
        balance(model)
    bloom = build(hf.BloomForCausalLM, tiny(hf.BloomConfig))
    with pytest.raises(ValueError, match="none of its modules asks transformers' attention interface"):
        balance(bloom)
    model = copy.deepcopy(hf_models.model("llama"))
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight
    kept = weights(model)
    with pytest.raises(ValueError, match="other modules have the weight of its k_proj, too"):
        balance(model)
    assert same(kept, model) and model.config._attn_implementation == "eager"


def test_what_makes_more_than_keys_stays() -> None:
    """A module whose keys are its values, too, which its output shows."""
    model = copy.deepcopy(hf_models.model("llama"))
    for layer in model.model.layers:
        layer.self_attn.v_proj = layer.self_attn.k_proj
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: "):
        balance(model)


def test_a_composite_model() -> None:
    model, inputs = ODD["gemma4"]()
    want = model(**inputs).logits
    names = balance(model)
    assert names and all("language_model" in name for name in names)
    assert torch.allclose(model(**inputs).logits, want, atol=2e-4 * float(want.abs().max()))
