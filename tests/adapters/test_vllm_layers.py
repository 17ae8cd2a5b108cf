# SPDX-License-Identifier: Apache-2.0
"""One layer of cpu_attn.vllm, called as vLLM calls it with vLLM's own metadata and cache specs, against the float64
oracle; and the plugin, which stays away where it must."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integrations
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.attention.chunked_local_attention import (  # noqa: E402
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import CrossAttentionSpec  # noqa: E402

from cpu_attn import _adapters, reference  # noqa: E402
from cpu_attn._adapters import vllm_plugin  # noqa: E402
from cpu_attn.vllm import Backend  # noqa: E402

from ..models.vllm_steps import CONFIG, LAYER, Step  # noqa: E402

SLOPES = [0.5, 0.25, 0.0625, 0.125]
SINKS = [0.5, -1.0, 2.0, 0.0]


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": np.array(SLOPES)}),
    "window": ({"sliding_window": 6}, {"sliding_window": 6}),
    "softcap": ({"logits_soft_cap": 0.8}, {"softcap": 0.8}),
    "sinks": ({"sinks": torch.nn.Parameter(torch.tensor(SINKS))}, {"s_aux": np.array(SINKS)}),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_features(dtype: str, feature: str) -> None:
    options, wanted = FEATURES[feature]
    step = Step(dtype)
    assert step.error(step.attend(step.layer(**options), padding=5), step.expected(**wanted)) < 1


@pytest.mark.parametrize(("head_size", "head_size_v"), [(1, 1), (15, 15), (17, 17), (64, 64), (24, 16), (15, 33)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_head_size_and_block_size(dtype: str, head_size: int, head_size_v: int) -> None:
    step = Step(dtype, head_size, block_size=48, head_size_v=head_size_v)
    assert step.error(step.attend(step.layer()), step.expected()) < 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "least", "most"),
    [
        ("fp8", 0.025, 0.045),
        ("fp8_e5m2", 0.05, 0.09),
        ("int8_per_token_head", 0.004, 0.01),
        ("int4_per_token_head", 0.08, 0.15),
    ],
)
@pytest.mark.parametrize("head_size", [16, 33, 64])
def test_quantised_caches_are_near(kv_cache_dtype: str, least: float, most: float, head_size: int) -> None:
    """As near as their bits allow; tests/adapters/test_vllm.py compares them with rounded keys and values."""
    step = Step("bfloat16", head_size, kv_cache_dtype)
    error = step.error(step.attend(step.layer()), step.expected()) * reference.BUDGET["bfloat16"]
    assert least < error < most


@pytest.mark.parametrize(
    ("kv_cache_dtype", "said", "rotation"),
    [
        ("auto", "", "none"),
        ("fp8", "", "none"),
        ("int8_per_token_head", "", "hadamard"),
        ("int4_per_token_head", "none", "none"),
        ("fp8", "hadamard/none", "hadamard/none"),
    ],
)
def test_integers_are_rotated_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, said: str, rotation: str
) -> None:
    monkeypatch.setenv("CPU_ATTN_KV_CACHE_ROTATION", said)
    layer = Backend.get_impl_cls()(4, 16, 0.25, 2, kv_cache_dtype=kv_cache_dtype)
    assert layer.kv_cache_rotation == rotation


@pytest.mark.parametrize(
    ("kv_cache_dtype", "said", "feeds"),
    [("int4_per_token_head", "", True), ("int8_per_token_head", "none/hadamard", False), ("fp8", "hadamard", False)],
)
def test_errors_are_fed_back(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, said: str, feeds: bool) -> None:
    """Rotated keys of integers are stored otherwise, and values as before; the output is as near as before."""
    monkeypatch.setenv("CPU_ATTN_KV_CACHE_ROTATION", said)
    step = Step("float32", 64, kv_cache_dtype)
    outputs = []
    for weights in (None, np.geomspace(0.1, 10, 128).reshape(2, 64)):
        layer = step.layer()
        if weights is not None:
            layer.feed_back(weights)
        assert (layer.k_feedback is not None) == (feeds and weights is not None)
        outputs.append(step.attend(layer))
    assert torch.equal(*outputs) == (not feeds)
    errors = [step.error(output, step.expected()) for output in outputs]
    assert 0.5 < errors[1] / errors[0] < 2


def test_scales_of_fp8_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's scales: 4 takes values up to 1792 into an fp8 cache, and a plain one has none."""
    monkeypatch.setattr(LAYER, "_k_scale_float", 2.0)
    monkeypatch.setattr(LAYER, "_v_scale_float", 4.0)
    for kv_cache_dtype, most in (("fp8", 15), ("auto", 1)):
        step = Step("bfloat16", kv_cache_dtype=kv_cache_dtype)
        step.values = [x * 500 for x in step.values]
        assert step.error(step.attend(step.layer()), step.expected()) < most


def test_causal_by_request() -> None:
    step, flags = Step(), [True, False, True, False]
    output = step.attend(step.layer(), causal=torch.tensor(flags))
    assert step.error(output, step.expected(dynamic_causal=np.array(flags, np.int32))) < 1


def test_not_causal() -> None:
    step = Step()
    assert step.error(step.attend(step.layer(), causal=False), step.expected(causal=False)) < 1


def test_image_tokens_see_one_another() -> None:
    step, ranges = Step(), {1: [(5, 8), (0, 3)], 2: [(13, 30)]}
    output = step.attend(step.layer(sliding_window=4), mm_req_doc_ranges=ranges)
    ascending = {r: sorted(x) for r, x in ranges.items()}
    assert step.error(output, step.expected(sliding_window=4, mm_prefix_range=ascending)) < 1


def test_image_tokens_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gemma 4 layer says so of itself; the metadata is that of all layers."""
    monkeypatch.setattr(LAYER, "mm_prefix_clamp_sliding_window", True, raising=False)
    step, ranges = Step(), {1: [(0, 8)], 2: [(13, 30)]}
    output = step.attend(step.layer(sliding_window=4), mm_req_doc_ranges=ranges)
    wanted = step.expected(sliding_window=4, mm_prefix_range=ranges, mm_prefix_clamp_sliding_window=True)
    assert step.error(output, wanted) < 1


def test_chunked_local_attention() -> None:
    """vLLM's own wrapper around our backend: the chunks of a request become requests."""
    step = Step()
    backend = create_chunked_local_attention_backend(Backend, 16)
    output = step.attend(step.layer(backend), backend=backend)
    chunks = {r: list(range(0, int(n), 16)) for r, n in enumerate(step.seq_lens)}
    assert step.error(output, step.expected(document_start_loc=chunks)) < 1


def test_cross_attention() -> None:
    """vLLM's own wrapper around our backend. Requests 1 and 2 are new and bring their encoder's tokens along; the
    others' lie in the cache since an earlier step."""
    step = Step()
    backend = create_cross_attention_backend(Backend)
    impl, spec = step.layer(backend, attn_type=AttentionType.ENCODER_DECODER), step.spec(CrossAttentionSpec)
    cache = step.cache(spec)
    new = np.array([False, True, True, False])
    for r in np.flatnonzero(~new):
        impl.do_kv_cache_update(
            LAYER, step.keys[r], step.values[r], cache, step.slots(r, torch.arange(len(step.keys[r])))
        )
    text = np.where(new, step.query_lens, step.query_lens + 11)
    common = step.common(
        seq_lens=torch.tensor(text, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(text, dtype=torch.int32),
        encoder_seq_lens=torch.tensor(step.seq_lens, dtype=torch.int32),
        encoder_seq_lens_cpu=step.seq_lens.astype(np.int32),
    )
    metadata = backend.get_builder_cls()(spec, ["layer"], CONFIG, torch.device("cpu")).build(0, common)
    key, value = (torch.cat([x[r] for r in np.flatnonzero(new)]) for x in (step.keys, step.values))
    output = impl.forward(LAYER, step.query, key, value, cache, metadata, torch.empty_like(step.query))
    assert step.error(output, step.expected(causal=False)) < 1


def test_layers_that_differ_share_metadata() -> None:
    """One plan for each kind of layer."""
    step = Step()
    metadata = Backend.get_builder_cls()(step.spec(), ["a", "b", "c"], CONFIG, torch.device("cpu")).build(
        0, step.common()
    )
    cache = step.cache(step.spec())
    for window in (None, 6, 6):
        impl = step.layer(sliding_window=window)
        for r, (key, value) in enumerate(zip(step.keys, step.values, strict=True)):
            impl.do_kv_cache_update(LAYER, key, value, cache, step.slots(r, torch.arange(len(key))))
        output = impl.forward(LAYER, step.query, None, None, cache, metadata, torch.empty_like(step.query))
        assert step.error(output, step.expected(sliding_window=window or -1)) < 1
    assert len(metadata.plans) == 2


def test_warm_up() -> None:
    step = Step()
    output = torch.full_like(step.query, 7.0)
    assert step.layer().forward(LAYER, step.query, None, None, None, None, output) is output
    assert not output.any()


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_no_quantised_output(name: str) -> None:
    step = Step()
    with pytest.raises(NotImplementedError, match=name):
        step.layer().forward(LAYER, step.query, None, None, None, None, step.query, **{name: torch.ones(1)})


@pytest.mark.parametrize(("shape", "head_size"), [((4, 2, 16, 30), 15), ((4, 2, 8, 32), 16), ((4, 2, 16, 31), 16)])
def test_pages_that_do_not_fit(shape: tuple[int, ...], head_size: int) -> None:
    """As vLLM would allocate them for a backend that does not say what it needs."""
    step = Step("bfloat16", head_size)
    before = torch.full(shape, 3, dtype=torch.bfloat16)
    cache = before.clone()
    with pytest.raises(ValueError, match=rf"kv_cache: blocks of {shape[2]} tokens times {shape[3]} elements"):
        step.layer().do_kv_cache_update(LAYER, step.keys[0], step.values[0], cache, torch.arange(40))
    assert (cache == before).all()


def test_a_layer_whose_cache_moves() -> None:
    """A layer keeps how its cache is split, for as long as that is the one that it is given."""
    step = Step()
    layer, spec = step.layer(), step.spec()
    caches = [step.cache(spec) for _ in range(2)]
    for token, cache in enumerate((caches[0], caches[1], caches[0])):
        before = cache.clone()
        layer.do_kv_cache_update(LAYER, step.keys[0], step.values[0], cache, torch.tensor([16 + token]))
        assert not torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


def test_what_is_refused() -> None:
    step = Step()
    with pytest.raises(ValueError, match="kv_cache_dtype: 'nvfp4' is none of"):
        step.layer(kv_cache_dtype="nvfp4")
    with pytest.raises(TypeError, match="kv_cache_dtype: expected a name, got list"):
        step.layer(kv_cache_dtype=["auto"])
    assert Backend.supports_kv_cache_dtype("fp8_e5m2") and not Backend.supports_kv_cache_dtype("nvfp4")
    builder, cpu = Backend.get_builder_cls(), torch.device("cpu")
    with pytest.raises(NotImplementedError, match="rswa_prefix_lens"):
        builder(step.spec(), ["layer"], CONFIG, cpu).build(0, step.common(rswa_prefix_lens=torch.ones(4)))
    transfer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector"))
    with pytest.raises(NotImplementedError, match="kv_connector: NixlConnector"):
        builder(step.spec(), ["layer"], transfer, cpu)


# ---- the plugin ----


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's backend as it is without us, and afterwards again."""
    monkeypatch.delenv("CPU_ATTN_VLLM", raising=False)
    monkeypatch.setattr(current_platform, "__class__", CpuPlatform)
    AttentionBackendEnum.CPU_ATTN.clear_override()
    yield AttentionBackendEnum.CPU_ATTN.get_class()
    AttentionBackendEnum.CPU_ATTN.clear_override()


def test_the_plugin_is_one_of_vllms(own: Any) -> None:
    from vllm.plugins import load_plugins_by_group

    load_plugins_by_group("vllm.general_plugins")["cpu_attn"]()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is Backend is not own
    assert isinstance(current_platform, CpuPlatform) and isinstance(current_platform, vllm_plugin.MLAPlatform)


def test_it_can_be_turned_off(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_ATTN_VLLM", "0")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is own and type(current_platform) is CpuPlatform


def test_it_stays_away_from_gpus(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(_adapters, "missing", lambda name: pytest.fail("asked for versions"))
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is own


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Any:
    """What the plugin logs."""
    logger = logging.getLogger("vllm.plugins.cpu_attn")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_an_older_version_is_left_alone(own: Any, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setitem(_adapters.TESTED, "vllm", ("0.40", "0.41"))
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is own
    (record,) = said.records
    assert record.levelname == "WARNING"
    assert f"vllm is {_adapters.version('vllm')}" in record.getMessage() and ">=0.40,<0.41" in record.getMessage()


def test_a_newer_version_is_taken(own: Any, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setitem(_adapters.TESTED, "vllm", ("0.20", "0.21"))
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is Backend is not own
    assert [record.levelname for record in said.records if record.levelname != "INFO"] == []


def test_a_newer_version_that_the_backend_does_not_fit(own: Any, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setitem(_adapters.TESTED, "vllm", ("0.20", "0.21"))
    monkeypatch.setattr(vllm_plugin, "BACKEND", "cpu_attn.vllm.Gone")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is own
    (record,) = said.records
    assert record.levelname == "WARNING"
    found = f"vllm is {_adapters.version('vllm')}, newer than"
    assert found in record.getMessage() and "has no attribute 'Gone'" in record.getMessage()
