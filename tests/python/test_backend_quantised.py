# SPDX-License-Identifier: Apache-2.0
"""kv_cache_dtype and scales of a layer of the backend: that calls get them, and what is read from bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_attn import PagedAttention
from cpu_attn.backend import attention_metadata, paged_attention
from cpu_attn.backend import layer as layer_module

from ..cases.formats import DTYPES, quantised
from ..harness.backend_steps import MIXED, Step, layer
from ..python.test_arrays import Capsule
from ..python.test_backend import PAGED


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
@pytest.mark.parametrize(
    "kind", [float, np.float32, lambda x: np.array(x, np.float32), lambda x: Capsule(np.array(x, np.float32))]
)
def test_scales_reach_the_calls(name: str, kind: Any) -> None:
    step = Step(*MIXED)
    arrays = (step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.check(layer().forward(SimpleNamespace(**{name: kind(1.0)}), *arrays))
    step.check(layer().forward(None, *arrays))
    with pytest.raises(ValueError, match=f"{name[1:]}: -2.0 is not a positive"):
        layer(kv_cache_dtype="fp8").forward(SimpleNamespace(**{name: kind(-2.0)}), *arrays)


def test_kv_cache_dtype_reaches_the_calls() -> None:
    step = Step(*MIXED)
    step.check(step.forward(layer(kv_cache_dtype="float32")))
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int3'"):
        step.forward(layer(kv_cache_dtype="int3"))
    lens = [3, 4]  # an encoder quantises nothing
    step = Step(lens, lens, 2, causal=False)
    step.check(step.forward(layer(attn_type="encoder_only", kv_cache_dtype="int3")))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "scales"),
    [
        ("fp8_e4m3", (0.5, 0.25)),
        ("fp8/auto", (0.5, 1.0)),
        ("int8/fp8_e5m2", (1.0, 0.25)),
        ("auto", (1.0, 1.0)),
        ("int4", (1.0, 1.0)),
    ],
)
def test_each_call_gets_scales_and_cache_dtype(
    kv_cache_dtype: str, scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a quantised cache will need, recorded and replaced by what a plain one takes. Scales are those of fp8; a
    checkpoint has others, too."""
    seen = []

    def spy(call: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(call)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            bound = parameters.bind(*args, **kwargs)
            given = bound.arguments
            scales = given["scales"] if "scales" in given else (given.get("k_scale"), given.get("v_scale"))
            seen.append((call.__name__, given.get("kv_cache_dtype"), *scales))
            plain = {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0, "scales": (1.0, 1.0)}
            given.update({name: x for name, x in plain.items() if name in given})
            return call(*bound.args, **bound.kwargs)

        return replaced

    for module, name in (
        (paged_attention, "reshape_and_cache"),
        (attention_metadata, "get_scheduler_metadata"),
        (layer_module, "run_attention"),
    ):
        monkeypatch.setattr(module, name, spy(getattr(module, name)))
    step = Step(*MIXED, layout="pair")
    seen.clear()
    quantised = SimpleNamespace(_k_scale=0.5, _v_scale=np.array(0.25))
    arrays = (step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.check(layer(kv_cache_dtype=kv_cache_dtype).forward(quantised, *arrays))
    assert seen == [
        ("get_scheduler_metadata", kv_cache_dtype, None, None),
        ("run_attention", None, *scales),  # only its checks
        ("reshape_and_cache", kv_cache_dtype, *scales),
        ("run_attention", None, *scales),
    ]


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache(paged: type[PagedAttention], layout: str, dtype: str, kv_cache_dtype: str) -> None:
    """A step over a cache of bytes, as vLLM allocates it; the oracle sees what the bytes say."""
    step, scales = Step(*MIXED, dtype=dtype, layout=layout), (0.0625, 0.25)
    step.kv_cache = (
        tuple(np.full(c.shape, 0xFF, np.uint8) for c in step.kv_cache)
        if layout == "pair"
        else np.full(step.kv_cache.shape, 0xFF, np.uint8)
    )
    caches = paged.split_kv_cache(step.kv_cache, 2, 16, kv_cache_dtype)
    rows = [np.concatenate(x) for x in (step.keys, step.values, step.slots)]
    rows[2][np.isin(rows[2], step.slot_mapping)] = -1  # the step's own tokens are the layer's to write
    paged.write_to_paged_cache(rows[0], rows[1], *caches, rows[2], kv_cache_dtype, *scales)
    scaled = SimpleNamespace(_k_scale=np.array(scales[0], np.float32), _v_scale=scales[1])
    impl = layer(paged, kv_cache_dtype=kv_cache_dtype)
    output = impl.forward(scaled, step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.keys, step.values = (
        [quantised(x, kv_cache_dtype, scale).astype(np.float64) * scale for x in xs]
        for xs, scale in ((step.keys, scales[0]), (step.values, scales[1]))
    )
    step.check(output)
