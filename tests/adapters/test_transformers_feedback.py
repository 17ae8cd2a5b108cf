# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.transformers.key_feedback: its factors are those of the model's queries, and pages lose less by them."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.rotation import error_feedback  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import ODD  # noqa: E402
from cpu_attn.transformers import PagedCache, balance, feedback, key_feedback  # noqa: E402
from cpu_attn.transformers.attention import attention  # noqa: E402

from .test_transformers_balance import changed, of_sweep, same, weights  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
WITHOUT = {"bart", "zamba2"}  # several modules have a layer's number


def inputs_of(length: int = 61, rows: int = 1) -> dict[str, Any]:
    return {"input_ids": torch.randint(24, 72, (rows, length), generator=torch.Generator().manual_seed(8))}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_factors_are_those_of_the_queries(name: str) -> None:
    """Of inputs that are given, whose rotary pairs (D / 2 apart) count alike; nothing of the model changes."""
    inputs, squares = inputs_of(), []

    def seen(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        squares.append(query.double().unflatten(1, (key.shape[1], -1)).square().mean((0, 2, 3)))
        return attention(module, query, key, *args, **kwargs)

    with changed(name) as model:
        kept = weights(model)
        found = key_feedback(model, inputs)
        assert same(kept, model) and model.config._attn_implementation == "cpu_attn"
        hf.AttentionInterface.register("cpu_attn", seen)
        try:
            model(**inputs, use_cache=False)
        finally:
            adapter.enable()
    assert found.keys() == {0, 1}
    for factors, its in zip(found.values(), squares, strict=True):
        pairs = its.unflatten(-1, (2, -1)).mean(-2, keepdim=True).expand(-1, 2, -1).flatten(-2).numpy()
        if name in ("qwen3", "gemma3"):  # norms whose weights are those of all heads
            pairs = np.broadcast_to(pairs.mean(0), pairs.shape)
        assert factors.dtype == np.float32 and np.allclose(factors, error_feedback(pairs), atol=1e-4)


@pytest.mark.parametrize("kind", ["int8/auto", "int6/auto", "int5/auto"])
def test_pages_lose_less(kind: str) -> None:
    with changed("llama") as model:
        balance(model)
        inputs, factors = inputs_of(100, 16), key_feedback(model)
        want = model(**inputs, use_cache=False).logits
        lost = []
        for k_feedback in ({}, factors):
            cache = PagedCache(model.config, kind, k_feedback=k_feedback)
            lost.append(float((model(**inputs, **{CACHE: cache}).logits - want).square().mean()))
            repeated = copy.deepcopy(cache)
            repeated.batch_repeat_interleave(2)
            for layer in cache.layers:
                assert (layer.held.pages.k_feedback is None) == (not k_feedback)
        assert lost[1] < 0.95 * lost[0]


def factors_of(cache: Any) -> list[Any]:
    return [getattr(layer, "options", {}).get("k_feedback") for layer in cache.layers]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_balanced_model_s_caches_feed_errors_back(name: str) -> None:
    """With the factors of its queries as they are then, where keys are integers and rotated, until it is undone."""
    with changed(name) as model:
        config, cached = model.config, {"int4": True, "int6/auto": True, "auto/int4": False, "fp8_e4m3": False}
        before = key_feedback(model)
        assert factors_of(PagedCache(config, "int4")) == [None, None]
        balance(model)
        want = key_feedback(model)
        for kind, feeds in cached.items():
            found = factors_of(PagedCache(config, kind))
            for layer in (0, 1):
                assert (found[layer] is not None) == feeds
                assert not feeds or np.allclose(found[layer], want[layer], atol=1e-4)
        assert max(np.abs(before[i] - want[i]).max() for i in want) > 0.1
        for kind, rotation in (("fp8_e4m3", "hadamard"), ("auto/fp8_e5m2", "none/hadamard"), ("auto", "none")):
            assert PagedCache(config, kind).layers[0].options["kv_cache_rotation"] == rotation
        for options in ({"kv_cache_rotation": "none"}, {"kv_cache_rotation": "none/hadamard"}, {"k_feedback": {}}):
            assert factors_of(PagedCache(config, "int4", **options)) == [None, None]
        given = {1: np.zeros_like(want[1])}
        assert factors_of(PagedCache(config, "int4", k_feedback=given))[0] is None
        assert factors_of(PagedCache(copy.deepcopy(config), "int4")) == [None, None]
        inputs, kept = inputs_of(19), weights(model)
        cache = PagedCache(config, "int4")
        assert torch.isfinite(model(**inputs, **{CACHE: cache}).logits).all() and same(kept, model)
        np.testing.assert_array_equal(cache.layers[1].held.pages.k_feedback, factors_of(cache)[1])
        balance(model)
        assert factors_of(PagedCache(config, "int4")) == [None, None]
        assert PagedCache(config, "fp8_e4m3").layers[0].options["kv_cache_rotation"] == "none"


def test_factors_go_with_their_config() -> None:
    with changed("llama") as model:
        balance(model)
        assert id(model.config) in feedback._of_configs
        config = weakref.ref(model.config)
        known = id(model.config)
    del model
    gc.collect()
    assert config() is None and known not in feedback._of_configs


@pytest.mark.parametrize("architecture", ["bart", "gemma3n_text", "zamba2", "qwen3_next", "gemma4_text"])
def test_balanced_odd_models_write_into_caches(architecture: str) -> None:
    """Encoder-decoder models have a cache for what the encoder said; layers may share keys or modules, have states, or
    heads of their own: factors are of the layer's own sizes, or there are none."""
    model, given = of_sweep(architecture)
    model.set_attn_implementation("cpu_attn")
    with torch.no_grad():
        balance(model)
        caches = [PagedCache(model.config, "int8") for _ in range(2)]
        assert any(x is not None for x in factors_of(caches[0])) or architecture in WITHOUT
        cache = hf.EncoderDecoderCache(*caches) if model.config.is_encoder_decoder else caches[0]
        got, want = (model(**{**given, **more}).logits for more in ({CACHE: cache}, {"use_cache": False}))
    assert (got - want).abs().max() < 0.2 * want.abs().max()


def test_a_composite_model() -> None:
    """A cache may be made for the config of the whole or of its decoder."""
    model, _ = ODD["gemma4"]()
    balance(model)
    for config in (model.config, model.config.text_config):
        assert any(x is not None for x in factors_of(PagedCache(config, "int6")))


def test_refused() -> None:
    model = hf_models.model("llama")
    config, factors = model.config, np.zeros((2, 16, 16), np.float32)
    assert not any(f.any() for f in key_feedback(model, kv_cache_rotation="none").values())
    for given, error, words in (
        ({2: factors}, ValueError, "k_feedback: layer: 2 is outside 0..1"),
        ({"0": factors}, TypeError, "k_feedback: layer: "),
        ([factors], TypeError, "k_feedback: "),
        ({1: factors * np.nan}, ValueError, "k_feedback[1][0, 0, 0]: nan"),
        ({1: factors.astype(float)}, TypeError, "k_feedback[1]: dtype float64"),
        ({1: factors[0]}, ValueError, "k_feedback[1]: "),
    ):
        with pytest.raises(error, match="^" + re.escape(words)):
            PagedCache(config, "int4", k_feedback=given)
    with pytest.raises(ValueError, match=r"^k_feedback: applies to keys of integers"):
        PagedCache(config, k_feedback={0: factors})
    with pytest.raises(ValueError, match=r"^k_feedback: axis 1 is 15, expected head_size = 16"):
        model(**inputs_of(3), **{CACHE: PagedCache(config, "int4", k_feedback={0: factors[:, 1:, 1:]})})
    with pytest.raises(TypeError, match=r"^model: "):
        key_feedback("llama")
    with pytest.raises(ValueError, match=r"^kv_cache_rotation: "):
        key_feedback(model, kv_cache_rotation="fourier")
    with pytest.raises(ValueError, match=r"^model: no layer of Linear makes its keys; none of its modules"):
        key_feedback(torch.nn.Linear(3, 3), {"input": torch.zeros(3)})
