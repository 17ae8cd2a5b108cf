# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.transformers.key_feedback: its factors are those of the model's queries, and pages lose less by them."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.rotation import error_feedback  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.transformers import PagedCache, balance, key_feedback  # noqa: E402
from cpu_attn.transformers.attention import attention  # noqa: E402

from .test_transformers_balance import changed, same, weights  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()


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
        for k_feedback in (None, factors):
            cache = PagedCache(model.config, kind, k_feedback=k_feedback)
            lost.append(float((model(**inputs, **{CACHE: cache}).logits - want).square().mean()))
            repeated = copy.deepcopy(cache)
            repeated.batch_repeat_interleave(2)
            for layer in cache.layers:
                assert (layer.held.pages.k_feedback is None) == (k_feedback is None)
        assert lost[1] < 0.95 * lost[0]


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
