# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.vllm in the real engine: transformers' tokens, whatever vLLM does with its cache meanwhile.

The engines run one after the other in a process of their own (vllm_harness.py), where vLLM's own attention cannot run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integrations
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm")

from cpu_attn.rotation import error_feedback  # noqa: E402

from ..models import gemma_texts, vllm_harness  # noqa: E402
from ..models.vllm_harness import generated  # noqa: E402

QUANTISED = ("fp8", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head")
GENERATE = {
    "llama": ["decoder auto -1"],
    "qwen3": ["decoder auto -1"],
    "mistral": ["decoder auto 24"],
    "gemma2": ["decoder auto -1", "decoder auto 24"],
    "bloom": ["decoder auto -1"],
    "odd": ["decoder auto -1"],
    "gpt_oss": ["decoder auto -1", "decoder auto 24"],
    "llama4": ["decoder auto -1"],
    "gemma3": ["decoder auto -1", "decoder auto 24"],
    "deepseek_v2": ["mla auto -1"],
    "deepseek_v3": ["mla auto -1"],
}
# The eight requests want 32 blocks, and prompts have up to 70 tokens.
TIGHT = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 48}
BALANCED_INT4 = {"load_format": "cpu_attn_balanced", "kv_cache_dtype": "int4_per_token_head"}

Job = dict[str, Any]
JOBS: dict[str, Job] = {
    **{name: {"model": name, **TIGHT} for name in GENERATE},
    **{f"{name} reference": {"kind": "reference", "model": name} for name in GENERATE},
    **{kv: {"model": "llama", "kv_cache_dtype": kv} for kv in QUANTISED},
    **{f"{kv} reference": {"kind": "reference", "model": "llama", "kv_cache_dtype": kv} for kv in QUANTISED},
    "fp8 latents": {"model": "deepseek_v3", "kv_cache_dtype": "fp8"},
    "fp8 latents reference": {"kind": "reference", "model": "deepseek_v3", "kv_cache_dtype": "fp8"},
    "compiled latents": {"model": "deepseek_v2", "enforce_eager": False},
    "balanced": {"model": "qwen3", "load_format": "cpu_attn_balanced", **TIGHT},
    "balanced int4": {"model": "qwen3", **BALANCED_INT4},
    "balanced projections": {"model": "qwen2", "load_format": "cpu_attn_balanced", **TIGHT},
    "balanced projections int4": {"model": "qwen2", **BALANCED_INT4},
    "balanced projections int4 adapters": {"model": "qwen2", **BALANCED_INT4, "enable_lora": True},
    "qwen2 reference": {"kind": "reference", "model": "qwen2"},
    "qwen2 squares": {"kind": "squares", "model": "qwen2"},
    "balanced experts": {"model": "llama4", **BALANCED_INT4},
    "balanced window": {"model": "mistral", "load_format": "cpu_attn_balanced"},
    "bfloat16": {"model": "llama", "dtype": "bfloat16"},
    "compiled": {"model": "llama", "enforce_eager": False},
    "two processes": {"model": "llama", "tensor_parallel_size": 2},
    "bert": {
        **{"model": "bert", "runner": "pooling", "convert": "embed", "enable_prefix_caching": False},
        "pooler_config": {"pooling_type": "CLS", "use_activation": False},
    },
    # With an encoder vLLM takes prompts whole, and finds none in the cache.
    "whisper": {"model": "whisper", "num_gpu_blocks_override": 40, "max_num_batched_tokens": 128},
    "whisper reference": {"kind": "reference", "model": "whisper"},
    "bert reference": {"kind": "embedded", "model": "bert"},
    vllm_harness.REAL: {
        **{"model": vllm_harness.REAL, "texts": gemma_texts.PROMPTS, "new_tokens": len(gemma_texts.TOKENS[0])},
        **{"max_model_len": 1024, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 1 << 28},
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a job found."""
    return vllm_harness.run_jobs(JOBS, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("name", GENERATE)
def test_tokens_with_a_cache_too_small(results: Callable[[str], Any], name: str) -> None:
    """Continuous batches, chunked prefill, prefixes found in the cache, requests thrown out of it and resumed."""
    result = results(name)
    assert generated(result, GENERATE[name]) == results(f"{name} reference")
    assert result["preempted"] > 0 and result["cached"] > 0


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_caches(results: Callable[[str], Any], name: str) -> None:
    """Against keys and values rounded as the cache rounds them. One that lies between two of its numbers may go either
    way, and a token with it: one request of eight may differ."""
    tokens = generated(results(name), [f"decoder {name} -1"])
    equal = [a == b for a, b in zip(tokens, results(f"{name} reference"), strict=True)]
    plain = [a == b for a, b in zip(tokens, results("llama reference"), strict=True)]
    assert sum(equal) >= 7 and sum(plain) <= 4


def test_balanced_norms(results: Callable[[str], Any]) -> None:
    """The tokens are those of the weights that were read, and a rotary pair, D / 2 apart, has queries and keys of one
    size: a step of either, alone, would change tokens."""
    assert generated(results("balanced"), ["decoder auto -1"]) == results("qwen3 reference")
    plain, balanced = (results(name)["norms"] for name in ("qwen3", "balanced"))
    assert len(plain) == 4 and plain.keys() == balanced.keys()
    for name in (name for name in plain if name.endswith("q_norm.weight")):
        before, after = ([np.array(x[n]) for n in (name, name.replace("q_norm", "k_norm"))] for x in (plain, balanced))
        np.testing.assert_allclose(after[0] * after[1], before[0] * before[1], rtol=1e-5)
        sizes = [np.hypot(*np.split(x, 2)) for x in (*before, *after)]
        assert np.ptp(np.log(sizes[1] / sizes[0])) > 1
        np.testing.assert_allclose(sizes[2], sizes[3], rtol=1e-4)


def test_balanced_layers_feed_errors_back(results: Callable[[str], Any]) -> None:
    """Keys of integers, by the weights of the queries' norm; channels of a rotary pair count alike, and so do heads."""
    assert not any(results(name)["feedback"] for name in ("qwen3", "balanced", "int4_per_token_head"))
    found = results("balanced int4")
    assert len(found["feedback"]) == 2
    for name, table in found["feedback"].items():
        squares = np.square(found["norms"][name.replace("attn.attn", "attn.q_norm.weight")]).reshape(2, -1)
        pairs = np.tile(squares.mean(0), 2)
        np.testing.assert_allclose(table, [error_feedback(pairs[None])[0]] * len(table), atol=1e-4)
        assert np.abs(table).max() > 0.1
    assert len(generated(found, ["decoder int4_per_token_head -1"])) == 8


def test_balanced_projections(results: Callable[[str], Any]) -> None:
    """The tokens are those of the weights that were read, with biases, groups of heads and windows."""
    assert generated(results("balanced projections"), ["decoder auto -1"]) == results("qwen2 reference")
    assert generated(results("balanced window"), ["decoder auto 24"]) == results("mistral reference")


@pytest.mark.parametrize("balanced", [True, False])
def test_projections_feed_errors_back(results: Callable[[str], Any], balanced: bool) -> None:
    """Keys of integers, by the queries' squares, those of a rotary pair alike. Balanced ones are as large as keys, and
    their product stays; beside adapters they are as they were read."""
    found = results("balanced projections int4" if balanced else "balanced projections int4 adapters")
    assert len(generated(found, ["decoder int4_per_token_head -1"])) == 8
    assert len(found["feedback"]) == 2
    for name, both in zip(sorted(found["feedback"]), results("qwen2 squares"), strict=True):
        query, key = (np.tile(np.reshape(x, (2, 2, 8)).mean(1), 2) for x in both)
        assert np.ptp(np.log(key / query), axis=1).min() > 1
        tables = {True: error_feedback(np.sqrt(query * key)), False: error_feedback(query)}
        assert np.abs(tables[True] - tables[False]).max() > 0.1
        np.testing.assert_allclose(found["feedback"][name], tables[balanced], atol=1e-5)


def test_experts_feed_errors_back(results: Callable[[str], Any]) -> None:
    """They run only when vLLM has packed their weights."""
    found = results("balanced experts")
    assert len(generated(found, ["decoder int4_per_token_head -1"])) == 8
    assert len(found["feedback"]) == 2


def test_fp8_latents(results: Callable[[str], Any]) -> None:
    """Against latents rounded as the cache rounds them; as above one request may differ."""
    tokens = generated(results("fp8 latents"), ["mla fp8 -1"])
    equal, plain = (
        [a == b for a, b in zip(tokens, results(f"{name} reference"), strict=True)]
        for name in ("fp8 latents", "deepseek_v3")
    )
    assert sum(equal) >= 7 and sum(plain) <= 4


def test_bfloat16(results: Callable[[str], Any]) -> None:
    """Rounded everywhere: the first tokens, which depend on prompts alone, are those of float32."""
    tokens = generated(results("bfloat16"), ["decoder auto -1"])
    assert [t[0] for t in tokens] == [t[0] for t in results("llama reference")]


def test_compiled(results: Callable[[str], Any]) -> None:
    """As vLLM runs where nobody says otherwise: the model goes through torch.compile, after a warm-up."""
    assert generated(results("compiled"), ["decoder auto -1"]) == results("llama reference")
    assert generated(results("compiled latents"), ["mla auto -1"]) == results("deepseek_v2 reference")


def test_tensor_parallel(results: Callable[[str], Any]) -> None:
    assert generated(results("two processes"), ["decoder auto -1"], processes=2) == results("llama reference")


def test_cross_attention(results: Callable[[str], Any]) -> None:
    """Sounds differ by request, and requests are thrown out of the cache and resumed."""
    result = results("whisper")
    assert generated(result, ["decoder auto -1", "encoder_decoder auto -1"]) == results("whisper reference")
    assert result["preempted"] > 0


def test_real_weights(results: Callable[[str], Any]) -> None:
    """Gemma 3 270M: the tokens of transformers' eager attention, the longest prompt in three chunks."""
    tokens = generated(results(vllm_harness.REAL), ["decoder auto -1", "decoder auto 512"])
    assert tokens == [list(t) for t in gemma_texts.TOKENS]


def test_encoder_only(results: Callable[[str], Any]) -> None:
    result = results("bert")
    assert "error" not in result, result["error"]
    assert list(result["calls"][0]) == ["encoder_only auto -1"]
    np.testing.assert_allclose(result["embeddings"], results("bert reference"), atol=1e-4)
